"""Which sequence holds which pages: the page table, the lengths, sharing and copy-on-write."""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from kvattn.counting import TokenCounts, listed, non_negative, positive, token_counts, whole
from kvattn.errors.cache_kinds import (
    BatchFullError,
    CaptureError,
    DuplicateSequenceError,
    NotReservedError,
    OutOfPagesError,
    PrefixLengthError,
    ReorderError,
    SequenceTooLongError,
    TruncateLengthError,
    UnknownSequenceError,
)
from kvattn.pages import PagePool

_SLICE_CELLS = 4096  # up to here one slice is sent faster than single cells are addressed


class CacheView(NamedTuple):
    """What an attention call needs to know of some sequences, in their order.

    Attributes:
        page_table: int32, shape (batch, max_pages_per_seq).
        cache_seqlens: int32, shape (batch,).
    """

    page_table: Tensor
    cache_seqlens: Tensor


class PageTables:
    """The books of a paged cache: rows of pages for sequences, in tensors at fixed addresses.

    It owns no keys and values; `PagedKVCache` adds them. A sequence is known by the number of its
    row. Rows of sequences that share a prefix name the same pages until one of them writes.

    Args:
        num_pages: pages in the pool: the hard limit for all sequences together.
        page_size: tokens per page; any positive number.
        max_batch: rows of the page table: the most sequences alive at a time.
        max_pages_per_seq: columns of the page table; None means num_pages.
        device: where the page table and the lengths live.

    Raises:
        CacheSizeError: a size is not a positive integer.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_batch: int = 8,
        max_pages_per_seq: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        columns = num_pages if max_pages_per_seq is None else max_pages_per_seq
        self.num_pages = positive("num_pages", num_pages)
        self.page_size = positive("page_size", page_size)
        self.max_batch = positive("max_batch", max_batch)
        self.max_pages_per_seq = positive("max_pages_per_seq", columns)
        self.device = torch.device(device)
        # An inference tensor could not be written outside inference mode later.
        with torch.inference_mode(False):
            self._table = _Mirror((max_batch, columns), self.device)
            self._lengths = _Mirror((max_batch,), self.device)
        self._pool = PagePool(num_pages)
        self._live: dict[int, _Sequence] = {}
        self._free_rows = list(range(max_batch))  # a heap: low rows first

    @property
    def page_table(self) -> Tensor:
        """int32, shape (max_batch, max_pages_per_seq), unused entries -1; a fixed address."""
        return self._table.tensor

    @property
    def lengths(self) -> Tensor:
        """Committed tokens per row: int32, shape (max_batch,), -1 where no sequence lives."""
        return self._lengths.tensor

    @overload
    def allocate(self) -> int: ...

    @overload
    def allocate(self, count: int) -> list[int]: ...

    def allocate(self, count: int | None = None) -> int | list[int]:
        """Starts one empty sequence and returns its id, or ``count`` of them and a list of ids.

        Ids are the lowest free rows. No page is taken before ``reserve``.

        Raises:
            BatchFullError: fewer than ``count`` rows are free; nothing is changed.
        """
        wanted = 1 if count is None else non_negative("count", count)
        self._begin(wanted)
        seqs = [self._add(_Sequence()) for _ in range(wanted)]
        self._flush()
        return seqs[0] if count is None else seqs

    def fork(self, seq: int) -> int:
        """Starts a sequence with the same tokens as ``seq``, in the same pages; returns its id."""
        return self.share(seq, self.length(seq))

    def share(self, seq: int, tokens: int) -> int:
        """Starts a sequence with the first ``tokens`` tokens of ``seq``; returns its id.

        No memory is copied: if the prefix ends inside a page, the page is copied by the first
        ``reserve`` of a sequence that holds it.

        Raises:
            UnknownSequenceError: ``seq`` is not alive.
            PrefixLengthError: ``seq`` has fewer than ``tokens`` tokens.
            BatchFullError: no row is free.
        """
        parent, tokens = self._get(seq), non_negative("tokens", tokens)
        if tokens > parent.length:
            raise PrefixLengthError("tokens", tokens, f"0 to {parent.length}")
        self._begin(1)
        child = self._add(self._prefix(parent, tokens))
        self._flush()
        return child

    def free(self, seqs: int | Iterable[int]) -> None:
        """Ends one or more sequences; pages that no other sequence holds become free.

        Raises:
            UnknownSequenceError, DuplicateSequenceError: nothing is freed.
        """
        ended = self._distinct("seqs", listed(seqs))
        self._begin()
        for seq in ended:
            pages = self._live.pop(seq).pages
            self._pool.drop(pages)
            self._table.write(seq * self.max_pages_per_seq, [-1] * len(pages))
            self._lengths.write(seq, (-1,))
            heapq.heappush(self._free_rows, seq)
        self._flush()

    def reset(self) -> None:
        """Ends every sequence. Tensors keep their addresses."""
        self.free(self.sequences)

    def reorder(self, indices: Sequence[int] | Tensor, seqs: Sequence[int] | None = None) -> None:
        """Sequence ``seqs[i]`` goes on with the tokens of ``seqs[indices[i]]`` (beam search).

        Args:
            indices: one position in ``seqs`` for each of them; an integer tensor is read back.
            seqs: the sequences concerned; None means all live ones in ascending order.

        Raises:
            ReorderError, UnknownSequenceError, DuplicateSequenceError: nothing is changed.
        """
        rows = self.sequences if seqs is None else self._distinct("seqs", listed(seqs))
        given = listed(indices)
        order = [i for i in map(whole, given) if i is not None and 0 <= i < len(rows)]
        if not len(order) == len(given) == len(rows):
            raise ReorderError("indices", given, f"{len(rows)} positions below {len(rows)}")
        self._begin()
        moved = [(seq, rows[i]) for seq, i in zip(rows, order, strict=True) if seq != rows[i]]
        after = {seq: self._prefix(self._live[src], self.length(src)) for seq, src in moved}
        for seq, sequence in after.items():
            before, self._live[seq] = self._live[seq], sequence
            self._pool.drop(before.pages)
            self._write_row(seq, 0, len(before.pages))
        self._flush()

    def reserve(self, new: TokenCounts) -> None:
        """Makes room behind each sequence, and makes that room its own.

        Afterwards the slots of the next ``n`` tokens exist and no other sequence holds them: pages
        are taken, and a partly filled page that is shared is copied in all layers. Reserving what
        is there already does nothing. Either all sequences get their room or nothing changes.

        Args:
            new: the number of coming tokens by sequence, as a mapping or as pairs.

        Raises:
            OutOfPagesError: the pool has fewer free pages than needed.
            SequenceTooLongError: a sequence needs more than max_pages_per_seq pages.
            UnknownSequenceError, DuplicateSequenceError, TokenCountError: ``new`` is malformed.
        """
        size, refs = self.page_size, self._pool.refs
        growing: dict[int, int] = {}
        for seq, count in self._counts(new):
            sequence = self._live[seq]
            pages, length = sequence.pages, sequence.length
            end = length + count
            if end > len(pages) * size or (
                count and length % size and refs[pages[length // size]] > 1
            ):
                growing[seq] = end
        if growing:
            self._begin()
            self._grow(growing)
            self._flush()

    def commit(self, new: TokenCounts) -> None:
        """Counts tokens that have been written to reserved slots as part of their sequences.

        Raises:
            NotReservedError: more tokens than ``reserve`` made room for; nothing is changed.
            UnknownSequenceError, DuplicateSequenceError, TokenCountError: ``new`` is malformed.
        """
        ends: list[tuple[int, _Sequence, int]] = []
        for seq, count in self._counts(new):
            sequence = self._live[seq]
            end = sequence.length + count
            self._within_pages("new", sequence, end)
            ends.append((seq, sequence, end))
        self._begin()
        for seq, sequence, end in ends:
            sequence.length = end
            self._lengths.write(seq, (end,))
        self._flush()

    def truncate(self, seq: int, length: int) -> None:
        """Drops the tokens of ``seq`` from ``length`` on, and every page without tokens.

        Undoes speculation: rejected tokens are forgotten, reserved room is given back.

        Raises:
            UnknownSequenceError: ``seq`` is not alive.
            TruncateLengthError: the sequence is shorter than ``length``.
        """
        seq, length = self._id(seq), non_negative("length", length)
        sequence = self._live[seq]
        if length > sequence.length:
            raise TruncateLengthError("length", length, f"0 to {sequence.length}")
        self._begin()
        kept, held = self._pages_for(length), len(sequence.pages)
        self._pool.drop(sequence.pages[kept:])
        del sequence.pages[kept:]
        sequence.length = length
        self._write_row(seq, kept, held)
        self._flush()

    @property
    def sequences(self) -> list[int]:
        """The ids of the live sequences, ascending."""
        return sorted(self._live)

    def length(self, seq: int) -> int:
        """The number of committed tokens of ``seq``, without asking the device."""
        return self._get(seq).length

    def pages(self, seq: int) -> tuple[int, ...]:
        """The pages that ``seq`` holds, in the order of its tokens."""
        return tuple(self._get(seq).pages)

    def view(self, seqs: Sequence[int]) -> CacheView:
        """The page table and the lengths of ``seqs``, as the attention calls take them.

        Ids in a row (3, 4, 5) give slices of ``page_table`` and ``lengths``: fixed addresses, no
        copy, and later changes show. Other ids give copies of this moment.
        """
        ids = [self._id(seq) for seq in listed(seqs)]
        first = ids[0] if ids else 0
        if all(seq == first + i for i, seq in enumerate(ids)):
            rows = slice(first, first + len(ids))
            return CacheView(self.page_table[rows], self.lengths[rows])
        picked = torch.tensor(ids, device=self.device)
        return CacheView(self.page_table[picked], self.lengths[picked])

    def slots(self, seq: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Where tokens ``start .. stop - 1`` of ``seq`` lie: int64 ``page * page_size + offset``.

        ``stop`` defaults to the length; reserved slots beyond it may be asked for, and are what
        ``slot_mapping`` takes.

        Raises:
            UnknownSequenceError: ``seq`` is not alive.
            NotReservedError: the range leaves the pages of ``seq``.
        """
        seq = self._id(seq)
        sequence = self._live[seq]
        stop = sequence.length if stop is None else non_negative("stop", stop)
        if non_negative("start", start) > stop:
            raise NotReservedError("start", start, f"0 to {stop}")
        self._within_pages("stop", sequence, stop)
        tokens = torch.arange(start, stop, device=self.device)
        pages = self.page_table[seq, tokens // self.page_size].long()
        return pages * self.page_size + tokens % self.page_size

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, seq: object) -> bool:
        return whole(seq) in self._live

    def _copy_pages(self, originals: Sequence[int], copies: Sequence[int]) -> None:
        """Called when shared pages are about to be written; whoever has memory copies it."""

    def _id(self, seq: int) -> int:
        """The id of a live sequence as a plain integer."""
        row = whole(seq)
        if row is None or row not in self._live:
            raise UnknownSequenceError("seq", repr(seq), f"one of {self.sequences}")
        return row

    def _get(self, seq: int) -> _Sequence:
        return self._live[self._id(seq)]

    def _distinct(self, name: str, seqs: Sequence[int]) -> list[int]:
        rows = [self._id(seq) for seq in seqs]
        if len(set(rows)) != len(rows):
            raise DuplicateSequenceError(name, rows, "each id once")
        return rows

    def _counts(self, new: TokenCounts) -> list[tuple[int, int]]:
        """New tokens of live sequences, by ids in plain integers."""
        counts = token_counts(new)
        rows = self._distinct("new", [seq for seq, _ in counts])
        return list(zip(rows, (tokens for _, tokens in counts), strict=True))

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _within_pages(self, name: str, sequence: _Sequence, end: int) -> None:
        room = len(sequence.pages) * self.page_size
        if end > room:
            raise NotReservedError(name, f"token {end - 1}", f"tokens below {room}")

    def _begin(self, rows: int = 0) -> None:
        """Everything that can still refuse a change, before any of it is made."""
        if self.page_table.is_cuda and torch.cuda.is_current_stream_capturing():
            raise CaptureError("cache", "a change under capture", "changes before or after it")
        if rows > len(self._free_rows):
            free = f"{len(self._free_rows)} of {self.max_batch} rows free"
            raise BatchFullError("count", f"{rows} more sequences", free)

    def _flush(self) -> None:
        self._table.flush()
        self._lengths.flush()

    def _add(self, sequence: _Sequence) -> int:
        seq = heapq.heappop(self._free_rows)
        self._live[seq] = sequence
        self._write_row(seq, 0, 0)
        return seq

    def _prefix(self, parent: _Sequence, tokens: int) -> _Sequence:
        pages = parent.pages[: self._pages_for(tokens)]
        self._pool.hold(pages)
        return _Sequence(pages, tokens)

    def _write_row(self, seq: int, start: int, held: int) -> None:
        """Writes the length and the pages from ``start`` on, and clears cells up to ``held``."""
        sequence = self._live[seq]
        cells = sequence.pages[start:] + [-1] * (held - len(sequence.pages))
        self._table.write(seq * self.max_pages_per_seq + start, cells)
        self._lengths.write(seq, (sequence.length,))

    def _grow(self, ends: Mapping[int, int]) -> None:
        plan = self._plan_growth(ends)
        originals: list[int] = []
        copies: list[int] = []
        new = [seq for seq, _, missing in plan if missing and not self._live[seq].pages]
        # Sequences that start together lie at equal distances: one strided view holds them all.
        starts = dict(zip(new, self._pool.spread(len(new)), strict=True)) if len(new) > 1 else {}
        for seq, copied, missing in plan:
            sequence = self._live[seq]
            pages, at = sequence.pages, len(sequence.pages)
            after = starts[seq] - 1 if seq in starts else pages[-1] if pages else None
            fresh = self._pool.take(copied + missing, None if copied else after)
            if copied:
                at = sequence.length // self.page_size
                originals.append(pages[at])
                copies.append(fresh[0])
                pages[at] = fresh.pop(0)
            pages += fresh
            self._write_row(seq, at, 0)
        self._pool.drop(originals)
        if copies:
            self._copy_pages(originals, copies)

    def _plan_growth(self, ends: Mapping[int, int]) -> list[tuple[int, bool, int]]:
        """For each sequence: must its last page be copied, and how many pages are missing."""
        plan: list[tuple[int, bool, int]] = []
        leaving: Counter[int] = Counter()  # holders that an earlier copy of this plan takes away
        for seq, end in ends.items():
            pages, length = self._live[seq].pages, self._live[seq].length
            wanted = self._pages_for(end)
            if wanted > self.max_pages_per_seq:
                raise SequenceTooLongError(
                    "new",
                    f"{wanted} pages for the {end} tokens of sequence {seq}",
                    f"{self.max_pages_per_seq} pages of {self.page_size} tokens",
                )
            copied = False
            if length % self.page_size:
                page = pages[length // self.page_size]
                copied = self._pool.refs[page] - leaving[page] > 1
                leaving[page] += copied
            plan.append((seq, copied, max(wanted - len(pages), 0)))
        needed = sum(copied + missing for _, copied, missing in plan)
        if needed > self._pool.num_free:
            raise OutOfPagesError(
                "new",
                f"{needed} more pages needed",
                f"{self._pool.num_free} free of {self.num_pages}",
            )
        return plan


@dataclass(slots=True)
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0


class _Mirror:
    """An int32 tensor, filled with -1, that lives on the device and is written on the host.

    On a CPU the tensor is the host's memory itself; elsewhere ``flush`` sends what has changed.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._hold(array("i", [-1]) * math.prod(shape), shape, device)

    def _hold(self, cells: array[int], shape: tuple[int, ...], device: torch.device) -> None:
        self._cells = cells
        self._host = torch.frombuffer(cells, dtype=torch.int32)
        self.tensor = (self._host if device.type == "cpu" else self._host.to(device)).view(shape)
        self._changed: list[tuple[int, int]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold cells of their own, and a tensor that is their memory."""
        return _mirror, (self._cells, tuple(self.tensor.shape), self.tensor.device)

    def write(self, start: int, values: Sequence[int]) -> None:
        """Sets the cells from ``start`` on, counted in row-major order."""
        stop = start + len(values)
        self._cells[start:stop] = array("i", values)
        if values:
            self._changed.append((start, stop))

    def flush(self) -> None:
        """Makes the device see every write so far; nobody waits for it."""
        changed, self._changed = self._changed, []
        if not changed or self.tensor.data_ptr() == self._host.data_ptr():
            return
        flat = self.tensor.view(-1)
        low, high = min(start for start, _ in changed), max(stop for _, stop in changed)
        if len(changed) == 1 or high - low <= _SLICE_CELLS:
            flat[low:high].copy_(self._snapshot(self._host[low:high]), non_blocking=True)
            return
        cells = [cell for start, stop in changed for cell in range(start, stop)]
        edits = self._snapshot(torch.tensor([cells, [self._cells[cell] for cell in cells]]))
        where, values = edits.to(flat.device, non_blocking=True)
        flat.index_copy_(0, where, values.int())

    def _snapshot(self, host: Tensor) -> Tensor:
        """Pinned memory that later writes do not touch, so that the copy can run behind us."""
        return host.pin_memory() if self.tensor.is_cuda else host


def _mirror(cells: array[int], shape: tuple[int, ...], device: torch.device) -> _Mirror:
    mirror = object.__new__(_Mirror)
    mirror._hold(array("i", cells), shape, device)
    return mirror

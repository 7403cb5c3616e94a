"""Forward passes over a paged cache: what every layer needs to know is worked out once a step.

A *column* is a token of the padded batch, as Transformers counts them; a *token* is one that is
stored. Padding is never stored, so a row has at most as many tokens as the batch has columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvattn import ops
from kvattn.cache import PagedKVCache
from kvattn.errors.cache_kinds import CacheLimitError
from kvattn.errors.option_kinds import RequiresGradError
from kvattn.errors.transformers_kinds import (
    AttentionArgumentError,
    BatchSelectionError,
    CacheBatchError,
    CropError,
    PaddingError,
)

_MIN_TOKENS = 256  # room for each sequence in the first pages of a cache that grows


class Memory(NamedTuple):
    """What a layer's call needs to know of its pages."""

    k: Tensor
    v: Tensor
    descales: dict[str, Any]


class Packed(NamedTuple):
    """Which columns of a step hold tokens, when not all of them do."""

    tokens: Tensor  # (total,) int64: rows of the flat (batch * columns) tensors
    edges: Tensor  # (batch + 1,) int32: borders of the sequences among them


@dataclass(slots=True)
class Step:
    """One forward pass: where its keys and values go, and which columns are tokens.

    Attributes:
        pages: the cache; table (batch, max_pages) int32 and before (batch,) int32 address it.
        memory: keys, values and descale arguments, by layer.
        before: tokens of each sequence before the step.
        columns: columns of the step.
        pads: how many of them are padding, by row.
        hidden: the same for all columns so far.
        solid: no row has padding behind its first token.
        packed: which columns are tokens; None if all are.
        calls: the attention calls of its layers, which share their checks.
    """

    pages: PagedKVCache
    memory: list[Memory]
    table: Tensor
    before: Tensor
    columns: int
    pads: list[int]
    hidden: list[int]
    solid: bool
    packed: Packed | None = None
    calls: ops.Step = field(default_factory=ops.Step)
    _rotary: dict[int, tuple[Tensor, dict[str, Any]]] = field(default_factory=dict)

    def pack(self, x: Tensor) -> Tensor:
        """(batch, columns, heads, dim) -> (total, heads, dim), tokens only."""
        return x if self.packed is None else x.flatten(0, 1).index_select(0, self.packed.tokens)

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of pack; padding columns are 0."""
        if self.packed is None:
            return x
        flat = x.new_zeros((len(self.pads) * self.columns, *x.shape[1:]))
        return flat.index_copy_(0, self.packed.tokens, x).unflatten(0, (-1, self.columns))

    def rotary(self, cos: Tensor, sin: Tensor, half: int) -> dict[str, Any]:
        """Arguments that rotate by the model's own (1 | batch, columns, ...) cosines and sines.

        The first ``half`` entries of each token become a row of the table, in the tokens' order:
        so every position and every scaling that the model chose is kept.
        """
        known = self._rotary.get(id(cos))
        if known is None:
            own = cos.shape[0] > 1  # else all sequences have the same positions
            tables = [table[..., :half].flatten(0, 1) for table in (cos, sin)]
            if self.packed is not None:
                rows = self.packed.tokens if own else self.packed.tokens % self.columns
                tables = [table.index_select(0, rows) for table in tables]
                first = self.packed.edges[:-1]
            else:
                width = self.columns if own else 0
                first = torch.arange(len(self.pads), dtype=torch.int32, device=cos.device) * width
            rotary = {
                "rotary_cos": tables[0].contiguous(),
                "rotary_sin": tables[1].contiguous(),
                "rotary_seqlens": first,
                "rotary_interleaved": False,
            }
            known = self._rotary[id(cos)] = cos, rotary  # holds cos, so its id stays taken
        return known[1]

    def grid(self, mask: Tensor, capped: bool) -> dict[str, Any]:
        """Arguments that apply a mask over (rows, heads, columns, all columns)."""
        if not self.solid:
            got = "a mask over queries and keys where a row has padding behind its first token"
            raise PaddingError("attention_mask", got, "a mask of (batch, columns)")
        everything = mask.shape[-1]
        return {
            # A window that hides nothing: without causal it still lets rotary positions advance.
            "window_size": (everything, everything),
            "causal": False,
            **grid_mods(mask, capped, self.pads, self.hidden),
        }


def check_mask(mask: Tensor, query: Tensor, keys: int, least: int = 1) -> None:
    """A mask must fit (batch, queries, heads, dim) queries and that many keys.

    Raises:
        AttentionArgumentError: it does not; a mask over queries and keys may have sizes of 1, but
            not less than ``least`` keys.
    """
    batch, queries, heads, _ = query.shape
    shape, full = tuple(mask.shape), (batch, heads, queries, keys)
    if len(shape) == 2:
        fits = shape == (batch, keys)
    else:
        spread = zip(shape, full, strict=False)
        fits = len(shape) == 4 and all(size in (1, wanted) for size, wanted in spread)
        fits = fits and shape[3] >= least
    if not fits:
        allowed = f"{(batch, keys)}, or what torch would expand to {full}"
        raise AttentionArgumentError("attention_mask", f"shape {shape}", allowed)


def grid_mods(
    mask: Tensor,
    capped: bool,
    skipped: Sequence[int] | None = None,
    hidden: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The mods for a bool or additive mask over (batch, heads, queries, keys); any may be 1.

    The first ``skipped`` queries and ``hidden`` keys of each row of the mask do not exist.
    """
    rows, heads, queries, keys = (size > 1 for size in mask.shape)
    q_first = None if skipped is None else torch.tensor(skipped, device=mask.device)
    k_first = None if hidden is None else torch.tensor(hidden, device=mask.device)

    def cells(grid: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if q_first is not None and k_first is not None:
            q, k = q + q_first[b], k + k_first[b]
        return grid[b if rows else 0, h if heads else 0, q if queries else 0, k if keys else 0]

    if mask.dtype == torch.bool:
        return {"mask_mod": partial(cells, mask)}
    visible = mask > torch.finfo(mask.dtype).min / 2
    mods: dict[str, Any] = {"mask_mod": partial(cells, visible)}
    bias = torch.where(visible, mask, 0)
    if bool(bias.any()):
        if capped:  # models cap before they add, kvattn after it
            raise AttentionArgumentError("attention_mask", "a bias with softcap", "a bool mask")
        mods["score_mod"] = lambda score, b, h, q, k: (
            score + cells(bias, b, h, q, k).to(score.dtype)
        )
    return mods


class Sequences:
    """The rows of a batch in a PagedKVCache, from the first forward pass to a reset.

    Args:
        layers: number of layers.
        windowed: whether some layer counts its window in columns.
        page_size, dtype, k_descale, v_descale, token_descale: as for PagedKVCache; dtype None
            means that of the first keys.
        num_pages: the hard limit of pages; None grows as needed.
    """

    def __init__(
        self,
        layers: int,
        windowed: bool,
        num_pages: int | None,
        dtype: torch.dtype | None,
        **more: Any,
    ) -> None:
        self.layers = layers
        self.windowed = windowed
        self.num_pages = num_pages
        self.dtype = dtype
        self.more = more
        self.pages: PagedKVCache | None = None
        self.batch = 0
        self.columns = 0
        self.count = 0  # steps begun
        self.step: Step | None = None
        self.handed: int | None = None  # layer whose new tokens are on their way to attention
        self._solid = math.inf  # columns since some row had padding behind its first token
        self._kind: dict[str, Any] = {}
        self._memory: list[Memory] = []

    def reset(self) -> None:
        """Forgets every token; the pages stay for the next batch."""
        if self.pages is not None:
            self.pages.reset()
        self.batch = self.columns = self.count = 0
        self.step, self.handed, self._solid = None, None, math.inf

    def begin(self, key: Tensor, value: Tensor, mask: Tensor | None) -> Step:
        """Makes room for the step's tokens and counts them; mask is (batch, all columns) or None.

        Tokens count from here on, so the length is right whichever layer comes last.
        """
        batch, new = key.shape[:2]
        if self.batch not in (0, batch):
            raise CacheBatchError("input_ids", f"{batch} rows", f"{self.batch} rows")
        if key.requires_grad and torch.is_grad_enabled():
            raise RequiresGradError("k", "requires_grad=True under grad mode", "no gradient")
        counts, flags, solid = self._tokens(batch, new, mask)
        pages = self._reserve(counts, key, value)
        rows = range(batch)
        table, lengths = pages.view(rows)
        before = lengths.clone()
        pages.commit(enumerate(counts))
        self.batch, self.columns, self.count = batch, self.columns + new, self.count + 1
        self._solid = solid
        pads = [new - count for count in counts]
        hidden = [self.columns - pages.length(row) for row in rows]
        packed = None if flags is None else _packed(flags, counts)
        whole = solid == math.inf
        self.step = Step(pages, self._memory, table, before, new, pads, hidden, whole, packed)
        return self.step

    def reorder(self, indices: Tensor) -> None:
        """Row i goes on with the tokens of row indices[i]."""
        if self.pages is not None and self.batch:
            self.pages.reorder(indices, range(self.batch))

    def crop(self, columns: int) -> None:
        """Forgets the last ``-columns`` columns of every row."""
        drop = -columns
        limit = min(self.columns, self._solid)
        if not 0 <= drop <= limit:
            raise CropError("tokens_to_remove", columns, f"{-limit:.0f} to 0")
        if drop == 0 or self.pages is None:
            return
        for row in range(self.batch):
            self.pages.truncate(row, max(0, self.pages.length(row) - drop))
        self.columns -= drop
        self._solid -= drop

    def select(self, rows: Sequence[int]) -> None:
        """Goes on with the given rows in the given order; a row may come more than once."""
        if not rows or not all(0 <= row < self.batch for row in rows):
            raise BatchSelectionError("indices", list(rows), f"rows from 0 to {self.batch - 1}")
        self._use(self._copied(rows, self._longest()))
        self.batch, self.step = len(rows), None

    def copy(self) -> Sequences:
        """The same tokens in pages of their own."""
        twin = Sequences(self.layers, self.windowed, self.num_pages, self.dtype, **self.more)
        twin.batch, twin.columns, twin.count = self.batch, self.columns, self.count
        twin._solid, twin._kind = self._solid, self._kind
        if self.pages is not None and self.batch:
            twin._use(self._copied(range(self.batch), self._longest()))
        return twin

    def _tokens(
        self, batch: int, new: int, mask: Tensor | None
    ) -> tuple[list[int], Tensor | None, float]:
        """Tokens among the new columns of each row, their flags, and the solid columns behind them.

        The flags are (batch, new), or None where every column is a token.
        """
        if mask is None:
            return [new] * batch, None, self._solid + new
        total = self.columns + new
        if mask.shape != (batch, total):
            raise PaddingError("attention_mask", f"shape {tuple(mask.shape)}", (batch, total))
        flags = mask[:, self.columns :]
        counts = flags.sum(1).tolist()
        self._check_seen(mask, counts)
        if counts == [new] * batch:
            return counts, None, self._solid + new
        runs = flags.flip(1).cumprod(1).sum(1).tolist()  # tokens on the right
        gaps = [b for b in range(batch) if runs[b] < (new if self._length(b) else counts[b])]
        if gaps and self.windowed:
            got = f"padding behind the first token of row {gaps[0]}"
            allowed = "padding on the left only, as some layers have a sliding window"
            raise PaddingError("attention_mask", got, allowed)
        return counts, flags, min(runs) if gaps else self._solid + new

    def _check_seen(self, mask: Tensor, counts: list[int]) -> None:
        """What was padding once stays hidden, and what was not stays visible."""
        for b, visible in enumerate(mask.sum(1).tolist()):
            stored = self._length(b)
            if visible != stored + counts[b]:
                got = f"{visible - counts[b]} visible columns before the new ones in row {b}"
                raise PaddingError("attention_mask", got, f"the {stored} tokens stored there")

    def _length(self, row: int) -> int:
        return self.pages.length(row) if self.pages is not None and self.batch else 0

    def _longest(self) -> int:
        return max((self._length(row) for row in range(self.batch)), default=0)

    def _reserve(self, counts: list[int], key: Tensor, value: Tensor) -> PagedKVCache:
        pages = self.pages
        if pages is None or (self.batch == 0 and pages.max_batch < len(counts)):
            self._kind = {
                "num_kv_heads": key.shape[2],
                "head_dim": key.shape[3],
                "head_dim_v": value.shape[3],
                "dtype": self.dtype or key.dtype,
                "device": key.device,
            }
            pages = self._use(self.new_pages(len(counts), max(counts)))
        if self.batch == 0:
            pages.reset()  # rows of a first step that failed
            pages.allocate(len(counts))
        try:
            pages.reserve(enumerate(counts))
        except CacheLimitError:
            if self.num_pages is not None:
                raise
            longest = max(pages.length(row) + count for row, count in enumerate(counts))
            pages = self._use(self._copied(range(len(counts)), longest))
            pages.reserve(enumerate(counts))
        return pages

    def _use(self, pages: PagedKVCache) -> PagedKVCache:
        self.pages = pages
        self._memory = [_memory(pages, layer) for layer in range(self.layers)]
        return pages

    def new_pages(self, batch: int, tokens: int) -> PagedKVCache:
        """Pages for ``batch`` sequences of ``tokens`` tokens, and as much again to grow into."""
        size = self.more["page_size"]
        each = -(-max(_MIN_TOKENS, 2 * tokens) // size)
        return PagedKVCache(
            num_layers=self.layers,
            num_pages=self.num_pages or batch * each,
            max_pages_per_seq=self.num_pages or each,
            max_batch=batch,
            **self._kind,
            **self.more,
        )

    def _copied(self, rows: Sequence[int], tokens: int) -> PagedKVCache:
        """New pages that hold the tokens of the given rows."""
        old, new = self.pages, self.new_pages(len(rows), tokens)
        assert old is not None
        lengths = [old.length(row) for row in rows]
        new.allocate(len(rows))
        new.reserve(enumerate(lengths))
        source = torch.cat([old.slots(row) for row in rows])
        target = torch.cat([new.slots(i, 0, length) for i, length in enumerate(lengths)])
        for layer in range(self.layers):
            for before, after in zip(_slots(old, layer), _slots(new, layer), strict=True):
                after.index_copy_(0, target, before.index_select(0, source))
        new.commit(enumerate(lengths))
        return new


def _memory(pages: PagedKVCache, layer: int) -> Memory:
    scales = {"k_descale": pages.k_descale(layer), "v_descale": pages.v_descale(layer)}
    used = {name: scale for name, scale in scales.items() if scale is not None}
    return Memory(pages.k(layer), pages.v(layer), used)


def _slots(pages: PagedKVCache, layer: int) -> Iterable[Tensor]:
    """The memory of a layer, one row a slot: keys, values, and their scales if each has its own."""
    scales = pages.k_descale(layer), pages.v_descale(layer)
    own = [scale for scale in scales if scale is not None and scale.dim() == 3]
    for cells in (pages.k(layer), pages.v(layer), *own):
        raw = cells.view(torch.uint8) if cells.itemsize == 1 else cells  # FP8 has no index_copy_
        yield raw.flatten(0, 1)


def _packed(flags: Tensor, counts: list[int]) -> Packed:
    tokens = flags.flatten().nonzero().flatten()
    edges = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Packed(tokens, edges.to(flags.device))

"""Checks that read tensor data: lengths, page ids, cumulative lengths, positions.

They run always on the CPU. On a GPU they cost a synchronisation, so they run only in checked
mode, and never while a CUDA graph is being captured.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvattn import errors as E

if TYPE_CHECKING:
    from kvattn.option_checks import BlockSparse
    from kvattn.request import Request, Span

_checked: ContextVar[bool] = ContextVar(
    "kvattn_checked", default=os.environ.get("KVATTN_CHECKED", "0") not in ("", "0")
)


@contextmanager
def checked(on: bool = True) -> Iterator[None]:
    """Switches value checks on for GPU tensors, and the strict ones on for every device.

    Example:
        >>> with kvattn.checked():
        ...     kvattn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)
    """
    token = _checked.set(on)
    try:
        yield
    finally:
        _checked.reset(token)


def readable(tensor: Tensor) -> bool:
    """Whether its data may be looked at: on the CPU, or in checked mode outside a capture."""
    kind = tensor.device.type
    if torch.compiler.is_compiling() or kind == "meta" or (kind != "cpu" and not _checked.get()):
        return False
    return kind != "cuda" or not torch.cuda.is_current_stream_capturing()


def strict() -> bool:
    """Whether checked mode is on."""
    return _checked.get()


def integers(tensor: Tensor | None) -> list[int]:
    """The numbers of an index tensor; empty for None."""
    return [] if tensor is None else tensor.tolist()


def check(r: Request) -> None:
    """Raises on lengths, indices and positions that point outside the caller's tensors."""
    strict = _checked.get()
    if not readable(r.pool):
        return
    _edges(r)
    _lengths(r)
    if r.cu_seqlens_k is None and not _by_slot(r):
        _rows(r)
        if r.page_table is not None:
            _pages(r)
        if isinstance(r.common_prefix_len, Tensor) or r.common_prefix_len > 0:
            _common_prefix(r, int(r.common_prefix_len))
    if r.slot_mapping is not None:
        _slots(r, r.slot_mapping)
    if r.rotary_cos is not None:
        _positions(r, r.rotary_cos.shape[0])
    if r.max_seqlen_q is not None or r.max_seqlen_k is not None:
        _bounds(r)
    if r.gather_kv_indices is not None:
        _gathered(r, r.gather_kv_indices)
    if r.block_sparse is not None:
        _blocks(r, r.block_sparse)
    if strict and r.k is not None:
        _duplicates(r)


def _by_slot(r: Request) -> bool:
    """Whether slots alone say where tokens go: lengths then only give rotary positions."""
    return r.slot_mapping is not None and not r.attend


def _edges(r: Request) -> None:
    """Cumulative lengths start at 0, never decrease, and end within their tensor."""
    if r.cu_seqlens_q is not None:
        _ordered("cu_seqlens_q", r.cu_seqlens_q, r.lead, E.CuSeqlensError)
    if r.cu_seqlens_k is not None:
        _ordered("cu_seqlens_k", r.cu_seqlens_k, r.pool, E.CuSeqlensError)
    if r.cu_seqlens_k_new is not None and r.k is not None:
        _ordered("cu_seqlens_k_new", r.cu_seqlens_k_new, r.k, E.CuSeqlensNewError)


def _ordered(name: str, edges: Tensor, tensor: Tensor, kind: type[E.KvattnError]) -> None:
    numbers, total = edges.tolist(), tensor.shape[0]
    ordered = all(a <= b for a, b in itertools.pairwise(numbers))
    if numbers[0] != 0 or not ordered or numbers[-1] > total:
        shown = numbers if len(numbers) <= 9 else [*numbers[:8], "..."]
        raise kind(name, shown, f"0 first, never decreasing, at most {total} last")


def _lengths(r: Request) -> None:
    if r.cache_seqlens is not None:
        name = "cache_seqlens" if r.cu_seqlens_k is None else "seqused_k"
        capacity, appending, edges = r.capacity, r.k is not None, integers(r.cu_seqlens_k)
        for b, span in enumerate(r.spans):
            if span.active:
                room = edges[b + 1] - edges[b] if edges else capacity
                room = span.end if _by_slot(r) else room
                if span.old < 0 or span.end > room:
                    _length(name, b, span, room, appending)
            else:
                length = span.end if r.slot_mapping is not None else span.old
                if length < -1:
                    raise E.NegativeLengthError(f"{name}[{b}]", length, ">= -1")
    if r.seqused_q is not None:
        _used_queries(r)
    if r.cache_leftpad is not None:
        for b, span in enumerate(r.spans):
            limit = span.end if r.slot_mapping is not None else span.old
            if span.start < 0:
                raise E.NegativeLeftpadError(f"cache_leftpad[{b}]", span.start, ">= 0")
            if span.active and span.start > limit:
                raise E.LeftpadOverLengthError(f"cache_leftpad[{b}]", span.start, f"<= {limit}")


def _length(name: str, b: int, span: Span, room: int, appending: bool) -> None:
    if span.old < 0:  # slot_mapping: the length must count the new tokens too
        raise E.NegativeLengthError(f"{name}[{b}]", span.end, f">= {span.new_len} new tokens")
    if span.old > room:
        raise E.LengthOverCapacityError(f"{name}[{b}]", span.old, f"<= {room}")
    if span.end > room:
        got = f"{span.old} cached + {span.new_len} new tokens = {span.end}"
        kind = E.AppendOverflowError if appending else E.LengthOverCapacityError
        raise kind(f"{name}[{b}]", got, f"<= {room}")


def _used_queries(r: Request) -> None:
    assert r.seqused_q is not None
    if r.cu_seqlens_q is None:
        rooms = [r.lead.shape[1]] * r.batch
    else:
        edges = r.cu_seqlens_q.tolist()
        rooms = [b - a for a, b in itertools.pairwise(edges)]
    for b, (used, room) in enumerate(zip(r.seqused_q.tolist(), rooms, strict=True)):
        if not 0 <= used <= room:
            raise E.SeqUsedError(f"seqused_q[{b}]", used, f"0 to {room}")


def _rows(r: Request) -> None:
    if r.cache_batch_idx is not None:
        rows_exist(r.cache_batch_idx, len(r.pool if r.page_table is None else r.page_table))


def rows_exist(cache_batch_idx: Tensor, rows: int) -> None:
    """Raises unless each entry names one of the rows of a cache or a page table."""
    for b, row in enumerate(cache_batch_idx.tolist()):
        if not 0 <= row < rows:
            raise E.BatchIndexRangeError(f"cache_batch_idx[{b}]", row, f"0 to {rows - 1}")


def _pages(r: Request) -> None:
    """Every page id within a used length names a page of the pool."""
    count, size = r.pool.shape[0], r.page_size
    for span, ids in zip(r.spans, r.pages, strict=True):
        used = ids if span.start == 0 else ids[span.start // size :]
        if used and not (min(used) >= 0 and max(used) < count):
            bad = next(page for page in used if not 0 <= page < count)
            raise E.PageOutOfRangeError(f"page_table[{span.row}]", bad, f"0 to {count - 1}")


def _common_prefix(r: Request, common: int) -> None:
    """As far as they are that long, all sequences begin in the same memory as the longest."""
    if not 0 <= common <= r.capacity:
        allowed = f"0 to {r.capacity}, the capacity"
        raise E.CommonPrefixError("common_prefix_len", common, allowed)
    places = r.pages if r.page_table is not None else [[span.row] for span in r.spans]
    keys = [min(common, span.end) if span.active else 0 for span in r.spans]
    if r.page_table is None and r.pool.stride(0) == 0:
        return
    size, model = r.page_size, max(range(r.batch), key=keys.__getitem__, default=0)
    for b, (own, count) in enumerate(zip(places, keys, strict=True)):
        used = -(-count // size)
        if own[:used] != places[model][:used]:
            got = f"{common}, but sequences {model} and {b} begin elsewhere"
            raise E.CommonPrefixMemoryError("common_prefix_len", got, "a prefix of all sequences")


def _slots(r: Request, slots: Tensor) -> None:
    limit = r.pool.shape[0] * r.page_size
    if slots.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(slots))
    if low < -1 or high >= limit:
        raise E.SlotOutOfRangeError("slot_mapping", low if low < -1 else high, f"-1 to {limit - 1}")


def _positions(r: Request, rows: int) -> None:
    bases = integers(r.rotary_seqlens)
    for b, span in enumerate(r.spans):
        if not span.active:
            continue
        if bases and bases[b] < 0:
            raise E.RotarySeqlensError(f"rotary_seqlens[{b}]", bases[b], ">= 0")
        base = bases[b] if bases else span.old
        steps = max(span.new_len, span.q_len if r.local else min(span.q_len, 1))
        if steps and base + steps > rows:
            got = f"position {base + steps - 1} in sequence {b}"
            raise E.RotaryTableShortError("rotary_cos", got, f"positions 0 to {rows - 1}")


def _bounds(r: Request) -> None:
    for name, bound in (("max_seqlen_q", r.max_seqlen_q), ("max_seqlen_k", r.max_seqlen_k)):
        if bound is None:
            continue
        longest = max(
            (s.q_len if name == "max_seqlen_q" else s.keys for s in r.spans if s.active), default=0
        )
        if bound < longest:
            raise E.MaxSeqlenTooSmallError(name, bound, f">= {longest}, the longest sequence")


def _gathered(r: Request, indices: Tensor) -> None:
    flat = indices.flatten(0, -2)
    for b, span in enumerate(r.spans):
        used = flat[span.q_start : span.q_start + span.q_len]
        if span.active and used.numel() and (int(used.min()) < -1 or int(used.max()) >= span.keys):
            bad = int(used.min()) if int(used.min()) < -1 else int(used.max())
            got = f"{bad} in sequence {b}"
            raise E.BlockSparseError("gather_kv_indices", got, f"-1 to {span.keys - 1}")


def _blocks(r: Request, sparse: BlockSparse) -> None:
    """Counts speak of every query row and of entries that are there; no entry is negative."""
    longest = max((span.q_len for span in r.spans if span.active), default=0)
    name = "block_sparse_tensors"
    for counts, indices in (
        (sparse.mask_block_cnt, sparse.mask_block_idx),
        (sparse.full_block_cnt, sparse.full_block_idx),
    ):
        if counts is None or indices is None:
            continue
        if counts.shape[2] * sparse.block_size[0] < longest:
            got = f"{counts.shape[2]} blocks of {sparse.block_size[0]} rows"
            raise E.BlockSparseError(name, got, f"blocks for {longest} rows")
        room = indices.shape[-1]
        wrong = (counts < 0) | (counts > room)
        if wrong.any():
            got = f"a count of {int(counts[wrong][0])}"
            raise E.BlockSparseError(name, got, f"0 to {room}, the indices that are there")
        listed = indices[torch.arange(room, device=counts.device) < counts[..., None]]
        if (listed < 0).any():
            raise E.BlockSparseError(name, f"block {int(listed.min())}", "blocks from 0")


def _duplicates(r: Request) -> None:
    """No two new tokens of the call go to one slot."""
    if r.slot_mapping is not None:
        slots = r.slot_mapping[r.slot_mapping >= 0]
        if slots.unique().numel() != slots.numel():
            raise E.DuplicateWriteError("slot_mapping", "a slot twice", "distinct slots")
        return
    seen: dict[tuple[int, int], int] = {}
    name = "cache_batch_idx" if r.cache_batch_idx is not None else "page_table"
    for b, span in enumerate(r.spans):
        if not span.active:
            continue
        for row in range(span.old, span.end):
            place = (span.row, row)
            if r.page_table is not None:
                page = int(r.page_table[span.row, row // r.page_size])
                place = (page, row % r.page_size)
            if seen.setdefault(place, b) != b:
                raise E.DuplicateWriteError(
                    name, f"sequences {seen[place]} and {b} write one slot", "slots of their own"
                )

"""From a request to the Hopper kernel: boxes of TMA, the variant, its numbers."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from kvattn.backends import triton_launch
from kvattn.backends.triton_replay import target
from kvattn.kernels.hopper import order as sorting
from kvattn.kernels.hopper import prefill as kernel
from kvattn.kernels.hopper import rotate as rotation
from kvattn.kernels.hopper.compat import TensorDescriptor, gl
from kvattn.kernels.hopper.schedule import Form
from kvattn.request import Request

_LOG2E = math.log2(math.e)
_LINE = 64  # elements of 128 bytes, the unit that shared memory is swizzled by
_NARROW = 512  # keys of a window up to which smaller tiles waste less
_LONG = 4096  # packed rows of a sequence from which larger row tiles pay


@dataclass(frozen=True)
class Tiling:
    """Tile sizes, within 227 KB of shared memory and 64 K registers."""

    keys: int
    stages: int
    q_stages: int
    groups: int = 2  # warpgroups that compute, 64 rows each
    registers: int = 240
    copy_registers: int = 24
    ping_pong: bool = True
    q_loaded: bool = False  # queries in registers while they are multiplied


_THREE = Tiling(128, stages=3, q_stages=2, groups=3, registers=160, copy_registers=32)


def tiling(r: Request) -> Tiling:
    """Edited scores need registers of their own, wide heads room: smaller tiles for both."""
    d = padded(r.lead.shape[-1])
    left, _ = r.window
    if d > 128:
        return Tiling(keys=64, stages=2, q_stages=1)
    if edited(r):
        return Tiling(keys=64, stages=2 if d > 64 else 3, q_stages=2, q_loaded=True)
    if d == 64 and r.paged and r.page_size % 128:
        return Tiling(128, stages=3, q_stages=2, registers=208, copy_registers=88)
    if d == 64 and left is not None and left < _NARROW:
        return replace(_THREE, keys=64, ping_pong=False, q_loaded=True)
    if d == 64 and _rows(r) >= _LONG:
        return _THREE
    return Tiling(keys=128, stages=2 if d > 64 else 3, q_stages=2, q_loaded=True)


def padded(dim: int) -> int:
    """The head dim in shared memory: TMA fills up with zeros."""
    return 64 if dim <= 64 else 128 if dim <= 128 else 256


def _rows(r: Request) -> int:
    """Packed query rows of a sequence, on average."""
    tokens = r.lead.shape[1] if r.lead.dim() == 4 else r.lead.shape[0] // r.batch
    return tokens * packs(r)


def packs(r: Request) -> int:
    """Heads of a group that share a tile of rows: all or one."""
    group = r.heads // r.kv_heads
    return 1 if r.pack_gqa is False or 64 % group else group


def ragged(r: Request) -> bool:
    """Whether sequences may have fewer rows than q has room for."""
    return r.cu_seqlens_q is not None or r.seqused_q is not None


def edited(r: Request) -> bool:
    """Whether scores are more than products times a positive number."""
    return r.softcap > 0 or r.alibi_slopes is not None or r.softmax_scale <= 0


def form(r: Request, tiles: Tiling) -> Form:
    """The variant of the kernel."""
    left, right = r.window
    box = math.gcd(tiles.keys, r.page_size) if r.paged else tiles.keys
    d, dv = padded(r.lead.shape[-1]), r.pool.shape[-1]
    return Form(
        D=d, DV=padded(dv), DIM_V=dv, BN=tiles.keys, GROUPS=tiles.groups,
        STAGES=tiles.stages, Q_STAGES=tiles.q_stages, PACK=packs(r),
        BOX=box, PAGED=r.paged, PARTED=box not in (r.page_size, tiles.keys),
        INCLUDED=r.slot_mapping is not None, LEFT=left is not None, RIGHT=right is not None,
        CHUNKED=r.attention_chunk > 0, EDITED=edited(r), CAPPED=r.softcap > 0,
        LOW=left is not None or r.attention_chunk > 0 or r.cache_leftpad is not None,
        RAGGED=ragged(r), PING_PONG=tiles.ping_pong, Q_LOADED=tiles.q_loaded,
        RUNS=(_runs(tiles.keys, d), _runs(tiles.keys, padded(dv))) if _in_runs(r, tiles) else None,
    )  # fmt: skip


# TMA


@functools.cache
def _layout(rank: int) -> Any:
    return gl.NVMMASharedLayout(128, 16, rank=rank)


def _box(x: Tensor, shape: list[int], strides: list[int], box: list[int]) -> Any:
    """What TMA knows of a tensor; the stride of a single element is free to choose."""
    spare = -(-shape[-1] // 8) * 8
    steps = [spare if n == 1 else s for n, s in zip(shape[:-1], strides, strict=False)]
    return TensorDescriptor(x, shape, [*steps, 1], box, _layout(len(box)))


def _queries(q: Tensor, kv_heads: int, pack: int, d: int) -> Any:
    """[sequence, token, kv head, head of the group, channel], 64 rows a box."""
    if q.dim() == 3:
        q = q[None]
    batch, tokens, heads, dim = q.shape
    b, t, h, _ = q.stride()
    group = heads // kv_heads
    shape, strides = [batch, tokens, kv_heads, group, dim], [b, t, h * group, h]
    return _box(q, shape, strides, [1, 64 // pack, 1, pack, d])


def _keys(cache: Tensor, rows: int, columns: int) -> Any:
    """[row or page, slot, kv head, channel]."""
    if cache.dim() == 3:
        cache = cache[None]
    return _box(cache, list(cache.shape), list(cache.stride()), [1, rows, 1, columns])


def _pages(cache: Tensor, rows: int) -> Any:
    """[page, run of 8 slots, block of 64 channels of all heads, slot, channel].

    A box is `rows` slots of a page with all channels of a head. The heads are folded into the
    blocks, as TMA knows five dimensions.
    """
    pages, size, heads, dim = cache.shape
    page, slot, head, _ = cache.stride()
    blocks = (heads - 1) * head // _LINE + dim // _LINE
    shape, strides = [pages, size // 8, blocks, 8, _LINE], [page, 8 * slot, _LINE, slot]
    return _box(cache, shape, strides, [1, rows // 8, dim // _LINE, 8, _LINE])


def _runs(keys: int, dim: int) -> Any:
    """The layout [keys, dim] of such pages on end: swizzled blocks of 8 keys by 64 channels."""
    lines = [[0, 1 << i] for i in range(6)] + [[1 << i, 8 << i] for i in range(3)]
    blocks = [[0, 1 << i] for i in range(6, dim.bit_length() - 1)]
    runs = [[1 << i, 0] for i in range(3, keys.bit_length() - 1)]
    return gl.SharedLinearLayout(lines + blocks + runs, [], 1024)


def _in_runs(r: Request, tiles: Tiling) -> bool:
    """Whether pages that are parts of a tile come with all their channels in one copy."""
    caches = [x for x in (r.k_cache, r.pool) if x is not None]
    return (
        r.paged
        and r.page_size % tiles.keys > 0
        and r.page_size % 8 == 0
        and all(x.shape[-1] in (64, 128, 256) and x.stride(2) % _LINE == 0 for x in caches)
    )


def _over(box: Any, tensor: Tensor) -> Any:
    """The same over another tensor of the same form, without checking it again."""
    moved = object.__new__(TensorDescriptor)
    moved.__dict__.update(box.__dict__)
    moved.base = tensor
    return moved


def _aligned(*tensors: Tensor) -> bool:
    """Whether TMA can address them."""
    return all(t.data_ptr() % 16 == 0 for t in tensors)


# Launches


class Prefill:
    """What calls of one form share; they differ in tensors and in their scale.

    The kernel is compiled for the first call's arguments and launched directly from then on: to
    look at every argument again, as Triton does, takes longer than all the rest.
    """

    def __init__(self, r: Request, q: Tensor, tiles: Tiling) -> None:
        self.variant = variant = form(r, tiles)
        assert r.k_cache is not None
        whole, runs = variant.BOX == variant.BN, variant.RUNS is not None
        self.boxes = (
            _queries(q, r.kv_heads, variant.PACK, variant.D),
            *(
                _pages(x, variant.BOX) if runs else _keys(x, variant.BOX, d if whole else _LINE)
                for x, d in ((r.k_cache, variant.D), (r.pool, variant.DV))
            ),
        )
        for box in self.boxes:
            box.base = None  # another call's tensors would live as long as this
        total, rows, heads = q.shape[-3], 64 * tiles.groups, r.heads // variant.PACK
        if r.cu_seqlens_q is None:
            tiles_each = -(-total * variant.PACK // rows)
            pieces = tiles_each * r.batch * heads
        else:
            tiles_each = 0
            pieces = (total * variant.PACK // rows + r.batch) * heads
        self.grid = (max(1, min(pieces, triton_launch.processors(q.device) - r.sm_margin)), 1, 1)
        self.ordered = r.cu_seqlens_q is not None and r.batch > 1 and pieces > self.grid[0]
        left, right = r.window
        table_stride, lines, *_ = triton_launch.table(r)
        self.numbers = (
            r.batch, total, tiles_each, pieces, heads, r.heads // r.kv_heads,
            triton_launch.fresh(r), r.capacity, lines, r.pool.shape[0], r.page_size,
            table_stride, r.k_cache.stride(-2) // _LINE, r.pool.stride(-2) // _LINE,
            left or 0, right or 0, r.attention_chunk,
        )  # fmt: skip
        self.constants = (variant, tiles.registers, tiles.copy_registers)

    def order(self, r: Request, q: Tensor) -> Tensor | None:
        """Of a ragged batch with more work than programs: a launch that sorts its sequences."""
        if not self.ordered:
            return None
        found = target().scratch("order", 2 * r.batch + 2, q.device)
        keys = None if r.cache_seqlens is not None else r.cu_seqlens_k
        target().launch(
            sorting.order, (-(-r.batch // 32),),
            (r.cu_seqlens_q, r.seqused_q, r.cache_seqlens, keys, found, r.batch, q.shape[0]),
            {"PACK": self.variant.PACK, "BM": 64 * self.variant.GROUPS}, num_warps=4,
        )  # fmt: skip
        return found

    def __call__(self, r: Request, q: Tensor, out: Tensor, lse: Tensor) -> None:
        alibi, lead = r.alibi_slopes, (0,) if r.cu_seqlens_q is not None else ()
        alibi_strides = (0, 0) if alibi is None else alibi.expand(r.batch, r.heads).stride()
        tensors: tuple[Any, ...] = (q, r.k_cache, r.pool)
        scale = 1.0 if self.variant.EDITED else r.softmax_scale * _LOG2E
        args = (
            *map(_over, self.boxes, tensors), out, lse if r.return_lse else None, r.sinks, alibi,
            r.cache_seqlens, r.cu_seqlens_q, r.cu_seqlens_k, r.cu_seqlens_k_new, r.seqused_q,
            r.cache_leftpad, r.cache_batch_idx, r.page_table, self.order(r, q),
            target().counters(2, q.device),
            *lead, *out.stride()[:-1], *lead, *lse.stride(), *alibi_strides, *self.numbers,
            r.softmax_scale, r.softcap, scale, *self.constants,
        )  # fmt: skip
        target().launch(kernel.prefill, self.grid, args, {}, num_warps=4)


def _prepared(r: Request, q: Tensor, out: Tensor) -> Prefill:
    """The launch for calls of this form, kept with their facts."""
    known: dict[Any, Prefill] = r.facts.__dict__.setdefault("hopper launches", {})
    what = (q.stride(), r.softmax_scale > 0, q.device, out.stride(), _aligned(out))
    if what not in known:
        known[what] = Prefill(r, q, tiling(r))
    return known[what]


def attend(r: Request, out: Tensor, lse: Tensor, tiles: Tiling | None = None) -> None:
    """One launch over all heads and row tiles, and one before it to make queries ready."""
    q, k_cache = r.q, r.k_cache
    assert q is not None and k_cache is not None
    if r.batch == 0 or q.numel() == 0:
        return
    if not _aligned(k_cache, r.pool):  # facts do not show addresses
        triton_launch.attend(r, out, lse)
        return
    if r.rotary_cos is not None or r.q_norm_weight is not None:
        q = ready(r, q)
    elif not _aligned(q):
        q = q.clone(memory_format=torch.contiguous_format)
    launch = _prepared(r, q, out) if tiles is None else Prefill(r, q, tiles)
    launch(r, q, out, lse)


def ready(r: Request, q: Tensor) -> Tensor:
    """The query as it is multiplied, normalised and at its positions, packed; one launch."""
    cos = r.rotary_cos
    ragged = r.cu_seqlens_q is not None
    tokens = q.shape[0] if ragged else q.shape[0] * q.shape[1]
    out = target().passing(q.shape, q.dtype, q.device)
    *_, heads, dim = q.shape
    arguments = (
        q, out, r.cache_seqlens, r.cu_seqlens_q, r.cu_seqlens_k, r.cu_seqlens_k_new,
        r.cache_leftpad, r.cache_batch_idx,
        triton_launch.rotary(cos), triton_launch.rotary(r.rotary_sin), r.rotary_seqlens,
        triton_launch.unit(r.q_norm_weight),
        (0, *q.stride()[:2]) if ragged else q.stride()[:3],
        triton_launch.fresh(r), r.capacity, triton_launch.table(r)[1],
        0 if cos is None else cos.shape[0],
        r.batch, q.shape[-3],
    )  # fmt: skip
    constants = {
        "HEADS": heads, "H": triton.next_power_of_2(heads), "D": dim,
        "DP": triton.next_power_of_2(dim), "HALF": 0 if cos is None else cos.shape[1],
        "INTERLEAVED": r.rotary_interleaved, "ADVANCE": int(r.local),
        "INCLUDED": r.slot_mapping is not None, "EPS": triton_launch.eps(r),
    }  # fmt: skip
    target().launch(rotation.rotate, (tokens,), arguments, constants, num_warps=4)
    return out

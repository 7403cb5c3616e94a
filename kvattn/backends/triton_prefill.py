"""Many query rows over a cache: which calls the prefill kernel takes, its tiles, its arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvattn import checks
from kvattn.backends import triton_launch as launch
from kvattn.backends.triton_replay import target
from kvattn.kernels.prefill import prefill as _prefill
from kvattn.request import Request

_CACHED = 32 << 20  # bytes of keys and values that stay in the L2 cache together
_CAP = 128.0  # larger softcaps need tanh near 0 more exactly than this kernel has it
_BOUND = 52.0  # of scores: e^52 and e^-52 times a number are both in the range of bf16
_WIDE = 1 << 31  # bytes of a cache from which offsets take 64 bits


@dataclass(frozen=True)
class Tiles:
    """Packed query rows and keys of a tile, warps, stages, and how tiles of keys are read."""

    rows: int
    keys: int
    warps: int
    stages: int
    boxes: bool  # by TMA
    share: int | None = None  # heads whose row tiles take turns


def takes(r: Request) -> bool:
    """Whether the prefill kernel knows everything that the call asks for."""
    q, k, v = r.q, r.k_cache, r.pool
    if q is None or k is None or q.dtype not in launch.TL or {k.dtype, v.dtype} != {q.dtype}:
        return False
    scales = (r.q_descale, r.k_descale, r.v_descale, r.sfq, r.sfk, r.sfv)
    others = (r.qv, r.rel_bias, r.alibi_slopes, r.mask_mod, r.block_sparse, r.gather_kv_indices)
    if any(x is not None for x in (*scales, *others)):
        return False
    if r.softcap > _CAP or r.batch_invariant or r.softmax_scale <= 0 or not launch.copyable(r):
        return False
    if any(x is not None and x.numel() == 0 for x in (q, k, v, r.page_table)):
        return False
    if not all(16 < x.shape[-1] <= 128 for x in (q, v)):
        return False
    if _longest(r) * (r.heads // r.kv_heads) <= 32:  # tiles of queries would be almost empty
        return False
    return launch.splits_of(r, _tiles(r, 64) * r.kv_heads, r.capacity, 64) == 1


def _longest(r: Request) -> int:
    """Query tokens of the longest sequence, as far as is known without looking."""
    assert r.q is not None
    if r.cu_seqlens_q is None:
        return r.q.shape[1]
    total = r.q.shape[0]
    return min(total, r.max_seqlen_q or -(-total // r.batch))


def _tiles(r: Request, rows: int) -> int:
    """Row tiles of a kv head."""
    assert r.q is not None
    group = r.heads // r.kv_heads
    if r.cu_seqlens_q is None:
        return -(-r.q.shape[1] * group // rows) * r.batch
    return r.q.shape[0] * group // rows + r.batch


def tiling(r: Request) -> Tiles:
    """Tiles within shared memory and registers.

    On Hopper two programs share a processor, 114 KB each: one computes scores while the other
    turns its own into probabilities.
    """
    assert r.q is not None
    if launch.warpgroups(r.q.device):
        return Tiles(rows=64, keys=64, warps=4, stages=3, boxes=boxable(r, 64))
    wide = max(r.q.shape[-1], r.pool.shape[-1]) > 64
    return Tiles(rows=64, keys=32 if wide else 64, warps=4, stages=2, boxes=False)


def _share(r: Request, dims: int) -> int:
    """Heads whose row tiles take turns, longest first: as many as the L2 cache holds keys of."""
    share = max(1, min(_CACHED // (r.capacity * 2 * dims), r.batch * r.kv_heads))
    if r.window[1] is None and share > 8:  # all tiles are equally long: head by head
        return 1
    return share


def _bound(r: Request, score: Any) -> float:
    """What no score exceeds, if probabilities fit in bf16 without a maximum taken off; or 0."""
    bound = r.softcap if score is None or r.softcap > 0 else score.bound
    return bound if bound <= _BOUND and r.pool.dtype == torch.bfloat16 else 0.0


def _reach(r: Request) -> float:
    """Keys that a row sees at most."""
    left, right = r.window
    reach = math.inf if left is None or right is None else left + right + 1
    return min(reach, r.attention_chunk or math.inf)


def boxable(r: Request, keys: int) -> bool:
    """Whether TMA can bring whole tiles of keys."""
    if not launch.warpgroups(r.lead.device):
        return False
    if r.paged and (r.page_size % keys or r.cache_leftpad is not None):
        return False
    assert r.k_cache is not None
    return all(x.data_ptr() % 16 == 0 for x in (r.k_cache, r.pool))


def _box(cache: Tensor, keys: int, columns: int) -> Any:
    """[row of the cache or page, slot, kv head, channel]; strides of single elements are free."""
    if cache.dim() == 3:
        cache = cache[None]
    spare = -(-cache.shape[-1] // 8) * 8
    steps = [spare if n == 1 else s for n, s in zip(cache.shape[:-1], cache.stride(), strict=False)]
    return TensorDescriptor(cache, [*cache.shape], [*steps, 1], [1, keys, 1, columns])


def attend(r: Request, out: Tensor, lse: Tensor, tiles: Tiles | None = None) -> None:
    """One launch over all row tiles and kv heads."""
    q, k_cache = launch.unit(r.q), r.k_cache
    assert q is not None and k_cache is not None
    tiles = tiles or tiling(r)
    heads, group = r.kv_heads, r.heads // r.kv_heads
    ragged = r.cu_seqlens_q is not None
    d, dv = q.shape[-1], r.pool.shape[-1]
    da, va = launch.pow2(d), launch.pow2(dv)
    count = _tiles(r, tiles.rows)
    boxes = (None, None)
    if tiles.boxes:
        boxes = _box(k_cache, tiles.keys, da), _box(r.pool, tiles.keys, va)
    total = q.shape[0] if ragged else q.shape[1]
    left, right = r.window
    share = tiles.share or _share(r, da + va)
    stride, lines, blocks, size = launch.table(r)
    score = launch.lowered(r).score
    bound = _bound(r, score)
    lead: tuple[int, ...] = (0,) if ragged else ()
    arguments = (
        q, k_cache, r.pool, *boxes, out, lse if r.return_lse else None,
        r.cache_seqlens, r.cu_seqlens_q, r.cu_seqlens_k, r.cu_seqlens_k_new, r.seqused_q,
        r.cache_leftpad, r.cache_batch_idx, r.page_table,
        launch.rotary(r.rotary_cos), launch.rotary(r.rotary_sin), r.rotary_seqlens,
        launch.unit(r.q_norm_weight), r.sinks,
        () if score is None else score.aux,
        (*lead, *q.stride()[:-1]), launch.strides(k_cache), launch.strides(r.pool),
        (*lead, *out.stride()[:-1]), (*lead, *lse.stride()),
        stride, r.batch, count // r.batch, total, launch.fresh(r), r.capacity, lines, blocks,
        0 if r.rotary_cos is None else r.rotary_cos.shape[0], share,
        r.softmax_scale, r.softcap, bound, left or 0, right or 0, r.attention_chunk,
    )  # fmt: skip
    constants = {
        "HEADS": heads, "GROUP": group, "PAGE": size, "D": d, "DA": da, "DV": dv, "VA": va,
        "HALF": 0 if r.rotary_cos is None else r.rotary_cos.shape[1],
        "INTERLEAVED": r.rotary_interleaved, "ADVANCE": int(r.local),
        "INCLUDED": r.slot_mapping is not None,
        "HAS_LEFT": left is not None, "HAS_RIGHT": right is not None,
        "CHUNKED": r.attention_chunk > 0, "CAPPED": r.softcap > 0,
        "SCORE_MOD": None if score is None else score.function, "BOUNDED": bound > 0,
        "BM": tiles.rows, "BN": tiles.keys, "NARROW": _reach(r) <= 8 * tiles.keys,
        "WIDE": max(checks.extent(k_cache), checks.extent(r.pool)) >= _WIDE,
        "EPS": launch.eps(r),
    }  # fmt: skip
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    target().launch(_prefill, (count * heads,), arguments, constants, **options)

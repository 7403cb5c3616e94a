"""From a request to kernel arguments: strides, kinds, tiles, splits, workspaces."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kvattn import quant
from kvattn.backends.triton_replay import target
from kvattn.kernels.append import append as _append
from kvattn.kernels.attention import attention as _attention
from kvattn.request import Request

_KINDS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3}
TL = {torch.float16: triton.language.float16, torch.bfloat16: triton.language.bfloat16}
_LEAF = 512  # keys in a fixed share of the batch-invariant mode
ROWS = 32  # packed query rows of a sequence that the decode kernel takes at most


def raw(x: Tensor | None) -> Tensor | None:
    """FP8 and its scales as bytes: kernels decode them in integer arithmetic."""
    if x is None or x.dtype not in (*quant.FP8, torch.float8_e8m0fnu):
        return x
    return x.view(torch.uint8)


def kind(x: Tensor | None) -> int:
    return 0 if x is None else _KINDS.get(x.dtype, 0)


def strides(cache: Tensor | None) -> tuple[int, int, int]:
    """(block, row, head) strides; a packed cache has no blocks."""
    if cache is None:
        return (0, 0, 0)
    if cache.dim() == 3:
        return (0, cache.stride(0), cache.stride(1))
    return (cache.stride(0), cache.stride(1), cache.stride(2))


def _mx_strides(scale: Tensor | None, data: Tensor | None) -> tuple[int, ...]:
    """(block, row, head, group) of plain scales, or of interleaved blocks: see append._mx_at."""
    if scale is None or data is None:
        return (0, 0, 0, 0)
    if quant.mx_layout(scale, data, tokens=True) != "interleaved":
        return (0, *scale.stride()) if scale.dim() == 3 else tuple(scale.stride())
    n, h, rm, rk, r32, r4, g4 = quant.mx_blocks(scale, data).stride()
    return (n, rm, h, rk, r32, r4, g4)


def scale_strides(scale: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if scale is None else tuple(scale.stride())


def table(r: Request) -> tuple[int, int, int, int]:
    """(row stride of the page table, lines, blocks, slots of a block)."""
    if r.page_table is not None:
        table = r.page_table
        return table.stride(0), table.shape[0], r.pool.shape[0], r.page_size
    if r.cu_seqlens_k is not None:
        return 0, r.batch, 1, r.pool.shape[0]
    return 0, r.pool.shape[0], r.pool.shape[0], r.page_size


def fresh(r: Request) -> int:
    """New tokens of every sequence, where they are padded."""
    return 0 if r.k is None or r.k.dim() == 3 else r.k.shape[1]


def pow2(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def unit(x: Tensor | None) -> Tensor | None:
    """The tensor itself, or a copy if its last dimension is strided."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def rotary(x: Tensor | None) -> Tensor | None:
    """A rotary table with packed rows; FP8 tables are widened."""
    if x is None:
        return None
    return (x.float() if x.dtype in quant.FP8 else x).contiguous()


def eps(r: Request) -> float:
    """The epsilon of the norms; one number where there are none, so that kernels are the same."""
    return 0.0 if r.q_norm_weight is None and r.k_norm_weight is None else r.norm_eps


def append(r: Request) -> None:
    """One launch that stores all new tokens."""
    assert r.k is not None and r.v is not None and r.k_cache is not None
    k, v, k_cache, v_cache = unit(r.k), unit(r.v), r.k_cache, r.pool
    assert k is not None and v is not None
    ragged = r.cu_seqlens_k_new is not None
    tokens = k.shape[0] if ragged else k.shape[0] * k.shape[1]
    heads, d, dv = k.shape[-2], k.shape[-1], v.shape[-1]
    if tokens == 0 or heads == 0 or r.batch == 0:
        return
    stride, lines, blocks, size = table(r)
    casts, scalings = [], []
    for new, cache, scale in ((k, k_cache, r.k_descale), (v, v_cache, r.v_descale)):
        cast = new.dtype != cache.dtype
        casts.append(cast)
        by_token = scale is not None and quant.per_token(scale, cache)
        how = 2 if by_token else 1 if scale is not None else 0
        scalings.append(how if cast else 0)
    half = 0 if r.rotary_cos is None else r.rotary_cos.shape[1]
    new_strides = [(0, *x.stride()[:2]) if ragged else x.stride()[:3] for x in (k, v)]
    arguments = (
        raw(k), raw(v), raw(k_cache), raw(v_cache),
        r.cache_seqlens, r.cu_seqlens_k_new, r.cache_batch_idx,
        None if r.slot_mapping is not None else r.page_table, r.slot_mapping, r.rotary_seqlens,
        rotary(r.rotary_cos), rotary(r.rotary_sin), unit(r.k_norm_weight),
        r.k_descale, r.v_descale, raw(r.sfk), raw(r.sfv),
        *new_strides, strides(k_cache), strides(v_cache),
        scale_strides(r.k_descale), scale_strides(r.v_descale),
        _mx_strides(r.sfk, k_cache), _mx_strides(r.sfv, v_cache),
        stride, r.batch, max(1, k.shape[1]), lines, blocks, size, r.capacity,
        0 if r.rotary_cos is None else r.rotary_cos.shape[0],
    )  # fmt: skip
    constants = {
        "HEADS": heads, "D": d, "DV": dv, "DP": max(32, pow2(d)), "DVP": max(32, pow2(dv)),
        "HALF": half, "INTERLEAVED": r.rotary_interleaved,
        "KIND": kind(k_cache), "V_KIND": kind(v_cache), "CAST": casts[0], "V_CAST": casts[1],
        "SCALING": scalings[0], "V_SCALING": scalings[1], "EPS": eps(r),
    }  # fmt: skip
    # without fused multiplications, for the same roundings as plain torch
    options = {"num_warps": 1, "enable_fp_fusion": False}
    target().launch(_append, (tokens * heads,), arguments, constants, **options)


def halves(d: int) -> tuple[int, int]:
    """A head dim as one or two powers of two that waste little: 80 = 64 + 16, 576 = 512 + 64."""
    whole = pow2(d)
    if whole <= 64 or 4 * d > 3 * whole:
        return whole, 0
    return whole // 2, pow2(d - whole // 2)


def multiplied(r: Request) -> torch.dtype:
    """The dtype of the matrix products: the query's, unless the cache is wide and differs."""
    lead, kinds = r.lead.dtype, {x.dtype for x in (r.k_cache, r.v_cache) if x is not None}
    wide = {d for d in kinds if d not in quant.NARROW}
    if lead in quant.FP8:
        return wide.pop() if len(wide) == 1 and torch.float32 not in wide else torch.bfloat16
    if lead == torch.float32 or wide - {lead}:
        return torch.float32
    return lead


def _block_map(r: Request) -> tuple[Tensor | None, int, int]:
    """Which blocks are listed, as bytes [B | 1, H | 1, Mb, Nb]: 1 masked, 2 full; and its sizes."""
    if r.gather_kv_indices is not None:
        flat = r.gather_kv_indices
        cap = r.capacity
        picked = torch.where((flat < 0) | (flat >= cap), cap, flat).long()
        seen = torch.zeros(*flat.shape[:-1], cap + 1, dtype=torch.uint8, device=flat.device)
        seen.scatter_(-1, picked, 1)  # a mask_mod still applies
        return (seen[:, None] if flat.dim() == 3 else seen[None, None])[..., :cap], 1, 1
    sparse = r.block_sparse
    if sparse is None:
        return None, 1, 1
    columns = -(-r.capacity // sparse.block_size[1])
    total = None
    for counts, indices, value in (
        (sparse.mask_block_cnt, sparse.mask_block_idx, 1),
        (sparse.full_block_cnt, sparse.full_block_idx, 2),
    ):
        if counts is None or indices is None:
            continue
        valid = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        valid &= (indices >= 0) & (indices < columns)
        at = torch.where(valid, indices, columns).long()
        seen = torch.zeros(*counts.shape, columns + 1, dtype=torch.uint8, device=counts.device)
        seen.scatter_(-1, at, value)
        total = seen if total is None else torch.maximum(total, seen)
    assert total is not None
    return total[..., :columns], *sparse.block_size


def broadcast_strides(x: Tensor | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (0,) * len(shape) if x is None else tuple(x.expand(shape).stride())


@functools.cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def native_fp8(device: torch.device) -> bool:
    """Whether the GPU converts FP8 itself, exactly as integer arithmetic does."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 9)
    )


@functools.cache
def warpgroups(device: torch.device) -> bool:
    """Whether matrix products are those of Hopper's warpgroups, whose tiles are large."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may use."""
    if device.type != "cuda":
        return 101_376
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 65_536))


def _tile(r: Request, rows: int, edited: bool) -> tuple[int, int, int, int]:
    """(BM, BN, warps, stages) for a tile of packed rows."""
    dim = max(r.lead.shape[-1], r.pool.shape[-1])
    large = warpgroups(r.lead.device)  # elsewhere sums of larger tiles overflow the registers
    bm = min(64 if dim > 128 or edited or not large else 128, pow2(rows))
    if r.pool.shape[-1] <= 16:  # products 16 columns wide lose keys in 64-row tiles
        bm = 16
    if dim > 256:
        bm = min(bm, 16 if r.qv is not None else 32)
    wide = multiplied(r) == torch.float32
    bn = 64 if dim <= 128 and (large or bm < 64) else 32
    if wide:
        bn, bm = 32, min(bm, 32)
    if dim > 256:
        bn = 32 if not wide else 16
    warps = 8 if bm >= 128 or dim > 256 else 4
    # the page table counts as a stage, so 5 keep two tiles of keys and values in flight
    stages = 2 if bm > 16 or dim > 128 or wide else 5
    return bm, bn, warps, stages if copyable(r) else 1


def copyable(r: Request) -> bool:
    """Whether rows of the caches start at multiples of 16 elements, as asynchronous copies need."""
    return all(
        step % 16 == 0
        for cache in (r.k_cache, r.v_cache)
        if cache is not None
        for step in (*cache.stride()[:-1], cache.shape[-1], cache.data_ptr())
    )


def edits(r: Request) -> bool:
    """Whether anything but the softmax scale changes the scores."""
    more = (r.rel_bias, r.alibi_slopes, r.score_mod)
    return r.softcap > 0 or any(x is not None for x in more)


def few_tokens(r: Request) -> int:
    """Query tokens of a sequence that count as few in the batch-invariant mode."""
    return max(8, ROWS * r.kv_heads // max(1, r.heads))


def by_length(r: Request) -> tuple[Request, ...]:
    """Sequences of few query tokens and of many, in the batch-invariant mode: a sequence's own
    queries decide which kernel it gets, not the longest of the batch."""
    edges = r.cu_seqlens_q
    if not r.batch_invariant or edges is None:
        return (r,)
    limit = few_tokens(r)
    most = min(r.lead.shape[0], r.max_seqlen_q or r.lead.shape[0])
    if most <= limit:
        return (replace(r, max_seqlen_q=most),)
    lengths = edges.diff()
    if r.seqused_q is not None:
        lengths = lengths.minimum(r.seqused_q)
    few = lengths.where(lengths <= limit, 0)
    return (
        replace(r, seqused_q=few, max_seqlen_q=limit),
        replace(r, seqused_q=lengths - few, max_seqlen_q=most),
    )


def attend(r: Request, out: Tensor, lse: Tensor) -> None:
    """One launch over all row tiles, kv heads and shares of the keys."""
    lead, heads = r.lead, r.kv_heads
    if r.batch == 0 or lead.numel() == 0:
        return
    group = r.heads // heads
    ragged = r.cu_seqlens_q is not None
    total = lead.shape[0] if ragged else lead.shape[1]
    longest = min(total, r.max_seqlen_q or total) if ragged else total
    if ragged and r.max_seqlen_q is None:
        longest = -(-total // r.batch)
    mods = lowered(r)
    edited = edits(r)
    rows = longest * group
    if r.batch_invariant:  # one tile for any few query tokens
        rows = 16 if longest <= few_tokens(r) else 64
    bm, bn, warps, stages = _tile(r, rows, edited or mods.mask is not None)
    tiles = -(-total * group // bm)
    all_tiles = total * group // bm + r.batch if ragged else tiles * r.batch
    reach = r.capacity if r.window[0] is None else min(r.capacity, r.window[0] + longest + bn)
    splits, leaf = splits_of(r, all_tiles * heads, reach, bn), 0
    if r.batch_invariant:
        splits, leaf = max(1, -(-r.capacity // _LEAF)), _LEAF
    q, qv = unit(r.q), unit(r.qv)
    d = lead.shape[-1] if r.q is not None else 16
    (da, db), (va, vb) = halves(d), halves(r.pool.shape[-1])
    split = splits > 1 or leaf > 0
    mr = min(bm, triton.next_power_of_2(group * (1 if ragged else total)))
    if r.batch_invariant:
        mr = bm
    span = 1 << min(4, max(0, (8192 // (mr * (va + vb))).bit_length() - 1))
    part = stats = count = None
    if split:
        spots = all_tiles * heads * splits * bm
        part = target().scratch("part", spots * (va + vb), lead.device)
        stats = target().scratch("stats", spots * 2, lead.device)
        count = target().counters(all_tiles * heads, lead.device)
    stride, lines, blocks, size = table(r)
    block_map, map_m, map_n = _block_map(r)
    scaled = any(x is not None for x in (r.q_descale, r.k_descale, r.v_descale))
    plain = (
        mods.score is None and mods.mask is None and block_map is None and r.attention_chunk == 0
    )
    unscaled = not (edited or scaled or r.qv is not None) and r.softmax_scale > 0
    map_strides = (0, 0, 0)
    if block_map is not None:
        b0 = 0 if block_map.shape[0] == 1 else block_map.stride(0)
        h0 = 0 if block_map.shape[1] == 1 else block_map.stride(1)
        map_strides = (b0, h0, block_map.stride(2))
    query = lambda x: (0, *x.stride()[:2]) if ragged else tuple(x.stride()[:3])  # noqa: E731
    none3 = (0, 0, 0)
    dtype = multiplied(r)
    left, right = r.window
    lse_strides = (0, *lse.stride()) if ragged else tuple(lse.stride())
    k_by_token = r.k_descale is not None and quant.per_token(r.k_descale, r.pool)
    v_by_token = r.v_descale is not None and quant.per_token(r.v_descale, r.pool)
    bias = r.rel_bias
    tokens_sfv = r.sfv is not None and quant.mx_layout(r.sfv, r.pool, tokens=True) == "tokens"
    arguments = (
        raw(q), raw(qv), raw(r.k_cache), raw(r.v_cache), out,
        lse if r.return_lse else None, part, stats, count,
        r.cache_seqlens, r.cu_seqlens_q, r.cu_seqlens_k, r.cu_seqlens_k_new, r.seqused_q,
        r.cache_leftpad, r.cache_batch_idx, r.page_table,
        rotary(r.rotary_cos), rotary(r.rotary_sin), r.rotary_seqlens, unit(r.q_norm_weight),
        r.q_descale, r.k_descale, r.v_descale, raw(r.sfq), raw(r.sfk), raw(r.sfv),
        r.alibi_slopes, r.sinks, bias, block_map,
        *mods.captured,
        none3 if q is None else query(q), none3 if qv is None else query(qv),
        strides(r.k_cache), strides(r.v_cache), query(out), lse_strides,
        scale_strides(r.q_descale), scale_strides(r.k_descale), scale_strides(r.v_descale),
        _mx_strides(r.sfq, r.q), _mx_strides(r.sfk, r.k_cache), _mx_strides(r.sfv, r.v_cache),
        broadcast_strides(r.alibi_slopes, (r.batch, r.heads)),
        (0, 0, 0, 0) if bias is None else (0, *bias.stride()) if ragged else tuple(bias.stride()),
        map_strides,
        stride, r.batch, tiles, total, fresh(r), r.capacity, lines, blocks,
        0 if r.rotary_cos is None else r.rotary_cos.shape[0],
        r.softmax_scale, r.softcap, left or 0, right or 0, r.attention_chunk,
        0 if bias is None else bias.shape[-1], splits,
    )  # fmt: skip
    constants = {
        "HEADS": heads, "GROUP": group, "PAGE": size,
        "DA": da, "DB": db, "D": d, "VA": va, "VB": vb, "DV": r.pool.shape[-1],
        "HALF": 0 if r.rotary_cos is None else r.rotary_cos.shape[1],
        "INTERLEAVED": r.rotary_interleaved, "ADVANCE": int(r.local),
        "DTYPE": TL.get(dtype, triton.language.float32),
        "Q_KIND": kind(lead), "K_KIND": kind(r.k_cache), "V_KIND": kind(r.v_cache),
        "INCLUDED": r.slot_mapping is not None, "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None, "CHUNKED": r.attention_chunk > 0, "CAPPED": r.softcap > 0,
        "BY_TOKEN_K": k_by_token, "BY_TOKEN_V": v_by_token, "SFV_TOKENS": tokens_sfv,
        "MAP_M": map_m, "MAP_N": map_n, "MAP_FLAT": r.gather_kv_indices is not None,
        **mods.functions, "EDITED": edited,
        "BM": bm, "BN": bn, "SPLIT": split, "LEAF": leaf, "REVERSED": right is not None,
        "MR": mr, "SPAN": span, "EPS": eps(r),
        "PLAIN": plain, "RAW": unscaled, "ALIGNED": size % bn == 0 and r.cache_leftpad is None,
    }  # fmt: skip
    grid = (all_tiles * heads * splits,)
    options = {"num_warps": warps, "num_stages": stages}
    target().launch(_attention, grid, arguments, constants, **options)


def splits_of(r: Request, programs: int, reach: int, bn: int) -> int:
    """Shares of the keys: about a program for every processor, at least a tile of keys each."""
    most = max(1, -(-reach // bn))
    if r.num_splits > 0:
        return min(r.num_splits, most, 256)
    wanted = processors(r.lead.device) // max(1, programs)
    return max(1, min(wanted, most, 128))


class Mods(NamedTuple):
    """The call's mods as device functions with their captured tensors."""

    score: Any = None
    mask: Any = None
    bounds: Any = None  # of the keys that the mask may keep, where it was made with them

    @property
    def captured(self) -> tuple[tuple[Any, ...], ...]:
        return tuple([() if mod is None else mod.aux for mod in self])

    @property
    def functions(self) -> dict[str, Any]:
        names = ("SCORE_MOD", "MASK_MOD", "BOUNDS")
        mods = zip(names, self, strict=True)
        return {name: None if mod is None else mod.function for name, mod in mods}


def lowered(r: Request) -> Mods:
    if r.score_mod is None and r.mask_mod is None:
        return Mods()
    from kvattn import mods

    device = r.lead.device
    score = mask = bounds = None
    if r.score_mod is not None:
        score = mods.lower_score_mod(r.score_mod, r.aux_tensors, device)
    if r.mask_mod is not None:
        mask = mods.lower_mask_mod(r.mask_mod, r.aux_tensors, device)
        bounds = mods.lower_interval(r.mask_mod, r.aux_tensors, device)
    return Mods(score, mask, bounds)

"""Few query rows over a cache: which calls the decode kernel takes, its tiles, its arguments."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kvattn import quant
from kvattn.backends import triton_launch as launch
from kvattn.backends.triton_replay import target
from kvattn.kernels.decode import decode as _decode
from kvattn.request import Request

_LEAF = 512  # keys in the first fixed shares of the batch-invariant mode
_WAVES = 3  # programs a processor, where shares differ
_BATCH = 1024  # sequences whose lengths one program adds up
# Triton 3.6 holds one stage less than it is asked for, 3.8 also the keys or values of that one.
_AHEAD = 1 if triton.__version__.startswith("3.6.") else 0


@dataclass(frozen=True)
class Shape:
    """What the choice of tiles depends on: sizes, no data."""

    rows: int  # packed query rows of a sequence
    ragged: int  # packed query rows of the batch if it is ragged, else 0
    batch: int
    heads: int  # kv heads
    capacity: int  # rows of a sequence at most
    dims: int  # both padded head dims together
    width: int  # bytes of a cached element
    multiplied: int  # bytes of an element in the products
    pairs: bool  # narrow caches, read two channels at a time
    page: int  # 0 for dense
    leftpad: bool
    processors: int
    shared: int  # bytes of shared memory a program may use
    invariant: bool
    splits: int  # asked for, 0 for none
    plain: bool  # no mask but length and causality, no softcap
    warpgroups: bool  # a Hopper GPU


@dataclass(frozen=True)
class Tiles:
    """A decode launch: rows and row tiles, warps, keys a warp, stages, shares."""

    r: int
    tiles: int
    warps: int
    keys: int
    stages: int
    each: int  # shares of a sequence
    parts: int  # shares of the whole batch, if flat and its sequences are unlike each other
    slots: int  # shares that there may be
    flat: int  # 0, or a power of two at or above the batch: shares are dealt out on the device
    spread: int
    split: bool  # whether some sequence may have more than one share


class Common(NamedTuple):
    """What the kernel for a common prefix leaves: sums of `shares` shares for every row."""

    part: Tensor | None = None
    stats: Tensor | None = None
    keys: int = 0  # of it; with a length, the least of which it leaves anything
    shares: int = 0
    length: Tensor | None = None


_NONE = Common()


def plan(s: Shape) -> Tiles:
    """16 rows a program at most, and as many shares as keep every processor reading."""
    r = 8 if s.rows <= 8 else 16
    tiles = 1 if s.ragged else -(-s.rows // r)
    lots = s.ragged // r + s.batch if s.ragged else s.batch  # what is dealt out in shares
    programs = s.heads * tiles
    warps, keys, stages = _tile(s)
    block = warps * keys
    most = max(1, -(-s.capacity // block))
    wave = max(1, s.processors // programs)  # shares that occupy every processor once
    parts = _WAVES * wave
    flat = triton.next_power_of_2(max(2, s.batch)) if s.batch <= _BATCH else 0
    if s.batch == 1 and not s.ragged:
        flat = 0
    if s.invariant:
        each = leaves(s.capacity)
        slots = each * lots
    elif not s.ragged and (s.splits > 0 or flat == 0):
        # a merge takes one round per 16 shares, so more of them pay for long sequences only
        some = min(wave, max(16, int(4 * most**0.5))) if s.batch == 1 else 1
        each = min(s.splits or some, most, 256)
        slots, flat = each * s.batch, 0
    else:
        # unpacking leaves a processor time to read for a second program
        room = s.processors * (2 if s.pairs else 1)
        each = min(s.splits or each_of(lots * programs, room), most)
        slots = min(max(each * lots, parts + lots), most * lots)
    spread = 2
    if s.page == 0 or (s.page % block == 0 and not s.leftpad):
        spread = 0
    elif s.page % keys == 0 and not s.leftpad:
        spread = 1
    split = slots > lots
    return Tiles(r, tiles, warps, keys, stages, each, parts, slots, flat, spread, split)


def each_of(programs: int, processors: int) -> int:
    """Shares for each of many sequences of like lengths: few, and of few, full rounds.

    In units of a sequence: a round costs a little of its own, and a processor reads a little
    slower with one program than with two.
    """

    def cost(each: int) -> float:
        rounds = -(-programs * each // processors)
        return rounds * (1 / each + 0.03) * (1.05 if rounds == 1 else 1.0)

    return min(range(1, 17), key=cost)


def leaves(keys: int) -> int:
    """Fixed shares of the batch-invariant mode: 8 of _LEAF keys, the rest of 4 * _LEAF."""
    return max(1, -(-min(keys, 8 * _LEAF) // _LEAF) - -max(keys - 8 * _LEAF, 0) // (4 * _LEAF))


def _tile(s: Shape) -> tuple[int, int, int]:
    """(warps, keys a warp, stages): three tiles in flight, or two large ones."""
    warps, keys, stages = 4, 16, 4
    few = s.dims <= 256 and s.rows <= 8
    if few and s.pairs and s.warpgroups:  # the batch-invariant mode has one tile for all pages
        keys, stages = (32, 3) if s.page % 32 == 0 and not s.invariant else (16, 6)
    elif few and s.batch == 1 and s.capacity > 4096 and not s.invariant:
        keys, stages = 32, 3
    while stages > 1 and _bytes(s, warps * keys, stages) > s.shared:
        stages -= 1
    return warps, keys, stages


def _bytes(s: Shape, block: int, stages: int) -> int:
    """Shared memory of the tiles in flight."""
    return block * s.dims * s.width * max(stages - _AHEAD, 1)


def takes(r: Request) -> bool:
    """Whether the decode kernel knows everything that the call asks for."""
    lead = r.lead
    others = (r.qv, r.cu_seqlens_k, r.block_sparse, r.gather_kv_indices, r.sfq, r.sfk, r.sfv)
    if r.q is None or r.k_cache is None or any(x is not None for x in others):
        return False
    if r.k_cache.dim() != 4 or any(x.numel() == 0 for x in (lead, r.k_cache, r.pool)):
        return False
    if r.page_table is not None and r.page_table.numel() == 0:
        return False
    dtype = launch.multiplied(r)
    caches = (r.k_cache, r.pool)
    if dtype == torch.float32 or any(c.dtype not in (dtype, *quant.NARROW) for c in caches):
        return False
    if max(launch.pow2(lead.shape[-1]), launch.pow2(r.pool.shape[-1])) > 256:
        return False
    if any(c.stride(1) >= 1 << 23 for c in caches):  # a tile's offsets are 32 bits wide
        return False
    scales = ((r.k_descale, r.k_cache), (r.v_descale, r.pool))
    if any(scale is not None and quant.per_token(scale, cache) for scale, cache in scales):
        return False
    if r.cu_seqlens_q is not None and (r.max_seqlen_q is None or r.batch > _BATCH):
        return False
    if r.batch_invariant:
        return _longest(r) <= launch.few_tokens(r)
    return _longest(r) * (r.heads // r.kv_heads) <= launch.ROWS


def _longest(r: Request) -> int:
    """Query tokens of a sequence at most; of ragged ones, by the caller's hint."""
    if r.cu_seqlens_q is None:
        return r.lead.shape[1]
    return min(r.lead.shape[0], r.max_seqlen_q or r.lead.shape[0])


def appends(r: Request) -> bool:
    """Whether the decode kernel also stores the new tokens: every one of them is in its view."""
    if r.k is None or r.v is None or r.slot_mapping is not None or r.attention_chunk > 0:
        return False
    if any(x is not None for x in (r.cu_seqlens_q, r.cu_seqlens_k_new, r.seqused_q)):
        return False
    new = r.k.shape[1]
    left = r.window[0]
    return 0 < new <= 16 and (left is None or left + r.lead.shape[1] >= new)


def shape_of(r: Request) -> Shape:
    dk, dv = launch.pow2(r.lead.shape[-1]), launch.pow2(r.pool.shape[-1])
    group = r.heads // r.kv_heads
    return Shape(
        rows=_longest(r) * group, batch=r.batch, heads=r.kv_heads,
        ragged=0 if r.cu_seqlens_q is None else r.lead.shape[0] * group,
        capacity=r.capacity, dims=dk + dv, width=r.pool.element_size(),
        multiplied=launch.multiplied(r).itemsize, pairs=paired(r),
        page=r.page_size if r.paged else 0,
        leftpad=r.cache_leftpad is not None, processors=launch.processors(r.lead.device),
        shared=launch.shared_memory(r.lead.device), invariant=r.batch_invariant,
        splits=r.num_splits,
        plain=r.window[0] is None and r.attention_chunk == 0 and not launch.edits(r)
        and r.mask_mod is None,
        warpgroups=launch.warpgroups(r.lead.device),
    )  # fmt: skip


def paired(r: Request) -> bool:
    """Whether both caches are narrow and can be read two channels at a time."""
    return all(
        c is not None
        and c.dtype in quant.NARROW
        and all(
            x % 2 == 0 for x in (*c.stride()[:-1], c.shape[-1], c.storage_offset(), c.data_ptr())
        )
        for c in (r.k_cache, r.v_cache)
    )


def _units(r: Request, cache: Tensor | None) -> Tensor | None:
    """A cache in the units that the kernel reads: elements, or pairs of narrow channels."""
    return cache.view(torch.int16) if cache is not None and paired(r) else launch.raw(cache)


def registers(s: Shape, t: Tiles) -> dict[str, int]:
    """A limit that lets three programs share a processor, where it costs no spills."""
    if torch.version.hip is not None or t.warps != 4:
        return {}
    if not s.warpgroups:  # left alone, the assembler itself aims at three, and spills
        return {"maxnreg": 200} if s.dims <= 128 else {}
    small = t.r <= 8 and s.dims <= 256 and s.plain and s.width == s.multiplied
    room = 3 * _bytes(s, t.warps * t.keys, t.stages) <= s.shared
    return {"maxnreg": 168} if small and room else {}


def decode(r: Request, out: Tensor, lse: Tensor, common: Common = _NONE) -> None:
    """One launch: new tokens stored where `appends(r)`, attention, merge.

    With what a common prefix left, the keys of the prefix are not read again.
    """
    s = shape_of(r)
    t = plan(s)
    spots = t.slots * t.tiles * s.heads
    part = stats = count = None
    if t.split:
        dvp, device = launch.pow2(r.pool.shape[-1]), r.lead.device
        part = target().scratch("part", spots * t.r * dvp, device)
        stats = target().scratch("stats", spots * t.r * 2, device)
        count = target().counters(spots, device)
    mods = launch.lowered(r)
    constants = _constants(r, s, t, mods, common)
    target().launch(
        _decode,
        (spots,),
        (
            *_tensors(r, out, lse, part, stats, count, common),
            *mods.captured,
            *_numbers(r, t, out, lse, common),
        ),
        constants,
        num_warps=t.warps,
        num_stages=t.stages if launch.copyable(r) else 1,
        **registers(s, t),
        **({"launch_pdl": True} if constants["PDL"] else {}),
    )


def _new(r: Request) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The tokens that the kernel stores."""
    k, v = (launch.unit(r.k), launch.unit(r.v)) if appends(r) else (None, None)
    return (k, v) if k is not None and v is not None else (None, None)


def _tensors(
    r: Request,
    out: Tensor,
    lse: Tensor,
    part: Tensor | None,
    stats: Tensor | None,
    count: Tensor | None,
    common: Common,
) -> tuple[Tensor | None, ...]:
    k, v = _new(r)
    norm = launch.unit(r.k_norm_weight)
    return (
        launch.raw(launch.unit(r.q)), _units(r, r.k_cache), _units(r, r.v_cache), out,
        lse if r.return_lse else None, part, stats, count, launch.raw(k), launch.raw(v),
        r.cache_seqlens, r.cu_seqlens_q, r.cu_seqlens_k_new, r.seqused_q, r.cache_leftpad,
        r.cache_batch_idx, r.page_table, launch.rotary(r.rotary_cos), launch.rotary(r.rotary_sin),
        r.rotary_seqlens, launch.unit(r.q_norm_weight), None if k is None else norm,
        r.q_descale, r.k_descale, r.v_descale, r.sinks, common.part,
        common.stats, common.length, r.alibi_slopes, r.rel_bias,
    )  # fmt: skip


def _numbers(r: Request, t: Tiles, out: Tensor, lse: Tensor, common: Common) -> tuple[Any, ...]:
    """Strides, then sizes."""
    ragged = r.cu_seqlens_q is not None

    def of_rows(x: Tensor | None) -> tuple[int, ...]:
        return (0, 0, 0) if x is None else (0, *x.stride()[:2]) if ragged else x.stride()[:3]

    k, v = _new(r)
    table_stride, lines, blocks, _ = launch.table(r)
    left, right = r.window
    bias = r.rel_bias
    return (
        of_rows(launch.unit(r.q)), launch.strides(_units(r, r.k_cache)),
        launch.strides(_units(r, r.v_cache)),
        of_rows(out), (0, *lse.stride()) if ragged else lse.stride(), of_rows(k), of_rows(v),
        *(launch.scale_strides(x) for x in (r.q_descale, r.k_descale, r.v_descale)),
        launch.broadcast_strides(r.alibi_slopes, (r.batch, r.heads)),
        (0, 0, 0, 0) if bias is None else (0, *bias.stride()) if ragged else bias.stride(),
        table_stride, r.batch, t.slots, t.each, t.parts, r.lead.shape[0 if ragged else 1],
        launch.fresh(r), r.capacity, lines, blocks,
        0 if r.rotary_cos is None else r.rotary_cos.shape[0], common.keys, common.shares,
        r.softmax_scale, r.softcap, left or 0, right or 0, r.attention_chunk,
        0 if bias is None else bias.shape[-1],
    )  # fmt: skip


def _constants(r: Request, s: Shape, t: Tiles, mods: launch.Mods, common: Common) -> dict[str, Any]:
    d, dv = r.lead.shape[-1], r.pool.shape[-1]
    left, right = r.window
    scaled = any(x is not None for x in (r.q_descale, r.k_descale, r.v_descale))
    casts, scalings = [False, False], [0, 0]
    k, v = _new(r)
    if k is not None and v is not None and r.k_cache is not None:
        casts = [k.dtype != r.k_cache.dtype, v.dtype != r.pool.dtype]
        pairs = zip(casts, (r.k_descale, r.v_descale), strict=True)
        scalings = [int(cast and scale is not None) for cast, scale in pairs]
    # fixed rounds of the merge, whatever the number of rows
    mr = 8 if s.invariant else t.r if s.ragged else min(t.r, triton.next_power_of_2(s.rows))
    span = max(1, min(16, 8192 // (mr * launch.pow2(dv))))
    return {
        "HEADS": s.heads, "GROUP": r.heads // s.heads, "PAGE": r.page_size if r.paged else 1,
        "D": d, "DP": launch.pow2(d), "DV": dv, "DVP": launch.pow2(dv),
        "HALF": 0 if r.rotary_cos is None else r.rotary_cos.shape[1],
        "INTERLEAVED": r.rotary_interleaved, "ADVANCE": int(r.local),
        "DTYPE": launch.TL[launch.multiplied(r)],
        "Q_KIND": launch.kind(r.lead), "K_KIND": launch.kind(r.k_cache),
        "V_KIND": launch.kind(r.v_cache),
        "INCLUDED": r.slot_mapping is not None, "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None, "CHUNKED": r.attention_chunk > 0,
        "CAPPED": r.softcap > 0, "EDITED": launch.edits(r),
        "RAW": not (scaled or launch.edits(r)) and r.softmax_scale > 0,
        **mods.functions,
        "NEW": 0 if k is None else triton.next_power_of_2(k.shape[1]),
        "CAST": casts[0], "V_CAST": casts[1], "SCALING": scalings[0], "V_SCALING": scalings[1],
        "R": t.r, "TILES": t.tiles, "W": t.warps, "NK": t.keys, "BATCH": t.flat,
        "LEAF": _LEAF if s.invariant else 0, "SPREAD": t.spread, "MR": mr, "SPAN": span,
        "PAIRS": paired(r),
        "NATIVE": launch.native_fp8(r.lead.device), "PDL": _early(s, t, r.lead.device, common),
        "EPS": launch.eps(r),
    }  # fmt: skip


def _early(s: Shape, t: Tiles, device: torch.device, common: Common) -> bool:
    """Whether the launch begins before the kernel in front has ended, and waits on the GPU.

    That saves most of a microsecond, but costs one where a single sequence's programs are few.
    """
    few = s.batch == 1 or t.tiles > 1
    return launches_early(device) and (common.shares > 0 or not few)


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether the GPU knows programmatic dependent launches."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device)[0] >= 9

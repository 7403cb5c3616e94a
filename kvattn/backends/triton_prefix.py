"""A common prefix for all sequences of a batch: tiles, arguments, and what it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kvattn.backends import prefix, triton_decode
from kvattn.backends import triton_launch as launch
from kvattn.backends.prefix import BLOCK
from kvattn.backends.triton_decode import Common
from kvattn.backends.triton_replay import target
from kvattn.kernels.prefix import common_pages as _common_pages
from kvattn.kernels.prefix import prefix as _prefix
from kvattn.request import Request

_FEW = 12  # tiles of a share up to which one program a processor is enough

_LINES, _COLUMNS = 32, 64  # of a page table, that a program compares at once


@dataclass(frozen=True)
class Tiles:
    """Packed query rows and keys of a tile, warps, stages, shares of the keys."""

    rows: int
    keys: int
    warps: int
    stages: int
    shares: int


def common(table: Tensor, lengths: Tensor, rows: Tensor | None, size: int) -> Tensor:
    """The number of leading tokens in pages that all sequences share, () int32."""
    lines, columns = table.shape
    out = torch.full((), columns * size, dtype=torch.int32, device=table.device)
    arguments = (table, lengths, rows, out, table.stride(0), len(lengths), lines, columns, size)
    grid = (max(1, triton.cdiv(columns, _COLUMNS)),)
    target().launch(_common_pages, grid, arguments, {"BB": _LINES, "BC": _COLUMNS}, num_warps=4)
    return out


def tiling(r: Request) -> Tiles:
    """One round of programs, so that the decode kernel may start: one a processor, beside which
    the decode kernel's find room, or two where tiles are many.
    """
    device = r.lead.device
    large = launch.warpgroups(device)
    wide = max(launch.pow2(r.lead.shape[-1]), launch.pow2(r.pool.shape[-1])) > 128
    total = _rows(r)
    rows = min(64, launch.pow2(total))
    keys = 64 if large and not wide else 32
    programs = -(-total // rows) * r.kv_heads
    shares = launch.processors(device) // programs
    if r.common_most > _FEW * keys * shares:
        shares = 2 * launch.processors(device) // programs
    shares = max(1, min(shares, r.common_most // BLOCK))
    return Tiles(rows, keys, 8 if wide else 4, 3 if launch.copyable(r) else 1, shares)


def _rows(r: Request) -> int:
    """Packed query rows of a kv head."""
    return r.lead.shape[:-2].numel() * r.heads // r.kv_heads


def attend(r: Request, t: Tiles | None = None) -> Common:
    """One launch over row tiles of all sequences, kv heads and shares of the common keys."""
    t = t or tiling(r)
    q, k_cache, pool = launch.unit(r.q), r.k_cache, r.pool
    assert q is not None and k_cache is not None
    device, heads, ragged = q.device, r.kv_heads, r.cu_seqlens_q is not None
    d, dv, total = q.shape[-1], pool.shape[-1], _rows(r)
    spots = t.shares * heads * total
    part = target().scratch("common part", spots * launch.pow2(dv), device)
    stats = target().scratch("common stats", spots * 2, device)
    table_stride, lines, blocks, _ = launch.table(r)
    scaled = any(x is not None for x in (r.q_descale, r.k_descale))
    right, keys = r.window[1], r.common_most
    length: Tensor | None = None
    if isinstance(r.common_prefix_len, Tensor):
        keys, length = prefix.least(r.facts), r.common_prefix_len
    arguments = (
        launch.raw(q), launch.raw(k_cache), launch.raw(pool), part, stats,
        r.cache_seqlens, r.cu_seqlens_q, r.cu_seqlens_k_new, r.seqused_q, r.cache_batch_idx,
        r.page_table, length, launch.rotary(r.rotary_cos), launch.rotary(r.rotary_sin),
        r.rotary_seqlens, launch.unit(r.q_norm_weight), r.q_descale, r.k_descale,
        (0, *q.stride()[:2]) if ragged else q.stride()[:3], launch.strides(k_cache),
        launch.strides(pool), launch.scale_strides(r.q_descale), launch.scale_strides(r.k_descale),
        table_stride, r.batch, q.shape[0 if ragged else 1], launch.fresh(r), r.capacity, lines,
        blocks, 0 if r.rotary_cos is None else r.rotary_cos.shape[0], keys, t.shares,
        r.softmax_scale, r.softcap, right or 0,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "HEADS": heads, "GROUP": r.heads // heads, "PAGE": r.page_size if r.paged else 1,
        "D": d, "DP": launch.pow2(d), "DV": dv, "DVP": launch.pow2(dv),
        "HALF": 0 if r.rotary_cos is None else r.rotary_cos.shape[1],
        "INTERLEAVED": r.rotary_interleaved, "ADVANCE": int(r.local),
        "DTYPE": launch.TL[launch.multiplied(r)], "Q_KIND": launch.kind(q),
        "K_KIND": launch.kind(k_cache), "V_KIND": launch.kind(pool),
        "INCLUDED": r.slot_mapping is not None, "HAS_RIGHT": right is not None,
        "CAPPED": r.softcap > 0, "RAW": not (scaled or r.softcap > 0) and r.softmax_scale > 0,
        "BM": t.rows, "BN": t.keys, "PDL": triton_decode.launches_early(device),
        "EPS": launch.eps(r),
    }  # fmt: skip
    options: dict[str, Any] = {"num_warps": t.warps, "num_stages": t.stages}
    if constants["PDL"]:
        options["launch_pdl"] = True
    grid = (triton.cdiv(total, t.rows) * heads * t.shares,)
    target().launch(_prefix, grid, arguments, constants, **options)
    return Common(part, stats, keys, t.shares, length)

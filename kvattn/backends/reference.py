"""The specification: the whole contract in plain torch, on any device, written to be read.

One sequence at a time: append its new tokens, gather its logical keys, attend. Accumulates in
fp32, or in fp64 for fp64 queries and on request.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvattn import errors as E
from kvattn import quant
from kvattn.backends import prefix
from kvattn.errors.mod_kinds import ModBranchError
from kvattn.norm import rms_norm
from kvattn.option_checks import mod_arity
from kvattn.plan import Plan
from kvattn.request import Facts, Request, Span
from kvattn.rotary import rotate

name = "reference"
lasting = False
_MAX_SCORES = 1 << 25  # scores held at once; longer queries go in blocks of rows


def refuses(facts: Facts) -> str | None:
    """Takes everything that holds data."""
    return "meta tensors hold no data" if facts.device == "meta" else None


def kernel(facts: Facts) -> str:
    return "plain torch, one sequence at a time" + prefix.kernel(facts, "no two of them meet")


def run(
    r: Request, plan: Plan | None = None, accum: torch.dtype | None = None
) -> tuple[Tensor, Tensor] | None:
    """Appends the new tokens, then attends. Returns (out, lse), or None for an append alone."""
    r = r.apart()
    if r.k is not None or r.out is not None:
        try_mods(r)
    if r.k is not None:
        append(r)
    if not r.attend:
        return None
    if accum is None:
        accum = torch.float64 if r.lead.dtype == torch.float64 else torch.float32
    out, lse = r.outputs()
    for b, span in enumerate(r.spans):
        part_out, part_lse = attend_sequence(r, b, span, accum)  # [Sq, H, Dv], [H, Sq]
        part_out = quant.cast(part_out, out.dtype)
        if r.cu_seqlens_q is None:
            out[b, : span.q_len], lse[b, :, : span.q_len] = part_out, part_lse
        else:
            rows = slice(span.q_start, span.q_start + span.q_len)
            out[rows], lse[:, rows] = part_out, part_lse
    return out, lse


def prepare(r: Request) -> None:
    """Every call is made from the beginning."""


class NewTokens(NamedTuple):
    """New keys and values of the whole batch, flat, each with the slot it goes to."""

    k: Tensor  # [n, Hk, D], normalised and rotated
    v: Tensor  # [n, Hk, Dv]
    sequence: Tensor  # [n]
    block: Tensor  # [n] page or cache row
    offset: Tensor  # [n] slot within it


def append(r: Request) -> None:
    """Normalises, rotates, quantises and stores the new tokens in place."""
    assert r.k_cache is not None and r.v_cache is not None
    new = new_tokens(r)
    if new.block.numel() == 0:
        return
    for tokens, cache, scale, mx in (
        (new.k, r.k_cache, r.k_descale, r.sfk),
        (new.v, r.v_cache, r.v_descale, r.sfv),
    ):
        at = (new.block, new.offset)
        narrowed = tokens.dtype != cache.dtype
        if scale is not None and narrowed:
            wide = tokens if tokens.dtype == torch.float64 else tokens.float()
            if quant.per_token(scale, cache):
                factor = quant.token_scales(wide, cache.dtype)
                scale[at] = factor
            else:
                factor = scale[new.sequence]
            tokens = wide / factor[..., None]
        if mx is not None and narrowed:
            tokens, scales = quant.mx_quantise(tokens)
            quant.mx_store(mx, cache, *at, scales)
        elif narrowed and cache.dtype in quant.NARROW:
            quant.warn_if_clipped(tokens, cache.dtype)
        _bytes(cache)[at] = _bytes(quant.cast(tokens, cache.dtype))


def _bytes(x: Tensor) -> Tensor:
    """FP8 as bytes: indexed writes of FP8 are not implemented on every device."""
    return x.view(torch.uint8) if x.dtype in quant.FP8 else x


def new_tokens(r: Request) -> NewTokens:
    """Makes new keys ready, and finds the slot of every new token that is to be stored."""
    assert r.k is not None and r.v is not None
    device = r.k.device
    source, sequence, row, position = [], [], [], []
    bases = r.rotary_seqlens.tolist() if r.rotary_seqlens is not None else None
    for b, span in enumerate(r.spans):
        if span.active:
            steps = range(span.new_len)
            source += [span.new_start + t for t in steps]
            sequence += [b] * span.new_len
            row += [span.old + t for t in steps]
            position += [(bases[b] if bases else span.old) + t for t in steps]
    index = torch.tensor(source, dtype=torch.long, device=device)
    owner = torch.tensor(sequence, dtype=torch.long, device=device)
    k = r.k.reshape(-1, *r.k.shape[-2:])[index]
    v = r.v.reshape(-1, *r.v.shape[-2:])[index]
    at = torch.tensor(position, dtype=torch.long, device=device)
    k = _ready(r, k, r.k_norm_weight, at)
    if r.slot_mapping is not None:
        slots = r.slot_mapping[index]
        keep = slots >= 0
        slots = slots[keep]
        block, offset = slots // r.page_size, slots % r.page_size
        return NewTokens(k[keep], v[keep], owner[keep], block, offset)
    rows = torch.tensor(row, dtype=torch.long, device=device)
    line = torch.tensor([span.row for span in r.spans], dtype=torch.long, device=device)[owner]
    if r.page_table is None:
        return NewTokens(k, v, owner, line, rows)
    block = r.page_table[line, rows // r.page_size].long()
    return NewTokens(k, v, owner, block, rows % r.page_size)


def keys_and_values(r: Request, b: int, span: Span, accum: torch.dtype) -> list[Tensor | None]:
    """The logical keys [Sk, Hk, D] and values [Sk, Hk, Dv] of one sequence, dequantised."""
    found: list[Tensor | None] = []
    for cache, scale, mx in ((r.k_cache, r.k_descale, r.sfk), (r.v_cache, r.v_descale, r.sfv)):
        if cache is None:
            found.append(None)
            continue
        data = _logical(r, b, span, cache)
        if mx is not None:
            bytes_ = _logical(r, b, span, quant.mx_plain(mx, cache, tokens=mx is r.sfv))
            data = quant.mx_dequantise(data, bytes_, accum)
        data = data.to(accum)
        if scale is not None and quant.per_token(scale, cache):
            data = data * _logical(r, b, span, scale).to(accum)[..., None]
        found.append(data)
    return found


def _logical(r: Request, b: int, span: Span, cache: Tensor) -> Tensor:
    """Rows start..end of one sequence, whatever the layout."""
    if r.cu_seqlens_k is not None:
        first = int(r.cu_seqlens_k[b])
        return cache[first : first + span.keys]
    if r.page_table is None:
        return cache[span.row, span.start : span.start + span.keys]
    rows = torch.arange(span.start, span.start + span.keys, device=cache.device)
    pages = r.page_table[span.row, rows // r.page_size].long()
    return _bytes(cache)[pages, rows % r.page_size].view(cache.dtype)


def _query(r: Request, b: int, span: Span, tensor: Tensor | None) -> Tensor | None:
    """One sequence's rows of a tensor shaped like the query."""
    if tensor is None:
        return None
    if r.cu_seqlens_q is None:
        return tensor[b, : span.q_len]
    return tensor[span.q_start : span.q_start + span.q_len]


def _ready(r: Request, x: Tensor, weight: Tensor | None, positions: Tensor) -> Tensor:
    """Heads as they are multiplied or stored: normalised, rotated, rounded to their dtype once."""
    wide = x if weight is None else rms_norm(x, weight, r.norm_eps)
    if r.rotary_cos is not None and r.rotary_sin is not None:
        wide = rotate(wide, r.rotary_cos, r.rotary_sin, positions, r.rotary_interleaved)
    return wide if weight is None else quant.cast(wide, x.dtype)


def ready_query(r: Request, b: int, span: Span) -> Tensor | None:
    """q of one sequence, normalised and rotated to its positions where the call says so."""
    q = _query(r, b, span, r.q)
    if q is None or not span.active:
        return q
    base = int(r.rotary_seqlens[b]) if r.rotary_seqlens is not None else span.old
    steps = torch.arange(span.q_len, device=q.device)
    positions = base + (steps if r.local else torch.zeros_like(steps))
    return _ready(r, q, r.q_norm_weight, positions)


def attend_sequence(r: Request, b: int, span: Span, accum: torch.dtype) -> tuple[Tensor, Tensor]:
    """out [Sq, H, Dv] and lse [H, Sq] of one sequence."""
    dim, heads, device = r.pool.shape[-1], r.heads, r.lead.device
    if not span.active or span.q_len == 0:
        empty = torch.full((heads, span.q_len), -math.inf, dtype=accum, device=device)
        return torch.zeros(span.q_len, heads, dim, dtype=accum, device=device), empty
    k, v = keys_and_values(r, b, span, accum)
    assert v is not None
    q = ready_query(r, b, span)
    if q is not None and r.sfq is not None and r.q is not None:
        scales = _query(r, b, span, quant.mx_plain(r.sfq, r.q))
        assert scales is not None
        q = quant.mx_dequantise(q, scales, accum)
    qv = _query(r, b, span, r.qv)
    block = _rows_at_once(r, span)
    parts = []
    for first in range(0, span.q_len, block):
        rows = torch.arange(first, min(first + block, span.q_len), device=device)
        parts.append(_attend_rows(r, b, span, rows, q, qv, k, v, accum))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


def _attend_rows(
    r: Request,
    b: int,
    span: Span,
    rows: Tensor,
    q: Tensor | None,
    qv: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    accum: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Section 1 of the contract, line by line, for some query rows of one sequence."""
    keep = visible(r, b, span, rows)  # [H | 1, rows, Sk]
    if r.batch_invariant and keep.shape[-1]:
        last = int(keep.any(0).any(0).nonzero().amax()) + 1 if keep.any() else 0
        keep, v = keep[..., :last], v[:last]
        k = None if k is None else k[:last]
    alive = keep.any(0).any(0)[:, None, None]  # a key no row sees is a dead slot
    v = torch.where(alive, v, 0.0)
    q_scale = _per_head(r, b, r.q_descale, accum)
    k_scale = _per_head(r, b, _by_batch(r.k_descale, r.k_cache), accum)
    v_scale = _per_head(r, b, _by_batch(r.v_descale, r.v_cache), accum)
    s = torch.zeros(r.heads, len(rows), v.shape[0], dtype=accum, device=v.device)
    if q is not None and k is not None:
        s = s + k_scale * _dot(q[rows].to(accum), torch.where(alive, k, 0.0))
    if qv is not None:
        s = s + v_scale * _dot(qv[rows].to(accum), v)
    s = r.softmax_scale * q_scale * s
    if r.rel_bias is not None:
        s = s + _rel_bias(r, b, span, rows, v.shape[0]).to(accum)
    if r.score_mod is not None:
        s = _mod(r, r.score_mod, b, span, rows, v.shape[0], s).to(accum)
    if r.softcap > 0:
        s = r.softcap * torch.tanh(s / r.softcap)
    if r.alibi_slopes is not None:
        slopes = r.alibi_slopes.to(accum).expand(r.batch, r.heads)[b]
        s = s - slopes[:, None, None] * _distance(span, rows, v.shape[0]).abs()
    s = torch.where(keep, s, -math.inf)
    return _softmax(r, s, keep, v, v_scale)


def _softmax(
    r: Request, s: Tensor, keep: Tensor, v: Tensor, v_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """out [rows, H, Dv] and lse [H, rows] from masked logits s [H, rows, Sk]."""
    m = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
    if r.sinks is not None:
        sink = r.sinks.to(s.dtype)[:, None]
        m = torch.maximum(m, sink)
    safe = torch.where(m.isinf(), 0.0, m)  # an empty row, or a sink of +inf
    p = torch.exp(s - safe[..., None])
    z = p.sum(-1)
    if r.sinks is not None:
        z = z + torch.exp(sink - safe)
    lse = safe + torch.log(z)
    lse = torch.where(m.isinf(), m, lse)
    p = p / torch.where((z == 0) | z.isinf(), 1.0, z)[..., None]
    p = torch.where(m.isinf()[..., None], 0.0, p)
    heads = v.repeat_interleave(s.shape[0] // v.shape[1], 1)  # [Sk, H, Dv]
    if v.isfinite().all():
        out = torch.einsum("hqk,khd->qhd", p, heads)
    else:  # a NaN that one row sees must not reach a row that does not
        chosen = torch.where(keep[..., None], heads.transpose(0, 1)[:, None], 0.0)
        out = (p[..., None] * chosen).sum(2).transpose(0, 1)
    return out * v_scale.transpose(0, 1), lse


def _dot(q: Tensor, k: Tensor) -> Tensor:
    """Scores [H, rows, Sk] of queries [rows, H, D] and keys [Sk, Hk, D]; head h reads h // g."""
    return torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))


def _by_batch(scale: Tensor | None, cache: Tensor | None) -> Tensor | None:
    """A descale by (batch, kv head); scales per token are already in the keys and values."""
    if scale is None or cache is None or quant.per_token(scale, cache):
        return None
    return scale


def _per_head(r: Request, b: int, scale: Tensor | None, accum: torch.dtype) -> Tensor:
    """A (B, Hk) factor as [H, 1, 1]."""
    if scale is None:
        return torch.ones(1, 1, 1, dtype=accum, device=r.pool.device)
    per_head = scale[b].to(accum).repeat_interleave(r.heads // r.kv_heads)
    return per_head[:, None, None]


def _distance(span: Span, rows: Tensor, keys: int) -> Tensor:
    """p_i - j for bottom-right aligned positions p_i = i + Sk - Sq."""
    p = rows + span.keys - span.q_len
    return p[:, None] - torch.arange(keys, device=rows.device)[None, :]


def visible(r: Request, b: int, span: Span, rows: Tensor) -> Tensor:
    """Which keys each row may see, [H | 1, rows, Sk]: masks intersect, nothing un-masks."""
    distance = _distance(span, rows, span.keys)
    left, right = r.window
    keep = torch.ones_like(distance, dtype=torch.bool)
    if right is not None:  # causal is right = 0
        keep &= distance >= -right
    if left is not None:
        keep &= distance <= left
    if r.attention_chunk > 0:
        p = rows + span.keys - span.q_len
        j = torch.arange(span.keys, device=rows.device)
        chunk = r.attention_chunk
        keep &= torch.div(p, chunk, rounding_mode="floor")[:, None] == (j // chunk)[None, :]
    if r.gather_kv_indices is not None:
        chosen = _query(r, b, span, r.gather_kv_indices)
        assert chosen is not None
        listed = torch.zeros(len(rows), span.keys + 1, dtype=torch.bool, device=rows.device)
        listed.scatter_(1, torch.where(chosen[rows] < 0, span.keys, chosen[rows]).long(), True)
        keep &= listed[:, : span.keys]
    keep = keep[None]
    mod = None
    if r.mask_mod is not None:
        mod = _mod(r, r.mask_mod, b, span, rows, span.keys)
    if r.block_sparse is not None:
        keep = keep & _block_mask(r, b, rows, span.keys, mod)
    elif mod is not None:
        keep = keep & mod
    return keep


def _block_mask(r: Request, b: int, rows: Tensor, keys: int, mod: Tensor | None) -> Tensor:
    """Listed blocks as a mask [H, rows, Sk]; mask_mod applies inside the ``mask`` blocks only."""
    sparse = r.block_sparse
    assert sparse is not None
    size_q, size_k = sparse.block_size
    column = torch.arange(keys, device=rows.device) // size_k
    row = rows // size_q
    keep = torch.zeros(r.heads, len(rows), keys, dtype=torch.bool, device=rows.device)
    for counts, indices, inner in (
        (sparse.mask_block_cnt, sparse.mask_block_idx, mod),
        (sparse.full_block_cnt, sparse.full_block_idx, None),
    ):
        if counts is None or indices is None:
            continue
        count = counts[b if counts.shape[0] > 1 else 0].expand(r.heads, -1)[:, row]
        index = indices[b if indices.shape[0] > 1 else 0].expand(r.heads, -1, -1)[:, row]
        valid = torch.arange(index.shape[-1], device=rows.device) < count[..., None]
        hit = ((index[..., None] == column) & valid[..., None]).any(-2)  # [H, rows, Sk]
        keep |= hit if inner is None else hit & inner
    return keep


def _rel_bias(r: Request, b: int, span: Span, rows: Tensor, keys: int) -> Tensor:
    """rel_bias[i, h, p_i + right - j] where that index exists, else 0; [H, rows, keys]."""
    bias = _query(r, b, span, r.rel_bias)
    assert bias is not None
    shift = r.window[1]
    if shift is None:  # unbounded right: r = Sk - 1 - j
        at = (span.keys - 1 - torch.arange(keys, device=rows.device)).expand(len(rows), keys)
    else:
        at = _distance(span, rows, keys) + shift
    inside = (at >= 0) & (at < bias.shape[-1])
    index = at.clamp(0, bias.shape[-1] - 1)[:, None].expand(-1, r.heads, -1)
    picked = bias[rows].gather(2, index)  # [rows, H, keys]
    return torch.where(inside[:, None], picked, 0.0).transpose(0, 1)


class SeqlenInfo(NamedTuple):
    """What FA4-style callables are told of the sequence they are in."""

    offset_q: int
    offset_k: int
    seqlen_q: int
    seqlen_k: int


def _mod(
    r: Request,
    mod: Callable[..., Tensor],
    b: int,
    span: Span,
    rows: Tensor,
    keys: int,
    score: Tensor | None = None,
) -> Tensor:
    """Calls a score_mod or mask_mod on broadcastable indices; the result is [H, rows, keys]."""
    device = rows.device
    where = (
        torch.tensor(b, device=device),
        torch.arange(r.heads, device=device)[:, None, None],
        rows[None, :, None],
        torch.arange(keys, device=device)[None, None, :],
    )
    args = where if score is None else (score, *where)
    extra = mod_arity(mod) - len(args)
    if extra:
        offset_k = 0 if r.cu_seqlens_k is None else int(r.cu_seqlens_k[b])
        offset_q = 0 if r.cu_seqlens_q is None else span.q_start
        info = SeqlenInfo(offset_q, offset_k, span.q_len, span.keys)
        args = (*args, info, r.aux_tensors, ())[: len(args) + extra]
    shape, name = (r.heads, len(rows), keys), "mask_mod" if score is None else "score_mod"
    allowed = f"q_idx up to {span.q_len - 1}, kv_idx up to {keys - 1}, a result that fits {shape}"
    try:
        result = torch.as_tensor(mod(*args), device=device).expand(shape)
    except (IndexError, RuntimeError) as error:
        got = f"{type(error).__name__}: {error}"
        fix = ModBranchError.fix if "Boolean value of Tensor" in got else None
        raise E.ModResultError(name, got, allowed, fix) from error
    if score is None and result.dtype is not torch.bool:
        raise E.ModResultError(name, f"a result of {result.dtype}", "torch.bool")
    if result.requires_grad:
        raise E.RequiresGradError(name, "a captured tensor that requires grad", "no gradient")
    return result


def try_mods(r: Request) -> None:
    """Calls the mods before anything is written: their mistakes must leave caches and out alone."""
    for b, span in enumerate(r.spans):
        if not span.active or not span.q_len * span.keys:
            continue
        rows = torch.arange(span.q_len, device=r.lead.device)[-_rows_at_once(r, span) :]
        if r.mask_mod is not None:
            _mod(r, r.mask_mod, b, span, rows, span.keys)
        if r.score_mod is not None:
            score = torch.zeros(r.heads, len(rows), span.keys, device=rows.device)
            _mod(r, r.score_mod, b, span, rows, span.keys, score)


def _rows_at_once(r: Request, span: Span) -> int:
    """How many query rows share one block of scores."""
    if r.batch_invariant:
        return 1  # a row's arithmetic must not depend on how many rows come with it
    return max(1, _MAX_SCORES // max(1, r.heads * span.keys))

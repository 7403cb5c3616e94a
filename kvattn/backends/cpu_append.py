"""Appending on the CPU: normalise, rotate and store new tokens, a whole batch at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kvattn import quant
from kvattn.backends import reference
from kvattn.norm import rms_norm
from kvattn.request import Request
from kvattn.rotary import Factors, factors, turn_by

Weights = tuple[Tensor | None, Tensor | None]  # of the norms of q and k


def append(r: Request) -> Tensor | None:
    """Stores the new tokens in place; returns the query, ready to be multiplied."""
    if plain(r):
        return _padded(r)
    reference.append(r)
    return ready_query(r)


def plain(r: Request) -> bool:
    """Whether k and v are padded, go behind the lengths, and need no scales."""
    assert r.k is not None and r.k_cache is not None and r.v is not None and r.v_cache is not None
    return (
        r.cu_seqlens_k_new is None
        and r.slot_mapping is None
        and r.k.dtype == r.k_cache.dtype
        and r.v.dtype == r.v_cache.dtype
        and all(span.active for span in r.spans)
    )


def _padded(r: Request) -> Tensor | None:
    assert r.k is not None and r.v is not None and r.k_cache is not None and r.v_cache is not None
    k, q = r.k, r.q
    if k.shape[0] == 0 or k.shape[1] == 0:
        return ready_query(r)
    if r.rotary_cos is not None or r.q_norm_weight is not None or r.k_norm_weight is not None:
        q, k = _ready_both(r, k)
    index = r.shared.get("slots")
    if index is None:
        index = r.shared["slots"] = torch.tensor(slots(r, k.shape[1]), device="cpu")
    for tokens, cache in ((k, r.k_cache), (r.v, r.v_cache)):
        if cache.dtype in quant.FP8:  # indexed writes of FP8 are not implemented on the CPU
            tokens, cache = tokens.view(torch.uint8), cache.view(torch.uint8)
        if cache.stride(0) == cache.shape[1] * cache.stride(1):
            cache.flatten(0, 1).index_copy_(0, index, tokens.flatten(0, 1))
        else:
            cache[index // r.page_size, index % r.page_size] = tokens.flatten(0, 1)
    return q


def slots(r: Request, count: int) -> list[int]:
    """The slot, row * size + offset, of every new token of a padded batch."""
    size = r.page_size
    found: list[int] = []
    for b, span in enumerate(r.spans):
        first, last = span.old, span.old + count
        if r.page_table is None:
            found += range(span.row * size + first, span.row * size + last)
            continue
        pages = r.pages[b]
        while first < last:
            offset = first % size
            some = min(size - offset, last - first)
            start = pages[first // size] * size + offset
            found += range(start, start + some)
            first += some
    return found


def _ready_both(r: Request, k: Tensor) -> tuple[Tensor | None, Tensor]:
    """q and k as they are multiplied; in one pass where every query stands at its key's place."""
    by = None if r.rotary_cos is None else rotary_factors(r)
    q, pairing, eps = r.q, r.rotary_interleaved, r.norm_eps
    together = (
        q is not None
        and r.cu_seqlens_q is None
        and q.shape[1] == k.shape[1]
        and q.dtype == k.dtype
        and (r.local or k.shape[1] == 1)
    )
    if not together or q is None:
        return ready_query(r), ready(k, r.k_norm_weight, by, pairing, eps)
    return ready_pair(q, k, (r.q_norm_weight, r.k_norm_weight), by, pairing, eps)


def ready_pair(
    q: Tensor, k: Tensor, weights: Weights, by: Factors | None, pairing: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Heads of q and k of one dtype, every query at the place of its key: see `ready`."""
    dtype, heads, kv_heads = q.dtype, q.shape[2], k.shape[2]
    q_weight, k_weight = weights
    if (q_weight is None) != (k_weight is None):
        return ready(q, q_weight, by, pairing, eps), ready(k, k_weight, by, pairing, eps)
    both = torch.cat((q, k), 2)
    if q_weight is not None and k_weight is not None:
        each = q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1)
        both = rms_norm(both, torch.cat(each), eps)
    if by is not None:
        both = turn_by(both, by, pairing)
    both = both if both.dtype == dtype else quant.cast(both, dtype)
    return both.narrow(2, 0, heads), both.narrow(2, heads, kv_heads)


def ready(
    x: Tensor, weight: Tensor | None, by: Factors | None, pairing: bool, eps: float
) -> Tensor:
    """Heads as they are multiplied or stored: normalised, rotated, rounded to their dtype once."""
    wide = x if weight is None else rms_norm(x, weight, eps)
    if by is not None:
        wide = turn_by(wide, by, pairing)
    return wide if wide.dtype == x.dtype else quant.cast(wide, x.dtype)


def rotary_factors(r: Request) -> Factors:
    """The rotary factors of the new keys of a padded batch, one row per token."""
    by: Factors | None = r.shared.get("factors")
    if by is None:
        by = _factors(r)
        if r.shared.get("one step"):  # the tables stay as they are while its layers run
            r.shared["factors"] = by
    return by


def _factors(r: Request) -> Factors:
    assert r.k is not None and r.rotary_cos is not None and r.rotary_sin is not None
    k, steps = r.k, r.k.shape[1]
    where = r.shared.get("positions")
    if where is None:
        where = r.shared["positions"] = _positions(r, steps)
    if isinstance(where, int):
        cos, sin = r.rotary_cos.narrow(0, where, steps), r.rotary_sin.narrow(0, where, steps)
        if steps > 1:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    else:
        shape = (k.shape[0], steps, 1, -1)
        cos, sin = (t.index_select(0, where).view(shape) for t in (r.rotary_cos, r.rotary_sin))
    return factors(cos, sin, k.dtype, r.rotary_interleaved)


def _positions(r: Request, steps: int) -> int | Tensor:
    """The table rows of the new tokens: the first one if all sequences share it, else all."""
    bases = [span.old for span in r.spans]
    if r.rotary_seqlens is not None:
        bases = r.rotary_seqlens.tolist()
    if bases.count(bases[0]) == len(bases):
        return bases[0]
    return torch.tensor([base + t for base in bases for t in range(steps)], device="cpu")


def ready_query(r: Request) -> Tensor | None:
    """The whole query as it is multiplied, in the caller's layout."""
    if r.q is None or (r.rotary_cos is None and r.q_norm_weight is None):
        return r.q
    out = r.q.clone(memory_format=torch.contiguous_format)
    for b, span in enumerate(r.spans):
        rows = reference.ready_query(r, b, span)
        assert rows is not None
        if r.cu_seqlens_q is None:
            out[b, : span.q_len] = rows
        else:
            out[span.q_start : span.q_start + span.q_len] = rows
    return out

"""Appending on the CPU: rotate new tokens and store them, a whole batch at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kvattn import quant
from kvattn.backends import reference
from kvattn.request import Request
from kvattn.rotary import rotate


def append(r: Request) -> Tensor | None:
    """Stores the new tokens in place; returns the query, rotated if the call says so."""
    if _plain(r):
        return _padded(r)
    reference.append(r)
    return _rotated_query(r)


def _plain(r: Request) -> bool:
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
    if r.rotary_cos is not None and k.shape[0]:
        q, k = _rotate_both(r, k)
    for tokens, cache in ((k, r.k_cache), (r.v, r.v_cache)):
        cache, tokens = (
            (x.view(torch.uint8) if x.dtype in quant.FP8 else x) for x in (cache, tokens)
        )
        for b, span in enumerate(r.spans):
            _store(r, tokens[b], cache, span.row, span.old)
    return q


def _store(r: Request, tokens: Tensor, cache: Tensor, row: int, first: int) -> None:
    """Writes tokens [Sn, Hk, D] to absolute rows first.. of one sequence."""
    count = tokens.shape[0]
    if r.page_table is None:
        cache[row, first : first + count] = tokens
        return
    size, done = r.page_size, 0
    pages = r.page_table[row, first // size : -(-(first + count) // size)].tolist()
    for page in pages:
        offset = (first + done) % size
        some = min(size - offset, count - done)
        cache[page, offset : offset + some] = tokens[done : done + some]
        done += some


def _rotate_both(r: Request, k: Tensor) -> tuple[Tensor | None, Tensor]:
    """q and k rotated; in one pass where every query stands at the place of its key."""
    assert r.rotary_cos is not None and r.rotary_sin is not None
    bases = r.rotary_seqlens.tolist() if r.rotary_seqlens is not None else None
    base = torch.tensor(bases or [span.old for span in r.spans])[:, None]
    positions = base + torch.arange(k.shape[1])
    q = r.q
    together = (
        q is not None
        and r.cu_seqlens_q is None
        and q.shape[1] == k.shape[1]
        and q.dtype == k.dtype
        and (r.local or q.shape[1] == 1)
    )
    tables = (r.rotary_cos, r.rotary_sin)
    if not together or q is None:
        return _rotated_query(r), rotate(k, *tables, positions, r.rotary_interleaved)
    both = rotate(torch.cat((q, k), 2), *tables, positions, r.rotary_interleaved)
    return both[:, :, : q.shape[2]], both[:, :, q.shape[2] :]


def _rotated_query(r: Request) -> Tensor | None:
    """The whole query at its positions, in the caller's layout."""
    if r.rotary_cos is None or r.rotary_sin is None or r.q is None:
        return r.q
    out = r.q.clone(memory_format=torch.contiguous_format)
    for b, span in enumerate(r.spans):
        turned = reference.rotated_query(r, b, span)
        assert turned is not None
        if r.cu_seqlens_q is None:
            out[b, : span.q_len] = turned
        else:
            out[span.q_start : span.q_start + span.q_len] = turned
    return out

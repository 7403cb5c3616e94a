"""An independent oracle of the contract: numpy float64, naive loops, one query row at a time.

It takes the keyword arguments of `flash_attn_with_kvcache` as CPU tensors, plus `seqused_q`,
`seqused_k` and `cu_seqlens_k` (ragged K, `k_cache` and `v_cache` of shape (total_k, Hk, D)), and
shares no code with the product. Inputs are never mutated.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from oracle_cache import MX_GROUP, Array, Side, descale_of, e8m0_bytes, mx_plain, mx_value

DEFAULTS: dict[str, Any] = {
    "q": None,
    "k_cache": None,
    "v_cache": None,
    "k": None,
    "v": None,
    "qv": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "cache_seqlens": None,
    "cache_batch_idx": None,
    "cache_leftpad": None,
    "page_table": None,
    "cu_seqlens_q": None,
    "cu_seqlens_k": None,
    "cu_seqlens_k_new": None,
    "seqused_q": None,
    "seqused_k": None,
    "rotary_seqlens": None,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "attention_chunk": 0,
    "softcap": 0.0,
    "rotary_interleaved": True,
    "q_norm_weight": None,
    "k_norm_weight": None,
    "norm_eps": 1e-6,
    "sinks": None,
    "alibi_slopes": None,
    "score_mod": None,
    "mask_mod": None,
    "aux_tensors": None,
    "block_sparse_tensors": None,
    "gather_kv_indices": None,
    "rel_bias": None,
    "sfq": None,
    "sfk": None,
    "sfv": None,
    "only_qv": False,
    "slot_mapping": None,
}
ALIASES = {"block_table": "page_table", "s_aux": "sinks", "learnable_sink": "sinks"}
WITHOUT_EFFECT = {
    "max_seqlen_q",
    "max_seqlen_k",
    "scheduler_metadata",
    "num_splits",
    "pack_gqa",
    "sm_margin",
    "common_prefix_len",
    "return_softmax_lse",
    "rel_bias_prep_cache",
    "out",
    "batch_invariant",
    "deterministic",
    "min_seqlen_k",
    "seqlen_k_per_split",
    "disable_scheduler_metadata",
    "backend",
}


@dataclass(frozen=True)
class Expected:
    """What a call must leave behind; NaN rows of `out` and `lse` are rows it must not write."""

    out: Array  # float64, (B, Sq, H, Dv) or (total_q, H, Dv)
    lse: Array  # float64, (B, H, Sq) or (H, total_q)
    k_cache: torch.Tensor | None
    v_cache: torch.Tensor | None
    k_descale: Any
    v_descale: Any
    sfk: torch.Tensor | None
    sfv: torch.Tensor | None


def oracle(**kwargs: Any) -> Expected:
    """Compute the call from the contract's formulas alone."""
    a = _arguments(kwargs)
    seqs = [_sequence(a, b) for b in range(_batch(a))]
    ragged = a.cu_seqlens_k is not None
    keys = None if a.k_cache is None else Side(a.k_cache, a.k_descale, a.sfk, ragged)
    values = Side(a.v_cache, a.v_descale, a.sfv, ragged)
    if a.k is not None:
        _append(a, seqs, keys, values)
    out, lse = _attend(a, seqs, keys, values)
    return Expected(
        out=out,
        lse=lse,
        k_cache=None if keys is None else keys.restored(keys.stored),
        v_cache=values.restored(values.stored),
        k_descale=a.k_descale if keys is None else keys.descale_after(),
        v_descale=values.descale_after(),
        sfk=None if keys is None else keys.sf_after(),
        sfv=values.sf_after(),
    )


def _arguments(kwargs: dict[str, Any]) -> SimpleNamespace:
    named = {ALIASES.get(name, name): value for name, value in kwargs.items()}
    unknown = set(named) - set(DEFAULTS) - WITHOUT_EFFECT
    if unknown:
        raise TypeError(f"unknown arguments: {sorted(unknown)}")
    a = SimpleNamespace(**{**DEFAULTS, **named})
    left, right = (None if side in (None, -1) else side for side in a.window_size)
    a.left, a.right = left, 0 if a.causal else right
    a.chunk = a.attention_chunk or 0
    # Decided from the arguments: a wide window is still local.
    a.local = a.causal or left is not None or right is not None or a.chunk > 0
    a.queries = a.qv if a.only_qv else a.q
    return a


@dataclass
class Sequence:
    """Where the rows of sequence `b` are."""

    b: int
    q_start: int  # first row in the flattened queries
    sq: int
    end: int  # L0: absolute end row before the append
    leftpad: int
    new: list[int] = field(default_factory=list)  # rows of the flattened k and v
    sk: int = 0
    active: bool = True
    slot: Callable[[int], tuple[int, int]] = lambda row: (0, row)  # absolute row -> (page, offset)


def _batch(a: SimpleNamespace) -> int:
    return a.queries.shape[0] if a.cu_seqlens_q is None else len(a.cu_seqlens_q) - 1


def _at(lengths: Any, b: int) -> int:
    return int(lengths) if not torch.is_tensor(lengths) else int(lengths[b])


def _sequence(a: SimpleNamespace, b: int) -> Sequence:
    if a.cu_seqlens_q is None:
        sq = a.queries.shape[1]
        start = b * sq
    else:
        start, stop = int(a.cu_seqlens_q[b]), int(a.cu_seqlens_q[b + 1])
        sq = stop - start
    if a.seqused_q is not None:
        sq = int(a.seqused_q[b])
    slot, capacity = _addressing(a, b)
    given = a.cache_seqlens if a.cache_seqlens is not None else a.seqused_k
    end = capacity if given is None else _at(given, b)
    seq = Sequence(b, start, sq, end, 0 if a.cache_leftpad is None else int(a.cache_leftpad[b]))
    seq.slot = slot
    seq.active = end != -1
    if seq.active:
        seq.new = _new_rows(a, b)
        if a.slot_mapping is not None:  # lengths already count the new keys
            seq.end -= len(seq.new)
        seq.sk = seq.end + len(seq.new) - seq.leftpad
    return seq


def _addressing(a: SimpleNamespace, b: int) -> tuple[Callable[[int], tuple[int, int]], int]:
    """The map from an absolute row to (cache row or page, offset), and the capacity."""
    if a.cu_seqlens_k is not None:
        first, last = int(a.cu_seqlens_k[b]), int(a.cu_seqlens_k[b + 1])
        return lambda row: (0, first + row), last - first
    line = b if a.cache_batch_idx is None else int(a.cache_batch_idx[b])
    size = a.v_cache.shape[1]
    if a.page_table is None:
        return lambda row: (line, row), size
    table = a.page_table
    return lambda row: (int(table[line, row // size]), row % size), table.shape[1] * size


def _new_rows(a: SimpleNamespace, b: int) -> list[int]:
    if a.k is None:
        return []
    if a.k.ndim == 4:
        return list(range(b * a.k.shape[1], (b + 1) * a.k.shape[1]))
    cu = a.cu_seqlens_k_new if a.cu_seqlens_k_new is not None else a.cu_seqlens_q
    return list(range(int(cu[b]), int(cu[b + 1])))


def _rows(x: torch.Tensor, padded: bool) -> torch.Tensor:
    """Queries, padded or ragged, as one list of rows."""
    return x.reshape(-1, *x.shape[2:]) if padded else x


def _append(a: SimpleNamespace, seqs: list[Sequence], keys: Side | None, values: Side) -> None:
    k_rows, v_rows = _rows(a.k, a.k.ndim == 4), _rows(a.v, a.v.ndim == 4)
    slots = None if a.slot_mapping is None else a.slot_mapping.flatten().tolist()
    size = a.v_cache.shape[1]
    for seq in seqs:
        for t, row in enumerate(seq.new):
            if slots is None:
                page, offset = seq.slot(seq.end + t)
            elif slots[row] == -1:
                continue
            else:
                page, offset = divmod(slots[row], size)
            if keys is not None:
                token = _ready(a, k_rows[row], a.k_norm_weight, _base(a, seq) + t)
                keys.store(page, offset, token, seq.b)
            values.store(page, offset, v_rows[row], seq.b)


def _base(a: SimpleNamespace, seq: Sequence) -> int:
    return seq.end if a.rotary_seqlens is None else int(a.rotary_seqlens[seq.b])


def _ready(
    a: SimpleNamespace, x: torch.Tensor, weight: torch.Tensor | None, position: int
) -> torch.Tensor:
    """Heads (heads, D) normalised, rotated, and rounded at the end."""
    if weight is None:
        return _rotated(a, x, position)
    work = np.float64 if x.dtype == torch.float64 else np.float32
    numbers = x.to(torch.float64).numpy()
    normed, weights = np.empty(numbers.shape, work), weight.to(torch.float64).numpy().astype(work)
    for h, head in enumerate(numbers):
        mean = work(math.fsum(head * head) / len(head) + a.norm_eps)
        normed[h] = head.astype(work) * work(1 / math.sqrt(mean)) * weights
    return _rotated(a, torch.from_numpy(normed), position).to(x.dtype)


def _rotated(a: SimpleNamespace, x: torch.Tensor, position: int) -> torch.Tensor:
    """Rotate the first R channels of (heads, D) by the angles of `position`."""
    if a.rotary_cos is None:
        return x
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table[position].to(work).numpy() for table in (a.rotary_cos, a.rotary_sin))
    half = len(c)
    if a.rotary_interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    old = x.to(work).numpy()
    new = np.empty((x.shape[0], 2 * half), old.dtype)
    new[:, first] = old[:, first] * c - old[:, second] * s
    new[:, second] = old[:, first] * s + old[:, second] * c
    rotated = x.clone()
    rotated[:, : 2 * half] = torch.from_numpy(new).to(x.dtype)
    return rotated


def _attend(
    a: SimpleNamespace, seqs: list[Sequence], keys: Side | None, values: Side
) -> tuple[Array, Array]:
    padded = a.cu_seqlens_q is None
    queries = _rows(a.queries, padded)
    rows, heads = queries.shape[0], queries.shape[1]
    out = np.full((rows, heads, values.stored.shape[3]), np.nan)
    lse = np.full((heads, rows), np.nan)
    q_numbers = None if a.only_qv else _query_numbers(a, seqs, padded)
    qv_numbers = None if a.qv is None else _rows(a.qv, padded).to(torch.float64).numpy()
    for seq in seqs:
        mine = slice(seq.q_start, seq.q_start + seq.sq)
        out[mine], lse[:, mine] = 0.0, -np.inf
        if seq.active and seq.sq:
            q = None if q_numbers is None else q_numbers[mine]
            qv = None if qv_numbers is None else qv_numbers[mine]
            out[mine], lse[:, mine] = _one_sequence(a, seq, q, qv, keys, values, heads, padded)
    if padded:
        shape = a.queries.shape[:2]
        return out.reshape(*shape, *out.shape[1:]), lse.reshape(heads, *shape).swapaxes(0, 1)
    return out, lse


def _query_numbers(a: SimpleNamespace, seqs: list[Sequence], padded: bool) -> Array:
    """Normalised and rotated queries in float64, every row rounded to the dtype of q."""
    q = _rows(a.q, padded)
    if a.rotary_cos is not None or a.q_norm_weight is not None:
        q = q.clone()
        for seq in (s for s in seqs if s.active):
            for i in range(seq.sq):
                position = _base(a, seq) + (i if a.local else 0)
                q[seq.q_start + i] = _ready(a, q[seq.q_start + i], a.q_norm_weight, position)
    numbers = q.to(torch.float64).numpy()
    if a.sfq is None:
        return numbers
    if a.sfq.ndim < 5:
        codes = e8m0_bytes(_rows(a.sfq, padded))
    else:
        codes = mx_plain(a.sfq, a.q.shape)
        codes = codes.reshape(-1, *codes.shape[2:])
    return numbers * mx_value(codes).repeat(MX_GROUP, axis=2)


def _one_sequence(
    a: SimpleNamespace,
    seq: Sequence,
    q: Array | None,
    qv: Array | None,
    keys: Side | None,
    values: Side,
    heads: int,
    padded: bool,
) -> tuple[Array, Array]:
    where = [seq.slot(seq.leftpad + j) for j in range(seq.sk)]
    kv_heads, dim_v = values.stored.shape[2:]
    v = np.array([values.numbers(*at) for at in where]).reshape(seq.sk, kv_heads, dim_v)
    vd = np.array([values.descale(seq.b, *at) for at in where]).reshape(seq.sk, kv_heads)
    dots = np.zeros((heads, seq.sq, seq.sk))
    group = heads // kv_heads
    if q is not None:
        assert keys is not None
        k = np.array([keys.numbers(*at) for at in where]).reshape(seq.sk, kv_heads, q.shape[2])
        kd = np.array([keys.descale(seq.b, *at) for at in where]).reshape(seq.sk, kv_heads)
        for h in range(heads):
            for i in range(seq.sq):
                dots[h, i] += kd[:, h // group] * (k[:, h // group] @ q[i, h])
    if qv is not None:
        for h in range(heads):
            for i in range(seq.sq):
                dots[h, i] += vd[:, h // group] * (v[:, h // group] @ qv[i, h])
    for h in range(heads):
        dots[h] *= _scale(a) * descale_of(a.q_descale, seq.b, kv_heads)[h // group]
    with np.errstate(invalid="ignore"):  # dead slots may hold NaN
        scores = _edited(a, seq, dots, padded)
    keep = _kept(a, seq, scores.shape, padded)

    out, lse = np.zeros((seq.sq, heads, dim_v)), np.empty((heads, seq.sq))
    for h in range(heads):
        sink = -math.inf if a.sinks is None else float(a.sinks[h])
        for i in range(seq.sq):
            seen = np.flatnonzero(keep[h, i] & (scores[h, i] != -np.inf))
            weights, lse[h, i] = _softmax(scores[h, i, seen], sink)
            if len(seen):
                out[i, h] = (weights * vd[seen, h // group]) @ v[seen, h // group]
    return out, lse


def _scale(a: SimpleNamespace) -> float:
    if a.softmax_scale is not None:
        return float(a.softmax_scale)
    dim = 0 if a.only_qv else a.q.shape[-1]
    if a.qv is not None:
        dim += a.qv.shape[-1]
    return dim**-0.5


def _softmax(scores: Array, sink: float) -> tuple[Array, float]:
    top = max([sink, *scores])
    if math.isinf(top):  # nothing to attend to, or a sink that takes everything
        return np.zeros(len(scores)), top
    weights = np.exp(scores - top)
    total = weights.sum() + math.exp(sink - top)
    return weights / total, top + math.log(total)


def _edited(a: SimpleNamespace, seq: Sequence, scores: Array, padded: bool) -> Array:
    """rel_bias, then score_mod, then the soft cap, then ALiBi."""
    i, j = np.arange(seq.sq)[:, None], np.arange(seq.sk)[None, :]
    p = i + seq.sk - seq.sq
    if a.rel_bias is not None:
        bias = _rows(a.rel_bias, padded)[seq.q_start : seq.q_start + seq.sq]
        r = seq.sk - 1 - j if a.right is None else p + a.right - j
        r = np.broadcast_to(r, (seq.sq, seq.sk))
        inside = (r >= 0) & (r < bias.shape[2])
        numbers = bias.to(torch.float64).numpy()
        for h in range(scores.shape[0]):
            chosen = numbers[np.broadcast_to(i, r.shape), h, np.where(inside, r, 0)]
            scores[h] += np.where(inside, chosen, 0.0)
    if a.score_mod is not None and scores.size:
        modified = _call(a, a.score_mod, seq, scores.shape, 5, torch.from_numpy(scores))
        scores = np.broadcast_to(modified.to(torch.float64).numpy(), scores.shape)
    if a.softcap:
        scores = a.softcap * np.tanh(scores / a.softcap)
    if a.alibi_slopes is not None:
        slopes = a.alibi_slopes[seq.b] if a.alibi_slopes.ndim == 2 else a.alibi_slopes
        scores = scores - slopes.to(torch.float64).numpy()[:, None, None] * np.abs(p - j)
    return scores


def _kept(a: SimpleNamespace, seq: Sequence, shape: tuple[int, ...], padded: bool) -> Array:
    """All masks intersect; a block listed as full is one where mask_mod is not asked."""
    i, j = np.arange(seq.sq)[:, None], np.arange(seq.sk)[None, :]
    keep = np.broadcast_to(visible(i + seq.sk - seq.sq, j, a.left, a.right, a.chunk), shape)
    if a.gather_kv_indices is not None:
        chosen = _rows(a.gather_kv_indices, padded)[seq.q_start : seq.q_start + seq.sq].numpy()
        keep = keep & np.array([np.isin(j[0], row) for row in chosen]).reshape(1, *shape[1:])
    asked = np.ones(shape, dtype=bool)
    if a.mask_mod is not None and keep.size:
        asked &= _call(a, a.mask_mod, seq, shape, 4).to(torch.bool).numpy()
    blocks = a.block_sparse_tensors
    if blocks is not None:
        size = blocks.block_size
        asked &= _listed(blocks.mask_block_cnt, blocks.mask_block_idx, size, seq.b, shape)
        if blocks.full_block_cnt is not None:
            asked |= _listed(blocks.full_block_cnt, blocks.full_block_idx, size, seq.b, shape)
    return keep & asked


def _listed(
    counts: torch.Tensor,
    indices: torch.Tensor,
    size: tuple[int, int],
    b: int,
    shape: tuple[int, ...],
) -> Array:
    """Which (head, query, key) lie in a listed block."""
    listed = np.zeros(shape, dtype=bool)
    b = b if counts.shape[0] > 1 else 0
    for h in range(shape[0]):
        head = h if counts.shape[1] > 1 else 0
        for i in range(shape[1]):
            row = i // size[0]
            for block in indices[b, head, row, : counts[b, head, row]].tolist():
                listed[h, i, block * size[1] : (block + 1) * size[1]] = True
    return listed


def visible(p: Array, j: Array, left: int | None, right: int | None, chunk: int) -> Array:
    """Which keys `j` a query at logical position `p` sees."""
    keep = np.ones(np.broadcast_shapes(p.shape, j.shape), dtype=bool)
    if left is not None:
        keep &= j >= p - left
    if right is not None:
        keep &= j <= p + right
    if chunk:
        keep &= p // chunk == j // chunk
    return keep


def _call(
    a: SimpleNamespace,
    mod: Callable[..., torch.Tensor],
    seq: Sequence,
    shape: tuple[int, ...],
    plain: int,
    *score: torch.Tensor,
) -> torch.Tensor:
    """Call a mod with as many arguments as it takes: `plain`, `plain` + 2 or `plain` + 3."""
    heads, sq, sk = shape
    args: list[Any] = [
        *score,
        torch.tensor(seq.b),
        torch.arange(heads)[:, None, None],
        torch.arange(sq)[None, :, None],
        torch.arange(sk)[None, None, :],
    ]
    arity = len(inspect.signature(mod).parameters)
    if arity > plain:
        info = SimpleNamespace(
            offset_q=0 if a.cu_seqlens_q is None else int(a.cu_seqlens_q[seq.b]),
            offset_k=0 if a.cu_seqlens_k is None else int(a.cu_seqlens_k[seq.b]),
            seqlen_q=sq,
            seqlen_k=sk,
        )
        args += [info, a.aux_tensors]
    if arity > plain + 2:
        args.append(())
    return mod(*args)

"""Structural checks of a call: types, shapes, dtypes, strides, devices. Never reads tensor data.

Every function takes the namespace of raw arguments that `Request.of` fills, and raises one of
`kvattn.errors` naming the argument. `normalise` and `check` are the two entry points.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvattn import errors as E
from kvattn import option_checks, quant
from kvattn.counting import whole

BACKENDS = ("hopper", "triton", "cpu", "reference")
WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INT32 = torch.int32


def normalise(raw: Any) -> None:
    """Turns the caller's spellings into one: aliases, int lengths, windows, scalars."""
    option_checks.normalise(raw)
    if raw.only_qv:
        if raw.qv is None:
            raise E.QueryValueError("qv", "None", "a tensor when only_qv=True")
        if raw.rotary_cos is not None or raw.rotary_sin is not None:
            raise E.RotaryOnlyQvError("rotary_cos", "rotary tables", "None with only_qv")
        raw.q = None
        if raw.k is None:
            raw.k_cache = raw.k_descale = None


def check(raw: Any) -> None:
    """All structural rules, in the order of the data flow."""
    _tensors(raw)
    _query(raw)
    _caches(raw)
    count = batch_of(raw)
    _lengths(raw, count)
    _rows(raw, count)
    _new_tokens(raw, count)
    option_checks.check(raw, count)
    _aux_tensors(raw)
    if raw.out is not None:
        _out(raw)


def batch_of(raw: Any) -> int:
    """Number of sequences, by the ragged query's edges or the leading dimension."""
    if raw.attend:
        if raw.cu_seqlens_q is not None:
            return raw.cu_seqlens_q.shape[0] - 1
        return (raw.qv if raw.q is None else raw.q).shape[0]
    if raw.cu_seqlens_k_new is not None:
        return raw.cu_seqlens_k_new.shape[0] - 1
    return raw.k.shape[0]


def out_dtype(query: torch.dtype, value: torch.dtype) -> torch.dtype:
    """The query's dtype where it is wide; else the value's; else bfloat16."""
    if query in WIDE:
        return query
    return value if value in WIDE else torch.bfloat16


def shape(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"


_FA2_ORDER = "the order is FA3's: pass FA2's dropout_p, rotary_cos and what follows them by name"
_TENSOR_NAMES = (
    *("q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens"),
    *("cache_batch_idx", "cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k"),
    *("cu_seqlens_k_new", "seqused_q", "seqused_k", "rotary_seqlens", "slot_mapping"),
    *("q_descale", "k_descale", "v_descale", "sfq", "sfk", "sfv", "alibi_slopes", "sinks"),
    *("rel_bias", "gather_kv_indices", "q_norm_weight", "k_norm_weight", "common_prefix_len"),
    "out",
)


def _tensors(raw: Any) -> None:
    """Every tensor argument is a tensor, lives on one device and needs no gradient."""
    device = None
    grad = torch.is_grad_enabled()
    for name in _TENSOR_NAMES:
        tensor = getattr(raw, name)
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            if name in ("cache_seqlens", "common_prefix_len"):
                continue  # a scalar, the former expanded in _lengths
            fix = _FA2_ORDER if name == "seqused_q" and isinstance(tensor, float) else None
            raise E.NotATensorError(name, type(tensor).__name__, "a torch.Tensor or None", fix)
        dense(name, tensor)
        if device is None:
            device, first = tensor.device, name
        else:
            same_device(name, tensor, first, device)
        if grad and tensor.requires_grad:
            if name == "out":
                raise E.OutTensorError("out", "requires_grad=True", "a tensor that needs no grad")
            raise E.RequiresGradError(name, _GRAD, "no gradient")


def _aux_tensors(raw: Any) -> None:
    """What mods are handed is an input as any other; a number may lie on another device."""
    device, grad = raw.v_cache.device, torch.is_grad_enabled()
    for tensor in raw.aux_tensors or ():
        if not_dense(tensor):
            raise E.NotATensorError("aux_tensors", not_dense(tensor), "dense tensors")
        if tensor.dim() > 0:
            same_device("aux_tensors", tensor, "v_cache", device)
        if grad and tensor.requires_grad:
            raise E.RequiresGradError("aux_tensors", _GRAD, "no gradient")


_GRAD = "requires_grad=True under grad mode"


def dense(name: str, tensor: Tensor) -> None:
    """Raises unless it is a tensor with strides."""
    if not isinstance(tensor, Tensor):
        raise E.NotATensorError(name, type(tensor).__name__, "a torch.Tensor")
    if not_dense(tensor):
        raise E.NotATensorError(name, not_dense(tensor), "a dense torch.Tensor")


def same_device(name: str, tensor: Tensor, first: str, device: torch.device) -> None:
    """Raises unless a tensor is on the device where the one named first is."""
    if tensor.device != device:
        kind = (
            E.DeviceMismatchError
            if tensor.device.type != device.type
            else E.DeviceIndexMismatchError
        )
        raise kind(name, str(tensor.device), f"{device}, where {first} is")


def _query(raw: Any) -> None:
    if not raw.attend:
        if raw.k is None:
            raise E.NotATensorError("k", "None", "a tensor")
        if raw.k.dim() == 0:
            raise E.NewTokenBatchError("k", shape(raw.k), "(batch, seqlen_new, kv_heads, dim)")
        if raw.cu_seqlens_k_new is not None:
            _edges(raw.cu_seqlens_k_new, "cu_seqlens_k_new", E.CuSeqlensNewError)
        return
    if raw.q is None and not raw.only_qv:
        raise E.NotATensorError("q", "None", "a tensor (q may be None only with only_qv)")
    edges = raw.cu_seqlens_q
    if edges is not None:
        _edges(edges, "cu_seqlens_q", E.CuSeqlensError)
    rank = 4 if edges is None else 3
    for name in ("q", "qv"):
        tensor = getattr(raw, name)
        if tensor is None:
            continue
        if tensor.dtype not in WIDE and tensor.dtype not in quant.FP8:
            raise E.QueryDtypeError(name, str(tensor.dtype), "16, 32 or 64-bit floats or FP8")
        if tensor.dim() != rank:
            fix = _FA2_ORDER if name == "qv" and tensor.dim() == 2 else None
            raise E.QueryRankError(name, shape(tensor), f"{rank} dimensions here", fix)
    if raw.qv is not None and raw.q is not None:
        if raw.qv.shape[:-1] != raw.q.shape[:-1]:
            allowed = f"{tuple(raw.q.shape[:-1])} plus the value head dimension"
            raise E.QueryValueError("qv", shape(raw.qv), allowed)
        if raw.qv.dtype != raw.q.dtype:
            raise E.QueryValueError("qv", str(raw.qv.dtype), f"q's dtype, {raw.q.dtype}")


def _edges(edges: Tensor, name: str, kind: type[E.KvattnError]) -> None:
    if edges.dtype != INT32 or edges.dim() != 1 or edges.shape[0] < 1:
        raise kind(name, f"{edges.dtype}, {shape(edges)}", "int32 of shape (batch + 1,)")


def _caches(raw: Any) -> None:
    k, v = raw.k_cache, raw.v_cache
    if v is None:
        raise E.NotATensorError("v_cache", "None", "a tensor")
    if k is None and not raw.only_qv:
        if not raw.attend:
            raise E.KeyCacheMissingError("k_cache", "None", "a tensor", "pass the key cache")
        raise E.KeyCacheMissingError("k_cache", "None", "a tensor (None only with only_qv)")
    if raw.cu_seqlens_k is not None:
        _edges(raw.cu_seqlens_k, "cu_seqlens_k", E.CuSeqlensError)
        if raw.page_table is not None:
            raise E.TwoKeyLayoutsError("page_table", "page_table and cu_seqlens_k", "one of them")
    rank = 4 if raw.cu_seqlens_k is None else 3
    for name, cache in (("k_cache", k), ("v_cache", v)):
        if cache is None:
            continue
        if cache.dim() != rank or cache.shape[-1] == 0:
            raise E.CacheRankError(name, shape(cache), f"{rank} dimensions, none of them empty")
        if cache.stride(-1) != 1 and cache.shape[-1] > 1 and cache.numel():
            raise E.CacheLastStrideError(name, f"strides {cache.stride()}", "a last stride of 1")
    if k is not None and k.shape[:-1] != v.shape[:-1]:
        raise E.CacheHeadsDifferError("v_cache", shape(v), f"{tuple(k.shape[:-1])} and Dv")
    _cache_dtypes(raw)
    _head_dims(raw)


def _cache_dtypes(raw: Any) -> None:
    k, v = raw.k_cache, raw.v_cache
    first = v if k is None else k
    name = "v_cache" if k is None else "k_cache"
    if first.dtype not in WIDE and first.dtype not in quant.NARROW:
        raise E.CacheDtypeError(name, str(first.dtype), "a 16/32-bit float, FP8 or int8")
    if k is not None and v.dtype != k.dtype:
        scaled_v = raw.sfv is not None and v.dtype == torch.float8_e4m3fn
        wide_v = raw.sfk is not None and v.dtype in WIDE
        if not (scaled_v or wide_v):
            raise E.ValueCacheDtypeError("v_cache", str(v.dtype), f"{k.dtype}, as k_cache")
    if raw.attend:
        query = raw.qv if raw.q is None else raw.q
        if not _pair(query.dtype, first.dtype, scaled=raw.sfv is not None):
            raise E.CacheDtypeError(name, f"{first.dtype} with a {query.dtype} query", _PAIRS)


_PAIRS = "the query's dtype; 16-bit, FP8 or int8 for a 16/32-bit query; FP8 for an FP8 query"


def _pair(query: torch.dtype, cache: torch.dtype, scaled: bool) -> bool:
    if query == cache:
        return True
    if query in quant.FP8:
        return cache in quant.FP8 or (scaled and cache in WIDE)
    if query == torch.float64:
        return cache in quant.NARROW
    return cache in (torch.float16, torch.bfloat16, *quant.NARROW)


def _head_dims(raw: Any) -> None:
    heads = raw.v_cache.shape[-2]
    for name, cache in (("q", raw.k_cache), ("qv", raw.v_cache)):
        query = getattr(raw, name)
        if query is None:
            continue
        if query.shape[-1] != cache.shape[-1]:
            if name == "qv":
                raise E.QueryValueError("qv", shape(query), f"a last dim of {cache.shape[-1]} (Dv)")
            allowed = f"{cache.shape[-1]}, as in k_cache"
            raise E.HeadDimError("q", f"head dim {query.shape[-1]}", allowed)
        if heads == 0 or query.shape[-2] % heads:
            got = f"{query.shape[-2]} query heads over {heads} kv heads"
            raise E.HeadRatioError(name, got, f"a multiple of {heads}")


def _lengths(raw: Any, count: int) -> None:
    used = raw.seqused_k
    if used is not None:
        vector(used, "seqused_k", count, E.SeqUsedError)
        raw.cache_seqlens = used
    _expand_lengths(raw, count)
    if raw.cache_seqlens is not None and used is None:
        lengths(raw.cache_seqlens, count)
    vector(raw.seqused_q, "seqused_q", count, E.SeqUsedError)
    vector(raw.cache_leftpad, "cache_leftpad", count, E.LeftpadTensorError)
    vector(raw.cache_batch_idx, "cache_batch_idx", count, E.BatchIndexTensorError)


def lengths(tensor: Tensor, count: int) -> None:
    if tensor.dtype != INT32:
        raise E.LengthsDtypeError("cache_seqlens", str(tensor.dtype), "torch.int32")
    if tensor.shape != (count,):
        raise E.LengthsShapeError("cache_seqlens", shape(tensor), f"({count},)")


def _expand_lengths(raw: Any, count: int) -> None:
    """A scalar cache_seqlens means the same length for every sequence."""
    value = raw.cache_seqlens
    if value is None or isinstance(value, Tensor):
        return
    length = whole(value)
    if length is None or abs(length) >= 1 << 31:
        raise E.LengthsScalarError(
            "cache_seqlens", f"{type(value).__name__} {value!r}", "a 32-bit int or an int32 tensor"
        )
    raw.cache_seqlens = torch.full((count,), length, dtype=INT32, device=raw.v_cache.device)


def vector(tensor: Tensor | None, name: str, count: int, kind: type[E.KvattnError]) -> None:
    """An int32 tensor with one number per sequence."""
    if tensor is not None and (tensor.dtype != INT32 or tensor.shape != (count,)):
        raise kind(name, f"{tensor.dtype}, {shape(tensor)}", f"int32 of shape ({count},)")


def page_table(table: Tensor, rows: Tensor | None, count: int) -> None:
    """A row for every sequence, where `rows` do not pick them."""
    unit = table.dim() != 2 or table.shape[1] <= 1 or table.stride(1) == 1 or not table.numel()
    if table.dtype != INT32 or table.dim() != 2 or not unit:
        got = f"{table.dtype}, {shape(table)}, strides {table.stride()}"
        raise E.PageTableTensorError("page_table", got, "int32 (batch, max_pages), unit stride")
    if rows is None and table.shape[0] != count:
        raise E.PageTableRowsError("page_table", f"{table.shape[0]} rows", f"{count}")


def _rows(raw: Any, count: int) -> None:
    """Every sequence has a row of the cache or of the page table."""
    if raw.page_table is not None:
        page_table(raw.page_table, raw.cache_batch_idx, count)
        if raw.v_cache.shape[1] == 0:
            raise E.CacheRankError("v_cache", "a page size of 0", "at least one slot a page")
    elif raw.cu_seqlens_k is not None:
        if raw.cu_seqlens_k.shape[0] != count + 1:
            raise E.CuSeqlensError("cu_seqlens_k", shape(raw.cu_seqlens_k), f"({count + 1},)")
    elif raw.cache_batch_idx is None and raw.v_cache.shape[0] != count and not _by_slot(raw):
        got = f"{raw.v_cache.shape[0]} rows for a batch of {count}"
        raise E.DenseBatchError("v_cache", got, f"{count} rows")


def _by_slot(raw: Any) -> bool:
    """Appending by slot alone needs no relation between rows and sequences."""
    return not raw.attend and raw.slot_mapping is not None


def _new_tokens(raw: Any, count: int) -> None:
    k, v = raw.k, raw.v
    if k is None and v is None:
        if raw.cu_seqlens_k_new is not None:
            raise E.CuSeqlensNewError("cu_seqlens_k_new", "a tensor without k", "None without k")
        if raw.slot_mapping is not None:
            raise E.SlotMappingError("slot_mapping", "a tensor without k", "None without k")
        return
    if v is None:
        raise E.KeyWithoutValueError("k", "k without v", "both or neither")
    if k is None:
        raise E.ValueWithoutKeyError("v", "v without k", "both or neither")
    if raw.cu_seqlens_k is not None:
        raise E.TwoKeyLayoutsError("k", "new tokens with packed keys", "a dense or paged cache")
    if raw.cache_seqlens is None and not _by_slot(raw):
        raise E.AppendWithoutLengthsError("cache_seqlens", "None together with k", "the lengths")
    if raw.k_cache is None:
        raise E.KeyCacheMissingError("k_cache", "None together with k", "a tensor to append to")
    _new_shapes(raw, count)
    for name, cache in (("k", raw.k_cache), ("v", raw.v_cache)):
        new = getattr(raw, name)
        if not _storable(new.dtype, cache.dtype):
            raise E.NewTokenDtypeError(name, str(new.dtype), f"{cache.dtype} or a wider float")
        for shown, written in _written(raw, name, cache, new.dtype):
            if unwritable(written):
                raise E.InferenceTensorError(shown, "an inference tensor", _WRITABLE)
            pairs = zip(written.stride(), written.shape, strict=True)
            if written.numel() and any(s == 0 and n > 1 for s, n in pairs):
                raise E.CacheExpandedError(shown, f"strides {written.stride()}", "no zero")
    if raw.slot_mapping is not None:
        tokens = k.shape[0] if k.dim() == 3 else k.shape[0] * k.shape[1]
        slots = raw.slot_mapping
        if slots.dtype != torch.int64 or slots.numel() != tokens or slots.dim() not in (1, 2):
            got = f"{slots.dtype}, {shape(slots)}"
            raise E.SlotMappingError("slot_mapping", got, f"int64 with {tokens} slots")
        raw.slot_mapping = slots.reshape(-1)


_WRITABLE = "a tensor made outside inference mode, or a call inside it"


def _written(raw: Any, name: str, cache: Tensor, new: torch.dtype) -> list[tuple[str, Tensor]]:
    """The tensors that an append of k or v writes to: the cache, and scales of its tokens."""
    written = [(f"{name}_cache", cache)]
    scale, mx = getattr(raw, f"{name}_descale"), getattr(raw, f"sf{name}")
    if new != cache.dtype:
        if isinstance(scale, Tensor) and quant.per_token(scale, cache):
            written.append((f"{name}_descale", scale))
        if mx is not None:
            written.append((f"sf{name}", mx))
    return written


def _new_shapes(raw: Any, count: int) -> None:
    k, v, edges = raw.k, raw.v, raw.cu_seqlens_k_new
    if k.shape[:-1] != v.shape[:-1]:
        raise E.NewTokenCountError("v", shape(v), f"{tuple(k.shape[:-1])} and Dv")
    if edges is None and k.dim() == 3 and raw.slot_mapping is not None:
        query = raw.qv if raw.q is None else raw.q
        if raw.attend and raw.cu_seqlens_q is not None and query.shape[0] == k.shape[0]:
            raw.cu_seqlens_k_new = edges = raw.cu_seqlens_q
        elif not raw.attend:
            raw.k, raw.v = k, v = k[:, None], v[:, None]  # each token its own sequence
    if edges is not None:
        _edges(edges, "cu_seqlens_k_new", E.CuSeqlensNewError)
        if edges.shape[0] != count + 1:
            raise E.CuSeqlensNewError("cu_seqlens_k_new", shape(edges), f"({count + 1},)")
    rank = 4 if edges is None else 3
    if k.dim() != rank or (edges is None and k.shape[0] != count and not _by_slot(raw)):
        allowed = f"({count}, seqlen_new, kv_heads, dim)" if rank == 4 else "(total_new, ...)"
        raise E.NewTokenBatchError("k", shape(k), allowed)
    for name, cache in (("k", raw.k_cache), ("v", raw.v_cache)):
        new = getattr(raw, name)
        if new.shape[-2] != cache.shape[-2]:
            raise E.NewTokenCountError(name, f"{new.shape[-2]} kv heads", f"{cache.shape[-2]}")
        if new.shape[-1] != cache.shape[-1]:
            allowed = f"{cache.shape[-1]}, as in the cache"
            raise E.HeadDimError(name, f"head dim {new.shape[-1]}", allowed)


def _storable(new: torch.dtype, cache: torch.dtype) -> bool:
    if new == cache:
        return True
    narrower = (torch.float16, torch.bfloat16, *quant.NARROW)
    return new in WIDE and (cache in narrower or new == torch.float64) and cache != torch.float64


def _out(raw: Any) -> None:
    out = raw.out
    lead = raw.qv if raw.q is None else raw.q
    wanted = (*lead.shape[:-1], raw.v_cache.shape[-1])
    dtype = out_dtype(lead.dtype, raw.v_cache.dtype)
    if out.shape != wanted or out.dtype != dtype:
        raise E.OutTensorError("out", f"{out.dtype}, {shape(out)}", f"{dtype}, shape {wanted}")
    if out.stride(-1) != 1 and out.shape[-1] > 1 and out.numel():
        raise E.OutLastStrideError("out", f"strides {out.stride()}", "a last stride of 1")
    if unwritable(out):
        raise E.InferenceTensorError("out", "an inference tensor", _WRITABLE)
    if not distinct(out):
        raise E.OutTensorError(
            "out", f"strides {out.stride()}", "memory of its own for each number"
        )


def own_memory(raw: Any) -> None:
    """out shares no memory with any other tensor of the call."""
    inputs = [(name, getattr(raw, name, None)) for name in _TENSOR_NAMES if name != "out"]
    inputs += [("aux_tensors", tensor) for tensor in raw.aux_tensors or ()]
    inputs += [("block_sparse_tensors", field) for field in raw.block_sparse or ()]
    for name, other in inputs:
        if isinstance(other, Tensor) and overlap(raw.out, other):
            raise E.OutTensorError("out", f"memory shared with {name}", "memory of its own")


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share a byte of memory, by their addresses alone."""
    if a.numel() == 0 or b.numel() == 0 or a.device.type == "meta" or a.device != b.device:
        return False
    if not near(a, b):
        return False
    (a0, a1), (b0, b1) = _bytes(a), _bytes(b)
    unit = math.gcd(a.element_size(), b.element_size())
    start, stop = min(a0, b0), max(a1, b1)
    if (a0 - b0) % unit:
        return True
    marks = torch.zeros((stop - start) // unit, dtype=torch.bool, device="cpu")
    _mark(marks, a, a0 - start, unit).fill_(True)
    return bool(_mark(marks, b, b0 - start, unit).any())


def near(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in each other's range of addresses."""
    (a0, a1), (b0, b1) = _bytes(a), _bytes(b)
    return max(a0, b0) < min(a1, b1)


def not_dense(t: Tensor) -> str | None:
    """What a tensor is that has no strides, or None."""
    if t.is_nested:
        return "a nested tensor"
    return None if t.layout == torch.strided else f"a {t.layout} tensor"


def unwritable(t: Tensor) -> bool:
    """Whether torch lets nobody write here: CPU operators, that is; kernels on GPUs just do."""
    return t.is_inference() and t.is_cpu and not torch.is_inference_mode_enabled()


def distinct(t: Tensor) -> bool:
    """Whether no two elements of a tensor lie in one place."""
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride <= reach:  # dimensions may still interleave: count the places
            marks = torch.zeros(extent(t) // t.element_size(), dtype=torch.bool, device="cpu")
            marks.as_strided(t.shape, t.stride()).fill_(True)
            return not t.numel() or int(marks.sum()) == t.numel()
        reach += (size - 1) * stride
    return True


def _bytes(t: Tensor) -> tuple[int, int]:
    return t.data_ptr(), t.data_ptr() + extent(t)


def extent(t: Tensor) -> int:
    """Bytes from the first to past the last element."""
    if t.numel() == 0:
        return 0
    span = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    return span * t.element_size()


def _mark(marks: Tensor, t: Tensor, start: int, unit: int) -> Tensor:
    wide = t.element_size() // unit
    strides = [s * wide for s in t.stride()]
    return marks.as_strided((*t.shape, wide), (*strides, 1), start // unit)

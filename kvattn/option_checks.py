"""Checks of what a call asks for: rotary, scales, masks, mods, hints. Part of the one door."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvattn import errors as E
from kvattn import quant
from kvattn.counting import flag, whole

FLAGS = (
    *("causal", "rotary_interleaved", "only_qv", "return_lse", "batch_invariant", "deterministic"),
    "disable_scheduler_metadata",
)
BIAS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_FAR = 1 << 30  # beyond every position, and safe to add to one in 32 bits
_SIZES = {"score_mod": (5, 7, 8), "mask_mod": (4, 6, 7)}


class BlockSparse(NamedTuple):
    """Which key blocks a query block sees; unlisted blocks are masked.

    Counts are (B|1, H|1, Mb) int32, indices (B|1, H|1, Mb, N) int32 with the first ``count``
    entries valid. `mask_mod` applies inside the ``mask`` blocks only, ``full`` blocks skip it.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    block_size: tuple[int, int] = (128, 128)


def normalise(raw: Any) -> None:
    """Windows, scales and hints in one spelling; needs no shapes beyond the caches'."""
    for name in FLAGS:
        flag = getattr(raw, name)
        if flag is not True and flag is not False:
            shown = "return_softmax_lse" if name == "return_lse" else name
            raise E.FlagError(shown, repr(flag), "True or False")
    if _number(raw.dropout_p, "dropout_p", E.DropoutError) != 0:
        raise E.DropoutError("dropout_p", raw.dropout_p, "0.0")
    if raw.backend is not None and not isinstance(raw.backend, str):
        raise E.UnknownBackendError("backend", repr(raw.backend), "None or a name")
    raw.window = _window(raw.window_size, raw.causal)
    chunk = _integer(raw.attention_chunk, "attention_chunk", E.AttentionChunkError)
    raw.attention_chunk = min(chunk, _FAR)
    raw.num_splits = _integer(raw.num_splits, "num_splits", E.NumSplitsError)
    raw.sm_margin = _integer(raw.sm_margin, "sm_margin", E.SmMarginError)
    if not isinstance(raw.common_prefix_len, Tensor):
        number = _integer(raw.common_prefix_len, "common_prefix_len", E.CommonPrefixError)
        raw.common_prefix_len = number
    raw.softcap = _number(0.0 if raw.softcap is None else raw.softcap, "softcap", E.SoftcapError)
    if raw.softcap < 0:
        raise E.SoftcapError("softcap", raw.softcap, "0 (off) or a positive number")
    if not any(raw.pack_gqa is flag for flag in (None, True, False)):
        raise E.FlagError("pack_gqa", repr(raw.pack_gqa), "None, True or False")
    raw.norm_eps = _number(raw.norm_eps, "norm_eps", E.NormEpsError)
    if raw.norm_eps < _LEAST:
        raise E.NormEpsError("norm_eps", raw.norm_eps, "a positive number that fp32 can hold")
    for name in ("q_descale", "k_descale", "v_descale"):
        scale = getattr(raw, name)
        if isinstance(scale, (int, float)) and not isinstance(scale, bool):
            device = getattr(raw.v_cache, "device", None)
            factor = _number(scale, name, E.DescaleError)
            setattr(raw, name, torch.tensor(factor, dtype=torch.float32, device=device))
    for name in ("max_seqlen_q", "max_seqlen_k", "min_seqlen_k", "seqlen_k_per_split"):
        bound = getattr(raw, name)
        if bound is not None:
            setattr(raw, name, _integer(bound, name, E.IntArgumentError))


def _window(window: Any, causal: bool) -> tuple[int | None, int | None]:
    allowed = "two ints >= -1, or None"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise E.WindowSizeError("window_size", repr(window), allowed)
    sides: list[int | None] = []
    for side in window:
        if side is None:
            sides.append(None)
            continue
        bound = whole(side)
        if bound is None or bound < -1:
            raise E.WindowSizeError("window_size", repr(window), allowed)
        sides.append(None if bound == -1 else min(bound, _FAR))
    return sides[0], 0 if causal else sides[1]


def _integer(value: Any, name: str, kind: type[E.KvattnError]) -> int:
    if value is None:
        return 0
    number = whole(value)
    if number is None or number < 0:
        raise kind(name, repr(value), "an int >= 0")
    return number


def _number(value: Any, name: str, kind: type[E.KvattnError]) -> float:
    if type(value) is float:
        number = value
    else:
        odd = flag(value) or isinstance(value, (str, bytes))
        try:
            number = math.nan if odd else float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's is the last one
            number = math.nan
    if not abs(number) <= _MOST:
        raise kind(name, repr(value), "a finite number that fp32 can hold")
    return number


def check(raw: Any, count: int) -> None:
    """Shapes and dtypes of everything that is optional; fills in the default softmax scale."""
    _margin(raw)
    _rotary(raw, count)
    _norms(raw)
    _descales(raw, count)
    if raw.sfq is not None or raw.sfk is not None or raw.sfv is not None:
        _mx(raw)
    if not raw.attend:
        return
    if isinstance(raw.common_prefix_len, Tensor) or raw.common_prefix_len > 0:
        _common_prefix(raw, count)
    _softmax_scale(raw)
    _biases(raw, count)
    _mods(raw)
    _sparse(raw, count)


def _margin(raw: Any) -> None:
    """sm_margin leaves at least one multiprocessor of the device."""
    device = raw.v_cache.device
    if raw.sm_margin and device.type == "cuda" and torch.cuda.is_available():
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        if raw.sm_margin >= processors:
            raise E.SmMarginError("sm_margin", raw.sm_margin, f"0 to {processors - 1}")


def _common_prefix(raw: Any, count: int) -> None:
    """A prefix within the capacity, of sequences that may name the same memory."""
    name, keys, paged = "common_prefix_len", raw.common_prefix_len, raw.page_table is not None
    shown = "a tensor" if isinstance(keys, Tensor) else keys
    if raw.cu_seqlens_k is not None:
        raise E.CommonPrefixMemoryError(name, f"{shown} with cu_seqlens_k", "pages that are shared")
    capacity = raw.v_cache.shape[1] * (raw.page_table.shape[1] if paged else 1)
    if isinstance(keys, Tensor):
        if keys.dtype != torch.int32 or keys.shape not in ((), (1,)):
            raise E.CommonPrefixError(name, _seen(keys), "an int, or int32 of shape () or (1,)")
    elif keys > capacity:
        raise E.CommonPrefixError(name, keys, f"0 to {capacity}, the capacity")
    if raw.cache_leftpad is not None:
        raise E.CommonPrefixError(name, f"{shown} with cache_leftpad", "one of them")
    rows = raw.cache_batch_idx is None and count > 1 and raw.v_cache.stride(0) != 0
    if rows and not paged:
        got = f"{shown} with a row of the dense cache for each of {count} sequences"
        raise E.CommonPrefixMemoryError(name, got, "rows that share memory")


def _rotary(raw: Any, count: int) -> None:
    cos, sin, base = raw.rotary_cos, raw.rotary_sin, raw.rotary_seqlens
    if cos is None and sin is None:
        if base is not None:
            raise E.RotaryIncompleteError("rotary_seqlens", "no rotary_cos", "tables with it")
        return
    if cos is None or sin is None:
        missing = "rotary_cos" if cos is None else "rotary_sin"
        raise E.RotaryIncompleteError(missing, "None", "both tables or neither")
    if raw.k is None:
        raise E.RotaryWithoutNewKeysError("rotary_cos", "no k", "k and v to append")
    if raw.cache_seqlens is None and base is None:  # an append by slots alone
        allowed = "cache_seqlens or rotary_seqlens: the positions of the new tokens"
        raise E.AppendWithoutLengthsError("cache_seqlens", "None with rotary tables", allowed)
    dim = raw.k_cache.shape[-1]
    if cos.dim() != 2 or cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= dim:
        got = f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        raise E.RotaryShapeError("rotary_cos", got, f"two (positions, R/2) with R <= {dim}")
    own = raw.q.dtype if raw.q is not None else raw.k.dtype
    if cos.dtype != sin.dtype or cos.dtype not in (torch.float32, own):
        raise E.RotaryDtypeError("rotary_cos", f"{cos.dtype}, {sin.dtype}", f"float32 or {own}")
    if base is not None and (base.dtype != torch.int32 or base.shape != (count,)):
        got = f"{base.dtype}, shape {tuple(base.shape)}"
        raise E.RotarySeqlensError("rotary_seqlens", got, f"int32 of shape ({count},)")


def _norms(raw: Any) -> None:
    """A norm weight has a number for each channel of the tensor that it belongs to."""
    for name, heads in (("q_norm_weight", raw.q), ("k_norm_weight", raw.k)):
        weight = getattr(raw, name)
        if weight is None:
            continue
        if heads is None:  # only_qv leaves q out
            raise E.NormWithoutHeadsError(name, f"no {name[0]}", "None without it")
        dtypes = (*BIAS_DTYPES, *((torch.float64,) if heads.dtype == torch.float64 else ()))
        if weight.shape != heads.shape[-1:] or weight.dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            allowed = f"shape ({heads.shape[-1]},), one of {names}"
            raise E.NormWeightError(name, _seen(weight), allowed)


def _descales(raw: Any, count: int) -> None:
    heads = raw.v_cache.shape[-2]
    for name, cache in (
        ("q_descale", None),
        ("k_descale", raw.k_cache),
        ("v_descale", raw.v_cache),
    ):
        scale = getattr(raw, name)
        if scale is None:
            continue
        if scale.dtype != torch.float32:
            raise E.DescaleError(name, str(scale.dtype), "torch.float32")
        if cache is not None and quant.per_token(scale, cache):
            continue
        try:
            setattr(raw, name, scale.to(raw.v_cache.device).expand(count, heads))
        except RuntimeError:
            got, allowed = f"shape {tuple(scale.shape)}", f"({count}, {heads}) or broadcastable"
            raise E.DescaleError(name, got, allowed) from None


def _mx(raw: Any) -> None:
    if (raw.sfq is None) != (raw.sfk is None) and not (raw.only_qv or not raw.attend):
        missing = "sfq" if raw.sfq is None else "sfk"
        raise E.MxScaleError(missing, "None", "sfq and sfk together")
    if raw.sfk is not None and raw.page_table is not None and raw.sfv is None and raw.attend:
        raise E.MxScaleError("sfv", "None", "sfv too when paged keys carry scales")
    if raw.sfq is not None and raw.rotary_cos is not None:
        got = "sfq together with rotary tables: a pair may span two scales"
        raise E.MxScaleError("sfq", got, "None; rotate q before quantising it")
    if raw.sfq is not None and raw.q_norm_weight is not None:
        got = "sfq together with q_norm_weight: normalised numbers need other scales"
        raise E.MxScaleError("sfq", got, "None; normalise q before quantising it")
    for name, data in (("sfq", raw.q), ("sfk", raw.k_cache), ("sfv", raw.v_cache)):
        scale, new = getattr(raw, name), {"sfk": raw.k, "sfv": raw.v}.get(name)
        if scale is None:
            continue
        if new is not None and new.dtype == torch.float8_e4m3fn:
            got = f"{name} together with float8_e4m3fn new tokens: their scales are unknown"
            raise E.MxScaleError(name, got, "16- or 32-bit new tokens, which are quantised here")
        if data is None:
            raise E.MxScaleError(name, "scales without data", "None here")
        if scale.dtype != torch.float8_e8m0fnu or data.dtype != torch.float8_e4m3fn:
            got = f"{scale.dtype} for {data.dtype} data"
            raise E.MxScaleError(name, got, "float8_e8m0fnu for float8_e4m3fn data")
        layout = quant.mx_layout(scale, data, tokens=name == "sfv")
        if layout is None:
            got = f"shape {tuple(scale.shape)} for data {tuple(data.shape)}"
            raise E.MxScaleError(name, got, quant.mx_allowed(data, tokens=name == "sfv"))
        if layout == "tokens" and raw.k is not None:
            raise E.MxScaleError("sfv", "one scale per 32 tokens with an append", "plain scales")


def _softmax_scale(raw: Any) -> None:
    if raw.softmax_scale is not None:
        raw.softmax_scale = _number(raw.softmax_scale, "softmax_scale", E.SoftmaxScaleError)
        return
    width = 0 if raw.q is None else raw.q.shape[-1]
    width += 0 if raw.qv is None else raw.qv.shape[-1]
    raw.softmax_scale = width**-0.5


def _biases(raw: Any, count: int) -> None:
    lead = raw.qv if raw.q is None else raw.q
    heads = lead.shape[-2]
    sinks, slopes, bias = raw.sinks, raw.alibi_slopes, raw.rel_bias
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype not in BIAS_DTYPES):
        raise E.SinksError("sinks", _seen(sinks), f"float32, bfloat16 or float16 of ({heads},)")
    if slopes is not None and (
        slopes.shape not in ((heads,), (count, heads)) or slopes.dtype != torch.float32
    ):
        raise E.AlibiSlopesError(
            "alibi_slopes", _seen(slopes), f"float32 of ({heads},) or ({count}, {heads})"
        )
    if bias is not None:
        fits = bias.shape[:-1] == lead.shape[:-1] and bias.shape[-1] > 0
        if not fits or bias.dtype not in BIAS_DTYPES:
            raise E.RelBiasError("rel_bias", _seen(bias), f"{tuple(lead.shape[:-1])} and E >= 1")
    cache = raw.rel_bias_prep_cache
    if cache is not None and not isinstance(cache, dict):
        raise E.RelBiasError("rel_bias_prep_cache", type(cache).__name__, "a dict or None")


def _seen(tensor: Tensor) -> str:
    return f"{tensor.dtype}, shape {tuple(tensor.shape)}"


def _callable_of(mask: Any) -> str | None:
    """What to write for a mask that is no callable."""
    if isinstance(mask, Tensor):
        return "read it in a function: mask_mod=lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx]"
    if callable(getattr(mask, "mask_mod", None)):  # FlexAttention's BlockMask
        return f"pass its function: mask_mod=x.mask_mod for the {type(mask).__name__} x"
    return None


def _mods(raw: Any) -> None:
    for name, sizes in _SIZES.items():
        mod = getattr(raw, name)
        if mod is None:
            continue
        if not callable(mod):
            raise E.ModCallableError(name, type(mod).__name__, "a callable", _callable_of(mod))
        if mod_arity(mod) not in sizes:
            got = f"{mod_arity(mod)} arguments"
            raise E.ModCallableError(name, got, " or ".join(map(str, sizes)))
    if raw.aux_tensors is not None:
        if raw.score_mod is None and raw.mask_mod is None:
            raise E.ModCallableError(
                "aux_tensors", "no mod to read them", "a score_mod or mask_mod"
            )
        if not any(mod and mod_arity(mod) >= 6 for mod in (raw.score_mod, raw.mask_mod)):
            got = "mods that take five arguments or fewer"
            raise E.ModCallableError("aux_tensors", got, "a mod that is handed them")
        if not isinstance(raw.aux_tensors, Sequence):
            got = type(raw.aux_tensors).__name__
            raise E.NotATensorError("aux_tensors", got, "a list or tuple of tensors")
        for tensor in raw.aux_tensors:
            if not isinstance(tensor, Tensor):
                raise E.NotATensorError("aux_tensors", type(tensor).__name__, "tensors")


def mod_arity(mod: Any) -> int:
    """Number of positional arguments of a callable; -1 where Python cannot tell."""
    try:
        parameters = inspect.signature(mod).parameters.values()
    except (TypeError, ValueError):
        return -1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def _sparse(raw: Any, count: int) -> None:
    lead = raw.qv if raw.q is None else raw.q
    gather = raw.gather_kv_indices
    if gather is not None:
        rows = tuple(lead.shape[:-2])
        if gather.dtype != torch.int32 or gather.shape[:-1] != rows:
            raise E.BlockSparseError("gather_kv_indices", _seen(gather), f"int32 of {rows} and K")
    if raw.block_sparse_tensors is not None:
        raw.block_sparse = _blocks(raw.block_sparse_tensors, lead, count)


_FROM_FLEX = (
    "for a BlockMask x pass mask_mod=x.mask_mod and BlockSparse(x.kv_num_blocks, x.kv_indices, "
    "x.full_kv_num_blocks, x.full_kv_indices, x.BLOCK_SIZE)"
)


def _blocks(given: Any, lead: Tensor, count: int) -> BlockSparse:
    """A `BlockSparse` or its likeness, field by field."""
    fields: dict[str, Any] = {name: getattr(given, name, None) for name in BlockSparse._fields}
    sizes = fields["block_size"] = fields["block_size"] or (128, 128)
    fits = isinstance(sizes, (tuple, list)) and len(sizes) == 2
    if not fits or not all(type(size) is int and size > 0 for size in sizes):
        raise _block_error(f"block_size {sizes!r}", "two positive ints")
    heads = lead.shape[-2]
    for prefix in ("mask", "full"):
        counts, indices = fields[f"{prefix}_block_cnt"], fields[f"{prefix}_block_idx"]
        if counts is None and indices is None and prefix == "full":
            continue
        for name, tensor, rank in (("cnt", counts, 3), ("idx", indices, 4)):
            if not isinstance(tensor, Tensor):
                got = f"{prefix}_block_{name} {type(tensor).__name__} in {type(given).__name__}"
                fix = _FROM_FLEX if hasattr(given, "kv_num_blocks") else None
                raise _block_error(got, "a kvattn.BlockSparse or its likeness", fix)
            got = f"{prefix}_block_{name} {_seen(tensor)} on {tensor.device}"
            if tensor.dtype != torch.int32 or tensor.dim() != rank or tensor.device != lead.device:
                raise _block_error(got, f"int32 with {rank} dims on {lead.device}")
            if tensor.shape[0] not in (1, count) or tensor.shape[1] not in (1, heads):
                raise _block_error(got, f"({count} or 1, {heads} or 1, ...)")
        if counts.shape != indices.shape[:-1]:
            raise _block_error(f"{prefix}_block_idx {_seen(indices)}", "the counts' shape plus N")
        if lead.dim() == 4 and counts.shape[2] * sizes[0] < lead.shape[1]:
            got = f"{prefix}_block_cnt with {counts.shape[2]} blocks of {sizes[0]} rows"
            raise _block_error(got, f"blocks for {lead.shape[1]} rows")
    return BlockSparse(**fields)


def _block_error(got: str, allowed: str, fix: str | None = None) -> E.BlockSparseError:
    return E.BlockSparseError("block_sparse_tensors", got, allowed, fix)

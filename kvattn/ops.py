"""The operator boundary: eager calls run directly, compiled calls go through `torch.library`.

One boundary a call. Outputs are allocated by the caller and written by the op, so one schema
serves fresh outputs and the caller's own; caches are marked as mutated only where new tokens are
appended. Checks run inside the op, on real tensors.
"""

from __future__ import annotations

import math
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from kvattn import checks, forms
from kvattn.backends import Repeated, execute, prepare
from kvattn.norm import EPS
from kvattn.option_checks import FLAGS
from kvattn.request import Request

_TENSORS = (
    *("q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens"),
    *("cache_batch_idx", "cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k"),
    *("cu_seqlens_k_new", "seqused_q", "seqused_k", "rotary_seqlens", "slot_mapping"),
    *("q_descale", "k_descale", "v_descale", "sfq", "sfk", "sfv", "alibi_slopes", "sinks"),
    *("rel_bias", "gather_kv_indices", "q_norm_weight", "k_norm_weight", "common_prefix"),
)
_WRITTEN = ("k_cache", "v_cache", "k_descale", "v_descale", "sfk", "sfv")  # by an append
_SCALARS = (
    *("float? softmax_scale", "bool causal", "SymInt left", "SymInt right"),
    *("SymInt attention_chunk", "float softcap", "bool rotary_interleaved", "bool only_qv"),
    *("SymInt? max_seqlen_q", "SymInt? max_seqlen_k", "SymInt? min_seqlen_k", "SymInt num_splits"),
    *("bool? pack_gqa", "SymInt sm_margin", "bool batch_invariant", "bool deterministic"),
    *("SymInt? seqlen_k_per_split", "bool disable_scheduler_metadata"),
    *("float norm_eps", "float dropout_p", "str? backend", "SymInt common_prefix_len"),
)
_EAGER = ("score_mod", "mask_mod", "aux_tensors", "block_sparse_tensors")
_NUMBERS: dict[str, Any] = {"cache_seqlens": (int, NoneType)} | dict.fromkeys(
    ("q_descale", "k_descale", "v_descale"), (int, float, NoneType)
)  # tensor arguments that may also be a number
_SCALAR_NAMES = tuple(scalar.split()[1] for scalar in _SCALARS)
_ZEROS = ("attention_chunk", "softcap", "num_splits", "sm_margin", "common_prefix_len")  # if None
_KINDS = {"bool": (bool,), "SymInt": (int,), "float": (int, float), "str": (str,)}
_SCALAR_KINDS: dict[str, Any] = {
    name: _KINDS[kind.rstrip("?")] + (NoneType,) * (kind.endswith("?") or name in _ZEROS)
    for kind, name in map(str.split, (*_SCALARS, "bool return_lse"))
}
_SCALAR_KINDS["common_prefix_len"] += (Tensor,)


def attend(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Checks, plans and runs one attention call given by the names of `Request.of`."""
    if torch.compiler.is_compiling():
        return _compiled(arguments) if _crosses(arguments) else _eager(attend, arguments)
    key, form, tensors = forms.find(arguments)
    if form is None:
        return _run(forms.first(arguments, key))
    result = form.rest(tensors)
    if result is not None:
        return result
    request = form.request(arguments)
    if not form.asked:  # the first repetition shows that there are any
        form.keep(prepare(request, lasting=True), request)
    return _run(request)


def _run(request: Request) -> tuple[Tensor, Tensor]:
    result = execute(request)
    assert result is not None
    return result


class Step:
    """The attention calls of one forward pass: checked for the first layer, repeated for the rest.

    For adapters that own the lengths, pages and rotary tables of a step and keep them as they are
    until it is over. Calls are told apart by their scalar arguments; a layer whose tensors differ
    in form from the first one's is checked by itself.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Repeated] = {}

    def attend(
        self, index: dict[str, Any], layer: dict[str, Any], options: dict[str, Any]
    ) -> Tensor:
        """out of one layer: index tensors of the step, tensors of the layer, scalar options."""
        key = (*options.items(), *map(id, index.values()))
        known = self._known.get(key)
        result = None if known is None else known(layer)
        if result is None:
            request = forms.request({**index, **layer, **options})
            request.__dict__["shared"] = {**request.shared, "one step": True}
            self._known[key] = Repeated(request, layer)
            result = _run(request)
        return result[0]


def append(arguments: dict[str, Any]) -> None:
    """Checks and runs an append without attention."""
    if torch.compiler.is_compiling():
        if _crosses(arguments):
            _append_op(*_flat(arguments))
        else:
            _eager(append, arguments)
    else:
        execute(forms.request({**arguments, "attend": False}))


def _crosses(arguments: dict[str, Any]) -> bool:
    """Whether an op's schema can carry the call; the rest, the eager call takes or refuses."""
    if any(arguments.get(name) is not None for name in _EAGER):
        return False
    if not isinstance(arguments.get("rel_bias_prep_cache"), (dict, NoneType)):
        return False
    for name in (*_TENSORS, "out"):
        value = arguments.get(name)
        if isinstance(value, Tensor):
            if value.requires_grad and torch.is_grad_enabled():
                return False
        elif not (_is(value, _NUMBERS.get(name, (NoneType,))) and abs(value or 0) < math.inf):
            return False
    for name, kinds in _SCALAR_KINDS.items():
        if name in arguments and not _is(arguments[name], kinds):
            return False
    window, lengths = arguments.get("window_size", (-1, -1)), arguments.get("cache_seqlens")
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        return False
    if not all(_is(side, (int, NoneType)) for side in window):
        return False
    if isinstance(lengths, int) and abs(lengths) >= 1 << 31:
        return False
    lead = arguments.get("qv" if arguments.get("only_qv") else "q", arguments.get("k"))
    return lead is not None and arguments["v_cache"] is not None


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a scalar is of one of the kinds; a bool is no integer."""
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _compiled(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    q = arguments["qv"] if arguments.get("only_qv") else arguments["q"]
    value = arguments["v_cache"]
    out = arguments.get("out")
    *lead, heads, _ = q.shape
    if out is None:
        dtype = checks.out_dtype(q.dtype, value.dtype)
        out = q.new_zeros((*lead, heads, value.shape[-1]), dtype=dtype)
    shape = (lead[0], heads, lead[1]) if len(lead) == 2 else (heads, lead[0])
    lse = q.new_full(shape, -math.inf, dtype=torch.float32)
    op = _attend_op if arguments.get("k") is None else _append_attend_op
    op(*_flat(arguments), out, lse)
    return out, lse


def _eager(call: Any, arguments: dict[str, Any]) -> Any:
    """Python callables cannot cross an op boundary: such a call is a graph break."""
    # As a decorator it would import torch._dynamo, which takes seconds, together with kvattn.
    return torch.compiler.disable(call)(arguments)


def _flat(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """The op's positional arguments: tensors by name, then scalars in one spelling."""
    given = dict(arguments)
    left, right = given.get("window_size", (-1, -1))
    given["left"], given["right"] = -1 if left is None else left, -1 if right is None else right
    lengths = given.get("cache_seqlens")
    if isinstance(lengths, int):
        shape = (_batch(given),)
        given["cache_seqlens"] = given["v_cache"].new_full(shape, lengths, dtype=torch.int32)
    if isinstance(given.get("common_prefix_len"), Tensor):  # an op's argument has one type
        given["common_prefix"] = given.pop("common_prefix_len")
    for name in ("q_descale", "k_descale", "v_descale"):
        if isinstance(given.get(name), (int, float)):
            given[name] = given["v_cache"].new_full((), given[name], dtype=torch.float32)
    for name in (*_ZEROS, "dropout_p"):
        given[name] = given.get(name) or 0
    given["softcap"], given["dropout_p"] = float(given["softcap"]), float(given["dropout_p"])
    given.setdefault("rotary_interleaved", True)
    given["norm_eps"] = float(given.get("norm_eps", EPS))
    for name in FLAGS:
        given.setdefault(name, False)
    return tuple(given.get(name) for name in (*_TENSORS, *_SCALAR_NAMES))


def _batch(given: dict[str, Any]) -> int:
    """Number of sequences, by the query or, in an append, the new tokens."""
    ragged = (("qv", "cu_seqlens_q"), ("q", "cu_seqlens_q"), ("k", "cu_seqlens_k_new"))
    lead, name = next((given[lead], edges) for lead, edges in ragged if given.get(lead) is not None)
    return lead.shape[0] if given.get(name) is None else given[name].shape[0] - 1


def _request(args: tuple[Any, ...], **more: Any) -> Request:
    """The request behind an op's positional arguments; their checks run here."""
    given = dict(zip((*_TENSORS, *_SCALAR_NAMES), args, strict=True))
    window = (given.pop("left"), given.pop("right"))
    prefix = given.pop("common_prefix")
    if prefix is not None:
        given["common_prefix_len"] = prefix
    return forms.request({**given, "window_size": window, **more})


def _run_attend(*args: Any) -> None:
    *inputs, out, lse = args
    result = execute(_request(tuple(inputs), out=out, return_lse=True))
    assert result is not None
    lse.copy_(result[1])


def _run_append(*args: Any) -> None:
    execute(_request(args, attend=False))


def _define(name: str, written: tuple[str, ...], outputs: tuple[str, ...], run: Any) -> Any:
    """Defines one op of the library with its schema, its fake and its implementation."""
    parts = [
        f"Tensor({tensor}!)? {tensor}" if tensor in written else f"Tensor? {tensor}"
        for tensor in _TENSORS
    ]
    results = [f"Tensor({tensor}!) {tensor}" for tensor in outputs]
    _library.define(f"{name}({', '.join((*parts, *_SCALARS, *results))}) -> ()")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvattn::{name}", lambda *args: None, lib=_library)
    return getattr(torch.ops.kvattn, name).default


_library = torch.library.Library("kvattn", "DEF")
_attend_op = _define("attend", (), ("out", "lse"), _run_attend)
_append_attend_op = _define("append_attend", _WRITTEN, ("out", "lse"), _run_attend)
_append_op = _define("append", _WRITTEN, (), _run_append)

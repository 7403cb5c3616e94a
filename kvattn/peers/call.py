"""What is known of an attention call, be it a live one or a line of somebody's source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Truth = bool | None  # None: cannot be told from what is known
Trait = Callable[["Call"], Truth]


class _Unknown:
    """Stands for the value of an argument that is given, but not known."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = _Unknown()


@dataclass(frozen=True)
class Call:
    """A call of `flash_attn_with_kvcache`, or of a relative under the same names.

    Attributes:
        given: the arguments by kvattn's names; None counts as not given, `UNKNOWN` is given.
        shapes, dtypes: of tensors, as far as they are known; dtypes as PyTorch names them.
        device: "cpu", "cuda" or "" for unknown.
        capability: compute capability of the GPU, None if unknown.
    """

    given: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    capability: tuple[int, int] | None = None

    def has(self, name: str) -> bool:
        """Whether an argument is given and not None."""
        return self.given.get(name) is not None

    def value(self, name: str, default: Any = None) -> Any:
        """The value of an argument, the default where it is not given, or `UNKNOWN`."""
        value = self.given.get(name)
        return default if value is None else value

    @property
    def window(self) -> tuple[Any, Any]:
        """Both bounds: a number, None for unbounded, or `UNKNOWN`."""
        window = self.value("window_size", (-1, -1))
        if window is UNKNOWN or not isinstance(window, (tuple, list)) or len(window) != 2:
            return UNKNOWN, UNKNOWN
        left, right = (None if bound in (None, -1) else bound for bound in window)
        return left, right


def every(*truths: Truth) -> Truth:
    """And: certain as soon as one of them is False."""
    if False in truths:
        return False
    return None if None in truths else True


def either(*truths: Truth) -> Truth:
    """Or: certain as soon as one of them is True."""
    if True in truths:
        return True
    return None if None in truths else False


def denied(truth: Truth) -> Truth:
    """Not."""
    return None if truth is None else not truth


def has(*names: str) -> Trait:
    """Any of the arguments is given."""
    return lambda call: any(call.has(name) for name in names)


def above(name: str, bound: float) -> Trait:
    """The argument's value is larger than a bound."""

    def trait(call: Call) -> Truth:
        value = call.value(name, 0)
        return None if value is UNKNOWN or not isinstance(value, (int, float)) else value > bound

    return trait


def true(name: str) -> Trait:
    """The flag is set."""

    def trait(call: Call) -> Truth:
        value = call.value(name, False)
        return None if value is UNKNOWN else bool(value)

    return trait


def without(missing: str, *names: str) -> Trait:
    """Some of the arguments are given, but not the one that they belong to."""
    return lambda call: bool(has(*names)(call)) and not call.has(missing)


def _bounded(bound: Any) -> Truth:
    return None if bound is UNKNOWN else bound is not None


def _left(call: Call) -> Truth:
    return _bounded(call.window[0])


def _right(call: Call) -> Truth:
    return every(_bounded(call.window[1]), denied(true("causal")(call)))


def _open_right(call: Call) -> Truth:
    return every(_left(call), denied(_bounded(call.window[1])), denied(true("causal")(call)))


def _open_left(call: Call) -> Truth:
    return every(denied(_left(call)), _right(call))


def _open_side(call: Call) -> Truth:
    return either(_open_left(call), _open_right(call))


def _local(call: Call) -> Truth:
    return either(_left(call), _right(call))


def _offset(call: Call) -> Truth:
    """The last query is not the last key's neighbour by shape alone."""
    if call.has("cache_seqlens") or call.has("seqused_k"):
        return True
    query, keys = call.shapes.get("q"), call.shapes.get("v_cache")
    return None if query is None or keys is None else query[1] != keys[1]


def _integer(call: Call) -> Truth:
    return isinstance(call.value("cache_seqlens"), int)  # an expression is a tensor, as a rule


def _dim(call: Call, *names: str) -> int | None:
    return next((call.shapes[name][-1] for name in names if name in call.shapes), None)


def _dims_differ(call: Call) -> Truth:
    key, value = _dim(call, "k_cache", "q"), _dim(call, "v_cache")
    return None not in (key, value) and key != value


def _dim_over_256(call: Call) -> Truth:
    return (_dim(call, "k_cache", "q") or 0) > 256


def _dim_odd(call: Call) -> Truth:
    return (_dim(call, "k_cache", "q") or 0) % 8 != 0


def _page_not_256(call: Call) -> Truth:
    shape = call.shapes.get("v_cache")
    return None if shape is None else shape[1] % 256 != 0


def _query_dtype(call: Call) -> str:
    return call.dtypes.get("q", call.dtypes.get("qv", ""))


def _wide(call: Call) -> Truth:
    return _query_dtype(call) in ("float32", "float64")


def _fp8(call: Call) -> Truth:
    return _query_dtype(call).startswith("float8")


def _half(call: Call) -> Truth:
    return _query_dtype(call).endswith("float16") if call.dtypes else None


def _mixed(call: Call) -> Truth:
    query, cache = _query_dtype(call), call.dtypes.get("v_cache", "")
    return "" not in (query, cache) and query != cache


def _no_gpu(call: Call) -> Truth:
    return call.device not in ("", "cuda")


def _arch_not(*majors: int) -> Trait:
    return lambda call: call.capability is not None and call.capability[0] not in majors


def _arch_in(*majors: int) -> Trait:
    return lambda call: None if call.capability is None else call.capability[0] in majors


# What only the running program knows, device, dtype and head dimension, counts as no obstacle
# where it is unknown; else every line of source would have a list of doubts.
TRAITS: dict[str, Trait] = {
    "append": has("k", "v"),
    "rotary": has("rotary_cos", "rotary_sin"),
    "rotary_seqlens": has("rotary_seqlens"),
    "norm": has("q_norm_weight", "k_norm_weight"),
    "batch_idx": has("cache_batch_idx"),
    "leftpad": has("cache_leftpad"),
    "paged": has("page_table"),
    "dense": lambda call: not call.has("page_table"),
    "ragged_q": has("cu_seqlens_q"),
    "ragged_new": has("cu_seqlens_k_new"),
    "ragged_k": has("cu_seqlens_k"),
    "lengths": has("cache_seqlens", "seqused_k"),
    "offset": _offset,
    "integer_lengths": _integer,
    "unbounded_q": without("max_seqlen_q", "cu_seqlens_q"),
    "descale": has("q_descale", "k_descale", "v_descale"),
    "causal": true("causal"),
    "left": _left,
    "right": _right,
    "local": _local,
    "open_right": _open_right,
    "open_left": _open_left,
    "open_side": _open_side,
    "chunk": above("attention_chunk", 0),
    "softcap": above("softcap", 0),
    "alibi": has("alibi_slopes"),
    "sinks": has("sinks"),
    "score_mod": has("score_mod"),
    "mask_mod": has("mask_mod"),
    "block_sparse": has("block_sparse_tensors"),
    "gather": has("gather_kv_indices"),
    "rel_bias": has("rel_bias"),
    "mx": has("sfq", "sfk", "sfv"),
    "qv": has("qv"),
    "only_qv": true("only_qv"),
    "slots": has("slot_mapping"),
    "seqused_q": has("seqused_q"),
    "out": has("out"),
    "lse": true("return_softmax_lse"),
    "splits": above("num_splits", 1),
    "dropout": above("dropout_p", 0),
    "v_alone": without("k", "v"),
    "sin_alone": without("rotary_cos", "rotary_sin", "rotary_seqlens"),
    "edges_alone": without("k", "cu_seqlens_k_new"),
    "page_not_256": _page_not_256,
    "dims_differ": _dims_differ,
    "dim_over_256": _dim_over_256,
    "dim_odd": _dim_odd,
    "wide": _wide,
    "half": _half,
    "fp8": _fp8,
    "mixed": _mixed,
    "no_gpu": _no_gpu,
    "not_hopper": _arch_not(9),
    "not_sm120": _arch_not(12),
    "older": _arch_not(8, 9, 10, 11, 12),
    "ampere_or_sm120": _arch_in(8, 12),
}

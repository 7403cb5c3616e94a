"""FlexAttention-style callables inside GPU kernels.

A ``score_mod`` or ``mask_mod`` is traced once, written as a Triton device function, and called by
the attention kernels on tiles of scores. What it captures stays where it is: tensors are read
through pointers, so a change of their data is seen at once; numbers become part of the code, so
another number is another function. A value that changes from call to call belongs in a tensor.

Indices are int32, and so is arithmetic on them: where q_idx * 1000003 may overflow, write
q_idx.long(). Captured tensors may have any strides. A negative index counts from the end; a lookup
outside a tensor reads 0, so that a mod may be called on indices that are masked anyway.

A mod is known by its code and by what it captures, not by its identity: a fresh lambda of the same
code is traced again only if a number, a dtype or a number of dimensions has changed. Let it capture
tensors and numbers; a whole module is too much to look through at every call.
"""

from __future__ import annotations

import hashlib
import linecache
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvattn.errors.mod_kinds import IntervalError, TritonMissingError
from kvattn.errors.option_kinds import ModCallableError, RequiresGradError
from kvattn.mods.approximate import tanh_approx
from kvattn.mods.fingerprint import Fingerprint, arity
from kvattn.mods.lowering import Layout, fill, layouts
from kvattn.mods.tracing import SeqlenInfo, Trace, trace

__all__ = [
    "Lowered",
    "SeqlenInfo",
    "arity",
    "interval",
    "lower_interval",
    "lower_mask_mod",
    "lower_score_mod",
    "tanh_approx",
]

Mod = Callable[..., Any]
_KEPT = 512  # traces kept; the least recently used goes first


class Lowered(NamedTuple):
    """A mod as a Triton device function.

    Attributes:
        function: what ``triton.jit`` made; pass it to a kernel as a ``tl.constexpr``.
        tensors: the tensors behind the pointers in ``aux``; hold on to them while the kernel runs.
        sizes: integers that follow the pointers in ``aux``.
        key: equal keys compile to the same code, given the same kernel.
        source: the text of the function.
        bound: what the size of a result is known not to exceed; 0 if that is not known.
    """

    function: Any
    tensors: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    key: Hashable
    source: str
    bound: float = 0.0

    @property
    def aux(self) -> tuple[Tensor | int, ...]:
        """The last argument of the device function: pass it to the kernel as one argument."""
        return (*self.tensors, *self.sizes)


def lower_score_mod(
    fn: Mod, aux_tensors: Sequence[Tensor] | None, device: torch.device | str
) -> Lowered:
    """The device function of a score_mod.

    ``score_mod(score, b, h, q, k, offset_q, offset_k, seqlen_q, seqlen_k, aux)`` takes score
    [BM, BN] fp32, h and q [BM, 1] int32, k [1, BN] int32, scalars, and ``Lowered.aux``; it returns
    [BM, BN] fp32.

    Args:
        fn: ``(score, b, h, q_idx, kv_idx)``, FA4's seven arguments (``..., seqlen_info,
            aux_tensors``) or eight (``..., aux_scalars``).
        aux_tensors: what the longer forms get as aux_tensors.
        device: of the query; captured tensors must be there too, 0-d CPU tensors excepted.

    Raises:
        ModCallableError: another number of arguments.
        ModLoweringError: an operation that no kernel can run; the message names it.
        ModBranchError, ModCaptureError, ModIndexError, ModReturnError, ModShapeError,
        ModTraceError, ModWriteError: see kvattn.errors.mod_kinds.
    """
    return _lower("score_mod", fn, aux_tensors, device)


def lower_mask_mod(
    fn: Mod, aux_tensors: Sequence[Tensor] | None, device: torch.device | str
) -> Lowered:
    """The device function of a mask_mod: as for score_mod without the score; True keeps.

    ``mask_mod(b, h, q, k, offset_q, offset_k, seqlen_q, seqlen_k, aux)`` returns [BM, BN] int1.
    ``fn`` takes 4, 6 or 7 arguments.
    """
    return _lower("mask_mod", fn, aux_tensors, device)


def interval(mask_mod: Mod | None = None, *, lo: Mod | None = None, hi: Mod | None = None) -> Mod:
    """A mask_mod that also keeps only keys from `lo` up to, but not including, `hi`.

    The bounds are part of the mask on every backend; kernels need not look at blocks of keys that
    lie outside them. Use it where a mask hides long runs of keys.

    Args:
        mask_mod: a further condition, in any form that the attention functions accept.
        lo: ``(b, h, q_idx)`` or ``(b, h, q_idx, seqlen_info, aux_tensors)`` to the first key that
            the query may see; from 0 if not given.
        hi: likewise, to the key after the last; up to seqlen_k if not given.

    Raises:
        IntervalError: a bound with another number of arguments, or neither bound given.
        ModCallableError: mask_mod takes another number of arguments.

    Example:
        >>> start = torch.tensor([0, 0, 0, 3, 3])  # where the document of each token begins
        >>> mask = kvattn.mods.interval(lambda b, h, q, k: q >= k, lo=lambda b, h, q: start[q])
    """
    for name, bound in (("lo", lo), ("hi", hi)):
        if bound is not None and (not callable(bound) or arity(bound) not in (3, 5)):
            raise IntervalError(name, _described(bound), "3 or 5 arguments")
    if lo is None and hi is None:
        raise IntervalError("lo", "no bound at all", "lo, hi or both")
    if mask_mod is not None and (not callable(mask_mod) or arity(mask_mod) not in (4, 6, 7)):
        raise ModCallableError("mask_mod", _described(mask_mod), "4, 6 or 7 arguments")

    def visible(
        b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, seqlen_info: Any, aux_tensors: Any
    ) -> Tensor:
        extra = (seqlen_info, aux_tensors, ())
        keep = kv_idx >= (0 if lo is None else lo(*(b, h, q_idx, *extra)[: arity(lo)]))
        if hi is not None:
            keep = keep & (kv_idx < hi(*(b, h, q_idx, *extra)[: arity(hi)]))
        if mask_mod is not None:
            keep = keep & mask_mod(*(b, h, q_idx, kv_idx, *extra)[: arity(mask_mod)])
        return keep

    visible.kvattn_interval = (lo, hi)  # type: ignore[attr-defined]
    return visible


def lower_interval(
    fn: Mod, aux_tensors: Sequence[Tensor] | None, device: torch.device | str
) -> Lowered | None:
    """The bounds of a mask_mod that `interval` made, as a device function; None for others.

    ``interval(b, h, q, offset_q, offset_k, seqlen_q, seqlen_k, aux)`` returns (lo, hi), both
    [BM, 1] int32 and not clipped to the sequence; rows that are no queries hold any number.
    """
    bounds = getattr(fn, "kvattn_interval", None)
    if bounds is None:
        return None
    return _lower("interval", bounds, aux_tensors, device)


_FORMS = {  # coordinates, and the numbers of arguments that a mod may take
    "score_mod": (("score", "b", "h", "q", "k"), (5, 7, 8)),
    "mask_mod": (("b", "h", "q", "k"), (4, 6, 7)),
    "interval": (("b", "h", "q"), (3, 5)),
}
_traces: OrderedDict[Hashable, tuple[Trace, tuple[Layout, ...]]] = OrderedDict()
_lock = threading.RLock()


def _lower(
    argument: str, fn: Any, aux_tensors: Sequence[Tensor] | None, device: torch.device | str
) -> Lowered:
    target = torch.device(device)
    seen = Fingerprint(target)
    key = (argument, target, seen.of((fn, aux_tensors)))
    with _lock:
        found, layout = _traced(key, seen, argument, fn, aux_tensors, target)
    tensors = tuple([seen.tensors[s] if isinstance(s, int) else s for s in found.slots])
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RequiresGradError(argument, "a captured tensor that requires grad", "no gradient")
    now = layouts(tensors)
    form = _form(found.text, now, now != layout)
    aligned = tuple([x.data_ptr() % 16 == 0 for x in tensors])
    known = form.key, aligned
    return Lowered(form.function, tensors, form.sizes, known, form.source, found.bound)


def _traced(
    key: Hashable,
    found: Fingerprint,
    argument: str,
    fn: Any,
    aux_tensors: Sequence[Tensor] | None,
    device: torch.device,
) -> tuple[Trace, tuple[Layout, ...]]:
    """A trace, and the sizes that it was first used with: others are passed as arguments."""
    at, entry = key, _traces.get(key)
    if entry is not None and entry[0].fixed:
        at = (key, layouts(found.tensors))
        entry = _traces.get(at)
    if entry is not None:
        _traces.move_to_end(at)
        return entry
    mod, coordinates = _common_form(argument, fn, aux_tensors)
    result = trace(mod, argument, coordinates, found.tensors, device)
    used = [found.tensors[s] if isinstance(s, int) else s for s in result.slots]
    entry = (result, layouts(used))
    if found.complete and result.closed:
        _traces[key] = entry
        if result.fixed:
            _traces[(key, layouts(found.tensors))] = entry
        while len(_traces) > _KEPT:
            _traces.popitem(last=False)
    return entry


def _common_form(
    argument: str, fn: Any, aux_tensors: Sequence[Tensor] | None
) -> tuple[Mod, tuple[str, ...]]:
    """`fn`, or the pair of bounds, as a function of its coordinates and a SeqlenInfo."""
    coordinates, counts = _FORMS[argument]

    def called(mod: Mod, *args: Any) -> Any:
        return mod(*(*args, aux_tensors, ())[: arity(mod)])

    if argument == "interval":
        lo, hi = fn

        def bounds(b: Tensor, h: Tensor, q: Tensor, info: SeqlenInfo) -> tuple[Any, Any]:
            first = 0 if lo is None else called(lo, b, h, q, info)
            return first, info.seqlen_k if hi is None else called(hi, b, h, q, info)

        return bounds, coordinates
    if not callable(fn) or arity(fn) not in counts:
        allowed = " or ".join(map(str, counts))
        raise ModCallableError(argument, _described(fn), f"{allowed} arguments")
    return lambda *args: called(fn, *args), coordinates


def _described(mod: Any) -> str:
    return f"{arity(mod)} arguments" if callable(mod) else type(mod).__name__


class _Form(NamedTuple):
    """A traced text with sizes put in, as a Triton function."""

    function: Any
    sizes: tuple[int, ...]
    source: str
    key: Hashable


@lru_cache(maxsize=1024)
def _form(text: str, tensors: tuple[Layout, ...], dynamic: bool) -> _Form:
    source, sizes = fill(text, tensors, dynamic)
    function, digest = _compiled(source)
    return _Form(function, sizes, source, (digest, len(sizes), *(x.dtype for x in tensors)))


@lru_cache(maxsize=1024)
def _compiled(source: str) -> tuple[Any, str]:
    """The Triton function of a source, and a digest of the source."""
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        raise TritonMissingError("backend", "no module triton", "triton >= 3.6") from error
    from kvattn.kernels import mod_math

    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = f"<kvattn mod {digest}>"  # inspect, and so Triton, finds the source by this name
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {"tl": tl, "math": mod_math, "__name__": "kvattn.mods.generated"}
    exec(compile(source, file, "exec"), scope)
    name = source[len("def ") : source.index("(")]
    return triton.jit(scope[name]), digest

"""Calls of a form that is known skip what has been found out about it.

The layers of a model, and the steps of a generation, make calls that differ in nothing but the
addresses and the numbers of their tensors: their structural checks pass again, and a backend may
have prepared the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvattn import checks, values
from kvattn.mods.fingerprint import captured
from kvattn.norm import EPS
from kvattn.option_checks import FLAGS
from kvattn.plan import Prepared
from kvattn.request import NAMES, Request, Span, check_structure


class _Reading(NamedTuple):
    """The index tensors of a checked call in plain integers, and what follows from them."""

    numbers: list[Any]
    spans: list[Span]
    pages: list[list[int]] | None
    shared: dict[str, Any]


class _Source(NamedTuple):
    """Where a tensor of a request comes from."""

    field: str
    name: str  # of the caller's argument
    shape: tuple[int, ...] | None  # that it is expanded to


Pick = Callable[[list[Tensor]], tuple[Tensor, ...]]


class Form:
    """A checked call without its tensors: calls of the same form need no structural checks.

    The layers of a model make calls of one form with the same lengths and pages, step after step:
    what was read and checked for the last call holds as long as the numbers are the same.
    """

    def __init__(
        self,
        fixed: dict[str, Any],
        tensors: list[_Source],
        index: list[str] | None,
        given: list[str],
    ) -> None:
        self.fixed = fixed  # scalars, and whatever follows from shapes
        self.tensors = tensors
        self.index = index  # the index tensors; None if the values are not worth remembering
        self.given = given  # names of the caller's tensors, in the order of `find`
        self.last: _Reading | None = None
        self.asked = False  # whether the rest of a call was prepared, whatever its numbers are
        self.prepared: tuple[Prepared, Pick, list[Tensor]] | None = None

    def request(self, given: dict[str, Any]) -> Request:
        """A checked call of this form."""
        request = self._fill(given)
        if request.out is not None:
            checks.own_memory(request)
        self._check(request)
        return request

    def keep(self, prepared: Prepared | None, r: Request) -> None:
        """Has the rest of later calls done by what was prepared for this one."""
        self.asked = True
        if prepared is None:
            return
        places = {field: self.given.index(name) for field, name, _ in self.tensors}
        held: list[Tensor] = []
        for name in prepared.names:
            if name not in places:  # made of a number, which is the same in every call of the form
                places[name] = len(self.given) + len(held)
                held.append(getattr(r, name))
        pick = itemgetter(*[places[name] for name in prepared.names])
        self.prepared = prepared, pick, held  # at once: other threads make calls of this form

    def rest(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        """The prepared rest of a call whose tensors `find` has listed; None if there is none."""
        if self.prepared is None:
            return None
        prepared, pick, held = self.prepared
        return prepared.run(*pick(tensors + held if held else tensors))

    def _check(self, r: Request) -> None:
        """Value checks, unless they have passed for these very numbers."""
        if self.index is None or values.strict() or not r.pool.is_cpu:
            values.check(r)
            return
        numbers = [getattr(r, field).tolist() for field in self.index]
        last = self.last
        if last is None or last.numbers != numbers:
            values.check(r)
            pages = r.pages if r.page_table is not None else None
            last = self.last = _Reading(numbers, r.spans, pages, {})
        r.__dict__.update(spans=last.spans, pages=last.pages, shared=last.shared)

    def _fill(self, given: dict[str, Any]) -> Request:
        request = object.__new__(Request)
        own = request.__dict__
        own.update(self.fixed)
        for field, name, shape in self.tensors:
            own[field] = given[name] if shape is None else given[name].expand(shape)
        for name in _MODS:  # equal to the first call's, but with objects of their own
            own[name] = given.get(name)
        own["pool"] = own["v_cache"]
        return request


_forms: dict[tuple[Any, ...], Form] = {}
_MAX_FORMS = 4096
_MAX_NUMBERS = 4096
_INDEX = (
    *("cache_seqlens", "cache_batch_idx", "cache_leftpad", "page_table", "cu_seqlens_q"),
    *("cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "rotary_seqlens", "slot_mapping"),
    "common_prefix_len",
)
_MODS = ("score_mod", "mask_mod", "aux_tensors")
_PLAIN = frozenset((bool, int, float, str))
_MEMBERS = _PLAIN | {type(None)}
_BY_SHAPE = (
    *("paged", "batch", "heads", "kv_heads", "page_size", "capacity", "out_dtype", "out_shape"),
    *("lse_shape", "local", "facts"),
)


Key = tuple[Any, ...]


def find(given: dict[str, Any]) -> tuple[Key | None, Form | None, list[Tensor]]:
    """The key of a call's form, None if it has none; the form if it is known; the tensors."""
    try:
        key, tensors = _key(given)
    except RuntimeError:  # a tensor without strides, which the checks refuse
        key, tensors = None, []
    return key, None if key is None else _forms.get(key), tensors


def request(given: dict[str, Any]) -> Request:
    """A checked call by the public names of its arguments.

    Raises one of the classes of `kvattn.errors` before anything is written.
    """
    key, form, _ = find(given)
    return first(given, key) if form is None else form.request(given)


def check_append(given: dict[str, Any]) -> None:
    """The structural checks of an append, unless a call of its form has passed them."""
    given = {**given, "attend": False}
    if find(given)[1] is None:
        check_structure(given)


def first(given: dict[str, Any], key: Key | None) -> Request:
    """A checked call of an unknown form, which is known from then on."""
    checked = Request.of(**given)
    if key is not None:
        _remember(key, checked, given)
    return checked


def _key(given: dict[str, Any]) -> tuple[Key | None, list[Tensor]]:
    """All that structural checks depend on, hashable; None where they depend on more."""
    for name in _SWITCHES:
        if given.get(name, name) is None:
            return None, []
    grad = torch.is_grad_enabled()
    inside = torch.is_inference_mode_enabled()
    parts: list[Any] = [grad, inside]
    tensors = []
    mods = False
    for name, value in given.items():
        if value is None:
            continue
        if isinstance(value, Tensor):
            tensors.append(value)
            # Strides follow from the shape of contiguous memory, but where there is one element.
            layout = value.is_contiguous() or value.stride()
            parts += (name, value.shape, layout, value.dtype, value.device)
            if grad:
                parts.append(value.requires_grad)
            if not inside:
                parts.append(value.is_inference())
        elif value is not _USUAL.get(name, given):
            kind = type(value)
            if kind in _PLAIN:
                parts += (name, kind, value)  # True == 1, but only one of them is a flag
            elif kind is tuple and _MEMBERS.issuperset(map(type, value)):
                parts += (name, *map(type, value), value)
            elif name in _MODS:
                mods = True
            else:
                return None, tensors
    if mods:
        known = _mods(given, tensors)
        return None if known is None else (*parts, known), tensors
    return tuple(parts), tensors


def _mods(given: dict[str, Any], tensors: list[Tensor]) -> Key | None:
    """What mods compute, and where the tensors lie that they read."""
    if not tensors:
        return None
    seen = captured([given.get(name) for name in _MODS], tensors[0].device)
    if seen is None:
        return None
    key, read = seen
    return key, *[(x.data_ptr(), x.shape, x.stride(), x.requires_grad) for x in read]


# Left out of keys where they are these very objects; None is left out everywhere.
_USUAL: dict[str, Any] = {
    **dict.fromkeys(FLAGS, False),
    **dict.fromkeys(("attention_chunk", "num_splits", "sm_margin", "common_prefix_len"), 0),
    "rotary_interleaved": True,
    "norm_eps": EPS,
}
# Their None is a mistake, and not what is left out.
_SWITCHES = (*FLAGS, "norm_eps")
_SOURCES = {"cache_seqlens": "seqused_k", "cu_seqlens_k_new": "cu_seqlens_q"}


def _remember(key: tuple[Any, ...], r: Request, given: dict[str, Any]) -> None:
    """Keeps the form of a checked call, if normalising passed its tensors on as they came."""
    fixed = {name: getattr(r, name) for name in NAMES}
    tensors = []
    for field, value in fixed.items():
        if isinstance(value, Tensor) and type(given.get(field)) not in (int, float):
            source = _source(field, value, given)
            if source is None:
                return
            tensors.append(source)
        elif isinstance(value, Tensor) and field in _INDEX:
            return  # one number for all lengths: another one the next time
    for field in (*(field for field, _, _ in tensors), *_MODS):
        del fixed[field]
    if r.attend:
        fixed |= {name: getattr(r, name) for name in _BY_SHAPE}
    if len(_forms) >= _MAX_FORMS:
        _forms.clear()
    index: list[str] | None = [field for field, _, _ in tensors if field in _INDEX]
    large = any(getattr(r, name).numel() > _MAX_NUMBERS for name in index or ())
    if large or not r.attend or r.gather_kv_indices is not None:
        index = None
    names = [name for name, value in given.items() if isinstance(value, Tensor)]
    _forms[key] = Form(fixed, tensors, index, names)


def _source(field: str, value: Tensor, given: dict[str, Any]) -> _Source | None:
    """By name: one tensor may be given twice in this call and not in the next."""
    for name in filter(None, (field, _SOURCES.get(field))):
        own = given.get(name)
        if own is value:
            return _Source(field, name, None)
        if field.endswith("descale") and isinstance(own, Tensor) and own.device == value.device:
            return _Source(field, name, tuple(value.shape))
    return None


def known() -> list[Form]:
    """The forms seen so far."""
    return list(_forms.values())

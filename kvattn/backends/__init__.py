"""The backends in order of preference, and the one function that runs a request."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from kvattn import plan as planning
from kvattn.backends import cpu, hopper, reference, triton
from kvattn.plan import Backend, Plan, Prepared
from kvattn.request import Facts, Request

BACKENDS = cast(tuple[Backend, ...], (hopper, triton, cpu, reference))
_BY_NAME = {backend.name: backend for backend in BACKENDS}


@lru_cache(maxsize=4096)
def plan_for(facts: Facts) -> Plan:
    """The plan for a call, remembered by its facts."""
    return planning.plan(facts, BACKENDS)


def execute(r: Request) -> tuple[Tensor, Tensor] | None:
    """Plans and runs: (out, lse), or None for an append alone. Autocast has no say in it."""
    plan = plan_of(r.facts)
    run, device = _BY_NAME[plan.backend].run, r.facts.device
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return run(r, plan)
    return run(r, plan)


def plan_of(facts: Facts) -> Plan:
    """The same plan, noted on the facts themselves: calls of one form share them."""
    plan: Plan | None = facts.__dict__.get("plan")
    if plan is None:
        plan = facts.__dict__["plan"] = plan_for(facts)
    return plan


def prepare(r: Request, lasting: bool = False) -> Prepared | None:
    """The rest of a call, for tensors of its form by name; None where nothing is gained.

    It holds while index tensors and rotary tables hold what they held, or always if `lasting`,
    for calls whose mods compute the same and read the same memory.
    """
    backend = _BY_NAME[plan_of(r.facts).backend]
    return None if lasting and not backend.lasting else backend.prepare(r)


def _checked(t: Tensor, grad: bool, inside: bool) -> list[Any]:
    """What structural checks ask of a tensor, as in the keys of forms."""
    refused = grad and t.requires_grad
    guarded = not inside and t.is_inference()  # may not be written
    return [t.shape, t.stride(), t.dtype, t.device, refused, guarded]


class Repeated:
    """A checked call, for other tensors of the same form.

    The caller vouches that index tensors and rotary tables still hold what they held when the
    call was checked.
    """

    def __init__(self, r: Request, tensors: dict[str, Any]) -> None:
        self._request = r
        grad, inside = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._form = [(name, *_checked(t, grad, inside)) for name, t in tensors.items()]
        self._prepared: Prepared | None = None
        self._held: dict[str, Any] = {}
        self._asked = False

    def __call__(self, tensors: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """(out, lse), or None if the tensors differ in form."""
        if len(tensors) != len(self._form):
            return None
        grad, inside = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        for name, *checked in self._form:
            t = tensors.get(name)
            if t is None or _checked(t, grad, inside) != checked:
                return None
        if not self._asked:  # the first repetition shows that there are any
            self._prepare(tensors)
        if self._prepared is not None:
            given = self._held | tensors if self._held else tensors
            result = self._prepared.run(*[given[name] for name in self._prepared.names])
            if result is not None:
                return result
        return execute(self._request.again(tensors))

    def _prepare(self, tensors: dict[str, Any]) -> None:
        self._asked, self._prepared = True, prepare(self._request)
        names = () if self._prepared is None else self._prepared.names
        self._held = {name: getattr(self._request, name) for name in names if name not in tensors}

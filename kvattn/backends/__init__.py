"""The backends in order of preference, and the one function that runs a request."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

from torch import Tensor

from kvattn import plan as planning
from kvattn.backends import cpu, reference, triton
from kvattn.plan import Backend, Plan
from kvattn.request import Facts, Request

BACKENDS = cast(tuple[Backend, ...], (triton, cpu, reference))
_BY_NAME = {backend.name: backend for backend in BACKENDS}


@lru_cache(maxsize=4096)
def plan_for(facts: Facts) -> Plan:
    """The plan for a call, remembered by its facts."""
    return planning.plan(facts, BACKENDS)


def execute(r: Request) -> tuple[Tensor, Tensor] | None:
    """Plans and runs: (out, lse), or None for an append alone."""
    facts = r.facts
    plan = facts.__dict__.get("plan")  # calls of one form share their facts
    if plan is None:
        plan = facts.__dict__["plan"] = plan_for(facts)
    return _BY_NAME[plan.backend].run(r, plan)

"""Saying what a call would do: the plan, and for every other backend the reason why not."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

from kvattn import api, backends
from kvattn.plan import Plan
from kvattn.request import Facts, Request


@dataclass(frozen=True)
class Explanation:
    """The plan of a call and a verdict on every backend.

    Attributes:
        plan: what would run.
        facts: what the planner saw.
        verdicts: (backend, None if it could take the call, else the sentence why not).
    """

    plan: Plan
    facts: Facts
    verdicts: tuple[tuple[str, str | None], ...]

    def __str__(self) -> str:
        lines = [f"backend {self.plan.backend}: {self.plan.kernel}"]
        for name, reason in self.verdicts:
            if name != self.plan.backend:
                lines.append(f"  {name}: {reason or 'could take the call too'}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "backend": self.plan.backend,
            "kernel": self.plan.kernel,
            "verdicts": dict(self.verdicts),
            "tensors": {
                name: {"shape": list(t.shape), "dtype": str(t.dtype), "stride": list(t.stride)}
                for name, t in self.facts.tensors
            },
            "options": dict(self.facts.options),
        }


_SIGNATURE = inspect.signature(api.flash_attn_with_kvcache)


def explain(*args: Any, device: str | None = None, **kwargs: Any) -> Explanation:
    """What `flash_attn_with_kvcache` would do with these arguments; computes and writes nothing.

    Takes the arguments of the call itself, or meta tensors of their shapes; `device` then names
    the kind of device to plan for ("cpu" by default).

    Raises:
        kvattn.errors.KvattnError: whatever the call itself would raise.

    Example:
        >>> q = torch.empty(1, 1, 32, 128, device="meta")
        >>> cache = torch.empty(1, 4096, 8, 128, device="meta")
        >>> print(kvattn.explain(q, cache, cache))
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    request = Request.of(**api.arguments(bound.arguments))
    facts = request.facts
    if facts.device == "meta":
        facts = replace(facts, device=device or "cpu")
    unforced = tuple((name, None if name == "backend" else v) for name, v in facts.options)
    verdicts = [
        (backend.name, backend.refuses(replace(facts, options=unforced)))
        for backend in backends.BACKENDS
    ]
    return Explanation(backends.plan_for(facts), facts, tuple(verdicts))


explain.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
    parameters=[
        *_SIGNATURE.parameters.values(),
        inspect.Parameter("device", inspect.Parameter.KEYWORD_ONLY, default=None),
    ],
    return_annotation=Explanation,
)

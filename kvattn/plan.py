"""Choosing: a pure function from facts to a plan. Never looks at tensor data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvattn import errors as E
from kvattn.request import Facts, Request


@dataclass(frozen=True)
class Plan:
    """What will run, and why nothing more preferred does.

    Attributes:
        backend: name of the chosen backend.
        kernel: what that backend will run, in its own words.
        passed_over: for every preferred backend that refused, (name, the sentence why).
    """

    backend: str
    kernel: str
    passed_over: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.kernel}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.passed_over]
        return "\n".join(lines)


@dataclass(frozen=True)
class Prepared:
    """What is left of a call, for the tensors of any call of its form.

    Attributes:
        names: of those tensors, as a request calls them.
        run: called with them in that order; out and lse, or None where it does not hold.
    """

    names: tuple[str, ...]
    run: Callable[..., tuple[Tensor, Tensor] | None]


class Backend(Protocol):
    """One way to compute the contract: it refuses with a sentence, or it runs."""

    @property
    def name(self) -> str: ...

    @property
    def lasting(self) -> bool: ...  # prepared calls hold whatever the index tensors hold

    def refuses(self, facts: Facts) -> str | None: ...

    def kernel(self, facts: Facts) -> str: ...

    def run(self, r: Request, plan: Plan) -> tuple[Tensor, Tensor] | None: ...

    def prepare(self, r: Request) -> Prepared | None: ...


def plan(facts: Facts, candidates: Sequence[Backend]) -> Plan:
    """The first candidate that does not refuse; a backend named in the call never falls back."""
    wanted = facts.option("backend")
    passed: list[tuple[str, str]] = []
    for backend in candidates:
        if wanted is not None and backend.name != wanted:
            continue
        reason = backend.refuses(facts)
        if reason is None:
            return Plan(backend.name, backend.kernel(facts), tuple(passed))
        if wanted is not None:
            able = [other.name for other in candidates if other.refuses(facts) is None]
            got, allowed = f"backend={wanted!r}: {reason}", ", ".join(("None", *able))
            raise E.BackendRefusesError("backend", got, allowed)
        passed.append((backend.name, reason))
    if wanted is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in passed)
        raise E.BackendRefusesError(
            "backend", f"no backend for the call ({reasons})", "another call"
        )
    names = ", ".join(backend.name for backend in candidates)
    raise E.UnknownBackendError("backend", repr(wanted), f"None, {names}")

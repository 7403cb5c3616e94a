"""Saying what a call would do: the plan, and why no other backend or library does it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from kvattn import api, backends
from kvattn.errors.cli_kinds import DeviceUnavailableError
from kvattn.peers import PEERS, UNKNOWN, Call, Peer, Verdict, verdicts
from kvattn.plan import Plan
from kvattn.request import Facts, Request


@dataclass(frozen=True)
class PeerAnswer:
    """What another library would do with the call.

    Attributes:
        peer: the library.
        version: what is installed of it, None if it is not.
        verdicts: what it refuses or alters; empty if it takes the call.
    """

    peer: Peer
    version: str | None
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        found = f"{self.version} installed" if self.version else "not installed"
        reasons = "; ".join(map(str, self.verdicts)) or "could take the call"
        return f"{self.peer.title} ({found}): {reasons}"

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "name": self.peer.name,
            "title": self.peer.title,
            "installed": self.version,
            "read": self.peer.read,
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
        }


@dataclass(frozen=True)
class Explanation:
    """The plan of a call and a verdict on every backend.

    Attributes:
        plan: what would run.
        facts: what the planner saw.
        verdicts: (backend, None if it could take the call, else the sentence why not).
        peers: the same for other libraries, installed or not.
    """

    plan: Plan
    facts: Facts
    verdicts: tuple[tuple[str, str | None], ...]

    @cached_property
    def peers(self) -> tuple[PeerAnswer, ...]:
        found = list(verdicts(_call(self.facts)))
        return tuple(
            PeerAnswer(peer, peer.version, tuple(v for v in found if v.peer == peer.name))
            for peer in PEERS
        )

    def __str__(self) -> str:
        return "\n".join([self.summary(), *(f"  {answer}" for answer in self.peers)])

    def summary(self) -> str:
        """The plan and the other backends, without other libraries."""
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
            "peers": [answer.to_dict() for answer in self.peers],
            "tensors": {
                name: {"shape": list(t.shape), "dtype": str(t.dtype), "stride": list(t.stride)}
                for name, t in self.facts.tensors
            },
            "options": dict(self.facts.options),
        }


def _call(facts: Facts) -> Call:
    """The call as rules about other libraries see it."""
    options = dict(facts.options)
    given: dict[str, Any] = {name: UNKNOWN for name, _ in facts.tensors}
    given |= {name: UNKNOWN for name in ("score_mod", "mask_mod") if getattr(facts, name)}
    given["block_sparse_tensors"] = UNKNOWN if facts.block_sparse else None
    left, right = options.pop("window")
    given["window_size"] = (left, None if options["causal"] else right)  # causal makes it 0
    given["return_softmax_lse"] = options.pop("return_lse")
    capability = None
    if facts.device == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    return Call(
        given | options,
        shapes={name: tensor.shape for name, tensor in facts.tensors},
        dtypes={name: str(tensor.dtype).removeprefix("torch.") for name, tensor in facts.tensors},
        device=facts.device,
        capability=capability,
    )


_SIGNATURE = inspect.signature(api.flash_attn_with_kvcache)


def _kind(device: str) -> str:
    """The kind of a device by its name, on this machine or not: "cuda" of "cuda:1"."""
    try:
        return torch.device(device).type
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise DeviceUnavailableError("device", f"{device!r}: {said}", "cpu, cuda") from None


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
        facts = replace(facts, device=_kind(device or "cpu"))
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

"""Who takes part: kvattn, and every other library that is found on this machine."""

from __future__ import annotations

from kvattn.bench.peers import fa2, fa3, fa4, flashinfer, flex, ours, sdpa, xformers
from kvattn.bench.peers.base import Call, Participant, RefusalError

__all__ = ["OTHERS", "Call", "Participant", "RefusalError", "named", "participants"]

OTHERS: tuple[Participant, ...] = (
    fa3.participant(),
    *flashinfer.participants(),
    *sdpa.participants(),
    flex.participant(),
    fa2.participant(),
    fa4.participant(),
    xformers.participant(),
)


def participants(
    device: str, names: list[str] | None = None, backends: list[str] | None = None
) -> list[Participant]:
    """kvattn first, then the peers of this kind of device in the order of the tables.

    Args:
        device: kind of device.
        names: peers to take; None: all. A peer named takes part on any device.
        backends: kvattn's backends to measure one by one; None: the planner's choice.
    """
    own = [ours.participant(name) for name in backends or []] or [ours.participant()]
    if names is None:
        return [*own, *(p for p in OTHERS if device in p.devices)]
    return [*own, *(p for p in OTHERS if p.name in names)]


def named(name: str) -> Participant:
    """A participant by the name in its rows: "fa3", "kvattn", "kvattn triton"."""
    for each in OTHERS:
        if each.name == name:
            return each
    return ours.participant(name.partition(" ")[2] or None)

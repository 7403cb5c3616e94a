"""What results say: who is fastest in each cell, by how much, and how near to the limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvattn.bench.results import Results, Row
from kvattn.bench.suites import SUITES, Suite


@dataclass(frozen=True)
class Unit:
    """How the figures of a suite are shown.

    Attributes:
        name: "us", "TFLOP/s", ...
        rate: whether more is better.
        of: (seconds, cell) -> the figure.
    """

    name: str
    rate: bool
    of: Callable[[float, dict[str, Any]], float]


@dataclass(frozen=True)
class Line:
    """One cell with everybody's rows.

    Attributes:
        cell: what `Work.describe` says.
        rows: by participant.
        ours: kvattn's row.
        best: name of the fastest peer that is right; "" without one.
        ratio: the best peer's time over kvattn's: above 1, kvattn is faster. None without both.
        limit: seconds that the machine's ceilings leave; None where they say nothing.
        share: limit over kvattn's time, 1 at the limit.
    """

    cell: dict[str, Any]
    rows: dict[str, Row]
    ours: Row | None
    best: str
    ratio: float | None
    limit: float | None
    share: float | None


@dataclass(frozen=True)
class Section:
    """A suite's lines and the unit that suits them."""

    suite: Suite
    unit: Unit
    lines: list[Line]
    participants: list[str]


@dataclass(frozen=True)
class Score:
    """All cells in a few numbers.

    Attributes:
        cells: cells with a right peer and a right kvattn.
        faster, slower: cells with kvattn at least 2 % before, or behind, the best peer.
        mean: geometric mean of the ratios.
        low, high: the worst and the best line; None without cells.
    """

    cells: int
    faster: int
    slower: int
    mean: float
    low: Line | None
    high: Line | None


def sections(results: Results) -> list[Section]:
    """The suites that were measured, in their order."""
    found = []
    for suite in SUITES.values():
        cells = [cell for cell in results.cells if cell["suite"] == suite.name]
        if not cells:
            continue
        lines = [line(results, cell) for cell in cells]
        taking = [
            name
            for name in results.participants
            if any(name in x.rows and x.rows[name].status != "refused" for x in lines)
        ]
        found.append(Section(suite, _unit(suite, lines), lines, taking or [results.ours]))
    return found


def line(results: Results, cell: dict[str, Any]) -> Line:
    """One cell as the reports show it."""
    rows = results.of(cell["name"])
    ours = rows.get(results.ours)
    peers = {
        name: row.seconds
        for name, row in rows.items()
        if row.status == "ok" and row.seconds and name.partition(" ")[0] != "kvattn"
    }
    best = min(peers, key=lambda name: peers[name]) if peers else ""
    own = ours.seconds if ours is not None and ours.status == "ok" else None
    limit = results.limit(cell) if cell["kind"] == "device" else None
    return Line(
        cell=cell,
        rows=rows,
        ours=ours,
        best=best,
        ratio=peers[best] / own if best and own else None,
        limit=limit,
        share=limit / own if own and limit else None,
    )


def score(lines: Iterable[Line]) -> Score:
    """Figures over cells where both kvattn and a peer are right."""
    both = [x for x in lines if x.ratio is not None]
    ratios = [x.ratio for x in both if x.ratio is not None]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    ordered = sorted(both, key=lambda x: x.ratio or 0.0)
    return Score(
        cells=len(both),
        faster=sum(r >= 1.02 for r in ratios),
        slower=sum(r <= 1 / 1.02 for r in ratios),
        mean=mean,
        low=ordered[0] if ordered else None,
        high=ordered[-1] if ordered else None,
    )


def verdict(results: Results) -> str:
    """The whole run in a sentence or two."""
    found = score(line(results, cell) for cell in results.cells if cell["kind"] == "device")
    if not found.cells:
        return "No cell has both a right kvattn and a right peer."
    even = found.cells - found.faster - found.slower
    return (
        f"Against the best peer of each of {found.cells} cells, kvattn is faster in "
        f"{found.faster}, even in {even}, slower in {found.slower}; its speed is "
        f"{found.mean:.2f} times theirs in the geometric mean."
    )


def _unit(suite: Suite, lines: list[Line]) -> Unit:
    """The suite's unit, scaled to what was measured."""
    measured = [
        (row.seconds, x.cell) for x in lines for row in x.rows.values() if row.seconds is not None
    ]
    if suite.unit == "TFLOP/s":
        top = max((cell["flops"] / s for s, cell in measured), default=1e12)
        scale, name = (1e12, "TFLOP/s") if top >= 1e12 else (1e9, "GFLOP/s")
        return Unit(name, True, lambda s, cell: cell["flops"] / s / scale)
    least = min((s for s, _ in measured), default=0.0)
    name, scale = ("s", 1.0) if least >= 1 else ("ms", 1e-3) if least >= 1e-2 else ("us", 1e-6)
    return Unit(name, False, lambda s, cell: s / scale)


def figure(value: float | None) -> str:
    """Three digits, as many as a measurement is good for; thousands in full."""
    if value is None or not math.isfinite(value):
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def speed(per_second: float, unit: str) -> str:
    """4.58 TB/s."""
    scale, prefix = next(
        (pair for pair in ((1e12, "T"), (1e9, "G")) if per_second >= pair[0]), (1e6, "M")
    )
    value = per_second / scale
    return f"{value:.3g} {prefix}{unit}" if value < 1000 else f"{value:.0f} {prefix}{unit}"


def shown(row: Row | None, unit: Unit, cell: dict[str, Any]) -> str:
    """What a table says of one participant: its figure, "wrong", or nothing."""
    if row is None or row.status == "refused":
        return ""
    if row.status == "wrong" or row.seconds is None:
        return "wrong"
    return figure(unit.of(row.seconds, cell))


def refusals(section: Section) -> list[str]:
    """Who is wrong or refused, and why, each reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for x in section.lines:
        for name, row in x.rows.items():
            if row.status == "wrong":
                off = f"off by {row.error:.2g}" if row.error is not None else "not numbers"
                why = f"wrong, {off} where {row.allowed:.2g} is allowed"
                found.setdefault((name, why), []).append(x.cell["label"])
            elif row.status == "refused":
                found.setdefault((name, row.note), []).append(x.cell["label"])
    every = {x.cell["label"] for x in section.lines}
    said = []
    for (name, why), labels in found.items():
        where = "" if set(labels) == every else f" ({'; '.join(labels)})"
        said.append(f"{name}: {why}{where}")
    return said


def notes(section: Section) -> list[str]:
    """What to know when comparing: a participant's notes, each once, and what planning takes."""
    said: dict[str, list[str]] = {}
    plans: dict[str, list[float]] = {}
    for x in section.lines:
        for name, row in x.rows.items():
            known = said.setdefault(name, [])
            if row.status == "ok" and row.note and row.note not in known:
                known.append(row.note)
            if row.plan is not None:
                plans.setdefault(name, []).append(row.plan * 1e6)
    for name, taken in plans.items():
        ends = sorted({figure(min(taken)), figure(max(taken))}, key=len)
        said[name].append(f"planning a step: {' to '.join(ends)} us of the host")
    return [f"{name}: {' / '.join(texts)}" for name, texts in said.items() if texts]

"""Results as a run would give them, without the run."""

from __future__ import annotations

from typing import Any

from kvattn.bench.results import Results, Row
from kvattn.bench.suites import SUITES


def made(
    date: str = "2026-01-02T03:04:05+00:00", suites: tuple[str, ...] = (), **seconds: float
) -> Results:
    """Results of the quick grid in which everybody takes so many times the limit."""
    factors = {"kvattn": 1.5, "fast": 1.2, "slow": 3.0} | seconds
    results = Results(
        date=date,
        machine={"card": "A <Card>", "device": "cuda"},
        versions={"kvattn": "0.1.0"},
        commit="abc",
        ceilings={"bandwidth": 4e12, "matmul": 6e14, "how": "reads and products"},
        grid="quick",
        participants={name: {"title": name.title(), "version": "1"} for name in factors},
        absent={"gone": "No module named 'gone'"},
        left_out=["big: 1 x 1"],
    )
    for name in suites or SUITES:
        for work in SUITES[name].cells("quick"):
            cell = work.describe()
            results.cells.append(cell)
            limit = results.limit(cell)
            rows = (row(cell["name"], who, by * limit) for who, by in factors.items())
            results.rows += rows
    return results


def row(cell: str, name: str, seconds: float, spread: float = 0.01, **more: Any) -> Row:
    low, high = seconds * (1 - spread), seconds * (1 + spread)
    return Row(cell, name, "ok", seconds, low, high, 50, 20, checked=1.0, **more)

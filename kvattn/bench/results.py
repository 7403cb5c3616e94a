"""The results of a run as plain values, and as JSON of a known schema."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvattn.bench import outputs
from kvattn.bench.measure import Times
from kvattn.errors.bench_kinds import ResultsFileError

SCHEMA = 1
STATUSES = ("ok", "wrong", "refused")


@dataclass(frozen=True)
class Row:
    """One participant on one cell.

    Attributes:
        cell: name of the cell.
        participant: its short name.
        status: "ok", "wrong" (its output is off; it was not timed) or "refused".
        seconds: a call, median; None unless it was timed. Host cells: of the processor; start-up
            cells: of the whole process.
        low, high: 5th and 95th percentile.
        repeats, calls: repeats, and calls in each of them.
        host: seconds of the processor for an eager call.
        plan: seconds of the host's planning for a step, where there is any.
        error, allowed: largest absolute error of the output, and what it may be.
        checked: the part of the rows that was compared.
        note: what to know when comparing, or why it was refused.
    """

    cell: str
    participant: str
    status: str
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    repeats: int = 0
    calls: int = 0
    host: float | None = None
    plan: float | None = None
    error: float | None = None
    allowed: float | None = None
    checked: float = 0.0
    note: str = ""

    def timed(self, times: Times) -> dict[str, Any]:
        return {
            "seconds": times.median,
            "low": times.low,
            "high": times.high,
            "repeats": times.repeats,
            "calls": times.calls,
        }


@dataclass
class Results:
    """A run.

    Attributes:
        date: UTC, ISO 8601.
        machine, versions: see `machine`; commit: of kvattn, "" if unknown.
        ceilings: bandwidth in bytes/s, matmul in operations/s, how.
        grid: "full", "quick" or "small".
        participants: name -> {"title", "version"}.
        absent: peer -> why it did not take part.
        cells: what `Work.describe` says of each cell, in order.
        rows: one for each participant and cell.
        left_out: cells that the budget did not reach.
    """

    date: str
    machine: dict[str, str]
    versions: dict[str, str]
    commit: str
    ceilings: dict[str, Any]
    grid: str
    participants: dict[str, dict[str, str]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    cells: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def of(self, cell: str) -> dict[str, Row]:
        """The rows of a cell by participant."""
        return {row.participant: row for row in self.rows if row.cell == cell}

    @property
    def ours(self) -> str:
        """The first participant: kvattn."""
        return next(iter(self.participants), "kvattn")

    @property
    def wrong(self) -> list[Row]:
        """Rows of kvattn that are not right."""
        ours = (row for row in self.rows if row.participant.partition(" ")[0] == "kvattn")
        return [row for row in ours if row.status == "wrong"]

    def limit(self, cell: dict[str, Any]) -> float:
        """Seconds that the machine's ceilings leave for a cell."""
        read = cell["bytes"] / self.ceilings["bandwidth"]
        return float(max(read, cell["flops"] / self.ceilings["matmul"]))

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all.

        Raises:
            OutputPathError: the system does not let us.
        """
        outputs.write("--out", path, f"{json.dumps(self.to_dict(), indent=1)}\n".encode())


def load(path: Path) -> Results:
    """Results from a file.

    Raises:
        ResultsFileError: it cannot be read, is no such file, or is of another schema.
    """
    try:
        found = json.loads(path.read_bytes())  # in the encoding that a shell wrote it in
    except (OSError, ValueError) as error:
        raise ResultsFileError("FILE", f"{path}: {error}", "what kvattn bench wrote") from None
    schema = found.pop("schema", None) if isinstance(found, dict) else None
    if schema != SCHEMA:
        got = f"{path} of schema {schema}"
        raise ResultsFileError("FILE", got, f"results of schema {SCHEMA}")
    names = {f.name for f in fields(Results)}
    if set(found) != names:
        odd = ", ".join(sorted(set(found) ^ names))
        raise ResultsFileError("FILE", f"{path} with other fields: {odd}", "whole results")
    try:
        rows = [Row(**row) for row in found.pop("rows")]
    except TypeError as error:
        raise ResultsFileError("FILE", f"{path}: {error}", "whole results") from None
    return Results(rows=rows, **found)


def merged(parts: Iterable[Results]) -> Results:
    """Runs on one machine as one: of what was measured twice, the later run counts.

    Raises:
        ResultsFileError: the runs are of different machines.
    """
    ordered = sorted(parts, key=lambda part: part.date)
    cards = {part.machine["card"] for part in ordered}
    if len(cards) != 1:
        raise ResultsFileError("FILES", " and ".join(sorted(cards)), "results of one machine")
    *earlier, last = ordered
    whole = Results(**{f.name: getattr(last, f.name) for f in fields(Results)})
    for part in reversed(earlier):
        known = {cell["name"] for cell in whole.cells}
        whole.cells = [*whole.cells, *(c for c in part.cells if c["name"] not in known)]
        have = {(row.cell, row.participant) for row in whole.rows}
        new = [row for row in part.rows if (row.cell, row.participant) not in have]
        apart = (replace(r, note=_from_before(r.note)) if r.cell in known else r for r in new)
        whole.rows = [*whole.rows, *apart]
        whole.participants = whole.participants | {
            name: who for name, who in part.participants.items() if name not in whole.participants
        }
    names = {cell["name"] for cell in whole.cells}
    whole.cells = _in_order(whole.cells)
    whole.left_out = [cell for cell in whole.left_out if cell not in names]
    whole.absent = {n: why for n, why in whole.absent.items() if n not in whole.participants}
    return whole


def _from_before(note: str) -> str:
    """Marks a row whose cell was measured again without it: its ratios span two runs."""
    return "; ".join(filter(None, [note, "from an earlier run"]))


def _in_order(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells by suite, in the order in which the suites were first met."""
    suites = list(dict.fromkeys(cell["suite"] for cell in cells))
    return sorted(cells, key=lambda cell: suites.index(cell["suite"]))

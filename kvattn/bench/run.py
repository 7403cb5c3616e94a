"""The run: participants, ceilings, kernels compiled early, then cell after cell in the budget."""

from __future__ import annotations

import gc
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from kvattn.bench import machine, measure, outputs
from kvattn.bench.check import Truth, Verdict
from kvattn.bench.data import Data, layers_for
from kvattn.bench.measure import Times
from kvattn.bench.peers import Call, Participant, RefusalError, participants
from kvattn.bench.results import Results, Row
from kvattn.bench.shapes import Work
from kvattn.bench.suites import SUITES
from kvattn.bench.workers import Task, start_time, warm

Report = Callable[[str, float], None]

_WARM_PROGRESS = 0.3  # of the progress that is shown
_STARTS = 3  # warm starts of a process; a cold one happens once
_WARM_SHARE = 0.45  # of the budget, for compiling before the first cell


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        suites: names, in the order of `SUITES`.
        grid: "full", "quick" or "small".
        device: where.
        peers: names of peers; None: all that are found.
        backends: of kvattn, measured one by one; None: the planner's choice.
        repeats: of each cell.
        budget: seconds after which no further cell is begun; None: no limit.
        out: a file that is brought up to date after every cell.
        processes: that compile kernels before the run; 0: none.
        seed: of the random inputs.
    """

    suites: tuple[str, ...]
    grid: str
    device: torch.device
    peers: tuple[str, ...] | None = None
    backends: tuple[str, ...] | None = None
    repeats: int = 50
    budget: float | None = None
    out: Path | None = None
    processes: int = 0
    seed: int = 0


def run(options: Options, report: Report = lambda step, done: None) -> Results:
    """Measures, saving after every cell.

    Args:
        report: called with what is done and how much of the run is behind it, 0 to 1.

    Raises:
        OutputPathError: the file could not be written; nothing was measured.
    """
    if options.out is not None:
        outputs.check_file("--out", options.out)
    return _Run(options, report).all()


@dataclass(frozen=True)
class _Cell:
    """A cell and where it stands."""

    work: Work
    suite: str
    index: int


class _Run:
    def __init__(self, options: Options, report: Report) -> None:
        self.options, self.report = options, report
        self.start = time.monotonic()
        self.cells = [
            _Cell(work, suite, index)
            for suite in options.suites
            for index, work in enumerate(SUITES[suite].cells(options.grid))
        ]
        self.players: list[Participant] = []
        self.crashed: dict[tuple[str, str], str] = {}
        self.warmed = _WARM_PROGRESS if options.processes else 0.0
        self.longest = 0.0  # seconds that a cell took at most

    def all(self) -> Results:
        options = self.options
        if options.device.type == "cuda":
            torch.cuda.set_device(options.device)
        self.report("looking for peers", 0.0)
        results = self._results()
        with tempfile.TemporaryDirectory(prefix="kvattn-bench-") as caches:
            self._warm()
            for number, cell in enumerate(self.cells):
                if self._late():
                    results.left_out = [c.work.name for c in self.cells[number:]]
                    break
                done = number / len(self.cells)
                self.report(cell.work.name, self.warmed + (1 - self.warmed) * done)
                begun = time.monotonic()
                results.cells.append(cell.work.describe())
                results.rows += self._measure(cell, Path(caches))
                self.longest = max(self.longest, time.monotonic() - begun)
                if options.out is not None:
                    results.save(options.out)
        if options.out is not None:
            results.save(options.out)
        self.report("done", 1.0)
        return results

    def _results(self) -> Results:
        """Results without rows; finds out who takes part."""
        options, device = self.options, self.options.device
        asked = participants(
            device.type,
            None if options.peers is None else list(options.peers),
            None if options.backends is None else list(options.backends),
        )
        found, absent = {}, {}
        for player in asked:
            try:
                found[player.name] = {"title": player.title, "version": player.find()}
            except ImportError as error:
                absent[player.name] = _short(str(error))
            else:
                self.players.append(player)
        self.report("measuring the machine's own limits", 0.0)
        return Results(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            machine=machine.describe(device),
            versions=machine.versions(),
            commit=machine.commit(),
            ceilings=asdict(measure.ceilings(device)),
            grid=options.grid,
            participants=found,
            absent=absent,
        )

    def _late(self) -> bool:
        """Whether a further cell would probably end past the budget."""
        budget = self.options.budget
        return budget is not None and time.monotonic() - self.start + self.longest > budget

    def _task(self, cell: _Cell, player: Participant) -> Task:
        options = self.options
        return Task(cell.suite, options.grid, cell.index, player.name, str(options.device))

    def _warm(self) -> None:
        """Compiles kernels in other processes; whoever ends one is not called in this one."""
        if not self.options.processes:
            return
        quick, slow, seen = [], [], set()
        for cell in self.cells:
            work = cell.work
            for player in self.players if work.kind != "startup" else []:
                key = (player.name, cell.suite, work.model, work.kv_dtype, work.tree)
                if player.compiles == "cell":
                    quick.append(self._task(cell, player))
                elif player.compiles and key not in seen:
                    seen.add(key)
                    slow.append(self._task(cell, player))
        budget = self.options.budget
        deadline = self.start + (_WARM_SHARE * budget if budget is not None else 3600)

        def report(step: str, done: float) -> None:
            self.report(step, self.warmed * done)

        crashed = warm(quick, slow, self.options.processes, deadline, report)
        for task, how in crashed.items():
            name = SUITES[task.suite].cells(task.grid)[task.cell].name
            self.crashed[name, task.participant] = how

    def _measure(self, cell: _Cell, caches: Path) -> list[Row]:
        if cell.work.kind == "startup":
            return [self._start_up(cell, player, caches) for player in self.players]
        try:
            return list(self._rows(cell.work))
        except torch.OutOfMemoryError:
            names = [player.name for player in self.players]
            note = "the cell does not fit into the device's memory"
            return [Row(cell.work.name, name, "refused", note=note) for name in names]
        finally:
            gc.collect()
            if self.options.device.type == "cuda":
                torch.cuda.empty_cache()

    def _rows(self, work: Work) -> Iterator[Row]:
        """Everybody's output is checked first; those that are right are timed in turns."""
        device = self.options.device
        layers = layers_for(work, machine.cold_bytes(device), machine.room(device))
        layers = min(layers, 3) if work.kind == "host" or device.type == "cpu" else layers
        data = Data(work, device, layers, self.options.seed)
        truth = Truth(data)
        rows: dict[str, Row] = {}
        calls: dict[str, Call] = {}
        for player in self.players:
            row = Row(work.name, player.name, "refused", checked=truth.share)
            try:
                call, verdict = self._ready(player, data, truth)
            except Exception as error:  # whatever a peer raises is why it is not measured
                rows[player.name] = replace(row, checked=0.0, note=_reason(error))
                continue
            rows[player.name] = row = _judged(row, call, verdict)
            if row.status == "ok":
                calls[player.name] = call
        times = self._times(work, calls, layers)
        for name, row in rows.items():
            yield self._timed(row, calls.get(name), times.get(name), layers)

    def _ready(self, player: Participant, data: Data, truth: Truth) -> tuple[Call, Verdict]:
        crash = self.crashed.get((data.work.name, player.name))
        if crash is not None:
            raise RefusalError(crash)
        call = player.prepare(data)
        return call, truth.judge(call)

    def _times(
        self, work: Work, calls: dict[str, Call], layers: int
    ) -> dict[str, Times | Exception]:
        device, repeats = self.options.device, self.options.repeats
        if work.kind == "host":
            return {name: measure.host_time(call, device, layers) for name, call in calls.items()}
        return measure.device_times(calls, layers, device, repeats)

    def _timed(
        self, row: Row, call: Call | None, times: Times | Exception | None, layers: int
    ) -> Row:
        """The row with its times; the host's are measured on GPUs, where they are another thing."""
        if call is None or times is None:
            return row
        if isinstance(times, Exception):
            return replace(row, status="refused", note=f"in a CUDA graph: {_reason(times)}")
        row = replace(row, **row.timed(times))
        device = self.options.device
        if device.type != "cuda":
            return row
        host = measure.host_time(call, device, layers, 50)
        plan = measure.plan_time(call, device)
        return replace(row, host=host.median, plan=None if plan is None else plan.median)

    def _start_up(self, cell: _Cell, player: Participant, caches: Path) -> Row:
        """Cold: nothing is compiled yet. Warm: whatever compiles keeps it on disk."""
        own = caches / player.name
        task, row = self._task(cell, player), Row(cell.work.name, player.name, "refused")
        if "warm" in cell.work.label:
            if not own.exists():
                start_time(task, own)
            found = [start_time(task, own) for _ in range(_STARTS)]
        else:
            found = [start_time(task, own)]
        seconds = [s for s in found if isinstance(s, float)]
        if not seconds:
            return replace(row, note=_short(str(found[0])))
        return replace(row, status="ok", **row.timed(Times.of(seconds)))


def _judged(row: Row, call: Call, verdict: Verdict) -> Row:
    note = "; ".join(filter(None, [verdict.problem, call.note]))
    status = "ok" if verdict.right else "wrong"
    error = verdict.error if math.isfinite(verdict.error) else None
    return replace(row, status=status, error=error, allowed=verdict.allowed, note=note)


def _reason(error: Exception) -> str:
    """Why a peer refused, in a line."""
    if isinstance(error, RefusalError):
        return _short(str(error))
    return _short(f"{type(error).__name__}: {error}")


def _short(text: str, limit: int = 240) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "\u2026"


def options(
    *,
    device: str,
    suites: Sequence[str] | None = None,
    grid: str | None = None,
    peers: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    **more: Any,
) -> Options:
    """Options with what a user leaves open filled in: all suites, the device's grid.

    On a GPU, kernels are compiled by a process a core, a few cores left for the rest.
    """
    kind = torch.device(device)
    if device == "cuda":
        kind = torch.device("cuda", torch.cuda.current_device())
    gpu = kind.type == "cuda"
    chosen = tuple(name for name in SUITES if suites is None or name in suites)
    return Options(
        suites=chosen,
        grid=grid or ("full" if gpu else "small"),
        device=kind,
        peers=None if peers is None else tuple(peers),
        backends=None if backends is None else tuple(backends),
        processes=max(1, (os.cpu_count() or 2) - 4) if gpu else 0,
        **more,
    )

"""Two runs beside each other: what became faster, slower or wrong, noise and drift set aside."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import kvattn
from kvattn.bench.results import Results, Row, load
from kvattn.bench.summary import line
from kvattn.errors.bench_kinds import RevisionError

TOLERANCE = 0.05  # a change that is smaller is none
_CONTROLS = 4  # rows of peers, at least, before a drift of the machine is believed
_SIGMAS = 3  # of the noise of both medians


@dataclass(frozen=True)
class Change:
    """kvattn on one cell before and after.

    Attributes:
        cell: its name.
        before, after: seconds; None where it was not right.
        ratio: after / before, the machine's drift taken out; None without both.
        noise: what the ratio may differ from 1 by chance.
        verdict: "faster", "slower", "same", "broken" (right before, not now) or "mended".
    """

    cell: str
    before: float | None
    after: float | None
    ratio: float | None
    noise: float
    verdict: str

    @property
    def worse(self) -> bool:
        return self.verdict in ("slower", "broken")


@dataclass(frozen=True)
class Comparison:
    """All cells that both runs have.

    Attributes:
        changes: in the order of the second run.
        drift: what the peers' times changed by, a factor; 1 where too few peers tell.
        controls: how many rows of peers tell it.
        only: cells that one run alone has.
    """

    changes: list[Change]
    drift: float
    controls: int
    only: list[str]

    @property
    def worse(self) -> bool:
        return any(change.worse for change in self.changes)


def compare(before: Results, after: Results, tolerance: float = TOLERANCE) -> Comparison:
    """Verdicts on every cell that both runs have.

    Peers that ran in both, in the same version, are the control: their median change is the
    machine's, and is taken out of kvattn's.
    """
    names = [cell["name"] for cell in after.cells]
    known = {cell["name"] for cell in before.cells}
    both = [name for name in names if name in known]
    controls = list(_controls(before, after, both))
    drift = statistics.median(controls) if len(controls) >= _CONTROLS else 1.0
    changes = []
    for name in both:
        pair = before.of(name).get(before.ours), after.of(name).get(after.ours)
        changes.append(_change(name, *pair, drift, tolerance))
    return Comparison(changes, drift, len(controls), sorted(known ^ set(names)))


def _controls(before: Results, after: Results, cells: list[str]) -> Iterator[float]:
    """Ratios of the times of peers that did not change."""
    for name in cells:
        old, new = before.of(name), after.of(name)
        for peer, row in new.items():
            if peer.startswith("kvattn") or peer not in old:
                continue
            known = before.participants.get(peer), after.participants.get(peer)
            a, b = _seconds(old[peer]), _seconds(row)
            if a and b and known[0] == known[1]:
                yield b / a


def _seconds(row: Row | None) -> float | None:
    return row.seconds if row is not None and row.status == "ok" else None


def _change(name: str, old: Row | None, new: Row | None, drift: float, tolerance: float) -> Change:
    a, b = _seconds(old), _seconds(new)
    if old is None or new is None or not a or not b:
        verdict = "broken" if a and not b else "mended" if b and not a else "same"
        return Change(name, a, b, None, 0.0, verdict)
    ratio = b / a / drift
    noise = max(tolerance, _SIGMAS * math.hypot(_uncertainty(old), _uncertainty(new)))
    verdict = "slower" if ratio > 1 + noise else "faster" if ratio < 1 / (1 + noise) else "same"
    return Change(name, a, b, ratio, noise, verdict)


def _uncertainty(row: Row) -> float:
    """Standard error of the median, relative, from the spread of the repeats."""
    if not row.seconds or row.low is None or row.high is None or row.repeats < 2:
        return 0.0
    deviation = (row.high - row.low) / 3.29  # between the 5th and 95th percentile of a normal
    return 1.25 * deviation / math.sqrt(row.repeats) / row.seconds


@dataclass(frozen=True)
class Spread:
    """How far repeated runs agree on one cell.

    Attributes:
        cell: its name.
        ratios: the best peer's time over kvattn's, of each run.
        spread: largest over smallest ratio, less 1.
    """

    cell: str
    ratios: tuple[float, ...]
    spread: float


def spreads(runs: Sequence[Results]) -> list[Spread]:
    """Of every cell that has a ratio in all runs; the peer is the best one of the first run."""
    found = []
    for cell in runs[0].cells:
        first = line(runs[0], cell)
        pairs = [(r.of(cell["name"]).get(first.best), r.of(cell["name"]).get(r.ours)) for r in runs]
        times = [(_seconds(peer), _seconds(own)) for peer, own in pairs]
        ratios = tuple(peer / own for peer, own in times if peer and own)
        if len(ratios) == len(runs):
            found.append(Spread(cell["name"], ratios, max(ratios) / min(ratios) - 1))
    return found


def revisions(
    revision: str, arguments: Sequence[str], report: Callable[[str, float], None]
) -> tuple[Results, Results]:
    """Measures a revision in a worktree of its own, then the present files, with one harness.

    Args:
        revision: what git knows: a commit, a branch, a tag.
        arguments: of ``python -m kvattn.bench``.

    Raises:
        RevisionError: git does not know it, or it cannot be measured.
    """
    root = Path(kvattn.__file__).parents[1]
    with _worktree(root, revision) as (tree, folder):
        report(f"measuring {revision}", 0.05)
        before = _measured(tree, folder / "before.json", arguments, revision)
        report("measuring the present files", 0.5)
        after = _measured(root, folder / "after.json", arguments, "the present files")
    return before, after


@contextmanager
def _worktree(root: Path, revision: str) -> Iterator[tuple[Path, Path]]:
    """A checkout of the revision that measures as we do, and a folder for results."""
    with tempfile.TemporaryDirectory(prefix="kvattn-bench-") as name:
        folder = Path(name)
        tree = folder / "tree"
        _git(root, revision, "worktree", "add", "--detach", str(tree), revision)
        try:
            for part in ("bench", "errors/bench_kinds.py"):
                _replace(root / "kvattn" / part, tree / "kvattn" / part)
            yield tree, folder
        finally:
            _git(root, revision, "worktree", "remove", "--force", str(tree))


def _replace(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def _git(root: Path, revision: str, *arguments: str) -> None:
    ran = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        said = ran.stderr.strip().rpartition("\n")[2]
        raise RevisionError("--base", f"{revision}: {said}", "a revision of this checkout")


def _measured(tree: Path, out: Path, arguments: Sequence[str], what: str) -> Results:
    """Results of one tree, in a process that imports it."""
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH", "")]))
    ran = subprocess.run(
        [sys.executable, "-m", "kvattn.bench", *arguments, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if ran.returncode not in (0, 1) or not out.exists():
        said = ran.stderr.strip().rpartition("\n")[2]
        raise RevisionError("--base", f"{what}: {said}", "a revision that can be measured")
    return load(out)

"""``python -m kvattn.bench``: the run alone, with nothing but torch installed.

`kvattn bench` does the same and more: tables, pages, comparisons.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from kvattn.bench import run, summary
from kvattn.bench.results import Results
from kvattn.bench.suites import GRIDS, HEADLINE, SUITES


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 an output of kvattn is wrong, 2 usage."""
    options, out = _options(arguments)
    results = run.run(options, lambda step, done: print(f"{done:4.0%} {step}", file=sys.stderr))
    _show(results)
    print(f"results in {out}", file=sys.stderr)
    return 1 if results.wrong else 0


def _show(results: Results) -> None:
    """The table where rich is installed, the verdict alone elsewhere."""
    try:
        from rich.console import Console

        from kvattn.bench.report import report
    except ModuleNotFoundError:
        print(summary.verdict(results))
    else:
        Console(highlight=False).print(report(results))


def _options(arguments: Sequence[str] | None) -> tuple[run.Options, Path]:
    parser = argparse.ArgumentParser(prog="python -m kvattn.bench", description=__doc__)
    parser.add_argument("--suite", action="append", choices=[*SUITES, "headline"])
    parser.add_argument("--grid", choices=GRIDS, help="default: full on a GPU, small on the CPU")
    parser.add_argument("--peers", help="names between commas; default: all that are found")
    parser.add_argument("--backend", action="append", help="of kvattn, one by one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--budget", type=float, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    given = parser.parse_args(arguments)
    names = given.suite or SUITES
    options = run.options(
        suites=[n for name in names for n in (HEADLINE if name == "headline" else (name,))],
        grid=given.grid,
        device=given.device,
        peers=given.peers.split(",") if given.peers is not None else None,
        backends=given.backend,
        repeats=given.repeats,
        budget=given.budget,
        out=given.out,
    )
    return options, given.out


if __name__ == "__main__":
    sys.exit(main())

"""Results in the terminal: a table for each suite, the best peer and the ratio in every line."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvattn.bench import summary
from kvattn.bench.results import Results
from kvattn.bench.summary import Line, Section, figure, speed


def report(results: Results) -> RenderableType:
    """Everything, for a console of any width."""
    return Group(*_parts(results))


def _parts(results: Results) -> Iterator[RenderableType]:
    yield _head(results)
    for section in summary.sections(results):
        yield Text()
        yield Text.assemble((section.suite.title, "bold"), (f"  {section.suite.about}", "dim"))
        yield _table(section, results.ours)
        for said in summary.refusals(section):
            yield Padding(Text(said, "dim"), (0, 0, 0, 2))
    if results.absent:
        yield Text()
        yield Text(f"not here: {', '.join(results.absent)}", "dim")
    if results.left_out:
        yield Text()
        left = f"left out, the budget was used up: {len(results.left_out)} cells"
        yield Text.assemble((left, "yellow"), (f" ({'; '.join(results.left_out)})", "dim"))
    yield Text()
    yield Text(summary.verdict(results), "bold")


def _head(results: Results) -> RenderableType:
    ceilings = results.ceilings
    limits = f"{speed(ceilings['bandwidth'], 'B/s')} read, {speed(ceilings['matmul'], 'FLOP/s')}"
    made = f"{results.date[:10]}, kvattn {results.versions['kvattn']} {results.commit}".rstrip()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    table.add_row("card", results.machine["card"])
    table.add_row("measured limits", f"{limits} (the column limit)")
    table.add_row("run", made)
    peers = [f"{n} ({who['version']})" for n, who in results.participants.items()]
    table.add_row("took part", ", ".join(peers))
    return table


def _table(section: Section, ours: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    table.add_column(section.unit.name, no_wrap=False, min_width=12)
    if any(x.limit for x in section.lines):
        table.add_column("limit", justify="right", style="dim", no_wrap=True)
    for name in section.participants:
        bold = "bold" if name == ours else ""
        table.add_column(name, justify="right", header_style=bold, no_wrap=False)
    table.add_column("best peer", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    for x in section.lines:
        table.add_row(*_cells(section, x, ours))
    return table


def _cells(section: Section, x: Line, ours: str) -> Iterator[RenderableType]:
    yield Text(x.cell["label"])
    if any(other.limit for other in section.lines):
        yield figure(section.unit.of(x.limit, x.cell)) if x.limit else ""
    for name in section.participants:
        said = summary.shown(x.rows.get(name), section.unit, x.cell) or "-"
        style = "bold red" if said == "wrong" else "bold" if name in (ours, x.best) else ""
        yield Text(said, style if said != "-" else "dim")
    yield x.best or "-"
    if x.ratio is None:
        yield Text("-", "dim")
    else:
        color = "green" if x.ratio >= 1.02 else "red" if x.ratio <= 1 / 1.02 else "yellow"
        yield Text(f"{x.ratio:.2f}", color)

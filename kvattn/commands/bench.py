"""`kvattn bench`: measures attention beside its peers, reports, compares."""

from __future__ import annotations

import statistics
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from kvattn.bench import compare as comparing
from kvattn.bench import page, peers, readme, report, results, run, summary
from kvattn.bench.suites import HEADLINE, SUITES
from kvattn.commands.terminal import BACKENDS, AsJson, add, outcomes, print_json, progress
from kvattn.errors.cli_kinds import DeviceUnavailableError

HELP = """Measure attention on this machine, other libraries beside it.

Without a command it runs: the same as [bold]kvattn bench run[/]."""

CHANGED = 1  # exit code: an output of kvattn is wrong, or a cell became slower

_COLORS = {"faster": "green", "mended": "green", "slower": "red", "broken": "bold red"}


class Grid(str, Enum):
    """How many cells."""

    full = "full"
    quick = "quick"
    small = "small"


class _RunByDefault(TyperGroup):
    """Options without a command are those of `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)


Suites = Annotated[
    list[str] | None,
    typer.Option("--suite", "-s", help=f"{', '.join(SUITES)}; headline; default: all."),
]
Quick = Annotated[bool, typer.Option("--quick", "-q", help="Fewer cells or repeats.")]
Grids = Annotated[
    Grid | None, typer.Option("--grid", help="Default: full on a GPU, small on the CPU.")
]
Peers = Annotated[
    str | None, typer.Option("--peers", help="Names between commas; default: all that are found.")
]
Backends = Annotated[
    list[str] | None, typer.Option("--backend", help="Of kvattn, measured one by one.")
]
Device = Annotated[str | None, typer.Option("--device", help="Default: the GPU, if there is one.")]
Budget = Annotated[
    float | None, typer.Option("--budget", min=1, help="Seconds; what does not fit is left out.")
]
Repeats = Annotated[int | None, typer.Option("--repeats", min=2, help="Of every cell.")]
Files = Annotated[list[Path], typer.Argument(help="What --out wrote.", metavar="FILE")]


def app() -> typer.Typer:
    """The group of commands."""
    group = typer.Typer(cls=_RunByDefault, help=HELP, no_args_is_help=False)
    add(group, measure, "run")
    add(group, show, "report")
    add(group, compare)
    add(group, spread)
    add(group, write_readme, "readme")
    add(group, list_all, "list")
    return group


def measure(
    suite: Suites = None,
    quick: Quick = False,
    grid: Grids = None,
    peers: Peers = None,
    backend: Backends = None,
    device: Device = None,
    budget: Budget = None,
    repeats: Repeats = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A file for the results, kept up to date.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--report", help="A directory for the page and its pictures.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure: check every output, then time everybody in turns.

    Exits with 1 if an output of kvattn is wrong.
    """
    with outcomes(as_json):
        options = _options(suite, quick, grid, peers, backend, device, budget, repeats, out)
        if html is not None:
            page.check("--report", html)
        with progress(quiet=as_json) as bar:
            found = run.run(options, bar)
        if html is not None:
            page.write(found, html)
    if as_json:
        print_json(found.to_dict())
    else:
        Console(highlight=False).print(report.report(found))
    raise typer.Exit(CHANGED if found.wrong else 0)


def show(
    files: Files,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A directory for the page and its pictures.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report results: a table, and with --out a page and pictures.

    Several files of one machine are taken together; of what was measured twice, the later counts.
    """
    with outcomes(as_json):
        found = results.merged(map(results.load, files))
        written = [] if out is None else page.write(found, out, "--out")
    if as_json:
        print_json(found.to_dict())
    elif out is None:
        Console(highlight=False).print(report.report(found))
    else:
        typer.echo("\n".join(map(str, written)))


def compare(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Two results.", metavar="BEFORE AFTER")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Measure this revision and the present files.")
    ] = None,
    suite: Suites = None,
    quick: Quick = False,
    grid: Grids = None,
    peers: Peers = None,
    backend: Backends = None,
    device: Device = None,
    budget: Budget = None,
    repeats: Repeats = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="Per cent; a smaller change is none.")
    ] = 100 * comparing.TOLERANCE,
    as_json: AsJson = False,
) -> None:
    """Compare two results, or a revision with the present files.

    Exits with 1 if a cell became slower or wrong.
    """
    given = files or []
    if (base is None and len(given) != 2) or (base is not None and given):
        raise typer.BadParameter("give two files, or --base and a revision.")
    with outcomes(as_json):
        if base is None:
            before, after = map(results.load, given)
        else:
            options = _options(suite, quick, grid, peers, backend, device, budget, repeats, None)
            with progress(quiet=as_json) as bar:
                before, after = comparing.revisions(base, _arguments(options), bar)
    found = comparing.compare(before, after, tolerance / 100)
    if as_json:
        print_json(_comparison(found))
    else:
        _show_comparison(found)
    raise typer.Exit(CHANGED if found.worse else 0)


def spread(files: Files, as_json: AsJson = False) -> None:
    """Say how far repeated runs agree: the spread of the ratio to the best peer, cell by cell."""
    if len(files) < 2:
        raise typer.BadParameter("give the results of two runs or more.")
    with outcomes(as_json):
        found = comparing.spreads([results.load(file) for file in files])
    wide = sorted((s.spread for s in found), reverse=True)
    if as_json:
        print_json({"spreads": [vars(s) for s in found]})
        return
    table = _grid("", "", *(str(n + 1) for n in range(len(files))), "spread", right=(1, 2, 3, 4))
    for s in found:
        table.add_row(s.cell, *(f"{r:.3f}" for r in s.ratios), f"{s.spread:.1%}")
    console = Console(highlight=False)
    console.print(table)
    if wide:
        middle = statistics.median(wide)
        console.print(f"\nspread of the ratio: {middle:.1%} in the median, {wide[0]:.1%} at most")


def write_readme(
    files: Files,
    text: Annotated[Path, typer.Option("--file", help="The text with the two markers.")] = Path(
        "README.md"
    ),
    picture: Annotated[Path, typer.Option("--picture", help="Where its picture goes.")] = Path(
        "docs/bench.svg"
    ),
    as_json: AsJson = False,
) -> None:
    """Write the headline table and a picture into a text, between its markers."""
    with outcomes(as_json):
        found = results.merged(map(results.load, files))
        readme.update(found, text.resolve(), picture.resolve())
    if as_json:
        print_json({"file": str(text), "picture": str(picture)})
    else:
        typer.echo(f"{text} and {picture}")


def list_all(as_json: AsJson = False) -> None:
    """List suites, and who would take part here."""
    found: dict[str, dict[str, Any]] = {"suites": {}, "peers": {}}
    for suite in SUITES.values():
        sizes = {grid.value: len(suite.cells(grid.value)) for grid in Grid}
        found["suites"][suite.name] = {"about": suite.about, **sizes}
    for peer in peers.OTHERS:
        try:
            found["peers"][peer.name] = {"title": peer.title, "version": peer.find()}
        except ImportError as error:
            found["peers"][peer.name] = {"title": peer.title, "absent": str(error)}
    if as_json:
        print_json(found)
        return
    console = Console(highlight=False)
    table = _grid("", "suite", "", *(grid.value for grid in Grid), right=(2, 3, 4))
    for name, what in found["suites"].items():
        table.add_row(name, what["about"], *(str(what[grid.value]) for grid in Grid))
    console.print(table)
    console.print()
    table = _grid("", "peer", "", "")
    for name, what in found["peers"].items():
        here = Text(what["version"], "green") if "version" in what else Text("no", "yellow")
        table.add_row(name, what["title"], here)
    console.print(table)


def _grid(title: str, *headings: str, right: tuple[int, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, title=title or None, padding=(0, 2, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index in right else "left")
    return table


def _options(
    suite: list[str] | None,
    quick: bool,
    grid: Grid | None,
    peers: str | None,
    backend: list[str] | None,
    device: str | None,
    budget: float | None,
    repeats: int | None,
    out: Path | None,
) -> run.Options:
    """What the options of the command line ask for."""
    names = [n for name in suite or [] for n in (HEADLINE if name == "headline" else (name,))]
    _known("--suite", names, [*SUITES, "headline"])
    chosen = None if peers is None else [name.strip() for name in peers.split(",") if name.strip()]
    _known("--peers", chosen or [], peer_names())
    _known("--backend", backend or [], BACKENDS)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise typer.BadParameter(str(error).partition("\n")[0]) from None
    _check_device(where)
    gpu = where.type == "cuda"
    size = grid.value if grid is not None else "quick" if quick and gpu else None
    return run.options(
        suites=names or None,
        grid=size,
        device=device,
        peers=chosen,
        backends=backend,
        repeats=repeats or (50 if gpu else 10 if quick else 20),
        budget=budget,
        out=out,
    )


def peer_names() -> list[str]:
    return [peer.name for peer in peers.OTHERS]


def _known(option: str, names: list[str], allowed: list[str]) -> None:
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"{option} {name!r} is not one of {', '.join(allowed)}.")


def _check_device(device: torch.device) -> None:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        said = str(error).partition("\n")[0]
        raise DeviceUnavailableError("--device", f"{device}: {said}", "cpu or cuda") from None


def _arguments(options: run.Options) -> list[str]:
    """The same run as arguments of ``python -m kvattn.bench``."""
    arguments = [f"--suite={name}" for name in options.suites]
    arguments += [f"--grid={options.grid}", f"--device={options.device}"]
    arguments.append(f"--repeats={options.repeats}")
    if options.peers is not None:
        arguments.append(f"--peers={','.join(options.peers)}")
    arguments += [f"--backend={name}" for name in options.backends or ()]
    if options.budget is not None:
        arguments.append(f"--budget={options.budget / 2}")
    return arguments


def _comparison(found: comparing.Comparison) -> dict[str, Any]:
    return {
        "worse": found.worse,
        "drift": found.drift,
        "controls": found.controls,
        "only": found.only,
        "changes": [vars(change) for change in found.changes],
    }


def _show_comparison(found: comparing.Comparison) -> None:
    console = Console(highlight=False)
    table = _grid("", "", "before", "after", "after / before", "noise", "", right=(1, 2, 3, 4))
    for change in found.changes:
        ratio = "" if change.ratio is None else f"{change.ratio:.3f}"
        table.add_row(
            change.cell,
            _microseconds(change.before),
            _microseconds(change.after),
            ratio,
            f"{change.noise:.1%}" if change.ratio is not None else "",
            Text(change.verdict, _COLORS.get(change.verdict, "dim")),
        )
    console.print(table)
    ratios = [change.ratio for change in found.changes if change.ratio is not None]
    if ratios:
        console.print(
            f"\nmicroseconds a call; geometric mean {statistics.geometric_mean(ratios):.3f}"
        )
    if found.drift != 1.0:
        said = f"the peers' times changed by {found.drift:.3f}; kvattn's ratios are without that"
        console.print(f"{said} ({found.controls} rows)")
    if found.only:
        console.print(f"in one run only: {', '.join(found.only)}")


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else summary.figure(seconds * 1e6)

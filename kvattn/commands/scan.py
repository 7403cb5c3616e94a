"""`kvattn scan`: the errors that other people's Python raises, and what porting it would take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvattn.commands.terminal import (
    Verbatim,
    facts,
    highlighted,
    outcomes,
    print_json,
    progress,
)
from kvattn.commands.verdicts import add_verdicts, verdict_table
from kvattn.errors.places import OUTSIDE
from kvattn.scan import BACKENDS, CallSite, RaisedError, Scan
from kvattn.scan import scan as look
from kvattn.scan.signatures import TITLES

REFUSED = 1


class Show(str, Enum):
    """Parts of the report."""

    all = "all"
    calls = "calls"
    raises = "raises"


def backend_name(value: str | None) -> str | None:
    """The value of --backend, if it is one that calls are judged by."""
    if value not in (None, *BACKENDS):
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(BACKENDS)}.")
    return value


def scan(
    path: Annotated[Path, typer.Argument(help="A repository, a directory or a Python file.")],
    backend: Annotated[
        str | None,
        typer.Option(
            callback=backend_name,
            metavar="NAME",
            show_default=False,
            help=f"Judge calls by this one alone: {', '.join(BACKENDS)}.",
        ),
    ] = None,
    show: Annotated[Show, typer.Option(help="Which parts of the report.")] = Show.all,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", show_default=False, help="Processes; by default one a CPU."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and no more.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Report attention calls that other libraries refuse, and every error that is raised.

    For each call of flash_attn_with_kvcache and its kin: what FlashAttention-2, -3 and -4, SGLang's
    wrappers and FlashInfer would refuse or silently change, and what to write for kvattn. For each
    raise: its condition, message and id. Sources are parsed, never imported or run.

    Exits with 1 if a backend, or the one that --backend names, would certainly refuse or change a
    call.
    """
    with outcomes(as_json):
        found = look(path, jobs, partial(progress, quiet or as_json))
    if as_json:
        print_json({"backend": backend, **found.to_dict()})
    else:
        console = Console(highlight=False)
        for part in _report(found, backend, show):
            console.print(part, crop=False)
    if any(call.refused_by(backend) for call in found.calls):
        raise typer.Exit(REFUSED)


def _report(found: Scan, backend: str | None, show: Show) -> Iterator[RenderableType]:
    if show != Show.raises:
        for call in found.calls:
            yield from _call(call, backend)
    if show != Show.calls:
        names = {error.id: error.known or error.id for error in found.errors}
        for error in found.errors:
            yield _error(error, names)
    for file, why in found.skipped:
        yield Text.assemble(("skipped ", "yellow"), f"{file}: {why}")
    yield _summary(found, backend)


def _call(call: CallSite, backend: str | None) -> Iterator[RenderableType]:
    source = " or ".join(TITLES[library] for library in call.libraries)
    what = f"  {call.function} calls {call.called} of {source}"
    yield Text.assemble((f"{call.file}:{call.line}", "bold"), what)
    if shown := [v for v in call.verdicts if backend in (None, v.peer)]:
        table = verdict_table()
        add_verdicts(table, shown)
        yield Padding(table, (0, 0, 0, 2))
    yield Text("  write instead", "dim")
    code = "\n".join([*call.rewrite.imports, "", call.rewrite.code])
    yield Verbatim(highlighted(code))
    for note in call.rewrite.notes:
        yield Padding(Text(f"note: {note}"), (0, 0, 0, 2))
    yield Text()


def _error(error: RaisedError, names: Mapping[str, str]) -> Verbatim:
    """Lines that any program can cut apart; thousands of them are printed."""
    text = Text()
    text.append(error.exception, "bold").append(f"  {error.message}  ").append(error.id, "dim")
    if error.known:
        text.append(f"  kvattn errors show {error.known}", "green")
    for each in error.sites:
        site = each.site
        condition = f"  if {site.guard}" if site.guard else ""
        call = site.function
        if call != OUTSIDE:
            call += f"({', '.join(each.parameters)})"
        text.append(f"\n  {site.file}:{site.line}  {call}{condition}")
    if error.related:
        text.append(f"\n  related {' '.join(names[key] for key in error.related)}", "dim")
    return Verbatim(text.append("\n"))


def _summary(found: Scan, backend: str | None) -> Table:
    refused = sum(call.refused_by(backend) for call in found.calls)
    sites = sum(len(error.sites) for error in found.errors)
    judge = f"by {backend}" if backend else "by some backend"
    rows: list[tuple[str, RenderableType]] = [
        ("files", f"{found.files:,} read, {len(found.skipped):,} skipped, {found.seconds:.1f} s"),
        ("errors", f"{len(found.errors):,}, raised in {sites:,} places"),
        ("calls", f"{len(found.calls):,}, of which {refused:,} refused or changed {judge}"),
    ]
    return facts(rows)

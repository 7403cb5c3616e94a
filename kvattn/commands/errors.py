"""`kvattn errors`: the list of errors, their pages, and which one a message or a traceback is."""

from __future__ import annotations

import codecs
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvattn.commands.page import page
from kvattn.commands.terminal import AsJson, outcomes, print_json, standard_input
from kvattn.errors import catalogue
from kvattn.errors.record import Record

NOTHING_FOUND = 1


def list_errors(
    project: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="Of this project: kvattn, sglang."),
    ] = None,
    argument: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="About this argument: page_table."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List errors, kvattn's own first: code, exception and title."""
    with outcomes(as_json):
        known = catalogue.everything()
    found = [
        record
        for record in known
        if project in (None, record.project) and (argument is None or argument in record.arguments)
    ]
    if as_json:
        print_json({"errors": [_brief(record) for record in found]})
    elif found:
        Console(highlight=False).print(_table(found))
    else:
        names = ", ".join(dict.fromkeys(record.project for record in known))
        Console(stderr=True, highlight=False).print(f"No such error; projects are {names}.")
    if not found:
        raise typer.Exit(NOTHING_FOUND)


def _brief(record: Record) -> dict[str, str]:
    names = ("id", "code", "project", "version", "exception", "title", "message")
    return {name: getattr(record, name) for name in names}


def _table(records: list[Record]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", style="dim")
    for record in records:
        table.add_row(record.code, Text(record.title), record.exception)
    return table


def show(
    error: Annotated[str, typer.Argument(metavar="CODE|ID", help="Such as KV121.")],
    as_json: AsJson = False,
) -> None:
    """Print the page about an error: meaning, solutions, an example, where it is raised."""
    with outcomes(as_json):
        record = catalogue.record(error)
    if as_json:
        print_json(record.to_dict())
    else:
        _print_page(record)


def _print_page(record: Record) -> None:
    console = Console(highlight=False)
    for part in page(record):
        console.print(part, crop=False)


def find(
    text: Annotated[
        list[str] | None,
        typer.Argument(help="A message or a whole traceback; by default standard input."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Candidates to name.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Say which error a message or traceback is, and print its page.

    Knows kvattn's errors and those of the libraries that it takes over from; paths, numbers and
    line breaks do not matter. Exits with 1 if it is none of them.

    Example: python train.py 2>&1 | kvattn errors find
    """
    wanted = " ".join(text) if text else _standard_input()
    with outcomes(as_json):
        from kvattn.errors.find import find as search

        matches = search(wanted, limit=limit)
    if as_json:
        found = [
            {"score": m.score, "excerpt": m.excerpt, "error": m.record.to_dict()} for m in matches
        ]
        print_json({"matches": found})
    elif matches:
        _print_page(matches[0].record)
        if len(matches) > 1:
            console = Console(highlight=False)
            console.print(Text("\nOr perhaps", "bold"))
            console.print(_table([match.record for match in matches[1:]]))
    else:
        Console(stderr=True, highlight=False).print(
            "No known error in this text; `kvattn errors list` names them all."
        )
    if not matches:
        raise typer.Exit(NOTHING_FOUND)


def _standard_input() -> str:
    if sys.stdin.isatty():
        typer.echo("Paste a message or traceback, then press Ctrl-D.", err=True)
    pasted = standard_input()
    wide = pasted.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as PowerShell writes
    return pasted.decode("utf-16" if wide else "utf-8", errors="replace")

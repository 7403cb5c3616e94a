"""The page about an error, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvattn.commands.terminal import Verbatim, facts, flowing, highlighted
from kvattn.errors import catalogue
from kvattn.errors.record import Record, Site

_SHOWN_SITES = 2  # with their source; the others in one line each


def page(record: Record) -> Iterator[RenderableType]:
    """Everything that is known about an error, from its meaning to its relatives."""
    yield Text.assemble((record.code, "bold red"), "  ", (record.title, "bold"))
    yield facts(_head(record))
    if record.meaning:
        yield from _section("What it means", Text(flowing(record.meaning)))
    if record.trigger or record.situations:
        yield _heading("When it happens")
        if record.trigger:
            yield _indented(Text(flowing(record.trigger)))
        yield from _items(record.situations, "*")
    if record.solutions:
        yield _heading("Solutions")
        yield from _items(record.solutions)
    yield from _program("A guard before the call", record.guard)
    if record.example is not None:
        yield from _program("Before", record.example.before)
        yield from _program("After", record.example.after)
    yield from _places(record)
    if record.related:
        yield _heading("Related errors")
        for key in record.related:
            other = catalogue.record(key)
            yield _indented(Text.assemble((other.code, "bold"), "  ", other.title))


def _head(record: Record) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = [
        ("exception", Text(record.exception)),
        ("message", Text(record.message)),
        ("project", Text(f"{record.project} {record.version}")),
    ]
    if record.arguments:
        rows.append(("arguments", Text(", ".join(record.arguments))))
    if record.functions:
        rows.append(("functions", Text(", ".join(record.functions))))
    return [*rows, ("id", Text(record.id))]


def _section(heading: str, body: RenderableType) -> Iterator[RenderableType]:
    yield _heading(heading)
    yield _indented(body)


def _heading(text: str) -> Text:
    return Text.assemble("\n", (text, "bold"))


def _indented(body: RenderableType) -> Padding:
    return Padding(body, (0, 0, 0, 2))


def _items(texts: tuple[str, ...], mark: str = "") -> Iterator[RenderableType]:
    for number, text in enumerate(texts, 1):
        sign = mark or f"{number}."
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(sign, Text(flowing(text)))
        yield _indented(grid)


def _program(heading: str, text: str) -> Iterator[RenderableType]:
    if text.strip():
        yield _heading(heading)
        yield Verbatim(highlighted(text))


def _places(record: Record) -> Iterator[RenderableType]:
    if not record.sites:
        return
    yield _heading("Where it is raised")
    for index, site in enumerate(record.sites):
        line = f":{site.line}" if site.line else ""
        condition = f", if {site.guard}" if site.guard else ""
        yield _indented(Text(f"{site.file}{line} in {site.function}{condition}"))
        if site.source and index < _SHOWN_SITES:
            yield _excerpt(site)


def _excerpt(site: Site) -> Verbatim:
    """The lines around the raise, numbered, the one itself marked."""
    numbered = Text()
    for number, line in enumerate(highlighted(site.source).split("\n"), site.first):
        mark = (f"  > {number:4} ", "bold red") if number == site.line else (f"{number:8} ", "dim")
        numbered.append(*mark).append(line).append("\n")
    return Verbatim(numbered)

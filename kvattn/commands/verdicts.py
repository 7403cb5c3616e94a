"""What other libraries would do with a call, as aligned rows."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from kvattn.peers import Verdict

_MAY = {"refuses": "may refuse", "alters": "may alter"}


def verdict_table() -> Table:
    """A table for library, effect, and reason."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def add_verdicts(table: Table, verdicts: Iterable[Verdict], name: str | None = None) -> None:
    """A row for each verdict; the library's name in all of them, or what is given as `name`."""
    for verdict in verdicts:
        effect = Text(verdict.effect, "red")
        if not verdict.certain:
            effect = Text(_MAY[verdict.effect], "yellow")
        about = f"{', '.join(verdict.arguments)}: " if verdict.arguments else ""
        table.add_row(verdict.peer if name is None else name, effect, Text(about + verdict.why))

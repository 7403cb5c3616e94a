"""`kvattn doctor`: what is usable on this machine, and why the rest is not."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvattn.commands.terminal import AsJson, outcomes, print_json
from kvattn.doctor import Diagnosis, examine

_MARKS = {"ok": ("ok", "green"), "absent": ("no", "yellow"), "broken": ("!!", "bold red")}


def doctor(
    as_json: AsJson = False,
) -> None:
    """Say what is usable on this machine, and why the rest is not.

    Tries a tiny attention call on every backend and device, and compares it with plain arithmetic.
    Exits with 1 if no backend gives the right numbers.
    """
    with outcomes(as_json):
        found = examine()
    if as_json:
        print_json(found.to_dict())
    else:
        _show(found)
    if not found.usable:
        raise typer.Exit(1)


def _show(found: Diagnosis) -> None:
    rows = [(x.status, x.name, x.detail) for x in (*found.machine, found.cache)]
    rows += [(x.status, f"{x.backend} backend", f"on {x.device}: {x.detail}") for x in found.trials]
    table = Table.grid(padding=(0, 2, 0, 0))
    for column in ({"no_wrap": True}, {"no_wrap": True, "style": "bold"}, {"overflow": "fold"}):
        table.add_column(**column)
    for status, name, detail in rows:
        table.add_row(Text(*_MARKS[status]), name, Text(detail))
    console = Console(highlight=False)
    console.print(table)
    takers: dict[str, str] = {}
    for trial in found.trials:
        if trial.status == "ok":
            takers.setdefault(trial.device, trial.backend)
    goes = [f"calls on {device} go to the {name} backend" for device, name in takers.items()]
    console.print(f"\n{'; '.join(goes) or 'nothing here is usable'}")

"""What the commands share: consoles, progress, exit codes, option values, aligned facts."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from kvattn import backends
from kvattn.errors import KvattnError, model_kinds
from kvattn.errors.cli_kinds import CommandMemoryError

VERIFY_FAILED, USAGE, NO_MODEL, KVATTN_ERROR, INTERRUPTED = 1, 2, 3, 4, 130

NAMES = 14  # columns for the names of facts

Report = Callable[[str, float], None]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
BACKENDS = [backend.name for backend in backends.BACKENDS]


class Dtype(str, Enum):
    """Dtypes to compute in."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class KvDtype(str, Enum):
    """Dtypes to store keys and values in; auto is the dtype that is computed in."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m2 = "fp8_e5m2"


TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def backend_name(value: str | None) -> str | None:
    """The value of --backend, if there is such a backend."""
    if value not in (None, *BACKENDS):
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(BACKENDS)}.")
    return value


@contextmanager
def outcomes(as_json: bool = False) -> Iterator[None]:
    """Turns errors into a message and an exit code: no traceback for what a user can mend."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except KvattnError as error:
        _end(error, as_json)
    except (MemoryError, RuntimeError) as error:  # PyTorch has no class of its own for the CPU's
        said = str(error)
        of_gpu = isinstance(error, torch.OutOfMemoryError)
        if not (of_gpu or isinstance(error, MemoryError) or "allocate memory" in said):
            raise
        got = said.partition("\n")[0] or type(error).__name__
        lacking = CommandMemoryError("memory", got, "what fits into the memory that is free")
        _end(lacking, as_json)


def _end(error: KvattnError, as_json: bool) -> NoReturn:
    """Shows the error, and ends with its code."""
    if as_json:
        print_json({"error": _error_fields(error)})
    show_error(error)
    of_model = type(error).__module__ == model_kinds.__name__
    raise typer.Exit(NO_MODEL if of_model else KVATTN_ERROR) from None


def _error_fields(error: KvattnError) -> dict[str, str]:
    return {
        "code": error.code,
        "argument": error.argument,
        "problem": error.problem,
        "got": str(error.got),
        "allowed": str(error.allowed),
        "fix": error.fix,
    }


def show_error(error: KvattnError) -> None:
    """Code and problem in one line, and what belongs to them below, on standard error."""
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble((f"{error.code} ", "bold red"), (error.problem, "bold")))
    got, allowed, fix = Text(str(error.got)), Text(str(error.allowed)), Text(error.fix, "green")
    explain = Text(error.explain())
    rows = [(error.argument, got), ("allowed", allowed), ("fix", fix), ("explain", explain)]
    console.print(facts(rows, indent=2))


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on standard output: in one line, but spread out for a reader."""
    indent = 2 if sys.stdout.isatty() else None
    typer.echo(json.dumps(value, ensure_ascii=False, indent=indent))


def facts(rows: Iterable[tuple[str, RenderableType]], indent: int = 0) -> Table:
    """Names on the left, what is said about them on the right, wrapped in its own column."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=NAMES - indent, style="dim")
    table.add_column(overflow="fold")
    for name, what in rows:
        table.add_row(" " * indent + name, what)
    return table


@contextmanager
def progress(quiet: bool = False) -> Iterator[Report]:
    """A bar on standard error that goes away when done; plain lines where there is no terminal."""
    console = Console(stderr=True, highlight=False)
    if quiet:
        yield lambda step, done: None
    elif console.is_terminal:
        bar = Progress(
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )
        with bar:
            task = bar.add_task("", total=1.0)
            yield lambda step, done: bar.update(task, description=step, completed=done)
    else:
        yield _lines(console)


def _lines(console: Console) -> Report:
    """A line for each new step, and for each further quarter of a long one."""
    last: list[Any] = [None, 0.0]

    def report(step: str, done: float) -> None:
        if step != last[0] or done - last[1] >= 0.25:
            last[:] = step, done
            console.print(f"{done:4.0%}  {step}", soft_wrap=True, markup=False)

    return report


def flowing(text: str) -> str:
    """Paragraphs without the line breaks that their file has."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def add(
    group: typer.Typer, command: Callable[..., None], name: str | None = None, **more: Any
) -> None:
    """A command of the group; its help is the docstring, in paragraphs as wide as the terminal."""
    group.command(name, help=flowing(inspect.getdoc(command) or ""), **more)(command)


def standard_input() -> bytes:
    """All of it, in whatever encoding."""
    return sys.stdin.buffer.read()


class Verbatim:
    """Text in whole lines, to be copied; print it with ``crop=False``."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.text, options.update(no_wrap=True, overflow="ignore"))


def highlighted(code: str) -> Text:
    """Python in colours."""
    shown = Syntax("", "python", theme="ansi_dark").highlight(code.strip("\n"))
    shown.rstrip()
    return shown


def size(count: int) -> str:
    """Bytes in words."""
    power = min(4, max(0, count.bit_length() - 1) // 10)
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{count / 1024**power:.{min(power, 1)}f} {unit}"

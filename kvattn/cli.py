"""The `kvattn` command: one line a command; each has its own file in `kvattn.commands`."""

from __future__ import annotations

import signal
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING

from kvattn.errors.cli_kinds import CommandPackageError

if TYPE_CHECKING:
    import typer


def app() -> typer.Typer:
    """All commands."""
    import typer

    from kvattn.commands import bench, doctor, errors, errors_site, explain, generate, root, scan
    from kvattn.commands.terminal import add

    kvattn = typer.Typer(
        name="kvattn",
        help=root.HELP,
        epilog=root.EXAMPLES + root.EXIT_CODES,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    kvattn.callback()(root.root)
    add(kvattn, generate.generate, epilog=root.EXIT_CODES)
    add(kvattn, explain.explain)
    add(kvattn, doctor.doctor)
    add(kvattn, scan.scan)
    pages = typer.Typer(help=root.ERRORS_HELP, no_args_is_help=True)
    add(pages, errors.list_errors, "list")
    add(pages, errors.show)
    add(pages, errors.find)
    add(pages, errors_site.export)
    add(pages, errors_site.serve)
    kvattn.add_typer(pages, name="errors")
    kvattn.add_typer(bench.app(), name="bench")
    return kvattn


def main() -> None:
    """What the console script runs.

    Exit codes: 0 done; 1 an answer that a script can act on: --verify found other tokens, doctor
    nothing usable, scan a refused call, errors find nothing; 2 usage; 3 the model cannot be
    loaded; 4 another error of kvattn; 130 interrupted.
    """
    try:
        run = app()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("rich", "typer"):
            raise
        lacking = CommandPackageError("kvattn", f"no package {package!r}", "typer and rich")
        print(lacking, file=sys.stderr)
        sys.exit(4)
    if hasattr(signal, "SIGPIPE"):  # end quietly with a reader such as `head`
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without UTF-8 must not end an answer
            stream.reconfigure(errors="replace")
    run()


if __name__ == "__main__":
    main()

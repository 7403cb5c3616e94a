"""`kvattn` itself: its help and its version."""

from __future__ import annotations

from typing import Annotated

import typer

from kvattn import __version__

HELP = (
    "Attention over a KV cache: run a model, explain a call or an error, look at this machine, "
    "scan a repository that is to be ported."
)
ERRORS_HELP = "What an error means and how to mend it: kvattn's own and those of other libraries."

EXAMPLES = """[bold]Examples[/]

  kvattn generate "Why is the sky blue?"
  kvattn generate --verify "What is a cache?" "What is gravity?"
  kvattn generate --model ./my-model --kv-dtype fp8_e4m3 --json < prompts.txt
  kvattn explain --batch 8 --seqlen-k 4096 --append 1 --rotary
  kvattn doctor
  kvattn errors show KV121
  python serve.py 2>&1 | kvattn errors find
  kvattn scan --backend fa4 ./my-repository

"""

EXIT_CODES = """[bold]Exit codes[/]

    0  done
    1  --verify found other tokens, doctor nothing usable, scan a call that
       is refused or changed, errors find or list nothing, bench an output
       of kvattn that is wrong, bench compare a cell slower or broken
    2  the command line is wrong
    3  the model cannot be loaded
    4  another error of kvattn; its code and its fix are printed
  130  interrupted
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvattn {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options of `kvattn` itself; commands have their own."""

"""`kvattn errors export` and `kvattn errors serve`: the pages about errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvattn.commands.terminal import AsJson, outcomes, print_json
from kvattn.errors.cli_kinds import SitePackageError

_PACKAGES = ("jinja2", "markupsafe", "pygments", "starlette", "uvicorn")


@contextmanager
def _site_packages(command: str) -> Iterator[None]:
    """Says which extra is missing where a package of the site is."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        needed = "jinja2, pygments, starlette and uvicorn"
        raise SitePackageError(command, f"no package {package!r}", needed) from error


def export(
    directory: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")],
    as_json: AsJson = False,
) -> None:
    """Write the pages about all errors to a directory, to be read without a server.

    An earlier export there is replaced; other files are neither removed nor overwritten.
    """
    with outcomes(as_json):
        with _site_packages("kvattn errors export"):
            from kvattn.site.export import export as write
        files = write(directory)
    index = directory.resolve() / "index.html"
    if as_json:
        print_json({"directory": str(directory.resolve()), "index": index.as_uri(), "files": files})
    else:
        typer.echo(f"{len(files)} files; open {index.as_uri()}")


def serve(
    host: Annotated[
        str, typer.Option(metavar="NAME", help="An interface; by default this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="0 for any that is free.")
    ] = 8617,
) -> None:
    """Serve the pages about all errors over HTTP, until Ctrl-C."""
    with outcomes():
        with _site_packages("kvattn errors serve"):
            from kvattn.site.server import serve as run
        run(host, port, ready=lambda url: typer.echo(f"serving {url} (Ctrl-C ends)"))

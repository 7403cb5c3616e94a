"""Files that a run, a page or a table is written to: whole, or not at all."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvattn.errors.bench_kinds import OutputPathError


def check_file(argument: str, path: Path) -> None:
    """Makes the file's directory and sees that the file could be written, before there is work.

    Raises:
        OutputPathError: it could not.
    """
    with _system_errors(argument, path):
        _check_kind(path)
    check_folder(argument, path.parent)


def check_folder(argument: str, folder: Path) -> None:
    """Makes the directory and sees that files could be written there.

    Raises:
        OutputPathError: they could not.
    """
    with _system_errors(argument, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write(argument: str, path: Path, content: bytes) -> None:
    """Writes beside the file's place and moves there: a reader never sees half of it.

    Raises:
        OutputPathError: the system does not let us.
    """
    part = path.with_name(path.name + ".part")
    with _system_errors(argument, path):
        _check_kind(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(content)
            part.replace(path)
        except BaseException:  # Ctrl-C too
            part.unlink(missing_ok=True)
            raise


def _check_kind(path: Path) -> None:
    """What is moved to a device or a pipe would take its place: /dev/null would be a file."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no regular file")


@contextmanager
def _system_errors(argument: str, path: Path) -> Iterator[None]:
    """Says in kvattn's way what the system will not do."""
    try:
        yield
    except OSError as error:
        got = f"{path}: {error.strerror or error}"
        raise OutputPathError(argument, got, "a place that can be written to") from error

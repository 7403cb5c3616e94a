"""Which files a scan reads, and the processes that read them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

CRASHED = "brings down the process that reads it"

_SKIPPED = ("__pycache__", "node_modules")
_FEW = 48  # files that are read faster here than by others
_AT_ONCE = 16  # files that a process takes at a time


class File(NamedTuple):
    """A file to read.

    Attributes:
        path: where it is.
        name: relative to the root of the scan, for reports.
        project: the package that it belongs to, or the name of the root.
        module: its dotted name within that package, "" outside of any.
    """

    path: Path
    name: str
    project: str
    module: str


def python_files(root: Path, skipped: Callable[[str, str], None]) -> Iterator[File]:
    """The Python files below a directory, or the one file that `root` is, in order.

    Links to directories are not followed. Hidden directories, caches, `node_modules` and virtual
    environments are left out; `skipped` is told of directories that cannot be read.
    """
    packages = _Packages(root.resolve())
    if not root.is_dir():
        yield packages.file(root, root.name)
        return

    def unreadable(error: OSError) -> None:
        skipped(_shown(Path(error.filename), root), error.strerror or "cannot be read")

    for folder, folders, names in os.walk(root, onerror=unreadable):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if _entered(here / name))
        for name in sorted(names):
            if name.endswith(".py"):
                yield packages.file(here / name, _shown(here / name, root))


def _entered(folder: Path) -> bool:
    name = folder.name
    return (
        not name.startswith(".") and name not in _SKIPPED and not (folder / "pyvenv.cfg").exists()
    )


def _shown(path: Path, root: Path) -> str:
    """A name that can be printed, whatever bytes it holds."""
    name = path.relative_to(root).as_posix() if path != root else root.name
    return os.fsencode(name).decode("utf-8", "replace")


class _Packages:
    """Finds the outermost package of a file, each directory once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tops: dict[Path, Path | None] = {}

    def file(self, path: Path, name: str) -> File:
        folder = path.parent.resolve()
        top = self.top(folder)
        if top is None:
            inside = self.root if self.root.is_dir() else self.root.parent
            return File(path, name, inside.name, "")
        parts = (*folder.relative_to(top.parent).parts, path.stem)
        return File(path, name, top.name, ".".join(parts))

    def top(self, folder: Path) -> Path | None:
        if folder not in self.tops:
            found = None
            if (folder / "__init__.py").is_file():
                found = self.top(folder.parent) or folder
            self.tops[folder] = found
        return self.tops[folder]


def jobs_here() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Readers:
    """Processes that each take a share of the files.

    They are started before anything is drawn: a fork while another thread holds a lock would
    keep it held. Without any (`jobs` 1, or few files) this process reads.
    """

    def __init__(self, jobs: int, count: int) -> None:
        self.pool = _pool(jobs) if jobs > 1 and count > _FEW else None

    def map(self, read: Callable[[File], T | str], files: Sequence[File]) -> Iterator[T | str]:
        """`read` of each file, in order; `CRASHED` for one that a process died of."""
        if self.pool is None:
            yield from map(read, files)
            return
        done = 0
        try:
            for answer in self.pool.map(read, files, chunksize=_AT_ONCE):
                yield answer
                done += 1
        except BrokenExecutor:
            yield from _one_by_one(read, files[done:])
        finally:
            self.close()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


def _one_by_one(read: Callable[[File], T | str], files: Sequence[File]) -> Iterator[T | str]:
    """A single process; the file that ends it is the one that it had in hand."""
    while files:
        done = 0
        with _pool(1) as pool:
            try:
                for answer in pool.map(read, files, chunksize=1):
                    yield answer
                    done += 1
            except BrokenExecutor:
                yield CRASHED
                done += 1
        files = files[done:]


def _pool(jobs: int) -> ProcessPoolExecutor:
    method = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_settle)
    pool.submit(int).result()
    return pool


def _settle() -> None:
    """Ctrl-C is for the parent; trees hold no cycles, so there is nothing to collect."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()

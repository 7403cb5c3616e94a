"""Reads other people's Python: where it raises, and which attention calls kvattn can take over.

Nothing is imported or run. Example:

    >>> found = scan(Path("my-repository"))
    >>> [call.line for call in found.calls if call.refused_by("fa4")]
    [123]
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvattn.errors import catalogue
from kvattn.errors.catalogue_kinds import ScanPathError
from kvattn.errors.raises import Raise, raise_sites
from kvattn.errors.record import Record
from kvattn.errors.related import Subject, related
from kvattn.errors.syntax import Source, read, text_of
from kvattn.peers import verdicts
from kvattn.scan import flashinfer, rewrite
from kvattn.scan.calls import calls, known
from kvattn.scan.files import File, Readers, jobs_here, python_files
from kvattn.scan.findings import BACKENDS, CallSite, RaisedError

__all__ = ["BACKENDS", "CallSite", "RaisedError", "Scan", "Skipped", "call_sites", "scan"]

Report = Callable[[str, float], None]
Watch = Callable[[], AbstractContextManager[Report]]


class Skipped(NamedTuple):
    """A file or directory that could not be read, and why."""

    file: str
    why: str


@dataclass(frozen=True)
class Scan:
    """What a scan found.

    Attributes:
        root: what was scanned.
        files: how many files were read.
        seconds: how long it took.
        skipped: what could not be read.
        calls: attention calls, in order of file and line.
        errors: errors raised, in order of their first site.
    """

    root: str
    files: int
    seconds: float
    skipped: tuple[Skipped, ...]
    calls: tuple[CallSite, ...]
    errors: tuple[RaisedError, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            **{name: getattr(self, name) for name in ("root", "files", "seconds")},
            "skipped": [each._asdict() for each in self.skipped],
            "calls": [call.to_dict() for call in self.calls],
            "errors": [error.to_dict() for error in self.errors],
        }


def unwatched() -> AbstractContextManager[Report]:
    """Tells nobody how far a scan is."""
    return nullcontext(lambda step, done: None)


def scan(root: Path, jobs: int | None = None, watch: Watch = unwatched) -> Scan:
    """Reads every Python file below a directory, or one file.

    Args:
        root: file or directory.
        jobs: processes to use; by default one for every processor.
        watch: gives a context and in it a function that is told step and share done.

    Raises:
        kvattn.errors.ScanPathError: there is nothing to read at `root`.
    """
    start = time.perf_counter()
    if not (root.is_dir() or root.is_file()):
        got = f"{str(root)!r}, which " + (
            "is no regular file" if root.exists() else "does not exist"
        )
        raise ScanPathError("path", got, "a Python file or a directory")
    found = _Findings()
    files = list(python_files(root, found.unreadable))
    readers = Readers(jobs_here() if jobs is None else jobs, len(files))
    with watch() as report:
        answers = readers.map(examine, files)
        for done, (file, answer) in enumerate(zip(files, answers, strict=True)):
            report("reading", done / len(files))
            found.add(file, answer)
        report("related errors", 1.0)
        errors = found.errors()
    return Scan(
        root=os.fsencode(root).decode("utf-8", "replace"),
        files=found.files,
        seconds=time.perf_counter() - start,
        skipped=tuple(found.skipped),
        calls=tuple(found.calls),
        errors=errors,
    )


Answer = tuple[list[Raise], list[CallSite]]


def examine(file: File) -> Answer | str:
    """What one file holds, or the sentence why it cannot be read."""
    source = read(file.path, file.name)
    if isinstance(source, str):
        return source
    try:
        sites = list(raise_sites(source, file.project))
        return sites, list(call_sites(source, file.module))
    except RecursionError:
        return "too deeply nested to be read"


def call_sites(source: Source, module: str = "") -> Iterator[CallSite]:
    """The attention calls of one source, judged and rewritten."""
    for found in calls(source, module):
        library = "flashinfer" if "flashinfer" in found.libraries else ""
        write = flashinfer.rewrite if library else rewrite.rewrite
        yield CallSite(
            file=source.name,
            line=found.node.lineno,
            function=found.place.function if found.place else "",
            libraries=found.libraries,
            called=found.function,
            arguments={name: text_of(node) for name, node in found.arguments.items()},
            verdicts=tuple(v for v in verdicts(known(found)) if v.peer in _judges(library)),
            rewrite=write(found),
        )


def _judges(library: str) -> tuple[str, ...]:
    """FlashInfer is not asked about its own calls: here they stand under other names."""
    return tuple(name for name in BACKENDS if name != library)


class _Findings:
    """Gathers what the files hold."""

    def __init__(self) -> None:
        self.files = 0
        self.skipped: list[Skipped] = []
        self.calls: list[CallSite] = []
        self.raises: dict[str, list[Raise]] = {}
        self.pages: dict[str, str] = {}  # ids of errors that have a page, and its code

    def unreadable(self, name: str, why: str) -> None:
        self.skipped.append(Skipped(name, why))

    def add(self, file: File, answer: Answer | str) -> None:
        if isinstance(answer, str):
            self.unreadable(file.name, answer)
            return
        self.files += 1
        sites, found = answer
        self.calls += found
        for site in sites:
            record = _page(file.project, site)
            if record is not None and record.project == file.project:
                site = replace(site, id=record.id, message=record.message)
            self.raises.setdefault(site.id, []).append(site)
            self.pages[site.id] = record.code if record else ""

    def errors(self) -> tuple[RaisedError, ...]:
        likes = related(_subject(sites) for sites in self.raises.values())
        return tuple(
            RaisedError(
                id=key,
                exception=sites[0].exception,
                message=sites[0].message,
                known=self.pages[key],
                related=likes[key],
                sites=tuple(sites),
            )
            for key, sites in self.raises.items()
        )


def _page(project: str, site: Raise) -> Record | None:
    """The record of an error that kvattn explains: one of its own by class, others by message."""
    if project == catalogue.PROJECT and site.exception in _by_class():
        return _by_class()[site.exception]
    return _by_message().get(site.message) if site.message else None


@lru_cache(maxsize=1)
def _by_class() -> dict[str, Record]:
    return {record.exception: record for record in catalogue.records()}


@lru_cache(maxsize=1)
def _by_message() -> dict[str, Record]:
    return {" ".join(record.message.split()): record for record in catalogue.everything()}


def _subject(sites: list[Raise]) -> Subject:
    """What makes an error like others: arguments in guard and message, functions, words."""
    arguments = set()
    for each in sites:
        words = set(re.findall(r"\w+", f"{each.site.guard} {each.message}"))
        arguments |= words & set(each.parameters)
    functions = {f"{each.site.file}:{each.site.function}" for each in sites}
    return Subject(sites[0].id, arguments, functions, sites[0].message)

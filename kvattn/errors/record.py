"""What a page about an error holds: one shape for kvattn's own errors and for those of others."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Site:
    """One place that raises the error.

    Attributes:
        file: path within the package, such as ``kvattn/checks.py``.
        line: line of the ``raise``, counted from 1; 0 where only the function is known.
        function: qualified name of the enclosing function.
        guard: the condition under which it is raised, as source text; "" if none is known.
        first: line number of the first line of ``source``.
        source: a dozen lines around the raise; "" for the sites of other projects.
    """

    file: str
    line: int
    function: str
    guard: str = ""
    first: int = 0
    source: str = ""


@dataclass(frozen=True)
class Example:
    """Two complete programs: ``before`` meets the error, ``after`` does the same job without it."""

    before: str
    after: str


@dataclass(frozen=True)
class Record:
    """One error, as its page and its JSON show it.

    Attributes:
        id: 16 hex digits, from project, exception type and message template; see `identity`.
        code: ``KV101`` and the like for kvattn, ``FA4-01`` and the like for other projects.
        project: ``kvattn``, ``flash-attn-4``, ``sglang``, ...
        version: release or commit that the sites were read in.
        exception: name of the exception type; ``silent`` for a wrong answer without an error.
        title: the error in a few words.
        message: template of the message; what varies stands in {braces}.
        meaning: what it says, in plain words.
        sites: where it is raised.
        solutions: numbered ways out, where the reader stands.
        example: programs before and after, or None.
        guard: code to put before the call, "" if there is none.
        trigger: the one condition that brings it about.
        situations: common ways to get there.
        arguments: names of the arguments concerned.
        functions: public functions that can raise it.
        related: ids of errors like this one.
    """

    id: str
    code: str
    project: str
    version: str
    exception: str
    title: str
    message: str
    meaning: str
    sites: tuple[Site, ...] = ()
    solutions: tuple[str, ...] = ()
    example: Example | None = None
    guard: str = ""
    trigger: str = ""
    situations: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    related: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return asdict(self)


def identity(project: str, exception: str, message: str) -> str:
    """16 hex digits that stay the same as long as project, exception and template do."""
    text = "\n".join((project, exception, message))
    return hashlib.sha256(text.encode()).hexdigest()[:16]

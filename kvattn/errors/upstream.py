"""Refusals and silent traps of other attention libraries, in the form of kvattn's own errors.

One TOML file each below ``peers/<project>/``. Messages are quoted, as people search for them;
everything else is our own reading of the named release or commit.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from kvattn.errors.record import Example, Record, Site, identity
from kvattn.errors.related import Subject, related

PEERS = Path(__file__).with_name("peers")
SILENT = "silent"


@lru_cache(maxsize=1)
def records() -> tuple[Record, ...]:
    """All records, ordered by project and code.

    A record's ``exception`` is the type that is raised, or ``silent`` for a wrong answer without
    an error; then ``message`` is the symptom in one sentence. ``example.after`` is a program
    that does the same job with kvattn on any device, ``example.before`` one that meets the
    refusal, or "". The guard of a site is Python over the arguments of its function.

    Example:
        >>> next(r for r in records() if r.code == "SGL-01").message
        'FA4 does not support updating KV cache in-place.'
    """
    # Looked up by name: tomllib came with Python 3.11, and its twin is an optional package.
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    found = [
        _record(toml.loads(path.read_text(encoding="utf-8"))) for path in PEERS.glob("*/*.toml")
    ]
    found.sort(key=lambda record: (record.project, record.code))
    likes = related(
        Subject(each.id, each.arguments, each.functions, f"{each.title} {each.message}")
        for each in found
    )
    return tuple(replace(each, related=likes[each.id]) for each in found)


def _record(fields: dict[str, Any]) -> Record:
    """KeyError if a field is missing, TypeError if one is unknown."""
    site = Site(
        file=fields.pop("file"),
        line=fields.pop("line", 0),
        function=fields.pop("function"),
        guard=fields.pop("condition"),
    )
    return Record(
        id=identity(fields["project"], fields["exception"], fields["message"]),
        sites=(site,),
        example=Example(before=fields.pop("before", ""), after=fields.pop("kvattn")),
        solutions=tuple(fields.pop("solutions")),
        situations=tuple(fields.pop("situations")),
        arguments=tuple(fields.pop("arguments")),
        functions=tuple(fields.pop("functions")),
        **{name: text.strip() for name, text in fields.items()},
    )

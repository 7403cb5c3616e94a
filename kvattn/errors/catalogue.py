"""Every error of kvattn as a record: its class, its page, and the places that make it.

The places are found in the very source that is installed, so no line is ever out of date. Needs
nothing but the standard library (and tomli before Python 3.11).

Example:
    >>> catalogue.record("KV121").title
    'The new tokens do not fit'
"""

from __future__ import annotations

import ast
import difflib
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvattn.errors import references, upstream
from kvattn.errors.base import KvattnError
from kvattn.errors.catalogue_kinds import UnknownRecordError
from kvattn.errors.cli_kinds import CommandPackageError
from kvattn.errors.record import Example, Record, identity
from kvattn.errors.references import Reference
from kvattn.errors.related import Subject, related

Kind = type[KvattnError]

PROJECT = "kvattn"
PAGES = Path(__file__).with_name("pages")
PUBLIC = ("kvattn/api.py", "kvattn/steps.py", "kvattn/cache.py")  # their arguments have names


@lru_cache(maxsize=1)
def records() -> tuple[Record, ...]:
    """All errors of kvattn, ordered by code."""
    found = [_record(kind, pages().get(kind.code, {})) for kind in kinds()]
    likes = related(_subject(record) for record in found)
    return tuple(_with(record, related=likes[record.id]) for record in found)


@lru_cache(maxsize=1)
def everything() -> tuple[Record, ...]:
    """kvattn's own errors, then those of other projects."""
    return (*records(), *upstream.records())


def record(key: str) -> Record:
    """The error with this id or code, in capitals or not; kvattn's own or another project's.

    Raises:
        kvattn.errors.UnknownRecordError: there is none.
    """
    wanted, known = key.strip().lower(), _known()
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.75)
        allowed = " or ".join(sorted({known[name].code for name in near})) or "a code like KV101"
        raise UnknownRecordError("error", repr(key), allowed)
    return known[wanted]


@lru_cache(maxsize=1)
def _known() -> dict[str, Record]:
    return {name.lower(): each for each in everything() for name in (each.id, each.code)}


@lru_cache(maxsize=1)
def kinds() -> tuple[Kind, ...]:
    """The concrete error classes of the package, ordered by code: those with one of their own."""
    for path in Path(__file__).parent.glob("*_kinds.py"):
        importlib.import_module(f"kvattn.errors.{path.stem}")
    own = [
        k for k in _below(KvattnError) if "code" in vars(k) and k.__module__.startswith("kvattn.")
    ]
    return tuple(sorted(own, key=lambda kind: kind.code))


def _below(kind: Kind) -> Iterator[Kind]:
    seen = set()
    waiting = list(kind.__subclasses__())
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            yield each
            waiting += each.__subclasses__()


@lru_cache(maxsize=1)
def pages() -> Mapping[str, Mapping[str, Any]]:
    """What the pages say, by code: the fields of ``pages/KV101.toml`` and so on."""
    toml = _toml()
    return {p.stem: toml.loads(p.read_text(encoding="utf-8")) for p in sorted(PAGES.glob("*.toml"))}


def _toml() -> Any:
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise CommandPackageError("errors", f"no package {name!r}", "tomli") from error


class Survey(NamedTuple):
    """What the package's source says.

    Attributes:
        uses: every place that makes an error, by its class.
        arguments: the names of all arguments of the public functions.
        version: the release.
    """

    uses: Mapping[Kind, tuple[Reference, ...]]
    arguments: frozenset[str]
    version: str


@lru_cache(maxsize=1)
def survey() -> Survey:
    """Reads the installed package once."""
    found: dict[Kind, list[Reference]] = {kind: [] for kind in kinds()}
    names = {kind.__name__ for kind in found}
    arguments: set[str] = set()
    version = ""
    for source in references.package_sources():
        for use in references.references(source, names):
            kind = _resolved(use.name)
            if kind in found:
                found[kind].append(use)
        if source.name in PUBLIC:
            arguments |= {node.arg for node in ast.walk(source.tree) if isinstance(node, ast.arg)}
        if source.name == "kvattn/__init__.py":
            version = ast.literal_eval(source.constants["__version__"])
    uses = {kind: tuple(places) for kind, places in found.items()}
    return Survey(uses, frozenset(arguments), version)


def _resolved(dotted: str) -> Any:
    """The class that a dotted name means, such as ``kvattn.errors.kinds.HeadDimError``."""
    module, _, name = dotted.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def faults() -> list[str]:
    """What is wrong with the catalogue: classes, pages and places that do not belong together."""
    return list(_faults(kinds(), pages(), survey().uses))


def _faults(
    classes: Iterable[Kind],
    texts: Mapping[str, Mapping[str, Any]],
    places: Mapping[Kind, tuple[Reference, ...]],
) -> Iterator[str]:
    codes: dict[str, str] = {}
    for kind in classes:
        name = kind.__name__
        if kind.code in codes:
            yield f"{kind.code} is the code of {codes[kind.code]} and of {name}"
        codes[kind.code] = name
        if not places.get(kind):
            yield f"{kind.code} {name} is raised nowhere"
        if kind.code not in texts:
            yield f"{kind.code} {name} has no page"
        elif missing := [field for field in FIELDS if field not in texts[kind.code]]:
            yield f"the page {kind.code} lacks {', '.join(missing)}"
    for code in texts:
        if code not in codes:
            yield f"the page {code} belongs to no class"


FIELDS = (
    *("title", "meaning", "trigger", "situations", "solutions", "guard", "functions"),
    *("before", "after"),
)


def _record(kind: Kind, page: Mapping[str, Any]) -> Record:
    message = kind.template()
    example = None
    if "before" in page and "after" in page:
        example = Example(page["before"], page["after"])
    found = Record(
        id=identity(PROJECT, kind.__name__, message),
        code=kind.code,
        project=PROJECT,
        version=survey().version,
        exception=kind.__name__,
        title=page.get("title", kind.problem).strip(),
        message=message,
        meaning=page.get("meaning", kind.__doc__ or "").strip(),
        sites=tuple(dict.fromkeys(use.site for use in survey().uses[kind])),
        solutions=tuple(page.get("solutions", ())),
        example=example,
        guard=page.get("guard", "").strip(),
        trigger=page.get("trigger", "").strip(),
        situations=tuple(page.get("situations", ())),
        functions=tuple(page.get("functions", ())),
    )
    return _with(found, arguments=_arguments(kind, found))


def _with(record: Record, **changes: Any) -> Record:
    return Record(**{**vars(record), **changes})


def _arguments(kind: Kind, record: Record) -> tuple[str, ...]:
    """The arguments that the source names; else those that the page speaks of."""
    named = dict.fromkeys(name for use in survey().uses[kind] for name in use.arguments)
    page = (record.trigger, record.meaning, *record.situations, *record.solutions, record.guard)
    for text in (kind.__doc__ or "", *page):
        if not named:
            words = re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text)
            named = dict.fromkeys(word for word in words if word in survey().arguments)
    return tuple(named)


def _subject(record: Record) -> Subject:
    places = [
        place for site in record.sites for place in (site.file, f"{site.file}:{site.function}")
    ]
    text = " ".join((record.title, record.message, record.trigger, record.meaning))
    return Subject(record.id, record.arguments, (*places, *record.functions), text)

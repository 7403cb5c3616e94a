"""All records in one place: by id, by code, by what a reader typed, by project and argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from kvattn.errors import catalogue
from kvattn.errors.find import find
from kvattn.errors.record import Record
from kvattn.site import search

FACETS = ("project", "exception", "argument")


def collect() -> Collection:
    """kvattn's own errors, then those of other projects."""
    return Collection(catalogue.everything())


@dataclass(frozen=True)
class Query:
    """What a reader is looking for; "" leaves a field open.

    Attributes:
        q: words, a message, or a whole traceback.
        project: such as ``sglang``.
        exception: such as ``NotImplementedError``.
        argument: such as ``cache_seqlens``.
    """

    q: str = ""
    project: str = ""
    exception: str = ""
    argument: str = ""

    def admits(self, record: Record) -> bool:
        """Whether the record passes the filters, whatever its text."""
        return (
            self.project in ("", record.project)
            and self.exception in ("", record.exception)
            and (not self.argument or self.argument in record.arguments)
        )


class Collection:
    """Records in the order in which a list shows them.

    Args:
        records: with ids and codes that are unique.

    Raises:
        ValueError: two records share an id or a code.

    Attributes:
        records: the same.
        facets: for each filter its values and how many records have them, in alphabetical order.
    """

    def __init__(self, records: tuple[Record, ...]) -> None:
        self.records = records
        self.facets = _facets(records)
        self._entries = [search.Entry.of(record) for record in records]
        self._quoted = lru_cache(256)(self._find)
        self._by_key: dict[str, Record] = {}
        for entry in self._entries:
            for key in entry.keys:
                if self._by_key.setdefault(key, entry.record) is not entry.record:
                    raise ValueError(f"ids and codes must be unique, but {key} is not")

    def get(self, key: str) -> Record | None:
        """The record with this id or code, in capitals or not."""
        return self._by_key.get(key.lower())

    def related(self, record: Record) -> list[Record]:
        """The records that this one names as related."""
        return [other for key in record.related if (other := self.get(key))]

    def search(self, query: Query) -> list[Record]:
        """The records with all words of the query, else those whose message it quotes."""
        entries = (entry for entry in self._entries if query.admits(entry.record))
        found = search.ranked(query.q, entries)
        return found or [each for each in self._quoted(query.q) if query.admits(each)]

    def _find(self, text: str) -> list[Record]:
        matches = find(text, limit=len(self.records))
        return [match.record for match in matches if match.record.id in self._by_key]


def _facets(records: Iterable[Record]) -> dict[str, list[tuple[str, int]]]:
    counts: dict[str, Counter[str]] = {name: Counter() for name in FACETS}
    for record in records:
        counts["project"][record.project] += 1
        counts["exception"][record.exception] += 1
        counts["argument"].update(set(record.arguments))
    return {name: sorted(count.items()) for name, count in counts.items()}

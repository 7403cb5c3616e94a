"""Which records have the words that a reader types; `assets/site.js` does the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvattn.errors.record import Record

TITLE, MESSAGE, NAME, REST = 8, 6, 5, 1  # what a word counts for where it is found
KEY = 100  # a word that is the whole id or code


@dataclass(frozen=True)
class Entry:
    """A record, its fields from the weightiest on, and its id and code."""

    record: Record
    fields: tuple[tuple[int, str], ...]
    keys: tuple[str, str]

    @staticmethod
    def of(record: Record) -> Entry:
        fields = (
            (TITLE, plain(record.title)),
            (MESSAGE, plain(record.message)),
            (NAME, plain(names(record))),
            (REST, plain(details(record))),
        )
        return Entry(record, fields, (record.code.lower(), record.id))

    def points(self, words: Sequence[str]) -> int:
        """The sum of what the words count for; 0 if one of them is nowhere."""
        score = 1
        for word in words:
            weight = next((weight for weight, text in self.fields if word in text), 0)
            if not weight:
                return 0
            score += KEY if word in self.keys else weight
        return score


def ranked(text: str, entries: Iterable[Entry]) -> list[Record]:
    """The records that have every word of `text`, the best first; all of them for no words."""
    words = plain(text).split()
    found = [(points, entry.record) for entry in entries if (points := entry.points(words))]
    return [record for _, record in sorted(found, key=lambda pair: -pair[0])]


def plain(text: str) -> str:
    """Lower case, with single spaces."""
    return " ".join(text.lower().split())


def names(record: Record) -> str:
    """The code, the id and other names, in this order."""
    return " ".join((record.code, record.id, record.project, record.exception, *record.arguments))


def details(record: Record) -> str:
    """What is searched although a list does not show it."""
    return " ".join((record.meaning, record.trigger, *record.situations, *record.functions))

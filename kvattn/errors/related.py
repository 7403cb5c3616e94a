"""Which errors are like each other: the same argument, the same function, similar text."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

MOST = 4  # related errors that a page names
_LEAST = 0.05  # cosine below which two errors have nothing to say to each other
_COMMON = 64  # what more errors than this share does not relate them
_WEIGHTS = {"argument": 3.0, "function": 1.5, "word": 1.0}
_WORD = re.compile(r"[A-Za-z][a-z]{2,}|[A-Za-z]\w*_\w+")


class Subject(NamedTuple):
    """What makes an error like another one.

    Attributes:
        id: of the error.
        arguments: names of arguments it is about.
        functions: qualified functions that raise it.
        text: its message, and whatever else is said about it.
    """

    id: str
    arguments: Iterable[str]
    functions: Iterable[str]
    text: str

    def features(self) -> set[tuple[str, str]]:
        words = {word.lower() for word in _WORD.findall(self.text)}
        return (
            {("argument", name) for name in self.arguments}
            | {("function", name) for name in self.functions}
            | {("word", word[:6] if "_" not in word else word) for word in words}
        )


def related(subjects: Iterable[Subject], most: int = MOST) -> dict[str, tuple[str, ...]]:
    """For every id the ids of the errors most like it, the closest first.

    Features that few errors share weigh most, arguments more than functions, those more than
    words; what very many share is left out, so that thousands of errors take seconds.
    """
    features = {subject.id: subject.features() for subject in subjects}
    owners: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, own in features.items():
        for feature in own:
            owners[feature].append(key)
    weights = {
        feature: _WEIGHTS[feature[0]] * math.log(1 + len(features) / len(ids))
        for feature, ids in owners.items()
    }
    norms = {
        key: math.sqrt(sum(weights[feature] ** 2 for feature in own)) or 1.0
        for key, own in features.items()
    }
    found = {}
    for key, own in features.items():
        scores: Counter[str] = Counter()
        for feature in own:
            if 1 < len(owners[feature]) <= _COMMON:
                for other in owners[feature]:
                    scores[other] += weights[feature] ** 2  # type: ignore[assignment]
        scores.pop(key, None)
        close = [(-score / (norms[key] * norms[other]), other) for other, score in scores.items()]
        best = sorted(pair for pair in close if -pair[0] >= _LEAST)[:most]
        found[key] = tuple(other for _, other in best)
    return found

"""Which known error a pasted message, log or traceback is.

The strongest kind of evidence that the text holds decides: a code or the literal parts of a
message template; else words in common with a message, rare ones counting most; else the file,
function and exception of a traceback's frame. Words are weighed rather than messages compared
letter by letter, since many of them differ in a single word ("k_new must have the same dtype as
query", "v_new ..."), and an edit distance takes those for equal; difflib mends misspelt words.
"""

from __future__ import annotations

import difflib
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from kvattn.errors import catalogue
from kvattn.errors.record import Record
from kvattn.errors.upstream import SILENT


@dataclass(frozen=True)
class Match:
    """An error that the text may be.

    Attributes:
        record: the error.
        score: 1.0 for a code, 0.6 to 1.0 for the words of its template, less for a likeness.
        excerpt: the part of the text that says so, in one line.
    """

    record: Record
    score: float
    excerpt: str


def find(text: str, limit: int = 5) -> list[Match]:
    """The known errors that `text` mentions, the most likely first; none if there are none.

    Paths, numbers, line breaks and wrapping, colours, log prefixes and quotes do not matter.

    Example:
        >>> [match.record.code for match in find("FA2 does not support s_aux")]
        ['VLLM-01']
    """
    page = _Page(text)
    for kind in (_by_template, _by_words, _by_names):
        if matches := sorted(kind(page), key=lambda match: -match.score):
            return matches[: max(limit, 0)]
    return []


# What stands around a message, not in it.
_ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]|\x1b\][^\x07\n]{0,200}\x07")
_ESCAPED_BREAK = re.compile(r"\\n(?![a-z])")
_BREAKS = re.compile(r"[\r\n][\s]*")
_PREFIX = re.compile(
    r"""^[ \t]*(?:(?:
        [\w.-]{1,40}[ \t]*\|(?=[ \t])                                 # docker compose
      | \(\w{1,40}[ ]pid=\d{1,9}[^)\n]{0,60}\) | \[rank\d{1,4}\]:?    # workers and ranks
      | \[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]{0,10}(?:Z|[+-]\d\d:?\d\d)?\]?
      | \d\d-\d\d[ ]\d\d:\d\d:\d\d | [EWI]\d{4}[ ]\d\d:\d\d:\d\d[.\d]{0,8}
      | (?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\b:?
      | \[[\w.-]{1,60}:\d{1,6}\]:? | E(?=[ ]{2}) | >(?=[ ])           # pytest
    )[ \t]*){1,8}""",
    re.MULTILINE | re.VERBOSE,
)
# Quotes come in many shapes, and frames drawn around tracebacks cut messages into lines.
_DROPPED = str.maketrans("", "", "\"'`\\\u2018\u2019\u201c\u201d│┃|╭╮╰╯─━❱\u200b")


def _plain(text: str) -> str:
    return text.translate(_DROPPED).lower()


def _squeezed(text: str) -> str:
    """Without blanks, quotes and capitals: what is left of a message however it was wrapped."""
    return "".join(_plain(text).split())


class _Page:
    """The text to search, squeezed, and the way back to its lines."""

    def __init__(self, text: str) -> None:
        self.original = text.replace("\\", "/")
        clean = _BREAKS.sub("\n", _ESCAPED_BREAK.sub("\n", _ANSI.sub("", text)))
        self.lines = clean.split("\n")
        self.bare = _PREFIX.sub("", clean)
        parts = ["".join(part.split()) for part in _plain(self.bare).split("\n")]
        self.squeezed = "".join(parts)
        self._ends = list(accumulate(map(len, parts)))
        self._seen: dict[str, bool] = {}

    def excerpt(self, start: int, end: int) -> str:
        """The lines that hold a part of the squeezed text."""
        first, last = (bisect_right(self._ends, at) for at in (start, end - 1))
        return _short(" ".join(line.strip() for line in self.lines[first : last + 1]))

    def __contains__(self, name: str) -> bool:
        """Whether a name stands in the text as it came."""
        if name not in self._seen:
            self._seen[name] = name in self.original
        return self._seen[name]


def _short(text: str, most: int = 240) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


# Messages of Python itself: nothing without the name of the function that they are about.
_EVERYWHERE = re.compile("too many values to unpack|unexpected keyword argument|cannot import name")
_WEAK = 24  # squeezed characters; a template with fewer needs something beside it, or a name
_NAME = re.compile(r"[a-z]_[a-z]|[A-Z]{2}")
_REACH = 2000  # squeezed characters that one {brace} may stand for
_TRIES = 50  # occurrences of a part that are looked at, the last ones first

# Names in paths and modules that show which project's code is running.
_HINTS = {
    "flash-attn-2": ("flash_attn/flash_attn_interface", "flash_attn_2_cuda", "flash_attn_gpu"),
    "flash-attn-3": ("hopper/", "flash_attn_3", "/flash_attn_interface.py"),
    "flash-attn-4": ("flash_attn/cute",),
    "sglang-fa3": ("flash_attention_v3", "sgl_kernel"),
    "sglang-fa4": ("sglang", "sgl_kernel"),
    "sglang-fa4-sm120": ("flash_attention_v4_sm120", "fa4_sm120"),
    "flashinfer": ("flashinfer",),
    "transformers": ("transformers",),
    "vllm": ("vllm",),
    "kvattn": ("kvattn",),
}


class _Entry:
    """A record, prepared for the search."""

    def __init__(self, record: Record) -> None:
        self.record = record
        literals = map(_squeezed, re.split(r"\{[^{}]*\}", record.message))
        self.parts = [part for part in literals if part]
        self.size = sum(map(len, self.parts))
        self.weak = self.size < _WEAK and not _NAME.search(record.message)
        self.places = {"/".join(site.file.split("/")[-2:]) for site in record.sites}
        self.functions = {site.function.rsplit(".")[-1] for site in record.sites}
        self.message = _words(record.message)
        topics = (record.title, record.trigger, *record.arguments, *record.functions)
        self.topic = self.message.union(*map(_words, topics))

    def span(self, text: str) -> tuple[int, int] | None:
        """Where the template stands in a squeezed text; where it is raised, if anywhere."""
        found = None
        for span in self._spans(text):
            if self.raised(text, span[0]):
                return span
            found = found or span
        return found

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Every place, from the end, where the parts follow each other."""
        longest = max(self.parts, key=len)
        index = self.parts.index(longest)
        at = len(text) if longest in text else -1
        for _ in range(_TRIES):
            at = text.rfind(longest, 0, max(0, at + len(longest) - 1))
            if at < 0:
                return
            start = _leftmost(text, self.parts[:index], at)
            end = _rightmost(text, self.parts[index + 1 :], at + len(longest))
            if start is not None and end is not None:
                yield start, end

    def raised(self, text: str, start: int) -> bool | None:
        """Whether an exception's name and a colon stand before the place: its own, or another."""
        found = _RAISED.search(text, max(0, start - 60), start)
        return None if found is None else found[1].endswith(self.record.exception.lower())

    def signs(self, page: _Page) -> float:
        """Up to 0.1 for names in the text that go with this record."""
        project = any(hint in page for hint in _HINTS.get(self.record.project, ()))
        place = any(name in page for name in self.places)
        function = any(name in page for name in (*self.functions, *self.record.functions))
        return 0.03 * project + 0.05 * place + 0.02 * function

    def convinces(self, page: _Page) -> bool:
        """Whether a message of few or common words is about attention here."""
        if _EVERYWHERE.search(self.record.message):
            return any(name in page for name in self.record.functions)
        if not self.weak or self.signs(page) > 0:
            return True
        alone = len(page.squeezed) <= 2 * self.size + 40
        return alone and (self.record.exception in page or "Error" not in page)


_RAISED = re.compile(r"(\w*(?:error|exception)):?$")


def _leftmost(text: str, parts: list[str], start: int) -> int | None:
    """Where the first of these parts begins, if they all stand before `start`, each in reach."""
    for part in reversed(parts):
        start = text.rfind(part, max(0, start - _REACH), start)
        if start < 0:
            return None
    return start


def _rightmost(text: str, parts: list[str], end: int) -> int | None:
    """Where the last of these parts ends, if they all stand behind `end`, each in reach."""
    for part in parts:
        place = text.find(part, end, end + _REACH)
        if place < 0:
            return None
        end = place + len(part)
    return end


@lru_cache(maxsize=1)
def _entries() -> tuple[_Entry, ...]:
    return tuple(_Entry(record) for record in catalogue.everything())


def _by_template(page: _Page) -> Iterator[Match]:
    """Codes, ids, and templates whose literal parts stand in the text in order."""
    spans: dict[_Entry, tuple[int, int]] = {}
    for entry in _entries():
        span = _code_span(entry.record, page)
        if span is not None:
            yield Match(entry.record, 1.0, page.excerpt(*span))
            continue
        span = entry.span(page.squeezed) if entry.record.exception != SILENT else None
        if span is not None and entry.convinces(page):
            spans[entry] = span
    for entry, span in spans.items():
        if not any(_inside(span, other) for other in spans.values()):
            raised = entry.raised(page.squeezed, span[0])
            score = {True: 0.9, None: 0.8, False: 0.6}[raised] + entry.signs(page)
            yield Match(entry.record, round(score, 3), page.excerpt(*span))


def _code_span(record: Record, page: _Page) -> tuple[int, int] | None:
    """Where ``[KV101]`` stands, or the whole text if it is nothing but a code or an id."""
    code = f"[{record.code}]".lower()
    at = page.squeezed.rfind(code)
    if at >= 0:
        return at, at + len(code)
    return (0, 1) if page.squeezed in (record.code.lower(), record.id) else None


def _inside(span: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether one template is only a part of what another one matches."""
    return other[0] <= span[0] and span[1] <= other[1] and span != other


_WORD = re.compile(r"[a-z_][a-z_]+(?:\d+\b)?")
_ENDING = re.compile(r"(?<=[a-z]{3})(?:(.)\1)?(?:ings?|ed|es|s)$")
_LIKE = 0.58  # share of the weight of two sets of words that must be common
_ABOUT = 0.6  # share of a question's weight that an error must be about
_TELLING = math.log(17)  # weight of a word that one error in sixteen mentions
_FEWEST = 2  # telling words that a question must share with an error
_LINES = 64  # lines of a long log that are compared
_MOST_UNKNOWN = 12  # misspelt words that are looked up


def _words(text: str) -> frozenset[str]:
    """Words and names without numbers; "drops" and "dropped" are one word."""
    return frozenset(
        word if "_" in word else _ENDING.sub(r"\1", word) for word in _WORD.findall(text.lower())
    )


class _Vocabulary:
    """How much a word says: the fewer errors mention it, the more."""

    def __init__(self, documents: Iterable[frozenset[str]]) -> None:
        documents = list(documents)
        counts = Counter(word for document in documents for word in document)
        self.weights = {word: math.log(1 + len(documents) / n) for word, n in counts.items()}
        self.unknown = math.log(1 + len(documents))

    def weight(self, words: Iterable[str]) -> float:
        return sum(self.weights.get(word, self.unknown) for word in words)

    def mended(self, words: frozenset[str]) -> frozenset[str]:
        """The same words, misspelt ones replaced by the known word that they must be."""
        unknown = [word for word in words if word not in self.weights and len(word) > 4]
        mends = {}
        for word in sorted(unknown)[:_MOST_UNKNOWN]:
            near = difflib.get_close_matches(word, self.weights, n=1, cutoff=0.85)
            mends[word] = near[0] if near else word
        return frozenset(mends.get(word, word) for word in words)


@lru_cache(maxsize=1)
def _vocabulary() -> _Vocabulary:
    return _Vocabulary(entry.topic for entry in _entries())


def _by_words(page: _Page) -> Iterator[Match]:
    """Messages that differ in a few words, and questions that name a symptom."""
    known = _vocabulary()
    lines = [(line, known.mended(_words(line))) for line in _candidates(page)]
    question = page.bare if len(page.squeezed) <= 300 else ""
    asked = known.mended(_words(question))
    for entry in filter(lambda entry: entry.convinces(page), _entries()):
        best, line = max((_dice(known, words, entry.message), line) for line, words in lines)
        if best >= _LIKE:
            yield Match(entry.record, round(0.1 + 0.4 * best + entry.signs(page), 3), _short(line))
            continue
        shared = asked & entry.topic
        about = known.weight(shared) / (known.weight(asked) or 1)
        if about >= _ABOUT and sum(known.weight([w]) > _TELLING for w in shared) >= _FEWEST:
            yield Match(entry.record, round(0.1 + 0.3 * about, 3), _short(question))


def _dice(known: _Vocabulary, a: frozenset[str], b: frozenset[str]) -> float:
    """The share of the words of both that both have; one word alone proves nothing."""
    shared = a & b
    total = known.weight(a) + known.weight(b)
    return 2 * known.weight(shared) / total if len(shared) > 1 else 0.0


def _candidates(page: _Page) -> list[str]:
    """What may be messages: every line of a short text and all of it, of a log what fails."""
    lines = [line.strip()[:600] for line in page.bare.split("\n")]
    if len(lines) > _LINES:
        failing = [i for i, line in enumerate(lines) if "Error" in line or "Exception" in line]
        lines = [" ".join(lines[i : i + 3]) for i in failing[-_LINES:]]
    lines = [re.sub(r"^[\w.]*(?:Error|Exception): ?", "", line) for line in lines if line]
    return [*lines, " ".join(lines)[:600]]


def _by_names(page: _Page) -> Iterator[Match]:
    """A frame in the file and function of an error, and its exception."""
    for entry in _entries():
        record = entry.record
        place = next((name for name in entry.places if name in page), None)
        if record.exception == SILENT or place is None or record.exception not in page:
            continue
        if any(f"in {name}" in page for name in entry.functions):
            yield Match(record, round(0.1 + entry.signs(page), 3), place)

"""Integers as callers give them: sizes, counts and ids, of Python's or another library's kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

import torch

from kvattn.errors.cache_kinds import CacheSizeError, TokenCountError

TokenCounts = Mapping[int, int] | Iterable[tuple[int, int]]


def flag(value: Any) -> bool:
    """Whether it is a bool of any kind; NumPy's, in earlier releases, is an index too."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def whole(value: Any) -> int | None:
    """An integer of any kind as Python's; None for everything else, bools and floats too."""
    if type(value) is int:
        return value
    if flag(value):
        return None
    try:
        return index(value)
    except (TypeError, RuntimeError):  # torch's where a tensor holds no data
        return None


def positive(name: str, value: int) -> int:
    """``value``, if it can be the size of a cache."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CacheSizeError(name, repr(value), "an integer of at least 1")
    return value


def non_negative(name: str, value: Any) -> int:
    """``value``, if it can be a number of tokens or sequences."""
    number = whole(value)
    if number is None or number < 0:
        raise TokenCountError(name, repr(value), "an integer of at least 0")
    return number


def token_counts(new: TokenCounts) -> list[tuple[Any, int]]:
    """Numbers of tokens, in pairs with what stands for their sequences."""
    pairs: Iterable[Any] = new.items() if isinstance(new, Mapping) else new
    try:
        counts = [(seq, whole(tokens)) for seq, tokens in pairs]
    except (TypeError, ValueError):
        raise TokenCountError("new", new, "{seq: count} or (seq, count) pairs") from None
    found = [(seq, tokens) for seq, tokens in counts if tokens is not None and tokens >= 0]
    if len(found) != len(counts):
        raise TokenCountError("new", new, "counts of at least 0")
    return found


def listed(values: Any) -> list[Any]:
    """The members of an iterable or a tensor; what is neither is its own only member."""
    if isinstance(values, torch.Tensor):
        values = values.tolist() if values.device.type != "meta" else [values]
    return list(values) if isinstance(values, Iterable) else [values]

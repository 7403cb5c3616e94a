"""Arguments that have several names, one for each library that callers come from."""

from __future__ import annotations

from typing import Any, TypeVar

from kvattn import errors as E

T = TypeVar("T")


def one(**names: T | None) -> T | None:
    """The value of an argument that has several names; giving two of them is an error."""
    given = [name for name, value in names.items() if value is not None]
    if len(given) > 1:
        raise E.AliasConflictError(given[1], f"{given[0]} and {given[1]}", "one of them")
    return names[given[0]] if given else None


def one_set(**flags: Any) -> bool:
    """Whether one of some flags with the same meaning is set."""
    for name, flag in flags.items():
        if flag is not True and flag is not False:
            raise E.FlagError(name, repr(flag), "True or False")
    return any(flags.values())

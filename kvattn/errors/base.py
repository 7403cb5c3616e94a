"""The common shape of every error that kvattn raises: a stable code and four answers."""

from __future__ import annotations

import re
from typing import Any, ClassVar


class KvattnError(Exception):
    """A mistake in a call: which argument, what came, what is allowed, and what to write instead.

    Attributes:
        code: stable identifier, ``KV`` and three digits; never reused for another mistake.
        problem: one sentence that states the rule that was broken.
        argument: the name of the argument as the caller wrote it.
        got: what came, in words or numbers.
        allowed: what would have been accepted.
        fix: one sentence that says how to mend the call.
    """

    code: ClassVar[str] = "KV000"
    problem: ClassVar[str] = "the call is not valid"
    fix: str = "see the documentation of the function"

    def __init__(self, argument: str, got: object, allowed: object, fix: str | None = None) -> None:
        self.argument = argument
        self.got = got
        self.allowed = allowed
        if fix is not None:
            self.fix = fix
        super().__init__(self._message(argument, got, allowed, self.fix))

    @classmethod
    def _message(cls, argument: object, got: object, allowed: object, fix: object) -> str:
        return (
            f"[{cls.code}] {argument}: {cls.problem}. Got {got}; allowed: {allowed}. "
            f"Fix: {fix}. Explain: {cls.explain()}"
        )

    @classmethod
    def template(cls) -> str:
        """The message, with what varies in {braces}."""
        return cls._message("{argument}", "{got}", "{allowed}", "{fix}")

    @classmethod
    def explain(cls) -> str:
        """The command that prints the page about this error."""
        return f"kvattn errors show {cls.code}"

    def renamed(self, names: dict[str, str]) -> KvattnError:
        """The same error under the names that the caller of another function wrote."""

        def spoken(text: Any) -> Any:
            if not isinstance(text, str):
                return text
            return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)

        return type(self)(spoken(self.argument), spoken(self.got), spoken(self.allowed), self.fix)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.argument, self.got, self.allowed, self.fix)


class ArgumentTypeError(KvattnError, TypeError):
    """An argument of the wrong kind: not a tensor, a wrong dtype, a bool for a length."""


class ArgumentValueError(KvattnError, ValueError):
    """An argument of the right kind that cannot be used: shape, stride, range, combination."""


class ArgumentIndexError(KvattnError, IndexError, ValueError):
    """An index held in a tensor points outside the tensor it indexes."""


class RefusedError(KvattnError, NotImplementedError):
    """A backend that was asked for by name cannot take this call."""

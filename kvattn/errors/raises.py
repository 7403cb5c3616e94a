"""Where a source raises: guard, exception, message template. By reading alone.

Example:
    >>> source = syntax.parse("if x < 0: raise ValueError(f'bad {x}')", "f.py")
    >>> [(r.exception, r.message, r.site.guard) for r in raise_sites(source)]
    [('ValueError', 'bad {x}', 'x < 0')]
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvattn.errors.places import Place, negated, statements
from kvattn.errors.record import Site, identity
from kvattn.errors.syntax import Source, assignments, text_of
from kvattn.errors.templates import braces, template

_MESSAGE_WORDS = ("message", "msg", "detail", "reason")


@dataclass(frozen=True)
class Raise:
    """A place that raises an error.

    Attributes:
        id: as `record.identity` makes it: the same error raised twice has one id.
        exception: name of its type; of a function's, where a function makes it.
        message: template; "" if the source holds no text for it.
        parameters: argument names of the enclosing function.
        site: file, line, function, guard and source.
    """

    id: str
    exception: str
    message: str
    parameters: tuple[str, ...]
    site: Site

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return asdict(self)


def raise_sites(source: Source, project: str = "") -> Iterator[Raise]:
    """Every `raise` of a new error, and every `assert` that has a message, in source order.

    Bare `raise` and the re-raise of a caught error are not counted: they add nothing.
    """
    for statement, place in statements(source.tree):
        if isinstance(statement, ast.Assert) and statement.msg is not None:
            message = _template(statement.msg, statement, place, source) or braces(statement.msg)
            found, guard = ("AssertionError", message), negated(statement.test)
        elif isinstance(statement, ast.Raise) and statement.exc is not None:
            error = _raised(statement.exc, statement, place, source)
            if error is None:
                continue
            found, guard = error, str(place.guard or "")
        else:
            continue
        first, text = source.around(statement.lineno)
        site = Site(source.name, statement.lineno, place.function, guard, first, text)
        yield Raise(identity(project, *found), *found, place.parameters, site)


def _raised(
    error: ast.expr, statement: ast.stmt, place: Place, source: Source
) -> tuple[str, str] | None:
    """Exception type and message template of what is raised; None for what was caught before."""
    if isinstance(error, ast.Name):
        if error.id == place.caught:
            return None
        value = _assigned(error.id, statement.lineno, place, source)
        if isinstance(value, ast.Call):
            error = value
    if not isinstance(error, ast.Call):
        return _last_name(error), ""
    if isinstance(error.func, ast.Attribute) and error.func.attr == "with_traceback":
        return _raised(error.func.value, statement, place, source)
    return _last_name(error.func), _message(error, statement, place, source)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else text_of(node)


def _message(call: ast.Call, statement: ast.stmt, place: Place, source: Source) -> str:
    """The first argument that holds text; else the first argument, whatever it is."""
    words = [word.value for word in call.keywords if word.arg in _MESSAGE_WORDS]
    values = [arg for arg in (*call.args, *words) if not isinstance(arg, ast.Starred)]
    for value in values:
        text = _template(value, statement, place, source)
        if text:
            return text
    return braces(values[0]) if values else ""


def _template(value: ast.expr, statement: ast.stmt, place: Place, source: Source) -> str:
    """In one line; "" if there is no text."""
    text = template(value, lambda name: _assigned(name, statement.lineno, place, source))
    return " ".join((text or "").split())


def _assigned(name: str, line: int, place: Place, source: Source) -> ast.expr | None:
    """What the function, or else the module, last assigned to a name above a line."""
    found = None
    if place.owner is not source.tree and name not in place.parameters:
        for inner, _ in _own_statements(place.owner):
            if inner.lineno < line:
                for target, value in assignments([inner]):
                    found = value if target == name else found
    return found if found is not None else source.constants.get(name)


def _own_statements(function: ast.AST) -> Iterator[tuple[ast.stmt, Place]]:
    body = getattr(function, "body", [])
    yield from statements(ast.Module(body=body, type_ignores=[]))

"""Where a statement stands: its function, that function's arguments, and the guard before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvattn.errors.syntax import text_of

OUTSIDE = "<module>"

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_PLAIN = (ast.Assign, ast.AnnAssign, ast.AugAssign)  # change nothing about the way here
_SIMPLE = (ast.Expr, *_EXITS, ast.Assert, ast.Import, ast.ImportFrom, ast.Delete, ast.Pass)
_OPPOSITES: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
}


class Guard(NamedTuple):
    """A condition under which a place is reached.

    ``kind`` is "if" (the test holds), "else" (none of the tests holds), "except" or "match".
    """

    kind: str
    nodes: tuple[ast.AST, ...]

    def __str__(self) -> str:
        if self.kind == "if":
            return text_of(self.nodes[0])
        if self.kind == "else":
            return " and ".join(negated(test) for test in self.nodes)
        if self.kind == "except":
            caught = self.nodes[0].type  # type: ignore[attr-defined]
            return f"except {text_of(caught)}" if caught else "except"
        subject, case = self.nodes
        assert isinstance(case, ast.match_case)
        pattern = f"match {text_of(subject)}: case {text_of(case.pattern)}"
        return f"{pattern} if {text_of(case.guard)}" if case.guard else pattern


def negated(test: ast.AST) -> str:
    """The opposite of a condition, as source text."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return text_of(test.operand)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _OPPOSITES:
        opposite = _OPPOSITES[type(test.ops[0])]
        return text_of(ast.Compare(test.left, [opposite], test.comparators))
    if isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
        return f"not {text_of(test)}"
    return f"not ({text_of(test)})"


class Place(NamedTuple):
    """Where a statement stands.

    Attributes:
        function: qualified name of the enclosing function or class; "<module>" outside of any.
        parameters: names of the arguments of the enclosing function.
        guard: the nearest condition for getting there, None if there is none in the function.
        owner: the enclosing function, or the module.
        caught: the name that the nearest enclosing `except ... as name` binds, "" if none.
    """

    function: str
    parameters: tuple[str, ...]
    guard: Guard | None
    owner: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
    caught: str = ""


class _Block:
    """A list of statements that is being walked, and the early exits passed on the way."""

    def __init__(self, body: Sequence[ast.stmt], place: Place, chained: bool = False) -> None:
        self.rest = iter(body)
        self.place = place
        self.chained = chained and len(body) == 1  # an elif
        self.passed: list[ast.expr] = []

    def place_of(self, statement: ast.stmt) -> Place:
        """Behind ``if done: return`` a `raise` is guarded by ``not done``."""
        if self.passed and isinstance(statement, _EXITS):
            return self.place._replace(guard=Guard("else", tuple(self.passed)))
        return self.place

    def note(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.If) and _leaves(statement):
            self.passed.append(statement.test)
        else:
            self.passed.clear()


def _leaves(statement: ast.If) -> bool:
    return not statement.orelse and isinstance(statement.body[-1], _EXITS)


def statements(tree: ast.Module) -> Iterator[tuple[ast.stmt, Place]]:
    """Every statement in source order, with its place. No recursion: `elif` chains may be long."""
    stack = [_Block(tree.body, Place(OUTSIDE, (), None, tree))]
    while stack:
        block = stack[-1]
        statement = next(block.rest, None)
        if statement is None:
            stack.pop()
            continue
        yield statement, block.place_of(statement)
        if isinstance(statement, _SIMPLE):
            block.passed.clear()
        elif not isinstance(statement, _PLAIN):
            block.note(statement)
            stack.extend(reversed(list(_inner(statement, block))))


def _inner(statement: ast.stmt, block: _Block) -> Iterator[_Block]:
    """The blocks within a statement, in source order."""
    place = block.place
    if isinstance(statement, ast.If):
        yield _Block(statement.body, place._replace(guard=Guard("if", (statement.test,))))
        before = place.guard.nodes if block.chained and place.guard else ()
        otherwise = Guard("else", (*before, statement.test))
        yield _Block(statement.orelse, place._replace(guard=otherwise), chained=True)
    elif isinstance(statement, ast.While):
        yield _Block(statement.body, place._replace(guard=Guard("if", (statement.test,))))
        otherwise = Guard("else", (statement.test,))
        yield _Block(statement.orelse, place._replace(guard=otherwise))
    elif isinstance(statement, ast.Match):
        for case in statement.cases:
            guard = Guard("match", (statement.subject, case))
            yield _Block(case.body, place._replace(guard=guard))
    elif isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        yield _Block(statement.body, _within(statement, place))
    else:
        yield from _plain(statement, place)


def _plain(statement: ast.stmt, place: Place) -> Iterator[_Block]:
    """Blocks of `for`, `with` and `try`: only handlers add a condition."""
    yield _Block(getattr(statement, "body", ()), place)
    for handler in getattr(statement, "handlers", ()):
        inside = place._replace(guard=Guard("except", (handler,)), caught=handler.name or "")
        yield _Block(handler.body, inside)
    yield _Block(getattr(statement, "orelse", ()), place)
    yield _Block(getattr(statement, "finalbody", ()), place)


def _within(
    definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, place: Place
) -> Place:
    name = definition.name
    if place.function != OUTSIDE:
        name = f"{place.function}.{name}"
    if isinstance(definition, ast.ClassDef):
        return Place(name, (), None, place.owner)
    return Place(name, parameters(definition.args), None, definition)


def parameters(arguments: ast.arguments) -> tuple[str, ...]:
    """The names of a function's arguments, in order, without ``self`` and ``cls``."""
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    stars = [star for star in (arguments.vararg, arguments.kwarg) if star]
    names = [argument.arg for argument in (*named, *stars)]
    return tuple(name for name in names if name not in ("self", "cls"))

"""Where the package makes its own errors: every use of an error class as a value.

A class is constructed and raised on the spot, returned by a function, or handed to a helper that
raises it; all of these are sites. Annotations, `except` clauses, `isinstance` and docstrings are
none.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvattn.errors.places import Guard, Place, statements
from kvattn.errors.record import Site
from kvattn.errors.syntax import Source, dotted, imports, read

_TESTS = frozenset({"isinstance", "issubclass"})
_HEADERS = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = frozenset({"body", "orelse", "finalbody", "handlers", "cases"})


@dataclass(frozen=True)
class Reference:
    """One use of an error class.

    Attributes:
        name: the class, by the dotted name that the file's imports give it.
        arguments: names of the arguments of the public call that the error is about, as far as
            the source says them in plain strings.
        site: where.
    """

    name: str
    arguments: tuple[str, ...]
    site: Site


def package_sources() -> Iterator[Source]:
    """Every source file of the installed package, in order of its path."""
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        source = read(path, path.relative_to(root.parent).as_posix())
        if isinstance(source, Source):
            yield source


def references(source: Source, names: Collection[str]) -> Iterator[Reference]:
    """Every use of a class with one of the bare names `names` in a source, in order.

    A class that is handed to a function of the same file has a second site: the `raise` there.
    """
    bound = dict(imports(source.tree))
    for statement, place in statements(source.tree):
        if isinstance(statement, _HEADERS):
            continue
        for node, guards, call in _expressions(statement):
            if _name(node) not in names:
                continue
            head, dot, rest = dotted(node).partition(".")
            full = bound.get(head, head) + dot + rest
            arguments = _arguments(node, call, place)
            yield Reference(full, arguments, _site(node, guards, place, source))
            if call is not None and call.func is not node:
                for site in _helper_sites(node, call, source):
                    yield Reference(full, (), site)


def _helper_sites(node: ast.expr, call: ast.Call, source: Source) -> Iterator[Site]:
    """Where the function that is called raises the class that it is given."""
    for helper in source.tree.body:
        if isinstance(helper, ast.FunctionDef) and helper.name == _name(call.func):
            taken = {word.arg for word in call.keywords if word.value is node}
            pairs = zip(call.args, helper.args.args, strict=False)
            taken |= {parameter.arg for value, parameter in pairs if value is node}
            for statement, place in statements(ast.Module(body=[helper], type_ignores=[])):
                made = statement.exc if isinstance(statement, ast.Raise) else None
                if isinstance(made, ast.Call) and _name(made.func) in taken:
                    yield _site(made, (), place, source)


def _site(node: ast.expr, guards: tuple[Guard, ...], place: Place, source: Source) -> Site:
    """Guarded by the statement's condition and by those within its expression."""
    first, text = source.around(node.lineno)
    conditions = [str(guard) for guard in (place.guard, *guards) if guard]
    if len(conditions) > 1:
        conditions = [f"({each})" if " or " in each else each for each in conditions]
    condition = " and ".join(conditions)
    return Site(source.name, node.lineno, place.function, condition, first, text)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


Found = tuple[ast.expr, tuple[Guard, ...], "ast.Call | None"]


def _expressions(statement: ast.stmt) -> Iterator[Found]:
    """Names and attributes in a statement's own expressions, the conditions for evaluating each,
    and the call that it is the function or an argument of."""
    for field, value in ast.iter_fields(statement):
        if field in _BLOCKS or field == "annotation":
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _within(part, (), None)


def _within(node: ast.AST, guards: tuple[Guard, ...], call: ast.Call | None) -> Iterator[Found]:
    if isinstance(node, (ast.Name, ast.Attribute)):
        yield node, guards, call
        return
    if isinstance(node, ast.IfExp):
        yield from _within(node.test, guards, None)
        yield from _within(node.body, (*guards, Guard("if", (node.test,))), call)
        yield from _within(node.orelse, (*guards, Guard("else", (node.test,))), call)
        return
    if isinstance(node, ast.BoolOp):
        kind = "if" if isinstance(node.op, ast.And) else "else"
        yield from _within(node.values[0], guards, None)
        for before, value in zip(node.values, node.values[1:], strict=False):
            yield from _within(value, (*guards, Guard(kind, (before,))), call)
        return
    if isinstance(node, ast.Call):
        if _name(node.func) in _TESTS:
            return
        call = node
    for child in ast.iter_child_nodes(node):
        yield from _within(child, guards, call)


def _arguments(node: ast.expr, call: ast.Call | None, place: Place) -> tuple[str, ...]:
    """The names that the error may carry: its first argument, or the strings beside the class."""
    if call is None:
        return ()
    beside = call.args[:1] if call.func is node else call.args
    found: list[str] = []
    for part in beside:
        found += _strings(part, place)
    return tuple(dict.fromkeys(name for name in found if name.isidentifier()))


def _strings(node: ast.AST, place: Place) -> list[str]:
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        values = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        heads = [part.value for part in node.values[:1] if isinstance(part, ast.Constant)]
        return [str(head).partition("[")[0] for head in heads] or _strings(values[0], place)
    if isinstance(node, ast.IfExp):
        return _strings(node.body, place) + _strings(node.orelse, place)
    if isinstance(node, ast.Name):
        return _bound(node, place.owner)
    return []


def _bound(used: ast.Name, owner: ast.AST) -> list[str]:
    """The strings that a local name stands for: assigned, or run through by the loop around it."""
    found: list[str] = []
    for node in ast.walk(owner):
        if isinstance(node, ast.Assign) and any(_name(t) == used.id for t in node.targets):
            found += _literal(node.value, None)
        elif isinstance(node, ast.For) and node.lineno < used.lineno <= (node.end_lineno or 0):
            if _name(node.target) == used.id:
                found += _literal(node.iter, None)
            elif isinstance(node.target, ast.Tuple):
                names = [_name(element) for element in node.target.elts]
                if used.id in names:
                    found += _literal(node.iter, names.index(used.id))
    return found


def _literal(node: ast.AST, column: int | None) -> list[str]:
    """Strings of a literal; of one column, if its elements are tuples."""
    if isinstance(node, ast.IfExp):
        return _literal(node.body, column) + _literal(node.orelse, column)
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if not isinstance(node, (ast.Tuple, ast.List)):
        return []
    found: list[str] = []
    for element in node.elts:
        if column is not None and isinstance(element, ast.Tuple) and column < len(element.elts):
            element = element.elts[column]
        found += _literal(element, None)
    return found

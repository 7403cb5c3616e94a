"""Message templates: the text of a message as far as the source fixes it, the rest in {braces}."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Callable, Mapping
from typing import Any

from kvattn.errors.syntax import text_of

Lookup = Callable[[str], "ast.expr | None"]  # what a plain name was last assigned, if known

_LONGEST = 40  # characters of an expression that stands in braces
_PERCENT = re.compile(
    r"%(?:\((?P<name>[^)]*)\))?[-+ #0]*[\d*]*(?:\.[\d*]+)?[hlL]?(?P<kind>[a-zA-Z%])"
)
_PASSED_THROUGH = frozenset(
    {"dedent", "textwrap.dedent", "_", "gettext", "str", "inspect.cleandoc"}
)
_EDGES = frozenset({"strip", "lstrip", "rstrip"})


def template(node: ast.expr, lookup: Lookup = lambda name: None) -> str | None:
    """The template of an expression that makes a string; None if it holds no text of its own.

    Takes constants, f-strings, ``%``, ``.format``, concatenation, names of known strings and the
    usual wrappers; joins, conditionals and whatever else is computed become {braces}.

    Example:
        >>> template(ast.parse('f"got {len(x)}, not " + name', mode="eval").body)
        'got {len(x)}, not {name}'
    """
    return _Reader(lookup).read(node)


class _Reader:
    """Reads one expression; every name is looked up once, so that loops end."""

    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup
        self.seen: set[str] = set()

    def read(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            return self.joined(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.sum(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return self.percent(node)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Name) and node.id not in self.seen:
            self.seen.add(node.id)
            value = self.lookup(node.id)
            return self.read(value) if value is not None else None
        return None

    def joined(self, node: ast.JoinedStr) -> str:
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else braces(part.value)  # type: ignore[attr-defined]
            for part in node.values
        )

    def sum(self, node: ast.expr) -> str | None:
        """Concatenation, without recursion on the left: texts are added by the hundred."""
        parts: list[ast.expr] = []
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts.append(node.right)
            node = node.left
        texts = [(part, self.read(part)) for part in (node, *reversed(parts))]
        if all(text is None for _, text in texts):
            return None
        return "".join(braces(part) if text is None else text for part, text in texts)

    def percent(self, node: ast.BinOp) -> str | None:
        text = self.read(node.left)
        if text is None:
            return None
        named: dict[str, ast.expr] = {}
        if isinstance(node.right, ast.Dict):
            pairs = zip(node.right.keys, node.right.values, strict=True)
            named = {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}  # type: ignore[misc]
        elements = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        values = iter(elements)

        def field(found: re.Match[str]) -> str:
            if found["kind"] == "%":
                return "%"
            if found["name"] is not None:
                value = named.get(found["name"])
                return braces(value) if value is not None else f"{{{found['name']}}}"
            return braces(next(values, None))

        return _PERCENT.sub(field, text)

    def call(self, node: ast.Call) -> str | None:
        name = text_of(node.func) if isinstance(node.func, (ast.Name, ast.Attribute)) else ""
        if name in _PASSED_THROUGH and node.args:
            return self.read(node.args[0])
        if not isinstance(node.func, ast.Attribute):
            return None
        if node.func.attr in _EDGES and not node.args:
            text = self.read(node.func.value)
            return None if text is None else getattr(text, node.func.attr)()
        if node.func.attr != "format":
            return None
        text = self.read(node.func.value)
        named = {word.arg: word.value for word in node.keywords if word.arg}
        return None if text is None else _formatted(text, node.args, named)


def _formatted(text: str, values: list[ast.expr], named: Mapping[str, ast.expr]) -> str:
    """A ``str.format`` text with the expressions of its fields in braces."""
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError:  # not a format string at all, only somebody's braces
        return text
    out: list[str] = []
    count = 0
    for literal, field, _, _ in pieces:
        out.append(literal)
        if field is None:
            continue
        head = re.split(r"[.\[]", field, maxsplit=1)[0]
        index = count if head == "" else int(head) if head.isdigit() else None
        count += head == ""
        value: Any = named.get(head)
        if index is not None and index < len(values):
            value = values[index]
        out.append(braces(value) if value is not None else f"{{{field}}}")
    return "".join(out)


def braces(node: ast.AST | None) -> str:
    """An expression in braces, as it stands in the source if it is short."""
    text = "..." if node is None else text_of(node)
    return f"{{{text}}}" if len(text) <= _LONGEST and "{" not in text else "{...}"

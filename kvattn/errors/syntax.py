"""Python sources as they lie on disk: decoded and parsed, never imported, never run."""

from __future__ import annotations

import ast
import stat
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path

LARGEST = 4 * 2**20  # bytes; a longer file is data, and its tree would fill the memory
AROUND = 12  # lines of source shown around a place


@dataclass(frozen=True)
class Source:
    """A file that parses.

    Attributes:
        name: how reports call it.
        text: decoded, with plain line feeds.
        tree: what `ast.parse` made of it.
    """

    name: str
    text: str
    tree: ast.Module

    @cached_property
    def lines(self) -> list[str]:
        """Its lines as the parser counts them: a form feed ends none."""
        return self.text.split("\n")

    def around(self, line: int) -> tuple[int, str]:
        """A dozen lines with `line` in the middle, and the number of the first of them."""
        first = max(1, min(line - AROUND // 2, len(self.lines) - AROUND + 1))
        return first, "\n".join(self.lines[first - 1 : first - 1 + AROUND])

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """Values that the module's own top-level assignments give to plain names."""
        return dict(assignments(self.tree.body))


def read(path: Path, name: str) -> Source | str:
    """The parsed file, or the sentence why it cannot be read."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file"
        if status.st_size > LARGEST:
            return f"larger than {LARGEST >> 20} MiB"
        data = path.read_bytes()
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    try:
        return parse(decode(data), name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return _note(error)


def decode(data: bytes) -> str:
    """The text of a source file: byte order mark, coding cookie, UTF-8, any line ends."""
    encoding, _ = tokenize.detect_encoding(BytesIO(data).readline)
    return data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def parse(text: str, name: str) -> Source:
    """Raises what `ast.parse` raises."""
    with warnings.catch_warnings():  # about the escapes in somebody else's strings
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    return Source(name, text, tree)


def _note(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        where = f" in line {error.lineno}" if error.lineno else ""
        return f"does not parse{where}: {error.msg}"
    if isinstance(error, UnicodeDecodeError):
        return f"not {error.encoding} text: {error.reason} at byte {error.start}"
    if isinstance(error, ValueError):
        return f"does not parse: {error}"
    return "too deeply nested to be parsed"


def assignments(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Names and values of the plain assignments of a block, in order."""
    for statement in body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value = statement.target, statement.value
        else:
            continue
        if isinstance(target, ast.Name):
            yield target.id, value


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a name or a chain of attributes of one; "" for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def text_of(node: ast.AST) -> str:
    """An expression as source text in one line; "..." where it is too deep to be written out."""
    try:
        return " ".join(ast.unparse(node).split())
    except RecursionError:
        return "..."


def imports(tree: ast.Module, module: str = "") -> Iterator[tuple[str, str]]:
    """What the imports of a file, at any depth, bind: a local name and the dotted name it means.

    `module` is the file's own dotted name, for relative imports; they stay relative without it.

    Example:
        >>> dict(imports(ast.parse("import flash_attn as fa; from torch import nn")))
        {'fa': 'flash_attn', 'nn': 'torch.nn'}
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.partition(".")[0]
                yield alias.asname or head, alias.name if alias.asname else head
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: -node.level]
                base = ".".join(filter(None, [*above, base])) if above else "." * node.level + base
            for alias in node.names:
                yield alias.asname or alias.name, f"{base}.{alias.name}"

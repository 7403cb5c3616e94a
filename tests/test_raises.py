"""Raise sites read from source: exception, message template, guard, place; nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent

import pytest

from kvattn.errors import syntax, templates
from kvattn.errors.places import statements
from kvattn.errors.raises import Raise, raise_sites
from kvattn.errors.record import identity


def sites(text: str) -> list[Raise]:
    return list(raise_sites(syntax.parse(dedent(text), "a.py"), "project"))


def in_function(body: str) -> list[Raise]:
    return sites("def f(x, y=None, *args, z, **rest):\n" + indent(dedent(body), "    "))


MESSAGES = {
    "'plain'": "plain",
    "'two ' 'parts'": "two parts",
    "f'got {x}'": "got {x}",
    "f'{x!r:>10} and {x.shape[0]:.2f}'": "{x} and {x.shape[0]}",
    "f'{{literal}} {x}'": "{literal} {x}",
    "'got %s, not %d%%' % (x, y)": "got {x}, not {y}%",
    "'got %r' % x": "got {x}",
    "'%(a)s of %(b)5.1f' % {'a': x, 'b': len(y)}": "{x} of {len(y)}",
    "'%(a)s' % rest": "{a}",
    "'%s and %s' % x": "{x} and {...}",
    "'{} then {}'.format(x, y)": "{x} then {y}",
    "'{1} {0} {name} {2}'.format(x, y, name=z)": "{y} {x} {z} {2}",
    "'{0.shape} {1[0]}'.format(x, y)": "{x} {y}",
    "'{a.b}'.format(**rest)": "{a.b}",
    "'{'.format(x)": "{",
    "'a' + x + 'b'": "a{x}b",
    "'a' + str(1) + f'{y}'": "a{str(1)}{y}",
    "dedent('''\n  two\n  lines''').strip()": "two lines",
    "_('translated %s') % x": "translated {x}",
    "LONG": "a constant of the module",
    "f'{LONG} {x}'": "{LONG} {x}",
    "f'{x if y else z + some_long_function_name(x, y)}'": "{...}",
    "' '.join(x)": "{' '.join(x)}",
    "x": "{x}",
    "3": "{3}",
    "": "",
    "404, 'second'": "second",
    "x, f'code {y}', 'third'": "code {y}",
    "404, detail='by name'": "by name",
    "*args": "",
}


@pytest.mark.parametrize("expression", MESSAGES)
def test_message_templates(expression: str) -> None:
    text = "LONG = 'a constant of the module'\ndef f(x, y, z, *args, **rest):\n"
    (found,) = sites(f"{text}    raise Bad({expression})\n")
    assert (found.exception, found.message) == ("Bad", MESSAGES[expression])
    assert found.id == identity("project", "Bad", MESSAGES[expression])


def test_a_message_made_before() -> None:
    """The last assignment above, in the function before the module; a loop ends."""
    (found,) = in_function(
        """
        message = "first"
        message = f"second {x}"
        if x:
            raise ValueError(message)
        message = "third"
        """
    )
    assert found.message == "second {x}"
    assert [each.message for each in in_function("m = m + 'x'\nraise ValueError(m)")] == ["{m}x"]
    assert [each.message for each in in_function("x = 'no'\nraise ValueError(x)")] == ["{x}"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise ValueError", ("ValueError", "")),
        ("raise ValueError('a') from None", ("ValueError", "a")),
        ("raise errors.own.Bad('a')", ("Bad", "a")),
        ("raise self.error('a')", ("error", "a")),
        ("raise make()('a')", ("make()", "a")),
        ("raise ValueError('a').with_traceback(x)", ("ValueError", "a")),
        ("error = ValueError(f'a {x}')\nraise error", ("ValueError", "a {x}")),
        ("assert x > 0, f'{x} is small'", ("AssertionError", "{x} is small")),
        ("assert x, y", ("AssertionError", "{y}")),
        ("raise ERRORS[x]('a')", ("ERRORS[x]", "a")),
    ],
)
def test_what_is_raised(body: str, expected: tuple[str, str]) -> None:
    assert [(each.exception, each.message) for each in in_function(body)] == [expected]


@pytest.mark.parametrize(
    "body",
    [
        "try:\n    x()\nexcept ValueError:\n    raise",
        "try:\n    x()\nexcept ValueError as error:\n    if y:\n        raise error",
        "assert x",
        "# raise ValueError\n'''raise ValueError'''",
    ],
)
def test_what_raises_no_new_error(body: str) -> None:
    assert in_function(body) == []


GUARDS = {
    "raise E": "",
    "if x is None:\n    raise E": "x is None",
    "if a:\n    if b or c:\n        raise E": "b or c",
    "if a:\n    pass\nelif b:\n    raise E": "b",
    "if a:\n    pass\nelse:\n    raise E": "not a",
    "if a is None:\n    pass\nelif b == 1:\n    pass\nelif not c:\n    pass\nelse:\n    raise E": (
        "a is not None and b != 1 and c"
    ),
    "if a:\n    pass\nelse:\n    if b:\n        raise E": "b",
    "if x < 0:\n    pass\nelse:\n    raise E": "not (x < 0)",
    "if a in b:\n    return\nraise E": "a not in b",
    "if a:\n    return 1\nif b:\n    return 2\nraise E": "not a and not b",
    "if a:\n    return 1\nz = 3\nraise E": "not a",
    "if a:\n    return 1\nprint()\nraise E": "",
    "if a:\n    print()\nraise E": "",
    "if a:\n    raise A\nraise E": "not a",
    "for i in x:\n    if i:\n        continue\n    raise E": "not i",
    "for i in x:\n    raise E": "",
    "while x:\n    raise E": "x",
    "while x:\n    pass\nelse:\n    raise E": "not x",
    "for i in x:\n    break\nelse:\n    raise E": "",
    "with x:\n    if y:\n        raise E": "y",
    "try:\n    x()\nexcept (A, B):\n    raise E": "except (A, B)",
    "try:\n    x()\nexcept A as a:\n    if a.b:\n        raise E": "a.b",
    "try:\n    x()\nexcept:\n    raise E": "except",
    "if a:\n    try:\n        raise E\n    finally:\n        pass": "a",
    "try:\n    x()\nexcept A:\n    pass\nelse:\n    raise E": "",
    "match x:\n    case 1 | 2:\n        pass\n    case [a, *_] if a:\n        raise E": (
        "match x: case [a, *_] if a"
    ),
    "match x:\n    case _:\n        raise E": "match x: case _",
    "if a:\n    def g():\n        raise E": "",
    "if (\n    a\n    and b  # why\n):\n    raise E": "a and b",
    "assert a is b, 'no'": "a is not b",
}


@pytest.mark.parametrize("body", GUARDS)
def test_the_nearest_condition(body: str) -> None:
    found = [each for each in in_function(body) if each.exception != "A"]
    assert [each.site.guard for each in found] == [GUARDS[body]]


def test_places() -> None:
    found = sites(
        """
        raise A

        class Outer:
            raise B

            def method(self, x, /, y, *more, z=1, **rest):
                def inner(q):
                    raise C
                raise D

            @classmethod
            async def later(cls, k):
                raise E
        """
    )
    assert [(each.exception, each.site.function, each.parameters) for each in found] == [
        ("A", "<module>", ()),
        ("B", "Outer", ()),
        ("C", "Outer.method.inner", ("q",)),
        ("D", "Outer.method", ("x", "y", "z", "more", "rest")),
        ("E", "Outer.later", ("k",)),
    ]


def test_a_dozen_lines_around() -> None:
    text = (
        "".join(f"a{i} = {i}\n" for i in range(30))
        + "raise E\n"
        + "".join(f"b{i}\n" for i in range(30))
    )
    (found,) = sites(text)
    assert found.site.line == 31 and found.site.first == 25
    assert found.site.source.split("\n") == text.split("\n")[24:36]
    (only,) = sites("raise E")
    assert (only.site.first, only.site.source) == (1, "raise E")
    (last,) = sites("x\n" * 30 + "raise E")
    assert last.site.source.split("\n")[-1] == "raise E" and last.site.first == 20


def test_one_error_in_two_places_has_one_id() -> None:
    first, second = sites(
        "def f(x):\n    raise E(f'no {x}')\ndef g(x):\n    raise E('no %s' % x)\n"
    )
    assert first.id == second.id != identity("other", "E", "no {x}")
    assert first.site.function != second.site.function


def test_a_chain_longer_than_the_stack() -> None:
    """Ten thousand branches and additions, each below the one before."""
    chain = "".join(f"elif x == {i}:\n    raise E('{i}')\n" for i in range(1, 900))
    found = sites("if x == 0:\n    raise E('0')\n" + chain)
    assert len(found) == 900 and found[-1].site.guard == "x == 899"
    total = ast.parse("'a'").body[0].value  # type: ignore[attr-defined]
    for _ in range(10_000):
        total = ast.BinOp(total, ast.Add(), ast.Constant("a"))
    assert templates.template(total) == "a" * 10_001


def test_statements_come_in_source_order() -> None:
    text = Path(syntax.__file__).read_text(encoding="utf-8")
    tree = ast.parse(text)
    expected = sorted(node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt))
    assert [statement.lineno for statement, _ in statements(tree)] == expected


# Files -----------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def make(data: bytes) -> Path:
        path = tmp_path / "file.py"
        path.write_bytes(data)
        return path

    return make


@pytest.mark.parametrize(
    "data",
    [
        b"raise E('gr\xc3\xbc\xc3\x9fe')\n",
        b"\xef\xbb\xbfraise E('gr\xc3\xbc\xc3\x9fe')\n",
        b"# -*- coding: latin-1 -*-\r\nraise E('gr\xfc\xdfe')\r\n",
        b"#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\nraise E('gr\xfc\xdfe')",
        b"raise E('gr\xc3\xbc\xc3\x9fe')\r",
        b"x = '\\d'\nraise E('gr\xc3\xbc\xc3\x9fe')",
        b"\x0cx = 1\x0c\nraise E('gr\xc3\xbc\xc3\x9fe')",
    ],
)
def test_encodings_and_line_ends(write: Callable[[bytes], Path], data: bytes) -> None:
    source = syntax.read(write(data), "file.py")
    assert isinstance(source, syntax.Source)
    (found,) = raise_sites(source)
    assert found.message == "grüße"
    assert "raise E" in source.lines[found.site.line - 1]


NOTES = {
    b"def f(:\n": "does not parse in line 1: ",
    b"x = (\n": "does not parse in line 1: ",
    b"print 'two'\n": "does not parse in line 1: ",
    b"x = 1\n  y = 2\n": "does not parse in line 2: ",
    b"raise E('\xff\xfe')\n": "does not parse: invalid or missing encoding",
    b"# coding: no-such\nx = 1\n": "does not parse: unknown encoding",
    b"# coding: ascii\nx = '\xc3\xbc'\n": "not ascii text: ordinal not in range(128) at byte 21",
    b"x = 1\x00\n": "does not parse",
    b"\x00\x01\x02\x7fELF": "does not parse",
    b"-" * 200_000 + b"1\n": "too deeply nested",
    b"(" * 5_000 + b")" * 5_000: "does not parse",
}


@pytest.mark.parametrize("data", NOTES, ids=lambda data: repr(data[:20]))
def test_what_cannot_be_parsed_is_noted(write: Callable[[bytes], Path], data: bytes) -> None:
    note = syntax.read(write(data), "file.py")
    assert isinstance(note, str)
    assert note.startswith(NOTES[data])


@pytest.mark.parametrize("data", [b"x" + b".y" * 50_000, b"x = 1" + b" + 1" * 50_000])
def test_a_deep_tree_is_no_crash(write: Callable[[bytes], Path], data: bytes) -> None:
    """Some releases of Python parse it, others do not."""
    source = syntax.read(write(data + b"\nraise E(x)\n"), "file.py")
    found = source if isinstance(source, str) else [each.exception for each in raise_sites(source)]
    assert found in ("too deeply nested to be parsed", ["E"])


def test_a_huge_file_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "data.py"
    with path.open("wb") as file:
        file.truncate(syntax.LARGEST + 1)  # holds no bytes on disk
    assert syntax.read(path, "data.py") == "larger than 4 MiB"


def test_what_is_no_file_is_noted(tmp_path: Path) -> None:
    folder, gone, loop = (tmp_path / name for name in ("folder.py", "gone.py", "loop.py"))
    folder.mkdir()
    gone.symlink_to("nowhere")
    loop.symlink_to(loop)
    assert syntax.read(folder, "") == "not a regular file"
    assert str(syntax.read(gone, "")).startswith("cannot be read: No such file")
    assert "cannot be read" in str(syntax.read(loop, ""))

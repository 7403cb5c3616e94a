"""`kvattn.scan`: which files are read, and what is said of the errors they raise."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from scan_tools import K

import kvattn
from kvattn.errors import catalogue, syntax
from kvattn.errors.catalogue_kinds import ScanPathError
from kvattn.errors.record import identity
from kvattn.scan import Scan, examine, files, scan

Tree = Callable[[dict[str, str | bytes]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Files with their contents, by path."""

    def make(contents: dict[str, str | bytes]) -> Path:
        root = tmp_path / "repo"
        for name, text in contents.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
        return root

    return make


def raised(found: Scan) -> dict[str, list[str]]:
    return {
        error.exception: [f"{each.site.file}:{each.site.line}" for each in error.sites]
        for error in found.errors
    }


WEIRD: dict[str, str | bytes] = {
    "good.py": "raise Good\n",
    "a/b/c/deep.py": "raise Deep\n",
    "a/syntax.py": "def f(:\n    raise Syntax\n",
    "a/bom.py": b"\xef\xbb\xbfraise Bom\n",
    "a/latin.py": b"# coding: latin-1\nraise Latin('\xfc')\n",
    "a/binary.py": b"\x00\x01\xff",
    "a/utf16.py": "raise Wide".encode("utf-16"),
    "a/nested.py": b"x = " + b"-" * 100_000 + b"1\n",
    "a/empty.py": b"",
    "a/notes.txt": "raise Text\n",
    "a/stub.pyi": "raise Stub\n",
    ".hidden/x.py": "raise Hidden\n",
    "a/__pycache__/x.py": "raise Cached\n",
    "node_modules/x.py": "raise Node\n",
    "venv/pyvenv.cfg": "",
    "venv/lib/x.py": "raise Venv\n",
    "folder.py/inner.py": "raise Inner\n",
}


def test_weird_files_are_skipped_with_a_note(tree: Tree) -> None:
    root = tree(WEIRD)
    (root / "huge.py").touch()
    os.truncate(root / "huge.py", syntax.LARGEST + 1)
    (root / "broken.py").symlink_to("nowhere.py")
    (root / "loop.py").symlink_to("loop.py")
    (root / "a/up").symlink_to(root, target_is_directory=True)
    (root / "link.py").symlink_to("good.py")
    found = scan(root)
    assert raised(found) == {
        "Bom": ["a/bom.py:1"],
        "Latin": ["a/latin.py:2"],
        "Deep": ["a/b/c/deep.py:1"],
        "Inner": ["folder.py/inner.py:1"],
        "Good": ["good.py:1", "link.py:1"],
    }
    skipped = dict(found.skipped)
    assert sorted(skipped) == [
        *("a/binary.py", "a/nested.py", "a/syntax.py", "a/utf16.py"),
        *("broken.py", "huge.py", "loop.py"),
    ]
    assert skipped["a/syntax.py"].startswith("does not parse in line 1")
    assert skipped["a/nested.py"] == "too deeply nested to be parsed"
    assert skipped["huge.py"] == "larger than 4 MiB"
    assert found.files == 7


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tree: Tree) -> None:
    root = tree({"a.py": "raise A\n"})
    os.mkfifo(root / "pipe.py")
    found = scan(root)
    assert found.skipped == (("pipe.py", "not a regular file"),)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux")
def test_a_name_that_is_no_text(tree: Tree) -> None:
    root = tree({"a.py": "raise A\n"})
    Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9.py")).write_text("raise B\n")
    found = scan(root)
    assert raised(found)["B"] == ["caf\ufffd.py:1"]
    json.dumps(found.to_dict(), ensure_ascii=False).encode()


def test_a_single_file_of_any_name(tree: Tree) -> None:
    root = tree({"script": "raise A\n"})
    assert raised(scan(root / "script")) == {"A": ["script:1"]}


def test_a_path_that_is_not_there(tree: Tree) -> None:
    with pytest.raises(ScanPathError, match="does not exist"):
        scan(tree({"a.py": ""}) / "nowhere")
    with pytest.raises(ScanPathError, match="no regular file"):
        scan(Path(os.devnull))


def test_nothing_is_run(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree({"conftest.py": "", "package/__init__.py": "", "sitecustomize.py": ""})
    marker = root / "ran"
    side_effect = f"open({str(marker)!r}, 'w')\nimport flash_attn\nflash_attn.flash_attn_func(1)\n"
    for name in ("conftest.py", "package/__init__.py", "sitecustomize.py"):
        (root / name).write_text(side_effect + "raise E(f'{open(__file__, chr(119))}')\n")
    monkeypatch.chdir(root)
    before = set(sys.modules)
    found = scan(root)
    assert len(found.calls) == 3 and not marker.exists()
    assert not {name for name in set(sys.modules) - before if "kvattn" not in name}


def many(tree: Tree) -> Path:
    """More files than are read in this process alone."""
    return tree(
        {
            f"p{i % 7}/m{i}.py": f"def f(x):\n    if x:\n        raise E{i % 11}(f'no {{x}}')\n"
            for i in range(3 * files._FEW)
        }
    )


def test_processes_find_what_one_finds(tree: Tree) -> None:
    root = many(tree)
    one, two = scan(root, jobs=1).to_dict(), scan(root, jobs=2).to_dict()
    del one["seconds"], two["seconds"]
    assert one == two and len(one["errors"]) == 11 and one["files"] == 3 * files._FEW


def dies_of_some(file: files.File) -> str:
    if file.path.stem in ("m5", "m77"):
        os._exit(1)  # as a parser does that overruns its stack
    return file.name


def test_a_file_that_kills_its_reader_is_noted(tree: Tree) -> None:
    skipped: list[Any] = []
    todo = list(files.python_files(many(tree), lambda *why: skipped.append(why)))
    answers = list(files.Readers(2, len(todo)).map(dies_of_some, todo))
    dead = [
        file.path.stem
        for file, answer in zip(todo, answers, strict=True)
        if answer == files.CRASHED
    ]
    assert sorted(dead) == ["m5", "m77"] and skipped == []
    assert (
        sum(answer == file.name for file, answer in zip(todo, answers, strict=True))
        == len(todo) - 2
    )


def test_ids_belong_to_the_package(tree: Tree) -> None:
    """The outermost package of a file counts, wherever the checkout lies."""
    error = "raise ValueError('no')\n"
    root = tree(
        {
            "src/alpha/__init__.py": "",
            "src/alpha/inner/__init__.py": error,
            "src/beta/__init__.py": error,
            "tool.py": error,
        }
    )
    found = {each.site.file: error.id for error in scan(root).errors for each in error.sites}
    expected = {
        "src/alpha/inner/__init__.py": "alpha",
        "src/beta/__init__.py": "beta",
        "tool.py": "repo",
    }
    for file, project in expected.items():
        assert found[file] == identity(project, "ValueError", "no")
    inside = scan(root / "src/alpha/inner")
    assert inside.errors[0].id == found["src/alpha/inner/__init__.py"]


def test_errors_with_a_page_are_named(tree: Tree) -> None:
    root = tree(
        {
            "wrapper.py": """
            def flash_attn_with_kvcache(q, k=None):
                if k is not None:
                    raise NotImplementedError("FA4 does not support updating KV cache in-place.")
                raise ValueError("something else")
            """
        }
    )
    known = {error.exception: error.known for error in scan(root).errors}
    page = catalogue.record(known["NotImplementedError"])
    assert page.message == "FA4 does not support updating KV cache in-place."
    assert known["ValueError"] == ""


def test_the_package_itself() -> None:
    """kvattn's own raises lead to its own records."""
    found = scan(Path(kvattn.__file__).parent)
    by_class = {error.exception: error for error in found.errors if error.known.startswith("KV")}
    record = catalogue.record("KV110")
    error = by_class["HeadRatioError"]
    assert (error.id, error.known, error.message) == (record.id, "KV110", record.message)
    assert error.sites[0].site.line == record.sites[0].line
    assert found.skipped == ()
    assert {call.file.partition("/")[0] for call in found.calls} <= {"bench"}  # it measures peers


def test_related_errors(tree: Tree) -> None:
    root = tree(
        {
            "a.py": """
            def f(page_table, sinks):
                if page_table.dtype != "int32":
                    raise TypeError("page table dtype")
                if page_table.ndim != 2:
                    raise ValueError("rank of pages")
                if sinks:
                    raise KeyError("unlike the others")
            """,
            "b.py": "def g(z):\n    raise OSError('disk is full')\n",
        }
    )
    found = {error.exception: error for error in scan(root).errors}
    assert found["TypeError"].related[0] == found["ValueError"].id
    assert found["OSError"].related == ()


def test_a_large_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("Transformers is not installed")
    steps: list[float] = []

    class Watched:
        def __enter__(self) -> Callable[[str, float], None]:
            return lambda step, done: steps.append(done)

        def __exit__(self, *_: object) -> None: ...

    found = scan(Path(spec.submodule_search_locations[0]), watch=Watched)
    assert found.files > 2_000 and found.skipped == ()
    assert len(found.errors) > 2_000
    assert steps == sorted(steps) and steps[-1] == 1.0
    assert all(error.id == each.id for error in found.errors for each in error.sites)


def test_a_report_is_plain_data(tree: Tree) -> None:
    root = tree({"a.py": f"from flash_attn import {K}\n{K}(q, kc, vc, k, v)\nraise E('x')\n"})
    read = json.loads(json.dumps(scan(root).to_dict()))
    assert list(read) == ["root", "files", "seconds", "skipped", "calls", "errors"]
    assert read["calls"][0]["rewrite"]["imports"] == ["import kvattn"]
    assert read["calls"][0]["arguments"]["k_cache"] == "kc"
    site = read["errors"][0]["sites"][0]
    assert (site["file"], site["line"], site["guard"], site["parameters"]) == ("a.py", 3, "", [])


def test_a_file_too_deep_for_a_part_of_the_scan(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed, but some walk over its tree overruns the stack: noted, not fatal."""
    root = tree({"a.py": "raise A\n"})

    def overrun(*_: object) -> Any:
        raise RecursionError

    monkeypatch.setattr("kvattn.scan.raise_sites", overrun)
    (file,) = files.python_files(root, lambda *_: None)
    assert examine(file) == "too deeply nested to be read"

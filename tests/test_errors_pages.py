"""The pages about kvattn's errors: one for each class, and their programs do what they promise."""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import kvattn
from kvattn import scan
from kvattn.errors import catalogue, find

KINDS = {kind.code: kind for kind in catalogue.kinds()}
PAGES = catalogue.pages()
TEXTS = ("title", "meaning", "trigger", "guard", "before", "after")
LISTS = ("situations", "solutions", "functions")
# What programs need beside torch, by the beginning of the code.
PACKAGES: tuple[tuple[str, dict[str, str | None]], ...] = (
    ("KV[34]|KV50[2348]", {"transformers": "5.24"}),
    ("KV5", dict.fromkeys(("typer", "rich"))),
    ("KV50[567]", dict.fromkeys(("jinja2", "pygments", "starlette", "uvicorn"))),
    ("KV6", {"triton": None}),
    ("KV80[24]", dict.fromkeys(("jinja2", "matplotlib"))),
)
COMMANDS = {"KV501", "KV504", "KV505", "KV508"}  # met by the command line, which prints the error
FIRST_IMPORTS = {"KV401": "integrations", "KV402": "integrations", "KV505": "site"}  # meet it

MADE_OF_RECORDS = (catalogue._known, find._entries, find._vocabulary, scan._by_message)

every_page = pytest.mark.parametrize("code", sorted(PAGES))


def test_a_page_for_every_class_and_a_class_for_every_page() -> None:
    assert sorted(PAGES) == sorted(KINDS)


@every_page
def test_a_page_holds_what_it_should(code: str) -> None:
    page = PAGES[code]
    assert set(page) - {"needs"} == {*TEXTS, *LISTS}
    assert page.get("needs", "cuda") == "cuda"
    for name in TEXTS:
        assert isinstance(page[name], str) and page[name].strip(), name
    for name in LISTS:
        assert all(isinstance(item, str) and item.strip() for item in page[name]), name
    assert len(page["title"].split()) <= 10 and not page["title"].endswith(".")
    assert 2 <= len(re.findall(r"[.?!](?=\s|$)", page["meaning"])) <= 5
    assert 2 <= len(page["situations"]) <= 4
    assert 2 <= len(page["solutions"]) <= 4
    assert page["functions"]
    assert "\n" not in page["meaning"] + page["trigger"]
    for name in ("guard", "before", "after"):
        ast.parse(page[name])
        assert max(map(len, page[name].splitlines())) <= 100


@every_page
def test_the_functions_exist(code: str) -> None:
    need_packages(code)
    for name in PAGES[code]["functions"]:
        if name.startswith("kvattn "):
            assert name.removeprefix("kvattn ") in commands()
        else:
            assert callable(named(name)), name


def named(path: str) -> Any:
    """What stands at a dotted path within kvattn."""
    found: Any = importlib.import_module("kvattn")
    for part in path.split("."):
        if not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


def commands() -> set[str]:
    """The words after `kvattn` that run a command."""
    typer = pytest.importorskip("typer")
    from kvattn.cli import app

    group = typer.main.get_command(app())
    found = dict(group.commands)
    for name, command in group.commands.items():
        found |= {f"{name} {below}": None for below in getattr(command, "commands", ())}
    return set(found)


@pytest.mark.parametrize("name", ["title", "meaning", "trigger", "before"])
def test_no_two_pages_say_the_same(name: str) -> None:
    texts = [page[name] for page in PAGES.values()]
    assert len(set(texts)) == len(texts)


@every_page
def test_little_changes_between_before_and_after(code: str) -> None:
    before, after = (PAGES[code][name].splitlines() for name in ("before", "after"))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "-+"]
    assert 1 <= len(changes) <= 10


@every_page
def test_before_meets_the_error(code: str, tmp_path: Path) -> None:
    need_packages(code)
    met = AssertionError if code in COMMANDS else KINDS[code]
    with undisturbed(tmp_path), unimported(code), pytest.raises(met, match=code) as caught:
        run(code, "before")
    assert type(caught.value) is met


@every_page
def test_after_runs(code: str, tmp_path: Path) -> None:
    need_packages(code)
    with undisturbed(tmp_path):
        run(code, "after")


def need_packages(code: str) -> None:
    for pattern, packages in PACKAGES:
        if re.match(pattern, code):
            for package, version in packages.items():
                pytest.importorskip(package, minversion=version)


def run(code: str, which: str) -> None:
    """A program of a page, as a file of its own would run."""
    page = PAGES[code]
    program: str = page[which]
    device: AbstractContextManager[None] = nullcontext()
    if page.get("needs") == "cuda" and not torch.cuda.is_available():
        program, device = program.replace('"cuda"', '"cpu"'), stand_in_for_cuda()
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True), device:
        exec(compile(program, f"{code}.{which}", "exec"), {"__name__": "__main__"})


@contextmanager
def undisturbed(directory: Path) -> Iterator[None]:
    """Takes back what a program does to the process; its temporary files go to `directory`."""
    modules = dict(sys.modules)
    few = (catalogue.record("KV121"),)  # a whole site takes seconds, and has tests of its own
    try:
        with (
            patch.dict(os.environ),
            patch.object(tempfile, "tempdir", str(directory)),
            patch.object(catalogue, "everything", lambda: few),
        ):
            yield
    finally:
        for made_of_few in MADE_OF_RECORDS:  # if a program was the first to ask
            made_of_few.cache_clear()
        for name in [name for name, module in sys.modules.items() if module is None]:
            del sys.modules[name]  # hidden, as if not installed
        sys.modules.update(modules)


@contextmanager
def unimported(code: str) -> Iterator[None]:
    """Lets the program be the first to import what it imports."""
    package = FIRST_IMPORTS.get(code, "")
    known = getattr(kvattn, package, None)
    for name in list(sys.modules):
        if package and f"{name}.".startswith(f"kvattn.{package}."):
            del sys.modules[name]
    yield
    if known is not None:
        setattr(kvattn, package, known)


@contextmanager
def stand_in_for_cuda() -> Iterator[None]:
    """CPU tensors that say they are on a GPU, and graphs that only know when they record."""
    recording = False

    class Graph:
        def replay(self) -> None: ...

    @contextmanager
    def graph(_: Graph) -> Iterator[None]:
        nonlocal recording
        recording = True
        try:
            yield
        finally:
            recording = False

    with (
        patch.object(torch.cuda, "CUDAGraph", Graph),
        patch.object(torch.cuda, "graph", graph),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: recording),
        patch.object(torch.Tensor, "is_cuda", True),
    ):
        yield

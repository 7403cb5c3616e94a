"""Launches past Triton's bookkeeping, on stand-ins for what it compiles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from kvattn.backends import triton_direct as direct
from kvattn.backends.triton_direct import Box


class Compiled:
    """A kernel whose launcher notes what it is called with."""

    function, packed_metadata = "function", "packed"

    def __init__(self, *metas: Any, scratch: int = 0) -> None:
        self.called: list[tuple[Any, ...]] = []
        self.usual: list[tuple[Any, ...]] = []
        self.metadata = SimpleNamespace(tensordesc_meta=metas)
        self.run = SimpleNamespace(
            launch=wrapped(lambda *args: self.called.append(args)) if metas else self._note,
            global_scratch_size=scratch,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=True,
        )

    def _note(self, *args: Any) -> None:
        self.called.append(args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, stream: self.usual.append((grid, stream, *args))

    def launch_metadata(self, grid: tuple[int, ...], stream: int) -> str:
        return "about"


def wrapped(launcher: Any) -> Any:
    def inner(*args: Any) -> None:
        launcher(*args)

    return inner


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_KNOWN", True)
    monkeypatch.setattr(direct, "CompiledKernel", Compiled)


def box(address: int = 0) -> Box:
    return Box(SimpleNamespace(shape=[4, 8], strides=[8, 1], padding="zero"), address)


HEAD = (7, 1, 1, 17, "function", False, True, None, None, "packed")


def test_a_launcher_gets_its_arguments_without_hooks() -> None:
    compiled = Compiled()
    launch = direct.prepared(compiled, (7, 1, 1), ["q", 5], [(0, 3)])
    launch.run(["address", 5], 17)
    assert compiled.called == [(*HEAD, None, None, None, "address", 5)] and not compiled.usual
    assert launch.holes == [(0, 3)]


def test_a_profilers_hooks_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    enter, leave = SimpleNamespace(calls=[print]), SimpleNamespace(calls=[])
    runtime = SimpleNamespace(launch_enter_hook=enter, launch_exit_hook=leave)
    monkeypatch.setattr(direct, "knobs", SimpleNamespace(runtime=runtime))
    compiled = Compiled()
    direct.prepared(compiled, (7, 1, 1), ["q"], [(0, 0)]).run(["address"], 17)
    assert compiled.called == [(*HEAD, "about", enter, leave, "address")]


@pytest.mark.parametrize("why", ["another release", "scratch memory", "no descriptors"])
def test_what_is_not_known_is_launched_by_triton(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_KNOWN", why != "another release")
    compiled = Compiled(scratch=16 if why == "scratch memory" else 0)
    first: Any = box() if why == "no descriptors" else "q"
    launch = direct.prepared(compiled, (7, 1, 1), [first, 5], [(0, 0)])
    launch.run([1, 5], 17)
    assert compiled.usual == [((7, 1, 1), 17, 1, 5)] and not compiled.called
    assert launch.args == [first, 5]


def test_descriptors_are_made_once_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver

    made: list[tuple[int, str]] = []

    def make(what: Box, meta: str) -> list[Any]:
        made.append((what.data_ptr(), meta))
        return [f"{meta}@{what.data_ptr()}", *what.shape, *what.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    compiled = Compiled("keys", "values")
    launch = direct.prepared(compiled, (7, 1, 1), [box(), 5, box(), "q"], [(0, 1), (2, 2), (3, 0)])
    assert launch.holes == [(0, 1), (6, 2), (11, 0)]
    assert [x for x in launch.args if not isinstance(x, Box)] == [*[4, 8, 8, 1, 5], 4, 8, 8, 1, "q"]
    keys, values = (x for x in launch.args if isinstance(x, Box))
    assert [keys.over(64), values.over(64), keys.over(64)] == ["keys@64", "values@64", "keys@64"]
    assert made == [(64, "keys"), (64, "values")]
    launch.run(["anything"], 17)
    assert compiled.called == [(*HEAD, None, None, None, "anything")]


def test_kept_descriptors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_MOST", 2)
    made: list[int] = []
    described = direct.Map(box(), lambda over: made.append(over.data_ptr()))
    for address in (16, 32, 48, 48, 16):
        described.over(address)
    assert made == [16, 32, 48, 16]

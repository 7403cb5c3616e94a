"""Which mods are traced anew: those whose code, numbers or tensors are others."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import mod_cases as cases
import pytest
import torch
from mod_cases import SK, H, Mod, lowered
from torch import Tensor

from kvattn import mods
from kvattn.mods.tracing import trace

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    with torch.device(cases.DEVICE):
        yield


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The mods that are traced during a test."""
    seen: list[str] = []

    def noticed(fn: Mod, argument: str, *rest: Any) -> Any:
        seen.append(argument)
        return trace(fn, argument, *rest)

    monkeypatch.setattr(mods, "trace", noticed)
    monkeypatch.setattr(mods, "_traces", OrderedDict())
    return seen


def biased(table: Tensor, gain: float) -> Mod:
    return lambda s, b, h, q, k: s * gain + table[h, q - k]


def test_the_same_code_with_like_captures_is_traced_once(traced: list[str]) -> None:
    first = lowered(biased(torch.zeros(H, 9), 2.0))
    table = torch.ones(H, 9)
    second = lowered(biased(table, 2.0))
    assert len(traced) == 1
    assert second.function is first.function and second.key == first.key
    assert second.tensors[0] is table
    assert lowered(cases.SCORES["alibi-captured"]).function is not first.function


@pytest.mark.parametrize(
    "other",
    [
        lambda: biased(torch.zeros(H, 9), 3.0),
        lambda: biased(torch.zeros(H, 9, dtype=torch.bfloat16), 2.0),
        lambda: biased(torch.zeros(H, 9), -2.0),
    ],
    ids=["number", "dtype", "sign"],
)
def test_other_captures_are_another_mod(traced: list[str], other: Callable[[], Mod]) -> None:
    lowered(biased(torch.zeros(H, 9), 2.0))
    del traced[:]
    assert lowered(other()).key != lowered(biased(torch.zeros(H, 9), 2.0)).key
    assert len(traced) == 1


WINDOW = 4


class Config:
    """What a mod may capture as a whole."""

    def __init__(self, window: int, table: Tensor) -> None:
        self.window, self.nested = window, {"tables": [table]}

    def mask(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k < self.window) & (self.nested["tables"][0][k] > 0)


def test_changed_numbers_are_seen_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    count, config = 3, Config(5, torch.zeros(SK))
    by_default = lambda b, h, q, k, *, width=6: q - k < width  # noqa: E731
    helper = lambda q, k: q - k < count  # noqa: E731
    masks: dict[str, Mod] = {
        "global": lambda b, h, q, k: q - k < WINDOW,
        "closure": lambda b, h, q, k: q - k < count,
        "helper": lambda b, h, q, k: helper(q, k),
        "method": config.mask,
        "keyword": by_default,
    }
    before = {name: lowered(mask, True).source for name, mask in masks.items()}
    monkeypatch.setitem(globals(), "WINDOW", 40)
    count, config.window = 30, 50
    by_default.__kwdefaults__ = {"width": 60}
    for name, number in zip(masks, (40, 30, 30, 50, 60), strict=True):
        source = lowered(masks[name], True).source
        assert source != before[name], name
        assert f"< {number}" in source, name


def test_one_tensor_twice_is_not_two_tensors(traced: list[str]) -> None:
    def both(first: Tensor, second: Tensor) -> Mod:
        return lambda s, b, h, q, k: s + first[h] * second[k]

    one, two = torch.zeros(SK), torch.ones(SK)
    assert len(lowered(both(one, one)).tensors) == 1
    first, second = lowered(both(two, one)).tensors
    assert first is two and second is one
    assert len(traced) == 2


def test_a_replaced_tensor_is_found(traced: list[str]) -> None:
    config = Config(5, torch.zeros(SK))
    lowered(config.mask, True)
    config.nested["tables"] = [torch.ones(SK)]
    assert lowered(config.mask, True).tensors[0] is config.nested["tables"][0]
    assert len(traced) == 1


class Sealed:
    """A tensor where it cannot be found by looking."""

    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table = torch.zeros(SK)


def test_what_cannot_be_looked_into_is_traced_anew(traced: list[str]) -> None:
    sealed = Sealed()
    mod = lambda s, b, h, q, k: s + sealed.table[k]  # noqa: E731
    first = lowered(mod)
    sealed.table = torch.ones(SK)
    second = lowered(mod)
    assert len(traced) == 2
    assert second.tensors[0] is sealed.table
    assert second.function is first.function


def test_sizes_that_a_mod_reads_are_part_of_it(traced: list[str]) -> None:
    def last(table: Tensor) -> Mod:
        return lambda s, b, h, q, k: s + table[(q - k) % table.shape[0]]

    sources = [lowered(last(torch.zeros(n))).source for n in (5, 6, 5, 6)]
    assert "floor_mod(x2, 5)" in sources[0] and "floor_mod(x2, 6)" in sources[1]
    assert sources[:2] == sources[2:]
    assert len(traced) == 2


def test_numbers_on_the_cpu_go_with_mods_for_a_gpu() -> None:
    """A 0-d CPU tensor is a number, and a changed one another number."""
    gain = torch.tensor(3.5, device="cpu")
    mod = lambda s, b, h, q, k: s * gain  # noqa: E731
    assert "3.5" in mods.lower_score_mod(mod, None, "meta").source
    gain.fill_(4.5)
    function = mods.lower_score_mod(mod, None, "meta")
    assert "4.5" in function.source and function.tensors == ()


def test_captured_tensors_are_not_kept_alive() -> None:
    table = torch.zeros(H, 9)
    dead = weakref.ref(table)
    lowered(biased(table, 7.0))
    del table
    gc.collect()
    assert dead() is None

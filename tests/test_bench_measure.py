"""The benchmark's clocks: percentiles, graphs, turns, planning, the machine's own limits."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvattn.bench import measure
from kvattn.bench.measure import Times, calls_for, percentile
from kvattn.bench.peers import Call

CPU = torch.device("cpu")


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 25) == 1.25
    assert percentile([5.0], 95) == 5.0
    times = Times.of([2.0, 4.0, 6.0, 8.0, 100.0], calls=2)
    assert (times.median, times.repeats, times.calls) == (3.0, 5, 2)
    assert times.low == pytest.approx(1.2)
    assert times.high == pytest.approx(40.8)


def test_a_graph_holds_all_layers_unless_they_take_long() -> None:
    assert calls_for(1e-6, layers=90) == 90
    assert calls_for(1e-4, layers=2) == 20
    assert calls_for(2e-3, layers=20) == 5
    assert calls_for(1.0, layers=20) == 4


def test_participants_take_turns_over_the_layers() -> None:
    seen: list[tuple[str, int]] = []

    def call(name: str) -> Call:
        def noted(layer: int) -> Tensor:
            seen.append((name, layer))
            return torch.empty(0)

        return Call(noted)

    measure.device_times({"a": call("a"), "b": call("b")}, 2, CPU, repeats=3)
    assert seen == [(name, turn % 2) for turn in range(4) for name in "ab"]


class Recorded:
    """A CUDA graph that only knows what was called while it was recorded."""

    played: ClassVar[list[Recorded]] = []

    def replay(self) -> None:
        Recorded.played.append(self)


class Mark:
    """An event: a moment of a clock that each look moves on by a millisecond."""

    clock = count()

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = next(Mark.clock)

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Mark) -> float:
        return float(end.at - self.at)


def test_graphs_are_replayed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the GPU; a call that cannot be captured is told and left out."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    cuda = {
        "Event": Mark,
        "CUDAGraph": Recorded,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: nullcontext(),
        "graph": lambda graph: nullcontext(),
        "synchronize": lambda: None,
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(Recorded, "played", [])
    layers: list[int] = []

    def run(layer: int) -> Tensor:
        layers.append(layer)
        return torch.empty(0)

    def refuses(layer: int) -> Tensor:
        raise RuntimeError("not while a graph is captured")

    calls = {"a": Call(run), "no": Call(refuses), "b": Call(run)}
    found = measure.device_times(calls, 30, torch.device("cuda"), repeats=3)
    assert isinstance(found["no"], RuntimeError)
    times = found["a"]
    assert isinstance(times, Times)
    assert (times.repeats, times.calls) == (3, 10)  # a millisecond each: ten make a graph
    assert times.median == pytest.approx(1e-3 / 10)
    assert layers[-10:] == list(range(10))
    first, second = Recorded.played[:2]
    assert Recorded.played == [first, second] * 4


def test_planning_is_timed_where_there_is_any() -> None:
    plans: list[int] = []
    call = Call(lambda layer: torch.empty(0), plan=lambda: plans.append(1))
    assert measure.plan_time(replace(call, plan=None), CPU) is None
    times = measure.plan_time(call, CPU, calls=4)
    assert times is not None
    assert times.repeats == 4 < len(plans)


def test_ceilings_are_positive() -> None:
    found = measure.ceilings(CPU)
    assert found.bandwidth > 1e8
    assert found.matmul > 1e8

"""Clocks: calls of several participants in turns, and the machine's own ceilings."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvattn.bench.peers.base import Call

CALLS = 20  # calls in a graph at least, each on another layer while there are any
_LONG = 10e-3  # seconds: a graph that takes longer may hold fewer calls
_HOST_CALLS = 200
_MATRIX = 8192  # rows of the matrices whose product gives the ceiling of prefill


@dataclass(frozen=True)
class Times:
    """Seconds a call.

    Attributes:
        median, low, high: the 50th, 5th and 95th percentile of the repeats.
        repeats: how many there were.
        calls: calls in each of them.
    """

    median: float
    low: float
    high: float
    repeats: int
    calls: int

    @classmethod
    def of(cls, seconds: Sequence[float], calls: int = 1) -> Times:
        """Of repeats of `calls` calls each."""
        one = [s / calls for s in seconds]
        return cls(statistics.median(one), percentile(one, 5), percentile(one, 95), len(one), calls)


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def device_times(
    calls: dict[str, Call], layers: int, device: torch.device, repeats: int
) -> dict[str, Times | Exception]:
    """Each call over all layers, `repeats` times in turns; or what went wrong with it."""
    if device.type == "cuda":
        return _on_gpu(calls, layers, repeats)
    return _on_cpu(calls, layers, repeats)


def _on_gpu(calls: dict[str, Call], layers: int, repeats: int) -> dict[str, Times | Exception]:
    """Replays of one CUDA graph each: no host time, and layers that the cache has forgotten."""
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    found: dict[str, Times | Exception] = {}
    for name, call in calls.items():
        try:
            graphs[name] = _captured(call, layers)
        except Exception as error:  # a peer that cannot be captured is reported as such
            torch.cuda.synchronize()
            found[name] = error
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in graphs}
    for turn in range(repeats + 1):  # the first turn warms up
        for name, (graph, _) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            if turn:
                marks[name].append((start, end))
    torch.cuda.synchronize()
    for name, pairs in marks.items():
        seconds = [start.elapsed_time(end) / 1e3 for start, end in pairs]
        found[name] = Times.of(seconds, graphs[name][1])
    return found


def _captured(call: Call, layers: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """The graph and the number of calls in it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), call.within():
        call.run(0)
        rough = _timed(lambda: call.run(layers - 1), repeats=3)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    count = calls_for(rough, layers)
    graph = torch.cuda.CUDAGraph()
    with call.within(), torch.cuda.graph(graph):
        for i in range(count):
            call.run(i % layers)
    return graph, count


def calls_for(seconds: float, layers: int) -> int:
    """Calls in a graph, given about how long one takes: all layers, unless that takes long."""
    enough = math.ceil(_LONG / max(seconds, 1e-9))
    return max(CALLS, layers) if enough >= CALLS else max(4, enough)


def _on_cpu(calls: dict[str, Call], layers: int, repeats: int) -> dict[str, Times | Exception]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):  # the first turn warms up
        for name, call in calls.items():
            with call.within():
                start = time.perf_counter()
                call.run(turn % layers)
                end = time.perf_counter()
            if turn:
                seconds[name].append(end - start)
    return {name: Times.of(taken) for name, taken in seconds.items()}


def host_time(call: Call, device: torch.device, layers: int, calls: int = _HOST_CALLS) -> Times:
    """Processor time of one eager call, up to its return; the device never falls behind."""
    return _host(lambda i: call.run(i % layers), call, device, calls)


def plan_time(call: Call, device: torch.device, calls: int = 20) -> Times | None:
    """Processor time of planning a step, waiting for the device included, if there is a plan."""
    plan = call.plan
    return None if plan is None else _host(lambda i: plan(), call, device, calls)


def _host(run: Callable[[int], object], call: Call, device: torch.device, calls: int) -> Times:
    seconds = []
    with call.within():
        for i in range(calls + 5):  # the first ones warm up
            if device.type == "cuda" and i % 10 == 0:
                torch.cuda.synchronize()
            start = time.perf_counter()
            run(i)
            end = time.perf_counter()
            if i >= 5:
                seconds.append(end - start)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return Times.of(seconds)


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches when it does nothing else.

    Attributes:
        bandwidth: bytes a second of a long read.
        matmul: operations a second of a large product of random matrices.
        how: in words.
    """

    bandwidth: float
    matmul: float
    how: str


def ceilings(device: torch.device) -> Ceilings:
    """Measured here and now: the figures of data sheets are reached by nobody."""
    return _gpu_ceilings(device) if device.type == "cuda" else _cpu_ceilings()


def _gpu_ceilings(device: torch.device) -> Ceilings:
    total = 4 << 30
    x = torch.zeros(total // 4, dtype=torch.int32, device=device).random_()
    out = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        from kvattn.bench.stream import read

        seconds, how = _timed(lambda: read(x, out)), "a kernel that only reads 4 GiB"
    except ImportError:
        seconds, how = _timed(lambda: x.sum()), "the sum of 4 GiB"
    n = _MATRIX
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(a)
    matmul = 2 * n**3 / _timed(lambda: torch.mm(a, b, out=product))
    return Ceilings(total / seconds, matmul, f"{how}; {n} x {n} x {n} product in bf16")


def _timed(run: Callable[[], object], repeats: int = 15) -> float:
    """Median seconds on the GPU."""
    seconds = []
    for i in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def _cpu_ceilings() -> Ceilings:
    total, n = 256 << 20, 1024
    x = torch.ones(total // 4)
    a, b = torch.randn(n, n), torch.randn(n, n)
    seconds: dict[str, list[float]] = {"read": [], "product": []}
    for _ in range(6):
        start = time.perf_counter()
        x.sum()
        middle = time.perf_counter()
        torch.mm(a, b)
        end = time.perf_counter()
        seconds["read"].append(middle - start)
        seconds["product"].append(end - middle)
    bandwidth, matmul = total / min(seconds["read"]), 2 * n**3 / min(seconds["product"])
    return Ceilings(bandwidth, matmul, f"sum of 256 MiB; {n} x {n} x {n} product in fp32")

"""Calls of one form on a GPU: recorded once, then launched again with other addresses.

A recording runs the launch code without launching: kernels are compiled, and what each argument
is - a tensor of the call, fresh memory, or a constant - is noted. A replay fills in addresses.
Nothing else of a call depends on more than its form, as lengths are read on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from kvattn import checks, values
from kvattn.request import NAMES, Request

CAPTURING = -1  # in place of a stream
_ALIGNED = 15  # bits of an address that kernels for 16-byte aligned memory take to be zero


class Workspaces:
    """Memory that a call needs while it runs, by device and stream.

    Calls on one stream follow each other and share it. A captured call owns its own, since its
    graph may be replayed beside anything. Counters are zero before and after every launch; those
    of captured calls come from an arena that is zero already, so that a graph needs no node to
    clear them.
    """

    _ARENA = 1 << 20  # counters
    _LEAST = 1 << 12

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, torch.device, int], Tensor] = {}
        self._counters: dict[tuple[torch.device, int], Tensor] = {}
        self._arena: dict[torch.device, tuple[Tensor, int]] = {}

    def scratch(self, name: str, count: int, device: torch.device, stream: int) -> Tensor:
        """At least ``count`` float32 numbers, not initialised, other ones for another name."""
        if stream == CAPTURING:
            return torch.empty(count, dtype=torch.float32, device=device)
        key = name, device, stream
        have = self._scratch.get(key)
        if have is None or have.numel() < count:
            have = torch.empty(max(count, self._LEAST), dtype=torch.float32, device=device)
            self._scratch[key] = have
        return have

    def counters(self, count: int, device: torch.device, stream: int) -> Tensor:
        """At least ``count`` int32 zeros."""
        if device not in self._arena:
            zeros = torch.zeros(self._ARENA, dtype=torch.int32, device=device)
            self._arena[device] = zeros, 0
        if stream == CAPTURING:
            arena, first = self._arena[device]
            if first + count > arena.numel():
                return torch.zeros(count, dtype=torch.int32, device=device)
            self._arena[device] = arena, first + count
            return arena[first : first + count]
        have = self._counters.get((device, stream))
        if have is None or have.numel() < count:
            have = torch.zeros(max(count, self._LEAST), dtype=torch.int32, device=device)
            self._counters[device, stream] = have
        return have


WORKSPACES = Workspaces()


def stream_of(device: torch.device) -> int:
    """The current stream, or CAPTURING while a graph is captured on it."""
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return CAPTURING
    return int(driver.active.get_current_stream(device.index))


class Live:
    """How launch code reaches the GPU: kernels are launched at once."""

    def outputs(self, r: Request) -> tuple[Tensor, Tensor]:
        return r.outputs()

    def scratch(self, name: str, count: int, device: torch.device) -> Tensor:
        return WORKSPACES.scratch(name, count, device, stream_of(device))

    def counters(self, count: int, device: torch.device) -> Tensor:
        return WORKSPACES.counters(count, device, stream_of(device))

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: dict[str, Any],
        **options: Any,
    ) -> None:
        """Args by position, the kernel's constexprs by name; options are Triton's own."""
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[grid](*args, **constants, **options)


class Launch(NamedTuple):
    """One launch with holes where addresses go."""

    run: Callable[..., None]
    args: list[Any]
    holes: list[tuple[int, int]]  # (position among the arguments, number of the address)


class Recording(Live):
    """Takes the place of `Live` for one call: compiles its kernels and notes their arguments."""

    def __init__(self, r: Request) -> None:
        self.request = r
        self.tensors = {name: t for name in NAMES if isinstance(t := getattr(r, name), Tensor)}
        self.fresh: list[tuple[Any, Tensor]] = []  # what was asked for, and what it got
        self.launches: list[Launch] = []
        self.sources: list[str | int] = []  # of every address: a tensor's name, or a fresh one
        self.replayable = True

    def outputs(self, r: Request) -> tuple[Tensor, Tensor]:
        out, lse = r.outputs()
        if r.out is None:
            self.fresh.append(("out", out))
        if r.return_lse:
            self.fresh.append(("lse", lse))
        return out, lse

    def scratch(self, name: str, count: int, device: torch.device) -> Tensor:
        got = torch.empty(count, dtype=torch.float32, device=device)
        self.fresh.append(((WORKSPACES.scratch, (name, count)), got))
        return got

    def counters(self, count: int, device: torch.device) -> Tensor:
        got = torch.empty(count, dtype=torch.int32, device=device)
        self.fresh.append(((WORKSPACES.counters, (count,)), got))
        return got

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: dict[str, Any],
        **options: Any,
    ) -> None:
        compiled = kernel.warmup(*args, grid=grid, **constants, **options)
        grid = (*grid, 1, 1)[:3]
        values = [*args, *(constants[name] for name in kernel.arg_names[len(args) :])]
        holes = []
        for position, value in enumerate(values):
            if isinstance(value, Tensor):
                holes.append((position, self._source(value)))
            elif isinstance(value, tuple) and any(isinstance(x, Tensor) for x in value):
                self.replayable = False
        self.launches.append(Launch(compiled[grid], values, holes))

    def _source(self, tensor: Tensor) -> int:
        """The number of the address that an argument is."""
        source = self._origin(tensor)
        if source is None:
            self.replayable = False  # a copy that the launch code has made
            return 0
        if source not in self.sources:
            self.sources.append(source)
        return self.sources.index(source)

    def _origin(self, tensor: Tensor) -> str | int | None:
        for number, (_, fresh) in enumerate(self.fresh):
            if tensor is fresh:
                return number
        for name, given in self.tensors.items():
            if tensor is given:
                return name
        alike = [n for n, t in self.tensors.items() if t.data_ptr() == tensor.data_ptr()]
        return alike[0] if len(alike) == 1 and tensor.numel() > 0 else None

    def replay(self) -> Replay | None:
        """The recorded call for other tensors; None if it does more than launch kernels."""
        return Replay(self) if self.replayable and self.launches else None


class Replay:
    """Launches what was recorded, for the tensors of another call of the form."""

    def __init__(self, recording: Recording) -> None:
        r = recording.request
        self.device = r.lead.device
        self.on_gpu = self.device.type == "cuda"
        self.launches = recording.launches
        self.held = recording.tensors  # for those that the next call does not name
        self.names = [source for source in recording.sources if isinstance(source, str)]
        self.aligned = [self.held[name].data_ptr() & _ALIGNED == 0 for name in self.names]
        self.sizes = [checks.extent(self.held[name]) for name in self.names]
        self.fresh = [kind for kind, _ in recording.fresh]
        order = {source: n for n, source in enumerate((*self.names, *range(len(self.fresh))))}
        places = [order[source] for source in recording.sources]
        for launch in self.launches:
            launch.holes[:] = [(position, places[source]) for position, source in launch.holes]
        self.recorded = r
        self.no_lse = r.lead.new_empty(0, dtype=torch.float32)

    def __call__(self, given: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """out and lse, the latter empty unless asked for; None where the call needs a closer look.

        That is in checked mode, on another device than the current one, for memory aligned
        otherwise, and where out may share memory with another tensor.
        """
        device = self.device
        if values.strict() or driver.active.get_current_device() != device.index:
            return None
        tensors = [given[name] if name in given else self.held[name] for name in self.names]
        addresses = [tensor.data_ptr() for tensor in tensors]
        for address, aligned in zip(addresses, self.aligned, strict=True):
            if aligned and address & _ALIGNED:
                return None
        out, lse = given.get("out"), self.no_lse
        if out is not None and self._meets(addresses):
            return None
        stream = driver.active.get_current_stream(device.index)
        captured = self.on_gpu and torch.cuda.is_current_stream_capturing()
        owner = CAPTURING if captured else stream
        held = []
        for kind in self.fresh:
            if kind == "out":
                made = out = self.recorded.new_out()
            elif kind == "lse":
                made = lse = self.recorded.new_lse()
            else:
                make, size = kind
                made = make(*size, device, owner)
            held.append(made)  # until the launches are in the stream's queue
            addresses.append(made.data_ptr())
        for launch in self.launches:
            args = launch.args.copy()
            for position, number in launch.holes:
                args[position] = addresses[number]
            launch.run(*args, stream=stream)
        assert out is not None
        return out, lse

    def _meets(self, addresses: list[int]) -> bool:
        """Whether the caller's out lies among the bytes of another tensor."""
        if "out" not in self.names:
            return True
        own = self.names.index("out")
        first, last = addresses[own], addresses[own] + self.sizes[own]
        return any(
            first < address + size and address < last
            for n, (address, size) in enumerate(zip(addresses, self.sizes, strict=True))
            if n != own
        )


_LIVE = Live()
_target: ContextVar[Live] = ContextVar("_target", default=_LIVE)


def target() -> Live:
    """Where launch code sends its launches: to the GPU, or into a recording."""
    return _target.get()


def record(r: Request, run: Callable[[Request], object]) -> Replay | None:
    """Records what `run` would launch for a call; nothing is launched."""
    recording = Recording(r)
    token = _target.set(recording)
    try:
        run(r)
    finally:
        _target.reset(token)
    return recording.replay()

"""Calls of one form on a GPU: recorded once, then launched again with other addresses.

A recording runs the launch code without launching: kernels are compiled, and what each argument
is - a tensor of the call, fresh memory, or a constant - is noted. A replay fills in addresses.
Nothing else of a call depends on more than its form, as lengths are read on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from kvattn import checks, values
from kvattn.backends.triton_direct import Box, Launch, prepared
from kvattn.mods.fingerprint import captured
from kvattn.plan import Prepared
from kvattn.request import NAMES, Request

CAPTURING = -1  # in place of a stream
_ALIGNED = 15  # bits of an address that launch code and kernels may take to be zero


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

    def passing(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory between two launches of a call, not initialised; too large to be kept."""
        return torch.empty(shape, dtype=dtype, device=device)

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


class _Space(NamedTuple):
    """A workspace that calls share."""

    make: Callable[..., Tensor]
    size: tuple[Any, ...]


class _Passing(NamedTuple):
    """Memory of one call."""

    shape: torch.Size
    dtype: torch.dtype


class Recording(Live):
    """Takes the place of `Live` for one call: compiles its kernels and notes their arguments."""

    def __init__(self, r: Request) -> None:
        self.request = r
        self.tensors = {name: t for name in NAMES if isinstance(t := getattr(r, name), Tensor)}
        self.fresh: list[tuple[Any, Tensor]] = []  # what was asked for, and what it got
        self.launches: list[Launch] = []
        self.sources: list[str | int] = []  # of every address: a tensor's name, or a fresh one
        self.replayable = True
        seen = captured([r.score_mod, r.mask_mod, r.aux_tensors], r.lead.device)
        self.captured = [] if seen is None else seen[1]

    def outputs(self, r: Request) -> tuple[Tensor, Tensor]:
        out, lse = r.outputs()
        if r.out is None:
            self.fresh.append(("out", out))
        if r.return_lse:
            self.fresh.append(("lse", lse))
        return out, lse

    def scratch(self, name: str, count: int, device: torch.device) -> Tensor:
        got = torch.empty(count, dtype=torch.float32, device=device)
        self.fresh.append((_Space(WORKSPACES.scratch, (name, count)), got))
        return got

    def counters(self, count: int, device: torch.device) -> Tensor:
        got = torch.empty(count, dtype=torch.int32, device=device)
        self.fresh.append((_Space(WORKSPACES.counters, (count,)), got))
        return got

    def passing(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        got = super().passing(shape, dtype, device)
        self.fresh.append((_Passing(shape, dtype), got))
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
            elif isinstance(getattr(value, "base", None), Tensor):
                holes.append((position, self._source(value.base)))
                values[position] = Box(value)
            elif isinstance(value, tuple):
                values[position] = tuple([self._read(x) for x in value])
        self.launches.append(prepared(compiled, grid, values, holes))

    def _read(self, x: Any) -> Any:
        """A number as it is; the address of a tensor that a mod has captured, part of the form."""
        if not isinstance(x, Tensor):
            return x
        self.replayable &= any(x is tensor for tensor in self.captured)
        return x.data_ptr()

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
        named = [name for name, given in self.tensors.items() if tensor is given]
        if named:  # under two names in this call, but not in every call of the form
            return named[0] if len(named) == 1 else None
        alike = [n for n, t in self.tensors.items() if t.data_ptr() == tensor.data_ptr()]
        return alike[0] if len(alike) == 1 and tensor.numel() > 0 else None

    def prepared(self) -> Prepared | None:
        """The recorded call for other tensors; None if it does more than launch kernels."""
        if not (self.replayable and self.launches):
            return None
        replay = Replay(self)
        return Prepared(replay.names, replay)


def _zeros(address: int) -> int:
    """The low bits that are zero in an address, up to 16-byte alignment."""
    return (address & -address) - 1 & _ALIGNED


class Replay:
    """Launches what was recorded, for the tensors of another call of the form."""

    def __init__(self, recording: Recording) -> None:
        r = recording.request
        self.device = r.lead.device
        self.on_gpu = self.device.type == "cuda"
        tensors, sources = recording.tensors, recording.sources
        self.names = tuple(source for source in sources if isinstance(source, str))
        self.zeros = [_zeros(tensors[name].data_ptr()) for name in self.names]
        self.sizes = [checks.extent(tensors[name]) for name in self.names]
        self.out = self.names.index("out") if "out" in self.names else None
        self.given_out = r.out is not None
        self.captured = [(x.data_ptr(), checks.extent(x)) for x in recording.captured]
        kinds = [kind for kind, _ in recording.fresh]
        spaces = [n for n, kind in enumerate(kinds) if isinstance(kind, _Space)]
        self.spaces = [kinds[n] for n in spaces]
        own = [n for n, kind in enumerate(kinds) if not isinstance(kind, _Space)]
        self.own = [kinds[n] for n in own]
        order = {source: n for n, source in enumerate((*self.names, *own, *spaces))}
        places = [order[source] for source in sources]
        self.launches = [_Filled.of(launch, places, len(order)) for launch in recording.launches]
        self.kept: dict[int, tuple[list[Tensor], list[int]]] = {}  # workspaces by stream
        self.outputs = r.hollow()
        self.like = self._like(r)
        self.no_lse = r.lead.new_empty(0, dtype=torch.float32)

    def _like(self, r: Request) -> int | None:
        """The tensor that a fresh out is like in shape, layout and dtype."""
        if "q" not in self.names or r.q is not r.lead:  # no rows: only the append was launched
            return None
        alike = r.whole and r.lead.shape == r.out_shape and r.lead.dtype == r.out_dtype
        return self.names.index("q") if alike and r.lead.is_contiguous() else None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, Tensor] | None:
        """out and lse, the latter empty unless asked for; None where the call needs a closer look.

        That is in checked mode, on another device than the current one, for memory aligned
        otherwise, and where out may share memory with another tensor.
        """
        active = driver.active
        if values.strict() or active.get_current_device() != self.device.index:
            return None
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        if bits & _ALIGNED and self._unlike(addresses):
            return None
        if self.given_out and self._meets(addresses):
            return None
        out = None if self.out is None else tensors[self.out]
        lse = self.no_lse
        stream = active.get_current_stream(self.device.index)
        held = []
        for kind in self.own:
            if kind == "out":
                like = self.like
                made = self.outputs.new_out() if like is None else torch.empty_like(tensors[like])
                out = made
            elif kind == "lse":
                made = lse = self.outputs.new_lse()
            else:
                made = torch.empty(kind.shape, dtype=kind.dtype, device=self.device)
            held.append(made)
            addresses.append(made.data_ptr())
        if self.spaces:
            held += self._spaces(stream, addresses)
        for launch in self.launches:
            launch(addresses, stream)
        del held  # until here: the launches are in the stream's queue
        assert out is not None
        return out, lse

    def _spaces(self, stream: int, addresses: list[int]) -> list[Tensor]:
        """Workspaces of the call, their addresses added; a stream's calls share them."""
        captured = self.on_gpu and torch.cuda.is_current_stream_capturing()
        kept = None if captured else self.kept.get(stream)
        if kept is None:
            owner = CAPTURING if captured else stream
            held = [make(*size, self.device, owner) for make, size in self.spaces]
            kept = held, [space.data_ptr() for space in held]
            if not captured:
                self.kept[stream] = kept
        addresses += kept[1]
        return kept[0]

    def _unlike(self, addresses: list[int]) -> bool:
        """Whether memory is less aligned than when the kernels were chosen and compiled."""
        return any(address & zeros for address, zeros in zip(addresses, self.zeros, strict=True))

    def _meets(self, addresses: list[int]) -> bool:
        """Whether the caller's out lies among the bytes of another tensor."""
        own = self.out
        if own is None:
            return True
        first, last = addresses[own], addresses[own] + self.sizes[own]
        others = zip(addresses, self.sizes, strict=True)
        given = [other for n, other in enumerate(others) if n != own]
        return any(
            first < address + size and address < last for address, size in given + self.captured
        )


class _Filled(NamedTuple):
    """A launch whose arguments are picked from constants and a call's addresses in one step."""

    run: Callable[[Sequence[Any], int], None]
    constants: list[Any]
    boxes: list[tuple[Box, int]]  # over the address of this number
    pick: itemgetter[Any]

    @classmethod
    def of(cls, launch: Launch, places: list[int], count: int) -> _Filled:
        """`places` are the numbers of addresses in a call, `count` how many there are."""
        holes = {position: places[source] for position, source in launch.holes}
        constants = [value for n, value in enumerate(launch.args) if n not in holes]
        numbers, first = iter(range(len(constants))), len(constants)
        boxes: list[tuple[Box, int]] = []
        order = []
        for position, value in enumerate(launch.args):
            if position not in holes:
                order.append(next(numbers))
            elif isinstance(value, Box):
                order.append(first + count + len(boxes))
                boxes.append((value, holes[position]))
            else:
                order.append(first + holes[position])
        return cls(launch.run, constants, boxes, itemgetter(*order))

    def __call__(self, addresses: list[int], stream: int) -> None:
        over = [box.over(addresses[number]) for box, number in self.boxes]
        self.run(self.pick([*self.constants, *addresses, *over]), stream)


_LIVE = Live()
_target: ContextVar[Live] = ContextVar("_target", default=_LIVE)


def target() -> Live:
    """Where launch code sends its launches: to the GPU, or into a recording."""
    return _target.get()


def record(r: Request, run: Callable[[Request], object]) -> Prepared | None:
    """Records what `run` would launch for a call; nothing is launched."""
    recording = Recording(r)
    token = _target.set(recording)
    try:
        run(r)
    finally:
        _target.reset(token)
    return recording.prepared()

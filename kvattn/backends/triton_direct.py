"""Launching a compiled kernel without what Triton does for every launch anew.

Half of the host's time for a launch goes into a look for hooks and into TMA descriptors. Of the
release named here it is known what its launchers are called with; others launch in their own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.compiler import CompiledKernel

_KNOWN = triton.__version__ == "3.6.0"
_MOST = 4096  # addresses whose descriptors are kept


class Box:
    """What TMA knows of a tensor, over an address; a kernel's launcher asks nothing else."""

    def __init__(self, like: Any, address: int = 0) -> None:
        self.shape, self.strides, self.padding = like.shape, like.strides, like.padding
        self.address = address

    @property
    def base(self) -> Box:
        return self

    def data_ptr(self) -> int:
        return self.address

    def over(self, address: int) -> Any:
        """What is passed for it where the tensor lies at an address."""
        return Box(self, address)


class Map(Box):
    """The same, for a launcher that takes finished descriptors: they are kept by address."""

    def __init__(self, like: Box, encode: Callable[[Box], Any]) -> None:
        super().__init__(like)
        self._encode, self._made = encode, dict[int, Any]()

    def over(self, address: int) -> Any:
        if address not in self._made:
            if len(self._made) >= _MOST:
                self._made.clear()
            self._made[address] = self._encode(Box(self, address))
        return self._made[address]


class Launch(NamedTuple):
    """One launch, with holes where addresses go, or boxes over addresses."""

    run: Callable[[Sequence[Any], int], None]  # (arguments, stream)
    args: list[Any]
    holes: list[tuple[int, int]]  # (position among the arguments, number of the address)


def prepared(
    compiled: Any, grid: tuple[int, ...], args: list[Any], holes: list[tuple[int, int]]
) -> Launch:
    """The launch of a compiled kernel; `args` hold a `Box` for each TMA descriptor."""
    usual = compiled[grid]

    def hooked(args: Sequence[Any], stream: int) -> None:
        usual(*args, stream=stream)

    if not (_KNOWN and isinstance(compiled, CompiledKernel)):
        return Launch(hooked, args, holes)
    launcher, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return Launch(hooked, args, holes)
    launch, hooks = launcher.launch, knobs.runtime
    kinds = launcher.launch_cooperative_grid, launcher.launch_pdl
    if any(isinstance(value, Box) for value in args):
        metas = compiled.metadata.tensordesc_meta
        if not metas or None in metas:
            return Launch(hooked, args, holes)
        launch = launch.__closure__[launch.__code__.co_freevars.index("launcher")].cell_contents
        args, holes = _encoded(args, holes, metas)

    def direct(args: Sequence[Any], stream: int) -> None:
        about = enter = leave = None
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # a profiler's
            enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
            about = compiled.launch_metadata(grid, stream)
        launch(*grid, stream, function, *kinds, None, None, packed, about, enter, leave, *args)

    return Launch(direct, args, holes)


def _encoded(
    args: list[Any], holes: list[tuple[int, int]], metas: Sequence[Any]
) -> tuple[list[Any], list[tuple[int, int]]]:
    """The arguments with a descriptor, its shape and its strides in place of every box."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    numbers, left = dict(holes), iter(metas)
    wide: list[Any] = []
    moved = []
    for position, value in enumerate(args):
        if position in numbers:
            moved.append((len(wide), numbers[position]))
        if isinstance(value, Box):
            described = Map(value, partial(_descriptor, make_tensordesc_arg, next(left)))
            wide += [described, *value.shape, *value.strides]
        else:
            wide.append(value)
    return wide, moved


def _descriptor(make: Callable[[Box, Any], list[Any]], meta: Any, box: Box) -> Any:
    """A TMA descriptor; what else Triton passes for it does not depend on the address."""
    return make(box, meta)[0]

"""What the text of a device function is built from: values, grids, and the lines that make them.

A `Value` is a number for each score, or one for all. A `Grid` still has dimensions to index: a
captured tensor, or one indexed in part. Grids are lazy; they become loads where they are indexed,
guarded so that nothing outside a tensor is ever read.

The text holds $n0_1 and $s0_1 for size and stride 1 of the captured tensor 0, and $w0 for the
width of its offsets; `fill` puts numbers or arguments in their place.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from kvattn.errors.mod_kinds import ModCaptureError, ModIndexError, ModLoweringError

TYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}
# Narrow numbers are held wide and rounded after every operation, as torch does.
_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
}


class Value(NamedTuple):
    """A number for each score, or one for all: a name or a literal in the device function."""

    code: str
    dtype: torch.dtype
    smooth: bool = False  # follows the scores, so that its last bits decide nothing
    natural: bool = False  # never negative
    scalar: bool = False  # one for all
    literal: float | None = None
    product: tuple[str, float] | None = None  # of a score's fp32 value and a number
    tanh: tuple[str, float] | None = None  # of such a product
    bound: float = 0.0  # its size is known not to exceed; 0 if unknown


class Spot(NamedTuple):
    """An index within one dimension of a tensor, and the condition under which it is inside."""

    code: str
    dtype: torch.dtype
    guard: str = ""


class Grid(NamedTuple):
    """Elements that are still to be picked by index."""

    shape: tuple[str, ...]  # code of the sizes
    dims: tuple[int, ...]  # the sizes when the mod was traced
    tiled: bool  # a grid for each score, not one for all
    dtype: torch.dtype
    at: Callable[[Sequence[Spot]], Value]  # the element at an index for each dimension


Operand = Value | Grid | float | None
Rule = Callable[..., Value]


class Body:
    """The lines of one device function, and the operations that write them."""

    def __init__(self, argument: str) -> None:
        self.argument = argument  # score_mod or mask_mod: the name for errors
        self.lines: list[str] = []
        self.indices: set[Node] = set()  # the mod's arguments other than the score
        self.key = ""  # the name of the key's index
        self.bound = 0.0  # of the size of results; 0 if unknown
        self.fixed = False  # the text holds for these sizes of captured tensors only
        self._names = (f"x{i}" for i in itertools.count())

    def write(self, code: str) -> str:
        """A new line that gives `code` a name."""
        name = next(self._names)
        self.lines.append(f"{name} = {code}")
        return name

    def let(
        self, code: str, dtype: torch.dtype, *operands: Operand, natural: bool = False
    ) -> Value:
        """The value of `code`, rounded to `dtype`; smooth if an operand is."""
        if dtype not in TYPES:
            raise ModLoweringError(self.argument, f"a result in {dtype}", "bool, int and float")
        if dtype in _WIDE:
            code = f"tl.cast(tl.cast({code}, {TYPES[dtype]}), {TYPES[_WIDE[dtype]]})"
        smooth = any(isinstance(x, Value) and x.smooth for x in operands)
        natural |= dtype in (torch.bool, torch.uint8)
        return Value(self.write(code), dtype, smooth, natural)

    def cast(self, x: Operand, dtype: torch.dtype) -> str:
        """`x` as an operand of an operation in `dtype`."""
        if not isinstance(x, Value):
            assert not isinstance(x, Grid) and x is not None
            return literal(x, dtype)
        if x.literal is not None:
            return literal(x.literal, dtype)
        wide, held = _WIDE.get(dtype, dtype), _WIDE.get(x.dtype, x.dtype)
        if dtype == x.dtype or (wide == held and dtype not in _WIDE):
            return x.code
        if dtype == torch.bool:
            return f"({x.code} != 0)"
        if dtype in _WIDE:
            return self.let(x.code, dtype).code
        return f"tl.cast({x.code}, {TYPES[dtype]})"

    def captured(self, slot: int, tensor: Tensor) -> Grid:
        """A captured tensor whose pointer is aux[slot]."""
        dtype = tensor.dtype
        if dtype not in TYPES:
            got = f"{dtype}, shape {tuple(tensor.shape)}"
            raise ModCaptureError(
                self.argument, got, "bool, int8 to int64, uint8, 16- to 64-bit float"
            )

        def at(index: Sequence[Spot]) -> Value:
            steps = [
                f"tl.cast({i.code}, $w{slot}) * $s{slot}_{d}"
                for d, i in enumerate(index)
                if i.code != "0"
            ]
            place = " + ".join([f"aux[{slot}]", *steps])
            guard = " & ".join(i.guard for i in index if i.guard)
            if guard and self.key not in [i.code for i in index]:
                read = f"math.fetch({place}, {guard})"
            else:  # neighbours in memory are read in vectors
                read = f"tl.load({place}{guard and f', mask={guard}, other=0'})"
            if dtype in _WIDE:
                read = f"tl.cast({read}, {TYPES[_WIDE[dtype]]})"
            return Value(self.write(read), dtype, natural=dtype in (torch.bool, torch.uint8))

        sizes = tuple(f"$n{slot}_{d}" for d in range(tensor.dim()))
        return Grid(sizes, tuple(tensor.shape), False, dtype, at)

    def pick(self, grid: Grid, index: Sequence[Value]) -> Value | Grid:
        """grid[index]: negative indices count from the end; a grid if dimensions are left."""
        spots = [self._spot(i, n) for i, n in zip(index, grid.shape, strict=False)]
        used = len(spots)
        if used == len(grid.shape):
            return grid.at(spots)

        def at(rest: Sequence[Spot]) -> Value:
            return grid.at([*spots, *rest])

        return Grid(grid.shape[used:], grid.dims[used:], True, grid.dtype, at)

    def _spot(self, i: Value, size: str) -> Spot:
        if not i.natural:
            code = i.code if i.literal is None else f"tl.full([], {i.code}, {TYPES[i.dtype]})"
            i = self.let(f"math.wrapped({code}, {size})", i.dtype)
        # Both sides even of natural indices: they may have overflowed, or belong to no query.
        return Spot(i.code, i.dtype, f"({i.code} >= 0) & ({i.code} < {size})")

    def only(self, x: Grid) -> Value:
        """The element of a grid that has one."""
        if x.tiled or math.prod(x.dims) != 1:
            raise ModIndexError(self.argument, f"all of a tensor of shape {x.dims}", "an element")
        self.fixed |= len(x.dims) > 0
        return x.at([number(0)] * len(x.dims))

    def each(self, node: Node, rule: Rule, operands: Sequence[Operand]) -> Operand:
        """An element-wise operation; lazily, where something is still to be indexed."""
        tiles = any(isinstance(x, Value) and x.literal is None and not x.scalar for x in operands)
        grids = [x for x in operands if isinstance(x, Grid) and x.dims]
        if any(x.tiled or not tiles or math.prod(x.dims) != 1 for x in grids):
            return self._lift(node, rule, operands, grids, tiles)
        return rule(self, node, *(self.only(x) if isinstance(x, Grid) else x for x in operands))

    def _lift(
        self,
        node: Node,
        rule: Rule,
        operands: Sequence[Operand],
        grids: Sequence[Grid],
        tiles: bool,
    ) -> Grid:
        dims = tuple(torch.broadcast_shapes(*(x.dims for x in grids)))
        if tiles or any(x.tiled and len(x.dims) < len(dims) for x in grids):
            got = f"a tensor of shape {dims} in {node.target}"
            raise ModIndexError(self.argument, got, "indexed elements")
        tiled, alone = any(x.tiled for x in grids), len(grids) == 1
        self.fixed |= not alone

        def at(index: Sequence[Spot]) -> Value:
            picked = (x.at(aligned(index, x.dims)) if isinstance(x, Grid) else x for x in operands)
            return rule(self, node, *picked)

        shape = grids[0].shape if alone else tuple(map(str, dims))
        return Grid(shape, dims, tiled, dtype_of(node), at)


def literal(x: float, dtype: torch.dtype) -> str:
    """A Python number as code of `dtype`."""
    if dtype == torch.bool:
        return str(bool(x))
    if not dtype.is_floating_point:
        half = 2 ** (63 if dtype == torch.int64 else 31)
        number = (int(x) + half) % (2 * half) - half  # as integers of that width wrap
        return str(number) if number >= 0 else f"({number})"
    x = float(x)
    if math.isfinite(x):
        return repr(x) if math.copysign(1, x) > 0 else f"({x!r})"
    return f"float('{x}')"


def constant(x: float, dtype: torch.dtype) -> Value:
    """A number that is the same for every score and known when the mod is traced."""
    return Value(literal(x, dtype), dtype, natural=x >= 0, scalar=True, literal=x)


def number(x: int, size: str = "") -> Spot:
    """An index that is known when the mod is traced, within a size that may not be."""
    return Spot(str(x), torch.int32, f"({x} < {size})" if size else "")


def meta(x: Any) -> Any:
    """The traced tensor of a node (shape and dtype, no data), or the number itself."""
    return x.meta["val"] if isinstance(x, Node) else x


def dtype_of(node: Node) -> torch.dtype:
    dtype: torch.dtype = meta(node).dtype
    return dtype


def noted(x: Operand, node: Node) -> Operand:
    """`x`, which notes whether it is one for all scores."""
    traced = meta(node)
    one = isinstance(traced, Tensor) and traced.dim() == 0
    return x._replace(scalar=one) if isinstance(x, Value) else x


def aligned(index: Sequence[Spot], dims: Sequence[int]) -> list[Spot]:
    """The index of a grid that was broadcast: aligned from the right, 0 where its size is 1."""
    own = index[len(index) - len(dims) :]
    return [number(0) if n == 1 else i for i, n in zip(own, dims, strict=True)]


class Layout(NamedTuple):
    """What of a tensor can become part of the code."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @property
    def reach(self) -> int:
        """The largest offset within the tensor, in elements."""
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True) if n)


def layouts(tensors: Sequence[Tensor]) -> tuple[Layout, ...]:
    return tuple([Layout(x.dtype, x.shape, x.stride()) for x in tensors])


def fill(text: str, tensors: Sequence[Layout], dynamic: bool) -> tuple[str, tuple[int, ...]]:
    """Puts sizes and strides into a text: as numbers, or as arguments that follow the pointers.

    Returns the text and the arguments. These are 2 * n + 1: odd and mostly above 1, so that Triton
    does not compile anew for numbers that are 1 or divisible by 16.
    """
    sizes: dict[str, int] = {}

    def put(found: re.Match[str]) -> str:
        kind, tensor = found[1], tensors[int(found[2])]
        if kind == "w":
            return "tl.int64" if tensor.reach >= 2**31 else "tl.int32"
        size = (tensor.shape if kind == "n" else tensor.strides)[int(found[3])]
        if not dynamic or (kind == "s" and size in (0, 1)):
            return str(size)
        sizes.setdefault(found[0], 2 * size + 1)
        return f"(aux[{len(tensors) + list(sizes).index(found[0])}] >> 1)"

    return re.sub(r"\$([nsw])(\d+)(?:_(\d+))?", put, text), tuple(sizes.values())

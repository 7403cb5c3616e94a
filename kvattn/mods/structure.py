"""Operations that move dimensions about, pick elements or fill: they compute little themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from kvattn.errors.mod_kinds import ModIndexError, ModLoweringError
from kvattn.mods.lowering import (
    Body,
    Grid,
    Operand,
    Spot,
    Value,
    aligned,
    constant,
    dtype_of,
    literal,
    meta,
    noted,
    number,
)

Env = Mapping[Node, Operand]
Structure = Callable[[Body, Env, Node], Operand]

_UNROLLED = 128  # elements of a reduction over trailing dimensions, written out one by one


def name_of(node: Node) -> str:
    """aten.add.Tensor -> add; other operations by their full name."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    return str(packet.__name__) if str(packet).startswith("aten.") else str(node.target)


def operand(body: Body, env: Env, x: Any) -> Operand:
    """What an argument of a node stands for."""
    if isinstance(x, Node):
        return env[x]
    if x is None or isinstance(x, (bool, int, float)):
        return x
    raise ModLoweringError(body.argument, f"the constant {x!r}", "real numbers")


def _argument(node: Node, i: int, default: Any = None) -> Any:
    return node.args[i] if len(node.args) > i else default


def _grid(body: Body, env: Env, node: Node, dim: int) -> tuple[Grid, int]:
    """The grid that the node works on, and which of its dimensions `dim` is."""
    x, rank = operand(body, env, node.args[0]), meta(node.args[0]).dim()
    place = dim % rank - (rank - len(x.dims)) if isinstance(x, Grid) and rank else -1
    if not isinstance(x, Grid) or place < 0:
        got = f"{node.target} across scores or indices"
        raise ModLoweringError(body.argument, got, "operations on single elements")
    return x, place


def _without(items: Sequence[Any], d: int) -> tuple[Any, ...]:
    return (*items[:d], *items[d + 1 :])


def _with(items: Sequence[Any], d: int, item: Any) -> tuple[Any, ...]:
    return (*items[:d], item, *items[d:])


def _same(body: Body, env: Env, node: Node) -> Operand:
    """clone, expand, view and their like, as long as they are what broadcasting does by itself."""
    x = operand(body, env, node.args[0])
    before, after = tuple(meta(node.args[0]).shape), tuple(meta(node).shape)
    if before == after or (isinstance(x, Value) and x.scalar):
        return x
    expands = name_of(node) == "expand"
    if expands and isinstance(x, Value) and len(before) == len(after):
        return x
    if expands and isinstance(x, Grid) and not x.tiled:
        grid, body.fixed = x, True
        at = lambda index: grid.at(aligned(index, grid.dims))  # noqa: E731
        return Grid(tuple(map(str, after)), after, False, x.dtype, at)
    got = f"{node.target} from shape {before} to {after}"
    raise ModLoweringError(body.argument, got, "operations on single elements")


def _cast(body: Body, env: Env, node: Node) -> Operand:
    x, dtype = operand(body, env, node.args[0]), dtype_of(node)
    if isinstance(x, (Value, Grid)) and x.dtype == dtype:
        return x
    if isinstance(x, Value) and x.literal is not None:
        return constant(torch.tensor(x.literal).to(dtype).item(), dtype)
    return noted(body.each(node, _converted, [x]), node)


def _converted(body: Body, node: Node, x: Operand) -> Value:
    natural = isinstance(x, Value) and x.natural
    return body.let(body.cast(x, dtype_of(node)), dtype_of(node), x, natural=natural)


def _index(body: Body, env: Env, node: Node) -> Operand:
    x, index = operand(body, env, node.args[0]), list(_argument(node, 1))
    if isinstance(x, Value) and x.literal is not None:
        return x
    while index and index[-1] is None:
        index.pop()
    picks = [operand(body, env, i) for i in index]
    values = [body.only(i) if isinstance(i, Grid) else i for i in picks]
    if not isinstance(x, Grid) or x.tiled or not all(isinstance(i, Value) for i in values):
        got = f"an index into a tensor of shape {tuple(meta(node.args[0]).shape)}"
        raise ModIndexError(body.argument, got, "one index for each dimension, from the first")
    found = body.pick(x, values)  # type: ignore[arg-type]
    if isinstance(found, Grid):
        return found._replace(tiled=meta(node).dim() > len(found.dims))
    return noted(found, node)


def _select(body: Body, env: Env, node: Node) -> Operand:
    grid, d = _grid(body, env, node, _argument(node, 1))
    place = _argument(node, 2)
    if place < 0:
        body.fixed, place = True, place + grid.dims[d]
    return noted(_selected(grid, d, place), node)


def _selected(grid: Grid, d: int, place: int) -> Value | Grid:
    spot = number(place, grid.shape[d])

    def at(index: Sequence[Spot]) -> Value:
        return grid.at(_with(index, d, spot))

    if grid.tiled and len(grid.dims) == 1:
        return at([])
    return grid._replace(shape=_without(grid.shape, d), dims=_without(grid.dims, d), at=at)


def _slice(body: Body, env: Env, node: Node) -> Operand:
    grid, d = _grid(body, env, node, _argument(node, 1, 0))
    first, step, size = _argument(node, 2) or 0, _argument(node, 4, 1), grid.dims[d]
    first = min(max(first + size if first < 0 else first, 0), size)
    left = meta(node).shape[meta(node).dim() - len(grid.dims) + d]
    if first == 0 and left == size:
        return grid
    body.fixed = True

    def at(index: Sequence[Spot]) -> Value:
        moved = index[d]._replace(code=body.write(f"{index[d].code} * {step} + {first}"))
        return grid.at(_with(_without(index, d), d, moved))

    shape, dims = _without(grid.shape, d), _without(grid.dims, d)
    return grid._replace(shape=_with(shape, d, str(left)), dims=_with(dims, d, left), at=at)


def _permute(body: Body, env: Env, node: Node) -> Operand:
    """t, transpose and permute of a captured tensor."""
    rank, name = meta(node).dim(), name_of(node)
    order = list(range(rank))
    if name == "permute":
        order = [d % rank for d in _argument(node, 1)]
    elif rank > 1:
        a, b = _argument(node, 1, 0) % rank, _argument(node, 2, 1) % rank
        order[a], order[b] = b, a
    grid, _ = _grid(body, env, node, 0)

    def at(index: Sequence[Spot]) -> Value:
        return grid.at([index[order.index(d)] for d in range(rank)])

    shape, dims = tuple(grid.shape[d] for d in order), tuple(grid.dims[d] for d in order)
    return grid._replace(shape=shape, dims=dims, at=at)


def _unsqueeze(body: Body, env: Env, node: Node) -> Operand:
    x, rank = operand(body, env, node.args[0]), meta(node).dim()
    d = _argument(node, 1) % rank - (rank - 1 - (len(x.dims) if isinstance(x, Grid) else 0))
    if isinstance(x, Grid) and d >= 0:
        grid = x
        at = lambda index: grid.at(_without(index, d))  # noqa: E731
        return x._replace(shape=_with(x.shape, d, "1"), dims=_with(x.dims, d, 1), at=at)
    if isinstance(x, Value) and d == 0:
        value = x
        return Grid(("1",), (1,), not x.scalar, x.dtype, lambda _: value)
    raise ModLoweringError(body.argument, f"{node.target} before scores", "trailing dimensions")


def _squeeze(body: Body, env: Env, node: Node) -> Operand:
    dim = _argument(node, 1)
    if not isinstance(dim, int):
        raise ModLoweringError(body.argument, f"{node.target} without one dim", "squeeze(-1)")
    grid, d = _grid(body, env, node, dim)
    return grid if grid.dims[d] != 1 else noted(_selected(grid, d, 0), node)


def _reduce(combine: str, body: Body, env: Env, node: Node) -> Operand:
    """sum, any and the like over one trailing dimension, written out element by element."""
    dims = _argument(node, 1)
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    if len(dims) != 1 or _argument(node, 2, False):
        got = f"{node.target} over all or several dimensions, or with keepdim"
        raise ModLoweringError(body.argument, got, "one trailing dimension")
    grid, d = _grid(body, env, node, dims[0])
    if not 0 < grid.dims[d] <= _UNROLLED:
        got = f"{node.target} over {grid.dims[d]} elements"
        raise ModLoweringError(body.argument, got, f"1 to {_UNROLLED} elements")
    body.fixed, dtype = True, dtype_of(node)

    def at(index: Sequence[Spot]) -> Value:
        parts = [grid.at(_with(index, d, number(i))) for i in range(grid.dims[d])]
        total = parts[0]._replace(code=body.cast(parts[0], dtype), dtype=dtype)
        for part in parts[1:]:
            code = combine.format(total.code, body.cast(part, dtype))
            total = body.let(code, dtype, total, part)
        return total

    if grid.tiled and len(grid.dims) == 1:
        return noted(at([]), node)
    shape, dims = _without(grid.shape, d), _without(grid.dims, d)
    return Grid(shape, dims, grid.tiled, dtype, at)


def _arange(body: Body, env: Env, node: Node) -> Operand:
    numbers = [x for x in node.args if isinstance(x, (int, float))]
    first, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2:] or [1])[0]
    dtype, size = dtype_of(node), meta(node).shape[0]

    def at(index: Sequence[Spot]) -> Value:
        place = body.cast(Value(index[0].code, index[0].dtype), dtype)
        return body.let(f"{place} * {literal(step, dtype)} + {literal(first, dtype)}", dtype)

    return Grid((str(size),), (size,), False, dtype, at)


def _filled(place: int | None, x: float = 0) -> Structure:
    """full, zeros and their like: with the argument at `place`, or with `x`."""

    def structure(body: Body, env: Env, node: Node) -> Operand:
        value = x if place is None else _argument(node, place)
        if isinstance(value, (bool, int, float)):
            return constant(value, dtype_of(node))
        raise ModLoweringError(body.argument, f"{node.target} with a tensor", "a number")

    return structure


STRUCTURE: dict[str, Structure] = {
    str(getitem): lambda body, env, node: operand(body, env, node.args[0]),  # first of several
    **dict.fromkeys(("alias", "clone", "detach", "expand", "lift_fresh", "lift_fresh_copy"), _same),
    **dict.fromkeys(("reshape", "view", "_unsafe_view"), _same),
    "_to_copy": _cast,
    "index": _index,
    "select": _select,
    "slice": _slice,
    **dict.fromkeys(("t", "transpose", "permute"), _permute),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "any": partial(_reduce, "{0} | {1}"),
    "all": partial(_reduce, "{0} & {1}"),
    "sum": partial(_reduce, "{0} + {1}"),
    "amax": partial(_reduce, "math.maximum({0}, {1})"),
    "amin": partial(_reduce, "math.minimum({0}, {1})"),
    "arange": _arange,
    **dict.fromkeys(("full", "full_like"), _filled(1)),
    "new_full": _filled(2),
    "scalar_tensor": _filled(0),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _filled(None, 0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _filled(None, 1)),
}

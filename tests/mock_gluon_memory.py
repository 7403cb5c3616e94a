"""Values, pointers, barriers and shared memory of a Gluon kernel on the CPU."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

RUNS = "runs"  # the only shared linear layout
LINE = 64  # 16-bit elements of a swizzled line: wider tiles lie in memory column block by block


class Value:
    """A tensor or scalar of a kernel; integers divide as in C."""

    def __init__(self, data: Any) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __getitem__(self, at: Any) -> Value:
        return Value(self.data[at])

    def reshape(self, shape: Sequence[int]) -> Value:
        return Value(self.data.reshape(list(shape)))

    def permute(self, order: Sequence[int]) -> Value:
        return Value(self.data.permute(list(order)))

    def split(self) -> tuple[Value, Value]:
        assert self.shape[-1] == 2
        return Value(self.data[..., 0]), Value(self.data[..., 1])

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        if bitcast:
            return Value(self.data.view(dtype))
        if isinstance(self.data, Tensor):
            return Value(self.data.to(dtype))
        return Value(float(self.data) if dtype.is_floating_point else int(self.data))

    def __neg__(self) -> Value:
        return Value(-self.data)


def raw(x: Any) -> Any:
    if isinstance(x, InFlight):
        raise AssertionError("an accumulator is used before it was waited for")
    return x.data if isinstance(x, Value) else x


def _whole(*numbers: Any) -> bool:
    return not any(
        x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float) for x in numbers
    )


def _floordiv(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.div(torch.as_tensor(a), torch.as_tensor(b), rounding_mode="trunc")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _mod(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.fmod(torch.as_tensor(a), torch.as_tensor(b))
    return a - b * _floordiv(a, b)


def _method(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Value, Any], Value]:
    def apply(self: Value, other: Any) -> Value:
        a, b = (raw(other), self.data) if swapped else (self.data, raw(other))
        return Value(function(a, b))

    return apply


_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


for _name in (*_COMPARISONS, "add", "sub", "mul", "truediv", "xor", "and", "or", "floordiv", "mod"):
    _function = {"floordiv": _floordiv, "mod": _mod, "and": operator.and_, "or": operator.or_}.get(
        _name
    ) or getattr(operator, _name)
    setattr(Value, f"__{_name}__", _method(_function, swapped=False))
    if _name not in _COMPARISONS:
        setattr(Value, f"__r{_name}__", _method(_function, swapped=True))


class Pointer:
    """A tensor's address and an offset in elements, within the tensor's memory."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, raw(Value(self.offset) + more))

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Pointer:
        return self

    def memory(self) -> Tensor:
        t = self.tensor
        size = t.untyped_storage().nbytes() // t.itemsize - t.storage_offset()
        return torch.as_strided(t, (size,), (1,))

    def places(self, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(memory, offsets, which are accessed)."""
        memory, at = self.memory(), torch.as_tensor(self.offset)
        used = torch.as_tensor(True if mask is None else raw(mask))
        at, used = torch.broadcast_tensors(at, used)
        inside = (at >= 0) & (at < memory.numel())
        assert bool((inside | ~used).all()), "an access outside the tensor's memory"
        return memory, at, used


class Bar:
    """An mbarrier: arrivals and bytes that are still missing from its phase."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0

    def settle(self) -> None:
        assert self.missing >= 0, "more arrivals than the barrier counts"
        if self.missing == 0 and self.bytes == 0:
            self.phase ^= 1
            self.missing = self.count


class Bars:
    def __init__(self, count: int) -> None:
        self.bars = [Bar() for _ in range(count)]

    def index(self, i: Any) -> Bar:
        return self.bars[raw(i)]


class Numbers:
    """Shared memory of plain numbers."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.shape = data, list(data.shape)

    def index(self, i: Any) -> Numbers:
        return Numbers(self.data[raw(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Numbers:
        return Numbers(self.data.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Numbers:
        return Numbers(self.data.permute(list(order)))

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        self.data.copy_(value.data)


class Tile:
    """Swizzled shared memory: [..., column blocks, rows, LINE]."""

    def __init__(self, blocks: Tensor, turned: bool = False) -> None:
        self.blocks, self.turned = blocks, turned
        self.dtype = blocks.dtype
        self.shape = [blocks.shape[0]]

    @classmethod
    def new(cls, dtype: torch.dtype, shape: Sequence[int]) -> Tile:
        *lead, columns = shape
        rows = 1
        for n in lead[1:]:
            rows *= n
        blocks = torch.full((lead[0], columns // LINE, rows, LINE), float("nan"), dtype=dtype)
        return cls(blocks)

    def index(self, i: Any) -> Tile:
        return type(self)(self.blocks[raw(i)])

    def reshape(self, shape: Sequence[int]) -> Tile:
        assert list(shape) == list(self.matrix().shape)
        return self

    def permute(self, order: Sequence[int]) -> Tile:
        return type(self)(self.blocks, not self.turned)

    def slice(self, start: int, length: int, dim: int) -> Tile:
        assert dim == 0
        return Tile(self.blocks[:, start : start + length])

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Tile:
        if len(shape) == 4:  # of a box
            shape = [shape[0] * shape[1] * shape[2], shape[3]]
        *lead, rows, columns = shape
        flat = self.blocks.reshape(-1)
        assert flat.data_ptr() == self.blocks.data_ptr(), "not one piece of memory"
        size = rows * columns * (lead[0] if lead else 1)
        if layout == RUNS:
            return Runs(flat[:size].view(*lead, rows // 8, columns // LINE, 8, LINE))
        return Tile(flat[:size].view(*lead, columns // LINE, rows, LINE))

    def matrix(self) -> Tensor:
        """A copy as [rows, columns]."""
        whole = self.blocks.transpose(0, 1).flatten(1)
        return whole.T if self.turned else whole

    def load(self, layout: Any) -> Value:
        return Value(self.matrix().clone())

    def store(self, value: Value) -> None:
        rows, columns = value.data.shape
        self.blocks.copy_(value.data.view(rows, columns // LINE, LINE).transpose(0, 1))


class Runs(Tile):
    """The same in another order: [..., runs of 8 rows, column blocks, 8, LINE]."""

    def slice(self, start: int, length: int, dim: int) -> Tile:
        assert dim == start % 8 == length % 8 == 0
        return Runs(self.blocks[start // 8 : (start + length) // 8])

    def matrix(self) -> Tensor:
        whole = self.blocks.transpose(1, 2).flatten(2).flatten(0, 1)
        return whole.T if self.turned else whole

    def store(self, value: Value) -> None:
        runs, blocks, rows, line = self.blocks.shape
        self.blocks.copy_(value.data.view(runs, rows, blocks, line).transpose(1, 2))


class Descriptor:
    """What TMA knows of a tensor; outside of it there are zeros."""

    def __init__(
        self, base: Tensor, shape: list[int], strides: list[int], box: list[int], layout: Any
    ) -> None:
        assert base.data_ptr() % 16 == 0
        assert all(n > 0 for n in shape)
        assert all(s > 0 and s * base.itemsize % 16 == 0 for s in strides[:-1])
        assert strides[-1] == 1
        assert all(n <= 256 for n in box[:-1])
        self.base, self.shape, self.strides = base, shape, strides
        self.box, self.layout, self.dtype = box, layout, base.dtype
        size = base.itemsize
        for n in box:
            size *= n
        self.block_type = SimpleNamespace(nbytes=size, shape=list(box))

    def read(self, corner: Sequence[int]) -> Tensor:
        """The box at `corner` as [rows, columns]."""
        filled = torch.zeros(self.box, dtype=self.dtype)
        view = torch.as_strided(self.base, self.shape, self.strides)
        source, target = [], []
        for at, n, size in zip(corner, self.box, self.shape, strict=True):
            low, high = max(at, 0), max(min(at + n, size), max(at, 0))
            source.append(slice(low, high))
            target.append(slice(low - at, high - at))
        if all(s.stop > s.start for s in source):
            filled[tuple(target)] = view[tuple(source)]
        return filled.flatten(0, -2)

    def write(self, corner: Sequence[int], rows: Tensor) -> None:
        """What of the box lies within the tensor."""
        view = torch.as_strided(self.base, self.shape, self.strides)
        source, target = [], []
        for at, n, size in zip(corner, self.box, self.shape, strict=True):
            assert at >= 0
            target.append(slice(at, min(at + n, size)))
            source.append(slice(0, max(min(at + n, size) - at, 0)))
        view[tuple(target)] = rows.reshape(self.box)[tuple(source)]


class InFlight:
    """A wgmma that has been issued."""

    def __init__(self, a: Any, b: Tile, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.before = (self._left().clone(), b.matrix().clone())
        self.result: Any = None

    def _left(self) -> Tensor:
        return self.a.matrix() if isinstance(self.a, Tile) else raw(self.a)

    def finish(self) -> None:
        for then, now in zip(self.before, (self._left(), self.b.matrix()), strict=True):
            same = torch.equal(then.view(torch.int16), now.contiguous().view(torch.int16))
            assert same, "an operand changed while a wgmma read it"
        product = self.before[0].float() @ self.before[1].float()
        if self.use_acc:
            product = product + (
                self.acc.result if isinstance(self.acc, InFlight) else self.acc.data
            )
        self.result = product

"""What the decode kernel needs of Gluon beyond `mock_gluon`, and plain Triton on the same terms."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import mock_gluon as base
import mock_gluon_memory as memory
import torch
from mock_gluon import Kernel
from mock_gluon_memory import Descriptor, Pointer, Value
from torch import Tensor

LINE = memory.LINE
_threads = 128  # that attend
KERNELS = ("tile", "append", "decode")  # plain Triton whose device functions the kernel calls


class Boxes:
    """Shared memory that TMA fills: blocks of lines, swizzled by their addresses."""

    def __init__(self, flat: Tensor, box: list[int]) -> None:
        self.flat, self.box, self.dtype = flat, box, flat.dtype

    def index(self, i: Any) -> Boxes:
        size = self.flat.numel() // self.box[0]
        at = int(memory.raw(i)) * size
        return Boxes(self.flat[at : at + size], self.box[1:])

    def fill(self, box: Tensor) -> None:
        lines = box.reshape(-1, self.box[-1])
        self.flat.copy_(_swizzled(lines, int(self.flat.storage_offset())).flatten())

    def seen_as(self, shape: Sequence[int], layout: list[list[int]]) -> Linear:
        return Linear(self.flat.view(shape[0], -1), list(shape[1:]), layout)


def _swizzled(lines: Tensor, start: int = 0) -> Tensor:
    """Pieces of 8 elements of each line in an order of the 128 bytes it is in; the way back too.

    Lines are of 128 or 64 bytes; the first one lies `start` elements into shared memory.
    """
    count = lines.shape[-1] // 8
    pieces = lines.reshape(-1, count, 8)
    number = (start + torch.arange(pieces.shape[0])[:, None] * lines.shape[-1]) // LINE % count
    order = (torch.arange(count) ^ number)[..., None].expand(-1, -1, 8)
    return pieces.gather(1, order).reshape(lines.shape)


class Columns(memory.Tile):
    """A tile that wgmma reads: [column blocks, rows, LINE], its lines swizzled."""

    def __init__(self, blocks: Tensor, turned: bool = False) -> None:
        super().__init__(blocks, turned)
        if blocks.dim() == 3:
            self.shape = [blocks.shape[1], blocks.shape[0] * LINE]

    def slice(self, start: int, length: int, dim: int) -> Columns:
        assert dim == start % 8 == length % 8 == 0
        return Columns(self.blocks[:, start : start + length])

    def matrix(self) -> Tensor:
        whole = torch.stack([_swizzled(block) for block in self.blocks]).transpose(0, 1).flatten(1)
        return whole.T if self.turned else whole

    def store(self, value: Value) -> None:
        rows, columns = value.data.shape
        for block, part in zip(self.blocks, value.data.split(LINE, 1), strict=True):
            block.copy_(_swizzled(part.contiguous()))
        assert self.shape == [rows, columns]


class Linear:
    """Shared memory whose offsets are sums of coordinates, one for every bit."""

    def __init__(self, flat: Tensor, shape: list[int], layout: list[list[int]]) -> None:
        self.flat, self.shape, self.layout, self.order = flat, shape, layout, None

    def index(self, i: Any) -> Linear:
        return Linear(self.flat[int(memory.raw(i))], self.shape, self.layout)

    def permute(self, order: Sequence[int]) -> Linear:
        turned = Linear(self.flat, self.shape, self.layout)
        turned.order = list(order)  # type: ignore[assignment]
        return turned

    def load(self, layout: Any) -> Value:
        offset = torch.arange(self.flat.numel())
        assert 1 << len(self.layout) == self.flat.numel()
        places = []
        for dim in range(len(self.shape)):
            at = torch.zeros_like(offset)
            for bit, basis in enumerate(self.layout):
                at ^= ((offset >> bit) & 1) * basis[dim]
            places.append(at)
        whole = torch.full(self.shape, float("nan"), dtype=self.flat.dtype)
        whole[tuple(places)] = self.flat
        return Value(whole if self.order is None else whole.permute(self.order))


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if dtype.itemsize == 2 and len(shape) == 2:
        rows, columns = shape
        return Columns(torch.full((columns // LINE, rows, LINE), float("nan"), dtype=dtype))
    if layout == "plain":
        return memory.Numbers(torch.full(shape, 77, dtype=dtype))
    if len(shape) == 6:
        size = 1
        for n in shape:
            size *= n
        return Boxes(torch.full((size,), float("nan"), dtype=dtype), list(shape))
    return base._allocate(dtype, shape, layout)


def _load_box(descriptor: Descriptor, corner: Sequence[Any], bar: Any, boxes: Boxes) -> None:
    at = [int(memory.raw(x)) for x in corner]

    def land() -> None:
        boxes.fill(descriptor.read(at))
        bar.bytes -= descriptor.block_type.nbytes
        bar.settle()

    with base._lock:
        boxes.flat.fill_(float("nan"))
        base._program.copies.append(land)


def _release(bar: Any, increment_count: bool) -> None:
    base.mbarrier.arrive(bar, _threads)


def _reinterpret(boxes: Any, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
    if isinstance(boxes, memory.Numbers):
        assert list(shape) == list(boxes.data.shape)
        return boxes
    if not isinstance(layout, list):
        stages, rows, columns = (int(n) for n in shape)
        return Columns(boxes.flat.view(stages, columns // LINE, rows, LINE))
    return boxes.seen_as([int(n) for n in shape], layout)


def _mma(a: Value, b: Value, acc: Value) -> Value:
    return Value(a.data.float() @ b.data.float() + acc.data)


def _tensor(x: Any) -> Tensor:
    return torch.as_tensor(memory.raw(x))


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Value:
    return base._load(pointer, mask, other)


def _atomic_add(pointer: Pointer, more: int, **_: Any) -> Value:
    return base._atomic_add(pointer, more)


def _within(pointer: Pointer) -> None:
    """Addresses are of the tensor: behind it there may be no memory."""
    t, at = pointer.tensor, torch.as_tensor(pointer.offset)
    end = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    assert bool(((at >= 0) & (at <= end)).all()), "a call for memory behind a tensor"


def _assembly(text: str, constraints: str, values: list[Any], **more: Any) -> Any:
    if text.startswith("prefetch"):
        _within(values[0])
        return None
    if text.startswith("griddepcontrol"):
        return None
    return base._assembly(text, constraints, values, **more)


def _reduce(x: Any, axis: int, how: str) -> Value:
    return base._reduce(Value(_tensor(x)), axis, how)


def _arange(start: int, stop: int, layout: Any = None) -> Value:
    return Value(torch.arange(start, stop))


def _full(shape: Sequence[int], value: Any, dtype: torch.dtype, layout: Any = None) -> Value:
    return Value(torch.full([int(n) for n in shape], value, dtype=dtype))


def _extend(gl: Any) -> None:
    gl.SwizzledSharedLayout = lambda *_: "plain"
    gl.SharedLinearLayout = lambda bases, blocks, alignment: bases
    gl.allocate_shared_memory, gl.inline_asm_elementwise = _allocate, _assembly
    gl.load, gl.atomic_add = _load, _atomic_add
    gl.arange, gl.full = _arange, _full
    gl.sum = lambda x, axis: _reduce(x, axis, "sum")
    gl.max = lambda x, axis: _reduce(x, axis, "amax")
    gl.convert_layout = lambda x, layout, assert_trivial=False: x
    gl.broadcast = lambda a, b: tuple(map(Value, torch.broadcast_tensors(a.data, b.data)))
    gl.thread_barrier = lambda: None
    gl.associative_scan = lambda x, axis, plus: Value(x.data.cumsum(axis))


def _triton() -> tuple[ModuleType, ModuleType]:
    """In the place of triton and triton.language, as far as device functions go."""
    gl: Any = base.language()
    _extend(gl)
    gl.cumsum = lambda x, axis: Value(x.data.cumsum(axis))
    gl.abs = lambda x: Value(_tensor(x).abs())
    gl.float64 = torch.float64
    gl.sum = lambda x, axis, keep_dims: Value(x.data.sum(axis, keepdim=keep_dims))
    gl.rsqrt = lambda x: Value(x.data.rsqrt())
    gl.zeros = lambda shape, dtype: _full(shape, 0, dtype)
    gl.broadcast_to = lambda x, shape: Value(x.data.broadcast_to(list(shape)))
    gl.range = range
    gl.debug_barrier = lambda: None
    triton: Any = ModuleType("triton")
    triton.jit, triton.language = base._jit, gl
    return triton, gl


class Launched(Kernel):
    """Constants come by name, among options of the compiler."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, form: Any, REGISTERS: int, **_: Any) -> None:
            global _threads
            _threads = 32 * form.WARPS
            for _number in base.programs(grid[0]):
                self.function(*map(base._argument, args), form, REGISTERS)

        return launch


@contextmanager
def mocked() -> Iterator[ModuleType]:
    """`kvattn.backends.hopper_decode_launch` over the mock."""
    names = [f"kvattn.kernels.{name}" for name in KERNELS]
    fresh = ("kvattn.kernels.hopper", "kvattn.backends.hopper_decode_launch", *names)
    with base.mocked(fresh):
        compat: Any = sys.modules["kvattn.kernels.hopper.compat"]
        _extend(compat.gl)
        compat.async_copy = SimpleNamespace(mbarrier_arrive=_release)
        compat.mma_v2, compat.load_box, compat.reinterpret = _mma, _load_box, _reinterpret
        importlib.import_module("triton.language")
        real = {name: sys.modules[name] for name in ("triton", "triton.language")}
        mock, language = _triton()
        sys.modules.update({"triton": mock, "triton.language": language})
        try:
            for name in names:
                importlib.import_module(name)
        finally:
            sys.modules.update(real)
        module = importlib.import_module("kvattn.backends.hopper_decode_launch")
        kernel: Any = importlib.import_module("kvattn.kernels.hopper.decode")
        kernel.decode = Launched(kernel.decode.function)
        yield module


def _property(name: str, get: Any) -> None:
    for kind in (Value, Pointer):
        if not hasattr(kind, name):
            setattr(kind, name, property(get))


Value.dtype = property(lambda self: self.data.dtype)  # type: ignore[attr-defined]
Pointer.dtype = property(  # type: ignore[attr-defined]
    lambda self: SimpleNamespace(element_ty=self.tensor.dtype)
)
Value.__rshift__ = lambda self, n: Value(self.data >> memory.raw(n))  # type: ignore[operator]

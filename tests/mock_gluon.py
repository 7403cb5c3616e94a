"""Runs the text of a Gluon kernel on the CPU, to test what it says without a GPU.

Every partition is a thread. Copies land late and in any order, and a buffer holds NaN until they
do; a wgmma is computed when it is waited for, and its operands must not have changed until then.
Barriers count as the hardware's do; a wait that lasts too long is a deadlock. Loads and stores
stay within the memory their pointer belongs to. Layouts and the lowering are not modelled.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from mock_gluon_memory import (
    RUNS,
    Bar,
    Bars,
    Descriptor,
    InFlight,
    Numbers,
    Pointer,
    Tile,
    Value,
    raw,
)
from torch import Tensor

import kvattn.backends
import kvattn.kernels

DEADLOCK = 300.0  # seconds: a busy machine takes its time
_lock = threading.RLock()
_own = threading.local()  # of a partition: its wgmmas in flight


class PartnerError(RuntimeError):
    """Another partition of the program has failed."""


class Program:
    """One program while it runs: copies under way, named barriers, the first error."""

    def __init__(self, number: int, count: int) -> None:
        self.number, self.count = number, count
        self.copies: list[Callable[[], None]] = []
        self.named: dict[int, list[int]] = {}
        self.error: BaseException | None = None

    def wait(self, done: Callable[[], bool], what: str) -> None:
        start = time.monotonic()
        while True:
            with _lock:
                if self.error is not None:
                    raise PartnerError
                if self.copies and random.random() < 0.5:
                    self.copies.pop(random.randrange(len(self.copies)))()
                if done():
                    return
            time.sleep(0)
            assert time.monotonic() - start < DEADLOCK, f"deadlock: {what}"


_program = Program(0, 1)


def _number(x: Any) -> int:
    return int(raw(x))


class mbarrier:
    @staticmethod
    def MBarrierLayout() -> None:
        return None

    @staticmethod
    def init(bar: Bar, count: int) -> None:
        bar.count = bar.missing = count

    @staticmethod
    def expect(bar: Bar, size: int) -> None:
        with _lock:
            bar.bytes += size
            bar.missing -= 1
            bar.settle()

    @staticmethod
    def arrive(bar: Bar, count: int = 1) -> None:
        with _lock:
            bar.missing -= count
            bar.settle()

    @staticmethod
    def wait(bar: Bar, phase: Any, pred: Any = True) -> None:
        if bool(raw(pred)):
            _program.wait(lambda: bar.phase ^ 1 == _number(phase), "mbarrier")


class async_copy:
    @staticmethod
    def mbarrier_arrive(bar: Bar, increment_count: bool) -> None:
        assert not increment_count
        mbarrier.arrive(bar, 128)


def load_box(descriptor: Descriptor, corner: Sequence[Any], bar: Bar, tile: Tile) -> None:
    at = [_number(x) for x in corner]

    def land() -> None:
        tile.store(Value(descriptor.read(at)))
        bar.bytes -= descriptor.block_type.nbytes
        bar.settle()

    with _lock:
        tile.blocks.fill_(float("nan"))
        _program.copies.append(land)


def store_box(descriptor: Descriptor, corner: Sequence[Any], tile: Tile) -> None:
    with _lock:
        descriptor.write([_number(x) for x in corner], tile.matrix())


def warpgroup_mma(
    a: Any, b: Tile, acc: Any, use_acc: bool = True, is_async: bool = False
) -> InFlight:
    assert is_async
    if not b.turned:
        assert not b.matrix().isnan().any(), "dead rows of V reach a product"
    issued = InFlight(a, b, acc, use_acc)
    _own.issued.append(issued)
    return issued


def warpgroup_mma_wait(pending: int, deps: Sequence[Any]) -> Any:
    with _lock:
        while len(_own.issued) > pending:
            _own.issued.pop(0).finish()
    results = []
    for x in deps:
        if isinstance(x, InFlight):
            assert x.result is not None, "the wait leaves this wgmma in flight"
            x = Value(x.result)
        results.append(x)
    return results[0] if len(results) == 1 else tuple(results)


def _either(tensors: Callable[..., Tensor], numbers: Callable[..., Any]) -> Callable[..., Value]:
    def apply(a: Any, b: Any) -> Value:
        a, b = raw(a), raw(b)
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return Value(tensors(torch.as_tensor(a), torch.as_tensor(b)))
        return Value(numbers(a, b))

    return apply


def _where(condition: Any, a: Any, b: Any) -> Value:
    condition, a, b = raw(condition), raw(a), raw(b)
    if not isinstance(condition, Tensor):
        return Value(a if condition else b)
    like = next((x for x in (a, b) if isinstance(x, Tensor)), None)
    dtype = None if like is None else like.dtype
    return Value(
        torch.where(condition, torch.as_tensor(a, dtype=dtype), torch.as_tensor(b, dtype=dtype))
    )


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Value:
    memory, at, used = pointer.places(mask)
    got = memory[torch.where(used, at, 0)] if memory.numel() else torch.full(at.shape, 0)
    got = torch.where(used, got, torch.as_tensor(raw(other), dtype=got.dtype))
    return Value(got if got.dim() else got.item())


def _store(pointer: Pointer, value: Value, mask: Any = None) -> None:
    memory, at, used = pointer.places(mask)
    values = torch.as_tensor(raw(value), dtype=memory.dtype).broadcast_to(at.shape)
    memory[at[used]] = values[used]


def _atomic_add(pointer: Pointer, more: Any) -> Value:
    with _lock:
        memory = pointer.memory()
        old = int(memory[_number(pointer.offset)])
        memory[_number(pointer.offset)] += _number(more)
        return Value(old)


def _exchange(pointer: Pointer, value: int) -> None:
    with _lock:
        pointer.memory()[_number(pointer.offset)] = value


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Bars | Numbers | Tile:
    if dtype == torch.int64:
        return Bars(shape[0])
    if dtype == torch.int32:
        return Numbers(torch.full(shape, 0x7F7F7F7F, dtype=dtype))
    return Tile.new(dtype, shape)


def _assembly(text: str, constraints: str, values: list[Value], **_: Any) -> Any:
    """What kernels write in assembly: named barriers, two 16-bit numbers in a register."""
    kind, rest = text.split(";")[0].split(" ", 1)
    if kind.startswith("rcp"):
        return Value(1.0 / values[0].data)
    if kind.startswith("prefetch"):
        return None
    if kind.startswith("cvt.rn"):
        dtype = torch.bfloat16 if "bf16x2" in kind else torch.float16
        low, high = (x.data.to(dtype) for x in values)
        return Value(torch.stack((low, high), -1).view(torch.int32).squeeze(-1))
    if kind == "mov.b32":
        halves = values[0].data.contiguous().unsqueeze(-1).view(torch.int16)
        return Value(halves[..., 0]), Value(halves[..., 1])
    if text.startswith(".reg"):
        return None
    if "lop3" in text:  # logits lowered to at most 0; references are kept for what comes next
        x, m = values[0].data, values[1].data[:, 0]
        above = {"40800000": 4.0, "41000000": 8.0}[text.split("add.f32 u, u, 0f")[1][:8]]
        missing, top = m == -torch.inf, x.amax(1)
        moved = ((top > 0) | missing) & (top > -torch.inf)
        more = torch.where(moved, top + above, 0)
        _own.references = torch.where(missing, torch.where(moved, more, m), m + more)
        return Value(x - more[:, None])
    if "top_" in text:
        return Value(_own.references)
    if "vote" in text:  # products with factors
        return Value(values[0].data * values[1].data)
    if "nanosleep" in text:  # a loop that never runs
        return values[0]
    told = rest.replace("$1", str(values[0].data) if values else "")
    number, threads = (int(x) for x in told.split(","))
    with _lock:
        state = _program.named.setdefault(number, [0, 0])
        generation = state[1]
        state[0] += _own.threads
        assert state[0] <= threads, "more arrivals than the named barrier counts"
        if state[0] == threads:
            state[:] = [0, generation + 1]
    if kind == "bar.sync":
        _program.wait(lambda: state[1] != generation, f"named barrier {number}")


def _warp_specialize(partitions: Any, warps: list[int], registers: list[int]) -> None:
    program = _program

    def run(function: Callable[..., None], arguments: tuple[Any, ...], warps: int) -> None:
        _own.issued, _own.threads = [], 32 * warps
        try:
            function(*arguments)
            assert not _own.issued, "a wgmma is never waited for"
        except BaseException as error:
            if program.error is None:
                program.error = error

    threads = [
        threading.Thread(target=run, args=(*part, n))
        for part, n in zip(partitions, [4, *warps], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if program.error is not None:
        raise program.error


def _reduce(x: Value, axis: int, how: str) -> Value:
    data = getattr(x.data, how)(axis)
    return Value(data if data.dim() else data.item())


def programs(count: int) -> Iterator[None]:
    """Makes each program of a grid the current one, in any order: none is promised."""
    global _program
    for number in random.sample(range(count), count):
        _program = Program(number, count)
        yield
        assert not _program.copies, "a copy nobody waits for"


class Kernel:
    """A jitted function: called as it is, or launched over a grid, one program at a time."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def warmup(self, *args: Any, grid: tuple[int, ...], num_warps: int) -> Kernel:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, **constants: Any) -> None:
            for _ in programs(grid[0]):
                self.function(*map(_argument, args), **constants)

        return launch


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer(x)
    return Value(x) if type(x) in (int, float) else x


def _jit(function: Any = None, **_: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def _layout(*_: Any, **__: Any) -> None:
    return None


def language() -> ModuleType:
    """What kernels call `gl`."""
    gl: Any = ModuleType("gl")
    gl.constexpr = lambda value: value
    gl.float32, gl.bfloat16, gl.float16 = torch.float32, torch.bfloat16, torch.float16
    gl.int16, gl.int32, gl.int64 = torch.int16, torch.int32, torch.int64
    for name in ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout"):
        setattr(gl, name, _layout)
    gl.NVMMASharedLayout = gl.SwizzledSharedLayout = _layout
    gl.SharedLinearLayout = lambda *_: RUNS
    gl.static_range = range
    gl.to_tensor = Value
    gl.program_id = lambda axis: Value(_program.number)
    gl.num_programs = lambda axis: Value(_program.count)
    gl.cdiv = lambda a, b: (Value(raw(a)) + b - 1) // b
    gl.maximum, gl.minimum = _either(torch.maximum, max), _either(torch.minimum, min)
    gl.where, gl.load, gl.store = _where, _load, _store
    gl.atomic_add, gl.atomic_xchg = _atomic_add, _exchange
    gl.arange = lambda start, stop, layout: Value(torch.arange(start, stop))
    gl.full = lambda shape, value, dtype, layout: Value(torch.full(shape, value, dtype=dtype))
    gl.zeros = lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype))
    gl.zeros_like = lambda x: Value(torch.zeros_like(x.data))
    gl.exp2 = lambda x: Value(torch.exp2(x.data))
    gl.log2 = lambda x: Value(torch.log2(x.data))
    gl.max = lambda x, axis: _reduce(x, axis, "amax")
    gl.sum = lambda x, axis: _reduce(x, axis, "sum")
    gl.join = lambda a, b: Value(torch.stack((a.data, b.data), -1))
    gl.expand_dims = lambda x, axis: Value(x.data.unsqueeze(axis))
    gl.convert_layout = lambda x, layout, assert_trivial: x
    gl.allocate_shared_memory = _allocate
    gl.inline_asm_elementwise = _assembly
    gl.warp_specialize = _warp_specialize
    return gl


def compat() -> ModuleType:
    """In the place of `kvattn.kernels.hopper.compat`."""
    module: Any = ModuleType("kvattn.kernels.hopper.compat")
    module.gl = language()
    module.gluon = SimpleNamespace(jit=_jit, constexpr_function=lambda function: function)
    module.mbarrier, module.async_copy, module.load_box = mbarrier, async_copy, load_box
    module.warpgroup_mma, module.warpgroup_mma_wait = warpgroup_mma, warpgroup_mma_wait
    module.fence_async_shared = lambda: None
    module.store_box, module.store_wait = store_box, lambda pending: None
    module.reinterpret = Tile.reinterpret
    module.TensorDescriptor = Descriptor
    return module


@contextmanager
def mocked(prefixes: Sequence[str]) -> Iterator[None]:
    """Modules that start with one of `prefixes` are imported afresh, over the mock of Gluon."""
    for package in (kvattn.backends, kvattn.kernels):  # none of the others may meet the mock first
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    kept = _forget(prefixes)
    sys.modules["kvattn.kernels.hopper.compat"] = compat()
    try:
        yield
    finally:
        _forget(prefixes)
        for name, module in sorted(kept.items()):  # packages before what is in them
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)


def _forget(prefixes: Sequence[str]) -> dict[str, ModuleType]:
    """Takes the modules out, and their names out of the packages that they are in."""
    found = {n: m for n, m in sys.modules.items() if n.startswith(tuple(prefixes))}
    for name in found:
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if hasattr(sys.modules.get(parent), child):
            delattr(sys.modules[parent], child)
    return found

"""What the random calls are made of: numbers, memory layouts, copies and descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]


class Draw:
    """Short names for drawing numbers."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def whole(self, low: int, high: int) -> int:
        """low <= n <= high, both ends drawn more often than the rest."""
        kind = self.rng.random()
        if kind < 0.3:
            return low if kind < 0.15 else high
        return int(self.rng.integers(low, high + 1))

    def normal(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def uniform(self, low: float, high: float, shape: tuple[int, ...] = ()) -> Array:
        return np.asarray(self.rng.uniform(low, high, shape), dtype=np.float32)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.from_numpy(self.normal(*shape)).to(dtype)


def ints(numbers: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=dtype)


def cumulative(lengths: Sequence[int]) -> torch.Tensor:
    return ints([0, *np.cumsum(lengths, dtype=int).tolist()])


def strided(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The same (..., tokens, heads, dim) in other memory; what lies between is NaN or 0x7f."""
    index: tuple[Any, ...]
    if kind == "plain":
        return x
    if kind == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if kind == "layers":  # one of three layers of each page or token
        shape, index = (x.shape[0], 3, *x.shape[1:]), (slice(None), 1)
    elif kind == "wide":
        shape = tuple(n + 2 for n in x.shape)
        index = tuple(slice(1, n + 1) for n in x.shape)
    elif kind == "spread":  # a last stride of 2
        shape = (*x.shape[:-1], 2 * x.shape[-1])
        index = (..., slice(None, None, 2))
    else:
        raise ValueError(kind)
    buffer = torch.full((int(np.prod(shape)) * x.element_size(),), 0x7F, dtype=torch.uint8)
    view = buffer.view(x.dtype).reshape(shape)[index]
    view.copy_(x)
    return view


def interleaved(codes: Array, squeeze: bool) -> Array:
    """(N, rows, H, groups) as (N, H, RM, RK, 32, 4, 4), or without RM and RK that are 1."""
    n, rows, heads, groups = codes.shape
    rm, rk = -(-rows // 128), -(-groups // 4)
    padded = np.full((n, rm * 128, heads, rk * 4), 255, dtype=np.uint8)
    padded[:, :rows, :, :groups] = codes
    # rows are (RM, 4, 32) and groups (RK, 4)
    split = padded.reshape(n, rm, 4, 32, heads, rk, 4).transpose(0, 4, 1, 5, 3, 2, 6)
    middle = tuple(size for size in (rm, rk) if size != 1 or not squeeze)
    return np.ascontiguousarray(split).reshape(n, heads, *middle, 32, 4, 4)


def e8m0(codes: Array) -> torch.Tensor:
    return torch.from_numpy(codes).view(torch.float8_e8m0fnu)


def clone(call: dict[str, Any]) -> dict[str, Any]:
    """A deep copy that keeps strides, offsets and which tensors are views of one buffer."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(x: Any) -> Any:
        if isinstance(x, list):
            return [copy(item) for item in x]
        if not torch.is_tensor(x):
            return dict(x) if isinstance(x, dict) else x
        storage = x.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()
        view = torch.empty(0, dtype=x.dtype)
        return view.set_(storages[storage.data_ptr()], x.storage_offset(), x.shape, x.stride())

    return {name: copy(value) for name, value in call.items()}


def describe(call: dict[str, Any]) -> str:
    """One argument a line: dtype, shape and strides of tensors, and the values of index tensors."""
    return "\n".join(f"  {name} = {_shown(value)}" for name, value in call.items())


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if callable(value):
        return getattr(value, "__name__", repr(value))
    if not torch.is_tensor(value):
        return repr(value)
    text = f"{str(value.dtype)[6:]}{list(value.shape)}"
    if not value.is_contiguous():
        text += f" strides {value.stride()}"
    if value.dtype in (torch.int32, torch.int64) and value.numel() <= 64:
        text += f" {value.tolist()}"
    return text

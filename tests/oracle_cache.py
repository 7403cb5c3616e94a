"""The oracle's caches: append and read one slot at a time, with descales and MXFP8 scales."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
MX_GROUP = 32  # channels of one scale


class Side:
    """One cache, K or V, as (rows or pages, slots, Hk, dim), with its scales."""

    def __init__(self, cache: torch.Tensor, descale: Any, sf: Any, ragged: bool) -> None:
        self.ragged = ragged
        self.stored = (cache[None] if ragged else cache).clone()
        self.given_descale = descale
        self.per_token: torch.Tensor | None = None
        if torch.is_tensor(descale) and descale.ndim == 3:
            self.per_token = descale.clone()
        self.sf = sf
        self.bytes: Array | None = None
        if sf is not None:
            plain = sf[None] if ragged and sf.ndim < 5 else sf
            self.bytes = mx_plain(plain, self.stored.shape)
        self._decoded: Array | None = None

    def store(self, page: int, offset: int, x: torch.Tensor, b: int) -> None:
        """Put one token's heads (Hk, dim) into its slot, quantised when the dtypes differ."""
        if x.dtype != self.stored.dtype:
            x = self._quantised(page, offset, x, b)
        self.stored[page, offset] = x

    def _quantised(self, page: int, offset: int, x: torch.Tensor, b: int) -> torch.Tensor:
        dtype = self.stored.dtype
        if dtype not in EIGHT_BITS and self.given_descale is None:
            return x.to(torch.float32).to(dtype) if dtype != torch.float64 else x.to(dtype)
        numbers = x.to(torch.float32).numpy()
        if self.per_token is not None:
            amax = np.abs(numbers).max(axis=-1)
            scale = np.where(amax == 0, np.float32(1), amax / np.float32(_largest(dtype)))
            self.per_token[page, offset] = torch.from_numpy(scale.astype(np.float32))
            numbers = numbers / scale[:, None].astype(np.float32)
        elif self.given_descale is not None:
            per_head = descale_of(self.given_descale, b, x.shape[0]).astype(np.float32)
            numbers = numbers / per_head[:, None]
        if self.bytes is not None:
            numbers = self._mx_scaled(page, offset, numbers)
        return _cast(numbers, dtype)

    def _mx_scaled(self, page: int, offset: int, numbers: Array) -> Array:
        assert self.bytes is not None
        grouped = numbers.reshape(numbers.shape[0], -1, MX_GROUP)
        codes = np.vectorize(mx_byte, otypes=[np.uint8])(np.abs(grouped).max(axis=-1))
        self.bytes[page, offset] = codes
        return np.ldexp(grouped, 127 - codes.astype(int)[..., None]).reshape(numbers.shape)

    def numbers(self, page: int, offset: int) -> Array:
        """The float64 heads (Hk, dim) of one slot, without the descale."""
        if self._decoded is None:
            self._decoded = self.stored.to(torch.float64).numpy()
            if self.bytes is not None:
                self._decoded = self._decoded * self._mx_factors()
        return self._decoded[page, offset]

    def _mx_factors(self) -> Array:
        assert self.bytes is not None
        factors = mx_value(self.bytes)
        n, slots, heads, dim = self.stored.shape
        if factors.shape == (n, slots, heads, dim // MX_GROUP):
            return factors.repeat(MX_GROUP, axis=3)
        return factors.repeat(MX_GROUP, axis=1)  # one scale per 32 tokens and channel

    def descale(self, b: int, page: int, offset: int) -> Array:
        """The (Hk,) factors of one slot."""
        heads = self.stored.shape[2]
        if self.per_token is not None:
            return self.per_token[page, offset].to(torch.float64).numpy()
        return descale_of(self.given_descale, b, heads)

    def restored(self, x: torch.Tensor) -> torch.Tensor:
        return x[0] if self.ragged else x

    def descale_after(self) -> Any:
        return self.given_descale if self.per_token is None else self.per_token

    def sf_after(self) -> torch.Tensor | None:
        if self.sf is None:
            return None
        assert self.bytes is not None
        if self.sf.ndim < 5:
            codes = torch.from_numpy(self.bytes.copy()).reshape(self.sf.shape)
            return codes.view(torch.float8_e8m0fnu)
        after = e8m0_bytes(self.sf).copy()
        offsets = mx_offsets(self.bytes.shape[1], self.bytes.shape[3])
        _per_head(after)[:, :, offsets] = self.bytes.transpose(0, 2, 1, 3)
        return torch.from_numpy(after).view(torch.float8_e8m0fnu)


def descale_of(given: Any, b: int, heads: int) -> Array:
    """One factor per kv head, from a scalar or anything that broadcasts to (B, Hk)."""
    if given is None:
        return np.ones(heads)
    if not torch.is_tensor(given):
        return np.full(heads, np.float32(given), dtype=np.float64)
    numbers = given.to(torch.float64).numpy()
    row = numbers[b if numbers.shape[0] > 1 else 0] if numbers.ndim == 2 else numbers
    return np.broadcast_to(row, (heads,))


def _largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else float(torch.finfo(dtype).max)


def _cast(numbers: Array, dtype: torch.dtype) -> torch.Tensor:
    numbers = numbers.astype(np.float32)
    if dtype == torch.int8:
        return torch.from_numpy(np.clip(np.rint(numbers), -127, 127).astype(np.int8))
    if dtype in EIGHT_BITS:
        numbers = np.clip(numbers, -_largest(dtype), _largest(dtype))
    return torch.from_numpy(numbers).to(dtype)


def e8m0_bytes(sf: torch.Tensor) -> Array:
    return sf.contiguous().view(torch.uint8).numpy()


def mx_value(codes: Array) -> Array:
    factors = np.ldexp(1.0, codes.astype(int) - 127)
    return np.where(codes == 255, np.nan, factors)


def mx_byte(amax: float) -> int:
    """127 + the least e with amax <= 448 * 2^e, clamped; 448 is 0.875 * 2^9."""
    if amax == 0:
        return 0
    mantissa, exponent = math.frexp(amax)
    e = exponent - 9 + (mantissa > 0.875)
    return min(max(e, -127), 127) + 127


def mx_plain(sf: torch.Tensor, shape: torch.Size) -> Array:
    """Any layout as uint8 (pages, slots, Hk, dim/32); the token-block layout stays as it is."""
    if sf.ndim < 5:
        return e8m0_bytes(sf).copy()
    offsets = mx_offsets(shape[1], shape[3] // MX_GROUP)
    return _per_head(e8m0_bytes(sf))[:, :, offsets].transpose(0, 2, 1, 3).copy()


def _per_head(codes: Array) -> Array:
    """Interleaved bytes as (N, H, bytes)."""
    return codes.reshape(*codes.shape[:2], -1)


def mx_offsets(rows: int, groups: int) -> Array:
    """Where the byte of (row, group) lies within the interleaved bytes of a head."""
    m, gr = np.arange(rows)[:, None], np.arange(groups)[None, :]
    chunk = m // 128 * -(-groups // 4) + gr // 4
    return (chunk * 32 + m % 32) * 16 + m % 128 // 32 * 4 + gr % 4

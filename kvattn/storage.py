"""The memory of a paged cache: pages for every layer, and their scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvattn.errors.cache_kinds import CacheDescaleError, CacheStorageDtypeError

_FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_BYTE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)

Scale = float | Tensor | None


class PageStorage:
    """The pages of every layer, and the scales that stored numbers are multiplied by.

    Attributes:
        k: per layer, shape (num_pages, page_size, Hk, D).
        v: per layer, shape (num_pages, page_size, Hk, Dv).
        k_descale: per layer, None, float32 of shape (1, Hk), or (num_pages, page_size, Hk).
        v_descale: the same for values.
    """

    def __init__(
        self,
        layers: int,
        slots: tuple[int, int, int],
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        descales: tuple[Scale, Scale] = (None, None),
        token_descale: bool = False,
    ) -> None:
        check_storage(dtype, descales, token_descale)
        self._layers, self._heads, self._device = layers, slots[2], device
        # One allocation each: a compiler copies caches that are views of one buffer before a write.
        self._pools: list[Tensor] = []
        self.k: list[Tensor]
        self.v: list[Tensor]
        self.k_descale: Sequence[Tensor | None]
        self.v_descale: Sequence[Tensor | None]
        self.k, self.v = (self._pages((*slots, dim), dtype) for dim in dims)
        if token_descale:
            self.k_descale, self.v_descale = (self._pages(slots, torch.float32) for _ in dims)
            for scale in (*self.k_descale, *self.v_descale):
                scale.fill_(1.0)
        else:
            self.k_descale = self._static_scales("k_descale", descales[0])
            self.v_descale = self._static_scales("v_descale", descales[1])

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools)

    def copy_pages(self, originals: Sequence[int], copies: Sequence[int]) -> None:
        """Copies whole pages, all layers and scales, one buffer after the other."""
        source, target = torch.tensor([originals, copies], device=self._device)
        for pool in self._pools:
            raw = pool.view(torch.uint8) if pool.itemsize == 1 else pool  # FP8 has no index_copy_
            raw.index_copy_(0, target, raw.index_select(0, source))

    def _pages(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """One buffer of pages per layer: zeros, as stray NaN behind a sequence would cost time."""
        pools = [torch.zeros(shape, dtype=dtype, device=self._device) for _ in range(self._layers)]
        self._pools += pools
        return pools

    def _static_scales(self, name: str, scale: Scale) -> list[Tensor | None]:
        if scale is None:
            return [None] * self._layers
        shape = (self._layers, self._heads)
        allowed = f"a float, or a tensor of shape {shape[1:]} or {shape}"
        if isinstance(scale, bool) or not isinstance(scale, int | float | Tensor):
            raise CacheDescaleError(name, repr(scale), allowed)
        scales = torch.as_tensor(scale, dtype=torch.float32, device=self._device)
        if scales.shape not in ((), (1,), shape[1:], shape):
            raise CacheDescaleError(name, f"shape {tuple(scales.shape)}", allowed)
        if not bool(((scales > 0) & scales.isfinite()).all()):
            raise CacheDescaleError(name, scale, "positive finite numbers")
        return [row[None] for row in scales.expand(shape).contiguous()]


def check_storage(
    dtype: torch.dtype | None, descales: tuple[Scale, Scale], token_descale: bool
) -> None:
    """Whether a cache can be kept in this dtype and with these scales; None is a wide dtype.

    Raises:
        CacheStorageDtypeError, CacheDescaleError: it cannot.
    """
    if dtype is not None and dtype not in _FLOAT_DTYPES + _BYTE_DTYPES:
        names = ", ".join(str(allowed) for allowed in _FLOAT_DTYPES + _BYTE_DTYPES)
        raise CacheStorageDtypeError("dtype", repr(dtype), names)
    if token_descale and dtype not in _BYTE_DTYPES:
        raise CacheDescaleError("token_descale", f"True with {dtype}", "an 8-bit dtype")
    if token_descale and any(scale is not None for scale in descales):
        raise CacheDescaleError("token_descale", "True with k_descale or v_descale", "one of them")

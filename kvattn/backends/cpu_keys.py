"""Keys and values for the CPU backend: views where memory allows, else gathered pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvattn import quant
from kvattn.request import Request, Span

_PIECE_BYTES = 1 << 19  # of keys: a piece of keys and values fits in a core's second-level cache


class Keys:
    """The keys and values of a request in the compute dtype, as [1, Hk, n, D] tensors."""

    def __init__(self, r: Request, dtype: torch.dtype) -> None:
        assert r.k_cache is not None and r.v_cache is not None
        self.r, self.dtype = r, dtype
        self.k, self.v = r.k_cache, r.v_cache
        self.k_by_token = r.k_descale is not None and quant.per_token(r.k_descale, self.k)
        self.v_by_token = r.v_descale is not None and quant.per_token(r.v_descale, self.v)
        self.dense = r.page_table is None and r.cu_seqlens_k is None
        self._buffers: dict[str, Tensor] = {}
        bytes_per_token = self.k.shape[-2] * self.k.shape[-1] * dtype.itemsize
        piece = max(1, _PIECE_BYTES // max(1, bytes_per_token))
        if r.page_table is not None:
            piece = max(1, piece // r.page_size) * r.page_size
        self.piece = piece

    def small(self, keys: int) -> bool:
        """Whether all keys of a sequence make one piece that needs no conversion."""
        return keys <= self.piece and self.k.dtype == self.dtype

    def every(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Absolute rows first..last of every sequence of a dense batch, [B, Hk, n, D]."""
        k, v = (cache[:, first:last].transpose(1, 2) for cache in (self.k, self.v))
        return k, v

    def whole(self, b: int, span: Span, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Logical keys low..high of one sequence at once."""
        first, last = span.start + low, span.start + high
        return self._load(b, span, first, last, reuse=False)

    def pieces(
        self, b: int, span: Span, low: int, high: int
    ) -> Iterator[tuple[Tensor, Tensor, int, int]]:
        """Logical keys low..high as (k, v, first, last); a piece is valid until the next one."""
        first, stop = span.start + low, span.start + high
        while first < stop:
            last = min(stop, (first // self.piece + 1) * self.piece)
            k, v = self._load(b, span, first, last, reuse=True)
            yield k, v, first - span.start, last - span.start
            first = last

    def _load(
        self, b: int, span: Span, first: int, last: int, reuse: bool
    ) -> tuple[Tensor, Tensor]:
        r = self.r
        pages = None
        if r.page_table is not None:
            pages = r.page_table[span.row, first // r.page_size : -(-last // r.page_size)]
        k = self._part("k", self.k, b, span, first, last, pages, reuse)
        v = self._part("v", self.v, b, span, first, last, pages, reuse)
        if self.k_by_token:
            assert r.k_descale is not None
            k = k * self._scale(r.k_descale, span, first, last, pages)
        if self.v_by_token:
            assert r.v_descale is not None
            v = v * self._scale(r.v_descale, span, first, last, pages)
        return k.transpose(0, 1)[None], v.transpose(0, 1)[None]

    def _part(
        self,
        name: str,
        cache: Tensor,
        b: int,
        span: Span,
        first: int,
        last: int,
        pages: Tensor | None,
        reuse: bool,
    ) -> Tensor:
        """Absolute rows first..last of one sequence, [n, Hk, D] in the compute dtype."""
        if pages is not None:
            offset = first % self.r.page_size
            rows = self._paged(name, cache, pages, reuse)[offset : offset + last - first]
        elif self.r.cu_seqlens_k is not None:
            start = int(self.r.cu_seqlens_k[b])
            rows = cache[start + first : start + last]
        else:
            rows = cache[span.row, first:last]
        return rows if rows.dtype == self.dtype else rows.to(self.dtype)

    def _paged(self, name: str, cache: Tensor, pages: Tensor, reuse: bool) -> Tensor:
        """Whole pages as rows [n * P, Hk, D]: a view of neighbouring pages, else a gather."""
        count, size = pages.shape[0], cache.shape[1]
        start = _consecutive(pages)
        if start is not None and (count == 1 or cache.stride(0) == size * cache.stride(1)):
            return cache[start : start + count].flatten(0, 1)
        if cache.dtype in quant.FP8:  # gathering FP8 is not implemented on the CPU
            return cache.view(torch.uint8).index_select(0, pages).view(cache.dtype).flatten(0, 1)
        if not reuse:
            return cache.index_select(0, pages).flatten(0, 1)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < count:
            buffer = self._buffers[name] = cache.new_empty((count, *cache.shape[1:]))
        torch.index_select(cache, 0, pages, out=buffer[:count])
        return buffer[:count].flatten(0, 1)

    def _scale(
        self, scale: Tensor, span: Span, first: int, last: int, pages: Tensor | None
    ) -> Tensor:
        """Scales per token and head of absolute rows first..last, [n, Hk, 1]."""
        if pages is None:
            rows = scale[span.row, first:last]
        else:
            offset = first % self.r.page_size
            rows = scale[pages.long()].flatten(0, 1)[offset : offset + last - first]
        return rows[..., None].to(self.dtype)


def _consecutive(pages: Tensor) -> int | None:
    """The first page id if the pages lie next to each other in memory order."""
    ids = pages.tolist()
    return ids[0] if ids == list(range(ids[0], ids[0] + len(ids))) else None

"""Keys and values for the CPU backend: views where memory allows, else gathered pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvattn import quant
from kvattn.request import Request, Span

_PIECE_BYTES = 1 << 19  # of keys: a piece of keys and values fits in a core's second-level cache


def reach(r: Request, span: Span, rows: range) -> tuple[int, int]:
    """First and one past the last logical key that any of these rows can see."""
    shift = span.keys - span.q_len
    first, last = rows.start + shift, rows.stop - 1 + shift
    left, right = r.window
    low = 0 if left is None else max(0, first - left)
    high = span.keys if right is None else min(span.keys, last + right + 1)
    if r.attention_chunk > 0:
        chunk = r.attention_chunk
        low, high = max(low, first // chunk * chunk), min(high, (last // chunk + 1) * chunk)
    return low, high


class Keys:
    """The keys and values of a request in the compute dtype, as [1, Hk, n, D] tensors."""

    def __init__(self, r: Request, dtype: torch.dtype) -> None:
        assert r.k_cache is not None and r.v_cache is not None
        self.r, self.dtype = r, dtype
        self.k, self.v = r.k_cache, r.v_cache
        self.k_by_token = r.k_descale is not None and quant.per_token(r.k_descale, self.k)
        self.v_by_token = r.v_descale is not None and quant.per_token(r.v_descale, self.v)
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # and a view [1, Hk, piece, D] of each
        self._row: tuple[int, Tensor] | None = None  # the table's row that was asked for last
        bytes_per_token = self.k.shape[-2] * self.k.shape[-1] * dtype.itemsize
        piece = max(1, _PIECE_BYTES // max(1, bytes_per_token))
        if r.page_table is not None:
            piece = max(1, piece // r.page_size) * r.page_size
        self.piece = piece

    def whole(self, b: int, span: Span, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Logical keys low..high of one sequence at once."""
        first, last = span.start + low, span.start + high
        return self._load(b, span, first, last, reuse=False)

    def count(self, span: Span, low: int, high: int) -> int:
        """How many pieces logical keys low..high come in."""
        first, stop = span.start + low, span.start + high
        return -(-stop // self.piece) - first // self.piece

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
        """Absolute rows first..last of one sequence as [1, Hk, n, D] in the compute dtype."""
        r, pages, slot = self.r, None, None
        row, offset, neighbours = span.row, first, True
        if r.page_table is not None:
            begin, count = first // r.page_size, -(-last // r.page_size) - first // r.page_size
            ids = r.pages[b][begin : begin + count]
            if self._row is None or self._row[0] != span.row:
                self._row = span.row, r.page_table[span.row]
            pages = self._row[1].narrow(0, begin, count)
            row, offset = ids[0], first % r.page_size
            neighbours = ids == list(range(row, row + count))
        elif r.cu_seqlens_k is not None:
            slot = int(r.cu_seqlens_k[b]) + first
        parts = []
        for cache in (self.k, self.v):
            if pages is not None and not (neighbours and flat(cache, pages.shape[0])):
                part = self._gather(cache, pages, reuse)
                if part.shape[2] != last - first:
                    part = part.narrow(2, offset, last - first)
            else:
                part = self._view(cache, slot, row, offset, last - first)
            parts.append(part if part.dtype == self.dtype else part.to(self.dtype))
        k, v = parts
        if self.k_by_token:
            assert r.k_descale is not None
            k = k * self._scale(r.k_descale, span, first, last, pages)
        if self.v_by_token:
            assert r.v_descale is not None
            v = v * self._scale(r.v_descale, span, first, last, pages)
        return k, v

    def _view(self, cache: Tensor, slot: int | None, row: int, first: int, count: int) -> Tensor:
        """Rows that lie at one stride, in place: `count` of them from a slot, or of a row."""
        *lead, token, head, unit = cache.stride()
        start = slot * token if slot is not None else row * lead[0] + first * token
        shape = (1, cache.shape[-2], count, cache.shape[-1])
        return cache.as_strided(shape, (0, head, token, unit), cache.storage_offset() + start)

    def _gather(self, cache: Tensor, pages: Tensor, reuse: bool) -> Tensor:
        """Copies whole pages to [1, Hk, n * P or more, D]; `reuse`: valid until the next piece."""
        if cache.dtype in quant.FP8:  # gathering FP8 is not implemented on the CPU
            return _rows(cache.view(torch.uint8).index_select(0, pages).view(cache.dtype))
        if not reuse:
            return _rows(cache.index_select(0, pages))
        known = self._buffers.get(id(cache))
        if known is None:
            pool = cache.new_empty((self.piece // self.r.page_size, *cache.shape[1:]))
            known = self._buffers[id(cache)] = pool, _rows(pool)
        buffer, view = known
        count = pages.shape[0]
        target = buffer if buffer.shape[0] == count else buffer.narrow(0, 0, count)
        torch.index_select(cache, 0, pages, out=target)
        return view

    def _scale(
        self, scale: Tensor, span: Span, first: int, last: int, pages: Tensor | None
    ) -> Tensor:
        """Scales per token and head of absolute rows first..last, [1, Hk, n, 1]."""
        if pages is None:
            rows = scale[span.row, first:last]
        else:
            offset = first % self.r.page_size
            rows = scale[pages].flatten(0, 1)[offset : offset + last - first]
        return rows.transpose(0, 1)[None, ..., None].to(self.dtype)


def _rows(pages: Tensor) -> Tensor:
    """Pages [n, P, Hk, D] as [1, Hk, n * P, D]."""
    return pages.flatten(0, 1).transpose(0, 1).unsqueeze(0)


def flat(cache: Tensor, pages: int) -> bool:
    """Whether the slots of neighbouring pages lie at one stride."""
    return pages == 1 or cache.stride(0) == cache.shape[1] * cache.stride(1)

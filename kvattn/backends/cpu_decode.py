"""Decode on the CPU: single tokens whose keys lie in views, with as few calls into torch as can be.

Where a batch reads and writes follows from the index tensors alone: it is worked out once for the
calls in which they hold the same numbers, such as those of the layers of one forward pass.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvattn import checks
from kvattn.backends import cpu_append
from kvattn.backends.cpu_append import Weights, ready, ready_pair
from kvattn.backends.cpu_keys import flat, reach
from kvattn.request import Request
from kvattn.rotary import Factors

_fused = torch._scaled_dot_product_flash_attention_for_cpu  # cheaper to call than torch.ops.aten
_FIRST_ROW = range(1)
_FEW = 64  # numbers that are quicker to look at in Python than in torch
_LONGEST = 1 << 11  # keys of a view that serves a whole batch: longer sequences gain nothing
_LOOSE = 1.5  # slots in that view, for each one that is shown


class Place(NamedTuple):
    """A strided view of a cache, relative to where the cache starts in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, cache: Tensor) -> Tensor:
        return cache.as_strided(self.shape, self.stride, cache.storage_offset() + self.offset)


class Piece(NamedTuple):
    """Sequences that one kernel call serves: all of a batch, or one of it."""

    first: int
    rows: int
    k: Place
    v: Place
    bias: Tensor | None = None  # [rows, 1, 1, keys], -inf where a sequence has no visible key


class Decode:
    """A batch of single tokens: normalise, rotate, write, attend.

    Called with the tensors of any call of the form that it was made for; q (B, 1, H, D).
    """

    def __init__(self, r: Request, pieces: list[Piece]) -> None:
        count, _, heads, dim = r.lead.shape
        self.pieces, self.scale, self.interleaved = pieces, r.softmax_scale, r.rotary_interleaved
        self.eps = r.norm_eps
        self.tiles = count, r.kv_heads, heads // r.kv_heads, dim
        self.rows = count, 1, heads, dim
        self.rotates = r.k is not None and r.rotary_cos is not None
        slots = cpu_append.slots(r, 1) if r.k is not None else []
        self.slots = torch.tensor(slots, device="cpu")
        self.slot = [_slot(cache, *slots) for cache in _caches(r)] if len(slots) == 1 else None
        self.bytes = [checks.extent(x) for x in (r.lead, r.k, r.v) if x is not None]
        self.cache_bytes = [checks.extent(cache) for cache in _caches(r)]

    @classmethod
    def of(cls, r: Request) -> Decode | None:
        """None where the call needs more than views of its caches."""
        if not (_simple(r) and (r.k is None or _simple_append(r))):
            return None
        together = _together(r) if r.batch > 1 else None
        pieces = [together] if together is not None else _each(r)
        return None if pieces is None else cls(r, pieces)

    def __call__(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        by: Factors | None,
        weights: Weights = (None, None),
    ) -> tuple[Tensor, Tensor] | None:
        """out [B, 1, H, D] and lse [B, Hk, g]; None where the kernel's result is not honest.

        Such a call can then be made the long way: to append twice is to write the same again.
        """
        if k is None or v is None:
            q = ready(q, weights[0], None, self.interleaved, self.eps)
        else:
            if self._meet((q, k, v), (k_cache, v_cache)):
                return None
            if by is not None or weights != (None, None):
                q, k = ready_pair(q, k, weights, by, self.interleaved, self.eps)
            self._store(k, k_cache, 0)
            self._store(v, v_cache, 1)
        tiles = q.reshape(self.tiles)
        if len(self.pieces) == 1:
            result = self._attend(self.pieces[0], tiles, k_cache, v_cache)
            return None if result is None else (result[0].reshape(self.rows), result[1])
        outs, lses = [], []
        for piece in self.pieces:
            part = tiles.narrow(0, piece.first, piece.rows)
            result = self._attend(piece, part, k_cache, v_cache)
            if result is None:
                return None
            outs.append(result[0])
            lses.append(result[1])
        return torch.cat(outs).reshape(self.rows), torch.cat(lses)

    def _meet(self, read: tuple[Tensor, ...], written: tuple[Tensor, ...]) -> bool:
        """Whether what is read may lie in the caches that are written."""
        caches = [x.data_ptr() for x in written]
        for x, size in zip(read, self.bytes, strict=True):
            start = x.data_ptr()
            for first, room in zip(caches, self.cache_bytes, strict=True):
                if first - size < start < first + room:
                    return True
        return False

    def _store(self, token: Tensor, cache: Tensor, which: int) -> None:
        if self.slot is not None:
            self.slot[which].of(cache).copy_(token)
        else:
            cache.flatten(0, 1).index_copy_(0, self.slots, token.flatten(0, 1))

    def _attend(
        self, piece: Piece, tiles: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        _, _, k, v, bias = piece
        keys, values = k.of(k_cache), v.of(v_cache)
        out, lse = _fused(tiles, keys, values, 0.0, False, attn_mask=bias, scale=self.scale)
        # What lies behind the shorter sequences may be NaN, which a mask does not stop.
        sound = finite(lse) and (bias is None or math.isfinite(out.sum().item()))
        return (out, lse) if sound else None


def finite(lse: Tensor) -> bool:
    """Whether every row has an honest lse: finite and not 0, or -inf for a row without keys."""
    if lse.numel() <= _FEW:
        numbers = lse.flatten().tolist()
        total = sum(numbers)
        return total == total and total != math.inf and 0.0 not in numbers
    return bool(lse.reciprocal().isfinite().all())


def _simple(r: Request) -> bool:
    """One row for each sequence, in its cache's dtype, and nothing that changes the scores."""
    assert r.k_cache is not None and r.v_cache is not None
    q = r.lead
    return (
        r.cu_seqlens_q is None
        and r.seqused_q is None
        and r.cu_seqlens_k is None
        and q.shape[0] > 0
        and q.shape[1] == 1
        and q.stride(-1) == 1  # the kernel assumes it
        and q.dtype == r.k_cache.dtype
        and r.q_descale is None
        and r.k_descale is None
        and r.v_descale is None
        and r.alibi_slopes is None
        and r.sinks is None
        and all(span.active for span in r.spans)
    )


def _simple_append(r: Request) -> bool:
    """One new token for each sequence, stored as it is, in caches whose slots lie at one stride."""
    assert r.k is not None
    whole = r.batch == 1 or all(flat(cache, cache.shape[0]) for cache in _caches(r))
    return r.k.shape[1] == 1 and whole and cpu_append.plain(r)


def _slot(cache: Tensor, slot: int) -> Place:
    """One slot of a cache, [1, 1, Hk, D]; slots count through rows or pages."""
    first, token, head, unit = cache.stride()
    row, offset = divmod(slot, cache.shape[1])
    return Place((1, 1, *cache.shape[2:]), (0, 0, head, unit), row * first + offset * token)


def _each(r: Request) -> list[Piece] | None:
    """One piece for each sequence; None if the keys of one do not lie at one stride."""
    pieces = []
    for b, span in enumerate(r.spans):
        low, high = reach(r, span, _FIRST_ROW)
        origins = _origins(r, b)
        if high <= low or origins is None:
            return None
        k, v = (
            _rows(cache, 1, 0, origin, span.start + low, high - low)
            for cache, origin in zip(_caches(r), origins, strict=True)
        )
        pieces.append(Piece(b, 1, k, v))
    return pieces


def _together(r: Request) -> Piece | None:
    """One piece for the whole batch, if its sequences start at equal distances."""
    spans, shown = r.spans, []
    for span in spans:
        low, high = reach(r, span, _FIRST_ROW)
        if high <= low:
            return None
        shown.append((span.start + low, span.start + high))
    first, last = min(low for low, _ in shown), max(high for _, high in shown)
    used = sum(high - low for low, high in shown)
    if last - first > _LONGEST or (last - first) * len(spans) > _LOOSE * used:
        return None
    origins = [_origins(r, b) for b in range(len(spans))]
    places = []
    for which, cache in enumerate(_caches(r)):
        starts = [origin[which] for origin in origins if origin is not None]
        distance = starts[1] - starts[0] if len(starts) > 1 else -1
        inside = starts[-1:] <= [cache.shape[0] * cache.stride(0) - last * cache.stride(1)]
        equal = starts == [starts[0] + b * distance for b in range(len(spans))] if starts else False
        if distance < 0 or not equal or not (inside or not r.paged):
            return None
        places.append(_rows(cache, len(spans), distance, starts[0], first, last - first))
    k, v = places
    return Piece(0, len(spans), k, v, _bias(shown, first, last, r.lead.dtype))


def _caches(r: Request) -> tuple[Tensor, Tensor]:
    assert r.k_cache is not None and r.v_cache is not None
    return r.k_cache, r.v_cache


def _origins(r: Request, b: int) -> list[int] | None:
    """Where absolute row 0 of a sequence lies in each cache; None if its rows are scattered."""
    span = r.spans[b]
    if r.page_table is None:
        return [span.row * cache.stride(0) for cache in _caches(r)]
    pages = r.pages[b]
    neighbours = bool(pages) and pages == list(range(pages[0], pages[0] + len(pages)))
    if not neighbours or not all(flat(cache, len(pages)) for cache in _caches(r)):
        return None
    return [pages[0] * cache.stride(0) for cache in _caches(r)]


def _rows(cache: Tensor, batch: int, distance: int, origin: int, first: int, count: int) -> Place:
    """Rows first.. of sequences at equal distances, [batch, Hk, count, D]."""
    _, token, head, unit = cache.stride()
    shape = (batch, cache.shape[2], count, cache.shape[3])
    return Place(shape, (distance, head, token, unit), origin + first * token)


def _bias(shown: list[tuple[int, int]], first: int, last: int, dtype: torch.dtype) -> Tensor | None:
    """[B, 1, 1, last - first]: 0 where rows are shown, -inf elsewhere; None if all of them are."""
    if all(span == (first, last) for span in shown):
        return None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bias = torch.full((len(shown), 1, 1, last - first), -math.inf, dtype=wide, device="cpu")
    for b, (low, high) in enumerate(shown):
        bias[b, ..., low - first : high - first] = 0
    return bias

"""A paged KV cache: keys and values of many sequences and layers in one pool of pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvattn import ops
from kvattn.counting import listed, positive, whole
from kvattn.errors.cache_kinds import LayerIndexError
from kvattn.errors.kinds import NewTokenBatchError
from kvattn.forms import check_append
from kvattn.storage import PageStorage, Scale
from kvattn.tables import CacheView, PageTables

__all__ = ["CacheStats", "CacheView", "PagedKVCache"]


class CacheStats(NamedTuple):
    """Where the memory of a cache stands.

    Attributes:
        sequences: live sequences.
        tokens: committed tokens, those in shared pages counted once per sequence.
        pages: all pages of the pool.
        pages_used: pages that at least one sequence holds.
        pages_free: pages that nobody holds.
        pages_shared: pages that two or more sequences hold.
        bytes: size of the storage, all layers, scales included.
        bytes_used: the part of it that lies in used pages.
    """

    sequences: int
    tokens: int
    pages: int
    pages_used: int
    pages_free: int
    pages_shared: int
    bytes: int
    bytes_used: int


class PagedKVCache(PageTables):
    """Keys and values of many sequences in pages of one pool, for every layer of a model.

    Page ``p`` means page ``p`` of every layer, so one table serves them all. Prefixes are shared by
    reference; a shared page is copied when one of its holders is about to write into it. All
    tensors keep their addresses for the cache's life, so CUDA graphs may capture them.

    A step is: ``reserve`` room for the new tokens; attention calls that append them, one per layer;
    ``commit``. Sequences are known by the number of their row in ``page_table`` and ``lengths``.

    Args:
        num_layers: layers that share the page table.
        num_pages: pages in the pool: the hard limit for all sequences together.
        page_size: tokens per page; any positive number.
        num_kv_heads: kv heads Hk.
        head_dim: dimension D of a key.
        head_dim_v: dimension Dv of a value; None means D.
        dtype: float64, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8.
        device: where the storage, the page table and the lengths live.
        max_batch: rows of the page table: the most sequences alive at a time.
        max_pages_per_seq: columns of the page table; None means num_pages.
        k_descale: what stored keys are multiplied by: a float, or a tensor of shape (Hk,) or
            (num_layers, Hk). Kept as float32.
        v_descale: the same for values.
        token_descale: keep one float32 scale per token and head instead, written by the append
            (8-bit dtypes only).

    Raises:
        CacheSizeError: a size is not a positive integer.
        CacheStorageDtypeError: the dtype cannot be stored.
        CacheDescaleError: the scales do not fit.

    Example:
        >>> cache = PagedKVCache(num_layers=2, num_pages=64, page_size=16, num_kv_heads=2,
        ...                      head_dim=64, max_batch=8)
        >>> seqs = cache.allocate(2)
        >>> cache.reserve({seq: 5 for seq in seqs})
        >>> for layer in range(2):
        ...     table, lengths = cache.view(seqs)
        ...     out = flash_attn_with_kvcache(q[layer], cache.k(layer), cache.v(layer),
        ...                                   k[layer], v[layer], cache_seqlens=lengths,
        ...                                   page_table=table, causal=True)
        >>> cache.commit({seq: 5 for seq in seqs})
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        max_batch: int = 8,
        max_pages_per_seq: int | None = None,
        k_descale: Scale = None,
        v_descale: Scale = None,
        token_descale: bool = False,
    ) -> None:
        super().__init__(
            num_pages=num_pages,
            page_size=page_size,
            max_batch=max_batch,
            max_pages_per_seq=max_pages_per_seq,
            device=device,
        )
        self.num_layers = positive("num_layers", num_layers)
        self.num_kv_heads = positive("num_kv_heads", num_kv_heads)
        self.head_dim = positive("head_dim", head_dim)
        self.head_dim_v = positive("head_dim_v", head_dim if head_dim_v is None else head_dim_v)
        self.dtype = dtype
        # An inference tensor could not be written outside inference mode later.
        with torch.inference_mode(False):
            self._storage = PageStorage(
                num_layers,
                (num_pages, page_size, num_kv_heads),
                (self.head_dim, self.head_dim_v),
                dtype,
                self.device,
                (k_descale, v_descale),
                token_descale,
            )

    def k(self, layer: int) -> Tensor:
        """The keys of ``layer``, shape (num_pages, page_size, Hk, D)."""
        return self._storage.k[self._layer(layer)]

    def v(self, layer: int) -> Tensor:
        """The values of ``layer``, shape (num_pages, page_size, Hk, Dv)."""
        return self._storage.v[self._layer(layer)]

    def k_descale(self, layer: int) -> Tensor | None:
        """What to pass as ``k_descale`` for ``layer``: None, (1, Hk), or one scale per slot."""
        return self._storage.k_descale[self._layer(layer)]

    def v_descale(self, layer: int) -> Tensor | None:
        """What to pass as ``v_descale`` for ``layer``: None, (1, Hk), or one scale per slot."""
        return self._storage.v_descale[self._layer(layer)]

    def common_prefix(self, seqs: Sequence[int]) -> int:
        """Leading tokens in pages that all of ``seqs`` share: what ``common_prefix_len`` may be.

        Whole pages; of a page that ends a sequence, the slots behind it count too.
        `kvattn.common_prefix` finds it on the device.
        """
        columns = zip(*(self.pages(seq) for seq in listed(seqs)), strict=False)
        return len(list(takewhile(lambda pages: len(set(pages)) == 1, columns))) * self.page_size

    def append(self, layer: int, k: Tensor, v: Tensor, seqs: int | Sequence[int]) -> None:
        """Writes new keys and values of one layer behind ``seqs``, reserving room where needed.

        The tokens count only after ``commit``, so every layer can be appended before it.

        Args:
            layer: which layer.
            k: new keys, shape (len(seqs), new, Hk, D).
            v: new values, shape (len(seqs), new, Hk, Dv).
            seqs: one id, or one id per row of k.

        Raises:
            NewTokenBatchError: k has not one row per sequence.
            OutOfPagesError, SequenceTooLongError: as ``reserve``; nothing is written.
        """
        rows = self._distinct("seqs", listed(seqs))
        if isinstance(k, Tensor) and (k.ndim != 4 or k.shape[0] != len(rows)):
            allowed = f"({len(rows)}, new, {self.num_kv_heads}, {self.head_dim})"
            raise NewTokenBatchError("k", tuple(k.shape), allowed)
        call: dict[str, Any] = {
            "k": k,
            "v": v,
            "k_cache": self.k(layer),
            "v_cache": self.v(layer),
            "k_descale": self.k_descale(layer),
            "v_descale": self.v_descale(layer),
        }
        call |= self._places(rows)
        check_append(call)
        self.reserve([(seq, k.shape[1]) for seq in rows])
        ops.append(call | self._places(rows))

    def stats(self) -> CacheStats:
        """Counts of sequences, tokens, pages and bytes; reads nothing from the device."""
        used = self.num_pages - self._pool.num_free
        size = self._storage.nbytes
        return CacheStats(
            sequences=len(self._live),
            tokens=sum(sequence.length for sequence in self._live.values()),
            pages=self.num_pages,
            pages_used=used,
            pages_free=self._pool.num_free,
            pages_shared=sum(refs > 1 for refs in self._pool.refs),
            bytes=size,
            bytes_used=size // self.num_pages * used,
        )

    def __repr__(self) -> str:
        used = self.num_pages - self._pool.num_free
        return (
            f"PagedKVCache({len(self._live)}/{self.max_batch} sequences, {used}/{self.num_pages} "
            f"pages of {self.page_size}, {self.num_layers} layers, {self.dtype}, {self.device})"
        )

    def _places(self, rows: list[int]) -> dict[str, Tensor]:
        table, lengths = self.view(rows)
        return {"page_table": table, "cache_seqlens": lengths}

    def _copy_pages(self, originals: Sequence[int], copies: Sequence[int]) -> None:
        self._storage.copy_pages(originals, copies)

    def _layer(self, layer: int) -> int:
        found = whole(layer)
        if found is None or not 0 <= found < self.num_layers:
            raise LayerIndexError("layer", repr(layer), f"0 to {self.num_layers - 1}")
        return found

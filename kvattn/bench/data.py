"""The tensors of a cell: one truth, laid out as each kernel wants it, in several layers.

Layers share lengths and page tables, as in a model, and differ in keys and values: calls that go
from layer to layer find a cold cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvattn.bench.shapes import DTYPES, Work
from kvattn.rotary import rotate

Pair = tuple[Tensor, Tensor]
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Data:
    """Inputs of one cell on one device.

    Args:
        work: the cell.
        device: where the tensors live.
        layers: how many sets of keys and values.
        seed: of the random numbers.
    """

    def __init__(self, work: Work, device: torch.device | str, layers: int, seed: int = 0) -> None:
        self.work, self.layers = work, layers
        self.device = torch.device(device)
        self.dtype, self.kv_dtype = DTYPES[work.dtype], DTYPES[work.kv_dtype]
        self._random = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal random numbers; with an FP8 cache, such as FP8 holds exactly."""
        dtype = dtype or self.dtype
        fp8 = self.kv_dtype == torch.float8_e4m3fn
        plain = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        x = torch.randn(shape, generator=self._random, device=self.device, dtype=plain)
        return (x.to(torch.float8_e4m3fn) if fp8 else x).to(dtype)

    def ints(self, values: list[int] | tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    # What is asked.

    @cached_property
    def q(self) -> Tensor:
        """Packed queries (rows, H, D)."""
        return self.normal(self.work.rows, self.work.model.heads, self.work.model.dim)

    @cached_property
    def qv(self) -> Tensor | None:
        """Latent part of the queries (rows, H, Dv)."""
        model = self.work.model
        return self.normal(self.work.rows, model.heads, model.dim_v) if model.latent else None

    def padded(self, x: Tensor) -> Tensor:
        """(rows, ...) as (B, Sq, ...), for sequences of equally many rows."""
        return x.view(self.work.batch, self.work.queries[0], *x.shape[1:])

    @cached_property
    def sinks(self) -> Tensor | None:
        model = self.work.model
        return self.normal(model.heads).float() if self.work.window and model.sinks else None

    @cached_property
    def ancestors(self) -> Tensor | None:
        """(q, q): whether a node of the binary tree of drafts sees another."""
        if not self.work.tree:
            return None
        size = self.work.queries[0]
        seen = torch.eye(size, dtype=torch.bool)
        for node in range(1, size):
            seen[node] |= seen[(node - 1) // 2]
        return seen.to(self.device)

    @property
    def tree(self) -> Mask | None:
        """The mask_mod of the tree of drafts."""
        ancestors = self.ancestors
        first = self.keys - self.work.queries[0]  # a tensor: one kernel for every context
        return None if ancestors is None else tree_mask(ancestors, first)

    @cached_property
    def tables(self) -> Pair:
        """cos and sin (positions, D / 2) in fp32, of values that 16 bits hold exactly."""
        half = self.work.model.dim // 2
        rate = 1e4 ** -(torch.arange(half, device=self.device) / half)
        angle = torch.arange(max(self.work.keys), device=self.device)[:, None] * rate
        cos, sin = (x.to(torch.bfloat16).float() for x in (angle.cos(), angle.sin()))
        return cos, sin

    @cached_property
    def fresh(self) -> Pair:
        """New keys and values (B, n, Hk, D | Dv) as they come from the projections."""
        model, shape = self.work.model, (self.work.batch, self.work.new, self.work.model.kv_heads)
        return self.normal(*shape, model.dim), self.normal(*shape, model.dim_v)

    def appended(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """What FlashAttention's signature takes to rotate and append; tables in `dtype`."""
        cos, sin = (x.to(dtype or x.dtype) for x in self.tables)
        k, v = self.fresh
        tables = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
        return {"k": k, "v": v, **tables}

    # Lengths.

    @cached_property
    def keys(self) -> Tensor:
        """(B,) keys of each sequence, new ones included."""
        return self.ints(self.work.keys)

    @cached_property
    def cached(self) -> Tensor:
        """(B,) keys that the cache holds before the call."""
        return self.keys - self.work.new

    @cached_property
    def q_borders(self) -> Tensor:
        return self.ints(_borders(self.work.queries))

    @cached_property
    def k_borders(self) -> Tensor:
        return self.ints(_borders(self.work.keys))

    @cached_property
    def positions(self) -> Tensor:
        """(rows,) position of every query, aligned to the end of its keys."""
        start = self.keys - self.ints(self.work.queries) - self.q_borders[:-1]
        rows = torch.arange(self.work.rows, device=self.device)
        counts = self.ints(self.work.queries)
        return (rows + start.repeat_interleave(counts)).long()

    # The truth: keys and values in a row, sequence after sequence.

    @cached_property
    def packed(self) -> Pair:
        """(layers, total, Hk, D | Dv): what the caches hold once the call has appended."""
        model, total = self.work.model, sum(self.work.keys)
        channels = model.kv_channels if model.latent else model.dim
        k = torch.stack([self._drawn(total, channels) for _ in range(self.layers)])
        if model.latent:
            return k[..., model.dim_v :], k[..., : model.dim_v]
        v = torch.stack([self._drawn(total, model.dim_v) for _ in range(self.layers)])
        if self.work.append:
            at = self._rows_of_new
            k[:, at] = self.rotated(self.fresh[0].flatten(0, 1)).to(self.kv_dtype)
            v[:, at] = self.fresh[1].flatten(0, 1).to(self.kv_dtype)
        return k, v

    def _drawn(self, total: int, channels: int) -> Tensor:
        x = self.normal(total, self.work.model.kv_heads, channels, dtype=self.kv_dtype)
        first, prefix = self.work.keys[0], self.work.prefix
        for b in range(1, self.work.batch if prefix else 1):
            x[b * first : b * first + prefix] = x[:prefix]
        return x

    @cached_property
    def _rows_of_new(self) -> Tensor:
        """Where in `packed` the new tokens lie, sequence after sequence."""
        steps = torch.arange(self.work.new, device=self.device) - self.work.new
        return (self.k_borders[1:, None] + steps).flatten().long()

    def rotated(self, x: Tensor) -> Tensor:
        """Tokens (rows, heads, D) turned to their positions, rounded to their dtype."""
        return rotate(x, *self.tables, self.positions, interleaved=False)

    # Layouts.

    @cached_property
    def prompts(self) -> Pair:
        """The truth of sequences alike, (layers, B, Sk, Hk, D | Dv)."""
        shape = (self.layers, self.work.batch, self.work.keys[0])
        k, v = (x.view(*shape, *x.shape[2:]) for x in self.packed)
        return k, v

    @cached_property
    def capacity(self) -> int:
        """Slots a sequence: the longest one, in whole pages."""
        step = self.work.page or 1
        return -(-max(self.work.keys) // step) * step

    @cached_property
    def dense(self) -> Pair:
        """(layers, B, capacity, Hk, D | Dv), zero where nothing is stored."""
        slots = self._owner * self.capacity + self._index
        shape = (self.work.batch, self.capacity)
        k, v = self._stored(slots, shape)
        return k, v

    @cached_property
    def pages(self) -> Pair:
        """(layers, pages, page, Hk, D | Dv); shared pages are stored once."""
        page = self.work.page
        table = self.page_table.long()
        slots = table[self._owner, self._index // page] * page + self._index % page
        return self._stored(slots, (int(self.page_table.max()) + 1, page))

    def _stored(self, slots: Tensor, shape: tuple[int, int]) -> Pair:
        """The truth without the tokens to append, moved to its slots."""
        keep = torch.ones_like(slots, dtype=torch.bool)
        if self.work.append:
            keep[self._rows_of_new] = False
        model, source = self.work.model, self.packed
        if model.latent:  # key and value are slices of one buffer
            joined = torch.cat(source[::-1], -1)
            (whole,) = self._scattered([joined], slots, keep, shape)
            return whole[..., model.dim_v :], whole[..., : model.dim_v]
        k, v = self._scattered(list(source), slots, keep, shape)
        return k, v

    def _scattered(
        self, sources: list[Tensor], slots: Tensor, keep: Tensor, shape: tuple[int, int]
    ) -> list[Tensor]:
        moved = []
        slots = slots[keep]
        for source in sources:
            size = (self.layers, shape[0] * shape[1], *source.shape[2:])
            store = torch.zeros(size, dtype=source.dtype, device=self.device)
            for layer in range(self.layers):
                raw, tokens = _bytes(store[layer]), _bytes(source[layer])
                raw[slots] = tokens if bool(keep.all()) else tokens[keep]
            moved.append(store.view(self.layers, *shape, *source.shape[2:]))
        return moved

    @cached_property
    def _owner(self) -> Tensor:
        """(total,) the sequence of every key."""
        index = torch.arange(self.work.batch, device=self.device)
        return index.repeat_interleave(self.keys.long())

    @cached_property
    def _index(self) -> Tensor:
        """(total,) the position of every key in its sequence."""
        rows = torch.arange(sum(self.work.keys), device=self.device)
        return rows - self.k_borders[:-1].long()[self._owner]

    @cached_property
    def page_table(self) -> Tensor:
        """(B, pages of the longest) shuffled; 0 past the end of a sequence."""
        page, prefix = self.work.page, self.work.prefix
        counts = [-(-k // page) for k in self.work.keys]
        shared = prefix // page
        own = [n - shared for n in counts]
        order = torch.randperm(shared + sum(own), generator=self._random, device=self.device)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=self.device)
        used = torch.arange(max(counts), device=self.device) < self.ints(counts)[:, None]
        used[:, :shared] = False
        table[:, :shared] = order[:shared].int()
        table[used] = order[shared:].int()
        return table

    # The append.

    def forget_new(self, layout: str) -> None:
        """Clears the new tokens of the first layer, so that a call has to write them again."""
        for cache in self._layout(layout):
            _bytes(cache[0])[self._slots_of_new(layout)] = 0

    def new_stored(self, layout: str) -> Pair:
        """The new tokens as the first layer holds them, sequence after sequence."""
        at = self._slots_of_new(layout)
        k, v = (_bytes(cache[0])[at].view(cache.dtype) for cache in self._layout(layout))
        return k, v

    def new_wanted(self) -> Pair:
        """The same, as it must be."""
        k, v = (x[0][self._rows_of_new] for x in self.packed)
        return k, v

    def _layout(self, layout: str) -> Pair:
        return self.pages if layout == "pages" else self.dense

    def _slots_of_new(self, layout: str) -> Pair:
        owner, index = self._owner[self._rows_of_new], self._index[self._rows_of_new]
        if layout == "dense":
            return owner, index
        page = self.work.page
        return self.page_table.long()[owner, index // page], index % page


def tree_mask(ancestors: Tensor, first: Tensor) -> Mask:
    """A mask_mod: keys before `first` (B,), and behind it the ancestors of the query's node."""
    last = len(ancestors) - 1

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        start = first[b]
        return (kv_idx < start) | ancestors[q_idx, (kv_idx - start).clamp(0, last)]

    return mask


def _bytes(x: Tensor) -> Tensor:
    """FP8 as bytes: indexed writes of FP8 are not implemented everywhere."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _borders(counts: tuple[int, ...]) -> list[int]:
    borders = [0]
    for n in counts:
        borders.append(borders[-1] + n)
    return borders


def layers_for(work: Work, cold: int, limit: int) -> int:
    """How many layers make a round trip longer than the cache, within `limit` bytes.

    Args:
        cold: bytes after which the first layer has left the cache.
        limit: bytes that all layouts of all layers may take.
    """
    layer = sum(work.keys) * work.token_bytes
    wanted = -(-cold // max(1, layer)) + 1
    return max(1, min(max(20, wanted), limit // max(1, 3 * layer)))

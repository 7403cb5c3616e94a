"""Seeded random calls over the whole contract, valid by its rules and small enough to loop over."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from random_base import BF16, E4M3, F16, F32, F64, INT8, PAGE_SIZES, WIDE, Call
from random_tools import Array, clone, cumulative, describe, ints, strided

__all__ = ["as_cache_call", "clone", "describe", "random_call", "random_varlen_call"]


def random_call(seed: int, plain: bool = False) -> dict[str, Any]:
    """Keyword arguments of `flash_attn_with_kvcache`; `plain` makes rare features rarer."""
    return _CacheCall(seed, plain).built()


def random_varlen_call(seed: int, plain: bool = False) -> dict[str, Any]:
    """Keyword arguments of `flash_attn_varlen_func`."""
    return _VarlenCall(seed, plain).built()


def as_cache_call(call: dict[str, Any]) -> dict[str, Any]:
    """The oracle's names for a call of either function."""
    if "k_cache" in call:
        return call
    names = {"k": "k_cache", "v": "v_cache"}
    return {names.get(name, name): value for name, value in call.items()}


class _CacheCall(Call):
    def built(self) -> dict[str, Any]:
        self.geometry()
        self.dtypes()
        self.queries()
        self.masks()
        self.capacity()
        self.lengths()
        self.lines()
        self.rotary()
        self.liveness((self.pages, self.slots), self.ends)
        self.caches()
        self.descales()
        self.mx_scales()
        self.new_tokens()
        self.scores()
        self.only_qv()
        self.norms()
        self.hints()
        self.output()
        if self.d.chance(0.7):
            self.kw["return_softmax_lse"] = True
        return self.kw

    def capacity(self) -> None:
        d = self.d
        self.paged = self.may_page and d.chance(0.5)
        if self.paged:
            self.slots = d.pick((*PAGE_SIZES, 32) if self.mx else PAGE_SIZES)
            self.max_pages = d.whole(1, max(1, 40 // self.slots)) if d.chance(0.97) else 0
            self.cap = self.slots * self.max_pages
        else:
            sizes = (d.whole(1, 40), 32, 150 if self.mx else 20)
            self.cap = self.slots = d.pick(sizes) if d.chance(0.97) else 0

    def lengths(self) -> None:
        """Lengths around the append, in every form the contract takes."""
        d, kw = self.d, self.kw
        self.appending = d.chance(0.45)
        self.by_slot = self.appending and d.chance(0.25)
        self.padded_new = d.chance(0.5)
        if self.appending:
            self._new_lengths()
        longest = max(self.new, default=0)
        form = d.pick(["tensor"] * 8 + ["int"] + ["whole"] * (not self.appending))
        self.ends = [self.cap] * self.batch
        if form == "int":
            start = d.whole(0, self.cap - longest)
            kw["cache_seqlens"] = start + longest * self.by_slot
            self.ends = [start + (longest if self.by_slot else n) for n in self.new]
        elif form == "tensor":
            self.ends = [d.whole(n, self.cap) for n in self.new]
            if d.chance(0.1):
                self.ends = [-1 if d.chance(0.4) else end for end in self.ends]
            pairs = zip(self.ends, self.new, strict=True)
            kw["cache_seqlens"] = ints([e if self.by_slot or e < 0 else e - n for e, n in pairs])
        if d.chance(0.2):
            pairs = zip(self.ends, self.new, strict=True)
            self.leftpad = [d.whole(0, end - n if end >= 0 else 50) for end, n in pairs]
            kw["cache_leftpad"] = ints(self.leftpad)
        for b, end in enumerate(self.ends):
            if end < 0:
                self._forget_queries(b)

    def _forget_queries(self, b: int) -> None:
        """An inactive row is not read."""
        start = sum(self.room[:b])
        for name in ("q", "qv"):
            if name in self.kw:
                rows = self.kw[name]
                rows = rows[b] if self.padded else rows[start : start + self.room[b]]
                rows.copy_(torch.full(rows.shape, torch.nan))

    def _new_lengths(self) -> None:
        d = self.d
        most = min(6, self.cap)
        self.new = [d.whole(0, most) for _ in self.new]
        self.width_new = d.whole(0, most)
        if self.padded_new:
            self.new = [self.width_new] * self.batch
        elif not self.padded and max(self.sq, default=0) <= most and d.chance(0.5):
            self.new = list(self.sq)  # the new tokens are the query tokens
        skipped = 0.2 * self.by_slot
        self.written = [[not d.chance(skipped) for _ in range(n)] for n in self.new]

    def lines(self) -> None:
        """Which cache row or page-table row each sequence has."""
        d, count = self.d, self.batch
        self.line = list(range(count))
        if d.chance(0.25):
            count += d.whole(0, 2)
            self.line = d.rng.permutation(count)[: self.batch].tolist()
            if not self.appending and count and d.chance(0.4):
                self.line = d.rng.integers(count, size=self.batch).tolist()
            self.kw["cache_batch_idx"] = ints(self.line)
        if self.paged:
            shared = not self.appending and d.chance(0.3)
            used = [max(0, end) for end in self.ends]
            self.lay_pages(used, count, self.max_pages, shared, self.leftpad)
        else:
            self.pages = count

    def rotary(self) -> None:
        d = self.d
        if not self.appending or "sfq" in self.mx or self.dim < 2 or not d.chance(0.5):
            return
        bases = [end - n for end, n in zip(self.ends, self.new, strict=True)]
        if d.chance(0.2):
            bases = [d.whole(0, 30) if end >= 0 else 10**6 for end in self.ends]
            self.kw["rotary_seqlens"] = ints(bases)
        used = [
            base + max(n, sq)
            for base, n, sq, end in zip(bases, self.new, self.sq, self.ends, strict=True)
            if end >= 0
        ]
        rows = max([1, *used]) + d.pick((0, 0, 3))
        angles = d.uniform(-3, 3, (rows, d.whole(1, self.dim // 2)))
        dtype = d.pick((F32, self.q_dtype))
        self.kw["rotary_cos"] = torch.from_numpy(np.cos(angles)).to(dtype)
        self.kw["rotary_sin"] = torch.from_numpy(np.sin(angles)).to(dtype)
        if d.chance(0.5):
            self.kw["rotary_interleaved"] = False

    def new_tokens(self) -> None:
        d, kw = self.d, self.kw
        if not self.appending:
            return
        lead: tuple[int, ...] = (self.batch, self.width_new)
        if not self.padded_new:
            extra = d.pick((0, 0, 0, 2)) if not self.by_slot else 0  # tokens of no sequence
            lead = (sum(self.new) + extra,)
            own = self.by_slot and not self.padded and self.new == self.sq and lead == self.lead
            if not own or d.chance(0.5):
                kw["cu_seqlens_k_new"] = cumulative(self.new)
        k = d.normal(*lead, self.kv_heads, self.dim) * d.pick((1.0, 1.0, 4.0))
        v = d.normal(*lead, self.kv_heads, self.dim_v)
        k[d.rng.random(k.shape[:-1]) < 0.03] = 0
        self._forget_tokens(k)
        self._forget_tokens(v)
        for name, numbers in (("k", k), ("v", v)):
            cache = getattr(self, f"{name}_dtype")
            dtype = self._new_dtype(cache)
            kw[name] = torch.from_numpy(40 * numbers if dtype == INT8 else numbers).to(dtype)
            scales = kw.get(f"{name}_descale")
            if dtype == cache and torch.is_tensor(scales) and scales.ndim == 3:
                scales.nan_to_num_(0.5)  # stored as is, so its scales are already there
        if self.overlap is not None:
            kw["v"] = kw["k"][..., self.overlap]
        elif d.chance(0.15):
            kw["k"], kw["v"] = strided(kw["k"], "heads first"), strided(kw["v"], "wide")
        if self.by_slot:
            slots = ints(self._slots(), torch.int64)
            kw["slot_mapping"] = slots.reshape(lead) if d.chance(0.3) else slots

    def norms(self) -> None:
        """Norms of q and k; a v that shares memory with k would hold what was normalised."""
        d, kw = self.d, self.kw
        if "sfq" not in self.mx and "only_qv" not in kw and d.chance(0.2):
            kw["q_norm_weight"] = self._norm_weight()
        exact = self.appending and kw["k"].dtype not in (INT8, F64)  # fp64 sums are not
        if exact and self.overlap is None and d.chance(0.3):
            kw["k_norm_weight"] = self._norm_weight()
        if d.chance(0.2):
            kw["norm_eps"] = d.pick((1e-5, 1.0))

    def _norm_weight(self) -> torch.Tensor:
        weight = torch.from_numpy(self.d.uniform(-1, 2, (self.dim,)))
        weight = weight.to(self.d.pick((F32, BF16, F16)))
        return weight if self.d.chance(0.8) else strided(weight, "spread")

    def _forget_tokens(self, numbers: Array) -> None:
        """New tokens of no sequence and of inactive rows are not read."""
        flat = numbers.reshape(-1, *numbers.shape[-2:])
        start = 0
        for end, n in zip(self.ends, self.new, strict=True):
            if end < 0:
                flat[start : start + n] = np.nan
            start += n
        flat[start:] = np.nan

    def _new_dtype(self, cache: torch.dtype) -> torch.dtype:
        if (self.mx and cache == E4M3) or (cache == INT8 and "rotary_cos" in self.kw):
            return self.d.pick(WIDE)
        if cache in (F32, F64) or self.d.chance(0.4):
            return cache
        return self.d.pick(WIDE)

    def _slots(self) -> list[int]:
        """Mostly where the table says; else -1, or a slot that nobody reads."""
        slots = []
        for b, end in enumerate(self.ends):
            for t, written in enumerate(self.written[b]):
                slot = -1
                if end < 0 and self.live.size:
                    slot = 0  # named by an inactive row, so it stays as it is
                elif end >= 0 and written:
                    page, offset = self.spot(b, end - self.new[b] + t)
                    slot = page * self.slots + offset
                slots.append(slot)
        spare = np.setdiff1d(np.flatnonzero(~self.live), slots).tolist()
        return [spare.pop() if n == -1 and spare and self.d.chance(0.3) else n for n in slots]


class _VarlenCall(Call):
    def built(self) -> dict[str, Any]:
        self.geometry(may_use_less=True)
        self.dtypes()
        self.queries()
        self.masks()
        self.keys()
        self.caches()
        self.descales()
        self.mx_scales()
        self.scores()
        self.only_qv()
        self.hints()
        self.output()
        self.kw["return_softmax_lse"] = True
        self.kw["k"], self.kw["v"] = self.kw.pop("k_cache"), self.kw.pop("v_cache")
        return self.kw

    def keys(self) -> None:
        """Keys ragged, in pages, or padded; often fewer of them are used than are there."""
        d = self.d
        self.line = list(range(self.batch))
        layout = d.pick(("ragged", "ragged", "paged" if self.may_page else "ragged", "padded"))
        if layout == "ragged":
            room = [d.whole(0, 12) for _ in self.line]
            edges = cumulative(room)
            self.first_rows = edges.tolist()
            self.kw["cu_seqlens_k"] = edges
            shape: tuple[int, ...] = (sum(room) + d.pick((0, 0, 3)),)
        elif layout == "padded":
            room = [d.whole(1, 20)] * self.batch
            self.slots = max(room, default=4)
            shape = (self.batch, self.slots)
        else:
            self.slots = d.pick(PAGE_SIZES)
            max_pages = d.whole(1, max(1, 24 // self.slots))
            room = [max_pages * self.slots] * self.batch
        ends = room
        if layout == "paged" or d.chance(0.5):
            ends = [d.whole(0, rows) for rows in room]
            self.kw["seqused_k"] = ints(ends)
        if layout == "paged":
            self.lay_pages(ends, self.batch, max_pages, shared=d.chance(0.3))
            shape = (self.pages, self.slots)
        self.ragged = layout == "ragged"
        self.liveness(shape, ends)
        if self.rare(0.08):
            self.kw["gather_kv_indices"] = self._chosen(ends)

    def _chosen(self, ends: list[int]) -> torch.Tensor:
        """Some keys of its sequence for each query, with repetitions and gaps."""
        d = self.d
        chosen = np.full((sum(self.room) + self.extra, d.whole(1, 8)), -1, dtype=np.int32)
        start = 0
        for room, end in zip(self.room, ends, strict=True):
            chosen[start : start + room] = d.rng.integers(-1, end, (room, chosen.shape[1]))
            start += room
        return torch.from_numpy(chosen.reshape(*self.lead, chosen.shape[1]))

    def spot(self, b: int, row: int) -> tuple[int, ...]:
        return (self.first_rows[b] + row,) if self.ragged else super().spot(b, row)

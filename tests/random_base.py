"""What random calls of every entry point share: shapes, dtypes, masks, caches and scales."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from oracle import visible
from random_mods import random_mask_mod, random_score_mod
from random_tools import Array, Draw, cumulative, e8m0, interleaved, ints, strided

HEADS = [(g, hk) for g in (1, 2, 3, 5, 7) for hk in (1, 2, 3) if g * hk <= 8]
DIMS = (1, 3, 8, 16, 20, 32, 64)
PAGE_SIZES = (1, 2, 3, 4, 7, 16)
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
WIDE = (F16, BF16, F32)
UNSEEN_ENTRIES = (-1, 2**31 - 1, 0, 12345)
CHANNELS = 32  # of one MXFP8 scale


class Call:
    """One call in the making. The steps run in order; each adds to `kw`."""

    def __init__(self, seed: int, plain: bool) -> None:
        self.d = Draw(seed)
        self.rarity = 0.2 if plain else 1.0
        self.kw: dict[str, Any] = {}
        self.table: Array | None = None
        self.line: list[int] = []  # cache row or page-table row of each sequence
        self.slots = 0  # of a page or a cache row
        self.pages = 0  # pages or cache rows
        self.overlap: slice | None = None  # which channels of K are V
        self.appending = False

    def rare(self, p: float) -> bool:
        return self.d.chance(p * self.rarity)

    def geometry(self, may_use_less: bool = False) -> None:
        """Heads, dims and query lengths: `room` rows are there, `sq` of them are used."""
        d = self.d
        self.batch = d.pick((0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4))
        group, self.kv_heads = d.pick(HEADS)
        self.heads = group * self.kv_heads
        self.dim = d.pick(DIMS)
        self.dim_v = d.pick(DIMS) if d.chance(0.3) else self.dim
        self.padded = d.chance(0.6 if not may_use_less else 0.25)
        self.width = d.pick((1, 1, 2, 3, 4, d.whole(0, 6)))
        self.room = [self.width if self.padded else d.whole(0, 6) for _ in range(self.batch)]
        self.sq = list(self.room)
        if may_use_less and d.chance(0.4):
            self.sq = [d.whole(0, rows) for rows in self.room]
            self.kw["seqused_q"] = ints(self.sq)
        self.extra = 0 if self.padded else d.pick((0, 0, 0, 0, 2))  # rows of no sequence
        self.lead = (self.batch, self.width) if self.padded else (sum(self.room) + self.extra,)
        self.new = [0] * self.batch
        self.leftpad = [0] * self.batch
        self.written: list[list[bool]] = [[] for _ in self.sq]  # which new tokens are stored

    def dtypes(self) -> None:
        """Query and cache dtypes; `mx` holds the names of the MXFP8 scales to make."""
        d = self.d
        self.mx: set[str] = set()
        kind = "plain"
        if self.rare(0.55):
            kind = d.pick(("mixed", "mixed", "narrow", "narrow", "narrow", "fp8", "mx", "mx"))
        if kind == "plain":
            self.q_dtype = d.pick([F32] * 8 + [F16] * 4 + [BF16] * 6 + [F64])
            self.k_dtype = self.v_dtype = self.q_dtype
        elif kind == "mixed":
            self.q_dtype = d.pick(WIDE)
            self.k_dtype = self.v_dtype = d.pick((F16, BF16))
        elif kind == "narrow":
            self.q_dtype = d.pick([F32, F16, BF16] * 5 + [F64])
            self.k_dtype = self.v_dtype = d.pick((E4M3, E5M2, INT8))
        elif kind == "fp8":
            self.q_dtype = d.pick((E4M3, E5M2))
            self.k_dtype = self.v_dtype = d.pick((E4M3, E5M2))
        else:
            self._mx_dtypes()

    def _mx_dtypes(self) -> None:
        d = self.d
        self.dim, self.dim_v = d.pick((32, 64, 64, 160)), d.pick((32, 64, 64, 160))
        if d.chance(0.3):  # V alone
            self.q_dtype = self.k_dtype = d.pick((*WIDE, E4M3))
            self.v_dtype, self.mx = E4M3, {"sfv"}
        elif d.chance(0.2):  # V in 16 bits: never paged
            self.q_dtype = self.k_dtype = E4M3
            self.v_dtype, self.mx = d.pick((F16, BF16)), {"sfq", "sfk"}
        else:
            self.q_dtype = self.k_dtype = self.v_dtype = E4M3
            self.mx = {"sfq", "sfk", "sfv"}

    @property
    def may_page(self) -> bool:
        return "sfv" in self.mx or "sfk" not in self.mx

    def queries(self) -> None:
        d = self.d
        self.kw["q"] = self._rows(self.dim, d.pick((0.5, 1.0, 1.0, 3.0)))
        if not self.padded:
            self.kw["cu_seqlens_q"] = cumulative(self.room)
        if "sfq" not in self.mx and self.rare(0.12):
            self.kw["qv"] = self._rows(self.dim_v, 1.0)

    def _rows(self, dim: int, size: float) -> torch.Tensor:
        """Data per query and head, sometimes strided; rows that are not used hold NaN."""
        d = self.d
        numbers = size * d.normal(*self.lead, self.heads, dim)
        unused = np.ones(self.lead, dtype=bool)
        start = 0
        for b, (room, used) in enumerate(zip(self.room, self.sq, strict=True)):
            if self.padded:
                unused[b, :used] = False
            else:
                unused[start : start + used] = False
            start += room
        numbers[unused] = np.nan
        x = torch.from_numpy(numbers).to(self.q_dtype)
        return x if d.chance(0.85) else strided(x, d.pick(("heads first", "wide", "spread")))

    def masks(self) -> None:
        d, kw = self.d, self.kw
        if d.chance(0.45):
            kw["causal"] = True
        if d.chance(0.35):
            sides = [d.pick((None, -1, 0, 1, 2, d.whole(0, 12), 50)) for _ in range(2)]
            kw["window_size"] = sides if d.chance(0.3) else tuple(sides)
        if self.rare(0.15):
            kw["attention_chunk"] = d.pick((None, 1, 2, d.whole(1, 10), 64))
        left, right = kw.get("window_size", (-1, -1))
        self.left = None if left in (None, -1) else left
        self.right = None if right in (None, -1) else right
        if kw.get("causal"):
            self.right = 0
        self.chunk = kw.get("attention_chunk") or 0

    def scores(self) -> None:
        d, kw, heads = self.d, self.kw, self.heads
        if d.chance(0.3):
            kw["softmax_scale"] = d.pick((-0.3, 0.0, 0.05, 1.0))
        if self.rare(0.2):
            kw["softcap"] = d.pick((0.5, 2.0, 30.0, None, 1e-3))
        if self.rare(0.15):
            shape = (heads,) if d.chance(0.5) else (self.batch, heads)
            kw["alibi_slopes"] = d.tensor(*shape) * 0.3
        if self.rare(0.25):
            sinks = d.tensor(heads, dtype=d.pick(WIDE))
            if d.chance(0.2):
                sinks[d.whole(0, heads - 1)] = d.pick((-torch.inf, torch.inf, -3e4))
            kw[d.pick(("sinks", "sinks", "s_aux", "learnable_sink"))] = sinks
        if self.rare(0.12):
            width = d.pick((1, 2, d.whole(1, 45)))
            kw["rel_bias"] = d.tensor(*self.lead, heads, width, dtype=d.pick(WIDE))
            if d.chance(0.2):
                kw["rel_bias_prep_cache"] = {}
        aux = [d.tensor(max(self.batch, 1), heads), d.tensor(max(self.lead[-1], 1))]
        reads = [False, False]
        if self.rare(0.17):
            kw["score_mod"], reads[0] = random_score_mod(d, heads, aux)
        if self.rare(0.17):
            kw["mask_mod"], reads[1] = random_mask_mod(d, heads, aux)
        if any(reads):
            kw["aux_tensors"] = aux
        if self.rare(0.06):
            kw["block_sparse_tensors"] = self._blocks()

    def _blocks(self) -> SimpleNamespace:
        """Blocks of keys that blocks of queries see; entries past the counts are garbage."""
        d = self.d
        size = d.pick(((1, 1), (2, 3), (4, 8), (3, 16), (128, 128)))
        lead = (d.pick((1, max(self.batch, 1))), d.pick((1, self.heads)), -(-6 // size[0]))
        fields: dict[str, Any] = {"block_size": size}
        for kind in ("mask", "full"):
            most = -(-d.whole(1, 48) // size[1])
            counts = d.rng.integers(0, most + 1, lead, dtype=np.int32)
            indices = np.full((*lead, most + 1), 2**30, dtype=np.int32)
            for at in np.ndindex(lead):
                indices[at][: counts[at]] = d.rng.permutation(most)[: counts[at]]
            fields[f"{kind}_block_cnt"] = torch.from_numpy(counts)
            fields[f"{kind}_block_idx"] = torch.from_numpy(indices)
        if d.chance(0.5):
            fields["full_block_cnt"] = fields["full_block_idx"] = None
        return SimpleNamespace(**fields)

    def spot(self, b: int, row: int) -> tuple[int, ...]:
        """Where the absolute row of a sequence lies: (row or page, offset)."""
        if self.table is None:
            return self.line[b], row
        return int(self.table[self.line[b], row // self.slots]), row % self.slots

    def lay_pages(
        self,
        used: Sequence[int],
        lines: int,
        max_pages: int,
        shared: bool,
        leftpad: Sequence[int] = (),
    ) -> None:
        """Draw a page table; entries past the used lengths or all padding are garbage."""
        d = self.d
        need = [0] * lines
        for line, rows in zip(self.line, used, strict=True):
            need[line] = max(need[line], -(-rows // self.slots))
        self.pages = max(1, sum(need) + d.whole(0, 3))
        order = d.rng.permutation(self.pages)
        wide = np.full((lines, max_pages + 2), 2**30, dtype=np.int32)
        table = wide[:, :max_pages]
        table[:] = d.rng.choice(UNSEEN_ENTRIES, table.shape)
        taken = 0
        for line, count in enumerate(need):
            own = order[taken : taken + count]
            table[line, :count] = d.rng.integers(self.pages, size=count) if shared else own
            taken += count
        if d.chance(0.5) and len(set(self.line)) == len(self.line):
            for line, rows in zip(self.line, leftpad, strict=False):
                table[line, : min(rows // self.slots, need[line])] = d.pick(UNSEEN_ENTRIES)
        self.table = table
        name = d.pick(("page_table", "page_table", "block_table"))
        self.kw[name] = torch.from_numpy(table if d.chance(0.3) else table.copy())

    def liveness(self, shape: tuple[int, ...], ends: Sequence[int]) -> None:
        """Which slots matter: the rest may hold anything."""
        mode = self.d.pick(("all live", "by length", "by mask"))
        self.live = np.full(shape, mode == "all live")
        for b, end in enumerate(ends):
            if end < 0 or mode == "all live":
                continue
            old, keys = end - self.new[b], end - self.leftpad[b]
            seen = [True] * keys
            if mode == "by mask":
                p = np.arange(self.sq[b])[:, None] + keys - self.sq[b]
                shown = visible(p, np.arange(keys)[None, :], self.left, self.right, self.chunk)
                seen = [bool(column.any()) for column in shown.T]
            for row in (j + self.leftpad[b] for j in range(keys) if seen[j]):
                if row < old or not self.written[b][row - old]:
                    self.live[self.spot(b, row)] = True

    def caches(self) -> None:
        """Fill K and V, poison what is dead, and lay both out in memory."""
        d = self.d
        k = self._poisoned(self.dim, self.k_dtype)
        v = self._poisoned(self.dim_v, self.v_dtype)
        kinds = ["plain"] * 5 + ["heads first", "wide", "layers"]
        if k.dtype == v.dtype:
            kinds += ["joined", "joined"] + ["interleaved"] * 2 * (self.dim == self.dim_v)
            if self.dim_v <= self.dim and not self.mx and "rotary_cos" not in self.kw:
                kinds += ["overlap"] * (k.dtype != INT8)
        kind = d.pick(kinds)
        if kind == "overlap":
            start = d.pick((0, self.dim - self.dim_v))
            self.overlap = slice(start, start + self.dim_v)
            v = k[..., self.overlap]
        elif kind == "joined":
            both = torch.cat([k, v], dim=-1)
            k, v = both[..., : self.dim], both[..., self.dim :]
        elif kind == "interleaved":
            k, v = torch.stack([k, v], dim=1).unbind(1)
        else:
            k, v = strided(k, kind), strided(v, kind)
        self.kw["k_cache"], self.kw["v_cache"] = k, v

    def _poisoned(self, dim: int, dtype: torch.dtype) -> torch.Tensor:
        numbers = self.d.normal(*self.live.shape, self.kv_heads, dim)
        if dtype == INT8:
            numbers = np.clip(np.rint(numbers * 40), -127, 127)
            numbers[~self.live] = -128
        else:
            numbers[~self.live] = np.nan
        return torch.from_numpy(numbers).to(dtype)

    def descales(self) -> None:
        d = self.d
        if self.rare(0.5 if self.q_dtype in (E4M3, E5M2) else 0.05):
            self.kw["q_descale"] = self._per_head(1.0)
        if self.overlap is not None:
            return
        for name, dtype in (("k_descale", self.k_dtype), ("v_descale", self.v_dtype)):
            eight = dtype in (E4M3, E5M2, INT8)
            if dtype != INT8 and not d.chance(0.7 if eight and not self.mx else 0.1):
                continue
            size = 0.025 if dtype == INT8 else 1.0
            per_token = self.live.ndim == 2 and not self.mx and (eight or not self.appending)
            if per_token and d.chance(0.3):
                scales = size * d.uniform(0.5, 2, (*self.live.shape, self.kv_heads))
                scales[~self.live] = np.nan
                tensor = torch.from_numpy(scales)
                self.kw[name] = tensor if d.chance(0.8) else strided(tensor, "wide")
            else:
                self.kw[name] = self._per_head(size)

    def _per_head(self, size: float) -> Any:
        d, full = self.d, (self.batch, self.kv_heads)
        forms = ("float", "0-d", "one", "full", "row", "column", "heads", "expanded", "strided")
        form = d.pick(forms)
        if form == "float":
            return size * float(d.uniform(0.5, 2))
        shapes = {"0-d": (), "one": (1,), "row": (1, full[1]), "column": (full[0], 1)}
        shapes["heads"] = full[1:]
        scales = size * torch.from_numpy(d.uniform(0.5, 2, shapes.get(form, full)))
        if form == "expanded":
            return scales[:, :1].expand(full)
        return scales.T.contiguous().T if form == "strided" else scales

    def mx_scales(self) -> None:
        d = self.d
        if "sfq" in self.mx:
            codes = d.rng.integers(124, 130, (*self.lead, self.heads, self.dim // CHANNELS))
            codes = codes.astype(np.uint8)
            if self.padded and codes.size and "seqused_q" not in self.kw and d.chance(0.3):
                codes = interleaved(codes, d.chance(0.5))
            self.kw["sfq"] = e8m0(codes)
        if "sfk" in self.mx:
            self.kw["sfk"] = self._cache_scales(self.dim // CHANNELS)
        if "sfv" in self.mx:
            blocks = self.live.ndim == 2 and self.live.shape[1] % CHANNELS == 0
            if blocks and self.live.size and not self.appending and d.chance(0.5):
                shape = (len(self.live), self.live.shape[1] // CHANNELS, self.kv_heads, self.dim_v)
                self.kw["sfv"] = e8m0(d.rng.integers(124, 130, shape).astype(np.uint8))
            else:
                self.kw["sfv"] = self._cache_scales(self.dim_v // CHANNELS)

    def _cache_scales(self, groups: int) -> torch.Tensor:
        d = self.d
        codes = d.rng.integers(124, 130, (*self.live.shape, self.kv_heads, groups))
        codes[d.rng.random(codes.shape) < 0.03] = 0
        codes[~self.live] = 255
        codes = codes.astype(np.uint8)
        if self.live.ndim == 2 and self.live.size and d.chance(0.4):
            return e8m0(interleaved(codes, d.chance(0.5)))
        return strided(e8m0(codes), d.pick(("plain", "plain", "heads first")))

    def only_qv(self) -> None:
        """Sometimes make it a call without q·k."""
        kw = self.kw
        if "qv" not in kw or "rotary_cos" in kw or "sfk" in kw or not self.d.chance(0.35):
            return
        kw["only_qv"] = True
        if self.d.chance(0.5):
            kw["q"] = None
        if not self.appending and self.d.chance(0.5):
            kw["k_cache"] = None
            kw.pop("k_descale", None)

    def hints(self) -> None:
        d, kw = self.d, self.kw
        if d.chance(0.2):
            kw["num_splits"] = d.pick((0, 1, 3, 8))
        if d.chance(0.15):
            kw["pack_gqa"] = d.pick((None, True, False))
        if d.chance(0.1):
            kw["sm_margin"] = d.pick((0, 4))
        if d.chance(0.2):
            kw["max_seqlen_q"] = max([*self.room, 1]) + d.pick((0, 5))
        if d.chance(0.1):
            kw["max_seqlen_k"] = 200
        if d.chance(0.1):
            kw["batch_invariant"] = True

    def output(self) -> None:
        if not self.d.chance(0.25):
            return
        dtype = self.q_dtype
        if dtype not in (*WIDE, F64):
            dtype = self.v_dtype if self.v_dtype in WIDE else BF16
        out = torch.full((*self.lead, self.heads, self.dim_v), 7.0, dtype=dtype)
        self.kw["out"] = strided(out, self.d.pick(("plain", "heads first", "wide")))

"""Calls in plain values, and the tensors made of them: whatever must not matter is NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvattn.checks import out_dtype
from kvattn.quant import FP8, GROUP, NARROW

Inputs = dict[str, Any]
PerRow = int | tuple[int, ...]  # one number per sequence, or the same for all
GUARD = 128  # poisoned elements before and behind every cache
SENTINEL = 3.0  # what a caller's out holds before the call
TABLE_GARBAGE = (2**31 - 1, -1)  # page-table entries past the used length


@dataclass(frozen=True, eq=False)
class Case:
    """One call in plain values; every default is the plainest choice.

    A tuple holds one number per sequence. `seqlen_q` and `new` as tuples make packed, ragged
    tensors; as ints, padded ones.
    """

    name: str = ""
    # The batch.
    batch: int = 2
    seqlen_q: PerRow = 1
    lengths: PerRow | None = 33  # keys cached before the append, leftpad included; -1: inactive
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    dim_v: int | None = None  # default: dim
    spare_q: int = 0  # rows of a packed q that belong to no sequence
    used_q: tuple[int, ...] | None = None  # seqused_q (varlen)
    # The cache.
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # default: dtype
    value_dtype: torch.dtype | None = None  # default: cache_dtype
    capacity: int | None = None  # slots a sequence; default: the longest sequence
    page_size: int | None = None
    layout: str = "plain"  # heads_first, kv, joined, layers, or alias (v is a slice of k)
    rows: int | None = None  # rows of the cache or page table; default: batch
    batch_idx: tuple[int, ...] | None = None
    leftpad: tuple[int, ...] | None = None
    common: int = 0  # leading keys whose pages all sequences share, given as common_prefix_len
    pass_lengths: str = "tensor"  # int: one number for all; none: cache_seqlens is not given
    # The append.
    new: PerRow | None = None
    new_dtype: torch.dtype | None = None  # default: the cache's dtype, the query's if narrow
    by_slot: bool = False
    rotary: int = 0  # channels that turn
    rotary_interleaved: bool = True
    rotary_base: tuple[int, ...] | None = None  # rotary_seqlens
    rotary_dtype: torch.dtype | None = None  # default: dtype, fp32 if that is FP8
    norm: str | None = None  # of q, k, or both
    norm_dtype: torch.dtype = torch.float32
    # Masks and scores.
    causal: bool = False
    window: tuple[int | None, int | None] = (-1, -1)
    chunk: int = 0
    scale: float | None = None
    softcap: float = 0.0
    sinks: torch.dtype | None = None
    alibi: str | None = None  # heads: (H,); batch: (B, H)
    rel_bias: int = 0  # number of distances E
    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    qv: bool = False
    only_qv: bool = False
    query_scale: float = 1.0  # standard deviation of q
    # Scales.
    descale: str | None = None  # number, heads: (B, Hk), or token: one per token and head
    sfq: str | None = None  # MXFP8 layouts: plain, interleaved, tokens (sfv)
    sfk: str | None = None
    sfv: str | None = None
    # The other entry point, and what is given besides.
    varlen: bool = False  # call flash_attn_varlen_func
    packed: tuple[int, ...] | None = None  # varlen: rows of k between the borders of cu_seqlens_k
    out: bool = False  # give a strided out
    options: dict[str, Any] = field(default_factory=dict)  # further keyword arguments

    def __str__(self) -> str:
        return self.name or repr(self)


def make_inputs(case: Case, seed: int = 0, device: str | torch.device = "cpu") -> Inputs:
    """The keyword arguments of the call, deterministic in `seed`.

    Dead memory is poisoned: cache slots outside a sequence, spare pages, guards around the
    caches, rows of q, k and v outside every sequence are NaN (-128 in int8, 255 in scales); pages
    are shuffled, page-table entries past the used length are garbage. Rotary tables end at the
    last position used.

    Returns:
        Arguments of `flash_attn_with_kvcache`, or of `flash_attn_varlen_func` if `case.varlen`.
    """
    return Maker(case, seed, device).inputs


def _each(value: PerRow, count: int) -> tuple[int, ...]:
    values = (value,) * count if isinstance(value, int) else value
    if len(values) != count:
        raise ValueError(f"{len(values)} values for {count} sequences")
    return values


class Maker:
    """Builds the inputs of a case step by step."""

    def __init__(self, case: Case, seed: int, device: str | torch.device) -> None:
        self.case, self.device = case, torch.device(device)
        self.random = torch.Generator(self.device).manual_seed(seed)
        self.inputs: Inputs = {}
        count = case.batch
        self.q_lens = _each(case.seqlen_q, count)
        self.new = _each(case.new or 0, count)
        self.leftpad = case.leftpad or (0,) * count
        self.line = case.batch_idx or tuple(range(count))
        self.dim_v = case.dim if case.dim_v is None else case.dim_v
        self.k_dtype = case.cache_dtype or case.dtype
        self.v_dtype = case.value_dtype or self.k_dtype
        self._geometry()
        self._queries()
        self._caches()
        if case.new is not None:
            self._append()
        if case.norm is not None:
            self._norms(case.norm)
        self._scales()
        self._scores()
        self._options()

    # Random and poisoned memory.

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        make = torch.float32 if dtype in NARROW else dtype
        x = torch.randn(shape, generator=self.random, device=self.device, dtype=make)
        if dtype == torch.int8:
            x = (40 * x).round().clamp(-127, 127)
        return x.to(dtype)

    def ints(self, numbers: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(list(numbers), dtype=dtype, device=self.device)

    def guarded(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Poisoned memory of this shape with poison on both sides."""
        size = math.prod(shape)
        flat = torch.full((size + 2 * GUARD,), _poison(dtype), device=self.device).to(dtype)
        return flat[GUARD : GUARD + size].view(*shape)

    # The steps.

    def _geometry(self) -> None:
        case = self.case
        lengths = _each(
            case.lengths if case.lengths is not None else case.capacity or 0, case.batch
        )
        pairs = list(zip(lengths, self.new, strict=True))
        self.old = lengths
        self.ends = [old + new if old >= 0 else -1 for old, new in pairs]
        capacity = max([0, *self.ends]) if case.capacity is None else case.capacity
        rows = case.batch if case.rows is None else case.rows
        if case.packed is not None:
            self.edges = _cumulative(case.packed)
            self.shape: tuple[int, ...] = (1, self.edges[-1])
        elif case.page_size is None:
            self.shape = (rows, capacity)
        else:
            self._pages(rows, capacity, case.page_size)

    def _pages(self, rows: int, capacity: int, size: int) -> None:
        """A shuffled page table whose rows end in garbage, inside a wider buffer."""
        need = [0] * rows
        for line, end in zip(self.line, self.ends, strict=True):
            need[line] = max(need[line], -(-end // size) if end > 0 else 0)
        columns = -(-capacity // size) + (self.case.pass_lengths != "none")
        wide = torch.full((rows, columns + 1), TABLE_GARBAGE[0], dtype=torch.int32)
        wide[:, 1::2] = TABLE_GARBAGE[1]
        self.shape = (sum(need) + 2, size)
        order = torch.randperm(
            self.shape[0], generator=torch.Generator().manual_seed(1), device="cpu"
        ).int()
        for line, count in enumerate(need):
            wide[line, :count], order = order[:count], order[count:]
        shared = -(-self.case.common // size)
        longest = max(range(rows), key=need.__getitem__)
        for line, count in enumerate(need):
            wide[line, : min(count, shared)] = wide[longest, : min(count, shared)]
        self.table = wide.to(self.device)[:, :columns]
        self.inputs["page_table"] = self.table

    def slots(self, b: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(cache row or page, offset) of the absolute rows start <= r < stop of a sequence."""
        rows = torch.arange(start, stop, device=self.device)
        if self.case.packed is not None:
            return torch.zeros_like(rows), rows + self.edges[b]
        if self.case.page_size is None:
            return torch.full_like(rows, self.line[b]), rows
        size = self.case.page_size
        return self.table[self.line[b], rows // size].long(), rows % size

    def _queries(self) -> None:
        case = self.case
        packed = isinstance(case.seqlen_q, tuple)
        if isinstance(case.seqlen_q, tuple):
            lead: tuple[int, ...] = (sum(self.q_lens) + case.spare_q,)
            self.inputs["cu_seqlens_q"] = self.ints(_cumulative(self.q_lens))
        else:
            lead = (case.batch, case.seqlen_q)
        self.lead = lead
        unused = torch.ones(lead, dtype=torch.bool, device=self.device)
        starts = _cumulative(self.q_lens)
        for b, used in enumerate(case.used_q or self.q_lens):
            if packed:
                unused[starts[b] : starts[b] + used] = False
            else:
                unused[b, :used] = False
        if case.used_q is not None:
            self.inputs["seqused_q"] = self.ints(case.used_q)
        for name, dim in (("q", case.dim), ("qv", self.dim_v)):
            if name == "qv" and not case.qv:
                continue
            q = self.normal(*lead, case.heads, dim) * case.query_scale
            self.inputs[name] = q.masked_fill(unused[..., None, None], math.nan).to(case.dtype)
        if case.only_qv:
            self.inputs.update(q=None, only_qv=True)

    def _caches(self) -> None:
        case = self.case
        live = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
        for b, old in enumerate(self.old):
            if old > self.leftpad[b]:
                live[self.slots(b, self.leftpad[b], old)] = True
        self.dead = ~live[..., None, None]
        k, v = self._memory()
        for cache, dtype in ((k, self.k_dtype), (v, self.v_dtype)):
            data = self.normal(*self.shape, case.kv_heads, cache.shape[-1], dtype=dtype)
            if dtype in FP8:
                data = data.float()
            cache.copy_(data.masked_fill_(self.dead, _poison(dtype)))
        if case.packed is not None:
            k, v = k[0], v[0]
            self.inputs["cu_seqlens_k"] = self.ints(self.edges)
        names = ("k", "v") if case.varlen else ("k_cache", "v_cache")
        self.inputs.update(zip(names, (None if case.only_qv else k, v), strict=True))
        if case.pass_lengths == "int":
            self.inputs["cache_seqlens"] = self.ends[0] if case.by_slot else self.old[0]
        elif case.pass_lengths == "tensor":
            name = "seqused_k" if case.varlen else "cache_seqlens"
            self.inputs[name] = self.ints(self.ends if case.by_slot else self.old)
        if case.leftpad is not None:
            self.inputs["cache_leftpad"] = self.ints(case.leftpad)
        if case.batch_idx is not None:
            self.inputs["cache_batch_idx"] = self.ints(case.batch_idx)

    def _memory(self) -> tuple[Tensor, Tensor]:
        """Poisoned k and v caches (N, slots, Hk, D | Dv) laid out as the case says."""
        case, (count, slots) = self.case, self.shape
        heads, dim, dim_v = case.kv_heads, case.dim, self.dim_v
        if case.layout == "kv":
            k, v = self.guarded((count, 2, slots, heads, dim), self.k_dtype).unbind(1)
        elif case.layout == "joined":
            both = self.guarded((count, slots, heads, dim + dim_v), self.k_dtype)
            k, v = both[..., :dim], both[..., dim:]
        elif case.layout == "alias":
            k = self.guarded((count, slots, heads, dim), self.k_dtype)
            v = k[..., :dim_v]
        else:
            k, v = (
                self._lay((count, slots, heads, size), dtype)
                for size, dtype in ((dim, self.k_dtype), (dim_v, self.v_dtype))
            )
        return k, v

    def _lay(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
        count, slots, heads, dim = shape
        if self.case.layout == "heads_first":
            return self.guarded((count, heads, slots, dim), dtype).transpose(1, 2)
        if self.case.layout == "layers":
            return self.guarded((count, 3, slots, heads, dim), dtype)[:, 1]
        return self.guarded(shape, dtype)

    def _append(self) -> None:
        case = self.case
        packed = isinstance(case.new, tuple)
        lead = (sum(self.new),) if packed else (case.batch, case.new)
        if packed:
            self.inputs["cu_seqlens_k_new"] = self.ints(_cumulative(self.new))
        for name, dim, cache in (("k", case.dim, self.k_dtype), ("v", self.dim_v, self.v_dtype)):
            wide = case.dtype if case.dtype not in NARROW else cache
            dtype = case.new_dtype or (wide if cache in NARROW else cache)
            self.inputs[name] = self.normal(*lead, case.kv_heads, dim, dtype=dtype)
        if case.layout == "alias":
            self.inputs["v"] = self.inputs["k"][..., : self.dim_v]
        if case.by_slot:
            found = []
            for b, (old, new) in enumerate(zip(self.old, self.new, strict=True)):
                if old < 0:
                    found.append(self.ints([-1] * new))
                    continue
                block, offset = self.slots(b, old, old + new)
                found.append(block * self.shape[1] + offset)
            self.inputs["slot_mapping"] = torch.cat(found).long()
        if case.rotary:
            self._rotary()

    def _rotary(self) -> None:
        case = self.case
        bases = case.rotary_base or self.old
        steps = [max(pair) for pair in zip(self.new, self.q_lens, strict=True)]
        rows = max(base + step for base, step in zip(bases, steps, strict=True))
        dtype = case.rotary_dtype or (torch.float32 if case.dtype in FP8 else case.dtype)
        angles = self.normal(max(rows, 1), case.rotary // 2)
        self.inputs.update(
            rotary_cos=angles.cos().to(dtype),
            rotary_sin=angles.sin().to(dtype),
            rotary_interleaved=case.rotary_interleaved,
        )
        if case.rotary_base is not None:
            self.inputs["rotary_seqlens"] = self.ints(case.rotary_base)

    def _norms(self, which: str) -> None:
        for name in ("q", "k") if which == "both" else (which,):
            weight = 1 + self.normal(self.case.dim) / 2
            self.inputs[f"{name}_norm_weight"] = weight.to(self.case.norm_dtype)

    def _scales(self) -> None:
        case = self.case
        shapes = {"number": (), "heads": (case.batch, case.kv_heads)}
        for name in ("q_descale", "k_descale", "v_descale"):
            if case.descale in shapes:
                scale = 0.5 + self.normal(*shapes[case.descale]).abs()
                self.inputs[name] = float(scale) if case.descale == "number" else scale
            elif case.descale == "token" and name != "q_descale":
                scale = self.guarded((*self.shape, case.kv_heads), torch.float32)
                scale.copy_(
                    (0.5 + self.normal(*scale.shape).abs()).masked_fill(self.dead[..., 0], math.nan)
                )
                self.inputs[name] = scale
        for name, layout, dim in (("sfk", case.sfk, case.dim), ("sfv", case.sfv, self.dim_v)):
            if layout is not None:
                scale = self._mx(layout, self.dead[..., 0], case.kv_heads, dim)
                self.inputs[name] = scale if case.packed is None else scale[0]
        if case.sfq is not None:
            live = torch.zeros(*self.lead, 1, dtype=torch.bool, device=self.device)
            self.inputs["sfq"] = self._mx(case.sfq, live, case.heads, case.dim)

    def _mx(self, layout: str, dead: Tensor, heads: int, dim: int) -> Tensor:
        """Random scales of 2 ** -3 to 2 ** 3; 255, which is NaN, where `dead`."""
        if layout == "tokens":
            dead = dead.unflatten(1, (-1, GROUP)).all(2)
        groups = dim if layout == "tokens" else dim // GROUP
        powers = self.normal(*dead.shape[:-1], heads, groups).mul(2).round().clamp(-3, 3)
        values = (powers + 127).masked_fill(dead[..., None], 255).to(torch.uint8)
        if layout == "interleaved":
            values = interleave_scales(values)
        scale = self.guarded(values.shape, torch.uint8)
        scale.copy_(values)
        return scale.view(torch.float8_e8m0fnu)

    def _scores(self) -> None:
        case, heads = self.case, self.case.heads
        if case.sinks is not None:
            self.inputs["sinks"] = self.normal(heads, dtype=case.sinks)
        if case.alibi is not None:
            shape = (heads,) if case.alibi == "heads" else (case.batch, heads)
            self.inputs["alibi_slopes"] = self.normal(*shape).abs() / 4
        if case.rel_bias:
            dtype = torch.float32 if case.dtype not in _BIAS else case.dtype
            self.inputs["rel_bias"] = self.normal(*self.lead, heads, case.rel_bias, dtype=dtype)
        given = {
            "causal": case.causal,
            "window_size": case.window,
            "attention_chunk": case.chunk,
            "softmax_scale": case.scale,
            "softcap": case.softcap,
            "score_mod": case.score_mod,
            "mask_mod": case.mask_mod,
        }
        self.inputs.update(given)

    def _options(self) -> None:
        if self.case.out:
            dtype = out_dtype(self.case.dtype, self.v_dtype)
            wide = torch.full(
                (*self.lead[:-1], self.lead[-1] + 2, self.case.heads + 1, self.dim_v + 8), SENTINEL
            )
            view = wide.to(self.device, dtype)[..., 1:-1, : self.case.heads, : self.dim_v]
            self.inputs["out"] = view
        if self.case.common:
            self.inputs["common_prefix_len"] = self.case.common
        self.inputs.update(self.case.options)


_BIAS = (torch.float32, torch.bfloat16, torch.float16)


def _cumulative(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:b]) for b in range(len(lengths) + 1)]


def _poison(dtype: torch.dtype) -> float:
    return {torch.int8: -128.0, torch.uint8: 255.0}.get(dtype, math.nan)


def interleave_scales(plain: Tensor) -> Tensor:
    """MXFP8 scale bytes (N, rows, heads, groups) as (N, heads, RM, RK, 32, 4, 4); padding is 255.

    The byte of (row m, group g) lies at ((m//128*RK + g//4)*32 + m%32)*16 + (m%128)//32*4 + g%4.
    """
    count, rows, heads, groups = plain.shape
    tiles, columns = -(-rows // 128), -(-groups // 4)
    flat = plain.new_full((count, heads, tiles * columns * 512), 255)
    m = torch.arange(rows, device=plain.device)[:, None]
    g = torch.arange(groups, device=plain.device)[None, :]
    at = ((m // 128 * columns + g // 4) * 32 + m % 32) * 16 + m % 128 // 32 * 4 + g % 4
    flat[:, :, at] = plain.transpose(1, 2)
    return flat.view(count, heads, tiles, columns, 32, 4, 4)


def clone_inputs(inputs: Inputs) -> Inputs:
    """A deep copy that keeps strides, offsets and which tensors share memory."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        own = storages.setdefault(storage.data_ptr(), storage.clone())
        like = torch.empty(0, dtype=value.dtype, device=value.device)
        return like.set_(own, value.storage_offset(), value.shape, value.stride())

    return {name: copy(value) for name, value in inputs.items()}

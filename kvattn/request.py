"""The one door: every argument of a call, named, normalised and checked.

`Request.of` is the only place where user input is validated; nothing below it checks again.
`Facts` is the shadow of a request without tensors: what the planner may look at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvattn import checks, values
from kvattn.norm import EPS
from kvattn.option_checks import BlockSparse


class Span(NamedTuple):
    """One sequence of a batch in plain integers: which rows it owns, and where its keys lie.

    ``row`` is its cache row (dense) or page-table row (paged). Keys live in absolute rows
    ``start <= r < end``; ``old`` is the end before the append. ``q_start`` and ``new_start``
    count from the first row of the flat query and of the flat new tokens.
    """

    row: int
    q_start: int
    q_len: int
    new_start: int
    new_len: int
    start: int
    old: int
    end: int
    active: bool

    @property
    def keys(self) -> int:
        """Number of logical keys, Sk."""
        return max(0, self.end - self.start)


@dataclass(frozen=True)
class Request:
    """A checked call. Tensors are the caller's own; scalars are normalised (see `Request.of`)."""

    q: Tensor | None = None  # (B, Sq, H, D) | (total_q, H, D)
    k_cache: Tensor | None = None  # (Bc, cap, Hk, D) | (pages, P, Hk, D) | (total_k, Hk, D)
    v_cache: Tensor | None = None  # likewise with Dv
    k: Tensor | None = None  # (B, Sn, Hk, D) | (total_new, Hk, D)
    v: Tensor | None = None
    qv: Tensor | None = None  # q's leading shape with Dv
    rotary_cos: Tensor | None = None  # (positions, R / 2)
    rotary_sin: Tensor | None = None
    q_norm_weight: Tensor | None = None  # (D,)
    k_norm_weight: Tensor | None = None  # (D,)
    cache_seqlens: Tensor | None = None  # (B,) int32
    cache_batch_idx: Tensor | None = None  # (B,) int32
    cache_leftpad: Tensor | None = None  # (B,) int32
    page_table: Tensor | None = None  # (B | Bc, max_pages) int32
    cu_seqlens_q: Tensor | None = None  # (B + 1,) int32
    cu_seqlens_k: Tensor | None = None  # (B + 1,) int32
    cu_seqlens_k_new: Tensor | None = None  # (B + 1,) int32
    seqused_q: Tensor | None = None  # (B,) int32
    rotary_seqlens: Tensor | None = None  # (B,) int32
    slot_mapping: Tensor | None = None  # (total_new,) int64
    q_descale: Tensor | None = None  # (B, Hk) fp32
    k_descale: Tensor | None = None  # (B, Hk) fp32 | the cache's shape without its last dim
    v_descale: Tensor | None = None
    sfq: Tensor | None = None  # float8_e8m0fnu, see quant.py for the layouts
    sfk: Tensor | None = None
    sfv: Tensor | None = None
    alibi_slopes: Tensor | None = None  # (H,) | (B, H) fp32
    sinks: Tensor | None = None  # (H,)
    rel_bias: Tensor | None = None  # q's leading shape with E
    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    aux_tensors: Sequence[Tensor] | None = None
    block_sparse: BlockSparse | None = None
    gather_kv_indices: Tensor | None = None  # q's leading shape without heads, with K
    out: Tensor | None = None
    softmax_scale: float = 1.0
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)  # None: unbounded
    attention_chunk: int = 0
    softcap: float = 0.0
    rotary_interleaved: bool = True
    common_prefix_len: int | Tensor = 0  # a tensor: () | (1,) int32
    norm_eps: float = EPS
    only_qv: bool = False
    return_lse: bool = False
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    num_splits: int = 0
    pack_gqa: bool | None = None
    sm_margin: int = 0
    batch_invariant: bool = False
    backend: str | None = None
    attend: bool = True  # False: append only

    @classmethod
    def of(cls, **given: Any) -> Request:
        """Checks and normalises a call given by the public names of its arguments.

        Raises one of the classes of `kvattn.errors` before anything is written.
        """
        raw = check_structure(given)
        request = cls(**{name: getattr(raw, name) for name in NAMES})
        if request.out is not None:
            checks.own_memory(request)
        values.check(request)
        return request

    def again(self, tensors: dict[str, Tensor]) -> Request:
        """This checked call with other tensors of the same form, by name."""
        request = object.__new__(Request)
        request.__dict__.update(self.__dict__)
        request.__dict__.update(tensors, pool=tensors["v_cache"], lead=tensors["q"])
        return request

    def apart(self) -> Request:
        """This call with copies of what lies in its caches, where an append may overwrite it."""
        if self.k is None:
            return self
        caches = [cache for cache in (self.k_cache, self.v_cache) if cache is not None]
        copies = {}
        for name in ("q", "k", "v", "qv"):
            tensor = getattr(self, name)
            if tensor is not None and any(checks.near(tensor, cache) for cache in caches):
                copies[name] = tensor.clone()
        if not copies:
            return self
        request = object.__new__(Request)
        request.__dict__.update(self.__dict__)
        request.__dict__.update(copies)
        request.__dict__.pop("lead", None)
        return request

    def hollow(self) -> Request:
        """What fresh outputs of the call look like, and nothing that keeps its tensors alive."""
        request = object.__new__(Request)
        request.__dict__.update({name: getattr(self, name) for name in _OUTPUTS})
        request.__dict__["lead"] = self.lead.new_empty(0)
        return request

    @cached_property
    def lead(self) -> Tensor:
        """The tensor that gives the query rows: q, or qv where there is no q."""
        lead = self.q if self.q is not None else self.qv
        if lead is None:
            lead = self.k
        assert lead is not None
        return lead

    @cached_property
    def paged(self) -> bool:
        return self.page_table is not None

    @cached_property
    def batch(self) -> int:
        """Number of sequences, B."""
        return checks.batch_of(self)

    @cached_property
    def heads(self) -> int:
        """Number of query heads, H."""
        return self.lead.shape[-2]

    @cached_property
    def kv_heads(self) -> int:
        """Number of key and value heads, Hk."""
        return self.pool.shape[-2]

    @cached_property
    def pool(self) -> Tensor:
        """The value cache: the one tensor every attention call has."""
        assert self.v_cache is not None
        return self.v_cache

    @cached_property
    def page_size(self) -> int:
        """Slots of a page, or of a dense row."""
        return self.pool.shape[1]

    @cached_property
    def capacity(self) -> int:
        """Absolute rows that one sequence can hold."""
        if self.page_table is not None:
            return self.page_table.shape[1] * self.page_size
        return self.pool.shape[1 if self.cu_seqlens_k is None else 0]

    @cached_property
    def common_most(self) -> int:
        """Keys that all sequences have in common, at most where the device alone knows."""
        if not isinstance(self.common_prefix_len, Tensor):
            return self.common_prefix_len
        return min(self.capacity, self.max_seqlen_k or self.capacity)

    @cached_property
    def out_dtype(self) -> torch.dtype:
        return checks.out_dtype(self.lead.dtype, self.pool.dtype)

    @cached_property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.lead.shape[:-1], self.pool.shape[-1])

    @cached_property
    def lse_shape(self) -> tuple[int, ...]:
        """Head first: (B, H, Sq) or (H, total_q)."""
        *lead, heads, _ = self.lead.shape
        return (lead[0], heads, lead[1]) if len(lead) == 2 else (heads, lead[0])

    @cached_property
    def local(self) -> bool:
        """Whether query positions advance with the row under rotary: causal, window or chunk."""
        return self.causal or self.window != (None, None) or self.attention_chunk > 0

    @cached_property
    def spans(self) -> list[Span]:
        """The batch in plain integers. Reads the index tensors: a device sync on a GPU."""
        return _spans(self)

    @cached_property
    def pages(self) -> list[list[int]]:
        """Page ids of every sequence up to its last used slot, from its page-table row."""
        assert self.page_table is not None
        size, table = self.page_size, self.page_table
        used = [-(-span.end // size) if span.active else 0 for span in self.spans]
        if table.numel() <= 4096:
            rows = table.tolist()
            return [rows[s.row][:n] for s, n in zip(self.spans, used, strict=True)]
        return [table[s.row, :n].tolist() for s, n in zip(self.spans, used, strict=True)]

    @cached_property
    def shared(self) -> dict[str, Any]:
        """Room for what backends derive from the index tensors' numbers alone."""
        return {}

    @cached_property
    def facts(self) -> Facts:
        return Facts.of(self)

    def outputs(self) -> tuple[Tensor, Tensor]:
        """The caller's out or a fresh one, and an lse; rows outside every sequence are 0, -inf."""
        return self.new_out() if self.out is None else self.out, self.new_lse()

    @cached_property
    def whole(self) -> bool:
        """Whether every row belongs to a sequence."""
        return self.cu_seqlens_q is None and self.seqused_q is None

    def new_out(self) -> Tensor:
        make = self.lead.new_empty if self.whole else self.lead.new_zeros
        return make(self.out_shape, dtype=self.out_dtype)

    def new_lse(self) -> Tensor:
        if self.whole:
            return self.lead.new_empty(self.lse_shape, dtype=torch.float32)
        return self.lead.new_full(self.lse_shape, -math.inf, dtype=torch.float32)


NAMES = tuple(field.name for field in fields(Request))
_OUTPUTS = ("out_shape", "out_dtype", "lse_shape", "whole")
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Request)} | {
    "softmax_scale": None,
    "window_size": (-1, -1),
    "seqused_k": None,
    "rel_bias_prep_cache": None,
    "scheduler_metadata": None,
    "block_sparse_tensors": None,
    "dropout_p": 0.0,
    "deterministic": False,
    "seqlen_k_per_split": None,
    "disable_scheduler_metadata": False,
    "min_seqlen_k": None,
}


def check_structure(given: dict[str, Any]) -> SimpleNamespace:
    """The checks that need no values, and the arguments in one spelling."""
    raw = SimpleNamespace(**{**_DEFAULTS, **given})
    checks.normalise(raw)
    checks.check(raw)
    return raw


def _spans(r: Request) -> list[Span]:
    count = r.batch
    rows = values.integers(r.cache_batch_idx) or range(count)
    starts = values.integers(r.cache_leftpad) or [0] * count
    q_starts, q_lens = _ranges(r.lead if r.attend else None, r.cu_seqlens_q, count)
    if r.seqused_q is not None:
        q_lens = values.integers(r.seqused_q)
    new_starts, new_lens = _ranges(r.k, r.cu_seqlens_k_new, count)
    if r.cache_seqlens is not None:
        lengths = values.integers(r.cache_seqlens)
    elif r.cu_seqlens_k is not None:
        edges = values.integers(r.cu_seqlens_k)
        lengths = [b - a for a, b in itertools.pairwise(edges)]
    else:
        lengths = [r.capacity] * count
    included = r.slot_mapping is not None  # lengths already count the new tokens
    spans = []
    for b in range(count):
        length, new = lengths[b], new_lens[b]
        old, end = (length - new, length) if included else (length, length + new)
        spans.append(
            Span(
                row=rows[b],
                q_start=q_starts[b],
                q_len=q_lens[b],
                new_start=new_starts[b],
                new_len=new,
                start=starts[b],
                old=old,
                end=end,
                active=length >= 0,
            )
        )
    return spans


def _ranges(
    tensor: Tensor | None, edges: Tensor | None, count: int
) -> tuple[Sequence[int], Sequence[int]]:
    """First row and number of rows of each sequence in a padded or ragged tensor."""
    if tensor is None:
        return [0] * count, [0] * count
    if edges is None:
        width = tensor.shape[1]
        return range(0, width * count, width) if width else [0] * count, [width] * count
    bounds = values.integers(edges)
    return bounds[:-1], [b - a for a, b in itertools.pairwise(bounds)]


class TensorFacts(NamedTuple):
    """What the planner may know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]


_FACT_TENSORS = tuple(
    name
    for name in NAMES
    if (_DEFAULTS[name] is None or name == "common_prefix_len")
    and name
    not in (
        *("score_mod", "mask_mod", "aux_tensors", "block_sparse", "softmax_scale"),
        *("max_seqlen_q", "max_seqlen_k", "pack_gqa", "backend"),
    )
)
_FACT_SCALARS = (
    *("causal", "window", "attention_chunk", "softcap", "rotary_interleaved", "norm_eps"),
    *("only_qv", "return_lse", "max_seqlen_q", "max_seqlen_k", "num_splits", "pack_gqa"),
    *("sm_margin", "batch_invariant", "backend", "attend"),
)


@dataclass(frozen=True)
class Facts:
    """A request without its data: shapes, dtypes, strides, flags, device. Hashable and printable.

    ``tensors`` holds the tensors that were given, by name; ``options`` the scalar arguments, of a
    common prefix in a tensor the most that it may be.
    """

    device: str
    batch: int
    tensors: tuple[tuple[str, TensorFacts], ...]
    options: tuple[tuple[str, Any], ...]
    score_mod: bool = False
    mask_mod: bool = False
    block_sparse: bool = False

    @classmethod
    def of(cls, r: Request) -> Facts:
        given = []
        for name in _FACT_TENSORS:
            tensor = getattr(r, name)
            if isinstance(tensor, Tensor):
                given.append(
                    (name, TensorFacts(tuple(tensor.shape), tensor.dtype, tensor.stride()))
                )
        options = [(name, getattr(r, name)) for name in _FACT_SCALARS]
        return cls(
            device=r.pool.device.type,
            batch=r.batch,
            tensors=tuple(given),
            options=(*options, ("common_prefix_len", r.common_most)),
            score_mod=r.score_mod is not None,
            mask_mod=r.mask_mod is not None,
            block_sparse=r.block_sparse is not None,
        )

    @cached_property
    def _by_name(self) -> dict[str, TensorFacts]:
        return dict(self.tensors)

    @cached_property
    def _options(self) -> dict[str, Any]:
        return dict(self.options)

    def has(self, *names: str) -> bool:
        """Whether any of the named tensors was given."""
        return any(name in self._by_name for name in names)

    def tensor(self, name: str) -> TensorFacts:
        return self._by_name[name]

    def option(self, name: str) -> Any:
        return self._options[name]

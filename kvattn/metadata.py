"""Scheduler metadata: a hint that callers may compute once a step and share between layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class SchedulerMetadata:
    """The shape of a step. A hint: reusing it with other lengths stays correct."""

    batch_size: int
    max_seqlen_q: int
    max_seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    headdim: int
    headdim_v: int
    num_splits: int


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor | None = None,
    qkv_dtype: Any = None,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> SchedulerMetadata:
    """Metadata for `flash_attn_with_kvcache(scheduler_metadata=...)`, with FA3's signature.

    The backends that exist plan from shapes alone, so it records the shapes; it never changes
    results. Sizes are counts of tokens, heads and channels.

    Example:
        >>> kvattn.get_scheduler_metadata(2, 1, 4096, 32, 8, 128).batch_size
        2
    """
    return SchedulerMetadata(
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads_q,
        num_heads_kv,
        headdim,
        headdim if headdim_v is None else headdim_v,
        num_splits,
    )

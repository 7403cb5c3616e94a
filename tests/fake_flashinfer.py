"""Stand-ins for FlashInfer, with kvattn's reference behind them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from fake_flash_attn import attend, varlen
from torch import Tensor

import kvattn


class _Planned:
    """What FlashInfer's wrappers share: pages in a row, with borders and the last page's fill."""

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        assert kv_layout == "NHD"
        assert set(options) <= {"use_tensor_cores", "backend", *_SINK_OPTIONS}
        self._backend = options.get("backend", "auto")
        self.plans = 0

    def _keep(self, borders: Tensor, pages: Tensor, last: Tensor, page: int) -> None:
        counts = borders.diff()
        assert borders[-1] == len(pages)
        self.lengths = ((counts - 1) * page + last).int()
        self.table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for b, (start, end) in enumerate(pairwise(borders)):
            self.table[b, : end - start] = pages[start:end]
        self.plans += 1

    def _run(self, q: Tensor, kv: tuple[Tensor, Tensor], rows: Tensor, **options: Any) -> Any:
        return attend(
            q,
            *kv,
            cache_seqlens=self.lengths,
            page_table=self.table,
            cu_seqlens_q=rows,
            max_seqlen_q=int(rows.diff().max()),
            **options,
        )


_SINK_OPTIONS = ("q_data_type", "kv_data_type", "head_dim_qk", "head_dim_vo", "window_left")


class Decode(_Planned):
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        self._keep(indptr, indices, last_page_len, page_size)
        window = (window_left, 0) if window_left >= 0 else (-1, -1)
        self.options = {"softmax_scale": sm_scale, "window_size": window}
        self.dtypes = q_data_type, kv_data_type

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        assert (q.dtype, paged_kv_cache[0].dtype) == self.dtypes
        rows = torch.arange(len(self.lengths) + 1, dtype=torch.int32)
        found = self._run(q, paged_kv_cache, rows, **self.options)
        return found if out is None else out.copy_(found)


class Prefill(_Planned):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        self._keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self.rows = qo_indptr
        self.options: dict[str, Any] = {"softmax_scale": sm_scale, "causal": causal}
        if window_left >= 0:
            self.options["window_size"] = (window_left, 0)
        if custom_mask is not None:
            sizes = qo_indptr.diff().tolist(), self.lengths.tolist()
            pieces = custom_mask.split([q * k for q, k in zip(*sizes, strict=True)])
            masks = torch.stack([m.view(sizes[0][0], -1) for m in pieces])
            self.options["mask_mod"] = lambda b, h, q_idx, kv_idx: masks[b, q_idx, kv_idx]

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: Any,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        sinks = {"sinks": args[0]} if args else {}
        assert len(args) in (0, 2)  # the wrapper with sinks also takes the scale
        found = self._run(q, paged_kv_cache, self.rows, **self.options, **sinks)
        return found if out is None else out.copy_(found)


class Ragged(_Planned):
    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        most = (int(borders.diff().max()) for borders in (qo_indptr, kv_indptr))
        self.edges = (qo_indptr, kv_indptr, *most)
        self.options: dict[str, Any] = {"softmax_scale": sm_scale, "causal": causal}
        if window_left >= 0:
            self.options["window_size"] = (window_left, 0)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen(q, k, v, *self.edges, **self.options)


class Cascade(_Planned):
    def __init__(self, num_levels: int, workspace: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(workspace, kv_layout)
        self.levels = [Prefill(workspace) for _ in range(num_levels)]

    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        lists = (
            qo_indptr_arr,
            paged_kv_indptr_arr,
            paged_kv_indices_arr,
            paged_kv_last_page_len,
        )
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        level: Any
        for i, level in enumerate(self.levels):
            given: tuple[Any, ...] = (*(part[i] for part in lists), *shape)
            level.plan(*given, sm_scale=sm_scale, q_data_type=q_data_type)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Any:
        parts = []
        for level in self.levels:
            parts.append(
                kvattn.flash_attn_with_kvcache(
                    q,
                    *paged_kv_cache,
                    cache_seqlens=level.lengths,
                    page_table=level.table,
                    cu_seqlens_q=level.rows,
                    max_seqlen_q=len(q),
                    return_softmax_lse=True,
                    backend="reference",
                    **level.options,
                )
            )
        outs, lses = zip(*parts, strict=True)
        return kvattn.merge_states(list(outs), list(lses))[0]


class Latent:
    def __init__(self, workspace: Tensor, backend: str = "auto") -> None:
        self._backend = backend

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        self.pages = _Planned(torch.empty(0))
        last = (kv_len_arr - 1) % page_size + 1
        self.pages._keep(kv_indptr, kv_indices, last, page_size)
        self.rows, self.options = qo_indptr, {"causal": causal, "softmax_scale": sm_scale}
        self.channels = head_dim_ckv, head_dim_kpe

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> Any:
        assert (ckv_cache.shape[-1], kpe_cache.shape[-1]) == self.channels
        kv = (kpe_cache[..., None, :], ckv_cache[..., None, :])
        return self.pages._run(q_pe, kv, self.rows, qv=q_nope, **self.options)


class Persistent(_Planned):
    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        super().__init__(torch.empty(0), kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        self._keep(kv_indptr, kv_indices, (kv_len_arr - 1) % page_size + 1, page_size)
        self.rows, self.options = qo_indptr, {"causal": causal, "softmax_scale": sm_scale}

    def run(self, q: Tensor, kv_cache: tuple[Tensor, Tensor]) -> Any:
        return self._run(q, kv_cache, self.rows, **self.options), None


def rope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:
    assert cos_sin_cache.dtype == torch.float32
    cos, sin = cos_sin_cache.chunk(2, -1)
    turned = [
        kvattn.apply_rotary(
            x.view(1, len(x), -1, head_size), cos, sin, positions=positions[None],
            interleaved=not is_neox,
        ).view(x.shape)
        for x in (query, key)
    ]  # fmt: skip
    return turned[0], turned[1]


def append(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    page = paged_kv_cache[0].shape[1]
    assert batch_indices.dtype == positions.dtype == torch.int32
    for i, (b, at) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        block = kv_indices[kv_indptr[b] + at // page]
        for cache, new in zip(paged_kv_cache, (append_key, append_value), strict=True):
            cache[block, at % page] = new[i]

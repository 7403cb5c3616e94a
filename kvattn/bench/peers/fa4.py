"""FlashAttention-4, in the CuTe DSL."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvattn.bench.data import Data
from kvattn.bench.peers.base import Call, Participant, module, refuse_if, version


def participant() -> Participant:
    return Participant("fa4", "FlashAttention-4", _find, _prepare, compiles="suite")


def _find() -> str:
    module("flash_attn.cute.interface")
    return version("flash-attn-4", "flash_attn_4", "fa4")


def _prepare(data: Data) -> Call:
    work, flash = data.work, module("flash_attn.cute.interface")
    refuse_if(work.append, "neither appends nor rotates")
    refuse_if(work.tree, "takes masks in the CuTe DSL only")
    refuse_if(work.kv_dtype == "fp8", "takes no FP8 cache beside 16-bit queries")
    refuse_if(work.invariant, "promises no batch invariance")
    options: dict[str, Any] = {"softmax_scale": work.model.scale, "causal": work.causal}
    if work.reach:
        options["window_size"] = (work.reach - 1, 0)
    if data.sinks is not None:
        options["learnable_sink"] = data.sinks.to(data.dtype)
    if not work.page:
        q, (k, v) = data.padded(data.q), data.prompts

        def prompts(layer: int) -> Tensor:
            return _output(flash.flash_attn_func(q, k[layer], v[layer], **options))

        return Call(prompts)
    return _cached(data, flash, options)


def _cached(data: Data, flash: Any, options: dict[str, Any]) -> Call:
    work, (k_cache, v_cache) = data.work, data.pages
    q, qv = data.q, data.qv
    if work.ragged:
        options = options | {"cu_seqlens_q": data.q_borders, "max_seqlen_q": max(work.queries)}
    else:
        q, qv = data.padded(q), None if qv is None else data.padded(qv)
    options = options | {
        "qv": qv,
        "seqused_k": data.keys,
        "page_table": data.page_table,
        "max_seqlen_k": max(work.keys),
    }

    def run(layer: int) -> Tensor:
        return _output(flash.flash_attn_varlen_func(q, k_cache[layer], v_cache[layer], **options))

    return Call(run)


def _output(result: Any) -> Tensor:
    """Some releases give (out, lse) whatever is asked for."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out

"""FlashAttention-2."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvattn.bench.data import Data
from kvattn.bench.peers.base import Call, Participant, module, refuse_if, version

_PAGE = 256  # its pages are multiples of this


def participant() -> Participant:
    return Participant("fa2", "FlashAttention-2", _find, _prepare)


def _find() -> str:
    module("flash_attn.flash_attn_interface")
    return version("flash_attn", "flash-attn")


def _prepare(data: Data) -> Call:
    work, flash = data.work, module("flash_attn.flash_attn_interface")
    refuse_if(work.tree, "takes no custom mask")
    refuse_if(data.sinks is not None, "knows no sinks")
    refuse_if(work.model.latent, "takes no latent queries")
    refuse_if(work.kv_dtype == "fp8", "takes no FP8 cache")
    options: dict[str, Any] = {"softmax_scale": work.model.scale, "causal": work.causal}
    if work.reach:
        options["window_size"] = (work.reach - 1, 0)
    padded = work.batch * max(work.keys)
    if not work.page:
        q, (k, v) = data.padded(data.q), data.prompts

        def prompts(layer: int) -> Tensor:
            out: Tensor = flash.flash_attn_func(q, k[layer], v[layer], **options)
            return out

        return Call(prompts)
    if work.ragged or (work.page % _PAGE and padded > 4 * sum(work.keys)):
        return _packed(data, flash, options)
    if work.invariant:
        options["num_splits"] = 1
    return _cached(data, flash, options)


def _packed(data: Data, flash: Any, options: dict[str, Any]) -> Call:
    work, q, (k, v) = data.work, data.q, data.packed
    refuse_if(work.append, "cannot append to packed keys")
    edges = (data.q_borders, data.k_borders, max(work.queries), max(work.keys))

    def run(layer: int) -> Tensor:
        out: Tensor = flash.flash_attn_varlen_func(q, k[layer], v[layer], *edges, **options)
        return out

    return Call(run, note="packed keys")


def _cached(data: Data, flash: Any, options: dict[str, Any]) -> Call:
    work = data.work
    paged = work.page % _PAGE == 0
    k_cache, v_cache = data.pages if paged else data.dense
    options = options | {"cache_seqlens": data.cached}
    if paged:
        options["block_table"] = data.page_table
    if work.append:
        options |= data.appended(data.dtype)
    q = data.padded(data.q)

    def run(layer: int) -> Tensor:
        out: Tensor = flash.flash_attn_with_kvcache(q, k_cache[layer], v_cache[layer], **options)
        return out

    note = "" if paged else f"contiguous cache; its pages are multiples of {_PAGE}"
    return Call(run, "pages" if paged else "dense", note)

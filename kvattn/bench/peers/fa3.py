"""FlashAttention-3, in its own package or in the forward-only build."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvattn.bench.data import Data
from kvattn.bench.peers.base import Call, Participant, module, refuse_if, version

_MODULES = ("flash_attn_interface", "fa3_fwd_interface")


def participant() -> Participant:
    return Participant("fa3", "FlashAttention-3", _find, _prepare)


def _find() -> str:
    found = module(*_MODULES).__name__
    names = {"flash_attn_interface": "flash_attn_3", "fa3_fwd_interface": "fa3_fwd"}
    return f"{names[found]} {version(names[found], names[found].replace('_', '-'))}"


def _lacks(feature: str) -> bool:
    """Whether this build was made without a feature."""
    name = module(*_MODULES).__name__.replace("interface", "config")
    try:
        flags = import_module(name).CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError):
        return False
    return bool(flags.get(f"FLASHATTENTION_DISABLE_{feature}"))


def _prepare(data: Data) -> Call:
    work, flash = data.work, module(*_MODULES)
    refuse_if(work.tree, "takes no custom mask")
    refuse_if(data.sinks is not None, "knows no sinks")
    refuse_if(bool(work.reach) and _lacks("LOCAL"), "this build has no windows")
    options: dict[str, Any] = {"softmax_scale": work.model.scale, "causal": work.causal}
    if work.reach:
        options["window_size"] = (work.reach - 1, 0)
    if work.invariant:
        options["num_splits"] = 1
    notes = ["one split"] if work.invariant else []
    queries = {"q": data.q, "qv": data.qv}
    if work.kv_dtype == "fp8":
        queries["q"] = data.q.to(data.kv_dtype)
        one = torch.ones(work.batch, work.model.kv_heads, device=data.device)
        options |= {"q_descale": one, "k_descale": one, "v_descale": one}
        notes.append("queries and products in FP8")
    if not work.page:
        return _prompts(data, flash, options, notes)
    paged = not _lacks("PAGEDKV")
    padded = work.batch * max(work.keys)
    if not paged and (work.ragged or padded > 4 * sum(work.keys)):
        return _packed(data, flash, queries, options, notes)
    return _cached(data, flash, queries, options, notes, paged)


def _prompts(data: Data, flash: Any, options: dict[str, Any], notes: list[str]) -> Call:
    q, (k, v) = data.padded(data.q), data.prompts

    def run(layer: int) -> Tensor:
        out: Tensor = flash.flash_attn_func(q, k[layer], v[layer], **options)
        return out

    return Call(run, note="; ".join(notes))


def _packed(
    data: Data,
    flash: Any,
    queries: dict[str, Tensor | None],
    options: dict[str, Any],
    notes: list[str],
) -> Call:
    """A build without pages: keys of different lengths lie in a row."""
    work, (k, v) = data.work, data.packed
    refuse_if(work.append, "cannot append to packed keys")
    borders: dict[str, Any] = {"cu_seqlens_q": data.q_borders, "cu_seqlens_k": data.k_borders}
    borders |= {"max_seqlen_q": max(work.queries), "max_seqlen_k": max(work.keys)}
    options = {"num_splits": 0} | options | borders

    def run(layer: int) -> Tensor:
        out: Tensor = flash.flash_attn_varlen_func(k=k[layer], v=v[layer], **queries, **options)
        return out

    return Call(run, note="; ".join(["packed keys, a build without pages", *notes]))


def _cached(
    data: Data,
    flash: Any,
    queries: dict[str, Tensor | None],
    options: dict[str, Any],
    notes: list[str],
    paged: bool,
) -> Call:
    work = data.work
    k_cache, v_cache = data.pages if paged else data.dense
    options = options | {"cache_seqlens": data.cached}
    if paged:
        options["page_table"] = data.page_table
    else:
        notes = ["contiguous cache, a build without pages", *notes]
    if work.ragged:
        options |= {"cu_seqlens_q": data.q_borders, "max_seqlen_q": max(work.queries)}
    else:
        queries = {n: None if x is None else data.padded(x) for n, x in queries.items()}
    if work.append:
        options |= data.appended(data.dtype)

    def run(layer: int) -> Tensor:
        out: Tensor = flash.flash_attn_with_kvcache(
            k_cache=k_cache[layer], v_cache=v_cache[layer], **queries, **options
        )
        return out

    return Call(run, "pages" if paged else "dense", "; ".join(notes))

"""kvattn itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import kvattn
from kvattn.bench.data import Data
from kvattn.bench.peers.base import Call, Participant


def participant(backend: str | None = None) -> Participant:
    """kvattn with the planner's choice of backend, or with a named one."""

    def prepare(data: Data) -> Call:
        return _prepare(data, backend)

    name = "kvattn" if backend is None else f"kvattn {backend}"
    return Participant(
        name, name, lambda: kvattn.__version__, prepare, devices=("cuda", "cpu"), compiles="cell"
    )


def _prepare(data: Data, backend: str | None) -> Call:
    options: dict[str, Any] = {
        "causal": data.work.causal,
        "softmax_scale": data.work.model.scale,
        "sinks": data.sinks,
        "backend": backend,
    }
    if data.work.reach:
        options["window_size"] = (data.work.reach - 1, 0)
    if data.work.invariant:
        options["batch_invariant"] = True
    if data.tree is not None:
        options["mask_mod"] = data.tree
    return _cached(data, options) if data.work.page else _prompts(data, options)


def _prompts(data: Data, options: dict[str, Any]) -> Call:
    q, (k, v) = data.padded(data.q), data.prompts

    def run(layer: int) -> Any:
        return kvattn.flash_attn_func(q, k[layer], v[layer], num_splits=0, **options)

    return Call(run, note=_note(data, q, k[0], v[0], **options))


def _cached(data: Data, options: dict[str, Any]) -> Call:
    work, (k_cache, v_cache) = data.work, data.pages
    q, qv = data.q, data.qv
    if not work.ragged:
        q, qv = data.padded(q), None if qv is None else data.padded(qv)
    else:
        options |= {"cu_seqlens_q": data.q_borders, "max_seqlen_q": max(work.queries)}
    options |= {"qv": qv, "cache_seqlens": data.cached, "page_table": data.page_table}
    if work.prefix and work.announced:
        options["common_prefix_len"] = work.prefix
    if work.append:
        options |= data.appended()

    def run(layer: int) -> Any:
        return kvattn.flash_attn_with_kvcache(q, k_cache[layer], v_cache[layer], **options)

    return Call(run, "pages", _note(data, q, k_cache[0], v_cache[0], **options))


def _note(data: Data, *tensors: Tensor, **options: Any) -> str:
    """Which backend and kernel run; whatever the call would raise is raised here."""
    plan = kvattn.explain(*tensors, **options).plan
    return f"{plan.backend}: {plan.kernel}"

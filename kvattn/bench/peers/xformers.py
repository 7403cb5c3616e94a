"""xFormers' memory-efficient attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvattn.bench.data import Data
from kvattn.bench.peers.base import Call, Participant, module, refuse_if, version


def participant() -> Participant:
    return Participant("xformers", "xFormers", _find, _prepare)


def _find() -> str:
    module("xformers.ops.fmha")
    return version("xformers")


def _prepare(data: Data) -> Call:
    work, fmha = data.work, module("xformers.ops.fmha")
    refuse_if(work.append, "neither appends nor rotates")
    refuse_if(work.tree or work.model.latent, "takes no such queries")
    refuse_if(data.sinks is not None, "knows no sinks")
    refuse_if(bool(work.reach), "takes no window over pages")
    refuse_if(work.kv_dtype == "fp8", "takes no FP8 cache")
    refuse_if(work.invariant, "promises no batch invariance")
    q, bias = _grouped(data.q[None], data), _bias(data, module("xformers.ops.fmha.attn_bias"))
    pools = data.pages if work.page else data.packed
    k, v = (x.view(data.layers, 1, -1, *x.shape[-2:]) for x in pools)

    def run(layer: int) -> Tensor:
        keys, values = (_shared(x[layer], data) for x in (k, v))
        out: Tensor = fmha.memory_efficient_attention_forward(
            q, keys, values, attn_bias=bias, scale=work.model.scale
        )
        return out.view(work.rows, work.model.heads, work.model.dim_v)

    return Call(run)


def _bias(data: Data, biases: Any) -> Any:
    work, queries, keys = data.work, list(data.work.queries), list(data.work.keys)
    if work.page:
        kind = biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        return kind.from_seqlens(
            queries, keys, data.page_table, page_size=work.page, device=data.device
        )
    mask = biases.BlockDiagonalMask.from_seqlens(queries, keys, device=data.device)
    return mask.make_causal_from_bottomright() if work.causal else mask


def _grouped(x: Tensor, data: Data) -> Tensor:
    """(1, rows, H, D) as (1, rows, Hk, H / Hk, D): how xFormers takes grouped heads."""
    model = data.work.model
    if model.heads == model.kv_heads:
        return x
    return x.view(1, -1, model.kv_heads, model.heads // model.kv_heads, x.shape[-1])


def _shared(x: Tensor, data: Data) -> Tensor:
    """(1, slots, Hk, D) seen by every query head of its group."""
    model = data.work.model
    if model.heads == model.kv_heads:
        return x
    return x[..., None, :].expand(*x.shape[:-1], model.heads // model.kv_heads, x.shape[-1])

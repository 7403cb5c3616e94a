"""PyTorch's FlexAttention, compiled for every shape, over contiguous caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvattn.bench.data import Data, Mask
from kvattn.bench.peers.base import Call, Participant, compiled, refuse_if, refuse_padding
from kvattn.bench.peers.sdpa import contiguous

_PAIRS = 1 << 28  # of a row and a key: beyond, the mask is made without writing them all down


def participant() -> Participant:
    return Participant(
        "flex", "PyTorch FlexAttention", lambda: torch.__version__, _prepare, compiles="cell"
    )


def _prepare(data: Data) -> Call:
    work = data.work
    refuse_padding(data)
    refuse_if(work.kv_dtype == "fp8", "takes no FP8 cache beside 16-bit queries")
    refuse_if(work.invariant, "promises no batch invariance")
    run, notes = contiguous(data, _attention(data))
    if data.sinks is not None:
        notes.append("sinks by rescaling with the log-sum-exp")
    run(0)
    return Call(run, "dense", "; ".join(notes))


def _attention(data: Data) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch.nn.attention import flex_attention as flex

    call = compiled(flex.flex_attention)
    options: dict[str, Any] = {"scale": data.work.model.scale, "block_mask": _block_mask(data)}
    if data.work.model.heads != data.work.model.kv_heads:
        options["enable_gqa"] = True
    sinks = data.sinks
    if sinks is None:
        return lambda q, k, v: call(q, k, v, **options)
    options["return_aux"] = flex.AuxRequest(lse=True)
    rescale = compiled(_with_sink)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, aux = call(q, k, v, **options)
        result: Tensor = rescale(out, aux.lse, sinks)
        return result

    return attend


def _with_sink(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """out (B, H, S, D) with the sink's share of the probability taken off."""
    share = torch.sigmoid(lse - sinks[:, None])
    return (out * share[..., None]).to(out.dtype)


def _block_mask(data: Data) -> Any:
    """None where every query sees every key, else the cell's mask in blocks."""
    from torch.nn.attention.flex_attention import create_block_mask

    work = data.work
    rows, longest = work.queries[0], max(work.keys)
    if work.uniform and not work.reach and not work.tree and (rows == 1 or not work.causal):
        return None
    batch = None if work.uniform else work.batch
    many = rows * longest > _PAIRS
    return create_block_mask(
        _mask(data), batch, None, rows, longest, device=str(data.device), _compile=many
    )


def _mask(data: Data) -> Mask:
    work, keys, tree = data.work, data.keys, data.tree
    rows, reach, causal = work.queries[0], work.reach, work.causal and not work.tree

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        first = keys[b] - rows
        seen = kv_idx < keys[b]
        if causal:
            seen = seen & (kv_idx <= q_idx + first)
        if reach:
            seen = seen & (kv_idx > q_idx + first - reach)
        if tree is not None:
            seen = seen & tree(b, h, q_idx, kv_idx)
        return seen

    return mask

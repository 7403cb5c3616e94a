"""PyTorch's scaled_dot_product_attention, by kernel, over contiguous caches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvattn.bench.data import Data
from kvattn.bench.peers.base import (
    Call,
    Participant,
    RefusalError,
    compiled,
    refuse_if,
    refuse_padding,
)
from kvattn.rotary import turn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def participants() -> list[Participant]:
    """One for every fused kernel on GPUs, PyTorch's choice on the CPU."""
    kernels = (
        ("cudnn", "PyTorch SDPA, cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("sdpa-flash", "PyTorch SDPA, FlashAttention-2", SDPBackend.FLASH_ATTENTION),
        ("sdpa-mem", "PyTorch SDPA, memory-efficient", SDPBackend.EFFICIENT_ATTENTION),
    )
    found = [_participant(name, title, kernel) for name, title, kernel in kernels]
    return [*found, _participant("sdpa", "PyTorch SDPA", None)]


def _participant(name: str, title: str, kernel: SDPBackend | None) -> Participant:
    def prepare(data: Data) -> Call:
        return _prepare(data, kernel)

    if kernel is None:
        return Participant(name, title, _find, prepare, ("cpu",))
    return Participant(name, title, _find_on_gpu, prepare, compiles="suite")


def _find_on_gpu() -> str:
    if not torch.cuda.is_available():
        raise ImportError("PyTorch sees no GPU")
    return _find()


def _find() -> str:
    version = str(torch.__version__)
    if torch.cuda.is_available() and torch.backends.cudnn.is_available():
        version += f", cuDNN {torch.backends.cudnn.version()}"
    return version


def _prepare(data: Data, kernel: SDPBackend | None) -> Call:
    work = data.work
    refuse_padding(data)
    refuse_if(work.kv_dtype == "fp8", "takes no FP8 cache")
    refuse_if(data.sinks is not None, "knows no sinks")
    refuse_if(work.invariant, "promises no batch invariance")
    within = nullcontext if kernel is None else lambda: sdpa_kernel(kernel)
    attend = _attention(data, kernel)
    run, notes = contiguous(data, attend)
    _try(run, within)
    return Call(run, "dense", "; ".join(notes), within=within)


def _try(run: Callable[[int], Tensor], within: Callable[[], AbstractContextManager[Any]]) -> None:
    """Runs once; where no kernel takes the call, the reason is in the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with within():
                run(0)
        except RuntimeError as error:
            whys = [str(w.message).partition(" (Triggered")[0] for w in said]
            useful = [why for why in whys if "not used because" not in why]
            raise RefusalError(" ".join(useful) or str(error)) from None


def _attention(data: Data, kernel: SDPBackend | None) -> Attend:
    """SDPA on (B, H, S, D) with the cell's mask."""
    mask = _mask(data, kernel)
    options: dict[str, Any] = {"scale": data.work.model.scale}
    if data.work.model.heads != data.work.model.kv_heads:
        options["enable_gqa"] = True
    if mask is True:
        options["is_causal"] = True
    else:
        options["attn_mask"] = mask

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, **options)

    return attend


def _mask(data: Data, kernel: SDPBackend | None) -> Any:
    """None, True for causal squares, PyTorch's aligned causal bias, or a mask of booleans."""
    work = data.work
    q, k = work.queries[0], max(work.keys)
    if work.uniform and not work.tree and not work.reach:
        if not work.causal or q == 1:
            return None
        if q == k:
            return True
        if kernel is not SDPBackend.CUDNN_ATTENTION:
            # Imports torch._dynamo, which takes seconds.
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(q, k)
    return visible(data)[:, None]


def visible(data: Data) -> Tensor:
    """(B | 1, Sq, longest) booleans: which keys a row sees."""
    work, device = data.work, data.device
    key = torch.arange(max(work.keys), device=device)
    end = data.keys[:1] if work.uniform else data.keys
    first = (end - work.queries[0])[:, None]
    row = first + torch.arange(work.queries[0], device=device)
    seen = (key < end[:, None])[:, None].expand(-1, work.queries[0], -1)
    if work.causal and not work.tree:
        seen = seen & (key <= row[..., None])
    if work.reach:
        seen = seen & (key > row[..., None] - work.reach)
    if data.ancestors is not None:
        draft = (key - first).clamp(0, work.queries[0] - 1)[:, None]
        node = torch.arange(work.queries[0], device=device)[None, :, None]
        seen = seen & ((key < first)[:, None] | data.ancestors[node, draft])
    return seen


def contiguous(data: Data, attend: Attend) -> tuple[Callable[[int], Tensor], list[str]]:
    """The cell with an attention on (B, H, S, D) over a contiguous cache, and what to note.

    With an append this is what users of such an attention run: rotary and the cache's update in
    PyTorch, compiled into one kernel or two on a GPU, then attention over the cache.
    """
    work = data.work
    longest, notes = max(work.keys), ["contiguous cache"] if work.page else []
    q = data.padded(data.q)
    if work.model.latent:
        joined = torch.cat([x for x in (data.qv, data.q) if x is not None], -1)
        q = data.padded(joined)
        buffer = data.dense[1]
        whole = buffer.as_strided(
            (*buffer.shape[:-1], work.model.kv_channels), (*buffer.stride()[:-1], 1)
        )
        k_cache, v_cache = whole[:, :, :longest], buffer[:, :, :longest]
    elif work.page:
        k_cache, v_cache = (x[:, :, :longest] for x in data.dense)
    else:
        k_cache, v_cache = data.prompts

    def attend_layer(q: Tensor, layer: int) -> Tensor:
        k, v = k_cache[layer].transpose(1, 2), v_cache[layer].transpose(1, 2)
        return attend(q.transpose(1, 2), k, v).transpose(1, 2)

    if not work.append:
        return lambda layer: attend_layer(q, layer), notes
    fused = data.device.type == "cuda"
    update = compiled(_rotate_and_store) if fused else _rotate_and_store
    notes.append("rotary and append in PyTorch" + (", compiled" if fused else ""))
    (k_new, v_new), (cos, sin) = data.fresh, data.tables
    owner = torch.arange(work.batch, device=data.device)[:, None]
    at = data.positions.view(work.batch, -1)

    def step(layer: int) -> Tensor:
        k, v = k_cache[layer], v_cache[layer]
        return attend_layer(update(q, k_new, v_new, k, v, owner, at, cos, sin), layer)

    return step, notes


def _rotate_and_store(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    owner: Tensor,
    at: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Turns queries and new keys (B, n, heads, D) to positions `at` (B, n) and stores the keys."""
    cos, sin = cos[at].unsqueeze(-2), sin[at].unsqueeze(-2)
    k_cache[owner, at] = turn(k_new, cos, sin, interleaved=False).to(k_cache.dtype)
    v_cache[owner, at] = v_new.to(v_cache.dtype)
    return turn(q, cos, sin, interleaved=False)

"""FlashInfer: its decode, prefill, cascade, latent and persistent kernels, rotary and append.

Each step is planned on the host for these lengths, outside the timed calls, as for the layers of a
model; what the plan costs is measured with the host time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvattn.bench.data import Data
from kvattn.bench.peers.base import Call, Participant, module, refuse_if, version

_WORKSPACE = 256 << 20  # bytes; its documentation recommends half of that
_LEAF = 2048  # keys a share in the batch-invariant mode


def participants() -> list[Participant]:
    return [
        Participant("flashinfer", "FlashInfer", _find, _prepare, compiles="suite"),
        Participant(
            "fi-persistent",
            "FlashInfer, persistent kernel",
            _find,
            _prepare_persistent,
            compiles="suite",
        ),
    ]


def _find() -> str:
    os.environ.setdefault("FLASHINFER_LOGGING_LEVEL", "warning")  # builds are announced else
    module("flashinfer")
    return version("flashinfer-python")


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


class _Pages:
    """The page table of some sequences as FlashInfer takes it: borders, pages, last fill."""

    def __init__(self, data: Data, first: int, end: int, skip: int = 0) -> None:
        """Sequences `first` to `end`, without their `skip` leading pages."""
        page, keys = data.work.page, data.work.keys[first:end]
        counts = [-(-k // page) - skip for k in keys]
        steps = torch.arange(data.page_table.shape[1] - skip, device=data.device)
        used = steps < data.ints(counts)[:, None]
        self.borders = data.ints([0, *torch.tensor(counts).cumsum(0).tolist()])
        self.pages = data.page_table[first:end, skip:][used].contiguous()
        self.last = data.ints([(k - 1) % page + 1 for k in keys])

    def __iter__(self) -> Any:
        return iter((self.borders, self.pages, self.last))


def _prepare(data: Data) -> Call:
    work = data.work
    if not work.page:
        return _prompts(data)
    if work.model.latent:
        return _latent(data)
    if data.sinks is not None:
        return _sinks(data)
    if work.prefix and work.announced:
        return _cascade(data)
    if work.ragged:
        return _split(data)
    if work.append:
        return _step(data)
    first, end = 0, work.batch
    one = work.queries[0] == 1
    wrapper, plan, note = (_decode if one else _prefill)(data, first, end)
    plan()
    pages = _scaled(data)

    def run(layer: int) -> Tensor:
        out: Tensor = wrapper.run(data.q, (data.pages[0][layer], data.pages[1][layer]), **pages)
        return out

    return Call(run, note=note, plan=plan)


Planned = tuple[Any, Callable[[], object], str]


def _scaled(data: Data) -> dict[str, float]:
    return {"k_scale": 1.0, "v_scale": 1.0} if data.work.kv_dtype == "fp8" else {}


def _shape(data: Data) -> tuple[int, int, int, int]:
    model = data.work.model
    return model.heads, model.kv_heads, model.dim, data.work.page


def _common(data: Data) -> dict[str, Any]:
    work = data.work
    return {
        "sm_scale": work.model.scale,
        "window_left": work.reach - 1 if work.reach else -1,
        "q_data_type": data.dtype,
        "kv_data_type": data.kv_dtype,
    }


def _decode(data: Data, first: int, end: int) -> Planned:
    """One token of each sequence; with tensor cores where query heads share keys."""
    flashinfer, work = module("flashinfer"), data.work
    cores = work.model.heads // work.model.kv_heads >= 4 or work.invariant
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(data.device), "NHD", use_tensor_cores=cores
    )
    pages, options = _Pages(data, first, end), _common(data)
    if work.invariant:
        options["fixed_split_size"] = max(1, _LEAF // work.page)
    note = "decode wrapper" + (", tensor cores" if cores else "")
    return wrapper, lambda: wrapper.plan(*pages, *_shape(data), **options), note


def _prefill(data: Data, first: int, end: int) -> Planned:
    """Several query rows of each sequence over pages."""
    flashinfer, work = module("flashinfer"), data.work
    backend = "fa2" if work.tree or work.invariant else "auto"
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        _workspace(data.device), "NHD", backend=backend
    )
    queries = work.queries[first:end]
    borders = data.ints([0, *torch.tensor(queries).cumsum(0).tolist()])
    options = _common(data)
    if work.tree:
        options["custom_mask"] = _tree(data)
    else:
        options["causal"] = work.causal
    if work.invariant:
        options["fixed_split_size"] = max(1, _LEAF // work.page)
    pages, (heads, kv_heads, dim, page) = _Pages(data, first, end), _shape(data)

    def plan() -> None:
        wrapper.plan(borders, *pages, heads, kv_heads, dim, page, **options)

    plan()
    return wrapper, plan, f"paged prefill wrapper, {wrapper._backend}"


def _tree(data: Data) -> Tensor:
    """Booleans of every pair of a query row and a key, sequence after sequence, flat."""
    work, ancestors = data.work, data.ancestors
    assert ancestors is not None
    rows, keys = work.queries[0], work.keys[0]
    refuse_if(not work.uniform, "trees of one size only")
    one = torch.ones(rows, keys, dtype=torch.bool, device=data.device)
    one[:, keys - rows :] = ancestors
    return one.flatten().repeat(work.batch)


def _prompts(data: Data) -> Call:
    flashinfer, work = module("flashinfer"), data.work
    refuse_if(data.sinks is not None, "takes sinks over pages only")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(data.device), "NHD")
    model, (k, v) = work.model, data.packed

    def plan() -> None:
        wrapper.plan(
            data.q_borders,
            data.k_borders,
            model.heads,
            model.kv_heads,
            model.dim,
            causal=work.causal,
            **_common(data),
        )

    plan()

    def run(layer: int) -> Tensor:
        out: Tensor = wrapper.run(data.q, k[layer], v[layer])
        return out

    return Call(run, note=f"ragged prefill wrapper, {wrapper._backend}", plan=plan)


def _step(data: Data) -> Call:
    """Its rotary kernel, its append kernel and its attention, one after the other."""
    flashinfer, work = module("flashinfer"), data.work
    wrapper, plan, note = _decode(data, 0, work.batch)
    plan()
    pages, (k_pages, v_pages) = _Pages(data, 0, work.batch), data.pages
    table = torch.cat(data.tables, -1)
    k_new, v_new = (x.flatten(0, 1) for x in data.fresh)
    owner = torch.arange(work.batch, device=data.device, dtype=torch.int32)
    owner = owner.repeat_interleave(work.new)
    positions, dim = data.positions.int(), work.model.dim
    flat_q, flat_k = data.q.flatten(1), k_new.flatten(1)

    def run(layer: int) -> Tensor:
        q, k = flashinfer.apply_rope_with_cos_sin_cache(positions, flat_q, flat_k, dim, table)
        kv = (k_pages[layer], v_pages[layer])
        flashinfer.append_paged_kv_cache(
            k.view(k_new.shape), v_new, owner, positions, kv, pages.pages, pages.borders, pages.last
        )
        out: Tensor = wrapper.run(q.view(data.q.shape), kv)
        return out

    return Call(run, "pages", f"rotary, append and attention kernels; {note}", plan)


def _sinks(data: Data) -> Call:
    work, sinks = data.work, data.sinks
    wrapper = module("flashinfer").BatchAttentionWithAttentionSinkWrapper(
        _workspace(data.device),
        "NHD",
        q_data_type=data.dtype,
        kv_data_type=data.kv_dtype,
        head_dim_qk=work.model.dim,
        head_dim_vo=work.model.dim_v,
        window_left=work.reach - 1 if work.reach else -1,
    )
    pages, (heads, kv_heads, dim, page) = _Pages(data, 0, work.batch), _shape(data)

    def plan() -> None:
        shape = (heads, kv_heads, dim, page)
        wrapper.plan(data.q_borders, *pages, *shape, causal=work.causal, **_common(data))

    plan()

    def run(layer: int) -> Tensor:
        kv = (data.pages[0][layer], data.pages[1][layer])
        out: Tensor = wrapper.run(data.q, kv, sinks, work.model.scale)
        return out

    return Call(run, note="attention with sinks wrapper", plan=plan)


def _cascade(data: Data) -> Call:
    """The prefix for all sequences at once, their own keys each, then a merge."""
    work = data.work
    wrapper = module("flashinfer").MultiLevelCascadeAttentionWrapper(
        2, _workspace(data.device), "NHD"
    )
    shared = work.prefix // work.page
    prefix = (data.ints([0, shared]), data.page_table[0, :shared].contiguous())
    own = _Pages(data, 0, work.batch, skip=shared)
    each = torch.arange(work.batch + 1, device=data.device, dtype=torch.int32)

    def plan() -> None:
        wrapper.plan(
            [data.ints([0, work.batch]), each],
            [prefix[0], own.borders],
            [prefix[1], own.pages],
            [data.ints([work.page]), own.last],
            *_shape(data),
            **_common(data),
        )

    plan()

    def run(layer: int) -> Tensor:
        out: Tensor = wrapper.run(data.q, (data.pages[0][layer], data.pages[1][layer]))
        return out

    return Call(run, note="two-level cascade", plan=plan)


def _latent(data: Data) -> Call:
    flashinfer, work = module("flashinfer"), data.work
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(data.device))
    pages, model = _Pages(data, 0, work.batch), work.model
    k_pages, v_pages = (x.squeeze(-2) for x in data.pages)
    qv = data.qv
    assert qv is not None

    def plan() -> None:
        wrapper.plan(
            data.q_borders,
            pages.borders,
            pages.pages,
            data.keys,
            model.heads,
            model.dim_v,
            model.dim,
            work.page,
            work.causal,
            model.scale,
            data.dtype,
            data.kv_dtype,
        )

    plan()

    def run(layer: int) -> Tensor:
        out: Tensor = wrapper.run(qv, data.q, v_pages[layer], k_pages[layer])
        return out

    return Call(run, note=f"MLA wrapper, {wrapper._backend}", plan=plan)


def _split(data: Data) -> Call:
    """A mixed batch as serving engines run it: prompts and single tokens in a call each."""
    work = data.work
    prompts = sum(q > 1 for q in work.queries)
    refuse_if(set(work.queries[prompts:]) != {1}, "prompts have to come first")
    rows = sum(work.queries[:prompts])
    prefill, plan_prefill, how = _prefill(data, 0, prompts)
    decode, plan_decode, note = _decode(data, prompts, work.batch)
    plan_decode()
    out = torch.empty(*data.q.shape[:-1], work.model.dim_v, dtype=data.dtype, device=data.device)

    def plan() -> None:
        plan_prefill()
        plan_decode()

    def run(layer: int) -> Tensor:
        kv = (data.pages[0][layer], data.pages[1][layer])
        prefill.run(data.q[:rows], kv, out=out[:rows])
        decode.run(data.q[rows:], kv, out=out[rows:])
        return out

    return Call(run, note=f"two calls: {how}; {note}", plan=plan)


def _prepare_persistent(data: Data) -> Call:
    """One persistent kernel over a batch of any lengths."""
    flashinfer, work = module("flashinfer"), data.work
    refuse_if(not work.page, "reads pages only")
    refuse_if(work.uniform, "measured where lengths differ")
    refuse_if(work.append or work.tree or work.model.latent, "does not take this call")
    refuse_if(bool(work.reach) or work.invariant, "does not take this call")
    wrapper = flashinfer.BatchAttention("NHD", device=str(data.device))
    pages, model = _Pages(data, 0, work.batch), work.model

    def plan() -> None:
        wrapper.plan(
            data.q_borders,
            pages.borders,
            pages.pages,
            data.keys,
            model.heads,
            model.kv_heads,
            model.dim,
            model.dim_v,
            work.page,
            causal=work.causal,
            sm_scale=model.scale,
            q_data_type=data.dtype,
            kv_data_type=data.kv_dtype,
        )

    plan()

    def run(layer: int) -> Tensor:
        out: Tensor = wrapper.run(data.q, (data.pages[0][layer], data.pages[1][layer]))[0]
        return out

    return Call(run, note="one persistent kernel", plan=plan)

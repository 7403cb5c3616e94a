"""Planning: a pure function of facts; refusals with reasons; explain."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import kvattn
from kvattn import backends, plan
from kvattn import errors as E
from kvattn.plan import Backend
from kvattn.request import Facts, Request


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def dense(device: str = "cpu", **changes: Any) -> dict[str, Any]:
    call: dict[str, Any] = {
        "q": torch.zeros(2, 1, 4, 16, device=device),
        "k_cache": torch.zeros(2, 8, 2, 16, device=device),
        "v_cache": torch.zeros(2, 8, 2, 16, device=device),
        "cache_seqlens": torch.full((2,), 5, dtype=torch.int32, device=device),
    }
    return call | changes


def paged(device: str = "cpu", **changes: Any) -> dict[str, Any]:
    table = torch.zeros(2, 4, dtype=torch.int32, device=device)
    return dense(device, page_table=table, **changes)


def appending(device: str = "cpu", **changes: Any) -> dict[str, Any]:
    token = torch.zeros(2, 1, 2, 16, device=device)
    table = torch.zeros(16, 4, device=device)
    rotary = {"rotary_cos": table, "rotary_sin": table}
    return paged(device, k=token, v=token, **rotary, **changes)


def ragged(device: str = "cpu", **changes: Any) -> dict[str, Any]:
    edges = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
    return dense(device, q=torch.zeros(3, 4, 16, device=device), cu_seqlens_q=edges, **changes)


def features(device: str = "cpu", **changes: Any) -> dict[str, Any]:
    more = {"window_size": (3, 0), "softcap": 2.0, "attention_chunk": 4, "num_splits": 3}
    return dense(device, sinks=torch.zeros(4, device=device), **more, **changes)


CALLS: list[Callable[..., dict[str, Any]]] = [dense, paged, appending, ragged, features]
calls = pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)


def facts_of(call: dict[str, Any]) -> Facts:
    return Request.of(**call).facts


def candidate(name: str, reason: str | None) -> Backend:
    def refuses(facts: Facts) -> str | None:
        return reason

    def kernel(facts: Facts) -> str:
        return f"kernel of {name}"

    return cast(Backend, SimpleNamespace(name=name, refuses=refuses, kernel=kernel))


# Purity ---------------------------------------------------------------------------------------


@calls
def test_the_same_facts_give_the_same_plan(make: Callable[..., dict[str, Any]]) -> None:
    """Facts of equal calls are equal, whatever the tensors hold, and so are their plans."""
    call = make()
    other = make()
    other["k_cache"].normal_()
    other["q"].normal_()
    other["cache_seqlens"].fill_(2)
    first, second = facts_of(call), facts_of(other)
    assert first == second and hash(first) == hash(second)
    again = backends.plan_for.__wrapped__(second)
    assert again == backends.plan_for(first) and again is not backends.plan_for(first)


@calls
def test_a_plan_needs_no_data(make: Callable[..., dict[str, Any]]) -> None:
    """Meta tensors have none, and give the plan of real ones."""
    real, meta = facts_of(make()), facts_of(make("meta"))
    assert meta.device == "meta"
    assert backends.plan_for.__wrapped__(replace(meta, device="cpu")) == backends.plan_for(real)
    assert kvattn.explain(**make("meta")).plan == kvattn.explain(**make()).plan


@calls
def test_facts_hold_no_tensor(make: Callable[..., dict[str, Any]]) -> None:
    """They can be printed, stored and sent, and cannot be changed."""
    facts = facts_of(make())
    assert pickle.loads(pickle.dumps(facts)) == facts
    assert "tensor(" not in repr(facts)
    with pytest.raises(FrozenInstanceError):
        facts.batch = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"q": torch.zeros(2, 2, 4, 16)},
        {"causal": True},
        {"cache_leftpad": ints(0, 0)},
        {"window_size": (3, 0)},
        {"batch_invariant": True},
        {"mask_mod": lambda b, h, q, kv: kv >= 0},
        {"k_cache": torch.zeros(2, 16, 2, 16)[:, ::2]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_facts_tell_calls_apart(change: dict[str, Any]) -> None:
    """Shapes, strides, flags and the presence of every argument are facts."""
    assert facts_of(dense(**change)) != facts_of(dense())


def test_facts_answer_by_name() -> None:
    facts = facts_of(features())
    assert facts.has("sinks") and facts.has("page_table", "q") and not facts.has("page_table")
    assert facts.tensor("q").shape == (2, 1, 4, 16)
    assert facts.option("window") == (3, 0) and facts.option("softcap") == 2.0
    assert (facts.batch, facts.device) == (2, "cpu")


# Choosing -------------------------------------------------------------------------------------


def test_the_first_that_does_not_refuse() -> None:
    fast, slow = candidate("fast", "the head dim is odd"), candidate("slow", None)
    chosen = plan.plan(facts_of(dense()), [fast, slow, candidate("last", None)])
    assert (chosen.backend, chosen.kernel) == ("slow", "kernel of slow")
    assert chosen.passed_over == (("fast", "the head dim is odd"),)
    assert str(chosen) == "slow: kernel of slow\n  not fast: the head dim is odd"


def test_a_named_backend_never_falls_back() -> None:
    candidates = [candidate("fast", "the head dim is odd"), candidate("slow", None)]
    named = facts_of(dense(backend="cpu"))
    options = tuple((n, "fast" if n == "backend" else v) for n, v in named.options)
    with pytest.raises(E.BackendRefusesError, match="the head dim is odd") as error:
        plan.plan(replace(named, options=options), candidates)
    assert isinstance(error.value, NotImplementedError)
    assert error.value.argument == "backend" and error.value.allowed == "None, slow"


@pytest.mark.parametrize("name", [backend.name for backend in backends.BACKENDS])
def test_a_refusal_is_raised_before_anything_is_written(name: str) -> None:
    """A named backend runs the call or leaves the cache alone; the default always runs it."""
    call = appending(backend=name, qv=torch.zeros(2, 1, 4, 16))
    for token in ("k", "v"):
        call[token] = torch.ones(2, 1, 2, 16)
    reason = kvattn.explain(**(call | {"backend": None})).verdicts
    if dict(reason)[name] is None:
        assert kvattn.explain(**call).plan.backend == name
        kvattn.flash_attn_with_kvcache(**call)
        assert call["k_cache"].any()
    else:
        with pytest.raises(E.BackendRefusesError, match=str(dict(reason)[name])):
            kvattn.flash_attn_with_kvcache(**call)
        assert not call["k_cache"].any() and not call["v_cache"].any()
        kvattn.flash_attn_with_kvcache(**(call | {"backend": None}))
        assert call["k_cache"].any()


def test_unknown_backends_are_listed_against_the_known() -> None:
    with pytest.raises(E.UnknownBackendError, match=r"'gpu'.*cpu.*reference"):
        kvattn.flash_attn_with_kvcache(**dense(backend="gpu"))


def test_the_reference_takes_everything() -> None:
    """It comes last, so that every call has a backend."""
    assert backends.BACKENDS[-1].name == "reference"
    for make in CALLS:
        assert kvattn.explain(**make(backend="reference")).plan.backend == "reference"
        gpu = kvattn.explain(**make("meta"), device="cuda")
        assert dict(gpu.verdicts)["reference"] is None and "cuda" in str(dict(gpu.verdicts)["cpu"])


# Same bits: the table of docs/numerics.md --------------------------------------------------------


def in_pages(cache: Tensor, size: int, order: int) -> dict[str, Tensor]:
    """The rows of a dense cache in pages, placed by the seed `order`."""
    count, width = cache.shape[0], -(-cache.shape[1] // size)
    ids = torch.randperm(count * width, generator=torch.Generator().manual_seed(order))
    padded = torch.zeros(count, width * size, *cache.shape[2:], dtype=cache.dtype)
    padded[:, : cache.shape[1]] = cache
    pool = torch.empty_like(padded.reshape(-1, size, *cache.shape[2:]))
    pool[ids] = padded.reshape(pool.shape)
    return {"pool": pool, "table": ids.int().reshape(count, width)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "mode",
    [{"batch_invariant": True}, {"backend": "reference"}, {"backend": "cpu"}],
    ids=lambda mode: next(str(value) for value in mode.values()),
)
def test_same_bits(mode: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    attend: Any = kvattn.flash_attn_with_kvcache
    k, v = torch.randn(2, 3, 2600, 2, 64).to(dtype)
    q, lengths, call = torch.randn(3, 4, 4, 64).to(dtype), [2500, 30, 700], {"causal": True, **mode}

    def paged(size: int, order: int) -> Any:
        pages = [in_pages(cache, size, order) for cache in (k, v)]
        table = {"page_table": pages[0]["table"], "cache_seqlens": ints(*lengths)}
        return attend(q, pages[0]["pool"], pages[1]["pool"], **table, **call)

    out = attend(q, k, v, cache_seqlens=ints(*lengths), **call)
    assert torch.equal(attend(q, k, v, cache_seqlens=ints(*lengths), **call), out)
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        alone = attend(q[one], k[one], v[one], cache_seqlens=length, **call)
        assert torch.equal(alone, out[one])
        tight = (cache[one, :length].contiguous() for cache in (k, v))
        assert torch.equal(attend(q[one], *tight, cache_seqlens=length, **call), out[one])
        alike = attend(q, k, v, cache_seqlens=length, **call)
        assert torch.equal(alike[one], out[one])
    edges = {"cu_seqlens_q": ints(0, 4, 8, 12), "cache_seqlens": ints(*lengths)}
    assert torch.equal(attend(q.flatten(0, 1), k, v, **edges, **call), out.flatten(0, 1))
    assert torch.equal(paged(48, order=1), paged(48, order=2))
    hints = {"num_splits": 7, "pack_gqa": True, "sm_margin": 2, "max_seqlen_k": 4000}
    assert torch.equal(attend(q, k, v, cache_seqlens=ints(*lengths), **hints, **call), out)
    if mode != {"backend": "cpu"}:
        assert torch.equal(paged(48, order=1), out) and torch.equal(paged(13, order=1), out)
    if "batch_invariant" in mode:
        for step in range(4):
            ends = ints(*(length - 3 + step for length in lengths))
            row = attend(q[:, step : step + 1], k, v, cache_seqlens=ends, **call)
            assert torch.equal(row, out[:, step : step + 1])


# Explaining -----------------------------------------------------------------------------------


@calls
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_explanation_is_plain_data(make: Callable[..., dict[str, Any]], device: str) -> None:
    found = kvattn.explain(**make(device))
    read = json.loads(json.dumps(found.to_dict()))
    assert read["backend"] == found.plan.backend and read["kernel"] == found.plan.kernel
    assert read["verdicts"] == dict(found.verdicts)
    assert set(read["verdicts"]) == {backend.name for backend in backends.BACKENDS}
    assert read["tensors"]["q"]["shape"] == list(make()["q"].shape)
    assert read["tensors"]["q"]["dtype"] == "torch.float32"
    text = str(found)
    assert text.startswith(f"backend {found.plan.backend}: {found.plan.kernel}")
    for name, reason in found.verdicts:
        if name != found.plan.backend:
            assert f"{name}: {reason or 'could take the call too'}" in text


def test_explaining_computes_and_writes_nothing() -> None:
    call = appending(out=torch.full((2, 1, 4, 16), 7.0))
    call["k"] = call["v"] = torch.ones(2, 1, 2, 16)
    kvattn.explain(**call)
    assert not call["k_cache"].any() and (call["out"] == 7.0).all()


def test_explain_takes_the_call_itself() -> None:
    """Positions, aliases and all; and raises what the call would raise."""
    q, k, v, lengths = (dense()[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens"))
    table, sinks = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4)
    named = kvattn.explain(q, k, v, cache_seqlens=lengths, block_table=table, s_aux=sinks)
    assert named.facts.has("page_table") and named.facts.has("sinks")
    meta = dense("meta", cache_seqlens=5)
    assert kvattn.explain(meta["q"], meta["k_cache"], meta["v_cache"], cache_seqlens=5).plan
    with pytest.raises(E.LengthOverCapacityError):
        kvattn.explain(q, k, v, cache_seqlens=9)
    with pytest.raises(E.HeadDimError):
        kvattn.explain(**dense("meta", q=torch.zeros(2, 1, 4, 8, device="meta")))
    with pytest.raises(TypeError, match="dropout"):
        kvattn.explain(q, k, v, dropout=0.5)
    call = inspect.signature(kvattn.flash_attn_with_kvcache).parameters
    assert set(call) <= set(inspect.signature(kvattn.explain).parameters)


def test_tensors_without_data_are_refused_by_name() -> None:
    cache = torch.empty(1, 8, 2, 16, device="meta")
    with pytest.raises(kvattn.errors.BackendRefusesError, match="meta tensors hold no data"):
        kvattn.flash_attn_with_kvcache(torch.empty(1, 1, 2, 16, device="meta"), cache, cache)

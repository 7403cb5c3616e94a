"""What only a GPU can show: graphs, replayed launches, compiled calls, sizes beyond 32 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import BF16, CASES, E4M3, assert_refusal
from conftest import BACKENDS
from torch import Tensor

import kvattn
from kvattn import errors as E
from kvattn import forms
from kvattn.testing import Case, attend, check_case, make_inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = "cuda"
STEP = Case(batch=4, lengths=(33, 1, 70, 129), capacity=256, page_size=16, new=1, rotary=64, dim=64,
            dim_v=64, heads=8, kv_heads=2, causal=True, dtype=BF16)  # fmt: skip
DRAFT = replace(STEP, seqlen_q=4, new=4)
PREFILL = Case(batch=2, seqlen_q=150, lengths=(150, 200), heads=8, kv_heads=2, dim=64, causal=True,
               dtype=BF16)  # fmt: skip
SKEWED = replace(STEP, batch=5, lengths=(5000, 3, 60, 61, 1), capacity=5008)
BYTES = replace(STEP, cache_dtype=E4M3, descale="heads")


@pytest.fixture(params=[name for name in BACKENDS if name in ("triton", "hopper")])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """A backend with kernels of its own, and no host that waits for the device."""
    torch.cuda.set_sync_debug_mode("default")
    yield request.param
    torch.cuda.set_sync_debug_mode("default")


def call(inputs: dict[str, Any], backend: str | None, **more: Any) -> tuple[Tensor, Tensor]:
    result: Any = kvattn.flash_attn_with_kvcache(
        **inputs, backend=backend, return_softmax_lse=True, **more
    )
    return result[0], result[1]


def attention(*args: Any, **kwargs: Any) -> Any:
    return kvattn.flash_attn_with_kvcache(*args, **kwargs)


def refused(case: Case, backend: str, **more: Any) -> bool:
    try:
        attend(case, make_inputs(case, device=CUDA) | more, backend)
    except E.BackendRefusesError as error:
        assert_refusal(error)
        return True
    return False


def clones(inputs: dict[str, Any]) -> dict[str, Any]:
    return {n: v.clone() if isinstance(v, Tensor) else v for n, v in inputs.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_of_a_known_form_stay_right(case: Case, kernels: str) -> None:
    """From the third on, calls of one form launch what was recorded at the second."""
    if refused(case, kernels):
        return
    for seed in (1, 2, 3):
        check_case(case, kernels, CUDA, seed)


@pytest.mark.parametrize("case", [STEP, DRAFT, BYTES, SKEWED], ids=["step", "draft", "fp8", "skew"])
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
def test_a_graph_is_captured_once_for_all_lengths(
    case: Case, invariant: bool, kernels: str
) -> None:
    """Lengths, pages and data change in place between replays."""
    if refused(case, kernels, batch_invariant=invariant):
        return
    assert case.capacity is not None and isinstance(case.new, int)
    full = replace(case, lengths=case.capacity - case.new)
    static = make_inputs(full, device=CUDA)
    columns = case.capacity // (case.page_size or 1)  # what lies behind them is no page
    table = static["page_table"][:, :columns]
    for _ in range(3):
        call(clones(static), kernels, batch_invariant=invariant)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(static, kernels, batch_invariant=invariant)
    given: Any = case.lengths
    for lengths in (given, given[::-1], (0,) * case.batch):
        static["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        table.copy_(table.flatten()[torch.randperm(table.numel(), device=CUDA)].view_as(table))
        for name in ("q", "k", "v", "k_cache", "v_cache"):
            static[name].copy_(torch.randn(static[name].shape, device=CUDA))
        twin = clones(static)
        wanted = call(twin, "reference")
        graph.replay()
        torch.testing.assert_close(out, wanted[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, wanted[1], rtol=2e-3, atol=2e-3)
        for name in ("k_cache", "v_cache"):
            assert torch.equal(static[name].view(torch.uint8), twin[name].view(torch.uint8)), name


def test_captured_calls_may_run_beside_others(kernels: str) -> None:
    """A graph on one stream and eager calls on another share no counters and no scratch."""
    case = replace(STEP, batch=2, lengths=(4000, 3000), capacity=4096, new=None, rotary=0)
    inputs = make_inputs(case, device=CUDA)
    first, _ = call(inputs, kernels)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        captured, _ = call(inputs, kernels)
    torch.cuda.synchronize()
    outs = []
    for _ in range(50):
        with torch.cuda.stream(side):
            graph.replay()
        outs.append(call(inputs, kernels)[0])
    torch.cuda.synchronize()
    assert torch.equal(captured, first)
    assert all(torch.equal(out, first) for out in outs)


@pytest.mark.parametrize(
    "case", [STEP, DRAFT, SKEWED, PREFILL], ids=["step", "draft", "skew", "prefill"]
)
def test_a_hundred_repeats_give_the_same_bits(case: Case, kernels: str) -> None:
    if refused(case, kernels):
        return
    inputs = make_inputs(case, device=CUDA)
    first = attend(case, inputs, kernels)
    for _ in range(100):
        again = attend(case, inputs, kernels)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("longest", [None, 5, 64, 1])
@pytest.mark.parametrize("lengths", [(4000, 3, 60, 61, 5), (900,) * 5])
def test_a_hint_never_hides_rows(lengths: tuple[int, ...], longest: int | None) -> None:
    """max_seqlen_q is a hint: too small a number costs time, not rows."""
    case = Case(batch=5, seqlen_q=(1, 5, 0, 3, 2), lengths=lengths, page_size=16, dim=64,
                heads=8, kv_heads=1, causal=True, dtype=BF16)  # fmt: skip
    inputs = make_inputs(case, device=CUDA)
    inputs.pop("max_seqlen_q", None)
    wanted = call(inputs, "reference")
    for _ in range(3):
        out, lse = call(inputs, "triton", max_seqlen_q=longest)
        torch.testing.assert_close(out, wanted[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, wanted[1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("case", [STEP, PREFILL], ids=["step", "prefill"])
def test_no_call_waits_for_the_device(case: Case, kernels: str) -> None:
    if refused(case, kernels):
        return
    inputs = make_inputs(case, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        attend(case, inputs, kernels)


def replayed(change: Callable[[dict[str, Any]], dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """A call whose form has been recorded, after a change to its inputs, and what is right."""
    inputs = make_inputs(replace(STEP, new=None, rotary=0), device=CUDA)
    for _ in range(3):
        call(inputs, "triton")
    inputs = change(inputs)
    return call(inputs, "triton")[0], call(inputs, "reference")[0]


def test_a_replay_looks_at_alignment() -> None:
    def shifted(inputs: dict[str, Any]) -> dict[str, Any]:
        cache = inputs["k_cache"]
        room = torch.zeros(cache.untyped_storage().nbytes() // 2 + 1, dtype=BF16, device=CUDA)
        moved = room.as_strided(cache.shape, cache.stride(), cache.storage_offset() + 1)
        return inputs | {"k_cache": moved.copy_(cache)}

    out, wanted = replayed(shifted)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


def test_a_replay_checks_the_callers_out() -> None:
    inputs = make_inputs(replace(STEP, new=None, rotary=0), device=CUDA)
    spare = torch.zeros_like(inputs["q"])
    for _ in range(3):
        out, _ = call(inputs, "triton", out=spare)
        assert out is spare or out.data_ptr() == spare.data_ptr()
    with pytest.raises(E.OutTensorError):
        call(inputs, "triton", out=inputs["q"])


def test_checked_mode_checks_a_replay_too() -> None:
    inputs = make_inputs(replace(STEP, new=None, rotary=0), device=CUDA)
    for _ in range(3):
        call(inputs, "triton")
    inputs["cache_seqlens"][0] = 10_000
    with kvattn.checked(), pytest.raises(E.KvattnError):
        call(inputs, "triton")


def test_calls_are_recorded() -> None:
    inputs = make_inputs(STEP, device=CUDA)
    arguments = {n: v for n, v in inputs.items() if v is not None}
    for _ in range(3):
        attention(**arguments, backend="triton")
    assert any(form.prepared is not None for form in forms.known())


@pytest.mark.parametrize(
    "case", [replace(STEP, new=None, rotary=0), PREFILL], ids=["step", "prefill"]
)
def test_calls_with_mods_are_recorded(case: Case) -> None:
    """A mod is known by what it computes; what it reads, by where that lies."""
    inputs = make_inputs(case, device=CUDA)
    del inputs["score_mod"]
    recorded = sum(form.prepared is not None for form in forms.known())
    first, second = torch.randn(2, 8, device=CUDA).unbind()

    def check(bias: Tensor) -> None:
        mod = lambda s, b, h, i, j: 20.0 * torch.tanh(s / 20.0) + bias[h] * (j - i)  # noqa: E731
        out, wanted = (call(inputs, name, score_mod=mod)[0] for name in ("triton", "reference"))
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)

    for bias in (first, first, first, second, second, first, second):
        check(bias)
        bias += 0.1
    assert sum(form.prepared is not None for form in forms.known()) >= recorded + 2


def test_compiled_decode_step() -> None:
    inputs = make_inputs(STEP, device=CUDA)
    twin = make_inputs(STEP, device=CUDA)

    def step(**tensors: Any) -> Tensor:
        out: Tensor = attention(**tensors)
        return out * 2

    compiled = torch.compile(step, fullgraph=True)
    wanted = attention(**twin)
    torch.testing.assert_close(compiled(**inputs), wanted * 2)
    assert torch.equal(inputs["k_cache"].view(torch.uint8), twin["k_cache"].view(torch.uint8))


def test_more_than_two_to_the_31_elements() -> None:
    """Pages at the far end of a pool whose offsets need 64 bits."""
    pages, size, heads, dim = 135_000, 16, 8, 128
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    shape = (pages, size, heads, dim)
    assert math.prod(shape) > 1 << 31
    k_cache, v_cache = (torch.empty(shape, dtype=BF16, device=CUDA) for _ in range(2))
    table = torch.arange(pages - 8, pages, dtype=torch.int32, device=CUDA).view(2, 4).flip(0)
    lengths = torch.tensor([50, 63], dtype=torch.int32, device=CUDA)
    used = table.flatten().sort().values.long()
    for cache in (k_cache, v_cache):
        cache[used] = torch.randn(8, *shape[1:], device=CUDA).to(BF16)
    q = torch.randn(2, 1, 32, dim, device=CUDA).to(BF16)
    k, v = (torch.randn(2, 1, heads, dim, device=CUDA).to(BF16) for _ in range(2))
    small = [cache[used].clone() for cache in (k_cache, v_cache)]
    near = (table - (pages - 8)).int()
    far = attention(q, k_cache, v_cache, k, v, cache_seqlens=lengths, page_table=table, causal=True)
    wanted = attention(q, *small, k, v, cache_seqlens=lengths, page_table=near, causal=True)
    assert torch.equal(far, wanted)
    assert torch.equal(k_cache[used], small[0]) and torch.equal(v_cache[used], small[1])


def test_seventy_thousand_sequences() -> None:
    """More sequences than a grid axis holds: queries of 0 average the values 0, 1, 2, ..."""
    count, capacity = 70_000, 5
    lengths = torch.arange(count, device=CUDA, dtype=torch.int32) % (capacity + 1)
    k_cache = torch.randn(count, capacity, 2, 16, device=CUDA).to(BF16)
    v_cache = torch.arange(capacity, device=CUDA).to(BF16)[None, :, None, None].expand_as(k_cache)
    q = torch.zeros(count, 1, 2, 16, device=CUDA, dtype=BF16)
    out, lse = attention(
        q, k_cache, v_cache.contiguous(), cache_seqlens=lengths, return_softmax_lse=True
    )
    mean = ((lengths - 1).clamp(min=0) / 2).to(BF16)
    assert torch.equal(out, mean[:, None, None, None].expand_as(out))
    torch.testing.assert_close(lse[:, 0, 0].exp(), lengths.float(), rtol=1e-4, atol=1e-4)

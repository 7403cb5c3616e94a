"""A common prefix: read once or by every sequence, the result is the reference's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import BF16, E4M3, F16, assert_refusal, ints
from conftest import DEVICE

import kvattn
from kvattn import errors as E
from kvattn import forms, values
from kvattn.backends import prefix
from kvattn.request import Request
from kvattn.testing import Case, attend, check_case, clone_inputs, make_inputs

STEP = Case(batch=3, lengths=(300, 257, 450), capacity=464, page_size=16, new=1, rotary=32, dim=64,
            heads=4, kv_heads=1, causal=True, dtype=BF16, common=256)  # fmt: skip
PLAIN = replace(STEP, new=None, rotary=0)
ONE_ROW = replace(PLAIN, page_size=None, rows=2, batch_idx=(1, 1, 1), lengths=(300, 290, 0))
RAGGED = replace(PLAIN, seqlen_q=(1, 1, 1), options={"max_seqlen_q": 8})
ONE_EACH = replace(RAGGED, options={"max_seqlen_q": 1})
SHARED = {
    "append and rotary": STEP,
    "norms": replace(STEP, norm="both"),
    "norm of q, no rotary": replace(PLAIN, norm="q"),
    "two heads, group 2": replace(STEP, kv_heads=2),
    "group 1": replace(STEP, kv_heads=4, heads=4),
    "group 16": replace(STEP, heads=16),
    "group 7": replace(STEP, heads=7, batch=2, lengths=(300, 257)),
    "the whole of some": replace(STEP, lengths=(256, 256, 300)),
    "the whole of all": replace(PLAIN, lengths=(256, 256, 256), capacity=256),
    "longer than some": replace(PLAIN, lengths=(300, 100, 131)),
    "longer than all": replace(PLAIN, lengths=(200, 100, 131), common=464),
    "empty and inactive": replace(PLAIN, lengths=(-1, 0, 300)),
    "all inactive": replace(PLAIN, lengths=(-1, -1, -1)),
    "no multiple of anything": replace(PLAIN, common=297, lengths=(299, 297, 420)),
    "pages of 1": replace(PLAIN, page_size=1),
    "pages of 12": replace(PLAIN, page_size=12, capacity=468),
    "pages of 128": replace(PLAIN, page_size=128, capacity=512),
    "one cache row": ONE_ROW,
    "q 4": replace(STEP, seqlen_q=4, new=4),
    "q 4, nothing new": replace(PLAIN, seqlen_q=4, lengths=(258, 300, 257)),
    "q 8, shorter than the prefix": replace(PLAIN, seqlen_q=8, lengths=(130, 3, 128)),
    "not causal": replace(STEP, causal=False, seqlen_q=2, new=3),
    "right window": replace(PLAIN, causal=False, window=(-1, 3), seqlen_q=6),
    "sinks": replace(STEP, sinks=BF16),
    "softcap": replace(STEP, softcap=5.0),
    "scale below zero": replace(STEP, scale=-0.3),
    "fp16": replace(STEP, dtype=F16),
    "fp8 cache": replace(STEP, cache_dtype=E4M3, descale="heads"),
    "by slot": replace(STEP, by_slot=True),
    "rows of the table": replace(STEP, rows=4, batch_idx=(3, 0, 2)),
    "odd dims": replace(STEP, dim=80, dim_v=48),
    "wide": replace(PLAIN, dim=256),
    "out": replace(STEP, out=True),
    "splits": replace(STEP, options={"num_splits": 3}),
    "ragged": ONE_EACH,
    "ragged, one row of q for some": replace(
        RAGGED, seqlen_q=(1, 0, 3), new=(1, 0, 3), lengths=(300, 257, 450), rotary=32, norm="both"
    ),
    "ragged, some longer": replace(RAGGED, seqlen_q=(2, 5, 1), lengths=(258, 261, 450)),
    "ragged, shorter than the prefix": replace(RAGGED, seqlen_q=(8, 1, 5), lengths=(130, 3, 128)),
    "ragged, spare rows": replace(ONE_EACH, spare_q=3, out=True),
    "ragged, empty and inactive": replace(
        RAGGED, batch=4, seqlen_q=(1, 0, 1, 1), lengths=(-1, 0, 0, 300), sinks=BF16
    ),
    "ragged, not causal": replace(RAGGED, causal=False, seqlen_q=(3, 1, 2)),
    "ragged, right window": replace(RAGGED, causal=False, window=(-1, 3), seqlen_q=(6, 2, 7)),
    "ragged, padded new tokens": replace(RAGGED, seqlen_q=(3, 1, 2), new=2, rotary=32),
    "ragged, by slot": replace(ONE_EACH, new=(1, 1, 1), by_slot=True, rotary=32),
    "ragged, fp8 cache": replace(RAGGED, seqlen_q=(1, 3, 2), cache_dtype=E4M3, descale="heads"),
    "ragged, rows of the table": replace(ONE_EACH, rows=4, batch_idx=(3, 0, 2)),
    "ragged, one cache row": replace(ONE_ROW, seqlen_q=(2, 1, 1), options={"max_seqlen_q": 2}),
    "ragged, odd": replace(
        RAGGED,
        heads=7,
        seqlen_q=(4, 2, 3),
        page_size=12,
        capacity=468,
        common=297,
        dim=80,
        dim_v=48,
        options={"max_seqlen_q": 4},
    ),
    "ragged, two row tiles": replace(RAGGED, seqlen_q=(8, 1, 1)),
    "ragged, many": replace(
        RAGGED,
        batch=40,
        seqlen_q=tuple(b * 7 % 5 for b in range(40)),
        heads=8,
        kv_heads=2,
        lengths=tuple(range(260, 460, 5)),
    ),
    "ragged, many alike": replace(
        RAGGED,
        batch=41,
        seqlen_q=(2,) * 41,
        lengths=tuple(range(260, 465, 5)),
    ),
    "varlen": replace(ONE_EACH, varlen=True),
    "varlen, used rows": replace(
        RAGGED, varlen=True, seqlen_q=(4, 2, 7), used_q=(2, 0, 5), lengths=(300, 257, 450)
    ),
    "padded, used rows": replace(
        PLAIN, varlen=True, seqlen_q=4, used_q=(2, 0, 4), lengths=(300, 257, 450)
    ),
    "many": replace(STEP, batch=40, lengths=tuple(range(260, 460, 5)), heads=8, kv_heads=2),
}
FLAT = {
    "one sequence": replace(STEP, batch=1, lengths=(300,)),
    "window": replace(STEP, window=(100, 0)),
    "chunk": replace(STEP, chunk=128),
    "alibi": replace(STEP, alibi="heads"),
    "mask_mod": replace(STEP, mask_mod=lambda b, h, q, k: k % 3 != 0),
    "batch-invariant": replace(STEP, options={"batch_invariant": True}),
    "many rows": replace(PLAIN, seqlen_q=20),
    "fp32": replace(STEP, dtype=torch.float32),
    "less than a block": replace(PLAIN, common=80),
    "wider": replace(PLAIN, dim=320),
    "ragged, longest not known": replace(RAGGED, options={}),
    "ragged, long ones": replace(RAGGED, seqlen_q=(1, 20, 1), options={"max_seqlen_q": 20}),
}


def on_device(case: Case, keys: int | None = None, *shape: int) -> Case:
    """The prefix of a case in a tensor, or another number there."""
    length = ints(case.common if keys is None else keys).view(shape)
    return replace(case, options={**case.options, "common_prefix_len": length})


LENGTH_ON_DEVICE = {
    "append, rotary, norms": on_device(replace(STEP, norm="both")),
    "shape (1,)": on_device(STEP, 256, 1),
    "nothing": on_device(STEP, 0),
    "less than a block": on_device(STEP, 127),
    "less than there is": on_device(STEP, 131),
    "longer than some": on_device(SHARED["longer than some"]),
    "longer than all": on_device(SHARED["longer than all"]),
    "empty and inactive": on_device(SHARED["empty and inactive"]),
    "one cache row": on_device(ONE_ROW),
    "right window": on_device(SHARED["right window"]),
    "splits": on_device(SHARED["splits"]),
    "sinks, one tile": on_device(replace(SHARED["sinks"], lengths=(256, 257, 300))),
    "fp8 cache": on_device(SHARED["fp8 cache"]),
    "ragged": on_device(ONE_EACH),
    "ragged, nothing": on_device(ONE_EACH, 0),
    "many": on_device(SHARED["many"]),
    "ragged, many": on_device(SHARED["ragged, many"]),
    "ragged, many, nothing": on_device(SHARED["ragged, many"], 0),
    "flat": on_device(FLAT["alibi"]),
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of any size are shared; nothing that was recorded without that is left."""
    monkeypatch.setattr(prefix, "LEAST", 0)
    monkeypatch.setattr(prefix, "EACH", 0)
    monkeypatch.setattr(forms, "_forms", {})


def shared(case: Case) -> bool:
    inputs = make_inputs(case, device=DEVICE)
    names = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens"} if case.varlen else {}
    request = Request.of(**{names.get(name, name): value for name, value in inputs.items()})
    return prefix.shared(request.facts)


def checked(case: Case, backend: str) -> None:
    try:
        check_case(case, backend, DEVICE)
    except E.BackendRefusesError as error:
        assert_refusal(error)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", SHARED.values(), ids=SHARED)
def test_read_once(case: Case, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared(case)
    launches: list[Request] = []
    if backend == "triton":
        from kvattn.backends import triton_prefix

        def counted(r: Request, attend: Any = triton_prefix.attend) -> Any:
            launches.append(r)
            return attend(r)

        monkeypatch.setattr(triton_prefix, "attend", counted)
    checked(case, backend)
    assert launches or backend != "triton"


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", LENGTH_ON_DEVICE.values(), ids=LENGTH_ON_DEVICE)
def test_only_the_device_knows_how_long_it_is(case: Case, backend: str) -> None:
    assert shared(case) == (case.alibi is None)
    checked(case, backend)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("keys", [-1, -(2**31), 2**31 - 1])
def test_impossible_lengths_on_the_device_do_no_harm(
    keys: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "_common_prefix", lambda r, common: None)
    checked(on_device(SHARED["the whole of all"], keys), backend)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", [STEP, ONE_EACH], ids=["padded", "ragged"])
def test_a_repeated_call_follows_the_length(case: Case, backend: str) -> None:
    """Also where a longer prefix pays, but this one does not."""
    case = on_device(case)
    inputs = make_inputs(case, device=DEVICE)
    wanted = attend(case, clone_inputs(inputs), "reference")
    for keys in (256, 0, 255, 256):
        inputs["common_prefix_len"].fill_(keys)
        try:
            got = attend(case, clone_inputs(inputs), backend)
        except E.BackendRefusesError as error:
            assert_refusal(error)
            return
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_below_what_pays_the_device_shares_nothing(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel for the prefix leaves poison where it is, which the one behind may not look at."""
    monkeypatch.setattr(forms, "_forms", {})
    monkeypatch.setattr(prefix, "LEAST", 190 << 10)
    monkeypatch.setattr(prefix, "EACH", 0)
    case = on_device(replace(PLAIN, lengths=(430, 400, 420), common=380))
    facts = Request.of(**make_inputs(case, device=DEVICE)).facts
    assert 380 < prefix.least(facts) < 464 and prefix.shared(facts)
    if backend != "triton":
        checked(case, backend)
        return
    from kvattn.backends import triton_replay

    monkeypatch.setattr(triton_replay, "WORKSPACES", triton_replay.Workspaces())
    checked(case, backend)
    left = [x for (name, *_), x in triton_replay.WORKSPACES._scratch.items() if "common" in name]
    assert len(left) == 2 and all(x.isnan().all() for x in left)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", FLAT.values(), ids=FLAT)
def test_read_by_every_sequence(case: Case, backend: str) -> None:
    assert not shared(case)
    checked(case, backend)


@pytest.mark.usefixtures("always")
def test_the_same_call_twice_gives_the_same_bits(backend: str) -> None:
    first, second = (attend(STEP, make_inputs(STEP, device=DEVICE), backend) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_broken_promise_is_seen() -> None:
    inputs = make_inputs(PLAIN)
    table = inputs["page_table"]
    table[1, 15] = table[1, 16]
    with pytest.raises(E.CommonPrefixMemoryError, match="sequences 0 and 1 begin elsewhere"):
        kvattn.flash_attn_with_kvcache(**inputs)
    inputs["common_prefix_len"] = 240
    kvattn.flash_attn_with_kvcache(**inputs)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.usefixtures("always")
def test_a_captured_call_follows_lengths_and_pages(backend: str) -> None:
    """The prefix may have become longer than sequences are; its pages others."""
    if backend not in ("triton", "hopper"):
        pytest.skip("no kernels of its own")
    inputs = make_inputs(replace(PLAIN, lengths=464), device=DEVICE)
    for _ in range(3):
        attend(PLAIN, inputs, backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(PLAIN, inputs, backend)
    count = len(inputs["k_cache"])
    for lengths in ((300, 257, 450), (464, 100, 31), (-1, 0, 130)):
        inputs["cache_seqlens"].copy_(torch.tensor(lengths))
        pages = torch.randperm(count, device=DEVICE).int()
        inputs["page_table"][:, :16] = pages[:16]
        inputs["page_table"][:, 16:29] = pages[16:55].view(3, 13)
        for name in ("q", "k_cache", "v_cache"):
            inputs[name].copy_(torch.randn(inputs[name].shape, device=DEVICE))
        wanted = attend(PLAIN, inputs, "reference")
        graph.replay()
        torch.testing.assert_close(out, wanted[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, wanted[1], rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", [PLAIN, ONE_EACH], ids=["padded", "ragged"])
def test_a_captured_call_finds_the_prefix_itself(case: Case, backend: str) -> None:
    """As long as it is in every replay, 0 included."""
    if backend not in ("triton", "hopper"):
        pytest.skip("no kernels of its own")
    inputs = make_inputs(replace(case, lengths=464), device=DEVICE)
    table, lengths = inputs["page_table"], inputs["cache_seqlens"]

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        inputs["common_prefix_len"] = kvattn.common_prefix(table, lengths, 16)
        return attend(case, inputs, backend)

    try:
        for _ in range(3):
            call()
    except E.BackendRefusesError as error:
        assert_refusal(error)
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    pages = torch.randperm(len(inputs["k_cache"]), device=DEVICE).int()
    for name in ("q", "k_cache", "v_cache"):
        inputs[name].copy_(torch.randn(inputs[name].shape, device=DEVICE))
    for columns, numbers in ((16, (300, 257, 450)), (0, (464, 100, 31)), (8, (130, 128, 200))):
        lengths.copy_(torch.tensor(numbers))
        table[:, :29] = torch.stack([pages[b : b + 29] for b in range(3)])
        table[:, :columns] = pages[:columns]
        wanted = attend(case, {**inputs, "common_prefix_len": 0}, "reference")
        graph.replay()
        assert inputs["common_prefix_len"].item() == 16 * columns
        torch.testing.assert_close(out, wanted[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, wanted[1], rtol=2e-3, atol=2e-3)

"""A common prefix: read once or by every sequence, the result is the reference's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BF16, E4M3, F16, assert_refusal
from conftest import DEVICE

import kvattn
from kvattn import errors as E
from kvattn import forms
from kvattn.backends import prefix
from kvattn.request import Request
from kvattn.testing import Case, attend, check_case, make_inputs

STEP = Case(batch=3, lengths=(300, 257, 450), capacity=464, page_size=16, new=1, rotary=32, dim=64,
            heads=4, kv_heads=1, causal=True, dtype=BF16, common=256)  # fmt: skip
PLAIN = replace(STEP, new=None, rotary=0)
ONE_ROW = replace(PLAIN, page_size=None, rows=2, batch_idx=(1, 1, 1), lengths=(300, 290, 0))
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
    "less than a block": replace(PLAIN, common=80),
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
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of any size are shared; nothing that was recorded without that is left."""
    monkeypatch.setattr(prefix, "_slower", lambda facts: None)
    monkeypatch.setattr(forms, "_forms", {})


def checked(case: Case, backend: str) -> None:
    try:
        check_case(case, backend, DEVICE)
    except E.BackendRefusesError as error:
        assert_refusal(error)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", SHARED.values(), ids=SHARED)
def test_read_once(case: Case, backend: str) -> None:
    assert prefix.shared(Request.of(**make_inputs(case)).facts)
    checked(case, backend)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", FLAT.values(), ids=FLAT)
def test_read_by_every_sequence(case: Case, backend: str) -> None:
    assert not prefix.shared(Request.of(**make_inputs(case)).facts)
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

"""Other libraries are called as they document it, and what they are asked is the cell."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from bench_fakes import install
from torch.nn.attention import SDPBackend

from kvattn.bench.check import Truth
from kvattn.bench.data import Data
from kvattn.bench.peers import OTHERS, Call, Participant, RefusalError, named, participants, sdpa
from kvattn.bench.shapes import Work
from kvattn.bench.suites import SUITES

FAKED = ("fa3", "flashinfer", "fi-persistent", "fa2", "fa4")
CELLS = [w for s in SUITES.values() for w in s.cells("small") if w.kind == "device"]

# Suites that a library cannot do at all, or cells of them; everything else it has to take.
REFUSED = {
    ("fa3", "verify: 2 x 256, q 7, tree"): "custom mask",
    ("fa3", "window: 2 x 256, gpt-oss"): "sinks",
    ("fa2", "verify: 2 x 256, q 7, tree"): "custom mask",
    ("fa2", "window: 2 x 256, gpt-oss"): "sinks",
    ("fa2", "fp8: 2 x 256"): "FP8",
    ("fa2", "mla: 2 x 64, 16 heads"): "latent",
    ("fa4", "step: 1 x 256"): "appends",
    ("fa4", "step: 4 x 256"): "appends",
    ("fa4", "verify: 2 x 256, q 7, tree"): "masks",
    ("fa4", "fp8: 2 x 256"): "FP8",
    ("fa4", "invariant: 2 x 256"): "invariance",
}
PERSISTENT = ("skew: 1 x 512 + 3 x 64", "mixed: 1 x 64 prompt + 3 x 128 decode")


@pytest.mark.parametrize("name", FAKED)
@pytest.mark.parametrize("work", CELLS, ids=lambda work: work.name)
def test_a_peer_does_the_cell_or_refuses_it(
    monkeypatch: pytest.MonkeyPatch, work: Work, name: str
) -> None:
    install(monkeypatch)
    reason = REFUSED.get((name, work.name))
    if name == "fi-persistent" and work.name not in PERSISTENT:
        reason = "pages only" if not work.page else "lengths differ"
    check(named(name), work, reason)


@pytest.mark.parametrize("work", CELLS, ids=lambda work: work.name)
def test_flash_attention_3_without_pages_and_windows(
    monkeypatch: pytest.MonkeyPatch, work: Work
) -> None:
    install(monkeypatch, paged=False)
    reason = REFUSED.get(("fa3", work.name))
    if work.name == "window: 1 x 1280, Gemma-3 12B":
        reason = "windows"
    note = check(named("fa3"), work, reason)
    if reason is None and work.page:
        assert ("packed" if work.ragged else "contiguous") in note


def check(peer: Participant, work: Work, reason: str | None) -> str:
    """The peer's note on a cell whose output is right, or its refusal for this reason."""
    data = Data(work, "cpu", layers=2)
    if reason is not None:
        with pytest.raises(RefusalError, match=reason):
            peer.prepare(data)
        return ""
    call = peer.prepare(data)
    verdict = Truth(data).judge(call)
    assert verdict.right, verdict
    other = call.run(1).clone()
    assert not torch.equal(other, call.run(0))
    return call.note


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("work", CELLS, ids=lambda work: work.name)
def test_flex_attention_has_the_cell_s_mask(monkeypatch: pytest.MonkeyPatch, work: Work) -> None:
    """Uncompiled, which means the same."""
    monkeypatch.setattr("kvattn.bench.peers.flex.compiled", lambda function: function)
    reasons = {"fp8": "FP8", "mixed": "one number of query rows", "invariant": "invariance"}
    note = check(named("flex"), work, reasons.get(work.suite))
    assert ("rescaling" in note) == (work.window and work.model.sinks)


@pytest.mark.parametrize("work", CELLS, ids=lambda work: work.name)
def test_sdpa_s_masks_of_booleans_mean_the_same(work: Work) -> None:
    """cuDNN is handed one where the other kernels have an aligned causal bias."""
    if work.ragged or work.kv_dtype == "fp8" or (work.window and work.model.sinks):
        pytest.skip("SDPA refuses it")
    data = Data(work, "cpu", layers=1)
    attend = sdpa._attention(data, SDPBackend.CUDNN_ATTENTION)
    run, _ = sdpa.contiguous(data, attend)
    assert Truth(data).judge(Call(run, "dense")).right


def test_very_uneven_lengths_lie_packed_for_a_build_without_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, paged=False)
    work = SUITES["skew"].cells("small")[0]
    uneven = replace(work, keys=(700, 5, 5, 5, 5, 5), queries=(1,) * 6)
    assert "packed" in check(named("fa3"), uneven, None)
    check(named("sdpa"), uneven, "padding would make it 6 x")


def test_flashinfer_plans_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    data = Data(CELLS[0], "cpu", layers=2)
    call = named("flashinfer").prepare(data)
    before = call.run(0)
    assert call.plan is not None
    call.plan()
    assert torch.equal(call.run(0), before)


def test_versions_and_absences(monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in OTHERS:
        if peer.name in FAKED and not any(map(find_spec, ("flash_attn", "flashinfer"))):
            with pytest.raises(ImportError, match="No module named"):
                peer.find()
    install(monkeypatch)
    assert named("fa3").find().startswith("flash_attn_3")
    assert all(named(name).find() for name in FAKED)


def test_who_is_asked_on_which_device() -> None:
    assert [p.name for p in participants("cpu")] == ["kvattn", "sdpa"]
    gpu = [p.name for p in participants("cuda")]
    assert gpu[:2] == ["kvattn", "fa3"]
    assert {"flashinfer", "cudnn", "flex"} < set(gpu)
    assert "sdpa" not in gpu
    assert [p.name for p in participants("cpu", ["flex"])] == ["kvattn", "flex"]

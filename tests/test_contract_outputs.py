"""What comes back: out and lse, the caller's out, hints, repeats, and parts of one result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import BF16, E4M3, F16, F32, F64, attend, attend_varlen, ints
from conftest import DEVICE
from torch import Tensor

import kvattn
from kvattn import errors as E
from kvattn.testing import SENTINEL, Case, clone_inputs, make_inputs


def test_t55_only_qv_never_looks_at_q(backend: str) -> None:
    """q and k_cache may be None or garbage; the scale is Dv ** -0.5."""
    case = Case(seqlen_q=3, lengths=(9, 30), qv=True, only_qv=True, dim=16, dim_v=64, causal=True)
    inputs = make_inputs(case, device=DEVICE)
    assert inputs["q"] is None
    assert inputs["k_cache"] is None
    wanted, wanted_lse = attend(backend, **inputs)
    bad_q = torch.full((2, 3, 4, 16), math.nan, device=DEVICE)
    bad_k = torch.full((2, 30, 2, 16), math.nan, device=DEVICE)
    for garbage in ({"q": bad_q}, {"k_cache": bad_k}, {"q": bad_q, "k_cache": bad_k}):
        out, lse = attend(backend, **{**inputs, **garbage})
        assert torch.equal(out, wanted)
        assert torch.equal(lse, wanted_lse)
    as_keys = {
        **inputs,
        "q": inputs["qv"],
        "k_cache": inputs["v_cache"],
        "qv": None,
        "only_qv": False,
    }
    same, same_lse = attend(backend, **as_keys)
    assert torch.allclose(wanted, same, atol=1e-5)
    assert torch.allclose(wanted_lse, same_lse, atol=1e-5)


def test_t56_values_as_a_slice_of_the_keys(backend: str) -> None:
    case = Case(lengths=(9, 30), layout="alias", dim=96, dim_v=64, kv_heads=1, page_size=4, new=2)
    inputs = make_inputs(case, device=DEVICE)
    apart = {name: x.clone() if torch.is_tensor(x) else x for name, x in inputs.items()}
    wanted, _ = attend(backend, **apart)
    out, _ = attend(backend, **inputs)
    assert torch.allclose(out, wanted, atol=1e-6)
    assert torch.equal(inputs["k_cache"][..., :64].isnan(), inputs["v_cache"].isnan())


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_t61_a_strided_out_is_written_and_returned(backend: str, dtype: torch.dtype) -> None:
    case = Case(batch=3, seqlen_q=(2, 0, 3), lengths=(9, 4, 0), spare_q=2, out=True, dtype=dtype)
    inputs = make_inputs(case, device=DEVICE)
    out, lse = attend(backend, **inputs)
    assert out is inputs["out"]
    assert out.data_ptr() == inputs["out"].data_ptr()
    fresh, fresh_lse = attend(backend, **{**make_inputs(case, device=DEVICE), "out": None})
    assert torch.equal(out[:5], fresh[:5])
    assert (out[5:] == SENTINEL).all()  # rows past cu_seqlens_q[-1]
    assert not fresh[5:].any()
    assert (fresh_lse[:, 5:] == -math.inf).all()
    assert torch.equal(lse, fresh_lse)
    whole = out._base
    assert whole is not None
    assert int((whole != SENTINEL).sum()) <= 5 * 4 * 32


def test_t61_rows_beyond_seqused_q_are_untouched(backend: str) -> None:
    case = Case(varlen=True, seqlen_q=4, used_q=(1, 3), lengths=(9, 2), causal=True, out=True)
    inputs = make_inputs(case, device=DEVICE)
    out, lse = attend_varlen(backend, **inputs)
    assert out is inputs["out"]
    assert (out[0, 1:] == SENTINEL).all()
    assert (out[1, 3:] == SENTINEL).all()
    assert (lse[0, :, 1:] == -math.inf).all()
    assert (out[:, 0] != SENTINEL).any()


def test_t62_an_overlapping_out_raises(backend: str) -> None:
    """Overlap by a single element counts; interleaved views that share nothing are fine."""
    inputs = make_inputs(Case(lengths=(9, 30), dim=16), device=DEVICE)
    call = {**inputs, "backend": backend}
    for name in ("q", "k_cache", "v_cache"):
        before = clone_inputs(inputs)
        flat = inputs[name].view(-1)
        for start in (0, flat.numel() - 128):
            shared = flat[start : start + 128].view(2, 1, 4, 16)
            with pytest.raises(E.OutTensorError, match=name):
                kvattn.flash_attn_with_kvcache(**{**call, "out": shared})
        assert torch.equal(inputs["q"], before["q"])
    both = torch.randn(2, 1, 8, 16, device=DEVICE)
    q, out = both[:, :, ::2], both[:, :, 1::2]
    fresh, _ = attend(backend, **{**inputs, "q": q})
    written, _ = attend(backend, **{**inputs, "q": q, "out": out})
    assert torch.equal(written, fresh)


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64, E4M3])
@pytest.mark.parametrize("batch", [1, 3])
def test_t63_lse_is_fp32_and_head_first(backend: str, dtype: torch.dtype, batch: int) -> None:
    lengths = (9, 4, 17)[:batch]
    padded = Case(batch=batch, seqlen_q=5, lengths=lengths, dtype=dtype)
    packed = Case(batch=batch, seqlen_q=(5, 1, 0)[:batch], lengths=lengths, dtype=dtype, spare_q=1)
    rows = {1: 6, 3: 7}[batch]
    for case, out_shape, lse_shape in (
        (padded, (batch, 5, 4, 32), (batch, 4, 5)),
        (packed, (rows, 4, 32), (4, rows)),
    ):
        out, lse = attend(backend, **make_inputs(case, device=DEVICE))
        assert tuple(out.shape) == out_shape
        assert tuple(lse.shape) == lse_shape
        assert lse.dtype == F32
        alone = kvattn.flash_attn_with_kvcache(**make_inputs(case, device=DEVICE))
        assert isinstance(alone, Tensor)
    with_qv = Case(batch=batch, seqlen_q=5, lengths=lengths, qv=True, dim_v=64)
    out, lse = attend(backend, **make_inputs(with_qv, device=DEVICE))
    assert tuple(lse.shape) == (batch, 4, 5)  # FlashAttention-4 gives (batch, 5, 4) here
    assert tuple(out.shape) == (batch, 5, 4, 64)


@pytest.mark.parametrize("cut", [0, 1, 13, 30])
@pytest.mark.parametrize("ragged", [False, True])
def test_t64_halves_of_the_keys_merge_to_the_whole(backend: str, cut: int, ragged: bool) -> None:
    """Natural log; an empty half weighs nothing."""
    case = Case(batch=1, seqlen_q=(3,) if ragged else 3, lengths=30)
    inputs = make_inputs(case, device=DEVICE)
    whole, whole_lse = attend(backend, **inputs)
    parts = []
    for rows in (slice(0, cut), slice(cut, 30)):
        half = {name: inputs[name][:, rows] for name in ("k_cache", "v_cache")}
        parts.append(attend(backend, **{**inputs, **half, "cache_seqlens": None}))
    out, lse = kvattn.merge_states(*zip(*parts, strict=True))
    assert torch.allclose(out, whole, atol=1e-5)
    assert torch.allclose(lse, whole_lse, atol=1e-5)


def test_t64_empty_parts_of_both_signs() -> None:
    """FlashAttention-2 marks an empty row with +inf, the others with -inf; their out may be NaN."""
    out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 4, 3)
    for empty in (math.inf, -math.inf):
        nothing = torch.full_like(out, math.nan), torch.full_like(lse, empty)
        for parts in ([(out, lse), nothing], [nothing, (out, lse), nothing]):
            merged, total = kvattn.merge_states(*zip(*parts, strict=True))
            assert torch.allclose(merged, out)
            assert torch.allclose(total, lse)
    merged, total = kvattn.merge_states([torch.full_like(out, math.nan)] * 2, [lse - math.inf] * 2)
    assert not merged.any()
    assert (total == -math.inf).all()


HINTS: list[dict[str, Any]] = [
    *({"num_splits": n} for n in (1, 2, 3, 8, 128, 1000)),
    *({"pack_gqa": flag} for flag in (True, False)),
    *({"sm_margin": 4}, {"max_seqlen_q": 3}, {"max_seqlen_q": 500, "max_seqlen_k": 10**6}),
    *({"rel_bias_prep_cache": {}}, {"num_splits": 3, "pack_gqa": True, "sm_margin": 1}),
]


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_t65_hints_never_change_the_result(backend: str, hint: dict[str, Any]) -> None:
    others: dict[str, Any] = {"page_size": 16, "sinks": F32, "window": (50, 0)}
    for more in ({}, others):
        inputs = make_inputs(Case(seqlen_q=3, lengths=(300, 7), heads=8, **more), device=DEVICE)
        wanted, wanted_lse = attend(backend, **inputs)
        out, lse = attend(backend, **inputs, **hint)
        assert torch.allclose(out, wanted, atol=2e-6)
        assert torch.allclose(lse, wanted_lse, atol=1e-5)
        again, again_lse = attend(backend, **inputs, **hint)
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)


def test_t65_metadata_of_another_step_changes_nothing(backend: str) -> None:
    inputs = make_inputs(Case(lengths=(300, 7), heads=8), device=DEVICE)
    wanted, _ = attend(backend, **inputs)
    for batch, keys in ((2, 300), (7, 3)):
        metadata = kvattn.get_scheduler_metadata(batch, 1, keys, 8, 2, 32, num_splits=3)
        out, _ = attend(backend, **inputs, scheduler_metadata=metadata)
        assert torch.allclose(out, wanted, atol=2e-6)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_t71_a_row_alone_has_the_bits_it_has_in_a_batch(
    backend: str, page_size: int | None, seqlen_q: int
) -> None:
    """batch_invariant: neighbours, batch size, pages and capacity do not matter."""
    case = Case(batch=4, seqlen_q=seqlen_q, lengths=(70, 3, 190, 0), page_size=page_size,
                causal=True, sinks=F32)  # fmt: skip
    inputs = make_inputs(case, device=DEVICE)
    whole, whole_lse = attend(backend, **inputs, batch_invariant=True)
    for b in range(4):
        alone = dict(inputs)
        for name in ("q", "cache_seqlens"):
            alone[name] = inputs[name][b : b + 1].clone()
        if page_size is None:
            capacity = int(inputs["cache_seqlens"][b]) + 5
            for name in ("k_cache", "v_cache"):
                alone[name] = inputs[name][b : b + 1, :capacity].clone()
        else:
            alone["page_table"] = inputs["page_table"][b : b + 1]
        out, lse = attend(backend, **alone, batch_invariant=True)
        assert torch.equal(out[0], whole[b])
        assert torch.equal(lse[0], whole_lse[b])
    one = {**inputs, "q": inputs["q"][:, -1:].clone()}
    last, _ = attend(backend, **one, batch_invariant=True)
    assert torch.equal(last[:, 0], whole[:, -1])


def test_t71_plain_calls_agree_too(backend: str) -> None:
    inputs = make_inputs(Case(batch=3, lengths=(70, 3, 190)), device=DEVICE)
    whole, _ = attend(backend, **inputs, num_splits=1)
    for b in range(3):
        names = ("q", "k_cache", "v_cache", "cache_seqlens")
        alone = {name: inputs[name][b : b + 1] for name in names}
        out, _ = attend(backend, **alone, num_splits=1)
        assert torch.allclose(out[0], whole[b], atol=1e-6)


def test_a_second_call_of_the_same_form_uses_its_own_tensors(backend: str) -> None:
    """One tensor may stand for two arguments in one call and not in the next."""
    first = make_inputs(Case(lengths=(9, 9), pass_lengths="none"), device=DEVICE)
    attend(backend, **{**first, "v_cache": first["k_cache"]})
    out, _ = attend(backend, **first)
    other, _ = attend("reference", **first, max_seqlen_q=1)
    assert torch.allclose(out, other, atol=1e-6)
    q, k, v = torch.randn(3, 8, 2, 16, device=DEVICE)
    edges, shifted = ints(0, 3, 8), ints(0, 5, 8)
    attend_varlen(backend, q, k, v, edges, edges)
    out, _ = attend_varlen(backend, q, k, v, edges, shifted)
    whole, _ = attend_varlen(backend, q[:3], k[:5], v[:5], ints(0, 3), ints(0, 5))
    assert torch.allclose(out[:3], whole, atol=1e-6)


def test_the_three_entry_points_agree(backend: str) -> None:
    """Padded, packed and through a cache: one meaning."""
    q, k, v = (torch.randn(2, n, h, 16, device=DEVICE) for n, h in ((3, 4), (7, 2), (7, 2)))
    options: dict[str, Any] = {"causal": True, "window_size": (4, 0), "softcap": 2.0}
    padded = kvattn.flash_attn_func(q, k, v, **options, return_lse=True)
    edges_q, edges_k = ints(0, 3, 6), ints(0, 7, 14)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    packed, packed_lse = attend_varlen(backend, *flat, edges_q, edges_k, 3, 7, **options)
    cached, cached_lse = attend(backend, q=q, k_cache=k, v_cache=v, **options)
    assert torch.allclose(packed.view_as(q), padded[0], atol=1e-6)
    assert torch.allclose(cached, padded[0], atol=1e-6)
    assert torch.allclose(cached_lse, padded[1], atol=1e-5)
    assert torch.allclose(packed_lse.view(4, 2, 3).transpose(0, 1), padded[1], atol=1e-5)

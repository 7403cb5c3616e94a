"""Norms of q and k: RMS over each head, before the rotation and the append."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BF16, E4M3, F32, attend, ints
from conftest import DEVICE
from torch.nn.functional import rms_norm

import kvattn
from kvattn.testing import Case, clone_inputs, make_inputs

STEP = Case(lengths=(9, 30), seqlen_q=2, new=2, rotary=16, causal=True, page_size=4, norm="both")


@pytest.mark.parametrize("rotary", [0, 16])
def test_t75_equals_a_norm_before_the_call(rotary: int, backend: str) -> None:
    case = Case(lengths=(9, 30), seqlen_q=2, new=2, causal=True, norm="both", rotary=rotary,
                options={"norm_eps": 0.1})  # fmt: skip
    inputs = make_inputs(case, device=DEVICE)
    bare = clone_inputs(inputs)
    for name in ("q", "k"):
        bare[name] = rms_norm(bare[name], (32,), bare.pop(f"{name}_norm_weight"), 0.1)
    wanted, wanted_lse = attend(backend, **bare)
    out, lse = attend(backend, **inputs)
    assert torch.allclose(out, wanted, atol=1e-5)
    assert torch.allclose(lse, wanted_lse, atol=1e-5)
    new = [inputs["k_cache"][b, n : n + 2] for b, n in enumerate((9, 30))]
    assert torch.allclose(torch.stack(new)[..., rotary:], bare["k"][..., rotary:], atol=1e-5)


@pytest.mark.parametrize("cache", [None, E4M3])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_t75_every_way_into_the_cache_stores_the_same_bits(
    dtype: torch.dtype, cache: torch.dtype | None, backend: str
) -> None:
    case = replace(STEP, dtype=dtype, cache_dtype=cache)
    first, second = make_inputs(case, device=DEVICE), make_inputs(case, device=DEVICE)
    attend(backend, **first)
    names = ("k", "v", "k_cache", "v_cache", "cache_seqlens", "page_table", "rotary_cos")
    more = ("rotary_sin", "rotary_interleaved", "k_norm_weight")
    kvattn.append_kv(**{name: second[name] for name in (*names, *more)})
    for name in ("k_cache", "v_cache"):
        assert torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8))


def test_t75_heads_of_zeros_stay_zeros(backend: str) -> None:
    inputs = make_inputs(STEP, device=DEVICE)
    inputs["k"].zero_()
    inputs["q"].zero_()
    out, _ = attend(backend, **inputs)
    assert out.isfinite().all()
    page = inputs["page_table"][0, 9 // 4]
    assert (inputs["k_cache"][page, 9 % 4] == 0).all()


def test_t75_weights_may_be_negative_strided_and_of_any_float(backend: str) -> None:
    inputs = make_inputs(STEP, device=DEVICE)
    for name in ("q_norm_weight", "k_norm_weight"):
        inputs[name] = (-inputs[name]).to(BF16)
    spread = clone_inputs(inputs)
    for name in ("q_norm_weight", "k_norm_weight"):
        spread[name] = spread[name].float().repeat_interleave(3)[::3]
    out, lse = attend(backend, **inputs)
    again, lse_again = attend(backend, **spread)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


def test_t75_a_norm_makes_the_size_of_queries_and_keys_irrelevant(backend: str) -> None:
    inputs = make_inputs(STEP, device=DEVICE)
    inputs["norm_eps"] = 1e-30
    scaled = clone_inputs(inputs)
    for name in ("q", "k"):
        scaled[name] *= 2.0**20
    scaled["cache_seqlens"] = ints(9, 30)
    assert torch.equal(attend(backend, **inputs)[0], attend(backend, **scaled)[0])

"""Decode: however the keys of a batch are dealt out, and merged, the result is the reference's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BF16, E4M3, E5M2, INT8, assert_refusal
from conftest import DEVICE

from kvattn.errors import BackendRefusesError
from kvattn.testing import Case, attend, check_case, make_inputs

STEP = Case(batch=5, lengths=(900, 3, 0, 65, 1), capacity=912, page_size=16, new=1, rotary=32,
            dim=32, dim_v=32, heads=4, kv_heads=1, causal=True, dtype=BF16)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        STEP,
        replace(STEP, lengths=(900, 880, 910, 899, 700)),
        replace(STEP, lengths=(2, 3, 0, 1, 1)),
        replace(STEP, page_size=64, capacity=960),
        replace(STEP, page_size=None),
        replace(STEP, window=(100, 0)),
        replace(STEP, seqlen_q=4, new=4, lengths=(62, 60, 125, 0, 700)),
        replace(STEP, seqlen_q=1, new=3, lengths=(62, 60, 125, 0, 700)),
        replace(STEP, seqlen_q=7, new=None, rotary=0),
        replace(STEP, cache_dtype=E4M3, descale="heads"),
        replace(STEP, cache_dtype=E5M2, descale="heads", page_size=64, capacity=960),
        replace(STEP, cache_dtype=INT8, descale="heads", page_size=None),
        replace(STEP, cache_dtype=E4M3, seqlen_q=8, new=None, rotary=0, dim=48, dim_v=80),
        replace(STEP, cache_dtype=E4M3, dim=33, dim_v=31, new=None, rotary=0),
        replace(STEP, seqlen_q=16, new=16, lengths=(62, 60, 125, 0, 700)),
        replace(STEP, seqlen_q=8, new=None, rotary=0, page_size=64, capacity=960, window=(90, 0)),
        replace(STEP, softcap=5.0),
        replace(STEP, seqlen_q=4, new=1),
        replace(STEP, dim=80, dim_v=48),
        replace(STEP, batch=1, lengths=(900,)),
        replace(STEP, seqlen_q=(1, 3, 0, 5, 2), new=None, rotary=0),
        replace(STEP, seqlen_q=(1, 3, 0, 5, 2), new=None, rotary=0, lengths=(900,) * 5),
        replace(STEP, seqlen_q=(5,), batch=1, lengths=(900,), new=None, rotary=0),
    ],
    ids=["unlike", "alike", "short", "pages-of-64", "dense", "window", "draft", "new-3", "q-7",
         "fp8", "e5m2", "int8", "fp8-q-8", "fp8-odd-dims", "q-16", "q-8-window", "softcap",
         "draft-of-1-new", "padded-dims", "one", "ragged", "ragged-alike", "ragged-one"],
)  # fmt: skip
def test_shares_of_like_and_of_unlike_lengths(case: Case, backend: str) -> None:
    try:
        check_case(case, backend, DEVICE)
    except BackendRefusesError as error:
        assert_refusal(error)


@pytest.mark.parametrize("splits", [1, 3, 40])
def test_any_number_of_splits_asked_for(splits: int, backend: str) -> None:
    check_case(replace(STEP, options={"num_splits": splits}), backend, DEVICE)


def test_queries_beyond_fp16_over_a_narrow_cache(backend: str) -> None:
    case = replace(STEP, cache_dtype=E4M3, lengths=(900, 3, 40, 65, 1))
    inputs = make_inputs(case, device=DEVICE)
    scale = inputs.pop("softmax_scale", None) or 32**-0.5
    wanted, _ = attend(case, make_inputs(case, device=DEVICE) | {"softmax_scale": scale}, backend)
    inputs |= {"q": inputs["q"] * 2.0**40, "softmax_scale": scale * 2.0**-40}
    out, _ = attend(case, inputs, backend)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)

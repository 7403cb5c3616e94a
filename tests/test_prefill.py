"""The prefill kernel: tiles read by TMA or by pointers, masked and whole, against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import BF16
from conftest import DEVICE
from interpreter import INTERPRETED

from kvattn.request import Request
from kvattn.testing import Case, expect, make_inputs

pytest.importorskip("triton")
if not INTERPRETED and DEVICE == "cpu":
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

from kvattn.backends import triton_launch, triton_prefill

POINTERS = triton_prefill.Tiles(rows=64, keys=32, warps=4, stages=2, boxes=False)
BOXES = replace(POINTERS, boxes=True)

PLAIN = Case(seqlen_q=70, lengths=(150, 77), dim=64, causal=True, dtype=BF16, capacity=192)
PAGED = replace(PLAIN, page_size=16)
CASES = {
    "causal": PLAIN,
    "more queries than keys": replace(PLAIN, lengths=(20, -1)),
    "window": replace(PLAIN, window=(40, 0)),
    "window to both sides": replace(PLAIN, causal=False, window=(20, 45)),
    "wide window": replace(PLAIN, seqlen_q=33, lengths=(350, 340), capacity=352, window=(290, 0)),
    "chunks": replace(PLAIN, chunk=48),
    "softcap, sinks": replace(PLAIN, softcap=2.0, sinks=BF16, query_scale=3.0),
    "softcap beyond bf16": replace(PLAIN, softcap=60.0, query_scale=9.0),
    "wide dims": replace(PLAIN, dim=96, dim_v=80, lengths=(90, 77)),
    "padded dims, rotary": replace(PLAIN, dim=48, dim_v=40, rotary=32, new=70, capacity=224),
    "ragged": replace(PLAIN, batch=4, seqlen_q=(40, 0, 33, 1), lengths=(90, 5, 33, 64)),
    "pages of a tile": replace(PLAIN, page_size=64, causal=False),
    "pages of tiles, window": replace(PLAIN, page_size=64, window=(40, 0)),
}
SCATTERED = {
    "small pages": PAGED,
    "small pages, window": replace(PAGED, window=(40, 0)),
    "odd pages": replace(PAGED, page_size=24),
    "leftpad": replace(PAGED, leftpad=(3, 40)),
}


def check(case: Case, tiles: triton_prefill.Tiles) -> None:
    inputs = make_inputs(case, device=DEVICE)
    expected = expect(make_inputs(case, device=DEVICE))
    r = Request.of(**inputs, return_lse=True)
    if r.k is not None:
        triton_launch.append(r)
    out, lse = r.outputs()
    triton_prefill.attend(r, out, lse, tiles)
    expected.check(out, lse, inputs)


@pytest.mark.parametrize("tiles", [POINTERS, BOXES], ids=["pointers", "tma"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_mask(case: Case, tiles: triton_prefill.Tiles) -> None:
    check(case, tiles)


@pytest.mark.parametrize("case", SCATTERED.values(), ids=SCATTERED)
def test_tiles_from_several_pages(case: Case) -> None:
    check(case, POINTERS)


@pytest.mark.parametrize("share", [1, 3])
def test_any_order_of_the_heads(share: int) -> None:
    check(replace(PLAIN, batch=2), replace(POINTERS, share=share))


def test_offsets_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_prefill, "_WIDE", 0)
    check(PAGED, POINTERS)

"""Decode steps on the CPU: which calls are prepared, and that what is prepared stays right."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvattn
from kvattn import api, ops
from kvattn.backends.cpu_decode import Decode
from kvattn.request import Request
from kvattn.testing import Case, make_inputs

TOKEN = Case(batch=3, lengths=9, capacity=16, new=1, causal=True)
RAGGED = replace(TOKEN, lengths=(9, 11, 10))
FAR = replace(TOKEN, lengths=(2, 11, 3))  # most of one view would be hidden
ALONE = replace(TOKEN, batch=1, lengths=9)
TURNED = replace(RAGGED, rotary=16)
WINDOW = replace(RAGGED, window=(4, 0))
PADDED = replace(RAGGED, leftpad=(2, 0, 5))
KEPT = replace(RAGGED, new=None)
INDEX = ("cache_seqlens", "cache_leftpad", "rotary_cos", "rotary_sin", "rotary_seqlens")
CASES = (TOKEN, RAGGED, FAR, ALONE, TURNED, WINDOW, PADDED, KEPT)


def inputs(case: Case, seed: int = 1, dead: float = 1e3) -> dict[str, Any]:
    """A call of the case with another number in its dead slots."""
    given = make_inputs(case, seed)
    for name in ("k_cache", "v_cache"):
        given[name] = given[name].nan_to_num(dead)
    return given


def request(given: dict[str, Any]) -> Request:
    bound = inspect.signature(kvattn.flash_attn_with_kvcache).bind(**given)
    bound.apply_defaults()
    return Request.of(**api.arguments(bound.arguments))


def paged(given: dict[str, Any], pages: list[list[int]], size: int = 4) -> dict[str, Any]:
    """The same call with the rows of its dense caches in the given pages."""
    table = torch.tensor(pages, dtype=torch.int32)
    moved = dict(given, page_table=table)
    for name in ("k_cache", "v_cache"):
        rows = given[name]
        pool = rows.new_zeros((int(table.max()) + 2, size, *rows.shape[2:]))
        for row, ids in zip(rows, pages, strict=True):
            pool[ids] = row[: len(ids) * size].unflatten(0, (-1, size))
        moved[name] = pool
    return moved


def same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("dead", [1e3, math.nan, math.inf])
def test_prepared_steps_agree_with_the_reference(case: Case, dead: float) -> None:
    given, twin = inputs(case, dead=dead), inputs(case, dead=dead)
    step = Decode.of(request(given))
    assert step is not None
    assert len(step.pieces) == (case.batch if case is FAR else 1)
    out, lse = kvattn.flash_attn_with_kvcache(**given, backend="cpu", return_softmax_lse=True)
    wanted = kvattn.flash_attn_with_kvcache(**twin, backend="reference", return_softmax_lse=True)
    same(out, wanted[0])
    same(lse, wanted[1])
    for name in ("k_cache", "v_cache"):
        assert torch.equal(given[name].nan_to_num(7.0), twin[name].nan_to_num(7.0))


CHAINS = {  # pages of three sequences: how many kernel calls a step takes, 0: not prepared
    1: [[0, 1, 2, 3], [5, 6, 7, 8], [10, 11, 12, 13]],
    3: [[0, 1, 2, 3], [9, 10, 11, 12], [4, 5, 6, 7]],
    0: [[0, 2, 1, 3], [5, 6, 7, 8], [10, 11, 12, 13]],
}


@pytest.mark.parametrize(("calls", "pages"), CHAINS.items())
def test_pages_are_read_in_place_where_they_are_neighbours(
    calls: int, pages: list[list[int]]
) -> None:
    given = paged(inputs(RAGGED), pages)
    step = Decode.of(request(given))
    assert (0 if step is None else len(step.pieces)) == calls
    wanted = kvattn.flash_attn_with_kvcache(**paged(inputs(RAGGED), pages), backend="reference")
    same(kvattn.flash_attn_with_kvcache(**given, backend="cpu"), wanted)


@pytest.mark.parametrize(
    "case",
    [
        replace(TOKEN, seqlen_q=2, new=2),
        replace(TOKEN, new=2),
        replace(TOKEN, lengths=(9, -1, 9)),
        replace(TOKEN, sinks=torch.float32),
        replace(TOKEN, alibi="heads"),
        replace(TOKEN, cache_dtype=torch.bfloat16),
        replace(TOKEN, lengths=(0, 4, 4), new=None),
    ],
    ids=["two rows", "two keys", "inactive", "sinks", "alibi", "dtypes", "empty"],
)
def test_other_calls_are_not_prepared(case: Case) -> None:
    assert Decode.of(request(make_inputs(case))) is None


@pytest.mark.parametrize("dead", [0.0, math.nan])
@pytest.mark.parametrize("case", [ALONE, RAGGED, TURNED], ids=["alone", "ragged", "turned"])
def test_layers_of_a_step_share_what_was_prepared(case: Case, dead: float) -> None:
    shared = inputs(case)
    index = {name: shared[name] for name in INDEX if name in shared}
    options = {"causal": True, "backend": "cpu", "rotary_interleaved": True}
    step = ops.Step()
    for seed in range(3):
        given, twin = inputs(case, seed, dead), inputs(case, seed, dead)
        layer = {name: given[name] for name in ("q", "k", "v", "k_cache", "v_cache")}
        out = step.attend(index, layer, options)
        same(out, kvattn.flash_attn_with_kvcache(**twin | index, backend="reference"))
        assert torch.equal(given["k_cache"].nan_to_num(7.0), twin["k_cache"].nan_to_num(7.0))


def test_a_layer_of_another_form_is_checked_by_itself() -> None:
    index = {"cache_seqlens": torch.tensor([9], dtype=torch.int32)}
    step = ops.Step()
    for heads in (4, 4, 6, 4):
        given = inputs(replace(ALONE, heads=heads, kv_heads=2)) | index
        layer = {name: given[name] for name in ("q", "k", "v", "k_cache", "v_cache")}
        out = step.attend(index, layer, {"causal": True})
        assert out.shape == (1, 1, heads, 32)
    with pytest.raises(kvattn.errors.KvattnError):
        step.attend(index, layer | {"q": torch.randn(1, 1, 5, 32)}, {"causal": True})

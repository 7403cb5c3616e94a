"""The oracle's masks and scores against numbers worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import oracle
from oracle_probe import check, ints, means, probe, ramp

NAN = math.nan
INF = math.inf


def test_more_queries_than_keys_under_causal() -> None:
    e = probe(1, 5, 2, causal=True)
    check(e, [0, 0, 0, 0, 0.5], [0, 0, 0, 1, 2])
    assert e.lse[0, 0, :3].tolist() == [-INF] * 3


def test_window_with_more_queries_than_keys() -> None:
    e = probe(1, 9, 2, window_size=(1, 2))
    check(e, [0] * 6 + [0.5] * 3, [0] * 5 + [1, 2, 2, 2])


@pytest.mark.parametrize(
    ("window", "causal", "mean", "count"),
    [
        ((3, 0), False, 7.5, 4),
        ([0, 0], False, 9.0, 1),
        ((3, -1), False, 7.5, 4),
        ((None, 0), False, 4.5, 10),
        ((-1, -1), False, 4.5, 10),
        ((3, 3), True, 7.5, 4),
        ((100, 0), True, 4.5, 10),
    ],
)
def test_window_of_a_single_token(window: Any, causal: bool, mean: float, count: float) -> None:
    check(probe(1, 1, 10, window_size=window, causal=causal), [mean], [count])


def test_open_left_window_is_causal() -> None:
    check(probe(1, 4, 4, window_size=(-1, 0)), [0, 0.5, 1, 1.5], [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("length", "mean", "count"), [(7, 5.0, 3), (8, 5.5, 4), (9, 8.0, 1), (4, 1.5, 4), (5, 4.0, 1)]
)
def test_chunk_over_pages(length: int, mean: float, count: float) -> None:
    e = oracle(
        q=torch.zeros(1, 1, 1, 4),
        k_cache=torch.randn(6, 2, 1, 4),
        v_cache=ramp(1, 10).reshape(5, 2, 1, 1)[[4, 2, 0, 3, 1, 0]],
        page_table=ints(2, 4, 1, 3, 0)[None],
        cache_seqlens=ints(length),
        causal=True,
        attention_chunk=4,
    )
    check(e, [mean], [count])


def test_chunk_of_negative_positions() -> None:
    # p = -2, -1, 0, 1 in chunks -1, -1, 0, 0
    check(probe(1, 4, 2, attention_chunk=2), [0, 0, 0.5, 0.5], [0, 0, 2, 2])


def test_leftpad() -> None:
    pad = {"cache_leftpad": ints(2, 0), "cache_seqlens": ints(5, 3)}
    check(probe(2, 1, 6, **pad), [3.0, 1.0], [3, 3])
    pad = {"cache_leftpad": ints(3), "cache_seqlens": ints(6)}
    check(probe(1, 2, 6, causal=True, window_size=(1, 0), **pad), [3.5, 4.5], [2, 2])
    pad = {"cache_leftpad": ints(6), "cache_seqlens": ints(6)}
    check(probe(1, 1, 6, **pad), [0], [0])


def test_empty_and_inactive_rows() -> None:
    e = probe(3, 1, 5, cache_seqlens=ints(0, 5, -1), sinks=torch.tensor([0.5]))
    assert e.lse.ravel().tolist() == pytest.approx([0.5, math.log(5 + math.exp(0.5)), -INF])
    assert means(e)[::2] == [0, 0]


def test_ragged_queries_and_keys() -> None:
    v = torch.tensor([0.0, 1, 2, 3, 100, 101])[:, None, None]
    e = oracle(
        q=torch.zeros(4, 1, 2),
        k_cache=torch.randn(6, 1, 2),
        v_cache=v,
        cu_seqlens_q=ints(0, 1, 4),
        cu_seqlens_k=ints(0, 4, 6),
        causal=True,
    )
    check(e, [1.5, 0, 100, 100.5], [4, 0, 1, 2])


def test_zero_query_sequence_in_the_middle_and_rows_past_the_end() -> None:
    e = oracle(
        q=torch.zeros(5, 2, 2),
        k_cache=torch.randn(3, 7, 1, 2),
        v_cache=ramp(3, 7),
        cu_seqlens_q=ints(0, 1, 1, 3),
        cache_seqlens=ints(4, 7, 5),
    )
    assert e.out[:, 0, 0].tolist() == pytest.approx([1.5, 2, 2, NAN, NAN], nan_ok=True)
    assert e.lse.shape == (2, 5)
    assert np.isnan(e.lse[:, 3:]).all()


def test_seqused_q_aligns_the_used_queries() -> None:
    e = probe(1, 4, 3, seqused_q=ints(2), causal=True)
    assert means(e) == pytest.approx([0.5, 1, NAN, NAN], nan_ok=True)


def test_dead_slots_may_hold_nan() -> None:
    k, v = torch.full((2, 3, 1, 4), NAN), torch.full((2, 3, 1, 1), NAN)
    k[0, :1], k[1] = 0.5, 0.5
    v[0, :1], v[1] = 0.0, ramp(1, 3)[0]
    check(probe(2, 1, 3, k_cache=k, v_cache=v, cache_seqlens=ints(1, 3)), [0, 1], [1, 3])


def test_keys_before_the_window_may_hold_nan() -> None:
    k, v = torch.randn(1, 5, 1, 4), ramp(1, 5)
    k[:, :3], v[:, :3] = NAN, NAN
    e = probe(1, 1, 5, k_cache=k, v_cache=v, window_size=(1, 0), softcap=3.0)
    check(e, [3.5], [2])


def test_table_entries_past_the_length_are_not_read() -> None:
    call = {
        "q": torch.zeros(1, 1, 1, 4),
        "k_cache": torch.randn(3, 4, 1, 4),
        "v_cache": ramp(1, 12).reshape(3, 4, 1, 1),
        "cache_seqlens": 5,
    }
    table = ints(0, 1, -1, 2**31 - 1)[None]
    check(oracle(**call, page_table=table), [2], [5])


def test_batch_idx_selects_cache_rows_and_table_rows() -> None:
    v = ramp(3, 4) + 10 * torch.arange(3)[:, None, None, None]
    e = probe(2, 1, 4, k_cache=torch.randn(3, 4, 1, 4), v_cache=v, cache_batch_idx=ints(2, 0))
    check(e, [21.5, 1.5], [4, 4])
    e = oracle(
        q=torch.zeros(2, 1, 1, 4),
        k_cache=torch.randn(3, 4, 1, 4),
        v_cache=v,
        page_table=ints(0, 1, 2)[:, None],
        cache_batch_idx=ints(2, 2),
    )
    check(e, [21.5, 21.5], [4, 4])


def test_grouped_heads() -> None:
    v = torch.arange(3.0)[None, None, :, None].repeat(1, 2, 1, 1)
    e = oracle(q=torch.randn(1, 1, 15, 4), k_cache=torch.randn(1, 2, 3, 4), v_cache=v)
    assert e.out.ravel().tolist() == pytest.approx([h // 5 for h in range(15)])


def test_softcap_before_the_mask() -> None:
    e = oracle(
        q=torch.ones(1, 2, 1, 1),
        k_cache=torch.tensor([30.0, 60, 90]).reshape(1, 3, 1, 1),
        v_cache=torch.tensor([1.0, 2, 4]).reshape(1, 3, 1, 1),
        softmax_scale=1.0,
        softcap=30.0,
        causal=True,
    )
    assert means(e) == pytest.approx([1.997701, 3.432896], abs=1e-6)
    assert e.lse.ravel().tolist() == pytest.approx([28.923129, 30.184638], abs=1e-6)


@pytest.mark.parametrize("per_batch", [False, True])
def test_alibi_on_live_lengths(per_batch: bool) -> None:
    slopes = torch.tensor([math.log(2), 0.0])
    e = oracle(
        q=torch.randn(2, 1, 2, 4),
        k_cache=torch.zeros(2, 6, 1, 4),
        v_cache=ramp(2, 6),
        cache_seqlens=ints(3, 5),
        alibi_slopes=slopes.repeat(2, 1) if per_batch else slopes,
    )
    assert e.out[0, 0, :, 0].tolist() == pytest.approx([10 / 7, 1.0])
    assert np.exp(e.lse[0, :, 0]).tolist() == pytest.approx([1.75, 3])
    assert np.exp(e.lse[1, :, 0]).tolist() == pytest.approx([1.9375, 5])


def test_alibi_after_the_soft_cap() -> None:
    call = {"q": torch.ones(1, 1, 1, 1), "k_cache": torch.tensor([2.0, 3]).reshape(1, 2, 1, 1)}
    slopes = torch.tensor([0.5])
    e = oracle(**call, v_cache=ramp(1, 2), softmax_scale=1.0, softcap=2.0, alibi_slopes=slopes)
    s = [2 * math.tanh(1.0) - 0.5, 2 * math.tanh(1.5)]
    assert e.lse.item() == pytest.approx(math.log(sum(map(math.exp, s))))


@pytest.mark.parametrize("sq", [1, 3])
def test_sink_is_counted_once(sq: int) -> None:
    e = probe(1, sq, 5, sinks=torch.tensor([math.log(5)]))
    check(e, [1.0] * sq, [10.0] * sq)


def test_infinite_sinks() -> None:
    check(probe(1, 1, 5, sinks=torch.tensor([-INF])), [2], [5])
    e = probe(1, 1, 5, sinks=torch.tensor([INF]))
    assert (e.out.item(), e.lse.item()) == (0, INF)


def test_very_negative_logits() -> None:
    e = oracle(
        q=torch.full((1, 1, 1, 128), 64.0),
        k_cache=torch.full((1, 1, 1, 128), -64.0),
        v_cache=torch.ones(1, 1, 1, 1),
    )
    assert e.out.item() == 1
    assert e.lse.item() == pytest.approx(-46340.95, abs=1e-2)


def test_lse_is_natural_and_halves_merge() -> None:
    e = probe(1, 1, 5)
    assert e.lse.item() == pytest.approx(1.609438, abs=1e-6)
    first, second = probe(1, 1, 5, cache_seqlens=3), probe(1, 1, 5, cache_leftpad=ints(3))
    weights = [math.exp(first.lse.item()), math.exp(second.lse.item())]
    merged = (weights[0] * first.out.item() + weights[1] * second.out.item()) / sum(weights)
    assert merged == pytest.approx(2.0)


def test_negative_and_zero_scales() -> None:
    call = {"q": torch.ones(1, 1, 1, 1), "k_cache": ramp(1, 2), "v_cache": ramp(1, 2)}
    assert oracle(**call, softmax_scale=0.0).out.item() == pytest.approx(0.5)
    assert oracle(**call, softmax_scale=-1.0).out.item() == pytest.approx(1 / (1 + math.e))


def test_score_mod_arguments() -> None:
    seen = {}

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, info: Any, aux: Any) -> Any:
        seen.update(vars(info))
        return score + aux[0][h] * (q_idx - kv_idx) + 0 * b

    e = oracle(
        q=torch.zeros(3, 2, 4),
        k_cache=torch.randn(2, 4, 1, 4),
        v_cache=ramp(2, 4),
        cu_seqlens_q=ints(0, 1, 3),
        cache_seqlens=ints(4, 3),
        cache_leftpad=ints(0, 1),
        score_mod=mod,
        aux_tensors=[torch.tensor([0.0, math.log(2)])],
    )
    assert seen == {"offset_q": 1, "offset_k": 0, "seqlen_q": 2, "seqlen_k": 2}
    # Sequence 1 has keys 0, 1 (leftpad removed); its second query adds ln 2 * (1 - j).
    assert np.exp(e.lse[:, 2]).tolist() == pytest.approx([2, 3])
    assert e.out[2, :, 0].tolist() == pytest.approx([1.5, (2 * 1 + 1 * 2) / 3])


def test_mask_mod_intersects_causal() -> None:
    e = probe(1, 2, 5, causal=True, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0)
    check(e, [1, 2], [2, 3])


def test_listed_blocks() -> None:
    blocks = SimpleNamespace(
        mask_block_cnt=ints(1, 1).reshape(1, 1, 2),
        mask_block_idx=ints(0, 9, 1, 9).reshape(1, 1, 2, 2),
        full_block_cnt=ints(0, 1).reshape(1, 1, 2),
        full_block_idx=ints(9, 2).reshape(1, 1, 2, 1),
        block_size=(1, 2),
    )

    def not_3(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx != 3

    e = probe(1, 2, 7, block_sparse_tensors=blocks, mask_mod=not_3)
    check(e, [0.5, (2 + 4 + 5) / 3], [2, 3])


def test_gathered_keys_count_once() -> None:
    e = probe(1, 2, 5, causal=True, gather_kv_indices=ints(3, 3, 1, 4, -1, 4).reshape(1, 2, 3))
    check(e, [2, 4], [2, 1])


def test_rel_bias_index() -> None:
    bias = torch.log(torch.tensor([2.0, 3.0])).reshape(1, 1, 1, 2).repeat(1, 2, 1, 1)
    # r = p - j: the last key gets 2, the one before 3, the rest nothing.
    e = probe(1, 2, 4, rel_bias=bias, causal=True)
    assert np.exp(e.lse).ravel().tolist() == pytest.approx([1 + 3 + 2, 1 + 1 + 3 + 2])
    # r = p + right - j with right = 1, p = 2, 3
    e = probe(1, 2, 4, rel_bias=bias, window_size=(-1, 1))
    assert np.exp(e.lse).ravel().tolist() == pytest.approx([1 + 1 + 3 + 2, 1 + 1 + 1 + 3])
    # An open right side: r = Sk - 1 - j for every row.
    e = probe(1, 2, 4, rel_bias=bias)
    assert np.exp(e.lse).ravel().tolist() == pytest.approx([7, 7])


def test_qv_adds_a_second_dot() -> None:
    call = {
        "q": torch.ones(1, 1, 1, 1),
        "k_cache": torch.tensor([0.0, 1]).reshape(1, 2, 1, 1),
        "v_cache": torch.tensor([[1.0, 0, 0], [0, 1, 0]]).reshape(1, 2, 1, 3),
        "qv": torch.tensor([3.0, 1, 7]).reshape(1, 1, 1, 3),
    }
    e = oracle(**call)
    s = [0.5 * 3, 0.5 * (1 + 1)]  # scale (1 + 3) ** -0.5
    assert e.lse.item() == pytest.approx(math.log(math.exp(s[0]) + math.exp(s[1])))
    only = oracle(**(call | {"q": None, "k_cache": None}), only_qv=True)
    s = [3 / 3**0.5, 1 / 3**0.5]
    assert only.lse.item() == pytest.approx(math.log(math.exp(s[0]) + math.exp(s[1])))
    assert only.k_cache is None

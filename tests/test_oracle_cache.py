"""The oracle's appends, rotations and scales against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Expected, oracle
from oracle_cache import mx_byte
from oracle_probe import check, ints, probe, ramp

NAN = math.nan
INF = math.inf


def append(end: Any, new: int, cap: int = 6, **kwargs: Any) -> Expected:
    values = torch.arange(100.0, 100.0 + new).reshape(1, new, 1, 1)
    call = {"k": torch.ones(1, new, 1, 4), "v": values, "cache_seqlens": end}
    return probe(1, kwargs.pop("sq", new), cap, **(call | kwargs))


@pytest.mark.parametrize("end", [0, ints(0)])
def test_first_prefill_through_the_cache(end: Any) -> None:
    e = append(end, 4, v=ramp(1, 4), causal=True, v_cache=torch.full((1, 6, 1, 1), NAN))
    check(e, [0, 0.5, 1, 1.5], [1, 2, 3, 4])
    assert e.v_cache is not None
    assert e.v_cache.ravel().tolist() == pytest.approx([0, 1, 2, 3, NAN, NAN], nan_ok=True)


def test_append_aligns_after_the_new_keys() -> None:
    check(
        append(3, 2, v=torch.tensor([3.0, 4])[None, :, None, None], causal=True), [1.5, 2], [4, 5]
    )
    check(append(3, 2, v=torch.tensor([3.0, 4])[None, :, None, None]), [2, 2], [5, 5])


def test_rows_no_query_sees_are_stored() -> None:
    e = append(1, 5, sq=1, window_size=(0, 0))
    assert e.v_cache is not None
    assert e.v_cache.ravel().tolist() == [0, 100, 101, 102, 103, 104]
    check(e, [104], [1])


def test_append_does_not_touch_its_inputs() -> None:
    cache = torch.zeros(1, 6, 1, 4)
    append(1, 2, k_cache=cache)
    assert not cache.any()


def test_append_across_pages_with_leftpad() -> None:
    e = oracle(
        q=torch.zeros(1, 1, 1, 1),
        k_cache=torch.zeros(4, 2, 1, 1),
        v_cache=torch.zeros(4, 2, 1, 1),
        k=torch.ones(1, 3, 1, 1),
        v=torch.tensor([7.0, 8, 9]).reshape(1, 3, 1, 1),
        page_table=ints(3, 0, 2)[None],
        cache_seqlens=ints(1),
        cache_leftpad=ints(1),
    )
    assert e.v_cache is not None
    assert e.v_cache[:, :, 0, 0].tolist() == [[8, 9], [0, 0], [0, 0], [0, 7]]
    check(e, [8], [3])


def test_ragged_append_skips_inactive_rows() -> None:
    e = oracle(
        q=torch.zeros(3, 1, 1, 1),
        k_cache=torch.zeros(3, 4, 1, 1),
        v_cache=torch.zeros(3, 4, 1, 1),
        k=torch.ones(4, 1, 1),
        v=torch.tensor([1.0, 2, 3, 4]).reshape(4, 1, 1),
        cu_seqlens_k_new=ints(0, 1, 2, 4),
        cache_seqlens=ints(0, -1, 2),
    )
    assert e.v_cache is not None
    assert e.v_cache[..., 0, 0].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 3, 4]]


def test_slot_mapping_counts_the_new_keys() -> None:
    e = oracle(
        q=torch.zeros(3, 1, 1),
        k_cache=torch.zeros(3, 2, 1, 1),
        v_cache=torch.zeros(3, 2, 1, 1),
        k=torch.ones(3, 1, 1),
        v=torch.tensor([5.0, 6, 7]).reshape(3, 1, 1),
        cu_seqlens_q=ints(0, 2, 3),
        page_table=ints(2, 0, 1, 9).reshape(2, 2),
        slot_mapping=torch.tensor([5, 0, -1]),
        cache_seqlens=ints(3, 1),
        causal=True,
    )
    assert e.v_cache is not None
    assert e.v_cache[..., 0, 0].tolist() == [[6, 0], [0, 0], [0, 5]]
    check(e, [2.5, 11 / 3, 0], [2, 3, 1])


ANGLES = torch.tensor([1.0, 0.01])
COS, SIN = (torch.outer(torch.arange(8.0), ANGLES) for _ in range(2))
COS, SIN = COS.cos(), SIN.sin()
HALF = [-1.9841, 1.9599, 2.4624, 4.0198, 5, 6, 7, 8]
PAIRS = [-1.1426, 1.9221, 2.9599, 4.0298, 5, 6, 7, 8]


def rotary_call(**kwargs: Any) -> Expected:
    x = torch.arange(1.0, 9.0).reshape(1, 1, 1, 8)
    call = {
        "q": x,
        "k_cache": torch.zeros(1, 4, 1, 8),
        "v_cache": torch.zeros(1, 4, 1, 1),
        "k": x,
        "v": torch.zeros(1, 1, 1, 1),
        "cache_seqlens": 1,
        "rotary_cos": COS,
        "rotary_sin": SIN,
    }
    return oracle(**(call | kwargs))


@pytest.mark.parametrize(("interleaved", "expected"), [(False, HALF), (True, PAIRS)])
def test_partial_rotary(interleaved: bool, expected: list[float]) -> None:
    e = rotary_call(rotary_interleaved=interleaved)
    assert e.k_cache is not None
    assert e.k_cache[0, 1, 0].tolist() == pytest.approx(expected, abs=1e-4)
    # q is rotated alike: rotation keeps its dot with the new key.
    assert e.lse.item() == pytest.approx(math.log(1 + math.exp(204 * 8**-0.5)), rel=1e-6)


def test_rotary_seqlens_replace_the_base_but_not_the_row() -> None:
    e = rotary_call(cache_seqlens=3, rotary_seqlens=ints(1))
    assert e.k_cache is not None
    assert e.k_cache[0, 3, 0].tolist() == pytest.approx(PAIRS, abs=1e-4)


@pytest.mark.parametrize(
    ("mask", "steps"), [({}, 0), ({"causal": True}, 1), ({"window_size": (9, 9)}, 1)]
)
def test_queries_advance_only_under_a_local_mask(mask: dict[str, Any], steps: int) -> None:
    # One-pair heads: the dot with the unrotated key [1, 0] is the cosine of the query's angle.
    angle = torch.arange(8.0)[:, None]
    key = torch.tensor([1.0, 0]).reshape(1, 1, 1, 2)
    e = oracle(
        q=key.repeat(1, 2, 1, 1),
        k_cache=key,
        v_cache=torch.zeros(1, 1, 1, 1),
        k=torch.zeros(1, 0, 1, 2),
        v=torch.zeros(1, 0, 1, 1),
        cache_seqlens=1,
        rotary_cos=angle.cos(),
        rotary_sin=angle.sin(),
        softmax_scale=1.0,
        **mask,
    )
    assert e.lse[0, 0, 1] == pytest.approx(math.cos(1 + steps))


def test_rotary_bases_ignore_leftpad() -> None:
    e = rotary_call(cache_leftpad=ints(1))
    assert e.k_cache is not None
    assert e.k_cache[0, 1, 0].tolist() == pytest.approx(PAIRS, abs=1e-4)


def test_descales_multiply_per_kv_head() -> None:
    e = oracle(
        q=torch.ones(1, 1, 2, 1),
        k_cache=torch.tensor([[0.0, 0], [1, 1]]).reshape(1, 2, 2, 1),
        v_cache=torch.tensor([[0.0, 0], [1, 1]]).reshape(1, 2, 2, 1),
        q_descale=2.0,
        k_descale=torch.tensor([[0.5, 2.0]]),
        v_descale=torch.tensor([[2.0, 0.25]]),
    )
    sigmoid = [1 / (1 + math.exp(-x)) for x in (1.0, 4.0)]
    assert e.out.ravel().tolist() == pytest.approx([2 * sigmoid[0], 0.25 * sigmoid[1]])
    assert e.lse.ravel().tolist() == pytest.approx([math.log(1 + math.exp(x)) for x in (1, 4)])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
)
def test_sink_over_every_cache_dtype(dtype: torch.dtype) -> None:
    v = ramp(1, 5).to(dtype)
    k = torch.ones(1, 5, 1, 4).to(dtype)
    check(probe(1, 1, 5, k_cache=k, v_cache=v, sinks=torch.tensor([math.log(5)])), [1], [10])


@pytest.mark.parametrize(
    ("dtype", "given", "stored"),
    [
        (
            torch.float8_e4m3fn,
            [449.0, -1e6, INF, -INF, NAN, 464.1],
            [448, -448, 448, -448, NAN, 448],
        ),
        (torch.float8_e5m2, [1e6, -INF, 57344, NAN, 0, -2], [57344, -57344, 57344, NAN, 0, -2]),
        (torch.int8, [0.5, 1.5, 2.5, 200, -200, -0.5], [0, 2, 2, 127, -127, 0]),
    ],
)
def test_append_saturates(dtype: torch.dtype, given: list[float], stored: list[float]) -> None:
    new = torch.tensor(given).reshape(1, 6, 1, 1)
    cache = torch.zeros(1, 6, 1, 1).to(dtype)
    e = append(0, 6, k=new, v=new, k_cache=cache, v_cache=cache, q=torch.zeros(1, 1, 1, 1))
    assert e.k_cache is not None
    assert e.k_cache.double().ravel().tolist() == pytest.approx(stored, nan_ok=True)


def test_append_divides_by_the_descale_of_the_sequence() -> None:
    cache = torch.zeros(2, 2, 1, 1).to(torch.float8_e4m3fn)
    e = oracle(
        q=torch.zeros(2, 1, 1, 1),
        k_cache=cache,
        v_cache=cache,
        k=torch.full((2, 1, 1, 1), 4.0),
        v=torch.full((2, 1, 1, 1), 4.0),
        cache_seqlens=ints(0, 1),
        cache_batch_idx=ints(1, 0),
        k_descale=torch.tensor([[2.0], [8.0]]),
    )
    assert e.k_cache is not None
    assert e.v_cache is not None
    assert e.k_cache.double().ravel().tolist() == [0, 0.5, 2, 0]
    assert e.v_cache.double().ravel().tolist() == [0, 4, 4, 0]


def test_per_token_scales_are_written() -> None:
    cache = torch.zeros(1, 2, 1, 2).to(torch.int8)
    scales = torch.full((1, 2, 1), NAN)
    new = torch.tensor([[-254.0, 127], [0, 0]]).reshape(1, 2, 1, 2)
    e = oracle(
        q=torch.zeros(1, 1, 1, 2),
        k_cache=cache,
        v_cache=cache,
        k=new,
        v=new,
        cache_seqlens=0,
        k_descale=scales,
        v_descale=scales,
    )
    assert e.k_cache is not None
    assert e.k_descale.ravel().tolist() == [2, 1]
    assert e.k_cache.ravel().tolist() == [-127, 64, 0, 0]
    assert e.out.ravel().tolist() == [-127, 64]
    assert scales.isnan().all()


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 0),
        (448.0, 127),
        (448.0000001, 128),
        (224.0, 126),
        (225.0, 127),
        (1.0, 119),
        (2.0**-130, 0),
        (1e-45, 0),
        (448 * 2.0**119, 246),
    ],
)
def test_mx_byte(amax: float, byte: int) -> None:
    assert mx_byte(amax) == byte


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(120, 134, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def test_mx_scales_multiply_groups_of_32_channels() -> None:
    k = torch.ones(1, 1, 1, 64).to(torch.float8_e4m3fn)
    sf = torch.tensor([128, 130], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    e = oracle(
        q=torch.ones(1, 1, 1, 64),
        k_cache=k,
        v_cache=k,
        sfk=sf.reshape(1, 1, 1, 2),
        sfv=sf.reshape(1, 1, 1, 2),
        softmax_scale=1.0,
    )
    assert e.lse.item() == 32 * 2 + 32 * 8
    assert e.out.ravel().tolist() == [2.0] * 32 + [8.0] * 32


@pytest.mark.parametrize("slots", [5, 128, 150])
def test_interleaved_scales_equal_plain_ones(slots: int) -> None:
    pages, heads, dim = 2, 3, 160
    plain = codes(pages, slots, heads, dim // 32)
    flat = torch.zeros(pages, heads, -(-slots // 128), 2, 32, 4, 4, dtype=torch.uint8)
    offsets = flat.reshape(pages, heads, -1)
    for m in range(slots):
        for gr in range(dim // 32):
            at = ((m // 128 * 2 + gr // 4) * 32 + m % 32) * 16 + (m % 128) // 32 * 4 + gr % 4
            offsets[:, :, at] = plain.view(torch.uint8)[:, m, :, gr]
    cache = torch.randn(pages, slots, heads, dim).to(torch.float8_e4m3fn)
    new = torch.randn(pages, 2, heads, dim)
    call = {
        "q": torch.randn(pages, 1, heads, dim),
        "k_cache": cache,
        "v_cache": cache,
        "sfv": plain,
        "k": new,
        "v": new,
        "cache_seqlens": slots - 2,
    }
    a = oracle(**call, sfk=plain)
    b = oracle(**call, sfk=flat.view(torch.float8_e8m0fnu))
    assert np.array_equal(a.out, b.out)
    assert a.sfk is not None
    assert b.sfk is not None
    last = slots - 1
    at = ((last // 128 * 2) * 32 + last % 32) * 16 + (last % 128) // 32 * 4
    written = b.sfk.view(torch.uint8).reshape(pages, heads, -1)[:, :, at]
    assert torch.equal(written, a.sfk.view(torch.uint8)[:, last, :, 0])


def test_token_block_scales() -> None:
    v = torch.ones(1, 64, 1, 32).to(torch.float8_e4m3fn)
    sfv = torch.full((1, 2, 1, 32), 127, dtype=torch.uint8)
    sfv[0, 1], sfv[0, 0, 0, 5] = 129, 130
    e = oracle(
        q=torch.zeros(1, 1, 1, 4),
        k_cache=torch.randn(1, 64, 1, 4),
        v_cache=v,
        sfv=sfv.view(torch.float8_e8m0fnu),
        cache_seqlens=48,
    )
    assert e.out[0, 0, 0, 0] == pytest.approx((32 * 1 + 16 * 4) / 48)
    assert e.out[0, 0, 0, 5] == pytest.approx((32 * 8 + 16 * 4) / 48)


def test_mx_append_quantises() -> None:
    x = torch.cat([torch.full((32,), 3.0), torch.zeros(32)]).reshape(1, 1, 1, 64)
    x[..., 0] = 896.0
    cache = torch.zeros(1, 1, 1, 64).to(torch.float8_e4m3fn)
    sf = torch.full((1, 1, 1, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    q = torch.zeros(1, 1, 1, 64)
    e = oracle(q=q, k_cache=cache, v_cache=cache, k=x, v=x, sfk=sf, sfv=sf, cache_seqlens=0)
    assert e.sfk is not None
    assert e.k_cache is not None
    assert e.sfk.view(torch.uint8).ravel().tolist() == [128, 0]
    assert e.k_cache.float().ravel()[:3].tolist() == [448, 1.5, 1.5]
    assert e.out.ravel()[:3].tolist() == [896, 3, 3]


def test_unknown_argument() -> None:
    with pytest.raises(TypeError, match="wndow_size"):
        probe(1, 1, 2, wndow_size=(1, 1))

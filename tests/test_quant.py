"""Narrow dtypes: casts, measured scales, MXFP8 and the layouts of its scales."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import kvattn
from kvattn import errors as E
from kvattn import quant

INF, NAN = math.inf, math.nan
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
attend: Any = kvattn.flash_attn_with_kvcache  # the out of it, here
WIDE = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def codes(dtype: torch.dtype) -> Tensor:
    """All 256 of them."""
    return torch.arange(256, dtype=torch.uint8).view(dtype)


# Casts ----------------------------------------------------------------------------------------


def decoded(code: int, exponent_bits: int) -> float:
    """An FP8 code by its definition: sign, exponent, fraction."""
    fraction_bits = 7 - exponent_bits
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code & 0x7F) >> fraction_bits, code & (2**fraction_bits - 1)
    top = 2**exponent_bits - 1
    if exponent_bits == 4 and code & 0x7F == 0x7F:
        return NAN
    if exponent_bits == 5 and exponent == top:
        return NAN if fraction else sign * INF
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - fraction_bits)
    return sign * (1 + fraction / 2**fraction_bits) * 2.0 ** (exponent - bias)


@pytest.mark.parametrize(("dtype", "exponent_bits"), [(E4M3, 4), (E5M2, 5)])
def test_every_code_there_and_back(dtype: torch.dtype, exponent_bits: int) -> None:
    values = codes(dtype).double()
    wanted = torch.tensor([decoded(c, exponent_bits) for c in range(256)], dtype=torch.float64)
    assert torch.equal(values.nan_to_num(1e9), wanted.nan_to_num(1e9, INF, -INF).nan_to_num(1e9))
    for wide in WIDE:
        back = quant.cast(values.to(wide), dtype)
        finite = values.isfinite()
        assert torch.equal(back.view(torch.uint8)[finite], torch.arange(256).byte()[finite])
        assert torch.equal(back.float().isnan(), values.isnan())
        assert (back.double()[values.isinf()].abs() == quant.LIMIT[dtype]).all()


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize(
    ("dtype", "given", "wanted"),
    [
        (E4M3, [448, 449, 464, 465, 1e4, INF, -INF], [448] * 6 + [-448]),
        (E4M3, [2**-9, 2**-10, 1.5 * 2**-9, -(2**-9)], [2**-9, 0, 2**-8, -(2**-9)]),
        (E4M3, [17, 19, -17], [16, 20, -16]),  # ties go to the even fraction
        (E5M2, [57344, 6e4, 65504, INF, -INF], [57344] * 4 + [-57344]),
        (E5M2, [2**-16, 2**-17, 1.5 * 2**-16], [2**-16, 0, 2**-15]),
        (torch.int8, [0.5, 1.5, -2.5, 126.5, 127.4, 128, INF, -INF, NAN], None),
    ],
)
def test_rounding_and_saturation(
    dtype: torch.dtype, given: list[float], wanted: list[float] | None, wide: torch.dtype
) -> None:
    x = torch.tensor(given, dtype=wide)
    if wanted is None:  # what the rule says of the numbers as `wide` holds them
        wanted = x.nan_to_num(0.0, 127, -127).round().clamp(-127, 127).tolist()
        assert wanted[:4] == [0, 2, -2, 126] and wanted[5:] == [127, 127, -127, 0]
    assert quant.cast(x, dtype).double().tolist() == wanted


def test_wide_dtypes_are_plain_casts() -> None:
    x = torch.tensor([1e5, -INF, NAN, 1e-9])
    assert quant.cast(x, torch.float32) is x
    half = quant.cast(x, torch.float16)
    assert half[0] == INF and half[1] == -INF and half[2].isnan() and half[3] == 0


# Scales ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8])
@pytest.mark.parametrize("wide", WIDE)
def test_measured_scales_clip_nothing(dtype: torch.dtype, wide: torch.dtype) -> None:
    """amax lands on the largest number, so every element is within one rounding."""
    x = torch.randn(50, 3, 16, dtype=wide) * torch.tensor([1000.0, 1.0, 0.0], dtype=wide)[:, None]
    scales, report = quant.measure_scales(x, dtype)
    assert scales.shape == (3,) and scales.dtype == torch.float32 and scales[2] == 1.0
    amax = x.float().abs().amax((0, 2))
    torch.testing.assert_close(scales[:2], amax[:2] / quant.LIMIT[dtype])
    assert (report.elements, report.limit) == (x.numel(), quant.LIMIT[dtype])
    assert report.amax == amax.max().item()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = quant.quantise(x, dtype, scales)
    assert stored.dtype == dtype
    error = (stored.double() * scales[:, None].double() - x.double()).abs()
    relative = {E4M3: 2**-4, E5M2: 2**-3, torch.int8: 0.0}[dtype]
    step = {E4M3: 2**-10, E5M2: 2**-17, torch.int8: 0.5}[dtype]
    allowed = relative * x.double().abs() + 1.001 * step * scales[:, None].double()
    assert (error <= allowed).all()


def test_the_report_counts_what_scale_one_would_lose() -> None:
    x = torch.tensor([[448.0, 464.0, 465.0, -1e4], [NAN, INF, 0.0, 1.0]])[None]
    scales, report = quant.measure_scales(x, E4M3)
    assert report == quant.ClipReport(8, 3, float(torch.finfo(torch.float32).max), 448.0)
    assert scales[0] == torch.tensor(1e4) / 448
    assert quant.measure_scales(x[:, :1, :2], E4M3)[1].clipped == 0
    nothing, empty = quant.measure_scales(torch.empty(0, 2, 8), E4M3)
    assert nothing.tolist() == [1.0, 1.0] and empty == quant.ClipReport(0, 0, 0.0, 448.0)


def test_clipping_is_said_once_per_place() -> None:
    x = torch.tensor([[1.0, -600.0]])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for factor in (1, 2, 3):
            stored = quant.quantise(factor * x, E4M3)
    assert stored.float().tolist() == [[3.0, -448.0]]
    assert [w.category for w in said] == [quant.ClippingWarning]
    assert "448" in str(said[0].message) and "measure_scales" in str(said[0].message)
    assert said[0].filename == __file__


def test_quantise_is_what_an_append_stores() -> None:
    cache = torch.zeros(2, 1, 6, 2, 16).to(E4M3)
    x, scale = torch.randn(1, 4, 2, 16, dtype=torch.bfloat16), torch.tensor([0.01, 2.0])
    kvattn.append_kv(x, x, *cache, cache_seqlens=1, k_descale=scale)
    for stored, wanted in (
        (cache[0], quant.quantise(x, E4M3, scale)),
        (cache[1], quant.quantise(x, E4M3)),
    ):
        assert torch.equal(stored[:, 1:5].view(torch.uint8), wanted.view(torch.uint8))


def test_a_scale_per_token_survives_nan_infinity_and_tiny_numbers() -> None:
    x = torch.tensor([[[1.0, NAN, 2.0]], [[0.0, INF, 1.0]], [[1e-44, 0.0, 0.0]], [[NAN] * 3]])
    scales = quant.token_scales(x, E4M3)
    assert scales[0].item() == pytest.approx(2 / 448) and scales[3] == 1.0
    assert scales.isfinite().all() and (scales > 0).all()
    stored = quant.cast(x / scales[..., None], E4M3).float()
    assert torch.equal(stored.isnan(), x.isnan())
    assert stored[0, 0, 2] == 448 and stored[1, 0, 1] == 448


# MXFP8 ----------------------------------------------------------------------------------------


def test_mxfp8_rounds_within_a_group() -> None:
    """Powers of two are exact; everything else is within the rounding of its group's scale."""
    x = torch.randn(5, 3, 64) * 10.0 ** torch.randint(-20, 20, (5, 3, 1))
    data, scales = quant.mx_quantise(x)
    assert (data.dtype, scales.dtype) == (E4M3, E8M0)
    assert (data.shape, scales.shape) == ((5, 3, 64), (5, 3, 2))
    back = quant.mx_dequantise(data, scales.view(torch.uint8), torch.float64)
    amax = x.double().unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    error = (back - x.double()).unflatten(-1, (-1, 32)).abs()
    allowed = x.double().unflatten(-1, (-1, 32)).abs() * 2**-4 + amax / 224 * 2**-10
    assert (error <= allowed).all()
    powers = 2.0 ** torch.randint(-3, 4, (2, 32)).double()
    exact = quant.mx_quantise(powers)
    assert torch.equal(quant.mx_dequantise(exact[0], exact[1].view(torch.uint8), WIDE[3]), powers)


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 0),
        (448.0, 127),
        (448.1, 128),
        (896.0, 128),
        (1.0, 119),
        (448 * 2.0**-127, 0),
        (2.0**-149, 0),
        (3e38, 127 + 120),
        (INF, 127 + 120),
        (NAN, 0),
    ],
)
def test_the_byte_is_the_least_that_does_not_clip(amax: float, byte: int) -> None:
    x = torch.zeros(1, 32)
    x[0, 5] = amax
    data, scales = quant.mx_quantise(x)
    assert scales.view(torch.uint8).item() == byte
    if math.isfinite(amax) and byte:
        assert data.float()[0, 5] > 223
    if math.isnan(amax):
        assert data.float().isnan().sum() == 1
        x[0, 6] = 3.0  # the others of its group are stored as without it
        plain = x.nan_to_num(0.0)
        assert torch.equal(
            quant.mx_quantise(x)[0][0, 6:].float(), quant.mx_quantise(plain)[0][0, 6:].float()
        )


def test_the_ends_of_the_scale() -> None:
    """Bytes 0 and 254 are powers of two like the others; 255 is NaN."""
    data = torch.ones(3, 32).to(E4M3)
    scales = torch.tensor([[0], [254], [255]], dtype=torch.uint8)
    values = quant.mx_dequantise(data, scales, torch.float64)
    assert (values[0] == 2.0**-127).all() and (values[1] == 2.0**127).all()
    assert values[2].isnan().all()


def by_hand(rows: int, heads: int, groups: int) -> tuple[Tensor, Tensor]:
    """Random plain bytes (2, rows, heads, groups), and the same interleaved, one by one."""
    plain = torch.randint(0, 255, (2, rows, heads, groups), dtype=torch.uint8)
    row_blocks, group_blocks = -(-rows // 128), -(-groups // 4)
    flat = torch.full((2, heads, row_blocks * group_blocks * 512), 77, dtype=torch.uint8)
    for m in range(rows):
        for g in range(groups):
            block = m // 128 * group_blocks + g // 4
            at = (block * 32 + m % 32) * 16 + m % 128 // 32 * 4 + g % 4
            flat[:, :, at] = plain[:, m, :, g]
    return plain, flat.unflatten(-1, (row_blocks, group_blocks, 32, 4, 4))


@pytest.mark.parametrize(
    ("rows", "groups"), [(4, 1), (128, 4), (100, 2), (300, 6), (128, 5), (33, 8)]
)
def test_interleaved_scales_are_plain_ones_rearranged(rows: int, groups: int) -> None:
    plain, interleaved = by_hand(rows, 3, groups)
    data = torch.zeros(2, rows, 3, 32 * groups).to(E4M3)
    assert quant.mx_layout(plain.view(E8M0), data) == "plain"
    assert quant.mx_layout(interleaved.view(E8M0), data) == "interleaved"
    assert torch.equal(quant.mx_plain(plain.view(E8M0), data), plain)
    shapes = [interleaved]
    if interleaved.shape[2] == 1:
        shapes.append(interleaved.squeeze(2))
    if interleaved.shape[3] == 1:
        shapes.append(interleaved.squeeze(3))
    if interleaved.shape[2] == interleaved.shape[3] == 1:
        shapes.append(interleaved[:, :, 0, 0])
    for scales in shapes:
        assert torch.equal(quant.mx_plain(scales.view(E8M0), data), plain)


@pytest.mark.parametrize("squeeze", [True, False])
def test_stored_scales_are_found_again(squeeze: bool) -> None:
    """Writing rows one at a time gives the whole; the padding of a block keeps its bytes."""
    plain, interleaved = by_hand(40, 3, 4)
    data = torch.zeros(2, 40, 3, 128).to(E4M3)
    target = torch.full_like(interleaved, 77)
    view = target[:, :, 0, 0] if squeeze else target
    at = torch.cartesian_prod(torch.arange(2), torch.arange(40))[torch.randperm(80)]
    new = plain[at[:, 0], at[:, 1]].view(E8M0)
    quant.mx_store(view.view(E8M0), data, at[:, 0], at[:, 1], new)
    assert torch.equal(target, interleaved)


def test_a_scale_per_32_tokens() -> None:
    data = torch.randn(2, 96, 3, 8).to(E4M3)
    scales = torch.randint(100, 140, (2, 3, 3, 8), dtype=torch.uint8)
    assert quant.mx_layout(scales.view(E8M0), data, tokens=True) == "tokens"
    assert quant.mx_layout(scales.view(E8M0), data) is None
    spread = quant.mx_plain(scales.view(E8M0), data, tokens=True)
    for row in (0, 31, 32, 95):
        assert torch.equal(spread[:, row], scales[:, row // 32])


@pytest.mark.parametrize(
    ("scales", "data"),
    [
        ((2, 4, 3, 2), (2, 4, 3, 32)),
        ((2, 3, 1, 1, 32, 4), (2, 4, 3, 32)),
        ((2, 3, 2, 1, 32, 4, 4), (2, 4, 3, 32)),
        ((3, 2, 1, 1, 32, 4, 4), (2, 4, 3, 32)),
        ((2, 4, 3, 1), (2, 4, 3, 48)),
        ((2, 3, 2, 32, 4, 4), (2, 256, 3, 256)),
    ],
)
def test_no_layout_fits(scales: tuple[int, ...], data: tuple[int, ...]) -> None:
    assert quant.mx_layout(torch.empty(scales).to(E8M0), torch.empty(data).to(E4M3)) is None


LAYOUTS = ["plain", "interleaved", "squeezed", "strided"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_reads_every_layout(layout: str) -> None:
    """Bytes 0 and 254 among the keys' scales; the same bits out of each layout."""
    plain_k, k_blocks = by_hand(40, 2, 2)
    plain_v, v_blocks = by_hand(40, 2, 1)
    plain_k.clamp_(118, 132)
    plain_v.clamp_(0, 140)
    plain_k[0, 3], plain_v[0, 3], plain_v[1, 5] = 0, 0, 100
    for plain, blocks in ((plain_k, k_blocks), (plain_v, v_blocks)):
        at = torch.cartesian_prod(torch.arange(2), torch.arange(40))
        data = torch.zeros(2, 40, 2, 32 * plain.shape[-1]).to(E4M3)
        quant.mx_store(
            blocks.view(E8M0), data, at[:, 0], at[:, 1], plain[at[:, 0], at[:, 1]].view(E8M0)
        )
    k, v = torch.randn(2, 40, 2, 64).to(E4M3), torch.randn(2, 40, 2, 32).to(E4M3)
    q, sfq = torch.randn(2, 3, 4, 64).to(E4M3), torch.full((2, 3, 4, 2), 124, dtype=torch.uint8)
    arranged = {
        "plain": (plain_k, plain_v),
        "interleaved": (k_blocks, v_blocks),
        "squeezed": (k_blocks[:, :, 0, 0], v_blocks[:, :, 0]),
        "strided": tuple(
            x.transpose(0, 1).contiguous().transpose(0, 1) for x in (plain_k, plain_v)
        ),
    }[layout]
    sfk, sfv = (x.view(E8M0) for x in arranged)
    out = attend(q, k, v, cache_seqlens=33, causal=True, sfq=sfq.view(E8M0), sfk=sfk, sfv=sfv)
    wide = [
        quant.mx_dequantise(x, s, torch.float32) for x, s in ((q, sfq), (k, plain_k), (v, plain_v))
    ]
    expected = attend(*wide, cache_seqlens=33, causal=True)
    torch.testing.assert_close(out, expected.bfloat16(), rtol=2**-7, atol=1e-6)


def test_a_nan_scale_counts_where_it_is_seen() -> None:
    k, v = torch.randn(2, 1, 8, 1, 32).to(E4M3)
    scales = torch.full((2, 1, 8, 1, 1), 127, dtype=torch.uint8)
    scales[1, 0, 5] = 255
    q, one = torch.randn(1, 1, 1, 32).to(E4M3), torch.full((1, 1, 1, 1), 127, dtype=torch.uint8)
    call: dict[str, Any] = {"sfq": one.view(E8M0), "sfk": scales[0].view(E8M0)}
    call["sfv"] = scales[1].view(E8M0)
    assert attend(q, k, v, cache_seqlens=5, **call).isfinite().all()
    assert attend(q, k, v, cache_seqlens=6, **call).isnan().all()


def test_scales_per_32_tokens_take_no_append() -> None:
    cache = torch.zeros(2, 1, 64, 1, 32).to(E4M3)
    sfk = torch.zeros(1, 64, 1, 1, dtype=torch.uint8).view(E8M0)
    sfv = torch.zeros(1, 2, 1, 32, dtype=torch.uint8).view(E8M0)
    token = torch.randn(1, 1, 1, 32)
    with pytest.raises(E.MxScaleError, match="sfv"):
        kvattn.append_kv(token, token, *cache, cache_seqlens=0, sfk=sfk, sfv=sfv)
    assert not cache.view(torch.uint8).any() and not sfk.view(torch.uint8).any()

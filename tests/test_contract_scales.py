"""Descales, FP8, INT8 and MXFP8: every number written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import BF16, E4M3, E5M2, F16, F32, INT8, attend
from conftest import DEVICE
from torch import Tensor

import kvattn
from kvattn.testing import Case, Inputs, clone_inputs, interleave_scales, make_inputs


def per_head(scale: Tensor, group: int) -> Tensor:
    """(B, Hk) factors as (B, 1, H, 1)."""
    return scale.repeat_interleave(group, -1)[:, None, :, None]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("page_size", [None, 4])
def test_t46_t47_descales_multiply_by_batch_and_kv_head(
    backend: str, dtype: torch.dtype, rows: int | None, page_size: int | None
) -> None:
    """Indexed by b, not by the cache row; q and k scales are in the lse, v's is not."""
    batch_idx = None if rows is None else (4, 1)
    case = Case(lengths=(9, 30), heads=6, kv_heads=3, descale="heads", seqlen_q=2, rows=rows,
                batch_idx=batch_idx, page_size=page_size)  # fmt: skip
    inputs = make_inputs(case, device=DEVICE)
    for name in ("q", "k_cache", "v_cache"):
        inputs[name] = inputs[name].to(dtype)
    bare = {**inputs, "q_descale": None, "k_descale": None, "v_descale": None}
    both = inputs["q_descale"] * inputs["k_descale"]
    bare["q"] = inputs["q"].float() * per_head(both, 2)
    for name in ("k_cache", "v_cache"):
        bare[name] = inputs[name].float()
    wanted, wanted_lse = attend(backend, **bare)
    out, lse = attend(backend, **inputs)
    eps = torch.finfo(dtype).eps
    assert torch.allclose(
        out.float(), wanted * per_head(inputs["v_descale"], 2), rtol=8 * eps, atol=32 * eps
    )
    assert torch.allclose(lse, wanted_lse, atol=2e-4)
    without_v, lse_without_v = attend(backend, **{**inputs, "v_descale": None})
    assert torch.equal(lse, lse_without_v)
    assert not torch.equal(out, without_v)


def test_t46_every_shape_that_broadcasts(backend: str) -> None:
    """A float, 0-d, (1,), (Hk,), (B, 1), (1, Hk) and strided (B, Hk) mean what they say."""
    inputs = make_inputs(Case(lengths=(9, 30), kv_heads=2), device=DEVICE)
    whole = torch.tensor([[2.0, 2.0], [2.0, 2.0]], device=DEVICE)
    wanted, wanted_lse = attend(backend, **inputs, q_descale=whole, v_descale=whole)
    two: list[Any] = [
        2.0,
        2,
        whole[0, 0],
        whole[0, :1],
        whole[0],
        whole[:, :1],
        whole[:1],
        whole.t(),
    ]
    two.append(torch.zeros(2, 4, device=DEVICE).fill_(2.0)[:, ::2])
    for scale in two:
        out, lse = attend(backend, **inputs, q_descale=scale, v_descale=scale)
        assert torch.allclose(out, wanted, atol=1e-6)
        assert torch.allclose(lse, wanted_lse, atol=1e-6)
    rows = torch.tensor([[2.0], [1.0]], device=DEVICE)
    plain, _ = attend(backend, **inputs)
    out, _ = attend(backend, **inputs, v_descale=rows)
    assert torch.allclose(out, plain * rows[:, :, None, None])


def test_t48_out_dtypes(backend: str) -> None:
    """out has q's dtype; for FP8 queries v's if that is wide, else bf16."""
    for q, cache, wanted in (
        *((F16, F16, F16), (BF16, E4M3, BF16), (F32, E5M2, F32), (F32, BF16, F32)),
        *((E4M3, E4M3, BF16), (E5M2, E4M3, BF16), (F16, INT8, F16)),
    ):
        inputs = make_inputs(Case(dtype=q, cache_dtype=cache), device=DEVICE)
        out, lse = attend(backend, **inputs)
        assert out.dtype == wanted
        assert lse.dtype == F32
    mixed = Case(dtype=E4M3, value_dtype=F16, sfq="plain", sfk="plain")
    assert attend(backend, **make_inputs(mixed, device=DEVICE))[0].dtype == F16


@pytest.mark.parametrize(
    ("dtype", "given", "stored"),
    [
        (E4M3, [1.0, 448.0, 1e4, -1e4, math.inf, -math.inf], [1.0, 448, 448, -448, 448, -448]),
        (E5M2, [1.0, 57344.0, 1e6, -1e6, math.inf, -math.inf],
         [1.0, 57344, 57344, -57344, 57344, -57344]),
        (torch.int8, [0.5, 1.5, 1e4, -2.5, math.inf, -math.inf], [0, 2, 127, -2, 127, -127]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("source", [F32, BF16])
@pytest.mark.filterwarnings("ignore:numbers beyond")
def test_t48_append_saturates(
    backend: str, dtype: torch.dtype, given: list[float], stored: list[float], source: torch.dtype
) -> None:
    k = torch.tensor([*given, math.nan, 0.0], device=DEVICE).to(source).view(1, 1, 1, 8)
    cache = torch.zeros(1, 2, 1, 8, device=DEVICE).to(dtype)
    kvattn.append_kv(k, k, cache, cache.clone(), cache_seqlens=0, backend=backend)
    found = cache[0, 0, 0].float()
    assert found[:6].tolist() == stored
    assert found[6] == 0 if dtype is torch.int8 else found[6].isnan()


def test_t48_append_divides_by_the_descale(backend: str) -> None:
    """So that what is read back, value * descale, is the token again."""
    case = Case(lengths=(3, 0), new=2, cache_dtype=E4M3, descale="heads")
    inputs = make_inputs(case, device=DEVICE)
    attend(backend, **inputs)
    for b, old in enumerate((3, 0)):
        for name in ("k", "v"):
            scale = inputs[f"{name}_descale"][b][:, None]
            found = inputs[f"{name}_cache"][b, old : old + 2].float()
            wanted = (inputs[name][b] / scale).clamp(-448, 448).to(E4M3).float()
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, INT8])
@pytest.mark.parametrize("page_size", [None, 4])
def test_scales_per_token_are_written_and_read(
    backend: str, dtype: torch.dtype, page_size: int | None
) -> None:
    case = Case(batch=1, lengths=0, new=3, cache_dtype=dtype, descale="token", page_size=page_size)
    inputs = make_inputs(case, device=DEVICE)
    inputs["k"][0, 1] = 0.0
    out, _ = attend(backend, **inputs)
    limit = 127 if dtype == INT8 else torch.finfo(dtype).max
    amax = inputs["k"][0].abs().amax(-1)
    # Divided on the CPU: torch's GPU division by a number multiplies by its inverse.
    wanted = torch.where(amax > 0, (amax.cpu() / limit).to(amax.device), 1.0)
    scale = inputs["k_descale"]
    slots = inputs["page_table"][0, :1].long() if page_size else torch.tensor([0])
    assert torch.equal(scale[slots[0], :3], wanted)
    stored = inputs["k_cache"][slots[0], :3].float()
    step = 0.5 / 127 if dtype == INT8 else torch.finfo(dtype).eps / 2
    error = (stored * scale[slots[0], :3, :, None] - inputs["k"][0]).abs()
    assert (error <= step * amax[..., None] * 1.001).all()
    plain = make_inputs(Case(batch=1, lengths=0, new=3), device=DEVICE)
    exact, _ = attend("reference", **{**plain, **{name: inputs[name] for name in ("q", "k", "v")}})
    assert torch.allclose(out, exact, atol=0.2 if dtype == E5M2 else 0.1)


MX: dict[str, Any] = {"dtype": E4M3, "seqlen_q": 2, "lengths": (9, 200), "causal": True}
LAYOUTS: dict[str, Any] = {"sfq": "plain", "sfk": "plain", "sfv": "plain"}


def mx_value(data: Tensor, scale: Tensor) -> Tensor:
    """e4m3 * 2 ** (byte - 127), one byte per 32 channels."""
    powers = torch.exp2(scale.view(torch.uint8).double() - 127).float()
    return data.float() * powers.repeat_interleave(32, -1)


@pytest.mark.parametrize(("page_size", "dim"), [(64, 64), (128, 128), (256, 160), (None, 96)])
def test_t49_plain_and_interleaved_scales_are_identical(
    backend: str, page_size: int | None, dim: int
) -> None:
    """Rows are padded to 128 and groups to 4; dimensions of size 1 may be left out."""
    case = Case(page_size=page_size, dim=dim, capacity=200, **LAYOUTS, **MX)
    inputs = make_inputs(case, device=DEVICE)
    wanted, wanted_lse = attend(backend, **inputs)
    tiled = dict(inputs)
    for name in ("sfk", "sfv"):
        tiled[name] = interleave_scales(inputs[name].view(torch.uint8)).view(inputs[name].dtype)
    forms = [tiled]
    for axis in (2, 3):
        if tiled["sfk"].shape[axis] == 1:
            forms.append({**tiled, **{name: tiled[name].squeeze(axis) for name in ("sfk", "sfv")}})
    if page_size is None:
        sfq = interleave_scales(inputs["sfq"].view(torch.uint8)).view(inputs["sfq"].dtype)
        forms.append({**tiled, "sfq": sfq})
    for form in forms:
        out, lse = attend(backend, **form)
        assert torch.equal(out, wanted)
        assert torch.equal(lse, wanted_lse)


def test_t49_the_formula_of_an_interleaved_byte() -> None:
    plain = torch.randint(0, 255, (2, 300, 3, 6), dtype=torch.uint8)
    flat = interleave_scales(plain).flatten(2)
    for m, g in ((0, 0), (127, 5), (128, 3), (299, 4), (33, 1)):
        at = ((m // 128 * 2 + g // 4) * 32 + m % 32) * 16 + m % 128 // 32 * 4 + g % 4
        assert torch.equal(flat[1, :, at], plain[1, m, :, g])


@pytest.mark.parametrize("strided", [False, True])
def test_t49_scales_multiply_groups_of_32(backend: str, strided: bool) -> None:
    inputs = make_inputs(Case(dim=64, page_size=64, **LAYOUTS, **MX), device=DEVICE)
    bare = {**inputs, "sfq": None, "sfk": None, "sfv": None}
    bare["q"] = mx_value(inputs["q"], inputs["sfq"])
    for cache, scale in (("k_cache", "sfk"), ("v_cache", "sfv")):
        bare[cache] = mx_value(inputs[cache], inputs[scale])
    if strided:  # stored heads first
        for name in ("sfk", "sfv"):
            inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    wanted, wanted_lse = attend(backend, **bare)
    out, lse = attend(backend, **inputs)
    # A kernel rounds its weights to 16 bits: an error by the size of the values, not of their sum.
    rounding = 1e-6 if backend == "reference" else 2**-8 * float(wanted.abs().max())
    assert torch.allclose(out.float(), wanted, rtol=2**-8, atol=rounding)
    assert torch.allclose(lse, wanted_lse, atol=1e-4)


@pytest.mark.parametrize("with_keys", [True, False])
def test_t50_values_scaled_per_32_tokens(backend: str, with_keys: bool) -> None:
    """(pages, P / 32, Hk, Dv): one byte per 32 tokens and channel; also with 16-bit q and k."""
    layouts: dict[str, Any] = {"sfq": "plain", "sfk": "plain"} if with_keys else {}
    more = {**MX, "dtype": E4M3 if with_keys else BF16}
    case = Case(page_size=64, dim=64, value_dtype=E4M3, sfv="tokens", **layouts, **more)
    inputs = make_inputs(case, device=DEVICE)
    out, _ = attend(backend, **inputs)
    powers = torch.exp2(inputs["sfv"].view(torch.uint8).double() - 127)
    factor = powers.float().repeat_interleave(32, 1)
    bare = {**inputs, "sfq": None, "sfk": None, "sfv": None}
    bare["q"] = mx_value(inputs["q"], inputs["sfq"]) if with_keys else inputs["q"].float()
    bare["k_cache"] = (
        mx_value(inputs["k_cache"], inputs["sfk"]) if with_keys else inputs["k_cache"].float()
    )
    bare["v_cache"] = inputs["v_cache"].float() * factor
    assert torch.allclose(out.float(), attend(backend, **bare)[0], rtol=2**-7, atol=2e-2)


def test_t50_extreme_exponents(backend: str) -> None:
    """Bytes 0 and 254 are 2 ** -127 and 2 ** 127; 255 is NaN."""
    inputs = make_inputs(Case(batch=1, lengths=2, dim=32, **LAYOUTS, dtype=E4M3), device=DEVICE)
    ones = torch.ones(1, 1, device=DEVICE).to(E4M3)
    for name in ("k_cache", "v_cache"):
        inputs[name][:] = ones
    inputs["q"][:] = ones
    for name in ("sfq", "sfk"):
        inputs[name].view(torch.uint8).fill_(0)
    for byte, wanted in ((0, 2.0**-127), (254, 2.0**127), (127, 1.0)):
        if byte == 254 and backend != "reference":
            continue  # a kernel divides at the end: a sum of 2 ** 127 leaves fp32 before
        inputs["sfv"].view(torch.uint8).fill_(byte)
        out, lse = attend(backend, **inputs)
        assert torch.allclose(
            out.double(), torch.full_like(out.double(), wanted), rtol=2**-7, atol=0
        )
        assert torch.allclose(lse, torch.full_like(lse, math.log(2)))
    inputs["sfv"].view(torch.uint8).fill_(255)
    assert attend(backend, **inputs)[0].isnan().all()


@pytest.mark.parametrize("layout", ["plain", "interleaved"])
@pytest.mark.parametrize("source", [F32, BF16, F16])
def test_t49_an_append_quantises_and_writes_scales(
    backend: str, layout: str, source: torch.dtype
) -> None:
    """byte = ceil(log2(amax / 448)) + 127, 0 for a group of zeros; data are x / 2 ** exponent."""
    layouts: dict[str, Any] = {"sfq": "plain", "sfk": layout, "sfv": layout}
    case = Case(
        batch=1, lengths=2, new=4, new_dtype=source, dim=64, capacity=140, **layouts, dtype=E4M3
    )
    inputs = make_inputs(case, device=DEVICE)
    inputs["k"][0, 0, 0] = 0.0
    inputs["k"][0, 1, 0, :32] = 448.0  # exponent 0
    inputs["k"][0, 2, 0, :32] = 449.0 if source == F32 else 452.0  # exponent 1
    before = clone_inputs(inputs)
    attend(backend, **inputs)
    assert _kept(before, inputs)
    scale = _plain(inputs["sfk"], layout)[0, 2:6, :, :2].int()
    groups = inputs["k"][0].float().unflatten(-1, (2, 32))
    amax = groups.abs().amax(-1).double()
    exponent = torch.where(amax > 0, (amax / 448).log2().ceil(), -127.0)
    assert torch.equal(scale, (exponent + 127).int())
    assert scale[0, 0].tolist() == [0, 0]
    assert (scale[1, 0, 0], scale[2, 0, 0]) == (127, 128)
    wanted = (groups / torch.exp2(exponent.float())[..., None]).flatten(-2).to(E4M3)
    assert torch.equal(inputs["k_cache"][0, 2:6].float(), wanted.float())


def _plain(scale: Tensor, layout: str) -> Tensor:
    raw = scale.view(torch.uint8)
    if layout == "plain":
        return raw
    count, heads = raw.shape[:2]  # N, H, RM, RK, 32, 4, 4 -> N, (RM, 4, 32), H, (RK, 4)
    return raw.permute(0, 2, 5, 4, 1, 3, 6).reshape(count, -1, heads, raw.shape[3] * 4)


def _kept(before: Inputs, after: Inputs) -> bool:
    """Scales of the cached rows are as they were."""
    a, b = (_plain(x["sfv"], "plain" if x["sfv"].dim() == 4 else "") for x in (before, after))
    return torch.equal(a[0, :2], b[0, :2])


def test_t49_an_append_divides_by_the_descale_first(backend: str) -> None:
    """MXFP8 and a descale together: what is read back is still the token."""
    case = Case(batch=1, lengths=0, new=2, new_dtype=F32, dim=64, capacity=4, dtype=E4M3, **LAYOUTS)
    inputs = make_inputs(case, device=DEVICE)
    three = torch.tensor([[3.0, 0.01]], device=DEVICE)
    attend(backend, **inputs, k_descale=three, v_descale=three)
    found = mx_value(inputs["k_cache"], inputs["sfk"])[0, :2] * three[0][:, None]
    assert torch.allclose(found, inputs["k"][0], rtol=2**-3, atol=2e-3)


def test_lengths_may_differ_under_scales(backend: str) -> None:
    """A row of zero keys and an inactive one beside others, all with per-token scales."""
    case = Case(batch=3, lengths=(0, -1, 7), descale="token", cache_dtype=INT8, page_size=4)
    out, lse = attend(backend, **make_inputs(case, device=DEVICE))
    assert not out[:2].any()
    assert (lse[:2] == -math.inf).all()
    assert out[2].isfinite().all()

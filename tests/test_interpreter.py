"""The repaired interpreter computes what a GPU computes. test_mods starts the process for these."""

from __future__ import annotations

import pytest
import torch
from interpreter import INTERPRETED
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


@triton.jit
def doubled(x):  # type: ignore[no-untyped-def]
    return x + x


@triton.jit
def convert(OUT, X, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(OUT + at, tl.load(X + at).to(OUT.dtype.element_ty))


@triton.jit
def arithmetic(OUT, X, Y, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    x, y = tl.load(X + at), tl.load(Y + at)
    tl.store(OUT + at, tl.where(x < y, doubled(x) * y, x - y))


@triton.jit
def product(OUT, X, Y, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    square = at[:, None] * N + at[None, :]
    tl.store(OUT + square, tl.dot(tl.load(X + square), tl.load(Y + square)))


@triton.jit
def total(OUT, X, LENGTH):  # type: ignore[no-untyped-def]
    sum = 0.0
    for i in range(tl.load(LENGTH)):
        sum += tl.load(X + i)
    tl.store(OUT, sum)


@triton.jit
def branch(OUT, X, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    x = tl.load(X + at)
    if x > 0:
        tl.store(OUT + at, x)


def draw(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(n, generator=torch.Generator().manual_seed(0)) * 40
    return values.to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x.view(torch.int16)


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.bfloat16, 3e38), (torch.float8_e4m3fn, 448), (torch.float8_e5m2, 57344)],
)
@pytest.mark.parametrize("source", [torch.float32, torch.float16])
def test_casts_round_to_even_and_fp8_saturates(
    dtype: torch.dtype, largest: float, source: torch.dtype
) -> None:
    x = draw(1024)
    x[:8] = torch.tensor([0.0, -0.0, 1e5, -1e5, 2.0**-9, 3 * 2.0**-10, torch.inf, torch.nan])
    x = x.to(source)
    out = torch.empty(1024, dtype=dtype)
    convert[(1,)](out, x, 1024)
    want = x.float() if dtype == torch.bfloat16 else x.float().clamp(-largest, largest)
    assert torch.equal(bits(out), bits(want.to(dtype)))
    back = torch.empty(1024)
    convert[(1,)](back, out, 1024)
    torch.testing.assert_close(back, out.float(), rtol=0, atol=0, equal_nan=True)


def test_bfloat16_arithmetic_rounds_every_step() -> None:
    x, y = draw(512, torch.bfloat16), draw(512, torch.bfloat16).flip(0)
    out = torch.empty(512, dtype=torch.bfloat16)
    arithmetic[(1,)](out, x, y, 512)
    assert torch.equal(out, torch.where(x < y, (x + x) * y, x - y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_products_of_narrow_floats(dtype: torch.dtype) -> None:
    x, y = draw(1024, dtype).view(32, 32), draw(1024).flip(0).to(dtype).view(32, 32)
    out = torch.empty(32, 32)
    product[(1,)](out, x, y, 32)
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=1e-5, atol=1e-2)


def test_loops_up_to_a_loaded_bound() -> None:
    x, out = draw(9), torch.empty(1)
    total[(1,)](out, x, torch.tensor([5], dtype=torch.int32))
    torch.testing.assert_close(out[0], x[:5].sum())


def test_a_tile_decides_no_branch() -> None:
    x = draw(16)
    with pytest.raises(Exception, match="tile as a condition"):
        branch[(1,)](torch.empty(16), x, 16)

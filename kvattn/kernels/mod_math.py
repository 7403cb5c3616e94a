"""Device functions for score and mask mods: what torch computes and Triton's language lacks.

Built from exp2, log2, floor and division, so that they run in Triton's interpreter too. Tiles of
int32, int64, fp32 or fp64; relative errors are below 1e-6 in fp32 unless a function says more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvattn.kernels import tile

_READ = tl.constexpr("""{
    .reg .pred inside;
    setp.ne.b32 inside, $2, 0;
    mov.b32 $0, 0;
    @inside ld.global.nc.b32 $0, [$1];
}""")


@triton.constexpr_function
def _for_scores(at):
    return len(at.shape) > 1 and min(map(int, at.shape)) > 1


@triton.jit
def fetch(at, inside):
    """The elements at addresses that are `inside` a captured tensor, 0 for the others.

    A load for every score is an instruction of its own: Triton would give it another layout than
    the scores', and stage it through shared memory four bytes at a time.
    """
    WORDS: tl.constexpr = at.dtype.element_ty.primitive_bitwidth == 32
    if tile.PTX and WORDS and _for_scores(at):
        return tl.inline_asm_elementwise(
            _READ, "=r,l,r", [at.to(tl.int64), inside.to(tl.int32)],
            dtype=at.dtype.element_ty, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.load(at, mask=inside, other=0)


@triton.jit
def wrapped(i, n):
    """An index that may count from the end; what is neither stays outside of 0..n."""
    if i.dtype == tl.int32:
        back = (i + n).to(tl.int32).to(tl.uint32, bitcast=True)
        return tl.minimum(i.to(tl.uint32, bitcast=True), back).to(tl.int32, bitcast=True)
    else:
        return tl.where(i < 0, i + n, i)


@triton.jit
def minimum(x, y):
    """NaN wins, as in torch."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(x, y):
    """NaN wins, as in torch."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def floor_div(x, y):
    """Integers, rounded down; Triton's own // rounds towards zero."""
    q = x // y
    return tl.where((x % y != 0) & ((x < 0) != (y < 0)), q - 1, q)


@triton.jit
def floor_mod(x, y):
    """Integers, with the sign of y; Triton's own % takes the sign of x."""
    r = x % y
    return tl.where((r != 0) & ((r < 0) != (y < 0)), r + y, r)


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_even(x):
    """To the nearest integer, ties to the even one."""
    low = tl.floor(x)
    rest = x - low
    odd = low != 2.0 * tl.floor(low * 0.5)
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), low + 1.0, low)


@triton.jit
def fmod(x, y):
    """x - y * trunc(x / y) for quotients below 2**24; a quotient rounded up is taken back."""
    a = tl.abs(x)
    b = tl.abs(y)
    r = tl.fma(-tl.floor(a / b), b, a)
    r = tl.where(r < 0, r + b, tl.where(r >= b, r - b, r))
    r = tl.where(b == float("inf"), a, r)
    return tl.where(x < 0, -r, r)


@triton.jit
def float_mod(x, y):
    """The remainder with the sign of y."""
    r = fmod(x, y)
    return tl.where((r != 0) & ((r < 0) != (y < 0)), r + y, r)


@triton.jit
def float_floor_div(x, y):
    """floor(x / y) that agrees with float_mod; an infinite quotient stays infinite."""
    q = round_even((x - float_mod(x, y)) / y)
    return tl.where(y == 0, x / y, q)


@triton.jit
def shift_left(x, n, BITS: tl.constexpr):
    """0 once every bit has gone; the hardware would take n modulo the width."""
    inside = (n >= 0) & (n < BITS)
    return tl.where(inside, x << tl.where(inside, n, 0), 0)


@triton.jit
def shift_right(x, n, BITS: tl.constexpr):
    """Keeps the sign; only the sign is left once every bit has gone."""
    return x >> tl.where((n >= 0) & (n < BITS), n, BITS - 1)


@triton.jit
def tanh(x):
    """A quotient of polynomials, fitted to a relative error of 1.3e-6; 1 from 7.2 on."""
    x = minimum(maximum(x, -7.2), 7.2)
    z = x * x
    p = 2.271486216718949e-3 + z * 3.8919301999502455e-6
    p = 0.9999987837086709 + z * (0.12298248038942235 + z * p)
    q = 2.1051819587076463e-2 + z * 1.4161436615467405e-4
    q = 1.0 + z * (0.4563067121855403 + z * q)
    return x * p * tile.reciprocal(q)


@triton.jit
def tanh_approx(x):
    """By one instruction where there is one, off by 2^-11 of the value."""
    if tile.PTX and x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tanh(x)


@triton.jit
def softcap(x, rate: tl.constexpr, cap: tl.constexpr):
    """cap * tanh(x * rate) of scores, off by at most 2e-6 * cap: for caps up to 128."""
    return tile.capped(x, rate * 2.8853900817779268, cap)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def expm1(x):
    t = tanh(0.5 * x)
    return tl.where(tl.abs(x) < 0.5, 2.0 * t / (1.0 - t), tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """log(u) for u = 1 + x, times x / (u - 1), which takes back the rounding of u."""
    u = 1.0 + x
    d = u - 1.0
    y = tl.log(u)
    small = tl.where(d == 0, x, y * (x / tl.where(d == 0, 1.0, d)))
    return tl.where(u == float("inf"), y, small)


@triton.jit
def softplus(x, beta, threshold):
    z = x * beta
    return tl.where(z > threshold, x, log1p(tl.exp(minimum(z, threshold))) / beta)


@triton.jit
def logaddexp(x, y):
    high = maximum(x, y)
    low = minimum(x, y)
    return tl.where(high == low, high + 0.6931471805599453, high + log1p(tl.exp(low - high)))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def power(x, y):
    """x ** y of floats; the relative error grows with |y * log2(x)|, 5e-6 at most in fp32."""
    a = tl.abs(x)
    p = tl.where((y == 0) | (x == 1), 1.0, tl.exp2(y * tl.log2(a)))
    whole = y == tl.floor(y)
    odd = whole & (y != 2.0 * tl.floor(y * 0.5))
    negative = tl.where(whole, tl.where(odd, -p, p), float("nan"))
    return tl.where((x < 0) & (a != float("inf")), negative, p)


@triton.jit
def int_power(x, n):
    """x ** n of integers, which wraps on overflow; 0 for negative n unless x is 1 or -1."""
    y = x * 0 + 1
    square = x
    left = tl.maximum(n, 0)
    for _ in tl.static_range(31):
        y = tl.where(left & 1 != 0, y * square, y)
        square = square * square
        left = left >> 1
    flipped = tl.where((x == 1) | (x == -1), tl.where(n & 1 != 0, x, 1), 0)
    return tl.where(n < 0, flipped, y)

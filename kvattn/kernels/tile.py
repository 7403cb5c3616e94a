"""Device functions that the kernels share: narrow dtypes, rotary pairs, tanh, sequence look-up.

FP8 is decoded and encoded in integer arithmetic: the same bits on every GPU, native FP8 or not.
"""

import triton
import triton.language as tl

# KIND, how a cache's elements are stored: 0 wide floats, 1 e4m3 and 2 e5m2 as bytes, 3 int8.


@triton.jit
def widen(x, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """A stored tile in the dtype that is multiplied."""
    if KIND == 1:
        bits = x.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # exponent bias 7 read as 15
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
        return value.to(DTYPE)
    elif KIND == 2:
        bits = x.to(tl.int16) << 8
        return bits.to(tl.float16, bitcast=True).to(tl.float32).to(DTYPE)
    else:
        return x.to(tl.float32).to(DTYPE)


@triton.jit
def narrow(x, KIND: tl.constexpr):
    """fp32 to the bytes of a cache: FP8 saturates and keeps NaN, int8 rounds half to even."""
    if KIND == 3:
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
        x = tl.where(x == x, x, 0.0)
        shifted = x + 12582912.0  # 1.5 * 2**23: the sum rounds to an integer, half to even
        code = (shifted - 12582912.0).to(tl.int8)
    else:
        MANT: tl.constexpr = 3 if KIND == 1 else 2
        BIAS: tl.constexpr = 7 if KIND == 1 else 15
        LIMIT: tl.constexpr = 448.0 if KIND == 1 else 57344.0
        NAN: tl.constexpr = 0x7F if KIND == 1 else 0x7E
        bits = x.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        size = tl.minimum(size, LIMIT)
        raw = size.to(tl.int32, bitcast=True)
        drop: tl.constexpr = 23 - MANT
        rounded = raw + ((1 << (drop - 1)) - 1) + ((raw >> drop) & 1)
        normal = (rounded >> drop) - ((127 - BIAS) << MANT)
        # below the smallest normal number the steps are even: add and take away 1.5 * 2**23 of them
        steps = (size * (2.0 ** (BIAS - 1 + MANT)) + 12582912.0) - 12582912.0
        small = size < 2.0 ** (1 - BIAS)
        code = tl.where(small, steps.to(tl.int32), normal)
        code = (tl.where(x == x, code, NAN) | sign).to(tl.uint8)
    return code


@triton.jit
def rotate(x, partner, cos, sin, second):
    """One channel of a rotary pair: x1 cos - x2 sin, or x2 cos + x1 sin for the second."""
    turned = partner * sin
    return tl.where(second, x * cos + turned, x * cos - turned)


@triton.jit
def tanh(x):
    """tanh to fp32 accuracy: a series near 0, where 1 - 2 / (e^2x + 1) would cancel."""
    size = tl.abs(x)
    square = x * x
    series = 62.0 / 2835.0 * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = (series * square - 1.0 / 3.0) * square * x + x
    far = 1.0 - 2.0 / (tl.exp2(tl.minimum(size, 20.0) * 2.8853900817779268) + 1.0)
    return tl.where(size < 0.35, series, tl.where(x < 0, -far, far))


@triton.jit
def floor_to(x, step):
    """The multiple of step at or below x, for negative x too."""
    rest = x % step
    return x - tl.where(rest < 0, rest + step, rest)


@triton.jit
def find_tile(EDGES, count, tile, group, BM: tl.constexpr):
    """The sequence of a row tile: its first tile is edges[b] * group // BM + b."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(EDGES + middle) * group // BM + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def find_row(EDGES, count, row):
    """The sequence that a row of a ragged tensor belongs to."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(EDGES + middle) <= row:
            low = middle
        else:
            high = middle
    return low

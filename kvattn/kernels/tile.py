"""Device functions that the kernels share: narrow dtypes, queries, the keys of a sequence, tanh.

FP8 is decoded and encoded in integer arithmetic: the same bits on every GPU, native FP8 or not.
"""

import os

import torch
import triton
import triton.language as tl

PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None)

# KIND, how a cache's elements are stored: 0 wide floats, 1 e4m3 and 2 e5m2 as bytes, 3 int8.

_EVERYWHERE = tl.constexpr("")  # caches that a load goes through


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
    """fp32 as a cache's bytes: FP8 saturates and keeps NaN; int8 rounds half to even, NaN is 0."""
    if KIND == 3:
        x = tl.where(x == x, x, 0.0)  # first: the larger of NaN and a number is the number
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
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
def rotate(x, partner, cos, sin, second, zero):
    """One channel of a rotary pair: x1 cos - x2 sin, or x2 cos + x1 sin for the second.

    Products are rounded before they are added, as plain torch does: a zero that only the device
    knows is added to their bits, and no compiler fuses across that.
    """
    straight = ((x * cos).to(tl.int32, bitcast=True) + zero).to(tl.float32, bitcast=True)
    turned = ((partner * sin).to(tl.int32, bitcast=True) + zero).to(tl.float32, bitcast=True)
    return tl.where(second, straight + turned, straight - turned)


@triton.jit
def squares(x, KIND: tl.constexpr):
    """Sums of squares over the last dimension, which stays; in fp64 no order of adding shows."""
    wide = widen(x, KIND, tl.float32).to(tl.float64)
    return tl.sum(wide * wide, len(x.shape) - 1, keep_dims=True)


@triton.jit
def inverse_rms(total, D: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(mean square + EPS) in fp32 from sums of squares: the nearest number.

    Newton's step in fp64 doubles the digits of a guess, and has no branches.
    """
    mean = (total * (1.0 / D) + EPS).to(tl.float32)
    guess = tl.rsqrt(mean).to(tl.float64)
    better = guess * (1.5 - 0.5 * mean.to(tl.float64) * guess * guess)
    return tl.where(mean == float("inf"), 0.0, better.to(tl.float32))


@triton.jit
def query_squares(X, rows, d, live, D: tl.constexpr, KIND: tl.constexpr, MORE: tl.constexpr):
    """`squares` of query rows; MORE channels follow behind those of d."""
    inside = live[:, None] & (d < D)[None, :]
    total = squares(tl.load(X + rows[:, None] + d[None, :], mask=inside, other=0), KIND)
    if MORE > 0:
        e = d.shape[0] + tl.arange(0, MORE)
        inside = live[:, None] & (e < D)[None, :]
        total += squares(tl.load(X + rows[:, None] + e[None, :], mask=inside, other=0), KIND)
    return total


@triton.jit
def query_rms(
    X, rows, d, live, D: tl.constexpr, KIND: tl.constexpr, EPS: tl.constexpr, MORE: tl.constexpr
):
    """What query rows are multiplied by in order to be normalised, [BM, 1]."""
    return inverse_rms(query_squares(X, rows, d, live, D, KIND, MORE), D, EPS)


@triton.jit
def rounded(x, OWN: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """fp32 rounded to a tensor's own dtype, in the dtype that is multiplied."""
    if KIND == 0:
        return x.to(OWN).to(tl.float32).to(DTYPE)
    else:
        return widen(narrow(x, KIND), KIND, tl.float32).to(DTYPE)


@triton.jit
def query(X, rows, d, live, NORM, rms, D: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Query rows [BM, D] in the dtype that is multiplied; rows holds element offsets.

    With weights NORM they are normalised by rms, 1 / sqrt(mean square) of each row [BM, 1].
    """
    x = tl.load(X + rows[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0)
    if NORM is None:
        return widen(x, KIND, DTYPE)
    else:
        weight = tl.load(NORM + d, mask=d < D, other=0).to(tl.float32)[None, :]
        wide = widen(x, KIND, tl.float32) * rms * weight
        return rounded(wide, X.dtype.element_ty, DTYPE, KIND)


@triton.jit
def rotated(
    X, rows, d, live, NORM, rms, COS, SIN, place, positions,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    DTYPE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The same, then rotated to each row's position; rounded to the query's dtype once."""
    inside = live[:, None] & (d < D)[None, :]
    x = tl.load(X + rows[:, None] + d[None, :], mask=inside, other=0)
    if INTERLEAVED:
        pair = d // 2
        second = (d % 2) == 1
        partner = d ^ 1
    else:
        pair = d % HALF
        second = d >= HALF
        partner = tl.where(second, d - HALF, d + HALF)
    known = live & (place >= 0) & (place < positions)
    turn = known[:, None] & (d < 2 * HALF)[None, :]
    at = place[:, None] * HALF + pair[None, :]
    cos = tl.load(COS + at, mask=turn, other=1).to(tl.float32)
    sin = tl.load(SIN + at, mask=turn, other=0).to(tl.float32)
    other = tl.load(X + rows[:, None] + partner[None, :], mask=turn, other=0)
    wide = widen(x, KIND, tl.float32)
    other = widen(other, KIND, tl.float32)
    if NORM is not None:
        weight = tl.load(NORM + d, mask=d < D, other=0).to(tl.float32)
        wide = wide * rms * weight[None, :]
        weight = tl.load(NORM + partner, mask=d < 2 * HALF, other=0).to(tl.float32)
        other = other * rms * weight[None, :]
    turned = rotate(wide, other, cos, sin, second[None, :], positions >> 31)
    if NORM is not None:
        return rounded(tl.where(turn, turned, wide), X.dtype.element_ty, DTYPE, KIND)
    elif KIND == 0:
        return tl.where(turn, turned.to(X.dtype.element_ty), x).to(tl.float32).to(DTYPE)
    else:
        turned = widen(narrow(turned, KIND), KIND, tl.float32)
        return tl.where(turn, turned, wide).to(DTYPE)


@triton.jit
def keys_of(
    b, LENGTHS, K_EDGES, NEW_EDGES, LEFTPAD, ROWS, steps, capacity, rows, INCLUDED: tl.constexpr,
    CACHED: tl.constexpr = _EVERYWHERE,
):  # fmt: skip
    """Where sequence b's keys are: (line of the table or cache, its shift in a packed cache,
    first row, logical keys, rows before the new tokens, whether it takes part)."""
    zero = (b * 0).to(tl.int32)
    start = zero
    if LEFTPAD is not None:
        start = tl.maximum(tl.load(LEFTPAD + b), 0)
    line = b
    if ROWS is not None:
        line = tl.load(ROWS + b, cache_modifier=CACHED).to(tl.int64)
    shift = b * 0
    limit = zero + capacity
    if K_EDGES is not None:
        shift = tl.maximum(tl.load(K_EDGES + b), 0).to(tl.int64)
        limit = tl.minimum(tl.load(K_EDGES + b + 1), capacity) - shift.to(tl.int32)
    active = (line >= 0) & (line < rows)
    end = limit
    old = end
    if LENGTHS is not None:
        end = tl.load(LENGTHS + b, cache_modifier=CACHED)
        active = active & (end >= 0)
        fresh = steps
        if NEW_EDGES is not None:
            fresh = tl.load(NEW_EDGES + b + 1) - tl.load(NEW_EDGES + b)
        if INCLUDED:
            old = end - fresh
        else:
            old = end
            end = end + fresh
        end = tl.minimum(end, limit)
    keys = tl.where(active, tl.maximum(end - start, 0), 0)
    return line, shift, start, keys, old, active


@triton.jit
def common_until(keys, old, queries, right, common, HAS_RIGHT: tl.constexpr):
    """The keys, from the first on, that a sequence shares with all others and every row sees.

    Whole blocks of 128, and none that this call appends: they are multiples of all tiles.
    """
    until = tl.minimum(common, tl.minimum(keys, old))
    if HAS_RIGHT:
        until = tl.minimum(until, keys - queries + right + 1)
    return tl.maximum(until, 0) // 128 * 128


@triton.jit
def common_on_device(LENGTH, least, shares):
    """(keys, shares) of a common prefix whose length the device knows: none of a shorter one."""
    keys = tl.load(LENGTH)
    pays = keys >= least
    return tl.where(pays, keys, 0), tl.where(pays, shares, 0)


@triton.jit
def seen(
    first_place, last_place, keys, left, right, chunk,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """The interval of keys that rows at first_place..last_place can see between them."""
    low = keys * 0
    high = keys
    if HAS_LEFT:
        low = tl.maximum(low, first_place - left)
    if HAS_RIGHT:
        high = tl.minimum(high, last_place + right + 1)
    if CHUNKED:
        low = tl.maximum(low, floor_to(first_place, chunk))
        high = tl.minimum(high, floor_to(last_place, chunk) + chunk)
    return low, tl.maximum(high, 0)


@triton.jit
def seen_by_all(
    first_place, last_place, low, high, left, right, chunk,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """The part of low..high that each of these rows sees; none is left where bound <= free."""
    free = low
    bound = high
    if HAS_LEFT:
        free = tl.maximum(free, last_place - left)
    if HAS_RIGHT:
        bound = tl.minimum(bound, first_place + right + 1)
    if CHUNKED:
        free = tl.maximum(free, floor_to(last_place, chunk))
        bound = tl.minimum(bound, floor_to(first_place, chunk) + chunk)
    return free, bound


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
def reciprocal(x):
    """1 / x within 1 ulp for fp32 that is not denormal, by one instruction where there is one."""
    if PTX and x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def below_cap(x, rate, size):
    """size * (tanh(x * rate / 2.885) - 1) / 2 in fp32, off by at most 1e-6 * size.

    2.885 is 2 * log2(e). Near 0 it has no relative accuracy: for caps up to 128 only. The
    reciprocal of 1 + e^2x is a guess by bits and a polynomial: special functions run short.
    """
    a = 1.0 + tl.exp2(tl.minimum(x * rate, 60.0, propagate_nan=tl.PropagateNan.ALL))
    guess = (0x7EF31000 - a.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    rest = 1.0 - a * guess
    p = rest * (-1.0026876726928229 * size) - 1.0025565432630816 * size
    p = rest * (rest * p - 0.9999990178309763 * size) - 0.9999991845731803 * size
    return p * guess


@triton.jit
def capped(x, rate, cap):
    """cap * tanh(x * rate / 2.885), off by at most 2e-6 * cap."""
    return cap + below_cap(x, rate, 2.0 * cap)


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


@triton.jit
def find_rows(EDGES, count, row, guess):
    """The sequences that rows of a ragged tensor belong to, of rows that are somebody's.

    Sequences with as many rows each are guessed, which takes one round of loads.
    """
    sure = (tl.load(EDGES + guess) <= row) & (row < tl.load(EDGES + guess + 1))
    sure = sure | (row >= tl.load(EDGES + count))
    b = guess
    if tl.min(sure.to(tl.int32), 0) == 0:
        b = guess * 0
        left = count
        while left > 1:
            half = left // 2
            b = tl.where(tl.load(EDGES + b + half) <= row, b + half, b)
            left -= half
    return b


@triton.jit
def bounded(low, high, first, end, live):
    """What of the keys low..high the intervals first..end of the live rows reach between them."""
    far: tl.constexpr = 2147483647
    first = tl.min(tl.where(live, first, far))
    end = tl.max(tl.where(live, end, 0))
    return tl.minimum(tl.maximum(low, first), tl.maximum(high, 0)), tl.minimum(high, end)

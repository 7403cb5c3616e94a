"""Appending: one launch that normalises, rotates, quantises and stores new keys and values.

One program a token and kv head; it finds its slot on the device, and an index that points outside
the cache is predicated off.
"""

import triton
import triton.language as tl

from kvattn.kernels import tile

# SCALING, how a wider token becomes a narrow one: 0 as it is; 1 divided by a factor per (sequence,
# kv head); 2 divided by a factor per token and head, measured and stored here. MX then takes out a
# power of two per 32 channels.


@triton.jit
def append(
    K, V, K_CACHE, V_CACHE,
    LENGTHS, EDGES, ROWS, PAGES, SLOTS, BASES, COS, SIN, K_NORM,
    K_SCALE, V_SCALE, SFK, SFV,
    k_strides, v_strides, k_cache_strides, v_cache_strides,
    k_scale_strides, v_scale_strides, sfk_strides, sfv_strides,
    table_stride, batch, steps, rows, blocks, size, capacity, positions,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr, V_KIND: tl.constexpr, CAST: tl.constexpr, V_CAST: tl.constexpr,
    SCALING: tl.constexpr, V_SCALING: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Grid: tokens * heads. `blocks` pages or rows of `size` slots; `rows` lines of the table."""
    program = tl.program_id(0)
    token = (program // HEADS).to(tl.int64)
    head = (program % HEADS).to(tl.int64)
    keep = token >= 0
    if EDGES is None:
        owner = token // steps
        step = token % steps
        count = steps
        k_at = owner * k_strides[0] + step * k_strides[1] + head * k_strides[2]
        v_at = owner * v_strides[0] + step * v_strides[1] + head * v_strides[2]
    else:
        keep = token < tl.load(EDGES + batch)
        owner = tile.find_row(EDGES, batch, token).to(tl.int64)
        first = tl.load(EDGES + owner)
        step = token - first
        count = tl.load(EDGES + owner + 1) - first
        k_at = token * k_strides[1] + head * k_strides[2]
        v_at = token * v_strides[1] + head * v_strides[2]
    length = token * 0
    if LENGTHS is not None:
        length = tl.load(LENGTHS + owner).to(tl.int64)
        keep = keep & (length >= 0)
    if SLOTS is not None:
        slot = tl.load(SLOTS + token)
        keep = keep & (slot >= 0) & (slot < blocks * size)
        block = slot // size
        offset = slot % size
        base = length - count
    else:
        base = length
        row = length + step
        keep = keep & (row < capacity)
        line = owner
        if ROWS is not None:
            line = tl.load(ROWS + owner).to(tl.int64)
            keep = keep & (line >= 0) & (line < rows)
        if PAGES is None:
            block = line
            offset = row
        else:
            at = PAGES + line * table_stride + row // size
            block = tl.load(at, mask=keep, other=-1).to(tl.int64)
            offset = row % size
            keep = keep & (block >= 0) & (block < blocks)
    if BASES is not None:
        base = tl.load(BASES + owner).to(tl.int64)
    place = base + step
    turning = keep & (place >= 0) & (place < positions)
    d = tl.arange(0, DP)
    e = tl.arange(0, DVP)
    rms = None
    if K_NORM is not None:
        x = tl.load(K + k_at + d, mask=(d < D) & keep, other=0)
        rms = tile.inverse_rms(tile.squares(x, 0 if CAST else KIND), D, EPS)
    x = as_stored(
        K + k_at, d, K_NORM, rms, K_SCALE, SFK, owner, head, block, offset, keep, turning, place,
        COS, SIN, positions, k_scale_strides, sfk_strides,
        D, DP, HALF, INTERLEAVED, KIND, CAST, SCALING, SFK is not None, K_CACHE.dtype.element_ty,
    )  # fmt: skip
    y = as_stored(
        V + v_at, e, None, None, V_SCALE, SFV, owner, head, block, offset, keep, turning, place,
        COS, SIN, positions, v_scale_strides, sfv_strides,
        DV, DVP, 0, INTERLEAVED, V_KIND, V_CAST, V_SCALING, SFV is not None,
        V_CACHE.dtype.element_ty,
    )  # fmt: skip
    at = block * k_cache_strides[0] + offset * k_cache_strides[1] + head * k_cache_strides[2]
    tl.store(K_CACHE + at + d, x, mask=(d < D) & keep)
    at = block * v_cache_strides[0] + offset * v_cache_strides[1] + head * v_cache_strides[2]
    tl.store(V_CACHE + at + e, y, mask=(e < DV) & keep)


@triton.jit
def as_stored(
    X, d, NORM, rms, SCALE, SF, owner, head, block, offset, keep, turning, place, COS, SIN,
    positions, scale_strides, sf_strides,
    D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr, CAST: tl.constexpr, SCALING: tl.constexpr, MX: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """One head of tokens: times weights NORM and rms, the inverse of its size, if there are any,
    then rotated, rounded to its own dtype, and made what the cache stores.

    d holds the channels; X, block, offset and the rest are of one token, or of several along the
    dimensions that d leaves at 1. Measured scales (SCALING 2, MX) are for one token.
    """
    inside = (d < D) & keep
    x = tl.load(X + d, mask=inside, other=0)
    FROM: tl.constexpr = 0 if CAST else KIND
    if NORM is not None:
        weight = tl.load(NORM + d, mask=d < D, other=0).to(tl.float32)
        wide = tile.widen(x, FROM, tl.float32) * rms * weight
    if HALF > 0:
        if INTERLEAVED:
            pair = d // 2
            second = (d % 2) == 1
            partner = d ^ 1
        else:
            pair = d % HALF
            second = d >= HALF
            partner = tl.where(second, d - HALF, d + HALF)
        turn = (d < 2 * HALF) & turning
        cos = tl.load(COS + place * HALF + pair, mask=turn, other=1).to(tl.float32)
        sin = tl.load(SIN + place * HALF + pair, mask=turn, other=0).to(tl.float32)
        other = tile.widen(tl.load(X + partner, mask=turn, other=0), FROM, tl.float32)
        if NORM is None:
            wide = tile.widen(x, FROM, tl.float32)
        else:
            weight = tl.load(NORM + partner, mask=d < 2 * HALF, other=0).to(tl.float32)
            other = other * rms * weight
        turned = tile.rotate(wide, other, cos, sin, second, positions >> 31)
        if NORM is not None:
            wide = tl.where(turn, turned, wide)
        elif FROM == 0:
            x = tl.where(turn, turned.to(x.dtype), x)
        else:
            x = tl.where(turn, tile.narrow(turned, FROM), x)
    if NORM is not None:
        if FROM == 0:
            x = wide.to(x.dtype)
        else:
            x = tile.narrow(wide, FROM)
    if CAST:
        wide = x.to(tl.float32)
        if SCALING == 1:
            factor = tl.load(SCALE + owner * scale_strides[0] + head * scale_strides[1])
            wide = tl.div_rn(wide, factor + tl.zeros_like(wide))
        elif SCALING == 2:
            LIMIT: tl.constexpr = 448.0 if KIND == 1 else (57344.0 if KIND == 2 else 127.0)
            factor = tl.div_rn(tl.max(_size(wide, inside), 0), LIMIT)
            factor = tl.where(factor > 0, factor, 1.0)
            at = block * scale_strides[0] + offset * scale_strides[1] + head * scale_strides[2]
            tl.store(SCALE + at, factor, mask=keep)
            wide = tl.div_rn(wide, factor + tl.zeros([DP], tl.float32))
        if MX:
            amax = tl.max(tl.reshape(_size(wide, inside), (DP // 32, 32)), 1)
            exponent = _mx_exponent(amax)
            group = tl.arange(0, DP // 32)
            at = block * sf_strides[0] + head * sf_strides[2] + _mx_at(offset, group, sf_strides)
            tl.store(SF + at, (exponent + 127).to(tl.uint8), mask=keep & (group < D // 32))
            power = tl.broadcast_to(exponent[:, None], (DP // 32, 32))
            power = tl.reshape(power, (DP,))
            half = power >> 1  # two factors: 2 ** 127 times 2 ** -254 would not be one number
            wide = wide * tl.exp2(-half.to(tl.float32)) * tl.exp2((half - power).to(tl.float32))
        if KIND == 0:
            x = wide.to(DTYPE)
        else:
            x = tile.narrow(wide, KIND)
    return x


@triton.jit
def _size(x, inside):
    """Magnitudes to measure a scale by: NaN is passed over, infinity is the largest number."""
    size = tl.where(inside & (x == x), tl.abs(x), 0.0)
    return tl.minimum(size, 3.4028234663852886e38)


@triton.jit
def _mx_exponent(amax):
    """ceil(log2(amax / 448)) limited to +-127, -127 for 0, from the bits of amax."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127
    over = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 = 1.75 * 2 ** 8
    result = tl.minimum(tl.maximum(exponent - 8 + over, -127), 127)
    return tl.where(amax > 0, result, -127)


@triton.jit
def _mx_at(row, group, strides):
    """The offset of scale (row, group): plain, or (RM, RK, 32, 4, 4) interleaved blocks."""
    if len(strides) == 4:
        at = row * strides[1] + group * strides[3]
    else:
        at = (row // 128) * strides[1] + (group // 4) * strides[3] + (row % 32) * strides[4]
        at += (row % 128) // 32 * strides[5] + (group % 4) * strides[6]
    return at

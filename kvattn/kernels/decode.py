"""Decode: few query rows over a long cache; the new tokens are stored on the way.

Keys run over the warps: each warp owns NK keys of a tile, its own running maximum and its own
sums, so that the loop over tiles has no exchange between warps. S = Q K^T has the packed query
rows on M; O^T = V^T P^T has them on N, where the scores are an operand as they stand.

One program takes the tiles of one share of a sequence. Shares are dealt out on the device, in
proportion to the lengths; the last program of a sequence to arrive merges them.
"""

import triton
import triton.language as tl

from kvattn.kernels import append, combine, narrow, shares, tile


@triton.jit
def _pages(
    LINE, n, lane, start, last, PAGE: tl.constexpr, NK: tl.constexpr, W: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """The table's entries for the tile at n: one, one a warp, or one a key (SPREAD 0, 1, 2)."""
    if LINE is None:
        return n * 0
    elif SPREAD == 0:
        return tl.load(LINE + tl.minimum(n // PAGE, last))
    elif SPREAD == 1:
        return tl.load(LINE + tl.minimum((n + tl.arange(0, W) * NK) // PAGE, last))
    else:
        return tl.load(LINE + tl.minimum((n + lane + start) // PAGE, last))


@triton.jit
def _cached(
    X, base, lanes, d, ok, D: tl.constexpr, DP: tl.constexpr, DTYPE: tl.constexpr,
    KIND: tl.constexpr, NATIVE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Cached rows as [W, D, NK] in the dtype that is multiplied; dead rows and channels are 0."""
    at = X + base + lanes[:, None, :] + d[None, :, None]
    if MASKED:
        x = tl.load(at, mask=ok[:, None, :] & (d < D)[None, :, None], other=0)
    elif D == DP:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(d < D)[None, :, None], other=0)
    if KIND == 0:
        return x
    elif NATIVE and KIND < 3:
        narrow: tl.constexpr = tl.float8e4nv if KIND == 1 else tl.float8e5
        return x.to(narrow, bitcast=True).to(tl.float16).to(DTYPE)
    else:
        return tile.widen(x, KIND, DTYPE)


@triton.jit
def _folded(x, W: tl.constexpr):
    """The sum over the last dimension, of size W, within each thread."""
    if W == 1:
        return tl.reshape(x, (x.shape[0], x.shape[1]))
    else:
        a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], W // 2, 2)))
        return _folded(a + b, W // 2)


@triton.jit
def _edited(
    s, b, head, token, place, live, j, q_first, shift, q_len, keys, right, distances, softcap,
    slope, REL_BIAS, SCORE_AUX, bias_strides, HAS_RIGHT: tl.constexpr, SCORE_MOD: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Scores [W, R, NK] with all that the call adds to them, in the contract's order, in base 2."""
    distance = place[None, :, None] - j[:, None, :]
    if REL_BIAS is not None:
        bias_at = distance + right
        if not HAS_RIGHT:
            bias_at = (keys - 1 - j)[:, None, :] + place[None, :, None] * 0
        known = (bias_at >= 0) & (bias_at < distances) & live[None, :, None]
        row = b * bias_strides[0] + (q_first + token).to(tl.int64) * bias_strides[1]
        row += head * bias_strides[2]
        bias = tl.load(REL_BIAS + row[None, :, None] + bias_at * bias_strides[3], known, other=0)
        s += bias.to(tl.float32)
    if SCORE_MOD is not None:
        s = SCORE_MOD(s, b.to(tl.int32), head[None, :, None].to(tl.int32), token[None, :, None],
                      j[:, None, :], q_first, shift.to(tl.int32), q_len, keys,
                      SCORE_AUX).to(tl.float32)  # fmt: skip
    if CAPPED:
        s = softcap * tile.tanh(s / softcap)
    if slope is not None:
        s -= slope[None, :, None] * tl.abs(distance).to(tl.float32)
    return s * 1.4426950408889634


_PLAIN_NUMBERS = (
    *("steps", "capacity", "positions", "left", "right", "chunk", "batch", "queries", "rows"),
    *("blocks", "each", "parts", "slots", "table_stride", "distances", "common", "common_shares"),
)


@triton.jit(do_not_specialize=_PLAIN_NUMBERS)
def decode(
    Q, K, V, OUT, LSE, PART, STATS, COUNT, K_NEW, V_NEW,
    LENGTHS, Q_EDGES, NEW_EDGES, USED, LEFTPAD, ROWS, PAGES,
    COS, SIN, BASES, Q_NORM, K_NORM, Q_SCALE, K_SCALE, V_SCALE, SINKS, COMMON, COMMON_STATS,
    COMMON_LENGTH, ALIBI, REL_BIAS, SCORE_AUX, MASK_AUX, BOUNDS_AUX,
    q_strides, k_strides, v_strides, out_strides, lse_strides, k_new_strides, v_new_strides,
    scale_strides, k_scale_strides, v_scale_strides, alibi_strides, bias_strides,
    table_stride, batch, slots, each, parts, queries, steps, capacity, rows, blocks, positions,
    common, common_shares, softmax_scale, softcap, left, right, chunk, distances,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ADVANCE: tl.constexpr,
    DTYPE: tl.constexpr, Q_KIND: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    INCLUDED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    CHUNKED: tl.constexpr, CAPPED: tl.constexpr, RAW: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, BOUNDS: tl.constexpr, EDITED: tl.constexpr,
    NEW: tl.constexpr, CAST: tl.constexpr, V_CAST: tl.constexpr,
    SCALING: tl.constexpr, V_SCALING: tl.constexpr,
    R: tl.constexpr, TILES: tl.constexpr, W: tl.constexpr, NK: tl.constexpr,
    BATCH: tl.constexpr, LEAF: tl.constexpr, SPREAD: tl.constexpr,
    MR: tl.constexpr, SPAN: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr,
    PDL: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Grid: slots * TILES * HEADS, heads fastest. R packed rows a program, W warps of NK keys.

    TILES is 1 for ragged queries, whose row tiles are told apart by slots. With a COMMON_LENGTH,
    common is the least that another kernel reads.
    """
    if PDL:  # the next kernel may start; nothing is read before the last one has ended
        tl.extra.cuda.gdc_launch_dependents()
        if COMMON is None:  # else that one has waited, and only what it leaves is not there yet
            tl.extra.cuda.gdc_wait()
    if COMMON_LENGTH is not None:
        common, common_shares = tile.common_on_device(COMMON_LENGTH, common, common_shares)
    BN: tl.constexpr = W * NK
    program = tl.program_id(0)
    head = (program % HEADS).to(tl.int64)
    block_row = program // HEADS % TILES
    slot = program // (HEADS * TILES)
    # --- which sequence, and which share of it
    if BATCH > 0:
        reach = capacity
        if HAS_LEFT:
            reach = tl.minimum(reach, left + queries + BN)
        b, tile_at, first_slot, splits = shares.dealt(
            LENGTHS, NEW_EDGES, LEFTPAD, Q_EDGES, slot, batch, steps, capacity, reach, each, parts,
            queries, right, common, COMMON is not None, HAS_RIGHT, BN, INCLUDED, BATCH, LEAF,
            GROUP, R,
        )  # fmt: skip
        if b >= batch:
            return
        if Q_EDGES is not None:
            block_row = tile_at
            if first_slot + splits > slots:  # edges that no query has: no share may be missing
                return
    else:
        b = slot // each
        first_slot = b * each
        splits = each
    split = slot - first_slot
    b = b.to(tl.int64)
    line, shift, start, keys, old, active = tile.keys_of(
        b, LENGTHS, None, NEW_EDGES, LEFTPAD, ROWS, steps, capacity, rows, INCLUDED,
    )  # fmt: skip
    # --- which rows
    q_first = 0
    q_len = queries
    if Q_EDGES is not None:
        q_first = tl.maximum(tl.load(Q_EDGES + b), 0)
        q_len = tl.minimum(tl.load(Q_EDGES + b + 1), queries) - q_first
    if USED is not None:
        q_len = tl.minimum(q_len, tl.load(USED + b))
    r = block_row * R + tl.arange(0, R)
    token = r // GROUP
    offset = keys - q_len
    place = token + offset  # bottom-right position of each row
    first_place = block_row * R // GROUP + offset
    last_place = tl.minimum((block_row * R + R - 1) // GROUP, q_len - 1) + offset
    low, high = tile.seen(
        first_place, last_place, keys, left, right, chunk, HAS_LEFT, HAS_RIGHT, CHUNKED,
    )  # fmt: skip
    live = r < q_len * GROUP
    query_head = head * GROUP + r % GROUP
    if BOUNDS is not None:
        first_key, end_key = BOUNDS(b.to(tl.int32), query_head[:, None].to(tl.int32),
                                    token[:, None], q_first, shift.to(tl.int32), q_len, keys,
                                    BOUNDS_AUX)  # fmt: skip
        low, high = tile.bounded(low, high, first_key, end_key, live[:, None])
    if COMMON is not None:
        low = tile.common_until(keys, old, q_len, right, common, HAS_RIGHT)
    if LEAF > 0:  # fixed shares: a row's sums do not depend on who else is there
        splits = tl.maximum(shares.leaves(keys, LEAF), 1)
        low = tl.maximum(low, shares.leaf_first(split, LEAF))
        high = tl.minimum(high, shares.leaf_first(split + 1, LEAF))
        n = low // BN * BN
        step = n * 0 + BN
    else:
        if BATCH == 0:
            splits = tl.minimum(splits, tl.maximum(tl.cdiv(high, BN) - low // BN, 1))
        n = (low // BN + split) * BN
        step = splits * BN
    w = tl.arange(0, W)
    lane = w[:, None] * NK + tl.arange(0, NK)[None, :]
    LINE = PAGES
    last = 0
    if PAGES is not None:
        LINE += tl.where(active, line, 0) * table_stride
        last = (capacity - 1) // PAGE
    page = _pages(LINE, n, lane, start, last, PAGE, NK, W, SPREAD)
    if (block_row * R >= q_len * GROUP) | (split >= splits):
        return
    # --- new tokens that land in this program's tiles: loaded now, stored before those tiles
    dk = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    base = old.to(tl.int64)
    if BASES is not None:
        base = tl.load(BASES + b).to(tl.int64)
    if NEW > 0:
        t = tl.arange(0, NEW)[:, None]
        new_key = old - start + t
        if LEAF > 0:
            mine = shares.leaves(new_key + 1, LEAF) - 1 == split
        else:
            mine = tl.maximum(new_key // BN - low // BN, 0) % splits == split
        mine = mine & (t < steps) & (new_key >= 0) & (new_key < keys)
        new_row = (old + t).to(tl.int64)
        if PAGES is None:
            new_block = new_row * 0 + line
            new_spot = new_row
        else:
            new_block = tl.load(LINE + new_row // PAGE, mask=mine, other=-1).to(tl.int64)
            new_spot = new_row % PAGE
            mine = mine & (new_block >= 0) & (new_block < blocks)
        turning = mine & (base + t >= 0) & (base + t < positions)
        from_k = b * k_new_strides[0] + t * k_new_strides[1] + head * k_new_strides[2]
        from_v = b * v_new_strides[0] + t * v_new_strides[1] + head * v_new_strides[2]
        k_rms = None
        if K_NORM is not None:
            inside = (dk < D)[None, :] & mine
            x = tl.load(K_NEW + from_k + dk[None, :], mask=inside, other=0)
            k_rms = tile.inverse_rms(tile.squares(x, 0 if CAST else K_KIND), D, EPS)
        k_new = append.as_stored(
            K_NEW + from_k, dk[None, :], K_NORM, k_rms, K_SCALE, None, b, head, new_block,
            new_spot, mine, turning, base + t, COS, SIN, positions, k_scale_strides,
            k_scale_strides, D, DP, HALF, INTERLEAVED, K_KIND, CAST, SCALING, False,
            K.dtype.element_ty,
        )  # fmt: skip
        v_new = append.as_stored(
            V_NEW + from_v, dv[None, :], None, None, V_SCALE, None, b, head, new_block,
            new_spot, mine, turning, base + t, COS, SIN, positions, v_scale_strides,
            v_scale_strides, DV, DVP, 0, INTERLEAVED, V_KIND, V_CAST, V_SCALING, False,
            V.dtype.element_ty,
        )  # fmt: skip
        to_k = new_block * k_strides[0] + new_spot * k_strides[1] + head * k_strides[2]
        to_v = new_block * v_strides[0] + new_spot * v_strides[1] + head * v_strides[2]
    # --- the query
    BM: tl.constexpr = R if R > 16 else 16
    m_row = block_row * R + tl.arange(0, BM)
    m_live = (m_row < q_len * GROUP) & (tl.arange(0, BM) < R)
    m_token = m_row // GROUP
    m_at = (q_first + m_token).to(tl.int64)
    q_rows = b * q_strides[0] + m_at * q_strides[1] + (head * GROUP + m_row % GROUP) * q_strides[2]
    rms = None
    if Q_NORM is not None:
        rms = tile.query_rms(Q, q_rows, dk, m_live, D, Q_KIND, EPS, 0)
    if HALF > 0:
        q = tile.rotated(Q, q_rows, dk, m_live, Q_NORM, rms, COS, SIN, base + m_token * ADVANCE,
                         positions, D, HALF, INTERLEAVED, DTYPE, Q_KIND)  # fmt: skip
    else:
        q = tile.query(Q, q_rows, dk, m_live, Q_NORM, rms, D, DTYPE, Q_KIND)
    if PAIRS:
        if tl.float16 != DTYPE:
            q, q_factor = narrow.query(q)
        q_even, q_odd = tl.split(tl.reshape(q, (BM, DP // 2, 2)))
        q_even = tl.broadcast_to(q_even[None, :, :], (W, BM, DP // 2))
        q_odd = tl.broadcast_to(q_odd[None, :, :], (W, BM, DP // 2))
    else:
        q = tl.broadcast_to(q[None, :, :], (W, BM, DP))
    # --- factors: the group shares a kv head, so descales are scalars
    k_factor = softmax_scale
    v_factor = 1.0
    if Q_SCALE is not None:
        k_factor *= tl.load(Q_SCALE + b * scale_strides[0] + head * scale_strides[1])
    if K_SCALE is not None:
        k_factor *= tl.load(K_SCALE + b * k_scale_strides[0] + head * k_scale_strides[1])
    if V_SCALE is not None:
        v_factor = tl.load(V_SCALE + b * v_scale_strides[0] + head * v_scale_strides[1])
    LOG2E: tl.constexpr = 1.4426950408889634
    if not EDITED:
        k_factor *= LOG2E
    s_factor = k_factor
    m_factor = k_factor
    if PAIRS and tl.float16 != DTYPE:
        k_factor = narrow.first(q_factor, R) * k_factor
        s_factor = k_factor[None, :, None]
        m_factor = k_factor[None, :]
    slope = None
    if ALIBI is not None:
        slope = tl.load(ALIBI + b * alibi_strides[0] + query_head * alibi_strides[1])
    # --- tiles: masked at the left edge, whole, masked at the right edge
    m = tl.full([W, R], float("-inf"), tl.float32)
    l = tl.zeros([W, R], tl.float32)
    if PAIRS:
        k_pair = tl.arange(0, DP // 2)
        v_pair = tl.arange(0, DVP // 2)
        acc = tl.zeros([W, DVP // 2, R], tl.float32)
        acc_odd = acc
    else:
        acc = tl.zeros([W, DVP, R], tl.float32)
    free, bound = tile.seen_by_all(
        first_place, last_place, low, high, left, right, chunk, HAS_LEFT, HAS_RIGHT, CHUNKED,
    )  # fmt: skip
    free = tl.minimum(tl.cdiv(free, BN) * BN, high)
    if NEW > 0:
        edge = tl.maximum(old - start, 0) // BN * BN
        free = tl.minimum(free, edge)
        bound = tl.minimum(bound, edge)
    bound = tl.maximum(tl.maximum(bound, 0) // BN * BN, free)
    for phase in tl.static_range(0 if HAS_LEFT or CHUNKED else 1, 3):
        if phase == 0:
            stop = free
        elif phase == 1:
            stop = bound
        else:
            stop = high
        if phase == 2 and NEW > 0:
            k_inside = mine & (dk < D)[None, :]
            v_inside = mine & (dv < DV)[None, :]
            if PAIRS:
                K_BYTES = K.to(tl.pointer_type(k_new.dtype))
                V_BYTES = V.to(tl.pointer_type(v_new.dtype))
                tl.store(K_BYTES + to_k * 2 + dk[None, :], k_new, mask=k_inside)
                tl.store(V_BYTES + to_v * 2 + dv[None, :], v_new, mask=v_inside)
            else:
                tl.store(K + to_k + dk[None, :], k_new, mask=k_inside)
                tl.store(V + to_v + dv[None, :], v_new, mask=v_inside)
            tl.debug_barrier()  # this program reads them back
        for at in tl.range(n, stop, step, num_stages=None if phase == 1 else 1):
            j = at + lane
            ok = (j >= low) & (j < high)
            if PAGES is None:
                row = at + start + line * 0
                k_base = line * k_strides[0] + row * k_strides[1] + head * k_strides[2]
                v_base = line * v_strides[0] + row * v_strides[1] + head * v_strides[2]
                k_lanes = lane * k_strides[1]
                v_lanes = lane * v_strides[1]
            else:
                known = (page >= 0) & (page < blocks)
                block = tl.minimum(tl.maximum(page, 0), blocks - 1).to(tl.int64)
                if SPREAD == 0:  # the tile's rows follow each other in memory
                    row = at % PAGE + block * 0
                    near = lane
                elif SPREAD == 1:  # a warp's rows do
                    known = known[:, None]
                    block = block[:, None]
                    row = (at + w * NK)[:, None] % PAGE + block * 0
                    near = tl.arange(0, NK)[None, :]
                else:
                    row = (j + start) % PAGE + block * 0
                    near = lane * 0
                ok = ok & known
                k_base = head * k_strides[2]
                v_base = head * v_strides[2]
                k_lanes = block * k_strides[0] + row * k_strides[1] + near * k_strides[1]
                v_lanes = block * v_strides[0] + row * v_strides[1] + near * v_strides[1]
            if MASK_MOD is not None:  # what it hides from every row is not read
                chosen = MASK_MOD(b.to(tl.int32), query_head[None, :, None].to(tl.int32),
                                  token[None, :, None], j[:, None, :], q_first,
                                  shift.to(tl.int32), q_len, keys, MASK_AUX)  # fmt: skip
                chosen = chosen & ok[:, None, :] & live[None, :, None]
                ok = tl.max(chosen.to(tl.int32), 1) > 0
            page = _pages(LINE, at + step, lane, start, last, PAGE, NK, W, SPREAD)
            if PAIRS:
                k = _cached(K, k_base, k_lanes, k_pair, ok, D // 2, DP // 2, DTYPE, 0, NATIVE,
                            phase != 1 or MASK_MOD is not None)  # fmt: skip
                v = _cached(V, v_base, v_lanes, v_pair, ok, DV // 2, DVP // 2, DTYPE, 0, NATIVE,
                            phase != 1 or MASK_MOD is not None)  # fmt: skip
                k_even, k_odd = narrow.halves(k, K_KIND, NATIVE)
                s = tl.dot(q_odd, k_odd, tl.dot(q_even, k_even))
            else:
                k = _cached(K, k_base, k_lanes, dk, ok, D, DP, DTYPE, K_KIND, NATIVE,
                            phase != 1 or MASK_MOD is not None)  # fmt: skip
                v = _cached(V, v_base, v_lanes, dv, ok, DV, DVP, DTYPE, V_KIND, NATIVE,
                            phase != 1 or MASK_MOD is not None)  # fmt: skip
                s = tl.dot(q, k)
            if R < BM:  # rows behind R are padding
                s, _padding = tl.split(tl.permute(tl.reshape(s, (W, 2, R, NK)), (0, 2, 3, 1)))
            if not RAW:
                s = s * s_factor
            if EDITED:
                s = _edited(s, b, query_head, token, place, live, j, q_first, shift,
                            q_len, keys, right, distances, softcap, slope, REL_BIAS, SCORE_AUX,
                            bias_strides, HAS_RIGHT, SCORE_MOD, CAPPED)  # fmt: skip
            if phase != 1 or MASK_MOD is not None:
                keep = ok[:, None, :]
                distance = place[None, :, None] - j[:, None, :]
                if HAS_RIGHT:
                    keep = keep & (distance >= -right)
                if HAS_LEFT:
                    keep = keep & (distance <= left)
                if CHUNKED:
                    own = tile.floor_to(place, chunk)[None, :, None]
                    keep = keep & (own == tile.floor_to(j, chunk)[:, None, :])
                if MASK_MOD is not None:
                    keep = keep & chosen
                s = tl.where(keep, s, float("-inf"))
            m_new = tl.max(s, 2)
            if RAW:
                m_new = m_new * m_factor
            m_new = tl.maximum(m, m_new)
            safe = m_new
            if phase != 1 or MASK_MOD is not None:
                safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            if RAW:
                p = tl.exp2(s * s_factor - safe[:, :, None])
            else:
                p = tl.exp2(s - safe[:, :, None])
            alpha = tl.exp2(m - safe)
            m = m_new
            l = l * alpha + tl.sum(p, 2)
            if PAIRS:
                v_even, v_odd = narrow.halves(v, V_KIND, NATIVE)
                weights = tl.permute(p, (0, 2, 1)).to(tl.float16)
                acc = tl.dot(v_even, weights, acc * alpha[:, None, :])
                acc_odd = tl.dot(v_odd, weights, acc_odd * alpha[:, None, :])
            else:
                acc = tl.dot(v, tl.permute(p, (0, 2, 1)).to(DTYPE), acc * alpha[:, None, :])
        n += tl.cdiv(tl.maximum(stop - n, 0), step) * step
    # --- the warps' sums, then the shares': the last program to arrive reads what others left
    if PAIRS:
        acc = tl.reshape(tl.permute(tl.join(acc, acc_odd), (0, 1, 3, 2)), (W, DVP, R))
    top = tl.max(m, 0)
    beta = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top)[None, :])
    l = tl.sum(l * beta, 0)
    acc = _folded(tl.permute(acc * beta[:, None, :], (1, 2, 0)), W)
    common_step = batch * queries * GROUP  # rows of all sequences, and the first of this one
    common_first = b * queries * GROUP
    if Q_EDGES is not None:
        common_step = queries * GROUP
        common_first = q_first * GROUP
    common_spot = head * common_shares * common_step + common_first
    if PART is None or splits == 1:
        sums = tl.trans(acc)
        if COMMON is not None:
            if PDL:
                tl.extra.cuda.gdc_wait()
            top, l, sums, _ = combine.added(
                top, l, sums, sums, COMMON, COMMON_STATS, common_spot, common_step, common_shares,
                r, live, DVP, 0, SPAN,
            )  # fmt: skip
        combine.finish(
            OUT, LSE, SINKS, top, l, sums, sums, r, q_len, q_first, b, head, active,
            v_factor, out_strides, lse_strides, GROUP, DVP, 0, DV,
        )  # fmt: skip
    if PART is not None and splits > 1:
        whole = (program // HEADS % TILES * HEADS + head) * slots + first_slot
        mine_r = tl.arange(0, R)
        spots = (whole + split) * R + mine_r
        tl.store(STATS + spots * 2, top, mask=live)
        tl.store(STATS + spots * 2 + 1, l, mask=live)
        tl.store(PART + spots[None, :] * DVP + dv[:, None], acc, mask=live[None, :])
        tl.debug_barrier()
        arrived = tl.atomic_add(COUNT + whole, 1, sem="acq_rel")
        if arrived == splits - 1:
            tl.store(COUNT + whole, 0)
            if COMMON is not None and PDL:
                tl.extra.cuda.gdc_wait()
            combine.merge(
                OUT, LSE, SINKS, PART, STATS, whole, splits, block_row * R, q_len, q_first, b,
                head, active, v_factor, out_strides, lse_strides, COMMON, COMMON_STATS,
                common_spot, common_step, common_shares, GROUP, R, DVP, 0, DV, MR, SPAN,
            )  # fmt: skip

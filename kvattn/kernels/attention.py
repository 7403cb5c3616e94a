"""Attention over cached keys: packed query heads, split keys, last-arriving merge.

One program takes a tile of BM packed rows (row = token * group + head of the group) of one kv
head, and one share of the keys that the tile can see. Lengths, tables and masks are read on the
device; whatever an index holds, nothing outside the tensors is touched.
"""

import triton
import triton.language as tl

from kvattn.kernels import combine, tile


@triton.jit
def _mx(x, SF, block, row, head, d, strides, inside, TOKENS: tl.constexpr):
    """MXFP8 elements [N, D] in fp32 times their scales; block and row are [N]."""
    if TOKENS:  # one scale per 32 tokens and channel
        at = block[:, None] * strides[0] + (row // 32)[:, None] * strides[1] + head * strides[2]
        at += d[None, :] * strides[3]
    else:
        group = (d // 32)[None, :]
        r = row[:, None]
        at = block[:, None] * strides[0] + head * strides[2]
        if len(strides) == 4:
            at += r * strides[1] + group * strides[3]
        else:
            at += (r // 128) * strides[1] + (group // 4) * strides[3] + (r % 32) * strides[4]
            at += (r % 128) // 32 * strides[5] + (group % 4) * strides[6]
    exponent = tl.load(SF + at, mask=inside, other=127).to(tl.int32)
    half = (exponent - 127) >> 1
    power = tl.exp2(half.to(tl.float32)) * tl.exp2((exponent - 127 - half).to(tl.float32))
    return x * tl.where(exponent == 255, float("nan"), power)


@triton.jit
def _cached(
    X, off, ok, d, SF, block, row, head, sf_strides, D: tl.constexpr, FULL: tl.constexpr,
    DTYPE: tl.constexpr, KIND: tl.constexpr, MX: tl.constexpr, TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Cached rows [BN, D] in the dtype that is multiplied; dead rows and channels are 0."""
    at = X + off[:, None] + d[None, :]
    inside = ok[:, None] & (d < D)[None, :]
    if MASKED:
        x = tl.load(at, mask=ok[:, None] if FULL else inside, other=0)
    elif FULL:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(d < D)[None, :], other=0)
    if MX:
        wide = tile.widen(x, KIND, tl.float32)
        return _mx(wide, SF, block, row, head, d, sf_strides, inside, TOKENS).to(DTYPE)
    elif KIND == 0 and X.dtype.element_ty == DTYPE:
        return x
    else:
        return tile.widen(x, KIND, DTYPE)


@triton.jit
def _dot(a, b, c):
    return tl.dot(a, b, c, input_precision="ieee")


_PLAIN_NUMBERS = (
    *("steps", "capacity", "positions", "left", "right", "chunk", "tiles", "batch", "queries"),
    *("rows", "blocks", "distances", "splits", "table_stride"),
)


@triton.jit(do_not_specialize=_PLAIN_NUMBERS)
def attention(
    Q, QV, K, V, OUT, LSE, PART, STATS, COUNT,
    LENGTHS, Q_EDGES, K_EDGES, NEW_EDGES, USED, LEFTPAD, ROWS, PAGES,
    COS, SIN, BASES, Q_NORM, Q_SCALE, K_SCALE, V_SCALE, SFQ, SFK, SFV,
    ALIBI, SINKS, REL_BIAS, BLOCK_MAP, SCORE_AUX, MASK_AUX, BOUNDS_AUX,
    q_strides, qv_strides, k_strides, v_strides, out_strides, lse_strides, scale_strides,
    k_scale_strides, v_scale_strides, sfq_strides, sfk_strides, sfv_strides,
    alibi_strides, bias_strides, map_strides,
    table_stride, batch, tiles, queries, steps, capacity, rows, blocks, positions,
    softmax_scale, softcap, left, right, chunk, distances, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    DA: tl.constexpr, DB: tl.constexpr, D: tl.constexpr,
    VA: tl.constexpr, VB: tl.constexpr, DV: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ADVANCE: tl.constexpr,
    DTYPE: tl.constexpr, Q_KIND: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    INCLUDED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    CHUNKED: tl.constexpr, CAPPED: tl.constexpr, BY_TOKEN_K: tl.constexpr,
    BY_TOKEN_V: tl.constexpr, SFV_TOKENS: tl.constexpr, MAP_M: tl.constexpr, MAP_N: tl.constexpr,
    MAP_FLAT: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, BOUNDS: tl.constexpr, EDITED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, LEAF: tl.constexpr,
    REVERSED: tl.constexpr, PLAIN: tl.constexpr, RAW: tl.constexpr, ALIGNED: tl.constexpr,
    MR: tl.constexpr, SPAN: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Grid: tiles * HEADS * splits, splits fastest."""
    program = tl.program_id(0)
    split = program % splits
    head = ((program // splits) % HEADS).to(tl.int64)  # strides of heads may be as large
    row_tile = program // splits // HEADS
    # --- which rows
    if Q_EDGES is None:
        b = row_tile // tiles
        block_row = row_tile % tiles
        q_first = 0
        q_len = queries
        if REVERSED:
            block_row = tiles - 1 - block_row
    else:
        b = tile.find_tile(Q_EDGES, batch, row_tile, GROUP, BM)
        q_first = tl.maximum(tl.load(Q_EDGES + b), 0)
        q_len = tl.load(Q_EDGES + b + 1) - q_first
        block_row = row_tile - (q_first * GROUP // BM + b)
        q_len = tl.minimum(q_len, queries - q_first)
        if REVERSED:
            block_row = tl.cdiv(q_len * GROUP, BM) - 1 - block_row
    b = b.to(tl.int64)
    if USED is not None:
        q_len = tl.minimum(q_len, tl.load(USED + b))
    if (block_row < 0) | (block_row * BM >= q_len * GROUP):
        return
    r = block_row * BM + tl.arange(0, BM)
    live = r < q_len * GROUP
    token = r // GROUP
    query_head = head * GROUP + r % GROUP
    at = (q_first + token).to(tl.int64)
    # --- which keys: absolute rows start.. hold logical keys 0..keys
    line, shift, start, keys, old, active = tile.keys_of(
        b, LENGTHS, K_EDGES, NEW_EDGES, LEFTPAD, ROWS, steps, capacity, rows, INCLUDED,
    )  # fmt: skip
    offset = keys - q_len
    place = token + offset  # bottom-right position of each row
    first_place = block_row * BM // GROUP + offset
    last_place = tl.minimum((block_row * BM + BM - 1) // GROUP, q_len - 1) + offset
    low, high = tile.seen(
        first_place, last_place, keys, left, right, chunk, HAS_LEFT, HAS_RIGHT, CHUNKED,
    )  # fmt: skip
    if BOUNDS is not None:
        first, end = BOUNDS(b.to(tl.int32), query_head[:, None].to(tl.int32), token[:, None],
                            q_first, shift.to(tl.int32), q_len, keys, BOUNDS_AUX)  # fmt: skip
        low, high = tile.bounded(low, high, first, end, live[:, None])
    if SPLIT:
        if LEAF > 0:  # fixed shares: a row's sums do not depend on who else is there
            low = tl.maximum(low, split * LEAF)
            high = tl.minimum(high, split * LEAF + LEAF)
        else:
            share = tl.cdiv(tl.cdiv(high, BN) - low // BN, splits) * BN
            begin = low // BN * BN + split * share
            low = tl.maximum(low, begin)
            high = tl.minimum(high, begin + share)
    # --- the query
    da = tl.arange(0, DA)
    va = tl.arange(0, VA)
    if DB > 0:
        db = DA + tl.arange(0, DB)
    if VB > 0:
        vb = VA + tl.arange(0, VB)
    if Q is not None:
        q_rows = b * q_strides[0] + at * q_strides[1] + query_head * q_strides[2]
        rms = None
        if Q_NORM is not None:
            rms = tile.query_rms(Q, q_rows, da, live, D, Q_KIND, EPS, DB)
        if HALF > 0:
            base = old.to(tl.int64)
            if BASES is not None:
                base = tl.load(BASES + b).to(tl.int64)
            turn_at = base + token * ADVANCE
            qa = tile.rotated(Q, q_rows, da, live, Q_NORM, rms, COS, SIN, turn_at, positions,
                              D, HALF, INTERLEAVED, DTYPE, Q_KIND)  # fmt: skip
            if DB > 0:
                qb = tile.rotated(Q, q_rows, db, live, Q_NORM, rms, COS, SIN, turn_at, positions,
                                  D, HALF, INTERLEAVED, DTYPE, Q_KIND)  # fmt: skip
        elif SFQ is not None:
            qa = _cached(Q, q_rows, live, da, SFQ, b + at * 0, at, query_head[:, None],
                         sfq_strides, D, False, DTYPE, Q_KIND, True, False, True)  # fmt: skip
            if DB > 0:
                qb = _cached(Q, q_rows, live, db, SFQ, b + at * 0, at, query_head[:, None],
                             sfq_strides, D, False, DTYPE, Q_KIND, True, False, True)  # fmt: skip
        else:
            qa = tile.query(Q, q_rows, da, live, Q_NORM, rms, D, DTYPE, Q_KIND)
            if DB > 0:
                qb = tile.query(Q, q_rows, db, live, Q_NORM, rms, D, DTYPE, Q_KIND)
    if QV is not None:
        qv_rows = b * qv_strides[0] + at * qv_strides[1] + query_head * qv_strides[2]
        qva = tile.query(QV, qv_rows, va, live, None, None, DV, DTYPE, Q_KIND)
        if VB > 0:
            qvb = tile.query(QV, qv_rows, vb, live, None, None, DV, DTYPE, Q_KIND)
    # --- factors: the group shares a kv head, so descales are scalars
    k_factor = softmax_scale
    v_factor = 1.0
    if Q_SCALE is not None:
        k_factor *= tl.load(Q_SCALE + b * scale_strides[0] + head * scale_strides[1])
    qv_factor = k_factor
    if V_SCALE is not None and not BY_TOKEN_V:
        v_factor = tl.load(V_SCALE + b * v_scale_strides[0] + head * v_scale_strides[1])
        qv_factor = k_factor * v_factor
    if K_SCALE is not None and not BY_TOKEN_K:
        k_factor *= tl.load(K_SCALE + b * k_scale_strides[0] + head * k_scale_strides[1])
    LOG2E: tl.constexpr = 1.4426950408889634
    if not EDITED:
        k_factor *= LOG2E
        qv_factor *= LOG2E
    if ALIBI is not None:
        slope = tl.load(ALIBI + b * alibi_strides[0] + query_head * alibi_strides[1],
                        mask=live, other=0)  # fmt: skip
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc_a = tl.zeros([BM, VA], tl.float32)
    if VB > 0:
        acc_b = tl.zeros([BM, VB], tl.float32)
    begin = low // BN * BN
    # tiles between `free` and `bound` are seen whole by every row: no masks there
    free, bound = tile.seen_by_all(
        first_place, last_place, low, high, left, right, chunk, HAS_LEFT, HAS_RIGHT, False,
    )  # fmt: skip
    free = tl.minimum(tl.cdiv(free, BN) * BN, high)
    bound = tl.maximum(tl.maximum(bound, 0) // BN * BN, free)
    FROM: tl.constexpr = 1 if PLAIN and not HAS_LEFT else 0  # without a window, `begin` is free
    PHASES: tl.constexpr = 3 if PLAIN else 1
    for phase in tl.static_range(FROM, PHASES):
        if not PLAIN:
            first_key = begin
            last_key = high
        elif phase == 0:
            first_key = begin
            last_key = free
        elif phase == 1:
            first_key = free
            last_key = bound
        else:
            first_key = bound
            last_key = high
        for n in tl.range(first_key, last_key, BN):
            j = n + tl.arange(0, BN)
            ok = (j >= low) & (j < high)
            lane = tl.arange(0, BN).to(tl.int64)
            if PAGES is None or ALIGNED:  # the tile's rows follow each other in memory
                if PAGES is None:
                    page = line
                    row_first = n + start + shift
                else:
                    page = tl.load(PAGES + line * table_stride + n // PAGE).to(tl.int64)
                    row_first = n % PAGE + b * 0
                    if not PLAIN or phase != 1:
                        ok = ok & (page >= 0) & (page < blocks)
                    page = tl.minimum(tl.maximum(page, 0), blocks - 1)
                k_first = page * k_strides[0] + row_first * k_strides[1] + head * k_strides[2]
                v_first = page * v_strides[0] + row_first * v_strides[1] + head * v_strides[2]
                k_off = k_first + lane * k_strides[1]
                v_off = v_first + lane * v_strides[1]
                block = page + lane * 0
                row = row_first + lane
            else:
                row = (j + start).to(tl.int64)
                spot = PAGES + line * table_stride + row // PAGE
                if not PLAIN or phase != 1:
                    block = tl.load(spot, mask=ok, other=-1).to(tl.int64)
                    ok = ok & (block >= 0) & (block < blocks)
                else:
                    block = tl.load(spot).to(tl.int64)
                    block = tl.minimum(tl.maximum(block, 0), blocks - 1)
                row = row % PAGE
                k_off = block * k_strides[0] + row * k_strides[1] + head * k_strides[2]
                v_off = block * v_strides[0] + row * v_strides[1] + head * v_strides[2]
            if MASK_MOD is not None or BLOCK_MAP is not None:  # hidden from every row: not read
                chosen = ok[None, :] & live[:, None]
                if MASK_MOD is not None:
                    mask_head = query_head[:, None].to(tl.int32)
                    by_mod = MASK_MOD(b.to(tl.int32), mask_head, token[:, None], j[None, :],
                                      q_first, shift.to(tl.int32), q_len, keys,
                                      MASK_AUX)  # fmt: skip
                if BLOCK_MAP is not None:
                    spot = b * map_strides[0] + query_head[:, None] * map_strides[1]
                    map_row = at if MAP_FLAT else token // MAP_M
                    spot += map_row[:, None] * map_strides[2] + (j // MAP_N)[None, :]
                    state = tl.load(BLOCK_MAP + spot, mask=chosen, other=0)
                    if MASK_MOD is not None:
                        by_mod = (state == 2) | ((state == 1) & by_mod)
                    else:
                        by_mod = state > 0
                chosen = chosen & by_mod
                ok = tl.max(chosen.to(tl.int32), 0) > 0
            s = tl.zeros([BM, BN], tl.float32)
            if Q is not None:
                ka = _cached(K, k_off, ok, da, SFK, block, row, head, sfk_strides, D, D == DA,
                             DTYPE, K_KIND, SFK is not None, False,
                             not PLAIN or phase != 1)  # fmt: skip
                s = _dot(qa, tl.trans(ka), s)
                if DB > 0:
                    kb = _cached(K, k_off, ok, db, SFK, block, row, head, sfk_strides, D,
                                 D == DA + DB, DTYPE, K_KIND, SFK is not None, False,
                                 not PLAIN or phase != 1)  # fmt: skip
                    s = _dot(qb, tl.trans(kb), s)
                if BY_TOKEN_K:
                    spot = block * k_scale_strides[0] + row * k_scale_strides[1]
                    spot += head * k_scale_strides[2]
                    s = s * tl.load(K_SCALE + spot, mask=ok, other=0)[None, :]
                if not RAW:
                    s = s * k_factor
            v_a = _cached(V, v_off, ok, va, SFV, block, row, head, sfv_strides, DV, DV == VA,
                          DTYPE, V_KIND, SFV is not None, SFV_TOKENS,
                          not PLAIN or phase != 1)  # fmt: skip
            if VB > 0:
                v_b = _cached(V, v_off, ok, vb, SFV, block, row, head, sfv_strides, DV,
                              DV == VA + VB, DTYPE, V_KIND, SFV is not None, SFV_TOKENS,
                              not PLAIN or phase != 1)  # fmt: skip
            if BY_TOKEN_V:
                spot = block * v_scale_strides[0] + row * v_scale_strides[1]
                v_factors = tl.load(V_SCALE + spot + head * v_scale_strides[2], mask=ok, other=0)
            if QV is not None:
                t = _dot(qva, tl.trans(v_a), tl.zeros([BM, BN], tl.float32))
                if VB > 0:
                    t = _dot(qvb, tl.trans(v_b), t)
                if BY_TOKEN_V:
                    t = t * v_factors[None, :]
                s += t * qv_factor
            distance = place[:, None] - j[None, :]
            if REL_BIAS is not None:
                r_at = distance + right
                if not HAS_RIGHT:
                    r_at = (keys - 1 - j)[None, :] + place[:, None] * 0
                known = (r_at >= 0) & (r_at < distances) & live[:, None]
                bias_row = b * bias_strides[0] + at * bias_strides[1] + query_head * bias_strides[2]
                bias_at = bias_row[:, None] + r_at * bias_strides[3]
                s += tl.load(REL_BIAS + bias_at, mask=known, other=0).to(tl.float32)
            if SCORE_MOD is not None:
                mod_head = query_head[:, None].to(tl.int32)
                s = SCORE_MOD(s, b.to(tl.int32), mod_head, token[:, None], j[None, :],
                              q_first, shift.to(tl.int32), q_len, keys, SCORE_AUX)  # fmt: skip
                s = s.to(tl.float32)
            if CAPPED:
                s = softcap * tile.tanh(s / softcap)
            if ALIBI is not None:
                s -= slope[:, None] * tl.abs(distance).to(tl.float32)
            if EDITED:
                s = s * LOG2E
            if not PLAIN or phase != 1:
                keep = ok[None, :] & live[:, None]
                if HAS_RIGHT:
                    keep = keep & (distance >= -right)
                if HAS_LEFT:
                    keep = keep & (distance <= left)
                if CHUNKED:
                    mine = tile.floor_to(place, chunk)[:, None]
                    keep = keep & (mine == tile.floor_to(j, chunk)[None, :])
                if MASK_MOD is not None or BLOCK_MAP is not None:
                    keep = keep & chosen
                s = tl.where(keep, s, float("-inf"))
            if RAW:
                m_new = tl.maximum(m, tl.max(s, 1) * k_factor)
            else:
                m_new = tl.maximum(m, tl.max(s, 1))
            safe = m_new
            if not PLAIN or phase != 1:
                safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            if RAW:
                p = tl.exp2(s * k_factor - safe[:, None])
            else:
                p = tl.exp2(s - safe[:, None])
            alpha = tl.exp2(m - safe)
            m = m_new
            l = l * alpha + tl.sum(p, 1)
            if BY_TOKEN_V:
                p = p * v_factors[None, :]
            p = p.to(DTYPE)
            acc_a = _dot(p, v_a, acc_a * alpha[:, None])
            if VB > 0:
                acc_b = _dot(p, v_b, acc_b * alpha[:, None])
    # --- merge the shares: the last program to arrive reads what the others left
    if SPLIT:
        part = (row_tile.to(tl.int64) * HEADS + head) * splits
        mine = tl.arange(0, BM)
        spot = (part + split) * BM + mine
        tl.store(STATS + spot * 2, m, mask=live)
        tl.store(STATS + spot * 2 + 1, l, mask=live)
        tl.store(PART + spot[:, None] * (VA + VB) + va[None, :], acc_a, mask=live[:, None])
        if VB > 0:
            tl.store(PART + spot[:, None] * (VA + VB) + vb[None, :], acc_b, mask=live[:, None])
        tl.debug_barrier()
        arrived = tl.atomic_add(COUNT + row_tile * HEADS + head, 1, sem="acq_rel")
        if arrived == splits - 1:
            tl.store(COUNT + row_tile * HEADS + head, 0)
            combine.merge(
                OUT, LSE, SINKS, PART, STATS, part, splits, block_row * BM, q_len, q_first, b,
                head, active, v_factor, out_strides, lse_strides, None, None, 0, 0, 0,
                GROUP, BM, VA, VB, DV, MR, SPAN,
            )  # fmt: skip
    else:
        if VB == 0:
            acc_b = acc_a
        combine.finish(
            OUT, LSE, SINKS, m, l, acc_a, acc_b, r, q_len, q_first, b, head, active, v_factor,
            out_strides, lse_strides, GROUP, VA, VB, DV,
        )  # fmt: skip

"""Attention of many query tokens without splits: whole tiles of keys, few instructions a score.

It takes what most calls ask for: 16-bit caches in the query's dtype, dense, paged or ragged, with
causality, a window, chunks, softcap, sinks or a score_mod. The rest is left to attention.py.

One program takes a tile of BM packed rows (row = token * group + head of the group) of one kv
head. Tiles of keys that every row sees whole take no mask; only those at the end of a sequence,
or before a window in a paged cache, hold rows that must not be read.
"""

import triton
import triton.language as tl

from kvattn.kernels import combine, tile

_PLAIN_NUMBERS = (
    *("steps", "capacity", "positions", "left", "right", "chunk", "tiles", "batch", "queries"),
    *("rows", "blocks", "share", "table_stride"),
)
_CACHED = tl.constexpr(32 << 20)  # bytes of keys and values that stay in the L2 cache together


@triton.jit
def _sequence(EDGES, batch, row_tile, GROUP: tl.constexpr, BM: tl.constexpr):
    """The sequence of a row tile: its first tile is edges[b] * GROUP // BM + b."""
    before = 0
    for first in range(0, batch, 128):
        b = first + tl.arange(0, 128)
        edge = tl.load(EDGES + b, mask=b < batch, other=0)
        before += tl.sum(((edge * GROUP // BM + b <= row_tile) & (b < batch)).to(tl.int32), 0)
    return tl.maximum(before - 1, 0)


@triton.jit
def _pages(
    PAGES, at, n, lane, start, reach, PAGE: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr
):
    """The page ids of a tile's rows, one for all where a page holds the tile.

    A line of the table has entries for `reach` rows; lengths do not matter, and need not be known.
    """
    if PAGE % BN == 0 and not PADDED:
        return tl.load(PAGES + at + n // PAGE, mask=n < reach, other=0)
    elif BN % PAGE == 0 and not PADDED:
        return tl.load(PAGES + at + n // PAGE + lane // PAGE, mask=n + lane < reach, other=0)
    else:
        row = n + lane + start
        return tl.load(PAGES + at + row // PAGE, mask=row < reach, other=0)


@triton.jit
def _offsets(
    pages, n, lane, start, strides, blocks, PAGE: tl.constexpr, BN: tl.constexpr,
    PAGED: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Offsets of a tile's rows in elements, 32 bits wide where the cache allows it."""
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    if not PAGED:
        return (n + lane + start).to(INT) * strides[1]
    page = tl.minimum(tl.maximum(pages, 0), blocks - 1).to(INT)
    if PAGE % BN == 0 and not PADDED:
        row = n % PAGE + lane
    elif BN % PAGE == 0 and not PADDED:
        row = lane % PAGE
    else:
        row = (n + lane + start) % PAGE
    return page * strides[0] + row.to(INT) * strides[1]


@triton.jit
def _rows(X, offsets, d, ok, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """Rows [BN, DP] of a cache; channels beyond D, and rows that are not ok, are 0."""
    at = X + offsets[:, None] + d[None, :]
    if MASKED:
        return tl.load(at, mask=ok[:, None] & (d < D)[None, :], other=0)
    elif D == DP:
        return tl.load(at)
    else:
        return tl.load(at, mask=(d < D)[None, :], other=0)


@triton.jit
def _whole_tile(
    X, BOX, pages, n, lane, start, box_line, box_first, head, strides, d, blocks,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    PAGED: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows [BN, DP] of a tile that holds nothing else than keys, by TMA where there is a box."""
    if BOX is not None and PAGED:
        return BOX.load([pages, n % PAGE, head, 0]).reshape([BN, DP])
    elif BOX is not None:
        return BOX.load([box_line, box_first + n, head, 0]).reshape([BN, DP])
    else:
        rows_at = _offsets(pages, n, lane, start, strides, blocks, PAGE, BN, PAGED, PADDED, WIDE)
        return _rows(X, rows_at, d, lane, D, DP, False)


@triton.jit
def _masked(
    s, n, lane, place, low, high, left, right, chunk,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Scores with those of unseen keys at -inf; place is the key that a row stands at."""
    last = place * 0 + high
    first = place * 0 + low
    if HAS_RIGHT:
        last = tl.minimum(last, place + right + 1)
    if HAS_LEFT:
        first = tl.maximum(first, place - left)
    if CHUNKED:
        mine = tile.floor_to(place, chunk)
        first = tl.maximum(first, mine)
        last = tl.minimum(last, mine + chunk)
    # relative to the tile: the compiler would else work out all predicates ahead of the scores
    keep = lane[None, :] < (last - n)[:, None]
    if HAS_LEFT or CHUNKED:
        keep = keep & (lane[None, :] >= (first - n)[:, None])
    return tl.where(keep, s, float("-inf"))


@triton.jit
def _scores(
    q, k, j, scale, softcap, b, heads, token, q_first, k_first, q_len, keys, SCORE_AUX,
    SCORE_MOD: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """What the softmax takes times a factor: products, or scores that a mod or a cap changed.

    Scores with a cap lack it, and are counted in units of twice the cap.
    """
    s = tl.dot(q, tl.trans(k))
    if SCORE_MOD is not None:
        s = SCORE_MOD(s * scale, b.to(tl.int32), heads[:, None].to(tl.int32), token[:, None],
                      j[None, :], q_first, k_first, q_len, keys, SCORE_AUX)  # fmt: skip
        s = s.to(tl.float32)
        scale = 1.0
    if CAPPED:
        s = tile.below_cap(s, scale * (2.8853900817779268 / softcap), 1.0)
    return s


@triton.jit
def _step(s, v, m, l, acc, factor, top, BOUNDED: tl.constexpr):
    """Takes one tile into the running softmax; m and top are in units of log2.

    Scores with a bound need no maxima and no second look at what was summed before.
    """
    if BOUNDED:
        p = tl.exp2(s * factor - top)
        return m, l + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc)
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * factor - safe[:, None])
    alpha = tl.exp2(m - safe)
    l = l * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return m_new, l, acc


@triton.jit(do_not_specialize=_PLAIN_NUMBERS)
def prefill(
    Q, K, V, K_BOX, V_BOX, OUT, LSE,
    LENGTHS, Q_EDGES, K_EDGES, NEW_EDGES, USED, LEFTPAD, ROWS, PAGES,
    COS, SIN, BASES, Q_NORM, SINKS, SCORE_AUX,
    q_strides, k_strides, v_strides, out_strides, lse_strides,
    table_stride, batch, tiles, queries, steps, capacity, rows, blocks, positions, share,
    scale, softcap, limit, left, right, chunk,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, DA: tl.constexpr, DV: tl.constexpr, VA: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ADVANCE: tl.constexpr, INCLUDED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr, SCORE_MOD: tl.constexpr, BOUNDED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """Grid: row tiles * HEADS, in sections of heads whose keys stay in the L2 cache together."""
    t = tl.program_id(0)
    # --- which rows
    if Q_EDGES is None:
        section = t // (share * tiles)
        rest = t - section * share * tiles
        width = tl.minimum(share, batch * HEADS - section * share)
        block_row = rest // width
        which = section * share + rest % width
        b = (which // HEADS).to(tl.int64)
        head = which % HEADS
        q_first = 0
        q_len = queries
    else:
        b = _sequence(Q_EDGES, batch, t // HEADS, GROUP, BM).to(tl.int64)
        q_first = tl.maximum(tl.load(Q_EDGES + b), 0)
        q_len = tl.minimum(tl.load(Q_EDGES + b + 1), queries) - q_first
    if USED is not None:
        q_len = tl.minimum(q_len, tl.load(USED + b))
    line, shift, start, keys, old, active = tile.keys_of(
        b, LENGTHS, K_EDGES, NEW_EDGES, LEFTPAD, ROWS, steps, capacity, rows, INCLUDED,
    )  # fmt: skip
    if Q_EDGES is not None:
        tiles = tl.cdiv(tl.maximum(q_len, 0) * GROUP, BM)
        piece = t - (q_first * GROUP // BM + b.to(tl.int32)) * HEADS
        if piece >= tiles * HEADS:
            return
        width = HEADS
        if HAS_RIGHT:
            cached = _CACHED // (2 * (DA + VA)) // tl.maximum(keys, 1)
            width = tl.minimum(tl.maximum(cached, 1), HEADS)
        section = piece // (width * tiles)
        rest = piece - section * width * tiles
        width = tl.minimum(width, HEADS - section * width)
        block_row = rest // width
        head = (piece - rest) // tiles + rest % width
    if HAS_RIGHT:  # the rows that see the most first
        block_row = tiles - 1 - block_row
    if block_row * BM >= q_len * GROUP:
        return
    r = block_row * BM + tl.arange(0, BM)
    live = r < q_len * GROUP
    token = r // GROUP
    query_head = head * GROUP + r % GROUP
    at = (q_first + token).to(tl.int64)
    # --- which keys
    offset = keys - q_len
    place = token + offset
    first_place = block_row * BM // GROUP + offset
    last_place = tl.minimum((block_row * BM + BM - 1) // GROUP, q_len - 1) + offset
    low, high = tile.seen(
        first_place, last_place, keys, left, right, chunk, HAS_LEFT, HAS_RIGHT, CHUNKED,
    )  # fmt: skip
    low = tl.maximum(low, 0)
    # --- where the keys are
    PAGED: tl.constexpr = PAGES is not None
    PADDED: tl.constexpr = LEFTPAD is not None
    lane = tl.arange(0, BN)
    K += head.to(tl.int64) * k_strides[2]
    V += head.to(tl.int64) * v_strides[2]
    k_first = shift.to(tl.int32)
    box_line = line.to(tl.int32)
    if K_EDGES is not None:
        box_line = 0
    if PAGED:
        table = line * table_stride
        reach = tl.where((line >= 0) & (line < rows), capacity, 0)
    else:
        K += line * k_strides[0] + shift * k_strides[1]
        V += line * v_strides[0] + shift * v_strides[1]
    # --- tiles first_tile.. are read whole: all their rows hold keys that some query may see
    SKIPS: tl.constexpr = (HAS_LEFT or CHUNKED) and PAGED  # pages before a window may be gone
    begin = low // BN * BN
    whole = keys // BN * BN
    first_tile = begin
    last_tile = tl.minimum(tl.cdiv(high, BN) * BN, whole)
    edges = (high > whole).to(tl.int32)
    first_edge = 1 - edges
    if SKIPS:
        first_tile = tl.cdiv(low, BN) * BN
        edges += ((first_tile > begin) & (begin < last_tile)).to(tl.int32)
    # --- of these, tiles free..bound are seen whole by every row: no mask there
    free, bound = tile.seen_by_all(
        first_place, last_place, first_tile, last_tile, left, right, chunk,
        HAS_LEFT, HAS_RIGHT, CHUNKED,
    )  # fmt: skip
    free = tl.minimum(tl.cdiv(free, BN) * BN, tl.maximum(last_tile, first_tile))
    bound = tl.maximum(tl.maximum(bound, 0) // BN * BN, free)
    coming = 0
    if PAGED:  # pages are looked up a tile ahead
        coming = _pages(PAGES, table, first_tile, lane, start, reach, PAGE, BN, PADDED)
    # --- the query
    da = tl.arange(0, DA)
    va = tl.arange(0, VA)
    q_rows = b * q_strides[0] + at * q_strides[1] + query_head.to(tl.int64) * q_strides[2]
    rms = None
    if Q_NORM is not None:
        rms = tile.query_rms(Q, q_rows, da, live, D, 0, EPS, 0)
    if HALF > 0:
        base = old.to(tl.int64)
        if BASES is not None:
            base = tl.load(BASES + b).to(tl.int64)
        q = tile.rotated(Q, q_rows, da, live, Q_NORM, rms, COS, SIN, base + token * ADVANCE,
                         positions, D, HALF, INTERLEAVED, Q.dtype.element_ty, 0)  # fmt: skip
    elif Q_NORM is not None:
        q = tile.query(Q, q_rows, da, live, Q_NORM, rms, D, Q.dtype.element_ty, 0)
    else:
        inside = live[:, None] & (da < D)[None, :]
        q = tl.load(Q + q_rows[:, None] + da[None, :], mask=inside, other=0)
    LOG2E: tl.constexpr = 1.4426950408889634
    factor = scale * LOG2E
    if CAPPED:
        factor = softcap * (2.0 * LOG2E)
    elif SCORE_MOD is not None:
        factor = LOG2E
    top = 0.0
    if BOUNDED:  # the smallest probability is 2^-120, the largest 1 for bounds up to 41
        top = tl.minimum(limit * LOG2E, 120.0 - limit * LOG2E)
        if CAPPED:
            top -= limit * LOG2E
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, VA], tl.float32)
    for phase in tl.static_range(3):
        if NARROW:
            first_key = first_tile
            last_key = last_tile
        elif phase == 0:
            first_key = first_tile
            last_key = free
        elif phase == 1:
            first_key = free
            last_key = bound
        else:
            first_key = bound
            last_key = last_tile
        if phase == 1 or (not NARROW and ((phase == 0 and HAS_LEFT) or (phase == 2 and HAS_RIGHT)
                                          or CHUNKED)):  # fmt: skip
            for n in tl.range(first_key, last_key, BN):
                pages = coming
                if PAGED:
                    coming = _pages(PAGES, table, n + BN, lane, start, reach, PAGE, BN, PADDED)
                k = _whole_tile(
                    K, K_BOX, pages, n, lane, start, box_line, k_first + start, head, k_strides,
                    da, blocks, D, DA, PAGE, BN, PAGED, PADDED, WIDE,
                )  # fmt: skip
                s = _scores(q, k, n + lane, scale, softcap, b, query_head, token, q_first,
                            k_first, q_len, keys, SCORE_AUX, SCORE_MOD, CAPPED)  # fmt: skip
                if NARROW or phase != 1:
                    s = _masked(s, n, lane, place, low, high, left, right, chunk,
                                HAS_LEFT, HAS_RIGHT, CHUNKED)  # fmt: skip
                v = _whole_tile(
                    V, V_BOX, pages, n, lane, start, box_line, k_first + start, head, v_strides,
                    va, blocks, DV, VA, PAGE, BN, PAGED, PADDED, WIDE,
                )  # fmt: skip
                m, l, acc = _step(s, v, m, l, acc, factor, top, BOUNDED)
    # --- the end of the sequence, and what lies before a window: at most a tile of each
    for e in tl.range(first_edge, first_edge + edges, num_stages=1):
        n = begin
        if e == 0:
            n = whole
        ok = (n + lane >= low) & (n + lane < high)
        pages = 0
        if PAGED:
            pages = _pages(PAGES, table, n, lane, start, reach, PAGE, BN, PADDED)
            ok = ok & (pages >= 0) & (pages < blocks)
        rows_at = _offsets(pages, n, lane, start, k_strides, blocks,
                           PAGE, BN, PAGED, PADDED, WIDE)  # fmt: skip
        k = _rows(K, rows_at, da, ok, D, DA, True)
        s = _scores(q, k, n + lane, scale, softcap, b, query_head, token, q_first,
                    k_first, q_len, keys, SCORE_AUX, SCORE_MOD, CAPPED)  # fmt: skip
        s = _masked(s, n, lane, place, low, high, left, right, chunk,
                    HAS_LEFT, HAS_RIGHT, CHUNKED)  # fmt: skip
        if PAGED:
            s = tl.where(ok[None, :], s, float("-inf"))
        rows_at = _offsets(pages, n, lane, start, v_strides, blocks,
                           PAGE, BN, PAGED, PADDED, WIDE)  # fmt: skip
        v = _rows(V, rows_at, va, ok, DV, VA, True)
        m, l, acc = _step(s, v, m, l, acc, factor, top, BOUNDED)
    if BOUNDED:
        m = tl.where(l > 0.0, top, float("-inf"))
    if CAPPED:
        m += softcap * LOG2E
    combine.finish(
        OUT, LSE, SINKS, m, l, acc, acc, r, q_len, q_first, b, head, active, 1.0,
        out_strides, lse_strides, GROUP, VA, 0, DV,
    )  # fmt: skip

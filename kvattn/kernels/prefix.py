"""Keys that all sequences of a batch have in common, read once for the query rows of all of them.

Rows of all sequences are packed into tiles (row = row of the query tensor * group + head of the
group) of one kv head, which attend to a share of the common keys each. What they leave is one more
share of every sequence for the decode kernel, which reads only the keys behind.
"""

import triton
import triton.language as tl

from kvattn.kernels import tile


@triton.jit
def _pages(LINE, n, lane, last, PAGE: tl.constexpr, BN: tl.constexpr):
    """The table's entries for the tile at n: one where a page holds the tile, else one a key."""
    if LINE is None:
        return n * 0
    elif PAGE % BN == 0:
        return tl.load(LINE + tl.minimum(n // PAGE, last))
    else:
        return tl.load(LINE + tl.minimum((n + lane) // PAGE, last))


@triton.jit
def _cached(
    X, pages, line, n, lane, d, blocks, strides, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, BN: tl.constexpr, PAGED: tl.constexpr, DTYPE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Cached rows [BN, DP] in the dtype that is multiplied; channels beyond D are 0."""
    if not PAGED:
        rows = line * strides[0] + (n + lane).to(tl.int64) * strides[1]
    elif PAGE % BN == 0:
        page = tl.minimum(tl.maximum(pages, 0), blocks - 1).to(tl.int64)
        rows = page * strides[0] + (n % PAGE + lane) * strides[1]
    else:
        page = tl.minimum(tl.maximum(pages, 0), blocks - 1).to(tl.int64)
        rows = page * strides[0] + (n + lane) % PAGE * strides[1]
    at = X + rows[:, None] + d[None, :]
    if D == DP:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(d < D)[None, :], other=0)
    if KIND == 0:
        return x
    else:
        return tile.widen(x, KIND, DTYPE)


@triton.jit
def _tokens(r, Q_EDGES, USED, batch, queries, GROUP: tl.constexpr):
    """(sequence, token of it, query tokens of it, row among the sequence's or all ragged queries,
    whether there is such a row) of packed rows."""
    if Q_EDGES is None:
        each = queries * GROUP
        live = r < batch * each
        b = tl.minimum(r // each, batch - 1)
        token = r % each // GROUP
        at = token
        q_len = queries
    else:
        at = r // GROUP
        guess = tl.minimum(at.to(tl.int64) * batch // queries, batch - 1)
        b = tile.find_rows(Q_EDGES, batch, at, guess)
        first = tl.maximum(tl.load(Q_EDGES + b), 0)
        token = at - first
        q_len = tl.minimum(tl.load(Q_EDGES + b + 1), queries) - first
        live = (token >= 0) & (token < q_len)
    if USED is not None:
        q_len = tl.minimum(q_len, tl.load(USED + b))
        live = live & (token < q_len)
    return b.to(tl.int64), token, q_len, at, live


@triton.jit
def _used(b, LENGTHS, ROWS, batch, rows, columns, size):
    """(line of the page table, pages in use) of sequences; none of those that take no part."""
    there = b < batch
    length = tl.load(LENGTHS + b, mask=there, other=0)
    line = b.to(tl.int64)
    if ROWS is not None:
        line = tl.load(ROWS + b, mask=there, other=-1).to(tl.int64)
    used = tl.minimum((length - 1) // size + 1, columns)
    return line, tl.where((length > 0) & (line >= 0) & (line < rows), used, 0)


@triton.jit(do_not_specialize=["table_stride", "batch", "rows", "columns", "size"])
def common_pages(
    PAGES, LENGTHS, ROWS, OUT, table_stride, batch, rows, columns, size,
    BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Lowers OUT to the tokens before the first of BC pages that not all sequences share.

    Grid: columns of the page table by BC. Pages beyond the shortest sequence are nobody's.
    """
    shortest = columns
    count = 0
    model = rows.to(tl.int64)  # whose pages are compared with
    for first in range(0, batch, BB):
        line, used = _used(first + tl.arange(0, BB), LENGTHS, ROWS, batch, rows, columns, size)
        shortest = tl.minimum(shortest, tl.min(tl.where(used > 0, used, columns), 0))
        model = tl.minimum(model, tl.min(tl.where(used > 0, line, rows), 0))
        count += tl.sum((used > 0).to(tl.int32), 0)
    shared = 0
    if count > 1:
        shared = shortest
        c = tl.program_id(0) * BC + tl.arange(0, BC)
        inside = c < shortest
        own = tl.load(PAGES + model * table_stride + c, mask=inside, other=0)
        for first in range(0, batch, BB):
            line, used = _used(first + tl.arange(0, BB), LENGTHS, ROWS, batch, rows, columns, size)
            asked = (used > 0)[:, None] & inside[None, :]
            at = PAGES + line[:, None] * table_stride + c[None, :]
            other = asked & (tl.load(at, mask=asked, other=0) != own[None, :])
            shared = tl.minimum(shared, tl.min(tl.min(tl.where(other, c[None, :], shortest), 1), 0))
    tl.atomic_min(OUT, shared * size)


_PLAIN_NUMBERS = (
    *("table_stride", "batch", "queries", "steps", "capacity", "rows", "blocks", "positions"),
    *("common", "splits", "right"),
)


@triton.jit(do_not_specialize=_PLAIN_NUMBERS)
def prefix(
    Q, K, V, PART, STATS, LENGTHS, Q_EDGES, NEW_EDGES, USED, ROWS, PAGES, COMMON_LENGTH,
    COS, SIN, BASES, Q_NORM, Q_SCALE, K_SCALE,
    q_strides, k_strides, v_strides, scale_strides, k_scale_strides,
    table_stride, batch, queries, steps, capacity, rows, blocks, positions, common, splits,
    softmax_scale, softcap, right,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ADVANCE: tl.constexpr,
    DTYPE: tl.constexpr, Q_KIND: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    INCLUDED: tl.constexpr, HAS_RIGHT: tl.constexpr, CAPPED: tl.constexpr, RAW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Grid: row tiles * HEADS * splits; programs side by side read the same keys.

    With a COMMON_LENGTH, common is the least that is read.
    """
    if PDL:  # in this order: the next kernel starts when all that it reads but PART is there
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if COMMON_LENGTH is not None:
        common, some = tile.common_on_device(COMMON_LENGTH, common, splits)
    # --- which rows
    total = queries * GROUP
    if Q_EDGES is None:
        total *= batch
    tiles = tl.cdiv(total, BM)
    program = tl.program_id(0)
    head = (program // tiles % HEADS).to(tl.int64)
    split = program // tiles // HEADS
    r = program % tiles * BM + tl.arange(0, BM)
    b, token, q_len, at, live = _tokens(r, Q_EDGES, USED, batch, queries, GROUP)
    # --- which keys: each row sees those before `until`
    line, _shift, _start, keys, old, active = tile.keys_of(
        b, LENGTHS, None, NEW_EDGES, None, ROWS, steps, capacity, rows, INCLUDED,
    )  # fmt: skip
    until = tile.common_until(keys, old, q_len, right, common, HAS_RIGHT)
    until = tl.where(live, until, 0)
    high = tl.max(until, 0)
    seen_by_all = tl.min(tl.where(live, until, high), 0)
    longest = active & (until == high)
    line = tl.max(tl.where(longest, line, 0), 0)  # all of these sequences name the same keys
    share = tl.cdiv(tl.cdiv(high, BN), splits) * BN
    first = split * share
    last = tl.minimum(first + share, high)
    bound = tl.maximum(tl.minimum(last, seen_by_all), first)
    PAGED: tl.constexpr = PAGES is not None
    LINE = PAGES
    end = 0
    if PAGED:
        LINE += line * table_stride
        end = (capacity - 1) // PAGE
    lane = tl.arange(0, BN)
    coming = _pages(LINE, first, lane, end, PAGE, BN)
    # --- the query
    dk = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    q_rows = b * q_strides[0] + at.to(tl.int64) * q_strides[1]
    q_rows += (head * GROUP + r % GROUP) * q_strides[2]
    rms = None
    if Q_NORM is not None:
        rms = tile.query_rms(Q, q_rows, dk, live, D, Q_KIND, EPS, 0)
    if HALF > 0:
        base = old.to(tl.int64)
        if BASES is not None:
            base = tl.load(BASES + b).to(tl.int64)
        q = tile.rotated(Q, q_rows, dk, live, Q_NORM, rms, COS, SIN, base + token * ADVANCE,
                         positions, D, HALF, INTERLEAVED, DTYPE, Q_KIND)  # fmt: skip
    else:
        q = tile.query(Q, q_rows, dk, live, Q_NORM, rms, D, DTYPE, Q_KIND)
    LOG2E: tl.constexpr = 1.4426950408889634
    scale = softmax_scale
    if not CAPPED:
        scale *= LOG2E
    factor = tl.zeros([BM], tl.float32) + scale
    if Q_SCALE is not None:
        factor *= tl.load(Q_SCALE + b * scale_strides[0] + head * scale_strides[1])
    if K_SCALE is not None:
        factor *= tl.load(K_SCALE + b * k_scale_strides[0] + head * k_scale_strides[1])
    K += head * k_strides[2]
    V += head * v_strides[2]
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DVP], tl.float32)
    if COMMON_LENGTH is not None:  # noqa: SIM102  here, as registers are short further up
        if some == 0:
            return
    # --- tiles that all rows see, then tiles that some of the rows see: whole, as all of these are
    for phase in tl.static_range(2):
        if phase == 0:
            begin = first
            stop = bound
        else:
            begin = bound
            stop = last
        for n in tl.range(begin, stop, BN, num_stages=None if phase == 0 else 1):
            pages = coming
            coming = _pages(LINE, n + BN, lane, end, PAGE, BN)
            k = _cached(K, pages, line, n, lane, dk, blocks, k_strides, D, DP, PAGE, BN, PAGED,
                        DTYPE, K_KIND)  # fmt: skip
            s = tl.dot(q, tl.trans(k))
            if not RAW:
                s = s * factor[:, None]
            if CAPPED:
                s = softcap * tile.tanh(s / softcap) * LOG2E
            if RAW:
                top = tl.maximum(m, tl.max(s, 1) * scale)
                p = tl.exp2(s * scale - top[:, None])
            else:
                top = tl.maximum(m, tl.max(s, 1))
                p = tl.exp2(s - top[:, None])
            alpha = tl.exp2(m - top)
            v = _cached(V, pages, line, n, lane, dv, blocks, v_strides, DV, DVP, PAGE, BN, PAGED,
                        DTYPE, V_KIND)  # fmt: skip
            if phase == 0:
                l = l * alpha + tl.sum(p, 1)
                acc = tl.dot(p.to(DTYPE), v, acc * alpha[:, None])
                m = top
            else:
                sees = n < until
                l = tl.where(sees, l * alpha + tl.sum(p, 1), l)
                acc = tl.where(sees[:, None], acc * alpha[:, None] + tl.dot(p.to(DTYPE), v), acc)
                m = tl.where(sees, top, m)
    spots = (head * splits + split) * total + r
    tl.store(STATS + spots * 2, m, mask=live)
    tl.store(STATS + spots * 2 + 1, l, mask=live)
    tl.store(PART + spots[:, None] * DVP + dv[None, :], acc, mask=live[:, None])

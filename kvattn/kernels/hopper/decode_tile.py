"""The attending warps of the decode kernel: query, new tokens, the loop over tiles of keys."""

from kvattn.kernels import tile
from kvattn.kernels.hopper.compat import gl, gluon, mbarrier, mma_v2
from kvattn.kernels.hopper.decode_end import finish
from kvattn.kernels.hopper.decode_new import patched, room_for_new, squares_of_new, store_new
from kvattn.kernels.hopper.decode_parts import after_previous_kernel
from kvattn.kernels.hopper.decode_shares import after, key_of, run_of, share_of
from kvattn.kernels.hopper.parts import release, slot_of


@gluon.jit
def _query_rows(strides, share, at, form: gl.constexpr):
    """(offsets of rows, channels, which rows there are, their tokens) of the query."""
    BM: gl.constexpr = 16 * form.WR
    LANES: gl.constexpr = form.D // 8
    SPREAD: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout(
        [1, 1, 8], [1, 32 // LANES, LANES], [1, form.WARPS, 1], [2, 1, 0],
    ))  # fmt: skip
    lane = gl.arange(0, BM, layout=gl.SliceLayout(1, SPREAD))
    d = gl.arange(0, form.D, layout=gl.SliceLayout(0, SPREAD))
    row = share.row + lane
    live = (row < at.queries * form.GROUP) & (lane < form.R)
    token = row // form.GROUP
    head = share.head * form.GROUP + row % form.GROUP
    rows = share.b * strides.q[0] + token.to(gl.int64) * strides.q[1] + head * strides.q[2]
    return rows, d, live, token


@gluon.jit
def _query(Q, fresh, rms, strides, share, at, base, form: gl.constexpr):
    """Rows [1, BM, D], normalised and rotated, as an operand of every warp."""
    BM: gl.constexpr = 16 * form.WR
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [form.WK, form.WR, 1], [1, 16, 8])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    rows, d, live, token = _query_rows(strides, share, at, form)
    DTYPE: gl.constexpr = Q.dtype.element_ty
    if form.HALF > 0:
        place = base + token * form.ADVANCE
        q = tile.rotated(
            Q, rows, d, live, fresh.Q_NORM, rms, fresh.COS, fresh.SIN, place, fresh.positions,
            form.DIM, form.HALF, form.INTERLEAVED, DTYPE, 0,
        )  # fmt: skip
    else:
        q = tile.query(Q, rows, d, live, fresh.Q_NORM, rms, form.DIM, DTYPE, 0)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    stage = gl.allocate_shared_memory(DTYPE, [1, BM, form.D], SHARED)
    stage.store(gl.expand_dims(q, 0))
    every = gl.full([form.WK, BM, form.D], 0, DTYPE, OPERAND)
    return gl.broadcast(stage.load(OPERAND), every)[0]


@gluon.jit
def _keys(LAYOUT: gl.constexpr, form: gl.constexpr):
    """The numbers of a tile's keys [WK, NK], for a tensor [WK, .., NK] of a layout."""
    L: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    w = gl.arange(0, form.WK, layout=gl.SliceLayout(1, L))
    n = gl.arange(0, form.NK, layout=gl.SliceLayout(0, L))
    return w[:, None] * form.NK + n[None, :]


@gluon.jit
def _step(q, m, l, acc, i, done, ring, news, share, at, mask, MASKED: gl.constexpr,
          form: gl.constexpr):  # fmt: skip
    """One tile of keys."""
    WK: gl.constexpr = form.WK
    NK: gl.constexpr = form.NK
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, form.WR, 1], [1, 16, 8])
    O: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, 1, form.WR], [1, 16, 8])
    key = key_of(share, i, form)
    slot, turn = slot_of(done + i, form.STAGES)
    mbarrier.wait(ring.full.index(slot), turn)
    K: gl.constexpr = gl.DotOperandLayout(1, S, 2)
    k = ring.k.index(slot).permute([0, 2, 1]).load(K)
    if MASKED and form.NEW > 0:
        k = patched(k, news.k, _keys(K, form), key, share, form)
    s = mma_v2(q, k, gl.full([WK, 16 * form.WR, NK], 0, gl.float32, S))
    if form.R < 16:  # rows behind R are padding
        s, _padding = s.reshape([WK, 2, 8, NK]).permute([0, 2, 3, 1]).split()
    L: gl.constexpr = s.type.layout
    s = s * mask.factor
    if form.CAPPED:
        s = mask.softcap * tile.tanh(s / mask.softcap) * 1.4426950408889634
    if MASKED:
        j = gl.expand_dims(key + _keys(L, form), 1)
        keep = (j >= share.low) & (j < share.high)
        if form.LEFT or form.RIGHT:
            r = gl.arange(0, form.R, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
            place = (share.row + r) // form.GROUP + share.keys - at.queries
            distance = gl.expand_dims(gl.expand_dims(place, 0), 2) - j
            if form.RIGHT:
                keep = keep & (distance >= -mask.right)
            if form.LEFT:
                keep = keep & (distance <= mask.left)
        s = gl.where(keep, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 2))
    safe = top
    if MASKED:
        safe = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(s - gl.expand_dims(safe, 2))
    alpha = gl.exp2(m - safe)
    l = l * alpha + gl.sum(p, 2)
    V: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    v = ring.v.index(slot).permute([0, 2, 1]).load(V)
    if MASKED:
        if form.NEW > 0:
            v = patched(v, news.v, _keys(V, form), key, share, form)
        j = key + _keys(V, form)
        seen = gl.expand_dims((j >= share.low) & (j < share.high), 1)
        v = gl.where(seen, v, gl.zeros_like(v))  # 0 times what lies there may be NaN
    if form.WR > 1:  # the order in which the warps take rows of O
        p = p.reshape([WK, form.WR, 2, 8, NK]).permute([0, 2, 1, 3, 4]).reshape([WK, form.R, NK])
        alpha = alpha.reshape([WK, form.WR, 2, 8]).permute([0, 2, 1, 3]).reshape([WK, form.R])
    p = gl.convert_layout(p.to(v.dtype).permute([0, 2, 1]), gl.DotOperandLayout(1, O, 2),
                          assert_trivial=True)  # fmt: skip
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O))
    acc = mma_v2(v, p, acc * gl.expand_dims(alpha, 1))
    release(ring.empty.index(slot))
    return top, l, acc


@gluon.jit
def _borders(share, at, mask, form: gl.constexpr):
    """How many of the share's tiles come before those that are seen whole, and before the rest."""
    BN: gl.constexpr = form.BN
    offset = share.keys - at.queries
    last = gl.minimum((share.row + form.R - 1) // form.GROUP, at.queries - 1)
    free, bound = tile.seen_by_all(
        share.row // form.GROUP + offset, last + offset, share.low, share.high,
        mask.left, mask.right, 0, form.LEFT, form.RIGHT, False,
    )  # fmt: skip
    if form.NEW > 0:
        bound = gl.minimum(bound, share.old)
    free = gl.cdiv(gl.maximum(free, 0), BN) * BN
    bound = gl.maximum(bound, 0) // BN * BN
    before = gl.minimum(gl.maximum(free - share.first, 0) // BN, share.count)
    until = gl.maximum(bound - share.first, 0) // BN
    return before, gl.minimum(gl.maximum(until, before), share.count)


@gluon.jit
def _attend_share(Q, cache, fresh, results, strides, ring, share, done, at, mask,
                  form: gl.constexpr):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [form.WK, form.WR, 1], [1, 16, 8])
    O: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [form.WK, 1, form.WR], [1, 16, 8])
    base = share.old
    if fresh.BASES is not None:
        base = gl.load(fresh.BASES + share.b)
    q_rms = None
    k_rms = None
    if fresh.Q_NORM is not None:
        rows, d, live, _token = _query_rows(strides, share, at, form)
        q_rms = tile.query_squares(Q, rows, d, live, form.DIM, 0, 0)
    if fresh.K_NORM is not None:  # while the other sum is on its way
        k_rms = squares_of_new(fresh, strides, share, at, form)
        k_rms = tile.inverse_rms(k_rms, form.DIM, form.EPS)
    if fresh.Q_NORM is not None:
        q_rms = tile.inverse_rms(q_rms, form.DIM, form.EPS)
    news = None
    if form.NEW > 0:
        news = room_for_new(Q.dtype.element_ty, form)
        store_new(cache, fresh, k_rms, news, strides, share, at, base, form)
    q = _query(Q, fresh, q_rms, strides, share, at, base, form)
    empty = gl.full([form.WK, 16 * form.WR, form.NK], 0, gl.float32, S)
    if form.R < 16:
        empty, _ = empty.reshape([form.WK, 2, 8, form.NK]).permute([0, 2, 3, 1]).split()
    ROWS: gl.constexpr = gl.SliceLayout(2, empty.type.layout)
    m = gl.full([form.WK, form.R], float("-inf"), gl.float32, ROWS)
    l = gl.full([form.WK, form.R], 0, gl.float32, ROWS)
    acc = gl.full([form.WK, form.DV, form.R], 0, gl.float32, O)
    before, until = _borders(share, at, mask, form)
    masked = share.count - until
    whole = share.count - before
    for i in range(masked):
        m, l, acc = _step(q, m, l, acc, i, done, ring, news, share, at, mask, True, form)
    for i in range(masked, whole):
        m, l, acc = _step(q, m, l, acc, i, done, ring, news, share, at, mask, False, form)
    if form.LEFT:
        for i in range(whole, share.count):
            m, l, acc = _step(q, m, l, acc, i, done, ring, news, share, at, mask, True, form)
    finish(m, l, acc, results, strides, share, at, form)


@gluon.jit
def attend(Q, cache, fresh, results, strides, ring, at, mask, form: gl.constexpr):
    after_previous_kernel(form)
    run = run_of(at, mask, form.WARPS, form)
    done = gl.to_tensor(0)
    while run.at < run.end:
        share = share_of(run, at, mask, form)
        _attend_share(Q, cache, fresh, results, strides, ring, share, done, at, mask, form)
        done += share.count
        run = after(run, share)

"""The attending warps of the decode kernel: query, new tokens, the loop over tiles of keys."""

from kvattn.kernels import tile
from kvattn.kernels.hopper.compat import gl, gluon, mbarrier, mma_v2
from kvattn.kernels.hopper.decode_end import finish, foresee
from kvattn.kernels.hopper.decode_new import arrived, new_tokens, store
from kvattn.kernels.hopper.decode_query import border, borders, queries, turned
from kvattn.kernels.hopper.decode_shares import key_of
from kvattn.kernels.hopper.parts import release, slot_of


@gluon.jit
def _shared(x, COUNT: gl.constexpr):
    """x as the first of COUNT rows [1, COUNT, D]; the others hold anything."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    rows = gl.allocate_shared_memory(x.dtype, [1, COUNT, x.shape[1]], LAYOUT)
    rows.slice(0, x.shape[0], 1).store(gl.expand_dims(x, 0))
    return rows


@gluon.jit
def _operand(x, WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    """An operand [WARPS, ..]; what is there once is the same for all of them."""
    loaded = x.load(LAYOUT)
    if x.shape[0] == 1:
        every = gl.full([WARPS, loaded.shape[1], loaded.shape[2]], 0, loaded.dtype, LAYOUT)
        loaded = gl.broadcast(loaded, every)[0]
    return loaded


@gluon.jit
def _keys(LAYOUT: gl.constexpr, form: gl.constexpr):
    """The numbers of a tile's keys [WARPS, NK], for a tensor [WARPS, .., NK] of a layout."""
    L: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    w = gl.arange(0, form.WK, layout=gl.SliceLayout(1, L))
    n = gl.arange(0, form.NK, layout=gl.SliceLayout(0, L))
    return w[:, None] * form.NK + n[None, :]


@gluon.jit
def _step(q, m, l, acc, k, v, full, turn, key, end, share, at, mask, MASKED: gl.constexpr,
          form: gl.constexpr):  # fmt: skip
    """One tile of keys, of which those before `end` are seen."""
    WK: gl.constexpr = form.WK
    NK: gl.constexpr = form.NK
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, form.WR, 1], [1, 16, 8])
    O: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, 1, form.WR], [1, 16, 8])
    K: gl.constexpr = gl.DotOperandLayout(1, S, 2)
    k = _operand(k.permute([0, 2, 1]), WK, K)
    s = mma_v2(q, k, gl.full([WK, 16 * form.WR, NK], 0, gl.float32, S))
    if form.R < 16:  # rows behind R are padding
        s, _padding = s.reshape([WK, 2, 8, NK]).permute([0, 2, 3, 1]).split()
    L: gl.constexpr = s.type.layout
    s = s * mask.factor
    if form.CAPPED:
        s = mask.softcap * tile.tanh(s / mask.softcap) * 1.4426950408889634
    if MASKED:
        j = gl.expand_dims(key + _keys(L, form), 1)
        keep = (j >= share.low) & (j < end)
        if form.LEFT or form.RIGHT:
            r = gl.arange(0, form.R, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
            place = (share.row + r) // form.GROUP + share.keys - share.queries
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
    if full is not None:
        mbarrier.wait(full, turn)
    v = _operand(v.permute([0, 2, 1]), WK, V)
    if MASKED:
        j = key + _keys(V, form)
        seen = gl.expand_dims((j >= share.low) & (j < end), 1)
        v = gl.where(seen, v, gl.zeros_like(v))  # 0 times what lies there may be NaN
    if form.WR > 1:  # the order in which the warps take rows of O
        p = p.reshape([WK, form.WR, 2, 8, NK]).permute([0, 2, 1, 3, 4]).reshape([WK, form.R, NK])
        alpha = alpha.reshape([WK, form.WR, 2, 8]).permute([0, 2, 1, 3]).reshape([WK, form.R])
    p = gl.convert_layout(p.to(v.dtype).permute([0, 2, 1]), gl.DotOperandLayout(1, O, 2),
                          assert_trivial=True)  # fmt: skip
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O))
    acc = mma_v2(v, p, acc * gl.expand_dims(alpha, 1))
    return top, l, acc


@gluon.jit
def _next(q, m, l, acc, i, done, ring, share, at, mask, MASKED: gl.constexpr, form: gl.constexpr):
    """The share's i-th tile, out of the ring."""
    slot, turn = slot_of(done + i, form.STAGES)
    mbarrier.wait(ring.k_full.index(slot), turn)
    m, l, acc = _step(q, m, l, acc, ring.k.index(slot), ring.v.index(slot),
                      ring.v_full.index(slot), turn, key_of(share, i, form), share.stored, share,
                      at, mask, MASKED, form)  # fmt: skip
    release(ring.empty.index(slot))
    return m, l, acc


@gluon.jit
def attend_narrow(Q, cache, fresh, results, strides, ring, share, done, base, at, mask,
                  form: gl.constexpr):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [form.WK, form.WR, 1], [1, 16, 8])
    O: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [form.WK, 1, form.WR], [1, 16, 8])
    if form.NEW > 0:
        k_news, v_news = new_tokens(fresh, strides, share, at, base, form)
    q = queries(Q, fresh, strides, share, at, base, 0, form.BM, form)
    border(ring.ready)
    foresee(results, share)
    if form.NEW > 0:
        tokens = arrived(k_news, v_news, fresh, form)
        k_near = _shared(tokens.k, form.NK)
        v_near = _shared(tokens.v, form.NK)
    q = _shared(turned(q, fresh.Q_NORM, fresh.positions, form.HALF, form), 16 * form.WR)
    q = _operand(q, form.WK, gl.DotOperandLayout(0, S, 2))
    empty = gl.full([form.WK, 16 * form.WR, form.NK], 0, gl.float32, S)
    if form.R < 16:
        empty, _ = empty.reshape([form.WK, 2, 8, form.NK]).permute([0, 2, 3, 1]).split()
    ROWS: gl.constexpr = gl.SliceLayout(2, empty.type.layout)
    m = gl.full([form.WK, form.R], float("-inf"), gl.float32, ROWS)
    l = gl.full([form.WK, form.R], 0, gl.float32, ROWS)
    acc = gl.full([form.WK, form.DV, form.R], 0, gl.float32, O)
    if form.NEW > 0:
        store(k_news, v_news, tokens, cache)
        if share.ends:
            m, l, acc = _step(q, m, l, acc, k_near, v_near, None, 0, share.old, share.high, share,
                              at, mask, True, form)  # fmt: skip
    before, until = borders(share, at, mask, form)
    masked = share.count - until
    whole = share.count - before
    for i in range(masked):
        m, l, acc = _next(q, m, l, acc, i, done, ring, share, at, mask, True, form)
    for i in range(masked, whole):
        m, l, acc = _next(q, m, l, acc, i, done, ring, share, at, mask, False, form)
    if form.LEFT:
        for i in range(whole, share.count):
            m, l, acc = _next(q, m, l, acc, i, done, ring, share, at, mask, True, form)
    finish(m, l, acc, results, strides, share, at, form)

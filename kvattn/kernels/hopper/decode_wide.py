"""More than 16 query rows: one warpgroup multiplies 64 of them with tiles in shared memory.

Every warp owns 16 rows and all keys of a tile, so that nothing is exchanged at the end. Rows that
are not there cost no time: what takes it is the way of the keys from memory.
"""

from kvattn.kernels import tile
from kvattn.kernels.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from kvattn.kernels.hopper.decode_end import foresee, put, settle
from kvattn.kernels.hopper.decode_new import arrived, new_tokens, store
from kvattn.kernels.hopper.decode_query import border, borders, queries, turned
from kvattn.kernels.hopper.decode_shares import key_of
from kvattn.kernels.hopper.parts import release, slot_of

_ROWS = gl.constexpr(64)


@gluon.jit
def _shared(x, COUNT: gl.constexpr):
    """x as the first of COUNT rows; the others hold anything."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    rows = gl.allocate_shared_memory(x.dtype, [COUNT, x.shape[1]], LAYOUT)
    rows.slice(0, x.shape[0], 0).store(x)
    return rows


@gluon.jit
def _cleared(v, low, high, form: gl.constexpr):
    """Zeros the rows of a tile of V outside low .. high - 1: 0 times what they hold may be NaN."""
    LANES: gl.constexpr = form.DV // 8
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    if (low > 0) | (high < v.shape[0]):
        row = gl.arange(0, v.shape[0], layout=gl.SliceLayout(1, SPREAD))
        keep = ((row >= low) & (row < high))[:, None]
        x = v.load(SPREAD)
        v.store(gl.where(keep, x, gl.zeros_like(x)))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def _step(q, m, l, acc, k, v, full, turn, key, end, share, at, mask, MASKED: gl.constexpr,
          form: gl.constexpr):  # fmt: skip
    """One tile of keys, of which those before `end` are seen."""
    N: gl.constexpr = k.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.DV, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, O)
    q = gl.convert_layout(q, gl.DotOperandLayout(0, S, 2), assert_trivial=True)
    s = warpgroup_mma(q, k.permute([1, 0]), gl.zeros([_ROWS, N], gl.float32, S), use_acc=False,
                      is_async=True)  # fmt: skip
    s = warpgroup_mma_wait(0, deps=[s])
    s = s * mask.factor
    if form.CAPPED:
        s = mask.softcap * tile.tanh(s / mask.softcap) * 1.4426950408889634
    if MASKED:
        j = (key + gl.arange(0, N, layout=gl.SliceLayout(0, S)))[None, :]
        keep = (j >= share.low) & (j < end)
        if form.LEFT or form.RIGHT:
            r = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, S))
            place = (share.row + r) // form.GROUP + share.keys - share.queries
            distance = place[:, None] - j
            if form.RIGHT:
                keep = keep & (distance >= -mask.right)
            if form.LEFT:
                keep = keep & (distance <= mask.left)
        s = gl.where(keep, s, float("-inf"))
    top = gl.maximum(m, gl.convert_layout(gl.max(s, 1), ROWS, assert_trivial=True))
    safe = top
    if MASKED:
        safe = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(s - gl.convert_layout(safe, gl.SliceLayout(1, S), assert_trivial=True)[:, None])
    alpha = gl.exp2(m - safe)
    l = l * alpha + gl.convert_layout(gl.sum(p, 1), ROWS, assert_trivial=True)
    p = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, O, 2), assert_trivial=True)
    if full is not None:
        mbarrier.wait(full, turn)
    if MASKED:
        _cleared(v, share.low - key, end - key, form)
    acc = warpgroup_mma(p, v, acc * alpha[:, None], is_async=True)
    acc, _ = warpgroup_mma_wait(0, deps=[acc, p])
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
def attend_wide(Q, cache, fresh, results, strides, ring, share, done, base, at, mask,
                form: gl.constexpr):  # fmt: skip
    """A share, from its queries to its sums."""
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.DV, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, O)
    CHUNK: gl.constexpr = form.BM if form.BM < 32 else 32  # rows that do not spill
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.BN, 16])
    if form.NEW > 0:
        k_news, v_news = new_tokens(fresh, strides, share, at, base, form)
    q = queries(Q, fresh, strides, share, at, base, 0, CHUNK, form)
    border(ring.ready)
    foresee(results, share)
    rows = _shared(turned(q, fresh.Q_NORM, fresh.positions, form.HALF, form), _ROWS)
    for i in gl.static_range(1, form.BM // CHUNK):
        more = queries(Q, fresh, strides, share, at, base, i * CHUNK, CHUNK, form)
        rows.slice(i * CHUNK, CHUNK, 0).store(
            turned(more, fresh.Q_NORM, fresh.positions, form.HALF, form)
        )
    q = rows.load(gl.DotOperandLayout(0, S, 2))
    if form.NEW > 0:
        tokens = arrived(k_news, v_news, fresh, form)
        k_near = _shared(tokens.k, form.NK)
        v_near = _shared(tokens.v, form.NK)
    fence_async_shared()
    gl.thread_barrier()
    m = gl.full([_ROWS], float("-inf"), gl.float32, ROWS)
    l = gl.full([_ROWS], 0, gl.float32, ROWS)
    acc = gl.full([_ROWS, form.DV], 0, gl.float32, O)
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
    put(m, l, acc, 0, results, strides, share, at, form)
    settle(results, strides, share, at, form)

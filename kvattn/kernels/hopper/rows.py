"""A computing warpgroup: 64 rows of queries over all tiles of keys that they see.

S = Q K^T of one tile of keys is multiplied while the product with V of the tile before runs, so
that exponentials and matrix products overlap; named barriers make the warpgroups take turns at
the tensor cores. Tiles of keys go from the last to the first: those that need a mask come first.
"""

from kvattn.kernels.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from kvattn.kernels.hopper.parts import (
    PIECES,
    TOGETHER,
    TURN,
    State,
    border,
    hand_over,
    named_barrier,
    slot_of,
)
from kvattn.kernels.hopper.references import declare, rescale, spare
from kvattn.kernels.hopper.schedule import Work, floor_to
from kvattn.kernels.hopper.scores import (
    edit,
    mask,
    pack,
    softmax,
    softmax_masked,
    unpack,
)


@gluon.jit
def _field(ring, slot, NUMBER: gl.constexpr):
    EVERYONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(ring.data.index(slot).slice(NUMBER, 1).load(EVERYONE), 0)


@gluon.jit
def _hear(ring, count, form: gl.constexpr):
    """What the loop over keys needs to know of the piece that was announced; is there one?"""
    slot, turn = slot_of(count, PIECES)
    mbarrier.wait(ring.full.index(slot), turn)
    more = _field(ring, slot, 0)
    row = _field(ring, slot, 3)
    q_len = _field(ring, slot, 5)
    start = _field(ring, slot, 6)
    end = _field(ring, slot, 7)
    first = _field(ring, slot, 8)
    last = _field(ring, slot, 9)
    b = row
    head = row
    if form.EDITED:
        b = _field(ring, slot, 1)
        head = _field(ring, slot, 2)
    return Work(b, head, row, row, q_len, start, end, first, last, row, row, row, row), more


@gluon.jit
def _hear_rest(w, ring, count):
    """The same with what the end needs; kept out of the registers until then."""
    slot, _ = slot_of(count, PIECES)
    b = _field(ring, slot, 1)
    head = _field(ring, slot, 2)
    q_first = _field(ring, slot, 4)
    active = _field(ring, slot, 10)
    mbarrier.arrive(ring.empty.index(slot), count=1)
    return Work(b, head, w.row, q_first, w.q_len, w.start, w.end, w.first, w.last, active,
                b, b, b)  # fmt: skip


@gluon.jit
def _scores(q, ring, slot, BN: gl.constexpr, D: gl.constexpr):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    k = ring.data.index(slot).reshape([BN, D]).permute([1, 0])
    return warpgroup_mma(q, k, gl.zeros([64, BN], gl.float32, S), use_acc=False, is_async=True)


@gluon.jit
def _sum_values(p, ring, slot, o, form: gl.constexpr):
    v = ring.data.index(slot).reshape([form.BN, form.DV])
    return warpgroup_mma(p, v, o, is_async=True)


@gluon.jit
def _clear(ring, count, low, high, GROUP: gl.constexpr, form: gl.constexpr):
    """Zeros the rows of a V tile outside low .. high - 1: 0 times what they hold may be NaN.

    The warpgroups share the rows out and wait for each other.
    """
    ROWS: gl.constexpr = 32
    LANES: gl.constexpr = form.DV // 8
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    slot, turn = slot_of(count, form.STAGES)
    mbarrier.wait(ring.full.index(slot), turn)
    v = ring.data.index(slot).reshape([form.BN, form.DV])
    CHUNKS: gl.constexpr = form.BN // ROWS
    for i in gl.static_range(CHUNKS):
        if i % form.GROUPS == GROUP:  # noqa: SIM102  known when compiled
            if (high < (i + 1) * ROWS) | (low > i * ROWS):
                part = v.slice(i * ROWS, ROWS, 0)
                row = i * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SPREAD))
                x = part.load(SPREAD)
                keep = ((row >= low) & (row < high))[:, None]
                part.store(gl.where(keep, x, gl.zeros_like(x)))
    fence_async_shared()
    named_barrier("sync", TOGETHER, 128 * form.GROUPS)


@gluon.jit
def _judge(s, w, row, key, m, tensors, bounds, scaling, ROWS: gl.constexpr, MASKED: gl.constexpr,
           GROUP: gl.constexpr, form: gl.constexpr):  # fmt: skip
    SPARE: gl.constexpr = spare(tensors.q.dtype)
    if form.EDITED:
        s = edit(s, w, row, key, scaling, tensors.ALIBI, tensors.alibi_strides, form)
    if MASKED:
        s = mask(s, w, row, key, bounds, form)
        return softmax_masked(s, m, scaling.factor, ROWS, SPARE)
    else:
        return softmax(s, m, scaling.factor, SPARE, GROUP)


@gluon.jit
def _step(q, rings, state, tile, w, row, tensors, bounds, scaling, GROUP: gl.constexpr,
          MASKED: gl.constexpr, form: gl.constexpr):  # fmt: skip
    """S of a tile of keys and O of the tile before are in flight together.

    On entry the tile of K is known to be there; on return so is the next.
    """
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, O)
    THREADS: gl.constexpr = 256
    v_slot, v_turn = slot_of(state.count, form.STAGES)
    k_slot, _ = slot_of(state.count + 1, form.STAGES)
    if form.PING_PONG:
        named_barrier("sync", TURN + GROUP, THREADS)
    s = _scores(q, rings.k, k_slot, form.BN, form.D)
    mbarrier.wait(rings.v.full.index(v_slot), v_turn)
    p = unpack(state.p, tensors.q.dtype, P)
    o = _sum_values(p, rings.v, v_slot, state.o, form)
    if form.PING_PONG:
        named_barrier("arrive", TURN + (GROUP + 1) % form.GROUPS, THREADS)
    s = warpgroup_mma_wait(1, deps=[s])
    hand_over("arrive", k_slot, 0, form)
    m = border(state.m, state.count)
    m, alpha, sums, exps = _judge(
        s, w, row, tile * form.BN, m, tensors, bounds, scaling, ROWS, MASKED, GROUP, form
    )
    THREADS_OF_ROWS: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    each = gl.convert_layout(alpha, THREADS_OF_ROWS, assert_trivial=True)
    l = border(state.l * each[:, None] + sums, state.count)
    next_slot, next_turn = slot_of(state.count + 2, form.STAGES)
    mbarrier.wait(rings.k.full.index(next_slot), next_turn, pred=tile > w.first)
    o, _ = warpgroup_mma_wait(0, deps=[o, p])
    hand_over("arrive", v_slot, 1, form)
    o = rescale(o, gl.convert_layout(alpha, ROWS, assert_trivial=True))
    return State(pack(exps, tensors.q.dtype), o, m, l, state.count + 1)


@gluon.jit
def _unmasked(w, row, bounds, form: gl.constexpr):
    """Tiles of keys from .. to - 1 that all 64 rows from `row` on see whole."""
    offset = w.end - w.q_len
    low = w.start
    high = w.end
    if form.RIGHT:
        high = gl.minimum(high, row // form.PACK + offset + bounds.right + 1)
    if form.LEFT:
        low = gl.maximum(low, (row + 63) // form.PACK + offset - bounds.left)
    begin = w.first
    if form.CHUNKED:
        begin = w.last
    elif form.LOW:
        begin = gl.maximum(begin, gl.cdiv(gl.maximum(low, 0), form.BN))
    return begin, gl.maximum(gl.maximum(high, 0) // form.BN, w.first)


@gluon.jit
def _first_key(w, bounds, form: gl.constexpr):
    """The first slot that any row of the sequence sees; what lies before is dead."""
    low = w.start
    offset = w.end - w.q_len
    if form.LEFT:
        low = gl.maximum(low, offset - bounds.left)
    if form.CHUNKED:
        low = gl.maximum(low, floor_to(offset - w.start, bounds.chunk) + w.start)
    return low


@gluon.jit
def _totals(m, l, w, row, SINKS, form: gl.constexpr):
    """What O is multiplied with, and the lse; a sink is one more logit without a value."""
    top = m
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout, assert_trivial=True)
    alpha = 1.0
    if SINKS is not None:
        rows = row + gl.arange(0, 64, layout=m.type.layout)
        inside = rows < w.q_len * form.PACK
        sink = gl.load(SINKS + w.head + rows % form.PACK, mask=inside, other=0).to(gl.float32)
        sink = gl.where(w.active > 0, sink * 1.4426950408889634, float("-inf"))
        both = gl.maximum(top, sink)
        endless = both == float("inf")
        safe = gl.where((both == float("-inf")) | endless, 0.0, both)
        alpha = gl.where(endless, 0.0, gl.exp2(top - safe))
        l = l * alpha + gl.where(endless, 1.0, gl.exp2(sink - safe))
        top = both
    some = l > 0.0
    l = gl.where(some, l, 1.0)
    lse = gl.where(some, (top + gl.log2(l)) * 0.6931471805599453, float("-inf"))
    return alpha / l, lse


@gluon.jit
def _store(o, lse, w, row, stage, tensors, form: gl.constexpr):
    """O, packed, through shared memory, where Q was, so that rows are written in whole sectors."""
    PACK: gl.constexpr = form.PACK
    out = tensors.OUT
    if tensors.LSE is not None:
        rows = row + gl.arange(0, 64, layout=lse.type.layout)
        head = (w.head + rows % PACK).to(gl.int64)
        token = (w.q_first + rows // PACK).to(gl.int64)
        strides = tensors.lse_strides
        at = w.b.to(gl.int64) * strides[0] + head * strides[1] + token * strides[2]
        gl.store(tensors.LSE + at, lse, mask=rows < w.q_len * PACK)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    stage = reinterpret(stage, tensors.q.dtype, [64, form.DV], LAYOUT)
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.DV, 16])
    stage.store(unpack(o, tensors.q.dtype, O))
    LANES: gl.constexpr = form.DV // 8
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    o = stage.load(SPREAD)
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, SPREAD))
    d = gl.arange(0, form.DV, layout=gl.SliceLayout(0, SPREAD))
    head = (w.head + rows % PACK).to(gl.int64)
    token = (w.q_first + rows // PACK).to(gl.int64)
    strides = tensors.out_strides
    at = w.b.to(gl.int64) * strides[0] + head * strides[1] + token * strides[2]
    inside = (rows < w.q_len * PACK)[:, None]
    if form.DIM_V < form.DV:
        inside = inside & (d < form.DIM_V)[None, :]
    gl.store(out + at[:, None] + d[None, :], o, mask=inside)
    fence_async_shared()


@gluon.jit
def _queries(piece, rings, GROUP: gl.constexpr, form: gl.constexpr):
    """(number in the ring, this warpgroup's rows where they lie).

    To be asked for in every piece: a view of shared memory carried through a loop is compiled to
    something wrong.
    """
    slot, _ = slot_of(piece, form.Q_STAGES)
    mine = slot * form.GROUPS + GROUP
    return mine, rings.q.data.index(mine).reshape([64, form.D])


@gluon.jit
def _first_scores(piece, count, more, rings, GROUP: gl.constexpr, form: gl.constexpr):
    """S of the first tile of keys of a piece is issued; of memory nobody reads if there is none."""
    _, q_turn = slot_of(piece, form.Q_STAGES)
    mine, q = _queries(piece, rings, GROUP, form)
    slot, turn = slot_of(count, form.STAGES)
    mbarrier.wait(rings.q.full.index(mine), q_turn, pred=more > 0)
    mbarrier.wait(rings.k.full.index(slot), turn, pred=more > 0)
    return _scores(q, rings.k, slot, form.BN, form.D)


@gluon.jit
def _attend(s, w, piece, count, tensors, rings, bounds, scaling, GROUP: gl.constexpr,
            form: gl.constexpr):  # fmt: skip
    """One tile of rows: this warpgroup's 64 of them, from the first S on.

    Returns O, packed, and lse, where they belong, and the number of tiles of keys so far.
    """
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, O)
    row = w.row + GROUP * 64
    slot, _ = slot_of(count, form.STAGES)
    hand_over("arrive", slot, 0, form)
    _, q = _queries(piece, rings, GROUP, form)
    if form.Q_LOADED:
        S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.BN, 16])
        q = q.load(gl.DotOperandLayout(0, S, 2))
    tile = w.last - 1
    m = gl.full([64], float("-inf"), gl.float32, ROWS)
    m, _, l, p = _judge(
        s, w, row, tile * form.BN, m, tensors, bounds, scaling, ROWS, True, GROUP, form
    )
    p = pack(p, tensors.q.dtype)
    DV: gl.constexpr = form.DV
    state = State(p, gl.zeros([64, DV], gl.float32, O), m, l, count)
    if w.end < w.last * form.BN:
        _clear(rings.v, count, 0, w.end - tile * form.BN, GROUP, form)
    slot, turn = slot_of(count + 1, form.STAGES)
    mbarrier.wait(rings.k.full.index(slot), turn, pred=tile > w.first)
    begin, bound = _unmasked(w, row, bounds, form)
    edge = gl.minimum(gl.maximum(bound, begin), tile)  # the mask's edge lies above
    for _ in range(tile - edge):
        tile -= 1
        state = _step(q, rings, state, tile, w, row, tensors, bounds, scaling, GROUP, True, form)
    if not form.CHUNKED:
        for _ in range(tile - begin):
            tile -= 1
            state = _step(
                q, rings, state, tile, w, row, tensors, bounds, scaling, GROUP, False, form
            )
    if form.LOW:
        for _ in range(tile - w.first):
            tile -= 1
            state = _step(
                q, rings, state, tile, w, row, tensors, bounds, scaling, GROUP, True, form
            )
        dead = _first_key(w, bounds, form)
        if dead > tile * form.BN:
            _clear(rings.v, state.count, dead - tile * form.BN, form.BN, GROUP, form)
    slot, turn = slot_of(state.count, form.STAGES)
    mbarrier.wait(rings.v.full.index(slot), turn)
    p = unpack(state.p, tensors.q.dtype, P)
    o = _sum_values(p, rings.v, slot, state.o, form)
    w = _hear_rest(w, rings.work, piece)
    scale, lse = _totals(state.m, state.l, w, row, tensors.SINKS, form)
    o, _ = warpgroup_mma_wait(0, deps=[o, p])
    hand_over("arrive", slot, 1, form)
    o = o * gl.convert_layout(scale, ROWS, assert_trivial=True)[:, None]
    return pack(o, tensors.q.dtype), lse, w, state.count + 1


@gluon.jit
def _skip(w, piece, count, tensors, rings, bounds, GROUP: gl.constexpr, form: gl.constexpr):
    """The same for rows beyond the sequence: tiles are given back unread, turns are passed on."""
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.DV, 16])
    tile = w.last - 1
    if w.end < w.last * form.BN:
        _clear(rings.v, count, 0, w.end - tile * form.BN, GROUP, form)
    slot, _ = slot_of(count, form.STAGES)
    hand_over("arrive", slot, 0, form)
    for _ in range(tile - w.first):
        if form.PING_PONG:
            named_barrier("sync", TURN + GROUP, 256)
            named_barrier("arrive", TURN + (GROUP + 1) % form.GROUPS, 256)
        k_slot, k_turn = slot_of(count + 1, form.STAGES)
        mbarrier.wait(rings.k.full.index(k_slot), k_turn)
        hand_over("arrive", k_slot, 0, form)
        v_slot, v_turn = slot_of(count, form.STAGES)
        mbarrier.wait(rings.v.full.index(v_slot), v_turn)
        hand_over("arrive", v_slot, 1, form)
        count += 1
    if form.LOW:
        dead = _first_key(w, bounds, form)
        if dead > w.first * form.BN:
            _clear(rings.v, count, dead - w.first * form.BN, form.BN, GROUP, form)
    slot, turn = slot_of(count, form.STAGES)
    mbarrier.wait(rings.v.full.index(slot), turn)
    hand_over("arrive", slot, 1, form)
    DV: gl.constexpr = form.DV
    o = pack(gl.zeros([64, DV], gl.float32, O), tensors.q.dtype)
    lse = gl.zeros([64], gl.float32, gl.SliceLayout(1, O))
    return o, lse, _hear_rest(w, rings.work, piece), count + 1


@gluon.jit
def compute(tensors, rings, bounds, scaling, GROUP: gl.constexpr, form: gl.constexpr):
    """Piece after piece; while one's O is stored, the first S of the next is multiplied.

    Not where queries stay in shared memory: that came out wrong on the GPU.
    """
    if form.PING_PONG and GROUP == form.GROUPS - 1:
        named_barrier("arrive", TURN, 256)
    declare(GROUP)
    piece = gl.to_tensor(0)
    count = gl.to_tensor(0)
    w, more = _hear(rings.work, piece, form)
    if form.Q_LOADED:
        s = _first_scores(piece, count, more, rings, GROUP, form)
        s = warpgroup_mma_wait(0, deps=[s])
    while more > 0:
        if not form.Q_LOADED:
            s = _first_scores(piece, count, more, rings, GROUP, form)
            s = warpgroup_mma_wait(0, deps=[s])
        row = w.row + GROUP * 64
        if not form.RAGGED or row < w.q_len * form.PACK:
            o, lse, w, count = _attend(
                s, w, piece, count, tensors, rings, bounds, scaling, GROUP, form
            )
        else:
            o, lse, w, count = _skip(w, piece, count, tensors, rings, bounds, GROUP, form)
        mine, _ = _queries(piece, rings, GROUP, form)
        if form.Q_STAGES == 1 or not form.Q_LOADED:  # the next Q may come to where O has been
            _store(o, lse, w, row, rings.q.data.index(mine), tensors, form)
            mbarrier.arrive(rings.q.empty.index(mine), count=1)
        coming, more = _hear(rings.work, piece + 1, form)
        if form.Q_LOADED:
            s = _first_scores(piece + 1, count, more, rings, GROUP, form)
            if form.Q_STAGES > 1:
                _store(o, lse, w, row, rings.q.data.index(mine), tensors, form)
                mbarrier.arrive(rings.q.empty.index(mine), count=1)
            s = warpgroup_mma_wait(0, deps=[s])
        w = coming
        piece += 1

"""The copying warp: it deals out the work and keeps rings of Q, K and V tiles full through TMA."""

from kvattn.kernels.hopper.compat import gl, gluon, load_box, mbarrier
from kvattn.kernels.hopper.parts import FIELDS, PIECES, hand_over, slot_of
from kvattn.kernels.hopper.schedule import work_of


@gluon.jit
def _places(tile, w, PAGES, n, form: gl.constexpr):
    """The page or cache row of each box of a tile of keys; beyond the tensor where unused."""
    BOXES: gl.constexpr = form.BN // form.BOX
    found = ()
    for i in gl.static_range(BOXES):
        if form.PAGED:
            slot = tile * form.BN + i * form.BOX
            used = (slot < w.end) & (w.line < n.rows)
            at = w.line.to(gl.int64) * n.table_stride + slot // n.page_size
            page = gl.load(PAGES + at, mask=used, other=-1)
            page = gl.where((page >= 0) & (page < n.blocks), page, n.blocks)
            found = found + (page,)  # noqa: RUF005
        else:
            found = found + (w.line,)  # noqa: RUF005
    return found


@gluon.jit
def _first_slot(tile, w, n, form: gl.constexpr):
    """Where a tile begins within its page or cache row."""
    slot = tile * form.BN
    if form.PAGED:
        slot = slot % n.page_size
    else:
        slot += w.shift
    return slot


@gluon.jit
def _load_tile(desc, ring, places, slot_first, count, head, V: gl.constexpr,
               form: gl.constexpr):  # fmt: skip
    STAGES: gl.constexpr = form.STAGES
    slot, _ = slot_of(count, STAGES)
    if count >= STAGES:
        hand_over("sync", slot, V, form)
    BOXES: gl.constexpr = form.BN // form.BOX
    if BOXES == 1:
        mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes)
        place = [places[0], slot_first, head, 0]
        load_box(desc, place, ring.full.index(slot), ring.data.index(slot))
    else:
        DIM: gl.constexpr = ring.data.shape[0] // (STAGES * BOXES)
        mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes * (BOXES * DIM))
        for column in gl.static_range(DIM):
            for i in gl.static_range(BOXES):
                at = (slot * DIM + column) * BOXES + i
                load_box(desc, [places[i], 0, head, column * 64], ring.full.index(slot),
                         ring.data.index(at))  # fmt: skip


@gluon.jit
def _load_queries(w, count, tensors, ring, at, n, form: gl.constexpr):
    slot, turn = slot_of(count, form.Q_STAGES)
    GROUPS: gl.constexpr = form.GROUPS
    for g in gl.static_range(GROUPS):
        mbarrier.wait(ring.empty.index(slot * form.GROUPS + g), turn ^ 1)
        mbarrier.expect(ring.full.index(slot * form.GROUPS + g), tensors.q.block_type.nbytes)
        token = w.q_first + w.row // form.PACK + g * (64 // form.PACK)
        b = w.b if at.Q_EDGES is None else 0
        load_box(tensors.q, [b, token, w.head // n.group, w.head % n.group, 0],
                 ring.full.index(slot * form.GROUPS + g),
                 ring.data.index(slot * form.GROUPS + g))  # fmt: skip


@gluon.jit
def _announce(ring, count, w, more):
    """Tells the warpgroups what to compute next."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i = gl.arange(0, FIELDS, layout=LANES)
    x = gl.where(i == 0, more, 0)
    x = gl.where(i == 1, w.b, x)
    x = gl.where(i == 2, w.head, x)
    x = gl.where(i == 3, w.row, x)
    x = gl.where(i == 4, w.q_first, x)
    x = gl.where(i == 5, w.q_len, x)
    x = gl.where(i == 6, w.start, x)
    x = gl.where(i == 7, w.end, x)
    x = gl.where(i == 8, w.first, x)
    x = gl.where(i == 9, w.last, x)
    x = gl.where(i == 10, w.active, x)
    slot, turn = slot_of(count, PIECES)
    mbarrier.wait(ring.empty.index(slot), turn ^ 1)
    ring.data.index(slot).store(x)
    mbarrier.arrive(ring.full.index(slot), count=1)


@gluon.jit
def _next_piece(at, n, bounds, COUNTER, form: gl.constexpr):
    """The next piece that has rows, and whether there is one."""
    t = gl.atomic_add(COUNTER, 1) + gl.num_programs(0)
    w = work_of(t, at, n, bounds, form)
    while (t < n.pieces) & (w.live == 0):
        t = gl.atomic_add(COUNTER, 1) + gl.num_programs(0)
        w = work_of(t, at, n, bounds, form)
    return w, t < n.pieces


@gluon.jit
def copy(tensors, rings, at, n, bounds, COUNTER, form: gl.constexpr):
    count = gl.to_tensor(0)
    keys = gl.to_tensor(0)
    t = gl.program_id(0)
    w = work_of(t, at, n, bounds, form)
    more = t < n.pieces
    if more & (w.live == 0):
        w, more = _next_piece(at, n, bounds, COUNTER, form)
    while more:
        _announce(rings.work, count, w, 1)
        head = w.head // n.group
        tile = w.last - 1
        places = _places(tile, w, at.PAGES, n, form)
        slot = _first_slot(tile, w, n, form)
        _load_tile(tensors.k, rings.k, places, slot, keys, head, 0, form)
        _load_queries(w, count, tensors, rings.q, at, n, form)
        after = places
        if tile > w.first:
            after = _places(tile - 1, w, at.PAGES, n, form)
            slot = _first_slot(tile - 1, w, n, form)
            _load_tile(tensors.k, rings.k, after, slot, keys + 1, head, 0, form)
        slot = _first_slot(tile, w, n, form)
        _load_tile(tensors.v, rings.v, places, slot, keys, head, 1, form)
        keys += 1
        coming, more = _next_piece(at, n, bounds, COUNTER, form)
        tile -= 1
        while tile >= w.first:
            places = after
            if tile > w.first:
                after = _places(tile - 1, w, at.PAGES, n, form)
                slot = _first_slot(tile - 1, w, n, form)
                _load_tile(tensors.k, rings.k, after, slot, keys + 1, head, 0, form)
            slot = _first_slot(tile, w, n, form)
            _load_tile(tensors.v, rings.v, places, slot, keys, head, 1, form)
            keys += 1
            tile -= 1
        w = coming
        count += 1
    _announce(rings.work, count, w, 0)
    done = gl.atomic_add(COUNTER + 1, 1)
    if done == gl.num_programs(0) - 1:  # everybody has taken the last piece
        gl.atomic_xchg(COUNTER, 0)
        gl.atomic_xchg(COUNTER + 1, 0)

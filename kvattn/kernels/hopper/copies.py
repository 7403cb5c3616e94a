"""The warps that keep everybody busy: one deals out the work, one copies K, one V, through TMA."""

from kvattn.kernels.hopper.compat import gl, gluon, load_box, mbarrier
from kvattn.kernels.hopper.parts import FIELDS, NEAR, PIECES, call_for, hand_over, slot_of
from kvattn.kernels.hopper.schedule import Tiles, all_pieces, at_once, next_head, work_of

# Dealing


@gluon.jit
def _load_queries(w, count, q, ring, at, n, form: gl.constexpr):
    slot, turn = slot_of(count, form.Q_STAGES)
    GROUPS: gl.constexpr = form.GROUPS
    for g in gl.static_range(GROUPS):
        mbarrier.wait(ring.empty.index(slot * form.GROUPS + g), turn ^ 1)
        mbarrier.expect(ring.full.index(slot * form.GROUPS + g), q.block_type.nbytes)
        token = w.q_first + w.row // form.PACK + g * (64 // form.PACK)
        b = w.b if at.Q_EDGES is None else 0
        load_box(q, [b, token, w.head // n.group, w.head % n.group, 0],
                 ring.full.index(slot * form.GROUPS + g),
                 ring.data.index(slot * form.GROUPS + g))  # fmt: skip


@gluon.jit
def _announce(ring, count, w, more, n):
    """Tells the warpgroups what to compute next, and the copying warps what for."""
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
    x = gl.where(i == 11, w.line, x)
    x = gl.where(i == 12, w.shift, x)
    x = gl.where(i == 13, w.head // n.group, x)
    slot, turn = slot_of(count, PIECES)
    mbarrier.wait(ring.empty.index(slot), turn ^ 1)
    ring.data.index(slot).store(x)
    mbarrier.arrive(ring.full.index(slot), count=1)


@gluon.jit
def deal(q, rings, near, at, n, bounds, COUNTER, form: gl.constexpr):
    """Takes pieces of work, long ones as late as possible, so that programs end together."""
    count = gl.to_tensor(0)
    t = gl.program_id(0)
    taken = gl.to_tensor(1)  # pieces from t on
    pieces = all_pieces(at, n)
    w, alike = work_of(t, at, n, bounds, form)
    while t < pieces:
        if w.live != 0:
            _announce(rings.work, count, w, 1, n)
            _load_queries(w, count, q, rings.q, at, n, form)
            slot, turn = slot_of(count, PIECES)
            mbarrier.wait(near.index(slot), turn, pred=w.last - w.first > NEAR)
            count += 1
        alike = gl.where(taken > 1, alike - 1, -1)
        if taken > 1:
            taken -= 1
            t += 1
        else:
            taken = at_once(w, at, n)
            t = gl.atomic_add(COUNTER, taken) + gl.num_programs(0)
        if alike >= 0:
            w = next_head(w, form)
        else:
            w, alike = work_of(gl.minimum(t, pieces - 1), at, n, bounds, form)
    _announce(rings.work, count, w, 0, n)
    done = gl.atomic_add(COUNTER + 1, 1)
    if done == gl.num_programs(0) - 1:  # everybody has taken the last piece
        gl.atomic_xchg(COUNTER, 0)
        gl.atomic_xchg(COUNTER + 1, 0)


# Copying


@gluon.jit
def _field(ring, slot, NUMBER: gl.constexpr):
    EVERYONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    return gl.max(ring.data.index(slot).slice(NUMBER, 1).load(EVERYONE), 0)


@gluon.jit
def _hear(ring, count, n, form: gl.constexpr):
    """The tiles of keys of the piece that was announced; is there one?"""
    slot, turn = slot_of(count, PIECES)
    mbarrier.wait(ring.full.index(slot), turn)
    more = _field(ring, slot, 0)
    end = _field(ring, slot, 7)
    first = _field(ring, slot, 8)
    last = _field(ring, slot, 9)
    line = _field(ring, slot, 11)
    shift = _field(ring, slot, 12)
    head = _field(ring, slot, 13)
    mbarrier.arrive(ring.empty.index(slot), count=1)
    if form.PAGED:  # nothing is read of a sequence that is left out, not even page numbers
        end = gl.where(line < n.rows, end, 0)
        line = gl.where(line < n.rows, line, 0)
    return Tiles(line, shift, head, first, last, end), more


@gluon.jit
def _load_tile(desc, ring, count, tile, w, PAGES, step, n, V: gl.constexpr,
               form: gl.constexpr):  # fmt: skip
    """A page that nobody sees is copied from outside the tensor: zeros."""
    STAGES: gl.constexpr = form.STAGES
    PARTS: gl.constexpr = form.BN // form.BOX
    slot, _ = slot_of(count, STAGES)
    full = ring.full.index(slot)
    first = tile * form.BN
    if PARTS == 1:
        place = w.line
        row = first + w.shift
        if form.PAGED:
            entry = PAGES + w.line.to(gl.int64) * n.table_stride + first // n.page_size
            place = gl.load(entry, mask=first < w.end, other=-1)
            row = first % n.page_size
        if count >= STAGES:
            hand_over("sync", slot, V, form)
        mbarrier.expect(full, desc.block_type.nbytes)
        load_box(desc, [place, row, w.head, 0], full, ring.data.index(slot))
    else:
        BOXES: gl.constexpr = ring.data.shape[0] // STAGES
        table = PAGES + w.line.to(gl.int64) * n.table_stride
        pages = ()
        for i in gl.static_range(PARTS):
            key = first + i * form.BOX
            entry = key // n.page_size if form.PARTED else tile * PARTS + i
            pages = pages + (gl.load(table + entry, mask=key < w.end, other=-1),)  # noqa: RUF005
        call_for(table + gl.maximum(tile * PARTS - 32, 0))
        if count >= STAGES:
            hand_over("sync", slot, V, form)
        mbarrier.expect(full, desc.block_type.nbytes * BOXES)
        COLUMNS: gl.constexpr = BOXES // PARTS
        for i in gl.static_range(PARTS):
            row = (first + i * form.BOX) % n.page_size if form.PARTED else 0
            if form.RUNS is not None:
                load_box(desc, [pages[i], row // 8, w.head * step, 0, 0], full,
                         ring.data.index(slot * PARTS + i))  # fmt: skip
            else:
                for column in gl.static_range(COLUMNS):
                    at = (slot * COLUMNS + column) * PARTS + i
                    load_box(desc, [pages[i], row, w.head, column * 64], full, ring.data.index(at))


@gluon.jit
def copy(desc, ring, work, near, PAGES, step, n, V: gl.constexpr, form: gl.constexpr):
    """Tiles of K or of V, from the last to the first of every piece.

    `near`: barriers that say when the end of a piece is; one of the two copying warps has them.
    `step`: blocks of 64 channels from head to head, where a box is all channels of a page.
    """
    piece = gl.to_tensor(0)
    count = gl.to_tensor(0)
    w, more = _hear(work, piece, n, form)
    while more > 0:
        before = gl.maximum(w.last - w.first - NEAR, 0)
        slot, _ = slot_of(piece, PIECES)
        for i in range(w.last - w.first):
            if near is not None:  # noqa: SIM102  known when compiled
                if i == before:
                    mbarrier.arrive(near.index(slot), count=1)
            _load_tile(desc, ring, count + i, w.last - 1 - i, w, PAGES, step, n, V, form)
        count += w.last - w.first
        piece += 1
        w, more = _hear(work, piece, n, form)

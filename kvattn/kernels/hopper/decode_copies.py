"""The copying warp of the decode kernel: it keeps a ring of tiles of K and V full."""

from kvattn.kernels.hopper.compat import gl, gluon, load_box, mbarrier
from kvattn.kernels.hopper.decode_parts import after_previous_kernel
from kvattn.kernels.hopper.decode_shares import after, key_of, run_of, share_of
from kvattn.kernels.hopper.parts import slot_of

_LANES = gl.constexpr(32)


@gluon.jit
def _pages(tile, lane, share, at, form: gl.constexpr):
    """What the table says of the boxes of the next tiles, one a lane; -1 where nothing is seen.

    Nobody looks at the numbers here, so that nobody waits for them either.
    """
    BOXES: gl.constexpr = form.BN // form.BOX
    key = key_of(share, tile + lane // BOXES, form) + lane % BOXES * form.BOX
    there = (key >= 0) & (key < share.stored)
    if form.PAGE > 0:
        line = at.PAGES + share.line * at.table_stride
        return gl.load(line + key // form.PAGE, mask=there, other=-1)
    else:
        return gl.where(there, share.line.to(gl.int32), -1)


@gluon.constexpr_function
def columns(desc, dim):
    """Boxes side by side that hold the channels of a key."""
    _, _, blocks, _, line = desc.block_type.shape
    return dim // (blocks * line)


@gluon.jit
def _fill(desc, data, full, slot, j, page, share, key, D: gl.constexpr, form: gl.constexpr):
    """The j-th keys of a tile; blocks of channels lie together in a box, or each in a column."""
    BOXES: gl.constexpr = form.BN // form.BOX
    WIDTH: gl.constexpr = desc.block_type.shape[2]
    COLUMNS: gl.constexpr = columns(desc, D)
    spot = _spot(key + j * form.BOX, form)
    for c in gl.static_range(COLUMNS):
        load_box(desc, [page, share.head, c * WIDTH, spot, 0], full,
                 data.index((slot * COLUMNS + c) * BOXES + j))  # fmt: skip


@gluon.jit
def _copy_share(k, v, ring, share, done, lane, at, form: gl.constexpr):
    """All tiles of a share; `done` tiles went through the ring before."""
    BOXES: gl.constexpr = form.BN // form.BOX
    AHEAD: gl.constexpr = _LANES // BOXES  # tiles whose pages are loaded together
    K_BYTES: gl.constexpr = 2 * form.BN * form.D
    V_BYTES: gl.constexpr = 2 * form.BN * form.DV
    tile = gl.to_tensor(0)
    pages = _pages(tile, lane, share, at, form)
    while tile < share.count:
        coming = _pages(tile + AHEAD, lane, share, at, form)
        for i in range(gl.minimum(share.count - tile, AHEAD)):
            slot, turn = slot_of(done + tile + i, form.STAGES)
            key = key_of(share, tile + i, form)
            mbarrier.wait(ring.empty.index(slot), turn ^ 1)
            mbarrier.expect(ring.k_full.index(slot), K_BYTES)
            found = ()
            for j in gl.static_range(BOXES):
                page = gl.sum(gl.where(lane == i * BOXES + j, pages, 0), 0)
                page = gl.where((page >= 0) & (page < at.blocks), page, at.blocks)
                found = found + (page,)  # noqa: RUF005
                _fill(k, ring.k, ring.k_full.index(slot), slot, j, page, share, key, form.D, form)
            mbarrier.expect(ring.v_full.index(slot), V_BYTES)
            for j in gl.static_range(BOXES):
                _fill(v, ring.v, ring.v_full.index(slot), slot, j, found[j], share, key, form.DV,
                      form)  # fmt: skip
        pages = coming
        tile += AHEAD


@gluon.jit
def _spot(key, form: gl.constexpr):
    """Where a key lies in its page or cache row."""
    if form.PAGE > 0:
        return key % form.PAGE
    else:
        return key


@gluon.jit
def _guess(lane, at, form: gl.constexpr):
    """Where page numbers lie that are wanted if sequences are alike, one a line of the cache."""
    LINE: gl.constexpr = 32  # entries that come together
    group = gl.program_id(0) // (form.HEADS * form.TILES)
    b = group * 0
    if form.BATCH > 1:
        b = group * at.batch // at.slots
    last = (at.capacity - 1) // form.PAGE
    return at.PAGES + b.to(gl.int64) * at.table_stride + gl.minimum(lane * LINE, last)


@gluon.jit
def _touch(entry):
    """Lengths are on their way meanwhile; pages are known sooner if they have arrived as well."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1];\n\tmov.u32 $0, 0;", "=r,l", [entry.to(gl.int64, bitcast=True)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _know(k, v, ring, at, form: gl.constexpr):
    """Copies nothing, from behind the last block: what describes the caches is fetched for it."""
    mbarrier.expect(ring.ready.index(0), k.block_type.nbytes + v.block_type.nbytes)
    load_box(k, [at.blocks, 0, 0, 0, 0], ring.ready.index(0), ring.k.index(0))
    load_box(v, [at.blocks, 0, 0, 0, 0], ring.ready.index(0), ring.v.index(0))


@gluon.jit
def copy(k, v, ring, at, mask, form: gl.constexpr):
    _know(k, v, ring, at, form)
    LANES: gl.constexpr = gl.BlockedLayout([1], [_LANES], [1], [0])
    lane = gl.arange(0, _LANES, layout=LANES)
    entry = lane
    if form.PAGE > 0:
        entry = _guess(lane, at, form)
    after_previous_kernel(form)
    if form.PAGE > 0:
        _touch(entry)
    run, extent = run_of(at, mask, 1, "", form)
    mbarrier.wait(ring.ready.index(0), 0)
    done = gl.to_tensor(0)
    if form.BATCH == 1:
        if run.at < run.end:
            share = share_of(run, extent, at, mask, "", form)
            _copy_share(k, v, ring, share, done, lane, at, form)
    else:
        while run.at < run.end:
            share = share_of(run, extent, at, mask, "", form)
            _copy_share(k, v, ring, share, done, lane, at, form)
            done += share.count
            run = after(run, share, form)

"""Which rows and keys a piece of work has: read on the device, nothing is planned on the host."""

from typing import Any, NamedTuple

from kvattn.kernels.hopper.compat import gl, gluon


class Form(NamedTuple):
    """What a compiled variant is made of."""

    D: int  # padded head dim of q and k
    DV: int  # padded head dim of v
    DIM_V: int  # head dim of v
    BN: int  # keys of a tile
    GROUPS: int  # warpgroups that compute, 64 rows each
    STAGES: int  # tiles of K and of V in shared memory
    Q_STAGES: int
    PACK: int  # query heads of a kv head whose rows lie side by side, token by token
    BOX: int  # rows of K or V that one copy brings
    PAGED: bool
    PARTED: bool  # a page is several copies, which need not make a tile
    INCLUDED: bool  # lengths count the new tokens already
    LEFT: bool
    RIGHT: bool
    CHUNKED: bool
    LOW: bool  # keys may begin behind the first slot of a tile
    EDITED: bool  # scores are changed before the softmax
    CAPPED: bool
    RAGGED: bool  # sequences may have fewer rows than q has room for
    PING_PONG: bool
    Q_LOADED: bool  # queries in registers while they are multiplied
    RUNS: Any  # layouts of tiles of K and V, where a box is all channels of a page


class Index(NamedTuple):
    """Index tensors; None where a call has none."""

    LENGTHS: Any
    Q_EDGES: Any
    K_EDGES: Any
    NEW_EDGES: Any
    USED: Any
    LEFTPAD: Any
    ROWS: Any
    PAGES: Any
    ORDER: Any  # of the sequences of a ragged batch, as `order` leaves it


class Sizes(NamedTuple):
    batch: Any
    queries: Any  # rows of q: of a sequence if padded, of all if ragged
    tiles: Any  # row tiles of a sequence if padded
    pieces: Any  # tiles of all sequences times heads
    heads: Any  # query heads / PACK
    group: Any  # query heads of a kv head
    steps: Any  # new tokens of a sequence if padded
    capacity: Any
    rows: Any  # cache rows, or lines of the page table
    blocks: Any  # pages
    page_size: Any
    table_stride: Any


class Bounds(NamedTuple):
    left: Any
    right: Any
    chunk: Any


class Work(NamedTuple):
    """A tile of rows and the tiles of keys it sees.

    Keys are counted in slots of the sequence: those from `start` to `end` exist. Query row r of
    the sequence (its heads packed) is token r // PACK.
    """

    b: Any
    head: Any  # first query head
    row: Any  # first row within the sequence
    q_first: Any
    q_len: Any
    start: Any
    end: Any
    first: Any  # tiles of keys first .. last - 1; at least one
    last: Any
    active: Any
    line: Any  # row of the cache or of the page table
    shift: Any  # first slot within a packed cache
    live: Any  # whether there are rows at all


class Tiles(NamedTuple):
    """What of a piece of work the copying warps need."""

    line: Any
    shift: Any
    head: Any  # of K and V
    first: Any
    last: Any
    end: Any  # of the slots that exist


@gluon.jit
def floor_to(x, step):
    """The multiple of step at or below x, for negative x too."""
    rest = x % step
    return x - gl.where(rest < 0, rest + step, rest)


@gluon.jit
def all_pieces(at, n):
    """How many pieces there are; without an order they are counted from above."""
    if at.ORDER is None:
        return n.pieces
    else:
        return gl.load(at.ORDER + 2 * n.batch).to(gl.int32) * n.heads


@gluon.jit
def _mixed(t, at, n):
    """The pieces of few rows, which are the last ones, spread evenly among the others.

    They wait for memory, the others for the tensor cores.
    """
    whole = gl.load(at.ORDER + 2 * n.batch).to(gl.int32) * n.heads
    few = gl.load(at.ORDER + 2 * n.batch + 1).to(gl.int32) * n.heads
    if (few > 0) & (few < whole):
        before = (t.to(gl.int64) * few // whole).to(gl.int32)
        after = ((t + 1).to(gl.int64) * few // whole).to(gl.int32)
        t = gl.where(after > before, whole - few + before, t - before)
    return t


@gluon.jit
def at_once(w, at, n):
    """How many pieces to take behind this one: to deal out a short one takes as long as itself."""
    if at.ORDER is None:
        return gl.to_tensor(1)
    else:
        whole = gl.load(at.ORDER + 2 * n.batch)
        few = gl.load(at.ORDER + 2 * n.batch + 1)
        tiles = w.last - w.first
        number = gl.where(tiles > 1, 2, 4)
        return gl.where((tiles > 3) | ((few > 0) & (few < whole)), 1, number)


@gluon.jit
def _sequence(at, batch, tile, PACK: gl.constexpr, BM: gl.constexpr):
    """The number in order of the sequence that a row tile belongs to, and its first tile."""
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    lane = gl.arange(0, 128, layout=LANES)
    before = 0
    for i in range(0, batch, 128):
        b = i + lane
        if at.ORDER is None:
            first = gl.load(at.Q_EDGES + b, mask=b < batch, other=0) * PACK // BM + b
        else:
            first = gl.load(at.ORDER + batch + b, mask=b < batch, other=0).to(gl.int32)
        starts = (first <= tile) & (b < batch)
        before += gl.sum(starts.to(gl.int32), 0)
    return gl.maximum(before - 1, 0)


@gluon.jit
def _keys(b, at, n, form: gl.constexpr):
    """(line, first packed slot, start, end, active) of the keys of a sequence."""
    start = b * 0
    if at.LEFTPAD is not None:
        start = gl.maximum(gl.load(at.LEFTPAD + b), 0)
    line = b
    if at.ROWS is not None:
        line = gl.load(at.ROWS + b)
    shift = b * 0
    limit = n.capacity
    if at.K_EDGES is not None:
        shift = gl.maximum(gl.load(at.K_EDGES + b), 0)
        limit = gl.minimum(gl.load(at.K_EDGES + b + 1), n.capacity) - shift
    active = (line >= 0) & (line < n.rows)
    end = limit
    if at.LENGTHS is not None:
        end = gl.load(at.LENGTHS + b)
        active = active & (end >= 0)
        if not form.INCLUDED:
            if at.NEW_EDGES is not None:
                end += gl.load(at.NEW_EDGES + b + 1) - gl.load(at.NEW_EDGES + b)
            else:
                end += n.steps
        end = gl.minimum(end, limit)
    end = gl.where(active, gl.maximum(end, start), start)
    if at.K_EDGES is not None:
        line = b * 0  # packed: one row for all
    return line, shift, start, end, active


@gluon.jit
def _visible(first_place, last_place, start, end, bounds, form: gl.constexpr):
    """The slots that a run of rows sees between them."""
    low = start
    high = end
    if form.LEFT:
        low = gl.maximum(low, first_place - bounds.left)
    if form.RIGHT:
        high = gl.minimum(high, last_place + bounds.right + 1)
    if form.CHUNKED:
        low = gl.maximum(low, floor_to(first_place - start, bounds.chunk) + start)
        high = gl.minimum(high, floor_to(last_place - start, bounds.chunk) + bounds.chunk + start)
    return low, high


@gluon.jit
def work_of(t, at, n, bounds, form: gl.constexpr):
    """Piece t of the work: sections of heads whose keys fit the L2 cache, long rows first.

    With it how many of the pieces that follow differ in their head alone.
    """
    BM: gl.constexpr = 64 * form.GROUPS
    PACK: gl.constexpr = form.PACK
    if at.Q_EDGES is None:
        b = gl.minimum(t // (n.tiles * n.heads), n.batch - 1)
        before = b * n.tiles
        q_first = b * 0
        q_len = n.queries
    else:
        if at.ORDER is not None:
            t = _mixed(t, at, n)
        number = _sequence(at, n.batch, t // n.heads, PACK, BM)
        b = number
        if at.ORDER is not None:
            b = gl.load(at.ORDER + number).to(gl.int32)
        q_first = gl.maximum(gl.load(at.Q_EDGES + b), 0)
        q_len = gl.minimum(gl.load(at.Q_EDGES + b + 1), n.queries) - q_first
        before = q_first * PACK // BM + b
        if at.ORDER is not None:
            before = gl.load(at.ORDER + n.batch + number).to(gl.int32)
    if at.USED is not None:
        q_len = gl.minimum(q_len, gl.load(at.USED + b))
    line, shift, start, end, active = _keys(b, at, n, form)
    tiles = gl.cdiv(gl.maximum(q_len, 0) * PACK, BM)
    piece = t - before * n.heads
    live = (piece >= 0) & (piece < tiles * n.heads)
    tiles = gl.maximum(tiles, 1)
    BYTES: gl.constexpr = 2 * (form.D + form.DV)
    cached = gl.maximum((32 << 20) // BYTES // gl.maximum(end - start, 1), 1)
    share = gl.minimum(cached * (n.group // PACK), n.heads)
    section = piece // (share * tiles)
    rest = piece - section * share * tiles
    width = gl.maximum(gl.minimum(share, n.heads - section * share), 1)
    tile = rest // width
    head = section * share + rest % width
    if form.RIGHT:
        tile = tiles - 1 - tile
    row = tile * BM
    offset = end - q_len
    last_row = gl.minimum((row + BM - 1) // PACK, q_len - 1)
    low, high = _visible(row // PACK + offset, last_row + offset, start, end, bounds, form)
    first = gl.maximum(low, 0) // form.BN
    last = gl.maximum(gl.cdiv(gl.maximum(high, 0), form.BN), first + 1)
    return Work(
        b, head * PACK, row, q_first, q_len, start, end, first, last, active.to(gl.int32),
        gl.where(active, line, n.rows), shift, live.to(gl.int32),
    ), width - 1 - rest % width  # fmt: skip


@gluon.jit
def next_head(w, form: gl.constexpr):
    return Work(
        w.b, w.head + form.PACK, w.row, w.q_first, w.q_len, w.start, w.end, w.first, w.last,
        w.active, w.line, w.shift, w.live,
    )  # fmt: skip

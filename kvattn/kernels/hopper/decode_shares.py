"""Which tiles of keys a program of the decode kernel takes: found out on the device.

The tiles of all sequences, one sequence behind the other, are cut into runs of like length, one
for each program of a kv head and row tile; a run may begin and end within a sequence. Programs of
all kv heads read the same tokens at the same time.
"""

from kvattn.kernels import tile
from kvattn.kernels.hopper.compat import gl, gluon
from kvattn.kernels.hopper.decode_parts import Run, Share


@gluon.jit
def _queries(b, n, CACHED: gl.constexpr, form: gl.constexpr):
    """(tokens of a sequence, those before it, row tiles); without tokens it has no tile."""
    if form.RAGGED:
        origin = gl.maximum(gl.load(n.EDGES + b, cache_modifier=CACHED), 0)
        edge = gl.minimum(gl.load(n.EDGES + b + 1, cache_modifier=CACHED), n.queries)
        tokens = gl.maximum(edge - origin, 0)
        return tokens, origin, gl.cdiv(tokens * form.GROUP, form.TALL)
    else:
        return n.queries, 0, 1


@gluon.jit
def _extent(b, row, n, mask, CACHED: gl.constexpr, form: gl.constexpr):
    """(line, keys, old, active, low, high, stored, tiles, *_queries) of sequences for the rows
    from `row` on, of ragged ones for all rows.

    A sequence without keys has a tile too: somebody writes its rows.
    """
    queries, origin, row_tiles = _queries(b, n, CACHED, form)
    line, _shift, _start, keys, old, active = tile.keys_of(
        b, n.LENGTHS, None, None, None, n.ROWS, n.steps, n.capacity, n.rows, False, CACHED,
    )  # fmt: skip
    if n.ROWS is not None:
        line = gl.where((line >= 0) & (line < n.rows), line, 0)
    offset = keys - queries
    last = queries - 1
    if not form.RAGGED:
        last = gl.minimum((row + form.R - 1) // form.GROUP, last)
    low, high = tile.seen(
        row // form.GROUP + offset, last + offset, keys,
        mask.left, mask.right, 0, form.LEFT, form.RIGHT, False,
    )  # fmt: skip
    if form.COMMON:
        low = tile.common_until(keys, old, queries, mask.right, n.common, form.RIGHT)
    stored = high  # keys that lie in the cache
    if form.NEW > 0:
        stored = gl.maximum(gl.minimum(high, old), 0)
    tiles = gl.maximum(gl.cdiv(stored, form.BN) - low // form.BN, 1)
    if form.RAGGED:
        tiles = gl.where(row_tiles > 0, tiles, 0)
    return line, keys, old, active, low, high, stored, tiles, queries, origin, row_tiles


@gluon.jit
def _border(i, total, parts, factor, shift):
    """The tile before which i of so many parts end: i * total // parts, without a division."""
    tile = (gl.minimum(i, parts) * total).to(gl.int64) * factor >> shift
    return gl.minimum(gl.where(parts < total, tile.to(gl.int32), i), total)


@gluon.jit
def run_of(n, mask, WARPS: gl.constexpr, CACHED: gl.constexpr, form: gl.constexpr):
    """The run of this program, at its first sequence, and the extents of all of them."""
    program = gl.program_id(0)
    head = program % form.HEADS
    row = program // form.HEADS % form.TILES * form.R
    group = program // (form.HEADS * form.TILES)
    if form.BATCH == 1:
        extent = _extent(group * 0, row, n, mask, CACHED, form)
        total = extent[7]
        parts = n.alike
        factor = n.alike_factor
        shift = n.alike_shift
    else:
        EACH: gl.constexpr = form.BATCH // 32 if form.BATCH > 32 else 1
        LANES: gl.constexpr = gl.BlockedLayout([EACH], [32], [WARPS], [0])  # a copy in each warp
        b = gl.arange(0, form.BATCH, layout=LANES)
        extent = _extent(gl.minimum(b, n.batch - 1), row, n, mask, CACHED, form)
        tiles = gl.where(b < n.batch, extent[7] * extent[10], 0)
        total = gl.sum(tiles, 0)
        alike = gl.max(tiles, 0) * n.batch <= 2 * total
        parts = gl.where(alike, n.alike, n.parts)
        factor = gl.where(alike, n.alike_factor, n.parts_factor)
        shift = gl.where(alike, n.alike_shift, n.parts_shift)
    at = _border(group, total, parts, factor, shift)
    end = _border(group + 1, total, parts, factor, shift)
    parts = gl.minimum(parts, total)
    if form.BATCH == 1:
        return Run(group, head, row, parts, total, at, end, group * 0, group * 0), extent
    else:
        ends = gl.associative_scan(tiles, 0, _plus)
        before = (b < n.batch) & (ends <= at)
        mine = gl.minimum(gl.sum(before.to(gl.int32), 0), n.batch - 1)
        first = gl.max(gl.where(before, ends, 0), 0)
        return Run(group, head, row, parts, total, at, end, mine, first), extent


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def share_of(run, extent, n, mask, CACHED: gl.constexpr, form: gl.constexpr):
    """The run's part of the sequence that it is at."""
    b = run.b.to(gl.int64)
    if form.BATCH > 1:
        its = _extent(b, run.row, n, mask, CACHED, form)
    else:
        its = extent
    line, keys, old, active, low, high, stored, tiles, queries, origin, row_tiles = its
    row = run.row
    until = queries * form.GROUP
    start = run.first  # number of the first of these tiles
    if form.RAGGED:
        row_tile = (run.at - run.first) // gl.maximum(tiles, 1)
        row = row_tile * form.TALL
        until = gl.minimum(until, row + form.TALL)
        start += row_tile * tiles
    count = gl.minimum(run.end - run.at, start + tiles - run.at)
    first = (low // form.BN + run.at - start) * form.BN
    # programs that share the sequence; the first of them may have begun with another one
    leader = ((start + 1) * run.parts - 1) // run.total
    last = ((start + tiles) * run.parts - 1) // run.total
    late = (leader * run.total < start * run.parts).to(gl.int32)
    whole = (run.row // form.R * form.HEADS + run.head) * n.slots + leader
    ends = start + tiles <= run.end
    return Share(b, run.head, row, until, queries, origin, line, keys, old, active, low, high,
                 stored, ends, first, count, run.group - leader, last - leader + 1, whole, late,
                 run.first + tiles * row_tiles)  # fmt: skip


@gluon.jit
def key_of(share, i, form: gl.constexpr):
    """The first key of a share's i-th tile: the last ones, which take more steps, come first."""
    return share.first + (share.count - 1 - i) * form.BN


@gluon.jit
def after(run, share, form: gl.constexpr):
    """The same run behind a share of it."""
    at = run.at + share.count
    b = run.b + 1
    first = share.behind
    if form.RAGGED:  # the next row tile of the same one, or sequences without tokens on the way
        stays = at < share.behind
        b = gl.where(stays, run.b, b)
        first = gl.where(stays, run.first, first)
    return Run(run.group, run.head, run.row, run.parts, run.total, at, run.end, b,
               first)  # fmt: skip

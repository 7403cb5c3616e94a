"""Which share of the keys a program of the decode kernel takes: found out on the device."""

import triton
import triton.language as tl

from kvattn.kernels import tile


@triton.jit
def leaves(n, LEAF: tl.constexpr):
    """Fixed shares that n keys fill: 8 of LEAF keys, the rest of 4 * LEAF."""
    return tl.cdiv(tl.minimum(n, 8 * LEAF), LEAF) + tl.cdiv(tl.maximum(n - 8 * LEAF, 0), 4 * LEAF)


@triton.jit
def leaf_first(i, LEAF: tl.constexpr):
    """The first key of fixed share i."""
    return tl.minimum(i, 8) * LEAF + tl.maximum(i - 8, 0) * (4 * LEAF)


@triton.jit
def _between(EDGES, b, there):
    """Rows of sequences between their borders."""
    return tl.load(EDGES + b + 1, mask=there, other=0) - tl.load(EDGES + b, mask=there, other=0)


@triton.jit
def dealt(
    LENGTHS, NEW_EDGES, LEFTPAD, Q_EDGES, slot, batch, fresh, capacity, reach, each, parts,
    queries, right, common, COMMON: tl.constexpr, HAS_RIGHT: tl.constexpr, BN: tl.constexpr,
    INCLUDED: tl.constexpr, BATCH: tl.constexpr, LEAF: tl.constexpr, GROUP: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Whose a slot is: (sequence, row tile, first slot of that tile, its shares).

    Sequences of like lengths get `each` shares. Others get shares of one size, as many as they
    fill, at least one: `parts` in all and up to one more a sequence. Ragged queries have slots for
    each of their row tiles, whatever the caller's hint says of the longest; for others the grid
    tells row tiles apart. Behind the last share lies sequence `batch`.
    """
    b = tl.arange(0, BATCH)
    there = b < batch
    n = capacity + b * 0
    if LENGTHS is not None:
        n = tl.load(LENGTHS + b, mask=there, other=0)
        if NEW_EDGES is not None and not INCLUDED:
            n += tl.load(NEW_EDGES + b + 1, mask=there, other=0)
            n -= tl.load(NEW_EDGES + b, mask=there, other=0)
        elif not INCLUDED:
            n += fresh
        n = tl.minimum(n, capacity)
    if LEFTPAD is not None:
        n -= tl.maximum(tl.load(LEFTPAD + b, mask=there, other=0), 0)
    if COMMON:  # what is read elsewhere takes no share
        q_len = queries
        if Q_EDGES is not None:
            q_len = _between(Q_EDGES, b, there)
        n -= tile.common_until(n, n - fresh, q_len, right, common, HAS_RIGHT)
    n = tl.where(there, tl.maximum(n, 0), 0)
    row_tiles = there.to(tl.int32)
    if Q_EDGES is not None:
        row_tiles = tl.cdiv(tl.maximum(_between(Q_EDGES, b, there), 0) * GROUP, R)
    if LEAF > 0:
        count = leaves(n, LEAF)
        alike = slot < 0
        splits = 1 + slot * 0
    else:
        tiles = tl.cdiv(tl.minimum(n, reach), BN)
        total = tl.sum(tiles * row_tiles, 0)
        most = tl.max(tiles, 0)
        alike = most * batch <= 2 * tl.sum(tiles, 0)
        splits = tl.maximum(tl.minimum(each, most), 1)
        count = tl.cdiv(tiles, tl.maximum(tl.cdiv(total, parts), 1))
    if Q_EDGES is not None:
        count = tl.where(alike, splits, count)
        alike = slot < 0
    tile_at = slot * 0
    if alike:
        mine = slot // splits
        first = mine * splits
    else:
        count = tl.where(there, tl.maximum(count, 1), 0) * row_tiles
        ends = tl.cumsum(count, 0)
        before = there & (ends <= slot)
        mine = tl.sum(before.to(tl.int32), 0)
        first = tl.max(tl.where(before, ends, 0), 0)
        splits = tl.sum(tl.where(b == mine, count, 0), 0)
        if Q_EDGES is not None:
            own = tl.sum(tl.where(b == mine, row_tiles, 0), 0)
            splits = splits // tl.maximum(own, 1)
            tile_at = (slot - first) // tl.maximum(splits, 1)
            first += tile_at * splits
    return mine, tile_at, first, splits

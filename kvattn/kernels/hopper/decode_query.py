"""What both ways to attend begin with: rows of queries and new tokens, which tiles need a mask.

Everything that a share needs beside its tiles is asked for before anything is waited for: once
the copying warp has filled its ring, a load takes as long as all that waits in front of it.
"""

from typing import Any, NamedTuple

from kvattn.kernels import tile
from kvattn.kernels.hopper.compat import gl, gluon, mbarrier


class Raw(NamedTuple):
    """Rows [N, D] before they are normalised and rotated, and what that takes."""

    x: Any
    weight: Any
    other_weight: Any
    other: Any
    cos: Any
    sin: Any
    turn: Any
    second: Any


@gluon.jit
def fetch(X, NORM, rows, d, live, place, fresh, DIM: gl.constexpr, HALF: gl.constexpr,
          INTERLEAVED: gl.constexpr):  # fmt: skip
    """rows: where they begin; place: their positions."""
    weight = d
    other_weight = d
    if NORM is not None:
        weight = gl.load(NORM + d, mask=d < DIM, other=0)
    x = gl.load(X + rows[:, None] + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0)
    if HALF > 0:
        if INTERLEAVED:
            pair = d // 2
            second = (d % 2) == 1
            partner = d ^ 1
        else:
            pair = d % HALF
            second = d >= HALF
            partner = gl.where(second, d - HALF, d + HALF)
        known = live & (place >= 0) & (place < fresh.positions)
        turn = known[:, None] & (d < 2 * HALF)[None, :]
        at = place[:, None] * HALF + pair[None, :]
        other = gl.load(X + rows[:, None] + partner[None, :], mask=turn, other=0)
        if NORM is not None:
            other_weight = gl.load(NORM + partner, mask=d < 2 * HALF, other=0)
        cos = gl.load(fresh.COS + at, mask=turn, other=1)
        sin = gl.load(fresh.SIN + at, mask=turn, other=0)
        return Raw(x, weight, other_weight, other, cos, sin, turn, second)
    else:
        return Raw(x, weight, weight, x, x, x, x, d)


@gluon.jit
def border(ready):
    """What is there long ago: without a wait the assembler does sums on some of what was asked
    for, and waits for it, before it asks for the rest."""
    mbarrier.wait(ready.index(0), 0)


@gluon.jit
def turned(raw, NORM, positions, HALF: gl.constexpr, form: gl.constexpr):
    """The rows as they are multiplied or stored, rounded once."""
    DTYPE: gl.constexpr = raw.x.dtype
    if NORM is None:
        if HALF > 0:
            x = _rotated(raw, raw.x.to(gl.float32), raw.other.to(gl.float32), positions)
            return gl.where(raw.turn, x.to(DTYPE), raw.x)
        else:
            return raw.x
    else:
        rms = tile.inverse_rms(tile.squares(raw.x, 0), form.DIM, form.EPS)
        wide = raw.x.to(gl.float32) * rms * raw.weight.to(gl.float32)[None, :]
        if HALF > 0:
            other = raw.other.to(gl.float32) * rms * raw.other_weight.to(gl.float32)[None, :]
            wide = gl.where(raw.turn, _rotated(raw, wide, other, positions), wide)
        return wide.to(DTYPE)


@gluon.jit
def _rotated(raw, x, other, positions):
    return tile.rotate(x, other, raw.cos.to(gl.float32), raw.sin.to(gl.float32),
                       raw.second[None, :], positions >> 31)  # fmt: skip


@gluon.jit
def queries(Q, fresh, strides, share, at, base, FIRST: gl.constexpr, COUNT: gl.constexpr,
            form: gl.constexpr):  # fmt: skip
    """Rows FIRST .. FIRST + COUNT - 1 of the share's [BM, D]."""
    LANES: gl.constexpr = form.D // 8
    SPREAD: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout(
        [1, 1, 8], [1, 32 // LANES, LANES], [1, form.WARPS, 1], [2, 1, 0],
    ))  # fmt: skip
    lane = gl.arange(0, COUNT, layout=gl.SliceLayout(1, SPREAD))
    d = gl.arange(0, form.D, layout=gl.SliceLayout(0, SPREAD))
    row = share.row + FIRST + lane
    live = row < share.until
    token = row // form.GROUP
    head = share.head * form.GROUP + row % form.GROUP
    line = (share.origin + token).to(gl.int64)
    rows = share.b * strides.q[0] + line * strides.q[1] + head * strides.q[2]
    place = base + token * form.ADVANCE
    return fetch(Q, fresh.Q_NORM, rows, d, live, place, fresh, form.DIM, form.HALF,
                 form.INTERLEAVED)  # fmt: skip


@gluon.jit
def borders(share, at, mask, form: gl.constexpr):
    """How many of the share's tiles come before those that are seen whole, and before the rest."""
    BN: gl.constexpr = form.BN
    offset = share.keys - share.queries
    last = gl.minimum((share.row + form.TALL - 1) // form.GROUP, share.queries - 1)
    free, bound = tile.seen_by_all(
        share.row // form.GROUP + offset, last + offset, share.low, share.high,
        mask.left, mask.right, 0, form.LEFT, form.RIGHT, False,
    )  # fmt: skip
    if form.NEW > 0:
        bound = gl.minimum(bound, share.stored)
    free = gl.cdiv(gl.maximum(free, 0), BN) * BN
    bound = gl.maximum(bound, 0) // BN * BN
    before = gl.minimum(gl.maximum(free - share.first, 0) // BN, share.count)
    until = gl.maximum(bound - share.first, 0) // BN
    return before, gl.minimum(gl.maximum(until, before), share.count)

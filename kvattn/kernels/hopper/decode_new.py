"""New tokens of the decode kernel: stored in the cache, and patched into tiles of it."""

from typing import Any, NamedTuple

from kvattn.kernels import append, tile
from kvattn.kernels.hopper.compat import gl, gluon, reinterpret
from kvattn.kernels.hopper.decode_parts import page_of


class News(NamedTuple):
    """New tokens in shared memory, one a row."""

    k: Any
    v: Any


@gluon.jit
def room_for_new(dtype: gl.constexpr, form: gl.constexpr):
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return News(gl.allocate_shared_memory(dtype, [form.NEW, form.D], ROW),
                gl.allocate_shared_memory(dtype, [form.NEW, form.DV], ROW))  # fmt: skip


@gluon.jit
def _store(X, CACHE, NORM, rms, room, place_of, steps, block, spot, mine, fresh, share, place,
           D: gl.constexpr, DIM: gl.constexpr, HALF: gl.constexpr, form: gl.constexpr):  # fmt: skip
    """Tokens [NEW, D] of K or V."""
    LANES: gl.constexpr = D // 8
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [form.WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, SPREAD)
    ROOM: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    DTYPE: gl.constexpr = CACHE.dtype.element_ty
    d = gl.arange(0, D, layout=gl.SliceLayout(0, SPREAD))[None, :]
    t = gl.arange(0, form.NEW, layout=ROWS)[:, None]
    mine = gl.convert_layout(mine, ROWS)[:, None]
    place = place + t
    turning = mine & (place >= 0) & (place < fresh.positions)
    at = share.b * steps[0] + t * steps[1] + share.head * steps[2]
    x = append.as_stored(
        X + at, d, NORM, rms, None, None, share.b, share.head, t, t, mine, turning, place,
        fresh.COS, fresh.SIN, fresh.positions, steps, steps, DIM, D, HALF, form.INTERLEAVED, 0,
        False, 0, False, DTYPE,
    )  # fmt: skip
    reinterpret(room, DTYPE, [form.NEW, D], ROOM).store(x)
    block = gl.convert_layout(block, ROWS)[:, None]
    spot = gl.convert_layout(spot, ROWS)[:, None]
    to = block.to(gl.int64) * place_of[0] + spot * place_of[1] + share.head * place_of[2]
    gl.store(CACHE + to + d, x, mask=mine & (block >= 0) & (d < DIM))


@gluon.jit
def squares_of_new(fresh, strides, share, at, form: gl.constexpr):
    """Of keys, summed over each token's head [NEW, 1]."""
    LANES: gl.constexpr = form.D // 8
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [form.WARPS, 1], [1, 0])
    d = gl.arange(0, form.D, layout=gl.SliceLayout(0, SPREAD))[None, :]
    t = gl.arange(0, form.NEW, layout=gl.SliceLayout(1, SPREAD))[:, None]
    from_k = share.b * strides.k_new[0] + t * strides.k_new[1] + share.head * strides.k_new[2]
    x = gl.load(fresh.K + from_k + d, mask=(t < at.steps) & (d < form.DIM), other=0)
    return tile.squares(x, 0)


@gluon.jit
def store_new(cache, fresh, rms, news, strides, share, at, base, form: gl.constexpr):
    """The tokens that land in this share's tiles, ready, into the cache and near at hand."""
    LANES: gl.constexpr = form.D // 8
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [form.WARPS, 1], [1, 0])
    t = gl.arange(0, form.NEW, layout=gl.SliceLayout(1, SPREAD))
    key = share.old + t
    mine = (t < at.steps) & (key >= share.first) & (key < share.keys)
    mine = mine & (key < share.first + share.count * form.BN)
    block = page_of(gl.where(mine, key, 0), share, at, form)
    block = gl.where(block < at.blocks, block, -1)
    spot = key.to(gl.int64)
    if form.PAGE > 0:
        spot = spot % form.PAGE
    _store(fresh.K, cache.K, fresh.K_NORM, rms, news.k, strides.k, strides.k_new, block, spot, mine,
           fresh, share, base, form.D, form.DIM, form.HALF, form)  # fmt: skip
    _store(fresh.V, cache.V, None, None, news.v, strides.v, strides.v_new, block, spot, mine,
           fresh, share, base, form.DV, form.DIM_V, 0, form)  # fmt: skip


@gluon.jit
def patched(x, room, lane, key, share, form: gl.constexpr):
    """A tile with the new tokens, for which its copy may have come too early."""
    L: gl.constexpr = x.type.layout
    last = gl.minimum(share.keys, key + form.BN)
    for i in range(gl.maximum(share.old, key), last):
        token = room.index(i - share.old).load(gl.SliceLayout(0, gl.SliceLayout(2, L)))
        here = gl.expand_dims(key + lane == i, 1)
        x = gl.where(here, gl.expand_dims(gl.expand_dims(token, 0), 2), x)
    return x

"""Few query rows over a long cache: one warp copies tiles of keys by TMA, the others attend.

A warp owns NK keys of a tile, its own running maximum and its own sums, so that the loop over
tiles has no exchange between warps, and no barrier of the program but those of the ring. With 32
packed query rows two warps own the same keys, 16 rows each; with 64 a warpgroup multiplies all of
them at once. New tokens are a tile of their own in shared memory, attended to while the ring
fills, and stored from there. A third kind of warp runs ahead of the kernel in front.
"""

from kvattn.kernels import tile
from kvattn.kernels.hopper.compat import fence_async_shared, gl, gluon, reinterpret
from kvattn.kernels.hopper.decode_ahead import call_ahead
from kvattn.kernels.hopper.decode_copies import columns, copy
from kvattn.kernels.hopper.decode_parts import (
    Cache,
    Fresh,
    Mask,
    Places,
    Results,
    Ring,
    Strides,
    after_previous_kernel,
)
from kvattn.kernels.hopper.decode_shares import after, run_of, share_of
from kvattn.kernels.hopper.decode_tile import attend_narrow
from kvattn.kernels.hopper.decode_wide import attend_wide
from kvattn.kernels.hopper.parts import barriers


@gluon.jit
def _buffer(box, COUNT: gl.constexpr):
    SHAPE: gl.constexpr = [COUNT] + box.block_type.shape  # noqa: RUF005
    return gl.allocate_shared_memory(box.dtype, SHAPE, box.layout)


@gluon.jit
def _attend_share(Q, cache, fresh, results, strides, ring, share, done, at, mask,
                  form: gl.constexpr):  # fmt: skip
    base = share.old
    if fresh.BASES is not None:
        base = gl.load(fresh.BASES + share.b)
    if form.WIDE:
        attend_wide(Q, cache, fresh, results, strides, ring, share, done, base, at, mask, form)
    else:
        attend_narrow(Q, cache, fresh, results, strides, ring, share, done, base, at, mask, form)


@gluon.jit
def attend(Q, cache, fresh, results, strides, ring, at, mask, form: gl.constexpr):
    """The attending warps: the shares of this program's run."""
    after_previous_kernel(form)
    run, extent = run_of(at, mask, form.WARPS, "", form)
    done = gl.to_tensor(0)
    if form.BATCH == 1:
        if run.at < run.end:
            share = share_of(run, extent, at, mask, "", form)
            _attend_share(Q, cache, fresh, results, strides, ring, share, done, at, mask, form)
    else:
        while run.at < run.end:
            share = share_of(run, extent, at, mask, "", form)
            _attend_share(Q, cache, fresh, results, strides, ring, share, done, at, mask, form)
            done += share.count
            run = after(run, share, form)


@gluon.jit
def _tiles(boxes, LAYOUT: gl.constexpr, D: gl.constexpr, form: gl.constexpr):
    """Whole tiles of K or V, where they were copied box by box."""
    if form.WIDE:
        return reinterpret(boxes, boxes.dtype, [form.STAGES, form.BN, D], LAYOUT)
    else:
        return reinterpret(boxes, boxes.dtype, [form.STAGES, form.WK, form.NK, D], LAYOUT)


_NUMBERS = (
    *("batch", "alike", "alike_factor", "alike_shift", "parts", "parts_factor", "parts_shift"),
    *("slots", "queries", "steps", "capacity", "rows", "blocks", "ahead", "common"),
    *("common_shares", "positions", "table_stride", "left", "right"),
)

_TENSORS = ("LENGTHS", "EDGES", "ROWS", "PAGES", "COUNT", "SINKS", "LSE", "BASES", "COMMON_LENGTH")


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_TENSORS)
def decode(
    k, v, Q, K, V, OUT, LSE, PART, STATS, COUNT, K_NEW, V_NEW, LENGTHS, EDGES, ROWS, PAGES,
    COS, SIN, BASES, SINKS, Q_NORM, K_NORM, COMMON, COMMON_STATS, COMMON_LENGTH,
    q_strides, k_strides, v_strides, out_strides, lse_strides, k_new_strides, v_new_strides,
    table_stride, batch, alike, alike_factor, alike_shift, parts, parts_factor, parts_shift,
    slots, queries, steps, capacity, rows, blocks, ahead, positions,
    common, common_shares, factor, softcap, left, right,
    form: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: slots * TILES * HEADS, heads fastest.

    With a COMMON_LENGTH, common is the least that another kernel reads.
    """
    STAGES: gl.constexpr = form.STAGES
    BOXES: gl.constexpr = STAGES * (form.BN // form.BOX)
    k_data = _buffer(k, BOXES * columns(k, form.D))
    v_data = _buffer(v, BOXES * columns(v, form.DV))
    k_full = barriers(STAGES, 1)
    v_full = barriers(STAGES, 1)
    ready = barriers(1, 1)
    empty = barriers(STAGES, 32 * form.WARPS)
    fence_async_shared()
    if COMMON_LENGTH is not None:
        common, common_shares = tile.common_on_device(COMMON_LENGTH, common, common_shares)
    at = Places(LENGTHS, EDGES, ROWS, PAGES, table_stride, batch, alike, alike_factor, alike_shift,
                parts, parts_factor, parts_shift, slots, queries, steps, capacity, rows, blocks,
                common, ahead)  # fmt: skip
    mask = Mask(left, right, factor, softcap)
    fresh = Fresh(K_NEW, V_NEW, COS, SIN, BASES, positions, Q_NORM, K_NORM)
    cache = Cache(K, V)
    results = Results(OUT, LSE, SINKS, PART, STATS, COUNT, COMMON, COMMON_STATS, common_shares)
    strides = Strides(q_strides, k_strides, v_strides, out_strides, lse_strides, k_new_strides,
                      v_new_strides)  # fmt: skip
    K_TILES: gl.constexpr = form.k_layout
    V_TILES: gl.constexpr = form.v_layout
    k_tiles = _tiles(k_data, K_TILES, form.D, form)
    v_tiles = _tiles(v_data, V_TILES, form.DV, form)
    boxes = Ring(k_data, v_data, k_full, v_full, empty, ready)
    tiles = Ring(k_tiles, v_tiles, k_full, v_full, empty, ready)
    gl.warp_specialize([
        (attend, (Q, cache, fresh, results, strides, tiles, at, mask, form)),
        (copy, (k, v, boxes, at, mask, form)),
        (call_ahead, (cache, strides, at, mask, form)),
    ], [1, 1], [REGISTERS, REGISTERS])  # fmt: skip

"""Few query rows over a long cache: one warp copies tiles of keys by TMA, the others attend.

A warp owns NK keys of a tile, its own running maximum and its own sums, so that the loop over
tiles has no exchange between warps, and no barrier of the program but those of the ring. With 32
or 64 packed query rows two or four warps own the same keys, 16 rows each. New tokens are stored
before the loop and patched into the tiles that lie where they belong, in registers.
"""

from kvattn.kernels.hopper.compat import fence_async_shared, gl, gluon, reinterpret
from kvattn.kernels.hopper.decode_copies import copy
from kvattn.kernels.hopper.decode_parts import (
    Cache,
    Fresh,
    Mask,
    Places,
    Results,
    Ring,
    Strides,
)
from kvattn.kernels.hopper.decode_tile import attend
from kvattn.kernels.hopper.parts import barriers


@gluon.jit
def _buffer(box, COUNT: gl.constexpr):
    SHAPE: gl.constexpr = [COUNT] + box.block_type.shape  # noqa: RUF005
    return gl.allocate_shared_memory(box.dtype, SHAPE, box.layout)


_NUMBERS = (
    *("batch", "each", "parts", "slots", "queries", "steps", "capacity", "rows", "blocks"),
    *("positions", "table_stride", "left", "right", "common", "common_shares"),
)

_TENSORS = ("LENGTHS", "ROWS", "PAGES", "COUNT", "SINKS", "LSE", "BASES")


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_TENSORS)
def decode(
    k, v, Q, K, V, OUT, LSE, PART, STATS, COUNT, K_NEW, V_NEW, LENGTHS, ROWS, PAGES,
    COS, SIN, BASES, SINKS, Q_NORM, K_NORM, COMMON, COMMON_STATS,
    q_strides, k_strides, v_strides, out_strides, lse_strides, k_new_strides, v_new_strides,
    table_stride, batch, each, parts, slots, queries, steps, capacity, rows, blocks, positions,
    common, common_shares, factor, softcap, left, right,
    form: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: slots * TILES * HEADS, heads fastest."""
    STAGES: gl.constexpr = form.STAGES
    BOXES: gl.constexpr = form.BN // form.BOX
    k_data = _buffer(k, STAGES * BOXES)
    v_data = _buffer(v, STAGES * BOXES)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 32 * form.WARPS)
    fence_async_shared()
    at = Places(LENGTHS, ROWS, PAGES, table_stride, batch, each, parts, slots, queries, steps,
                capacity, rows, blocks, common)  # fmt: skip
    mask = Mask(left, right, factor, softcap)
    fresh = Fresh(K_NEW, V_NEW, COS, SIN, BASES, positions, Q_NORM, K_NORM)
    cache = Cache(K, V)
    results = Results(OUT, LSE, SINKS, PART, STATS, COUNT, COMMON, COMMON_STATS, common_shares)
    strides = Strides(q_strides, k_strides, v_strides, out_strides, lse_strides, k_new_strides,
                      v_new_strides)  # fmt: skip
    K_TILES: gl.constexpr = form.k_layout
    V_TILES: gl.constexpr = form.v_layout
    k_tiles = reinterpret(k_data, k.dtype, [STAGES, form.WK, form.NK, form.D], K_TILES)
    v_tiles = reinterpret(v_data, v.dtype, [STAGES, form.WK, form.NK, form.DV], V_TILES)
    gl.warp_specialize([
        (attend, (Q, cache, fresh, results, strides, Ring(k_tiles, v_tiles, full, empty), at,
                  mask, form)),
        (copy, (k, v, Ring(k_data, v_data, full, empty), at, mask, form)),
    ], [1], [REGISTERS])  # fmt: skip

"""Attention of many query rows: two or three warpgroups compute in turns, three warps serve them.

One deals out the work, one copies K, one V.
"""

import math

from kvattn.kernels.hopper.compat import fence_async_shared, gl, gluon, reinterpret
from kvattn.kernels.hopper.copies import copy, deal
from kvattn.kernels.hopper.parts import FIELDS, PIECES, Ring, Rings, Scaling, Tensors, barriers
from kvattn.kernels.hopper.rows import compute
from kvattn.kernels.hopper.schedule import Bounds, Index, Sizes


@gluon.jit
def _tiles(boxes, DIM: gl.constexpr, NUMBER: gl.constexpr, form: gl.constexpr):
    """Whole tiles of K or V, where they were copied box by box."""
    if form.BOX == form.BN:
        return boxes
    elif form.RUNS is not None:
        LAYOUT: gl.constexpr = form.RUNS[NUMBER]
        return reinterpret(boxes, boxes.dtype, [form.STAGES, form.BN, DIM], LAYOUT)
    else:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        return reinterpret(boxes, boxes.dtype, [form.STAGES, form.BN, DIM], LAYOUT)


@gluon.constexpr_function
def _boxes(desc, dim, form):
    """Copies that bring all tiles of K or V."""
    return form.STAGES * form.BN * dim // math.prod(desc.block_type.shape)


_NUMBERS = (
    *("batch", "queries", "tiles", "pieces", "heads", "group", "steps", "capacity", "rows"),
    *("blocks", "page_size", "table_stride", "left", "right", "chunk", "lse_b", "lse_h", "lse_t"),
    *("alibi_b", "alibi_h", "k_step", "v_step"),
)

_TENSORS = (  # read number by number, so that their alignment makes no other variant
    *("LSE", "SINKS", "ALIBI", "LENGTHS", "Q_EDGES", "K_EDGES", "NEW_EDGES", "USED", "LEFTPAD"),
    *("ROWS", "PAGES", "ORDER", "COUNTER"),
)


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_TENSORS)
def prefill(
    q, k, v, OUT, LSE, SINKS, ALIBI,
    LENGTHS, Q_EDGES, K_EDGES, NEW_EDGES, USED, LEFTPAD, ROWS, PAGES, ORDER, COUNTER,
    out_b, out_t, out_h, lse_b, lse_h, lse_t, alibi_b, alibi_h,
    batch, queries, tiles, pieces, heads, group, steps, capacity, rows, blocks, page_size,
    table_stride, k_step, v_step, left, right, chunk, scale, softcap, factor,
    form: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: a program for every processor; pieces of work are dealt out by COUNTER."""
    GROUPS: gl.constexpr = form.GROUPS
    STAGES: gl.constexpr = form.STAGES
    Q_SHAPE: gl.constexpr = [form.Q_STAGES * GROUPS] + q.block_type.shape  # noqa: RUF005
    q_data = gl.allocate_shared_memory(q.dtype, Q_SHAPE, q.layout)
    K_BOXES: gl.constexpr = _boxes(k, form.D, form)
    V_BOXES: gl.constexpr = _boxes(v, form.DV, form)
    K_SHAPE: gl.constexpr = [K_BOXES] + k.block_type.shape  # noqa: RUF005
    V_SHAPE: gl.constexpr = [V_BOXES] + v.block_type.shape  # noqa: RUF005
    k_data = gl.allocate_shared_memory(k.dtype, K_SHAPE, k.layout)
    v_data = gl.allocate_shared_memory(v.dtype, V_SHAPE, v.layout)
    news = gl.allocate_shared_memory(
        gl.int32, [PIECES, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = barriers(form.Q_STAGES * GROUPS, 1)
    q_empty = barriers(form.Q_STAGES * GROUPS, 1)
    k_full = barriers(STAGES, 1)
    v_full = barriers(STAGES, 1)
    work = Ring(news, barriers(PIECES, 1), barriers(PIECES, GROUPS + 2))
    near = barriers(PIECES, 1)
    fence_async_shared()
    tensors = Tensors(
        q, k, v, OUT, LSE, SINKS, ALIBI, (out_b, out_h, out_t), (lse_b, lse_h, lse_t),
        (alibi_b, alibi_h),
    )  # fmt: skip
    at = Index(LENGTHS, Q_EDGES, K_EDGES, NEW_EDGES, USED, LEFTPAD, ROWS, PAGES, ORDER)
    n = Sizes(batch, queries, tiles, pieces, heads, group, steps, capacity, rows, blocks,
              page_size, table_stride)  # fmt: skip
    bounds = Bounds(left, right, chunk)
    scaling = Scaling(scale, softcap, factor)
    boxes = Rings(Ring(q_data, q_full, q_empty), Ring(k_data, k_full, None),
                  Ring(v_data, v_full, None), work)  # fmt: skip
    rings = Rings(boxes.q, Ring(_tiles(k_data, form.D, 0, form), k_full, None),
                  Ring(_tiles(v_data, form.DV, 1, form), v_full, None), work)  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize([
            (compute, (tensors, rings, bounds, scaling, 0, form)),
            (compute, (tensors, rings, bounds, scaling, 1, form)),
            (deal, (q, boxes, near, at, n, bounds, COUNTER, form)),
            (copy, (k, boxes.k, work, near, PAGES, k_step, n, 0, form)),
            (copy, (v, boxes.v, work, None, PAGES, v_step, n, 1, form)),
        ], [4, 1, 1, 1], [REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute, (tensors, rings, bounds, scaling, 0, form)),
            (compute, (tensors, rings, bounds, scaling, 1, form)),
            (compute, (tensors, rings, bounds, scaling, 2, form)),
            (deal, (q, boxes, near, at, n, bounds, COUNTER, form)),
            (copy, (k, boxes.k, work, near, PAGES, k_step, n, 0, form)),
            (copy, (v, boxes.v, work, None, PAGES, v_step, n, 1, form)),
        ], [4, 4, 1, 1, 1],
            [REGISTERS, REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS])  # fmt: skip

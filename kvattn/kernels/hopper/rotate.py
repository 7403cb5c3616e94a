"""Queries normalised and rotated, before the attention kernel copies them as they are."""

import triton
import triton.language as tl

from kvattn.kernels import tile


@triton.jit(do_not_specialize=["steps", "capacity", "rows", "positions", "batch", "queries"])
def rotate(
    Q, OUT, LENGTHS, Q_EDGES, K_EDGES, NEW_EDGES, LEFTPAD, ROWS, COS, SIN, BASES, NORM,
    q_strides,
    steps, capacity, rows, positions, batch, queries,
    HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, ADVANCE: tl.constexpr, INCLUDED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Grid: one program a token, all its heads; OUT is packed."""
    number = tl.program_id(0).to(tl.int64)
    if Q_EDGES is None:
        b = number // queries
        token = number % queries
        at = token
    else:
        b = tile.find_row(Q_EDGES, batch, number).to(tl.int64)
        token = number - tl.load(Q_EDGES + b)
        at = number
    keys = tile.keys_of(
        b, LENGTHS, K_EDGES, NEW_EDGES, LEFTPAD, ROWS, steps, capacity, rows, INCLUDED,
    )  # fmt: skip
    base = keys[4].to(tl.int64)  # rows before the new tokens
    if BASES is not None:
        base = tl.load(BASES + b).to(tl.int64)
    heads = tl.arange(0, H)
    live = heads < HEADS
    d = tl.arange(0, DP)
    place = base + token * ADVANCE + heads * 0
    offsets = b * q_strides[0] + at * q_strides[1] + heads * q_strides[2]
    kind: tl.constexpr = Q.dtype.element_ty
    rms = None
    if NORM is not None:
        rms = tile.query_rms(Q, offsets, d, live, D, 0, EPS, 0)
    if HALF > 0:
        ready = tile.rotated(
            Q, offsets, d, live, NORM, rms, COS, SIN, place, positions, D, HALF, INTERLEAVED, kind,
            0,
        )  # fmt: skip
    else:
        ready = tile.query(Q, offsets, d, live, NORM, rms, D, kind, 0)
    into = OUT + (number * HEADS + heads)[:, None] * D + d[None, :]
    tl.store(into, ready, mask=live[:, None] & (d < D)[None, :])

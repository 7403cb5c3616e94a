"""Calls for the first bytes of a program while the kernel before it still runs.

What is read here may be about to change. Nothing but addresses of a cache comes of it, and all of
them are valid whatever is read; the lines go to the L2, where every later write finds them.
"""

from kvattn.kernels.hopper.compat import gl, gluon
from kvattn.kernels.hopper.decode_shares import key_of, run_of, share_of

_LANES = gl.constexpr(32)
_LINE = gl.constexpr(64)  # elements of a line of the L2


@gluon.jit
def _call(address):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1];\n\tmov.u32 $0, 0;", "=r,l", [address.to(gl.int64, bitcast=True)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _call_tile(CACHE, steps, key, share, at, D: gl.constexpr, DIM: gl.constexpr,
               form: gl.constexpr):  # fmt: skip
    N: gl.constexpr = D // _LINE
    SPREAD: gl.constexpr = gl.BlockedLayout([1, N], [_LANES, 1], [1, 1], [1, 0])
    key = key + gl.arange(0, form.BN, layout=gl.SliceLayout(1, SPREAD))
    there = (key >= share.low) & (key < share.stored)
    block = share.line.to(gl.int32) + key * 0
    spot = key.to(gl.int64)
    if form.PAGE > 0:
        entry = at.PAGES + share.line * at.table_stride + key // form.PAGE
        block = gl.load(entry, mask=there, other=-1, cache_modifier=".cg")
        spot = spot % form.PAGE
    there = there & (block >= 0) & (block < at.blocks)
    row = block.to(gl.int64) * steps[0] + spot * steps[1] + share.head * steps[2]
    row = gl.where(there, row, 0)
    d = gl.arange(0, N, layout=gl.SliceLayout(0, SPREAD)) * _LINE
    if DIM < D:
        d = gl.minimum(d, DIM - 1)  # behind the last head there may be no memory
    _call(CACHE + row[:, None] + d[None, :])


@gluon.jit
def call_ahead(cache, strides, at, mask, form: gl.constexpr):
    if at.ahead > 0:
        run, extent = run_of(at, mask, 1, ".cg", form)
        if run.at < run.end:
            share = share_of(run, extent, at, mask, ".cg", form)
            for i in range(gl.minimum(share.count, at.ahead)):
                key = key_of(share, i, form)
                _call_tile(cache.K, strides.k, key, share, at, form.D, form.DIM, form)
                _call_tile(cache.V, strides.v, key, share, at, form.DV, form.DIM_V,
                           form)  # fmt: skip

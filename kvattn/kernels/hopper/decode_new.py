"""New tokens of the decode kernel: rotated, attended to at once, and stored in the cache."""

from typing import Any, NamedTuple

from kvattn.kernels.hopper.compat import gl, gluon
from kvattn.kernels.hopper.decode_parts import page_of
from kvattn.kernels.hopper.decode_query import fetch, turned


class News(NamedTuple):
    """Rows [NEW, D] of K or V on their way."""

    raw: Any
    at: Any  # where they go
    mine: Any


class Tokens(NamedTuple):
    """New tokens [NEW, D] as the cache stores them."""

    k: Any
    v: Any


@gluon.jit
def _news(X, NORM, steps, place_of, fresh, share, place, at, D: gl.constexpr, DIM: gl.constexpr,
          HALF: gl.constexpr, form: gl.constexpr):  # fmt: skip
    """What the sequence appends, if it ends with this share."""
    LANES: gl.constexpr = D // 8
    SPREAD: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout(
        [1, 1, 8], [1, 32 // LANES, LANES], [1, form.WARPS, 1], [2, 1, 0],
    ))  # fmt: skip
    d = gl.arange(0, D, layout=gl.SliceLayout(0, SPREAD))
    t = gl.arange(0, form.NEW, layout=gl.SliceLayout(1, SPREAD))
    spot = (share.old + t).to(gl.int64)
    mine = (t < at.steps) & (spot < share.keys) & share.ends & share.active
    block = page_of(gl.where(mine, share.old + t, 0), share, at, form)
    rows = share.b * steps[0] + t.to(gl.int64) * steps[1] + share.head * steps[2]
    raw = fetch(X, NORM, rows, d, mine, place + t, fresh, DIM, HALF, form.INTERLEAVED)
    if form.PAGE > 0:
        spot = spot % form.PAGE
    to = block.to(gl.int64) * place_of[0] + spot * place_of[1] + share.head * place_of[2]
    mine = (mine & (block < at.blocks))[:, None] & (d < DIM)[None, :]
    return News(raw, to[:, None] + d[None, :], mine)


@gluon.jit
def new_tokens(fresh, strides, share, at, place, form: gl.constexpr):
    k = _news(fresh.K, fresh.K_NORM, strides.k_new, strides.k, fresh, share, place, at, form.D,
              form.DIM, form.HALF, form)  # fmt: skip
    v = _news(fresh.V, None, strides.v_new, strides.v, fresh, share, place, at, form.DV, form.DIM_V,
              0, form)  # fmt: skip
    return k, v


@gluon.jit
def arrived(k, v, fresh, form: gl.constexpr):
    return Tokens(turned(k.raw, fresh.K_NORM, fresh.positions, form.HALF, form),
                  turned(v.raw, None, fresh.positions, 0, form))  # fmt: skip


@gluon.jit
def store(k, v, tokens, cache):
    """A token's slot, or nowhere if the page table does not know one."""
    gl.store(cache.K + k.at, tokens.k, mask=k.mine)
    gl.store(cache.V + v.at, tokens.v, mask=v.mine)

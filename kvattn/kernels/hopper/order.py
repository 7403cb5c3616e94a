"""In which order the sequences of a ragged batch are taken: those of many rows first, by length."""

from kvattn.kernels.hopper.compat import gl, gluon
from kvattn.kernels.hopper.schedule import Index


@gluon.jit
def _size(b, at, batch, queries, PACK: gl.constexpr, BM: gl.constexpr):
    """(row tiles, those of few rows, how early) of sequences; none beyond the batch."""
    inside = b < batch
    first = gl.maximum(gl.load(at.Q_EDGES + b, mask=inside, other=0), 0)
    rows = gl.minimum(gl.load(at.Q_EDGES + b + 1, mask=inside, other=0), queries) - first
    if at.USED is not None:
        rows = gl.minimum(rows, gl.load(at.USED + b, mask=inside, other=0))
    rows = gl.maximum(rows, 0) * PACK
    keys = b * 0
    if at.LENGTHS is not None:
        keys = gl.load(at.LENGTHS + b, mask=inside, other=0)
    elif at.K_EDGES is not None:
        keys = gl.load(at.K_EDGES + b + 1, mask=inside, other=0)
        keys -= gl.load(at.K_EDGES + b, mask=inside, other=0)
    tiles = gl.cdiv(rows, BM)
    many = rows > 64  # more than one warpgroup's
    early = gl.minimum(gl.maximum(keys, 0), 1 << 29) + gl.where(many, 1 << 30, 0)
    return tiles, gl.where(many, 0, tiles), gl.where(inside, early, -1)


_NUMBERS = ("batch", "queries")
_TENSORS = ("Q_EDGES", "USED", "LENGTHS", "K_EDGES", "ORDER")


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_TENSORS)
def order(Q_EDGES, USED, LENGTHS, K_EDGES, ORDER, batch, queries, PACK: gl.constexpr,
          BM: gl.constexpr):  # fmt: skip
    """ORDER: the sequences, the first row tile of each of them, all tiles, those of few rows.

    Grid: a program for 32 sequences.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    at = Index(LENGTHS, Q_EDGES, K_EDGES, None, USED, None, None, None, None)
    mine = gl.program_id(0) * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, L))
    _, _, early = _size(mine, at, batch, queries, PACK, BM)
    place = mine * 0
    first = mine * 0
    whole = gl.program_id(0) * 0
    few = whole
    for i in range(0, batch, 64):
        other = i + gl.arange(0, 64, layout=gl.SliceLayout(0, L))
        tiles, sparse, when = _size(other, at, batch, queries, PACK, BM)
        when = when[None, :]
        same = (when == early[:, None]) & (other[None, :] < mine[:, None])
        ahead = ((when > early[:, None]) | same).to(gl.int32)
        place += gl.sum(ahead, 1)
        first += gl.sum(ahead * tiles[None, :], 1)
        whole += gl.sum(tiles, 0)
        few += gl.sum(sparse, 0)
    inside = mine < batch
    gl.store(ORDER + place, mine.to(gl.float32), mask=inside)
    gl.store(ORDER + batch + place, first.to(gl.float32), mask=inside)
    gl.store(ORDER + 2 * batch, whole.to(gl.float32))
    gl.store(ORDER + 2 * batch + 1, few.to(gl.float32))

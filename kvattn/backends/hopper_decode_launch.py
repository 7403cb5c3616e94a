"""Few query rows over a long cache on a Hopper GPU: which calls, their tiles, their launch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from kvattn.backends import prefix, triton_decode, triton_launch, triton_prefix
from kvattn.backends.triton_replay import target
from kvattn.kernels.hopper import decode as kernel
from kvattn.kernels.hopper.compat import TensorDescriptor, gl
from kvattn.kernels.hopper.decode_parts import Form
from kvattn.request import Request

_LOG2E = math.log2(math.e)
_LINE = 64  # elements of 128 bytes, the unit that shared memory is swizzled by
_REGISTERS = 40  # of the copying warp
_RING = 192 << 10  # bytes of shared memory for tiles
_MOST = 248  # of an attending one
_WAVES = 4  # of programs, up to which the first tiles are called for early
_NONE = triton_decode.Common()


@dataclass(frozen=True)
class Tiling:
    """Tiles and shares of a launch."""

    rows: int  # packed query rows of a program
    row_tiles: int
    keys: int  # of a warp
    stages: int
    each: int  # runs of tiles for each sequence, if their lengths are alike
    parts: int  # runs for all of them, if not
    programs: int  # of a processor
    box: int  # keys of a copy
    ahead: int  # tiles that are called for before the kernel in front has ended
    overlap: bool = True

    @property
    def wide(self) -> bool:
        """Whether a warpgroup multiplies all rows at once."""
        return self.rows > 32

    def slots(self, batch: int) -> int:
        """Runs that there may be."""
        return max(self.each * batch, self.parts)


def tiling(r: Request) -> Tiling:
    s = triton_decode.shape_of(r)
    # 64 at once where a warpgroup has registers for them, and wgmma whole lines
    most_rows = 64 if s.dims <= 256 and _line(r.lead) == _line(r.pool) == _LINE else 32
    rows = next(n for n in (8, 16, 32, 64) if n >= min(s.rows, most_rows))
    row_tiles = 1 if s.ragged else -(-s.rows // rows)  # of a ragged one the device knows how many
    keys, programs = 16, 1 if rows == 32 or s.dims > 256 else 2
    stages = min(6, _RING // programs // (4 * keys * s.dims * s.width))
    programs_each = s.heads * row_tiles
    most = max(1, -(-s.capacity // (4 * keys)))
    parts = max(1, s.processors * programs // programs_each)
    if rows == 32:
        stages -= 1  # the sums of eight warps take the room of one
    if s.splits > 0:
        each = s.splits
    elif s.batch == 1:
        each = max(1, s.processors // programs_each)
    else:
        each = triton_decode.each_of(s.batch * programs_each, s.processors * programs)
    each, parts = min(each, most), min(parts if s.batch > 1 else each, s.batch * most)
    # small boxes: both halves of a row are read at about the same time
    box = 8 if r.paged and r.page_size % 16 else 16
    # what is called for beside many programs that still read slows them down
    waves = max(each * s.batch, parts) * programs_each / (s.processors * programs)
    ahead = 1 if waves <= _WAVES else 0
    return Tiling(rows, row_tiles, keys, stages, each, parts, programs, box, ahead)


def _line(x: Tensor) -> int:
    """Channels that lie together in shared memory: 128 bytes, or 64 where those do not fit."""
    return _LINE if x.shape[-1] % _LINE == 0 else _LINE // 2


@functools.cache
def _tiles(keys: int, dim: int, line: int, box: int) -> Any:
    """The layout [4, keys, dim] of a tile that was copied in boxes of `box` keys.

    A box holds blocks of `line` channels one after the other: 16 bytes of a line change places by
    the number of the 128 bytes that they are in.
    """
    bases = [[0, 0, 1 << i] for i in range(line.bit_length() - 1)]
    key = 1
    while key < box:
        bases.append([key // keys, key % keys, 8 * (key * line // _LINE) if key < 8 else 0])
        key *= 2
    bases += [[0, 0, 1 << i] for i in range(line.bit_length() - 1, dim.bit_length() - 1)]
    while key < 4 * keys:
        bases.append([key // keys, key % keys, 0])
        key *= 2
    return gl.SharedLinearLayout(bases, [], 1024)


@functools.cache
def _columns() -> Any:
    """A tile as wgmma reads it: all its keys of 64 channels, then those of the next."""
    return gl.NVMMASharedLayout(128, 16, rank=2)


def _box(cache: Tensor, rows: int, wide: bool) -> Any:
    """[row or page, kv head, block of channels, slot, channel].

    Blocks behind the last one come as zeros: a head in shared memory has a power of two of them.
    """
    n, slots, heads, width = cache.shape
    b, s, h, _ = cache.stride()
    line = _line(cache)
    shape = [n, heads, width // line, slots, line]
    spare = -(-width // 8) * 8
    steps = [x if size > 1 else spare for size, x in zip(shape, (b, h, line, s), strict=False)]
    box = [1, 1, 1 if wide else triton.next_power_of_2(width) // line, rows, line]
    layout = gl.NVMMASharedLayout(2 * line, 16, rank=5)
    return TensorDescriptor(cache, shape, [*steps, 1], box, layout)


def _divisor(n: int) -> tuple[int, int, int]:
    """n, and what x // n is for 0 <= x < 2 ** 31: x * factor >> shift; factors exceed 31 bits."""
    shift = 31 + (n - 1).bit_length()
    return n, (1 << shift) // n + 1, shift


def _steps(x: Tensor | None) -> tuple[int, ...]:
    """Strides of sequence, token and head; ragged ones have no first one."""
    if x is None:
        return 0, 0, 0
    return x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])


def _form(r: Request, t: Tiling, common: triton_decode.Common) -> Form:
    left, right = r.window
    dim, dim_v = r.lead.shape[-1], r.pool.shape[-1]
    d, dv = triton.next_power_of_2(dim), triton.next_power_of_2(dim_v)
    new = r.k.shape[1] if r.k is not None and _appends(r) else 0
    ragged = r.cu_seqlens_q is not None
    mr = min(t.rows, triton.next_power_of_2(max(1, triton_decode.shape_of(r).rows)))
    return Form(
        D=d, DV=dv, DIM=dim, DIM_V=dim_v, HEADS=r.kv_heads, GROUP=r.heads // r.kv_heads,
        R=t.rows, TILES=t.row_tiles, WK=4, WR=2 if t.rows == 32 else 1, WIDE=t.wide, NK=t.keys,
        STAGES=t.stages, BOX=t.box, PAGE=r.page_size if r.paged else 0,
        BATCH=triton.next_power_of_2(max(r.batch, 2 if ragged else 1)),
        NEW=0 if new == 0 else 8 if new <= 8 else 16,
        HALF=0 if r.rotary_cos is None else r.rotary_cos.shape[1],
        INTERLEAVED=r.rotary_interleaved, ADVANCE=int(r.local), EPS=triton_launch.eps(r),
        LEFT=left is not None, RIGHT=right is not None, CAPPED=r.softcap > 0,
        MR=mr, RAGGED=ragged,
        SPAN=max(1, 64 * (2 if t.rows == 32 else 1) // max(4, mr) // max(1, dv // 128)),
        OVERLAP=t.overlap, COMMON=common.shares > 0,
        k_layout=_columns() if t.wide else _tiles(t.keys, d, _line(r.lead), t.box),
        v_layout=_columns() if t.wide else _tiles(t.keys, dv, _line(r.pool), t.box),
        BN=4 * t.keys, WARPS=8 if t.rows == 32 else 4,
        APART=1 if common.shares > 0 and t.rows > 8 else 2, TALL=mr if ragged else t.rows,
        BM=max(8, mr),
    )  # fmt: skip


def run(r: Request) -> tuple[Tensor, Tensor]:
    """The new tokens in a launch of their own only where the decode kernel cannot store them."""
    if any(x.data_ptr() % 16 for x in (r.k_cache, r.pool) if x is not None):
        return _unaligned(r)
    if r.k is not None and not _appends(r):
        triton_launch.append(r)
    out, lse = target().outputs(r)
    if r.batch > 0 and r.lead.numel() > 0:
        common = triton_prefix.attend(r) if prefix.shared(r.facts) else _NONE
        decode(r, out, lse, common=common)
    return out, lse


def _unaligned(r: Request) -> tuple[Tensor, Tensor]:
    """Facts do not show addresses, and TMA asks for multiples of 16 bytes."""
    from kvattn.backends import triton

    found = triton.run(r)
    assert found is not None
    return found


def _appends(r: Request) -> bool:
    """Whether the kernel stores the new tokens itself, which it does as they are."""
    if r.k is None or r.v is None or r.k_cache is None:
        return False
    same = r.k.dtype == r.k_cache.dtype and r.v.dtype == r.pool.dtype
    return same and triton_decode.appends(r)


def decode(
    r: Request,
    out: Tensor,
    lse: Tensor,
    t: Tiling | None = None,
    common: triton_decode.Common = _NONE,
) -> None:
    """One launch: new tokens stored, attention, merge, also of what a common prefix left."""
    t = t or tiling(r)
    form = _form(r, t, common)
    q, k_cache = triton_launch.unit(r.q), r.k_cache
    assert q is not None and k_cache is not None
    device = r.lead.device
    slots = t.slots(r.batch)
    programs = slots * t.row_tiles * r.kv_heads
    part = stats = count = None
    if slots > 1:
        part = target().scratch("part", 2 * programs * t.rows * form.DV, device)
        stats = target().scratch("stats", 2 * programs * t.rows, device)
        count = target().counters(programs, device)
    k, v = (triton_launch.unit(r.k), triton_launch.unit(r.v)) if form.NEW else (None, None)
    left, right = r.window
    table_stride, lines, blocks, _ = triton_launch.table(r)
    args = (
        _box(k_cache, form.BOX, form.WIDE), _box(r.pool, form.BOX, form.WIDE), q, k_cache, r.pool,
        out, lse if r.return_lse else None, part, stats, count, k, v,
        r.cache_seqlens, r.cu_seqlens_q, r.cache_batch_idx, r.page_table,
        triton_launch.rotary(r.rotary_cos), triton_launch.rotary(r.rotary_sin), r.rotary_seqlens,
        r.sinks, triton_launch.unit(r.q_norm_weight),
        triton_launch.unit(r.k_norm_weight) if form.NEW else None, common.part, common.stats,
        common.length,
        _steps(q), triton_launch.strides(k_cache), triton_launch.strides(r.pool),
        _steps(out), lse.stride() if lse.dim() == 3 else (0, *lse.stride()), *map(_steps, (k, v)),
        table_stride, r.batch, *_divisor(t.each * r.batch), *_divisor(t.parts), slots, q.shape[-3],
        triton_launch.fresh(r), r.capacity, lines, blocks, t.ahead,
        0 if r.rotary_cos is None else r.rotary_cos.shape[0], common.keys, common.shares,
        r.softmax_scale * (1.0 if r.softcap > 0 else _LOG2E), r.softcap, left or 0, right or 0,
    )  # fmt: skip
    options = {"launch_pdl": True} if t.overlap else {}
    threads, most = 32 * (form.WARPS + 4), (_MOST * form.WARPS + 4 * _REGISTERS) // (form.WARPS + 4)
    registers = min(65536 // (t.programs * threads), most) // 8 * 8
    target().launch(
        kernel.decode, (programs,), args, {"form": form, "REGISTERS": _REGISTERS},
        num_warps=form.WARPS, maxnreg=registers, **options,
    )  # fmt: skip

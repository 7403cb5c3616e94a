"""What the partitions of the decode kernel share."""

from typing import Any, NamedTuple

from kvattn.kernels.hopper.compat import gl, gluon


class Form(NamedTuple):
    """What a compiled variant is made of: fields alone, as later releases keep no properties."""

    D: int  # padded head dim of q and k
    DV: int  # padded head dim of v
    DIM: int  # head dim of q and k
    DIM_V: int
    HEADS: int  # kv heads
    GROUP: int  # query heads of a kv head
    R: int  # packed query rows of a program
    TILES: int  # row tiles of a sequence
    WK: int  # warps side by side along the keys of a tile
    WR: int  # along its rows, 16 each
    WIDE: bool  # a warpgroup multiplies 64 rows at once
    NK: int  # keys a warp
    STAGES: int  # tiles in shared memory
    BOX: int  # keys that one copy brings
    PAGE: int  # 0 for dense
    BATCH: int  # a power of two at or above the batch
    NEW: int  # 0, or room for the new tokens of a sequence, 8 or 16
    HALF: int  # rotary pairs
    INTERLEAVED: bool
    ADVANCE: int  # positions between query tokens
    EPS: float  # of the norms
    LEFT: bool
    RIGHT: bool
    CAPPED: bool
    MR: int  # rows of a program that there may be at all, a power of two
    RAGGED: bool  # queries lie one sequence behind the other, so many as their borders say
    SPAN: int  # shares that are merged at once
    OVERLAP: bool  # the kernel starts while the one before it ends
    COMMON: bool  # that one has read a common prefix, and waited for all others itself
    k_layout: Any
    v_layout: Any
    BN: int  # keys of a tile
    WARPS: int  # that attend
    APART: int  # shares of a sequence from which they are left apart and merged
    TALL: int  # rows of a tile; a ragged sequence with more than was said has more tiles
    BM: int  # rows that are loaded; the products have more, whose results nobody looks at


class Places(NamedTuple):
    """Index tensors, None where a call has none, and the sizes that go with them."""

    LENGTHS: Any
    EDGES: Any  # borders of ragged queries
    ROWS: Any
    PAGES: Any
    table_stride: Any
    batch: Any
    alike: Any  # runs in all if lengths are alike, so many for each sequence, and how to divide
    alike_factor: Any
    alike_shift: Any
    parts: Any  # runs in all, if not
    parts_factor: Any
    parts_shift: Any
    slots: Any  # runs that there may be
    queries: Any  # of a sequence; ragged ones, of all
    steps: Any
    capacity: Any
    rows: Any  # cache rows, or lines of the page table
    blocks: Any  # cache rows, or pages
    common: Any  # keys of a prefix that all sequences share
    ahead: Any  # tiles that are called for while the kernel before still runs


class Mask(NamedTuple):
    left: Any
    right: Any
    factor: Any  # takes scores to units of log2; of capped ones, to their own
    softcap: Any


class Fresh(NamedTuple):
    """New tokens, the weights of norms, and where rotary angles are."""

    K: Any
    V: Any
    COS: Any
    SIN: Any
    BASES: Any
    positions: Any
    Q_NORM: Any
    K_NORM: Any


class Cache(NamedTuple):
    K: Any
    V: Any


class Results(NamedTuple):
    OUT: Any
    LSE: Any
    SINKS: Any
    PART: Any
    STATS: Any
    COUNT: Any
    COMMON: Any  # what the kernel before left of a common prefix, and how many shares of it
    COMMON_STATS: Any
    common_shares: Any


class Strides(NamedTuple):
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    k_new: Any
    v_new: Any


class Ring(NamedTuple):
    k: Any
    v: Any
    k_full: Any
    v_full: Any
    empty: Any
    ready: Any  # one barrier: what describes the caches is known


class Run(NamedTuple):
    """The tiles at .. end - 1 of all sequences' tiles, for one kv head and row tile."""

    group: Any  # which of the runs
    head: Any
    row: Any  # first packed query row
    parts: Any  # how many runs have tiles
    total: Any  # tiles of all sequences
    at: Any
    end: Any
    b: Any  # the sequence of tile `at`
    first: Any  # number of its first tile


class Share(NamedTuple):
    """Neighbouring tiles of keys of a sequence."""

    b: Any
    head: Any
    row: Any  # first packed query row
    until: Any  # past its last one, or the program's
    queries: Any  # tokens of the sequence
    origin: Any  # and before it
    line: Any  # cache row, or line of the page table; one that exists
    keys: Any
    old: Any  # keys before the new tokens
    active: Any
    low: Any  # keys low .. high - 1 are seen
    high: Any
    stored: Any  # of them, those before it lie in the cache
    ends: Any  # whether the sequence ends with this share
    first: Any  # first key of the first tile
    count: Any  # tiles
    split: Any  # which of the sequence's shares, and how many there are
    splits: Any
    whole: Any  # number of the program that has the first of them
    late: Any  # whether that one had another sequence before
    behind: Any  # past the sequence's last tile


@gluon.jit
def _grid_control(TEXT: gl.constexpr):
    gl.inline_asm_elementwise(
        TEXT + "\n\tmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def after_previous_kernel(form: gl.constexpr):
    """Lets the next kernel start, then waits until the one before has written everything.

    Not for one that read a common prefix: it has waited itself, and what it leaves comes last.
    """
    if form.OVERLAP:
        _grid_control("griddepcontrol.launch_dependents;")
        if not form.COMMON:
            _grid_control("griddepcontrol.wait;")


@gluon.jit
def after_common_prefix(form: gl.constexpr):
    if form.OVERLAP and form.COMMON:
        _grid_control("griddepcontrol.wait;")


@gluon.jit
def page_of(row, share, at, form: gl.constexpr):
    """The page or cache row that holds row `row` of a sequence; `blocks` where there is none."""
    if form.PAGE > 0:
        last = (at.capacity - 1) // form.PAGE
        line = at.PAGES + share.line * at.table_stride
        page = gl.load(line + gl.minimum(row // form.PAGE, last))
        return gl.where((page >= 0) & (page < at.blocks), page, at.blocks)
    else:
        return share.line.to(gl.int32) + row * 0

"""What the Hopper kernels share: barriers and small steps, the buffers of prefill."""

from typing import Any, NamedTuple

from kvattn.kernels.hopper.compat import async_copy, gl, gluon, mbarrier

FIELDS = gl.constexpr(16)  # numbers that describe a piece of work
PIECES = gl.constexpr(4)  # of them known ahead
NEAR = gl.constexpr(5)  # tiles of keys before the end of one when the next is asked for
TOGETHER = gl.constexpr(5)  # named barriers, of 16 in all: Triton uses those below
TURN = gl.constexpr(6)
EMPTY = gl.constexpr(9)  # of the stages of K, then of V


class Tensors(NamedTuple):
    """Descriptors that copies read through, and where results go."""

    q: Any
    k: Any
    v: Any
    OUT: Any
    LSE: Any
    SINKS: Any
    ALIBI: Any
    out_strides: Any
    lse_strides: Any
    alibi_strides: Any


class Ring(NamedTuple):
    """Buffers that are filled and emptied in turn, and a pair of barriers for each."""

    data: Any
    full: Any
    empty: Any


class Rings(NamedTuple):
    q: Any
    k: Any
    v: Any
    work: Any


class Scaling(NamedTuple):
    scale: Any
    softcap: Any
    factor: Any  # takes scores to units of log2


class State(NamedTuple):
    """What a warpgroup carries from one tile of keys to the next."""

    p: Any  # probabilities of the tile before, not yet multiplied with V
    o: Any
    m: Any  # what exponentials are relative to, in units of log2
    l: Any  # sums of probabilities, of each of a row's four threads
    count: Any  # tiles of V done so far: its place in the ring


@gluon.jit
def named_barrier(WHAT: gl.constexpr, ID: gl.constexpr, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(
        f"bar.{WHAT} {ID}, {THREADS};\n\tmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def hand_over(WHAT: gl.constexpr, slot, V: gl.constexpr, form: gl.constexpr):
    """Warpgroups give a tile of K or V back, the copying warp waits for all of them.

    An mbarrier would be told by 128 threads, or by one after a barrier of the warpgroup.
    """
    gl.inline_asm_elementwise(
        f"bar.{WHAT} $1, {128 * form.GROUPS + 32};\n\tmov.u32 $0, 0;", "=r,r",
        [slot + (EMPTY + V * form.STAGES)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def border(x, count):
    """x, two numbers a thread: computed before what follows, and nothing else moves across.

    The assembler heeds neither waits for products nor arrivals at barriers when it moves
    instructions on registers, but it keeps to its blocks: here lies a loop that never runs.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred never;
        setp.lt.s32 never, $4, 0;
        again:
        @!never bra on;
        nanosleep.u32 100;
        add.f32 $0, $0, $1;
        add.f32 $1, $0, $1;
        bra again;
        on:
        }""", "=f,=f,0,1,r,r", [x, count], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that a copy completes or `ARRIVALS` threads do."""
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], BAR)
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def call_for(pointer):
    """Somebody will read there soon."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1];\n\tmov.u32 $0, 0;", "=r,l", [pointer.to(gl.int64, bitcast=True)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def slot_of(count, STAGES: gl.constexpr):
    return count % STAGES, (count // STAGES) & 1


@gluon.jit
def release(bar):
    """All 128 threads arrive: no barrier of the warpgroup is needed before."""
    async_copy.mbarrier_arrive(bar, increment_count=False)

"""What the exponentials of a row are relative to, in assembly of branches that few warps take.

A reference lies above the largest score of its row, so that it moves only when a later score
exceeds it; O is multiplied only then. The assembly is for all numbers of a thread at once, which
belong to two rows in turns: numbers 0 and 1 to one, 2 and 3 to the other, and so on.
"""

from kvattn.kernels.hopper.compat import gl, gluon


@gluon.constexpr_function
def spare(dtype):
    """How far above the largest score, in units of log2.

    The price are small probabilities: in fp16 the smallest would be lost.
    """
    return 4.0 if dtype == gl.float16 else 8.0


@gluon.constexpr_function
def _in_place(count):
    """Constraints of `count` numbers that are changed and as many that are read."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.constexpr_function
def _rescaling(count):
    """Products of `count` numbers with factors of their rows, unless those of a warp are 1."""
    start = (
        f".reg .pred p, q; setp.neu.f32 p, ${2 * count}, 0f3F800000;",
        f"setp.neu.f32 q, ${2 * count + 2}, 0f3F800000; or.pred p, p, q;",
        "vote.sync.any.pred p, p, 0xffffffff; @!p bra same;",
    )
    products = (f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return "\n\t".join(("{", *start, *products, "same:", "}"))


@gluon.jit
def rescale(o, alpha):
    """O times alpha, of its rows."""
    COUNT: gl.constexpr = o.shape[1] // 2
    TEXT: gl.constexpr = _rescaling(COUNT)
    OPERANDS: gl.constexpr = _in_place(COUNT)
    return gl.inline_asm_elementwise(
        TEXT, OPERANDS, [o, alpha[:, None]], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@gluon.constexpr_function
def _search(count):
    """Predicate p: a warp's logits are not all below 0, or a reference is missing (q, r).

    The signs of all are put together, in four chains.
    """
    pairs = [f"${2 * i}, ${2 * i + 1}" for i in range(count // 2)]
    rest = range(4, count // 2)
    return (
        *(f"and.b32 a{i}, {pairs[i]};" for i in range(4)),
        *(f"lop3.b32 a{i % 4}, a{i % 4}, {pairs[i]}, 0x80;" for i in rest),
        "and.b32 a2, a2, a3; lop3.b32 a0, a0, a1, a2, 0x80; setp.ge.s32 p, a0, 0;",
        f"setp.eq.f32 q, ${2 * count}, 0fFF800000; or.pred p, p, q;",
        f"setp.eq.f32 r, ${2 * count + 2}, 0fFF800000; or.pred p, p, r;",
        "vote.sync.any.pred p, p, 0xffffffff;",
    )


@gluon.constexpr_function
def _move(count, row, reference, missing, above):
    """One row's reference is moved above its largest logit, if that exceeds 0."""
    bits = {4.0: "40800000", 8.0: "41000000"}[above]
    mine = [f"${i + j}" for i in range(2 * row, count, 4) for j in (0, 1)]
    return (
        f"max.f32 u, {mine[0]}, {mine[1]};",
        *(f"max.f32 u, u, {x};" for x in mine[2:]),
        *(f"shfl.sync.bfly.b32 t, u, {i}, 0x1f, 0xffffffff; max.f32 u, u, t;" for i in (2, 1)),
        f"@{missing} mov.f32 {reference}, 0f00000000;",
        f"setp.gt.f32 p, u, 0f00000000; or.pred p, p, {missing};",
        "setp.gt.and.f32 p, u, 0fFF800000, p;",
        f"add.f32 u, u, 0f{bits}; selp.f32 u, u, 0f00000000, p;",
        f"add.f32 {reference}, {reference}, u;",
        f"not.pred p, p; and.pred p, p, {missing}; @p mov.f32 {reference}, 0fFF800000;",
        *(f"sub.f32 {x}, {x}, u;" for x in mine),
    )


@gluon.constexpr_function
def _lowering(count, above, group):
    """`count` logits, in place, and as many references, which two registers keep."""
    top, low = f"top_{group}", f"low_{group}"
    lines = (
        "{ .reg .pred p, q, r; .reg .b32 a<4>; .reg .f32 u, t;",
        *_search(count),
        f"mov.f32 {top}, ${2 * count}; mov.f32 {low}, ${2 * count + 2}; @!p bra same;",
        *_move(count, 0, top, "q", above),
        *_move(count, 1, low, "r", above),
        "same: }",
    )
    return "\n\t".join(lines)


@gluon.jit
def declare(GROUP: gl.constexpr):
    """Registers that `lower` leaves references in, of a whole partition."""
    gl.inline_asm_elementwise(
        f".reg .f32 top_{GROUP}, low_{GROUP};\n\tmov.u32 $0, 0;", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def lower(x, m, SPARE: gl.constexpr, GROUP: gl.constexpr):
    """Logits relative to references m, in the end not above 0, and the references.

    Where one was missing, x is relative to 0.
    """
    COUNT: gl.constexpr = x.shape[1] // 2
    TEXT: gl.constexpr = _lowering(COUNT, SPARE, GROUP)
    OPERANDS: gl.constexpr = _in_place(COUNT)
    each = gl.convert_layout(m, gl.SliceLayout(1, x.type.layout), assert_trivial=True)
    x = gl.inline_asm_elementwise(
        TEXT, OPERANDS, [x, each[:, None]], dtype=gl.float32, is_pure=False, pack=COUNT
    )
    m = gl.inline_asm_elementwise(
        f"mov.f32 $0, top_{GROUP};\n\tmov.f32 $1, low_{GROUP};", "=f,=f,f,f", [m],
        dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip
    return x, m

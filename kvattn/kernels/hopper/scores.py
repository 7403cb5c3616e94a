"""From scores to probabilities, in the registers of one warpgroup: edits, masks, softmax."""

from kvattn.kernels.hopper.compat import gl, gluon
from kvattn.kernels.hopper.references import lower
from kvattn.kernels.hopper.schedule import floor_to


@gluon.jit
def _by_register(s):
    """S as [M, N / 8, 8]: in the layout of wgmma the middle index is the number of a register.

    What depends on it alone is then an immediate. Column numbers as a whole vector would be kept
    in registers over the loop, N / 4 of them, and spill.
    """
    return s.reshape([s.shape[0], s.shape[1] // 8, 8])


@gluon.jit
def _capped(x, rate, cap):
    """cap * tanh(x * rate / 2.885), off by at most 5e-7 * cap; 2.885 is 2 * log2(e).

    Near 0 it has no relative accuracy: for caps up to 128 only.
    """
    share = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(x * rate)], dtype=gl.float32,
        is_pure=True, pack=1,
    )  # fmt: skip
    return cap - 2.0 * cap * share


@gluon.jit
def edit(s, w, row, key, scaling, ALIBI, alibi_strides, form: gl.constexpr):
    """Logits in units of log2 from raw products: scale, softcap, slopes."""
    s = s * scaling.scale
    if form.CAPPED:
        s = _capped(s, 2.8853900817779268 / scaling.softcap, scaling.softcap)
    if ALIBI is not None:
        s3 = _by_register(s)
        L3: gl.constexpr = s3.type.layout
        L2: gl.constexpr = gl.SliceLayout(1, L3)
        rows = row + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, L2))
        heads = w.head + rows % form.PACK
        inside = rows < w.q_len * form.PACK
        slope = gl.load(
            ALIBI + w.b * alibi_strides[0] + heads * alibi_strides[1], mask=inside, other=0
        )
        place = rows // form.PACK + (w.end - w.q_len - key)
        lane = gl.arange(0, 8, layout=gl.SliceLayout(0, L2))
        near = (place[:, None] - lane[None, :]).to(gl.float32)
        group = gl.arange(0, s.shape[1] // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, L3))) * 8
        distance = gl.expand_dims(near, 1) - gl.expand_dims(group[None, :].to(gl.float32), 2)
        distance = gl.maximum(distance, -distance)
        s3 = s3 - gl.expand_dims(gl.expand_dims(slope, 1), 1) * distance
        s = gl.convert_layout(s3.reshape(s.shape), s.type.layout, assert_trivial=True)
    return s * 1.4426950408889634


@gluon.jit
def mask(s, w, row, key, bounds, form: gl.constexpr):
    """Minus infinity where rows row, row + 1, .. do not see slots key, key + 1, .."""
    s3 = _by_register(s)
    L3: gl.constexpr = s3.type.layout
    L2: gl.constexpr = gl.SliceLayout(1, L3)
    rows = row + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, L2))
    place = rows // form.PACK + (w.end - w.q_len)
    high = place * 0 + w.end
    low = place * 0 + w.start
    if form.RIGHT:
        high = gl.minimum(high, place + bounds.right + 1)
    if form.LEFT:
        low = gl.maximum(low, place - bounds.left)
    if form.CHUNKED:
        chunk = floor_to(place - w.start, bounds.chunk) + w.start
        low = gl.maximum(low, chunk)
        high = gl.minimum(high, chunk + bounds.chunk)
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, L2))
    group = gl.arange(0, s.shape[1] // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, L3))) * 8
    group = gl.expand_dims(group[None, :], 2)
    keep = group < gl.expand_dims((high - key)[:, None] - lane[None, :], 1)
    if form.LOW:
        keep = keep & (group >= gl.expand_dims((low - key)[:, None] - lane[None, :], 1))
    s3 = gl.where(keep, s3, float("-inf"))
    return gl.convert_layout(s3.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def _halves(s):
    """The two halves of the columns; no data moves, as the halves are different registers."""
    return s.reshape([s.shape[0], 2, s.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _row_max(s):
    """A tree over four quarters first: shorter chains of dependent instructions."""
    if s.shape[1] >= 64:
        a, b = _halves(s)
        s = gl.maximum(a, b)
    if s.shape[1] >= 64:
        a, b = _halves(s)
        s = gl.maximum(a, b)
    return gl.max(s, 1)


@gluon.jit
def _thread_sums(s):
    """[M, 4]: what each of a row's four threads has."""
    if s.shape[1] >= 64:
        a, b = _halves(s)
        s = a + b
    if s.shape[1] >= 64:
        a, b = _halves(s)
        s = a + b
    return gl.sum(gl.sum(s.reshape([s.shape[0], s.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def softmax_masked(s, m, factor, ROWS: gl.constexpr, SPARE: gl.constexpr):
    """One tile: new references, the factor for what was summed before, sums, probabilities.

    `factor` takes scores to units of log2, those of references.
    """
    top = gl.convert_layout(_row_max(s), ROWS, assert_trivial=True) * factor
    grown = top > m
    top = gl.where(grown, top + SPARE, m)
    shift = gl.where(top == float("-inf"), 0.0, top)
    alpha = gl.where(grown, gl.exp2(m - shift), 1.0)
    shift = gl.convert_layout(shift, gl.SliceLayout(1, s.type.layout), assert_trivial=True)
    p = gl.exp2(s * factor - shift[:, None])
    return top, alpha, _thread_sums(p), p


@gluon.jit
def softmax(s, m, factor, SPARE: gl.constexpr, GROUP: gl.constexpr):
    """The same where rows see all keys: no maximum is looked for unless it is needed."""
    shift = gl.where(m == float("-inf"), 0.0, m)
    shift = gl.convert_layout(shift, gl.SliceLayout(1, s.type.layout), assert_trivial=True)
    x, top = lower(s * factor - shift[:, None], m, SPARE, GROUP)
    alpha = gl.where(top == m, 1.0, gl.exp2(m - top))
    p = gl.exp2(x)
    return top, alpha, _thread_sums(p), p


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """Probabilities rounded to 16 bits, two in a register.

    A tensor of 16-bit numbers would be taken apart where it enters a loop and put together again
    in every round, one instruction a register.
    """
    KIND: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    low, high = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    return gl.inline_asm_elementwise(
        f"cvt.rn.{KIND}.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def unpack(p, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """The same as an operand of wgmma; no instruction remains of it."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    whole = gl.join(low, high).to(dtype, bitcast=True).reshape([p.shape[0], 2 * p.shape[1]])
    return gl.convert_layout(whole, LAYOUT, assert_trivial=True)

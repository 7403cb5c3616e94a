"""The end of a share: the warps' sums become one, the last share of a sequence merges them all."""

from kvattn.kernels.hopper.compat import gl, gluon
from kvattn.kernels.hopper.decode_parts import after_common_prefix


@gluon.jit
def _write(top, l, acc, r, results, strides, share, at, form: gl.constexpr):
    """out and lse of rows r of the share; a sink is one more logit without a value."""
    L: gl.constexpr = acc.type.layout
    top = gl.convert_layout(top, gl.SliceLayout(1, L), assert_trivial=True)
    l = gl.convert_layout(l, gl.SliceLayout(1, L), assert_trivial=True)
    r = share.row + r
    d = gl.arange(0, form.DV, layout=gl.SliceLayout(0, L))
    live = r < share.until
    head = share.head * form.GROUP + r % form.GROUP
    token = (share.origin + r // form.GROUP).to(gl.int64)
    if results.SINKS is not None:
        sink = gl.load(results.SINKS + head, mask=live, other=0).to(gl.float32)
        sink = gl.where(share.active, sink * 1.4426950408889634, float("-inf"))
        both = gl.maximum(top, sink)
        endless = both == float("inf")
        safe = gl.where((both == float("-inf")) | endless, 0.0, both)
        alpha = gl.where(endless, 0.0, gl.exp2(top - safe))
        l = l * alpha + gl.where(endless, 1.0, gl.exp2(sink - safe))
        acc = acc * alpha[:, None]
        top = both
    some = l > 0.0
    inverse = 1.0 / gl.where(some, l, 1.0)
    rows = share.b * strides.out[0] + token * strides.out[1] + head * strides.out[2]
    gl.store(results.OUT + rows[:, None] + d[None, :],
             (acc * inverse[:, None]).to(results.OUT.dtype.element_ty),
             mask=live[:, None] & (d < form.DIM_V)[None, :])  # fmt: skip
    if results.LSE is not None:
        lse = (top + gl.log2(gl.where(some, l, 1.0))) * 0.6931471805599453
        lse = gl.where(some, lse, float("-inf"))
        rows = share.b * strides.lse[0] + head * strides.lse[1] + token * strides.lse[2]
        gl.store(results.LSE + rows, lse, mask=live)


@gluon.jit
def _spot(share, i):
    """Where share i of a sequence is left: a program has room for its first and its last one."""
    return 2 * (share.whole + i) + gl.where(i == 0, share.late, 0)


@gluon.jit
def foresee(results, share):
    """Calls for the counter of a sequence in several shares, whose place takes time to find."""
    if results.PART is not None:
        at = results.COUNT + gl.where(share.splits > 1, share.whole, 0)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1];\n\tmov.u32 $0, 0;", "=r,l", [at.to(gl.int64, bitcast=True)],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _common_spot(results, share, at, i, form: gl.constexpr):
    """Where the first of the program's rows is left of share i of a common prefix."""
    rows = at.queries * form.GROUP
    split = (share.head * results.common_shares + i).to(gl.int64)
    return (split * at.batch + share.b) * rows + share.row


@gluon.jit
def _merge(results, strides, share, at, form: gl.constexpr):
    """Adds up what the shares left, SPAN of them at a time, those of a common prefix behind."""
    SPAN: gl.constexpr = form.SPAN
    F: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, form.WARPS, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(2, F)
    SUMMED: gl.constexpr = gl.SliceLayout(0, F)
    i = gl.arange(0, SPAN, layout=gl.SliceLayout(1, ROWS))
    r = gl.arange(0, form.MR, layout=gl.SliceLayout(0, ROWS))
    live = share.row + r < share.until
    d = gl.arange(0, form.DV, layout=gl.SliceLayout(0, gl.SliceLayout(1, F)))
    d = gl.expand_dims(gl.expand_dims(d, 0), 1)
    m = gl.full([form.MR], float("-inf"), gl.float32, gl.SliceLayout(0, ROWS))
    l = gl.full([form.MR], 0, gl.float32, gl.SliceLayout(0, ROWS))
    acc = gl.full([form.MR, form.DV], 0, gl.float32, SUMMED)
    for first in range(0, share.splits, SPAN):
        there = (first + i < share.splits)[:, None] & live[None, :]
        spots = _spot(share, first + i)[:, None] * form.R + r[None, :]
        lse = gl.load(results.STATS + spots, mask=there, other=float("-inf"), cache_modifier=".cg")
        ones = gl.where(there, 1.0, 0.0)
        m, l, acc = _added(m, l, acc, results.PART, spots, lse, ones, there, d, form)
    if form.COMMON:
        m, l, acc = _with_common(m, l, acc, results, share, at, form)
    A: gl.constexpr = acc.type.layout
    r = gl.arange(0, form.MR, layout=gl.SliceLayout(1, A))
    _write(m, l, acc, r, results, strides, share, at, form)


@gluon.jit
def _with_common(m, l, acc, results, share, at, form: gl.constexpr):
    """The same rows' sums with those over a common prefix, which are waited for here."""
    COUNT: gl.constexpr = acc.shape[0]
    SPAN: gl.constexpr = form.SPAN * max(4, form.MR) // max(4, COUNT)  # as many registers
    F: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, form.WARPS, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(2, F)
    STATS = results.COMMON_STATS
    i = gl.arange(0, SPAN, layout=gl.SliceLayout(1, ROWS))
    r = gl.arange(0, COUNT, layout=gl.SliceLayout(0, ROWS))
    live = share.row + r < share.until
    d = gl.arange(0, form.DV, layout=gl.SliceLayout(0, gl.SliceLayout(1, F)))
    d = gl.expand_dims(gl.expand_dims(d, 0), 1)
    m = gl.convert_layout(m, gl.SliceLayout(0, ROWS), assert_trivial=True)
    l = gl.convert_layout(l, gl.SliceLayout(0, ROWS), assert_trivial=True)
    after_common_prefix(form)
    for first in range(0, results.common_shares, SPAN):
        there = (first + i < results.common_shares)[:, None] & live[None, :]
        spots = _common_spot(results, share, at, first + i, form)[:, None] + r[None, :]
        m_i = gl.load(STATS + spots * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        l_i = gl.load(STATS + spots * 2 + 1, mask=there, other=0, cache_modifier=".cg")
        m, l, acc = _added(m, l, acc, results.COMMON, spots, m_i, l_i, there, d, form)
    return m, l, acc


@gluon.jit
def _added(m, l, acc, PART, spots, m_i, l_i, there, d, form: gl.constexpr):
    """Sums of rows [MR, DV] with those that shares [SPAN, MR] left at their spots."""
    SUMMED: gl.constexpr = acc.type.layout
    x = gl.load(PART + gl.expand_dims(spots * form.DV, 2) + d,
                mask=gl.expand_dims(there, 2) & (d >= 0), other=0,
                cache_modifier=".cg")  # fmt: skip
    top = gl.maximum(m, gl.max(m_i, 0))
    safe = gl.where(top == float("-inf"), 0.0, top)
    alpha = gl.exp2(m - safe)
    beta = gl.exp2(m_i - safe[None, :])
    l = l * alpha + gl.sum(l_i * beta, 0)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, SUMMED), assert_trivial=True)
    acc = acc * alpha[:, None] + gl.sum(x * gl.expand_dims(beta, 2), 0)
    return top, l, acc


@gluon.jit
def _combined(m, l, acc, sums, tops, totals, form: gl.constexpr):
    """The warps' m, l [WK, N] and acc [WK, DV, N] as one."""
    F: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, form.WARPS, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(2, F)
    sums.store(acc.permute([0, 2, 1]))
    tops.store(m)
    totals.store(l)
    m = tops.load(ROWS)
    l = totals.load(ROWS)
    acc = sums.load(F)
    top = gl.max(m, 0)
    beta = gl.exp2(m - gl.where(top == float("-inf"), 0.0, top)[None, :])
    l = gl.sum(l * beta, 0)
    acc = gl.sum(acc * gl.expand_dims(beta, 2), 0)
    return top, l, acc


@gluon.jit
def _halves(x, form: gl.constexpr):
    """x [WK, .., R] in halves: of every 16 rows the first 8, and the others."""
    WK: gl.constexpr = form.WK
    N: gl.constexpr = form.R // 16
    if len(x.shape) == 2:  # rows in their own order
        x = x.reshape([WK, N, 2, 8]).permute([0, 1, 3, 2]).reshape([WK, form.R // 2, 2])
    else:  # in the order of O
        x = x.reshape([WK, x.shape[1], 2, form.R // 2]).permute([0, 1, 3, 2])
    return x.split()


@gluon.jit
def finish(m, l, acc, results, strides, share, at, form: gl.constexpr):
    """From the warps' m, l [WK, R] and acc [WK, DV, R] to out, or to a part of it.

    More than 8 rows are put together in halves, as shared memory is short.
    """
    N: gl.constexpr = form.R if form.R == 8 else form.R // 2
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [form.WK, N, form.DV], SUMS)
    tops = gl.allocate_shared_memory(gl.float32, [form.WK, N], PLAIN)
    totals = gl.allocate_shared_memory(gl.float32, [form.WK, N], PLAIN)
    if form.R == 8:
        top, l, acc = _combined(m, l, acc, sums, tops, totals, form)
        put(top, l, acc, 0, results, strides, share, at, form)
    else:
        m0, m1 = _halves(m, form)
        l0, l1 = _halves(l, form)
        acc0, acc1 = _halves(acc, form)
        top, l, acc = _combined(m0, l0, acc0, sums, tops, totals, form)
        put(top, l, acc, 0, results, strides, share, at, form)
        top, l, acc = _combined(m1, l1, acc1, sums, tops, totals, form)
        put(top, l, acc, 8, results, strides, share, at, form)
    settle(results, strides, share, at, form)


@gluon.jit
def put(top, l, acc, FIRST: gl.constexpr, results, strides, share, at, form: gl.constexpr):
    """Rows of a share to out, or to a part of it: 8 of every 16 from FIRST on, or all."""
    A: gl.constexpr = acc.type.layout
    top = gl.convert_layout(top, gl.SliceLayout(1, A), assert_trivial=True)
    l = gl.convert_layout(l, gl.SliceLayout(1, A), assert_trivial=True)
    r = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, A))
    if not form.WIDE and form.R > 8:
        r = r // 8 * 16 + r % 8 + FIRST
    if results.PART is None:
        _write(top, l, acc, r, results, strides, share, at, form)
    elif form.APART == 1:
        _leave(top, l, acc, r, results, share, at, form)
    elif share.splits == 1:
        if form.COMMON:
            both = _with_common(top, l, acc, results, share, at, form)
            _write(both[0], both[1], both[2], r, results, strides, share, at, form)
        else:
            _write(top, l, acc, r, results, strides, share, at, form)
    else:
        _leave(top, l, acc, r, results, share, at, form)


@gluon.jit
def _leave(top, l, acc, r, results, share, at, form: gl.constexpr):
    """What a share's rows come to on their own, and how much that weighs."""
    d = gl.arange(0, form.DV, layout=gl.SliceLayout(0, acc.type.layout))
    spots = _spot(share, share.split) * form.R + r
    live = share.row + r < share.until
    safe = gl.where(l > 0.0, l, 1.0)
    at_part = results.PART + spots[:, None] * form.DV + d[None, :]
    lse = gl.where(l > 0.0, top + gl.log2(safe), float("-inf"))
    gl.store(results.STATS + spots, lse, mask=live)
    gl.store(at_part, acc * (1.0 / safe)[:, None], mask=live[:, None] & (d >= 0)[None, :])


@gluon.jit
def settle(results, strides, share, at, form: gl.constexpr):
    """The last share of a sequence that is done merges them all."""
    if results.PART is not None:  # noqa: SIM102  known when compiled
        if share.splits >= form.APART:
            gl.thread_barrier()
            if form.APART > 1:
                last = _is_last(results, share)
            else:
                last = share.splits == 1  # and leaves the counter to a sequence that begins here
                if share.splits > 1:
                    last = _is_last(results, share)
            if last:
                _merge(results, strides, share, at, form)


@gluon.jit
def _is_last(results, share):
    """Counts a share as done; whether all others are, too."""
    arrived = gl.atomic_add(results.COUNT + share.whole, 1, sem="acq_rel", scope="gpu")
    if arrived == share.splits - 1:
        gl.store(results.COUNT + share.whole, 0)
    return arrived == share.splits - 1

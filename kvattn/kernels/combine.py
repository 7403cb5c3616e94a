"""The end of an attention kernel: shares of the keys are merged, out and lse are written."""

import triton
import triton.language as tl


@triton.jit
def added(
    m, l, acc_a, acc_b, PART, STATS, spot, step, shares, mine, live,
    VA: tl.constexpr, VB: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Sums of rows with those of shares, SPAN of them at a time, always in their order.

    Row `mine` of share i is left at `spot + i * step + mine`.
    """
    va = tl.arange(0, VA)
    if VB > 0:
        vb = VA + tl.arange(0, VB)
    for i in range(0, shares, SPAN):
        m_i = ()
        l_i = ()
        x_a = ()
        x_b = ()
        top = m
        for j in tl.static_range(SPAN):  # all loads first: they are in flight together
            there = live & (i + j < shares)
            spots = spot + (i + j) * step + mine
            at = PART + spots[:, None] * (VA + VB)
            x_a += (tl.load(at + va[None, :], mask=there[:, None], other=0,
                            cache_modifier=".cg"),)  # fmt: skip
            if VB > 0:
                x_b += (tl.load(at + vb[None, :], mask=there[:, None], other=0,
                                cache_modifier=".cg"),)  # fmt: skip
            m_i += (tl.load(STATS + spots * 2, mask=there, other=float("-inf"),
                            cache_modifier=".cg"),)  # fmt: skip
            l_i += (tl.load(STATS + spots * 2 + 1, mask=there, other=0,
                            cache_modifier=".cg"),)  # fmt: skip
        for j in tl.static_range(SPAN):
            top = tl.maximum(top, m_i[j])
        safe = tl.where(top == float("-inf"), 0.0, top)
        alpha = tl.exp2(m - safe)
        m = top
        l *= alpha
        acc_a *= alpha[:, None]
        if VB > 0:
            acc_b *= alpha[:, None]
        for j in tl.static_range(SPAN):
            beta = tl.exp2(m_i[j] - safe)
            l += l_i[j] * beta
            acc_a += x_a[j] * beta[:, None]
            if VB > 0:
                acc_b += x_b[j] * beta[:, None]
    return m, l, acc_a, acc_b


@triton.jit
def merge(
    OUT, LSE, SINKS, PART, STATS, part, splits, row_first, q_len, q_first, b, head, active,
    v_factor, out_strides, lse_strides, COMMON, COMMON_STATS, common_spot, common_step,
    common_shares,
    GROUP: tl.constexpr, BM: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr, DV: tl.constexpr,
    MR: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Adds up what the shares left, MR rows at a time, those of a common prefix too."""
    for first in range(0, BM, MR):
        mine = first + tl.arange(0, MR)
        r = row_first + mine
        live = r < q_len * GROUP
        m = tl.full([MR], float("-inf"), tl.float32)
        l = tl.zeros([MR], tl.float32)
        acc_a = tl.zeros([MR, VA], tl.float32)
        acc_b = acc_a
        if VB > 0:
            acc_b = tl.zeros([MR, VB], tl.float32)
        m, l, acc_a, acc_b = added(
            m, l, acc_a, acc_b, PART, STATS, part * BM, BM, splits, mine, live, VA, VB, SPAN,
        )  # fmt: skip
        if COMMON is not None:
            m, l, acc_a, acc_b = added(
                m, l, acc_a, acc_b, COMMON, COMMON_STATS, common_spot, common_step, common_shares,
                r, live, VA, VB, SPAN,
            )  # fmt: skip
        if VB == 0:
            acc_b = acc_a
        finish(
            OUT, LSE, SINKS, m, l, acc_a, acc_b, r, q_len, q_first, b, head, active, v_factor,
            out_strides, lse_strides, GROUP, VA, VB, DV,
        )  # fmt: skip


@triton.jit
def finish(
    OUT, LSE, SINKS, m, l, acc_a, acc_b, r, q_len, q_first, b, head, active, v_factor,
    out_strides, lse_strides,
    GROUP: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Writes out and lse of packed rows r; a sink is one more logit without a value."""
    live = r < q_len * GROUP
    query_head = head * GROUP + r % GROUP
    at = (q_first + r // GROUP).to(tl.int64)
    va = tl.arange(0, VA)
    if SINKS is not None:
        sink = tl.load(SINKS + query_head, mask=live, other=0).to(tl.float32) * 1.4426950408889634
        sink = tl.where(active, sink, float("-inf"))
        m_new = tl.maximum(m, sink)
        endless = m_new == float("inf")
        safe = tl.where((m_new == float("-inf")) | endless, 0.0, m_new)
        alpha = tl.where(endless, 0.0, tl.exp2(m - safe))
        l = l * alpha + tl.where(endless, 1.0, tl.exp2(sink - safe))
        acc_a = acc_a * alpha[:, None]
        if VB > 0:
            acc_b = acc_b * alpha[:, None]
        m = m_new
    some = l > 0.0
    inverse = v_factor / tl.where(some, l, 1.0)
    element: tl.constexpr = OUT.dtype.element_ty
    rows = b * out_strides[0] + at * out_strides[1] + query_head * out_strides[2]
    tl.store(OUT + rows[:, None] + va[None, :], (acc_a * inverse[:, None]).to(element),
             mask=live[:, None] & (va < DV)[None, :])  # fmt: skip
    if VB > 0:
        vb = VA + tl.arange(0, VB)
        tl.store(OUT + rows[:, None] + vb[None, :], (acc_b * inverse[:, None]).to(element),
                 mask=live[:, None] & (vb < DV)[None, :])  # fmt: skip
    if LSE is not None:
        LN2: tl.constexpr = 0.6931471805599453
        lse = tl.where(some, (m + tl.log2(tl.where(some, l, 1.0))) * LN2, float("-inf"))
        lse_rows = b * lse_strides[0] + query_head * lse_strides[1] + at * lse_strides[2]
        tl.store(LSE + lse_rows, lse, mask=live)

"""The end of an attention kernel: shares of the keys are merged, out and lse are written."""

import triton
import triton.language as tl


@triton.jit
def merge(
    OUT, LSE, SINKS, PART, STATS, part, splits, row_first, q_len, q_first, b, head, active,
    v_factor, out_strides, lse_strides,
    GROUP: tl.constexpr, BM: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr, DV: tl.constexpr,
    MR: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Adds up what the shares left, MR rows and SPAN shares at a time, always in their order."""
    for first in range(0, BM, MR):
        mine = first + tl.arange(0, MR)
        r = row_first + mine
        live = r < q_len * GROUP
        va = tl.arange(0, VA)
        m = tl.full([MR], float("-inf"), tl.float32)
        l = tl.zeros([MR], tl.float32)
        acc_a = tl.zeros([MR, VA], tl.float32)
        if VB > 0:
            acc_b = tl.zeros([MR, VB], tl.float32)
            vb = VA + tl.arange(0, VB)
        for i in range(0, splits, SPAN):
            share = i + tl.arange(0, SPAN)
            spots = (part + share)[:, None] * BM + mine[None, :]
            there = (share < splits)[:, None] & live[None, :]
            m_i = tl.load(STATS + spots * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            l_i = tl.load(STATS + spots * 2 + 1, mask=there, other=0, cache_modifier=".cg")
            at = PART + spots[:, :, None] * (VA + VB)
            x = tl.load(at + va[None, None, :], mask=there[:, :, None], other=0,
                        cache_modifier=".cg")  # fmt: skip
            m_new = tl.maximum(m, tl.max(m_i, 0))
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m - safe)
            beta = tl.exp2(m_i - safe[None, :])
            m = m_new
            l = l * alpha + tl.sum(l_i * beta, 0)
            acc_a = acc_a * alpha[:, None] + tl.sum(x * beta[:, :, None], 0)
            if VB > 0:
                x = tl.load(at + vb[None, None, :], mask=there[:, :, None], other=0,
                            cache_modifier=".cg")  # fmt: skip
                acc_b = acc_b * alpha[:, None] + tl.sum(x * beta[:, :, None], 0)
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

"""The CPU backend: torch's fused attention kernel over dense, packed and paged caches.

One sequence at a time. Keys come as views where memory allows it, else gathered in pieces that
stay in the processor's cache: no temporary exceeds one sequence's keys and values.
Partial results hold out as [rows, H, D] and lse as [H, rows].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvattn import quant
from kvattn.backends import cpu_append, prefix, reference
from kvattn.backends.cpu_decode import Decode, finite
from kvattn.backends.cpu_keys import Keys, reach
from kvattn.plan import Plan, Prepared
from kvattn.request import Facts, Request, Span

name = "cpu"
lasting = False
_FEW_ROWS = 16  # up to here the rows of a group share one tile and keys come in pieces
_ROW_BLOCK = 128  # rows that share a mask, so that a window costs what it shows
_fused = torch._scaled_dot_product_flash_attention_for_cpu  # cheaper to call than torch.ops.aten

_NORMS = ("q_norm_weight", "k_norm_weight")
_REFUSED = (
    ("qv", "torch's fused kernel has no second product of qv and v"),
    ("sfq", "MXFP8 scales are left to the reference"),
    ("sfk", "MXFP8 scales are left to the reference"),
    ("sfv", "MXFP8 scales are left to the reference"),
    ("rel_bias", "torch's fused kernel cannot gather rel_bias by distance"),
    ("gather_kv_indices", "torch's fused kernel cannot select keys by gather_kv_indices"),
)


def refuses(facts: Facts) -> str | None:
    """Why this backend cannot take the call, or None."""
    if facts.device != "cpu":
        return f"the tensors are on {facts.device}"
    for tensor, reason in _REFUSED:
        if facts.has(tensor):
            return reason
    if not facts.option("attend"):
        return None
    if facts.score_mod or facts.mask_mod or facts.block_sparse:
        return "torch's fused kernel runs no score_mod, mask_mod or block masks"
    if facts.option("softcap") > 0:
        return "torch's fused kernel has no softcap"
    if facts.option("batch_invariant"):
        return "torch's fused kernel is not batch_invariant: its blocks follow the number of rows"
    if facts.tensor("q").dtype in quant.FP8:
        return "torch's fused kernel has no FP8 queries"
    if facts.tensor("q").shape[-2] == 0:
        return "torch's fused kernel divides by the number of heads, which is 0"
    if facts.tensor("q").shape[-1] != facts.tensor("v_cache").shape[-1]:
        return "torch's fused kernel needs equal head dims of keys and values"
    return None


def kernel(facts: Facts) -> str:
    append = "append" if facts.has("k") else ""
    if not facts.option("attend"):
        return append
    layout = "paged" if facts.has("page_table") else "dense"
    scaled = facts.has("q_descale", "k_descale", "v_descale")
    dtype = _compute_dtype(facts.tensor("q").dtype, facts.tensor("k_cache").dtype, scaled)
    attention = f"torch's fused kernel over {layout} keys in {str(dtype).removeprefix('torch.')}"
    words = f"{append}, then {attention}" if append else attention
    return words + prefix.kernel(facts, "this backend takes one sequence after the other")


def _compute_dtype(query: torch.dtype, cache: torch.dtype, scaled: bool) -> torch.dtype:
    if query == torch.float64:
        return query
    return query if query == cache and not scaled else torch.float32


def run(r: Request, plan: Plan) -> tuple[Tensor, Tensor] | None:
    """Appends the new tokens, then attends. Returns (out, lse), or None for an append alone."""
    decoded = _decode(r) if r.attend else None
    if decoded is not None:
        return decoded
    r = r.apart()
    q = cpu_append.ready_query(r) if r.k is None else cpu_append.append(r)
    if not r.attend:
        return None
    assert q is not None
    work = _Work(r, q)
    out, lse = r.outputs()
    for b, span in enumerate(r.spans):
        if span.q_len == 0:
            continue
        part = work.sequence(b, span)
        if r.cu_seqlens_q is None:
            rows, columns = out[b, : span.q_len], lse[b, :, : span.q_len]
        else:
            rows = out.narrow(0, span.q_start, span.q_len)
            columns = lse.narrow(1, span.q_start, span.q_len)
        rows.copy_(part.out)
        if r.return_lse:
            columns.copy_(part.lse)
    return out, lse


def prepare(r: Request) -> Prepared | None:
    """What is left of a decode step when its lengths, pages and rotary tables are known."""
    step = _decode_step(r)
    if step is None or r.out is not None or r.return_lse:
        return None
    by = cpu_append.rotary_factors(r) if step.rotates else None
    norms = tuple(name for name in _NORMS if getattr(r, name) is not None)
    new = () if r.k is None else ("k", "v")

    def run(q: Tensor, keys: Tensor, values: Tensor, *more: Tensor) -> tuple[Tensor, Tensor] | None:
        if torch.is_autocast_enabled("cpu"):
            return None
        k, v = (more[0], more[1]) if new else (None, None)
        if not norms:
            return step(q, k, v, keys, values, by)
        given = dict(zip(norms, more[len(new) :], strict=True))
        weights = given.get("q_norm_weight"), given.get("k_norm_weight")
        return step(q, k, v, keys, values, by, weights)

    return Prepared(("q", "k_cache", "v_cache", *new, *norms), run)


def _decode_step(r: Request) -> Decode | None:
    if "decode" not in r.shared:
        r.shared["decode"] = Decode.of(r)
    step: Decode | None = r.shared["decode"]
    return step


def _decode(r: Request) -> tuple[Tensor, Tensor] | None:
    """The call as a decode step, if it is one."""
    step = _decode_step(r)
    if step is None:
        return None
    assert r.q is not None and r.k_cache is not None and r.v_cache is not None
    by = cpu_append.rotary_factors(r) if step.rotates else None
    weights = r.q_norm_weight, r.k_norm_weight
    result = step(r.q, r.k, r.v, r.k_cache, r.v_cache, by, weights)
    if result is None:
        return None
    out, lse = result
    if r.out is not None:
        out = r.out.copy_(out)
    return out, lse.reshape(r.lse_shape).float() if r.return_lse else lse


class Part(NamedTuple):
    """A result over some of the keys."""

    out: Tensor  # [rows, H, D]
    lse: Tensor  # [H, rows]


class _Work:
    """One attention call: the request, its query made ready, and what its sequences share."""

    def __init__(self, r: Request, q: Tensor) -> None:
        assert r.k_cache is not None
        scaled = not (r.q_descale is None and r.k_descale is None and r.v_descale is None)
        q = q if q.stride(-1) == 1 else q.contiguous()  # the fused kernel assumes a unit stride
        self.r, self.q, self.scaled = r, q, scaled
        self.dtype = _compute_dtype(q.dtype, r.k_cache.dtype, scaled)
        self.keys = Keys(r, self.dtype)
        self.kv_heads = r.kv_heads
        self.group = r.heads // r.kv_heads

    def sequence(self, b: int, span: Span) -> Part:
        """One sequence: out and lse of all its rows."""
        r = self.r
        if r.cu_seqlens_q is not None:
            q = self.q.narrow(0, span.q_start, span.q_len)
        else:
            q = self.q.select(0, b)
            q = q if q.shape[0] == span.q_len else q.narrow(0, 0, span.q_len)
        if not span.active or span.q_len == 0:  # the fused kernel divides by the rows
            return self._empty(q)
        rows = range(span.q_len)
        low, high = reach(r, span, rows)
        if high <= low:
            return self._sinks(self._empty(q))
        q = self._scaled_query(q, b)
        biased = r.alibi_slopes is not None
        masked = len(rows) > 1 and r.local
        if len(rows) <= _FEW_ROWS:
            part = self._few(b, span, q, low, high, biased or masked)
        elif not masked and not biased:
            part = self._wide(q, *self.keys.whole(b, span, low, high))
        elif _plain_causal(r):
            part = self._causal(b, span, q)
        else:
            part = self._blocks(b, span, q)
        if not _sound(part):
            return Part(*reference.attend_sequence(r, b, span, _accumulated_in(self.dtype)))
        if r.v_descale is not None and not self.keys.v_by_token:
            part = Part(part.out * self._by_head(r.v_descale, b), part.lse)
        return self._sinks(part)

    def _empty(self, q: Tensor) -> Part:
        """Rows that see no key."""
        lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
        return Part(torch.zeros_like(q, dtype=self.dtype), lse)

    def _by_head(self, scale: Tensor, b: int) -> Tensor:
        """A (B, Hk) factor of sequence b as [1, H, 1]."""
        return scale[b].to(self.dtype).repeat_interleave(self.group)[None, :, None]

    def _scaled_query(self, q: Tensor, b: int) -> Tensor:
        """q in the compute dtype, times the descales of q and k: logits are linear in them."""
        q = q.to(self.dtype)
        if self.r.q_descale is not None:
            q = q * self._by_head(self.r.q_descale, b)
        if self.r.k_descale is not None and not self.keys.k_by_token:
            q = q * self._by_head(self.r.k_descale, b)
        return q

    def _few(self, b: int, span: Span, q: Tensor, low: int, high: int, biased: bool) -> Part:
        """Few rows: those of a group form one tile per kv head, and keys come in pieces."""
        rows, hk, g = q.shape[0], self.kv_heads, self.group
        tile = self._tile(q)
        bias = None
        if biased:
            bias = self._bias(b, span, range(rows), low, high).expand(hk, g, -1, -1).flatten(1, 2)
        count = self.keys.count(span, low, high)
        # Results that stay where they are would keep the kernel from reusing its own buffers.
        outs = tile.new_empty((count, *tile.shape), dtype=_accumulated_in(self.dtype))
        lses = outs.new_empty(outs.shape[:-1])
        for i, (k, v, first, last) in enumerate(self.keys.pieces(b, span, low, high)):
            mask = None if bias is None else bias[None, :, :, first - low : last - low]
            out, lse = _call(tile, k, v, self.r.softmax_scale, mask)
            if count > 1:
                outs[i], lses[i] = out, lse
        if count > 1:
            out, lse = _merge(outs, lses)  # [1, Hk, g*rows, D], [1, Hk, g*rows]
        if rows == 1:
            return Part(out.reshape(1, hk * g, -1), lse.reshape(hk * g, 1))
        out = out[0].unflatten(1, (g, rows)).permute(2, 0, 1, 3).flatten(1, 2)
        return Part(out, lse[0].unflatten(1, (g, rows)).flatten(0, 1))

    def _tile(self, q: Tensor) -> Tensor:
        """Query rows [rows, H, D] with those of a group side by side: [1, Hk, g*rows, D]."""
        rows, _heads, dim = q.shape
        hk, g = self.kv_heads, self.group
        if rows == 1:
            return q.reshape(1, hk, g, dim)
        return q.unflatten(1, (hk, g)).permute(1, 2, 0, 3).reshape(1, hk, g * rows, dim)

    def _wide(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> Part:
        """Many rows: the kv heads are the kernel's batch, the group its heads.

        q [rows, H, D], k and v [1, Hk, n, D], mask [Hk, g, rows, n].
        """
        tile = q.unflatten(1, (self.kv_heads, self.group)).permute(1, 2, 0, 3)
        k, v = (x[0][:, None].expand(-1, self.group, -1, -1) for x in (k, v))
        out, lse = _call(tile, k, v, self.r.softmax_scale, mask, causal)
        return Part(out.permute(2, 0, 1, 3).flatten(1, 2), lse.flatten(0, 1))

    def _causal(self, b: int, span: Span, q: Tensor) -> Part:
        """Causal rows: the earlier keys unmasked and the square of the diagonal, merged."""
        rows, keys = q.shape[0], span.keys
        k, v = self.keys.whole(b, span, 0, keys)
        if rows > keys:  # the first rows stand before the first key
            square = self._wide(q[rows - keys :], k, v, causal=True)
            empty = self._empty(q[: rows - keys])
            return Part(torch.cat((empty.out, square.out)), torch.cat((empty.lse, square.lse), 1))
        before = keys - rows
        square = self._wide(q, k[:, :, before:], v[:, :, before:], causal=True)
        if before == 0:
            return square
        past = self._wide(q, k[:, :, :before], v[:, :, :before])
        outs = [part.out.transpose(0, 1) for part in (past, square)]
        out, lse = _merge(torch.stack(outs), torch.stack([past.lse, square.lse]))
        return Part(out.transpose(0, 1), lse)

    def _blocks(self, b: int, span: Span, q: Tensor) -> Part:
        """Windows, chunks and ALiBi: blocks of rows, each over the keys it can reach."""
        parts = []
        for first in range(0, span.q_len, _ROW_BLOCK):
            rows = range(first, min(first + _ROW_BLOCK, span.q_len))
            block = q[rows.start : rows.stop]
            low, high = reach(self.r, span, rows)
            if high <= low:
                parts.append(self._empty(block))
                continue
            k, v = self.keys.whole(b, span, low, high)
            bias = self._bias(b, span, rows, low, high)
            parts.append(self._wide(block, k, v, bias.expand(self.kv_heads, self.group, -1, -1)))
        return Part(torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1))

    def _bias(self, b: int, span: Span, rows: range, low: int, high: int) -> Tensor:
        """Masks and ALiBi as one additive term [Hk | 1, g | 1, rows, high - low]."""
        r = self.r
        left, right = r.window
        p = torch.arange(rows.start, rows.stop, device="cpu")[:, None] + (span.keys - span.q_len)
        j = torch.arange(low, high, device="cpu")[None, :]
        hidden = torch.zeros_like(p >= j)
        if right is not None:
            hidden |= j > p + right
        if left is not None:
            hidden |= j < p - left
        if r.attention_chunk > 0:
            chunk = r.attention_chunk
            hidden |= torch.div(p, chunk, rounding_mode="floor") != j // chunk
        bias = torch.zeros_like(hidden, dtype=self.dtype)[None, None]
        if r.alibi_slopes is not None:
            slopes = r.alibi_slopes.expand(r.batch, r.heads)[b].view(
                self.kv_heads, self.group, 1, 1
            )
            bias = -(slopes * (p - j).abs())  # fp32: 16 bits would show in the lse
            bias = bias.double() if self.dtype == torch.float64 else bias
        return bias.masked_fill(hidden, -math.inf)

    def _sinks(self, part: Part) -> Part:
        """Adds the sinks to the denominator."""
        if self.r.sinks is None:
            return part
        total = torch.logaddexp(part.lse, self.r.sinks.to(part.lse.dtype)[:, None])
        share = torch.where(total.isinf(), 0.0, torch.exp(part.lse - total))
        return Part(part.out * share.transpose(0, 1)[..., None], total)


def _sound(part: Part) -> bool:
    """False where a NaN or an infinite logit may have spread to rows that must not see it.

    The kernel gives an lse of 0 to rows whose logits are all -inf, NaN to rows with one of +inf,
    and adds masked values times 0. Such results, and some honest ones, are computed once more.
    """
    return finite(part.lse) and (part.out.shape[0] == 1 or bool(part.out.isfinite().all()))


def _plain_causal(r: Request) -> bool:
    """Whether the kernel's own causal mask is all there is; it scales that mask's -inf too."""
    alone = r.window[0] is None and r.attention_chunk == 0 and r.alibi_slopes is None
    return r.causal and alone and r.softmax_scale > 0


def _call(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """torch's kernel: q [N, h, rows, D], k and v [N, h, n, D] -> out like q, lse [N, h, rows]."""
    out, lse = _fused(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if mask is not None:  # a fully masked row comes back with an lse of 0
        lse = lse.masked_fill(mask.amax(-1) == -math.inf, -math.inf)
    return out, lse


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges results over disjoint keys: outs [n, ..., D] and lses [n, ...]."""
    top = lses.amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    weights = weights / torch.where(total > 0, total, 1.0)
    out = (outs.to(weights.dtype) * weights[..., None]).sum(0)
    return out, top + torch.log(total)


def _accumulated_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32

"""The parts of the call, public by themselves: append, rotary embedding, merging of results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvattn import errors as E
from kvattn import ops
from kvattn.checks import dense, distinct, same_device, unwritable
from kvattn.counting import whole
from kvattn.norm import EPS
from kvattn.rotary import rotate
from kvattn.values import readable


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int | None = None,
    slot_mapping: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = True,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    sfk: Tensor | None = None,
    sfv: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = EPS,
    backend: str | None = None,
) -> None:
    """Stores new keys and values in a cache, in place: normalise, rotate, quantise, write.

    Where: behind `cache_seqlens` (absolute rows, as in `flash_attn_with_kvcache`), or at the
    slots of `slot_mapping`, as serving engines do. With slots alone, `page_table` and
    `cache_seqlens` are not needed (with rotary, `cache_seqlens` counts the new tokens too, or
    `rotary_seqlens` gives the positions).

    Args:
        k, v: (B, Sn, Hk, D | Dv), or (total_new, Hk, ...) with `cu_seqlens_k_new`, or
            (total_new, Hk, ...) with `slot_mapping` alone. The cache's dtype or a wider one.
        k_cache, v_cache: (rows, capacity, Hk, D | Dv) or (pages, page_size, Hk, ...).
        cache_seqlens: int or (B,) int32, length of every row before the append.
        slot_mapping: (total_new,) int64, ``page * page_size + offset``; -1 skips a token.
        page_table, cu_seqlens_k_new, cache_batch_idx, cache_leftpad, rotary_*, k_descale,
            v_descale, sfk, sfv, k_norm_weight, norm_eps: as in `flash_attn_with_kvcache`.
        backend: None, or the name of one that must be used.

    Raises:
        kvattn.errors.KvattnError: a subclass that names the argument; nothing was written.

    Example:
        >>> pages = torch.zeros(2, 4, 4, 2, 16)  # k and v, 4 pages of 4 slots
        >>> k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
        >>> kvattn.append_kv(k, v, pages[0], pages[1], slot_mapping=torch.tensor([5, -1, 9]))
    """
    given = {
        "k": k,
        "v": v,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cache_seqlens": cache_seqlens,
        "slot_mapping": slot_mapping,
        "page_table": page_table,
        "cu_seqlens_k_new": cu_seqlens_k_new,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_seqlens": rotary_seqlens,
        "rotary_interleaved": rotary_interleaved,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "sfk": sfk,
        "sfv": sfv,
        "k_norm_weight": k_norm_weight,
        "norm_eps": norm_eps,
        "backend": backend,
    }
    ops.append(given)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    seqlen_offsets: Tensor | int | None = None,
    interleaved: bool = True,
    cu_seqlens: Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    """Rotary position embedding: (x1, x2) -> (x1 cos - x2 sin, x1 sin + x2 cos).

    Source of the formula: Su et al., "RoFormer", 2021.

    Args:
        x: (B, S, H, D), or (total, H, D) with `positions` or `cu_seqlens`.
        cos, sin: (rows, R / 2), R <= D, fp32 or x's dtype; channels from R on pass through.
        positions: integer tensor of x's shape without heads and dim: a table row per token.
        seqlen_offsets: int or (B,): token t of a sequence stands at offset + t.
        interleaved: True pairs channels (0, 1), (2, 3), ...; False pairs (i, i + R / 2).
        cu_seqlens: (B + 1,) int32 borders of the sequences of a packed x.
        inplace: write the result into x and return x.

    Returns:
        A tensor of x's shape and dtype, computed in fp32.

    Raises:
        kvattn.errors.RotaryArgumentsError: positions missing, doubled or malformed.
        kvattn.errors.RotaryShapeError, RotaryDtypeError, RotaryTableShortError: bad tables.

    Example:
        >>> angle = torch.arange(8)[:, None] * torch.tensor([1.0, 0.01])
        >>> x = torch.randn(1, 3, 2, 8)
        >>> kvattn.apply_rotary(x, angle.cos(), angle.sin(), seqlen_offsets=5).shape
        torch.Size([1, 3, 2, 8])
    """
    _rotary_tables(x, cos, sin)
    for name, flag in (("interleaved", interleaved), ("inplace", inplace)):
        if flag is not True and flag is not False:
            raise E.FlagError(name, repr(flag), "True or False")
    if inplace:
        _writable(x)
    if (positions is None) == (seqlen_offsets is None):
        got = "neither or both of positions and seqlen_offsets"
        raise E.RotaryArgumentsError("positions", got, "one of them")
    if positions is None:
        assert seqlen_offsets is not None
        positions = _token_positions(x, seqlen_offsets, cu_seqlens)
    elif cu_seqlens is not None:
        raise E.RotaryArgumentsError("cu_seqlens", "borders along with positions", "one of them")
    _same_device("positions", positions, x)
    if positions.shape != x.shape[:-2] or not _whole(positions):
        got = f"{positions.dtype}, shape {tuple(positions.shape)}"
        raise E.RotaryArgumentsError("positions", got, f"integers of {tuple(x.shape[:-2])}")
    if positions.numel() and readable(positions):
        low, high = (int(p) for p in torch.aminmax(positions))
        if low < 0 or high >= cos.shape[0]:
            got = f"position {low if low < 0 else high}"
            raise E.RotaryTableShortError("cos", got, f"positions 0 to {cos.shape[0] - 1}")
    turned = rotate(x, cos, sin, positions.long(), interleaved)
    return x.copy_(turned) if inplace else turned


def _rotary_tables(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        _same_device(name, tensor, x)
    if x.dim() not in (3, 4) or not x.is_floating_point():
        got = f"{x.dtype}, shape {tuple(x.shape)}"
        raise E.RotaryArgumentsError("x", got, "3 or 4 dimensions of floats")
    if cos.dim() != 2 or cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= x.shape[-1]:
        got = f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        raise E.RotaryShapeError("cos", got, f"two (rows, R/2) with R <= {x.shape[-1]}")
    if cos.dtype != sin.dtype or cos.dtype not in (torch.float32, x.dtype):
        raise E.RotaryDtypeError("cos", f"{cos.dtype}, {sin.dtype}", f"float32 or {x.dtype}")


def _same_device(name: str, tensor: Tensor, x: Tensor) -> None:
    dense(name, tensor)
    same_device(name, tensor, "x", x.device)


def _whole(tensor: Tensor) -> bool:
    """Whether it holds integers."""
    odd = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    return not odd


def _writable(x: Tensor) -> None:
    """What torch would refuse to write in place."""
    if torch.is_grad_enabled() and x.requires_grad and x.is_leaf:
        raise E.RequiresGradError("x", "a leaf that requires grad, in place", "inplace=False")
    if unwritable(x):
        raise E.InferenceTensorError("x", "an inference tensor, in place", "inplace=False")
    if not distinct(x):
        raise E.RotaryArgumentsError("x", f"strides {x.stride()}", "each number in its own place")


def _token_positions(x: Tensor, offsets: Tensor | int, edges: Tensor | None) -> Tensor:
    """offset + t for every token, t restarting with each sequence."""
    if (x.dim() == 3) != (edges is not None):
        got = "None for packed x" if edges is None else "borders for padded x"
        raise E.RotaryArgumentsError("cu_seqlens", got, "row borders of a packed x, and only then")
    if edges is not None:
        _same_device("cu_seqlens", edges, x)
        if edges.dim() != 1 or not edges.numel() or not _whole(edges):
            got = f"{edges.dtype}, shape {tuple(edges.shape)}"
            raise E.CuSeqlensError("cu_seqlens", got, "int32 of shape (batch + 1,)")
    count = x.shape[0] if edges is None else edges.shape[0] - 1
    if not isinstance(offsets, Tensor):
        number = whole(offsets)
        if number is None or abs(number) >= 1 << 31:
            got = f"{type(offsets).__name__} {offsets!r}"
            raise E.RotaryArgumentsError("seqlen_offsets", got, f"an int or ({count},)")
        offsets = torch.full((), number, device=x.device)
    _same_device("seqlen_offsets", offsets, x)
    start = offsets
    if start.shape not in ((), (count,)) or not _whole(start):
        got = f"{start.dtype}, shape {tuple(start.shape)}"
        raise E.RotaryArgumentsError("seqlen_offsets", got, f"an int or ({count},)")
    start = start.expand(count)
    if edges is None:
        return torch.arange(x.shape[1], device=x.device) + start[:, None]
    total = x.shape[0]
    if readable(edges):
        spans = int(edges[0]) == 0 and int(edges[-1]) == total
        if not spans or bool((edges.diff() < 0).any()):
            raise E.CuSeqlensError("cu_seqlens", edges.tolist(), f"rising from 0 to {total}")
    tokens = torch.arange(total, device=x.device, dtype=edges.dtype)
    owner = torch.searchsorted(edges[1:], tokens, right=True).clamp_max(count - 1)
    return tokens + (start - edges[:-1])[owner]


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges partial attention results over disjoint keys into the result over all of them.

    An empty partial result (lse -inf, or FlashAttention-2's +inf) is selected away, whatever its
    output holds. Two or more parts; computed in fp32 (fp64 for fp64 lses).

    Args:
        outs: tensors of one shape (B, S, H, D) or (total, H, D), any strides.
        lses: natural-log log-sum-exps, head first as the attention calls return them: (B, H, S)
            or (H, total); any strides.

    Returns:
        out in the first part's dtype, and the merged lse, -inf where every part is empty.

    Raises:
        kvattn.errors.MergeStatesError: fewer than one part, or shapes that do not fit.

    Example:
        >>> a, b = torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)
        >>> out, lse = kvattn.merge_states([a, b], [torch.zeros(1, 2, 1)] * 2)
        >>> out[0, 0, 0, 0].item()
        0.5
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    _mergeable(outs, lses)
    wide = torch.float64 if lses[0].dtype == torch.float64 else torch.float32
    weights = torch.stack([lse.to(wide) for lse in lses])  # [parts, (B,) H, S]
    weights = torch.where(weights == math.inf, -math.inf, weights)
    top = weights.amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(weights - top)
    total = weights.sum(0)
    lse = torch.where(total == 0, -math.inf, top + torch.log(total))
    weights = weights / torch.where(total > 0, total, 1.0)
    shares = weights.transpose(-1, -2)[..., None]  # [parts, (B,) S, H, 1]
    parts = torch.stack([out.to(wide) for out in outs])
    merged = (torch.where(shares > 0, parts, 0.0) * shares).sum(0)
    return merged.to(outs[0].dtype), lse


def _parts(name: str, given: Sequence[Tensor]) -> list[Tensor]:
    """Partial results as a list; a tensor is one of its rows."""
    try:
        parts = list(given)
    except (TypeError, RuntimeError):  # torch's for a tensor without rows
        got = type(given).__name__
        raise E.MergeStatesError(name, got, "a sequence of tensors") from None
    for part in parts:
        dense(name, part)
        if not part.is_floating_point():
            raise E.MergeStatesError(name, str(part.dtype), "floats")
    return parts


def _mergeable(outs: list[Tensor], lses: list[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise E.MergeStatesError("outs", f"{len(outs)} outs, {len(lses)} lses", "one lse per out")
    first = outs[0]
    if first.dim() not in (3, 4):
        raise E.MergeStatesError("outs", f"shape {tuple(first.shape)}", "3 or 4 dimensions")
    *lead, heads, _ = first.shape
    wanted = (lead[0], heads, lead[1]) if len(lead) == 2 else (heads, lead[0])
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != first.shape or out.device != first.device:
            got = f"shape {tuple(out.shape)} on {out.device}"
            raise E.MergeStatesError("outs", got, f"{tuple(first.shape)} on {first.device}")
        if lse.shape != wanted or lse.device != first.device:
            got = f"shape {tuple(lse.shape)} on {lse.device}"
            raise E.MergeStatesError("lses", got, f"{wanted} on {first.device}")

"""Rotary position embedding in plain torch: the formula of every backend (Su et al., 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvattn import quant

Factors = tuple[Tensor, Tensor]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first R = 2 * cos.shape[1] channels of x by its positions.

    x (..., heads, D), positions (...) integers, cos and sin (rows, R / 2). Pairs are channels
    (0, 1), (2, 3), ... if interleaved, else (i, i + R / 2). Computed in fp32 (fp64 for fp64 x)
    and rounded to x's dtype; FP8 saturates.
    """
    return turn(x, cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2), interleaved)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The same with a table row per token already chosen: cos and sin broadcast to (..., R / 2)."""
    return turn_by(x, factors(cos, sin, x.dtype, interleaved), interleaved)


def factors(cos: Tensor, sin: Tensor, dtype: torch.dtype, interleaved: bool) -> Factors:
    """What both channels of a pair are multiplied by, for tokens of `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if cos.dtype != wide:
        cos, sin = cos.to(wide), sin.to(wide)
    axis = -1 if interleaved else -2
    return cos.unsqueeze(axis), torch.stack((sin.neg(), sin), axis)


def turn_by(x: Tensor, by: Factors, interleaved: bool) -> Tensor:
    """(x1, x2) cos + (x2, x1) (-sin, sin): the products and sums of the formula, in few calls."""
    cos, crossing = by
    axis = -1 if interleaved else -2
    half, dim = crossing.shape[-2 if interleaved else -1], x.shape[-1]
    part = x if 2 * half == dim else x.narrow(-1, 0, 2 * half)
    if x.dtype != cos.dtype:
        part = part.to(cos.dtype)
    pairs = part.view(*part.shape[:-1], *((half, 2) if interleaved else (2, half)))
    turned = (pairs * cos).add_(pairs.flip(axis) * crossing).flatten(-2)
    if turned.dtype != x.dtype:
        turned = quant.cast(turned, x.dtype)
    if 2 * half == dim:
        return turned
    out = x.clone(memory_format=torch.contiguous_format)
    out.narrow(-1, 0, 2 * half).copy_(turned)
    return out

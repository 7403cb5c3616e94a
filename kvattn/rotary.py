"""Rotary position embedding in plain torch: the formula of every backend (Su et al., 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvattn import quant


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first R = 2 * cos.shape[1] channels of x by its positions.

    x (..., heads, D), positions (...) integers, cos and sin (rows, R / 2). Pairs are channels
    (0, 1), (2, 3), ... if interleaved, else (i, i + R / 2). Computed in fp32 (fp64 for fp64 x)
    and rounded to x's dtype; FP8 saturates.
    """
    return turn(x, cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2), interleaved)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The same with a table row per token already chosen: cos and sin broadcast to (..., R / 2)."""
    half, dim = cos.shape[-1], x.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    part = x if 2 * half == dim else x.narrow(-1, 0, 2 * half)
    if x.dtype != wide:
        part = part.to(wide)
    if cos.dtype != wide:
        cos, sin = cos.to(wide), sin.to(wide)
    axis, pair = (-1, (half, 2)) if interleaved else (-2, (2, half))
    pairs = part.view(*part.shape[:-1], *pair)
    # (x1, x2) cos + (x2, x1) (-sin, sin): the products and sums of the formula, in fewer calls
    crossed = pairs.flip(axis) * torch.stack((sin.neg(), sin), axis)
    turned = (pairs * cos.unsqueeze(axis)).add_(crossed).flatten(-2)
    if turned.dtype != x.dtype:
        turned = quant.cast(turned, x.dtype)
    if 2 * half == dim:
        return turned
    out = x.clone(memory_format=torch.contiguous_format)
    out.narrow(-1, 0, 2 * half).copy_(turned)
    return out

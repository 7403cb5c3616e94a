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
    c, s = cos.to(wide), sin.to(wide)
    part = x.narrow(-1, 0, 2 * half).to(wide)
    if interleaved:
        x1, x2 = part.unflatten(-1, (half, 2)).unbind(-1)
        turned = torch.stack((x1 * c - x2 * s, x1 * s + x2 * c), -1).flatten(-2)
    else:
        x1, x2 = part.narrow(-1, 0, half), part.narrow(-1, half, half)
        turned = torch.cat((x1 * c - x2 * s, x1 * s + x2 * c), -1)
    turned = quant.cast(turned, x.dtype)
    if 2 * half == dim:
        return turned
    out = x.clone(memory_format=torch.contiguous_format)
    out.narrow(-1, 0, 2 * half).copy_(turned)
    return out

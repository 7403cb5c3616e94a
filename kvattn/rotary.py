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
    half = cos.shape[1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table[positions].to(wide).unsqueeze(-2) for table in (cos, sin))
    part = x[..., : 2 * half].to(wide)
    if interleaved:
        x1, x2 = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((x1 * c - x2 * s, x1 * s + x2 * c), -1).flatten(-2)
    else:
        x1, x2 = part[..., :half], part[..., half:]
        turned = torch.cat((x1 * c - x2 * s, x1 * s + x2 * c), -1)
    out = x.clone(memory_format=torch.contiguous_format)
    out[..., : 2 * half] = quant.cast(turned, x.dtype)
    return out

"""RMS norm over a head in plain torch: the formula of every backend (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6  # of calls that do not say


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dimension, in fp32 (fp64 for fp64 x).

    x (..., D); weight (D,), or one for each head, (heads, D). Squares are summed in fp64, where no
    order of summation shows, and what follows is rounded to fp32 step by step: the same bits
    wherever it is computed. The result is left wide, to be rounded by the caller.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean = x.double().square().mean(-1, keepdim=True).add_(eps).to(wide)
    factor = mean.double().rsqrt_().to(wide)
    return x.to(wide).mul(factor).mul_(weight.to(wide))

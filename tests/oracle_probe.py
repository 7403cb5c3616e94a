"""PROBE calls: with q = 0 and v[j] = j, `out` is the mean attended index, exp(lse) the count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Expected, oracle


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ramp(batch: int, cap: int, heads: int = 1, dim: int = 1) -> torch.Tensor:
    """v[b, j] = j."""
    return torch.arange(cap, dtype=torch.float32)[None, :, None, None].repeat(batch, 1, heads, dim)


def probe(batch: int, sq: int, cap: int, **kwargs: Any) -> Expected:
    call: dict[str, Any] = {
        "q": torch.zeros(batch, sq, 1, 4),
        "k_cache": torch.randn(batch, cap, 1, 4),
        "v_cache": ramp(batch, cap),
    }
    return oracle(**(call | kwargs))


def means(e: Expected) -> Any:
    return e.out[..., 0].ravel().tolist()


def counts(e: Expected) -> Any:
    return np.exp(e.lse).ravel().tolist()


def check(e: Expected, mean: Sequence[float], count: Sequence[float]) -> None:
    assert means(e) == pytest.approx(mean, abs=1e-6)
    assert counts(e) == pytest.approx(count, abs=1e-6)

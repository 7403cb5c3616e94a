"""Score and mask callables of every arity, with captured or auxiliary tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from random_tools import Draw

Mod = Callable[..., torch.Tensor]


def random_score_mod(d: Draw, heads: int, aux: list[torch.Tensor]) -> tuple[Mod, bool]:
    """A score_mod, and whether it reads `aux`: one number per (batch, head), one per query row."""
    slopes, near = 0.2 * d.tensor(heads), d.whole(-2, 3)

    def distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (q_idx - kv_idx)

    def every_third(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where((kv_idx + b) % 3 == 0, score * 0.5, score)

    def band(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(kv_idx <= q_idx + near, score, -math.inf)

    def constant(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.zeros_like(score) + 0.25 * h

    def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, info: Any, aux: Any) -> Any:
        return score + aux[0][b, h] + 0.1 * (info.seqlen_k - kv_idx)

    def global_row(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, info: Any, aux: Any) -> Any:
        return score * aux[1][info.offset_q + q_idx] + 0.01 * (info.offset_k + kv_idx)

    def three_more(
        score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, info: Any, aux: Any, scalars: Any = ()
    ) -> Any:
        return score + 0.3 * torch.cos(aux[0][b, h] * kv_idx) - 0.1 * (info.seqlen_q - q_idx)

    mod = d.pick((distance, every_third, band, constant, bias, global_row, three_more))
    return mod, mod in (bias, global_row, three_more)


def random_mask_mod(d: Draw, heads: int, aux: list[torch.Tensor]) -> tuple[Mod, bool]:
    """A mask_mod, and whether it reads `aux`."""
    wall, heads_off = d.whole(0, 10), d.tensor(heads) < 0

    def parity(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx + kv_idx) % 2 == 0

    def keys_only(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx >= wall

    def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx + b) % 3 != h % 3

    def some_heads(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return heads_off[h] | (kv_idx <= q_idx + wall)

    def not_last(b: Any, h: Any, q_idx: Any, kv_idx: Any, info: Any, aux: Any) -> Any:
        return kv_idx < info.seqlen_k - 1

    def positive_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any, info: Any, aux: Any) -> Any:
        return (aux[1][info.offset_q + q_idx] > 0) | (kv_idx % 2 == 0)

    def three_more(
        b: Any, h: Any, q_idx: Any, kv_idx: Any, info: Any, aux: Any, scalars: Any = ()
    ) -> Any:
        return kv_idx + info.seqlen_q - q_idx >= aux[0][b, h]

    options = (parity, keys_only, by_head, some_heads, not_last, positive_rows, three_more)
    mod = d.pick(options)
    return mod, mod in (positive_rows, three_more)

"""Score and mask mods of every kind, small enough to be evaluated at every (b, h, q, k)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvattn import mods
from kvattn.mods import interval

B, H, SQ, SK = 2, 4, 6, 21
OFFSET_Q, OFFSET_K = 3, 7
Mod = Callable[..., Any]

DEVICE = os.environ.get("KVATTN_TEST_DEVICE", "cpu")
torch.set_default_device(DEVICE)
PARENTS = (-1, 0, 1, 1, 3, 0)  # of the nodes of a small tree of drafted tokens
WINDOW = 3


def _ancestors() -> Tensor:
    seen = torch.eye(len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS[1:], start=1):
        seen[node] |= seen[parent]
    return seen


with torch.device(DEVICE):
    _draw = torch.Generator(DEVICE).manual_seed(0)
    TABLE = torch.randn(H, 2 * SK - 1, generator=_draw)
    BIAS = torch.randn(B, H, SQ, SK, generator=_draw)
    SLOPES = torch.exp2(-2.0 * torch.arange(1, H + 1))
    DOCUMENTS = torch.tensor([0] * 5 + [1] * 7 + [2] * 9)
    STARTS = torch.tensor([0, 5, 12, 21], dtype=torch.int32)
    PADDING = torch.rand(B, SK, generator=_draw) > 0.3
    PREFIX = torch.tensor([4, 9], dtype=torch.int32)
    TILES = torch.tensor([[0, 2], [1, 3], [0, 1]], dtype=torch.int32).expand(B, H, 3, 2)
    SPANS = torch.tensor([[[0, 3], [2, 9]], [[4, 5], [1, 6]]])
    DISTANCES = torch.randint(0, 5, (B, SQ, SK), generator=_draw, dtype=torch.int32)
    EDGES = torch.randint(0, 3, (B, SQ, SK, 2), generator=_draw)
    EDGE_BIAS = torch.randn(H, 2, 3, generator=_draw)
    OFFSET = torch.tensor(2)
    GAIN = torch.tensor([0.5])
    TREE = _ancestors()
    TREE_BITS = (TREE.long() << torch.arange(len(PARENTS))).sum(1)
    AUX = [torch.randn(B, H, generator=_draw), torch.randn(SQ + OFFSET_Q, generator=_draw)]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def all_of(*masks: Mod) -> Mod:
    def both(b: Any, h: Any, q: Any, k: Any) -> Any:
        keep = b.new_ones((), dtype=torch.bool)
        for mask in masks:
            keep = keep & mask(b, h, q, k)
        return keep

    return both


def any_of(*masks: Mod) -> Mod:
    def either(b: Any, h: Any, q: Any, k: Any) -> Any:
        keep = b.new_zeros((), dtype=torch.bool)
        for mask in masks:
            keep = keep | mask(b, h, q, k)
        return keep

    return either


def near(width: int) -> Mod:
    return lambda b, h, q, k: (q - k).abs() <= width


def per_batch(mask: Mod, size: int) -> Mod:
    return lambda b, h, q, k: (q // size == k // size) & mask(b, h, q % size, k % size)


def neighbourhood(canvas: tuple[int, ...], kernel: tuple[int, ...]) -> Mod:
    """NATTEN: the kernel is centred on the query, and pushed inwards at the edges."""

    def coordinates(i: Any) -> list[Any]:
        place = []
        for size in reversed(canvas):
            place.append(i % size)
            i = i // size
        return place[::-1]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        keep = k >= 0
        for n, width, x, y in zip(canvas, kernel, coordinates(q), coordinates(k), strict=True):
            centre = x.clamp(width // 2, n - 1 - width // 2)
            keep = keep & ((centre - y).abs() <= width // 2)
        return keep

    return mask


def _morton(code: Any) -> Any:
    code = code & 0x55555555
    code = (code | (code >> 1)) & 0x33333333
    return (code | (code >> 2)) & 0x0F0F0F0F


def morton_neighbourhood(b: Any, h: Any, q: Any, k: Any) -> Any:
    dx = (_morton(q) - _morton(k)).abs()
    return (dx <= 1) & ((_morton(q >> 1) - _morton(k >> 1)).abs() <= 1)


def tiled(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Tiles of 2 x 3 on a canvas of width 6, with a text of 3 tokens at the end."""
    x, y = (q // 6) % 2, (k // 6) % 2
    picture = (q < 18) & (k < 18) & (x >= y)
    return picture | ((q < 18) & (k >= 18) & (k < 21)) | (q >= 18)


def block_diffusion(b: Any, h: Any, q: Any, k: Any) -> Any:
    noised_q, noised_k = q < 4, k < 10
    block_q, block_k = (q % 4) // 2, (k % 10) // 2
    diagonal = (block_q == block_k) & (noised_q == noised_k)
    return diagonal | ((block_q > block_k) & noised_q & ~noised_k) | (~noised_q & ~noised_k)


def shared_prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
    own = DOCUMENTS[q + 6]
    first = own - own % 2
    prefix = (own != first) & (k >= STARTS[first]) & (k < STARTS[first + 1])
    return ((k >= STARTS[own]) & (q + 6 >= k)) | prefix


def tree(b: Any, h: Any, q: Any, k: Any) -> Any:
    node = (k - 10).clamp(min=0, max=len(PARENTS) - 1)
    return (k < 10) | ((k < 10 + len(PARENTS)) & TREE[q, node])


def tree_bits(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k < 10) | (((TREE_BITS[q] >> (k - 10)) & 1) == 1)


def documents_from_their_start(b: Any, h: Any, q: Any, k: Any) -> Any:
    same = DOCUMENTS[q] == DOCUMENTS[k]
    return same & (q - STARTS[DOCUMENTS[q]] >= k - STARTS[DOCUMENTS[k]])


def chosen_tiles(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (TILES[b, h, q // 2] == (k // 5).unsqueeze(-1)).any(dim=-1)


def seen_spans(b: Any, h: Any, q: Any, k: Any) -> Any:
    span = SPANS[b, q // 4]
    return (k >= span[..., 0]) & (k < span[..., 1])


def bottom_right(b: Any, h: Any, q: Any, k: Any, info: Any, aux: Any) -> Any:
    return k <= q + info.seqlen_k - info.seqlen_q


def positive_rows(b: Any, h: Any, q: Any, k: Any, info: Any, aux: Any, scalars: Any) -> Any:
    return (aux[1][info.offset_q + q] > 0) | ((k + info.offset_k) % 2 == 0)


MASKS: dict[str, Mod] = {
    "causal": causal,
    "sliding-window": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
    "keys-only": lambda b, h, q, k: k >= 3,
    "rows-only": lambda b, h, q, k: h > q,
    "everything": lambda b, h, q, k: True,
    "nothing": lambda b, h, q, k: torch.zeros_like(q, dtype=torch.bool),
    "prefix-lm": any_of(lambda b, h, q, k: k < 5, causal),
    "prefix-lm-per-sequence": lambda b, h, q, k: (k < PREFIX[b]) | (q >= k),
    "global-and-sliding": any_of(near(2), lambda b, h, q, k: (k < 2) | (q < 1)),
    "all-of-any-of": all_of(any_of(near(1), lambda b, h, q, k: k % 5 == 0), causal),
    "dilated": lambda b, h, q, k: ((q - k).abs() <= 8) & ((q - k) % 3 == 0),
    "dilated-by-two": lambda b, h, q, k: (q - k) % 2 == 1,
    "documents": lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k],
    "documents-from-their-start": documents_from_their_start,
    "padding": lambda b, h, q, k: PADDING[b, k],
    "padding-inverted": lambda b, h, q, k: (~PADDING)[b, k],
    "batched": per_batch(causal, 4),
    "natten-1d": neighbourhood((21,), (5,)),
    "natten-2d": neighbourhood((4, 6), (3, 3)),
    "natten-3d": neighbourhood((2, 3, 4), (1, 3, 3)),
    "natten-morton": morton_neighbourhood,
    "disc": lambda b, h, q, k: torch.sqrt(((q - k % 5) ** 2 + (k // 5) ** 2).float()) <= 3,
    "sliding-tiles": tiled,
    "block-diffusion": block_diffusion,
    "shared-prefix": shared_prefix,
    "tree": tree,
    "tree-bits": tree_bits,
    "chosen-tiles": chosen_tiles,
    "seen-spans": seen_spans,
    "heads-differ": lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, q <= k + b),
    "exact-quotients": lambda b, h, q, k: torch.floor(k.float() * 7 / 7) == k,
    "number-as-truth": lambda b, h, q, k: (q - k).clamp(min=0),
    "logical": lambda b, h, q, k: torch.logical_xor(q > 2, torch.logical_not(k > 7)),
    "bottom-right": bottom_right,
    "aux-scalars": positive_rows,
    "interval": interval(
        lambda b, h, q, k: k % 2 == 0,
        lo=lambda b, h, q: STARTS[DOCUMENTS[q]],
        hi=lambda b, h, q, info, aux: info.seqlen_k - q - h,
    ),
}


class Slope:
    """A callable object with a tensor and a number."""

    def __init__(self, slopes: Tensor, power: int) -> None:
        self.slopes, self.power = slopes, power

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score - self.slopes[h] * (q - k).abs() ** self.power

    def method(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + self.slopes[h]


def edge_bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    total: Any = 0.0
    for n in range(EDGES.shape[-1]):
        total = total + torch.where(k > n, EDGE_BIAS[:, n][h, EDGES[b, q, k, n]], 0.0)
    return score + total / torch.clamp(k, min=1)


def buckets(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Relative positions in buckets that grow logarithmically, as T5 has them."""
    distance = (k - q).abs()
    far = 4 + (torch.log(distance.float().clamp(min=1) / 4) / math.log(32 / 4) * 4).to(torch.int32)
    return score + TABLE[h, torch.where(distance < 4, distance, far.clamp(max=7))]


def in_place(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    score += SLOPES[h]
    score.mul_(2)
    return score


def from_aux(score: Any, b: Any, h: Any, q: Any, k: Any, info: Any, aux: Any) -> Any:
    return score + aux[0][b, h] * aux[1][info.offset_q + q] + 0.1 * (info.seqlen_k - k)


def many_arguments(
    score: Any, b: Any, h: Any, q: Any, k: Any, info: Any, aux: Any, scalars: Any = ()
) -> Any:
    return score - 0.1 * (info.seqlen_q - q) + 0.01 * (info.offset_k + k)


def shifted(table: Tensor, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + table[h, q - k + SK - 1]


SCORES: dict[str, Mod] = {
    "nothing": lambda s, b, h, q, k: s,
    "constant": lambda s, b, h, q, k: torch.zeros_like(s) + 0.25 * h,
    "number": lambda s, b, h, q, k: 1.5,
    "integers": lambda s, b, h, q, k: q - k,
    "alibi-computed": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / H)),
    "alibi-captured": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "alibi-object": Slope(SLOPES, 1),
    "alibi-squared": Slope(SLOPES, 2),
    "method": Slope(SLOPES, 2).method,
    "softcap": lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0),
    "softcap-int": lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
    "relative-table": lambda s, b, h, q, k: s + TABLE[h, q - k + SK - 1],
    "relative-table-partial": partial(shifted, TABLE),
    "relative-table-wrapped": lambda s, b, h, q, k: s + TABLE[h, q - k],
    "relative-table-transposed": lambda s, b, h, q, k: s + TABLE.t()[k - q, h],
    "relative-table-sliced": lambda s, b, h, q, k: s + TABLE[:, 1:30:2][h, k // 2 - q],
    "relative-buckets": buckets,
    "bias-4d": lambda s, b, h, q, k: s + BIAS[b, h, q, k],
    "bias-4d-two-steps": lambda s, b, h, q, k: s + BIAS[b][h, q, k] + BIAS[1, 2, q, k],
    "bias-expanded": lambda s, b, h, q, k: s + BIAS[:, :1].expand(B, H, SQ, SK)[b, h, q, k],
    "table-of-one-number": lambda s, b, h, q, k: s * GAIN + OFFSET,
    "table-bfloat16": lambda s, b, h, q, k: s + TABLE.bfloat16()[h, k] * 3 + SLOPES.half()[h] / 3,
    "table-float64": lambda s, b, h, q, k: s + TABLE.double()[h, k] * 0.1,
    "table-integers": lambda s, b, h, q, k: s + DISTANCES[b, q, k] + DOCUMENTS[k],
    "table-bytes": lambda s, b, h, q, k: s + DISTANCES.to(torch.int8)[b, q, k] * 100,
    "table-of-one-number-computed": lambda s, b, h, q, k: s + (GAIN * 2)[h * 0] + (GAIN + OFFSET),
    "table-computed": lambda s, b, h, q, k: s + (SLOPES * 2 + GAIN)[h] + (DOCUMENTS > 0)[k],
    "spatial-bias": lambda s, b, h, q, k: s + TABLE[h, DISTANCES[b, q, k]],
    "edge-bias": edge_bias,
    "sine-table": lambda s, b, h, q, k: s + torch.cos((q - k).abs() / 10.0) * SLOPES[h],
    "activation": lambda s, b, h, q, k: torch.log(F.gelu(s) + 1.0),
    "every-third": lambda s, b, h, q, k: torch.where((k + b) % 3 == 0, s * 0.5, s),
    "hidden": lambda s, b, h, q, k: torch.where(k <= q + 2, s, -math.inf),
    "hidden-by-tensor": lambda s, b, h, q, k: torch.where(k > q, torch.tensor(-math.inf), s),
    "hidden-by-fill": lambda s, b, h, q, k: s.masked_fill(k > q, float("-inf")),
    "own-table": lambda s, b, h, q, k: s + torch.tensor([1.0, 2.0, 3.0, 4.0], device=s.device)[h],
    "ranges": lambda s, b, h, q, k: s + torch.arange(3, 40, 2, device=s.device)[k % 19],
    "powers": lambda s, b, h, q, k: s + 2.0 ** (-q) + (k + 1) ** -0.5 + q**3 + 2 ** (k % 5),
    "in-place": in_place,
    "from-aux": from_aux,
    "many-arguments": many_arguments,
}

# Operations on one score, and on two integers.

UNARY: dict[str, Mod] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("exp", "exp2", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan"),
            *("tanh", "sigmoid", "erf", "rsqrt", "sqrt", "reciprocal", "neg", "abs", "sign"),
            *("floor", "ceil", "trunc", "round", "square", "frac", "sinh", "cosh"),
            *("isnan", "isinf", "isfinite", "logical_not"),
        )
    },
    **{
        name: getattr(F, name)
        for name in (
            *("relu", "relu6", "silu", "softplus", "elu", "selu", "celu", "leaky_relu", "mish"),
            *("hardtanh", "hardsigmoid", "hardswish", "logsigmoid", "softsign"),
        )
    },
    "square-root": lambda x: x**0.5,
    "one-over": lambda x: 1 / x,
    "cube": lambda x: x**3,
    "inverse-square": lambda x: x**-2,
    "three-halves": lambda x: x**1.5,
    "two-to-the": lambda x: 2.0**x,
    "three-to-the": lambda x: 3**x,
    "to-itself": lambda x: x**x,
    "minus-two-to-the": lambda x: (-2.0) ** x.clamp(-20, 20).round(),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp-one-side": lambda x: x.clamp(max=0.3).clamp(min=torch.tensor(-3.0)),
    "maximum": lambda x: torch.maximum(x, 2 * x - 1),
    "minimum": lambda x: torch.minimum(x, 2 * x - 1),
    "fmax": lambda x: torch.fmax(x, torch.tensor(0.1)),
    "fmin": lambda x: torch.fmin(x, torch.tensor(0.1)),
    "logaddexp": lambda x: torch.logaddexp(x, x * 0.5 + 40),
    "hypot": lambda x: torch.hypot(x, x + 1),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.25),
    "sub-alpha": lambda x: torch.sub(x, x.abs(), alpha=0.5),
    "divided-whole": lambda x: torch.div(x.clamp(-99, 99), 0.75, rounding_mode="trunc"),
    "nan-to-num": lambda x: x.nan_to_num(),
    "half": lambda x: (x.clamp(-99, 99).half() * 3 + 1).half() / 7,
    "bfloat16": lambda x: torch.exp(x.bfloat16() * 0.125).clamp(max=2) - 1,
    "double": lambda x: (x.double() / 3).abs().sqrt(),
    "int8": lambda x: x.nan_to_num().clamp(-100, 100).to(torch.int8) * 3,
    "bool": lambda x: x.bool() & ~(x > 1) | (x == 0.5),
}

INTEGER: dict[str, Mod] = {
    "floor-div": lambda x, y: x // y,
    "floor-mod": lambda x, y: x % y,
    "floor-div-constant": lambda x, y: x // 7 + x // -7,
    "floor-mod-constant": lambda x, y: x % 7 + x % -7 + x % 8,
    "constant-div": lambda x, y: 100 // y + 100 % y,
    "trunc-div": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "fmod": torch.fmod,
    "true-div": lambda x, y: x / y,
    "floats": lambda x, y: (x + 0.5) // (y * 0.25) + (x + 0.5) % (y * 0.25),
    "shifts": lambda x, y: (x << (y & 3)) + (x >> (y & 3)) + (x << 2) - (x >> 1),
    "wide-shifts": lambda x, y: (x.long() << (y.abs() * 9)) % 1001 + (x >> (y.abs() * 9)),
    "unsigned-bits": lambda x, y: (
        (x.abs() & 0xFFFFFFFF) % 1009 + (y < 2**40).int() + (x > -(2**35))
    ),
    "bits": lambda x, y: (x & y) + 2 * (x | y) + 3 * (x ^ y) + 5 * ~x,
    "powers": lambda x, y: x**2 + x**5 + (y % 3) ** (x % 4) + 2 ** (x % 9) + x ** (y % 4),
    "bounds": lambda x, y: torch.minimum(x, y) + 2 * torch.maximum(x, y) + x.clamp(-3, 4),
    "signs": lambda x, y: x.sign() + 2 * y.abs() - (-x),
    "comparisons": lambda x, y: (x < y).int() + 2 * (x >= 3) + 4 * (x != y) + 8 * (y == 2.5),
    "bytes": lambda x, y: (x.to(torch.int8) * 7 + y).to(torch.uint8),
    "long": lambda x, y: (x.long() * 2**33 + y) // 2**31,
    "rounding": lambda x, y: torch.round(x / 2) + torch.floor(x / 3) + (x / 3).to(torch.int32),
    "ordered": lambda x, y: torch.where(x > y, x, y * 1.5),
}


def lowered(mod: Mod, is_mask: bool = False, aux: Sequence[Tensor] | None = None) -> mods.Lowered:
    lower = mods.lower_mask_mod if is_mask else mods.lower_score_mod
    return lower(mod, aux, torch.empty(0).device)

"""Narrow caches: FP8, INT8 and MXFP8. Casting, scales and the layouts that scales come in.

MXFP8 (OCP microscaling): value = e4m3 * 2 ** (byte - 127), one byte per 32 elements.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NARROW = (*FP8, torch.int8)
GROUP = 32  # elements that share an MXFP8 scale
_TILE = 128  # rows of one interleaved scale block: 32 x 4, with 4 groups
LIMIT = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
_ROUNDS_BACK = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0, torch.int8: 127.5}


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts to a cache's dtype. Narrow dtypes saturate (infinity too); FP8 keeps NaN.

    INT8 rounds half to even and stores NaN as 0.
    """
    if x.dtype == dtype:
        return x
    if dtype not in NARROW:
        return x.to(dtype)
    limit = LIMIT[dtype]
    x = x.clamp(-limit, limit)
    return x.nan_to_num(0.0).round().to(dtype) if dtype == torch.int8 else x.to(dtype)


def token_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One scale per token and head, amax / largest finite value, so that nothing clips.

    x (..., heads, dim) -> fp32 (..., heads); 1.0 where all elements are 0. NaN is passed over,
    and infinity counts as the largest finite number.
    """
    return _scale(x.float().nan_to_num(0.0).abs().amax(-1), dtype)


def _scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    # By a tensor: a GPU would multiply by the inverse of a number, which rounds otherwise.
    scale = amax / torch.full_like(amax, LIMIT[dtype])
    return torch.where(scale > 0, scale, 1.0)


class ClippingWarning(UserWarning):
    """Numbers beyond the range of a narrow dtype were stored as its largest finite value."""


class ClipReport(NamedTuple):
    """What storing a tensor with scale 1.0 would cost.

    Attributes:
        elements: how many numbers were looked at.
        clipped: how many of them round to more than the dtype's largest finite value.
        amax: the largest magnitude; NaN is passed over.
        limit: the dtype's largest finite value.
    """

    elements: int
    clipped: int
    amax: float
    limit: float


def measure_scales(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ClipReport]:
    """Scales per kv head under which nothing clips, and a report of what scale 1.0 would clip.

    Args:
        x: (..., Hk, D) keys or values of any wide dtype, for example from a calibration run.
        dtype: float8_e4m3fn, float8_e5m2 or int8.

    Returns:
        fp32 (Hk,): amax / largest finite value, 1.0 for a head of zeros; pass it as `k_descale` or
        `v_descale`. And a `ClipReport`.

    Example:
        >>> keys = 2000 * torch.randn(100, 8, 128)
        >>> scales, report = quant.measure_scales(keys, torch.float8_e4m3fn)
        >>> stored = quant.quantise(keys, torch.float8_e4m3fn, scales)
    """
    size = x.float().nan_to_num(0.0).abs().amax(-1).reshape(-1, x.shape[-2])
    amax = size.amax(0) if size.numel() else size.new_zeros(x.shape[-2])
    largest = float(amax.max()) if amax.numel() else 0.0
    return _scale(amax, dtype), ClipReport(x.numel(), _beyond(x, dtype), largest, LIMIT[dtype])


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | float = 1.0) -> Tensor:
    """What an append stores: x / scale, saturated, in a narrow dtype.

    Args:
        x: (..., Hk, D) of any wide dtype.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        scale: a float or fp32 (..., Hk): one per kv head, or per token and head.

    Warns:
        ClippingWarning: if any number saturates (Python shows it once per place in the code).

    Example:
        >>> quant.quantise(torch.tensor([[1.0, -600.0]]), torch.float8_e4m3fn, 2.0).float()
        tensor([[   0.5000, -288.0000]])
    """
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide / (scale[..., None] if isinstance(scale, Tensor) else scale)
    warn_if_clipped(wide, dtype)
    return cast(wide, dtype)


def warn_if_clipped(x: Tensor, dtype: torch.dtype) -> None:
    """Says so once per place if a cast will clip; the text names no counts, so that it repeats."""
    if _beyond(x, dtype):
        text = f"numbers beyond {LIMIT[dtype]:g}, the largest {dtype}, were clipped: measure scales"
        warnings.warn(f"{text} with kvattn.quant.measure_scales", ClippingWarning, stacklevel=3)


def _beyond(x: Tensor, dtype: torch.dtype) -> int:
    """How many numbers lie farther out than rounding brings back."""
    return int((x.abs() > _ROUNDS_BACK[dtype]).sum())


def per_token(scale: Tensor, cache: Tensor) -> bool:
    """Whether a descale has the cache's shape without its last dimension."""
    return cache.dim() == 4 and scale.shape == cache.shape[:-1]


def mx_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises to MXFP8 along the last dimension (a multiple of 32).

    x (..., D) -> e4m3 (..., D), e8m0 (..., D / 32). The exponent is the smallest that does not
    clip: ceil(log2(amax / 448)), limited to +-127; byte 0 for a group of zeros. NaN is passed
    over, and infinity counts as the largest finite number.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    groups = wide.unflatten(-1, (-1, GROUP))
    amax = groups.nan_to_num(0.0).abs().amax(-1)
    exponent = torch.log2(amax.double() / LIMIT[torch.float8_e4m3fn]).ceil().clamp(-127, 127)
    exponent = torch.where(amax > 0, exponent, -127.0)
    scaled = groups.double() / torch.exp2(exponent)[..., None]
    data = cast(scaled.flatten(-2).float(), torch.float8_e4m3fn)
    return data, (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def mx_layout(scale: Tensor, data: Tensor, tokens: bool = False) -> str | None:
    """Names the layout of MXFP8 scales for their data, or None where none fits.

    ``plain``: data's shape with the last dimension / 32. ``tokens`` (values only): one scale per
    32 tokens, (N, rows / 32, heads, dim). ``interleaved``: (N, heads, RM, RK, 32, 4, 4) with rows
    padded to 128 and groups to 4, where RM or RK may be left out if 1.
    """
    *lead, dim = data.shape
    if dim % GROUP == 0 and tuple(scale.shape) == (*lead, dim // GROUP):
        return "plain"
    if data.dim() != 4:
        return None
    count, rows, heads, _ = data.shape
    if tokens and rows % GROUP == 0 and tuple(scale.shape) == (count, rows // GROUP, heads, dim):
        return "tokens"
    if dim % GROUP or scale.dim() < 5:
        return None
    blocks = (-(-rows // _TILE), -(-dim // GROUP // 4))
    middle = tuple(scale.shape[2:-3])
    shapes = {blocks, tuple(n for n in blocks if n != 1), *((n,) for n in blocks if 1 in blocks)}
    fits = scale.shape[:2] == (count, heads) and scale.shape[-3:] == (32, 4, 4)
    return (
        "interleaved"
        if fits and middle in shapes and _product(middle) == _product(blocks)
        else None
    )


def _product(numbers: tuple[int, ...]) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total


def mx_allowed(data: Tensor, tokens: bool = False) -> str:
    """The accepted shapes of scales for `data`, in words."""
    *lead, dim = data.shape
    words = [f"plain {(*lead, dim // GROUP)}"]
    if data.dim() == 4:
        rows, heads = data.shape[1], data.shape[2]
        blocks = (-(-rows // _TILE), -(-dim // GROUP // 4))
        words.append(f"interleaved {(data.shape[0], heads, *blocks, 32, 4, 4)}")
        if tokens:
            words.append(f"per 32 tokens {(data.shape[0], rows // GROUP, heads, dim)}")
    return ", ".join(words)


def mx_blocks(scale: Tensor, data: Tensor) -> Tensor:
    """Interleaved scale bytes as a seven-dimensional view (N, heads, RM, RK, 32, 4, 4)."""
    rows, dim = data.shape[1], data.shape[3]
    blocks = (-(-rows // _TILE), -(-dim // GROUP // 4))
    raw = scale.view(torch.uint8)
    if raw.dim() == 7:
        return raw
    return raw.unflatten(2, blocks) if raw.dim() == 6 else raw[:, :, None, None]


def mx_plain(scale: Tensor, data: Tensor, tokens: bool = False) -> Tensor:
    """Scale bytes in the shape of the data: (..., dim / 32), or (..., dim) if per 32 tokens."""
    layout = mx_layout(scale, data, tokens)
    raw = scale.view(torch.uint8)
    if layout == "plain":
        return raw
    if layout == "tokens":
        return raw.repeat_interleave(GROUP, 1)
    count, rows, heads, dim = data.shape
    ordered = mx_blocks(scale, data).permute(0, 2, 5, 4, 1, 3, 6)  # N, RM, 4, 32, heads, RK, 4
    return ordered.reshape(count, -1, heads, ordered.shape[5] * 4)[:, :rows, :, : dim // GROUP]


def mx_store(scale: Tensor, data: Tensor, block: Tensor, row: Tensor, new: Tensor) -> None:
    """Writes e8m0 scales of new tokens (tokens, heads, groups) at (block, row) in either layout."""
    raw, values = scale.view(torch.uint8), new.view(torch.uint8)
    if mx_layout(scale, data) == "plain":
        raw[block, row] = values
        return
    heads, groups = values.shape[1:]
    m, h = row[:, None, None], torch.arange(heads, device=row.device)[None, :, None]
    g = torch.arange(groups, device=row.device)[None, None, :]
    slots = (block[:, None, None], h, m // _TILE, g // 4, m % 32, m % _TILE // 32, g % 4)
    mx_blocks(scale, data)[slots] = values


def mx_dequantise(data: Tensor, scale_bytes: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 data times 2 ** (byte - 127), in `dtype`; byte 255 gives NaN."""
    factor = torch.exp2(scale_bytes.to(torch.float64) - 127)
    factor = torch.where(scale_bytes == 255, torch.nan, factor)
    if factor.shape[-1] != data.shape[-1]:
        factor = factor.repeat_interleave(GROUP, -1)
    return (data.to(torch.float64) * factor).to(dtype)

"""What the memory gives when it is only read: the ceiling of decode."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 8192  # int32 numbers a program


@triton.jit
def _read(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + at))
    if total == 0x7FFF1234:  # never, but the compiler cannot know
        tl.store(out, total)


def read(x: torch.Tensor, out: torch.Tensor) -> None:
    """Reads x, int32 and a multiple of 32 KiB long, and writes next to nothing."""
    _read[(x.numel() // _BLOCK,)](x, out, BLOCK=_BLOCK, num_warps=8)

"""Whether an output is right: compared with the reference before anything is timed.

The reference accumulates in fp32, in fp64 for fp32 queries. The error allowed is derived: twice
that of the same computation done plainly in the query's dtype, plus the rounding of the result. Of
big cells, some sequences and blocks of rows are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvattn.backends import reference
from kvattn.bench.data import Data, tree_mask
from kvattn.bench.peers.base import Call
from kvattn.request import Request
from kvattn.rotary import rotate

_SEQUENCES = 32  # looked at, at most
_ROWS = 64  # rows of a block; the first, the middle and the last block are looked at
_P_ROUNDING_FP8 = 2**-4  # kernels may round probabilities to FP8 beside an FP8 cache


@dataclass(frozen=True)
class Verdict:
    """How far an output is from the truth.

    Attributes:
        error: largest absolute error; infinite if something is not finite or of a wrong shape.
        allowed: what it may be.
        problem: what is wrong beside the numbers, "" if nothing is.
    """

    error: float
    allowed: float
    problem: str = ""

    @property
    def right(self) -> bool:
        return not self.problem and self.error <= self.allowed


@dataclass(frozen=True)
class _Block:
    """Some rows of one sequence, and the keys that they can see."""

    rows: slice  # of the packed queries
    first: int  # row of the sequence at which the block begins
    keys: slice  # of the packed keys


class Truth:
    """What the first layer of a cell must give."""

    def __init__(self, data: Data) -> None:
        self.data = data

    @cached_property
    def blocks(self) -> list[_Block]:
        return list(self._blocks())

    def _blocks(self) -> Iterator[_Block]:
        work = self.data.work
        row, key = 0, 0
        chosen = _spread(work.batch, _SEQUENCES) | {work.keys.index(max(work.keys))}
        for b, (q, k) in enumerate(zip(work.queries, work.keys, strict=True)):
            starts = [0] if q <= 2 * _ROWS else [0, (q - _ROWS) // 2, q - _ROWS]
            for start in starts if b in chosen else []:
                end = min(q, start + (q if q <= 2 * _ROWS else _ROWS))
                seen = k - q + end if work.causal and not work.tree else k
                yield _Block(slice(row + start, row + end), start, slice(key, key + seen))
            row, key = row + q, key + k

    @cached_property
    def expected(self) -> tuple[list[Tensor], float]:
        """Rows of every block, and the error that they may have."""
        wide = torch.float64 if self.data.dtype == torch.float32 else torch.float32
        exact = [self._compute(block, wide) for block in self.blocks]
        plain = [self._compute(block, self.data.dtype) for block in self.blocks]
        rounding = torch.finfo(self.data.dtype).eps
        rounding *= 8 if wide == torch.float64 else 1  # fp32 sums in another order
        if self.data.work.kv_dtype == "fp8":
            rounding += _P_ROUNDING_FP8
        pairs = zip(plain, exact, strict=True)
        error = max(float((a - b).abs().max()) for a, b in pairs)
        size = max(float(b.abs().max()) for b in exact)
        return exact, 2 * error + rounding * size

    def _compute(self, block: _Block, accum: torch.dtype) -> Tensor:
        data, work = self.data, self.data.work
        k, v = (x[0][block.keys][None] for x in data.packed)
        q = data.q[block.rows]
        if work.append:
            q = rotate(q, *data.tables, data.positions[block.rows], interleaved=False)
        options: dict[str, Any] = {"causal": work.causal, "softmax_scale": work.model.scale}
        if work.reach:
            options["window_size"] = (work.reach - 1, 0)
        if data.ancestors is not None:
            first = block.keys.stop - block.keys.start - len(data.ancestors)
            options["mask_mod"] = tree_mask(data.ancestors, data.ints([first]))
        qv = None if data.qv is None else data.qv[block.rows][None].float()
        request = Request.of(
            q=q[None].float(), k_cache=k, v_cache=v, qv=qv, sinks=data.sinks, **options
        )
        wide = torch.promote_types(accum, torch.float32)
        out = torch.zeros(request.out_shape, dtype=wide, device=data.device)
        result = reference.run(replace(request, out=out), accum=accum)
        assert result is not None
        return out[0]

    @property
    def share(self) -> float:
        """The part of the rows that is looked at."""
        return sum(b.rows.stop - b.rows.start for b in self.blocks) / self.data.work.rows

    def judge(self, call: Call) -> Verdict:
        """Runs the call on the first layer and compares what it gives and what it appends."""
        data, work = self.data, self.data.work
        if work.append:
            data.forget_new(call.layout)
        with call.within():
            out = call.run(0)
        shape = (work.rows, work.model.heads, work.model.dim_v)
        exact, allowed = self.expected
        if out.numel() != torch.Size(shape).numel():
            return Verdict(float("inf"), allowed, f"an output of shape {tuple(out.shape)}")
        rows = out.reshape(shape)
        if not bool(rows.isfinite().all()):
            return Verdict(float("inf"), allowed, "numbers that are not finite")
        error = max(
            float((rows[block.rows].to(wanted.dtype) - wanted).abs().max())
            for block, wanted in zip(self.blocks, exact, strict=True)
        )
        return Verdict(error, allowed, self._append_problem(call) if work.append else "")

    def _append_problem(self, call: Call) -> str:
        """Whether the cache holds the new tokens, rotated keys within a rounding."""
        close = True
        pairs = zip(self.data.new_stored(call.layout), self.data.new_wanted(), strict=True)
        for stored, wanted in pairs:
            wide = wanted.float()
            rounding = 2 * torch.finfo(wanted.dtype).eps * float(wide.abs().max())
            close &= bool(((stored.float() - wide).abs() <= rounding).all())
        return "" if close else "new keys or values are not in the cache"


def _spread(count: int, most: int) -> set[int]:
    """Up to `most` of `count` numbers, evenly, the first and the last included."""
    if count <= most:
        return set(range(count))
    return {round(i * (count - 1) / (most - 1)) for i in range(most)}

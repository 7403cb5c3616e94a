"""Hopper's decode kernel behind a common prefix that another kernel has read, without a GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import BF16
from conftest import DEVICE
from mock_gluon_decode import mocked
from torch import Tensor

from kvattn.backends import hopper, prefix
from kvattn.backends.triton_decode import Common
from kvattn.request import Request
from kvattn.testing import Case, expect, make_inputs

if DEVICE != "cpu":
    pytest.skip("on a GPU test_prefix.py runs both kernels", allow_module_level=True)

STEP = Case(batch=3, lengths=(300, 257, 450), capacity=464, page_size=16, new=1, dim=64, heads=4,
            kv_heads=2, causal=True, dtype=BF16, common=256)  # fmt: skip
PLAIN = replace(STEP, new=None)
CASES = {
    "append": STEP,
    "nothing behind": replace(PLAIN, lengths=(256, 256, 300)),
    "longer than some": replace(PLAIN, lengths=(300, 100, 131)),
    "inactive": replace(PLAIN, lengths=(-1, 0, 300)),
    "q 4": replace(STEP, seqlen_q=4, new=4, kv_heads=1),
    "softcap, sinks": replace(STEP, softcap=5.0, sinks=BF16),
    "head dim 96": replace(STEP, dim=96),
    "head dim 256, q 4": replace(STEP, dim=256, seqlen_q=4, new=4, lengths=(300, 257, 290)),
    "one cache row": replace(PLAIN, page_size=None, rows=2, batch_idx=(1, 1, 1)),
}


@pytest.fixture(scope="module")
def launch() -> Iterator[ModuleType]:
    with mocked() as module:
        yield module


def left(r: Request, shares: int, common: int) -> Common:
    """What the kernel for the prefix leaves: sums of every row over shares of its keys."""
    q, heads = r.lead, r.kv_heads
    tokens, each = q.shape[1], q.shape[1] * r.heads // heads
    dim = r.pool.shape[-1]
    part = torch.zeros(heads, shares, r.batch, each, 1 << (dim - 1).bit_length())
    stats = torch.zeros(*part.shape[:-1], 2)
    stats[..., 0] = -math.inf
    for b, span in enumerate(r.spans):
        until = min(common, span.old, span.keys - tokens + 1) if span.active else 0
        until = max(until, 0) // 128 * 128
        rows = torch.arange(until)
        where: tuple[Any, Tensor] = (1, rows)
        if r.page_table is not None:
            where = r.page_table[span.row, rows // 16].long(), rows % 16
        assert r.k_cache is not None
        keys, values = r.k_cache[where].float(), r.pool[where].float()
        for h in range(heads):
            own = q[b].float().unflatten(1, (heads, -1))[:, h].flatten(0, 1)
            s = own @ keys[:, h].T * r.softmax_scale
            s = r.softcap * (s / r.softcap).tanh() if r.softcap else s
            s = s / math.log(2)
            for i, piece in enumerate(rows.chunk(shares) if until else ()):
                top = s[:, piece].amax(1)
                p = torch.exp2(s[:, piece] - top[:, None])
                part[h, i, b, :, :dim] = p @ values[piece, h]
                stats[h, i, b] = torch.stack([top, p.sum(1)], 1)
    return Common(part, stats, common, shares)


@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case: Case, shares: int, launch: ModuleType) -> None:
    random.seed(0)
    inputs: dict[str, Any] = make_inputs(case)
    wanted, r = expect(inputs), Request.of(**inputs, return_lse=True, backend="hopper")
    out, lse = r.outputs()
    launch.decode(r, out, lse, common=left(r, shares, case.common))
    wanted.check(out, lse, inputs)


def test_sequences_that_begin_in_one_program(launch: ModuleType) -> None:
    """One that is whole in a program is not counted with the next, whose end may be done first."""
    case = replace(STEP, batch=4, lengths=(300, 290, 257, 450), seqlen_q=4, new=4, kv_heads=1)
    inputs: dict[str, Any] = make_inputs(case)
    wanted, r = expect(inputs), Request.of(**inputs, return_lse=True, backend="hopper")
    tiling = replace(launch.tiling(r), each=1, parts=3)
    for seed in range(8):
        random.seed(seed)
        out, lse = (x.fill_(math.nan) for x in r.outputs())
        launch.decode(r, out, lse, tiling, common=left(r, 2, case.common))
        wanted.check(out, lse, inputs)


@pytest.mark.parametrize(("keys", "least"), [(256, 128), (256, 256), (256, 384), (0, 128)])
@pytest.mark.parametrize("name", ["append", "inactive", "q 4"])
def test_only_the_device_knows_how_long_it_is(
    name: str, keys: int, least: int, launch: ModuleType
) -> None:
    """Of a prefix that is shorter than what pays, nothing is left."""
    inputs: dict[str, Any] = make_inputs(CASES[name])
    inputs["common_prefix_len"] = torch.tensor(keys, dtype=torch.int32)
    wanted, r = expect(inputs), Request.of(**inputs, return_lse=True, backend="hopper")
    common = left(r, 2, keys)
    if keys < least:
        assert common.part is not None and common.stats is not None
        common.part.fill_(math.nan), common.stats.fill_(math.nan)
    out, lse = r.outputs()
    length = inputs["common_prefix_len"]
    launch.decode(r, out, lse, common=common._replace(keys=least, length=length))
    wanted.check(out, lse, inputs)


def test_it_is_said_who_reads_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(Request.of(**make_inputs(STEP), backend="hopper").facts, device="cuda")
    assert "every sequence reads the common prefix of 256 keys itself" in hopper.kernel(facts)
    length = make_inputs(STEP) | {"common_prefix_len": torch.tensor(256, dtype=torch.int32)}
    unknown = replace(Request.of(**length, backend="hopper").facts, device="cuda")
    assert "itself: sharing it saves at most 0.4 MB" in hopper.kernel(unknown)
    monkeypatch.setattr(prefix, "LEAST", 1 << 18)
    monkeypatch.setattr(prefix, "EACH", 0)
    assert "the common prefix of 256 keys is read once" in hopper.kernel(facts)
    assert "read once, by a kernel before, if it has 256 keys or more" in hopper.kernel(unknown)
    prefill = Request.of(**make_inputs(replace(STEP, dim=80)), backend="hopper").facts
    assert "itself: a tile of the prefill kernel" in hopper.kernel(replace(prefill, device="cuda"))

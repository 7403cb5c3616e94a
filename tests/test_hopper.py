"""The Hopper backend, without a GPU too: its kernels' text runs on a mock of Gluon there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import BF16, CASES, E4M3, F16, F32, identity
from conftest import DEVICE
from mock_gluon import mocked
from mock_gluon_memory import Pointer, Value
from torch import Tensor

from kvattn.backends import hopper, reference
from kvattn.plan import Plan
from kvattn.request import Facts, Request
from kvattn.testing import Case, expect, make_inputs

FRESH = ("kvattn.kernels.hopper", "kvattn.backends.hopper_launch")


def request(inputs: dict[str, Any]) -> Request:
    """As the public functions make it of a case's inputs."""
    names = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens"}
    if "v_cache" not in inputs:
        inputs = {names.get(name, name): value for name, value in inputs.items()}
    return Request.of(**inputs, return_lse=True, backend="hopper")


def ready(r: Request, q: Tensor) -> Tensor:
    """The launch that normalises and rotates queries, which is plain Triton, in plain torch."""
    out = torch.zeros(q.shape, dtype=q.dtype)
    for b, span in enumerate(r.spans):
        rows = reference.ready_query(r, b, span)
        assert rows is not None
        if r.cu_seqlens_q is None:
            out[b, : span.q_len] = rows
        else:
            out[span.q_start : span.q_start + span.q_len] = rows
    return out


@pytest.fixture(scope="module")
def launch() -> Iterator[ModuleType | None]:
    """`hopper_launch` over the mock; None on a GPU."""
    if DEVICE != "cpu":
        yield None
        return
    with mocked(FRESH):
        from kvattn.backends import hopper_launch

        hopper_launch.ready = ready
        yield hopper_launch


def run(launch: ModuleType | None, inputs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """(out, lse), or None where the backend refuses in a sentence."""
    random.seed(0)
    r = request(inputs)
    reason = hopper.call_refuses(r.facts) if launch else hopper.refuses(r.facts)
    if reason is not None:
        assert len(reason.split()) > 3
        return None
    if launch is None:
        return hopper.run(r, Plan("hopper", ""))
    if r.k is not None:
        reference.append(r)
    out, lse = r.outputs()
    launch.attend(r, out, lse)
    return out, lse


def halved(case: Case) -> Case:
    """The same case in 16 bits, and with the head dims of a kernel."""
    narrow = case.dtype not in (F16, BF16)
    return replace(case, dtype=BF16) if narrow and case.dtype == F32 else case


# In 16 bits the suite's cases and these: more than one row tile, tiles of keys, sequence.
MORE = [
    Case("causal", seqlen_q=300, lengths=300, dim=64, causal=True),
    Case("full-ragged-tail", seqlen_q=130, lengths=(257, 5), dim=64),
    Case("d128", batch=1, seqlen_q=140, lengths=400, dim=128, causal=True, heads=2, kv_heads=1),
    Case("packed-group", batch=1, seqlen_q=40, lengths=300, heads=8, kv_heads=1, dim=64,
         causal=True),
    Case("group-of-3", batch=1, seqlen_q=140, lengths=150, heads=3, kv_heads=1, causal=True),
    Case("window", batch=1, seqlen_q=400, lengths=400, window=(70, 0), causal=True, heads=1,
         kv_heads=1, dim=64),
    Case("two-sided", batch=1, seqlen_q=300, lengths=500, window=(140, 60), heads=1, kv_heads=1),
    Case("chunk", batch=1, seqlen_q=300, lengths=420, chunk=100, causal=True, heads=1, kv_heads=1),
    Case("leftpad", seqlen_q=130, lengths=(300, 200), leftpad=(150, 7), causal=True),
    Case("ragged-both", varlen=True, batch=3, seqlen_q=(140, 0, 200), lengths=(140, 0, 260),
         packed=(140, 0, 260), causal=True, pass_lengths="none", spare_q=3),
    Case("page16", seqlen_q=140, lengths=(270, 33), page_size=16, causal=True, dim=64),
    Case("prompt-and-single-tokens", varlen=True, batch=5, seqlen_q=(140, 1, 1, 1, 1), dim=128,
         lengths=(140, 300, 260, 17, 128), page_size=16, causal=True, heads=8, kv_heads=2),
    Case("prompts-among-single-tokens", varlen=True, batch=7, seqlen_q=(1, 200, 1, 0, 70, 3, 1),
         dim=64, lengths=(400, 200, 7, 9, 300, 3, 130), page_size=8, causal=True, heads=4,
         kv_heads=2),
    Case("used-rows", varlen=True, seqlen_q=(140, 100), lengths=(200, 190), dim=128, causal=True,
         used_q=(140, 30)),
    Case("page16-d128", batch=1, seqlen_q=70, lengths=200, page_size=16, causal=True, dim=128,
         heads=4, kv_heads=2),
    Case("page32-d256", batch=1, seqlen_q=70, lengths=150, page_size=32, causal=True, dim=256,
         heads=2, kv_heads=2),
    Case("page8-window", batch=1, seqlen_q=70, lengths=200, page_size=8, causal=True, dim=128,
         window=(90, 0), heads=2, kv_heads=2),
    Case("page24", seqlen_q=140, lengths=(270, 33), page_size=24, causal=True, dim=64),
    Case("page48-dim96", batch=1, seqlen_q=70, lengths=200, page_size=48, causal=True, dim=96,
         heads=2, kv_heads=1),
    Case("page192", batch=1, seqlen_q=70, lengths=500, page_size=192, causal=True, dim=128,
         heads=2, kv_heads=1),
    Case("page128", seqlen_q=140, lengths=(270, 33), page_size=128, causal=True),
    Case("page256-leftpad", seqlen_q=140, lengths=(400, 33), page_size=256, causal=True,
         leftpad=(130, 0)),
    Case("d256", batch=1, seqlen_q=80, lengths=150, dim=256, causal=True, heads=1, kv_heads=1),
    Case("d192-dv128", batch=1, seqlen_q=80, lengths=150, dim=192, dim_v=128, causal=True, heads=1,
         kv_heads=1),
    Case("sinks", seqlen_q=130, lengths=(200, 0), sinks=F32, causal=True),
    Case("slopes-softcap", seqlen_q=70, lengths=150, alibi="batch", softcap=3.0, causal=True),
    Case("negative-scale", seqlen_q=70, lengths=150, scale=-0.2, causal=True),
    Case("more-queries-than-keys", seqlen_q=300, lengths=(140, 0), causal=True),
]  # fmt: skip


@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_cases(case: Case, launch: ModuleType | None) -> None:
    inputs = make_inputs(halved(case), device=DEVICE)
    wanted = expect(inputs)
    found = run(launch, inputs)
    assert found is not None
    wanted.check(*found, inputs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_scores_that_grow_from_tile_to_tile(
    dtype: torch.dtype, causal: bool, launch: ModuleType | None
) -> None:
    """References of the exponentials have to move again and again: tiles go from last to first."""
    case = Case(seqlen_q=150, lengths=600, dim=64, dtype=dtype, causal=causal)
    inputs = make_inputs(case, device=DEVICE)
    growing = torch.linspace(40, 1, inputs["k_cache"].shape[1], device=DEVICE)
    inputs["k_cache"].mul_(growing[None, :, None, None])
    wanted = expect(inputs)
    found = run(launch, inputs)
    assert found is not None
    wanted.check(*found, inputs)


@pytest.mark.parametrize("case", [case for case in CASES if "T74" not in case.name], ids=str)
def test_case(case: Case, launch: ModuleType | None) -> None:
    inputs = make_inputs(halved(case), device=DEVICE)
    wanted = expect(inputs)
    found = run(launch, inputs)
    if found is not None:
        wanted.check(*found, inputs)


def facts(**changes: Any) -> Facts:
    """Of a prefill call on a GPU that the backend takes, changed."""
    case = Case(seqlen_q=256, lengths=256, dim=64, dtype=BF16, causal=True)
    return replace(request(make_inputs(replace(case, **changes))).facts, device="cuda")


def test_takes_prefill() -> None:
    assert hopper.call_refuses(facts()) is None
    assert "prefill" in hopper.kernel(facts())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": F32}, "float32"),
    ({"cache_dtype": E4M3}, "float8"),
    ({"descale": "heads"}, "descales"),
    ({"qv": True}, "qv"),
    ({"rel_bias": 8}, "relative bias"),
    ({"score_mod": identity}, "mods"),
    ({"dim": 320}, "320"),
    ({"dim_v": 128}, "wider"),
    ({"dim": 59}, "multiples of 8"),
    ({"page_size": 12}, "12"),
    ({"page_size": 4}, "4"),
    ({"options": {"batch_invariant": True}}, "batch_invariant"),
]


@pytest.mark.parametrize(("changes", "word"), REFUSED, ids=[w for _, w in REFUSED])
def test_refusals_say_why(changes: dict[str, Any], word: str) -> None:
    reason = hopper.call_refuses(facts(**changes))
    assert reason is not None
    assert word in reason
    assert len(reason.split()) > 3


def unnamed(asked: Facts) -> Facts:
    """The same call without a word on the backend."""
    options = tuple((k, None if k == "backend" else v) for k, v in asked.options)
    return replace(asked, options=options)


def test_few_rows_are_decode() -> None:
    asked = facts(seqlen_q=1)
    assert hopper.call_refuses(asked) is None
    assert "decode" in hopper.kernel(asked)
    assert hopper.call_refuses(unnamed(asked)) is None


@pytest.mark.parametrize("page", [None, 64])
def test_few_rows_over_a_long_cache_are_left_to_triton(page: int | None) -> None:
    """One launch has a program for each row tile, and does not split the keys."""
    long = {"capacity": 8192, "page_size": page}
    assert "splits the keys" in str(hopper.call_refuses(unnamed(facts(**long))))
    assert hopper.call_refuses(unnamed(facts())) is None
    wide = facts(**long, heads=64, kv_heads=64, seqlen_q=100)
    assert hopper.call_refuses(unnamed(wide)) is None


def test_narrow_windows_of_small_heads_are_left_to_triton() -> None:
    small = {"dim": 64, "causal": True}
    assert "window of 128 keys" in str(
        hopper.call_refuses(unnamed(facts(**small, window=(127, 0))))
    )
    assert hopper.call_refuses(facts(**small, window=(127, 0))) is None, "it can, if it is named"
    assert hopper.call_refuses(unnamed(facts(**small, window=(512, 0)))) is None


def test_other_machines_are_refused() -> None:
    on_cpu = replace(facts(), device="cpu")
    assert "on cpu" in str(hopper.refuses(on_cpu))
    if DEVICE == "cpu" and not torch.cuda.is_available():
        assert hopper.refuses(facts()) == "no CUDA device is there"


def test_memory_off_the_16_byte_grid(launch: ModuleType | None) -> None:
    """Of q: copied. Of a cache: left to the general kernel, which facts cannot foresee."""
    case = Case(seqlen_q=70, lengths=80, dim=64, dtype=BF16, causal=True)
    inputs = make_inputs(case, device=DEVICE)
    q = torch.empty(inputs["q"].numel() + 1, dtype=BF16, device=DEVICE)[1:]
    inputs["q"] = q.view(inputs["q"].shape).copy_(inputs["q"])
    assert inputs["q"].data_ptr() % 16 == 2
    wanted = expect(inputs)
    found = run(launch, inputs)
    assert found is not None
    wanted.check(*found, inputs)


@pytest.mark.parametrize("tokens", [(300, 1, 0, 90, 1, 1, 33), (1,) * 70, (500, 200)], ids=len)
def test_ragged_work_is_dealt_out_once(tokens: tuple[int, ...], launch: ModuleType | None) -> None:
    """All heads of all row tiles, prompts by length, single tokens spread among them."""
    if launch is None:
        pytest.skip("reads what the mock computes")
    from kvattn.kernels.hopper import schedule

    heads, pack = 2, 4
    lengths = tuple(n + 7 * (i % 3) for i, n in enumerate(tokens))
    case = Case(varlen=True, batch=len(tokens), seqlen_q=tokens, lengths=lengths, page_size=16,
                causal=True, dim=64, heads=heads * pack, kv_heads=heads, dtype=BF16)  # fmt: skip
    r = request(make_inputs(case))
    assert r.q is not None
    prefill = launch.Prefill(r, r.q, launch.tiling(r))
    prefill.ordered = True
    found = prefill.order(r, r.q)
    at = dict.fromkeys(schedule.Index._fields)
    at.update(LENGTHS=r.cache_seqlens, Q_EDGES=r.cu_seqlens_q, PAGES=r.page_table, ORDER=found)
    index = schedule.Index(*(None if x is None else Pointer(x) for x in at.values()))
    n = schedule.Sizes(*map(Value, (*prefill.numbers[:12],)))
    bounds = schedule.Bounds(*map(Value, (0, 0, 0)))
    pieces = int(schedule.all_pieces(index, n))
    dealt = [
        schedule.work_of(Value(t), index, n, bounds, prefill.variant)[0] for t in range(pieces)
    ]
    rows = 64 * prefill.variant.GROUPS
    wanted = {
        (b, head * pack, row)
        for b, count in enumerate(tokens)
        for head in range(heads)
        for row in range(0, count * pack, rows)
    }
    assert all(int(w.live) for w in dealt)
    assert sorted(wanted) == sorted((int(w.b), int(w.head), int(w.row)) for w in dealt)
    many = [int(w.b) for w in dealt if tokens[int(w.b)] * pack > 64]
    assert [lengths[b] for b in many] == sorted((lengths[b] for b in many), reverse=True)


def test_launches_are_prepared_once(launch: ModuleType | None) -> None:
    if launch is None:
        pytest.skip("counts launches of the mock")
    r = request(make_inputs(Case(seqlen_q=70, lengths=80, dim=64, dtype=BF16)))
    other = replace(r, q=r.q.clone() if r.q is not None else None, softmax_scale=0.3)
    other.__dict__["facts"] = r.facts
    results = []
    for each in (r, other):
        out, lse = each.outputs()
        launch.attend(each, out, lse)
        plain = reference.run(each)
        assert plain is not None
        wanted, _ = plain
        assert torch.allclose(out.float(), wanted.float(), atol=2e-2)
        results.append(out)
    (kept,) = r.facts.__dict__["hopper launches"].values()
    assert all(box.base is None for box in kept.boxes)  # no tensor is kept alive
    assert not torch.equal(*results)

"""Decode on Hopper, without a GPU too: the kernel's text runs on a mock of Gluon there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from cases import BF16, F16, F32
from conftest import DEVICE
from mock_gluon_decode import mocked

from kvattn import flash_attn_with_kvcache
from kvattn.backends import hopper, hopper_decode
from kvattn.request import Facts, Request
from kvattn.testing import Case, check_case, expect, make_inputs

FEW: dict[str, Any] = {"heads": 4, "kv_heads": 1, "causal": True, "dim": 64, "dtype": BF16}
NEW: dict[str, Any] = {"new": 1, "rotary": 32}


def hint(tokens: int) -> dict[str, Any]:
    return {"max_seqlen_q": tokens}


def case(name: str, **changes: Any) -> Case:
    return Case(name, **{**FEW, **changes})


CASES = [
    case("pages-of-16", lengths=(130, 5), page_size=16),
    case("pages-of-8", lengths=(130, 5), page_size=8, **NEW),
    case("pages-of-24", lengths=(130, 70), page_size=24, **NEW),
    case("pages-of-64-inactive-row", batch=3, lengths=(200, -1, 65), page_size=64),
    case("pages-of-256", batch=3, lengths=(200, 0, 63), page_size=256, **NEW),
    case("pages-of-192", lengths=(400, 63), page_size=192, **NEW),
    case("dense-d128", lengths=(200, 130), dim=128, capacity=210, new=1, rotary=128,
         rotary_interleaved=False),
    case("one-sequence", batch=1, lengths=900, page_size=16, **NEW),
    case("unlike-lengths", batch=4, lengths=(900, 3, 0, 70), page_size=32, **NEW),
    case("window-sinks", lengths=(200, 300), page_size=16, window=(70, 0), sinks=F32),
    case("two-sided-window", lengths=(200, 30), seqlen_q=2, window=(70, 1), causal=False),
    case("softcap-fp16", lengths=(300, 30), page_size=16, softcap=5.0, dtype=F16),
    case("negative-scale", lengths=(100, 30), scale=-0.3, page_size=16),
    case("8-rows", batch=3, lengths=(200, 0, 62), seqlen_q=4, new=4, rotary=64, page_size=16,
         kv_heads=2),
    case("16-rows", batch=3, lengths=(200, 0, 62), seqlen_q=4, new=4, rotary=64, page_size=16),
    case("32-rows", batch=2, lengths=(200, 62), seqlen_q=8, new=8, rotary=64, page_size=16),
    case("64-rows", batch=2, lengths=(200, 62), heads=8, seqlen_q=8, new=8, rotary=64,
         page_size=16),
    case("64-rows-window", lengths=(200, 300), heads=8, seqlen_q=5, window=(70, 0), page_size=32,
         dim=128, **NEW),
    case("group-of-7", lengths=(200, 62), heads=7, seqlen_q=3, page_size=16, **NEW),
    case("full-queries", lengths=(100, 2), seqlen_q=3, causal=False, page_size=16),
    case("d128-dv64", lengths=(100, 30), dim=128, dim_v=64, page_size=32, **NEW),
    case("d64-dv128", lengths=(100, 30), dim_v=128, page_size=32, **NEW),
    case("d96-pages-of-16", lengths=(130, 5), dim=96, page_size=16, **NEW),
    case("d96-pages-of-24-norms", lengths=(130, 70), dim=96, page_size=24, norm="both", **NEW),
    case("d96-pages-of-8-window", lengths=(200, 300), dim=96, page_size=8, window=(70, 0),
         sinks=F32, dtype=F16),
    case("d96-dense-one", batch=1, lengths=700, dim=96, new=1, rotary=96,
         rotary_interleaved=False),
    case("d96-64-rows", lengths=(200, 62), dim=96, heads=8, seqlen_q=8, new=8, rotary=64,
         page_size=32),
    case("d192-pages-of-16", lengths=(130, 5), dim=192, page_size=16, new=1, rotary=192),
    case("d192-dense-softcap-fp16", lengths=(200, 130), dim=192, softcap=5.0, dtype=F16, **NEW),
    case("d192-full-cache", batch=1, lengths=130, capacity=130, dim=192),
    case("d192-16-rows-norms", lengths=(100, 30), dim=192, seqlen_q=3, new=3, norm="both",
         page_size=8),
    case("d192-dv128", lengths=(100, 30), dim=192, dim_v=128, page_size=32, **NEW),
    case("d256-pages-of-64", batch=3, lengths=(200, -1, 65), dim=256, page_size=64, new=1,
         rotary=256, rotary_interleaved=False),
    case("d256-dense-window-sinks", lengths=(200, 30), seqlen_q=2, dim=256, window=(70, 1),
         causal=False, sinks=F32),
    case("d256-32-rows", lengths=(200, 62), dim=256, seqlen_q=8, new=8, rotary=64, page_size=16),
    case("d256-64-rows-window", lengths=(200, 300), dim=256, heads=8, seqlen_q=5, window=(70, 0),
         page_size=24, norm="both", **NEW),
    case("cache-rows", lengths=(100, 30), rows=4, batch_idx=(3, 1), **NEW),
    case("cast-new-tokens", lengths=(100, 30), new=1, new_dtype=F32, page_size=16),
    case("heads-first", lengths=(100, 30), page_size=16, layout="heads_first", **NEW),
    case("norms", lengths=(130, 5), page_size=16, norm="both", norm_dtype=BF16, **NEW),
    case("norms-without-rotary", lengths=(70, 0), dim=128, seqlen_q=4, new=4, norm="both"),
    case("norm-of-q", lengths=(70, 3), seqlen_q=2, norm="q", page_size=16),
    case("norm-of-k", lengths=(70, 3), norm="k", options={"norm_eps": 1.0}, page_size=16, **NEW),
    case("norms-cast-new-tokens", lengths=(100, 30), new_dtype=F32, norm="both", **NEW),
    case("inactive-row-appends-nothing", batch=3, lengths=(130, -1, 5), capacity=200, **NEW),
    case("inactive-row-64-rows", batch=3, lengths=(130, -1, 5), capacity=200, heads=8, seqlen_q=8,
         new=8, rotary=64),
    case("ragged", batch=4, lengths=(130, 5, 64, 300), seqlen_q=(1, 1, 1, 1), page_size=16,
         options=hint(1)),
    case("ragged-drafts", batch=5, lengths=(130, 5, 64, 0, 300), seqlen_q=(3, 1, 2, 4, 0), dim=128,
         page_size=16, spare_q=3, options=hint(4)),
    case("ragged-two-heads", batch=3, lengths=(130, 90, 300), seqlen_q=(2, 7, 5), page_size=16,
         kv_heads=2, options=hint(7)),
    case("ragged-without-tokens", batch=6, lengths=(9, 200, 64, 70, -1, 5),
         seqlen_q=(0, 3, 0, 0, 2, 0), options=hint(3)),
    case("ragged-group-of-7", batch=3, lengths=(200, 62, 1), heads=7, seqlen_q=(1, 2, 1),
         page_size=32, rotary=64, sinks=F32, options=hint(2)),
    case("ragged-window", batch=3, lengths=(300, 62, 200), seqlen_q=(5, 1, 9), window=(70, 0),
         page_size=16, softcap=5.0, options=hint(9)),
    case("ragged-one-sequence", batch=1, lengths=(700,), seqlen_q=(3,), page_size=16,
         norm="q", options=hint(3)),
    case("ragged-32-rows", batch=2, lengths=(200, 62), seqlen_q=(8, 5), page_size=16,
         options=hint(8)),
    case("ragged-64-rows", batch=3, lengths=(200, 62, 90), heads=8, seqlen_q=(8, 0, 3),
         page_size=16, options=hint(8)),
    case("ragged-full", batch=2, lengths=(100, 40), seqlen_q=(3, 2), causal=False, options=hint(3)),
    case("more-new-than-rows", lengths=(200, 62), new=4, page_size=16, causal=False),
]  # fmt: skip


@pytest.fixture(scope="module")
def launch() -> Iterator[ModuleType | None]:
    """`hopper_decode_launch` over the mock; None on a GPU."""
    if DEVICE != "cpu":
        yield None
        return
    with mocked() as module:
        yield module


def request(inputs: dict[str, Any], **more: Any) -> Request:
    return Request.of(**inputs, return_lse=True, backend="hopper", **more)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, launch: ModuleType | None) -> None:
    if launch is None:
        check_case(case, backend="hopper", device=DEVICE)
        return
    random.seed(0)
    inputs = make_inputs(case)
    r = request(inputs)
    assert hopper_decode.refuses(r.facts) is None
    if r.k is not None and not launch._appends(r):
        pytest.skip("the append kernel needs a GPU")
    wanted = expect(inputs)
    out, lse = launch.run(r)
    wanted.check(out, lse, inputs)


@pytest.mark.parametrize("said", [1, 2, 4])
@pytest.mark.parametrize(
    "case", [case for case in CASES if str(case).startswith("ragged")], ids=str
)
def test_ragged_sequences_longer_than_was_said(
    case: Case, said: int, launch: ModuleType | None
) -> None:
    """A hint that nobody checks on a GPU hides no rows."""
    inputs: dict[str, Any] = make_inputs(case, device=DEVICE)
    wanted = expect(inputs)
    if launch is None:
        inputs["max_seqlen_q"] = said
        out, lse = flash_attn_with_kvcache(**inputs, backend="hopper", return_softmax_lse=True)
    else:
        random.seed(0)
        out, lse = launch.run(replace(request(inputs), max_seqlen_q=said))
    wanted.check(out, lse, inputs)


@pytest.mark.parametrize(
    "changes",
    [{"keys": 32}, {"stages": 2}, {"each": 1, "parts": 1}, {"each": 2, "parts": 5}],
    ids=str,
)
def test_other_tiles(changes: dict[str, int], launch: ModuleType | None) -> None:
    """What other batches and lengths would choose."""
    if launch is None:
        pytest.skip("on a GPU the choice is the launch code's own")
    inputs = make_inputs(case("", batch=3, lengths=(300, -1, 140), page_size=16, **NEW))
    wanted, r = expect(inputs), request(inputs)
    out, lse = r.outputs()
    launch.decode(r, out, lse, replace(launch.tiling(r), **changes))
    wanted.check(out, lse, inputs)


def facts(**changes: Any) -> Facts:
    """Of a decode call on a GPU that the backend takes, changed."""
    r = request(make_inputs(case("", lengths=256, page_size=16, **changes)))
    return replace(r.facts, device="cuda")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"leftpad": (3, 4)}, "left padding"),
    ({"alibi": "heads"}, "slopes"),
    ({"chunk": 100}, "chunks"),
    ({"dim": 80}, "80"),
    ({"dim": 160}, "160"),
    ({"dim": 96, "dim_v": 80}, "80"),
    ({"seqlen_q": 17}, "68"),
    ({"page_size": 4}, "4"),
    ({"page_size": 20}, "20"),
    ({"new": 1, "by_slot": True}, "slot mapping"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[w for _, w in REFUSED])
def test_refusals_say_why(changes: dict[str, Any], words: str) -> None:
    r = request(make_inputs(case("", **{"lengths": 256, "page_size": 16, **changes})))
    reason = hopper_decode.refuses(r.facts)
    assert reason is not None
    assert words in reason
    assert len(reason.split()) > 3


def test_takes_decode() -> None:
    asked = facts(seqlen_q=1)
    assert hopper.call_refuses(asked) is None
    assert "decode kernel" in hopper.kernel(asked)


def unnamed(asked: Facts) -> Facts:
    """The same call without a word on the backend."""
    options = tuple((k, None if k == "backend" else v) for k, v in asked.options)
    return replace(asked, options=options)


def test_leaves_what_is_as_fast_elsewhere() -> None:
    asked = facts(seqlen_q=9)
    assert hopper.call_refuses(asked) is None
    assert "36 query rows" in str(hopper.call_refuses(unnamed(asked)))
    assert hopper.call_refuses(unnamed(facts(seqlen_q=8))) is None
    assert hopper.call_refuses(unnamed(facts(batch=500, kv_heads=4))) is None


@pytest.mark.parametrize("dim", [96, 192, 256])
def test_what_was_not_measured_is_taken_if_named(dim: int) -> None:
    asked = facts(dim=dim)
    assert hopper_decode.refuses(asked) is None
    assert f"head dims {dim} and {dim} was not measured" in str(hopper.call_refuses(unnamed(asked)))
    assert hopper.call_refuses(unnamed(facts(dim=dim, seqlen_q=64))) is None  # prefill

"""What other libraries would do with a call: the facts, and how surely they hold."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import pytest
import torch

import kvattn
from kvattn.peers import ALTERS, PEERS, REFUSES, UNKNOWN, Call, rules, verdicts
from kvattn.peers.call import TRAITS

NAMES = {peer.name for peer in PEERS}
BASE = {"cache_seqlens": UNKNOWN}


def found(given: dict[str, Any], certain: bool = True, **known: Any) -> set[tuple[str, str]]:
    """(peer, effect) of the verdicts on a call, without those on a call of its lengths alone."""
    plain = {(v.peer, v.why) for v in verdicts(Call(BASE))}
    return {
        (v.peer, v.effect)
        for v in verdicts(Call(BASE | given, **known))
        if v.certain is certain and (v.peer, v.why) not in plain
    }


def refused(*names: str) -> set[tuple[str, str]]:
    return {(name, REFUSES) for name in names}


def altered(*names: str) -> set[tuple[str, str]]:
    return {(name, ALTERS) for name in names}


GIVEN = UNKNOWN
FA4 = ("sglang-fa4", "sglang-fa4-sm120")
TORCH = ("sdpa", "flex")

# The support matrix, cell by cell: what is certain of a call that has just these arguments more.
CERTAIN: list[tuple[dict[str, Any], set[tuple[str, str]]]] = [
    ({}, set()),
    ({"k": GIVEN, "v": GIVEN}, refused("fa4", *FA4, "flashinfer", *TORCH)),
    ({"v": GIVEN},
     refused("fa4", *FA4, "flashinfer", *TORCH) | altered("fa2", "fa3", "sglang-fa3")),
    ({"rotary_cos": GIVEN, "rotary_sin": GIVEN}, refused("fa4", *FA4, "flashinfer", *TORCH)),
    ({"rotary_cos": GIVEN, "rotary_seqlens": GIVEN},
     refused("fa2", "fa4", *FA4, "flashinfer", *TORCH)),
    ({"cache_batch_idx": GIVEN}, refused("fa4", *FA4, "flashinfer", *TORCH)),
    ({"cache_batch_idx": GIVEN, "page_table": GIVEN},
     refused("fa2", "fa4", *FA4, "flashinfer", *TORCH)),
    ({"cache_leftpad": GIVEN}, refused("fa4", *FA4, "flashinfer", *TORCH)),
    ({"cache_leftpad": GIVEN, "page_table": GIVEN},
     refused("fa2", "fa4", *FA4, "flashinfer", *TORCH)),
    ({"page_table": GIVEN}, refused("flashinfer", *TORCH)),
    ({"page_table": GIVEN, "cache_seqlens": 7},
     refused("sglang-fa3", *FA4, "flashinfer", *TORCH)),
    ({"cu_seqlens_q": GIVEN, "max_seqlen_q": GIVEN}, refused("fa2", *TORCH)),
    ({"cu_seqlens_q": GIVEN}, refused("fa2", "fa3", "sglang-fa3", *TORCH)),
    ({"k": GIVEN, "v": GIVEN, "cu_seqlens_k_new": GIVEN},
     refused("fa2", "fa4", *FA4, "flashinfer", *TORCH) | altered(*FA4)),
    ({"causal": True}, altered("sdpa")),
    ({"window_size": (-1, -1)}, set()),
    ({"window_size": (127, 0)}, refused("flashinfer", *TORCH)),
    ({"window_size": (127, 0), "causal": True}, refused(*TORCH) | altered("sdpa")),
    ({"window_size": (127, -1)}, refused(*TORCH) | altered("fa4", *FA4)),
    ({"window_size": (127, -1), "causal": True}, refused(*TORCH) | altered("sdpa")),
    ({"window_size": (-1, 0)}, refused("flashinfer", *TORCH) | altered("fa4", *FA4)),
    ({"window_size": (None, None)}, set()),
    ({"attention_chunk": 0}, set()),
    ({"attention_chunk": 64}, refused("fa2", "fa4", "flashinfer", *TORCH) | altered(*FA4)),
    ({"softcap": 0.0}, set()),
    ({"softcap": 30.0}, refused(*TORCH)),
    ({"softcap": 30.0, "score_mod": GIVEN},
     refused("fa2", "fa3", "fa4", *FA4, "flashinfer", *TORCH) | altered("sglang-fa3")),
    ({"alibi_slopes": GIVEN}, refused("fa3", "sglang-fa3", "fa4", *TORCH)
     | altered("flashinfer", *FA4)),
    ({"alibi_slopes": GIVEN, "causal": True, "return_softmax_lse": True},
     refused("fa3", "sglang-fa3", "fa4", *TORCH) | altered("fa2", "flashinfer", *FA4, "sdpa")),
    ({"sinks": GIVEN}, refused("fa2", "fa3", *TORCH)),
    ({"score_mod": GIVEN}, refused("fa2", "fa3", "flashinfer", "sdpa") | altered("sglang-fa3")),
    ({"mask_mod": GIVEN}, refused("fa2", "fa3", "sglang-fa3", "flashinfer", "sdpa")
     | altered(*FA4)),
    ({"mask_mod": GIVEN, "causal": True},
     refused("fa2", "fa3", "sglang-fa3", "flashinfer", "sdpa") | altered(*FA4, "fa4", "sdpa")),
    ({"block_sparse_tensors": GIVEN}, refused("fa2", "fa3", "sglang-fa3", "flashinfer", "sdpa")
     | altered(*FA4)),
    ({"gather_kv_indices": GIVEN}, refused(*NAMES - {"fa4"})),
    ({"rel_bias": GIVEN}, refused("fa2", "fa3", "sglang-fa3", "fa4", "flashinfer", *TORCH)),
    ({"sfq": GIVEN, "sfk": GIVEN}, refused(*NAMES - {"sglang-fa4"})),
    ({"qv": GIVEN}, refused("fa2", "flashinfer", *TORCH)),
    ({"qv": GIVEN, "softcap": 5.0}, refused("fa2", "fa4", "flashinfer", *TORCH)),
    ({"only_qv": True}, refused("fa2", "fa3", "fa4", "flashinfer", *TORCH) | altered(*FA4)),
    ({"q_descale": GIVEN}, refused("fa2", "fa4", *TORCH)),
    ({"slot_mapping": GIVEN, "k": GIVEN, "v": GIVEN}, refused(*NAMES)),
    ({"seqused_q": GIVEN}, refused("fa2", "flashinfer", *TORCH)),
    ({"out": GIVEN}, refused("fa2", "fa3", "fa4", *TORCH)),
    ({"return_softmax_lse": True}, refused("sdpa") | altered("flashinfer")),
    ({"dropout_p": 0.1}, refused("fa2", "fa4", "sdpa")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"), CERTAIN, ids=["+".join(given) or "plain" for given, _ in CERTAIN]
)
def test_what_is_certain(given: dict[str, Any], expected: set[tuple[str, str]]) -> None:
    assert found(given) == expected


@pytest.mark.parametrize(
    ("given", "known", "expected"),
    [
        ({"page_table": GIVEN}, {}, refused("fa2", "fa4", "sglang-fa4")),
        ({"page_table": GIVEN}, {"shapes": {"v_cache": (9, 256, 2, 8)}},
         refused("fa4", "sglang-fa4")),
        ({"page_table": GIVEN}, {"capability": (9, 0)}, refused("fa2")),
        ({"window_size": GIVEN}, {}, altered("fa4", *FA4) | refused("flashinfer", *TORCH)),
        ({"window_size": (GIVEN, 0), "causal": True}, {}, refused(*TORCH)),
        ({"causal": GIVEN}, {}, altered("sdpa")),
        ({"softcap": GIVEN}, {}, refused(*TORCH)),
        ({"attention_chunk": GIVEN}, {},
         refused("fa2", "fa4", "flashinfer", *TORCH) | altered(*FA4)),
        ({"q_descale": GIVEN}, {}, altered("fa3", "sglang-fa3") | refused(*FA4, "flashinfer")),
        ({"k": GIVEN, "v": GIVEN, "window_size": (9, 0)}, {}, altered("fa2", "fa3", "sglang-fa3")),
        ({"num_splits": GIVEN}, {}, refused("fa4", "sglang-fa4")),
        ({"return_softmax_lse": True}, {}, altered("fa2")),
        ({"out": GIVEN}, {}, altered("sglang-fa3", "sglang-fa4")),
    ],
)  # fmt: skip
def test_what_depends_on_more(given: Any, known: Any, expected: set[tuple[str, str]]) -> None:
    assert found(given, certain=False, **known) == expected


GPU = ("fa2", "fa3", "fa4", "sglang-fa3", *FA4, "flashinfer")


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, set()),
        ({"device": "cuda"}, set()),
        ({"device": "cpu"}, refused(*GPU)),
        ({"device": "cuda", "capability": (9, 0)}, refused("sglang-fa4-sm120")),
        ({"device": "cuda", "capability": (12, 0)}, refused("fa3", "sglang-fa3")),
        ({"device": "cuda", "capability": (7, 5)},
         refused("fa3", "fa4", "sglang-fa3", *FA4)),
        ({"dtypes": {"q": "bfloat16", "v_cache": "bfloat16"}}, set()),
        ({"dtypes": {"q": "float32", "v_cache": "float32"}}, refused(*GPU)),
        ({"dtypes": {"q": "float8_e4m3fn", "v_cache": "float8_e4m3fn"}}, refused("fa2")),
        ({"dtypes": {"q": "bfloat16", "v_cache": "float8_e4m3fn"}},
         refused("fa2", "fa3", "fa4", "sglang-fa3", "sglang-fa4", *TORCH)),
        ({"shapes": {"q": (1, 1, 8, 512), "k_cache": (1, 9, 8, 512), "v_cache": (1, 9, 8, 512)}},
         refused("fa2", "fa3", "fa4", "sglang-fa3", "sglang-fa4")),
        ({"shapes": {"k_cache": (1, 9, 8, 192), "v_cache": (1, 9, 8, 128)}}, refused("fa2")),
        ({"shapes": {"q": (1, 1, 8, 60), "k_cache": (1, 9, 8, 60), "v_cache": (1, 9, 8, 60)}},
         refused("fa3", "fa4", "sglang-fa3", *FA4)),
    ],
)  # fmt: skip
def test_machines_dtypes_and_sizes(known: Any, expected: set[tuple[str, str]]) -> None:
    """Where they are not known they are no obstacle."""
    assert found({}, **known) == expected


def test_every_rule_can_hold() -> None:
    """Of peers that exist, for traits that exist, and for a call that some test above makes."""
    assert {name for rule in rules.RULES for name in rule.traits} <= set(TRAITS)
    assert {name for rule in rules.RULES for name in rule.peers} == NAMES
    for rule in rules.RULES:
        assert rule.effect in (REFUSES, ALTERS) and rule.arguments and rule.why[0].islower()
    parameters = {"dropout_p", "gather_kv_indices", "seqused_q", "cu_seqlens_k"}
    assert {name for rule in rules.RULES for name in rule.arguments} <= (
        set(kvattn.explain.__signature__.parameters) | parameters  # type: ignore[attr-defined]
    )


def test_a_verdict_names_the_arguments_that_are_given() -> None:
    call = Call({"k": GIVEN, "v": GIVEN, "rotary_cos": GIVEN, "rotary_sin": None})
    about = {v.arguments for v in verdicts(call) if v.peer == "sglang-fa4"}
    assert about == {("k", "v"), ("rotary_cos",)}


def test_none_is_not_given() -> None:
    nothing = dict.fromkeys(("k", "v", "page_table", "window_size", "softcap", "causal"))
    assert found(nothing) == set()


# A live call -----------------------------------------------------------------------------------


def explained(device: str = "cpu", dtype: Any = torch.bfloat16, **more: Any) -> Any:
    q = torch.empty(2, 1, 4, 64, device="meta", dtype=dtype)
    cache = torch.empty(2, 512, 2, 64, device="meta", dtype=dtype)
    return kvattn.explain(q, cache, cache, device=device, **more)


def reasons(found: Any) -> dict[str, list[str]]:
    return {answer.peer.name: [v.why for v in answer.verdicts] for answer in found.peers}


def test_explain_says_why_no_other_library() -> None:
    new = torch.empty(2, 1, 2, 64, device="meta", dtype=torch.bfloat16)
    lengths = torch.empty(2, device="meta", dtype=torch.int32)
    why = reasons(explained("cuda", k=new, v=new, cache_seqlens=lengths, causal=True))
    assert set(why) == NAMES
    assert why["fa2"] == why["fa3"] == why["sglang-fa3"] == []
    assert why["sglang-fa4"] == [
        "raises NotImplementedError: it does not update the cache in place"
    ]
    assert any("no cache" in reason for reason in why["sdpa"])
    on_cpu = reasons(explained("cpu"))
    assert all("runs on GPUs only" in on_cpu[name] for name in GPU)
    assert on_cpu["sdpa"] == on_cpu["flex"] == []


def test_causal_alone_is_no_window() -> None:
    """Internally it is a right window of 0."""
    assert not any("window" in why for why in reasons(explained(causal=True))["flex"])
    assert any("window" in why for why in reasons(explained(window_size=(9, 0)))["flex"])


def test_explain_names_what_is_installed() -> None:
    answers = {answer.peer.name: answer for answer in explained().peers}
    assert answers["sdpa"].version == metadata.version("torch")
    for name, package in (("fa2", "flash-attn"), ("fa4", "flash-attn-4")):
        try:
            expected = metadata.version(package)
        except metadata.PackageNotFoundError:
            expected = None
        assert answers[name].version == expected


def test_explain_prints_peers_and_gives_them_as_data() -> None:
    found = explained("cuda", sinks=torch.empty(4, device="meta"))
    lines = str(found).split("\n")
    assert lines[0] == f"backend {found.plan.backend}: {found.plan.kernel}"
    for name, said in (("fa3", "has no attention sinks"), ("fa4", "could take the call")):
        answer = next(answer for answer in found.peers if answer.peer.name == name)
        state = f"{answer.version} installed" if answer.version else "not installed"
        assert f"  {answer.peer.title} ({state}): {said}" in lines
    assert "FlashAttention" not in found.summary() and str(found).startswith(found.summary())
    read = json.loads(json.dumps(found.to_dict()))["peers"]
    assert [peer["name"] for peer in read] == [peer.name for peer in PEERS]
    assert read[1]["verdicts"] == [
        {
            "peer": "fa3",
            "effect": "refuses",
            "arguments": ["sinks"],
            "why": "has no attention sinks",
            "certain": True,
        }
    ]

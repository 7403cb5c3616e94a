"""Every argument counts: none is ignored, odd but valid ones work, hints are only hints."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import (
    BF16,
    E4M3,
    F16,
    F32,
    attend,
    every_third,
    identity,
    ints,
    ragged_mod,
    slopes_as_mod,
)
from conftest import DEVICE

import kvattn
from kvattn import BlockSparse
from kvattn.testing import Case, Inputs, clone_inputs, make_inputs

HINTS = {
    *("max_seqlen_q", "max_seqlen_k", "min_seqlen_k", "scheduler_metadata", "num_splits"),
    *(
        "pack_gqa",
        "sm_margin",
        "common_prefix_len",
        "rel_bias_prep_cache",
        "batch_invariant",
        "deterministic",
        "seqlen_k_per_split",
        "disable_scheduler_metadata",
        "backend",
    ),
}
SPELLINGS = {"return_softmax_lse", "return_lse", "return_attn_probs", "out"}  # what is handed back

PLAIN = Case(seqlen_q=2, lengths=(5, 3), capacity=8)
APPEND = Case(seqlen_q=2, lengths=(5, 3), capacity=8, new=2, causal=True)
ROTARY = Case(seqlen_q=2, lengths=(5, 3), capacity=8, new=2, rotary=8, causal=True)
NORMED = Case(seqlen_q=2, lengths=(5, 3), capacity=8, new=2, norm="both", causal=True)
LATENT = Case(seqlen_q=2, lengths=(5, 3), capacity=8, qv=True)
MX = Case(lengths=(5, 3), dtype=E4M3, page_size=32, sfq="plain", sfk="plain", sfv="plain")
RAGGED = Case(seqlen_q=(2, 3), lengths=(5, 3), capacity=8, new=(1, 3), causal=True)
PACKED = Case(seqlen_q=(2, 3), lengths=(5, 3), packed=(6, 4), varlen=True, causal=True)


def plus_one(name: str) -> Callable[[Inputs], Inputs]:
    return lambda i: {name: (i[name].float() + 1).to(i[name].dtype)}


def swapped(name: str) -> Callable[[Inputs], Inputs]:
    return lambda i: {name: i[name].flip(0)}


def value(**values: Any) -> Callable[[Inputs], Inputs]:
    return lambda i: values


def halved(name: str) -> Callable[[Inputs], Inputs]:
    return lambda i: {name: (i[name].view(torch.uint8) - 1).view(i[name].dtype)}


def blocks() -> Inputs:
    one, none = ints(1).view(1, 1, 1), ints(0).view(1, 1, 1, 1)
    return {"block_sparse_tensors": BlockSparse(one, none, block_size=(4, 2))}


# For every argument a call, and the same call with that argument changed.
CHANGES: dict[str, tuple[Case, Callable[[Inputs], Inputs]]] = {
    "q": (PLAIN, plus_one("q")),
    "k_cache": (PLAIN, swapped("k_cache")),
    "v_cache": (PLAIN, plus_one("v_cache")),
    "k": (APPEND, plus_one("k")),
    "v": (APPEND, plus_one("v")),
    "qv": (LATENT, plus_one("qv")),
    "rotary_cos": (ROTARY, plus_one("rotary_cos")),
    "rotary_sin": (ROTARY, plus_one("rotary_sin")),
    "cache_seqlens": (PLAIN, lambda i: {"cache_seqlens": ints(4, 3)}),
    "cache_batch_idx": (PLAIN, lambda i: {"cache_batch_idx": ints(0, 0), "cache_seqlens": ints(3,
        3)}),
    "cache_leftpad": (PLAIN, lambda i: {"cache_leftpad": ints(1, 0)}),
    "page_table": (Case(lengths=(3, 3), page_size=4), swapped("page_table")),
    "block_table": (Case(lengths=(3, 3), page_size=4),
                    lambda i: {"block_table": i["page_table"].flip(0), "page_table": None}),
    "cu_seqlens_q": (RAGGED, lambda i: {"cu_seqlens_q": ints(0, 3, 5)}),
    "cu_seqlens_k_new": (RAGGED, lambda i: {"cu_seqlens_k_new": ints(0, 2, 4)}),
    "rotary_seqlens": (ROTARY, lambda i: {"rotary_seqlens": ints(0, 1)}),
    "q_descale": (PLAIN, value(q_descale=2.0)),
    "k_descale": (PLAIN, value(k_descale=2.0)),
    "v_descale": (PLAIN, value(v_descale=2.0)),
    "softmax_scale": (PLAIN, value(softmax_scale=0.5)),
    "causal": (PLAIN, value(causal=True)),
    "window_size": (PLAIN, value(window_size=(1, 0))),
    "attention_chunk": (PLAIN, value(attention_chunk=2)),
    "softcap": (PLAIN, value(softcap=0.1)),
    "rotary_interleaved": (ROTARY, value(rotary_interleaved=False)),
    "q_norm_weight": (NORMED, plus_one("q_norm_weight")),
    "k_norm_weight": (NORMED, plus_one("k_norm_weight")),
    "norm_eps": (NORMED, value(norm_eps=0.5)),
    "sinks": (PLAIN, lambda i: {"sinks": torch.zeros(4, device=DEVICE)}),
    "s_aux": (PLAIN, lambda i: {"s_aux": torch.zeros(4, device=DEVICE)}),
    "learnable_sink": (PLAIN, lambda i: {"learnable_sink": torch.zeros(4, device=DEVICE)}),
    "alibi_slopes": (PLAIN, lambda i: {"alibi_slopes": torch.ones(4, device=DEVICE)}),
    "score_mod": (PLAIN, value(score_mod=slopes_as_mod)),
    "mask_mod": (PLAIN, value(mask_mod=every_third)),
    "aux_tensors": (Case(seqlen_q=2, lengths=(5, 3), score_mod=lambda s, b, h, i, j, info,
        aux: s * aux[0],
                         options={"aux_tensors": [torch.ones((), device=DEVICE)]}),
                    lambda i: {"aux_tensors": [torch.zeros((), device=DEVICE)]}),
    "block_sparse_tensors": (PLAIN, lambda i: blocks()),
    "rel_bias": (PLAIN, lambda i: {"rel_bias": torch.randn(2, 2, 4, 3, device=DEVICE)}),
    "sfq": (MX, halved("sfq")),
    "sfk": (MX, halved("sfk")),
    "sfv": (MX, halved("sfv")),
    "only_qv": (LATENT, value(only_qv=True)),
    "slot_mapping": (Case(lengths=(5, 3), new=1, page_size=4, by_slot=True),
        swapped("slot_mapping")),
}  # fmt: skip
VARLEN: dict[str, tuple[Case, Callable[[Inputs], Inputs]]] = {
    "k": (PACKED, swapped("k")),
    "v": (PACKED, plus_one("v")),
    "cu_seqlens_k": (PACKED, lambda i: {"cu_seqlens_k": ints(0, 5, 9)}),
    "seqused_q": (PACKED, lambda i: {"seqused_q": ints(1, 3)}),
    "seqused_k": (PACKED, lambda i: {"seqused_k": ints(4, 3)}),
    "page_table": (Case(lengths=(3, 3), page_size=4, varlen=True), swapped("page_table")),
    "block_table": (Case(lengths=(3, 3), page_size=4, varlen=True),
                    lambda i: {"block_table": i["page_table"].flip(0), "page_table": None}),
    "gather_kv_indices": (PACKED, lambda i: {"gather_kv_indices": torch.zeros(5, 1,
        dtype=torch.int32,
                                                                              device=DEVICE)}),
}  # fmt: skip


def finished(function: Any, inputs: Inputs) -> list[torch.Tensor]:
    """Everything that a call gives back or leaves behind, as bytes."""
    out, lse = function(**inputs, return_softmax_lse=True)
    left = [inputs[name] for name in ("k_cache", "v_cache") if inputs.get(name) is not None]
    return [x.contiguous().view(torch.uint8).clone() for x in (out, lse, *left)]


def assert_counts(function: Any, case: Case, change: Callable[[Inputs], Inputs]) -> None:
    first, second = make_inputs(case, device=DEVICE), make_inputs(case, device=DEVICE)
    second |= change(second)
    pairs = zip(finished(function, first), finished(function, second), strict=True)
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", CHANGES)
def test_t73_no_argument_is_ignored(name: str, backend: str) -> None:
    case, change = CHANGES[name]
    assert_counts(lambda **kw: attend(backend, **_only(kw)), case, change)


def _only(inputs: Inputs) -> Inputs:
    return {name: x for name, x in inputs.items() if name != "return_softmax_lse"}


@pytest.mark.parametrize("name", VARLEN)
def test_t73_no_argument_of_the_varlen_call_is_ignored(name: str) -> None:
    case, change = VARLEN[name]
    assert_counts(kvattn.flash_attn_varlen_func, case, change)


def test_t73_every_argument_is_tried_or_a_hint() -> None:
    names = set(inspect.signature(kvattn.flash_attn_with_kvcache).parameters)
    assert names - HINTS - SPELLINGS == set(CHANGES)
    varlen = set(inspect.signature(kvattn.flash_attn_varlen_func).parameters)
    assert varlen - HINTS - SPELLINGS - set(CHANGES) == set(VARLEN) - set(CHANGES) | {"dropout_p"}
    shorter = set(inspect.signature(kvattn.flash_attn_func).parameters)
    assert shorter < varlen
    explained = set(inspect.signature(kvattn.explain).parameters)
    assert explained - {"device"} == names


PUBLIC = [getattr(kvattn, name) for name in kvattn.__all__ if name != "errors"]


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__name__)
def test_t73_unknown_keywords_are_type_errors(function: Any, backend: str) -> None:
    inputs = make_inputs(PLAIN, device=DEVICE)
    required = inputs if function is kvattn.explain else {}
    with pytest.raises(TypeError, match="sofcap"):
        function(**required, sofcap=1.0)
    attention: Any = kvattn.flash_attn_with_kvcache
    with pytest.raises(TypeError, match="sofcap"):
        attention(**inputs, backend=backend, sofcap=1.0)


def test_positional_arguments_are_in_the_order_of_flash_attention_3() -> None:
    order = list(inspect.signature(kvattn.flash_attn_with_kvcache).parameters)
    assert order[:6] == ["q", "k_cache", "v_cache", "k", "v", "qv"]
    assert order[6:16] == ["rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
                           "cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new",
                           "max_seqlen_q", "rotary_seqlens"]  # fmt: skip
    assert order[16:30] == ["q_descale", "k_descale", "v_descale", "softmax_scale", "causal",
                            "window_size", "attention_chunk", "softcap", "rotary_interleaved",
                            "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin",
                            "return_softmax_lse"]  # fmt: skip


def test_the_ragged_and_the_padded_call_have_the_order_of_flash_attention_3() -> None:
    scales = ["q_descale", "k_descale", "v_descale"]
    rest = ["softmax_scale", "causal", "qv", *scales, "window_size", "attention_chunk",
            "softcap", "num_splits", "pack_gqa", "deterministic", "sm_margin",
            "return_attn_probs"]  # fmt: skip
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q",
               "seqused_k"]  # fmt: skip
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for function, order in (
        (kvattn.flash_attn_func, ["q", "k", "v", *rest]),
        (kvattn.flash_attn_varlen_func, ["q", "k", "v", *lengths, *rest]),
    ):
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is positional] == order


def test_hints_of_the_ragged_call_change_nothing() -> None:
    inputs = make_inputs(PACKED, device=DEVICE)
    hints = {"min_seqlen_k": 1, "seqlen_k_per_split": 128, "disable_scheduler_metadata": True}
    call: Any = kvattn.flash_attn_varlen_func
    wanted = call(**inputs)
    for name, hint in hints.items():
        assert torch.equal(call(**inputs, **{name: hint}), wanted)


# Inputs that other libraries refuse, or that look odd, and are fine: the numbers of the list of
# bad inputs that are none here, and what must still hold.
ACCEPTED: dict[str, tuple[Case, Callable[[Inputs], Inputs]]] = {
    "13-an-empty-batch": (Case(batch=0, lengths=()), value()),
    "14-a-head-dim-of-320": (Case(dim=320), value()),
    "15-a-head-dim-of-7": (Case(dim=7, dtype=BF16), value()),
    "26-an-int": (Case(lengths=5), value(cache_seqlens=5)),
    "30-pages-and-batch-idx": (Case(lengths=(5, 3), page_size=4, rows=3, batch_idx=(2, 0)),
        value()),
    "31-pages-and-leftpad": (Case(lengths=(5, 3), page_size=4, leftpad=(2, 3)), value()),
    "35-pages-of-5": (Case(lengths=(9, 3), page_size=5, new=2), value()),
    "38-duplicate-rows-read-only": (Case(lengths=(3, 3), rows=2, batch_idx=(1, 1)), value()),
    "39-ragged-without-a-bound": (Case(seqlen_q=(2, 0), lengths=(5, 3)), value(max_seqlen_q=None)),
    "45-an-odd-number-of-pairs": (Case(lengths=(5, 3), new=1, rotary=6, causal=True), value()),
    "46-fp32-tables": (Case(lengths=(5, 3), new=1, rotary=8, dtype=BF16, rotary_dtype=F32),
        value()),
    "49-descales-of-bf16": (Case(dtype=BF16, descale="heads"), value()),
    "51-a-list": (PLAIN, value(window_size=[1, None])),
    "52-no-chunk": (PLAIN, value(attention_chunk=None)),
    "53-no-softcap": (PLAIN, value(softcap=None)),
    "54-fp16-sinks": (Case(sinks=F16), value()),
    "63-many-splits": (PLAIN, value(num_splits=1000)),
    "65-own-metadata": (PLAIN, value(scheduler_metadata=kvattn.get_scheduler_metadata(1, 1, 1, 1,
        1, 8))),
    "66-an-out-with-gaps": (Case(seqlen_q=2, out=True), value()),
    "strided-queries": (PLAIN, lambda i: {"q": i["q"].repeat_interleave(2, -1)[..., ::2]}),
    "expanded-caches-read-only": (Case(lengths=(5, 5)), lambda i: {
        name: i[name][:1].expand(2, -1, -1, -1) for name in ("k_cache", "v_cache")}),
    "an-inactive-row": (Case(lengths=(-1, 5), new=1, causal=True), value()),
    "a-zero-capacity": (Case(lengths=(0, 0)), value()),
    "no-pages-used": (Case(lengths=(0, 0), page_size=4), value()),
    "no-query-heads": (Case(heads=0), value()),
    "one-kv-head-for-many": (Case(heads=40, kv_heads=1), value()),
    "both-spellings-of-nothing": (PLAIN, value(page_table=None, block_table=None, s_aux=None)),
    "a-mod-with-a-default": (PLAIN, value(score_mod=lambda s, b, h, i, j, extra=0: s)),
    "two-mods-one-with-aux": (PLAIN, value(score_mod=identity, mask_mod=lambda b, h, i, j, n,
        a: i >= 0,
                                           aux_tensors=[])),
    "a-ragged-mod": (PLAIN, value(score_mod=ragged_mod)),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_t70_what_is_accepted(name: str, backend: str) -> None:
    case, change = ACCEPTED[name]
    inputs = make_inputs(case, device=DEVICE)
    inputs |= change(inputs)
    other = clone_inputs(inputs)
    out, lse = attend(backend, **inputs)
    wanted, wanted_lse = attend("reference", **other)
    eps = torch.finfo(out.dtype).eps
    assert out.isfinite().all()
    assert torch.allclose(out, wanted, atol=16 * eps, rtol=8 * eps)
    assert torch.allclose(lse, wanted_lse, atol=2e-4)

"""`kvattn.scan` finds calls under any name, and says what each library would make of them."""

from __future__ import annotations

import pytest
from scan_tools import K, P, V, calls

import kvattn


def called(text: str) -> list[tuple[str, str]]:
    return [(call.libraries[0], call.called) for call in calls(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"import flash_attn\nflash_attn.{P}(q, k, v)", ("fa2", P)),
        (f"import flash_attn as fa\nfa.{K}(q, k, v)", ("fa2", K)),
        (f"import flash_attn.flash_attn_interface\nflash_attn.flash_attn_interface.{P}(q)",
         ("fa2", P)),
        (f"from flash_attn import {K} as attend\nattend(q, k, v)", ("fa2", K)),
        (f"from flash_attn.flash_attn_interface import {V}\n{V}(q, k, v)", ("fa2", V)),
        (f"import flash_attn_interface as x\nx.{K}(q, k, v)", ("fa3", K)),
        (f"from flash_attn_3 import {V}\n{V}(q, k, v)", ("fa3", V)),
        (f"from flash_attn.cute import {P}\n{P}(q, k, v)", ("fa4", P)),
        (f"from flash_attn.cute.interface import {V} as f\nf(q, k, v)", ("fa4", V)),
        (f"from flash_attn import cute\ncute.{P}(q, k, v)", ("fa4", P)),
        (f"from sgl_kernel.flash_attn import {K}\n{K}(q, k, v)", ("sglang-fa3", K)),
        (f"from sgl_kernel.flash_attn import {K}\n{K}(q, k, v, ver=4)", ("sglang-fa4", K)),
        (f"from sgl_kernel.flash_attn import {K}\n{K}(q, k, v, ver=n)", ("sglang", K)),
        (f"from sglang.jit_kernel.flash_attention_v4 import {K}\n{K}(q)", ("sglang-fa4", K)),
        (f"from sglang.jit_kernel.flash_attention_v4_sm120 import {K}\n{K}(q)",
         ("sglang-fa4-sm120", K)),
        (f"from vllm.vllm_flash_attn import {V}\n{V}(q, k, v)", ("vllm", V)),
        (f"from .compat import {K}\n{K}(q, k, v)", ("unknown", K)),
        (f"self.{K}(q, k, v)", ("unknown", K)),
        (f"import flash_attn as fa\nx = fa.{P}\ny = x\ny(q, k, v)", ("fa2", P)),
        (f"from flash_attn import {P}\nclass A:\n    def __init__(self):\n"
         f"        self.f = {P}\n    def g(self):\n        return self.f(q, k, v)", ("fa2", P)),
        (f"from functools import partial\nfrom flash_attn import {P}\n"
         f"f = partial({P}, causal=True)\nf(q, k, v)", ("fa2", P)),
        (f"def f():\n    from flash_attn import {P}\n    return lambda: [{P}(q, k, v)]",
         ("fa2", P)),
        (f"try:\n    import flash_attn_interface as fa\nexcept ImportError:\n"
         f"    import flash_attn as fa\nfa.{P}(q, k, v)", ("fa3", P)),
        (f"from flash_attn import {P} as a\nfrom flash_attn.cute import {P} as b\n"
         f"f = a if x else b\nf(q, k, v)", ("fa2", P)),
    ],
)  # fmt: skip
def test_calls_under_any_name(text: str, expected: tuple[str, str]) -> None:
    assert called(text) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        f"import kvattn\nkvattn.{K}(q, k, v)",
        f"from kvattn import {K}\n{K}(q, k, v)",
        f"def {K}(q):\n    pass\n{K}(q)",
        f"import flash_attn\nx = flash_attn.{K}\nprint(x)",
        f"'flash_attn.{K}(q, k, v)'",
        "flash_attn(q, k, v)",
    ],
)
def test_what_is_no_call_to_port(text: str) -> None:
    assert called(text) == []


def test_relative_imports_are_resolved() -> None:
    text = f"from .flash_attention_v4 import {K} as fa4\nfa4(q, k, v)"
    (call,) = calls(text, "sglang.jit_kernel.flash_attention")
    assert call.libraries == ("sglang-fa4",)


def test_arguments_are_named_by_the_library() -> None:
    """The fifth and later positions differ between FA2 and FA3."""
    call = f"{K}(q, kc, vc, k, v, a, b, lens)"
    (two,) = calls(f"from flash_attn import {K}\n{call}")
    (three,) = calls(f"from flash_attn_interface import {K}\n{call}")
    assert list(two.arguments)[5:] == ["rotary_cos", "rotary_sin", "cache_seqlens"]
    assert list(three.arguments)[5:] == ["qv", "rotary_cos", "rotary_sin"]
    (unsure,) = calls(f"from .compat import {K}\n{call}")
    assert any("read in the order of" in note for note in unsure.rewrite.notes)


def test_places_and_verdicts() -> None:
    (call,) = calls(
        f"""
        from flash_attn import {K}

        class Layer:
            def forward(self, q, k, v):
                return {K}(q, self.k, self.v, k, v, cache_seqlens=self.n, causal=True)
        """
    )
    assert (call.file, call.line, call.function) == ("a.py", 6, "Layer.forward")
    assert call.refused_by() and call.refused_by("fa4") and call.refused_by("sglang-fa4-sm120")
    assert not call.refused_by("fa2") and not call.refused_by("fa3")
    assert {verdict.peer for verdict in call.verdicts} <= set(kvattn.scan.BACKENDS)


def test_a_plain_call_is_refused_by_none() -> None:
    (call,) = calls(f"from flash_attn import {P}\n{P}(q, k, v, causal=True)")
    assert not call.refused_by() and call.verdicts == ()


def test_a_wrapper_that_is_only_made_is_reported() -> None:
    text = "from flashinfer import BatchDecodeWithPagedKVCacheWrapper as W\nreturned(W(buffer))"
    (call,) = calls(text)
    assert call.called == "BatchDecodeWithPagedKVCacheWrapper" and "Q[:, None]" in call.rewrite.code

"""What `kvattn.scan` writes is run, and must give what the call it replaces means."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scan_tools import K, P, V, calls


def written(text: str, scope: dict[str, Any]) -> Any:
    """Runs what the scan writes for the only call in `text`; the value of `out`, or all of it."""
    (call,) = calls(text)
    code = (
        call.rewrite.code
        if "out" in call.rewrite.code.split("(")[0]
        else f"out = {call.rewrite.code}"
    )
    space = {"torch": torch, **scope}
    exec("\n".join([*call.rewrite.imports, code]), space)
    return (space["out"], space["lse"]) if "lse" in space else space["out"]


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = True,
    left: int = -1,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, (rows, heads, dim): output and natural lse, written down once more."""
    g = q.shape[1] // k.shape[1]
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(g, 1)) / math.sqrt(q.shape[-1])
    logits = cap * torch.tanh(logits / cap) if cap else logits
    at = torch.arange(len(q))[:, None] + len(k) - len(q)
    keys = torch.arange(len(k))[None]
    seen = (keys <= at) if causal else torch.ones_like(keys <= at)
    seen &= keys >= at - left if left >= 0 else seen
    logits = logits.masked_fill(~seen, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v.repeat_interleave(g, 1))
    return out, logits.logsumexp(-1)


@pytest.fixture
def made() -> dict[str, Any]:
    """Two sequences of 5 and 9 keys in pages of 4, and what goes with them."""
    torch.manual_seed(0)
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    pages = torch.randn(8, 2, 4, 2, 16)  # keys and values side by side, as FlashInfer has them
    table = torch.tensor([[3, 0, 0], [6, 1, 4]], dtype=torch.int32)
    lists = [table[b, : -(-int(lengths[b]) // 4)] for b in range(2)]
    return {
        "lengths": lengths,
        "pages": pages,
        "k_pages": pages[:, 0],
        "v_pages": pages[:, 1],
        "table": table,
        "indptr": torch.tensor([0, 2, 5], dtype=torch.int32),
        "indices": torch.cat(lists),
        "last": torch.tensor([1, 1], dtype=torch.int32),
        "q": torch.randn(2, 1, 4, 16),
        "qs": torch.randn(2, 4, 16),
        "k": torch.randn(2, 1, 2, 16),
        "v": torch.randn(2, 1, 2, 16),
    }


def sequence(made: dict[str, Any], b: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (made[name][made["table"][b].long()].flatten(0, 1) for name in ("k_pages", "v_pages"))
    return k[: made["lengths"][b]], v[: made["lengths"][b]]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"from flash_attn import {K}\n"
         f"{K}(q, k_pages, v_pages, k, v, None, None, lengths, block_table=table, causal=True)",
         -1),
        (f"from flash_attn_interface import {K}\n"
         f"{K}(q, k_pages, v_pages, k, v, None, None, None, lengths, None, None, table,"
         " causal=True, window_size=(3, 0), scheduler_metadata=object())", 3),
        (f"from sgl_kernel.flash_attn import {K} as attend\n"
         "attend(q=q, k_cache=k_pages, v_cache=v_pages, k=k, v=v, cache_seqlens=lengths, ver=3,"
         " page_table=table, causal=True, window_size=(3, -1))", 3),
    ],
)  # fmt: skip
def test_cache_calls(made: dict[str, Any], text: str, left: int) -> None:
    expected = []
    for b in range(2):
        k, v = sequence(made, b)
        keys, values = torch.cat([k, made["k"][b]]), torch.cat([v, made["v"][b]])
        expected.append(plain(made["q"][b], keys, values, left=left)[0])
    torch.testing.assert_close(written(text, made), torch.stack(expected))


PADDED: dict[str, dict[str, Any]] = {
    f"from flash_attn import {P}\n{P}(q, k, v, 0.0, None, True)": {},
    f"from flash_attn_interface import {P}\n{P}(q, k, v, None, True)": {},
    f"from flash_attn.cute import {P}\n{P}(q, k, v, causal=True, softcap=2.0)": {"cap": 2.0},
    "from flash_attn import flash_attn_qkvpacked_func as f\nf(qkv, causal=True)": {},
    "from flash_attn import flash_attn_kvpacked_func as f\nf(q, kv, causal=True)": {},
    f"from functools import partial\nfrom flash_attn import {P}\n"
    f"f = partial({P}, causal=True, window_size=(2, 2))\nf(q, k, v)": {"left": 2},
}


@pytest.mark.parametrize("text", PADDED)
def test_padded_calls(text: str) -> None:
    torch.manual_seed(1)
    qkv = torch.randn(2, 5, 3, 2, 16)
    q, k, v = qkv.unbind(2)
    scope = {"qkv": qkv, "q": q, "k": k, "v": v, "kv": torch.stack([k, v], 2)}
    expected = [plain(*each, **PADDED[text])[0] for each in zip(q, k, v, strict=True)]
    torch.testing.assert_close(written(text, scope), torch.stack(expected))


RAGGED = [
    f"from flash_attn import {V}\n{V}(q, k, v, edges, edges, 5, 5, 0.0, None, True)",
    f"from flash_attn_interface import {V}\n{V}(q, k, v, edges, edges, 5, 5, causal=True)",
    f"from flash_attn.cute import {V}\n"
    f"{V}(q, k, v, None, edges, edges, causal=True, score_mod_bwd=None)",
    f"from vllm.vllm_flash_attn import {V}\n"
    f"{V}(q, k, v, 5, edges, 5, edges, causal=True, fa_version=3)",
    f"from sgl_kernel.flash_attn import {V}\n{V}(q, k, v, edges, edges, 5, 5, causal=True)",
    "from flash_attn import flash_attn_varlen_qkvpacked_func as f\nf(qkv, edges, 5, causal=True)",
    "from flash_attn import flash_attn_varlen_kvpacked_func as f\n"
    "f(q, kv, edges, edges, 5, 5, causal=True)",
    "import flashinfer\nw = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(buffer)\n"
    "w.plan(edges, edges, 2, 2, 16, causal=True)\nw.run(q, k, v)",
]


@pytest.mark.parametrize("text", RAGGED)
def test_ragged_calls(text: str) -> None:
    torch.manual_seed(2)
    qkv = torch.randn(8, 3, 2, 16)
    q, k, v = qkv.unbind(1)
    edges = torch.tensor([0, 3, 8], dtype=torch.int32)
    scope = {"qkv": qkv, "q": q, "k": k, "v": v, "kv": torch.stack([k, v], 1), "edges": edges}
    parts = [plain(q[a:b], k[a:b], v[a:b])[0] for a, b in ((0, 3), (3, 8))]
    torch.testing.assert_close(written(text, scope), torch.cat(parts))


def test_ragged_queries_over_pages(made: dict[str, Any]) -> None:
    """FlashAttention-2 gives edges of the keys, pages need lengths."""
    text = (
        f"from flash_attn import {V}\n"
        f"{V}(qs, k_pages, v_pages, q_edges, k_edges, 1, 9, causal=True, block_table=table)"
    )
    edges = {"q_edges": torch.arange(3).int(), "k_edges": torch.tensor([0, 5, 14]).int()}
    expected = [plain(made["qs"][b : b + 1], *sequence(made, b))[0] for b in range(2)]
    torch.testing.assert_close(written(text, made | edges), torch.cat(expected))


DECODE = """
import flashinfer
class A:
    def setup(self):
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer{layout})
        self.wrapper.plan(indptr, indices, last, 4, 2, 16, 4, window_left=3, logits_soft_cap=2.0)
    def forward(self):
        return self.wrapper.{run}
"""


@pytest.mark.parametrize(
    ("run", "layout"),
    [
        ("run(qs, pages)", ""),
        ("forward(qs, (k_pages, v_pages))", ', "NHD"'),
        ("run(qs, pages, return_lse=True)", ""),
        ("forward_return_lse(qs, pages)", ""),
        ("run(qs, pages.transpose(2, 3))", ', "HND"'),
        ("run(qs, (k_pages.transpose(1, 2), v_pages.transpose(1, 2)))", ', kv_layout="HND"'),
    ],
)
def test_flashinfer_decode(made: dict[str, Any], run: str, layout: str) -> None:
    got = written(DECODE.format(run=run, layout=layout), made)
    expected = [plain(made["qs"][b : b + 1], *sequence(made, b), left=3, cap=2.0) for b in range(2)]
    if "lse" in run:
        got, lse = got
        wanted = torch.stack([each.squeeze(1) for _, each in expected]) / math.log(2)
        torch.testing.assert_close(lse, wanted)
    torch.testing.assert_close(got, torch.cat([out for out, _ in expected]))


def test_wrappers_of_one_name_in_several_functions() -> None:
    text = """
    import flashinfer
    def decode():
        w = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer)
        w.plan(decode_indptr, indices, last, 4, 2, 16, 4)
        def inner():
            return w.run(q, pages)
    class A:
        def __init__(self):
            self.w = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(buffer)
        def forward(self):
            return self.w.run(q, k, v)
    class B:
        def __init__(self):
            self.w = w = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer)
            w.plan(edges, prefill_indptr, indices, last, 4, 2, 16, 4)
            return w.run(q, pages)
        def forward(self):
            self.w.plan(edges, other_indptr, indices, last, 4, 2, 16, 4)
            return self.w.run(q, pages)
    """
    found = calls(text)
    names = ("DecodeWithPaged", "PrefillWithRagged", "PrefillWithPaged", "PrefillWithPaged")
    assert [each.called for each in found] == [f"Batch{name}KVCacheWrapper" for name in names]
    indptrs = ("decode_indptr", "KV_INDPTR", "prefill_indptr", "other_indptr")
    for indptr, each in zip(indptrs, found, strict=True):
        assert indptr in each.rewrite.code


def test_flashinfer_prefill(made: dict[str, Any]) -> None:
    text = """
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper as W
    w = W(buffer, "NHD")
    w.begin_forward(edges, indptr, indices, last, 4, 2, 16, 4, causal=True, sm_scale=0.25)
    out = w.run(q, pages, return_lse=True)
    """
    q, edges = torch.randn(5, 4, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    out, lse = written(text, made | {"q": q, "edges": edges})
    expected = [plain(q[a:b], *sequence(made, i)) for i, (a, b) in enumerate(((0, 2), (2, 5)))]
    torch.testing.assert_close(out, torch.cat([each for each, _ in expected]))
    torch.testing.assert_close(lse, torch.cat([each.T for _, each in expected]) / math.log(2))


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("single_decode_with_kv_cache(q[0], k, v, window_left=3, logits_soft_cap=2.0)", 1),
        ("single_decode_with_kv_cache(q[0], h(k), h(v), 'HND', window_left=3,"
         " logits_soft_cap=2.0, return_lse=True)", 1),
        ("single_prefill_with_kv_cache(q, k, v, causal=True, window_left=3,"
         " logits_soft_cap=2.0)", 3),
        ("single_prefill_with_kv_cache(q, k, v, custom_mask=mask, logits_soft_cap=2.0,"
         " return_lse=True)", 3),
    ],
)  # fmt: skip
def test_flashinfer_single(text: str, query: int) -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(query, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    at = torch.arange(query)[:, None] + 7 - query
    keys = torch.arange(7)[None]
    scope = {
        "q": q,
        "k": k,
        "v": v,
        "h": lambda x: x.transpose(0, 1),
        "mask": (keys <= at) & (keys >= at - 3),
    }
    got = written(f"import flashinfer\nflashinfer.{text}", scope)
    out, lse = plain(q, k, v, left=3, cap=2.0)
    if "lse" in text:
        got, got_lse = got
        wanted = lse[:, 0] if query == 1 else lse.T
        torch.testing.assert_close(got_lse, wanted / math.log(2))
    torch.testing.assert_close(got, out[0] if query == 1 else out)


def test_flashinfer_append(made: dict[str, Any]) -> None:
    text = """
    import flashinfer
    flashinfer.append_paged_kv_cache(ks, vs, owners, at, pages, indices, indptr, last)
    """
    new = {"ks": torch.ones(3, 2, 16), "vs": torch.full((3, 2, 16), 2.0)}
    where = {"owners": torch.tensor([0, 1, 1]).int(), "at": torch.tensor([5, 2, 9]).int()}
    (call,) = calls(text)
    before = made["pages"].clone()
    exec("\n".join([*call.rewrite.imports, call.rewrite.code]), made | new | where)
    for page, slot in ((0, 1), (6, 2), (4, 1)):
        before[page, 0, slot], before[page, 1, slot] = 1.0, 2.0
    assert torch.equal(made["pages"], before)


def notes(text: str) -> str:
    (call,) = calls(text)
    return " | ".join(call.rewrite.notes)


@pytest.mark.parametrize(
    ("text", "note", "code"),
    [
        (f"from flash_attn import {P}\n{P}(q, k, v, 0.1)", "dropout_p must be 0", "dropout_p=0.1"),
        (f"from flash_attn_interface import {K}\n{K}(q, k, v, return_softmax_lse=True)",
         "returns (out, lse)", "return_softmax_lse=True"),
        (f"from flash_attn import {P}\n{P}(q, k, v, return_attn_probs=True)",
         "without the dropout mask", "return_softmax_lse=True"),
        (f"from flash_attn.cute import {P}\n{P}(q, k, v, mask_mod=m, causal=True)",
         "hold beside mask_mod", "mask_mod=m"),
        (f"from flash_attn.cute import {P}\n{P}(q, k, v)", "returns out alone", "(q, k, v)"),
        (f"from flash_attn_interface import {K}\n{K}(q, k, v, scheduler_metadata=m)",
         "scheduler_metadata is dropped", "(q, k, v)"),
        (f"from vllm.vllm_flash_attn import {V}\n{V}(q, k, v, cp_world_size=2, q_v=x)",
         "cp_world_size is dropped", "qv=x"),
        (f"from sgl_kernel.flash_attn import {K}\n{K}(q, k, v, cu_seqlens_k_new=edges)",
         "cu_seqlens_k_new is dropped: without k it was ignored", "(q, k, v)"),
        (f"from flash_attn import {P}\n{P}(q, k, v, **options)", "**options may hold",
         "(q, k, v, **options)"),
        (f"from flash_attn import {P}\n{P}(*tensors, causal=True)", "starred",
         "(*tensors, causal=True)"),
        (f"from flash_attn.cute import {P}\n{P}(q, k, v, learnable_sink=s)", "", "sinks=s"),
        ("import flashinfer\nflashinfer.single_decode_with_kv_cache(q, k, v,"
         " pos_encoding_mode='ROPE_LLAMA')", "rotate with rotary_cos", "q[None, None]"),
        ("import flashinfer\nflashinfer.single_decode_with_kv_cache(q, k, v,"
         " pos_encoding_mode='ALIBI')", "pass alibi_slopes", "q[None, None]"),
        ("import flashinfer\nw = flashinfer.BatchDecodeWithPagedKVCacheWrapper(b)\nw.run(q, kv)",
         "plan() is not called in this file", "INDPTR.diff()"),
    ],
)  # fmt: skip
def test_what_differs_is_said(text: str, note: str, code: str) -> None:
    (call,) = calls(text)
    assert note in " | ".join(call.rewrite.notes)
    assert code in call.rewrite.code
    compile(call.rewrite.code, "rewrite", "exec")

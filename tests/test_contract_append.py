"""Where new tokens go, what stays as it was, and what is seen afterwards."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from cases import BF16, E4M3, F32, attend, ints, probed
from conftest import DEVICE
from torch import Tensor

import kvattn
from kvattn import errors as E
from kvattn.testing import Case, Inputs, clone_inputs, make_inputs


def tokens_of(inputs: Inputs, cache: str, b: int, first: int, last: int) -> Tensor:
    """Absolute rows first..last of a sequence, read one by one."""
    table, rows = inputs.get("page_table"), inputs.get("cache_batch_idx")
    line = b if rows is None else int(rows[b])
    if table is None:
        return inputs[cache][line, first:last]
    size = inputs[cache].shape[1]
    slots = [inputs[cache][int(table[line, row // size]), row % size] for row in range(first, last)]
    return torch.stack(slots)


def unchanged_but_for(before: Inputs, after: Inputs, count: int) -> bool:
    """Whether exactly `count` slots of both caches differ, bit for bit."""
    for name in ("k_cache", "v_cache"):
        a, b = (x[name].contiguous().view(torch.uint8).flatten(2) for x in (before, after))
        if int((a != b).any(-1).sum()) != count:
            return False
    return True


@pytest.mark.parametrize("page_size", [None, 4])
def test_t16_filling_the_capacity_exactly(backend: str, page_size: int | None) -> None:
    case = Case(batch=2, lengths=(7, 3), new=1, capacity=8, page_size=page_size, causal=True)
    inputs = make_inputs(case, device=DEVICE)
    if page_size is not None:
        inputs["page_table"] = inputs["page_table"][:, :2]
        inputs["page_table"][1, 1] = 0
    attend(backend, **inputs)
    assert torch.equal(tokens_of(inputs, "k_cache", 0, 7, 8), inputs["k"][0])
    kept = clone_inputs(inputs)
    inputs["cache_seqlens"] = ints(8, 3)
    with kvattn.checked(), pytest.raises(E.AppendOverflowError) as caught:
        kvattn.flash_attn_with_kvcache(**inputs, backend=backend)
    assert "cache_seqlens[0]" in str(caught.value)
    assert unchanged_but_for(kept, inputs, 0)


@pytest.mark.parametrize("page_size", [None, 4])
def test_t17_append_into_an_empty_row(backend: str, page_size: int | None) -> None:
    case = Case(batch=2, lengths=(0, 5), leftpad=(0, 5), new=3, seqlen_q=3, causal=True,
                page_size=page_size)  # fmt: skip
    mean, count = probed(case, backend)
    assert torch.allclose(count[..., 0], torch.tensor([[1.0, 2, 3]] * 2))
    assert torch.allclose(mean[..., 0], torch.tensor([[0.0, 0.5, 1]] * 2), atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"window": (0, 0)}, {"chunk": 2}, {"window": (0, 0), "seqlen_q": 0}]
)
@pytest.mark.parametrize("page_size", [None, 16])
def test_t18_every_row_is_stored_whatever_the_window_shows(
    backend: str, options: dict[str, Any], page_size: int | None
) -> None:
    case = Case(batch=2, lengths=(3, 0), new=500, page_size=page_size, **options)
    inputs = make_inputs(case, device=DEVICE)
    attend(backend, **inputs)
    for b, old in enumerate((3, 0)):
        for new, cache in (("k", "k_cache"), ("v", "v_cache")):
            assert torch.equal(tokens_of(inputs, cache, b, old, old + 500), inputs[new][b])


def test_t19_sequences_without_queries_are_stored(backend: str) -> None:
    case = Case(batch=3, seqlen_q=(0, 2, 0), lengths=(4, 0, 9), new=(3, 2, 1), causal=True)
    inputs = make_inputs(case, device=DEVICE)
    before = clone_inputs(inputs)
    attend(backend, **inputs)
    assert torch.equal(tokens_of(inputs, "v_cache", 0, 4, 7), inputs["v"][:3])
    assert torch.equal(tokens_of(inputs, "v_cache", 2, 9, 10), inputs["v"][5:])
    assert unchanged_but_for(before, inputs, 6)


@pytest.mark.parametrize("new", [0, (0, 0)])
def test_t20_nothing_to_append(backend: str, new: Any) -> None:
    case = Case(lengths=(4, 9), new=new, seqlen_q=2, causal=True)
    inputs = make_inputs(case, device=DEVICE)
    before = clone_inputs(inputs)
    out, lse = attend(backend, **inputs)
    assert unchanged_but_for(before, inputs, 0)
    gone = {**inputs, "k": None, "v": None, "cu_seqlens_k_new": None}
    bare, bare_lse = attend(backend, **gone)
    assert torch.equal(out, bare)
    assert torch.equal(lse, bare_lse)


@pytest.mark.parametrize("page_size", [1, 3, 16, 256])
def test_t21_t22_append_across_pages_leaves_the_rest(backend: str, page_size: int) -> None:
    case = Case(batch=3, lengths=(page_size - 1, 0, 2 * page_size), new=2 * page_size + 1,
                page_size=page_size, dim=8)  # fmt: skip
    inputs = make_inputs(case, device=DEVICE)
    before = clone_inputs(inputs)
    attend(backend, **inputs)
    new = 2 * page_size + 1
    assert isinstance(case.lengths, tuple)
    for b, old in enumerate(case.lengths):
        assert torch.equal(tokens_of(inputs, "k_cache", b, old, old + new), inputs["k"][b])
        assert torch.equal(tokens_of(inputs, "v_cache", b, old, old + new), inputs["v"][b])
    assert unchanged_but_for(before, inputs, 3 * new)


def test_t35_duplicates_with_an_append(backend: str) -> None:
    """Two sequences own one row: the stored token is one of the candidates.

    Whole where sequences are stored one after the other; on a GPU each head is one candidate's.
    """
    case = Case(batch=2, lengths=(5, 5), new=1, rows=3, batch_idx=(1, 1), capacity=8)
    inputs = make_inputs(case, device=DEVICE)
    inputs["cache_batch_idx"] = ints(1, 1)
    before = clone_inputs(inputs)
    attend(backend, **inputs)
    for new, cache in (("k", "k_cache"), ("v", "v_cache")):
        stored = inputs[cache][1, 5]
        heads = [slice(None)] if DEVICE == "cpu" else range(stored.shape[0])
        for h in heads:
            assert any(torch.equal(stored[h], inputs[new][b, 0][h]) for b in range(2))
    assert unchanged_but_for(before, inputs, 1)
    with kvattn.checked(), pytest.raises(E.DuplicateWriteError):
        kvattn.flash_attn_with_kvcache(**inputs, backend=backend)


@pytest.mark.parametrize("form", ["dense", "paged", "batch_idx", "ragged"])
def test_t59_a_scalar_length_means_all_sequences(backend: str, form: str) -> None:
    """An int expands to the number of sequences, not to q's or the cache's first dimension."""
    forms: dict[str, dict[str, Any]] = {
        "dense": {},
        "paged": {"page_size": 4},
        "batch_idx": {"rows": 5, "batch_idx": (4, 0, 2)},
        "ragged": {"seqlen_q": (2, 0, 3)},
    }
    case = Case(batch=3, lengths=6, new=1, causal=True, **forms[form])
    inputs = make_inputs(case, device=DEVICE)
    scalar = {**clone_inputs(inputs), "cache_seqlens": 6}
    wanted, wanted_lse = attend(backend, **inputs)
    out, lse = attend(backend, **scalar)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)
    assert unchanged_but_for(inputs, scalar, 0)


@pytest.mark.parametrize("page_size", [None, 4])
def test_t60_no_lengths_mean_the_full_capacity(backend: str, page_size: int | None) -> None:
    case = Case(lengths=8, pass_lengths="none", page_size=page_size, seqlen_q=2)
    mean, count = probed(case, backend)
    assert torch.allclose(count, torch.full_like(count, 8))
    assert torch.allclose(mean, torch.full_like(mean, 3.5))


HUGE = 2**31


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU test of its own allocates the memory for real")
@pytest.mark.parametrize("paged", [False, True])
def test_t68_offsets_beyond_2_to_the_31(backend: str, paged: bool) -> None:
    """The memory is reserved, not touched, but for the last slots."""
    storage = torch.UntypedStorage(HUGE + 2**20)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (len(storage),), (1,))
    both = flat[: HUGE + 2**19].view(E4M3).view(-1, 16, 2, 64)  # blocks of 16 slots, k and v
    k_cache, v_cache = both[..., :1, :], both[..., 1:, :]
    last = both.shape[0] - 1
    assert last * both.stride(0) > HUGE
    torch.manual_seed(0)
    k, v = (torch.randn(1, 3, 1, 64).to(E4M3) for _ in range(2))
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[last, :2] = new[0, :2]
    where: Inputs = {"cache_batch_idx": ints(last)}
    if paged:
        where = {"page_table": ints(last).view(1, 1)}
    where |= {"k": k[:, 2:], "v": v[:, 2:], "cache_seqlens": ints(2)}
    q = torch.randn(1, 1, 2, 64)
    out, _ = attend(backend, q=q, k_cache=k_cache, v_cache=v_cache, **where)
    assert torch.equal(v_cache[last, 2].view(torch.uint8), v[0, 2].view(torch.uint8))
    logits = torch.einsum("hd,nd->hn", q[0, 0], k[0, :, 0].float()) / 8
    assert torch.allclose(out[0, 0], logits.softmax(-1) @ v[0, :, 0].float(), atol=1e-5)


LAYOUTS = ["plain", "heads_first", "kv", "joined", "layers"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [None, 8])
def test_t69_the_layout_changes_nothing(backend: str, layout: str, page_size: int | None) -> None:
    results = []
    for kind in ("plain", layout):
        case = Case(lengths=(9, 30), new=3, seqlen_q=3, layout=kind, page_size=page_size,
                    causal=True, dtype=BF16)  # fmt: skip
        inputs = make_inputs(case, device=DEVICE)
        plain = make_inputs(Case(**{**vars(case), "layout": "plain"}), device=DEVICE)
        for name in ("k_cache", "v_cache"):
            inputs[name].copy_(plain[name])
        out, lse = attend(backend, **inputs)
        results.append((out, lse, inputs))
    (wanted, wanted_lse, first), (out, lse, second) = results
    assert torch.allclose(out.float(), wanted.float(), atol=2e-2)
    assert torch.allclose(lse, wanted_lse, atol=2e-4)
    assert unchanged_but_for(first, second, 0)


def test_slots_skip_and_count_the_new_tokens(backend: str) -> None:
    """slot_mapping: -1 stores nothing, lengths include the new tokens."""
    case = Case(batch=2, lengths=(5, 2), new=2, seqlen_q=2, page_size=4, by_slot=True, causal=True)
    inputs = make_inputs(case, device=DEVICE)
    page, offset = divmod(int(inputs["slot_mapping"][1]), 4)
    for name in ("k_cache", "v_cache"):
        inputs[name][page, offset] = 0.25
    inputs["slot_mapping"][1] = -1
    before = clone_inputs(inputs)
    attend(backend, **inputs)
    assert unchanged_but_for(before, inputs, 3)
    assert (inputs["k_cache"][page, offset] == 0.25).all()
    assert torch.equal(tokens_of(inputs, "v_cache", 0, 5, 6), inputs["v"][0, :1])
    assert torch.equal(tokens_of(inputs, "v_cache", 1, 2, 4), inputs["v"][1])


def test_append_kv_equals_the_append_inside_attention(backend: str) -> None:
    rows: dict[str, Any] = {"rows": 4, "batch_idx": (3, 0)}
    for more in ({}, {"page_size": 4}, rows, {"cache_dtype": E4M3}):
        case = Case(lengths=(5, 2), new=(2, 3), rotary=16, causal=True, **more)
        inputs = make_inputs(case, device=DEVICE)
        alone = clone_inputs(inputs)
        attend(backend, **inputs)
        names = {*inspect.signature(kvattn.append_kv).parameters} & {*alone}
        kvattn.append_kv(**{name: alone[name] for name in names}, backend=backend)
        assert unchanged_but_for(inputs, alone, 0)


def test_append_kv_by_slot_alone(backend: str) -> None:
    """Tokens, caches and slots are enough; a length is needed for rotary only."""
    cache = torch.full((2, 3, 8, 2, 4), math.nan, device=DEVICE)
    k, v = torch.randn(2, 5, 2, 4, device=DEVICE)
    slots = torch.tensor([23, -1, 0, 8, 7], device=DEVICE)
    kvattn.append_kv(k, v, cache[0], cache[1], slot_mapping=slots, backend=backend)
    flat = cache.flatten(1, 2)
    assert torch.equal(flat[0, [23, 0, 8, 7]], k[[0, 2, 3, 4]])
    assert torch.equal(flat[1, [23, 0, 8, 7]], v[[0, 2, 3, 4]])
    assert int(flat.isnan().any(-1).any(-1).sum()) == 2 * 20
    angle = torch.randn(100, 2, device=DEVICE)
    more: dict[str, Any] = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    kvattn.append_kv(k, v, cache[0], cache[1], slot_mapping=slots, cache_seqlens=ints(*[100] * 5),
                     **more, backend=backend)  # fmt: skip
    turned = kvattn.apply_rotary(k, *more.values(), positions=slots * 0 + 99)
    assert torch.equal(flat[0, 23], turned[0])


def test_append_kv_skips_inactive_rows(backend: str) -> None:
    cache = torch.full((2, 2, 8, 2, 4), math.nan, device=DEVICE)
    k, v = torch.randn(2, 2, 2, 2, 4, device=DEVICE)
    for slots in (None, torch.arange(4, device=DEVICE)):
        kvattn.append_kv(k, v, *cache, cache_seqlens=ints(-1, -1), slot_mapping=slots,
                         backend=backend)  # fmt: skip
        assert cache.isnan().all()


@pytest.mark.filterwarnings("ignore:numbers beyond")
def test_int8_and_bf16_storage(backend: str) -> None:
    """fp32 tokens in narrower caches: rounded once, half to even, saturated."""
    k = torch.tensor([0.5, 1.5, 2.5, -0.5, 300.0, -300.0, 127.4, math.inf], device=DEVICE)
    k = k.view(1, 1, 1, 8)
    cache = torch.zeros(1, 2, 1, 8, dtype=torch.int8, device=DEVICE)
    kvattn.append_kv(k, k, cache, cache.clone(), cache_seqlens=0, backend=backend)
    assert cache[0, 0, 0].tolist() == [0, 2, 2, 0, 127, -127, 127, 127]
    halved = torch.zeros_like(cache)
    kvattn.append_kv(k, k, halved, halved.clone(), cache_seqlens=1, k_descale=0.5, backend=backend)
    assert halved[0, 1, 0].tolist() == [1, 3, 5, -1, 127, -127, 127, 127]
    wide = torch.zeros(1, 2, 1, 8, dtype=BF16, device=DEVICE)
    x = torch.randn(1, 1, 1, 8, dtype=F32, device=DEVICE)
    kvattn.append_kv(x, x, wide, wide.clone(), cache_seqlens=0, backend=backend)
    assert torch.equal(wide[:, :1], x.to(BF16))

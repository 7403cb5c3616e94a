"""Which keys a row sees: probes (q = 0, v[j] = j) give the mean index and the number exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from cases import E4M3, F32, attend, attend_varlen, ints, probed, signed_window
from conftest import DEVICE
from torch import Tensor

from kvattn import BlockSparse, errors, flash_attn_varlen_func
from kvattn.testing import Case, make_inputs


def assert_rows(found: tuple[Tensor, Tensor], *rows: Iterable[int]) -> None:
    """Every head of every row attends to exactly these keys (by their mean and number)."""
    mean, count = (x.flatten(0, -2).cpu() for x in found)
    for i, keys in enumerate(map(list, rows)):
        wanted = sum(keys) / len(keys) if keys else 0.0
        assert count[i].tolist() == pytest.approx([len(keys)] * count.shape[1], rel=1e-5), i
        assert mean[i].tolist() == pytest.approx([wanted] * mean.shape[1], rel=1e-5, abs=1e-5), i


def rows_of(sq: int, sk: int, keep: Any) -> list[list[int]]:
    """The keys of every row by a predicate on (p, j), p = i + Sk - Sq."""
    return [[j for j in range(sk) if keep(i + sk - sq, j)] for i in range(sq)]


@pytest.mark.parametrize("page_size", [None, 4])
def test_t9_more_queries_than_keys(backend: str, page_size: int | None) -> None:
    case = Case(batch=1, seqlen_q=7, lengths=4, causal=True, page_size=page_size)
    found = probed(case, backend)
    assert_rows(found, [], [], [], range(1), range(2), range(3), range(4))
    assert not found[0][0, :3].any()
    inputs = make_inputs(case, device=DEVICE)
    out, lse = attend(backend, **inputs)
    assert not out[:, :3].any()
    assert (lse[:, :, :3] == -math.inf).all()
    assert lse[:, :, 3:].isfinite().all()


@pytest.mark.parametrize("seqlen_q", [1, 3, 40])
@pytest.mark.parametrize("page_size", [None, 4])
def test_t10_no_keys_at_all_and_among_others(
    backend: str, seqlen_q: int, page_size: int | None
) -> None:
    for lengths in ((0, 0, 0), (0, 9, 0), (9, 0, 50)):
        case = Case(batch=3, seqlen_q=seqlen_q, lengths=lengths, capacity=50, page_size=page_size)
        out, lse = attend(backend, **make_inputs(case, device=DEVICE))
        for b, length in enumerate(lengths):
            assert bool(out[b].any()) == (length > 0)
            assert ((lse[b] == -math.inf) == (length == 0)).all()


@pytest.mark.parametrize("options", [{}, {"window": (3, 3)}, {"causal": True}, {"chunk": 2}])
def test_t11_no_keys_with_a_sink(backend: str, options: dict[str, Any]) -> None:
    case = Case(seqlen_q=3, lengths=(0, 6), new=None, sinks=F32, **options)
    inputs = make_inputs(case, device=DEVICE)
    out, lse = attend(backend, **inputs)
    assert not out[0].any()
    assert torch.equal(lse[0], inputs["sinks"][:, None].expand_as(lse[0]))
    assert (lse[1] > inputs["sinks"][:, None]).all()


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("with_sink", [False, True])
def test_t12_t15_empty_rows_for_every_number_of_splits(
    backend: str, num_splits: int, with_sink: bool
) -> None:
    case = Case(batch=3, seqlen_q=5, lengths=(2, 0, 9), window=(1, 0), causal=True, page_size=2,
                sinks=F32 if with_sink else None)  # fmt: skip
    inputs = make_inputs(case, device=DEVICE)
    out, lse = attend(backend, **inputs, num_splits=num_splits)
    empty = torch.zeros(3, 5, dtype=torch.bool, device=DEVICE)
    empty[0, :3] = empty[1] = True  # five queries, two or no keys
    assert not out[empty].any()
    bare = lse.transpose(1, 2)[empty]
    wanted = inputs["sinks"] if with_sink else torch.full_like(bare[0], -math.inf)
    assert torch.equal(bare, wanted.expand_as(bare))
    assert out[~empty].any(-1).all()


def test_t33_batch_idx_permuted_and_repeated(backend: str) -> None:
    case = Case(batch=4, lengths=(9, 3, 9, 1), rows=6, batch_idx=(5, 0, 5, 2), capacity=9)
    assert_rows(probed(case, backend), range(9), range(3), range(9), range(1))
    inputs = make_inputs(case, device=DEVICE)
    inputs["q"][2] = inputs["q"][0]
    out, lse = attend(backend, **inputs)
    assert torch.equal(out[0], out[2])
    assert torch.equal(lse[0], lse[2])
    dense = {name: inputs[name][[5, 0, 5, 2]] for name in ("k_cache", "v_cache")}
    straight, _ = attend(backend, **{**inputs, **dense, "cache_batch_idx": None})
    assert torch.allclose(out, straight, atol=1e-6)


@pytest.mark.parametrize("leftpad", [0, 3, 4, 7])
def test_t37_leftpad_shifts_chunks(backend: str, leftpad: int) -> None:
    case = Case(batch=1, seqlen_q=3, lengths=11, leftpad=(leftpad,), chunk=4, page_size=2)
    keys = 11 - leftpad
    same = rows_of(3, keys, lambda p, j: p // 4 == j // 4)
    assert_rows(probed(case, backend), *same)


def test_t37_leftpad_shifts_slopes(backend: str) -> None:
    """Slopes measure logical distances: padding and its content change nothing."""
    plain = Case(batch=1, seqlen_q=3, lengths=8, alibi="heads", causal=True)
    inputs = make_inputs(plain, device=DEVICE)
    bare, lse = attend(backend, **inputs)
    pad = torch.full((1, 5, 2, 32), math.nan, device=DEVICE)
    for name in ("k_cache", "v_cache"):
        inputs[name] = torch.cat((pad, inputs[name]), 1)
    inputs |= {"cache_seqlens": ints(13), "cache_leftpad": ints(5)}
    padded, padded_lse = attend(backend, **inputs)
    assert torch.allclose(padded, bare, atol=1e-6)
    assert torch.allclose(padded_lse, lse, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    ("window", "causal"), [((-1, -1), False), ((-1, -1), True), ((1, 2), False), ((4, -1), True)]
)
def test_t38_chunks(backend: str, chunk: int, window: tuple[int, int], causal: bool) -> None:
    """floor(p / C) == floor(j / C), negative p included, met with causal and window."""
    left, right = window
    right = 0 if causal else right

    def keep(p: int, j: int) -> bool:
        inside = (left < 0 or j >= p - left) and (right < 0 or j <= p + right)
        return inside and math.floor(p / chunk) == math.floor(j / chunk)

    for sq, sk in ((5, 9), (9, 5), (1, 8), (3, 3)):
        case = Case(batch=1, seqlen_q=sq, lengths=sk, chunk=chunk, window=window, causal=causal)
        assert_rows(probed(case, backend), *rows_of(sq, sk, keep))


WINDOWS = [(0, 0), (2, 0), (0, 2), (-1, 2), (2, -1), (None, None), [1, 2], [None, 1], (100, 100)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_t39_t41_windows_in_every_spelling(backend: str, window: Any, causal: bool) -> None:
    """p - left <= j <= p + right; -1 and None are unbounded; causal makes right 0, keeps j = p."""
    left, right = (None if side == -1 else side for side in window)
    right = 0 if causal else right

    def keep(p: int, j: int) -> bool:
        return (left is None or j >= p - left) and (right is None or j <= p + right)

    for sq, sk, page_size in ((4, 9, None), (9, 4, 2), (1, 9, 4), (20, 20, None)):
        case = Case(batch=1, seqlen_q=sq, lengths=sk, window=window, causal=causal,
                    page_size=page_size)  # fmt: skip
        assert_rows(probed(case, backend), *rows_of(sq, sk, keep))


def test_t40_signed_windows_are_mask_mods(backend: str) -> None:
    """FlashAttention-4's (None, -3) and (-2, None) in place of window_size."""
    for left, right in ((None, -3), (-2, None), (5, -1), (1, -2)):
        case = Case(batch=1, seqlen_q=3, lengths=8, mask_mod=signed_window(left, right),
                    options={"aux_tensors": []})  # fmt: skip

        def keep(p: int, j: int, left: int | None = left, right: int | None = right) -> bool:
            return (left is None or p - left <= j) and (right is None or j <= p + right)

        assert_rows(probed(case, backend), *rows_of(3, 8, keep))


def odd_keys(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j % 2 == 1


def test_t58_mask_mod_and_causal_intersect(backend: str) -> None:
    case = Case(batch=2, seqlen_q=2, lengths=(6, 3), mask_mod=odd_keys, causal=True, page_size=4)
    assert_rows(probed(case, backend), [1, 3], [1, 3, 5], [1], [1])
    windowed = Case(batch=1, seqlen_q=2, lengths=6, mask_mod=odd_keys, window=(2, 0))
    assert_rows(probed(windowed, backend), [3], [3, 5])


def test_t58_block_sparse(backend: str) -> None:
    """mask blocks apply mask_mod, full ones skip it, unlisted ones hide; a row may be empty."""
    blocks = BlockSparse(
        mask_block_cnt=ints(1, 0, 0).view(1, 1, 3),
        mask_block_idx=ints(0, 0, 0).view(1, 1, 3, 1),
        full_block_cnt=ints(1, 2, 0).view(1, 1, 3),
        full_block_idx=ints(2, 9, 1, 0, 7, 7).view(1, 1, 3, 2),
        block_size=(2, 4),
    )
    case = Case(batch=1, seqlen_q=5, lengths=11, mask_mod=odd_keys,
                options={"block_sparse_tensors": blocks})  # fmt: skip
    first = [1, 3, 8, 9, 10]
    assert_rows(probed(case, backend), first, first, range(8), range(8), [])
    causal = Case(batch=1, seqlen_q=5, lengths=11, causal=True,
                  options={"block_sparse_tensors": blocks})  # fmt: skip
    assert_rows(probed(causal, backend), [0, 1, 2, 3], [0, 1, 2, 3], range(8), range(8), [])


def test_gathered_keys_pass_the_mask_mod(backend: str) -> None:
    """A key is seen if it is listed, no matter how often, and the mod shows it."""
    v = torch.arange(9.0, device=DEVICE).view(9, 1, 1).expand(9, 1, 8).contiguous()
    q, k = torch.zeros(3, 2, 8, device=DEVICE), torch.zeros_like(v)
    listed = ints(1, 2, 3, 3, 0, 4, -1, -1, 8, 7, 5, 0).view(3, 4)
    out, lse = attend_varlen(
        backend, q, k, v, cu_seqlens_q=ints(0, 3), cu_seqlens_k=ints(0, 9), max_seqlen_q=3,
        max_seqlen_k=9, gather_kv_indices=listed, mask_mod=odd_keys,
    )  # fmt: skip
    assert_rows((out[..., 0], lse.T.exp()), [1, 3], [], [5, 7])


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_t66_garbage_in_the_page_table(backend: str, page_size: int) -> None:
    """Entries past the used length hold -1 and 2 ** 31 - 1; rows of the table are padded."""
    case = Case(batch=3, seqlen_q=2, lengths=(17, 0, 3), page_size=page_size, capacity=60)
    inputs = make_inputs(case, device=DEVICE)
    table = inputs["page_table"]
    assert not table.is_contiguous()
    assert {int(n) for n in table[1].unique()} == {-1, 2**31 - 1}
    assert_rows(probed(case, backend), *[range(17)] * 2, [], [], *[range(3)] * 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_t67_dead_slots_never_leak(backend: str, bad: float, page_size: int | None) -> None:
    """Bits in unused rows, leftpad rows, spare pages and window-dead keys change nothing."""
    case = Case(batch=3, seqlen_q=2, lengths=(40, 21, 5), leftpad=(3, 0, 4), window=(6, 0),
                page_size=page_size, capacity=48)  # fmt: skip
    inputs = make_inputs(case, device=DEVICE)
    results = []
    for filler in (0.0, bad):
        for name in ("k_cache", "v_cache"):
            cache = inputs[name]
            cache.masked_fill_(~_seen(inputs, case)[..., None, None], filler)
        results.append(attend(backend, **inputs))
    (clean, clean_lse), (out, lse) = results
    assert out.isfinite().all()
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)


def _seen(inputs: dict[str, Any], case: Case) -> Tensor:
    """Slots that some row attends to: the last window[0] + Sq keys of every sequence."""
    seen = torch.zeros(inputs["k_cache"].shape[:2], dtype=torch.bool, device=DEVICE)
    assert isinstance(case.lengths, tuple)
    assert case.leftpad is not None
    for b, (end, pad) in enumerate(zip(case.lengths, case.leftpad, strict=True)):
        for row in range(max(pad, end - 8), end):
            if case.page_size is None:
                seen[b, row] = True
            else:
                page = inputs["page_table"][b, row // case.page_size]
                seen[page, row % case.page_size] = True
    return seen


def test_t67_dead_fp8_slots_and_scales_never_leak(backend: str) -> None:
    case = Case(seqlen_q=2, lengths=(9, 30), page_size=8, cache_dtype=E4M3, descale="token")
    inputs = make_inputs(case, device=DEVICE)
    assert inputs["v_cache"].float().isnan().any()
    assert inputs["v_descale"].isnan().any()
    out, lse = attend(backend, **inputs)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_heads_read_their_group(backend: str) -> None:
    """Query head h reads kv head h // (H / Hk)."""
    inputs = make_inputs(Case(heads=6, kv_heads=3, lengths=(4, 9)), device=DEVICE)
    inputs["v_cache"].copy_(torch.arange(3.0)[:, None].expand_as(inputs["v_cache"]))
    out, _ = attend(backend, **inputs)
    wanted = torch.tensor([0.0, 0, 1, 1, 2, 2], device=DEVICE)
    assert torch.allclose(out[:, 0, :, 0], wanted, atol=1e-6)


def test_inactive_rows_give_nothing(backend: str) -> None:
    """cache_seqlens of -1: out 0 and lse -inf, with a sink too, and nothing is stored."""
    case = Case(
        batch=3, lengths=(-1, 7, -1), new=2, seqlen_q=2, page_size=4, sinks=F32, causal=True
    )
    inputs = make_inputs(case, device=DEVICE)
    before = inputs["k_cache"].isnan().sum()
    out, lse = attend(backend, **inputs)
    assert before - inputs["k_cache"].isnan().sum() == 2 * 2 * 32  # one sequence's new tokens
    assert not out[[0, 2]].any()
    assert (lse[[0, 2]] == -math.inf).all()
    assert lse[1].isfinite().all()


def test_a_choice_of_no_keys_shows_none(backend: str) -> None:
    case = Case(seqlen_q=2, lengths=(5, 3), varlen=True)
    inputs = make_inputs(case, device=DEVICE)
    none = torch.empty(2, 2, 0, dtype=torch.int32, device=DEVICE)
    try:
        out, lse = flash_attn_varlen_func(
            **inputs, gather_kv_indices=none, backend=backend, return_lse=True
        )
    except errors.BackendRefusesError:
        pytest.skip(f"{backend} selects no keys")
    assert not out.any()
    assert (lse == -math.inf).all()

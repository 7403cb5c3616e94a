"""Rotary positions: new key t at base + t; query i at base + i if local, else at base."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, F16, F32, F64, attend, ints
from conftest import DEVICE
from torch import Tensor

import kvattn
from kvattn import errors as E
from kvattn.testing import Case, Inputs, clone_inputs, make_inputs


def turned(x: Tensor, inputs: Inputs, positions: Tensor) -> Tensor:
    """x (tokens, heads, D) at these positions: pairs as complex numbers times e^(i angle)."""
    cos, sin = (inputs[f"rotary_{name}"][positions].double() for name in ("cos", "sin"))
    unit = torch.complex(cos, sin)[:, None]
    half = cos.shape[1]
    part = x[..., : 2 * half].double()
    if inputs["rotary_interleaved"]:
        pairs = torch.complex(part[..., 0::2], part[..., 1::2]) * unit
        new = torch.stack((pairs.real, pairs.imag), -1).flatten(-2)
    else:
        pairs = torch.complex(part[..., :half], part[..., half:]) * unit
        new = torch.cat((pairs.real, pairs.imag), -1)
    return torch.cat((new, x[..., 2 * half :].double()), -1).to(x.dtype)


def assert_rotation(backend: str, case: Case, bases: list[int], local: bool) -> Inputs:
    """The call equals one without rotary on a query and new keys turned by hand."""
    inputs = make_inputs(case, device=DEVICE)
    bare = clone_inputs(inputs)
    for name in ("rotary_cos", "rotary_sin", "rotary_seqlens"):
        bare[name] = None
    q_edges, k_edges = (_edges(inputs, name) for name in ("q", "k"))
    q, k = (bare[name].flatten(0, -3) for name in ("q", "k"))
    for b, base in enumerate(bases):
        rows = slice(q_edges[b], q_edges[b + 1])
        steps = torch.arange(q_edges[b + 1] - q_edges[b], device=DEVICE) * local
        q[rows] = turned(q[rows], inputs, base + steps)
        rows = slice(k_edges[b], k_edges[b + 1])
        steps = torch.arange(k_edges[b + 1] - k_edges[b], device=DEVICE)
        k[rows] = turned(k[rows], inputs, base + steps)
    wanted, wanted_lse = attend(backend, **bare)
    out, lse = attend(backend, **inputs)
    eps = torch.finfo(case.dtype).eps
    tolerance: dict[str, Any] = {"atol": 8 * eps, "rtol": 8 * eps}
    for name in ("k_cache", "v_cache"):
        assert torch.allclose(inputs[name], bare[name], **tolerance, equal_nan=True), name
    assert torch.allclose(out, wanted, **tolerance)
    assert torch.allclose(lse, wanted_lse, atol=max(1e-5, 4 * eps))
    return inputs


def _edges(inputs: Inputs, name: str) -> list[int]:
    edges = inputs.get("cu_seqlens_q" if name == "q" else "cu_seqlens_k_new")
    if edges is not None:
        return [int(n) for n in edges]
    batch, width = inputs[name].shape[:2]
    return [b * width for b in range(batch + 1)]


BASE: dict[str, Any] = {"lengths": (9, 0, 21), "batch": 3, "rotary": 16, "dtype": F64}


@pytest.mark.parametrize(("new", "seqlen_q"), [(2, 5), (5, 2), (3, 3), (1, 4)])
@pytest.mark.parametrize("page_size", [None, 4])
def test_t23_as_many_new_keys_as_queries_or_not(
    backend: str, new: int, seqlen_q: int, page_size: int | None
) -> None:
    """Rotary stands at base + i while the mask stands at i + Sk - Sq."""
    case = Case(new=new, seqlen_q=seqlen_q, causal=True, page_size=page_size, **BASE)
    assert_rotation(backend, case, [9, 0, 21], local=True)


def test_t24_without_a_local_mask_all_queries_stand_at_the_base(backend: str) -> None:
    case = Case(new=4, seqlen_q=4, **BASE)
    assert_rotation(backend, case, [9, 0, 21], local=False)


@pytest.mark.parametrize(
    "mask",
    [
        {"window": (-1, 3)},
        {"window": (3, -1)},
        {"window": (0, None)},
        {"chunk": 4},
        {"causal": True},
    ],
    ids=str,
)
def test_t25_local_masks_let_the_queries_advance(backend: str, mask: dict[str, Any]) -> None:
    assert_rotation(backend, Case(new=4, seqlen_q=4, **mask, **BASE), [9, 0, 21], local=True)


def test_t26_a_window_over_the_whole_cache_is_still_local(backend: str) -> None:
    """FlashAttention-2 and -3 drop such a window first, and their queries stand still."""
    case = Case(new=4, seqlen_q=4, window=(10**6, 10**6), **BASE)
    assert_rotation(backend, case, [9, 0, 21], local=True)


@pytest.mark.parametrize("page_size", [None, 4])
def test_t27_leftpad_is_not_subtracted(backend: str, page_size: int | None) -> None:
    case = Case(new=2, seqlen_q=2, causal=True, leftpad=(3, 0, 20), page_size=page_size, **BASE)
    assert_rotation(backend, case, [9, 0, 21], local=True)


@pytest.mark.parametrize("bases", [(4, 0, 10), (50, 7, 22)])
@pytest.mark.parametrize("causal", [False, True])
def test_t28_rotary_seqlens_replace_the_base(
    backend: str, bases: tuple[int, ...], causal: bool
) -> None:
    """Below and above the length; the tokens are stored behind the length all the same."""
    case = Case(new=3, seqlen_q=3, causal=causal, rotary_base=bases, **BASE)
    inputs = assert_rotation(backend, case, list(bases), local=causal)
    for b, length in enumerate((9, 0, 21)):
        assert torch.equal(inputs["v_cache"][b, length : length + 3], inputs["v"][b])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("rotary", "dim"), [(16, 128), (128, 128), (2, 32), (6, 20)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_t29_partial_rotary_in_both_pairings(
    backend: str, interleaved: bool, rotary: int, dim: int, dtype: torch.dtype
) -> None:
    for tables in (dtype, F32):
        case = Case(new=2, seqlen_q=2, causal=True, rotary_interleaved=interleaved, dim=dim,
                    rotary_dtype=tables, **{**BASE, "rotary": rotary, "dtype": dtype})  # fmt: skip
        inputs = assert_rotation(backend, case, [9, 0, 21], local=True)
        passed = slice(rotary, None)
        assert torch.equal(inputs["k_cache"][0, 9:11, :, passed], inputs["k"][0, :, :, passed])


def test_t30_the_last_table_row_and_one_past_it(backend: str) -> None:
    case = Case(batch=1, lengths=6, new=2, seqlen_q=3, causal=True, rotary=8)
    inputs = make_inputs(case, device=DEVICE)
    assert inputs["rotary_cos"].shape[0] == 9  # base 6, three queries
    for name in ("rotary_cos", "rotary_sin"):
        short = {**clone_inputs(inputs), name: inputs[name][:8]}
        short |= {other: inputs[other][:8] for other in ("rotary_cos", "rotary_sin")}
        before = clone_inputs(short)
        with kvattn.checked(), pytest.raises(E.RotaryTableShortError) as caught:
            kvattn.flash_attn_with_kvcache(**short, backend=backend)
        assert caught.value.argument == "rotary_cos"
        assert "position 8" in str(caught.value)
        assert torch.equal(short["v_cache"].isnan(), before["v_cache"].isnan())
    attend(backend, **inputs)
    still = {**make_inputs(case, device=DEVICE), "causal": False}  # queries stay at row 6
    still |= {name: still[name][:8] for name in ("rotary_cos", "rotary_sin")}
    attend(backend, **still)


@pytest.mark.parametrize("new", [2, (2, 4, 1)])
def test_t31_t32_rotary_restarts_with_every_sequence(backend: str, new: Any) -> None:
    case = Case(new=new, seqlen_q=(3, 0, 4), causal=True, **BASE)
    assert_rotation(backend, case, [9, 0, 21], local=True)


def test_t31_padded_queries_and_ragged_new_keys(backend: str) -> None:
    case = Case(new=(2, 0, 5), seqlen_q=3, window=(2, 0), page_size=4, **BASE)
    assert_rotation(backend, case, [9, 0, 21], local=True)


def test_slots_count_from_the_length_less_the_new_tokens(backend: str) -> None:
    case = Case(new=2, seqlen_q=2, causal=True, by_slot=True, page_size=4, **BASE)
    assert_rotation(backend, case, [9, 0, 21], local=True)


def test_apply_rotary_is_the_same_rotation() -> None:
    inputs = make_inputs(Case(new=2, seqlen_q=2, causal=True, **BASE), device=DEVICE)
    tables = inputs["rotary_cos"], inputs["rotary_sin"]
    x, lengths = inputs["k"], ints(9, 0, 21)
    wanted = torch.stack(
        [turned(x[b], inputs, int(lengths[b]) + torch.arange(2, device=DEVICE)) for b in range(3)]
    )
    padded = kvattn.apply_rotary(x, *tables, seqlen_offsets=lengths)
    assert torch.allclose(padded, wanted)
    flat = x.flatten(0, 1)
    packed = kvattn.apply_rotary(flat, *tables, seqlen_offsets=lengths, cu_seqlens=ints(0, 2, 4, 6))
    assert torch.equal(packed, padded.flatten(0, 1))
    positions = torch.tensor([9, 10, 0, 1, 21, 22], device=DEVICE)
    assert torch.equal(kvattn.apply_rotary(flat, *tables, positions=positions), packed)
    same = kvattn.apply_rotary(x, *tables, seqlen_offsets=lengths, inplace=True)
    assert same is x
    assert torch.equal(x, padded)

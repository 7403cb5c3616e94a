"""Logits and their edits, against the formula written out for one dense sequence in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, F16, F32, attend, attend_varlen
from conftest import DEVICE
from torch import Tensor

from kvattn.testing import Case, Inputs, make_inputs

Edit = Callable[[Tensor], Tensor]


def formula(
    inputs: Inputs, edit: Edit = lambda s: s, scale: float | None = None, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out [1, Sq, H, Dv], lse [1, H, Sq]) of a batch of one: scale, edit, mask, softmax."""
    q, k, v = (inputs[name][0].double() for name in ("q", "k_cache", "v_cache"))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = edit(s)
    if keep is not None:
        s = s.masked_fill(~keep, -math.inf)
    if inputs.get("sinks") is not None:
        sink = inputs["sinks"].double()[:, None, None].expand(-1, s.shape[1], 1)
        p, lse = torch.cat((s, sink), -1).softmax(-1)[..., :-1], torch.cat((s, sink), -1)
    else:
        p, lse = s.softmax(-1), s
    return torch.einsum("hqk,khd->qhd", p, v)[None], lse.logsumexp(-1)[None]


def assert_close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    (out, lse), (exact, exact_lse) = found, wanted
    assert torch.allclose(out.double(), exact, atol=3e-6, rtol=3e-5)
    assert torch.allclose(lse.double(), exact_lse, atol=2e-5, rtol=2e-6)


def distances(sq: int, sk: int) -> Tensor:
    """p_i - j with p_i = i + Sk - Sq."""
    i, j = (torch.arange(n, device=DEVICE, dtype=torch.float64) for n in (sq, sk))
    return i[:, None] + sk - sq - j


SQ, SK = 4, 9
ONE: dict[str, Any] = {"batch": 1, "seqlen_q": SQ, "lengths": SK}


def one(**more: Any) -> Inputs:
    return make_inputs(Case(**{**ONE, **more}), device=DEVICE)


@pytest.mark.parametrize("seqlen_q", [1, 4, 40])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_t13_infinite_and_extreme_sinks(backend: str, seqlen_q: int, dtype: torch.dtype) -> None:
    inputs = one(seqlen_q=seqlen_q, sinks=dtype)
    without, lse_without = attend(backend, **{**inputs, "sinks": None})
    inputs["sinks"].copy_(torch.tensor([-math.inf, math.inf, -3e4, 3e4]))
    out, lse = attend(backend, **inputs)
    assert not out.isnan().any()
    assert torch.allclose(out[:, :, 0], without[:, :, 0], atol=1e-6)  # -inf changes nothing
    assert torch.allclose(lse[:, 0], lse_without[:, 0], atol=1e-6)
    assert not out[:, :, 1].any()
    assert (lse[:, 1] == math.inf).all()
    assert torch.allclose(out[:, :, 2], without[:, :, 2], atol=1e-6)
    assert out[:, :, 3].abs().max() == 0
    assert torch.equal(lse[:, 3], inputs["sinks"][3].float().expand_as(lse[:, 3]))


@pytest.mark.parametrize("size", [1e4, 1e6])
@pytest.mark.parametrize("sign", [1, -1])
def test_t13_very_large_logits(backend: str, size: float, sign: int) -> None:
    """All logits near +-size: the maximum is taken off first, no sentinel is in the way."""
    inputs = one(dim=32)
    inputs["q"].fill_(sign * size)
    inputs["k_cache"].fill_(1.0)
    out, lse = attend(backend, **inputs)
    mean = inputs["v_cache"].mean(1).repeat_interleave(2, 1)
    assert torch.allclose(out, mean[:, None].expand_as(out), atol=1e-5)
    wanted = sign * size * 32**0.5 + math.log(SK)
    assert torch.allclose(lse, torch.full_like(lse, wanted), rtol=1e-6)


@pytest.mark.parametrize("num_splits", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("page_size", [None, 16])
def test_t14_a_sink_counts_once(backend: str, num_splits: int, page_size: int | None) -> None:
    """Equal logits of 0 over n keys and a sink of log(n): half of the mass goes to the sink."""
    inputs = one(seqlen_q=1, lengths=300, sinks=F32, page_size=page_size)
    inputs["q"].zero_()
    inputs["sinks"].fill_(math.log(300))
    bare, lse_bare = attend(backend, **{**inputs, "sinks": None}, num_splits=num_splits)
    out, lse = attend(backend, **inputs, num_splits=num_splits)
    assert torch.allclose(out, bare / 2, atol=1e-6)
    assert torch.allclose(lse, lse_bare + math.log(2), atol=1e-5)


@pytest.mark.parametrize("cap", [1e-3, 0.5, 30.0, 1e6])
@pytest.mark.parametrize("causal", [False, True])
def test_t42_tiny_and_huge_softcap(backend: str, cap: float, causal: bool) -> None:
    """Masked keys stay masked: capping comes before the mask."""
    inputs = one(softcap=cap, causal=causal, query_scale=4.0)
    keep = distances(SQ, SK) >= 0 if causal else None
    assert_close(
        attend(backend, **inputs), formula(inputs, lambda s: cap * (s / cap).tanh(), keep=keep)
    )


def test_t43_the_order_of_the_edits(backend: str) -> None:
    """Scale, then rel_bias, score_mod, softcap, slopes, masks, sinks; each pair and all."""
    bias = {"rel_bias": SK}
    mod = {"score_mod": lambda s, b, h, i, j: s * 1.5 + 0.25 * j}
    cap = {"softcap": 2.0}
    slopes = {"alibi": "heads"}
    rest: dict[str, Any] = {"sinks": F32, "causal": True, "scale": 0.7}
    j = torch.arange(SK, device=DEVICE, dtype=torch.float64)
    distance = distances(SQ, SK)
    for more in ({**bias, **cap}, {**mod, **cap}, {**cap, **slopes}, {**bias, **mod},
                 {**bias, **mod, **cap, **slopes, **rest}):  # fmt: skip
        inputs = one(query_scale=3.0, **more)
        scale: Any = more.get("scale")

        def edit(s: Tensor, more: dict[str, Any] = more, inputs: Inputs = inputs) -> Tensor:
            if "rel_bias" in more:
                last = inputs["rel_bias"][0].double().transpose(0, 1)  # [H, Sq, E]
                at = distance if more.get("causal") else (SK - 1 - j).expand(SQ, SK)
                picked = last.gather(2, at.clamp(0, SK - 1).long().expand_as(s))
                s = s + torch.where((at >= 0) & (at < SK), picked, 0.0)
            if "score_mod" in more:
                s = s * 1.5 + 0.25 * j
            if "softcap" in more:
                s = 2.0 * torch.tanh(s / 2.0)
            if "alibi" in more:
                s = s - inputs["alibi_slopes"].double()[:, None, None] * distance.abs()
            return s

        keep = distance >= 0 if more.get("causal") else None
        assert_close(attend(backend, **inputs), formula(inputs, edit, scale, keep))


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-6, 3.0])
def test_t44_odd_softmax_scales(backend: str, scale: float) -> None:
    inputs = one(scale=scale, sinks=F32)
    assert_close(attend(backend, **inputs), formula(inputs, scale=scale))
    both = one(scale=scale, rel_bias=SK, softcap=1.5)
    bias = (
        both["rel_bias"][0].double().transpose(0, 1).flip(-1)
    )  # index Sk - 1 - j: unbounded right

    def edit(s: Tensor) -> Tensor:
        return 1.5 * torch.tanh((s + bias) / 1.5)

    assert_close(attend(backend, **both), formula(both, edit, scale))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 4, 40])
def test_t45_slopes_by_head_and_by_batch(backend: str, causal: bool, seqlen_q: int) -> None:
    """slope * |p - j|, also in the lse: FlashAttention-2's causal lse is larger by slope * p."""
    inputs = one(alibi="heads", causal=causal, seqlen_q=seqlen_q, lengths=50)
    distance = distances(seqlen_q, 50)
    keep = distance >= 0 if causal else None

    def edit(s: Tensor) -> Tensor:
        return s - inputs["alibi_slopes"].double()[:, None, None] * distance.abs()

    wanted = formula(inputs, edit, keep=keep)
    assert_close(attend(backend, **inputs), wanted)
    by_batch = {**inputs, "alibi_slopes": inputs["alibi_slopes"][None]}
    assert_close(attend(backend, **by_batch), wanted)
    two = make_inputs(Case(lengths=(9, 30), alibi="batch", causal=causal), device=DEVICE)
    out, lse = attend(backend, **two)
    for b in range(2):
        alone = {
            name: two[name][b : b + 1] for name in ("q", "k_cache", "v_cache", "cache_seqlens")
        }
        alone |= {"alibi_slopes": two["alibi_slopes"][b], "causal": causal}
        single, single_lse = attend(backend, **alone)
        assert torch.allclose(out[b], single[0], atol=1e-6)
        assert torch.allclose(lse[b], single_lse[0], atol=1e-5)


@pytest.mark.parametrize("width", [1, 5, SK, 40, 130])
@pytest.mark.parametrize("window", [(-1, 0), (-1, 3), (2, 3), (-1, -1)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_t51_rel_bias_by_distance(
    backend: str, width: int, window: tuple[int, int], dtype: torch.dtype
) -> None:
    """Index p + right - j, or Sk - 1 - j if the right is open; 0 beyond E, never a mask."""
    inputs = one(rel_bias=width, window=window)
    inputs["rel_bias"] = inputs["rel_bias"].to(dtype)
    left, right = window
    distance = distances(SQ, SK)
    j = torch.arange(SK, device=DEVICE, dtype=torch.float64)
    at = distance + right if right >= 0 else (SK - 1 - j).expand(SQ, SK)
    bias = inputs["rel_bias"][0].double().transpose(0, 1)
    keep = torch.ones(SQ, SK, dtype=torch.bool, device=DEVICE)
    keep &= (distance <= left) | (left < 0)
    keep &= (distance >= -right) | (right < 0)

    def edit(s: Tensor) -> Tensor:
        picked = bias.gather(2, at.clamp(0, width - 1).long().expand_as(s))
        return s + torch.where((at >= 0) & (at < width), picked, 0.0)

    assert_close(attend(backend, **inputs), formula(inputs, edit, keep=keep))


def test_t52_a_reused_prep_cache_is_never_stale(backend: str) -> None:
    """The dict may be shared between layers; refilling cu_seqlens_q in place stays correct."""
    case = Case(batch=3, seqlen_q=(1, 5, 3), lengths=(9, 9, 9), rel_bias=4, causal=True)
    inputs = make_inputs(case, device=DEVICE)
    shared: dict[Any, Any] = {}
    for edges in ((0, 1, 6, 9), (0, 4, 4, 9), (0, 0, 8, 9)):
        inputs["cu_seqlens_q"].copy_(torch.tensor(edges))
        fresh, fresh_lse = attend(backend, **inputs)
        out, lse = attend(backend, **inputs, rel_bias_prep_cache=shared)
        assert torch.equal(out, fresh)
        assert torch.equal(lse, fresh_lse)


def test_t57_both_signatures_of_score_mod(backend: str) -> None:
    """The seven- and eight-argument forms see the same indices as the five-argument one."""
    weights = torch.randn(4, device=DEVICE)

    def captured(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + weights[h] * (i - 2 * j) + b

    def with_aux(
        s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, info: Any, aux: Any
    ) -> Tensor:
        return s + aux[0][h] * (i - 2 * j) + b

    def with_scalars(
        s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, info: Any, aux: Any, scalars: Any
    ) -> Tensor:
        return s + aux[0][h] * (i - 2 * j) + b

    inputs = make_inputs(Case(seqlen_q=3, lengths=(9, 4), page_size=4, causal=True), device=DEVICE)
    five, _ = attend(backend, **{**inputs, "score_mod": captured})
    for mod in (with_aux, with_scalars):
        seven, _ = attend(backend, **{**inputs, "score_mod": mod}, aux_tensors=[weights])
        assert torch.equal(five, seven)
    weights.mul_(-1)  # updated between calls
    again, _ = attend(backend, **{**inputs, "score_mod": with_aux}, aux_tensors=[weights])
    assert not torch.allclose(again, five, atol=1e-3)


def test_t57_mods_see_query_heads_and_local_indices(backend: str) -> None:
    """h is the query head; q_idx and kv_idx restart per sequence; seqlen_info has the rest."""
    if backend not in ("reference", "cpu"):
        pytest.skip("a mod that looks at its arguments in Python cannot become a kernel")
    seen = []

    def spy(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, info: Any, aux: Any) -> Tensor:
        place = (info.offset_q, info.offset_k, info.seqlen_q, info.seqlen_k)
        seen.append(
            (int(b), h.flatten().tolist(), i.flatten().tolist(), j.flatten().tolist(), place)
        )
        return s

    mods = {"score_mod": spy, "aux_tensors": []}
    case = Case(batch=2, seqlen_q=(2, 1), lengths=(3, 4), packed=(5, 6), varlen=True)
    attend_varlen(backend, **{**make_inputs(case, device=DEVICE), **mods})
    assert seen[0][1] == [0, 1, 2, 3]
    wanted = {(0, (0, 1), (0, 1, 2), (0, 0, 2, 3)), (1, (0,), (0, 1, 2, 3), (2, 5, 1, 4))}
    assert {(b, tuple(i), tuple(j), place) for b, _, i, j, place in seen} == wanted
    seen.clear()
    padded = Case(batch=1, seqlen_q=2, lengths=9, leftpad=(6,), page_size=4)
    attend(backend, **{**make_inputs(padded, device=DEVICE), **mods})
    assert seen[-1][2:] == ([0, 1], [0, 1, 2], (0, 0, 2, 3))


def test_qv_adds_its_product_to_the_logits(backend: str) -> None:
    """T54's formula: scale * (q . k + qv . v), the scale (D + Dv) ** -0.5 by default."""
    choices: list[dict[str, Any]] = [{}, {"softcap": 1.0}, {"scale": 0.3}]
    for more in choices:
        inputs = one(qv=True, dim=16, dim_v=48, **more)
        qv, v = inputs["qv"][0].double(), inputs["v_cache"][0].double().repeat_interleave(2, 1)
        scale = more.get("scale", 64**-0.5)
        second = scale * torch.einsum("qhd,khd->hqk", qv, v)

        def edit(s: Tensor, second: Tensor = second, capped: bool = "softcap" in more) -> Tensor:
            return torch.tanh(s + second) if capped else s + second

        assert_close(attend(backend, **inputs), formula(inputs, edit, scale))


def test_scale_defaults_to_the_head_dim(backend: str) -> None:
    inputs = one(dim=20)
    assert_close(attend(backend, **inputs), formula(inputs, scale=20**-0.5))

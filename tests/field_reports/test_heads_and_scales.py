"""Field reports: ratios of heads, head dims, MLA, quantised caches; lse and merging; compiling."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import field_report
import pytest
import torch
from field_report import INF, NAN, assert_right, attend, ints, ramp, report
from torch import Tensor

import kvattn
from kvattn import errors as E
from kvattn import quant

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Heads ----------------------------------------------------------------------------------------


@report("H1")
@pytest.mark.parametrize(("heads", "kv_heads"), [(40, 8), (24, 4), (28, 4)])
@pytest.mark.parametrize("dim", [128, 256])
def test_groups_of_five_six_and_seven(
    heads: int, kv_heads: int, dim: int, backend: str | None
) -> None:
    """Only some sizes had been compiled (flashinfer-ai/flashinfer#996)."""
    k = torch.randn(1, 9, kv_heads, dim)
    v = torch.arange(float(kv_heads))[None, None, :, None].expand(1, 9, kv_heads, dim)
    out = attend(torch.randn(1, 1, heads, dim), k, v.contiguous(), backend=backend)
    group = torch.arange(heads) // (heads // kv_heads)
    torch.testing.assert_close(out[0, 0, :, 0], group.float(), rtol=0, atol=1e-5)


@report("H3")
def test_a_group_of_six_over_many_keys(backend: str | None) -> None:
    """The ratio had to be a power of two (pytorch/pytorch#151359)."""
    q, (k, v) = torch.randn(1, 1, 12, 16), torch.randn(2, 1, 4096, 2, 16)
    assert_right(backend, {"q": q, "k_cache": k, "v_cache": v})


@report("H7")
@pytest.mark.parametrize(("heads", "kv_heads"), [(33, 2), (3, 2)])
def test_heads_that_do_not_divide(heads: int, kv_heads: int, backend: str | None) -> None:
    """Heads stayed unwritten (fla-org/flash-linear-attention#1029)."""
    cache = torch.randn(1, 4, kv_heads, 8)
    with pytest.raises(E.HeadRatioError, match=rf"{heads}.*{kv_heads}"):
        attend(torch.randn(1, 1, heads, 8), cache, cache, backend=backend)


def fenced(*shape: int, behind: int) -> Tensor:
    """Random rows, each with NaN behind its last channel."""
    wide = torch.full((*shape[:-1], shape[-1] + behind), NAN)
    wide[..., : shape[-1]] = torch.randn(shape)
    return wide[..., : shape[-1]]


@report("H8")
def test_nothing_is_read_behind_a_head(backend: str | None) -> None:
    """Head dim 80 failed where powers of two were expected (vllm-project/vllm#4127)."""
    q, k, v = (fenced(1, rows, 32, 80, behind=48) for rows in (2, 9, 9))
    assert_right(backend, {"q": q, "k_cache": k, "v_cache": v, "causal": True})


@report("H9")
def test_all_channels_count(backend: str | None) -> None:
    """Only the first 64 of 128 were used (triton-lang/triton#621)."""
    q, k, v = torch.randn(1, 1, 2, 128), torch.randn(1, 9, 1, 128), torch.randn(1, 9, 1, 128)
    q[..., :64] = k[..., :64] = 0
    assert_right(backend, {"q": q, "k_cache": k, "v_cache": v})
    out = attend(q, k, v, backend=backend)
    assert not torch.allclose(out[0, 0, 0], v[0, :, 0].mean(0), atol=1e-2)


@report("H11")
@pytest.mark.parametrize("dim", [224, 56, 100])
def test_unusual_head_dims(dim: int, backend: str | None) -> None:
    """One of them was refused after a successful build (flashinfer-ai/flashinfer#528)."""
    q, (k, v) = torch.randn(1, 3, 4, dim), torch.randn(2, 1, 17, 2, dim)
    assert_right(backend, {"q": q, "k_cache": k, "v_cache": v, "causal": True})


@report("H12")
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (16, 1)])
def test_head_dim_512_beside_windowed_256(heads: int, kv_heads: int, backend: str | None) -> None:
    """It forced whole models off the fast path (Dao-AILab/flash-attention#2427)."""
    for dim, window in ((512, (-1, -1)), (256, (15, 0))):
        q, (k, v) = torch.randn(1, 2, heads, dim), torch.randn(2, 1, 33, kv_heads, dim)
        call = {"q": q, "k_cache": k, "v_cache": v, "causal": True, "window_size": window}
        assert_right(backend, call)


@report("H13")
@pytest.mark.parametrize("heads", [4, 8, 16, 128])
def test_latent_attention_in_one_tensor_or_two(heads: int, backend: str | None) -> None:
    """One 576-wide query was refused (Dao-AILab/flash-attention#1471)."""
    q, latent = torch.randn(2, 1, heads, 576) / 8, torch.randn(2, 7, 1, 576)
    q, latent = q.bfloat16(), latent.bfloat16()
    call = {"cache_seqlens": ints(7, 4), "causal": True, "softmax_scale": 0.1, "backend": backend}
    values = latent[..., :512]
    whole = attend(q, latent, values, **call)
    parts = attend(q[..., 512:], latent[..., 512:], values, qv=q[..., :512], **call)
    torch.testing.assert_close(whole, parts, rtol=2**-7, atol=2**-8)


# Quantised caches -----------------------------------------------------------------------------


@report("Q1")
def test_scales_per_head_are_applied(backend: str | None) -> None:
    """Calibrated scales were accepted and dropped (vllm-project/vllm#51363)."""
    q, (k, v) = torch.randn(1, 2, 4, 16), torch.randn(2, 1, 9, 2, 16).to(E4M3)
    k_descale, v_descale = torch.tensor([[[0.5, 2.0]], [[2.0, 0.25]]])
    scales = {"k_descale": k_descale, "v_descale": v_descale}
    out = attend(q, k, v, **scales, causal=True, backend=backend)
    wide = (x.float() * scale[..., None] for x, scale in ((k, k_descale), (v, v_descale)))
    expected = attend(q, *wide, causal=True, backend="reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@report("Q2")
def test_every_form_of_a_scale(backend: str | None) -> None:
    """Its batch was derived from another tensor (sgl-project/sglang#37785)."""
    q, (k, v) = torch.randn(5, 4, 16), torch.randn(2, 3, 9, 2, 16).to(E4M3)
    call = {"cu_seqlens_q": ints(0, 1, 1, 5), "max_seqlen_q": 4, "cache_seqlens": ints(4, 9, 7)}
    forms: list[Any] = [0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.full((3, 2), 0.5)]
    forms += [torch.full((2,), 0.5), torch.tensor([[0.5]]).expand(3, 2), torch.full((1, 2), 0.5)]
    outs = [attend(q, k, v, k_descale=f, v_descale=f, **call, backend=backend) for f in forms]
    assert all(torch.equal(out, outs[0]) for out in outs)
    for wrong in (torch.full((5, 2), 0.5), torch.full((3, 3), 0.5)):
        with pytest.raises(E.DescaleError, match=r"k_descale.*\(3, 2\)"):
            attend(q, k, v, k_descale=wrong, **call, backend=backend)


@report("Q3", every_backend=False)
def test_every_code_of_e4m3_and_back() -> None:
    """A conversion lost NaN and read it as 480 (vllm-project/vllm#49077)."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    values = codes.float()
    assert values.isnan().sum() == 2 and values[[0x7F, 0xFF]].isnan().all()
    assert values.abs().nan_to_num(0).max() == 448
    back = quant.cast(values, E4M3)
    nan = values.isnan()
    assert torch.equal(back.view(torch.uint8)[~nan], codes.view(torch.uint8)[~nan])
    assert back.float()[nan].isnan().all()
    edges = torch.tensor(
        [NAN, INF, -INF, 448, 449, 464, 465, 1e4, -1e4, 2**-9, 2**-10, 0.75 * 2**-9]
    )
    wanted = [448, -448, 448, 448, 448, 448, 448, -448, 2**-9, 0, 2**-9]
    stored = quant.cast(edges, E4M3).float()
    assert stored[0].isnan() and stored[1:].tolist() == wanted


@report("Q4", every_backend=False)
def test_a_measured_scale_and_what_scale_one_costs() -> None:
    """Scale 1.0 ruined a model with a wide range of K (vllm-project/vllm#11906)."""
    keys = torch.randn(64, 2, 16)
    keys[:, 0, 3] = torch.linspace(-2000, 2000, 64)
    scales, report = quant.measure_scales(keys, E4M3)
    assert (report.clipped, report.amax) == (int((keys.abs() > 464).sum()), 2000.0)
    assert scales[0] == pytest.approx(2000 / 448) and scales[1] < 1

    def restored(scale: Tensor) -> Tensor:
        cache = torch.zeros(2, 1, 64, 2, 16).to(E4M3)
        new = keys[None]
        scales: Any = {"k_descale": scale, "v_descale": scale}
        kvattn.append_kv(new, new, *cache, cache_seqlens=0, backend="cpu", **scales)
        return cache[0, 0].float() * scale[:, None]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = restored(scales)
    normal = keys.abs() / scales[:, None] >= 2**-6
    error = (found - keys).abs()
    assert (error <= keys.abs() * 0.0625)[normal].all()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            assert restored(torch.ones(2)).abs().max() == 448
    assert [w.category for w in said] == [quant.ClippingWarning] * len(said) and len(said) == 1


# lse and merging ------------------------------------------------------------------------------


def part(value: float, lse: float, *shape: int) -> tuple[Tensor, Tensor]:
    """One partial result of (B, S, H, D) that is the same everywhere."""
    count, rows, heads, _ = shape
    return torch.full(shape, value), torch.full((count, heads, rows), lse)


def merged(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return kvattn.merge_states([out for out, _ in parts], [lse for _, lse in parts])


@report("L1", every_backend=False)
def test_merging_empty_states() -> None:
    """Two of them gave NaN (flashinfer-ai/flashinfer#4051)."""
    shape = (1, 1, 1, 64)
    empty = part(0.0, -INF, *shape)
    out, lse = kvattn.merge_states([empty[0].half()] * 2, [empty[1]] * 2)
    assert out.dtype == torch.float16 and (out == 0).all() and (lse == -INF).all()
    out, lse = merged(part(NAN, -INF, *shape), part(3.5, math.log(2), *shape))
    assert (out == 3.5).all() and lse.item() == pytest.approx(math.log(2))


@report("L2", every_backend=False)
@pytest.mark.parametrize("dim", [64, 128])
def test_both_marks_of_an_empty_row(dim: int) -> None:
    """Rows empty on both sides gave NaN; some mark them +inf (vllm-project/vllm#39148)."""
    outs, lses = torch.randn(2, 1, 40, 2, dim), torch.randn(2, 1, 2, 40)
    lses[:, :, :, :10], lses[:, :, :, 10:14] = -INF, INF
    outs[:, :, :14] = NAN
    out, lse = kvattn.merge_states(list(outs), list(lses))
    assert (out[:, :14] == 0).all() and (lse[..., :14] == -INF).all()
    assert out[:, 14:].isfinite().all() and lse[..., 14:].isfinite().all()
    out, lse = merged(part(NAN, INF, 1, 1, 1, dim), part(3.5, math.log(2), 1, 1, 1, dim))
    assert (out == 3.5).all() and lse.item() == pytest.approx(0.6931, abs=1e-4)


@report("L3")
@pytest.mark.parametrize("splits", [0, 1, 2, 4])
def test_the_lse_of_a_row_without_keys(splits: int, backend: str | None) -> None:
    """+inf, -inf and 0 are all in the wild (deepseek-ai/FlashMLA#77)."""
    found = field_report.probe(backend, 2, sq=5, causal=True, num_splits=splits)
    assert found.lses[:3] == [-INF] * 3
    assert found.lses[3:] == pytest.approx([0.0, math.log(2)])


@report("L4")
def test_the_lse_is_natural(backend: str | None) -> None:
    """A mix of bases mis-weights in silence (flashinfer-ai/flashinfer#2113)."""
    q, k, v = torch.zeros(1, 1, 1, 4), torch.randn(1, 5, 1, 4), ramp(1, 5)
    call = {"return_softmax_lse": True, "backend": backend}
    assert attend(q, k, v, **call)[1].item() == pytest.approx(1.609438)
    out, lse = merged(attend(q, k[:, :3], v[:, :3], **call), attend(q, k[:, 3:], v[:, 3:], **call))
    assert out[..., 0].item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(1.609438)


@report("L5", every_backend=False)
def test_merging_strided_lses() -> None:
    """A transposed lse was read as if contiguous (vllm-project/vllm#22003)."""
    outs, lses = torch.randn(2, 12, 6, 8), torch.randn(2, 6, 12)
    expected = kvattn.merge_states(list(outs), list(lses))
    transposed = [lse.T.contiguous().T for lse in lses]
    sparse = [torch.stack((lse, lse + 9), -1).flatten(1)[:, ::2] for lse in lses]
    for views in (transposed, sparse):
        assert not views[0].is_contiguous()
        found = kvattn.merge_states(list(outs), views)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# torch.compile --------------------------------------------------------------------------------


@report("G6")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_append_and_attend_in_one_graph(compiler: str, backend: str | None) -> None:
    """The call broke the graph, or its cache was taken as read-only (pytorch/pytorch#120441)."""

    def step(q: Tensor, caches: Tensor, k: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        call: dict[str, Any] = {"cache_seqlens": lengths, "causal": True, "backend": backend}
        out = kvattn.flash_attn_with_kvcache(q, caches[0], caches[1], k, -k, **call)
        assert isinstance(out, Tensor)
        return out, caches[:, :, 3]

    q, caches, k = torch.randn(1, 1, 2, 8), torch.randn(2, 1, 6, 1, 8), torch.randn(1, 1, 1, 8)
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    out, token = compiled(q, caches, k, ints(3))
    assert torch.equal(token[0], k[0]) and torch.equal(token[1], -k[0])
    torch.testing.assert_close(out, step(q, caches, k, ints(3))[0], rtol=0, atol=1e-6)


# The list -------------------------------------------------------------------------------------

# Reports about Transformers are tested with its integration: E2, E3, R4.
REPORTS = {
    "N": [1, 3, 4, 5, 6, 7, 9, 10, 12, 14, 15, 16, 17, 19],
    "V": [1, 3, 4, 5],
    "L": [1, 2, 3, 4, 5],
    "S": [5],
    "P": [1, 2, 3, 4, 5, 6, 10, 11, 12, 13, 14, 15],
    "X": [1, 3, 4, 5, 6, 7],
    "M": [1, 2, 3, 4, 5, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19, 20],
    "R": [1, 2, 3, 6],
    "H": [1, 3, 7, 8, 9, 11, 12, 13],
    "Q": [1, 2, 3, 4],
    "D": [7],
    "G": [6],
    "F": [2, 3],
    "E": [8],
}


def test_every_report_has_its_test() -> None:
    """Every report that a CPU can show is claimed by one of these files."""
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    claimed = re.findall(r'^@report\("(\w+)"', "\n".join(texts), re.MULTILINE)
    wanted = [f"{topic}{number}" for topic, numbers in REPORTS.items() for number in numbers]
    assert sorted(claimed) == sorted(wanted)

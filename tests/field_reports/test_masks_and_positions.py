"""Field reports: masks, their alignment, biases, sinks, left padding, rotary embedding, mods."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from field_report import (
    BACKENDS,
    assert_right,
    attend,
    attend_varlen,
    check,
    ints,
    page_table,
    paginate,
    probe,
    ramp,
    report,
    seen,
)
from torch import Tensor

import kvattn
from kvattn import errors as E

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu

# Alignment and windows ------------------------------------------------------------------------


@report("M1")
@pytest.mark.parametrize(
    ("causal", "mean", "count"), [(True, [1.5, 2.0], [4, 5]), (False, [2.0, 2.0], [5, 5])]
)
def test_several_new_tokens_behind_cached_ones(
    causal: bool, mean: list[float], count: list[int], backend: str | None
) -> None:
    """They did not match a reference (Dao-AILab/flash-attention#1402)."""
    v_cache = ramp(1, 8)
    v, v_cache[:, 3:] = v_cache[:, 3:5].clone(), -1.0
    new = {"k": torch.randn(1, 2, 1, 4), "v": v}
    caches = {"k_cache": torch.randn(1, 8, 1, 4), "v_cache": v_cache}
    check(probe(backend, 3, sq=2, causal=causal, **new, **caches), mean, count)


@report("M2")
def test_causal_is_aligned_to_the_last_key(backend: str | None) -> None:
    """Top-left alignment shows a single query the first key only (pytorch/pytorch#144858)."""
    check(probe(backend, 7, causal=True), [3.0], [7])
    check(probe(backend, 7, sq=3, causal=True), [2.0, 2.5, 3.0], [5, 6, 7])


@report("M3")
def test_a_window_of_w_tokens_reaches_w_minus_one_back(backend: str | None) -> None:
    """Handing W over as the left bound sees one key too many (huggingface/transformers#39408)."""
    width = 4
    check(probe(backend, 10, window_size=(width - 1, 0)), [7.5], [4])
    check(probe(backend, 10, window_size=(width, 0)), [7.0], [5])


@report("M4")
def test_a_window_holds_for_a_single_query(backend: str | None) -> None:
    """A fallback dropped it there (karpathy/nanochat#452)."""
    check(probe(backend, 10, window_size=(3, 0)), [7.5], [4])
    check(probe(backend, 10, sq=2, window_size=(3, 0)), [6.5, 7.5], [4, 4])


@report("M5")
def test_a_two_sided_window_over_few_keys(backend: str | None) -> None:
    """Rows before the first key looked like a bug (Dao-AILab/flash-attention#2199)."""
    found = probe(backend, 2, sq=9, window_size=(1, 2))
    check(found, [0] * 5 + [0.0, 0.5, 0.5, 0.5], [0] * 5 + [1, 2, 2, 2])


@report("M7")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(-1, 0), (None, 0), (-1, -1), (None, None)])
def test_both_spellings_of_an_open_side(window: Any, causal: bool, backend: str | None) -> None:
    """The sentinel -1 was computed with as a number (NVIDIA/TransformerEngine#3532)."""
    found = probe(backend, 4, sq=4, window_size=window, causal=causal)
    if causal or window[1] == 0:
        check(found, [0.0, 0.5, 1.0, 1.5], [1, 2, 3, 4])
    else:
        check(found, [1.5] * 4, [4] * 4)


@report("M9")
@pytest.mark.parametrize("window", [(-1, -3), (-2, 0)])
def test_other_negative_bounds_are_errors(window: Any, backend: str | None) -> None:
    """Every negative bound meant an open side (Dao-AILab/flash-attention#1116)."""
    with pytest.raises(E.WindowSizeError, match=r"-1.*None"):
        probe(backend, 4, window_size=window)


@report("M10")
def test_a_bound_of_zero_is_a_bound(backend: str | None) -> None:
    """`value or default` took it for a missing one (Dao-AILab/flash-attention#2574)."""
    check(probe(backend, 10, window_size=(3, 0), causal=False), [7.5], [4])
    check(probe(backend, 10, window_size=(0, 0), causal=False), [9.0], [1])


@report("M11")
def test_a_wide_window_stays_causal(backend: str | None) -> None:
    """Dropping a window that covers all keys dropped causality too (tlc-pack/libflash_attn#11)."""
    found = probe(backend, 5, sq=3, window_size=(100, 0), causal=True)
    check(found, [1.0, 1.5, 2.0], [3, 4, 5])


@report("M12")
@pytest.mark.parametrize("length", [17, 255, 257])
def test_padding_of_the_last_page_is_not_counted(length: int, backend: str | None) -> None:
    """Without a causal mask its lanes came into the denominator (flashinfer-ai/flashinfer#3716)."""
    capacity = -(-length // 16) * 16
    k, v = torch.randn(1, capacity, 8, 128), torch.randn(1, capacity, 8, 128)
    out, lse = attend(
        torch.zeros(1, 1, 8, 128),
        paginate(k, 16),
        paginate(v, 16),
        cache_seqlens=length,
        page_table=page_table(1, capacity, 16),
        return_softmax_lse=True,
        backend=backend,
    )
    torch.testing.assert_close(out[0, 0], v[0, :length].mean(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(length)), rtol=0, atol=1e-5)


# Biases, sinks, soft cap ----------------------------------------------------------------------

LN2 = math.log(2)


def alibi_call(slopes: Tensor) -> dict[str, Any]:
    count, heads = 2, slopes.shape[-1]
    return {
        "q": torch.zeros(count, 1, heads, 4),
        "k_cache": torch.zeros(count, 8, heads, 4),
        "v_cache": ramp(count, 8, heads),
        "cache_seqlens": ints(3, 5),
        "alibi_slopes": slopes,
        "return_softmax_lse": True,
    }


@report("M13")
def test_alibi_by_live_lengths_at_every_entry(backend: str | None) -> None:
    """Entry points differed; slopes by batch were refused (Dao-AILab/flash-attention#907)."""
    slopes = torch.tensor([LN2, 0.0])
    mean, count = [10 / 7, 4 - 26 / 31], [1.75, 31 / 16]
    check(seen(attend(**alibi_call(slopes), backend=backend)), mean, count)
    call = alibi_call(slopes.expand(2, 2))
    check(seen(attend(**call, backend=backend)), mean, count)
    k, v = call.pop("k_cache"), call.pop("v_cache")
    paged = {"k_cache": paginate(k, 3), "v_cache": paginate(v, 3)}
    found = attend(**call, **paged, page_table=page_table(2, 8, 3), backend=backend)
    check(seen(found), mean, count)
    packed = (torch.cat((x[0, :3], x[1, :5])) for x in (k, v))
    edges = ints(0, 1, 2), ints(0, 3, 8)
    ragged = {"alibi_slopes": slopes, "return_lse": True, "backend": backend}
    check(seen(attend_varlen(call["q"][:, 0], *packed, *edges, 1, 5, **ragged)), mean, count)


@report("M14")
def test_alibi_at_decode(backend: str | None) -> None:
    """A bias of the query's length became a constant (keras-team/keras-hub#2861)."""
    result = attend(**alibi_call(torch.tensor([LN2, 0.0])), backend=backend)
    assert seen(result, head=0).means[0] == pytest.approx(10 / 7)
    assert seen(result, head=1).means == pytest.approx([1.0, 2.0])


@report("M15")
def test_slopes_of_some_of_the_heads(backend: str | None) -> None:
    """Under tensor parallelism ranks took wrong slopes (flashinfer-ai/flashinfer#1606)."""
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 6, 4, 8), torch.randn(1, 6, 4, 8)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    whole = attend(q, k, v, alibi_slopes=slopes, causal=True, backend=backend)
    q, k, v = q[:, :, 2:], k[:, :, 2:], v[:, :, 2:]
    part = attend(q, k, v, alibi_slopes=slopes[2:], causal=True, backend=backend)
    torch.testing.assert_close(part, whole[:, :, 2:], rtol=0, atol=1e-6)


def ones(*shape: int) -> Tensor:
    return torch.full(shape, 127, dtype=torch.uint8).view(E8M0)


@report("M16")
@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "mxfp8"])
def test_sinks_with_every_kind_of_cache(kind: str, backend: str | None) -> None:
    """They were ignored for all quantised caches (kekzl/imp#1345)."""
    dtype = E4M3 if kind == "mxfp8" else getattr(torch, kind)
    call: dict[str, Any] = {"v_cache": ramp(1, 8, dim=32).to(dtype)}
    call["k_cache"] = torch.randn(1, 8, 1, 32).to(dtype)
    call["q"] = torch.zeros(1, 1, 1, 32, dtype=E4M3 if kind == "mxfp8" else torch.bfloat16)
    if kind == "mxfp8":
        call |= {"sfq": ones(1, 1, 1, 1), "sfk": ones(1, 8, 1, 1), "sfv": ones(1, 8, 1, 1)}
    sinks = torch.tensor([math.log(5)])
    check(probe(backend, 5, sinks=sinks, **call), [1.0], [10])


@report("M17")
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("sq", [1, 3])
@pytest.mark.parametrize("paged", [True, False])
def test_a_sink_counts_once(splits: int, sq: int, paged: bool, backend: str | None) -> None:
    """It could be deleted from one path with all tests green (kekzl/imp#1303)."""
    call: dict[str, Any] = {"k_cache": torch.randn(1, 8, 1, 4), "v_cache": ramp(1, 8)}
    if paged:
        call = {name: paginate(cache, 2) for name, cache in call.items()}
        call["page_table"] = page_table(1, 8, 2)
    call |= {"sinks": torch.tensor([math.log(5)]), "num_splits": splits}
    check(probe(backend, 5, sq=sq, **call), [1.0] * sq, [10] * sq)


@report("M19")
def test_soft_cap_before_the_mask(backend: str | None) -> None:
    """It was missing, or applied after the mask (Dao-AILab/flash-attention#1040)."""
    out, lse = attend(
        torch.ones(1, 2, 1, 1),
        torch.tensor([30.0, 60.0, 90.0])[None, :, None, None],
        torch.tensor([1.0, 2.0, 4.0])[None, :, None, None],
        softmax_scale=1.0,
        softcap=30.0,
        causal=True,
        return_softmax_lse=True,
        backend=backend,
    )
    assert out.flatten().tolist() == pytest.approx([1.997701, 3.432896], abs=2e-6)
    assert lse.flatten().tolist() == pytest.approx([28.923129, 30.184638], abs=4e-6)


@report("M20")
def test_soft_cap_window_and_a_static_cache_together(backend: str | None) -> None:
    """The tail of the static cache was not masked (huggingface/transformers#32309)."""
    k, v = torch.randn(2, 1, 64, 8, 256)
    k[:, 10:], v[:, 10:] = 1e4, 1e4
    call = {"softcap": 30.0, "window_size": (3, 0), "cache_seqlens": 10, "causal": True}
    q = torch.randn(1, 1, 16, 256)
    assert_right(backend, {"q": q, "k_cache": k, "v_cache": v, "softmax_scale": 0.5} | call)


# Left padding and rotary embedding ------------------------------------------------------------


@report("R1")
def test_left_padding(backend: str | None) -> None:
    """The argument was accepted and ignored (Dao-AILab/flash-attention#1788)."""
    check(probe(backend, [5, 3], cache_leftpad=ints(2, 0)), [3.0, 1.0], [3, 3])
    window = {"window_size": (1, 0), "causal": True}
    check(probe(backend, 6, sq=2, cache_leftpad=ints(3), **window), [3.5, 4.5], [2, 2])
    check(probe(backend, 5, cache_leftpad=ints(5)), [0], [0])
    pools = {"k_cache": paginate(torch.randn(2, 16, 1, 4), 4), "v_cache": paginate(ramp(2, 16), 4)}
    table = page_table(2, 16, 4)
    paged = probe(backend, [5, 3], cache_leftpad=ints(2, 0), page_table=table, **pools)
    check(paged, [3.0, 1.0], [3, 3])
    table[:, 0] = -1  # a page of padding alone is never read
    paged = probe(backend, [9, 5], cache_leftpad=ints(6, 5), page_table=table, **pools)
    check(paged, [7.0, 0], [3, 0])


X = torch.arange(1.0, 9)
HALVES = [-1.9841, 1.9599, 2.4624, 4.0198, 5, 6, 7, 8]
NEIGHBOURS = [-1.1426, 1.9221, 2.9599, 4.0298, 5, 6, 7, 8]


def rotary_tables(rows: int, dim: int) -> tuple[Tensor, Tensor]:
    frequency = 1e4 ** (-torch.arange(0, dim, 2).double() / dim)
    angle = torch.arange(rows).double()[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def stored_key(backend: str | None, **call: Any) -> list[float]:
    """The key that the call stores for X at position 1."""
    cos, sin = rotary_tables(4, 4)
    caches = torch.zeros(2, 1, 4, 1, 8)
    x = X[None, None, None]
    tables = {"rotary_cos": cos, "rotary_sin": sin}
    attend(x, *caches, x, x, cache_seqlens=1, **tables, **call, backend=backend)
    stored: list[float] = caches[0, 0, 1, 0].tolist()
    return stored


@report("R2")
def test_rotary_of_a_part_of_the_head(backend: str | None) -> None:
    """The part had to be a multiple of 16, or was ignored (Dao-AILab/flash-attention#817)."""
    found = stored_key(backend, rotary_interleaved=False)
    assert found == pytest.approx(HALVES, abs=1e-4)
    assert found[4:] == X[4:].tolist()
    for dim, part in ((80, 20), (256, 64)):
        cos, sin = rotary_tables(8, part)
        q, k, v = torch.randn(1, 2, 4, dim), torch.randn(1, 2, 2, dim), torch.randn(1, 2, 2, dim)
        call = {"q": q, "k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin, "causal": True}
        caches = {"k_cache": torch.randn(1, 8, 2, dim), "v_cache": torch.randn(1, 8, 2, dim)}
        for interleaved in (False, True):
            assert_right(
                backend, call | caches | {"cache_seqlens": 5, "rotary_interleaved": interleaved}
            )


@report("R3")
def test_the_default_pairing_of_channels(backend: str | None) -> None:
    """Two entry points had opposite defaults (Dao-AILab/flash-attention#862)."""
    assert stored_key(backend) == pytest.approx(NEIGHBOURS, abs=1e-4)
    assert stored_key(backend) == stored_key(backend, rotary_interleaved=True)
    x, tables = X[None, None, None], rotary_tables(4, 4)
    turned = kvattn.apply_rotary(x, *tables, seqlen_offsets=1)
    assert turned.flatten().tolist() == stored_key(backend)


@report("R6")
@pytest.mark.parametrize(
    ("mask", "steps"), [({}, 0), ({"causal": True}, 1), ({"window_size": (5, -1)}, 1)]
)
def test_positions_of_queries(mask: dict[str, Any], steps: int, backend: str | None) -> None:
    """Without a causal or local mask all queries stand at one position (FlashAttention-3)."""
    cos, sin = rotary_tables(8, 8)
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
    k_cache, v_cache = torch.randn(2, 1, 6, 1, 8)
    call = {"cache_seqlens": 3, "rotary_cos": cos, "rotary_sin": sin, **mask}
    out = attend(q, k_cache, v_cache, k, v, **call, backend=backend)
    turned = kvattn.apply_rotary(q, cos, sin, positions=ints(3, 3 + steps)[None])
    key = kvattn.apply_rotary(k, cos, sin, positions=ints(3, 4)[None])
    assert torch.equal(k_cache[:, 3:5], key)
    plain = attend(turned, k_cache, v_cache, cache_seqlens=5, **mask, backend=backend)
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-6)


# Mods -----------------------------------------------------------------------------------------


@report("F2")
@pytest.mark.parametrize("length", [1, 127, 129, 200])
def test_mods_over_a_partial_last_block(length: int, backend: str | None) -> None:
    """Lengths that fill no whole block were inaccurate (pytorch/pytorch#159247)."""

    def even(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv % 2 == 0

    def slope(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + 0.1 * (q - kv)

    q, (k, v) = torch.randn(1, 3, 2, 16), torch.randn(2, 1, 200, 1, 16)
    call = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": length}
    assert_right(backend, call | {"mask_mod": even, "score_mod": slope})


@report("F3")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 2])
def test_block_masks_broadcast(batch: int, heads: int, backend: str | None) -> None:
    """A mask for one batch or head was read out of bounds (pytorch/pytorch#172225)."""
    q, k, v = torch.randn(3, 2, 8, 2, 16)
    order = torch.arange(2).expand(batch, heads, 2, 2).int()
    count = ints(1, 2).expand(batch, heads, 2)

    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= q

    sparse = kvattn.BlockSparse(count, order, block_size=(4, 4))
    masked = attend(q, k, v, mask_mod=causal, block_sparse_tensors=sparse, backend=backend)
    plain = attend(q, k, v, causal=True, backend=backend)
    torch.testing.assert_close(masked, plain, rtol=0, atol=1e-6)
    wrong = sparse._replace(mask_block_cnt=count.expand(batch, heads, 2).repeat(3, 1, 1))
    with pytest.raises(E.BlockSparseError, match="mask_block"):
        attend(q, k, v, block_sparse_tensors=wrong, backend=backend)


# Refusals -------------------------------------------------------------------------------------

FEATURES: dict[str, dict[str, Any]] = {
    "alibi_slopes": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "sinks": {"sinks": torch.zeros(2)},
    "softcap": {"softcap": 5.0},
    "mask_mod": {"mask_mod": lambda b, h, q, kv: kv >= 0},
    "score_mod": {"score_mod": lambda score, b, h, q, kv: score},
    "rel_bias": {"rel_bias": torch.randn(1, 2, 2, 3)},
    "qv": {"qv": torch.randn(1, 2, 2, 8)},
    "attention_chunk": {"attention_chunk": 3},
    "window": {"window_size": (2, 1)},
    "gather_kv_indices": {"gather_kv_indices": torch.zeros(1, 2, 1, dtype=torch.int32)},
    "batch_invariant": {"batch_invariant": True},
    "leftpad": {"cache_leftpad": ints(2)},
    "page_table": {"page_table": ints(0)[None]},
    "k_descale": {"k_descale": 0.5},
}


@report("E8", every_backend=False)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name])
def test_a_refusal_names_what_is_missing_and_who_can(feature: str, name: str) -> None:
    """An unsupported feature was reported as another one (vllm-project/vllm#15231)."""
    call = {"q": torch.randn(1, 2, 2, 8), "cache_seqlens": 6, **FEATURES[feature]}
    call |= {"k_cache": torch.randn(1, 8, 1, 8), "v_cache": torch.randn(1, 8, 1, 8)}
    function: Any = kvattn.flash_attn_with_kvcache
    if feature == "gather_kv_indices":
        function = kvattn.flash_attn_varlen_func
        call = {"q": call["q"], "k": call["k_cache"], "v": call["v_cache"], **FEATURES[feature]}
    expected = function(**call)
    try:
        out = function(**call, backend=name)
    except E.BackendRefusesError as error:
        assert isinstance(error, NotImplementedError) and error.argument == "backend"
        got, allowed = str(error.got), str(error.allowed)
        assert repr(name) in got and "reference" in allowed
        assert feature in got
    else:
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)

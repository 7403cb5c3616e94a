"""Field reports: pages, slots and bounds of the append; strides, views and layouts of caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from field_report import (
    NAN,
    assert_right,
    attend,
    check,
    ints,
    page_table,
    paginate,
    probe,
    ramp,
    report,
    seen,
)
from random_tools import clone
from torch import Tensor

import kvattn
from kvattn import errors as E

# Pages and bounds -----------------------------------------------------------------------------


@report("P1")
def test_lengths_beyond_the_reach_of_the_table(backend: str | None) -> None:
    """The table was read out of bounds, silently (Dao-AILab/flash-attention#2709)."""
    k, v = torch.randn(2, 4, 4, 1, 8)
    before = k.clone()
    q, table = torch.randn(1, 1, 1, 8), ints(0, 1)[None]
    with pytest.raises(E.LengthOverCapacityError, match=r"cache_seqlens\[0\].*9.*8"):
        attend(q, k, v, cache_seqlens=ints(9), page_table=table, backend=backend)
    with pytest.raises(E.AppendOverflowError, match=r"cache_seqlens\[0\].*8 cached.*1 new.*8"):
        attend(q, k, v, q, q, cache_seqlens=ints(8), page_table=table, backend=backend)
    assert torch.equal(k, before)


@report("P2")
@pytest.mark.parametrize("new", [1, 2, 3, 4])
def test_append_to_a_full_dense_cache(new: int, backend: str | None) -> None:
    """Unrelated tensors were overwritten (Dao-AILab/flash-attention#638)."""
    memory = torch.full((3, 16, 32, 128), 7.0)
    k, v = memory[1:2], torch.zeros(1, 16, 32, 128)
    token = torch.randn(1, new, 32, 128)
    with pytest.raises(E.AppendOverflowError, match=rf"\[0\].*16 cached \+ {new} new.*<= 16"):
        attend(torch.randn(1, 1, 32, 128), k, v, token, token, cache_seqlens=16, backend=backend)
    assert (memory == 7.0).all() and (v == 0).all()


@report("P3")
def test_one_pool_seen_in_two_page_sizes(backend: str | None) -> None:
    """The kernel was told another page size than the allocator's (vllm-project/vllm#27547)."""
    k, v, q = torch.randn(6, 16, 1, 8), torch.randn(6, 16, 1, 8), torch.randn(2, 1, 2, 8)
    table = ints(5, 0, 2, 1).reshape(2, 2)
    finer = (table[..., None] * 4 + torch.arange(4)).flatten(1).int()
    call = {"cache_seqlens": ints(19, 32), "backend": backend}
    coarse = attend(q, k, v, page_table=table, **call)
    fine = attend(q, *(x.reshape(24, 4, 1, 8) for x in (k, v)), page_table=finer, **call)
    torch.testing.assert_close(coarse, fine, rtol=0, atol=1e-6)


@report("P4", every_backend=False)
def test_slots_beyond_the_pool() -> None:
    """Slots of one page size were decoded with another (vllm-project/vllm#47056)."""
    k, v = torch.zeros(2, 3, 4, 1, 8)
    token = torch.ones(2, 1, 8)
    for slots in ([0, 12], [-2, 0]):
        with pytest.raises(E.SlotOutOfRangeError, match=rf"{slots[0] or 12}.*-1 to 11") as error:
            kvattn.append_kv(token, token, k, v, slot_mapping=ints(*slots, dtype=torch.int64))
        assert isinstance(error.value, IndexError)
    assert not k.any() and not v.any()


@report("P5", every_backend=False)
def test_the_slot_of_a_padded_token() -> None:
    """Slot -1 became the last slot of the pool (vllm-project/vllm#43869)."""
    k, v = torch.zeros(2, 2, 4, 1, 8)
    token = torch.arange(1.0, 5)[:, None, None].repeat(1, 1, 8)
    kvattn.append_kv(token, -token, k, v, slot_mapping=ints(3, -1, 5, -1, dtype=torch.int64))
    assert k[..., 0].flatten().tolist() == [0, 0, 0, 1, 0, 3, 0, 0]
    assert torch.equal(v, -k)


@report("P6")
@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 19, 48, 64, 100, 128, 256, 768])
def test_any_page_size(size: int, backend: str | None) -> None:
    """Pages had to hold a multiple of 256 tokens (Dao-AILab/flash-attention#828)."""
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 4, 300, 1, 8, generator=generator)
    q = torch.randn(4, 2, 2, 8, generator=generator)
    call = {"cache_seqlens": ints(0, 1, 37, 300), "causal": True, "backend": backend}
    dense = attend(q, k, v, **call)
    pools = (paginate(x, size, seed=size) for x in (k, v))
    paged = attend(q, *pools, page_table=page_table(4, 300, size, seed=size), **call)
    torch.testing.assert_close(paged, dense, rtol=0, atol=1e-6)


@report("P10")
@pytest.mark.parametrize(("length", "mean", "count"), [(7, 5.0, 3), (8, 5.5, 4), (9, 8.0, 1)])
def test_chunks_over_pages(length: int, mean: float, count: int, backend: str | None) -> None:
    """Chunk-local attention knew pages of one token only (sgl-project/sglang#32902)."""
    pools = {"k_cache": paginate(torch.randn(1, 16, 1, 4), 2)}
    pools["v_cache"] = paginate(ramp(1, 16), 2)
    call = {"attention_chunk": 4, "causal": True, "page_table": page_table(1, 16, 2)}
    check(probe(backend, length, **call, **pools), [mean], [count])


@report("P11")
@pytest.mark.parametrize("length", [0, [0]])
def test_the_first_prefill_through_the_cache(length: Any, backend: str | None) -> None:
    """Nothing cached yet, all tokens new (Dao-AILab/flash-attention#731)."""
    k_cache, v_cache = torch.full((2, 1, 8, 1, 4), NAN)
    k, v = torch.randn(1, 4, 1, 4), ramp(1, 4)
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    found = probe(backend, length, sq=4, k=k, v=v, causal=True, **caches)
    check(found, [0.0, 0.5, 1.0, 1.5], [1, 2, 3, 4])
    assert torch.equal(k_cache[:, :4], k) and torch.equal(v_cache[:, :4], v)
    assert k_cache[:, 4:].isnan().all() and v_cache[:, 4:].isnan().all()


@report("P12")
def test_two_rows_that_own_one_cache_line(backend: str | None) -> None:
    """Appending through both is a race (FlashAttention-3's documentation of cache_batch_idx)."""
    q, token = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 1, 8)
    k, v = torch.randn(2, 2, 8, 1, 8)
    before = k.clone()
    call = {"cache_batch_idx": ints(1, 1), "cache_seqlens": ints(5, 5), "backend": backend}
    with kvattn.checked(), pytest.raises(E.DuplicateWriteError, match="cache_batch_idx"):
        attend(q, k, v, token, token, **call)
    assert torch.equal(k, before)
    out = attend(q, k, v, **call)
    for b in range(2):
        alone = attend(q[b : b + 1], k[1:], v[1:], cache_seqlens=5, backend=backend)
        torch.testing.assert_close(out[b : b + 1], alone, rtol=0, atol=1e-6)


@report("P13")
def test_a_scalar_length_is_for_the_batch(backend: str | None) -> None:
    """It was expanded to the number of pages (Dao-AILab/flash-attention#1795)."""
    q, pools = torch.randn(3, 1, 1, 8), torch.randn(2, 10, 4, 1, 8)
    tables = [
        {"page_table": torch.arange(6).int().reshape(3, 2)},
        {"cache_batch_idx": ints(9, 0, 4)},
    ]
    for length, where in zip((5, 3), tables, strict=True):
        out = attend(q, *pools, cache_seqlens=length, **where, backend=backend)
        each = ints(*[length] * 3)
        assert torch.equal(out, attend(q, *pools, cache_seqlens=each, **where, backend=backend))


@report("P14")
@pytest.mark.parametrize("shape", [(10, 19), (20, 10), (10,)])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_mask_of_the_wrong_shape(
    shape: tuple[int, ...], indexed: bool, backend: str | None
) -> None:
    """It corrupted results in silence (flashinfer-ai/flashinfer#3176)."""
    mask = torch.ones(shape, dtype=torch.bool)

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask[q, kv] if indexed else mask

    k, v = torch.randn(2, 1, 24, 4, 8)
    before, token = k.clone(), torch.randn(1, 1, 4, 8)
    call = {"cache_seqlens": 19, "mask_mod": keep, "backend": backend}
    with pytest.raises(E.ModResultError, match=r"mask_mod.*10, 20\)") as error:
        attend(torch.randn(1, 10, 8, 8), k, v, token, token, **call)
    assert isinstance(error.value, ValueError) and torch.equal(k, before)


@report("P15")
def test_a_tiny_odd_head_dim(backend: str | None) -> None:
    """Its padding made a copy, and the append was lost (Dao-AILab/flash-attention#1066)."""
    caches = torch.zeros(2, 2, 3, 2, 3).half()
    q, k, v = torch.randn(3, 3, 2, 1, 4, 3).half()
    for step in range(3):
        new = {"k": k[step, :, :, :2], "v": v[step, :, :, :2], "cache_seqlens": step}
        call = {"q": q[step], "k_cache": caches[0], "v_cache": caches[1], "causal": True} | new
        assert_right(backend, call)
    for cache, tokens in zip(caches, (k, v), strict=True):
        assert torch.equal(cache, tokens[:, :, 0, :2].transpose(0, 1))


# Views ----------------------------------------------------------------------------------------

PAGES, PAGE, HEADS, DIM = 6, 4, 2, 8
TABLE = ints(4, 1, 0, 5).reshape(2, 2)


def interleaved() -> tuple[Tensor, Tensor]:
    k, v = torch.randn(PAGES, 2, PAGE, HEADS, DIM).unbind(1)
    return k, v


def sliced() -> tuple[Tensor, Tensor]:
    """Page strides larger than a page, and an offset into the storage."""
    content = PAGE * HEADS * DIM
    wide = torch.randn(2, PAGES, 32 + content + 5)
    shape, strides = (PAGES, PAGE, HEADS, DIM), (wide.stride(1), HEADS * DIM, DIM, 1)
    k, v = (wide.as_strided(shape, strides, half * wide.stride(0) + 32) for half in range(2))
    return k, v


def head_major() -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, PAGES, HEADS, PAGE, DIM).transpose(2, 3)
    return k, v


def layer_of_a_pool(layer: int) -> Callable[[], tuple[Tensor, Tensor]]:
    def make() -> tuple[Tensor, Tensor]:
        k, v = torch.randn(2, PAGES, 3, PAGE, HEADS, DIM)[:, :, layer]
        return k, v

    return make


def assert_like_contiguous(
    make: Callable[[], tuple[Tensor, Tensor]], backend: str | None, new: int = 0
) -> None:
    """The views give what their contiguous copies give; only the new slots of memory change."""
    k, v = make()
    views, twins = {"k": k, "v": v}, clone({"k": k, "v": v})
    tokens = [torch.randn(2, new, HEADS, DIM) for _ in range(2)]
    for twin, token in zip(twins.values(), tokens, strict=True):
        for b, length in enumerate((3, 2)):
            for t in range(new):
                twin[TABLE[b, (length + t) // PAGE], (length + t) % PAGE] = token[b, t]
    q = torch.randn(2, 1, 4, DIM)
    call = {"page_table": TABLE, "cache_seqlens": ints(3, 2), "causal": True, "backend": backend}
    given = tokens if new else []
    expected = attend(q, k.contiguous(), v.contiguous(), *given, **call)
    torch.testing.assert_close(attend(q, k, v, *given, **call), expected, rtol=0, atol=1e-6)
    for name, view in views.items():
        memory, wanted = (x.new_empty(0).set_(x.untyped_storage()) for x in (view, twins[name]))
        assert torch.equal(memory, wanted)


@report("X1")
def test_keys_and_values_interleaved_by_page(backend: str | None) -> None:
    """Decode read across K into V (ROCm/aiter#3498)."""
    assert_like_contiguous(interleaved, backend)


@report("X3")
def test_a_pool_that_is_a_slice_of_a_wider_buffer(backend: str | None) -> None:
    """The stride between pages was ignored (flashinfer-ai/flashinfer#3856)."""
    assert_like_contiguous(sliced, backend)


@report("X4")
def test_strided_scales_beside_their_data(backend: str | None) -> None:
    """Packed rows [data | scales]: strided scales gave NaN (flashinfer-ai/flashinfer#4044)."""
    rows = torch.randint(0, 120, (3, PAGE, HEADS, 2, 64 + 2), dtype=torch.uint8)
    rows[..., 64:] = torch.randint(120, 134, (3, PAGE, HEADS, 2, 2), dtype=torch.uint8)
    data = rows[..., :64].view(torch.float8_e4m3fn).unbind(3)
    scales = rows[..., 64:].view(torch.float8_e8m0fnu).unbind(3)
    q = torch.randn(1, 2, 4, 64).to(torch.float8_e4m3fn)
    sfq = torch.full((1, 2, 4, 2), 125, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    call: dict[str, Any] = {"q": q, "sfq": sfq, "page_table": ints(2, 0)[None], "cache_seqlens": 7}
    call |= {"k_cache": data[0], "v_cache": data[1], "sfk": scales[0], "sfv": scales[1]}
    assert_right(backend, call)
    half = rows[..., :64].view(torch.float8_e4m3fn).unbind(3)
    packed = torch.rand(3, PAGE, HEADS, 2)
    dense: dict[str, Any] = {"q": torch.randn(1, 2, 4, 64), "k_cache": half[0], "v_cache": half[1]}
    dense |= {"k_descale": packed[..., 0], "v_descale": packed[..., 1], "cache_seqlens": 7}
    assert_right(backend, dense | {"page_table": ints(2, 0)[None]})


@report("X5")
@pytest.mark.parametrize("make", [interleaved, sliced, head_major], ids=lambda make: make.__name__)
@pytest.mark.parametrize("new", [1, 5])
def test_append_into_views(
    make: Callable[[], tuple[Tensor, Tensor]], new: int, backend: str | None
) -> None:
    """Appending kept contiguous strides (flashinfer-ai/flashinfer#527)."""
    assert_like_contiguous(make, backend, new)


@report("X6")
def test_tables_that_are_slices(backend: str | None) -> None:
    """The stride of a table's rows was taken for its width (vllm-project/vllm-ascend#14435)."""
    q, pools = torch.randn(2, 1, 2, 8), torch.randn(2, 6, 4, 1, 8)
    call = {"cache_seqlens": ints(7, 5), "backend": backend}
    expected = attend(q, *pools, page_table=TABLE, **call)
    wide = torch.full((4, 5), -1, dtype=torch.int32)
    wide[::2, :2] = TABLE
    for table in (wide[::2, :2], wide[::2], torch.cat((TABLE, TABLE), 1)[:, :2]):
        assert torch.equal(attend(q, *pools, page_table=table, **call), expected)
    with pytest.raises(E.PageTableTensorError, match=r"torch\.int64.*int32"):
        attend(q, *pools, page_table=TABLE.long(), **call)


@report("X7")
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_one_layer_of_a_pool(layer: int, backend: str | None) -> None:
    """A layer cut out of [pages, layers, ...] was refused (deepseek-ai/DeepGEMM#221)."""
    assert_like_contiguous(layer_of_a_pool(layer), backend)
    assert_like_contiguous(layer_of_a_pool(layer), backend, new=2)


@report("D7")
@pytest.mark.parametrize("invariant", [True, False])
def test_bits_do_not_depend_on_where_pages_lie(invariant: bool, backend: str | None) -> None:
    """Outputs changed with the placement of pages (pytorch/pytorch#182593)."""
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 70, 2, 16), torch.randn(2, 70, 2, 16)
    call = {"cache_seqlens": ints(37, 66), "causal": True, "batch_invariant": invariant}
    results = [
        attend(
            q,
            paginate(k, 8, seed),
            paginate(v, 8, seed),
            page_table=page_table(2, 70, 8, seed),
            return_softmax_lse=True,
            backend=backend,
            **call,
        )
        for seed in range(5)
    ]
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@report("S5", every_backend=False)
def test_the_plan_does_not_follow_the_capacity() -> None:
    """Splits followed the cache's capacity, or V's width (Dao-AILab/flash-attention#2901).

    On the CPU nothing is split: the plan must not depend on capacity, lengths or hints, and a
    number of splits must not change the result.
    """

    def planned(capacity: int, **call: Any) -> Any:
        q = torch.empty(1, 1, 32, 128, device="meta", dtype=torch.bfloat16)
        cache = torch.empty(1, capacity, 8, 128, device="meta", dtype=torch.bfloat16)
        return kvattn.explain(q, cache, cache, **call).plan

    first = planned(131072, cache_seqlens=100)
    assert planned(100, cache_seqlens=100) == first
    assert planned(8192, cache_seqlens=8192, num_splits=7) == first
    window = {"window_size": (127, 0)}
    assert planned(32768, **window) == planned(128, **window)
    q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 64, 2, 8), torch.randn(1, 64, 2, 8)
    outs = [attend(q, k, v, num_splits=n, backend="cpu") for n in (0, 1, 3, 1000)]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_the_probe_over_pages_is_the_probe() -> None:
    """The helpers of these tests: the same rows, shuffled into pages."""
    v = ramp(2, 11)
    pool, table = paginate(v, 4), page_table(2, 11, 4)
    result = attend(
        torch.zeros(2, 1, 1, 4),
        pool,
        pool,
        cache_seqlens=ints(11, 6),
        page_table=table,
        return_softmax_lse=True,
        backend="reference",
    )
    check(seen(result), [5.0, 2.5], [11, 6])

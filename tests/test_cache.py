"""PagedKVCache: placement, sharing, truncation, memory."""

from __future__ import annotations

import pytest
import torch
from cache_tools import check_books, extend, make_cache, read, unshare_host_memory, write

from kvattn.pages import PagePool

# Placement


def test_a_fresh_sequence_is_consecutive() -> None:
    cache = make_cache(num_pages=12)
    first, second = cache.allocate(2)
    cache.reserve({first: 10, second: 10})
    assert cache.pages(first) == (0, 1, 2)
    start = cache.pages(second)[0]
    assert cache.pages(second) == (start, start + 1, start + 2)


def test_a_batch_that_grows_in_step_stays_consecutive() -> None:
    cache = make_cache(num_pages=64, page_size=2, max_batch=8)
    seqs = cache.allocate(8)
    for _ in range(16):
        cache.reserve(dict.fromkeys(seqs, 1))
        cache.commit(dict.fromkeys(seqs, 1))
    for seq in seqs:
        start = cache.pages(seq)[0]
        assert cache.pages(seq) == tuple(range(start, start + 8))


def test_scattered_pages_are_as_good_as_any() -> None:
    cache = make_cache(num_pages=12, max_batch=12)
    singles = cache.allocate(12)
    cache.reserve(dict.fromkeys(singles, 1))
    cache.free(singles[::2])
    seq = cache.allocate()
    extend(cache, seq, *range(24))
    assert sorted(cache.pages(seq)) == sorted(
        set(range(12)) - {cache.pages(s)[0] for s in singles[1::2]}
    )
    assert read(cache, seq) == list(range(24))
    check_books(cache)


def test_growth_goes_back_to_the_page_it_left() -> None:
    cache = make_cache()
    seq = cache.allocate()
    extend(cache, seq, *range(12))
    pages = cache.pages(seq)
    cache.truncate(seq, 5)
    assert cache.pages(seq) == pages[:2]
    extend(cache, seq, *range(5, 12))
    assert cache.pages(seq) == pages
    assert read(cache, seq) == list(range(12))


def test_the_pool_takes_the_widest_gap_first() -> None:
    pool = PagePool(16)
    everything = pool.take(16)
    pool.drop([1, 2, 5, 6, 7, 11, 13])
    assert everything == list(range(16))
    assert pool.take(3) == [5, 6, 7]
    assert pool.take(4) == [1, 2, 11, 13]
    assert (pool.num_free, pool._free, pool.refs) == (0, 0, [1] * 16)


# Sharing


def test_fork_then_diverge(device: torch.device) -> None:
    cache = make_cache(device=device)
    parent = cache.allocate()
    extend(cache, parent, *range(6))
    child = cache.fork(parent)
    assert cache.pages(child) == cache.pages(parent)
    assert cache.stats().pages_used == cache.stats().pages_shared == 2
    extend(cache, child, 60)
    extend(cache, parent, 70)
    assert read(cache, child) == [*range(6), 60]
    assert read(cache, parent) == [*range(6), 70]
    assert cache.pages(child)[0] == cache.pages(parent)[0]
    assert cache.stats().pages_used == 3
    check_books(cache)


def test_the_last_holder_keeps_the_page() -> None:
    cache = make_cache(num_pages=3)
    parent = cache.allocate()
    extend(cache, parent, *range(6))
    child = cache.fork(parent)
    cache.reserve({parent: 1, child: 1})  # two holders, one copy: the third page is enough
    assert cache.stats().pages_free == 0
    assert cache.pages(parent)[1] != cache.pages(child)[1]
    check_books(cache)


def test_a_fork_after_a_reservation_does_not_see_its_tokens() -> None:
    cache = make_cache()
    parent = cache.allocate()
    extend(cache, parent, 0)
    cache.reserve({parent: 6})
    child = cache.fork(parent)
    assert len(cache.pages(child)) == 1
    write(cache, parent, 1, [*range(1, 7)])
    cache.commit({parent: 6})
    extend(cache, child, 50)
    assert (read(cache, parent), read(cache, child)) == ([*range(7)], [0, 50])


def test_a_page_before_reserved_ones_is_copied_in_place() -> None:
    cache = make_cache()
    parent = cache.allocate()
    extend(cache, parent, 0)
    cache.reserve({parent: 6})
    child = cache.fork(parent)
    extend(cache, parent, *range(1, 7))
    assert cache.pages(child)[0] not in cache.pages(parent)
    assert (read(cache, parent), read(cache, child)) == ([*range(7)], [0])
    check_books(cache)


def test_share_at_a_page_border_copies_nothing() -> None:
    cache = make_cache()
    parent = cache.allocate()
    extend(cache, parent, *range(10))
    child = cache.share(parent, 8)
    extend(cache, child, 80, 81)
    assert cache.pages(child)[:2] == cache.pages(parent)[:2]
    assert cache.stats().pages_used == 4
    cache.free(parent)
    assert read(cache, child) == [*range(8), 80, 81]
    check_books(cache)


def test_share_inside_a_page_copies_it_on_the_first_write() -> None:
    cache = make_cache()
    parent = cache.allocate()
    extend(cache, parent, *range(7))
    child = cache.share(parent, 5)
    assert cache.stats().pages_used == 2
    extend(cache, child, 50)
    assert cache.stats().pages_used == 3
    assert (read(cache, parent), read(cache, child)) == ([*range(7)], [*range(5), 50])


def test_share_nothing() -> None:
    cache = make_cache()
    parent = cache.allocate()
    extend(cache, parent, 1, 2)
    child = cache.share(parent, 0)
    assert (cache.pages(child), cache.length(child), cache.stats().pages_shared) == ((), 0, 0)


def test_how_much_sequences_have_in_common() -> None:
    cache = make_cache(num_pages=12, max_batch=4)
    parent = cache.allocate()
    extend(cache, parent, *range(10))
    twin, child = cache.fork(parent), cache.share(parent, 9)
    assert cache.common_prefix([parent, twin, child]) == 12
    extend(cache, child, 77)  # a page of its own in the place of the third
    assert cache.common_prefix([parent, twin]) == 12
    assert cache.common_prefix([child, parent, twin]) == 8
    assert cache.common_prefix([cache.allocate(), parent]) == 0


@pytest.mark.parametrize("as_tensor", [False, True])
def test_reorder_takes_forks(as_tensor: bool) -> None:
    cache = make_cache(num_pages=20)
    seqs = cache.allocate(3)
    for seq in seqs:
        extend(cache, seq, *range(10 * seq, 10 * seq + 5 + seq))
    kept = cache.pages(seqs[1])
    order = [2, 1, 0]
    cache.reorder(torch.tensor(order) if as_tensor else order)
    assert cache.pages(seqs[1]) == kept
    assert [read(cache, seq) for seq in seqs] == [[*range(20, 27)], [*range(10, 16)], [*range(5)]]
    cache.reorder([0, 0, 0])
    for seq in seqs:
        extend(cache, seq, 100 + seq)
    assert [read(cache, seq) for seq in seqs] == [[*range(20, 27), 100 + seq] for seq in seqs]
    assert cache.stats().pages_used == 4
    check_books(cache)


def test_reorder_of_some_leaves_the_others() -> None:
    cache = make_cache()
    seqs = cache.allocate(3)
    for seq in seqs:
        extend(cache, seq, seq)
    cache.reorder([1, 1], [seqs[2], seqs[0]])
    assert [read(cache, seq) for seq in seqs] == [[0], [1], [0]]


# Truncate, free, reset


def test_truncate_across_page_borders() -> None:
    cache = make_cache()
    seq = cache.allocate()
    extend(cache, seq, *range(11))
    for length, pages in ((9, 3), (8, 2), (5, 2), (4, 1), (1, 1), (0, 0)):
        cache.truncate(seq, length)
        assert (read(cache, seq), len(cache.pages(seq))) == ([*range(length)], pages)
        check_books(cache)


def test_truncate_gives_a_reservation_back() -> None:
    cache = make_cache()
    seq = cache.allocate()
    extend(cache, seq, 1)
    cache.reserve({seq: 20})
    cache.truncate(seq, 1)
    assert len(cache.pages(seq)) == 1
    check_books(cache)


def test_a_truncated_fork_does_not_write_into_its_parent() -> None:
    cache = make_cache()
    parent = cache.allocate()
    extend(cache, parent, *range(8))
    child = cache.fork(parent)
    cache.truncate(child, 2)
    extend(cache, child, 20, 21, 22)
    assert (read(cache, parent), read(cache, child)) == ([*range(8)], [0, 1, 20, 21, 22])


def test_rows_and_pages_are_reused_after_free() -> None:
    cache = make_cache(num_pages=3)
    seqs = cache.allocate(3)
    extend(cache, seqs[1], *range(12))
    cache.free(seqs[1])
    assert cache.lengths.tolist() == [0, -1, 0, -1]
    again = cache.allocate()
    assert again == seqs[1]
    assert read(cache, again) == []
    extend(cache, again, *range(100, 112))
    assert read(cache, again) == [*range(100, 112)]
    cache.reset()
    assert cache.allocate(4) == [0, 1, 2, 3]
    assert cache.stats().pages_free == 3
    check_books(cache)


# Memory


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
    ],
)
@pytest.mark.parametrize("head_dim_v", [2, 3])
def test_every_dtype_survives_a_copy_on_write(dtype: torch.dtype, head_dim_v: int) -> None:
    cache = make_cache(dtype=dtype, head_dim_v=head_dim_v, num_layers=3)
    assert cache.k(2).shape == (12, 4, 1, 2)
    assert cache.v(2).shape == (12, 4, 1, head_dim_v)
    assert cache.k(0).dtype == cache.v(0).dtype == dtype
    parent = cache.allocate()
    cache.reserve({parent: 3})
    cache.commit({parent: 3})
    generator = torch.Generator().manual_seed(0)
    pools = [pool(layer) for layer in range(3) for pool in (cache.k, cache.v)]
    for pool in pools:
        raw = pool.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    before = [pool.view(torch.uint8).clone() for pool in pools]
    child = cache.fork(parent)
    cache.reserve({child: 1})
    (source,), (target,) = cache.pages(parent), cache.pages(child)
    assert source != target
    for pool, old in zip(pools, before, strict=True):
        expected = old.clone()
        expected[target] = old[source]
        assert torch.equal(pool.view(torch.uint8), expected)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (0.5, [[0.5, 0.5], [0.5, 0.5]]),
        (torch.tensor(0.5), [[0.5, 0.5], [0.5, 0.5]]),
        (torch.tensor([0.5]), [[0.5, 0.5], [0.5, 0.5]]),
        (torch.tensor([1.0, 2.0]), [[1.0, 2.0], [1.0, 2.0]]),
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [[1.0, 2.0], [3.0, 4.0]]),
    ],
)
def test_static_scales(scale: float | torch.Tensor, expected: list[list[float]]) -> None:
    cache = make_cache(dtype=torch.float8_e4m3fn, num_kv_heads=2, k_descale=scale)
    for layer in range(2):
        scales = cache.k_descale(layer)
        assert scales is not None
        assert scales.dtype == torch.float32
        assert scales.tolist() == [expected[layer]]
        assert cache.v_descale(layer) is None


def test_token_scales_travel_with_their_pages() -> None:
    cache = make_cache(num_pages=4, num_kv_heads=2, dtype=torch.float8_e5m2, token_descale=True)
    k_scales, v_scales = cache.k_descale(1), cache.v_descale(1)
    assert k_scales is not None
    assert v_scales is not None
    assert k_scales.shape == v_scales.shape == (4, 4, 2)
    assert bool((k_scales == 1).all())
    parent = cache.allocate()
    cache.reserve({parent: 2})
    cache.commit({parent: 2})
    k_scales[cache.pages(parent)[0]], v_scales[cache.pages(parent)[0]] = 2.0, 3.0
    child = cache.fork(parent)
    cache.reserve({child: 1})
    assert bool((k_scales[cache.pages(child)[0]] == 2).all())
    assert bool((v_scales[cache.pages(child)[0]] == 3).all())


def test_no_two_caches_share_a_buffer() -> None:
    """A compiler that sees two views of one buffer copies it before a write."""
    cache = make_cache()
    pools = [pool(layer) for layer in range(2) for pool in (cache.k, cache.v)]
    assert len({pool.untyped_storage().data_ptr() for pool in pools}) == len(pools)


@pytest.mark.parametrize("outside", ["inference", "grad"])
def test_a_cache_made_in_inference_mode_can_be_written_anywhere(outside: str) -> None:
    with torch.inference_mode():
        cache = make_cache()
    with torch.inference_mode(outside == "inference"):
        unshare_host_memory(cache)
        parent = cache.allocate()
        extend(cache, parent, 1, 2)
        child = cache.fork(parent)
        extend(cache, child, 3)
        assert read(cache, child) == [1, 2, 3]


def test_stats_count_bytes() -> None:
    cache = make_cache(dtype=torch.float8_e4m3fn, token_descale=True)
    seq = cache.allocate()
    extend(cache, seq, *range(5))
    cache.fork(seq)
    stats = cache.stats()
    page_bytes = 2 * 2 * 4 * (2 + 4)  # layers, K and V, tokens, two elements and a scale
    assert (stats.bytes, stats.bytes_used) == (12 * page_bytes, 2 * page_bytes)
    assert (stats.sequences, stats.tokens) == (2, 10)
    assert (stats.pages, stats.pages_used, stats.pages_free, stats.pages_shared) == (12, 2, 10, 2)
    assert "2/4 sequences, 2/12 pages of 4" in repr(cache)
    assert len(cache) == 2

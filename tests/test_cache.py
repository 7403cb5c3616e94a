"""PagedKVCache: placement, sharing, truncation, memory, what attention calls see, CUDA graphs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from cache_tools import check_books, extend, make_cache, read, state, unshare_host_memory, write
from torch.utils._python_dispatch import TorchDispatchMode

from kvattn import flash_attn_with_kvcache
from kvattn.errors import cache_kinds
from kvattn.pages import PagePool
from kvattn.tables import PageTables

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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


# What attention calls are given


def test_view_of_neighbours_is_a_window_on_the_tensors() -> None:
    cache = make_cache()
    seqs = cache.allocate(3)
    table, lengths = cache.view(seqs[1:])
    extend(cache, seqs[2], 1, 2)
    assert table.data_ptr() == cache.page_table[1].data_ptr()
    assert lengths.data_ptr() == cache.lengths[1].data_ptr()
    assert lengths.tolist() == [0, 2]
    assert table[1, 0] == cache.pages(seqs[2])[0]


@pytest.mark.parametrize("picked", [[2, 0], [0, 2], [1, 1], []])
def test_view_keeps_the_order(picked: list[int]) -> None:
    cache = make_cache()
    for seq in cache.allocate(3):
        extend(cache, seq, *range(3 * seq))
    table, lengths = cache.view(picked)
    assert (table.dtype, lengths.dtype) == (torch.int32, torch.int32)
    assert table.shape == (len(picked), 12)
    assert lengths.tolist() == [3 * seq for seq in picked]
    assert table.tolist() == [cache.page_table[seq].tolist() for seq in picked]


def test_slots_reach_past_32_bits() -> None:
    tables = PageTables(num_pages=8, page_size=2**30)
    seq = tables.allocate()
    tables.reserve({seq: 2**32})
    start = 2**31 - 1
    slots = tables.slots(seq, start, start + 3)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [start, start + 1, start + 2]


def test_slots_follow_the_pages() -> None:
    cache = make_cache()
    first, second = cache.allocate(2)
    extend(cache, first, *range(6))
    cache.free(second)
    pages = cache.pages(first)
    expected = [pages[i // 4] * 4 + i % 4 for i in range(8)]
    assert cache.slots(first).tolist() == expected[:6]
    assert cache.slots(first, 3, 8).tolist() == expected[3:]
    assert cache.slots(first, 8, 8).tolist() == []


class OpNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_decode_step_on_the_cpu_runs_no_torch_op() -> None:
    cache = make_cache()
    seqs = cache.allocate(3)
    with OpNames() as ops:
        for _ in range(6):
            cache.reserve(dict.fromkeys(seqs, 1))
            cache.commit(dict.fromkeys(seqs, 1))
        assert ops.names == []
        cache.page_table.clone()
        assert ops.names != []
    assert cache.lengths.tolist() == [6, 6, 6, -1]


@pytest.mark.parametrize("batch", [3, 400])
def test_books_are_sent_whole_to_memory_of_their_own(batch: int) -> None:
    cache = PageTables(num_pages=2 * batch, page_size=2, max_batch=batch, max_pages_per_seq=30)
    unshare_host_memory(cache)
    seqs = cache.allocate(batch)
    cache.reserve(dict.fromkeys(seqs[::2], 3))
    cache.commit(dict.fromkeys(seqs[::2], 2))
    check_books(cache)
    cache.free(seqs[:2] + seqs[-1:])
    check_books(cache)


# Append through the public call


@pytest.mark.parametrize("picked", [[0, 1], [2, 0]])
def test_append_writes_behind_every_sequence(device: torch.device, picked: list[int]) -> None:
    cache = make_cache(device=device)
    for seq in cache.allocate(3):
        extend(cache, seq, *range(2 * seq + 1))
    tokens = torch.arange(50.0, 56.0, device=device).view(2, 3, 1, 1).expand(2, 3, 1, 2)
    for layer in range(2):
        new = tokens + 1000 * layer
        cache.append(layer, new, -new, picked)
    cache.commit(dict.fromkeys(picked, 3))
    for row, seq in enumerate(picked):
        added = [50 + 3 * row + i for i in range(3)]
        assert read(cache, seq) == [*range(2 * seq + 1), *added]
    check_books(cache)


def test_append_to_one_sequence() -> None:
    cache = make_cache(num_layers=1)
    seq = cache.allocate()
    cache.append(0, torch.full((1, 1, 1, 2), 7.0), torch.full((1, 1, 1, 2), -7.0), seq)
    cache.commit({seq: 1})
    assert read(cache, seq) == [7]


def test_append_quantises_with_the_static_scales() -> None:
    cache = make_cache(dtype=torch.float8_e4m3fn, num_layers=1, k_descale=2.0, v_descale=4.0)
    seq = cache.allocate()
    tokens = torch.tensor([[8.0, -16.0]]).view(1, 1, 1, 2)
    cache.append(0, tokens, tokens, seq)
    page = cache.pages(seq)[0]
    assert cache.k(0)[page, 0, 0].float().tolist() == [4.0, -8.0]
    assert cache.v(0)[page, 0, 0].float().tolist() == [2.0, -4.0]


def test_append_writes_token_scales() -> None:
    cache = make_cache(dtype=torch.float8_e4m3fn, num_layers=2, token_descale=True)
    seq = cache.allocate()
    tokens = torch.tensor([[3.5, -896.0]]).view(1, 1, 1, 2)
    cache.append(1, tokens, 2 * tokens, seq)
    page = cache.pages(seq)[0]
    for pool, scales, factor in (
        (cache.k(1), cache.k_descale(1), 1),
        (cache.v(1), cache.v_descale(1), 2),
    ):
        assert scales is not None
        assert scales[page, 0].tolist() == [2.0 * factor]
        assert pool[page, 0, 0].float().tolist() == [1.75, -448.0]


def test_attention_over_forks_sees_their_tokens_and_no_other(device: torch.device) -> None:
    """Storage nobody wrote is NaN; a prompt is prefilled, forked, and decoded in both branches."""
    torch.manual_seed(0)
    cache = make_cache(page_size=3, num_kv_heads=2, head_dim=8, head_dim_v=4, device=device)
    parent = cache.allocate()
    history: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def step(seqs: list[int], count: int) -> None:
        new = dict.fromkeys(seqs, count)
        cache.reserve(new)
        for layer in range(cache.num_layers):
            q, k = torch.randn(2, len(seqs), count, 2, 8, device=device)
            v = torch.randn(len(seqs), count, 2, 4, device=device)
            table, lengths = cache.view(seqs)
            out = flash_attn_with_kvcache(
                q,
                cache.k(layer),
                cache.v(layer),
                k,
                v,
                cache_seqlens=lengths,
                page_table=table,
                causal=True,
            )
            for row, seq in enumerate(seqs):
                old = history.get((layer, seq), (k[row, :0], v[row, :0]))
                keys, values = torch.cat([old[0], k[row]]), torch.cat([old[1], v[row]])
                history[layer, seq] = keys, values
                logits = torch.einsum("qhd,khd->hqk", q[row], keys) / 8**0.5
                ahead = torch.ones_like(logits[0]).triu(len(keys) - count + 1).bool()
                weights = logits.masked_fill(ahead, float("-inf")).softmax(-1)
                expected = torch.einsum("hqk,khd->qhd", weights, values)
                torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-5)
        cache.commit(new)

    step([parent], 7)
    child = cache.fork(parent)
    history |= {(layer, child): history[layer, parent] for layer in range(cache.num_layers)}
    for seqs in ([child], [child, parent], [parent, child]):
        step(seqs, 2)


# CUDA graphs


@needs_cuda
def test_a_graph_replays_on_the_changed_books() -> None:
    cache = make_cache(device="cuda", max_batch=3)
    seqs = cache.allocate(2)
    seen_table, seen_lengths = torch.empty_like(cache.page_table), torch.empty_like(cache.lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen_table.copy_(cache.page_table)
        seen_lengths.copy_(cache.lengths)
    for _ in range(10):
        cache.reserve(dict.fromkeys(seqs, 1))
        graph.replay()
        assert seen_table.tolist() == cache.page_table.tolist()
        assert seen_lengths.tolist() == [*map(cache.length, seqs), -1]
        cache.commit(dict.fromkeys(seqs, 1))
        check_books(cache)


@needs_cuda
def test_changes_under_capture_are_refused() -> None:
    cache = make_cache(device="cuda")
    seq = cache.allocate()
    cache.reserve({seq: 4})
    before = state(cache)
    graph = torch.cuda.CUDAGraph()
    seen = torch.empty_like(cache.lengths)
    with torch.cuda.graph(graph):
        cache.reserve({seq: 2})  # the room is there: nothing changes
        changes = (
            lambda: cache.reserve({seq: 5}),
            lambda: cache.commit({seq: 1}),
            cache.allocate,
            lambda: cache.fork(seq),
            lambda: cache.truncate(seq, 0),
            lambda: cache.reorder([0]),
            cache.reset,
        )
        for change in changes:
            with pytest.raises(cache_kinds.CaptureError):
                change()
        seen.copy_(cache.lengths)
    assert state(cache) == before


@needs_cuda
def test_books_arrive_in_order_while_the_device_is_busy() -> None:
    cache = PageTables(
        num_pages=4000, page_size=1, max_batch=500, max_pages_per_seq=40, device="cuda"
    )
    seqs = cache.allocate(500)
    seen = []
    work = torch.randn(4096, 4096, device="cuda")
    for _ in range(7):
        work = (work @ work).clamp(-1, 1)
        cache.reserve(dict.fromkeys(seqs, 1))
        cache.commit(dict.fromkeys(seqs, 1))
        seen.append((cache.page_table.clone(), cache.lengths.clone()))
    for step, (table, lengths) in enumerate(seen, 1):
        assert lengths.tolist() == [step] * 500
        rows = [list(cache.pages(seq)[:step]) + [-1] * (40 - step) for seq in seqs]
        assert table.tolist() == rows


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_have_tables_of_their_own(twin: Any) -> None:
    cache = make_cache(num_pages=8, page_size=4)
    seq = cache.allocate()
    cache.reserve({seq: 5})
    cache.commit({seq: 5})
    other = twin(cache)
    other.reserve({seq: 6})
    other.commit({seq: 6})
    assert cache.lengths[seq] == 5 and other.lengths[seq] == 11
    assert (cache.page_table[seq] >= 0).sum() == 2 and (other.page_table[seq] >= 0).sum() == 3
    cache.k(0)[0] = 1.0
    assert not torch.equal(other.k(0)[0], cache.k(0)[0])

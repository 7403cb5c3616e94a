"""PagedKVCache and attention calls: what they are given, what they append, CUDA graphs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from cache_tools import check_books, extend, make_cache, read, state, unshare_host_memory
from torch.utils._python_dispatch import TorchDispatchMode

from kvattn import flash_attn_with_kvcache
from kvattn.errors import cache_kinds
from kvattn.tables import PageTables

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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

"""Every mistake in the use of PagedKVCache, and its limits; none of them changes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cache_tools import check_books, extend, make_cache, read, state

from kvattn import append_kv
from kvattn.cache import PagedKVCache
from kvattn.errors import cache_kinds, kinds
from kvattn.errors.base import KvattnError


@pytest.fixture
def busy() -> Iterator[PagedKVCache]:
    """Sequences 0 and 1 alive with 5 and 6 tokens, row 2 freed; 8 pages, at most 5 a sequence."""
    cache = make_cache(num_pages=8, max_pages_per_seq=5)
    cache.allocate(3)
    extend(cache, 0, *range(5))
    extend(cache, 1, *range(6))
    cache.free(2)
    yield cache
    check_books(cache)


NEW = torch.zeros(2, 1, 9, 1, 2)  # k and v of nine tokens, for which there is no room yet

MISTAKES: list[tuple[type[KvattnError], str, Callable[[Any], object]]] = [
    (cache_kinds.OutOfPagesError, "new", lambda c: c.reserve({0: 15, 1: 14})),
    (cache_kinds.SequenceTooLongError, "new", lambda c: c.reserve({1: 1, 0: 16})),
    (cache_kinds.BatchFullError, "count", lambda c: c.allocate(3)),
    (cache_kinds.UnknownSequenceError, "seq", lambda c: c.reserve({0: 9, 2: 1})),
    (cache_kinds.UnknownSequenceError, "seq", lambda c: c.commit([(0, 1), (-1, 1)])),
    (cache_kinds.UnknownSequenceError, "seq", lambda c: c.free([0, 2])),
    (cache_kinds.UnknownSequenceError, "seq", lambda c: c.fork(7)),
    (cache_kinds.UnknownSequenceError, "seq", lambda c: c.truncate(2, 0)),
    (cache_kinds.UnknownSequenceError, "seq", lambda c: c.view([0, 1, 2])),
    (cache_kinds.UnknownSequenceError, "seq", lambda c: c.slots(2)),
    (cache_kinds.UnknownSequenceError, "seq", lambda c: c.pages(2)),
    (cache_kinds.UnknownSequenceError, "seq", lambda c: c.reorder([0, 1], [0, 2])),
    (cache_kinds.DuplicateSequenceError, "new", lambda c: c.reserve([(0, 1), (0, 9)])),
    (cache_kinds.DuplicateSequenceError, "seqs", lambda c: c.free([0, 0])),
    (cache_kinds.DuplicateSequenceError, "seqs", lambda c: c.reorder([0, 1], [1, 1])),
    (cache_kinds.TokenCountError, "new", lambda c: c.reserve({0: 9, 1: -1})),
    (cache_kinds.TokenCountError, "new", lambda c: c.reserve({0: 1.5})),
    (cache_kinds.TokenCountError, "new", lambda c: c.reserve([0, 1])),
    (cache_kinds.TokenCountError, "new", lambda c: c.reserve(0)),
    (cache_kinds.TokenCountError, "count", lambda c: c.allocate(-1)),
    (cache_kinds.TokenCountError, "count", lambda c: c.allocate(True)),
    (cache_kinds.TokenCountError, "tokens", lambda c: c.share(0, 2.0)),
    (cache_kinds.TokenCountError, "length", lambda c: c.truncate(0, -1)),
    (cache_kinds.TruncateLengthError, "length", lambda c: c.truncate(0, 6)),
    (cache_kinds.PrefixLengthError, "tokens", lambda c: c.share(0, 6)),
    (cache_kinds.NotReservedError, "new", lambda c: c.commit({1: 2, 0: 4})),
    (cache_kinds.NotReservedError, "stop", lambda c: c.slots(0, 0, 9)),
    (cache_kinds.NotReservedError, "start", lambda c: c.slots(0, 6)),
    (cache_kinds.LayerIndexError, "layer", lambda c: c.k(2)),
    (cache_kinds.LayerIndexError, "layer", lambda c: c.v_descale(-1)),
    (cache_kinds.ReorderError, "indices", lambda c: c.reorder([0])),
    (cache_kinds.ReorderError, "indices", lambda c: c.reorder([1, 2])),
    (cache_kinds.ReorderError, "indices", lambda c: c.reorder([0, -1])),
    (
        kinds.NewTokenBatchError,
        "k",
        lambda c: c.append(0, torch.zeros(1, 9, 1, 2), torch.zeros(1, 9, 1, 2), [0, 1]),
    ),
    (
        cache_kinds.OutOfPagesError,
        "new",
        lambda c: c.append(0, torch.zeros(2, 14, 1, 2), torch.zeros(2, 14, 1, 2), [0, 1]),
    ),
    *(
        (cache_kinds.UnknownSequenceError, "seq", act)
        for act in (
            *(lambda c, bad=bad: c.free(bad) for bad in (1.0, True, [1, 0.0], None, [[1]])),
            *(lambda c, bad=bad: c.truncate(bad, 0) for bad in (1.0, [1], True)),
            *(lambda c, bad=bad: c.commit({bad: 0}) for bad in (1.0, True)),
            *(lambda c, bad=bad: c.view([bad]) for bad in (0.0, [0], "0")),
            lambda c: c.fork([0]),
            lambda c: c.length({}),
            lambda c: c.common_prefix(None),
            lambda c: c.reorder([0], [[1]]),
            lambda c: c.append(0, *NEW, 1.0),
        )
    ),
    *(
        (cache_kinds.ReorderError, "indices", lambda c, bad=bad: c.reorder(bad))
        for bad in ([0, 0.5], [0.0, 1.0], [True, 0], None, 1, [[0], 1], torch.tensor(1))
    ),
    *(
        (cache_kinds.LayerIndexError, "layer", lambda c, bad=bad: c.k(bad))
        for bad in (None, 1.0, True, "0", [0], torch.zeros(2), torch.ones((), device="meta"))
    ),
    (cache_kinds.TokenCountError, "new", lambda c: c.reserve({0: True})),
    (cache_kinds.TokenCountError, "count", lambda c: c.allocate(torch.zeros(2))),
    (cache_kinds.TokenCountError, "count", lambda c: c.allocate(torch.ones((), device="meta"))),
    (kinds.NotATensorError, "k", lambda c: c.append(0, None, NEW[1], 0)),
    (kinds.NotATensorError, "v", lambda c: c.append(0, NEW[0], [1.0], 0)),
    (kinds.HeadDimError, "k", lambda c: c.append(0, torch.zeros(1, 9, 1, 3), NEW[1], 0)),
    (kinds.NewTokenCountError, "v", lambda c: c.append(0, NEW[0], NEW[1][:, :1], 0)),
    (kinds.NewTokenDtypeError, "k", lambda c: c.append(0, NEW[0].long(), NEW[1], 0)),
    (cache_kinds.CacheSizeError, "num_pages", lambda _: make_cache(num_pages=0)),
    (cache_kinds.CacheSizeError, "page_size", lambda _: make_cache(page_size=1.0)),
    (cache_kinds.CacheSizeError, "max_batch", lambda _: make_cache(max_batch=True)),
    (cache_kinds.CacheSizeError, "max_pages_per_seq", lambda _: make_cache(max_pages_per_seq=-1)),
    (cache_kinds.CacheSizeError, "num_layers", lambda _: make_cache(num_layers=0)),
    (cache_kinds.CacheSizeError, "num_kv_heads", lambda _: make_cache(num_kv_heads=0)),
    (cache_kinds.CacheSizeError, "head_dim", lambda _: make_cache(head_dim=0)),
    (cache_kinds.CacheSizeError, "head_dim_v", lambda _: make_cache(head_dim_v=0)),
    (cache_kinds.CacheStorageDtypeError, "dtype", lambda _: make_cache(dtype=torch.int32)),
    (cache_kinds.CacheStorageDtypeError, "dtype", lambda _: make_cache(dtype="bfloat16")),
    (cache_kinds.CacheDescaleError, "k_descale", lambda _: make_cache(k_descale=torch.ones(3))),
    (cache_kinds.CacheDescaleError, "v_descale", lambda _: make_cache(v_descale=0.0)),
    (cache_kinds.CacheDescaleError, "v_descale", lambda _: make_cache(v_descale=float("nan"))),
    (cache_kinds.CacheDescaleError, "k_descale", lambda _: make_cache(k_descale="token")),
    (cache_kinds.CacheDescaleError, "token_descale", lambda _: make_cache(token_descale=True)),
    (
        cache_kinds.CacheDescaleError,
        "token_descale",
        lambda _: make_cache(dtype=torch.int8, token_descale=True, v_descale=torch.ones(1)),
    ),
]


@pytest.mark.parametrize(("error", "argument", "mistake"), MISTAKES)
def test_a_mistake_is_named_and_changes_nothing(
    busy: PagedKVCache,
    error: type[KvattnError],
    argument: str,
    mistake: Callable[[Any], object],
) -> None:
    contents, before = [read(busy, seq) for seq in (0, 1)], state(busy)
    with pytest.raises(error) as caught:
        mistake(busy)
    assert caught.value.argument == argument
    for part in (error.code, argument, error.problem, str(caught.value.got), caught.value.fix):
        assert part in str(caught.value)
    assert state(busy) == before
    assert [read(busy, seq) for seq in (0, 1)] == contents


def test_ids_of_any_integer_kind_come_back_as_plain_ones(busy: PagedKVCache) -> None:
    busy.truncate(torch.tensor(1), np.int64(2))  # type: ignore[arg-type]
    busy.free(np.array([1, 0]))
    assert [type(seq) for seq in busy.allocate(4)] == [int] * 4
    assert np.int32(3) in busy
    assert 3.0 not in busy
    assert [3] not in busy


def test_a_full_batch_takes_no_fork(busy: PagedKVCache) -> None:
    busy.fork(0)
    busy.share(1, 3)
    before = state(busy)
    with pytest.raises(cache_kinds.BatchFullError, match=r"0 of 4 rows free"):
        busy.fork(1)
    assert state(busy) == before


def test_the_limits_say_what_is_missing() -> None:
    cache = make_cache(num_pages=3, max_pages_per_seq=5)
    first, second = cache.allocate(2)
    extend(cache, first, *range(7))
    with pytest.raises(cache_kinds.CacheLimitError, match=r"3 more pages needed.* 1 free of 3"):
        cache.reserve({first: 2, second: 5})
    with pytest.raises(cache_kinds.CacheLimitError, match=r"6 pages for the 21 tokens.* 5 pages"):
        cache.reserve({first: 14})


def test_every_error_class_is_provoked() -> None:
    concrete = {
        kind
        for kind in vars(cache_kinds).values()
        if isinstance(kind, type) and issubclass(kind, KvattnError) and "code" in vars(kind)
        if kind.__module__ == cache_kinds.__name__
    }
    assert concrete - {error for error, _, _ in MISTAKES} == {cache_kinds.CaptureError}
    assert len({kind.code for kind in concrete}) == len(concrete)


def test_a_step_without_room_is_told_to_reserve(busy: PagedKVCache) -> None:
    table, lengths = busy.view([1])
    room = len(busy.pages(1)) * busy.page_size - busy.length(1)
    new = torch.zeros(1, room + 1, busy.num_kv_heads, busy.head_dim, dtype=busy.dtype)
    with pytest.raises(kinds.PageOutOfRangeError, match=r"reserve, after which view"):
        append_kv(new, new, busy.k(0), busy.v(0), cache_seqlens=lengths, page_table=table)

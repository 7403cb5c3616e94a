"""What the tests of the cache share: small caches, their tokens, their books."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from kvattn.cache import PagedKVCache
from kvattn.tables import PageTables


def make_cache(**changes: Any) -> PagedKVCache:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "num_pages": 12,
        "page_size": 4,
        "num_kv_heads": 1,
        "head_dim": 2,
        "dtype": torch.float32,
        "max_batch": 4,
    }
    return PagedKVCache(**(sizes | changes))


def write(cache: PagedKVCache, seq: int, start: int, tokens: list[int]) -> None:
    """Stores token t in layer l as key t + 1000 l and value -(t + 1000 l)."""
    slots = cache.slots(seq, start, start + len(tokens))
    for layer in range(cache.num_layers):
        numbers = torch.tensor(tokens, dtype=torch.float32, device=cache.device) + 1000 * layer
        for pool, sign in ((cache.k(layer), 1), (cache.v(layer), -1)):
            rows = (sign * numbers)[:, None, None].expand(-1, *pool.shape[2:])
            flat = pool.view(-1, *pool.shape[2:])
            for slot, row in zip(slots.tolist(), rows.to(pool.dtype), strict=True):
                flat[slot] = row


def extend(cache: PagedKVCache, seq: int, *tokens: int) -> None:
    cache.reserve({seq: len(tokens)})
    write(cache, seq, cache.length(seq), list(tokens))
    cache.commit({seq: len(tokens)})


def read(cache: PagedKVCache, seq: int) -> list[int]:
    """The tokens of a sequence, found through the device tensors alone, equal in all layers."""
    length, size = int(cache.lengths[seq]), cache.page_size
    pages = cache.page_table[seq, : -(-length // size)].long()
    first = cache.k(0)[pages].flatten(0, 1)[:length].float()
    tokens = first[:, 0, 0]
    for layer in range(cache.num_layers):
        keys, values = (pool(layer)[pages].flatten(0, 1)[:length] for pool in (cache.k, cache.v))
        expected = (tokens + 1000 * layer)[:, None, None]
        assert torch.equal(keys.float(), expected.expand_as(keys))
        assert torch.equal(values.float(), -expected.expand_as(values))
    return [int(token) for token in tokens.tolist()]


def unshare_host_memory(cache: PageTables) -> None:
    """Makes a cache on the CPU send its books to the device tensors, as on an accelerator."""
    for mirror in (cache._table, cache._lengths):
        mirror.tensor = mirror.tensor.clone()


def state(cache: PageTables) -> tuple[Any, ...]:
    """Everything that a refused call must leave alone."""
    books = {seq: (cache.pages(seq), cache.length(seq)) for seq in cache.sequences}
    pool, tensors = cache._pool, (cache.page_table.tolist(), cache.lengths.tolist())
    return books, list(pool.refs), pool._free, pool.num_free, sorted(cache._free_rows), *tensors


def check_books(cache: PageTables) -> None:
    pool = cache._pool
    held = Counter(page for seq in cache.sequences for page in cache.pages(seq))
    assert [held[page] for page in range(cache.num_pages)] == pool.refs
    assert pool.num_free == pool.refs.count(0)
    assert pool._free == sum(1 << page for page, refs in enumerate(pool.refs) if refs == 0)
    for seq in cache.sequences:
        filled = -(-cache.length(seq) // cache.page_size)
        assert len(cache.pages(seq)) >= filled
        assert all(held[page] == 1 for page in cache.pages(seq)[filled:])
    table, lengths = cache.page_table.tolist(), cache.lengths.tolist()
    for row in range(cache.max_batch):
        pages = list(cache.pages(row)) if row in cache else []
        assert table[row] == pages + [-1] * (cache.max_pages_per_seq - len(pages))
        assert lengths[row] == (cache.length(row) if row in cache else -1)

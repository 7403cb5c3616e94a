"""PagedKVCache under thousands of random operations, against plain lists of tokens."""

from __future__ import annotations

import pytest
import torch
from cache_tools import check_books, make_cache, read, state, unshare_host_memory, write
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvattn.errors import cache_kinds
from kvattn.errors.base import KvattnError


class CacheMachine(RuleBasedStateMachine):
    """Random operations on a cache, against a plain list of tokens per sequence."""

    @initialize(
        num_pages=st.sampled_from([5, 10, 20]),
        page_size=st.sampled_from([1, 3, 4]),
        head_dim_v=st.sampled_from([1, 2]),
        own_memory=st.booleans(),
    )
    def start(self, num_pages: int, page_size: int, head_dim_v: int, own_memory: bool) -> None:
        self.cache = make_cache(
            num_pages=num_pages,
            page_size=page_size,
            head_dim=1,
            head_dim_v=head_dim_v,
            max_batch=6,
            max_pages_per_seq=9,
        )
        if own_memory:
            unshare_host_memory(self.cache)
        self.addresses = self.current_addresses()
        self.tokens: dict[int, list[int]] = {}
        self.room: dict[int, int] = {}  # reserved tokens behind the committed ones
        self.next_token = 0

    def current_addresses(self) -> list[int]:
        cache = self.cache
        pools = [pool(layer) for pool in (cache.k, cache.v) for layer in range(cache.num_layers)]
        return [tensor.data_ptr() for tensor in (cache.page_table, cache.lengths, *pools)]

    def fresh_tokens(self, count: int) -> list[int]:
        self.next_token = (self.next_token + count) % 900
        return [(self.next_token + i) % 900 for i in range(count)]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    def needed(self, new: dict[int, int]) -> int:
        """Pages that a reservation takes, counted one sequence after the other."""
        cache, refs = self.cache, list(self.cache._pool.refs)
        total = 0
        for seq, count in new.items():
            length, pages = cache.length(seq), cache.pages(seq)
            total += max(-(-(length + count) // cache.page_size) - len(pages), 0)
            if count and length % cache.page_size:
                last = pages[length // cache.page_size]
                total += refs[last] > 1
                refs[last] -= refs[last] > 1
        return total

    def try_reserve(self, new: dict[int, int]) -> bool:
        cache = self.cache
        ends = [cache.length(seq) + count for seq, count in new.items()]
        before = state(cache)
        error: type[KvattnError] | None = None
        if max(ends) > cache.max_pages_per_seq * cache.page_size:
            error = cache_kinds.SequenceTooLongError
        elif self.needed(new) > cache.stats().pages_free:
            error = cache_kinds.OutOfPagesError
        if error is None:
            free = cache.stats().pages_free - self.needed(new)
            cache.reserve(new)
            assert cache.stats().pages_free == free
            self.room |= {seq: max(count, self.room[seq]) for seq, count in new.items()}
            return True
        with pytest.raises(error):
            cache.reserve(new)
        assert state(cache) == before
        return False

    @precondition(lambda self: len(self.tokens) < 6)
    @rule(count=st.integers(1, 3))
    def allocate(self, count: int) -> None:
        if len(self.tokens) + count > 6:
            before = state(self.cache)
            with pytest.raises(cache_kinds.BatchFullError):
                self.cache.allocate(count)
            assert state(self.cache) == before
            return
        for seq in self.cache.allocate(count):
            self.tokens[seq], self.room[seq] = [], 0

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), length=st.integers(0, 3) | st.integers(0, 14))
    def append(self, data: st.DataObject, length: int) -> None:
        batch = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, unique=True))
        new = {seq: max(length - i, 0) for i, seq in enumerate(batch)}
        if self.try_reserve(new):
            for seq, count in new.items():
                tokens = self.fresh_tokens(count)
                write(self.cache, seq, len(self.tokens[seq]), tokens)
                self.tokens[seq] += tokens
                self.room[seq] -= count
            self.cache.commit(new)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(0, 3) | st.integers(0, 9))
    def reserve(self, data: st.DataObject, count: int) -> None:
        self.try_reserve({self.pick(data): count})

    @precondition(lambda self: any(self.room.values()))
    @rule(data=st.data())
    def speculate(self, data: st.DataObject) -> None:
        """Writes all of the reserved room and keeps a part of it."""
        seq = data.draw(st.sampled_from([seq for seq, room in self.room.items() if room]))
        kept = data.draw(st.integers(0, self.room[seq]))
        tokens = self.fresh_tokens(self.room[seq])
        write(self.cache, seq, len(self.tokens[seq]), tokens)
        self.cache.commit([(seq, kept)])
        self.tokens[seq] += tokens[:kept]
        self.room[seq] -= kept

    @precondition(lambda self: 0 < len(self.tokens) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        child = self.cache.fork(seq)
        self.tokens[child], self.room[child] = list(self.tokens[seq]), 0

    @precondition(lambda self: 0 < len(self.tokens) < 6)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        length = data.draw(st.integers(0, len(self.tokens[seq])))
        child = self.cache.share(seq, length)
        self.tokens[child], self.room[child] = self.tokens[seq][:length], 0

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        length = data.draw(st.integers(0, len(self.tokens[seq])))
        self.cache.truncate(seq, length)
        del self.tokens[seq][length:]
        self.room[seq] = 0

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.cache.free(seq)
        del self.tokens[seq], self.room[seq]

    @precondition(lambda self: len(self.tokens) > 1)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        seqs = data.draw(st.permutations(sorted(self.tokens)))
        seqs = seqs[: data.draw(st.integers(1, len(seqs)))]
        indices = [data.draw(st.integers(0, len(seqs) - 1)) for _ in seqs]
        self.cache.reorder(indices, seqs)
        before = {seq: list(self.tokens[seq]) for seq in seqs}
        for seq, source in zip(seqs, indices, strict=True):
            if seqs[source] != seq:
                self.tokens[seq], self.room[seq] = list(before[seqs[source]]), 0

    @precondition(lambda self: len(self.tokens) > 4)
    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.tokens, self.room = {}, {}

    @invariant()
    def holds(self) -> None:
        cache = self.cache
        assert cache.sequences == sorted(self.tokens)
        check_books(cache)
        for seq, tokens in self.tokens.items():
            assert read(cache, seq) == tokens
        assert self.current_addresses() == self.addresses
        self.poison()

    def poison(self) -> None:
        """Dead slots become NaN, so that a later read of one shows."""
        cache = self.cache
        dead = torch.ones(cache.num_pages * cache.page_size, dtype=torch.bool)
        for seq in self.tokens:
            dead[cache.slots(seq)] = False
        for layer in range(cache.num_layers):
            for pool in (cache.k(layer), cache.v(layer)):
                pool.view(-1, *pool.shape[2:])[dead] = float("nan")


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

"""batch_invariant=True: a row's bits depend on its own query, keys and options, on nothing else."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from cases import BF16, E4M3, F16, F32, attend
from conftest import DEVICE
from torch import Tensor

LENGTHS = (1100, 3, 530, 64)
KV_HEADS, DIM = 1, 32


class Sequences:
    """Keys and queries of some sequences, from which calls of any form are made."""

    def __init__(self, dtype: torch.dtype, cache_dtype: torch.dtype, group: int = 4) -> None:
        generator = torch.Generator("cpu").manual_seed(5)
        draw = partial(torch.randn, generator=generator, device="cpu")
        self.k = [draw(n, KV_HEADS, DIM).to(cache_dtype) for n in LENGTHS]
        self.v = [draw(n, KV_HEADS, DIM).to(cache_dtype) for n in LENGTHS]
        self.q = [draw(40, group * KV_HEADS, DIM).to(dtype) for _ in LENGTHS]

    def call(
        self,
        backend: str,
        who: tuple[int, ...] = (0, 1, 2, 3),
        page: int | None = 16,
        room: int = 0,
        queries: int = 1,
        seed: int = 0,
        **more: Any,
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """(out, lse) of each sequence, from one call over the sequences `who`.

        The cache has `room` more rows than needed, and its pages lie as `seed` shuffles them.
        """
        size = page or 1
        width = -(-(max(LENGTHS[i] for i in who) + room) // size)
        chance = torch.Generator("cpu").manual_seed(seed)
        pages = torch.randperm(len(who) * width, generator=chance, device="cpu")
        table = pages.view(len(who), width).int()
        caches = []
        for rows in (self.k, self.v):
            dense = torch.zeros(len(who), width * size, KV_HEADS, DIM, dtype=F32, device="cpu")
            for at, i in enumerate(who):
                dense[at, : LENGTHS[i]] = rows[i].float()
            dense = dense.to(rows[0].dtype)
            if page is not None:
                blocks = dense.view(len(who) * width, page, KV_HEADS, DIM)
                dense = blocks[torch.argsort(pages)].contiguous()
            caches.append(dense.to(DEVICE))
        out, lse = attend(
            backend,
            q=torch.stack([self.q[i][-queries:] for i in who]).to(DEVICE),
            k_cache=caches[0],
            v_cache=caches[1],
            cache_seqlens=torch.tensor([LENGTHS[i] for i in who], dtype=torch.int32).to(DEVICE),
            page_table=None if page is None else table.to(DEVICE),
            causal=True,
            batch_invariant=True,
            **more,
        )
        return {i: (out[at].cpu(), lse[at].cpu()) for at, i in enumerate(who)}


def assert_same_bits(
    got: dict[int, tuple[Tensor, Tensor]], wanted: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """The last rows of both, as many as the shorter has, agree bit for bit."""
    for i, (out, lse) in got.items():
        rows = min(len(out), len(wanted[i][0]))
        assert torch.equal(out[-rows:], wanted[i][0][-rows:]), f"out of sequence {i}"
        assert torch.equal(lse[:, -rows:], wanted[i][1][:, -rows:]), f"lse of sequence {i}"


@pytest.mark.parametrize("cache_dtype", [BF16, F16, E4M3], ids=["bf16", "fp16", "fp8"])
def test_neighbours_order_pages_and_capacity_leave_the_bits(
    backend: str, cache_dtype: torch.dtype
) -> None:
    given = Sequences(F16 if cache_dtype is F16 else BF16, cache_dtype)
    wanted = given.call(backend)
    assert_same_bits(given.call(backend, who=(3, 2, 1, 0)), wanted)
    for alone in range(len(LENGTHS)):
        assert_same_bits(given.call(backend, who=(alone,), seed=1), wanted)
    assert_same_bits(given.call(backend, page=64, seed=2), wanted)
    assert_same_bits(given.call(backend, page=None), wanted)
    assert_same_bits(given.call(backend, room=3000, who=(0, 2), seed=3), wanted)


@pytest.mark.parametrize("group", [1, 4, 7])
def test_any_number_of_query_tokens_gives_a_token_the_same_bits(backend: str, group: int) -> None:
    given = Sequences(BF16, BF16, group)
    wanted = given.call(backend, queries=8)
    for queries in (1, 2, 5):
        assert_same_bits(given.call(backend, queries=queries), wanted)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("bound", [None, 40, 300])
def test_a_neighbour_with_many_query_tokens_leaves_the_bits(
    backend: str, group: int, bound: int | None
) -> None:
    """And the bound is a hint. Few tokens and many may go to different kernels, each by its own."""
    given = Sequences(BF16, BF16, group)
    counts = (40, 1, 9, 5)
    edges = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    k, v = (
        torch.stack([torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1100 - len(x))) for x in rows])
        for rows in (given.k, given.v)
    )
    out, lse = attend(
        backend,
        q=torch.cat([q[-n:] for q, n in zip(given.q, counts, strict=True)]).to(DEVICE),
        k_cache=k.to(DEVICE),
        v_cache=v.to(DEVICE),
        cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32).to(DEVICE),
        cu_seqlens_q=edges.to(DEVICE),
        max_seqlen_q=bound,
        causal=True,
        batch_invariant=True,
    )
    for i, queries in enumerate(counts):
        rows = slice(int(edges[i]), int(edges[i + 1]))
        alone = given.call(backend, who=(i,), queries=queries)
        assert_same_bits({i: (out[rows].cpu(), lse[:, rows].cpu())}, alone)


@pytest.mark.parametrize(
    "option",
    [{"window_size": (300, 0)}, {"softcap": 20.0}, {"attention_chunk": 700}, {"sinks": True}],
    ids=["window", "softcap", "chunk", "sinks"],
)
def test_with_masks_and_caps_too(backend: str, option: dict[str, Any]) -> None:
    given = Sequences(BF16, BF16)
    if "sinks" in option:
        option = {"sinks": torch.linspace(-1, 1, 4, device=DEVICE)}
    wanted = given.call(backend, queries=3, **option)
    assert_same_bits(given.call(backend, who=(2, 0), page=64, **option), wanted)
    assert_same_bits(given.call(backend, who=(0,), room=500, queries=2, **option), wanted)


def test_a_token_appended_by_the_call_counts_as_one_that_was_there(backend: str) -> None:
    given = Sequences(BF16, BF16)
    wanted = given.call(backend, who=(0, 2))
    page, width = 16, 70
    for count in (1, 3):
        pages = torch.arange(2 * width, dtype=torch.int32).view(2, width)
        caches = torch.zeros(2, 2 * width * page, KV_HEADS, DIM, dtype=BF16)
        fresh = torch.empty(2, 2, count, KV_HEADS, DIM, dtype=BF16)
        for at, i in enumerate((0, 2)):
            old = LENGTHS[i] - count
            for which, rows in enumerate((given.k[i], given.v[i])):
                caches[which, at * width * page :][:old] = rows[:old]
                fresh[which, at] = rows[old:]
        k_cache, v_cache = caches.view(2, -1, page, KV_HEADS, DIM).to(DEVICE).unbind()
        out, _ = attend(
            backend,
            q=torch.stack([given.q[i][-1:] for i in (0, 2)]).to(DEVICE),
            k_cache=k_cache,
            v_cache=v_cache,
            k=fresh[0].to(DEVICE),
            v=fresh[1].to(DEVICE),
            cache_seqlens=torch.tensor([1100 - count, 530 - count]).int().to(DEVICE),
            page_table=pages.to(DEVICE),
            causal=True,
            batch_invariant=True,
        )
        for at, i in enumerate((0, 2)):
            assert torch.equal(out[at].cpu(), wanted[i][0]), f"{count} appended to sequence {i}"


@pytest.mark.parametrize("pairs", [False, True])
def test_tiles_of_the_decode_kernel_depend_on_nothing_but_the_row(pairs: bool) -> None:
    """As the planner chooses them for a GPU that the interpreter does not stand for."""
    pytest.importorskip("triton")
    from kvattn.backends.triton_decode import Shape, plan

    seen = set()
    for page, batch, capacity, leftpad in itertools.product(
        (0, 16, 64, 256), (1, 7), (300, 9000), (False, True)
    ):
        shape = Shape(
            rows=4, ragged=0, batch=batch, heads=8, capacity=capacity, dims=256,
            width=1 if pairs else 2, multiplied=2, pairs=pairs, page=page, leftpad=leftpad,
            processors=132, shared=232_448, invariant=True, splits=0, plain=True, warpgroups=True,
        )  # fmt: skip
        tiles = plan(shape)
        seen.add((tiles.r, tiles.warps, tiles.keys))
    assert len(seen) == 1

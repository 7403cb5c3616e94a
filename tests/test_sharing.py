"""Pages that all sequences share, found from the page table: by a kernel or by plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, assert_refusal, ints
from conftest import DEVICE
from torch import Tensor

import kvattn
from kvattn import errors as E
from kvattn.testing import Case, attend, clone_inputs, make_inputs

common_prefix: Any = kvattn.common_prefix
GARBAGE = (2**31 - 1, -1, 0)


def found(
    backend: str, table: Tensor, lengths: Tensor, size: int, rows: Tensor | None = None
) -> Tensor:
    if backend == "triton":
        from kvattn.backends import triton_prefix

        return triton_prefix.common(table, lengths, rows, size)
    return kvattn.common_prefix(table, lengths, size, cache_batch_idx=rows)


def table_of(lengths: list[int], size: int, columns: int, shared: int, seed: int = 0) -> Tensor:
    """Pages of their own behind `shared` columns; entries that are not in use hold garbage."""
    random = torch.Generator("cpu").manual_seed(seed)
    wide = torch.tensor(GARBAGE, dtype=torch.int32, device="cpu").repeat(len(lengths), columns + 1)
    count = 4 * len(lengths) * columns + 4
    pages = torch.randperm(count, generator=random, dtype=torch.int32, device="cpu")
    start = pages[:columns]
    for b, length in enumerate(lengths):
        used = -(-max(length, 0) // size)
        own = pages[(b + 1) * columns :][:used]
        wide[b, :used] = torch.cat([start[: min(shared, used)], own[shared:]])[:used]
    return wide.to(DEVICE)[:, :columns]


def wanted(table: Tensor, lengths: list[int], size: int) -> int:
    """The definition, page by page."""
    rows = [row[: -(-n // size)] for row, n in zip(table.tolist(), lengths, strict=True) if n > 0]
    if len(rows) < 2:
        return 0
    shared = 0
    for pages in zip(*rows, strict=False):
        if len(set(pages)) > 1:
            break
        shared += 1
    return shared * size


CASES = {
    "two": ([40, 33], 16, 5, 2),
    "nothing": ([40, 33], 16, 5, 0),
    "all of the shortest": ([100, 20, 90], 16, 7, 7),
    "to the end of the table": ([112, 112], 16, 7, 7),
    "its last page not full": ([100, 18, 90], 16, 7, 2),
    "inactive and empty": ([100, -1, 90, 0, 99], 16, 7, 4),
    "first ones inactive": ([-1, 0, 90, 80, 99], 16, 7, 4),
    "one takes part": ([0, 90, -1], 16, 7, 4),
    "nobody takes part": ([0, -1], 16, 7, 4),
    "one sequence": ([90], 16, 7, 4),
    "pages of 1": ([150, 190, 140], 1, 200, 131),
    "pages of 7": ([900, 905], 7, 130, 128),
    "a block of columns": ([2000, 1999], 16, 125, 64),
    "more columns than a block": ([2000, 1999, 1100], 16, 125, 65),
    "many sequences": (list(range(400, 467)), 4, 120, 90),
    "many, one differs": ([*range(400, 470), 30], 4, 120, 90),
}


@pytest.mark.parametrize(("lengths", "size", "columns", "shared"), CASES.values(), ids=CASES)
def test_shared_pages(
    lengths: list[int], size: int, columns: int, shared: int, backend: str
) -> None:
    table = table_of(lengths, size, columns, shared)
    got = found(backend, table, ints(*lengths), size)
    assert (got.shape, got.dtype, got.device) == ((), torch.int32, table.device)
    assert got.item() == wanted(table, lengths, size)


@pytest.mark.parametrize("last", [0, 37, 66])
def test_a_page_of_one_sequence_ends_it(last: int, backend: str) -> None:
    """Wherever in the batch it is, and wherever in the table."""
    lengths = [1000] * 67
    table = table_of(lengths, 8, 125, 125)
    for column in (124, 70, 64, 63, 1, 0):
        table[last, column] += 1
        assert found(backend, table, ints(*lengths), 8).item() == 8 * column


def test_rows_of_the_table(backend: str) -> None:
    table = table_of([100, 100, 100, 100], 16, 7, 7)
    table[1, 3:] += 1
    lengths = ints(100, 90, 100)
    assert found(backend, table, lengths, 16, ints(0, 3, 2)).item() == 96
    assert found(backend, table, lengths, 16, ints(2, 2, 1)).item() == 48
    assert found(backend, table, lengths, 16, ints(1, 1, 1)).item() == 96


def test_empty_tables(backend: str) -> None:
    assert found(backend, ints().view(2, 0), ints(0, 0), 16).item() == 0
    assert found(backend, ints().view(0, 3), ints(), 16).item() == 0


def test_it_is_what_the_cache_says() -> None:
    cache = kvattn.PagedKVCache(num_layers=1, num_pages=32, page_size=4, num_kv_heads=1, head_dim=8,
                                device=DEVICE)  # fmt: skip
    (parent,) = cache.allocate(1)
    cache.reserve({parent: 14})
    cache.commit({parent: 14})
    child, twin = cache.fork(parent), cache.fork(parent)
    for seqs in ([parent, child, twin], [child, twin]):
        cache.reserve(dict.fromkeys(seqs, 3))  # the last page is copied
        table, lengths = cache.view(seqs)
        found = kvattn.common_prefix(table, lengths, cache.page_size)
        assert found.item() == cache.common_prefix(seqs) == 12


def test_a_call_takes_what_was_found(backend: str) -> None:
    case = Case(batch=3, lengths=(300, 257, 450), capacity=464, page_size=16, new=1, causal=True,
                dtype=BF16, dim=64, heads=4, kv_heads=1, common=256)  # fmt: skip
    inputs = make_inputs(case, device=DEVICE)
    lengths, table = inputs["cache_seqlens"], inputs["page_table"]
    inputs["common_prefix_len"] = kvattn.common_prefix(table, lengths, 16)
    assert inputs["common_prefix_len"].item() == 256
    plain = {**inputs, "common_prefix_len": 0}
    out, lse = attend(case, clone_inputs(plain), "reference")
    try:
        got = attend(case, clone_inputs(inputs), backend)
    except E.BackendRefusesError as error:
        assert_refusal(error)
        return
    torch.testing.assert_close(got[0], out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got[1], lse, rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(DEVICE != "cpu", reason="the compiled form is torch's own")
def test_under_compile() -> None:
    torch._dynamo.reset()
    lengths = [100, 90]
    table = table_of(lengths, 16, 7, 4)
    compiled = torch.compile(kvattn.common_prefix, backend="eager", fullgraph=True)
    assert compiled(table, ints(*lengths), 16).item() == 64


@pytest.mark.parametrize(
    ("change", "kind", "argument"),
    [
        ({"page_table": [[0]]}, E.NotATensorError, "page_table"),
        ({"cache_seqlens": 40}, E.NotATensorError, "cache_seqlens"),
        ({"page_size": 0}, E.CacheSizeError, "page_size"),
        ({"page_size": 16.0}, E.CacheSizeError, "page_size"),
        ({"page_table": ints(1, 2)}, E.PageTableTensorError, "page_table"),
        ({"page_table": ints(*range(6)).view(2, 3).long()}, E.PageTableTensorError, "page_table"),
        ({"page_table": ints(*range(6)).view(3, 2).T}, E.PageTableTensorError, "page_table"),
        ({"page_table": ints(*range(6)).view(3, 2)}, E.PageTableRowsError, "page_table"),
        ({"cache_seqlens": ints(40, 33).long()}, E.LengthsDtypeError, "cache_seqlens"),
        ({"cache_seqlens": ints(40, 33).view(2, 1)}, E.LengthsShapeError, "cache_seqlens"),
        ({"cache_seqlens": torch.empty(2, dtype=torch.int32, device="meta")},
         E.DeviceMismatchError, "cache_seqlens"),
        ({"cache_batch_idx": ints(0)}, E.LengthsShapeError, "cache_seqlens"),
        ({"cache_batch_idx": ints(0, 1).long()}, E.BatchIndexTensorError, "cache_batch_idx"),
        ({"cache_seqlens": ints(40, 49)}, E.LengthOverCapacityError, "cache_seqlens[1]"),
        ({"cache_seqlens": ints(-2, 33)}, E.NegativeLengthError, "cache_seqlens[0]"),
        ({"cache_batch_idx": ints(0, 2)}, E.BatchIndexRangeError, "cache_batch_idx[1]"),
    ],
)  # fmt: skip
def test_errors(change: dict[str, Any], kind: type[E.KvattnError], argument: str) -> None:
    given = {"page_table": ints(*range(6)).view(2, 3), "cache_seqlens": ints(40, 33),
             "page_size": 16}  # fmt: skip
    with kvattn.checked(), pytest.raises(kind) as caught:
        common_prefix(**{**given, **change})
    assert caught.value.argument == argument

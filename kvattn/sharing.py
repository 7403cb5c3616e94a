"""What the sequences of a batch have in common, found where their page table lies."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from kvattn import checks
from kvattn import errors as E
from kvattn.counting import positive
from kvattn.values import readable, rows_exist


def common_prefix(
    page_table: Tensor,
    cache_seqlens: Tensor,
    page_size: int,
    *,
    cache_batch_idx: Tensor | None = None,
) -> Tensor:
    """Leading tokens in pages that all sequences share, found on the device: a `common_prefix_len`.

    Nothing waits for the device, so that a captured CUDA graph may hold it, or read the number
    from a tensor that this one is copied into. Whole pages, and of a page that ends a sequence the
    slots behind it too. Sequences without tokens (lengths 0 and -1) take no part; 0 where fewer
    than two do.

    Args:
        page_table: (B | rows, max_pages) int32, as in `flash_attn_with_kvcache`.
        cache_seqlens: (B,) int32: tokens in the cache, before new ones are appended.
        page_size: slots of a page.
        cache_batch_idx: (B,) int32: the page-table row of each sequence.

    Returns:
        A tensor without dimensions, int32, on the page table's device.

    Raises:
        kvattn.errors.KvattnError: a subclass that names the argument.

    Example:
        >>> table = torch.tensor([[7, 3, 5], [7, 3, 4]], dtype=torch.int32)
        >>> lengths = torch.tensor([40, 33], dtype=torch.int32)
        >>> kvattn.common_prefix(table, lengths, 16)
        tensor(32, dtype=torch.int32)
    """
    size = positive("page_size", page_size)
    _check(page_table, cache_seqlens, cache_batch_idx, size)
    if page_table.is_cuda and find_spec("triton") and not torch.compiler.is_compiling():
        from kvattn.backends import triton_prefix

        return triton_prefix.common(page_table, cache_seqlens, cache_batch_idx, size)
    return _shared_pages(page_table, cache_seqlens, cache_batch_idx, size) * size


def _check(table: Tensor, lengths: Tensor, rows: Tensor | None, size: int) -> None:
    given = {"page_table": table, "cache_seqlens": lengths, "cache_batch_idx": rows}
    for name, tensor in given.items():
        if tensor is None and name == "cache_batch_idx":
            continue
        if not isinstance(tensor, Tensor):
            raise E.NotATensorError(name, type(tensor).__name__, "a torch.Tensor")
        checks.same_device(name, tensor, "page_table", table.device)
    count = (lengths if rows is None else rows).numel()
    checks.lengths(lengths, count)
    checks.vector(rows, "cache_batch_idx", count, E.BatchIndexTensorError)
    checks.page_table(table, rows, count)
    if readable(table):
        capacity = table.shape[1] * size
        for b, length in enumerate(lengths.tolist()):
            if length < -1:
                raise E.NegativeLengthError(f"cache_seqlens[{b}]", length, ">= -1")
            if length > capacity:
                raise E.LengthOverCapacityError(f"cache_seqlens[{b}]", length, f"<= {capacity}")
        if rows is not None:
            rows_exist(rows, len(table))


def _shared_pages(table: Tensor, lengths: Tensor, rows: Tensor | None, size: int) -> Tensor:
    """Leading pages that all sequences share, () int32."""
    if table.numel() == 0:
        return lengths.new_zeros(())
    used = torch.where(lengths > 0, (lengths - 1) // size + 1, 0)
    if rows is not None:
        used = torch.where((rows >= 0) & (rows < len(table)), used, 0)
        table = table[rows.clamp(0, len(table) - 1).long()]
    some = used > 0
    columns = torch.arange(table.shape[1], device=table.device)
    shortest = torch.where(some, used, table.shape[1]).min()
    model = table.index_select(0, some.int().argmax().view(1))
    shared = ((table == model) | ~some[:, None]).all(0) & (columns < shortest)
    pages = shared.int().cumprod(0).sum(dtype=torch.int32)
    return torch.where(some.sum() > 1, pages, 0)

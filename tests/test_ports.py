"""Calls as programs write them for other libraries: the same numbers, or an error that leads on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kvattn import BlockSparse, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from kvattn.errors import (
    BlockSparseError,
    ModCallableError,
    ModResultError,
    NotATensorError,
    QueryRankError,
    SoftmaxScaleError,
)

B, S, H, HK, D = 2, 9, 4, 2, 16
EDGES = torch.tensor([0, S, B * S], dtype=torch.int32)


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, S, H, D), torch.randn(B, S, HK, D), torch.randn(B, S, HK, D)


def causal(qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in qkv)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def test_dropout_in_fourth_place_is_not_a_scale(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """FA2's flash_attn_func(q, k, v, 0.0, causal=True) would otherwise weigh all keys alike."""
    with pytest.raises(SoftmaxScaleError, match=r"dropout_p=0\.0"):
        flash_attn_func(*qkv, 0.0, causal=True)
    with pytest.raises(NotATensorError, match="dropout_p"):
        q, k, v = (x.flatten(0, 1) for x in qkv)
        rate: Any = 0.0
        flash_attn_varlen_func(q, k, v, EDGES, EDGES, S, S, rate, causal=True)
    out: Any = flash_attn_func(*qkv, dropout_p=0.0, causal=True, softmax_scale=None)
    assert torch.allclose(out, causal(qkv), atol=1e-5)


def test_rotary_in_sixth_place_is_not_qv(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    with pytest.raises(QueryRankError, match="rotary_cos"):
        flash_attn_with_kvcache(q, k, v, k, v, torch.zeros(S, 8), torch.zeros(S, 8))


def test_a_block_mask_of_flex_attention(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < 4) | (q >= k)

    blocks: Any = create_block_mask(prefix, None, None, S, S, device="cpu", BLOCK_SIZE=4)
    q, k, v = (x.transpose(1, 2) for x in qkv)
    wanted: Any = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    with pytest.raises(ModCallableError, match=r"mask_mod=x\.mask_mod"):
        flash_attn_func(*qkv, mask_mod=blocks)
    with pytest.raises(BlockSparseError, match=r"x\.kv_num_blocks.*x\.BLOCK_SIZE"):
        flash_attn_func(*qkv, block_sparse_tensors=blocks)
    listed = BlockSparse(
        blocks.kv_num_blocks,
        blocks.kv_indices,
        blocks.full_kv_num_blocks,
        blocks.full_kv_indices,
        blocks.BLOCK_SIZE,
    )
    for more in (dict[str, Any](), {"block_sparse_tensors": listed}):
        out: Any = flash_attn_func(*qkv, mask_mod=blocks.mask_mod, **more)
        assert torch.allclose(out.transpose(1, 2), wanted, atol=1e-5)


def test_a_tensor_is_no_mask_mod(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    mask: Any = torch.ones(S, S, dtype=torch.bool).tril()
    with pytest.raises(
        ModCallableError, match=r"lambda b, h, q_idx, kv_idx: mask\[q_idx, kv_idx\]"
    ):
        flash_attn_func(*qkv, mask_mod=mask)
    out: Any = flash_attn_func(*qkv, mask_mod=lambda b, h, q, k: mask[q, k])
    assert torch.allclose(out, causal(qkv), atol=1e-5)


def test_python_branches_in_a_mod(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    with pytest.raises(ModResultError, match=r"torch\.where, &, \|"):
        flash_attn_func(*qkv, mask_mod=lambda b, h, q, k: (q >= k) and (k > 2))


def test_pages_of_flashinfer(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """What `kvattn scan` writes for its decode wrapper: lists of pages become a page table."""
    torch.manual_seed(1)
    cache = torch.randn(7, 2, 4, HK, D)  # (pages, k and v, page size, heads, dim)
    indptr, indices = (
        torch.tensor([0, 3, 5], dtype=torch.int32),
        torch.tensor([5, 1, 3, 0, 6]).int(),
    )
    last = torch.tensor([2, 4], dtype=torch.int32)
    counts = indptr.diff()
    pages = indices.split(counts.tolist())
    table = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True, padding_value=-1)
    lengths = ((counts - 1) * 4 + last).clamp(min=0)
    q = qkv[0][:, 0]
    k_pages, v_pages = cache.unbind(1)
    out: Any = flash_attn_with_kvcache(
        q[:, None], k_pages, v_pages, cache_seqlens=lengths, page_table=table
    )
    for b in range(B):
        k, v = (
            cache[pages[b].long(), i].flatten(0, 1)[: lengths[b]].transpose(0, 1) for i in (0, 1)
        )
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q[b, :, None], k, v, enable_gqa=True
        )
        assert torch.allclose(out[b, 0], wanted[:, 0], atol=1e-5)

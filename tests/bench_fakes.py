"""Stand-ins for other libraries, with their signatures and kvattn's reference behind them.

What a peer is handed must be a call that its own documentation allows, and must mean the cell that
is measured. Both show without a GPU: the signatures are the libraries' own, the answers are right.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import fake_flash_attn as fa
import fake_flashinfer as fi
import pytest


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


def install(patch: pytest.MonkeyPatch, paged: bool = True) -> None:
    """Puts the stand-ins where the libraries would be.

    Args:
        paged: whether FlashAttention-3 is a build with pages and windows.
    """
    flags = {f"FLASHATTENTION_DISABLE_{name}": not paged for name in ("PAGEDKV", "LOCAL")}
    fa3 = {
        "flash_attn_with_kvcache": fa.fa3_with_kvcache,
        "flash_attn_func": fa.fa3_func,
        "flash_attn_varlen_func": fa.fa3_varlen,
    }
    fa2 = {
        "flash_attn_with_kvcache": fa.fa2_with_kvcache,
        "flash_attn_func": fa.fa2_func,
        "flash_attn_varlen_func": fa.fa2_varlen,
    }
    fa4 = {
        "flash_attn_func": fa.fa4_func,
        "flash_attn_varlen_func": fa.fa4_varlen,
    }
    flashinfer = {
        "BatchDecodeWithPagedKVCacheWrapper": fi.Decode,
        "BatchPrefillWithPagedKVCacheWrapper": fi.Prefill,
        "BatchPrefillWithRaggedKVCacheWrapper": fi.Ragged,
        "BatchAttentionWithAttentionSinkWrapper": fi.Prefill,
        "MultiLevelCascadeAttentionWrapper": fi.Cascade,
        "BatchAttention": fi.Persistent,
        "mla": _module("flashinfer.mla", BatchMLAPagedAttentionWrapper=fi.Latent),
        "apply_rope_with_cos_sin_cache": fi.rope,
        "append_paged_kv_cache": fi.append,
    }
    modules: dict[str, dict[str, Any]] = {
        "flash_attn_interface": fa3,
        "flash_attn_config": {"CONFIG": {"build_flags": flags}},
        "flash_attn": {},
        "flash_attn.flash_attn_interface": fa2,
        "flash_attn.cute": {},
        "flash_attn.cute.interface": fa4,
        "flashinfer": flashinfer,
    }
    for name, content in modules.items():
        patch.setitem(sys.modules, name, _module(name, **content))

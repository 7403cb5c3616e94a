"""kvattn: attention over a KV cache, the whole contract, on every device."""

from __future__ import annotations

from kvattn import errors
from kvattn.api import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from kvattn.cache import PagedKVCache
from kvattn.explanation import Explanation, explain
from kvattn.metadata import SchedulerMetadata, get_scheduler_metadata
from kvattn.option_checks import BlockSparse
from kvattn.sharing import common_prefix
from kvattn.steps import append_kv, apply_rotary, merge_states
from kvattn.values import checked

__version__ = "0.1.0"

__all__ = [
    "BlockSparse",
    "Explanation",
    "PagedKVCache",
    "SchedulerMetadata",
    "append_kv",
    "apply_rotary",
    "checked",
    "common_prefix",
    "errors",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "merge_states",
]

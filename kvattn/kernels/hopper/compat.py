"""Gluon's entry points, in one place: they are experimental and move between Triton's releases."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_memory = gl.shared_memory_descriptor

# Newer names first.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret

__all__ = [
    "TensorDescriptor",
    "async_copy",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_box",
    "mbarrier",
    "mma_v2",
    "reinterpret",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

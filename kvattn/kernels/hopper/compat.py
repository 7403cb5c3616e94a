"""Gluon's entry points, in one place: they are experimental and move between Triton's releases."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

load_box = tma.async_copy_global_to_shared

__all__ = [
    "TensorDescriptor",
    "async_copy",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_box",
    "mbarrier",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

"""Seeded random calls of the shapes that the Hopper backend takes, and that backend on a mock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from random_base import BF16, F16
from random_calls import _CacheCall
from torch import Tensor

from kvattn import backends, forms
from kvattn.backends import hopper, hopper_decode, reference
from kvattn.plan import Plan
from kvattn.request import Request

DIMS = (64, 64, 64, 96, 128, 192, 256)
PAGE_SIZES = (8, 8, 16, 16, 24, 32)
_ELSEWHERE = ("score_mod", "mask_mod", "aux_tensors", "block_sparse_tensors", "rel_bias", "qv")
_DROPPED = (*_ELSEWHERE, "rel_bias_prep_cache", "only_qv", "batch_invariant")


def random_hopper_call(seed: int) -> dict[str, Any]:
    """Keyword arguments of `flash_attn_with_kvcache`."""
    return _HopperCall(seed, plain=True).built()


class _HopperCall(_CacheCall):
    def built(self) -> dict[str, Any]:
        kw = super().built()
        return {name: value for name, value in kw.items() if name not in _DROPPED}

    def rare(self, p: float) -> bool:
        return self.d.chance(p)

    def geometry(self, may_use_less: bool = False) -> None:
        super().geometry(may_use_less)
        self.dim = self.d.pick(DIMS)
        self.dim_v = 64 if self.d.chance(0.1) else self.dim

    def dtypes(self) -> None:
        self.mx = set()
        self.q_dtype = self.k_dtype = self.v_dtype = self.d.pick((BF16, F16))

    def descales(self) -> None:
        """None: calls with them are left to another backend."""

    def only_qv(self) -> None:
        """No call is."""

    def capacity(self) -> None:
        d = self.d
        self.paged = d.chance(0.6)
        self.slots = d.pick(PAGE_SIZES) if self.paged else d.pick((d.whole(1, 90), 200))
        self.max_pages = d.whole(1, max(1, 160 // self.slots)) if self.paged else 1
        self.cap = self.slots * self.max_pages


@contextmanager
def mocked_backend(prefill: ModuleType, decode: ModuleType, ready: Any) -> Iterator[None]:
    """`backend="hopper"` runs its kernels' text on the CPU; queries are made ready in torch."""

    def run(r: Request, plan: Plan | None = None) -> tuple[Tensor, Tensor]:
        few = hopper_decode.refuses(r.facts) is None
        if few and not (r.k is not None and not decode._appends(r)):
            return decode.run(r)
        if r.k is not None:
            reference.append(r)
        out, lse = r.outputs()
        if not few:
            prefill.attend(r, out, lse)
        elif r.batch > 0 and r.lead.numel() > 0:
            decode.decode(r, out, lse)
        return out, lse

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "refuses", hopper.call_refuses)
        patch.setattr(hopper, "run", run)
        patch.setattr(hopper, "prepare", lambda r: None)
        patch.setattr(prefill, "ready", ready)
        backends.plan_for.cache_clear()
        forms._forms.clear()
        try:
            yield
        finally:
            backends.plan_for.cache_clear()
            forms._forms.clear()

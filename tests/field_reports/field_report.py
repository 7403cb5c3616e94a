"""What the tests of field reports share: their registry, the probe, pages, and the oracle.

A report is a fault that serving users met elsewhere; its identifier is the id of its test.

PROBE: with q = 0 and v[j] = j, `out` is the mean of the attended indices and exp(lse) their
number, so that a mask fault shows in one small call.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from oracle import oracle
from torch import Tensor

import kvattn
from kvattn import errors as E

NAN, INF = math.nan, math.inf
BACKENDS = (*os.environ.get("KVATTN_TEST_BACKENDS", "reference,cpu").split(","), None)
EPS = {torch.float64: 1e-9, torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}

Test = Callable[..., None]


def report(identifier: str, every_backend: bool = True) -> Callable[[Test], Test]:
    """Marks the seeded test of a report; without `every_backend` it takes no `backend`."""
    if every_backend:
        names = [f"{identifier}-{backend or 'default'}" for backend in BACKENDS]
        mark = pytest.mark.parametrize("backend", BACKENDS, ids=names)
    else:
        mark = pytest.mark.parametrize((), [pytest.param(id=identifier)])

    def marked(test: Test) -> Test:
        @wraps(test)
        def seeded(*args: Any, **kwargs: Any) -> None:
            torch.manual_seed(0)
            test(*args, **kwargs)

        return mark(seeded)

    return marked


def attend(*args: Any, backend: Any, **kwargs: Any) -> Any:
    """The call. A named backend may refuse with its reason; the default must then be right."""
    return _call(kvattn.flash_attn_with_kvcache, *args, backend=backend, **kwargs)


def attend_varlen(*args: Any, backend: Any, **kwargs: Any) -> Any:
    return _call(kvattn.flash_attn_varlen_func, *args, backend=backend, **kwargs)


def _call(function: Callable[..., Any], *args: Any, backend: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, backend=backend, **kwargs)
    except E.BackendRefusesError as refusal:
        assert backend not in (None, "reference") and repr(backend) in str(refusal)
        return function(*args, **kwargs)


def ints(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def ramp(batch: int, capacity: int, heads: int = 1, dim: int = 4) -> Tensor:
    """v[b, j] = j."""
    return torch.arange(capacity, dtype=torch.float32)[None, :, None, None].repeat(
        batch, 1, heads, dim
    )


class Seen(NamedTuple):
    """What a probe saw, in the order of its rows: means of attended indices, and their number."""

    means: list[float]
    counts: list[float]
    lses: list[float]


def seen(result: tuple[Tensor, Tensor], head: int = 0) -> Seen:
    """Reads (out, lse) of a probe at one query head; padded or ragged."""
    out, lse = result
    mean = out[..., head, 0].double().flatten()
    flat = lse.select(-2, head).double().flatten()
    return Seen(mean.tolist(), flat.exp().tolist(), flat.tolist())


def probe(backend: Any, length: Any, sq: Any = 1, capacity: Any = 16, **kwargs: Any) -> Seen:
    """The probe over a dense cache, one head; keyword arguments replace and add to the call's."""
    count = 1 if isinstance(length, int) else len(length)
    call: dict[str, Any] = {
        "q": torch.zeros(count, sq, 1, 4),
        "k_cache": torch.randn(count, capacity, 1, 4),
        "v_cache": ramp(count, capacity),
        "cache_seqlens": length if isinstance(length, int) else ints(*length),
        "return_softmax_lse": True,
    }
    return seen(attend(backend=backend, **(call | kwargs)))


def check(found: Seen, mean: Sequence[float], count: Sequence[float]) -> None:
    """The means and counts that the contract gives; an empty row is exactly 0 and -inf."""
    assert found.means == pytest.approx(list(mean), rel=1e-5, abs=1e-5)
    assert found.counts == pytest.approx(list(count), rel=1e-5)
    for at, keys in enumerate(count):
        if keys == 0:
            assert (found.means[at], found.lses[at]) == (0.0, -INF)


def paginate(cache: Tensor, page_size: int, seed: int = 0, fill: float = NAN) -> Tensor:
    """The rows of a dense cache in shuffled pages, (pages, page_size, ...); see `page_table`."""
    batch, capacity = cache.shape[:2]
    width = -(-capacity // page_size)
    padded = cache.new_full((batch, width * page_size, *cache.shape[2:]), fill)
    padded[:, :capacity] = cache
    pool = cache.new_full((batch * width + 1, page_size, *cache.shape[2:]), fill)
    table = page_table(batch, capacity, page_size, seed)
    pool[table.long()] = padded.unflatten(1, (width, page_size))
    return pool


def page_table(batch: int, capacity: int, page_size: int, seed: int = 0) -> Tensor:
    """The table of `paginate`: a permutation of all pages but one, by the seed."""
    width = -(-capacity // page_size)
    order = torch.randperm(batch * width + 1, generator=torch.Generator().manual_seed(seed))
    return order[: batch * width].int().reshape(batch, width)


def assert_right(backend: str | None, call: dict[str, Any], varlen: bool = False) -> None:
    """out and lse of the call equal the oracle's; weights may be rounded to out's dtype once."""
    names = {"k": "k_cache", "v": "v_cache"} if varlen else {}
    expected = oracle(**{names.get(name, name): value for name, value in call.items()})
    function = attend_varlen if varlen else attend
    out, lse = function(backend=backend, return_softmax_lse=True, **call)
    wanted = torch.from_numpy(np.nan_to_num(expected.out, nan=0.0))
    size = 1.0 + wanted.abs().max().item() if wanted.numel() else 1.0
    eps = EPS[out.dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=eps, atol=max(2e-5, eps / 2) * size)
    logs = torch.from_numpy(np.nan_to_num(expected.lse, nan=-INF, posinf=INF, neginf=-INF))
    torch.testing.assert_close(lse.double(), logs, rtol=2e-4, atol=2e-4)

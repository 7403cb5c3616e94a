"""Seeded random calls over the whole contract: every backend against the independent oracle."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Expected, oracle
from random_calls import as_cache_call, clone, describe, random_call, random_varlen_call
from random_tools import Array

import kvattn
from kvattn.backends import cpu, cpu_keys, reference

CASES = int(os.environ.get("KVATTN_RANDOM_CASES", "10000"))
CHUNK = 250
DENSE_NAMES = set(inspect.signature(kvattn.flash_attn_func).parameters)
APPEND_NAMES = set(inspect.signature(kvattn.append_kv).parameters)
EPS = {torch.float64: 1e-9, torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
FP32_SUMS = 2e-5  # what adding up in fp32 may cost, relative to the largest value
# Random int8 and FP8 appends clip now and then, which is what the saturation is for.
pytestmark = pytest.mark.filterwarnings("ignore:numbers beyond")
SENTINEL = 7.0  # what random calls put into the caller's out


def drawn(seed: int, plain: bool = False) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The public function and the arguments of one case."""
    if seed % 4 < 3:
        return kvattn.flash_attn_with_kvcache, random_call(seed, plain)
    call = random_varlen_call(seed, plain)
    dense = call["k"] is not None and call["k"].ndim == 4 and set(call) <= DENSE_NAMES
    if dense and call.get("softmax_scale") != 0:  # which flash_attn_func refuses
        return kvattn.flash_attn_func, call
    return kvattn.flash_attn_varlen_func, call


def mismatch(call: dict[str, Any], function: Callable[..., Any], backend: str) -> str | None:
    """Run one case; what differs from the oracle first, or None."""
    expected = oracle(**as_cache_call(call))
    wanted = clone(call)
    returned = function(**call, backend=backend)
    with_lse = call.get("return_softmax_lse", False)
    out, lse = returned if with_lse else (returned, None)
    if call.get("out") is not None and out is not call["out"]:
        return "out was given, and something else returned"
    return (
        _memory(call, wanted, expected)
        or _out(out, expected.out, 0.0 if call.get("out") is None else SENTINEL, backend)
        or (None if lse is None else _lse(lse, expected.lse))
    )


def append_mismatch(call: dict[str, Any]) -> str | None:
    """Only append what one case appends; what differs from the oracle first, or None."""
    if "k" not in call:
        return None
    if "slot_mapping" in call and -1 in torch.as_tensor(call["cache_seqlens"]):
        return None  # slots alone know no inactive rows
    expected, wanted = oracle(**call), clone(call)
    given = {name: value for name, value in call.items() if name in APPEND_NAMES}
    given["page_table"] = call.get("page_table", call.get("block_table"))
    if call["k"].ndim == 3:
        given.setdefault("cu_seqlens_k_new", call.get("cu_seqlens_q"))
    if "rotary_cos" in call:  # append_kv knows k's dtype, not q's
        given |= {name: call[name].to(torch.float32) for name in ("rotary_cos", "rotary_sin")}
    kvattn.append_kv(**given, backend="reference")
    return _memory(call, wanted, expected)


def _memory(call: dict[str, Any], wanted: dict[str, Any], expected: Expected) -> str | None:
    """Every byte of every tensor of the call, between the views too; out apart from its rows."""
    target = as_cache_call(wanted)
    for name in ("k_cache", "v_cache", "k_descale", "v_descale", "sfk", "sfv"):
        after = getattr(expected, name)
        if torch.is_tensor(after) and 0 not in target[name].stride():  # expanded: never written
            target[name].copy_(after)
    if call.get("out") is not None:
        wanted["out"].copy_(call["out"])
    tensors = {name: value for name, value in call.items() if torch.is_tensor(value)}
    changed = [n for n, x in tensors.items() if not torch.equal(_raw(x), _raw(wanted[n]))]
    for name in changed:
        where = (_bits(tensors[name]) != _bits(wanted[name])).nonzero()
        if len(where):
            at = tuple(where[0].tolist())
            return f"{name}{at}: {tensors[name][at]} instead of {wanted[name][at]}"
    return f"{changed[0]}: memory outside the view has changed" if changed else None


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])


def _out(out: torch.Tensor, expected: Array, unwritten: float, backend: str) -> str | None:
    numbers = out.to(torch.float64).numpy()
    if numbers.shape != expected.shape:
        return f"out has shape {numbers.shape} instead of {expected.shape}"
    wanted = np.nan_to_num(expected, nan=unwritten)
    eps = EPS[out.dtype]
    # The reference rounds once, at the end; torch's fused kernel rounds its weights too.
    sums = eps / 64 if backend == "reference" else eps / 2
    if out.dtype != torch.float64 or backend != "reference":
        sums = max(sums, FP32_SUMS)
    size = 1 + np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    return _worst("out", numbers, wanted, eps * np.abs(wanted) + sums * size)


def _lse(lse: torch.Tensor, expected: Array) -> str | None:
    if lse.dtype != torch.float32 or lse.shape != expected.shape:
        return f"lse is {lse.dtype} of {tuple(lse.shape)} instead of float32 {expected.shape}"
    wanted = np.nan_to_num(expected, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    numbers = lse.to(torch.float64).numpy()
    infinite = np.isinf(wanted) | np.isinf(numbers)
    differ = infinite & (wanted != numbers)
    if differ.any():
        at = tuple(int(n) for n in np.argwhere(differ)[0])
        return f"lse{at}: {numbers[at]} instead of {wanted[at]}"
    finite = np.where(infinite, 0.0, wanted)
    return _worst("lse", np.where(infinite, 0.0, numbers), finite, 2e-4 * (1 + np.abs(finite)))


def _worst(
    name: str,
    numbers: Array,
    wanted: Array,
    allowed: Array,
) -> str | None:
    bad = ~(np.abs(numbers - wanted) <= allowed)
    if not bad.any():
        return None
    at = tuple(int(n) for n in np.argwhere(bad)[0])
    return f"{name}{at}: {numbers[at]} instead of {wanted[at]} ({bad.sum()} of {bad.size} differ)"


def assert_case(
    seed: int, call: dict[str, Any], check: Callable[..., str | None], *args: Any
) -> None:
    """Run one check and say which call it was about if it fails."""
    try:
        problem = check(call, *args)
    except kvattn.errors.BackendRefusesError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise AssertionError(f"{problem}\nseed {seed}:\n{describe(call)}") from error
    assert problem is None, f"{problem}\nseed {seed}:\n{describe(call)}"


def chunks(cases: int) -> list[range]:
    return [range(first, min(first + CHUNK, cases)) for first in range(0, cases, CHUNK)]


@pytest.mark.parametrize("seeds", chunks(CASES), ids=str)
def test_reference_equals_the_oracle(seeds: range) -> None:
    for seed in seeds:
        function, call = drawn(seed)
        assert_case(seed, call, mismatch, function, "reference")


@pytest.mark.parametrize("seeds", chunks(CASES // 5), ids=str)
def test_append_alone_equals_the_oracle(seeds: range) -> None:
    for seed in seeds:
        assert_case(seed, random_call(seed), append_mismatch)


@pytest.mark.parametrize("seeds", chunks(CASES // 2), ids=str)
def test_cpu_equals_the_oracle(seeds: range) -> None:
    refused = 0
    for seed in seeds:
        function, call = drawn(seed, plain=True)
        try:
            assert_case(seed, call, mismatch, function, "cpu")
        except kvattn.errors.BackendRefusesError:
            refused += 1
    assert refused < 0.9 * max(len(seeds), 10)


@pytest.mark.parametrize("seeds", chunks(CASES // 5), ids=str)
def test_results_do_not_depend_on_how_work_is_cut(
    monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    monkeypatch.setattr(cpu, "_FEW_ROWS", 1)
    monkeypatch.setattr(cpu, "_ROW_BLOCK", 2)
    monkeypatch.setattr(cpu_keys, "_PIECE_BYTES", 256)
    monkeypatch.setattr(reference, "_MAX_SCORES", 40)
    for seed in seeds:
        function, call = drawn(seed, plain=True)
        try:
            assert_case(seed, call, mismatch, function, "cpu")
        except kvattn.errors.BackendRefusesError:
            assert_case(seed, call, mismatch, function, "reference")

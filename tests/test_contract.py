"""One suite for every backend: each case against fp64, and every byte of memory it may touch."""

from __future__ import annotations

import ast
import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from cases import CASES, COVERED, ON_A_GPU_ONLY, assert_refusal
from conftest import DEVICE
from oracle import oracle

from kvattn import errors as E
from kvattn.testing import (
    SENTINEL,
    Case,
    Expected,
    Inputs,
    assert_same_memory,
    attend,
    clone_inputs,
    expect,
    make_inputs,
)


@cache
def expected(case: Case, device: str = DEVICE) -> Expected:
    return expect(make_inputs(case, device=device))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, backend: str) -> None:
    inputs = make_inputs(case, device=DEVICE)
    before = clone_inputs(inputs)
    try:
        out, lse = attend(case, inputs, backend)
    except E.BackendRefusesError as error:
        assert_refusal(error)
        assert_same_memory(inputs, before)
        out, lse = attend(case, inputs)
    expected(case).check(out, lse, inputs)


SMALL = [case for case in CASES if "T74" not in case.name]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_expectations_equal_the_oracle(case: Case) -> None:
    """What the suite holds backends to agrees with a second, independent computation."""
    if DEVICE != "cpu":
        pytest.skip("the oracle computes on the CPU")
    inputs = make_inputs(case)
    found, second = expected(case, "cpu"), oracle(**_cache_names(inputs))
    first = SENTINEL if case.out else 0.0
    out = torch.from_numpy(second.out).nan_to_num(nan=first)
    lse = torch.from_numpy(second.lse).nan_to_num(nan=-math.inf, neginf=-math.inf, posinf=math.inf)
    assert torch.allclose(out, found.out, rtol=1e-6, atol=1e-7)
    assert torch.allclose(lse, found.lse.double(), rtol=1e-5, atol=1e-5)
    after = _cache_names(found.after)
    for name in ("k_cache", "v_cache", "k_descale", "v_descale", "sfk", "sfv"):
        wanted = getattr(second, name)
        if isinstance(wanted, torch.Tensor) and after.get(name) is not None:
            same = torch.equal(_bytes(wanted), _bytes(after[name]))
            assert same, name


def _cache_names(inputs: Inputs) -> Inputs:
    names = {"k": "k_cache", "v": "v_cache"} if "v_cache" not in inputs else {}
    return {names.get(name, name): value for name, value in inputs.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


REPEATED = [case for case in CASES if case.new is not None or case.options.get("num_splits")]


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_t65_the_same_call_twice_gives_the_same_bits(case: Case, backend: str) -> None:
    try:
        first = attend(case, make_inputs(case, device=DEVICE), backend)
    except E.BackendRefusesError as error:
        return assert_refusal(error)
    second = attend(case, make_inputs(case, device=DEVICE), backend)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert all(names)
    assert len(set(names)) == len(names)


def test_everything_is_covered() -> None:
    claimed = {int(n) for case in CASES for n in re.findall(r"\bT(\d+)", case.name)}
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_t"):
                claimed |= {int(n) for n in re.findall(r"_t(\d+)(?=_)", node.name)}
    assert list(COVERED) == list(range(1, 76))  # 75: norms, which the contract leaves to us
    assert set(COVERED) - claimed == ON_A_GPU_ONLY

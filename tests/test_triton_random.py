"""The seeded random calls through the interpreted Triton kernels."""

from __future__ import annotations

import pytest
from interpreter import INTERPRETED
from test_random import CASES, assert_case, drawn, mismatch

import kvattn

CHUNK = 50
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:numbers beyond"),
]


@pytest.mark.parametrize("first", range(0, CASES // 20, CHUNK))
def test_triton_equals_the_oracle(first: int) -> None:
    refused = 0
    for seed in range(first, first + CHUNK):
        function, call = drawn(seed)
        try:
            assert_case(seed, call, mismatch, function, "triton")
        except kvattn.errors.BackendRefusesError:
            refused += 1
    assert refused < CHUNK // 2

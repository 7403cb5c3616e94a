"""Seeded random calls through the Hopper kernels' text on a mock of Gluon."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import mock_gluon
import mock_gluon_decode
import pytest
from conftest import DEVICE
from random_hopper import mocked_backend, random_hopper_call
from test_hopper import FRESH, ready
from test_random import assert_case, mismatch

import kvattn

CASES = int(os.environ.get("KVATTN_RANDOM_CASES", "10000")) // 100
CHUNK = 25
FOUND = [1703, 2050]  # a length of -1 with new tokens, over dense keys and over pages
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the mock runs on the CPU")


@pytest.fixture(scope="module")
def hopper() -> Iterator[None]:
    """`backend="hopper"` over the mock."""
    with mock_gluon_decode.mocked() as decode, mock_gluon.mocked(FRESH):
        from kvattn.backends import hopper_launch

        with mocked_backend(hopper_launch, decode, ready):
            yield


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "seeds", [FOUND, *(range(n, n + CHUNK) for n in range(0, CASES, CHUNK))], ids=str
)
def test_hopper_equals_the_oracle(seeds: range | list[int]) -> None:
    refused = 0
    for seed in seeds:
        random.seed(seed)
        call, function = random_hopper_call(seed), kvattn.flash_attn_with_kvcache
        try:
            assert_case(seed, call, mismatch, function, "hopper")
        except kvattn.errors.BackendRefusesError:
            refused += 1
    assert refused < 0.8 * len(seeds)

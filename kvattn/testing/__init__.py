"""Checking an attention backend: cases, poisoned inputs, derived tolerances and a mask probe.

A `Case` says in plain values what a call looks like; `make_inputs` turns it into tensors in which
everything that must not matter is NaN. `expect` computes in fp64 what any call must give and leave
behind, and how much error it may have. `probe` shows which keys each row attends to.

Example:
    >>> case = Case(batch=3, lengths=(5, 0, 17), new=1, page_size=4, rotary=16, causal=True)
    >>> check_case(case, backend="reference")
"""

from __future__ import annotations

from kvattn.testing.expected import (
    Expected,
    assert_same_memory,
    attend,
    check_case,
    expect,
    probe,
)
from kvattn.testing.inputs import (
    GUARD,
    SENTINEL,
    Case,
    Inputs,
    clone_inputs,
    interleave_scales,
    make_inputs,
)

__all__ = [
    "GUARD",
    "SENTINEL",
    "Case",
    "Expected",
    "Inputs",
    "assert_same_memory",
    "attend",
    "check_case",
    "clone_inputs",
    "expect",
    "interleave_scales",
    "make_inputs",
    "probe",
]

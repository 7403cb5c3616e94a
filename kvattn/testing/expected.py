"""What a call must give and leave behind, with a tolerance that is derived, not chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvattn import api
from kvattn.backends import reference
from kvattn.quant import FP8
from kvattn.request import Request
from kvattn.testing.inputs import Case, Inputs, Maker, clone_inputs, make_inputs

LSE_ERROR = 2e-4  # absolute; plus fp32 rounding of large values
LSE_ERROR_FP8 = 1e-2  # FP8 queries: tensor cores accumulate them with fewer bits
P_ROUNDING_FP8 = 2**-4  # FP8 queries: probabilities may be rounded to e4m3 as well


@dataclass(frozen=True)
class Expected:
    """The result of a call in fp64, the state it leaves, and the error it may have.

    Attributes:
        out: fp64, shaped like the call's out; rows it must not write hold what was there.
        lse: fp32, shaped like the call's lse.
        after: the call's arguments as the call must leave them.
        worst, mean: largest and mean absolute error that out may have.
        lse_error: largest absolute error that lse may have, beside fp32 rounding.
    """

    out: Tensor
    lse: Tensor
    after: Inputs
    worst: float
    mean: float
    lse_error: float

    def check(self, out: Tensor, lse: Tensor | None, inputs: Inputs) -> None:
        """Raises AssertionError where a result or a byte of memory is not as it must be."""
        self.check_out(out)
        if lse is not None:
            self.check_lse(lse)
        self.check_memory(inputs)

    def check_out(self, out: Tensor) -> None:
        assert out.shape == self.out.shape, f"out has shape {tuple(out.shape)}"
        if out.numel() == 0:
            return
        error = (out.double() - self.out).abs()
        error = torch.where(error.isnan(), math.inf, error)
        worst, mean = float(error.max()), float(error.mean())
        at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        assert worst <= self.worst, (
            f"out{list(at)} is {float(out[at])} instead of {float(self.out[at])}: "
            f"error {worst:.3g}, allowed {self.worst:.3g}; {int((error > self.worst).sum())} of "
            f"{error.numel()} elements differ"
        )
        assert mean <= self.mean, f"out: mean error {mean:.3g}, allowed {self.mean:.3g}"

    def check_lse(self, lse: Tensor) -> None:
        assert lse.dtype == torch.float32, f"lse is {lse.dtype}"
        assert lse.shape == self.lse.shape, f"lse has shape {tuple(lse.shape)}"
        same = lse == self.lse  # infinities included
        allowed = self.lse_error + 1e-6 * self.lse.abs()
        good = same | ((lse - self.lse).abs() <= allowed) & lse.isfinite() & self.lse.isfinite()
        if not good.all():
            at = tuple(int(i) for i in (~good).nonzero()[0])
            raise AssertionError(
                f"lse{list(at)} is {float(lse[at])} instead of {float(self.lse[at])}; "
                f"{int((~good).sum())} of {lse.numel()} elements differ"
            )

    def check_memory(self, inputs: Inputs) -> None:
        """Every byte of every argument; of out, checked with a tolerance, what surrounds it."""
        if inputs.get("out") is not None:
            self.after["out"].copy_(inputs["out"])
        assert_same_memory(inputs, self.after)


def assert_same_memory(inputs: Inputs, wanted: Inputs) -> None:
    """Every byte of every argument is as wanted, the memory around its view included."""
    for name, tensor in inputs.items():
        if isinstance(tensor, Tensor):
            same = torch.equal(storage_bytes(tensor), storage_bytes(wanted[name]))
            assert same, _difference(name, tensor, wanted[name])


def _difference(name: str, tensor: Tensor, wanted: Tensor) -> str:
    pair = [x.contiguous().view(torch.uint8).flatten() for x in (tensor, wanted)]
    differ = (pair[0] != pair[1]).nonzero()
    if not len(differ):
        return f"{name}: memory outside the view was written"
    flat = torch.tensor(int(differ[0]) // tensor.element_size())
    at = tuple(int(i) for i in torch.unravel_index(flat, tensor.shape))
    return f"{name}{list(at)} is {tensor[at]} instead of {wanted[at]}"


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole memory that a tensor is a view of, as bytes."""
    storage = tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(storage, 0, (storage.nbytes(),), (1,))


def expect(inputs: Inputs) -> Expected:
    """What a call must do, from the reference in fp64. The inputs are not touched.

    The error allowed is twice the error (1.5 times the mean error) of the same computation done
    plainly in the query's dtype (bf16 for FP8), plus the rounding of the result.

    Args:
        inputs: keyword arguments of `flash_attn_with_kvcache` or `flash_attn_varlen_func`.
    """
    after, spare = clone_inputs(inputs), clone_inputs(inputs)
    exact, lse, dtype = _compute(after, torch.float64)
    if dtype == torch.float64:
        plain = exact
    else:
        plain, _, _ = _compute(spare, torch.bfloat16 if dtype in FP8 else dtype)
    error, size = (plain - exact).abs(), exact.abs()
    if exact.numel() == 0:
        error = size = exact.new_zeros(1)
    rounding = torch.finfo(torch.bfloat16 if dtype in FP8 else dtype).eps
    rounding *= 1 if rounding > 1e-4 else 8  # fp32 sums in another order
    rounding += P_ROUNDING_FP8 if dtype in FP8 else 0
    worst = 2 * float(error.max()) + rounding * float(size.max())
    mean = 1.5 * float(error.mean()) + rounding * float(size.mean())
    if not math.isfinite(worst):
        raise ValueError("the plain computation overflows: no tolerance can be derived from it")
    lse_error = LSE_ERROR_FP8 if dtype in FP8 else LSE_ERROR
    return Expected(exact, lse, after, worst, mean, lse_error)


def _compute(inputs: Inputs, accum: torch.dtype) -> tuple[Tensor, Tensor, torch.dtype]:
    """(out in fp64, lse, the query's dtype) of the reference accumulating in `accum`."""
    names = dict(inputs)
    if "v_cache" not in names:
        names["k_cache"], names["v_cache"] = names.pop("k"), names.pop("v")
    request = Request.of(**names)
    if request.out is None:
        out = torch.zeros(request.out_shape, dtype=torch.float64, device=request.pool.device)
    else:
        out = request.out.double()
    result = reference.run(replace(request, out=out), accum=accum)
    assert result is not None
    return out, result[1], request.lead.dtype


def attend(case: Case, inputs: Inputs, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Runs the inputs of a case on one backend: (out, lse)."""
    call: Any = api.flash_attn_varlen_func if case.varlen else api.flash_attn_with_kvcache
    out, lse = call(**inputs, backend=backend, return_softmax_lse=True)
    return out, lse


def check_case(
    case: Case, backend: str | None = None, device: str | torch.device = "cpu", seed: int = 0
) -> None:
    """Runs a case and checks its result and every byte of memory it could have touched.

    Raises:
        AssertionError: what differs first, where, and by how much.
        kvattn.errors.BackendRefusesError: the named backend does not take the case.
    """
    inputs = make_inputs(case, seed, device)
    expected = expect(inputs)
    out, lse = attend(case, inputs, backend)
    expected.check(out, lse, inputs)


def probe(
    case: Case, backend: str | None = None, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor]:
    """Which keys each row attends to: (mean index, number), both (B, Sq, H) or (total_q, H).

    Queries are 0 and the value of logical key j is j, so out is the mean of the attended indices
    and exp(lse) their number. A row without keys has mean 0 and number 0.

    Example:
        >>> mean, count = probe(Case(batch=1, seqlen_q=2, lengths=5, causal=True))
        >>> mean[0, :, 0].tolist(), count[0, :, 0].round().tolist()
        ([1.5, 2.0], [4.0, 5.0])
    """
    maker = Maker(case, 0, device)
    inputs = maker.inputs
    for name in ("q", "qv"):
        if inputs.get(name) is not None:
            inputs[name].zero_()
    cache = inputs["v" if case.varlen else "v_cache"]
    cache = cache[None] if case.packed is not None else cache
    row = 0
    for b, (old, first) in enumerate(zip(maker.old, maker.leftpad, strict=True)):
        if old > first:
            index = torch.arange(old - first, device=cache.device).to(cache.dtype)
            cache[maker.slots(b, first, old)] = index[:, None, None]
        if case.new is not None:
            count = maker.new[b]
            fresh = inputs["v"].flatten(0, -3)[row : row + count]
            index = torch.arange(old - first, old - first + count, device=cache.device)
            fresh.copy_(index[:, None, None])
            row += count
    out, lse = attend(case, inputs, backend)
    return out[..., 0], lse.exp().transpose(-1, -2)

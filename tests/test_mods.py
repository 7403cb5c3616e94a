"""Mods become Triton functions that compute what torch computes: element by element in Triton's
interpreter or on a GPU; compiled for several architectures without one; cached by what they do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mod_cases as cases
import pytest
import torch
from interpreter import INTERPRETED
from mod_cases import AUX, DEVICE, OFFSET_K, OFFSET_Q, SK, SQ, B, H, Mod, lowered
from torch import Tensor

from kvattn import mods
from kvattn.errors import mod_kinds as E
from kvattn.errors.option_kinds import ModCallableError, RequiresGradError

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

# Without a GPU these run in a process of their own, which test_in_the_interpreter starts.
evaluated = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or Triton's interpreter"
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflow
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter takes the compiler's place")


@triton.jit
def evaluate(  # type: ignore[no-untyped-def]
    OUT, SCORE, AUX, H, SQ, SK, offset_q, offset_k,
    MOD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The mod of every (h, q, k) of one b; rows of all heads lie in one tile, as with GQA."""
    b = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    keys = tl.program_id(2) * BN + tl.arange(0, BN)
    h, q, k = (rows // SQ)[:, None], (rows % SQ)[:, None], keys[None, :]
    live = (rows < H * SQ)[:, None] & (keys < SK)[None, :]
    at = (b * H * SQ + rows)[:, None] * SK + keys[None, :]
    if SCORE is None:
        kept = MOD(b, h, q, k, offset_q, offset_k, SQ, SK, AUX)
        tl.store(OUT + at, kept.to(tl.int8), mask=live)
    else:
        score = tl.load(SCORE + at, mask=live, other=0)
        score = MOD(score, b, h, q, k, offset_q, offset_k, SQ, SK, AUX)
        tl.store(OUT + at, score, mask=live)


@triton.jit
def bounds(  # type: ignore[no-untyped-def]
    LO, HI, AUX, H, SQ, SK, offset_q, offset_k, MOD: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0)
    rows = tl.arange(0, BM)
    h, q = (rows // SQ)[:, None], (rows % SQ)[:, None]
    lo, hi = MOD(b, h, q, offset_q, offset_k, SQ, SK, AUX)
    at, live = (b * H * SQ + rows)[:, None], (rows < H * SQ)[:, None]
    tl.store(LO + at, lo, mask=live)
    tl.store(HI + at, hi, mask=live)


def by_triton(mod: Mod, scores: Tensor | None) -> Tensor:
    function = lowered(mod, scores is None, AUX)
    out = torch.empty(B, H, SQ, SK, dtype=torch.int8 if scores is None else torch.float32)
    grid = (B, triton.cdiv(H * SQ, 32), triton.cdiv(SK, 32))
    sizes = (H, SQ, SK, OFFSET_Q, OFFSET_K)
    evaluate[grid](out, scores, function.aux, *sizes, function.function, 32, 32)
    return out.bool() if scores is None else out


def by_torch(mod: Mod, scores: Tensor | None) -> Tensor:
    """The mod on broadcastable indices, as the contract has it."""
    found = []
    for b in range(B):
        heads, rows, keys = torch.arange(H), torch.arange(SQ), torch.arange(SK)
        args: tuple[Any, ...] = (
            torch.tensor(b),
            heads[:, None, None],
            rows[None, :, None],
            keys[None, None, :],
        )
        if scores is not None:
            args = (scores[b].clone(), *args)
        info = mods.SeqlenInfo(OFFSET_Q, OFFSET_K, SQ, SK)
        result = mod(*(*args, info, AUX, ())[: mods.arity(mod)])
        found.append(torch.as_tensor(result).expand(H, SQ, SK))
    return torch.stack(found)


def some_scores() -> Tensor:
    return torch.randn(B, H, SQ, SK, generator=torch.Generator(DEVICE).manual_seed(1)) * 3


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


def test_in_the_interpreter() -> None:
    """The tests that run kernels, in a process whose kernels are all interpreted."""
    here = Path(__file__).parent
    if INTERPRETED or DEVICE != "cpu":
        pytest.skip("they run in this process")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        + [str(here / name) for name in ("test_mods.py", "test_interpreter.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=here.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]


@evaluated
@pytest.mark.parametrize("name", cases.MASKS)
def test_masks(name: str) -> None:
    mod = cases.MASKS[name]
    assert torch.equal(by_triton(mod, None), by_torch(mod, None).bool())


@evaluated
@pytest.mark.parametrize("name", cases.SCORES)
def test_scores(name: str) -> None:
    mod = cases.SCORES[name]
    got, want = by_triton(mod, some_scores()), by_torch(mod, some_scores()).float()
    atol = 4e-5 if "softcap" in name else 2e-6  # 2e-6 of the cap
    torch.testing.assert_close(got, want, rtol=2e-6, atol=atol)


def with_corners(count: int) -> Tensor:
    corners = (0.0, 1e-30, 1e-6, 0.19, 0.21, 0.5, 1.5, 2.5, 3.0, 7.0, 50.0, 88.7, 1e10, torch.inf)
    signed = torch.tensor([*corners, *(-x for x in corners), torch.nan])
    drawn = torch.randn(count - len(signed), generator=torch.Generator(DEVICE).manual_seed(2))
    return torch.cat([signed, drawn * torch.logspace(-2, 1, len(drawn))])


@evaluated
@pytest.mark.parametrize("name", cases.UNARY)
def test_operations_on_scores(name: str) -> None:
    """Near the accuracy of fp32; infinities and NaN as torch has them."""
    apply, scores = cases.UNARY[name], with_corners(B * H * SQ * SK).reshape(B, H, SQ, SK)
    got = by_triton(lambda s, b, h, q, k: apply(s), scores)
    # A kernel may fuse a product and a sum in 16 bits, which saves one of torch's roundings.
    rtol, atol = (2**-9, 2**-7) if name == "half" else (8e-6, 1e-7)
    torch.testing.assert_close(got, apply(scores).float(), rtol=rtol, atol=atol, equal_nan=True)


CAPS: dict[str, tuple[Mod, float, float]] = {  # the cap, and what is known of results' size
    "usual": (lambda s, b, h, q, k: 50.0 * torch.tanh(s / 50.0), 50.0, 50.0),
    "product": (lambda s, b, h, q, k: torch.tanh(s * 0.25) * 4, 4.0, 4.0),
    "negative": (lambda s, b, h, q, k: torch.tanh(s * 0.25 + h) * -7.0, 7.0, 7.0),
    "and-more": (lambda s, b, h, q, k: 5 * torch.tanh(s / 5) + k, 5.0, 0.0),
    "large": (lambda s, b, h, q, k: 1e6 * torch.tanh(s / 1e6), 0.0, 0.0),
    "by-head": (lambda s, b, h, q, k: torch.tanh(s / (h + 1)) * (h + 1), 0.0, 0.0),
    "approximate": (lambda s, b, h, q, k: 3 * mods.tanh_approx(s / 3), 500.0, 3.0),
}


@evaluated
@pytest.mark.parametrize("name", CAPS)
def test_caps(name: str) -> None:
    """Off by 2e-6 of a cap; where none is known, as exact as other operations on scores."""
    mod, cap, _ = CAPS[name]
    scores = with_corners(B * H * SQ * SK).reshape(B, H, SQ, SK)
    got, want = by_triton(mod, scores), by_torch(mod, scores).float()
    torch.testing.assert_close(got, want, rtol=8e-6, atol=2e-6 * cap + 1e-7, equal_nan=True)


@pytest.mark.parametrize("name", CAPS)
def test_bounds_of_caps(name: str) -> None:
    mod, _, bound = CAPS[name]
    assert mods.lower_score_mod(mod, None, "cpu").bound == bound


@evaluated
@pytest.mark.parametrize("name", cases.INTEGER)
def test_operations_on_indices(name: str) -> None:
    """Exact, for negative numbers too: a mask hangs on the last bit."""
    apply = cases.INTEGER[name]

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        y = k % 11 - 5
        return apply(q * 8 - k * 3 + h, torch.where(y == 0, 6, y))

    assert torch.equal(by_triton(mod, some_scores()), by_torch(mod, some_scores()).float())


@evaluated
def test_masks_joined_by_torch() -> None:
    """Its closures hold ours: what they capture is looked at all the same."""
    from torch.nn.attention.flex_attention import and_masks, or_masks

    window = 2
    near = lambda b, h, q, k: q - k < window  # noqa: E731
    mask = and_masks(or_masks(near, cases.MASKS["padding"]), cases.causal)
    assert torch.equal(by_triton(mask, None), by_torch(mask, None))
    window = 4
    assert torch.equal(by_triton(mask, None), by_torch(mask, None))


@evaluated
def test_lookups_outside_a_tensor_read_zero() -> None:
    """Masked lanes may hold any index; nothing around the tensor is touched."""
    table = torch.full((12,), 1e9)[4:8].fill_(1)
    got = by_triton(lambda s, b, h, q, k: table[k - 8] + table[h * 10000000], some_scores())
    near = torch.arange(SK) - 8
    want = ((near >= -4) & (near < 4)).float() + (torch.arange(H) == 0)[:, None, None]
    assert torch.equal(got, want.expand(B, H, SQ, SK))


@evaluated
def test_changes_of_captured_and_auxiliary_data_are_seen() -> None:
    table, mod = torch.zeros(H), cases.SCORES["from-aux"]
    slopes = lambda s, b, h, q, k: s + table[h]  # noqa: E731
    before = by_triton(slopes, some_scores()), by_triton(mod, some_scores())
    table += 1
    AUX[0] += 1
    try:
        after = by_triton(slopes, some_scores()), by_triton(mod, some_scores())
        torch.testing.assert_close(after[0], before[0] + 1)
        torch.testing.assert_close(after[1], by_torch(mod, some_scores()), rtol=2e-6, atol=2e-6)
    finally:
        AUX[0] -= 1


@evaluated
def test_other_sizes_of_captured_tensors() -> None:
    """Padding masks and biases that grow with the sequence: the third size is no new function."""
    functions = []
    for length in (SK, SK + 3, SK + 16):
        bias = torch.randn(B, 1, SQ, 2 * length)[..., ::2]
        mod = lambda s, b, h, q, k: s + bias[b, 0, q, k] + bias[b, 0, q, k - 1]  # noqa: B023, E731
        got, want = by_triton(mod, some_scores()), by_torch(mod, some_scores())
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
        functions.append(lowered(mod, aux=AUX).function)
    assert functions[0] is not functions[1]
    assert functions[1] is functions[2]


@evaluated
def test_interval_gives_the_bounds_of_every_row() -> None:
    starts = torch.tensor([0, 4, 9])

    def last(b: Any, h: Any, q: Any, info: Any, aux: Any) -> Any:
        return info.seqlen_k - q

    mask = mods.interval(lo=lambda b, h, q: starts[q // 2] + h, hi=last)
    function = mods.lower_interval(mask, None, torch.empty(0).device)
    assert function is not None
    lo, hi = torch.empty(2, B, H, SQ, dtype=torch.int32)
    bounds[(B,)](lo, hi, function.aux, H, SQ, SK, 0, 0, function.function, 32)
    rows = torch.arange(SQ).expand(B, H, SQ)
    assert torch.equal(lo, starts.int()[rows // 2] + torch.arange(H, dtype=torch.int32)[:, None])
    assert torch.equal(hi, (SK - rows).int())
    keys = torch.arange(SK)
    want = (keys >= lo[..., None]) & (keys < hi[..., None])
    assert torch.equal(by_triton(mask, None), want)


POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


def ptx(mod: Mod, is_mask: bool, architecture: int) -> str:
    """Compiles `evaluate` with the mod; no GPU is needed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = lowered(mod, is_mask, AUX)
    pointers = [POINTERS[x.dtype] for x in function.tensors]
    out, scores = ("*i8", "constexpr") if is_mask else ("*fp32", "*fp32")
    signature = {
        "OUT": out,
        "SCORE": scores,
        "AUX": (*pointers, *["i32"] * len(function.sizes)),
        **dict.fromkeys(("H", "SQ", "SK", "offset_q", "offset_k"), "i32"),
        **dict.fromkeys(("MOD", "BM", "BN"), "constexpr"),
    }
    constants = {"MOD": function.function, "BM": 64, "BN": 64}
    if is_mask:
        constants["SCORE"] = None
    source = ASTSource(evaluate, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", architecture, 32)
    kernel = triton.compile(source, target=target, options={"num_warps": 4})
    assert kernel.asm["cubin"]
    return str(kernel.asm["ptx"])


@compiled
@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_compiles_without_a_gpu(architecture: int) -> None:
    for name in ("documents", "natten-2d", "aux-scalars"):
        assert "ld.local" not in ptx(cases.MASKS[name], True, architecture)
    for name in ("softcap", "relative-table", "table-bfloat16"):
        assert "ld.local" not in ptx(cases.SCORES[name], False, architecture)


@compiled
def test_compiles_with_sizes_as_arguments() -> None:
    for length in (64, 80):
        bias = torch.zeros(SQ, length)
        mod = lambda s, b, h, q, k: s + bias[q, k] + bias[q, 7]  # noqa: B023, E731
        assert "ld.global" in ptx(mod, False, 90)
    assert len(lowered(mod, aux=AUX).sizes) == 3


@compiled
def test_masks_divide_exactly_and_scores_fast() -> None:
    mask = ptx(lambda b, h, q, k: torch.sqrt((q * q + k * k).float()) < k / 3, True, 90)
    assert "div.rn" in mask and "sqrt.rn" in mask
    score = ptx(lambda s, b, h, q, k: torch.sqrt(s.abs()) / (s + k), False, 90)
    assert "div.rn" not in score and "sqrt.rn" not in score


@compiled
def test_rows_of_a_bias_are_read_in_vectors() -> None:
    """Where the layout allows it: what the guards compare keeps neighbours together."""
    bias = torch.empty(2, 4, 64, 1024, device="meta")
    function = mods.lower_score_mod(lambda s, b, h, q, k: s + bias[b, h, q, k], None, "meta")
    assert "tl.where" not in function.source
    assert "(x3 < 1024)" in function.source


@compiled
@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_elements_for_every_score_are_read_where_they_are_needed(architecture: int) -> None:
    """By an instruction that Triton does not stage through shared memory."""
    text = ptx(cases.SCORES["relative-table"], False, architecture)
    assert "@inside ld.global.nc.b32" in text
    assert "@inside" not in ptx(lambda s, b, h, q, k: s + cases.BIAS[b, h, q, k], False, 90)


def test_offsets_beyond_31_bits() -> None:
    small, large = (torch.empty(3, 2**n, device="meta") for n in (29, 30))
    for table, width in ((small, "tl.int32) * 5"), (large, "tl.int64) * 1")):
        function = mods.lower_score_mod(lambda s, b, h, q, k: table[h, k], None, "meta")  # noqa: B023
        assert width in function.source


def test_mods_need_neither_triton_nor_the_compiler_until_they_are_lowered() -> None:
    code = "import sys, kvattn.mods; print(*({'triton', 'torch._dynamo'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_without_triton_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(E.TritonMissingError, match="pip install triton"):
        lowered(lambda s, b, h, q, k: s + 0.12345)


def branch(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s if q > k else s * 2


def write(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    q += 1
    return s * q


def write_table(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    cases.AUX[0].add_(1)
    return s


def fail(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    raise ValueError("no such head")


MISTAKES: dict[str, tuple[Mod, type[Exception], str]] = {
    "sum": (lambda s, b, h, q, k: s - s.sum(), E.ModLoweringError, "aten.sum"),
    "cumsum": (lambda s, b, h, q, k: s + k.cumsum(0), E.ModLoweringError, "aten.cumsum"),
    "sort": (lambda s, b, h, q, k: s + cases.SLOPES.sort()[0][h], E.ModLoweringError, "aten.sort"),
    "random": (lambda s, b, h, q, k: s + torch.rand_like(s), E.ModLoweringError, "aten.rand_like"),
    "transposed": (lambda s, b, h, q, k: s + q.transpose(0, 1), E.ModTraceError, "broadcast"),
    "viewed": (lambda s, b, h, q, k: s + s.reshape(-1)[0], E.ModLoweringError, "aten"),
    "complex": (lambda s, b, h, q, k: s * 1j, E.ModLoweringError, "1j"),
    "branch": (branch, E.ModBranchError, "__bool__"),
    "min": (lambda s, b, h, q, k: s + min(q, k), E.ModBranchError, "__bool__"),
    "item": (lambda s, b, h, q, k: s + cases.SLOPES[0].item(), E.ModBranchError, "item"),
    "int": (lambda s, b, h, q, k: s + int(b), E.ModBranchError, "__int__"),
    "no-index": (lambda s, b, h, q, k: s + cases.SLOPES, E.ModTraceError, "broadcast"),
    "half-index": (lambda s, b, h, q, k: cases.AUX[0][b], E.ModIndexError, "shape"),
    "inner-index": (lambda s, b, h, q, k: s + cases.TABLE[:, h].sum(0), E.ModIndexError, "shape"),
    "nothing": (lambda s, b, h, q, k: None, E.ModReturnError, "NoneType"),
    "pair": (lambda s, b, h, q, k: (s, s), E.ModReturnError, "tuple"),
    "write": (write, E.ModWriteError, "aten.add_"),
    "write-table": (write_table, E.ModWriteError, "aten.add_"),
    "shape": (lambda s, b, h, q, k: s / s.shape[-1], E.ModShapeError, "shape"),
    "raises": (fail, E.ModTraceError, "no such head"),
    "arguments": (lambda s, b, h: s, ModCallableError, "3 arguments"),
    "not-callable": (3, ModCallableError, "int"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_name_what_cannot_be_lowered(name: str) -> None:
    mod, kind, named = MISTAKES[name]
    with pytest.raises(kind) as caught:
        lowered(mod)
    assert "score_mod" in str(caught.value) and named in str(caught.value)


def test_captured_tensors_must_be_readable() -> None:
    elsewhere = torch.ones(H, device="cpu")
    with pytest.raises(E.ModCaptureError, match="cpu"):
        mods.lower_mask_mod(lambda b, h, q, k: elsewhere[h] > 0, None, "meta")
    tiny = torch.ones(H).to(torch.float8_e5m2)
    with pytest.raises(E.ModCaptureError, match="float8_e5m2"):
        lowered(lambda s, b, h, q, k: s + tiny[h].float())


def test_captured_tensors_may_not_need_a_gradient() -> None:
    learned = torch.ones(H, device=DEVICE, requires_grad=True)
    unread = torch.ones(H, device=DEVICE, requires_grad=True)
    with pytest.raises(RequiresGradError, match="a captured tensor"):
        lowered(lambda s, b, h, q, k: s + learned[h])
    with torch.no_grad():
        lowered(lambda s, b, h, q, k: s + learned[h])
    lowered(lambda s, b, h, q, k: s + unread.shape[0])


def test_bounds_of_an_interval_are_checked() -> None:
    with pytest.raises(E.IntervalError, match="2 arguments"):
        mods.interval(lo=lambda b, h: 0)
    with pytest.raises(E.IntervalError, match="no bound"):
        mods.interval(cases.causal)
    with pytest.raises(E.ModBranchError, match="interval"):
        mask = mods.interval(hi=lambda b, h, q: max(q, h))
        mods.lower_interval(mask, None, torch.empty(0).device)
    with pytest.raises(ModCallableError, match="1 arguments"):
        mods.interval(lambda b: True, lo=lambda b, h, q: q)
    assert mods.lower_interval(cases.causal, None, "cpu") is None

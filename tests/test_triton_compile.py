"""The Triton kernels as the planner chooses them, compiled for three architectures without one."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cases import BF16, E4M3, E5M2, F32

from kvattn.request import Request
from kvattn.testing import Case, make_inputs

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from kvattn.backends import triton as backend  # noqa: E402
from kvattn.backends import triton_decode, triton_launch, triton_prefix, triton_replay  # noqa: E402


class Target(NamedTuple):
    capability: int
    shared: int  # bytes that one program may use
    processors: int
    matrix: str  # its matrix instruction, in PTX


TARGETS = {
    "sm_80": Target(80, 166_912, 108, "mma.sync"),
    "sm_90": Target(90, 232_448, 132, "wgmma.mma_async|mma.sync"),
    "sm_120": Target(120, 101_376, 170, "mma.sync"),
}

STEP = Case(batch=8, lengths=40, capacity=4096, page_size=16, new=1, rotary=128, dim=128,
            heads=32, kv_heads=8, causal=True, dtype=BF16)  # fmt: skip
PREFILL = Case(batch=1, seqlen_q=600, lengths=600, capacity=608, page_size=16, dim=128,
               heads=8, kv_heads=2, causal=True, dtype=BF16)  # fmt: skip
DENSE = replace(PREFILL, heads=16, kv_heads=16, page_size=None)
TABLE = torch.zeros(16, 1200)
ON_DEVICE = {"common_prefix_len": torch.zeros((), dtype=torch.int32)}
MAIN = {
    "decode": STEP,
    "decode, norms": replace(STEP, norm="both", norm_dtype=BF16),
    "decode, pages of 64": replace(STEP, page_size=64),
    "decode, D 64, window, sinks": replace(STEP, dim=64, rotary=64, window=(127, 0), sinks=BF16),
    "common prefix": replace(STEP, batch=32, common=4096),
    "common prefix, ragged": replace(
        STEP,
        batch=32,
        common=4096,
        seqlen_q=(1,) * 32,
        new=None,
        rotary=0,
        options={"max_seqlen_q": 1},
    ),
    "common prefix, length on the device": replace(STEP, batch=32, options=ON_DEVICE),
    "decode, fp8": replace(STEP, cache_dtype=E4M3, descale="heads", page_size=64),
    "decode, e5m2, pages of 16": replace(STEP, cache_dtype=E5M2, descale="heads"),
    "prefill": PREFILL,
    "prefill, D 64": replace(PREFILL, dim=64),
    "prefill, dense": DENSE,
    "prefill, ragged": replace(DENSE, batch=3, seqlen_q=(600, 20, 300), lengths=(600, 80, 300)),
    "prefill, pages of 64": replace(DENSE, page_size=64, capacity=640),
    "prefill, window": replace(DENSE, window=(127, 0), sinks=BF16),
    "prefill, softcap": replace(DENSE, softcap=30.0),
    "prefill, table": replace(DENSE, score_mod=lambda s, b, h, q, k: s + TABLE[h, q - k + 600]),
}
OTHERS = {
    "decode, fp8 as bytes": replace(STEP, cache_dtype=E4M3, dim=127, rotary=64, descale="heads"),
    "decode, D 256": replace(STEP, dim=256, rotary=64),
    "latent": replace(STEP, heads=16, kv_heads=1, dim=64, dim_v=512, qv=True, rotary=0, new=None),
    "append, norms": replace(STEP, norm="k", seqlen_q=(1,) * 8, new=(1,) * 8),
    "latent, norms": replace(
        STEP, heads=16, kv_heads=1, dim=80, dim_v=256, qv=True, norm="q", rotary=64
    ),
    "prefill, norms": replace(PREFILL, norm="q", norm_dtype=BF16),
    "prefill, D 256": replace(PREFILL, dim=256),
    "prefill, softcap": replace(PREFILL, softcap=30.0),
    "prefill, fp32": replace(PREFILL, dtype=F32, seqlen_q=64),
}


class Machine:
    """What Triton asks of a GPU in order to compile for it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # kernels are kept by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Compiling(triton_replay.Live):
    """Compiles what a call would launch."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: dict[str, Any],
        **options: Any,
    ) -> None:
        self.compiled.append(kernel.warmup(*args, grid=grid, **constants, **options))


def compiled(case: Case, target: Target, patch: pytest.MonkeyPatch) -> list[Any]:
    patch.setattr(triton.runtime.driver, "_active", Machine(target.capability))
    patch.setattr(triton_launch, "shared_memory", lambda device: target.shared)
    patch.setattr(triton_launch, "warpgroups", lambda device: target.capability == 90)
    patch.setattr(triton_launch, "native_fp8", lambda device: target.capability >= 89)
    patch.setattr(triton_launch, "processors", lambda device: target.processors)
    patch.setattr(triton_decode, "launches_early", lambda device: target.capability >= 90)
    compiling = Compiling()
    token = triton_replay._target.set(compiling)
    try:
        backend.run(Request.of(**make_inputs(case), return_lse=True))
    finally:
        triton_replay._target.reset(token)
    assert compiling.compiled
    return compiling.compiled


def ptxas(kernel: Any, capability: int, folder: Path) -> str:
    """What the assembler says of registers and spills."""
    text = folder / "kernel.ptx"
    text.write_text(kernel.asm["ptx"])
    tool = "ptxas-blackwell" if capability >= 100 else "ptxas"
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    name = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    command = [assembler, "-v", f"--gpu-name={name}", text, "-o", folder / "kernel.cubin"]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("case", MAIN.values(), ids=MAIN)
def test_main_variants_spill_nothing(
    case: Case, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernel in compiled(case, target, monkeypatch):
        assert kernel.metadata.shared <= target.shared
        log = ptxas(kernel, target.capability, tmp_path)
        spilled = re.findall(r"(\d+) bytes spill", log)
        assert spilled and set(spilled) == {"0"}
        assert "C7515" not in log, "a product waits for the one before it"
    assert re.search(target.matrix, kernel.asm["ptx"])


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_decode_starts_early_where_the_gpu_can(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernel,) = compiled(STEP, target, monkeypatch)
    can = target.capability >= 90
    ptx = kernel.asm["ptx"].replace("ld.param", "")
    assert kernel.metadata.launch_pdl == can
    assert ("griddepcontrol.launch_dependents" in ptx) == ("griddepcontrol.wait" in ptx) == can
    if can:  # nothing is read or written before the kernel in front has ended
        assert not re.search(r"\b(ld|st|atom|cp)\.", ptx.split("griddepcontrol.wait")[0])
    (alone,) = compiled(replace(STEP, batch=1), target, monkeypatch)
    assert not alone.metadata.launch_pdl


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_shared_pages_are_found_without_spills(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Machine(target.capability))
    compiling = Compiling()
    monkeypatch.setattr(triton_prefix, "target", lambda: compiling)
    lengths = torch.ones(8, dtype=torch.int32)
    triton_prefix.common(lengths.expand(300, 8).T.contiguous(), lengths, lengths, 16)
    (kernel,) = compiling.compiled
    assert re.search(r"(atom|red)\.\S*min", kernel.asm["ptx"])
    assert set(re.findall(r"(\d+) bytes spill", ptxas(kernel, target.capability, tmp_path))) == {
        "0"
    }


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_every_variant_fits_in_shared_memory(
    case: Case, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernel in compiled(case, target, monkeypatch):
        assert kernel.metadata.shared <= target.shared
    if case.dtype != F32:
        assert re.search(target.matrix, kernel.asm["ptx"])

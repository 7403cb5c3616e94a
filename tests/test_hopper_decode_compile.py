"""Hopper's decode kernel compiled for sm_90a without a GPU: registers, memory, its loops."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import BF16, F16, F32
from test_hopper_compile import SHARED, machine, triton

from kvattn.backends import triton_launch
from kvattn.backends.triton_replay import Live, _target
from kvattn.kernels.hopper.compat import gl, gluon
from kvattn.request import Request
from kvattn.testing import Case, make_inputs

__all__ = ["machine"]

SPILLS = 320  # bytes of an attending thread, none of them in the loop over whole tiles
RESERVED = 1 << 10  # bytes of shared memory that every program costs


class Compiling(Live):
    """Compiles instead of launching."""

    def launch(self, kernel: Any, grid: Any, args: Any, constants: Any, **options: Any) -> None:
        self.compiled = kernel.warmup(*args, grid=grid, **constants, **options)
        self.form = constants.get("form")


@dataclass
class Code:
    shared: int
    spills: int  # bytes
    log: str
    lines: list[str]

    def loops(self, instruction: str) -> list[list[str]]:
        """The innermost ones with an instruction."""
        labels, found = {}, []
        for at, line in enumerate(self.lines):
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = at
            jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            if jump and labels.get(jump[1], at) < at:
                found.append((labels[jump[1]], at))
        found = [s for s in found if count(self.lines[s[0] : s[1]], instruction)]
        inner = [
            s for s in found if not any(s != o and s[0] <= o[0] and o[1] <= s[1] for o in found)
        ]
        return [self.lines[first : last + 1] for first, last in inner]


def count(lines: list[str], instruction: str) -> int:
    return sum(bool(re.search(rf"\s{instruction}[.\s]", line)) for line in lines)


def find(lines: list[str], pattern: str, start: int = 0) -> int:
    return next(i for i in range(start, len(lines)) if re.search(pattern, lines[i]))


def compiled(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int, Code]:
    from kvattn.backends import hopper_decode_launch, triton_prefix
    from kvattn.backends.triton_decode import Common

    monkeypatch.setattr(triton_launch, "processors", lambda device: 132)
    r = Request.of(**make_inputs(case), return_lse=True)
    compiling = Compiling()
    token = _target.set(compiling)
    try:
        common = triton_prefix.attend(r) if r.common_most else Common()
        hopper_decode_launch.decode(r, *r.outputs(), common=common)
    finally:
        _target.reset(token)
    tools = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
    (folder / "kernel.ptx").write_text(compiling.compiled.asm["ptx"])
    (folder / "kernel.cubin").write_bytes(compiling.compiled.asm["cubin"])
    assemble = [f"{tools}/ptxas", "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "again.cubin"]
    log = subprocess.run(assemble, cwd=folder, capture_output=True, text=True, check=True)
    disassemble = [f"{tools}/nvdisasm", "-c", "kernel.cubin"]
    code = subprocess.run(disassemble, cwd=folder, capture_output=True, text=True, check=True)
    text = log.stderr + log.stdout
    spills = re.search(r"(\d+) bytes spill stores", text)
    assert spills is not None
    shared = compiling.compiled.metadata.shared
    programs = hopper_decode_launch.tiling(r).programs
    return compiling.form, programs, Code(shared, int(spills[1]), text, code.stdout.splitlines())


# One of each way through the kernel.
FEW: dict[str, Any] = {"heads": 8, "kv_heads": 2, "causal": True, "dim": 128, "dtype": BF16}
ON_DEVICE = {"common_prefix_len": torch.zeros((), dtype=torch.int32)}
CASES = [
    Case("page16-append", batch=8, lengths=900, page_size=16, new=1, rotary=128, **FEW),
    Case("page16-norms", batch=8, lengths=900, page_size=16, new=1, rotary=128, norm="both", **FEW),
    Case("dense-fp16-one", **{**FEW, "batch": 1, "lengths": 5000, "dtype": F16}),
    Case("draft-16-rows", batch=8, lengths=900, page_size=64, seqlen_q=4, new=4, rotary=64, **FEW),
    Case("draft-32-rows", batch=8, lengths=900, page_size=64, seqlen_q=8, new=8, rotary=64, **FEW),
    Case("draft-64-rows", batch=8, lengths=900, page_size=16, seqlen_q=8, new=8, rotary=64,
         **{**FEW, "heads": 16}),
    Case("page16-prefix", batch=8, lengths=900, page_size=16, new=1, rotary=128, common=512, **FEW),
    Case("draft-16-rows-prefix-on-device", batch=8, lengths=900, page_size=64, seqlen_q=4, new=4,
         rotary=64, options=ON_DEVICE, **FEW),
    Case("draft-32-rows-prefix-on-device", batch=8, lengths=900, page_size=16, seqlen_q=8, new=8,
         rotary=64, options=ON_DEVICE, **FEW),
    Case("d96-append", batch=8, lengths=900, page_size=16, new=1, rotary=96, **{**FEW, "dim": 96}),
    Case("d192-append", batch=8, lengths=900, page_size=64, new=1, rotary=192, sinks=F32,
         **{**FEW, "dim": 192}),
    Case("d256-dense", **{**FEW, "batch": 1, "lengths": 5000, "dim": 256}),
    Case("d256-draft-16-rows", batch=8, lengths=900, page_size=64, seqlen_q=4, new=4, rotary=64,
         **{**FEW, "dim": 256}),
    Case("d256-draft-32-rows", batch=8, lengths=900, page_size=16, seqlen_q=8, new=8, rotary=64,
         **{**FEW, "dim": 256}),
    Case("window-sinks-d64", batch=2, lengths=900, page_size=32, window=(127, 0), sinks=F32,
         **{**FEW, "dim": 64}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_to_what_is_meant(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, programs, code = compiled(case, tmp_path, monkeypatch)
    assert programs * (code.shared + RESERVED) <= SHARED + RESERVED
    assert code.spills <= SPILLS
    assert "Too many maxnreg" not in code.log
    product = "HGMMA" if form.WIDE else "HMMA"
    loops = code.loops(product)
    assert loops
    tile = min(loops, key=len)  # without a mask
    assert count(tile, "STL") + count(tile, "LDL") == 0
    assert count(tile, "BAR") <= 1  # no exchange between the warps
    if form.WIDE:
        assert count(tile, product) == form.D // 16 + form.BN // 16
    else:
        values = form.DV // 16 * form.NK // 16 * min(form.R, 16) // 8
        assert count(tile, product) == form.NK // 8 * form.D // 16 + values
    copies = code.loops("UTMALDG")
    assert copies
    columns = (form.D + form.DV) // 64 if form.WIDE else 2
    assert count(copies[0], "UTMALDG") == columns * form.BN // form.BOX
    if form.BM < 64:
        first = find(code.lines, r"LDG\.E\.128")
        border = find(code.lines, r"SYNCS\.PHASECHK", first)
        room = find(code.lines, r"STS\.128", first)
        assert border < room
        assert count(code.lines[border:room], r"LDG") == 0  # all was asked for before a wait


@gluon.jit
def _copied(x, y, LINES: gl.constexpr, LINE: gl.constexpr, KEPT: gl.constexpr):  # type: ignore[no-untyped-def]
    L: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    r = gl.arange(0, LINES, layout=gl.SliceLayout(1, L))[:, None] * LINE
    at = r + gl.arange(0, LINE, layout=gl.SliceLayout(0, L))[None, :]
    memory = gl.allocate_shared_memory(x.dtype.element_ty, [LINES, LINE], KEPT)
    memory.store(gl.load(x + at))
    gl.store(y + at, memory.load(L))


@pytest.mark.parametrize("line", [64, 32])
@pytest.mark.parametrize("box", [8, 16])
def test_a_tile_lies_as_it_was_copied(line: int, box: int) -> None:
    """Lines of a box: addresses are those of the swizzle that the copies are told of."""
    from kvattn.backends.hopper_decode_launch import _tiles

    bases = [[key, d] for warp, key, d in _tiles(16, line, line, box).offset_bases if warp == 0]
    ours = gl.SharedLinearLayout(bases[: (box * line).bit_length() - 1], [], 1024)
    x = torch.empty(box * line, dtype=BF16)
    theirs, found = (
        _copied.warmup(x, x, box, line, layout, grid=(1,), num_warps=4).asm["ptx"]
        for layout in (gl.NVMMASharedLayout(2 * line, 16, rank=2), ours)
    )
    assert found == theirs

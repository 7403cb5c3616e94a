"""The Hopper kernel compiled for sm_90a without a GPU: registers, shared memory, what overlaps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cases import BF16, F16, F32

from kvattn.request import Request
from kvattn.testing import Case, make_inputs

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

SHARED = 227 << 10  # bytes that a program may use
SPILLS = 256  # bytes: what lives through the loop over keys, stored once, read once a row tile
LOCAL = 0 if triton.__version__.startswith("3.6.") else 4  # accesses to spills in a loop
LOCAL_OF_THREE = 8


class Machine:
    """What Triton asks of a GPU in order to compile for it."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Machine())


class Compiled(NamedTuple):
    shared: int
    log: str  # of ptxas
    code: list[str]  # instructions and labels


class Compiler:
    """In the place of a kernel: compiles it instead of launching it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.compiled = kernel, None

    def warmup(self, *args: Any, **constants: Any) -> Compiler:
        self.compiled = self.kernel.warmup(*args, **constants)
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """A launch by Triton, which compiles, or of what is compiled."""
        return lambda *args, **constants: constants and self.warmup(*args, grid=grid, **constants)


def compiled(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    from triton.backends.nvidia.compiler import get_ptxas

    from kvattn.backends import hopper_launch
    from kvattn.kernels.hopper import order, prefill

    monkeypatch.setattr(order, "order", Compiler(order.order))
    compiler = Compiler(prefill.prefill)
    monkeypatch.setattr(prefill, "prefill", compiler)
    names = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens"}
    inputs = make_inputs(case)
    if "v_cache" not in inputs:
        inputs = {names.get(name, name): value for name, value in inputs.items()}
    r = Request.of(**inputs, return_lse=True)
    hopper_launch.attend(r, *r.outputs())
    kernel: Any = compiler.compiled
    tools = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
    (folder / "kernel.ptx").write_text(kernel.asm["ptx"])
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    ptxas = get_ptxas(90).path
    assemble = [ptxas, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "again.cubin"]
    log = subprocess.run(assemble, cwd=folder, capture_output=True, text=True, check=True)
    disassemble = [f"{tools}/nvdisasm", "-c", "kernel.cubin"]
    code = subprocess.run(disassemble, cwd=folder, capture_output=True, text=True, check=True)
    return Compiled(kernel.metadata.shared, log.stderr + log.stdout, code.stdout.splitlines())


def loops(code: list[str]) -> list[list[str]]:
    """The loops over keys: two products are issued, then one is waited for, then the other.

    Backward jumps out of other waits look like loops too, but of another order.
    """
    labels, found = {}, []
    for at, line in enumerate(code):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = at
        if (jump := re.search(r"BRA `\((\.L_x_\d+)\)", line)) and labels.get(jump[1], at) < at:
            found.append(code[labels[jump[1]] : at + 1])
    return [loop for loop in found if order(loop) == "product product wait 1 wait 0"]


def order(loop: list[str]) -> str:
    words = []
    for line in loop:
        if "WARPGROUP.ARRIVE" in line:
            words.append("product")
        elif wait := re.search(r"WARPGROUP.DEPBAR.LE gsb0, 0x(\d)", line):
            words.append(f"wait {wait[1]}")
    return " ".join(words)


def waits(loop: list[str]) -> list[int]:
    return [at for at, line in enumerate(loop) if "WARPGROUP.DEPBAR" in line]


# One of each way through the kernel.
CASES = [
    Case("causal-d128", seqlen_q=256, lengths=256, dim=128, causal=True, dtype=BF16),
    Case("full-d128-ragged-fp16", varlen=True, seqlen_q=(100, 156), lengths=(100, 156),
         packed=(100, 156), pass_lengths="none", dim=128, dtype=F16),
    Case("window-sinks-d64-page16", seqlen_q=256, lengths=256, dim=64, causal=True, dtype=BF16,
         window=(127, 0), sinks=F32, page_size=16),
    Case("mixed-d128-page16", varlen=True, batch=3, seqlen_q=(200, 1, 1), lengths=(200, 300, 260),
         page_size=16, dim=128, heads=8, kv_heads=2, causal=True, dtype=BF16),
    Case("causal-d64-long", batch=1, seqlen_q=4096, lengths=4096, dim=64, causal=True, dtype=BF16,
         heads=1, kv_heads=1),
    Case("causal-d256-page64", seqlen_q=128, lengths=256, dim=256, causal=True, dtype=BF16,
         page_size=64),
    Case("softcap-slopes-d128", seqlen_q=128, lengths=256, dim=128, causal=True, dtype=BF16,
         softcap=5.0, alibi="heads"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_to_what_is_meant(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = compiled(case, tmp_path, monkeypatch)
    assert kernel.shared <= SHARED
    assert "C75" not in kernel.log  # products that wait for each other, registers not given back
    spills = re.search(r"(\d+) bytes spill stores", kernel.log)
    assert spills is not None
    assert int(spills[1]) <= SPILLS
    three = case.dim == 64 and case.seqlen_q == 4096
    assert any("USETMAXREG" in line for line in kernel.code)
    assert any("UTMALDG" in line for line in kernel.code)
    found = loops(kernel.code)
    assert len(found) >= 2 * 2  # of two warpgroups, with a mask and without
    for loop in found:
        local = sum("STL" in line or "LDL" in line for line in loop)
        assert local <= (LOCAL_OF_THREE if three else LOCAL)
        assert exponentials_between_waits(loop) >= 32


def exponentials_between_waits(loop: list[str]) -> int:
    """Exponentials after S is there and before O is waited for: what overlaps with P V."""
    first, second = waits(loop)
    return sum("MUFU.EX2" in line for line in loop[first:second])


@pytest.mark.parametrize(("rotary", "norm"), [(64, None), (64, "both"), (0, "q")])
def test_ready_queries_compile(
    rotary: int, norm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch before the prefill kernel, where queries are normalised and rotated."""
    from kvattn.backends import hopper_launch
    from kvattn.kernels.hopper import rotate

    case = Case(seqlen_q=128, lengths=128, new=128, dim=128, rotary=rotary, dtype=BF16,
                causal=True, norm=norm)  # fmt: skip
    r = Request.of(**make_inputs(case))
    compiler = Compiler(rotate.rotate)
    monkeypatch.setattr(rotate, "rotate", compiler)
    assert r.q is not None
    assert hopper_launch.ready(r, r.q).shape == r.q.shape
    kernel: Any = compiler.compiled
    assert "st.global" in kernel.asm["ptx"]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches that are recorded, in place of launching."""
    from kvattn.backends import triton_replay
    from kvattn.backends.triton_direct import Launch

    launches = []

    def prepared(compiled: Any, grid: Any, args: list[Any], holes: list[Any]) -> Launch:
        launches.append(Launch(print, args, holes))
        return launches[-1]

    monkeypatch.setattr(triton_replay, "prepared", prepared)
    return launches


def test_prefill_calls_are_recorded(recorded: list[Any]) -> None:
    """Their boxes too, which a replay lays over the next call's tensors."""
    from kvattn.backends import hopper
    from kvattn.backends.triton_direct import Box

    case = Case(seqlen_q=256, lengths=256, dim=128, causal=True, dtype=BF16)
    assert hopper.prepare(Request.of(**make_inputs(case))) is not None
    (launch,) = recorded
    boxes = [at for at, value in enumerate(launch.args) if isinstance(value, Box)]
    assert boxes == [0, 1, 2]  # of q, k, v
    assert set(boxes) <= {at for at, _ in launch.holes}


def test_prefill_calls_that_rotate_and_append_are_recorded(recorded: list[Any]) -> None:
    from kvattn.backends import hopper

    case = Case(seqlen_q=256, lengths=256, capacity=512, new=256, dim=128, rotary=128,
                causal=True, dtype=BF16)  # fmt: skip
    assert hopper.prepare(Request.of(**make_inputs(case))) is not None
    _, ready, prefill = recorded  # after the append
    made = dict(ready.holes)[1]
    assert made == dict(prefill.holes)[0], "the prefill kernel reads the queries made ready"
    assert made != dict(ready.holes)[0]


@pytest.fixture
def newest() -> Iterator[Path]:
    """A folder with the newest release of triton, without touching the installed one."""
    fetch = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--retries", "0"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*fetch, "--timeout", "20", "--target", folder, "triton"],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            pytest.skip(f"the newest release of triton could not be fetched: {reason}")
        if list(Path(folder).glob(f"triton-{triton.__version__}.dist-info")):
            pytest.skip(f"the installed triton {triton.__version__} is the newest release")
        yield Path(folder)


def test_newest_release_compiles_all_variants(newest: Path) -> None:
    """The tests above once more, in a process that finds the newest release first."""
    path = os.pathsep.join(filter(None, (str(newest), os.environ.get("PYTHONPATH"))))
    again = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*again, "-k", "not newest"], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d+ passed", done.stdout)

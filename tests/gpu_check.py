"""All that a GPU has to show, at once and within a time: `make gpu-test` and its relatives.

The suites of both backends and compute-sanitizer share the GPU and the processors, as most of
their time is compiling. What has failed is known from the logs also where the time ends a suite.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
SUITES = {
    "hopper": (
        *("test_hopper.py", "test_hopper_decode.py", "test_hopper_prefix.py"),
        *("test_prefix.py", "test_gpu.py"),
    ),
    "triton": (
        *("test_contract*.py", "test_mods*.py", "test_batch_invariant.py", "test_decode_s*.py"),
        *("test_prefill.py", "test_prefix.py", "test_sharing.py", "test_gpu.py"),
    ),
}
TOOLS = ("memcheck", "racecheck")
_OUTCOME = re.compile(r"\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL) (.*)")


@dataclass
class Part:
    """A process, its log, and since when it has run."""

    name: str
    command: list[str]
    env: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    start: float = 0.0
    seconds: float = 0.0
    outcomes: dict[str, set[str]] = field(default_factory=dict)

    def begin(self) -> None:
        self.start = time.monotonic()
        with self.log.open("wb") as log:
            self.process = _started(self.command, self.env, log)

    def ended(self) -> bool:
        assert self.process
        over = self.process.poll() is not None
        if over and not self.seconds:
            self.seconds = time.monotonic() - self.start
        return over

    def stop(self) -> None:
        """Ends it and its workers, as the time is up."""
        assert self.process
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def verdict(self) -> str:
        """`ok`, `failed`, or `cut off` where the time ended it."""
        assert self.process
        code = self.process.returncode
        return "ok" if code == 0 else "failed" if code > 0 else "cut off"

    def progress(self) -> str:
        """How far a suite is, as pytest's newest line says."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 4096))
            found = re.findall(rb"\[ *(\d+)%\]", log.read())
        return f"{self.name} {int(found[-1])} %" if found else self.name

    def read(self) -> None:
        for line in self.log.read_text(errors="replace").splitlines():
            if found := _OUTCOME.match(line):
                self.outcomes.setdefault(found[1], set()).add(found[2].strip())

    def row(self) -> str:
        passed, failed, skipped = (len(self.names(*x)) for x in _COLUMNS)
        took = f"{self.seconds:.0f} s" if self.seconds else ""
        return f"{self.name:<10} {self.verdict():<8} {passed:>6} {failed:>6} {skipped:>7} {took:>6}"

    def names(self, *outcomes: str) -> list[str]:
        return sorted(set().union(*(self.outcomes.get(x, set()) for x in outcomes)))


_COLUMNS = (("PASSED", "XFAIL"), ("FAILED", "ERROR"), ("SKIPPED",))


def _started(command: list[str], env: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | env,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def files(backend: str) -> list[str]:
    found = (file for name in SUITES[backend] for file in (ROOT / "tests").glob(name))
    return sorted(str(file.relative_to(ROOT)) for file in found)


def suite(backend: str, workers: int, out: Path, more: list[str]) -> Part:
    """The tests of a backend, one line for each as it ends."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--tb=short"]
    command += ["-n", str(workers)]
    env = {
        "KVATTN_TEST_DEVICE": "cuda",
        "KVATTN_TEST_BACKENDS": backend,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    return Part(backend, [*command, *files(backend), *more], env, out / f"{backend}.log")


def sanitizer(tool: str, out: Path) -> Part:
    """compute-sanitizer over the short list of calls, both backends."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    env = {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "PYTHONUNBUFFERED": "1",
    }
    script = [sys.executable, str(ROOT / "tests" / "sanitize.py"), *SUITES]
    return Part(tool, [*command, *script], env, out / f"{tool}.log")


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def wait(parts: list[Part], seconds: float) -> None:
    """Until all have ended, or the time is up."""
    until = time.monotonic() + seconds
    try:
        while (busy := [x for x in parts if not x.ended()]) and time.monotonic() < until:
            if sys.stderr.isatty():
                print(end=f"\r\033[K{', '.join(x.progress() for x in busy)}", file=sys.stderr)
            time.sleep(0.2)
    finally:
        if sys.stderr.isatty():
            print(end="\r\033[K", file=sys.stderr)
        for part in parts:
            if not part.ended():
                part.stop()


def report(parts: list[Part]) -> int:
    """A table, and the names of what failed; 0 if all is well, 1 if not, 3 if cut off."""
    for part in parts:
        part.read()
        for name in part.names("FAILED", "ERROR"):
            print(f"{part.name}: FAILED {name}")
        if part.verdict() == "failed" and not part.outcomes:  # a sanitizer, or no test ran
            print(*part.log.read_text(errors="replace").splitlines()[-15:], sep="\n")
    print(f"{'part':<10} {'end':<8} {'passed':>6} {'failed':>6} {'skipped':>7} {'time':>6}")
    for part in parts:
        print(part.row())
    verdicts = {part.verdict() for part in parts}
    failed = "failed" in verdicts or any(part.names("FAILED", "ERROR") for part in parts)
    return 1 if failed else 3 if "cut off" in verdicts else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Other arguments go to pytest.")
    parser.add_argument("--parts", default="hopper,triton,memcheck", help="names between commas")
    parser.add_argument("--seconds", type=float, default=1200, help="until what runs is cut off")
    parser.add_argument("--workers", type=int, default=6, help="of a suite; they compile")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="of the logs")
    parser.add_argument("--list", choices=SUITES, help="only print the files of a suite")
    options, more = parser.parse_known_args(arguments)
    if options.list:
        print(*files(options.list))
        return 0
    names = options.parts.split(",")
    if unknown := set(names) - {*SUITES, *TOOLS}:
        parser.error(f"no part {', '.join(sorted(unknown))}: {', '.join((*SUITES, *TOOLS))}")
    if not _has_gpu():
        print(f"{sys.executable} has no PyTorch that sees a CUDA device", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    parts = [
        suite(x, options.workers, options.out, more) if x in SUITES else sanitizer(x, options.out)
        for x in names
        if x in SUITES or shutil.which("compute-sanitizer")
    ]
    for part in parts:
        part.begin()
    wait(parts, options.seconds)
    status = report(parts)
    if len(parts) < len(names):
        print("compute-sanitizer is not on PATH: what it would look at was not looked at")
    return status or (3 if len(parts) < len(names) else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

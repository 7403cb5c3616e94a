"""What a run was made on and with: whoever reads a figure has to know."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import kvattn


def describe(device: torch.device) -> dict[str, str]:
    """The device, its driver, the processor and the system, in words."""
    facts = {"device": device.type, "cpu": _cpu(), "system": platform.platform()}
    if device.type != "cuda":
        threads = torch.get_num_threads()
        return {"card": f"{facts['cpu']}, {threads} thread{'s' if threads > 1 else ''}", **facts}
    p = torch.cuda.get_device_properties(device)
    facts["card"] = p.name
    facts["memory"] = f"{p.total_memory / 2**30:.0f} GiB, L2 {p.L2_cache_size / 2**20:.0f} MiB"
    facts["processors"] = str(p.multi_processor_count)
    facts["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    facts["cuda"] = torch.version.cuda or torch.version.hip or ""
    return {name: what for name, what in facts.items() if what}


def versions() -> dict[str, str]:
    """Of what computes on every row; peers say their own."""
    found = {"kvattn": kvattn.__version__, "python": platform.python_version()}
    for name in ("torch", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    return found


def commit() -> str:
    """The revision of the source tree, "+" behind it if files have changed; "" outside of one.

    KVATTN_COMMIT names it where the files were copied without their history.
    """
    named = os.environ.get("KVATTN_COMMIT")
    if named:
        return named
    root = Path(kvattn.__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    revision = _said("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changed = _said("git", "-C", str(root), "status", "--porcelain", "--", "kvattn")
    return revision + ("+" if revision and changed else "")


def cold_bytes(device: torch.device) -> int:
    """Bytes to read until nothing of the first ones is in the cache: several times its size."""
    if device.type != "cuda":
        return 0
    return 6 * int(torch.cuda.get_device_properties(device).L2_cache_size)


def room(device: torch.device) -> int:
    """Bytes that a cell's tensors may take."""
    if device.type != "cuda":
        return 2 << 30
    free = int(torch.cuda.mem_get_info(device)[0])
    return min(free * 2 // 5, 32 << 30)  # more takes longer to fill and tells no more


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _said(*command: str) -> str:
    """The first line that a command prints, "" where it cannot be run."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip().partition("\n")[0] if ran.returncode == 0 else ""

"""What is usable on this machine, and why the rest is not."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvattn import __version__, backends
from kvattn.api import flash_attn_with_kvcache
from kvattn.explanation import explain
from kvattn.models import cache_dir

TESTED_TRANSFORMERS = ((5, 17), (5, 24))  # oldest and newest release that the tests run with
_TOLERANCE = 1e-3  # float32, numbers of about 1: a wrong kernel is off by far more


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        name: what it is.
        status: "ok", "absent" (something works less well or not at all without it) or "broken".
        detail: version or reason.
    """

    name: str
    status: str
    detail: str


class Trial(NamedTuple):
    """A tiny call on one backend and one device.

    Attributes:
        backend, device: names.
        status: "ok" if it gave the right numbers, "absent" if it does not take the call, "broken".
        detail: the largest error, or the reason.
    """

    backend: str
    device: str
    status: str
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `examine` found."""

    machine: list[Finding]
    trials: list[Trial]
    cache: Finding

    @property
    def usable(self) -> bool:
        """Whether some backend can run the contract."""
        return any(trial.status == "ok" for trial in self.trials)

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "usable": self.usable,
            "machine": [finding._asdict() for finding in self.machine],
            "backends": [trial._asdict() for trial in self.trials],
            "cache": self.cache._asdict(),
        }


def examine() -> Diagnosis:
    """Looks at packages and devices, and tries every backend on each device.

    Example:
        >>> kvattn.doctor.examine().usable
        True
    """
    machine = [_python(), _kvattn(), _torch(), *_gpus(), _triton(), _transformers(), _gguf()]
    names = [backend.name for backend in backends.BACKENDS]
    trials = [_try(name, device) for device in _devices() for name in names]
    return Diagnosis(machine, trials, _cache())


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} on {platform.platform()}")


def _kvattn() -> Finding:
    return Finding("kvattn", "ok", __version__)


def _torch() -> Finding:
    capability = torch.backends.cpu.get_cpu_capability()
    return Finding("PyTorch", "ok", f"{torch.__version__}, {capability}, {_threads()}")


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        why = "this PyTorch is built without CUDA"
        if torch.version.cuda or torch.version.hip:
            why = "PyTorch sees none: no device, or no driver for it"
        return [Finding("GPU", "absent", why)]
    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        detail = (
            f"{p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB"
        )
        found.append(Finding(f"cuda:{index}", "ok", detail))
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _triton() -> Finding:
    version = _version("triton")
    if version is None:
        return Finding("Triton", "absent", "not installed; it serves GPUs only")
    if not torch.cuda.is_available():
        return Finding("Triton", "absent", f"{version}, but no GPU")
    return Finding("Triton", "ok", version)


def _transformers() -> Finding:
    version, hint = _version("transformers"), "pip install 'kvattn[transformers]'"
    oldest, newest = (".".join(map(str, release)) for release in TESTED_TRANSFORMERS)
    if version is None:
        return Finding("Transformers", "absent", f"not installed: {hint}")
    release = tuple(int(part) for part in version.split(".")[:2])
    if release < TESTED_TRANSFORMERS[0]:
        return Finding("Transformers", "broken", f"{version} is older than {oldest}: {hint}")
    if release > TESTED_TRANSFORMERS[1]:
        return Finding("Transformers", "ok", f"{version}, newer than {newest}, the newest tested")
    return Finding("Transformers", "ok", f"{version}, tested from {oldest} to {newest}")


def _gguf() -> Finding:
    missing = [package for package in ("gguf", "accelerate") if _version(package) is None]
    if missing:
        need = f"{' and '.join(missing)} not installed: pip install 'kvattn[transformers]'"
        return Finding("GGUF files", "absent", need)
    return Finding(
        "GGUF files", "ok", f"gguf {_version('gguf')}, accelerate {_version('accelerate')}"
    )


def _cache() -> Finding:
    path = cache_dir()
    if not path.is_dir():
        return Finding("model cache", "ok", f"{path}, empty")
    models = [entry for entry in path.iterdir() if (entry / "config.json").is_file()]
    total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    count = f"{len(models)} model{'' if len(models) == 1 else 's'}"
    return Finding("model cache", "ok", f"{path}, {count}, {total / 1e6:.0f} MB")


def _devices() -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def _try(backend: str, device: str) -> Trial:
    """Whether the backend takes a tiny decode step, and whether what comes out is right."""
    call, expected = _tiny_call()
    call = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()}
    reason = dict(explain(**call).verdicts)[backend]
    if reason is not None:
        return Trial(backend, device, "absent", reason)
    try:
        out = flash_attn_with_kvcache(**call, backend=backend)
        assert isinstance(out, Tensor)
        error = (out.double().cpu() - expected).abs().max().item()
    except Exception as failure:  # whatever a broken installation raises is the finding
        return Trial(backend, device, "broken", f"failed: {type(failure).__name__}: {failure}")
    if not error <= _TOLERANCE:
        return Trial(backend, device, "broken", f"wrong numbers: off by {error:.1e}")
    return Trial(backend, device, "ok", f"self-test passed, largest error {error:.0e}")


def _tiny_call() -> tuple[dict[str, Any], Tensor]:
    """One token appended to each of two sequences in pages; the expected output in float64."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, heads, 16, generator=random) for heads in (4, 2, 2))
    k_cache, v_cache = (torch.randn(8, 4, 2, 16, generator=random) for _ in range(2))
    table, lengths = torch.tensor([[6, 1, 4], [3, 0, 7]]), torch.tensor([5, 11])
    rows = []
    for b, length in enumerate(lengths.tolist()):
        keys, values = (
            torch.cat([pages[table[b]].flatten(0, 1)[:length], new[b]])
            .double()
            .repeat_interleave(2, dim=1)
            for pages, new in ((k_cache, k), (v_cache, v))
        )
        weights = (torch.einsum("hd,khd->hk", q[b, 0].double(), keys) / 4).softmax(-1)
        rows.append(torch.einsum("hk,khd->hd", weights, values))
    call = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "causal": True}
    call |= {"cache_seqlens": lengths.int(), "page_table": table.int()}
    return call, torch.stack(rows)[:, None]

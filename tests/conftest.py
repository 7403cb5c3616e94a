"""For all tests: one thread each, no model hub, poisoned fresh memory; device, backend, model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEVICE = os.environ.get("KVATTN_TEST_DEVICE", "cpu")
BACKENDS = os.environ.get("KVATTN_TEST_BACKENDS", "reference,cpu").split(",")

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter  # noqa: F401  repairs Triton's interpreter before any kernel is imported

if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # Neither a deadline nor a check of speed: a busy machine is no mistake of the code.
    settings.register_profile(
        "kvattn",
        deadline=None,
        derandomize=True,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("kvattn")

# The byte that is NaN in each one-byte float, which fill_(nan) would not reach on every device.
NAN_BYTES = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7F,
    torch.float8_e8m0fnu: 0xFF,
}


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a fresh tensor with NaN, or with a number that no length or index can be."""
    if tensor.dtype in NAN_BYTES:
        tensor.view(torch.uint8).fill_(NAN_BYTES[tensor.dtype])
    elif tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(int.from_bytes(b"\x7f" * tensor.itemsize, "little"))
    return tensor


def poisoned(
    allocate: Callable[..., torch.Tensor], package: str = "kvattn"
) -> Callable[..., torch.Tensor]:
    """`allocate`, but what it gives to kvattn's own code is poisoned."""

    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():  # frames cannot be looked at under torch.compile
            return allocate(*args, **kwargs)
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return poison(tensor) if f"{caller}.".startswith(f"{package}.") else tensor

    return wrapper


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory() -> Iterator[None]:
    """A kernel that reads memory nobody wrote must be seen: fresh tensors of kvattn hold NaN."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, poisoned(getattr(torch, name)))
        patch.setattr(torch, "zeros", poisoned(torch.zeros, "kvattn.storage"))  # free pages
        for name in ("new_empty", "new_empty_strided"):
            patch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """KVATTN_TEST_DEVICE, or the CPU."""
    return torch.device(DEVICE)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend of KVATTN_TEST_BACKENDS (names between commas) in turn."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The default model in float32 and its tokenizer; skips only when it cannot be fetched."""
    pytest.importorskip("transformers")
    from kvattn.errors.model_kinds import ModelDownloadError
    from kvattn.models import load_model

    try:
        return load_model()
    except ModelDownloadError as error:
        pytest.skip(str(error))


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs `kvattn` in this process, without a terminal, 80 columns wide."""
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from typer.testing import CliRunner

    from kvattn import cli

    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: object, **more: Any) -> Any:
        return CliRunner().invoke(cli.app(), [str(argument) for argument in arguments], **more)

    return call


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers with a chat template, on disk."""
    from tiny_models import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def generate(invoke: Callable[..., Any], tiny: Path) -> Callable[..., Any]:
    """`kvattn generate` with the tiny model."""

    def call(*arguments: object, **more: Any) -> Any:
        return invoke("generate", "--model", tiny, *arguments, **more)

    return call

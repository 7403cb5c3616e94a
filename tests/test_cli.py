"""The `kvattn` command itself, and its `explain` and `doctor`."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import kvattn

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("transformers")

from cli_tools import Invoke

from kvattn import doctor
from kvattn.commands import terminal
from kvattn.errors.cli_kinds import CommandPackageError

# explain


def explained(invoke: Invoke, *arguments: object) -> dict[str, Any]:
    result = invoke("explain", "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_explain(invoke: Invoke) -> None:
    result = invoke("explain", "--softcap", 30)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "backend reference, for tensors on cpu"
    assert "not cpu torch's fused kernel has no softcap" in lines
    assert "q 1 x 1 x 32 x 128 bfloat16" in lines


def test_explain_as_json(invoke: Invoke) -> None:
    found = explained(invoke)
    fields = ["device", "backend", "kernel", "verdicts", "peers", "tensors", "options"]
    assert list(found) == fields
    assert found["backend"] == "cpu"
    assert found["verdicts"]["reference"] is None
    assert found["tensors"]["k_cache"] == {
        "shape": [256, 16, 8, 128],
        "dtype": "torch.bfloat16",
        "stride": [16384, 1024, 128, 1],
    }


@pytest.mark.parametrize(
    ("flags", "shapes"),
    [
        (["--batch", 3, "--seqlen-q", 5], {"q": [3, 5, 32, 128], "cache_seqlens": [3]}),
        (["--batch", 3, "--seqlen-q", 5, "--ragged"], {"q": [15, 32, 128], "cu_seqlens_q": [4]}),
        (["--seqlen-k", 17], {"k_cache": [2, 16, 8, 128], "page_table": [1, 2]}),
        (["--seqlen-k", 17, "--page-size", 0], {"k_cache": [1, 17, 8, 128]}),
        (["--page-size", 64], {"k_cache": [64, 64, 8, 128]}),
        (["--heads", 6, "--kv-heads", 2], {"q": [1, 1, 6, 128], "k_cache": [256, 16, 2, 128]}),
        (["--head-dim", 64], {"q": [1, 1, 32, 64], "v_cache": [256, 16, 8, 64]}),
        (["--head-dim-v", 64], {"k_cache": [256, 16, 8, 128], "v_cache": [256, 16, 8, 64]}),
        (["--append", 2], {"k": [1, 2, 8, 128], "k_cache": [257, 16, 8, 128]}),
        (["--append", 2, "--rotary"], {"rotary_cos": [4098, 64], "rotary_sin": [4098, 64]}),
        (["--norm"], {"q_norm_weight": [128]}),
        (["--append", 2, "--norm"], {"q_norm_weight": [128], "k_norm_weight": [128]}),
        (["--sinks"], {"sinks": [32]}),
        (["--alibi"], {"alibi_slopes": [32]}),
        (["--leftpad"], {"cache_leftpad": [1]}),
        (["--qv"], {"qv": [1, 1, 32, 128]}),
        (["--descale"], {"k_descale": [1, 8], "v_descale": [1, 8]}),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_explain_shapes(invoke: Invoke, flags: list[Any], shapes: dict[str, list[int]]) -> None:
    tensors = explained(invoke, *flags)["tensors"]
    assert {name: tensors[name]["shape"] for name in shapes} == shapes


def test_explain_options(invoke: Invoke) -> None:
    options = explained(invoke, "--no-causal", "--window", "9,2", "--softcap", 5)["options"]
    assert (options["causal"], options["window"], options["softcap"]) == (False, [9, 2], 5.0)
    assert explained(invoke, "--chunk", 64)["options"]["attention_chunk"] == 64
    assert explained(invoke, "--backend", "reference")["backend"] == "reference"
    assert explained(invoke, "--device", "cuda")["device"] == "cuda"
    found = explained(invoke, "--dtype", "fp16", "--kv-dtype", "fp8_e5m2")["tensors"]
    assert (found["q"]["dtype"], found["k_cache"]["dtype"]) == (
        "torch.float16",
        "torch.float8_e5m2",
    )
    assert invoke("explain", "--window", "9").exit_code == 2


# doctor


def test_doctor(invoke: Invoke) -> None:
    result = invoke("doctor")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(line.startswith(f"ok PyTorch {torch.__version__}") for line in lines)
    assert any(line.startswith("ok cpu backend on cpu: self-test passed") for line in lines)
    assert any(line.startswith("ok reference backend on cpu: self-test passed") for line in lines)
    assert "calls on cpu go to the cpu backend" in lines[-1]


def test_doctor_as_json(invoke: Invoke) -> None:
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert list(found) == ["usable", "machine", "backends", "cache"]
    assert found["usable"] is True
    for finding in (*found["machine"], found["cache"]):
        assert set(finding) == {"name", "status", "detail"}
        assert finding["status"] in ("ok", "absent", "broken")
    on_cpu = [trial["backend"] for trial in found["backends"] if trial["device"] == "cpu"]
    assert on_cpu == terminal.BACKENDS


def test_doctor_finds_wrong_numbers(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = kvattn.flash_attn_with_kvcache(*args, **kwargs)
        assert isinstance(out, torch.Tensor)
        return out * 1.01

    monkeypatch.setattr(doctor, "flash_attn_with_kvcache", wrong)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "wrong numbers" in result.stdout
    assert "nothing here is usable" in result.stdout


def test_doctor_survives_a_broken_backend(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("libgpu.so: cannot open")

    monkeypatch.setattr(doctor, "flash_attn_with_kvcache", broken)
    trials = doctor.examine().trials
    assert {trial.status for trial in trials} <= {"absent", "broken"}
    assert any("OSError: libgpu.so: cannot open" in trial.detail for trial in trials)


@pytest.mark.parametrize(
    ("package", "version", "name", "status", "said"),
    [
        ("triton", None, "Triton", "absent", "not installed"),
        ("transformers", None, "Transformers", "absent", "kvattn[transformers]"),
        ("transformers", "4.57.1", "Transformers", "broken", "older than 5.17"),
        ("transformers", "5.17.0", "Transformers", "ok", "tested"),
        ("transformers", "6.0.0.dev0", "Transformers", "ok", "newer than 5.24"),
        ("gguf", None, "GGUF files", "absent", "gguf not installed"),
    ],
)
def test_doctor_on_packages(
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    version: str | None,
    name: str,
    status: str,
    said: str,
) -> None:
    real = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda asked: version if asked == package else real(asked)
    )
    found = next(finding for finding in doctor.examine().machine if finding.name == name)
    assert found.status == status
    assert said in found.detail


def test_doctor_on_the_model_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVATTN_CACHE", str(tmp_path))
    assert doctor.examine().cache.detail == f"{tmp_path / 'models'}, empty"
    model = tmp_path / "models" / "some"
    model.mkdir(parents=True)
    (model / "config.json").write_bytes(b"x" * 2_000_000)
    assert doctor.examine().cache.detail == f"{tmp_path / 'models'}, 1 model, 2 MB"


# kvattn itself


def test_version_and_help(invoke: Invoke) -> None:
    assert invoke("--version").stdout == f"kvattn {kvattn.__version__}\n"
    for name in ("generate", "explain", "doctor"):
        assert name in invoke("--help").stdout
        assert invoke(name, "--help").exit_code == 0
    text = invoke("-h").stdout
    assert "Exit codes" in text
    for code in (0, 1, 2, 3, 4, 130):
        assert f" {code} " in text
    assert invoke().exit_code == 2


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from kvattn.cli import main; main()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 4
    assert ran.stdout == ""
    assert ran.stderr.startswith(f"[{CommandPackageError.code}]")
    assert package in ran.stderr
    assert "pip install 'kvattn[cli]'" in ran.stderr


def test_without_transformers(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; from kvattn.cli import main; "
        "sys.argv = ['kvattn', 'generate', 'hello']; main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 3
    assert "KV301" in ran.stderr
    assert "pip install 'kvattn[transformers]'" in " ".join(ran.stderr.split())
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_help_is_as_wide_as_the_terminal(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Paragraphs flow: a line that ends early is the last of its paragraph."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", columns)
    for name in ("generate", "explain", "doctor", "scan", "errors find", "bench report"):
        text = invoke(*name.split(), "--help").stdout.partition("╭")[0]
        lines = [line.strip() for line in text.splitlines()]
        for line, following in pairwise(lines):
            if line and following:
                assert len(line) + 1 + len(following.split()[0]) > columns - 2, (name, line)


def test_exit_codes_stand_in_lines_of_their_own(invoke: Invoke) -> None:
    lines = invoke("--help").stdout.partition("Exit codes")[2].splitlines()
    named = [line.split()[0] for line in lines if line[:7].strip()]
    assert named == ["0", "1", "2", "3", "4", "130"]

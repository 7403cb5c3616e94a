"""Wrong command lines, files, devices: a short message, the exit code that was promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("transformers")

from cli_tools import Invoke
from tiny_models import save_tiny


def test_wrong_usage_ends_with_2(generate: Invoke, tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("na\xefve".encode("latin-1"))
    cases: list[tuple[list[Any], str]] = [
        (["--backend", "abacus", "w1"], "reference"),
        (["--kv-dtype", "int4", "w1"], "fp8_e4m3"),
        (["--page-size", 0, "w1"], "--page-size"),
        (["--max-new-tokens", 0, "w1"], "--max-new-tokens"),
        (["--temperature", -1, "w1"], "--temperature"),
        (["--top-p", 0, "w1"], "--top-p"),
        (["--top-p", 1.5, "w1"], "--top-p"),
        (["--threads", 0, "w1"], "--threads"),
        (["--file", tmp_path / "none.txt"], "--file"),
        (["--file", latin], "--file"),
        (["--no-such-flag"], "--no-such-flag"),
        ([b"na\xefve".decode(errors="surrogateescape")], "UTF-8"),
        ([], "no prompt"),
    ]
    for arguments, said in cases:
        result = generate(*arguments, input="")
        assert result.exit_code == 2, arguments
        assert said in result.stderr, arguments


def test_a_terminal_is_not_waited_for(generate: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvattn.commands.generate._at_terminal", lambda: True)
    result = generate()
    assert result.exit_code == 2
    assert "give a prompt" in result.stderr


def test_a_model_that_cannot_be_loaded_ends_with_3(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("generate", "--model", tmp_path / "none", "w1")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "KV302" in result.stderr
    assert "Traceback" not in result.stderr
    (tmp_path / "config.json").write_text("{}")
    assert invoke("generate", "--model", tmp_path, "w1").exit_code == 3


def test_other_errors_end_with_4(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    capped = save_tiny(tmp_path / "gemma", kind="gemma2")
    cases: list[tuple[list[Any], str]] = [
        (["generate", "--model", capped, "--backend", "cpu", "w1"], "KV181"),
        (["generate", "--model", tiny, "--raw", ""], "KV502"),
        (["generate", "--device", "nowhere", "w1"], "KV504"),
        (["explain", "--heads", 5], "KV110"),
    ]
    for arguments, code in cases:
        result = invoke(*arguments)
        assert result.exit_code == 4, (arguments, result.output)
        assert code in result.stderr
        assert "fix" in result.stderr
        assert result.stdout == ""


def test_errors_as_json(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("generate", "--json", "--model", tmp_path / "none", "w1")
    assert result.exit_code == 3
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "KV302"
    assert set(error) == {"code", "argument", "problem", "got", "allowed", "fix"}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["generate", "w1", "--seed", 2**70], 2, "64 bits"),
        (["generate", "w1", "--threads", 10**12], 2, "--threads"),
        (["generate", "w1", "--page-size", 10**13, "-n", 1], 4, "KV508"),
        (["explain", "--batch", 10**20], 2, "no tensor can be of"),
        (["explain", "--head-dim", 2**61, "--heads", 8], 2, "no tensor can be of"),
        (["explain", "--device", "abacus"], 4, "KV504"),
        (["errors", "list", "--project", "abacus"], 1, "projects are kvattn"),
        (["errors", "show", "KV000"], 4, "KV701"),
    ],
)
def test_every_mistake_is_answered_in_words(
    invoke: Invoke, tiny: Path, arguments: list[Any], code: int, said: str
) -> None:
    model = ["--model", tiny] if arguments[0] == "generate" else []
    result = invoke(*arguments, *model)
    assert result.exit_code == code, result.output
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""


def test_a_device_is_planned_for_by_its_kind(invoke: Invoke) -> None:
    plain, second = (
        invoke("explain", "--device", name, "--json").stdout for name in ("cuda", "cuda:1")
    )
    assert json.loads(plain) == json.loads(second)


def test_prompts_in_odd_encodings(generate: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfw1 w2\r\n\r\nw3\r\n")
    for given in ({"input": file.read_bytes()}, {}):
        result = generate("--json", "-n", 1, *([] if given else ["--file", file]), **given)
        assert json.loads(result.stdout)["prompts"] == ["w1 w2", "w3"]
    result = generate("-n", 1, input=b"na\xefve")
    assert result.exit_code == 2
    assert "not readable" in result.stderr


MESSAGE = "[KV121] cache_seqlens[0]: the new tokens do not fit behind the cached ones."


@pytest.mark.parametrize(
    "pasted",
    [
        pytest.param(MESSAGE.encode("utf-16"), id="utf-16, as PowerShell writes"),
        pytest.param(b"\xff\xfa\x00 " + MESSAGE.encode() + b"\r\n\xc3", id="binary around it"),
        pytest.param(MESSAGE.replace(" ", "\r\n").encode(), id="lines of Windows"),
    ],
)
def test_a_log_is_read_in_any_encoding(invoke: Invoke, pasted: bytes) -> None:
    result = invoke("errors", "find", input=pasted)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("KV121")

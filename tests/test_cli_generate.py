"""`kvattn generate`: answers, tables and JSON, options, prompts, and how it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("transformers")

from cli_tools import Invoke, command

FIELDS: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "prompts": list,
    "texts": list,
    "token_ids": list,
    "prompt_tokens": list,
    "new_tokens": list,
    "finish": list,
    "tokens_per_second": dict,
    "seconds": dict,
    "page_size": int,
    "pages_used": int,
    "kv_dtype": str,
    "kv_bytes": int,
    "kv_bytes_allocated": int,
    "fused": bool,
    "backend": str,
    "plan": dict,
    "verify": (dict, type(None)),
}


@pytest.fixture
def fields(generate: Invoke) -> Callable[..., dict[str, Any]]:
    """The object that `kvattn generate --json` prints."""

    def call(*arguments: object, **more: Any) -> dict[str, Any]:
        result = generate("--json", *arguments, **more)
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return call


def names(text: str) -> list[str]:
    """The first word of each line."""
    return [line.split()[0] for line in text.splitlines() if line.strip()]


def test_one_answer_and_its_table(generate: Invoke) -> None:
    result = generate("w1 w2", "-n", 5)
    assert result.exit_code == 0
    answer, table = result.stdout.split("\n\n", 1)
    assert answer.startswith("w")
    assert names(table) == [
        *("tokens", "loading", "prefill", "decode"),
        *("prompt", "new", "pages", "KV", "backend", "plan", "not", "not"),
    ]
    assert max(map(len, table.splitlines())) <= 80
    assert names(result.stderr) == ["0%", "95%", "100%"]


def test_answers_come_in_prompt_order(
    generate: Invoke, fields: Callable[..., dict[str, Any]]
) -> None:
    prompts = ("w1 w2", "w3\nw4", "w5")
    one, two, three = fields(*prompts, "-n", 3)["texts"]
    assert len({one, two, three}) == 3
    assert generate(*prompts, "-n", 3).stdout.startswith(
        f"[1] w1 w2\n{one}\n\n[2] w3 w4\n{two}\n\n[3] w5\n{three}\n\n"
    )


def test_verify(generate: Invoke) -> None:
    result = generate("w1 w2 w3", "w4", "--verify", "-n", 20)
    assert result.exit_code == 0
    assert "PyTorch sdpa" in result.stdout
    assert result.stdout.rstrip().endswith("all tokens equal, 40 of 40")


def test_verify_fails(generate: Invoke) -> None:
    """An FP8 cache rounds, and a random model is not sure of its tokens."""
    result = generate("w1 w2 w3", "w4", "--verify", "-n", 40, "--kv-dtype", "fp8_e5m2")
    assert result.exit_code == 1
    assert "tokens differ in" in result.stdout
    assert "PyTorch has 'w" in result.stdout


def test_quiet_prints_the_answer_alone(generate: Invoke) -> None:
    result = generate("w1 w2", "-n", 4, "--quiet")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 1
    assert result.stdout.startswith("w")
    assert result.stderr == ""


def test_json_is_one_object_with_stable_fields(fields: Callable[..., dict[str, Any]]) -> None:
    found = fields("w1 w2", "w3", "--verify", "-n", 6)
    assert list(found) == list(FIELDS)
    for name, kind in FIELDS.items():
        assert isinstance(found[name], kind), name
    assert found["prompts"] == ["w1 w2", "w3"]
    assert found["prompt_tokens"] == [5, 4]
    assert found["new_tokens"] == list(map(len, found["token_ids"])) == [6, 6]
    assert found["finish"] == ["length", "length"]
    assert all(text.startswith("w") for text in found["texts"])
    assert set(found["tokens_per_second"]) == {"prefill", "decode"}
    assert set(found["seconds"]) == {"load", "prefill", "decode"}
    assert found["kv_bytes"] == found["pages_used"] * 16 * 2 * 2 * 2 * 8 * 4
    assert found["kv_bytes_allocated"] >= found["kv_bytes"]
    assert set(found["plan"]) == {"prefill", "decode"}
    assert all(text.startswith("backend cpu") for text in found["plan"].values())
    assert found["verify"] == {
        "against": "sdpa",
        "equal": True,
        "differences": [],
        "tokens_per_second": found["verify"]["tokens_per_second"],
    }


def test_json_of_a_failed_verify(generate: Invoke) -> None:
    result = generate("w1", "--json", "--verify", "-n", 40, "--kv-dtype", "fp8_e5m2")
    assert result.exit_code == 1
    found = json.loads(result.stdout)["verify"]
    assert not found["equal"]
    assert set(found["differences"][0]) == {"prompt", "position", "ours", "theirs"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-n", 7], {"new_tokens": [7]}),
        (["--page-size", 3], {"page_size": 3, "pages_used": 6}),  # 5 + 11 tokens
        (["--kv-dtype", "auto"], {"kv_dtype": "float32"}),
        (["--kv-dtype", "fp16"], {"kv_dtype": "float16"}),
        (["--kv-dtype", "fp8_e4m3"], {"kv_dtype": "float8_e4m3fn"}),
        (["--dtype", "bf16"], {"kv_dtype": "bfloat16"}),
        (["--dtype", "fp16", "--kv-dtype", "fp8_e5m2"], {"kv_dtype": "float8_e5m2"}),
        (["--backend", "reference"], {"backend": "reference"}),
        (["--backend", "cpu"], {"backend": "cpu"}),
        (["--fuse"], {"fused": True}),
        (["--no-fuse"], {"fused": False}),
        (["--raw"], {"prompt_tokens": [2]}),
        (["--device", "cpu"], {"prompt_tokens": [5]}),
        (["--temperature", 0], {"finish": ["length"]}),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_flags(
    fields: Callable[..., dict[str, Any]], flags: list[Any], expected: dict[str, Any]
) -> None:
    found = fields("w1 w2", "-n", 12, *flags)
    assert {name: found[name] for name in expected} == expected


def test_flags_of_sampling(fields: Callable[..., dict[str, Any]]) -> None:
    def ids(*flags: object) -> list[int]:
        tokens: list[int] = fields("w1 w2", "-n", 12, *flags)["token_ids"][0]
        return tokens

    hot = ids("--temperature", 5, "--seed", 1)
    assert hot == ids("--temperature", 5, "--seed", 1)
    assert hot != ids("--temperature", 5, "--seed", 2)
    assert ids("--temperature", 5, "--top-p", 1e-6) == ids()


def test_threads(generate: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert generate("w1", "-n", 1).exit_code == 0
    assert asked == []
    assert generate("w1", "-n", 1, "--threads", 1).exit_code == 0
    assert asked == [1]


def test_prompts_from_stdin_and_file(fields: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("w1 w2\n\n  \nw3\n", encoding="utf-8")
    few = ("-n", 1)
    assert fields(*few, input="w4\nw5 w6\n")["prompts"] == ["w4", "w5 w6"]
    assert fields(*few, "--file", file)["prompts"] == ["w1 w2", "w3"]
    assert fields(*few, "w7", "--file", file)["prompts"] == ["w7", "w1 w2", "w3"]
    assert fields(*few, "w7", "--file", "-", input="w8\n")["prompts"] == ["w7", "w8"]
    assert fields(*few, "w7", input="ignored\n")["prompts"] == ["w7"]


def test_an_interrupt_while_loading(generate: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvattn.commands.generate.load_model", interrupt)
    result = generate("w1")
    assert result.exit_code == 130
    assert result.stdout == ""


def test_an_interrupt_while_verifying(generate: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvattn.commands.generate.verify", interrupt)
    result = generate("w1", "--verify", "-n", 3)
    assert result.exit_code == 130
    assert result.stdout.rstrip().endswith("interrupted, nothing compared")


def test_an_interrupt_from_outside(tiny: Path) -> None:
    process = subprocess.Popen(
        command("generate", "--model", tiny, "-n", 100_000, "--verify", "w9 w8 w7"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"COLUMNS": "80"},
        # Whatever this process has inherited: shells let what runs behind them ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    begun = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, complaints = process.communicate(timeout=300)
    output = (begun + rest).decode()
    assert process.returncode == 130
    assert output.startswith("w")
    assert "pages used" in output
    assert output.rstrip().endswith("interrupted, nothing compared")
    assert b"Traceback" not in complaints


def test_a_reader_that_goes_away(tiny: Path) -> None:
    process = subprocess.Popen(
        command("generate", "--model", tiny, "-n", 100_000, "w9 w8 w7"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(20)
    process.stdout.close()
    assert process.stderr is not None
    complaints = process.stderr.read()
    assert process.wait(timeout=300) == -signal.SIGPIPE
    assert b"Traceback" not in complaints


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such encoding to set")
def test_a_terminal_without_utf8(tiny: Path) -> None:
    ran = subprocess.run(
        command("generate", "--model", tiny, "-n", 2, "w1 caf\xe9", "w2"),
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(b"[1] w1 caf?\n")

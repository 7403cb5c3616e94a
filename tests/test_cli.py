"""The `kvattn` command: what it prints, what it takes, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import kvattn

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("transformers")

from rich.console import Console
from tiny_models import save_tiny
from typer.testing import CliRunner

from kvattn import cli, doctor
from kvattn.commands import answers, terminal
from kvattn.errors.cli_kinds import CommandPackageError
from kvattn.generation import Answer

Result = Any
Invoke = Callable[..., Result]

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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers with a chat template, on disk."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs the command in this process, without a terminal, 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")
    runner = CliRunner()

    def call(*arguments: object, **more: Any) -> Result:
        return runner.invoke(cli.app(), [str(argument) for argument in arguments], **more)

    return call


@pytest.fixture
def generate(invoke: Invoke, tiny: Path) -> Invoke:
    """`kvattn generate` with the tiny model."""

    def call(*arguments: object, **more: Any) -> Result:
        return invoke("generate", "--model", tiny, *arguments, **more)

    return call


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


# generate


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


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "kvattn.cli", *map(str, arguments)]


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
    rest, complaints = process.communicate(timeout=60)
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
    assert process.wait(timeout=60) == -signal.SIGPIPE
    assert b"Traceback" not in complaints


# answers on the screen


def live(prompts: list[str], texts: list[str], width: int, height: int) -> list[str]:
    """The lines of the live display."""
    console = Console(file=StringIO(), force_terminal=True, width=width, height=height)
    streams = answers._Streams(prompts)
    streams.watch([Answer(text=text) for text in texts])
    with console.capture() as captured:
        console.print(streams, soft_wrap=False)
    return _without_style(captured.get()).splitlines()


def _without_style(text: str) -> str:
    from rich.text import Text

    return Text.from_ansi(text).plain


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 30), (40, 12)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_live_answers_fit_the_screen(width: int, height: int, count: int) -> None:
    texts = [f"begin{i} " + "word " * 900 + f"end{i}" for i in range(count)]
    prompts = [f"prompt {i}\nof two lines" for i in range(count)]
    lines = live(prompts, texts, width, height)
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    shown = "\n".join(lines)
    for i in range(count):
        assert f"prompt {i} of two lines" in shown
        assert f"end{i}" in shown  # the newest words are on the screen
        assert f"begin{i}" not in shown


def test_live_answers_stay_on_the_screen_in_full() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80, height=10)
    with answers.shown(console, ["one", "two"], plain=False) as watch:
        watch([Answer(text="a " * 2000), Answer(text="[bold]b[/bold]")])
    output = console.file.getvalue()  # type: ignore[attr-defined]
    final = _without_style(output.rpartition("\x1b[2K")[2])  # what follows the last erased line
    assert final.split().count("a") == 2000
    assert "[bold]b[/bold]" in final  # text of the model is no markup


def test_plain_answers_are_written_as_they_come() -> None:
    console = Console(file=StringIO())
    first, second = Answer(), Answer()
    with answers.shown(console, ["one", "two"], plain=False) as watch:
        written = console.file.getvalue  # type: ignore[attr-defined]
        first.text, second.text = "a b", "x"
        watch([first, second])
        assert written() == "[1] one\na b"
        second.text, second.finish = "x y", "eos"
        watch([first, second])
        assert written() == "[1] one\na b"
        first.text, first.finish = "a b c", "length"
        watch([first, second])
        watch([first, second])
    assert written() == "[1] one\na b c\n\n[2] two\nx y\n"


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress() as report:
        for step in range(11):
            report("fetching [it]", step / 10)
        report("ready", 1.0)
    assert capsys.readouterr().err.splitlines() == [
        *("  0%  fetching [it]", " 30%  fetching [it]", " 60%  fetching [it]"),
        *(" 90%  fetching [it]", "100%  ready"),
    ]


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (13271040, "12.7 MiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_sizes_in_words(count: int, words: str) -> None:
    assert terminal.size(count) == words


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

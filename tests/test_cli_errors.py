"""`kvattn errors`, `kvattn scan`, and what `kvattn explain` says about other libraries."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_tools import Invoke

pytest.importorskip("typer")
pytest.importorskip("rich")

import kvattn
from kvattn.errors import catalogue
from kvattn.peers import PEERS


def flat(text: str) -> str:
    return " ".join(text.split())


# errors ----------------------------------------------------------------------------------------


def test_list(invoke: Invoke) -> None:
    result = invoke("errors", "list")
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.stdout.splitlines() if line[:1].isalpha()]
    assert listed == [record.code for record in catalogue.everything()]
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_list_as_json_and_filtered(invoke: Invoke) -> None:
    found = json.loads(invoke("errors", "list", "--json").stdout)["errors"]
    assert [each["id"] for each in found] == [record.id for record in catalogue.everything()]
    assert set(found[0]) >= {"code", "project", "exception", "title", "message"}
    options = ("--project", "kvattn", "--argument", "page_table", "--json")
    some = json.loads(invoke("errors", "list", *options).stdout)["errors"]
    codes = {each["code"] for each in some}
    assert {"KV132", "KV133", "KV134"} <= codes and "KV101" not in codes
    assert {each["project"] for each in some} == {"kvattn"}
    empty = invoke("errors", "list", "--project", "no-such")
    assert (empty.exit_code, empty.stdout.strip()) == (1, "")


def test_show(invoke: Invoke) -> None:
    record = catalogue.record("KV121")
    result = invoke("errors", "show", "kv121")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"KV121  {record.title}\n")
    text = flat(result.stdout)
    assert record.example is not None
    shown = (record.meaning, record.trigger, *record.situations, *record.solutions, record.id)
    for part in (*shown, f"{record.sites[0].file}:{record.sites[0].line}"):
        assert flat(part) in text
    for related in record.related:
        assert catalogue.record(related).title in text
    for program in (record.example.before, record.example.after, record.guard):
        assert program.strip("\n") in result.stdout  # whole lines, to be copied


def test_show_as_json(invoke: Invoke) -> None:
    record = catalogue.everything()[-1]
    result = invoke("errors", "show", record.id, "--json")
    assert json.loads(result.stdout) == json.loads(json.dumps(record.to_dict()))


def test_every_page_can_be_shown() -> None:
    from rich.console import Console

    from kvattn.commands.page import page

    console = Console(width=60, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    with console.capture() as captured:
        for record in catalogue.everything():
            for part in page(record):
                console.print(part, crop=False)
    assert captured.get().count("What it means") == len(catalogue.everything())


def test_show_of_an_unknown_code(invoke: Invoke) -> None:
    result = invoke("errors", "show", "KV1211")
    assert result.exit_code == 4
    assert "KV701" in result.stderr and "KV121" in result.stderr
    assert "kvattn errors show KV701" in result.stderr
    error = json.loads(invoke("errors", "show", "KV1211", "--json").stdout)["error"]
    assert error["code"] == "KV701"


TRACEBACK = """Traceback (most recent call last):
  File "/srv/models/serve.py", line 41, in step
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lens)
  File "/opt/venv/lib/python3.12/site-packages/sglang/{path}", line 264, in
    flash_attn_with_kvcache
    raise NotImplementedError(
NotImplementedError: {message}
"""


@pytest.mark.parametrize("wrapper", ["flash_attention_v4.py", "flash_attention_v4_sm120.py"])
@pytest.mark.parametrize(
    "message",
    [
        "FA4 does not support updating KV cache in-place.",
        "FA4 path does not support rotary embedding.",
        "FA4 path does not support non-consecutive batch indices or left padding.",
    ],
)
def test_find_a_pasted_traceback(invoke: Invoke, wrapper: str, message: str) -> None:
    text = TRACEBACK.format(path=f"jit_kernel/{wrapper}", message=message)
    result = invoke("errors", "find", "--json", input=text)
    assert result.exit_code == 0
    first = json.loads(result.stdout)["matches"][0]
    assert first["error"]["message"] == message and first["score"] > 0.5
    page = invoke("errors", "find", input=text)
    assert page.exit_code == 0
    assert page.stdout.startswith(f"{first['error']['code']}  {first['error']['title']}")
    after = catalogue.record(first["error"]["id"]).example
    assert after is not None and after.after.strip("\n") in page.stdout
    assert "flash_attn_with_kvcache(" in after.after and "kvattn" in after.after


def test_find_an_error_of_kvattn_as_it_was_printed(invoke: Invoke) -> None:
    """A real traceback; its last line names the command that leads to the same page."""
    code = "import torch, kvattn; x = torch.zeros(1, 1, 3, 8); "
    code += "kvattn.flash_attn_func(x, x[:, :, :2], x)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stderr.strip().endswith("Explain: kvattn errors show KV111")
    found = json.loads(invoke("errors", "find", "--json", input=ran.stderr).stdout)["matches"]
    assert found[0]["error"]["code"] == "KV111"
    named = invoke("errors", *ran.stderr.split()[-2:])
    assert named.stdout.startswith("KV111")


def test_find_takes_words_and_says_when_there_is_nothing(invoke: Invoke) -> None:
    result = invoke("errors", "find", "FA4", "path does not support rotary", "embedding.")
    assert result.exit_code == 0
    nothing = invoke("errors", "find", "zebra giraffe")
    assert (nothing.exit_code, nothing.stdout) == (1, "")
    assert "No known error" in nothing.stderr
    as_json = invoke("errors", "find", "--json", "zebra giraffe")
    assert (as_json.exit_code, json.loads(as_json.stdout)) == (1, {"matches": []})


def test_find_names_no_more_than_asked_for(invoke: Invoke) -> None:
    text = (
        "FA4 path does not support non-consecutive batch indices, FA4 path does not support descale"
    )
    found = [
        json.loads(invoke("errors", "find", "--json", "--limit", n, text).stdout)["matches"]
        for n in (1, 3)
    ]
    assert len(found[0]) == 1 and found[1][:1] == found[0] and len(found[1]) <= 3


def test_help_names_every_command(invoke: Invoke) -> None:
    text = invoke("--help").stdout
    assert "scan" in text and "errors" in text
    inner = invoke("errors", "--help").stdout
    for name in ("list", "show", "find", "export", "serve"):
        assert f" {name} " in inner


# scan ------------------------------------------------------------------------------------------

REFUSED = """
from flash_attn import flash_attn_with_kvcache as attend

def step(q, k, v, cache, n):
    if n is None:
        raise ValueError(f"no lengths for {len(q)} queries")
    return attend(q, *cache, k, v, cache_seqlens=n)
"""
TAKEN = "from flash_attn import flash_attn_func\nflash_attn_func(q, k, v, causal=True)\n"


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "refused.py").write_text(REFUSED.replace("*cache", "cache.k, cache.v"))
    (tmp_path / "taken.py").write_text(TAKEN)
    (tmp_path / "broken.py").write_text("def f(:\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "options", "code"),
    [
        (".", [], 1),
        (".", ["--backend", "fa4"], 1),
        (".", ["--backend", "sglang-fa4-sm120"], 1),
        (".", ["--backend", "fa2"], 0),
        ("taken.py", [], 0),
        ("refused.py", ["--show", "raises"], 1),
        (".", ["--backend", "nobody"], 2),
        (".", ["--backend", "sdpa"], 2),
        ("nowhere", [], 4),
        (".", ["--jobs", "0"], 2),
    ],
)
def test_exit_codes_of_scan(
    invoke: Invoke, repo: Path, file: str, options: list[str], code: int
) -> None:
    for more in ([], ["--json"]):
        assert invoke("scan", repo / file, *options, *more).exit_code == code


def test_scan_report(invoke: Invoke, repo: Path) -> None:
    result = invoke("scan", repo, "--backend", "fa4", "-q")
    text = result.stdout
    assert "refused.py:7  step calls flash_attn_with_kvcache of FlashAttention-2" in text
    assert "fa4  refuses  k, v: has no call that appends" in text
    assert "kvattn.flash_attn_with_kvcache(q, cache.k, cache.v, k=k, v=v, cache_seqlens=n)" in text
    assert "kvattn.flash_attn_func(q, k, v, causal=True)" in text
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("ValueError  no lengths for"))
    assert lines[at].startswith("ValueError  no lengths for {len(q)} queries  ")
    assert lines[at + 1] == "  refused.py:6  step(q, k, v, cache, n)  if n is None"
    assert "skipped broken.py: does not parse in line 1" in flat(text)
    assert "2, of which 1 refused or changed by fa4" in text
    assert result.stderr == ""


def test_parts_of_a_scan_report(invoke: Invoke, repo: Path) -> None:
    calls, raises = (invoke("scan", repo, "--show", part).stdout for part in ("calls", "raises"))
    assert "write instead" in calls and "ValueError" not in calls
    assert "ValueError" in raises and "write instead" not in raises


def test_scan_as_json(invoke: Invoke, repo: Path) -> None:
    result = invoke("scan", repo, "--json", "--backend", "fa4")
    found = json.loads(result.stdout)
    assert found["backend"] == "fa4" and found["files"] == 2
    assert [call["file"] for call in found["calls"]] == ["refused.py", "taken.py"]
    assert {verdict["peer"] for verdict in found["calls"][0]["verdicts"]} >= {"fa4", "sglang-fa4"}
    assert [each["file"] for each in found["skipped"]] == ["broken.py"]
    assert result.stderr == ""


# explain ---------------------------------------------------------------------------------------


def test_explain_lists_other_libraries(invoke: Invoke) -> None:
    result = invoke("explain", "--append", 1, "--rotary", "--device", "cuda")
    assert result.exit_code == 0
    text = flat(result.stdout.partition("Other libraries")[2])
    for peer in PEERS:
        assert f"{peer.name} {peer.title}," in text
    assert re.search(r"FlashAttention-3, (not|\S+) installed: could take the call", text)
    assert "k, v: raises NotImplementedError: it does not update the cache in place" in text


def test_explain_as_json_has_peers(invoke: Invoke) -> None:
    found = json.loads(invoke("explain", "--sinks", "--json").stdout)
    peers = {peer["name"]: peer for peer in found["peers"]}
    assert set(peers) == {peer.name for peer in PEERS}
    assert ["sinks"] in [verdict["arguments"] for verdict in peers["fa3"]["verdicts"]]
    assert peers["sdpa"]["installed"] and isinstance(kvattn.__version__, str)

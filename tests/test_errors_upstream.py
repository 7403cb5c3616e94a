"""The catalogue of other libraries' refusals: complete, unambiguous, and every program runs."""

from __future__ import annotations

import ast
import builtins
import random
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import install, meet, stood_in

from kvattn.errors import upstream
from kvattn.errors.record import Record, identity

RECORDS = upstream.records()
PAIRS = [record for record in RECORDS if record.example and record.example.before]

TEXTS = {
    *("code", "project", "version", "exception", "message", "title", "meaning", "file"),
    *("function", "condition", "trigger", "kvattn"),
}
LISTS = {"situations", "solutions", "arguments", "functions"}
OPTIONAL = {"line", "before"}
CODES = {
    "flash-attn-2": "FA2",
    "flash-attn-3": "FA3",
    "flash-attn-4": "FA4",
    "flashinfer": "FI",
    "sglang-fa3": "SGL",
    "sglang-fa4": "SGL",
    "sglang-fa4-sm120": "SGL",
    "transformers": "HF",
    "vllm": "VLLM",
}
ORIGINS = (
    "FA4 does not support updating KV cache in-place.",
    "FA4 path does not support rotary embedding.",
    "FA4 path does not support non-consecutive batch indices or left padding.",
)


def code(record: Record) -> str:
    return record.code


def files() -> list[Path]:
    return sorted(upstream.PEERS.glob("*/*.toml"))


@pytest.mark.parametrize("path", files(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_file_holds_a_whole_record(path: Path) -> None:
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    fields: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    assert set(fields) - OPTIONAL == TEXTS | LISTS
    assert all(fields[name].strip() for name in TEXTS)
    assert all(isinstance(item, str) and item for name in LISTS for item in fields[name])
    assert fields["situations"] and fields["solutions"] and fields["functions"]
    assert fields["project"] == path.parent.name
    assert re.fullmatch(rf"{CODES[fields['project']]}-\d\d", fields["code"])
    assert fields.get("line", 1) > 0
    exception = fields["exception"]
    assert exception == upstream.SILENT or issubclass(getattr(builtins, exception), Exception)
    assert exception != upstream.SILENT or "before" not in fields  # nothing is raised
    ast.parse(fields["condition"], mode="eval")
    for program in (fields["kvattn"], fields.get("before", "")):
        assert max(map(len, program.splitlines()), default=0) <= 100
        assert program.isascii()
    assert any(module.startswith("kvattn") for module in imported(fields["kvattn"]))
    assert "assert" in fields["kvattn"]


def imported(program: str) -> set[str]:
    tree = ast.parse(program)
    return {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_there_is_a_record_for_every_project_and_enough_of_them() -> None:
    assert len(RECORDS) == len(files()) >= 60
    assert {record.project for record in RECORDS} == set(CODES)
    silent = [record for record in RECORDS if record.exception == upstream.SILENT]
    assert len(silent) >= 20


def test_no_two_records_are_the_same() -> None:
    for name in ("id", "code"):
        values = [getattr(record, name) for record in RECORDS]
        assert len(set(values)) == len(values), name
    assert len({(record.project, record.title) for record in RECORDS}) == len(RECORDS)


def test_ids_come_from_what_is_seen() -> None:
    for record in RECORDS:
        assert record.id == identity(record.project, record.exception, record.message)


def test_records_are_in_order_and_know_their_neighbours() -> None:
    assert list(RECORDS) == sorted(RECORDS, key=lambda record: (record.project, record.code))
    known = {record.id for record in RECORDS}
    for record in RECORDS:
        assert record.id not in record.related
        assert set(record.related) <= known
    by_code = {record.code: record for record in RECORDS}
    assert by_code["FA3-01"].id in by_code["FA2-04"].related  # rotary tables without new keys


@pytest.mark.parametrize("project", ["sglang-fa4", "sglang-fa4-sm120"])
@pytest.mark.parametrize("message", ORIGINS)
def test_the_refusals_that_this_began_with_are_pairs(project: str, message: str) -> None:
    found = [r for r in PAIRS if (r.project, r.message) == (project, message)]
    assert [record.exception for record in found] == ["NotImplementedError"]


@pytest.mark.parametrize("record", RECORDS, ids=code)
def test_the_kvattn_program_runs_and_is_right(record: Record) -> None:
    assert record.example is not None
    torch.manual_seed(0)
    random.seed(0)
    exec(compile(record.example.after, f"<{record.code}>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("record", PAIRS, ids=code)
def test_the_program_before_meets_the_refusal(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    error = meet(record, monkeypatch)
    assert type(error).__name__ == record.exception
    assert re.search(pattern(record.message), str(error)), str(error)


def pattern(template: str) -> str:
    parts = re.split(r"\{\w+\}", template)
    return ".+".join(map(re.escape, parts))


# FA4-17 is about tensors on the CPU, where this test's are.
PLAIN = [record for record in PAIRS if stood_in(record) and record.code != "FA4-17"]


@pytest.mark.parametrize("record", PLAIN, ids=code)
def test_a_guard_lets_a_plain_call_pass(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision, aligned sizes, one page of 256 tokens a sequence, nothing special asked."""
    functions = install(record, monkeypatch)
    q = torch.randn(2, 1, 4, 64).half()
    k_cache, v_cache = torch.randn(2, 2, 256, 2, 64).half()
    lengths = torch.tensor([7, 256], dtype=torch.int32)
    assert functions
    for function in functions:
        if function.__name__ == "flash_attn_with_kvcache":
            function(q, k_cache, v_cache, cache_seqlens=lengths, causal=True)
        elif function.__name__ == "apply_rope_with_cos_sin_cache":
            function(torch.arange(2), q, q, 64, torch.randn(8, 64))
        elif record.project == "vllm":
            borders = torch.tensor([0, 1, 2], dtype=torch.int32)
            function(q[:, 0], k_cache, v_cache, 1, borders, 256, seqused_k=lengths)
        else:
            function(q, k_cache, v_cache, causal=True)


def test_a_program_with_a_wrong_argument_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (append,) = (record for record in PAIRS if record.code == "SGL-01")
    (function,) = install(append, monkeypatch)
    q = torch.randn(1, 1, 2, 8)
    with pytest.raises(TypeError, match="v_cache"):
        function(q, q)
    with pytest.raises(NotImplementedError, match="in-place"):
        function(q, q, q, q, q)

"""Pasted messages, logs and tracebacks are recognised; other text is not."""

from __future__ import annotations

import json
import random
import re
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from stand_ins import meet

import kvattn
from kvattn.errors import catalogue, upstream
from kvattn.errors.find import Match, find
from kvattn.errors.record import Record

UPSTREAM = upstream.records()
EVERYTHING = catalogue.everything()
RAISED = [record for record in EVERYTHING if record.exception != upstream.SILENT]
SILENT = [record for record in UPSTREAM if record.exception == upstream.SILENT]
PAIRS = [record for record in UPSTREAM if record.example and record.example.before]
WRAPPERS = [record for record in PAIRS if record.code in ("SGL-01", "SGL-02", "SGL-03")]
WRAPPERS += [record for record in PAIRS if record.code in ("SGL-21", "SGL-22", "SGL-23")]


def code(record: Record) -> str:
    return record.code


def first(text: str) -> Match:
    matches = find(text)
    assert matches, text
    return matches[0]


def filled(record: Record, seed: int) -> str:
    """The record's message with something else in every brace."""
    chance = random.Random(f"{record.code} {seed}")
    words = ("q", "k_cache[3]", "torch.bfloat16", "(2, 17, 8, 128)", "-1", "fa2", "a longer text")

    def value(found: re.Match[str]) -> str:
        return f"{chance.choice(words)} {chance.randrange(100_000)}"

    return re.sub(r"\{[^{}]*\}", value, record.message)


@pytest.mark.parametrize("record", RAISED, ids=code)
def test_every_message_is_found_first(record: Record) -> None:
    """Alone it may be another project's as well; the file of a frame tells them apart."""
    for seed in range(2):
        raised = f"{record.exception}: {filled(record, seed)}"
        if "too many values" not in raised:  # Python's own words: these need the call beside them
            assert first(raised).record.message == record.message
            assert first(filled(record, seed)).record.message == record.message
        named = f"in {record.functions[0] if record.functions else 'f'}\n{raised}"
        for site in record.sites[:1]:
            frame = f'  File "/x/site-packages/{site.file}", line {seed + 7}, in {site.function}\n'
            assert first(f"{frame}{named}").record.id == record.id


@pytest.mark.parametrize("record", SILENT, ids=code)
def test_every_symptom_is_found_first(record: Record) -> None:
    assert first(record.message).record.id == record.id
    assert first(record.message.upper().replace(",", "")).record.id == record.id


def coloured(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(f"\x1b[1;31m{line}\x1b[0m" for line in lines) + "\x1b[K"


def wrapped(width: int) -> Callable[[str], str]:
    """As a terminal or a mail program breaks lines: anywhere."""

    def wrap(text: str) -> str:
        lines = text.splitlines()
        return "\n".join(line[i : i + width] for line in lines for i in range(0, len(line), width))

    return wrap


def logged(text: str) -> str:
    stamp = "(EngineCore_DP0 pid=4711) ERROR 11-30 12:00:01 [core.py:708] "
    return textwrap.indent(text, stamp, lambda line: True)


def composed(text: str) -> str:
    stamp = "worker-1  | 2026-11-30T02:14:07.123Z "
    return textwrap.indent(text, stamp, lambda line: True)


def boxed(text: str) -> str:
    lines = [line[i : i + 60] for line in text.splitlines() for i in range(0, len(line), 60)]
    body = "\n".join(f"│ {line:<60} │" for line in lines)
    return f"╭{'─' * 62}╮\n{body}\n╰{'─' * 62}╯"


def reported(text: str) -> str:
    """The end of a pytest report: source, an arrow, and E before what was raised."""
    *frames, error = text.strip().splitlines()
    source = "\n".join(f"    {line.strip()}" for line in frames)
    return f">   out = step()\n{source}\nE       {error}\n\nstep.py:12: {error.split(':')[0]}"


def quoted(text: str) -> str:
    return f"\u201c{text}\u201d".replace("'", "\u2019").replace('"', "\u201d")


SHAPES: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "coloured": coloured,
    "30 columns": wrapped(30),
    "71 columns": wrapped(71),
    "spaces": lambda text: re.sub(r" +", "   ", text),
    "logged": logged,
    "logged and wrapped": lambda text: logged(wrapped(50)(text)),
    "composed": composed,
    "boxed": boxed,
    "pytest": reported,
    "quoted": quoted,
    "json": lambda text: json.dumps({"level": "error", "message": text}),
    "windows": lambda text: text.replace("/opt/venv/lib", "C:\\venv").replace("/", "\\"),
    "carriage returns": lambda text: text.replace("\n", "\r\n"),
    "mailed": lambda text: textwrap.indent(text, "> ", lambda line: True),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("record", WRAPPERS, ids=code)
def test_tracebacks_of_both_wrappers(
    record: Record, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(traceback.format_exception(meet(record, monkeypatch)))
    assert "NotImplementedError: FA4" in text
    matches = find(SHAPES[shape](text))
    assert matches[0].record.message == record.message
    if "wrapped" not in shape and "columns" not in shape and shape != "boxed":
        assert matches[0].record.id == record.id  # the path in a frame is whole
    assert {match.record.project for match in matches} == {"sglang-fa4", "sglang-fa4-sm120"}


@pytest.mark.parametrize("record", WRAPPERS, ids=code)
def test_what_is_found_runs(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the traceback to a program that does the same job, here on the CPU."""
    text = "".join(traceback.format_exception(meet(record, monkeypatch)))
    example = first(text).record.example
    assert example is not None
    torch.manual_seed(0)
    exec(compile(example.after, f"<{record.code}>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("record", PAIRS, ids=code)
def test_the_refusal_of_every_program_is_found(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(traceback.format_exception(meet(record, monkeypatch)))
    found = first(text).record
    assert (found.message, found.exception) == (record.message, record.exception)


def test_own_errors_are_found_by_their_code() -> None:
    with pytest.raises(kvattn.errors.KvattnError) as caught:
        kvattn.flash_attn_with_kvcache(torch.ones(1, 1, 3, 8), *torch.ones(2, 1, 4, 2, 8))
    text = "".join(traceback.format_exception(caught.value))
    assert first(text).record.code == caught.value.code
    assert first(wrapped(20)(text)).record.code == caught.value.code
    assert first(f"it says [{caught.value.code}] and no more").score == 1.0


@pytest.mark.parametrize("key", ["KV121", "fa2-03", " SGL-01\n"])
def test_a_code_is_a_question_too(key: str) -> None:
    assert [match.record.code for match in find(key)] == [key.strip().upper()]
    (match,) = find(key)
    assert [found.record for found in find(match.record.id)] == [match.record]


NEAR = {
    "FA4 path does not suport rotary embeding": "FA4 path does not support rotary embedding.",
    "NotImplementedError: FA4 path does not support non-consecutive batch ind…": (
        "FA4 path does not support non-consecutive batch indices or left padding."
    ),
    "Paged KV cache block size must be divisible by 128": (
        "Paged KV cache block size must be divisible by 256"
    ),
    "FA4 does not support descale.": "FA4 path does not support descale.",
    "AssertionError: SplitKV is not supported on SM 9.0 yet": (
        "SplitKV not supported on SM {capability}"
    ),
}
ASKED = {
    "mask_mod drops causal in fa4": "FA4-31",
    "lse base 2 flashinfer": "FI-31",
    "new tokens outside the sliding window are not stored": "FA2-31",
    "sinks silently dropped in transformers with flash attention 2": "HF-31",
    "nan in unused cache slots": "FA3-32",
    "padding slot -1 overwrites last slot": "VLLM-33",
    "queries rotated at the same position without causal": "FA3-33",
}


@pytest.mark.parametrize("text", NEAR)
def test_messages_that_differ_in_a_few_words(text: str) -> None:
    match = first(text)
    assert match.record.message == NEAR[text]
    assert match.score < 0.6


@pytest.mark.parametrize("text", ASKED)
def test_symptoms_in_other_words(text: str) -> None:
    assert first(text).record.code == ASKED[text]


def test_a_frame_alone_is_the_weakest_sign() -> None:
    """The message is new, but the file, the function and the exception are known."""
    text = (
        '  File "/x/sglang/kernels/ops/attention/flash_attention_v4_sm120.py", line 9, in '
        "flash_attn_with_kvcache\nNotImplementedError: xyzzy"
    )
    matches = find(text)
    assert {match.record.code for match in matches} == {"SGL-21", "SGL-22", "SGL-23"}
    assert max(match.score for match in matches) <= 0.2


UNRELATED = (
    "",
    " \n\t ",
    "hello world",
    "How do I bake bread with attention to detail?",
    "the model does not support this",
    "Traceback (most recent call last):",
    "NotImplementedError",
    "KeyError: 'attention_mask'",
    "IndexError: list index out of range",
    "AttributeError: 'NoneType' object has no attribute 'shape'",
    "ValueError: too many values to unpack (expected 2)",
    "ValueError: batch size must be positive",
    "TypeError: forward() got an unexpected keyword argument 'cache'",
    "ImportError: cannot import name 'foo' from 'bar' (/x/bar/__init__.py)",
    "ModuleNotFoundError: No module named 'flash_attn'",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x32)",
    "RuntimeError: The size of tensor a (4) must match the size of tensor b (5)",
    "RuntimeError: Expected all tensors to be on the same device, cuda:0 and cpu!",
    "ValueError: The following `model_kwargs` are not used by the model: ['foo']",
    "requests.exceptions.ConnectionError: Max retries exceeded with url: /api/v1/models",
    "Some weights of LlamaForCausalLM were not initialized from the model checkpoint",
    'File "/x/app.py", line 3, in <module>\n    main()\nZeroDivisionError: division by zero',
    "npm ERR! code ELIFECYCLE\nnpm ERR! errno 1",
    "head_dim",
    "{[(*+?\\^$|)]} {} {0} %s \x00 \x1b[",
)


@pytest.mark.parametrize("text", UNRELATED)
def test_unrelated_text_finds_nothing(text: str) -> None:
    assert find(text) == []


def test_a_short_message_needs_its_own_exception() -> None:
    assert first("RuntimeError: batch size must be positive").record.code == "FA2-12"
    assert first("batch size must be positive").record.code == "FA2-12"
    loader = 'File "/x/data.py", line 4, in batches\nRuntimeError: batch size must be positive\n'
    assert find(loader * 3) == []


def test_source_lines_count_less_than_what_was_raised() -> None:
    """A report that shows the lines above the raise holds the text of other refusals too."""
    text = (
        '        raise NotImplementedError("FA4 does not support updating KV cache in-place.")\n'
        "    if rotary_cos is not None:\n"
        '>       raise NotImplementedError("FA4 path does not support rotary embedding.")\n'
        "E       NotImplementedError: FA4 path does not support rotary embedding.\n"
    )
    messages = [match.record.message for match in find(text)]
    assert messages[:2] == ["FA4 path does not support rotary embedding."] * 2
    assert "FA4 does not support updating KV cache in-place." in messages[2:]


def test_all_errors_of_a_log_are_found_within_the_limit() -> None:
    chosen = [record for record in UPSTREAM if record.code in ("FA2-03", "VLLM-06", "HF-01")]
    text = "\n".join(f"step {i}\n{r.exception}: {r.message}\n" for i, r in enumerate(chosen))
    assert {match.record.code for match in find(text)} == {record.code for record in chosen}
    assert len(find(text, limit=2)) == 2
    assert find(text, limit=0) == []
    scores = [match.score for match in find(text)]
    assert scores == sorted(scores, reverse=True) and 0 < min(scores) <= max(scores) <= 1


def test_the_excerpt_is_what_was_raised() -> None:
    text = "one\ntwo\nRuntimeError: Paged KV cache block\n  size must be divisible by\n256\nthree"
    match = first(text)
    assert match.excerpt == "RuntimeError: Paged KV cache block size must be divisible by 256"
    assert len(first(f"a{' b' * 999} FA2 does not support s_aux {'c ' * 999}").excerpt) <= 240


MEGABYTE = {
    "log": "2026-11-30 12:00:00,123 INFO worker-3 step 17 took 3.2 ms, error rate 0\n" * 14_000,
    "failures": "ValueError: cannot open file 17 of 28\n" * 27_000,
    "one letter": "a" * 1_000_000,
    "one word": "error" * 200_000,
    "blank": " " * 1_000_000,
    "lines": "\n" * 1_000_000,
    "short lines": "x\n" * 500_000,
    "escapes": "\x1b[" * 500_000,
    "backslashes": "\\n" * 500_000,
    "levels": "ERROR: " * 140_000,
    "almost": "(head_dim, " * 91_000,
    "accents": "é“" * 500_000,
}


@pytest.mark.parametrize("name", MEGABYTE)
def test_a_megabyte_with_and_without_an_error(name: str) -> None:
    noise = MEGABYTE[name]
    assert len(noise) >= 900_000
    assert find(noise) == []
    text = f"{noise}\nRuntimeError: Paged KVcache does not support cache_batch_idx\n{noise}"
    match = first(text)
    assert match.record.code == "FA2-01"
    assert "Paged KVcache does not support" in match.excerpt or name in ("one letter", "one word")


def test_records_can_be_looked_up_by_what_find_returns() -> None:
    match = first("RuntimeError: Paged KVcache does not support cache_batch_idx")
    assert catalogue.record(match.record.id) == match.record
    assert match == replace(match)

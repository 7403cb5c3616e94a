"""The suites: which cells are measured, in three sizes.

``full`` is the grid that results are published from, ``quick`` its heart, ``small`` what a CPU does
in seconds. Suites stand in the order of what matters most, so that a budget cuts the tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvattn.bench.shapes import MODELS, Work, small

GRIDS = ("full", "quick", "small")

Sizes = Iterable[tuple[int, int]]  # (batch, context)


@dataclass(frozen=True)
class Suite:
    """Cells that answer one question.

    Attributes:
        name: what `--suite` takes.
        title: the heading in reports.
        about: the question, in a sentence.
        unit: what the tables show: "us", "TFLOP/s", "s".
        cells: grid -> cells.
    """

    name: str
    title: str
    about: str
    cells: Callable[[str], list[Work]]
    unit: str = "us"


def count(n: int) -> str:
    """2048 as 2k."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def _batch(suite: str, model: str, batch: int, context: int, q: int = 1, **more: Any) -> Work:
    """A batch of sequences alike; `tag` tells it from others of its size."""
    tag = more.pop("tag", "")
    label = f"{batch} x {count(context)}" + (f", {tag}" if tag else "")
    return Work(suite, label, MODELS[model], (q,) * batch, (context,) * batch, **more)


def _batches(suite: str, model: str, sizes: Sizes, **more: Any) -> list[Work]:
    return [_batch(suite, model, batch, context, **more) for batch, context in sizes]


def _decode(grid: str) -> list[Work]:
    name = "decode"
    page16: dict[str, Any] = {"page": 16, "tag": "page 16"}
    if grid == "small":
        cells = _batches(name, "smollm2-135m", [(1, 256), (4, 512)])
        return [small(work) for work in [*cells, _batch(name, "llama3-8b", 2, 256, **page16)]]
    quick = [(1, 1024), (1, 8192), (8, 1024), (8, 8192), (64, 1024), (64, 8192), (256, 1024)]
    cells = _batches(name, "llama3-8b", quick)
    cells.append(_batch(name, "llama3-8b", 8, 8192, **page16))
    if grid == "full":
        more = [(1, 65536), (8, 65536), (256, 4096)]
        cells += _batches(name, "llama3-8b", more)
        cells += _batches(name, "llama3-8b", [(1, 8192), (64, 1024)], **page16)
        cells += _batches(name, "mha-32", [(1, 4096), (8, 4096), (64, 2048)], tag="no groups")
        sizes = [(1, 4096), (8, 4096), (64, 4096), (256, 4096)]
        cells += _batches(name, "llama3-70b-tp8", sizes, tag="70B, TP 8")
        cells += _batches(name, "qwen3-30b", [(8, 8192), (64, 8192)], tag="Qwen3-30B")
        cells += _batches(name, "smollm2-135m", [(1, 2048), (8, 2048)], tag="SmolLM2")
    return cells


def _step(grid: str) -> list[Work]:
    name = "step"
    if grid == "small":
        cells = _batches(name, "smollm2-135m", [(1, 256), (4, 256)], append=True)
        return [small(work) for work in cells]
    sizes = [(1, 1024), (1, 8192), (8, 1024), (8, 8192), (64, 1024)]
    cells = _batches(name, "llama3-8b", sizes, append=True)
    if grid == "full":
        cells += _batches(name, "llama3-8b", [(64, 8192), (256, 1024)], append=True)
        more: dict[str, Any] = {"append": True, "tag": "70B, TP 8"}
        cells += _batches(name, "llama3-70b-tp8", [(1, 4096), (8, 4096), (64, 4096)], **more)
        cells += _batches(name, "qwen3-30b", [(8, 8192)], append=True, tag="Qwen3-30B")
        page = {"append": True, "page": 16, "tag": "page 16"}
        cells += _batches(name, "llama3-8b", [(8, 1024), (64, 1024)], **page)
    return cells


def _dense(suite: str, model: str, sizes: Sizes, tag: str, **more: Any) -> list[Work]:
    """Every query against all keys of its own, in contiguous tensors."""
    return [_batch(suite, model, b, s, q=s, page=0, tag=tag, **more) for b, s in sizes]


def _prefill(grid: str) -> list[Work]:
    name = "prefill"
    if grid == "small":
        cells = _dense(name, "smollm2-135m", [(1, 256)], "causal")
        cells += _dense(name, "mha-16", [(2, 128)], "full", causal=False)
        return [small(work) for work in cells]
    quick = [(16, 1024), (4, 4096), (1, 16384)]
    cells = _dense(name, "mha-16", quick, "causal")
    cells += _dense(name, "mha-16", quick[:2], "full", causal=False)
    if grid == "full":
        more = [(8, 2048), (2, 8192)]
        cells += _dense(name, "mha-16", more, "causal")
        cells += _dense(name, "mha-16", [*more, (1, 16384)], "full", causal=False)
        cells += _dense(name, "llama3-8b", [(4, 4096), (1, 32768)], "causal, Llama-3 8B")
        cells += _dense(name, "gpt-oss", [(4, 4096)], "causal, D 64")
        cells += _dense(name, "gemma3-12b", [(4, 4096)], "causal, D 256")
    return cells


def _lengths(suite: str, label: str, model: str, keys: Iterable[int], **more: Any) -> Work:
    """One new token on each of sequences of different lengths."""
    lengths = tuple(keys)
    return Work(suite, label, MODELS[model], (1,) * len(lengths), lengths, **more)


def _skew(grid: str) -> list[Work]:
    name = "skew"
    if grid == "small":
        return [small(_lengths(name, "1 x 512 + 3 x 64", "smollm2-135m", [512, 64, 64, 64]))]
    long = [131072, *[1024] * 63]
    cells = [
        _lengths(name, "1 x 128k + 63 x 1k", "llama3-8b", long),
        _lengths(name, "1 x 64k + 15 x 4k", "llama3-8b", [65536, *[4096] * 15]),
    ]
    if grid == "full":
        zipf = [max(256, 65536 // (i + 1)) for i in range(32)]
        some = [131072, *[4096] * 31]
        tp8: dict[str, Any] = {"kv_dtype": "fp8"}
        cells += [
            _lengths(name, "2 x 32k + 30 x 4k", "llama3-8b", [*[32768] * 2, *[4096] * 30]),
            _lengths(name, "32 lengths, 64k / rank", "llama3-8b", zipf),
            _lengths(name, "1 x 128k + 31 x 4k, TP 8, FP8", "llama3-70b-tp8", some, **tp8),
        ]
    return cells


def _fp8(grid: str) -> list[Work]:
    name = "fp8"
    fp8: dict[str, Any] = {"kv_dtype": "fp8"}
    if grid == "small":
        return [small(_batch(name, "smollm2-135m", 2, 256, **fp8))]
    cells = _batches(name, "llama3-8b", [(1, 8192), (8, 8192), (64, 8192)], **fp8)
    if grid == "full":
        sizes = [(1, 1024), (8, 1024), (64, 1024), (1, 65536), (256, 1024)]
        cells += _batches(name, "llama3-8b", sizes, **fp8)
        cells += _batches(name, "llama3-70b-tp8", [(8, 4096), (64, 4096)], tag="70B, TP 8", **fp8)
    return cells


def _verify(grid: str) -> list[Work]:
    name = "verify"

    def drafts(model: str, batch: int, context: int, q: int, tree: bool = False) -> Work:
        tag = f"q {q}, tree" if tree else f"q {q}"
        return _batch(name, model, batch, context, q=q, tree=tree, causal=not tree, tag=tag)

    if grid == "small":
        cells = [drafts("smollm2-135m", 2, 256, 4), drafts("smollm2-135m", 2, 256, 7, True)]
        return [small(work) for work in cells]
    cells = [drafts("llama3-8b", 8, 8192, q) for q in (2, 4, 8)]
    cells.append(drafts("llama3-8b", 8, 8192, 7, True))
    if grid == "full":
        cells += [drafts("llama3-8b", 1, 8192, q) for q in (2, 4, 8)]
        cells += [drafts("llama3-8b", 64, 1024, q) for q in (4, 8)]
        cells.append(drafts("llama3-8b", 64, 1024, 7, True))
    return cells


def _host(grid: str) -> list[Work]:
    name = "host"
    model, context = ("smollm2-135m", 64) if grid == "small" else ("llama3-8b", 1024)
    host: dict[str, Any] = {"kind": "host"}
    cells = [
        _batch(name, model, 8, context, tag="decode", **host),
        _batch(name, model, 8, context, append=True, tag="step", **host),
        _batch(name, model, 1, context, q=context, page=0, tag="prefill", **host),
    ]
    return [small(work) for work in cells] if grid == "small" else cells


def _chunk(grid: str) -> list[Work]:
    name = "chunked"

    def chunk(model: str, q: int, context: int, page: int) -> Work:
        tag = f"chunk {count(q)}, page {page}"
        return _batch(name, model, 1, context, q=q, page=page, tag=tag)

    if grid == "small":
        return [small(chunk("smollm2-135m", 64, 256, 16))]
    cells = [chunk("llama3-8b", 2048, 32768, page) for page in (16, 64)]
    if grid == "full":
        cells += [chunk("llama3-8b", 512, 8192, 16), chunk("llama3-8b", 8192, 131072, 64)]
        cells += [chunk("llama3-8b", 2048, 131072, 64), chunk("llama3-8b", 2048, 32768, 1)]
    return cells


def _mixed(grid: str) -> list[Work]:
    name = "mixed"

    def mixed(model: str, prompts: int, size: int, tokens: int, context: int) -> Work:
        label = f"{prompts} x {count(size)} prompt + {tokens} x {count(context)} decode"
        queries = (size,) * prompts + (1,) * tokens
        return Work(
            name, label, MODELS[model], queries, (size,) * prompts + (context,) * tokens, page=16
        )

    if grid == "small":
        return [small(mixed("smollm2-135m", 1, 64, 3, 128))]
    cells = [mixed("llama3-8b", 1, 2048, 32, 2048)]
    if grid == "full":
        cells += [mixed("llama3-8b", 2, 2048, 128, 2048), mixed("llama3-8b", 1, 8192, 32, 8192)]
    return cells


def _window(grid: str) -> list[Work]:
    name = "window"
    on: dict[str, Any] = {"window": True}
    if grid == "small":
        cells = [_batch(name, "gpt-oss", 2, 256, tag="gpt-oss", **on)]
        cells.append(_batch(name, "gemma3-12b", 1, 1280, tag="Gemma-3 12B", **on))
        return [small(work) for work in cells]
    cells = [
        _batch(name, "gpt-oss", 8, 8192, tag="gpt-oss", **on),
        _batch(name, "gpt-oss", 64, 8192, tag="gpt-oss", **on),
        _batch(name, "gemma3-12b", 8, 8192, tag="Gemma-3 12B", **on),
    ]
    if grid == "full":
        cells += _batches(name, "gpt-oss", [(8, 65536), (1, 131072)], tag="gpt-oss", **on)
        cells += _batches(name, "gemma3-12b", [(64, 8192)], tag="Gemma-3 12B", **on)
        cells += _dense(name, "gpt-oss", [(4, 4096)], "gpt-oss, prefill", **on)
        cells += _dense(name, "gemma3-12b", [(4, 4096)], "Gemma-3 12B, prefill", **on)
    return cells


def _mla(grid: str) -> list[Work]:
    name = "mla"

    def latent(heads: int, batch: int, context: int, q: int = 1) -> Work:
        tag = f"{heads} heads" + (f", q {q}" if q > 1 else "")
        return _batch(name, f"mla-{heads}", batch, context, q=q, tag=tag)

    if grid == "small":
        return [small(latent(16, 2, 64))]
    cells = [latent(16, 8, 8192), latent(128, 64, 4096), latent(16, 128, 4096)]
    if grid == "full":
        cells += [latent(16, 1, 8192), latent(64, 64, 4096), latent(128, 8, 8192)]
        cells += [latent(16, 64, 4096, q=2), latent(128, 64, 4096, q=2)]
        lengths = [4641, 45118, 1730, 1696]
        label = "4 lengths up to 45k, 16 heads"
        cells.append(_lengths(name, label, "mla-16", lengths))
    return cells


def _prefix(grid: str) -> list[Work]:
    name = "prefix"

    def shared(model: str, batch: int, prefix: int, rest: int, page: int = 16) -> Work:
        label = f"{batch} x ({count(prefix)} shared + {count(rest)})"
        keys = (prefix + rest,) * batch
        return Work(name, label, MODELS[model], (1,) * batch, keys, page=page, prefix=prefix)

    def flat(work: Work) -> Work:
        return replace(work, label=f"{work.label}, not announced", announced=False)

    if grid == "small":
        cells = [small(shared("smollm2-135m", 4, 128, 32))]
        return cells + [flat(work) for work in cells]
    cells = [shared("llama3-8b", 32, 8192, 128), shared("llama3-8b", 128, 2048, 128)]
    cells += [flat(work) for work in cells]
    if grid == "full":
        cells += [shared("llama3-8b", 8, 512, 128), shared("llama3-8b", 128, 32768, 128)]
        cells += [shared("llama3-8b", 32, 8192, 1024), shared("llama3-8b", 256, 8192, 128)]
    return cells


def _invariant(grid: str) -> list[Work]:
    name = "invariant"
    on: dict[str, Any] = {"invariant": True}
    if grid == "small":
        return [small(_batch(name, "smollm2-135m", 2, 256, **on))]
    cells = _batches(name, "llama3-8b", [(1, 8192), (8, 8192), (64, 1024)], **on)
    if grid == "full":
        cells.append(_batch(name, "llama3-8b", 8, 8192, q=4, tag="q 4", **on))
        cells += _batches(name, "llama3-8b", [(1, 1024), (64, 8192)], **on)
    return cells


def _big(grid: str) -> list[Work]:
    name = "big"
    if grid == "small":
        return [small(_batch(name, "smollm2-135m", 64, 16))]
    sizes = [(1024, 512)] if grid == "quick" else [(512, 512), (1024, 512), (2048, 512)]
    return _batches(name, "llama3-8b", sizes)


def _startup(grid: str) -> list[Work]:
    name = "startup"
    start: dict[str, Any] = {"kind": "startup"}
    if grid == "small":
        return [small(_batch(name, "smollm2-135m", 1, 64, tag="cold", **start))]
    return [_batch(name, "llama3-8b", 1, 1024, tag=tag, **start) for tag in ("cold", "warm")]


_ALL = (
    Suite("decode", "Decode", "One new token a sequence over its cache.", _decode),
    Suite("step", "Fused step", "Rotary, append and decode: all that a layer asks for.", _step),
    Suite("prefill", "Prefill", "Prompts against themselves.", _prefill, "TFLOP/s"),
    Suite("skew", "Skewed lengths", "Decode where some sequences are much longer.", _skew),
    Suite("host", "Host time", "What one eager call costs the processor.", _host),
    Suite("fp8", "FP8 cache", "Decode over a cache of 8 bits.", _fp8),
    Suite("verify", "Draft tokens", "Several query tokens a sequence, chains and trees.", _verify),
    Suite("chunked", "Chunked prefill", "A piece of a prompt over pages.", _chunk, "TFLOP/s"),
    Suite("mixed", "Mixed batch", "Prompts and single tokens in one batch.", _mixed),
    Suite("window", "Sliding window", "Layers that see the last keys only, with sinks.", _window),
    Suite("mla", "Latent attention", "Decode of DeepSeek's absorbed form.", _mla),
    Suite("prefix", "Shared prefix", "Decode of sequences that begin alike.", _prefix),
    Suite("invariant", "Batch-invariant", "Decode whose bits ignore the neighbours.", _invariant),
    Suite("big", "Big batch", "Many short sequences.", _big),
    Suite("startup", "Start-up", "From a fresh process to the first result.", _startup, "s"),
)

SUITES = {suite.name: suite for suite in _ALL}
HEADLINE = ("decode", "step", "prefill", "skew", "host")

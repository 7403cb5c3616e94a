"""What `kvattn generate` says about a run: the table, the verdict, the JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvattn.commands.terminal import NAMES, facts, size
from kvattn.generation import Run, Verdict
from kvattn.models import DEFAULT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LISTED = 4  # prompts whose lengths are listed one by one


def lines(
    tokenizer: PreTrainedTokenizerBase,
    run: Run,
    verdict: Verdict | None,
    loaded: float,
    checked: bool,
) -> Iterator[RenderableType]:
    """What the answers took, what did the work, and what --verify found."""
    yield Text()
    yield _speeds(run, verdict, loaded)
    yield Text()
    rows = _facts(run)
    if checked:
        rows.append(("verify", _verdict(run, verdict)))
    elif run.interrupted:
        rows.append(("ended", Text("interrupted", "yellow")))
    yield facts(rows)
    if verdict is not None and not verdict.equal:
        yield Text()
        yield facts(_differences(tokenizer, verdict))


def _speeds(run: Run, verdict: Verdict | None, loaded: float) -> Table:
    """Tokens, seconds and tokens per second; PyTorch's beside them if it ran."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=NAMES, style="dim")
    heads = ["tokens", "seconds", "tokens/s"]
    theirs: list[list[str]] = [[], []]
    if verdict is not None:
        heads.append(f"PyTorch {verdict.against}")
        theirs = [[_rate(verdict.speed.prefill)], [_rate(verdict.speed.decode)]]
    for _ in heads:
        table.add_column(justify="right", min_width=9)
    table.add_row("", *heads, style="dim")
    table.add_row("loading", "", f"{loaded:.2f}")
    speed = run.speed
    for name, tokens, seconds, rate, other in (
        ("prefill", speed.prefill_tokens, speed.prefill_seconds, speed.prefill, theirs[0]),
        ("decode", speed.decode_tokens, speed.decode_seconds, speed.decode, theirs[1]),
    ):
        table.add_row(name, f"{tokens:,}", f"{seconds:.2f}", Text(_rate(rate), "bold"), *other)
    return table


def _rate(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:.1f}"


def _facts(run: Run) -> list[tuple[str, RenderableType]]:
    stats = run.stats
    dtype = str(run.kv_dtype).removeprefix("torch.")
    return [
        ("prompt tokens", _lengths([len(ids) for ids in run.prompts])),
        ("new tokens", _lengths([len(answer.ids) for answer in run.answers])),
        ("pages used", f"{stats.pages_used:,}, of {run.settings.page_size} tokens each"),
        ("KV bytes", f"{stats.bytes_used:,} ({size(stats.bytes_used)}, {dtype})"),
        ("backend", f"{_backends(run)}, {'fused' if run.fused else 'unfused'} attention layers"),
        *_plan_rows(run),
    ]


def _lengths(counts: list[int]) -> str:
    if len(counts) == 1:
        return f"{counts[0]:,}"
    if len(counts) <= _LISTED:
        return f"{sum(counts):,} = {' + '.join(map(str, counts))}"
    return f"{sum(counts):,} in {len(counts)}, {min(counts)} to {max(counts)} each"


def _backends(run: Run) -> str:
    names = [found.plan.backend for plans in run.plans.values() for found in plans]
    return ", ".join(dict.fromkeys(names)) or "none"


def _plan_rows(run: Run) -> list[tuple[str, RenderableType]]:
    """The plans of prefill and decode, and why more preferred backends were passed over."""
    kernels = {
        phase: ", or ".join(dict.fromkeys(found.plan.kernel for found in plans))
        for phase, plans in run.plans.items()
    }
    if len(set(kernels.values())) == 1:
        kernels = {"plan": next(iter(kernels.values()))}
    passed: dict[str, str] = {}
    for plans in run.plans.values():
        for found in plans:
            passed |= dict(found.plan.passed_over)
    rows = [
        (phase if phase == "plan" else f"{phase} plan", text) for phase, text in kernels.items()
    ]
    rows += [(f"not {name}", reason) for name, reason in passed.items()]
    return [(name, Text(text)) for name, text in rows]


def _verdict(run: Run, verdict: Verdict | None) -> Text:
    if verdict is None:
        return Text("interrupted, nothing compared", "yellow")
    total = sum(len(answer.ids) for answer in run.answers)
    if verdict.equal:
        return Text.assemble(("all tokens equal", "bold green"), f", {total} of {total}")
    found = f"tokens differ in {len(verdict.differences)} of {len(run.answers)} answers"
    return Text(found, "bold red")


def _differences(
    tokenizer: PreTrainedTokenizerBase, verdict: Verdict
) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = []
    for at in verdict.differences:
        ours, theirs = (_token(tokenizer, token) for token in (at.ours, at.theirs))
        found = Text(f"differs at token {at.position + 1}: {ours}, PyTorch has {theirs}")
        rows.append((f"answer {at.prompt + 1}", found))
    return rows


def _token(tokenizer: PreTrainedTokenizerBase, token: int | None) -> str:
    return "no token" if token is None else f"{tokenizer.decode([token])!r} ({token})"


def fields(
    model: str | None, texts: list[str], run: Run, verdict: Verdict | None, loaded: float
) -> dict[str, Any]:
    """What --json prints; docs/cli.md explains each field."""
    return {
        "model": model or DEFAULT.name,
        "prompts": texts,
        "texts": [answer.text for answer in run.answers],
        "token_ids": [answer.ids for answer in run.answers],
        "prompt_tokens": [len(ids) for ids in run.prompts],
        "new_tokens": [len(answer.ids) for answer in run.answers],
        "finish": [answer.finish for answer in run.answers],
        "tokens_per_second": {"prefill": run.speed.prefill, "decode": run.speed.decode},
        "seconds": {
            "load": loaded,
            "prefill": run.speed.prefill_seconds,
            "decode": run.speed.decode_seconds,
        },
        "page_size": run.settings.page_size,
        "pages_used": run.stats.pages_used,
        "kv_dtype": str(run.kv_dtype).removeprefix("torch."),
        "kv_bytes": run.stats.bytes_used,
        "kv_bytes_allocated": run.stats.bytes,
        "fused": run.fused,
        "backend": _backends(run),
        "plan": {
            phase: "\n".join(found.summary() for found in plans)
            for phase, plans in run.plans.items()
        },
        "verify": None if verdict is None else _verdict_fields(verdict),
    }


def _verdict_fields(verdict: Verdict) -> dict[str, Any]:
    return {
        "against": verdict.against,
        "equal": verdict.equal,
        "differences": [difference._asdict() for difference in verdict.differences],
        "tokens_per_second": {"prefill": verdict.speed.prefill, "decode": verdict.speed.decode},
    }

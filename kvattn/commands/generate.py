"""`kvattn generate`: a language model answers, its KV cache in kvattn's pages."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console

from kvattn.commands import answers, report
from kvattn.commands.terminal import (
    BACKENDS,
    INTERRUPTED,
    TORCH_DTYPES,
    VERIFY_FAILED,
    Dtype,
    KvDtype,
    Report,
    backend_name,
    outcomes,
    print_json,
    progress,
    standard_input,
)
from kvattn.errors.cli_kinds import DeviceUnavailableError
from kvattn.generation import Answer, Run, Settings, Verdict, encode, verify
from kvattn.generation import generate as answer_all
from kvattn.models import DEFAULT, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def _share(value: float) -> float:
    if not 0.0 < value <= 1.0:
        raise typer.BadParameter(f"{value} is not above 0 and at most 1.")
    return value


def _seed(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise typer.BadParameter(f"{value} is not a number of 64 bits.")
    return value


_CHECKING = "checking with PyTorch's own attention"
_SAMPLING, _ATTENTION, _OUTPUT = "Sampling", "Cache and attention", "Output"


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            show_default=False,
            help="What to answer. Without any: one prompt per line of --file, or of stdin.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="DIR|GGUF",
            show_default=False,
            help=f"A saved model or a GGUF file; by default {DEFAULT.name}.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            show_default=False,
            help="Further prompts, one per line; - is stdin.",
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Pass prompts on without the chat template.")
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, metavar="N", help="Length of an answer.")
    ] = 64,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="T",
            rich_help_panel=_SAMPLING,
            help="0 takes the likeliest token; above 0 draws one.",
        ),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            callback=_share,
            metavar="P",
            rich_help_panel=_SAMPLING,
            help="Draw from the likeliest tokens that make up P.",
        ),
    ] = 1.0,
    seed: Annotated[
        int,
        typer.Option(callback=_seed, metavar="N", rich_help_panel=_SAMPLING, help="Of the draws."),
    ] = 0,
    dtype: Annotated[
        Dtype, typer.Option(rich_help_panel=_ATTENTION, help="Weights and arithmetic.")
    ] = Dtype.fp32,
    kv_dtype: Annotated[
        KvDtype,
        typer.Option(
            metavar="DTYPE",
            rich_help_panel=_ATTENTION,
            help=f"Stored keys and values: {', '.join(KvDtype)}.",
        ),
    ] = KvDtype.auto,
    page_size: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_ATTENTION, help="Tokens per page.")
    ] = 16,
    backend: Annotated[
        str | None,
        typer.Option(
            callback=backend_name,
            metavar="NAME",
            show_default=False,
            rich_help_panel=_ATTENTION,
            help=f"The only one to use: {', '.join(BACKENDS)}.",
        ),
    ] = None,
    fuse: Annotated[
        bool | None,
        typer.Option(
            "--fuse/--no-fuse",
            show_default=False,
            rich_help_panel=_ATTENTION,
            help="Rotary and append inside the attention call; by default if the model is known.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            metavar="N",
            show_default=False,
            rich_help_panel=_ATTENTION,
            help="CPU threads; by default PyTorch chooses.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", rich_help_panel=_ATTENTION, help="cpu, cuda, cuda:1, ...")
    ] = "cpu",
    check: Annotated[
        bool,
        typer.Option(
            "--verify",
            rich_help_panel=_OUTPUT,
            help="Run again with PyTorch's own attention, and compare all tokens.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", rich_help_panel=_OUTPUT, help="Print one JSON object and no more."),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", rich_help_panel=_OUTPUT, help="Print the answers and no more."
        ),
    ] = False,
) -> None:
    """Answer prompts with a language model whose KV cache lies in kvattn's pages.

    Several prompts run as one ragged batch. The first run fetches the default model.
    """
    with outcomes(as_json):
        texts = _prompts(prompts or [], file)
        settings = Settings(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            kv_dtype=TORCH_DTYPES.get(kv_dtype.value),
            page_size=page_size,
            backend=backend,
            fuse=fuse,
        )
        if threads is not None:
            torch.set_num_threads(threads)
        target = _device(device)
        started = perf_counter()
        with progress(quiet) as tell:
            net, tokenizer = _load(model, TORCH_DTYPES[dtype.value], target, tell)
        loaded = perf_counter() - started
        encoded = encode(tokenizer, texts, raw)
        console = Console(highlight=False)
        if as_json:
            run = answer_all(net, tokenizer, encoded, settings)
        else:
            with answers.shown(console, texts, plain=quiet) as watch:
                run = answer_all(net, tokenizer, encoded, settings, watch)
        verdict = _verdict(net, tokenizer, run, quiet) if check else None
        if as_json:
            print_json(report.fields(model, texts, run, verdict, loaded))
        elif not quiet:
            for part in report.lines(tokenizer, run, verdict, loaded, check):
                console.print(part)
    if run.interrupted or (check and verdict is None):
        raise typer.Exit(INTERRUPTED)
    if verdict is not None and not verdict.equal:
        raise typer.Exit(VERIFY_FAILED)


def _prompts(given: list[str], file: Path | None) -> list[str]:
    """The arguments, then the lines of the file; of stdin if there is neither."""
    if file is None and given:
        return [_utf8(argument) for argument in given]
    if file is None and _at_terminal():
        raise typer.BadParameter("give a prompt, --file, or lines on stdin.", param_hint="PROMPTS")
    lines = _lines(file or Path("-"))
    if not lines and not given:
        raise typer.BadParameter("no prompt among the lines.", param_hint="PROMPTS")
    return [*map(_utf8, given), *lines]


def _lines(file: Path) -> list[str]:
    """The lines of a file, or of stdin, that are not blank."""
    try:
        data = standard_input() if str(file) == "-" else file.read_bytes()
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(
            f"'{file}' is not readable: {error}", param_hint="--file"
        ) from None
    return [line for line in text.splitlines() if line.strip()]


def _at_terminal() -> bool:
    return sys.stdin.isatty()


def _utf8(argument: str) -> str:
    """The argument as the user typed it, whatever encoding Python took it for."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeDecodeError:
        got = ascii(argument)
        raise typer.BadParameter(f"{got} is not UTF-8 text.", param_hint="PROMPTS") from None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:  # PyTorch has a class of its own for each way to lack a device
        said = str(error).partition("\n")[0]
        raise DeviceUnavailableError("device", f"{name!r}: {said}", "cpu, cuda, cuda:N") from None
    return device


def _load(
    model: str | None, dtype: torch.dtype, device: torch.device, tell: Report
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tell("starting Transformers", 0.0)
    net, tokenizer = load_model(model, dtype, tell)
    from transformers.utils import logging

    logging.set_verbosity_error()
    return net.to(device), tokenizer


def _verdict(
    net: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, run: Run, quiet: bool
) -> Verdict | None:
    """PyTorch's answers beside ours; None where Ctrl-C left nothing to compare."""
    if run.interrupted:
        return None
    with progress(quiet) as tell:

        def watch(answers: list[Answer]) -> None:
            tell(_CHECKING, min(1.0, max(len(answer.ids) for answer in answers) / longest))

        longest = max(len(answer.ids) for answer in run.answers)
        tell(_CHECKING, 0.0)
        try:
            return verify(net, tokenizer, run, watch)
        except KeyboardInterrupt:
            return None

"""Answers on the screen while they grow, progress, sizes in words."""

from __future__ import annotations

from io import StringIO

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("transformers")

from rich.console import Console

from kvattn.commands import answers, terminal
from kvattn.generation import Answer


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

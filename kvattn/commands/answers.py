"""Answers on the screen while they grow: live in a terminal, in prompt order elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from kvattn.generation import Answer

Watch = Callable[[list[Answer]], None]


def shown(console: Console, prompts: Sequence[str], plain: bool) -> AbstractContextManager[Watch]:
    """Shows answers until the context ends; gives what to call after each token.

    Args:
        plain: text in prompt order even in a terminal.
    """
    live = console.is_terminal and not plain
    return _live(console, prompts) if live else _in_order(console, prompts)


@contextmanager
def _in_order(console: Console, prompts: Sequence[str]) -> Iterator[Watch]:
    """Each answer is written as soon as it comes and all before it are complete."""
    turn = written = 0

    def write(text: str) -> None:
        console.file.write(text)
        console.file.flush()

    def begin() -> None:
        if len(prompts) > 1:
            write(f"[{turn + 1}] {_title(prompts[turn])}\n")

    def watch(answers: list[Answer]) -> None:
        nonlocal turn, written
        while turn < len(answers):
            answer = answers[turn]
            text = answer.text.rstrip()  # a line break at the end waits for what follows it
            write(text[written:])
            written = len(text)
            if answer.finish is None:
                return
            turn, written = turn + 1, 0
            write("\n\n" if turn < len(answers) else "\n")
            if turn < len(answers):
                begin()

    begin()
    yield watch


@contextmanager
def _live(console: Console, prompts: Sequence[str]) -> Iterator[Watch]:
    """All answers at once, the end of each; in full when they are complete."""
    streams = _Streams(prompts)
    with Live(streams, console=console, refresh_per_second=12, transient=True):
        yield streams.watch
    for part in streams.whole():
        console.print(part, highlight=False, soft_wrap=False)


class _Streams:
    """Answers under their prompts, cut from the top so that all of them fit on the screen."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = prompts
        self._answers: list[Answer] = [Answer() for _ in prompts]

    def watch(self, answers: list[Answer]) -> None:
        self._answers = answers

    def whole(self) -> Iterator[Rule | Text]:
        """Headings and answers, in full, with a blank line between them."""
        for number, (prompt, answer) in enumerate(zip(self._prompts, self._answers, strict=True)):
            if number:
                yield Text()
            yield self._heading(number, prompt)
            yield Text(answer.text.rstrip())

    def _heading(self, number: int, prompt: str) -> Rule:
        title = Text(style="bold")
        if len(self._prompts) > 1:
            title.append(f"{number + 1} ", "cyan")
        title.append(_title(prompt))
        return Rule(title, align="left", style="dim")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(1, (console.size.height - 1) // len(self._prompts) - 2)
        for number, (prompt, answer) in enumerate(zip(self._prompts, self._answers, strict=True)):
            yield self._heading(number, prompt)
            lines = Text(answer.text).wrap(console, options.max_width)
            yield Text("\n").join(lines[-room:])
            yield Text()


def _title(prompt: str) -> str:
    """The prompt in one line."""
    return " ".join(prompt.split())

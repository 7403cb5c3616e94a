"""The headline table and one picture, written from results into a text between two markers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvattn.bench import outputs, plots, summary
from kvattn.bench.results import Results
from kvattn.bench.suites import HEADLINE
from kvattn.bench.summary import Line, Section, speed
from kvattn.errors.bench_kinds import ReadmeMarkerError

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
_ROWS = 3  # of every suite


def update(results: Results, text: Path, picture: Path) -> None:
    """Rewrites what lies between the markers of `text`, and the picture that it shows.

    Line ends stay as they are in the text.

    Raises:
        ReadmeMarkerError: the text cannot be read, or lacks a marker.
        OutputPathError: the text or the picture cannot be written.
    """
    allowed = f"a text with {BEGIN} and {END}"
    try:
        old = text.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ReadmeMarkerError("--file", f"{text}: {why}", allowed) from None
    before, found, rest = old.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ReadmeMarkerError("--file", str(text), allowed)
    drawn = plots.figures(results)
    shown = drawn.get("latency")
    where = ""
    if shown is not None:
        where = Path(os.path.relpath(picture, text.parent)).as_posix()
    end = "\r\n" if "\r\n" in old else "\n"
    body = end.join([BEGIN, *_lines(results, where), END])
    outputs.check_file("--file", text)
    if shown is not None:
        outputs.write("--picture", picture, plots.drawing(shown, "svg"))
    outputs.write("--file", text, f"{before}{body}{after}".encode())


def _lines(results: Results, picture: str) -> Iterator[str]:
    limits = results.ceilings
    yield "## Speed"
    yield ""
    yield (
        f"{results.machine['card']}, {results.date[:10]}: {summary.verdict(results)} Ratio: the "
        f"best peer's time over kvattn's. Limit: {speed(limits['bandwidth'], 'B/s')} read or "
        f"{speed(limits['matmul'], 'FLOP/s')}, measured in the same run."
    )
    yield ""
    yield "| | | limit | kvattn | best peer | ratio |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for section in summary.sections(results):
        if section.suite.name in HEADLINE:
            for x in _headline(section):
                yield _row(results, section, x)
    if picture:
        yield ""
        yield f"![Time of one decode call by context]({picture})"


def _headline(section: Section) -> list[Line]:
    """The first lines of a suite that have a ratio: suites begin with their heart."""
    return [x for x in section.lines if x.ratio is not None][:_ROWS]


def _row(results: Results, section: Section, x: Line) -> str:
    unit, cell = section.unit, x.cell
    own, peer = (summary.shown(x.rows[n], unit, cell) for n in (results.ours, x.best))
    limit = summary.figure(unit.of(x.limit, cell)) if x.limit else ""
    return (
        f"| {section.suite.title} | {cell['label']}, {unit.name} | {limit} | {own} | "
        f"{peer} ({x.best}) | {x.ratio:.2f} |"
    )

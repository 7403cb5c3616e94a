"""Results as one HTML page that needs nothing else: no network, no scripts. Needs jinja2."""

from __future__ import annotations

import base64
from importlib import import_module
from pathlib import Path
from typing import Any

from kvattn.bench import outputs, plots, summary
from kvattn.bench.results import Results
from kvattn.bench.summary import Line, Section, figure, speed
from kvattn.errors.bench_kinds import ReportPackageError

_CAPTIONS = {
    "ratios": "A peer's time over kvattn's: above 1, in green, kvattn is faster. Grey: not done.",
    "latency": "Time of one decode call by context. Dashed: the bytes at the measured read rate.",
    "roofline": "Rate of every cell by its intensity. Dashed: what the machine itself gave.",
}
_TITLES = {"ratios": "Ratios", "latency": "Latency", "roofline": "Roofline"}


def check(argument: str, folder: Path) -> None:
    """Sees that a page could be written there, before there is work.

    Raises:
        ReportPackageError: jinja2 or matplotlib is not installed.
        OutputPathError: nothing can be written to the directory.
    """
    for package in ("jinja2", "matplotlib"):
        try:
            import_module(package)
        except ImportError as error:
            raise ReportPackageError("report", str(error), package) from None
    outputs.check_folder(argument, folder)


def page(results: Results) -> str:
    """The page.

    Raises:
        ReportPackageError: jinja2 or matplotlib is not installed.
    """
    return _page(results, _drawn(plots.figures(results), "svg"))


def _page(results: Results, svgs: dict[str, bytes]) -> str:
    try:
        import jinja2
    except ImportError as error:
        raise ReportPackageError("report", str(error), "jinja2") from None
    source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(source)
    return template.render(
        results=results,
        verdict=summary.verdict(results),
        tiles=_tiles(results),
        pictures=[_picture(name, svg) for name, svg in svgs.items()],
        sections=[_section(results, section) for section in summary.sections(results)],
    )


def write(results: Results, folder: Path, argument: str = "--report") -> list[Path]:
    """report.html, and every picture as SVG and PNG beside it; all drawn before one is written.

    Raises:
        ReportPackageError: jinja2 or matplotlib is not installed.
        OutputPathError: nothing can be written to the directory, which `argument` named.
    """
    figures = plots.figures(results)
    svgs, pngs = _drawn(figures, "svg"), _drawn(figures, "png")
    files = {"report.html": _page(results, svgs).encode()}
    for name, svg in svgs.items():
        files |= {f"{name}.svg": svg, f"{name}.png": pngs[name]}
    for name, content in files.items():
        outputs.write(argument, folder / name, content)
    return [folder / name for name in files]


def _drawn(figures: dict[str, Any], kind: str) -> dict[str, bytes]:
    return {name: plots.drawing(drawn, kind) for name, drawn in figures.items()}


def _picture(name: str, svg: bytes) -> dict[str, str]:
    """A picture as a data URL, with what it shows in words."""
    return {
        "name": name,
        "title": _TITLES[name],
        "caption": _CAPTIONS[name],
        "url": f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}",
    }


def _tiles(results: Results) -> list[tuple[str, str]]:
    """The run in a few numbers, each with a word."""
    lines = [summary.line(results, cell) for cell in results.cells if cell["kind"] == "device"]
    found = summary.score(lines)
    tiles = []
    if found.cells:
        even = found.cells - found.faster - found.slower
        tiles.append((f"{found.mean:.2f}", "of the best peer's speed, geometric mean"))
        counts = f"{found.faster} / {even} / {found.slower}"
        tiles.append((counts, "cells faster / even / slower than the best peer"))
    tiles.append((speed(results.ceilings["bandwidth"], "B/s"), "read, measured in this run"))
    tiles.append((speed(results.ceilings["matmul"], "FLOP/s"), "matrix product, measured"))
    return tiles


def _section(results: Results, section: Section) -> dict[str, Any]:
    return {
        "name": section.suite.name,
        "title": section.suite.title,
        "about": section.suite.about,
        "unit": section.unit.name,
        "others": _others(results, section),
        "limits": any(x.limit for x in section.lines),
        "rows": [_row(results, section, x) for x in section.lines],
        "refusals": summary.refusals(section),
        "notes": summary.notes(section),
    }


def _row(results: Results, section: Section, x: Line) -> dict[str, Any]:
    ratio = x.ratio
    tone = ""
    if ratio is not None:
        tone = "good" if ratio >= 1.02 else "bad" if ratio <= 1 / 1.02 else "even"
    return {
        "label": x.cell["label"],
        "limit": figure(section.unit.of(x.limit, x.cell)) if x.limit else "",
        "ours": _cell(section, x, results.ours, "ours"),
        "others": [
            _cell(section, x, name, "best" if name == x.best else "")
            for name in _others(results, section)
        ],
        "best": x.best or "\u2013",
        "ratio": "\u2013" if ratio is None else f"{ratio:.2f}",
        "tone": tone,
        "share": "" if x.share is None else f"{x.share:.0%}",
    }


def _others(results: Results, section: Section) -> list[str]:
    return [name for name in section.participants if name != results.ours]


def _cell(section: Section, x: Line, name: str, kind: str) -> dict[str, str]:
    said = summary.shown(x.rows.get(name), section.unit, x.cell)
    return {
        "text": said or "\u2013",
        "kind": "wrong" if said == "wrong" else kind,
        "spread": _spread(section, x, name),
    }


def _spread(section: Section, x: Line, name: str) -> str:
    """The middle nine tenths of the repeats, for whoever points at a figure."""
    row = x.rows.get(name)
    if row is None or row.low is None or row.high is None:
        return ""
    ends = sorted(section.unit.of(s, x.cell) for s in (row.low, row.high))
    said = f"{figure(ends[0])} to {figure(ends[1])}, {row.repeats} repeats of {row.calls}"
    for what, seconds in (("host", row.host), ("planning a step", row.plan)):
        said += f"; {what} {figure(seconds * 1e6)} us" if seconds else ""
    return said

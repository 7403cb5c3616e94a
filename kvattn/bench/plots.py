"""Pictures of results: roofline, latency by context, ratios at a glance. Needs matplotlib.

Figures are as wide as a telephone shows them at full size; vectors, so they scale up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

from kvattn.bench import summary
from kvattn.bench.results import Results
from kvattn.bench.summary import Line
from kvattn.errors.bench_kinds import ReportPackageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS = "#c2185b"
_PEERS = ("#1f6fb4", "#e08214", "#2e8b57", "#7b5ea7", "#8c6d31", "#4d9da8", "#6b6b6b", "#a3562a")
_MARKS = "osD^vPX*"
_WIDTH = 4.4  # inches
_INK, _FAINT = "#222222", "#8a8a8a"
_OWN_LOOK = {"color": _OURS, "marker": "o", "zorder": 5}
_CENTERED: dict[str, Any] = {"ha": "center", "va": "center"}
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvattn",
    "savefig.facecolor": "white",
}


def figures(results: Results) -> dict[str, Figure]:
    """Those that the results have something for: "ratios", "latency", "roofline".

    Raises:
        ReportPackageError: matplotlib is not installed.
    """
    with _style():
        drawn = {
            "ratios": _ratios(results),
            "latency": _latency(results),
            "roofline": _roofline(results),
        }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def drawing(figure: Figure, kind: str) -> bytes:
    """An "svg" or "png" file; the same results give the same bytes."""
    file = BytesIO()
    with _style():
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(file, format=kind, dpi=200, bbox_inches="tight", metadata=metadata)
    return file.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise ReportPackageError("report", str(error), "matplotlib") from None
    with matplotlib.rc_context(_STYLE):
        yield


def _new(height: float, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Figure, list[Axes]]:
    """A figure without a window, and its axes in reading order."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **more)
    return figure, list(axes.flat)


def _look(results: Results) -> dict[str, dict[str, Any]]:
    """Colour and mark of every participant, the same in all pictures."""
    peers = [n for n in results.participants if n != results.ours]
    looks: dict[str, dict[str, Any]] = {
        name: {"color": _PEERS[i % len(_PEERS)], "marker": _MARKS[(i + 1) % len(_MARKS)]}
        for i, name in enumerate(peers)
    }
    return looks | {results.ours: _OWN_LOOK}


def _lines(results: Results) -> list[Line]:
    found = [summary.line(results, cell) for cell in results.cells if cell["kind"] != "startup"]
    return [x for x in found if any(row.status != "refused" for row in x.rows.values())]


# Ratios: suites by peers, and the decode grid against the best of them.


def _ratios(results: Results) -> Figure | None:
    found = summary.sections(results)
    everything = [x for section in found for x in section.lines]
    peers = [
        n
        for n in results.participants
        if n != results.ours and any(_ratio(x, n, results.ours) for x in everything)
    ]
    if not peers:
        return None
    rows = {section.suite.title: _means(section.lines, peers, results.ours) for section in found}
    rows = {title: means for title, means in rows.items() if any(means)}
    batches, contexts, grid = _grid(results)
    heights = [0.24 * len(rows) + 0.6, 0.24 * len(batches) + 0.6]
    panels = 2 if len(batches) * len(contexts) > 1 else 1
    figure, axes = _new(sum(heights[:panels]) + 0.5, panels, height_ratios=heights[:panels])
    _heat(axes[0], list(rows), peers, list(rows.values()))
    axes[0].set_title("geometric mean of each suite, by peer", loc="left", pad=8)
    if panels == 2:
        labels = [_short_count(n) for n in contexts]
        _heat(axes[1], [f"batch {b}" for b in batches], labels, grid)
        axes[1].set_title("decode, against the best peer, by context", loc="left", pad=8)
    return figure


def _ratio(x: Line, name: str, ours: str) -> float | None:
    """The peer's time over kvattn's, where both are right."""
    pair = [x.rows.get(n) for n in (name, ours)]
    seconds = [r.seconds for r in pair if r is not None and r.status == "ok" and r.seconds]
    return seconds[0] / seconds[1] if len(seconds) == 2 else None


def _means(lines: list[Line], peers: list[str], ours: str) -> list[float | None]:
    means: list[float | None] = []
    for name in peers:
        ratios = [r for x in lines if (r := _ratio(x, name, ours))]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
        means.append(mean)
    return means


def _grid(results: Results) -> tuple[list[int], list[int], list[list[float | None]]]:
    """Ratios to the best peer of the decode suite's main layer, by batch and context."""
    lines = {(x.cell["batch"], x.cell["context"]): x.ratio for x in _main_decode(results)}
    batches, contexts = (sorted({key[i] for key in lines}) for i in (0, 1))
    return batches, contexts, [[lines.get((b, c)) for c in contexts] for b in batches]


def _main_decode(results: Results) -> list[Line]:
    """Decode cells of the layer and page size that most of them have."""
    lines = [x for x in _lines(results) if x.cell["suite"] == "decode" and x.cell["uniform"]]
    kinds = Counter((x.cell["model"], x.cell["page"]) for x in lines)
    main = kinds.most_common(1)[0][0] if kinds else None
    return [x for x in lines if (x.cell["model"], x.cell["page"]) == main]


def _heat(
    axes: Axes, rows: list[str], columns: list[str], values: list[list[float | None]]
) -> None:
    """A square for every value, red below 1, green above it, grey where there is none."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("ratio", ["#b2182b", "#fbf7f2", "#1a7f5a"])
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            shade = 0.5 if value is None else 0.5 + max(-1.0, min(1.0, math.log2(value))) / 2
            axes.add_patch(_square(x, y, "#efefef" if value is None else colors(shade)))
            ink = "white" if abs(shade - 0.5) > 0.33 else _INK
            axes.text(x, y, "" if value is None else f"{value:.2f}", color=ink, **_CENTERED)
    axes.set_yticks(range(len(rows)), rows)
    tilted = sum(map(len, columns)) > 36
    turn: dict[str, Any] = (
        {"rotation": 30, "ha": "left", "rotation_mode": "anchor"} if tilted else {}
    )
    axes.set_xticks(range(len(columns)), columns, **turn)
    axes.xaxis.tick_top()
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _square(x: int, y: int, face: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="white", linewidth=1)


# Latency by context, a panel for every batch.


def _latency(results: Results) -> Figure | None:
    lines = _main_decode(results)
    if not lines:
        return None
    batches = sorted({x.cell["batch"] for x in lines})
    columns = min(2, len(batches))
    rows = -(-len(batches) // columns)
    figure, axes = _new(0.9 + 1.75 * rows, rows, columns)
    looks = _look(results)
    for panel, batch in zip(axes, batches, strict=False):
        _panel(panel, [x for x in lines if x.cell["batch"] == batch], looks, f"batch {batch}")
    for spare in axes[len(batches) :]:
        spare.set_visible(False)
    for panel in axes[::columns]:
        panel.set_ylabel("us a call")
    for panel in axes[max(0, len(batches) - columns) : len(batches)]:
        panel.set_xlabel("context")
    names = [n for n in results.participants if _measured(lines, n)]
    _legend(figure, {n: looks[n] for n in names})
    cell = lines[0].cell
    figure.suptitle(f"decode, {cell['model']}, pages of {cell['page']}", fontsize=9)
    return figure


def _measured(lines: list[Line], name: str) -> bool:
    return any(name in x.rows and x.rows[name].status == "ok" for x in lines)


def _panel(axes: Axes, lines: list[Line], looks: dict[str, dict[str, Any]], title: str) -> None:
    lines = sorted(lines, key=lambda x: x.cell["context"])
    contexts = [x.cell["context"] for x in lines]
    limits = [(x.limit or math.nan) * 1e6 for x in lines]
    axes.plot(contexts, limits, color=_FAINT, linestyle="--", linewidth=1, marker="_")
    for name, look in looks.items():
        points = [
            (x.cell["context"], row.seconds * 1e6)
            for x in lines
            if (row := x.rows.get(name)) is not None and row.status == "ok" and row.seconds
        ]
        if points:
            width = 1.8 if look["color"] == _OURS else 1.0
            axes.plot(*zip(*points, strict=True), markersize=3.5, linewidth=width, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [_short_count(n) for n in contexts])
    axes.minorticks_off()
    axes.margins(x=0.15, y=0.12)
    axes.set_title(title, loc="left")
    _plain_ticks(axes)


def _plain_ticks(axes: Axes) -> None:
    """Ticks at 1, 2 and 5, in plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))


def _short_count(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 else str(n)


# Roofline: every cell, kvattn and the best peer.


def _roofline(results: Results) -> Figure | None:
    lines = [x for x in _lines(results) if x.limit is not None and x.cell["flops"]]
    if not lines:
        return None
    figure, (axes,) = _new(3.2)
    bandwidth, matmul = results.ceilings["bandwidth"], results.ceilings["matmul"]
    ridge = matmul / bandwidth
    low = min(map(_intensity, lines)) / 2
    high = max(ridge, *map(_intensity, lines)) * 2
    scale, unit = (1e12, "TFLOP/s") if matmul >= 1e12 else (1e9, "GFLOP/s")
    roof = ([low, ridge, high], [low * bandwidth / scale, matmul / scale, matmul / scale])
    axes.plot(*roof, color=_FAINT, linestyle="--", linewidth=1)
    peer = {"color": _PEERS[0], "marker": "D"}
    looks: dict[str, dict[str, Any]] = {"best peer": peer, results.ours: _OWN_LOOK}
    for name, look in looks.items():
        points = [
            (_intensity(x), x.cell["flops"] / row.seconds / scale)
            for x in lines
            if (row := x.rows.get(x.best if name == "best peer" else name)) is not None
            and row.status == "ok"
            and row.seconds
        ]
        if points:
            across, up = zip(*points, strict=True)
            axes.scatter(across, up, s=13, alpha=0.75, linewidth=0, **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte")
    axes.set_ylabel(unit)
    _legend(figure, looks)
    return figure


def _intensity(x: Line) -> float:
    """Operations a byte."""
    return float(x.cell["flops"] / x.cell["bytes"])


def _legend(figure: Figure, looks: dict[str, dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], label=n, linewidth=1.2, markersize=4, **_flat(look))
        for n, look in looks.items()
    ]
    marks.append(Line2D([], [], label="limit", linewidth=1, linestyle="--", color=_FAINT))
    figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=8, handlelength=1.6)


def _flat(look: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in look.items() if name != "zorder"}

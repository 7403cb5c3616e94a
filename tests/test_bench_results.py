"""Results: their file, what is said of them, the page, the comparison, the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from bench_results import made, row

from kvattn.bench import summary
from kvattn.bench.compare import compare, spreads
from kvattn.bench.results import Results, Row, load, merged
from kvattn.bench.suites import SUITES
from kvattn.errors.bench_kinds import ReadmeMarkerError, ReportPackageError, ResultsFileError

_PICTURES = ("ratios", "latency", "roofline")


def with_row(results: Results, new: Row) -> Results:
    """The results with one row in place of another."""
    kept = [r for r in results.rows if (r.cell, r.participant) != (new.cell, new.participant)]
    return replace(results, rows=[*kept, new])


FIRST = SUITES["decode"].cells("quick")[0].name


# The file.


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    results = made()
    results.save(tmp_path / "below" / "results.json")
    assert load(tmp_path / "below" / "results.json") == results
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["results.json"]


def spoilt(change: Callable[[dict[str, Any]], object]) -> str:
    fields = made().to_dict()
    change(fields)
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("no json", "Expecting value"),
        ("[1]", "schema None"),
        (spoilt(lambda fields: fields.update(schema=2)), "schema 2"),
        (spoilt(lambda fields: fields.pop("cells")), "other fields: cells"),
        (spoilt(lambda fields: fields["rows"][0].update(odd=1)), "odd"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text)
    with pytest.raises(ResultsFileError, match=said):
        load(tmp_path / "file")


def test_runs_of_one_machine_become_one() -> None:
    """The later run counts; what only the earlier one has stays, and is marked."""
    early, late = made("2026-01-01", extra=9.0), made("2026-01-02", kvattn=1.0)
    late.cells, late.rows = late.cells[1:], [r for r in late.rows if r.cell != FIRST]
    whole = merged([late, early])
    assert {cell["name"] for cell in whole.cells} == {cell["name"] for cell in early.cells}
    assert [cell["suite"] for cell in whole.cells] == [cell["suite"] for cell in early.cells]
    second = late.cells[0]["name"]
    assert whole.of(second)["kvattn"] == late.of(second)["kvattn"]
    assert whole.of(second)["extra"].note == "from an earlier run"
    assert whole.of(FIRST) == early.of(FIRST)
    assert "extra" in whole.participants
    assert len(whole.rows) == len(early.rows)
    with pytest.raises(ResultsFileError, match="one machine"):
        merged([early, replace(late, machine={"card": "another"})])


# What is said of them.


def test_the_best_peer_is_the_fastest_that_is_right() -> None:
    line = summary.line(made(), made().cells[0])
    assert line.best == "fast"
    assert line.ratio == pytest.approx(1.2 / 1.5)
    assert line.share == pytest.approx(1 / 1.5)
    wrong = with_row(made(), Row(FIRST, "fast", "wrong", error=1.0, allowed=0.1))
    assert summary.line(wrong, wrong.cells[0]).best == "slow"
    ours = with_row(made(), Row(FIRST, "kvattn", "refused", note="no"))
    assert summary.line(ours, ours.cells[0]).ratio is None


def test_the_score_counts_and_averages() -> None:
    results = made(kvattn=1.2)
    results.cells = results.cells[:3]
    names = [cell["name"] for cell in results.cells]
    limit = [results.limit(cell) for cell in results.cells]
    results = with_row(results, row(names[0], "kvattn", 0.6 * limit[0]))
    results = with_row(results, row(names[1], "kvattn", 2.4 * limit[1]))
    found = summary.score(summary.line(results, cell) for cell in results.cells)
    assert (found.cells, found.faster, found.slower) == (3, 1, 1)
    assert found.mean == pytest.approx(1.0)
    assert found.low is not None and found.high is not None
    assert (found.low.cell["name"], found.high.cell["name"]) == (names[1], names[0])
    assert "faster in 1, even in 1, slower in 1" in summary.verdict(results)


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.123, "0.12"), (8.5, "8.50"), (12.34, "12.3"), (1234.5, "1,234"), (None, "")],
)
def test_figures_have_three_digits(value: float | None, said: str) -> None:
    assert summary.figure(value) == said


def test_reasons_are_said_once_with_their_cells() -> None:
    results = made()
    decode = [cell["name"] for cell in results.cells if cell["suite"] == "decode"]
    for name in decode:
        results = with_row(results, Row(name, "slow", "refused", note="never"))
    results = with_row(results, Row(FIRST, "fast", "wrong", error=0.5, allowed=0.01))
    section = summary.sections(results)[0]
    label = results.cells[0]["label"]
    assert sorted(summary.refusals(section)) == [
        f"fast: wrong, off by 0.5 where 0.01 is allowed ({label})",
        "slow: never",
    ]
    assert "slow" not in section.participants
    planned = replace(results.of(FIRST)["kvattn"], plan=60e-6, note="one launch")
    section = summary.sections(with_row(results, planned))[0]
    said = "kvattn: one launch / planning a step: 60.0 us of the host"
    assert summary.notes(section) == [said]
    assert summary.shown(section.lines[0].rows["fast"], section.unit, results.cells[0]) == "wrong"


# The comparison.


def changed(before: Results, **factors: float) -> Results:
    """The same results with participants' times multiplied."""

    def scaled(r: Row) -> Row:
        by = factors.get(r.participant, 1.0)
        assert r.seconds and r.low and r.high
        return replace(r, seconds=by * r.seconds, low=by * r.low, high=by * r.high)

    return replace(before, rows=[*map(scaled, before.rows)])


def verdicts(before: Results, after: Results, **more: Any) -> set[str]:
    return {change.verdict for change in compare(before, after, **more).changes}


def test_equal_runs_are_the_same() -> None:
    found = compare(made(), made())
    assert {change.verdict for change in found.changes} == {"same"}
    assert not found.worse
    assert found.drift == 1.0
    assert found.only == []


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.03, "same"), (1.2, "slower"), (0.8, "faster"), (0.97, "same")]
)
def test_changes_beyond_the_tolerance_count(factor: float, verdict: str) -> None:
    found = compare(made(), changed(made(), kvattn=factor))
    assert {change.verdict for change in found.changes} == {verdict}
    assert found.worse == (verdict == "slower")


def test_what_the_machine_did_is_taken_out() -> None:
    """All are 20 % slower: no change. The peers alone are: kvattn became faster."""
    everybody = changed(made(), kvattn=1.2, fast=1.2, slow=1.2)
    assert compare(made(), everybody).drift == pytest.approx(1.2)
    assert verdicts(made(), everybody) == {"same"}
    assert verdicts(made(), changed(made(), fast=1.2, slow=1.2)) == {"faster"}
    other = replace(everybody, participants={**made().participants, "fast": {"version": "2"}})
    other.participants["slow"] = {"version": "2"}
    assert compare(made(), other).drift == 1.0  # other versions are no control


def test_noise_is_no_change() -> None:
    rows = [replace(r, low=0.2 * (r.seconds or 0), high=5 * (r.seconds or 0)) for r in made().rows]
    assert verdicts(made(), changed(replace(made(), rows=rows), kvattn=1.2)) == {"same"}
    few = [replace(r, repeats=1) for r in made().rows]
    assert verdicts(made(), changed(replace(made(), rows=few), kvattn=1.2)) == {"slower"}


def test_what_no_longer_is_right_is_broken() -> None:
    broken = with_row(made(), Row(FIRST, "kvattn", "wrong", error=1.0, allowed=0.1))
    assert compare(made(), broken).worse
    assert verdicts(made(), broken) == {"same", "broken"}
    assert verdicts(broken, made()) == {"same", "mended"}
    assert not compare(broken, broken).worse


def test_cells_of_one_run_are_named() -> None:
    less = made()
    less.cells = less.cells[1:]
    found = compare(made(), less)
    assert found.only == [FIRST]
    assert len(found.changes) == len(less.cells)


def test_repeated_runs_have_a_spread() -> None:
    found = spreads([made(), made(fast=1.26), made(kvattn=1.6)])
    assert len(found) == len(made().cells)
    first = found[0]
    assert first.ratios == pytest.approx((1.2 / 1.5, 1.26 / 1.5, 1.2 / 1.6))
    assert first.spread == pytest.approx(1.26 / 1.5 / (1.2 / 1.6) - 1)
    broken = with_row(made(), Row(FIRST, "kvattn", "refused", note="no"))
    assert FIRST not in {s.cell for s in spreads([made(), broken])}


# The page and the table.


@pytest.fixture(scope="module")
def page() -> str:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from kvattn.bench.page import page

    results = with_row(made(), Row(FIRST, "slow", "wrong", error=0.5, allowed=0.01))
    return page(with_row(results, replace(results.rows[5], status="refused", note="<none> & co")))


def test_the_page_is_valid_and_needs_nothing_else(page: str) -> None:
    html5lib = pytest.importorskip("html5lib")
    tree = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)
    ids = [e.get("id") for e in tree.iter() if e.get("id")]
    assert sorted(set(ids)) == sorted(ids)
    links = [e.get(name) for e in tree.iter() for name in ("href", "src") if e.get(name)]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    assert not re.search(r"<script|@import|url\(", page)
    assert all(e.get("alt") for e in tree.iter("img"))
    headings = [e.text for e in tree.iter("h2")]
    assert {"Ratios", "Latency", "Roofline", "Decode", "Start-up"} <= set(headings)


def test_the_page_says_what_was_found(page: str) -> None:
    assert "A &lt;Card&gt;" in page
    assert "&lt;none&gt; &amp; co" in page
    assert ">wrong</td>" in page
    assert page.count("data:image/svg+xml;base64,") == 3
    assert "gone: No module named" in page
    assert "big: 1 x 1" in page
    assert "Against the best peer of each of" in page


def test_pictures_are_files_too_and_always_the_same(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from kvattn.bench.page import write
    from kvattn.bench.plots import drawing, figures

    names = [path.name for path in write(made(), tmp_path)]
    pictures = {f"{name}.{kind}" for name in _PICTURES for kind in ("svg", "png")}
    assert {*names} == {"report.html", *pictures}
    for name, figure in figures(made()).items():
        assert (tmp_path / f"{name}.svg").read_bytes() == drawing(figure, "svg")
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_a_page_can_be_made_of_little() -> None:
    pytest.importorskip("matplotlib")
    from kvattn.bench.plots import figures

    alone = made()
    alone.rows = [r for r in alone.rows if r.participant == "kvattn"]
    assert set(figures(alone)) == {"latency", "roofline"}
    assert figures(replace(alone, cells=[], rows=[])) == {}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    from kvattn.bench.plots import figures

    with pytest.raises(ReportPackageError, match=r"kvattn\[bench\]"):
        figures(made())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal(width: int) -> None:
    rich = pytest.importorskip("rich.console")
    from kvattn.bench.report import report

    console = rich.Console(width=width, record=True, file=StringIO())
    console.print(report(made()))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "A <Card>" in text
    assert "0.80" in text  # the ratio of every cell


def test_the_readme_takes_a_table_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    from kvattn.bench.readme import BEGIN, END, update

    text, picture = tmp_path / "README.md", tmp_path / "docs" / "bench.svg"
    text.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    for _ in range(2):  # it can be done again
        update(made(), text, picture)
        found = text.read_text()
        assert found.startswith(f"before\n\n{BEGIN}\n")
        assert found.endswith(f"\n{END}\n\nafter\n")
        assert "old" not in found
        assert "](docs/bench.svg)" in found
        assert "| Decode | 1 x 1k, us | " in found
        assert "(fast) | 0.80 |" in found
    assert picture.read_text().startswith("<?xml")
    text.write_text("nothing here")
    with pytest.raises(ReadmeMarkerError, match="bench:begin"):
        update(made(), text, picture)
    assert text.read_text() == "nothing here"


# The command.


@pytest.fixture
def bench(invoke: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `kvattn bench` in this process."""
    pytest.importorskip("matplotlib")
    return partial(invoke, "bench")


def test_bench_runs_without_a_command(
    bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[Any] = []
    monkeypatch.setattr("kvattn.bench.page.write", lambda *what: pages.append(what))
    out, page = tmp_path / "results.json", tmp_path / "page"
    arguments = ("-s", "decode", "--quick", "--device", "cpu", "--repeats", 2)
    result = bench(*arguments, "--out", out, "--report", page)
    assert result.exit_code == 0, result.output
    assert "Decode" in result.stdout
    assert "best peer" in result.stdout
    assert "decode: 1 x 256" in result.stderr  # progress, line by line
    found = load(out)
    assert len(found.cells) == 3
    assert pages == [(found, page)]
    result = bench("run", *arguments, "--peers", "", "--json")
    assert result.exit_code == 0
    assert list(json.loads(result.stdout)["participants"]) == ["kvattn"]
    assert result.stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--suite", "nothing"),
        ("--peers", "fa3,nobody"),
        ("--backend", "none"),
        ("--device", "abacus"),
        ("--repeats", "1"),
        ("compare", "one.json"),
        ("compare", "a.json", "b.json", "--base", "main"),
        ("report",),
    ],
)
def test_a_wrong_command_line_ends_with_2(
    bench: Callable[..., Any], arguments: tuple[str, ...]
) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_missing_device_and_a_missing_file_end_with_4(bench: Callable[..., Any]) -> None:
    result = bench("--device", "cuda:99", "-s", "big")
    assert result.exit_code == 4
    assert "KV504" in result.stderr
    result = bench("report", "nowhere.json", "--json")
    assert result.exit_code == 4
    assert json.loads(result.stdout)["error"]["code"] == ResultsFileError.code


def test_report_compare_and_readme(bench: Callable[..., Any], tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    results = made(suites=("decode", "step"))
    results.save(before)
    changed(results, kvattn=1.2).save(after)
    result = bench("report", before)
    assert result.exit_code == 0
    assert "Fused step" in result.stdout
    result = bench("report", before, "--out", tmp_path / "page")
    assert str(tmp_path / "page" / "report.html") in result.stdout.splitlines()
    assert bench("compare", before, before).exit_code == 0
    assert bench("compare", before, after, "--tolerance", 30).exit_code == 0
    result = bench("compare", before, after)
    assert result.exit_code == 1
    assert "slower" in result.stdout
    result = bench("compare", before, after, "--json")
    assert json.loads(result.stdout)["worse"] is True
    result = bench("spread", before, after)
    assert "spread of the ratio: 20.0% in the median, 20.0% at most" in result.stdout
    assert bench("spread", before).exit_code == 2
    text = tmp_path / "README.md"
    text.write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    picture = tmp_path / "docs" / "bench.svg"
    result = bench("readme", before, "--file", text, "--picture", picture)
    assert result.exit_code == 0
    assert "## Speed" in text.read_text()


def test_the_list_names_suites_and_peers(bench: Callable[..., Any]) -> None:
    found = json.loads(bench("list", "--json").stdout)
    assert list(found["suites"]) == list(SUITES)
    assert "version" in found["peers"]["sdpa"]
    assert "FlashAttention-3" in bench("list").stdout

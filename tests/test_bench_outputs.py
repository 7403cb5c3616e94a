"""What `kvattn bench` writes: whole or not at all, and refused before anything is measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_results import made

from kvattn.bench import outputs, readme, run
from kvattn.bench.results import load
from kvattn.errors.bench_kinds import OutputPathError, ReadmeMarkerError

MARKED = "before\n<!-- bench:begin -->\n<!-- bench:end -->\nafter\n"


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(run._Run, "all", measure)


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize("option", ["--out", "--report"])
def test_a_wrong_place_is_told_before_the_run(
    invoke: Callable[..., Any], tmp_path: Path, option: str
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    wrong = {
        "--out": [tmp_path, tmp_path / "pipe", tmp_path / "file" / "a"],
        "--report": [tmp_path / "file"],
    }
    for place in wrong[option]:
        result = invoke("bench", "-s", "decode", "--device", "cpu", option, place)
        assert result.exit_code == 4, result.output
        assert f"KV805 {OutputPathError.problem}" in result.stderr
        assert option in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"file", "pipe"}
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.usefixtures("no_measuring")
def test_a_missing_package_is_told_before_the_run(
    invoke: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("bench", "-s", "decode", "--device", "cpu", "--report", tmp_path / "page")
    assert result.exit_code == 4
    assert "KV802" in result.stderr
    assert not (tmp_path / "page").exists()


def test_report_and_readme_say_what_cannot_be_written(
    invoke: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    file, text = tmp_path / "results.json", tmp_path / "README.md"
    made().save(file)
    text.write_text(MARKED)
    cases: list[tuple[list[Any], str]] = [
        (["report", file, "--out", file], "KV805"),
        (["readme", file, "--file", text, "--picture", file / "a.svg"], "KV805"),
        (["readme", file, "--file", tmp_path / "none.md"], "KV804"),
        (["readme", file, "--file", tmp_path], "KV804"),
    ]
    for arguments, code in cases:
        result = invoke("bench", *arguments)
        assert result.exit_code == 4, (arguments, result.output)
        assert code in result.stderr
    assert text.read_text() == MARKED
    assert load(file) == made()


def test_an_interrupt_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.json"
    file.write_text("earlier")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        outputs.write("--out", file, b"half")
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert file.read_text() == "earlier"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_results_are_read_in_the_encoding_of_the_shell(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "results.json"
    made().save(file)
    file.write_bytes(file.read_text().replace("\n", "\r\n").encode(encoding))
    assert load(file) == made()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_table_keeps_the_line_ends_of_its_text(tmp_path: Path, end: str) -> None:
    pytest.importorskip("matplotlib")
    text = tmp_path / "docs" / "README.md"
    text.parent.mkdir()
    text.write_bytes(MARKED.replace("\n", end).encode())
    readme.update(made(), text, tmp_path / "bench.svg")  # beside the text's folder
    found = text.read_bytes().decode()
    assert found.count("\n") == found.count(end) > 20
    assert found.startswith(f"before{end}") and found.endswith(f"{end}after{end}")
    assert "](../bench.svg)" in found
    assert [path.name for path in text.parent.iterdir()] == ["README.md"]


def test_a_text_that_is_no_text(tmp_path: Path) -> None:
    text = tmp_path / "README.md"
    text.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReadmeMarkerError, match=r"README\.md"):
        readme.update(made(), text, tmp_path / "bench.svg")

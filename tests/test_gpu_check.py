"""What `make gpu-check` makes of suites that pass, fail, crash, and do not end."""

from __future__ import annotations

import sys
from pathlib import Path

import gpu_check
import pytest

TESTS = Path(__file__).parent
LINES = "".join(
    f"{line} \n"
    for line in (
        "tests/test_a.py::test_one[a - b]",
        "[gw0] [ 25%] PASSED tests/test_a.py::test_one[a - b]",
        "[gw1] [ 50%] SKIPPED tests/test_a.py::test_two",
    )
)
FAILS = "[gw1] [ 75%] FAILED tests/test_a.py::test_three[x FAILED y] \nFAILED tests/test_a.py - x"


def part(out: Path, name: str, text: str, then: str = "") -> gpu_check.Part:
    program = f"import sys, time; print({text!r}, flush=True); {then}"
    return gpu_check.Part(name, [sys.executable, "-c", program], {}, out / name)


def check(parts: list[gpu_check.Part], seconds: float = 600) -> int:
    for each in parts:
        each.begin()
    gpu_check.wait(parts, seconds)
    return gpu_check.report(parts)


def test_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check([part(tmp_path, "triton", LINES), part(tmp_path, "memcheck", "")]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[:5] for line in printed.splitlines()[1:]] == [
        ["triton", "ok", "1", "0", "1"],
        ["memcheck", "ok", "0", "0", "0"],
    ]


def test_failures_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check([part(tmp_path, "triton", LINES + FAILS, "sys.exit(1)")]) == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "triton: FAILED tests/test_a.py::test_three[x FAILED y]"
    assert last.split()[:5] == ["triton", "failed", "1", "1", "1"]


def test_the_end_of_a_crash_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check([part(tmp_path, "memcheck", "ERROR SUMMARY: 3 errors", "sys.exit(9)")]) == 1
    assert capsys.readouterr().out.startswith("ERROR SUMMARY: 3 errors")


@pytest.mark.parametrize(("text", "status"), [(LINES, 3), (LINES + FAILS, 1)])
def test_time_is_up(tmp_path: Path, text: str, status: int) -> None:
    hanging = part(tmp_path, "hopper", text, "time.sleep(3600)")
    hanging.begin()
    while not hanging.log.read_text().endswith(text + "\n"):
        assert not hanging.ended()
    gpu_check.wait([hanging], 0)
    assert gpu_check.report([hanging]) == status
    assert hanging.verdict() == "cut off"
    assert hanging.progress() == ("hopper 75 %" if FAILS in text else "hopper 50 %")
    assert hanging.names("PASSED") == ["tests/test_a.py::test_one[a - b]"]


def test_suites_name_tests_that_are_there(tmp_path: Path) -> None:
    for backend, names in gpu_check.SUITES.items():
        for name in names:
            assert list(TESTS.glob(name)), name
        command = gpu_check.suite(backend, 2, tmp_path, ["-k", "prefix"]).command
        assert "tests/test_gpu.py" in command
        assert command[-2:] == ["-k", "prefix"]


def test_unknown_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(["--parts", "triton,memory"])
    assert stopped.value.code == 2
    assert "no part memory: hopper, triton, memcheck, racecheck" in capsys.readouterr().err

"""The benchmark's run: its cells, its inputs, its checks, every suite once on the CPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvattn
from kvattn.bench import __main__ as plain
from kvattn.bench import compare as comparing
from kvattn.bench import run
from kvattn.bench.check import Truth
from kvattn.bench.data import Data, layers_for
from kvattn.bench.peers import Call, Participant, RefusalError, ours, participants
from kvattn.bench.results import Results, load
from kvattn.bench.shapes import MODELS, Work, small
from kvattn.bench.suites import GRIDS, HEADLINE, SUITES
from kvattn.bench.workers import Task, Worker, start_time, warm
from kvattn.errors.bench_kinds import RevisionError
from kvattn.testing import check_case

CPU = torch.device("cpu")
CELLS = [work for suite in SUITES.values() for work in suite.cells("small")]


# Cells.


@pytest.mark.parametrize("grid", GRIDS)
def test_cells_have_names_of_their_own(grid: str) -> None:
    cells = [work for suite in SUITES.values() for work in suite.cells(grid)]
    names = [work.name for work in cells]
    assert sorted(set(names)) == sorted(names)
    assert all(work.suite == name for name, s in SUITES.items() for work in s.cells(grid))
    assert set(HEADLINE) <= set(SUITES)


def test_quick_cells_are_the_heart_of_the_full_ones() -> None:
    for suite in SUITES.values():
        full = {work.name for work in suite.cells("full")}
        assert {work.name for work in suite.cells("quick")} <= full


def test_the_small_grid_asks_everything_that_the_full_one_asks() -> None:
    traits: list[Callable[[Work], Any]] = [
        lambda work: work.kv_dtype == "fp8",
        lambda work: work.append,
        lambda work: work.tree,
        lambda work: work.ragged,
        lambda work: work.prefix > 0,
        lambda work: not work.announced,
        lambda work: work.invariant,
        lambda work: work.model.latent,
        lambda work: work.window and work.model.sinks,
        lambda work: work.window and work.model.dim == 256,
        lambda work: not work.uniform,
        lambda work: not work.causal and not work.tree,
        lambda work: work.kind == "host",
        lambda work: work.kind == "startup",
    ]
    for trait in traits:
        full = [work for suite in SUITES.values() for work in suite.cells("full") if trait(work)]
        assert full
        assert any(map(trait, CELLS))


def test_bytes_and_operations_are_counted() -> None:
    eight = Work("s", "l", MODELS["llama3-8b"], (1,) * 8, (8192,) * 8)
    assert eight.token_bytes == 8 * (128 + 128) * 2
    assert eight.bytes == 8 * 8192 * 4096 + 8 * 32 * (128 + 128) * 2
    assert eight.flops == 2 * 8 * 8192 * 32 * (128 + 128)
    square = replace(eight, queries=(4,), keys=(4,))
    assert square.pairs == 1 + 2 + 3 + 4
    assert replace(square, keys=(6,)).pairs == 3 + 4 + 5 + 6
    assert replace(square, causal=False).pairs == 16
    shared = replace(eight, prefix=8000)
    assert shared.tokens == 8000 + 8 * 192
    windowed = replace(eight, model=MODELS["gpt-oss"], window=True)
    assert windowed.tokens == 8 * 128
    assert windowed.pairs == 8 * 128
    latent = replace(eight, model=MODELS["mla-16"])
    assert latent.token_bytes == 576 * 2  # one buffer of 512 + 64 channels, key and value at once


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_shapes_feed_the_contract(name: str) -> None:
    """A short step of every named layer, held to what the contract says."""
    model = MODELS[name]
    work = Work("shape", name, model, (2, 2), (5, 19), page=4, append=True, window=True)
    work = small(replace(work, model=replace(model, window=model.window and 3)))
    check_case(work.case(), backend="reference")


# Inputs.


@pytest.mark.parametrize("work", CELLS, ids=lambda work: work.name)
def test_layouts_hold_the_same_keys(work: Work) -> None:
    data = Data(work, CPU, layers=2)
    stored = data.new_wanted() if work.append else ()
    for layer in range(2):
        for b, (start, keys) in enumerate(zip(data.k_borders.tolist(), work.keys, strict=False)):
            at = torch.arange(keys - work.new)
            for kind in range(2):
                truth = data.packed[kind][layer, start : start + keys - work.new].float()
                assert torch.equal(data.dense[kind][layer, b, at].float(), truth)
                if work.page:
                    pages = data.page_table[b, at // work.page].long()
                    paged = data.pages[kind][layer][pages, at % work.page]
                    assert torch.equal(paged.float(), truth)
    assert all(x.shape[0] == work.batch * work.new for x in stored)
    assert not torch.equal(data.packed[0][0].float(), data.packed[0][1].float())


def test_pages_are_shuffled_and_a_prefix_is_stored_once() -> None:
    work = next(work for work in CELLS if work.prefix)
    data = Data(work, CPU, layers=1)
    shared = work.prefix // work.page
    assert (data.page_table[:, :shared] == data.page_table[0, :shared]).all()
    own = data.page_table[:, shared:].flatten().tolist()
    assert len(set(own)) == len(own)
    used = {*data.page_table[0, :shared].tolist(), *own}
    assert used == set(range(len(data.pages[0][0])))
    assert data.page_table.flatten().tolist() != sorted(data.page_table.flatten().tolist())


def test_layers_outlast_the_cache_within_the_room() -> None:
    work = Work("s", "l", MODELS["llama3-8b"], (1,), (1024,))
    layer = 1024 * 4096
    assert layers_for(work, cold=0, limit=1 << 40) == 20
    assert layers_for(work, cold=99 * layer, limit=1 << 40) == 100
    assert layers_for(work, cold=99 * layer, limit=30 * layer) == 10
    assert layers_for(work, cold=99 * layer, limit=1) == 1


# Checks.


STEP = next(work for work in CELLS if work.suite == "step")


def judged(work: Work, spoil: Callable[[Data, Tensor], Tensor]) -> Any:
    """The verdict on kvattn's output after somebody has spoilt it."""
    data = Data(work, CPU, layers=1)
    call = ours.participant("reference").prepare(data)
    return Truth(data).judge(replace(call, run=lambda layer: spoil(data, call.run(layer))))


def changed(out: Tensor, by: float) -> Tensor:
    out = out.clone()
    out.flatten()[-1] += by
    return out


@pytest.mark.parametrize(
    ("spoil", "right", "problem"),
    [
        (lambda data, out: out, True, ""),
        (lambda data, out: changed(out, 1e-3), False, ""),
        (lambda data, out: changed(out, float("nan")), False, "not finite"),
        (lambda data, out: out[..., :-1], False, "shape"),
        (lambda data, out: (data.forget_new("pages"), out)[1], False, "not in the cache"),
    ],
)
def test_a_wrong_output_is_found(spoil: Any, right: bool, problem: str) -> None:
    verdict = judged(STEP, spoil)
    assert verdict.right == right
    assert problem in verdict.problem


def test_a_call_without_its_append_is_found() -> None:
    """What another participant has appended before does not help."""
    data = Data(STEP, CPU, layers=1)
    truth = Truth(data)
    call = ours.participant("reference").prepare(data)
    assert truth.judge(call).right
    lazy = ours.participant("reference").prepare(data)
    out = lazy.run(0).clone()
    assert not truth.judge(replace(lazy, run=lambda layer: out)).right


def test_big_cells_are_checked_in_parts() -> None:
    work = small(Work("s", "l", MODELS["smollm2-135m"], (400,) * 40, (500,) * 40, page=0))
    data = Data(work, CPU, layers=1)
    truth = Truth(data)
    rows = {row for block in truth.blocks for row in range(block.rows.start, block.rows.stop)}
    assert {0, 399, 400 * 39, 400 * 40 - 1} <= rows
    assert truth.share == pytest.approx(32 * 192 / (40 * 400))
    last = truth.blocks[-1]
    assert last.keys.stop - last.keys.start == 500
    first = truth.blocks[0]
    assert first.keys.stop - first.keys.start == 100 + 64  # later keys cannot be seen


# Runs.


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path, list[Any]]:
    """Every suite on the CPU, with its file and what was reported."""
    out, said = tmp_path_factory.mktemp("bench") / "results.json", []
    options = run.options(device="cpu", repeats=3, out=out)
    results = run.run(options, lambda step, done: said.append((step, done)))
    return results, out, said


def test_every_suite_runs_on_the_cpu(everything: tuple[Results, Path, list[Any]]) -> None:
    results, out, said = everything
    assert [cell["name"] for cell in results.cells] == [work.name for work in CELLS]
    assert list(results.participants) == ["kvattn", "sdpa"]
    own = [row for row in results.rows if row.participant == "kvattn"]
    assert {row.status for row in own} == {"ok"}
    assert all(row.seconds and row.low and row.low <= row.seconds for row in own)
    assert all(row.note for row in results.rows if row.status == "refused")
    peers = [row for row in results.rows if row.participant == "sdpa" and row.status == "ok"]
    assert len(peers) >= 15
    assert not results.wrong
    assert load(out) == results
    assert said[-1] == ("done", 1.0)
    steps = [done for _, done in said]
    assert steps == sorted(steps)


def test_a_budget_leaves_cells_out_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))  # a second between any two looks
    monkeypatch.setattr("kvattn.bench.run.time.monotonic", lambda: float(next(clock)))
    options = run.options(device="cpu", suites=["decode"], peers=[], repeats=2, budget=5)
    results = run.run(options)
    names = [work.name for work in SUITES["decode"].cells("small")]
    done = [cell["name"] for cell in results.cells]
    assert 0 < len(done) < len(names)
    assert [*done, *results.left_out] == names


def peer(name: str, prepare: Callable[[Data], Call]) -> Participant:
    return Participant(name, name, lambda: "1.0", prepare, devices=("cpu",))


def test_wrong_refusing_and_absent_peers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(data: Data) -> Call:
        return Call(lambda layer: torch.zeros(data.work.rows, 9, 64))

    def refuses(data: Data) -> Call:
        raise RefusalError("does not like it")

    def raises(data: Data) -> Call:
        raise ValueError("head   dim\nnot supported")

    def missing() -> str:
        raise ImportError("no such library")

    others = (
        peer("wrong", wrong),
        peer("refuses", refuses),
        peer("raises", raises),
        replace(peer("missing", refuses), find=missing),
    )
    monkeypatch.setattr("kvattn.bench.peers.OTHERS", others)
    results = run.run(run.options(device="cpu", suites=["big"], repeats=2))
    assert results.absent == {"missing": "no such library"}
    rows = results.of(results.cells[0]["name"])
    assert rows["wrong"].status == "wrong"
    assert rows["wrong"].seconds is None
    assert rows["wrong"].error is not None and rows["wrong"].allowed is not None
    assert rows["wrong"].error > rows["wrong"].allowed
    assert (rows["refuses"].status, rows["refuses"].note) == ("refused", "does not like it")
    assert rows["raises"].note == "ValueError: head dim not supported"
    assert rows["kvattn"].status == "ok"


def test_a_wrong_kvattn_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Any = kvattn.flash_attn_with_kvcache
    arguments = ["--suite=big", "--peers=", "--device=cpu", "--repeats=2"]
    arguments.append(f"--out={tmp_path / 'found.json'}")
    assert plain.main(arguments) == 0
    assert "Big batch" in capsys.readouterr().out
    monkeypatch.setattr(kvattn, "flash_attn_with_kvcache", lambda *a, **k: real(*a, **k) + 1)
    assert plain.main(arguments) == 1
    assert load(tmp_path / "found.json").wrong
    for package in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, package, None)
    capsys.readouterr()
    assert plain.main(arguments) == 1
    assert capsys.readouterr().out == "No cell has both a right kvattn and a right peer.\n"


def test_backends_are_measured_one_by_one() -> None:
    found = participants("cpu", [], ["cpu", "reference"])
    assert [p.name for p in found] == ["kvattn cpu", "kvattn reference"]
    assert all(p.ours for p in found)
    notes = [p.prepare(Data(CELLS[0], CPU, 1)).note for p in found]
    assert [note.partition(":")[0] for note in notes] == ["cpu", "reference"]


def test_the_reading_kernel_compiles_for_gpus() -> None:
    """Without one; every thread loads 16 bytes at a time."""
    pytest.importorskip("triton")
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvattn.bench import stream

    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=stream._read,
        signature={"x": "*i32", "out": "*i32", "BLOCK": "constexpr"},
        constexprs={(2,): stream._BLOCK},
        attrs={(0,): aligned, (1,): aligned},
    )
    built = build(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert built.asm["ptx"].count("ld.global.v4.b32") == stream._BLOCK // (4 * 8 * 32)


# Other processes.


def task(participant: str = "kvattn", suite: str = "big") -> Task:
    return Task(suite, "small", 0, participant, "cpu")


def test_a_worker_answers_and_refuses() -> None:
    worker = Worker()
    try:
        answers = [worker.answer(t) for t in (task(), task("fa2"), task("sdpa", "fp8"))]
    finally:
        worker.stop()
    done, absent, refused = (answer or {} for answer in answers)
    assert isinstance(done["seconds"], float)
    assert "flash_attn" in str(absent["refused"])
    assert "takes no FP8 cache" in str(refused["refused"])


class Fragile:
    """A worker whose process ends at a certain task."""

    def __init__(self, environment: Any = None) -> None:
        self.stopped = False

    def answer(self, task: Task) -> dict[str, object] | None:
        return None if task.participant == "bad" else {"seconds": 1.0}

    def ended(self) -> str:
        return "ended its process with signal 11"

    def stop(self) -> None:
        self.stopped = True


def test_who_ends_a_process_is_known_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvattn.bench.workers.Worker", Fragile)
    monkeypatch.setattr("kvattn.bench.workers.time.monotonic", lambda: 0.0)
    said: list[float] = []
    tasks, slow = [task("good"), task("bad"), task("good", "mla")], [task("slow")]
    crashed = warm(tasks, slow, 1, 60.0, lambda step, done: said.append(done))
    assert crashed == {task("bad"): "ended its process with signal 11"}
    assert sorted(said) == [0.25, 0.5, 0.75, 1.0]


def test_a_start_says_why_there_was_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvattn.bench.workers.Worker", Fragile)
    assert start_time(task("bad"), tmp_path) == "ended its process"
    assert isinstance(start_time(task("good"), tmp_path), float)


def test_a_revision_is_measured_with_the_present_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a repository of its own, so that this one is left alone."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    package = Path(kvattn.__file__).parent
    shutil.copytree(package, tmp_path / "kvattn", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "kvattn" / "bench")  # a revision from before the benchmark

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        command = ["git", *who, *arguments]
        ran = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return ran.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "before")
    shutil.copytree(package / "bench", tmp_path / "kvattn" / "bench")
    monkeypatch.setattr(kvattn, "__file__", str(tmp_path / "kvattn" / "__init__.py"))
    measured, trees = comparing._measured, []

    def once(tree: Path, out: Path, arguments: Any, what: str) -> Results:
        trees.append(tree)
        return measured(trees[0], out, arguments, what)

    monkeypatch.setattr(comparing, "_measured", once)
    arguments = ["--suite=big", "--peers=", "--device=cpu", "--repeats=2"]
    before, after = comparing.revisions("HEAD", arguments, lambda step, done: None)
    assert trees[1] == tmp_path
    assert not trees[0].exists()
    assert str(trees[0]) not in git("worktree", "list")
    assert before.commit.rstrip("+") == git("rev-parse", "--short=12", "HEAD")
    assert len(comparing.compare(before, after).changes) == 1
    with pytest.raises(RevisionError, match="no-such"):
        comparing.revisions("no-such", arguments, lambda step, done: None)


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert run.options(device="cuda").device == torch.device("cuda", 3)
    assert run.options(device="cuda:1").device == torch.device("cuda", 1)
    assert run.options(device="cpu").device == torch.device("cpu")

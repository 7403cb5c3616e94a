"""Other processes: kernels compiled side by side before the run, and starts from nothing.

A peer that ends its process does so here first, and is refused; the run itself goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_LANES = 5  # processes at once for a library whose own compiler runs in parallel
_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}


@dataclass(frozen=True)
class Task:
    """One participant on one cell, by names."""

    suite: str
    grid: str
    cell: int
    participant: str
    device: str


class Worker:
    """One process that answers tasks in turn.

    Args:
        environment: variables beside those of this process.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvattn.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # so that its compilers end with it
            env={**os.environ, **_import_path(), **(environment or {})},
        )

    def answer(self, task: Task) -> dict[str, object] | None:
        """What came of the task; None if the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(asdict(task)) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):
            return None
        return dict(json.loads(line)) if line else None

    def ended(self) -> str:
        """How the process went away, in words."""
        code = self._process.wait()
        return f"ended its process with signal {-code}" if code < 0 else f"exited with {code}"

    def stop(self) -> None:
        """Ends the process and whatever it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _import_path() -> dict[str, str]:
    """So that the process imports this kvattn, wherever it was started from."""
    here = str(Path(__file__).parents[2])
    path = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([here, *filter(None, [path])])}


def warm(
    tasks: Iterable[Task],
    slow: Iterable[Task],
    processes: int,
    deadline: float,
    report: Callable[[str, float], None],
) -> dict[Task, str]:
    """Runs every task once, several at a time, until `deadline` (time.monotonic).

    Args:
        slow: tasks of libraries whose compiler runs in parallel itself; they get few processes.

    Returns:
        Task -> how it ended the process, of those that did.
    """
    quick_tasks, slow_tasks = list(tasks), list(slow)
    pool = _Pool(len(quick_tasks) + len(slow_tasks), deadline, report)
    threads = [
        threading.Thread(target=pool.serve, args=(queue,), daemon=True)
        for queue, count in ((slow_tasks[::-1], _LANES), (quick_tasks[::-1], processes))
        for _ in range(min(count, len(queue)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        pool.close()
    return pool.crashed


class _Pool:
    """Threads that each keep one worker and take tasks from the end of a list."""

    def __init__(self, total: int, deadline: float, report: Callable[[str, float], None]) -> None:
        self.crashed: dict[Task, str] = {}
        self._total, self._done, self._deadline, self._report = total, 0, deadline, report
        self._lock, self._workers, self._open = threading.Lock(), set[Worker](), True

    def serve(self, queue: list[Task]) -> None:
        worker: Worker | None = None
        while task := self._next(queue):
            worker = worker or self._started()
            if worker is None:
                return
            if worker.answer(task) is None:
                if self._open:
                    self.crashed[task] = worker.ended()
                worker = None
            with self._lock:
                self._done += 1
                if self._open:
                    self._report(f"compiling, {task.participant}", self._done / self._total)
        if worker is not None:
            worker.stop()

    def _next(self, queue: list[Task]) -> Task | None:
        with self._lock:
            late = time.monotonic() > self._deadline
            return queue.pop() if queue and self._open and not late else None

    def _started(self) -> Worker | None:
        with self._lock:
            if not self._open:
                return None
            # one compiler process each: there is a worker a core already
            worker = Worker({"TORCHINDUCTOR_COMPILE_THREADS": "1"})
            self._workers.add(worker)
            return worker

    def close(self) -> None:
        with self._lock:
            self._open = False
            for worker in self._workers:
                worker.stop()


def start_time(task: Task, caches: Path) -> float | str:
    """Seconds from starting a process to its first result, or why there was none.

    Args:
        caches: where compiled kernels are kept; an empty directory makes a cold start.
    """
    environment = {name: str(caches / folder) for name, folder in _CACHES.items()}
    start = time.perf_counter()
    worker = Worker(environment)
    try:
        answer = worker.answer(task)
        seconds = time.perf_counter() - start
    finally:
        worker.stop()
    if answer is None:
        return "ended its process"
    return str(answer["refused"]) if "refused" in answer else seconds

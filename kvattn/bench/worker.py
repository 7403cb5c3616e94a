"""A process that runs single cells when asked: to compile kernels early, to start from nothing.

Reads JSON objects, one a line: {"suite", "grid", "cell", "participant", "device"}; answers each
with one that holds "seconds" or "refused". What libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    """One call of a participant on a cell, with everything before it."""
    start = time.perf_counter()
    try:
        import torch

        from kvattn.bench.data import Data
        from kvattn.bench.peers import named
        from kvattn.bench.suites import SUITES

        work = SUITES[task["suite"]].cells(task["grid"])[task["cell"]]
        call = named(task["participant"]).prepare(Data(work, task["device"], layers=1))
        with call.within():
            float(call.run(0).sum())  # waits for the device
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    except Exception as error:  # whatever a peer raises is an answer
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main()

"""Runs a command and prints the most memory that it and its descendants held at one time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def held_by(session: int) -> int:
    """Bytes of the session's processes; pages that several of them share are counted once."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) != session:
                continue
            rollup = (process / "smaps_rollup").read_text()
        except OSError:  # it ended meanwhile
            continue
        total += sum(int(line.split()[1]) for line in rollup.splitlines() if line[:4] == "Pss:")
    return total * 1024


def main(command: list[str]) -> int:
    peak, start = 0, time.monotonic()
    with subprocess.Popen(command, start_new_session=True) as process:
        while process.poll() is None:
            peak = max(peak, held_by(process.pid))
            time.sleep(0.5)
    seconds = time.monotonic() - start
    print(f"{' '.join(command)}: peak memory {peak / 2**30:.2f} GiB, {seconds:.0f} s", flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What the tests of the command line share; their fixtures are in conftest.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Invoke = Callable[..., Any]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "kvattn.cli", *map(str, arguments)]

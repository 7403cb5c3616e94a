"""Every error that kvattn raises; each class has a stable code and says how to mend the call."""

from __future__ import annotations

from kvattn.errors.base import (
    ArgumentIndexError,
    ArgumentTypeError,
    ArgumentValueError,
    KvattnError,
    RefusedError,
)
from kvattn.errors.cache_kinds import *  # noqa: F403
from kvattn.errors.catalogue_kinds import *  # noqa: F403
from kvattn.errors.kinds import *  # noqa: F403
from kvattn.errors.model_kinds import *  # noqa: F403
from kvattn.errors.option_kinds import *  # noqa: F403
from kvattn.errors.transformers_kinds import *  # noqa: F403

__all__ = [
    "ArgumentIndexError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "KvattnError",
    "RefusedError",
]

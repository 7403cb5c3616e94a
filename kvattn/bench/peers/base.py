"""What a participant of the benchmark is: found or not, prepared for a cell or refusing it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from kvattn.bench.data import Data


class RefusalError(Exception):
    """This participant does not do this cell; the reason is shown to the reader."""


@dataclass(frozen=True)
class Call:
    """A cell, ready to run.

    Attributes:
        run: one call on the keys and values of a layer; gives the output, (rows, H, Dv) or
            (B, Sq, H, Dv).
        layout: "pages" or "dense" where new tokens are stored; only read with an append.
        note: what a reader must know to compare: other layouts, several kernels, other dtypes.
        plan: host work that a step needs once for all layers, if there is any.
        within: a context that calls need, such as a choice of kernels.
    """

    run: Callable[[int], Tensor]
    layout: str = ""
    note: str = ""
    plan: Callable[[], object] | None = None
    within: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


@dataclass(frozen=True)
class Participant:
    """One library, called as its documentation says.

    Attributes:
        name: short, for tables and `--peers`.
        title: in full.
        find: the version; raises ImportError with the reason where it is not there.
        prepare: readies a cell; raises `RefusalError`, or whatever the library raises.
        devices: kinds of device that it serves.
        compiles: "cell" if it compiles kernels for each shape at first use, "suite" if one
            kernel serves all shapes of a suite, "" if it compiles none.
    """

    name: str
    title: str
    find: Callable[[], str]
    prepare: Callable[[Data], Call]
    devices: tuple[str, ...] = ("cuda",)
    compiles: str = ""

    @property
    def ours(self) -> bool:
        """Whether it is kvattn itself."""
        return self.name.partition(" ")[0] == "kvattn"


def module(*names: str) -> Any:
    """The first of these modules that can be imported."""
    reasons = []
    for name in names:
        try:
            return import_module(name)
        except Exception as error:  # a broken build raises whatever it likes
            reasons.append(f"{name}: {error}")
    raise ImportError("; ".join(reasons))


def version(*distributions: str) -> str:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown version"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled for every shape anew; past PyTorch's limit it would stay uncompiled."""
    import torch._dynamo.config as config

    config.recompile_limit = 1 << 12
    config.accumulated_recompile_limit = 1 << 16
    return torch.compile(function, dynamic=False)


def refuse_if(condition: bool, reason: str) -> None:
    if condition:
        raise RefusalError(reason)


def refuse_padding(data: Data) -> None:
    """For kernels that know one length only: a batch padded beyond reason is refused."""
    work = data.work
    refuse_if(work.ragged, "takes one number of query rows for all sequences")
    padded, real = work.batch * max(work.keys), sum(work.keys)
    refuse_if(padded > 4 * real, f"takes no lengths; padding would make it {padded / real:.0f} x")

"""The Triton backend: any GPU that Triton serves, every argument of the contract."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from kvattn import values
from kvattn.backends import prefix, reference
from kvattn.plan import Plan, Prepared
from kvattn.request import Facts, Request

name = "triton"
lasting = True


def refuses(facts: Facts) -> str | None:
    """Why this backend cannot take the call, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if facts.device != "cuda" and not (interpreted and facts.device == "cpu"):
        return f"the tensors are on {facts.device}, not on a GPU"
    if any(t.dtype == torch.float64 for _, t in facts.tensors):
        return "float64 is left to the reference"
    if facts.block_sparse and facts.has("gather_kv_indices"):
        return "block-sparse tensors together with gathered keys are left to the reference"
    return None


def kernel(facts: Facts) -> str:
    if not facts.option("attend"):
        return "append kernel"
    append = "append kernel, then " if facts.has("k") else ""
    layout = "paged" if facts.has("page_table") else "dense"
    return f"{append}attention kernel over {layout} keys{prefix.kernel(facts)}"


def run(r: Request, plan: Plan | None = None) -> tuple[Tensor, Tensor] | None:
    """Appends the new tokens, then attends. Returns (out, lse), or None for an append alone."""
    from kvattn.backends import triton_decode as few
    from kvattn.backends import triton_launch as launch
    from kvattn.backends import triton_prefill as many
    from kvattn.backends import triton_prefix as common
    from kvattn.backends.triton_replay import target

    if (r.score_mod is not None or r.mask_mod is not None) and values.readable(r.pool):
        reference.try_mods(r)  # a table of the wrong shape would read as zeros
    launch.lowered(r)  # a mod that no kernel can run is refused before anything is written
    if r.k is not None and not (r.attend and few.takes(r) and few.appends(r)):
        launch.append(r)
    if not r.attend:
        return None
    out, lse = target().outputs(r)
    for part in launch.by_length(r):
        if few.takes(part):
            shared = common.attend(part) if prefix.shared(part.facts) else few.Common()
            few.decode(part, out, lse, shared)
        elif many.takes(part):
            many.attend(part, out, lse)
        else:
            launch.attend(part, out, lse)
    return out, lse


def prepare(r: Request) -> Prepared | None:
    """The launches of a call, recorded; None where a call does more than launch kernels."""
    from kvattn.backends import triton_replay

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return None if interpreted else triton_replay.record(r, run)

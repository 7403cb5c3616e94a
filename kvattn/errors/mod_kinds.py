"""Mistakes in a score_mod or mask_mod that a GPU kernel is to run."""

from __future__ import annotations

from kvattn.errors.base import ArgumentTypeError, ArgumentValueError, KvattnError, RefusedError


class ModLoweringError(RefusedError):
    """The mod uses an operation that has no form inside an attention kernel."""

    code = "KV601"
    problem = "the mod uses an operation that an attention kernel cannot run"
    fix = (
        "write it with element-wise operations (arithmetic, comparisons, where, exp, log), or "
        "compute it before the call, capture the result and index it with b, h, q_idx, kv_idx"
    )


class ModBranchError(ArgumentTypeError):
    """The mod needs the value of a tensor in Python: if, and, min, int(), .item()."""

    code = "KV602"
    problem = "the mod turns a tensor into a Python value, which does not exist yet"
    fix = "use torch.where, &, |, torch.minimum, torch.maximum instead of if, and, or, min, max"


class ModCaptureError(ArgumentValueError):
    """A captured or auxiliary tensor cannot be read by the kernel."""

    code = "KV603"
    problem = "the kernel cannot read a tensor that the mod captures"
    fix = "move it to the query's device and cast it before the mod captures it"


class ModIndexError(ArgumentValueError):
    """A captured tensor is used as a whole where one of its elements is needed."""

    code = "KV604"
    problem = "a captured tensor must be indexed down to one number for each score"
    fix = "index every dimension at once, from the first: table[h, q_idx - kv_idx]"


class ModReturnError(ArgumentTypeError):
    """The mod does not return one number or one truth value for each score."""

    code = "KV605"
    problem = "the mod must return one number, or for a mask one truth value, for each score"
    fix = "return a tensor computed from score, b, h, q_idx and kv_idx"


class ModTraceError(ArgumentValueError):
    """The mod itself raised an error when it was called with index tensors."""

    code = "KV606"
    problem = "the mod failed when it was traced"
    fix = (
        "write it for tensors that broadcast against each other: score (heads, q, k), b (), "
        "h (heads, 1, 1), q_idx (1, q, 1), kv_idx (1, 1, k); index captured tensors with them"
    )


class ModWriteError(ArgumentValueError):
    """The mod changes a captured tensor or an index in place."""

    code = "KV607"
    problem = "a mod must not write to its indices or to captured tensors"
    fix = "write x = x + 1 instead of x += 1"


class ModShapeError(ArgumentValueError):
    """What the mod computes depends on the shape of its index tensors."""

    code = "KV608"
    problem = "a mod sees tiles, so the shape of its arguments says nothing about the lengths"
    fix = "take lengths from seqlen_info (seqlen_q, seqlen_k), or capture them"


class IntervalError(ArgumentTypeError):
    """The bounds of an interval are not callables of the query's coordinates."""

    code = "KV609"
    problem = "a bound must be a callable (b, h, q_idx) or (b, h, q_idx, seqlen_info, aux_tensors)"
    fix = "give lo, hi or both: lo returns the first visible key, hi the key after the last"


class TritonMissingError(KvattnError, ImportError):
    """Triton is needed to run a mod in a kernel and is not installed."""

    code = "KV610"
    problem = "a kernel can run the mod only through Triton, which is not installed"
    fix = "pip install triton, or pass backend='reference'"

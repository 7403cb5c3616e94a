"""The Hopper backend: prefill on sm_90 GPUs, near the rate of their matrix units."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from kvattn.backends import hopper_decode as few
from kvattn.backends import prefix
from kvattn.plan import Plan, Prepared
from kvattn.request import Facts, Request

name = "hopper"
lasting = True

_ROWS = 64  # packed query rows of a kv head, on average, from which this backend is the faster
_PROGRAMS = 64  # row tiles that keep half of the processors busy
_NARROW = 512  # keys of a window up to which, at head dim 64, half of a tile is wasted
_LONG = 4096  # keys from which splitting them among the idle ones pays
_CAP = 128.0  # larger softcaps need tanh near 0 more exactly than the kernels have it
_BOUND = 52.0  # softcaps with which triton needs no maximum of a row
_BATCH = 4096  # sequences: finding a row tile's sequence reads all their borders
_ELSEWHERE = (
    *(("qv", "a second query qv"), ("rel_bias", "a relative bias"), ("sfq", "MXFP8 scales")),
    *(("sfk", "MXFP8 scales"), ("sfv", "MXFP8 scales"), ("gather_kv_indices", "gathered keys")),
    *(("q_descale", "descales"), ("k_descale", "descales"), ("v_descale", "descales")),
)


def refuses(facts: Facts) -> str | None:
    """Why this backend cannot take the call, or None."""
    if facts.device != "cuda":
        return f"the tensors are on {facts.device}, not on a Hopper GPU"
    return machine_refuses() or call_refuses(facts)


@functools.cache
def machine_refuses() -> str | None:
    """Why no call can run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device is there"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"the GPU is of sm_{capability[0]}{capability[1]}, the kernels are for sm_90 alone"
    try:
        from kvattn.kernels.hopper import compat  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"this release of triton lacks what the kernels are written in ({error})"
    return None


def call_refuses(facts: Facts) -> str | None:
    """Why the call is left to another backend, wherever it runs, or None."""
    if not facts.option("attend"):
        return "an append alone is left to the append kernel"
    for tensor, words in _ELSEWHERE:
        if facts.has(tensor):
            return f"calls with {words} are left to the triton backend"
    if facts.score_mod or facts.mask_mod or facts.block_sparse:
        return "calls with mods or block-sparse tensors are left to the triton backend"
    if facts.option("batch_invariant"):
        return "batch_invariant takes fixed shares of the keys, which the triton backend has"
    return _tensors_refuse(facts) or _few_or_many_refuse(facts)


def _few_or_many_refuse(facts: Facts) -> str | None:
    """Decode takes the call, or prefill does; for few rows decode says why not."""
    reason = few.refuses(facts)
    return reason and (_shapes_refuse(facts) or _rows_refuse(facts, reason))


def _tensors_refuse(facts: Facts) -> str | None:
    q = facts.tensor("q")
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels multiply fp16 and bf16, the query is {q.dtype}"
    for name in ("q", "k_cache", "v_cache"):
        shape, dtype, stride = facts.tensor(name)
        if dtype != q.dtype:
            return f"{name} is {dtype}, the query {q.dtype}; conversion is left to triton"
        if 0 in shape:
            return f"{name} is empty, which TMA cannot address"
        if stride[-1] != 1:
            return f"the channels of {name} do not follow each other in memory"
        steps = [step for size, step in zip(shape[:-1], stride[:-1], strict=True) if size > 1]
        if any(step % 8 or not 0 < step < 1 << 39 for step in steps):
            return f"strides of {name} are {stride}, TMA needs positive multiples of 8 elements"
    return None


def _shapes_refuse(facts: Facts) -> str | None:
    dim = facts.tensor("q").shape[-1]
    _, size, _, dim_v = _slots(facts)
    if facts.option("softcap") > _CAP:
        return f"a softcap beyond {_CAP:g} needs a tanh more exact than the kernel's"
    if dim > 256:
        return f"head dim {dim} exceeds 256"
    if max(64, dim_v) > _padded(dim):
        return f"values of head dim {dim_v} are wider than keys of {dim}"
    if facts.has("page_table") and size % 8:
        return f"pages of {size} slots are no multiples of 8, in which TMA lays out shared memory"
    if facts.has("cu_seqlens_q") and facts.batch > _BATCH:
        return f"{facts.batch} ragged sequences are more than {_BATCH}"
    return None


def _padded(dim: int) -> int:
    return 64 if dim <= 64 else 128 if dim <= 128 else 256


def _slots(facts: Facts) -> tuple[int, int, int, int]:
    """The value cache's shape with a dimension for rows or pages."""
    shape = facts.tensor("v_cache").shape
    return (1, *shape) if len(shape) == 3 else shape  # type: ignore[return-value]


def _rows_refuse(facts: Facts, few_rows: str) -> str | None:
    """Few rows are no error, so a call that names this backend is taken anyway."""
    if facts.option("backend") == name or facts.batch == 0:
        return None
    q = facts.tensor("q").shape
    tokens = q[1] if len(q) == 4 else q[0] // facts.batch
    rows = tokens * q[-2] // _slots(facts)[2]
    if rows < _ROWS:
        return few_rows
    plain = not facts.has("alibi_slopes")
    if plain and 0 < facts.option("softcap") <= _BOUND and max(q[-1], _slots(facts)[3]) <= 128:
        return "a softcap at head dims up to 128 is faster in the triton backend"
    left = facts.option("window")[0]
    if q[-1] <= 64 and left is not None and left < _NARROW:
        return f"a window of {left + 1} keys at head dim {q[-1]} is faster in the triton backend"
    programs = -(-rows // 128) * _slots(facts)[2] * facts.batch
    if programs < _PROGRAMS and _capacity(facts) > _LONG:
        return f"{programs} row tiles leave processors idle; the triton backend splits the keys"
    return None


def _capacity(facts: Facts) -> int:
    """Keys of a sequence at most."""
    size = _slots(facts)[1]
    return facts.tensor("page_table").shape[1] * size if facts.has("page_table") else size


def kernel(facts: Facts) -> str:
    if few.refuses(facts) is None:
        return few.kernel(facts)
    layout = "paged" if facts.has("page_table") else "dense"
    before = "append kernel, then " if facts.has("k") else ""
    before += "queries made ready, then " if facts.has("rotary_cos", "q_norm_weight") else ""
    words = prefix.kernel(facts, "a tile of the prefill kernel has rows of one sequence")
    return f"{before}warp-specialised prefill kernel over {layout} keys{words}"


def run(r: Request, plan: Plan | None = None) -> tuple[Tensor, Tensor]:
    """Appends the new tokens, makes the query ready, attends: in one launch if rows are few."""
    from kvattn.backends import hopper_decode_launch as decode
    from kvattn.backends import hopper_launch, triton_launch
    from kvattn.backends.triton_replay import target

    if few.refuses(r.facts) is None:
        return decode.run(r)
    if r.k is not None:
        triton_launch.append(r)
    out, lse = target().outputs(r)
    hopper_launch.attend(r, out, lse)
    return out, lse


def prepare(r: Request) -> Prepared | None:
    """The launches of a call, recorded."""
    from kvattn.backends import triton_replay

    return triton_replay.record(r, run)

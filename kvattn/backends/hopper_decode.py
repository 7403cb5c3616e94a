"""Which calls the Hopper backend decodes: few query rows over a long cache, from facts alone."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

from kvattn.backends import prefix
from kvattn.request import Facts

ROWS = 64  # packed query rows of a sequence at most
FASTER = 32  # of them, up to which this kernel is known to be the faster one
BATCH = 512  # sequences whose lengths one program adds up
_LINES = 8  # slots of a page that a copy brings at least
_DIMS = (64, 96, 128, 192, 256)
_MEASURED = (64, 128)  # of them, others are served if a call names this backend
_ELSEWHERE = (
    *(("cu_seqlens_k", "ragged keys"), ("cu_seqlens_k_new", "ragged new tokens")),
    *(("seqused_q", "seqused_q"), ("cache_leftpad", "left padding")),
    *(("alibi_slopes", "ALiBi slopes"), ("slot_mapping", "a slot mapping")),
)


@functools.cache
def _unknown_release() -> str | None:
    """Of Triton: from 3.7 on the kernel was not seen to compile, with 3.8 it does not."""
    try:
        release = version("triton")
    except PackageNotFoundError:
        return None
    return None if release.startswith("3.6.") else f"decode was not compiled by Triton {release}"


def refuses(facts: Facts) -> str | None:
    """Why the decode kernel cannot take a call whose tensors suit TMA, or None."""
    if reason := _unknown_release():
        return reason
    for tensor, words in _ELSEWHERE:
        if facts.has(tensor):
            return f"decode with {words} is left to the triton backend"
    if facts.option("attention_chunk") > 0:
        return "decode with attention chunks is left to the triton backend"
    ragged = facts.has("cu_seqlens_q")
    if ragged and facts.option("max_seqlen_q") is None:
        return "decode of ragged queries without max_seqlen_q is left to the triton backend"
    if ragged and prefix.shared(facts):
        return "a common prefix of ragged queries is left to the triton backend"
    dim, rows = facts.tensor("q").shape[-1], _rows(facts)
    _, size, _, dim_v = facts.tensor("v_cache").shape
    if dim not in _DIMS or dim_v not in _DIMS:
        return f"decode with head dims {dim} and {dim_v} is left to the triton backend"
    if rows > ROWS:
        return f"{rows} query rows for each kv head are more than {ROWS}"
    if facts.batch > BATCH:
        return f"decode of {facts.batch} sequences is left to the triton backend"
    if facts.has("page_table") and size % _LINES:
        return f"decode over pages of {size} slots is left to the triton backend"
    return None if facts.option("backend") == "hopper" else _slower(facts)


def _rows(facts: Facts) -> int:
    """Packed query rows of a sequence at most; of ragged ones, by the caller's hint."""
    *_, tokens, heads, _ = facts.tensor("q").shape
    if facts.has("cu_seqlens_q"):
        tokens = min(tokens, facts.option("max_seqlen_q"))
    return tokens * heads // facts.tensor("v_cache").shape[2]


def _slower(facts: Facts) -> str | None:
    """Why another backend is at least as fast, as was measured, or may be; or None."""
    dims = (facts.tensor("q").shape[-1], facts.tensor("v_cache").shape[-1])
    if any(dim not in _MEASURED for dim in dims):
        return f"decode with head dims {dims[0]} and {dims[1]} was not measured here"
    if facts.has("cu_seqlens_q"):
        return "decode of ragged queries was not measured here"
    if _rows(facts) > FASTER:
        return f"decode of {_rows(facts)} query rows for each kv head was not faster here"
    return None


def kernel(facts: Facts) -> str:
    layout = "paged" if facts.has("page_table") else "dense"
    before = "new tokens stored on the way, " if facts.has("k") else ""
    words = (
        f"decode kernel with a copying warp over {layout} keys, {before}shares merged at the end"
    )
    return words + prefix.kernel(facts)

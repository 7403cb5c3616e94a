"""Which calls read a common prefix once for all sequences, from facts alone."""

from __future__ import annotations

import math

import torch

from kvattn import quant
from kvattn.request import Facts

ROWS = 32  # packed query rows of a sequence at most
BATCH = 1024  # sequences at most, if their queries are ragged
DIMS = 256  # head dims at most
BLOCK = 128  # keys, in whole blocks of which a prefix is shared
LEAST = 128 << 20  # bytes that sequences would read again, from which a second launch pays
EACH = 44 << 10  # of them, what the sums of a query head's row cost to leave and to add
_ELSEWHERE = (
    *(("qv", "a second query qv"), ("rel_bias", "a relative bias"), ("sfq", "MXFP8 scales")),
    *(("sfk", "MXFP8 scales"), ("sfv", "MXFP8 scales"), ("alibi_slopes", "ALiBi slopes")),
    ("gather_kv_indices", "gathered keys"),
)


def refuses(facts: Facts) -> str | None:
    """Why every sequence reads the common prefix itself, or None; to be asked if there is one."""
    if facts.batch < 2:
        return "there is one sequence"
    for tensor, words in _ELSEWHERE:
        if facts.has(tensor):
            return f"calls with {words} read it so"
    if facts.score_mod or facts.mask_mod or facts.block_sparse:
        return "calls with mods or block-sparse tensors read it so"
    if facts.option("window")[0] is not None or facts.option("attention_chunk") > 0:
        return "a window or chunk hides most of it"
    if facts.option("batch_invariant"):
        return "batch_invariant keeps sequences apart"
    return _rows_refuse(facts) or _tensors_refuse(facts) or _slower(facts)


def _rows_refuse(facts: Facts) -> str | None:
    q, heads = facts.tensor("q").shape, facts.tensor("k_cache").shape[2]
    tokens = q[1]
    if facts.has("cu_seqlens_q"):
        if facts.option("max_seqlen_q") is None:
            return "calls with ragged queries without max_seqlen_q read it so"
        if facts.batch > BATCH:
            return f"calls with more than {BATCH} ragged sequences read it so"
        tokens = min(facts.option("max_seqlen_q"), q[0])
    rows = tokens * q[-2] // heads
    if rows > ROWS:
        return f"{rows} query rows for each kv head are more than {ROWS}"
    return None


def _tensors_refuse(facts: Facts) -> str | None:
    q, k, v = (facts.tensor(name) for name in ("q", "k_cache", "v_cache"))
    if max(q.shape[-1], v.shape[-1]) > DIMS:
        return f"calls with head dims beyond {DIMS} read it so"
    wide = (torch.float16, torch.bfloat16)
    if q.dtype not in wide or any(x.dtype not in (q.dtype, *quant.NARROW) for x in (k, v)):
        return f"the query is {q.dtype}, the cache {k.dtype}"
    if any(facts.has(x) and len(facts.tensor(x).shape) > 2 for x in ("k_descale", "v_descale")):
        return "calls with a scale for each token read it so"
    return None


def _slower(facts: Facts) -> str | None:
    keys = facts.option("common_prefix_len")
    if keys < least(facts):
        saved = keys // BLOCK * BLOCK * _again(facts) / 1e6
        most = "at most " if facts.has("common_prefix_len") else ""
        return f"sharing it saves {most}{saved:.1f} MB, less than a second launch costs"
    return None


def least(facts: Facts) -> int:
    """Keys of a prefix from which on it pays to read them once."""
    cost = LEAST + EACH * math.prod(facts.tensor("q").shape[:-1])
    return max(1, -(-cost // (BLOCK * _again(facts)))) * BLOCK


def _again(facts: Facts) -> int:
    """Bytes of a key and its value that all sequences but one read again."""
    caches = (facts.tensor("k_cache"), facts.tensor("v_cache"))
    size = sum(t.shape[-2] * t.shape[-1] * t.dtype.itemsize for t in caches)
    return (facts.batch - 1) * size


def shared(facts: Facts) -> bool:
    """Whether there is a common prefix that is read once for all sequences."""
    return facts.option("common_prefix_len") > 0 and refuses(facts) is None


def kernel(facts: Facts, reason: str | None = None) -> str:
    """How a common prefix is read, in words; empty without one. A reason: not at once."""
    keys = facts.option("common_prefix_len")
    if not keys or not facts.option("attend"):
        return ""
    reason = reason or refuses(facts)
    on_device = facts.has("common_prefix_len")
    prefix = "the common prefix" if on_device else f"the common prefix of {keys} keys"
    if reason is None:
        start = f", if it has {least(facts)} keys or more" if on_device else ""
        return f"; {prefix} is read once, by a kernel before{start}"
    return f"; every sequence reads {prefix} itself: {reason}"

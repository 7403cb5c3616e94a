"""Which calls read a common prefix once for all sequences, from facts alone."""

from __future__ import annotations

import torch

from kvattn import quant
from kvattn.request import Facts

ROWS = 32  # packed query rows of a sequence at most
BLOCK = 128  # keys, in whole blocks of which a prefix is shared
LEAST = 128 << 20  # bytes that sequences would read again, from which a second launch pays
EACH = 44 << 10  # of them, what the sums of a query head's row cost to leave and to add
_ELSEWHERE = (
    *(("qv", "a second query qv"), ("rel_bias", "a relative bias"), ("sfq", "MXFP8 scales")),
    *(("sfk", "MXFP8 scales"), ("sfv", "MXFP8 scales"), ("alibi_slopes", "ALiBi slopes")),
    *(("gather_kv_indices", "gathered keys"), ("cu_seqlens_q", "ragged queries")),
    *(("cu_seqlens_k_new", "ragged new tokens"), ("seqused_q", "seqused_q")),
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
    return _tensors_refuse(facts) or _slower(facts)


def _tensors_refuse(facts: Facts) -> str | None:
    q, k, v = (facts.tensor(name) for name in ("q", "k_cache", "v_cache"))
    rows = q.shape[1] * q.shape[2] // k.shape[2]
    if rows > ROWS:
        return f"{rows} query rows for each kv head are more than {ROWS}"
    wide = (torch.float16, torch.bfloat16)
    if q.dtype not in wide or any(x.dtype not in (q.dtype, *quant.NARROW) for x in (k, v)):
        return f"the query is {q.dtype}, the cache {k.dtype}"
    if any(facts.has(x) and len(facts.tensor(x).shape) > 2 for x in ("k_descale", "v_descale")):
        return "calls with a scale for each token read it so"
    return None


def _slower(facts: Facts) -> str | None:
    again = (facts.batch - 1) * _bytes(facts)
    tokens, heads = facts.tensor("q").shape[1:3]
    if again < LEAST + EACH * facts.batch * tokens * heads:
        return f"sharing it saves {again / 1e6:.1f} MB, less than a second launch costs"
    return None


def _bytes(facts: Facts) -> int:
    """Keys and values of the shared part of the prefix."""
    keys = facts.option("common_prefix_len") // BLOCK * BLOCK
    return keys * sum(
        t.shape[-2] * t.shape[-1] * t.dtype.itemsize
        for t in (facts.tensor("k_cache"), facts.tensor("v_cache"))
    )


def shared(facts: Facts) -> bool:
    """Whether there is a common prefix that is read once for all sequences."""
    return facts.option("common_prefix_len") > 0 and refuses(facts) is None


def kernel(facts: Facts, reason: str | None = None) -> str:
    """How a common prefix is read, in words; empty without one. A reason: not at once."""
    keys = facts.option("common_prefix_len")
    if not keys or not facts.option("attend"):
        return ""
    reason = reason or refuses(facts)
    if reason is None:
        return f"; the common prefix of {keys} keys is read once, by a kernel before"
    return f"; every sequence reads the common prefix of {keys} keys itself: {reason}"

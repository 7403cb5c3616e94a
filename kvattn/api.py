"""The public attention calls, with FlashAttention's names, order and meaning.

Signatures are literal: frameworks inspect them. Bodies resolve aliases and pass on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvattn import errors as E
from kvattn import ops
from kvattn.aliases import one, one_set
from kvattn.metadata import SchedulerMetadata
from kvattn.norm import EPS

Window = tuple[int | None, int | None] | list[int | None]
Lengths = Tensor | int | None
Scale = Tensor | float | None
Mod = Callable[..., Tensor] | None


def flash_attn_with_kvcache(
    q: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Lengths = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: SchedulerMetadata | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    max_seqlen_k: int | None = None,
    common_prefix_len: int | Tensor = 0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: Mod = None,
    mask_mod: Mod = None,
    aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None,
    rel_bias: Tensor | None = None,
    rel_bias_prep_cache: dict[Any, Any] | None = None,
    sfq: Tensor | None = None,
    sfk: Tensor | None = None,
    sfv: Tensor | None = None,
    only_qv: bool = False,
    slot_mapping: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = EPS,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a KV cache; new keys and values are appended in place first.

    B sequences, H query heads, Hk kv heads (H a multiple of Hk; head h reads kv head h // (H/Hk)),
    head dims D (q, k) and Dv (v). Logical key j of a sequence lies in absolute row
    ``j + leftpad``; queries are aligned to the end of the keys: row i stands at position
    ``p_i = i + Sk - Sq``. A row that sees no key gives out 0 and lse -inf.

    Args:
        q: (B, Sq, H, D), or (total_q, H, D) with `cu_seqlens_q`. fp16, bf16, fp32 or FP8.
            None only with `only_qv`.
        k_cache, v_cache: (Bc, capacity, Hk, D | Dv), or pages (pages, page_size, Hk, D | Dv) with
            `page_table`. Any strides with a unit last one; may be overlapping views. The query's
            dtype, 16 bits, FP8 or int8. `k_cache` may be None with `only_qv`.
        k, v: (B, Sn, Hk, D | Dv), or (total_new, Hk, ...) with `cu_seqlens_k_new`: appended in
            place at `cache_seqlens`, then attended. All are stored, whatever the masks hide.
            Stored in the cache's dtype; FP8 saturates.
        qv: (..., H, Dv): adds ``qv . v`` to the logits (absorbed MLA). Not rotated.
        rotary_cos, rotary_sin: (positions, R / 2), R <= D, fp32 or q's dtype: rotates new keys at
            ``base + t``, and queries at ``base + i`` if causal or local, else all at ``base``;
            base is `rotary_seqlens` or `cache_seqlens`. Needs `k`.
        cache_seqlens: int or (B,) int32: keys in the cache, counted from absolute row 0, before
            the append (including the new tokens with `slot_mapping`). -1 marks an inactive row:
            nothing read or written, out 0, lse -inf. None: the full capacity.
        cache_batch_idx: (B,) int32: cache row, or page-table row, of each sequence.
        cache_leftpad: (B,) int32: first valid absolute row.
        page_table (block_table): (B | Bc, max_pages) int32; entries past the used length are
            never read.
        cu_seqlens_q: (B + 1,) int32: ragged queries.
        cu_seqlens_k_new: (B + 1,) int32: ragged new tokens.
        max_seqlen_q, max_seqlen_k: upper bounds, hints.
        common_prefix_len: a promise: the first so many keys of all sequences, as far as a
            sequence is that long, lie in the same memory (the same pages, or one cache row). They
            are then read once for all, where that is faster; results are the same. An int, or an
            int32 tensor of shape () or (1,), which `kvattn.common_prefix` finds: it may change
            from one replay of a CUDA graph to the next.
        rotary_seqlens: (B,) int32: base position for rotary in place of `cache_seqlens`.
        q_descale, k_descale, v_descale: float or fp32 broadcastable to (B, Hk): factors of q, k
            and v. k and v also take the cache's shape without its last dimension: one scale per
            token and head, written by the append.
        softmax_scale: default ``D ** -0.5``; ``(D + Dv) ** -0.5`` with qv; ``Dv ** -0.5`` with
            only_qv.
        causal: row i sees keys j <= p_i.
        window_size: (left, right): p_i - left <= j <= p_i + right; -1 or None is unbounded.
        attention_chunk: C > 0: row and key must lie in the same chunk of C positions.
        softcap: c > 0: logits become c * tanh(logit / c).
        rotary_interleaved: True pairs channels (0, 1), (2, 3), ...; False pairs (i, i + R / 2).
        scheduler_metadata, num_splits, pack_gqa, sm_margin: hints; never change the result
            beyond rounding.
        return_softmax_lse: also return the log-sum-exp.
        sinks (s_aux, learnable_sink): (H,): a logit without a value, in the denominator and lse.
        alibi_slopes: (H,) or (B, H) fp32: subtracts slope * abs(p_i - j).
        score_mod: ``(score, b, h, q_idx, kv_idx)`` or FA4's seven arguments.
        mask_mod: ``(b, h, q_idx, kv_idx)`` or FA4's six arguments; True keeps.
        aux_tensors: handed to the seven- and six-argument forms.
        block_sparse_tensors: a `kvattn.BlockSparse`: unlisted blocks are masked.
        rel_bias: (..., H, E): adds rel_bias[i, h, p_i + right - j] where that index exists.
        rel_bias_prep_cache: accepted; results never depend on it.
        sfq, sfk, sfv: float8_e8m0fnu MXFP8 scales, plain, interleaved or (sfv) per 32 tokens.
        only_qv: drop q . k entirely; needs qv.
        slot_mapping: int64, a slot ``page * page_size + offset`` per new token; -1 skips it.
        q_norm_weight, k_norm_weight: (D,) fp32, bf16 or fp16: heads of q, and of k before they are
            stored, become ``x / sqrt(mean(x ** 2) + norm_eps) * weight``, then turn; rounded once.
            Either without the other. Gemma's norm multiplies by 1 + weight: pass that.
        norm_eps: of both norms, 1e-6 by default; > 0.
        out: written and returned; any outer strides; must overlap no input.
        batch_invariant: a row's bits depend on nothing but its own sequence.
        backend: None, "reference", "cpu", "triton" or "hopper"; a named one never falls back.

    Returns:
        out (B, Sq, H, Dv) or (total_q, H, Dv), in q's dtype (bf16 for FP8 inputs); with
        `return_softmax_lse` also lse, fp32, natural log, (B, H, Sq) or (H, total_q).

    Raises:
        kvattn.errors.KvattnError: a subclass that names the argument; nothing was written.

    Example:
        >>> k_cache = torch.zeros(2, 64, 2, 16); v_cache = torch.zeros(2, 64, 2, 16)
        >>> lengths = torch.tensor([5, 9], dtype=torch.int32)
        >>> q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
        >>> out = kvattn.flash_attn_with_kvcache(
        ...     q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
        >>> out.shape
        torch.Size([2, 1, 4, 16])

    The meaning of every argument is written in `docs/contract.md`.
    """
    _own_metadata(scheduler_metadata)
    if block_table is not None:
        page_table = one(page_table=page_table, block_table=block_table)
    if s_aux is not None or learnable_sink is not None:
        sinks = one(sinks=sinks, s_aux=s_aux, learnable_sink=learnable_sink)
    given = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": k,
        "v": v,
        "qv": qv,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "page_table": page_table,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k_new": cu_seqlens_k_new,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "common_prefix_len": common_prefix_len,
        "rotary_seqlens": rotary_seqlens,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "attention_chunk": attention_chunk,
        "softcap": softcap,
        "rotary_interleaved": rotary_interleaved,
        "num_splits": num_splits,
        "pack_gqa": pack_gqa,
        "sm_margin": sm_margin,
        "return_lse": return_softmax_lse,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "aux_tensors": aux_tensors,
        "block_sparse_tensors": block_sparse_tensors,
        "rel_bias": rel_bias,
        "rel_bias_prep_cache": rel_bias_prep_cache,
        "sfq": sfq,
        "sfk": sfk,
        "sfv": sfv,
        "only_qv": only_qv,
        "slot_mapping": slot_mapping,
        "q_norm_weight": q_norm_weight,
        "k_norm_weight": k_norm_weight,
        "norm_eps": norm_eps,
        "out": out,
        "batch_invariant": batch_invariant,
        "backend": backend,
    }
    result = ops.attend(given)
    return result if return_softmax_lse else result[0]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    window_size: Window = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    page_table: Tensor | None = None,
    min_seqlen_k: int | None = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    common_prefix_len: int | Tensor = 0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: Mod = None,
    mask_mod: Mod = None,
    aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None,
    gather_kv_indices: Tensor | None = None,
    rel_bias: Tensor | None = None,
    rel_bias_prep_cache: dict[Any, Any] | None = None,
    sfq: Tensor | None = None,
    sfk: Tensor | None = None,
    sfv: Tensor | None = None,
    only_qv: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: SchedulerMetadata | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over ragged batches: packed queries against packed, padded or paged keys.

    Args:
        q: (total_q, H, D) with `cu_seqlens_q`, else (B, Sq, H, D).
        k, v: (total_k, Hk, D | Dv) with `cu_seqlens_k`; (B, Sk, Hk, ...) without; pages
            (pages, page_size, Hk, ...) with `page_table`, which excludes `cu_seqlens_k`.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 row borders of the sequences.
        max_seqlen_q, max_seqlen_k, min_seqlen_k, num_splits, pack_gqa, deterministic, sm_margin,
            scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata: hints; results
            never change beyond rounding.
        seqused_q: (B,) int32: only the first rows of a sequence are queries; later rows of the
            output are not written (0 where kvattn allocates it).
        seqused_k: (B,) int32: only the first keys of a sequence are used.
        common_prefix_len: as in `flash_attn_with_kvcache`; not with `cu_seqlens_k`.
        gather_kv_indices: (total_q | B, Sq, K) int32: the keys each query may see; -1 is none.
        dropout_p: must be 0.
        return_attn_probs, return_lse, return_softmax_lse: any of them adds the lse.
        Others: as in `flash_attn_with_kvcache`.

    Returns:
        out in q's shape with Dv; with an lse asked for also fp32 (H, total_q) or (B, H, Sq).

    Raises:
        kvattn.errors.KvattnError: a subclass that names the argument; nothing was written.

    Example:
        >>> edges = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> q, k, v = torch.randn(8, 4, 16), torch.randn(8, 2, 16), torch.randn(8, 2, 16)
        >>> kvattn.flash_attn_varlen_func(q, k, v, edges, edges, 5, 5, causal=True).shape
        torch.Size([8, 4, 16])
    """
    _own_metadata(scheduler_metadata)
    with_lse = one_set(
        return_attn_probs=return_attn_probs,
        return_lse=return_lse,
        return_softmax_lse=return_softmax_lse,
    )
    result = _attend_varlen(
        q=q,
        k_cache=k,
        v_cache=v,
        qv=qv,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        page_table=one(page_table=page_table, block_table=block_table),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        sm_margin=sm_margin,
        min_seqlen_k=min_seqlen_k,
        seqlen_k_per_split=seqlen_k_per_split,
        disable_scheduler_metadata=disable_scheduler_metadata,
        common_prefix_len=common_prefix_len,
        return_lse=with_lse,
        sinks=one(sinks=sinks, s_aux=s_aux, learnable_sink=learnable_sink),
        alibi_slopes=alibi_slopes,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        block_sparse_tensors=block_sparse_tensors,
        gather_kv_indices=gather_kv_indices,
        rel_bias=rel_bias,
        rel_bias_prep_cache=rel_bias_prep_cache,
        sfq=sfq,
        sfk=sfk,
        sfv=sfv,
        only_qv=only_qv,
        out=out,
        batch_invariant=batch_invariant,
        backend=backend,
        dropout_p=dropout_p,
    )
    return result if with_lse else result[0]


_VARLEN_NAMES = {"k_cache": "k", "v_cache": "v", "cache_seqlens": "seqused_k"}


def _attend_varlen(**arguments: Any) -> tuple[Tensor, Tensor]:
    """Errors name k, v and seqused_k as the caller did."""
    try:
        return ops.attend(arguments)
    except E.KvattnError as error:
        raise error.renamed(_VARLEN_NAMES) from None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    window_size: Window = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: Mod = None,
    mask_mod: Mod = None,
    aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None,
    gather_kv_indices: Tensor | None = None,
    rel_bias: Tensor | None = None,
    sfq: Tensor | None = None,
    sfk: Tensor | None = None,
    sfv: Tensor | None = None,
    only_qv: bool = False,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over padded batches: q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv).

    Arguments, errors and results as in `flash_attn_varlen_func`, without lengths. A `softmax_scale`
    of 0 is refused: it is FlashAttention-2's `dropout_p`, which has this place there.

    Example:
        >>> q, k, v = torch.randn(1, 3, 4, 16), torch.randn(1, 7, 2, 16), torch.randn(1, 7, 2, 16)
        >>> kvattn.flash_attn_func(q, k, v, causal=True).shape
        torch.Size([1, 3, 4, 16])
    """
    if isinstance(softmax_scale, int | float) and softmax_scale == 0:
        fix = "the fourth argument is softmax_scale, as in FA3; name FA2's: dropout_p=0.0"
        raise E.SoftmaxScaleError("softmax_scale", softmax_scale, "None or another number", fix)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        sm_margin=sm_margin,
        sinks=one(sinks=sinks, s_aux=s_aux, learnable_sink=learnable_sink),
        alibi_slopes=alibi_slopes,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        block_sparse_tensors=block_sparse_tensors,
        gather_kv_indices=gather_kv_indices,
        rel_bias=rel_bias,
        sfq=sfq,
        sfk=sfk,
        sfv=sfv,
        only_qv=only_qv,
        out=out,
        batch_invariant=batch_invariant,
        backend=backend,
        dropout_p=dropout_p,
        return_attn_probs=return_attn_probs,
        return_lse=return_lse,
        return_softmax_lse=return_softmax_lse,
    )


def arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A bound call of `flash_attn_with_kvcache` by the names of `Request.of`."""
    given = dict(call)
    _own_metadata(given.pop("scheduler_metadata"))
    given["page_table"] = one(page_table=given["page_table"], block_table=given.pop("block_table"))
    given["sinks"] = one(
        sinks=given["sinks"],
        s_aux=given.pop("s_aux"),
        learnable_sink=given.pop("learnable_sink"),
    )
    given["return_lse"] = given.pop("return_softmax_lse")
    return given


def _own_metadata(metadata: SchedulerMetadata | None) -> None:
    if metadata is not None and not isinstance(metadata, SchedulerMetadata):
        raise E.SchedulerMetadataError(
            "scheduler_metadata", type(metadata).__name__, "SchedulerMetadata or None"
        )

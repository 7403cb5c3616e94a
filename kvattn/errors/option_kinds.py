"""Mistakes in what a call asks for: rotary, scales, masks, mods, hints, outputs, backends."""

from __future__ import annotations

from kvattn.errors.base import ArgumentTypeError, ArgumentValueError, RefusedError


class RotaryWithoutNewKeysError(ArgumentValueError):
    """rotary_cos was given, but there is nothing to append."""

    code = "KV143"
    problem = "rotary embedding needs new keys to rotate"
    fix = "pass k and v, or rotate q beforehand with kvattn.apply_rotary"


class RotaryIncompleteError(ArgumentValueError):
    """One of rotary_cos and rotary_sin is missing, or rotary_seqlens came without them."""

    code = "KV144"
    problem = "rotary_cos and rotary_sin come together"
    fix = "pass both tables"


class RotaryShapeError(ArgumentValueError):
    """rotary_cos and rotary_sin have wrong or different shapes."""

    code = "KV145"
    problem = (
        "rotary tables must be two equal (positions, R/2) tensors with R at most the head dimension"
    )
    fix = (
        "give both the shape (positions, R/2); where every angle is there twice keep the first "
        "half, cos[:, : R // 2]"
    )


class RotaryDtypeError(ArgumentTypeError):
    """rotary_cos or rotary_sin has a dtype that is not accepted."""

    code = "KV146"
    problem = "rotary tables must be float32 or have the query's dtype"
    fix = "cast both to float32, or both to the dtype of what is rotated"


class RotaryTableShortError(ArgumentValueError):
    """rotary_cos has fewer rows than the call needs."""

    code = "KV147"
    problem = "a position lies beyond the rotary tables"
    fix = "build the tables for at least the largest position + 1"


class RotarySeqlensError(ArgumentValueError):
    """rotary_seqlens has the wrong dtype, shape or sign."""

    code = "KV148"
    problem = "rotary_seqlens must be a non-negative int32 tensor of shape (batch,)"
    fix = "pass one base position per sequence"


class NormWeightError(ArgumentValueError):
    """q_norm_weight or k_norm_weight has the wrong shape or dtype."""

    code = "KV190"
    problem = "a norm weight must be one float per channel of a head"
    fix = (
        "pass a float32, bfloat16 or float16 tensor of shape (head_dim,); for a norm over all "
        "heads together normalise before the call"
    )


class NormEpsError(ArgumentValueError):
    """norm_eps is not a positive number."""

    code = "KV191"
    problem = "norm_eps must be a positive number that float32 can hold"
    fix = "pass the model's own epsilon, most often 1e-6"


class NormWithoutHeadsError(ArgumentValueError):
    """A norm weight was given without the tensor that it would normalise."""

    code = "KV192"
    problem = "a norm weight needs the heads that it normalises"
    fix = "leave k_norm_weight out where no k is appended, and q_norm_weight out with only_qv"


class DescaleError(ArgumentValueError):
    """q_descale, k_descale or v_descale has the wrong dtype or shape."""

    code = "KV149"
    problem = "a descale must be a float32 number or tensor that broadcasts to (batch, kv_heads)"
    fix = (
        "use shape (batch, kv_heads), or the cache's shape without its last dimension for one "
        "scale per token and head"
    )


class SoftmaxScaleError(ArgumentValueError):
    """softmax_scale is not a number, NaN or infinite, or 0 where FA2 has its dropout."""

    code = "KV150"
    problem = "softmax_scale must be a finite number"
    fix = "pass a float, or None for 1 / sqrt(head_dim)"


class WindowSizeError(ArgumentValueError):
    """window_size is not a pair of ints, or holds a negative bound."""

    code = "KV151"
    problem = (
        "window_size must be two integers of at least -1, or None, for the left and right bound"
    )
    fix = "-1 and None mean unbounded; for signed windows write a mask_mod"


class AttentionChunkError(ArgumentValueError):
    """attention_chunk is negative or not an integer."""

    code = "KV152"
    problem = "attention_chunk must be a non-negative integer"
    fix = "0 switches chunks off"


class SoftcapError(ArgumentValueError):
    """softcap is negative, NaN or infinite."""

    code = "KV153"
    problem = "softcap must be a finite number of at least 0"
    fix = "0 switches capping off"


class SinksError(ArgumentValueError):
    """sinks (s_aux, learnable_sink) has the wrong dtype or shape."""

    code = "KV154"
    problem = "sinks must be one float per query head"
    fix = "pass a float32, bfloat16 or float16 tensor of shape (heads,)"


class AlibiSlopesError(ArgumentValueError):
    """alibi_slopes has the wrong dtype or shape."""

    code = "KV155"
    problem = "alibi_slopes must be float32 of shape (heads,) or (batch, heads)"
    fix = "pass one float32 slope per query head"


class QueryValueError(ArgumentValueError):
    """qv is missing where only_qv asks for it, or has the wrong shape or dtype."""

    code = "KV156"
    problem = "qv must match q in all but the head dimension and have the value head dimension"
    fix = "pass qv of shape (..., heads, Dv) in q's dtype; only_qv needs it"


class KeyCacheMissingError(ArgumentValueError):
    """There is no key cache to attend to."""

    code = "KV157"
    problem = "k_cache may be None only with only_qv"
    fix = "pass the key cache, or qv together with only_qv=True"


class RotaryOnlyQvError(ArgumentValueError):
    """Rotary tables were given together with only_qv."""

    code = "KV158"
    problem = "qv is never rotated, so rotary embedding has no meaning with only_qv"
    fix = "drop the rotary tables or only_qv"


class RelBiasError(ArgumentValueError):
    """rel_bias or rel_bias_prep_cache has the wrong shape or type."""

    code = "KV159"
    problem = "rel_bias must have the query's leading shape and at least one distance"
    fix = (
        "pass (batch, seqlen_q, heads, E) or (total_q, heads, E) in fp32, bf16 or fp16; "
        "rel_bias_prep_cache is a dict"
    )


class MxScaleError(ArgumentValueError):
    """sfq, sfk or sfv has the wrong dtype, shape or partner."""

    code = "KV160"
    problem = (
        "MXFP8 scales must be float8_e8m0fnu, go with e4m3 data and have one of the known layouts"
    )
    fix = "pass one scale per 32 elements: the data's shape with the last dimension divided by 32"


class ModCallableError(ArgumentTypeError):
    """score_mod or mask_mod is not callable or has an unknown arity, or aux_tensors came alone."""

    code = "KV161"
    problem = "a score_mod or mask_mod must be a callable with a known number of arguments"
    fix = "score_mod takes 5, 7 or 8 arguments, mask_mod 4, 6 or 7; aux_tensors go with either"


class ModResultError(ArgumentValueError):
    """A score_mod or mask_mod failed on the call's indices, or its result does not fit them."""

    code = "KV185"
    problem = "a score_mod or mask_mod must take every index and give one value for each"
    fix = (
        "size captured tensors for every index up to those lengths, return one value for each "
        "index, and bools from a mask_mod"
    )


class BlockSparseError(ArgumentValueError):
    """block_sparse_tensors or gather_kv_indices has the wrong dtype, device or shape."""

    code = "KV162"
    problem = "block-sparse tensors must be int32 counts and indices of the documented shape"
    fix = (
        "pass int32 counts (B|1, H|1, Mb) and indices (B|1, H|1, Mb, N), or gather_kv_indices of "
        "the query's leading shape and K"
    )


class NumSplitsError(ArgumentValueError):
    """num_splits is negative or not an integer."""

    code = "KV163"
    problem = "num_splits must be a non-negative integer"
    fix = "0 lets the planner choose"


class SmMarginError(ArgumentValueError):
    """sm_margin is out of range."""

    code = "KV164"
    problem = "sm_margin must be an integer from 0 to the number of multiprocessors - 1"
    fix = "0 uses the whole device"


class SchedulerMetadataError(ArgumentTypeError):
    """A foreign object was passed as scheduler metadata."""

    code = "KV165"
    problem = "scheduler_metadata must come from kvattn.get_scheduler_metadata"
    fix = "pass its result, or None"


class OutTensorError(ArgumentValueError):
    """out has a wrong shape, dtype or device, requires grad, or shares memory with an input."""

    code = "KV166"
    problem = (
        "out must be a plain tensor of the output's shape, dtype and device that overlaps no input"
    )
    fix = "pass torch.empty of the output's shape and dtype"


class RequiresGradError(ArgumentValueError):
    """An input requires grad while grad mode is on."""

    code = "KV167"
    problem = "kvattn has no backward pass"
    fix = "call it under torch.no_grad() or torch.inference_mode(), or detach the tensor"


class InferenceTensorError(ArgumentValueError):
    """A tensor made in inference mode is to be written outside it, which torch does not allow."""

    code = "KV193"
    problem = "an inference tensor can only be written in inference mode"
    fix = "make the call under torch.inference_mode(), or make the tensor outside it"


class AliasConflictError(ArgumentTypeError):
    """Both an argument and its alias were given."""

    code = "KV172"
    problem = "two names of one argument were given"
    fix = "keep one of them"


class DropoutError(ArgumentValueError):
    """dropout_p is not zero."""

    code = "KV178"
    problem = "attention over a cache has no dropout"
    fix = "pass dropout_p=0.0"


class FlagError(ArgumentTypeError):
    """A boolean argument is something else."""

    code = "KV179"
    problem = "a flag must be True or False"
    fix = "pass a bool, for example bool(x)"


class UnknownBackendError(ArgumentValueError):
    """backend names nothing that kvattn has."""

    code = "KV180"
    problem = "there is no such backend"
    fix = "name one of the backends, or pass None to let the planner choose"


class MergeStatesError(ArgumentValueError):
    """merge_states got outputs and lses that do not belong together."""

    code = "KV182"
    problem = "partial results must agree in shape"
    fix = (
        "pass outs (batch, seqlen, heads, dim) with lses (batch, heads, seqlen), or packed outs "
        "(total, heads, dim) with lses (heads, total)"
    )


class RotaryArgumentsError(ArgumentValueError):
    """The positions for apply_rotary are missing, doubled or malformed."""

    code = "KV183"
    problem = "apply_rotary needs exactly one source of positions"
    fix = "pass positions, or seqlen_offsets (with cu_seqlens for ragged x)"


class CommonPrefixError(ArgumentValueError):
    """common_prefix_len is no count of keys, exceeds the capacity, or comes with left padding; or a
    tensor of it is not one int32 number."""

    code = "KV188"
    problem = "common_prefix_len must be a number of keys from 0 to the capacity"
    fix = "pass the number of leading keys that all sequences share, 0 for none, without leftpad"


class CommonPrefixMemoryError(ArgumentValueError):
    """The sequences do not begin in the same memory, as common_prefix_len promises."""

    code = "KV189"
    problem = "the first common_prefix_len keys of all sequences must lie in the same memory"
    fix = "let the page table's rows begin with the same pages, or pass a shorter prefix or 0"


class IntArgumentError(ArgumentTypeError):
    """An argument that must be a non-negative integer is something else."""

    code = "KV184"
    problem = "a non-negative integer is needed"
    fix = "pass an int of at least 0, or None"


class BackendRefusesError(RefusedError):
    """The backend that was asked for by name cannot take this call; nothing falls back silently."""

    code = "KV181"
    problem = "this backend cannot take the call"
    fix = "pass backend=None to let the planner choose, or name another backend"

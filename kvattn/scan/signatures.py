"""The functions that a port starts from: where they live, and the order of their arguments."""

from __future__ import annotations

from kvattn.peers import PEERS

UNKNOWN_LIBRARY = "unknown"

# Longest prefix first; "" stands for "not one of ours to report".
_MODULES = (
    ("sglang.jit_kernel.flash_attention_v4_sm120", "sglang-fa4-sm120"),
    ("sglang.kernels.ops.attention.flash_attention_v4_sm120", "sglang-fa4-sm120"),
    ("sglang.jit_kernel.flash_attention_v4", "sglang-fa4"),
    ("sglang.kernels.ops.attention.flash_attention_v4", "sglang-fa4"),
    ("sglang", "sglang"),
    ("sgl_kernel", "sglang"),
    ("flash_attn.cute", "fa4"),
    ("flash_attn_interface", "fa3"),
    ("flash_attn_3", "fa3"),
    ("fa3_fwd_interface", "fa3"),
    ("hopper.flash_attn_interface", "fa3"),
    ("flash_attn", "fa2"),
    ("vllm_flash_attn", "vllm"),
    ("vllm", "vllm"),
    ("flashinfer", "flashinfer"),
    ("kvattn", ""),
)

TITLES = {
    **{peer.name: peer.title for peer in PEERS},
    "sglang": "SGLang",
    "vllm": "vLLM's FlashAttention",
    UNKNOWN_LIBRARY: "a module that cannot be told",
}

KVCACHE, VARLEN, PADDED = "flash_attn_with_kvcache", "flash_attn_varlen_func", "flash_attn_func"
PACKED = {
    "flash_attn_qkvpacked_func": PADDED,
    "flash_attn_kvpacked_func": PADDED,
    "flash_attn_varlen_qkvpacked_func": VARLEN,
    "flash_attn_varlen_kvpacked_func": VARLEN,
}
SINGLE = ("single_decode_with_kv_cache", "single_prefill_with_kv_cache")
APPEND = "append_paged_kv_cache"
DECODE_WRAPPER, PREFILL_WRAPPER, RAGGED_WRAPPER = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
)
WRAPPERS = (DECODE_WRAPPER, PREFILL_WRAPPER, RAGGED_WRAPPER)
FLASH = (KVCACHE, VARLEN, PADDED, *PACKED)
KIN = (*FLASH, *SINGLE, APPEND, *WRAPPERS)

_FA2_MASKS = "softmax_scale causal window_size softcap alibi_slopes"
_FA2_END = f"dropout_p {_FA2_MASKS} deterministic return_attn_probs"
_EDGES = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_DESCALES = "q_descale k_descale v_descale"
_FA3_END = (
    f"softmax_scale causal qv {_DESCALES} window_size attention_chunk softcap num_splits pack_gqa "
    "deterministic sm_margin return_attn_probs"
)
_FA3_CACHE = (
    "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    f"page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens {_DESCALES} "
    "softmax_scale causal window_size"
)
_FA3_HINTS = "rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin"
_SGLANG_VARLEN = (
    f"q k v {_EDGES} seqused_q seqused_k page_table softmax_scale causal qv {_DESCALES} "
    "window_size attention_chunk softcap num_splits pack_gqa sm_margin return_softmax_lse sinks "
    "score_mod aux_tensors ver"
)
_SGLANG_CACHE = (
    f"{_FA3_CACHE} attention_chunk softcap {_FA3_HINTS} return_softmax_lse sinks score_mod "
    "aux_tensors ver"
)

_SIGNATURES: dict[tuple[str, str], str] = {
    ("fa2", PADDED): f"q k v {_FA2_END}",
    ("fa2", VARLEN): f"q k v {_EDGES} {_FA2_END} block_table",
    ("fa2", "flash_attn_qkvpacked_func"): f"qkv {_FA2_END}",
    ("fa2", "flash_attn_kvpacked_func"): f"q kv {_FA2_END}",
    ("fa2", "flash_attn_varlen_qkvpacked_func"): f"qkv cu_seqlens max_seqlen {_FA2_END}",
    ("fa2", "flash_attn_varlen_kvpacked_func"): f"q kv {_EDGES} {_FA2_END}",
    ("fa2", KVCACHE): (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
        "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
        "num_splits return_softmax_lse"
    ),
    ("fa3", PADDED): f"q k v {_FA3_END}",
    ("fa3", VARLEN): f"q k v {_EDGES} seqused_q seqused_k {_FA3_END}",
    ("fa3", "flash_attn_qkvpacked_func"): (
        f"qkv softmax_scale causal {_DESCALES} window_size attention_chunk softcap deterministic "
        "num_heads_q sm_margin return_attn_probs"
    ),
    ("fa3", KVCACHE): f"{_FA3_CACHE} attention_chunk softcap {_FA3_HINTS} return_softmax_lse",
    ("fa4", PADDED): (
        "q k v qv gather_kv_indices softmax_scale causal window_size learnable_sink softcap "
        "num_splits pack_gqa deterministic score_mod score_mod_bwd mask_mod aux_tensors "
        "aux_scalars block_sparse_tensors block_sparse_tensors_bwd return_lse"
    ),
    ("fa4", VARLEN): (
        f"q k v qv {_EDGES} min_seqlen_k seqused_q seqused_k gather_kv_indices page_table "
        "softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa "
        "deterministic score_mod score_mod_bwd mask_mod block_sparse_tensors aux_tensors "
        "aux_scalars return_lse scheduler_metadata seqlen_k_per_split disable_scheduler_metadata"
    ),
    ("sglang", KVCACHE): _SGLANG_CACHE,
    ("sglang", VARLEN): _SGLANG_VARLEN,
    ("sglang-fa4", VARLEN): (
        "q k v cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k page_table "
        "softmax_scale causal softcap window_size learnable_sink sinks num_splits pack_gqa "
        "return_softmax_lse score_mod aux_tensors"
    ),
    ("vllm", VARLEN): (
        "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k seqused_k q_v dropout_p "
        f"{_FA2_MASKS} deterministic return_attn_probs block_table return_softmax_lse out "
        f"scheduler_metadata {_DESCALES} num_splits fa_version s_aux"
    ),
    ("flashinfer", SINGLE[0]): (
        "q k v kv_layout pos_encoding_mode use_tensor_cores q_scale k_scale v_scale window_left "
        "logits_soft_cap sm_scale rope_scale rope_theta return_lse"
    ),
    ("flashinfer", SINGLE[1]): (
        "q k v scale_q scale_k scale_v o_dtype custom_mask packed_custom_mask causal kv_layout "
        "pos_encoding_mode use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale "
        "rope_theta backend return_lse kv_cache_sf k_scale v_scale"
    ),
    ("flashinfer", APPEND): (
        "append_key append_value batch_indices positions paged_kv_cache kv_indices kv_indptr "
        "kv_last_page_len kv_layout"
    ),
    ("flashinfer", f"{DECODE_WRAPPER}.plan"): (
        "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size "
        "pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type data_type "
        "sm_scale rope_scale rope_theta"
    ),
    ("flashinfer", f"{PREFILL_WRAPPER}.plan"): (
        "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads "
        "num_kv_heads head_dim_qk page_size head_dim_vo custom_mask packed_custom_mask causal "
        "pos_encoding_mode use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale "
        "rope_theta q_data_type kv_data_type"
    ),
    ("flashinfer", f"{RAGGED_WRAPPER}.plan"): (
        "qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo custom_mask "
        "packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction window_left "
        "logits_soft_cap sm_scale rope_scale rope_theta"
    ),
    ("flashinfer", f"{DECODE_WRAPPER}.run"): "q paged_kv_cache",
    ("flashinfer", f"{PREFILL_WRAPPER}.run"): "q paged_kv_cache",
    ("flashinfer", f"{RAGGED_WRAPPER}.run"): "q k v",
    ("flashinfer", f"{DECODE_WRAPPER}"): "float_workspace_buffer kv_layout",
    ("flashinfer", f"{PREFILL_WRAPPER}"): "float_workspace_buffer kv_layout",
    ("flashinfer", f"{RAGGED_WRAPPER}"): "float_workspace_buffer kv_layout",
}
_LIKE = {  # libraries that share the signatures of another one
    "sglang-fa3": "sglang",
    "sglang-fa4": "sglang",
    "sglang-fa4-sm120": "sglang-fa4",
    "vllm": "fa2",
    UNKNOWN_LIBRARY: "fa3",
}


def library_of(dotted: str) -> str | None:
    """The library of a function by its full dotted name; None for one to leave alone."""
    for prefix, library in _MODULES:
        if dotted == prefix or dotted.startswith(prefix + "."):
            return library or None
    name = dotted.rpartition(".")[2]
    return "flashinfer" if name in (*SINGLE, APPEND, *WRAPPERS) else UNKNOWN_LIBRARY


def positional(library: str, function: str) -> tuple[str, ...]:
    """The names of a function's arguments in order; () if they are not known."""
    seen = library
    while (seen, function) not in _SIGNATURES and seen in _LIKE:
        seen = _LIKE[seen]
    names = _SIGNATURES.get((seen, function))
    if names is None:
        names = _SIGNATURES.get(("fa2", function), "")
    return tuple(names.split())

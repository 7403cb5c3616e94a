"""What other attention libraries refuse or silently change, as one table.

Read in the sources of the releases that `kvattn.peers.PEERS` names. A rule holds for a call that
has all of its traits (`kvattn.peers.call.TRAITS`).
"""

from __future__ import annotations

from typing import NamedTuple

REFUSES, ALTERS = "refuses", "alters"

FLASH = ("fa2", "fa3", "fa4")
SGLANG_FA4 = ("sglang-fa4", "sglang-fa4-sm120")
FA4 = ("fa4", *SGLANG_FA4)
FA3 = ("fa3", "sglang-fa3")
NO_CACHE = ("sdpa", "flex")  # they attend tensors that are there, and keep nothing


class Rule(NamedTuple):
    """One fact.

    Attributes:
        peers: the libraries it is true of.
        traits: what a call must have for it.
        effect: "refuses" (an error, or no argument for it) or "alters" (another result, silently).
        arguments: the arguments concerned, by kvattn's names.
        why: the fact, as the rest of a sentence that begins with the library's name.
        depends: on what data it depends besides, "" if on none.
    """

    peers: tuple[str, ...]
    traits: tuple[str, ...]
    effect: str
    arguments: tuple[str, ...]
    why: str
    depends: str = ""


_NEW = ("k", "v")
_ROTARY = ("rotary_cos", "rotary_sin")
_DESCALES = ("q_descale", "k_descale", "v_descale")
_MX = ("sfq", "sfk", "sfv")
_WINDOW = ("window_size",)

_MACHINE = (
    Rule((*FLASH, "sglang-fa3", *SGLANG_FA4, "flashinfer"), ("no_gpu",), REFUSES, ("q",),
         "runs on GPUs only"),
    Rule(FA3, ("not_hopper",), REFUSES, ("q",), "is built for compute capability 9.x"),
    Rule(("fa4", "sglang-fa4"), ("older",), REFUSES, ("q",),
         "needs compute capability 8.0 or newer"),
    Rule(("sglang-fa4-sm120",), ("not_sm120",), REFUSES, ("q",),
         "is the path for compute capability 12.x"),
    Rule((*FLASH, "sglang-fa3", *SGLANG_FA4, "flashinfer"), ("wide",), REFUSES, ("q",),
         "takes 16-bit and, in part, FP8 queries, no float32"),
    Rule(("fa2",), ("fp8",), REFUSES, ("q",), "takes no FP8"),
    Rule((*FLASH, "sglang-fa3", "sglang-fa4"), ("mixed",), REFUSES, ("k_cache", "v_cache"),
         "wants queries and cache in one dtype"),
    Rule((*NO_CACHE,), ("mixed",), REFUSES, ("k_cache", "v_cache"),
         "wants queries, keys and values in one dtype: widen the cache first"),
    Rule((*FLASH, "sglang-fa3", "sglang-fa4"), ("dim_over_256",), REFUSES, ("q",),
         "takes head dimensions up to 256, apart from MLA's own"),
    Rule((*FA3, *FA4), ("dim_odd",), REFUSES, ("q",),
         "wants head dimensions that are multiples of 8"),
    Rule(("fa2",), ("dims_differ",), REFUSES, ("v_cache",),
         "wants one head dimension for keys and values"),
    Rule((*FA3, "fa4", "sglang-fa4", "flashinfer"), ("dims_differ",), REFUSES, ("v_cache",),
         "takes different head dimensions in a few pairs only, such as 192 and 128",
         "the pair of head dimensions"),
)  # fmt: skip

_APPEND = (
    Rule(SGLANG_FA4, ("append",), REFUSES, _NEW,
         "raises NotImplementedError: it does not update the cache in place"),
    Rule(("fa4",), ("append",), REFUSES, _NEW,
         "has no call that appends: new keys must be written into the pages first"),
    Rule(("flashinfer",), ("append",), REFUSES, _NEW,
         "appends with a call of its own, append_paged_kv_cache"),
    Rule(NO_CACHE, ("append",), REFUSES, _NEW,
         "keeps no cache: concatenate or copy the new keys and values first"),
    Rule((*FLASH[:2], "sglang-fa3"), ("append", "left"), ALTERS, (*_NEW, *_WINDOW),
         "stores only the new rows that some query's window reaches", "how far the window reaches"),
    Rule(FA3, ("append", "chunk"), ALTERS, (*_NEW, "attention_chunk"),
         "stores only the new rows that lie in a chunk some query sees", "the chunks' borders"),
    Rule((*FLASH[:2], "sglang-fa3"), ("v_alone",), ALTERS, ("v",), "ignores v without k"),
    Rule((*FLASH[:2], "sglang-fa3"), ("sin_alone",), ALTERS, ("rotary_sin", "rotary_seqlens"),
         "ignores rotary arguments without rotary_cos"),
    Rule(FA3, ("edges_alone",), ALTERS, ("cu_seqlens_k_new",),
         "ignores cu_seqlens_k_new without k"),
    Rule(("fa2", "flashinfer"), ("append", "slots"), REFUSES, ("slot_mapping",),
         "has no slot list"),
    Rule((*FA3, *FA4, *NO_CACHE), ("slots",), REFUSES, ("slot_mapping",), "has no slot list"),
    Rule(SGLANG_FA4, ("ragged_new",), ALTERS, ("cu_seqlens_k_new",), "drops cu_seqlens_k_new"),
    Rule(("fa2", "fa4", *NO_CACHE), ("ragged_new",), REFUSES, ("cu_seqlens_k_new",),
         "takes no ragged new tokens"),
)  # fmt: skip

_ROTATION = (
    Rule(SGLANG_FA4, ("rotary",), REFUSES, _ROTARY,
         "raises NotImplementedError: rotate q and k before the call"),
    Rule(SGLANG_FA4, ("rotary_seqlens",), REFUSES, ("rotary_seqlens",),
         "raises NotImplementedError: rotate q and k before the call"),
    Rule(("fa4", *NO_CACHE), ("rotary",), REFUSES, _ROTARY,
         "has no rotary embedding: rotate q and k before the call"),
    Rule(("flashinfer",), ("rotary",), REFUSES, _ROTARY,
         "takes no tables: it rotates by theta, or with flashinfer.rope before the call"),
    Rule(("fa2", "fa4", "flashinfer", *NO_CACHE), ("rotary_seqlens",), REFUSES,
         ("rotary_seqlens",), "has no base positions for rotary embedding"),
    Rule((*FLASH, "sglang-fa3", *SGLANG_FA4, "flashinfer", *NO_CACHE), ("norm",), REFUSES,
         ("q_norm_weight", "k_norm_weight"), "has no norm of q and k: normalise before the call"),
)  # fmt: skip

_PLACES = (
    Rule(SGLANG_FA4, ("batch_idx",), REFUSES, ("cache_batch_idx",),
         "raises NotImplementedError: expand the rows by the indices first"),
    Rule(SGLANG_FA4, ("leftpad",), REFUSES, ("cache_leftpad",),
         "raises NotImplementedError: left padding has to be stripped first"),
    Rule(("fa4", *NO_CACHE), ("batch_idx",), REFUSES, ("cache_batch_idx",),
         "has no batch indices: index the cache or its page table first, which copies"),
    Rule(("flashinfer",), ("batch_idx",), REFUSES, ("cache_batch_idx",),
         "has no batch indices: its page lists must name the pages of each sequence"),
    Rule(("fa4", "flashinfer"), ("leftpad",), REFUSES, ("cache_leftpad",), "has no left padding"),
    Rule(NO_CACHE, ("leftpad",), REFUSES, ("cache_leftpad",),
         "has no left padding: it takes a mask"),
    Rule(("fa2",), ("paged", "batch_idx"), REFUSES, ("page_table", "cache_batch_idx"),
         "takes no cache_batch_idx together with pages"),
    Rule(("fa2",), ("paged", "leftpad"), REFUSES, ("page_table", "cache_leftpad"),
         "takes no cache_leftpad together with pages"),
    Rule(("fa2",), ("paged", "page_not_256"), REFUSES, ("page_table",),
         "wants pages of a multiple of 256 tokens"),
    Rule(("fa4", "sglang-fa4"), ("paged", "ampere_or_sm120"), REFUSES, ("page_table",),
         "has no pages on compute capability 8.x and 12.x"),
    Rule(("flashinfer",), ("paged",), REFUSES, ("page_table",),
         "takes lists of pages (indptr, indices, last_page_len) in place of a table"),
    Rule(("flashinfer",), ("dense", "lengths"), REFUSES, ("k_cache", "v_cache"),
         "has no dense cache with lengths: view it as pages"),
    Rule(("sdpa",), ("paged",), REFUSES, ("page_table",),
         "has no pages: gather the keys of every sequence first, which copies the cache"),
    Rule(("flex",), ("paged",), REFUSES, ("page_table",),
         "has pages only through its experimental PagedAttention and a block mask"),
    Rule(("sdpa",), ("lengths",), REFUSES, ("cache_seqlens",),
         "has no lengths: they become a dense mask"),
    Rule(("flex",), ("lengths",), REFUSES, ("cache_seqlens",),
         "has no lengths: they go into a mask_mod and a block mask made for every step"),
    Rule(("sglang-fa3", *SGLANG_FA4), ("integer_lengths", "paged"), REFUSES, ("cache_seqlens",),
         "expands an int cache_seqlens to one entry per page, not per sequence"),
    Rule(("sglang-fa3",), ("integer_lengths", "batch_idx"), REFUSES, ("cache_seqlens",),
         "expands an int cache_seqlens to one entry per cache row, not per sequence"),
    Rule(("fa2",), ("ragged_q", "lengths"), REFUSES, ("cu_seqlens_q",),
         "takes no ragged queries in its cache call"),
    Rule(FA3, ("unbounded_q",), REFUSES, ("cu_seqlens_q", "max_seqlen_q"),
         "wants max_seqlen_q with cu_seqlens_q"),
    Rule(NO_CACHE, ("ragged_q",), REFUSES, ("cu_seqlens_q",),
         "takes no packed sequences without nested tensors or a document mask"),
    Rule(("fa2", "flashinfer", *NO_CACHE), ("seqused_q",), REFUSES, ("seqused_q",),
         "has no seqused_q"),
)  # fmt: skip

_MASKS = (
    Rule(SGLANG_FA4, ("open_right",), ALTERS, _WINDOW,
         "takes the -1 on the right for a real offset and hides the newest key"),
    Rule(SGLANG_FA4, ("open_left",), ALTERS, _WINDOW,
         "takes the -1 on the left for a real offset: (-1, 0) hides nothing, others too much"),
    Rule(("fa4",), ("open_side",), ALTERS, _WINDOW,
         "takes -1 for a real offset; unbounded is None there"),
    Rule(("flashinfer",), ("right",), REFUSES, _WINDOW, "has a left window only"),
    Rule(("sdpa",), ("local",), REFUSES, _WINDOW, "has no window: it takes a dense mask"),
    Rule(("flex",), ("local",), REFUSES, _WINDOW, "has no window: it takes a mask_mod"),
    Rule(SGLANG_FA4, ("chunk",), ALTERS, ("attention_chunk",), "drops attention_chunk"),
    Rule(("fa2", "fa4", "flashinfer", *NO_CACHE), ("chunk",), REFUSES, ("attention_chunk",),
         "has no attention_chunk"),
    Rule(("fa4",), ("mask_mod", "causal"), ALTERS, ("mask_mod", "causal"),
         "drops causal where a mask_mod is given"),
    Rule(("fa4",), ("mask_mod", "local"), ALTERS, ("mask_mod", "window_size"),
         "drops the window where a mask_mod is given"),
    Rule(SGLANG_FA4, ("mask_mod",), ALTERS, ("mask_mod",), "swallows mask_mod unseen"),
    Rule(SGLANG_FA4, ("block_sparse",), ALTERS, ("block_sparse_tensors",),
         "swallows block_sparse_tensors unseen"),
    Rule((*FLASH[:2], "sglang-fa3", "sdpa"), ("mask_mod",), REFUSES, ("mask_mod",),
         "has no mask_mod"),
    Rule(("flashinfer",), ("mask_mod",), REFUSES, ("mask_mod",),
         "has no mask_mod: it takes a packed mask"),
    Rule((*FLASH[:2], "sglang-fa3", "flashinfer", "sdpa"), ("block_sparse",), REFUSES,
         ("block_sparse_tensors",), "has no block-sparse tensors in this call"),
    Rule((*FLASH[:2], "sglang-fa3", *SGLANG_FA4, "flashinfer", *NO_CACHE), ("gather",), REFUSES,
         ("gather_kv_indices",), "has no keys gathered by index"),
    Rule(("sdpa",), ("causal", "offset"), ALTERS, ("causal",),
         "aligns is_causal to the first key, not to the last one"),
)  # fmt: skip

_SCORES = (
    Rule(("sdpa",), ("softcap",), REFUSES, ("softcap",), "has no softcap"),
    Rule(("flex",), ("softcap",), REFUSES, ("softcap",), "has no softcap: it takes a score_mod"),
    Rule(("fa4",), ("softcap", "score_mod"), REFUSES, ("softcap", "score_mod"),
         "takes softcap or a score_mod, not both"),
    Rule(SGLANG_FA4, ("softcap", "score_mod"), REFUSES, ("softcap", "score_mod"),
         "takes softcap or a score_mod, not both"),
    Rule(("fa2",), ("alibi", "causal", "lse"), ALTERS, ("alibi_slopes",),
         "returns an lse that is larger by the slope times the query's position"),
    Rule((*FA3, "fa4"), ("alibi",), REFUSES, ("alibi_slopes",), "has no ALiBi slopes"),
    Rule(SGLANG_FA4, ("alibi",), ALTERS, ("alibi_slopes",), "swallows alibi_slopes unseen"),
    Rule(("flashinfer",), ("alibi",), ALTERS, ("alibi_slopes",),
         "makes its own slopes, adds them before the softcap and without aligning to the last key"),
    Rule(NO_CACHE, ("alibi",), REFUSES, ("alibi_slopes",),
         "has no ALiBi slopes: they become a bias or a score_mod"),
    Rule(("fa2", "fa3", "sdpa"), ("sinks",), REFUSES, ("sinks",), "has no attention sinks"),
    Rule(("flex",), ("sinks",), REFUSES, ("sinks",),
         "has no attention sinks: rescale the output by the lse afterwards"),
    Rule(("fa2", "fa3", "sdpa"), ("score_mod",), REFUSES, ("score_mod",), "has no score_mod"),
    Rule(("sglang-fa3",), ("score_mod",), ALTERS, ("score_mod",),
         "drops score_mod on its FA3 path"),
    Rule(("flashinfer",), ("score_mod",), REFUSES, ("score_mod",),
         "takes a variant written in C++ in place of a score_mod"),
    Rule(("fa2", "fa3", "sglang-fa3", "fa4", "flashinfer", *NO_CACHE), ("rel_bias",), REFUSES,
         ("rel_bias",), "has no relative bias"),
    Rule(("sglang-fa4",), ("rel_bias",), REFUSES, ("rel_bias",),
         "takes biases of a multiple of 128 positions, on compute capability 9.x to 11.x",
         "the number of positions"),
    Rule(("fa2", "fa4", "sdpa"), ("dropout",), REFUSES, ("dropout_p",),
         "has no dropout over a cache"),
)  # fmt: skip

_STORAGE = (
    Rule(FA3, ("descale", "half"), ALTERS, _DESCALES, "ignores descales of 16-bit tensors"),
    Rule(("fa2", *NO_CACHE), ("descale",), REFUSES, _DESCALES, "has no descales"),
    Rule(("fa4",), ("descale",), REFUSES, _DESCALES, "takes no descales in its public functions"),
    Rule(SGLANG_FA4, ("descale",), REFUSES, _DESCALES,
         "raises NotImplementedError for descales, or takes a few forms of FP8 in later versions",
         "the version and the GPU"),
    Rule(("flashinfer",), ("descale",), REFUSES, _DESCALES,
         "takes one scale for a whole tensor, none per sequence or head",
         "the shape of the scales"),
    Rule((*FLASH, "sglang-fa3", "sglang-fa4-sm120", "flashinfer", *NO_CACHE), ("mx",), REFUSES, _MX,
         "has no MXFP8 scales"),
    Rule(("sglang-fa4",), ("mx",), REFUSES, _MX, "takes MXFP8 on compute capability 10.x only",
         "the GPU"),
    Rule(("fa2", *NO_CACHE), ("qv",), REFUSES, ("qv",), "has no qv"),
    Rule(("flashinfer",), ("qv",), REFUSES, ("qv",), "has absorbed MLA in a class of its own"),
    Rule(FA3, ("qv",), REFUSES, ("qv",),
         "takes qv with 16 bits, D <= 64 and Dv >= 256 only", "dtypes and head dimensions"),
    Rule(("fa4",), ("qv",), REFUSES, ("qv",),
         "takes qv on compute capability 10.x with D 64 and Dv 512 only",
         "the GPU and the head dimensions"),
    Rule(("fa4",), ("qv", "softcap"), REFUSES, ("qv", "softcap"), "takes no softcap with qv"),
    Rule(("fa4",), ("qv", "local"), REFUSES, ("qv", "window_size"), "takes no window with qv"),
    Rule(SGLANG_FA4, ("qv",), REFUSES, ("qv",),
         "raises NotImplementedError for qv in most versions", "the version"),
    Rule(SGLANG_FA4, ("only_qv",), ALTERS, ("only_qv",), "swallows only_qv unseen"),
    Rule(("fa2", "fa3", "fa4", "flashinfer", *NO_CACHE), ("only_qv",), REFUSES, ("only_qv",),
         "has no only_qv"),
)  # fmt: skip

_RESULTS = (
    Rule(("fa2", "fa3", "fa4", *NO_CACHE), ("out",), REFUSES, ("out",),
         "takes no output tensor from the caller"),
    Rule(("sglang-fa3",), ("out",), ALTERS, ("out",),
         "calls again without out where the kernel refuses it, and leaves the tensor stale",
         "the kernel's version"),
    Rule(("sglang-fa4",), ("out",), ALTERS, ("out",), "ignores out in older versions",
         "the version"),
    Rule(("fa2",), ("lse",), ALTERS, ("return_softmax_lse",),
         "gives +inf, not -inf, as the lse of a row that sees no key",
         "whether a row sees no key"),
    Rule(("flashinfer",), ("lse",), ALTERS, ("return_softmax_lse",),
         "returns the lse to the base 2, token first"),
    Rule(("sdpa",), ("lse",), REFUSES, ("return_softmax_lse",), "returns no lse"),
    Rule(("fa4", "sglang-fa4"), ("splits", "ampere_or_sm120"), REFUSES, ("num_splits",),
         "splits no keys on compute capability 8.x and 12.x"),
)  # fmt: skip

RULES = (*_MACHINE, *_APPEND, *_ROTATION, *_PLACES, *_MASKS, *_SCORES, *_STORAGE, *_RESULTS)

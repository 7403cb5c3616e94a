"""The cases of the contract suite, grouped by one comment each, and what the suite covers.

`T..` numbers name the entries of `COVERED`; a test or case carries them in its name.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from conftest import DEVICE
from torch import Tensor

import kvattn
from kvattn import errors as E
from kvattn.testing import Case, Inputs, probe

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8

COVERED = dict(enumerate((
    "FA2 kvcache grid", "FA3 kvcache grid", "FA4 kvcache grid", "FA3 output grid",
    "FA4 output grid", "ragged grid", "mod grid", "rel_bias and split grid",
    "more queries than keys", "no keys at all", "no keys with a sink", "empty rows and splits",
    "extreme sinks and logits", "a sink counts once", "a sink and an empty window",
    "filling the capacity", "append into an empty row", "append past the window",
    "append without queries", "append of nothing", "append across pages",
    "append leaves the rest alone", "rotary with Sn != Sq", "rotary without a local mask",
    "rotary with a window or chunk", "rotary with a window over the whole cache",
    "rotary and leftpad", "rotary_seqlens", "partial rotary, both pairings", "the last table row",
    "packed and padded mixed", "rotary restarts with every sequence", "cache_batch_idx",
    "cache_batch_idx with pages", "duplicates with an append", "leftpad, pages and append",
    "leftpad, chunks and slopes", "chunks", "windows in every spelling", "signed windows",
    "the diagonal under (W, -1)", "tiny and huge softcap", "the order of score edits",
    "odd softmax scales", "slopes by head and batch", "descales by batch and head",
    "descales of bf16", "FP8", "MXFP8 layouts", "MXFP8 by token, extreme exponents",
    "rel_bias widths", "rel_bias_prep_cache reused", "CUDA graphs", "qv", "only_qv",
    "v is a slice of k", "score_mod", "mask_mod and blocks", "a scalar length", "no lengths",
    "a strided out", "an overlapping out", "layout of the lse", "merging halves",
    "hints and repeats", "garbage in the page table", "NaN in dead slots",
    "offsets beyond 2 ** 31", "strided caches", "bad inputs", "batch invariance", "head dims",
    "no argument is ignored", "long context", "norms of q and k",
), start=1))  # fmt: skip
ON_A_GPU_ONLY = {53}


def identity(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score


def slopes_as_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - 0.25 * (h + 1) * (i - j).abs()


def ragged_mod(
    score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, info: Any, aux: Any
) -> Tensor:
    return score + 0.1 * (info.seqlen_k - j) + 0.2 * (info.offset_q + i) - 0.3 * b


def causal_as_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor, info: Any, aux: Any) -> Tensor:
    return j <= i + info.seqlen_k - info.seqlen_q


def signed_window(left: int | None, right: int | None) -> Any:
    """FlashAttention-4's window: None is unbounded, a negative bound is a real offset."""

    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor, info: Any, aux: Any) -> Tensor:
        distance = i + info.seqlen_k - info.seqlen_q - j
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left is not None:
            seen = seen & (distance <= left)
        return seen if right is None else seen & (distance >= -right)

    return keep


def every_third(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + j + h) % 3 != 0


FA2: dict[str, Any] = {"dtype": F16, "heads": 6, "kv_heads": 3}
# FlashAttention-2's grid: fp16, heads of every kind, slopes, paged by 256, dense with leftpad.
GRID_FA2 = [
    Case("T1-1x128-mha", seqlen_q=1, lengths=(128, 60), **{**FA2, "kv_heads": 6}),
    Case("T1-1x339-mqa-alibi", lengths=(339, 1), alibi="batch", **{**FA2, "kv_heads": 1}),
    Case("T1-3x799-new-rotary-causal-paged", seqlen_q=3, lengths=(799, 255), new=3, rotary=32,
         causal=True, page_size=256, **FA2),
    Case("T1-64x256-fewer-new-neox-local", seqlen_q=64, lengths=(200, 131), new=17, rotary=64,
         rotary_interleaved=False, window=(50, 9), dim=128, **FA2),
    Case("T1-16x500-leftpad-alibi-causal", seqlen_q=16, lengths=(500, 16), leftpad=(37, 5),
         alibi="heads", causal=True, new=16, **FA2),
    Case("T1-64x200-batch-idx-rotary-half", seqlen_q=64, lengths=(136, 200), new=64, rotary=16,
         rows=5, batch_idx=(3, 0), capacity=300, **FA2),
    Case("T1-128x128-causal-d80", seqlen_q=128, lengths=128, causal=True, dim=80, **FA2),
    Case("T1-64x128-local-d59-paged", seqlen_q=64, lengths=(128, 77), window=(20, 3), dim=59,
         page_size=256, new=1, rotary=16, **FA2),
    Case("T1-1x256-d256-new", lengths=(255, 3), new=1, dim=256, rotary=256, **FA2),
]  # fmt: skip

FA3: dict[str, Any] = {"dtype": BF16, "batch": 5, "lengths": (0, 1, 63, 100, 130)}
# FlashAttention-3's grid: ragged queries and new tokens, any page size, cache rows, chunks.
GRID_FA3 = [
    Case("T2-decode-page1-new", new=1, page_size=1, rotary=32, causal=True, **FA3),
    Case("T2-decode-page4-batch-idx-leftpad", new=1, page_size=4, rows=10,
         batch_idx=(9, 2, 4, 0, 7), leftpad=(0, 1, 40, 99, 3), rotary=16, causal=True, **FA3),
    Case("T2-ragged-page128-new-chunk", seqlen_q=(3, 0, 64, 1, 9), spare_q=2, new=(3, 0, 20, 1, 5),
         page_size=128, chunk=33, causal=True, rotary=16, rotary_interleaved=False, **FA3),
    Case("T2-ragged-q-padded-new", seqlen_q=(2, 5, 0, 1, 7), new=3, window=(17, 4), rotary=32,
         page_size=4, **FA3),
    Case("T2-T31-padded-q-ragged-new", seqlen_q=4, new=(4, 0, 2, 1, 3), window=(9, 0), rotary=32,
         **FA3),
    Case("T2-T31-ragged-q-padded-new-none-seen", seqlen_q=(0, 0, 0, 0, 2), new=2, rotary=8,
         causal=True, **FA3),
    Case("T2-chunk-not-causal", seqlen_q=20, new=20, chunk=11, rotary=32, **FA3),
    Case("T2-rotary-seqlens", seqlen_q=2, new=2, rotary=32, rotary_base=(0, 0, 31, 50, 65),
         causal=True, page_size=16, **FA3),
    Case("T2-fp8-page4-new", seqlen_q=3, new=3, rotary=16, causal=True, page_size=4,
         descale="heads", **{**FA3, "dtype": E4M3}),
    Case("T2-dv256", seqlen_q=5, new=5, dim=64, dim_v=256, page_size=4, causal=True, **FA3),
    Case("T2-dv-smaller", seqlen_q=2, dim=192, dim_v=128, causal=True, **FA3),
    Case("T2-splits", options={"num_splits": 3}, new=1, page_size=128, causal=True, **FA3),
]  # fmt: skip

FA4: dict[str, Any] = {"dtype": BF16, "batch": 3, "lengths": (97, 0, 200), "sinks": BF16}
# FlashAttention-4's grid: sinks, windows, pages, no append.
GRID_FA4 = [
    Case("T3-sink-decode", dim=128, **FA4),
    Case("T3-sink-causal-page1", seqlen_q=16, causal=True, page_size=1, dim=64, **FA4),
    Case("T3-sink-local-page4", seqlen_q=16, window=(20, 20), page_size=4, dim=64, **FA4),
    Case("T3-sink-causal-local-ragged-page128", seqlen_q=(1, 7, 30), causal=True, window=(11, 0),
         page_size=128, dim=128, **FA4),
    Case("T3-splits", options={"num_splits": 3}, seqlen_q=2, page_size=128, **FA4),
    Case("T3-sink-fp16", **{**FA4, "sinks": F16, "dtype": F16}),
]  # fmt: skip

# Attention over whole tensors: odd sizes, softcap, qv, FP8 descales, windows on both sides.
GRID_OUTPUT = [
    Case("T4-239x1-softcap", varlen=True, seqlen_q=1, lengths=239, softcap=15.0, query_scale=3.75,
         pass_lengths="none", capacity=239, dtype=BF16),
    Case("T4-113x203-softcap-causal", varlen=True, seqlen_q=113, lengths=203, softcap=15.0,
         causal=True, dtype=F16, query_scale=3.75),
    Case("T4-64x63-causal", varlen=True, seqlen_q=64, lengths=63, causal=True, dtype=BF16),
    Case("T4-T54-qv-dv256", varlen=True, seqlen_q=3, lengths=79, qv=True, dim=64, dim_v=256,
         causal=True, dtype=BF16),
    Case("T4-fp8-descales", varlen=True, seqlen_q=3, lengths=(79, 130), descale="heads",
         dtype=E4M3, causal=True),
    Case("T4-e5m2-descales", seqlen_q=3, lengths=(79, 130), descale="heads", dtype=E5M2),
    Case("T4-pack-gqa", seqlen_q=2, lengths=99, heads=12, kv_heads=2,
         options={"pack_gqa": True, "num_splits": 2}, causal=True, dtype=BF16),
    Case("T5-two-sided", varlen=True, seqlen_q=50, lengths=70, window=(5, 9), sinks=F32),
    Case("T5-right-negative", seqlen_q=50, lengths=70, mask_mod=signed_window(None, -3),
         options={"aux_tensors": []}),
    Case("T5-left-negative", seqlen_q=50, lengths=70, mask_mod=signed_window(-4, None),
         options={"aux_tensors": []}, sinks=F32),
    Case("T5-empty-window", seqlen_q=9, lengths=9, mask_mod=signed_window(1, -2),
         options={"aux_tensors": []}, sinks=F32),
]  # fmt: skip

VARLEN: dict[str, Any] = {"varlen": True, "batch": 4, "seqlen_q": (5, 0, 17, 1)}
# Ragged batches: zero lengths anywhere, used lengths below the borders, pages, padded keys.
GRID_RAGGED = [
    Case("T6-packed", lengths=(9, 4, 17, 0), packed=(9, 4, 17, 0), pass_lengths="none", **VARLEN),
    Case("T6-packed-causal-zero-keys", lengths=(0, 0, 30, 2), packed=(0, 0, 30, 2), causal=True,
         spare_q=3, pass_lengths="none", **VARLEN),
    Case("T6-seqused-k", lengths=(3, 0, 16, 1), packed=(9, 4, 17, 2), causal=True, **VARLEN),
    Case("T6-seqused-q-and-k", lengths=(3, 0, 16, 1), packed=(9, 4, 17, 2), used_q=(2, 0, 9, 1),
         causal=True, spare_q=1, out=True, **VARLEN),
    Case("T6-padded-q-seqused-q", varlen=True, batch=3, seqlen_q=6, used_q=(6, 0, 2),
         lengths=(8, 8, 3), causal=True, out=True),
    Case("T6-paged", lengths=(33, 0, 17, 100), page_size=16, window=(20, 5), **VARLEN),
    Case("T6-padded-keys", lengths=(33, 0, 17, 100), sinks=F32, dtype=F16, **VARLEN),
    Case("T6-packed-mqa-bf16", lengths=(9, 4, 17, 8), packed=(9, 4, 17, 8), heads=5, kv_heads=1,
         dtype=BF16, causal=True, **VARLEN),
    Case("T6-empty-batch", varlen=True, batch=0, seqlen_q=(), lengths=(), packed=()),
    Case("T6-empty-padded-batch", batch=0, lengths=()),
    Case("T6-no-query-rows", seqlen_q=0, lengths=(3, 0), new=1),
]  # fmt: skip

MODS: dict[str, Any] = {"batch": 3, "seqlen_q": (4, 1, 9), "lengths": (40, 7, 9)}
MODS["options"] = {"aux_tensors": []}
# Score and mask callables, of both signatures, over dense and paged caches.
GRID_MODS = [
    Case("T7-identity", seqlen_q=4, lengths=40, score_mod=identity),
    Case("T7-slopes-page4", seqlen_q=4, lengths=40, score_mod=slopes_as_mod, page_size=4),
    Case("T7-ragged-page1", score_mod=ragged_mod, page_size=1, **MODS),
    Case("T7-ragged-leftpad-page128", score_mod=ragged_mod, mask_mod=causal_as_mod, page_size=128,
         leftpad=(3, 0, 2), **MODS),
    Case("T7-mask-and-causal", seqlen_q=9, lengths=30, mask_mod=every_third, causal=True,
         dtype=BF16),
    Case("T7-mod-append-softcap-sinks", score_mod=ragged_mod, new=(4, 1, 9), softcap=4.0,
        causal=True,
         sinks=F32, dtype=F16, **MODS),
]  # fmt: skip

# Relative bias, splits and everything at once.
GRID_BIAS = [
    Case("T8-rel-bias-causal", seqlen_q=70, lengths=130, rel_bias=128, causal=True, dtype=BF16),
    Case("T8-rel-bias-local-paged", seqlen_q=(5, 1), lengths=(130, 64), rel_bias=40,
         window=(30, 9), page_size=64, dtype=BF16),
    Case("T8-rel-bias-not-causal-softcap-sinks", seqlen_q=9, lengths=(40, 9), rel_bias=7,
         softcap=5.0, sinks=F32),
    Case("T8-rel-bias-varlen", varlen=True, seqlen_q=(3, 9), lengths=(12, 9), packed=(12, 9),
         rel_bias=300, causal=True, options={"rel_bias_prep_cache": {}}),
    Case("T8-split-decode", lengths=(400, 3), options={"num_splits": 8}, dtype=BF16, page_size=32,
         heads=16, kv_heads=2),
    Case("T8-everything", seqlen_q=(3, 1), lengths=(50, 20), new=(2, 1), page_size=8, rows=4,
         batch_idx=(2, 1), leftpad=(7, 0), rotary=16, rotary_base=(9, 100), window=(12, 2),
             chunk=16,
         softcap=6.0, sinks=F32, alibi="batch", rel_bias=11, score_mod=slopes_as_mod,
         mask_mod=every_third, qv=True, dim_v=48, descale="heads", layout="heads_first", out=True,
         spare_q=1),
]  # fmt: skip

# Append: lengths, slots, inactive rows, pages of every size, odd memory layouts.
APPEND = [
    Case("T20-new-of-zero-tokens", seqlen_q=2, lengths=(3, 0), new=0),
    Case("T21-page1", lengths=(3, 0), new=5, page_size=1),
    Case("T21-page3", lengths=(8, 2), new=7, page_size=3, causal=True, seqlen_q=7),
    Case("T21-page16", lengths=(15, 31), new=33, page_size=16),
    Case("T21-page256", lengths=(250, 511), new=9, page_size=256, dtype=BF16),
    Case("T36-leftpad-pages", batch=3, lengths=(30, 9, 4), leftpad=(5, 9, 0), new=(3, 1, 0),
         page_size=4, seqlen_q=(3, 1, 2), causal=True),
    Case("T22-inactive-rows", batch=4, lengths=(-1, 7, -1, 0), new=2, seqlen_q=2, page_size=4,
         sinks=F32, causal=True),
    Case("T22-inactive-rows-dense", batch=3, lengths=(4, -1, 7), new=(1, 2, 3), rotary=8,
         seqlen_q=(1, 2, 0)),
    Case("T22-by-slot", batch=3, lengths=(5, 0, 20), new=2, seqlen_q=2, page_size=4, by_slot=True,
         causal=True, rotary=16),
    Case("T22-by-slot-ragged", batch=3, lengths=(5, 0, 20), new=(2, 3, 0), seqlen_q=(2, 3, 1),
         page_size=8, by_slot=True, causal=True, dtype=BF16, cache_dtype=E4M3, descale="token"),
    Case("T22-by-slot-inactive", batch=3, lengths=(-1, 5, 0), new=2, seqlen_q=2, page_size=4,
         by_slot=True, causal=True, rotary=8),
    Case("T22-by-slot-dense", lengths=(5, 0), new=3, by_slot=True, leftpad=(2, 0)),
    Case("T34-batch-idx-pages", lengths=(9, 40), new=1, page_size=8, rows=7, batch_idx=(6, 2)),
    Case("T59-scalar-length", seqlen_q=(1, 3, 0), batch=3, lengths=9, new=2, pass_lengths="int",
         page_size=4, causal=True),
    Case("T59-scalar-length-batch-idx", lengths=9, new=1, pass_lengths="int", rows=5,
         batch_idx=(4, 1)),
    Case("T60-no-lengths", lengths=24, pass_lengths="none", seqlen_q=2),
    Case("T60-no-lengths-paged", lengths=24, pass_lengths="none", page_size=8, leftpad=(3, 24)),
    Case("T69-heads-first", lengths=(9, 30), new=2, layout="heads_first", dtype=BF16, rotary=8),
    Case("T69-heads-first-paged", lengths=(9, 30), new=2, layout="heads_first", page_size=8),
    Case("T69-k-and-v-in-one", lengths=(9, 30), new=2, layout="kv", page_size=16, dtype=F16),
    Case("T69-joined", lengths=(9, 30), new=2, layout="joined", dim_v=16, page_size=4),
    Case("T69-one-layer-of-three", lengths=(9, 30), new=2, layout="layers", page_size=8),
    Case("T56-mla-slice", seqlen_q=2, lengths=(9, 30), new=2, layout="alias", dim=576, dim_v=512,
         heads=4, kv_heads=1, dtype=BF16, page_size=16, causal=True),
]  # fmt: skip

# Absorbed MLA: a second dot product with the values, or nothing else.
MLA = [
    Case("T54-qv-pages-append", seqlen_q=2, lengths=(9, 30), new=2, qv=True, dim=64, dim_v=512,
         heads=4, kv_heads=1, dtype=BF16, page_size=16, causal=True, rotary=64),
    Case("T54-qv-descales-softcap", seqlen_q=3, lengths=(9, 30), qv=True, dim=64, dim_v=128,
         descale="heads", softcap=3.0, cache_dtype=E4M3),
    Case("T55-only-qv", seqlen_q=3, lengths=(9, 30), qv=True, only_qv=True, dim_v=64, causal=True),
    Case("T55-only-qv-ragged-paged", seqlen_q=(3, 1), lengths=(9, 30), qv=True, only_qv=True,
         kv_heads=1, dim_v=128, page_size=4, dtype=BF16),
]  # fmt: skip

# Narrow caches.
NARROW = [
    Case("T46-batch-idx-gqa", batch=3, heads=6, kv_heads=3, lengths=(9, 30, 1), descale="heads",
         rows=6, batch_idx=(5, 0, 2), new=2, cache_dtype=E4M3, dtype=BF16),
    Case("T46-number", lengths=(9, 30), descale="number", cache_dtype=E5M2, dtype=F16, new=1),
    Case("T47-bf16", lengths=(9, 30), descale="heads", dtype=BF16),
    Case("T47-append-bf16", lengths=(9, 30), descale="heads", dtype=BF16, new=1),
    Case("T47-append-fp32-into-bf16", lengths=(9, 30), descale="heads", cache_dtype=BF16, new=1),
    Case("T48-fp8-all", seqlen_q=2, lengths=(9, 30), dtype=E4M3, page_size=8),
    Case("T48-e5m2-query-e4m3-cache", lengths=(9, 30), dtype=E5M2, cache_dtype=E4M3),
    Case("T48-bf16-query", lengths=(9, 30), dtype=BF16, cache_dtype=E4M3, descale="heads", new=3,
         rotary=16, causal=True, seqlen_q=3),
    Case("T48-append-fp32", lengths=(9, 30), cache_dtype=E5M2, new=3, page_size=8),
    Case("T48-append-fp8-as-is", lengths=(9, 30), cache_dtype=E4M3, new_dtype=E4M3, new=3,
         descale="heads"),
    Case("T48-fp8-query-bf16-new", lengths=(9, 30), dtype=E4M3, new_dtype=BF16, new=3,
         descale="heads"),
    Case("T48-int8-by-token", lengths=(9, 30), dtype=BF16, cache_dtype=INT8, descale="token", new=3,
         page_size=8),
    Case("T48-int8", lengths=(9, 30), dtype=F16, cache_dtype=INT8, descale="heads", new=2),
    Case("T48-fp32-over-bf16", lengths=(9, 30), cache_dtype=BF16, new=2),
    Case("T48-fp64", lengths=(9, 30), dtype=F64, new=2, rotary=16, causal=True, seqlen_q=2),
    Case("T48-fp64-over-fp8", lengths=(9, 30), dtype=F64, cache_dtype=E4M3, new=2),
]  # fmt: skip

MX: dict[str, Any] = {"dtype": E4M3, "dim": 64, "seqlen_q": 2, "lengths": (9, 100), "causal": True}
# MXFP8: every layout, page sizes on and off the tile, appends that quantise.
MXFP8 = [
    Case("T49-plain-page64", sfq="plain", sfk="plain", sfv="plain", page_size=64, **MX),
    Case("T49-interleaved-page128", sfq="plain", sfk="interleaved", sfv="interleaved",
         page_size=128, **MX),
    Case("T49-interleaved-dense", sfq="interleaved", sfk="interleaved", sfv="interleaved",
         capacity=131, **{**MX, "dim": 160}),
    Case("T49-ragged-q", sfq="plain", sfk="plain", sfv="plain", page_size=64,
         **{**MX, "seqlen_q": (3, 1)}),
    Case("T49-append-bf16", sfq="plain", sfk="plain", sfv="plain", page_size=64, new=2,
         new_dtype=BF16, **MX),
    Case("T49-append-interleaved", sfq="plain", sfk="interleaved", sfv="interleaved",
         page_size=128, new=2, new_dtype=F32, **MX),
    Case("T49-append-descaled", sfq="plain", sfk="plain", sfv="plain", page_size=64, new=2,
         new_dtype=BF16, descale="heads", **MX),
    Case("T50-values-by-token", sfq="plain", sfk="plain", sfv="tokens", page_size=64, **MX),
    Case("T50-values-only", sfv="plain", value_dtype=E4M3, page_size=64, **{**MX, "dtype": BF16}),
    Case("T50-values-only-by-token", sfv="tokens", value_dtype=E4M3, page_size=32,
         **{**MX, "dtype": BF16}),
    Case("T50-wide-values", sfq="plain", sfk="plain", value_dtype=BF16, **MX),
    Case("T50-packed-keys", sfq="plain", sfk="plain", sfv="plain", varlen=True, packed=(9, 100),
         **MX),
]  # fmt: skip

LATE: dict[str, Any] = {"norm": "both", "dtype": BF16, "lengths": (9, 30), "causal": True}
# Norms of q and k before the rotation and the append, in every way that either can be read.
NORMS = [
    Case("T75-decode-page16", new=1, rotary=32, page_size=16, **LATE),
    Case("T75-decode-neox-d128", new=1, rotary=128, rotary_interleaved=False, dim=128, page_size=16,
         norm_dtype=BF16, **LATE),
    Case("T75-draft-partial-rotary", seqlen_q=3, new=3, rotary=16, page_size=4, window=(20, 0),
         sinks=F32, **LATE),
    Case("T75-no-rotary", seqlen_q=2, new=2, **LATE),
    Case("T75-q-alone-without-new-keys", seqlen_q=2, **{**LATE, "norm": "q"}),
    Case("T75-q-alone", new=1, rotary=32, **{**LATE, "norm": "q"}),
    Case("T75-k-alone", new=2, seqlen_q=2, rotary=32, **{**LATE, "norm": "k"}),
    Case("T75-fp32", seqlen_q=5, new=5, rotary=8, page_size=4, **{**LATE, "dtype": F32}),
    Case("T75-fp64", seqlen_q=2, norm="q", dtype=F64, norm_dtype=F64, lengths=(9, 30)),
    Case("T75-prefill-ragged", seqlen_q=(40, 0, 17), batch=3, new=(40, 2, 17), dim=64, rotary=64,
         **{**LATE, "lengths": (9, 30, 0)}),
    Case("T75-prefill-page64", seqlen_q=70, new=70, dim=64, rotary=32, page_size=64, **LATE),
    Case("T75-slots-ragged", seqlen_q=(3, 1), new=(3, 1), by_slot=True, page_size=4, rotary=16,
         **LATE),
    Case("T75-leftpad-batch-idx-chunk", seqlen_q=3, new=4, leftpad=(7, 0), rows=5, batch_idx=(4, 1),
         chunk=8, rotary=32, **LATE),
    Case("T75-inactive", batch=3, new=2, seqlen_q=2, rotary=16, **{**LATE, "lengths": (9, -1, 7)}),
    Case("T75-fp8-cache", seqlen_q=2, new=2, rotary=32, page_size=8, cache_dtype=E4M3,
         descale="heads", **LATE),
    Case("T75-fp8-by-token", new=3, cache_dtype=E5M2, descale="token", rotary=16, **LATE),
    Case("T75-fp8-queries", new=1, rotary=16, **{**LATE, "dtype": E4M3}),
    Case("T75-int8", new=2, rotary=32, cache_dtype=INT8, descale="heads", **LATE),
    Case("T75-mx-keys-of-bf16", new=2, page_size=64, dim=64, sfv="plain", value_dtype=E4M3, **LATE),
    Case("T75-mx-keys", norm="k", sfq="plain", sfk="plain", sfv="plain", page_size=64, new=2,
         new_dtype=BF16, **MX),
    Case("T75-qv", seqlen_q=3, new=3, qv=True, dim=64, dim_v=256, heads=6, kv_heads=1, rotary=64,
         page_size=4, **LATE),
    Case("T75-two-halves-d80", seqlen_q=3, new=3, dim=80, rotary=64, alibi="heads", **LATE),
    Case("T75-d59", seqlen_q=2, new=2, dim=59, rotary=16, **LATE),
    Case("T75-invariant", new=1, seqlen_q=1, rotary=32, options={"batch_invariant": True}, **LATE),
    Case("T75-large-eps", new=1, rotary=32, options={"norm_eps": 10.0}, **LATE),
]  # fmt: skip

# Head dims, group sizes and many keys.
SHAPES = [
    Case("T72-d59", dim=59, seqlen_q=3, lengths=(9, 70), causal=True, dtype=BF16, new=3),
    Case("T72-d80", dim=80, seqlen_q=3, lengths=(9, 70), page_size=16, dtype=BF16),
    Case("T72-d96-g5", dim=96, heads=15, kv_heads=3, lengths=(9, 70), dtype=F16),
    Case("T72-d192-dv128", dim=192, dim_v=128, lengths=(9, 70), dtype=BF16, new=1),
    Case("T72-d256", dim=256, lengths=(9, 70), dtype=BF16, seqlen_q=2),
    Case("T72-d1-dv3", dim=1, dim_v=3, lengths=(9, 70), scale=1.0),
    Case("T72-d8-dv512-mqa", dim=8, dim_v=512, heads=7, kv_heads=1, lengths=(9, 70)),
    Case("T74-131072-keys-1-query", batch=1, lengths=131072, heads=2, kv_heads=1, dtype=BF16),
    Case("T74-131072-keys-16-queries", batch=1, seqlen_q=16, lengths=131056, new=16, heads=2,
         kv_heads=1, dtype=BF16, causal=True, page_size=256, dim=16),
    Case("T74-131072-keys-window", batch=1, seqlen_q=2, lengths=131072, heads=2, kv_heads=1,
         window=(70000, 0), dim=16),
]  # fmt: skip

GRIDS = (GRID_FA2, GRID_FA3, GRID_FA4, GRID_OUTPUT, GRID_RAGGED, GRID_MODS, GRID_BIAS)
CASES = [case for group in (*GRIDS, APPEND, MLA, NARROW, MXFP8, NORMS, SHAPES) for case in group]


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def assert_refusal(error: E.BackendRefusesError) -> None:
    """A refusal names the backend and says why in a sentence."""
    backend, _, reason = str(error.got).partition(": ")
    assert backend.startswith("backend=")
    assert len(reason.split()) > 3, reason


def attend(backend: str, **inputs: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of `flash_attn_with_kvcache`, by the planner where the backend refuses."""
    return _or_planned(kvattn.flash_attn_with_kvcache, backend, inputs)


def attend_varlen(backend: str, *args: Any, **inputs: Any) -> tuple[Tensor, Tensor]:
    return _or_planned(partial(kvattn.flash_attn_varlen_func, *args), backend, inputs)


def probed(case: Case, backend: str) -> tuple[Tensor, Tensor]:
    """`kvattn.testing.probe`, by the planner where the backend refuses."""
    try:
        return probe(case, backend, DEVICE)
    except E.BackendRefusesError as error:
        assert_refusal(error)
        return probe(case, device=DEVICE)


def _or_planned(function: Any, backend: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    inputs = {**inputs, "return_softmax_lse": True}
    try:
        out, lse = function(**inputs, backend=backend)
    except E.BackendRefusesError as error:
        assert_refusal(error)
        out, lse = function(**inputs)
    return out, lse

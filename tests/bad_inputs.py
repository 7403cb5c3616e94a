"""Wrong calls, by the numbers of the contract's list: what to change, and what must be said."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import BF16, E4M3, F16, F32, F64
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kvattn
from kvattn import BlockSparse
from kvattn import errors as E
from kvattn.testing import Case, Inputs, make_inputs

I32, I64 = torch.int32, torch.int64


class Bad(NamedTuple):
    """One wrong call: a good one, changed."""

    number: int  # of the contract's list; 0 for mistakes beyond it
    kind: type[E.KvattnError]
    argument: str  # what the message must name
    shows: str  # what the message must say came
    case: Case
    change: Callable[[Inputs], Inputs]
    function: Callable[..., Any] = kvattn.flash_attn_with_kvcache


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=I32)


DENSE = Case(seqlen_q=2, lengths=(5, 3), capacity=8, out=True)
APPEND = Case(seqlen_q=2, lengths=(5, 3), capacity=8, new=2, out=True)
UNEVEN = Case(seqlen_q=2, lengths=(1, 5), capacity=8, out=True)  # too_small fits the first row
PAGED = Case(seqlen_q=2, lengths=(5, 3), capacity=8, new=2, page_size=4, out=True)
ROTARY = Case(seqlen_q=2, lengths=(5, 3), capacity=8, new=2, rotary=8, causal=True, out=True)
NORMED = Case(seqlen_q=2, lengths=(5, 3), capacity=8, new=2, norm="both", out=True)
RAGGED = Case(seqlen_q=(2, 1), lengths=(5, 3), capacity=8, new=(1, 2), out=True)
ROWS = Case(lengths=(5, 3), capacity=8, new=2, rows=4, batch_idx=(3, 1), out=True)
PADDED = Case(lengths=(5, 3), capacity=8, new=2, leftpad=(1, 3), out=True)
LATENT = Case(lengths=(5, 3), capacity=8, qv=True, dim_v=16, out=True)
VARLEN = Case(seqlen_q=(2, 1), lengths=(5, 3), packed=(5, 3), varlen=True, out=True)
SLOTS = Case(lengths=(5, 3), capacity=8, new=2, page_size=4, by_slot=True, out=True)
SCALED = Case(lengths=(5, 3), capacity=8, new=2, descale="heads", cache_dtype=E4M3, out=True)
BY_TOKEN = Case(lengths=(5, 3), capacity=8, new=2, descale="token", cache_dtype=E4M3, out=True)
MX = Case(lengths=(5, 3), dim=64, dtype=E4M3, page_size=32, sfq="plain", sfk="plain", sfv="plain",
          new=1, new_dtype=BF16)  # fmt: skip


def given(**values: Any) -> Callable[[Inputs], Inputs]:
    """The same change whatever the inputs are."""
    return lambda inputs: values


def cast(name: str, dtype: torch.dtype) -> Callable[[Inputs], Inputs]:
    return lambda inputs: {name: inputs[name].to(dtype)}


def cut(name: str, *index: Any) -> Callable[[Inputs], Inputs]:
    return lambda inputs: {name: inputs[name][index]}


def spread(name: str) -> Callable[[Inputs], Inputs]:
    """The same numbers with a last stride of 2."""
    return lambda inputs: {name: inputs[name].repeat_interleave(2, -1)[..., ::2]}


def made_in_inference_mode(name: str) -> Callable[[Inputs], Inputs]:
    def change(inputs: Inputs) -> Inputs:
        with torch.inference_mode():
            return {name: inputs[name].clone()}

    return change


def elsewhere(name: str) -> Callable[[Inputs], Inputs]:
    return lambda inputs: {name: inputs[name].to("meta")}


def on_two_gpus(inputs: Inputs) -> Inputs:
    """Fake tensors know their device and hold nothing."""
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 2, 8, device=f"cuda:{n}") for n in (0, 1, 0))
    names = dict.fromkeys(inputs)
    return {**names, "q": q, "k_cache": k, "v_cache": v, **_SCALARS}


_SCALARS = {"causal": False, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0}


def tables(columns: int, dtype: torch.dtype = F32, rows: int = 20) -> Inputs:
    return {
        "rotary_cos": torch.ones(rows, columns, dtype=dtype),
        "rotary_sin": torch.ones(rows, columns, dtype=dtype),
    }


def set_to(name: str, *numbers: int) -> Callable[[Inputs], Inputs]:
    return given(**{name: ints(*numbers)})


def wrong_page(page: int) -> Callable[[Inputs], Inputs]:
    def change(inputs: Inputs) -> Inputs:
        table = inputs["page_table"].clone()
        table[1, 0] = page
        return {"page_table": table}

    return change


def blocks(**changes: Any) -> Callable[[Inputs], Inputs]:
    fields: dict[str, Any] = {
        "mask_block_cnt": torch.ones(1, 1, 1, dtype=I32),
        "mask_block_idx": torch.zeros(1, 1, 1, 1, dtype=I32),
    }
    return given(block_sparse_tensors=BlockSparse(**{**fields, **changes}))


def alone(change: Callable[[Inputs], Inputs]) -> Callable[[Inputs], Inputs]:
    """The change to a call of `append_kv`: what only attention takes is left out."""

    def changed(inputs: Inputs) -> Inputs:
        more = change(inputs)
        for name in set(inputs) - _APPEND_NAMES:
            del inputs[name]
        return more

    return changed


_APPEND_NAMES = set(inspect.signature(kvattn.append_kv).parameters)


def no_mod(s: Tensor, b: Tensor) -> Tensor:
    return s


def five(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s


def handed(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, info: Any, aux: Any) -> Tensor:
    return s + aux[0][j]


LEARNED = torch.zeros(99, requires_grad=True)


def learned(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + LEARNED[j]


def shared_with_aux(inputs: Inputs) -> Inputs:
    out = torch.zeros(2, 2, 4, 32)
    return {"out": out, "score_mod": handed, "aux_tensors": [out.view(-1)]}


def shared_with_blocks(inputs: Inputs) -> Inputs:
    out = torch.zeros(2, 2, 4, 32)
    count, index = ints(1).view(1, 1, 1), out.view(I32)[:1, :1, :1, :1]
    return {"out": out, "block_sparse_tensors": BlockSparse(count, index)}


def too_small(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + torch.zeros(2)[j]


TENSORS = [
    Bad(1, E.QueryDtypeError, "q", "torch.int64", DENSE, cast("q", I64)),
    Bad(2, E.CacheDtypeError, "k_cache", "torch.float32 with a torch.bfloat16", DENSE,
        cast("q", BF16)),
    Bad(2, E.CacheDtypeError, "k_cache", "torch.int64", DENSE,
        lambda i: {"k_cache": i["k_cache"].to(I64), "v_cache": i["v_cache"].to(I64)}),
    Bad(3, E.ValueCacheDtypeError, "v_cache", "torch.float16", DENSE, cast("v_cache", F16)),
    Bad(4, E.NewTokenDtypeError, "k", "torch.float16", APPEND, cast("k", F16)),
    Bad(4, E.NewTokenDtypeError, "v", "torch.int64", APPEND, cast("v", I64)),
    Bad(5, E.DeviceMismatchError, "page_table", "meta", PAGED, elsewhere("page_table")),
    Bad(5, E.DeviceMismatchError, "k_cache", "meta", DENSE, elsewhere("k_cache")),
    Bad(6, E.DeviceIndexMismatchError, "k_cache", "cuda:1", DENSE, on_two_gpus),
    Bad(7, E.CacheLastStrideError, "k_cache", "strides", DENSE, spread("k_cache")),
    Bad(7, E.CacheLastStrideError, "v_cache", "strides", APPEND, spread("v_cache")),
    Bad(8, E.OutLastStrideError, "out", "strides", DENSE, spread("out")),
    Bad(9, E.QueryRankError, "q", "(2, 2, 4, 32)", DENSE, set_to("cu_seqlens_q", 0, 2, 4)),
    Bad(9, E.QueryRankError, "q", "(2, 4, 32)", DENSE, cut("q", 0)),
    Bad(10, E.HeadRatioError, "q", "3 query heads over 2", DENSE,
        cut("q", ..., slice(3), slice(None))),
    Bad(11, E.CacheHeadsDifferError, "v_cache", "(2, 8, 1, 32)", DENSE,
        cut("v_cache", ..., slice(1), slice(None))),
    Bad(12, E.HeadDimError, "q", "head dim 16", DENSE, cut("q", ..., slice(16))),
    Bad(12, E.HeadDimError, "k", "head dim 16", APPEND, cut("k", ..., slice(16))),
    Bad(16, E.KeyWithoutValueError, "k", "k without v", APPEND, given(v=None)),
    Bad(17, E.ValueWithoutKeyError, "v", "v without k", APPEND, given(k=None)),
    Bad(18, E.AppendWithoutLengthsError, "cache_seqlens", "None", APPEND,
        given(cache_seqlens=None)),
    Bad(19, E.NewTokenCountError, "v", "(2, 1, 2, 32)", APPEND, cut("v", slice(None), slice(1))),
    Bad(19, E.NewTokenCountError, "k", "1 kv heads", APPEND,
        lambda i: {"k": i["k"][:, :, :1], "v": i["v"][:, :, :1]}),
    Bad(20, E.NewTokenBatchError, "k", "(1, 2, 2, 32)", APPEND,
        lambda i: {"k": i["k"][:1], "v": i["v"][:1]}),
    Bad(20, E.NewTokenBatchError, "k", "(2, 2, 2, 32)", APPEND,
        set_to("cu_seqlens_k_new", 0, 2, 4)),
    Bad(57, E.KeyCacheMissingError, "k_cache", "None", DENSE, given(k_cache=None)),
    Bad(70, E.CacheExpandedError, "k_cache", "strides", APPEND,
        lambda i: {"k_cache": i["k_cache"][:1].expand(2, -1, -1, -1)}),
    Bad(0, E.KeyCacheMissingError, "k_cache", "None", LATENT,
        lambda i: {"k_cache": None, "only_qv": True, "k": torch.zeros(2, 1, 2, 32),
                   "v": torch.zeros(2, 1, 2, 16)}),
    Bad(0, E.NotATensorError, "v_cache", "None", DENSE, given(v_cache=None)),
    Bad(0, E.NotATensorError, "q", "list", DENSE, given(q=[1.0])),
    Bad(0, E.NotATensorError, "q", "None", DENSE, given(q=None)),
    Bad(0, E.CacheRankError, "k_cache", "(8, 2, 32)", DENSE, cut("k_cache", 0)),
    Bad(0, E.CacheRankError, "v_cache", "(2, 8, 2, 0)", DENSE, cut("v_cache", ..., slice(0))),
    Bad(0, E.DenseBatchError, "v_cache", "3 rows", DENSE,
        lambda i: {name: torch.zeros(3, 8, 2, 32) for name in ("k_cache", "v_cache")}),
]  # fmt: skip

LENGTHS = [
    Bad(21, E.AppendOverflowError, "cache_seqlens[0]", "7 cached + 2 new tokens = 9", APPEND,
        set_to("cache_seqlens", 7, 3)),
    Bad(21, E.AppendOverflowError, "cache_seqlens[1]", "2 new tokens", PAGED,
        set_to("cache_seqlens", 3, 11)),
    Bad(21, E.AppendOverflowError, "cache_seqlens[1]", "8 cached + 2", RAGGED,
        set_to("cache_seqlens", 3, 8)),
    Bad(22, E.LengthOverCapacityError, "cache_seqlens[1]", "9", DENSE,
        set_to("cache_seqlens", 3, 9)),
    Bad(22, E.LengthOverCapacityError, "cache_seqlens[0]", "9", DENSE, given(cache_seqlens=9)),
    Bad(23, E.NegativeLengthError, "cache_seqlens[1]", "-2", DENSE, set_to("cache_seqlens", 3, -2)),
    Bad(23, E.NegativeLengthError, "cache_seqlens[0]", "-7", APPEND, given(cache_seqlens=-7)),
    Bad(24, E.LengthsDtypeError, "cache_seqlens", "torch.int64", DENSE, cast("cache_seqlens", I64)),
    Bad(24, E.LengthsDtypeError, "cache_seqlens", "torch.float32", DENSE,
        cast("cache_seqlens", F32)),
    Bad(25, E.LengthsShapeError, "cache_seqlens", "(3,)", DENSE, set_to("cache_seqlens", 1, 2, 3)),
    Bad(25, E.LengthsShapeError, "cache_seqlens", "(2, 1)", DENSE,
        lambda i: {"cache_seqlens": i["cache_seqlens"][:, None]}),
    *(Bad(26, E.LengthsScalarError, "cache_seqlens", shown, DENSE, given(cache_seqlens=value))
      for value, shown in ((True, "bool True"), (np.True_, "bool"), (3.0, "float 3.0"), ("3",
          "'3'"),
                           ([5, 3], "list"), (2**40, "1099511627776"))),
    Bad(27, E.LeftpadOverLengthError, "cache_leftpad[1]", "4", PADDED,
        set_to("cache_leftpad", 0, 4)),
    Bad(28, E.NegativeLeftpadError, "cache_leftpad[0]", "-1", PADDED,
        set_to("cache_leftpad", -1, 0)),
    Bad(29, E.LeftpadTensorError, "cache_leftpad", "torch.int64", PADDED,
        cast("cache_leftpad", I64)),
    Bad(29, E.LeftpadTensorError, "cache_leftpad", "(1,)", PADDED, set_to("cache_leftpad", 0)),
    Bad(32, E.PageTableTensorError, "page_table", "torch.int64", PAGED, cast("page_table", I64)),
    Bad(32, E.PageTableTensorError, "page_table", "strides", PAGED, spread("page_table")),
    Bad(32, E.PageTableTensorError, "page_table", "shape", PAGED, cut("page_table", 0)),
    Bad(33, E.PageTableRowsError, "page_table", "1 rows", PAGED, cut("page_table", slice(1))),
    Bad(34, E.PageOutOfRangeError, "page_table[1]", "-1", PAGED, wrong_page(-1)),
    Bad(34, E.PageOutOfRangeError, "page_table[1]", "1000", PAGED, wrong_page(1000)),
    Bad(36, E.BatchIndexRangeError, "cache_batch_idx[1]", "4", ROWS,
        set_to("cache_batch_idx", 3, 4)),
    Bad(36, E.BatchIndexRangeError, "cache_batch_idx[0]", "-1", ROWS,
        set_to("cache_batch_idx", -1, 0)),
    Bad(37, E.BatchIndexTensorError, "cache_batch_idx", "(1,)", ROWS, set_to("cache_batch_idx", 1)),
    Bad(37, E.BatchIndexTensorError, "cache_batch_idx", "torch.int64", ROWS,
        cast("cache_batch_idx", I64)),
    Bad(40, E.CuSeqlensError, "cu_seqlens_q", "[1, 2, 3]", RAGGED, set_to("cu_seqlens_q", 1, 2, 3)),
    Bad(40, E.CuSeqlensError, "cu_seqlens_q", "[0, 3, 2]", RAGGED, set_to("cu_seqlens_q", 0, 3, 2)),
    Bad(40, E.CuSeqlensError, "cu_seqlens_q", "[0, 2, 4]", RAGGED, set_to("cu_seqlens_q", 0, 2, 4)),
    Bad(40, E.CuSeqlensError, "cu_seqlens_q", "torch.int64", RAGGED, cast("cu_seqlens_q", I64)),
    Bad(40, E.CuSeqlensError, "cu_seqlens_k", "[0, 5, 9]", VARLEN, set_to("cu_seqlens_k", 0, 5, 9),
        kvattn.flash_attn_varlen_func),
    Bad(40, E.CuSeqlensError, "cu_seqlens_k", "(2,)", VARLEN, set_to("cu_seqlens_k", 0, 5),
        kvattn.flash_attn_varlen_func),
    Bad(41, E.MaxSeqlenTooSmallError, "max_seqlen_q", "1", RAGGED, given(max_seqlen_q=1)),
    Bad(41, E.MaxSeqlenTooSmallError, "max_seqlen_k", "5", RAGGED, given(max_seqlen_k=5)),
    Bad(42, E.CuSeqlensNewError, "cu_seqlens_k_new", "(2,)", RAGGED,
        set_to("cu_seqlens_k_new", 0, 3)),
    Bad(42, E.CuSeqlensNewError, "cu_seqlens_k_new", "torch.int64", RAGGED,
        cast("cu_seqlens_k_new", I64)),
    Bad(42, E.CuSeqlensNewError, "cu_seqlens_k_new", "[0, 3, 2]", RAGGED,
        set_to("cu_seqlens_k_new", 0, 3, 2)),
    Bad(42, E.CuSeqlensNewError, "cu_seqlens_k_new", "without k", RAGGED, given(k=None, v=None)),
    Bad(69, E.TwoKeyLayoutsError, "page_table", "cu_seqlens_k", VARLEN,
        lambda i: {"page_table": torch.zeros(2, 1, dtype=I32)}, kvattn.flash_attn_varlen_func),
    Bad(0, E.SlotMappingError, "slot_mapping", "torch.int32", SLOTS, cast("slot_mapping", I32)),
    Bad(0, E.SlotMappingError, "slot_mapping", "(3,)", SLOTS, cut("slot_mapping", slice(3))),
    Bad(0, E.SlotMappingError, "slot_mapping", "without k", SLOTS, given(k=None, v=None)),
    Bad(0, E.SlotOutOfRangeError, "slot_mapping", "1000", SLOTS,
        given(slot_mapping=torch.tensor([0, 1, 2, 1000]))),
    Bad(0, E.SlotOutOfRangeError, "slot_mapping", "-2", SLOTS,
        given(slot_mapping=torch.tensor([0, 1, -2, 3]))),
    Bad(0, E.NegativeLengthError, "cache_seqlens[1]", "1", SLOTS, set_to("cache_seqlens", 5, 1)),
    Bad(0, E.SeqUsedError, "seqused_q[0]", "3", VARLEN, set_to("seqused_q", 3, 1),
        kvattn.flash_attn_varlen_func),
    Bad(0, E.SeqUsedError, "seqused_k", "torch.int64", VARLEN, cast("seqused_k", I64),
        kvattn.flash_attn_varlen_func),
    Bad(0, E.LengthOverCapacityError, "seqused_k[1]", "4", VARLEN, set_to("seqused_k", 5, 4),
        kvattn.flash_attn_varlen_func),
    Bad(0, E.IntArgumentError, "max_seqlen_q", "2.5", DENSE, given(max_seqlen_q=2.5)),
    *(Bad(0, E.IntArgumentError, name, "-1", VARLEN, given(**{name: -1}),
          kvattn.flash_attn_varlen_func) for name in ("min_seqlen_k", "seqlen_k_per_split")),
    *(Bad(0, E.CommonPrefixError, "common_prefix_len", repr(value), PAGED,
          given(common_prefix_len=value)) for value in (-1, 2.0, True, 13)),
    Bad(0, E.CommonPrefixError, "common_prefix_len", "9", ROWS, given(common_prefix_len=9)),
    Bad(0, E.CommonPrefixError, "common_prefix_len", "with cache_leftpad", PADDED,
        given(common_prefix_len=1)),
    Bad(0, E.CommonPrefixMemoryError, "common_prefix_len", "a row of the dense cache", DENSE,
        given(common_prefix_len=4)),
    Bad(0, E.CommonPrefixMemoryError, "common_prefix_len", "sequences 0 and 1", PAGED,
        given(common_prefix_len=4)),
    Bad(0, E.CommonPrefixMemoryError, "common_prefix_len", "sequences 0 and 1", ROWS,
        given(common_prefix_len=4)),
    *(Bad(0, E.CommonPrefixError, "common_prefix_len", shows, PAGED, given(common_prefix_len=value))
      for shows, value in (("torch.int64", torch.tensor(0)), ("torch.float32", torch.zeros(1)),
                           ("(2,)", ints(0, 0)), ("(1, 1)", ints(0)[None]), ("-1", ints(-1)),
                           ("13", ints(13)))),
    Bad(0, E.DeviceMismatchError, "common_prefix_len", "meta", PAGED,
        given(common_prefix_len=torch.zeros(1, dtype=I32, device="meta"))),
    Bad(0, E.CommonPrefixError, "common_prefix_len", "with cache_leftpad", PADDED,
        given(common_prefix_len=ints(0))),
    Bad(0, E.CommonPrefixMemoryError, "common_prefix_len", "a row of the dense cache", DENSE,
        given(common_prefix_len=ints(0))),
    Bad(0, E.CommonPrefixMemoryError, "common_prefix_len", "sequences 0 and 1", PAGED,
        given(common_prefix_len=ints(4))),
    *(Bad(0, E.CommonPrefixMemoryError, "common_prefix_len", "with cu_seqlens_k", VARLEN,
          given(common_prefix_len=value), kvattn.flash_attn_varlen_func) for value in (3, ints(3))),
]  # fmt: skip

OPTIONS = [
    Bad(43, E.RotaryWithoutNewKeysError, "rotary_cos", "no k", ROTARY, given(k=None, v=None)),
    Bad(44, E.RotaryIncompleteError, "rotary_sin", "None", ROTARY, given(rotary_sin=None)),
    Bad(44, E.RotaryIncompleteError, "rotary_cos", "None", ROTARY, given(rotary_cos=None)),
    Bad(44, E.RotaryIncompleteError, "rotary_seqlens", "no rotary_cos", APPEND,
        set_to("rotary_seqlens", 1, 2)),
    Bad(45, E.RotaryShapeError, "rotary_cos", "cos (7, 3)", ROTARY,
        cut("rotary_cos", ..., slice(3))),
    Bad(45, E.RotaryShapeError, "rotary_cos", "(20, 17)", ROTARY, given(**tables(17))),
    Bad(45, E.RotaryShapeError, "rotary_cos", "(20, 0)", ROTARY, given(**tables(0))),
    Bad(46, E.RotaryDtypeError, "rotary_cos", "torch.float16", ROTARY, given(**tables(4, F16))),
    Bad(46, E.RotaryDtypeError, "rotary_cos", "torch.float64", ROTARY, cast("rotary_sin", F64)),
    Bad(47, E.RotaryTableShortError, "rotary_cos", "position 6", ROTARY,
        given(**tables(4, rows=6))),
    Bad(48, E.RotarySeqlensError, "rotary_seqlens", "torch.int64", ROTARY,
        given(rotary_seqlens=torch.tensor([1, 2]))),
    Bad(48, E.RotarySeqlensError, "rotary_seqlens", "(1,)", ROTARY, set_to("rotary_seqlens", 1)),
    Bad(48, E.RotarySeqlensError, "rotary_seqlens[1]", "-1", ROTARY,
        set_to("rotary_seqlens", 0, -1)),
    Bad(49, E.DescaleError, "q_descale", "(3,)", SCALED, given(q_descale=torch.ones(3))),
    Bad(49, E.DescaleError, "k_descale", "torch.float64", SCALED, cast("k_descale", F64)),
    Bad(49, E.DescaleError, "v_descale", "(2, 7, 2)", BY_TOKEN,
        given(v_descale=torch.ones(2, 7, 2))),
    *(Bad(50, E.SoftmaxScaleError, "softmax_scale", repr(value), DENSE, given(softmax_scale=value))
      for value in (math.nan, math.inf, "small")),
    *(Bad(51, E.WindowSizeError, "window_size", repr(value), DENSE, given(window_size=value))
      for value in ((-2, 3), (3, -2), (1,), (1, 2, 3), 5, None, (1.5, 0), (True, 0), ("1", 2),
          ([1], 2))),
    *(Bad(52, E.AttentionChunkError, "attention_chunk", repr(value), DENSE,
        given(attention_chunk=value))
      for value in (-1, 2.0, True)),
    *(Bad(53, E.SoftcapError, "softcap", repr(value), DENSE, given(softcap=value))
      for value in (-1.0, math.nan, math.inf, "x")),
    Bad(54, E.SinksError, "sinks", "(3,)", DENSE, given(sinks=torch.ones(3))),
    Bad(54, E.SinksError, "sinks", "torch.int64", DENSE, given(sinks=torch.ones(4, dtype=I64))),
    Bad(54, E.DeviceMismatchError, "sinks", "meta", DENSE,
        given(sinks=torch.ones(4, device="meta"))),
    Bad(55, E.AlibiSlopesError, "alibi_slopes", "(2,)", DENSE, given(alibi_slopes=torch.ones(2))),
    Bad(55, E.AlibiSlopesError, "alibi_slopes", "torch.float16", DENSE,
        given(alibi_slopes=torch.ones(4, dtype=F16))),
    Bad(56, E.QueryValueError, "qv", "(2, 1, 4, 15)", LATENT, cut("qv", ..., slice(15))),
    Bad(56, E.QueryValueError, "qv", "(2, 1, 3, 16)", LATENT,
        cut("qv", ..., slice(3), slice(None))),
    Bad(56, E.QueryValueError, "qv", "torch.float16", LATENT, cast("qv", F16)),
    Bad(56, E.QueryValueError, "qv", "None", DENSE, given(only_qv=True)),
    Bad(0, E.NormWeightError, "q_norm_weight", "(31,)", NORMED, cut("q_norm_weight", slice(31))),
    Bad(0, E.NormWeightError, "k_norm_weight", "(1, 32)", NORMED, cut("k_norm_weight", None)),
    Bad(0, E.NormWeightError, "q_norm_weight", "torch.int32", NORMED, cast("q_norm_weight", I32)),
    Bad(0, E.NormWeightError, "k_norm_weight", "torch.float64", NORMED, cast("k_norm_weight", F64)),
    Bad(0, E.DeviceMismatchError, "k_norm_weight", "meta", NORMED, elsewhere("k_norm_weight")),
    Bad(0, E.NotATensorError, "q_norm_weight", "float", NORMED, given(q_norm_weight=1.0)),
    *(Bad(0, E.NormEpsError, "norm_eps", shown, NORMED, given(norm_eps=eps))
      for eps, shown in ((0, "0.0"), (-1e-6, "-1e-06"), (math.nan, "nan"), (math.inf, "inf"),
                         ("1e-6", "'1e-6'"), (1e-50, "1e-50"), (None, "None"))),
    Bad(0, E.NormWithoutHeadsError, "k_norm_weight", "no k", NORMED, given(k=None, v=None)),
    Bad(0, E.NormWithoutHeadsError, "q_norm_weight", "no q", LATENT,
        given(q_norm_weight=torch.ones(32), only_qv=True)),
    Bad(0, E.MxScaleError, "sfq", "q_norm_weight", MX, given(q_norm_weight=torch.ones(64))),
    Bad(58, E.RotaryOnlyQvError, "rotary_cos", "rotary tables", LATENT,
        given(only_qv=True, **tables(4))),
    Bad(59, E.RelBiasError, "rel_bias", "(2, 2, 4, 0)", DENSE,
        given(rel_bias=torch.ones(2, 2, 4, 0))),
    Bad(59, E.RelBiasError, "rel_bias", "(2, 2, 2, 8)", DENSE,
        given(rel_bias=torch.ones(2, 2, 2, 8))),
    Bad(59, E.DeviceMismatchError, "rel_bias", "meta", DENSE,
        given(rel_bias=torch.ones(2, 2, 4, 8, device="meta"))),
    Bad(59, E.RelBiasError, "rel_bias_prep_cache", "list", DENSE, given(rel_bias_prep_cache=[])),
    Bad(60, E.MxScaleError, "sfk", "None", MX, given(sfk=None)),
    Bad(60, E.MxScaleError, "sfq", "None", MX, given(sfq=None)),
    Bad(60, E.MxScaleError, "sfv", "None", MX, given(sfv=None)),
    Bad(60, E.MxScaleError, "sfq", "rotary tables", MX,
        given(rotary_cos=torch.ones(99, 32), rotary_sin=torch.ones(99, 32))),
    Bad(60, E.MxScaleError, "sfk", "scales are unknown", MX,
        lambda i: {"k": i["k"].to(E4M3), "v": i["v"].to(E4M3)}),
    Bad(60, E.MxScaleError, "sfk", "torch.uint8", MX,
        lambda i: {"sfk": i["sfk"].view(torch.uint8)}),
    Bad(60, E.MxScaleError, "sfv", "torch.float32 data", DENSE,
        given(sfv=torch.ones(2, 8, 2, 1).to(torch.float8_e8m0fnu))),
    Bad(60, E.MxScaleError, "sfk", "(4, 32, 2, 1)", MX, cut("sfk", ..., slice(1))),
    Bad(60, E.MxScaleError, "sfv", "32 tokens with an append", MX,
        lambda i: {"sfv": i["sfv"][:, :1].repeat(1, 1, 1, 32)}),
    Bad(61, E.ModCallableError, "score_mod", "int", DENSE, given(score_mod=3)),
    Bad(61, E.ModCallableError, "score_mod", "2 arguments", DENSE, given(score_mod=no_mod)),
    Bad(61, E.ModCallableError, "mask_mod", "5 arguments", DENSE, given(mask_mod=five)),
    Bad(61, E.ModCallableError, "aux_tensors", "no mod", DENSE, given(aux_tensors=[torch.ones(1)])),
    Bad(61, E.ModCallableError, "aux_tensors", "five arguments or fewer", DENSE,
        given(aux_tensors=[torch.ones(1)], score_mod=five)),
    Bad(5, E.DeviceMismatchError, "aux_tensors", "meta", APPEND,
        given(score_mod=handed, aux_tensors=[torch.zeros(99, device="meta")])),
    Bad(67, E.RequiresGradError, "aux_tensors", "requires_grad", APPEND,
        given(score_mod=handed, aux_tensors=[LEARNED])),
    Bad(0, E.NotATensorError, "aux_tensors", "sparse", DENSE,
        given(score_mod=handed, aux_tensors=[torch.zeros(99).to_sparse()])),
    Bad(66, E.OutTensorError, "out", "shared with aux_tensors", DENSE, shared_with_aux),
    Bad(66, E.OutTensorError, "out", "shared with block_sparse_tensors", DENSE,
        shared_with_blocks),
    Bad(62, E.BlockSparseError, "block_sparse_tensors", "a count of 2", DENSE,
        blocks(mask_block_cnt=ints(2).view(1, 1, 1))),
    Bad(62, E.BlockSparseError, "block_sparse_tensors", "a count of -1", APPEND,
        blocks(full_block_cnt=ints(-1).view(1, 1, 1), full_block_idx=ints(0).view(1, 1, 1, 1))),
    Bad(62, E.BlockSparseError, "block_sparse_tensors", "block -3", DENSE,
        blocks(mask_block_idx=ints(-3).view(1, 1, 1, 1))),
    Bad(0, E.SoftmaxScaleError, "softmax_scale", "0.125", DENSE, given(softmax_scale="0.125")),
    Bad(0, E.SoftcapError, "softcap", "30", DENSE, given(softcap="30")),
    Bad(62, E.BlockSparseError, "block_sparse_tensors", "torch.int64", DENSE,
        blocks(mask_block_cnt=torch.ones(1, 1, 1, dtype=I64))),
    Bad(62, E.BlockSparseError, "block_sparse_tensors", "(1, 1)", DENSE,
        blocks(mask_block_cnt=ints(1)[None])),
    Bad(62, E.BlockSparseError, "block_sparse_tensors", "(3, 1, 1)", DENSE,
        blocks(mask_block_cnt=torch.ones(3, 1, 1, dtype=I32))),
    Bad(62, E.BlockSparseError, "block_sparse_tensors", "block_size (0, 4)", DENSE,
        blocks(block_size=(0, 4))),
    Bad(62, E.BlockSparseError, "block_sparse_tensors", "1 blocks of 1", DENSE,
        blocks(block_size=(1, 4))),
    Bad(62, E.BlockSparseError, "block_sparse_tensors", "str", DENSE,
        given(block_sparse_tensors="x")),
    Bad(62, E.BlockSparseError, "block_sparse_tensors", "1 blocks of 1 rows", RAGGED,
        blocks(block_size=(1, 4))),
    Bad(0, E.BlockSparseError, "gather_kv_indices", "7 in sequence 0", VARLEN,
        given(gather_kv_indices=torch.full((3, 2), 7, dtype=I32)), kvattn.flash_attn_varlen_func),
    Bad(0, E.BlockSparseError, "gather_kv_indices", "(2, 2)", VARLEN,
        given(gather_kv_indices=torch.zeros(2, 2, dtype=I32)), kvattn.flash_attn_varlen_func),
    *(Bad(63, E.NumSplitsError, "num_splits", repr(value), DENSE, given(num_splits=value))
      for value in (-1, 1.5, True)),
    *(Bad(64, E.SmMarginError, "sm_margin", repr(value), DENSE, given(sm_margin=value))
      for value in (-1, 0.5)),
    Bad(65, E.SchedulerMetadataError, "scheduler_metadata", "Tensor", DENSE,
        given(scheduler_metadata=torch.zeros(3, dtype=I32))),
    Bad(66, E.OutTensorError, "out", "(2, 1, 4, 32)", DENSE, given(out=torch.zeros(2, 1, 4, 32))),
    Bad(66, E.OutTensorError, "out", "torch.float16", DENSE, cast("out", F16)),
    Bad(66, E.DeviceMismatchError, "out", "meta", DENSE, elsewhere("out")),
    Bad(66, E.OutTensorError, "out", "requires_grad", DENSE,
        lambda i: {"out": torch.zeros(2, 2, 4, 32, requires_grad=True)}),
    Bad(66, E.OutTensorError, "out", "strides", DENSE,
        lambda i: {"out": torch.zeros(1, 2, 4, 32).expand(2, -1, -1, -1)}),
    Bad(66, E.OutTensorError, "out", "shared with q", DENSE, lambda i: {"out": i["q"]}),
    Bad(67, E.RequiresGradError, "q", "requires_grad", DENSE,
        lambda i: {"q": i["q"].clone().requires_grad_()}),
    Bad(67, E.RequiresGradError, "v_cache", "requires_grad", DENSE,
        lambda i: {"v_cache": i["v_cache"].clone().requires_grad_()}),
    *(Bad(0, E.AliasConflictError, alias, f"{name} and {alias}", DENSE,
        given(**{name: value, alias: value}))
      for name, alias, value in (("page_table", "block_table", torch.zeros(2, 2, dtype=I32)),
                                 ("sinks", "s_aux", torch.ones(4)),
                                 ("sinks", "learnable_sink", torch.ones(4)),
                                 ("s_aux", "learnable_sink", torch.ones(4)))),
    *(Bad(0, E.AliasConflictError, alias, f"{name} and {alias}", VARLEN,
          given(**{name: value, alias: value}), kvattn.flash_attn_varlen_func)
      for name, alias, value in (("page_table", "block_table", torch.zeros(2, 2, dtype=I32)),
                                 ("sinks", "s_aux", torch.ones(4)))),
    Bad(0, E.DropoutError, "dropout_p", "0.1", VARLEN, given(dropout_p=0.1),
        kvattn.flash_attn_varlen_func),
    *(Bad(0, E.FlagError, name, repr(value), DENSE, given(**{name: value}))
      for name, value in (("causal", 1), ("rotary_interleaved", None), ("only_qv", "no"),
                          ("batch_invariant", 0), ("pack_gqa", 2), ("pack_gqa", 1),
                          ("return_softmax_lse", 1))),
    Bad(0, E.UnknownBackendError, "backend", "'gpu'", DENSE, given(backend="gpu")),
    Bad(0, E.BackendRefusesError, "backend", "softcap", DENSE, given(backend="cpu", softcap=1.0)),
]  # fmt: skip

# What only calling a mod tells: refused by backends that call it, before anything is written.
MODS = [
    *(Bad(0, E.ModResultError, "score_mod", "IndexError", case, given(score_mod=too_small))
      for case in (APPEND, UNEVEN)),
    Bad(67, E.RequiresGradError, "score_mod", "requires grad", APPEND, given(score_mod=learned)),
    Bad(67, E.RequiresGradError, "score_mod", "requires grad", DENSE, given(score_mod=learned)),
]  # fmt: skip

ODD = [
    *(Bad(0, E.InferenceTensorError, name, "inference", case, made_in_inference_mode(name))
      for name, case in (("out", APPEND), ("out", PAGED), ("k_cache", APPEND), ("v_cache", PAGED),
                         ("v_descale", BY_TOKEN))),
    Bad(0, E.InferenceTensorError, "v_cache", "inference", APPEND,
        alone(made_in_inference_mode("v_cache")), kvattn.append_kv),
    Bad(66, E.OutTensorError, "out", "strides (128, 128, 16, 1)", DENSE,
        lambda i: {"out": torch.zeros(999).as_strided((2, 2, 4, 32), (128, 128, 16, 1))}),
    *(Bad(0, kind, name, shown, DENSE, given(**{name: value}))
      for name, kind in (("softmax_scale", E.SoftmaxScaleError), ("softcap", E.SoftcapError),
                         ("norm_eps", E.NormEpsError), ("q_descale", E.DescaleError))
      for value, shown in ((10**400, "1000"), (1e300, "1e+300"), (-math.inf, "-inf"))),
    *(Bad(0, kind, name, shown, DENSE, given(**{name: value}))
      for name, kind in (("softmax_scale", E.SoftmaxScaleError), ("softcap", E.SoftcapError),
                         ("norm_eps", E.NormEpsError))
      for value, shown in ((True, "True"), (np.True_, "True"), (torch.ones(2), "tensor"),
                           (torch.ones((), device="meta"), "meta"))),
    *(Bad(0, E.NumSplitsError, "num_splits", shown, DENSE, given(num_splits=value))
      for value, shown in ((torch.ones((), device="meta"), "meta"), (torch.ones(2), "tensor"),
                           (torch.tensor(True), "True"))),
    *(Bad(0, E.UnknownBackendError, "backend", shown, DENSE, given(backend=value))
      for value, shown in ((["cpu"], "['cpu']"), (5, "5"), (np.ones(2), "array"))),
    *(Bad(0, kind, name, repr(None), DENSE, given(**{name: None}))
      for name, kind in (("causal", E.FlagError), ("only_qv", E.FlagError),
                         ("return_softmax_lse", E.FlagError), ("batch_invariant", E.FlagError),
                         ("norm_eps", E.NormEpsError))),
    *(Bad(0, E.FlagError, name, shown, VARLEN, given(**{name: value}),
          kvattn.flash_attn_varlen_func)
      for name in ("return_lse", "return_attn_probs", "deterministic", "disable_scheduler_metadata")
      for value, shown in ((0, "0"), (None, "None"), (torch.ones(2), "tensor"))),
    *(Bad(0, E.DropoutError, "dropout_p", shown, VARLEN, given(dropout_p=value),
          kvattn.flash_attn_varlen_func)
      for value, shown in ((torch.ones(2), "tensor"), (None, "None"), (False, "False"))),
    Bad(0, E.NotATensorError, "q", "nested", DENSE,
        lambda i: {"q": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])}),
    Bad(0, E.NotATensorError, "q", "sparse", DENSE, lambda i: {"q": i["q"].to_sparse()}),
    Bad(0, E.NotATensorError, "aux_tensors", "int", DENSE,
        given(score_mod=lambda s, b, h, i, j, info, aux: s, aux_tensors=5)),
    Bad(0, E.NewTokenBatchError, "k", "()", APPEND, alone(given(k=torch.tensor(1.0))),
        kvattn.append_kv),
    *(Bad(42, E.CuSeqlensNewError, "cu_seqlens_k_new", shown, RAGGED,
          alone(given(cu_seqlens_k_new=value)), kvattn.append_kv)
      for value, shown in ((torch.tensor(0, dtype=I32), "()"), (ints(), "(0,)"))),
]  # fmt: skip

RENAMED = [
    Bad(7, E.CacheLastStrideError, "k", "strides", VARLEN, spread("k"),
        kvattn.flash_attn_varlen_func),
    Bad(22, E.LengthOverCapacityError, "seqused_k[0]", "9", Case(lengths=(5, 3), varlen=True),
        set_to("seqused_k", 9, 3), kvattn.flash_attn_varlen_func),
    Bad(57, E.KeyCacheMissingError, "k", "None", VARLEN, given(k=None),
        kvattn.flash_attn_varlen_func),
    Bad(0, E.NotATensorError, "v", "None", VARLEN, given(v=None), kvattn.flash_attn_varlen_func),
]  # fmt: skip

APPENDS = [
    Bad(21, E.AppendOverflowError, "cache_seqlens[0]", "7 cached + 2", APPEND,
        alone(set_to("cache_seqlens", 7, 3)), kvattn.append_kv),
    Bad(18, E.AppendWithoutLengthsError, "cache_seqlens", "None", APPEND,
        alone(given(cache_seqlens=None)), kvattn.append_kv),
    Bad(18, E.AppendWithoutLengthsError, "cache_seqlens", "rotary", ROTARY,
        alone(given(cache_seqlens=None, slot_mapping=torch.arange(4))), kvattn.append_kv),
    Bad(70, E.CacheExpandedError, "v_cache", "strides", APPEND,
        alone(lambda i: {"v_cache": i["v_cache"][:1].expand(2, -1, -1, -1)}), kvattn.append_kv),
    Bad(0, E.NotATensorError, "k", "None", APPEND, alone(given(k=None)), kvattn.append_kv),
    Bad(57, E.KeyCacheMissingError, "k_cache", "None", APPEND, alone(given(k_cache=None)),
        kvattn.append_kv),
    Bad(70, E.CacheExpandedError, "k_descale", "strides", BY_TOKEN,
        lambda i: {"k_descale": torch.ones(1, 8, 2).expand(2, -1, -1)}),
]  # fmt: skip

ALWAYS = [*TENSORS, *LENGTHS, *OPTIONS, *ODD, *RENAMED, *APPENDS]  # whatever the backend
BAD = [*ALWAYS, *MODS]


def bad_call(bad: Bad) -> Inputs:
    inputs = make_inputs(bad.case)
    return inputs | bad.change(inputs)

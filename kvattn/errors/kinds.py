"""Mistakes in the tensors of a call: query, caches, new tokens, lengths and tables."""

from __future__ import annotations

from kvattn.errors.base import ArgumentIndexError, ArgumentTypeError, ArgumentValueError


class QueryDtypeError(ArgumentTypeError):
    """q (or qv) has a dtype that attention is not defined for."""

    code = "KV101"
    problem = "the query must be a floating-point tensor"
    fix = "cast it, for example q.to(torch.bfloat16)"


class CacheDtypeError(ArgumentTypeError):
    """The key cache's dtype does not go with the query's."""

    code = "KV102"
    problem = "this pair of query and key cache dtypes is not supported"
    fix = "keep the cache in the query's dtype, in 16 bits, or in FP8/INT8 with descales"


class ValueCacheDtypeError(ArgumentTypeError):
    """k_cache and v_cache have different dtypes without the scales that allow it."""

    code = "KV103"
    problem = "the value cache must have the key cache's dtype"
    fix = "allocate both caches with one dtype (they differ only with MXFP8 scales)"


class NewTokenDtypeError(ArgumentTypeError):
    """k or v cannot be stored in the cache without losing its meaning."""

    code = "KV104"
    problem = "new keys and values must have the cache's dtype or a wider float dtype"
    fix = "cast k and v to the cache's dtype before the call"


class DeviceMismatchError(ArgumentValueError):
    """One tensor is on the CPU and another on an accelerator."""

    code = "KV105"
    problem = "every tensor of a call must be on the same kind of device"
    fix = "move it with .to(device)"


class DeviceIndexMismatchError(ArgumentValueError):
    """Two tensors are on two different accelerators."""

    code = "KV106"
    problem = "every tensor of a call must be on the same device"
    fix = "move it with .to(device)"


class CacheLastStrideError(ArgumentValueError):
    """A cache's head dimension is strided; it is updated in place, so it cannot be copied."""

    code = "KV107"
    problem = "the last dimension of a cache must be contiguous"
    fix = "store the cache with a unit last stride; a copy would lose the append"


class OutLastStrideError(ArgumentValueError):
    """out has a strided head dimension."""

    code = "KV108"
    problem = "the last dimension of out must be contiguous"
    fix = "pass a tensor with a unit last stride"


class QueryRankError(ArgumentValueError):
    """q (or qv) does not have the rank that cu_seqlens_q implies."""

    code = "KV109"
    problem = "the query has the wrong number of dimensions"
    fix = "use (batch, seqlen, heads, dim), or (total_q, heads, dim) together with cu_seqlens_q"


class HeadRatioError(ArgumentValueError):
    """Grouped-query attention maps query head h to kv head h // (H / Hk)."""

    code = "KV110"
    problem = "the number of query heads must be a multiple of the number of kv heads"
    fix = "make H a multiple of Hk; heads stand last but one, as in (batch, seqlen, heads, dim)"


class CacheHeadsDifferError(ArgumentValueError):
    """The two caches differ in a leading dimension or in their kv heads."""

    code = "KV111"
    problem = "k_cache and v_cache must agree in every dimension but the last"
    fix = "give both caches the same pages, slots and kv heads"


class HeadDimError(ArgumentValueError):
    """The dot product of query and key needs one head dimension; so do value tensors."""

    code = "KV112"
    problem = "head dimensions do not agree"
    fix = "make q, k and k_cache share D, and v, v_cache, qv share Dv"


class KeyWithoutValueError(ArgumentValueError):
    """k was given without v."""

    code = "KV116"
    problem = "new keys need new values"
    fix = "pass v too, with one value per new key"


class ValueWithoutKeyError(ArgumentValueError):
    """v was given without k."""

    code = "KV117"
    problem = "new values need new keys"
    fix = "pass k too, with one key per new value"


class AppendWithoutLengthsError(ArgumentValueError):
    """k and v were given, but nothing says where in the cache they belong."""

    code = "KV118"
    problem = "appending needs cache_seqlens: where do the new tokens go"
    fix = "pass cache_seqlens, the length of every row before the append"


class NewTokenCountError(ArgumentValueError):
    """k and v differ in batch, sequence length or kv heads."""

    code = "KV119"
    problem = "k and v must hold the same number of new tokens"
    fix = "slice k and v alike"


class NewTokenBatchError(ArgumentValueError):
    """k does not have the batch size or rank that the call implies."""

    code = "KV120"
    problem = "new keys and values must match the batch"
    fix = (
        "use (batch, seqlen_new, kv_heads, dim), or (total_new, kv_heads, dim) together with "
        "cu_seqlens_k_new"
    )


class AppendOverflowError(ArgumentValueError):
    """cache_seqlens plus the new tokens exceed the row's capacity."""

    code = "KV121"
    problem = "the new tokens do not fit behind the cached ones"
    fix = "grow the cache or its page table, or append fewer tokens"


class LengthOverCapacityError(ArgumentValueError):
    """cache_seqlens claims more keys than the row can hold."""

    code = "KV122"
    problem = "a length exceeds the capacity of its row"
    fix = "pass the true lengths, or a larger cache or page table"


class NegativeLengthError(ArgumentValueError):
    """A length below -1 has no meaning, nor one that leaves out tokens that slot_mapping stores."""

    code = "KV123"
    problem = "a length is negative, or does not count the tokens of slot_mapping"
    fix = (
        "use 0 for an empty row and -1 for an inactive one; with slot_mapping count the new "
        "tokens too"
    )


class LengthsDtypeError(ArgumentTypeError):
    """cache_seqlens (or seqused) is not an int32 tensor."""

    code = "KV124"
    problem = "lengths must be int32"
    fix = "cast them with .to(torch.int32)"


class LengthsShapeError(ArgumentValueError):
    """cache_seqlens (or seqused) does not have shape (batch,)."""

    code = "KV125"
    problem = "lengths must be one number per sequence"
    fix = "pass a tensor of shape (batch,)"


class LengthsScalarError(ArgumentTypeError):
    """cache_seqlens is neither an integer nor a tensor; booleans do not count as integers."""

    code = "KV126"
    problem = "a scalar length must be an integer"
    fix = "pass an int, or an int32 tensor of shape (batch,)"


class LeftpadOverLengthError(ArgumentValueError):
    """More slots are declared padding than the row has."""

    code = "KV127"
    problem = "left padding exceeds the row's length"
    fix = "cache_seqlens counts from the start of the row, padding included"


class NegativeLeftpadError(ArgumentValueError):
    """cache_leftpad holds a negative number."""

    code = "KV128"
    problem = "left padding is negative"
    fix = "use 0 for a row without padding"


class LeftpadTensorError(ArgumentValueError):
    """cache_leftpad has the wrong dtype or shape."""

    code = "KV129"
    problem = "cache_leftpad must be an int32 tensor of shape (batch,)"
    fix = "pass one int32 per sequence"


class PageTableTensorError(ArgumentValueError):
    """page_table has the wrong dtype, rank or stride."""

    code = "KV132"
    problem = "the page table must be a two-dimensional int32 tensor with a unit last stride"
    fix = "pass an int32 tensor of shape (batch, max_pages)"


class PageTableRowsError(ArgumentValueError):
    """page_table's first dimension is not the batch size."""

    code = "KV133"
    problem = "the page table must have one row per sequence"
    fix = "give it batch rows, or select rows with cache_batch_idx"


class PageOutOfRangeError(ArgumentIndexError):
    """page_table points to a page that does not exist."""

    code = "KV134"
    problem = "a page id within the used length is outside the pool"
    fix = (
        "fill the table up to ceil(length / page_size) entries per row with valid page ids; a "
        "PagedKVCache does so in reserve, after which view gives the table"
    )


class BatchIndexRangeError(ArgumentIndexError):
    """cache_batch_idx points to a row that does not exist."""

    code = "KV136"
    problem = "a cache row index is outside the cache"
    fix = "use row numbers from 0 to the number of cache rows - 1"


class BatchIndexTensorError(ArgumentValueError):
    """cache_batch_idx has the wrong dtype or shape."""

    code = "KV137"
    problem = "cache_batch_idx must be an int32 tensor of shape (batch,)"
    fix = "pass one int32 row number per sequence"


class DuplicateWriteError(ArgumentValueError):
    """Two sequences own one cache row, page or slot while appending; either could win."""

    code = "KV138"
    problem = "two new tokens would be written to the same slot"
    fix = "give every sequence its own cache row or pages while appending"


class CuSeqlensError(ArgumentValueError):
    """cu_seqlens_q or cu_seqlens_k is malformed."""

    code = "KV140"
    problem = (
        "cumulative lengths must be int32, start at 0, never decrease and stay within the tensor"
    )
    fix = "build them as cumsum of the lengths with a leading 0, int32, shape (batch + 1,)"


class MaxSeqlenTooSmallError(ArgumentValueError):
    """max_seqlen_q or max_seqlen_k is below the longest sequence; rows would be lost."""

    code = "KV141"
    problem = "the upper bound is smaller than the longest sequence"
    fix = "pass a true upper bound or None"


class CuSeqlensNewError(ArgumentValueError):
    """cu_seqlens_k_new is malformed or has no k to describe."""

    code = "KV142"
    problem = "cu_seqlens_k_new must be an int32 tensor of shape (batch + 1,) given together with k"
    fix = "pass it with ragged k and v only, built like cu_seqlens_q"


class TwoKeyLayoutsError(ArgumentValueError):
    """Keys cannot be both paged and packed."""

    code = "KV169"
    problem = "page_table and cu_seqlens_k exclude each other"
    fix = "use seqused_k for the lengths of a paged cache"


class CacheExpandedError(ArgumentValueError):
    """The cache is an expanded view; appending to it would write one slot many times."""

    code = "KV170"
    problem = "a cache with a zero stride cannot be written"
    fix = "append to real memory: call .contiguous() once when the cache is made"


class NotATensorError(ArgumentTypeError):
    """An argument that must be a tensor is something else."""

    code = "KV171"
    problem = "a torch.Tensor is needed"
    fix = "pass a tensor; torch.as_tensor makes one of a list or an array"


class CacheRankError(ArgumentValueError):
    """k_cache or v_cache has the wrong rank or a zero-sized head dimension."""

    code = "KV173"
    problem = "a cache has the wrong number of dimensions"
    fix = (
        "use (rows, capacity, kv_heads, dim), (pages, page_size, kv_heads, dim) with a page "
        "table, or (total_k, kv_heads, dim) with cu_seqlens_k"
    )


class DenseBatchError(ArgumentValueError):
    """The dense cache's first dimension is smaller than or different from the batch."""

    code = "KV174"
    problem = "a dense cache needs a row for every sequence"
    fix = "give the cache batch rows, or select rows with cache_batch_idx"


class SlotMappingError(ArgumentValueError):
    """slot_mapping has the wrong dtype or shape, or there is nothing to write."""

    code = "KV175"
    problem = "slot_mapping must be int64 with one slot per new token, given together with k"
    fix = "pass page * page_size + offset per token, -1 to skip one"


class SlotOutOfRangeError(ArgumentIndexError):
    """slot_mapping points outside the pool."""

    code = "KV176"
    problem = "a slot lies outside the cache"
    fix = "use slots from 0 to pages * page_size - 1, or -1 to skip a token"


class SeqUsedError(ArgumentValueError):
    """seqused_q or seqused_k has the wrong dtype, shape or range."""

    code = "KV177"
    problem = "seqused must be an int32 tensor of shape (batch,) within the sequences"
    fix = "pass one used length per sequence"

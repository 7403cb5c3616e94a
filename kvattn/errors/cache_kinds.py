"""Mistakes in the use of PagedKVCache, and the limits that it can reach."""

from __future__ import annotations

from kvattn.errors.base import ArgumentTypeError, ArgumentValueError, KvattnError


class CacheLimitError(KvattnError, RuntimeError):
    """The cache is full in one of its dimensions; nothing has been changed by the call."""


class OutOfPagesError(CacheLimitError):
    """The pool has fewer free pages than the call needs."""

    code = "KV201"
    problem = "the cache has not enough free pages"
    fix = "free or truncate sequences, or make the cache with a larger num_pages"


class SequenceTooLongError(CacheLimitError):
    """A sequence would need more pages than its row of the page table has columns."""

    code = "KV202"
    problem = "a sequence outgrows its row of the page table"
    fix = "end the sequence, or make the cache with a larger max_pages_per_seq"


class BatchFullError(CacheLimitError):
    """Every row of the page table belongs to a live sequence."""

    code = "KV203"
    problem = "the cache has not enough free rows"
    fix = "free sequences, or make the cache with a larger max_batch"


class UnknownSequenceError(ArgumentValueError):
    """The id was never handed out, or its sequence has been freed."""

    code = "KV204"
    problem = "there is no such sequence"
    fix = "use an id that allocate, fork or share returned and that has not been freed since"


class DuplicateSequenceError(ArgumentValueError):
    """One sequence is named twice in one call."""

    code = "KV205"
    problem = "a sequence may appear only once"
    fix = "name each sequence once; where it has several token counts, add them up"


class TokenCountError(ArgumentValueError):
    """A number of tokens or sequences is not a non-negative integer."""

    code = "KV206"
    problem = "a count must be a non-negative integer"
    fix = "pass an int of at least 0; reserve and commit take one per sequence, as in {seq: 1}"


class TruncateLengthError(ArgumentValueError):
    """truncate was asked for a length that the sequence does not have."""

    code = "KV207"
    problem = "a sequence can only be truncated to a length within it"
    fix = "append to make a sequence longer; truncate only drops tokens"


class PrefixLengthError(ArgumentValueError):
    """share was asked for more tokens than the sequence has."""

    code = "KV208"
    problem = "only tokens that the sequence holds can be shared"
    fix = "share at most length(seq) tokens, after they have been committed"


class NotReservedError(ArgumentValueError):
    """Tokens are addressed that no page has been reserved for."""

    code = "KV209"
    problem = "the tokens lie outside the pages of the sequence"
    fix = "call reserve for the new tokens before they are written and committed"


class CacheSizeError(ArgumentValueError):
    """A dimension of the cache is not a positive integer."""

    code = "KV210"
    problem = "a size of the cache must be a positive integer"
    fix = "pass an int of at least 1"


class CacheStorageDtypeError(ArgumentTypeError):
    """Keys and values cannot be stored in this dtype."""

    code = "KV211"
    problem = "the cache cannot be stored in this dtype"
    fix = "pass one of these torch dtypes; getattr(torch, name) gives it for a name"


class CacheDescaleError(ArgumentValueError):
    """k_descale, v_descale and token_descale do not fit the cache or each other."""

    code = "KV212"
    problem = "the scales do not fit the cache"
    fix = "pass a float, a tensor of shape (kv_heads,) or (num_layers, kv_heads), or token_descale"


class LayerIndexError(ArgumentValueError):
    """There is no such layer."""

    code = "KV213"
    problem = "the layer does not exist"
    fix = "use layers from 0 to num_layers - 1"


class ReorderError(ArgumentValueError):
    """The indices for reorder do not name one source for every sequence."""

    code = "KV214"
    problem = "reorder needs one source position for every sequence"
    fix = (
        "pass a position from 0 for each sequence, and name the sequences with seqs unless all "
        "live ones take part"
    )


class CaptureError(KvattnError, RuntimeError):
    """The page table would be changed while a CUDA graph records; replays would not repeat it."""

    code = "KV215"
    problem = "the cache's bookkeeping cannot be recorded in a CUDA graph"
    fix = "reserve before the capture or replay, and commit after it"

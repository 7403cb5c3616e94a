"""A Transformers cache whose keys and values live in the pages of a PagedKVCache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvattn import flash_attn_with_kvcache
from kvattn.cache import CacheStats, PagedKVCache
from kvattn.counting import positive
from kvattn.errors.transformers_kinds import (
    AttentionNotEnabledError,
    LayerShapeError,
    ModelConfigError,
    StepIncompleteError,
)
from kvattn.integrations._steps import Sequences, Step, check_mask
from kvattn.integrations._transformers_versions import Cache, CacheLayerMixin, decoder_config
from kvattn.storage import Scale, check_storage

NAME = "kvattn"
COLUMNS = "_kvattn_columns"  # on a mask over queries and keys: the (batch, columns) mask behind it
WHOLE = "_kvattn_whole"  # on a (batch, columns) mask: it hides nothing
_LAYER = "_kvattn_layer"  # on new keys and values: the cache layer that they are meant for
_AS_STORED = "layers that attend once, to the very tensors that they store"
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


class KvattnLayer(CacheLayerMixin):
    """One layer of a KvattnCache: joins each step of its sequences and attends over their pages."""

    is_sliding = False  # pages keep every token; windows are left to the attention call
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, sequences: Sequences, index: int, call: Callable[..., Any]) -> None:
        super().__init__()
        self.sequences = sequences
        self.index = index
        self.call = call
        self.steps = 0

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        rotary: tuple[Tensor, Tensor, int] | None = None,
        **options: Any,
    ) -> Tensor:
        """Appends the new tokens of this layer and attends over all of its tokens.

        Args:
            query, key, value: (batch, columns, heads | kv heads, dim), with padding columns.
            mask: None, (batch, all columns), or (batch, heads, columns, all columns).
            rotary: the model's cosines and sines of the new columns and how many entries of each
                to use, when query and key are not rotated yet.
            options: further arguments of flash_attn_with_kvcache.

        Returns:
            (batch, columns, heads, value dim); 0 in padding columns.
        """
        mask = padding_of(mask)
        grid = mask if mask is not None and mask.dim() == 4 else None
        if grid is not None:
            begins = self.steps == self.sequences.count
            columns = self.sequences.columns + (key.shape[1] if begins else 0)
            # One column would not mean all of them, but a model that saw its new keys only.
            check_mask(grid, query, columns, least=columns)
        step = self._join(key, value, mask if grid is None else getattr(grid, COLUMNS, None))
        k_cache, v_cache, descales = step.memory[self.index]
        options.setdefault("causal", True)
        if rotary is not None:
            options |= step.rotary(*rotary)
        if grid is not None:
            options |= step.grid(grid, "softcap" in options)
        if grid is None and step.packed is None and self._plain():
            return self._repeat(step, query, key, value, options)
        if step.packed is not None:
            query, key, value = step.pack(query), step.pack(key), step.pack(value)
            options["cu_seqlens_q"] = options["cu_seqlens_k_new"] = step.packed.edges
        out = self.call(
            query,
            k_cache,
            v_cache,
            key,
            value,
            cache_seqlens=step.before,
            page_table=step.table,
            **descales,
            **options,
        )
        return step.unpack(out)

    def _plain(self) -> bool:
        """Whether nobody watches the call: then the step's layers share its checks."""
        unwatched = self.call is flash_attn_with_kvcache and not torch.compiler.is_compiling()
        return unwatched and not torch.is_grad_enabled()

    def _repeat(
        self, step: Step, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """The call of this layer, as one of several alike in the step."""
        k_cache, v_cache, descales = step.memory[self.index]
        index = {"cache_seqlens": step.before, "page_table": step.table}
        for name in ("rotary_cos", "rotary_sin", "rotary_seqlens"):
            if name in options:
                index[name] = options.pop(name)
        layer = {"q": query, "k": key, "v": value, "k_cache": k_cache, "v_cache": v_cache}
        layer |= descales
        for name in ("sinks", "q_norm_weight", "k_norm_weight"):
            if name in options:
                layer[name] = options.pop(name)
        return step.calls.attend(index, layer, options)

    def _join(self, key: Tensor, value: Tensor, columns: Tensor | None) -> Step:
        """The current step, or a new one if this layer has had its turn in the current one."""
        sequences = self.sequences
        if self.steps == sequences.count:
            sequences.begin(key, value, columns)
        step, turn = sequences.step, self.steps + 1
        if step is None or turn != sequences.count:
            got = f"layer {self.index} at step {turn}"
            raise StepIncompleteError("cache", got, f"step {sequences.count}, as other layers")
        if self.steps == 0:
            self._check_shape(step.pages, key, value)
        self.steps = turn
        return step

    def _check_shape(self, pages: PagedKVCache, key: Tensor, value: Tensor) -> None:
        came = key.shape[2], key.shape[3], value.shape[3]
        kept = pages.num_kv_heads, pages.head_dim, pages.head_dim_v
        if came != kept:
            got = f"(kv heads, dim, value dim) {came} in layer {self.index}"
            raise LayerShapeError("key", got, kept)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the first step makes the pages of all layers."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hands itself to the attention function with the new tokens, which go there untouched."""
        if self.sequences.handed is not None:
            raise ModelConfigError("cache", _changed(self.sequences.handed), _AS_STORED)
        self.sequences.handed = self.index
        setattr(key_states, _LAYER, self)
        setattr(value_states, _LAYER, self)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.sequences.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.sequences.columns

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


def receiver(query: Tensor, key: Tensor, value: Tensor) -> KvattnLayer | None:
    """The layer whose update handed out these keys and values; None if no KvattnCache did.

    Raises:
        ModelConfigError: they are not what it was given, or not for the first time, or those of an
            encoder.
    """
    layer: KvattnLayer | None = getattr(key, _LAYER, None)
    other: KvattnLayer | None = getattr(value, _LAYER, None)
    known = layer or other
    if known is None:
        return None
    if layer is not other or known.sequences.handed != known.index:
        raise ModelConfigError("cache", _changed(known.index), _AS_STORED)
    known.sequences.handed = None
    if key.shape[2] != query.shape[2]:
        got = f"layer {known.index}, which attends to {key.shape[2]} keys of an encoder"
        fix = "pass EncoderDecoderCache(KvattnCache(model.config), DynamicCache())"
        raise ModelConfigError("cache", got, "self-attention", fix)
    return known


def _changed(layer: int) -> str:
    return f"layer {layer}, which attends to other keys or values than those that it stores"


def padding_of(mask: Tensor | None) -> Tensor | None:
    """The mask, if it hides anything."""
    return None if getattr(mask, WHOLE, False) else mask


class KvattnCache(Cache):
    """A cache for `model.generate`: keys and values in pages, padding left out.

    The batch may be padded on the left; only tokens are stored. It grows as needed unless
    ``num_pages`` limits it. Several calls may continue one conversation; `reset` starts a new one.

    Args:
        config: the model's config.
        page_size: tokens per page; any positive number.
        num_pages: pages for all sequences together; None grows without a limit.
        dtype: dtype of the stored keys and values, for example torch.float8_e4m3fn; None means
            that of the model.
        k_descale, v_descale: what stored keys and values are multiplied by: None, a float, or
            float32 of shape (kv heads,) or (layers, kv heads).
        token_descale: one scale per token and head, written by the append (8-bit dtypes only).
        call: the attention call: `flash_attn_with_kvcache`, or a function that takes the same
            arguments, for example ``functools.partial(flash_attn_with_kvcache, backend="cpu")``.

    Raises:
        ModelConfigError: a layer of the model keeps no keys and values of its own.

    Example:
        >>> from kvattn.integrations.transformers import KvattnCache, enable
        >>> enable(model)
        >>> cache = KvattnCache(model.config, page_size=16)
        >>> model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), cache=cache)
        >>> cache.stats().pages_used
    """

    def __init__(
        self,
        config: Any,
        *,
        page_size: int = 16,
        num_pages: int | None = None,
        dtype: torch.dtype | None = None,
        k_descale: Scale = None,
        v_descale: Scale = None,
        token_descale: bool = False,
        call: Callable[..., Any] = flash_attn_with_kvcache,
    ) -> None:
        decoder = decoder_config(config)
        _check_layers(decoder)
        positive("page_size", page_size)
        if num_pages is not None:
            positive("num_pages", num_pages)
        check_storage(dtype, (k_descale, v_descale), token_descale)
        sequences = Sequences(
            decoder.num_hidden_layers,
            getattr(decoder, "sliding_window", None) is not None,
            num_pages,
            dtype,
            page_size=page_size,
            k_descale=k_descale,
            v_descale=v_descale,
            token_descale=token_descale,
        )
        self._start(decoder, sequences, call)

    def _start(self, decoder: Any, sequences: Sequences, call: Callable[..., Any]) -> None:
        layers = [KvattnLayer(sequences, index, call) for index in range(sequences.layers)]
        super().__init__(layers=layers)
        self._decoder = decoder
        self._call = call
        self.sequences = sequences
        self._nowhere = [False] * len(layers)

    @property
    def pages(self) -> PagedKVCache | None:
        """The pages; None before the first step. Replaced when the cache grows."""
        return self.sequences.pages

    def stats(self) -> CacheStats:
        """Sequences, tokens, pages and bytes."""
        if self.pages is None:
            return CacheStats(0, 0, 0, 0, 0, 0, 0, 0)
        return self.pages.stats()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model; the keys come back untouched and are appended by the attention."""
        layer = self.layers[layer_idx]
        begins = layer.steps == self.sequences.count
        if begins and self._decoder._attn_implementation != NAME:
            got = f"attn_implementation={self._decoder._attn_implementation!r}"
            raise AttentionNotEnabledError("cache", got, f"attn_implementation={NAME!r}")
        return layer.update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch so far, padding included."""
        return self.sequences.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.sequences.columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reset(self) -> None:
        """Forgets every token; the next call may bring another batch."""
        self.sequences.reset()
        for layer in self.layers:
            layer.steps = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on with the tokens of row beam_idx[i]; pages are shared, not copied."""
        self.sequences.reorder(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last ``-tokens_to_remove`` columns of every row.

        Raises:
            CropError: the number is positive, or larger than the columns that can be dropped.
        """
        self.sequences.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row ``repeats`` times."""
        if self.sequences.columns:
            self._select([row for row in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows that ``indices`` names, in that order; a bool tensor keeps its rows."""
        if self.sequences.columns:
            rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            self._select(rows.tolist())

    def _select(self, rows: Sequence[int]) -> None:
        self.sequences.select(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> KvattnCache:
        twin = type(self).__new__(type(self))
        twin._start(self._decoder, self.sequences.copy(), self._call)
        for layer, source in zip(twin.layers, self.layers, strict=True):
            layer.steps = source.steps
        return twin

    @property
    def batch_size(self) -> int:
        return self.sequences.batch or -1

    # One answer for every layer, so that a step does not ask each of them.
    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        return self._nowhere

    @property
    def is_linear(self) -> list[bool]:
        return self._nowhere

    @property
    def is_dummy(self) -> list[bool]:
        return self._nowhere


def _check_layers(decoder: Any) -> None:
    types = getattr(decoder, "layer_types", None) or ()
    odd = sorted({str(kind) for kind in types if kind not in _LAYER_TYPES})
    if odd:
        raise ModelConfigError(
            "config", f"layers of type {', '.join(odd)}", ", ".join(_LAYER_TYPES)
        )
    shared = getattr(decoder, "num_kv_shared_layers", None)
    if shared:
        got = f"{shared} layers that share the keys and values of others"
        raise ModelConfigError("config", got, "keys and values in every layer")

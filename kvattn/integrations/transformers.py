"""kvattn for Hugging Face Transformers: attention, a paged cache, and fused attention layers.

    from kvattn.integrations.transformers import KvattnCache, enable, fuse

    enable(model)                  # attn_implementation="kvattn"
    fuse(model)                    # or: also rotary and append inside the attention call
    model.generate(**inputs, cache=KvattnCache(model.config))

Transformers before 5.24 calls the argument `past_key_values`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvattn import flash_attn_varlen_func, flash_attn_with_kvcache
from kvattn.errors.transformers_kinds import AttentionArgumentError, OwnAttentionError
from kvattn.integrations import fused
from kvattn.integrations._steps import check_mask, grid_mods
from kvattn.integrations._transformers_cache import (
    COLUMNS,
    NAME,
    WHOLE,
    KvattnCache,
    padding_of,
    receiver,
)
from kvattn.integrations._transformers_versions import (
    CACHE_ARGUMENT,
    AttentionInterface,
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
    the_model,
)

__all__ = ["CACHE_ARGUMENT", "KvattnCache", "attention", "enable", "fuse", "mask", "unfuse"]

_END = "_kvattn_end"  # on a (batch, keys) mask: how many keys there are, whatever room is behind
_SPANS = "_kvattn_spans"  # on the same: what _spans found in it
_WINDOW = "_kvattn_window"  # on the same: how many keys a row sees, itself included
# What only other attention functions of Transformers take: which keys are seen, sinks of queries.
_UNKNOWN = ("position_bias", "indices", "block_indices", "sinks")


def enable(model: Any = None) -> None:
    """Registers attn_implementation "kvattn", and switches ``model`` to it if one is given.

    Raises:
        OwnAttentionError: the model computes its attention itself (Falcon, MPT, BLOOM, ...), so it
            cannot be switched.

    Example:
        >>> enable()
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvattn")
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    if model is None:
        return
    the_model(model).set_attn_implementation(NAME)
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        got = f"{type(model).__name__}, which computes its attention itself"
        raise OwnAttentionError("model", got, "a model that takes attn_implementation")


def fuse(model: Any) -> None:
    """Lets each attention layer do its projections and then one kvattn call.

    Norms of queries and keys, rotary embedding and append happen inside that call, over the pages
    of a `KvattnCache`. Calls with another cache, or in training mode, take the layers' own way.
    Also enables "kvattn". Fusing twice changes nothing.

    Known: Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma, Gemma-2, Gemma-3 (text), Phi-3, gpt-oss,
    and models of other names that use their architecture, such as SmolLM2.

    Raises:
        UnsupportedModelError: the model's attention is not one of these; nothing is changed.

    Example:
        >>> fuse(model)
        >>> model.generate(**inputs, cache=KvattnCache(model.config))
        >>> unfuse(model)
    """
    layers = fused.layers_of(the_model(model))
    before = model.config._attn_implementation
    enable(model)
    fused.install(model, layers, before)


def unfuse(model: Any) -> None:
    """Gives the layers their own forward back, and the model the attention it had before `fuse`."""
    before = fused.remove(the_model(model))
    if before is not None:
        model.set_attn_implementation(before)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function behind attn_implementation "kvattn".

    Args:
        module: the attention layer; its `is_causal` counts where the argument is None.
        query, key, value: (batch, heads | kv heads, columns, dim), rotated; keys from
            `KvattnCache.update`, or all keys of any other cache.
        attention_mask: what `mask` returned, or a mask over (batch, heads, queries, keys).
        scaling: softmax scale; None means ``dim ** -0.5``.
        dropout: must be 0.
        sliding_window: a row sees this many keys, itself included. What a mask of `mask` says of
            it comes first, as it does in attention that knows nothing but the mask.
        softcap: None or 0 for none.
        s_aux: (heads,) sinks.

    Returns:
        (batch, columns, heads, value dim), and None for the weights.

    Raises:
        AttentionArgumentError: dropout, attention weights, a position bias or chosen keys are
            asked for, or the mask does not fit.
    """
    layer = receiver(query, key, value)
    if dropout:
        raise AttentionArgumentError("dropout", dropout, "0", "call model.eval()")
    if output_attentions:
        raise AttentionArgumentError("output_attentions", True, "False")
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise AttentionArgumentError(name, "a tensor", "None")
    sliding_window = getattr(attention_mask, _WINDOW, sliding_window)
    attention_mask = padding_of(attention_mask)
    options: dict[str, Any] = {"softmax_scale": scaling}
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is not None:
        options["window_size"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    if softcap:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if layer is not None:
        return layer.attend(query, key, value, attention_mask, causal=causal, **options), None
    edges, key_edges = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if attention_mask is None and edges is not None and key_edges is not None:
        return _packed(query, key, value, edges, key_edges, causal=causal, **options), None
    return _whole(query, key, value, attention_mask, causal, options), None


def _packed(
    query: Tensor, key: Tensor, value: Tensor, edges: Tensor, key_edges: Tensor, **options: Any
) -> Tensor:
    """Attention within sequences that lie one behind the other in a batch of one row."""
    if query.shape[0] != 1:
        got = f"a batch of {query.shape[0]} rows"
        raise AttentionArgumentError("cu_seq_lens_q", got, "one row that holds all sequences")
    q, k, v = query[0], key[0], value[0]
    out: Any = flash_attn_varlen_func(q, k, v, edges.int(), key_edges.int(), **options)
    return out[None]


def _whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    causal: bool,
    options: dict[str, Any],
) -> Tensor:
    """Attention over keys that are all there, as Transformers' own caches return them."""
    options["causal"] = causal
    if attention_mask is not None:
        check_mask(attention_mask, query, key.shape[1])
    if attention_mask is not None and attention_mask.dim() == 4:
        del options["causal"]  # the mask says it, and the window
        options.pop("window_size", None)
        options |= grid_mods(attention_mask, "softcap" in options)
    elif attention_mask is not None:
        spans = _spans(attention_mask)
        options |= {"cache_seqlens": spans.ends, "cache_leftpad": spans.starts}
        if not spans.solid or (spans.trailing and not causal):
            del options["cache_leftpad"]  # so that mods count keys from the mask's first column
            options["mask_mod"] = lambda b, h, q, k: attention_mask[b, k]
    out: Any = flash_attn_with_kvcache(query, key, value, **options)
    return out


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function behind attn_implementation "kvattn": as little mask as will do.

    Returns:
        None where causality or its absence says everything; (batch, keys) bool where there is
        padding, room behind the last key, or a window, which is noted on it; (batch, 1, queries,
        keys) bool for any other pattern.
    """
    if hasattr(attention_mask, _END):
        return attention_mask  # generate has prepared it for a static cache
    if _reads_masks(kwargs.get("config")) or _anatomy(mask_function) not in _PLAIN:
        grid = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=kwargs.get("allow_is_bidirectional_skip", False),
            local_size=kwargs.get("local_size"),
            use_vmap=use_vmap,
            device=device,
        )
        if grid is not None:
            setattr(grid, COLUMNS, attention_mask)
        return grid
    end = int(q_offset) + q_length - kv_offset
    if attention_mask is not None:
        attention_mask = attention_mask[:, kv_offset : kv_offset + end]
        whole = end == kv_length == attention_mask.shape[1] and bool(attention_mask.all())
    else:
        whole = end == kv_length
    window = kwargs.get("local_size")
    if whole and (window is None or window >= kv_length):
        return None
    if attention_mask is None:
        attention_mask = torch.ones((batch_size, end), dtype=torch.bool, device=device)
    room = kv_length - attention_mask.shape[1]
    visible = torch.nn.functional.pad(attention_mask, (0, room)).contiguous()
    setattr(visible, _END, end)
    setattr(visible, WHOLE, whole)
    if window is not None:
        setattr(visible, _WINDOW, window)
    return visible


class Spans(NamedTuple):
    """Where the visible keys of a padded batch lie.

    Attributes:
        starts, ends: (batch,) int32: first visible key, and the end of the last query's keys.
        solid: no row has padding between two visible keys.
        trailing: some row has padding behind its last visible key.
    """

    starts: Tensor
    ends: Tensor
    solid: bool
    trailing: bool


def _spans(visible: Tensor) -> Spans:
    """The spans of a (batch, keys) mask, found once a step."""
    spans: Spans | None = getattr(visible, _SPANS, None)
    if spans is None:
        end = getattr(visible, _END, visible.shape[1])
        live = visible[:, :end].int()
        total = live.sum(1)
        starts = torch.where(total > 0, live.argmax(1), end)
        stops = torch.where(total > 0, end - live.flip(1).argmax(1), end)
        spans = Spans(
            starts.int(),
            torch.full_like(starts, end, dtype=torch.int32),
            bool((total == stops - starts).all()),
            bool((stops < end).any()),
        )
        setattr(visible, _SPANS, spans)
    return spans


def _reads_masks(config: Any) -> bool:
    """Whether the model computes with its masks, so that it needs them over queries and keys."""
    if getattr(config, "model_type", None) == "doge" or hasattr(config, "index_topk"):
        return True
    return "indexed_attention" in (getattr(config, "layer_types", None) or ())


def _anatomy(function: Any) -> tuple[Any, ...]:
    """The code that a mask function runs, itself and what it has closed over."""
    parts: list[Any] = []
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        parts += [_anatomy(part) for part in (held if isinstance(held, tuple) else (held,))]
    return getattr(function, "__code__", None), *parts


_PLAIN = [_anatomy(causal_mask_function), _anatomy(sliding_window_causal_mask_function(2))]

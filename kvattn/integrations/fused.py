"""Attention layers that do their projections and then one kvattn call over a KvattnCache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvattn.errors.transformers_kinds import AttentionArgumentError, UnsupportedModelError
from kvattn.integrations._transformers_cache import KvattnCache
from kvattn.integrations._transformers_versions import cache_of

_SUM = "_kvattn_sum"  # on a norm: the state of its weight, and the sum made of it
_BEFORE = "_kvattn_before_fuse"  # on a fused model: its attn_implementation before that

Projection = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]


def _linear(layer: Any, name: str, x: Tensor) -> Tensor:
    """A projection of the layer; a plain one is applied without the detour through its call."""
    module = layer._modules[name]
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        projected: Tensor = module(x)
        return projected
    weights: dict[str, Any] = module._parameters
    return nn.functional.linear(x, weights["weight"], weights["bias"])


def _separate(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three projections: (batch, columns, hidden) -> q, k, v of (batch, columns, heads, dim)."""
    shape = (*hidden.shape[:-1], -1, layer.head_dim)
    return (
        _linear(layer, "q_proj", hidden).view(shape),
        _linear(layer, "k_proj", hidden).view(shape),
        _linear(layer, "v_proj", hidden).view(shape),
    )


def _joint(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One projection for queries, keys and values."""
    heads, kv_heads = layer.config.num_attention_heads, layer.num_key_value_heads
    joint = _linear(layer, "qkv_proj", hidden).unflatten(-1, (-1, layer.head_dim))
    q, k, v = joint.split((heads, kv_heads, kv_heads), dim=-2)
    return q, k, v


@dataclass(frozen=True)
class Family:
    """How the attention layers of one model type differ from Llama's.

    Attributes:
        attention: name of the attention class.
        project: projections.
        norm: what the weights of its norms of q and k are added to; None if it has none.
        window: where the sliding window is written: "layer", "config" or nowhere.
        softcap: attribute of the layer that holds it.
        sinks: attribute of the layer that holds them.
        half_tables: the rotary tables hold each frequency once, not twice.
    """

    attention: str
    project: Projection = _separate
    norm: float | None = None
    window: str | None = None
    softcap: str | None = None
    sinks: str | None = None
    half_tables: bool = False


FAMILIES = {
    "llama": Family("LlamaAttention"),
    "mistral": Family("MistralAttention", window="config"),
    "mixtral": Family("MixtralAttention", window="config"),
    "qwen2": Family("Qwen2Attention", window="layer"),
    "qwen3": Family("Qwen3Attention", norm=0.0, window="layer"),
    "gemma": Family("GemmaAttention"),
    "gemma2": Family("Gemma2Attention", window="layer", softcap="attn_logit_softcapping"),
    "gemma3_text": Family("Gemma3Attention", norm=1.0, window="layer"),
    "phi3": Family("Phi3Attention", _joint, window="config"),
    "gpt_oss": Family("GptOssAttention", window="layer", sinks="sinks", half_tables=True),
}


def layers_of(model: Any) -> list[tuple[nn.Module, Family]]:
    """The attention layers of a model that can be fused, all of them.

    Raises:
        UnsupportedModelError: the model type is unknown, or its layers are not the expected ones.
    """
    decoder = model.config.get_text_config(decoder=True)
    family = FAMILIES.get(decoder.model_type)
    if family is None:
        got = f"model_type {decoder.model_type!r}"
        raise UnsupportedModelError("model", got, ", ".join(sorted(FAMILIES)))
    layers = [m for m in model.modules() if type(m).__name__ == family.attention]
    if len(layers) != decoder.num_hidden_layers:
        got = f"{len(layers)} layers of class {family.attention}"
        raise UnsupportedModelError("model", got, f"{decoder.num_hidden_layers}, one per layer")
    for layer in layers:
        own = layer.__dict__.get("forward")
        if own is not None and getattr(own, "func", None) is not _forward:
            got = f"a {family.attention} whose forward has been replaced already"
            raise UnsupportedModelError("model", got, "the class's own forward")
    return [(layer, family) for layer in layers]


def install(model: Any, layers: list[tuple[nn.Module, Family]], before: str) -> None:
    """Replaces the layers' forward, and notes which attention the model had before."""
    if getattr(model, _BEFORE, None) is None:
        setattr(model, _BEFORE, before)
    for layer, family in layers:
        layer.forward = partial(_forward, layer, family, _options(layer, family))


def remove(model: Any) -> str | None:
    """Gives the layers their own forward back; returns the attention the model had before."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "func", None) is _forward:
            del module.forward
    before: str | None = getattr(model, _BEFORE, None)
    setattr(model, _BEFORE, None)
    return before


def _norms(q_norm: Any, k_norm: Any, base: float) -> dict[str, Any] | None:
    """The call's arguments for two norms; None where they are not the model's own any more."""
    found = []
    for norm in (q_norm, k_norm):
        own = type(norm).__module__.startswith("transformers.models.")
        if not own or norm._forward_hooks or norm._forward_pre_hooks:
            return None
        found.append((_weight(norm, base), getattr(norm, "variance_epsilon", None) or norm.eps))
    (q_weight, q_eps), (k_weight, k_eps) = found
    if q_eps != k_eps:
        return None
    return {"q_norm_weight": q_weight, "k_norm_weight": k_weight, "norm_eps": q_eps}


def _weight(norm: Any, base: float) -> Tensor:
    """What a norm multiplies by; a sum is kept until the weight is another one."""
    weight: Tensor = norm._parameters["weight"]
    if base == 0.0:
        return weight
    if torch.compiler.is_compiling():
        return weight.float() + base
    state = weight.data_ptr(), weight.device, 0 if weight.is_inference() else weight._version
    known = norm.__dict__.get(_SUM)
    if known is None or known[0] != state:
        known = norm.__dict__[_SUM] = state, weight.float() + base
    total: Tensor = known[1]
    return total


def _options(layer: Any, family: Family) -> dict[str, Any]:
    """The attention call's arguments that stay the same for a layer."""
    options: dict[str, Any] = {"softmax_scale": layer.scaling}
    source = {"layer": layer, "config": layer.config}.get(family.window or "")
    window = getattr(source, "sliding_window", None)
    if window is not None:
        options["window_size"] = (window - 1, 0)
    softcap = getattr(layer, family.softcap) if family.softcap else None
    if softcap:
        options["softcap"] = softcap
    return options


def _forward(
    layer: Any,
    family: Family,
    options: dict[str, Any],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The forward of a fused layer."""
    cache = cache_of(kwargs)
    if layer.training or not isinstance(cache, KvattnCache):
        return type(layer).forward(
            layer, hidden_states, position_embeddings, attention_mask, **kwargs
        )
    if kwargs.get("output_attentions"):
        raise AttentionArgumentError("output_attentions", True, "False")
    q, k, v = family.project(layer, hidden_states)
    if family.norm is not None:
        norms = _norms(layer.q_norm, layer.k_norm, family.norm)
        if norms is None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        else:
            options = {**options, **norms}
    if family.sinks:
        options = {**options, "sinks": getattr(layer, family.sinks)}
    cos, sin = position_embeddings
    half = cos.shape[-1] if family.half_tables else cos.shape[-1] // 2
    out = cache.layers[layer.layer_idx].attend(
        q, k, v, attention_mask, rotary=(cos, sin, half), **options
    )
    return _linear(layer, "o_proj", out.flatten(2)), None

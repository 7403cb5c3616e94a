"""Tiny random models of many families, ragged prompts, and generation on every path of kvattn."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor

from kvattn.integrations.transformers import CACHE_ARGUMENT, KvattnCache, enable, fuse

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
PLAIN = {name: size for name, size in SIZES.items() if name != "head_dim"}
MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
UNTIED = {"tie_word_embeddings": False}  # tied random weights repeat one token
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 6}),
    "mixtral": ("Mixtral", {**SIZES, **EXPERTS, "sliding_window": 6}),
    "qwen2": ("Qwen2", PLAIN),
    "qwen3": ("Qwen3", SIZES),
    "gemma": ("Gemma", {**SIZES, **UNTIED}),
    "gemma2": ("Gemma2", {**SIZES, **UNTIED, **MIXED, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**SIZES, **UNTIED, **MIXED, "head_dim": 256}),
    "phi3": ("Phi3", {**PLAIN, "rope_parameters": PARTIAL}),
    "gpt_oss": ("GptOss", {**SIZES, **MIXED, **EXPERTS}),
}
WITHOUT_SDPA = ("gemma2", "gpt_oss")  # softcap and sinks: Transformers has them in eager only
PATHS = ("dynamic", "static", "paged", "fused")
RAGGED = (8, 12, 5)

Prompts = tuple[Tensor, Tensor]


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny random model whose logits differ clearly, with the attention to compare with."""
    torch.manual_seed(3)
    prefix, sizes = CONFIGS[name]
    config = getattr(transformers, f"{prefix}Config")(**{**sizes, **changes})
    config._attn_implementation = "eager" if name in WITHOUT_SDPA else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config)
    return randomised(model).to(dtype)


def randomised(model: Any) -> Any:
    """The model with weights that make its logits differ clearly."""
    model.eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            parameter.add_(torch.randn(parameter.shape), alpha=0.3)
        if parameter.dim() > 1 or parameter.shape == (4,):  # matrices and sinks
            parameter.normal_(0, 0.25 if parameter.dim() > 1 else 1.0)
    return model


def prompts(*lengths: int, width: int = 12) -> Prompts:
    """Random tokens padded on the left to ``width``, and their mask."""
    generator = torch.Generator().manual_seed(len(lengths))
    ids = torch.randint(2, 97, (len(lengths), width), generator=generator)
    visible = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return ids * visible, visible.long()


def generate(model: Any, batch: Prompts, cache: Any = None, new: int = 14, **more: Any) -> Tensor:
    """The greedy continuation, prompt included."""
    if cache is not None:
        more[CACHE_ARGUMENT] = cache
    ids, visible = batch
    tokens: Tensor = model.generate(
        ids, attention_mask=visible, max_new_tokens=new, do_sample=False, **more
    )
    return tokens


def through(model: Any, path: str, batch: Prompts, page_size: int = 5, **more: Any) -> Tensor:
    """What the model generates on one of kvattn's paths."""
    fuse(model) if path == "fused" else enable(model)
    if path == "static":
        return generate(model, batch, cache_implementation="static", **more)
    cache = KvattnCache(model.config, page_size=page_size) if path != "dynamic" else None
    return generate(model, batch, cache, **more)


def logits(model: Any, batch: Prompts, cache: Any, first: int = 8, **more: Any) -> Tensor:
    """Logits of all real tokens: the first columns in one call, then one column at a time."""
    ids, visible = batch
    edges = [0, *range(first, ids.shape[1] + 1)]
    position = (visible.cumsum(1) - 1).clamp_min(0)
    parts = []
    for start, stop in pairwise(edges):
        call = {CACHE_ARGUMENT: cache, "position_ids": position[:, start:stop], **more}
        out = model(ids[:, start:stop], attention_mask=visible[:, :stop], use_cache=True, **call)
        parts.append(out.logits)
    return torch.cat(parts, 1)[visible.bool()]

"""Models of two small layers with random weights, and a tokenizer of single words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WORDS = ["<unk>", "<pad>", "<s>", "</s>", "user", "bot", *(f"w{i}" for i in range(58))]
TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} bot{% endif %}"
)


def tiny_tokenizer(chat: bool = True) -> PreTrainedTokenizerBase:
    """No token ends a text unless `eos_token` is set to one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(WORDS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>")
    if chat:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_model(kind: str = "llama", **overrides: Any) -> PreTrainedModel:
    """A causal model of the given type; no token ends a text."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings | overrides))
    return model.eval().requires_grad_(False)


def save_tiny(directory: Path, chat: bool = True, kind: str = "llama", **overrides: Any) -> Path:
    tiny_model(kind, **overrides).save_pretrained(directory)
    tiny_tokenizer(chat).save_pretrained(directory)
    return directory

"""Models beyond those that fuse give the tokens of their own attention, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvattn.errors.cache_kinds import CacheDescaleError, CacheSizeError, CacheStorageDtypeError
from kvattn.errors.transformers_kinds import (
    AttentionArgumentError,
    ModelConfigError,
    NotAModelError,
    OwnAttentionError,
)

transformers = pytest.importorskip("transformers", minversion="5.17")

from families import (  # noqa: E402
    EXPERTS,
    MIXED,
    PLAIN,
    RAGGED,
    SIZES,
    UNTIED,
    generate,
    prompts,
    randomised,
)

from kvattn.integrations._transformers_versions import installed  # noqa: E402
from kvattn.integrations.transformers import (  # noqa: E402
    CACHE_ARGUMENT,
    KvattnCache,
    attention,
    enable,
    fuse,
    mask,
    unfuse,
)

LATENT = {
    **PLAIN,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
INDEXED = {"index_topk": 6, "index_n_heads": 2, "index_head_dim": 16}
SMALL = {
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
MODELS: dict[str, dict[str, Any]] = {
    "Cohere2": {**SIZES, **MIXED},
    "Starcoder2": {**PLAIN, "sliding_window": 6},
    "Olmo2": PLAIN,
    "Llama4Text": {
        **SIZES,
        "num_local_experts": 2,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
    "Phimoe": {**PLAIN, **EXPERTS, **UNTIED, "sliding_window": 6},  # only its masks know the window
    "GPT2": {**SMALL, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "OPT": {
        **SMALL,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}
# These attend to something else than what they store, or make their masks of all values so far.
CHANGING: dict[str, dict[str, Any]] = {
    "DeepseekV3": LATENT,
    "DiffLlama": PLAIN,
    "JetMoe": {**SMALL, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2}
    | {"kv_channels": 16, "intermediate_size": 48, **EXPERTS},
    "Doge": SIZES,
}
OWN: dict[str, dict[str, Any]] = {  # they compute their attention themselves
    "Falcon": {**SMALL, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 97},
    "Bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 97},
}
ODD = torch.arange(8) % 2 == 1


def build(name: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**sizes)
    config._attn_implementation = "eager"
    if config.is_encoder_decoder:
        return randomised(transformers.AutoModelForSeq2SeqLM.from_config(config))
    return randomised(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("name", [*MODELS, *CHANGING])
def test_any_model_with_its_own_caches(name: str) -> None:
    model, batch = build(name, (MODELS | CHANGING)[name]), prompts(*RAGGED)
    wanted = generate(model, batch)
    enable(model)
    assert torch.equal(generate(model, batch), wanted)
    assert torch.equal(generate(model, batch, use_cache=False), wanted)
    if name == "Llama4Text" and installed() < (5, 22):
        return  # those releases cannot make its masks for a static cache
    assert torch.equal(generate(model, batch, cache_implementation="static"), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_any_model_with_pages(name: str) -> None:
    model, batch = build(name, MODELS[name]), prompts(*RAGGED)
    wanted = generate(model, batch)
    enable(model)
    assert torch.equal(generate(model, batch, KvattnCache(model.config, page_size=5)), wanted)


@pytest.mark.parametrize("name", CHANGING)
def test_models_that_change_what_they_store_are_right_or_refused(name: str) -> None:
    """Which of the two depends on the release: older ones expand latents before they store them."""
    model, batch = build(name, CHANGING[name]), prompts(*RAGGED)
    wanted = generate(model, batch)
    enable(model)
    cache = KvattnCache(model.config)
    try:
        got = generate(model, batch, cache)
    except (ModelConfigError, AttentionArgumentError) as error:
        assert error.code == ("KV409" if name == "Doge" else "KV403")
    else:
        assert torch.equal(got, wanted)
    cache.reset()
    assert cache.sequences.handed is None


@pytest.mark.parametrize("change", ["key", "value", "twice", "key of one layer"])
def test_pages_serve_only_what_they_were_given(change: str) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=2)
    cache, layer = KvattnCache(config), torch.nn.Identity()
    cache._decoder._attn_implementation = "kvattn"
    query, key, value = torch.randn(1, 4, 3, 16), *torch.randn(2, 1, 2, 3, 16)
    key, value = cache.update(key, value, 0)
    if change == "twice":
        attention(layer, query, key, value, None)
    with pytest.raises(ModelConfigError, match="layer 0"):
        if change == "key of one layer":
            attention(layer, query, key * 2, value * 2, None)
            cache.update(key, value, 1)
        other = key * 2 if change == "key" else key
        attention(layer, query, other, value * 2 if change == "value" else value, None)


@pytest.mark.parametrize("name", OWN)
def test_models_with_attention_of_their_own_are_refused(name: str) -> None:
    model = build(name, OWN[name])
    with pytest.raises(OwnAttentionError, match=f"{name}ForCausalLM"):
        enable(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV32Config"), reason="not in this release")
def test_chosen_keys_are_refused() -> None:
    model, batch = build("DeepseekV32", {**LATENT, **INDEXED}), prompts(*RAGGED)
    enable(model)
    with pytest.raises(AttentionArgumentError, match="indices"):
        generate(model, batch)
    with pytest.raises(ModelConfigError, match=r"layers of type .*_attention"):
        KvattnCache(model.config)


@pytest.mark.parametrize("name", ["position_bias", "indices", "block_indices", "sinks"])
def test_what_no_kernel_here_knows_is_refused(name: str) -> None:
    query, key = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    more: dict[str, Any] = {name: torch.zeros(3)}
    with pytest.raises(AttentionArgumentError, match=name):
        attention(torch.nn.Identity(), query, key, key, None, **more)


@pytest.mark.parametrize(
    "shape", [(2, 7), (2, 9), (1, 8), (8,), (2, 8, 8), (2, 1, 8, 7), (2, 1, 2, 8), (3, 1, 8, 8)]
)
def test_masks_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    query, key = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
    with pytest.raises(AttentionArgumentError, match="attention_mask"):
        attention(torch.nn.Identity(), query, key, key, torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("bias", [False, True], ids=["bool", "bias"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 8), (1, 4, 8, 1), (2, 1, 8, 8)])
def test_masks_spread_as_in_torch(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 8, 16), *torch.randn(2, 2, 2, 8, 16)
    grid = torch.randn(shape) > -1
    grid[..., 0] = True
    spread = torch.where(grid, torch.randn(shape), -torch.inf) if bias else grid
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, spread, enable_gqa=True
    )
    got, _ = attention(torch.nn.Identity(), query, key, value, spread)
    assert torch.allclose(got.transpose(1, 2), wanted, atol=1e-5)


def test_the_window_of_a_mask_is_noted_on_it() -> None:
    assert mask(2, 6, 6, local_size=6) is None
    noted = mask(2, 6, 6, local_size=3)
    assert noted is not None and bool(noted.all())
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16)
    index = torch.arange(6)
    near = (index <= index[:, None]) & (index > index[:, None] - 3)
    layer = torch.nn.Identity()
    wanted, _ = attention(layer, query, key, key, near.expand(2, 1, 6, 6))
    assert torch.allclose(attention(layer, query, key, key, noted)[0], wanted, atol=1e-5)


def test_borders_of_packed_sequences_count() -> None:
    model, (ids, _) = build("Olmo2", MODELS["Olmo2"]), prompts(12)
    parts = [model(ids[:, a:b]).logits for a, b in ((0, 7), (7, 12))]
    positions = torch.cat((torch.arange(7), torch.arange(5)))[None]
    borders = torch.tensor([0, 7, 12], dtype=torch.int32)
    more: dict[str, Any] = {
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "position_ids": positions,
    }
    enable(model)
    got = model(ids, use_cache=True, max_length_q=7, max_length_k=7, **more).logits
    assert torch.allclose(got, torch.cat(parts, 1), atol=1e-4)
    query = torch.zeros(2, 4, 3, 16)
    with pytest.raises(AttentionArgumentError, match="2 rows"):
        attention(torch.nn.Identity(), query, query, query, None, **more)


def bart() -> tuple[Any, Tensor, Tensor]:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 48}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    model = build("Bart", {**SMALL, **sizes, **ENDS, "forced_eos_token_id": None})
    ids, visible = prompts(*RAGGED)
    return model, ids.flip(1), visible.flip(1)


@pytest.mark.parametrize("beams", [1, 2])
def test_an_encoder_and_a_decoder(beams: int) -> None:
    model, ids, visible = bart()
    wanted = generate(model, (ids, visible), num_beams=beams)
    enable(model)
    assert torch.equal(generate(model, (ids, visible), num_beams=beams), wanted)
    own, across = KvattnCache(model.config), transformers.DynamicCache()
    cache = transformers.EncoderDecoderCache(own, across)
    assert torch.equal(generate(model, (ids, visible), cache, num_beams=beams), wanted)
    assert own.stats().tokens > 0


@pytest.mark.parametrize("padded", [True, False])
def test_keys_of_an_encoder_do_not_go_into_pages(padded: bool) -> None:
    model, ids, visible = bart()
    enable(model)
    batch = ids, visible if padded else torch.ones_like(visible)
    for cache in (
        KvattnCache(model.config),
        transformers.EncoderDecoderCache(KvattnCache(model.config), KvattnCache(model.config)),
    ):
        with pytest.raises(ModelConfigError, match=r"12 keys of an encoder.*DynamicCache"):
            generate(model, batch, cache)


@pytest.mark.parametrize("local", [6, 64])
@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_encoders(name: str, local: int) -> None:
    sizes = {**PLAIN, "local_attention": local, "global_attn_every_n_layers": 2}
    del sizes["num_key_value_heads"]
    config = getattr(transformers, f"{name}Config")(**sizes, cls_token_id=1, sep_token_id=2)
    torch.manual_seed(3)
    model = randomised(transformers.AutoModelForMaskedLM.from_config(config))
    model.set_attn_implementation("eager")
    ids, visible = prompts(*RAGGED)
    shown = visible.bool()
    whole, padded = model(ids).logits, model(ids, attention_mask=visible).logits[shown]
    enable(model)
    assert torch.allclose(model(ids).logits, whole, atol=1e-4)
    assert torch.allclose(model(ids, attention_mask=visible).logits[shown], padded, atol=1e-4)


def test_a_window_both_ways() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
    index, layer = torch.arange(8), torch.nn.Identity()
    near = (index - index[:, None]).abs() < 3
    wanted, _ = attention(layer, query, key, key, near.expand(2, 1, 8, 8))
    got, _ = attention(layer, query, key, key, None, is_causal=False, sliding_window=3)
    assert torch.allclose(got, wanted, atol=1e-5)


def test_something_else_than_a_model() -> None:
    for call in (enable, fuse, unfuse):
        with pytest.raises(NotAModelError, match=r"model: .*str"):
            call("path")
    with pytest.raises(NotAModelError, match=r"config: .*GPT2LMHeadModel.*model\.config"):
        KvattnCache(build("GPT2", MODELS["GPT2"]))


def test_a_compiled_model_is_one() -> None:
    model, batch = build("Olmo2", MODELS["Olmo2"]), prompts(*RAGGED)
    wanted, compiled = generate(model, batch), torch.compile(model, backend="eager")
    enable(compiled)
    assert model.config._attn_implementation == "kvattn"
    assert torch.equal(generate(compiled, batch, KvattnCache(model.config)), wanted)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"page_size": 0}, CacheSizeError),
        ({"num_pages": 0}, CacheSizeError),
        ({"dtype": torch.int32}, CacheStorageDtypeError),
        ({"token_descale": True}, CacheDescaleError),
    ],
)
def test_a_cache_is_checked_when_it_is_made(options: dict[str, Any], error: type) -> None:
    with pytest.raises(error, match=next(iter(options))):
        KvattnCache(transformers.LlamaConfig(), **options)


def test_a_mask_of_new_columns_only_is_refused() -> None:
    """One column would spread over all keys, in a model that took its new values for all."""
    model, (ids, _) = build("Olmo2", MODELS["Olmo2"]), prompts(12)
    enable(model)
    cache = KvattnCache(model.config)
    model(ids[:, :11], **{CACHE_ARGUMENT: cache})
    with pytest.raises(AttentionArgumentError, match=r"\(1, 1, 1, 1\)"):
        grid = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        model(ids[:, 11:], attention_mask=grid, **{CACHE_ARGUMENT: cache})

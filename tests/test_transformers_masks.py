"""Masks that are more than padding, fused layers as a switch, and every refusal of the adapter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvattn import flash_attn_with_kvcache
from kvattn.errors.option_kinds import RequiresGradError
from kvattn.errors.transformers_kinds import (
    AttentionArgumentError,
    AttentionNotEnabledError,
    CacheBatchError,
    LayerShapeError,
    ModelConfigError,
    PaddingError,
    StepIncompleteError,
    TransformersTooOldError,
    UnsupportedModelError,
)

transformers = pytest.importorskip("transformers", minversion="5.17")

from families import RAGGED, build, generate, logits, prompts, through  # noqa: E402

from kvattn.integrations import _transformers_versions  # noqa: E402
from kvattn.integrations.transformers import (  # noqa: E402
    CACHE_ARGUMENT,
    KvattnCache,
    attention,
    enable,
    fuse,
    mask,
    unfuse,
)

CACHES = ("none", "paged", "fused")


def forward(model: Any, ids: Tensor, cache: Any = None, **more: Any) -> Tensor:
    out: Tensor = model(ids, use_cache=cache is not None, **{CACHE_ARGUMENT: cache}, **more).logits
    return out


def cache_for(model: Any, kind: str) -> KvattnCache | None:
    """Switches the model to kvattn, and makes the cache that the kind of test needs."""
    fuse(model) if kind == "fused" else enable(model)
    return None if kind == "none" else KvattnCache(model.config, page_size=3)


def prefix_mask(columns: int) -> Tensor:
    """Every query sees the first four columns, and those up to its own."""
    index = torch.arange(columns)
    return ((index < 4) | (index <= index[:, None]))[None, None]


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("bias", [False, True], ids=["bool", "bias"])
def test_a_mask_over_queries_and_keys(bias: bool, kind: str) -> None:
    model, (ids, _) = build("llama"), prompts(12, 12)
    grid = prefix_mask(12).repeat(2, 1, 1, 1)
    grid[1, 0, :, 5] = False
    if bias:
        lowest = torch.finfo(torch.float32).min
        grid = torch.where(grid, torch.linspace(-2, 2, 12), lowest)
    wanted = forward(model, ids, attention_mask=grid)
    assert not torch.allclose(wanted, forward(model, ids), atol=1e-2)
    cache = cache_for(model, kind)
    assert torch.allclose(forward(model, ids, cache, attention_mask=grid), wanted, atol=1e-4)


@pytest.mark.parametrize("kind", CACHES)
def test_a_mask_over_heads_after_left_padding(kind: str) -> None:
    """The second call brings a mask over all columns; the padding of the first is not stored."""
    model, (ids, visible) = build("llama"), prompts(*RAGGED)
    grid = visible.bool()[:, None, None, :] & torch.ones(12, 12, dtype=torch.bool).tril()
    grid = grid.repeat(1, 4, 1, 1)
    grid[:, 1, :, 9] = grid[:, 3, 11, 8] = False
    grid[0, :, 11, 7] = False
    first, last = grid[:, :, :8, :8], grid[:, :, 8:]

    def both(cache: Any) -> Tensor:
        padding = first if cache is None else visible[:, :8]
        other = cache if cache is not None else transformers.DynamicCache()
        forward(model, ids[:, :8], other, attention_mask=padding)
        return forward(model, ids[:, 8:], other, attention_mask=last)

    wanted = both(None)
    cache = cache_for(model, kind)
    assert torch.allclose(both(cache), wanted, atol=1e-4)


@pytest.mark.parametrize("kind", CACHES)
def test_attention_both_ways(kind: str) -> None:
    """A pattern that is neither causal nor a window reaches kvattn as a mask of its own."""
    model, (ids, visible) = build("gemma3", use_bidirectional_attention=True), prompts(*RAGGED)
    shown = visible.bool()
    wanted = forward(model, ids, attention_mask=visible)[shown]
    cache = cache_for(model, kind)
    got = forward(model, ids, cache, attention_mask=visible)[shown]
    assert torch.allclose(got, wanted, atol=1e-4)
    assert cache is None or cache.stats().tokens == sum(RAGGED)


def test_packed_sequences_without_a_cache() -> None:
    model, (ids, _) = build("mistral"), prompts(12)
    positions = torch.cat((torch.arange(7), torch.arange(5)))[None]
    wanted = forward(model, ids, position_ids=positions)
    assert not torch.allclose(wanted, forward(model, ids), atol=1e-2)
    enable(model)
    assert torch.allclose(forward(model, ids, position_ids=positions), wanted, atol=1e-4)


HOLES = torch.tensor(
    [[1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0, 1, 1], [1] * 8]
)


@pytest.mark.parametrize("kind", CACHES)
def test_padding_on_the_right_and_in_the_middle(kind: str) -> None:
    model, (ids, _) = build("llama"), prompts(*[8] * 4, width=8)
    later = torch.cat((HOLES, torch.ones_like(HOLES[:, :3])), 1)
    ids = torch.cat((ids, ids[:, :3]), 1)
    shown = later.bool()

    def both(cache: Any) -> Tensor:
        start = forward(model, ids[:, :8], cache, attention_mask=HOLES)
        rest = forward(model, ids[:, 8:], cache, attention_mask=later)
        return torch.cat((start, rest), 1)[shown]

    wanted = both(transformers.DynamicCache())
    cache = cache_for(model, kind) or transformers.DynamicCache()
    assert torch.allclose(both(cache), wanted, atol=1e-4)


@pytest.mark.parametrize("kind", ["paged", "fused"])
def test_a_row_may_pause(kind: str) -> None:
    """A column that is padding in one row leaves that row as it is."""
    model, (ids, _) = build("llama"), prompts(6, 6, width=6)
    cache = cache_for(model, kind)
    visible = torch.ones_like(ids)
    visible[0, 4] = 0
    parts = [
        forward(model, ids[:, a:b], cache, attention_mask=visible[:, :b])
        for a, b in ((0, 4), (4, 5), (5, 6))
    ]
    alone = forward(model, ids[:1, [0, 1, 2, 3, 5]])
    order = {"position_ids": torch.arange(6)[None]}
    assert torch.allclose(parts[2][1], forward(model, ids, **order)[1, 5:], atol=1e-4)
    assert cache is not None and cache.pages is not None
    assert [cache.pages.length(row) for row in (0, 1)] == [5, 6]
    assert torch.allclose(parts[0][0], alone[0, :4], atol=1e-4)


def test_padding_without_causality() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 8, 16)
    index = torch.arange(8)
    for shown in ((index > 2) & (index < 6), (index < 2) | (index > 4)):
        visible = torch.stack((shown, index > 0))
        grid = visible[:, None, None, :]
        wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, grid)
        got, _ = attention(torch.nn.Identity(), query, key, value, visible, is_causal=False)
        assert torch.allclose(got.transpose(1, 2), wanted, atol=1e-5)


def test_a_static_cache_without_a_mask() -> None:
    model, (ids, _) = build("gemma3"), prompts(12, 12)
    wanted = forward(model, ids)
    enable(model)
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    parts = [forward(model, ids[:, a:b], cache) for a, b in ((0, 7), (7, 11), (11, 12))]
    assert torch.allclose(torch.cat(parts, 1), wanted, atol=1e-4)


def test_as_little_mask_as_will_do() -> None:
    visible = prompts(*RAGGED)[1].bool()
    assert mask(3, 12, 12) is None
    assert mask(3, 12, 12, attention_mask=torch.ones_like(visible)) is None
    kept = mask(3, 12, 12, attention_mask=visible)
    assert kept is not None and torch.equal(kept, visible)
    room = mask(3, 12, 16, attention_mask=visible)
    assert room is not None and torch.equal(room, torch.nn.functional.pad(visible, (0, 4)))
    assert mask(3, 12, 16, attention_mask=room) is room


def test_fuse_is_a_switch() -> None:
    model, batch = build("qwen3"), prompts(*RAGGED)
    wanted, layers = generate(model, batch), [block.self_attn for block in model.model.layers]
    fuse(model)
    fuse(model)
    assert model.config._attn_implementation == "kvattn"
    assert torch.equal(generate(model, batch), wanted), "other caches take the layers' own way"
    unfuse(model)
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(layer) for layer in layers)
    unfuse(model)
    assert torch.equal(generate(model, batch), wanted)


def test_a_fused_layer_makes_one_call() -> None:
    calls: list[dict[str, Any]] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append({"new": args[3].shape[1], **kwargs})
        return flash_attn_with_kvcache(*args, backend="reference", **kwargs)

    model, batch = build("gemma3"), prompts(12)
    wanted = generate(model, batch, new=5)
    fuse(model)
    cache = KvattnCache(model.config, call=counted)
    assert torch.equal(generate(model, batch, cache, new=5), wanted)
    assert [call["new"] for call in calls] == [12, 12, 1, 1, 1, 1, 1, 1, 1, 1]
    assert all(call["rotary_cos"].shape[1] == 128 for call in calls)
    assert [call.get("window_size") for call in calls[:2]] == [(5, 0), None]


def import_of(prelude: str) -> str:
    """What importing the integration says after ``prelude``."""
    code = f"import sys, types\n{prelude}\nimport kvattn.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode
    return done.stderr


def test_transformers_missing() -> None:
    said = import_of("sys.modules['transformers'] = None")
    assert "KV401" in said and "pip install 'kvattn[transformers]'" in said


def test_transformers_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.16.1")
    with pytest.raises(TransformersTooOldError, match=r"KV402.*5\.16\.1.*5\.17 or newer"):
        _transformers_versions.installed()
    monkeypatch.setattr("transformers.__version__", "6.0.dev0")
    assert _transformers_versions.installed() == (6, 0)


def no_pages_for_other_layers() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["linear_attention", "full_attention"]
    KvattnCache(config)


def no_pages_for_shared_layers() -> None:
    config = transformers.LlamaConfig()
    config.num_kv_shared_layers = 2
    KvattnCache(config)


def attention_not_enabled() -> None:
    model = build("llama")
    forward(model, prompts(12)[0], KvattnCache(model.config))


def another_batch() -> None:
    model = build("llama")
    cache = cache_for(model, "paged")
    forward(model, prompts(12)[0], cache)
    forward(model, prompts(12, 12)[0], cache)


def mask_of_another_length() -> None:
    model, (ids, visible) = build("llama"), prompts(*RAGGED)
    cache = cache_for(model, "paged")
    forward(model, ids[:, :8], cache, attention_mask=visible[:, :8])
    forward(model, ids[:, 8:], cache, attention_mask=visible[:, 8:])


def mask_that_hides_stored_tokens() -> None:
    model, (ids, visible) = build("llama"), prompts(12, 12)
    cache = cache_for(model, "paged")
    forward(model, ids[:, :8], cache, attention_mask=visible[:, :8])
    visible[0, 3] = 0
    forward(model, ids[:, 8:], cache, attention_mask=visible)


def right_padding_under_a_window() -> None:
    model, (ids, visible) = build("mistral"), prompts(*RAGGED)
    forward(model, ids, cache_for(model, "paged"), attention_mask=visible.flip(1))


def grid_after_padding_in_the_middle() -> None:
    model, (ids, _) = build("llama"), prompts(*[8] * 4, width=8)
    cache = cache_for(model, "paged")
    forward(model, ids, cache, attention_mask=HOLES)
    forward(model, ids[:, :1], cache, attention_mask=prefix_mask(9)[:, :, 8:])


def a_layer_left_out() -> None:
    model = build("llama")
    cache = cache_for(model, "paged")
    assert cache is not None
    key = torch.zeros(1, 1, 2, 16)
    for layer in (0, 0, 1):
        cache.layers[layer].attend(torch.zeros(1, 1, 4, 16), key, key, None)


def layers_of_two_shapes() -> None:
    cache = KvattnCache(build("llama").config)
    for layer, dim in ((0, 16), (1, 8)):
        key = torch.zeros(1, 1, 2, dim)
        cache.layers[layer].attend(torch.zeros(1, 1, 4, dim), key, key, None)


def unknown_model() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=97)
    fuse(transformers.AutoModelForCausalLM.from_config(config))


def replaced_forward() -> None:
    model = build("llama")
    layer = model.model.layers[1].self_attn
    layer.forward = type(layer).forward.__get__(layer)
    fuse(model)


def missing_layer() -> None:
    model = build("llama")
    model.model.layers[1].self_attn = torch.nn.Identity()
    fuse(model)


def some_attention(**options: Any) -> None:
    key = torch.zeros(1, 2, 3, 16)
    attention(torch.nn.Identity(), torch.zeros(1, 4, 3, 16), key, key, None, **options)


def dropout() -> None:
    some_attention(dropout=0.1)


def dropout_in_a_fused_layer() -> None:
    model = build("llama", attention_dropout=0.5)
    forward(model.train(), prompts(12)[0], cache_for(model, "fused"))


def position_bias() -> None:
    some_attention(position_bias=torch.zeros(1, 4, 3, 3))


def attention_weights() -> None:
    some_attention(output_attentions=True)


def attention_weights_of_a_fused_layer() -> None:
    model = build("llama")
    forward(model, prompts(12)[0], cache_for(model, "fused"), output_attentions=True)


def bias_with_softcap() -> None:
    model = build("gemma2")
    enable(model)
    forward(model, prompts(12)[0], attention_mask=torch.ones(1, 1, 12, 12))


def gradients() -> None:
    model = build("llama")
    model.requires_grad_(True)
    forward(model, prompts(12)[0], cache_for(model, "paged"))


@pytest.mark.parametrize(
    ("mistake", "error", "said"),
    [
        (no_pages_for_other_layers, ModelConfigError, "linear_attention"),
        (no_pages_for_shared_layers, ModelConfigError, "2 layers that share"),
        (attention_not_enabled, AttentionNotEnabledError, "attn_implementation='sdpa'"),
        (another_batch, CacheBatchError, "2 rows"),
        (mask_of_another_length, PaddingError, "4 visible columns"),
        (mask_that_hides_stored_tokens, PaddingError, "7 visible columns"),
        (right_padding_under_a_window, PaddingError, "row 0"),
        (grid_after_padding_in_the_middle, PaddingError, "behind its first token"),
        (a_layer_left_out, StepIncompleteError, "layer 1 at step 1"),
        (layers_of_two_shapes, LayerShapeError, r"\(2, 8, 8\) in layer 1"),
        (unknown_model, UnsupportedModelError, "'gpt2'"),
        (replaced_forward, UnsupportedModelError, "replaced already"),
        (missing_layer, UnsupportedModelError, "1 layers of class LlamaAttention"),
        (dropout, AttentionArgumentError, "dropout"),
        (dropout_in_a_fused_layer, AttentionArgumentError, "dropout"),
        (position_bias, AttentionArgumentError, "position_bias"),
        (attention_weights, AttentionArgumentError, "output_attentions"),
        (attention_weights_of_a_fused_layer, AttentionArgumentError, "output_attentions"),
        (bias_with_softcap, AttentionArgumentError, "softcap"),
        (gradients, RequiresGradError, "requires_grad"),
    ],
)
def test_mistakes(mistake: Callable[[], None], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        mistake()


def test_an_interrupted_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build("llama"), prompts(12)
    cache = cache_for(model, "paged")
    wanted = logits(model, batch, KvattnCache(model.config))
    last = model.model.layers[1]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(last, "forward", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        forward(model, batch[0], cache)
    with pytest.raises(StepIncompleteError):
        forward(model, batch[0], cache)
    assert cache is not None
    cache.reset()
    assert torch.equal(logits(model, batch, cache), wanted)


@pytest.mark.model
@pytest.mark.parametrize("path", ["paged", "fused"])
def test_a_real_model(path: str, smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    texts = ["The capital of France is", "Once upon a time there was a small"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    batch = inputs.input_ids, inputs.attention_mask
    model.set_attn_implementation("sdpa")
    wanted = generate(model, batch, new=16)
    try:
        assert torch.equal(through(model, path, batch, page_size=16, new=16), wanted)
    finally:
        unfuse(model)
        model.set_attn_implementation("sdpa")

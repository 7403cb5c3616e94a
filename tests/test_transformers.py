"""Hugging Face models that generate through kvattn give the tokens of their own attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from kvattn import apply_rotary
from kvattn.errors.cache_kinds import OutOfPagesError
from kvattn.errors.transformers_kinds import BatchSelectionError, CropError

transformers = pytest.importorskip("transformers", minversion="5.17")

from families import (  # noqa: E402
    CONFIGS,
    PATHS,
    RAGGED,
    build,
    generate,
    logits,
    prompts,
    through,
)

from kvattn.integrations import _steps  # noqa: E402
from kvattn.integrations.transformers import (  # noqa: E402
    CACHE_ARGUMENT,
    KvattnCache,
    attention,
    enable,
    fuse,
    unfuse,
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_generate_gives_the_models_own_tokens(name: str, path: str) -> None:
    model, batch = build(name), prompts(*RAGGED)
    wanted = generate(model, batch)
    assert len(wanted[:, 12:].unique()) > 10, "the test needs varied tokens"
    assert torch.equal(through(model, path, batch), wanted)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_norms_of_heads_are_part_of_the_fused_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = build(name), prompts(*RAGGED)
    wanted = generate(model, batch)
    norm = model.model.layers[0].self_attn.q_norm
    forward, ranks = type(norm).forward, set()

    def noted(self: Any, x: Tensor) -> Any:
        ranks.add(x.dim())
        return forward(self, x)

    monkeypatch.setattr(type(norm), "forward", noted)
    assert torch.equal(through(model, "fused", batch), wanted)
    assert ranks == {3}  # those between layers; heads would have a dimension more


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_fused_norms_are_those_of_the_model_at_any_time(name: str) -> None:
    model, batch = build(name), prompts(*RAGGED)
    first = through(model, "fused", batch)
    norm = model.model.layers[0].self_attn.q_norm
    norm.weight.mul_(-5.0)
    second = through(model, "fused", batch)
    unfuse(model)
    assert torch.equal(second, generate(model, batch)) and not torch.equal(second, first)
    shapes = []
    norm.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    assert torch.equal(through(model, "fused", batch), second)
    assert shapes, "a norm that somebody watches is called"


@pytest.mark.parametrize("path", ["paged", "fused"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lengths", [(12,), (1, 12, 3, 9, 12, 2, 7)], ids=["one", "many"])
def test_batches_and_page_sizes(lengths: tuple[int, ...], page_size: int, path: str) -> None:
    model, batch = build("gemma3"), prompts(*lengths)
    assert torch.equal(through(model, path, batch, page_size), generate(build("gemma3"), batch))


@pytest.mark.parametrize("path", ["paged", "fused"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "phi3", "gpt_oss"])
def test_bfloat16_is_as_close_to_float32_as_the_models_own_attention(name: str, path: str) -> None:
    batch = prompts(*RAGGED)
    exact = logits(build(name), batch, transformers.DynamicCache())
    rounded = build(name, torch.bfloat16)
    own = (logits(rounded, batch, transformers.DynamicCache()) - exact).abs()
    fuse(rounded) if path == "fused" else enable(rounded)
    error = (logits(rounded, batch, KvattnCache(rounded.config)) - exact).abs()
    assert error.mean() <= 1.5 * own.mean()
    assert error.max() <= 2 * own.max()


@pytest.mark.parametrize("path", ["paged", "fused"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_eight_bit_storage_keeps_the_logits_close(dtype: torch.dtype, path: str) -> None:
    model, batch = build("llama"), prompts(*RAGGED)
    exact = logits(model, batch, transformers.DynamicCache())
    fuse(model) if path == "fused" else enable(model)
    cache = KvattnCache(model.config, dtype=dtype, token_descale=True)
    error = logits(model, batch, cache) - exact
    assert cache.pages is not None and cache.pages.k(0).dtype == dtype
    assert 0 < error.norm() / exact.norm() < 0.1


@pytest.mark.parametrize("path", ["paged", "fused"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prefill_in_chunks(name: str, path: str) -> None:
    model, batch = build(name), prompts(*RAGGED)  # the first chunk of the last row is all padding
    wanted = generate(model, batch)
    assert torch.equal(through(model, path, batch, prefill_chunk_size=5), wanted)


@pytest.mark.parametrize("path", ["paged", "fused"])
@pytest.mark.parametrize("second", [(4, 4, 4), (4, 1, 3)], ids=["even", "ragged"])
def test_a_conversation_goes_on_in_the_same_cache(second: tuple[int, ...], path: str) -> None:
    def chat(model: Any, cache: Any) -> Tensor:
        ids, visible = prompts(*RAGGED)
        first = generate(model, (ids, visible), cache, new=6)
        told = visible.new_ones((3, 6))
        more, shown = prompts(*second, width=4)
        history = torch.cat((first, more), 1), torch.cat((visible, told, shown), 1)
        return generate(model, history, cache, new=8)

    model = build("llama")
    wanted = chat(model, transformers.DynamicCache())
    fuse(model) if path == "fused" else enable(model)
    cache = KvattnCache(model.config, page_size=3)
    assert torch.equal(chat(model, cache), wanted)
    assert cache.stats().tokens == sum(RAGGED) + sum(second) + 3 * (6 + 7)
    cache.reset()
    assert torch.equal(chat(model, cache), wanted)


@pytest.mark.parametrize("path", ["paged", "fused"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_beam_search_shares_pages(name: str, path: str) -> None:
    model, batch = build(name), prompts(*RAGGED)
    wanted = generate(model, batch, num_beams=3, num_return_sequences=2)
    fuse(model) if path == "fused" else enable(model)
    cache = KvattnCache(model.config, page_size=4)
    got = generate(model, batch, cache, num_beams=3, num_return_sequences=2)
    assert torch.equal(got, wanted)
    assert cache.stats().pages_shared > 0


@pytest.mark.parametrize("path", ["paged", "fused"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_speculative_generation_crops_the_cache(name: str, path: str) -> None:
    model, batch = build(name), prompts(12)
    wanted = generate(model, batch)
    assert torch.equal(through(model, path, batch, assistant_model=build("llama")), wanted)
    assert torch.equal(through(model, path, batch, prompt_lookup_num_tokens=3), wanted)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_crop_forgets_columns(name: str) -> None:
    model, (ids, visible) = build(name), prompts(*RAGGED)
    enable(model)
    cache, fresh = KvattnCache(model.config, page_size=3), KvattnCache(model.config)
    wanted = logits(model, (ids, visible), fresh)
    logits(model, (ids.roll(1, 0) * visible, visible), cache, first=11)
    cache.crop(-4)
    assert cache.get_seq_length() == 8
    cache.crop(-8)
    assert cache.get_seq_length() == 0 and cache.stats().tokens == 0
    assert torch.allclose(logits(model, (ids, visible), cache), wanted, atol=1e-4)
    for columns in (1, -13):
        with pytest.raises(CropError):
            cache.crop(columns)


def test_crop_stops_at_padding_in_the_middle() -> None:
    model, (ids, visible) = build("llama"), prompts(6, width=6)
    enable(model)
    cache = KvattnCache(model.config)
    visible[0, 2:4] = 0  # the second call brings two columns of padding and two tokens
    for start, stop in ((0, 2), (2, 6)):
        model(ids[:, start:stop], attention_mask=visible[:, :stop], **{CACHE_ARGUMENT: cache})
    for own in (cache, copy.deepcopy(cache)):
        with pytest.raises(CropError):
            own.crop(-3)
        own.crop(-1)
        own.crop(-1)
        assert own.stats().tokens == 2
        with pytest.raises(CropError):
            own.crop(-1)


def test_the_cache_grows_and_stores_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_steps, "_MIN_TOKENS", 2)
    model, batch = build("llama"), prompts(*RAGGED)
    wanted = generate(model, batch, new=30)
    enable(model)
    cache = KvattnCache(model.config, page_size=3)
    assert torch.equal(generate(model, batch, cache, new=30), wanted)
    assert cache.stats().tokens == sum(RAGGED) + 3 * 29
    assert cache.get_seq_length() == 12 + 29
    assert cache.pages is not None and cache.pages.num_pages > 3 * 8
    assert cache.pages.k(0).isnan().any(), "free slots hold poison"


def test_a_limited_cache_says_when_it_is_full() -> None:
    model, batch = build("llama"), prompts(*RAGGED)
    enable(model)
    cache = KvattnCache(model.config, page_size=4, num_pages=10)
    with pytest.raises(OutOfPagesError):
        generate(model, batch, cache, new=30)
    cache.reset()
    assert torch.equal(generate(model, batch, cache, new=3), generate(model, batch, new=3))


def test_copies_and_selections_of_a_prefix() -> None:
    model, (ids, visible) = build("llama"), prompts(12, 12, 12)
    enable(model)
    wanted = logits(model, (ids, visible), KvattnCache(model.config)).view(3, 12, -1)
    prefix = KvattnCache(model.config, page_size=5)
    logits(model, (ids[:, :9], visible[:, :9]), prefix)

    def rest(cache: KvattnCache, rows: list[int]) -> Tensor:
        call = {CACHE_ARGUMENT: cache, "attention_mask": visible[rows]}
        return model(ids[rows, 9:], **call).logits

    twice = copy.deepcopy(prefix)
    for _ in range(2):
        assert torch.allclose(rest(copy.deepcopy(prefix), [0, 1, 2]), wanted[:, 9:], atol=1e-4)
    twice.batch_repeat_interleave(2)
    assert twice.batch_size == 6
    with pytest.raises(BatchSelectionError):
        twice.batch_select_indices(torch.tensor([0, 6]))
    twice.batch_select_indices(torch.tensor([5, 0]))
    assert torch.allclose(rest(twice, [2, 0]), wanted[[2, 0], 9:], atol=1e-4)
    with pytest.raises(BatchSelectionError):
        prefix.batch_repeat_interleave(0)


def test_a_copy_keeps_the_scales_of_its_tokens() -> None:
    model, (ids, visible) = build("llama"), prompts(12, 12)
    enable(model)
    cache = KvattnCache(model.config, dtype=torch.float8_e4m3fn, token_descale=True)
    logits(model, (ids[:, :9], visible[:, :9]), cache)
    twin = copy.deepcopy(cache)
    rest = [model(ids[:, 9:], **{CACHE_ARGUMENT: own}).logits for own in (cache, twin)]
    assert torch.equal(rest[0], rest[1])


ROPES = {
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3},
    "dynamic": {"factor": 2.0},
    "proportional": {"partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize("kind", ROPES)
def test_fused_layers_rotate_as_the_model_does(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    length = 18 if kind == "dynamic" else 256  # crossed while generating
    model = build("llama", rope_parameters=rope, max_position_embeddings=length)
    batch = prompts(*RAGGED)
    wanted = generate(model, batch)
    assert torch.equal(through(model, "fused", batch), wanted)


def test_fused_layers_follow_longrope_over_its_switch() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4}
    rope |= {"long_factor": [2.0] * 4, "original_max_position_embeddings": 18, "factor": 4.0}
    model, batch = build("phi3", rope_parameters=rope), prompts(12)
    wanted = generate(model, batch)
    assert torch.equal(through(model, "fused", batch), wanted)


@pytest.mark.parametrize("path", ["paged", "fused"])
def test_positions_are_the_models_own(path: str) -> None:
    model, (ids, visible) = build("llama"), prompts(*RAGGED)
    shown = visible.bool()
    odd = {"position_ids": torch.arange(12).expand(3, 12) * 3 + 5}
    columns: dict[str, Any] = {}  # the default: columns as positions, padding included
    wanted = [model(ids, attention_mask=visible, **more).logits[shown] for more in (odd, columns)]
    assert not torch.allclose(wanted[0], wanted[1], atol=1e-2)
    fuse(model) if path == "fused" else enable(model)
    for more, expected in zip((odd, columns), wanted, strict=True):
        more[CACHE_ARGUMENT] = KvattnCache(model.config)
        got = model(ids, attention_mask=visible, **more).logits[shown]
        assert torch.allclose(got, expected, atol=1e-4)


def test_r4_partial_rotary_over_the_whole_head() -> None:
    """Some models pair channels across the whole head and give most pairs no frequency."""
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    model, (ids, visible) = build("llama", rope_parameters=rope, head_dim=512), prompts(12)
    rotate = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    own = transformers.DynamicCache()
    wanted = model(ids, **{CACHE_ARGUMENT: own}).logits

    x, positions = torch.randn(1, 7, 4, 512), torch.arange(7)[None]
    cos, sin = model.model.rotary_emb(x, positions)
    whole, block = ([table[0, :, :half] for table in (cos, sin)] for half in (256, 64))
    expected = rotate(x, x, cos, sin, unsqueeze_dim=2)[0]
    rows: dict[str, Any] = {"positions": positions, "interleaved": False}
    assert torch.allclose(apply_rotary(x, *whole, **rows), expected)
    assert not torch.allclose(apply_rotary(x, *block, **rows), expected)

    fuse(model)
    cache = KvattnCache(model.config, page_size=5)
    got = model(ids, attention_mask=visible, **{CACHE_ARGUMENT: cache}).logits
    assert torch.allclose(got, wanted, atol=1e-4)
    assert cache.pages is not None
    for layer in (0, 1):
        keys = cache.pages.k(layer).flatten(0, 1)[cache.pages.slots(0)]
        assert torch.allclose(keys, own.layers[layer].keys[0].transpose(0, 1), atol=1e-5)


def probe(cache: KvattnCache, layer: Any, start: int, stop: int, window: int) -> Tensor:
    """The mean key index that each new column attends: q = 0 and v[j] = j."""
    torch.manual_seed(start)
    count = stop - start
    query = torch.zeros(1, 4, count, 16)
    index = torch.arange(start, stop, dtype=torch.float32)
    value = index[None, None, :, None].expand(1, 2, count, 16)
    key, value = cache.update(torch.randn(1, 2, count, 16), value, 0)
    out, _ = attention(layer, query, key, value, None, sliding_window=window)
    return out[0, :, 0, 0]


def test_e2_a_window_reads_the_last_tokens_only() -> None:
    model = build("llama", num_hidden_layers=1)
    enable(model)
    cache, layer = KvattnCache(model.config, page_size=3), model.model.layers[0].self_attn
    wanted = torch.tensor([max(t - 1.5, t / 2) for t in range(13)])
    assert torch.allclose(probe(cache, layer, 0, 4, window=4), wanted[:4])
    for t in range(4, 13):
        assert torch.allclose(probe(cache, layer, t, t + 1, window=4), wanted[t])


def test_m3_a_window_of_w_tokens_shows_w_keys() -> None:
    layer = build("llama").model.layers[0].self_attn
    value = torch.arange(10.0)[None, None, :, None].expand(1, 2, 10, 16).contiguous()
    key = torch.randn(1, 2, 10, 16)
    out, _ = attention(layer, torch.zeros(1, 4, 1, 16), key, value, None, sliding_window=4)
    assert torch.allclose(out, torch.tensor(7.5))


@pytest.mark.parametrize("path", PATHS)
def test_e3_two_left_padded_prompts(path: str) -> None:
    model, batch = build("llama", max_position_embeddings=32), prompts(3, 5, width=5)
    model.set_attn_implementation("eager")
    wanted = generate(model, batch, new=8)
    assert torch.equal(through(model, path, batch, new=8), wanted)

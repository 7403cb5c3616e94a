"""Generating: the answers are those of PyTorch's own attention, whatever runs beneath."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvattn.errors import BackendRefusesError
from kvattn.errors.cli_kinds import ChatTemplateError, EmptyPromptError
from kvattn.errors.transformers_kinds import UnsupportedModelError
from kvattn.generation import Answer, Settings, _Text, encode, generate, verify

pytest.importorskip("transformers")

from tiny_models import tiny_model, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

RAGGED = ["w1 w2 w3 w4 w5 w6 w7 w8 w9", "w10", "w11 w12 w13"]


@pytest.fixture
def plain(smollm2: Loaded) -> Iterator[Loaded]:
    """The default model, given back as it was."""
    from kvattn.integrations.transformers import unfuse

    yield smollm2
    unfuse(smollm2[0])
    smollm2[0].set_attn_implementation("sdpa")


@pytest.mark.model
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
def test_a_language_model_answers_as_with_pytorch(plain: Loaded, fuse: bool) -> None:
    model, tokenizer = plain
    questions = [
        "What is the capital of France?",
        "Explain in one sentence what a cache is.",
        "Why is the sky blue?",
    ]
    prompts = encode(tokenizer, questions)
    assert len(set(map(len, prompts))) == 3  # a ragged batch
    run = generate(model, tokenizer, prompts, Settings(max_new_tokens=24, fuse=fuse))
    assert run.answers[0].text == "The capital of France is Paris."
    assert run.answers[0].finish == "eos"
    assert [answer.finish for answer in run.answers[1:]] == ["length", "length"]
    assert run.answers[1].text.startswith("A cache is")
    assert run.fused is fuse
    assert {found.plan.backend for found in run.plans["decode"]} == {"cpu"}
    verdict = verify(model, tokenizer, run)
    assert verdict.against == "sdpa"
    assert verdict.equal, verdict.differences
    assert [answer.text for answer in verdict.answers] == [answer.text for answer in run.answers]


@pytest.mark.model
def test_text_grows_as_the_tokenizer_decodes(smollm2: Loaded) -> None:
    """Characters of several tokens come whole, spaces where they belong."""
    tokenizer = smollm2[1]
    words = " naïve 😀 café, 東京  is\n big"
    ids = tokenizer(words)["input_ids"]
    text, seen = _Text(tokenizer, Answer()), []
    for token in ids:
        text.add(token)
        seen.append(text.answer.text)
        assert words.startswith(text.answer.text)
    assert seen[-1] == words
    assert len(set(seen)) > 10
    text.add(tokenizer("😀")["input_ids"][0])  # a part of a character is held back until the end
    assert text.answer.text == words
    text.close("length")
    assert text.answer.text == f"{words}\N{REPLACEMENT CHARACTER}"


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("mistral", {"sliding_window": 6}),
    ("gemma2", {"sliding_window": 6}),
    ("gpt_oss", {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}),
]


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize(("kind", "overrides"), KINDS, ids=[kind for kind, _ in KINDS])
def test_model_families(kind: str, overrides: dict[str, Any], fuse: bool) -> None:
    model, tokenizer = tiny_model(kind, **overrides), tiny_tokenizer()
    settings = Settings(max_new_tokens=20, page_size=3, fuse=fuse)
    run = generate(model, tokenizer, encode(tokenizer, RAGGED), settings)
    verdict = verify(model, tokenizer, run)
    assert verdict.against == ("eager" if kind in ("gemma2", "gpt_oss") else "sdpa")
    assert verdict.equal, verdict.differences
    assert set(run.plans) == {"prefill", "decode"}


def test_counts_are_those_of_the_batch() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer(chat=False)
    prompts = encode(tokenizer, RAGGED)
    run = generate(model, tokenizer, prompts, Settings(max_new_tokens=6, page_size=4))
    new = [len(answer.ids) for answer in run.answers]
    assert new == [6, 6, 6]
    assert run.speed.prefill_tokens == sum(map(len, prompts)) == 13
    assert run.speed.decode_tokens == 6 * 3 - 3  # the first token of each comes from the prefill
    # The last token of an answer is never fed back, so it is not stored.
    stored = [len(ids) + 5 for ids in prompts]
    assert run.stats.tokens == sum(stored)
    assert run.stats.pages_used == sum(-(-tokens // 4) for tokens in stored)
    layers, kv_heads, dim, itemsize = 2, 2, 8, 4
    page = 4 * layers * 2 * kv_heads * dim * itemsize
    assert run.stats.bytes_used == run.stats.pages_used * page
    assert run.kv_dtype == torch.float32
    assert run.fused


def test_an_answer_ends_with_a_stop_token() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer(chat=False)
    free = generate(model, tokenizer, encode(tokenizer, RAGGED), Settings(max_new_tokens=30))
    stop = free.answers[1].ids[7]
    model.generation_config.eos_token_id = [stop]
    run = generate(model, tokenizer, encode(tokenizer, RAGGED), Settings(max_new_tokens=30))
    for answer, longer in zip(run.answers, free.answers, strict=True):
        end = longer.ids.index(stop) + 1 if stop in longer.ids else 30
        assert answer.ids == longer.ids[:end]
        assert answer.finish == ("eos" if stop in longer.ids else "length")
    assert verify(model, tokenizer, run).equal
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop)
    again = generate(model, tokenizer, encode(tokenizer, RAGGED), Settings(max_new_tokens=30))
    assert [answer.ids for answer in again.answers] == [answer.ids for answer in run.answers]


def test_watching_sees_every_token() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    seen: list[list[int]] = []
    run = generate(
        model,
        tokenizer,
        encode(tokenizer, RAGGED[:1]),
        Settings(max_new_tokens=5),
        lambda answers: seen.append(list(answers[0].ids)),
    )
    assert [len(ids) for ids in seen] == [1, 2, 3, 4, 5, 5]
    assert seen[-1] == run.answers[0].ids


def test_an_interrupt_keeps_what_there_is() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompts = encode(tokenizer, RAGGED)
    whole = generate(model, tokenizer, prompts, Settings(max_new_tokens=12))

    def interrupt(answers: list[Answer]) -> None:
        if len(answers[0].ids) == 4 and answers[0].finish is None:
            raise KeyboardInterrupt

    run = generate(model, tokenizer, prompts, Settings(max_new_tokens=12), interrupt)
    assert run.interrupted
    assert not whole.interrupted
    for answer, longer in zip(run.answers, whole.answers, strict=True):
        assert answer.finish == "interrupted"
        assert answer.ids == longer.ids[:4]
        assert longer.text.startswith(answer.text)
    assert run.speed.decode_tokens == 3 * 3


def test_an_interrupt_before_the_first_token() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    model.register_forward_pre_hook(interrupt)
    run = generate(model, tokenizer, encode(tokenizer, RAGGED))
    assert run.interrupted
    assert run.speed.prefill is None
    assert run.speed.decode is None
    assert run.stats.pages_used == 0
    assert run.plans == {}


def test_sampling_follows_the_seed() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompts = encode(tokenizer, RAGGED)

    def ids(**more: Any) -> list[list[int]]:
        settings = Settings(max_new_tokens=12, **more)
        return [answer.ids for answer in generate(model, tokenizer, prompts, settings).answers]

    greedy = ids()
    hot = ids(temperature=5.0, seed=1)
    assert hot == ids(temperature=5.0, seed=1)
    assert hot != ids(temperature=5.0, seed=2)
    assert hot != greedy
    assert ids(temperature=5.0, top_p=1e-6) == greedy  # only the likeliest token is left
    run = generate(model, tokenizer, prompts, Settings(12, temperature=5.0, seed=1))
    assert verify(model, tokenizer, run).equal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_keys_and_values_are_stored_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompts = encode(tokenizer, RAGGED)
    full = generate(model, tokenizer, prompts, Settings(max_new_tokens=40))
    run = generate(model, tokenizer, prompts, Settings(max_new_tokens=40, kv_dtype=dtype))
    assert run.kv_dtype == dtype
    assert run.stats.bytes_used * 4 == full.stats.bytes_used * dtype.itemsize
    for found in run.plans["decode"]:
        stored = {name: tensor.dtype for name, tensor in found.facts.tensors}
        assert stored["k_cache"] == stored["v_cache"] == dtype


def test_differences_are_found_and_placed() -> None:
    """An FP8 cache rounds keys and values, so some token of a random model differs."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    settings = Settings(max_new_tokens=40, kv_dtype=torch.float8_e5m2)
    run = generate(model, tokenizer, encode(tokenizer, RAGGED), settings)
    verdict = verify(model, tokenizer, run)
    assert not verdict.equal
    for at in verdict.differences:
        ours, theirs = run.answers[at.prompt].ids, verdict.answers[at.prompt].ids
        assert ours[: at.position] == theirs[: at.position]
        assert (at.ours, at.theirs) == (ours[at.position], theirs[at.position])
        assert at.ours != at.theirs


def test_a_shorter_answer_differs_where_it_ends() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    run = generate(model, tokenizer, encode(tokenizer, RAGGED), Settings(max_new_tokens=6))
    dropped = run.answers[2].ids.pop()
    assert verify(model, tokenizer, run).differences == [(2, 5, None, dropped)]


def test_a_named_backend_is_the_one_that_runs() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompts = encode(tokenizer, RAGGED)
    run = generate(model, tokenizer, prompts, Settings(max_new_tokens=4, backend="reference"))
    plans = [found.plan for phase in ("prefill", "decode") for found in run.plans[phase]]
    assert {plan.backend for plan in plans} == {"reference"}
    assert verify(model, tokenizer, run).equal


def test_a_named_backend_that_refuses_raises() -> None:
    model, tokenizer = tiny_model("gemma2"), tiny_tokenizer()
    with pytest.raises(BackendRefusesError, match="softcap"):
        generate(model, tokenizer, encode(tokenizer, RAGGED), Settings(backend="cpu"))


def test_unknown_models_are_fused_only_on_demand() -> None:
    model, tokenizer = tiny_model("gpt_neox", num_key_value_heads=None), tiny_tokenizer()
    prompts = encode(tokenizer, RAGGED)
    with pytest.raises(UnsupportedModelError):
        generate(model, tokenizer, prompts, Settings(fuse=True))
    run = generate(model, tokenizer, prompts, Settings(max_new_tokens=6))
    assert not run.fused
    assert verify(model, tokenizer, run).equal


def test_chat_template_and_raw_text() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, ["w1 w2"])[0]) == [
        *("<s>", "user", "w1", "w2", "bot"),
    ]
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, ["w1 w2"], raw=True)[0]) == [
        "w1",
        "w2",
    ]
    assert encode(tiny_tokenizer(chat=False), ["w1 w2"]) == encode(tokenizer, ["w1 w2"], raw=True)


def test_a_prompt_without_tokens() -> None:
    with pytest.raises(EmptyPromptError, match="prompt 2"):
        encode(tiny_tokenizer(chat=False), ["w1", ""])


def test_a_template_that_cannot_take_a_user_message() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('system message first') }}"
    with pytest.raises(ChatTemplateError, match="system message first"):
        encode(tokenizer, ["w1"])
    assert encode(tokenizer, ["w1"], raw=True)

"""Text from a language model whose KV cache lies in kvattn's pages, checked against PyTorch's own.

model, tokenizer = load_model()
prompts = encode(tokenizer, ["What is the capital of France?"])
run = generate(model, tokenizer, prompts, Settings(max_new_tokens=32))
print(run.answers[0].text, verify(model, tokenizer, run).equal)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvattn.cache import CacheStats
from kvattn.errors.cli_kinds import ChatTemplateError, EmptyPromptError
from kvattn.errors.transformers_kinds import UnsupportedModelError
from kvattn.explanation import Explanation, explain

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Settings:
    """How to generate.

    Attributes:
        max_new_tokens: the most tokens of an answer.
        temperature: 0 takes the likeliest token; above 0 draws one.
        top_p: draws from the likeliest tokens that together have this probability.
        seed: of the draws.
        kv_dtype: of the stored keys and values; None means the model's.
        page_size: tokens per page.
        backend: the only backend to use; None leaves it to the planner.
        fuse: rotary and append inside the attention call; None means where the model is known.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    kv_dtype: torch.dtype | None = None
    page_size: int = 16
    backend: str | None = None
    fuse: bool | None = None


@dataclass
class Answer:
    """One answer as far as it has come.

    Attributes:
        ids: its tokens, with the one that ended it.
        text: the same as text; characters of which a part is still to come are left out.
        finish: "eos" if the model ended it, "length" at the limit, "interrupted", None if going on.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None


class Speed(NamedTuple):
    """Seconds and tokens: the prompts up to the first new token, and all new tokens after it."""

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def prefill(self) -> float | None:
        """Prompt tokens per second."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else None

    @property
    def decode(self) -> float | None:
        """New tokens per second, all answers together."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else None


@dataclass(frozen=True)
class Run:
    """What came out of one batch, and what it took.

    Attributes:
        prompts: token ids.
        answers: one per prompt.
        speed: tokens and seconds.
        stats: pages and bytes of the cache at the end.
        kv_dtype: of the stored keys and values.
        plans: "prefill" and "decode", each with the plans that its attention calls got.
        fused: whether rotary and append ran inside the attention call.
        settings: as given.
    """

    prompts: Prompts
    answers: list[Answer]
    speed: Speed
    stats: CacheStats
    kv_dtype: torch.dtype
    plans: dict[str, list[Explanation]]
    fused: bool
    settings: Settings

    @property
    def interrupted(self) -> bool:
        return any(answer.finish == "interrupted" for answer in self.answers)


class Difference(NamedTuple):
    """The first token at which an answer and PyTorch's differ; None past the end of one.

    Attributes:
        prompt: which answer.
        position: which token of it.
        ours, theirs: the token ids.
    """

    prompt: int
    position: int
    ours: int | None
    theirs: int | None


class Verdict(NamedTuple):
    """PyTorch's answers beside ours.

    Attributes:
        against: the attn_implementation that ran: "sdpa", or "eager" for models without it.
        answers: what it gave.
        differences: at most one per prompt.
        speed: of that run.
    """

    against: str
    answers: list[Answer]
    differences: list[Difference]
    speed: Speed

    @property
    def equal(self) -> bool:
        """Whether all tokens are."""
        return not self.differences


def encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], raw: bool = False
) -> list[list[int]]:
    """Token ids of each prompt, as a user's message in the chat template if there is one.

    Args:
        raw: pass the text on as it is.

    Raises:
        ChatTemplateError: the template cannot be applied.
        EmptyPromptError: a prompt has no tokens.
    """
    chat = bool(tokenizer.chat_template) and not raw
    encoded = []
    for number, prompt in enumerate(prompts):
        text = _chat(tokenizer, prompt) if chat else prompt
        ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        if not ids:
            raise EmptyPromptError("prompts", f"{prompt!r} as prompt {number + 1}", "some text")
        encoded.append(list(ids))
    return encoded


def _chat(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    message = {"role": "user", "content": prompt}
    try:
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of its own
        got = f"{type(error).__name__}: {error}"
        raise ChatTemplateError("prompts", got, "a template for one user message") from error
    return str(text)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    settings: Settings | None = None,
    watch: Callable[[list[Answer]], None] | None = None,
) -> Run:
    """Answers all prompts as one ragged batch. Ctrl-C ends it with what there is by then.

    Args:
        prompts: token ids, one list per prompt, as `encode` gives them.
        watch: called with the answers after each token.

    Raises:
        UnsupportedModelError: settings.fuse is True and the model is not one that `fuse` knows.
        KvattnError: what the cache or an attention call raises.

    Example:
        >>> run = generate(model, tokenizer, encode(tokenizer, ["Why is the sky blue?"]))
        >>> run.answers[0].text, run.speed.decode, run.stats.pages_used
    """
    from kvattn.integrations.transformers import KvattnCache

    settings = settings or Settings()
    fused = _prepare(model, settings.fuse)
    cache = KvattnCache(model.config, page_size=settings.page_size, dtype=settings.kv_dtype)
    planned = _Planned(cache, settings.backend)
    collector = _Collector(model, tokenizer, len(prompts), watch)
    try:
        _sample(model, collector, prompts, settings, cache)
    except KeyboardInterrupt:
        collector.close("interrupted")
    else:
        collector.close("length")
    return Run(
        prompts=prompts,
        answers=collector.answers,
        speed=collector.speed(sum(map(len, prompts))),
        stats=cache.stats(),
        kv_dtype=settings.kv_dtype or model.dtype,
        plans=planned.plans,
        fused=fused,
        settings=settings,
    )


def verify(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    run: Run,
    watch: Callable[[list[Answer]], None] | None = None,
) -> Verdict:
    """Runs the same prompts with PyTorch's SDPA and Transformers' own cache, and compares tokens.

    Models that know no SDPA take their eager attention. The model keeps it afterwards.
    """
    from transformers import DynamicCache

    from kvattn.integrations.transformers import unfuse

    unfuse(model)
    capped = getattr(model.config, "attn_logit_softcapping", None)  # which SDPA leaves out
    try:
        model.set_attn_implementation("eager" if capped else "sdpa")
    except ValueError:  # what Transformers raises for models whose attention SDPA cannot do
        model.set_attn_implementation("eager")
    collector = _Collector(model, tokenizer, len(run.prompts), watch)
    _sample(model, collector, run.prompts, run.settings, DynamicCache(config=model.config))
    collector.close("length")
    pairs = zip(run.answers, collector.answers, strict=True)
    found = [_difference(i, ours.ids, theirs.ids) for i, (ours, theirs) in enumerate(pairs)]
    differences = [difference for difference in found if difference is not None]
    speed = collector.speed(run.speed.prefill_tokens)
    return Verdict(model.config._attn_implementation, collector.answers, differences, speed)


def _difference(prompt: int, ours: list[int], theirs: list[int]) -> Difference | None:
    if ours == theirs:
        return None
    longest = max(len(ours), len(theirs))
    a, b = ([*ids, *[None] * (longest - len(ids))] for ids in (ours, theirs))
    at = next(i for i in range(longest) if a[i] != b[i])
    return Difference(prompt, at, a[at], b[at])


def _prepare(model: PreTrainedModel, fuse: bool | None) -> bool:
    """Switches the model's attention to kvattn; returns whether its layers are fused."""
    from kvattn.integrations import transformers as integration

    if fuse is not False:
        try:
            integration.fuse(model)
            return True
        except UnsupportedModelError:
            if fuse:
                raise
    integration.unfuse(model)
    integration.enable(model)
    return False


def _sample(
    model: PreTrainedModel,
    collector: _Collector,
    prompts: Prompts,
    settings: Settings,
    cache: Any,
) -> None:
    """One call of Transformers' generate, greedy or sampling, over prompts padded on the left."""
    from transformers import GenerationConfig

    from kvattn.integrations.transformers import CACHE_ARGUMENT

    width = max(map(len, prompts))
    rows = [[collector.pad] * (width - len(ids)) + list(ids) for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    drawn = settings.temperature > 0
    config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=drawn,
        temperature=settings.temperature if drawn else 1.0,
        top_p=settings.top_p if drawn else 1.0,
        top_k=0 if drawn else 50,  # 50 is what Transformers takes for "not set"
        num_beams=1,
        use_cache=True,
        eos_token_id=collector.stops or None,
        pad_token_id=collector.pad,
    )
    torch.manual_seed(settings.seed)
    with torch.inference_mode():
        model.generate(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            generation_config=config,
            streamer=collector,
            **{CACHE_ARGUMENT: cache},
        )


class _Collector:
    """The streamer that Transformers hands the prompts and then each new column of tokens to."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch: int,
        watch: Callable[[list[Answer]], None] | None,
    ) -> None:
        self.answers = [Answer() for _ in range(batch)]
        self.stops = _stops(model, tokenizer)
        pad = tokenizer.pad_token_id
        self.pad: int = pad if pad is not None else (self.stops or [0])[0]
        self._texts = [_Text(tokenizer, answer) for answer in self.answers]
        self._watch = watch or (lambda answers: None)
        self._seconds: list[float] = []  # of each step, the watcher's time left out
        self._mark: float | None = None

    def put(self, tokens: Tensor) -> None:
        if self._mark is not None:
            self._seconds.append(perf_counter() - self._mark)
            for text, token in zip(self._texts, tokens.tolist(), strict=True):
                if text.answer.finish is None:
                    text.add(token)
                    if token in self.stops:
                        text.close("eos")
            self._watch(self.answers)
        self._mark = perf_counter()

    def end(self) -> None:
        """Called by Transformers at the end; `close` says how it ended."""

    def close(self, finish: str) -> None:
        """Ends the answers that are still going on."""
        for text in self._texts:
            if text.answer.finish is None:
                text.close(finish)
        self._watch(self.answers)

    def speed(self, prompt_tokens: int) -> Speed:
        if not self._seconds:
            return Speed(prompt_tokens, 0.0, 0, 0.0)
        later = sum(len(answer.ids) - 1 for answer in self.answers)
        return Speed(prompt_tokens, self._seconds[0], later, sum(self._seconds[1:]))


def _stops(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end an answer."""
    stops = model.generation_config.eos_token_id
    if stops is None:
        stops = tokenizer.eos_token_id
    if stops is None:
        return []
    return [stops] if isinstance(stops, int) else list(stops)


class _Text:
    """Lets the text of an answer grow with its tokens, each decoded beside the ones before it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, answer: Answer) -> None:
        self.answer = answer
        self._decode = partial(
            tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._start = self._shown = 0  # tokens of context, tokens that are in the text

    def add(self, token: int) -> None:
        self.answer.ids.append(token)
        self._grow()

    def close(self, finish: str) -> None:
        self._grow(whole=True)
        self.answer.finish = finish

    def _grow(self, whole: bool = False) -> None:
        ids = self.answer.ids
        shown = self._decode(ids[self._start : self._shown])
        text = self._decode(ids[self._start :])
        if len(text) > len(shown) and (whole or not text.endswith("\N{REPLACEMENT CHARACTER}")):
            self.answer.text += text[len(shown) :]
            self._start, self._shown = self._shown, len(ids)


class _Planned:
    """Stands between a model and its cache: names the backend, notes what the planner says."""

    def __init__(self, cache: Any, backend: str | None) -> None:
        self.plans: dict[str, list[Explanation]] = {}
        self._forced = {} if backend is None else {"backend": backend}
        self._seen: set[tuple[str, str]] = set()
        for layer in cache.layers:
            layer.attend = partial(self._attend, layer, layer.attend)

    def _attend(
        self,
        layer: Any,
        attend: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        rotary: tuple[Tensor, Tensor, int] | None = None,
        **options: Any,
    ) -> Tensor:
        options |= self._forced
        out = attend(query, key, value, mask, rotary=rotary, **options)
        phase = "prefill" if layer.sequences.count == 1 else "decode"
        self._note(phase, layer, query, key, value, mask, rotary, options)
        if phase == "decode":  # later steps are like this one
            layer.attend = partial(attend, **self._forced)
        return out

    def _note(self, phase: str, layer: Any, *call: Any) -> None:
        """Keeps the plan of this call, unless another layer's call was its like."""
        *_, mask, _, options = call
        plain = {name: x for name, x in options.items() if not isinstance(x, Tensor)}
        kind = phase, f"{plain}, {mask is not None and mask.dim()}"
        if kind not in self._seen:
            self._seen.add(kind)
            found, known = _explained(layer, *call), self.plans.setdefault(phase, [])
            if str(found) not in map(str, known):
                known.append(found)


def _explained(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rotary: tuple[Tensor, Tensor, int] | None,
    options: dict[str, Any],
) -> Explanation:
    """The planner's word on the call that `layer.attend` has just made with these arguments."""
    step = layer.sequences.step
    options = {**options, "causal": True}
    if rotary is not None:
        options |= step.rotary(*rotary)
    if mask is not None and mask.dim() == 4:
        options |= step.grid(mask, "softcap" in options)
    for name in ("k_descale", "v_descale"):
        options[name] = getattr(step.pages, name)(layer.index)
    if step.packed is not None:
        query, key, value = step.pack(query), step.pack(key), step.pack(value)
        options["cu_seqlens_q"] = options["cu_seqlens_k_new"] = step.packed.edges
    return explain(
        query,
        step.pages.k(layer.index),
        step.pages.v(layer.index),
        key,
        value,
        cache_seqlens=step.before,
        page_table=step.table,
        **options,
    )

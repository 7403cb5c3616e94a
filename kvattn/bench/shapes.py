"""Attention layers of real models, and one cell of the benchmark in plain values.

A layer's shape is what attention sees on one device: with tensor parallelism 8, an eighth of the
heads. The same shapes feed the tests through `Work.case`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from kvattn.testing import Case

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Model:
    """One attention layer of a model, as one device holds it.

    Attributes:
        name: what the reports call it.
        heads, kv_heads: of queries, of keys and values.
        dim, dim_v: channels of a key and of a value.
        window: keys that a layer with a sliding window sees, the token itself included; 0: all.
        sinks: whether every head has a sink.
        latent: absorbed MLA: `dim` rotary channels beside `dim_v` latent ones that all heads
            share, key and value at once.
    """

    name: str
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    window: int = 0
    sinks: bool = False
    latent: bool = False

    @property
    def scale(self) -> float:
        """Softmax scale. DeepSeek keeps that of the heads before absorption: 128 + 64 channels."""
        return float((128 + 64 if self.latent else self.dim) ** -0.5)

    @property
    def key_channels(self) -> int:
        """Channels that a query and a key are multiplied over."""
        return self.dim + self.dim_v if self.latent else self.dim

    @property
    def kv_channels(self) -> int:
        """Channels that are stored per token and kv head."""
        return self.dim + self.dim_v


def _layer(name: str, heads: int, kv_heads: int, dim: int, **more: Any) -> Model:
    return Model(name, heads, kv_heads, dim, more.pop("dim_v", dim), **more)


def _latent(heads: int) -> Model:
    return _layer(f"DeepSeek MLA, {heads} heads", heads, 1, 64, dim_v=512, latent=True)


MODELS = {
    "llama3-8b": _layer("Llama-3 8B", 32, 8, 128),
    "llama3-8b-tp8": _layer("Llama-3 8B, TP 8", 4, 1, 128),
    "llama3-70b": _layer("Llama-3 70B", 64, 8, 128),
    "llama3-70b-tp8": _layer("Llama-3 70B, TP 8", 8, 1, 128),
    "qwen3-30b": _layer("Qwen3-30B", 32, 4, 128),
    "gpt-oss": _layer("gpt-oss", 64, 8, 64, window=128, sinks=True),
    "gemma3-12b": _layer("Gemma-3 12B", 16, 8, 256, window=1024),
    "mla-16": _latent(16),
    "mla-64": _latent(64),
    "mla-128": _latent(128),
    "smollm2-135m": _layer("SmolLM2-135M", 9, 3, 64),
    "mha-16": _layer("16 heads, no groups", 16, 16, 128),
    "mha-32": _layer("32 heads, no groups", 32, 32, 128),
}


@dataclass(frozen=True)
class Work:
    """One cell: a batch that an attention layer of a model works on.

    Attributes:
        suite, label: where the reports put it; together they are its name.
        model: the layer.
        queries: query rows of each sequence.
        keys: keys that each sequence has in the end, those of this step included.
        page: tokens a page of the cache; 0 is a contiguous cache.
        dtype, kv_dtype: of queries, and of stored keys and values; keys of `DTYPES`.
        append: the call rotates queries and new keys and stores the new keys and values; without
            it they lie in the cache already.
        causal: a query sees no later key.
        window: the model's window and sinks hold.
        tree: the queries are nodes of a binary tree of drafts; each sees its ancestors.
        prefix: leading keys whose pages all sequences share.
        announced: libraries are told of the prefix, so that they may read it once.
        invariant: a row's bits must not depend on its neighbours.
        kind: what is measured: "device" time, "host" time or "startup".
    """

    suite: str
    label: str
    model: Model
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page: int = 64
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    append: bool = False
    causal: bool = True
    window: bool = False
    tree: bool = False
    prefix: int = 0
    announced: bool = True
    invariant: bool = False
    kind: str = "device"

    @property
    def name(self) -> str:
        """What identifies the cell across runs."""
        return f"{self.suite}: {self.label}"

    @property
    def batch(self) -> int:
        return len(self.keys)

    @property
    def uniform(self) -> bool:
        """Whether all sequences are of one length."""
        return len(set(self.queries)) == 1 and len(set(self.keys)) == 1

    @property
    def ragged(self) -> bool:
        """Whether the numbers of query rows differ."""
        return len(set(self.queries)) > 1

    @property
    def rows(self) -> int:
        """Query rows in all."""
        return sum(self.queries)

    @property
    def new(self) -> int:
        """Tokens of each sequence that the call appends."""
        return self.queries[0] if self.append else 0

    @property
    def reach(self) -> int:
        """Keys that a row sees at most, 0 without a window."""
        return self.model.window if self.window else 0

    @property
    def tokens(self) -> int:
        """Keys in the cache that are read at least once, a shared prefix counted once."""
        shared = self.prefix * (self.batch - 1)
        return sum(map(self._read, self.queries, self.keys)) - shared

    def _read(self, q: int, k: int) -> int:
        return min(k, self.reach + q - 1) if self.reach else k

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in the cache."""
        return self.model.kv_heads * self.model.kv_channels * DTYPES[self.kv_dtype].itemsize

    @cached_property
    def bytes(self) -> int:
        """Bytes that must move: visible keys and values, queries in, results out, new tokens."""
        wide = DTYPES[self.dtype].itemsize
        channels = self.model.heads * (self.model.key_channels + self.model.dim_v)
        fresh = self.batch * self.new * self.model.kv_heads * self.model.kv_channels * wide
        return self.tokens * self.token_bytes + self.rows * channels * wide + fresh

    @cached_property
    def pairs(self) -> int:
        """Pairs of a query row and a key it sees."""
        return sum(map(self._pairs, self.queries, self.keys))

    def _pairs(self, q: int, k: int) -> int:
        if not self.causal or self.tree:
            return q * k
        if self.reach:
            return sum(min(k - q + i + 1, self.reach) for i in range(q))
        return q * (k - q) + q * (q + 1) // 2

    @cached_property
    def flops(self) -> int:
        """Operations of both matrix products, masked pairs and padding left out."""
        return 2 * self.pairs * self.model.heads * (self.model.key_channels + self.model.dim_v)

    def describe(self) -> dict[str, Any]:
        """What a reader of the results needs to know of it."""
        model = self.model
        return {
            "name": self.name,
            "suite": self.suite,
            "label": self.label,
            "model": model.name,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "dim": model.dim,
            "dim_v": model.dim_v,
            "batch": self.batch,
            "queries": max(self.queries),
            "context": max(self.keys),
            "uniform": self.uniform,
            "page": self.page,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "bytes": self.bytes,
            "flops": self.flops,
            "kind": self.kind,
        }

    def case(self) -> Case:
        """The same call for the contract's tests, without the tree and the shared prefix."""
        model, kv = self.model, DTYPES[self.kv_dtype]
        lengths = tuple(k - self.new for k in self.keys)
        return Case(
            name=self.name,
            batch=self.batch,
            seqlen_q=self.queries if self.ragged else self.queries[0],
            lengths=lengths,
            heads=model.heads,
            kv_heads=model.kv_heads,
            dim=model.dim,
            dim_v=model.dim_v,
            dtype=DTYPES[self.dtype],
            cache_dtype=kv,
            page_size=self.page or None,
            new=self.new if self.append else None,
            rotary=model.dim if self.append else 0,
            rotary_interleaved=False,
            causal=self.causal,
            window=(self.reach - 1, 0) if self.reach else (-1, -1),
            sinks=torch.float32 if self.window and model.sinks else None,
            qv=model.latent,
            scale=model.scale,
        )


def small(work: Work, dtype: str = "fp32") -> Work:
    """The same cell in the dtype that a CPU is good at."""
    kv = work.kv_dtype if work.kv_dtype == "fp8" else dtype
    return replace(work, dtype=dtype, kv_dtype=kv)

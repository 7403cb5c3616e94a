"""Other attention libraries: what each would do with a call that kvattn takes.

Example:
    >>> call = Call({"k": UNKNOWN, "v": UNKNOWN, "cache_seqlens": UNKNOWN})
    >>> [verdict.why for verdict in verdicts(call) if verdict.peer == "sglang-fa4"]
    ['raises NotImplementedError: it does not update the cache in place']
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvattn.peers.call import TRAITS, UNKNOWN, Call, every
from kvattn.peers.rules import ALTERS, REFUSES, RULES

__all__ = ["ALTERS", "PEERS", "REFUSES", "UNKNOWN", "Call", "Peer", "Verdict", "verdicts"]


class Peer(NamedTuple):
    """Another library, or a path through one.

    Attributes:
        name: short, as options and JSON have it.
        title: as its project writes it.
        packages: the distributions that bring it, any of them.
        read: the release or commit that the rules were read in.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    read: str

    @property
    def version(self) -> str | None:
        """The installed version, None if it is not installed."""
        from importlib import metadata

        for package in self.packages:
            try:
                return metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        return None


_SGLANG = ("sglang-kernel", "sgl-kernel", "sglang")

PEERS = (
    Peer("fa2", "FlashAttention-2", ("flash-attn",), "commit 0251105"),
    Peer("fa3", "FlashAttention-3", ("flash-attn-3", "fa3-fwd"), "commit 0251105"),
    Peer("fa4", "FlashAttention-4", ("flash-attn-4",), "4.0.0b36"),
    Peer("sglang-fa3", "SGLang, FA3 wrapper", _SGLANG, "commit 0132848"),
    Peer("sglang-fa4", "SGLang, FA4 wrapper", _SGLANG, "commit 0132848"),
    Peer("sglang-fa4-sm120", "SGLang, FA4 wrapper for SM 12.x", _SGLANG, "commit 0132848"),
    Peer("flashinfer", "FlashInfer", ("flashinfer-python", "flashinfer"), "0.7.4"),
    Peer("sdpa", "PyTorch scaled_dot_product_attention", ("torch",), "2.13"),
    Peer("flex", "PyTorch FlexAttention", ("torch",), "2.13"),
)


class Verdict(NamedTuple):
    """One thing that one peer would do with a call.

    Attributes:
        peer: its name.
        effect: "refuses" or "alters".
        arguments: the arguments concerned, those that the call gives.
        why: the rest of a sentence that begins with the peer's name.
        certain: False if it depends on what is not known of the call.
    """

    peer: str
    effect: str
    arguments: tuple[str, ...]
    why: str
    certain: bool

    def __str__(self) -> str:
        return self.why if self.certain else f"perhaps {self.why}"

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return {**self._asdict(), "arguments": list(self.arguments)}


def verdicts(call: Call) -> Iterator[Verdict]:
    """What the peers would refuse or alter, in the order of `PEERS`; nothing about the others."""
    traits = {name: trait(call) for name, trait in TRAITS.items()}
    for peer in PEERS:
        for rule in RULES:
            if peer.name not in rule.peers:
                continue
            truth = every(*(traits[name] for name in rule.traits))
            if truth is False:
                continue
            given = tuple(name for name in rule.arguments if call.has(name))
            certain = truth is True and not rule.depends
            yield Verdict(peer.name, rule.effect, given, rule.why, certain)

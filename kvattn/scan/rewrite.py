"""What to write for kvattn in place of a call of another library."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvattn import api
from kvattn.errors.syntax import text_of
from kvattn.scan.calls import NAMES, Found, value_of
from kvattn.scan.signatures import KVCACHE, PACKED, PADDED, UNKNOWN_LIBRARY, VARLEN

_WIDTH = 88

_DEFAULTS = {
    name: {p.name: p.default for p in inspect.signature(getattr(api, name)).parameters.values()}
    for name in (KVCACHE, VARLEN, PADDED)
}
_BACKWARD = "score_mod_bwd block_sparse_tensors_bwd gather_bwd_recompute_p gather_bwd_token_chunk"
_DROPPED = {
    "ver": "",
    "fa_version": "",
    "seqlen_k_per_split": "",
    "disable_scheduler_metadata": "",
    **dict.fromkeys(_BACKWARD.split(), "there is no backward pass"),
    "scheduler_metadata": "kvattn plans by itself; kvattn.get_scheduler_metadata makes its own",
    "aux_scalars": "let the mod capture its scalars",
}
_OF_NEW_KEYS = ("cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_seqlens")


@dataclass(frozen=True)
class Rewrite:
    """The same call for kvattn.

    Attributes:
        imports: import lines that the code needs.
        code: an expression for a plain call, statements for FlashInfer's.
        notes: what differs, and what could not be told.
    """

    imports: tuple[str, ...]
    code: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return {"imports": list(self.imports), "code": self.code, "notes": list(self.notes)}


def rewrite(found: Found) -> Rewrite:
    """The call of one of FlashAttention's functions, from any library that has them."""
    name = PACKED.get(found.function, found.function)
    values = {key: text_of(node) for key, node in found.arguments.items()}
    lead = _lead(found, values)
    words = _words(found, name, values)
    words = _key_lengths(found, words)
    stars = [part for part in found.rest if not part.startswith("**")]
    mappings = [part for part in found.rest if part.startswith("**")]
    code = written(f"kvattn.{name}", [*lead, *stars, *_keywords(words), *mappings])
    return Rewrite(("import kvattn",), code, (*_dropped(found, name), *_notes(found)))


def _lead(found: Found, values: dict[str, str]) -> list[str]:
    """The tensors that come first and need no name; takes them out of `values`."""
    dim = 1 if "varlen" in found.function else 2
    if "qkv" in values:
        del values["qkv"]
        return [f"*{atom(found.arguments['qkv'])}.unbind({dim})"]
    if "kv" in values and "q" in values:
        del values["kv"]
        return [values.pop("q"), f"*{atom(found.arguments['kv'])}.unbind({dim})"]
    first = ("q", "k_cache", "v_cache") if found.function == KVCACHE else ("q", "k", "v")
    if all(name in values for name in first):
        return [values.pop(name) for name in first]
    return []


def _words(found: Found, name: str, values: Mapping[str, str]) -> dict[str, str]:
    """Keyword arguments under kvattn's names; defaults, and what kvattn has not, are left out."""
    words: dict[str, str] = {}
    for key, text in values.items():
        ours = NAMES.get(key, key)
        value = value_of(found.arguments[key])
        if value is None or key in _DROPPED or _idle(found, key):
            continue
        if key in ("cu_seqlens", "max_seqlen"):
            words |= {f"{key}_q": text, f"{key}_k": text}
        elif value != _DEFAULTS[name].get(ours, value):
            words.setdefault(ours, text)
    return words


def _idle(found: Found, key: str) -> bool:
    """Whether an argument belongs to new keys, and there are none: others ignore it then."""
    new = found.arguments.get("k")
    appends = new is not None and value_of(new) is not None
    return found.function == KVCACHE and key in _OF_NEW_KEYS and not appends


def _key_lengths(found: Found, words: dict[str, str]) -> dict[str, str]:
    """Pages have lengths, not edges: ``seqused_k`` in place of ``cu_seqlens_k``."""
    if "page_table" not in words or "cu_seqlens_k" not in words:
        return words
    del words["cu_seqlens_k"]
    return {"seqused_k": f"{atom(found.arguments['cu_seqlens_k'])}.diff()", **words}


def _keywords(words: Mapping[str, str]) -> Iterator[str]:
    for key, text in words.items():
        yield f"{key}={text}"


def _dropped(found: Found, name: str) -> Iterator[str]:
    """Sentences about arguments that have no place in the new call."""
    for key, node in found.arguments.items():
        if key in ("qkv", "kv", "q", "cu_seqlens", "max_seqlen") or text_of(node) == "None":
            continue
        if key in _DROPPED:
            if _DROPPED[key]:
                yield f"{key} is dropped: {_DROPPED[key]}"
        elif _idle(found, key):
            yield f"{key} is dropped: without k it was ignored"
        elif NAMES.get(key, key) not in _DEFAULTS[name]:
            yield f"{key} is dropped: kvattn has no such argument"
        elif key == "dropout_p" and value_of(node) != 0:
            yield "dropout_p must be 0: there is no dropout over a cache"


def _notes(found: Found) -> Iterator[str]:
    """Sentences about results and arguments that mean something else."""
    values = {NAMES.get(key, key): value_of(node) for key, node in found.arguments.items()}
    lse = values.get("return_softmax_lse", False) is not False
    cached = found.function == KVCACHE
    if lse and cached and found.library in ("fa3", "sglang", "sglang-fa3"):
        yield "returns (out, lse); here it was followed by the partial results of the splits"
    if lse and found.library == "fa2" and not cached:
        yield "returns (out, lse), without the dropout mask that came third"
    if found.library == "fa4" and not lse:
        yield "returns out alone; for the pair (out, lse) add return_softmax_lse=True"
    if "mask_mod" in values and found.library == "fa4":
        yield "causal and window_size hold beside mask_mod; there they were dropped"
    if "num_heads_q" in values:
        yield "the packed heads must be split by hand: q, k, v = qkv.split([H, Hk, Hk], dim=-2)"
    if any(part.startswith("**") for part in found.rest):
        yield f"{', '.join(found.rest)} may hold arguments under other names"
    elif found.rest:
        yield "starred arguments were left in their order; check it"
    if found.guessed:
        guess = found.library if found.library != UNKNOWN_LIBRARY else "fa3"
        yield f"positional arguments past the fifth were read in the order of {guess}"


def atom(node: ast.expr) -> str:
    """An expression as text that a dot can follow."""
    simple = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Tuple, ast.List, ast.Constant)
    return text_of(node) if isinstance(node, simple) else f"({text_of(node)})"


def written(function: str, arguments: Iterable[str]) -> str:
    """A call as text: in one line if it fits, else an argument a line."""
    arguments = list(arguments)
    line = f"{function}({', '.join(arguments)})"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{function}(", *(f"    {argument}," for argument in arguments), ")"])

"""What to write for kvattn in place of FlashInfer's functions and wrappers."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from kvattn.errors.syntax import text_of
from kvattn.scan.calls import Found, value_of
from kvattn.scan.rewrite import Rewrite, atom, written
from kvattn.scan.signatures import (
    APPEND,
    DECODE_WRAPPER,
    KVCACHE,
    PADDED,
    RAGGED_WRAPPER,
    SINGLE,
    VARLEN,
)

_TORCH, _KVATTN, _MATH = "import torch", "import kvattn", "import math"
_OPTIONS = {
    "sm_scale": "softmax_scale",
    "causal": "causal",
    "logits_soft_cap": "softcap",
    "q_scale": "q_descale",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
    "sinks": "sinks",
}
_BASE_2 = "the lse is converted to base 2 and token first, as FlashInfer has it"


def rewrite(found: Found) -> Rewrite:
    """The call for kvattn; statements that leave the result in `out`, and the lse in `lse`."""
    if found.function == APPEND:
        return _append(found)
    if found.function in SINGLE:
        return _single(found)
    if found.function == RAGGED_WRAPPER:
        return _ragged(found)
    return _paged(found)


class _Texts(dict[str, str]):
    """Arguments as atoms of source text; one that is not known is its own name in capitals."""

    def __init__(self, arguments: Mapping[str, ast.expr]) -> None:
        super().__init__({name: atom(node) for name, node in arguments.items()})

    def __missing__(self, name: str) -> str:
        return name.upper()


def _fresh(found: Found, name: str) -> str:
    """A variable of that name, or longer, that none of the call's expressions uses."""
    used = {
        node.id
        for argument in (found.plan | found.arguments).values()
        for node in ast.walk(argument)
        if isinstance(node, ast.Name)
    }
    while name in used:
        name += "_"
    return name


def _options(found: Found) -> Iterator[str]:
    """Masks and scales, which all of FlashInfer's calls name alike."""
    arguments = found.plan | found.arguments
    for name, ours in _OPTIONS.items():
        node = arguments.get(name)
        if node is not None and value_of(node) not in (None, False):
            yield f"{ours}={text_of(node)}"
    left = arguments.get("window_left")
    if left is not None and value_of(left) not in (None, -1):
        yield f"window_size=({text_of(left)}, -1)"
    if found.function == SINGLE[1] and "custom_mask" in arguments:
        mask = text_of(arguments["custom_mask"])
        yield f"mask_mod=lambda b, h, i, j: {mask}[i, j]"
    if _lse(found):
        yield "return_softmax_lse=True"


def _lse(found: Found) -> bool:
    node = found.arguments.get("return_lse")
    return node is not None and value_of(node) is not False


def _notes(found: Found) -> Iterator[str]:
    arguments = found.plan | found.arguments
    mode = value_of(arguments["pos_encoding_mode"]) if "pos_encoding_mode" in arguments else "NONE"
    if mode == "ALIBI":
        yield "pass alibi_slopes; they are aligned to the last key and added after the softcap"
    elif mode != "NONE":
        yield "rotate with rotary_cos, rotary_sin in the call that appends, or kvattn.apply_rotary"
    if _lse(found):
        yield _BASE_2
    if "packed_custom_mask" in arguments or (
        "custom_mask" in arguments and found.function != SINGLE[1]
    ):
        yield "write the mask as mask_mod(b, h, q_idx, kv_idx)"
    if found.rest:
        yield f"{', '.join(found.rest)} could not be told"


def _heads_last(found: Found, text: str) -> str:
    """Keys or values with heads in the last but one dimension, whatever kv_layout says."""
    layout = (found.plan | found.arguments).get("kv_layout")
    known = "NHD" if layout is None else value_of(layout)
    return f"{text}.transpose(-3, -2)" if known == "HND" else text


def _cache(found: Found, node: ast.expr | None) -> list[str]:
    """k_cache and v_cache out of paged_kv_cache: a pair, or one tensor with both in dim 1."""
    if isinstance(node, ast.Tuple) and len(node.elts) == 2:
        return [_heads_last(found, text_of(part)) for part in node.elts]
    if node is None:
        return ["K_CACHE", "V_CACHE"]
    text = text_of(node)
    layout = (found.plan | found.arguments).get("kv_layout")
    if layout is not None and value_of(layout) == "HND":
        return [f"*{text}.transpose(-3, -2).unbind(1)"]
    return [f"*{text}.unbind(1)"]


def _single(found: Found) -> Rewrite:
    """One sequence without a batch dimension."""
    texts = _Texts(found.arguments)
    decode = found.function == SINGLE[0]
    query = f"{texts['q']}[None, None]" if decode else f"{texts['q']}[None]"
    keys = [f"{_heads_last(found, texts[name])}[None]" for name in ("k", "v")]
    call = written(f"kvattn.{PADDED}", [query, *keys, *_options(found)])
    row = "[0, 0]" if decode else "[0]"
    notes = tuple(_notes(found))
    if not _lse(found):
        return Rewrite((_KVATTN,), f"out = {call}{row}", notes)
    lse = "lse[0, :, 0]" if decode else "lse[0].T"
    code = f"out, lse = {call}\nout, lse = out{row}, {lse} / math.log(2)"
    return Rewrite((_MATH, _KVATTN), code, notes)


def _paged(found: Found) -> Rewrite:
    """Lists of pages become a page table; made once per step, as `plan` was."""
    decode = found.function == DECODE_WRAPPER
    names = ("indptr", "indices", "last_page_len")
    plan = _Texts(found.plan)
    indptr, indices, last = (plan[name if decode else f"paged_kv_{name}"] for name in names)
    counts, table, lengths = (
        _fresh(found, name) for name in ("page_counts", "page_table", "cache_seqlens")
    )
    lines = [
        f"{counts} = {indptr}.diff()",
        written(
            f"{table} = torch.nn.utils.rnn.pad_sequence",
            [f"{indices}.split({counts}.tolist())", "batch_first=True", "padding_value=-1"],
        ),
        f"{lengths} = (({counts} - 1) * {plan['page_size']} + {last}).clamp(min=0)",
    ]
    query = _Texts(found.arguments)["q"]
    ragged = [] if decode else [f"cu_seqlens_q={plan['qo_indptr']}"]
    arguments = [
        f"{query}[:, None]" if decode else query,
        *_cache(found, found.arguments.get("paged_kv_cache")),
        f"cache_seqlens={lengths}",
        f"page_table={table}",
        *ragged,
        *_options(found),
    ]
    call = written(f"kvattn.{KVCACHE}", arguments)
    row = "[:, 0]" if decode else ""
    if _lse(found):
        lse = "lse[..., 0]" if decode else "lse.T"
        lines += [f"out, lse = {call}", f"out, lse = out{row}, {lse} / math.log(2)"]
    else:
        lines.append(f"out = {call}{row}")
    return Rewrite(_imports(found), "\n".join(lines), (*_unplanned(found), *_notes(found)))


def _imports(found: Found) -> tuple[str, ...]:
    return (*([_MATH] if _lse(found) else []), _TORCH, _KVATTN)


def _unplanned(found: Found) -> Iterator[str]:
    if "indptr" not in found.plan and "qo_indptr" not in found.plan:
        yield "plan() is not called in this file: fill in what stands in capitals from there"
    yield "the page table and the lengths serve all layers of a step"
    if isinstance(found.arguments.get("paged_kv_cache"), (ast.Name, ast.Attribute, ast.Subscript)):
        yield "if the cache is a pair (k_cache, v_cache), pass both in place of unbind(1)"


def _ragged(found: Found) -> Rewrite:
    """Packed queries and keys."""
    texts, plan = _Texts(found.arguments), _Texts(found.plan)
    tensors = [texts["q"], *(_heads_last(found, texts[name]) for name in ("k", "v"))]
    edges = [f"cu_seqlens_q={plan['qo_indptr']}", f"cu_seqlens_k={plan['kv_indptr']}"]
    call = written(f"kvattn.{VARLEN}", [*tensors, *edges, *_options(found)])
    notes = tuple(_notes(found))
    if not _lse(found):
        return Rewrite((_KVATTN,), f"out = {call}", notes)
    code = f"out, lse = {call}\nlse = lse.T / math.log(2)"
    return Rewrite((_MATH, _KVATTN), code, notes)


def _append(found: Found) -> Rewrite:
    """Places in pages become slots."""
    texts = _Texts(found.arguments)
    node = found.arguments.get("paged_kv_cache")
    if isinstance(node, ast.Tuple) and len(node.elts) == 2:
        k_cache, v_cache = _cache(found, node)
        lines = []
    else:
        k_cache, v_cache = (_fresh(found, name) for name in ("k_cache", "v_cache"))
        lines = [f"{k_cache}, {v_cache} = {_cache(found, node)[0].removeprefix('*')}"]
    positions, owners = texts["positions"], texts["batch_indices"]
    size = f"{k_cache}.shape[1]"
    page, slots = (_fresh(found, name) for name in ("page", "slots"))
    lines += [
        f"{page} = {texts['kv_indices']}[{texts['kv_indptr']}[{owners}] + {positions} // {size}]",
        f"{slots} = {page}.long() * {size} + {positions} % {size}",
        written(
            "kvattn.append_kv",
            [texts["append_key"], texts["append_value"], k_cache, v_cache, f"slot_mapping={slots}"],
        ),
    ]
    note = (
        "or pass k, v and slot_mapping to flash_attn_with_kvcache: it appends and attends at once"
    )
    return Rewrite((_KVATTN,), "\n".join(lines), (note,))

"""Decode with changed scores and chosen keys: mods, intervals, ALiBi, relative bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mod_cases
import pytest
import torch
from cases import BF16, E4M3
from conftest import BACKENDS, DEVICE
from interpreter import INTERPRETED
from torch import Tensor

import kvattn
from kvattn.mods import interval
from kvattn.testing import Case, check_case

pytest.importorskip("triton")
if not INTERPRETED and DEVICE == "cpu":
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)
if "triton" not in BACKENDS:
    pytest.skip("the kernels of the triton backend", allow_module_level=True)

from kvattn.backends import triton_decode
from kvattn.request import Request

B, H, SQ, SK = mod_cases.B, mod_cases.H, mod_cases.SQ, mod_cases.SK
LONG, D = 300, 32
Mod = Callable[..., Any]


@pytest.fixture(autouse=True)
def served_by_the_decode_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = triton_decode.takes

    def takes(r: Request) -> bool:
        assert taken(r)
        return True

    monkeypatch.setattr(triton_decode, "takes", takes)


def drawn(*shape: int) -> Tensor:
    draw = torch.Generator(DEVICE).manual_seed(5)
    return torch.randn(*shape, generator=draw, device=DEVICE)


def call(
    backend: str, keys: int, heads: int, q_len: int, page: int | None = None, **more: Any
) -> Any:
    """(out, lse) over a cache of `keys` keys and one kv head for two query heads."""
    q = drawn(B, q_len, heads, D).to(BF16)
    cache = torch.stack([drawn(B, keys, heads // 2, D), drawn(B, keys, heads // 2, D) + 1]).to(BF16)
    hidden = more.pop("hidden", None)
    if hidden is not None:  # keys that no query sees hold anything
        cache[:, hidden] = float("nan")
    table = None
    if page is not None:
        count = -(-keys // page)
        padded = torch.zeros(2, B, count * page, heads // 2, D, dtype=BF16, device=DEVICE)
        padded[:, :, :keys] = cache
        cache = padded.view(2, B * count, page, heads // 2, D).flip(1)
        table = torch.arange(B * count, device=DEVICE, dtype=torch.int32).flip(0).view(B, count)
    given: dict[str, Any] = {"cache_seqlens": keys, "page_table": table, "backend": backend, **more}
    k_cache, v_cache = cache
    with torch.device(DEVICE):
        return kvattn.flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=True, **given)


def check(**given: Any) -> None:
    out, lse = call("triton", **given)
    wanted, wanted_lse = call("reference", **given)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=2e-4)


def aux_of(mod: Mod, indices: int) -> list[Tensor] | None:
    return mod_cases.AUX if kvattn.mods.arity(mod) > indices else None


def seen_by_none(mask: Mod, keys: int, q_len: int, heads: int = H) -> Tensor:
    """[B, keys]: keys that the mask hides from every row of their sequence."""
    b, h, q, k = torch.meshgrid(*(torch.arange(n, device=DEVICE) for n in (B, heads, q_len, keys)),
                               indexing="ij")  # fmt: skip
    info = kvattn.mods.SeqlenInfo(0, 0, q_len, keys)
    with torch.device(DEVICE):
        kept = mask(*(b, h, q, k, info, mod_cases.AUX, ())[: kvattn.mods.arity(mask)])
    return ~torch.as_tensor(kept, device=DEVICE).bool().expand(B, heads, q_len, keys).any(2).any(1)


@pytest.mark.parametrize("name", mod_cases.SCORES)
def test_scores(name: str) -> None:
    mod = mod_cases.SCORES[name]
    check(keys=SK, heads=H, q_len=SQ, score_mod=mod, aux_tensors=aux_of(mod, 5))


@pytest.mark.parametrize("name", [n for n in mod_cases.MASKS if n != "number-as-truth"])
def test_masks_and_keys_that_they_hide_from_all(name: str) -> None:
    """Hidden keys hold NaN: they are not even read."""
    mask = mod_cases.MASKS[name]
    check(
        keys=SK, heads=H, q_len=SQ, mask_mod=mask, aux_tensors=aux_of(mask, 4), page=4,
        hidden=seen_by_none(mask, SK, SQ),
    )  # fmt: skip


PADDING = drawn(B, LONG) > 0
TABLE = drawn(2, 2 * LONG)
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], device=DEVICE).bool()
STARTS = torch.tensor([130, 7], dtype=torch.int32, device=DEVICE)


def tree(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Drafts behind the context, each of which sees its ancestors."""
    node = (k - LONG + 4).clamp(min=0)
    return (k < LONG - 4) | TREE[q, node]


def relative(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + TABLE[h, q - k + LONG]


PACKED = interval(lo=lambda b, h, q: STARTS[b], hi=lambda b, h, q: STARTS[b] + 90 + q)
LONGER: dict[str, dict[str, Any]] = {
    "padding": {"mask_mod": lambda b, h, q, k: PADDING[b, k]},
    "tree": {"mask_mod": tree},
    "tree and scores": {"mask_mod": tree, "score_mod": relative, "softcap": 5.0},
    "relative, window": {"score_mod": relative, "causal": True, "window_size": (100, 0)},
    "interval": {"mask_mod": PACKED},
    "interval, mod": {"mask_mod": interval(lambda b, h, q, k: k % 3 > 0, lo=lambda b, h, q: 100)},
    "interval of nothing": {"mask_mod": interval(lo=lambda b, h, q: 2**31 - 1 - b)},
    "interval that ends before it begins": {
        "mask_mod": interval(lo=lambda b, h, q: 90 * q, hi=lambda b, h, q: 150 - q)
    },
    "alibi": {"alibi_slopes": drawn(B, 2).abs()},
    "relative bias": {"rel_bias": drawn(B, 4, 2, 70), "causal": True},
    "relative bias to both sides": {"rel_bias": drawn(B, 4, 2, 90)},
}


@pytest.mark.parametrize(
    ("page", "options"),
    [(None, {}), (16, {"num_splits": 3}), (64, {}), (16, {"batch_invariant": True})],
    ids=["dense", "splits", "pages-of-64", "invariant"],
)
@pytest.mark.parametrize("name", LONGER)
def test_several_tiles(name: str, page: int | None, options: dict[str, Any]) -> None:
    hidden = None
    if "mask_mod" in LONGER[name]:
        hidden = seen_by_none(LONGER[name]["mask_mod"], LONG, 4, 2)
    check(keys=LONG, heads=2, q_len=4, page=page, hidden=hidden, **LONGER[name], **options)


STEP = Case(batch=4, lengths=(300, 3, 0, 65), capacity=320, page_size=16, new=1, rotary=32,
            dim=32, dim_v=32, heads=4, kv_heads=1, causal=True, dtype=BF16)  # fmt: skip


def odd_keys(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k % 2 == 1


@pytest.mark.parametrize(
    "case",
    [
        replace(STEP, alibi="batch"),
        replace(STEP, rel_bias=40),
        replace(STEP, mask_mod=odd_keys),
        replace(STEP, mask_mod=interval(lo=lambda b, h, q: 1000)),
        replace(STEP, mask_mod=interval(hi=lambda b, h, q: 10)),
        replace(STEP, new=4, seqlen_q=4, mask_mod=odd_keys, alibi="heads", softcap=3.0),
        replace(STEP, score_mod=mod_cases.SCORES["softcap"], leftpad=(40, 1, 0, 7)),
        replace(STEP, score_mod=mod_cases.SCORES["softcap"], cache_dtype=E4M3, descale="heads"),
        replace(STEP, seqlen_q=(1, 3, 0, 5), new=None, rotary=0, rel_bias=30, alibi="batch",
                mask_mod=odd_keys, options={"max_seqlen_q": 5}),
    ],
    ids=["alibi", "bias", "odd", "beyond", "before", "draft", "leftpad", "fp8", "ragged"],
)  # fmt: skip
def test_steps_that_append(case: Case) -> None:
    """New tokens are stored whether or not a mask lets anybody see them."""
    check_case(case, "triton", DEVICE)

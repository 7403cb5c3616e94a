"""What surrounds a call changes nothing: modes of torch, shared memory, earlier calls, threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from test_random import assert_case, drawn, mismatch
from torch import Tensor

import kvattn
from kvattn import errors as E
from kvattn import forms
from kvattn.plan import Prepared
from kvattn.request import Request

attend: Any = kvattn.flash_attn_with_kvcache
pytestmark = pytest.mark.filterwarnings("ignore:numbers beyond")
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast to bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", torch.float16),
    "another default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_torch(mode: str, backend: str) -> None:
    made = 0
    for seed in range(150):
        function, call = drawn(seed, plain=backend == "cpu")

        def inside(function: Any = function, **given: Any) -> Any:
            with MODES[mode]():
                return function(**given)

        try:
            assert_case(seed, call, mismatch, inside, backend)
            made += 1
        except E.BackendRefusesError:
            continue
    assert made > 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_leaves_a_repeated_decode_step_alone(dtype: torch.dtype) -> None:
    """The layers of one step, the second of which runs what the first one prepared."""
    step = kvattn.ops.Step()
    index = {"cache_seqlens": torch.tensor([3, 5], dtype=torch.int32)}
    for _ in range(3):
        k, v = torch.randn(2, 2, 1, 2, 8, dtype=dtype)
        layer = {
            "q": torch.randn(2, 1, 4, 8, dtype=dtype),
            "k_cache": torch.randn(2, 16, 2, 8, dtype=dtype),
            "v_cache": torch.randn(2, 16, 2, 8, dtype=dtype),
            "k": k,
            "v": v,
        }
        wanted = attend(**{n: x.clone() for n, x in layer.items()}, **index)
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(step.attend(index, layer, {"backend": "cpu"}), wanted)


def in_common(rows: int, where: str) -> dict[str, Tensor]:
    """New tokens, or queries, that lie in the memory of the caches."""
    memory = torch.randn(2, 16, 6, 8)
    k_cache, v_cache = memory[:, :, :2], memory[:, :, 2:4]
    k, v, q = torch.randn(2, rows, 2, 8), torch.randn(2, rows, 2, 8), torch.randn(2, rows, 4, 8)
    place = slice({"behind": 8, "shifted": 7, "before": 0}.get(where, 8), None)
    if where == "query":
        q = memory[:, 8 : 8 + rows, :4]
    elif where == "crossed":
        k, v = v_cache[:, 8 : 8 + rows], k_cache[:, 8 : 8 + rows]
    else:
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
        k, v = k_cache[:, place][:, :rows], v_cache[:, place][:, :rows]
    return {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}


@pytest.mark.parametrize("backend", ["cpu", "reference", None])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("where", ["behind", "shifted", "before", "query", "crossed"])
def test_what_lies_in_the_caches_is_read_before_they_are_written(
    where: str, rows: int, backend: str | None
) -> None:
    call, options = in_common(rows, where), {"cache_seqlens": 8, "causal": True}
    apart = {name: tensor.clone() for name, tensor in call.items()}
    wanted = attend(**apart, **options, backend="reference")
    torch.testing.assert_close(attend(**call, **options, backend=backend), wanted)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(call[name], apart[name])


@pytest.mark.parametrize("name", ["causal", "norm_eps", "rotary_interleaved", "batch_invariant"])
def test_a_known_form_excuses_no_none(name: str) -> None:
    call = {"q": torch.randn(1, 1, 2, 8), "k_cache": torch.randn(1, 4, 2, 8)}
    call["v_cache"] = call["k_cache"].clone()
    attend(**call)
    with pytest.raises((E.FlagError, E.NormEpsError), match=name):
        attend(**call, **{name: None})


def test_a_form_is_ready_for_other_threads_at_once() -> None:
    """Until all of it is known, what was prepared is not called."""
    q, cache = torch.randn(1, 1, 2, 8), torch.randn(1, 4, 2, 8)
    given: dict[str, Any] = {"q": q, "k_cache": cache, "v_cache": cache.clone(), "q_descale": 0.5}
    request = Request.of(**given)
    key, _, tensors = forms.find(given)
    assert key is not None
    forms._remember(key, request, given)
    form = forms._forms[key]
    seen: list[Any] = []

    class Names(tuple[str, ...]):
        def __iter__(self) -> Any:
            seen.append(form.rest(tensors))  # another thread, meanwhile
            return super().__iter__()

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        assert [x.shape for x in given] == [request.q_descale.shape, q.shape]  # type: ignore[union-attr]
        return given[0], given[1]

    form.keep(Prepared(Names(("q_descale", "q")), run), request)
    assert seen == [None] * len(seen) != []
    assert form.rest(tensors) is not None

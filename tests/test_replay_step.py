"""A layer of a step whose tensors differ from the first layer's is checked by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvattn import errors as E
from kvattn.ops import Step


def layer() -> dict[str, Tensor]:
    """Of two sequences; the new tokens are written into the cache."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 1, 4, 16), "k": (2, 1, 2, 16), "v": (2, 1, 2, 16)}
    shapes |= {"k_cache": (2, 8, 2, 16), "v_cache": (2, 8, 2, 16)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def lengths(*numbers: int) -> dict[str, Tensor]:
    return {"cache_seqlens": torch.tensor(numbers, dtype=torch.int32)}


def guarded(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "meta": lambda x: x.to("meta"),
    "grad": lambda x: x.requires_grad_(),
    "inference": guarded,
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", list(layer()))
def test_what_the_first_layer_may_not_no_other_may(name: str, change: str, backend: str) -> None:
    options = {"backend": backend}
    index, changed = lengths(4, 7), layer()
    changed[name] = CHANGES[change](changed[name])

    def outcome(step: Step) -> Any:
        try:
            return step.attend(index, dict(changed), options)
        except E.KvattnError as error:
            return type(error)

    wanted = outcome(Step())
    step = Step()
    for _ in range(2):
        step.attend(index, layer(), options)
    found = outcome(step)
    if isinstance(wanted, Tensor):
        assert torch.equal(found, wanted)
    else:
        assert found is wanted
    refused = change != "inference" or name in ("k_cache", "v_cache")
    assert isinstance(wanted, type) == refused

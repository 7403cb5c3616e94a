"""What the documentation shows is run as it stands, and what it computes is checked."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvattn
from kvattn import mods

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTED = ("README.md", "docs/serving.md", "docs/transformers.md")
PUBLIC = [
    *(getattr(kvattn, name) for name in kvattn.__all__ if name != "errors"),
    mods.interval,
    mods.tanh_approx,
]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def run(page: Path, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The names after each block of a page, which go on from one to the next."""
    for number, code in enumerate(blocks(page)):
        exec(compile(code, f"{page.name}, block {number}", "exec"), given)
        yield given


def test_every_page_with_code_is_tested() -> None:
    assert [str(page.relative_to(ROOT)) for page in PAGES if blocks(page)] == list(TESTED)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme() -> None:
    (names,) = run(ROOT / "README.md", {})
    assert names["out"].shape == (2, 1, 8, 64)
    for b, length in enumerate((5, 40)):
        page, offset = names["page_table"][b, length // 16], length % 16
        assert torch.equal(names["k_cache"][page, offset], names["k"][b, 0])


def test_serving() -> None:
    torch.manual_seed(0)
    *_, tree, latent, small = [dict(names) for names in run(ROOT / "docs" / "serving.md", {})]
    check_tree(tree)
    assert latent["out"].shape == (2, 1, 8, 512)
    exact = kvattn.flash_attn_func(small["q"], small["k"], small["v"], causal=True)
    assert isinstance(exact, torch.Tensor)
    assert 0 < (small["out"] - exact).norm() / exact.norm() < 0.1


def check_tree(names: dict[str, Any]) -> None:
    """Nodes saw the context and their ancestors; the accepted ones lie behind the context."""
    cache, first, before = names["cache"], names["first"], names["before"]
    assert cache.length(first) == before + 3
    stored = cache.k(1).flatten(0, 1)[cache.slots(first)]
    assert torch.equal(stored[before:], names["k"][names["path"]])
    keys = torch.cat((stored[:before], names["k"]))
    values = cache.v(1).flatten(0, 1)[cache.slots(first)]
    values = torch.cat((values[:before], names["v"]))
    seen = torch.cat((torch.ones(4, before, dtype=torch.bool), names["tree"]), 1)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        names["q"].transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        seen,
        enable_gqa=True,
    )
    assert torch.allclose(names["out"][0], wanted.transpose(0, 1), atol=1e-4)


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, Any]:
    """What examples about Transformers take as given."""
    integration = pytest.importorskip("kvattn.integrations.transformers")
    if integration.CACHE_ARGUMENT != "cache":
        pytest.skip("the examples are written for newer releases")
    from tiny_models import save_tiny, tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    import transformers

    return {
        **vars(integration),
        "path": str(save_tiny(tmp_path)),
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "model": tiny_model(),
        "tokenizer": tokenizer,
        "inputs": tokenizer(["w1 w2"], return_tensors="pt"),
        "prompts": ["w1 w2 w3", "w4"],
    }


def test_transformers(tiny: dict[str, Any]) -> None:
    page = ROOT / "docs" / "transformers.md"
    (names,) = run(page, {"path": tiny["path"]})
    inputs, tokens = names["inputs"], names["tokens"]
    assert torch.equal(
        names["model"].generate(**inputs, max_new_tokens=32, do_sample=False), tokens
    )
    shown = re.search(r"^KvattnCache\((.*?)\)$", page.read_text(), re.M | re.S)
    assert shown is not None
    signature = inspect.signature(tiny["KvattnCache"])
    own = [
        name
        if value.default is value.empty
        else f"{name}={getattr(value.default, '__name__', value.default)}"
        for name, value in signature.parameters.items()
    ]
    assert shown[1].replace("*, ", "").split() == ", ".join(own).split()


def examples(thing: Any) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(thing) or "")


def follow(thing: Any, given: dict[str, Any]) -> None:
    """Runs the examples of a docstring; where an output stands, it is compared."""
    found = examples(thing)
    assert found, f"{thing.__name__} shows no example"
    for example in found:
        if example.want:
            assert repr(eval(example.source, given)) == example.want.strip()
        else:
            exec(example.source, given)


@pytest.mark.parametrize(
    "thing", [each for each in PUBLIC if examples(each)], ids=lambda each: each.__name__
)
def test_docstrings(thing: Any) -> None:
    torch.manual_seed(0)
    given: dict[str, Any] = {"torch": torch, "kvattn": kvattn, **vars(kvattn)}
    if thing is kvattn.PagedKVCache:
        given |= {"q": torch.randn(2, 2, 5, 4, 64).bfloat16()}
        given |= dict(zip("kv", torch.randn(2, 2, 2, 5, 2, 64).bfloat16(), strict=True))
    if thing is kvattn.checked:
        given |= {"q": torch.randn(1, 1, 4, 16), "lengths": 5}
        given |= {"k_cache": torch.randn(1, 8, 2, 16), "v_cache": torch.randn(1, 8, 2, 16)}
    follow(thing, given)


def test_calls_show_an_example() -> None:
    silent = {thing.__name__ for thing in PUBLIC if not examples(thing)}
    assert silent == {"BlockSparse", "Explanation", "SchedulerMetadata"}


@pytest.mark.parametrize("name", ["enable", "fuse", "KvattnCache"])
def test_docstrings_of_the_integration(name: str, tiny: dict[str, Any]) -> None:
    if name == "fuse":
        tiny["inputs"]["max_new_tokens"] = 4
    follow(tiny[name], tiny)

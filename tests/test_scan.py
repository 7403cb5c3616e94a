"""`kvattn.scan`: which files are read, which calls are found, and that what it writes is right."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

import kvattn
from kvattn.errors import catalogue, syntax
from kvattn.errors.catalogue_kinds import ScanPathError
from kvattn.errors.record import identity
from kvattn.scan import CallSite, Scan, call_sites, examine, files, scan

Tree = Callable[[dict[str, str | bytes]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Files with their contents, by path."""

    def make(contents: dict[str, str | bytes]) -> Path:
        root = tmp_path / "repo"
        for name, text in contents.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
        return root

    return make


def raised(found: Scan) -> dict[str, list[str]]:
    return {
        error.exception: [f"{each.site.file}:{each.site.line}" for each in error.sites]
        for error in found.errors
    }


# Files -----------------------------------------------------------------------------------------

WEIRD: dict[str, str | bytes] = {
    "good.py": "raise Good\n",
    "a/b/c/deep.py": "raise Deep\n",
    "a/syntax.py": "def f(:\n    raise Syntax\n",
    "a/bom.py": b"\xef\xbb\xbfraise Bom\n",
    "a/latin.py": b"# coding: latin-1\nraise Latin('\xfc')\n",
    "a/binary.py": b"\x00\x01\xff",
    "a/utf16.py": "raise Wide".encode("utf-16"),
    "a/nested.py": b"x = " + b"-" * 100_000 + b"1\n",
    "a/empty.py": b"",
    "a/notes.txt": "raise Text\n",
    "a/stub.pyi": "raise Stub\n",
    ".hidden/x.py": "raise Hidden\n",
    "a/__pycache__/x.py": "raise Cached\n",
    "node_modules/x.py": "raise Node\n",
    "venv/pyvenv.cfg": "",
    "venv/lib/x.py": "raise Venv\n",
    "folder.py/inner.py": "raise Inner\n",
}


def test_weird_files_are_skipped_with_a_note(tree: Tree) -> None:
    root = tree(WEIRD)
    (root / "huge.py").touch()
    os.truncate(root / "huge.py", syntax.LARGEST + 1)
    (root / "broken.py").symlink_to("nowhere.py")
    (root / "loop.py").symlink_to("loop.py")
    (root / "a/up").symlink_to(root, target_is_directory=True)
    (root / "link.py").symlink_to("good.py")
    found = scan(root)
    assert raised(found) == {
        "Bom": ["a/bom.py:1"],
        "Latin": ["a/latin.py:2"],
        "Deep": ["a/b/c/deep.py:1"],
        "Inner": ["folder.py/inner.py:1"],
        "Good": ["good.py:1", "link.py:1"],
    }
    skipped = dict(found.skipped)
    assert sorted(skipped) == [
        *("a/binary.py", "a/nested.py", "a/syntax.py", "a/utf16.py"),
        *("broken.py", "huge.py", "loop.py"),
    ]
    assert skipped["a/syntax.py"].startswith("does not parse in line 1")
    assert skipped["a/nested.py"] == "too deeply nested to be parsed"
    assert skipped["huge.py"] == "larger than 4 MiB"
    assert found.files == 7


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tree: Tree) -> None:
    root = tree({"a.py": "raise A\n"})
    os.mkfifo(root / "pipe.py")
    found = scan(root)
    assert found.skipped == (("pipe.py", "not a regular file"),)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux")
def test_a_name_that_is_no_text(tree: Tree) -> None:
    root = tree({"a.py": "raise A\n"})
    Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9.py")).write_text("raise B\n")
    found = scan(root)
    assert raised(found)["B"] == ["caf\ufffd.py:1"]
    json.dumps(found.to_dict(), ensure_ascii=False).encode()


def test_a_single_file_of_any_name(tree: Tree) -> None:
    root = tree({"script": "raise A\n"})
    assert raised(scan(root / "script")) == {"A": ["script:1"]}


def test_a_path_that_is_not_there(tree: Tree) -> None:
    with pytest.raises(ScanPathError, match="does not exist"):
        scan(tree({"a.py": ""}) / "nowhere")
    with pytest.raises(ScanPathError, match="no regular file"):
        scan(Path(os.devnull))


def test_nothing_is_run(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree({"conftest.py": "", "package/__init__.py": "", "sitecustomize.py": ""})
    marker = root / "ran"
    side_effect = f"open({str(marker)!r}, 'w')\nimport flash_attn\nflash_attn.flash_attn_func(1)\n"
    for name in ("conftest.py", "package/__init__.py", "sitecustomize.py"):
        (root / name).write_text(side_effect + "raise E(f'{open(__file__, chr(119))}')\n")
    monkeypatch.chdir(root)
    before = set(sys.modules)
    found = scan(root)
    assert len(found.calls) == 3 and not marker.exists()
    assert not {name for name in set(sys.modules) - before if "kvattn" not in name}


def many(tree: Tree) -> Path:
    """More files than are read in this process alone."""
    return tree(
        {
            f"p{i % 7}/m{i}.py": f"def f(x):\n    if x:\n        raise E{i % 11}(f'no {{x}}')\n"
            for i in range(3 * files._FEW)
        }
    )


def test_processes_find_what_one_finds(tree: Tree) -> None:
    root = many(tree)
    one, two = scan(root, jobs=1).to_dict(), scan(root, jobs=2).to_dict()
    del one["seconds"], two["seconds"]
    assert one == two and len(one["errors"]) == 11 and one["files"] == 3 * files._FEW


def dies_of_some(file: files.File) -> str:
    if file.path.stem in ("m5", "m77"):
        os._exit(1)  # as a parser does that overruns its stack
    return file.name


def test_a_file_that_kills_its_reader_is_noted(tree: Tree) -> None:
    skipped: list[Any] = []
    todo = list(files.python_files(many(tree), lambda *why: skipped.append(why)))
    answers = list(files.Readers(2, len(todo)).map(dies_of_some, todo))
    dead = [
        file.path.stem
        for file, answer in zip(todo, answers, strict=True)
        if answer == files.CRASHED
    ]
    assert sorted(dead) == ["m5", "m77"] and skipped == []
    assert (
        sum(answer == file.name for file, answer in zip(todo, answers, strict=True))
        == len(todo) - 2
    )


def test_ids_belong_to_the_package(tree: Tree) -> None:
    """The outermost package of a file counts, wherever the checkout lies."""
    error = "raise ValueError('no')\n"
    root = tree(
        {
            "src/alpha/__init__.py": "",
            "src/alpha/inner/__init__.py": error,
            "src/beta/__init__.py": error,
            "tool.py": error,
        }
    )
    found = {each.site.file: error.id for error in scan(root).errors for each in error.sites}
    expected = {
        "src/alpha/inner/__init__.py": "alpha",
        "src/beta/__init__.py": "beta",
        "tool.py": "repo",
    }
    for file, project in expected.items():
        assert found[file] == identity(project, "ValueError", "no")
    inside = scan(root / "src/alpha/inner")
    assert inside.errors[0].id == found["src/alpha/inner/__init__.py"]


def test_errors_with_a_page_are_named(tree: Tree) -> None:
    root = tree(
        {
            "wrapper.py": """
            def flash_attn_with_kvcache(q, k=None):
                if k is not None:
                    raise NotImplementedError("FA4 does not support updating KV cache in-place.")
                raise ValueError("something else")
            """
        }
    )
    known = {error.exception: error.known for error in scan(root).errors}
    page = catalogue.record(known["NotImplementedError"])
    assert page.message == "FA4 does not support updating KV cache in-place."
    assert known["ValueError"] == ""


def test_the_package_itself() -> None:
    """kvattn's own raises lead to its own records."""
    found = scan(Path(kvattn.__file__).parent)
    by_class = {error.exception: error for error in found.errors if error.known.startswith("KV")}
    record = catalogue.record("KV110")
    error = by_class["HeadRatioError"]
    assert (error.id, error.known, error.message) == (record.id, "KV110", record.message)
    assert error.sites[0].site.line == record.sites[0].line
    assert found.skipped == ()
    assert {call.file.partition("/")[0] for call in found.calls} <= {"bench"}  # it measures peers


def test_related_errors(tree: Tree) -> None:
    root = tree(
        {
            "a.py": """
            def f(page_table, sinks):
                if page_table.dtype != "int32":
                    raise TypeError("page table dtype")
                if page_table.ndim != 2:
                    raise ValueError("rank of pages")
                if sinks:
                    raise KeyError("unlike the others")
            """,
            "b.py": "def g(z):\n    raise OSError('disk is full')\n",
        }
    )
    found = {error.exception: error for error in scan(root).errors}
    assert found["TypeError"].related[0] == found["ValueError"].id
    assert found["OSError"].related == ()


def test_a_large_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("Transformers is not installed")
    steps: list[float] = []

    class Watched:
        def __enter__(self) -> Callable[[str, float], None]:
            return lambda step, done: steps.append(done)

        def __exit__(self, *_: object) -> None: ...

    found = scan(Path(spec.submodule_search_locations[0]), watch=Watched)
    assert found.files > 2_000 and found.skipped == ()
    assert len(found.errors) > 2_000
    assert steps == sorted(steps) and steps[-1] == 1.0
    assert all(error.id == each.id for error in found.errors for each in error.sites)


# Calls -----------------------------------------------------------------------------------------


def calls(text: str, module: str = "") -> list[CallSite]:
    return list(call_sites(syntax.parse(dedent(text), "a.py"), module))


def called(text: str) -> list[tuple[str, str]]:
    return [(call.libraries[0], call.called) for call in calls(text)]


K, V, P = "flash_attn_with_kvcache", "flash_attn_varlen_func", "flash_attn_func"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"import flash_attn\nflash_attn.{P}(q, k, v)", ("fa2", P)),
        (f"import flash_attn as fa\nfa.{K}(q, k, v)", ("fa2", K)),
        (f"import flash_attn.flash_attn_interface\nflash_attn.flash_attn_interface.{P}(q)",
         ("fa2", P)),
        (f"from flash_attn import {K} as attend\nattend(q, k, v)", ("fa2", K)),
        (f"from flash_attn.flash_attn_interface import {V}\n{V}(q, k, v)", ("fa2", V)),
        (f"import flash_attn_interface as x\nx.{K}(q, k, v)", ("fa3", K)),
        (f"from flash_attn_3 import {V}\n{V}(q, k, v)", ("fa3", V)),
        (f"from flash_attn.cute import {P}\n{P}(q, k, v)", ("fa4", P)),
        (f"from flash_attn.cute.interface import {V} as f\nf(q, k, v)", ("fa4", V)),
        (f"from flash_attn import cute\ncute.{P}(q, k, v)", ("fa4", P)),
        (f"from sgl_kernel.flash_attn import {K}\n{K}(q, k, v)", ("sglang-fa3", K)),
        (f"from sgl_kernel.flash_attn import {K}\n{K}(q, k, v, ver=4)", ("sglang-fa4", K)),
        (f"from sgl_kernel.flash_attn import {K}\n{K}(q, k, v, ver=n)", ("sglang", K)),
        (f"from sglang.jit_kernel.flash_attention_v4 import {K}\n{K}(q)", ("sglang-fa4", K)),
        (f"from sglang.jit_kernel.flash_attention_v4_sm120 import {K}\n{K}(q)",
         ("sglang-fa4-sm120", K)),
        (f"from vllm.vllm_flash_attn import {V}\n{V}(q, k, v)", ("vllm", V)),
        (f"from .compat import {K}\n{K}(q, k, v)", ("unknown", K)),
        (f"self.{K}(q, k, v)", ("unknown", K)),
        (f"import flash_attn as fa\nx = fa.{P}\ny = x\ny(q, k, v)", ("fa2", P)),
        (f"from flash_attn import {P}\nclass A:\n    def __init__(self):\n"
         f"        self.f = {P}\n    def g(self):\n        return self.f(q, k, v)", ("fa2", P)),
        (f"from functools import partial\nfrom flash_attn import {P}\n"
         f"f = partial({P}, causal=True)\nf(q, k, v)", ("fa2", P)),
        (f"def f():\n    from flash_attn import {P}\n    return lambda: [{P}(q, k, v)]",
         ("fa2", P)),
        (f"try:\n    import flash_attn_interface as fa\nexcept ImportError:\n"
         f"    import flash_attn as fa\nfa.{P}(q, k, v)", ("fa3", P)),
        (f"from flash_attn import {P} as a\nfrom flash_attn.cute import {P} as b\n"
         f"f = a if x else b\nf(q, k, v)", ("fa2", P)),
    ],
)  # fmt: skip
def test_calls_under_any_name(text: str, expected: tuple[str, str]) -> None:
    assert called(text) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        f"import kvattn\nkvattn.{K}(q, k, v)",
        f"from kvattn import {K}\n{K}(q, k, v)",
        f"def {K}(q):\n    pass\n{K}(q)",
        f"import flash_attn\nx = flash_attn.{K}\nprint(x)",
        f"'flash_attn.{K}(q, k, v)'",
        "flash_attn(q, k, v)",
    ],
)
def test_what_is_no_call_to_port(text: str) -> None:
    assert called(text) == []


def test_relative_imports_are_resolved() -> None:
    text = f"from .flash_attention_v4 import {K} as fa4\nfa4(q, k, v)"
    (call,) = calls(text, "sglang.jit_kernel.flash_attention")
    assert call.libraries == ("sglang-fa4",)


def test_arguments_are_named_by_the_library() -> None:
    """The fifth and later positions differ between FA2 and FA3."""
    call = f"{K}(q, kc, vc, k, v, a, b, lens)"
    (two,) = calls(f"from flash_attn import {K}\n{call}")
    (three,) = calls(f"from flash_attn_interface import {K}\n{call}")
    assert list(two.arguments)[5:] == ["rotary_cos", "rotary_sin", "cache_seqlens"]
    assert list(three.arguments)[5:] == ["qv", "rotary_cos", "rotary_sin"]
    (unsure,) = calls(f"from .compat import {K}\n{call}")
    assert any("read in the order of" in note for note in unsure.rewrite.notes)


def test_places_and_verdicts() -> None:
    (call,) = calls(
        f"""
        from flash_attn import {K}

        class Layer:
            def forward(self, q, k, v):
                return {K}(q, self.k, self.v, k, v, cache_seqlens=self.n, causal=True)
        """
    )
    assert (call.file, call.line, call.function) == ("a.py", 6, "Layer.forward")
    assert call.refused_by() and call.refused_by("fa4") and call.refused_by("sglang-fa4-sm120")
    assert not call.refused_by("fa2") and not call.refused_by("fa3")
    assert {verdict.peer for verdict in call.verdicts} <= set(kvattn.scan.BACKENDS)


def test_a_plain_call_is_refused_by_none() -> None:
    (call,) = calls(f"from flash_attn import {P}\n{P}(q, k, v, causal=True)")
    assert not call.refused_by() and call.verdicts == ()


# Rewriting: the text is run, and must give what the call it replaces means ----------------------


def written(text: str, scope: dict[str, Any]) -> Any:
    """Runs what the scan writes for the only call in `text`; the value of `out`, or all of it."""
    (call,) = calls(text)
    code = (
        call.rewrite.code
        if "out" in call.rewrite.code.split("(")[0]
        else f"out = {call.rewrite.code}"
    )
    space = {"torch": torch, **scope}
    exec("\n".join([*call.rewrite.imports, code]), space)
    return (space["out"], space["lse"]) if "lse" in space else space["out"]


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = True,
    left: int = -1,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, (rows, heads, dim): output and natural lse, written down once more."""
    g = q.shape[1] // k.shape[1]
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(g, 1)) / math.sqrt(q.shape[-1])
    logits = cap * torch.tanh(logits / cap) if cap else logits
    at = torch.arange(len(q))[:, None] + len(k) - len(q)
    keys = torch.arange(len(k))[None]
    seen = (keys <= at) if causal else torch.ones_like(keys <= at)
    seen &= keys >= at - left if left >= 0 else seen
    logits = logits.masked_fill(~seen, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v.repeat_interleave(g, 1))
    return out, logits.logsumexp(-1)


@pytest.fixture
def made() -> dict[str, Any]:
    """Two sequences of 5 and 9 keys in pages of 4, and what goes with them."""
    torch.manual_seed(0)
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    pages = torch.randn(8, 2, 4, 2, 16)  # keys and values side by side, as FlashInfer has them
    table = torch.tensor([[3, 0, 0], [6, 1, 4]], dtype=torch.int32)
    lists = [table[b, : -(-int(lengths[b]) // 4)] for b in range(2)]
    return {
        "lengths": lengths,
        "pages": pages,
        "k_pages": pages[:, 0],
        "v_pages": pages[:, 1],
        "table": table,
        "indptr": torch.tensor([0, 2, 5], dtype=torch.int32),
        "indices": torch.cat(lists),
        "last": torch.tensor([1, 1], dtype=torch.int32),
        "q": torch.randn(2, 1, 4, 16),
        "qs": torch.randn(2, 4, 16),
        "k": torch.randn(2, 1, 2, 16),
        "v": torch.randn(2, 1, 2, 16),
    }


def sequence(made: dict[str, Any], b: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (made[name][made["table"][b].long()].flatten(0, 1) for name in ("k_pages", "v_pages"))
    return k[: made["lengths"][b]], v[: made["lengths"][b]]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"from flash_attn import {K}\n"
         f"{K}(q, k_pages, v_pages, k, v, None, None, lengths, block_table=table, causal=True)",
         -1),
        (f"from flash_attn_interface import {K}\n"
         f"{K}(q, k_pages, v_pages, k, v, None, None, None, lengths, None, None, table,"
         " causal=True, window_size=(3, 0), scheduler_metadata=object())", 3),
        (f"from sgl_kernel.flash_attn import {K} as attend\n"
         "attend(q=q, k_cache=k_pages, v_cache=v_pages, k=k, v=v, cache_seqlens=lengths, ver=3,"
         " page_table=table, causal=True, window_size=(3, -1))", 3),
    ],
)  # fmt: skip
def test_cache_calls(made: dict[str, Any], text: str, left: int) -> None:
    expected = []
    for b in range(2):
        k, v = sequence(made, b)
        keys, values = torch.cat([k, made["k"][b]]), torch.cat([v, made["v"][b]])
        expected.append(plain(made["q"][b], keys, values, left=left)[0])
    torch.testing.assert_close(written(text, made), torch.stack(expected))


PADDED: dict[str, dict[str, Any]] = {
    f"from flash_attn import {P}\n{P}(q, k, v, 0.0, None, True)": {},
    f"from flash_attn_interface import {P}\n{P}(q, k, v, None, True)": {},
    f"from flash_attn.cute import {P}\n{P}(q, k, v, causal=True, softcap=2.0)": {"cap": 2.0},
    "from flash_attn import flash_attn_qkvpacked_func as f\nf(qkv, causal=True)": {},
    "from flash_attn import flash_attn_kvpacked_func as f\nf(q, kv, causal=True)": {},
    f"from functools import partial\nfrom flash_attn import {P}\n"
    f"f = partial({P}, causal=True, window_size=(2, 2))\nf(q, k, v)": {"left": 2},
}


@pytest.mark.parametrize("text", PADDED)
def test_padded_calls(text: str) -> None:
    torch.manual_seed(1)
    qkv = torch.randn(2, 5, 3, 2, 16)
    q, k, v = qkv.unbind(2)
    scope = {"qkv": qkv, "q": q, "k": k, "v": v, "kv": torch.stack([k, v], 2)}
    expected = [plain(*each, **PADDED[text])[0] for each in zip(q, k, v, strict=True)]
    torch.testing.assert_close(written(text, scope), torch.stack(expected))


RAGGED = [
    f"from flash_attn import {V}\n{V}(q, k, v, edges, edges, 5, 5, 0.0, None, True)",
    f"from flash_attn_interface import {V}\n{V}(q, k, v, edges, edges, 5, 5, causal=True)",
    f"from flash_attn.cute import {V}\n"
    f"{V}(q, k, v, None, edges, edges, causal=True, score_mod_bwd=None)",
    f"from vllm.vllm_flash_attn import {V}\n"
    f"{V}(q, k, v, 5, edges, 5, edges, causal=True, fa_version=3)",
    f"from sgl_kernel.flash_attn import {V}\n{V}(q, k, v, edges, edges, 5, 5, causal=True)",
    "from flash_attn import flash_attn_varlen_qkvpacked_func as f\nf(qkv, edges, 5, causal=True)",
    "from flash_attn import flash_attn_varlen_kvpacked_func as f\n"
    "f(q, kv, edges, edges, 5, 5, causal=True)",
    "import flashinfer\nw = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(buffer)\n"
    "w.plan(edges, edges, 2, 2, 16, causal=True)\nw.run(q, k, v)",
]


@pytest.mark.parametrize("text", RAGGED)
def test_ragged_calls(text: str) -> None:
    torch.manual_seed(2)
    qkv = torch.randn(8, 3, 2, 16)
    q, k, v = qkv.unbind(1)
    edges = torch.tensor([0, 3, 8], dtype=torch.int32)
    scope = {"qkv": qkv, "q": q, "k": k, "v": v, "kv": torch.stack([k, v], 1), "edges": edges}
    parts = [plain(q[a:b], k[a:b], v[a:b])[0] for a, b in ((0, 3), (3, 8))]
    torch.testing.assert_close(written(text, scope), torch.cat(parts))


def test_ragged_queries_over_pages(made: dict[str, Any]) -> None:
    """FlashAttention-2 gives edges of the keys, pages need lengths."""
    text = (
        f"from flash_attn import {V}\n"
        f"{V}(qs, k_pages, v_pages, q_edges, k_edges, 1, 9, causal=True, block_table=table)"
    )
    edges = {"q_edges": torch.arange(3).int(), "k_edges": torch.tensor([0, 5, 14]).int()}
    expected = [plain(made["qs"][b : b + 1], *sequence(made, b))[0] for b in range(2)]
    torch.testing.assert_close(written(text, made | edges), torch.cat(expected))


DECODE = """
import flashinfer
class A:
    def setup(self):
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer{layout})
        self.wrapper.plan(indptr, indices, last, 4, 2, 16, 4, window_left=3, logits_soft_cap=2.0)
    def forward(self):
        return self.wrapper.{run}
"""


@pytest.mark.parametrize(
    ("run", "layout"),
    [
        ("run(qs, pages)", ""),
        ("forward(qs, (k_pages, v_pages))", ', "NHD"'),
        ("run(qs, pages, return_lse=True)", ""),
        ("forward_return_lse(qs, pages)", ""),
        ("run(qs, pages.transpose(2, 3))", ', "HND"'),
        ("run(qs, (k_pages.transpose(1, 2), v_pages.transpose(1, 2)))", ', kv_layout="HND"'),
    ],
)
def test_flashinfer_decode(made: dict[str, Any], run: str, layout: str) -> None:
    got = written(DECODE.format(run=run, layout=layout), made)
    expected = [plain(made["qs"][b : b + 1], *sequence(made, b), left=3, cap=2.0) for b in range(2)]
    if "lse" in run:
        got, lse = got
        wanted = torch.stack([each.squeeze(1) for _, each in expected]) / math.log(2)
        torch.testing.assert_close(lse, wanted)
    torch.testing.assert_close(got, torch.cat([out for out, _ in expected]))


def test_wrappers_of_one_name_in_several_functions() -> None:
    text = """
    import flashinfer
    def decode():
        w = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer)
        w.plan(decode_indptr, indices, last, 4, 2, 16, 4)
        def inner():
            return w.run(q, pages)
    class A:
        def __init__(self):
            self.w = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(buffer)
        def forward(self):
            return self.w.run(q, k, v)
    class B:
        def __init__(self):
            self.w = w = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer)
            w.plan(edges, prefill_indptr, indices, last, 4, 2, 16, 4)
            return w.run(q, pages)
        def forward(self):
            self.w.plan(edges, other_indptr, indices, last, 4, 2, 16, 4)
            return self.w.run(q, pages)
    """
    found = calls(text)
    names = ("DecodeWithPaged", "PrefillWithRagged", "PrefillWithPaged", "PrefillWithPaged")
    assert [each.called for each in found] == [f"Batch{name}KVCacheWrapper" for name in names]
    indptrs = ("decode_indptr", "KV_INDPTR", "prefill_indptr", "other_indptr")
    for indptr, each in zip(indptrs, found, strict=True):
        assert indptr in each.rewrite.code


def test_flashinfer_prefill(made: dict[str, Any]) -> None:
    text = """
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper as W
    w = W(buffer, "NHD")
    w.begin_forward(edges, indptr, indices, last, 4, 2, 16, 4, causal=True, sm_scale=0.25)
    out = w.run(q, pages, return_lse=True)
    """
    q, edges = torch.randn(5, 4, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    out, lse = written(text, made | {"q": q, "edges": edges})
    expected = [plain(q[a:b], *sequence(made, i)) for i, (a, b) in enumerate(((0, 2), (2, 5)))]
    torch.testing.assert_close(out, torch.cat([each for each, _ in expected]))
    torch.testing.assert_close(lse, torch.cat([each.T for _, each in expected]) / math.log(2))


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("single_decode_with_kv_cache(q[0], k, v, window_left=3, logits_soft_cap=2.0)", 1),
        ("single_decode_with_kv_cache(q[0], h(k), h(v), 'HND', window_left=3,"
         " logits_soft_cap=2.0, return_lse=True)", 1),
        ("single_prefill_with_kv_cache(q, k, v, causal=True, window_left=3,"
         " logits_soft_cap=2.0)", 3),
        ("single_prefill_with_kv_cache(q, k, v, custom_mask=mask, logits_soft_cap=2.0,"
         " return_lse=True)", 3),
    ],
)  # fmt: skip
def test_flashinfer_single(text: str, query: int) -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(query, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    at = torch.arange(query)[:, None] + 7 - query
    keys = torch.arange(7)[None]
    scope = {
        "q": q,
        "k": k,
        "v": v,
        "h": lambda x: x.transpose(0, 1),
        "mask": (keys <= at) & (keys >= at - 3),
    }
    got = written(f"import flashinfer\nflashinfer.{text}", scope)
    out, lse = plain(q, k, v, left=3, cap=2.0)
    if "lse" in text:
        got, got_lse = got
        wanted = lse[:, 0] if query == 1 else lse.T
        torch.testing.assert_close(got_lse, wanted / math.log(2))
    torch.testing.assert_close(got, out[0] if query == 1 else out)


def test_flashinfer_append(made: dict[str, Any]) -> None:
    text = """
    import flashinfer
    flashinfer.append_paged_kv_cache(ks, vs, owners, at, pages, indices, indptr, last)
    """
    new = {"ks": torch.ones(3, 2, 16), "vs": torch.full((3, 2, 16), 2.0)}
    where = {"owners": torch.tensor([0, 1, 1]).int(), "at": torch.tensor([5, 2, 9]).int()}
    (call,) = calls(text)
    before = made["pages"].clone()
    exec("\n".join([*call.rewrite.imports, call.rewrite.code]), made | new | where)
    for page, slot in ((0, 1), (6, 2), (4, 1)):
        before[page, 0, slot], before[page, 1, slot] = 1.0, 2.0
    assert torch.equal(made["pages"], before)


def notes(text: str) -> str:
    (call,) = calls(text)
    return " | ".join(call.rewrite.notes)


@pytest.mark.parametrize(
    ("text", "note", "code"),
    [
        (f"from flash_attn import {P}\n{P}(q, k, v, 0.1)", "dropout_p must be 0", "dropout_p=0.1"),
        (f"from flash_attn_interface import {K}\n{K}(q, k, v, return_softmax_lse=True)",
         "returns (out, lse)", "return_softmax_lse=True"),
        (f"from flash_attn import {P}\n{P}(q, k, v, return_attn_probs=True)",
         "without the dropout mask", "return_softmax_lse=True"),
        (f"from flash_attn.cute import {P}\n{P}(q, k, v, mask_mod=m, causal=True)",
         "hold beside mask_mod", "mask_mod=m"),
        (f"from flash_attn.cute import {P}\n{P}(q, k, v)", "returns out alone", "(q, k, v)"),
        (f"from flash_attn_interface import {K}\n{K}(q, k, v, scheduler_metadata=m)",
         "scheduler_metadata is dropped", "(q, k, v)"),
        (f"from vllm.vllm_flash_attn import {V}\n{V}(q, k, v, cp_world_size=2, q_v=x)",
         "cp_world_size is dropped", "qv=x"),
        (f"from sgl_kernel.flash_attn import {K}\n{K}(q, k, v, cu_seqlens_k_new=edges)",
         "cu_seqlens_k_new is dropped: without k it was ignored", "(q, k, v)"),
        (f"from flash_attn import {P}\n{P}(q, k, v, **options)", "**options may hold",
         "(q, k, v, **options)"),
        (f"from flash_attn import {P}\n{P}(*tensors, causal=True)", "starred",
         "(*tensors, causal=True)"),
        (f"from flash_attn.cute import {P}\n{P}(q, k, v, learnable_sink=s)", "", "sinks=s"),
        ("import flashinfer\nflashinfer.single_decode_with_kv_cache(q, k, v,"
         " pos_encoding_mode='ROPE_LLAMA')", "rotate with rotary_cos", "q[None, None]"),
        ("import flashinfer\nflashinfer.single_decode_with_kv_cache(q, k, v,"
         " pos_encoding_mode='ALIBI')", "pass alibi_slopes", "q[None, None]"),
        ("import flashinfer\nw = flashinfer.BatchDecodeWithPagedKVCacheWrapper(b)\nw.run(q, kv)",
         "plan() is not called in this file", "INDPTR.diff()"),
    ],
)  # fmt: skip
def test_what_differs_is_said(text: str, note: str, code: str) -> None:
    (call,) = calls(text)
    assert note in " | ".join(call.rewrite.notes)
    assert code in call.rewrite.code
    compile(call.rewrite.code, "rewrite", "exec")


def test_a_wrapper_that_is_only_made_is_reported() -> None:
    text = "from flashinfer import BatchDecodeWithPagedKVCacheWrapper as W\nreturned(W(buffer))"
    (call,) = calls(text)
    assert call.called == "BatchDecodeWithPagedKVCacheWrapper" and "Q[:, None]" in call.rewrite.code


def test_a_report_is_plain_data(tree: Tree) -> None:
    root = tree({"a.py": f"from flash_attn import {K}\n{K}(q, kc, vc, k, v)\nraise E('x')\n"})
    read = json.loads(json.dumps(scan(root).to_dict()))
    assert list(read) == ["root", "files", "seconds", "skipped", "calls", "errors"]
    assert read["calls"][0]["rewrite"]["imports"] == ["import kvattn"]
    assert read["calls"][0]["arguments"]["k_cache"] == "kc"
    site = read["errors"][0]["sites"][0]
    assert (site["file"], site["line"], site["guard"], site["parameters"]) == ("a.py", 3, "", [])


def test_a_file_too_deep_for_a_part_of_the_scan(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed, but some walk over its tree overruns the stack: noted, not fatal."""
    root = tree({"a.py": "raise A\n"})

    def overrun(*_: object) -> Any:
        raise RecursionError

    monkeypatch.setattr("kvattn.scan.raise_sites", overrun)
    (file,) = files.python_files(root, lambda *_: None)
    assert examine(file) == "too deeply nested to be read"

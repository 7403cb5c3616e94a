"""The package as a whole: what importing costs and needs, its names, and who may import whom."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import kvattn

PACKAGE = Path(kvattn.__file__).parent

NAMES = {
    "BlockSparse",
    "Explanation",
    "PagedKVCache",
    "SchedulerMetadata",
    "append_kv",
    "apply_rotary",
    "checked",
    "common_prefix",
    "errors",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "merge_states",
}

# From the top. An import points to a lower floor or stays on its own, and never goes in a circle.
FLOORS = (
    {"cli"},
    {"commands"},
    {"doctor", "generation", "scan", "site"},
    {"bench", "integrations", "models"},
    {"kvattn"},  # the public names
    {"cache", "distributed", "explanation", "testing"},
    {"api", "sharing", "steps"},
    {"ops"},
    {"backends", "forms"},
    {"plan"},
    {"request"},
    {"checks", "option_checks", "values"},
    {"aliases", "storage", "tables"},
    {"counting", "kernels", "metadata", "mods", "norm", "pages", "peers", "quant", "rotary"},
    {"errors"},
)

# Packages that cost a user of the functions time, or that may not be there at all.
OPTIONAL = (
    *("accelerate", "gguf", "hypothesis", "pygments", "rich", "starlette", "transformers"),
    *("triton", "typer", "uvicorn"),
)


def python(code: str, *arguments: str) -> Any:
    """What `code` prints as JSON in a fresh interpreter."""
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_import_brings_torch_and_no_more() -> None:
    code = """
import json, sys
import torch
before = set(sys.modules)
import kvattn
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    brought = set(python(code))
    assert "kvattn.api" in brought
    packages = {name.partition(".")[0] for name in brought} - sys.stdlib_module_names
    assert packages == {"kvattn"} | (packages & {"torch"})
    assert not brought & {"torch._dynamo", "torch._inductor"}  # seconds, before the first call


def test_works_where_nothing_but_torch_is_installed() -> None:
    code = """
import json, sys
from importlib.machinery import PathFinder

class WithoutOptional(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            return None
        return super().find_spec(name, path, target)

sys.meta_path[:] = [WithoutOptional if f is PathFinder else f for f in sys.meta_path]
import torch, kvattn
q = torch.ones(1, 1, 4, 64)
cache = torch.ones(1, 8, 2, 64)
out = kvattn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=8)
print(json.dumps([list(out.shape), out.mean().item()]))
"""
    assert python(code, *OPTIONAL) == [[1, 1, 4, 64], 1.0]


def test_version_is_the_distribution_s() -> None:
    try:
        installed = metadata.version("kvattn")
    except metadata.PackageNotFoundError:
        pytest.skip("run from the source tree, not installed")
    assert kvattn.__version__ == installed


def test_public_names() -> None:
    assert set(kvattn.__all__) == NAMES
    assert kvattn.__all__ == sorted(kvattn.__all__)
    for name in NAMES:
        assert inspect.getdoc(getattr(kvattn, name)), name


def unit(module: str) -> str:
    """The file or folder of the package that a dotted module name belongs to."""
    return module.split(".")[1] if "." in module else module


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imported(node: ast.AST, package: str) -> set[str]:
    """The modules of kvattn that run-time imports below `node` name, those in functions too."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name.partition(".")[0] == "kvattn"}
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, *filter(None, [node.module])])
        if base.partition(".")[0] != "kvattn":
            return set()
        inner = {f"{base}.{alias.name}" for alias in node.names}
        return {name if is_module(name) else base for name in inner}
    skipped = node.body if is_for_types_only(node) and isinstance(node, ast.If) else []
    below = (child for child in ast.iter_child_nodes(node) if child not in skipped)
    return set().union(*(imported(child, package) for child in below))


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def graph() -> dict[str, set[str]]:
    """Every module of the package and the modules of the package that it imports."""
    edges = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("kvattn", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        package = name if is_package else ".".join(parts[:-1])
        edges[name] = imported(ast.parse(path.read_text()), package) - {name}
    return edges


def test_imports_point_down() -> None:
    floor = {name: height for height, names in enumerate(FLOORS) for name in names}
    wrong = []
    for module, targets in graph().items():
        assert unit(module) in floor, f"give kvattn/{unit(module)} a floor"
        for target in targets:
            if floor[unit(target)] < floor[unit(module)]:
                wrong.append(f"{module} imports {target}")
    assert wrong == []


def test_imports_go_in_no_circle() -> None:
    """A circle raises CycleError, which names it."""
    edges = graph()
    assert "kvattn.errors.base" in edges["kvattn.errors.kinds"]
    assert set(TopologicalSorter(edges).static_order()) >= set(edges)


def test_no_file_is_two_things() -> None:
    long = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 500
    }
    assert long == {}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.int32,
        torch.int8,
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        "torch.empty(2, 3, dtype=dtype)",
        "torch.empty_like(like)",
        "torch.empty_strided((2, 3), (3, 1), dtype=dtype)",
        "like.new_empty(2, 3)",
        "like.new_empty_strided((2, 3), (3, 1))",
    ],
)
def test_fresh_memory_of_the_package_is_poisoned(call: str, dtype: torch.dtype) -> None:
    """The tests rely on it: memory that a kernel forgot to write must show."""
    scope = {"torch": torch, "dtype": dtype, "like": torch.zeros(2, 3, dtype=dtype)}
    fresh = eval(call, {**scope, "__name__": "kvattn.kernels"})
    wild = fresh.float().isnan() if dtype.is_floating_point else fresh >= 0x7F
    assert fresh.shape == (2, 3)
    assert bool(wild.all())


def test_poison_leaves_compiled_code_whole() -> None:
    # PyTorch 2.11 looks for the global in the module of that name, which must have it
    scope: dict[str, Any] = {"__name__": "kvattn.request", "torch": torch}
    exec("def double(x):\n    return torch.empty_like(x).copy_(x) + x", scope)
    double = torch.compile(scope["double"], fullgraph=True, backend="eager")
    assert double(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]

"""Call sites of FlashAttention's functions and their kin in a source, by whatever name."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvattn.errors.places import Place, statements
from kvattn.errors.syntax import Source, dotted, imports, text_of
from kvattn.peers import UNKNOWN, Call
from kvattn.scan import signatures
from kvattn.scan.signatures import (
    DECODE_WRAPPER,
    KIN,
    KVCACHE,
    PACKED,
    SINGLE,
    WRAPPERS,
    library_of,
)

_MENTIONED = re.compile("|".join(KIN))
_RUNS = ("run", "forward", "run_return_lse", "forward_return_lse", "__call__")
_PLANS = ("plan", "begin_forward")
_PARTIALS = ("partial", "functools.partial")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_Definitions = tuple[ast.AST, ...]
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)

# Other libraries' names of kvattn's arguments.
NAMES = {
    "block_table": "page_table",
    "learnable_sink": "sinks",
    "s_aux": "sinks",
    "q_v": "qv",
    "return_attn_probs": "return_softmax_lse",
    "return_lse": "return_softmax_lse",
    "logits_soft_cap": "softcap",
    "sm_scale": "softmax_scale",
}
_KEYS_ARE_CACHE = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens"}


@dataclass(frozen=True)
class Found:
    """One call.

    Attributes:
        libraries: where the function may come from, the likeliest first.
        function: its own name there; for FlashInfer's wrappers the class.
        node: the call.
        arguments: by the library's names, as far as they are known.
        rest: starred arguments and ``**mappings``, as source text.
        guessed: whether positional arguments were named by another library's order.
        place: where it stands.
        plan: of a wrapper, the arguments of the constructor and of `plan`.
    """

    libraries: tuple[str, ...]
    function: str
    node: ast.Call
    arguments: dict[str, ast.expr]
    rest: tuple[str, ...] = ()
    guessed: bool = False
    place: Place | None = None
    plan: dict[str, ast.expr] = field(default_factory=dict)

    @property
    def library(self) -> str:
        return self.libraries[0]


@dataclass
class _Wrapper:
    """One of FlashInfer's objects: how it was made, planned and run."""

    function: str
    node: ast.Call
    plans: list[ast.Call] = field(default_factory=list)
    runs: list[ast.Call] = field(default_factory=list)


@dataclass(frozen=True)
class _Meaning:
    """What a name stands for: a function somewhere, with arguments bound by `partial`."""

    targets: tuple[str, ...]  # full dotted names, any of them
    bound: tuple[ast.expr, ...] = ()
    words: Mapping[str, ast.expr] = field(default_factory=dict)


def calls(source: Source, module: str = "") -> Iterator[Found]:
    """Every call of a function in `signatures.KIN`, in source order.

    Follows ``import ... as``, assignments to plain names and attributes, and
    `functools.partial`. `module` is the file's dotted name, for its relative imports.
    """
    if not _MENTIONED.search(source.text):
        return
    names = _names(source.tree, module)
    wrappers = _wrappers(source.tree, names)
    for statement, place in statements(source.tree):
        for node in _own_calls(statement):
            meaning = names.meaning(node.func)
            found = None
            if meaning is not None:
                found = _function_call(node, meaning, wrappers)
            elif isinstance(node.func, ast.Attribute) and node.func.attr in _RUNS:
                found = _run(node, wrappers.behind(node.func.value))
            if found is not None:
                yield replace(found, place=place)


def _own_calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Calls in a statement, but not in the statements below it; the outermost first."""
    waiting: deque[ast.AST] = deque([statement])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, ast.Call):
            yield node
        below = ast.iter_child_nodes(node)
        waiting += [child for child in below if not isinstance(child, _BLOCKS)]


def _names(tree: ast.Module, module: str) -> _Names:
    """Every name in a file that means one of the functions, dotted names too."""
    targets: dict[str, list[str]] = {}
    for name, target in imports(tree, module):
        targets.setdefault(name, []).append(target)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, _DEFINITIONS)}
    found = _Names(targets, defined)
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    for _ in range(2):  # an alias of an alias, wherever it stands
        for node in assigned:
            meaning = found.meaning(node.value)
            for place in node.targets if meaning else ():
                if name := dotted(place):
                    found.assigned[name] = meaning
    return found


class _Names:
    """Names and what they mean; a dotted name is looked up by its head."""

    def __init__(self, imported: Mapping[str, list[str]], defined: Collection[str]) -> None:
        self.imported = imported
        self.defined = defined
        self.assigned: dict[str, _Meaning | None] = {}

    def meaning(self, node: ast.expr) -> _Meaning | None:
        if isinstance(node, ast.Call):
            return self.partial(node) if dotted(node.func) in _PARTIALS else None
        if isinstance(node, ast.IfExp):
            return self.meaning(node.body) or self.meaning(node.orelse)
        name = dotted(node)
        if not name or name in self.assigned:
            return self.assigned.get(name)
        head, dot, rest = name.partition(".")
        full = [target + dot + rest for target in self.imported.get(head, [])]
        last = name.rpartition(".")[2]
        if not full and last in KIN and last not in self.defined:
            full = [f"?.{last}"]
        kin = [x for x in full if x.rpartition(".")[2] in KIN and library_of(x)]
        return _Meaning(tuple(dict.fromkeys(kin))) if kin else None

    def partial(self, node: ast.Call) -> _Meaning | None:
        inner = self.meaning(node.args[0]) if node.args else None
        if inner is None:
            return None
        words = {word.arg: word.value for word in node.keywords if word.arg}
        bound = (*inner.bound, *node.args[1:])
        return replace(inner, bound=bound, words={**inner.words, **words})


def _function_call(node: ast.Call, meaning: _Meaning, wrappers: _Wrappers) -> Found | None:
    function = meaning.targets[0].rpartition(".")[2]
    libraries = [library_of(target) or "" for target in meaning.targets]
    if function in WRAPPERS:
        runs = [wrapper.runs for wrapper in wrappers.found.values() if wrapper.node is node]
        return None if any(runs) else _constructed(node, function)
    found = _bind(node, libraries, function, meaning)
    if found.library != "sglang":
        return found
    version = value_of(found.arguments["ver"]) if "ver" in found.arguments else 3
    path = {3: "sglang-fa3", 4: "sglang-fa4"}.get(version, "sglang")
    return replace(found, libraries=(path, *found.libraries[1:]))


def _bind(
    node: ast.Call, libraries: list[str], function: str, meaning: _Meaning | None = None
) -> Found:
    """Names the arguments of a call by the order that its library has."""
    meaning = meaning or _Meaning(())
    names = signatures.positional(libraries[0], function)
    values = [*meaning.bound, *node.args]
    rest: list[str] = []
    arguments = dict(meaning.words)
    for index, value in enumerate(values):
        if isinstance(value, ast.Starred) or index >= len(names):
            rest += [text_of(each) for each in values[index:]]
            break
        arguments[names[index]] = value
    for word in node.keywords:
        if word.arg:
            arguments[word.arg] = word.value
        else:
            rest.append(f"**{text_of(word.value)}")
    order = {name: index for index, name in enumerate(names)}
    arguments = dict(sorted(arguments.items(), key=lambda item: order.get(item[0], len(order))))
    unsure = libraries[0] == signatures.UNKNOWN_LIBRARY or len(set(libraries)) > 1
    guessed = unsure and len(values) > 5
    found = tuple(dict.fromkeys(libraries))
    return Found(found, function, node, arguments, tuple(rest), guessed)


class _Wrappers:
    """FlashInfer's wrapper objects, by where their names are known and the names."""

    def __init__(self, tree: ast.Module) -> None:
        self.around = _definitions_around(tree)
        self.found: dict[tuple[_Definitions, str], _Wrapper] = {}

    def key(self, node: ast.expr) -> tuple[_Definitions, str]:
        """A plain name belongs to its function, one with dots (self.wrapper) to its class."""
        around = self.around[node]
        if not isinstance(node, ast.Name):
            while around and not isinstance(around[-1], ast.ClassDef):
                around = around[:-1]
        return around, text_of(node)

    def behind(self, node: ast.expr) -> _Wrapper | None:
        """The object that a name stands for; looked for outwards."""
        around, name = self.key(node)
        within = (self.found.get((around[:size], name)) for size in range(len(around), -1, -1))
        return next((wrapper for wrapper in within if wrapper is not None), None)


def _definitions_around(tree: ast.Module) -> dict[ast.AST, _Definitions]:
    """The functions and classes around every node, the outermost first."""
    around: dict[ast.AST, _Definitions] = {}
    waiting: list[tuple[ast.AST, _Definitions]] = [(tree, ())]
    while waiting:
        node, outer = waiting.pop()
        around[node] = outer
        inner = (*outer, node) if isinstance(node, _DEFINITIONS) else outer
        waiting += [(child, inner) for child in ast.iter_child_nodes(node)]
    return around


def _wrappers(tree: ast.Module, names: _Names) -> _Wrappers:
    """The wrappers of a file, with their plans and runs."""
    wrappers = _Wrappers(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            meaning = names.meaning(node.value.func)
            function = meaning.targets[0].rpartition(".")[2] if meaning else ""
            for target in node.targets if function in WRAPPERS else ():
                wrappers.found[wrappers.key(target)] = _Wrapper(function, node.value)
    for node in ast.walk(tree) if wrappers.found else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            wrapper = wrappers.behind(node.func.value)
            if wrapper is not None and node.func.attr in _PLANS:
                wrapper.plans.append(node)
            elif wrapper is not None and node.func.attr in _RUNS:
                wrapper.runs.append(node)
    return wrappers


def _run(node: ast.Call, wrapper: _Wrapper | None) -> Found | None:
    """A wrapper's `run`, with the arguments of the last `plan` above it, or of the first."""
    if wrapper is None:
        return None
    plan = _bind(wrapper.node, ["flashinfer"], wrapper.function).arguments
    above = [each for each in wrapper.plans if each.lineno < node.lineno]
    for each in above[-1:] or wrapper.plans[:1]:
        plan |= _bind(each, ["flashinfer"], f"{wrapper.function}.plan").arguments
    found = _bind(node, ["flashinfer"], f"{wrapper.function}.run")
    if isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_return_lse"):
        found.arguments["return_lse"] = ast.Constant(True)
    return replace(found, function=wrapper.function, plan=plan)


def _constructed(node: ast.Call, function: str) -> Found:
    found = _bind(node, ["flashinfer"], function)
    return replace(found, arguments={}, plan=found.arguments)


def known(found: Found) -> Call:
    """What can be told of a call, by kvattn's names of the arguments."""
    given: dict[str, Any] = {}
    for name, node in (found.plan | found.arguments).items():
        name = NAMES.get(name, name)
        if PACKED.get(found.function, found.function) != KVCACHE:
            name = _KEYS_ARE_CACHE.get(name, name)
        if name not in given or given[name] is None:
            given[name] = value_of(node)
    if found.library == "flashinfer":
        given |= _flashinfer(found, given)
    return Call(given)


def _flashinfer(found: Found, given: Mapping[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if found.function in WRAPPERS:
        paged = found.function != signatures.RAGGED_WRAPPER
        more = {"cache_seqlens": UNKNOWN, "page_table": UNKNOWN if paged else None}
        if "qo_indptr" in given:
            more |= {"cu_seqlens_q": UNKNOWN, "max_seqlen_q": UNKNOWN}
    left = given.get("window_left", -1)
    right = 0 if found.function in (DECODE_WRAPPER, SINGLE[0]) and left != -1 else -1
    more["window_size"] = (left, right) if left is not UNKNOWN else UNKNOWN
    if given.get("pos_encoding_mode") == "ALIBI":
        more["alibi_slopes"] = UNKNOWN
    scales = ("q_scale", "k_scale", "v_scale", "scale_q", "scale_k", "scale_v")
    if any(given.get(name) is not None for name in scales):
        more["k_descale"] = UNKNOWN
    if given.get("custom_mask") is not None or given.get("packed_custom_mask") is not None:
        more["mask_mod"] = UNKNOWN
    return more


def value_of(node: ast.expr) -> Any:
    """The value of a literal, `UNKNOWN` for what only the running program knows."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(value_of(element) for element in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = value_of(node.operand)
        return -value if isinstance(value, (int, float)) else UNKNOWN
    return UNKNOWN

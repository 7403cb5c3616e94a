"""The walk over a traced mod: one node, one or a few lines of a Triton device function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from kvattn.errors.mod_kinds import ModLoweringError, ModReturnError, ModWriteError
from kvattn.mods.lowering import Body, Grid, Operand, Value, constant, dtype_of, meta, noted
from kvattn.mods.pointwise import POINTWISE
from kvattn.mods.structure import STRUCTURE, name_of, operand

# For each kind of function: dtype of the result, and what has the shape of the whole tile.
_RESULTS = {
    "score_mod": (torch.float32, "tl.float32", "score"),
    "mask_mod": (torch.bool, "tl.int1", "h + q + k"),
    "interval": (torch.int32, "tl.int32", "h + q"),
}


def translate(
    graph: Graph, places: Sequence[str], captured: Mapping[Node, int | Value], argument: str
) -> tuple[str, bool, float]:
    """The text of a device function, whether it holds for the traced sizes only, and a bound.

    Args:
        graph: a traced mod.
        places: the parameters of the device function that the graph's inputs stand for.
        captured: for each get_attr node its slot in aux, or the number that it holds.
        argument: ``score_mod``, ``mask_mod`` or ``interval``, for errors.
    """
    body, env, inputs, live = Body(argument), dict[Node, Operand](), iter(places), used(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            name = next(inputs)
            env[node] = _input(body, name, node) if node in live else None
        elif node not in live:
            continue
        elif node.op == "get_attr":
            slot = captured[node]
            env[node] = slot if isinstance(slot, Value) else body.captured(slot, meta(node))
        elif node.op == "output":
            several = argument == "interval"
            results = node.args[0] if several else node.args  # (lo, hi), or the one result
            texts = (_result(body, env, x) for x in results)
            body.lines.append(f"return {', '.join(texts)}")
        else:
            env[node] = _call(body, env, node)
    return "\n".join(f"    {line}" for line in body.lines), body.fixed, body.bound


def used(graph: Graph) -> set[Node]:
    """The nodes that the result depends on, and those that write to a tensor."""
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or _mutates(node) or any(user in live for user in node.users):
            live.add(node)
    return live


def _input(body: Body, name: str, node: Node) -> Operand:
    dtype = dtype_of(node)
    if name == "score":
        return Value(name, dtype, smooth=True)
    body.indices.add(node)
    index = body.let(f"tl.cast({name}, tl.int32)", dtype, natural=True)
    if name == "k":
        body.key = index.code
    return noted(index, node)


def _result(body: Body, env: Mapping[Node, Operand], result: Any) -> str:
    """Code of what the mod returns, spread over the whole tile."""
    dtype, triton_type, whole = _RESULTS[body.argument]
    x = env[result] if isinstance(result, Node) else result
    if isinstance(x, Grid):
        x = body.only(x)
    if isinstance(x, (bool, int, float)):
        x = constant(x, dtype)
    if not isinstance(x, Value):
        raise ModReturnError(body.argument, type(result).__name__, "a tensor or a number")
    code = body.cast(x, dtype)
    body.bound = x.bound
    if x.literal is not None:
        code = f"tl.full([1, 1], {code}, {triton_type})"
    return f"tl.broadcast({code}, {whole})[0]"


def _mutates(node: Node) -> bool:
    name = name_of(node)
    return name.endswith("_") and not name.endswith("__")


def _call(body: Body, env: dict[Node, Operand], node: Node) -> Operand:
    name, writes = name_of(node), _mutates(node)
    if name in STRUCTURE:
        return STRUCTURE[name](body, env, node)
    operands = [operand(body, env, x) for x in node.args if not isinstance(x, (list, tuple))]
    if writes:
        _check_written(body, node, operands[0])
    rule = POINTWISE.get(name[:-1] if writes else name)
    if rule is None or len(operands) < len(node.args):
        raise ModLoweringError(body.argument, node.target, "element-wise torch operations")
    result = noted(body.each(node, rule, operands), node)
    if writes:  # from here on the old name stands for the new value
        env[node.args[0]] = result  # type: ignore[index]
    return result


def _check_written(body: Body, node: Node, target: Operand) -> None:
    """score += x is fine; captured tensors and indices are not the mod's own."""
    if node.args[0] in body.indices or isinstance(target, Grid):
        raise ModWriteError(body.argument, node.target, "reading indices and captured tensors")

"""A mod is called once, on index tensors without data, and its torch operations are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from kvattn.errors.base import KvattnError
from kvattn.errors.mod_kinds import (
    ModBranchError,
    ModCaptureError,
    ModShapeError,
    ModTraceError,
)
from kvattn.mods.lowering import Value, constant
from kvattn.mods.translate import translate, used

_META = torch.device("meta")
# Two sizes of tile: a mod whose text differs between them has read the shape of its arguments.
_TILES = ((13, 17), (11, 19))

_VALUES = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"}
_SIZES = {"shape", "size", "stride", "numel", "nelement", "__len__", "nbytes", "itemsize"}
_FROM_DATA = {"tensor", "as_tensor", "asarray", "from_numpy", "scalar_tensor"}


class SeqlenInfo(NamedTuple):
    """What a mod with seqlen_info can ask of the sequence: where it starts, and its lengths."""

    offset_q: Any
    offset_k: Any
    seqlen_q: Any
    seqlen_k: Any


class Trace(NamedTuple):
    """The text of a device function, still without sizes, and the tensors that it reads."""

    text: str
    slots: tuple[int | Tensor, ...]  # which of the captured tensors, or a constant of the mod
    fixed: bool  # holds for the traced sizes of the captured tensors only
    closed: bool  # reads nothing but the tensors it was told of
    bound: float  # what the size of a result is known not to exceed; 0 if unknown


def trace(
    fn: Callable[..., Any],
    argument: str,
    coordinates: tuple[str, ...],
    known: Sequence[Tensor],
    device: torch.device,
) -> Trace:
    """Records `fn`, which takes one tensor for each coordinate and a SeqlenInfo.

    Args:
        fn: the mod in a common form, its auxiliary tensors bound.
        argument: the name for errors.
        coordinates: of score, b, h, q, k, those that `fn` takes.
        known: the tensors that `fn` can reach.
        device: where the kernel will run.
    """
    first, reads_sizes = _recorded(fn, argument, coordinates, known, device, _TILES[0])
    if reads_sizes:
        other, _ = _recorded(fn, argument, coordinates, known, device, _TILES[1])
        if other.text != first.text:
            raise ModShapeError(argument, "another result for another shape", "the same for each")
    return first._replace(fixed=first.fixed or reads_sizes)


def _recorded(
    fn: Callable[..., Any],
    argument: str,
    coordinates: tuple[str, ...],
    known: Sequence[Tensor],
    device: torch.device,
    tile: tuple[int, int],
) -> tuple[Trace, bool]:
    recorder = _Recorder(argument, device)
    count = len(coordinates)

    def run(*tensors: Tensor) -> Any:
        with recorder:
            return fn(*tensors[:count], SeqlenInfo(*tensors[count:]))

    places = (*coordinates, *SeqlenInfo._fields)
    graph = _graph(run, argument, places, tile)
    slots, captured, closed = _captures(graph, argument, known, device)
    lines, fixed, bound = translate(graph.graph, places, captured, argument)
    text = f"def {argument}({', '.join(places)}, aux):\n{lines}\n"
    return Trace(text, slots, fixed, closed, bound), recorder.reads_sizes


def _input(name: str, tile: tuple[int, int]) -> Tensor:
    rows, columns = tile
    shapes = {"score": (rows, columns), "h": (rows, 1), "q": (rows, 1), "k": (1, columns)}
    dtype = torch.float32 if name == "score" else torch.int32
    return torch.empty(shapes.get(name, ()), dtype=dtype, device=_META)


def _graph(
    run: Callable[..., Any], argument: str, places: Sequence[str], tile: tuple[int, int]
) -> GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    try:
        with torch.inference_mode(False), torch.no_grad():
            return make_fx(run)(*(_input(name, tile) for name in places))
    except KvattnError:
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        got = f"{type(error).__name__}: {said}"
        raise ModTraceError(argument, got, "a mod that runs on index tensors") from error


def _captures(
    graph: GraphModule, argument: str, known: Sequence[Tensor], device: torch.device
) -> tuple[tuple[int | Tensor, ...], dict[Node, int | Value], bool]:
    """The tensors that a graph holds: each a slot in aux, or a number."""
    places = {id(x): i for i, x in enumerate(known)}
    slots: dict[int, int | Tensor] = {}
    captured: dict[Node, int | Value] = {}
    closed = True
    live = used(graph.graph)
    for node in graph.graph.nodes:
        if node.op != "get_attr" or node not in live:
            continue
        tensor = getattr(graph, str(node.target))
        node.meta.setdefault("val", tensor)
        made_here = all("lift_fresh" in str(user.target) for user in node.users)
        if tensor.dim() == 0 and (made_here or tensor.device != device):
            captured[node] = constant(tensor.item(), tensor.dtype)
            continue
        if made_here:
            tensor = tensor.to(device)
        elif tensor.device != device:
            got = f"a tensor on {tensor.device}"
            raise ModCaptureError(argument, got, f"tensors on {device}, and numbers")
        closed &= made_here or id(tensor) in places
        slots.setdefault(id(tensor), places.get(id(tensor), tensor))
        captured[node] = list(slots).index(id(tensor))
    return tuple(slots.values()), captured, closed


class _Recorder(TorchFunctionMode):
    """While a mod is recorded: its captured tensors lose their data, and reading data raises."""

    def __init__(self, argument: str, device: torch.device) -> None:
        super().__init__()
        self.argument = argument
        self.device = device
        self.reads_sizes = False
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        kwargs = dict(kwargs or {})
        if name in _VALUES:
            raise ModBranchError(self.argument, f"Tensor.{name}", "operations on tensors")
        if name == "device":
            return self.device
        if name in _SIZES:
            self.reads_sizes = True
        if name in _FROM_DATA:
            kwargs["device"] = "cpu"
            return func(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = _META
        args, kwargs = tree_map(self._without_data, (args, kwargs))
        return _element(*args) if name == "__getitem__" else func(*args, **kwargs)

    def _without_data(self, x: Any) -> Any:
        if x == self.device if isinstance(x, torch.device) else False:
            return _META
        if not isinstance(x, Tensor) or x.device == _META:
            return x
        if id(x) not in self._twins:
            self._twins[id(x)] = (x, x.to(_META))
        return self._twins[id(x)][1]


def _element(x: Tensor, index: Any) -> Tensor:
    """x[index]; Python's own would ask for the value of a 0-d index, such as b."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(i, Tensor) and i.dim() == 0 for i in items):
        return x[index]
    picks: list[Tensor | None] = []
    rest = [slice(None)] * (x.dim() + 1 - len(items))
    for item in items:
        for i in rest if item is Ellipsis else [item]:
            if isinstance(i, int):
                x = x.select(len(picks), i)
                continue
            if isinstance(i, slice):
                x = x[(slice(None),) * len(picks) + (i,)]
            picks.append(i if isinstance(i, Tensor) else None)
    return torch.ops.aten.index.Tensor(x, picks)

"""What a callable computes, as a hashable key: its code and all that it captures.

Two callables with equal fingerprints trace to the same graph. Tensors count with dtype, number of
dimensions and device, not with their data; they are collected on the way.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

_LIMIT = 128  # captured objects looked at; beyond it the mod is traced at every call
_PLAIN = frozenset((bool, int, str, bytes, complex, type(None), torch.dtype, torch.device))
_FIXED = {*sys.stdlib_module_names, "torch", "numpy"}  # packages whose content does not change


class Fingerprint:
    """The fingerprint of one callable.

    Attributes:
        tensors: the tensors that were found, in order.
        complete: False if something that was captured could not be looked into.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = []
        self.complete = True
        self._seen: dict[int, int] = {}

    def of(self, x: Any) -> Hashable:
        """A key for `x`; an object that was met before is named by its number."""
        kind = type(x)
        if kind in _PLAIN:
            return kind, x
        if kind is float:
            return repr(x)  # nan equals nan, -0.0 differs from 0.0
        count = len(self._seen)
        first = self._seen.setdefault(id(x), count)
        if first < count:
            return "again", first
        if count >= _LIMIT:
            self.complete = False
            return None
        if kind is FunctionType:
            return self._function(x)
        if kind is tuple or kind is list:
            return kind, tuple([self.of(item) for item in x])
        return self._tensor(x) if isinstance(x, Tensor) else self._other(x)

    def _other(self, x: Any) -> Hashable:
        if isinstance(x, MethodType):
            return self.of(x.__func__), self.of(x.__self__)
        if isinstance(x, partial):
            return partial, self.of(x.func), self.of(x.args), self.of(x.keywords)
        if isinstance(x, dict):
            return type(x), tuple([(self.of(k), self.of(v)) for k, v in x.items()])
        if isinstance(x, (type, ModuleType, BuiltinFunctionType)):
            return x
        return self._object(x)

    def _tensor(self, x: Tensor) -> Hashable:
        self.tensors.append(x)
        elsewhere = x.dim() == 0 and x.device != self.device
        return Tensor, x.dtype, x.dim(), x.device, repr(x.item()) if elsewhere else None

    def _function(self, x: FunctionType) -> Hashable:
        code, scope = x.__code__, {} if _package(x) in _FIXED else x.__globals__
        names = _names(code)
        cells = tuple([self._cell(cell) for cell in x.__closure__ or ()])
        used = tuple([self._global(scope[n], names) for n in names if n in scope])
        return code, cells, self.of(x.__defaults__), self.of(x.__kwdefaults__), used

    def _cell(self, cell: Any) -> Hashable:
        try:
            return self.of(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            return "empty"

    def _global(self, x: Any, names: tuple[str, ...]) -> Hashable:
        if not isinstance(x, ModuleType) or _package(x) in _FIXED:
            return self.of(x)
        return x, tuple(self.of(vars(x)[n]) for n in names if n in vars(x))

    def _object(self, x: Any) -> Hashable:
        call = type(x).__call__ if callable(x) else None  # its globals count too
        code = self.of(call) if isinstance(call, FunctionType) else None
        if hasattr(x, "__dict__"):
            return type(x), code, self.of(vars(x))
        try:
            hash(x)
        except TypeError:
            self.complete = False
            return None
        return type(x), x


def captured(mods: Any, device: torch.device) -> tuple[Hashable, list[Tensor]] | None:
    """A key of what mods compute on tensors like those that they read, and these tensors.

    None where something that was captured could not be looked into.
    """
    seen = Fingerprint(device)
    key = seen.of(mods)
    return (key, seen.tensors) if seen.complete else None


def _package(x: Any) -> str:
    name = x.__name__ if isinstance(x, ModuleType) else x.__module__
    return str(name).partition(".")[0]


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """The names, of globals and attributes, in a function and the functions inside it."""
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return tuple(dict.fromkeys([*code.co_names, *(n for c in inner for n in _names(c))]))


def arity(mod: Callable[..., Any]) -> int:
    """Positional arguments without a default; -1 where Python cannot tell."""
    if isinstance(mod, FunctionType):
        return mod.__code__.co_argcount - len(mod.__defaults__ or ())
    try:
        parameters = inspect.signature(mod).parameters.values()
    except (TypeError, ValueError):
        return -1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)

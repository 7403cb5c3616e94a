"""Repairs of Triton's CPU interpreter, so that kernels give in it what they give on a GPU.

Import it before any kernel. It does nothing unless TRITON_INTERPRET=1 was set when the process
began. Mended, for triton 3.6 to 3.9: arithmetic, products and casts of bfloat16 and FP8, loop
bounds that were loaded (numpy >= 2.4), and tiles as conditions, which raise instead of being true.
Calls of device functions do not patch the language anew, which took most of the time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def install() -> None:
    """Patches the interpreter of this process; once is enough."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "kvattn_repaired", False):
        return
    builder.kvattn_repaired = True
    largest = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
    narrow_types = {
        tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
        tl.float8e5: (torch.float8_e5m2, torch.uint8, np.uint8),
    }

    def numbers(handle: Any) -> Any:
        """The numbers of a handle; narrow floats, which numpy lacks, as float32."""
        kind = narrow_types.get(handle.dtype.scalar)
        if kind is None:
            return handle.data
        bits = torch.from_numpy(np.array(handle.data).view(kind[2])).view(kind[1])
        return bits.view(kind[0]).float().numpy()

    def narrow(values: Any, dtype: Any) -> Any:
        """Rounds to the nearest even; FP8 saturates, as the hardware's conversion does."""
        kind = narrow_types[dtype]
        wide = torch.from_numpy(np.array(values, dtype=np.result_type(values, np.float32)))
        if dtype in largest:
            wide = wide.clamp(-largest[dtype], largest[dtype])
        bits = wide.to(kind[0]).view(kind[1]).numpy().view(kind[2])
        return interpreter.TensorHandle(bits, dtype)

    plain_cast, plain_fp = builder.cast_impl, builder.create_fp_to_fp
    plain_binary, plain_unary, plain_dot = builder.binary_op, builder.unary_op, builder.create_dot

    def cast(self: Any, source: Any, target: Any) -> Any:
        if target.scalar in narrow_types:
            return narrow(numbers(source), target.scalar)
        if source.dtype.scalar in narrow_types:
            values = numbers(source).astype(interpreter._get_np_dtype(target.scalar))
            return interpreter.TensorHandle(values, target.scalar)
        return plain_cast(self, source, target)

    def fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if rounding not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            return plain_fp(self, source, target, rounding)
        return cast(self, source, target)

    def binary(self: Any, x: Any, y: Any, op: Callable[..., Any]) -> Any:
        dtype = x.dtype.scalar
        if dtype not in narrow_types:
            return plain_binary(self, x, y, op)
        result = op(numbers(x), numbers(y))
        same = result.dtype == np.bool_  # a comparison
        return interpreter.TensorHandle(result, dtype) if same else narrow(result, dtype)

    def unary(self: Any, x: Any, op: Callable[..., Any]) -> Any:
        dtype = x.dtype.scalar
        if dtype not in narrow_types:
            return plain_unary(self, x, op)
        return narrow(op(numbers(x)), dtype)

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.dtype.scalar != tl.float32:
            return plain_dot(self, a, b, d, *options)
        product = np.matmul(numbers(a).astype(np.float32), numbers(b).astype(np.float32))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast, fp_to_fp, dot
    builder.binary_op, builder.unary_op = binary, unary
    # The ones that prefer a number to NaN.
    builder.create_minnumf = lambda self, x, y: binary(self, x, y, np.fmin)
    builder.create_maxnumf = lambda self, x, y: binary(self, x, y, np.fmax)

    def as_bool(self: Any) -> bool:
        if self.handle.data.size == 1:
            return bool(self.handle.data.item())
        if sys._getframe(1).f_globals.get("__name__", "").startswith("triton."):
            return True  # Triton's own `if other:` asks whether an argument was given
        raise TypeError("a tile as a condition: only scalars can decide a branch")

    plain_patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, *scope: Any) -> Any:
        result = plain_patch(tensor, *scope)
        put = scope[0].set_attr if scope else setattr
        put(tensor, "__index__", lambda self: int(self.handle.data.item()))
        put(tensor, "__bool__", as_bool)
        return result

    interpreter._patch_lang_tensor = patch_tensor

    patched: set[int] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The launch has patched triton.language; the library's own functions look at its core.
        sees_core = any(value is tl.core for value in self.fn.__globals__.values())
        if sees_core and id(tl.core) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(tl.core))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call
    # Its checks for overflow compute everything twice and report only to a debugger.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


if INTERPRETED:
    install()

"""How each element-wise torch operation is written in Triton.

A rule takes (body, node, operands) and returns a value. Operands are cast to the type in which
torch computes; `math` in the text is kvattn.kernels.mod_math.
"""

from __future__ import annotations

import math
from typing import TypeGuard

import torch
from torch.fx import Node

from kvattn.mods.lowering import Body, Operand, Rule, Value, dtype_of, literal, meta

_CAP = 128.0  # up to it c * tanh(s / c) may be off by 2e-6 * c


def _natural(x: Operand) -> bool:
    if isinstance(x, Value):
        return x.natural
    return isinstance(x, (int, float)) and x >= 0


def _known(x: Operand) -> float | None:
    """The number, where it is known when the mod is traced."""
    if isinstance(x, Value):
        return x.literal
    return x if isinstance(x, (bool, int, float)) else None


def _smooth(*operands: Operand) -> bool:
    return any(isinstance(x, Value) and x.smooth for x in operands)


def _simple(code: str, on_bool: str = "", keeps_sign: bool = False) -> Rule:
    """A rule whose operands and result have one type; `on_bool` replaces the code for bools."""

    def rule(body: Body, node: Node, *operands: Operand) -> Value:
        dtype = dtype_of(node)
        text = on_bool if on_bool and dtype == torch.bool else code
        casts = [body.cast(x, dtype) for x in operands]
        natural = keeps_sign and all(map(_natural, operands))
        return body.let(text.format(*casts), dtype, *operands, natural=natural)

    return rule


def _by_kind(floats: str, integers: str, keeps_sign: bool = False) -> Rule:
    float_rule, int_rule = _simple(floats), _simple(integers, keeps_sign=keeps_sign)

    def rule(body: Body, node: Node, *operands: Operand) -> Value:
        chosen = float_rule if dtype_of(node).is_floating_point else int_rule
        return chosen(body, node, *operands)

    return rule


def _sum(sign: str) -> Rule:
    def rule(body: Body, node: Node, x: Operand, y: Operand, *_: Operand) -> Value:
        dtype = dtype_of(node)
        alpha: float = node.kwargs.get("alpha", 1)  # type: ignore[assignment]
        a, b = body.cast(x, dtype), body.cast(y, dtype)
        if alpha != 1:
            b = f"{b} * {literal(alpha, dtype)}"
        natural = sign == "+" and alpha == 1 and _natural(x) and _natural(y)
        operator = "|" if dtype == torch.bool else sign
        return body.let(f"{a} {operator} {b}", dtype, x, y, natural=natural)

    return rule


def _reverse_sub(body: Body, node: Node, x: Operand, y: Operand, *_: Operand) -> Value:
    value: Value = _sum("-")(body, node, y, x)
    return value


def _compare(operator: str) -> Rule:
    def rule(body: Body, node: Node, x: Operand, y: Operand) -> Value:
        common = torch.result_type(meta(node.args[0]), meta(node.args[1]))
        if common == torch.int32 and any(abs(_known(i) or 0) >= 2**31 for i in (x, y)):
            common = torch.int64
        a, b = body.cast(x, common), body.cast(y, common)
        return body.let(f"{a} {operator} {b}", torch.bool, x, y)

    return rule


def _logical(code: str) -> Rule:
    def rule(body: Body, node: Node, *operands: Operand) -> Value:
        casts = [body.cast(x, torch.bool) for x in operands]
        return body.let(code.format(*casts), torch.bool, *operands)

    return rule


def _bit_and(body: Body, node: Node, x: Operand, y: Operand) -> Value:
    dtype = dtype_of(node)
    code = f"{body.cast(x, dtype)} & {body.cast(y, dtype)}"
    return body.let(code, dtype, x, y, natural=_natural(x) or _natural(y))


def _shift(left: bool) -> Rule:
    def rule(body: Body, node: Node, x: Operand, n: Operand) -> Value:
        dtype, count = dtype_of(node), _known(n)
        a, b, bits = body.cast(x, dtype), body.cast(n, dtype), dtype.itemsize * 8
        if count is not None and 0 <= count < bits:
            code = f"{a} << {b}" if left else f"{a} >> {b}"
        else:
            width = max(bits, 32)
            code = f"math.shift_{'left' if left else 'right'}({a}, {b}, {width})"
        return body.let(code, dtype, x, n, natural=not left and _natural(x))

    return rule


def _quotient(body: Body, dtype: torch.dtype, x: Operand, y: Operand, exact: bool = False) -> str:
    """x / y of floats: rounded correctly, except for scores, where 2 ulp decide nothing."""
    a, b, known = body.cast(x, dtype), body.cast(y, dtype), _known(y)
    if dtype == torch.float64:
        return f"{a} / {b}"
    if exact or not _smooth(x, y):
        return f"tl.div_rn({a}, {b})"
    if known and 1e-30 < abs(known) < 1e30:
        return f"{a} * {literal(1 / known, dtype)}"
    return f"{a} / {b}"


def _multiply(body: Body, node: Node, x: Operand, y: Operand) -> Value:
    """c * tanh(s / c) becomes one function: a softcap's error is that of its bound c."""
    number, other = (_known(y), x) if _known(x) is None else (_known(x), y)
    tanh = other.tanh if isinstance(other, Value) else None
    if tanh is not None and number is not None and abs(number) <= _CAP:
        inner, rate = tanh
        code = f"math.softcap({inner}, {rate!r}, {literal(number, torch.float32)})"
        return body.let(code, torch.float32, other)._replace(bound=abs(float(number)))
    product = _simple("{0} * {1}", on_bool="{0} & {1}", keeps_sign=True)(body, node, x, y)
    if isinstance(other, Value) and number is not None:
        product = product._replace(bound=other.bound * abs(float(number)))
    return _product_of(product, other, number)


def _moderate(number: float | None) -> TypeGuard[float]:
    """Whether products with it neither overflow nor vanish."""
    return number is not None and 1e-6 < abs(number) < 1e6


def _is_score(x: Operand) -> TypeGuard[Value]:
    return isinstance(x, Value) and x.smooth and x.dtype == torch.float32


def _product_of(result: Value, x: Operand, number: float | None) -> Value:
    """The result, which remembers what it is the product of: tanh folds numbers."""
    if _is_score(x) and result.dtype == torch.float32 and _moderate(number):
        return result._replace(product=(x.code, float(number)))
    return result


def _tanh(body: Body, node: Node, x: Operand) -> Value:
    result = _simple("math.tanh({0})")(body, node, x)
    return result._replace(tanh=x.product or (x.code, 1.0)) if _is_score(x) else result


def _tanh_approx(body: Body, node: Node, x: Operand) -> Value:
    return _simple("math.tanh_approx({0})")(body, node, x)._replace(bound=1.0)


def _divide(body: Body, node: Node, x: Operand, y: Operand) -> Value:
    mode, dtype = node.kwargs.get("rounding_mode"), dtype_of(node)
    if mode == "floor":
        return _floor_divide(body, node, x, y)
    if mode == "trunc" and not dtype.is_floating_point:
        return body.let(f"{body.cast(x, dtype)} // {body.cast(y, dtype)}", dtype, x, y)
    value = body.let(_quotient(body, dtype, x, y, exact=mode == "trunc"), dtype, x, y)
    known = _known(y)
    if mode is None and known:
        return _product_of(value, x, 1 / known)
    return body.let(f"math.trunc({value.code})", dtype, x, y) if mode == "trunc" else value


def _floor_divide(body: Body, node: Node, x: Operand, y: Operand) -> Value:
    dtype = dtype_of(node)
    a, b = body.cast(x, dtype), body.cast(y, dtype)
    if dtype.is_floating_point:
        return body.let(f"math.float_floor_div({a}, {b})", dtype, x, y)
    natural = _natural(x) and _natural(y)
    code = f"{a} // {b}" if natural else f"math.floor_div({a}, {b})"
    return body.let(code, dtype, x, y, natural=natural)


def _remainder(body: Body, node: Node, x: Operand, y: Operand) -> Value:
    dtype, known = dtype_of(node), _known(y)
    a, b = body.cast(x, dtype), body.cast(y, dtype)
    if dtype.is_floating_point:
        code = f"math.float_mod({a}, {b})"
    elif _natural(x) and _natural(y):
        code = f"{a} % {b}"
    elif known and known > 0 and int(known) & (int(known) - 1) == 0:
        code = f"{a} & {int(known) - 1}"
    else:
        code = f"math.floor_mod({a}, {b})"
    return body.let(code, dtype, x, y, natural=_natural(y))


def _power(body: Body, node: Node, x: Operand, y: Operand) -> Value:
    dtype, base, exponent = dtype_of(node), _known(x), _known(y)
    if exponent is not None and abs(exponent) in range(1, 17):
        product = body.let(_product(body, body.cast(x, dtype), int(abs(exponent))), dtype, x)
        return product if exponent > 0 else _reciprocal(body, node, product)
    if exponent == 0.5:
        return _square_root(body, node, x)
    if not dtype.is_floating_point:
        return _simple("math.int_power({0}, {1})")(body, node, x, y)
    if base is not None and base > 0:
        scaled = f"{body.cast(y, dtype)} * {literal(math.log2(base), dtype)}"
        return body.let(f"tl.exp2({scaled})", dtype, y)
    return _simple("math.power({0}, {1})")(body, node, x, y)


def _product(body: Body, x: str, n: int) -> str:
    """x ** n by squaring."""
    if n == 1:
        return x
    half = x if n < 4 else body.write(_product(body, x, n // 2))
    return f"{half} * {half} * {x}" if n % 2 else f"{half} * {half}"


def _square_root(body: Body, node: Node, x: Operand) -> Value:
    dtype = dtype_of(node)
    exact = dtype != torch.float64 and not _smooth(x)
    return body.let(f"tl.sqrt{'_rn' if exact else ''}({body.cast(x, dtype)})", dtype, x)


def _reciprocal(body: Body, node: Node, x: Operand) -> Value:
    return body.let(_quotient(body, dtype_of(node), 1, x), dtype_of(node), x)


def _where(body: Body, node: Node, condition: Operand, x: Operand, y: Operand) -> Value:
    dtype = dtype_of(node)
    choice = f"{body.cast(condition, torch.bool)}, {body.cast(x, dtype)}, {body.cast(y, dtype)}"
    natural = _natural(x) and _natural(y)
    return body.let(f"tl.where({choice})", dtype, x, y, natural=natural)


def _masked_fill(body: Body, node: Node, x: Operand, mask: Operand, y: Operand) -> Value:
    return _where(body, node, mask, y, x)


def _clamp(body: Body, node: Node, x: Operand, low: Operand = None, high: Operand = None) -> Value:
    dtype = dtype_of(node)
    code = body.cast(x, dtype)
    for name, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            code = f"math.{name}({code}, {body.cast(bound, dtype)})"
    natural = (_natural(x) or _natural(low)) and (high is None or _natural(high))
    return body.let(code, dtype, x, low, high, natural=natural)


def _largest(body: Body, node: Node, x: Operand, y: Operand) -> Value:
    value = _simple("math.maximum({0}, {1})", on_bool="{0} | {1}")(body, node, x, y)
    return value._replace(natural=value.natural or _natural(x) or _natural(y))


def _absolute(body: Body, node: Node, x: Operand) -> Value:
    dtype = dtype_of(node)
    return body.let(f"tl.abs({body.cast(x, dtype)})", dtype, x, natural=True)


def _test(code: str, on_integers: str) -> Rule:
    """isnan and its like."""

    def rule(body: Body, node: Node, x: Operand) -> Value:
        dtype = dtype_of(node.args[0])  # type: ignore[arg-type]
        text = code if dtype.is_floating_point else on_integers
        return body.let(text.format(body.cast(x, dtype)), torch.bool, x)

    return rule


def _gelu(body: Body, node: Node, x: Operand) -> Value:
    name = "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    return body.let(f"math.{name}({body.cast(x, dtype_of(node))})", dtype_of(node), x)


def _softplus(
    body: Body, node: Node, x: Operand, beta: Operand = 1.0, threshold: Operand = 20.0
) -> Value:
    return _simple("math.softplus({0}, {1}, {2})")(body, node, x, beta, threshold)


def _leaky_relu(body: Body, node: Node, x: Operand, slope: Operand = 0.01) -> Value:
    return _simple("tl.where({0} > 0, {0}, {0} * {1})")(body, node, x, slope)


def _elu(
    body: Body,
    node: Node,
    x: Operand,
    alpha: Operand = 1.0,
    scale: Operand = 1.0,
    slope: Operand = 1.0,
) -> Value:
    code = "tl.where({0} > 0, {0} * {2}, math.expm1({0} * {3}) * {1} * {2})"
    return _simple(code)(body, node, x, alpha, scale, slope)


def _log_sigmoid(body: Body, node: Node, x: Operand) -> Value:
    """Torch returns a buffer for the backward pass beside it."""
    dtype = x.dtype if isinstance(x, Value) else torch.float32
    return body.let(f"-math.softplus(-{body.cast(x, dtype)}, 1.0, 20.0)", dtype, x)


def _hypot(body: Body, node: Node, x: Operand, y: Operand) -> Value:
    squares = _simple("{0} * {0} + {1} * {1}")(body, node, x, y)
    return _square_root(body, node, squares)


def _add_product(body: Body, node: Node, x: Operand, a: Operand, b: Operand) -> Value:
    value: float = node.kwargs.get("value", 1)  # type: ignore[assignment]
    return _simple("{0} + {1} * {2} * {3}")(body, node, x, a, b, value)


def _nan_to_num(
    body: Body,
    node: Node,
    x: Operand,
    nan: Operand = None,
    high: Operand = None,
    low: Operand = None,
) -> Value:
    dtype = dtype_of(node)
    if not dtype.is_floating_point:
        return _simple("{0}")(body, node, x)
    info = torch.finfo(dtype)
    high, low = (info.max if high is None else high), (info.min if low is None else low)
    code = (
        "tl.where({0} != {0}, {1}, tl.where({0} == float('inf'), {2}, "
        "tl.where({0} == float('-inf'), {3}, {0})))"
    )
    return _simple(code)(body, node, x, 0.0 if nan is None else nan, high, low)


def _hardtanh(
    body: Body, node: Node, x: Operand, low: Operand = -1.0, high: Operand = 1.0
) -> Value:
    return _clamp(body, node, x, low, high)


POINTWISE: dict[str, Rule] = {
    **{
        name: _simple(f"{code}({{0}})")
        for name, code in {
            "exp": "tl.exp",
            "exp2": "tl.exp2",
            "log": "tl.log",
            "log2": "tl.log2",
            "sin": "tl.sin",
            "cos": "tl.cos",
            "rsqrt": "tl.rsqrt",
            "erf": "tl.erf",
            "sigmoid": "math.sigmoid",
            "expm1": "math.expm1",
            "log1p": "math.log1p",
        }.items()
    },
    "log10": _simple("tl.log({0}) * 0.4342944819032518"),
    "erfc": _simple("1.0 - tl.erf({0})"),
    "tan": _simple("tl.sin({0}) / tl.cos({0})"),
    "silu": _simple("{0} * math.sigmoid({0})"),
    "logaddexp": _simple("math.logaddexp({0}, {1})"),
    "gelu": _gelu,
    "softplus": _softplus,
    "elu": _elu,
    "leaky_relu": _leaky_relu,
    "hardtanh": _hardtanh,
    "celu": lambda body, node, x, alpha=1.0: _elu(body, node, x, alpha, 1.0, 1 / alpha),
    "hardsigmoid": _simple("math.minimum(math.maximum({0} + 3.0, 0.0), 6.0) / 6.0"),
    "hardswish": _simple("{0} * math.minimum(math.maximum({0} + 3.0, 0.0), 6.0) / 6.0"),
    "log_sigmoid_forward": _log_sigmoid,
    "mish": _simple("{0} * math.tanh(math.softplus({0}, 1.0, 20.0))"),
    "sinh": _simple("0.5 * (math.expm1({0}) - math.expm1(-{0}))"),
    "cosh": _simple("0.5 * (tl.exp({0}) + tl.exp(-{0}))"),
    "hypot": _hypot,
    "addcmul": _add_product,
    "lerp": _simple("{0} + {2} * ({1} - {0})"),
    "nan_to_num": _nan_to_num,
    "frac": _simple("{0} - math.trunc({0})"),
    "relu": _simple("math.maximum({0}, 0)"),
    "add": _sum("+"),
    "sub": _sum("-"),
    "rsub": _reverse_sub,
    "mul": _multiply,
    "tanh": _tanh,
    "kvattn.tanh_approx.default": _tanh_approx,
    "div": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "fmod": _by_kind("math.fmod({0}, {1})", "{0} % {1}"),
    "pow": _power,
    "square": _simple("{0} * {0}"),
    "sqrt": _square_root,
    "reciprocal": _reciprocal,
    "neg": _simple("-{0}"),
    "abs": _absolute,
    **dict.fromkeys(("sign", "sgn"), _simple("tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))")),
    "floor": _by_kind("tl.floor({0})", "{0}", keeps_sign=True),
    "ceil": _by_kind("tl.ceil({0})", "{0}", keeps_sign=True),
    "trunc": _by_kind("math.trunc({0})", "{0}", keeps_sign=True),
    "round": _by_kind("math.round_even({0})", "{0}", keeps_sign=True),
    "minimum": _simple("math.minimum({0}, {1})", on_bool="{0} & {1}", keeps_sign=True),
    "maximum": _largest,
    "fmin": _simple("tl.minimum({0}, {1})", keeps_sign=True),
    "fmax": _simple("tl.maximum({0}, {1})"),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda body, node, x, high: _clamp(body, node, x, None, high),
    "where": _where,
    "masked_fill": _masked_fill,
    "eq": _compare("=="),
    "ne": _compare("!="),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "logical_and": _logical("{0} & {1}"),
    "logical_or": _logical("{0} | {1}"),
    "logical_xor": _logical("{0} ^ {1}"),
    "logical_not": _logical("{0} == 0"),
    "bitwise_and": _bit_and,
    "bitwise_or": _simple("{0} | {1}", keeps_sign=True),
    "bitwise_xor": _simple("{0} ^ {1}", keeps_sign=True),
    "bitwise_not": _simple("~{0}", on_bool="{0} == 0"),
    "bitwise_left_shift": _shift(left=True),
    "bitwise_right_shift": _shift(left=False),
    "__lshift__": _shift(left=True),
    "__rshift__": _shift(left=False),
    "__and__": _bit_and,
    "__or__": _simple("{0} | {1}", keeps_sign=True),
    "__xor__": _simple("{0} ^ {1}", keeps_sign=True),
    "isnan": _test("{0} != {0}", "{0} != {0}"),
    "isinf": _test("tl.abs({0}) == float('inf')", "{0} != {0}"),
    "isfinite": _test("tl.abs({0}) < float('inf')", "{0} == {0}"),
}

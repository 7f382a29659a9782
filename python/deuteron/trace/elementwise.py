"""Arithmetic, comparisons, choices and constants, and laying end to end: where dtypes and shapes are agreed on."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Mapping, Optional, Sequence, Tuple

from deuteron.trace.emit import Operand, as_operand, as_value, axis_of, emit, foreign, word_of
from deuteron.trace.graph import FLOATS, is_long, number_text, rounded, shape_text
from deuteron.trace.value import Value
from deuteron.trace.views import broadcast, copy


def promoted(op: str, operands: Sequence[Operand], ints: bool = False) -> str:
    """The dtype of a result: that of the widest float; of a scalar only where nothing else is of its kind."""
    values = [operand for operand in operands if isinstance(operand, Value)]
    floats = {value._word for value in values if value._word in FLOATS and value.shape}
    floats = floats or {value._word for value in values if value._word in FLOATS}
    if len(floats) == 1:
        return floats.pop()
    if floats or any(isinstance(operand, float) for operand in operands):
        return "f32"
    words = {value._word for value in values}
    if ints and words <= {"i32"}:
        return "i32"
    raise TypeError(f"{op}: expected a float operand (f32, f16 or bf16), got {' and '.join(sorted(words))}; cast one")


def _shape_of(op: str, operands: Sequence[Operand]) -> Tuple[int, ...]:
    return broadcast_shape(op, [operand.shape for operand in operands if isinstance(operand, Value)])


def broadcast_shape(op: str, shapes: Sequence[Sequence[int]]) -> Tuple[int, ...]:
    """The shape that all shapes repeat into."""
    rank = max((len(shape) for shape in shapes), default=0)
    result = []
    for axis in range(-rank, 0):
        sizes = {shape[axis] for shape in shapes if len(shape) >= -axis} - {1}
        if len(sizes) > 1:
            raise ValueError(f"{op}: expected shapes that broadcast, got {' and '.join(map(shape_text, shapes))}")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def _as_word(operand: Operand, word: str) -> Operand:
    return cast(operand, word) if isinstance(operand, Value) else rounded(operand, word)


def _is_exact(operand: Operand, word: str) -> bool:
    return isinstance(operand, Value) or rounded(operand, word) == operand


def arithmetic(op: str, a: Any, b: Any) -> Value:
    """`add`, `sub`, `mul` or `div`."""
    a, b = as_operand(a, op), as_operand(b, op)
    if op == "div":
        a, b = (cast(x, "f32") if isinstance(x, Value) and x._word in ("i32", "bool") else x for x in (a, b))
    word = promoted(op, (a, b))
    # A number that the narrow type does not hold is not rounded: the sum or product is.
    inner = word if _is_exact(a, word) and _is_exact(b, word) else "f32"
    operands = (_as_word(a, inner), _as_word(b, inner))
    return cast(emit(op, operands, [(inner, _shape_of(op, operands))])[0], word)


def compare(op: str, a: Any, b: Any) -> Value:
    """`lt`, `le`, `eq`, `ne`, `gt` or `ge`."""
    a, b = as_operand(a, op), as_operand(b, op)
    if isinstance(a, (int, float)):
        flipped = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
        return compare(flipped.get(op, op), b, a)
    if a._word == "bool":
        a = cast(a, "f32")
    if isinstance(b, Value) and b._word == "bool":
        b = cast(b, "f32")
    word = promoted(op, (a, b), ints=True)
    if word == "i32" and isinstance(b, int) and not -(2**31) <= b < 2**31:
        raise ValueError(f"{op}: expected a number that i32 holds, got {b}")
    operands = (_as_word(a, word), _as_word(b, word))
    return emit(op, operands, [("bool", _shape_of(op, operands))])[0]


def logical(op: str, a: Any, b: Any = None) -> Value:
    """`and`, `or`, `xor` or `not` of truth values."""
    operands = [a] if op == "not" else [a, b]
    for operand in operands:
        if as_value(operand, op)._word != "bool":
            raise TypeError(f"{op}: expected truth values, got {operand._word}")
    if op == "not":
        return compare("eq", a, 0.0)
    if op == "xor":
        return compare("ne", a, b)
    both = arithmetic("mul", cast(a, "f32"), b) if op == "and" else _extreme("max", cast(a, "f32"), cast(b, "f32"), shared=False)
    return compare("ne", both, 0.0)


def maximum(a: Any, b: Any) -> Value:
    """The larger of two; NaN if either is. Where they are equal, each has half of the gradient."""
    return _extreme("max", a, b)


def minimum(a: Any, b: Any) -> Value:
    """The smaller of two; NaN if either is. Where they are equal, each has half of the gradient."""
    return _extreme("min", a, b)


def _extreme(op: str, a: Any, b: Any, shared: bool = True) -> Value:
    """The larger or smaller. At a tie the gradient is shared, or else that of `b`."""
    a, b = as_operand(a, op), as_operand(b, op)
    word = promoted(op, (a, b))
    operands = (_as_word(a, word), _as_word(b, word))
    extreme = emit(op, operands, [(word, _shape_of(op, operands))])[0]
    if not shared or extreme._trace.framework != "torch":
        return extreme
    wide = [cast(operand, "f32") if isinstance(operand, Value) else operand for operand in operands]
    halves = [arithmetic("mul", operand, 0.5) if isinstance(operand, Value) else operand * 0.5 for operand in wide]
    return where(compare("eq", *operands), cast(arithmetic("add", *halves), word), extreme)


def clamp(x: Any, min: Optional[Operand] = None, max: Optional[Operand] = None) -> Value:
    """`x` held between two bounds. At a bound its gradient is that of the installed version of torch."""
    held = as_value(x, "clamp")
    for op, bound in (("max", min), ("min", max)):
        if bound is not None:
            share = _share_at_bound(isinstance(bound, Value)) if held._trace.framework == "torch" else 1.0
            a, b = (held, bound) if share == 0.0 else (bound, held)
            held = _extreme(op, a, b, shared=0.0 < share < 1.0)
    return held


@functools.lru_cache(maxsize=None)
def _share_at_bound(by_tensor: bool) -> float:
    """How much of the gradient `torch.clamp` leaves to what lies on its bound, a number or a tensor: versions differ."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), device="cpu", requires_grad=True)
        held = torch.clamp(x, min=torch.zeros((), device="cpu") if by_tensor else 0.0)
        return float(torch.autograd.grad(held, x)[0])


def where(condition: Any, a: Any, b: Any) -> Value:
    """`a` where the condition holds, else `b`."""
    condition = cast(as_value(condition, "where"), "bool")
    a, b = as_operand(a, "where"), as_operand(b, "where")
    word = promoted("where", (a, b), ints=True) if isinstance(a, Value) or isinstance(b, Value) else "f32"
    operands = [_as_word(a, word), _as_word(b, word)]
    if not any(isinstance(operand, Value) for operand in operands):
        operands[0] = full((), operands[0], word, like=condition)
    return emit("select", (condition, *operands), [(word, _shape_of("where", (condition, *operands)))])[0]


def unary(op: str, x: Any) -> Value:
    """A function of one float value; indices and truth values are widened where torch does so."""
    x = as_value(x, op)
    if x._word in ("i32", "bool", "i8") and op not in ("neg", "abs", "round"):
        x = cast(x, "f32")
    if x._word not in FLOATS:
        raise TypeError(f"{op}: expected a float operand (f32, f16 or bf16), got {x._word}; cast it")
    return emit(op, (x,), [(x._word, x.shape)])[0]


def abs(x: Any) -> Value:
    """`|x|`"""
    return unary("abs", x)


def exp(x: Any) -> Value:
    """`e^x`"""
    return unary("exp", x)


def log(x: Any) -> Value:
    """The natural logarithm."""
    return unary("log", x)


def log1p(x: Any) -> Value:
    """`log(1 + x)`, also where `x` is so small that `1 + x` has few of its digits."""
    x = as_value(x, "log1p")
    wide = cast(x, "f32")
    whole = wide + 1.0
    rough = log(whole)
    # What `whole` lost of `x` is made up by their ratio. A constant: the slope is 1 / (1 + x) all the same.
    exact = where(whole == 1.0, wide, rough * (wide / (whole - 1.0)))
    missing = stop_gradient(where(abs(rough) == math.inf, 0.0, exact - rough))
    return cast(rough + missing, x._word if x._word in FLOATS else "f32")


def sqrt(x: Any) -> Value:
    """The square root."""
    return unary("sqrt", x)


def rsqrt(x: Any) -> Value:
    """`1 / sqrt(x)`"""
    return unary("rsqrt", x)


def reciprocal(x: Any) -> Value:
    """`1 / x`"""
    return unary("reciprocal", x)


def tanh(x: Any) -> Value:
    """The hyperbolic tangent."""
    return unary("tanh", x)


def erf(x: Any) -> Value:
    """The error function."""
    return unary("erf", x)


def sigmoid(x: Any) -> Value:
    """`1 / (1 + e^-x)`"""
    return unary("sigmoid", x)


def round(x: Any) -> Value:
    """To the nearest integer, ties to even."""
    return unary("round", x)


_ROOTS: Mapping[float, Callable[[Any], Value]] = {0.5: sqrt, -0.5: rsqrt, -1.0: reciprocal}


def power(x: Any, exponent: Any) -> Value:
    """`x` to a whole power from 1 to 16, or to 0.5, -0.5, -1 or -2. Other powers of tensors of torch are left to torch."""
    x, exponent = as_operand(x, "pow"), as_operand(exponent, "pow")
    if isinstance(exponent, Value) or not isinstance(x, Value) or not _is_product(x, exponent):
        from deuteron.trace.left import call, takes

        if takes(x, exponent):
            import torch

            return call(torch.pow, (x, exponent), {})  # type: ignore[no-any-return]
    x = as_value(x, "pow")
    if not isinstance(exponent, (int, float)) or isinstance(exponent, bool):
        raise TypeError(f"pow: expected a number as exponent, got {foreign(exponent)}")
    if x._word not in FLOATS and float(exponent).is_integer():
        raise TypeError(f"pow: expected a float operand (f32, f16 or bf16), got {x._word}; cast it")
    if exponent in _ROOTS:
        return _ROOTS[exponent](x)
    if exponent != int(exponent) or not (1 <= exponent <= 16 or exponent == -2):
        raise ValueError(f"pow: expected a whole exponent from 1 to 16, 0.5, -0.5, -1 or -2, got {exponent}")
    # Rounded once, as torch does.
    wide = cast(x, "f32")
    result, square, left = None, wide, int(math.fabs(exponent))
    while left:
        if left & 1:
            result = square if result is None else result * square
        left >>= 1
        square = square * square if left else square
    assert result is not None
    return cast(reciprocal(result) if exponent < 0 else result, x._word if x._word in FLOATS else "f32")


def _is_product(x: Value, exponent: Any) -> bool:
    """Whether a power is a root, or a product of few factors."""
    if not isinstance(exponent, (int, float)) or isinstance(exponent, bool):
        return False
    is_whole = float(exponent).is_integer()
    return exponent in _ROOTS or (x._word in FLOATS and is_whole and (1 <= exponent <= 16 or exponent == -2))


def stop_gradient(x: Any) -> Value:
    """The value, through which no gradient flows."""
    x = as_value(x, "stop_gradient")
    return emit("stop_gradient", (x,), [(x._word, x.shape)])[0]


def cast(x: Value, word: str) -> Value:
    """To another dtype: the nearest value, ties to even."""
    if x._word == word:
        return x
    if word == "bool":
        return compare("ne", x, 0)
    floats = (*FLOATS, "i8", "f8e4m3")
    fits = word in floats if x._word in FLOATS else word in FLOATS and x._word in ("i8", "i32", "bool")
    if not fits:
        raise TypeError(f"to: expected a cast between floats, to i8, or from i8, i32 or bool, got {x._word} to {word}")
    return emit("cast", (x,), [(word, x.shape)], word)[0]


def converted(x: Value, dtype: Any) -> Value:
    """To a dtype of torch, NumPy or the text form, which has integers of 32 bits alone."""
    word = word_of(x, dtype)
    if word == x._word == "i32" and not isinstance(dtype, str) and is_long(dtype) != x._is_long:
        value = copy(x)
        value._node.is_long = is_long(dtype)
        return value
    return cast(x, word)


def full(shape: Sequence[int], value: Any, dtype: Any = "f32", *, like: Value) -> Value:
    """One number in every place. `like` is any value of the function."""
    word = word_of(like, dtype)
    number = as_operand(value, "full")
    if isinstance(number, Value):
        raise TypeError("full: expected a number, got a value")
    if word not in (*FLOATS, "i32"):
        raise TypeError(f"full: expected a float dtype or i32, got {word}")
    number = rounded(int(number) if word == "i32" else float(number), word)
    if number != number:
        raise ValueError("full: expected a number, got NaN")
    trace = like._trace
    node = trace.add("const", (), [(word, ())], (number_text(number), word))
    node.is_long = word == "i32" and not isinstance(dtype, str) and is_long(dtype)
    return broadcast(Value(trace, node), shape)


def arange(size: int, *, like: Value) -> Value:
    """The indices from 0 on, as `i32`. `like` is any value of the function."""
    trace = like._trace
    return Value(trace, trace.add("iota", (), [("i32", (size,))], (shape_text((size,)), "axis=0")))


def cat(values: Sequence[Any], dim: int = 0) -> Value:
    """Values laid end to end along an axis."""
    parts = [as_value(value, "cat") for value in values]
    if not parts:
        raise ValueError("cat: expected at least one value")
    axis = axis_of(parts[0], dim, "cat")
    word = parts[0]._word if len({part._word for part in parts}) == 1 else promoted("cat", parts)
    for part in parts:
        same = part.ndim == parts[0].ndim and all(
            i == axis or size == parts[0].shape[i] for i, size in enumerate(part.shape)
        )
        if not same:
            raise ValueError(
                f"cat: expected values that differ only in axis {axis}, got {shape_text(parts[0].shape)} and "
                f"{shape_text(part.shape)}"
            )
    if len(parts) == 1:
        return parts[0]
    size = sum(part.shape[axis] for part in parts)
    shape = (*parts[0].shape[:axis], size, *parts[0].shape[axis + 1 :])
    return emit("concat", [cast(part, word) for part in parts], [(word, shape)], f"axis={axis}")[0]


def stack(values: Sequence[Any], dim: int = 0) -> Value:
    """Values side by side along a new axis."""
    return cat([as_value(value, "stack").unsqueeze(dim) for value in values], dim)

"""Sums, means and extremes along axes, and row functions composed of them."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Tuple

from deuteron.trace.elementwise import abs, arange, cast, exp, log, sqrt, stop_gradient, where
from deuteron.trace.emit import as_value, axes_of, axis_of, emit, word_of
from deuteron.trace.graph import FLOATS, Number, elements, shape_text
from deuteron.trace.value import Value
from deuteron.trace.views import permute, reshape


def _row_reduce(op: str, x: Value) -> Value:
    word = "i32" if op == "row_argmax" else x._word
    return emit(op, (x,), [(word, (*x.shape[:-1], 1))])[0]


def _reduce(op: str, x: Value, dim: Any, keepdim: bool) -> Value:
    """Over some axes: they are brought to the end and become one."""
    axes = axes_of(x, dim, op)
    if x._word not in FLOATS:
        raise TypeError(f"{op}: expected a float operand (f32, f16 or bf16), got {x._word}; cast it")
    if not axes:
        return reshape(_row_reduce(op, reshape(x, [1])), []) if op == "row_argmax" else x
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    counted = elements([x.shape[axis] for axis in axes])
    if counted == 0 and op != "row_sum":
        raise ValueError(f"{op}: expected axes that are not empty, got {shape_text(x.shape)}")
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape) if keepdim or axis not in axes]
    if op == "row_sum" and kept == [x.ndim - 1] and x._word in FLOATS:
        return reshape(emit("column_sum", (x,), [(x._word, (x.shape[-1],))])[0], shape)
    last = permute(x, kept + axes)
    rows = reshape(last, [*(x.shape[axis] for axis in kept), counted]) if len(axes) > 1 else last
    return reshape(_row_reduce(op, rows), shape)


def sum(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    """The sum over some axes, or over all."""
    x = as_value(x, "sum")
    return _reduce("row_sum", x if dtype is None else cast(x, word_of(x, dtype)), dim, keepdim)


def mean(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    """The mean over some axes, or over all."""
    x = as_value(x, "mean")
    x = x if dtype is None else cast(x, word_of(x, dtype))
    axes = axes_of(x, dim, "mean")
    if axes and axes == list(range(x.ndim - 1)) and x._word in FLOATS:
        # Columns have a sum and no mean of their own. It is rounded once.
        count = elements([x.shape[axis] for axis in axes])
        if count == 0:
            raise ValueError(f"mean: expected axes that are not empty, got {shape_text(x.shape)}")
        return cast(_reduce("row_sum", cast(x, "f32"), axes, keepdim) * (1.0 / count), x._word)
    return _reduce("row_mean", x, axes, keepdim)


def amax(x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    """The largest value along some axes, or of all; NaN if any is."""
    return _reduce("row_max", as_value(x, "amax"), dim, keepdim)


def amin(x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    """The smallest value along some axes, or of all; NaN if any is."""
    return -_reduce("row_max", -as_value(x, "amin"), dim, keepdim)


def argmax(x: Any, dim: Optional[int] = None, keepdim: bool = False) -> Value:
    """The `i32` index of the first largest value along an axis, or of all."""
    return _reduce("row_argmax", as_value(x, "argmax"), dim, keepdim)


def largest(x: Value, dim: int, keepdim: bool) -> Tuple[Value, Value]:
    """The largest value along an axis and the index of the first, which alone has its gradient, as in torch."""
    axis = axis_of(x, dim, "max")
    indices = argmax(x, axis, keepdim=True)
    places = arange(x.shape[axis], like=x).reshape(*(-1 if at == axis else 1 for at in range(x.ndim)))
    values = sum(where(places == indices, x, 0.0), axis, keepdim=True)
    # Written as a sum, of which all terms but one are 0: it is exact.
    return (values, indices) if keepdim else (values.squeeze(axis), indices.squeeze(axis))


def var(x: Any, dim: Any = None, correction: Number = 1, keepdim: bool = False) -> Value:
    """The variance over some axes: the sum of squares of centred values over their count less the correction."""
    x = as_value(x, "var")
    return cast(_wide_var(x, dim, correction, keepdim), x._word)


def std(x: Any, dim: Any = None, correction: Number = 1, keepdim: bool = False) -> Value:
    """The root of the variance. Where that is 0 the gradient is 0, as in torch."""
    x = as_value(x, "std")
    variance = _wide_var(x, dim, correction, keepdim)
    is_flat = variance == 0.0
    return cast(where(is_flat, 0.0, sqrt(where(is_flat, 1.0, variance))), x._word)


def _wide_var(x: Value, dim: Any, correction: Number, keepdim: bool) -> Value:
    wide = cast(x, "f32")
    axes = axes_of(wide, dim, "var")
    count = elements([x.shape[axis] for axis in axes])
    if count <= correction:
        raise ValueError(f"var: expected more than {correction} values, got {count}")
    centred = wide - mean(wide, axes, keepdim=True)
    return mean(centred * centred, axes, keepdim) * (count / (count - correction))


def softmax(x: Any, dim: int = -1, dtype: Any = None) -> Value:
    """`e^x` over its sum along an axis; a row of `-inf` gives zeros, where torch gives NaN."""
    x = as_value(x, "softmax")
    x = x if dtype is None else cast(x, word_of(x, dtype))
    return _along(x, dim, lambda rows: composite("softmax", rows), "softmax")


def logsumexp(x: Any, dim: Any = -1, keepdim: bool = False) -> Value:
    """The logarithm of the sum of `e^x` along some axes."""
    x = as_value(x, "logsumexp")
    wide, axes = cast(x, "f32"), axes_of(x, dim, "logsumexp")
    largest = amax(wide, axes, keepdim=True)
    shift = stop_gradient(where(abs(largest) == math.inf, 0.0, largest))
    result = log(sum(exp(wide - shift), axes, keepdim=True)) + shift
    return cast(result if keepdim else result.squeeze(axes), x._word if x._word in FLOATS else "f32")


def log_softmax(x: Any, dim: int = -1, dtype: Any = None) -> Value:
    """`x` less its logsumexp along an axis."""
    x = as_value(x, "log_softmax")
    word = x._word if dtype is None else word_of(x, dtype)
    wide = cast(x, "f32")
    # Centred first: where one value has nearly all the weight, the difference is small.
    largest = amax(wide, dim, keepdim=True)
    centred = wide - stop_gradient(where(abs(largest) == math.inf, 0.0, largest))
    return cast(centred - log(sum(exp(centred), dim, keepdim=True)), word)


def _along(x: Value, dim: int, rows: Callable[[Value], Value], op: str) -> Value:
    """A function of rows along any axis."""
    if not x.ndim:
        return reshape(rows(reshape(x, [1])), [])
    return rows(x.transpose(axis_of(x, dim, op), -1)).transpose(dim, -1)


def composite(op: str, x: Value, *words: str) -> Value:
    """A statement of one float operand whose result has its type."""
    if x._word not in FLOATS:
        raise TypeError(f"{op}: expected a float operand (f32, f16 or bf16), got {x._word}; cast it")
    return emit(op, (x,), [(x._word, x.shape)], *words)[0]

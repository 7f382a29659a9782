"""Traced values, and the functions on them.

Inside a function under `deuteron.fuse`, tensors are `Value`s: they have a dtype and a shape but no numbers, and the operations
on them are recorded. Methods and functions are called as in torch; most functions of torch (`torch.exp`,
`torch.nn.functional.layer_norm`, ...) and NumPy (`np.exp`, `np.where`, ...) take values too, and so does the catalogue.
Functions in `deuteron.trace.left`, which the text form does not have, run in torch between fused programs; any other one
is refused with a `TypeError` or a `ValueError` when the function is traced.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from deuteron._native import Program
from deuteron.trace.value import Value  # first: the functions below need it
from deuteron.trace.elementwise import abs, arange, cat, clamp, erf, exp, full, log, log1p, maximum, minimum, reciprocal
from deuteron.trace.elementwise import round, rsqrt, sigmoid, sqrt, stack, stop_gradient, tanh, where
from deuteron.trace.named import attention, cross_entropy, dropout, embedding, geglu, gelu, layer_norm, linear, matmul
from deuteron.trace.named import relu, rms_norm, silu, swiglu
from deuteron.trace.rows import amax, amin, argmax, log_softmax, logsumexp, mean, softmax, std, sum, var

__all__ = [
    "Value",
    "abs",
    "amax",
    "amin",
    "arange",
    "argmax",
    "attention",
    "cat",
    "clamp",
    "cross_entropy",
    "dropout",
    "embedding",
    "erf",
    "exp",
    "full",
    "geglu",
    "gelu",
    "layer_norm",
    "linear",
    "log",
    "log1p",
    "log_softmax",
    "logsumexp",
    "matmul",
    "maximum",
    "mean",
    "minimum",
    "reciprocal",
    "relu",
    "rms_norm",
    "round",
    "rsqrt",
    "sigmoid",
    "silu",
    "softmax",
    "sqrt",
    "stack",
    "std",
    "stop_gradient",
    "sum",
    "swiglu",
    "tanh",
    "trace_op",
    "var",
    "where",
]


def trace_op(name: str, attributes: Mapping[str, Any], operands: Sequence[Any]) -> Any:
    """An op of the catalogue on values: adds what it computes to the graph, and gives its result or results.

    `name` is that of a `Program` (`"norm_act"`, or `"norm_act norm=rms"`), `operands` are in its order.
    """
    from deuteron._call import program

    written = [f"{key}={str(value).lower()}" for key, value in attributes.items() if value is not None]
    results = _expand(program(" ".join([name, *written])), operands)
    return results[0] if len(results) == 1 else tuple(results)


def _expand(program: Program, operands: Sequence[Any]) -> Sequence[Value]:
    from deuteron.trace.catalog import expand

    return expand(program, operands)


def _announce() -> None:
    """Registers this package as the tracer of calls of programs with values."""
    from deuteron import _call

    _call.traced = (Value, _expand)


_announce()

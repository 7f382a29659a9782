"""Maps functions of torch and NumPy on values to ours.

torch and NumPy pass a call on a value to us by their own protocols, so neither is imported before the traced function
has done so.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

from deuteron import trace
from deuteron.trace import elementwise, functional, left, losses, views
from deuteron.trace.emit import as_value, axis_of, same_device
from deuteron.trace.value import Value

Handler = Callable[..., Any]

_NOT_THERE = "a fused function cannot call it; deuteron.trace lists the supported functions"

_NUMPY_ARGUMENTS = {"a": "x", "arr": "x", "axis": "dim", "keepdims": "keepdim"}
_TORCH_ARGUMENTS = {"input": "x", "self": "x", "tensor": "x", "axis": "dim", "keepdims": "keepdim"}


def torch_call(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """A function of torch with a value among its arguments."""
    handler = _torch_table().get(function)
    if handler is None and left.is_left(function):
        return left.call(function, arguments, keywords)
    if handler is None:
        import torch

        name = torch.overrides.resolve_name(function) or getattr(function, "__name__", str(function))
        for argument in (*arguments, *keywords.values()):
            if isinstance(argument, torch.Tensor):
                raise TypeError(f"{name}: got a tensor that is not an argument of the fused function; pass it as one")
        raise TypeError(f"{name}: {_NOT_THERE}")
    return _call(handler, arguments, keywords, _TORCH_ARGUMENTS)


def torch_method(name: str, x: Value) -> Optional[Callable[..., Any]]:
    """A method of torch's tensors that a value has because there is a function of its name."""
    handler = _TORCH.get(name) if hasattr(_torch_tensor(), name) else None
    if handler is None:
        return left.method(name, x)  # type: ignore[no-any-return]
    return lambda *words, **named: _call(handler, (x, *words), named, _TORCH_ARGUMENTS)


def _torch_tensor() -> Any:
    import torch

    return torch.Tensor


def numpy_ufunc(function: Any, method: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """A universal function of NumPy with a value among its arguments."""
    handler = _UFUNCS.get(function.__name__)
    if handler is None or method != "__call__":
        way = "" if method == "__call__" else f".{method}"
        raise TypeError(f"numpy.{function.__name__}{way}: {_NOT_THERE}")
    return _call(handler, arguments, keywords, _NUMPY_ARGUMENTS)


def numpy_call(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Any other function of NumPy with a value among its arguments."""
    handler = _NUMPY.get(function.__name__)
    if handler is None:
        raise TypeError(f"numpy.{function.__name__}: {_NOT_THERE}")
    return _call(handler, arguments, keywords, _NUMPY_ARGUMENTS)


def _call(handler: Handler, arguments: Sequence[Any], keywords: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    named = {names.get(name, name): value for name, value in keywords.items() if name != "_stacklevel"}
    for word in ("out", "inplace"):
        if named.pop(word, None):
            raise TypeError(f"{handler.__name__}: a fused function changes nothing in place; leave out `{word}`")
    return handler(*arguments, **named)


# What is called otherwise than ours.


def add(x: Any, other: Any, alpha: Any = 1) -> Value:
    """`x + alpha * other`, with broadcasting."""
    return elementwise.arithmetic("add", x, other if alpha == 1 else as_value(other, "add") * alpha)


def _sub(x: Any, other: Any, alpha: Any = 1) -> Value:
    other = other if alpha == 1 else as_value(other, "sub") * alpha
    return elementwise.arithmetic("sub", x, other)


def _rsub(x: Any, other: Any) -> Value:
    return _sub(other, x)


def _mul(x: Any, other: Any) -> Value:
    return elementwise.arithmetic("mul", x, other)


def _div(x: Any, other: Any, rounding_mode: Any = None) -> Value:
    if rounding_mode is not None:
        raise TypeError("div: a fused function cannot round quotients; expected rounding_mode=None")
    return elementwise.arithmetic("div", x, other)


def _rdiv(x: Any, other: Any) -> Value:
    return _div(other, x)


def _compare(op: str) -> Handler:
    def handler(x: Any, other: Any) -> Value:
        return elementwise.compare(op, x, other)

    handler.__name__ = op
    return handler


def _logical(op: str) -> Handler:
    def handler(x: Any, other: Any = None) -> Value:
        truths = [elementwise.cast(as_value(operand, op), "bool") for operand in (x, other) if operand is not None]
        return elementwise.logical(op, *truths)

    handler.__name__ = f"logical_{op}"
    return handler


def _bitwise(op: str) -> Handler:
    """Bits of truth values alone."""

    def handler(x: Any, other: Any = None) -> Value:
        return elementwise.logical(op, x, other)

    handler.__name__ = f"bitwise_{op}"
    return handler


def _matmul(x: Any, other: Any) -> Value:
    return trace.matmul(x, other)


def _rmatmul(x: Any, other: Any) -> Value:
    return trace.matmul(other, x)


def addmm(bias: Any, x: Any, weight: Any, beta: float = 1, alpha: float = 1) -> Value:
    """`beta * bias + alpha * (x @ weight)`; `x [n, k]`, `weight [k, m]`, `bias [m]` or `[n, m]`."""
    shift = as_value(bias, "addmm")
    if (beta, alpha) != (1, 1):
        return shift * beta + trace.matmul(x, weight) * alpha
    if shift.ndim == 1:
        return trace.linear(x, weight, shift, transposed=False)
    return shift + trace.matmul(x, weight)


def _maximum(x: Any, other: Any) -> Value:
    return trace.maximum(x, other)


def _minimum(x: Any, other: Any) -> Value:
    return trace.minimum(x, other)


def _max(x: Any, dim: Any = None, keepdim: bool = False, other: Any = None) -> Any:
    return as_value(x, "max").max(dim if other is None else other, keepdim)


def _min(x: Any, dim: Any = None, keepdim: bool = False, other: Any = None) -> Any:
    return as_value(x, "min").min(dim if other is None else other, keepdim)


def _where(condition: Any, x: Any = None, other: Any = None, y: Any = None) -> Value:
    other = y if other is None else other
    if x is None or other is None:
        raise TypeError("where: expected a condition and two values; places are not known when a function is traced")
    return trace.where(condition, x, other)


def _cat(tensors: Any = None, dim: int = 0, **others: Any) -> Value:
    return trace.cat(others.get("tensors", tensors), dim)


def _stack(tensors: Any, dim: int = 0) -> Value:
    return trace.stack(tensors, dim)


def method(name: str) -> Handler:
    """The function that calls the method of this name of a value."""
    def handler(x: Any, *arguments: Any, **keywords: Any) -> Any:
        return getattr(as_value(x, name), name)(*arguments, **keywords)

    handler.__name__ = name
    return handler


def _dropout(x: Any, p: float = 0.5, training: bool = True, train: Optional[bool] = None) -> Value:
    if p == 0 or not (training if train is None else train):
        return as_value(x, "dropout")
    raise TypeError(
        "dropout: a fused function needs a seed, an i32 tensor among its arguments; "
        "use deuteron.trace.dropout(x, p, seed)"
    )


def _last_axes(x: Value, normalized_shape: Sequence[int], op: str) -> int:
    """How many axes a norm is over."""
    sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not sizes or x.shape[x.ndim - len(sizes) :] != sizes:
        raise ValueError(f"{op}: expected the last sizes of {x!r}, got normalized_shape={list(sizes)}")
    return len(sizes)


def _flat(weight: Any, op: str) -> Any:
    return None if weight is None else views.reshape(as_value(weight, op), [-1])


def layer_norm(
    x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable: bool = True
) -> Value:
    """`torch.nn.functional.layer_norm`: over the last axes."""
    x = as_value(x, "layer_norm")
    axes = _last_axes(x, normalized_shape, "layer_norm")
    rows = x.flatten(x.ndim - axes) if axes > 1 else x
    y = trace.layer_norm(rows, _flat(weight, "layer_norm"), _flat(bias, "layer_norm"), eps)
    return views.reshape(y, x.shape)


def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: Optional[float] = None) -> Value:
    """`torch.nn.functional.rms_norm`: over the last axes, with torch's epsilon for the dtype where none is given."""
    x = as_value(x, "rms_norm")
    axes = _last_axes(x, normalized_shape, "rms_norm")
    rows = x.flatten(x.ndim - axes) if axes > 1 else x
    if eps is None:
        from deuteron._torch import rms_epsilon

        eps = rms_epsilon(x.dtype)
    return views.reshape(trace.rms_norm(rows, _flat(weight, "rms_norm"), eps), x.shape)


def _normalized(name: str) -> Handler:
    def handler(x: Any, dim: Optional[int] = None, dtype: Any = None) -> Any:
        if dim is None:
            raise ValueError(f"{name}: expected dim, the axis that sums to 1")
        return getattr(trace, name)(x, dim, dtype)

    handler.__name__ = f"_{name}"
    return handler


def _embedding(
    indices: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        raise TypeError("embedding: expected indices and a weight; no padding_idx, max_norm, or scaled gradients")
    return trace.embedding(indices, weight)


def sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Value:
    """`torch.nn.functional.scaled_dot_product_attention`, without dropout."""
    if dropout_p:
        raise TypeError(
            "scaled_dot_product_attention: a fused function needs a seed for its dropout; "
            "use deuteron.trace.attention(.., p=p, seed=seed)"
        )
    heads = [as_value(x, "attention").shape[-3:-2] for x in (query, key)]
    if heads[0] != heads[1] and heads[1] != (1,) and not enable_gqa:
        raise ValueError("scaled_dot_product_attention: expected equal heads of query and key, or enable_gqa=True")
    return trace.attention(query, key, value, attn_mask, is_causal, scale)


def softplus(x: Any, beta: float = 1, threshold: float = 20) -> Value:
    """`log(1 + exp(beta * x)) / beta`, and `x` itself where `beta * x` is above `threshold`."""
    x = as_value(x, "softplus")
    wide = elementwise.cast(x, "f32") * beta
    is_linear = wide > threshold
    smooth = trace.log1p(trace.exp(trace.where(is_linear, 0.0, wide)))
    return elementwise.cast(trace.where(is_linear, wide, smooth) * (1 / beta), x._word)


def leaky_relu(x: Any, negative_slope: float = 0.01) -> Value:
    """`x` above 0, `negative_slope * x` elsewhere."""
    x = as_value(x, "leaky_relu")
    return trace.where(x > 0, x, x * negative_slope)


def _clamp_min(x: Any, min: Any) -> Value:
    return trace.clamp(x, min=min)


def _clamp_max(x: Any, max: Any) -> Value:
    return trace.clamp(x, max=max)


def _clip(x: Any, min: Any = None, max: Any = None, a_min: Any = None, a_max: Any = None) -> Value:
    return trace.clamp(x, a_min if min is None else min, a_max if max is None else max)


def zeros_like(x: Any, dtype: Any = None, **others: Any) -> Value:
    """Zeros of the shape of `x`, and of its dtype unless one is given."""
    return full_like(x, 0.0, dtype, **others)


def ones_like(x: Any, dtype: Any = None, **others: Any) -> Value:
    """Ones of the shape of `x`, and of its dtype unless one is given."""
    return full_like(x, 1.0, dtype, **others)


def full_like(x: Any, fill_value: Any, dtype: Any = None, **others: Any) -> Value:
    """`fill_value` in the shape of `x`, and in its dtype unless one is given."""
    x = as_value(x, "full_like")
    same_device(x, others, "full_like")
    return trace.full(x.shape, fill_value, x.dtype if dtype is None else dtype, like=x)


def movedim(x: Any, source: int, destination: int) -> Value:
    """A view of `x` with the axis `source` moved to the place `destination`."""
    x = as_value(x, "movedim")
    source, destination = axis_of(x, source, "movedim"), axis_of(x, destination, "movedim")
    order = [axis for axis in range(x.ndim) if axis != source]
    order.insert(destination, source)
    return views.permute(x, order)


def _transpose(x: Any, axes: Any = None) -> Value:
    return as_value(x, "transpose").transpose(*(() if axes is None else (tuple(axes),)))


def _reshape(x: Any, shape: Any = None, newshape: Any = None) -> Value:
    return as_value(x, "reshape").reshape(shape if newshape is None else newshape)


def tril(x: Any, diagonal: int = 0) -> Value:
    """`x` with zeros above the diagonal number `diagonal` of its last two axes."""
    return _triangle(x, diagonal, "le")


def triu(x: Any, diagonal: int = 0) -> Value:
    """`x` with zeros below the diagonal number `diagonal` of its last two axes."""
    return _triangle(x, diagonal, "ge")


def _triangle(x: Any, diagonal: int, keep: str) -> Value:
    x = as_value(x, "tril")
    rows, columns = x.shape[-2:]
    row = elementwise.cast(trace.arange(rows, like=x), "f32").unsqueeze(1) + float(diagonal)
    kept = elementwise.compare(keep, elementwise.cast(trace.arange(columns, like=x), "f32"), row)
    return trace.where(kept, x, 0 if x._word == "i32" else 0.0) if x._word != "bool" else x & kept


def pad(x: Any, pad: Sequence[int], mode: Any = "constant", value: Any = None) -> Value:
    """`torch.nn.functional.pad`: sizes before and after each axis, the last axis first. Negative sizes cut."""
    y = as_value(x, "pad")
    if isinstance(mode, (int, float)):
        mode, value = "constant", mode
    if mode != "constant" or len(pad) % 2 or len(pad) > 2 * y.ndim:
        raise ValueError('pad: expected mode="constant" and two sizes for each of the last axes')
    for place, axis in zip(range(0, len(pad), 2), range(y.ndim - 1, -1, -1)):
        before, after = pad[place], pad[place + 1]
        start = max(-before, 0)
        y = views.cut(y, axis, start, y.shape[axis] - start - max(-after, 0))
        edges = [
            [trace.full((*y.shape[:axis], size, *y.shape[axis + 1 :]), value or 0, y._word, like=y)] if size > 0 else []
            for size in (before, after)
        ]
        y = trace.cat([*edges[0], y, *edges[1]], axis)
    return y


ELEMENTWISE: Mapping[str, Handler] = {
    "exp": trace.exp,
    "log": trace.log,
    "log1p": trace.log1p,
    "sqrt": trace.sqrt,
    "rsqrt": trace.rsqrt,
    "reciprocal": trace.reciprocal,
    "square": lambda x: elementwise.power(x, 2),
    "pow": lambda x, exponent: elementwise.power(x, exponent),
    "tanh": trace.tanh,
    "erf": trace.erf,
    "sigmoid": trace.sigmoid,
    "abs": trace.abs,
    "absolute": trace.abs,
    "neg": method("neg"),
    "negative": method("neg"),
    "round": trace.round,
    "add": add,
    "sub": _sub,
    "subtract": _sub,
    "rsub": _rsub,
    "mul": _mul,
    "multiply": _mul,
    "div": _div,
    "divide": _div,
    "true_divide": _div,
    "maximum": _maximum,
    "minimum": _minimum,
    "lt": _compare("lt"),
    "less": _compare("lt"),
    "le": _compare("le"),
    "less_equal": _compare("le"),
    "gt": _compare("gt"),
    "greater": _compare("gt"),
    "ge": _compare("ge"),
    "greater_equal": _compare("ge"),
    "eq": _compare("eq"),
    "ne": _compare("ne"),
    "not_equal": _compare("ne"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "bitwise_and": _bitwise("and"),
    "bitwise_or": _bitwise("or"),
    "bitwise_xor": _bitwise("xor"),
    "bitwise_not": _bitwise("not"),
    "clamp": trace.clamp,
    "clip": _clip,
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "where": _where,
    "matmul": _matmul,
}

_TORCH: Mapping[str, Handler] = {
    **ELEMENTWISE,
    **functional.TORCH,
    **losses.TORCH,
    "__add__": add,
    "__radd__": add,
    "__sub__": _sub,
    "__rsub__": _rsub,
    "__mul__": _mul,
    "__rmul__": _mul,
    "__truediv__": _div,
    "__rtruediv__": _rdiv,
    "__matmul__": _matmul,
    "__rmatmul__": _rmatmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": addmm,
    "linear": lambda x, weight, bias=None: trace.linear(x, weight, bias),
    "sum": trace.sum,
    "mean": trace.mean,
    "amax": trace.amax,
    "amin": trace.amin,
    "max": _max,
    "min": _min,
    "argmax": trace.argmax,
    "softmax": _normalized("softmax"),
    "log_softmax": _normalized("log_softmax"),
    "logsumexp": trace.logsumexp,
    "gelu": trace.gelu,
    "silu": trace.silu,
    "relu": trace.relu,
    "softplus": softplus,
    "leaky_relu": leaky_relu,
    "dropout": _dropout,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "embedding": _embedding,
    "scaled_dot_product_attention": sdpa,
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
    "stack": _stack,
    "zeros_like": zeros_like,
    "ones_like": ones_like,
    "full_like": full_like,
    "movedim": movedim,
    "tril": tril,
    "triu": triu,
    "pad": pad,
    **{
        name: method(name)
        for name in (
            *("reshape", "transpose", "swapaxes", "permute", "flatten", "unflatten", "unsqueeze", "squeeze", "t"),
            *("narrow", "select", "split", "chunk", "unbind", "clone", "detach", "broadcast_to", "masked_fill"),
            *("var", "std", "numel", "is_floating_point", "ravel"),
        )
    },
}

_UFUNCS: Mapping[str, Handler] = {
    **ELEMENTWISE,
    "power": elementwise.power,
    "equal": _compare("eq"),
    "rint": trace.round,
}

_NUMPY: Mapping[str, Handler] = {
    "where": _where,
    "clip": _clip,
    "sum": trace.sum,
    "mean": trace.mean,
    "max": trace.amax,
    "amax": trace.amax,
    "min": trace.amin,
    "amin": trace.amin,
    "argmax": trace.argmax,
    "var": method("var"),
    "std": method("std"),
    "concatenate": _cat,
    "stack": _stack,
    "reshape": _reshape,
    "transpose": _transpose,
    "swapaxes": lambda x, axis1, axis2: as_value(x, "swapaxes").transpose(axis1, axis2),
    "squeeze": method("squeeze"),
    "expand_dims": lambda x, dim: as_value(x, "expand_dims").unsqueeze(dim),
    "broadcast_to": method("broadcast_to"),
    "moveaxis": movedim,
    "tril": lambda x, k=0: tril(x, k),
    "triu": lambda x, k=0: triu(x, k),
    "zeros_like": zeros_like,
    "ones_like": ones_like,
    "full_like": full_like,
    "round": trace.round,
}


@functools.lru_cache(maxsize=None)
def _torch_table() -> Dict[Any, Handler]:
    """By the function itself: torch has several under one name."""
    import torch
    import torch.nn.functional

    # Of a Tensor only what an operator with a tensor on its left ends in; other methods of values are their own.
    spaces: Tuple[Any, ...] = (torch, torch.nn.functional, torch.special, torch.linalg, torch.Tensor)
    table = {}
    for name, handler in _TORCH.items():
        for space in spaces:
            function = getattr(space, name, None)
            if function is not None:
                table[function] = handler
    table[torch.linalg.norm] = functional.linalg_norm
    return table

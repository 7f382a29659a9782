"""Operations of ATen on values, by their names there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Sequence, Tuple

import torch

from deuteron import trace as ours
from deuteron.trace import elementwise, tables, views
from deuteron.trace.emit import as_value, axis_of
from deuteron.trace.value import Value

if TYPE_CHECKING:
    from deuteron._aten import Translator

Handler = Callable[..., Any]


def short_name(target: Any) -> str:
    """`add` for `aten.add.Tensor`; empty for functions that are not ATen's."""
    space, _, name = target._schema.name.partition("::") if hasattr(target, "_schema") else ("", "", "")
    return name if space == "aten" else ""


def _to(x: Any, *arguments: Any, **keywords: Any) -> Value:
    given = [argument for argument in (*arguments, *keywords.values())]
    dtypes = [argument for argument in given if isinstance(argument, (torch.dtype, Value))]
    return as_value(x, "to").to(_plain(dtypes[0])) if dtypes else x


def _plain(dtype: Any) -> Any:
    return torch.float32 if dtype is torch.float64 else dtype


def _identity(x: Any, *_arguments: Any, **_keywords: Any) -> Any:
    return x


def _nothing(*_arguments: Any, **_keywords: Any) -> None:
    return None


def _slice(x: Value, dim: int = 0, start: Optional[int] = None, end: Optional[int] = None, step: int = 1) -> Value:
    axis = axis_of(x, dim, "slice")
    return x[(slice(None),) * axis + (slice(start, end, step),)]


def _repeat(x: Value, repeats: Sequence[int]) -> Value:
    shape = (1,) * (len(repeats) - x.ndim) + x.shape
    apart = views.reshape(x, [size for pair in zip([1] * len(shape), shape) for size in pair])
    wide = views.broadcast(apart, [size for pair in zip(repeats, shape) for size in pair])
    return views.reshape(wide, [count * size for count, size in zip(repeats, shape)])


def _reduced(function: Handler) -> Handler:
    """A reduction of ours; no axes are all of them."""
    return lambda x, dim=None, *others, **keywords: function(x, dim or None, *others, **keywords)


def _normalized(function: Handler) -> Handler:
    """A softmax of ours: `softmax.int` has a dtype and `_softmax` a flag after the axis."""

    def handler(x: Any, dim: int, *others: Any, dtype: Any = None) -> Any:
        given = [other for other in others if isinstance(other, torch.dtype)]
        return function(x, dim, given[0] if given else dtype)

    return handler


def _native_layer_norm(x: Value, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Tuple[Any, ...]:
    y = tables.layer_norm(x, shape, weight, bias, eps)
    node = y._node
    if node.op != "layer_norm":
        raise ValueError("expected a norm over the last axis")
    return y, Value(y._trace, node, 1), Value(y._trace, node, 2)


def _index_select(x: Value, dim: int, indices: Value) -> Value:
    if axis_of(x, dim, "index_select") != 0:
        raise ValueError("expected indices of the first axis")
    return x[indices]


def _extreme(name: str) -> Handler:
    """Values and places as a plain tuple, as ATen has them."""

    def handler(x: Value, *arguments: Any, **keywords: Any) -> Any:
        found = getattr(x, name)(*arguments, **keywords)
        return tuple(found) if isinstance(found, tuple) else found

    return handler


# Those that see constants as they are.


def counted(tensor: Any) -> Tuple[Optional[int], int]:
    """The axis along which a tensor counts `start, start + 1, ..` and is the same along all others, and the start."""
    if tensor.is_floating_point() or tensor.dtype is torch.bool or tensor.numel() == 0:
        return None, 0
    for axis, size in enumerate(tensor.shape):
        if size == 1 and tensor.numel() > 1:
            continue
        line = tensor
        for other in range(tensor.dim()):
            line = line.narrow(other, 0, 1) if other != axis else line
        start = int(line.flatten()[0])
        count = torch.arange(start, start + size, dtype=tensor.dtype)
        if start >= 0 and bool((tensor == count.view(-1, *[1] * (tensor.dim() - 1 - axis))).all()):
            return axis, start
    return None, 0


def _embedding(t: Translator, weight: Any, indices: Any, *_others: Any, **_named: Any) -> Value:
    """Rows in order are a slice of the table."""
    weight = t.lift(weight)
    if isinstance(indices, torch.Tensor):
        axis, start = counted(indices)
        if axis is not None:
            size = indices.shape[axis]
            rows = views.cut(weight, 0, start, size)
            line = views.reshape(rows, (size, *[1] * (indices.dim() - 1 - axis), weight.shape[1]))
            return views.broadcast(line, (*indices.shape, weight.shape[1]))
    return ours.embedding(t.lift(indices), weight)


def _index(t: Translator, x: Any, indices: Sequence[Any]) -> Value:
    """One value of indices for the first axis, or axes that are counted through, each in a place of its own."""
    x = as_value(t.lift(x), "index")
    if len(indices) == 1 and indices[0] is not None:
        return views.item(x, t.lift(indices[0]))
    if len(indices) != x.ndim or not all(isinstance(index, torch.Tensor) for index in indices):
        raise ValueError("expected indices of the first axis alone")
    shape = elementwise.broadcast_shape("index", [tuple(index.shape) for index in indices])
    places, apart = [], [1] * len(shape)
    for axis, index in enumerate(indices):
        along, start = counted(index)
        if along is None:
            raise ValueError("expected indices in order")
        places.append(along + len(shape) - index.dim())
        apart[places[-1]] = index.shape[along]
        x = views.cut(x, axis, start, index.shape[along])
    if len(set(places)) != len(places):
        raise ValueError("expected indices of different places")
    x = views.permute(x, sorted(range(x.ndim), key=lambda axis: places[axis]))
    return views.broadcast(views.reshape(x, apart), shape)


def _dropout(t: Translator, x: Value, p: float, train: bool = True) -> Value:
    return ours.dropout(x, p, t.seed()) if train and p > 0 else x


def _native_dropout(t: Translator, x: Value, p: float, train: Optional[bool] = True) -> Tuple[Any, ...]:
    return (ours.dropout(x, p, t.seed()) if train is not False and p > 0 else x), None


def _sdpa(
    t: Translator,
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Value:
    q, k, v = t.lift((q, k, v))
    kind, mask = mask_kind(attn_mask, is_causal)
    seed = t.seed() if dropout_p else None
    return ours.attention(q, k, v, t.mask(mask), kind != "full", scale, dropout_p, seed, from_end=kind == "end")


def mask_kind(mask: Any, causal: bool = False) -> Tuple[str, Any]:
    """`full`, `causal` (from the start) or `end` (from the end), and the mask operand if there is one."""
    if not isinstance(mask, torch.Tensor):
        return ("causal" if causal else "full"), mask
    seen = mask if mask.dtype is torch.bool else mask > -1e30
    exact = mask.dtype is torch.bool or bool((mask.masked_fill(~seen, 0.0) == 0).all())
    if not exact or mask.dim() < 2:
        return "full", mask
    if bool(seen.all()):
        return "full", None
    rows, columns = mask.shape[-2:]
    triangle = torch.ones(rows, columns, dtype=torch.bool)
    if bool((seen == triangle.tril(columns - rows)).all()):
        return "end", None
    return ("causal", None) if bool((seen == triangle.tril()).all()) else ("full", mask)


def _cross_entropy_loss(
    x: Value, target: Value, weight: Any = None, reduction: int = 1, ignore_index: int = -100, smoothing: float = 0.0
) -> Value:
    if weight is not None or reduction != 1 or smoothing or x.ndim != 2:
        raise ValueError("expected logits [rows, classes], the mean over rows, no weight and no smoothing")
    return ours.cross_entropy(x, target, ignore_index)


RAW: Dict[str, Handler] = {
    "embedding": _embedding,
    "index": _index,
    "dropout": _dropout,
    "native_dropout": _native_dropout,
    "scaled_dot_product_attention": _sdpa,
}

HANDLERS: Dict[str, Handler] = {
    **tables.ELEMENTWISE,
    **RAW,
    "__and__": tables.ELEMENTWISE["bitwise_and"],
    "__or__": tables.ELEMENTWISE["bitwise_or"],
    "mm": tables.ELEMENTWISE["matmul"],
    "bmm": tables.ELEMENTWISE["matmul"],
    "addmm": tables.addmm,
    "linear": ours.linear,
    "gelu": ours.gelu,
    "silu": ours.silu,
    "relu": ours.relu,
    "softplus": tables.softplus,
    "leaky_relu": tables.leaky_relu,
    "layer_norm": tables.layer_norm,
    "native_layer_norm": _native_layer_norm,
    "rms_norm": tables.rms_norm,
    "softmax": _normalized(ours.softmax),
    "_softmax": _normalized(ours.softmax),
    "log_softmax": _normalized(ours.log_softmax),
    "_log_softmax": _normalized(ours.log_softmax),
    "logsumexp": ours.logsumexp,
    "cross_entropy_loss": _cross_entropy_loss,
    "sum": _reduced(ours.sum),
    "mean": _reduced(ours.mean),
    "amax": _reduced(ours.amax),
    "amin": _reduced(ours.amin),
    "max": _extreme("max"),
    "min": _extreme("min"),
    "argmax": ours.argmax,
    "cat": ours.cat,
    "stack": ours.stack,
    "slice": _slice,
    "repeat": _repeat,
    "constant_pad_nd": tables.pad,
    "index_select": _index_select,
    "full_like": tables.full_like,
    "zeros_like": tables.zeros_like,
    "ones_like": tables.ones_like,
    "movedim": tables.movedim,
    "tril": tables.tril,
    "triu": tables.triu,
    "to": _to,
    "_to_copy": _to,
    "type_as": _to,
    "detach": ours.stop_gradient,
    **{name: _identity for name in ("alias", "clone", "contiguous", "lift_fresh_copy", "lift_fresh", "positive")},
    **{name: _nothing for name in ("_assert_tensor_metadata", "_assert_async", "_assert_scalar")},
    **{
        name: tables.method(method)
        for name, method in (
            *(("view", "reshape"), ("reshape", "reshape"), ("_unsafe_view", "reshape"), ("view_as", "view_as")),
            *(("permute", "permute"), ("transpose", "transpose"), ("t", "t"), ("numpy_T", "t"), ("expand", "expand")),
            *(("expand_as", "expand_as"), ("unsqueeze", "unsqueeze"), ("squeeze", "squeeze"), ("flatten", "flatten")),
            *(("unflatten", "unflatten"), ("narrow", "narrow"), ("select", "select"), ("chunk", "chunk")),
            *(("unbind", "unbind"), ("split", "split"), ("split_with_sizes", "split"), ("unsafe_split", "split")),
            *(("unsafe_chunk", "chunk"), ("masked_fill", "masked_fill"), ("var", "var"), ("std", "std")),
        )
    },
}


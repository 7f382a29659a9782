"""The catalogue of fused ops as functions.

Each takes tensors of PyTorch (CPU or CUDA, with gradients), arrays of NumPy, or objects with `__dlpack__` on the CPU, and gives
results of the same kind. Leading axes may have any strides. Inside a function under `deuteron.fuse` they add to its graph.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Optional, Sequence, Union

from . import _call
from ._native import Program

Tensor = Any
"""A tensor of PyTorch, an array of NumPy, or an object with `__dlpack__`."""

__all__ = [
    "act",
    "mul_add_act",
    "add_act",
    "bias_act",
    "act_dropout",
    "act_dropout_add",
    "bias_dropout_add",
    "swiglu",
    "geglu",
    "layer_norm",
    "rms_norm",
    "norm_act",
    "norm_bias_act",
    "add_norm",
    "dropout_add_norm",
    "norm_quantize",
    "softmax",
    "attention_scores",
    "embed_norm",
    "linear_act",
    "norm_linear",
    "qkv",
    "ffn",
    "attention",
    "attention_add_norm",
    "attention_block",
    "linear_cross_entropy",
    "moe_int8",
]


def _run(name: str, operands: Sequence[Optional[Tensor]], **attributes: Any) -> Any:
    """Runs an op of the catalogue, or adds it to the graph that is being traced. Operands that it may be without are None then. One
    result comes alone, several as a tuple."""
    if _call.is_compiling():
        results = _call.run(_text(name, attributes), operands)
    else:
        # A function names its attributes in one order, so their values tell programs apart.
        key = (name, *attributes.values())
        try:
            known = _PROGRAMS.get(key)
        except TypeError:
            raise TypeError(f"{name}: expected words and numbers as attributes, got {attributes}") from None
        if known is None:
            known = _PROGRAMS[key] = _call.program(_text(name, attributes))
        results = known(*operands)
    return results[0] if len(results) == 1 else tuple(results)


_PROGRAMS: dict[tuple[Any, ...], Program] = {}


def _text(name: str, attributes: dict[str, Any]) -> str:
    text = name
    for key, value in attributes.items():
        if isinstance(value, str) and not value.isidentifier():
            raise ValueError(f"{name}: expected one word or a number for {key}, got {value!r}")
        text += f" {key}={str(value).lower() if isinstance(value, bool) else value}"
    return text


def _norm(b: Optional[Tensor]) -> str:
    return "rms" if b is None else "layer"


def _probability(name: str, p: float, training: bool) -> float:
    if not isinstance(p, (int, float)) or isinstance(p, bool):
        raise TypeError(f"{name}: expected a number for p, got {type(p).__name__}")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name}: expected p of at least 0 and below 1, got {p}")
    return float(p) if training else 0.0


def _seed(name: str, like: Tensor, seed: Union[None, int, Tensor], p: float) -> Tensor:
    """The seed as a tensor of one i32 beside another tensor. Where none is given, the generator of the library draws one."""
    if seed is not None and not isinstance(seed, int):
        return seed
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        if p == 0.0:
            # Nobody reads it.
            return like.new_empty((), dtype=torch.int32)
        if seed is None:
            # A compiler keeps an eye on what it read, and loading `_torch` changes `_call.draw`.
            draw = None if _call.is_compiling() else _call.draw
            return (draw or _load_draw())(like)
        return torch.full((), _wrapped(seed), dtype=torch.int32, device=like.device)
    if _call.traced is not None and isinstance(like, _call.traced[0]):
        if seed is None and p > 0.0:
            raise TypeError(f"{name}: expected a seed that is an argument of the function, got none; `fuse` draws none")
        from . import trace

        value: Any = like
        return trace.full((), _wrapped(seed or 0), "i32", like=value)
    import numpy

    drawn = numpy.random.randint(-(2**31), 2**31 - 1) if seed is None and p > 0.0 else _wrapped(seed or 0)
    return numpy.asarray(drawn, dtype=numpy.int32)


def _load_draw() -> Callable[[Tensor], Tensor]:
    from ._torch import draw

    return draw


def _wrapped(seed: int) -> int:
    """A whole number as an i32 of the same low bits."""
    return (seed + 2**31) % 2**32 - 2**31


def _shape(name: str, label: str, operand: Tensor) -> Sequence[int]:
    """The sizes of an operand that is looked at before the engine does."""
    shape = getattr(operand, "shape", None)
    if shape is None:
        raise TypeError(f"{name}: `{label}`: expected a tensor, got {type(operand).__name__}")
    return shape  # type: ignore[no-any-return]


def _words_alone(name: str, mask: Optional[str]) -> str:
    """The word of a mask where none can be added."""
    if mask is None or isinstance(mask, str):
        return _mask(name, mask)[0]
    raise TypeError(f"{name}: expected a mask that is None, 'full' or 'causal', got {type(mask).__name__}")


def _mask(name: str, mask: Union[None, str, Tensor]) -> tuple[str, list[Tensor]]:
    """The word of a mask, and the operand where it is added to the scores."""
    if mask is None or isinstance(mask, str):
        word = "full" if mask is None else mask
        if word not in ("full", "causal"):
            raise ValueError(f"{name}: expected a mask that is None, 'full', 'causal' or a tensor to add, got {mask!r}")
        return word, []
    return "additive", [mask]


def act(x: Tensor, act: str = "gelu") -> Tensor:
    """`act(x)`; `act` is `gelu` (tanh), `gelu_erf`, `silu` or `relu`, here and below.

    >>> import numpy, deuteron
    >>> deuteron.act(numpy.array([[-1.0, 2.0]], dtype="float32"), act="relu")
    array([[0., 2.]], dtype=float32)
    """
    return _run("act", [x], act=act)


def mul_add_act(x: Tensor, w: Tensor, b: Tensor, act: str = "gelu") -> Tensor:
    """`act(x * w + b)`, elementwise; operands repeat where their size is 1."""
    return _run("mul_add_act", [x, w, b], act=act)


def add_act(x: Tensor, r: Tensor, act: str = "gelu") -> Tensor:
    """`act(x + r)`

    >>> import numpy, deuteron
    >>> x = numpy.array([[-3.0, 1.0]], dtype="float32")
    >>> deuteron.add_act(x, x, act="relu")
    array([[0., 2.]], dtype=float32)
    """
    return _run("add_act", [x, r], act=act)


def bias_act(x: Tensor, b: Tensor, act: str = "gelu") -> Tensor:
    """`act(x + b)`, `b` per column."""
    return _run("bias_act", [x, b], act=act)


def act_dropout(
    x: Tensor, p: float = 0.1, seed: Union[None, int, Tensor] = None, act: str = "gelu", training: bool = True
) -> Tensor:
    """`dropout(act(x))`. The same seed drops the same elements, on the CPU and on a GPU; without one, the library's generator
    draws it. Without `training` nothing is dropped."""
    p = _probability("act_dropout", p, training)
    return _run("act_dropout", [x, _seed("act_dropout", x, seed, p)], act=act, p=p)


def act_dropout_add(
    x: Tensor,
    r: Tensor,
    p: float = 0.1,
    seed: Union[None, int, Tensor] = None,
    act: str = "gelu",
    training: bool = True,
) -> Tensor:
    """`dropout(act(x)) + r`"""
    p = _probability("act_dropout_add", p, training)
    return _run("act_dropout_add", [x, r, _seed("act_dropout_add", x, seed, p)], act=act, p=p)


def bias_dropout_add(
    x: Tensor,
    b: Tensor,
    r: Tensor,
    p: float = 0.1,
    seed: Union[None, int, Tensor] = None,
    training: bool = True,
) -> Tensor:
    """`dropout(x + b) + r`, `b` per column."""
    p = _probability("bias_dropout_add", p, training)
    return _run("bias_dropout_add", [x, b, r, _seed("bias_dropout_add", x, seed, p)], p=p)


def swiglu(x: Tensor, g: Optional[Tensor] = None) -> Tensor:
    """`silu(x) * g`; without `g`, `x` and `g` are the halves of one `[.., 2h]` tensor."""
    return _run("swiglu", (x, g), packed=g is None)


def geglu(x: Tensor, g: Optional[Tensor] = None, act: str = "gelu") -> Tensor:
    """`gelu(x) * g`; without `g`, `x` and `g` are the halves of one `[.., 2h]` tensor."""
    return _run("geglu", (x, g), act=act, packed=g is None)


def layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * w + b` over the last axis."""
    return _run("layer_norm", [x, w, b], eps=eps)


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * w` over the last axis."""
    return _run("rms_norm", [x, w], eps=eps)


def norm_act(x: Tensor, w: Tensor, b: Optional[Tensor] = None, act: str = "gelu", eps: float = 1e-5) -> Tensor:
    """`act(norm(x))`: a layer norm with `b`, an RMS norm without, here and below.

    >>> import numpy, deuteron
    >>> x = numpy.array([[0.0, 2.0]], dtype="float32")
    >>> w, b = numpy.ones(2, "float32"), numpy.zeros(2, "float32")
    >>> deuteron.norm_act(x, w, b, act="relu", eps=0.0)
    array([[0., 1.]], dtype=float32)
    """
    return _run("norm_act", (x, w, b), norm=_norm(b), act=act, eps=eps)


def norm_bias_act(
    x: Tensor, bias: Tensor, w: Tensor, b: Optional[Tensor] = None, act: str = "gelu", eps: float = 1e-5
) -> Tensor:
    """`act(norm(x) + bias)`"""
    return _run("norm_bias_act", (x, bias, w, b), norm=_norm(b), act=act, eps=eps)


def add_norm(
    x: Tensor, r: Tensor, w: Tensor, b: Optional[Tensor] = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """`s = x + r`, `y = norm(s)`; gives `(y, s)`."""
    return _run("add_norm", (x, r, w, b), norm=_norm(b), eps=eps)  # type: ignore[no-any-return]


def dropout_add_norm(
    x: Tensor,
    bias: Tensor,
    r: Tensor,
    w: Tensor,
    b: Optional[Tensor] = None,
    p: float = 0.1,
    seed: Union[None, int, Tensor] = None,
    training: bool = True,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """`s = r + dropout(x + bias)`, `y = norm(s)`; gives `(y, s)`."""
    p = _probability("dropout_add_norm", p, training)
    operands = (x, bias, r, _seed("dropout_add_norm", x, seed, p), w, b)
    return _run("dropout_add_norm", operands, norm=_norm(b), eps=eps, p=p)  # type: ignore[no-any-return]


def norm_quantize(
    x: Tensor, w: Tensor, b: Optional[Tensor] = None, r: Optional[Tensor] = None, eps: float = 1e-5
) -> tuple[Tensor, ...]:
    """Rows of `norm(x)` as int8 with a scale a row: `(q, scale)`; with `r` those of `norm(x + r)`: `(q, scale, s)`. It has no
    gradient."""
    operands = (x, r, w, b)
    return _run("norm_quantize", operands, norm=_norm(b), eps=eps, residual=r is not None)  # type: ignore[no-any-return]


def softmax(
    x: Tensor,
    scale: Optional[float] = None,
    mask: Union[None, str, Tensor] = None,
    p: float = 0.0,
    seed: Union[None, int, Tensor] = None,
    training: bool = True,
) -> Tensor:
    """`dropout(softmax(scale * x + mask))` over the last axis. `mask` is `"causal"` or a tensor that is added."""
    p = _probability("softmax", p, training)
    word, operands = _mask("softmax", mask)
    seeds = [_seed("softmax", x, seed, p)] if p > 0.0 else []
    return _run("softmax", [x, *operands, *seeds], scale="none" if scale is None else scale, mask=word, p=p)


def attention_scores(
    q: Tensor, k: Tensor, mask: Union[None, str, Tensor] = "causal", scale: Optional[float] = None
) -> Tensor:
    """`softmax(scale * q k^T + mask)`, written out; the scale is `1 / sqrt(features)` unless one is given."""
    word, operands = _mask("attention_scores", mask)
    if scale is None:
        features = _shape("attention_scores", "q", q)[-1:]
        scale = features[0] ** -0.5 if features and features[0] else 1.0
    return _run("attention_scores", [q, k, *operands], mask=word, scale=scale)


def embed_norm(
    tokens: Tensor, wte: Tensor, wpe: Tensor, w: Tensor, b: Optional[Tensor] = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """`s = wte[tokens] + wpe[position]`, `y = norm(s)` of tokens `[.., sequence]`; gives `(y, s)`."""
    return _run("embed_norm", (tokens, wte, wpe, w, b), norm=_norm(b), eps=eps)  # type: ignore[no-any-return]


def linear_act(x: Tensor, weight: Tensor, bias: Tensor, act: str = "gelu", r: Optional[Tensor] = None) -> Tensor:
    """`act(x weight + bias)`, or that plus `r`; `weight [in, out]`."""
    return _run("linear_act", (x, weight, bias, r), act=act, residual=r is not None)


def norm_linear(
    x: Tensor, weight: Tensor, bias: Tensor, w: Tensor, b: Optional[Tensor] = None, eps: float = 1e-5
) -> Tensor:
    """`norm(x) weight + bias`; `weight [in, out]`."""
    return _run("norm_linear", (x, weight, bias, w, b), norm=_norm(b), eps=eps)


def qkv(
    x: Tensor, weight: Tensor, bias: Tensor, heads: int, key_heads: Optional[int] = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of `x [batch, sequence, in]` in one pass: `[batch, heads, sequence, features]` each, views of one
    tensor. The columns of `weight [in, out]` are `heads` heads of queries, then `key_heads` of keys and as many of values."""
    shared = heads if key_heads is None else key_heads
    if not isinstance(heads, int) or not isinstance(shared, int):
        raise TypeError(f"qkv: expected whole numbers of heads, got {heads!r} and {shared!r}")
    every = heads + 2 * shared
    rows, columns = _shape("qkv", "x", x), _shape("qkv", "weight", weight)[-1:]
    if len(rows) != 3 or heads < 1 or shared < 1 or not columns or columns[0] % every:
        raise ValueError(
            f"qkv: expected x [batch, sequence, in] and a weight whose columns are {every} heads,"
            f" got x {list(rows)} and weight {list(weight.shape)}"
        )
    joint = _run("qkv", [x, weight, bias])
    parts = joint.reshape(rows[0], rows[1], every, columns[0] // every)

    def part(start: int, length: int) -> Tensor:
        return parts[:, :, start : start + length].swapaxes(1, 2)

    return part(0, heads), part(heads, shared), part(heads + shared, shared)


def ffn(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Optional[Tensor] = None,
    bias2: Optional[Tensor] = None,
    *,
    w: Tensor,
    b: Optional[Tensor] = None,
    act: str = "gelu",
    eps: float = 1e-5,
) -> Tensor:
    """`x + act(norm(x) weight1 + bias1) weight2 + bias2`; without a second layer `x + act(norm(x) weight1 + bias1)`. Weights are
    `[in, out]`."""
    if (weight2 is None) != (bias2 is None):
        raise TypeError("ffn: expected both weight2 and bias2, or neither")
    operands = (x, weight1, bias1, weight2, bias2, w, b)
    return _run("ffn", operands, norm=_norm(b), eps=eps, act=act, single=weight2 is None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Union[None, str, Tensor] = "causal",
    p: float = 0.0,
    seed: Union[None, int, Tensor] = None,
    training: bool = True,
) -> Tensor:
    """`dropout(softmax(q k^T / sqrt(features) + mask)) v` over `[batch, heads, sequence, features]`. Keys and values may have fewer
    heads, each shared by as many heads of queries."""
    p = _probability("attention", p, training)
    word, operands = _mask("attention", mask)
    queries, keys, group = _shape("attention", "q", q), _shape("attention", "k", k), 1
    if len(queries) == 4 and len(keys) == 4 and keys[1]:
        if queries[1] % keys[1]:
            raise ValueError(f"attention: expected heads of q to be a multiple of those of k, got {queries[1]} and {keys[1]}")
        group = max(queries[1] // keys[1], 1)
    seeds = [_seed("attention", q, seed, p)] if p > 0.0 else []
    return _run("attention", [q, k, v, *operands, *seeds], mask=word, p=p, group=group)


def attention_add_norm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    w: Tensor,
    b: Optional[Tensor] = None,
    mask: Optional[str] = "causal",
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """`s = r + attention(q, k, v)`, `y = norm(s)` in one launch; gives `(y, s)`. `r [batch, sequence, heads * features]`."""
    word = _words_alone("attention_add_norm", mask)
    return _run("attention_add_norm", (q, k, v, r, w, b), mask=word, norm=_norm(b), eps=eps)  # type: ignore[no-any-return]


def attention_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor,
    r: Tensor,
    w: Tensor,
    b: Optional[Tensor] = None,
    mask: Optional[str] = "causal",
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """`s = r + attention(q, k, v) weight + bias`, `y = norm(s)` in one launch: GPT-2's order. Gives `(y, s)`."""
    word = _words_alone("attention_block", mask)
    operands = (q, k, v, weight, bias, r, w, b)
    return _run("attention_block", operands, mask=word, norm=_norm(b), eps=eps)  # type: ignore[no-any-return]


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    reduction: str = "mean",
    ignore_index: Optional[int] = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of `x weight^T` against `targets`, and its gradient, without the logits in memory. `x [rows, hidden]`,
    `weight [classes, hidden]`, `targets [rows]`. `reduction` is "mean", "sum" or "none", which gives a loss per row. A row
    whose target is `ignore_index` has no loss, and the mean leaves it out. A target that is no class is an `IndexError`,
    which a later call raises on a Hopper GPU; other GPUs do not look."""
    _check_targets(targets, weight, ignore_index)
    attributes: dict[str, Any] = {
        "reduction": reduction,
        "ignore_index": "none" if ignore_index is None else ignore_index,
        "label_smoothing": label_smoothing,
    }
    return _run("linear_cross_entropy", [x, weight, targets], **attributes)


def _check_targets(targets: Tensor, weight: Tensor, ignore_index: Optional[int]) -> None:
    """Looks whether targets are classes, where that takes no wait for a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(targets, torch.Tensor):
        if _call.is_compiling() or type(targets) is not torch.Tensor or targets.device.type != "cpu":
            return
    elif not hasattr(targets, "__array_interface__"):
        return
    if ignore_index is not None:
        targets = targets[targets != ignore_index]
    if 0 not in targets.shape and (int(targets.min()) < 0 or int(targets.max()) >= weight.shape[0]):
        raise IndexError(
            f"linear_cross_entropy: expected targets of at least 0 and below {weight.shape[0]}, got some from"
            f" {int(targets.min())} to {int(targets.max())}"
        )


def moe_int8(
    x: Tensor,
    x_scale: Tensor,
    experts: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    act: Optional[str] = "gelu",
    requantize: bool = True,
) -> Any:
    """`act(x weight[expert] + bias)` of int8 rows, each routed to one of several int8 experts: `x [rows, in]` with `x_scale
    [rows, 1]`, `experts [rows]`, `weight [n, out, in]` with `weight_scale [n, out]`, `bias [n, out]`. Gives int8 rows and their scales, or
    floats where they are not quantised again. It has no gradient."""
    operands = [x, x_scale, experts, weight, weight_scale, bias]
    return _run("moe_int8", operands, act="none" if act is None else act, requantize=requantize)

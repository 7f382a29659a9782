"""The catalogue of fused ops as functions.

Each takes tensors of PyTorch (CPU or CUDA, with gradients), arrays of NumPy, or objects with `__dlpack__` on the CPU, and gives
results of the same kind. Leading axes may have any strides. Inside a function under `deuteron.fuse` they add to its graph.

Tensors are float32, float16 or bfloat16, all of one call the same unless its text says otherwise; statistics and sums are float32 inside.
Under autocast matmuls and attention take its dtype, as torch's do; norms, softmax and other row ops keep the dtype of `x`, where torch's give float32.
Indices of int64 are taken as int32: beyond 32 bits they are an `IndexError` on the CPU, and clamped on a GPU, where they stay outside of every table.
`x [.., columns]` stands for any number of leading axes. Results have the shape and dtype of `x` unless the text says otherwise.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Optional, Sequence, Union

from . import _call
from ._losses import assembled, check_options
from ._native import Program
from ._operands import Activation, MaskWord, Norm, Reduction, ScoreWork, bias_of_norm, check_probability, check_score_limits
from ._operands import keys_seen, mask_of, mask_word, op_text, score_work, seed_of, shape_of
from ._types import Mask, Tensor

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
    "moe",
    "moe_int8",
]


def _run(name: str, operands: Sequence[Any], names: str = "", values: tuple[Any, ...] = ()) -> Any:
    """Runs an op of the catalogue, or adds it to the graph that is being traced. `names` are those of its attributes, always the same for
    one op. Optional operands are None if absent. One result is returned alone, several as a tuple.

    A small call takes a few microseconds, so what is known of earlier calls is found by one lookup."""
    if _call.is_compiling():
        results = tuple(_call.run(_text(name, names, values), operands))
        return results[0] if len(results) == 1 else results
    try:
        known = _CALLS.get((name, values))
    except TypeError:
        raise TypeError(f"{name}: expected words and numbers for {names}, got {values}") from None
    if known is None:
        program: Program = _call.program(_text(name, names, values))
        known = _CALLS[(name, values)] = program.only if len(program.outputs) == 1 else program
    return known(*operands)


_CALLS: dict[tuple[str, tuple[Any, ...]], Callable[..., Any]] = {}
"""What runs an op with some attributes: its program, or that program's only result."""


def _text(name: str, names: str, values: tuple[Any, ...]) -> str:
    return op_text(name, dict(zip(names.split(), values)))


def act(x: Tensor, act: Activation = "gelu") -> Tensor:
    """`act(x)`; `act` is `gelu` (by `erf`, as torch's), `gelu_tanh`, `silu` or `relu`, as in all functions.

    >>> import numpy, deuteron
    >>> deuteron.act(numpy.array([[-1.0, 2.0]], dtype="float32"), act="relu")
    array([[0., 2.]], dtype=float32)
    """
    return _run("act", (x,), "act", (act,))


def mul_add_act(x: Tensor, w: Tensor, b: Tensor, act: Activation = "gelu") -> Tensor:
    """`act(x * w + b)`, elementwise: `x [.., columns]`, and `w` and `b` of that shape; operands repeat where their size is 1.

    >>> import numpy, deuteron
    >>> x = numpy.array([[-1.0, 2.0]], dtype="float32")
    >>> deuteron.mul_add_act(x, x, x, act="relu")
    array([[0., 6.]], dtype=float32)
    """
    return _run("mul_add_act", (x, w, b), "act", (act,))


def add_act(x: Tensor, r: Tensor, act: Activation = "gelu") -> Tensor:
    """`act(x + r)`, elementwise: `x` and `r` of one shape `[.., columns]`; operands repeat where their size is 1.

    >>> import numpy, deuteron
    >>> x = numpy.array([[-3.0, 1.0]], dtype="float32")
    >>> deuteron.add_act(x, x, act="relu")
    array([[0., 2.]], dtype=float32)
    """
    return _run("add_act", (x, r), "act", (act,))


def bias_act(x: Tensor, b: Tensor, act: Activation = "gelu") -> Tensor:
    """`act(x + b)` of `x [.., columns]` and `b [columns]`.

    >>> import numpy, deuteron
    >>> x = numpy.array([[-1.0, 2.0]], dtype="float32")
    >>> deuteron.bias_act(x, numpy.array([3.0, -3.0], dtype="float32"), act="relu")
    array([[2., 0.]], dtype=float32)
    """
    return _run("bias_act", (x, b), "act", (act,))


def act_dropout(
    x: Tensor, p: float = 0.1, seed: Union[None, int, Tensor] = None, act: Activation = "gelu", training: bool = True
) -> Tensor:
    """`dropout(act(x))` of `x [.., columns]`: an element is zero with probability `p`, and the others are divided by `1 - p`. `seed` is a whole number or
    a tensor of one. The same seed drops the same elements, on the CPU and on a GPU; without one, the library's generator
    draws it. Without `training` nothing is dropped.

    >>> import numpy, deuteron
    >>> x = numpy.array([[-1.0, 2.0]], dtype="float32")
    >>> deuteron.act_dropout(x, p=0.5, act="relu", training=False)
    array([[0., 2.]], dtype=float32)
    """
    p = check_probability("act_dropout", p, training)
    return _run("act_dropout", (x, seed_of("act_dropout", x, seed, p)), "act p", (act, p))


def act_dropout_add(
    x: Tensor,
    r: Tensor,
    p: float = 0.1,
    seed: Union[None, int, Tensor] = None,
    act: Activation = "gelu",
    training: bool = True,
) -> Tensor:
    """`dropout(act(x)) + r`; `x` and `r` are `[.., columns]`. `seed` as in `act_dropout`.

    >>> import numpy, deuteron
    >>> x = numpy.array([[-1.0, 2.0]], dtype="float32")
    >>> deuteron.act_dropout_add(x, x, p=0.0, act="relu")
    array([[-1.,  4.]], dtype=float32)
    """
    p = check_probability("act_dropout_add", p, training)
    return _run("act_dropout_add", (x, r, seed_of("act_dropout_add", x, seed, p)), "act p", (act, p))


def bias_dropout_add(
    x: Tensor,
    b: Tensor,
    r: Tensor,
    p: float = 0.1,
    seed: Union[None, int, Tensor] = None,
    training: bool = True,
) -> Tensor:
    """`dropout(x + b) + r`; `x` and `r` are `[.., columns]`, `b [columns]`.

    >>> import numpy, deuteron
    >>> x = numpy.array([[-1.0, 2.0]], dtype="float32")
    >>> deuteron.bias_dropout_add(x, numpy.ones(2, "float32"), x, p=0.0)
    array([[-1.,  5.]], dtype=float32)
    """
    p = check_probability("bias_dropout_add", p, training)
    return _run("bias_dropout_add", (x, b, r, seed_of("bias_dropout_add", x, seed, p)), "p", (p,))


def swiglu(x: Tensor, g: Optional[Tensor] = None) -> Tensor:
    """`silu(x) * g`; `x` and `g` are `[.., h]`. Without `g`, `x` and `g` are the halves of one `[.., 2h]` tensor.

    >>> import numpy, deuteron
    >>> x, g = numpy.zeros((1, 2), "float32"), numpy.ones((1, 2), "float32")
    >>> deuteron.swiglu(x, g)
    array([[0., 0.]], dtype=float32)
    >>> deuteron.swiglu(numpy.concatenate([x, g], axis=1)).shape
    (1, 2)
    """
    return _run("swiglu", (x, g), "packed", (g is None,))


def geglu(x: Tensor, g: Optional[Tensor] = None, act: Activation = "gelu") -> Tensor:
    """`gelu(x) * g`; `x` and `g` are `[.., h]`. Without `g`, `x` and `g` are the halves of one `[.., 2h]` tensor.

    >>> import numpy, deuteron
    >>> x, g = numpy.zeros((1, 2), "float32"), numpy.ones((1, 2), "float32")
    >>> deuteron.geglu(x, g, act="gelu_tanh")
    array([[0., 0.]], dtype=float32)
    """
    if act not in ("gelu", "gelu_tanh"):
        raise ValueError(f"geglu: expected act to be gelu (by erf) or gelu_tanh, got {act!r}")
    return _run("geglu", (x, g), "act packed", (act, g is None))


def layer_norm(x: Tensor, w: Tensor, b: Optional[Tensor] = None, eps: float = 1e-5) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * w + b` over the last axis of `x [.., columns]`; `w` and `b` are `[columns]`, and without `b` nothing is added.
    The result has the dtype of `x` under autocast too, where torch's is float32.

    >>> import numpy, deuteron
    >>> x = numpy.array([[0.0, 2.0]], dtype="float32")
    >>> w, b = numpy.ones(2, "float32"), numpy.zeros(2, "float32")
    >>> deuteron.layer_norm(x, w, b, eps=0.0)
    array([[-1.,  1.]], dtype=float32)
    """
    return _run("layer_norm", (x, w, bias_of_norm("layer_norm", "layer", w, b)), "eps", (eps,))


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * w` over the last axis of `x [.., columns]`; `w [columns]`. The result has the dtype of `x` under autocast too, where
    torch's is float32.

    >>> import numpy, deuteron
    >>> x = numpy.array([[2.0, -2.0]], dtype="float32")
    >>> deuteron.rms_norm(x, numpy.ones(2, "float32"), eps=0.0)
    array([[ 1., -1.]], dtype=float32)
    """
    return _run("rms_norm", (x, w), "eps", (eps,))


def norm_act(x: Tensor, w: Tensor, b: Optional[Tensor] = None, act: Activation = "gelu", eps: float = 1e-5, norm: Norm = "layer") -> Tensor:
    """`act(norm(x))` over the last axis of `x [.., columns]`; `w [columns]`, `b [columns]`. The result has the shape of `x`.

    `norm="layer"` is LayerNorm, with or without a bias `b`; `norm="rms"` is RMSNorm, which has no bias. All functions with a `norm` work this way.

    >>> import numpy, deuteron
    >>> x = numpy.array([[0.0, 2.0]], dtype="float32")
    >>> w, b = numpy.ones(2, "float32"), numpy.zeros(2, "float32")
    >>> deuteron.norm_act(x, w, b, act="relu", eps=0.0)
    array([[0., 1.]], dtype=float32)
    """
    return _run("norm_act", (x, w, bias_of_norm("norm_act", norm, w, b)), "norm act eps", (norm, act, eps))


def norm_bias_act(
    x: Tensor, bias: Tensor, w: Tensor, b: Optional[Tensor] = None, act: Activation = "gelu", eps: float = 1e-5, norm: Norm = "layer"
) -> Tensor:
    """`act(norm(x) + bias)`; `x [.., columns]`, all others `[columns]`.

    >>> import numpy, deuteron
    >>> x = numpy.array([[0.0, 2.0]], dtype="float32")
    >>> w, b = numpy.ones(2, "float32"), numpy.zeros(2, "float32")
    >>> deuteron.norm_bias_act(x, w, w, b, act="relu", eps=0.0)
    array([[0., 2.]], dtype=float32)
    """
    return _run("norm_bias_act", (x, bias, w, bias_of_norm("norm_bias_act", norm, w, b)), "norm act eps", (norm, act, eps))


def add_norm(
    x: Tensor, r: Tensor, w: Tensor, b: Optional[Tensor] = None, eps: float = 1e-5, norm: Norm = "layer"
) -> tuple[Tensor, Tensor]:
    """`s = x + r`, `y = norm(s)`; gives `(y, s)`. `x` and `r` are `[.., columns]`, `w` and `b` `[columns]`.

    >>> import numpy, deuteron
    >>> x = numpy.array([[0.0, 2.0]], dtype="float32")
    >>> w, b = numpy.ones(2, "float32"), numpy.zeros(2, "float32")
    >>> y, s = deuteron.add_norm(x, x, w, b, eps=0.0)
    >>> y, s
    (array([[-1.,  1.]], dtype=float32), array([[0., 4.]], dtype=float32))
    """
    return _run("add_norm", (x, r, w, bias_of_norm("add_norm", norm, w, b)), "norm eps", (norm, eps))


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
    norm: Norm = "layer",
) -> tuple[Tensor, Tensor]:
    """`s = r + dropout(x + bias)`, `y = norm(s)`; gives `(y, s)`. `x` and `r` are `[.., columns]`, all others `[columns]`.

    >>> import numpy, deuteron
    >>> x = numpy.array([[0.0, 2.0]], dtype="float32")
    >>> w, b = numpy.ones(2, "float32"), numpy.zeros(2, "float32")
    >>> y, s = deuteron.dropout_add_norm(x, w, x, w, b, p=0.0, eps=0.0)
    >>> y, s
    (array([[-1.,  1.]], dtype=float32), array([[1., 5.]], dtype=float32))
    """
    p = check_probability("dropout_add_norm", p, training)
    operands: Sequence[Any] = (x, bias, r, seed_of("dropout_add_norm", x, seed, p), w, bias_of_norm("dropout_add_norm", norm, w, b))
    return _run("dropout_add_norm", operands, "norm eps p", (norm, eps, p))


def norm_quantize(
    x: Tensor, w: Tensor, b: Optional[Tensor] = None, r: Optional[Tensor] = None, eps: float = 1e-5, norm: Norm = "layer"
) -> tuple[Tensor, ...]:
    """Rows of `norm(x)` as int8 with one scale per row: `(q, scale)`; with `r` those of `norm(x + r)`: `(q, scale, s)`. `x`, `r`, `s` and `q` are
    `[.., columns]`, `scale [.., 1]` is float32. It has no gradient.

    >>> import numpy, deuteron
    >>> x = numpy.array([[0.0, 2.0]], dtype="float32")
    >>> w, b = numpy.ones(2, "float32"), numpy.zeros(2, "float32")
    >>> q, scale = deuteron.norm_quantize(x, w, b, eps=0.0)
    >>> q, scale.shape
    (array([[-127,  127]], dtype=int8), (1, 1))
    """
    operands: Sequence[Any] = (x, r, w, bias_of_norm("norm_quantize", norm, w, b))
    return _run("norm_quantize", operands, "norm eps residual", (norm, eps, r is not None))


def softmax(
    x: Tensor,
    scale: Optional[float] = None,
    mask: Mask[Tensor] = None,
    p: float = 0.0,
    seed: Union[None, int, Tensor] = None,
    training: bool = True,
) -> Tensor:
    """`dropout(softmax(scale * x + mask))` over the last axis of `x [.., rows, columns]`. `mask` is a name, booleans or floats, as in `attention`. A row
    of `-inf`, such as a fully masked one, gives zeros, where torch gives NaN.

    >>> import numpy, deuteron
    >>> deuteron.softmax(numpy.zeros((2, 2), "float32"), mask="causal")
    array([[1. , 0. ],
           [0.5, 0.5]], dtype=float32)
    """
    if mask is None and p == 0.0 and type(p) is float:
        return _run("softmax", (x,), "scale mask p", ("none" if scale is None else scale, "full", p))
    p = check_probability("softmax", p, training)
    word: str = "full"
    operands: list[Any] = []
    if mask is not None:
        word, operands = mask_of("softmax", mask, x, shape_of("softmax", "x", x))
    seeds: list[Any] = [seed_of("softmax", x, seed, p)] if p > 0.0 else []
    return _run("softmax", [x, *operands, *seeds], "scale mask p", ("none" if scale is None else scale, word, p))


def attention_scores(q: Tensor, k: Tensor, mask: Mask[Tensor] = "causal", scale: Optional[float] = None) -> Tensor:
    """`softmax(scale * q k^T + mask)`, stored in memory: `q [.., queries, features]`, `k [.., keys, features]`, the result `[.., queries, keys]`. The scale is
    `1 / sqrt(features)` unless one is given, `mask` as in `attention`.

    >>> import numpy, deuteron
    >>> q = numpy.zeros((1, 1, 2, 4), "float32")
    >>> deuteron.attention_scores(q, q)[0, 0]
    array([[1. , 0. ],
           [0.5, 0.5]], dtype=float32)
    """
    shape: Sequence[int] = shape_of("attention_scores", "q", q)
    added: tuple[str, list[Any]] = mask_of("attention_scores", mask, q, (*shape[-2:-1], *shape_of("attention_scores", "k", k)[-2:-1]))
    if scale is None:
        scale = shape[-1] ** -0.5 if len(shape) and shape[-1] else 1.0
    return _run("attention_scores", [q, k, *added[1]], "mask scale", (added[0], scale))


def embed_norm(
    tokens: Tensor, wte: Tensor, wpe: Tensor, w: Tensor, b: Optional[Tensor] = None, eps: float = 1e-5, norm: Norm = "layer"
) -> tuple[Tensor, Tensor]:
    """`s = wte[tokens] + wpe[position]`, `y = norm(s)`; gives `(y, s)`, both `[.., sequence, columns]`. `tokens [.., sequence]` are whole numbers,
    `wte [vocabulary, columns]`, `wpe [positions, columns]`.

    >>> import numpy, deuteron
    >>> wte, wpe = numpy.array([[0.0, 2.0], [2.0, 0.0]], "float32"), numpy.zeros((4, 2), "float32")
    >>> w, b = numpy.ones(2, "float32"), numpy.zeros(2, "float32")
    >>> y, s = deuteron.embed_norm(numpy.array([[1, 0]], "int32"), wte, wpe, w, b, eps=0.0)
    >>> y[0]
    array([[ 1., -1.],
           [-1.,  1.]], dtype=float32)
    """
    operands: Sequence[Any] = (tokens, wte, wpe, w, bias_of_norm("embed_norm", norm, w, b))
    return _run("embed_norm", operands, "norm eps", (norm, eps))


def linear_act(x: Tensor, weight: Tensor, bias: Tensor, act: Activation = "gelu", r: Optional[Tensor] = None) -> Tensor:
    """`act(x weight + bias)`, or that plus `r`: `x [.., in]`, `weight [in, out]`, `bias [out]`, `r` and the result `[.., out]`.

    >>> import numpy, deuteron
    >>> x, weight, bias = numpy.ones((1, 2), "float32"), numpy.eye(2, 3, dtype="float32"), numpy.zeros(3, "float32")
    >>> deuteron.linear_act(x, weight, bias, act="relu")
    array([[1., 1., 0.]], dtype=float32)
    """
    return _run("linear_act", (x, weight, bias, r), "act residual", (act, r is not None))


def norm_linear(
    x: Tensor, weight: Tensor, bias: Tensor, w: Tensor, b: Optional[Tensor] = None, eps: float = 1e-5, norm: Norm = "layer"
) -> Tensor:
    """`norm(x) weight + bias`: `x [.., in]`, `weight [in, out]`, `bias [out]`, `w` and `b` `[in]`; the result is `[.., out]`.

    >>> import numpy, deuteron
    >>> x = numpy.array([[0.0, 2.0]], dtype="float32")
    >>> w, b = numpy.ones(2, "float32"), numpy.zeros(2, "float32")
    >>> deuteron.norm_linear(x, numpy.eye(2, 3, dtype="float32"), numpy.zeros(3, "float32"), w, b, eps=0.0)
    array([[-1.,  1.,  0.]], dtype=float32)
    """
    return _run("norm_linear", (x, weight, bias, w, bias_of_norm("norm_linear", norm, w, b)), "norm eps", (norm, eps))


def qkv(
    x: Tensor, weight: Tensor, bias: Tensor, heads: int, key_heads: Optional[int] = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of `x [batch, sequence, in]` in one pass: `[batch, heads, sequence, features]` each, views of one
    tensor. The columns of `weight [in, out]` are `heads` heads of queries, then `key_heads` of keys and as many of values.

    >>> import numpy, deuteron
    >>> x, weight = numpy.ones((1, 3, 4), "float32"), numpy.ones((4, 12), "float32")
    >>> q, k, v = deuteron.qkv(x, weight, numpy.zeros(12, "float32"), heads=2)
    >>> q.shape
    (1, 2, 3, 2)
    """
    shared = heads if key_heads is None else key_heads
    if not isinstance(heads, int) or not isinstance(shared, int):
        raise TypeError(f"qkv: expected whole numbers of heads, got {heads!r} and {shared!r}")
    every = heads + 2 * shared
    rows, columns = shape_of("qkv", "x", x), shape_of("qkv", "weight", weight)[-1:]
    if len(rows) != 3 or heads < 1 or shared < 1 or not columns or columns[0] % every:
        raise ValueError(
            f"qkv: expected x [batch, sequence, in] and a weight whose columns are {every} heads,"
            f" got x {list(rows)} and weight {list(shape_of('qkv', 'weight', weight))}"
        )
    joint = _run("qkv", (x, weight, bias))
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
    act: Activation = "gelu",
    eps: float = 1e-5,
    norm: Norm = "layer",
) -> Tensor:
    """`x + act(norm(x) weight1 + bias1) weight2 + bias2`; without a second layer `x + act(norm(x) weight1 + bias1)`. `x [.., columns]`, `weight1 [columns, inner]`,
    `bias1 [inner]`, `weight2 [inner, columns]`, `bias2`, `w` and `b` `[columns]`.

    >>> import numpy, deuteron
    >>> x = numpy.array([[0.0, 2.0]], dtype="float32")
    >>> w, b = numpy.ones(2, "float32"), numpy.zeros(2, "float32")
    >>> eye = numpy.eye(2, dtype="float32")
    >>> deuteron.ffn(x, eye, b, eye, b, w=w, b=b, act="relu", eps=0.0)
    array([[0., 3.]], dtype=float32)
    """
    if (weight2 is None) != (bias2 is None):
        raise TypeError("ffn: expected both weight2 and bias2, or neither")
    operands: Sequence[Any] = (x, weight1, bias1, weight2, bias2, w, bias_of_norm("ffn", norm, w, b))
    return _run("ffn", operands, "norm eps act single", (norm, eps, act, weight2 is None))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask[Tensor] = "causal",
    p: float = 0.0,
    seed: Union[None, int, Tensor] = None,
    training: bool = True,
    scale: Optional[float] = None,
    window: Optional[int] = None,
    soft_cap: Optional[float] = None,
    slopes: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    documents: Optional[Tensor] = None,
    cu_seqlens: Optional[Tensor] = None,
) -> Tensor:
    """`dropout(softmax(scale * q k^T + mask)) v` over `[batch, heads, sequence, features]`. Keys and values may have fewer heads, each
    shared by equally many query heads; the scale is `1 / sqrt(features)` unless one is given.

    `mask` is `"causal"` (query `i` sees the keys up to `i`, as torch's `is_causal`), `"causal_from_end"` (the last query sees all keys:
    it differs if there are more keys than queries), `"full"` or None, booleans (true: attend) or floats that are added.
    A query that may see no key gives zeros.

    Scores `s` are changed before the softmax, in this order: `soft_cap * tanh(s / soft_cap)`; plus `slopes [heads]` times the distance
    `key - query`, which is ALiBi; plus `bias`, which broadcasts to `[batch, heads, queries, keys]`. A key `window` positions or more from the
    query's own is hidden, on both sides, and so is a key of another document: `documents [keys]` or `[batch, keys]` are whole numbers. Instead of
    documents, `cu_seqlens` gives the start offsets of packed sequences: `[0, .., keys]`. Queries are aligned with the last keys: the last query
    has the position of the last key.

    >>> import numpy, deuteron
    >>> q = numpy.zeros((1, 1, 2, 2), "float32")
    >>> v = numpy.array([[[[2.0, 4.0], [0.0, 0.0]]]], "float32")
    >>> deuteron.attention(q, q, v)[0, 0]
    array([[2., 4.],
           [1., 2.]], dtype=float32)
    """
    p = check_probability("attention", p, training)
    queries: Sequence[int] = shape_of("attention", "q", q)
    keys: Sequence[int] = shape_of("attention", "k", k)
    group = 1
    if len(queries) == 4 and len(keys) == 4 and keys[1]:
        if queries[1] % keys[1]:
            raise ValueError(f"attention: expected heads of q to be a multiple of those of k, got {queries[1]} and {keys[1]}")
        group = max(queries[1] // keys[1], 1)
    seen: Sequence[Any] = keys_seen(mask, q, k, v)
    lengths = (*queries[-2:-1], *shape_of("attention", "k", seen[0])[-2:-1])
    added: tuple[str, list[Any]] = mask_of("attention", mask, q, lengths)
    seeds: list[Any] = [seed_of("attention", q, seed, p)] if p > 0.0 else []
    factor = "none" if scale is None else scale
    if isinstance(window, int) and not isinstance(window, bool) and window >= max(*lengths, 1):
        # It hides nothing: the farthest key is at a distance of one less than there are.
        window = None
    if window is soft_cap is slopes is bias is documents is cu_seqlens is None:
        return _run("attention", [q, *seen, *added[1], *seeds], "scale mask p group", (factor, added[0], p, group))
    work: ScoreWork = score_work(mask, added, lengths, slopes, bias, documents, cu_seqlens)
    limits: tuple[Any, Any] = check_score_limits(mask, lengths, tuple(keys[-2:-1]), window, soft_cap, work)
    return _run(
        "attention",
        [q, *seen, *work.operands, *seeds],
        "scale mask p group soft_cap window slopes bias documents",
        (factor, added[0], p, group, *limits, *work.flags),
    )


def attention_add_norm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    w: Tensor,
    b: Optional[Tensor] = None,
    mask: Optional[MaskWord] = "causal",
    eps: float = 1e-5,
    norm: Norm = "layer",
) -> tuple[Tensor, Tensor]:
    """`s = r + attention(q, k, v)`, `y = norm(s)` in one launch; gives `(y, s)`. `q`, `k` and `v` are `[batch, heads, sequence, features]`, `r` and the
    results `[batch, sequence, heads * features]`, `w` and `b` `[heads * features]`.

    >>> import numpy, deuteron
    >>> q, r = numpy.zeros((1, 1, 2, 2), "float32"), numpy.array([[[0.0, 2.0], [2.0, 0.0]]], "float32")
    >>> w, b = numpy.ones(2, "float32"), numpy.zeros(2, "float32")
    >>> y, s = deuteron.attention_add_norm(q, q, q, r, w, b, eps=0.0)
    >>> y[0]
    array([[-1.,  1.],
           [ 1., -1.]], dtype=float32)
    """
    word = mask_word("attention_add_norm", mask, q, k)
    operands: Sequence[Any] = (q, k, v, r, w, bias_of_norm("attention_add_norm", norm, w, b))
    return _run("attention_add_norm", operands, "norm mask eps", (norm, word, eps))


def attention_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor,
    r: Tensor,
    w: Tensor,
    b: Optional[Tensor] = None,
    mask: Optional[MaskWord] = "causal",
    eps: float = 1e-5,
    norm: Norm = "layer",
) -> tuple[Tensor, Tensor]:
    """`s = r + attention(q, k, v) weight + bias`, `y = norm(s)` in one launch: GPT-2's order. Gives `(y, s)`. Shapes as in `attention_add_norm`;
    `weight [heads * features, columns]`, and `bias`, `w`, `b` and the rows of `r` have `columns`.

    >>> import numpy, deuteron
    >>> q, r = numpy.zeros((1, 1, 2, 2), "float32"), numpy.array([[[0.0, 2.0], [2.0, 0.0]]], "float32")
    >>> w, b = numpy.ones(2, "float32"), numpy.zeros(2, "float32")
    >>> y, s = deuteron.attention_block(q, q, q, numpy.eye(2, dtype="float32"), b, r, w, b, eps=0.0)
    >>> y[0]
    array([[-1.,  1.],
           [ 1., -1.]], dtype=float32)
    """
    word = mask_word("attention_block", mask, q, k)
    operands: Sequence[Any] = (q, k, v, weight, bias, r, w, bias_of_norm("attention_block", norm, w, b))
    return _run("attention_block", operands, "norm mask eps", (norm, word, eps))


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    reduction: Reduction = "mean",
    ignore_index: Optional[int] = None,
    label_smoothing: float = 0.0,
    class_weights: Optional[Tensor] = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy of `x weight^T` against `targets`, and its gradient, without storing all logits. `x [rows, hidden]`,
    `weight [classes, hidden]`, `targets [rows]`. `reduction` is "mean", "sum" or "none" (one loss per row). Rows with the target
    `ignore_index` have loss 0 and are excluded from the mean. `class_weights [classes]` weight the losses and their mean as in
    `torch.nn.functional.cross_entropy`; `z_loss` is the factor of `logsumexp(logits)^2` per row, averaged over the rows that are
    not ignored. A target out of range is an `IndexError`, which a later call raises on a Hopper GPU; other GPUs do not check.

    >>> import numpy, deuteron
    >>> x, weight = numpy.ones((2, 4), "float32"), numpy.eye(3, 4, dtype="float32")
    >>> plain = deuteron.linear_cross_entropy(x, weight, numpy.array([0, 1]))
    >>> penalised = deuteron.linear_cross_entropy(x, weight, numpy.array([0, 1]), z_loss=0.5)
    >>> round(float(penalised - plain), 4)  # 0.5 (1 + log 3)^2
    2.2021
    """
    _check_targets(targets, weight, ignore_index)
    if class_weights is not None or z_loss:
        check_options(shape_of("linear_cross_entropy", "weight", weight)[0], class_weights, z_loss)
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f'linear_cross_entropy: expected reduction "mean", "sum" or "none", got {reduction!r}')
        losses = linear_cross_entropy(x, weight, targets, "none", ignore_index)
        return assembled(losses, x, weight, targets, reduction, ignore_index, label_smoothing, class_weights, z_loss)
    attributes: dict[str, Any] = {
        "reduction": reduction,
        "ignore_index": "none" if ignore_index is None else ignore_index,
        "label_smoothing": label_smoothing,
    }
    return _run("linear_cross_entropy", (x, weight, targets), " ".join(attributes), tuple(attributes.values()))


def _check_targets(targets: Any, weight: Any, ignore_index: Optional[int]) -> None:
    """Checks that targets are classes, unless the check would have to wait for a GPU."""
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


def moe(
    x: Tensor,
    experts: Tensor,
    weight: Tensor,
    bias: Tensor,
    expert_weights: Optional[Tensor] = None,
    act: Optional[Activation] = "gelu",
) -> Tensor:
    """`act(x weight[expert] + bias)` of rows `x [rows, in]`, each routed to one of several experts: `experts [rows]`, `weight [n, out,
    in]`, `bias [n, out]`. With `experts [rows, choices]` a row goes to several: the result is `[rows, choices, out]`, or, with
    `expert_weights [rows, choices]`, `[rows, out]`: the results of the choices times their weights, added in their order. `x [rows,
    choices, in]` has one row per choice, for the second projection of an expert MLP. Experts are int32 or int64. It has no gradient.

    >>> import numpy, deuteron
    >>> x = numpy.ones((2, 2), "float32")
    >>> weight = numpy.stack([numpy.eye(2), 2 * numpy.eye(2)]).astype("float32")
    >>> deuteron.moe(x, numpy.array([1, 0], "int32"), weight, numpy.zeros((2, 2), "float32"), act="relu")
    array([[2., 2.],
           [1., 1.]], dtype=float32)
    """
    operands = (x, experts, weight, bias, expert_weights)
    return _run("moe", operands, "act weighted", ("none" if act is None else act, expert_weights is not None))


def moe_int8(
    x: Tensor,
    x_scale: Tensor,
    experts: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    act: Optional[Activation] = "gelu",
    requantize: bool = True,
) -> Any:
    """`act(x weight[expert] + bias)` of int8 rows, each routed to one of several int8 experts: `x [rows, in]` with `x_scale
    [rows, 1]`, `experts [rows]`, `weight [n, out, in]` with `weight_scale [n, out]`, `bias [n, out]`. Gives int8 rows and their scales, or
    floats where they are not quantised again. Scales are float32, experts int32 or int64. It has no gradient.

    >>> import numpy, deuteron
    >>> x, weight = numpy.full((1, 2), 100, "int8"), numpy.eye(2, dtype="int8")[None]
    >>> ones, expert = numpy.ones((1, 2), "float32"), numpy.array([0], "int32")
    >>> scale = numpy.full((1, 1), 0.01, "float32")
    >>> deuteron.moe_int8(x, scale, expert, weight, ones, 0 * ones, act="relu", requantize=False)
    array([[1., 1.]], dtype=float32)
    """
    operands = [x, x_scale, experts, weight, weight_scale, bias]
    return _run("moe_int8", operands, "act requantize", ("none" if act is None else act, requantize))

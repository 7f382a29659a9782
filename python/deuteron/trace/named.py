"""Functions with names in the text form: activations, norms, matmuls, attention, losses."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Sequence, Tuple

from deuteron.trace.elementwise import arange, broadcast_shape, cast, full, where
from deuteron.trace.emit import as_value, emit
from deuteron.trace.graph import FLOATS, Number, elements, number_text, shape_text
from deuteron.trace.rows import composite, sum
from deuteron.trace.value import Value
from deuteron.trace.views import broadcast, gather, operand_of, permutation, reshape


def gelu(x: Any, approximate: str = "none") -> Value:
    """GELU by `erf`, or with `approximate="tanh"` GPT-2's."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'gelu: expected approximate="none" or "tanh", got {approximate!r}')
    return composite("gelu", as_value(x, "gelu"), f"kind={'erf' if approximate == 'none' else 'tanh'}")


def silu(x: Any) -> Value:
    """`x sigmoid(x)`"""
    return composite("silu", as_value(x, "silu"))


def relu(x: Any) -> Value:
    """`max(x, 0)`"""
    return composite("relu", as_value(x, "relu"))


def swiglu(x: Any, gate: Any) -> Value:
    """`silu(x) gate`"""
    x, gate = _alike("swiglu", x, gate)
    return emit("swiglu", (x, gate), [(x._word, x.shape)])[0]


def geglu(x: Any, gate: Any, approximate: str = "none") -> Value:
    """`gelu(x) gate`"""
    x, gate = _alike("geglu", x, gate)
    if approximate not in ("none", "tanh"):
        raise ValueError(f'geglu: expected approximate="none" or "tanh", got {approximate!r}')
    return emit("geglu", (x, gate), [(x._word, x.shape)], f"kind={'erf' if approximate == 'none' else 'tanh'}")[0]


def _alike(op: str, a: Any, b: Any) -> Tuple[Value, Value]:
    a, b = as_value(a, op), as_value(b, op)
    if a.shape != b.shape or a._word != b._word or a._word not in FLOATS:
        raise ValueError(f"{op}: expected two float values of one shape and dtype, got {a!r} and {b!r}")
    return a, b


def dropout(x: Any, p: Number, seed: Any) -> Value:
    """`x / (1 - p)` where kept, else 0. The seed is a value: one `i32`, the same for the same choice."""
    x, seed = as_value(x, "dropout"), as_value(seed, "dropout")
    words = _dropout_words("dropout", p, seed)
    return x if p == 0 else emit("dropout", (x, seed), [(x._word, x.shape)], *words, f"offset={x._trace.offset()}")[0]


def _dropout_words(op: str, p: Number, seed: Value) -> Tuple[str, ...]:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise ValueError(f"{op}: expected p from 0 to below 1, got {p}")
    if seed._word != "i32" or elements(seed.shape) != 1:
        raise TypeError(f"{op}: expected one i32 seed, got {seed!r}")
    return (f"p={number_text(float(p))}",)


def layer_norm(x: Any, weight: Any = None, bias: Any = None, eps: Number = 1e-5) -> Value:
    """`(x - mean) rstd weight + bias` over the last axis."""
    x = as_value(x, "layer_norm")
    return _norm("layer_norm", x, [_weight(x, weight, 1.0), _weight(x, bias, 0.0)], eps)


def rms_norm(x: Any, weight: Any = None, eps: Number = 1e-5) -> Value:
    """`x rstd weight` over the last axis."""
    x = as_value(x, "rms_norm")
    return _norm("rms_norm", x, [_weight(x, weight, 1.0)], eps)


def _weight(x: Value, weight: Any, usual: Number) -> Value:
    if weight is not None:
        return as_value(weight, "norm")
    return full(x.shape[-1:], usual, x._word if x._word in FLOATS else "f32", like=x)


def _norm(op: str, x: Value, weights: Sequence[Value], eps: Number) -> Value:
    if not x.shape or x.shape[-1] == 0:
        raise ValueError(f"{op}: expected a last axis that is not empty, got {x!r}")
    if x._word not in FLOATS or any(weight._word not in FLOATS for weight in weights):
        raise TypeError(f"{op}: expected float operands (f32, f16 or bf16), got {x!r}")
    for weight in weights:
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"{op}: expected weights {shape_text(x.shape[-1:])}, got {shape_text(weight.shape)}")
    if isinstance(eps, Value) or not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{op}: expected eps finite and not negative, got {eps}")
    statistics = [("f32", (*x.shape[:-1], 1))] * len(weights)
    return emit(op, (x, *weights), [(x._word, x.shape), *statistics], f"eps={number_text(float(eps))}")[0]


def embedding(indices: Any, table: Any) -> Value:
    """Rows of a table `[n, c]` picked by `i32` indices."""
    indices, table = as_value(indices, "embedding"), as_value(table, "embedding")
    if indices._word != "i32" or table.ndim != 2 or table._word not in (*FLOATS, "i8"):
        raise TypeError(f"embedding: expected i32 indices and a float table [n, c], got {indices!r} and {table!r}")
    return gather(table, indices)


def matmul(a: Any, b: Any) -> Value:
    """`a @ b`. A second operand of rank 2 serves every batch."""
    a, b = as_value(a, "matmul"), as_value(b, "matmul")
    if not a.shape or not b.shape:
        raise ValueError("matmul: expected operands with axes, got a scalar")
    if a._word != b._word or a._word not in (*FLOATS, "i8"):
        raise TypeError(f"matmul: expected float operands of one dtype, got {a._word} and {b._word}; cast one")
    left, right = (a.unsqueeze(0) if a.ndim == 1 else a), (b.unsqueeze(1) if b.ndim == 1 else b)
    if left.shape[-1] != right.shape[-2]:
        raise ValueError(f"matmul: expected equal inner sizes, got {shape_text(a.shape)} and {shape_text(b.shape)}")
    product = _batched(left, right)
    shape = list(product.shape)
    if b.ndim == 1:
        del shape[-1]
    if a.ndim == 1:
        del shape[-1 if b.ndim == 1 else -2]
    return reshape(product, shape)


def _batched(a: Value, b: Value) -> Value:
    if b.ndim > 2 and a.shape[:-2] != b.shape[:-2]:
        lead = broadcast_shape("matmul", [a.shape[:-2], b.shape[:-2]])
        a, b = broadcast(a, (*lead, *a.shape[-2:])), broadcast(b, (*lead, *b.shape[-2:]))
    shape = (*a.shape[:-1], b.shape[-1])
    word = "f32" if a._word == "i8" else a._word
    flags = []
    if b._node.op == "transpose" and permutation(b)[-2] == b.ndim - 1:
        # What lies together in memory stays the last axis.
        b = b.mT
        flags.append("transpose_b")
    return emit("matmul", (a, b), [(word, shape)], *flags)[0]


def swaps_last(x: Value) -> bool:
    """Whether it is another value with its last two axes swapped."""
    if x._node.op != "transpose" or x.ndim < 2:
        return False
    return permutation(x) == [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2]


def linear(x: Any, weight: Any, bias: Any = None, transposed: bool = True) -> Value:
    """`x weight^T + bias`, the weight `[out, in]` as torch has it; `[in, out]` if not transposed."""
    x, weight = as_value(x, "linear"), as_value(weight, "linear")
    operands = [x, weight] + ([] if bias is None else [as_value(bias, "linear")])
    if weight.ndim != 2 or not x.shape:
        raise ValueError(f"linear: expected x [.., in] and a weight of rank 2, got {x!r} and {weight!r}")
    if swaps_last(weight):
        operands[1] = weight = operand_of(weight)
        transposed = not transposed
    columns, inner = weight.shape if transposed else weight.shape[::-1]
    if x.shape[-1] != inner:
        raise ValueError(f"linear: expected a weight whose inner size is {x.shape[-1]}, got {shape_text(weight.shape)}")
    if len({operand._word for operand in operands}) != 1 or x._word not in FLOATS:
        raise TypeError(f"linear: expected float operands of one dtype, got {', '.join(o._word for o in operands)}")
    if bias is not None and operands[2].shape != (columns,):
        raise ValueError(f"linear: expected a bias [{columns}], got {shape_text(operands[2].shape)}")
    if x.ndim == 1:
        operands[0] = x.unsqueeze(0)
    flags = ["transposed"] if transposed else []
    y = emit("linear", operands, [(x._word, (*operands[0].shape[:-1], columns))], *flags)[0]
    return reshape(y, (*x.shape[:-1], columns))


def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    causal: bool = False,
    scale: Optional[Number] = None,
    p: Number = 0.0,
    seed: Any = None,
    from_end: bool = False,
) -> Value:
    """`dropout(softmax(scale q k^T + mask)) v` over `[.., sequence, features]`; heads may share keys and values.

    The mask is added; one of truth values keeps where it is true. A causal mask lets query `i` see the keys up to `i`;
    counted from the end, the last query sees all.
    """
    q, k, v = (as_value(x, "attention") for x in (q, k, v))
    if q.ndim < 2 or k.ndim < 2 or v.ndim < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(f"attention: expected q [.., m, d], k [.., n, d] and v [.., n, e], got {q!r}, {k!r} and {v!r}")
    if not q._word == k._word == v._word or q._word not in FLOATS:
        raise TypeError(f"attention: expected float operands of one dtype, got {q._word}, {k._word} and {v._word}")
    shape = (*q.shape[:-1], v.shape[-1])
    q, k, v, grouped = _heads(q, k, v)
    queries, keys = q.shape[-2], k.shape[-2]
    if causal and mask is not None:
        raise ValueError("attention: expected a mask or causal, got both")
    if causal and queries != keys and not from_end:
        # The text form counts from the end.
        mask = arange(keys, like=q) <= arange(queries, like=q).unsqueeze(1)
        causal = False
    operands, kind = [q, k, v], "causal" if causal else "full"
    if mask is not None:
        mask = as_value(mask, "attention")
        mask = where(mask, 0.0, -math.inf) if mask._word == "bool" else mask
        operands.append(grouped(mask))
        kind = "additive"
    words = [f"mask={kind}", f"scale={number_text(float(1 / math.sqrt(q.shape[-1]) if scale is None else scale))}"]
    if p:
        seed = as_value(seed, "attention")
        words.extend((*_dropout_words("attention", p, seed), f"offset={q._trace.offset()}"))
        operands.append(seed)
    return reshape(emit("attention", operands, [(q._word, (*q.shape[:-1], v.shape[-1]))], *words)[0], shape)


def _heads(q: Value, k: Value, v: Value) -> Tuple[Value, Value, Value, Callable[[Value], Value]]:
    """Keys and values for every head of queries, by repeated views, and what to do with a mask."""
    lead = q.shape[:-2]
    if k.shape[:-2] == lead and v.shape[:-2] == lead:
        return q, k, v, lambda mask: mask
    shared = k.ndim == v.ndim == q.ndim >= 3 and k.shape[-3] == v.shape[-3] and k.shape[-3] > 1
    if not shared or q.shape[-3] % k.shape[-3]:
        return q, broadcast(k, (*lead, *k.shape[-2:])), broadcast(v, (*lead, *v.shape[-2:])), lambda mask: mask
    heads, group = k.shape[-3], q.shape[-3] // k.shape[-3]
    repeated = [
        broadcast(x.unsqueeze(-3), (*lead[:-1], heads, group, *x.shape[-2:]))
        for x in (k, v)
    ]

    def grouped(mask: Value) -> Value:
        if mask.ndim < 3:
            return mask
        if mask.shape[-3] == 1:
            return mask.unsqueeze(-3)
        return mask.unflatten(-3, (heads, group))

    return q.unflatten(-3, (heads, group)), repeated[0], repeated[1], grouped


def checked(targets: Value, classes: int) -> Value:
    """Zeros `[.., 1]`, picked from a table with a row for each class: a target that is none is an error, as one out of a table is."""
    return full((classes, 1), 0.0, like=targets)[targets]


def cross_entropy(logits: Any, targets: Any, ignore_index: Optional[int] = -100) -> Value:
    """The mean over rows of `logsumexp(x) - x[target]`, as `f32`, but for the rows whose target is `ignore_index`."""
    logits, targets = as_value(logits, "cross_entropy"), as_value(targets, "cross_entropy")
    if targets._word != "i32" or targets.shape != logits.shape[:-1] or not logits.shape:
        raise ValueError(f"cross_entropy: expected an i32 target for each row, got {logits!r} and {targets!r}")
    statistics = ("f32", (*logits.shape[:-1], 1))
    if ignore_index is None:
        loss = emit("cross_entropy", (logits, targets), [("f32", ()), statistics])[0]
        return loss + sum(checked(targets, logits.shape[-1]))
    counted = targets != ignore_index
    # A target that is left out need not be a class.
    safe = where(counted, targets, 0)
    logsumexp = emit("cross_entropy", (logits, safe), [("f32", ()), statistics])[1]
    hit = arange(logits.shape[-1], like=logits) == safe.unsqueeze(-1)
    losses = logsumexp - cast(where(hit, logits, 0.0).sum(-1, keepdim=True), "f32") + checked(safe, logits.shape[-1])
    counted = counted.unsqueeze(-1)
    return sum(where(counted, losses, 0.0)) / sum(cast(counted, "f32"))

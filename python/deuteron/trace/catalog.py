"""Ops of the catalogue on values: what each computes, in the order of operands that a `Program` of its name has.

The engine defines them once, as graphs; a test holds what is written here against each of them.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from deuteron.trace.emit import as_value, emit
from deuteron.trace.named import attention, cross_entropy, dropout, embedding, geglu, gelu, layer_norm, linear, relu
from deuteron.trace.named import rms_norm, silu, swiglu
from deuteron.trace.rows import softmax
from deuteron.trace.value import Value

Results = Union[Value, Tuple[Value, ...]]

_LOGITS = 16 << 20
_FEWEST = 256


def expand(name: str, attributes: Mapping[str, Any], operands: Sequence[Any]) -> Results:
    """The results of an op: one, or a tuple."""
    word, *written = name.split()
    builder = _BUILDERS.get(word)
    if builder is None:
        raise ValueError(f"{word}: expected an op of the catalogue: {', '.join(sorted(_BUILDERS))}")
    given: Dict[str, Any] = dict((part.split("=", 1) + ["true"])[:2] for part in written)
    given.update({key: value for key, value in attributes.items() if value is not None})
    values = [as_value(operand, word) for operand in operands if operand is not None]
    try:
        return builder(_Attributes(word, given), values)
    except IndexError:
        raise TypeError(f"{word}: expected more operands than {len(values)}") from None


class _Attributes:
    """Attributes as they are written or passed, each read as what it is."""

    def __init__(self, op: str, given: Mapping[str, Any]) -> None:
        self.op = op
        self.given = given

    def number(self, key: str, usual: float) -> float:
        try:
            return float(self.given.get(key, usual))
        except (TypeError, ValueError):
            raise TypeError(f"{self.op}: expected a number for {key}, got {self.given[key]!r}") from None

    def optional(self, key: str) -> Optional[float]:
        return self.number(key, 0.0) if key in self.given and self.given[key] != "none" else None

    def flag(self, key: str, usual: bool = False) -> bool:
        return str(self.given.get(key, usual)).lower() in ("true", "1")

    def word(self, key: str, usual: str, words: Sequence[str]) -> str:
        word = str(self.given.get(key, usual))
        if word not in words:
            raise ValueError(f"{self.op}: expected {key} of {', '.join(words)}, got {word!r}")
        return word

    def mask(self, usual: str) -> str:
        return self.word("mask", usual, ("full", "causal", "additive"))

    def act(self, x: Value) -> Value:
        act = self.word("act", "gelu", ("gelu", "gelu_erf", "silu", "relu", "none"))
        functions: Dict[str, Callable[[Value], Value]] = {"silu": silu, "relu": relu, "none": lambda x: x}
        return functions[act](x) if act in functions else gelu(x, "none" if act == "gelu_erf" else "tanh")

    def norm(self, x: Value, weights: Sequence[Value]) -> Value:
        eps = self.number("eps", 1e-5)
        if self.word("norm", "layer", ("layer", "rms")) == "rms":
            return rms_norm(x, weights[0], eps)
        return layer_norm(x, weights[0], weights[1], eps)

    def dropout(self, x: Value, seed: Value) -> Value:
        return dropout(x, self.number("p", 0.1), seed)


def _act(a: _Attributes, v: Sequence[Value]) -> Results:
    return a.act(v[0])


def _mul_add_act(a: _Attributes, v: Sequence[Value]) -> Results:
    return a.act(v[0] * v[1] + v[2])


def _add_act(a: _Attributes, v: Sequence[Value]) -> Results:
    return a.act(v[0] + v[1])


def _act_dropout(a: _Attributes, v: Sequence[Value]) -> Results:
    return a.dropout(a.act(v[0]), v[1])


def _act_dropout_add(a: _Attributes, v: Sequence[Value]) -> Results:
    return a.dropout(a.act(v[0]), v[2]) + v[1]


def _bias_dropout_add(a: _Attributes, v: Sequence[Value]) -> Results:
    return a.dropout(v[0] + v[1], v[3]) + v[2]


def _halves(a: _Attributes, v: Sequence[Value]) -> Tuple[Value, Value]:
    if not a.flag("packed"):
        return v[0], v[1]
    half = v[0].shape[-1] // 2
    return v[0][..., :half], v[0][..., half : 2 * half]


def _swiglu(a: _Attributes, v: Sequence[Value]) -> Results:
    return swiglu(*_halves(a, v))


def _geglu(a: _Attributes, v: Sequence[Value]) -> Results:
    act = a.word("act", "gelu", ("gelu", "gelu_erf"))
    return geglu(*_halves(a, v), approximate="tanh" if act == "gelu" else "none")


def _layer_norm(a: _Attributes, v: Sequence[Value]) -> Results:
    return layer_norm(v[0], v[1], v[2], a.number("eps", 1e-5))


def _rms_norm(a: _Attributes, v: Sequence[Value]) -> Results:
    return rms_norm(v[0], v[1], a.number("eps", 1e-5))


def _norm_act(a: _Attributes, v: Sequence[Value]) -> Results:
    return a.act(a.norm(v[0], v[1:]))


def _norm_bias_act(a: _Attributes, v: Sequence[Value]) -> Results:
    return a.act(a.norm(v[0], v[2:]) + v[1])


def _add_norm(a: _Attributes, v: Sequence[Value]) -> Results:
    s = v[0] + v[1]
    return a.norm(s, v[2:]), s


def _dropout_add_norm(a: _Attributes, v: Sequence[Value]) -> Results:
    s = v[2] + a.dropout(v[0] + v[1], v[3])
    return a.norm(s, v[4:]), s


def _quantize(x: Value) -> Tuple[Value, ...]:
    return emit("quantize_int8", (x,), [("i8", x.shape), ("f32", (*x.shape[:-1], 1))])


def _norm_quantize(a: _Attributes, v: Sequence[Value]) -> Results:
    if not a.flag("residual"):
        return _quantize(a.norm(v[0], v[1:]))
    s = v[0] + v[1]
    return (*_quantize(a.norm(s, v[2:])), s)


def _softmax(a: _Attributes, v: Sequence[Value]) -> Results:
    scale, mask, p = a.optional("scale"), a.mask("full"), a.number("p", 0.0)
    x = v[0] if scale is None else v[0] * scale
    if mask == "causal":
        x = emit("causal_mask", (x,), [(x._word, x.shape)])[0]
    elif mask == "additive":
        x = x + v[1]
    y = softmax(x)
    return dropout(y, p, v[-1]) if p > 0 else y


def _attention_scores(a: _Attributes, v: Sequence[Value]) -> Results:
    mask, scale = a.mask("causal"), a.number("scale", 0.125)
    words = (f"mask={mask}", f"scale={scale!r}")
    shape = (*v[0].shape[:-1], v[1].shape[-2])
    return emit("attention_scores", v[: 3 if mask == "additive" else 2], [(v[0]._word, shape)], *words)[0]


def _embed_norm(a: _Attributes, v: Sequence[Value]) -> Results:
    s = embedding(v[0], v[1]) + v[2][: v[0].shape[-1]]
    return a.norm(s, v[3:]), s


def _linear_act(a: _Attributes, v: Sequence[Value]) -> Results:
    y = a.act(linear(v[0], v[1], v[2], transposed=False))
    return y + v[3] if a.flag("residual") else y


def _norm_linear(a: _Attributes, v: Sequence[Value]) -> Results:
    return linear(a.norm(v[0], v[3:]), v[1], v[2], transposed=False)


def _qkv(_: _Attributes, v: Sequence[Value]) -> Results:
    return linear(v[0], v[1], v[2], transposed=False)


def _ffn(a: _Attributes, v: Sequence[Value]) -> Results:
    single = a.flag("single")
    wide = a.act(linear(a.norm(v[0], v[3:] if single else v[5:]), v[1], v[2], transposed=False))
    return v[0] + (wide if single else linear(wide, v[3], v[4], transposed=False))


def _attention(a: _Attributes, v: Sequence[Value]) -> Results:
    mask, p = a.mask("causal"), a.number("p", 0.0)
    return _attend(mask, v, p, v[-1] if p > 0 else None)


def _attend(mask: str, v: Sequence[Value], p: float = 0.0, seed: Optional[Value] = None) -> Value:
    added = v[3] if mask == "additive" else None
    return attention(v[0], v[1], v[2], added, mask == "causal", p=p, seed=seed, from_end=True)


def _merged(a: _Attributes, v: Sequence[Value]) -> Value:
    attended = _attend(a.mask("causal"), v[:3])
    return attended.transpose(1, 2).flatten(2)


def _attention_add_norm(a: _Attributes, v: Sequence[Value]) -> Results:
    s = v[3] + _merged(a, v)
    return a.norm(s, v[4:]), s


def _attention_block(a: _Attributes, v: Sequence[Value]) -> Results:
    s = v[5] + linear(_merged(a, v), v[3], v[4], transposed=False)
    return a.norm(s, v[6:]), s


def _linear_cross_entropy(_: _Attributes, v: Sequence[Value]) -> Results:
    """Logits of few rows exist at a time, each time one row less: chunks of one size would share a kernel."""
    rows, classes = v[0].shape[0], v[1].shape[0]
    most = max(_LOGITS // max(classes, 1), _FEWEST)
    start = 0
    shares: List[Value] = []
    while start < rows:
        length = min(most - len(shares) % (most // 2), rows - start)
        part = slice(start, start + length)
        loss = cross_entropy(linear(v[0][part], v[1]), v[2][part], ignore_index=None)
        shares.append(loss * (length / rows))
        start += length
    if not shares:
        raise ValueError("linear_cross_entropy: expected at least 1 row, got 0")
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return total


def _moe_int8(a: _Attributes, v: Sequence[Value]) -> Results:
    word = v[5]._word
    shape = (v[0].shape[0], v[3].shape[1])
    y = emit("expert_linear", v[:6], [(word, shape)], word)[0]
    y = a.act(y)
    return _quantize(y) if a.flag("requantize", True) else y


_BUILDERS: Dict[str, Callable[[_Attributes, Sequence[Value]], Results]] = {
    "act": _act,
    "mul_add_act": _mul_add_act,
    "add_act": _add_act,
    "bias_act": _add_act,
    "act_dropout": _act_dropout,
    "act_dropout_add": _act_dropout_add,
    "bias_dropout_add": _bias_dropout_add,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "norm_act": _norm_act,
    "norm_bias_act": _norm_bias_act,
    "add_norm": _add_norm,
    "dropout_add_norm": _dropout_add_norm,
    "norm_quantize": _norm_quantize,
    "softmax": _softmax,
    "attention_scores": _attention_scores,
    "embed_norm": _embed_norm,
    "linear_act": _linear_act,
    "norm_linear": _norm_linear,
    "qkv": _qkv,
    "ffn": _ffn,
    "attention": _attention,
    "attention_add_norm": _attention_add_norm,
    "attention_block": _attention_block,
    "linear_cross_entropy": _linear_cross_entropy,
    "moe_int8": _moe_int8,
}

NAMES = frozenset(_BUILDERS)
"""Every op of the catalogue."""

"""Every op of the catalogue: how it is called, what it computes, and operands of a size for it.

A formula is written once, over a library: that of NumPy or that of torch. In `f64` it is what an op is held against;
in the dtype of the op it is the yardstick of how far off plain code is there.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

import deuteron

Size = Tuple[int, int]

ROWS: Tuple[Size, ...] = ((3, 1), (1, 127), (5, 129), (2, 1500))
"""Rows and columns: one, around a vector and a block, more than a block."""

PRODUCTS: Tuple[Size, ...] = ((1, 1), (3, 127), (129, 8), (2, 1500))
"""Rows and columns of what is multiplied."""

HEADS: Tuple[Size, ...] = ((1, 1), (127, 8), (129, 64), (3, 129))
"""Positions and features of a head."""

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance of 1 to the next number, by the name of a dtype."""


class Operand(NamedTuple):
    """What an operand is made of."""

    name: str
    kind: str
    shape: Tuple[int, ...]
    below: int = 0


class Case(NamedTuple):
    """An op with its attributes."""

    name: str
    call: Callable[..., Any]
    plain: Callable[..., Any]
    operands: Callable[[int, int], List[Operand]]
    sizes: Tuple[Size, ...] = ROWS
    differentiable: bool = True

    @property
    def op(self) -> str:
        """Its name in the catalogue."""
        return self.name.split("-")[0]


# Libraries that formulas are written over. Tensors of both have `@`, `reshape`, `swapaxes` and indices.


class Numpy:
    """Formulas in NumPy."""

    @staticmethod
    def act(x: Any, kind: str) -> Any:
        if kind == "relu":
            return np.maximum(x, 0)
        if kind == "silu":
            return x / (1 + np.exp(-x))
        if kind == "gelu":
            erf = np.vectorize(math.erf, otypes=["float64"])(x.astype("float64") / math.sqrt(2.0))
            return x * 0.5 * (1 + erf.astype(x.dtype))
        return x * 0.5 * (1 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))

    @staticmethod
    def norm(x: Any, w: Any, b: Optional[Any] = None, eps: float = 1e-5) -> Any:
        if b is None:
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * w + b

    @staticmethod
    def softmax(x: Any) -> Any:
        e = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
        return e / e.sum(-1, keepdims=True)

    @staticmethod
    def masked(x: Any, hidden: Any) -> Any:
        return np.where(hidden, x.dtype.type(-np.inf), x)

    @staticmethod
    def constant(values: Any, like: Any) -> Any:
        return np.asarray(values).astype(like.dtype)

    @staticmethod
    def repeat(x: Any, times: int, axis: int) -> Any:
        return np.repeat(x, times, axis)

    @staticmethod
    def number(x: Any) -> int:
        return int(x)

    @staticmethod
    def index(x: Any) -> Any:
        return x.astype("int64")

    @staticmethod
    def largest(x: Any) -> Any:
        return np.abs(x).max(-1, keepdims=True, initial=0.0)

    @staticmethod
    def cross_entropy(logits: Any, targets: Any) -> Any:
        top = logits.max(-1, keepdims=True)
        whole = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
        return (whole - logits[np.arange(len(logits)), targets]).mean()


class Torch:
    """Formulas in torch, as its users write them."""

    @staticmethod
    def act(x: Any, kind: str) -> Any:
        from torch.nn import functional

        if kind in ("gelu", "gelu_tanh"):
            return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
        return getattr(functional, kind)(x)

    @staticmethod
    def norm(x: Any, w: Any, b: Optional[Any] = None, eps: float = 1e-5) -> Any:
        from torch.nn import functional

        if b is None:
            return functional.rms_norm(x, x.shape[-1:], w, eps)
        return functional.layer_norm(x, x.shape[-1:], w, b, eps)

    @staticmethod
    def softmax(x: Any) -> Any:
        return x.softmax(-1)

    @staticmethod
    def masked(x: Any, hidden: Any) -> Any:
        import torch

        return x.masked_fill(torch.as_tensor(hidden, device=x.device), -math.inf)

    @staticmethod
    def constant(values: Any, like: Any) -> Any:
        import torch

        return torch.as_tensor(values, dtype=like.dtype, device=like.device)

    @staticmethod
    def repeat(x: Any, times: int, axis: int) -> Any:
        return x.repeat_interleave(times, axis)

    @staticmethod
    def number(x: Any) -> int:
        return int(x)

    @staticmethod
    def index(x: Any) -> Any:
        return x.long()

    @staticmethod
    def largest(x: Any) -> Any:
        return x.abs().amax(-1, keepdim=True)

    @staticmethod
    def cross_entropy(logits: Any, targets: Any) -> Any:
        from torch.nn import functional

        return functional.cross_entropy(logits, targets)


# Formulas.


def kept(elements: int, seed: int, p: float) -> Any:
    """Which of so many elements dropout keeps: their words of Philox4x32-10 under the seed are not below `p`."""
    low = np.uint64(0xFFFFFFFF)
    block = np.arange((elements + 3) // 4, dtype=np.uint64)
    counter = [block & low, block >> np.uint64(32), np.zeros_like(block), np.zeros_like(block)]
    key = [seed & 0xFFFFFFFF, 0]
    for _ in range(10):
        even, odd = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        first = (odd >> np.uint64(32)) ^ counter[1] ^ np.uint64(key[0])
        third = (even >> np.uint64(32)) ^ counter[3] ^ np.uint64(key[1])
        counter = [first, odd & low, third, even & low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    words = np.stack(counter, -1).reshape(-1)[:elements]
    return words >= np.uint64(math.floor(p * 2.0**32))


def drop(lib: Any, x: Any, p: float, seed: Any) -> Any:
    if p == 0.0:
        return x
    mask = kept(math.prod(x.shape), lib.number(seed), p).reshape(tuple(x.shape))
    return x * lib.constant(mask / (1.0 - p), x)


def masked(lib: Any, scores: Any, mask: str, operands: Sequence[Any]) -> Any:
    """Scores under a mask. Query `i` sees the keys up to `i`; counted from the end, the last sees all."""
    if mask in ("causal", "causal_from_end"):
        queries, keys = scores.shape[-2:]
        shift = keys - queries if mask == "causal_from_end" else 0
        return lib.masked(scores, np.arange(keys) > np.arange(queries)[:, None] + shift)
    return scores + operands[0] if mask == "additive" else scores


def attend(
    lib: Any, q: Any, k: Any, v: Any, *rest: Any, mask: str = "causal", p: float = 0.0, scale: Optional[float] = None
) -> Any:
    if k.shape[1] < q.shape[1]:
        k, v = (lib.repeat(part, q.shape[1] // k.shape[1], 1) for part in (k, v))
    scores = (q @ k.swapaxes(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = lib.softmax(masked(lib, scores, mask, rest))
    return drop(lib, weights, p, rest[-1] if rest else None) @ v


def merged(lib: Any, q: Any, k: Any, v: Any, mask: str) -> Any:
    """Attention, its heads side by side."""
    y = attend(lib, q, k, v, mask=mask)
    return y.swapaxes(1, 2).reshape(y.shape[0], y.shape[2], y.shape[1] * y.shape[3])


def with_sum(lib: Any, s: Any, *weights: Any) -> Any:
    return lib.norm(s, *weights), s


def softmax(lib: Any, x: Any, *rest: Any, scale: Optional[float], mask: str, p: float) -> Any:
    scores = x if scale is None else x * scale
    return drop(lib, lib.softmax(masked(lib, scores, mask, rest)), p, rest[-1] if rest else None)


def scores(lib: Any, q: Any, k: Any, *rest: Any, mask: str, scale: Optional[float]) -> Any:
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return lib.softmax(masked(lib, (q @ k.swapaxes(-1, -2)) * factor, mask, rest))


def quantized(lib: Any, y: Any) -> Any:
    """Rows over their scales, not rounded, and the scales."""
    scale = lib.largest(y) / 127.0
    return y / (scale + (scale == 0)), scale


def heads(lib: Any, x: Any, weight: Any, bias: Any, queries: int, keys: int) -> Any:
    y = x @ weight + bias
    every = queries + 2 * keys
    y = y.reshape(y.shape[0], y.shape[1], every, y.shape[2] // every).swapaxes(1, 2)
    return y[:, :queries], y[:, queries : queries + keys], y[:, queries + keys :]


def experts(
    lib: Any, x: Any, x_scale: Any, chosen: Any, weight: Any, weight_scale: Any, bias: Any, act: Optional[str]
) -> Any:
    """Int8 rows times the matrix of their expert: in whole numbers that a double holds exactly."""
    chosen = lib.index(chosen)
    x, weight = lib.constant(x, x_scale), lib.constant(weight, x_scale)
    product = (weight[chosen] @ x[:, :, None])[:, :, 0] * x_scale * weight_scale[chosen] + bias[chosen]
    return product if act is None else lib.act(product, act)


def mixed(
    lib: Any, x: Any, chosen: Any, weight: Any, bias: Any, shares: Optional[Any] = None, act: Optional[str] = "gelu"
) -> Any:
    """Rows times the matrices of their experts, one or several; with shares, their weighted sum."""
    chosen = lib.index(chosen)
    rows = x if x.ndim == chosen.ndim + 1 else x[:, None]
    product = (weight[chosen] @ rows[..., None])[..., 0] + bias[chosen]
    y = product if act is None else lib.act(product, act)
    return y if shares is None else (y * shares[..., None]).sum(-2)


def embedded(lib: Any, tokens: Any, wte: Any, wpe: Any, *weights: Any) -> Any:
    tokens = lib.index(tokens)
    return with_sum(lib, wte[tokens] + wpe[: tokens.shape[-1]], *weights)


# Operands.


def value(name: str, *shape: int) -> Operand:
    return Operand(name, "normal", shape)


def weight(name: str, *shape: int) -> Operand:
    return Operand(name, "weight", shape)


def scale(cols: int) -> Operand:
    return Operand("w", "scale", (cols,))


def norms(cols: int, kind: str) -> List[Operand]:
    return [scale(cols), weight("b", cols)] if kind == "layer" else [scale(cols)]


SEED = Operand("seed", "seed", ())


def attended(sequence: int, features: int, queries: int = 2, keys: int = 2) -> List[Operand]:
    """Two batches of heads, fewer where they are long."""
    batch = 2 if sequence * features < 4096 else 1
    shared = (batch, keys, sequence, features)
    return [value("q", batch, queries, sequence, features), value("k", *shared), value("v", *shared)]


def block(sequence: int, features: int, kind: str) -> List[Operand]:
    """Attention, what is added to it, and a norm."""
    q, k, v = attended(sequence, features)
    cols = 2 * features
    return [q, k, v, value("r", q.shape[0], sequence, cols), *norms(cols, kind)]


def projected(sequence: int, features: int, kind: str) -> List[Operand]:
    q, k, v, *rest = block(sequence, features, kind)
    cols = 2 * features
    return [q, k, v, weight("weight", cols, cols), weight("bias", cols), *rest]


def routed(rows: int, cols: int) -> List[Operand]:
    outputs = 33
    return [
        Operand("x", "bytes", (rows, cols)),
        Operand("x_scale", "positive", (rows, 1)),
        Operand("experts", "index", (rows,), below=3),
        Operand("weight", "bytes", (3, outputs, cols)),
        Operand("weight_scale", "positive", (3, outputs)),
        weight("bias", 3, outputs),
    ]


def chosen(rows: int, cols: int, choices: int, shares: bool = False, own: bool = False) -> List[Operand]:
    """Rows for experts of 33 columns: one or several choices each, with shares, of rows that choices share or have to themselves."""
    outputs, places = 33, (rows, choices) if choices else (rows,)
    operands = [
        value("x", *places, cols) if own else value("x", rows, cols),
        Operand("experts", "index", places, below=3),
        weight("weight", 3, outputs, cols),
        weight("bias", 3, outputs),
    ]
    return [*operands, value("expert_weights", *places)] if shares else operands


def make(operand: Operand, generator: Any) -> Any:
    """Its elements: floats as `f64`, to be rounded, unless they are always `f32`."""
    if operand.kind == "index":
        return generator.integers(0, operand.below, operand.shape)
    if operand.kind == "seed":
        return np.asarray(generator.integers(-(2**31), 2**31), dtype="int32")
    if operand.kind == "bytes":
        return generator.integers(-127, 128, operand.shape).astype("int8")
    if operand.kind == "positive":
        return generator.uniform(0.002, 0.02, operand.shape).astype("float32")
    normal = generator.standard_normal(operand.shape)
    if operand.kind == "scale":
        return 1.0 + 0.1 * normal
    # Products of weights stay of size one.
    share = 1.0 / math.sqrt(max(operand.shape[0], 1)) if len(operand.shape) > 1 else 0.5
    return normal * share if operand.kind == "weight" else normal


def operands(case: Case, size: Size, seed: int = 0) -> List[Any]:
    """Arrays for a case."""
    generator = np.random.default_rng(seed)
    return [make(operand, generator) for operand in case.operands(*size)]


def rounded(arrays: Sequence[Any], dtype: str) -> List[Any]:
    """Arrays in a dtype of NumPy. Those that are `f32` always are `f64` beside others of it."""
    doubles = dtype == "float64"
    return [a.astype(dtype) if a.dtype == np.float64 or (doubles and a.dtype == np.float32) else a for a in arrays]


# The table.


def _of(function: Any, **attributes: Any) -> Callable[..., Any]:
    return functools.partial(function, **attributes)


def _pointwise() -> List[Case]:
    """Activations, sums and dropout."""
    d, cases = deuteron, []
    for act in ("gelu", "gelu_tanh", "silu", "relu"):
        cases += [
            Case(
                f"act-{act}", _of(d.act, act=act), lambda m, x, act=act: m.act(x, act), lambda r, c: [value("x", r, c)]
            ),
            Case(
                f"add_act-{act}",
                _of(d.add_act, act=act),
                lambda m, x, r, act=act: m.act(x + r, act),
                lambda r, c: [value("x", 2, r, c), value("r", 2, r, c)],
            ),
            Case(
                f"bias_act-{act}",
                _of(d.bias_act, act=act),
                lambda m, x, b, act=act: m.act(x + b, act),
                lambda r, c: [value("x", r, c), weight("b", c)],
            ),
        ]
    cases += [
        Case(
            "mul_add_act",
            _of(d.mul_add_act),
            lambda m, x, w, b: m.act(x * w + b, "gelu"),
            lambda r, c: [value("x", r, c), value("w", r, c), value("b", r, c)],
        ),
        Case(
            "mul_add_act-repeated",
            _of(d.mul_add_act, act="silu"),
            lambda m, x, w, b: m.act(x * w + b, "silu"),
            lambda r, c: [value("x", 2, r, c), value("w", c), value("b", r, 1)],
        ),
        Case(
            "act_dropout",
            lambda x, seed: d.act_dropout(x, 0.25, seed),
            lambda m, x, seed: drop(m, m.act(x, "gelu"), 0.25, seed),
            lambda r, c: [value("x", r, c), SEED],
        ),
        Case(
            "act_dropout_add",
            lambda x, r, seed: d.act_dropout_add(x, r, 0.1, seed, act="relu"),
            lambda m, x, r, seed: drop(m, m.act(x, "relu"), 0.1, seed) + r,
            lambda r, c: [value("x", r, c), value("r", r, c), SEED],
        ),
        Case(
            "bias_dropout_add",
            lambda x, b, r, seed: d.bias_dropout_add(x, b, r, 0.5, seed),
            lambda m, x, b, r, seed: drop(m, x + b, 0.5, seed) + r,
            lambda r, c: [value("x", r, c), weight("b", c), value("r", r, c), SEED],
        ),
    ]
    for name, act in (("swiglu", "silu"), ("geglu", "gelu"), ("geglu", "gelu_tanh")):
        kind = {} if name == "swiglu" else {"act": act}
        cases += [
            Case(
                f"{name}-{act}",
                _of(getattr(d, name), **kind),
                lambda m, x, g, act=act: m.act(x, act) * g,
                lambda r, c: [value("x", r, c), value("g", r, c)],
            ),
            Case(
                f"{name}-{act}-packed",
                _of(getattr(d, name), **kind),
                lambda m, x, act=act: m.act(x[..., : x.shape[-1] // 2], act) * x[..., x.shape[-1] // 2 :],
                lambda r, c: [value("xg", r, 2 * c)],
            ),
        ]
    return cases


def _norms() -> List[Case]:
    """Norms and what stands beside them."""
    d, cases = deuteron, []
    for kind, act in (("layer", "gelu"), ("layer", "relu"), ("rms", "silu")):
        cases.append(
            Case(
                f"norm_act-{kind}-{act}",
                _of(d.norm_act, act=act, norm=kind),
                lambda m, *o, act=act: m.act(m.norm(*o), act),
                lambda r, c, kind=kind: [value("x", r, c), *norms(c, kind)],
            )
        )
    for kind, act in (("layer", "gelu"), ("rms", "silu")):
        cases += [
            Case(
                f"{kind}_norm",
                _of(getattr(d, f"{kind}_norm")),
                lambda m, *o: m.norm(*o),
                lambda r, c, kind=kind: [value("x", 2, r, c), *norms(c, kind)],
            ),
            Case(
                f"norm_bias_act-{kind}",
                _of(d.norm_bias_act, act=act, norm=kind),
                lambda m, x, bias, *w, act=act: m.act(m.norm(x, *w) + bias, act),
                lambda r, c, kind=kind: [value("x", r, c), weight("bias", c), *norms(c, kind)],
            ),
            Case(
                f"add_norm-{kind}",
                _of(d.add_norm, norm=kind),
                lambda m, x, r, *w: with_sum(m, x + r, *w),
                lambda r, c, kind=kind: [value("x", r, c), value("r", r, c), *norms(c, kind)],
            ),
            Case(
                f"dropout_add_norm-{kind}",
                lambda x, bias, r, seed, *w, kind=kind: d.dropout_add_norm(x, bias, r, *w, p=0.25, seed=seed, norm=kind),
                lambda m, x, bias, r, seed, *w: with_sum(m, r + drop(m, x + bias, 0.25, seed), *w),
                lambda r, c, kind=kind: [value("x", r, c), weight("bias", c), value("r", r, c), SEED, *norms(c, kind)],
            ),
            Case(
                f"norm_quantize-{kind}",
                _of(d.norm_quantize, norm=kind),
                lambda m, *o: quantized(m, m.norm(*o)),
                lambda r, c, kind=kind: [value("x", r, c), *norms(c, kind)],
                differentiable=False,
            ),
            Case(
                f"norm_quantize-{kind}-residual",
                lambda x, r, *w, kind=kind: d.norm_quantize(x, *w, r=r, norm=kind),
                lambda m, x, r, *w: (*quantized(m, m.norm(x + r, *w)), x + r),
                lambda r, c, kind=kind: [value("x", r, c), value("r", r, c), *norms(c, kind)],
                differentiable=False,
            ),
            Case(
                f"embed_norm-{kind}",
                _of(d.embed_norm, norm=kind),
                embedded,
                lambda r, c, kind=kind: [
                    Operand("tokens", "index", (2, r), below=17),
                    value("wte", 17, c),
                    value("wpe", r + 2, c),
                    *norms(c, kind),
                ],
            ),
        ]
    return cases


def _softmaxes() -> List[Case]:
    d, cases = deuteron, []
    for name, factor, mask, p in (
        ("", None, "full", 0.0),
        ("-causal-dropout", 0.125, "causal", 0.25),
        ("-additive", 0.5, "additive", 0.0),
        ("-additive-dropout", None, "additive", 0.1),
    ):
        rest = ([value("mask", 1, 1)] if mask == "additive" else []) + ([SEED] if p else [])

        def call(x: Any, *rest: Any, factor: Any = factor, mask: str = mask, p: float = p) -> Any:
            given = rest[0] if mask == "additive" else mask
            return d.softmax(x, factor, given, p, rest[-1] if p else None)

        def types(rows: int, cols: int, rest: Any = rest) -> List[Operand]:
            rows = cols if rows > cols else rows
            return [value("x", 2, rows, cols)] + [o._replace(shape=(rows, cols)) if o.shape else o for o in rest]

        cases.append(Case(f"softmax{name}", call, functools.partial(softmax, scale=factor, mask=mask, p=p), types))
    for mask, factor in (("causal", None), ("full", 0.25), ("additive", 0.25)):

        def scored(q: Any, k: Any, *rest: Any, mask: str = mask, factor: Any = factor) -> Any:
            return d.attention_scores(q, k, rest[0] if rest else mask, factor)

        def keys(sequence: int, features: int, mask: str = mask) -> List[Operand]:
            rest = [value("mask", sequence, sequence)] if mask == "additive" else []
            return attended(sequence, features)[:2] + rest

        plain = functools.partial(scores, mask=mask, scale=factor)
        cases.append(Case(f"attention_scores-{mask}", scored, plain, keys, HEADS))
    return cases


def _attentions() -> List[Case]:
    d, cases = deuteron, []
    for name, mask, p, shared in (
        ("causal", "causal", 0.0, 2),
        ("full", "full", 0.0, 2),
        ("additive-dropout", "additive", 0.25, 2),
        ("dropout", "causal", 0.1, 2),
        ("shared", "causal", 0.0, 1),
    ):

        def call(q: Any, k: Any, v: Any, *rest: Any, mask: str = mask, p: float = p) -> Any:
            return d.attention(q, k, v, rest[0] if mask == "additive" else mask, p, rest[-1] if p else None)

        def types(sequence: int, features: int, mask: str = mask, p: float = p, shared: int = shared) -> List[Operand]:
            rest = [value("mask", sequence, sequence)] if mask == "additive" else []
            return attended(sequence, features, 2, shared) + rest + ([SEED] if p else [])

        cases.append(Case(f"attention-{name}", call, functools.partial(attend, mask=mask, p=p), types, HEADS))
    for name, mask, more in (("longer-keys", "causal", 5), ("fewer-keys", "causal", -2), ("from-end", "causal_from_end", 5)):
        cases.append(
            Case(
                f"attention-{name}",
                _of(d.attention, mask=mask),
                functools.partial(attend, mask=mask),
                lambda s, f, more=more: [
                    value("q", 1, 2, s, f),
                    *(value(part, 1, 2, max(s + more, 1), f) for part in "kv"),
                ],
                HEADS,
            )
        )
    cases.append(
        Case(
            "attention-scaled",
            _of(d.attention, mask="full", scale=0.25),
            functools.partial(attend, mask="full", scale=0.25),
            lambda s, f: attended(s, f),
            HEADS,
        )
    )
    for kind, mask in (("layer", "causal"), ("rms", "full")):
        cases += [
            Case(
                f"attention_add_norm-{kind}",
                _of(d.attention_add_norm, mask=mask, norm=kind),
                lambda m, q, k, v, r, *w, mask=mask: with_sum(m, r + merged(m, q, k, v, mask), *w),
                lambda s, f, kind=kind: block(s, f, kind),
                HEADS,
            ),
            Case(
                f"attention_block-{kind}",
                _of(d.attention_block, mask=mask, norm=kind),
                lambda m, q, k, v, weight, bias, r, *w, mask=mask: with_sum(
                    m, r + (merged(m, q, k, v, mask) @ weight + bias), *w
                ),
                lambda s, f, kind=kind: projected(s, f, kind),
                HEADS,
            ),
        ]
    return cases


def _products() -> List[Case]:
    d, cases = deuteron, []
    for kind, act in (("layer", "gelu"), ("rms", "silu")):
        cases += [
            Case(
                f"norm_linear-{kind}",
                _of(d.norm_linear, norm=kind),
                lambda m, x, weight, bias, *w: m.norm(x, *w) @ weight + bias,
                lambda r, c, kind=kind: [
                    value("x", r, c),
                    weight("weight", c, 33),
                    weight("bias", 33),
                    *norms(c, kind),
                ],
                PRODUCTS,
            ),
            Case(
                f"ffn-{kind}",
                lambda x, w1, b1, w2, b2, *w, act=act, kind=kind: d.ffn(
                    x, w1, b1, w2, b2, **dict(zip("wb", w)), act=act, norm=kind
                ),
                lambda m, x, w1, b1, w2, b2, *w, act=act: x + (m.act(m.norm(x, *w) @ w1 + b1, act) @ w2 + b2),
                lambda r, c, kind=kind: [
                    value("x", r, c),
                    weight("weight1", c, 48),
                    weight("bias1", 48),
                    weight("weight2", 48, c),
                    weight("bias2", c),
                    *norms(c, kind),
                ],
                PRODUCTS,
            ),
        ]
    return cases + [
        Case(
            "ffn-single",
            lambda x, weight, bias, w, b: d.ffn(x, weight, bias, w=w, b=b),
            lambda m, x, weight, bias, w, b: x + m.act(m.norm(x, w, b) @ weight + bias, "gelu"),
            lambda r, c: [value("x", r, c), weight("weight", c, c), weight("bias", c), *norms(c, "layer")],
            PRODUCTS[:3],
        ),
        Case(
            "linear_act",
            _of(d.linear_act),
            lambda m, x, weight, bias: m.act(x @ weight + bias, "gelu"),
            lambda r, c: [value("x", 2, r, c), weight("weight", c, 33), weight("bias", 33)],
            PRODUCTS,
        ),
        Case(
            "linear_act-residual",
            lambda x, weight, bias, r: d.linear_act(x, weight, bias, "relu", r),
            lambda m, x, weight, bias, r: m.act(x @ weight + bias, "relu") + r,
            lambda r, c: [value("x", r, c), weight("weight", c, 33), weight("bias", 33), value("r", r, 33)],
            PRODUCTS,
        ),
        Case(
            "qkv",
            _of(d.qkv, heads=3),
            _of(heads, queries=3, keys=3),
            lambda r, c: [value("x", 2, r, c), weight("weight", c, 36), weight("bias", 36)],
            PRODUCTS,
        ),
        Case(
            "qkv-shared",
            _of(d.qkv, heads=4, key_heads=2),
            _of(heads, queries=4, keys=2),
            lambda r, c: [value("x", 2, r, c), weight("weight", c, 40), weight("bias", 40)],
            PRODUCTS,
        ),
        Case(
            "linear_cross_entropy",
            _of(d.linear_cross_entropy),
            lambda m, x, weight, targets: m.cross_entropy(x @ weight.swapaxes(0, 1), m.index(targets)),
            lambda r, c: [value("x", r, c), weight("weight", 33, c), Operand("targets", "index", (r,), below=33)],
            PRODUCTS,
        ),
        Case(
            "linear_cross_entropy-sum",
            _of(d.linear_cross_entropy, reduction="sum"),
            lambda m, x, weight, targets: m.cross_entropy(x @ weight.swapaxes(0, 1), m.index(targets)) * x.shape[0],
            lambda r, c: [value("x", r, c), weight("weight", 33, c), Operand("targets", "index", (r,), below=33)],
            PRODUCTS,
        ),
        Case("moe", _of(d.moe), mixed, lambda r, c: chosen(r, c, 0), PRODUCTS, differentiable=False),
        Case(
            "moe-choices",
            _of(d.moe, act=None),
            _of(mixed, act=None),
            lambda r, c: chosen(r, c, 2, own=True),
            PRODUCTS,
            differentiable=False,
        ),
        Case(
            "moe-weighted",
            _of(d.moe, act="silu"),
            _of(mixed, act="silu"),
            lambda r, c: chosen(r, c, 3, shares=True),
            PRODUCTS,
            differentiable=False,
        ),
        Case(
            "moe_int8",
            _of(d.moe_int8),
            lambda m, *o: quantized(m, experts(m, *o, act="gelu")),
            routed,
            differentiable=False,
        ),
        Case(
            "moe_int8-floats",
            _of(d.moe_int8, act=None, requantize=False),
            _of(experts, act=None),
            routed,
            differentiable=False,
        ),
    ]


CASES: Dict[str, Case] = {
    case.name: case for case in [*_pointwise(), *_norms(), *_softmaxes(), *_attentions(), *_products()]
}

DIFFERENTIABLE = [name for name, case in CASES.items() if case.differentiable]


def terms(size: Size) -> int:
    """Terms of the longest sum. A norm of one column has no deviation: it multiplies rounding by `1 / sqrt(eps)`."""
    return 100_000 if 1 in size else max(size)


def case_sizes() -> List[Tuple[str, Size]]:
    """Every case at every size of its."""
    return [(name, size) for name, case in CASES.items() for size in case.sizes]


# Comparison.


def listed(results: Any) -> List[Any]:
    """One result or several, as a list."""
    return list(results) if isinstance(results, (tuple, list)) else [results]


def doubles(array: Any) -> Any:
    """A result as an array of `f64`."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().double().numpy()
    return np.asarray(array).astype("float64")


def check(got: Any, own: Any, exact: Any, dtype: str, terms: int, times: float = 2.0, name: str = "result") -> None:
    """That a result is at most `times` as far off as plain code is in its dtype.

    Plain code is taken to be off by the rounding of the largest element at least, so that it cannot be lucky. Sums of
    so many terms of size one may be taken in another order in `f32`. Whole numbers are results of a quantisation: they
    are compared with the exact quotient, and may be off by a half besides.
    """
    whole = "int" in str(got.dtype)
    got, own, exact = doubles(got), doubles(own), doubles(exact)
    assert got.shape == exact.shape, f"{name}: got {got.shape}, expected {exact.shape}"
    if not exact.size:
        return
    assert np.isfinite(got).all(), f"{name}: not finite"
    magnitude = np.abs(exact).max()
    error, yardstick = np.abs(got - exact).max(), np.abs(own - exact).max()
    bound = times * max(yardstick, EPSILON[dtype] / 2 * magnitude)
    bound += EPSILON["float32"] * math.sqrt(terms) * max(magnitude, 1.0)
    told = f"{name}: off by {error:.3e}, plain code by {yardstick:.3e}, of a magnitude of {magnitude:.3g}"
    assert error <= bound + 0.5 * whole, told


def check_exact(got: Any, exact: Any, terms: int, name: str = "result") -> None:
    """That a result in `f64` is exact but for the rounding of sums of so many terms, and of some functions."""
    whole = "int" in str(got.dtype)
    got, exact = doubles(got), doubles(exact)
    assert got.shape == exact.shape, f"{name}: got {got.shape}, expected {exact.shape}"
    if exact.size:
        bound = 16 * EPSILON["float64"] * math.sqrt(terms) * max(np.abs(exact).max(), 1.0) + 0.5 * whole
        assert np.abs(got - exact).max() <= bound, f"{name}: off by {np.abs(got - exact).max():.3e} in f64"

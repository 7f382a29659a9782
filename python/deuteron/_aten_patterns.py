"""Recognises hand-written GELU, SiLU, RMS norm and attention, which the text form has names for."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from deuteron import trace as ours
from deuteron._aten_ops import mask_kind, short_name
from deuteron.trace import elementwise
from deuteron.trace.value import Value

if TYPE_CHECKING:
    from deuteron._aten import Translator

Polynomial = Dict[Tuple[int, int], float]

_ROOT = math.sqrt(2 / math.pi)
_HALF: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}

# `p(x, t)` with `t = function(q(x))`: powers of x and t, and their factors.
_ACTIVATIONS: Sequence[Tuple[str, Polynomial, Polynomial, str]] = (
    ("tanh", _HALF, {(1, 0): _ROOT, (3, 0): 0.044715 * _ROOT}, "gelu_tanh"),
    ("erf", _HALF, {(1, 0): math.sqrt(0.5)}, "gelu_erf"),
    ("sigmoid", {(1, 1): 1.0}, {(1, 0): 1.0}, "silu"),
)

_SAME = ("to", "_to_copy", "alias", "clone", "contiguous", "type_as", "lift_fresh_copy")
_DEEPEST = 8


class Patterns:
    """Looks back from a node of a program."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator

    def find(self, node: Any) -> Optional[Value]:
        """The value of a node, if it ends something that has a name."""
        name = _name(node)
        if name in ("mul", "div"):
            activation = self._activation(node)
            return self._rms_norm(node) if activation is None and name == "mul" else activation
        return self._attention(node) if name in ("matmul", "bmm") else None

    # Activations.

    def _activation(self, node: Any) -> Optional[Value]:
        for function in _subtree(node, _DEEPEST):
            for name, outer, inner, meaning in _ACTIVATIONS:
                if _name(function) != name:
                    continue
                for x in _subtree(function.args[0], _DEEPEST):
                    inside = _polynomial(function.args[0], x, None, _DEEPEST)
                    if _close(inside, inner) and _close(_polynomial(node, x, function, _DEEPEST), outer):
                        return self._activated(meaning, x)
        return None

    def _activated(self, meaning: str, source: Any) -> Optional[Value]:
        x = self.translator.known.get(source)
        if not isinstance(x, Value):
            return None
        if meaning == "silu":
            return ours.silu(x)
        return ours.gelu(x, "tanh" if meaning == "gelu_tanh" else "none")

    # Norms.

    def _rms_norm(self, node: Any) -> Optional[Value]:
        """`w * (x * rsqrt(mean(x^2) + eps))`"""
        for weight, normed in (node.args[:2], node.args[1::-1]):
            w = self.translator.known.get(weight) if isinstance(weight, torch.fx.Node) else None
            inner = _stripped(normed)
            if not isinstance(w, Value) or w.ndim != 1 or _name(inner) != "mul":
                continue
            for x, root in (inner.args[:2], inner.args[1::-1]):
                eps = _root_mean_square(x, _stripped(root))
                value = self.translator.known.get(_stripped(x))
                if eps is not None and isinstance(value, Value) and value.shape[-1:] == w.shape:
                    return elementwise.cast(ours.rms_norm(value, w, eps), _word(self, node))
        return None

    # Attention.

    def _attention(self, node: Any) -> Optional[Value]:
        """`softmax(scale q k^T + mask) v`, masks added or filled in."""
        t = self.translator
        softmax, p = _undropped(node.args[0])
        if _name(softmax) not in ("softmax", "_softmax"):
            return None
        scores = _stripped(softmax.args[0])
        if softmax.args[1] not in (-1, scores.meta["val"].dim() - 1):
            return None
        scale, mask = 1.0, None
        while _name(scores) not in ("matmul", "bmm"):
            step = self._step(scores)
            if step is None:
                return None
            # A mask that was scaled is one that scales do not change.
            if step.mask is not None and (mask is not None or scale != 1 and not _is_filled(step.mask)):
                return None
            scale *= step.factor
            mask = mask if step.mask is None else step.mask
            scores = _stripped(step.before)
        q, k, v = (t.known.get(x) for x in (*scores.args[:2], node.args[1]))
        if not (isinstance(q, Value) and isinstance(k, Value) and isinstance(v, Value)):
            return None
        if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
            return None
        kind, left = mask_kind(mask)
        seed = t.seed() if p else None
        y = ours.attention(q, k.mT, v, t.mask(left), kind != "full", scale, p, seed, from_end=kind == "end")
        return elementwise.cast(y, _word(self, node))

    def _step(self, node: Any) -> Optional[_Step]:
        """A scale or a mask of scores."""
        name, known = _name(node), self.translator.known
        if name in ("mul", "div") and isinstance(node.args[1], (int, float)) and node.args[1]:
            return _Step(node.args[0], float(node.args[1]) if name == "mul" else 1.0 / node.args[1], None)
        if name == "add" and not node.kwargs:
            for scores, mask in (node.args[:2], node.args[1::-1]):
                held = known.get(mask) if isinstance(mask, torch.fx.Node) else None
                if isinstance(held, (torch.Tensor, Value)) and _leads_to_scores(scores):
                    return _Step(scores, 1.0, held)
        if name in ("where", "masked_fill"):
            condition, scores, fill = node.args if name == "where" else (node.args[1], node.args[0], node.args[2])
            held = known.get(condition)
            value = known.get(fill) if isinstance(fill, torch.fx.Node) else fill
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(held, torch.Tensor) and isinstance(value, (int, float)) and value < -1e30:
                return _Step(scores, 1.0, held if name == "where" else ~held)
        return None


class _Step(NamedTuple):
    before: Any
    factor: float
    mask: Any


def _is_filled(mask: Any) -> bool:
    """Whether a mask is the same before and after a scale."""
    if not isinstance(mask, torch.Tensor):
        return False
    return mask.dtype is torch.bool or bool(((mask == 0) | (mask < -1e30)).all())


def _leads_to_scores(node: Any) -> bool:
    for _ in range(_DEEPEST):
        if not isinstance(node, torch.fx.Node):
            return False
        if _name(node) in ("matmul", "bmm"):
            return True
        if _name(node) not in (*_SAME, "mul", "div", "add", "where", "masked_fill"):
            return False
        node = node.args[1] if _name(node) == "where" else node.args[0]
    return False


def _name(node: Any) -> str:
    return short_name(node.target) if isinstance(node, torch.fx.Node) and node.op == "call_function" else ""


def _word(patterns: Patterns, node: Any) -> str:
    return patterns.translator.kind(node.meta["val"])[0]


def _stripped(node: Any) -> Any:
    """Before casts and copies."""
    while _name(node) in _SAME:
        node = node.args[0]
    return node


def _undropped(node: Any) -> Tuple[Any, float]:
    """Before casts, copies and a dropout, and the probability to drop."""
    node = _stripped(node)
    if node.target is operator.getitem and node.args[1] == 0:
        node = node.args[0]
    if _name(node) not in ("dropout", "native_dropout"):
        return node, 0.0
    return _stripped(node.args[0]), float(node.args[1]) if node.args[2] is not False else 0.0


def _root_mean_square(x: Any, root: Any) -> Optional[float]:
    """The epsilon of `rsqrt(mean(x^2, -1) + eps)`."""
    if _name(root) != "rsqrt" or _name(_stripped(root.args[0])) != "add":
        return None
    mean, eps = _stripped(root.args[0]).args[:2]
    if _name(mean) != "mean" or not isinstance(eps, (int, float)):
        return None
    square, rank = _stripped(mean.args[0]), x.meta["val"].dim()
    if _name(square) == "pow":
        squares = square.args[1] == 2
    else:
        squares = _name(square) == "mul" and square.args[0] is square.args[1]
    last = list(mean.args[1]) in ([-1], [rank - 1])
    return float(eps) if squares and last and _stripped(square.args[0]) is _stripped(x) else None


def _subtree(node: Any, depth: int) -> List[Any]:
    """A node and all operands of its sums, products and powers, each once."""
    found: List[Any] = []
    waiting = [(node, depth)]
    while waiting:
        node, depth = waiting.pop()
        if not isinstance(node, torch.fx.Node) or node in found:
            continue
        found.append(node)
        if depth > 0 and _name(node) in ("add", "sub", "mul", "div", "pow", "neg", *_SAME):
            waiting.extend((argument, depth - 1) for argument in node.args[:2])
    return found


def _polynomial(node: Any, x: Any, t: Any, depth: int) -> Optional[Polynomial]:
    """A node as powers of `x` and `t`."""
    if isinstance(node, (int, float)):
        return {(0, 0): float(node)}
    if node is x:
        return {(1, 0): 1.0}
    if node is t:
        return {(0, 1): 1.0}
    name = _name(node)
    if depth == 0 or not name or node.kwargs.get("alpha", 1) != 1:
        return None
    if name in _SAME:
        return _polynomial(node.args[0], x, t, depth - 1)
    if name == "neg":
        return _product(_polynomial(node.args[0], x, t, depth - 1), {(0, 0): -1.0})
    if name == "pow":
        base, exponent = _polynomial(node.args[0], x, t, depth - 1), node.args[1]
        if exponent not in (2, 3):
            return None
        square = _product(base, base)
        return square if exponent == 2 else _product(square, base)
    if name not in ("add", "sub", "mul", "div"):
        return None
    a, b = (_polynomial(argument, x, t, depth - 1) for argument in node.args[:2])
    if name == "mul":
        return _product(a, b)
    if name == "div":
        divisor = node.args[1]
        return _product(a, {(0, 0): 1.0 / divisor}) if isinstance(divisor, (int, float)) and divisor else None
    if a is None or b is None:
        return None
    sign = 1.0 if name == "add" else -1.0
    return {power: a.get(power, 0.0) + sign * b.get(power, 0.0) for power in {*a, *b}}


def _product(a: Optional[Polynomial], b: Optional[Polynomial]) -> Optional[Polynomial]:
    if a is None or b is None:
        return None
    result: Polynomial = {}
    for (x, t), factor in a.items():
        for (other_x, other_t), other in b.items():
            power = (x + other_x, t + other_t)
            result[power] = result.get(power, 0.0) + factor * other
    return result


def _close(a: Optional[Polynomial], b: Polynomial) -> bool:
    """Equal but for digits that were not written down."""
    if a is None:
        return False
    return all(math.isclose(a.get(power, 0.0), b.get(power, 0.0), rel_tol=1e-4, abs_tol=1e-9) for power in {*a, *b})

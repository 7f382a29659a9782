"""More functions of torch on values, composed of operations of graphs."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from deuteron import trace
from deuteron.trace import elementwise, views
from deuteron.trace.emit import as_value, axis_of, sizes_of
from deuteron.trace.graph import FLOATS, elements
from deuteron.trace.value import Value

Handler = Callable[..., Any]


def widened(x: Any, op: str) -> Tuple[Value, str]:
    """A value in `f32`, and the dtype that the result is rounded to, once."""
    value = as_value(x, op)
    return elementwise.cast(value, "f32"), value._word if value._word in FLOATS else "f32"


def _float(x: Any, op: str) -> Value:
    """The operand as a float value. PyTorch gives integers for integer operands here, which these ops do not."""
    value = as_value(x, op)
    if value._word not in FLOATS:
        raise TypeError(f"{op}: expected a float operand (f32, f16 or bf16), got {value._word}; cast it")
    return value


# Functions of one value.


def expm1(x: Any) -> Value:
    """`e^x - 1`, also where `x` is small."""
    wide, word = widened(x, "expm1")
    power = trace.exp(wide)
    rough = power - 1.0
    # As in `log1p`: what `power` lost of `x` is made up by the ratio to its logarithm.
    ratio = rough * (wide / trace.log(power))
    exact = trace.where(power == 1.0, wide, trace.where(rough == -1.0, -1.0, ratio))
    missing = trace.stop_gradient(trace.where(power == math.inf, 0.0, exact - rough))
    return elementwise.cast(rough + missing, word)


def exp2(x: Any) -> Value:
    """`2 ** x`, elementwise."""
    wide, word = widened(x, "exp2")
    return elementwise.cast(trace.exp(wide * math.log(2.0)), word)


def _logarithm(base: float, name: str) -> Handler:
    def handler(x: Any) -> Value:
        wide, word = widened(x, name)
        return elementwise.cast(trace.log(wide) * (1.0 / math.log(base)), word)

    handler.__name__ = name
    return handler


def elu(x: Any, alpha: float = 1.0) -> Value:
    """`x` above 0, `alpha * (exp(x) - 1)` below."""
    return _exponential_below("elu", x, alpha, 1.0, 1.0)


def celu(x: Any, alpha: float = 1.0) -> Value:
    """`x` above 0, `alpha * (exp(x / alpha) - 1)` below."""
    return _exponential_below("celu", x, alpha, 1.0, 1.0 / alpha)


def selu(x: Any) -> Value:
    """`elu` with torch's constants for self-normalising networks."""
    return _exponential_below("selu", x, 1.6732632423543772, 1.0507009873554805, 1.0)


def _exponential_below(op: str, x: Any, alpha: float, scale: float, rate: float) -> Value:
    """`scale * x` above 0, `scale * alpha * (e^(rate x) - 1)` below."""
    wide, word = widened(x, op)
    is_above = wide > 0.0
    below = expm1(trace.where(is_above, 0.0, wide) * rate) * (alpha * scale)
    return elementwise.cast(trace.where(is_above, wide * scale, below), word)


def logsigmoid(x: Any) -> Value:
    """`log(sigmoid(x))`, without overflow for either sign."""
    wide, word = widened(x, "logsigmoid")
    is_below = wide < 0.0
    below, above = trace.where(is_below, wide, 0.0), trace.where(is_below, 0.0, wide)
    left, right = below - trace.log1p(trace.exp(below)), -trace.log1p(trace.exp(-above))
    return elementwise.cast(trace.where(is_below, left, right), word)


def mish(x: Any) -> Value:
    """`x * tanh(softplus(x))`, elementwise."""
    from deuteron.trace.tables import softplus

    wide, word = widened(x, "mish")
    return elementwise.cast(wide * trace.tanh(softplus(wide)), word)


def softsign(x: Any) -> Value:
    """`x / (1 + abs(x))`, elementwise."""
    wide, word = widened(x, "softsign")
    return elementwise.cast(wide / (trace.abs(wide) + 1.0), word)


def tanhshrink(x: Any) -> Value:
    """`x - tanh(x)`, elementwise."""
    value = as_value(x, "tanhshrink")
    return value - trace.tanh(value)


def hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Value:
    """Its gradient at the bounds is 0, as in torch."""
    x = _float(x, "hardtanh")
    return trace.where(x <= min_val, min_val, trace.where(x >= max_val, max_val, x))


def relu6(x: Any) -> Value:
    """`x` clamped to 0 .. 6; the gradient at the bounds is 0."""
    return hardtanh(x, 0.0, 6.0)


def threshold(x: Any, threshold: float, value: float) -> Value:
    """`x` where it is above `threshold`, `value` elsewhere."""
    x = _float(x, "threshold")
    return trace.where(x > threshold, x, value)


def hardshrink(x: Any, lambd: float = 0.5) -> Value:
    """`x` where `abs(x) > lambd`, 0 elsewhere."""
    x = _float(x, "hardshrink")
    return trace.where(trace.abs(x) > lambd, x, 0.0)


def softshrink(x: Any, lambd: float = 0.5) -> Value:
    """`x` moved towards 0 by `lambd`; 0 where `abs(x) <= lambd`."""
    x = _float(x, "softshrink")
    return trace.where(x > lambd, x - lambd, trace.where(x < -lambd, x + lambd, 0.0))


def prelu(x: Any, weight: Any) -> Value:
    """`x` above 0, `weight * x` below; a weight `[channels]` is aligned with axis 1."""
    x, weight = as_value(x, "prelu"), as_value(weight, "prelu")
    if weight.ndim == 1 and x.ndim > 1:
        weight = weight.reshape(1, -1, *([1] * (x.ndim - 2)))
    return trace.where(x > 0.0, x, weight * x)


def glu(x: Any, dim: int = -1) -> Value:
    """`a * sigmoid(b)` of the halves `a`, `b` of `x` along `dim`."""
    parts = as_value(x, "glu").chunk(2, dim)
    return parts[0] * trace.sigmoid(parts[1])


def softmin(x: Any, dim: Optional[int] = None, dtype: Any = None) -> Value:
    """`softmax(-x)` along `dim`, which must be given."""
    if dim is None:
        raise ValueError("softmin: expected dim, the axis that sums to 1")
    return trace.softmax(-as_value(x, "softmin"), dim, dtype)


def isnan(x: Any) -> Value:
    """Booleans: whether an element is NaN."""
    value = as_value(x, "isnan")
    return elementwise.compare("ne", value, value)


def isinf(x: Any) -> Value:
    """Booleans: whether an element is infinite, of either sign."""
    return trace.abs(widened(x, "isinf")[0]) == math.inf


def isfinite(x: Any) -> Value:
    """Booleans: whether an element is neither NaN nor infinite."""
    return trace.abs(widened(x, "isfinite")[0]) < math.inf


def nan_to_num(x: Any, nan: float = 0.0, posinf: Optional[float] = None, neginf: Optional[float] = None) -> Value:
    """`x` with NaN and infinities replaced; infinities by the largest number of the dtype unless others are given."""
    x = _float(x, "nan_to_num")
    largest = {"f16": 65504.0, "bf16": 3.3895313892515355e38}.get(x._word, 3.4028234663852886e38)
    if x._trace.doubles:
        largest = 1.7976931348623157e308
    x = trace.where(x == math.inf, largest if posinf is None else posinf, x)
    x = trace.where(x == -math.inf, -largest if neginf is None else neginf, x)
    return trace.where(x != x, nan, x)


# Of several.


def addcmul(x: Any, tensor1: Any, tensor2: Any, value: float = 1) -> Value:
    """`x + value * tensor1 * tensor2`, with broadcasting."""
    product: Value = as_value(tensor1, "addcmul") * tensor2
    return as_value(x, "addcmul") + product * value


def addcdiv(x: Any, tensor1: Any, tensor2: Any, value: float = 1) -> Value:
    """`x + value * tensor1 / tensor2`, with broadcasting."""
    ratio: Value = as_value(tensor1, "addcdiv") / tensor2
    return as_value(x, "addcdiv") + ratio * value


def lerp(x: Any, end: Any, weight: Any) -> Value:
    """`x + weight * (end - x)`; `weight` is a number or a value."""
    start, step = as_value(x, "lerp"), as_value(end, "lerp") - as_value(x, "lerp")
    moved: Value = step * weight
    return start + moved


def outer(x: Any, vec2: Any) -> Value:
    """`x [n]` times `vec2 [m]`: `[n, m]`."""
    return as_value(x, "outer").unsqueeze(1) * as_value(vec2, "outer")


def _product(x: Any, other: Any) -> Value:
    return trace.matmul(x, other)


# Along axes.


def vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    """Of order 1, 2 or infinity. Where it is 0 its gradient is 0, as in torch."""
    x = as_value(x, "norm") if dtype is None else as_value(x, "norm").to(dtype)
    wide, word = widened(x, "norm")
    if ord in ("fro", None, 2, 2.0):
        squares = trace.sum(wide * wide, dim, keepdim)
        is_zero = squares == 0.0
        result = trace.where(is_zero, 0.0, trace.sqrt(trace.where(is_zero, 1.0, squares)))
    elif ord == 1:
        result = trace.sum(trace.abs(wide), dim, keepdim)
    elif ord == math.inf:
        result = trace.amax(trace.abs(wide), dim, keepdim)
    else:
        raise ValueError(f"norm: expected an order of 1, 2 or infinity, got {ord!r}")
    return elementwise.cast(result, word)


def norm(x: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    """The norm of order `p` (1, 2, infinity or `"fro"`) over `dim`, or over all axes."""
    return vector_norm(x, p, dim, keepdim, dtype)


def linalg_norm(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    """Of a vector, of all elements where no order is given, and of matrices of order 1, infinity or Frobenius."""
    x = as_value(x, "linalg.norm") if dtype is None else as_value(x, "linalg.norm").to(dtype)
    pair = tuple(range(x.ndim)) if dim is None else dim
    if ord is None or not isinstance(pair, (tuple, list)) or len(pair) != 2:
        if ord is not None and dim is None and x.ndim != 1:
            raise ValueError(f"linalg.norm: expected a vector or a matrix, or dim, got {x!r}")
        return vector_norm(x, 2 if ord is None else ord, dim, keepdim)
    if ord == "fro":
        return vector_norm(x, 2, pair, keepdim)
    if ord not in (1, math.inf):
        raise ValueError(f"linalg.norm: expected an order of 1, infinity or 'fro' for matrices, got {ord!r}")
    wide, word = widened(x, "linalg.norm")
    rows, columns = (axis_of(x, axis, "linalg.norm") for axis in pair)
    summed, compared = (rows, columns) if ord == 1 else (columns, rows)
    result = trace.amax(trace.sum(trace.abs(wide), summed, keepdim=True), compared, keepdim=True)
    return elementwise.cast(result if keepdim else result.squeeze((rows, columns)), word)


def normalize(x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Value:
    """`x` divided by its norm along `dim`, which is taken as at least `eps`."""
    value = as_value(x, "normalize")
    return value / trace.clamp(vector_norm(x, p, dim, keepdim=True), min=eps)


def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Value:
    """The cosine between `x1` and `x2` along `dim`; each norm is taken as at least `eps`."""
    (a, word), (b, other) = widened(x1, "cosine_similarity"), widened(x2, "cosine_similarity")
    # The axis is one of the shape that both repeat into.
    shape = elementwise.broadcast_shape("cosine_similarity", [a.shape, b.shape])
    a, b = views.broadcast(a, shape), views.broadcast(b, shape)
    word = word if word == other else "f32"
    lengths = [trace.clamp(vector_norm(x, 2, dim, keepdim=True), min=eps) for x in (a, b)]
    return elementwise.cast(trace.sum((a / lengths[0]) * (b / lengths[1]), dim), word)


def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Value:
    """The norm of `x1 - x2 + eps` along the last axis."""
    return vector_norm(as_value(x1, "pairwise_distance") - x2 + eps, p, -1, keepdim)


def dist(x: Any, other: Any, p: float = 2) -> Value:
    """The norm of `x - other` over all elements."""
    return vector_norm(as_value(x, "dist") - other, p)


def var_mean(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Tuple[Value, Value]:
    """Variance and mean over `dim`, or over all axes."""
    return trace.var(x, dim, correction, keepdim), trace.mean(x, dim, keepdim)


def std_mean(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Tuple[Value, Value]:
    """Standard deviation and mean over `dim`, or over all axes."""
    return trace.std(x, dim, correction, keepdim), trace.mean(x, dim, keepdim)


def nansum(x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    """The sum over `dim`, with NaN counted as 0."""
    x = _float(x, "nansum")
    return trace.sum(trace.where(x != x, 0.0, x), dim, keepdim)


def any_of(x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    """Booleans: whether any element along `dim` is not 0 (`torch.any`)."""
    return trace.amax(elementwise.cast(_truth(x, "any"), "f32"), dim, keepdim) != 0.0


def all_of(x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    """Booleans: whether all elements along `dim` are not 0 (`torch.all`)."""
    return trace.amin(elementwise.cast(_truth(x, "all"), "f32"), dim, keepdim) != 0.0


def _truth(x: Any, op: str) -> Value:
    return elementwise.cast(as_value(x, op), "bool")


def argmin(x: Any, dim: Optional[int] = None, keepdim: bool = False) -> Value:
    """The index of the smallest element along `dim`; the first one of equal elements."""
    return trace.argmax(-as_value(x, "argmin"), dim, keepdim)


# Norms over channels, the second axis.


def _by_channel(weight: Any, x: Value, op: str) -> Any:
    return as_value(weight, op).reshape(1, -1, *([1] * (x.ndim - 2)))


def _affine(y: Value, weight: Any, bias: Any, op: str) -> Value:
    y = y if weight is None else y * elementwise.cast(_by_channel(weight, y, op), "f32")
    return y if bias is None else y + elementwise.cast(_by_channel(bias, y, op), "f32")


def group_norm(x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Value:
    """Layer norm over each of `num_groups` groups of channels of `x [batch, channels, ..]`."""
    wide, word = widened(x, "group_norm")
    if wide.ndim < 2 or wide.shape[1] % num_groups:
        raise ValueError(f"group_norm: expected channels, the second axis, in {num_groups} groups, got {x!r}")
    rows = wide.reshape(wide.shape[0], num_groups, -1)
    normed = trace.layer_norm(rows, eps=eps).reshape(wide.shape)
    return elementwise.cast(_affine(normed, weight, bias, "group_norm"), word)


def instance_norm(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Value:
    """Layer norm over each channel of `x [batch, channels, ..]`, or with `use_input_stats=False` by running statistics."""
    x = as_value(x, "instance_norm")
    if not use_input_stats:
        if running_mean is None or running_var is None:
            raise ValueError("instance_norm: expected running_mean and running_var with use_input_stats=False, got none")
        return batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    _refuse_updates("instance_norm", running_mean, momentum)
    if x.ndim < 3:
        raise ValueError(f"instance_norm: expected channels as the second axis and others after it, got {x!r}")
    return group_norm(x, x.shape[1], weight, bias, eps)


def _refuse_updates(op: str, running_mean: Any, momentum: float) -> None:
    """Refuses statistics that torch would change in place. With a momentum of 0 they stay as they are."""
    if running_mean is not None and momentum != 0.0:
        raise TypeError(f"{op}: a fused function updates no running statistics; expected none, or a momentum of 0")


def batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Value:
    """Normalises each channel of `x [batch, channels, ..]` by the running statistics, or, if there are none, by those of the batch."""
    wide, word = widened(x, "batch_norm")
    if wide.ndim < 2:
        raise ValueError(f"batch_norm: expected channels as the second axis, got {x!r}")
    if training:
        _refuse_updates("batch_norm", running_mean, momentum)
    if training or running_mean is None:
        axes = [axis for axis in range(wide.ndim) if axis != 1]
        mean, variance = trace.mean(wide, axes, keepdim=True), trace.var(wide, axes, 0, keepdim=True)
    else:
        mean, variance = (
            elementwise.cast(_by_channel(statistic, wide, "batch_norm"), "f32") for statistic in (running_mean, running_var)
        )
    normed = (wide - mean) * trace.rsqrt(variance + eps)
    return elementwise.cast(_affine(normed, weight, bias, "batch_norm"), word)


# Views and products of many axes.


def repeat(x: Any, *sizes: Any) -> Value:
    """Whole copies along each axis."""
    x, times = as_value(x, "repeat"), sizes_of(sizes)
    missing = len(times) - x.ndim
    if missing < 0:
        raise ValueError(f"repeat: expected a number for each of {x.ndim} axes, got {times}")
    shape = (1,) * missing + x.shape
    apart = views.reshape(x, [one for size in shape for one in (1, size)])
    wide = views.broadcast(apart, [one for count, size in zip(times, shape) for one in (count, size)])
    return views.reshape(wide, [count * size for count, size in zip(times, shape)])


def tile(x: Any, *dims: Any) -> Value:
    """The same; axes that are not named are not repeated."""
    x, times = as_value(x, "tile"), sizes_of(dims)
    return repeat(x, *([1] * (x.ndim - len(times)) + times))


def repeat_interleave(x: Any, repeats: Any, dim: Optional[int] = None, output_size: Optional[int] = None) -> Value:
    """Each element along `dim` `repeats` times in a row; `repeats` is one integer."""
    x = as_value(x, "repeat_interleave")
    if not isinstance(repeats, int):
        raise TypeError("repeat_interleave: expected one whole number of repeats; others give a size that is not known")
    x, axis = (views.reshape(x, [-1]), 0) if dim is None else (x, axis_of(x, dim, "repeat_interleave"))
    shape = (*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :])
    return views.reshape(views.broadcast(x.unsqueeze(axis + 1), shape), (*shape[:axis], -1, *shape[axis + 2 :]))


def roll(x: Any, shifts: Any, dims: Any = None) -> Value:
    """Elements moved by `shifts` along `dims`; those moved beyond the end continue at the start."""
    y = as_value(x, "roll")
    if dims is None:
        return views.reshape(roll(views.reshape(y, [-1]), shifts, 0), y.shape)
    for shift, dim in zip(*(one if isinstance(one, (tuple, list)) else (one,) for one in (shifts, dims))):
        axis = axis_of(y, dim, "roll")
        cut = y.shape[axis] - shift % max(y.shape[axis], 1)
        if 0 < cut < y.shape[axis]:
            y = trace.cat([y.narrow(axis, cut, y.shape[axis] - cut), y.narrow(axis, 0, cut)], axis)
    return y


def index_select(x: Any, dim: int, index: Any) -> Value:
    """The slices of `x` along `dim` at the positions `index [n]`."""
    x = as_value(x, "index_select")
    axis = axis_of(x, dim, "index_select")
    order = [axis, *(other for other in range(x.ndim) if other != axis)]
    picked = views.permute(x, order)[as_value(index, "index_select")]
    return views.permute(picked, [order.index(other) for other in range(x.ndim)])


def einsum(equation: str, *operands: Any) -> Value:
    """Products and sums by letters; two operands at a time, from the left. No letter twice in one operand."""
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    values = [as_value(operand, "einsum") for operand in operands]
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "." in equation:
        raise ValueError("einsum: expected letters for all axes, got `...`")
    if len(terms) != len(values) or any(len(set(t)) != len(t) or len(t) != v.ndim for t, v in zip(terms, values)):
        raise ValueError(f"einsum: expected a term of different letters for each operand, got {equation!r}")
    if not arrow:
        result = "".join(sorted(letter for letter in set(left) - {","} if left.count(letter) == 1))
    sizes: Dict[str, int] = {}
    for term, value in zip(terms, values):
        for letter, size in zip(term, value.shape):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"einsum: expected one size for `{letter}`, got {sizes[letter]} and {size}")
    if any(letter not in sizes for letter in result):
        raise ValueError(f"einsum: expected letters of the operands in the result, got {result!r}")
    term, value = terms[0], values[0]
    for place, (other, next_value) in enumerate(zip(terms[1:], values[1:]), 2):
        term, value = _contract(term, value, other, next_value, set(result).union(*terms[place:]), sizes)
    term, value = _summed(term, value, set(result))
    return views.permute(value, [term.index(letter) for letter in result])


def _summed(term: str, value: Value, kept: Any) -> Tuple[str, Value]:
    """Without the axes that nothing needs."""
    axes = [axis for axis, letter in enumerate(term) if letter not in kept]
    left = "".join(letter for letter in term if letter in kept)
    return left, trace.sum(value, axes) if axes else value


def _contract(a: str, x: Value, b: str, y: Value, kept: Any, sizes: Mapping[str, int]) -> Tuple[str, Value]:
    """One product of two terms."""
    a, x = _summed(a, x, kept | set(b))
    b, y = _summed(b, y, kept | set(a))
    both = [letter for letter in a if letter in b]
    batch, inner = [c for c in both if c in kept], [c for c in both if c not in kept]
    left, right = [c for c in a if c not in b], [c for c in b if c not in a]

    def laid(term: str, value: Value, groups: Sequence[List[str]]) -> Value:
        order = [term.index(letter) for group in groups for letter in group]
        shape = [sizes[c] for c in groups[0]] + [elements([sizes[c] for c in group]) for group in groups[1:]]
        return views.reshape(views.permute(value, order), shape)

    product = trace.matmul(laid(a, x, (batch, left, inner)), laid(b, y, (batch, inner, right)))
    letters = [*batch, *left, *right]
    return "".join(letters), views.reshape(product, [sizes[letter] for letter in letters])


TORCH: Mapping[str, Handler] = {
    "expm1": expm1,
    "exp2": exp2,
    "log2": _logarithm(2.0, "log2"),
    "log10": _logarithm(10.0, "log10"),
    "elu": elu,
    "celu": celu,
    "selu": selu,
    "logsigmoid": logsigmoid,
    "mish": mish,
    "softsign": softsign,
    "tanhshrink": tanhshrink,
    "hardtanh": hardtanh,
    "relu6": relu6,
    "threshold": threshold,
    "hardshrink": hardshrink,
    "softshrink": softshrink,
    "prelu": prelu,
    "glu": glu,
    "softmin": softmin,
    "isnan": isnan,
    "isinf": isinf,
    "isfinite": isfinite,
    "nan_to_num": nan_to_num,
    "addcmul": addcmul,
    "addcdiv": addcdiv,
    "lerp": lerp,
    "outer": outer,
    "ger": outer,
    "mv": _product,
    "dot": _product,
    "vdot": _product,
    "inner": lambda x, other: trace.matmul(x, as_value(other, "inner").t() if as_value(other, "inner").ndim > 1 else other),
    "norm": norm,
    "vector_norm": vector_norm,
    "normalize": normalize,
    "cosine_similarity": cosine_similarity,
    "pairwise_distance": pairwise_distance,
    "dist": dist,
    "var_mean": var_mean,
    "std_mean": std_mean,
    "nansum": nansum,
    "any": any_of,
    "all": all_of,
    "argmin": argmin,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "batch_norm": batch_norm,
    "tile": tile,
    "repeat": repeat,
    "repeat_interleave": repeat_interleave,
    "roll": roll,
    "index_select": index_select,
    "einsum": einsum,
}

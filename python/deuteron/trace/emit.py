"""Operands and statements: what every function on values begins and ends with."""

from __future__ import annotations

import sys
from typing import Any, List, Mapping, Optional, Sequence, Tuple, Union

from deuteron.trace.graph import FLOATS, Number, Trace, dtype_word, elements, is_double
from deuteron.trace.value import Extremes, Value

Operand = Union[Value, Number]


def as_value(operand: Any, op: str) -> Value:
    """The operand, if it is a value."""
    if isinstance(operand, Value):
        return operand
    if isinstance(operand, (int, float)):
        raise TypeError(f"{op}: expected a value, got the number {operand}")
    found = _captured(operand)
    if found is None:
        raise TypeError(f"{op}: expected a value, got {foreign(operand)}")
    return found


def _captured(operand: Any) -> Optional[Value]:
    """The value of a tensor that the function has from elsewhere."""
    from deuteron.trace.scope import captured

    return captured(operand)


def foreign(operand: Any) -> str:
    """Describes an operand that is not a traced value, for error messages."""
    kind = type(operand).__name__
    if isinstance(operand, Extremes):
        return "the pair of max or min: take its `values`, or use amax or amin"
    if hasattr(operand, "shape") and hasattr(operand, "dtype"):
        return f"a {kind} that is not an argument of the fused function: pass it as one"
    return f"a {kind}"


def as_operand(operand: Any, op: str) -> Operand:
    """The operand, if it is a value or a number."""
    if isinstance(operand, (Value, int, float)):
        return operand
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(operand, (numpy.bool_, numpy.integer, numpy.floating)):
        number: Number = operand.item()
        return number
    found = _captured(operand)
    if found is None:
        raise TypeError(f"{op}: expected a value or a number, got {foreign(operand)}")
    return found


def trace_of(op: str, *operands: Any) -> Trace:
    """The trace that values belong to."""
    traces = [operand._trace for operand in operands if isinstance(operand, Value)]
    if not traces:
        raise TypeError(f"{op}: expected a value of a traced function")
    if any(trace is not traces[0] for trace in traces):
        raise ValueError(f"{op}: expected values of one trace, got a value of another trace")
    return traces[0]


def emit(
    op: str, operands: Sequence[Operand], types: Sequence[Tuple[str, Sequence[int]]], *words: str
) -> Tuple[Value, ...]:
    """Writes a statement down."""
    trace = trace_of(op, *operands)
    results = [operand._node.result(operand._index) if isinstance(operand, Value) else operand for operand in operands]
    numbers = [int(operand) if isinstance(operand, bool) else operand for operand in results]
    node = trace.add(op, numbers, [(word, tuple(shape)) for word, shape in types], words)
    return recorded(trace, op, tuple(Value(trace, node, index) for index in range(len(types))))


def recorded(trace: Trace, op: str, values: Tuple[Value, ...]) -> Tuple[Value, ...]:
    """Values that were just recorded; no gradient passes through floats while gradients are not recorded."""
    if op == "stop_gradient" or trace.records_gradients():
        return values
    return tuple(_stopped(value) if value._word in FLOATS else value for value in values)


def _stopped(value: Value) -> Value:
    return emit("stop_gradient", (value,), [(value._word, value.shape)])[0]


def axis_of(x: Value, dim: int, op: str) -> int:
    """An axis counted from the start."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{op}: expected an axis, got {foreign(dim)}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{op}: expected an axis from {-x.ndim} to {x.ndim - 1}, got {dim}")
    return dim % x.ndim


def axes_of(x: Value, dim: Any, op: str) -> List[int]:
    """Axes counted from the start, in order; all of them for none, and with torch for an empty list."""
    if dim is None or (x._trace.framework == "torch" and isinstance(dim, (tuple, list)) and not dim):
        return list(range(x.ndim))
    axes = [axis_of(x, axis, op) for axis in (dim if isinstance(dim, (tuple, list)) else (dim,))]
    if len(set(axes)) != len(axes):
        raise ValueError(f"{op}: expected each axis once, got {dim}")
    return sorted(axes)


def word_of(x: Value, dtype: Any) -> str:
    """The word of a dtype that a value is to have."""
    if is_double(dtype) and not x._trace.doubles:
        raise TypeError("to: expected a dtype of at most 32 bits, got float64; pass operands of float64 instead")
    return dtype_word(dtype)


def is_device(x: Value, word: Any) -> bool:
    """Whether a word of `to` names the device of the operands; `TypeError` if it names another one."""
    own = x._trace.device
    if own is None or word is None or isinstance(word, bool):
        return word is None or isinstance(word, bool)
    if not isinstance(word, (str, type(own))) or (isinstance(word, str) and word.split(":")[0] not in _DEVICES):
        return False
    named = type(own)(word) if isinstance(word, str) else word
    if named.type != own.type or named.index not in (None, own.index):
        raise TypeError(f"to: expected the device of the operands, {own}, got {named}; a fused function moves no data")
    return True


_DEVICES = ("cpu", "cuda", "meta", "mps", "xpu")


def same_device(x: Value, others: Mapping[str, Any], op: str) -> None:
    """Keywords of torch that change nothing: the device of the operands, and how memory is laid out."""
    for name, word in others.items():
        if name == "device":
            is_device(x, word)
        elif name not in ("non_blocking", "copy", "memory_format", "layout", "pin_memory") or (name == "copy" and word):
            raise TypeError(f"{op}: unexpected argument {name}")


def sizes_of(shape: Sequence[Any]) -> List[int]:
    """`f(2, 3)` and `f((2, 3))` are the same."""
    return list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)


def numpy_words(dim: Any, keepdim: bool, others: Mapping[str, Any], also: Sequence[str] = ()) -> Tuple[Any, bool]:
    """`dim` and `keepdim`, which NumPy calls `axis` and `keepdims`."""
    for name in others:
        if name not in ("axis", "keepdims", *also):
            raise TypeError(f"unexpected argument {name}")
    return others.get("axis", dim), bool(others.get("keepdims", keepdim))


def correction_of(x: Value, correction: Optional[Number], others: Mapping[str, Any]) -> Number:
    """The correction of the count in a variance: 1 with torch, 0 with NumPy."""
    if correction is None or isinstance(correction, bool):
        usual = 0 if x._trace.framework == "numpy" else 1
        given = others.get("unbiased", correction)
        correction = others.get("ddof", usual if given is None else int(given))
    return correction


def full_shape(count: int, shape: Sequence[int], op: str) -> List[int]:
    """A shape of this number of elements; one size may be -1, and is computed."""
    sizes = list(shape)
    if not all(isinstance(size, int) for size in sizes):
        raise TypeError(f"{op}: expected whole sizes, got {shape}")
    if sizes.count(-1) == 1:
        rest = elements([size for size in sizes if size != -1])
        if rest > 0 and count % rest == 0:
            sizes[sizes.index(-1)] = count // rest
    if elements(sizes) != count or any(size < 0 for size in sizes):
        raise ValueError(f"{op}: expected a shape of {count} elements, got {list(shape)}")
    return sizes

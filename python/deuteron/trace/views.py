"""Views: no arithmetic, and no memory traffic unless a consumer cannot read through them."""

from __future__ import annotations

from typing import Any, List, Sequence

from deuteron.trace.emit import axis_of, emit, foreign, full_shape
from deuteron.trace.graph import elements, shape_text
from deuteron.trace.value import Value


def reshape(x: Value, shape: Sequence[int]) -> Value:
    """The same elements in the same order under another shape; one size may be -1."""
    sizes = tuple(full_shape(elements(x.shape), shape, "reshape"))
    if x._node.op == "reshape" and not _is_copy(x):
        x = operand_of(x)
    return x if sizes == x.shape else emit("reshape", (x,), [(x._word, sizes)], shape_text(sizes))[0]


def copy(x: Value) -> Value:
    """A reshape of `x` to its own shape: as a result it gets memory of its own instead of sharing that of `x`."""
    return emit("reshape", (x,), [(x._word, x.shape)], shape_text(x.shape))[0]


def _is_copy(x: Value) -> bool:
    return x._node.op == "reshape" and operand_of(x).shape == x.shape


def permute(x: Value, axes: Sequence[int]) -> Value:
    """Axis `i` of the result is axis `axes[i]` of `x`."""
    order = [axis_of(x, axis, "permute") for axis in axes]
    if sorted(order) != list(range(x.ndim)):
        raise ValueError(f"permute: expected a permutation of {x.ndim} axes, got {list(axes)}")
    if x._node.op == "transpose":
        before = permutation(x)
        x, order = operand_of(x), [before[axis] for axis in order]
    if order == list(range(x.ndim)):
        return x
    return emit("transpose", (x,), [(x._word, [x.shape[axis] for axis in order])], shape_text(order))[0]


def permutation(x: Value) -> List[int]:
    """The axes of a transpose."""
    return [int(axis) for axis in x._node.words[0][1:-1].split(",")]


def operand_of(x: Value, index: int = 0) -> Value:
    """An operand of the operation that computed a value."""
    operand = x._node.operands[index]
    assert isinstance(operand, tuple)
    return Value(x._trace, *operand)


def broadcast(x: Value, shape: Sequence[int]) -> Value:
    """Leading axes are added and axes of size 1 repeated until the shape is this."""
    sizes = tuple(shape)
    padded = (1,) * (len(sizes) - x.ndim) + x.shape
    if len(padded) != len(sizes) or any(a not in (1, b) for a, b in zip(padded, sizes)):
        raise ValueError(f"expand: expected an operand that repeats into {list(sizes)}, got {list(x.shape)}")
    return x if sizes == x.shape else emit("broadcast", (x,), [(x._word, sizes)], shape_text(sizes))[0]


def cut(x: Value, axis: int, start: int, length: int) -> Value:
    """`length` indices of an axis from `start`."""
    size = x.shape[axis]
    if start < 0 or length < 0 or start + length > size:
        raise ValueError(f"slice: expected a range within the axis of size {size}, got {length} from {start}")
    if length == size:
        return x
    shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
    return emit("slice", (x,), [(x._word, shape)], f"axis={axis}", f"start={start}", f"length={length}")[0]


def item(x: Value, index: Any) -> Value:
    """Integers, slices, `None`, `...`, and one value of indices for the first axis."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if len(parts) == 1 and isinstance(parts[0], Value):
        return _rows(x, parts[0])
    axes = [part for part in parts if part is not None and part is not Ellipsis]
    if len(axes) > x.ndim:
        raise ValueError(f"value[..]: expected at most {x.ndim} indices, got {len(axes)}")
    if len([part for part in parts if part is Ellipsis]) == 0:
        parts.append(Ellipsis)
    shape: List[int] = []
    axis = 0
    for part in parts:
        if part is None:
            shape.append(1)
        elif part is Ellipsis:
            kept = x.ndim - len(axes)
            shape.extend(x.shape[axis : axis + kept])
            axis += kept
        elif isinstance(part, slice):
            x = _strided(x, axis, part)
            shape.append(x.shape[axis])
            axis += 1
        elif isinstance(part, int) and not isinstance(part, bool):
            size = x.shape[axis]
            if not -size <= part < size:
                raise ValueError(f"value[..]: expected an index from {-size} to {size - 1}, got {part}")
            x = cut(x, axis, part % size, 1)
            axis += 1
        else:
            raise TypeError(f"value[..]: expected integers, slices, None or `...`, got {foreign(part)}")
    return reshape(x, shape)


def _strided(x: Value, axis: int, part: slice) -> Value:
    start, stop, step = part.indices(x.shape[axis])
    if step < 1:
        raise ValueError(f"value[..]: expected a step of at least 1, got {step}")
    count = max(-(-(stop - start) // step), 0)
    if step == 1 or count == 0:
        return cut(x, axis, start if count else 0, count)
    # The axis is cut into steps, of each of which one index is left.
    first = start - start % step
    if first + count * step > x.shape[axis]:
        raise ValueError(f"value[..]: expected an axis of whole steps of {step}, got a size of {x.shape[axis]}")
    whole = cut(x, axis, first, count * step)
    apart = reshape(whole, (*x.shape[:axis], count, step, *x.shape[axis + 1 :]))
    return reshape(cut(apart, axis + 1, start % step, 1), (*x.shape[:axis], count, *x.shape[axis + 1 :]))


def _rows(x: Value, indices: Value) -> Value:
    if indices._word != "i32":
        raise TypeError(f"value[..]: expected i32 indices, got {indices._word}")
    if not x.shape:
        raise ValueError("value[..]: expected a value with an axis, got a scalar")
    rest = x.shape[1:]
    rows = gather(reshape(x, (x.shape[0], elements(rest))), indices)
    return reshape(rows, (*indices.shape, *rest))


def gather(table: Value, indices: Value) -> Value:
    """Rows of a table `[n, c]` picked by `i32` indices."""
    return emit("gather", (table, indices), [(table._word, (*indices.shape, table.shape[1]))])[0]

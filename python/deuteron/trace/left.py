"""Calls that a fused function leaves to torch: they run between the programs before and after them.

The results of such a call are known when a function is traced: torch computes dtypes and shapes on its meta device.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Set, Tuple

from deuteron._tree import Leaf, take
from deuteron.trace.emit import recorded, trace_of
from deuteron.trace.graph import Node, Result, Trace, dtype_word, is_double, is_long
from deuteron.trace.value import Value

NAMES = (
    *("sort", "argsort", "topk", "kthvalue", "median", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "prod"),
    *("gather", "take_along_dim", "scatter", "scatter_add", "index_add", "index_copy", "one_hot", "searchsorted", "bucketize"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "sinc", "hypot"),
    *("floor", "ceil", "trunc", "frac", "sign", "remainder", "fmod", "floor_divide", "erfc", "erfinv", "lgamma", "digamma"),
    *("pow", "logaddexp", "logaddexp2", "xlogy", "heaviside", "copysign", "logit", "i0"),
    *("flip", "fliplr", "flipud", "diff", "diagonal", "diag_embed", "unfold", "cross", "cdist", "kron", "trace", "meshgrid"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "avg_pool1d", "avg_pool2d", "interpolate"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "pixel_shuffle", "pixel_unshuffle", "bilinear", "local_response_norm"),
)
"""Functions of torch without state, without chance, and with results whose shapes follow from those of the operands."""


class Left(Node):
    """A call of torch in a graph."""

    __slots__ = ("function", "arguments", "name")

    def __init__(self, function: Any, name: str, arguments: Any, operands: Sequence[Result], types: Sequence[Any]) -> None:
        super().__init__("torch", operands, (), types)
        self.function = function
        self.arguments = arguments
        """positional and named ones, with leaves that count operands"""
        self.name = name

    def run(self, tensors: Sequence[Any]) -> List[Any]:
        """The tensors that it returns."""
        words, named = _filled(self.arguments, [_exact(one, self, place) for place, one in enumerate(tensors)])
        results: List[Any] = []
        take(self.function(*words, **named), results, [], "")
        return results


def _exact(tensor: Any, node: Node, place: int) -> Any:
    """An operand with the dtype that the function saw: programs give integers of 32 bits."""
    import torch

    operand = node.operands[place]
    assert isinstance(operand, tuple)
    return tensor.to(torch.int64) if operand[0].is_long_of(operand[1]) else tensor


@functools.lru_cache(maxsize=None)
def _functions() -> Dict[Any, str]:
    import torch

    spaces = (torch, torch.nn.functional, torch.special, torch.linalg, torch.Tensor)
    found = ((getattr(space, name, None), name) for space in spaces for name in NAMES)
    return {function: name for function, name in found if function is not None}


def is_left(function: Any) -> bool:
    """Whether torch computes it."""
    return function in _functions()


def takes(*operands: Any) -> bool:
    """Whether a call of values and numbers may be left to torch: the values are of a function of torch's tensors that is traced now."""
    from deuteron.trace.scope import traces

    values = [one for one in operands if isinstance(one, Value)]
    others = [one for one in operands if not isinstance(one, Value)]
    return bool(values) and traces(values[0]._trace) and all(isinstance(one, (int, float)) for one in others)


def method(name: str, x: Value) -> Any:
    """A method of torch's tensors that torch computes; none if it does not."""
    import torch

    function = getattr(torch.Tensor, name, None) if name in NAMES else None
    return None if function is None else lambda *words, **named: call(function, (x, *words), named)


def call(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Records a call, and returns values for its results."""
    import torch

    from deuteron.trace.scope import captured

    name = _functions()[function]
    if keywords.get("out") is not None:
        raise TypeError(f"{name}: a fused function changes nothing in place; leave out `out`")
    operands: List[Any] = []
    described = take((tuple(arguments), dict(keywords)), operands, [], "")
    values = [operand if isinstance(operand, Value) else captured(operand) for operand in operands]
    if any(value is None for value in values):
        raise TypeError(f"{name}: got a tensor that is not an argument of the fused function; pass it as one")
    trace = trace_of(name, *values)
    empty = [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in values if value is not None]
    words, named = _filled(described, empty)
    try:
        with torch.no_grad():
            returned = function(*words, **named)
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise TypeError(f"{name}: a fused function cannot call it; its result depends on values: {error}") from error
    results: List[Any] = []
    structure = take(returned, results, [], "")
    if not all(isinstance(result, torch.Tensor) for result in results):
        raise TypeError(f"{name}: a fused function cannot call it; it returns other things than tensors")
    types = [_type(name, trace, result) for result in results]
    node = Left(function, name, described, [value._node.result(value._index) for value in values if value is not None], types)
    longs = {is_long(result.dtype) for result, (word, _) in zip(results, types) if word == "i32"}
    if len(longs) > 1:
        raise TypeError(f"{name}: a fused function cannot call it; its results have integers of 32 and of 64 bits")
    node.is_long = True in longs
    trace.nodes.append(node)
    made = recorded(trace, name, tuple(Value(trace, node, index) for index in range(len(types))))
    return _returned(structure, returned, made)


def _filled(described: Any, tensors: Sequence[Any]) -> Tuple[Sequence[Any], Mapping[str, Any]]:
    from deuteron._tree import give

    words, named = give(described, tensors)
    return words, named


def _returned(structure: Any, returned: Any, values: Sequence[Value]) -> Any:
    """As torch returns it; its named tuples take one sequence."""
    if isinstance(structure, Leaf):
        return values[0]
    if isinstance(returned, (tuple, list)):
        return type(returned)(values) if len(values) == len(returned) else tuple(values)
    raise TypeError(f"a fused function cannot take a {type(returned).__name__} from torch")


def _type(name: str, trace: Trace, result: Any) -> Tuple[str, Tuple[int, ...]]:
    try:
        word = dtype_word(result.dtype)
    except TypeError:
        raise TypeError(f"{name}: a fused function cannot call it; its result is {result.dtype}") from None
    if is_double(result.dtype) is not (trace.doubles and word == "f32"):
        raise TypeError(f"{name}: a fused function cannot call it; its result is {result.dtype}")
    return word, tuple(int(size) for size in result.shape)


# Taking a trace apart.


class Step(NamedTuple):
    """One of what runs in turn: a program, or a call of torch. Places count operands, captured tensors and earlier results."""

    text: str
    """the program's graph; empty for a call"""
    call: Any
    places: Tuple[int, ...]
    """of its operands"""
    types: Sequence[Any]
    """of the results that it adds"""


def steps(trace: Trace, wanted: Sequence[Result]) -> Tuple[List[Step], Dict[Tuple[int, int], int]]:
    """Programs and calls in order, and the places of the wanted results."""
    levels = _levels(trace)
    reached = _reached(wanted)
    calls = [node for node in trace.nodes if isinstance(node, Left) and id(node) in reached]
    places: Dict[Tuple[int, int], int] = {(id(node), 0): place for place, node in enumerate(trace.inputs)}
    count, made = len(places), []
    for level in range(max([levels[id(node)] for node in calls], default=0) + 1):
        outputs = _outputs(trace, calls, wanted, levels, level)
        if outputs:
            given = _given(outputs, levels, level) or [trace.inputs[0].result()]
            names = trace.output_names(len(outputs))
            text = trace.text(list(zip(names, outputs)), given)
            types = [node.types[index] for node, index in outputs]
            made.append(Step(text, None, tuple(places[id(node), index] for node, index in given), types))
            for node, index in outputs:
                places[id(node), index] = count
                count += 1
        for node in calls:
            if levels[id(node)] == level + 1:
                taken = tuple(places[id(operand[0]), operand[1]] for operand in node.operands if isinstance(operand, tuple))
                made.append(Step("", node, taken, node.types))
                for index in range(len(node.types)):
                    places[id(node), index] = count
                    count += 1
    return made, places


def _levels(trace: Trace) -> Dict[int, int]:
    """How many calls of torch are before each node; -1 for constants, which every program makes anew."""
    levels = {id(node): 0 for node in trace.inputs}
    for node in trace.nodes:
        level = max([levels[id(operand[0])] for operand in node.operands if isinstance(operand, tuple)], default=-1)
        levels[id(node)] = max(level, 0) + 1 if isinstance(node, Left) else level
    return levels


def _reached(results: Sequence[Result]) -> Set[int]:
    seen: Set[int] = set()
    waiting = [node for node, _ in results]
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            waiting += [operand[0] for operand in node.operands if isinstance(operand, tuple)]
    return seen


def _is_given(node: Node, levels: Mapping[int, int], level: int) -> bool:
    """Whether a program of a level reads a node, and does not compute it."""
    return node.op in ("input", "weight", "torch") or 0 <= levels[id(node)] < level


def _outputs(
    trace: Trace, calls: Sequence[Left], wanted: Sequence[Result], levels: Mapping[int, int], level: int
) -> List[Result]:
    """The outputs of a program: values that calls, later programs or the caller read."""
    reached = _reached(wanted)
    readers: List[Result] = [operand for node in calls for operand in node.operands if isinstance(operand, tuple)]
    for node in trace.nodes:
        if id(node) in reached and not isinstance(node, Left) and levels[id(node)] > level:
            readers += [operand for operand in node.operands if isinstance(operand, tuple) and levels[id(operand[0])] >= 0]
    found: List[Result] = []
    for node, index in (*readers, *wanted):
        mine = max(levels[id(node)], 0) == level and node.op not in ("input", "weight", "torch")
        if mine and (node, index) not in found:
            found.append((node, index))
    return found


def _given(outputs: Sequence[Result], levels: Mapping[int, int], level: int) -> List[Result]:
    """The inputs of a program, in the order of their first use."""
    found: List[Result] = []
    seen: Set[int] = set()
    waiting = list(outputs)
    while waiting:
        node, index = waiting.pop(0)
        if _is_given(node, levels, level):
            if (node, index) not in found:
                found.append((node, index))
        elif id(node) not in seen:
            seen.add(id(node))
            waiting += [operand for operand in node.operands if isinstance(operand, tuple)]
    return found

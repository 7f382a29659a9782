"""The graph of a trace: statements, their order, and the text form.

Nothing here knows what an operation means; `deuteron.trace` does.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Union

FLOATS = ("f32", "f16", "bf16")
"""The dtypes that arithmetic works on, by their words in the text form."""

Number = Union[int, float]
Type = Tuple[str, Tuple[int, ...]]

_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1, "f8e4m3": 1, "i32": 4, "bool": 1}
_WORDS = {
    "float32": "f32",
    "float64": "f32",
    "float": "f32",
    "f64": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int8": "i8",
    "float8_e4m3fn": "f8e4m3",
    "int32": "i32",
    "int64": "i32",
    "int": "i32",
    "bool": "bool",
}
_FRAMEWORK = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i8": "int8",
    "f8e4m3": "float8_e4m3fn",
    "i32": "int32",
    "bool": "bool",
}
_RESERVED = {"transpose_a", "transpose_b", "transposed", "elementwise", "inf", *_BYTES}


def dtype_word(dtype: Any) -> str:
    """The word of a dtype of torch or NumPy, or of a word itself. 64 bits count as 32: indices are
    narrowed, and graphs of `f32` compute `f64` where they are given it.

    >>> dtype_word("bf16"), dtype_word("float32")
    ('bf16', 'f32')
    """
    if isinstance(dtype, str) and dtype in _BYTES:
        return dtype
    name = _title(dtype)
    if name not in _WORDS:
        raise TypeError(f"expected a dtype of {', '.join(_BYTES)}, got {name}")
    return _WORDS[name]


def is_long(dtype: Any) -> bool:
    """Whether a dtype is an integer of 64 bits; that of Python is."""
    return _title(dtype) in ("int64", "int")


def is_double(dtype: Any) -> bool:
    """Whether a dtype is a float of 64 bits; that of Python is."""
    return _title(dtype) in ("float64", "float", "f64")


def _title(dtype: Any) -> str:
    """`float32` of `torch.float32`, of `numpy.dtype("float32")` and of `numpy.float32`."""
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    return name.rsplit(".", 1)[-1]


def dtype_name(word: str) -> str:
    """What torch and NumPy call a dtype."""
    return _FRAMEWORK[word]


def dtype_bytes(word: str) -> int:
    """Bytes of one element."""
    return _BYTES[word]


def elements(shape: Sequence[int]) -> int:
    """How many elements a shape has."""
    return math.prod(shape)


def rounded(value: Number, word: str) -> Number:
    """The value that a 16-bit dtype holds for a number: the nearest, ties to even. Others are left to the engine.

    >>> rounded(0.1, "bf16"), rounded(0.5, "f16"), rounded(3, "i32")
    (0.10009765625, 0.5, 3)
    """
    if word not in ("f16", "bf16") or math.isinf(value) or math.isnan(value):
        return value
    try:
        if word == "f16":
            return float(struct.unpack("<e", struct.pack("<e", value))[0])
        bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def type_text(word: str, shape: Sequence[int]) -> str:
    """`f32[4,8]`"""
    return f"{word}{shape_text(shape)}"


def shape_text(shape: Sequence[int]) -> str:
    """`[4,8]`"""
    return f"[{','.join(str(size) for size in shape)}]"


class Node:
    """One statement: an operation, its operands (results of other nodes, or numbers) and its attributes as words."""

    __slots__ = ("op", "operands", "words", "types", "names", "is_long")

    def __init__(
        self, op: str, operands: Sequence[Union[Result, Number]], words: Sequence[str], types: Sequence[Type]
    ) -> None:
        self.op = op
        self.operands = tuple(operands)
        self.words = tuple(words)
        self.types: Tuple[Type, ...] = tuple(types)
        self.names: List[Optional[str]] = [None] * len(types)
        longs = [operand[0].is_long_of(operand[1]) for operand in operands if isinstance(operand, tuple)]
        self.is_long: bool = op in ("iota", "row_argmax") or True in longs
        """Whether its `i32` results are of 64 bits in torch and NumPy."""

    def is_long_of(self, index: int) -> bool:
        """Whether one of its results is an integer of 64 bits there."""
        return self.is_long and self.types[index][0] == "i32"

    def result(self, index: int = 0) -> Result:
        """One result of the node."""
        return (self, index)


Result = Tuple[Node, int]


class Trace:
    """A graph as it grows. Statements and weights that no output needs are left out of its text; inputs stay."""

    def __init__(self, name: str, framework: str = "", doubles: bool = False) -> None:
        self.name = legal_name(name)
        self.framework = framework
        """`torch`, `numpy`, or nothing: what dtypes and pairs of results look like to the function."""
        self.doubles = doubles
        """Whether floats are of 64 bits, which the text form does not tell from `f32`."""
        self.device: Any = None
        """That of the operands, as torch has it."""
        self.records_gradients: Callable[[], bool] = lambda: True
        """Whether gradients are to flow through what is written down now: not within `torch.no_grad()`."""
        self.inputs: List[Node] = []
        self.nodes: List[Node] = []
        self.offsets = 0
        self._names: Set[str] = set()

    def input(self, name: str, word: str, shape: Sequence[int], weight: bool = False, is_long: bool = False) -> Node:
        """Declares an input; its name is made unique."""
        node = Node("weight" if weight else "input", (), (type_text(word, shape),), [(word, tuple(shape))])
        node.is_long = is_long
        self.give_name(node.result(), name)
        self.inputs.append(node)
        return node

    def add(
        self, op: str, operands: Sequence[Union[Result, Number]], types: Sequence[Type], words: Sequence[str] = ()
    ) -> Node:
        """Appends a statement."""
        for operand in operands:
            if isinstance(operand, (int, float)) and math.isnan(operand):
                raise ValueError(f"{op}: expected a number, got NaN")
        node = Node(op, operands, words, types)
        self.nodes.append(node)
        return node

    def offset(self) -> int:
        """Tells one dropout of the graph from the others."""
        self.offsets += 1
        return self.offsets - 1

    def give_name(self, result: Result, name: str) -> None:
        """Names a value, unless it has a name."""
        node, index = result
        if node.names[index] is None:
            node.names[index] = self._unique(name)

    def text(self, outputs: Sequence[Tuple[str, Result]], given: Optional[Sequence[Result]] = None) -> str:
        """The graph in text form, with these outputs, and with these inputs in place of its own."""
        live = _live((result for _, result in outputs), given or ())
        taken = set(self._names)
        labels: Dict[Tuple[int, int], str] = {}
        lines = [f"graph {self.name}"] if self.name else []
        for node, index in given or ():
            labels[id(node), index] = node.names[index] or _numbered("given", taken)
            lines.append(f"{labels[id(node), index]} = input {type_text(*node.types[index])}")
        for node in (*self.inputs, *self.nodes):
            if id(node) not in live and (node.op != "input" or given is not None):
                continue
            last = max(live.get(id(node), {0}))
            for index, name in enumerate(node.names[: last + 1]):
                labels[id(node), index] = name or _numbered("v", taken)
            targets = ", ".join(labels[id(node), index] for index in range(last + 1))
            operands = [_operand_text(operand, labels) for operand in node.operands]
            lines.append(f"{targets} = {' '.join((node.op, *operands, *node.words))}")
        for name, (node, index) in outputs:
            label = labels[id(node), index]
            lines.append(f"out {label}" if label == name else f"out {name}={label}")
        return "\n".join(lines) + "\n"

    def output_names(self, count: int) -> List[str]:
        """Names for outputs that are those of no value and no gradient."""
        names = [f"y{index}" for index in range(count)] if count != 1 else ["y"]
        while any(name in self._names or f"d_{name}" in self._names for name in names):
            names = [f"{name}_" for name in names]
        return names

    def _unique(self, name: str) -> str:
        name = legal_name(name) or "v"
        # Gradients are called `d_` and the name of a value, and values without a name `node` and a number.
        name = f"arg_{name}" if re.match(r"d_|(node|kept)\d+$", name) else name
        unique, count = name, 1
        while unique in self._names:
            unique, count = f"{name}_{count}", count + 1
        self._names.add(unique)
        return unique


def legal_name(name: str) -> str:
    """The name, with characters that the text form does not allow replaced."""
    name = re.sub(r"[^A-Za-z0-9_.\-/]", "_", name)
    if name and not (name[0].isalpha() or name[0] == "_"):
        name = f"_{name}"
    return f"{name}_" if name in _RESERVED else name


def _live(results: Iterable[Result], given: Sequence[Result] = ()) -> Dict[int, Set[int]]:
    """The results of nodes that the given outputs need, by the node's identity."""
    live: Dict[int, Set[int]] = {}
    waiting = list(results)
    while waiting:
        node, index = waiting.pop()
        if (node, index) in given:
            continue
        if id(node) in live:
            live[id(node)].add(index)
            continue
        live[id(node)] = {index}
        waiting.extend(operand for operand in node.operands if isinstance(operand, tuple))
    return live


def _numbered(prefix: str, taken: Set[str]) -> str:
    count = len(taken)
    while f"{prefix}{count}" in taken:
        count += 1
    taken.add(f"{prefix}{count}")
    return f"{prefix}{count}"


def _operand_text(operand: Union[Result, Number], labels: Dict[Tuple[int, int], str]) -> str:
    if isinstance(operand, tuple):
        return labels[id(operand[0]), operand[1]]
    return number_text(operand)


def number_text(value: Number) -> str:
    """A number as the text form reads it.

    >>> number_text(1e-05), number_text(float("-inf")), number_text(2)
    ('1e-05', '-inf', '2')
    """
    return repr(value) if isinstance(value, int) else repr(float(value))

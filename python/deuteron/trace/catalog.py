"""Ops of the catalogue on values: the engine says what each computes, and that is written into the trace."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Tuple

from deuteron._native import Program
from deuteron.trace.emit import as_value, recorded, trace_of
from deuteron.trace.graph import Trace
from deuteron.trace.value import Value


def expand(known: Program, operands: Sequence[Any]) -> List[Value]:
    """The results of an op."""
    word = known.name
    given = [as_value(operand, word) for operand in operands if operand is not None]
    if len(given) != len(known.operands):
        raise TypeError(
            f"{word}: expected {len(known.operands)} operands ({', '.join(known.operands)}), got {len(given)}"
        )
    text, types = known.graph([(value._word, value.shape) for value in given])
    trace = trace_of(word, *given)
    values: Dict[str, Value] = dict(zip(known.operands, given))
    results = []
    for line in text.splitlines():
        first, *words = line.split()
        if first == "out":
            results.append(values[words[0].split("=")[-1]])
        elif "=" in words and words[words.index("=") + 1] not in ("input", "weight"):
            _statement(line, trace, values, types)
    return list(recorded(trace, word, tuple(results)))


def _statement(
    line: str, trace: Trace, values: Dict[str, Value], types: Mapping[str, Tuple[str, Tuple[int, ...]]]
) -> None:
    """Writes a statement of an op into a trace."""
    left, _, right = line.partition(" = ")
    op, *words = right.split()
    targets = left.split(", ")
    operands = [values[word]._node.result(values[word]._index) for word in words if word in values]
    others = [word for word in words if word not in values]
    # Two ops of one function drop different elements, also where they share a seed.
    others = [f"offset={trace.offset()}" if word.startswith("offset=") else word for word in others]
    node = trace.add(op, operands, [types[target] for target in targets], others)
    values.update((target, Value(trace, node, index)) for index, target in enumerate(targets))

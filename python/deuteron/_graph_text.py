"""A graph in text form, written line by line, with the dtype of each value known."""

from __future__ import annotations

from typing import Dict, List


class GraphText:
    """Lines of a graph. Elementwise operations promote their operands as torch does."""

    def __init__(self, name: str) -> None:
        self.lines: List[str] = [f"graph {name}"]
        # of each value
        self.dtypes: Dict[str, str] = {}

    def say(self, line: str) -> None:
        self.lines.append(line)

    def let(self, name: str, dtype: str, expression: str) -> str:
        """Defines a value and gives its name."""
        self.say(f"{name} = {expression}")
        self.dtypes[name] = dtype
        return name

    def operand(self, kind: str, name: str, dtype: str, *sizes: int) -> str:
        """An `input` or a `weight`."""
        return self.let(name, dtype, f"{kind} {dtype}{shape(*sizes)}")

    def cast(self, value: str, dtype: str) -> str:
        """The value in another dtype; itself, if it has that one."""
        if self.dtypes[value] == dtype:
            return value
        name = f"{value}.{dtype}"
        return name if name in self.dtypes else self.let(name, dtype, f"cast {value} {dtype}")

    def binary(self, name: str, operation: str, a: str, b: str) -> str:
        """An elementwise operation on two tensors, in the dtype that torch promotes them to."""
        dtype = promoted(self.dtypes[a], self.dtypes[b])
        return self.let(name, dtype, f"{operation} {self.cast(a, dtype)} {self.cast(b, dtype)}")

    def with_number(self, name: str, operation: str, value: str, number: float) -> str:
        """An elementwise operation on a tensor and a number. As in torch, a 16-bit tensor is widened for it, and the number is
        not rounded to 16 bits."""
        dtype = self.dtypes[value]
        constant = self.let(f"{name}.number", "f32", f"const {number!r} f32")
        if dtype == "f32":
            return self.let(name, dtype, f"{operation} {value} {constant}")
        wide = self.let(f"{name}.wide", "f32", f"{operation} {self.cast(value, 'f32')} {constant}")
        return self.let(name, dtype, f"cast {wide} {dtype}")

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def promoted(a: str, b: str) -> str:
    """The dtype of an operation on two floats. Neither of the 16-bit dtypes holds the other."""
    return a if a == b else "f32"


def shape(*sizes: int) -> str:
    return "[" + ",".join(map(str, sizes)) + "]"

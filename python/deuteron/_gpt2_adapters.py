"""Adapters inside the program of a block: what they add to a linear layer, as lines of its graph.

The formulas are those of peft, with its roundings: LoRA and DoRA add `s (x A) B` to what the layer gives, IA3 scales what it takes
or gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Tuple, Union

from ._graph_text import GraphText, shape


@dataclass(frozen=True)
class Site:
    """A linear layer with an adapter, in a graph."""

    text: GraphText
    # the layer's name; its weight and bias are operands of this name
    layer: str
    # features in and out
    sizes: Tuple[int, int]
    # what the layer takes
    x: str
    # the name of its result
    result: str
    # the dtype of that, and of what the layer multiplies
    compute: str
    # dropout at this site has this offset, and the ones after it
    offset: int

    def linear(self, x: str, result: str) -> str:
        """The layer itself."""
        weight, bias = (self.text.cast(f"{self.layer}.{name}", self.compute) for name in ("weight", "bias"))
        return self.text.let(result, self.compute, f"linear {self.text.cast(x, self.compute)} {weight} {bias}")


@dataclass(frozen=True)
class Lora:
    """One adapter of low rank; with a magnitude, DoRA."""

    rank: int
    scaling: float
    # of its matrices, and of what it multiplies: another one under autocast
    dtype: str
    product: str
    # dtypes of the bias of its second matrix, and of DoRA's magnitude, if there are any
    bias: Optional[str] = None
    magnitude: Optional[str] = None
    # of its input: 0 where nothing is dropped
    dropout: float = 0.0
    # whether its input is cast to its dtype
    casts: bool = True
    # whether DoRA multiplies by the layer's weight again, because dropout changed the input
    multiplies_again: bool = False

    def operands(self, prefix: str, sizes: Tuple[int, int]) -> List[Tuple[str, str, Tuple[int, ...]]]:
        found: List[Tuple[str, str, Tuple[int, ...]]] = [
            (f"{prefix}.A", self.dtype, (self.rank, sizes[0])),
            (f"{prefix}.B", self.dtype, (sizes[1], self.rank)),
        ]
        if self.bias is not None:
            found.append((f"{prefix}.bias", self.bias, (sizes[1],)))
        if self.magnitude is not None:
            found.append((f"{prefix}.magnitude", self.magnitude, (sizes[1],)))
        return found

    def write(self, site: Site, index: int, x: str, result: str) -> Tuple[str, str]:
        """Adds the adapter to a result. Returns the sum and the input of the next adapter."""
        text, prefix, name = site.text, f"{site.layer}.{index}", f"{site.result}.{index}"
        taken = x = text.cast(x, self.dtype) if self.casts else x
        if self.dropout:
            drop = f"dropout {x} seed p={self.dropout!r} offset={site.offset + index}"
            taken = text.let(f"{name}.dropped", text.dtypes[x], drop)
        low = self.multiply(text, f"{name}.low", taken, f"{prefix}.A")
        high = self.multiply(text, f"{name}.high", low, f"{prefix}.B", f"{prefix}.bias")
        if self.magnitude is None:
            added = text.with_number(f"{name}.scaled", "mul", high, self.scaling)
        else:
            added = self.with_magnitude(site, index, taken, high, result)
        return text.binary(f"{name}.sum", "add", result, added), x

    def multiply(self, text: GraphText, name: str, x: str, matrix: str, bias: str = "") -> str:
        operands = [text.cast(x, self.product), text.cast(matrix, self.product)]
        if bias and self.bias is not None:
            operands.append(text.cast(bias, self.product))
        return text.let(name, self.product, f"linear {' '.join(operands)} transposed")

    def with_magnitude(self, site: Site, index: int, x: str, high: str, result: str) -> str:
        """DoRA: rescales the columns of `W + s A B` to learnt lengths, as an addition to the layer's own result."""
        text, prefix, name = site.text, f"{site.layer}.{index}", f"{site.result}.{index}"
        weight = text.cast(f"{site.layer}.weight", text.dtypes[x])
        norm = self.norm(site, index, weight)
        factor = text.binary(f"{name}.factor", "div", f"{prefix}.magnitude", norm)
        if self.multiplies_again:
            product = f"linear {text.cast(x, self.product)} {text.cast(weight, self.product)}"
            base = text.let(f"{name}.base", self.product, product)
        else:
            base = text.binary(f"{name}.base", "sub", result, f"{site.layer}.bias")
        rest = text.with_number(f"{name}.rest", "sub", factor, 1.0)
        own = text.binary(f"{name}.own", "mul", rest, base)
        scaled = text.binary(f"{name}.longer", "mul", factor, high)
        scaled = text.with_number(f"{name}.scaled", "mul", scaled, self.scaling)
        return text.binary(f"{name}.added", "add", own, scaled)

    def norm(self, site: Site, index: int, weight: str) -> str:
        """The length of each column of `W + s A B`. It counts as a constant."""
        text, prefix, name = site.text, f"{site.layer}.{index}", f"{site.result}.{index}"
        dtype = text.dtypes[weight]
        columns = text.let(f"{name}.columns", self.dtype, f"transpose {prefix}.A [1,0]")
        change = self.multiply(text, f"{name}.change", columns, f"{prefix}.B", f"{prefix}.bias")
        change = text.with_number(f"{name}.change_scaled", "mul", text.cast(change, dtype), self.scaling)
        changed = text.cast(text.binary(f"{name}.changed", "add", weight, change), "f32")
        squares = text.let(f"{name}.squares", "f32", f"mul {changed} {changed}")
        sums = text.let(f"{name}.squares_sum", "f32", f"column_sum {squares}")
        length = text.cast(text.let(f"{name}.length", "f32", f"sqrt {sums}"), dtype)
        return text.let(f"{name}.norm", dtype, f"stop_gradient {length}")


@dataclass(frozen=True)
class Loras:
    """The active adapters of low rank of one layer, in order."""

    each: Tuple[Lora, ...]

    @property
    def dropouts(self) -> int:
        """How many offsets its dropout takes."""
        return len(self.each) if any(one.dropout for one in self.each) else 0

    def operands(self, layer: str, sizes: Tuple[int, int]) -> List[Tuple[str, str, Tuple[int, ...]]]:
        return [found for index, one in enumerate(self.each) for found in one.operands(f"{layer}.{index}", sizes)]

    def write(self, site: Site) -> str:
        """The layer with its adapters; gives the name of the result."""
        x, result = site.x, site.linear(site.x, site.result)
        for index, one in enumerate(self.each):
            result, x = one.write(site, index, x, result)
        return site.text.cast(result, site.compute)


@dataclass(frozen=True)
class Ia3:
    """Vectors that scale the input (`before`) or the output of a layer."""

    before: bool
    # of each vector
    dtypes: Tuple[str, ...]

    dropouts = 0

    def operands(self, layer: str, sizes: Tuple[int, int]) -> List[Tuple[str, str, Tuple[int, ...]]]:
        vector = (1, sizes[0]) if self.before else (sizes[1], 1)
        return [(f"{layer}.{index}.vector", dtype, vector) for index, dtype in enumerate(self.dtypes)]

    def write(self, site: Site) -> str:
        """The layer with its vectors; gives the name of the result."""
        text = site.text
        if not self.before:
            result = site.linear(site.x, site.result)
            return text.cast(text.binary(f"{site.result}.scaled", "mul", result, self.factor(site)), site.compute)
        dtype = text.dtypes[site.x]
        taken = text.binary(f"{site.result}.taken", "mul", text.cast(site.x, self.dtypes[-1]), self.factor(site))
        return site.linear(text.cast(taken, dtype), site.result)

    def factor(self, site: Site) -> str:
        """The product of the vectors, in the dtype of the first: peft multiplies it in place."""
        text, size = site.text, site.sizes[0 if self.before else 1]
        found = ""
        for index, dtype in enumerate(self.dtypes):
            name = f"{site.layer}.{index}"
            vector = text.let(f"{name}.flat", dtype, f"reshape {name}.vector {shape(size)}")
            found = text.cast(text.binary(f"{name}.factor", "mul", found, vector), self.dtypes[0]) if found else vector
        return found


Adapter = Union[Loras, Ia3]

"""A block of GPT-2 as one program: its graph in text form, for given sizes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import List, Optional, Tuple

from ._native import Program

# The parameters of a block in the order of the operands, and their sizes: h hidden features, q = 3h, m of the MLP.
PARAMETERS: Tuple[Tuple[str, str], ...] = (
    ("ln_1.weight", "h"),
    ("ln_1.bias", "h"),
    ("attn.c_attn.weight", "hq"),
    ("attn.c_attn.bias", "q"),
    ("attn.c_proj.weight", "hh"),
    ("attn.c_proj.bias", "h"),
    ("ln_2.weight", "h"),
    ("ln_2.bias", "h"),
    ("mlp.c_fc.weight", "hm"),
    ("mlp.c_fc.bias", "m"),
    ("mlp.c_proj.weight", "mh"),
    ("mlp.c_proj.bias", "h"),
)


@dataclass(frozen=True)
class Mask:
    """What attention leaves out."""

    # full, causal, cached or additive
    kind: str
    # of an additive one
    dtype: str = ""
    shape: Tuple[int, ...] = ()


CAUSAL, CACHED, FULL = Mask("causal"), Mask("cached"), Mask("full")


@dataclass(frozen=True)
class Past:
    """Where keys and values go."""

    # returned: queries, keys and values are a result; joint: into one state, keys before values; apart: into two states
    kind: str
    # rows of a state
    capacity: int = 0


RETURNED = Past("returned")


@dataclass(frozen=True)
class Block:
    """What the program of a block is made for."""

    batch: int
    sequence: int
    hidden: int
    inner: int
    heads: int
    # dtypes: of the residual stream, of the parameters, and of what is multiplied
    stream: str
    parameters: str
    compute: str
    # of both norms
    eps: Tuple[float, float]
    # of the scores
    scale: float
    # a composite, and its attribute if it has one
    activation: Tuple[str, str]
    # of attention, its projection and the MLP: 0 where nothing is dropped
    dropout: Tuple[float, float, float]
    mask: Mask
    past: Optional[Past] = None

    @property
    def states(self) -> Tuple[str, ...]:
        """The inputs that it writes to."""
        if self.past is None or self.past.kind == "returned":
            return ()
        return ("cache",) if self.past.kind == "joint" else ("k_cache", "v_cache")

    @property
    def seeded(self) -> bool:
        """Whether it drops anything."""
        return any(self.dropout)

    def text(self) -> str:
        """The graph. Its operands: `x`; `seed`, `mask`, states and `positions` if there are any; the parameters."""
        return _Text(self).whole()


# Programs that some block remembers. A batch and a length make one; with a cache, a batch and a capacity.
_remembered: weakref.WeakValueDictionary[Block, Program] = weakref.WeakValueDictionary()


def program(block: Block) -> Program:
    """The program of a block. It is made once for all blocks of a model, and goes with the last that remembers it."""
    made = _remembered.get(block)
    if made is None:
        made = _remembered[block] = Program(block.text(), states=block.states)
    return made


class _Text:
    def __init__(self, block: Block) -> None:
        self.block = block
        self.lines: List[str] = ["graph gpt2_block"]

    def whole(self) -> str:
        block = self.block
        self.inputs()
        self.say(f"normed = layer_norm x ln_1.weight ln_1.bias eps={block.eps[0]!r}")
        self.linear("qkv", self.narrowed("normed"), "attn.c_attn")
        self.attention()
        self.linear("projected", "merged", "attn.c_proj")
        self.residual("stream", "x", "projected", block.dropout[1], offset=1)
        self.say(f"normed_again = layer_norm stream ln_2.weight ln_2.bias eps={block.eps[1]!r}")
        self.linear("wide", self.narrowed("normed_again"), "mlp.c_fc")
        activation, attribute = block.activation
        self.say(f"activated = {activation} wide {attribute}".rstrip())
        self.linear("narrow", "activated", "mlp.c_proj")
        self.residual("y", "stream", "narrow", block.dropout[2], offset=2)
        self.say("out y")
        if block.past is not None:
            self.say("out " + {"returned": "qkv", "joint": "kept", "apart": "k_kept v_kept"}[block.past.kind])
        return "\n".join(self.lines) + "\n"

    def say(self, line: str) -> None:
        self.lines.append(line)

    def inputs(self) -> None:
        block = self.block
        sizes = {"h": block.hidden, "q": 3 * block.hidden, "m": block.inner}
        self.say(f"x = input {block.stream}{_shape(block.batch, block.sequence, block.hidden)}")
        if block.seeded:
            self.say("seed = input i32[]")
        if block.mask.kind == "additive":
            self.say(f"mask = input {block.mask.dtype}{_shape(*block.mask.shape)}")
        if block.states:
            lead = (2,) if block.states == ("cache",) else ()
            for state in block.states:
                self.say(f"{state} = input {block.compute}{_shape(*lead, *self.by_head())}")
            self.say(f"positions = input i32[{block.batch}]")
        for name, axes in PARAMETERS:
            self.say(f"{name} = weight {block.parameters}{_shape(*(sizes[axis] for axis in axes))}")

    def attention(self) -> None:
        block = self.block
        # Heads are views of the projection: no copy splits them.
        for index, part in enumerate("q" if block.states == ("cache",) else "qkv"):
            self.say(f"{part}_rows = slice qkv axis=2 start={index * block.hidden} length={block.hidden}")
            self.say(f"{part}_split = reshape {part}_rows {_shape(*self.by_token())}")
            self.say(f"{part} = transpose {part}_split [0,2,1,3]")
        keys, values = self.kept()
        operands = ["q", keys, values]
        if block.mask.kind in ("additive", "cached"):
            operands.append("mask" if block.mask.kind == "additive" else "positions")
        attributes = [f"mask={block.mask.kind}", f"scale={block.scale!r}"]
        if block.dropout[0]:
            operands.append("seed")
            attributes += [f"p={block.dropout[0]!r}", "offset=0"]
        self.say(f"mixed = attention {' '.join(operands + attributes)}")
        self.say("by_token = transpose mixed [0,2,1,3]")
        self.say(f"merged = reshape by_token {_shape(block.batch, block.sequence, block.hidden)}")

    def kept(self) -> Tuple[str, str]:
        """Writes keys and values where they are kept, and says where they are read."""
        block, states = self.block, self.block.states
        if states == ("k_cache", "v_cache"):
            self.say("k_kept = append k_cache k positions batch=0")
            self.say("v_kept = append v_cache v positions batch=0")
            return "k_kept", "v_kept"
        if states == ("cache",):
            # One append of both, from the rows of the projection.
            batch, sequence, heads, width = self.by_token()
            self.say(f"pair = slice qkv axis=2 start={block.hidden} length={2 * block.hidden}")
            self.say(f"pair_rows = reshape pair {_shape(batch, sequence, 2, heads, width)}")
            self.say("pair_heads = transpose pair_rows [2,0,3,1,4]")
            self.say("kept = append cache pair_heads positions batch=1")
            for index, part in enumerate(("k_kept", "v_kept")):
                self.say(f"{part}_slice = slice kept axis=0 start={index} length=1")
                self.say(f"{part} = reshape {part}_slice {_shape(*self.by_head())}")
            return "k_kept", "v_kept"
        return "k", "v"

    def by_token(self) -> Tuple[int, int, int, int]:
        block = self.block
        return block.batch, block.sequence, block.heads, block.hidden // block.heads

    def by_head(self) -> Tuple[int, int, int, int]:
        """Of a state."""
        batch, _, heads, width = self.by_token()
        return batch, heads, self.block.past.capacity if self.block.past is not None else 0, width

    def linear(self, result: str, operand: str, layer: str) -> None:
        weight, bias = (self.narrowed(f"{layer}.{name}", self.block.parameters) for name in ("weight", "bias"))
        self.say(f"{result} = linear {operand} {weight} {bias}")

    def narrowed(self, value: str, dtype: str = "") -> str:
        """The value in the dtype of products."""
        if (dtype or self.block.stream) == self.block.compute:
            return value
        self.say(f"{value}.narrow = cast {value} {self.block.compute}")
        return f"{value}.narrow"

    def residual(self, result: str, stream: str, value: str, p: float, offset: int) -> None:
        if p:
            self.say(f"{value}_dropped = dropout {value} seed p={p!r} offset={offset}")
            value = f"{value}_dropped"
        if self.block.compute != self.block.stream:
            self.say(f"{value}_stream = cast {value} {self.block.stream}")
            value = f"{value}_stream"
        self.say(f"{result} = add {value} {stream}")


def _shape(*sizes: int) -> str:
    return "[" + ",".join(map(str, sizes)) + "]"

"""A block of GPT-2 as one program: its graph in text form, for given sizes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Optional, Tuple

from ._gpt2_adapters import Adapter, Site
from ._graph_text import GraphText, shape
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

# The linear layers of a block: what an adapter may belong to.
LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")

# Dropout of a block itself has the offsets below; that of its adapters begins here.
ADAPTER_OFFSET = 3


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

    # returned: queries, keys and values are a result; joint: into one state, keys before values; apart: into two states;
    # joined: behind those of two inputs, and all of them are results, with gradients
    kind: str
    # rows of a state or of an input
    capacity: int = 0


RETURNED = Past("returned")


@dataclass(frozen=True)
class Block:
    """The properties of a block and a call that determine its program."""

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
    # of each linear layer
    adapters: Tuple[Optional[Adapter], ...] = (None,) * len(LINEARS)

    @property
    def states(self) -> Tuple[str, ...]:
        """The inputs that it writes to."""
        kind = "returned" if self.past is None else self.past.kind
        return {"joint": ("cache",), "apart": ("k_cache", "v_cache")}.get(kind, ())

    @property
    def seeded(self) -> bool:
        """Whether it drops anything."""
        return any(self.dropout) or any(adapter is not None and adapter.dropouts for adapter in self.adapters)

    def sizes(self, axes: str) -> Tuple[int, ...]:
        """Of a parameter, by the letters of `PARAMETERS`."""
        known = {"h": self.hidden, "q": 3 * self.hidden, "m": self.inner}
        return tuple(known[axis] for axis in axes)

    def linear_sizes(self, layer: str) -> Tuple[int, int]:
        """Features in and out."""
        features_in, features_out = self.sizes(dict(PARAMETERS)[f"{layer}.weight"])
        return features_in, features_out

    def text(self) -> str:
        """The graph. Its operands: `x`; `seed`, `mask`, states or keys and values so far, and `positions` if there are any; the
        parameters; those of adapters."""
        return _Text(self).whole()


# Programs that some block remembers. A batch and a length make one; with a cache, a batch and a capacity.
_remembered: weakref.WeakValueDictionary[Block, Program] = weakref.WeakValueDictionary()


def program(block: Block) -> Program:
    """The program of a block. It is made once for all blocks of a model, and goes with the last that remembers it."""
    made = _remembered.get(block)
    if made is None:
        made = _remembered[block] = Program(block.text(), states=block.states)
    return made


class _Text(GraphText):
    def __init__(self, block: Block) -> None:
        super().__init__("gpt2_block")
        self.block = block
        self.offset = ADAPTER_OFFSET

    def whole(self) -> str:
        block = self.block
        self.inputs()
        normed = self.norm("normed", "x", "ln_1", block.eps[0])
        qkv = self.linear("qkv", normed, "attn.c_attn")
        merged = self.attention(qkv)
        projected = self.linear("projected", merged, "attn.c_proj")
        stream = self.residual("stream", "x", projected, block.dropout[1], offset=1)
        normed = self.norm("normed_again", stream, "ln_2", block.eps[1])
        wide = self.linear("wide", normed, "mlp.c_fc")
        activation, attribute = block.activation
        activated = self.let("activated", block.compute, f"{activation} {wide} {attribute}".rstrip())
        narrow = self.linear("narrow", activated, "mlp.c_proj")
        self.say("out " + self.residual("y", stream, narrow, block.dropout[2], offset=2))
        if block.past is not None:
            kept = {"returned": qkv, "joint": "kept", "apart": "k_kept v_kept", "joined": "k_kept v_kept"}
            self.say("out " + kept[block.past.kind])
        return self.text()

    def inputs(self) -> None:
        block = self.block
        self.operand("input", "x", block.stream, block.batch, block.sequence, block.hidden)
        if block.seeded:
            self.operand("input", "seed", "i32")
        if block.mask.kind == "additive":
            self.operand("input", "mask", block.mask.dtype, *block.mask.shape)
        lead = (2,) if block.states == ("cache",) else ()
        for state in block.states:
            self.operand("input", state, block.compute, *lead, *self.by_head())
        if block.states:
            self.operand("input", "positions", "i32", block.batch)
        if block.past is not None and block.past.kind == "joined":
            for name in ("k_past", "v_past"):
                self.operand("input", name, block.compute, *self.by_head())
        for name, axes in PARAMETERS:
            self.operand("weight", name, block.parameters, *block.sizes(axes))
        for layer, adapter in zip(LINEARS, block.adapters):
            for name, dtype, sizes in [] if adapter is None else adapter.operands(layer, block.linear_sizes(layer)):
                self.operand("weight", name, dtype, *sizes)

    def attention(self, qkv: str) -> str:
        block = self.block
        # Heads are views of the projection: no copy splits them.
        for index, part in enumerate("q" if block.states == ("cache",) else "qkv"):
            self.say(f"{part}_rows = slice {qkv} axis=2 start={index * block.hidden} length={block.hidden}")
            self.say(f"{part}_split = reshape {part}_rows {shape(*self.by_token())}")
            self.say(f"{part} = transpose {part}_split [0,2,1,3]")
        keys, values = self.kept(qkv)
        operands = ["q", keys, values]
        if block.mask.kind in ("additive", "cached"):
            operands.append("mask" if block.mask.kind == "additive" else "positions")
        attributes = [f"mask={block.mask.kind}", f"scale={block.scale!r}"]
        if block.dropout[0]:
            operands.append("seed")
            attributes += [f"p={block.dropout[0]!r}", "offset=0"]
        self.say(f"mixed = attention {' '.join(operands + attributes)}")
        self.say("by_token = transpose mixed [0,2,1,3]")
        merged = f"reshape by_token {shape(block.batch, block.sequence, block.hidden)}"
        return self.let("merged", block.compute, merged)

    def kept(self, qkv: str) -> Tuple[str, str]:
        """Appends keys and values to the cache, and returns the values that attention reads."""
        block, states = self.block, self.block.states
        if states == ("k_cache", "v_cache"):
            self.say("k_kept = append k_cache k positions batch=0")
            self.say("v_kept = append v_cache v positions batch=0")
            return "k_kept", "v_kept"
        if states == ("cache",):
            # One append of both, from the rows of the projection.
            batch, sequence, heads, width = self.by_token()
            self.say(f"pair = slice {qkv} axis=2 start={block.hidden} length={2 * block.hidden}")
            self.say(f"pair_rows = reshape pair {shape(batch, sequence, 2, heads, width)}")
            self.say("pair_heads = transpose pair_rows [2,0,3,1,4]")
            self.say("kept = append cache pair_heads positions batch=1")
            for index, part in enumerate(("k_kept", "v_kept")):
                self.say(f"{part}_slice = slice kept axis=0 start={index} length=1")
                self.say(f"{part} = reshape {part}_slice {shape(*self.by_head())}")
            return "k_kept", "v_kept"
        if block.past is not None and block.past.kind == "joined":
            self.say("k_kept = concat k_past k axis=2")
            self.say("v_kept = concat v_past v axis=2")
            return "k_kept", "v_kept"
        return "k", "v"

    def by_token(self) -> Tuple[int, int, int, int]:
        block = self.block
        return block.batch, block.sequence, block.heads, block.hidden // block.heads

    def by_head(self) -> Tuple[int, int, int, int]:
        """The layout by head of keys and values that are operands."""
        batch, _, heads, width = self.by_token()
        return batch, heads, self.block.past.capacity if self.block.past is not None else 0, width

    def norm(self, result: str, operand: str, layer: str, eps: float) -> str:
        expression = f"layer_norm {operand} {layer}.weight {layer}.bias eps={eps!r}"
        return self.let(result, self.block.stream, expression)

    def linear(self, result: str, operand: str, layer: str) -> str:
        block = self.block
        site = Site(self, layer, block.linear_sizes(layer), operand, result, block.compute, self.offset)
        adapter = block.adapters[LINEARS.index(layer)]
        if adapter is None:
            return site.linear(operand, result)
        self.offset += adapter.dropouts
        return adapter.write(site)

    def residual(self, result: str, stream: str, value: str, p: float, offset: int) -> str:
        if p:
            drop = f"dropout {value} seed p={p!r} offset={offset}"
            value = self.let(f"{value}_dropped", self.block.compute, drop)
        return self.let(result, self.block.stream, f"add {self.cast(value, self.block.stream)} {stream}")

"""An exported program of torch as a graph in text form.

The program is interpreted on values: each ATen operation becomes what `deuteron.trace` writes for it. Whatever depends on
no input and no parameter is computed during translation, so that masks and positions are recognised by their contents. An
operation that the text form does not have becomes `opaque`, modelled by the bytes it moves, with a note.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

import torch

from deuteron import trace as ours
from deuteron._aten_ops import HANDLERS, RAW, counted, short_name
from deuteron._aten_patterns import Patterns
from deuteron.trace import elementwise, views
from deuteron.trace.graph import FLOATS, Trace, dtype_bytes, dtype_word, elements, number_text, type_text
from deuteron.trace.value import Value

class Translation(NamedTuple):
    """A graph and the parts of the model that it does not contain."""

    text: str
    notes: List[str]


def translate(exported: Any, name: str) -> Translation:
    """The graph of a `torch.export.ExportedProgram`."""
    called = {node.target for node in exported.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    if any(target._schema.is_mutable for target in called):
        exported = exported.run_decompositions({})
    translator = Translator(exported, name)
    translation = translator.run()
    if translator.unknown:
        # What has no statement of its own may be made of what has.
        known = _decompositions()
        apart = {target: known[target] for target in translator.unknown if target in known}
        if apart:
            return Translator(exported.run_decompositions(apart), name).run()
    return translation


def _decompositions() -> Mapping[Any, Any]:
    if hasattr(torch.export, "default_decompositions"):
        return torch.export.default_decompositions()
    # Before torch 2.6.
    table: Mapping[Any, Any] = torch._decomp.core_aten_decompositions()
    return table


class Translator:
    """Interprets a program node by node."""

    def __init__(self, exported: Any, name: str) -> None:
        self.exported = exported
        self.trace = Trace(name, "torch")
        self.known: Dict[Any, Any] = {}
        """what each node is: a value, a tensor that depends on nothing, or any other constant"""
        self.patterns = Patterns(self)
        self.opaque: Counter[Tuple[str, str]] = Counter()
        self.unknown: Set[Any] = set()
        self.notes: List[str] = []
        self._lifted: Dict[int, Tuple[Any, Value]] = {}
        self._buffers: Dict[int, str] = {}
        self._masks: Dict[Tuple[int, int], Value] = {}
        self._seed: Optional[Value] = None

    def run(self) -> Translation:
        inputs = {spec.arg.name: spec for spec in self.exported.graph_signature.input_specs}
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                self.known[node] = self._placeholder(node, inputs[node.name])
            elif node.op == "get_attr":
                self.known[node] = operator.attrgetter(node.target)(self.exported.graph_module)
            elif node.op == "call_function":
                self.known[node] = self._call(node)
                self._name(node, self.known[node])
            elif node.op == "output":
                return self._finish(node)
        raise ValueError("expected a program with outputs")

    # Inputs and outputs.

    def _placeholder(self, node: Any, spec: Any) -> Any:
        kind = spec.kind.name
        if kind in ("BUFFER", "CONSTANT_TENSOR"):
            held = self.exported.constants if spec.target in self.exported.constants else self.exported.state_dict
            tensor = held[spec.target]
            if tensor.device.type != "meta":
                tensor = tensor.detach().cpu()
                self._buffers[id(tensor)] = spec.target
                return tensor
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return getattr(spec.arg, "value", value)
        word, shape = self.kind(value)
        weight = kind != "USER_INPUT"
        return Value(self.trace, self.trace.input(spec.target if weight else node.name, word, shape, weight))

    def _finish(self, node: Any) -> Translation:
        kept = []
        for spec, argument in zip(self.exported.graph_signature.output_specs, node.args[0]):
            value = self.known.get(argument) if isinstance(argument, torch.fx.Node) else argument
            if spec.kind.name not in ("USER_OUTPUT", "LOSS_OUTPUT"):
                self.notes.append(f"{spec.target}: the program changes it in place; the write is ignored")
                continue
            kept.append((argument, value))
        names = self._output_names(len(kept))
        outputs: Dict[str, Value] = {}
        for name, (argument, value) in zip(names, kept):
            if isinstance(value, Value):
                outputs[_unused(name or str(argument), outputs)] = value
        if not outputs:
            raise ValueError("expected a program whose outputs depend on its inputs")
        for (name, reason), count in self.opaque.items():
            times = "once" if count == 1 else f"{count} times"
            self.notes.append(f"{name}, {times}: modelled by its bytes only ({reason})")
        text = self.trace.text([(name, value._node.result(value._index)) for name, value in outputs.items()])
        return Translation(text, self.notes)

    def _output_names(self, count: int) -> List[str]:
        """The keys of a result that is a mapping."""
        spec = self.exported.call_spec.out_spec
        if spec.num_leaves != count:
            return [""] * count
        whole = torch.utils._pytree.tree_unflatten(list(range(count)), spec)
        keys = {index: str(key) for key, index in whole.items()} if isinstance(whole, Mapping) else {}
        return [keys.get(index, "") for index in range(count)]

    def _name(self, node: Any, value: Any) -> None:
        """Values are called by their module and their node."""
        if not isinstance(value, Value) or value._node.op in ("input", "weight"):
            return
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = str(stack[-1][0]).replace("L['self'].", "") if stack else ""
        self.trace.give_name(value._node.result(value._index), f"{path}/{node.name}" if path else node.name)

    # Operations.

    def _call(self, node: Any) -> Any:
        target = node.target
        arguments, keywords = self._arguments(node.args), self._arguments(node.kwargs)
        if target is operator.getitem:
            return arguments[0][arguments[1]]
        if not _has_value((arguments, keywords)) and not _is_random(target):
            with torch.no_grad():
                return target(*arguments, **keywords)
        try:
            found = self.patterns.find(node)
        except (LookupError, TypeError, ValueError):
            # Operands in places that no pattern has.
            found = None
        if found is not None:
            return found
        name = short_name(target)
        handler = HANDLERS.get(name)
        if handler is None:
            self.unknown.add(target)
            return self._opaque(node, (arguments, keywords), "not in the text form")
        try:
            if name in RAW:
                result = handler(self, *arguments, **keywords)
            else:
                arguments, keywords = self.lift(arguments), self.lift(keywords)
                result = handler(*arguments, **keywords)
            return self._checked(result, node.meta.get("val"))
        except (TypeError, ValueError) as error:
            return self._opaque(node, (arguments, keywords), str(error))

    def _arguments(self, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return self.known[argument]
        if isinstance(argument, Mapping):
            return {key: self._arguments(item) for key, item in argument.items()}
        if isinstance(argument, (tuple, list)):
            return type(argument)(self._arguments(item) for item in argument)
        # Constants are computed here, wherever the model is.
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    def _checked(self, result: Any, expected: Any) -> Any:
        """The result, if it has the type that torch gives it; casts may be missing."""
        if isinstance(result, Value) and isinstance(expected, torch.Tensor):
            word, shape = self.kind(expected)
            if result.shape != shape:
                raise ValueError(f"expected {type_text(word, shape)}, got {type_text(result._word, result.shape)}")
            return elementwise.cast(result, word)
        if isinstance(result, tuple) and isinstance(expected, (tuple, list)):
            return tuple(self._checked(*pair) for pair in zip(result, expected))
        return result

    def kind(self, tensor: Any) -> Tuple[str, Tuple[int, ...]]:
        """Dtype and shape of a tensor; dtypes wider than those of the text form are treated as 32 bits."""
        word = {"float64": "f32", "int16": "i32", "uint8": "i32"}.get(str(tensor.dtype).rsplit(".", 1)[-1])
        if word is not None:
            note = f"{str(tensor.dtype).rsplit('.', 1)[-1]} is counted as {word}"
            if note not in self.notes:
                self.notes.append(note)
        return word or dtype_word(tensor.dtype), tuple(int(size) for size in tensor.shape)

    def seed(self) -> Value:
        """The seed of all dropouts."""
        if self._seed is None:
            self._seed = Value(self.trace, self.trace.input("seed", "i32", ()))
        return self._seed

    def _opaque(self, node: Any, arguments: Any, reason: str) -> Any:
        target, expected = node.target, node.meta.get("val")
        name = getattr(getattr(target, "_schema", None), "name", getattr(target, "__name__", str(target)))
        name = name.replace("::", ".")
        self.opaque[name, reason] += 1
        operands = [value for value in _flat(self.lift(arguments)) if isinstance(value, Value)]
        read = sum(dtype_bytes(value._word) * elements(value.shape) for value in operands)
        flops = _flops(node, expected)
        results = []
        for index, tensor in enumerate(expected if isinstance(expected, (tuple, list)) else [expected]):
            if not isinstance(tensor, torch.Tensor):
                results.append(tensor)
                continue
            word, shape = self.kind(tensor)
            bytes_moved = tensor.element_size() * elements(shape) + (0 if index else read)
            pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
            pointwise = pointwise and all(value.shape == shape for value in operands)
            count = 0 if index else flops or (elements(shape) if pointwise else 0)
            words = [type_text(word, shape), f"name={name}", f"flops={count}", f"bytes={bytes_moved}"]
            words += ["elementwise"] if pointwise else []
            node_operands = [value._node.result(value._index) for value in operands]
            results.append(Value(self.trace, self.trace.add("opaque", node_operands, [(word, shape)], words)))
        return tuple(results) if isinstance(expected, (tuple, list)) else results[0]

    # Tensors that depend on nothing.

    def lift(self, argument: Any) -> Any:
        """Constants as values or numbers."""
        if isinstance(argument, torch.Tensor):
            return self._lift(argument)
        if isinstance(argument, Mapping):
            return {key: self.lift(item) for key, item in argument.items()}
        if isinstance(argument, (tuple, list)):
            return type(argument)(self.lift(item) for item in argument)
        return argument

    def mask(self, mask: Any) -> Any:
        """The value that a mask adds to scores; a boolean mask is converted once for all layers."""
        value = self.lift(mask)
        if not isinstance(value, Value) or value._word != "bool":
            return value
        key = (id(value._node), value._index)
        if key not in self._masks:
            self._masks[key] = ours.where(value, 0.0, -math.inf)
        return self._masks[key]

    def _lift(self, tensor: Any) -> Any:
        if tensor.dim() == 0 and tensor.dtype is not torch.bool:
            return tensor.item()
        if id(tensor) not in self._lifted:
            # The tensor is kept too, so that its identity stays its own.
            self._lifted[id(tensor)] = (tensor, self._constant(tensor))
        return self._lifted[id(tensor)][1]

    def _constant(self, tensor: Any) -> Value:
        word, shape = self.kind(tensor)
        buffer = self._buffers.get(id(tensor), "")
        if buffer and word in FLOATS:
            return Value(self.trace, self.trace.input(buffer, word, shape, weight=True))
        first = tensor.flatten()[0] if tensor.numel() else None
        if word in (*FLOATS, "i32") and first is not None and bool((tensor == first).all()):
            number = first.item()
            node = self.trace.add("const", (), [(word, ())], (number_text(number), word))
            return views.broadcast(Value(self.trace, node), shape)
        axis, start = counted(tensor)
        if word == "i32" and axis is not None:
            size = shape[axis]
            node = self.trace.add("iota", (), [("i32", (start + size,))], (f"[{start + size}]", "axis=0"))
            line = views.cut(Value(self.trace, node), 0, start, size)
            return views.broadcast(views.reshape(line, (size, *[1] * (len(shape) - 1 - axis))), shape)
        return Value(self.trace, self.trace.input(buffer or "constant", word, shape, weight=True))


def _has_value(argument: Any) -> bool:
    return any(isinstance(item, Value) for item in _flat(argument))


def _flat(argument: Any) -> List[Any]:
    if isinstance(argument, Mapping):
        argument = list(argument.values())
    if isinstance(argument, (tuple, list)):
        return [leaf for item in argument for leaf in _flat(item)]
    return [argument]


def _is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _flops(node: Any, expected: Any) -> int:
    """As torch counts them, where it does."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    types = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    return int(formula(*types[0], **types[1], out_val=expected))


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    count, unused = 1, name
    while unused in taken:
        unused, count = f"{name}_{count}", count + 1
    return unused

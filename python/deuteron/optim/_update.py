"""Updates of weights in place: one program over all parameters of a device, whatever group they are in.

An optimiser is a rule: elementwise arithmetic in f32 on a weight, its gradient and its states. Numbers that may change from step to
step are operands, so that a program depends on dtypes, shapes and batches only; the parameters of a batch share their numbers.

| tensor | dtype | what happens |
|---|---|---|
| parameter, states | f32, bf16 or f16 | read once and written once, in place; rounded when they are written |
| gradient | the same, or another of these | read once |

A tensor that is not contiguous is updated where it is if the parameter, its gradient and its states are dense and lie alike. Otherwise
the update runs on copies, which are copied back.
"""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._graph_text import GraphText
from .._graph_text import shape as axes
from .._native import Program

# What kernels update.
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

# Axes of a tensor in a graph, at most.
_MOST_AXES = 8

# Bytes that addresses on a GPU are multiples of: kernels load vectors.
_VECTOR = 16

# Sets of parameters that are compiled as a whole. Where gradients come and go in more ways, each parameter has its own program.
_MOST_SETS = 8


class Let:
    """Writes the arithmetic of one parameter: `let("m", "add", a, b)` defines `m` and gives its name in the graph. Operands of the rule (`weight`,
    `gradient`, states and numbers) may stand in the operation: `let("g", "mul gradient scale")`."""

    def __init__(self, graph: GraphText, operands: Dict[str, str], suffix: str) -> None:
        self.graph, self.operands, self.suffix = graph, operands, suffix

    def __call__(self, name: str, operation: str, *values: str) -> str:
        word, *operands = operation.split()
        given = [self.operands[operand] for operand in operands]
        return self.graph.let(f"{name}.{self.suffix}", "f32", " ".join([word, *given, *values]))


class Rule(NamedTuple):
    """The arithmetic of an optimiser."""

    name: str
    # of each parameter
    states: Tuple[str, ...]
    # that parameters share
    numbers: Tuple[str, ...]
    # gives the new values of the weight and of each state
    body: Callable[[Let], List[str]]


class Update(NamedTuple):
    """A parameter, its gradient and its states."""

    weight: Tensor
    gradient: Tensor
    states: Tuple[Tensor, ...]


class Batch(NamedTuple):
    """Numbers, and the updates that use them."""

    numbers: Tuple[float, ...]
    updates: List[Update]


# Dtypes and shape of the tensors of an update.
_Type = Tuple[Tuple[str, ...], Tuple[int, ...]]

# For each batch, those of its updates.
_Types = Tuple[Tuple[_Type, ...], ...]


class Updater:
    """Runs a rule."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._programs: Dict[_Types, Program] = {}
        self._sets = 0

    def run(self, batches: Sequence[Batch]) -> None:
        """Updates all parameters, those of one device at once."""
        devices: Dict[torch.device, List[Batch]] = {}
        for numbers, updates in batches:
            apart: Dict[torch.device, List[Update]] = {}
            for update in updates:
                apart.setdefault(update.weight.device, []).append(update)
            for device, own in apart.items():
                devices.setdefault(device, []).append(Batch(numbers, own))
        for device, own_batches in devices.items():
            self._run(device, own_batches)

    def _run(self, device: torch.device, batches: Sequence[Batch]) -> None:
        ready: List[Batch] = []
        copied: List[Tuple[Tuple[float, ...], Update]] = []
        for numbers, updates in batches:
            own: List[Update] = []
            for update in updates:
                flat = _in_place(update)
                if flat is None:
                    copied.append((numbers, update))
                else:
                    own.append(flat)
            if own:
                ready.append(Batch(numbers, own))
        types = tuple([tuple([_type(one) for one in updates]) for _, updates in ready])
        if ready and (types in self._programs or self._sets < _MOST_SETS):
            self._sets += types not in self._programs
            self._call(device, ready, types)
        else:
            for numbers, updates in ready:
                for update in updates:
                    self._call_alone(device, numbers, update)
        # One after the other: parameters whose strides interleave may share elements, and each update must see the one before.
        for numbers, update in copied:
            self._call_copied(device, numbers, update)
        # Torch before 2.5 takes one tensor.
        for _, updates in batches:
            for one in updates:
                torch.autograd.graph.increment_version(one.weight)

    def _call_alone(self, device: torch.device, numbers: Tuple[float, ...], update: Update) -> None:
        self._call(device, [Batch(numbers, [update])], ((_type(update),),))

    def _call_copied(self, device: torch.device, numbers: Tuple[float, ...], update: Update) -> None:
        tensors = [update.weight, update.gradient, *update.states]
        flat = [tensor.clone(memory_format=torch.contiguous_format).view(-1) for tensor in tensors]
        self._call_alone(device, numbers, Update(flat[0], flat[1], tuple(flat[2:])))
        for tensor, copy in [(tensors[0], flat[0]), *zip(tensors[2:], flat[2:])]:
            tensor.copy_(copy.view(tensor.shape))

    def _call(self, device: torch.device, batches: Sequence[Batch], types: _Types) -> None:
        operands = on_device([number for numbers, _ in batches for number in numbers], device)
        for _, updates in batches:
            for update in updates:
                operands += [update.weight, update.gradient, *update.states]
        program = self._programs.get(types)
        if program is None:
            text, new = _text(self.rule, types)
            program = self._programs[types] = Program(text, (), new)
        program.forward(operands)


def on_device(numbers: Sequence[float], device: torch.device) -> List[Tensor]:
    """Numbers as operands, by one copy. Kernels read a number in place where a vector may start: one in each four."""
    rows = [[number, 0.0, 0.0, 0.0] for number in numbers]
    return list(torch.tensor(rows, dtype=torch.float32, device=device)[:, 0].unbind())


def _text(rule: Rule, types: _Types) -> Tuple[str, List[Tuple[str, str]]]:
    """A graph, and the output that each of its states becomes."""
    graph = GraphText(rule.name)
    for batch in range(len(types)):
        for number in rule.numbers:
            graph.let(f"{number}.{batch}", "f32", "input f32[]")
    names = ("weight", "gradient", *rule.states)
    own = [(batch, at, type) for batch, updates in enumerate(types) for at, type in enumerate(updates)]
    for batch, at, (dtypes, sizes) in own:
        for name, dtype in zip(names, dtypes):
            graph.let(f"{name}.{batch}.{at}", dtype, f"input {dtype}{axes(*sizes)}")
    updates: List[Tuple[str, str]] = []
    for batch, at, (dtypes, _) in own:
        suffix = f"{batch}.{at}"
        graph.say(f"{rule.name} {{")
        values = {number: f"{number}.{batch}" for number in rule.numbers}
        values.update({name: graph.cast(f"{name}.{suffix}", "f32") for name in names})
        results = rule.body(Let(graph, values, suffix))
        kept = [("weight", dtypes[0]), *zip(rule.states, dtypes[2:])]
        new = [graph.cast(result, dtype) for result, (_, dtype) in zip(results, kept)]
        graph.say("}")
        updates += [(f"{name}.{suffix}", result) for (name, _), result in zip(kept, new)]
    graph.say("out " + " ".join([result for _, result in updates]))
    return graph.text(), updates


def _type(update: Update) -> _Type:
    tensors = (update.weight, update.gradient, *update.states)
    return tuple([DTYPES[tensor.dtype] for tensor in tensors]), tuple(update.weight.shape)


def _in_place(update: Update) -> Optional[Update]:
    """The update on memory that kernels take, or None where it takes copies."""
    tensors = [update.weight, update.gradient, *update.states]
    if all([is_plain(tensor) for tensor in tensors]):
        return update
    flat = flattened(tensors)
    if flat is None or not all([is_plain(tensor) for tensor in flat]):
        return None
    return Update(flat[0], flat[1], tuple(flat[2:]))


def is_plain(tensor: Tensor) -> bool:
    is_aligned = not tensor.is_cuda or tensor.data_ptr() % _VECTOR == 0
    return tensor.is_contiguous() and tensor.dim() <= _MOST_AXES and is_aligned


def flattened(tensors: Sequence[Tensor]) -> Optional[List[Tensor]]:
    """The tensors as one axis each, if they are dense and lie alike."""
    strides = tensors[0].stride()
    if any([tensor.stride() != strides for tensor in tensors]):
        return None
    expected = 1
    for stride, size in sorted(zip(strides, tensors[0].shape)):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return [tensor.as_strided((expected,), (1,)) for tensor in tensors]

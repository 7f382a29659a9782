"""`fuse`: a Python function of tensors as fused kernels."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, Generic, List, NamedTuple, Optional, Sequence, Tuple, TypeVar
from typing import overload

from deuteron._tree import Leaf, constants, give, holds_values, take
from deuteron.trace.graph import FLOATS, Node, Result, Trace, Type, dtype_word, is_double, is_long
from deuteron.trace import left
from deuteron.trace.left import Left, Step
from deuteron.trace.scope import Capture, Modes, changed, tracing
from deuteron.trace.value import Value

if TYPE_CHECKING:
    from deuteron._native import Program

if TYPE_CHECKING or sys.version_info >= (3, 10):
    from typing import ParamSpec

    Parameters = ParamSpec("Parameters")
else:
    Parameters = TypeVar("Parameters")
Returned = TypeVar("Returned")
Function = Callable[..., Any]


@overload
def fuse(
    function: Callable[Parameters, Returned], *, name: Optional[str] = None, traces: int = 256
) -> Fused[Parameters, Returned]: ...


@overload
def fuse(
    *, name: Optional[str] = None, traces: int = 256
) -> Callable[[Callable[Parameters, Returned]], Fused[Parameters, Returned]]: ...


def fuse(function: Optional[Function] = None, *, name: Optional[str] = None, traces: int = 256) -> Any:
    """Runs a function of tensors as fused kernels, differentiable with torch.

    The function is called once for each combination of dtypes and shapes, with values in place of its tensors
    (see `deuteron.trace`); its operations become a graph, whose kernels run in this and every later call.
    Tensors may be in tuples, lists, dicts and dataclasses. Other arguments are constants: they must be hashable, and
    a new value makes a new trace. Captured variables are read when the function is traced. Parameters and
    buffers of torch modules that it calls, and tensors in enclosing scopes, are captured: they are operands of every
    call, with gradients; if one was replaced, or `train()` or `eval()` changed a module, the function is traced again. Other
    tensors must be arguments. Torch functions that graphs do not have, such as `torch.topk` and `torch.cumsum`, run in torch between
    fused programs; `plan` names them, and others are refused.
    `torch.no_grad()` and `detach()` within it stop gradients; a custom `torch.autograd.Function` is refused.
    A result that is a view of an operand in torch is a copy here, unless it is the operand itself.
    64-bit integers are computed in 32 bits. A larger value is an error on the CPU. On a GPU it is clamped to 32 bits without an error, because a check
    would wait for the GPU: as an index it stays out of range, but sums and comparisons of such numbers differ. 64-bit floats are computed exactly but
    slowly, for checks, and do not mix with other floats.
    Autocast has no effect: dtypes are those of the operands and of casts in the function.
    `name` is its name in reports, `traces` the number of traces kept; the oldest is dropped.

    >>> import numpy as np, deuteron
    >>> @deuteron.fuse
    ... def gated(x, gate):
    ...     return x * deuteron.trace.sigmoid(gate) + 1
    >>> gated(np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32))
    array([[1.5, 1.5, 1.5],
           [1.5, 1.5, 1.5]], dtype=float32)
    >>> print(gated.graph(np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)))
    graph gated
    x = input f32[2,3]
    gate = input f32[2,3]
    v2 = sigmoid gate
    v3 = mul x v2
    v4 = add v3 1
    out y=v4
    <BLANKLINE>
    """
    if function is None:
        return lambda function: Fused(function, name, traces)
    return Fused(function, name, traces)


class Fused(Generic[Parameters, Returned]):
    """A function that runs as fused kernels, called as it is. `fuse` makes it."""

    def __init__(self, function: Callable[Parameters, Returned], name: Optional[str] = None, traces: int = 256) -> None:
        if not callable(function):
            raise TypeError(f"fuse: expected a function, got a {type(function).__name__}")
        if traces < 1:
            raise ValueError(f"fuse: expected at least 1 trace to keep, got {traces}")
        # Not its attributes: those of a module are its parts.
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.name = name or function_name(function)
        self.traces = traces
        self._parameters = _parameters(function)
        self._traced: Dict[Any, Traced] = {}

        def constant(*arguments: Any, **keywords: Any) -> Tuple[str, Any, Any]:
            return self._trace(self._call(arguments, keywords)).parts()

        # What `torch.compiler.assume_constant_result` does, without torch.
        constant._dynamo_marked_constant = True  # type: ignore[attr-defined]
        self._constant = constant

    def __call__(self, *arguments: Parameters.args, **keywords: Parameters.kwargs) -> Returned:
        result: Returned
        torch = sys.modules.get("torch")
        if torch is not None and torch.compiler.is_compiling():
            result = self._compiled(arguments, keywords)
            return result
        if not keywords:
            # Tensors alone, as they mostly are: a few microseconds less.
            found = self._traced.get(_plain_key(arguments))
            if found is not None and (found.is_fixed or found.is_current()):
                result = found.run(arguments)
                return result
        call = self._call(arguments, keywords)
        if any(isinstance(operand, Value) for operand in call.operands):
            # Within another function that is traced, this one is part of it.
            return self.function(*arguments, **keywords)
        result = self._trace(call).run(call.operands)
        return result

    def _compiled(self, arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> Any:
        """The call under torch.compile: the traced graph is a constant, and one operator runs it."""
        from deuteron._call import run

        operands: List[Any] = []
        take((arguments, keywords), operands, [], "")
        text, structure, sources = self._constant(*arguments, **keywords)
        if all([source.given for source in sources]):
            results: Sequence[Any] = ()
        else:
            # A graph is of the dtypes that it was traced with.
            with sys.modules["torch"].autocast(operands[0].device.type, enabled=False):
                results = run(text, operands)
        return give(structure, [source.of(operands, results) for source in sources])

    def graph(self, *arguments: Any, **keywords: Any) -> str:
        """The graph for such arguments, in text form."""
        return self._trace(self._call(arguments, keywords)).text

    def plan(self, *arguments: Any, device: str = "auto", **keywords: Any) -> str:
        """The plan for such arguments: what shares a kernel, and why the rest does not."""
        call = self._call(arguments, keywords)
        traced = self._trace(call)
        return traced.described(call.types, lambda program, types: program.explain(types, device))

    def source(self, *arguments: Any, device: str = "auto", **keywords: Any) -> str:
        """The generated kernels for such arguments."""
        call = self._call(arguments, keywords)
        traced = self._trace(call)
        return traced.described(call.types, lambda program, types: program.kernels(types, device))

    def clear(self) -> None:
        """Removes all traces, so that the function is traced again."""
        self._traced.clear()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method: its object is a constant of the trace."""
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> str:
        """By name, as functions are; a copy is the function itself."""
        return str(getattr(self, "__qualname__", self.name))

    def __repr__(self) -> str:
        return f"<fused {self.name}, {len(self._traced)} traces>"

    def _call(self, arguments: Sequence[Any], keywords: Dict[str, Any]) -> Call:
        operands: List[Any] = []
        names: List[str] = []
        labels = self._parameters[:-1][: len(arguments)]
        labels += [f"{self._parameters[-1]}_{index}" for index in range(len(arguments) - len(labels))]
        named = zip((*labels, *keywords), (*arguments, *keywords.values()))
        parts = tuple(take(argument, operands, names, label) for label, argument in named)
        if not operands:
            raise TypeError(f"{self.name}: expected at least one tensor among its arguments")
        described = [_described(operand) for operand in operands]
        types = [_type(self.name, label, *about) for label, about in zip(names, described)]
        doubles = {is_double(dtype) for (dtype, _), (word, _) in zip(described, types) if word in FLOATS}
        if len(doubles) > 1:
            raise TypeError(f"{self.name}: expected only 64-bit floats, or none, got both; cast some")
        longs = tuple([is_long(dtype) for dtype, _ in described])
        return Call(parts, tuple(keywords), operands, types, names, _framework(operands), True in doubles, longs, _device(operands))

    def _trace(self, call: Call) -> Traced:
        key = call.key
        try:
            found = self._traced.get(key)
        except TypeError as error:
            raise TypeError(f"{self.name}: expected tensors and hashable arguments: {error}") from None
        if found is not None and found.is_current():
            return found
        # Two threads may trace the same call; either trace will do. Nothing here waits, so a fork finds no lock taken.
        traced = _traced(self.name, self.function, call)
        self._traced[key] = traced
        for oldest in list(self._traced)[: -self.traces]:
            self._traced.pop(oldest, None)
        return traced


class Call(NamedTuple):
    """The arguments of a call, taken apart."""

    parts: Tuple[Any, ...]
    """each argument with leaves in place of its tensors"""
    keywords: Tuple[str, ...]
    """names of the last arguments"""
    operands: List[Any]
    types: List[Type]
    names: List[str]
    framework: str
    doubles: bool
    """whether floats are of 64 bits"""
    longs: Tuple[bool, ...]
    """which operands are integers of 64 bits"""
    device: Any
    """of the first tensor of torch"""

    @property
    def key(self) -> Any:
        """Everything that a trace depends on."""
        if self.framework and not self.keywords and all(isinstance(part, Leaf) for part in self.parts):
            return _plain_key(self.operands)
        return self.parts, self.keywords, tuple(self.types), self.framework, self.doubles, self.longs, self.device


def _plain_key(arguments: Sequence[Any]) -> Any:
    """The same for tensors alone; nothing for what has no dtype and no shape."""
    try:
        return tuple([(type(one), one.dtype, one.shape, getattr(one, "device", None)) for one in arguments])
    except AttributeError:
        return None


class Source(NamedTuple):
    """Where a tensor that the function returns comes from."""

    given: bool
    """whether it is an operand, and not a result"""
    place: int
    is_constant: bool = False
    """whether no gradient flows to it, as from `no_grad` and `detach`"""
    dtype: Any = None
    """that of torch or NumPy, where the engine computes another: integers of 64 bits"""

    def of(self, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        tensor = (operands if self.given else results)[self.place]
        if self.dtype is not None:
            return tensor.to(self.dtype) if hasattr(tensor, "to") else tensor.astype(self.dtype)
        return tensor.detach() if self.is_constant and getattr(tensor, "requires_grad", False) else tensor


class Traced:
    """A graph, or several with calls of torch between them, and how their outputs become what the function returns."""

    def __init__(
        self, steps: Sequence[Step], structure: Any, sources: Sequence[Source], modes: Modes, captures: Sequence[Capture]
    ) -> None:
        self._steps = steps
        self._structure = structure
        self._sources = sources
        self._modes = modes
        self._captures = captures
        self._tensors = [capture.tensor for capture in captures]
        self.is_fixed = not modes and not captures
        """whether it depends on nothing but the arguments"""
        self._programs: Dict[int, Program] = {}

    @property
    def text(self) -> str:
        """The graph in text form; of several, with the calls of torch between them as comments."""
        return "".join(step.text or f"# torch: {step.call.name}\n" for step in self._steps)

    def is_current(self) -> bool:
        """Whether all modules are still in the mode of the trace, and all captured tensors are the same objects as then."""
        return self.is_fixed or not (changed(self._modes) or any(capture.changed() for capture in self._captures))

    def types(self, operands: Sequence[Type]) -> List[Type]:
        """Those of all operands of the program."""
        return [*operands, *((dtype_word(one.dtype), tuple(one.shape)) for one in self._tensors)]

    def parts(self) -> Tuple[str, Any, Sequence[Source]]:
        """The graph, the shape of what is returned, and where its tensors come from."""
        if self._captures:
            raise TypeError(
                "a fused function that captures tensors cannot be part of a graph of torch.compile; pass them "
                "as arguments"
            )
        if any(step.call is not None for step in self._steps):
            raise TypeError("a fused function that leaves calls to torch cannot be part of a graph of torch.compile")
        return self.text, self._structure, self._sources

    def program(self, place: int = 0) -> Program:
        """What runs the graph of a step."""
        if place not in self._programs:
            from deuteron._native import Program

            self._programs[place] = Program(self._steps[place].text)
        return self._programs[place]

    def described(self, operands: Sequence[Type], about: Callable[[Program, List[Type]], str]) -> str:
        """What there is to say about each program, with the calls of torch between them."""
        parts, types = [], self.types(operands)
        for place, step in enumerate(self._steps):
            if step.text:
                parts.append(about(self.program(place), [types[one] for one in step.places]))
            else:
                parts.append(f"left to torch: {step.call.name}\n")
            types += step.types
        return "".join(parts)

    def run(self, operands: Sequence[Any]) -> Any:
        """Runs the programs and returns the results of the function."""
        results: Sequence[Any] = ()
        operands = [*operands, *self._tensors] if self._tensors else operands
        if not all(source.given for source in self._sources):
            torch = sys.modules.get("torch")
            if torch is not None and torch._C._is_any_autocast_enabled():
                # A graph is of the dtypes that it was traced with.
                kinds = [operand.device.type for operand in operands if isinstance(operand, torch.Tensor)]
                with torch.autocast(kinds[0] if kinds else "cpu", enabled=False):
                    results = self._results(operands)
            else:
                results = self._results(operands)
        return give(self._structure, [source.of(operands, results) for source in self._sources])

    def _results(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Those of the only program, or of all steps."""
        if len(self._steps) == 1 and self._steps[0].text:
            return self.program()(*operands)
        tensors = list(operands)
        for place, step in enumerate(self._steps):
            given = [tensors[one] for one in step.places]
            tensors += self.program(place)(*given) if step.text else step.call.run(given)
        return tensors[len(operands) :]


def _traced(name: str, function: Function, call: Call) -> Traced:
    trace = Trace(name, call.framework, call.doubles)
    trace.device = call.device
    inputs = zip(call.names, call.types, call.longs)
    values = [Value(trace, trace.input(label, *kind, is_long=longs)) for label, kind, longs in inputs]
    given = [give(part, values) for part in call.parts]
    split = len(given) - len(call.keywords)
    returned: List[Any] = []
    objects = [one for part in call.parts for one in constants(part)]
    objects += [function, getattr(function, "__self__", None)]
    with tracing(trace, sys.modules.get("torch"), function, objects) as (noted, captures):
        result = function(*given[:split], **dict(zip(call.keywords, given[split:])))
    structure = take(result, returned, [], "")
    for one in constants(structure):
        if holds_values(one):
            raise TypeError(
                f"{name}: expected tensors in tuples, lists, dicts and dataclasses as a result, got a {type(one).__name__} that holds some"
            )
    places = {id(node): index for index, node in enumerate(trace.inputs)}
    sources: List[Source] = []
    results: List[Result] = []
    for value in returned:
        if not isinstance(value, Value):
            raise TypeError(f"{name}: expected a function of its arguments, got a {type(value).__name__} as a result")
        if value._trace is not trace:
            raise ValueError(f"{name}: expected results of this call, got a value of another trace")
        output = value._node.result(value._index)
        # An operand that is handed back is itself, and a value that is handed back twice is one output.
        if id(value._node) in places:
            sources.append(Source(True, places[id(value._node)]))
            continue
        if output not in results:
            results.append(output)
        dtype = value.dtype if value._is_long and call.framework else None
        sources.append(Source(False, results.index(output), not _is_differentiable(value._node), dtype))
    if any(isinstance(node, Left) for node in trace.nodes):
        steps, made = left.steps(trace, results)
        # Results are counted among those of all steps.
        counted = [made[id(node), index] - len(trace.inputs) for node, index in results]
        sources = [one if one.given else one._replace(place=counted[one.place]) for one in sources]
    else:
        text = trace.text(list(zip(trace.output_names(len(results)), results)))
        steps = [Step(text, None, tuple(range(len(trace.inputs))), [node.types[index] for node, index in results])]
    return Traced(steps, structure, sources, noted.modes(), captures)


def _is_differentiable(node: Node) -> bool:
    """Whether a gradient may flow from a node to an operand."""
    seen, waiting = {id(node)}, [node]
    while waiting:
        node = waiting.pop()
        if node.op == "input":
            return True
        if node.op == "stop_gradient":
            continue
        before = [operand[0] for operand in node.operands if isinstance(operand, tuple) and id(operand[0]) not in seen]
        seen.update(map(id, before))
        waiting += before
    return False


def _framework(operands: Sequence[Any]) -> str:
    """The framework whose dtypes the function sees."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and any(isinstance(operand, torch.Tensor) for operand in operands):
        return "torch"
    return "numpy" if numpy is not None and any(isinstance(operand, numpy.ndarray) for operand in operands) else ""


def _device(operands: Sequence[Any]) -> Any:
    torch = sys.modules.get("torch")
    found = (one.device for one in operands if torch is not None and isinstance(one, torch.Tensor))
    return next(found, None)


def _described(operand: Any) -> Tuple[Any, Sequence[int]]:
    """Dtype and shape, which an object with `__dlpack__` need not tell itself."""
    if isinstance(operand, Value):
        return operand._word, operand.shape
    if not (hasattr(operand, "dtype") and hasattr(operand, "shape")):
        import numpy

        operand = numpy.from_dlpack(operand)
    return operand.dtype, operand.shape


def _type(name: str, label: str, dtype: Any, shape: Sequence[int]) -> Type:
    try:
        return dtype_word(dtype), tuple(int(size) for size in shape)
    except TypeError as error:
        raise TypeError(f"{name}: argument {label}: {error}") from None


def function_name(function: Function) -> str:
    """Its name in reports."""
    name = str(getattr(function, "__name__", "function"))
    return "function" if name == "<lambda>" else name


def _parameters(function: Function) -> List[str]:
    """Names for arguments by their place, then one for all that follow."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ["x"]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in positional]
    rest = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.VAR_POSITIONAL]
    return [*names, *(rest or ["x"])]

"""`fuse`: a Python function of tensors as fused kernels."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union, overload

from deuteron.trace.graph import Result, Trace, Type, dtype_word, is_double
from deuteron.trace.value import Value

if TYPE_CHECKING:
    from deuteron._native import Program

Function = Callable[..., Any]


@overload
def fuse(function: Function, *, name: Optional[str] = None, traces: int = 256) -> Fused: ...


@overload
def fuse(*, name: Optional[str] = None, traces: int = 256) -> Callable[[Function], Fused]: ...


def fuse(
    function: Optional[Function] = None, *, name: Optional[str] = None, traces: int = 256
) -> Union[Fused, Callable[[Function], Fused]]:
    """Runs a function of tensors as fused kernels, differentiable with torch.

    The function is called once for each combination of dtypes and shapes, with values that stand for its tensors
    (see `deuteron.trace`); what it does with them becomes a graph, whose kernels run at this and every later call.
    Tensors may stand in tuples, lists and dicts. Other arguments are constants: they must be hashable, and another one
    is another trace. What the function reads besides its arguments is read when it is traced; tensors must be
    arguments. Indices of 64 bits are taken as 32; floats of 64 bits are computed exactly and slowly, to check against.
    Autocast changes nothing: dtypes are those of the operands, and what the function makes of them.
    `name` is what reports call it, `traces` how many are kept; the oldest is dropped.

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


class Fused:
    """A function that runs as fused kernels. `fuse` makes it."""

    def __init__(self, function: Function, name: Optional[str] = None, traces: int = 256) -> None:
        if not callable(function):
            raise TypeError(f"fuse: expected a function, got a {type(function).__name__}")
        if traces < 1:
            raise ValueError(f"fuse: expected at least 1 trace to keep, got {traces}")
        functools.update_wrapper(self, function)
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

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and torch.compiler.is_compiling():
            return self._compiled(arguments, keywords)
        if not keywords:
            # Tensors alone, as they mostly are: a few microseconds less.
            found = self._traced.get(_plain_key(arguments))
            if found is not None:
                return found.run(arguments)
        call = self._call(arguments, keywords)
        if any(isinstance(operand, Value) for operand in call.operands):
            # Within another function that is traced, this one is part of it.
            return self.function(*arguments, **keywords)
        return self._trace(call).run(call.operands)

    def _compiled(self, arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> Any:
        """The same for a compiler of torch: what is traced is a constant, and one operator runs it."""
        from deuteron._call import run

        operands: List[Any] = []
        _take((arguments, keywords), operands, [], "")
        text, structure, sources = self._constant(*arguments, **keywords)
        if all([given for given, _ in sources]):
            results: Sequence[Any] = ()
        else:
            # A graph is of the dtypes that it was traced with.
            with sys.modules["torch"].autocast(operands[0].device.type, enabled=False):
                results = run(text, operands)
        return _give(structure, [(operands if given else results)[place] for given, place in sources])

    def graph(self, *arguments: Any, **keywords: Any) -> str:
        """The graph for such arguments, in text form."""
        return self._trace(self._call(arguments, keywords)).text

    def plan(self, *arguments: Any, device: str = "auto", **keywords: Any) -> str:
        """What shares a kernel for such arguments, and why not more does."""
        call = self._call(arguments, keywords)
        return self._trace(call).program().explain(call.types, device)

    def source(self, *arguments: Any, device: str = "auto", **keywords: Any) -> str:
        """The generated kernels for such arguments."""
        call = self._call(arguments, keywords)
        return self._trace(call).program().kernels(call.types, device)

    def clear(self) -> None:
        """Forgets all traces: the function is called again where it was traced before."""
        self._traced.clear()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method: its object is a constant of the trace, so its tensors must be arguments."""
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
        parts = tuple(_take(argument, operands, names, label) for label, argument in named)
        if not operands:
            raise TypeError(f"{self.name}: expected at least one tensor among its arguments")
        described = [_described(operand) for operand in operands]
        types = [_type(self.name, label, *about) for label, about in zip(names, described)]
        doubles = any(is_double(dtype) for dtype, _ in described)
        return Call(parts, tuple(keywords), operands, types, names, _framework(operands), doubles)

    def _trace(self, call: Call) -> Traced:
        key = call.key
        try:
            found = self._traced.get(key)
        except TypeError as error:
            raise TypeError(f"{self.name}: expected tensors and hashable arguments: {error}") from None
        if found is not None:
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

    @property
    def key(self) -> Any:
        """All that a trace depends on."""
        if self.framework and not self.keywords and all(isinstance(part, _Leaf) for part in self.parts):
            return _plain_key(self.operands)
        return self.parts, self.keywords, tuple(self.types), self.framework, self.doubles


def _plain_key(arguments: Sequence[Any]) -> Any:
    """The same for tensors alone; nothing for what has no dtype and no shape."""
    try:
        return tuple([(type(argument), argument.dtype, argument.shape) for argument in arguments])
    except AttributeError:
        return None


class Traced:
    """A graph, and how its outputs become what the function returns."""

    def __init__(self, text: str, structure: Any, sources: Sequence[Tuple[bool, int]]) -> None:
        self._text = text
        self._structure = structure
        self._sources = sources
        self._program: Optional[Program] = None

    @property
    def text(self) -> str:
        """The graph in text form."""
        return self._text

    def parts(self) -> Tuple[str, Any, Sequence[Tuple[bool, int]]]:
        """The graph, the shape of what is returned, and where its tensors come from: operands or results, and which."""
        return self._text, self._structure, self._sources

    def program(self) -> Program:
        """What runs it."""
        if self._program is None:
            from deuteron._native import Program

            self._program = Program(self._text)
        return self._program

    def run(self, operands: Sequence[Any]) -> Any:
        """What the function returns for these operands."""
        results: Sequence[Any] = ()
        if not all(given for given, _ in self._sources):
            torch = sys.modules.get("torch")
            if torch is not None and torch._C._is_any_autocast_enabled():
                # A graph is of the dtypes that it was traced with.
                kinds = [operand.device.type for operand in operands if isinstance(operand, torch.Tensor)]
                with torch.autocast(kinds[0] if kinds else "cpu", enabled=False):
                    results = self.program()(*operands)
            else:
                results = self.program()(*operands)
        return _give(self._structure, [(operands if given else results)[index] for given, index in self._sources])


def _traced(name: str, function: Function, call: Call) -> Traced:
    trace = Trace(name, call.framework, call.doubles)
    values = [Value(trace, trace.input(label, *kind)) for label, kind in zip(call.names, call.types)]
    given = [_give(part, values) for part in call.parts]
    split = len(given) - len(call.keywords)
    returned: List[Any] = []
    structure = _take(function(*given[:split], **dict(zip(call.keywords, given[split:]))), returned, [], "")
    inputs = {id(value._node): index for index, value in enumerate(values)}
    sources: List[Tuple[bool, int]] = []
    results: List[Result] = []
    for value in returned:
        if not isinstance(value, Value):
            raise TypeError(f"{name}: expected a function of its arguments, got a {type(value).__name__} as a result")
        if value._trace is not trace:
            raise ValueError(f"{name}: expected results of this call, got a value that another trace left behind")
        result = value._node.result(value._index)
        # An operand that is handed back is itself, and a value that is handed back twice is one output.
        if id(value._node) in inputs:
            sources.append((True, inputs[id(value._node)]))
            continue
        if result not in results:
            results.append(result)
        sources.append((False, results.index(result)))
    text = trace.text(list(zip(trace.output_names(len(results)), results)))
    return Traced(text, structure, sources)


# Tensors within tuples, lists and dicts.


class _Leaf(NamedTuple):
    """A tensor: which."""

    place: int


class _Constant(NamedTuple):
    """Anything else. `1`, `1.0` and `True` are equal, so the class tells them apart."""

    kind: type
    value: Any


class _Branch(NamedTuple):
    """A `dict`, a `list`, a `tuple`, or a tuple of the class `named`."""

    form: str
    named: Any
    keys: Tuple[Any, ...]
    parts: Tuple[Any, ...]


def _take(argument: Any, tensors: List[Any], names: List[str], label: str) -> Any:
    """Puts the tensors of an argument on a list, and gives what is left of it."""
    if _is_tensor(argument):
        tensors.append(argument)
        names.append(label)
        return _Leaf(len(tensors) - 1)
    if isinstance(argument, dict):
        form, keys, items = "dict", tuple(argument.keys()), tuple(argument.values())
    elif isinstance(argument, (tuple, list)):
        form = "list" if isinstance(argument, list) else "tuple"
        keys, items = tuple(range(len(argument))), tuple(argument)
    else:
        return _Constant(type(argument), argument)
    named = type(argument) if form == "tuple" and hasattr(argument, "_fields") else None
    parts = tuple([_take(item, tensors, names, f"{label}_{key}") for key, item in zip(keys, items)])
    return _Branch(form, named, keys, parts)


def _give(part: Any, tensors: Sequence[Any]) -> Any:
    """The reverse of `_take`."""
    if isinstance(part, _Leaf):
        return tensors[part.place]
    if isinstance(part, _Constant):
        return part.value
    items = [_give(item, tensors) for item in part.parts]
    if part.form == "dict":
        return dict(zip(part.keys, items))
    if part.named is not None:
        return part.named(*items)
    return items if part.form == "list" else tuple(items)


def _is_tensor(argument: Any) -> bool:
    if isinstance(argument, Value):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(argument, (numpy.ndarray, numpy.generic)):
        return isinstance(argument, numpy.ndarray)
    return hasattr(argument, "__dlpack__") and not isinstance(argument, type)


def _framework(operands: Sequence[Any]) -> str:
    """Whose dtypes the function is to see."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and any(isinstance(operand, torch.Tensor) for operand in operands):
        return "torch"
    return "numpy" if numpy is not None and any(isinstance(operand, numpy.ndarray) for operand in operands) else ""


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
    """What reports call it."""
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

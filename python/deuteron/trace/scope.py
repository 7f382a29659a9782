"""Torch's behaviour while a function is traced: modes of autograd are respected, custom gradients refused, modules recorded, and tensors that are
not arguments captured."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from deuteron.trace.graph import FLOATS, Node, Trace, dtype_word, is_double, is_long
from deuteron.trace.value import Value

Modes = Sequence[Tuple["weakref.ref[Any]", bool]]
"""Modules of torch that a trace depends on, each with whether it was in training."""


class Noted:
    """The modules that were called while a function was traced."""

    def __init__(self) -> None:
        self._found: Dict[int, Tuple["weakref.ref[Any]", bool]] = {}

    def add(self, module: Any) -> None:
        """Notes a module and all that are part of it."""
        for part in module.modules():
            self._found[id(part)] = (weakref.ref(part), bool(part.training))

    def modes(self) -> Modes:
        return tuple(self._found.values())

    def holder(self, tensor: Any) -> Optional[Holder]:
        """Where a module keeps a tensor as a parameter or a buffer."""
        for reference, _ in self._found.values():
            module = reference()
            for held in () if module is None else (module._parameters, module._buffers):
                for name, one in held.items():
                    if one is tensor:
                        return Holder(held, name)
        return None


class Holder(NamedTuple):
    """A place that a tensor was read from: a dict and a key, or a cell of a closure."""

    place: Any
    key: Optional[str]

    def now(self) -> Any:
        """The current value."""
        return self.place.get(self.key) if self.key is not None else self.place.cell_contents


class Capture(NamedTuple):
    """A captured tensor, which a function reads without taking it as an argument. It is an operand of every call, so in-place changes take effect."""

    tensor: Any
    holder: Holder
    kind: Any
    """dtype, shape and device when it was traced"""

    def changed(self) -> bool:
        """Whether another tensor is in its place, or it is of another kind, as after `half()`."""
        return self.holder.now() is not self.tensor or _kind(self.tensor) != self.kind


def _kind(tensor: Any) -> Any:
    return tensor.dtype, tensor.shape, tensor.device


class Captures:
    """Records for each captured tensor where it can be looked up again."""

    def __init__(self, trace: Trace, noted: Noted, function: Any, torch: Any) -> None:
        self._trace, self._noted, self._torch = trace, noted, torch
        self._found: Dict[int, Tuple[Capture, Node]] = {}
        self._variables = _variables(function)
        for holder in self._variables.values():
            if isinstance(_content(holder), torch.nn.Module):
                noted.add(_content(holder))

    def of(self, trace: Trace) -> bool:
        """Whether they are those of a trace."""
        return self._trace is trace

    def value(self, tensor: Any) -> Optional[Value]:
        """The value of a tensor; none of one that is kept nowhere, and may be another at the next call."""
        if type(tensor) not in (self._torch.Tensor, self._torch.nn.Parameter):
            return None
        known = self._found.get(id(tensor))
        if known is None:
            named = [(name, holder) for name, holder in self._variables.items() if _content(holder) is tensor]
            name, holder = named[0] if named else ("weight", self._noted.holder(tensor))
            if holder is None:
                return None
            word = dtype_word(tensor.dtype)
            if word in FLOATS and is_double(tensor.dtype) is not self._trace.doubles:
                raise TypeError(f"{holder.key or name}: expected only 64-bit floats, or none, got both; cast some")
            shape = tuple(int(size) for size in tensor.shape)
            node = self._trace.input(str(holder.key or name), word, shape, is_long=is_long(tensor.dtype))
            known = self._found[id(tensor)] = (Capture(tensor, holder, _kind(tensor)), node)
        return Value(self._trace, known[1])

    def all(self) -> Sequence[Capture]:
        """In the order of the graph's inputs."""
        return [capture for capture, _ in self._found.values()]


def _variables(function: Any) -> Dict[str, Holder]:
    """The variables of a function that are not its own: of functions around it, and of its module."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    cells = zip(code.co_freevars, function.__closure__ or ())
    found = {name: Holder(cell, None) for name, cell in cells}
    space = function.__globals__
    found.update({name: Holder(space, name) for name in code.co_names if name in space})
    return found


def _content(holder: Holder) -> Any:
    try:
        return holder.now()
    except ValueError:
        # A cell that is empty yet.
        return None


_current = threading.local()


def captured(tensor: Any) -> Optional[Value]:
    """The traced value of a captured tensor, one that is not an argument of the function being traced, or None."""
    captures = getattr(_current, "captures", None)
    return None if captures is None else captures.value(tensor)


def traces(trace: Trace) -> bool:
    """Whether this thread traces a function of torch's tensors, and this is its trace."""
    captures = getattr(_current, "captures", None)
    return captures is not None and captures.of(trace)


def changed(modes: Modes) -> bool:
    """Whether a module was put into another mode, by `train()` or `eval()`, or is gone."""
    for reference, training in modes:
        module = reference()
        if module is None or module.training is not training:
            return True
    return False


@contextmanager
def tracing(trace: Trace, torch: Any, function: Any, objects: Sequence[Any]) -> Iterator[Tuple[Noted, Sequence[Capture]]]:
    """Traces a function within the context. `objects` are its other arguments and the object it is a method of. Yields the modules that
    were noted and, when it is over, the tensors that were captured."""
    noted = Noted()
    found: List[Capture] = []
    if torch is None:
        yield noted, found
        return
    for one in objects:
        if isinstance(one, torch.nn.Module):
            noted.add(one)
    thread = threading.get_ident()

    def note(module: Any, _arguments: Any) -> None:
        if threading.get_ident() == thread:
            noted.add(module)

    # Whether a gradient is wanted is asked at each call, so a trace is of what runs where one is.
    trace.records_gradients = torch.is_grad_enabled
    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    before = getattr(_current, "captures", None)
    captures = Captures(trace, noted, function, torch) if trace.framework == "torch" else None
    _current.captures = captures
    try:
        with torch.inference_mode(False), torch.enable_grad(), _no_custom_gradients(torch):
            yield noted, found
    finally:
        _current.captures = before
        hook.remove()
        if captures is not None:
            found.extend(captures.all())


_lock = threading.Lock()
_originals: List[Any] = []
_depth = 0


@contextmanager
def _no_custom_gradients(torch: Any) -> Iterator[None]:
    """Refuses a `torch.autograd.Function` on values: its forward would be traced and its backward ignored. torch has no protocol by which
    such a call can be seen, so the method is replaced meanwhile; calls on tensors, of any thread, go through."""
    global _depth
    function = torch.autograd.Function
    with _lock:
        _depth += 1
        if _depth == 1:
            own = function.__dict__["apply"]
            _originals.append(own)

            def apply(cls: Any, *arguments: Any, **keywords: Any) -> Any:
                if any(isinstance(one, Value) for one in (*arguments, *keywords.values())):
                    raise TypeError(
                        f"{cls.__name__}: a fused function cannot call a custom torch.autograd.Function, whose backward a graph does "
                        "not have; call it outside of the fused function"
                    )
                return own.__get__(None, cls)(*arguments, **keywords)

            function.apply = classmethod(apply)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                function.apply = _originals.pop()

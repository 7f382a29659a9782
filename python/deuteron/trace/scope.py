"""What torch may do while a function is traced: modes of autograd are honoured, custom gradients refused, modules noted."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from deuteron.trace.graph import Trace
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


def changed(modes: Modes) -> bool:
    """Whether a module was put into another mode, by `train()` or `eval()`, or is gone."""
    for reference, training in modes:
        module = reference()
        if module is None or module.training is not training:
            return True
    return False


@contextmanager
def tracing(trace: Trace, torch: Any, objects: Sequence[Any]) -> Iterator[Noted]:
    """Within it, a function is traced. `objects` are what it is given besides tensors, and what it is a method of."""
    noted = Noted()
    if torch is None:
        yield noted
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
    try:
        with torch.inference_mode(False), torch.enable_grad(), _no_custom_gradients(torch):
            yield noted
    finally:
        hook.remove()


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

"""How a program meets its operands: tensors of PyTorch go by its autograd, all else straight to the engine."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Callable, Optional, Sequence

from ._native import Program

# The class of values of a trace and what an op does with them, once `deuteron.trace` is loaded.
traced: Optional[tuple[type, Callable[..., Any]]] = None

# The class of tensors and how programs meet them, once torch is loaded.
_tensor: Any = None
_call: Any = None


@lru_cache(maxsize=4096)
def program(text: str, states: tuple[str, ...] = ()) -> Program:
    """The program of a text, made once."""
    return Program(text, states)


def is_compiling() -> bool:
    """Whether a compiler of torch is looking."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def run(text: str, operands: Sequence[Any]) -> list[Any]:
    """Runs the program of a text on operands and gives its outputs. A compiler of torch sees one operator."""
    if is_compiling():
        from ._torch import compiled

        return compiled(text, operands)
    return call(program(text), operands)


def call(program: Program, operands: Sequence[Any]) -> list[Any]:
    """Runs a program on operands and gives its outputs."""
    if _tensor is None and not _has_torch():
        return program.forward(operands)
    for operand in operands:
        if isinstance(operand, _tensor):
            return _call(program, operands)  # type: ignore[no-any-return]
    return program.forward(operands)


def _has_torch() -> bool:
    """Looks whether someone has loaded torch by now."""
    global _tensor, _call
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compiler"):
        return False
    from . import _torch

    _tensor, _call = torch.Tensor, _torch.call
    return True

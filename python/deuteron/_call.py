"""Calls of programs. `Program.__call__` handles plain torch tensors itself; the other cases are here."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Callable, Optional, Sequence

from ._native import Program

# The class of values of a trace and what a program does with them, once `deuteron.trace` is loaded.
traced: Optional[tuple[type, Callable[[Program, Sequence[Any]], Sequence[Any]]]] = None

# What draws a seed beside a tensor of torch, once `deuteron._torch` is loaded.
draw: Optional[Callable[[Any], Any]] = None


@lru_cache(maxsize=4096)
def program(text: str, states: tuple[str, ...] = ()) -> Program:
    """The program of a text, made once."""
    return Program(text, states)


def _look_for_compiler() -> bool:
    """Whether torch.compile is tracing. Once torch is loaded, its own function replaces this one, which is
    0.1 us faster; a small call takes 5."""
    global is_compiling
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compiler"):
        return False
    if torch.compiler.is_compiling():
        return True
    is_compiling = torch.compiler.is_compiling
    return False


is_compiling: Callable[[], bool] = _look_for_compiler


def run(text: str, operands: Sequence[Any]) -> Sequence[Any]:
    """Runs the program of a text on operands and returns its outputs. torch.compile sees one operator."""
    if is_compiling() and not _are_traced(operands):
        from ._torch import compiled

        return compiled(text, operands)
    return program(text)(*operands)


def _are_traced(operands: Sequence[Any]) -> bool:
    """Whether any of them is a value of a trace: torch.compile may be tracing the caller."""
    return traced is not None and any([isinstance(operand, traced[0]) for operand in operands])


def general(program: Program, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Runs a program on operands that are not all plain torch tensors, or where torch intercepts calls."""
    if traced is not None and _are_traced(operands):
        return tuple(traced[1](program, operands))
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "compiler") and any(isinstance(one, torch.Tensor) for one in operands):
        from ._torch import call

        return tuple(call(program, operands))
    return tuple(program.forward(operands))

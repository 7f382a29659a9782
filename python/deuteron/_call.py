"""How a program meets its operands: tensors of PyTorch go by its autograd, all else straight to the engine."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Sequence

from ._native import Program


@lru_cache(maxsize=4096)
def program(text: str, states: tuple[str, ...] = ()) -> Program:
    """The program of a text, made once."""
    return Program(text, states)


def run(text: str, operands: Sequence[Any]) -> list[Any]:
    """Runs the program of a text on operands and gives its outputs. A compiler of torch sees one operator."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        from ._torch import compiled

        return compiled(text, operands)
    return call(program(text), operands)


def call(program: Program, operands: Sequence[Any]) -> list[Any]:
    """Runs a program on operands and gives its outputs."""
    torch = sys.modules.get("torch")
    if torch is not None:
        tensor = torch.Tensor
        for operand in operands:
            if isinstance(operand, tensor):
                from . import _torch

                return _torch.call(program, operands)
    return program.forward(operands)

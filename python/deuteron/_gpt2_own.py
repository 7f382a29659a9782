"""Checks that a module computes what its class says: that its forward was not replaced and has no hooks."""

from __future__ import annotations

import sys
from typing import Any, Dict

from torch import nn

from ._gpt2_report import Unfit

# The forwards that classes were published with.
_known: Dict[Any, Any] = {}


def forward_of(kind: Any) -> Any:
    """The forward of a class of layers. Since version 5.23 transformers wraps that of every subclass, also of those that FSDP makes."""
    forward = kind.forward
    while getattr(forward, "__globals__", {}).get("__name__") == "transformers.modeling_layers":
        forward = forward.__wrapped__
    return forward


def is_published(kind: Any) -> bool:
    """Whether a class has the forward that it was published with; assigning another one to the class changes that."""
    own = _known.get(kind)
    if own is None:
        forward: Any = forward_of(kind)
        if not is_from_source(kind, "forward", forward) or forward.__code__.co_name != "forward":
            return False
        own = _known[kind] = kind.forward
    return kind.forward is own


def is_from_source(kind: Any, name: str, function: Any) -> bool:
    """Whether a function is written in the file that defines a class or the base that has its method of this name."""
    defining = next((base for base in kind.__mro__ if name in base.__dict__), kind)
    source = getattr(sys.modules.get(defining.__module__), "__file__", None)
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == source


def check_part(name: str, part: nn.Module) -> None:
    """Refuses a module that someone looks into or that computes something else than its class."""
    if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
        _refuse_hooks(name, part)
    if "forward" in part.__dict__:
        raise Unfit(f"the forward of its {name} is overridden")
    if not is_published(type(part)):
        raise Unfit(f"the forward of its {name}'s class {type(part).__name__} is overridden")


def _refuse_hooks(name: str, part: nn.Module) -> None:
    """Hooks read inputs and outputs of a module, which do not exist in a fused program.

    Those by which transformers collects attention weights stay where they are after use. They are no obstacle while
    nothing is collected.
    """
    if not (part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks):
        collecting = "transformers.utils.output_capturing"
        if all(getattr(hook, "__module__", "") == collecting for hook in part._forward_hooks.values()):
            from transformers.utils import output_capturing

            collected: Any = output_capturing._active_collector.get()
            if not collected or not any("attentions" in key for key in collected):
                return
            raise Unfit("attention weights are requested")
    raise Unfit(f"its {name} has a hook")

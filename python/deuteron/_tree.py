"""Tensors within tuples, lists, dicts and dataclasses: taken out of arguments and results, and put back."""

from __future__ import annotations

import collections
import dataclasses
import sys
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from deuteron.trace.value import Value


class Leaf(NamedTuple):
    """A tensor: which."""

    place: int


class Constant(NamedTuple):
    """Anything else. `1`, `1.0` and `True` are equal, so the class tells them apart."""

    kind: type
    value: Any


class Branch(NamedTuple):
    """A container: its class, what else makes one of it, and its parts."""

    form: str
    """`dict`, `list`, `tuple`, `fields` (of a dataclass or a named tuple)"""
    kind: Any
    """its class, where that is not the form itself"""
    keys: Tuple[Any, ...]
    parts: Tuple[Any, ...]
    factory: Any = None
    """of a `defaultdict`"""


def take(argument: Any, tensors: List[Any], names: List[str], label: str) -> Any:
    """Appends the tensors of an argument to a list, and returns its structure without them."""
    if is_tensor(argument):
        tensors.append(argument)
        names.append(label)
        return Leaf(len(tensors) - 1)
    kind = type(argument)
    content: Dict[Any, Any]
    if dataclasses.is_dataclass(argument) and not isinstance(argument, type):
        form, content = "fields", {field.name: getattr(argument, field.name) for field in dataclasses.fields(argument)}
    elif isinstance(argument, tuple) and hasattr(argument, "_fields"):
        form, content = "fields", dict(zip(argument._fields, argument))
    elif isinstance(argument, dict):
        form, content = "dict", argument
    elif isinstance(argument, (tuple, list)):
        form, content = "list" if isinstance(argument, list) else "tuple", dict(enumerate(argument))
    else:
        return Constant(kind, argument)
    parts = tuple([take(item, tensors, names, f"{label}_{key}") for key, item in content.items()])
    return Branch(form, None if kind in (dict, list, tuple) else kind, tuple(content), parts, getattr(argument, "default_factory", None))


def give(part: Any, tensors: Sequence[Any]) -> Any:
    """The reverse of `take`."""
    if isinstance(part, Leaf):
        return tensors[part.place]
    if isinstance(part, Constant):
        return part.value
    items = [give(item, tensors) for item in part.parts]
    if part.kind is None:
        return dict(zip(part.keys, items)) if part.form == "dict" else items if part.form == "list" else tuple(items)
    named = dict(zip(part.keys, items))
    if part.form == "fields":
        return _with_fields(part.kind, named)
    if part.form == "dict":
        return part.kind(part.factory, named) if issubclass(part.kind, collections.defaultdict) else part.kind(named)
    return part.kind(items)


def _with_fields(kind: Any, named: Dict[str, Any]) -> Any:
    """A dataclass or a named tuple of these fields."""
    if hasattr(kind, "_fields"):
        return kind(**named)
    fields = {field.name: field.init for field in dataclasses.fields(kind)}
    made = kind(**{name: item for name, item in named.items() if fields[name]})
    for name, is_argument in fields.items():
        if not is_argument:
            object.__setattr__(made, name, named[name])
    return made


def constants(part: Any) -> List[Any]:
    """All leaves that are not tensors."""
    if isinstance(part, Constant):
        return [part.value]
    return [] if isinstance(part, Leaf) else [one for item in part.parts for one in constants(item)]


def holds_values(thing: Any, depth: int = 3) -> bool:
    """Whether an object that is none of the containers above holds values of a trace."""
    if isinstance(thing, Value):
        return True
    if depth == 0 or thing is None or isinstance(thing, (type, bool, int, float, str, bytes)) or callable(thing):
        return False
    held = list(getattr(thing, "__dict__", {}).values())
    if isinstance(thing, (set, frozenset, collections.deque, tuple, list)):
        held += thing
    elif isinstance(thing, (dict, collections.UserDict)):
        held += thing.values()
    return any(holds_values(one, depth - 1) for one in held)


def is_tensor(argument: Any) -> bool:
    if isinstance(argument, Value):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(argument, (numpy.ndarray, numpy.generic)):
        return isinstance(argument, numpy.ndarray)
    return hasattr(argument, "__dlpack__") and not isinstance(argument, type)

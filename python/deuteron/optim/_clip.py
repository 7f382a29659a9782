"""The norm of all gradients, and their scaling where it is too large.

Gradients of one device are clipped by one program: it reads each of them for the norm, and once more to write it in place. Sums are f32 in a
fixed order, whatever the dtypes, and each gradient is rounded once. Where the norm must be known in between (gradients of several devices,
`error_if_nonfinite`), or the parameters that have gradients keep changing, there are two kinds of programs: for the sums, and for scaling.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from types import GeneratorType
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._graph_text import GraphText
from .._graph_text import shape as axes
from .._native import Program
from ._update import DTYPES, flattened, is_plain, on_device

_NAME = "clip_grad_norm_"
_INSTEAD = "use torch.nn.utils.clip_grad_norm_ for these"

# Added to the norm before the limit is divided by it, as in torch.
_LEAST = 1e-6

# Columns that a gradient is summed by, at most: there is a sum for each row of them.
_COLUMNS = 4096

# Columns, at least, of a gradient with more elements: with fewer there would be too many sums. It is a multiple of a vector.
_FEWEST = 64

# Sets of gradients that are compiled as a whole. Where they come and go in more ways, each gradient has its own programs.
_MOST_SETS = 16

# Dtype and shape.
_Type = Tuple[str, Tuple[int, ...]]


class _What(NamedTuple):
    """A program: the norm and the scaling, or one of them."""

    order: float
    has_norm: bool
    has_scaling: bool


_programs: Dict[Tuple[_What, Tuple[_Type, ...]], Program] = {}
_sets: Dict[_What, int] = {}


def clip(parameters: Any, max_norm: Any, norm_type: Any, strict: bool) -> Tensor:
    """Checks the arguments and clips."""
    limit, order = _number("max_norm", max_norm), _number("norm_type", norm_type)
    if not order > 0:
        raise ValueError(f"{_NAME}: expected norm_type above 0, got {norm_type!r}; {_INSTEAD}")
    given = [parameter.grad for parameter in _listed(parameters)]
    gradients = [gradient for gradient in given if gradient is not None]
    if not gradients:
        return torch.tensor(0.0)
    for gradient in gradients:
        _check(gradient)
    dtype = gradients[0].dtype
    for gradient in gradients:
        dtype = torch.promote_types(dtype, gradient.dtype)
    with torch.no_grad():
        norm = _clip([gradient for gradient in gradients if gradient.numel()], limit, order, strict)
        return torch.zeros((), dtype=dtype, device=gradients[0].device) if norm is None else norm.to(gradients[0].device, dtype)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{_NAME}: expected {name} to be a number, got {value!r}") from None


def _listed(parameters: Any) -> List[Tensor]:
    if isinstance(parameters, Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable):
        raise TypeError(f"{_NAME}: expected a parameter or several, got a {type(parameters).__name__}")
    listed: List[Any] = list(parameters)
    for one in listed:
        if not isinstance(one, Tensor):
            raise TypeError(f"{_NAME}: expected parameters of torch, got a {type(one).__name__}")
    if not listed and isinstance(parameters, GeneratorType):
        warnings.warn(f"{_NAME}: the generator of parameters is empty, or was consumed before: nothing is clipped", stacklevel=4)
    return listed


def _check(gradient: Tensor) -> None:
    """Refuses what no kernel scales."""
    if getattr(gradient, "_local_tensor", None) is not None:
        raise TypeError(f"{_NAME}: expected gradients that are whole in this process, got a {type(gradient).__name__}; {_INSTEAD}")
    if gradient.layout != torch.strided:
        raise RuntimeError(f"{_NAME}: expected dense gradients, got one of layout {gradient.layout}; make embeddings with sparse=False")
    if gradient.dtype not in DTYPES:
        raise TypeError(f"{_NAME}: expected gradients of float32, bfloat16 or float16, got {gradient.dtype}; {_INSTEAD}")


def _clip(gradients: Sequence[Tensor], limit: float, order: float, strict: bool) -> Optional[Tensor]:
    """Scales gradients that have elements, and gives their norm as f32, if there are any."""
    # By device: what kernels take.
    devices: Dict[torch.device, List[Tensor]] = {}
    copies: List[Tuple[Tensor, Tensor]] = []
    for gradient in gradients:
        taken: Optional[Tensor] = gradient
        if not is_plain(gradient):
            lying = flattened([gradient])
            taken = lying[0] if lying is not None and is_plain(lying[0]) else None
        if taken is None:
            taken = gradient.clone(memory_format=torch.contiguous_format).view(-1)
            copies.append((gradient, taken))
        devices.setdefault(gradient.device, []).append(taken)
    norm: Optional[Tensor] = None
    if not strict and len(devices) == 1:
        [(device, own)] = devices.items()
        program = _of_set(_What(order, True, True), own)
        if program is not None:
            [norm] = program.forward([_limit(limit, device), *own])
    if norm is None and devices:
        norm = _norm(devices, order)
        if strict and not bool(norm.isfinite()):
            raise RuntimeError(
                f"{_NAME}: expected gradients whose norm of order {order:g} is finite, got {float(norm):g}; no gradient was changed. With "
                "error_if_nonfinite=False they are scaled by it"
            )
        _scale(devices, (limit / (norm + _LEAST)).clamp(max=1.0))
    for gradient, copy in copies:
        gradient.copy_(copy.view(gradient.shape))
    # Torch before 2.5 takes one tensor.
    for gradient in gradients:
        torch.autograd.graph.increment_version(gradient)
    return norm


def _norm(devices: Dict[torch.device, List[Tensor]], order: float) -> Tensor:
    """The norm, on the first device."""
    what = _What(order, True, False)
    parts: List[Tensor] = []
    for own in devices.values():
        program = _of_set(what, own)
        if program is None:
            parts += [_program(what, (_type(one),)).forward([one])[0] for one in own]
        else:
            parts.append(program.forward(own)[0])
    first = next(iter(devices))
    norm: Tensor = torch.linalg.vector_norm(torch.stack([part.to(first) for part in parts]), order)
    return norm


def _scale(devices: Dict[torch.device, List[Tensor]], factor: Tensor) -> None:
    what = _What(0.0, False, True)
    for device, own in devices.items():
        local, program = factor.to(device), _of_set(what, own)
        if program is None:
            for one in own:
                _program(what, (_type(one),)).forward([local, one])
        else:
            program.forward([local, *own])


@lru_cache(maxsize=64)
def _limit(limit: float, device: torch.device) -> Tensor:
    """The limit as an operand. It rarely changes."""
    return on_device([limit], device)[0]


def _type(gradient: Tensor) -> _Type:
    return DTYPES[gradient.dtype], tuple(gradient.shape)


def _of_set(what: _What, gradients: Sequence[Tensor]) -> Optional[Program]:
    """The program of a set of gradients; none if there are too many sets, or if a gradient occurs twice, because it is then counted and scaled twice."""
    if len({one.data_ptr() for one in gradients}) < len(gradients):
        return None
    types = tuple([_type(one) for one in gradients])
    if (what, types) not in _programs:
        if _sets.get(what, 0) >= _MOST_SETS:
            return None
        _sets[what] = _sets.get(what, 0) + 1
    return _program(what, types)


def _program(what: _What, types: Tuple[_Type, ...]) -> Program:
    program = _programs.get((what, types))
    if program is None:
        text, updates = _text(what, types)
        program = _programs[what, types] = Program(text, (), updates)
    return program


def _text(what: _What, types: Sequence[_Type]) -> Tuple[str, List[Tuple[str, str]]]:
    """A graph, and the output that each gradient becomes."""
    graph = GraphText("clip_grad_norm")
    if what.has_scaling:
        graph.let("limit" if what.has_norm else "factor", "f32", "input f32[]")
    for at, (dtype, sizes) in enumerate(types):
        graph.let(f"gradient.{at}", dtype, f"input {dtype}{axes(*sizes)}")
    outputs: List[str] = []
    if what.has_norm:
        outputs.append(_written_norm(graph, what.order, types))
    if what.has_norm and what.has_scaling:
        graph.say("factor {")
        divisor = graph.let("divisor", "f32", f"add norm {graph.let('least', 'f32', f'const {_LEAST!r} f32')}")
        share = graph.let("share", "f32", f"div limit {divisor}")
        graph.let("factor", "f32", f"min {graph.let('one', 'f32', 'const 1.0 f32')} {share}")
        graph.say("}")
    updates: List[Tuple[str, str]] = []
    for at, (dtype, _) in enumerate(types if what.has_scaling else ()):
        graph.say("scale {")
        wide = graph.cast(f"gradient.{at}", "f32")
        new = graph.cast(graph.let(f"scaled.{at}", "f32", f"mul {wide} factor"), dtype)
        graph.say("}")
        updates.append((f"gradient.{at}", new))
    graph.say("out " + " ".join([*outputs, *[new for _, new in updates]]))
    return graph.text(), updates


def _written_norm(graph: GraphText, order: float, types: Sequence[_Type]) -> str:
    """Writes the norm of all gradients: a sum for each row of each of them, then the sum of these."""
    sums: List[str] = []
    for at, (_, sizes) in enumerate(types):
        for part, (start, rows, columns) in enumerate(_rows(math.prod(sizes))):
            name = f"{at}.{part}"
            graph.say("sums {")
            x = graph.let(f"line.{name}", graph.dtypes[f"gradient.{at}"], f"reshape gradient.{at} {axes(math.prod(sizes))}")
            if rows * columns < math.prod(sizes):
                x = graph.let(f"cut.{name}", graph.dtypes[x], f"slice {x} axis=0 start={start} length={rows * columns}")
            x = graph.let(f"rows.{name}", graph.dtypes[x], f"reshape {x} {axes(rows, columns)}")
            x = graph.cast(x, "f32")
            if order == 2:
                x = graph.let(f"power.{name}", "f32", f"mul {x} {x}")
            elif order != math.inf:
                x = graph.let(f"magnitude.{name}", "f32", f"abs {x}")
                x = x if order == 1 else _power(graph, name, x, order)
            reduction = "row_absmax" if order == math.inf else "row_sum"
            graph.let(f"column.{name}", "f32", f"{reduction} {x}")
            graph.say("}")
            sums.append(graph.let(f"sums.{name}", "f32", f"reshape column.{name} {axes(rows)}"))
    graph.say("norm {")
    all_sums = sums[0] if len(sums) == 1 else graph.let("sums", "f32", f"concat {' '.join(sums)} axis=0")
    total = graph.let("total", "f32", f"{'row_absmax' if order == math.inf else 'row_sum'} {all_sums}")
    if order == 2:
        total = graph.let("root", "f32", f"sqrt {total}")
    elif order not in (1, math.inf):
        total = _power(graph, "root", total, 1 / order)
    graph.let("norm", "f32", f"reshape {total} []")
    graph.say("}")
    return "norm"


def _power(graph: GraphText, name: str, x: str, order: float) -> str:
    """A power of a number that is not negative."""
    exponent = graph.let(f"exponent.{name}", "f32", f"const {order!r} f32")
    logarithm = graph.let(f"logarithm.{name}", "f32", f"mul {graph.let(f'log.{name}', 'f32', f'log {x}')} {exponent}")
    return graph.let(f"power.{name}", "f32", f"exp {logarithm}")


def _rows(elements: int) -> List[Tuple[int, int, int]]:
    """Parts of the elements of a gradient as rows: start, rows, columns."""
    if elements <= _COLUMNS:
        return [(0, 1, elements)]
    # Rows that begin where a vector may, if possible.
    for columns in (*range(_COLUMNS, _FEWEST - 1, -_FEWEST), *range(_COLUMNS, _FEWEST, -1)):
        if elements % columns == 0:
            return [(0, elements // columns, columns)]
    rows, rest = divmod(elements, _COLUMNS)
    return [(0, rows, _COLUMNS), (rows * _COLUMNS, 1, rest)]

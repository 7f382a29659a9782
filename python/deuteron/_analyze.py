"""`analyze`: what to fuse in a model on a machine, and the predicted gain. Runs nothing."""

from __future__ import annotations

import html
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from deuteron._fuse import Fused, function_name
from deuteron.trace.graph import Trace, dtype_word
from deuteron.trace.value import Value


def analyze(
    model: Any,
    example_inputs: Any = (),
    device: str = "auto",
    backward: bool = False,
    *,
    kwargs: Optional[Mapping[str, Any]] = None,
    name: Optional[str] = None,
) -> Analysis:
    """Says what to fuse in a model or a function, why, and the predicted gain; runs nothing.

    `model` is a `torch.nn.Module` or a function of torch tensors, which `torch.export` traces; a function under
    `deuteron.fuse`, or one of NumPy arrays, which is traced; a graph in text form, or a path to one; or an op of the
    catalogue such as `"norm_act act=silu"`. `example_inputs` gives dtypes and shapes: a tensor, a tuple of arguments,
    or a dict of named ones. `device` is `auto`, `cpu`, `cuda`, or a machine such as `h200`. With `backward`, gradients
    of all float inputs and weights are planned too. An operation that graphs do not have is modelled by its bytes only;
    `Analysis.notes` names it.

    >>> import deuteron
    >>> graph = "x = input f32[4096,768]; r = input f32[4096,768]; s = add x r; y = gelu s; out y"
    >>> analysis = deuteron.analyze(graph, device="h200")
    >>> [kernel["name"] for kernel in analysis.kernels]
    ['add + gelu']
    >>> analysis.speedup > 1.5
    True
    """
    from deuteron._native import analyze as native

    text, notes = _graph(model, example_inputs, dict(kwargs or {}), name)
    return Analysis(native(text, device, backward), text, notes)


class Analysis:
    """The result of `analyze`: can be printed, shown in a notebook, and saved as text, JSON or a page."""

    def __init__(self, analysis: str, graph: str, notes: Sequence[str] = ()) -> None:
        sheet = json.loads(analysis)
        sheet["notes"] = [*notes, *sheet.get("notes", [])]
        self._sheet: Dict[str, Any] = sheet
        self._graph = graph

    @property
    def graph(self) -> str:
        """The graph that was analysed, in text form."""
        return self._graph

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        return str(self._sheet["verdict"])

    @property
    def notes(self) -> List[str]:
        """Notes on the analysis, such as operations that are modelled by their bytes only."""
        return list(self._sheet["notes"])

    @property
    def kernels(self) -> List[Dict[str, Any]]:
        """The kernels of the chosen plan, equal ones listed once: `name`, `launches`, `cost`, `source`, ..."""
        return list(self._sheet["after"])

    @property
    def speedup(self) -> Optional[float]:
        """The predicted speed-up of the chosen plan over the unfused one."""
        plans = self._sheet["plans"]
        unfused, chosen = plans["unfused"]["us"], plans["chosen"]["us"]
        return float(unfused / chosen) if chosen > 0 else None

    def text(self) -> str:
        """The text that the command `deuteron analyze` prints."""
        from deuteron._native import analysis_text

        return analysis_text(json.dumps(self._sheet))

    def json(self) -> Dict[str, Any]:
        """The analysis as data; `deuteron explain --schema` describes it."""
        copy: Dict[str, Any] = json.loads(json.dumps(self._sheet))
        return copy

    def html(self) -> str:
        """The analysis as one HTML page that works offline."""
        from deuteron._native import analysis_html

        return analysis_html(json.dumps(self._sheet))

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes it to a file; the format follows from the name: `.html`, `.json`, or `.txt`."""
        target = Path(path)
        forms: Dict[str, Callable[[], str]] = {
            ".html": self.html,
            ".htm": self.html,
            ".json": lambda: json.dumps(self._sheet, indent=2),
            ".txt": self.text,
        }
        form = forms.get(target.suffix.lower())
        if form is None:
            raise ValueError(f"save: expected a name that ends in .html, .json or .txt, got {target.name}")
        target.write_text(form(), encoding="utf-8")

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Analysis of {self._sheet['graph']} on {self._sheet['device']}: {self.verdict}>"

    def _repr_html_(self) -> str:
        page = html.escape(self.html(), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:720px;border:0" title="Deuteron analysis"></iframe>'


def _graph(model: Any, example: Any, keywords: Dict[str, Any], name: Optional[str]) -> Tuple[str, List[str]]:
    """The graph in text form, and notes."""
    arguments: Tuple[Any, ...]
    if isinstance(example, Mapping):
        arguments, keywords = (), {**example, **keywords}
    else:
        arguments = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    if isinstance(model, os.PathLike):
        return Path(model).read_text(encoding="utf-8"), []
    if isinstance(model, str):
        return (_catalog_graph(model, arguments) if _is_op(model) else model), []
    if isinstance(model, Fused):
        return model.graph(*arguments, **keywords), []
    torch = sys.modules.get("torch")
    if torch is not None and (isinstance(model, torch.nn.Module) or _is_torch(torch, model, arguments, keywords)):
        return _exported_graph(torch, model, arguments, keywords, name)
    if callable(model):
        return Fused(model, name).graph(*arguments, **keywords), []
    raise TypeError(
        f"analyze: expected a torch module, a function, a graph in text form or an op, got a {type(model).__name__}"
    )


def _is_op(text: str) -> bool:
    """Whether it is an op with its attributes, and not a graph."""
    from deuteron.functions import __all__ as names

    words = text.split()
    return bool(words) and words[0] in names and "=" not in words and "\n" not in text.strip() and ";" not in text


def _catalog_graph(text: str, operands: Sequence[Any]) -> str:
    from deuteron._call import program
    from deuteron.trace.catalog import expand

    if not operands:
        raise ValueError(f"analyze: expected example operands of `{text}`, got none")
    trace = Trace(text.split()[0])
    values = [
        Value(trace, trace.input(f"x{index}", dtype_word(operand.dtype), tuple(operand.shape)))
        for index, operand in enumerate(operands)
    ]
    results = expand(program(text), values)
    names = trace.output_names(len(results))
    return trace.text([(name, value._node.result(value._index)) for name, value in zip(names, results)])


def _is_torch(torch: Any, model: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether it is a function of tensors of torch."""
    leaves = torch.utils._pytree.tree_leaves((arguments, dict(keywords)))
    return callable(model) and any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _exported_graph(
    torch: Any, model: Any, arguments: Tuple[Any, ...], keywords: Dict[str, Any], name: Optional[str]
) -> Tuple[str, List[str]]:
    from deuteron._aten import translate

    notes = []
    module = model if isinstance(model, torch.nn.Module) else _as_module(torch, model)
    if "use_cache" in inspect.signature(module.forward).parameters and "use_cache" not in keywords:
        keywords = {**keywords, "use_cache": False}
        notes.append("exported with use_cache=False: no cache of keys and values is written")
    try:
        exported = torch.export.export(module, arguments, keywords, strict=False)
    except Exception as error:
        raise ValueError(f"analyze: torch.export does not take {type(model).__name__}: {error}") from error
    title = name or (type(model).__name__ if module is model else function_name(model))
    translation = translate(exported, title)
    return translation.text, [*notes, *translation.notes]


def _as_module(torch: Any, function: Callable[..., Any]) -> Any:
    module = torch.nn.Module()
    module.forward = function
    return module

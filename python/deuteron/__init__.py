"""Kernel fusion for transformers: fused ops for PyTorch and NumPy, your own fusions, and a planner that says what to fuse.

>>> import numpy, deuteron
>>> x = numpy.random.default_rng(0).standard_normal((4, 8), dtype="float32")
>>> y = deuteron.norm_act(x, numpy.ones(8, "float32"), numpy.zeros(8, "float32"), act="gelu")
>>> y.shape
(4, 8)

Functions of the catalogue are in this module; `deuteron.nn` has them as PyTorch modules, `deuteron.patch` uses them in the GPT-2 of
Hugging Face, `deuteron.register_attention` adds our attention to any of its models, `deuteron.optim` has optimisers whose step is one
program, `deuteron.fuse` fuses your own function, and `deuteron.analyze` says what to fuse. Importing does not load PyTorch, and no GPU is
used before the first call on one.
"""

from __future__ import annotations

import os as _os
from typing import TYPE_CHECKING, Any

try:
    from . import _native
except ImportError as error:
    raise ImportError(
        "the compiled part of deuteron is missing: `pip install ./python` in a checkout builds it; to run the checkout itself, copy what "
        "`cargo build -p deuteron-python` builds, as CONTRIBUTING.md says"
    ) from error
from ._memory import empty_cache, memory_stats
from ._native import Array, Program, __version__
from ._threads import follow_environment as _follow_environment
from ._threads import get_num_threads, set_num_threads
from .functions import *
from .functions import __all__ as _functions

if TYPE_CHECKING:
    from . import nn, optim, trace
    from ._analyze import Analysis, analyze
    from ._doctor import doctor
    from ._fuse import fuse
    from ._gpt2 import patch, patched, unpatch
    from ._hf_attention import register_attention

__all__ = [
    *_functions,
    "Analysis",
    "Array",
    "Program",
    "__version__",
    "analyze",
    "doctor",
    "empty_cache",
    "fuse",
    "get_num_threads",
    "memory_stats",
    "nn",
    "optim",
    "patch",
    "patched",
    "register_attention",
    "set_num_threads",
    "unpatch",
]

_LAZY = {
    "Analysis": "_analyze",
    "analyze": "_analyze",
    "doctor": "_doctor",
    "fuse": "_fuse",
    "patch": "_gpt2",
    "patched": "_gpt2",
    "register_attention": "_hf_attention",
    "unpatch": "_gpt2",
}


if not TYPE_CHECKING:
    # Hidden from checkers of types, for which every name would be there.

    def __getattr__(name: str) -> Any:
        """Loads parts that need PyTorch, or more time, on first use."""
        from importlib import import_module

        if name in ("nn", "optim", "trace"):
            return import_module(f".{name}", __name__)
        if name in _LAZY:
            return getattr(import_module(f".{_LAZY[name]}", __name__), name)
        raise AttributeError(f"module 'deuteron' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


_follow_environment()

if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(after_in_child=_native._forked)

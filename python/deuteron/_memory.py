"""Memory that programs keep between calls."""

from __future__ import annotations

from typing import Dict

from . import _native


def empty_cache() -> None:
    """Frees the workspaces that no running call uses. Programs stay compiled; the next call allocates a workspace again.

    Programs on the CPU share one workspace, as large as the largest of them needs. On a GPU they share one per stream, which is freed
    once the stream has finished the enqueued calls. A program that was captured in a CUDA graph keeps its own memory, which is freed
    with it: by `unpatch`, or with the last reference to a fused function.
    """
    _native.empty_cache()


def memory_stats() -> Dict[str, Dict[str, int]]:
    """Memory that programs hold in addition to their callers' tensors, per device used.

    `workspace_bytes` are allocated now, `needed_bytes` are needed to run the programs (on a GPU, on one stream), and `programs` is the number
    of compiled programs.

    >>> import numpy, deuteron
    >>> y = deuteron.softmax(numpy.ones((4, 8), "float32"))
    >>> stats = deuteron.memory_stats()["cpu"]
    >>> sorted(stats)
    ['needed_bytes', 'programs', 'workspace_bytes']
    >>> deuteron.empty_cache()
    >>> deuteron.memory_stats()["cpu"]["workspace_bytes"]
    0
    """
    return _native.memory_stats()

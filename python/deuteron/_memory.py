"""Memory that programs keep between calls."""

from __future__ import annotations

from typing import Dict

from . import _native


def empty_cache() -> None:
    """Frees the workspaces that no call has now. Programs stay compiled; the next call allocates a workspace again.

    Programs on the CPU share one workspace, as large as the largest of them needs. On a GPU they share one per stream, which is freed
    once the stream has done the calls that are enqueued. A program that was captured in a CUDA graph keeps memory of its own, which goes
    with it: by `unpatch`, or with the last reference to a fused function.
    """
    _native.empty_cache()


def memory_stats() -> Dict[str, Dict[str, int]]:
    """What programs hold beside the tensors of their callers, for each device that was used.

    `workspace_bytes` are allocated now, `needed_bytes` what the programs need to run, on a GPU on one stream, `programs` how many are
    compiled for some sizes and strides.

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

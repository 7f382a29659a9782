"""The number of threads of calls on the CPU."""

from __future__ import annotations

import os

from . import _native


def set_num_threads(threads: int) -> None:
    """Limits the threads of calls on the CPU, in this process, from 1 to the number of cores.

    With PyTorch loaded, calls run on the threads of its OpenMP runtime and also respect `torch.set_num_threads`: the smaller number
    applies. Results do not depend on the number of threads.

    In a forked process Deuteron uses its own threads. PyTorch's parallel operations deadlock there if the parent has used
    OpenMP threads, by PyTorch or by Deuteron; `torch.set_num_threads(1)` in the child avoids that.

    >>> import deuteron
    >>> deuteron.set_num_threads(1)
    >>> deuteron.get_num_threads()
    1
    >>> deuteron.set_num_threads(0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: set_num_threads: expected 1 to ..., the number of cores, got 0
    """
    _native.set_num_threads(threads)


def get_num_threads() -> int:
    """The number of threads that a call on the CPU uses now."""
    return _native.get_num_threads()


def follow_environment() -> None:
    """Takes `OMP_NUM_THREADS` as the limit, as libraries with OpenMP do. Other values are ignored, as by those libraries."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        # Before any limit is set, this is the number of cores.
        _native.set_num_threads(min(int(first), _native.get_num_threads()))

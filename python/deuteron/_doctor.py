"""The devices, libraries and packages of this machine and interpreter."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from typing import Any

from . import _native


def doctor() -> dict[str, Any]:
    """Devices, libraries and packages, as a dictionary that prints as a short list.

    >>> import deuteron
    >>> sorted(deuteron.doctor())[:3]
    ['copy', 'cuda', 'device']
    """
    report = json.loads(_native.doctor())
    report["python"] = platform.python_version()
    report["packages"] = {name: _version(name) for name in ("torch", "numpy", "transformers")}
    return _Report(report)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


class _Report(dict):  # type: ignore[type-arg]
    def __repr__(self) -> str:
        lines = [f"deuteron   {self['version']}", f"python     {self['python']} ({sys.executable})", f"device     {self['device']}"]
        cuda = self["cuda"]
        gpus = [f"{gpu['name']} ({gpu['compute_capability']})" for gpu in cuda.get("gpus", [])]
        lines.append(f"GPUs       {', '.join(gpus) or 'none'}")
        lines += [f"{name:<10} {version}" for name, version in self["packages"].items()]
        return "\n".join(lines)

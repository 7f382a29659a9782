"""What all tests share: the package that is tested, fixed seeds; tests that cannot run here are skipped with a warning and a count."""

from __future__ import annotations

import ast
import importlib.util
import os
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, List

import numpy
import pytest

SOURCES = Path(__file__).resolve().parents[1]
# `python -m pytest` in this folder puts it first on the path, also where it has no native module: then the installed package is tested.
HAS_NATIVE = any((SOURCES / "deuteron").glob("_native*.so"))
if not HAS_NATIVE:
    sys.path[:] = [one for one in sys.path if Path(one).resolve() != SOURCES]

NO_GPU = "needs a GPU that torch can use"

_skipped: Dict[str, int] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU of NVIDIA and a torch that can use it")
    _skipped.clear()
    if importlib.util.find_spec("deuteron") is None:
        raise pytest.UsageError("the package is not installed: `pip install ./python`, or build it into python/deuteron as CONTRIBUTING.md says")


def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and not has_gpu():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def has_gpu() -> bool:
    """Whether torch is here and sees a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


@pytest.fixture(autouse=True, scope="session")
def _folder() -> Iterator[None]:
    """Interpreters that tests start find the same package: they look for it where they start."""
    before = os.getcwd()
    if not HAS_NATIVE and Path(before).resolve() == SOURCES:
        os.chdir(SOURCES / "tests")
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Each test draws the same numbers, alone or among others."""
    random.seed(0)
    numpy.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


# Counting what was skipped. A test asks for a package by `pytest.importorskip`, a file by the same at its top.


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _count(report, 1)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _count(report, _tests_in(Path(str(report.fspath))))


def _count(report: Any, tests: int) -> None:
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    missing = re.search(r"could not import '(\w+)", reason)
    if NO_GPU in reason:
        _skipped["a GPU"] += tests
    elif missing:
        _skipped[missing.group(1)] += tests


def _tests_in(path: Path) -> int:
    """Functions of a file that are tests; each may be several."""
    if not path.is_file():
        return 1
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test") for node in nodes)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for what, tests in sorted(_skipped.items()):
        why = "which this machine does not have" if what == "a GPU" else "which is not installed"
        terminalreporter.write_line(f"{tests} tests need {what}, {why}: skipped", yellow=True, bold=True)

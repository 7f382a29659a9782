"""The programs of ``examples/`` that are in Python run as they are."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(FOLDER.glob("*.py"))


def test_there_are_examples() -> None:
    assert [path.name for path in PROGRAMS] == ["fuse_function.py", "numpy_op.py"]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "import torch" in path.read_text():
        pytest.importorskip("torch")
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out

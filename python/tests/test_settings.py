"""Settings that earlier commands left for the user: a bad file is a hint less, no reason to stop."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, Optional

import pytest

import deuteron

# That of the package that is tested here, installed or not.
PACKAGES = Path(deuteron.__file__).resolve().parent.parent

USE = """
import numpy
import deuteron
for _ in range(2):
    y = deuteron.norm_act(numpy.ones((3, 4), "float32"), numpy.ones(4, "float32"))
    deuteron.analyze("x = input f32[8,64]; y = gelu x; out y", device="cpu")
    deuteron.Program("act act=gelu").kernels([("f32", [3, 4])], "cpu")
assert y.shape == (3, 4)
"""


def used(folder: Path, settings: Dict[str, Optional[str]]) -> subprocess.CompletedProcess[str]:
    """Another interpreter that uses the package from a folder, with these variables set or without them."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), **{k: v for k, v in settings.items() if v is not None}}
    for name in (name for name, value in settings.items() if value is None):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", USE], capture_output=True, encoding="utf-8", env=environment, timeout=300, cwd=folder
    )


@pytest.mark.parametrize("content", [b"name = 3", b"\xff\xfe", b"", None])
def test_a_bad_machine_file_is_ignored_with_one_note(tmp_path: Path, content: Optional[bytes]) -> None:
    path = tmp_path / "deuteron" / "machines" / "cpu.toml"
    path.parent.mkdir(parents=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    ran = used(tmp_path, {"XDG_CONFIG_HOME": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("note: ignored") == 1 and str(path) in ran.stderr, ran.stderr


def test_a_home_that_is_no_folder_stops_nothing(tmp_path: Path) -> None:
    ran = used(tmp_path, {"HOME": "/dev/null", "XDG_CONFIG_HOME": None, "XDG_CACHE_HOME": None})
    assert ran.returncode == 0 and "ignored" not in ran.stderr, ran.stderr


def test_a_checkout_that_is_not_built_says_so(tmp_path: Path) -> None:
    package = Path(deuteron.__file__).parent
    shutil.copytree(package, tmp_path / "deuteron", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    ran = subprocess.run([sys.executable, "-c", "import deuteron"], cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert ran.returncode == 1 and "ImportError: the compiled part of deuteron is missing: `pip install ./python`" in ran.stderr

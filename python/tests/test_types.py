"""The types of the package: the stubs are those of the native module, and a user's code is checked."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import deuteron

pytest.importorskip("mypy")

FOLDER = Path(deuteron.__file__).resolve().parents[1]

USER = """
import deuteron
from deuteron import Array, Program


def use(x: object, w: object) -> None:
    y = deuteron.norm_act(x, w, act="silu", eps=1e-6)
    normed, s = deuteron.add_norm(x, y, w)
    q, k, v = deuteron.qkv(x, w, w, heads=12, key_heads=4)
    z = deuteron.attention(q, k, v, mask="causal", p=0.1, seed=3, training=True)
    deuteron.softmax(z, scale=0.125, mask=x)
    program = Program("act act=gelu")
    names: tuple[str, ...] = program.operands
    results = program.forward([x])
    is_one: bool = program.differentiable
    print(names, results, is_one, normed, s, deuteron.__version__.upper())


def shape(array: Array) -> tuple[int, ...]:
    return array.shape


@deuteron.fuse
def gated(x: Array, factor: float = 1.0) -> Array:
    return x


@deuteron.fuse(name="again")
def again(x: Array) -> tuple[Array, int]:
    return x, 1


def fused(x: Array) -> int:
    y: Array = gated(x, factor=2.0)
    return again(y)[1]
"""

WRONG = """
import deuteron

deuteron.act()  # E
deuteron.act(1, act=3)  # E
deuteron.bias_dropout_add(1, 2, 3, p="high")  # E
deuteron.act(1, act="tanh")  # E
deuteron.layer_norm(1)  # E
deuteron.add_norm(1, 2, 3, norm="batch")  # E
deuteron.attention_add_norm(1, 2, 3, 4, 5, mask="diagonal")  # E
deuteron.attention(1, 2, 3, causal=True)  # E
deuteron.linear_cross_entropy(1, 2, 3, reduction="max")  # E
deuteron.linear_cross_entropy(1, 2, 3, z_loss="much")  # E
deuteron.Program(3)  # E
deuteron.Program("act act=gelu").shape  # E


@deuteron.fuse
def gated(x: int, factor: float = 1.0) -> int:
    return x


gated(1, factor="two")  # E
gated()  # E
gated(1).shape  # E
"""


# Torch is not looked at: that would take minutes.
CONFIGURATION = """
[mypy]
strict = true
ignore_missing_imports = true
[mypy-torch.*,transformers.*,numpy.*]
follow_imports = skip
"""


def check(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a module of Python. A package that is installed is found from anywhere; of its folder, mypy would take all for sources."""
    environment, folder = dict(os.environ), FOLDER
    if "site-packages" in FOLDER.parts:
        folder = Path(tempfile.gettempdir())
    else:
        environment.update(PYTHONPATH=str(FOLDER), MYPYPATH=str(FOLDER))
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, encoding="utf-8", env=environment, timeout=300, cwd=folder
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, so that what mypy has learnt is kept."""
    made = tmp_path_factory.mktemp("types")
    (made / "mypy.ini").write_text(CONFIGURATION)
    return made


def on(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Mypy over a file of a user."""
    (folder / "user.py").write_text(text)
    options = ["--config-file", str(folder / "mypy.ini"), "--cache-dir", str(folder / "cache"), "--no-error-summary"]
    return check("mypy", *options, "--follow-imports=silent", str(folder / "user.py"))


def test_code_of_users_is_well_typed(folder: Path) -> None:
    ran = on(folder, USER)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_mistakes_of_users_are_found(folder: Path) -> None:
    ran = on(folder, WRONG)
    found = {int(line.split(":")[1]) for line in ran.stdout.splitlines() if ": error:" in line}
    expected = {number for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# E")}
    assert found == expected, ran.stdout + ran.stderr


def test_the_stubs_are_those_of_the_module(folder: Path) -> None:
    # The stubs alone are looked at: mistakes of other modules are not theirs.
    alone = folder / "stubs.ini"
    alone.write_text(CONFIGURATION.replace("strict = true", "ignore_errors = true"))
    ran = check("mypy.stubtest", "--mypy-config-file", str(alone), "deuteron._native")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_package_says_that_it_is_typed() -> None:
    assert (FOLDER / "deuteron" / "py.typed").is_file()

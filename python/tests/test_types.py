"""The types of the package: the stubs are those of the native module, and a user's code is checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable, Mapping, Sequence

import pytest

import deuteron

pytest.importorskip("mypy")

FOLDER = Path(deuteron.__file__).resolve().parents[1]

USER = """
import deuteron
import numpy
import torch
from deuteron import Array, Program


def use(x: torch.Tensor, w: torch.nn.Parameter) -> torch.Tensor:
    y: torch.Tensor = deuteron.norm_act(x, w, act="silu", eps=1e-6)
    normed, s = deuteron.add_norm(x, y, w)
    q, k, v = deuteron.qkv(x, w, w, heads=12, key_heads=4)
    z = deuteron.attention(q, k, v, mask="causal", p=0.1, seed=3, training=True)
    program = Program("act act=gelu")
    names: tuple[str, ...] = program.operands
    results = program.forward([x])
    is_one: bool = program.differentiable
    print(names, results, is_one, normed.requires_grad, s, deuteron.__version__.upper())
    return deuteron.softmax(z, scale=0.125, mask=x)


def arrays(x: "numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.float32]]") -> "numpy.ndarray[object, object]":
    return deuteron.softmax(deuteron.swiglu(x), mask="causal")


def own(array: Array) -> tuple[int, ...]:
    return deuteron.act(array).shape


class Other:
    def __dlpack__(self) -> object:
        return None

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def others(x: Other) -> object:
    return deuteron.add_norm(x, x, x)[0].__dlpack__()


@deuteron.fuse
def gated(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return deuteron.act(x)


@deuteron.fuse(name="again")
def again(x: Array) -> tuple[Array, int]:
    return x, 1


def fused(x: torch.Tensor, y: Array) -> int:
    z: torch.Tensor = gated(x, factor=2.0)
    return again(y)[1] + int(z.requires_grad)
"""

WRONG = """
import deuteron
import numpy
import torch


def wrong(x: torch.Tensor, a: "numpy.ndarray[object, object]") -> None:
    deuteron.act()  # E
    deuteron.act(1)  # E
    deuteron.act([1.0, 2.0])  # E
    deuteron.act(x, act=3)  # E
    deuteron.act(x, act="tanh")  # E
    deuteron.act(x).no_such_thing  # E
    deuteron.act(a).requires_grad  # E
    deuteron.softmax(x).argmax_of_numpy  # E
    deuteron.bias_dropout_add(x, x, x, p="high")  # E
    deuteron.layer_norm(x)  # E
    deuteron.layer_norm(x, "ones")  # E
    deuteron.add_norm(x, x, x, norm="batch")  # E
    deuteron.add_norm(x, x, x).requires_grad  # E
    deuteron.attention_add_norm(x, x, x, x, x, mask="diagonal")  # E
    deuteron.attention(x, x, x, causal=True)  # E
    deuteron.softmax(x, mask=3)  # E
    deuteron.linear_cross_entropy(x, x, x, reduction="max")  # E
    deuteron.linear_cross_entropy(x, x, x, z_loss="much")  # E
    deuteron.Program(3)  # E
    deuteron.Program("act act=gelu").shape  # E


@deuteron.fuse
def gated(x: int, factor: float = 1.0) -> int:
    return x


gated(1, factor="two")  # E
gated()  # E
gated(1).shape  # E
"""

# The types of torch and numpy as far as these files use them: their own would take minutes.
STUBS = {
    "torch/__init__.pyi": """
from typing import Any
from . import nn as nn
class Tensor:
    requires_grad: bool
    def __dlpack__(self, *, stream: Any = ..., copy: bool = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
""",
    "torch/nn.pyi": """
from . import Tensor
class Parameter(Tensor): ...
""",
    "numpy/__init__.pyi": """
from typing import Any, Generic, TypeVar
Sizes = TypeVar("Sizes")
Type = TypeVar("Type", covariant=True)
class float32: ...
class dtype(Generic[Type]): ...
class ndarray(Generic[Sizes, Type]):
    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
""",
}


CONFIGURATION = """
[mypy]
strict = true
ignore_missing_imports = true
[mypy-transformers.*]
follow_imports = skip
"""


def check(*words: str, stubs: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a module of Python. A package that is installed is found from anywhere; of its folder, mypy would take all for sources."""
    environment, folder, found = dict(os.environ), FOLDER, [str(stub) for stub in stubs]
    if "site-packages" in FOLDER.parts:
        folder = Path(tempfile.gettempdir())
    else:
        found.append(str(FOLDER))
        environment.update(PYTHONPATH=os.pathsep.join([*filter(None, sys.path), str(FOLDER)]))
    environment.update(MYPYPATH=os.pathsep.join(found))
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, encoding="utf-8", env=environment, timeout=300, cwd=folder
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, so that what mypy has learnt is kept."""
    made = tmp_path_factory.mktemp("types")
    (made / "mypy.ini").write_text(CONFIGURATION)
    for name, text in STUBS.items():
        (made / "stubs" / name).parent.mkdir(parents=True, exist_ok=True)
        (made / "stubs" / name).write_text(text)
    return made


def mypy(folder: Path, text: str) -> Mapping[int, str]:
    """What mypy finds in a file of a user: messages by line."""
    (folder / "user.py").write_text(text)
    options = ["--config-file", str(folder / "mypy.ini"), "--cache-dir", str(folder / "cache"), "--no-error-summary"]
    ran = check("mypy", *options, "--follow-imports=silent", str(folder / "user.py"), stubs=[folder / "stubs"])
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return {int(line.split(":")[1]): line for line in ran.stdout.splitlines() if ": error:" in line}


def pyright(folder: Path, text: str) -> Mapping[int, str]:
    """The same of pyright, by a build of it that brings Node along: pyright's own package downloads both when it is first run."""
    pytest.importorskip("basedpyright")
    (folder / "user.py").write_text(text)
    paths = [str(folder / "stubs"), *([] if "site-packages" in FOLDER.parts else [str(FOLDER)])]
    settings = {"include": ["user.py"], "extraPaths": paths, "stubPath": str(folder / "stubs"), "typeCheckingMode": "standard"}
    # An attribute that is looked up and not used is no mistake of types.
    (folder / "pyrightconfig.json").write_text(json.dumps({**settings, "reportUnusedExpression": False}))
    ran = check("basedpyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(folder))
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    found = json.loads(ran.stdout)["generalDiagnostics"]
    return {one["range"]["start"]["line"] + 1: one["message"] for one in found if one["severity"] == "error"}


CHECKERS = [mypy, pyright]


@pytest.mark.parametrize("checker", CHECKERS)
def test_code_of_users_is_well_typed(checker: Callable[[Path, str], Mapping[int, str]], folder: Path) -> None:
    assert checker(folder, USER) == {}


@pytest.mark.parametrize("checker", CHECKERS)
def test_mistakes_of_users_are_found(checker: Callable[[Path, str], Mapping[int, str]], folder: Path) -> None:
    found = checker(folder, WRONG)
    expected = {number for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# E")}
    assert set(found) == expected, found


def test_the_stubs_are_those_of_the_module(folder: Path) -> None:
    # The stubs alone are looked at: mistakes of other modules are not theirs.
    alone = folder / "stubs.ini"
    skipped = "[mypy-torch.*,numpy.*]\nfollow_imports = skip\n"
    alone.write_text(CONFIGURATION.replace("strict = true", "ignore_errors = true") + skipped)
    ran = check("mypy.stubtest", "--mypy-config-file", str(alone), "deuteron._native")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_package_says_that_it_is_typed() -> None:
    assert (FOLDER / "deuteron" / "py.typed").is_file()

"""States: memory of the caller that a program writes to in place, and what it refuses to write to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest

from deuteron._native import Program

BATCH, HEADS, CAPACITY, WIDTH = 2, 3, 8, 4
SHAPE = (BATCH, HEADS, CAPACITY, WIDTH)

TEXT = f"""
cache = input f32[{BATCH},{HEADS},{CAPACITY},{WIDTH}]
rows = input f32[{BATCH},{HEADS},1,{WIDTH}]
positions = input i32[{BATCH}]
kept = append cache rows positions batch=0
out kept
"""

TWO = f"""
keys = input f32[{BATCH},{HEADS},{CAPACITY},{WIDTH}]
values = input f32[{BATCH},{HEADS},{CAPACITY},{WIDTH}]
rows = input f32[{BATCH},{HEADS},1,{WIDTH}]
positions = input i32[{BATCH}]
k_kept = append keys rows positions batch=0
v_kept = append values rows positions batch=0
out k_kept v_kept
"""


def given() -> Tuple[Any, Any]:
    """Rows to append, and where: to the third place of each sequence."""
    rows = np.random.rand(BATCH, HEADS, 1, WIDTH).astype(np.float32)
    return rows, np.full(BATCH, 2, np.int32)


def appended(rows: Any) -> Any:
    expected = np.zeros(SHAPE, np.float32)
    expected[:, :, 2:3] = rows
    return expected


class Shared:
    """Memory of a NumPy array that is reached by DLPack alone."""

    def __init__(self, array: Any, versions: bool = True) -> None:
        self.array = array
        self.versions = versions

    def __dlpack__(self, **options: Any) -> Any:
        if options and not self.versions:
            raise TypeError("no options")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def has_versions() -> bool:
    """Whether NumPy's capsules say whether memory may be written to."""
    return tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 1)


@pytest.mark.parametrize("wrap", [lambda array: array, Shared, lambda array: Shared(array, versions=False)])
def test_a_state_is_updated_in_place(wrap: Callable[[Any], Any]) -> None:
    cache, (rows, positions) = np.zeros(SHAPE, np.float32), given()
    Program(TEXT, states=["cache"]).forward([wrap(cache), rows, positions])
    assert np.array_equal(cache, appended(rows))


def of_bytes(path: Path) -> Any:
    return np.frombuffer(bytes(4 * int(np.prod(SHAPE))), np.float32).reshape(SHAPE)


def of_file(path: Path) -> Any:
    np.zeros(SHAPE, np.float32).tofile(path)
    return np.memmap(path, np.float32, mode="r", shape=SHAPE)


def flagged(path: Path) -> Any:
    cache = np.zeros(SHAPE, np.float32)
    cache.flags.writeable = False
    return cache


READ_ONLY = [of_bytes, of_file, flagged]


@pytest.mark.parametrize("make", READ_ONLY)
def test_read_only_memory_is_refused(make: Callable[[Path], Any], tmp_path: Path) -> None:
    cache, (rows, positions) = make(tmp_path / "cache"), given()
    with pytest.raises(ValueError, match="`cache`: expected a state that is writable.*read-only.*copy"):
        Program(TEXT, states=["cache"]).forward([cache, rows, positions])
    assert not cache.any()


@pytest.mark.parametrize("make", READ_ONLY)
@pytest.mark.parametrize("versions", [True, False])
def test_read_only_memory_is_refused_by_dlpack(make: Callable[[Path], Any], versions: bool, tmp_path: Path) -> None:
    cache, (rows, positions) = make(tmp_path / "cache"), given()
    got = "read-only" if versions and has_versions() else "refuses"
    with pytest.raises(ValueError, match=f"`cache`: expected a state that is writable.*{got}.*copy"):
        Program(TEXT, states=["cache"]).forward([Shared(cache, versions), rows, positions])
    assert not cache.any()


def test_read_only_operands_are_read() -> None:
    cache, (rows, positions) = np.zeros(SHAPE, np.float32), given()
    rows.flags.writeable = positions.flags.writeable = False
    Program(TEXT, states=["cache"]).forward([cache, rows, positions])
    assert np.array_equal(cache, appended(rows))


LAYOUTS: Dict[str, Callable[[], Any]] = {
    "Fortran order": lambda: np.zeros(SHAPE, np.float32, order="F"),
    "transposed": lambda: np.zeros((BATCH, CAPACITY, HEADS, WIDTH), np.float32).transpose(0, 2, 1, 3),
    "a part": lambda: np.zeros((BATCH, HEADS, 2 * CAPACITY, WIDTH), np.float32)[:, :, :CAPACITY],
    "every other": lambda: np.zeros((BATCH, HEADS, CAPACITY, 2 * WIDTH), np.float32)[..., ::2],
    "backwards": lambda: np.zeros(SHAPE, np.float32)[::-1],
    "broadcast": lambda: np.lib.stride_tricks.as_strided(np.zeros(WIDTH, np.float32), SHAPE, (0, 0, 0, 4)),
    "other byte order": lambda: np.zeros(SHAPE, np.dtype(np.float32).newbyteorder()),
    "unaligned": lambda: np.frombuffer(bytearray(4 * int(np.prod(SHAPE)) + 1), np.float32, offset=1).reshape(SHAPE),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layouts_that_would_lose_the_update_are_refused(layout: str) -> None:
    cache, (rows, positions) = LAYOUTS[layout](), given()
    with pytest.raises(ValueError, match="`cache`: expected a state that is C-contiguous.*strides.*copy"):
        Program(TEXT, states=["cache"]).forward([cache, rows, positions])
    assert not cache.any()


def test_strided_memory_is_refused_by_dlpack() -> None:
    cache, (rows, positions) = LAYOUTS["a part"](), given()
    with pytest.raises(ValueError, match="`cache`: expected a state that is C-contiguous"):
        Program(TEXT, states=["cache"]).forward([Shared(cache), rows, positions])
    assert not cache.any()


def test_doubles_are_refused() -> None:
    rows, positions = given()
    with pytest.raises(ValueError, match="`cache`: expected a state of a dtype.*float64"):
        Program(TEXT, states=["cache"]).forward([np.zeros(SHAPE), rows.astype(np.float64), positions])


@pytest.mark.parametrize("wrap", [lambda array: array, Shared])
def test_states_that_share_memory_are_refused(wrap: Callable[[Any], Any]) -> None:
    (rows, positions), program = given(), Program(TWO, states=["keys", "values"])
    elements = int(np.prod(SHAPE))
    buffer = np.zeros(2 * elements, np.float32)
    keys = buffer[:elements].reshape(SHAPE)
    for values in [keys, buffer[elements - 1 : -1].reshape(SHAPE)]:
        with pytest.raises(ValueError, match="state `keys` in memory of its own.*overlaps `values`.*copy"):
            program.forward([wrap(keys), wrap(values), rows, positions])
    assert not buffer.any()
    # Side by side is no overlap.
    program.forward([wrap(keys), wrap(buffer[elements:].reshape(SHAPE)), rows, positions])
    assert np.array_equal(buffer, np.tile(appended(rows).ravel(), 2))


def test_a_state_that_is_an_operand_too_is_refused() -> None:
    cache, (_, positions) = np.zeros(SHAPE, np.float32), given()
    with pytest.raises(ValueError, match="state `cache` in memory of its own.*overlaps `rows`.*copy"):
        Program(TEXT, states=["cache"]).forward([cache, cache[:, :, :1], positions])
    assert not cache.any()


@pytest.mark.parametrize("states", [["keys", "keys"], ["keys", "values", "keys"]])
def test_a_state_that_is_named_twice_is_refused(states: List[str]) -> None:
    with pytest.raises(ValueError, match="expected each state once, got `keys` twice"):
        Program(TWO, states=states)


def test_ops_have_no_states() -> None:
    with pytest.raises(ValueError, match="expected no states, as an op has none, got `x`"):
        Program("norm_act norm=layer act=gelu eps=1e-05", states=["x"])


def test_tensors_of_torch_are_states_under_the_same_rules() -> None:
    torch = pytest.importorskip("torch")
    rows, positions = (torch.from_numpy(array) for array in given())
    one, two = Program(TEXT, states=["cache"]), Program(TWO, states=["keys", "values"])
    cache = torch.zeros(SHAPE)
    one(cache, rows, positions)
    assert np.array_equal(cache.numpy(), appended(rows.numpy()))
    lost = [
        torch.zeros(BATCH, CAPACITY, HEADS, WIDTH).transpose(1, 2),
        torch.zeros(BATCH, HEADS, 2 * CAPACITY, WIDTH)[:, :, :CAPACITY],
        torch.zeros(BATCH, HEADS, CAPACITY, 2 * WIDTH)[..., ::2],
        torch.zeros(WIDTH).expand(SHAPE),
        torch.zeros(SHAPE, dtype=torch.int64),
        torch._neg_view(torch.zeros(SHAPE)),
    ]
    for state in lost:
        with pytest.raises(ValueError, match="`cache`: expected a state that is C-contiguous.*strides.*copy"):
            one(state, rows, positions)
        assert not state.any()
    keys = torch.zeros(SHAPE)
    with pytest.raises(ValueError, match="state `keys` in memory of its own.*overlaps `values`"):
        two(keys, keys.view(SHAPE), rows, positions)
    with pytest.raises(ValueError, match="state `cache` in memory of its own.*overlaps `rows`"):
        one(keys, keys[:, :, :1], positions)
    assert not keys.any()

"""Elements beyond 2^31, and bytes beyond 2^32, are where they should be.

NumPy's zeros take no memory until they are written to, so a table of five gigabytes of which a few rows are touched takes a few pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deuteron._native import Program

# Of four columns of two bytes each: 2.4e9 elements, 4.8e9 bytes.
ROWS = 600_000_000
# Of two rows: the second one begins behind 2^31 elements and 2^32 bytes.
LENGTH = 2_400_000_000


def sparse(*shape: int) -> Any:
    try:
        return np.zeros(shape, np.float16)
    except MemoryError:
        pytest.skip(f"this machine does not lend {np.prod(shape) * 2} bytes of addresses")


def normal(*shape: int) -> Any:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float16)


def run(text: str, *operands: Any) -> Any:
    (result,) = Program(text)(*operands)
    return result.astype(np.float64)


def near(got: Any, expected: Any) -> None:
    """Within two roundings to 16 bits of the largest element."""
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 2 * 2.0**-11 * np.abs(expected).max()


def test_rows_are_gathered() -> None:
    table, indices = sparse(ROWS, 4), np.array([ROWS - 1, 2**29, 2**29 + 1, 0, 7], np.int32)
    rows = normal(5, 4)
    table[indices] = rows
    got = run(f"t = input f16[{ROWS},4] ; i = input i32[5] ; y = gather t i ; z = neg y ; out z", table, indices)
    assert np.array_equal(got, -rows.astype(np.float64))


def test_the_last_rows_are_sliced() -> None:
    table, rows = sparse(ROWS, 4), normal(3, 4)
    table[-3:] = rows
    got = run(f"t = input f16[{ROWS},4] ; s = slice t axis=0 start={ROWS - 3} length=3 ; y = abs s ; out y", table)
    assert np.array_equal(got, np.abs(rows).astype(np.float64))


def far(cols: int) -> Any:
    """Two rows, each with numbers in its last columns, and these numbers."""
    long, rows = sparse(2, LENGTH), normal(2, cols)
    long[:, -cols:] = rows
    return long, rows.astype(np.float64)


def ends(cols: int) -> str:
    return f"x = input f16[2,{LENGTH}] ; s = slice x axis=1 start={LENGTH - cols} length={cols} ; "


def test_rows_far_apart_are_normed() -> None:
    long, rows = far(65)
    weight = normal(65)
    centred = rows - rows.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * weight.astype(np.float64)
    text = ends(65) + "w = input f16[65] ; b = input f16[65] ; y, mean, rstd = layer_norm s w b ; out y"
    near(run(text, long, weight, np.zeros(65, np.float16)), expected)


def test_rows_far_apart_have_a_softmax() -> None:
    long, rows = far(33)
    powers = np.exp(rows - rows.max(axis=1, keepdims=True))
    near(run(ends(33) + "y = softmax s ; out y", long), powers / powers.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("side", ["left", "right", "batch"])
def test_operands_of_a_matmul_far_apart(side: str) -> None:
    long, rows = far(64)
    if side == "left":
        other = normal(64, 5)
        got = run(ends(64) + "w = input f16[64,5] ; y = matmul s w ; out y", long, other)
        near(got, rows @ other.astype(np.float64))
    elif side == "right":
        other = normal(3, 64)
        got = run(ends(64) + "w = input f16[3,64] ; y = matmul w s transpose_b ; out y", long, other)
        near(got, other.astype(np.float64) @ rows.T)
    else:
        other = normal(2, 5, 16)
        text = ends(64) + "m = reshape s [2,4,16] ; w = input f16[2,5,16] ; y = matmul m w transpose_b ; out y"
        expected = rows.reshape(2, 4, 16) @ other.astype(np.float64).transpose(0, 2, 1)
        near(run(text, long, other), expected)


def test_keys_far_apart_are_attended_to() -> None:
    long, rows = far(3 * 16)
    query = normal(2, 3, 16)
    keys = rows.reshape(2, 3, 16)
    scores = query.astype(np.float64) @ keys.transpose(0, 2, 1) / 4.0
    powers = np.exp(scores - scores.max(axis=2, keepdims=True))
    expected = powers / powers.sum(axis=2, keepdims=True) @ keys
    text = ends(48) + "k = reshape s [2,3,16] ; q = input f16[2,3,16] ; y = attention q k k scale=0.25 ; out y"
    near(run(text, long, query), expected)


def test_a_row_is_appended_to_a_long_cache() -> None:
    cache, rows = sparse(1, ROWS, 4), normal(1, 1, 4)
    text = f"""
    cache = input f16[1,{ROWS},4]
    rows = input f16[1,1,4]
    positions = input i32[1]
    kept = append cache rows positions batch=0
    out kept
    """
    Program(text, states=["cache"]).forward([cache, rows, np.array([ROWS - 2], np.int32)])
    assert np.array_equal(cache[0, -3:], np.concatenate([np.zeros((1, 4)), rows[0], np.zeros((1, 4))]))
    assert not cache[0, :3].any()
    assert not cache[0, 2**29 - 2 : 2**29 + 2].any()


def test_an_index_behind_the_table_is_refused() -> None:
    table = sparse(ROWS, 4)
    text = f"t = input f16[{ROWS},4] ; i = input i32[1] ; y = gather t i ; out y"
    with pytest.raises(Exception, match=str(ROWS)):
        Program(text)(table, np.array([ROWS], np.int32))


def test_results_that_no_memory_holds_are_refused() -> None:
    text = f"x = input f32[1] ; y = broadcast x [{2**42},{2**18}] ; z = exp y ; out z"
    with pytest.raises(Exception, match="memory|large|bytes"):
        Program(text)(np.ones(1, np.float32))

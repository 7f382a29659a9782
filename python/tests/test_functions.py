"""The functions over arrays of NumPy and objects with `__dlpack__`, and the package without torch."""

from __future__ import annotations

import doctest
import gc
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest

import deuteron
from cases import (
    CASES,
    EPSILON,
    HEADS,
    Numpy,
    Size,
    case_sizes,
    check,
    check_exact,
    kept,
    listed,
    operands,
    rounded,
    terms,
)
from deuteron._native import Program

FOLDER = Path(deuteron.__file__).resolve().parents[1]


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def doubled(arrays: List[Any]) -> List[Any]:
    return [array.astype("float64") if array.dtype.kind == "f" else array for array in arrays]


# Values.


def test_every_op_is_among_the_cases() -> None:
    assert {case.op for case in CASES.values()} == set(deuteron.functions.__all__)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("name, size", case_sizes())
def test_values_are_those_of_the_formula(name: str, size: Size, dtype: str) -> None:
    case = CASES[name]
    given = rounded(operands(case, size), dtype)
    before = [array.copy() for array in given]
    got = listed(case.call(*given))
    exact = listed(case.plain(Numpy, *doubled(given)))
    own = listed(case.plain(Numpy, *given))
    assert len(got) == len(exact)
    for index, (one, plain, expected) in enumerate(zip(got, own, exact)):
        assert type(one) is np.ndarray
        assert one.dtype in (np.dtype(dtype), np.dtype("int8"), np.dtype("float32"))
        if dtype == "float64":
            check_exact(one, expected, terms(size), f"result {index}")
        else:
            check(one, plain, expected, dtype, terms(size), name=f"result {index}")
    assert all(np.array_equal(a, b) for a, b in zip(given, before)), "an operand was written to"


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.sizes is not HEADS and "cross_entropy" not in name]
)
def test_no_rows_give_no_rows(name: str, dtype: str) -> None:
    case = CASES[name]
    given = rounded(operands(case, (0, 7)), dtype)
    got, exact = listed(case.call(*given)), listed(case.plain(Numpy, *doubled(given)))
    assert [one.shape for one in got] == [one.shape for one in exact]
    assert any(one.size == 0 for one in got)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_no_batch_attends_to_nothing(dtype: str) -> None:
    nothing, weights = normal(0, 2, 5, 8, dtype=dtype), normal(16, dtype=dtype)
    assert deuteron.attention(nothing, nothing, nothing).shape == (0, 2, 5, 8)
    assert deuteron.attention_scores(nothing, nothing).shape == (0, 2, 5, 5)
    y, s = deuteron.attention_add_norm(nothing, nothing, nothing, normal(0, 5, 16, dtype=dtype), weights, weights)
    assert y.shape == s.shape == (0, 5, 16)


def test_no_columns() -> None:
    assert deuteron.act(normal(3, 0)).shape == (3, 0)
    assert deuteron.linear_act(normal(3, 0), normal(0, 4), normal(4), act="relu").shape == (3, 4)
    assert deuteron.linear_act(normal(3, 4), normal(4, 0), normal(0)).shape == (3, 0)


def test_one_number_and_one_row() -> None:
    number, row = np.asarray(2.0, dtype="float32"), normal(7)
    assert deuteron.act(number, act="relu").shape == () and deuteron.act(number, act="relu") == 2.0
    assert np.array_equal(deuteron.act(row, act="relu"), np.maximum(row, 0))


def test_weights_may_be_of_another_dtype_than_rows() -> None:
    x, w, b = normal(5, 129, dtype="float16"), normal(129, seed=1), normal(129, seed=2)
    got = deuteron.layer_norm(x, w, b)
    exact = Numpy.norm(*doubled([x, w, b]))
    assert got.dtype == np.float16
    check(got, exact.astype("float16"), exact, "float16", 129)


def test_epsilon_and_scale_are_used() -> None:
    x, w = normal(3, 16), np.ones(16, "float32")
    exact = Numpy.norm(*doubled([x, w]), eps=0.5)
    assert np.allclose(deuteron.rms_norm(x, w, eps=0.5), exact, rtol=1e-6)
    q = normal(2, 5, 16)
    usual, given = deuteron.attention_scores(q, q, "full"), deuteron.attention_scores(q, q, "full", scale=0.25)
    assert np.array_equal(usual, given), "the scale is 1 / sqrt(features)"
    assert np.allclose(deuteron.softmax(q, scale=0.5), deuteron.softmax(q * np.float32(0.5)), atol=1e-7)


def test_a_mask_by_its_word() -> None:
    q = normal(1, 2, 5, 8)
    assert np.array_equal(deuteron.attention(q, q, q, mask=None), deuteron.attention(q, q, q, mask="full"))
    hidden = np.where(np.tri(5, dtype=bool), 0.0, -np.inf).astype("float32")
    causal, added = deuteron.attention(q, q, q), deuteron.attention(q, q, q, mask=hidden)
    assert np.allclose(causal, added, atol=1e-6)
    assert np.allclose(causal[:, :, 0], q[:, :, 0], atol=1e-6), "the first position sees itself alone"


# Memory: any strides, and results of their own.


def layouts(x: Any) -> Dict[str, Any]:
    """The same elements `[a, b, c]` in memory in many ways."""
    a, b, c = x.shape
    wide = np.zeros((a, b, 2 * c), x.dtype)
    wide[..., ::2] = x
    padded = np.zeros((a, b + 3, c + 5), x.dtype)
    padded[:, 1 : b + 1, 2 : c + 2] = x
    raw = np.zeros(x.nbytes + 1, "uint8")
    shifted = raw[1:].view(x.dtype).reshape(x.shape)
    shifted[...] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    return {
        "columns apart": wide[..., ::2],
        "rows apart": padded[:, 1 : b + 1, 2 : c + 2],
        "transposed": np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2),
        "columns first": np.asfortranarray(x),
        "backwards": np.ascontiguousarray(x[:, ::-1])[:, ::-1],
        "columns backwards": np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        "odd addresses": shifted,
        "read only": frozen,
    }


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("how", list(layouts(np.zeros((1, 1, 1)))))
def test_strides(how: str, dtype: str) -> None:
    x, w, b = normal(3, 5, 33, dtype=dtype), normal(33, dtype=dtype, seed=1), normal(33, dtype=dtype, seed=2)
    strided = layouts(x)[how]
    assert np.array_equal(strided, x)
    assert np.array_equal(deuteron.norm_act(strided, w, b), deuteron.norm_act(x, w, b))
    pairs = zip(deuteron.add_norm(strided, x, w, b), deuteron.add_norm(x, x, w, b))
    assert all(np.array_equal(got, expected) for got, expected in pairs)
    weight = normal(33, 9, dtype=dtype)
    for given in (weight, np.asfortranarray(weight)):
        expected = deuteron.linear_act(x, weight, weight[0].copy()).astype("float64")
        # Another layout may be another order of sums.
        error = np.abs(deuteron.linear_act(strided, given, weight[0]) - expected).max()
        assert error <= 2 * EPSILON[dtype] * np.abs(expected).max()


def test_repeated_elements() -> None:
    row = normal(1, 33)
    for x in (np.broadcast_to(row, (7, 33)), np.broadcast_to(row[:, :1], (7, 33))):
        assert np.array_equal(deuteron.softmax(x, mask="causal"), deuteron.softmax(x.copy(), mask="causal"))


def test_bytes_of_another_order() -> None:
    x = normal(3, 5)
    assert np.array_equal(deuteron.act(x.astype(">f4")), deuteron.act(x))


def test_results_are_new() -> None:
    x = normal(4, 8)
    y, s = deuteron.add_norm(x, x, x[0], x[1])
    for one in (y, s):
        assert one.flags.c_contiguous and one.flags.writeable and one.base is None
        assert not np.shares_memory(one, x)
    assert not np.shares_memory(y, s)
    z = deuteron.act_dropout(x, p=0.5, training=False, act="relu")
    assert not np.shares_memory(z, x)


def test_queries_keys_and_values_are_views_of_one_array() -> None:
    q, k, v = deuteron.qkv(normal(2, 5, 8), normal(8, 24), normal(24), heads=2)
    assert q.shape == k.shape == v.shape == (2, 2, 5, 4)
    assert q.base is not None and q.base is k.base is v.base


# Tokens.


def test_tokens_of_64_bits() -> None:
    tokens = np.array([[3, 0, 4], [1, 1, 2]])
    tables = normal(5, 16), normal(9, 16, seed=1), np.ones(16, "float32")
    assert tokens.dtype == np.int64
    for one, other in zip(deuteron.embed_norm(tokens, *tables), deuteron.embed_norm(tokens.astype("int32"), *tables)):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("token", [-1, 5, 2**31 - 1, 2**32])
def test_a_token_that_is_not_in_the_table(token: int, dtype: str) -> None:
    table, w = normal(5, 8, dtype=dtype), normal(8, dtype=dtype)
    with pytest.raises(IndexError, match="embed_norm.*" + ("" if token >= 2**31 else str(token))):
        deuteron.embed_norm(np.array([[0, token]]), table, table, w)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("target", [-1, 5, -100])
def test_a_target_that_is_no_class(target: int, dtype: str) -> None:
    x, weight = normal(2, 8, dtype=dtype), normal(5, 8, dtype=dtype)
    with pytest.raises(IndexError, match="linear_cross_entropy"):
        deuteron.linear_cross_entropy(x, weight, np.array([1, target]))


def test_an_expert_that_is_not_there() -> None:
    x, weight = np.zeros((2, 4), "int8"), np.zeros((3, 5, 4), "int8")
    scales = np.ones((2, 1), "float32"), np.ones((3, 5), "float32")
    with pytest.raises(IndexError, match="moe_int8"):
        deuteron.moe_int8(x, scales[0], np.array([0, 3]), weight, scales[1], normal(3, 5))


def test_a_float_expert_that_is_not_there() -> None:
    with pytest.raises(IndexError, match="moe"):
        deuteron.moe(normal(2, 4), np.array([[0, 1], [2, 3]]), normal(3, 5, 4), normal(3, 5), normal(2, 2))


# Dropout.


def test_a_seed_decides_what_is_dropped() -> None:
    x = np.ones((40, 1000), "float32")
    dropped = [deuteron.act_dropout(x, 0.25, seed, act="relu") for seed in (5, 5, 6)]
    assert np.array_equal(dropped[0], dropped[1]) and not np.array_equal(dropped[0], dropped[2])
    expected = kept(x.size, 5, 0.25).reshape(x.shape) / 0.75
    assert np.allclose(dropped[0], expected, rtol=2.0**-22)
    share, deviation = (dropped[0] == 0).mean(), (0.25 * 0.75 / x.size) ** 0.5
    assert abs(share - 0.25) < 5 * deviation


@pytest.mark.parametrize("seed", [0, -1, 2**31 - 1, 2**31, 2**32 + 5, -(2**31), 2**70])
def test_seeds_are_taken_by_their_low_bits(seed: int) -> None:
    x = np.ones((4, 100), "float32")
    low = (seed + 2**31) % 2**32 - 2**31
    expected = deuteron.act_dropout(x, 0.5, np.asarray(low, dtype="int32"), act="relu")
    assert np.array_equal(deuteron.act_dropout(x, 0.5, seed, act="relu"), expected)


def test_without_a_seed_the_generator_of_numpy_draws_one() -> None:
    x = np.ones((4, 100), "float32")
    drawn = []
    for seed in (1, 1, 2):
        np.random.seed(seed)
        drawn.append([deuteron.act_dropout(x, 0.5) for _ in range(2)])
    assert all(np.array_equal(a, b) for a, b in zip(drawn[0], drawn[1]))
    assert not np.array_equal(drawn[0][0], drawn[0][1]) and not np.array_equal(drawn[0][0], drawn[2][0])


def test_nothing_is_dropped_in_evaluation() -> None:
    x, b, w = normal(4, 33), normal(33, seed=1), np.ones(33, "float32")
    assert np.array_equal(deuteron.act_dropout(x, 0.5, training=False), deuteron.act(x))
    assert np.array_equal(deuteron.act_dropout(x, 0.0), deuteron.act(x))
    assert np.array_equal(deuteron.bias_dropout_add(x, b, x, 0.5, training=False), x + b + x)
    assert np.array_equal(deuteron.softmax(x, p=0.5, training=False), deuteron.softmax(x))
    pairs = zip(deuteron.dropout_add_norm(x, b, x, w, p=0.5, training=False), deuteron.add_norm(x + b, x, w))
    assert all(np.allclose(one, other, atol=1e-6) for one, other in pairs)
    q = normal(1, 2, 5, 8)
    assert np.array_equal(deuteron.attention(q, q, q, p=0.5, training=False), deuteron.attention(q, q, q))
    before = np.random.get_state()[2]
    deuteron.act_dropout(x, 0.5, training=False)
    assert np.random.get_state()[2] == before, "no number is drawn"


# Objects of other libraries.


class Dlpack:
    """An object that has nothing but DLPack."""

    def __init__(self, array: Any, device: Tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Tuple[int, int]:
        return self.device


@pytest.mark.parametrize("dtype, word", [("float64", "f64"), ("float32", "f32"), ("float16", "f16")])
def test_objects_with_dlpack(dtype: str, word: str) -> None:
    x, w, b = normal(5, 33, dtype=dtype), normal(33, dtype=dtype), normal(33, dtype=dtype, seed=1)
    got = deuteron.norm_act(Dlpack(x), Dlpack(w), Dlpack(b))
    assert type(got) is deuteron.Array and (got.dtype, got.shape) == (word, (5, 33))
    assert repr(got) == f"deuteron.Array({word}[5,33])" and got.__dlpack_device__() == (1, 0)
    expected = deuteron.norm_act(x, w, b)
    assert np.array_equal(np.from_dlpack(got), expected)
    # Results are operands, beside any others; the first says what results are.
    again = deuteron.add_act(got, x)
    assert type(again) is deuteron.Array
    assert np.array_equal(np.from_dlpack(again), deuteron.add_act(expected, x))
    assert type(deuteron.add_act(x, got)) is np.ndarray


def test_all_results_of_dlpack() -> None:
    x, w = normal(5, 33), normal(33)
    q, scale = deuteron.norm_quantize(Dlpack(x), w)
    assert (q.dtype, scale.dtype) == ("i8", "f32")
    expected = deuteron.norm_quantize(x, w)
    assert np.array_equal(np.from_dlpack(q), expected[0]) and np.array_equal(np.from_dlpack(scale), expected[1])


def test_rows_of_dlpack_may_be_apart() -> None:
    x = normal(7, 40)[::2, 3:36]
    assert np.array_equal(np.from_dlpack(deuteron.act(Dlpack(x))), deuteron.act(x))


def test_memory_of_dlpack_lives_as_long_as_it_is_used() -> None:
    x = normal(64, 64)
    before = sys.getrefcount(x)
    view = np.from_dlpack(deuteron.act(Dlpack(x)))
    for _ in range(20):
        deuteron.act(Dlpack(x))
    gc.collect()
    assert sys.getrefcount(x) == before, "an operand is not kept"
    assert np.array_equal(view, deuteron.act(x)), "a result lives in its views"


def test_no_rows_of_dlpack() -> None:
    assert deuteron.act(Dlpack(normal(0, 4))).shape == (0, 4)


# Misuse. Each message begins with the op and says what was expected.


class OfDlpack:
    """An object whose DLPack is not one."""

    def __init__(self, given: Any, device: Any = (1, 0)) -> None:
        self.given, self.device = given, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.given

    def __dlpack_device__(self) -> Any:
        return self.device


X, ROW = normal(3, 4), normal(4)
HEAD, LONGER = normal(1, 2, 3, 4), normal(1, 2, 5, 4)

WRONG: Dict[str, Tuple[Callable[[], Any], type, str]] = {
    "list": (lambda: deuteron.act([1.0]), TypeError, "act: `x`: expected a tensor.* got list"),
    "none": (lambda: deuteron.bias_act(X, None), TypeError, "bias_act: `b`: expected a tensor.* got NoneType"),
    "number": (lambda: deuteron.add_act(X, 1.0), TypeError, "add_act: `r`: expected a tensor.* got float"),
    "word": (lambda: deuteron.layer_norm("x", ROW, ROW), TypeError, "layer_norm: `x`: expected a tensor.* got str"),
    "q is a list": (lambda: deuteron.attention([1], HEAD, HEAD), TypeError, "attention: `q`: expected a tensor"),
    "k is a list": (lambda: deuteron.attention(HEAD, [1], HEAD), TypeError, "attention: `k`: expected a tensor"),
    "v is a list": (lambda: deuteron.attention(HEAD, HEAD, [1]), TypeError, "attention: `v`: expected a tensor"),
    "scores of a list": (lambda: deuteron.attention_scores([1], [1]), TypeError, "attention_scores: `q`: expected"),
    "qkv of a list": (lambda: deuteron.qkv([1], X, ROW, heads=1), TypeError, "qkv: `x`: expected a tensor"),
    "count": (
        lambda: Program("bias_act act=gelu").forward([X]),
        TypeError,
        r"bias_act: expected 2 operands \(x, b\), got 1",
    ),
    "count of none": (lambda: Program("bias_act act=gelu").forward([]), TypeError, "bias_act: expected 2 operands"),
    "one layer": (lambda: deuteron.ffn(X, normal(4, 4), ROW, normal(4, 4), w=ROW), TypeError, "ffn: expected both"),
    "whole numbers": (lambda: deuteron.act(np.ones((3, 4), "int32")), ValueError, "act: .*expected a float operand"),
    "uint8": (lambda: deuteron.act(np.ones((3, 4), "uint8")), TypeError, "act: `x`: expected float32.* got uint8"),
    "complex": (lambda: deuteron.act(np.ones((3, 4), "complex64")), TypeError, "act: `x`: expected.* got complex64"),
    "objects": (lambda: deuteron.act(np.array([[None]])), TypeError, "act: `x`: expected float32.* got object"),
    "f64 and f32": (
        lambda: deuteron.add_act(X, X.astype("f8")),
        TypeError,
        "add_act: expected all floats to be float64",
    ),
    "f16 and f32": (
        lambda: deuteron.add_act(X, X.astype("f2")),
        ValueError,
        "add_act: .*expected operands of one dtype",
    ),
    "float tokens": (lambda: deuteron.embed_norm(X, X, X, ROW), ValueError, "embed_norm: .*expected i32 indices"),
    "float targets": (
        lambda: deuteron.linear_cross_entropy(X, X, normal(3)),
        ValueError,
        "linear_cross_entropy: .*i32",
    ),
    "float experts": (
        lambda: deuteron.moe_int8(
            X, normal(3, 1), np.zeros(3, "i4"), np.zeros((2, 5, 4), "i1"), normal(2, 5), normal(2, 5)
        ),
        ValueError,
        "moe_int8: .*expected i8 rows",
    ),
    "experts of other rows": (
        lambda: deuteron.moe(X, np.zeros(2, "i4"), normal(2, 5, 4), normal(2, 5)),
        ValueError,
        "moe: .*a row for each expert picked",
    ),
    "shapes": (lambda: deuteron.add_act(X, normal(3, 5)), ValueError, r"add_act: .*expected shapes.* f32\[3,5\]"),
    "weights": (
        lambda: deuteron.layer_norm(X, normal(5), normal(5)),
        ValueError,
        "layer_norm: expected weights of the size",
    ),
    "no axis": (
        lambda: deuteron.layer_norm(normal(), ROW, ROW),
        ValueError,
        "layer_norm: expected a tensor with a last axis",
    ),
    "no column": (lambda: deuteron.softmax(normal(3, 0)), ValueError, "softmax: expected a tensor with a last axis"),
    "inner size": (
        lambda: deuteron.linear_act(X, normal(5, 6), normal(6)),
        ValueError,
        "linear_act: .*expected a weight",
    ),
    "halves": (lambda: deuteron.swiglu(normal(3, 5)), ValueError, "swiglu: .*even number"),
    "halves of geglu": (lambda: deuteron.geglu(normal(3, 5)), ValueError, "geglu: .*even number"),
    "targets": (
        lambda: deuteron.linear_cross_entropy(X, X, np.zeros(2, "i4")),
        ValueError,
        "linear_cross_entropy: .*expected",
    ),
    "no rows": (
        lambda: deuteron.linear_cross_entropy(normal(0, 4), X, np.zeros(0, "i4")),
        ValueError,
        "linear_cross_entropy: rows must be at least 1",
    ),
    "positions": (
        lambda: deuteron.embed_norm(np.zeros((1, 9), "i4"), X, X, ROW),
        ValueError,
        "embed_norm: .*expected a slice within the axis of size 3",
    ),
    "axes": (lambda: deuteron.act(np.ones((1,) * 20, "f4")), (TypeError, ValueError), "act: .*(rank 8|8 axes)"),
    "heads": (lambda: deuteron.attention(normal(1, 3, 4, 4), HEAD, HEAD), ValueError, "attention: expected heads of q"),
    "heads of v": (
        lambda: deuteron.attention(normal(1, 4, 3, 4), HEAD, normal(1, 4, 3, 4)),
        ValueError,
        "attention: .*expected",
    ),
    "features": (lambda: deuteron.attention(HEAD, normal(1, 2, 3, 5), HEAD), ValueError, "attention: expected q"),
    "no keys": (
        lambda: deuteron.attention(HEAD, normal(1, 2, 0, 4), normal(1, 2, 0, 4)),
        ValueError,
        "attention: expected at least one key",
    ),
    "scores of numbers": (
        lambda: deuteron.attention_scores(normal(), normal()),
        ValueError,
        "attention_scores: expected q",
    ),
    "columns of qkv": (
        lambda: deuteron.qkv(normal(1, 3, 4), normal(4, 12), normal(12), 5),
        ValueError,
        "qkv: expected x",
    ),
    "axes of qkv": (lambda: deuteron.qkv(X, normal(4, 12), normal(12), 1), ValueError, r"qkv: expected x \[batch"),
    "no heads": (lambda: deuteron.qkv(normal(1, 3, 4), normal(4, 12), normal(12), 0), ValueError, "qkv: expected x"),
    "half a head": (
        lambda: deuteron.qkv(normal(1, 3, 4), normal(4, 12), normal(12), 1.5),
        TypeError,
        "qkv: expected whole",
    ),
    "p of one": (
        lambda: deuteron.act_dropout(X, 1.0),
        ValueError,
        "act_dropout: expected p of at least 0 and below 1, got 1",
    ),
    "p below zero": (lambda: deuteron.bias_dropout_add(X, ROW, X, -0.1), ValueError, "bias_dropout_add: expected p"),
    "p no number": (
        lambda: deuteron.softmax(X, p=float("nan")),
        ValueError,
        "softmax: expected p of at least 0.* got nan",
    ),
    "p a word": (
        lambda: deuteron.attention(HEAD, HEAD, HEAD, p="0.1"),
        TypeError,
        "attention: expected a number for p",
    ),
    "p a truth": (
        lambda: deuteron.act_dropout_add(X, X, True),
        TypeError,
        "act_dropout_add: expected a number for p, got bool",
    ),
    "p of evaluation": (lambda: deuteron.act_dropout(X, 2.0, training=False), ValueError, "act_dropout: expected p"),
    "seed": (
        lambda: deuteron.act_dropout(X, 0.1, 1.5),
        TypeError,
        "act_dropout: `seed`: expected a tensor.* got float",
    ),
    "seeds": (lambda: deuteron.act_dropout(X, 0.1, np.zeros(3, "i4")), ValueError, "act_dropout: .*one i32 seed"),
    "float seed": (lambda: deuteron.act_dropout(X, 0.1, np.zeros((), "f4")), ValueError, "act_dropout: .*one i32 seed"),
    "act": (lambda: deuteron.act(X, act="tanh"), ValueError, "act: expected act to be gelu .*got 'tanh'"),
    "act of geglu": (lambda: deuteron.geglu(X, X, act="silu"), ValueError, "geglu: expected act to be gelu .* or gelu_tanh"),
    "no act": (lambda: deuteron.norm_act(X, ROW, act=None), ValueError, "norm_act: expected act to be gelu"),
    "two acts": (lambda: deuteron.act(X, act="relu act=gelu"), ValueError, "act: expected act to be"),
    "act of lines": (lambda: deuteron.act(X, act="relu\n"), ValueError, "act: expected act to be"),
    "act a list": (lambda: deuteron.act(X, act=["relu"]), (TypeError, ValueError), "act: expected"),
    "eps": (lambda: deuteron.rms_norm(X, ROW, eps=-1.0), ValueError, "rms_norm: expected eps=NUMBER, at least 0"),
    "eps no number": (lambda: deuteron.rms_norm(X, ROW, eps=float("nan")), ValueError, "rms_norm: expected eps=NUMBER"),
    "eps a word": (
        lambda: deuteron.layer_norm(X, ROW, ROW, eps="small"),
        ValueError,
        "layer_norm: expected eps=NUMBER",
    ),
    "scale": (lambda: deuteron.softmax(X, scale=float("inf")), ValueError, "softmax: expected scale=NUMBER"),
    "mask": (
        lambda: deuteron.softmax(X, mask="diagonal"),
        ValueError,
        "softmax: expected a mask that is None.* 'diagonal'",
    ),
    "mask a list": (lambda: deuteron.softmax(X, mask=[1]), TypeError, "softmax: `mask`: expected a tensor"),
    "mask of numbers": (
        lambda: deuteron.softmax(X, mask=np.ones((3, 4), "i4")),
        TypeError,
        "softmax: `mask`: expected truth values .* got int32",
    ),
    "mask of more keys": (
        lambda: deuteron.attention_add_norm(HEAD, LONGER, LONGER, normal(1, 3, 8), normal(8)),
        ValueError,
        "attention_add_norm: expected as many keys as queries .*causal_from_end",
    ),
    "rms with a bias": (lambda: deuteron.add_norm(X, X, ROW, ROW, norm="rms"), ValueError, "add_norm: expected no `b`"),
    "norm": (lambda: deuteron.add_norm(X, X, ROW, norm="batch"), ValueError, "add_norm: expected norm='layer' or"),
    "mask of a size": (lambda: deuteron.attention(HEAD, HEAD, HEAD, normal(5, 5)), ValueError, "attention: .*expected"),
    "mask of a block": (
        lambda: deuteron.attention_add_norm(HEAD, HEAD, HEAD, normal(1, 3, 8), normal(8), mask=normal(3, 3)),
        TypeError,
        "attention_add_norm: expected a mask that is None, 'full', 'causal' or 'causal_from_end', got ndarray",
    ),
    "another device": (lambda: deuteron.act(Dlpack(X, (2, 0))), TypeError, "act: `x`: expected an array on the CPU"),
    "columns of dlpack": (lambda: deuteron.act(Dlpack(X.T)), TypeError, "act: `x`: expected its last axis"),
    "rows of dlpack": (lambda: deuteron.act(Dlpack(X[::-1])), TypeError, "act: `x`: expected"),
    "int64 of dlpack": (
        lambda: deuteron.act(Dlpack(np.ones((2, 2), "i8"))),
        (TypeError, ValueError),
        "act: .*expected",
    ),
    "no capsule": (lambda: deuteron.act(OfDlpack(5)), (TypeError, ValueError), ".*[cC]apsule"),
    "no device": (lambda: deuteron.act(OfDlpack(X.__dlpack__(), None)), TypeError, ""),
    "a program": (lambda: Program("nothing"), ValueError, ".*(expected|unknown op)"),
    "an attribute": (lambda: Program("layer_norm act=gelu"), ValueError, "layer_norm: expected.* no `act`"),
}


@pytest.mark.parametrize("how", list(WRONG))
def test_misuse_is_told(how: str) -> None:
    call, kind, text = WRONG[how]
    with pytest.raises(kind, match="^" + text):
        call()


def test_a_capsule_that_was_taken_is_refused() -> None:
    capsule = X.__dlpack__()
    taken = np.from_dlpack(OfDlpack(capsule))
    with pytest.raises((TypeError, ValueError)):
        deuteron.act(OfDlpack(capsule))
    assert np.array_equal(taken, X)


def test_after_misuse_all_is_well() -> None:
    expected = deuteron.add_act(X, X)
    for _ in range(3):
        with pytest.raises(ValueError):
            deuteron.add_act(X, normal(3, 5))
        assert np.array_equal(deuteron.add_act(X, X), expected)


# Threads and processes.


def jobs(cols: int) -> List[Tuple[Any, List[Any]]]:
    """Calls of many ops at once, of sizes that no other test has."""
    chosen = [CASES[name] for name in CASES if "-" not in name or name.endswith(("-layer", "causal", "gelu"))]
    return [(case, rounded(operands(case, (6, cols), seed), "float32")) for seed, case in enumerate(chosen)]


def bits(results: Any) -> List[bytes]:
    return [np.ascontiguousarray(one).tobytes() for one in listed(results)]


def test_threads_compute_what_one_does() -> None:
    work = jobs(43)
    start = threading.Barrier(8)

    def run(thread: int) -> List[List[bytes]]:
        start.wait(30)
        # All compile the first one at once; then each goes its own way.
        order = np.random.default_rng(thread).permutation(len(work))
        found = {index: bits(work[index][0].call(*work[index][1])) for index in [0, *order, *order]}
        return [found[index] for index in range(len(work))]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, range(8)))
    alone = [bits(case.call(*given)) for case, given in work]
    assert all(found == alone for found in together)


def wait(child: int, seconds: float = 30.0) -> int:
    """The exit code of a child, which is killed where it takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("a child did not end")


def forked(work: Callable[[], bool]) -> int:
    """A child that ends with 0 where the work gives true."""
    with warnings.catch_warnings():
        # Python warns of forks beside threads: that is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return child


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@needs_fork
def test_a_forked_process_computes() -> None:
    x, w = normal(300, 129), normal(129)
    expected = bits(deuteron.add_norm(x, x, w))

    def right() -> bool:
        return bits(deuteron.add_norm(x, x, w)) == expected and deuteron.act(normal(5, 17)).shape == (5, 17)

    assert wait(forked(right)) == 0
    assert wait(forked(lambda: right() and wait(forked(right)) == 0)) == 0, "and its child"
    assert right(), "and the parent goes on"


@needs_fork
def test_forks_beside_threads_that_compute() -> None:
    x, w = normal(300, 129), normal(129)
    expected = bits(deuteron.rms_norm(x, w))
    over = threading.Event()
    wrong: List[Any] = []

    def loop() -> None:
        size = 0
        while not over.is_set():
            size += 1
            if bits(deuteron.rms_norm(x, w)) != expected:
                wrong.append(size)
            deuteron.act(x[: size % 250 + 1])

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        codes = [wait(forked(lambda: bits(deuteron.rms_norm(x, w)) == expected)) for _ in range(6)]
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert codes == [0] * 6 and not wrong


def rows_of(seed: int) -> bytes:
    return bits(deuteron.softmax(normal(64, 129, seed=seed)))[0]


@needs_fork
def test_a_pool_of_processes() -> None:
    expected = [rows_of(seed) for seed in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map_async(rows_of, range(6)).get(60) == expected


# The package: what an import loads, the command, the examples.


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """Another interpreter with the package."""
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, encoding="utf-8", env=environment, timeout=300, cwd=FOLDER
    )


def test_an_import_loads_little() -> None:
    code = """
import json, sys
def loaded():
    maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
    return [name for name in ("torch", "numpy") if name in sys.modules] + ["libcuda"] * ("libcuda" in maps)
import deuteron
found = {"import": loaded()}
dir(deuteron), deuteron.__version__, deuteron.Program("act act=gelu").operands
found["look"] = loaded()
import numpy
deuteron.norm_act(numpy.ones((3, 4), "float32"), numpy.ones(4, "float32"))
found["call"] = loaded()
print(json.dumps(found))
"""
    ran = python("-c", code)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"import": [], "look": [], "call": ["numpy"]}


def test_names_of_the_package() -> None:
    assert set(deuteron.functions.__all__) < set(dir(deuteron))
    for name in deuteron.functions.__all__:
        assert getattr(deuteron, name) is getattr(deuteron.functions, name) and getattr(deuteron, name).__doc__
    with pytest.raises(AttributeError, match="module 'deuteron' has no attribute 'nothing'"):
        deuteron.nothing
    assert deuteron.__version__.count(".") == 2


def test_the_doctor() -> None:
    report = deuteron.doctor()
    assert report["version"] == deuteron.__version__
    assert report["packages"]["numpy"] == np.__version__
    lines = repr(report).splitlines()
    assert lines[0] == f"deuteron   {deuteron.__version__}"
    assert all(any(line.startswith(word) for line in lines) for word in ("python", "device", "GPUs", "numpy", "torch"))


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["ops"], 0, "linear_cross_entropy"),
        (["--version"], 0, f"deuteron {deuteron.__version__}"),
        (["--help"], 0, "Exit codes: 0 success"),
        (["explain", "E-PLAN-004"], 0, "needs whole rows"),
        ([], 2, "Usage: deuteron"),
        (["nonsense"], 2, "unrecognized subcommand 'nonsense'"),
        (["explain", "nothing"], 2, "unknown code `nothing`"),
    ],
)
def test_the_command(words: List[str], code: int, said: str) -> None:
    ran = python("-m", "deuteron", *words)
    assert ran.returncode == code, ran.stderr
    assert said in (ran.stdout if code == 0 else ran.stderr)


def test_the_command_lists_every_op() -> None:
    listed_ops = python("-m", "deuteron", "ops").stdout
    assert all(f" {name} " in listed_ops for name in deuteron.functions.__all__)


def test_the_command_fails_with_1_where_an_expectation_does(tmp_path: Path) -> None:
    for text, code in (("fused: layer_norm, gelu", 0), ("not fused: layer_norm, gelu", 1)):
        (tmp_path / "expected.txt").write_text(text)
        ran = python(
            "-m", "deuteron", "analyze", "norm_act", "--device", "h200", "--expect", str(tmp_path / "expected.txt")
        )
        assert ran.returncode == code, ran.stderr


MODULES = sorted(
    ".".join(path.relative_to(FOLDER).with_suffix("").parts).replace(".__init__", "")
    for path in (FOLDER / "deuteron").rglob("*.py")
    if path.name != "__main__.py"
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_the_documentation(name: str) -> None:
    path = FOLDER.joinpath(*name.split("."))
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    for package in ("torch", "transformers"):
        if f"import {package}" in text or f"from {package}" in text:
            pytest.importorskip(package)
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0


def test_every_function_has_an_example() -> None:
    assert "deuteron.functions" in MODULES
    finder = doctest.DocTestFinder(exclude_empty=True)
    shown = {test.name.rsplit(".", 1)[-1] for test in finder.find(deuteron.functions) if test.examples}
    assert set(deuteron.functions.__all__) - shown == set()

"""`deuteron.fuse`: what is traced, what is refused, and that it computes what the function does."""

from __future__ import annotations

import copy
import math
import os
import pickle
import threading
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import pytest

import deuteron
from deuteron import trace
from deuteron._native import Program


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tolerance(expected: Any, terms: int, store: float = 2.0**-23) -> float:
    """Sums of so many terms in f32, functions off by few ulp, and a result that is rounded once."""
    magnitude = max(float(np.abs(expected).max(initial=0.0)), 1.0)
    return (4 * 2.0**-23 * math.sqrt(max(terms, 1)) + 2 * store) * magnitude


def same(got: Any, expected: Any, terms: int = 64) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    assert np.abs(got.astype(np.float64) - expected).max(initial=0.0) <= tolerance(expected, terms)


# Graphs.


def test_a_function_becomes_a_graph() -> None:
    @deuteron.fuse
    def block(x: Any, w: Any, b: Any, *, eps: float) -> Any:
        y = trace.layer_norm(x, w, b, eps)
        return y * 2 - 1, (y.sum(-1, keepdim=True), x)

    assert block.graph(normal(4, 8), normal(8), normal(8), eps=1e-6) == (
        "graph block\n"
        "x = input f32[4,8]\n"
        "w = input f32[8]\n"
        "b = input f32[8]\n"
        "v3 = layer_norm x w b eps=1e-06\n"
        "v4 = mul v3 2\n"
        "v5 = sub v4 1\n"
        "v6 = row_sum v3\n"
        "out y0=v5\n"
        "out y1=v6\n"
    )


def test_what_no_result_needs_is_left_out() -> None:
    @deuteron.fuse(name="short")
    def function(x: Any, unused: Any) -> Any:
        x.exp()
        return x.max(axis=-1)

    text = function.graph(normal(4, 8), normal(3))
    assert text == (
        "graph short\nx = input f32[4,8]\nunused = input f32[3]\nv2 = row_max x\nv3 = reshape v2 [4]\nout y=v3\n"
    )
    x = normal(4, 8)
    same(function(x, normal(3)), x.max(axis=-1))


def test_names_that_graphs_do_not_take_are_changed() -> None:
    @deuteron.fuse
    def function(f32: Any, d_x: Any, x: Any, y: Any, node1: Any) -> Any:
        return f32 + d_x * x - y * node1

    operands = [normal(2, 3, seed=seed) for seed in range(5)]
    text = function.graph(*operands)
    assert [line.split(" = ")[0] for line in text.splitlines()[1:6]] == ["f32_", "arg_d_x", "x", "y", "arg_node1"]
    same(function(*operands), operands[0] + operands[1] * operands[2] - operands[3] * operands[4])


def test_numbers_that_16_bits_do_not_hold_are_not_rounded() -> None:
    function = deuteron.fuse(lambda x: (x * 0.1, x * 0.5), name="scaled")
    lines = function.graph(normal(2, 3).astype(np.float16)).splitlines()
    assert lines[2:6] == ["v1 = cast x f32", "v2 = mul v1 0.1", "v3 = cast v2 f16", "v4 = mul x 0.5"]


def test_plan_and_source_are_told() -> None:
    function = deuteron.fuse(lambda x, r: trace.gelu(x + r, approximate="tanh"), name="add_gelu")
    x = normal(64, 256)
    assert "add + gelu" in function.plan(x, x)
    assert "h200" in function.plan(x, x, device="h200")
    assert "gelu" in function.source(x, x)


def test_a_function_is_traced_once_for_each_type() -> None:
    calls: List[Tuple[int, ...]] = []

    @deuteron.fuse(traces=3)
    def function(x: Any, power: Any = 2) -> Any:
        calls.append(x.shape)
        return x**power

    for _ in range(3):
        same(function(normal(2, 3)), normal(2, 3) ** 2)
    assert len(calls) == 1
    same(function(normal(4, 3)), normal(4, 3) ** 2)
    function(normal(2, 3).astype(np.float16))
    assert len(calls) == 3
    same(function(normal(2, 3), 3), normal(2, 3) ** 3)
    assert len(calls) == 4
    assert repr(function) == "<fused function, 3 traces>"
    # The first was dropped, being the oldest.
    function(normal(2, 3))
    assert len(calls) == 5
    function.clear()
    assert repr(function) == "<fused function, 0 traces>"


def test_one_is_not_true() -> None:
    function = deuteron.fuse(lambda x, flag: x + 1 if flag is True else x)
    x = normal(2, 3)
    same(function(x, True), x + 1)
    same(function(x, 1), x)


def test_tensors_may_stand_in_tuples_lists_and_dicts() -> None:
    @deuteron.fuse
    def function(pairs: Any, *, weights: Any, scale: float) -> Dict[str, Any]:
        (a, b), c = pairs
        total = (a + b + c) * weights["w"] * scale
        return {"total": total, "again": [total, a], "scale": scale, "none": None}

    a, b, c, w = (normal(2, 3, seed=seed) for seed in range(4))
    result = function([(a, b), c], weights={"w": w}, scale=0.5)
    same(result["total"], (a + b + c) * w * 0.5)
    assert result["again"][0] is result["total"]
    assert result["again"][1] is a
    assert result["scale"] == 0.5 and result["none"] is None


def test_a_fused_function_within_another_is_part_of_it() -> None:
    inner = deuteron.fuse(lambda x: x.exp() + 1, name="inner")
    outer = deuteron.fuse(lambda x: inner(x) * 2, name="outer")
    x = normal(3, 5)
    same(outer(x), (np.exp(x) + 1) * 2)
    assert outer.graph(x).count("\n") == 6
    assert repr(inner) == "<fused inner, 0 traces>"


def test_methods_have_their_object_as_a_constant() -> None:
    class Scale:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        @deuteron.fuse
        def __call__(self, x: Any) -> Any:
            return x * self.factor

    x = normal(2, 3)
    same(Scale(2.0)(x), x * 2)
    same(Scale(3.0)(x), x * 3)


@deuteron.fuse
def doubled(x: Any) -> Any:
    return x * 2


def test_a_function_is_copied_and_pickled_by_name() -> None:
    assert copy.deepcopy([doubled])[0] is doubled
    assert pickle.loads(pickle.dumps(doubled)) is doubled


def test_a_process_that_was_forked_goes_on() -> None:
    x = normal(3, 4)
    same(doubled(x), x * 2)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(doubled(x), x * 2) and np.array_equal(doubled(x[:2]), x[:2] * 2) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_share_a_function() -> None:
    function = deuteron.fuse(lambda x: trace.softmax(x * 2), name="shared")
    results: List[Any] = []

    def work(rows: int) -> None:
        for _ in range(20):
            results.append((rows, function(normal(rows, 16))))

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for rows, got in results:
        e = np.exp(2 * normal(rows, 16).astype(np.float64))
        same(got, e / e.sum(-1, keepdims=True))


# What NumPy computes.

NUMPY: Dict[str, Callable[[Any, Any], Any]] = {
    "arithmetic": lambda x, y: (1 - x) * y / 3 + 2 / (abs(y) + 1) - -x,
    "functions": lambda x, y: np.tanh(x) + np.exp(y) * np.sqrt(np.abs(x)) - np.log(np.abs(y) + 1),
    "powers": lambda x, y: x**2 + y**3 + np.power(np.abs(x) + 1, -1) + np.square(y),
    "extremes": lambda x, y: np.maximum(x, y) - np.minimum(x, 0.25) + np.clip(y, -0.5, 0.5),
    "scalars": lambda x, y: np.float32(2) * x + y / np.int64(3) - np.bool_(True),
    "where": lambda x, y: np.where((x > y) & ~(y < 0) | (x == 0), x, -y),
    "row sums": lambda x, y: x.sum(axis=-1, keepdims=True) + y.mean(axis=1, keepdims=True) - x.max(axis=1)[:, None],
    "column sums": lambda x, y: x.sum(axis=0) + y.mean(axis=0) * y.max(axis=0) - y.min(axis=0),
    "all": lambda x, y: x.sum() * y.mean() + x.max() - y.min(),
    "variance": lambda x, y: x.var(axis=-1) + y.std(axis=0).sum(),
    "views": lambda x, y: x.reshape(2, 3, 8).transpose(2, 0, 1).reshape(8, -1) * y.T,
    "slices": lambda x, y: x[1:3, ::2] + y[-2:, 1::2] * x[0, None, :4] - y[..., 3, None][:2],
    "concatenation": lambda x, y: np.concatenate([x, y], axis=1) + np.stack([x, y], axis=1).reshape(6, 16),
    "broadcasting": lambda x, y: np.broadcast_to(x[:, :1], (4, 6, 8)).sum(axis=0) + np.expand_dims(y, 0).squeeze(0),
    "products": lambda x, y: (x @ y.T) @ y + np.matmul(x, y[0])[:, None] * (x[0] @ y[1]),
    "triangles": lambda x, y: np.tril(x @ y.T) - np.triu(x @ y.T, 1),
}


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_functions(name: str) -> None:
    x, y = normal(6, 8, seed=1), normal(6, 8, seed=2)
    function = NUMPY[name]
    expected = function(x.astype(np.float64), y.astype(np.float64))
    same(deuteron.fuse(function, name="function")(x, y), expected)


def test_half_results_are_rounded_once() -> None:
    x = normal(5, 7).astype(np.float16)
    got = deuteron.fuse(lambda x: x * 0.1 + 3)(x)
    assert got.dtype == np.float16
    product = (x.astype(np.float32) * np.float32(0.1)).astype(np.float16)
    assert (got == product + np.float16(3)).all()


def test_rows_are_picked_by_indices() -> None:
    table, ids = normal(10, 4), np.array([[1, 9, 0], [3, 3, 2]])
    got = deuteron.fuse(lambda table, ids: table[ids] * 2)(table, ids)
    same(got, table[ids] * 2)


def test_doubles_are_computed_as_doubles() -> None:
    x = np.random.default_rng(3).standard_normal((4, 8))
    seen: List[Any] = []

    def function(x: Any) -> Any:
        seen.append(x.dtype)
        return trace.softmax(x * 0.1)

    got = deuteron.fuse(function)(x)
    e = np.exp(0.1 * x)
    assert seen == [np.dtype("float64")] and got.dtype == np.float64
    assert np.abs(got - e / e.sum(-1, keepdims=True)).max() < 1e-14


class Capsule:
    """An object that speaks DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_objects_that_speak_dlpack() -> None:
    x = normal(3, 5)
    fused = deuteron.fuse(lambda x: trace.exp(x) * 2)
    got = fused(Capsule(x))
    assert isinstance(got, deuteron.Array)
    same(np.from_dlpack(got), np.exp(x) * 2)
    same(np.from_dlpack(fused(got)), np.exp(np.exp(x) * 2) * 2)


# Refusals: each with the name of what was tried.

REFUSED: Sequence[Tuple[str, Callable[[Any], Any], type, str]] = (
    ("truth", lambda x: x if x else -x, TypeError, "bool"),
    ("and", lambda x: x > 0 and x < 1, TypeError, "bool"),
    ("float", lambda x: float(x), TypeError, "float"),
    ("int", lambda x: int(x), TypeError, "int"),
    ("index", lambda x: [1, 2][x], TypeError, "index"),
    ("item", lambda x: x.item(), TypeError, "item"),
    ("array", lambda x: np.asarray(x), TypeError, "array"),
    ("method", lambda x: x.cumsum(0), TypeError, "cumsum"),
    ("ufunc", lambda x: np.arctan(x), TypeError, "numpy.arctan"),
    ("function", lambda x: np.linalg.norm(x), TypeError, "norm"),
    ("reduce", lambda x: np.add.reduce(x), TypeError, "numpy.add.reduce"),
    ("captured", lambda x: x + normal(4, 8), TypeError, "pass it as one"),
    ("set", lambda x: x.__setitem__(0, 1), TypeError, "in place"),
    ("add in place", lambda x: x.__iadd__(1), TypeError, r"\+="),
    ("string", lambda x: x + "1", TypeError, "add"),
    ("integers", lambda x: trace.arange(8, like=x) + 1, TypeError, "cast"),
    ("to integers", lambda x: x.to("i32"), TypeError, "cast"),
    ("doubles", lambda x: x.astype(np.float64), TypeError, "float64"),
    ("sum of doubles", lambda x: x.sum(dtype=np.float64), TypeError, "float64"),
    ("bits", lambda x: np.bitwise_and(trace.arange(8, like=x), trace.arange(8, like=x)), TypeError, "truth"),
    ("captured scalar", lambda x: x + np.array(1.0, np.float32), TypeError, "pass it as one"),
    ("device", lambda x: x.to("cuda"), TypeError, "dtype"),
    ("power", lambda x: x**2.5, ValueError, "pow"),
    ("axis", lambda x: x.sum(2), ValueError, "axis"),
    ("shape", lambda x: x.reshape(5, -1), ValueError, "32 elements"),
    ("broadcast", lambda x: x + x[:, :3], ValueError, "broadcast"),
    ("inner", lambda x: x @ x, ValueError, "inner"),
    ("backwards", lambda x: x[::-1], ValueError, "step"),
    ("far", lambda x: x[7], ValueError, "index"),
    ("many", lambda x: x[0, 0, 0], ValueError, "indices"),
    ("weights", lambda x: trace.layer_norm(x, x[0, :3]), ValueError, "layer_norm"),
    ("probability", lambda x: trace.dropout(x, 1.5, x), ValueError, "dropout"),
    ("seed", lambda x: trace.dropout(x, 0.5, x), TypeError, "seed"),
    ("nan", lambda x: x + float("nan"), ValueError, "NaN"),
    ("result", lambda x: (x, normal(2)), TypeError, "ndarray"),
    ("op", lambda x: trace.trace_op("nothing", {}, [x]), ValueError, "nothing"),
)


@pytest.mark.parametrize("case", REFUSED, ids=[case[0] for case in REFUSED])
def test_what_cannot_be_traced_is_refused(case: Tuple[str, Callable[[Any], Any], type, str]) -> None:
    _, function, kind, message = case
    with pytest.raises(kind, match=message):
        deuteron.fuse(function)(normal(4, 8))


def test_arguments_that_cannot_be_are_refused() -> None:
    function = deuteron.fuse(lambda x, *others: x, name="function")
    with pytest.raises(TypeError, match="function: expected at least one tensor"):
        function(1, 2)
    with pytest.raises(TypeError, match="function: expected tensors and hashable arguments"):
        function(normal(2), {1, 2})
    with pytest.raises(TypeError, match="function: argument others_0: expected a dtype"):
        function(normal(2), normal(2).astype(np.complex64))
    with pytest.raises(TypeError, match="expected a function"):
        deuteron.fuse(3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="at least 1"):
        deuteron.fuse(lambda x: x, traces=0)


def test_a_value_that_another_trace_left_behind_is_refused() -> None:
    left: List[Any] = []

    @deuteron.fuse
    def leaky(x: Any) -> Any:
        left.append(x * 2)
        return left[0] + x

    leaky(normal(2, 3))
    leaky.clear()
    with pytest.raises(ValueError, match="another trace"):
        leaky(normal(2, 3))


# The catalogue.

OPS = (
    "act act=silu",
    "mul_add_act",
    "add_act act=relu",
    "bias_act act=gelu_erf",
    "act_dropout p=0.25",
    "act_dropout_add p=0.25",
    "bias_dropout_add p=0.5",
    "swiglu",
    "swiglu packed=true",
    "geglu",
    "geglu act=gelu_erf packed=true",
    "layer_norm eps=1e-06",
    "rms_norm",
    "norm_act norm=rms act=silu",
    "norm_act",
    "norm_bias_act",
    "add_norm",
    "add_norm norm=rms",
    "dropout_add_norm p=0.25",
    "norm_quantize",
    "norm_quantize residual=true norm=rms",
    "softmax",
    "softmax scale=0.5 mask=causal p=0.25",
    "softmax mask=additive",
    "attention_scores",
    "attention_scores mask=additive scale=0.25",
    "embed_norm",
    "linear_act",
    "linear_act residual=true act=relu",
    "norm_linear",
    "qkv",
    "ffn",
    "ffn single=true norm=rms",
    "attention",
    "attention mask=full group=2",
    "attention mask=additive p=0.25",
    "attention_add_norm",
    "attention_block norm=rms",
    "linear_cross_entropy",
    "moe",
    "moe act=none weighted=true",
    "moe_int8",
    "moe_int8 act=none requantize=false",
)


def operand(op: str, name: str, seed: int) -> Any:
    """An operand of an op, of 12 rows and 16 columns, or 2 sequences of 6 positions and 2 heads of 8 features."""
    word = op.split()[0]
    rng = np.random.default_rng(seed)
    heads = 1 if "group=2" in op else 2
    attends = word.startswith("attention") and word != "attention_scores"
    if name == "seed":
        return np.array(7, np.int32)
    if name in ("tokens", "targets", "experts"):
        shape: Tuple[int, ...] = (2, 6) if name == "tokens" else (12, 2) if "weighted" in op else (12,)
        return rng.integers(0, 3, shape).astype(np.int32)
    if word == "moe_int8" and name in ("x", "weight"):
        return rng.integers(-127, 128, (12, 16) if name == "x" else (3, 8, 16)).astype(np.int8)
    shapes: Dict[str, Tuple[int, ...]] = {
        "xg": (12, 32),
        "q": (2, 2, 6, 8),
        "k": (2, heads, 6, 8),
        "v": (2, heads, 6, 8),
        "mask": (6, 6) if word.startswith("attention") else (12, 16),
        "wte": (5, 16),
        "wpe": (9, 16),
        "x_scale": (12, 1),
        "weight_scale": (3, 8),
        "expert_weights": (12, 2),
        "weight": (3, 8, 16) if word == "moe" else (16, 16),
        "weight1": (16, 24),
        "bias1": (24,),
        "weight2": (24, 16),
        "bias2": (16,),
        "bias": (3, 8) if word.startswith("moe") else (16,),
        "w": (12, 16) if word == "mul_add_act" else (16,),
        "b": (12, 16) if word == "mul_add_act" else (16,),
        "r": (2, 6, 16) if attends else (12, 16),
    }
    return rng.standard_normal(shapes.get(name, (12, 16))).astype(np.float32)


@pytest.mark.parametrize("op", OPS)
def test_an_op_of_the_catalogue_is_traced_as_it_is_defined(op: str) -> None:
    program = Program(op)
    operands = [operand(op, name, seed) for seed, name in enumerate(program.operands)]
    expected = program.forward(operands)
    word, *attributes = op.split()

    def function(*values: Any) -> Any:
        return trace.trace_op(word, dict(part.split("=") for part in attributes), values)

    got = deuteron.fuse(function, name=word)(*operands)
    got = got if isinstance(got, tuple) else (got,)
    assert len(got) == len(expected) == len(program.outputs)
    for ours, theirs in zip(got, expected):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        step = 1.0 if ours.dtype == np.int8 else tolerance(theirs, 24)
        assert np.abs(ours.astype(np.float64) - theirs).max() <= step


def test_functions_of_the_catalogue_add_to_the_graph() -> None:
    def block(x: Any, r: Any, w: Any, b: Any, weight: Any, bias: Any, seed: Any) -> Any:
        y, s = deuteron.add_norm(x, r, w, b)
        wide = deuteron.linear_act(y, weight, bias, act="gelu")
        return deuteron.bias_dropout_add(wide, b, s, p=0.25, seed=seed), deuteron.rms_norm(deuteron.softmax(s), w)

    shapes = ((12, 16), (12, 16), (16,), (16,), (16, 16), (16,))
    operands = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)] + [np.array(5, np.int32)]
    fused = deuteron.fuse(block)
    lines = [line.split(" = ")[1].split()[0] for line in fused.graph(*operands).splitlines() if " = " in line]
    assert lines[7:] == ["add", "layer_norm", "linear", "gelu", "add", "dropout", "add", "softmax", "rms_norm"]
    for got, expected in zip(fused(*operands), block(*operands)):
        same(got, expected)


def test_every_op_of_the_catalogue_is_there() -> None:
    assert set(deuteron.functions.__all__) == {op.split()[0] for op in OPS}
    for name in deuteron.functions.__all__:
        Program(name)


# torch.


def torch_functions(torch: Any) -> Dict[str, Callable[..., Any]]:
    F = torch.nn.functional
    return {
        "norm": lambda x, y, w: F.layer_norm(x, (8,), w, y[0]) + F.rms_norm(y, (8,), w, 1e-6),
        "norm of two axes": lambda x, y, w: F.layer_norm(x.view(3, 2, 2, 4), (2, 4)).flatten(1).reshape(6, 8),
        "activations": lambda x, y, w: F.gelu(x) + F.gelu(y, approximate="tanh") * F.silu(x) - F.relu(y) * w,
        "softmax": lambda x, y, w: F.softmax(x * w, dim=-1) + torch.softmax(y, 0) * F.log_softmax(x, dim=1),
        "logsumexp": lambda x, y, w: torch.logsumexp(x * y, -1) + F.softplus(x).sum(-1),
        "linear": lambda x, y, w: F.linear(x, y, w[:6]) @ y + torch.matmul(x, w)[:, None],
        "addmm": lambda x, y, w: torch.addmm(w[:6], x, y.t()),
        "unary": lambda x, y, w: torch.exp(x) * torch.tanh(y) + torch.sigmoid(w) * torch.erf(x) - torch.abs(y),
        "roots": lambda x, y, w: torch.rsqrt(x * x + 1) + torch.sqrt(y.abs() + 1) + torch.log(y**2 + 1),
        "where": lambda x, y, w: torch.where(x > y, x, y * 2) + x.masked_fill(y > 0, 0.5),
        "extremes": lambda x, y, w: torch.maximum(x, y) + torch.clamp(x, -0.5, 0.5) * torch.minimum(y, w),
        "largest": lambda x, y, w: x.max(-1, keepdim=True).values * y + x.amax(0) - torch.amin(y, 1, keepdim=True),
        "reductions": lambda x, y, w: x.sum(0) * y.mean(0) + (x * y).mean(-1).sum() + torch.var(x, 1).sum(),
        "cat": lambda x, y, w: torch.cat([x, y * w], dim=1).sum(1) + torch.stack([x, y]).sum((0, 2)),
        "chunks": lambda x, y, w: sum(part * part for part in x.chunk(2, -1)) + y.split([4, 4], 1)[1],
        "views": lambda x, y, w: x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1) + y.t().reshape(6, 8),
        "numbers": lambda x, y, w: 1 / (x.abs() + 1) - (2 - y) * 0.3 + 3,
        "padded": lambda x, y, w: F.pad(x, (1, 2), value=0.5)[:, 1:-2] * y,
    }


NAMES = (
    *("norm", "norm of two axes", "activations", "softmax", "logsumexp", "linear", "addmm", "unary", "roots", "where"),
    *("extremes", "largest", "reductions", "cat", "chunks", "views", "numbers", "padded"),
)


@pytest.mark.parametrize("name", NAMES)
def test_torch_functions_and_their_gradients(torch: Any, name: str) -> None:
    function = torch_functions(torch)[name]
    fused = deuteron.fuse(function, name="function")
    generator = torch.Generator().manual_seed(5)
    data = [torch.randn(shape, generator=generator) for shape in ((6, 8), (6, 8), (8,))]
    ours = [x.clone().requires_grad_() for x in data]
    theirs = [x.double().requires_grad_() for x in data]
    got, expected = fused(*ours), function(*theirs)
    same(got.detach(), expected.detach())
    weight = torch.randn(expected.shape, generator=generator)
    (got * weight).sum().backward()
    (expected * weight.double()).sum().backward()
    for mine, other in zip(ours, theirs):
        if other.grad is None:
            assert mine.grad is None or not mine.grad.any()
        else:
            same(mine.grad, other.grad, terms=256)


# Differences across a border are no gradient.
SMOOTH = [name for name in NAMES if name not in ("where", "extremes", "largest")]


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_of_doubles_are_exact(torch: Any, name: str) -> None:
    fused = deuteron.fuse(torch_functions(torch)[name], name="function")
    generator = torch.Generator().manual_seed(5)
    shapes = ((6, 8), (6, 8), (8,))
    data = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(fused, data)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_results_are_as_close_as_those_of_torch(torch: Any, dtype: str) -> None:
    F = torch.nn.functional

    def function(x: Any, w: Any, b: Any) -> Any:
        return F.gelu(F.layer_norm(x, (64,), w, b) * 0.3) + x / 7

    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(s, generator=generator).to(getattr(torch, dtype)) for s in ((32, 64), (64,), (64,))]
    ours = [x.clone().requires_grad_() for x in data]
    theirs = [x.clone().requires_grad_() for x in data]
    exact = [x.double().requires_grad_() for x in data]
    got, eager, expected = deuteron.fuse(function)(*ours), function(*theirs), function(*exact)
    assert got.dtype == data[0].dtype
    unit = torch.finfo(data[0].dtype).eps

    def error(x: Any, reference: Any) -> float:
        return float((x.double() - reference).abs().max().detach())

    assert error(got, expected) <= 2 * error(eager, expected) + unit
    for result in (got, eager, expected):
        result.float().square().sum().backward()
    for mine, other, reference in zip(ours, theirs, exact):
        size = float(reference.grad.abs().max())
        assert error(mine.grad, reference.grad) <= 3 * error(other.grad, reference.grad) + unit * size


def attention_cases(torch: Any) -> Dict[str, Tuple[Callable[..., Any], Sequence[Tuple[int, ...]]]]:
    F = torch.nn.functional
    attention = F.scaled_dot_product_attention
    heads = (2, 2, 6, 8)
    return {
        "full": (lambda q, k, v: attention(q, k, v), (heads,) * 3),
        "causal": (lambda q, k, v: attention(q, k, v, is_causal=True), (heads,) * 3),
        "fewer keys": (lambda q, k, v: attention(q, k, v, is_causal=True), (heads, (2, 2, 5, 8), (2, 2, 5, 8))),
        "scaled": (lambda q, k, v: attention(q, k, v, scale=0.5), (heads, (2, 2, 9, 8), (2, 2, 9, 4))),
        "mask": (lambda q, k, v, m: attention(q, k, v, m), (*(heads,) * 3, (6, 6))),
        "truths": (lambda q, k, v, m: attention(q, k, v, m > 0), (*(heads,) * 3, (2, 1, 6, 6))),
        "grouped": (
            lambda q, k, v: attention(q, k, v, enable_gqa=True, is_causal=True),
            ((2, 4, 6, 8), heads, heads),
        ),
        "by hand": (lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v, (heads,) * 3),
    }


@pytest.mark.parametrize("name", ["full", "causal", "fewer keys", "scaled", "mask", "truths", "grouped", "by hand"])
def test_attention(torch: Any, name: str) -> None:
    function, shapes = attention_cases(torch)[name]
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(shape, generator=generator) for shape in shapes]
    if name == "truths":
        data[3][..., 0] = 1.0
    ours = [x.clone().requires_grad_(index < 3) for index, x in enumerate(data)]
    theirs = [x.double().requires_grad_(index < 3) for index, x in enumerate(data)]
    got, expected = deuteron.fuse(function, name="attend")(*ours), function(*theirs)
    same(got.detach(), expected.detach())
    got.square().sum().backward()
    expected.square().sum().backward()
    for mine, other in zip(ours[:3], theirs):
        same(mine.grad, other.grad, terms=256)


def test_embedding_and_cross_entropy(torch: Any) -> None:
    F = torch.nn.functional

    def function(ids: Any, targets: Any, table: Any) -> Any:
        return F.cross_entropy(F.linear(F.embedding(ids, table), table), targets)

    generator = torch.Generator().manual_seed(3)
    ids, table = torch.randint(0, 11, (9,), generator=generator), torch.randn(11, 8, generator=generator)
    targets = torch.randint(0, 11, (9,), generator=generator)
    targets[4] = -100
    ours, theirs = table.clone().requires_grad_(), table.double().requires_grad_()
    got, expected = deuteron.fuse(function)(ids, targets, ours), function(ids, targets, theirs)
    same(got.detach(), expected.detach())
    got.backward()
    expected.backward()
    same(ours.grad, theirs.grad, terms=256)


def test_dropout_is_a_function_of_its_seed(torch: Any) -> None:
    @deuteron.fuse
    def function(x: Any, seed: Any) -> Any:
        return trace.dropout(x, 0.25, seed), trace.dropout(x, 0.25, seed)

    x = torch.ones(200, 50, requires_grad=True)
    first, second = function(x, torch.tensor(3, dtype=torch.int32))
    again, _ = function(x, torch.tensor(3, dtype=torch.int32))
    other, _ = function(x, torch.tensor(4, dtype=torch.int32))
    assert torch.equal(first, again)
    assert not torch.equal(first, second) and not torch.equal(first, other)
    # 10000 choices: five deviations of their mean.
    assert abs(float((first > 0).float().mean()) - 0.75) < 5 * (0.75 * 0.25 / x.numel()) ** 0.5
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())


@pytest.mark.parametrize("how", ["compile", "export"])
def test_a_compiler_meets_ops_of_the_catalogue_in_a_trace(torch: Any, how: str) -> None:
    """Nothing was traced before: the function is called while a compiler looks."""
    fused = deuteron.fuse(lambda x, w: deuteron.norm_act(x, w) + deuteron.act(x))

    class Whole(torch.nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: Any, w: Any) -> Any:
            return fused(x, w)

    x, w = torch.randn(3, 8), torch.randn(8)
    if how == "compile":
        got = torch.compile(Whole(), fullgraph=True, backend="aot_eager")(x, w)
    else:
        got = torch.export.export(Whole(), (x, w)).module()(x, w)
    torch.testing.assert_close(got, deuteron.norm_act(x, w) + deuteron.act(x))


def test_a_compiler_sees_one_operator(torch: Any) -> None:
    F = torch.nn.functional

    def plain(x: Any, w: Any, scale: float) -> Any:
        return {"y": F.gelu(F.layer_norm(x, (8,), w)) * scale, "x": [x, None]}

    fused = deuteron.fuse(plain)

    def whole(function: Callable[..., Any], x: Any, w: Any) -> Any:
        result = function(x * 2, w, scale=3.0)
        return result["y"] + result["x"][0]

    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(9)
    for rows in (4, 6, 7):
        x, w = torch.randn(rows, 8, generator=generator), torch.randn(8, generator=generator)
        ours = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        theirs = [x.double().requires_grad_(), w.double().requires_grad_()]
        got, expected = compiled(fused, *ours), whole(plain, *theirs)
        same(got.detach(), expected.detach())
        got.square().sum().backward()
        expected.square().sum().backward()
        for mine, other in zip(ours, theirs):
            same(mine.grad, other.grad, terms=256)


def test_gradients_of_some_operands(torch: Any) -> None:
    function = deuteron.fuse(lambda x, w, unused: (x * w, x + 1, x), name="some")
    x, w, unused = torch.randn(4, 8), torch.randn(8, requires_grad=True), torch.randn(3, requires_grad=True)
    product, plus, back = function(x, w, unused)
    assert back is x and product.requires_grad
    product.sum().backward()
    same(w.grad, x.sum(0))
    assert unused.grad is None or not unused.grad.any()
    with torch.no_grad():
        assert not function(x, w, unused)[0].requires_grad
    with torch.inference_mode():
        same(function(x, w, unused)[0], x * w.detach())


def test_autocast_changes_no_operand(torch: Any) -> None:
    x, w = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(8, requires_grad=True)
    fused = deuteron.fuse(lambda x, w: (x * w, x @ x.t()), name="qkv")
    with torch.autocast("cpu", torch.bfloat16):
        product, square = fused(x, w)
        product.sum().backward()
    assert product.dtype == torch.float32 and square.dtype == torch.bfloat16
    assert torch.equal(product, x * w)
    same(w.grad, x.float().sum(0))


def test_an_operand_may_come_twice(torch: Any) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    deuteron.fuse(lambda a, b: a * b)(x, x).sum().backward()
    same(x.grad, 2 * x.detach())


def test_operands_of_any_strides(torch: Any) -> None:
    x = torch.randn(8, 6, 2).transpose(0, 1)[:, ::2, 1]
    got = deuteron.fuse(lambda x: trace.softmax(x))(x)
    same(got, torch.softmax(x.double(), -1))


def test_empty_operands(torch: Any) -> None:
    x = torch.empty(0, 8, requires_grad=True)
    got = deuteron.fuse(lambda x: torch.exp(x) * 2)(x)
    assert got.shape == (0, 8)
    got.sum().backward()
    assert x.grad.shape == (0, 8)


def test_dtypes_are_those_of_torch(torch: Any) -> None:
    seen: List[Any] = []

    def function(x: Any, ids: Any) -> Any:
        seen.extend((x.dtype, ids.dtype, (x > 0).dtype, x.to(torch.float32).dtype))
        return x.to(torch.float32) if x.dtype == torch.bfloat16 else x

    got = deuteron.fuse(function)(torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.long))
    assert got.dtype == torch.float32
    assert seen == [torch.bfloat16, torch.int64, torch.bool, torch.float32]


def torch_refusals(torch: Any) -> Sequence[Tuple[Callable[[Any], Any], type, str]]:
    F = torch.nn.functional
    return (
        (lambda x: torch.bincount(x), TypeError, "torch.bincount"),
        (lambda x: F.dropout(x, 0.5), TypeError, "seed"),
        (lambda x: x + torch.ones(8), TypeError, "pass it as one"),
        (lambda x: torch.ones(8) * x, TypeError, "pass it as one"),
        (lambda x: F.linear(x, torch.nn.Parameter(torch.ones(4, 8))), TypeError, "pass it as one"),
        (lambda x: F.relu(x, inplace=True), TypeError, "in place"),
        (lambda x: x.add_(1), TypeError, "add_"),
        (lambda x: x.cuda(), TypeError, "cuda"),
        (lambda x: x - x.max(-1), TypeError, "values"),
        (lambda x: F.softmax(x), ValueError, "dim"),
        (lambda x: F.embedding(x, x), TypeError, "embedding"),
        (lambda x: x.bfloat16() @ x.t(), TypeError, "one dtype"),
        (lambda x: torch.nonzero(x), TypeError, "nonzero"),
        (lambda x: torch.tensor(x), TypeError, "value"),
    )


@pytest.mark.parametrize("case", range(14))
def test_what_torch_has_and_graphs_do_not_is_refused(torch: Any, case: int) -> None:
    function, kind, message = torch_refusals(torch)[case]
    with pytest.raises(kind, match=message):
        deuteron.fuse(function)(torch.randn(4, 8))


def test_dropout_that_drops_nothing_is_taken(torch: Any) -> None:
    F = torch.nn.functional
    x = torch.randn(3, 4)
    function = deuteron.fuse(lambda x: F.dropout(F.dropout(x, 0.0), 0.5, training=False) + 1)
    same(function(x), x + 1)


def test_torch_is_not_imported_with_deuteron() -> None:
    import subprocess
    import sys

    code = "import sys, deuteron, deuteron.trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

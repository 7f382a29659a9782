"""The functions over tensors of torch: values, gradients, and the ways of torch."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import deuteron  # noqa: E402
from cases import (  # noqa: E402
    CASES,
    DIFFERENTIABLE,
    HEADS,
    Case,
    Size,
    Torch,
    case_sizes,
    check,
    check_exact,
    kept,
    listed,
    operands,
    rounded,
    terms,
)
from deuteron import _torch  # noqa: E402

SMALL: Size = (3, 7)


def tensors(case: Case, size: Size, dtype: Any, seed: int = 0, device: str = "cpu") -> List[Any]:
    """Operands of a case as tensors."""
    word = str(dtype).split(".")[1]
    arrays = rounded(operands(case, size, seed), "float64" if word in ("float64", "bfloat16", "float16") else word)
    kinds = [operand.kind for operand in case.operands(*size)]
    made = []
    for array, kind in zip(arrays, kinds):
        tensor = torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape).to(device)
        if tensor.is_floating_point():
            # Scales of bytes are f32, except beside f64.
            tensor = tensor.to(torch.float32 if kind == "positive" and dtype != torch.float64 else dtype)
        made.append(tensor)
    return made


def leaves(given: Sequence[Any]) -> List[Any]:
    """Copies of tensors, of which the floats want a gradient."""
    return [one.detach().clone().requires_grad_(one.is_floating_point()) for one in given]


def doubled(given: Sequence[Any]) -> List[Any]:
    return [one.double() if one.is_floating_point() else one for one in given]


def upstream(results: Sequence[Any], seed: int = 9) -> List[Any]:
    """A gradient for each result, as `f64`, rounded as the result is."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in results]
    return [gradient.to(one.dtype).to(one.device) for gradient, one in zip(made, results)]


def both_ways(function: Callable[..., Any], given: Sequence[Any], gradients: Optional[Sequence[Any]] = None) -> Any:
    """Results, gradients of the floats among operands, and what came in."""
    own = leaves(given)
    results = listed(function(*own))
    if gradients is None:
        gradients = upstream(results)
    wanted = [one for one in own if one.requires_grad]
    incoming = [gradient.to(one.dtype) for gradient, one in zip(gradients, results)]
    return results, torch.autograd.grad(results, wanted, incoming), gradients


def compare(case: Case, size: Size, dtype: Any, device: str = "cpu") -> None:
    """A case against its formula in `f64`, with that in the dtype as the yardstick, forward and backward."""
    word = str(dtype).split(".")[1]
    given = tensors(case, size, dtype, device=device)
    if not case.differentiable:
        got = listed(case.call(*given))
        found, exact, own = [], listed(case.plain(Torch, *doubled(given))), listed(case.plain(Torch, *given))
        pairs: List[Any] = []
    else:
        got, found, incoming = both_ways(case.call, given)
        exact, expected, _ = both_ways(lambda *o: case.plain(Torch, *o), doubled(given), incoming)
        own, plain, _ = both_ways(lambda *o: case.plain(Torch, *o), given, incoming)
        pairs = list(zip(found, plain, expected))
    assert len(got) == len(exact)
    for index, (one, yardstick, reference) in enumerate(zip(got, own, exact)):
        assert one.dtype in (dtype, torch.int8, torch.float32) and one.device.type == device
        if word == "float64":
            check_exact(one, reference, terms(size), f"result {index}")
        else:
            check(one, yardstick, reference, word, terms(size), name=f"result {index}")
    for index, (one, yardstick, reference) in enumerate(pairs):
        assert one.dtype == dtype
        if word == "float64":
            check_exact(one, reference, 4 * terms(size), f"gradient {index}")
        else:
            check(one, yardstick, reference, word, terms(size), times=3.0, name=f"gradient {index}")


# Values and gradients.


def some_sizes(which: slice) -> List[Tuple[str, Size]]:
    return [(name, size) for name, case in CASES.items() for size in case.sizes[which]]


@pytest.mark.parametrize("name, size", some_sizes(slice(0, None, 2)))
def test_in_f64(name: str, size: Size) -> None:
    compare(CASES[name], size, torch.float64)


@pytest.mark.parametrize("name, size", case_sizes())
def test_in_f32(name: str, size: Size) -> None:
    compare(CASES[name], size, torch.float32)


@pytest.mark.parametrize("name, size", some_sizes(slice(1, None, 2)))
def test_in_f16(name: str, size: Size) -> None:
    compare(CASES[name], size, torch.float16)


@pytest.mark.parametrize("name, size", some_sizes(slice(2, None)))
def test_in_bf16(name: str, size: Size) -> None:
    compare(CASES[name], size, torch.bfloat16)


@pytest.mark.parametrize("name", ["attention-causal", "attention_scores-causal"])
def test_long_sequences(name: str) -> None:
    compare(CASES[name], (1500, 2), torch.float32)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_by_differences(name: str) -> None:
    """`gradcheck`, through the interpreter in f64."""
    case = CASES[name]
    given = leaves(tensors(case, (2, 3), torch.float64, seed=4))
    assert torch.autograd.gradcheck(case.call, given, eps=1e-6, atol=1e-5, rtol=1e-4)


def test_every_differentiable_op_says_so() -> None:
    for case in CASES.values():
        assert _torch.find(case.op).differentiable == case.differentiable


# Which gradients are wanted.


@pytest.mark.parametrize(
    "name", ["norm_act-layer-gelu", "add_norm-layer", "linear_act", "ffn-layer", "attention_block-layer"]
)
def test_gradients_of_some_operands(name: str) -> None:
    case = CASES[name]
    given = tensors(case, SMALL, torch.float32)
    _, every, gradients = both_ways(case.call, given)
    count = len(given)
    subsets: List[Tuple[int, ...]] = [(index,) for index in range(count)] + [(0, count - 1), (1, 2)]
    for subset in subsets:
        own = [one.clone().requires_grad_(index in subset) for index, one in enumerate(given)]
        results = listed(case.call(*own))
        torch.autograd.backward(results, gradients)
        for index, one in enumerate(own):
            assert (one.grad is not None) == (index in subset)
            if one.grad is not None:
                torch.testing.assert_close(one.grad, every[index], rtol=1e-5, atol=1e-5)


def test_without_a_gradient_none_is_prepared() -> None:
    x, w = torch.randn(3, 7), torch.ones(7)
    assert not deuteron.rms_norm(x, w).requires_grad
    assert deuteron.rms_norm(x, w.clone().requires_grad_()).requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not deuteron.rms_norm(x, w).requires_grad
    with torch.inference_mode():
        y = deuteron.rms_norm(x, w)
        assert y.is_inference() and not y.requires_grad
    torch.testing.assert_close(y.clone(), deuteron.rms_norm(x, w).detach(), rtol=0, atol=0)


def test_tensors_of_inference_mode_outside_of_it() -> None:
    with torch.inference_mode():
        x = torch.randn(3, 7)
    torch.testing.assert_close(deuteron.act(x), torch.nn.functional.gelu(x))


def test_one_tensor_as_two_operands() -> None:
    x, w = torch.randn(3, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    functional = torch.nn.functional
    pairs: List[Tuple[Any, Any, Any]] = [
        (deuteron.add_norm(x, x, w, w)[0], Torch.norm(x + x, w, w), (x, w)),
        (deuteron.swiglu(x, x), functional.silu(x) * x, (x,)),
        (deuteron.attention(q, q, q), functional.scaled_dot_product_attention(q, q, q, is_causal=True), (q,)),
    ]
    for ours, torchs, wanted in pairs:
        found = torch.autograd.grad(ours.square().sum(), wanted)
        for one, other in zip(found, torch.autograd.grad(torchs.square().sum(), wanted)):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# Memory: any strides of operands and gradients, no copies that are not needed.


def layouts(x: Any) -> Dict[str, Any]:
    """The same elements `[a, b, c]` in memory in many ways."""
    a, b, c = x.shape
    padded = torch.zeros(a, b + 3, c + 5, dtype=x.dtype)
    padded[:, 1 : b + 1, 3 : c + 3] = x
    wide = torch.zeros(a, b, 2 * c, dtype=x.dtype)
    wide[..., ::2] = x
    return {
        "rows apart": padded[:, 1 : b + 1, 3 : c + 3],
        "columns apart": wide[..., ::2],
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "columns first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "negated": torch._neg_view(-x),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", list(layouts(torch.zeros(1, 1, 1))))
def test_strides_of_operands_and_gradients(how: str, dtype: Any) -> None:
    if how == "negated" and dtype == torch.bfloat16 and not hasattr(torch, "bcomplex32"):
        pytest.skip("this torch has no complex numbers of bf16, of whose imaginary parts such views are")
    generator = torch.Generator().manual_seed(1)
    x, r, g = (torch.randn(3, 5, 33, generator=generator).to(dtype) for _ in range(3))
    w, b = torch.ones(33, dtype=dtype), torch.zeros(33, dtype=dtype)
    strided, gradient = layouts(x)[how], layouts(g)[how]
    assert torch.equal(strided, x)

    def run(x: Any, g: Any) -> List[Any]:
        x, r_own = x.detach().requires_grad_(), r.clone().requires_grad_()
        results = deuteron.add_norm(x, r_own, w, b)
        return [*results, *torch.autograd.grad(results, (x, r_own), (g, g))]

    for one, other in zip(run(strided, gradient), run(x, g)):
        assert torch.equal(one, other) and one.is_contiguous()


def test_repeated_operands_and_gradients() -> None:
    x = torch.randn(1, 7, requires_grad=True)
    y = deuteron.act(x.expand(5, 7))
    y.sum().backward()
    one = torch.autograd.grad(deuteron.act(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, 5 * one)
    (gradient,) = torch.autograd.grad(deuteron.act(x), x, torch.tensor(2.0).expand(1, 7))
    torch.testing.assert_close(gradient, 2 * one)


def test_a_transposed_weight_is_one() -> None:
    """As that of `torch.nn.Linear`, with its gradient."""
    x, weight, bias = leaves([torch.randn(5, 8), torch.randn(12, 8), torch.randn(12)])
    found = torch.autograd.grad(deuteron.linear_act(x, weight.t(), bias).square().sum(), (x, weight, bias))
    expected = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(deuteron.linear_act(x, weight.t(), bias), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, torch.autograd.grad(expected.square().sum(), (x, weight, bias))):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def copies(work: Callable[[], Any]) -> List[str]:
    """What torch copied meanwhile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return [event.key for event in profile.key_averages() if event.key in ("aten::clone", "aten::copy_", "aten::to")]


def test_operands_are_not_copied() -> None:
    x, w, b = torch.randn(6, 8, 40)[::2, :, 3:36].transpose(0, 1), torch.ones(33), torch.zeros(33)
    qkv = torch.randn(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)
    deuteron.norm_act(x, w, b)
    deuteron.attention(*qkv)
    assert copies(lambda: deuteron.norm_act(x, w, b)) == []
    assert copies(lambda: deuteron.attention(*qkv)) == []
    assert "aten::clone" in copies(lambda: deuteron.norm_act(x.mT.contiguous().mT, w, b)), "columns apart are copied"


def test_results_are_new() -> None:
    x = torch.randn(4, 8)
    y, s = deuteron.add_norm(x, x, x[0], x[1])
    addresses = {one.untyped_storage().data_ptr() for one in (x, y, s)}
    assert len(addresses) == 3
    before = x.clone()
    y.zero_(), s.zero_()
    assert torch.equal(x, before)


def test_versions_of_operands_are_left_alone() -> None:
    x = torch.randn(3, 7)
    before = x._version
    deuteron.act(x)
    assert x._version == before


# Nothing.


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New memory of torch holds no numbers, so that what is not written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", [name for name in DIFFERENTIABLE if CASES[name].sizes is not HEADS and "cross_entropy" not in name]
)
def test_no_rows(name: str, dtype: Any, poisoned: None) -> None:
    """No rows give no rows, and gradients of weights are zeros."""
    case = CASES[name]
    given = tensors(case, (0, 7), dtype)
    got, found, gradients = both_ways(case.call, given)
    exact, expected, _ = both_ways(lambda *o: case.plain(Torch, *o), given, gradients)
    assert [one.shape for one in got] == [one.shape for one in exact]
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


def test_no_rows_without_a_gradient() -> None:
    for name in ("norm_quantize-layer", "norm_quantize-rms-residual", "moe-weighted", "moe_int8", "moe_int8-floats"):
        case = CASES[name]
        given = tensors(case, (0, 7), torch.float32)
        expected = listed(case.plain(Torch, *given)) if "moe" not in name else None
        got = listed(case.call(*given))
        assert all(one.shape[0] == 0 for one in got)
        assert expected is None or [one.shape for one in got] == [one.shape for one in expected]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_no_batch_and_no_queries(mask: Optional[str], dtype: Any, poisoned: None) -> None:
    none = torch.zeros(0, 2, 5, 8, dtype=dtype, requires_grad=True)
    deuteron.attention(none, none, none, mask).sum().backward()
    assert none.grad.shape == none.shape
    query = torch.zeros(1, 2, 0, 8, dtype=dtype, requires_grad=True)
    keys, values = (torch.ones(1, 2, 5, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    y = deuteron.attention(query, keys, values, mask)
    assert y.shape == (1, 2, 0, 8)
    y.sum().backward()
    assert query.grad.shape == query.shape
    assert keys.grad.abs().max() == 0 and values.grad.abs().max() == 0, "nobody asked, so nothing is to blame"


# Manners of autograd.


def test_a_result_that_is_used_twice() -> None:
    x, w = torch.randn(3, 7, requires_grad=True), torch.randn(7, requires_grad=True)

    def loss(y: Any) -> Any:
        return (y * y.detach().cos()).sum() + y.square().sum() + y.sum()

    found = torch.autograd.grad(loss(deuteron.norm_act(x, w, norm="rms")), (x, w))
    expected = torch.autograd.grad(loss(Torch.act(Torch.norm(x, w), "gelu")), (x, w))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize(
    "name", ["add_norm-layer", "dropout_add_norm-rms", "embed_norm-layer", "attention_block-layer"]
)
def test_a_result_that_is_not_used(name: str, used: int) -> None:
    case = CASES[name]
    given = tensors(case, SMALL, torch.float32)
    own, torchs = leaves(given), leaves(given)
    listed(case.call(*own))[used].square().sum().backward()
    listed(case.plain(Torch, *torchs))[used].square().sum().backward()
    for one, other in zip(own, torchs):
        if other.grad is None:
            assert one.grad is None or one.grad.abs().max() == 0
        else:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-3)


def test_gradients_of_a_sum_are_two() -> None:
    x, r = torch.randn(3, 7, requires_grad=True), torch.randn(3, 7, requires_grad=True)
    deuteron.add_norm(x, r, torch.ones(7))[0].square().sum().backward()
    assert torch.equal(x.grad, r.grad) and x.grad.data_ptr() != r.grad.data_ptr()


def test_gradients_add_up() -> None:
    x = torch.randn(3, 7, requires_grad=True)
    for _ in range(2):
        deuteron.act(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.autograd.grad(deuteron.act(x).sum(), x)[0])
    y = deuteron.act(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


def test_an_operand_that_was_changed_since() -> None:
    x = torch.randn(3, 7, requires_grad=True)
    z = x * 2
    y = deuteron.act(z)
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    y, s = deuteron.attention_add_norm(q, q, q, torch.randn(1, 5, 16), torch.ones(16))
    s.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_results_may_be_changed() -> None:
    x = torch.randn(3, 7, requires_grad=True)
    y = deuteron.act(x)
    y.mul_(3)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 3 * torch.autograd.grad(deuteron.act(x).sum(), x)[0])


def test_second_derivatives_are_refused() -> None:
    """Also where the first gradient does not look as if it depended on anything, as that of a penalty."""
    x, w = torch.randn(3, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    for function in (lambda: deuteron.norm_act(x, w), lambda: torch.ops.deuteron.forward("rms_norm", [x, w], True)[0]):
        y = function()
        found = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
        plain = torch.autograd.grad(function().sum(), (x, w))
        assert all(torch.equal(one, other) for one, other in zip(found, plain)), "the first ones are what they are"
        for loss in (found[0].square().sum(), y.sum() + found[0].square().sum(), found[1].sum()):
            with pytest.raises(RuntimeError, match="norm.*: second derivatives are not supported"):
                torch.autograd.grad(loss, x, retain_graph=True)


def test_hooks_anomalies_and_checkpoints() -> None:
    x, w = torch.randn(3, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    expected = torch.autograd.grad(deuteron.norm_act(x, w).sum(), (x, w))
    seen = []
    y = deuteron.norm_act(x, w)
    y.register_hook(lambda gradient: seen.append(gradient.shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            z = deuteron.norm_act(x, w)
            for loss in (y.sum(), z.sum()):
                assert all(map(torch.equal, torch.autograd.grad(loss, (x, w)), expected))
    assert seen == [y.shape]
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        y = checkpoint(deuteron.norm_act, x, w, use_reentrant=reentrant)
        x.grad = w.grad = None
        y.sum().backward()
        assert torch.equal(x.grad, expected[0]) and torch.equal(w.grad, expected[1])


def test_saved_tensors_can_be_packed() -> None:
    x, w = torch.randn(3, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    expected = torch.autograd.grad(deuteron.norm_act(x, w).sum(), (x, w))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(1), t.clone())[1], lambda t: t):
        y = deuteron.norm_act(x, w)
    assert packed and all(map(torch.equal, torch.autograd.grad(y.sum(), (x, w)), expected))


def test_nothing_is_kept_after_backward() -> None:
    import gc
    import weakref

    x, w = torch.randn(3, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    z = x * 1
    y = deuteron.layer_norm(z, w, w)
    kept = weakref.ref(z)
    y.sum().backward()
    del z, y
    gc.collect()
    assert kept() is None


# Ops without a gradient.


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.differentiable])
def test_no_gradient_through_bytes(name: str) -> None:
    case = CASES[name]
    given = tensors(case, SMALL, torch.float32)
    expected = listed(case.call(*given))
    for index, one in enumerate(given):
        if not one.is_floating_point():
            continue
        own = [
            one.clone().requires_grad_(at == index) if one.is_floating_point() else one for at, one in enumerate(given)
        ]
        with pytest.raises(TypeError, match=f"^{case.op}: it has no gradient, and an operand requires one"):
            case.call(*own)
        with torch.no_grad():
            assert all(map(torch.equal, listed(case.call(*own)), expected))


def test_other_derivatives_are_refused() -> None:
    x = torch.randn(3, 7)
    with pytest.raises(NotImplementedError, match="vmap is not supported; the ops take any leading axes"):
        torch.vmap(deuteron.act)(x)
    with pytest.raises(NotImplementedError, match="^act: derivatives by torch.func are not supported"):
        torch.func.grad(lambda x: deuteron.act(x).sum())(x)
    with pytest.raises(NotImplementedError, match="^act: .*derivatives .*are not supported"):
        torch.func.jvp(deuteron.act, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="^act: forward-mode derivatives are not supported"):
            deuteron.act(dual)
        assert deuteron.act(x).shape == x.shape, "other tensors are welcome meanwhile"
    jacobian = torch.autograd.functional.jacobian(deuteron.act, x[:1])
    assert jacobian.shape == (1, 7, 1, 7)


# Autocast.


def test_products_are_of_the_dtype_of_autocast() -> None:
    for name in ("linear_act", "norm_linear-layer", "ffn-layer", "attention-causal", "attention_scores-causal", "qkv"):
        case = CASES[name]
        own = leaves(tensors(case, (5, 33), torch.float32))
        with torch.autocast("cpu", torch.bfloat16):
            got = listed(case.call(*own))
        assert all(one.dtype == torch.bfloat16 for one in got), name
        sum(one.float().sum() for one in got).backward()
        assert all(one.grad.dtype == torch.float32 for one in own if one.is_floating_point()), name
        low = [one.detach().bfloat16() if one.is_floating_point() else one for one in own]
        assert all(map(torch.equal, got, listed(case.call(*low)))), name


def test_rows_keep_their_dtype_under_autocast() -> None:
    x, w = torch.randn(3, 7), torch.ones(7)
    with torch.autocast("cpu", torch.bfloat16):
        assert deuteron.layer_norm(x, w, w).dtype == torch.float32
        assert deuteron.layer_norm(x.bfloat16(), w, w).dtype == torch.bfloat16
        assert deuteron.act(x.bfloat16()).dtype == torch.bfloat16
        y, s = deuteron.add_norm(x.bfloat16(), x, w, w)
        assert y.dtype == s.dtype == torch.float32, "the widest of two"
        assert deuteron.linear_act(x.double(), torch.ones(7, 2).double(), torch.ones(2).double()).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert deuteron.linear_act(x, torch.ones(7, 2), torch.ones(2)).dtype == torch.float32
            with pytest.raises(ValueError, match="^add_act: .*one dtype"):
                deuteron.add_act(x, x.bfloat16())
    with torch.autocast("cpu", torch.float16):
        assert deuteron.linear_act(x, torch.ones(7, 2), torch.ones(2)).dtype == torch.float16


def test_a_step_under_autocast_is_as_near_as_that_of_torch() -> None:
    x, weight, bias, w, b = leaves(
        [torch.randn(16, 64), torch.randn(64, 64) / 8, torch.randn(64), torch.ones(64), torch.zeros(64)]
    )
    wanted = (x, weight, bias, w, b)

    def step(function: Callable[..., Any], double: bool) -> Any:
        own = [one.detach().double() if double else one.detach() for one in wanted]
        own = leaves(own)
        with torch.autocast("cpu", torch.bfloat16, enabled=not double):
            x, weight, bias, w, b = own
            loss = function(x, weight, bias, w, b).float().square().mean()
        return torch.autograd.grad(loss, own)

    def plain(x: Any, weight: Any, bias: Any, w: Any, b: Any) -> Any:
        normed = torch.nn.functional.layer_norm(x, (64,), w, b)
        return torch.nn.functional.linear(normed, weight.t(), bias)

    exact = step(plain, True)
    for one, own, expected in zip(step(deuteron.norm_linear, False), step(plain, False), exact):
        assert one.dtype == torch.float32
        check(one, own, expected, "bfloat16", 64, times=3.0)


# Compilers.


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_all_ops_compile_into_one_graph(fresh: None) -> None:
    """Forward and backward, without a break, the same bits as without a compiler."""
    names = DIFFERENTIABLE
    given = [tensors(CASES[name], (5, 8), torch.float32) for name in names]
    calls = [CASES[name].call for name in names]

    def everything(groups: Any) -> Any:
        return [one for call, group in zip(calls, groups) for one in listed(call(*group))]

    def run(function: Any) -> Tuple[List[Any], Any]:
        own = [leaves(group) for group in given]
        results = function(own)
        wanted = [one for group in own for one in group if one.requires_grad]
        return results, torch.autograd.grad(results, wanted, upstream(results))

    eager, gradients = run(everything)
    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True)
    results, found = run(compiled)
    for one, other in zip([*results, *found], [*eager, *gradients]):
        assert torch.equal(one, other) and one.dtype == other.dtype and one.stride() == other.stride()


def test_ops_without_a_gradient_compile(fresh: None) -> None:
    cases = [case for case in CASES.values() if not case.differentiable]
    given = [tensors(case, (5, 8), torch.float32) for case in cases]
    calls = [case.call for case in cases]

    def everything(groups: Any) -> Any:
        return [one for call, group in zip(calls, groups) for one in listed(call(*group))]

    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(given), everything(given)))


def test_a_block_compiles_for_the_machine(fresh: None) -> None:
    """Ops among those of torch, by inductor."""

    def block(x: Any, weight: Any, bias: Any, w: Any, b: Any) -> Any:
        q, k, v = deuteron.qkv(torch.nn.functional.layer_norm(x, (16,), w, b), weight, bias, heads=2)
        mixed = deuteron.attention(q, k, v).transpose(1, 2).flatten(2)
        y, s = deuteron.add_norm(mixed, x, w, b)
        return (deuteron.act(y * 2) + s).square()

    given = [torch.randn(2, 5, 16), torch.randn(16, 48) / 4, torch.randn(48), torch.ones(16), torch.zeros(16)]
    results, gradients, incoming = both_ways(block, given)
    compiled, found, _ = both_ways(torch.compile(block, fullgraph=True), given, incoming)
    for one, other in zip([*compiled, *found], [*results, *gradients]):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_dropout_compiles(fresh: None) -> None:
    """Seeds are drawn each time; evaluation draws none."""
    x, b = torch.ones(64, 64), torch.zeros(64)

    def step(x: Any, b: Any, training: bool) -> Any:
        return deuteron.bias_dropout_add(x, b, x, p=0.5, training=training)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    first, second = compiled(x, b, True), compiled(x, b, True)
    assert not torch.equal(first, second) and abs((first == 1).float().mean() - 0.5) < 0.1
    torch.manual_seed(3)
    third = compiled(x, b, True)
    torch.manual_seed(3)
    assert torch.equal(third, compiled(x, b, True)) and torch.equal(compiled(x, b, False), 2 * x)


def test_sizes_may_change_under_a_compiler(fresh: None) -> None:
    w = torch.ones(8)
    compiled = torch.compile(lambda x: deuteron.rms_norm(x, w) + 1, backend="aot_eager", fullgraph=True)
    for rows in (3, 5, 9):
        x = torch.randn(rows, 8)
        assert torch.equal(compiled(x), deuteron.rms_norm(x, w) + 1)


def test_autocast_under_a_compiler(fresh: None) -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(8, 8), torch.randn(8)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(deuteron.linear_act, backend="aot_eager", fullgraph=True)(x, weight, bias)
        assert compiled.dtype == torch.bfloat16 and torch.equal(compiled, deuteron.linear_act(x, weight, bias))


def test_misuse_under_a_compiler_is_told(fresh: None) -> None:
    x, w = torch.randn(3, 8), torch.ones(8)
    for call, text in (
        (lambda x: deuteron.act_dropout(x, p=1.5), "act_dropout: expected p of at least 0"),
        (lambda x: deuteron.rms_norm(x, w[:3]), "rms_norm: expected weights of the size"),
        (lambda x: deuteron.norm_quantize(x.requires_grad_(), w), "norm_quantize: it has no gradient"),
        (lambda x: deuteron.bias_act(x, None), "bias_act: .*got NoneType"),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=text):
            torch.compile(call, backend="aot_eager")(x.clone())


def test_a_compiler_may_come_first() -> None:
    """Nothing has been loaded yet by a call that was not compiled."""
    code = """
import torch, deuteron
x, b = torch.ones(4, 8), torch.zeros(8)
for call in (lambda: deuteron.bias_dropout_add(x, b, x, p=0.5), lambda: deuteron.act(x)):
    torch.compile(call, backend="aot_eager", fullgraph=True)()
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class FakeGenerator:
    """A generator as one of a GPU is, as far as `SeedBatches` knows it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def test_seeds_depend_on_the_generator_alone() -> None:
    drawn: List[Tuple[int, int, int, int]] = []

    def draw(device: int, seed: int, offset: int, count: int) -> Tuple[Any, ...]:
        drawn.append((device, seed, offset, count))
        return tuple((device, seed, offset + 4 * place) for place in range(count))

    batches, generator = _torch.SeedBatches(draw), FakeGenerator(2**64 - 1)
    seeds = [batches.next_seed_at(0, 7, generator) for _ in range(300)]
    assert seeds == [(0, 2**64 - 1, 4 * place) for place in range(300)], "each once, in order"
    assert drawn == [(0, 2**64 - 1, 0, 256), (0, 2**64 - 1, 1024, 256)]
    assert generator.offset == 1200
    generator.offset = 40
    assert batches.next_seed_at(0, 7, generator) == seeds[10], "a restored state gives the same seed again"
    generator.offset = 5
    assert batches.next_seed_at(0, 7, generator) == seeds[1], "others moved it by less than a step"
    assert generator.offset == 8
    assert batches.next_seed_at(1, 7, FakeGenerator(3)) == (1, 3, 0), "another GPU"
    before = len(drawn)
    batches.next_seed_at(0, 8, generator)
    assert len(drawn) == before + 1, "another stream has memory of its own"
    for stream in range(200):
        assert batches.next_seed_at(0, stream, FakeGenerator(stream)) == (0, stream, 0)


def test_threads_share_no_seed_of_a_batch() -> None:
    batches = _torch.SeedBatches(lambda device, seed, offset, count: tuple(range(offset, offset + count)))
    generator = FakeGenerator(1)

    class Slow(FakeGenerator):
        def set_offset(self, offset: int) -> None:
            time.sleep(0.001)
            generator.offset = offset

        def get_offset(self) -> int:
            return generator.offset

    with ThreadPoolExecutor(4) as pool:
        seeds = list(pool.map(lambda _: batches.next_seed_at(0, 0, Slow(1)), range(64)))
    assert sorted(seeds) == list(range(64))


def test_a_batch_that_cannot_be_drawn_raises_and_the_next_one_can_be() -> None:
    def draw(*_: int) -> Tuple[Any, ...]:
        raise MemoryError("no room")

    generator = FakeGenerator(1)
    with pytest.raises(MemoryError, match="no room"):
        _torch.SeedBatches(draw).next_seed_at(0, 0, generator)
    with pytest.raises(TypeError):
        _torch.SeedBatches(lambda *_: 7).next_seed_at(0, 0, generator)  # type: ignore[arg-type, return-value]
    assert _torch.draw(torch.ones(2)).dtype == torch.int32, "on the CPU torch draws"


PROGRAMS = {
    "norm_act norm=layer act=gelu eps=1e-05": ("norm_act-layer-gelu", True),
    "add_norm norm=rms eps=1e-05": ("add_norm-rms", True),
    "bias_dropout_add p=0.5": ("bias_dropout_add", True),
    "attention mask=causal p=0.0 group=2": ("attention-shared", True),
    "linear_cross_entropy": ("linear_cross_entropy", True),
    "embed_norm norm=layer eps=1e-05": ("embed_norm-layer", True),
    "norm_quantize norm=rms eps=1e-05 residual=true": ("norm_quantize-rms-residual", False),
}


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_opcheck(program: str) -> None:
    """That the operators are what torch expects: schema, autograd, fake tensors, compilers."""
    name, differentiable = PROGRAMS[program]
    given = [one.int() if one.dtype == torch.int64 else one for one in tensors(CASES[name], (3, 8), torch.float32)]
    own = leaves(given) if differentiable else given
    checked = torch.library.opcheck(torch.ops.deuteron.forward.default, (program, own, differentiable))
    assert set(checked.values()) == {"SUCCESS"}, checked
    if differentiable:
        known = _torch.find(program)
        results, saved = known.forward_saving(given)
        gradients = upstream(results)
        for incoming in (gradients, [gradients[0], *[None] * (len(gradients) - 1)]):
            wanted = [one.is_floating_point() for one in given]
            arguments = (program, given, list(saved), incoming, wanted)
            checked = torch.library.opcheck(torch.ops.deuteron.backward.default, arguments)
            assert set(checked.values()) == {"SUCCESS"}, checked


def test_modes_of_torch_see_the_operators() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 7, dtype=torch.bfloat16)
        y, s = deuteron.add_norm(x, x, x[0], x[1])
        q, scale = deuteron.norm_quantize(x, x[0])
    assert (y.shape, y.dtype, s.shape) == (x.shape, x.dtype, x.shape)
    assert (q.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (3, 1))
    seen = []

    class Log(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.randn(3, 7, requires_grad=True)
    with Log():
        deuteron.act(x).sum().backward()
    assert "deuteron.forward.default" in seen and "deuteron.backward.default" in seen
    torch.testing.assert_close(x.grad, torch.autograd.grad(deuteron.act(x).sum(), x)[0], rtol=0, atol=0)


def test_an_exported_program(fresh: None) -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Any, w: Any) -> Any:
            return deuteron.rms_norm(x, w) * 2

    x, w = torch.randn(3, 8), torch.ones(8)
    exported = torch.export.export(Block(), (x, w))
    assert torch.equal(exported.module()(x, w), Block()(x, w))
    assert any("deuteron.forward" in str(node.target) for node in exported.graph.nodes)


# Determinism.


@pytest.mark.parametrize("name", list(CASES))
def test_the_same_bits_each_time(name: str) -> None:
    case = CASES[name]
    given = tensors(case, case.sizes[2], torch.float32)

    def run() -> List[Any]:
        if not case.differentiable:
            return listed(case.call(*given))
        results, gradients, _ = both_ways(case.call, given)
        return [*results, *gradients]

    first, threads = run(), torch.get_num_threads()
    try:
        for count in (1, 2, threads):
            torch.set_num_threads(count)
            assert all(map(torch.equal, run(), first))
    finally:
        torch.set_num_threads(threads)


def test_threads_of_python() -> None:
    """Forward and backward in many threads at once: each gets what one alone gets."""
    work = [(CASES[name], tensors(CASES[name], (6, 41), torch.float32)) for name in DIFFERENTIABLE[::4]]

    def run(index: int) -> List[Any]:
        case, given = work[index % len(work)]
        results, gradients, _ = both_ways(case.call, given)
        return [*results, *gradients]

    jobs = list(range(len(work))) * 6
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(run, jobs))
    alone = [run(index) for index in range(len(work))]
    for index, found in zip(jobs, together):
        assert all(map(torch.equal, found, alone[index]))


class Rows(torch.utils.data.Dataset):
    """Rows that workers of a loader compute, each in a process that was forked."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return deuteron.softmax(torch.arange(7.0) * index)


def test_workers_of_a_loader() -> None:
    expected = torch.stack([Rows()[index] for index in range(8)])
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=300
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert torch.equal(torch.cat(list(loader)), expected)


# Dropout.


def test_a_seed_decides_what_is_dropped() -> None:
    x = torch.ones(40, 1000)
    first, again, other = (
        deuteron.act_dropout(x, 0.25, seed, act="relu") for seed in (5, torch.tensor(5, dtype=torch.int32), 6)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    mask = kept(x.numel(), 5, 0.25).reshape(40, 1000)
    assert ((first != 0).numpy() == mask).all()
    deviation = (0.25 * 0.75 / x.numel()) ** 0.5
    assert abs((first == 0).float().mean() - 0.25) < 5 * deviation
    assert np.array_equal(first.numpy(), deuteron.act_dropout(x.numpy(), 0.25, 5, act="relu")), "as over arrays"


def test_the_generator_of_torch_draws_seeds() -> None:
    x = torch.ones(4, 100)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append([deuteron.act_dropout(x, 0.5) for _ in range(2)])
    assert all(map(torch.equal, drawn[0], drawn[1]))
    assert not torch.equal(drawn[0][0], drawn[0][1]) and not torch.equal(drawn[0][0], drawn[2][0])


def test_backward_drops_what_forward_dropped() -> None:
    x = torch.ones(40, 100, requires_grad=True)
    y = deuteron.act_dropout(x, 0.5, act="relu")
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient != 0, y != 0) and torch.equal(gradient, y.detach())


def test_nothing_is_dropped_in_evaluation() -> None:
    x, b = torch.randn(4, 33), torch.randn(33)
    state = torch.get_rng_state()
    assert torch.equal(deuteron.act_dropout(x, 0.5, training=False), deuteron.act(x))
    assert torch.equal(deuteron.bias_dropout_add(x, b, x, 0.5, training=False), x + b + x)
    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(deuteron.attention(q, q, q, p=0.5, training=False), deuteron.attention(q, q, q))
    assert torch.equal(torch.get_rng_state(), state), "no number is drawn"


# Tensors of other kinds, and misuse.


def test_parameters_subclasses_and_default_devices() -> None:
    class Own(torch.Tensor):
        pass

    x = torch.randn(3, 7)
    expected = deuteron.act(x)
    assert torch.equal(deuteron.act(torch.nn.Parameter(x)), expected)
    got = deuteron.act(x.as_subclass(Own))
    assert isinstance(got, Own) and torch.equal(got.as_subclass(torch.Tensor), expected)
    with torch.device("meta"):
        assert torch.equal(deuteron.act(x), expected)
        assert deuteron.act_dropout(x, 0.5).device.type == "cpu"
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert deuteron.act_dropout(x, 0.5).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_arrays_beside_tensors() -> None:
    x, b = torch.randn(3, 7), np.ones(7, "float32")
    expected = deuteron.bias_act(x, torch.ones(7))
    assert torch.equal(deuteron.bias_act(x, b), expected)
    got = deuteron.bias_act(x.numpy(), torch.ones(7))
    assert type(got) is np.ndarray and np.array_equal(got, expected.numpy())
    for call in (
        lambda: deuteron.bias_act(x.clone().requires_grad_(), b),
        lambda: deuteron.bias_act(x.numpy(), torch.ones(7, requires_grad=True)),
    ):
        with pytest.raises(TypeError, match="^bias_act: expected tensors of PyTorch"):
            call()


def test_bfloat16_by_dlpack() -> None:
    class Dlpack:
        def __init__(self, tensor: Any) -> None:
            self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__

    x = torch.randn(3, 7).bfloat16()
    got = deuteron.act(Dlpack(x))
    assert type(got) is deuteron.Array and got.dtype == "bf16"
    assert torch.equal(torch.from_dlpack(got), deuteron.act(x))


def test_tokens_of_64_bits() -> None:
    tokens = torch.tensor([[3, 0, 4], [1, 1, 2]])
    table, w = torch.randn(5, 16, requires_grad=True), torch.ones(16)
    both = [deuteron.embed_norm(kind, table, table, w) for kind in (tokens, tokens.int())]
    assert all(map(torch.equal, *both))
    gradients = [torch.autograd.grad(y.square().sum() + s.sum(), table)[0] for y, s in both]
    assert torch.equal(*gradients)
    for token in (-1, 5, 2**32):
        with pytest.raises(IndexError, match="^embed_norm: "):
            deuteron.embed_norm(torch.tensor([[0, token]]), table, table, w)


@pytest.mark.parametrize("target", [-1, 5, -100])
def test_a_target_that_is_no_class(target: int) -> None:
    x, weight = torch.randn(2, 8, requires_grad=True), torch.randn(5, 8)
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(IndexError, match="^linear_cross_entropy: "):
            deuteron.linear_cross_entropy(x.to(dtype), weight.to(dtype), torch.tensor([1, target]))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.125])
@pytest.mark.parametrize("ignored", [None, -100, 2])
def test_options_of_a_loss(reduction: str, smoothing: float, ignored: Optional[int]) -> None:
    x, weight = torch.randn(7, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    targets = torch.tensor([0, 4, 2, 1, 3, 2, 0])
    if ignored is not None:
        targets[1] = ignored
    results = []
    for ours in (True, False):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        if ours:
            loss = deuteron.linear_cross_entropy(a, b, targets, reduction, ignored, smoothing)
        else:
            options: Any = {"reduction": reduction, "label_smoothing": smoothing}
            options.update({} if ignored is None else {"ignore_index": ignored})
            loss = torch.nn.functional.cross_entropy(a @ b.t(), targets, **options)
        (loss * torch.arange(1.0, loss.numel() + 1.0).reshape(loss.shape)).sum().backward()
        results.append((loss.detach(), a.grad, b.grad))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.125])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_class_weights_and_z_loss(reduction: str, smoothing: float, weighted: bool, fused: bool) -> None:
    x, weight = torch.randn(7, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    targets, ignored = torch.tensor([0, 4, -100, 1, 3, 2, 0]), -100
    weights = torch.rand(5, dtype=torch.float64) + 0.5 if weighted else None

    def ours(a: Any, b: Any, targets: Any, weights: Any = None) -> Any:
        return deuteron.linear_cross_entropy(a, b, targets, reduction, ignored, smoothing, weights, z_loss=0.25)

    def theirs(a: Any, b: Any, targets: Any, weights: Any = None) -> Any:
        logits = a @ b.t()
        loss = torch.nn.functional.cross_entropy(logits, targets, weights, reduction=reduction, label_smoothing=smoothing)
        penalty = torch.where(targets == ignored, 0.0, 0.25 * logits.logsumexp(-1) ** 2)
        return loss + (penalty if reduction == "none" else penalty.sum() / (6 if reduction == "mean" else 1))

    results = []
    for function in (deuteron.fuse(ours) if fused else ours, theirs):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = function(a, b, targets, *(() if weights is None else (weights,)))
        (loss * torch.arange(1.0, loss.numel() + 1.0).reshape(loss.shape)).sum().backward()
        results.append((loss.detach(), a.grad, b.grad))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "words, message",
    [
        (dict(class_weights=torch.ones(4)), r"expected class_weights \[5\], got \[4\]"),
        (dict(class_weights=torch.ones(5, requires_grad=True)), "require no gradient"),
        (dict(z_loss=-1.0), "expected z_loss finite and not negative"),
        (dict(z_loss=0.1, reduction="max"), 'expected reduction "mean", "sum" or "none"'),
    ],
)
def test_options_that_a_loss_refuses(words: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deuteron.linear_cross_entropy(torch.randn(3, 8), torch.randn(5, 8), torch.tensor([0, 1, 2]), **words)


X = torch.randn(3, 4)
WRONG: Dict[str, Tuple[Callable[[], Any], Any, str]] = {
    "list": (lambda: deuteron.bias_act(X, [1.0]), TypeError, "bias_act: `b`: expected a tensor.* got list"),
    "none": (lambda: deuteron.bias_act(X, None), TypeError, "bias_act: `b`: expected a tensor.* got NoneType"),
    "none with a gradient": (
        lambda: deuteron.bias_act(X.clone().requires_grad_(), None),
        TypeError,
        "bias_act: .*expected .*tensor.* got NoneType",
    ),
    "f64 and f32": (lambda: deuteron.add_act(X, X.double()), TypeError, "add_act: expected all floats to be float64"),
    "f64 and f32 with gradients": (
        lambda: deuteron.add_act(X.clone().requires_grad_(), X.double()),
        TypeError,
        "add_act: expected all floats to be float64",
    ),
    "f16 and f32": (lambda: deuteron.add_act(X, X.half()), ValueError, "add_act: .*one dtype"),
    "complex": (
        lambda: deuteron.act(X.to(torch.complex64)),
        TypeError,
        "act: `x`: expected float32.* got torch.complex64",
    ),
    "uint8": (lambda: deuteron.act(X.byte()), TypeError, "act: `x`: expected float32.* got torch.uint8"),
    "float8": (lambda: deuteron.act(X.to(torch.float8_e4m3fn)), TypeError, "act: `x`: expected float32.*float8"),
    "whole numbers": (lambda: deuteron.act(X.int()), ValueError, "act: .*expected a float operand"),
    "meta": (
        lambda: deuteron.act(X.to("meta")),
        TypeError,
        "act: `x`: expected a tensor on cpu or cuda, got one on meta",
    ),
    "sparse": (lambda: deuteron.act(X.to_sparse()), TypeError, "act: `x`: expected a dense tensor"),
    "sparse rows": (lambda: deuteron.act(X.to_sparse_csr()), TypeError, "act: `x`: expected a dense tensor"),
    "nested": (
        lambda: deuteron.act(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        TypeError,
        "act: `x`: expected a dense tensor",
    ),
    "shapes": (lambda: deuteron.add_act(X, torch.ones(3, 5)), ValueError, r"add_act: .*expected shapes.* f32\[3,5\]"),
    "p": (lambda: deuteron.act_dropout(X, 1.0), ValueError, "act_dropout: expected p"),
    "seeds": (lambda: deuteron.act_dropout(X, 0.1, torch.zeros(2).int()), ValueError, "act_dropout: .*one i32 seed"),
    "mask": (lambda: deuteron.softmax(X, mask=(X > 0).int()), TypeError, "softmax: `mask`: expected truth values"),
    "act": (lambda: deuteron.act(X, act="tanh"), ValueError, "act: expected act to be gelu"),
    "heads": (lambda: deuteron.qkv(X, X, X[0], heads=1), ValueError, "qkv: expected x"),
    "halves": (lambda: deuteron.swiglu(torch.ones(3, 5)), ValueError, "swiglu: .*even number"),
}


@pytest.mark.parametrize("how", list(WRONG))
def test_misuse_is_told(how: str) -> None:
    call, kind, text = WRONG[how]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(kind, match="^" + text):
            call()


def test_a_gradient_that_does_not_fit() -> None:
    x = torch.randn(3, 7, requires_grad=True)
    program = _torch.find("act act=gelu")
    for gradients, wanted, kind in (
        ([torch.ones(3, 5)], [True], ValueError),
        ([torch.ones(3, 7).double()], [True], (TypeError, ValueError)),
        ([], [True], ValueError),
        ([torch.ones(3, 7)], [], ValueError),
        ([[1.0]], [True], TypeError),
    ):
        with pytest.raises(kind, match="^act: "):
            program.backward([x], [], gradients, wanted)

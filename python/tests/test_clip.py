"""`clip_grad_norm_` against that of torch: the same norms and gradients within rounding, the same of what is not finite, and errors that say more."""

from __future__ import annotations

import math
from typing import Any, Dict, List

import pytest

torch = pytest.importorskip("torch")

from deuteron.optim import _clip, clip_grad_norm_  # noqa: E402

# An empty one, one without axes, one whose elements are no multiple of a row, and one with so many rows of its own that it is summed by others.
SHAPES = [(), (0, 5), (3, 1, 5), (129, 33), (5003, 3)]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def parameters(dtypes: Any = (torch.float32,), shapes: Any = tuple(SHAPES)) -> List[Any]:
    """Parameters with gradients that every dtype holds; dtypes take turns."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for at, shape in enumerate(shapes):
        dtype = dtypes[at % len(dtypes)]
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        values = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-4, 2, shape, generator=generator)
        parameter.grad = values.to(torch.bfloat16).to(dtype)
        made.append(parameter)
    return made


def exact(own: List[Any], order: float, limit: float) -> Any:
    """Norm and clipped gradients in f64."""
    gradients = [one.grad.double() for one in own if one.numel()]
    norm = torch.linalg.vector_norm(torch.cat([one.reshape(-1) for one in gradients]), order)
    return norm, [one * min(1.0, limit / (float(norm) + 1e-6)) for one in gradients]


def check(own: List[Any], order: float, limit: float, **words: Any) -> Any:
    norm, expected = exact(own, order, limit)
    before = [one.grad.data_ptr() for one in own]
    found = clip_grad_norm_(own, limit, order, **words)
    # Sums of roundings that are small beside one of the result; powers by logarithms have a few more.
    off = 4e-6 if order in (1, 2, math.inf) else 4e-5
    assert abs(float(found) - float(norm)) <= float(norm) * (off + torch.finfo(found.dtype).eps / 2)
    for one, value in zip([one.grad for one in own if one.numel()], expected):
        # Half a unit for the store.
        bound = value.abs() * (torch.finfo(one.dtype).eps / 2 + off) + torch.finfo(one.dtype).smallest_normal
        assert bool(((one.double() - value).abs() <= bound).all())
    assert [one.grad.data_ptr() for one in own] == before
    return found


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf, 3.0])
def test_norm_and_gradients_are_those_of_f64(order: float) -> None:
    known = len(_clip._programs)
    for limit in (0.5, 1e6):
        assert check(parameters(), order, limit).dtype == torch.float32
    assert len(_clip._programs) <= known + 1, "one program, whatever the limit"


@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[1:2], DTYPES[2:], DTYPES[1:]], ids=["all", "bf16", "f16", "both of 16 bits"])
def test_dtypes_may_be_mixed(dtypes: Any) -> None:
    own, plain = parameters(dtypes), parameters(dtypes)
    found = check(own, 2.0, 0.5)
    theirs = torch.nn.utils.clip_grad_norm_(plain, 0.5)
    assert found.dtype == theirs.dtype and found.shape == theirs.shape and found.device == theirs.device
    # Torch rounds norm and factor to 16 bits where all gradients are of these.
    for one, other in zip(own, plain):
        assert one.grad.dtype == other.grad.dtype
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1e-3)


def same(own: List[Any], plain: List[Any], **words: Any) -> None:
    """Norm and gradients as torch's, bits of NaN and infinity included."""
    found, theirs = clip_grad_norm_(own, **words), torch.nn.utils.clip_grad_norm_(plain, **words)
    torch.testing.assert_close(found, theirs, rtol=1e-6, atol=0, equal_nan=True)
    for one, other in zip(own, plain):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-6, atol=0, equal_nan=True)


def twins(gradient: List[float]) -> List[Any]:
    made = []
    for _ in range(2):
        parameter = torch.nn.Parameter(torch.zeros(len(gradient)))
        parameter.grad = torch.tensor(gradient)
        made.append(parameter)
    return made


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_what_is_not_finite_is_as_in_torch(order: float) -> None:
    inf, nan = math.inf, math.nan
    for gradient in [[inf, 1.0, -2.0], [-inf, inf, 0.0], [nan, 1.0, 2.0], [0.0, -0.0, 0.0], [1e30, 1.0, 0.0], [3e-23, 0.0, 1e-30]]:
        one, other = twins(gradient)
        same([one], [other], max_norm=1.0, norm_type=order)
    for limit in (0.0, -1.0, inf, nan):
        one, other = twins([3.0, -4.0, 0.0])
        same([one], [other], max_norm=limit, norm_type=order)
    one, other = twins([inf, 1.0, 2.0])
    same([one], [other], max_norm=inf, norm_type=order)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_norm_that_is_not_finite_may_be_an_error(order: float) -> None:
    for value in (math.inf, math.nan):
        one, other = twins([1.0, value, 2.0])
        before = one.grad.clone()
        with pytest.raises(RuntimeError, match=f"finite, got {value}; no gradient was changed.*error_if_nonfinite=False"):
            clip_grad_norm_([one], 1.0, order, error_if_nonfinite=True)
        with pytest.raises(RuntimeError):
            torch.nn.utils.clip_grad_norm_([other], 1.0, order, error_if_nonfinite=True)
        assert torch.equal(one.grad.nan_to_num(7.0), before.nan_to_num(7.0))
    check(parameters(), order, 0.5, error_if_nonfinite=True)


def test_one_parameter_and_none() -> None:
    one, other = twins([3.0, 4.0])
    same([one], [other], max_norm=1.0)
    one, other = twins([3.0, 4.0])
    assert float(clip_grad_norm_(one, 1.0)) == 5.0 and torch.allclose(one.grad, torch.tensor([0.6, 0.8]))
    idle = torch.nn.Parameter(torch.ones(3))
    empty = torch.nn.Parameter(torch.ones(0, dtype=torch.bfloat16))
    empty.grad = torch.ones_like(empty)
    for listed in ([], [idle], iter([idle])):
        found = clip_grad_norm_(listed, 1.0)
        assert float(found) == 0.0 and found.dtype == torch.float32 and found.shape == ()
    found = clip_grad_norm_([idle, empty], 1.0)
    assert float(found) == 0.0 and found.dtype == torch.bfloat16 and idle.grad is None
    with pytest.warns(UserWarning, match="the generator of parameters is empty"):
        clip_grad_norm_((one for one in ()), 1.0)
    one, _ = twins([3.0, 4.0])
    assert float(clip_grad_norm_((p for p in [idle, one]), 1.0, foreach=True)) == 5.0


def test_memory_that_is_not_contiguous_is_scaled_where_it_is() -> None:
    base = torch.randn(6, 5, 4, 3, generator=torch.Generator().manual_seed(2))
    for view in (lambda x: x.permute(0, 2, 3, 1), lambda x: x[:, 1:4, :, ::2], lambda x: x.view(6, 1, 5, 1, 2, 2, 1, 3, 1)):
        runs = []
        for clip in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
            memory = base.clone()
            gradient = view(memory)
            parameter = torch.nn.Parameter(torch.zeros(gradient.shape))
            parameter.grad = gradient
            runs.append((clip([parameter], 0.5), memory))
        torch.testing.assert_close(runs[0], runs[1], rtol=2e-6, atol=0)


def test_a_gradient_that_is_there_twice_counts_twice() -> None:
    one, other = twins([3.0, 4.0])
    same([one, one], [other, other], max_norm=1.0)


def test_gradients_that_come_and_go_compile_a_bounded_number_of_programs(monkeypatch: Any) -> None:
    programs: Dict[Any, Any] = {}
    monkeypatch.setattr(_clip, "_programs", programs)
    monkeypatch.setattr(_clip, "_sets", {})
    monkeypatch.setattr(_clip, "_MOST_SETS", 2)
    for step in range(1, 8):
        own, plain = [[one for at, one in enumerate(parameters(shapes=[(3,), (4,), (5,)])) if step >> at & 1] for _ in range(2)]
        same(own, plain, max_norm=0.5)
    # Whole sets: norm with scaling, norms alone, scaling alone. And both parts of each gradient.
    assert len(programs) <= 3 * 2 + 2 * 3


def test_autograd_knows_of_the_scaling() -> None:
    one, _ = twins([3.0, 4.0])
    before = one.grad._version
    clip_grad_norm_([one], 1.0)
    assert one.grad._version == before + 1


def test_misuse_is_told() -> None:
    one, _ = twins([3.0, 4.0])
    for given, kind, text in [
        ((3, 1.0), TypeError, "expected a parameter or several, got a int"),
        (([3], 1.0), TypeError, "expected parameters of torch, got a int"),
        (([one], "much"), TypeError, "expected max_norm to be a number, got 'much'"),
        (([one], None), TypeError, "expected max_norm to be a number, got None"),
        (([one], 1.0, "two"), TypeError, "expected norm_type to be a number, got 'two'"),
        (([one], 1.0, 0.0), ValueError, "expected norm_type above 0, got 0.0; use torch.nn.utils.clip_grad_norm_"),
        (([one], 1.0, math.nan), ValueError, "expected norm_type above 0, got nan"),
    ]:
        with pytest.raises(kind, match=f"^clip_grad_norm_: {text}"):
            clip_grad_norm_(*given)
    table = torch.nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="^clip_grad_norm_: expected dense gradients.*torch.sparse_coo.*sparse=False"):
        clip_grad_norm_([one, table.weight], 1.0)
    wide = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    wide.grad = torch.ones_like(wide)
    with pytest.raises(TypeError, match="expected gradients of float32, bfloat16 or float16, got torch.float64; use torch.nn.utils"):
        clip_grad_norm_([one, wide], 1.0)
    assert one.grad.tolist() == [3.0, 4.0]


def test_the_bits_do_not_depend_on_threads() -> None:
    before, runs = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        own = parameters(shapes=[(300, 257), (5,)])
        runs.append([clip_grad_norm_(own, 0.5), *[one.grad for one in own]])
    torch.set_num_threads(before)
    assert all([torch.equal(a, b) for a, b in zip(*runs)])

"""A call like the last one of its program takes a short way. Each of these is like the last one but for one thing."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import deuteron  # noqa: E402

ROWS, COLUMNS = 6, 32


def drawn(seed: int = 1) -> Any:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def call_twice(x: Any) -> None:
    """So that the short way is open for what is like `x`."""
    for _ in range(2):
        deuteron.softmax(x)


def unaligned(x: Any) -> Any:
    """The same elements at an address that is no multiple of four."""
    bytes = torch.zeros(4 * x.numel() + 8, dtype=torch.uint8)
    start = 1 + (-bytes.data_ptr()) % 4
    view = torch.frombuffer(bytes.numpy().data, dtype=torch.float32, count=x.numel(), offset=start).view(x.shape)
    return view.copy_(x)


# The same values as tensors that differ from a plain one in one way.
LIKE: Dict[str, Callable[[Any], Any]] = {
    "other values": lambda x: x.clone(),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "negated": lambda x: torch._neg_view(-x),
    "rows apart": lambda x: torch.cat([x, x], 1)[:, :COLUMNS],
    "columns apart": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "unaligned": unaligned,
    "fewer rows": lambda x: x[:3],
    "one axis more": lambda x: x.view(2, 3, COLUMNS),
    "one axis less": lambda x: x[0],
    "no rows": lambda x: x[:0],
    "float64": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
}


@pytest.mark.parametrize("how", LIKE)
def test_a_tensor_that_differs_in_one_way(how: str) -> None:
    call_twice(drawn())
    x = LIKE[how](drawn(seed=2))
    found = deuteron.softmax(x)
    expected = torch.softmax(x.detach(), -1)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


def test_results_are_apart() -> None:
    x = drawn()
    call_twice(x)
    first, second = deuteron.softmax(x), deuteron.softmax(2 * x)
    assert first.data_ptr() != second.data_ptr()
    torch.testing.assert_close(first, torch.softmax(x, -1))
    for one, other in zip(deuteron.add_norm(x, x, x[0], x[0]), deuteron.add_norm(x, x, x[0], x[0])):
        assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()


def test_operands_are_told_apart_by_their_place() -> None:
    x, r = drawn(), drawn(seed=2)
    for _ in range(3):
        torch.testing.assert_close(deuteron.swiglu(x, r), torch.nn.functional.silu(x) * r)
        torch.testing.assert_close(deuteron.swiglu(r, x), torch.nn.functional.silu(r) * x)
    torch.testing.assert_close(deuteron.swiglu(x, r[:, :COLUMNS]), torch.nn.functional.silu(x) * r)
    with pytest.raises(TypeError, match="expected 2 operands"):
        deuteron._native.Program("swiglu packed=false")(x)


def test_a_gradient_is_taken() -> None:
    x = drawn()
    call_twice(x)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(deuteron.softmax(leaf).square().sum(), leaf)
    (expected,) = torch.autograd.grad(torch.softmax(leaf, -1).square().sum(), leaf)
    torch.testing.assert_close(gradient, expected)
    with torch.no_grad():
        assert not deuteron.softmax(leaf).requires_grad


def test_who_looks_at_calls_sees_them() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = drawn()
    call_twice(x)
    with Watch():
        deuteron.softmax(x)
    assert any("deuteron" in name for name in seen)
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.grad(lambda x: deuteron.softmax(x).square().sum())(x)
    from torch.autograd import forward_ad

    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        deuteron.softmax(forward_ad.make_dual(x, x))


def test_autocast_is_heeded() -> None:
    x, weight = drawn(), torch.randn(8, COLUMNS)
    bias = torch.zeros(8)
    for _ in range(2):
        assert deuteron.linear_act(x, weight.t(), bias).dtype == torch.float32
    square, own = torch.randn(COLUMNS, COLUMNS), torch.zeros(COLUMNS)
    for _ in range(2):
        assert deuteron.linear_act(x, square, own).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert deuteron.linear_act(x, square, own).dtype == torch.bfloat16


def test_other_libraries_in_turn() -> None:
    x = drawn()
    for _ in range(2):
        call_twice(x)
        found = deuteron.softmax(x.numpy())
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, torch.softmax(x, -1).numpy(), rtol=1e-5)
    with pytest.raises(TypeError, match="expected a tensor on cpu or cuda, got one on meta"):
        deuteron.softmax(torch.empty(ROWS, COLUMNS, device="meta"))


def test_the_default_device_of_torch_does_not_matter() -> None:
    x = drawn()
    call_twice(x)
    with torch.device("meta"):
        assert deuteron.softmax(x).device.type == "cpu"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_compiles_its_own() -> None:
    x = drawn()
    call_twice(x)
    expected = torch.softmax(x, -1)
    child = os.fork()
    if child == 0:
        good = all(torch.allclose(deuteron.softmax(x), expected) for _ in range(3))
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    torch.testing.assert_close(deuteron.softmax(x), expected)

"""Calls that `deuteron.fuse` leaves to torch, between the programs of what comes before and after them."""

from __future__ import annotations

from typing import Any, Callable, Dict

import pytest

torch = pytest.importorskip("torch")

import deuteron  # noqa: E402

F = torch.nn.functional
WEIGHT = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(2))


def without_gradient(x: Any, ids: Any) -> Any:
    with torch.no_grad():
        order = torch.cumsum(torch.exp(x), -1)
    return x * order


def branches(x: Any, ids: Any) -> Any:
    values, places = torch.topk(torch.exp(x) * 2, 3, dim=-1)
    weights = F.softmax(values, -1)
    return weights * torch.sin(x[:, :3]) + places.to(torch.float32), places, x.sort(-1).values


FUNCTIONS: Dict[str, Callable[[Any, Any], Any]] = {
    "sort": lambda x, ids: torch.sort(x * 2, -1),
    "argsort": lambda x, ids: x.argsort(-1, descending=True),
    "topk and softmax": branches,
    "cumsum": lambda x, ids: torch.cumsum(x * x, 1) / 3,
    "rotary": lambda x, ids: x * torch.cos(x) + torch.cat([-x[:, 4:], x[:, :4]], -1) * torch.sin(x),
    "gather": lambda x, ids: torch.gather(x.exp(), 1, ids),
    "gather where argmax is": lambda x, ids: x.gather(1, x.argmax(-1, keepdim=True)),
    "take along": lambda x, ids: torch.take_along_dim(x, ids, 1) + 1,
    "scatter": lambda x, ids: torch.zeros_like(x).scatter_add(1, ids, x[:, :2] * 3),
    "one hot": lambda x, ids: F.one_hot(ids, 8).to(torch.float32).sum(1) + x,
    "convolution": lambda x, ids: F.relu(F.conv1d(x.view(2, 4, 6), WEIGHT, padding=1)),
    "only torch": lambda x, ids: torch.flip(x, (0,)),
    "twice": lambda x, ids: torch.floor(torch.sign(x) * 1.5) + x,
    "without a gradient": without_gradient,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_torch(name: str, dtype: Any) -> None:
    if name == "convolution" and dtype != torch.float32:
        pytest.skip("the weight is of f32")
    generator, results = torch.Generator().manual_seed(1), []
    x = torch.randn(6, 8, generator=generator).to(dtype)
    ids = torch.randint(0, 8, (6, 2), generator=generator)
    for function in (deuteron.fuse(FUNCTIONS[name]), FUNCTIONS[name]):
        leaf = x.clone().requires_grad_()
        returned = function(leaf, ids)
        tensors = list(returned) if isinstance(returned, tuple) else [returned]
        wanted = [one for one in tensors if one.requires_grad]
        if wanted:
            sum((one * one).sum() for one in wanted).backward()
        results.append([*tensors, torch.zeros(()) if leaf.grad is None else leaf.grad])
    rounding = torch.finfo(dtype).eps
    for one, two in zip(*results):
        assert one.dtype == two.dtype and one.requires_grad == two.requires_grad
        torch.testing.assert_close(one, two, rtol=16 * rounding, atol=16 * rounding * float(two.detach().abs().max()))


def test_what_is_left_is_told() -> None:
    x, ids = torch.randn(6, 8), torch.zeros(6, 2, dtype=torch.int64)
    fused = deuteron.fuse(branches)
    assert [line for line in fused.graph(x, ids).splitlines() if line.startswith("#")] == [
        "# torch: topk",
        "# torch: sin",
        "# torch: sort",
    ]
    plan = fused.plan(x, ids)
    assert plan.count("left to torch: ") == 3 and "softmax" in plan
    assert "left to torch: sort" in fused.source(x, ids)


def test_autocast_changes_nothing() -> None:
    x = torch.randn(2, 4, 6)
    fused = deuteron.fuse(lambda x: F.conv1d(x * 2, WEIGHT))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused(x).dtype == torch.float32


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda x: torch.sort(x, out=(x, x)), "in place"),
        (lambda x: torch.gather(x, 1, torch.zeros(2, 2, dtype=torch.int64)), "not an argument of the fused function"),
        (lambda x: torch.cumsum(x, 0, dtype=torch.float64), "float64"),
        (lambda x: torch.cumsum_(x, 0), "cumsum_"),
        (lambda x: torch.topk(x, 99), "k"),
    ],
)
def test_what_cannot_be_left_is_refused(function: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError, RuntimeError), match=message):
        deuteron.fuse(function)(torch.randn(4, 8))


def test_a_graph_of_torch_compile_takes_no_calls_of_torch() -> None:
    fused = deuteron.fuse(lambda x: torch.cumsum(torch.exp(x), 0))
    with pytest.raises(TypeError, match="leaves calls to torch"):
        fused._constant(torch.randn(3))

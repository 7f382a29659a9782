"""Modules under `deuteron.fuse`: parameters, buffers and tensors of variables are captured, with gradients, and never stale."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import deuteron  # noqa: E402

F = torch.nn.functional
EPS = 2.0**-23
SHARED = torch.full((8,), 2.0)


def same(got: Any, expected: Any, terms: int = 64) -> None:
    assert got.shape == expected.shape
    bound = 8 * EPS * terms**0.5 * max(float(expected.detach().abs().max()), 1.0)
    assert float((got.detach().double() - expected.detach().double()).abs().max()) <= bound


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


def test_a_module_and_the_gradients_of_its_parameters() -> None:
    module, x = Block(), torch.randn(5, 8)
    fused = deuteron.fuse(module)
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    got, expected = fused(mine), module(other)
    same(got, expected)
    got.square().sum().backward()
    found = {name: one.grad.clone() for name, one in module.named_parameters()}
    module.zero_grad()
    expected.square().sum().backward()
    same(mine.grad, other.grad, 256)
    assert len(found) == 5
    for name, one in module.named_parameters():
        same(found[name], one.grad, 256)


def test_a_module_trains_as_itself() -> None:
    torch.manual_seed(1)
    module, twin, x = Block(), Block(), torch.randn(32, 8)
    twin.load_state_dict(module.state_dict())
    fused = deuteron.fuse(module)
    for step, one in ((fused, module), (twin, twin)):
        optimiser = torch.optim.SGD(one.parameters(), lr=0.05)
        for _ in range(5):
            optimiser.zero_grad()
            step(x).square().mean().backward()
            optimiser.step()
    assert repr(fused).endswith("1 traces>")
    for mine, other in zip(module.parameters(), twin.parameters()):
        same(mine, other, 1024)


def test_what_is_replaced_is_seen() -> None:
    module, x = Block(), torch.randn(5, 8)
    fused = deuteron.fuse(module)
    same(fused(x), module(x))
    module.up.weight = torch.nn.Parameter(torch.randn(16, 8))
    same(fused(x), module(x))
    module.scale = torch.zeros(8)
    same(fused(x), module(x))
    with torch.no_grad():
        module.down.weight.mul_(3.0)
    module.scale += 1
    same(fused(x), module(x))
    module.load_state_dict(Block().state_dict())
    same(fused(x), module(x))
    module.down = torch.nn.Linear(16, 8)
    same(fused(x), module(x))
    module.double()
    same(fused(x.double()), module(x.double()))
    module.bfloat16()
    assert fused(x.bfloat16()).dtype == torch.bfloat16


def test_a_module_in_16_bits_after_32() -> None:
    module = torch.nn.Linear(8, 8)
    fused = deuteron.fuse(lambda x: module(x.to(module.weight.dtype)))
    x = torch.randn(3, 8)
    assert fused(x).dtype == torch.float32
    module.bfloat16()
    assert fused(x).dtype == torch.bfloat16


def test_tensors_of_variables_are_captured() -> None:
    weight = torch.ones(8, requires_grad=True)

    def function(x: Any) -> Any:
        return x * weight + SHARED

    x = torch.randn(5, 8)
    fused = deuteron.fuse(function)
    same(fused(x), function(x))
    fused(x).sum().backward()
    same(weight.grad, x.sum(0))
    weight = torch.full((8,), 4.0)
    same(fused(x), function(x))
    global SHARED
    before, SHARED = SHARED, torch.full((8,), 7.0)
    same(fused(x), function(x))
    SHARED = before
    assert "weight = input f32[8]" in fused.graph(x) and "x" in fused.plan(x)


def test_a_method_of_a_module() -> None:
    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8))

        @deuteron.fuse
        def forward(self, x: Any) -> Any:
            return torch.sigmoid(x * self.weight)

    first, second, x = Gate(), Gate(), torch.randn(3, 8)
    for gate in (first, second):
        same(gate(x), torch.sigmoid(x * gate.weight))


def test_a_tensor_that_is_kept_nowhere_is_refused() -> None:
    class Holder:
        weight = torch.ones(8)

    holder = Holder()
    weight = torch.nn.Parameter(torch.ones(8))
    # The last is computed outside of the graph, so that its gradient would be lost.
    for function in (lambda x: x + torch.ones(8), lambda x: x * holder.weight, lambda x: x * torch.sigmoid(weight)):
        with pytest.raises(TypeError, match="pass it as one"):
            deuteron.fuse(function)(torch.randn(4, 8))


def test_a_compiler_is_told() -> None:
    module = torch.nn.Linear(8, 8)
    fused = deuteron.fuse(lambda x: module(x))
    with pytest.raises(Exception, match="captures tensors"):
        torch.compile(lambda x: fused(x) + 1, backend="eager", fullgraph=True)(torch.randn(2, 8))


def test_a_module_with_batch_norm_in_evaluation() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.ELU(), torch.nn.Dropout(0.5)).eval()
    x = torch.randn(5, 8)
    fused = deuteron.fuse(module)
    same(fused(x), module(x))
    module.train()
    with pytest.raises(TypeError, match="running statistics"):
        fused(x)

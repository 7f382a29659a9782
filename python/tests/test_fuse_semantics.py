"""`deuteron.fuse` honours what PyTorch means: modes, custom gradients, aliases, ties, small arguments, and results of any form."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any, Callable, Dict, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import deuteron  # noqa: E402
from deuteron import trace  # noqa: E402

F = torch.nn.functional
EPS = 2.0**-23


def close(got: Any, expected: Any, ulps: float = 8) -> bool:
    """Within a few roundings of each element, and of the smallest normal number."""
    expected = expected.double()
    return bool(((got.double() - expected).abs() <= ulps * EPS * expected.abs() + 2.0**-126).all())


def gradients(function: Callable[..., Any], *operands: Any) -> Any:
    leaves = [one.detach().clone().requires_grad_() for one in operands]
    function(*leaves).sum().backward()
    return [one.grad if one.grad is not None else torch.zeros_like(one) for one in leaves]


# Modes of autograd.


def partly(x: Any) -> Any:
    with torch.no_grad():
        y = x * 2
    return x + y


def twice_disabled(x: Any) -> Any:
    with torch.no_grad():
        y = torch.exp(x)
        with torch.enable_grad():
            z = x * 3
    return y * z


def set_off(x: Any) -> Any:
    with torch.set_grad_enabled(False):
        y = deuteron.act(x, act="silu")
    return y * x


@pytest.mark.parametrize("function", [partly, twice_disabled, set_off, lambda x: x * x.detach()])
def test_no_grad_ends_gradients(function: Any) -> None:
    x = torch.randn(4, 8)
    (got,), (expected,) = gradients(deuteron.fuse(function), x), gradients(function, x)
    assert close(got, expected)


def test_a_trace_made_without_gradients_has_them_later() -> None:
    x = torch.randn(4, 8)
    fused = deuteron.fuse(partly)
    with torch.no_grad():
        assert not fused(x.requires_grad_()).requires_grad
    with torch.inference_mode():
        fused(x)
    assert torch.equal(gradients(fused, x)[0], torch.ones(4, 8))


def test_a_result_without_a_gradient_requires_none() -> None:
    def function(x: Any) -> Any:
        with torch.no_grad():
            y = x * 2
        return y, x + 1, x.detach()

    x = torch.randn(3, 4, requires_grad=True)
    assert [one.requires_grad for one in deuteron.fuse(function)(x)] == [False, True, False]


# Custom gradients.


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -gradient


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x: Any) -> Any:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


@pytest.mark.parametrize("kind", [Reversed, Square])
def test_a_custom_gradient_is_refused(kind: Any) -> None:
    own = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(TypeError, match=f"^{kind.__name__}: .*custom torch.autograd.Function"):
        deuteron.fuse(lambda x: kind.apply(x) + 1)(torch.randn(3))
    assert torch.autograd.Function.__dict__["apply"] is own


def test_a_custom_gradient_on_tensors_goes_on_while_another_function_is_traced() -> None:
    def function(x: Any) -> Any:
        weight = torch.ones(3, requires_grad=True)
        Reversed.apply(weight).sum().backward()
        assert torch.equal(weight.grad, -torch.ones(3))
        return x + 1

    assert torch.equal(deuteron.fuse(function)(torch.zeros(3)), torch.ones(3))


# Aliases.


@pytest.mark.parametrize(
    "function",
    [lambda x: x.clone(), lambda x: torch.clone(x), lambda x: x.clone().view(12).view(3, 4), lambda x: x.clone().t().t()],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_a_clone_is_no_alias(function: Any, dtype: Any) -> None:
    x = torch.arange(12).view(3, 4).to(dtype)
    y = deuteron.fuse(function)(x)
    assert y.data_ptr() != x.data_ptr() and torch.equal(x, y)


def test_an_operand_that_is_handed_back_is_itself() -> None:
    x = torch.randn(3, 4)
    assert deuteron.fuse(lambda x: x)(x) is x


def test_contiguous_is() -> None:
    x = torch.randn(4, 3).t()
    y = deuteron.fuse(lambda x: x.contiguous())(x)
    assert y.is_contiguous() and torch.equal(x, y)


def test_a_clone_has_its_gradient() -> None:
    assert torch.equal(gradients(deuteron.fuse(lambda x: x.clone() * 2), torch.randn(3, 4))[0], torch.full((3, 4), 2.0))


# Small and flat arguments.


def test_log1p_and_softplus_keep_small_arguments() -> None:
    small = [sign * 10.0**power for power in range(-30, 3) for sign in (1.0, -1.0) if sign * 10.0**power > -1]
    x = torch.tensor([*small, 0.0, 1.0, -0.5, -0.999, 3e38, math.inf, 2.0**-24, 1.5 * 2.0**-24, 3 * 2.0**-24])
    for function in (torch.log1p, lambda x: x.log1p()):
        fused = deuteron.fuse(function)
        got = fused(x)
        assert close(got[x < math.inf], torch.log1p(x.double())[x < math.inf]) and got[x == math.inf] == math.inf
        assert close(gradients(fused, x)[0], 1 / (1 + x.double()))
    edge = deuteron.fuse(torch.log1p)(torch.tensor([-1.0, -2.0, math.nan]))
    assert edge[0] == -math.inf and edge[1:].isnan().all()
    y = torch.tensor([-100.0, -30.0, -18.0, -1.0, 0.0, 5.0, 19.9, 20.0, 20.1, 90.0])
    for beta in (1.0, 2.0):
        fused = deuteron.fuse(lambda x: F.softplus(x, beta=beta))
        # Both exponentiate first, which is off by as many roundings as the exponent has halvings.
        assert close(fused(y), F.softplus(y.double(), beta=beta), 300)
        assert close(gradients(fused, y)[0], gradients(lambda x: F.softplus(x, beta=beta), y.double())[0], 300)


@pytest.mark.parametrize("correction", [0, 1])
def test_the_deviation_of_a_constant_row_has_no_gradient(correction: int) -> None:
    x = torch.cat([torch.full((1, 8), 3.0), torch.randn(2, 8)])

    def function(x: Any) -> Any:
        return x.std(-1, correction=correction)

    got, expected = gradients(deuteron.fuse(function), x)[0], gradients(function, x.double())[0]
    assert torch.equal(got[0], torch.zeros(8)) and torch.equal(expected[0], torch.zeros(8).double())
    assert close(got, expected, 64)
    assert close(deuteron.fuse(function)(x), function(x.double()))


# Ties.

TIES: Dict[str, Callable[..., Any]] = {
    "maximum": lambda x, y: torch.maximum(x, y) * 3,
    "minimum": lambda x, y: torch.minimum(x, y) * 3,
    "binary max": lambda x, y: torch.max(x, y),
    "binary min": lambda x, y: x.min(y),
    "broadcast": lambda x, y: torch.maximum(x, y[0]),
    "clamp": lambda x, y: torch.clamp(x, -1.0, 1.0) + y,
    "clamp_min": lambda x, y: x.clamp(min=0.0) * y,
    "clamp by tensors": lambda x, y: torch.clamp(x, min=y),
    "relu": lambda x, y: torch.relu(x) + y,
    "amax": lambda x, y: x.amax(-1) + y.amin(0).sum(),
    "max along": lambda x, y: x.max(-1).values + y.min(0).values.sum(),
    "max along, kept": lambda x, y: x.max(0, keepdim=True).values * y,
    "all": lambda x, y: x.max() * y,
    "leaky": lambda x, y: F.leaky_relu(x) + y,
    "abs": lambda x, y: x.abs() * y,
}


@pytest.mark.parametrize("name", TIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ties_share_gradients_as_in_torch(name: str, dtype: Any) -> None:
    function = TIES[name]
    x = torch.tensor([[1.0, -1.0, 0.0, 1.0], [0.0, 0.0, -2.0, 5.0], [2.0, 2.0, 2.0, 2.0]], dtype=dtype)
    y = torch.tensor([[1.0, 1.0, 0.0, -1.0], [0.0, 1.0, -2.0, 5.0], [2.0, 1.0, 3.0, -2.0]], dtype=dtype)
    fused = deuteron.fuse(function)
    assert torch.equal(fused(x, y), function(x, y))
    for got, expected in zip(gradients(fused, x, y), gradients(function, x, y)):
        assert torch.equal(got, expected)


def test_extremes_of_infinities_and_nan() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 3e38])
    y = torch.tensor([math.inf, -math.inf, 1.0, math.nan, 3e38])
    got = deuteron.fuse(torch.maximum)(x, y)
    assert torch.equal(got.nan_to_num(nan=7.0, posinf=9.0), torch.maximum(x, y).nan_to_num(nan=7.0, posinf=9.0))


# Modules in training and out of it.


def test_a_module_that_changes_its_mode_is_traced_again() -> None:
    module = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Dropout(0.5)).eval()
    fused = deuteron.fuse(module)
    x = torch.randn(4, 8)
    assert close(fused(x), F.gelu(x.double()), 64)
    module.train()
    with pytest.raises(TypeError, match="dropout: .*seed"):
        fused(x)
    module.eval()
    assert close(fused(x), F.gelu(x.double()), 64)


class Scaled(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2 if self.training else x * 3

    @deuteron.fuse
    def method(self, x: Any) -> Any:
        return x * 2 if self.training else x * 3


def test_modules_in_closures_and_methods_are_noted() -> None:
    module, x = Scaled(), torch.ones(3)
    holder = {"module": module}

    def inner(x: Any) -> Any:
        return holder["module"](x)

    for fused in (deuteron.fuse(lambda x: inner(x)), deuteron.fuse(module.forward), module.method):
        for training in (True, False, True):
            module.train(training)
            assert torch.equal(fused(x), x * (2 if training else 3))


# Results of any form.


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any = None
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Derived:
    value: Any
    shape: Any = dataclasses.field(init=False, default=None)


class Named(NamedTuple):
    a: Any
    b: Any


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_results_are_of_the_form_that_the_function_gives() -> None:
    x = torch.ones(2, 3)
    pair = deuteron.fuse(lambda x: Pair(x * 2, {"y": Pair(x + 1)}, 3))(x)
    assert isinstance(pair, Pair) and torch.equal(pair.first, x * 2) and pair.count == 3
    assert torch.equal(pair.second["y"].first, x + 1)
    derived = deuteron.fuse(lambda x: Derived(x * 2))(x)
    assert isinstance(derived, Derived) and torch.equal(derived.value, x * 2)
    named = deuteron.fuse(lambda x: Named(b=x * 2, a=[x + 1]))(x)
    assert isinstance(named, Named) and torch.equal(named.b, x * 2) and isinstance(named.a, list)
    ordered = deuteron.fuse(lambda x: collections.OrderedDict(b=x * 2, a=x))(x)
    assert type(ordered) is collections.OrderedDict and list(ordered) == ["b", "a"]
    usual = deuteron.fuse(lambda x: collections.defaultdict(int, y=x * 2))(x)
    assert type(usual) is collections.defaultdict and usual["none"] == 0
    size = deuteron.fuse(lambda x: (x * 2, torch.Size(x.shape)))(x)[1]
    assert size == torch.Size([2, 3]) and type(size) is torch.Size


def test_arguments_may_be_dataclasses() -> None:
    x = torch.ones(2, 3)
    fused = deuteron.fuse(lambda pair: pair.first * pair.count)
    assert torch.equal(fused(Pair(x, count=3)), x * 3) and torch.equal(fused(Pair(x, count=4)), x * 4)


@pytest.mark.parametrize("make", [Holder, lambda x: {x}, lambda x: collections.deque([x]), lambda x: [Holder([x])]])
def test_values_do_not_leak(make: Any) -> None:
    with pytest.raises(TypeError, match="expected tensors in tuples, lists, dicts and dataclasses"):
        deuteron.fuse(lambda x: make(x * 2))(torch.ones(3))


def test_outputs_of_transformers_keep_their_class() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    x = torch.ones(2, 3)
    got = deuteron.fuse(lambda x: outputs.BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x, x + 1)))(x)
    assert type(got) is outputs.BaseModelOutput
    assert torch.equal(got.last_hidden_state, x * 2) and torch.equal(got["hidden_states"][1], x + 1)


# Whole numbers of 64 bits.


def test_whole_numbers_beyond_32_bits_are_refused() -> None:
    fused = deuteron.fuse(lambda ids, x: torch.where(ids[:, None] == 5, x, 0.0), name="pick")
    x = torch.ones(3, 4)
    assert fused(torch.tensor([5, -(2**31), 2**31 - 1]), x).sum() == 4
    for number in (2**31, -(2**31) - 1, 2**40):
        with pytest.raises(OverflowError, match="^pick: `ids`: expected whole numbers that 32 bits hold"):
            fused(torch.tensor([5, number, 0]), x)


def test_a_row_of_minus_infinity_is_documented_to_give_zeros() -> None:
    x = torch.full((1, 4), -math.inf)
    assert torch.equal(deuteron.fuse(lambda x: torch.softmax(x, -1))(x), torch.zeros(1, 4))
    assert torch.equal(deuteron.softmax(x), torch.zeros(1, 4))
    assert "-inf" in str(deuteron.softmax.__doc__) and "-inf" in str(trace.softmax.__doc__)


# Dtypes of integers, and what torch's samples found.


@pytest.mark.parametrize(
    "function",
    [
        lambda x, ids: x.argmax(-1),
        lambda x, ids: x.max(1).indices,
        lambda x, ids: torch.argmin(x[0, 0]),
        lambda x, ids: x[0, 0].argmax(),
        lambda x, ids: ids.view(1, -1),
        lambda x, ids: torch.where(x[:, 0] > 0, ids, 0),
        lambda x, ids: ids.to(torch.int32).view(-1, 1),
        lambda x, ids: ids.to(torch.int32).to(torch.int64),
        lambda x, ids: torch.full_like(ids, 3),
        lambda x, ids: ids.new_zeros(2),
        lambda x, ids: torch.tril(ids.view(1, -1).expand(4, 4)),
        lambda x, ids: torch.triu(x > 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_have_the_dtypes_of_torch(function: Any, dtype: Any) -> None:
    x, ids = torch.randn(4, 5), torch.arange(4, dtype=dtype)
    got, expected = deuteron.fuse(function)(x, ids), function(x, ids)
    assert got.dtype == expected.dtype and torch.equal(got, expected)


def test_traces_of_32_and_64_bits_are_two() -> None:
    fused = deuteron.fuse(lambda ids, scale=1: ids.view(2, 2))
    for dtype in (torch.int64, torch.int32, torch.int64):
        assert fused(torch.arange(4, dtype=dtype), scale=1).dtype == dtype


def test_floats_of_64_bits_are_not_mixed_with_others() -> None:
    x, y = torch.randn(3), torch.randn(3, dtype=torch.float64)
    for function in (lambda x, y: x + y, lambda x, y: x.to(y)):
        with pytest.raises(TypeError, match="only 64-bit floats, or none"):
            deuteron.fuse(function)(x, y)
    with pytest.raises(TypeError, match="only 64-bit floats, or none"):
        deuteron.fuse(lambda x: x + y)(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.where(x > 0, -x),
        lambda x: F.softmax(x[0, 0], 0),
        lambda x: torch.sum(x, dim=()),
        lambda x: torch.sum(x, dim=[]).squeeze(()),
        lambda x: x.view(1, 4, 5).squeeze(()),
        lambda x: torch.logsumexp(x, (0, 1)),
        lambda x: torch.linalg.norm(x, 1),
        lambda x: torch.linalg.norm(x, math.inf, keepdim=True),
        lambda x: torch.linalg.norm(x, "fro", dim=(0, 1)),
        lambda x: torch.linalg.norm(x, 1, dim=0),
        lambda x: torch.linalg.norm(x),
        lambda x: F.cosine_similarity(x.view(1, 4, 5), x.view(4, 1, 5), dim=-3),
    ],
)
def test_what_samples_of_torch_found(function: Any) -> None:
    x = torch.randn(4, 5)
    got, expected = deuteron.fuse(function)(x), function(x.double())
    assert got.shape == expected.shape and close(got, expected, ulps=16)
    (mine,), (theirs,) = gradients(deuteron.fuse(function), x), gradients(function, x.double())
    assert bool(((mine.double() - theirs).abs() <= 32 * EPS * theirs.abs().max()).all())


def test_log_softmax_of_a_sure_class() -> None:
    """The logarithm of a probability near 1 is off by roundings of 1, and not of the logits."""
    x = torch.tensor([[900.0, 892.0, 880.0], [-7.0, 7.0, -5.0]])
    got, exact = deuteron.fuse(lambda x: F.log_softmax(x, -1))(x), F.log_softmax(x.double(), -1)
    assert bool(((got.double() - exact).abs() <= 2 * EPS * (1 + exact.abs())).all())

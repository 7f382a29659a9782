"""Functions of torch that graphs have no operation for: values and gradients beside torch's, in `f32` and in 16 bits."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict

import pytest

torch = pytest.importorskip("torch")

import deuteron  # noqa: E402

F = torch.nn.functional
EPS = 2.0**-23

CLASSES = torch.tensor([3, 0, 7, -100, 2, 5])
INDEX = torch.tensor([2, 0, 2, 5])


def of(*words: Any) -> Callable[..., Any]:
    """A loss of every reduction, side by side."""
    function, *rest = words
    return lambda x, y, w: torch.stack(
        [function(x, y, *rest, reduction=kind).sum() for kind in ("none", "sum", "mean")]
    )


FUNCTIONS: Dict[str, Callable[..., Any]] = {
    "expm1": lambda x, y, w: torch.expm1(x) + torch.expm1(y * 1e-6) * 1e6,
    "exp2": lambda x, y, w: torch.exp2(x),
    "log2": lambda x, y, w: torch.log2(x * x + 0.5) + torch.log10(y.abs() + 1),
    "elu": lambda x, y, w: F.elu(x) + F.elu(y, 0.5),
    "celu": lambda x, y, w: F.celu(x, 2.0),
    "selu": lambda x, y, w: F.selu(x),
    "logsigmoid": lambda x, y, w: F.logsigmoid(x * 30) + F.logsigmoid(y),
    "mish": lambda x, y, w: F.mish(x),
    "softsign": lambda x, y, w: F.softsign(x),
    "tanhshrink": lambda x, y, w: F.tanhshrink(x),
    "hardtanh": lambda x, y, w: F.hardtanh(x, -0.5, 0.5) + F.relu6(y * 5),
    "threshold": lambda x, y, w: F.threshold(x, 0.1, 20.0),
    "shrinks": lambda x, y, w: F.hardshrink(x) + F.softshrink(y, 0.3),
    "prelu": lambda x, y, w: F.prelu(x, w),
    "glu": lambda x, y, w: F.glu(x, -1) + F.glu(y, 1),
    "softmin": lambda x, y, w: F.softmin(x, dim=-1),
    "nan_to_num": lambda x, y, w: torch.nan_to_num(torch.log(x.clamp(min=0.0)), nan=1.0, neginf=-3.0),
    "tests of floats": lambda x, y, w: torch.where(torch.isfinite(x) & ~torch.isnan(y) & ~torch.isinf(x), x, y),
    "addc": lambda x, y, w: torch.addcmul(x, y, w, value=0.5) + torch.addcdiv(x, y, w * w + 1, value=2),
    "lerp": lambda x, y, w: torch.lerp(x, y, 0.25) + x.lerp(y, w),
    "outer": lambda x, y, w: torch.outer(x[0], y[1]) + torch.inner(w, w),
    "products": lambda x, y, w: torch.mv(x, w) * torch.dot(w, w) + x.inner(y)[0],
    "norms": lambda x, y, w: torch.norm(x, dim=-1) + torch.linalg.vector_norm(y, 1, dim=1) + x.norm(math.inf, -1),
    "normalize": lambda x, y, w: F.normalize(x, dim=-1) + F.normalize(y, p=1.0, dim=0),
    "similarity": lambda x, y, w: F.cosine_similarity(x, y, dim=-1) + F.pairwise_distance(x, y),
    "dist": lambda x, y, w: torch.dist(x, y),
    "moments": lambda x, y, w: sum(torch.var_mean(x, dim=-1)) + sum(torch.std_mean(y, dim=1)),
    "nansum": lambda x, y, w: torch.nansum(torch.where(x > 1, math.inf, x).clamp(max=3.0), -1),
    "rms_norm": lambda x, y, w: F.rms_norm(x * 0.01, x.shape[-1:], w) + F.rms_norm(y, y.shape[-1:], w, 0.1),
    "group_norm": lambda x, y, w: F.group_norm(x.view(2, 8, 3), 4, w, w) + F.group_norm(y.view(2, 8, 3), 2),
    "instance_norm": lambda x, y, w: F.instance_norm(x.view(2, 8, 3), weight=w)
    + F.instance_norm(y.view(2, 8, 3), w.detach(), w.detach().exp(), use_input_stats=False)
    + F.instance_norm(y.view(2, 8, 3), w.detach(), w.detach().exp(), momentum=0.0),
    "pow": lambda x, y, w: (x.abs() + 0.5) ** w + torch.pow(x.abs() + 0.5, 2.5) + 2.0**y + (y.abs() + 1).pow(x),
    "batch_norm": lambda x, y, w: F.batch_norm(x, y[0].detach(), y[1].detach().abs() + 0.5, w, w) + F.batch_norm(y, None, None, training=True),
    "mse": of(F.mse_loss),
    "l1": of(F.l1_loss),
    "huber": lambda x, y, w: of(F.huber_loss)(x, y, w) + of(F.smooth_l1_loss)(x, y, w),
    "kl": lambda x, y, w: of(F.kl_div)(F.log_softmax(x, -1), F.softmax(y, -1), w)
    + F.kl_div(F.log_softmax(x, -1), F.log_softmax(y, -1), log_target=True, reduction="batchmean"),
    "binary": lambda x, y, w: of(F.binary_cross_entropy_with_logits)(x * 20, torch.sigmoid(y), w)
    + F.binary_cross_entropy_with_logits(x, torch.sigmoid(y), weight=w.detach() ** 2, pos_weight=w.detach().abs()),
    "repeat": lambda x, y, w: x.repeat(2, 1, 3).sum(1) + torch.tile(w, (3,)) + w.tile(2, 3)[1],
    "interleave": lambda x, y, w: x.repeat_interleave(3, dim=0)[:6] * w.repeat_interleave(2)[:8] + x.repeat_interleave(2, 1)[:, :8],
    "roll": lambda x, y, w: torch.roll(x, 3, -1) + y.roll((1, -2), (0, 1)) + torch.roll(x, 5),
    "einsum": lambda x, y, w: torch.einsum("ij,kj->ik", x, y) @ torch.einsum("ij,j->i", x, w),
    "einsum of batches": lambda x, y, w: torch.einsum("bhd,bhe,e->bde", x.view(2, 3, 8), y.view(2, 3, 8), w),
    "einsum without an arrow": lambda x, y, w: torch.einsum("ji,jk", x, y) + torch.einsum("ij->j", x),
    "methods": lambda x, y, w: x.expm1() + y.addcmul(x, y) + x.new_ones(8) * x.new_zeros((6, 8)).to(x.device) + x.ravel()[0],
}


def gradients(function: Any, *operands: Any) -> Any:
    leaves = [one.detach().clone().requires_grad_() for one in operands]
    result = function(*leaves)
    weight = torch.linspace(0.5, 1.5, result.numel()).view(result.shape).to(result.dtype)
    (result * weight).sum().backward()
    return result.detach(), [torch.zeros_like(one) if one.grad is None else one.grad for one in leaves]


def error(got: Any, exact: Any) -> float:
    assert got.shape == exact.shape
    return float((got.double() - exact).abs().max())


# In `f32` all of them, and in one of the types of 16 bits each.
TYPED = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for turn, name in enumerate(FUNCTIONS)
    for dtype in (torch.float32, (torch.bfloat16, torch.float16)[turn % 2])
]


@pytest.mark.parametrize("name, dtype", TYPED)
def test_values_and_gradients_are_those_of_torch(name: str, dtype: Any) -> None:
    """At most twice as far off as torch, gradients three times, and a few roundings of the largest value."""
    function = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(7)
    data = [torch.randn(shape, generator=generator).to(dtype) for shape in ((6, 8), (6, 8), (8,))]
    got, mine = gradients(deuteron.fuse(function), *data)
    theirs, other = gradients(function, *data)
    exact, reference = gradients(function, *(one.double() for one in data))
    assert got.dtype == theirs.dtype
    unit = torch.finfo(dtype).eps
    assert error(got, exact) <= 2 * error(theirs, exact) + (2 * unit + 64 * EPS) * max(float(exact.abs().max()), 1.0)
    for one, two, three in zip(mine, other, reference):
        size = max(float(three.abs().max()), 1.0)
        assert error(one, three) <= 3 * error(two, three) + (4 * unit + 256 * EPS) * size


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_with_all_options(smoothing: float, reduction: str, weighted: bool) -> None:
    def function(x: Any, w: Any, images: Any) -> Any:
        words = dict(weight=w.detach().exp() if weighted else None, reduction=reduction)
        loss = F.cross_entropy(x, CLASSES_OF[0], label_smoothing=smoothing, **words).sum()
        loss = loss + F.nll_loss(F.log_softmax(x, -1), CLASSES_OF[0], **words).sum()
        return loss + F.cross_entropy(images, CLASSES_OF[0].view(2, 3), label_smoothing=smoothing, **words).sum()

    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(shape, generator=generator) for shape in ((6, 8), (8,), (2, 8, 3))]
    exact, reference = gradients(function, *(one.double() for one in data))

    def fused(x: Any, w: Any, images: Any) -> Any:
        def traced(classes: Any, x: Any, w: Any, images: Any) -> Any:
            CLASSES_OF[0] = classes
            return function(x, w, images)

        try:
            return deuteron.fuse(traced)(CLASSES, x, w, images)
        finally:
            CLASSES_OF[0] = CLASSES

    got, mine = gradients(fused, *data)
    assert error(got, exact) <= 64 * EPS * max(float(exact.abs().max()), 1.0)
    for one, three in zip(mine, reference):
        assert error(one, three) <= 64 * EPS * max(float(three.abs().max()), 1.0)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_ignored_row_beside_a_masked_class_has_no_loss(reduction: str, smoothing: float) -> None:
    def function(x: Any, classes: Any) -> Any:
        return F.cross_entropy(x, classes, reduction=reduction, label_smoothing=smoothing)

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))
    x[1, 0] = -torch.inf  # of the row that is ignored
    classes = torch.tensor([1, -100, 3])
    got, [mine] = gradients(lambda x: deuteron.fuse(function)(x, classes), x)
    exact, [reference] = gradients(lambda x: function(x, classes), x.double())
    assert error(got, exact) <= 64 * EPS and error(mine, reference) <= 64 * EPS


def test_a_power_of_a_captured_parameter() -> None:
    class Pool(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = torch.nn.Parameter(torch.tensor(3.0))
            self.root = torch.nn.Parameter(torch.tensor(1 / 3))

        def forward(self, x: Any) -> Any:
            return x.clamp(min=1e-3).pow(self.p).mean(-1) ** self.root

    module, x = Pool(), torch.rand(5, 8) + 0.5
    exact, got = module(x).detach(), deuteron.fuse(module)(x).detach()
    assert error(got, exact.double()) <= 64 * EPS


def test_instance_norm_without_statistics_is_refused() -> None:
    with pytest.raises(ValueError, match="instance_norm: expected running_mean and running_var"):
        deuteron.fuse(lambda x: F.instance_norm(x, use_input_stats=False))(torch.randn(2, 3, 4))


CLASSES_OF = [CLASSES]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_probabilities(smoothing: float, reduction: str, weighted: bool) -> None:
    def function(x: Any, y: Any, w: Any, images: Any) -> Any:
        words = dict(weight=w.detach().exp() if weighted else None, reduction=reduction, label_smoothing=smoothing)
        loss = F.cross_entropy(x, y.softmax(-1), **words).sum() + F.cross_entropy(x[0], y[0].softmax(-1), **words).sum()
        return loss + F.cross_entropy(images, images.softmax(1), **words).sum()

    generator = torch.Generator().manual_seed(5)
    data = [torch.randn(shape, generator=generator) for shape in ((6, 8), (6, 8), (8,), (2, 8, 3))]
    exact, reference = gradients(function, *(one.double() for one in data))
    got, mine = gradients(deuteron.fuse(function), *data)
    assert error(got, exact) <= 64 * EPS * max(float(exact.abs().max()), 1.0)
    for one, three in zip(mine, reference):
        assert error(one, three) <= 64 * EPS * max(float(three.abs().max()), 1.0)


@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss])
@pytest.mark.parametrize("words", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"weight": torch.arange(1.0, 9.0)}])
def test_a_class_that_there_is_not_is_an_error(function: Any, words: Any) -> None:
    x, weight = torch.randn(6, 8), words.get("weight")
    rest = {key: value for key, value in words.items() if key != "weight"}

    def loss(x: Any, y: Any, w: Any = None) -> Any:
        return function(x, y, weight=w, **rest)

    fused = deuteron.fuse(loss)
    given = () if weight is None else (weight,)
    assert torch.allclose(fused(x, CLASSES, *given), loss(x, CLASSES, *given), atol=1e-6)
    for wrong in (8, 100, -1):
        with pytest.raises(IndexError, match="0..8"):
            fused(x, torch.where(CLASSES == 7, wrong, CLASSES), *given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("probabilities", [False, True])
def test_z_loss_of_plain_cross_entropy(dtype: Any, reduction: str, probabilities: bool) -> None:
    """It is added to torch's loss, with the same reduction over the rows that count."""
    logits = torch.randn(6, 8).mul(3).to(dtype)
    target = torch.randn(6, 8).softmax(-1).to(dtype) if probabilities else CLASSES

    def exact(x: Any) -> Any:
        squares = torch.logsumexp(x, -1).square() * 0.25
        counted = torch.ones(6, dtype=torch.bool) if probabilities else CLASSES != -100
        squares = torch.where(counted, squares, 0.0)
        added = {"none": squares, "sum": squares.sum(), "mean": squares.sum() / counted.sum()}[reduction]
        return F.cross_entropy(x, target.to(x.dtype) if probabilities else target, reduction=reduction) + added

    want, [slope] = gradients(exact, logits.double())
    got, [mine] = gradients(lambda x: deuteron.nn.functional.cross_entropy(x, target, reduction=reduction, z_loss=0.25), logits)
    unit = torch.finfo(dtype).eps
    assert got.dtype == dtype
    assert error(got, want) <= 8 * unit * max(float(want.abs().max()), 1.0)
    assert error(mine, slope) <= 8 * unit * max(float(slope.abs().max()), 1.0)


def test_options_of_plain_cross_entropy_are_checked() -> None:
    loss, x = deuteron.nn.functional.cross_entropy, torch.randn(6, 8)
    for words in ({"z_loss": -1.0}, {"z_loss": float("inf")}, {"reduction": "max"}, {"weight": torch.ones(8, requires_grad=True)}):
        with pytest.raises(ValueError, match="cross_entropy: expected"):
            loss(x, CLASSES, **words)


def test_rows_are_selected_along_any_axis() -> None:
    x = torch.randn(3, 6, 4)
    fused = deuteron.fuse(lambda x, index: torch.index_select(x, 1, index) + x.index_select(1, index))
    assert torch.equal(fused(x, INDEX), 2 * x[:, INDEX])
    with pytest.raises(IndexError):
        fused(x, torch.tensor([6]))


def test_truths_along_axes_and_smallest_places() -> None:
    x = torch.randn(5, 7)
    fused = deuteron.fuse(lambda x: (torch.any(x > 1, -1), (x > -2).all(0), torch.all(x > -9), x.argmin(-1)))
    expected = (torch.any(x > 1, -1), (x > -2).all(0), torch.all(x > -9), x.argmin(-1))
    assert all(torch.equal(one.long(), two.long()) for one, two in zip(fused(x), expected))


def test_small_arguments_of_expm1() -> None:
    x = torch.tensor([sign * 10.0**power for power in range(-30, 2) for sign in (1.0, -1.0)] + [0.0, 80.0, -200.0])
    got, exact = deuteron.fuse(torch.expm1)(x), torch.expm1(x.double())
    assert bool(((got.double() - exact).abs() <= 16 * EPS * exact.abs()).all())
    assert deuteron.fuse(torch.expm1)(torch.tensor([math.inf, -math.inf])).tolist() == [math.inf, -1.0]


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda x: F.batch_norm(x, x[0], x[0], training=True), "running statistics"),
        (lambda x: F.batch_norm(x[0], None, None, training=True), "channels as the second axis"),
        (lambda x: x.to("cuda"), "device of the operands"),
        (lambda x: torch.einsum("ii->i", x[:, :4]), "different letters"),
        (lambda x: torch.norm(x, 3), "order of 1, 2 or infinity"),
        (lambda x: F.cross_entropy(x, x, ignore_index=2), "ignore_index only beside classes"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: torch.zeros_like(x, dtype=torch.float64), "at most 32 bits"),
        (lambda x: torch.float_power(x, 2), "float_power"),
        (lambda x: torch.abs(x.argmax(-1)), "expected a float operand"),
        (lambda x: (x > 0).sum(), "expected a float operand"),
        (lambda x: torch.nansum(x.argmax(-1)), "expected a float operand"),
        (lambda x: torch.linalg.norm(x, 2), "for matrices"),
        (lambda x: x.repeat_interleave(x), "whole number"),
        (lambda x: x.new_zeros(3, device="cuda"), "device of the operands"),
    ],
)
def test_what_is_not_computed_is_refused(function: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        deuteron.fuse(function)(torch.randn(4, 8))

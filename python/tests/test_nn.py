"""The modules against the torch modules that they replace."""

from __future__ import annotations

import copy
import doctest
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import deuteron  # noqa: E402


class Case(NamedTuple):
    """A module, what torch computes in its place from the same parameters, and the shapes of its inputs."""

    make: Callable[[], Any]
    torchs: Callable[..., Any]
    shapes: Tuple[Tuple[int, ...], ...]


def heads(x: Any, weight: Any, bias: Any, count: int) -> List[Any]:
    joint = F.linear(x, weight, bias)
    return [part.unflatten(-1, (count, -1)).transpose(1, 2) for part in joint.chunk(3, -1)]


def attend(m: Any, x: Any, residual: Any) -> Any:
    q, k, v = heads(x, m.in_proj_weight, m.in_proj_bias, m.num_heads)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=m.causal).transpose(1, 2).flatten(2)
    s = residual + m.out_proj(mixed)
    return m.norm(s), s


def norm(m: Any, x: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], m.weight, m.bias, m.eps)


CASES: Dict[str, Case] = {
    "LayerNormGELU": Case(lambda: deuteron.nn.LayerNormGELU(33), lambda m, x: F.gelu(norm(m, x)), ((2, 5, 33),)),
    "LayerNormGELU-tanh": Case(
        lambda: deuteron.nn.LayerNormGELU(48, eps=1e-3, approximate="tanh"),
        lambda m, x: F.gelu(norm(m, x), approximate="tanh"),
        ((7, 48),),
    ),
    "RMSNormSiLU": Case(
        lambda: deuteron.nn.RMSNormSiLU(33, eps=1e-5),
        lambda m, x: F.silu(F.rms_norm(x, x.shape[-1:], m.weight, 1e-5)),
        ((2, 5, 33),),
    ),
    "AddLayerNorm": Case(
        lambda: deuteron.nn.AddLayerNorm(33), lambda m, x, r: (norm(m, x + r), x + r), ((2, 5, 33), (2, 5, 33))
    ),
    "BiasDropoutAdd": Case(
        lambda: deuteron.nn.BiasDropoutAdd(33, 0.2).eval(), lambda m, x, r: x + m.bias + r, ((2, 5, 33), (2, 5, 33))
    ),
    "DropoutAddLayerNorm": Case(
        lambda: deuteron.nn.DropoutAddLayerNorm(33, 0.2).eval(),
        lambda m, x, r: (norm(m, x + r), x + r),
        ((2, 5, 33), (2, 5, 33)),
    ),
    "SwiGLU": Case(lambda: deuteron.nn.SwiGLU(), lambda m, x, g: F.silu(x) * g, ((6, 31), (6, 31))),
    "SwiGLU-packed": Case(lambda: deuteron.nn.SwiGLU(), lambda m, x: F.silu(x[:, :31]) * x[:, 31:], ((6, 62),)),
    "GEGLU": Case(lambda: deuteron.nn.GEGLU(), lambda m, x, g: F.gelu(x) * g, ((6, 31), (6, 31))),
    "GEGLU-tanh-packed": Case(
        lambda: deuteron.nn.GEGLU("tanh"), lambda m, x: F.gelu(x[:, :31], approximate="tanh") * x[:, 31:], ((6, 62),)
    ),
    "QKVProjection": Case(
        lambda: deuteron.nn.QKVProjection(32, 4), lambda m, x: tuple(heads(x, m.weight, m.bias, 4)), ((2, 9, 32),)
    ),
    "QKVProjection-grouped": Case(
        lambda: deuteron.nn.QKVProjection(32, 4, 2),
        lambda m, x: F.linear(x, m.weight, m.bias).unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), 1),
        ((2, 9, 32),),
    ),
    "FusedAttention": Case(
        lambda: deuteron.nn.FusedAttention(),
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ((2, 4, 9, 16),) * 3,
    ),
    "FusedAttention-full": Case(
        lambda: deuteron.nn.FusedAttention(causal=False, p=0.3).eval(),
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v),
        ((2, 4, 9, 16), (2, 4, 11, 16), (2, 4, 11, 16)),
    ),
    "FusedAttentionBlock": Case(
        lambda: deuteron.nn.FusedAttentionBlock(32, 4), attend, ((2, 9, 32), (2, 9, 32))
    ),
    "FusedAttentionBlock-full": Case(
        lambda: deuteron.nn.FusedAttentionBlock(32, 2, causal=False), attend, ((2, 9, 32), (2, 9, 32))
    ),
    "FFN": Case(
        lambda: deuteron.nn.FFN(32),
        lambda m, x: x + m.linear2(F.gelu(m.linear1(m.norm(x)))),
        ((2, 5, 32),),
    ),
    "FFN-tanh": Case(
        lambda: deuteron.nn.FFN(32, 50, act="gelu_tanh"),
        lambda m, x: x + m.linear2(F.gelu(m.linear1(m.norm(x)), approximate="tanh")),
        ((6, 32),),
    ),
    "FFN-relu": Case(
        lambda: deuteron.nn.FFN(32, 50, act="relu"),
        lambda m, x: x + m.linear2(F.relu(m.linear1(m.norm(x)))),
        ((3, 32),),
    ),
}


def made(make: Callable[[], Any]) -> Any:
    """A module whose parameters are all random: norms begin with ones and zeros."""
    torch.manual_seed(1)
    module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return module


def run(function: Callable[..., Any], module: Any, inputs: List[Any]) -> Tuple[List[Any], Dict[str, Any]]:
    """Outputs, and the gradients of a weighted sum of them."""
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    module.zero_grad()
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    torch.autograd.backward(outputs, weights)
    gradients = {f"input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}
    gradients.update({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    return [y.detach() for y in outputs], gradients


def check_error(name: str, ours: Any, torchs: Any, exact: Any, times: float) -> None:
    """Off by at most `times` what torch is, and two roundings of the largest value: torch may hit by luck."""
    assert ours.dtype == torchs.dtype and ours.shape == torchs.shape, name
    roundings = 2 * torch.finfo(ours.dtype).eps * exact.abs().max().item()
    allowed = times * (torchs.double() - exact).abs().max().item() + roundings
    error = (ours.double() - exact).abs().max().item()
    assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}"


def compare(module: Any, torchs: Callable[..., Any], inputs: List[Any]) -> None:
    wide = copy.deepcopy(module).double()
    widened = [x.double() if x.is_floating_point() else x for x in inputs]
    exact = run(lambda *xs: torchs(wide, *xs), wide, widened)
    expected = run(lambda *xs: torchs(module, *xs), module, inputs)
    found = run(module, module, inputs)
    assert len(found[0]) == len(expected[0]) and found[1].keys() == expected[1].keys()
    for index, output in enumerate(found[0]):
        check_error(f"output {index}", output, expected[0][index], exact[0][index], 2)
    for name, gradient in found[1].items():
        check_error(f"gradient of {name}", gradient, expected[1][name], exact[1][name], 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str, dtype: Any) -> None:
    case = CASES[name]
    module = made(case.make).to(dtype)
    compare(module, case.torchs, [torch.randn(shape).to(dtype) for shape in case.shapes])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_embedding_norm(dtype: Any) -> None:
    module = made(lambda: deuteron.nn.EmbeddingNorm(20, 12, 33)).to(dtype)

    def torchs(m: Any, tokens: Any) -> Any:
        s = m.wte(tokens) + m.wpe(torch.arange(tokens.shape[-1]))
        return m.norm(s), s

    compare(module, torchs, [torch.randint(0, 20, (2, 7))])


@pytest.mark.parametrize("ignore", [None, -100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_linear_cross_entropy(dtype: Any, ignore: Any) -> None:
    module = made(lambda: deuteron.nn.LinearCrossEntropy(16, 50, ignore)).to(dtype)
    targets = torch.randint(0, 50, (2, 9))
    if ignore is not None:
        targets[0, :4] = ignore

    def torchs(m: Any, x: Any, targets: Any) -> Any:
        logits = F.linear(x, m.weight).flatten(0, 1)
        return F.cross_entropy(logits.float() if dtype != torch.float32 and m is module else logits, targets.flatten())

    compare(module, torchs, [torch.randn(2, 9, 16).to(dtype), targets])


def test_an_additive_mask() -> None:
    module = deuteron.nn.FusedAttention(causal=False)
    mask = torch.randn(9, 9)
    inputs = [torch.randn(2, 4, 9, 16) for _ in range(3)]
    torch.testing.assert_close(module(*inputs, mask), F.scaled_dot_product_attention(*inputs, mask))
    with pytest.raises(ValueError, match="no mask"):
        deuteron.nn.FusedAttention()(*inputs, mask)


def test_dropout_in_training_alone() -> None:
    x, r = torch.ones(400, 64), torch.zeros(400, 64)
    module = deuteron.nn.BiasDropoutAdd(64, p=0.25)
    torch.manual_seed(3)
    first = module(x, r)
    torch.manual_seed(3)
    assert torch.equal(module(x, r), first) and not torch.equal(module(x, r), first)
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    # 25600 draws: 5 deviations are 0.0135.
    assert abs((first == 0).float().mean().item() - 0.25) < 0.0135
    assert torch.equal(module.eval()(x, r), x)

    module = deuteron.nn.DropoutAddLayerNorm(64, p=0.25)
    y, s = module(x, r)
    assert abs((s == 0).float().mean().item() - 0.25) < 0.0135
    torch.testing.assert_close(y, F.layer_norm(s, (64,)))
    assert torch.equal(module.eval()(x, r)[1], x)

    module = deuteron.nn.FusedAttention(causal=False, p=0.25)
    q, v = torch.zeros(1, 1, 160, 160), torch.eye(160)[None, None]
    found = module(q, q, v)  # the probabilities
    assert abs((found == 0).float().mean().item() - 0.25) < 0.0135
    torch.testing.assert_close(module.eval()(q, q, v), torch.full_like(q, 1 / 160))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_rms_norm_without_an_epsilon_has_that_of_torch(dtype: Any) -> None:
    x = torch.full((2, 8), 0.01, dtype=dtype)
    expected = F.silu(nn.RMSNorm(8).to(dtype)(x).float())
    module = deuteron.nn.RMSNormSiLU(8).to(dtype)
    torch.testing.assert_close(module(x).float(), expected, rtol=0.01, atol=0.01)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x).float(), expected, rtol=0.01, atol=0.01)


def test_state_dicts_are_those_of_torch() -> None:
    pairs: List[Tuple[Any, Any]] = [
        (nn.LayerNorm(8), deuteron.nn.LayerNormGELU(8)),
        (nn.LayerNorm(8), deuteron.nn.AddLayerNorm(8)),
        (nn.LayerNorm(8), deuteron.nn.DropoutAddLayerNorm(8)),
        (nn.RMSNorm(8), deuteron.nn.RMSNormSiLU(8)),
        (nn.Linear(8, 24), deuteron.nn.QKVProjection(8, 2)),
        (nn.Linear(8, 50, bias=False), deuteron.nn.LinearCrossEntropy(8, 50)),
        (nn.SiLU(), deuteron.nn.SwiGLU()),
        (nn.GELU(), deuteron.nn.GEGLU()),
        (nn.Dropout(), deuteron.nn.FusedAttention()),
    ]
    for torchs, ours in pairs:
        ours.load_state_dict(torchs.state_dict())
        assert list(ours.state_dict()) == list(torchs.state_dict())
    block = deuteron.nn.FusedAttentionBlock(8, 2)
    names = list(nn.MultiheadAttention(8, 2).state_dict()) + ["norm.weight", "norm.bias"]
    assert list(block.state_dict()) == names
    expected = [f"{module}.{name}" for module in ("norm", "linear1", "linear2") for name in ("weight", "bias")]
    assert list(deuteron.nn.FFN(8).state_dict()) == expected
    expected = ["wte.weight", "wpe.weight", "norm.weight", "norm.bias"]
    assert list(deuteron.nn.EmbeddingNorm(5, 4, 8).state_dict()) == expected
    assert list(deuteron.nn.BiasDropoutAdd(8).state_dict()) == ["bias"]


def test_modules_made_of_those_of_torch_share_their_parameters() -> None:
    layer, rms, linear = nn.LayerNorm(8, eps=1e-3), nn.RMSNorm(8), nn.Linear(8, 24)
    first, second, head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 20, bias=False)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    wte, wpe = nn.Embedding(20, 8), nn.Embedding(12, 8)
    sublayer = [*layer.parameters(), *first.parameters(), *second.parameters()]
    made = [
        (deuteron.nn.LayerNormGELU.from_torch(layer, nn.GELU("tanh")), [layer.weight, layer.bias]),
        (deuteron.nn.AddLayerNorm.from_torch(layer), [layer.weight, layer.bias]),
        (deuteron.nn.DropoutAddLayerNorm.from_torch(nn.Dropout(0.3), layer), [layer.weight, layer.bias]),
        (deuteron.nn.RMSNormSiLU.from_torch(rms), [rms.weight]),
        (deuteron.nn.BiasDropoutAdd.from_torch(linear, nn.Dropout(0.3)), [linear.bias]),
        (deuteron.nn.QKVProjection.from_torch(linear, 2), [linear.weight, linear.bias]),
        (deuteron.nn.FFN.from_torch(layer, first, nn.ReLU(), second), sublayer),
        (deuteron.nn.LinearCrossEntropy.from_torch(head), [head.weight]),
        (deuteron.nn.FusedAttentionBlock.from_torch(attention, layer), [*attention.parameters(), *layer.parameters()]),
        (deuteron.nn.EmbeddingNorm.from_torch(wte, wpe, layer), [wte.weight, wpe.weight, *layer.parameters()]),
    ]
    for module, parameters in made:
        assert [id(p) for p in module.parameters()] == [id(p) for p in parameters], type(module).__name__
        assert module.training
    assert made[0][0].eps == 1e-3 and made[0][0].approximate == "tanh" and made[2][0].p == 0.3
    x = torch.randn(2, 5, 8)
    mixed = attention(x, x, x, need_weights=False, attn_mask=nn.Transformer.generate_square_subsequent_mask(5))[0]
    y, s = made[8][0](x)
    torch.testing.assert_close(s, x + mixed)
    torch.testing.assert_close(y, layer(s))
    torch.testing.assert_close(made[6][0](x), x + second(F.relu(first(layer(x)))))


def test_misuse_is_told() -> None:
    wrong: List[Callable[[], Any]] = [
        lambda: deuteron.nn.LayerNormGELU((4, 8)),  # type: ignore[arg-type]
        lambda: deuteron.nn.LayerNormGELU(8, approximate="erf"),
        lambda: deuteron.nn.BiasDropoutAdd(8, p=1.0),
        lambda: deuteron.nn.FusedAttention(p=-0.1),
        lambda: deuteron.nn.QKVProjection(8, 3),
        lambda: deuteron.nn.FusedAttentionBlock(8, 3),
        lambda: deuteron.nn.FFN(8, act="tanh"),
        lambda: deuteron.nn.FFN.from_torch(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)),
        lambda: deuteron.nn.AddLayerNorm.from_torch(nn.LayerNorm(8, elementwise_affine=False)),
        lambda: deuteron.nn.LinearCrossEntropy.from_torch(nn.Linear(8, 20)),
        lambda: deuteron.nn.FusedAttentionBlock.from_torch(nn.MultiheadAttention(8, 2, dropout=0.1), nn.LayerNorm(8)),
        lambda: deuteron.nn.EmbeddingNorm.from_torch(nn.Embedding(5, 8, 0), nn.Embedding(5, 8), nn.LayerNorm(8)),
    ]
    for index, make in enumerate(wrong):
        with pytest.raises(ValueError, match="expected"):
            make()
            pytest.fail(f"case {index}")


def test_modules_describe_themselves() -> None:
    assert repr(deuteron.nn.BiasDropoutAdd(8, 0.2)) == "BiasDropoutAdd(8, p=0.2)"
    assert "approximate='none'" in repr(deuteron.nn.LayerNormGELU(8))
    assert repr(deuteron.nn.QKVProjection(8, 2)) == "QKVProjection(8, num_heads=2, num_key_heads=2)"
    assert repr(deuteron.nn.FusedAttention()) == "FusedAttention(causal=True, p=0.0, scale=None, from_end=False)"


def test_every_module_has_an_example() -> None:
    found = doctest.DocTestFinder(exclude_empty=True).find(deuteron.nn)
    shown = {test.name.rsplit(".", 1)[-1] for test in found if test.examples}
    assert set(deuteron.nn.__all__) - shown == set()

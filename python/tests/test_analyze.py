"""`deuteron.analyze`: what models become as graphs, and what the answer can do."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import pytest

import deuteron
from deuteron import trace
from deuteron._native import Program

GRAPH = "graph small\nx = input f32[4096,768]\nr = input f32[4096,768]\ns = add x r\ny = gelu s kind=tanh\nout y\n"


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def transformers(torch: Any) -> Any:
    return pytest.importorskip("transformers")


def ops(graph: str) -> Dict[str, int]:
    """How often each operation stands in a graph, views and inputs aside."""
    lines = [line.split(" = ", 1)[1].split()[0] for line in graph.splitlines() if " = " in line]
    ignored = ("input", "weight", "reshape", "transpose", "slice", "broadcast", "const")
    return dict(Counter(op for op in lines if op not in ignored))


# What an analysis is.


def test_an_analysis_of_a_graph() -> None:
    analysis = deuteron.analyze(GRAPH, device="h200")
    assert [kernel["name"] for kernel in analysis.kernels] == ["add + gelu"]
    sheet = analysis.json()
    assert sheet["device"] == "h200" and sheet["graph"] == "small"
    assert analysis.speedup is not None
    assert math.isclose(analysis.speedup, sheet["plans"]["unfused"]["us"] / sheet["plans"]["chosen"]["us"])
    assert analysis.speedup > 1.5
    assert analysis.verdict == sheet["verdict"] and analysis.verdict in str(analysis)
    assert repr(analysis) == f"<Analysis of small on h200: {analysis.verdict}>"
    assert str(analysis) == analysis.text()
    assert analysis.graph == GRAPH
    sheet["verdict"] = "changed"
    assert analysis.json()["verdict"] != "changed"


def test_an_analysis_saves_itself(tmp_path: Path) -> None:
    analysis = deuteron.analyze(GRAPH, device="h200")
    for name, expected in (("a.html", analysis.html()), ("a.txt", analysis.text())):
        analysis.save(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8") == expected
    analysis.save(str(tmp_path / "a.json"))
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == analysis.json()
    with pytest.raises(ValueError, match=r"save: .*\.html, \.json or \.txt, got a\.pdf"):
        analysis.save(tmp_path / "a.pdf")


def test_a_notebook_shows_the_page() -> None:
    analysis = deuteron.analyze(GRAPH, device="h200")
    shown = analysis._repr_html_()
    assert shown.startswith('<iframe srcdoc="') and shown.endswith("</iframe>")
    inside = shown[len('<iframe srcdoc="') : shown.index('" style=')]
    assert '"' not in inside and "<" not in inside
    import html

    assert html.unescape(inside) == analysis.html()


def test_a_graph_may_lie_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "small.txt"
    path.write_text(GRAPH, encoding="utf-8")
    assert deuteron.analyze(path, device="h200").graph == GRAPH


def test_gradients_are_analysed_too() -> None:
    forward = deuteron.analyze(GRAPH, device="h200").json()
    both = deuteron.analyze(GRAPH, device="h200", backward=True).json()
    assert len(both["ops"]) > len(forward["ops"])
    assert any(op["name"].startswith("grad(") for op in both["ops"])


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="analyze: expected a torch module.* got a int"):
        deuteron.analyze(3)
    with pytest.raises(ValueError, match="unknown"):
        deuteron.analyze("y = nothing x[4,8]; out y")
    with pytest.raises(ValueError, match="expected example operands"):
        deuteron.analyze("norm_act")
    with pytest.raises(ValueError):
        deuteron.analyze(GRAPH, device="abacus")


# Functions and ops.


def test_functions_of_arrays_are_traced() -> None:
    x = np.zeros((64, 256), np.float32)
    fused = deuteron.fuse(lambda x, r: trace.gelu(x + r), name="add_gelu")
    assert ops(deuteron.analyze(fused, (x, x), device="cpu").graph) == {"add": 1, "gelu": 1}
    analysis = deuteron.analyze(lambda x, r: np.exp(x) * r, (x, x), device="cpu", name="plain")
    assert analysis.json()["graph"] == "plain"
    assert ops(analysis.graph) == {"exp": 1, "mul": 1}
    assert ops(deuteron.analyze(fused, {"x": x, "r": x}, device="cpu").graph) == {"add": 1, "gelu": 1}


def test_an_op_of_the_catalogue() -> None:
    x, w = np.zeros((64, 256), np.float16), np.zeros(256, np.float16)
    analysis = deuteron.analyze("norm_act norm=rms act=silu", (x, w), device="h200")
    assert analysis.graph == (
        "graph norm_act\nx0 = input f16[64,256]\nx1 = input f16[256]\n"
        "v2 = rms_norm x0 x1 eps=1e-5\nv3 = silu v2\nout y=v3\n"
    )
    assert [kernel["name"] for kernel in analysis.kernels] == ["rms_norm + silu"]


# Programs of torch.


def graph_of(torch: Any, function: Callable[..., Any], *shapes: Sequence[int]) -> str:
    return deuteron.analyze(function, tuple(torch.zeros(*shape) for shape in shapes), device="cpu").graph


def gelus(torch: Any) -> Dict[str, Tuple[Callable[[Any], Any], Dict[str, int]]]:
    root = math.sqrt(2 / math.pi)
    tanh: Dict[str, int] = {"gelu": 1}
    return {
        "new": (lambda x: 0.5 * x * (1.0 + torch.tanh(root * (x + 0.044715 * torch.pow(x, 3.0)))), tanh),
        "fast": (lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))), tanh),
        "halved last": (lambda x: x * (torch.tanh(root * (x + 0.044715 * x**3)) + 1) * 0.5, tanh),
        "divided": (lambda x: x * (1 + torch.tanh(root * (x + 0.044715 * x**3))) / 2, tanh),
        "erf": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), tanh),
        "of a sum": (lambda x: torch.nn.functional.silu(x + 1) * 1, {"add": 1, "silu": 1, "mul": 1}),
        "sigmoid": (lambda x: (x + 1) * torch.sigmoid(x + 1), {"add": 2, "sigmoid": 1, "mul": 1}),
        "silu": (lambda x: (lambda y: y * torch.sigmoid(y))(x + 1), {"add": 1, "silu": 1}),
        "another": (lambda x: 0.5 * x * (1.0 + torch.tanh(x)), {"mul": 2, "tanh": 1, "add": 1}),
    }


@pytest.mark.parametrize(
    "name", ["new", "fast", "halved last", "divided", "erf", "of a sum", "sigmoid", "silu", "another"]
)
def test_activations_that_are_written_out(torch: Any, name: str) -> None:
    function, expected = gelus(torch)[name]
    graph = graph_of(torch, function, (8, 16))
    assert ops(graph) == expected
    if expected == {"gelu": 1}:
        assert ("kind=erf" if name == "erf" else "kind=tanh") in graph
    runs_as(torch, graph, function, [torch.randn(8, 16, generator=torch.Generator().manual_seed(0))])


def runs_as(torch: Any, graph: str, function: Callable[..., Any], operands: List[Any], terms: int = 64) -> None:
    """The graph computes what the function does."""
    got = Program(graph).forward(operands)[0]
    expected = function(*(x.double() if x.is_floating_point() else x for x in operands))
    bound = 8 * 2.0**-23 * terms**0.5 * max(float(expected.abs().max()), 1.0)
    assert got.shape == expected.shape
    assert float((got.double() - expected).abs().max()) <= bound


def test_rms_norm_that_is_written_out(torch: Any) -> None:
    def function(x: Any, w: Any) -> Any:
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    graph = graph_of(torch, function, (4, 6, 16), (16,))
    assert ops(graph) == {"rms_norm": 1} and "eps=1e-06" in graph
    runs_as(torch, graph, function, [torch.randn(4, 6, 16), torch.randn(16)])


def attentions(torch: Any) -> Dict[str, Tuple[Callable[..., Any], str]]:
    F = torch.nn.functional
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    low = torch.finfo(torch.float32).min

    def scores(q: Any, k: Any) -> Any:
        return torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])

    def value(q: Any, k: Any, v: Any, mask: Callable[[Any], Any]) -> Any:
        return torch.matmul(torch.softmax(mask(scores(q, k)), dim=-1), v)

    return {
        "call": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), "full"),
        "causal call": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), "causal"),
        "masked call": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, causal[None, None]), "causal"),
        "full": (lambda q, k, v: value(q, k, v, lambda s: s), "full"),
        "where": (lambda q, k, v: value(q, k, v, lambda s: torch.where(causal, s, low)), "causal"),
        "filled": (lambda q, k, v: value(q, k, v, lambda s: s.masked_fill(~causal, -math.inf)), "causal"),
        "added": (
            lambda q, k, v: value(q, k, v, lambda s: s + torch.zeros(6, 6).masked_fill(~causal, low)),
            "causal",
        ),
        "window": (lambda q, k, v: value(q, k, v, lambda s: torch.where(causal.triu(-2), s, low)), "additive"),
    }


@pytest.mark.parametrize(
    "name", ["call", "causal call", "masked call", "full", "where", "filled", "added", "window"]
)
def test_attention_that_is_written_out(torch: Any, name: str) -> None:
    function, mask = attentions(torch)[name]
    heads = (2, 3, 6, 8)
    graph = graph_of(torch, function, heads, heads, heads)
    found = ops(graph)
    assert found["attention"] == 1 and "softmax" not in found and "matmul" not in found
    assert f"mask={mask}" in graph
    if mask != "additive":
        runs_as(torch, graph, function, [torch.randn(heads) for _ in range(3)])


def test_what_graphs_do_not_have_is_opaque_and_noted(torch: Any) -> None:
    def function(x: Any) -> Any:
        return torch.cos(torch.cumsum(torch.exp(x), 0)) * 2

    analysis = deuteron.analyze(function, (torch.zeros(4, 8),), device="cpu")
    assert "opaque" in analysis.graph
    assert "f32[4,8] name=aten.cumsum flops=0 bytes=256\n" in analysis.graph
    assert "f32[4,8] name=aten.cos flops=32 bytes=256 elementwise\n" in analysis.graph
    assert [note for note in analysis.notes if note.startswith("aten.")] == [
        "aten.cumsum, once: modelled by its bytes only (not in the text form)",
        "aten.cos, once: modelled by its bytes only (not in the text form)",
    ]
    assert "aten.cumsum, once" in analysis.text()


def test_several_results_of_an_unknown_operation(torch: Any) -> None:
    analysis = deuteron.analyze(lambda x: torch.sort(x * 2)[0] + 1, (torch.zeros(4, 8),), device="cpu")
    assert ops(analysis.graph) == {"mul": 1, "opaque": 1, "add": 1}


def test_constants_are_computed_and_recognised(torch: Any) -> None:
    def function(x: Any) -> Any:
        places = torch.arange(6) + 2
        return x + places.view(6, 1) * 0.5 + torch.full((8,), 3.0) + torch.tensor([1.0] * 4 + [2.0] * 4)

    analysis = deuteron.analyze(function, (torch.zeros(6, 8),), device="cpu")
    assert ops(analysis.graph) == {"add": 3}
    assert analysis.graph.count("= weight f32") == 2
    assert analysis.notes == [] or all(not note.startswith("aten.") for note in analysis.notes)


def test_positions_in_order_are_a_slice_of_the_table(torch: Any) -> None:
    class Embedding(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(11, 8)
            self.places = torch.nn.Embedding(32, 8)

        def forward(self, ids: Any) -> Any:
            return self.tokens(ids) + self.places(torch.arange(ids.shape[1])[None] + 3)

    analysis = deuteron.analyze(Embedding(), (torch.zeros(2, 6, dtype=torch.long),), device="cpu")
    assert ops(analysis.graph) == {"gather": 1, "add": 1}
    assert "ids = input i32[2,6]" in analysis.graph
    assert "tokens.weight = weight f32[11,8]" in analysis.graph
    assert "slice places.weight axis=0 start=3 length=6" in analysis.graph


def test_dropouts_share_a_seed(torch: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(8, 8), torch.nn.Dropout(0.2)).train()
    graph = deuteron.analyze(model, (torch.zeros(4, 8),), device="cpu").graph
    assert ops(graph) == {"dropout": 2, "linear": 1}
    assert graph.count("seed = input i32[]") == 1
    assert "p=0.1 offset=0" in graph and "p=0.2 offset=1" in graph
    assert ops(deuteron.analyze(model.eval(), (torch.zeros(4, 8),), device="cpu").graph) == {"linear": 1}


def test_a_module_that_changes_its_operand(torch: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(inplace=True))
    assert ops(deuteron.analyze(model, torch.zeros(4, 8), device="cpu").graph) == {"linear": 1, "relu": 1}


def test_a_layer_of_torch(torch: Any) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).train()
    analysis = deuteron.analyze(layer, (torch.zeros(2, 6, 16),), device="cpu")
    assert ops(analysis.graph) == {"linear": 4, "attention": 1, "add": 2, "layer_norm": 2, "relu": 1}
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    runs_as_module(torch, analysis.graph, layer, {"src": x}, layer(x))


def runs_as_module(torch: Any, graph: str, module: Any, inputs: Dict[str, Any], expected: Any) -> None:
    """The graph computes what the module does, with its parameters."""
    program = Program(graph)
    held = dict(module.named_parameters(remove_duplicate=False))
    operands = [inputs[name] if name in inputs else held[name].detach() for name in program.operands]
    got = program.forward(operands)[0].double()
    expected = expected.detach().double()
    assert got.shape == expected.shape
    # Both are f32 with sums of at most 1024 terms, in a dozen steps.
    bound = 12 * 8 * 2.0**-23 * 32 * max(float(expected.abs().max()), 1.0)
    assert float((got - expected).abs().max()) <= bound


def test_models_without_memory_are_analysed(torch: Any) -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4096, 16384), torch.nn.GELU(), torch.nn.Linear(16384, 4096))
        x = torch.zeros(64, 4096)
    analysis = deuteron.analyze(model, (x,), device="h200")
    assert ops(analysis.graph) == {"linear": 2, "gelu": 1}


# GPT-2 of Hugging Face.

BLOCK = {"layer_norm": 2, "linear": 4, "attention": 1, "add": 2, "gelu": 1}


def gpt2(transformers: Any, attention: Optional[str] = None) -> Any:
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=64, vocab_size=300, n_positions=64, bos_token_id=1, eos_token_id=1
    )
    if attention is not None:
        config._attn_implementation = attention
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_is_recognised_from_end_to_end(torch: Any, transformers: Any, attention: str) -> None:
    model = gpt2(transformers, attention).eval()
    ids = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(4))
    analysis = deuteron.analyze(model, (ids,), device="cpu")
    whole = {op: 2 * count for op, count in BLOCK.items()}
    expected = {**whole, "layer_norm": 5, "linear": 9, "add": 5, "gather": 1}
    assert ops(analysis.graph) == expected
    assert analysis.graph.count("mask=causal scale=0.25") == 2 and analysis.graph.count("kind=tanh") == 2
    assert analysis.notes[0].startswith("exported with use_cache=False")
    assert not any(note.startswith("aten.") for note in analysis.notes)
    assert "out logits=" in analysis.graph
    with torch.no_grad():
        logits = model(ids).logits
    runs_as_module(torch, analysis.graph, model, {"input_ids": ids}, logits)


def test_gpt2_with_an_attention_mask(torch: Any, transformers: Any) -> None:
    model = gpt2(transformers).eval()
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(4))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    analysis = deuteron.analyze(model, inputs, device="cpu")
    assert "opaque" not in ops(analysis.graph)
    assert analysis.graph.count("mask=additive") == 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_in_training(torch: Any, transformers: Any, attention: str) -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    model = gpt2(transformers, attention).train()
    analysis = deuteron.analyze(model, {"input_ids": ids, "labels": ids}, device="cpu", backward=True)
    found = ops(analysis.graph)
    assert found["dropout"] == 5 and found["attention"] == 2 and found["cross_entropy"] == 1
    assert "opaque" not in found
    assert any("grad(attention)" in kernel["name"] for kernel in analysis.kernels)


def test_targets_that_are_left_out_do_not_count(torch: Any) -> None:
    """As the last label of a model of transformers, which it shifts in itself."""
    F = torch.nn.functional
    x, targets = torch.randn(17, 33), torch.randint(0, 33, (17,))
    targets[[3, 16]] = -100

    class Loss(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, targets: Any) -> Any:
            return F.cross_entropy(x, targets)

    graph = deuteron.analyze(Loss(), (x, targets), device="cpu").graph
    assert ops(graph)["cross_entropy"] == 1
    runs_as(torch, graph, F.cross_entropy, [x, targets])


def test_gpt2_is_planned_as_our_own(torch: Any, transformers: Any) -> None:
    """The plan of GPT-2 as torch exports it has the kernels of the one that the engine builds itself."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
        ids = torch.zeros(1, 1024, dtype=torch.long)
    analysis = deuteron.analyze(model, (ids,), device="h200")
    kernels = {kernel["name"]: len(kernel["launches"]) for kernel in analysis.kernels}
    assert kernels["layer_norm"] == 24 and kernels["gather + add + layer_norm"] == 1
    assert kernels["attention + reshape"] == 12 and kernels["linear + gelu"] == 12
    assert analysis.json()["plans"]["chosen"]["kernels"] == 86


# Other models.


def others(transformers: Any) -> Dict[str, Callable[[], Any]]:
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
    return {
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, intermediate_size=128, num_key_value_heads=2)
        ),
        "bert": lambda: transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=128)),
        "neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, intermediate_size=128)),
    }


@pytest.mark.parametrize("name", ["llama", "bert", "neox"])
def test_other_models_have_nothing_opaque(torch: Any, transformers: Any, name: str) -> None:
    model = others(transformers)[name]().eval()
    analysis = deuteron.analyze(model, (torch.zeros(2, 16, dtype=torch.long),), device="h200")
    found = ops(analysis.graph)
    assert "opaque" not in found and found["attention"] == 2
    if name == "llama":
        assert found["rms_norm"] == 5 and found["silu"] == 2

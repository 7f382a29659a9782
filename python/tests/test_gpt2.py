"""A patched GPT-2 of Hugging Face against the model itself."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any, Dict, Iterator, List, Tuple

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import deuteron  # noqa: E402
from transformers import (  # noqa: E402
    DynamicCache,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
)

VOCABULARY = 128

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Falling back is a warning; the tests read the counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def config(**changes: Any) -> GPT2Config:
    sizes: Dict[str, Any] = dict(n_layer=2, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=256)
    # No token ends a text early; padding is a token that no prompt holds.
    sizes.update(bos_token_id=0, eos_token_id=None, pad_token_id=VOCABULARY - 1)
    sizes.update(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    sizes.update(changes)
    return GPT2Config(**sizes)


def tiny(kind: Any = GPT2LMHeadModel, **changes: Any) -> Any:
    """Weights ten times as large as usual, so that attention is not flat and logits are far apart."""
    torch.manual_seed(5)
    model = kind(config(**{"initializer_range": 0.2, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def tokens(batch: int = 2, length: int = 17, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY - 1, (batch, length), generator=generator)


def padded(ids: Any) -> Any:
    """A mask with padding on the left of the first sequence."""
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return mask


def results(model: Any, **inputs: Any) -> Tuple[Any, Any, Dict[str, Any]]:
    """Logits, loss, and the gradients of all parameters."""
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out.logits.detach(), out.loss.detach(), gradients


def check_error(name: str, ours: Any, torchs: Any, exact: Any, times: float, dtype: Any = None) -> None:
    """Off by at most `times` what torch is, and two roundings of the largest value: torch may hit by luck. Roundings are those of
    the dtype that it was computed in."""
    scale = exact.abs().max().item()
    error = (ours.double() - exact).abs().max().item()
    rounding = torch.finfo(dtype or ours.dtype).eps
    allowed = times * (torchs.double() - exact).abs().max().item() + 2 * rounding * scale
    assert ours.dtype == torchs.dtype and ours.shape == torchs.shape
    assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}, values up to {scale:.3g}"


def compare(model: Any, **inputs: Any) -> Any:
    """Logits, loss and gradients, patched and not, against the model in f64."""
    exact = results(copy.deepcopy(model).double(), **inputs)
    torchs = results(model, **inputs)
    with deuteron.patched(model, strict=True) as report:
        ours = results(model, **inputs)
    assert report.fallbacks == {}
    check_error("logits", ours[0], torchs[0], exact[0], 2)
    check_error("loss", ours[1], torchs[1], exact[1], 2, model.dtype)
    assert ours[2].keys() == torchs[2].keys()
    for name, gradient in ours[2].items():
        check_error(f"gradient of {name}", gradient, torchs[2][name], exact[2][name], 3, model.dtype)
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@on_devices
def test_logits_loss_and_gradients(device: str, dtype: Any, padding: bool) -> None:
    ids = tokens().to(device)
    mask = padded(ids) if padding else torch.ones_like(ids)
    compare(tiny().to(device, dtype), input_ids=ids, attention_mask=mask, labels=ids)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "silu"])
def test_activations(activation: str) -> None:
    ids = tokens(1, 9)
    compare(tiny(activation_function=activation, n_layer=1), input_ids=ids, labels=ids)


@pytest.mark.parametrize(
    "changes",
    [
        dict(n_inner=100),
        # Not scaled down, scores of large weights make rounding errors large: of torch's, of ours, and of their ratio.
        dict(scale_attn_weights=False, initializer_range=0.05),
        dict(scale_attn_by_inverse_layer_idx=True),
        dict(layer_norm_epsilon=1e-3),
        dict(attn_implementation="eager"),
        dict(n_head=1, n_embd=40),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_configurations(changes: Dict[str, Any]) -> None:
    ids = tokens(2, 9)
    compare(tiny(**changes), input_ids=ids, labels=ids)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_eager_attention_of_16_bits_with_padding(dtype: Any) -> None:
    """Queries that see nothing see all keys alike, also where the lowest number is that of f16."""
    ids, model = tokens(2, 9), tiny(attn_implementation="eager", n_layer=1).to(dtype)

    def logits(model: Any) -> Any:
        with torch.no_grad():
            return model(ids, attention_mask=padded(ids)).logits

    exact, torchs = logits(copy.deepcopy(model).double()), logits(model)
    with deuteron.patched(model, strict=True) as report:
        ours = logits(model)
    assert report.fallbacks == {}
    check_error("logits", ours, torchs, exact, 2)


def test_eager_attention_with_padding() -> None:
    """Its mask hides by a finite number. On the left, queries then see nothing, which is to say all alike."""
    ids, model = tokens(2, 9), tiny(attn_implementation="eager", n_layer=1)
    right = padded(ids).flip(1)
    compare(model, input_ids=ids, attention_mask=right, labels=ids)
    with deuteron.patched(model) as report, torch.no_grad():
        ours = model(ids, attention_mask=padded(ids)).logits
        assert report.fallbacks == {}
    with torch.no_grad():
        torch.testing.assert_close(ours, model(ids, attention_mask=padded(ids)).logits, rtol=1e-4, atol=1e-4)
    with deuteron.patched(model) as report:
        model(ids, attention_mask=padded(ids), labels=ids)
    assert report.fallbacks == {"gradients with a float mask that hides all keys of a query": 1}


def test_masks_of_the_caller() -> None:
    ids, model = tokens(2, 9), tiny(n_layer=1)
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand((2, 4, 9, 9), generator=generator) < 0.6
    seen |= torch.eye(9, dtype=torch.bool)
    for mask in [seen, torch.where(seen, 0.0, -1e4), torch.randn((1, 1, 9, 9), generator=generator)]:
        compare(model, input_ids=ids, attention_mask=mask, labels=ids)


def test_only_what_requires_a_gradient_gets_one() -> None:
    ids, model = tokens(2, 9), tiny()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp.c_fc" in name or "h.1.ln_2.bias" in name)
    gradients = compare(model, input_ids=ids, labels=ids)[2]
    assert sorted(gradients) == [
        "transformer.h.0.mlp.c_fc.bias",
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.1.ln_2.bias",
        "transformer.h.1.mlp.c_fc.bias",
        "transformer.h.1.mlp.c_fc.weight",
    ]


def test_double_precision_is_interpreted() -> None:
    ids, model = tokens(1, 5), tiny(n_layer=1).double()
    torchs = results(model, input_ids=ids, labels=ids)
    with deuteron.patched(model, strict=True) as report:
        ours = results(model, input_ids=ids, labels=ids)
    assert report.fallbacks == {}
    torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-12)


@on_devices
def test_autocast(device: str) -> None:
    ids, model = tokens().to(device), tiny().to(device)
    exact = results(copy.deepcopy(model).double(), input_ids=ids, labels=ids)
    with torch.autocast(device, dtype=torch.bfloat16):
        torchs = results(model, input_ids=ids, labels=ids)
        with deuteron.patched(model, strict=True) as report:
            ours = results(model, input_ids=ids, labels=ids)
    assert report.fallbacks == {}
    for name, gradient in ours[2].items():
        assert gradient.dtype == torch.float32
        # Values between products are of bf16 here and there, whatever the gradient is stored in.
        allowed = 3 * (torchs[2][name] - exact[2][name]).abs().max() + 2**-7 * exact[2][name].abs().max()
        assert (gradient - exact[2][name]).abs().max() <= allowed, name
    check_error("logits", ours[0], torchs[0], exact[0], 2)


@pytest.mark.parametrize("kind", [GPT2Model, GPT2ForSequenceClassification, GPT2DoubleHeadsModel])
def test_other_heads(kind: Any) -> None:
    model, ids = tiny(kind), tokens(2, 9)
    with torch.no_grad():
        before = model(ids)[0]
        report = deuteron.patch(model, strict=True)
        after = model(ids)[0]
    prefix = "" if kind is GPT2Model else "transformer."
    assert report.replaced == [prefix + name for name in ("h.0", "h.1", "ln_f")]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


# Generation


def generated(model: Any, ids: Any, **options: Any) -> Tuple[Any, Any]:
    """Tokens of the model, then of the patched one."""
    options = {"do_sample": False, "max_new_tokens": 12, "attention_mask": torch.ones_like(ids), **options}
    before = model.generate(ids, **options)
    with deuteron.patched(model, strict=True) as report:
        after = model.generate(ids, **options)
    assert report.fallbacks == {}, report
    return before, after


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(num_beams=3, num_return_sequences=2),
        dict(cache_implementation="static"),
        dict(prompt_lookup_num_tokens=3),
        dict(use_cache=False, max_new_tokens=3),
    ],
    ids=["greedy", "beams", "static", "lookup", "uncached"],
)
@on_devices
def test_generation(device: str, options: Dict[str, Any]) -> None:
    ids = tokens(1 if "prompt_lookup_num_tokens" in options else 2, 7)
    if "prompt_lookup_num_tokens" in options:
        ids = ids.repeat(1, 3)  # so that there is something to look up
    before, after = generated(tiny().to(device), ids.to(device), **options)
    assert torch.equal(before, after)


@on_devices
def test_generation_with_padding(device: str) -> None:
    ids = tokens(3, 9).to(device)
    before, after = generated(tiny().to(device), ids, attention_mask=padded(ids))
    assert torch.equal(before, after)


def test_generation_beyond_the_first_buffer() -> None:
    before, after = generated(tiny(n_layer=1), tokens(1, 60), max_new_tokens=10)
    assert torch.equal(before, after)
    before, after = generated(tiny(n_layer=1, n_positions=70), tokens(1, 60), max_new_tokens=10)
    assert torch.equal(before, after)


@on_devices
def test_generation_in_bf16_is_as_near_as_torch(device: str) -> None:
    ids, model = tokens(2, 12).to(device), tiny().to(device, torch.bfloat16)

    def steps(model: Any) -> Any:
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            rows = [model(ids[:, :4], past_key_values=cache).logits[:, -1]]
            rows += [model(ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(4, 12)]
        return torch.stack(rows)

    exact, torchs = steps(copy.deepcopy(model).double()), steps(model)
    with deuteron.patched(model, strict=True) as report:
        ours = steps(model)
    assert report.fallbacks == {}
    check_error("logits", ours, torchs, exact, 2)


def test_a_cache_in_pieces() -> None:
    """Several tokens at a time, a cache that was cropped, and one that torch began."""
    model, ids = tiny(), tokens(2, 20)
    with torch.no_grad():
        whole = model(ids).logits
        cache = DynamicCache()
        model(ids[:, :3], past_key_values=cache)
        with deuteron.patched(model, strict=True) as report:
            pieces = [model(ids[:, i : i + 6], past_key_values=cache).logits for i in (3, 9)]
            cache.crop(-6)
            assert cache.get_seq_length() == 9
            again = model(ids[:, 9:15], past_key_values=cache).logits
            copied = copy.deepcopy(cache)
            pieces.append(model(ids[:, 15:], past_key_values=cache).logits)
            other = model(ids[:, 15:16], past_key_values=copied).logits
        last = model(ids[:, 16:], past_key_values=copied).logits
    assert report.fallbacks == {}
    assert cache.get_seq_length() == 20 and copied.get_seq_length() == 20
    assert torch.equal(again, pieces[1])
    torch.testing.assert_close(torch.cat(pieces, 1), whole[:, 3:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([other, last], 1), whole[:, 15:], rtol=1e-4, atol=1e-4)


def test_a_growing_layer_is_a_dynamic_one() -> None:
    from deuteron._gpt2_cache import GrowingLayer
    from transformers.cache_utils import DynamicLayer

    def filled(layer: Any) -> Any:
        layer.update(torch.arange(48.0).reshape(2, 2, 3, 4), -torch.arange(48.0).reshape(2, 2, 3, 4))
        return layer

    def grown() -> Any:
        layer = GrowingLayer.of(filled(DynamicLayer()))
        layer.room(1, lambda: 100)
        return layer

    operations: List[Any] = [
        lambda layer: None,
        lambda layer: layer.crop(-2),
        lambda layer: layer.crop(0),
        lambda layer: layer.reorder_cache(torch.tensor([1, 1])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices(torch.tensor([1])),
        lambda layer: layer.update(torch.ones(2, 2, 1, 4), torch.ones(2, 2, 1, 4)),
        lambda layer: layer.reset(),
        lambda layer: (layer.reset(), filled(layer)),
        lambda layer: (layer.offload(), layer.prefetch()),
    ]
    for index, operation in enumerate(operations):
        for layer in [GrowingLayer.of(filled(DynamicLayer())), filled(GrowingLayer()), grown()]:
            plain = filled(DynamicLayer())
            operation(plain)
            operation(layer)
            assert layer.get_seq_length() == plain.get_seq_length(), index
            assert layer.get_mask_sizes(2) == plain.get_mask_sizes(2), index
            assert layer.is_initialized == plain.is_initialized, index
            if plain.keys is None:
                assert layer.keys is None and layer.values is None
                continue
            assert torch.equal(layer.keys, plain.keys) and torch.equal(layer.values, plain.values), index
            buffer = layer.room(2, lambda: 100)
            length = plain.get_seq_length()
            assert buffer.shape[3] == 64 and torch.equal(buffer[0, :, :, :length], plain.keys), index
            assert torch.equal(layer.keys, plain.keys) and torch.equal(layer.values, plain.values), index


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_gradients_through_a_cache(implementation: str) -> None:
    """Of what comes after it, and of what filled it."""
    model, ids = tiny(attn_implementation=implementation), tokens(2, 8)

    def run(model: Any) -> Any:
        cache = DynamicCache()
        first = model(ids[:, :5], past_key_values=cache).logits
        second = model(ids[:, 5:7], past_key_values=cache).logits
        # A program for each length would not pay here.
        third = model(ids[:, 7:], past_key_values=cache).logits
        assert cache.get_seq_length() == 8
        both = torch.cat([first, second, third], 1)
        model.zero_grad()
        both.square().mean().backward()
        return both.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    exact, torchs = run(copy.deepcopy(model).double()), run(model)
    with deuteron.patched(model, strict=True) as report:
        ours = run(model)
    assert report.fallbacks == {"gradients of a single token through a cache": 2}
    check_error("logits", ours[0], torchs[0], exact[0], 2)
    for name, gradient in ours[1].items():
        check_error(f"gradient of {name}", gradient, torchs[1][name], exact[1][name], 3)


# Dropout


@on_devices
def test_dropout_follows_the_generator_of_torch(device: str) -> None:
    ids, model = tokens().to(device), tiny(resid_pdrop=0.1, attn_pdrop=0.2).to(device).train()
    deuteron.patch(model, strict=True)
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(results(model, input_ids=ids, labels=ids))
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(gradient, runs[1][2][name]) for name, gradient in runs[0][2].items())
    assert not torch.equal(runs[0][0], runs[2][0])


def test_dropout_has_the_distribution_of_torch() -> None:
    """Mean and spread over many masks: the means of independent draws differ by a few deviations at most."""
    ids, runs = tokens(1, 6).repeat(8, 1), 60
    for site in ("attn_pdrop", "resid_pdrop"):
        model = tiny(GPT2Model, n_layer=1, **{site: 0.3}).train()

        def outputs() -> Any:
            with torch.no_grad():
                return torch.cat([model(ids, use_cache=False)[0] for _ in range(runs)]).double()

        theirs = outputs()
        with deuteron.patched(model, strict=True) as report:
            ours = outputs()
        assert report.fallbacks == {}
        deviation = ((ours.var(0) + theirs.var(0)) / len(ours)).sqrt()
        assert theirs.std(0).max() > 0.05
        # Under either, a value beyond 5 deviations has a chance below 1e-6; there are 384 values.
        assert ((ours.mean(0) - theirs.mean(0)).abs() <= 5 * deviation + 1e-6).all(), site
        assert 0.9 < ours.std(0).mean() / theirs.std(0).mean() < 1.1, site


def test_dropout_gradients_are_those_of_the_same_masks() -> None:
    """A directional derivative, with the masks that the seed gives."""
    ids, model = tokens(2, 9), tiny(resid_pdrop=0.2, attn_pdrop=0.2, n_layer=1).train()
    deuteron.patch(model, strict=True)

    def loss() -> Any:
        torch.manual_seed(11)
        return model(ids, labels=ids).loss

    loss().backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.sqrt(sum((p.grad**2).sum() for p in parameters))
    # Along the gradient the slope is its norm. The step trades the rounding of the loss against the curvature.
    step = 1e-3
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for p in parameters:
                p.add_(p.grad, alpha=sign * step / norm.item())
            values.append(loss().item())
            for p in parameters:
                p.sub_(p.grad, alpha=sign * step / norm.item())
    assert abs((values[0] - values[1]) / (2 * step) / norm.item() - 1) < 1e-2


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_gradient_checkpointing(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block runs again for its gradient, with the same masks, and keeps nothing but what it was given until then."""
    from deuteron._gpt2_block import BlockForward

    ids, model = tokens(), tiny(resid_pdrop=0.1, attn_pdrop=0.1).train()
    report = deuteron.patch(model, strict=True)
    model.enable_input_require_grads()
    calls: List[Any] = []
    fused = BlockForward.fused
    monkeypatch.setattr(BlockForward, "fused", lambda self, *given: calls.append(self) or fused(self, *given))
    runs = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)
        calls.clear()
        runs.append(results(model, input_ids=ids, labels=ids))
        assert len(calls) == (4 if checkpointing else 2)
    assert report.fallbacks == {}
    assert torch.equal(runs[0][1], runs[1][1])
    for name, gradient in runs[0][2].items():
        assert torch.equal(gradient, runs[1][2][name]), name
    # In evaluation nothing is checkpointed.
    calls.clear()
    model.eval()(ids, labels=ids).loss.backward()
    assert len(calls) == 2


def test_gradient_checkpointing_of_a_block_that_falls_back() -> None:
    ids, model = tokens(), tiny().train()
    report = deuteron.patch(model, strict=True)
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, args, out: None)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ours = results(model, input_ids=ids, labels=ids)
    # Once for the result and once for the gradient.
    assert report.fallbacks == {"its c_fc has a hook": 2}
    deuteron.unpatch(model)
    torch.testing.assert_close(ours, results(model, input_ids=ids, labels=ids), rtol=1e-4, atol=1e-4)


# Compilers and recordings


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_compiler_sees_the_whole_model(dropout: float) -> None:
    ids, model = tokens(2, 9), tiny(GPT2Model, n_layer=1, resid_pdrop=dropout).train()
    report = deuteron.patch(model, strict=True)
    torch._dynamo.reset()
    runs = []
    for forward in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(3)
        model.zero_grad()
        hidden = forward(ids, use_cache=False)[0]
        hidden.square().sum().backward()
        runs.append([hidden.detach(), *(p.grad.clone() for p in model.parameters())])
    torch._dynamo.reset()
    assert report.fallbacks == {}
    for ours, compiled in zip(*runs):
        assert torch.equal(ours, compiled)


def test_a_compiler_over_a_cache_falls_back() -> None:
    model, ids = tiny(n_layer=1), tokens(2, 9)
    torch._dynamo.reset()
    with torch.no_grad(), deuteron.patched(model, strict=True) as report:
        expected = model(ids).logits[:, -1]
        compiled = torch.compile(model, backend="aot_eager")
        cache = DynamicCache(config=model.config)
        compiled(ids[:, :8], past_key_values=cache)
        found = compiled(ids[:, 8:], past_key_values=cache).logits[:, -1]
    torch._dynamo.reset()
    assert list(report.fallbacks) == ["torch.compile with a non-empty cache"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_cuda_graph_replays_it() -> None:
    model, ids = tiny(resid_pdrop=0.1).to("cuda").train(), tokens().to("cuda")
    deuteron.patch(model, strict=True)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                model(ids, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(ids, use_cache=False).logits
        drawn = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            graph.replay()
            drawn.append(logits.clone())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


# Patching


def test_unpatched_is_as_before() -> None:
    model, ids = tiny(), tokens()
    names, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    pointers = [p.data_ptr() for p in model.parameters()]
    with torch.no_grad():
        before = model(ids).logits
        deuteron.patch(model, strict=True)
        model(ids)
        assert list(model.state_dict()) == names and [type(module) for module in model.modules()] == kinds
        deuteron.unpatch(model)
        after = model(ids).logits
    assert torch.equal(before, after)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_patching_twice_changes_nothing() -> None:
    model = tiny()
    first = deuteron.patch(model)
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    with deuteron.patched(model) as second:
        assert second is first
    assert [module.__dict__.get("forward") for module in model.modules()] == forwards
    deuteron.unpatch(model)
    deuteron.unpatch(model)


def test_the_report() -> None:
    model = tiny()
    report = deuteron.patch(model)
    assert report and report.left == []
    assert report.replaced == ["transformer.h.0", "transformer.h.1", "transformer.ln_f"]
    assert "3 replaced, 0 left" in str(report)
    with torch.no_grad():
        hidden = model(tokens(), output_hidden_states=True).hidden_states
        assert len(hidden) == 3 and report.fallbacks == {}
        model(tokens(), output_attentions=True)
        assert report.fallbacks == {"attention weights are requested": 2}
        model(tokens())
    assert report.fallbacks == {"attention weights are requested": 2}
    assert "2x attention weights are requested" in str(report)


def test_falling_back_is_a_warning() -> None:
    model = tiny()
    deuteron.patch(model)
    with pytest.warns(RuntimeWarning, match="attention weights are requested"):
        model(tokens(), output_attentions=True)


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(add_cross_attention=True), "cross attention"),
        (dict(reorder_and_upcast_attn=True), "reorder_and_upcast_attn"),
        (dict(activation_function="quick_gelu"), "activation"),
    ],
    ids=["cross", "upcast", "activation"],
)
def test_what_cannot_be_replaced_is_told(changes: Dict[str, Any], reason: str) -> None:
    model = tiny(**changes)
    with pytest.raises(ValueError, match=reason):
        deuteron.patch(model, strict=True)
    assert not any("forward" in module.__dict__ for module in model.modules())
    report = deuteron.patch(model)
    assert not report and report.replaced == ["transformer.ln_f"]
    assert [name for name, _ in report.left] == ["transformer.h.0", "transformer.h.1"]
    assert all(reason in why for _, why in report.left)
    assert reason in str(report)


def test_models_of_another_kind_are_told() -> None:
    report = deuteron.patch(torch.nn.Linear(2, 2))
    assert not report and report.left == [("Linear", "it contains no GPT2Model of transformers")]
    with pytest.raises(ValueError, match="no GPT2Model"):
        deuteron.patch(torch.nn.Linear(2, 2), strict=True)
    with pytest.raises(TypeError, match="torch.nn.Module"):
        deuteron.patch("gpt2")  # type: ignore[arg-type]


def test_changes_after_patching_are_seen() -> None:
    """Hooks and other modules inside a block are obeyed: the block takes its own forward then."""
    model, ids = tiny(), tokens()
    report = deuteron.patch(model, strict=True)
    seen = []
    with torch.no_grad():
        handle = model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, args, out: seen.append(out))
        model(ids)
        assert len(seen) == 1 and report.fallbacks == {"its c_fc has a hook": 1}
        handle.remove()
        block = model.transformer.h[1]
        before = model(ids).logits
        block.mlp.c_fc = torch.nn.Linear(64, 256)
        after = model(ids).logits
        assert not torch.allclose(before, after)
        assert report.fallbacks == {"its c_fc has a hook": 1, "its c_fc is a Linear": 1}
    hooked = []
    model.transformer.h[0].register_forward_hook(lambda module, args, out: hooked.append(out))
    model(ids)
    assert len(hooked) == 1 and report.fallbacks["its c_fc is a Linear"] == 2


def test_copies_and_files_keep_the_patch() -> None:
    model, ids = tiny(), tokens()
    deuteron.patch(model, strict=True)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)]
    with torch.no_grad():
        expected = model(ids).logits
        for other in copies:
            assert deuteron.patch(other).fallbacks == {}
            assert torch.equal(other(ids).logits, expected)
            # It runs on its own weights.
            other.transformer.h[0].mlp.c_fc.weight.zero_()
            assert not torch.equal(other(ids).logits, expected)
            deuteron.unpatch(other)
            assert not any("forward" in module.__dict__ for module in other.modules())
        assert torch.equal(model(ids).logits, expected)


def test_the_state_dict_is_that_of_the_model() -> None:
    model, other, ids = tiny(), tiny(), tokens()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
        deuteron.patch(model, strict=True)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(ids).logits, other(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_head_that_fills_no_vectors_is_replaced() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny(vocab_size=101, pad_token_id=0).to(device, torch.bfloat16)
    ids = tokens(2, 48).to(device) % 101
    with torch.no_grad():
        before = model(ids).logits
        report = deuteron.patch(model, strict=True)
        after = model(ids).logits
    assert report.replaced[-1] == "lm_head" and report.fallbacks == {}
    assert after.shape == before.shape == (2, 48, 101)
    # Two computations in bf16: each is some units in the last place off.
    assert (after - before).abs().max() <= 0.02 * before.abs().max()
    model(ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad.shape == (101, 64)


# Losses without logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("words", [{}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(9)}], ids=["mean", "int", "tensor"])
def test_a_loss_without_logits(dtype: Any, words: Dict[str, Any]) -> None:
    model, ids = tiny().to(dtype).train(), tokens(2, 9)
    labels = ids.clone()
    labels[0, 2:5] = -100

    def trained(model: Any) -> Any:
        model.zero_grad()
        out = model(input_ids=ids, labels=labels, output_hidden_states=True, **words)
        out.loss.backward()
        gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters()}
        return out, gradients

    exact, expected = trained(copy.deepcopy(model).double())
    torchs, theirs = trained(model)
    with deuteron.patched(model, strict=True, skip_logits=True) as report:
        ours, mine = trained(model)
        assert ours.logits is None and len(ours.hidden_states) == 3
        # Without labels, and in evaluation, the model is as before.
        assert model(ids).logits is not None and model.eval()(ids, labels=labels).logits is not None
    assert report.fallbacks == {} and report.replaced[0] == "GPT2LMHeadModel"
    check_error("loss", ours.loss.detach(), torchs.loss.detach(), exact.loss.detach(), 2, dtype)
    for name, gradient in mine.items():
        check_error(f"gradient of {name}", gradient, theirs[name], expected[name], 3)
    assert model.train()(ids, labels=labels).logits is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@on_devices
def test_a_loss_without_logits_under_autocast(device: str, dtype: Any) -> None:
    """The loss is scaled as `GradScaler` does, or gradients of f16 would vanish; backward is outside of autocast, as usual."""
    model, ids = tiny().to(device).train(), tokens(2, 9).to(device)
    labels = ids.clone()
    labels[0, 2:5] = -100

    def trained(model: Any, autocast: bool = True) -> Any:
        model.zero_grad()
        with torch.autocast(device, dtype, enabled=autocast):
            out = model(input_ids=ids, labels=labels)
        (out.loss * 1024).backward()
        return out, {name: p.grad.detach().clone() / 1024 for name, p in model.named_parameters()}

    exact, expected = trained(copy.deepcopy(model).double(), autocast=False)
    torchs, theirs = trained(model)
    with deuteron.patched(model, strict=True, skip_logits=True) as report:
        ours, mine = trained(model)
    assert report.fallbacks == {} and ours.logits is None and torchs.logits is not None
    check_error("loss", ours.loss.detach(), torchs.loss.detach(), exact.loss.detach(), 2, dtype)
    for name, gradient in mine.items():
        check_error(f"gradient of {name}", gradient, theirs[name], expected[name], 3, dtype)


def test_a_loss_without_logits_under_autocast_in_double_precision() -> None:
    """Autocast leaves f64 alone."""
    model, ids = tiny(n_layer=1).double().train(), tokens(1, 5)
    expected = results(model, input_ids=ids, labels=ids)
    with deuteron.patched(model, strict=True, skip_logits=True) as report, torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
    assert report.fallbacks == {} and out.logits is None
    # The loss of transformers is in f32, and so are the gradients of its logits.
    torch.testing.assert_close(out.loss.detach(), expected[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.lm_head.weight.grad, expected[2]["transformer.wte.weight"], rtol=1e-5, atol=1e-6)


def test_a_loss_that_needs_logits_falls_back() -> None:
    model, ids = tiny(n_layer=1).train(), tokens(2, 9)
    with deuteron.patched(model, skip_logits=True) as report:
        assert model(ids, labels=ids[:, -3:], logits_to_keep=3).logits is not None
        assert len(model(ids, labels=ids, return_dict=False)) > 1
    assert report.fallbacks == {"the keyword logits_to_keep": 1, "a tuple is requested": 1}
    model.loss_function = lambda *words, **named: torch.zeros(())
    assert deuteron.patch(model, skip_logits=True).left == [
        ("GPT2LMHeadModel", "its loss is not that of causal language models")
    ]
    deuteron.unpatch(model)

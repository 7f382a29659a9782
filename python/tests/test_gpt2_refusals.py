"""What a patched GPT-2 does not compute falls back to the model's own forward, and is counted: never silently different."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any, Callable, Iterator

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import deuteron  # noqa: E402
from test_gpt2 import tiny, tokens  # noqa: E402
from transformers import DynamicCache, GPT2Model, StaticCache  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface  # noqa: E402
from transformers.models.gpt2 import modeling_gpt2  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Falling back is a warning; the tests read the counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def close(got: Any, expected: Any) -> bool:
    """Equal but for the rounding of the final norm, which runs fused: sums over the hidden features in another order."""
    bound = 4 * torch.finfo(expected.dtype).eps * expected.shape[-1] ** 0.5 * expected.abs().max()
    return bool((got - expected).abs().max() <= bound)


# A trainable cache, as of prefix tuning.


def prefix_gradients(model: Any, ids: Any) -> Any:
    """Gradients of keys and values that stand before the tokens, in a model whose own parameters are frozen."""
    torch.manual_seed(3)
    parts = [torch.randn(ids.shape[0], 4, 5, 16, requires_grad=True) for _ in range(4)]
    cache = DynamicCache()
    for index in range(2):
        cache.update(parts[2 * index], parts[2 * index + 1], index)
    model(ids, past_key_values=cache).logits.square().mean().backward()
    return [part.grad for part in parts]


def test_a_trainable_cache_gets_its_gradients() -> None:
    model, ids = tiny().requires_grad_(False), tokens(2, 7)
    expected = prefix_gradients(model, ids)
    with deuteron.patched(model, strict=True) as report:
        got = prefix_gradients(model, ids)
    assert report.fallbacks == {}
    for ours, torchs in zip(got, expected):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-6)


def test_gradients_through_a_cache_of_fixed_size_fall_back() -> None:
    model, ids = tiny(), tokens(2, 4)
    cache = StaticCache(config=model.config, max_cache_len=8)
    with deuteron.patched(model, strict=True) as report:
        model(ids, past_key_values=cache)
    assert report.fallbacks == {"gradients through a cache of fixed size": 2}


def test_a_trainable_cache_without_gradients_runs_fused() -> None:
    model, ids = tiny().requires_grad_(False), tokens(1, 3)
    cache = DynamicCache()
    for index in range(2):
        cache.update(*(torch.randn(1, 4, 5, 16, requires_grad=True) for _ in range(2)), index)
    with deuteron.patched(model, strict=True) as report, torch.no_grad():
        model(ids, past_key_values=cache)
    assert report.fallbacks == {}


# Overrides of classes and of functions of transformers.


def doubling(forward: Callable[..., Any]) -> Callable[..., Any]:
    def doubled(*arguments: Any, **keywords: Any) -> Any:
        result = forward(*arguments, **keywords)
        return (result[0] * 2, *result[1:]) if isinstance(result, tuple) else result * 2

    return doubled


CLASSES = {
    "mlp": modeling_gpt2.GPT2MLP,
    "attention": modeling_gpt2.GPT2Attention,
    "linear": Conv1D,
    "norm": torch.nn.LayerNorm,
    "dropout": torch.nn.Dropout,
    "block": modeling_gpt2.GPT2Block,
    "activation": type(tiny(n_layer=1).transformer.h[0].mlp.act),
}


@pytest.mark.parametrize("kind", list(CLASSES.values()), ids=list(CLASSES))
def test_a_class_whose_forward_is_replaced_falls_back(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(), tokens(1, 7)
    before = model(ids).logits
    report = deuteron.patch(model, strict=True)
    monkeypatch.setattr(kind, "forward", doubling(kind.forward))
    got = model(ids).logits
    assert sum(report.fallbacks.values()) >= 2 and all("overridden" in reason for reason in report.fallbacks)
    deuteron.unpatch(model)
    expected = model(ids).logits
    assert close(got, expected) and not close(got, before)
    # One that is replaced before is not patched at all.
    report = deuteron.patch(model)
    assert [name for name, _ in report.left][:2] == ["transformer.h.0", "transformer.h.1"]
    assert close(model(ids).logits, expected)


def test_a_head_whose_class_is_replaced_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(vocab_size=131), tokens(1, 7)
    report = deuteron.patch(model, strict=True)
    assert "lm_head" in report.replaced
    monkeypatch.setattr(torch.nn.Linear, "forward", doubling(torch.nn.Linear.forward))
    got = model(ids).logits
    assert report.fallbacks == {"the forward of Linear is overridden": 1}
    deuteron.unpatch(model)
    assert close(got, model(ids).logits)


@pytest.mark.parametrize("where", ["instance", "class", "eager"])
def test_a_replaced_attention_function_falls_back(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    implementation = "eager" if where == "eager" else "sdpa"
    model, ids = tiny(attn_implementation=implementation), tokens(1, 7)
    own = ALL_ATTENTION_FUNCTIONS.get("sdpa", None)
    report = deuteron.patch(model, strict=True)
    if where == "instance":
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", doubling(own))
    elif where == "class":
        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", doubling(own))
    else:
        monkeypatch.setattr(modeling_gpt2, "eager_attention_forward", doubling(modeling_gpt2.eager_attention_forward))
    got = model(ids).logits
    assert report.fallbacks == {f"the attention function {implementation} of transformers is replaced": 2}
    deuteron.unpatch(model)
    assert close(got, model(ids).logits)


REPLACED_BEFORE = """
import torch, transformers
from transformers.models.gpt2 import modeling_gpt2
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
own, attend = modeling_gpt2.GPT2MLP.forward, ALL_ATTENTION_FUNCTIONS["sdpa"]
if {mlp}:
    modeling_gpt2.GPT2MLP.forward = lambda self, x: 2 * own(self, x)
else:
    ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda *a, **k: attend(*a, **k)
import deuteron
model = transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=128))
print(deuteron.patch(model).left[0])
"""


@pytest.mark.parametrize("mlp", [True, False], ids=["class", "function"])
def test_what_was_replaced_before_the_package_was_loaded_is_seen(mlp: bool) -> None:
    told = subprocess.run(
        [sys.executable, "-c", REPLACED_BEFORE.format(mlp=mlp)], check=True, capture_output=True, text=True
    ).stdout
    assert "h.0" in told and ("overridden" if mlp else "replaced") in told


# Devices.


@pytest.mark.parametrize("vocabulary", [128, 131], ids=["aligned", "padded-head"])
def test_a_model_on_the_meta_device_gives_shapes(vocabulary: int) -> None:
    model = tiny(vocab_size=vocabulary, pad_token_id=None)
    report = deuteron.patch(model, strict=True)
    model = model.to("meta")
    out = model(tokens(2, 7).to("meta"))
    assert out.logits.device.type == "meta" and out.logits.shape == (2, 7, vocabulary)
    assert sum(report.fallbacks.values()) == 3


def test_a_model_made_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPT2Model(tiny(n_layer=1, pad_token_id=None).config)
        report = deuteron.patch(model, strict=True)
        assert model(torch.zeros(1, 5, dtype=torch.long)).last_hidden_state.shape == (1, 5, 64)
    assert sum(report.fallbacks.values()) >= 2


def test_a_mask_of_truth_values_that_eager_attention_adds() -> None:
    """Eager attention adds what it is handed: a mask of truth values hides nothing there."""
    ids, model = tokens(2, 7), tiny(attn_implementation="eager")
    seen = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7)
    with torch.no_grad():
        expected = model(ids, attention_mask=seen).logits
        with deuteron.patched(model, strict=True) as report:
            got = model(ids, attention_mask=seen).logits
    assert close(got, expected)
    assert report.fallbacks == {"eager attention with a boolean mask, which it adds as 0 and 1": 2}

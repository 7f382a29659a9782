"""Adapters of peft inside the blocks of a patched GPT-2, against the same model without the patch."""

from __future__ import annotations

import ast
import copy
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import deuteron  # noqa: E402
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model  # noqa: E402
from peft.tuners import lora as peft_lora  # noqa: E402
from test_gpt2 import check_error, compare, on_devices, results, tiny, tokens  # noqa: E402

EVERYWHERE = ["c_attn", "c_proj", "c_fc"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Falling back is a warning, and peft warns when it takes IA3 out of weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def low_rank(*targets: str, **changes: Any) -> LoraConfig:
    # The square root of 3 is no float: a scale that was rounded would show.
    options = dict(r=3, lora_alpha=2, use_rslora=True, fan_in_fan_out=True, target_modules=list(targets or EVERYWHERE))
    return LoraConfig(**{**options, **changes})


def ia3(*before: str) -> IA3Config:
    targets = ["attn.c_attn", "mlp.c_fc", "mlp.c_proj"]
    return IA3Config(target_modules=targets, feedforward_modules=list(before), fan_in_fan_out=True)


def adapted(config: Any, dtype: Any = torch.float32, **changes: Any) -> Any:
    """A model whose adapter does something: as made, it would be none."""
    return shaken(get_peft_model(tiny(**{"n_layer": 1, **changes}).to(dtype), config))


def shaken(model: Any) -> Any:
    torch.manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(word in name for word in ("lora_", "ia3_", "prompt_encoder")):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def logits(model: Any, ids: Any) -> Any:
    with torch.no_grad():
        return model(ids).logits


def check_equal(model: Any, ids: Any, doing: Callable[[], Any] = lambda: None) -> Any:
    """The logits of a patched model are those of the model, after something was done to it; gives them."""
    doing()
    got = logits(model, ids)
    forwards = {module: module.__dict__.pop("forward") for module in model.modules() if "forward" in module.__dict__}
    assert forwards
    expected = logits(model, ids)
    for module, forward in forwards.items():
        module.forward = forward
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    return got


CONFIGS: Dict[str, Callable[[], Any]] = {
    "lora": low_rank,
    "dora": lambda: low_rank(use_dora=True),
    "ia3": lambda: ia3("mlp.c_fc", "mlp.c_proj"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", list(CONFIGS))
@on_devices
def test_logits_loss_and_gradients(device: str, kind: str, dtype: Any) -> None:
    """In bf16 the adapter stays in f32, as peft has it."""
    model, ids = adapted(CONFIGS[kind](), dtype).to(device), tokens(2, 9).to(device)
    gradients = compare(model, input_ids=ids, labels=ids)[2]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sorted(gradients) == sorted(trained) and trained
    assert all(bool(gradient.abs().max() > 0) and gradient.dtype == torch.float32 for gradient in gradients.values())


@pytest.mark.parametrize(
    "config",
    [low_rank(lora_bias=True, use_rslora=False), low_rank(r=1, target_modules="all-linear"), ia3()],
    ids=["bias", "all", "ia3-after"],
)
def test_other_configurations(config: Any) -> None:
    ids = tokens(1, 5)
    compare(adapted(config), input_ids=ids, labels=ids)


def test_an_adapter_in_bf16() -> None:
    """It is cast to f32 only if peft is asked to."""
    ids = tokens(2, 9)
    model = tiny(n_layer=1).bfloat16()
    model = shaken(get_peft_model(model, low_rank(use_dora=True), autocast_adapter_dtype=False))
    gradients = compare(model, input_ids=ids, labels=ids)[2]
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients.values())


def test_double_precision_is_interpreted() -> None:
    ids, model = tokens(1, 5), adapted(low_rank("c_attn", use_dora=True)).double()
    torchs = results(model, input_ids=ids, labels=ids)
    with deuteron.patched(model, strict=True) as report:
        ours = results(model, input_ids=ids, labels=ids)
    assert report.fallbacks == {}
    torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_autocast(kind: str) -> None:
    ids, model = tokens(2, 9), adapted(CONFIGS[kind]())
    exact = results(copy.deepcopy(model).double(), input_ids=ids, labels=ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torchs = results(model, input_ids=ids, labels=ids)
        with deuteron.patched(model, strict=True) as report:
            ours = results(model, input_ids=ids, labels=ids)
    assert report.fallbacks == {}
    check_error("logits", ours[0], torchs[0], exact[0], 2, torch.bfloat16)
    for name, gradient in ours[2].items():
        check_error(f"gradient of {name}", gradient, torchs[2][name], exact[2][name], 3, torch.bfloat16)


# Several adapters, merged ones, disabled ones


def test_which_adapters_are_active() -> None:
    """One, the other, both in either order, none, and merged into the weights."""
    model, ids = adapted(low_rank(), n_layer=2), tokens(2, 9)
    model.add_adapter("other", low_rank("c_attn", r=2, use_dora=True))
    shaken(model)
    report = deuteron.patch(model, strict=True)
    tuner = model.base_model
    seen = [check_equal(model, ids)]
    for names in (["other"], ["default", "other"], ["other", "default"]):
        seen.append(check_equal(model, ids, lambda: tuner.set_adapter(names)))
    with model.disable_adapter():
        seen.append(check_equal(model, ids))
    tuner.set_adapter("default")
    assert torch.equal(check_equal(model, ids), seen[0])
    merged = check_equal(model, ids, model.merge_adapter)
    torch.testing.assert_close(merged, seen[0], rtol=1e-4, atol=1e-4)
    # peft takes it out of the weights for a call without adapters.
    with model.disable_adapter():
        torch.testing.assert_close(check_equal(model, ids), seen[4], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(check_equal(model, ids), seen[0], rtol=1e-4, atol=1e-4)
    assert report.fallbacks == {}
    for index, one in enumerate(seen):
        assert all((one - other).abs().max() > 1e-2 for other in seen[:index] if other is not seen[2] or index != 3)


def test_disabled_and_merged_is_seen_without_a_call_between() -> None:
    model, ids = adapted(low_rank()), tokens(1, 5)
    with model.disable_adapter():
        expected = logits(model, ids)
    report = deuteron.patch(model, strict=True)
    model.merge_adapter()
    with model.disable_adapter():
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-4)
    assert report.fallbacks == {} and not model.base_model.model.transformer.h[0].attn.c_attn.merged


@pytest.mark.parametrize("kind", ["dora", "ia3"])
def test_merging_others(kind: str) -> None:
    model, ids = adapted(CONFIGS[kind]()), tokens(1, 5)
    report = deuteron.patch(model, strict=True)
    before = check_equal(model, ids)
    torch.testing.assert_close(check_equal(model, ids, model.merge_adapter), before, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(check_equal(model, ids, model.unmerge_adapter), before, rtol=1e-3, atol=1e-3)
    assert report.fallbacks == {}
    whole = model.merge_and_unload()
    torch.testing.assert_close(logits(whole, ids), before, rtol=1e-3, atol=1e-3)
    assert report.fallbacks == {} and deuteron.patch(whole, strict=True) is report


def test_a_scale_that_is_changed_is_seen() -> None:
    model, ids = adapted(low_rank()), tokens(1, 5)
    deuteron.patch(model, strict=True)
    before = check_equal(model, ids)
    for module in model.modules():
        if isinstance(module, peft_lora.LoraLayer):
            module.set_scale("default", 3.0)
    assert (check_equal(model, ids) - before).abs().max() > 1e-2


# Dropout


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_dropout_has_the_distribution_of_torch(dora: bool) -> None:
    """Of the last projection: there the mean over masks is the value without dropout."""
    model = adapted(low_rank("mlp.c_proj", lora_dropout=0.4, lora_alpha=20, use_dora=dora))
    block, x, runs = model.base_model.model.transformer.h[0], torch.randn(1, 3, 64).expand(16, 3, 64), 40

    def outputs() -> Any:
        with torch.no_grad():
            return torch.cat([block(x) for _ in range(runs)]).double()

    with torch.no_grad():
        whole = block(x[:1]).double()
    model.train()
    theirs = outputs()
    with deuteron.patched(model, strict=True) as report:
        torch.manual_seed(1)
        ours = outputs()
        torch.manual_seed(1)
        assert torch.equal(ours, outputs())
    assert report.fallbacks == {}
    # Beyond 5 deviations of the mean lies one value in a million; there are 192.
    assert ((ours.mean(0) - whole[0]).abs() <= 5 * ours.std(0) / len(ours) ** 0.5 + 1e-6).all()
    assert theirs.std(0).mean() > 0.05 and 0.9 < ours.std(0).mean() / theirs.std(0).mean() < 1.1


def test_dropout_gradients_are_those_of_the_same_masks() -> None:
    """A directional derivative, with the masks that the seed gives to two adapters and the block itself."""
    model = adapted(low_rank(lora_dropout=0.3), resid_pdrop=0.2)
    model.add_adapter("other", low_rank("c_attn", lora_dropout=0.5))
    model.base_model.set_adapter(["default", "other"])
    shaken(model).train()
    report = deuteron.patch(model, strict=True)
    ids = tokens(2, 9)

    def loss() -> Any:
        torch.manual_seed(11)
        return model(ids, labels=ids).loss

    loss().backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.sqrt(sum((p.grad**2).sum() for p in parameters)).item()
    # Along the gradient the slope is its norm. The step trades the rounding of the loss against the curvature.
    step, values = 1e-3, []
    for sign in (1, -1):
        with torch.no_grad():
            for p in parameters:
                p.add_(p.grad, alpha=sign * step / norm)
            values.append(loss().item())
            for p in parameters:
                p.sub_(p.grad, alpha=sign * step / norm)
    assert abs((values[0] - values[1]) / (2 * step) / norm - 1) < 2e-2
    assert report.fallbacks == {}


# Training, generation, files


def trained(model: Any, steps: int = 4) -> Tuple[List[float], Dict[str, Any]]:
    """Losses of AdamW, and the parameters after it."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        ids = tokens(2, 9, seed=step)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_training(kind: str) -> None:
    model = adapted(CONFIGS[kind]())
    other = copy.deepcopy(model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    theirs, expected = trained(model)
    report = deuteron.patch(other, strict=True)
    ours, got = trained(other)
    assert report.fallbacks == {}
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.equal(got[name], start[name]) != parameter.requires_grad, name
        torch.testing.assert_close(got[name], expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("config", [low_rank(), ia3("mlp.c_proj")], ids=["lora", "ia3"])
def test_generation(config: Any) -> None:
    model, ids = adapted(config), tokens(2, 7)
    options = dict(do_sample=False, max_new_tokens=8, attention_mask=torch.ones_like(ids))
    before = model.generate(input_ids=ids, **options)
    with deuteron.patched(model, strict=True) as report:
        after = model.generate(input_ids=ids, **options)
    assert report.fallbacks == {} and torch.equal(before, after)


def test_an_adapter_from_a_file(tmp_path: Path) -> None:
    """Loaded into a model that is patched already."""
    model, ids = adapted(low_rank(use_dora=True)), tokens(1, 5)
    deuteron.patch(model, strict=True)
    expected = logits(model, ids)
    model.save_pretrained(str(tmp_path))
    base = tiny(n_layer=1)
    report = deuteron.patch(base, strict=True)
    plain = logits(base, ids)
    loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    assert torch.equal(logits(loaded, ids), expected) and not torch.equal(plain, expected)
    assert report.fallbacks == {}


def test_a_compiler_sees_the_whole_block() -> None:
    model, x = adapted(low_rank("c_attn", lora_dropout=0.1)).train(), torch.randn(2, 9, 64)
    report = deuteron.patch(model, strict=True)
    block = model.base_model.model.transformer.h[0]
    torch._dynamo.reset()
    runs = []
    for forward in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(3)
        model.zero_grad()
        y = forward(x)
        y.square().sum().backward()
        runs.append([y.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)])
    torch._dynamo.reset()
    assert report.fallbacks == {}
    for ours, compiled in zip(*runs):
        assert torch.equal(ours, compiled)


# Prefix tuning


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_prefix_tuning(implementation: str) -> None:
    """The prefix is a cache that is trained."""
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model, ids = adapted(config, n_layer=2, attn_implementation=implementation), tokens(2, 7)
    gradients = compare(model, input_ids=ids, labels=ids)[2]
    assert list(gradients) == ["prompt_encoder.default.embedding.weight"]


def test_generation_after_a_prefix() -> None:
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model, ids = adapted(config), tokens(2, 7)
    options = dict(do_sample=False, max_new_tokens=6, attention_mask=torch.ones_like(ids))
    before = model.generate(input_ids=ids, **options)
    with deuteron.patched(model, strict=True) as report:
        assert torch.equal(model.generate(input_ids=ids, **options), before)
    assert report.fallbacks == {}


# What is not computed falls back, and is counted


class Doubled(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


class Negated:
    """A variant of LoRA that is not known."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Any, result: Any, **_: Any) -> Any:
        return result - module.lora_B[active_adapter](module.lora_A[active_adapter](x))


def change_matrix(layer: Any) -> None:
    layer.lora_A["default"] = Doubled(64, 3, bias=False)


def change_variant(layer: Any) -> None:
    layer.lora_variant["default"] = Negated


def change_dropout(layer: Any) -> None:
    layer.lora_dropout["default"] = torch.nn.AlphaDropout(0.1).eval()


def change_hook(layer: Any) -> None:
    layer.lora_B["default"].register_forward_hook(lambda module, args, out: 2 * out)


CHANGES = {
    change_matrix: "the adapter of its c_attn is a Doubled",
    change_variant: "the adapter of its c_attn is a Negated",
    change_dropout: "the dropout of its c_attn's adapter is a AlphaDropout",
    change_hook: "its c_attn's adapter has a hook",
}


@pytest.mark.parametrize("change", list(CHANGES), ids=lambda change: change.__name__)
def test_an_adapter_of_another_kind_falls_back(change: Any) -> None:
    model, ids = adapted(low_rank("c_attn")), tokens(1, 5)
    report = deuteron.patch(model, strict=True)
    check_equal(model, ids, lambda: change(model.base_model.model.transformer.h[0].attn.c_attn))
    assert report.fallbacks == {CHANGES[change]: 1}
    deuteron.unpatch(model)
    # And one that is found so is left.
    assert deuteron.patch(model).left == [("base_model.model.transformer.h.0", CHANGES[change])]


def test_a_class_whose_forward_is_replaced_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = adapted(low_rank("c_attn")), tokens(1, 5)
    report = deuteron.patch(model, strict=True)
    own = peft_lora.Linear.forward
    monkeypatch.setattr(peft_lora.Linear, "forward", lambda self, x: 2 * own(self, x))
    check_equal(model, ids)
    assert report.fallbacks == {"the forward of its c_attn's class Linear is overridden": 1}


def test_a_batch_of_several_adapters_falls_back() -> None:
    model, ids = adapted(low_rank("c_attn")), tokens(2, 5)
    model.add_adapter("other", low_rank("c_attn"))
    shaken(model)
    names = ["default", "other"]
    with torch.no_grad():
        expected = model(ids, adapter_names=names).logits
        report = deuteron.patch(model, strict=True)
        got = model(ids, adapter_names=names).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert report.fallbacks == {"its c_attn has a hook": 1}


def test_peft_is_not_imported() -> None:
    """It is optional: layers of it are recognised when it is loaded."""
    for path in Path(deuteron.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "peft" for name in names), path

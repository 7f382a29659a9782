"""Random GPT-2 of Hugging Face, patched against unpatched: configurations, adapters, modes, caches, masks and dtypes drawn from a seed.

    python python/tests/random_gpt2.py [--configs 300] [--seed N] [--modes MODE ...] [--out FILE]

Every configuration is run in every mode that it has: training, evaluation, generation, a cache in pieces. A run is *equal* if all that
the model returns, and all gradients, are within the bound and nothing fell back; *fallback* if they are and the report counts why
modules ran their own forward, or names what it left; *different* otherwise, also where the patched model raises and the model does
not. Half of the models have an adapter of peft, where that is installed: LoRA, merged or not, DoRA, IA3. Runs in which both raise compare nothing and are counted as *raised*. Without a seed one is drawn and printed. Exit code 0: nothing
is different and nothing raised; 1: something is.

The bound: the model in f64 is exact. A result may be off by twice as much as the unpatched model's worst element, gradients three
times, by four roundings of its dtype of the largest value, and by twice what it moves where every parameter moves by half a rounding,
up or down at random. Tokens are those of the unpatched model; where they part, the exact logits of both choices, or for beams the
exact scores of both texts, must be equal within 16 roundings of the largest logit.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import transformers
from transformers import DynamicCache, GPT2Config, GPT2DoubleHeadsModel, GPT2LMHeadModel, GPT2Model

import deuteron

try:
    import peft
except ImportError:
    peft = None

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ADAPTERS = ("lora", "merged lora", "dora", "ia3")
WAYS = ("training", "evaluation", "generation", "cache")
VERDICTS = ("equal", "fallback", "raised", "different")


class Run(NamedTuple):
    """One mode of one configuration."""

    config: Dict[str, Any]
    kind: str
    dtype: str
    mode: str
    options: Dict[str, Any]

    def __str__(self) -> str:
        changes = " ".join(f"{key}={value}" for key, value in {**self.config, **self.options}.items())
        return f"{self.mode} {self.kind} {self.dtype} {changes}"


class Outcome(NamedTuple):
    verdict: str
    """`equal`, `fallback`, `different`, or `raised` where the unpatched model raises, too"""
    why: str = ""
    fallbacks: Tuple[str, ...] = ()


# What is drawn.


def draw(seed: int, index: int) -> List[Run]:
    """The runs of one configuration."""
    one = random.Random(f"{seed}/{index}")
    heads, features = one.choice([1, 2, 3, 4]), one.choice([4, 8, 10, 16, 20, 32, 64])
    config: Dict[str, Any] = {
        "n_layer": one.choice([1, 1, 2, 3]),
        "n_head": heads,
        "n_embd": heads * features,
        "vocab_size": one.choice([61, 64, 100, 129]),
        "n_positions": one.choice([40, 64, 128]),
        "n_inner": one.choice([None, None, 24, 100, 128]),
        "activation_function": one.choice(["gelu_new", "gelu_new", "gelu", "gelu_pytorch_tanh", "relu", "silu", "tanh", "gelu_fast"]),
        "layer_norm_epsilon": one.choice([1e-5, 1e-5, 1e-3, 1e-6]),
        "scale_attn_weights": one.random() < 0.85,
        "scale_attn_by_inverse_layer_idx": one.random() < 0.2,
        "reorder_and_upcast_attn": one.random() < 0.15,
        "tie_word_embeddings": one.random() < 0.7,
        "attn_implementation": one.choice(["sdpa", "sdpa", "eager"]),
    }
    config["initializer_range"] = one.choice([0.05, 0.1, 0.2]) if config["scale_attn_weights"] else 0.05
    dtype = one.choice(["f32", "f32", "bf16", "f16"])
    kind = one.choice(["GPT2LMHeadModel", "GPT2LMHeadModel", "GPT2LMHeadModel", "GPT2Model", "GPT2DoubleHeadsModel"])
    common = {"batch": one.choice([1, 2, 3]), "length": one.choice([1, 2, 5, 8, 13, 17, 32]), "tokens": one.randrange(10**6)}
    # By numbers of its own: where peft is not installed, the rest of what is drawn is the same.
    other = random.Random(f"{seed}/{index}/adapter")
    if kind == "GPT2LMHeadModel" and other.random() < 0.5 and peft is not None:
        common["adapter"] = other.choice(ADAPTERS)
    runs = [Run(config, kind, dtype, "evaluation", {**common, **_evaluation(one)})]
    if kind == "GPT2LMHeadModel":
        runs.append(Run(config, kind, dtype, "training", {**common, **_training(one)}))
        runs.append(Run(config, kind, dtype, "generation", {**common, "length": min(common["length"], 13), **_generation(one)}))
    runs.append(Run(config, kind, dtype, "cache", {**common, "length": max(common["length"], 5), "cut": one.choice([1, 2, 4])}))
    return runs


def _evaluation(one: random.Random) -> Dict[str, Any]:
    return {
        "mask": one.choice(["none", "ones", "left", "right", "bool", "float"]),
        "embeddings": one.random() < 0.15,
        "positions": one.random() < 0.2,
        "hidden": one.random() < 0.3,
        "attentions": one.random() < 0.15,
        "tuple": one.random() < 0.2,
        "dropout": one.random() < 0.3,
        "inference": one.random() < 0.3,
    }


def _training(one: random.Random) -> Dict[str, Any]:
    return {
        "mask": one.choice(["none", "ones", "left", "right", "bool", "float"]),
        "ignored": one.random() < 0.5,
        "checkpointing": one.random() < 0.15,
        "autocast": one.random() < 0.15,
        "frozen": one.choice(["none", "none", "embeddings", "attention", "all but norms"]),
        "hidden": one.random() < 0.15,
        "embeddings": one.random() < 0.1,
    }


def _generation(one: random.Random) -> Dict[str, Any]:
    words = one.choice([{}, {}, {"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}, {"repetition_penalty": 1.3}])
    return {"mask": one.choice(["ones", "left"]), "words": words}


def build(run: Run) -> Any:
    """The model of a run: weights large enough that attention is not flat and logits are apart."""
    kind = {"GPT2LMHeadModel": GPT2LMHeadModel, "GPT2Model": GPT2Model, "GPT2DoubleHeadsModel": GPT2DoubleHeadsModel}[run.kind]
    dropout = 0.1 if run.options.get("dropout") else 0.0
    torch.manual_seed(run.options["tokens"])
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    config = GPT2Config(**run.config, **dict.fromkeys(names, dropout), bos_token_id=0, eos_token_id=None, pad_token_id=1)
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    if "adapter" in run.options:
        model = adapted(model, run.options["adapter"], random.Random(run.options["tokens"]))
    return model.to(DTYPES[run.dtype]).eval()


def adapted(model: Any, adapter: str, one: random.Random) -> Any:
    """The model with an adapter that does something: as made, it would be none."""
    places = [name for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj") if one.random() < 0.7] or ["attn.c_attn"]
    if adapter == "ia3":
        before = [name for name in places if name.startswith("mlp.c_proj")]
        model = peft.get_peft_model(model, peft.IA3Config(target_modules=places, feedforward_modules=before, fan_in_fan_out=True))
    else:
        words = {"r": one.choice([1, 3, 8]), "lora_alpha": one.choice([1, 2, 16]), "use_rslora": one.random() < 0.3}
        words |= {"use_dora": adapter == "dora", "bias": one.choice(["none", "none", "all"])}
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=places, fan_in_fan_out=True, **words))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "ia3_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    if adapter == "merged lora":
        model.merge_adapter()
    return model


def inputs(run: Run, model: Any) -> Dict[str, Any]:
    """What a model is called with. Masks and embeddings are of the model's dtype, which the exact one widens."""
    options, generator = run.options, torch.Generator().manual_seed(run.options["tokens"])
    batch, length, vocabulary = options["batch"], options["length"], run.config["vocab_size"]
    ids = torch.randint(2, vocabulary, (batch, length), generator=generator)
    given: Dict[str, Any] = {"input_ids": ids}
    if options.get("embeddings"):
        drawn = torch.randn(batch, length, run.config["n_embd"], generator=generator)
        given = {"inputs_embeds": drawn.to(model.dtype)}
    kind = options.get("mask", "none")
    if kind in ("ones", "left", "right"):
        mask = torch.ones(batch, length, dtype=torch.int64)
        hidden = min(length - 1, 3)
        if kind != "ones" and hidden:
            mask[0, :hidden] = 0
            mask = mask.flip(1) if kind == "right" else mask
        given["attention_mask"] = mask
    elif kind in ("bool", "float"):
        seen = torch.rand(batch, 1, length, length, generator=generator) < 0.7
        seen |= torch.eye(length, dtype=torch.bool)
        given["attention_mask"] = seen if kind == "bool" else torch.where(seen, 0.0, -5.0).to(model.dtype)
    if options.get("positions"):
        given["position_ids"] = torch.randint(0, run.config["n_positions"], (batch, length), generator=generator)
    for name, word in (("output_hidden_states", "hidden"), ("output_attentions", "attentions")):
        if options.get(word):
            given[name] = True
    if options.get("tuple"):
        given["return_dict"] = False
    if run.mode == "training":
        labels = torch.randint(0, vocabulary, (batch, length), generator=generator)
        if options["ignored"]:
            labels[:, ::3] = -100
        given["labels"] = labels
    return given


# How a run goes. Each gives tensors by name, those of gradients begin with `gradient of`.

Tensors = Dict[str, Any]


def evaluation(model: Any, run: Run, given: Dict[str, Any]) -> Tensors:
    with torch.inference_mode() if run.options["inference"] else torch.no_grad():
        return dict(_tensors(model(**given, use_cache=False)))


def training(model: Any, run: Run, given: Dict[str, Any]) -> Tensors:
    model.train()
    frozen = run.options["frozen"]
    for name, parameter in model.named_parameters():
        is_frozen = {"none": False, "embeddings": "wte" in name or "wpe" in name, "attention": "attn" in name}
        parameter.requires_grad_(not is_frozen.get(frozen, "ln_" not in name))
        parameter.grad = None
    if run.options["checkpointing"]:
        model.gradient_checkpointing_enable()
    if run.options["autocast"] and model.dtype == torch.float32:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(**given, use_cache=False)
    else:
        out = model(**given, use_cache=False)
    found = dict(_tensors(out))
    if out.loss.requires_grad and bool(out.loss.isfinite()):
        out.loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.detach().clone()
    model.zero_grad()
    model.gradient_checkpointing_disable()
    model.eval()
    return {name: one.detach() for name, one in found.items()}


def cache(model: Any, run: Run, given: Dict[str, Any]) -> Tensors:
    ids, cut = given["input_ids"], run.options["cut"]
    found = {}
    with torch.no_grad():
        past = DynamicCache(config=model.config)
        for start in (0, cut, cut + 1):
            stop = {0: cut, cut: cut + 1}.get(start, ids.shape[1])
            if start < stop <= ids.shape[1]:
                found[f"from {start}"] = model(ids[:, start:stop], past_key_values=past, use_cache=True)[0]
        past.crop(cut - past.get_seq_length())
        found["after a crop"] = model(ids[:, cut:], past_key_values=past, use_cache=True)[0]
    for index, layer in enumerate(past.layers):
        found[f"keys {index}"], found[f"values {index}"] = layer.keys, layer.values
    return found


def _tensors(out: Any) -> Iterator[Tuple[str, Any]]:
    named = out.items() if hasattr(out, "items") else enumerate(out)
    for name, one in named:
        if isinstance(one, torch.Tensor):
            yield str(name), one
        elif isinstance(one, (tuple, list)):
            yield from ((f"{name}[{index}]", part) for index, part in enumerate(one) if isinstance(part, torch.Tensor))


MODES: Dict[str, Callable[[Any, Run, Dict[str, Any]], Tensors]] = {
    "evaluation": evaluation,
    "training": training,
    "cache": cache,
}


# How it is judged.


def judge(run: Run) -> Outcome:
    """Runs a model unpatched, patched, and in f64."""
    model = build(run)
    given = inputs(run, model)
    mode = generation if run.mode == "generation" else MODES[run.mode]
    theirs, failed = _attempt(mode, model, run, given)
    report = deuteron.patch(model)
    ours, raised = _attempt(mode, model, run, given)
    deuteron.unpatch(model)
    reasons = (*(f"left: {why}" for _, why in report.left), *report.fallbacks)
    if failed is not None or raised is not None:
        same = failed is not None and raised is not None
        return Outcome("raised" if same else "different", f"patched raised {raised!r}, unpatched {failed!r}", reasons)
    exact_model = copy.deepcopy(model).double()
    bare = exact_model.get_base_model() if hasattr(exact_model, "get_base_model") else exact_model
    for block in getattr(bare, "transformer", bare).h:
        # The same mathematics, in a code of transformers that takes no f64.
        block.attn.reorder_and_upcast_attn = False
    wide = {name: one.double() if _is_float(one) else one for name, one in given.items()}
    if run.mode == "generation":
        why = _parted(theirs["tokens"], ours["tokens"], exact_model, run, wide)
    else:
        moved = mode(_moved(exact_model, run), run, wide)
        why = _off(ours, theirs, mode(exact_model, run, wide), moved, run)
    if why:
        return Outcome("different", why, reasons)
    return Outcome("fallback" if reasons else "equal", "", reasons)


def _attempt(mode: Any, model: Any, run: Run, given: Dict[str, Any]) -> Tuple[Any, Optional[Exception]]:
    try:
        torch.manual_seed(1)
        return mode(model, run, dict(given)), None
    except Exception as error:  # whatever transformers or we raise is compared
        return None, error


def _is_float(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.is_floating_point()


def _rounding(run: Run) -> float:
    """That of the dtype in which a run computes."""
    return float(torch.finfo(torch.bfloat16 if run.options.get("autocast") else DTYPES[run.dtype]).eps)


def _moved(exact: Any, run: Run) -> Any:
    """The model with parameters that are off as they would be had they been rounded."""
    moved, generator = copy.deepcopy(exact), torch.Generator().manual_seed(run.options["tokens"])
    with torch.no_grad():
        for parameter in moved.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2.0 - 1.0
            parameter.mul_(1 + signs.double() * (_rounding(run) / 2))
    return moved


def _off(ours: Tensors, theirs: Tensors, exact: Tensors, moved: Tensors, run: Run) -> str:
    """What is off by more than its bound; nothing if all is within."""
    if list(ours) != list(theirs):
        return f"returned {sorted(set(ours) ^ set(theirs))} on one side only"
    for name, mine in ours.items():
        native, value = theirs[name], exact[name]
        if mine.dtype != native.dtype or mine.shape != native.shape:
            return f"{name} is {mine.dtype}{list(mine.shape)}, unpatched {native.dtype}{list(native.shape)}"
        if not _is_float(mine):
            if not torch.equal(mine, native):
                return f"{name} differs"
            continue
        finite = native.isfinite()
        if not torch.equal(torch.where(finite, 0, native).nan_to_num(7), torch.where(finite, 0, mine).nan_to_num(7)):
            return f"{name} is not finite where the unpatched is, or the reverse"
        scale, times = _largest(value, finite), 3 if name.startswith("gradient") else 2
        allowed = times * _largest(native.double() - value, finite) + 4 * _rounding(run) * scale
        allowed += 2 * _largest(moved[name] - value, finite)
        error = _largest(mine.double() - value, finite)
        if not error <= allowed + 1e-30:
            return f"{name} is off by {error:.3g}, allowed {allowed:.3g}, values up to {scale:.3g}"
    return ""


def _largest(values: Any, where: Any) -> float:
    sizes = torch.where(where, values.abs(), 0.0)
    return float(sizes.max()) if sizes.numel() else 0.0


def generation(model: Any, run: Run, given: Dict[str, Any]) -> Tensors:
    words = {"do_sample": False, "max_new_tokens": 6, **run.options["words"]}
    return {"tokens": model.generate(given["input_ids"], attention_mask=given["attention_mask"], **words)}


def _parted(theirs: Any, ours: Any, exact: Any, run: Run, given: Dict[str, Any]) -> str:
    """Where tokens part without the exact logits of both being equal."""
    if ours.shape != theirs.shape:
        return f"{list(ours.shape)} tokens, unpatched {list(theirs.shape)}"
    for row in range(ours.shape[0]):
        places = (ours[row] != theirs[row]).nonzero()
        if not len(places):
            continue
        place = int(places[0])
        seen = torch.ones(1, place, dtype=torch.int64)
        seen[:, : given["attention_mask"].shape[1]] = given["attention_mask"][row]
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = exact(theirs[row : row + 1, :place], attention_mask=seen, position_ids=positions).logits[0, -1]
        distance = float((logits[ours[row, place]] - logits[theirs[row, place]]).abs())
        allowed = 16 * _rounding(run) * float(logits.abs().max())
        if "num_beams" in run.options["words"]:
            scores = [_score(exact, text[row : row + 1], given["attention_mask"][row : row + 1]) for text in (ours, theirs)]
            distance = abs(scores[0] - scores[1])
        if distance > allowed:
            return f"tokens part at {place}: exact scores {distance:.3g} apart, allowed {allowed:.3g}"
    return ""


def _score(exact: Any, text: Any, mask: Any) -> float:
    """What beams compare: the mean logarithm of the probability of a generated token."""
    prompt, length = mask.shape[1], text.shape[1]
    seen = torch.cat([mask, torch.ones(1, length - prompt, dtype=mask.dtype)], 1)
    with torch.no_grad():
        logits = exact(text, attention_mask=seen, position_ids=(seen.cumsum(-1) - 1).clamp(min=0)).logits[0]
    logs = logits.log_softmax(-1)[prompt - 1 : length - 1].gather(1, text[0, prompt:, None])
    return float(logs.mean())


def runs(seed: int, configs: int, modes: Sequence[str] = WAYS) -> Iterator[Tuple[Run, Outcome]]:
    """The runs of so many configurations in these modes, with what became of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        for index in range(configs):
            for run in draw(seed, index):
                if run.mode in modes:
                    yield run, judge(run)
            deuteron.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None, help="[default: a fresh one]")
    parser.add_argument("--modes", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--out", type=Path, help="a file of rows to append to")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**9) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    counts: Dict[Tuple[str, str], int] = Counter()
    reasons: Dict[str, int] = Counter()
    began = time.monotonic()
    for run, outcome in runs(seed, arguments.configs, arguments.modes):
        counts[run.mode + (" with adapter" if "adapter" in run.options else ""), outcome.verdict] += 1
        reasons.update(outcome.fallbacks)
        if outcome.verdict in ("different", "raised"):
            print(f"{outcome.verdict}: {run}: {outcome.why}", flush=True)
    for reason, times in sorted(reasons.items()):
        print(f"{times} runs fell back or were left: {reason}")
    total = {word: sum(n for (_, verdict), n in counts.items() if verdict == word) for word in VERDICTS}
    print(f"{arguments.configs} configurations: {total}; {time.monotonic() - began:.0f} s")
    if arguments.out:
        _append(arguments.out, seed, arguments.configs, counts)
    return 1 if total["different"] or total["raised"] else 0


def _append(path: Path, seed: int, configs: int, counts: Dict[Tuple[str, str], int]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, encoding="utf-8").stdout.strip()
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(["seed", "configs", "mode", *VERDICTS, "transformers", "torch", "commit", "date"])
        for mode in sorted({mode for mode, _ in counts}):
            numbers: Sequence[int] = [counts[mode, word] for word in VERDICTS]
            versions = [transformers.__version__, torch.__version__, commit, datetime.date.today().isoformat()]
            writer.writerow([seed, configs, mode, *numbers, *versions])


if __name__ == "__main__":
    sys.exit(main())

"""Losses of a small GPT-2 of the transformers library while PyTorch trains it: what `crates/train/tests/all/curve.rs` holds ours against.

Usage: python bench/make_train_fixture.py        (needs torch and transformers)

The model is the first layer of `crates/gpt2/tests/fixtures/gelu`. Each optimiser runs in f64, in f32 and under bf16 autocast on the same batches; the
f64 losses are the truth, and the other two say how far rounding takes PyTorch itself from it. A longer run of AdamW in f32 has two implementations of
attention, `sdpa` and `eager`: the difference of their losses is PyTorch's own drift. Batches, rates and settings are formulas, written again in the test.
"""

import csv
import math
from pathlib import Path

import torch
from transformers import GPT2LMHeadModel

ROOT = Path(__file__).resolve().parent.parent
STEPS, LONG, WARMUP, MICRO_BATCHES, BATCH, SEQUENCE, VOCABULARY = 24, 200, 4, 2, 2, 16, 320
CLIP, DECAY, BETAS, EPSILON = 1.0, 0.1, (0.9, 0.95), 1e-8
RATES = {"adamw": 3e-3, "sgd": 0.1, "lion": 1e-3}


def batch(step, micro_batch):
    """Tokens and the ones that follow them."""
    rows = []
    for row in range(BATCH):
        start = 31 * step + 7 * micro_batch + 3 * row
        rows.append([(at * at * 5 + at * 13 + start // 8) % VOCABULARY for at in range(start, start + SEQUENCE + 1)])
    rows = torch.tensor(rows)
    return rows[:, :-1], rows[:, 1:]


def rate(highest, step, steps):
    if step < WARMUP:
        return highest * (step + 1) / WARMUP
    part = (step - WARMUP) / (steps - WARMUP)
    return highest / 10 + 0.5 * (1 + math.cos(math.pi * part)) * (highest - highest / 10)


class Lion(torch.optim.Optimizer):
    """Chen and others, 2023, from the paper."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                moment = self.state[weight].setdefault("moment", torch.zeros_like(weight))
                change = torch.sign(BETAS[0] * moment + (1 - BETAS[0]) * weight.grad)
                weight -= group["lr"] * (change + group["weight_decay"] * weight)
                moment.mul_(BETAS[1]).add_(weight.grad, alpha=1 - BETAS[1])


def optimizer(name, model):
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": DECAY},
        {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
    ]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPSILON)
    if name == "sgd":
        # PyTorch's decay is not decoupled, so there is none.
        return torch.optim.SGD(weights, lr=1.0, momentum=BETAS[0])
    return Lion(groups, {"lr": 1.0})


def losses(name, mode, steps=STEPS, attention="sdpa"):
    folder = ROOT / "crates/gpt2/tests/fixtures/gelu"
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, n_layer=1, attn_implementation=attention)
    model = model.to(torch.float64 if mode == "f64" else torch.float32).train()
    updates = optimizer(name, model)
    curve = []
    for step in range(steps):
        updates.zero_grad()
        total = 0.0
        for micro_batch in range(MICRO_BATCHES):
            tokens, targets = batch(step, micro_batch)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "bf16"):
                logits = model(tokens).logits
            # Rows in the model's own type: the loss functions of the library go through f32.
            logits = logits if mode == "f64" else logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / MICRO_BATCHES).backward()
            total += loss.item() / MICRO_BATCHES
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in updates.param_groups:
            group["lr"] = rate(RATES[name], step, steps)
        updates.step()
        curve.append(total)
    return curve


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    path = ROOT / "crates/train/tests/fixtures/torch_losses.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["optimizer", "step", "f64", "f32", "bf16"])
        for name in RATES:
            for step, values in enumerate(zip(*(losses(name, mode) for mode in ("f64", "f32", "bf16")))):
                rows.writerow([name, step, *(f"{value:.12f}" for value in values)])
    with (path.parent / "torch_200_steps.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        modes = ["sdpa", "eager"]
        rows.writerow(["step", *modes])
        for step, values in enumerate(zip(*(losses("adamw", "f32", LONG, mode) for mode in modes))):
            rows.writerow([step, *(f"{value:.12f}" for value in values)])


if __name__ == "__main__":
    main()

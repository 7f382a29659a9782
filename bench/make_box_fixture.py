#!/usr/bin/env python3
"""What the transformers library computes from the model in the box, in f64 from the stored weights.

    python3 -m venv env && env/bin/pip install torch transformers
    env/bin/python bench/make_box_fixture.py            # writes crates/gpt2/box/expected.json

cases   prompts with their tokens, the greedy tokens after each, and the smallest distance of the best two logits on the way: far
        above what f32 is off by, or the prompt is refused
loss    mean cross entropy, in nats, of the first `tokens` tokens of held-out.txt but the first, in windows of the model's context
"""

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

BOX = Path(__file__).resolve().parent.parent / "crates" / "gpt2" / "box"
PROMPTS = ["To be, or not", "The king", "[Enter ROMEO", "O, what a", "My lord, I"]
STEPS = 32
MARGIN = 2e-3
TOKENS = 2000


def greedy(model, ids):
    tokens, margin = list(ids), float("inf")
    for _ in range(STEPS):
        best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        tokens.append(best.indices[0].item())
    return tokens[len(ids) :], margin


def loss(model, tokens):
    context, total = model.config.n_positions, 0.0
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context + 1]
        logits = model(torch.tensor([window[:-1]])).logits[0]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum").item()
    return total / (len(tokens) - 1)


@torch.no_grad()
def main():
    tokenizer = AutoTokenizer.from_pretrained(BOX)
    model = GPT2LMHeadModel.from_pretrained(BOX).double().eval()
    cases = []
    for text in PROMPTS:
        ids = tokenizer(text)["input_ids"]
        tokens, margin = greedy(model, ids)
        if margin >= MARGIN:
            cases.append({"text": text, "prompt": ids, "greedy": tokens, "margin": margin})
        print(f"{text!r}: margin {margin:.4f}\n{tokenizer.decode(ids + tokens)}\n")
    assert len(cases) >= 3, "too few prompts with a clear path"
    held_out = tokenizer((BOX / "held-out.txt").read_text())["input_ids"][:TOKENS]
    expected = {"cases": cases, "tokens": len(held_out), "loss": loss(model, held_out)}
    print(expected["loss"])
    (BOX / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The full shape of GPT-2 124M against transformers: the greedy tokens of a checkpoint that its library made.

    python3 bench/parity_gpt2.py [--device cpu|cuda] [--commit HASH]

A model with random weights is saved as Hugging Face lays it out; transformers continues prompts by 64 tokens in f32, and so does
`deuteron generate`, from the same folder. The distance of the best two logits tells how far off a computation must be to take
another token. Needs torch and transformers.

A row goes to gpt2-parity.csv in the folder named by OUT (default ./out). Exit code 0: all tokens are the same; 1: some are not.
"""

import json
import sys
import tempfile

import torch
import transformers

import measuring

# Strings with their tokens by GPT-2's vocabulary.
STRINGS = measuring.ROOT / "crates/gpt2/tests/fixtures/tokens/strings.json"
STEPS, PROMPTS, SEED = 64, 4, 7


def greedy(model, prompt):
    """What follows, and the smallest distance of the best two logits."""
    tokens, margin = list(prompt), float("inf")
    with torch.inference_mode():
        for _ in range(STEPS):
            best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
    return tokens[len(prompt):], margin


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    strings = [(text, ids) for text, ids in json.loads(STRINGS.read_text()) if 4 <= len(ids) <= 40][:PROMPTS]
    torch.manual_seed(SEED)
    # Weights five times as far spread as at the start of training: logits that differ.
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(initializer_range=0.1)).eval()
    wrong, margins = 0, []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        words = ["--model", folder, "--max-tokens", str(STEPS), "--device", arguments.device]
        report = measuring.ours(arguments.binary, "generate", *[text for text, _ in strings], *words)
    for (text, ids), ours in zip(strings, report["texts"], strict=True):
        tokens, margin = greedy(model, ids)
        margins.append(margin)
        same = sum(1 for one, other in zip(tokens, ours["tokens"]) if one == other)
        wrong += STEPS - same
        print(f"{text[:40]!r}: {same} of {STEPS} tokens the same, best two logits at least {margin:.4f} apart")
    columns = ["model", "weights", "device", "prompts", "tokens", "wrong", "smallest_margin", "transformers"]
    table = measuring.Table("gpt2-parity.csv", columns, commit=arguments.commit)
    table.add(["gpt2", "f32", report["device"], len(strings), STEPS * len(strings), wrong, f"{min(margins):.5f}",
               transformers.__version__])
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

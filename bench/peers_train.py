#!/usr/bin/env python3
"""Seconds of a training step on the CPU: `deuteron train` beside PyTorch's eager mode, with the same sizes and threads.

    cargo build --release
    python bench/peers_train.py                        # the default model of `deuteron train`, 4.9 million parameters
    python bench/peers_train.py --layers 2 --width 128 --heads 4 --batch 4
    python bench/peers_train.py --model box --out bench/results/NAME-train-peers.csv      # the built-in model, 2.7 million

PyTorch runs Hugging Face's GPT-2 with sdpa attention, fused AdamW, gradients clipped to 1, no dropout. Runs alternate; each figure is the
median of all steps but the first three of every run. The data is random tokens, the same for both.
"""

import argparse
import csv
import datetime
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 3


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["box"], help="its sizes, in place of the next four words")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="of each run, after the first %d" % SKIPPED)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--command", default=str(ROOT / "target/release/deuteron"))
    parser.add_argument("--out", help="a CSV file that gets a row")
    options = parser.parse_args()
    options.vocabulary = 257
    if options.model:
        options.layers, options.heads, options.width, options.context, options.vocabulary = 5, 6, 192, 256, 2048
    return options


def ours(options, data, number):
    """Seconds of each step, from the log's tokens per second."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = "model" if options.model else "layers heads width context"
        words = [word for name in f"{sizes} batch threads precision".split() for word in (f"--{name}", str(getattr(options, name)))]
        steps = ["--steps", str(options.steps + SKIPPED), "--evaluate-every", "0", "--save-every", "0"]
        command = [options.command, "train", data, "--out", folder, "--device", "cpu", "--seed", str(number)]
        subprocess.run([*command, *words, *steps, "--json"], check=True, stdout=subprocess.DEVNULL)
        with open(Path(folder) / "log.csv", newline="") as file:
            rows = list(csv.DictReader(file))[SKIPPED:]
    return [options.batch * options.context / float(row["tokens_per_second"]) for row in rows]


def theirs(options, tokens):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(options.threads)
    config = GPT2Config(
        n_layer=options.layers, n_head=options.heads, n_embd=options.width, n_positions=options.context, vocab_size=options.vocabulary,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds = []
    for _ in range(options.steps + SKIPPED):
        begin = time.perf_counter()
        places = [random.randrange(len(tokens) - options.context) for _ in range(options.batch)]
        rows = torch.tensor([tokens[place : place + options.context + 1] for place in places])
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.precision == "bf16"):
            logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        seconds.append(time.perf_counter() - begin)
    return seconds[SKIPPED:]


def main():
    options = arguments()
    random.seed(1)
    tokens = [random.randrange(options.vocabulary) for _ in range(100_000)]
    all_ours, all_theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "tokens.bin"
        data.write_bytes(b"".join(token.to_bytes(2, "little") for token in tokens))
        for number in range(options.runs):
            all_ours += ours(options, str(data), number)
            all_theirs += theirs(options, tokens)
    us, them = statistics.median(all_ours), statistics.median(all_theirs)
    each = options.batch * options.context
    print(f"{options.layers} layers, width {options.width}, {options.batch} x {options.context} tokens, {options.precision}, "
          f"{options.threads} threads")
    print(f"deuteron train   {1e3 * us:8.1f} ms a step  {each / us:8.0f} tokens/s")
    print(f"PyTorch eager    {1e3 * them:8.1f} ms a step  {each / them:8.0f} tokens/s")
    print(f"deuteron is {them / us:.2f} times as fast")
    if options.out:
        write(options, us, them)


def write(options, us, them):
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    machine = f"{os.cpu_count()} cores of {platform.machine()}"
    path = Path(options.out)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if is_new:
            table.writerow(["layers", "width", "vocabulary", "batch", "context", "precision", "threads", "deuteron_ms", "torch_ms",
                            "torch_over_ours", "machine", "torch", "commit", "date"])
        table.writerow([options.layers, options.width, options.vocabulary, options.batch, options.context, options.precision,
                        options.threads, f"{1e3 * us:.1f}", f"{1e3 * them:.1f}", f"{them / us:.3f}", machine, torch.__version__, commit,
                        datetime.date.today().isoformat()])


if __name__ == "__main__":
    main()

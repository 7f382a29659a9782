#!/usr/bin/env python3
"""Milliseconds of an optimiser's step: `deuteron.optim` beside `torch.optim` with `foreach` and with `fused`, in turn in one run.

    python bench/peers_optim.py                                  # the built-in model and GPT-2's parameters on the CPU, f32
    python bench/peers_optim.py --threads 2 --out bench/results/NAME-optim-peers.csv
    python bench/peers_optim.py --device cuda --dtype bf16

A step reads gradients that are there and writes weights and states in place. A round times each contender once, in an order that turns;
figures are medians over rounds. `copy` moves as many bytes as the step must (weight, gradient and states read, weight and states
written) by `torch.Tensor.copy_`, half of them read.
"""

import argparse
import csv
import datetime
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch

import deuteron

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

# layers, width, vocabulary, positions
MODELS = {"box": (5, 192, 2048, 256), "gpt2": (12, 768, 50257, 1024)}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="box,gpt2")
    parser.add_argument("--optimizers", default="adamw,sgd")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", help="a CSV file that gets the rows")
    return parser.parse_args()


def parameters(model, dtype, device):
    """Parameters of a GPT-2 with their gradients."""
    layers, width, vocabulary, positions = MODELS[model]
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    made = []
    for shape in [(vocabulary, width), (positions, width), *block * layers, (width,), (width,)]:
        parameter = torch.nn.Parameter((0.02 * torch.randn(shape)).to(device, dtype))
        parameter.grad = torch.randn_like(parameter)
        made.append(parameter)
    return made


def contenders(optimizer, model, dtype, device):
    """A function for each that runs a step, and the bytes that it must move."""
    ours, theirs, words, states = {
        "adamw": (deuteron.optim.AdamW, torch.optim.AdamW, {"lr": 1e-4, "weight_decay": 0.1}, 2),
        "sgd": (deuteron.optim.SGD, torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9, "weight_decay": 0.1}, 1),
    }[optimizer]
    own = parameters(model, dtype, device)
    elements = sum(parameter.numel() for parameter in own)
    size = elements * own[0].element_size() * (3 + 2 * states)
    source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return size, {
        "ours": ours(own, **words).step,
        "foreach": theirs(parameters(model, dtype, device), **words, foreach=True).step,
        "fused": theirs(parameters(model, dtype, device), **words, fused=True).step,
        "copy": lambda: target.copy_(source),
    }


def timed(step, device):
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def main():
    options = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    rows = []
    for model in options.models.split(","):
        for optimizer in options.optimizers.split(","):
            size, steps = contenders(optimizer, model, DTYPES[options.dtype], options.device)
            names = list(steps)
            times = {name: [] for name in names}
            for round in range(options.rounds + 3):
                for name in names[round % len(names) :] + names[: round % len(names)]:
                    took = timed(steps[name], options.device)
                    if round >= 3:
                        times[name].append(took)
            medians = {name: statistics.median(own) for name, own in times.items()}
            best = min(medians["foreach"], medians["fused"])
            figures = ", ".join(f"{name} {median:.3f} ms" for name, median in medians.items())
            print(f"{optimizer} {model} {options.dtype}: {figures}; {best / medians['ours']:.2f} times as fast as the best peer, "
                  f"{medians['ours'] / medians['copy']:.2f} of the copy's time, {size / 1e6 / medians['ours']:.1f} GB/s", flush=True)
            rows.append([optimizer, model, options.dtype, options.threads, *(f"{medians[name]:.4f}" for name in names),
                         f"{best / medians['ours']:.3f}"])
    if options.out:
        write(options, rows)


def write(options, rows):
    machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{os.cpu_count()} cores of {platform.machine()}"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    facts = [machine, torch.__version__, commit, datetime.date.today().isoformat()]
    path = Path(options.out)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if is_new:
            table.writerow(["optimizer", "model", "dtype", "threads", "deuteron_ms", "foreach_ms", "fused_ms", "copy_ms",
                            "best_peer_over_ours", "machine", "torch", "commit", "date"])
        table.writerows([*row, *facts] for row in rows)


if __name__ == "__main__":
    main()

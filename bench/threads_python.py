#!/usr/bin/env python3
"""Times the Python package on a CPU in the company that it has there: after ops of PyTorch, beside a busy process, on small tensors.

    python3 bench/threads_python.py [--machine NAME] [--rounds N] [--parts large small generate]

Runs in an environment with PyTorch and the package, built for release. Settings of one op take turns within a round; a number is the
median over rounds of each round's median. `generate` is GPT-2 124M of Hugging Face in f32 with seeded weights, 32 tokens after a prompt
of 128, patched and not. `ratio` is what the row compares: for `alone`, `small` and `generate` PyTorch's time over ours, for
`after torch` and `busy core` the time in that setting over the time alone, ours and PyTorch's each.

Appends to bench/results/NAME-python-threads.csv. Exit code 0 if ours is at most 1.1 times its time alone after an op of PyTorch, at least
as fast as PyTorch on small tensors, generates at 1.05 times PyTorch's speed at least, and loses no more than PyTorch beside a busy process; else 1.
"""

import argparse
import copy
import csv
import datetime
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import gelu, layer_norm, silu

import deuteron

ROOT = Path(__file__).resolve().parent.parent
LARGE = (6912, 768)  # 21 MB per tensor
SMALL = [(1, 64), (8, 64), (64, 64), (8, 768), (64, 768)]
OPS = ("softmax", "add_norm", "swiglu")
SMALL_OPS = (*OPS, "layer_norm", "gelu")
PARTS = ["large", "small", "generate"]


def contenders(op, shape):
    """Our op and PyTorch's on the same tensors."""
    x, r = torch.randn(shape), torch.randn(shape)
    w, b = torch.ones(shape[1]), torch.zeros(shape[1])

    def add_norm():
        s = x + r
        return layer_norm(s, shape[1:], w, b), s

    return {
        "softmax": (lambda: deuteron.softmax(x), lambda: torch.softmax(x, -1)),
        "add_norm": (lambda: deuteron.add_norm(x, r, w, b), add_norm),
        "swiglu": (lambda: deuteron.swiglu(x, r), lambda: silu(x) * r),
        "layer_norm": (lambda: deuteron.layer_norm(x, w, b), lambda: layer_norm(x, shape[1:], w, b)),
        "gelu": (lambda: deuteron.act(x), lambda: gelu(x)),
    }[op]


def slice_of(call, before=None, seconds=0.3):
    """The median time of a call in us, in a slice of time; `before` runs before each call and is not counted."""
    times, end = [], time.perf_counter() + seconds
    count = 1 if before else max(1, int(5e-4 / once(call)))
    while len(times) < 5 or time.perf_counter() < end:
        if before:
            before()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count)
    return 1e6 * statistics.median(times)


def once(call):
    call()
    return seconds(call)


def measure(settings, rounds):
    """Medians over rounds; in each round every setting has a turn."""
    found = {name: [] for name in settings}
    for _ in range(rounds):
        for name, run in settings.items():
            found[name].append(run())
    return {name: statistics.median(times) for name, times in found.items()}


def large_rows(op, rounds):
    ours, theirs = contenders(op, LARGE)
    other = torch.randn(LARGE)
    torch_op = lambda: other.mul_(1.0)  # noqa: E731
    times = measure(
        {
            "ours alone": lambda: slice_of(ours),
            "torch alone": lambda: slice_of(theirs),
            "ours after": lambda: slice_of(ours, torch_op),
            "torch after": lambda: slice_of(theirs, torch_op),
        },
        rounds,
    )
    # One process keeps one core busy, as long as it is measured.
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        times |= measure({"ours busy": lambda: slice_of(ours), "torch busy": lambda: slice_of(theirs)}, rounds)
    finally:
        busy.kill()
        busy.wait()
    yield "alone", LARGE, times["ours alone"], times["torch alone"], times["torch alone"] / times["ours alone"]
    for name, setting in (("after", "after torch"), ("busy", "busy core")):
        slower = times[f"ours {name}"] / times["ours alone"]
        torch_slower = times[f"torch {name}"] / times["torch alone"]
        yield setting, LARGE, times[f"ours {name}"], times[f"torch {name}"], (slower, torch_slower)


def small_rows(op, rounds):
    for shape in SMALL:
        ours, theirs = contenders(op, shape)
        times = measure({"ours": lambda: slice_of(ours, seconds=0.1), "torch": lambda: slice_of(theirs, seconds=0.1)}, rounds)
        yield "small", shape, times["ours"], times["torch"], times["torch"] / times["ours"]


def generate_rows(rounds):
    """Needs transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config()).eval()
    ours = copy.deepcopy(plain)
    deuteron.patch(ours)
    prompt = torch.randint(0, 50257, (1, 128))
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0)
    if not torch.equal(ours.generate(prompt, **options), plain.generate(prompt, **options)):
        raise SystemExit("generate: the patched model gives other tokens")
    calls = {"ours": lambda: ours.generate(prompt, **options), "torch": lambda: plain.generate(prompt, **options)}
    times = measure({name: lambda call=call: 1e6 * seconds(call) for name, call in calls.items()}, rounds)
    yield "generate", (128, 32), times["ours"], times["torch"], times["torch"] / times["ours"]


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def passes(setting, ratio):
    if setting == "after torch":
        return ratio[0] <= 1.1
    if setting == "busy core":
        return ratio[0] <= 1.05 * ratio[1]  # 5 %: the spread between runs
    return ratio >= {"small": 1.0, "generate": 1.05}.get(setting, 0.0)


def rows_of(op, arguments):
    if op == "generate":
        if "generate" in arguments.parts:
            yield from generate_rows(arguments.rounds)
        return
    if "large" in arguments.parts and op in OPS:
        yield from large_rows(op, arguments.rounds)
    if "small" in arguments.parts:
        yield from small_rows(op, arguments.rounds)


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--machine", default="xeon-2core")
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    arguments = words.parse_args()
    torch.set_grad_enabled(False)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    rows, failed = [], False
    print(f"{'op':<12}{'setting':<14}{'shape':<12}{'ours us':>12}{'torch us':>12}  ratio")
    for op in (*SMALL_OPS, "generate"):
        for setting, shape, ours, theirs, ratio in rows_of(op, arguments):
            good = passes(setting, ratio)
            failed |= not good
            shown = f"{ratio[0]:.2f}x ours, {ratio[1]:.2f}x torch" if isinstance(ratio, tuple) else f"{ratio:.2f}x"
            size = "x".join(map(str, shape))
            print(f"{op:<12}{setting:<14}{size:<12}{ours:>12.2f}{theirs:>12.2f}  {shown}{'' if good else '  below the bar'}")
            first, second = ratio if isinstance(ratio, tuple) else (ratio, "")
            rows.append([op, setting, size, f"{ours:.2f}", f"{theirs:.2f}", f"{first:.3f}", second and f"{second:.3f}"])
    file = ROOT / "bench" / "results" / f"{arguments.machine}-python-threads.csv"
    is_new = not file.exists()
    with open(file, "a", newline="") as out:
        table = csv.writer(out, lineterminator="\n")
        if is_new:
            table.writerow("date commit machine threads op setting shape ours_us torch_us ratio torch_ratio".split())
        for row in rows:
            table.writerow([datetime.date.today(), commit, arguments.machine, deuteron.get_num_threads(), *row])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

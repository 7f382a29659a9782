#!/usr/bin/env python3
"""Attention and its gradient in bf16 against torch's flash and cuDNN kernels, in one run on a GPU, all as CUDA graphs.

    python3 bench/peers_attention.py [--binary PATH] [--commit HASH] [--rounds N]

Ours is `deuteron bench attention --json`, with `--backward` for the gradient, which computes scores, their sums and the result again.
Theirs are the kernels that scaled_dot_product_attention calls: forward with the sums that training keeps, backward from these and the
result. All masks are causal. Both sides go through several copies of their inputs, so that none is in the cache from the call before.
They run in turn, `rounds` times; each row has the medians.

Rows go to h200-attention-peers.csv in the folder named by OUT (default ./out).
"""

import argparse
import csv
import datetime
import json
import os
import statistics
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
BINARIES = [ROOT / "bundle/deuteron", ROOT / "deuteron", ROOT / "target/release/deuteron"]
# Sequences, heads, positions, features of a head. The first five are the lines of the project's table of peers.
LINES = [
    (8, 12, 1024, 64), (1, 12, 1024, 64), (32, 12, 1024, 64), (4, 12, 4096, 64), (4, 16, 4096, 128),
    (8, 16, 1024, 128), (1, 16, 2048, 128), (8, 12, 512, 64), (2, 25, 2000, 64), (1, 12, 16384, 64),
]
# Inputs of this many bytes together do not stay in the cache.
ROTATED = 200e6
aten = torch.ops.aten


def flash(q, k, v, slope):
    o, sums, cum_q, cum_k, max_q, max_k, state, unused, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
    return (lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False),
            lambda: aten._scaled_dot_product_flash_attention_backward(
                slope, q, k, v, o, sums, cum_q, cum_k, max_q, max_k, 0.0, True, state, unused))


def cudnn(q, k, v, slope):
    o, sums, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False)
    return (lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False),
            lambda: aten._scaled_dot_product_cudnn_attention_backward(
                slope, q, k, v, o, sums, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True))


def recorded(calls):
    """A graph of the calls, one after the other."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replayed(graph, calls):
    """Microseconds of one of the calls of a graph."""
    repeats = max(1, 20 // calls)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats / calls * 1e3


def theirs(line, rounds):
    """{(peer, direction): microseconds}."""
    batch, heads, positions, width = line
    sets = min(64, max(1, round(ROTATED / (batch * heads * positions * width * 8))))
    inputs = [[torch.randn(batch, heads, positions, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)] for _ in range(sets)]
    # What the calls read lives as long as their graphs.
    pairs = {name: [make(*tensors) for tensors in inputs] for name, make in [("flash", flash), ("cudnn", cudnn)]}
    graphs = {(name, direction): recorded([pair[at] for pair in of_peer])
              for name, of_peer in pairs.items() for at, direction in enumerate(["forward", "backward"])}
    times = {key: [] for key in graphs}
    for _ in range(5 * rounds):
        for key, graph in graphs.items():
            times[key].append(replayed(graph, sets))
    return {key: statistics.median(values) for key, values in times.items()}


def ours(binary, line, direction):
    batch, heads, positions, width = line
    words = [binary, "bench", "attention", "--rows", str(batch * positions), "--cols", str(heads * width), "--seq", str(positions),
             "--head", str(width), "--dtype", "bf16", "--device", "cuda", "--json"]
    words += ["--backward"] if direction == "backward" else []
    row, = json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return row["fused_graph_us"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=next((path for path in BINARIES if path.exists()), None))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    folder = Path(os.environ.get("OUT", "out"))
    folder.mkdir(exist_ok=True)
    device = torch.cuda.get_device_name()
    print(f"{'causal, bf16, microseconds':<34}{'ours':>9}{'flash':>9}{'cuDNN':>9}  flash / ours, cuDNN / ours")
    with open(folder / "h200-attention-peers.csv", "w") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow("direction batch heads positions width us flash_us cudnn_us device torch commit date".split())
        for line in LINES:
            peers = theirs(line, arguments.rounds)
            torch.cuda.empty_cache()
            for direction in ["forward", "backward"]:
                us = statistics.median(ours(arguments.binary, line, direction) for _ in range(arguments.rounds))
                of_peers = [peers[name, direction] for name in ("flash", "cudnn")]
                numbers = [round(value, 1) for value in [us, *of_peers]]
                table.writerow([direction, *line, *numbers, device, torch.__version__, arguments.commit, datetime.date.today()])
                file.flush()
                name = "{} B{} H{} S{} D{}".format(direction, *line)
                print(f"{name:<34}{us:9.1f}{of_peers[0]:9.1f}{of_peers[1]:9.1f}  {of_peers[0] / us:.2f} {of_peers[1] / us:.2f}", flush=True)


if __name__ == "__main__":
    main()

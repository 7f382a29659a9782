#!/usr/bin/env python3
"""Attention and its gradient in bf16 against torch's flash and cuDNN kernels, in one run on a GPU, all as CUDA graphs.

    python3 bench/peers_attention.py [--binary PATH] [--commit HASH] [--rounds N]

Ours is `deuteron bench attention --json`, with `--backward` for the gradient, which computes scores, their sums and the result again.
Theirs are the kernels that scaled_dot_product_attention calls: forward with the sums that training keeps, backward from these and the
result. All masks are causal. Both sides go through several copies of their inputs, so that none is in the cache from the call before.
They run in turn, `rounds` times; each row has the medians.

Rows go to h200-attention-peers.csv in the folder named by OUT (default ./out).
"""

import statistics

import torch

import measuring

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


def theirs(line, rounds):
    """{(peer, direction): microseconds}."""
    batch, heads, positions, width = line
    sets = min(64, max(1, round(ROTATED / (batch * heads * positions * width * 8))))
    inputs = [[torch.randn(batch, heads, positions, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)] for _ in range(sets)]
    # What the calls read lives as long as their graphs.
    pairs = {name: [make(*tensors) for tensors in inputs] for name, make in [("flash", flash), ("cudnn", cudnn)]}
    graphs = {(name, direction): measuring.Recorded([pair[at] for pair in of_peer])
              for name, of_peer in pairs.items() for at, direction in enumerate(["forward", "backward"])}
    times = {key: [] for key in graphs}
    for _ in range(5 * rounds):
        for key, graph in graphs.items():
            times[key].append(graph.microseconds())
    return {key: statistics.median(values) for key, values in times.items()}


def ours(binary, line, direction):
    batch, heads, positions, width = line
    words = ["--rows", str(batch * positions), "--cols", str(heads * width), "--seq", str(positions), "--head", str(width),
             "--dtype", "bf16", "--device", "cuda", *["--backward"] * (direction == "backward")]
    row, = measuring.ours(binary, "bench", "attention", *words)
    return row["fused_graph_us"]


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    print(f"{'causal, bf16, microseconds':<34}{'ours':>9}{'flash':>9}{'cuDNN':>9}  flash / ours, cuDNN / ours")
    columns = "direction batch heads positions width us flash_us cudnn_us".split()
    table = measuring.Table("h200-attention-peers.csv", columns, device=torch.cuda.get_device_name(), torch=torch.__version__,
                            commit=arguments.commit)
    for line in LINES:
        peers = theirs(line, arguments.rounds)
        torch.cuda.empty_cache()
        for direction in ["forward", "backward"]:
            us = statistics.median(ours(arguments.binary, line, direction) for _ in range(arguments.rounds))
            of_peers = [peers[name, direction] for name in ("flash", "cudnn")]
            table.add([direction, *line, *(round(value, 1) for value in [us, *of_peers])])
            name = "{} B{} H{} S{} D{}".format(direction, *line)
            print(f"{name:<34}{us:9.1f}{of_peers[0]:9.1f}{of_peers[1]:9.1f}  {of_peers[0] / us:.2f} {of_peers[1] / us:.2f}", flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Attention, its residual and its norm, with and without an output projection, in bf16: ours in many launches and in one, beside
torch eager and torch.compile, in one run on a GPU, all as CUDA graphs; then the bytes that each plan of ours moves, by `ncu`.

    python3 bench/peers_launches.py [--binary PATH] [--commit HASH] [--rounds N]

Ours is `deuteron bench OPS --ladder --json`: the same op cut into fewer and fewer launches, which the driver counts in the recording.
Theirs is scaled_dot_product_attention over views of the fused projection [batch, positions, 3 * columns], F.linear where the op
projects, the residual and F.layer_norm; eager with the flash and with the cuDNN kernel, compiled with the faster of both. Each
result is held against float64 before it is timed. All masks are causal. Both sides go through several copies of their inputs, so that
none is in the cache from the call before. They run in turn, `rounds` times; each row has the medians.

Bytes, and times without what is between launches, are those of `deuteron bench OP --once --plan PLAN`, summed over all launches of the
plan: once from cold caches for every launch, and once with caches as the launch before left them, so that what the cache passes on is
not counted. What a launch leaves in the cache and no later one displaces is not counted as written.

Rows go to h200-launches-peers.csv and h200-launches-ncu.csv in the folder named by OUT (default ./out).
Exit code 0: all was measured; 1: some of it is wrong or missing, and named; 2: could not be measured.
"""

import functools
import itertools
import math
import statistics
import subprocess
import sys
import types

import measuring
import ncu_table
from measuring import Failure
from ncu_table import READ, TIME, WRITTEN

OPS = ["attention_add_norm", "attention_block"]
# Sequences, heads, positions, features of a head.
LINES = [(1, 12, 1024, 64), (8, 12, 1024, 64), (32, 12, 1024, 64), (4, 12, 4096, 64)]
COUNTED = [(8, 12, 1024, 64), (32, 12, 1024, 64)]
PLANS = ["eager", "unfused", "fused"]
# Whether `ncu` empties caches before each launch, and what that is called here.
CACHES = {"all": "cold", "none": "kept"}
SHAPE = "batch heads positions width".split()
EPSILON = 1e-5
# Copies of operands and results together, over the L2 cache; the most of them; calls of a sample; samples of a round.
ROTATE, MOST_SETS, CALLS, SAMPLES = 4, 64, 20, 9


def size_words(line):
    batch, heads, positions, width = line
    return ["--rows", str(batch * positions), "--cols", str(heads * width), "--seq", str(positions), "--head", str(width),
            "--dtype", "bf16", "--device", "cuda"]


def ours(binary, line):
    """The rungs of both ops, from many launches to one."""
    # 1 is a rung that is wrong: it says so itself.
    return measuring.ours(binary, "bench", *OPS, "--ladder", *size_words(line), good=(0, 1))


def function_of(op, heads):
    """What a user of torch writes. Returns the sum and its norm, as ours does."""
    from torch.nn import functional

    def whole(qkv, r, w, b, *projection):
        batch, positions, columns = r.shape
        q, k, v = [part.view(batch, positions, heads, -1).transpose(1, 2) for part in qkv.split(columns, -1)]
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        a = a.transpose(1, 2).reshape(batch, positions, columns)
        s = r + (functional.linear(a, *projection) if projection else a)
        return s, functional.layer_norm(s, (columns,), w, b, EPSILON)

    # The compiler keeps its results by code object. One of its own keeps the guards of others out of the calls.
    return types.FunctionType(whole.__code__.replace(), whole.__globals__, op, closure=whole.__closure__)


def operands(torch, op, line):
    batch, heads, positions, width = line
    columns = heads * width

    def normal(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    tensors = [normal(batch, positions, 3 * columns), normal(batch, positions, columns), normal(columns) + 1, normal(columns)]
    return tensors + [normal(columns, columns) / math.sqrt(columns), normal(columns)] * (op == "attention_block")


def check(torch, heads, tensors, results):
    """Compares the first sequence with formulas in float64. Raises where a difference is more than rounding can make."""
    qkv, r, w, b, *projection = (tensor.double() for tensor in [tensors[0][0], tensors[1][0], *tensors[2:]])
    positions, columns = r.shape
    q, k, v = (part.view(positions, heads, -1).transpose(0, 1) for part in qkv.split(columns, -1))
    scores = q @ k.transpose(1, 2) / math.sqrt(columns / heads)
    unseen = torch.ones(positions, positions, device="cuda", dtype=torch.bool).triu(1)
    a = (scores.masked_fill(unseen, -math.inf).softmax(-1) @ v).transpose(0, 1).reshape(positions, columns)
    if projection:
        a = a @ projection[0].T + projection[1]
    s = r + a
    centred = s - s.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + EPSILON).sqrt() * w + b
    # Values pass through a few roundings to the storage type.
    bound = 8 * torch.finfo(torch.bfloat16).eps
    for name, mine, exact in [("sum", results[0][0], s), ("norm", results[1][0], y)]:
        off = mine.double() - exact
        largest, typical = off.abs().max() / exact.abs().max(), off.square().mean().sqrt() / exact.square().mean().sqrt()
        if not (largest <= bound and typical <= bound / 2):  # NaN fails too
            raise ValueError(f"the {name} is off by {largest:.2e} of its largest value (bound {bound:.2e}), "
                             f"typically {typical:.2e} (bound {bound / 2:.2e})")


def theirs(torch, op, line, rounds):
    """{contender: microseconds}, and why some are left out."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    heads = line[1]
    first = operands(torch, op, line)
    bytes_of_set = sum(2 * tensor.numel() for tensor in first) + 4 * first[1].numel()
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    count = min(max(1, math.ceil(ROTATE * cache / bytes_of_set)), MOST_SETS)
    sets = [first, *(operands(torch, op, line) for _ in range(count - 1))]
    ready, refused = {}, {}

    def prepare(name, function, backend):
        try:
            with sdpa_kernel(backends[backend]):
                check(torch, heads, first, function(*first))
                ready[name] = measuring.Recorded([functools.partial(function, *tensors) for tensors in sets])
        except Exception as error:  # a peer that fails is left out, and the run says so
            refused[name] = f"{type(error).__name__}: {str(error)[:300]}"

    def sampled(names):
        times = {name: [] for name in names}
        for _ in range(SAMPLES * rounds):
            for name in names:
                times[name].append(ready[name].microseconds(CALLS))
        return {name: statistics.median(values) for name, values in times.items()}

    with torch.inference_mode():
        for backend in backends:
            prepare(f"torch eager {backend}", function_of(op, heads), backend)
        fastest = min(sampled(ready).items(), key=lambda item: item[1], default=("torch eager flash", 0))[0]
        backend = fastest.rsplit(" ", 1)[1]
        compiled = torch.compile(function_of(op, heads), fullgraph=True, dynamic=False)
        prepare(f"torch.compile {backend}", compiled, backend)
        return sampled(ready), refused


def time_all(torch, binary, rounds, table):
    """Writes a row a contender. Gives the lines of the table to be shown, and what is wrong or missing."""
    shown, wrong = [], []
    for line in LINES:
        shape = dict(zip(SHAPE, line))
        peers = {}
        for op in OPS:
            peers[op], refused = theirs(torch, op, line, rounds)
            torch.cuda.empty_cache()
            wrong += [f"{op} {line}: {name} is left out: {why}" for name, why in refused.items()]
        rungs = [ours(binary, line) for _ in range(rounds)]
        for op in OPS:
            own = [[rung for rung in run if rung["op"] == op] for run in rungs]
            times = {}
            for of_rung in zip(*own):
                rung, us = of_rung[0], statistics.median(rung["us"] for rung in of_rung)
                times[rung["rung"]] = us
                table.add({"op": op, **shape, "contender": f"ours {rung['rung']}", "launches": rung["launches"],
                           "other_nodes": rung["other_nodes"], "us": round(us, 1)})
                if not rung["verified"]:
                    wrong.append(f"{op} {line}: {rung['rung']}: error {rung['worst_ratio']:.2f} of its bound")
                if rung["rung"] == "one launch" and (rung["launches"], rung["other_nodes"]) != (1, 0):
                    wrong.append(f"{op} {line}: {rung['rung']}: the driver counts {rung['launches']} launches and "
                                 f"{rung['other_nodes']} other nodes")
            if "one launch" not in times:
                wrong.append(f"{op} {line}: no one launch")
            for name, us in peers[op].items():
                table.add({"op": op, **shape, "contender": name, "us": round(us, 1)})
            last, best = list(times.values())[-1], min(peers[op].values(), default=math.nan)
            words = ", ".join(f"{name} {us:.1f}" for name, us in [*times.items(), *peers[op].items()])
            shown.append("{} B{} H{} S{} D{}: ".format(op, *line) + f"{words}; best of torch / last of ours {best / last:.2f}")
            print(shown[-1], flush=True)
    return shown, wrong


def count_all(binary, table):
    """Writes a row a plan with the bytes that `ncu` counts. Gives the lines of the table to be shown."""
    shown = []
    for op, line in itertools.product(OPS, COUNTED):
        for plan in PLANS:
            words = [binary, "bench", op, "--once", "--plan", plan, *size_words(line), "--json"]
            moved = {}
            for control, caches in CACHES.items():
                (row,), launches = ncu_table.profile(words, [TIME, READ, WRITTEN], control)
                kernels = row["plans"][0]["kernels"]
                us, read, written = (sum(launch[metric] for launch in launches) for metric in (TIME, READ, WRITTEN))
                moved[caches] = (read + written, us)
                predicted = {f"predicted_{what}": sum(kernel[f"bytes_{what}"] for kernel in kernels) for what in ("read", "written")}
                table.add({"op": op, **dict(zip(SHAPE, line)), "plan": plan, "caches": caches, "kernels": len(kernels),
                           "launches": len(launches), "us": round(us, 1), "read_bytes": round(read, 1),
                           "written_bytes": round(written, 1), **predicted})
            megabytes = ", ".join(f"{value / 1e6:.1f} MB and {us:.1f} us with caches {caches}" for caches, (value, us) in moved.items())
            compulsory = sum(predicted.values()) / 1e6
            shown.append(f"{op} B{line[0]} {plan}: {len(launches)} launches, {megabytes}; compulsory {compulsory:.1f} MB")
            print(shown[-1], flush=True)
    return shown


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"expected --rounds from 1; got {arguments.rounds}")
    import torch

    if not torch.cuda.is_available():
        raise Failure("torch finds no GPU")
    columns = ["op", *SHAPE, "contender", "launches", "other_nodes", "us"]
    table = measuring.Table("h200-launches-peers.csv", columns, device=torch.cuda.get_device_name(), torch=torch.__version__,
                            commit=arguments.commit)
    timed, wrong = time_all(torch, arguments.binary, arguments.rounds, table)
    columns = ["op", *SHAPE, *"plan caches kernels launches us read_bytes written_bytes predicted_read predicted_written".split()]
    table = measuring.Table("h200-launches-ncu.csv", columns, **measuring.gpu(), commit=arguments.commit)
    counted = count_all(arguments.binary, table)
    print("\n".join(["", "causal, bf16, microseconds", *timed, "bytes and kernel times by ncu, S1024", *counted,
                     *(["wrong or missing:", *wrong] if wrong else ["nothing wrong or missing"])]))
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failure, ImportError, OSError, subprocess.CalledProcessError, KeyError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)

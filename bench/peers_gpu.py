#!/usr/bin/env python3
"""Times our fused CUDA kernels beside torch eager, torch.compile and, where it is installed, Liger: one GPU, one run.

    python3 bench/peers_gpu.py [--quick] [--lines SUBSTRING] [--commit HASH] [--seconds N]

Compiling is what costs time, so it is shared out: several processes each own some lines, compile them at once and check
every result against float64; then they wait on a pipe, and one contender runs at a time. Sizes are measured one after
the other, in rounds: a round times each peer of each line and runs `deuteron bench` once for all its ops. The number of
a contender is the median over rounds.

Each contender is timed twice. `graph`: some calls recorded as one CUDA graph, time of a replay by events. Plain: calls
one after the other without waiting, wall time from the first call until the device is done, so the cost of launching
counts where it is what limits. Calls take turns over sets of operands and results that together are at least four times
the L2 cache, or 64 sets where they are tiny. Ours of `forward+backward` is the sum of the two, each measured alone.

Rows go to h200.csv in the folder named by OUT (default ./out). Needs torch with CUDA and the `deuteron` binary, from
`cargo xtask bundle` or `cargo build --release`. `--dry-run` uses tiny sizes on the CPU: its times mean nothing.

Exit code 0: ours is the fastest on every line; 1: some peer is faster on some line; 2: something was not measured.
"""

import collections
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from subprocess import PIPE

import measuring
from measuring import Failure

OURS = "deuteron"

Line = collections.namedtuple("Line", "op rows cols dtype backward")

OPERANDS = {
    "norm_act": "x w b", "layer_norm": "x w b", "rms_norm": "x w", "add_norm": "x r w b", "norm_quantize": "x w b",
    "bias_dropout_add": "x b r", "swiglu": "x g", "softmax": "x", "bias_act": "x b", "dropout_add_norm": "x bias r w b",
    "embed_norm": "tokens wte wpe w b", "add_act": "x r",
}
ROW_OPS = [op for op in OPERANDS if op != "add_act"]
WITH_BACKWARD = ["norm_act", "layer_norm", "rms_norm", "add_norm", "swiglu", "softmax", "bias_dropout_add"]

NAMED = [(65536, 768), (16384, 4096), (8192, 768)]
UNNAMED = [(262144, 64), (32768, 1500), (4096, 1000), (2048, 8192), (1024, 32768), (1, 4096)]


def all_lines():
    """What matters most comes first: a run that is short of time leaves out the end."""
    for rows, cols in NAMED:
        yield from (Line(op, rows, cols, "bf16", False) for op in ROW_OPS)
        yield from (Line(op, rows, cols, "bf16", True) for op in WITH_BACKWARD[:7 if rows > 8192 else 1])
    for elements in (10**8, 10**7, 10**6):
        yield Line("add_act", math.ceil(elements / 1024), 1024, "f32", False)
    for rows, cols in UNNAMED:
        yield from (Line(op, rows, cols, "bf16", False) for op in ("norm_act", "add_norm", "softmax", "swiglu"))
    yield Line("softmax", 100, 50257, "bf16", False)
    yield Line("norm_act", 2048, 8192, "bf16", True)


def is_quick(line):
    """About a third of the lines: every op once, the sizes with bars, some sizes without."""
    few = ("norm_act", "add_norm", "softmax")
    return (line.rows, line.cols) == (65536, 768) and (not line.backward or line.op == "norm_act") or (
        line.op in few and not line.backward and (line.rows, line.cols) in (*NAMED, (32768, 1500), (1024, 32768))
    ) or line.op == "add_act"


def name_of(line):
    return f"{line.op} {line.rows}x{line.cols} {line.dtype}{' forward+backward' if line.backward else ''}"


class Worker:
    def __init__(self, lines, device, lock):
        self.lines = lines
        # One process compiles one kernel at a time: there are as many processes as there is work for.
        variables = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, Path(__file__).with_name("peers_gpu_torch.py"), device, lock]
        self.process = subprocess.Popen(command, env=variables, text=True, stdin=PIPE, stdout=PIPE)

    def send(self, do, lines=(), **request):
        with contextlib.suppress(BrokenPipeError):  # then no answer comes either
            print(json.dumps({"do": do, "lines": lines, **request}), file=self.process.stdin, flush=True)

    def answer(self):
        """None from a process that has ended."""
        reply = self.process.stdout.readline()
        return json.loads(reply) if reply else None


ENDED = "its process ended early"


def ask_all(workers, do, lines):
    """Asks every owner at once; yields (line, answer)."""
    asked = [(worker, [line for line in worker.lines if line in lines]) for worker in workers]
    asked = [(worker, own) for worker, own in asked if own]
    for worker, own in asked:
        worker.send(do, own)
    for worker, own in asked:
        yield from zip(own, worker.answer() or [{"torch": ENDED}] * len(own))


def run_ours(binary, device, lines, *more):
    """Our rows by direction and op, from one or two calls of our binary: backward only where a line asks for it."""
    rows, cols, dtype = lines[0][1:4]
    size = ["--rows", str(rows), "--cols", str(cols), "--dtype", dtype, "--device", device]
    found = {}
    for direction in ("forward", "backward"):
        ops = sorted({line.op for line in lines if line.backward or direction == "forward"})
        if not ops:
            continue
        rows_of_ops = measuring.ours(binary, "bench", *ops, *size, *["--backward"] * (direction == "backward"), *more)
        found[direction] = {row["op"]: row for row in rows_of_ops}
    return found


def try_ours(binary, device, groups, failures):
    """Compiles our kernels into the cache on disk, and finds the lines that our binary cannot do."""
    for group in groups:
        try:
            run_ours(binary, device, group, "--once")
        except Failure:
            for line in group:
                try:
                    run_ours(binary, device, [line], "--once")
                except Failure as failure:
                    failures[line, OURS] = str(failure)


def record_of(line, found, device):
    parts = [found["forward"][line.op], *([found["backward"][line.op]] if line.backward else [])]
    summed = ["fused_us", "fused_graph_us", "unfused_us", "unfused_graph_us", "predicted_us", "bytes_fused",
              "bytes_unfused"]
    if device == "cpu":  # a dry run: no graphs there
        parts = [{"fused_graph_us": part["fused_us"], "unfused_graph_us": part["unfused_us"], "predicted_us": 0.0}
                 | {key: value for key, value in part.items() if value is not None} for part in parts]
    missing = [key for key in (*summed, "copy_gbps") if any(part.get(key) is None for part in parts)]
    if missing:
        raise Failure(f"`deuteron bench {line.op} --json` has no {', '.join(missing)}")
    record = {key: sum(part[key] for part in parts) for key in summed}
    return record | {"copy_gbps": statistics.fmean(part["copy_gbps"] for part in parts)}


def measure(workers, binary, device, lines, rounds, milliseconds):
    """Times of one size: {line: {contender: [plain, graph] a round}}, and our records a round."""
    owners = {line: worker for worker in workers for line in worker.lines if line in lines}
    times = {line: collections.defaultdict(list) for line in lines}
    ours = []
    for turn in range(rounds):
        order = [*lines, None]
        start = turn * len(order) // rounds
        for line in order[start:] + order[:start]:
            if line is None:
                found = run_ours(binary, device, lines)
                ours.append({line: record_of(line, found, device) for line in lines})
                continue
            owners[line].send("time", [line], milliseconds=milliseconds, turn=turn)
            for name, pair in (owners[line].answer() or [{}])[0].items():
                times[line][name].append(pair)
    for line in lines:
        for record in (one[line] for one in ours):
            times[line][OURS].append([record["fused_us"], record["fused_graph_us"]])
            times[line][f"{OURS} unfused"].append([record["unfused_us"], record["unfused_graph_us"]])
    return times, ours


HEADER = ("kernel shape dtype direction variant baseline median_us p20_us p80_us gbps fraction_of_copy "
          "predicted_us").split()


def summarize(line, times, records):
    """Medians of a line, the best peer of each kind of call, and what the table shows."""
    kinds = {"plain": 0, "graph": 1}
    medians = {kind: {name: statistics.median(pair[at] for pair in pairs) for name, pairs in times.items()}
               for kind, at in kinds.items()}
    best = {}
    for kind, values in medians.items():
        peers = {name: value for name, value in values.items() if not name.startswith(OURS)}
        best[kind] = min(peers, key=peers.get) if peers else None
    middle = {key: statistics.median(record[key] for record in records) for key in records[0]}
    return {"line": line, "times": times, "medians": medians, "best": best, **middle}


def csv_rows(summary):
    line = summary["line"]
    for kind, at in (("plain", 0), ("graph", 1)):
        for name, pairs in summary["times"].items():
            values = [pair[at] for pair in pairs]
            median = statistics.median(values)
            fifths = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else [median] * 4
            moved = summary["bytes_unfused" if name.endswith("unfused") else "bytes_fused"]
            gbps = moved / median / 1e3
            predicted = f"{summary['predicted_us']:.3f}" if name == OURS else ""
            yield [line.op, f"{line.rows}x{line.cols}", line.dtype, "forward+backward" if line.backward else "forward",
                   f"{name}{' graph' if at else ''}", summary["best"][kind] or "", f"{median:.3f}", f"{fifths[0]:.3f}",
                   f"{fifths[3]:.3f}", f"{gbps:.1f}", f"{gbps / summary['copy_gbps']:.4f}", predicted]


def describe_machine():
    try:
        return measuring.gpu()
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return {"device": "unknown", "driver": "unknown"}


def table_row(summary, kind):
    medians, best = summary["medians"][kind], summary["best"][kind]
    ours, unfused = medians[OURS], medians[f"{OURS} unfused"]
    peer = f"{medians[best]:10.1f}  {best:<14}{medians[best] / ours:6.2f}x" if best else f"{'none':>10}{'':24}"
    share = unfused / ours / (summary["bytes_unfused"] / summary["bytes_fused"])
    of_copy = summary["bytes_fused"] / ours / 1e3 / summary["copy_gbps"]
    return f"{name_of(summary['line']):<50}{ours:10.1f}{peer}{of_copy:9.0%}{share:9.0%}{summary['predicted_us']:10.1f}"


TABLE = (f"{'microseconds':<50}{'ours':>10}{'best peer':>10}  {'':<14}{'ratio':>7}{'of copy':>9}{'of bytes':>9}"
         f"{'predicted':>10}")


def report(summaries, refused, left_out):
    """Prints what was found and says whether ours is the fastest everywhere."""
    slower = [f"{name_of(summary['line'])} ({kind})" for summary in summaries for kind in ("graph", "plain")
              if is_slower(summary, kind)]
    launches = [summary for summary in summaries if (summary["line"].rows, summary["line"].cols) == (8192, 768)]
    if launches:
        print(f"\ncalls without a graph, host included; the bar from Python is a ratio of 2\n{TABLE}")
        print("\n".join(table_row(summary, "plain") for summary in launches))
    for (line, name), reason in refused.items():
        print(f"not timed: {name}, {name_of(line)}: {reason}")
    if left_out:
        print(f"not measured: {', '.join(map(name_of, left_out))}")
    print(f"slower than the best peer: {', '.join(slower) or 'nowhere'}")
    unmeasured = refused or left_out or any(summary["best"]["graph"] is None for summary in summaries)
    return 1 if slower else 2 if unmeasured else 0


def is_slower(summary, kind):
    """Graphs count on every line; plain calls where launching is what they cost."""
    line, best = summary["line"], summary["best"][kind]
    counts = kind == "graph" or (line.rows, line.cols) == (8192, 768)
    return bool(counts and best and summary["medians"][kind][OURS] > summary["medians"][kind][best])


def drive(arguments, lines):
    binary = arguments.binary
    device = "cpu" if arguments.dry_run else "cuda"
    rounds, milliseconds = (3, 10) if arguments.quick else (3, 20)
    start = time.monotonic()
    lock = tempfile.NamedTemporaryFile(prefix="gpu-turn-")
    count = min(len(lines), max(1, (os.cpu_count() or 2) - 2), 14)
    workers = [Worker(lines[place::count], device, lock.name) for place in range(count)]
    sizes = {}
    for line in lines:
        sizes.setdefault(line[1:4], []).append(line)
    refused = {}
    ours = threading.Thread(target=try_ours, args=(binary, device, sizes.values(), refused))  # while the peers compile
    ours.start()
    answers = list(ask_all(workers, "compile", lines))
    ours.join()
    refuse(refused, answers)
    if all(reasons.get("torch") == ENDED for _, reasons in answers):
        print("no peer could be started", file=sys.stderr)
        return 2
    print(f"{len(lines)} lines compiled and checked by {count} processes in {time.monotonic() - start:.0f} s")
    print(f"in CUDA graphs\n{TABLE}", flush=True)
    summaries, left_out = [], []
    table = measuring.Table("h200.csv", HEADER, **describe_machine(), commit=arguments.commit)
    for group in sizes.values():
        group = [line for line in group if (line, OURS) not in refused]
        if time.monotonic() - start > arguments.seconds:
            left_out += group
            continue
        refuse(refused, ask_all(workers, "prepare", group))
        try:
            times, records = measure(workers, binary, device, group, rounds, milliseconds) if group else ({}, [])
        except Failure as failure:
            refused |= {(line, OURS): str(failure) for line in group}
            group = []
        for worker in workers:
            worker.send("release")
        for worker in workers:
            worker.answer()
        for line in group:
            summary = summarize(line, times[line], [one[line] for one in records])
            summaries.append(summary)
            for row in csv_rows(summary):
                table.add(row)
            print(table_row(summary, "graph"), flush=True)
    for worker in workers:
        with contextlib.suppress(BrokenPipeError):
            worker.process.stdin.close()
    print(f"{time.monotonic() - start:.0f} s in all; rows are in {table.path}")
    return report(summaries, refused, left_out)


def refuse(refused, answers):
    for line, reasons in answers:
        refused.update({(line, name): reason for name, reason in reasons.items()})


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer lines and shorter rounds: about two minutes")
    parser.add_argument("--lines", default="", metavar="SUBSTRING", help="only lines whose name contains this")
    parser.add_argument("--seconds", type=float, default=270, help="start no further size after this [default: 270]")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, to see that the script works")
    arguments = parser.parse_args()
    lines = [line for line in all_lines() if arguments.lines in name_of(line)]
    if arguments.quick:
        lines = [line for line in lines if is_quick(line)]
    if arguments.dry_run:
        lines = list(dict.fromkeys(line._replace(rows=min(line.rows, 48), cols=min(line.cols, 80)) for line in lines))
    if not lines:
        parser.error(f"no such line; there are: {', '.join(map(name_of, all_lines()))}")
    return drive(arguments, lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)

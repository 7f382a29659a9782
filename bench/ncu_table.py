#!/usr/bin/env python3
"""Measures every kernel of the catalogue with `ncu`, fused and unfused, beside what the planner predicted for it.

    python3 bench/ncu_table.py [--ops OP ...] [--commit HASH]

`deuteron bench OPS --once` runs the unfused and the fused plan of each op once, and says in its JSON what it launched,
in order, and what was predicted of it. `ncu` counts what these launches did, from cold caches and at the clocks the GPU
happens to have. A kernel that takes several launches gets their sum. What limits a kernel shows in the last columns: the
share of memory's peak, the share of cycles that issue an instruction, and what most warps wait for. Gradients are
measured at the first size.

Reads are compared for every kernel that reads over 1 MiB. Writes are compared only where a kernel writes over 1 GiB:
below that a good part is still in the L2 cache when the kernel ends, and is not counted.

Rows go to h200-ncu.csv in the folder named by OUT (default ./out).
Exit code 0: the median deviations keep their bars; 1: some do not; 2: could not be measured.
"""

import csv
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE

import measuring
from measuring import Failure

OPS = ("act mul_add_act add_act bias_act act_dropout act_dropout_add bias_dropout_add swiglu geglu layer_norm rms_norm "
       "norm_act norm_bias_act add_norm dropout_add_norm norm_quantize softmax embed_norm").split()
SIZES = [(65536, 768, "bf16"), (16384, 4096, "bf16")]
# Each output of this size has 2 GiB, forty times the L2 cache, and few ops are enough to judge writes by.
LARGE = (704512, 768, "f32")
LARGE_OPS = ["norm_act", "add_norm", "add_act"]
NO_GRADIENT = ["norm_quantize"]

TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
HITS, OCCUPANCY = "lts__t_sector_hit_rate.pct", "sm__warps_active.avg.pct_of_peak_sustained_active"
REGISTERS = "launch__registers_per_thread"
MEMORY, ISSUE = "dram__throughput.avg.pct_of_peak_sustained_elapsed", "sm__inst_issued.avg.pct_of_peak_sustained_active"
# Warps that wait for each instruction issued, by what they wait for.
STALLS = {f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio": words for stall, words in {
    "long_scoreboard": "memory's answer", "barrier": "a barrier", "math_pipe_throttle": "an arithmetic unit",
    "short_scoreboard": "shared memory or special functions", "wait": "the instruction before", "not_selected": "other warps",
    "lg_throttle": "the queue to memory", "mio_throttle": "the queue to shared memory",
}.items()}
METRICS = [TIME, READ, WRITTEN, HITS, OCCUPANCY, REGISTERS, MEMORY, ISSUE, *STALLS]
# Times become microseconds, sizes bytes. Some versions of ncu scale and abbreviate units, some do not.
UNITS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1, "usecond": 1, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
         "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "%": 1, "register/thread": 1, "inst": 1, "ratio": 1, "warp": 1, "": 1}

LEAST_READ, LEAST_WRITTEN = 1 << 20, 1 << 30
BARS = {"reads": 0.05, "writes": 0.05, "time": 0.15}


def parse(text, metrics=METRICS, optional=()):
    """The launches in ncu's CSV, in order: {kernel, metric: value}. Only optional metrics may be missing."""
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if '"Metric Name"' in line), None)
    if start is None:
        raise Failure(f"ncu wrote no table:\n{text.strip()[-1000:]}")
    launches = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        launch = launches.setdefault(int(row["ID"]), {"kernel": row["Kernel Name"]})
        if row["Metric Name"] in metrics and row["Metric Value"] not in ("", "n/a"):
            value, unit = row["Metric Value"].replace(",", ""), row["Metric Unit"]
            if unit not in UNITS:
                raise Failure(f"{row['Metric Name']} has the unit `{unit}`; known are {', '.join(UNITS)}")
            launch[row["Metric Name"]] = float(value) * UNITS[unit]
    required = [metric for metric in metrics if metric not in optional]
    incomplete = [launch for launch in launches.values() if not all(metric in launch for metric in required)]
    if incomplete:
        missing = [metric for metric in required if metric not in incomplete[0]]
        raise Failure(f"ncu did not measure {', '.join(missing)} of {incomplete[0]['kernel']}")
    return [launches[number] for number in sorted(launches)]


def run_once(binary, ops, size, backward):
    """The command that runs both plans of the ops once."""
    rows, cols, dtype = size
    return [binary, "bench", *ops, "--rows", str(rows), "--cols", str(cols), "--dtype", dtype, "--device", "cuda",
            "--once", "--json", *["--backward"] * backward]


def profile(words, metrics=METRICS, caches="all"):
    """Runs our command once under ncu: its rows, and the launches. `caches` are emptied before each launch, or `none` are."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        profiler = ["ncu", "--clock-control", "none", "--cache-control", caches, "--print-units", "base", "--csv",
                    "--log-file", log, "--metrics", ",".join(metrics)]
        done = subprocess.run([*profiler, *words], stdout=PIPE, stderr=PIPE, text=True)
        text = log.read_text() if log.exists() else ""
    if done.returncode:
        command = " ".join(map(str, words[1:]))
        raise Failure(f"`deuteron {command}` under ncu: {(done.stderr + text).strip()[-1000:]}")
    return json.loads(done.stdout[done.stdout.index("["):]), parse(text, metrics)


def function_of(kernel):
    """A name without its arguments: ncu shows both for functions whose names are mangled."""
    return re.split(r"[(<]", kernel.removeprefix("void "))[0].strip()


def match(rows, launches):
    """Pairs each predicted kernel with its launches. Launches of other functions, such as fills, are passed over, and
    so are kernels whose launches a library chooses."""
    at = 0
    for row in rows:
        for plan in row["plans"]:
            for kernel in plan["kernels"]:
                own = []
                for function in kernel["launches"]:
                    while at < len(launches) and function_of(launches[at]["kernel"]) != function:
                        at += 1
                    if at == len(launches):
                        raise Failure(f"{row['op']}, {plan['plan']}: `{function}` is not where it should be among "
                                      + ", ".join(function_of(launch["kernel"]) for launch in launches))
                    own.append(launches[at])
                    at += 1
                if own:
                    yield row, plan["plan"], kernel, own


def record(row, plan, kernel, launches):
    def added(metric):
        return sum(launch[metric] for launch in launches)

    def by_time(metric):
        return sum(launch[metric] * launch[TIME] for launch in launches) / max(added(TIME), 1e-9)

    return {
        "op": row["op"], "direction": row["direction"], "shape": f"{row['rows']}x{row['cols']}", "dtype": row["dtype"],
        "plan": plan, "kernel": kernel["name"], "launches": len(launches), "time_us": added(TIME),
        "predicted_us": kernel["predicted_us"], "read_bytes": added(READ), "predicted_read": kernel["bytes_read"],
        "written_bytes": added(WRITTEN), "predicted_written": kernel["bytes_written"], "l2_hit_percent": by_time(HITS),
        "occupancy_percent": by_time(OCCUPANCY), "registers": max(launch[REGISTERS] for launch in launches),
        "predicted_registers": kernel["predicted_registers"], "memory_percent": by_time(MEMORY),
        "issue_percent": by_time(ISSUE), "waits_for": STALLS[max(STALLS, key=by_time)],
    }


def deviations(records):
    """How far off the predictions are, by what was predicted."""
    def off(measured, predicted, least):
        return [abs(one[predicted] / max(one[measured], 1e-9) - 1) for one in records if one[predicted] > least]

    return {"reads": off("read_bytes", "predicted_read", LEAST_READ),
            "writes": off("written_bytes", "predicted_written", LEAST_WRITTEN),
            "time": off("time_us", "predicted_us", 0)}


def show(records):
    print(f"{'':<40}{'':<9}{'time us':>9}{'(pred)':>9}{'read MB':>9}{'(pred)':>9}{'write MB':>9}{'(pred)':>9}"
          f"{'L2 hit':>8}{'occup.':>8}{'regs':>6}{'(pred)':>7}{'memory':>8}{'issue':>7}  warps wait for")
    for one in records:
        name = f"{one['op']}: {one['kernel']}"
        print(f"{name:<40.39}{one['plan']:<9}{one['time_us']:9.1f}{one['predicted_us']:9.1f}"
              f"{one['read_bytes'] / 1e6:9.1f}{one['predicted_read'] / 1e6:9.1f}{one['written_bytes'] / 1e6:9.1f}"
              f"{one['predicted_written'] / 1e6:9.1f}{one['l2_hit_percent']:7.0f}%{one['occupancy_percent']:7.0f}%"
              f"{one['registers']:6.0f}{one['predicted_registers']:7.0f}{one['memory_percent']:7.0f}%"
              f"{one['issue_percent']:6.0f}%  {one['waits_for']}")


def judge(records):
    missed = False
    for what, values in deviations(records).items():
        if not values:
            print(f"{what}: nothing to compare")
            continue
        median, bar = statistics.median(values), BARS[what]
        missed |= median > bar
        print(f"{what}: off by {median:.1%}, median of {len(values)} kernels; at most {max(values):.1%}; bar {bar:.0%}")
    return missed


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--ops", nargs="+", default=OPS, metavar="OP", help="[default: all row ops]")
    arguments = parser.parse_args()
    sizes = [(size, arguments.ops, False) for size in SIZES]
    sizes.append((LARGE, [op for op in LARGE_OPS if op in arguments.ops], False))
    sizes.append((SIZES[0], [op for op in arguments.ops if op not in NO_GRADIENT], True))
    records, table = [], None
    for size, ops, backward in sizes:
        if not ops:
            continue
        found = profile(run_once(arguments.binary, ops, size, backward))
        new = [record(*matched) for matched in match(*found)]
        print("{}x{} {}".format(*size) + ", gradients" * backward)
        show(new)
        records += new
        table = table or measuring.Table("h200-ncu.csv", new[0], **measuring.gpu(), commit=arguments.commit)
        for one in new:
            table.add({key: f"{cell:.3f}" if isinstance(cell, float) else cell for key, cell in one.items()})
    return 1 if judge(records) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failure, OSError, subprocess.CalledProcessError, KeyError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)

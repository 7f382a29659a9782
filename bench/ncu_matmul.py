#!/usr/bin/env python3
"""What limits our matmul kernels, by `ncu`: those whose bars are missed, each beside the library where it computes the same.

    python3 bench/ncu_matmul.py [--cases NAME ...] [--binary PATH] [--commit HASH]

Matmuls are those of `deuteron bench matmul --once --fastest`: the library, our variant that is predicted to be the fastest and the one that plans
choose. Norm + linear and the loss are graphs in text form, of which `deuteron profile --once fused` runs the fused plan once; the
feed-forward layer is the op. Each launch starts from cold caches, at the clocks that the GPU happens to have. Launches of one function in
one plan are one row: their times and bytes are added, and shares are weighted by time.

Shares are of the peak: of DRAM, of the L2, of the tensor pipe, of the cycles that issue an instruction, of the warps that a multiprocessor holds. The
last columns name what most warps wait for, with the number of warps that wait for it per instruction issued. Metrics that this version
of `ncu` does not know are left out.

Rows go to h200-ncu-matmul.csv in the folder named by OUT (default ./out).
Exit code 0: every case has rows; 1: some have none; 2: nothing could be measured.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import DEVNULL, PIPE

import measuring
from measuring import Failure
from ncu_table import HITS, ISSUE, MEMORY, OCCUPANCY, READ, REGISTERS, TIME, WRITTEN, function_of, parse

L2, TENSOR = "lts__throughput.avg.pct_of_peak_sustained_elapsed", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
# Warps that wait per instruction issued, by what they wait for.
STALLS = {f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio": words for stall, words in {
    "long_scoreboard": "memory", "barrier": "a barrier", "math_pipe_throttle": "an arithmetic unit", "wait": "the instruction before",
    "short_scoreboard": "shared memory or special functions", "not_selected": "other warps", "gmma": "wgmma", "membar": "a fence",
    "lg_throttle": "the queue to memory", "mio_throttle": "the queue to shared memory", "sleeping": "a pause", "no_instruction": "instructions",
    "branch_resolve": "a branch", "dispatch_stall": "the dispatcher", "drain": "stores at the end",
}.items()}
NEEDED = [TIME, READ, WRITTEN, REGISTERS]
METRICS = [*NEEDED, MEMORY, HITS, L2, TENSOR, ISSUE, OCCUPANCY, *STALLS]
COLUMNS = ("case rows inner columns dtype variant kernel chosen launches time_us dram_bytes dram_percent l2_hit_percent l2_percent tensor_percent "
           "issue_percent occupancy_percent registers waits_for waits waits_next_for waits_next").split()

NORM_LINEAR = "x = input bf16[8192,768] ; n = layer_norm x g:bf16[768] h:bf16[768] eps=1e-5 ; y = linear n w:bf16[768,2304] b:bf16[2304] ; out y"
LOSS = "x = input bf16[32768,768] ; w = weight bf16[50257,768] ; t = input i32[32768] ; l = linear_cross_entropy x w t ; out l"
FFN = ["bench", "ffn", "--rows", "8192", "--cols", "768", "--dtype", "bf16", "--once", "--plan", "fused"]


def matmul(rows, inner, columns, epilogue="none", dtype="bf16"):
    words = ["bench", "matmul", "--rows", str(rows), "--weights", f"{inner}x{columns}", "--epilogue", epilogue, "--dtype", dtype]
    return (rows, inner, columns, dtype), [*words, "--once", "--fastest"], None


def graph(text, sizes, *words):
    return sizes, ["profile", None, *words, "--once", "fused"], text


# Sizes, our command, and the graph in text form that takes the place of None in it.
CASES = {
    "matmul-1024": matmul(1024, 768, 2304),
    "matmul-2048": matmul(2048, 768, 768),
    "matmul-8192": matmul(8192, 768, 2304),
    "gelu": matmul(8192, 768, 3072, "gelu"),
    "norm": matmul(8192, 768, 768, "norm"),
    "norm_linear": graph(NORM_LINEAR, (8192, 768, 2304, "bf16")),
    "ffn": ((8192, 768, 3072, "bf16"), FFN, None),
    "loss": graph(LOSS, (32768, 768, 50257, "bf16")),
    "loss-gradient": graph(LOSS, (32768, 768, 50257, "bf16"), "--backward"),
    "f32": matmul(4096, 4096, 4096, dtype="f32"),
}


def unknown(said, metrics):
    """The metrics that `ncu` complains about: versions word it differently, and all name the metric."""
    complaints = [line for line in said.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
    return [metric for metric in metrics if any(metric in line for line in complaints)]


def watch(words, metrics):
    """Runs a command under ncu: what it printed, its launches, and the metrics that ncu knows."""
    with tempfile.TemporaryDirectory() as folder:
        while True:
            log = Path(folder) / "ncu.csv"
            log.unlink(missing_ok=True)
            profiler = ["ncu", "--clock-control", "none", "--cache-control", "all", "--print-units", "base", "--csv", "--log-file", log,
                        "--metrics", ",".join(metrics)]
            done = subprocess.run([*profiler, *words], stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True)
            table = log.read_text() if log.exists() else ""
            said = "\n".join([done.stdout, done.stderr, table])
            bad = unknown(said, metrics)
            if not bad or len(bad) == len(metrics):
                break
            print(f"note: this ncu does not know {', '.join(bad)}", flush=True)
            metrics = [metric for metric in metrics if metric not in bad]
    if done.returncode:
        raise Failure(f"`deuteron {' '.join(map(str, words[1:]))}` under ncu: {said.strip()[-1000:]}")
    return done.stdout, parse(table, metrics, [metric for metric in metrics if metric not in NEEDED]), metrics


def runs_of(said, launches):
    """(variant, whether plans choose it, its launches) of each part of a run, in order: launches that no kernel of ours claims are the library's."""
    rows = json.loads(said[said.index("["):]) if "[" in said else []
    if not rows or "variant" not in rows[0]:
        return [("fused plan", True, launches)]
    runs, at = [], 0
    for index, row in enumerate(rows):
        taken = []
        if row["launches"]:
            for function in row["launches"]:
                while at < len(launches) and function_of(launches[at]["kernel"]) != function:
                    at += 1
                if at == len(launches):
                    raise Failure(f"`{function}` is not among {', '.join(function_of(launch['kernel']) for launch in launches)}")
                taken.append(launches[at])
                at += 1
        else:
            following = next((row["launches"][0] for row in rows[index + 1:] if row["launches"]), None)
            while at < len(launches) and function_of(launches[at]["kernel"]) != following:
                taken.append(launches[at])
                at += 1
        runs.append((row["variant"], row["chosen"], taken))
    return runs


def records(name, sizes, runs):
    for variant, chosen, launches in runs:
        functions = {}
        for launch in launches:
            functions.setdefault(function_of(launch["kernel"]), []).append(launch)
        for function, own in functions.items():
            yield record(own) | dict(zip(COLUMNS, [name, *sizes, variant, function, chosen]))


def record(launches):
    total = sum(launch[TIME] for launch in launches)

    def added(metric):
        return sum(launch[metric] for launch in launches)

    def by_time(metric):
        if not all(metric in launch for launch in launches):
            return None
        return round(sum(launch[metric] * launch[TIME] for launch in launches) / max(total, 1e-9), 2)

    waits = sorted(((by_time(metric), words) for metric, words in STALLS.items() if by_time(metric) is not None), reverse=True)
    (most, first), (more, second) = (*waits, (None, ""), (None, ""))[:2]
    return {
        "launches": len(launches), "time_us": round(total, 2), "dram_bytes": round(added(READ) + added(WRITTEN)),
        "dram_percent": by_time(MEMORY), "l2_hit_percent": by_time(HITS), "l2_percent": by_time(L2), "tensor_percent": by_time(TENSOR),
        "issue_percent": by_time(ISSUE), "occupancy_percent": by_time(OCCUPANCY), "registers": round(max(launch[REGISTERS] for launch in launches)),
        "waits_for": first, "waits": most, "waits_next_for": second, "waits_next": more,
    }


def show(row):
    share = lambda column: f"{row[column]:6.0f}%" if row[column] is not None else f"{'-':>7}"
    name = f"{row['case']}: {row['variant']}: {row['kernel']}"
    print(f"{name:<72.71}{row['time_us']:10.1f}{row['dram_bytes'] / 1e6:9.1f}{share('dram_percent')}{share('l2_hit_percent')}{share('l2_percent')}"
          f"{share('tensor_percent')}{share('issue_percent')}{share('occupancy_percent')}{row['registers']:6}  "
          f"{row['waits_for']} {row['waits']}, {row['waits_next_for']} {row['waits_next']}", flush=True)


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    table = measuring.Table("h200-ncu-matmul.csv", COLUMNS, **measuring.gpu(), commit=arguments.commit)
    print(f"{'':<72}{'us':>10}{'MB':>9}{'DRAM':>7}{'L2 hit':>7}{'L2':>7}{'tensor':>7}{'issue':>7}{'occup.':>7}{'regs':>6}  warps wait for")
    metrics, failed = METRICS, []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.cases:
            sizes, words, text = CASES[name]
            if text:
                file = Path(folder) / f"{name}.txt"
                file.write_text(text)
                words = [word or file for word in words]
            json_words = ["--json"] if words[0] == "bench" else []
            try:
                said, launches, metrics = watch([arguments.binary, *words, "--device", "cuda", *json_words], metrics)
                found = list(records(name, sizes, runs_of(said, launches)))
            except Failure as failure:
                print(f"{name}: {failure}", flush=True)
                failed.append(name)
                continue
            for row in found:
                show(row)
                table.add(row)
            failed += [name] * (not found)
    print(f"no rows of {', '.join(failed)}" if failed else "every case has rows")
    return 2 if len(failed) == len(arguments.cases) else 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failure, OSError, subprocess.CalledProcessError, KeyError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)

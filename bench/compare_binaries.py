"""Times two builds of the command against each other in one run: a change that claims no change of behaviour must not be slower.

    python3 bench/compare_binaries.py OLD NEW [--rows 8192] [--cols 768] [--rounds 2] [--models gpt2] [--csv FILE] [--commit NAME]

Ops of the catalogue forward and backward, and prompt and step of models, in bf16 on a GPU. Builds take turns, each time is the least of its
rounds. Exit code 1 if a time of the new build is more than 2 % above that of the old one.
"""

import argparse
import csv
import datetime
import json
import subprocess
import sys

LIMIT = 1.02


def bench(binary, words):
    command = [binary, "bench", *words, "--dtype", "bf16", "--device", "cuda", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def op_times(rows):
    """(what, microseconds) of each op."""
    for row in rows:
        graph = row["fused_graph_us"]
        yield (row["op"], row["direction"], row["rows"], row["cols"]), graph if graph else row["fused_us"]


def model_times(name, batch, report):
    """(what, microseconds) of each plan of each phase of a model."""
    for phase in report["phases"]:
        for plan in phase["plans"]:
            yield (name, f"{phase['name']} {plan['plan']}", batch, ""), plan["ms"] * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rows", default="8192")
    parser.add_argument("--cols", default="768")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=["gpt2"])
    parser.add_argument("--csv")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    size = ["--rows", options.rows, "--cols", options.cols]
    times = {}
    for _ in range(options.rounds):
        for build in ("old", "new"):
            binary = getattr(options, build)
            found = list(op_times(bench(binary, size))) + list(op_times(bench(binary, [*size, "--backward"])))
            for model in options.models:
                for batch in ("1", "8"):
                    report = bench(binary, [model, "--batch", batch])
                    found += model_times(model, batch, report[0] if isinstance(report, list) else report)
            for what, value in found:
                times.setdefault(what, {}).setdefault(build, []).append(value)
    table = []
    for (name, what, rows, cols), found in times.items():
        old, new = min(found["old"]), min(found["new"])
        table.append([name, what, rows, cols, "bf16", round(old, 3), round(new, 3), round(new / old, 4)])
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow("name what rows cols dtype old_us new_us ratio commit date".split())
            writer.writerows([*row, options.commit, datetime.date.today()] for row in table)
    slower = [row for row in table if row[-1] > LIMIT]
    worst = max(table, key=lambda row: row[-1])
    print(f"{len(table)} times, {len(slower)} slower by more than 2 %; largest ratio {worst[-1]} ({worst[0]} {worst[1]})")
    for row in slower:
        print(*row)
    sys.exit(bool(slower))


main()

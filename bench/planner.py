#!/usr/bin/env python3
"""Times the planner: `deuteron analyze --json` on models, medians of several runs, one CSV row each.

    python3 bench/planner.py [--machine NAME] [--runs N] [--onnx FILE]

FILE is planned too: `bench/random_onnx.py` writes one of 2,000 random operators.

Needs the release binary (`cargo build --release`). Rows are appended to bench/results/NAME-planner.csv.
"""

import argparse
import csv
import datetime
import pathlib
import statistics

import measuring
from measuring import ROOT

BINARY = ROOT / "target" / "release" / "deuteron"
CASES = [
    ["gpt2", "--batch", "8", "--dtype", "bf16"],
    ["gpt2", "--batch", "8", "--dtype", "bf16", "--backward"],
    ["gpt2", "--batch", "1", "--seq", "1", "--dtype", "bf16"],
    ["gpt2-xl", "--batch", "8", "--dtype", "bf16"],
    ["gpt2-xl", "--batch", "8", "--dtype", "bf16", "--backward"],
]
FIELDS = ["date", "commit", "graph", "device", "planning_ms", "runs", "optimal", "groups", "states", "unfused_kernels",
          "chosen_kernels", "unfused_us", "greedy_us", "chosen_us"]


def row(words, runs, commit):
    found = [measuring.ours(BINARY, "analyze", *words, "--device", "h200") for _ in range(runs)]
    last = found[-1]
    plans = last["plans"]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "graph": " ".join(pathlib.Path(word).name for word in words),
        "device": last["device"],
        "planning_ms": round(statistics.median(one["planning_ms"] for one in found), 1),
        "runs": runs,
        "optimal": last["optimal"],
        "groups": last["search"]["groups"],
        "states": last["search"]["states"],
        "unfused_kernels": plans["unfused"]["kernels"],
        "chosen_kernels": plans["chosen"]["kernels"],
        "unfused_us": round(plans["unfused"]["us"], 1),
        "greedy_us": round(plans["greedy"]["us"], 1),
        "chosen_us": round(plans["chosen"]["us"], 1),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--machine")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--onnx")
    options = parser.parse_args()
    commit = measuring.head()
    rows = []
    for words in CASES + ([[options.onnx]] if options.onnx else []):
        rows.append(row(words, options.runs, commit))
        print(f"{rows[-1]['graph']:48} {rows[-1]['planning_ms']:8.1f} ms  {rows[-1]['unfused_us']:10.1f} us unfused "
              f"{rows[-1]['chosen_us']:10.1f} us chosen", flush=True)
    if options.machine:
        path = ROOT / "bench" / "results" / f"{options.machine}-planner.csv"
        fresh = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            if fresh:
                writer.writeheader()
            writer.writerows(rows)
        print(f"appended to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

"""What the scripts of this folder share: our command, their arguments, the files of their rows, clocks and CUDA graphs."""

import argparse
import csv
import datetime
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE

ROOT = Path(__file__).resolve().parent.parent
BINARIES = [ROOT / "bundle/deuteron", ROOT / "deuteron", ROOT / "target/release/deuteron"]


class Failure(Exception):
    """Why something could not be measured."""


class Arguments(argparse.ArgumentParser):
    """The arguments of a script, with those that all have: our command, and the commit that it was built from."""

    def __init__(self, about):
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--binary", type=Path,
                          help="our command [default: the bundle's, then the release build's]")
        self.add_argument("--commit", default="", help="written into the rows")

    def parse_args(self):
        arguments = super().parse_args()
        if arguments.binary is None:
            packed = ROOT / "bundle/deuteron.gz"
            if packed.exists() and not BINARIES[0].exists():
                self.error(f"the bundle's command is packed: run `gunzip {packed}` first, as bench/gpu.sh does")
            arguments.binary = next(filter(Path.exists, BINARIES), None)
        if arguments.binary is None:
            self.error("no `deuteron` binary; run `cargo xtask bundle` or `cargo build --release` first")
        return arguments


def ours(binary, *words, good=(0,)):
    """What our command prints as JSON, if it ends with one of these exit codes."""
    done = subprocess.run([binary, *words, "--json"], stdout=PIPE, stderr=PIPE, stdin=DEVNULL, text=True)
    if done.returncode not in good or not done.stdout.strip():
        raise Failure(f"`deuteron {' '.join(words)}` ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)


def head():
    """The commit that is checked out."""
    return subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], stdout=PIPE, text=True).stdout.strip()


def gpu():
    """Name and driver of the GPU, as columns."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, check=True, stdout=PIPE, text=True).stdout.splitlines()[0].split(",")
    return dict(zip(("device", "driver"), map(str.strip, found)))


class Table:
    """A file of rows in the folder named by OUT, written as they come. Each ends with what all have in common, and the date."""

    def __init__(self, name, columns, **last):
        out = Path(os.environ.get("OUT") or "out")
        out.mkdir(parents=True, exist_ok=True)
        self.path, self.last = out / name, last | {"date": datetime.date.today()}
        self.file = self.path.open("w", newline="")
        self.rows = csv.DictWriter(self.file, [*columns, *self.last], restval="", lineterminator="\n")
        self.rows.writeheader()

    def add(self, row):
        """A row by the names of its columns, or its cells in their order."""
        self.rows.writerow((row if isinstance(row, dict) else dict(zip(self.rows.fieldnames, row))) | self.last)
        self.file.flush()


def milliseconds(call, before=lambda: None, least=3, most=50, seconds=1.0):
    """The median of calls on the CPU; `before` is called before each and not timed."""
    for _ in range(2):
        before()
        call()
    times = []
    begin = time.perf_counter()
    while len(times) < least or (time.perf_counter() - begin < seconds and len(times) < most):
        before()
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


class Recorded:
    """Calls on a GPU, recorded one after another as a CUDA graph. Results stay, so that they take turns in memory as operands do."""

    def __init__(self, calls):
        import torch
        self.torch, self.count = torch, len(calls)
        with torch.cuda.stream(torch.cuda.Stream()):
            for call in calls:
                call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [call() for call in calls]
        self.graph.replay()
        torch.cuda.synchronize()

    def microseconds(self, calls=20):
        """Of one call, over at least so many."""
        repeats = -(-calls // self.count)
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            self.graph.replay()
        end.record()
        self.torch.cuda.synchronize()
        return start.elapsed_time(end) / repeats / self.count * 1e3

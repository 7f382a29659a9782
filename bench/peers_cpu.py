#!/usr/bin/env python3
"""Times our fused CPU kernels beside torch eager, torch.compile and ONNX Runtime: f32, two threads, one run.

    python3 bench/peers_cpu.py [--quick] [--lines SUBSTRING] [--machine NAME]

The first call makes a virtual environment (bench/.venv) and installs the peers into it. Each peer then lives in
processes of its own, blocked on a pipe while it is not their turn, so one contender runs at a time. A line is measured
in rounds: every round gives each peer a slice of time and runs `deuteron bench` once, in an order that turns, so a
noisy minute hurts all of them. The number of a contender is the median over rounds of the median of each slice.

The peers get what they need to be at their best: memory that is kept and made of huge pages (ours is too), warm-up,
outputs allocated before (ONNX Runtime), the fastest of several ways to write a line, and for short calls two processes,
one whose threads spin between calls and one whose threads sleep, of which the faster counts. `deuteron bench` takes
turns with copies and with its unfused kernels, so its caches are colder than the peers'. Every peer's result is checked
against float64 before it is timed. Needs the release binary, a C++ compiler for torch.compile and 16 GB of memory.

Exit code 0: ours is the fastest on every line; 1: some peer is faster on some line; 2: could not be measured.
"""

import argparse
import csv
import datetime
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "target/release/deuteron"
PACKAGES = ["torch==2.15.0", "onnxruntime==1.31.1", "onnx==1.23.2", "numpy==2.4.6"]
PEERS = ["torch eager", "torch.compile", "ONNX Runtime"]
OURS = "deuteron"
THREADS = 2
MALLOC = {"hugetlb": 1, "mmap_max": 0, "trim_threshold": 1 << 40, "top_pad": 1 << 26, "tcache_count": 0, "mxfast": 0}
EPSILON = 1e-5

ROW_KERNELS = ["norm_act", "add_norm", "norm_quantize", "swiglu"]
LINES = [(kernel, *shape) for kernel in ROW_KERNELS for shape in ((1024, 768), (8192, 4096))]
LINES += [("softmax", 8192, 1024)]
LINES += [("add_act", math.ceil(elements / 1024), 1024) for elements in (10**6, 10**7, 10**8)]

OPERANDS = {"norm_act": "x w b", "add_norm": "x r w b", "norm_quantize": "x w b", "swiglu": "x g", "softmax": "x",
            "add_act": "x r"}


# Peers: this part runs inside the virtual environment.

def torch_peer(compiled):
    import torch
    from torch.nn.functional import layer_norm, silu
    torch.set_num_threads(THREADS)
    torch.inference_mode().__enter__()

    def norm(x, w, b):
        return layer_norm(x, w.shape, w, b, EPSILON)

    # In place wherever the operand is a temporary: less memory to touch for eager, the same for the compiler.
    def gelu(temporary):
        return torch.ops.aten.gelu_(temporary, approximate="tanh")

    def norm_quantize(x, w, b):
        y = norm(x, w, b)
        # Two reductions of y are faster here than abs() and one.
        scale = torch.maximum(y.amax(-1, keepdim=True), y.amin(-1, keepdim=True).neg_()).div_(127)
        return y.mul_(scale.reciprocal()).round_().to(torch.int8), scale

    functions = {
        "norm_act": lambda x, w, b: (gelu(norm(x, w, b)),),
        "add_norm": lambda x, r, w, b: (norm(s := x + r, w, b), s),
        "norm_quantize": norm_quantize,
        "swiglu": lambda x, g: (silu(x).mul_(g),),
        "softmax": lambda x: (torch.softmax(x, -1),),
        "add_act": lambda x, r: (gelu(x + r),),
    }

    def prepare(kernel, operands):
        function = functions[kernel]
        if compiled:
            torch.compiler.reset()
            function = torch.compile(function, fullgraph=True, dynamic=False)
        tensors = [torch.from_numpy(array) for array in operands.values()]
        yield lambda: function(*tensors), lambda: [result.numpy() for result in function(*tensors)]

    return prepare


LAYER_NORM = f"LayerNormalization <axis = -1, epsilon = {EPSILON:f}>"
GELUS = ['Gelu <approximate = "tanh">', "com.microsoft.FastGelu"]

# Ways to write each line as a graph: a node that says more is not always the faster one.
GRAPHS = {
    "norm_act": [f"n = {LAYER_NORM} (x, w, b)  y = {gelu} (n)" for gelu in GELUS],
    "add_norm": [
        f"s = Add (x, r)  y = {LAYER_NORM} (s, w, b)",
        f"y, , , s = com.microsoft.SkipLayerNormalization <epsilon = {EPSILON:f}> (x, r, w, b)",
    ],
    "norm_quantize": [
        f"n = {LAYER_NORM} (x, w, b)  high = ReduceMax <keepdims = 0> (n, axes) "
        "low = ReduceMin <keepdims = 0> (n, axes)  below = Neg (low)  largest = Max (high, below) "
        "scale = Mul (largest, step)  q = QuantizeLinear <axis = 0, output_dtype = 3> (n, scale)"  # 3 is int8
    ],
    "swiglu": ["s = com.microsoft.QuickGelu <alpha = 1.0> (x)  y = Mul (s, g)"],
    "softmax": ["y = Softmax <axis = -1> (x)"],
    "add_act": [f"s = Add (x, r)  y = {gelu} (s)" for gelu in GELUS],
}


def onnx_peer(spins):
    import numpy
    import onnx
    import onnxruntime

    def declare(arrays):
        kinds = {"float32": "float", "int8": "int8"}
        return ", ".join(f"{kinds[array.dtype.name]}{list(array.shape)} {name}" for name, array in arrays.items())

    def load(graph, inputs, outputs, constants):
        head = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'
        model = onnx.parser.parse_model(f"{head} line ({declare(inputs)}) => ({declare(outputs)}) {{ {graph} }}")
        used = {name for node in model.graph.node for name in node.input} & constants.keys()
        model.graph.initializer.extend(onnx.numpy_helper.from_array(constants[name], name) for name in used)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def prepare(kernel, operands):
        full = operands["x"].shape
        inputs = {name: array for name, array in operands.items() if array.ndim == 2}
        constants = {name: array for name, array in operands.items() if array.ndim == 1}
        constants |= {"axes": numpy.array([-1]), "step": numpy.array(1 / 127, dtype="float32")}
        shapes = {"add_norm": {"y": full, "s": full}, "norm_quantize": {"q": full, "scale": full[:1]}}
        outputs = {name: numpy.zeros(shape, "int8" if name == "q" else "float32")
                   for name, shape in shapes.get(kernel, {"y": full}).items()}
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in (inputs | outputs).items()}
        for graph in GRAPHS[kernel]:
            way = load(graph, inputs, outputs, constants)
            binding = way.io_binding()
            for name in inputs:
                binding.bind_ortvalue_input(name, values[name])
            for name in outputs:
                binding.bind_ortvalue_output(name, values[name])
            call = lambda way=way, binding=binding: way.run_with_iobinding(binding)
            yield call, lambda call=call: call() or [values[name].numpy() for name in outputs]

    return prepare


def make_operands(kernel, rows, cols):
    import numpy
    random = numpy.random.default_rng(1)
    shapes = {name: cols if name in "wb" else (rows, cols) for name in OPERANDS[kernel].split()}
    return {name: random.standard_normal(shape, "float32") for name, shape in shapes.items()}


def check(kernel, operands, results):
    """Compares some rows with float64; every line computes its rows apart."""
    import numpy
    some = numpy.linspace(0, len(operands["x"]) - 1, 64).astype(int)
    exact = {name: (array[some] if array.ndim == 2 else array).astype("float64") for name, array in operands.items()}
    x, r, g, w, b = (exact.get(name) for name in "xrgwb")

    def norm(x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / numpy.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * w + b

    def gelu(x):
        return 0.5 * x * (1 + numpy.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def quantize(y):
        scale = abs(y).max(-1, keepdims=True) / 127
        return y / scale, scale

    expected = {
        "norm_act": lambda: [gelu(norm(x))],
        "add_norm": lambda: [norm(x + r), x + r],
        "norm_quantize": lambda: quantize(norm(x)),
        "swiglu": lambda: [x / (1 + numpy.exp(-x)) * g],
        "softmax": lambda: [numpy.exp(x) / numpy.exp(x).sum(-1, keepdims=True)],
        "add_act": lambda: [gelu(x + r)],
    }[kernel]()
    for result, wanted in zip(results, expected, strict=True):
        got = result[some].reshape(wanted.shape)
        # The expected bytes are not rounded, so right ones are up to half a step away.
        numpy.testing.assert_allclose(got, wanted, rtol=2e-5, atol=0.501 if got.dtype == "int8" else 2e-5)


def sample(call, milliseconds):
    """Times of calls, in milliseconds. Results are dropped at once, so that their memory serves the next call."""
    call(), call()
    times = []
    end = time.perf_counter() + milliseconds / 1e3
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def settle():
    """Waits until no thread of this process spins any more."""
    before = -1.0
    while time.process_time() - before > 0.002:
        before = time.process_time()
        time.sleep(0.02)


def work(peer, spins):
    # Libraries that print must not speak on the pipe.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prepare = onnx_peer(spins) if peer == "ONNX Runtime" else torch_peer(compiled=peer == "torch.compile")
    best = None
    for request in map(json.loads, sys.stdin):
        reply = {}
        if "kernel" in request:
            best = None
            operands = make_operands(**request)
            for call, results in prepare(request["kernel"], operands):
                check(request["kernel"], operands, results())
                median = statistics.median(sample(call, 200))
                best = min(best or (median, call), (median, call), key=lambda way: way[0])
            del call, results, operands  # or they would keep the memory of this line during the next
        else:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            times = sample(best[1], request["milliseconds"])
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            reply = {"median_ms": statistics.median(times), "faults": faults / len(times)}
        settle()
        print(json.dumps(reply), file=replies, flush=True)


# Driver: needs nothing but the standard library.

class Worker:
    def __init__(self, environment, peer, spins):
        self.peer, self.spins = peer, spins
        variables = os.environ | {
            # Keep freed memory, never map and unmap it, and ask for huge pages: page faults are not what is compared.
            # No caches of small blocks either: such blocks sit between large ones and keep them from being used again.
            "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in MALLOC.items()),
            "OMP_NUM_THREADS": str(THREADS),
            "TORCHINDUCTOR_CACHE_DIR": str(environment / "inductor"),
        }
        if not spins:  # unset, OpenMP's threads spin for some milliseconds
            variables["OMP_WAIT_POLICY"] = "PASSIVE"
        command = [environment / "bin/python", __file__, "--worker", peer, *["--spins"] * spins]
        self.process = subprocess.Popen(command, env=variables, text=True, stdin=PIPE, stdout=PIPE)

    def ask(self, **request):
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            print(f"{self.peer} ended before it answered {request}", file=sys.stderr)
            sys.exit(2)


def make_environment(path):
    stamp = path / "packages"
    if stamp.exists() and stamp.read_text().split() == PACKAGES:
        return  # the stamp comes last, so an installation that was cut short is made again
    print(f"installing {' '.join(PACKAGES)} into {os.path.relpath(path)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", path], check=True)
    subprocess.run([path / "bin/python", "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    stamp.write_text("\n".join(PACKAGES))


def run_ours(kernel, rows, cols):
    flags = ["--rows", str(rows), "--cols", str(cols), "--threads", str(THREADS), "--device", "cpu", "--json"]
    return json.loads(subprocess.run([BINARY, "bench", kernel, *flags], check=True, stdout=PIPE).stdout)[0]


def measure(workers, line, rounds, milliseconds):
    """A record a contender. All are held to the bytes that the fused kernel has to move."""
    kernel, rows, cols = line
    # Waking a thread is nothing beside a long call, and the memory of half as many processes is enough to ask for.
    workers = [worker for worker in workers if not worker.spins or rows * cols < 1 << 24]
    for worker in workers:
        worker.ask(kernel=kernel, rows=rows, cols=cols)
    slices = {worker: [] for worker in workers}
    bench = []
    for turn in range(rounds):
        order = [*workers, None]
        start = turn * len(order) // rounds
        for worker in order[start:] + order[:start]:
            if worker is None:
                bench.append(run_ours(*line))
                continue
            reply = worker.ask(milliseconds=milliseconds)
            slices[worker].append(reply["median_ms"])
            if reply["faults"] > 64:
                print(f"  {worker.peer}: {reply['faults']:.0f} page faults a call", file=sys.stderr)
    times = {peer: min((slices[worker] for worker in workers if worker.peer == peer), key=statistics.median)
             for peer in PEERS}
    times[OURS] = [row["fused_us"] / 1e3 for row in bench]
    copy_gbps = statistics.median(row["copy_gbps"] for row in bench)
    records = {}
    for name, values in times.items():
        median, fifths = statistics.median(values), statistics.quantiles(values, n=5, method="inclusive")
        gbps = bench[0]["bytes_fused"] / median / 1e6
        records[name] = {"median_ms": median, "p20_ms": fifths[0], "p80_ms": fifths[3], "gbps": gbps,
                         "fraction_of_copy": gbps / copy_gbps}
    return records


def append(machine, line, records, best):
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], stdout=PIPE, text=True)
    kernel, rows, cols = line
    shared = {"date": datetime.date.today(), "commit": head.stdout.strip(), "machine": machine, "kernel": kernel,
              "shape": f"{rows}x{cols}", "dtype": "f32", "threads": THREADS}
    path = ROOT / f"bench/results/{machine}.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            table.writerow([*shared, "variant", "baseline", *records[best]])
        for name, record in records.items():
            table.writerow([*shared.values(), name, best, *(f"{value:.4f}" for value in record.values())])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--lines", default="", metavar="SUBSTRING", help="only lines whose name contains this")
    parser.add_argument("--machine", metavar="NAME", help="append to bench/results/NAME.csv")
    parser.add_argument("--environment", type=Path, default=ROOT / "bench/.venv", help="where the peers are installed")
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--spins", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker, arguments.spins)
    if not BINARY.exists():
        parser.error("no release binary; run `cargo build --release` first")
    named = {"{} {}x{}".format(*line): line for line in LINES}
    lines = {name: line for name, line in named.items() if arguments.lines in name}
    if not lines:
        parser.error(f"no such line; there are: {', '.join(named)}")
    rounds, milliseconds = (3, 200) if arguments.quick else (9, 500)
    make_environment(arguments.environment)
    workers = [Worker(arguments.environment, peer, spins) for peer in PEERS for spins in (False, True)]
    names = "".join(f"{name:>14}" for name in [*PEERS, OURS])
    print(f"{'milliseconds':<24}{names}{'best peer/ours':>16}{'of copy':>9}", flush=True)
    slower = []
    for name, line in lines.items():
        records = measure(workers, line, rounds, milliseconds)
        best = min(PEERS, key=lambda peer: records[peer]["median_ms"])
        ratio = records[best]["median_ms"] / records[OURS]["median_ms"]
        times = "".join(f"{record['median_ms']:14.3f}" for record in records.values())
        print(f"{name:<24}{times}{ratio:15.2f}x{records[OURS]['fraction_of_copy']:9.0%}", flush=True)
        slower += [name] * (ratio < 1)
        if arguments.machine:
            append(arguments.machine, line, records, best)
    print(f"slower than the best peer: {', '.join(slower) or 'nowhere'}")
    return 1 if slower else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        print(error, file=sys.stderr)
        sys.exit(2)

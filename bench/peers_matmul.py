#!/usr/bin/env python3
"""Matrix products of GPT-2 124M in f32 beside torch and ONNX Runtime on the CPU, in one run.

    python3 bench/peers_matmul.py [--rounds N] [--commit HASH]

Ours is `deuteron fuse` on a graph of one product, weights as they lie in a checkpoint; every one has as many threads as the machine
has cores. All run in turn, `rounds` times; each row has the median of its rounds. Needs torch, onnx and onnxruntime.

Rows go to matmul-cpu.csv in the folder named by OUT (default ./out).
Exit code 0: ours is within 10 % of the best peer at every shape; 1: it is not.
"""

import os
import platform
import statistics
import sys
import tempfile

import numpy
import onnx
import onnxruntime
import torch

import measuring

THREADS = os.cpu_count()
# Rows, inner size, columns: the four products of a layer over a prompt, of a step, and the logits, whose table lies by words.
SHAPES = [(rows, k, columns) for rows in (1024, 128) for k, columns in ((768, 2304), (768, 768), (768, 3072), (3072, 768))]
SHAPES += [(1, 768, 2304), (1, 768, 3072), (1, 3072, 768), (1, 768, 50257)]
BAR = 0.9


def ours(binary, rows, k, columns):
    weight, flag = (f"f32[{columns},{k}]", " transpose_b") if columns == 50257 else (f"f32[{k},{columns}]", "")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(f"x = input f32[{rows},{k}]\nw = weight {weight}\ny = matmul x w{flag}\nout y\n")
        file.flush()
        return measuring.ours(binary, "fuse", file.name, "--device", "cpu", "--no-learn")["fused"]["ms"]


def with_torch(rows, k, columns):
    x = torch.randn(rows, k)
    w = torch.randn(columns, k).t() if columns == 50257 else torch.randn(k, columns)
    y = torch.empty(rows, columns)
    return lambda: torch.mm(x, w, out=y)


def with_onnxruntime(rows, k, columns):
    x, w = numpy.random.randn(rows, k).astype("float32"), numpy.random.randn(k, columns).astype("float32")
    text = f'<ir_version: 10, opset_import: ["": 21]> product (float[{rows},{k}] x) => (float[{rows},{columns}] y) {{ y = MatMul (x, w) }}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x))
    binding.bind_ortvalue_output("y", onnxruntime.OrtValue.ortvalue_from_numpy(numpy.zeros((rows, columns), "float32")))
    return lambda: session.run_with_iobinding(binding)


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.inference_mode().__enter__()
    names = ["deuteron", "torch", "onnxruntime"]
    behind = []
    print(f"{'microseconds':<18}" + "".join(f"{name:>14}" for name in names) + f"{'best peer/ours':>16}{'GFLOP/s':>10}")
    columns = ["rows", "inner", "columns", "dtype", *[f"{name}_us" for name in names], "best_peer_over_ours"]
    machine = f"{THREADS} cores of {platform.machine()}"
    table = measuring.Table("matmul-cpu.csv", columns, machine=machine, commit=arguments.commit)
    for shape in SHAPES:
        peers = {"torch": with_torch(*shape), "onnxruntime": with_onnxruntime(*shape)}
        samples = {name: [] for name in names}
        for _ in range(arguments.rounds):
            samples["deuteron"].append(ours(arguments.binary, *shape))
            for name, call in peers.items():
                samples[name].append(measuring.milliseconds(call, least=5, most=10**6, seconds=0.3))
        medians = {name: 1e3 * statistics.median(values) for name, values in samples.items()}
        ratio = min(medians[name] for name in peers) / medians["deuteron"]
        name = "x".join(map(str, shape))
        behind += [name] * (ratio < BAR)
        speed = 2e-3 * shape[0] * shape[1] * shape[2] / medians["deuteron"]
        print(f"{name:<18}" + "".join(f"{medians[name]:14.1f}" for name in names) + f"{ratio:15.2f}x{speed:10.0f}", flush=True)
        table.add([*shape, "f32", *[f"{medians[name]:.1f}" for name in names], f"{ratio:.3f}"])
    print("more than 10 % behind the best: " + (", ".join(behind) or "nowhere"))
    return bool(behind)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Matmuls of GPT-2 124M in bf16 on a GPU: our kernels, the vendor's library, torch eager and torch.compile, all as CUDA graphs.

    python3 bench/peers_matmul_gpu.py [--binary PATH] [--commit HASH] [--rows N ...]

Ours and the library's are the variants of `deuteron bench matmul --json`, in turn over rotating buffers: the one that plans take, the
fastest kernel of ours, and the library where it has the epilogue. Torch's are the same linear layer, called eagerly and compiled, over as
many copies of its operands. Weights lie as in a checkpoint of GPT-2, those of the head transposed.

Rows go to h200-matmul.csv in the folder named by OUT (default ./out).
"""

import statistics

import torch
from torch.nn import functional

import measuring

# Inner size, columns, whether the weights lie transposed; what follows.
LINES = [(768, 2304, False, ["none", "bias"]), (768, 768, False, ["none", "residual", "norm"]), (768, 3072, False, ["none", "gelu"]),
         (3072, 768, False, ["none", "residual", "norm"]), (768, 50257, True, ["none"])]
# Operands of this many bytes together do not stay in the cache.
ROTATED = 200e6
# Epilogues with a residual, as large as the result: logits of 32768 rows take 3 GB.
RESIDUAL = ("residual", "norm")


def layer(epilogue, x, w, b, r):
    y = x @ w if epilogue == "none" else torch.addmm(b, x, w)
    if epilogue == "norm":
        s = y + r
        return s, functional.layer_norm(s, b.shape, b, b)
    return functional.gelu(y, approximate="tanh") if epilogue == "gelu" else y + r if epilogue == "residual" else y


def theirs(rows, line, epilogue):
    """Microseconds of torch eager and of torch.compile."""
    inner, columns, transposed, _ = line
    sets = min(16, max(2, round(ROTATED / (2 * (rows * inner + inner * columns + rows * columns)))))
    make = lambda *sizes: torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)
    weight = (lambda: make(columns, inner).t()) if transposed else (lambda: make(inner, columns))
    residual = lambda: make(rows, columns) if epilogue in RESIDUAL else None
    operands = [(make(rows, inner), weight(), make(columns), residual()) for _ in range(sets)]
    torch._dynamo.reset()
    functions = [lambda *given: layer(epilogue, *given), torch.compile(lambda *given: layer(epilogue, *given))]
    graphs = [measuring.Recorded([lambda f=f, given=given: f(*given) for given in operands]) for f in functions]
    times = [[graph.microseconds() for graph in graphs] for _ in range(5)]
    return [statistics.median(column) for column in zip(*times)]


def ours(binary, rows, line, epilogue):
    inner, columns, transposed, _ = line
    weights = f"{inner}x{columns}{'t' if transposed else ''}"
    words = ["--rows", str(rows), "--weights", weights, "--epilogue", epilogue, "--dtype", "bf16", "--device", "cuda"]
    found = measuring.ours(binary, "bench", "matmul", *words)
    own = [row for row in found if row["variant"] != "library"]
    library = next((row["us"] for row in found if row["variant"] == "library"), None)
    chosen = next((row for row in found if row["chosen"]), None)
    return chosen, min(own, key=lambda row: row["us"], default=None), library


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 2048, 8192, 32768])
    arguments = parser.parse_args()
    columns = "rows inner columns epilogue chosen chosen_us kernel kernel_us library_us torch_us compile_us".split()
    table = measuring.Table("h200-matmul.csv", columns, **measuring.gpu(), torch=torch.__version__, commit=arguments.commit)
    print(f"{'bf16, microseconds':<34}{'plan':>9}{'kernel':>9}{'library':>9}{'torch':>9}{'compile':>9}  library / kernel, compile / plan")
    for rows in arguments.rows:
        for line in LINES:
            for epilogue in line[3]:
                chosen, kernel, library = ours(arguments.binary, rows, line, epilogue)
                eager, compiled = theirs(rows, line, epilogue)
                torch.cuda.empty_cache()
                time = lambda row: row["us"] if row else None
                name = lambda row: row["variant"] if row else ""
                cells = [time(chosen), time(kernel), library, eager, compiled]
                shown = "".join(f"{cell:9.2f}" if cell else f"{'-':>9}" for cell in cells)
                ratio = lambda over, under: f"{over / under:.2f}" if over and under else "-"
                print(f"{rows} x {line[0]} x {line[1]}, {epilogue:<14}".ljust(34) + shown +
                      f"  {ratio(library, time(kernel))}, {ratio(compiled, time(chosen))}", flush=True)
                table.add([rows, line[0], line[1], epilogue, name(chosen), cells[0], name(kernel), *cells[1:]])


if __name__ == "__main__":
    main()

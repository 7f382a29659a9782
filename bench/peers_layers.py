#!/usr/bin/env python3
"""Layers around matmuls on a GPU beside torch eager and torch.compile: norm and linear, feed-forward, a language model's loss, int8, f32.

    python3 bench/peers_layers.py [--commit HASH] [--parts norm_linear ffn loss bytes wide]

Needs torch and the package `deuteron`. Ours and torch's run in this process, in turn, as CUDA graphs over rotating operands; medians of
five rounds. A loss with its gradient is timed as calls from Python, with the memory that it takes above operands and gradients.

Rows go to h200-layers.csv in the folder named by OUT (default ./out).
"""

import statistics

import torch
from torch.nn import functional

import deuteron
import measuring

# Operands of this many bytes together do not stay in the cache.
ROTATED = 200e6
COLUMNS = ["layer", "rows", "inner", "columns", "dtype", "ours_us", "torch_us", "compile_us", "other", "other_us", "ours_mib", "torch_mib", "compile_mib"]


def make(*sizes, dtype=torch.bfloat16):
    if dtype == torch.int8:
        return torch.randint(-128, 128, sizes, device="cuda", dtype=dtype)
    return torch.randn(*sizes, device="cuda").to(dtype)


def graphs(functions, operands):
    """Median microseconds of each function, recorded over the operands; None where one cannot run."""
    found = {}
    for name, function in functions.items():
        try:
            found[name] = measuring.Recorded([lambda f=function, given=given: f(*given) for given in operands])
        except Exception as error:  # a peer that fails leaves its cell empty
            print(f"  {name}: {type(error).__name__}: {str(error)[:120]}")
    times = {name: [] for name in found}
    for _ in range(5):
        for name, graph in found.items():
            times[name].append(graph.microseconds())
    return {name: statistics.median(every) for name, every in times.items()}


def operand_sets(*makers):
    one = [maker() for maker in makers]
    bytes_each = sum(tensor.numel() * tensor.element_size() for tensor in one)
    more = min(16, max(2, round(ROTATED / bytes_each))) - 1
    return [one] + [[maker() for maker in makers] for _ in range(more)]


def compared(ours, theirs, operands, **others):
    torch._dynamo.reset()
    times = graphs({"ours": ours, "torch": theirs, "compile": torch.compile(theirs), **others}, operands)
    torch.cuda.empty_cache()
    return times


def norm_linear(add):
    for rows in (1024, 8192):
        inner, columns = 768, 2304
        sets = operand_sets(lambda: make(rows, inner), lambda: make(inner, columns), lambda: make(columns), lambda: make(inner), lambda: make(inner))
        theirs = lambda x, weight, bias, w, b: torch.addmm(bias, functional.layer_norm(x, w.shape, w, b), weight)
        add(layer="norm_linear", rows=rows, inner=inner, columns=columns, dtype="bf16", times=compared(deuteron.norm_linear, theirs, sets))


def ffn(add):
    for rows in (1, 8, 16, 32, 64, 256, 1024, 8192):
        inner, hidden = 768, 3072
        sets = operand_sets(lambda: make(rows, inner), lambda: make(inner, hidden), lambda: make(hidden), lambda: make(hidden, inner),
                            lambda: make(inner), lambda: make(inner), lambda: make(inner))
        ours = lambda x, u, c, d, e, w, b: deuteron.ffn(x, u, c, d, e, w=w, b=b, act="gelu_tanh")

        def theirs(x, u, c, d, e, w, b):
            h = functional.gelu(torch.addmm(c, functional.layer_norm(x, w.shape, w, b), u), approximate="tanh")
            return x + torch.addmm(e, h, d)

        add(layer="ffn", rows=rows, inner=inner, columns=hidden, dtype="bf16", times=compared(ours, theirs, sets))


def workspaces():
    """Bytes of GPU memory that our programs hold besides torch's."""
    return sum(every["workspace_bytes"] for device, every in deuteron.memory_stats().items() if device.startswith("cuda"))


def loss(add):
    """Forward, and forward with gradients, as calls: the median of rounds of events, and the peak above what is kept."""
    inner, classes = 768, 50257
    for rows in (8192, 32768):
        x, w = make(rows, inner).mul_(0.05).requires_grad_(), make(classes, inner).mul_(0.05).requires_grad_()
        targets = torch.randint(0, classes, (rows,), device="cuda")
        plain = lambda: functional.cross_entropy(x @ w.t(), targets)
        torch._dynamo.reset()
        calls = {"ours": lambda: deuteron.linear_cross_entropy(x, w, targets), "torch": plain, "compile": torch.compile(plain)}
        for backward in (False, True):
            times, peaks = {}, {}
            for name, call in calls.items():
                def step():
                    if not backward:
                        with torch.no_grad():
                            return call()
                    x.grad = w.grad = None
                    return call().backward()

                try:
                    for _ in range(3):
                        step()
                    torch.cuda.synchronize()
                    x.grad = w.grad = None
                    deuteron.empty_cache()
                    torch.cuda.empty_cache()
                    # Programs that were recorded in the graphs of earlier parts keep workspaces of their own.
                    kept, held = torch.cuda.memory_allocated(), workspaces()
                    torch.cuda.reset_peak_memory_stats()
                    step()
                    torch.cuda.synchronize()
                    grads = (x.numel() + w.numel()) * 2 if backward else 0
                    peaks[name] = (torch.cuda.max_memory_allocated() - kept - grads + workspaces() - held) / 2**20
                    rounds = []
                    for _ in range(5):
                        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        start.record()
                        for _ in range(3):
                            step()
                        end.record()
                        torch.cuda.synchronize()
                        rounds.append(start.elapsed_time(end) / 3 * 1e3)
                    times[name] = statistics.median(rounds)
                except torch.OutOfMemoryError:
                    print(f"  {name}: out of memory")
            name = "linear_cross_entropy" + (" and gradient" if backward else "")
            add(layer=name, rows=rows, inner=inner, columns=classes, dtype="bf16", times=times, peaks=peaks)
        del x, w, targets
        torch.cuda.empty_cache()


def bytes_(add):
    """Products of bytes with scales and an activation, beside torch's product alone."""
    for rows, inner, columns in ((8192, 768, 3072), (4096, 4096, 4096)):
        text = f"""x = input i8[{rows},{inner}] ; w = weight i8[{columns},{inner}] ; r = input f32[{rows},1] ; s = weight f32[{columns}]
            p = matmul x w transpose_b ; a = mul p r ; b = mul a s ; c = cast b bf16 ; y = gelu c kind=tanh ; out y"""
        program = deuteron.Program(text)
        sets = operand_sets(lambda: make(rows, inner, dtype=torch.int8), lambda: make(columns, inner, dtype=torch.int8),
                            lambda: make(rows, 1, dtype=torch.float32).abs(), lambda: make(columns, dtype=torch.float32).abs())

        def theirs(x, w, r, s):
            return functional.gelu((torch._int_mm(x, w.t()) * r * s).to(torch.bfloat16), approximate="tanh")

        alone = lambda x, w, r, s: torch._int_mm(x, w.t())
        times = compared(lambda *given: program(*given), theirs, sets, alone=alone)
        add(layer="int8 linear, scales, gelu", rows=rows, inner=inner, columns=columns, dtype="i8", times=times, other="_int_mm alone", other_us=times.get("alone"))


def wide(add):
    """f32 within its own bound: torch's are plain f32, and one pass of TF32 beside them, which is not."""
    for size in (2048, 4096):
        program = deuteron.Program(f"x = input f32[{size},{size}] ; w = weight f32[{size},{size}] ; y = matmul x w ; out y")
        sets = operand_sets(*(2 * [lambda: make(size, size, dtype=torch.float32)]))
        torch.backends.cuda.matmul.allow_tf32 = False
        times = compared(lambda x, w: program(x, w), torch.matmul, sets)
        torch.backends.cuda.matmul.allow_tf32 = True
        tf32 = graphs({"tf32": torch.matmul}, sets).get("tf32")
        torch.backends.cuda.matmul.allow_tf32 = False
        add(layer="matmul", rows=size, inner=size, columns=size, dtype="f32", times=times, other="one pass of TF32", other_us=tf32)


PARTS = {"norm_linear": norm_linear, "ffn": ffn, "bytes": bytes_, "wide": wide, "loss": loss}


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    arguments = parser.parse_args()
    table = measuring.Table("h200-layers.csv", COLUMNS, **measuring.gpu(), torch=torch.__version__, commit=arguments.commit)
    print(f"{'microseconds':<48}{'ours':>11}{'torch':>11}{'compile':>11}  best torch / ours")

    def add(times, peaks=None, **cells):
        peaks = peaks or {}
        row = cells | {f"{name}_us": round(us, 2) for name, us in times.items() if name in ("ours", "torch", "compile")}
        row |= {f"{name}_mib": round(mib, 1) for name, mib in peaks.items()}
        table.add(row)
        shown = "".join(f"{times[name]:11.1f}" if name in times else f"{'-':>11}" for name in ("ours", "torch", "compile"))
        best = min((times[name] for name in ("torch", "compile") if name in times), default=None)
        ratio = f"{best / times['ours']:.2f}" if best and "ours" in times else "-"
        beside = f", {cells['other']} {cells['other_us']:.1f}" if cells.get("other_us") else ""
        memory = f", MiB {', '.join(f'{name} {mib:.0f}' for name, mib in peaks.items())}" if peaks else ""
        name = f"{cells['layer']} {cells['rows']}x{cells['inner']}x{cells['columns']} {cells['dtype']}"
        print(f"{name:<48}{shown}  {ratio}{beside}{memory}", flush=True)

    for part in arguments.parts:
        PARTS[part](add)


if __name__ == "__main__":
    main()

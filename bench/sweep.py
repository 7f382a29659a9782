#!/usr/bin/env python3
"""Calls of the Python package at random ops, sizes, dtypes, directions and layouts, beside PyTorch: what nobody can tune for.

    python3 bench/sweep.py --seed N [--cases 300] [--device cuda|cpu] [--no-compile] [--seconds S]

Sizes are drawn log-uniformly, so that each order of magnitude comes as often as another. Peers are torch eager, torch.compile and, for
attention on a GPU, cuDNN, each in turn with ours: as CUDA graphs over rotating operands on a GPU, as calls on a CPU. Every result is
compared with the same formula in float64: an element is wrong where it is off by more than four times the largest error of torch eager and
two roundings of the largest number. Cases below 0.95 times the fastest peer are listed, with the share of copy speed that ours reaches.

Rows go to sweep-DEVICE.csv in the folder named by OUT (default ./out). The exit code is 1 where a result is wrong.
"""

import argparse
import contextlib
import math
import random
import statistics
import sys
import time

import deuteron
import torch
from torch.nn import functional

import measuring

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ROUNDING = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
# Elements of the largest operand, from and to, and columns of a row, at most.
ELEMENTS = {"cuda": (1 << 10, 1 << 26), "cpu": (1 << 8, 1 << 22)}
COLUMNS = {"cuda": 1 << 18, "cpu": 1 << 16}
# Operands of so many bytes together do not stay in the cache of a GPU.
ROTATED = 200e6
ROUNDS = 5


def normed(x, w, b=None):
    return functional.layer_norm(x, x.shape[-1:], w, b)


def rms(x, w):
    return functional.rms_norm(x, x.shape[-1:], w, 1e-5)


def glu(x, g):
    return functional.silu(x) * g


# Operands (x: rows by columns, w: one row), ours, torch's.
ROW_OPS = {
    "softmax": ("x", deuteron.softmax, lambda x: x.softmax(-1)),
    "act": ("x", deuteron.act, functional.gelu),
    "add_act": ("xx", deuteron.add_act, lambda x, r: functional.gelu(x + r)),
    "bias_act": ("xw", deuteron.bias_act, lambda x, b: functional.gelu(x + b)),
    "swiglu": ("xx", deuteron.swiglu, glu),
    "layer_norm": ("xww", deuteron.layer_norm, normed),
    "rms_norm": ("xw", deuteron.rms_norm, rms),
    "norm_act": ("xww", deuteron.norm_act, lambda x, w, b: functional.gelu(normed(x, w, b))),
    "add_norm": ("xxww", lambda *all: deuteron.add_norm(*all)[0], lambda x, r, w, b: normed(x + r, w, b)),
}
LAYOUTS = ["contiguous", "rows of a wider tensor", "an odd start"]


class Case:
    """A drawn call: its name, and makers of operands and of calls."""

    def __init__(self, draw, device):
        self.device, self.dtype = device, draw.choice(list(DTYPES))
        self.backward, self.layout = draw.random() < 0.4, draw.choice(LAYOUTS)
        self.op = draw.choice([*ROW_OPS, "attention", "attention"])
        low, high = ELEMENTS[device]
        elements = math.exp(draw.uniform(math.log(low), math.log(high)))
        if self.op == "attention":
            width = draw.choice([16, 32, 40, 64, 80, 96, 128])
            length = max(1, round(math.exp(draw.uniform(math.log(16), math.log(4096 if device == "cuda" else 512)))))
            heads = max(1, min(64, round(elements / width / length)))
            self.mask, self.shapes = draw.choice([None, "causal"]), [(1, heads, length, width)] * 3
            self.layout = "contiguous"
        else:
            columns = max(1, round(math.exp(draw.uniform(0.0, math.log(min(elements, COLUMNS[device]))))))
            rows = max(1, round(elements / columns))
            self.shapes = [(rows, columns) if letter == "x" else (columns,) for letter in ROW_OPS[self.op][0]]
        self.seed = draw.randrange(1 << 30)

    def __str__(self):
        sizes = "x".join(map(str, self.shapes[0]))
        mask = f" {self.mask or 'full'}" if self.op == "attention" else ""
        return f"{self.op}{mask} {sizes} {self.dtype} {'backward' if self.backward else 'forward'}, {self.layout}"

    def operands(self, turn):
        """Those of a turn, and a gradient of the result."""
        generator = torch.Generator(self.device).manual_seed(self.seed + turn)
        make = lambda shape: torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32).to(DTYPES[self.dtype])
        return [self.placed(make, shape).requires_grad_(self.backward) for shape in self.shapes], make(self.shapes[0])

    def placed(self, make, shape):
        if len(shape) < 2 or self.layout == LAYOUTS[0]:
            return make(shape)
        if self.layout == LAYOUTS[1]:
            return make((shape[0], shape[1] + 8))[:, : shape[1]].detach()
        return make((math.prod(shape) + 1,))[1:].view(shape).detach()

    def functions(self, compiles):
        """Ours and the peers', by name."""
        if self.op == "attention":
            causal = self.mask == "causal"
            ours = lambda q, k, v: deuteron.attention(q, k, v, mask=self.mask)
            eager = lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            _, ours, eager = ROW_OPS[self.op]
        found = {"ours": ours, "eager": eager}
        if compiles:
            torch._dynamo.reset()
            found["compile"] = torch.compile(eager, dynamic=False)
        if self.op == "attention" and self.device == "cuda" and self.dtype != "f32":
            found["cudnn"] = on_cudnn(eager)
        return found

    def call(self, function, operands, gradient):
        result = function(*operands)
        return torch.autograd.grad(result, operands, gradient) if self.backward else [result]

    def bytes(self):
        """Of all operands and results once: what no kernel can avoid."""
        size = DTYPES[self.dtype].itemsize
        operands = sum(map(math.prod, self.shapes))
        return size * (2 * operands if self.backward else operands) + size * math.prod(self.shapes[0])

    def reference(self, operands, gradient):
        wide = [operand.detach().double().requires_grad_(self.backward) for operand in operands]
        if self.op != "attention":
            return self.call(ROW_OPS[self.op][2], wide, gradient.double())
        def attention(q, k, v):
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            if self.mask == "causal":
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
            return scores.softmax(-1) @ v
        return self.call(attention, wide, gradient.double())


def on_cudnn(function):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(*operands):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return function(*operands)
    return call


def worst(case, functions):
    """The largest error of ours, as a share of what is allowed."""
    operands, gradient = case.operands(0)
    exact = case.reference(operands, gradient)
    ours, eager = (case.call(functions[name], operands, gradient) for name in ("ours", "eager"))
    share = 0.0
    for got, theirs, right in zip(ours, eager, exact):
        off = lambda x: (x.detach().double() - right).abs().max().item() if right.numel() else 0.0
        largest = right.abs().max().item() if right.numel() else 0.0
        allowed = 4.0 * off(theirs) + 2.0 * ROUNDING[case.dtype] * largest
        error = off(got)
        share = max(share, error / allowed if allowed > 0.0 else (0.0 if error == 0.0 else math.inf))
        share = math.inf if math.isnan(error) else share
    return share


def timed(case, functions):
    """Microseconds of each function, medians of rounds in turn; a peer that refuses the call has none."""
    sets = 1
    if case.device == "cuda":
        sets = min(16, max(1, round(ROTATED / max(1, case.bytes()))))
    given = [case.operands(turn) for turn in range(sets)]
    clocks = {}
    for name, function in functions.items():
        calls = [lambda f=function, all=all: case.call(f, *all) for all in given]
        with contextlib.suppress(RuntimeError) if name == "cudnn" else contextlib.nullcontext():
            if case.device == "cuda":
                clocks[name] = measuring.Recorded(calls).microseconds
            else:
                clocks[name] = lambda call=calls[0]: 1e3 * measuring.milliseconds(call, seconds=0.05)
    times = [{name: clock() for name, clock in clocks.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(row[name] for row in times) for name in clocks}


def copy_speed(device):
    """Bytes that a copy reads and writes, per microsecond."""
    x = torch.zeros(ELEMENTS[device][1] * 2, device=device)
    y = torch.empty_like(x)
    if device == "cuda":
        us = measuring.Recorded([lambda: y.copy_(x)]).microseconds()
    else:
        us = 1e3 * measuring.milliseconds(lambda: y.copy_(x))
    return 2 * x.nbytes / us


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="draw other cases with another number")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes seconds a case")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further case after this")
    parser.add_argument("--commit", default="", help="written into the rows")
    arguments = parser.parse_args()
    draw, begin = random.Random(arguments.seed), time.monotonic()
    columns = "seed case op shape dtype direction layout ours_us eager_us compile_us cudnn_us best_over_ours of_copy error".split()
    table = measuring.Table(f"sweep-{arguments.device}.csv", columns, torch=torch.__version__, commit=arguments.commit or measuring.head())
    copy = copy_speed(arguments.device)
    ratios, slow, wrong = [], [], []
    for number in range(arguments.cases):
        case = Case(draw, arguments.device)
        if time.monotonic() - begin > arguments.seconds:
            print(f"time is up: {number} of {arguments.cases} cases")
            break
        functions = case.functions(not arguments.no_compile)
        error = worst(case, functions)
        times = timed(case, functions)
        best = min((name for name in times if name != "ours"), key=times.get)
        ratio, of_copy = times[best] / times["ours"], case.bytes() / times["ours"] / copy
        ratios.append(ratio)
        line = f"{number:4} {case}: {times['ours']:.1f} us, {best} {times[best]:.1f}, {ratio:.2f}x, {of_copy:.0%} of copy speed"
        if error > 1.0:
            wrong.append(f"{line}, {error:.2f} of the error allowed")
        if ratio < 0.95:
            slow.append(line)
        cells = [times.get(name) for name in ("ours", "eager", "compile", "cudnn")]
        shape, direction = "x".join(map(str, case.shapes[0])), "backward" if case.backward else "forward"
        rounded = [f"{cell:.2f}" if cell is not None else "" for cell in cells]
        table.add([arguments.seed, number, case.op, shape, case.dtype, direction, case.layout, *rounded, f"{ratio:.3f}", f"{of_copy:.3f}", f"{error:.3f}"])
        print(line, flush=True)
    report(ratios, slow, wrong, copy)
    sys.exit(bool(wrong))


def report(ratios, slow, wrong, copy):
    if not ratios:
        return
    print(f"\nBelow 0.95 times the fastest peer, {len(slow)} of {len(ratios)}:", *(slow or ["none"]), sep="\n")
    print(f"\nWrong, {len(wrong)}:", *(wrong or ["none"]), sep="\n")
    ordered = sorted(ratios)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    print(f"\nFastest peer over ours: median {statistics.median(ratios):.2f}, 5th percentile {at(0.05):.2f}, least {ordered[0]:.2f}, "
          f"geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.2f}; a copy moves {copy / 1e3:.1f} GB/s")


if __name__ == "__main__":
    main()

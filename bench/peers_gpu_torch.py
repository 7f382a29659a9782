"""The peers of peers_gpu.py: torch eager, torch.compile and Liger in processes that own lines, compile and check them,
and time them when asked. Requests and replies are lines of JSON on standard input and output."""

import contextlib
import fcntl
import gc
import json
import math
import os
import statistics
import sys
import time
import types

import torch
from torch.nn import functional

from peers_gpu import OPERANDS, Line

EPSILON = 1e-5
DROPPED = 0.1
VOCABULARY = 50257
MOST_SETS = 64


def functions():
    """What each op computes, as a user of torch writes it. Each returns a tuple."""

    def norm(x, w, b):
        return functional.layer_norm(x, w.shape, w, b, EPSILON)

    def gelu(x):
        return functional.gelu(x, approximate="tanh")

    def dropout(x):
        return functional.dropout(x, DROPPED, training=True)

    def norm_quantize(x, w, b):
        y = norm(x, w, b).float()
        scale = y.abs().amax(-1, keepdim=True) / 127
        return (y / scale).round().to(torch.int8), scale

    def add_norm(x, r, w, b):
        s = x + r
        return norm(s, w, b), s

    def dropout_add_norm(x, bias, r, w, b):
        s = r + dropout(x + bias)
        return norm(s, w, b), s

    def embed_norm(tokens, wte, wpe, w, b):
        s = functional.embedding(tokens, wte) + wpe[:tokens.shape[0]]
        return norm(s, w, b), s

    return {
        "norm_act": lambda x, w, b: (gelu(norm(x, w, b)),),
        "layer_norm": lambda x, w, b: (norm(x, w, b),),
        "rms_norm": lambda x, w: (functional.rms_norm(x, w.shape, w, EPSILON),),
        "add_norm": add_norm,
        "norm_quantize": norm_quantize,
        "bias_dropout_add": lambda x, b, r: (dropout(x + b) + r,),
        "swiglu": lambda x, g: (functional.silu(x) * g,),
        "softmax": lambda x: (functional.softmax(x, -1),),
        "bias_act": lambda x, b: (gelu(x + b),),
        "dropout_add_norm": dropout_add_norm,
        "embed_norm": embed_norm,
        "add_act": lambda x, r: (gelu(x + r),),
    }


def liger_function(line):
    """Liger's function for the same result, if there is one. Its SwiGLU backward overwrites its operands: left out."""
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.softmax import LigerSoftmaxFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return None
    known = {
        "layer_norm": lambda x, w, b: (LigerLayerNormFunction.apply(x, w, b, EPSILON),),
        "rms_norm": lambda x, w: (LigerRMSNormFunction.apply(x, w, EPSILON),),
        "softmax": lambda x: (LigerSoftmaxFunction.apply(x),),
    }
    if not line.backward:
        known["swiglu"] = lambda x, g: (LigerSiLUMulFunction.apply(x, g),)
    return known.get(line.op)


def contenders(line):
    """Each peer's function of a line."""
    function = functions()[line.op]
    # The compiler keeps its results by code object. One of its own keeps the guards of other sizes out of the calls.
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__,
                             closure=function.__closure__)
    peers = {"torch eager": function, "torch.compile": torch.compile(own, fullgraph=True, dynamic=False),
             "Liger": liger_function(line)}
    return {name: peer for name, peer in peers.items() if peer}


def make_set(line, device):
    """One set of operands, and the gradients that come in."""
    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[line.dtype]
    shapes = {"w": [line.cols], "b": [line.cols], "bias": [line.cols], "wte": [VOCABULARY, line.cols],
              "wpe": [max(line.rows, 1024), line.cols]}
    operands = {}
    for name in OPERANDS[line.op].split():
        if name == "tokens":
            operands[name] = torch.randint(VOCABULARY, [line.rows], device=device, dtype=torch.int32)
            continue
        shape = shapes.get(name, [line.rows, line.cols])
        operands[name] = torch.randn(shape, device=device, dtype=dtype).add_(name == "w").requires_grad_(line.backward)
    outputs = 2 if line.op == "add_norm" else 1
    incoming = [torch.randn(line.rows, line.cols, device=device, dtype=dtype) for _ in range(outputs * line.backward)]
    return operands, incoming


def call(function, operands, incoming):
    """Results and gradients; both are held by the caller, as training holds them."""
    results = function(*operands.values())
    return results, torch.autograd.grad(results, list(operands.values()), incoming) if incoming else ()


def check(line, operands, incoming, results, gradients):
    """Compares everything with formulas in float64. Raises where a difference is more than rounding can make."""
    x = {name: tensor.detach().double().requires_grad_(line.backward) if tensor.is_floating_point() else tensor
         for name, tensor in operands.items()}
    got = [result.detach().double() for result in results]
    unit = torch.finfo(next(t for t in operands.values() if t.is_floating_point()).dtype).eps

    def norm(s):
        centred = s - s.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + EPSILON).sqrt() * x["w"] + x["b"]

    def gelu(s):
        return 0.5 * s * (1 + torch.tanh(math.sqrt(2 / math.pi) * (s + 0.044715 * s**3)))

    def dropout(s, seen, incoming_gradient=None):
        """Which elements were dropped is the peer's choice; how many is not. It is seen in what came out."""
        kept_value = (s if incoming_gradient is None else incoming_gradient) / (1 - DROPPED)
        kept = seen.abs() > 0.5 * kept_value.abs()
        share, spread = kept.double().mean().item(), math.sqrt(DROPPED * (1 - DROPPED) / kept.numel())
        if abs(share - (1 - DROPPED)) > 6 * spread + 0.01:
            raise ValueError(f"dropout kept {share:.4f}, expected {1 - DROPPED}")
        return s * kept / (1 - DROPPED)

    def bias_dropout_add():
        # A gradient tells what was dropped even where the value is zero.
        seen = (gradients[0].double(), incoming[0].double()) if gradients else (got[0] - x["r"], None)
        return dropout(x["x"] + x["b"], *seen) + x["r"]

    def embedded():
        return x["wte"][x["tokens"].long()] + x["wpe"][:line.rows]

    if line.op == "norm_quantize":
        y = norm(x["x"])
        scale = y.abs().amax(-1, keepdim=True) / 127
        far = (got[0] - y / scale).abs().max().item(), ((got[1] - scale) / scale).abs().max().item()
        # Half a step of rounding, and what the storage type does to y and to the largest of its row.
        if not (far[0] <= 0.5 + 127 * unit and far[1] <= 2 * unit):
            raise ValueError(f"int8 rows are {far[0]:.3f} steps off, scales {far[1]:.2e}")
        return
    wanted = {
        "norm_act": lambda: [gelu(norm(x["x"]))],
        "layer_norm": lambda: [norm(x["x"])],
        "rms_norm": lambda: [x["x"] / (x["x"].square().mean(-1, keepdim=True) + EPSILON).sqrt() * x["w"]],
        "add_norm": lambda: [norm(s := x["x"] + x["r"]), s],
        "bias_dropout_add": lambda: [bias_dropout_add()],
        "swiglu": lambda: [x["x"] / (1 + torch.exp(-x["x"])) * x["g"]],
        "softmax": lambda: [(e := torch.exp(x["x"])) / e.sum(-1, keepdim=True)],
        "bias_act": lambda: [gelu(x["x"] + x["b"])],
        "dropout_add_norm": lambda: [norm(s := x["r"] + dropout(x["x"] + x["bias"], got[1] - x["r"])), s],
        "embed_norm": lambda: [norm(s := embedded()), s],
        "add_act": lambda: [gelu(x["x"] + x["r"])],
    }[line.op]()
    if gradients:
        exact = torch.autograd.grad(wanted, list(x.values()), [gradient.double() for gradient in incoming])
        wanted, got = [*wanted, *exact], [*got, *(gradient.double() for gradient in gradients)]
    # Values pass through a few roundings to the storage type, more of them on the way back.
    roundings = 16 if gradients else 8
    for place, (mine, exact) in enumerate(zip(got, wanted, strict=True)):
        off, size = (mine - exact).detach(), exact.detach()
        largest, typical = off.abs().max().item(), off.square().mean().sqrt().item()
        bounds = roundings * unit * size.abs().max().item(), roundings / 2 * unit * size.square().mean().sqrt().item()
        if not (largest <= bounds[0] and typical <= bounds[1]):  # NaN fails too
            raise ValueError(f"result {place} is off by {largest:.2e} (bound {bounds[0]:.2e}), "
                             f"typically {typical:.2e} (bound {bounds[1]:.2e})")


class Prepared:
    """A peer ready to be timed: operands in turn, and the same calls recorded as a graph."""

    def __init__(self, function, sets, device):
        self.function, self.sets, self.device = function, sets, device
        # A result stays until the same set comes again, so results take turns in memory as operands do.
        self.held = [None] * len(sets)
        self.graph, self.recorded = None, len(sets) * math.ceil(16 / len(sets))
        self.run(len(sets))
        if device == "cpu":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run(len(sets))
        torch.cuda.synchronize()
        self.held = [None] * len(sets)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(self.recorded)
        self.graph, self.graph_held = graph, self.held
        self.held = [None] * len(sets)

    def run(self, calls):
        with torch.inference_mode(not self.sets[0][1]):
            for index in range(calls):
                place = index % len(self.sets)
                self.held[place] = call(self.function, *self.sets[place])

    def plain(self, milliseconds):
        """Microseconds of a call, wall time, three samples."""
        samples = []
        calls = len(self.sets)
        while len(samples) < 3:
            synchronize(self.device)
            start = time.perf_counter()
            self.run(calls)
            synchronize(self.device)
            seconds = time.perf_counter() - start
            if not samples and calls < 1 << 14 and seconds * 1e3 < milliseconds / 6:
                calls *= 2  # still warming up, and too short to be timed well
                continue
            samples.append(seconds * 1e6 / calls)
        return statistics.median(samples)

    def replayed(self, milliseconds):
        """Microseconds of a call inside a replay. All replays are queued before the first one is waited for."""
        if not self.graph:
            return self.plain(milliseconds)

        def replay(times):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
            marks[0].record()
            for mark in marks[1:]:
                self.graph.replay()
                mark.record()
            torch.cuda.synchronize()
            return [before.elapsed_time(after) for before, after in zip(marks, marks[1:])]

        warm = min(replay(3))
        times = replay(2 + min(max(5, int(milliseconds / warm)), 200))[2:]
        return statistics.median(times) * 1e3 / self.recorded


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def size_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Owner:
    """The process that owns some lines."""

    def __init__(self, device, lock):
        self.device, self.lock = device, lock
        self.functions, self.prepared = {}, {}
        self.cache = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 1 << 20
        with contextlib.suppress(ImportError, AttributeError):
            # Compilers that try several kernels must not do so while others use the GPU.
            from torch._inductor.runtime.triton_heuristics import CachingAutotuner
            tried = CachingAutotuner.benchmark_all_configs

            def alone(*arguments, **named):
                with self.turn():
                    return tried(*arguments, **named)

            CachingAutotuner.benchmark_all_configs = alone

    @contextlib.contextmanager
    def turn(self):
        with open(self.lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def compile(self, line):
        """Compiles each peer of a line, checks it, and says which cannot be timed."""
        refused = {}
        self.functions[line] = {}
        for name, function in contenders(line).items():
            try:
                operands, incoming = make_set(line, self.device)
                with torch.inference_mode(not incoming):
                    outcome = call(function, operands, incoming)
                with self.turn():
                    check(line, operands, incoming, *outcome)
                self.functions[line][name] = function
            except Exception as error:  # a peer that fails is left out, and the run says so
                refused[name] = f"{type(error).__name__}: {str(error)[:300]}"
            operands = incoming = outcome = None
            self.give_back()
        return refused

    def prepare(self, line):
        """Makes sets of operands and records graphs; says which peers cannot be timed."""
        refused = {}
        self.prepared[line] = {}
        sets = []
        for name, function in self.functions[line].items():
            try:
                sets = sets or self.make_sets(line, function)
                self.prepared[line][name] = Prepared(function, sets, self.device)
            except Exception as error:
                refused[name] = f"{type(error).__name__}: {str(error)[:300]}"
        return refused

    def make_sets(self, line, function):
        operands, incoming = make_set(line, self.device)
        with torch.inference_mode(not incoming):
            results, gradients = call(function, operands, incoming)
        bytes_of_set = size_of([*operands.values(), *incoming, *results, *gradients])
        count = min(max(2, math.ceil(4 * self.cache / bytes_of_set)), MOST_SETS)
        return [(operands, incoming), *(make_set(line, self.device) for _ in range(count - 1))]

    def time(self, line, milliseconds, turn):
        peers = list(self.prepared.get(line, {}).items())
        start = turn % max(1, len(peers))
        return {name: [peer.plain(milliseconds), peer.replayed(milliseconds)]
                for name, peer in peers[start:] + peers[:start]}

    def release(self):
        self.prepared.clear()
        self.give_back()

    def give_back(self):
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def serve(device, lock):
    # Libraries that print must not speak on the pipe.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    owner = Owner(device, lock)
    for request in map(json.loads, sys.stdin):
        do, lines = request.pop("do"), [Line(*line) for line in request.pop("lines", [])]
        if do == "release":
            reply = owner.release()
        else:
            reply = [getattr(owner, do)(line, **request) for line in lines]
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])

#!/usr/bin/env python3
"""Attention of heads that share keys, and of other widths than 64, in bf16 on a GPU beside torch's flash and cuDNN kernels.

    python3 bench/peers_heads.py [--commit HASH] [--rounds N]

Needs torch and the package `deuteron`. All are called from Python, in turn: forward as CUDA graphs over rotating operands, forward with
gradient as calls one after another, which at these sizes take longer than the host. Medians of all rounds. The error is the largest
difference of a result or a gradient from f32 arithmetic on the same operands, over the largest value of that.

Rows go to h200-heads.csv in the folder named by OUT (default ./out).
"""

import statistics

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import deuteron
import measuring

# Sequences, heads, heads of keys, positions, features, whether causal.
LINES = [
    (2, 32, 8, 4096, 128, True), (8, 16, 4, 1024, 64, True), (4, 24, 3, 1500, 128, True), (2, 16, 2, 2048, 96, False),
    (8, 16, 16, 1024, 80, True), (8, 16, 16, 1024, 96, True), (8, 16, 16, 1024, 128, True), (8, 16, 16, 1024, 128, False),
    (8, 16, 16, 1024, 32, True), (8, 16, 16, 1024, 192, True), (8, 16, 16, 1024, 256, True), (1, 16, 16, 4096, 128, True),
]
# Rounding of bf16 values and of weights leaves errors of one or two units of the largest value, which is 2^-8 of it.
BOUND = 8 * 2.0**-8
# Operands of this many bytes together do not stay in the cache.
ROTATED = 200e6


def peer(backend, causal):
    def call(q, k, v):
        with sdpa_kernel([backend]):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return call


def exact(q, k, v, causal):
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def error(call, operands, slope, causal):
    """Of the result and the three gradients, over the first sequence."""
    def run(function, dtype):
        given = [tensor[:1].detach().to(dtype).requires_grad_() for tensor in operands]
        result = function(*given)
        result.backward(slope[:1].to(dtype))
        return [result, *(tensor.grad for tensor in given)]

    with sdpa_kernel([SDPBackend.MATH]):
        expected = run(lambda *given: exact(*given, causal), torch.float32)
    found = run(call, torch.bfloat16)
    return max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected))


def times(calls, sets, slope, rounds):
    """{(contender, direction): microseconds}."""
    recorded = {}
    with torch.no_grad():
        for name, call in calls.items():
            recorded[name] = measuring.Recorded([lambda c=call, given=given: c(*given) for given in sets])
    found = {}
    for _ in range(rounds):
        for name, call in calls.items():
            found.setdefault((name, "forward"), []).append(recorded[name].microseconds())
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for warm in (True, False):
                start.record()
                for given in sets:
                    torch.autograd.grad(call(*given), given, slope)
                end.record()
            torch.cuda.synchronize()
            found.setdefault((name, "forward and gradient"), []).append(start.elapsed_time(end) / len(sets) * 1e3)
    return {key: statistics.median(every) for key, every in found.items()}


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    columns = "direction batch heads key_heads positions width causal us flash_us cudnn_us best_over_ours error cudnn_error".split()
    table = measuring.Table("h200-heads.csv", columns, device=torch.cuda.get_device_name(), torch=torch.__version__, commit=arguments.commit)
    print(f"{'bf16, microseconds':<56}{'ours':>9}{'flash':>9}{'cuDNN':>9}  best / ours   error, cuDNN's")
    for line in LINES:
        batch, heads, key_heads, positions, width, causal = line
        def make(count):
            return torch.randn(batch, count, positions, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
        bytes_of_set = batch * (heads + key_heads) * positions * width * 4
        sets = [[make(heads), make(key_heads), make(key_heads)] for _ in range(min(32, max(2, round(ROTATED / bytes_of_set))))]
        slope = torch.randn(batch, heads, positions, width, device="cuda", dtype=torch.bfloat16)
        calls = {"ours": lambda q, k, v: deuteron.attention(q, k, v, "causal" if causal else "full")}
        calls |= {name: peer(backend, causal) for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION))}
        errors = {}
        for name in list(calls):
            try:
                errors[name] = error(calls[name], sets[0], slope, causal)
            except RuntimeError as failure:  # a peer that refuses leaves its cell empty
                print(f"  {name}: {str(failure)[:100]}")
                del calls[name]
                continue
            if not errors[name] < BOUND:
                if name == "ours":
                    raise measuring.Failure(f"{line}: our error is {errors[name]:.1e}, more than {BOUND:.1e}")
                print(f"  {name}: left out, its error is {errors[name]:.1e}")
                del calls[name]
        found = times(calls, sets, slope, arguments.rounds)
        for direction in ("forward", "forward and gradient"):
            us = found["ours", direction]
            peers = {name: found.get((name, direction)) for name in ("flash", "cudnn")}
            best = min((value for value in peers.values() if value), default=float("nan"))
            table.add([direction, *line, round(us, 1), *(round(value, 1) if value else "" for value in peers.values()), round(best / us, 3),
                       *(f"{errors[name]:.2e}" if name in errors else "" for name in ("ours", "cudnn"))])
            cells = "".join(f"{value:9.1f}" if value else f"{'':9}" for value in (us, *peers.values()))
            name = f"{direction} B{batch} H{heads}/{key_heads} S{positions} D{width} {'causal' if causal else 'full'}"
            print(f"{name:<56}{cells}  {best / us:11.2f}   {errors['ours']:.1e}, {errors.get('cudnn', float('nan')):.1e}", flush=True)
        del sets, slope, found
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

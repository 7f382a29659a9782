#!/usr/bin/env python3
"""The Python package beside PyTorch on a GPU: calls of ops, GPT-2 of Hugging Face patched and not, generation, training.

    python3 bench/peers_python.py [--parts ops forward generate train] [--out FILE]

Needs torch, transformers and the package `deuteron`. Everything is in bf16 and in one run; times are medians. GPT-2 has the shape of
124M and seeded weights. A table comes last.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import statistics
import time
from functools import partial
from typing import Any, Callable

import torch

import deuteron

ROWS: list[dict[str, Any]] = []


def walls(contenders: dict[str, Callable[[], Any]], calls: int, rounds: int, warm: int = 3) -> dict[str, float]:
    """Microseconds a call of each, calls back to back and a wait at the end: medians of rounds that take turns, as the speed of a
    host drifts."""
    for function in contenders.values():
        for _ in range(warm):
            function()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, function in contenders.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: 1e6 * statistics.median(all_of) for name, all_of in times.items()}


def host(function: Callable[[], Any], calls: int = 200, rounds: int = 40) -> float:
    """Microseconds of host time a call, the least of some rounds: fewer calls than a stream takes before it makes the host wait."""
    for _ in range(20):
        function()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return 1e6 * min(times)


def row(what: str, contender: str, value: float, unit: str) -> None:
    ROWS.append({"what": what, "contender": contender, "value": round(value, 3), "unit": unit})
    print(f"{what:<44} {contender:<16} {value:>10.2f} {unit}", flush=True)


def part_ops() -> None:
    functional = torch.nn.functional
    cuda = {"device": "cuda", "dtype": torch.bfloat16}
    x, r = torch.randn(8192, 768, **cuda), torch.randn(8192, 768, **cuda)
    w, b = torch.ones(768, **cuda), torch.zeros(768, **cuda)

    def norm_act(x: Any) -> Any:
        return functional.gelu(functional.layer_norm(x, (768,), w, b), approximate="tanh")

    def add_norm(x: Any, r: Any) -> Any:
        s = x + r
        return functional.layer_norm(s, (768,), w, b), s

    def bias_dropout_add(x: Any, r: Any) -> Any:
        return functional.dropout(x + b, 0.1) + r

    cases: list[tuple[str, Callable[[], Any], Callable[..., Any], tuple[Any, ...]]] = [
        ("norm_act", lambda: deuteron.norm_act(x, w, b, act="gelu_tanh"), norm_act, (x,)),
        ("add_norm", lambda: deuteron.add_norm(x, r, w, b), add_norm, (x, r)),
        ("bias_dropout_add", lambda: deuteron.bias_dropout_add(x, b, r, p=0.1), bias_dropout_add, (x, r)),
    ]
    with torch.no_grad():
        for name, ours, eager, operands in cases:
            compiled = torch.compile(eager)
            contenders = {"ours": ours, "torch": lambda: eager(*operands), "torch.compile": lambda: compiled(*operands)}
            for contender, time_of_call in walls(contenders, 200, 60).items():
                row(f"{name} 8192x768, un-graphed", contender, time_of_call, "us")

    small = torch.randn(4, 64, **cuda)
    w64, b64 = torch.ones(64, **cuda), torch.zeros(64, **cuda)
    row("host time of a call", "act, one operand", host(lambda: deuteron.act(small)), "us")
    row("host time of a call", "norm_act", host(lambda: deuteron.norm_act(small, w64, b64)), "us")
    row("host time of a call", "torch layer_norm", host(lambda: functional.layer_norm(small, (64,), w64, b64)), "us")
    wanting = small.clone().requires_grad_()
    row("host time of a call with autograd", "norm_act", host(lambda: deuteron.norm_act(wanting, w64, b64)), "us")
    row(
        "host time of a call with autograd",
        "torch layer_norm",
        host(lambda: functional.layer_norm(wanting, (64,), w64, b64)),
        "us",
    )


def model(dropout: float = 0.0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    return GPT2LMHeadModel(config).cuda()


def part_forward() -> None:
    plain = model().to(torch.bfloat16).eval()
    ours = copy.deepcopy(plain)
    print(deuteron.patch(ours))
    compiled = torch.compile(plain)
    for batch in (8, 1):
        tokens = torch.randint(0, 50257, (batch, 1024), device="cuda")
        what = f"GPT-2 forward, {batch} x 1024"
        with torch.no_grad():
            expected, got = plain(tokens).logits.float(), ours(tokens).logits.float()
            worst = (expected - got).abs().max() / expected.abs().max()
            print(f"largest difference of a logit: {worst:.2e} of the largest")
            models = {"ours": ours, "torch": plain, "torch.compile": compiled}
            calls = {name: partial(one, tokens, use_cache=False) for name, one in models.items()}
            for name, time_of_call in walls(calls, 10, 9).items():
                row(what, name, time_of_call / 1e3, "ms")


def part_generate() -> None:
    plain = model().to(torch.bfloat16).eval()
    ours = copy.deepcopy(plain)
    deuteron.patch(ours)
    prompt = torch.randint(0, 50257, (1, 128), device="cuda")
    options = dict(max_new_tokens=128, min_new_tokens=128, do_sample=False, pad_token_id=0)
    calls = {name: partial(one.generate, prompt, **options) for name, one in (("ours", ours), ("torch", plain))}
    for name, time_of_call in walls(calls, 1, 3, warm=1).items():
        row("generate 128 tokens", name, time_of_call / 1e3, "ms")


def part_train() -> None:
    """A step of training with fused AdamW. Contenders come one after another, as each needs the memory: steps are timed in rounds, and the
    peak is of memory that torch allocated and of our workspace."""

    def step(contender: Any, tokens: Any) -> Callable[[], Any]:
        optimizer = torch.optim.AdamW(contender.parameters(), lr=1e-4, fused=True)

        def once() -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = contender(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return once

    def patched(plain: Any, **options: Any) -> Any:
        deuteron.patch(plain, **options)
        return plain

    contenders: dict[str, Callable[[Any], Any]] = {
        "ours": patched,
        "ours, loss without logits": partial(patched, skip_logits=True),
        "torch": lambda plain: plain,
        "torch.compile": torch.compile,
    }
    for batch, dropout in ((16, 0.1), (32, 0.0)):
        tokens = torch.randint(0, 50257, (batch, 1024), device="cuda")
        what = f"training step, {batch} x 1024, {'dropout' if dropout else 'no dropout'}, AMP"
        for name, prepare in contenders.items():
            torch._dynamo.reset()
            deuteron.empty_cache()
            torch.cuda.empty_cache()
            once = step(prepare(model(dropout).train()), tokens)
            once()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            row(what, name, walls({name: once}, 3, 5)[name] / 1e3, "ms")
            workspaces = deuteron.memory_stats().items() if name.startswith("ours") else ()
            own = sum(every["workspace_bytes"] for device, every in workspaces if device.startswith("cuda"))
            row(f"peak memory, {what}", name, (torch.cuda.max_memory_allocated() + own) / 2**30, "GiB")
            del once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"ops": part_ops, "forward": part_forward, "generate": part_generate, "train": part_train}
    parser.add_argument("--parts", nargs="*", default=list(parts), choices=list(parts))
    parser.add_argument("--out", default="h200-python-peers.csv")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    failed = []
    for name in arguments.parts:
        start = time.perf_counter()
        try:
            parts[name]()
        except Exception as error:  # noqa: BLE001  one part that fails does not take the others along
            import traceback

            traceback.print_exc()
            failed.append(f"{name}: {error}")
        print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)
        torch.cuda.empty_cache()
    about = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": arguments.commit,
        "date": datetime.date.today().isoformat(),
    }
    with open(arguments.out, "w", newline="") as file:
        writer = csv.DictWriter(file, ["what", "contender", "value", "unit", *about])
        writer.writeheader()
        writer.writerows({**one, **about} for one in ROWS)
    print()
    for what in dict.fromkeys(one["what"] for one in ROWS):
        found = {one["contender"]: one for one in ROWS if one["what"] == what}
        ours = found.get("ours")
        cells = [f"{name} {one['value']:.2f}" for name, one in found.items()]
        peers = [one["value"] for name, one in found.items() if name.startswith("torch")]
        ratio = f"; best of torch / ours {min(peers) / ours['value']:.2f}" if ours and peers else ""
        print(f"{what}: {', '.join(cells)} {next(iter(found.values()))['unit']}{ratio}")
    for one in failed:
        print(f"FAILED {one}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

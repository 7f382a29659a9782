#!/usr/bin/env python3
"""GPT-2 124M against its peers in one run: a prompt of 1024 tokens to the last logits, and one more token after a context.

    python3 bench/peers_gpt2.py [--device cpu|cuda] [--rounds N] [--dtypes f32 bf16 int8] [--contexts 128 1000] [--commit HASH]

Ours is `deuteron bench gpt2 --json`; peers are torch with transformers, eager and compiled (on a GPU both as CUDA graphs), and for
int8 CTranslate2, where they are installed. All have weights made from a seed in the sizes of GPT-2, and run in turn, `rounds` times;
each row has the median of its rounds. On a CPU every one has as many threads as the machine has cores.

Rows go to gpt2-DEVICE.csv in the folder named by OUT (default ./out).
"""

import argparse
import csv
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARIES = [ROOT / "bundle/deuteron", ROOT / "deuteron", ROOT / "target/release/deuteron"]
PROMPT = 1024
# Steps after a context, at most.
STEPS = 600


def ours(arguments, dtype, batch, context):
    """(prefill, decode) in milliseconds, fused."""
    words = [arguments.binary, "bench", "gpt2", "--device", arguments.device, "--dtype", dtype, "--batch", str(batch),
             "--seq", str(PROMPT), "--context", str(context), "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    phases = json.loads(done.stdout)["phases"]
    return [phase["plans"][1]["ms"] for phase in phases]


class Torch:
    """transformers' GPT-2: prompts to the last logits, and one token on top of a cache of fixed size."""

    def __init__(self, device, dtype, compiled):
        import torch
        import transformers
        self.torch, self.device, self.compiled = torch, device, compiled
        self.dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
        torch.manual_seed(1)
        config = transformers.GPT2Config()
        self.model = transformers.GPT2LMHeadModel(config).eval().to(device, self.dtype)
        # A cache of fixed size is what can be compiled and recorded; it counts its steps, so there must be room for all of them.
        self.fixed = fixed = compiled or device == "cuda"
        self.cache = lambda context: (transformers.StaticCache(config=config, max_cache_len=context + STEPS) if fixed
                                      else transformers.DynamicCache(config=config))
        self.call = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.known = {}

    def prefill(self, batch):
        tokens = self.torch.zeros(batch, PROMPT, dtype=self.torch.long, device=self.device)
        return self.measured(("prefill", batch), lambda: self.call(tokens, use_cache=False, logits_to_keep=1).logits)

    def decode(self, batch, context):
        torch = self.torch
        def make():
            cache = self.cache(context)
            prompt = torch.zeros(batch, context, dtype=torch.long, device=self.device)
            self.model(prompt, past_key_values=cache, use_cache=True, cache_position=torch.arange(context, device=self.device),
                       logits_to_keep=1)
            token = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
            place = torch.full((1,), context, dtype=torch.long, device=self.device)
            positions = place[None].expand(batch, 1)
            def step():
                # A cache that grows is cut back to the context.
                if not self.fixed and cache.get_seq_length() > context:
                    cache.crop(context - cache.get_seq_length())
                return self.call(token, past_key_values=cache, use_cache=True, cache_position=place, position_ids=positions).logits
            return step
        key = ("decode", batch, context)
        return self.measured(key, self.known.get(key) or make())

    def measured(self, key, step):
        """Milliseconds of a step; on a GPU of a replay of its graph."""
        torch = self.torch
        with torch.inference_mode():
            if key not in self.known:
                for _ in range(3):
                    step()
                if self.device == "cuda":
                    stream = torch.cuda.Stream()
                    with torch.cuda.stream(stream):
                        step()
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        step()
                    step = graph.replay
                self.known[key] = step
            step = self.known[key]
            times = []
            begin = time.perf_counter()
            while len(times) < 3 or (time.perf_counter() - begin < 1 and len(times) < 50):
                if self.device == "cuda":
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    for _ in range(10):
                        step()
                    end.record()
                    torch.cuda.synchronize()
                    times.append(start.elapsed_time(end) / 10)
                else:
                    start = time.perf_counter()
                    step()
                    times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)


class CTranslate2:
    """int8 by CTranslate2: the difference of two generations is the price of a token."""

    def __init__(self, threads):
        import ctranslate2
        import torch
        import transformers
        folder = Path(tempfile.mkdtemp())
        torch.manual_seed(1)
        config = transformers.GPT2Config()
        transformers.GPT2LMHeadModel(config).save_pretrained(folder / "model")
        vocabulary = {f"t{index}": index for index in range(config.vocab_size - 1)} | {"<|endoftext|>": config.vocab_size - 1}
        (folder / "model/vocab.json").write_text(json.dumps(vocabulary))
        (folder / "model/merges.txt").write_text("#version: 0.2\n")
        transformers.GPT2Tokenizer(str(folder / "model/vocab.json"), str(folder / "model/merges.txt")).save_pretrained(folder / "model")
        ctranslate2.converters.TransformersConverter(str(folder / "model")).convert(str(folder / "ct2"), quantization="int8")
        self.generator = ctranslate2.Generator(str(folder / "ct2"), device="cpu", compute_type="int8", intra_threads=threads)
        shutil.rmtree(folder)

    def decode(self, batch, context):
        prompts = [["t7"] * context] * batch
        def run(tokens):
            start = time.perf_counter()
            self.generator.generate_batch(prompts, max_length=context + tokens, min_length=context + tokens,
                                          include_prompt_in_result=True, sampling_topk=1, beam_size=1)
            return 1e3 * (time.perf_counter() - start)
        few, many = 2, 18
        run(few)
        return statistics.median((run(many) - run(few)) / (many - few) for _ in range(3))


def attempt(make, name):
    try:
        return make()
    except Exception as error:  # whatever keeps a peer from running, the others still do
        print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16", "int8"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1000])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--binary", type=Path)
    arguments = parser.parse_args()
    arguments.binary = arguments.binary or next(filter(Path.exists, BINARIES), None)
    if arguments.binary is None:
        parser.error("no `deuteron` binary; run `cargo build --release` first")
    threads = os.cpu_count()
    samples = {}

    def add(dtype, phase, batch, context, who, value):
        samples.setdefault((dtype, phase, batch, context), {}).setdefault(who, []).append(value)

    for dtype in arguments.dtypes:
        peers = {}
        if dtype != "int8":
            for compiled in [False] if arguments.no_compile else [False, True]:
                name = "torch.compile" if compiled else "torch"
                peers[name] = attempt(lambda: Torch(arguments.device, dtype, compiled), name)
        elif arguments.device == "cpu":
            peers["ctranslate2"] = attempt(lambda: CTranslate2(threads), "ctranslate2")
        for _ in range(arguments.rounds):
            for batch in arguments.batches:
                for context in arguments.contexts:
                    prefill, decode = ours(arguments, dtype, batch, context)
                    add(dtype, "prefill", batch, 0, "deuteron", prefill)
                    add(dtype, "decode", batch, context, "deuteron", decode)
                    for name, peer in peers.items():
                        value = peer and attempt(lambda: peer.decode(batch, context), f"{name} decode")
                        if value:
                            add(dtype, "decode", batch, context, name, value)
                for name, peer in peers.items():
                    if hasattr(peer, "prefill"):
                        value = attempt(lambda: peer.prefill(batch), f"{name} prefill")
                        if value:
                            add(dtype, "prefill", batch, 0, name, value)

    out = Path(os.environ.get("OUT") or "out")
    out.mkdir(parents=True, exist_ok=True)
    names = ["deuteron", "torch", "torch.compile", "ctranslate2"]
    print(f"{'milliseconds':<28}" + "".join(f"{name:>15}" for name in names) + f"{'best peer/ours':>16}")
    with (out / f"gpt2-{arguments.device}.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["model", "weights", "phase", "batch", "context", *[f"{name}_ms" for name in names], "best_peer_over_ours",
                        "machine", "commit", "date"])
        for (dtype, phase, batch, context), found in sorted(samples.items()):
            medians = {name: statistics.median(values) for name, values in found.items()}
            best = min((value for name, value in medians.items() if name != "deuteron"), default=None)
            ratio = best / medians["deuteron"] if best else None
            cells = [f"{medians[name]:.3f}" if name in medians else "" for name in names]
            label = f"{phase} {dtype} batch {batch}" + (f" after {context}" if phase == "decode" else "")
            print(f"{label:<28}" + "".join(f"{cell:>15}" for cell in cells) + (f"{ratio:15.2f}x" if ratio else ""))
            machine = "NVIDIA H200" if arguments.device == "cuda" else f"{threads} cores of {platform.machine()}"
            table.writerow(["gpt2", dtype, phase, batch, context if phase == "decode" else 0, *cells,
                            f"{ratio:.3f}" if ratio else "", machine, arguments.commit, datetime.date.today()])


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""GPT-2 124M against its peers in one run: a prompt of 1024 tokens to the last logits, and one more token after a context.

    python3 bench/peers_gpt2.py [--device cpu|cuda] [--rounds N] [--dtypes f32 bf16 int8] [--contexts 128 1000] [--commit HASH]

Ours is `deuteron bench gpt2 --json`; peers are torch with transformers, eager and compiled (on a GPU both as CUDA graphs), and on a
CPU llama.cpp (packages llama-cpp-python and gguf), ONNX Runtime (f32, with its fused attention; packages onnxruntime and onnx) and
CTranslate2 (int8), where they are installed. All have weights made from a seed in the sizes of GPT-2, and run in turn, `rounds`
times; each row has the median of its rounds. On a CPU every one has as many threads as the machine has cores.

Rows go to gpt2-DEVICE.csv in the folder named by OUT (default ./out).
"""

import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import measuring
from measuring import milliseconds

PROMPT = 1024
WIDTH, HEADS, LAYERS, WORDS = 768, 12, 12, 50257
# The matrices of a layer: their names in a file of llama.cpp, inner size, columns.
MATRICES = [("attn_qkv", WIDTH, 3 * WIDTH), ("attn_output", WIDTH, WIDTH), ("ffn_up", WIDTH, 4 * WIDTH),
            ("ffn_down", 4 * WIDTH, WIDTH)]
# Steps after a context before the cache is set back to it, and calls and captures before the first is measured.
STEPS, ROOM = 10, 16


def ours(arguments, dtype, batch, context):
    """(prefill, decode) in milliseconds, fused."""
    words = ["--device", arguments.device, "--dtype", dtype, "--batch", str(batch), "--seq", str(PROMPT), "--context", str(context)]
    report = measuring.ours(arguments.binary, "bench", "gpt2", *words)
    return [phase["plans"][1]["ms"] for phase in report["phases"]]


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
        # A cache of fixed size is what can be compiled and recorded. All of it is read, so it is hardly longer than the context.
        self.fixed = fixed = compiled or device == "cuda"
        self.cache = lambda context: (transformers.StaticCache(config=config, max_cache_len=context + ROOM) if fixed
                                      else transformers.DynamicCache(config=config))
        self.call = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.known, self.recorded = {}, []

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
            def rewind():
                if not self.fixed and cache.get_seq_length() > context:
                    cache.crop(context - cache.get_seq_length())
                for layer in cache.layers if self.fixed else []:
                    if hasattr(layer, "cumulative_length"):
                        layer.cumulative_length.fill_(context)
            def step():
                return self.call(token, past_key_values=cache, use_cache=True, cache_position=place, position_ids=positions).logits
            return step, rewind
        key = ("decode", batch, context)
        return self.measured(key, *(self.known.get(key) or make()))

    def measured(self, key, step, rewind=lambda: None):
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
                    # A graph reads the tensors that it was recorded with: whoever holds them stays.
                    self.recorded.append(step)
                    step = graph.replay
                self.known[key] = (step, rewind)
            step, rewind = self.known[key]
            if self.device == "cpu":
                return milliseconds(step, rewind)
            times = []
            begin = time.perf_counter()
            while len(times) < 3 or (time.perf_counter() - begin < 1 and len(times) < 50):
                rewind()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                for _ in range(STEPS):
                    step()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) / STEPS)
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


class LlamaCpp:
    """llama.cpp on a file of the same sizes."""

    def __init__(self, dtype, threads):
        import gguf
        import llama_cpp
        import numpy
        kind = {"f32": gguf.GGMLQuantizationType.F32, "bf16": gguf.GGMLQuantizationType.BF16}[dtype]
        folder = Path(tempfile.mkdtemp())
        writer = gguf.GGUFWriter(folder / "model.gguf", "gpt2")
        writer.add_context_length(PROMPT)
        writer.add_embedding_length(WIDTH)
        writer.add_feed_forward_length(4 * WIDTH)
        writer.add_block_count(LAYERS)
        writer.add_head_count(HEADS)
        writer.add_layer_norm_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([f"t{index}" for index in range(WORDS)])
        writer.add_token_types([gguf.TokenType.NORMAL] * WORDS)
        writer.add_token_merges(["t 0"])
        writer.add_bos_token_id(WORDS - 1)
        writer.add_eos_token_id(WORDS - 1)
        random = numpy.random.default_rng(1)

        def matrix(name, *shape, kind=kind):
            values = random.standard_normal(shape, "float32") * 0.02
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

        def vector(name, size):
            writer.add_tensor(name, numpy.ones(size, "float32"))

        matrix("token_embd", WORDS, WIDTH)
        matrix("position_embd", PROMPT, WIDTH, kind=gguf.GGMLQuantizationType.F32)
        norms = ["output_norm"]
        for layer in range(LAYERS):
            norms += [f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"]
            for name, inner, columns in MATRICES:
                matrix(f"blk.{layer}.{name}", columns, inner)
                vector(f"blk.{layer}.{name}.bias", columns)
        for name in norms:
            vector(f"{name}.weight", WIDTH)
            vector(f"{name}.bias", WIDTH)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self.model = llama_cpp.Llama(str(folder / "model.gguf"), n_ctx=PROMPT, n_batch=PROMPT, n_ubatch=PROMPT, n_threads=threads,
                                     n_threads_batch=threads, verbose=False)
        shutil.rmtree(folder)

    def prefill(self, batch):
        return milliseconds(lambda: self.model.eval([7] * PROMPT), self.model.reset) if batch == 1 else None

    def decode(self, batch, context):
        if batch > 1:
            return None
        self.model.reset()
        self.model.eval([7] * context)
        def rewind():
            self.model.n_tokens = context  # what lies behind it is cut off
        return milliseconds(lambda: self.model.eval([7]), rewind)


class OnnxRuntime:
    """A graph with ONNX Runtime's own fused nodes: attention with a cache, norms with the residual, GELU with the bias."""

    def __init__(self, threads):
        import numpy
        import onnx
        import onnxruntime
        self.numpy = numpy
        random = numpy.random.default_rng(1)
        weights, nodes = {}, []

        def weight(name, *shape):
            values = random.standard_normal(shape, "float32") * 0.02 if len(shape) > 1 else numpy.ones(shape, "float32")
            weights[name] = onnx.numpy_helper.from_array(values, name)
            return name

        def node(kind, inputs, outputs, **attributes):
            domain = "com.microsoft" if kind in ("Attention", "SkipLayerNormalization", "FastGelu") else ""
            nodes.append(onnx.helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
            return outputs[0]

        def norm(name, x, residual=None):
            """The normalised sum, and the sum."""
            parts = [weight(f"{name}.w", WIDTH), weight(f"{name}.b", WIDTH)]
            if residual is None:
                return node("LayerNormalization", [x, *parts], [f"{name}.y"], axis=-1, epsilon=1e-5), x
            outputs = [f"{name}.y", "", "", f"{name}.sum"]
            return node("SkipLayerNormalization", [x, residual, *parts], outputs, epsilon=1e-5), f"{name}.sum"

        def product(name, x, inner, columns):
            return node("MatMul", [x, weight(f"{name}.w", inner, columns)], [f"{name}.product"])

        node("Add", [node("Gather", [weight("words", WORDS, WIDTH), "tokens"], ["word"]),
                     node("Gather", [weight("places", PROMPT, WIDTH), "positions"], ["place"])], ["h"])
        y, total = norm("first", "h")
        for layer in range(LAYERS):
            at = f"layer{layer}"
            inputs = [y, weight(f"{at}.qkv.w", WIDTH, 3 * WIDTH), weight(f"{at}.qkv.b", 3 * WIDTH), "", f"past{layer}"]
            node("Attention", inputs, [f"{at}.attention", f"present{layer}"], num_heads=HEADS, unidirectional=1)
            out = node("Add", [product(f"{at}.out", f"{at}.attention", WIDTH, WIDTH), weight(f"{at}.out.b", WIDTH)], [f"{at}.out"])
            y, total = norm(f"{at}.norm", out, total)
            wide = node("FastGelu", [product(f"{at}.up", y, WIDTH, 4 * WIDTH), weight(f"{at}.up.b", 4 * WIDTH)], [f"{at}.gelu"])
            out = node("Add", [product(f"{at}.down", wide, 4 * WIDTH, WIDTH), weight(f"{at}.down.b", WIDTH)], [f"{at}.down"])
            y, total = norm(f"{at}.next", out, total)
        last = node("Gather", [y, "last"], ["row"], axis=1)
        weights["last"] = onnx.numpy_helper.from_array(numpy.array([-1]), "last")
        node("MatMul", [last, weight("head", WIDTH, WORDS)], ["logits"])
        value, float32, int64 = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
        inputs = [value(name, int64, ["batch", "rows"]) for name in ("tokens", "positions")]
        cache = [2, "batch", HEADS, "length", WIDTH // HEADS]
        inputs += [value(f"past{layer}", float32, cache) for layer in range(LAYERS)]
        outputs = [value("logits", float32, ["batch", 1, WORDS])]
        outputs += [value(f"present{layer}", float32, [*cache[:3], "all", cache[4]]) for layer in range(LAYERS)]
        graph = onnx.helper.make_graph(nodes, "gpt2", inputs, outputs, list(weights.values()))
        opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def feed(self, batch, rows, past):
        numpy = self.numpy
        feeds = {"tokens": numpy.full((batch, rows), 7), "positions": numpy.tile(numpy.arange(past, past + rows), (batch, 1))}
        empty = numpy.zeros((2, batch, HEADS, past, WIDTH // HEADS), "float32")
        return feeds | {f"past{layer}": empty for layer in range(LAYERS)}

    def prefill(self, batch):
        feeds = self.feed(batch, PROMPT, 0)
        return milliseconds(lambda: self.session.run(["logits"], feeds))

    def decode(self, batch, context):
        feeds = self.feed(batch, 1, context)
        names = ["logits", *[f"present{layer}" for layer in range(LAYERS)]]
        return milliseconds(lambda: self.session.run(names, feeds))


def attempt(make, name):
    try:
        return make()
    except Exception as error:  # whatever keeps a peer from running, the others still do
        print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
        return None


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16", "int8"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1000])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
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
        if arguments.device == "cpu":
            # With bytes it ends in an illegal instruction on machines with AMX (version 0.3.36 of its package).
            if dtype != "int8":
                peers["llama.cpp"] = attempt(lambda: LlamaCpp(dtype, threads), "llama.cpp")
            if dtype == "f32":
                peers["onnxruntime"] = attempt(lambda: OnnxRuntime(threads), "onnxruntime")
            if dtype == "int8":
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

    names = ["deuteron", "torch", "torch.compile", "onnxruntime", "llama.cpp", "ctranslate2"]
    print(f"{'milliseconds':<28}" + "".join(f"{name:>15}" for name in names) + f"{'best peer/ours':>16}")
    machine = "NVIDIA H200" if arguments.device == "cuda" else f"{threads} cores of {platform.machine()}"
    columns = ["model", "weights", "phase", "batch", "context", *[f"{name}_ms" for name in names], "best_peer_over_ours"]
    table = measuring.Table(f"gpt2-{arguments.device}.csv", columns, machine=machine, commit=arguments.commit)
    for (dtype, phase, batch, context), found in sorted(samples.items()):
        medians = {name: statistics.median(values) for name, values in found.items()}
        best = min((value for name, value in medians.items() if name != "deuteron"), default=None)
        ratio = best / medians["deuteron"] if best else None
        cells = [f"{medians[name]:.3f}" if name in medians else "" for name in names]
        label = f"{phase} {dtype} batch {batch}" + (f" after {context}" if phase == "decode" else "")
        print(f"{label:<28}" + "".join(f"{cell:>15}" for cell in cells) + (f"{ratio:15.2f}x" if ratio else ""))
        place = context if phase == "decode" else 0
        table.add(["gpt2", dtype, phase, batch, place, *cells, f"{ratio:.3f}" if ratio else ""])


if __name__ == "__main__":
    main()

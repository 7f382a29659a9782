"""Makes the models of the tests: tiny, with random weights, as exporters write them.

Needs torch, onnx, onnxruntime, onnxscript and transformers. Writes into the folder `models` beside this script: the model,
and a `.json` with the sizes of open dimensions, the inputs, and the outputs that ONNX Runtime computed.
Run it again only to change the models: exporters differ from version to version, and the tests count what they wrote.
"""

import json
import os
import sys
import warnings

import numpy as np
import onnx
import onnxruntime
import torch
import transformers

warnings.filterwarnings("ignore")
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "models")
SEQUENCE = 7
BATCH = 2
LAYERS = 2
SIZE = 8
VOCABULARY = 32


def randomise(model):
    """Weights away from their initial zeros and ones, so that nothing passes by chance."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name.lower() or "ln_" in name else 0.0))
    return model.eval()


class Wrapped(torch.nn.Module):
    """Only the tensors that matter, as positional operands."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *operands):
        return self.model(**dict(zip(self.names, operands)), return_dict=False)[0]


def shorten(graph, prefix="v"):
    """Short names of interior values, to keep the files small; nodes, inputs, outputs and weights keep theirs."""
    fixed = {value.name for value in list(graph.input) + list(graph.output) + list(graph.initializer)}
    names = {}
    for node in graph.node:
        for list_of_names in (node.input, node.output):
            for index, value in enumerate(list_of_names):
                if value and value not in fixed:
                    list_of_names[index] = names.setdefault(value, f"{prefix}{len(names)}")


def write(name, inputs, dims):
    """Runs the model and stores what it gives."""
    path = os.path.join(FOLDER, name + ".onnx")
    model = onnx.load(path)
    del model.metadata_props[:]
    for node in model.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    del model.graph.value_info[:]
    model.graph.doc_string = ""
    del model.graph.metadata_props[:]
    for value in list(model.graph.input) + list(model.graph.output) + list(model.graph.initializer):
        del value.metadata_props[:]
    shorten(model.graph)
    onnx.save(model, path)
    # Unfused: the reference for what the file says.
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    wanted = [entry.name for entry in session.get_inputs()]
    feeds = {key: value for key, value in zip(wanted, inputs)}
    outputs = session.run(None, feeds)
    record = {
        "dims": dims,
        "inputs": {key: np.asarray(value, dtype=np.float64).ravel().tolist() for key, value in feeds.items()},
        "outputs": [
            {"shape": list(value.shape), "values": [float(f"{x:.8g}") for x in value.astype(np.float64).ravel()]}
            for value in outputs
        ],
    }
    with open(os.path.join(FOLDER, name + ".json"), "w") as file:
        json.dump(record, file, separators=(",", ":"))
    print(f"{name}: {os.path.getsize(path)} bytes, {len(model.graph.node)} nodes")


def export(name, model, names, operands, dims=None, dynamo=False, opset=17):
    """One model through one exporter. `dims` names the open axes of each operand."""
    os.makedirs(FOLDER, exist_ok=True)
    path = os.path.join(FOLDER, name + ".onnx")
    wrapped = model if isinstance(model, Plain) else Wrapped(model, names)
    given = {"input_names": names, "output_names": ["output"], "opset_version": opset}
    sizes = {}
    with torch.no_grad():
        if dynamo:
            torch.onnx.export(wrapped, tuple(operands), path, dynamo=True, external_data=False, verbose=False, **given)
        else:
            axes = {n: {a: d for a, d in enumerate(dims)} for n in names} if dims else None
            torch.onnx.export(wrapped, tuple(operands), path, dynamo=False, dynamic_axes=axes, **given)
            if dims:
                sizes = {d: operands[0].shape[a] for a, d in enumerate(dims)}
    write(name, [operand.numpy() for operand in operands], sizes)


def attempt(label, function):
    try:
        function()
    except Exception as error:  # an exporter that fails is told, and its model left out
        print(f"{label}: FAILED {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)


def ids():
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))


def mask():
    values = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    values[1, -2:] = 0
    return values


def gpt2(attention="eager", activation="gelu_new"):
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=SIZE, n_layer=LAYERS, n_head=2, use_cache=False, activation_function=activation,
        attn_implementation=attention,
    )
    return randomise(transformers.GPT2LMHeadModel(config))


def bert(attention="eager"):
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=SIZE, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, attn_implementation=attention,
    )
    return randomise(transformers.BertModel(config, add_pooling_layer=True))


def llama(attention="eager"):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=SIZE, intermediate_size=12, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False, attn_implementation=attention,
    )
    return randomise(transformers.LlamaForCausalLM(config))


def vit(attention="eager"):
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_size=SIZE, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=16,
        attn_implementation=attention,
    )
    return randomise(transformers.ViTModel(config, add_pooling_layer=False))


class PlainNorm(torch.nn.Module):
    """RMS norm as it is written by hand."""

    def __init__(self, size):
        super().__init__()
        self.norm_weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm_weight


class PlainBlock(torch.nn.Module):
    """A decoder block in plain torch: `modern` has RMS norm, rotary positions, shared key heads and SwiGLU."""

    def __init__(self, size, heads, modern):
        super().__init__()
        self.heads, self.modern = heads, modern
        self.shared = heads // 2 if modern else heads
        width = size // heads
        norm = PlainNorm if modern else torch.nn.LayerNorm
        self.ln_1, self.ln_2 = norm(size), norm(size)
        self.q = torch.nn.Linear(size, size, bias=not modern)
        self.k = torch.nn.Linear(size, width * self.shared, bias=not modern)
        self.v = torch.nn.Linear(size, width * self.shared, bias=not modern)
        self.out = torch.nn.Linear(size, size, bias=not modern)
        self.up = torch.nn.Linear(size, 2 * size, bias=not modern)
        self.gate = torch.nn.Linear(size, 2 * size, bias=False) if modern else None
        self.down = torch.nn.Linear(2 * size, size, bias=not modern)
        self.register_buffer("causal", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))
        self.register_buffer("frequencies", 1.0 / 100.0 ** (torch.arange(0, width, 2).float() / width))

    def rotate(self, x):
        angles = torch.outer(torch.arange(x.shape[2]).float(), self.frequencies)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def forward(self, x):
        batch, sequence, size = x.shape
        h = self.ln_1(x)
        q = self.q(h).view(batch, sequence, self.heads, -1).transpose(1, 2)
        k = self.k(h).view(batch, sequence, self.shared, -1).transpose(1, 2)
        v = self.v(h).view(batch, sequence, self.shared, -1).transpose(1, 2)
        if self.modern:
            q, k = self.rotate(q), self.rotate(k)
            k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(self.causal[:, :, :sequence, :sequence] == 0, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, sequence, size)
        x = x + self.out(mixed)
        h = self.ln_2(x)
        if self.modern:
            return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))
        up = self.up(h)
        up = 0.5 * up * (1.0 + torch.tanh(0.7978845608 * (up + 0.044715 * up * up * up)))
        return x + self.down(up)


class Plain(torch.nn.Module):
    """A small decoder in plain torch."""

    def __init__(self, modern):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, SIZE)
        self.positions = None if modern else torch.nn.Embedding(8, SIZE)
        self.blocks = torch.nn.ModuleList([PlainBlock(SIZE, 4, modern) for _ in range(LAYERS)])
        self.ln_f = PlainNorm(SIZE) if modern else torch.nn.LayerNorm(SIZE)

    def forward(self, input_ids):
        x = self.tokens(input_ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.ln_f(x)


def plain(modern):
    return randomise(Plain(modern))


def image():
    return torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def external():
    """Weights in a file beside the model."""
    layer = randomise(torch.nn.Linear(8, 8))
    path = os.path.join(FOLDER, "external.onnx")
    torch.onnx.export(layer, (torch.ones(2, 8),), path, dynamo=False, input_names=["x"], output_names=["y"])
    model = onnx.load(path)
    onnx.save_model(
        model, path, save_as_external_data=True, all_tensors_to_one_file=True, location="external.bin", size_threshold=0
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = np.arange(16, dtype=np.float32).reshape(2, 8) / 8
    y = session.run(None, {"x": x})[0]
    record = {
        "dims": {},
        "inputs": {"x": x.astype(np.float64).ravel().tolist()},
        "outputs": [{"shape": [2, 8], "values": y.astype(np.float64).ravel().tolist()}],
    }
    json.dump(record, open(os.path.join(FOLDER, "external.json"), "w"))


def optimised(name, source):
    """The same model after ONNX Runtime's own fusions."""
    from_path = os.path.join(FOLDER, source + ".onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = os.path.join(FOLDER, name + ".onnx")
    onnxruntime.InferenceSession(from_path, options, providers=["CPUExecutionProvider"])
    model = onnx.load(os.path.join(FOLDER, name + ".onnx"))
    # The source's names are short already, and some are names of folded weights by now.
    shorten(model.graph, "r")
    onnx.save(model, os.path.join(FOLDER, name + ".onnx"))
    record = json.load(open(os.path.join(FOLDER, source + ".json")))
    json.dump(record, open(os.path.join(FOLDER, name + ".json"), "w"), separators=(",", ":"))


def operators(name, opset, cases):
    """One model of many operators, each on the same inputs. A case: operator, operands, attributes, number of results."""
    rng = np.random.default_rng(3)
    known = {
        "w": rng.normal(size=(4, 5)).astype(np.float32), "v": rng.normal(size=4).astype(np.float32),
        "c": rng.normal(size=5).astype(np.float32), "two": np.float32(2), "half": np.float32(0.5), "cube": np.float32(3),
        "minus_half": np.float32(-0.5), "zero": np.float32(0), "one": np.float32(1), "i0": np.array([0]), "i1": np.array([1]), "i2": np.array([2]),
        "im1": np.array([-1]), "i02": np.array([0, 2]), "shape_64": np.array([6, -1]), "shape_0": np.array([0, 0, 2, 2]),
        "expand": np.array([3, 1, 1, 4]), "repeats": np.array([1, 2, 1]), "pads": np.array([0, 1, 0, 0, 0, 2]),
        "big": np.array([2**62]), "min": np.array([-(2**62)]), "split": np.array([1, 3]), "scattered": np.array([2, 0, 0]),
        "pairs": np.array([[1, 0], [0, 1]]), "table": rng.normal(size=(3, 4)).astype(np.float32),
        "kernel": rng.normal(size=(5, 3, 2, 2)).astype(np.float32), "far": np.int64(5), "step": np.int64(2), "start": np.int64(1),
        "scalar": np.int64(1), "positions": np.arange(6), "wide": rng.normal(size=(3, 5, 4)).astype(np.float32),
    }
    helper, kinds = onnx.helper, onnx.TensorProto
    inputs = {
        "x": rng.normal(size=(2, 3, 4)).astype(np.float32), "y": rng.normal(size=(2, 3, 4)).astype(np.float32),
        "p": (rng.random(size=(2, 3, 4)) + 0.1).astype(np.float32), "image": rng.normal(size=(2, 3, 4, 6)).astype(np.float32),
        "ids": rng.integers(0, 3, size=(2, 3)), "q": rng.normal(size=(2, 4, 3, 4)).astype(np.float32),
        "k": rng.normal(size=(2, 2, 5, 4)).astype(np.float32),
    }
    nodes, outputs = [], []
    for index, (op, operands, attributes, count) in enumerate(cases):
        results = [f"o{index}_{result}" for result in range(count)]
        domain = attributes.pop("domain", "")
        nodes.append(helper.make_node(op, operands, results, name=f"{op}_{index}", domain=domain, **attributes))
        # Truth values and indices are made floats, which the reference compares.
        for result in results:
            nodes.append(helper.make_node("Cast", [result], ["f" + result], to=kinds.FLOAT, name=f"cast_{result}"))
            outputs.append("f" + result)
    graph = helper.make_graph(
        nodes, name,
        [helper.make_tensor_value_info(key, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape) for key, value in inputs.items()],
        [helper.make_tensor_value_info(key, kinds.FLOAT, None) for key in outputs],
        [onnx.numpy_helper.from_array(np.asarray(value), key) for key, value in known.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    path = os.path.join(FOLDER, name + ".onnx")
    onnx.save(model, path)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    results = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, inputs)
    record = {
        "dims": {},
        "inputs": {key: np.asarray(value, dtype=np.float64).ravel().tolist() for key, value in inputs.items()},
        "outputs": [
            {"shape": list(value.shape), "values": [float(f"{x:.8g}") for x in value.astype(np.float64).ravel()]}
            for value in results
        ],
    }
    with open(os.path.join(FOLDER, name + ".json"), "w") as file:
        json.dump(record, file, separators=(",", ":"))


def plain_operators():
    unary = ["Neg", "Abs", "Exp", "Tanh", "Erf", "Sigmoid", "Round", "Relu", "Identity", "Softmax", "LogSoftmax", "Dropout"]
    cases = [(op, ["x"], {}, 1) for op in unary]
    cases += [(op, ["p"], {}, 1) for op in ["Log", "Sqrt", "Reciprocal"]]
    cases += [(op, ["x", "y"], {}, 1) for op in ["Add", "Sub", "Mul", "Div", "Max", "Min", "Less", "Greater", "GreaterOrEqual", "LessOrEqual", "Equal", "Sum", "Mean"]]
    cases += [("Pow", ["p", exponent], {}, 1) for exponent in ["two", "cube", "half", "minus_half", "one"]]
    cases += [("Clip", ["x", "zero", "one"], {}, 1), ("Clip", ["x", "", "one"], {}, 1), ("Add", ["x", "v"], {}, 1)]
    cases += [("LeakyRelu", ["x"], {"alpha": 0.1}, 1), ("Softmax", ["x"], {"axis": 1}, 1), ("LogSoftmax", ["x"], {"axis": 0}, 1)]
    cases += [("ReduceMean", ["x"], {"axes": [-1]}, 1), ("ReduceMean", ["x"], {"axes": [0, 2], "keepdims": 0}, 1)]
    cases += [("ReduceSum", ["x", "i1"], {}, 1), ("ReduceSum", ["x", "i02"], {"keepdims": 0}, 1), ("ReduceSum", ["x"], {}, 1)]
    cases += [("ReduceMax", ["x"], {"axes": [1]}, 1), ("ReduceMin", ["x"], {"axes": [-1], "keepdims": 0}, 1)]
    cases += [("ReduceL2", ["x"], {"axes": [-1]}, 1), ("ReduceSumSquare", ["x"], {"axes": [0]}, 1)]
    cases += [("ArgMax", ["x"], {"axis": -1}, 1), ("ArgMax", ["x"], {"axis": 1, "keepdims": 0}, 1)]
    cases += [("Reshape", ["x", "shape_64"], {}, 1), ("Reshape", ["x", "shape_0"], {}, 1), ("Flatten", ["x"], {"axis": 2}, 1)]
    cases += [("Unsqueeze", ["x", "im1"], {}, 1), ("Transpose", ["x"], {}, 1), ("Transpose", ["x"], {"perm": [1, 0, 2]}, 1)]
    cases += [("Expand", ["x", "expand"], {}, 1), ("Tile", ["x", "repeats"], {}, 1), ("Pad", ["x", "pads", "half"], {}, 1)]
    cases += [("Slice", ["x", "i1", "big", "i2"], {}, 1), ("Slice", ["x", "i0", "big", "i2", "i2"], {}, 1)]
    cases += [("Slice", ["x", "i1", "big", "im1", "i2"], {}, 1), ("Slice", ["x", "im1", "min", "i1", "im1"], {}, 1)]
    cases += [("Split", ["x", "split"], {"axis": 2}, 2), ("Split", ["x"], {"axis": 2}, 2), ("Concat", ["x", "y", "x"], {"axis": 1}, 1)]
    cases += [("Gather", ["table", "ids"], {"axis": 0}, 1), ("Gather", ["x", "ids"], {"axis": 1}, 1), ("Gather", ["x", "scalar"], {"axis": 1}, 1)]
    cases += [("Gather", ["x", "scattered"], {"axis": 1}, 1), ("Gather", ["x", "im1"], {"axis": 2}, 1)]
    cases += [("MatMul", ["x", "w"], {}, 1), ("MatMul", ["x", "v"], {}, 1), ("MatMul", ["v", "w"], {}, 1), ("MatMul", ["wide", "w"], {}, 1)]
    cases += [("Gemm", ["table", "w", "c"], {"alpha": 0.5, "beta": 2.0}, 1), ("Gemm", ["w", "table"], {"transA": 1, "transB": 1}, 1)]
    cases += [("Conv", ["image", "kernel", "c"], {"strides": [2, 2]}, 1), ("Conv", ["image", "kernel"], {"strides": [2, 2], "kernel_shape": [2, 2]}, 1)]
    cases += [("Einsum", ["x", "y"], {"equation": "bij,bkj->bik"}, 1), ("Einsum", ["x", "w"], {"equation": "bsd,de->ebs"}, 1)]
    cases += [("Einsum", ["x", "y"], {"equation": "bij,bij->b"}, 1)]
    cases += [("Shape", ["x"], {}, 1), ("Size", ["x"], {}, 1), ("Range", ["start", "far", "step"], {}, 1), ("CumSum", ["positions", "i0"], {}, 1)]
    cases += [("Trilu", ["x", "scalar"], {"upper": 0}, 1), ("Trilu", ["x"], {}, 1), ("GlobalAveragePool", ["image"], {}, 1)]
    cases += [("IsNaN", ["x"], {}, 1), ("Cast", ["ids"], {"to": onnx.TensorProto.FLOAT}, 1), ("Cast", ["ids"], {"to": onnx.TensorProto.BOOL}, 1)]
    cases += [("ConstantOfShape", ["i2"], {}, 1), ("EyeLike", ["table"], {"k": 1}, 1), ("NonZero", ["positions"], {}, 1)]
    cases += [("BiasGelu", ["x", "v"], {"domain": "com.microsoft"}, 1), ("FastGelu", ["x"], {"domain": "com.microsoft"}, 1)]
    cases += [("QuickGelu", ["x"], {"domain": "com.microsoft"}, 1), ("FusedMatMul", ["x", "y"], {"domain": "com.microsoft", "transB": 1, "alpha": 0.5}, 1)]
    cases += [("LayerNormalization", ["x", "v", "v"], {}, 1), ("LayerNormalization", ["x", "v"], {"epsilon": 1e-3}, 1), ("LayerNormalization", ["x", "table"], {"axis": 1}, 1)]
    cases += [("SimplifiedLayerNormalization", ["x", "v"], {}, 1), ("SkipLayerNormalization", ["x", "y", "v", "v", "v"], {"domain": "com.microsoft"}, 1)]
    cases += [("SkipSimplifiedLayerNormalization", ["x", "y", "v"], {"domain": "com.microsoft"}, 1)]
    cases += [("MultiHeadAttention", ["x", "y", "y"], {"domain": "com.microsoft", "num_heads": 2}, 1)]
    operators("operators_17", 17, cases)


def recent_operators():
    cases = [("Gelu", ["x"], {}, 1), ("Gelu", ["x"], {"approximate": "tanh"}, 1), ("RMSNormalization", ["x", "v"], {}, 1)]
    cases += [("ReduceMean", ["x", "i1"], {}, 1), ("ReduceMax", ["x", "im1"], {"keepdims": 0}, 1), ("Split", ["x"], {"axis": 1, "num_outputs": 2}, 2)]
    cases += [("Attention", ["q", "k", "k"], {}, 1), ("Attention", ["q", "k", "k"], {"is_causal": 1, "scale": 0.25}, 1)]
    cases += [("Attention", ["q", "q", "q"], {"is_causal": 1}, 1), ("Attention", ["x", "y", "y"], {"q_num_heads": 2, "kv_num_heads": 2}, 1)]
    operators("operators_23", 23, cases)


MODELS = {
    "operators_17": lambda n: plain_operators(),
    "operators_23": lambda n: recent_operators(),
    "plain_gpt_13": lambda n: export(n, plain(False), ["input_ids"], [ids()], ["batch", "sequence"], opset=13),
    "plain_gpt_17": lambda n: export(n, plain(False), ["input_ids"], [ids()], ["batch", "sequence"], opset=17),
    "plain_llama_13": lambda n: export(n, plain(True), ["input_ids"], [ids()], ["batch", "sequence"], opset=13),
    "plain_llama_dynamo_21": lambda n: export(n, plain(True), ["input_ids"], [ids()], dynamo=True, opset=21),
    "gpt2_legacy_17": lambda n: export(n, gpt2(), ["input_ids", "attention_mask"], [ids(), mask()], ["batch", "sequence"]),
    "gpt2_dynamo_20": lambda n: export(n, gpt2("sdpa"), ["input_ids"], [ids()], dynamo=True, opset=20),
    "bert_legacy_14": lambda n: export(n, bert(), ["input_ids", "attention_mask"], [ids(), mask()], ["batch", "sequence"], opset=14),
    "bert_sdpa_17": lambda n: export(n, bert("sdpa"), ["input_ids", "attention_mask"], [ids(), mask()], ["batch", "sequence"]),
    "bert_dynamo_18": lambda n: export(n, bert(), ["input_ids"], [ids()], dynamo=True, opset=18),
    "llama_legacy_17": lambda n: export(n, llama(), ["input_ids", "attention_mask"], [ids(), mask()], ["batch", "sequence"]),
    "llama_dynamo_18": lambda n: export(n, llama("sdpa"), ["input_ids"], [ids()], dynamo=True, opset=18),
    "llama_dynamo_23": lambda n: export(n, llama("sdpa"), ["input_ids"], [ids()], dynamo=True, opset=23),
    "vit_legacy_14": lambda n: export(n, vit(), ["pixel_values"], [image()], opset=14),
    "vit_dynamo_20": lambda n: export(n, vit("sdpa"), ["pixel_values"], [image()], dynamo=True, opset=20),
    "external": lambda n: external(),
    "bert_runtime": lambda n: optimised(n, "bert_legacy_14"),
}

# Exporters and operators that differ most.
SEEDS = ["plain_gpt_13", "plain_llama_13", "gpt2_dynamo_20", "bert_legacy_14", "llama_dynamo_18", "llama_dynamo_23", "vit_dynamo_20"]


def seeds():
    """Seeds of the fuzz target: one layer, few weights and no names, so that mutations hit structure."""
    global FOLDER, LAYERS, SIZE, VOCABULARY
    FOLDER, LAYERS, SIZE, VOCABULARY = os.path.join(os.path.dirname(FOLDER), "../../../fuzz/seeds/onnx"), 1, 4, 4
    for name in SEEDS:
        MODELS[name](name)
        path = os.path.join(FOLDER, name + ".onnx")
        model = onnx.load(path)
        for node in model.graph.node:
            node.name = ""
        onnx.save(model, path)
        os.remove(os.path.join(FOLDER, name + ".json"))
    for name in ["operators_17", "operators_23"]:
        MODELS[name](name)
        os.remove(os.path.join(FOLDER, name + ".json"))


if __name__ == "__main__":
    if sys.argv[1:] == ["seeds"]:
        seeds()
        sys.exit()
    for chosen in sys.argv[1:] or MODELS:
        attempt(chosen, lambda: MODELS[chosen](chosen))

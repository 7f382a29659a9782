#!/usr/bin/env python3
"""Writes an ONNX file of random operators, for `deuteron analyze` to plan: python3 bench/random_onnx.py FILE [OPS] [SEED].

Needs the Python package `onnx` (bench/.venv has it after bench/peers_cpu.py ran once).
"""

import random
import sys

from onnx import TensorProto, helper, save

ROWS, COLS = 4096, 256


def main():
    path = sys.argv[1]
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    rng = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    shape = [ROWS, COLS]
    inputs = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, shape) for i in range(3)]
    inputs += [helper.make_tensor_value_info("w", TensorProto.FLOAT, [COLS, COLS])]
    inputs += [helper.make_tensor_value_info("g", TensorProto.FLOAT, [COLS])]
    values = ["x0", "x1", "x2"]
    nodes = []
    for index in range(count):
        near = values[-8:]
        a, b, out = rng.choice(near), rng.choice(near), f"v{index}"
        kind = rng.choice(["Relu", "Sigmoid", "Tanh", "Exp", "Add", "Mul", "Sub", "Add", "Mul", "LayerNormalization",
                           "Softmax", "Gelu", "MatMul"])
        if kind in ("Add", "Mul", "Sub"):
            nodes.append(helper.make_node(kind, [a, b], [out]))
        elif kind == "LayerNormalization":
            nodes.append(helper.make_node(kind, [a, "g", "g"], [out], axis=-1))
        elif kind == "Softmax":
            nodes.append(helper.make_node(kind, [a], [out], axis=-1))
        elif kind == "MatMul":
            nodes.append(helper.make_node(kind, [a, "w"], [out]))
        else:
            nodes.append(helper.make_node(kind, [a], [out]))
        values.append(out)
    used = {name for node in nodes for name in node.input}
    results = [v for v in values[3:] if v not in used]
    outputs = [helper.make_tensor_value_info(v, TensorProto.FLOAT, shape) for v in results]
    graph = helper.make_graph(nodes, "random", inputs, outputs)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    print(f"{path}: {len(nodes)} operators, {len(results)} results")


if __name__ == "__main__":
    main()

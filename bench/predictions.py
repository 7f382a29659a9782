#!/usr/bin/env python3
"""Compares predicted times on an H200 with the times that the rows of bench/results hold. Needs no GPU.

    python3 bench/predictions.py [--binary FILE] [--commit NAME] [--out FILE] [--all]

Each row of the measured files is written as a graph in text form, `deuteron analyze` plans it for the h200 profile, and the planned time is
compared with the measured one. A row counts if the kernels that it timed are those that the plan has now: of a setting that was measured
several times the newest counts, and matmuls count at the kernel that the plan takes. Prints the error of each family; `--all` prints every
row; `--out FILE` appends one CSV row per family.
"""

import csv
import datetime
import statistics
import tempfile
from pathlib import Path

import measuring
from measuring import ROOT

RESULTS = ROOT / "bench" / "results"
# Ops of the catalogue without a matmul: their kernels are those of the rows. Scores and attention have newer rows of their own.
ELSEWHERE = {"linear_act", "norm_linear", "qkv", "ffn", "attention", "attention_scores", "attention_add_norm", "attention_block",
             "linear_cross_entropy", "moe_int8"}
# What follows `y = matmul x w` of n columns.
EPILOGUES = {
    "none": "out y",
    "bias": "c = weight bf16[{n}] ; z = add y c ; out z",
    "gelu": "c = weight bf16[{n}] ; z = add y c ; a = gelu z ; out a",
    "residual": "c = weight bf16[{n}] ; z = add y c ; r = input bf16[{m},{n}] ; s = add z r ; out s",
    "norm": "c = weight bf16[{n}] ; z = add y c ; r = input bf16[{m},{n}] ; s = add z r ; "
            "g = weight bf16[{n}] ; b = weight bf16[{n}] ; t = layer_norm s g b ; out s t",
}
FIELDS = ["date", "commit", "device", "family", "cases", "median_error", "p90_error", "median_ratio"]


def rows(name):
    with open(RESULTS / name, newline="") as file:
        yield from csv.DictReader(file)


def planned(binary, words, plan="chosen"):
    """The predicted time of a graph, and its kernels."""
    return measuring.ours(binary, "analyze", *words, "--device", "h200")["plans"][plan]


def plan_of_text(binary, text, plan="chosen"):
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text.replace(" ; ", "\n") + "\n")
        file.flush()
        return planned(binary, [file.name], plan)


def of_text(binary, text, plan="chosen"):
    return plan_of_text(binary, text, plan)["us"]


def row_kernels(binary):
    """Ready-made ops take the greedy plan."""
    for row in rows("h200-fusion.csv"):
        if row["op"] in ELSEWHERE:
            continue
        words = [row["op"], "--rows", row["rows"], "--cols", row["cols"], "--dtype", row["dtype"]]
        words += [] if row["direction"] == "forward" else ["--backward"]
        yield " ".join(words), planned(binary, words, "greedy")["us"], float(row["fused_graph_us"])


def heads_text(batch, heads, key_heads, positions, width, causal):
    group = int(heads) // int(key_heads)
    lines = [f"q = input bf16[{batch},{key_heads},{group},{positions},{width}]"]
    for name in "kv":
        lines.append(f"{name}0 = input bf16[{batch},{key_heads},1,{positions},{width}]")
        lines.append(f"{name} = broadcast {name}0 [{batch},{key_heads},{group},{positions},{width}]")
    return " ; ".join([*lines, f"a = attention q k v mask={'causal' if causal else 'full'}"])


def attention(binary):
    for row in rows("h200-attention.csv"):
        kind = row["kind"]
        if "backward" in kind or "dropout" in kind or "probabilities" in kind or int(row["queries"]) < int(row["keys"]):
            continue
        # Of wider heads h200-heads.csv has newer rows.
        if row["dtype"] == "bf16" and row["head"] != "64":
            continue
        b, h, q, d, dtype = row["batch"], row["heads"], row["queries"], row["head"], row["dtype"]
        text = " ; ".join([f"{name} = input {dtype}[{b},{h},{q},{d}]" for name in "qkv"] + ["a = attention q k v mask=causal", "out a"])
        yield f"attention {dtype} {b}x{h}x{q}x{d}", of_text(binary, text), float(row["us"])
    for row in rows("h200-attention-peers.csv"):
        if row["direction"] == "forward" and row["width"] == "64":
            sizes = row["batch"], row["heads"], row["heads"], row["positions"], row["width"]
            yield f"attention beside peers {sizes}", of_text(binary, heads_text(*sizes, True) + " ; out a"), float(row["us"])
    for row in rows("h200-heads.csv"):
        if row["direction"] == "forward":
            sizes, causal = [row[name] for name in ("batch", "heads", "key_heads", "positions", "width")], row["causal"] == "True"
            yield f"attention of heads {sizes} {causal=}", of_text(binary, heads_text(*sizes, causal) + " ; out a"), float(row["us"])


def launches(binary):
    """What follows attention, in as many launches as the plan has."""
    for row in rows("h200-crossover.csv"):
        b, p, n, d = (row[name] for name in ("batch", "sequence", "hidden", "head"))
        heads, m = int(n) // int(d), int(b) * int(p)
        product = f"w = weight bf16[{n},{n}] ; c = weight bf16[{n}] ; m = linear t w c" if row["op"] == "attention_block" else f"m = reshape t [{m},{n}]"
        text = (f"{heads_text(b, heads, heads, p, d, True)} ; h = reshape a [{b},{heads},{p},{d}] ; u = transpose h [0,2,1,3] ; "
                f"t = reshape u [{m},{n}] ; {product} ; r = input bf16[{m},{n}] ; s = add r m ; "
                f"g = weight bf16[{n}] ; b = weight bf16[{n}] ; y = layer_norm s g b ; out s ; out y")
        found = plan_of_text(binary, text)
        measured = row["one_us"] if found["kernels"] == 1 else row["apart_us"]
        yield f"{row['op']} {b}x{p}x{n}, {found['kernels']} kernels", found["us"], float(measured)


def experts(binary):
    for row in rows("h200-experts.csv"):
        m, k, n, e = (row[name] for name in ("rows", "inner", "columns", "experts"))
        text = (f"x = input bf16[{m},{k}] ; e = input i32[{m},1] ; w = weight bf16[{e},{n},{k}] ; b = weight bf16[{e},{n}] ; "
                "l = routed_linear x e w b ; y = gelu l ; out y")
        yield f"moe {m}x{k}x{n}, {e} experts", of_text(binary, text), float(row["moe_us"])


def matmuls(binary):
    newest = {(row["rows"], row["inner"], row["columns"], row["epilogue"]): row for row in rows("h200-matmul.csv")}
    for (m, k, n, epilogue), row in newest.items():
        text = f"x = input bf16[{m},{k}] ; w = weight bf16[{k},{n}] ; y = matmul x w ; " + EPILOGUES[epilogue].format(m=m, n=n)
        measured = [float(us) for us in (row["kernel_us"], row["library_us"]) if us]
        predicted = of_text(binary, text)
        # The faster of our kernel and the library's, which is what a plan is after.
        yield f"matmul {m}x{k}x{n} {epilogue}", predicted, min(measured)


def layers(binary):
    newest = {tuple(row[name] for name in ("layer", "rows", "inner", "columns", "dtype")): row for row in rows("h200-layers.csv")}
    for row in newest.values():
        m, k, n, dtype, us = row["rows"], row["inner"], row["columns"], row["dtype"], float(row["ours_us"])
        if row["layer"] == "norm_linear":
            text = (f"x = input bf16[{m},{k}] ; g = weight bf16[{k}] ; b = weight bf16[{k}] ; t = layer_norm x g b ; "
                    f"w = weight bf16[{k},{n}] ; c = weight bf16[{n}] ; y = linear t w c ; out y")
        elif row["layer"] == "ffn":
            text = (f"x = input bf16[{m},{k}] ; g = weight bf16[{k}] ; b = weight bf16[{k}] ; t = layer_norm x g b ; "
                    f"w = weight bf16[{k},{n}] ; c = weight bf16[{n}] ; y = linear t w c ; a = gelu y ; "
                    f"v = weight bf16[{n},{k}] ; d = weight bf16[{k}] ; z = linear a v d ; s = add z x ; out s")
        elif row["layer"] == "matmul":
            text = f"x = input {dtype}[{m},{k}] ; w = weight {dtype}[{k},{n}] ; y = matmul x w ; out y"
        elif row["layer"] == "linear_cross_entropy":
            text = (f"x = input bf16[{m},{k}] ; w = weight bf16[{n},{k}] ; t = input i32[{m}] ; "
                    "l = linear_cross_entropy x w t ; out l")
        else:
            continue
        yield f"{row['layer']} {m}x{k}x{n} {dtype}", of_text(binary, text, "greedy"), us


FAMILIES = [("row kernels", row_kernels), ("attention", attention), ("launches of attention", launches), ("experts", experts),
            ("matmuls", matmuls), ("layers", layers)]


def summary(errors):
    """Median and 90th percentile of |predicted / measured - 1|, and the median of the ratio."""
    ratios = [predicted / measured for _, predicted, measured in errors]
    away = sorted(abs(ratio - 1) for ratio in ratios)
    return {"cases": len(ratios), "median_error": round(statistics.median(away), 4),
            "p90_error": round(away[min(len(away) - 1, int(0.9 * len(away)))], 4),
            "median_ratio": round(statistics.median(ratios), 4)}


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--out", type=Path, help="a file that one CSV row per family is appended to")
    parser.add_argument("--all", action="store_true", help="print every case")
    arguments = parser.parse_args()
    found = {family: list(cases(arguments.binary)) for family, cases in FAMILIES}
    found["all"] = [case for cases in found.values() for case in cases]
    for family, cases in found.items():
        if arguments.all and family != "all":
            for name, predicted, measured in sorted(cases, key=lambda case: case[1] / case[2]):
                print(f"{predicted / measured:6.2f}  {measured:9.1f} us measured  {predicted:9.1f} predicted  {name}")
        one = summary(cases)
        print(f"{family}: {one['cases']} cases, median error {one['median_error']:.1%}, 90th percentile {one['p90_error']:.1%}, "
              f"median of predicted over measured {one['median_ratio']:.2f}")
        if arguments.out:
            row = {"date": datetime.date.today().isoformat(), "commit": arguments.commit or measuring.head(), "device": "NVIDIA H200",
                   "family": family, **one}
            is_new = not arguments.out.exists()
            with open(arguments.out, "a", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                if is_new:
                    writer.writeheader()
                writer.writerow(row)


if __name__ == "__main__":
    main()

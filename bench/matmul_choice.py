#!/usr/bin/env python3
"""Matmuls of random sizes in bf16 on a GPU: the variant that plans take beside the fastest of all.

    python3 bench/matmul_choice.py [--binary PATH] [--commit HASH] [--seed N] [--cases N] [--processes N]

Sizes are drawn log-uniformly: 128 to 32,768 rows, inner sizes and columns from 256 to 8,192, multiples of 8; each with one of the
epilogues of `deuteron bench matmul`. Every case runs twice: first many at once, so that kernels are compiled by all cores and kept on
disk, then alone, which counts.

A row for each variant that was measured goes to h200-matmul-choice.csv in the folder named by OUT (default ./out).
Exit code 0: all was measured and is right; 1: some is wrong or failed; 2: could not be measured.
"""

import math
import random
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor

import measuring
from measuring import Failure

EPILOGUES = ["none", "none", "bias", "gelu", "residual", "norm"]
COLUMNS = "rows inner columns epilogue variant chosen verified worst_ratio us".split()
# Of the result, in bytes of two each: several copies of it have to fit.
MOST = 1 << 31


def draw(source):
    """Words of the command for a random matmul."""
    def size(least, most, step):
        return max(1, round(math.exp(source.uniform(math.log(least), math.log(most))) / step)) * step
    while True:
        rows, inner, columns = size(128, 32768, source.choice([1, 8, 128])), size(256, 8192, 8), size(256, 8192, 8)
        epilogue = source.choice(EPILOGUES)
        if epilogue == "norm":
            columns = min(columns, 1536)
        if 2 * rows * columns <= MOST and 2 * rows * inner * columns <= 1e12:
            return ["--rows", str(rows), "--weights", f"{inner}x{columns}", "--epilogue", epilogue, "--dtype", "bf16", "--device", "cuda"]


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--processes", type=int, default=14)
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    cases = [draw(source) for _ in range(arguments.cases)]

    def measure(words):
        try:
            return measuring.ours(arguments.binary, "bench", "matmul", *words)
        except Failure as failure:
            return failure

    with ThreadPoolExecutor(arguments.processes) as pool:
        list(pool.map(measure, cases))
    table = measuring.Table("h200-matmul-choice.csv", COLUMNS, seed=arguments.seed, **measuring.gpu(), commit=arguments.commit)
    over_best, over_library, failed = [], [], 0
    for words in cases:
        found = measure(words)
        if isinstance(found, Failure):
            print(found)
            failed += 1
            continue
        for row in found:
            table.add([row[column] for column in COLUMNS])
            failed += not row["verified"]
        best, chosen = found[0], next((row for row in found if row["chosen"]), None)
        library = next((row for row in found if row["variant"] == "library"), None)
        if chosen is None:
            print(f"{' '.join(words[1:6:2])}: no variant is chosen")
            failed += 1
            continue
        over_best.append(chosen["us"] / best["us"])
        if library:
            over_library.append(library["us"] / chosen["us"])
        print(f"{chosen['rows']} x {chosen['inner']} x {chosen['columns']}, {chosen['epilogue']:<9} {chosen['us']:9.2f} us, "
              f"{over_best[-1]:.2f} of the best"
              + (f", library / chosen {over_library[-1]:.2f}" if library else "")
              + ("" if over_best[-1] < 1.03 else f"  took {chosen['variant']}; best {best['variant']}"), flush=True)
    for name, ratios in [("chosen / best", over_best), ("library / chosen", over_library)]:
        if ratios:
            ordered = sorted(ratios)
            print(f"{name}: geometric mean {statistics.geometric_mean(ratios):.3f}, median {statistics.median(ratios):.3f}, "
                  f"least {ordered[0]:.3f}, most {ordered[-1]:.3f}, {len(ratios)} matmuls")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failure, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)

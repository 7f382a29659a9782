#!/usr/bin/env python3
"""Rows routed to experts in bf16 on a GPU, 4096 -> 4096 with bias and GELU: `moe`, torch and a grouped matmul in Triton, all as CUDA graphs.

    python3 bench/peers_experts.py [--binary PATH] [--commit HASH] [--rows N ...] [--experts N ...]

Ours is `deuteron bench moe --json`, with the sort of its rows. Peers know beforehand where each expert's rows are:

- loop: for each expert, its rows are taken, multiplied with bias and GELU in the vendor's library, and put back.
- matmuls: the library's matmuls of rows that lie together already, and nothing else.
- grouped: `torch._grouped_mm` of such rows, and nothing else.
- triton: one launch over tiles of one expert each, which reads and writes rows where they lie, with bias and GELU; the faster of two tiles.

Rows go to h200-experts.csv in the folder named by OUT (default ./out).
"""

import statistics

import torch

import measuring

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

SIZE = 4096
# Rows, columns and K of Triton's tiles, warps, stages.
TILES = [(128, 256, 64, 8, 3), (128, 128, 64, 8, 4)]


if triton:

    @triton.jit
    def grouped(x, w, b, y, order, tiles, N: tl.constexpr, K: tl.constexpr, count, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
        index, across = tl.program_id(0), tl.cdiv(N, BN)
        band, inside = index // (8 * across), index % (8 * across)
        high = tl.minimum(8, count - band * 8)
        tile, column = band * 8 + inside % high, inside // high
        expert, first, end = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
        place = first + tl.arange(0, BM)
        there = place < end
        row = tl.load(order + place, mask=there, other=0)
        columns, inner = column * BN + tl.arange(0, BN), tl.arange(0, BK)
        left, right = x + row[:, None] * K + inner[None, :], w + expert * N * K + columns[None, :] * K + inner[:, None]
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for _ in range(0, K, BK):
            sums = tl.dot(tl.load(left, mask=there[:, None], other=0.0), tl.load(right), sums)
            left += BK
            right += BK
        v = sums + tl.load(b + expert * N + columns)[None, :].to(tl.float32)
        v = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
        tl.store(y + row[:, None] * N + columns[None, :], v.to(y.dtype.element_ty), mask=there[:, None])


def triton_calls(operands, order, starts):
    """One for each tile."""
    x, w, b = operands
    y = torch.empty(len(x), SIZE, device="cuda", dtype=x.dtype)
    for rows, columns, inner, warps, stages in TILES:
        firsts = [(e, at, starts[e + 1]) for e in range(len(w)) for at in range(starts[e], starts[e + 1], rows)]
        tiles = torch.tensor(firsts, device="cuda")
        grid = (len(tiles) * -(-SIZE // columns),)
        sizes = (SIZE, SIZE, len(tiles), rows, columns, inner)
        yield lambda grid=grid, tiles=tiles, sizes=sizes, options={"num_warps": warps, "num_stages": stages}: grouped[grid](
            x, w, b, y, order, tiles, *sizes, **options)


def theirs(rows, experts):
    """Microseconds of each peer, by name; those that cannot be measured are left out with a note."""
    make = lambda *sizes: torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)
    x, w, b = operands = make(rows, SIZE), make(experts, SIZE, SIZE).mul_(SIZE**-0.5), make(experts, SIZE)
    chosen = torch.randint(0, experts, (rows,), device="cuda")
    order = torch.argsort(chosen, stable=True)
    starts = [0, *torch.bincount(chosen, minlength=experts).cumsum(0).tolist()]
    parts = [(e, slice(starts[e], starts[e + 1])) for e in range(experts) if starts[e] < starts[e + 1]]
    together, y = x[order], torch.empty(rows, SIZE, device="cuda", dtype=x.dtype)
    ends = torch.tensor(starts[1:], dtype=torch.int32, device="cuda")

    def loop():
        for e, part in parts:
            own = torch._addmm_activation(b[e], x.index_select(0, order[part]), w[e].t(), use_gelu=True)
            y.index_copy_(0, order[part], own)
        return y

    def matmuls():
        for e, part in parts:
            torch.mm(together[part], w[e].t(), out=y[part])
        return y

    calls = {"loop": [loop], "matmuls": [matmuls], "grouped": [lambda: torch._grouped_mm(together, w.transpose(-1, -2), offs=ends)]}
    graphs = {}
    for name in (*calls, "triton"):
        try:
            every = calls[name] if name in calls else triton_calls(operands, order, starts)
            graphs[name] = [measuring.Recorded([call]) for call in every]
        except Exception as error:  # A peer that is missing or refuses is no reason to measure nothing.
            print(f"note: {name} is left out: {error!r}"[:200], flush=True)
    times = {name: [[] for _ in every] for name, every in graphs.items()}
    for _ in range(5):
        for name, every in graphs.items():
            for found, graph in zip(times[name], every):
                found.append(graph.microseconds(5))
    return {name: min(map(statistics.median, every)) for name, every in times.items()}


def ours(binary, rows, experts):
    words = ["--rows", str(rows), "--cols", str(SIZE), "--experts", str(experts), "--dtype", "bf16", "--device", "cuda"]
    return measuring.ours(binary, "bench", "moe", *words)[0]["fused_graph_us"]


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256, 4096, 16384])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    arguments = parser.parse_args()
    peers = ["loop", "matmuls", "grouped", "triton"]
    columns = ["rows", "inner", "columns", "experts", "moe_us", *(f"{name}_us" for name in peers)]
    table = measuring.Table("h200-experts.csv", columns, **measuring.gpu(), torch=torch.__version__, commit=arguments.commit)
    print(f"{'bf16, microseconds':<24}" + "".join(f"{name:>10}" for name in ("moe", *peers)) + "  triton / moe")
    for experts in arguments.experts:
        for rows in arguments.rows:
            own, others = ours(arguments.binary, rows, experts), theirs(rows, experts)
            torch.cuda.empty_cache()
            cells = [own, *(others.get(name) for name in peers)]
            shown = "".join(f"{cell:10.1f}" if cell else f"{'-':>10}" for cell in cells)
            ratio = f"{others['triton'] / own:.2f}" if "triton" in others else "-"
            print(f"{rows} rows, {experts} experts".ljust(24) + shown + f"  {ratio}", flush=True)
            table.add([rows, SIZE, SIZE, experts, *cells])


if __name__ == "__main__":
    main()

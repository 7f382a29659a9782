#!/usr/bin/env python3
"""Rows routed to experts on a GPU, 4096 -> 4096 with bias and GELU: `moe`, `moe_int8`, torch and a grouped matmul in Triton, all as CUDA graphs.

    python3 bench/peers_experts.py [--binary PATH] [--commit HASH] [--rows N ...] [--experts N ...] [--ops moe moe_int8]

Ours is `deuteron bench OP --json`, with the sort of its rows: `moe` in bf16, `moe_int8` with results in bf16 and with results quantised again to
int8 rows. Peers know beforehand where each expert's rows are. Those of bf16:

- loop: for each expert, its rows are taken, multiplied with bias and GELU in the vendor's library, and put back.
- matmuls: the library's matmuls of rows that lie together already, and nothing else.
- grouped: `torch._grouped_mm` of such rows, and nothing else.
- triton: one launch over tiles of one expert each, which reads and writes rows where they lie, with bias and GELU; the faster of two tiles.

Those of int8 give bf16:

- matmuls: `torch._int_mm` for each expert, and nothing else. It takes 17 rows or more, so an expert's rows are padded to 32, and to a multiple of 8.
- triton: the same kernel with int8 operands, and scales of rows and columns before bias and GELU.

For `moe_int8` rows also have MiB above operands and results: the peak of torch's allocator and the workspace of a call from Python, where the
package `deuteron` is there.

Rows go to h200-experts.csv and h200-experts-int8.csv in the folder named by OUT (default ./out).
"""

import statistics

import torch

import measuring

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

try:
    import deuteron
except ImportError:
    deuteron = None

SIZE = 4096
# Rows, columns and K in bytes of Triton's tiles, warps, stages.
TILES = [(128, 256, 128, 8, 3), (128, 128, 128, 8, 4)]
# Rows of an operand of `torch._int_mm`: at least, and a multiple of.
LEAST, STEP = 32, 8


if triton:

    @triton.jit
    def grouped(x, x_scale, w, w_scale, b, y, order, tiles, count, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BYTES: tl.constexpr):
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
        sums = tl.zeros((BM, BN), dtype=tl.int32 if BYTES else tl.float32)
        for _ in range(0, K, BK):
            sums = tl.dot(tl.load(left, mask=there[:, None], other=0), tl.load(right), sums, out_dtype=tl.int32 if BYTES else tl.float32)
            left += BK
            right += BK
        v = sums.to(tl.float32)
        if BYTES:
            v = v * tl.load(x_scale + row, mask=there, other=0.0)[:, None] * tl.load(w_scale + expert * N + columns)[None, :]
        v = v + tl.load(b + expert * N + columns)[None, :].to(tl.float32)
        v = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
        tl.store(y + row[:, None] * N + columns[None, :], v.to(y.dtype.element_ty), mask=there[:, None])


class Routing:
    """Experts of some rows: the rows in the order of their experts, and each expert's part of them."""

    def __init__(self, rows, experts):
        self.chosen = torch.randint(0, experts, (rows,), device="cuda")
        self.order = torch.argsort(self.chosen, stable=True)
        self.starts = [0, *torch.bincount(self.chosen, minlength=experts).cumsum(0).tolist()]
        self.parts = [(e, slice(first, end)) for e, (first, end) in enumerate(zip(self.starts, self.starts[1:])) if first < end]


def triton_calls(x, x_scale, w, w_scale, b, routing):
    """One for each tile."""
    y = torch.empty(len(x), SIZE, device="cuda", dtype=b.dtype)
    for rows, columns, inner, warps, stages in TILES:
        firsts = [(e, at, part.stop) for e, part in routing.parts for at in range(part.start, part.stop, rows)]
        tiles = torch.tensor(firsts, device="cuda")
        grid = (len(tiles) * -(-SIZE // columns),)
        sizes = (len(tiles), SIZE, SIZE, rows, columns, inner // x.element_size(), x.dtype == torch.int8)
        yield lambda grid=grid, tiles=tiles, sizes=sizes, options={"num_warps": warps, "num_stages": stages}: grouped[grid](
            x, x_scale, w, w_scale, b, y, routing.order, tiles, *sizes, **options)


def measured(calls):
    """Microseconds by name, of the fastest of each name's calls, all in turn; those that cannot be measured are left out with a note."""
    graphs = {}
    for name, make in calls.items():
        try:
            graphs[name] = [measuring.Recorded([call]) for call in make()]
        except Exception as error:  # A peer that is missing or refuses is no reason to measure nothing.
            print(f"note: {name} is left out: {error!r}"[:200], flush=True)
    times = {name: [[] for _ in every] for name, every in graphs.items()}
    for _ in range(5):
        for name, every in graphs.items():
            for found, graph in zip(times[name], every):
                found.append(graph.microseconds(5))
    return {name: min(map(statistics.median, every)) for name, every in times.items()}


def theirs(rows, experts):
    """Microseconds of each peer in bf16, by name."""
    make = lambda *sizes: torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)
    x, w, b = make(rows, SIZE), make(experts, SIZE, SIZE).mul_(SIZE**-0.5), make(experts, SIZE)
    routing = Routing(rows, experts)
    together, y = x[routing.order], torch.empty(rows, SIZE, device="cuda", dtype=x.dtype)
    ends = torch.tensor(routing.starts[1:], dtype=torch.int32, device="cuda")

    def loop():
        for e, part in routing.parts:
            own = torch._addmm_activation(b[e], x.index_select(0, routing.order[part]), w[e].t(), use_gelu=True)
            y.index_copy_(0, routing.order[part], own)
        return y

    def matmuls():
        for e, part in routing.parts:
            torch.mm(together[part], w[e].t(), out=y[part])
        return y

    return measured({
        "loop": lambda: [loop],
        "matmuls": lambda: [matmuls],
        "grouped": lambda: [lambda: torch._grouped_mm(together, w.transpose(-1, -2), offs=ends)],
        "triton": lambda: list(triton_calls(x, x, w, w, b, routing)),
    })


def bytes_of(rows, experts):
    """Microseconds of each peer in int8, by name, and MiB of our calls by the name of their result."""
    make = lambda *sizes: torch.randint(-127, 128, sizes, device="cuda", dtype=torch.int8)
    x, w = make(rows, SIZE), make(experts, SIZE, SIZE)
    scale = lambda *sizes: torch.rand(*sizes, device="cuda").mul_(1e-2)
    x_scale, w_scale = scale(rows, 1), scale(experts, SIZE)
    b = torch.randn(experts, SIZE, device="cuda", dtype=torch.bfloat16)
    routing = Routing(rows, experts)
    padded = []
    for e, part in routing.parts:
        own = x[routing.order[part]]
        more = max(LEAST, -(-len(own) // STEP) * STEP) - len(own)
        padded.append((torch.cat([own, own.new_zeros(more, SIZE)]), w[e].t()))
    times = measured({
        "matmuls": lambda: [lambda: [torch._int_mm(own, weight) for own, weight in padded]],
        "triton": lambda: list(triton_calls(x, x_scale, w, w_scale, b, routing)),
    })
    return times, memory(x, x_scale, routing.chosen.int(), w, w_scale, b)


def memory(*operands):
    """MiB above operands and results of a call from Python, by the dtype of its result."""
    if deuteron is None:
        return {}
    workspaces = lambda: sum(every["workspace_bytes"] for device, every in deuteron.memory_stats().items() if device.startswith("cuda"))
    peaks = {}
    for name, requantize in (("bf16", False), ("int8", True)):
        call = lambda: deuteron.moe_int8(*operands, act="gelu", requantize=requantize)
        deuteron.empty_cache()
        # What the programs of other calls keep. What this one's program keeps between its calls counts as its own.
        held = workspaces()
        call()
        torch.cuda.synchronize()
        deuteron.empty_cache()
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = call()
        torch.cuda.synchronize()
        results = results if isinstance(results, tuple) else (results,)
        own = sum(result.numel() * result.element_size() for result in results)
        peaks[name] = (torch.cuda.max_memory_allocated() - kept - own + workspaces() - held) / 2**20
    return peaks


def ours(binary, op, rows, experts):
    words = ["--rows", str(rows), "--cols", str(SIZE), "--experts", str(experts), "--dtype", "bf16", "--device", "cuda"]
    return measuring.ours(binary, "bench", op, *words)[0]["fused_graph_us"]


def show(name, cells, other, own):
    shown = "".join(f"{cell:12.1f}" if cell is not None else f"{'-':>12}" for cell in cells)
    print(f"{name:<24}" + shown + (f"  {other / own:.2f}" if other else "  -"), flush=True)


def moe(arguments, last):
    peers = ["loop", "matmuls", "grouped", "triton"]
    columns = ["rows", "inner", "columns", "experts", "moe_us", *(f"{name}_us" for name in peers)]
    table = measuring.Table("h200-experts.csv", columns, **last)
    print(f"{'bf16, microseconds':<24}" + "".join(f"{name:>12}" for name in ("moe", *peers)) + "  triton / moe")
    for experts in arguments.experts:
        for rows in arguments.rows:
            own, others = ours(arguments.binary, "moe", rows, experts), theirs(rows, experts)
            torch.cuda.empty_cache()
            cells = [own, *(others.get(name) for name in peers)]
            show(f"{rows} rows, {experts} experts", cells, others.get("triton"), own)
            table.add([rows, SIZE, SIZE, experts, *cells])


def moe_int8(arguments, last):
    columns = "rows inner columns experts bf16_us int8_us matmuls_us triton_us bf16_mib int8_mib".split()
    table = measuring.Table("h200-experts-int8.csv", columns, **last)
    print(f"{'int8, microseconds, MiB':<24}" + "".join(f"{name:>12}" for name in ("to bf16", "to int8", "_int_mm", "triton", "MiB, bf16", "MiB, int8"))
          + "  _int_mm / to bf16")
    for experts in arguments.experts:
        for rows in arguments.rows:
            own = [ours(arguments.binary, f"moe_int8 requantize={again}", rows, experts) for again in ("false", "true")]
            others, peaks = bytes_of(rows, experts)
            torch.cuda.empty_cache()
            cells = [*own, *map(others.get, ("matmuls", "triton")), *map(peaks.get, ("bf16", "int8"))]
            show(f"{rows} rows, {experts} experts", cells, others.get("matmuls"), own[0])
            table.add([rows, SIZE, SIZE, experts, *cells])


OPS = {"moe": moe, "moe_int8": moe_int8}


def main():
    parser = measuring.Arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 1024, 16384])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    arguments = parser.parse_args()
    last = measuring.gpu() | {"torch": torch.__version__, "commit": arguments.commit}
    for op in arguments.ops:
        OPS[op](arguments, last)


if __name__ == "__main__":
    main()

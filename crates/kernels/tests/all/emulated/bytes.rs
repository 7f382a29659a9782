//! Matmuls of bytes by warpgroups.

use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{Kernel, Launch, Source};
use deuteron_graph::Graph;
use deuteron_matmul::cuda::hopper::{HopperKernel, HopperTile, Sharing};

use super::{Lanes, Launched, Mistake, TileProgram, check_mistakes, compiler, greedy, only, written};

/// `y = x w + b`.
fn graph([m, n, k]: [usize; 3]) -> Graph {
    let text = format!(
        "x = input i8[{m},{k}] ; w = weight i8[{n},{k}] ; b = weight f32[{n}] ; s = matmul x w transpose_b ; y = add s b ; out y"
    );
    text.parse().unwrap()
}

/// A launch of it as `emulator/bytes.cpp` reads it.
fn launched(graph: &Graph, [m, n, k]: [usize; 3], launch: &Launch) -> String {
    let grids = launch.grids().expect("grids");
    let [grid] = grids.list.as_slice() else { panic!("one grid") };
    let names: Vec<&str> = launch.arguments().iter().map(|arg| graph.given_name(arg.base).unwrap_or("y")).collect();
    let memory = format!("{} {}", grids.workspace, grids.persistent);
    format!("bytes {m} {n} {k} {memory}\narguments {} {}\n{}", names.len(), names.join(" "), written(grid))
}

/// The same, whose rows are made bytes again.
fn quantized([m, n, k]: [usize; 3]) -> Graph {
    let text = format!(
        "x = input i8[{m},{k}] ; w = weight i8[{n},{k}] ; b = weight f32[{n}] ; t = matmul x w transpose_b ; y = add t b
q, s = quantize_int8 y ; out q s"
    );
    text.parse().unwrap()
}

/// The kernel with tiles of this many columns, and its launch.
fn matmul(
    graph: &Graph,
    sizes: [usize; 3],
    (columns, turns): (usize, bool),
    processors: usize,
) -> (CudaSource, String) {
    let plan = greedy(graph);
    let [group] = plan.groups.as_slice() else { panic!("{} kernels", plan.groups.len()) };
    let target = CudaTarget::new(Arch::Sm90a, processors);
    let kernel = HopperKernel::of(&group.draft(graph, &plan.placement), &target).expect("a matmul for Hopper");
    let sharing = if turns { Sharing::Turns } else { Sharing::Rows };
    let by_rows = graph.outputs().len() > 1;
    let tile = HopperTile { rows: 128, columns, sharing, split: 1, by_rows, sharers: 1 };
    assert!(kernel.tiles(&target, f64::INFINITY).contains(&tile));
    let Kernel { source: Source::Cuda(source), launch } = kernel.with_tile(tile).kernel(&target) else {
        panic!("a text")
    };
    let launch = launched(graph, sizes, &launch);
    (source, launch)
}

/// Rows, columns and inner sizes that are no multiples of a tile's, and columns that no vector divides.
#[test]
fn matmuls_of_bytes() {
    let Some(compiler) = compiler() else { return };
    for (name, sizes, tile, processors) in [
        ("bytes_walk", [300, 200, 272], (64, false), 2),
        ("bytes_turns", [300, 264, 272], (128, true), 1),
        ("bytes_wide", [130, 520, 144], (256, false), 2),
        ("bytes_pieces", [40, 300, 656], (144, false), 1),
        ("bytes_odd", [17, 51, 16], (64, true), 1),
        ("bytes_pairs", [17, 98, 32], (96, false), 1),
    ] {
        let (source, launch) = matmul(&graph(sizes), sizes, tile, processors);
        let program = TileProgram::compile(compiler, name, "bytes.cpp", "matmul_hopper", &source.text);
        let (ok, said) = program.run(&launch, processors, Lanes::Together, 1..3, 0);
        assert!(ok, "{name}:\n{said}");
    }
}

#[test]
fn mistakes_with_bytes() {
    let mistakes: [Mistake; 5] = [
        ("mbarrier_wait(ring.full(at), Ring::parity(at));", "", "in flight"),
        ("mbarrier_wait(ring.empty(at), Ring::parity(at) ^ 1);", "", "more arrivals"),
        ("release(ring.empty(turn * steps + steps - 1));", "", "deadlock"),
        ("if (TURNS) named_barrier_arrive(TURN_BARRIER + (warpgroup ^ 1), MULTIPLIERS);", "", "deadlock"),
        ("tile.row + 16 * warp + 64 * half", "tile.row + 16 * warp", "FAILED"),
    ];
    let sizes = [300, 200, 272];
    let (source, launch) = matmul(&graph(sizes), sizes, (64, true), 2);
    let launched = Launched { source, entry: "matmul_hopper", launch, driver: "bytes.cpp" };
    check_mistakes("mistakes_with_bytes", launched, 2, 2, &mistakes);
}

/// Rows that blocks have together: of one tile, of as many as there are blocks, and of more than blocks have in a turn.
#[test]
fn bytes_made_bytes_again() {
    let Some(compiler) = compiler() else { return };
    for (name, sizes, tile, processors) in [
        ("bytes_again_alone", [300, 64, 144], (64, false), 2),
        ("bytes_again_shared", [300, 200, 272], (64, false), 5),
        ("bytes_again_turns", [400, 330, 272], (64, true), 6),
        ("bytes_again_wide", [130, 520, 144], (256, false), 3),
        ("bytes_again_few_rows", [17, 98, 32], (64, true), 2),
    ] {
        let (source, launch) = matmul(&quantized(sizes), sizes, tile, processors);
        let program = TileProgram::compile(compiler, name, "bytes.cpp", "matmul_hopper", &source.text);
        let (ok, said) = program.run(&launch, processors, Lanes::Together, 1..3, 0);
        assert!(ok, "{name}:\n{said}");
    }
}

#[test]
fn mistakes_with_bytes_made_bytes_again() {
    let mistakes: [Mistake; 5] = [
        ("there = there && (u32)(words[own][slot][i] >> 32) == at.mark;", "", "FAILED"),
        ("store_relaxed(at.word(BEFORE + slot, at.part(), own), word);", ";", "deadlock"),
        ("store_relaxed(p.g_launches, load_relaxed(p.g_launches) + 1);", "", "FAILED"),
        ("shuffle_xor(own, apart)", "own", "FAILED"),
        ("down(own) < left ? down(own) : 0", "0", "FAILED"),
    ];
    let sizes = [700, 330, 272];
    let (source, launch) = matmul(&quantized(sizes), sizes, (64, false), 6);
    let launched = Launched { source, entry: "matmul_hopper", launch, driver: "bytes.cpp" };
    check_mistakes("mistakes_with_bytes_made_bytes_again", launched, 6, 2, &mistakes);
}

/// Inner sizes that no vector divides, columns that no strip does.
#[test]
fn few_rows_of_bytes() {
    let Some(compiler) = compiler() else { return };
    for (name, sizes, processors) in [
        ("bytes_of_one_row", [1, 50, 1040], 2),
        ("bytes_of_slices", [5, 9, 1700], 4),
        ("bytes_of_idle_warps", [2, 20, 3000], 4),
        ("bytes_of_odd_rows", [3, 33, 77], 1),
        ("bytes_of_eight_rows", [8, 64, 516], 3),
    ] {
        let graph = graph(sizes);
        let (source, launch, _) = only(&graph, &greedy(&graph), processors);
        assert_eq!(source.name, "skinny", "{name}");
        let program = TileProgram::compile(compiler, name, "bytes.cpp", "skinny", &source.text);
        for (lanes, seeds) in [(Lanes::Together, 1..3), (Lanes::Apart, 101..102)] {
            let (ok, said) = program.run(&launched(&graph, sizes, &launch), 4, lanes, seeds, 0);
            assert!(ok, "{name}, {lanes:?}:\n{said}");
        }
    }
}

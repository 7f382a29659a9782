//! Matmuls of few rows, and by warpgroups.

use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget, Grid};
use deuteron_codegen::{Kernel, Launch, Source};
use deuteron_graph::{Dtype, Graph};
use deuteron_matmul::cuda::hopper::{HopperKernel, HopperTile, Sharing};

use super::{Lanes, Launched, Mistake, TileProgram, check_mistakes, compiler, greedy, only, written};

/// `y = x w + b`, batched, and which operands are transposed.
#[derive(Debug, Clone, Copy)]
struct Product {
    sizes: [usize; 3],
    batch: usize,
    left: bool,
    right: bool,
    dtype: Dtype,
    /// whether a residual and a norm follow
    normed: bool,
}

impl Product {
    const fn new(sizes: [usize; 3], right: bool) -> Product {
        Product { sizes, batch: 1, left: false, right, dtype: Dtype::Bf16, normed: false }
    }

    fn graph(&self) -> Graph {
        let &Product { sizes: [m, n, k], batch, left, right, dtype, normed } = self;
        let matrix = |transposed: bool, high: usize, wide: usize| {
            let (high, wide) = if transposed { (wide, high) } else { (high, wide) };
            if batch == 1 { format!("{high},{wide}") } else { format!("{batch},{high},{wide}") }
        };
        let flag = |set: bool, name: &str| if set { format!(" {name}") } else { String::new() };
        let (a, b) = (flag(left, "transpose_a"), flag(right, "transpose_b"));
        let rest = match normed {
            false => "y = add p b ; out y".to_string(),
            true => format!(
                "r = input {dtype}[{}] ; g = weight {dtype}[{n}] ; h = weight {dtype}[{n}] ; l = add p b ; s = add l r ; \
                 y = layer_norm s g h eps=1e-5 ; out s ; out y",
                matrix(false, m, n)
            ),
        };
        let text = format!(
            "x = input {dtype}[{}] ; w = weight {dtype}[{}] ; b = weight {dtype}[{n}] ; p = matmul x w{a}{b} ; {rest}",
            matrix(left, m, k),
            matrix(right, k, n),
        );
        text.parse().unwrap_or_else(|error| panic!("{error:?}\n{text}"))
    }

    /// A launch of it, as `emulator/matmul.cpp` reads it.
    fn launch(&self, graph: &Graph, launch: &Launch, grid: &Grid) -> String {
        let &Product { sizes: [m, n, k], batch, left, right, dtype, .. } = self;
        let names: Vec<&str> = launch.arguments().iter().map(|arg| graph.given_name(arg.base).unwrap_or("y")).collect();
        let (left, right, storage) = (u8::from(left), u8::from(right), if dtype == Dtype::F16 { 1 } else { 2 });
        format!(
            "matmul {m} {n} {k} {batch} {left} {right} {storage}\narguments {} {}\n{}",
            names.len(),
            names.join(" "),
            written(grid)
        )
    }
}

/// The kernel of a matmul of few rows, and its launch.
fn matmul(sizes: [usize; 3], transposed: bool, processors: usize) -> (CudaSource, Grid, String) {
    let product = Product::new(sizes, transposed);
    let graph = product.graph();
    let (source, launch, grids) = only(&graph, &greedy(&graph), processors);
    let [grid] = grids.list.as_slice() else { panic!("{} grids", grids.list.len()) };
    (source, grid.clone(), product.launch(&graph, &launch, grid))
}

/// The same on Hopper's matrix units, cut in some way.
fn hopper_matmul(product: &Product, tile: HopperTile, processors: usize) -> (CudaSource, String) {
    let graph = product.graph();
    let plan = greedy(&graph);
    let [group] = plan.groups.as_slice() else { panic!("{} kernels", plan.groups.len()) };
    let target = CudaTarget::new(Arch::Sm90a, processors);
    let kernel = HopperKernel::of(&group.draft(&graph, &plan.placement), &target).expect("a matmul for Hopper");
    let Kernel { source: Source::Cuda(source), launch } = kernel.with_tile(tile).kernel(&target) else {
        panic!("a text")
    };
    let [grid] = launch.grids().expect("grids").list.as_slice() else { panic!("one grid") };
    (source, product.launch(&graph, &launch, grid))
}

const fn tile(columns: usize, turns: bool, split: usize) -> HopperTile {
    let sharing = if turns { Sharing::Turns } else { Sharing::Rows };
    HopperTile { rows: 128, columns, sharing, split, by_rows: false }
}

const fn by_rows(rows: usize, columns: usize, sharing: Sharing) -> HopperTile {
    HopperTile { rows, columns, sharing, split: 1, by_rows: true }
}

/// All transpositions, types and cuts; rows, columns and inner sizes that are no multiples of a tile's.
#[test]
fn matmuls_by_warpgroups() {
    let Some(compiler) = compiler() else { return };
    let transposed = Product { left: true, ..Product::new([136, 104, 72], false) };
    let cases = [
        ("hopper_turns", Product::new([300, 200, 136], true), tile(64, true, 1), 2, 2),
        (
            "hopper_turns_rows",
            Product { dtype: Dtype::F16, ..Product::new([129, 400, 264], false) },
            tile(192, true, 1),
            1,
            1,
        ),
        ("hopper_turns_columns", transposed, tile(96, true, 1), 1, 1),
        ("hopper_tiles", Product::new([200, 144, 520], false), tile(144, false, 1), 4, 2),
        ("hopper_wide", Product { left: true, ..Product::new([64, 264, 200], true) }, tile(256, false, 1), 4, 2),
        ("hopper_split", Product::new([130, 100, 520], true), tile(128, false, 4), 8, 8),
        ("hopper_split_rows", Product { left: true, ..Product::new([24, 120, 264], false) }, tile(160, false, 2), 8, 4),
        ("hopper_batch", Product { batch: 3, ..Product::new([24, 40, 72], false) }, tile(64, true, 1), 2, 2),
        ("hopper_odd", Product::new([9, 51, 64], true), tile(64, false, 1), 2, 2),
        ("hopper_tall", Product::new([300, 104, 200], false), HopperTile { rows: 256, ..tile(96, false, 1) }, 4, 2),
        ("hopper_registers", Product::new([200, 104, 200], true), by_rows(128, 64, Sharing::Rows), 4, 2),
        (
            "hopper_registers_tall",
            Product { left: true, ..Product::new([264, 136, 72], false) },
            by_rows(256, 128, Sharing::Rows),
            4,
            2,
        ),
        ("hopper_registers_beside", Product::new([200, 264, 136], false), by_rows(128, 256, Sharing::Columns), 4, 2),
        (
            "hopper_norm",
            Product { normed: true, ..Product::new([200, 128, 136], true) },
            by_rows(128, 64, Sharing::Rows),
            4,
            2,
        ),
        (
            "hopper_norm_tall",
            Product { normed: true, batch: 2, ..Product::new([300, 360, 72], false) },
            by_rows(256, 128, Sharing::Rows),
            12,
            6,
        ),
        (
            "hopper_norm_beside",
            Product { normed: true, ..Product::new([100, 200, 72], true) },
            by_rows(64, 128, Sharing::Columns),
            4,
            4,
        ),
        (
            "hopper_norm_in_block",
            Product { normed: true, dtype: Dtype::F16, ..Product::new([130, 120, 72], false) },
            by_rows(128, 128, Sharing::Columns),
            2,
            2,
        ),
    ];
    for (name, product, tile, processors, resident) in cases {
        let (source, launch) = hopper_matmul(&product, tile, processors);
        let program = TileProgram::compile(&compiler, name, "matmul.cpp", "matmul_hopper", &source.text);
        let (ok, said) = program.run(&launch, resident, Lanes::Together, 1..3, 0);
        assert!(ok, "{name}:\n{said}");
    }
}

#[test]
fn mistakes_of_warpgroups() {
    let mistakes: [Mistake; 6] = [
        ("mbarrier_wait(ring.full(at), Ring::parity(at));", "", "in flight"),
        ("mbarrier_wait(ring.empty(at), Ring::parity(at) ^ 1);", "", "more arrivals"),
        ("if (i > 0) release(ring.empty(at - 1));", "", "deadlock"),
        ("named_barrier_arrive(TURN_BARRIER + (warpgroup ^ 1), MULTIPLIERS);", "", "deadlock"),
        (
            "stage(s_staged, pairs);\n    named_barrier_sync(STAGED_BARRIER + warpgroup, 128);",
            "stage(s_staged, pairs);",
            "FAILED",
        ),
        ("tile.row + top + 64 * half", "tile.row + top", "FAILED"),
    ];
    let (source, launch) = hopper_matmul(&Product::new([300, 200, 264], true), tile(64, true, 1), 2);
    let launched = Launched { source, entry: "matmul_hopper", launch, driver: "matmul.cpp" };
    check_mistakes("mistakes_of_warpgroups", launched, 2, 2, &mistakes);
}

/// Of epilogues in registers, with rows that a cluster has together.
#[test]
fn mistakes_of_rows_in_registers() {
    let waits = "mbarrier_wait(ring.full(place_of(part.at, piece, i)), Ring::parity(place_of(part.at, piece, i)));";
    let mistakes: [Mistake; 4] = [
        (waits, "", "FAILED"),
        ("await_remote_stores(received(exchanges<LEVEL>()));", "", "FAILED"),
        ("fence_proxy_async_shared();\n    named_barrier_sync(STAGED_BARRIER + part.warpgroup, 128);", "", "FAILED"),
        ("fmaf(count * off, off, parts[own][1])", "parts[own][1]", "FAILED"),
    ];
    let product = Product { normed: true, ..Product::new([100, 200, 72], true) };
    let (source, launch) = hopper_matmul(&product, by_rows(64, 128, Sharing::Columns), 4);
    let launched = Launched { source, entry: "matmul_hopper", launch, driver: "matmul.cpp" };
    check_mistakes("mistakes_of_rows_in_registers", launched, 4, 4, &mistakes);
}

/// Weights by rows, whose sums a cluster exchanges, and by columns.
#[test]
fn matmuls_of_few_rows() {
    let Some(compiler) = compiler() else { return };
    for (name, sizes, transposed, processors, cluster) in [
        ("matmul_by_rows", [1, 40, 300], false, 1, 1),
        ("matmul_of_clusters", [3, 100, 1030], false, 7, 4),
        ("matmul_by_columns", [2, 50, 520], true, 2, 1),
        ("matmul_of_slices", [5, 9, 520], true, 4, 1),
    ] {
        let (source, grid, launch) = matmul(sizes, transposed, processors);
        assert_eq!((source.name.as_str(), grid.cluster), ("skinny", cluster), "{name}");
        let program = TileProgram::compile(&compiler, name, "matmul.cpp", "skinny", &source.text);
        for (lanes, seeds) in [(Lanes::Together, 1..3), (Lanes::Apart, 101..102)] {
            let (ok, said) = program.run(&launch, 4, lanes, seeds, 0);
            assert!(ok, "{name}, {lanes:?}:\n{said}");
        }
    }
}

#[test]
fn mistakes_in_a_cluster() {
    let mistakes: [Mistake; 3] = [
        ("await_remote_stores(&s_sent);", "", "FAILED"),
        ("cluster_wait();", "", "FAILED"),
        (
            "if (threadIdx.x == 0) mbarrier_arrive_expect_tx(shared_address(&s_sent), (VECTORS + SPLIT - 1 - part) / SPLIT * V * SPLIT * (int)sizeof(float));",
            "",
            "deadlock",
        ),
    ];
    let (source, _, launch) = matmul([3, 100, 1030], false, 7);
    let launched = Launched { source, entry: "skinny", launch, driver: "matmul.cpp" };
    check_mistakes("mistakes_in_a_cluster", launched, 2, 2, &mistakes);
}

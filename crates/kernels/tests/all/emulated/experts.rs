//! Rows of bytes that are routed to experts.

use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{Kernel, Source};
use deuteron_graph::Graph;
use deuteron_matmul::cuda::hopper::{HopperTile, Sharing};
use deuteron_matmul::cuda::routed::RoutedKernel;

use super::{Lanes, Launched, Mistake, TileProgram, check_mistakes, compiler, greedy, written};

/// How rows are spread over experts, as `emulator/experts.cpp` numbers it.
#[derive(Debug, Clone, Copy)]
enum Spread {
    Evenly,
    ToTwo,
    ToOneThatIsNot,
}

/// The kernel with tiles of so many columns, and its launches as `emulator/experts.cpp` reads them.
fn experts(
    [m, n, k, experts]: [usize; 4],
    (columns, turns): (usize, bool),
    processors: usize,
    spread: Spread,
) -> (CudaSource, String) {
    let text = format!(
        "x = input i8[{m},{k}] ; x_scale = input f32[{m},1] ; chosen = input i32[{m}] ; w = weight i8[{experts},{n},{k}]
w_scale = weight f32[{experts},{n}] ; b = weight f32[{experts},{n}] ; y = expert_linear x x_scale chosen w w_scale b f32 ; out y"
    );
    let graph: Graph = text.parse().unwrap();
    let plan = greedy(&graph);
    let [group] = plan.groups.as_slice() else { panic!("{} kernels", plan.groups.len()) };
    let target = CudaTarget::new(Arch::Sm90a, processors);
    let kernel = RoutedKernel::of(&group.draft(&graph, &plan.placement), &target).expect("a routed matmul");
    let sharing = if turns { Sharing::Turns } else { Sharing::Rows };
    let tile = HopperTile { rows: 128, columns, sharing, split: 1, by_rows: false };
    assert!(kernel.cuts(&target).contains(&tile));
    let Kernel { source: Source::Cuda(source), launch } = kernel.with_tile(tile).kernel(&target) else {
        panic!("a text")
    };
    let [sort, multiply] = launch.grids().expect("grids").list.as_slice() else { panic!("two grids") };
    let names: Vec<&str> = launch.arguments().iter().map(|arg| graph.given_name(arg.base).unwrap_or("y")).collect();
    let (sort, multiply) = (written(sort), written(multiply));
    let count = names.len();
    let names = names.join(" ");
    let launch =
        format!("experts {m} {n} {k} {experts} {}\narguments {count} {names}\n{sort}{multiply}", spread as usize);
    (source, launch)
}

/// Experts without rows, with few and with more than a tile's; inner sizes and columns that are no multiples of a tile's.
#[test]
fn rows_of_experts() {
    let Some(compiler) = compiler() else { return };
    for (name, sizes, cut, processors, spread) in [
        ("experts_even", [300, 72, 144, 5], (64, false), 2, Spread::Evenly),
        ("experts_uneven", [400, 100, 272, 4], (128, true), 2, Spread::ToTwo),
        ("experts_of_one_row", [1, 51, 16, 40], (64, false), 1, Spread::Evenly),
        ("experts_alone", [20, 16, 32, 1], (64, true), 1, Spread::Evenly),
        ("experts_wrong", [90, 64, 16, 3], (64, false), 1, Spread::ToOneThatIsNot),
    ] {
        let (source, launch) = experts(sizes, cut, processors, spread);
        let program = TileProgram::compile(&compiler, name, "experts.cpp", "matmul_routed", &source.text);
        let (ok, said) = program.run(&launch, processors, Lanes::Together, 1..3, 0);
        assert!(ok, "{name}, {spread:?}:\n{said}");
    }
}

#[test]
fn mistakes_with_experts() {
    let mistakes: [Mistake; 5] = [
        ("arrive_after_copies(ring.full(at));", "mbarrier_arrive(ring.full(at));", "FAILED"),
        ("if (i == warp) before = total;", "", "FAILED"),
        ("release(ring.empty(turn * steps + steps - 1));", "", "deadlock"),
        ("rows.first + first", "rows.first", "FAILED"),
        ("if (lane < 16 * HALVES && mine < rows.end) s_rows[lane] = row_at(p, mine);", "", "FAILED"),
    ];
    let (source, launch) = experts([300, 72, 272, 3], (64, true), 1, Spread::Evenly);
    let launched = Launched { source, entry: "matmul_routed", launch, driver: "experts.cpp" };
    check_mistakes("mistakes_with_experts", launched, 2, 2, &mistakes);
}

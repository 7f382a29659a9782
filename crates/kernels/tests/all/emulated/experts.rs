//! Rows that are routed to experts, by warpgroups and by warps.

use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{Kernel, Source};
use deuteron_graph::{Dtype, Graph};
use deuteron_matmul::cuda::hopper::{HopperTile, Sharing};
use deuteron_matmul::cuda::mma::MmaTile;
use deuteron_matmul::cuda::mma_routed::MmaRoutedKernel;
use deuteron_matmul::cuda::routed::RoutedKernel;

use super::{Lanes, Launched, Mistake, TileProgram, check_mistakes, compiler, greedy, written};

/// How rows are spread over experts, as `emulator/experts.cpp` numbers it.
#[derive(Debug, Clone, Copy)]
enum Spread {
    Evenly,
    ToTwo,
    ToOneThatIsNot,
}

/// How it is cut.
#[derive(Debug, Clone, Copy)]
enum Cut {
    /// by warpgroups, in tiles of this many columns that have turns or are shared
    Hopper(usize, bool),
    /// by warps
    Mma(MmaTile),
}

impl Cut {
    fn entry(self) -> &'static str {
        match self {
            Cut::Hopper(..) => "matmul_routed",
            Cut::Mma(_) => "matmul_mma_routed",
        }
    }
}

/// What is computed: rows of the result, columns, inner size, experts and choices of each row.
#[derive(Debug, Clone, Copy)]
struct Case {
    sizes: [usize; 5],
    dtype: Dtype,
    spread: Spread,
    /// whether rows of bytes are made bytes again
    again: bool,
}

impl Case {
    fn graph(&self) -> Graph {
        let &Case { sizes: [m, n, k, experts, choices], dtype, again, .. } = self;
        let rows = m / choices;
        let results = if again { "q, s = quantize_int8 y ; out q s" } else { "out y" };
        let text = match dtype {
            Dtype::I8 => format!(
                "x = input i8[{m},{k}] ; x_scale = input f32[{m},1] ; chosen = input i32[{m}] ; w = weight i8[{experts},{n},{k}]
w_scale = weight f32[{experts},{n}] ; b = weight f32[{experts},{n}] ; y = expert_linear x x_scale chosen w w_scale b f32 ; {results}"
            ),
            dtype => format!(
                "x = input {dtype}[{rows},{k}] ; chosen = input i32[{rows},{choices}] ; w = weight {dtype}[{experts},{n},{k}]
b = weight {dtype}[{experts},{n}] ; y = routed_linear x chosen w b ; out y"
            ),
        };
        text.parse().unwrap()
    }

    /// The kernel, and its launches as `emulator/experts.cpp` reads them.
    fn launched(&self, cut: Cut, processors: usize) -> (CudaSource, String) {
        let graph = self.graph();
        let plan = greedy(&graph);
        let [group] = plan.groups.as_slice() else { panic!("{} kernels", plan.groups.len()) };
        let target = CudaTarget::new(Arch::Sm90a, processors);
        let draft = group.draft(&graph, &plan.placement);
        let kernel = match cut {
            Cut::Hopper(columns, turns) => {
                let kernel = RoutedKernel::of(&draft, &target).expect("a routed matmul");
                let sharing = if turns { Sharing::Turns } else { Sharing::Rows };
                let tile = HopperTile { rows: 128, columns, sharing, split: 1, by_rows: self.again, sharers: 1 };
                assert!(kernel.cuts(&target).contains(&tile));
                kernel.with_tile(tile).kernel(&target)
            }
            Cut::Mma(tile) => {
                let kernel = MmaRoutedKernel::of(&draft, &target).expect("a routed matmul");
                assert!(kernel.cuts(&target).contains(&tile));
                kernel.with_tile(tile).kernel(&target)
            }
        };
        let Kernel { source: Source::Cuda(source), launch } = kernel else { panic!("a text") };
        let [sort, multiply] = launch.grids().expect("grids").list.as_slice() else { panic!("two grids") };
        let names: Vec<&str> = launch.arguments().iter().map(|arg| graph.given_name(arg.base).unwrap_or("y")).collect();
        let storage = match self.dtype {
            Dtype::F16 => 1,
            Dtype::Bf16 => 2,
            Dtype::I8 => 3,
            _ => 0,
        };
        let [m, n, k, experts, choices] = self.sizes;
        let launch = format!(
            "experts {m} {n} {k} {experts} {choices} {storage} {}\narguments {} {}\n{}{}",
            self.spread as usize,
            names.len(),
            names.join(" "),
            written(sort),
            written(multiply)
        );
        (source, launch)
    }
}

/// Experts without rows, with few and with more than a tile's; inner sizes and columns that are no multiples of a tile's.
#[test]
fn rows_of_experts() {
    let Some(compiler) = compiler() else { return };
    let (bytes, bf16, f16, f32) = (Dtype::I8, Dtype::Bf16, Dtype::F16, Dtype::F32);
    let (evenly, uneven, wrong) = (Spread::Evenly, Spread::ToTwo, Spread::ToOneThatIsNot);
    let (large, small) = (Cut::Mma(MmaTile { rows: 128, columns: 64 }), Cut::Mma(MmaTile { rows: 64, columns: 64 }));
    for (name, dtype, sizes, cut, processors, spread) in [
        ("even", bytes, [300, 72, 144, 5, 1], Cut::Hopper(64, false), 2, evenly),
        ("uneven", bytes, [400, 100, 272, 4, 1], Cut::Hopper(128, true), 2, uneven),
        ("of_one_row", bytes, [1, 51, 16, 40, 1], Cut::Hopper(64, false), 1, evenly),
        ("wrong", bytes, [90, 64, 16, 3, 1], Cut::Hopper(64, false), 1, wrong),
        ("bf16_even", bf16, [300, 72, 72, 5, 1], Cut::Hopper(64, false), 2, evenly),
        ("bf16_uneven", bf16, [400, 200, 136, 4, 2], Cut::Hopper(192, true), 2, uneven),
        ("f16_wide", f16, [140, 300, 144, 3, 1], Cut::Hopper(256, false), 1, uneven),
        ("f16_of_one_row", f16, [3, 67, 72, 40, 3], Cut::Hopper(64, true), 1, evenly),
        ("mma_bf16", bf16, [300, 72, 136, 5, 2], large, 2, evenly),
        ("mma_bf16_odd", bf16, [77, 51, 35, 4, 1], large, 1, uneven),
        ("mma_f16", f16, [130, 65, 40, 3, 1], small, 1, wrong),
        ("mma_f32", f32, [150, 70, 100, 3, 3], large, 1, uneven),
        ("mma_column", f32, [51, 1, 127, 5, 3], small, 1, evenly),
        ("mma_nothing", f32, [40, 7, 0, 2, 2], small, 1, evenly),
        ("mma_bytes", bytes, [200, 71, 67, 5, 1], small, 2, uneven),
    ] {
        let (source, launch) = Case { sizes, dtype, spread, again: false }.launched(cut, processors);
        let name = format!("experts_{name}");
        let program = TileProgram::compile(compiler, &name, "experts.cpp", cut.entry(), &source.text);
        let (ok, said) = program.run(&launch, processors, Lanes::Together, 1..3, 0);
        assert!(ok, "{name}, {spread:?}:\n{said}");
    }
}

/// Rows that blocks have together, wherever each belongs.
#[test]
fn rows_of_experts_made_bytes_again() {
    let Some(compiler) = compiler() else { return };
    for (name, sizes, (columns, turns), processors, spread) in [
        ("even", [300, 72, 144, 5, 1], (64, false), 3, Spread::Evenly),
        ("uneven", [400, 330, 272, 4, 1], (64, true), 6, Spread::ToTwo),
        ("of_one_row", [1, 52, 16, 40, 1], (64, false), 1, Spread::Evenly),
        ("wide", [150, 520, 144, 2, 1], (128, false), 5, Spread::Evenly),
        ("of_three", [300, 130, 272, 3, 1], (64, true), 3, Spread::Evenly),
        ("wrong", [90, 130, 16, 3, 1], (64, true), 3, Spread::ToOneThatIsNot),
    ] {
        let case = Case { sizes, dtype: Dtype::I8, spread, again: true };
        let cut = Cut::Hopper(columns, turns);
        let (source, launch) = case.launched(cut, processors);
        let name = format!("experts_again_{name}");
        let program = TileProgram::compile(compiler, &name, "experts.cpp", cut.entry(), &source.text);
        let (ok, said) = program.run(&launch, processors, Lanes::Together, 1..3, 0);
        assert!(ok, "{name}, {spread:?}:\n{said}");
    }
}

#[test]
fn mistakes_with_experts_made_bytes_again() {
    let mistakes: [Mistake; 4] = [
        ("down / 64 * 16 + down % 64", "down % 64", "FAILED"),
        ("min(place + (HALVES == 2 ? lane / 16 * 64 : 0) + lane % 16, rows.end - 1)", "place", "FAILED"),
        ("ready.rows[own].live = ready.at.down(own) < left;", "ready.rows[own].live = true;", "FAILED"),
        (
            "ready.at.picked = tail::pick(p.tail, ready.rows[0].row);",
            "ready.at.picked = tail::pick(p.tail, 0);",
            "FAILED",
        ),
    ];
    let case = Case { sizes: [300, 130, 272, 3, 1], dtype: Dtype::I8, spread: Spread::Evenly, again: true };
    let cut = Cut::Hopper(64, true);
    let (source, launch) = case.launched(cut, 3);
    let launched = Launched { source, entry: cut.entry(), launch, driver: "experts.cpp" };
    check_mistakes("mistakes_with_experts_made_bytes_again", launched, 3, 2, &mistakes);
}

#[test]
fn mistakes_with_experts() {
    let mistakes: [Mistake; 5] = [
        ("arrive_after_copies(ring.full(at));", "mbarrier_arrive(ring.full(at));", "FAILED"),
        ("if (i == warp) before = total;", "", "FAILED"),
        ("release(ring.empty(turn * steps + steps - 1));", "", "deadlock"),
        ("rows.first + first", "rows.first", "FAILED"),
        ("if (threadIdx.x % 32 < 16 * HALVES) s_rows[threadIdx.x % 32] = number;", "", "FAILED"),
    ];
    let case = Case { sizes: [300, 72, 272, 3, 1], dtype: Dtype::I8, spread: Spread::Evenly, again: false };
    let cut = Cut::Hopper(64, true);
    let (source, launch) = case.launched(cut, 1);
    let launched = Launched { source, entry: cut.entry(), launch, driver: "experts.cpp" };
    check_mistakes("mistakes_with_experts", launched, 2, 2, &mistakes);
}

#[test]
fn mistakes_with_experts_of_floats() {
    let mistakes: [Mistake; 2] =
        [("(row / choices) * p.left_row", "row * p.left_row", "FAILED"), ("s_rows + 16 * half", "s_rows", "FAILED")];
    let case = Case { sizes: [300, 72, 136, 3, 2], dtype: Dtype::Bf16, spread: Spread::Evenly, again: false };
    let cut = Cut::Hopper(64, true);
    let (source, launch) = case.launched(cut, 1);
    let launched = Launched { source, entry: cut.entry(), launch, driver: "experts.cpp" };
    check_mistakes("mistakes_with_experts_of_floats", launched, 2, 2, &mistakes);
    let mistakes: [Mistake; 3] = [
        ("(row / choices) * p.left_row", "row * p.left_row", "FAILED"),
        ("words[0] * p.matrix", "0", "FAILED"),
        ("s_rows[i] = (int)row;", "s_rows[i] = i;", "FAILED"),
    ];
    let cut = Cut::Mma(MmaTile { rows: 64, columns: 64 });
    let (source, launch) = case.launched(cut, 1);
    let launched = Launched { source, entry: cut.entry(), launch, driver: "experts.cpp" };
    check_mistakes("mistakes_with_experts_by_warps", launched, 2, 2, &mistakes);
}

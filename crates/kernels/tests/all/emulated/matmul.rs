//! Matmuls of few rows, by warpgroups, and by warps.

use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget, Grid};
use deuteron_codegen::{Kernel, Launch, Source};
use deuteron_graph::{Dtype, Graph};
use deuteron_matmul::cuda::hopper::{HopperKernel, HopperTile, Sharing};
use deuteron_matmul::cuda::mma::{Load, MmaKernel, MmaTile};
use deuteron_matmul::cuda::realigned::RealignedKernel;

use super::{Lanes, Launched, Mistake, TileProgram, Toolchain, check_mistakes, compiler, greedy, only, written};

/// `y = x w + b`, batched, which operands are transposed, and how many elements of their lines come before those of the matmul.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    pub sizes: [usize; 3],
    pub batch: usize,
    pub left: bool,
    pub right: bool,
    pub dtype: Dtype,
    pub skipped: usize,
    /// whether a residual and a norm follow
    pub normed: bool,
    /// right operands of the one left operand
    pub rights: usize,
    /// whether the left operand is a layer norm that the launch makes
    pub made: bool,
    /// whether results are also summed over rows
    pub summed: bool,
    /// whether a norm follows, and a residual behind it
    pub late: bool,
    /// whether 16-bit operands are summed in f32, and stay f32
    pub wide: bool,
}

impl Product {
    pub const fn new(sizes: [usize; 3], right: bool) -> Product {
        Product {
            sizes,
            batch: 1,
            left: false,
            right,
            dtype: Dtype::Bf16,
            skipped: 0,
            normed: false,
            rights: 1,
            made: false,
            summed: false,
            late: false,
            wide: false,
        }
    }

    pub fn graph(&self) -> Graph {
        let &Product { sizes: [m, n, k], batch, left, right, dtype, skipped, normed, rights, made, summed, late, wide } =
            self;
        let matrix = |name: &str, transposed: bool, high: usize, wide: usize| {
            let (high, wide) = if transposed { (wide, high) } else { (high, wide) };
            let (sizes, axis) = if batch == 1 { (format!("{high}"), 1) } else { (format!("{batch},{high}"), 2) };
            format!(
                "{name} = input {dtype}[{sizes},{}] ; own_{name} = slice {name} axis={axis} start={skipped} length={wide}",
                skipped + wide
            )
        };
        let flag = |set: bool, name: &str| if set { format!(" {name}") } else { String::new() };
        let (a, b) = (flag(left, "transpose_a"), flag(right, "transpose_b"));
        let result = self.result();
        let rows = if batch == 1 { format!("{m}") } else { format!("{batch},{m}") };
        let rest = match normed {
            false if late => format!(
                "r = input {dtype}[{rows},{n}] ; g = weight {dtype}[{n}] ; h = weight {dtype}[{n}] ; l = add p b ; \
                 o2 = layer_norm l g h eps=1e-5 ; y = add o2 r ; out y"
            ),
            false if summed => "y = add p b ; wide = cast y f32 ; f = column_sum wide ; out y ; out f".to_string(),
            false => "y = add p b ; out y".to_string(),
            true => format!(
                "r = input {dtype}[{rows},{n}] ; g = weight {dtype}[{n}] ; h = weight {dtype}[{n}] ; l = add p b ; s = add l r ; \
                 y = layer_norm s g h eps=1e-5 ; out s ; out y"
            ),
        };
        let (made, own, weight) = match made {
            false if wide => ("o = cast own_x f32 ; i = cast own_w f32 ; ".to_string(), "o", "i"),
            false => (String::new(), "own_x", "own_w"),
            true => {
                let weights = format!("c = weight {dtype}[{k}] ; d = weight {dtype}[{k}]");
                (format!("{weights} ; o = layer_norm own_x c d eps=1e-5 ; "), "o", "own_w")
            }
        };
        let mut text = format!(
            "{} ; {} ; b = weight {result}[{n}] ; {made}p = matmul {own} {weight}{a}{b} ; {rest}",
            matrix("x", left, m, k),
            matrix("w", right, k, n),
        );
        for [weight, product, sum] in &[["v", "q", "z"], ["u", "e", "t"]][..rights - 1] {
            let matrix = matrix(weight, right, k, n);
            text += &format!(
                " ; {matrix} ; {product} = matmul {own} own_{weight}{a}{b} ; {sum} = add {product} b ; out {sum}"
            );
        }
        text.parse().unwrap_or_else(|error| panic!("{error:?}\n{text}"))
    }

    /// The storage type of bias and result.
    fn result(&self) -> Dtype {
        if self.dtype == Dtype::I8 || self.wide { Dtype::F32 } else { self.dtype }
    }

    /// Launches before the last, as `emulator/matmul.cpp` reads them.
    fn before(&self, launch: &Launch) -> String {
        let grids = launch.grids().expect("grids");
        if grids.persistent > 0 {
            return format!("kept {} {}\n", grids.workspace, grids.persistent);
        }
        if self.summed {
            return format!("summed {}\n", grids.workspace);
        }
        let [before @ .., _] = grids.list.as_slice() else { panic!("no grid") };
        let Some(first) = before.first() else { return "alone\n".to_string() };
        assert!(before.iter().all(|grid| grid.entry == first.entry), "one kernel before the matmul");
        let written: String = before.iter().map(written).collect();
        format!("first {} {} {}\n{written}", first.entry, before.len(), grids.workspace)
    }

    /// A launch of it, as `emulator/matmul.cpp` reads it.
    pub fn launch(&self, graph: &Graph, launch: &Launch, grid: &Grid) -> String {
        let &Product { sizes: [m, n, k], batch, left, right, dtype, skipped, .. } = self;
        let names: Vec<&str> = launch.arguments().iter().map(|arg| graph.given_name(arg.base).unwrap_or("y")).collect();
        let (left, right) = (u8::from(left), u8::from(right));
        let storage = |dtype: Dtype| match dtype {
            Dtype::F16 => 1,
            Dtype::Bf16 => 2,
            Dtype::I8 => 3,
            _ => 0,
        };
        format!(
            "matmul {m} {n} {k} {batch} {left} {right} {} {} {skipped}\narguments {} {}\n{}{}",
            storage(dtype),
            storage(self.result()),
            names.len(),
            names.join(" "),
            self.before(launch),
            written(grid)
        )
    }
}

/// The same on Hopper's matrix units, of operands that are copied first.
fn realigned_matmul(product: &Product) -> (CudaSource, String) {
    let graph = product.graph();
    let plan = greedy(&graph);
    let group = plan.groups.iter().find(|group| group.structure.is_matmul()).expect("a matmul");
    let target = CudaTarget::new(Arch::Sm90a, 2);
    let kernel = RealignedKernel::of(&group.draft(&graph, &plan.placement), &target).expect("a matmul of copies");
    let Kernel { source: Source::Cuda(source), launch } = kernel.kernel(&target) else { panic!("a text") };
    let last = launch.grids().and_then(|grids| grids.list.last()).expect("grids");
    (source, product.launch(&graph, &launch, last))
}

/// Left, right and both operands at odd starts and strides, transposed, in batches.
#[test]
fn matmuls_of_copies() {
    let Some(compiler) = compiler() else { return };
    for (name, product) in [
        ("both", Product { skipped: 3, ..Product::new([70, 50, 133], true) }),
        ("left", Product { dtype: Dtype::F16, ..Product::new([66, 24, 1101], false) }),
        ("across", Product { left: true, batch: 2, ..Product::new([69, 40, 37], false) }),
        ("right", Product { skipped: 1, ..Product::new([40, 51, 63], false) }),
    ] {
        let (source, launch) = realigned_matmul(&product);
        let program =
            TileProgram::compile(compiler, &format!("realigned_{name}"), "matmul.cpp", "matmul_hopper", &source.text);
        let (ok, said) = program.run(&launch, 2, Lanes::Together, 1..3, 0);
        assert!(ok, "{name}:\n{said}");
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
    let [grid, last @ ..] = launch.grids().expect("grids").list.as_slice() else { panic!("a grid") };
    assert_eq!(last.len(), usize::from(product.summed), "what adds up sums over rows");
    let last: String = last.iter().map(written).collect();
    (source, product.launch(&graph, &launch, grid) + &last)
}

/// The same on the matrix units of a warp, cut in some way; and how its operands come.
fn mma_matmul(product: &Product, tile: MmaTile, arch: Arch) -> (CudaSource, String, [Load; 2]) {
    let graph = product.graph();
    let plan = greedy(&graph);
    let group = plan.groups.iter().find(|group| group.structure.is_matmul()).expect("a matmul");
    let target = CudaTarget::new(arch, 2);
    let kernel =
        MmaKernel::of(&group.draft(&graph, &plan.placement), &target).expect("a matmul for a warp's matrix units");
    let loads = kernel.operands.map(|operand| operand.load);
    let Kernel { source: Source::Cuda(source), launch } = kernel.with_tile(tile).kernel(&target) else {
        panic!("a text")
    };
    let [grid] = launch.grids().expect("grids").list.as_slice() else { panic!("one grid") };
    (source, product.launch(&graph, &launch, grid), loads)
}

/// All types, transpositions, cuts and ways that operands come; sizes that are no multiples of a tile's.
#[test]
fn matmuls_by_warps() {
    let Some(compiler) = compiler() else { return };
    let wide = |columns| MmaTile { rows: 128, columns };
    let small = MmaTile { rows: 64, columns: 64 };
    let of = |dtype: Dtype, sizes: [usize; 3], left: bool, right: bool, skipped: usize| Product {
        left,
        dtype,
        skipped,
        ..Product::new(sizes, right)
    };
    use Dtype::{Bf16, F16, F32, I8};
    use Load::{Aligned, Copied, Shifted};
    let cases = [
        ("copied", of(Bf16, [136, 200, 72], false, true, 0), wide(128), Arch::Sm90a, [Copied; 2]),
        ("copied_across", of(F16, [136, 104, 70], true, false, 0), wide(96), Arch::Sm80, [Copied; 2]),
        ("copied_part", of(Bf16, [70, 64, 101], false, false, 8), small, Arch::Sm80, [Shifted, Copied]),
        ("shifted", of(Bf16, [70, 50, 133], false, true, 0), small, Arch::Sm80, [Shifted; 2]),
        ("shifted_across", of(F16, [69, 131, 37], true, false, 3), wide(128), Arch::Sm80, [Shifted; 2]),
        ("aligned", of(F16, [70, 72, 104], false, true, 0), small, Arch::Sm75, [Aligned; 2]),
        ("aligned_right", of(F16, [70, 56, 90], true, false, 8), small, Arch::Sm75, [Shifted, Aligned]),
        ("tiny", of(Bf16, [9, 3, 1], false, false, 0), small, Arch::Sm80, [Shifted; 2]),
        ("f32", of(F32, [70, 52, 68], false, true, 0), small, Arch::Sm80, [Copied; 2]),
        ("f32_across", of(F32, [72, 100, 65], true, false, 0), wide(96), Arch::Sm80, [Copied; 2]),
        ("f32_shifted", of(F32, [67, 49, 79], false, false, 1), small, Arch::Sm80, [Shifted; 2]),
        ("i8", of(I8, [70, 130, 160], false, true, 0), wide(128), Arch::Sm80, [Copied; 2]),
        ("i8_shifted", of(I8, [69, 33, 131], false, false, 5), small, Arch::Sm80, [Shifted; 2]),
        ("i8_shifted_across", of(I8, [33, 70, 67], true, true, 3), small, Arch::Sm80, [Shifted; 2]),
        ("wide", Product { wide: true, ..of(Bf16, [70, 52, 72], false, true, 0) }, small, Arch::Sm80, [Copied; 2]),
        (
            "wide_shifted",
            Product { wide: true, ..of(F16, [69, 131, 37], true, false, 3) },
            wide(128),
            Arch::Sm80,
            [Shifted; 2],
        ),
        ("batch", Product { batch: 3, ..of(Bf16, [24, 41, 73], false, false, 0) }, small, Arch::Sm80, [Shifted; 2]),
    ];
    for (name, product, tile, arch, expected) in cases {
        let (source, launch, loads) = mma_matmul(&product, tile, arch);
        assert_eq!(loads, expected, "{name}");
        let program = TileProgram::compile(compiler, &format!("mma_{name}"), "matmul.cpp", "matmul_mma", &source.text);
        let (ok, said) = program.run(&launch, 2, Lanes::Together, 1..3, 0);
        assert!(ok, "{name}:\n{said}");
    }
}

#[test]
fn mistakes_of_warps() {
    let mistakes: [Mistake; 7] = [
        ("await_copies<STAGES - 2>();", "", "FAILED"),
        ("\n            __syncthreads();", "", "FAILED"),
        ("clear_behind(held[i], existing(from, first, i));", "", "FAILED"),
        ("cut_out<SIZE>(held[i], (u32)(u64)place(from, first, i) & 15);", "", "FAILED"),
        ("(i + STAGES - 1) * DEPTH", "(i + STAGES) * DEPTH", "FAILED"),
        (
            "finish(p, s_own, at, 16 * atom, first_column + column, lane, [&](int r) { return row_of(row + r); });",
            "finish(p, s_own, at, 0, first_column + column, lane, [&](int r) { return row_of(row + r); });",
            "FAILED",
        ),
        ("b_batch += index * p.axes[axis][2];", "", "FAILED"),
    ];
    let product = Product { batch: 2, skipped: 8, ..Product::new([66, 72, 101], false) };
    let (source, launch, _) = mma_matmul(&product, MmaTile { rows: 64, columns: 64 }, Arch::Sm80);
    let launched = Launched { source, entry: "matmul_mma", launch, driver: "matmul.cpp" };
    check_mistakes("mistakes_of_warps", launched, 2, 2, &mistakes);
}

pub(super) const fn tile(columns: usize, turns: bool, split: usize) -> HopperTile {
    let sharing = if turns { Sharing::Turns } else { Sharing::Rows };
    HopperTile { rows: 128, columns, sharing, split, by_rows: false, sharers: 1 }
}

/// Whole tiles in turn, with the epilogue in registers.
const fn by_rows_in_turn(columns: usize) -> HopperTile {
    HopperTile { by_rows: true, ..tile(columns, true, 1) }
}

/// The same with columns of B shared by pairs of blocks.
pub(super) const fn shared(tile: HopperTile) -> HopperTile {
    HopperTile { sharers: 2, ..tile }
}

const fn by_rows(rows: usize, columns: usize, sharing: Sharing) -> HopperTile {
    HopperTile { rows, columns, sharing, split: 1, by_rows: true, sharers: 1 }
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
        (
            "hopper_summed",
            Product { summed: true, batch: 3, ..Product::new([76, 51, 72], true) },
            tile(96, true, 1),
            2,
            2,
        ),
        ("hopper_wide_sums", Product { wide: true, ..Product::new([200, 104, 264], false) }, tile(96, true, 1), 2, 2),
        (
            "hopper_wide_sums_shared",
            Product { wide: true, left: true, dtype: Dtype::F16, ..Product::new([136, 264, 72], true) },
            tile(160, false, 1),
            1,
            1,
        ),
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
            "hopper_norm_late",
            Product { late: true, ..Product::new([200, 128, 136], true) },
            by_rows(128, 64, Sharing::Rows),
            4,
            2,
        ),
        (
            "hopper_norm_tall",
            Product { normed: true, ..Product::new([300, 360, 72], false) },
            by_rows(256, 128, Sharing::Rows),
            12,
            6,
        ),
        ("hopper_registers_turns", Product::new([700, 136, 136], true), by_rows_in_turn(64), 2, 2),
        (
            "hopper_registers_turns_batch",
            Product { batch: 3, dtype: Dtype::F16, ..Product::new([200, 184, 72], false) },
            by_rows_in_turn(192),
            1,
            1,
        ),
        (
            "hopper_norm_turns",
            Product { normed: true, ..Product::new([1500, 200, 72], true) },
            by_rows_in_turn(64),
            8,
            4,
        ),
        (
            "hopper_norm_turns_late",
            Product { late: true, left: true, ..Product::new([904, 256, 200], false) },
            by_rows_in_turn(128),
            2,
            2,
        ),
        (
            "hopper_norm_turns_alone",
            Product { normed: true, dtype: Dtype::F16, ..Product::new([900, 136, 72], false) },
            by_rows_in_turn(192),
            2,
            2,
        ),
        (
            "hopper_norm_in_block",
            Product { normed: true, dtype: Dtype::F16, ..Product::new([130, 120, 72], false) },
            by_rows(128, 128, Sharing::Columns),
            2,
            2,
        ),
    ];
    check(compiler, cases);
}

/// Columns of B that pairs of blocks fetch for each other, with an odd number of tiles along the rows too.
#[test]
fn matmuls_of_shared_columns() {
    let Some(compiler) = compiler() else { return };
    let cases = [
        ("hopper_shared_turns", Product::new([600, 200, 200], true), shared(tile(64, true, 1)), 2, 2),
        ("hopper_shared_turns_rows", Product::new([900, 392, 264], false), shared(tile(192, true, 1)), 4, 4),
        (
            "hopper_shared_tiles",
            Product { left: true, ..Product::new([200, 144, 520], true) },
            shared(tile(144, false, 1)),
            4,
            2,
        ),
        (
            "hopper_shared_tall",
            Product { batch: 2, ..Product::new([300, 104, 200], false) },
            shared(HopperTile { rows: 256, ..tile(96, false, 1) }),
            4,
            4,
        ),
        (
            "hopper_shared_two",
            Product { rights: 2, ..Product::new([300, 104, 136], true) },
            shared(tile(192, true, 1)),
            2,
            2,
        ),
        (
            "hopper_shared_registers",
            Product { dtype: Dtype::F16, ..Product::new([520, 184, 72], false) },
            shared(by_rows_in_turn(128)),
            2,
            2,
        ),
        (
            "hopper_shared_wide_sums",
            Product { wide: true, ..Product::new([300, 104, 264], false) },
            shared(tile(96, true, 1)),
            2,
            2,
        ),
    ];
    check(compiler, cases);
}

/// Several right operands of one left operand, and left operands that the launch makes.
#[test]
fn matmuls_of_several_operands() {
    let Some(compiler) = compiler() else { return };
    let cases = [
        ("hopper_two", Product { rights: 2, ..Product::new([300, 104, 136], true) }, tile(192, true, 1), 2, 2),
        ("hopper_two_odd", Product { rights: 2, ..Product::new([70, 51, 72], true) }, tile(144, false, 1), 2, 2),
        ("hopper_three", Product { rights: 3, ..Product::new([130, 136, 200], false) }, tile(192, true, 1), 2, 2),
        (
            "hopper_three_batch",
            Product { rights: 3, batch: 2, ..Product::new([40, 48, 72], true) },
            tile(96, false, 1),
            4,
            2,
        ),
        ("hopper_made", Product { made: true, ..Product::new([300, 200, 136], true) }, tile(64, true, 1), 2, 2),
        ("hopper_made_rows", Product { made: true, ..Product::new([139, 72, 203], false) }, tile(64, false, 1), 8, 8),
        ("hopper_made_odd", Product { made: true, ..Product::new([600, 51, 72], true) }, tile(96, true, 1), 1, 1),
        (
            "hopper_made_two",
            Product { made: true, rights: 2, ..Product::new([1300, 40, 40], true) },
            tile(96, true, 1),
            3,
            3,
        ),
    ];
    check(compiler, cases);
}

/// Runs named products that are cut in some way, for this many multiprocessors, of which this many blocks run at once.
fn check<const COUNT: usize>(compiler: &Toolchain, cases: [(&str, Product, HopperTile, usize, usize); COUNT]) {
    for (name, product, tile, processors, resident) in cases {
        let (source, launch) = hopper_matmul(&product, tile, processors);
        let program = TileProgram::compile(compiler, name, "matmul.cpp", "matmul_hopper", &source.text);
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
        ("tile.row + 64 * half", "tile.row", "FAILED"),
    ];
    let (source, launch) = hopper_matmul(&Product::new([300, 200, 264], true), tile(64, true, 1), 2);
    let launched = Launched { source, entry: "matmul_hopper", launch, driver: "matmul.cpp" };
    check_mistakes("mistakes_of_warpgroups", launched, 2, 2, &mistakes);
}

#[test]
fn mistakes_of_column_sums() {
    let mistakes = [
        ("away < 32", "away < 16", "FAILED"),
        ("batch * halves + row / 64", "batch * halves", "FAILED"),
        ("threadIdx.x % 128 / GROUP", "0", "FAILED"),
    ];
    let product = Product { summed: true, ..Product::new([180, 136, 72], true) };
    let (source, launch) = hopper_matmul(&product, tile(96, true, 1), 2);
    let launched = Launched { source, entry: "matmul_hopper", launch, driver: "matmul.cpp" };
    check_mistakes("mistakes_of_column_sums", launched, 2, 2, &mistakes);
}

/// Of epilogues in registers, with rows that a cluster has together.
#[test]
fn mistakes_of_rows_in_registers() {
    let waits = "await_piece(ring, part.at, piece, i);";
    let mistakes: [Mistake; 4] = [
        (waits, "", "FAILED"),
        ("await_remote_stores(received(part.set(), exchanges<LEVEL>()), part.parity());", "", "FAILED"),
        ("fence_proxy_async_shared();\n    named_barrier_sync(STAGED_BARRIER + part.warpgroup, 128);", "", "FAILED"),
        ("fmaf(count * off, off, numbers[1])", "numbers[1]", "FAILED"),
    ];
    let product = Product { normed: true, ..Product::new([100, 200, 584], true) };
    let (source, launch) = hopper_matmul(&product, by_rows(64, 128, Sharing::Columns), 4);
    let launched = Launched { source, entry: "matmul_hopper", launch, driver: "matmul.cpp" };
    check_mistakes("mistakes_of_rows_in_registers", launched, 4, 4, &mistakes);
}

/// Of columns that pairs of blocks fetch for each other.
#[test]
fn mistakes_of_shared_columns() {
    let mistakes: [Mistake; 4] = [
        (
            "if (lane < SHARERS) mbarrier_arrive_at(barrier, lane);",
            "if (lane == 0) mbarrier_arrive(barrier);",
            "deadlock",
        ),
        ("to + share * 128", "to", "in flight"),
        ("c1 + share", "c1", "FAILED"),
        (
            "walk(p, ring, s_base, warpgroup, early);\n    meet_neighbours();",
            "walk(p, ring, s_base, warpgroup, early);",
            "ended",
        ),
    ];
    let (source, launch) = hopper_matmul(&Product::new([600, 200, 264], true), shared(tile(64, true, 1)), 2);
    let launched = Launched { source, entry: "matmul_hopper", launch, driver: "matmul.cpp" };
    check_mistakes("mistakes_of_shared_columns", launched, 2, 2, &mistakes);
}

/// The same where warpgroups take turns, and operands have a place of their own.
#[test]
fn mistakes_of_rows_in_turn() {
    let mistakes: [Mistake; 7] = [
        ("await_piece(ring, part.at, piece, i);", "", "FAILED"),
        ("mbarrier_wait(held_empty(ring, turn), turn / 2 & 1 ^ 1);", "", "more arrivals"),
        ("mbarrier_arrive(held_empty(ring, turn));", "", "deadlock"),
        ("expect_numbers<LEVEL>(part.set());", "", "deadlock"),
        ("await_remote_stores(received(part.set(), exchanges<LEVEL>()), part.parity());", "", "FAILED"),
        ("return TURNS ? at / SETS & 1 : 0;", "return 0;", "FAILED"),
        ("part.parity() ^ 1", "part.parity()", "deadlock"),
    ];
    let product = Product { normed: true, ..Product::new([1300, 128, 72], true) };
    let (source, launch) = hopper_matmul(&product, by_rows_in_turn(64), 2);
    let launched = Launched { source, entry: "matmul_hopper", launch, driver: "matmul.cpp" };
    check_mistakes("mistakes_of_rows_in_turn", launched, 2, 2, &mistakes);
}

/// Weights by rows, whose sums a cluster exchanges, and by columns.
#[test]
fn matmuls_of_few_rows() {
    let Some(compiler) = compiler() else { return };
    for (name, sizes, transposed, processors, cluster) in [
        ("matmul_by_rows", [1, 40, 300], false, 1, 1),
        ("matmul_of_clusters", [3, 100, 1030], false, 7, 4),
        ("matmul_by_columns", [2, 50, 520], true, 2, 1),
        ("matmul_of_slices", [5, 9, 524], true, 4, 1),
    ] {
        let (source, grid, launch) = matmul(sizes, transposed, processors);
        assert_eq!((source.name.as_str(), grid.cluster), ("skinny", cluster), "{name}");
        let program = TileProgram::compile(compiler, name, "matmul.cpp", "skinny", &source.text);
        for (lanes, seeds) in [(Lanes::Together, 1..3), (Lanes::Apart, 101..102)] {
            let (ok, said) = program.run(&launch, 4, lanes, seeds, 0);
            assert!(ok, "{name}, {lanes:?}:\n{said}");
        }
    }
}

/// The same by matrix units: strips that blocks walk over, parts of K, columns that no vector divides, rows that are made.
#[test]
fn matmuls_in_strips() {
    let Some(compiler) = compiler() else { return };
    let f16 = |product: Product| Product { dtype: Dtype::F16, ..product };
    for (name, product, processors, cluster) in [
        ("strips_by_rows", Product::new([5, 200, 264], false), 2, 1),
        ("strips_of_clusters", Product::new([16, 64, 1544], false), 8, 2),
        ("strips_by_columns", f16(Product::new([13, 131, 96], true)), 2, 1),
        ("strips_of_columns_in_clusters", Product::new([6, 40, 1032], true), 8, 2),
        ("strips_behind_a_norm", Product { made: true, ..Product::new([9, 72, 104], true) }, 2, 1),
    ] {
        let (source, cut, launch) = strips(&product, processors);
        assert_eq!(cut, cluster, "{name}");
        let program = TileProgram::compile(compiler, name, "matmul.cpp", "matmul_strips", &source.text);
        for (lanes, seeds) in [(Lanes::Together, 1..3), (Lanes::Apart, 3..4)] {
            let (ok, said) = program.run(&launch, processors, lanes, seeds, 0);
            assert!(ok, "{name}, {lanes:?}:\n{said}");
        }
    }
}

/// The kernel by strips of a matmul, blocks of its clusters, and its launch.
fn strips(product: &Product, processors: usize) -> (CudaSource, u32, String) {
    let graph = product.graph();
    let (source, launch, grids) = only(&graph, &greedy(&graph), processors);
    assert_eq!(source.name, "matmul_strips");
    let [grid] = grids.list.as_slice() else { panic!("{} grids", grids.list.len()) };
    (source, grid.cluster, product.launch(&graph, &launch, grid))
}

#[test]
fn mistakes_in_strips() {
    let both: [Mistake; 3] = [
        ("await_copies<STAGES - 1>();", "", "FAILED"),
        ("inner < last && across < N", "across < N", "FAILED"),
        ("s_left + chunk * DEEP * 2", "s_left", "FAILED"),
    ];
    let of_clusters: [Mistake; 3] = [
        ("if (ONE_STRIP) __syncthreads();", "", "FAILED"),
        ("await_remote_stores(s_sent);", "", "FAILED"),
        ("part * SHARE + e / SPLIT * V", "e / SPLIT * V", "FAILED"),
    ];
    let walks: [Mistake; 2] = [
        ("item % ROUNDS != ROUNDS - 1", "item != items - 1", "FAILED"),
        ("x[0] = x[1] = x[2] = x[3] = 0.0f;", "", "FAILED"),
    ];
    for (name, product, processors, own) in [
        ("mistakes_in_strips_of_clusters", Product::new([16, 64, 1544], false), 8, &of_clusters[..]),
        ("mistakes_in_strips_that_are_walked", Product::new([5, 200, 264], true), 2, &walks),
    ] {
        let (source, _, launch) = strips(&product, processors);
        let launched = Launched { source, entry: "matmul_strips", launch, driver: "matmul.cpp" };
        check_mistakes(name, launched, processors, 3, &[&both[..], own].concat());
    }
}

#[test]
fn mistakes_in_a_cluster() {
    let mistakes: [Mistake; 3] = [
        ("await_remote_stores(s_sent);", "", "FAILED"),
        ("cluster_wait();", "", "FAILED"),
        (
            "if (threadIdx.x == 0) mbarrier_arrive_expect_tx(shared_address(s_sent), (VECTORS + SPLIT - 1 - part) / SPLIT * V * SPLIT * (int)sizeof(float));",
            "",
            "deadlock",
        ),
    ];
    let (source, _, launch) = matmul([3, 100, 1030], false, 7);
    let launched = Launched { source, entry: "skinny", launch, driver: "matmul.cpp" };
    check_mistakes("mistakes_in_a_cluster", launched, 2, 2, &mistakes);
}

/// Of rows that a launch makes for itself.
#[test]
fn mistakes_of_made_rows() {
    let mistakes: [Mistake; 4] = [
        ("while (load_acquire(count_of(p, row)) < all) back_off();", "", "FAILED"),
        ("for (int row = 0; row < (int)p.m; row += ROWS) *count_of(p, row) = 0;", "", "left counts"),
        ("if (threadIdx.x >= 32) make_other_rows(p);", "", "deadlock"),
        (
            "if ((threadIdx.x & 31) == 0) add_acq_rel(count_of(p, row), (u32)count);",
            "if ((threadIdx.x & 31) == 0) add_acq_rel(count_of(p, row), 1);",
            "deadlock",
        ),
    ];
    let product = Product { made: true, ..Product::new([1300, 40, 40], true) };
    let (source, launch) = hopper_matmul(&product, tile(64, true, 1), 2);
    let launched = Launched { source, entry: "matmul_hopper", launch, driver: "matmul.cpp" };
    check_mistakes("mistakes_of_made_rows", launched, 2, 2, &mistakes);
}

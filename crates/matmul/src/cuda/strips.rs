//! Matmuls of 5 to 16 rows of 16-bit operands on CUDA, by the matrix units of a warp: `strips.cu`, whose text is its contract.
//!
//! - Takes: f16 or bf16 of which both operands and the result are, weights either way, row work that makes the left operand, elementwise
//!   work behind. Of fewer rows the vector units are as fast (`skinny.rs`), of more a warpgroup's matrix units.
//! - Traffic: weights once; A once a block, from the L2.
//! - In flight: up to 64 KiB of weights a block, and those of the grid behind it where two blocks fit a multiprocessor.

use deuteron_codegen::body::Body;
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Tiling, Word};
use deuteron_codegen::cuda::row::{PRELUDE, PRELUDE_PARTS, gcd};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_codegen::tile::{Part, text_beside};
use deuteron_graph::Dtype;
use deuteron_plan::{Draft, Work, primitive_work};

use super::sides::{self, Sides};
use crate::fit::{self, MatmulFit};
use crate::kernel::{LoweredMatmul, Matmul, MatmulLaunch, Role};

/// Rows: a matrix of the left operand of `mma`. Up to four rows are left to vector units (`skinny.rs`).
const ROWS: std::ops::RangeInclusive<usize> = 5..=MATRIX;
/// Rows of that matrix.
const MATRIX: usize = 16;
/// Columns of a strip, at most; half of them where strips are few.
const COLUMNS: usize = 32;
/// Of K in a chunk, as in the text.
const DEEP: usize = 32;
/// Threads of a block.
const THREADS: usize = 256;
/// Warps of a block.
const WARPS: usize = THREADS / 32;
/// Chunks of a warp in flight, at most.
const STAGES: usize = 4;
/// Of K in a part, at least.
const PART: usize = 4 * DEEP;
/// Columns, at least, where blocks do not share K.
const FEW_COLUMNS: usize = 512;
/// Bytes of shared memory that are left to barriers and to the system.
const SPARE: usize = 1024;
/// Microseconds that a launch takes besides its bytes, of one row and of twice as many each: fitted to `h200-layers.csv`.
const MATRIX_US: [f64; 2] = [3.0, 0.65];
/// Sizes are below: they are counted by 32 bits.
const MOST: usize = 1 << 30;

/// Matmuls of few rows by matrix units.
pub struct StripsFamily;

impl Family<CudaTarget> for StripsFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let (fit, config) = fit(&group, target)?;
        let microseconds = sides::few_rows_us(&fit, MATRIX_US, target);
        offered(
            move || Work { microseconds, ..primitive_work(&group) },
            move || StripsKernel::new(sides::lower_few(&group, fit), config).kernel(target),
        )
    }
}

/// A matmul of few rows by matrix units, compiled for its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct StripsKernel {
    /// the matmul; it always has an epilogue
    pub product: Matmul<Body>,
    /// sizes and arguments
    pub launch: MatmulLaunch,
    /// how it is cut
    pub config: StripsConfig,
}

/// How a matmul of few rows is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StripsConfig {
    /// columns of a strip
    pub columns: usize,
    /// blocks of a cluster, each with a part of K
    pub split: usize,
    /// of K in a part
    pub part: usize,
    /// chunks of a warp in flight
    pub stages: usize,
    /// whether a block has one strip, so that sums can take the place of weights
    pub one_strip: bool,
    /// blocks of a launch
    pub blocks: usize,
    /// blocks that fit a multiprocessor
    pub resident: usize,
}

/// The matmul of a draft, if the kernel takes it, and how it is cut.
fn fit<'a>(draft: &Draft<'a>, target: &CudaTarget) -> Option<(MatmulFit<'a>, StripsConfig)> {
    let fit = fit::fit_few(draft, MATRIX)?;
    let &[matmul] = fit.matmuls else { return None };
    let (shape, [a, b]) = (&fit.shape, &fit.operands);
    let dtype = b.dtype;
    let narrow = matches!(dtype, Dtype::F16 | Dtype::Bf16) && target.arch.is_ampere();
    let alike = narrow && a.dtype == dtype && draft.graph.node(matmul).dtype == dtype;
    let eights = |elements: &[usize]| elements.iter().all(|count| count.is_multiple_of(8));
    let left = !fit.prologue.is_empty() || (shape.a.1 == 1 && eights(&[shape.a.0, a.offset]));
    let along = if is_by_rows(shape) { shape.n } else { shape.k };
    let right = (shape.b.0 == 1 || shape.b.1 == 1) && eights(&[next(shape), b.offset, along]);
    let sized = ROWS.contains(&shape.m) && [shape.n, shape.k].iter().all(|size| (1..MOST).contains(size));
    let fits = fit.gather.is_none() && shape.batch.is_empty() && alike && left && right && sized && eights(&[shape.k]);
    if !fits {
        return None;
    }
    let config = config(shape, target)?;
    Some((fit, config))
}

/// Whether B is `[k, n]`.
fn is_by_rows(shape: &MatmulShape) -> bool {
    shape.b.1 == 1
}

/// Elements from one line of B to the next.
fn next(shape: &MatmulShape) -> usize {
    if is_by_rows(shape) { shape.b.0 } else { shape.b.1 }
}

/// Blocks for most multiprocessors, of strips as wide and parts of K as long as that allows; two of them on each, so that those of the next
/// grid are there when these end. Whether there is one depends on the sizes and the architecture alone, not on the multiprocessors.
fn config(shape: &MatmulShape, target: &CudaTarget) -> Option<StripsConfig> {
    let &MatmulShape { n, k, .. } = shape;
    let splits = if target.arch.has_clusters() { [1, 2, 4, 8].as_slice() } else { &[1] };
    // Where K cannot be shared, strips must be many.
    if !target.arch.has_clusters() && n < FEW_COLUMNS {
        return None;
    }
    let part = |split: usize| k.div_ceil(split).next_multiple_of(DEEP);
    // A narrower strip costs less than to meet in a cluster.
    let long = |&split: &usize| split == 1 || part(split) >= PART;
    let all = splits.iter().copied().filter(long);
    let all = all.flat_map(|split| [COLUMNS, COLUMNS / 2].map(|columns| (columns, split)));
    let cut = |(columns, split): (usize, usize)| {
        let strips = n.div_ceil(columns);
        // Every block walks over as many strips as any other, but for the last ones.
        let turns = if split > 1 { 1 } else { strips.div_ceil((target.processors * 2).max(1)) };
        let one_strip = turns == 1;
        let blocks = strips.div_ceil(turns) * split;
        let least = StripsConfig { columns, split, part: part(split), stages: 1, one_strip, blocks, resident: 1 };
        let most = STAGES.min((part(split) / DEEP).div_ceil(WARPS) * turns);
        // The most in flight with two blocks on a multiprocessor, else with one.
        let wanted = [2, 1].into_iter().flat_map(|resident| (1..=most).rev().map(move |stages| (resident, stages)));
        let config = wanted
            .map(|(resident, stages)| StripsConfig { stages, resident, ..least })
            .find(|config| config.shared() + SPARE <= target.arch.block_shared() / config.resident);
        let walks = StripsConfig { one_strip: false, ..least };
        config.filter(|_| walks.shared() + SPARE <= target.arch.block_shared())
    };
    let possible: Vec<StripsConfig> = all.filter_map(cut).collect();
    // Seven tenths of all multiprocessors have the memory's speed.
    let enough = possible.iter().find(|config| 10 * config.blocks >= 7 * target.processors);
    enough.or_else(|| possible.iter().max_by_key(|config| config.blocks)).copied()
}

impl StripsConfig {
    /// Bytes of shared memory, as the text lays them out.
    fn shared(&self) -> usize {
        let chunks = WARPS * self.stages * 2 * DEEP * self.columns;
        let left = MATRIX * (2 * self.part + 16);
        let sums = WARPS * MATRIX * (self.columns + 4) * 4;
        let parts = if self.split > 1 { MATRIX * self.columns * 4 + self.split * 16 } else { 0 };
        if self.one_strip { chunks.max(sums) + left + parts } else { chunks + left + sums + parts }
    }
}

impl StripsKernel {
    /// That of a group, if it is a matmul that the kernel takes.
    pub fn of(group: &Draft, target: &CudaTarget) -> Option<StripsKernel> {
        let (fit, config) = fit(group, target)?;
        Some(StripsKernel::new(sides::lower_few(group, fit), config))
    }

    fn new(lowered: LoweredMatmul, config: StripsConfig) -> StripsKernel {
        let LoweredMatmul { product, launch } = lowered;
        StripsKernel { product, launch, config }
    }

    /// What is compiled and launched.
    pub fn kernel(&self, target: &CudaTarget) -> Kernel {
        let own = text_beside(&[Part::Matrix, Part::Mbarrier], &PRELUDE_PARTS);
        let files = [include_str!("few_rows.cuh"), include_str!("strips.cu")];
        let text = [&self.constants(), PRELUDE.as_str(), &own, &self.sides().text(MATRIX, THREADS), files[0], files[1]]
            .join("\n");
        let StripsConfig { columns, stages, resident, .. } = self.config;
        let tiling = Tiling {
            entry: "matmul_strips",
            by: "mma.sync",
            tile: [MATRIX, columns],
            stages: Some(stages),
            walked: None,
            resident,
        };
        let launch = Launch::of_grids(self.product.arguments(&self.launch), self.grids(target))
            .with_variant(format!("every weight once, strips of {columns} columns by matrix units"), String::new())
            .with_tiling(tiling);
        Kernel::new(Source::Cuda(CudaSource::new("matmul_strips", text)), launch)
    }

    fn constants(&self) -> String {
        let (StripsConfig { columns, split, part, stages, resident, .. }, shape) = (self.config, &self.launch.shape);
        let numbers = [
            ("THREADS", THREADS),
            ("V", self.vector()),
            ("M", MATRIX),
            ("N", shape.n),
            ("K", shape.k),
            ("COLUMNS", columns),
            ("STRIPS", shape.n.div_ceil(columns)),
            ("SPLIT", split),
            ("PART", part),
            ("STAGES", stages),
            ("RESIDENT", resident),
            ("KIND", if self.product.right == Dtype::F16 { 1 } else { 2 }),
            ("SHARED", self.sides().shared_words(columns).len() / 3),
        ];
        let mut text = format!(
            "// product of few rows, {} columns, inner size {}: strips of {columns} columns, K over {split} blocks\n#define WAITS\n",
            shape.n, shape.k
        );
        text += &format!("#define HEAD {}\n", u8::from(self.product.prologue.is_some()));
        text.extend(numbers.map(|(name, value)| format!("constexpr int {name} = {value};\n")));
        text += &format!("constexpr bool BY_ROWS = {};\n", is_by_rows(shape));
        text += &format!("constexpr bool ONE_STRIP = {};\n", self.config.one_strip);
        text
    }

    fn grids(&self, target: &CudaTarget) -> Grids {
        let (shape, config) = (&self.launch.shape, &self.config);
        let operand = |role| sides::address(&self.product, &self.launch, role);
        let mut words = self.sides().words(shape.m);
        let bytes = |elements: usize| Word::Number((elements * self.product.right.bytes()) as u64);
        words.extend([operand(Role::Left), bytes(shape.a.0), operand(Role::Right(0)), bytes(next(shape))]);
        words.extend([Word::Number(shape.m as u64), sides::given(&self.product, &self.launch, Role::Right(0))]);
        words.extend(self.sides().shared_words(config.columns));
        let grid = Grid {
            entry: "matmul_strips",
            blocks: [config.blocks as u32, 1, 1],
            threads: THREADS as u32,
            cluster: config.split as u32,
            shared: config.shared() as u32,
            waits: target.arch.has_dependent_grids(),
            walks: false,
            words,
        };
        Grids { list: vec![grid], ..Grids::default() }
    }

    fn vector(&self) -> usize {
        gcd(gcd(self.launch.shape.n, self.launch.shape.k), 4)
    }

    fn sides(&self) -> Sides<'_> {
        Sides::of(&self.product, &self.launch, self.vector())
    }
}

//! Matmuls of 1 to 8 rows on CUDA: each weight is read once, at the speed of the memory.
//!
//! | layout of B | a block                                                | sums of K are added over           |
//! |-------------|--------------------------------------------------------|------------------------------------|
//! | `[k, n]`    | a strip of columns; a cluster shares K                 | threads, warps, blocks of a cluster|
//! | `[n, k]`    | walks over strips; a warp has four columns at a time   | lanes, warps that share K          |
//!
//! - Operands are f32, f16 or bf16, sums f32 in a fixed order; or bytes, whose sums are exact, where both have rows along K. Row work may
//!   make the left operand of floats: every block does it for itself. Elementwise work may follow.
//! - Traffic: weights once; A once a block, from the L2. Loads are of 16 bytes where sizes and strides allow it.
//! - In flight: up to 32 KiB of weights a block, before A is there. Of GPT-2's matmuls for one token that is all of a layer's, 9 KiB
//!   (768 x 768) to 36 KiB (768 x 3072) on each of 132 multiprocessors, and 96 KiB of the prologue's. An H200 needs some 40 KiB for the
//!   speed of its memory; grids that follow each other closely have theirs in flight together.
//! - Limits: the rows of A as floats take at most 56 KiB, what every GPU of ours has for a block.

use deuteron_codegen::body::Body;
use deuteron_codegen::cuda::arch::Arch;
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Tiling, Word};
use deuteron_codegen::cuda::row::gcd;
use deuteron_codegen::cuda::row::{PRELUDE, type_name};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_graph::Dtype;
use deuteron_plan::{Draft, Work, primitive_work};

use super::sides::{self, Sides};
use crate::fit::{self, MatmulFit};
use crate::kernel::{LoweredMatmul, MAX_BYTES, Matmul, MatmulLaunch, PROLOGUE_ROWS, Role};
use crate::library;

/// Threads of a block.
const THREADS: usize = 256;
/// Warps of a block.
const WARPS: usize = THREADS / 32;
/// Columns of a warp where B is `[n, k]`.
const NEAR: usize = 4;
/// Bytes of A in shared memory, at most: every architecture has as many.
const LEFT_BYTES: usize = 56 << 10;
/// The same where an architecture has more, and the library stands in where it has not.
const MORE_LEFT_BYTES: usize = 97 << 10;
/// Columns, at most: they are counted by 32 bits, as are strips beyond the last one.
const COLUMNS: usize = 1 << 30;
/// Microseconds that a launch takes besides its bytes, of one row and of twice as many each: fitted to `h200-ffn.csv`.
const VECTOR_US: [f64; 2] = [2.7, 0.85];
/// Rows of B that a part of a cluster has, at least.
const PART: usize = 32;

/// Matmuls of few rows on a GPU.
pub struct SkinnyFamily;

impl Family<CudaTarget> for SkinnyFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let fit = fit(&group, target.arch)?;
        let microseconds = sides::few_rows_us(&fit, VECTOR_US, target);
        offered(
            move || Work { microseconds, ..primitive_work(&group) },
            move || SkinnyKernel::new(sides::lower_few(&group, fit), target).kernel(target),
        )
    }
}

/// A matmul of few rows, compiled for its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct SkinnyKernel {
    /// the matmul; it always has an epilogue
    pub product: Matmul<Body>,
    /// sizes and arguments
    pub launch: MatmulLaunch,
    /// how it is spread over threads
    pub config: SkinnyConfig,
}

/// How a matmul of few rows is spread over threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SkinnyConfig {
    /// rows, rounded up to a power of two
    pub rows: usize,
    /// columns of a block
    pub strip: usize,
    /// floats or bytes from one row of A to the next
    pub left: usize,
    /// blocks that stay on a multiprocessor
    pub resident: usize,
    /// blocks of a launch
    pub blocks: usize,
    /// columns that prologue and epilogue take at once
    pub vector: usize,
    /// whether A is held as bytes
    pub is_of_bytes: bool,
    /// which way B lies
    pub weights: Weights,
}

/// How the weights lie, and who reads which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// `[k, n]`
    ByRows {
        /// threads side by side
        across: usize,
        /// rows that a thread takes at once
        deep: usize,
        /// blocks of a cluster, each with a part of K
        split: usize,
        /// rows of a part
        part: usize,
    },
    /// `[n, k]`
    ByColumns {
        /// warps that share K
        slices: usize,
    },
}

/// The matmul of a draft, if it is of few rows: of a length that every architecture takes, or of one that this architecture takes, if the
/// library would do the same elsewhere.
fn fit<'a>(draft: &Draft<'a>, arch: Arch) -> Option<MatmulFit<'a>> {
    let fit = fit::fit(draft).filter(|fit| is_of_few_rows(draft, fit))?;
    // The longest row of A that a config pads it to.
    let left = fit.shape.k.next_multiple_of(512) * fit.shape.m.next_power_of_two() * held_bytes(fit.operands[0].dtype);
    let longer = || left <= arch.block_shared().min(MORE_LEFT_BYTES) && library::fit(draft).is_some();
    (left <= LEFT_BYTES || longer()).then_some(fit)
}

/// Bytes of an element of A in shared memory: bytes stay bytes, all else is floats.
fn held_bytes(left: Dtype) -> usize {
    if left == Dtype::I8 { 1 } else { 4 }
}

/// Whether a matmul is of few rows, and of operands that this kernel reads.
fn is_of_few_rows(draft: &Draft, fit: &MatmulFit) -> bool {
    let &[matmul] = fit.matmuls else { return false };
    let (shape, [a, b]) = (&fit.shape, &fit.operands);
    let floats = |dtype: Dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16);
    let one = shape.batch.is_empty() && (1..=PROLOGUE_ROWS).contains(&shape.m) && (1..COLUMNS).contains(&shape.n);
    let alike = shape.b.0 == 1 || shape.b.1 == 1;
    let of_floats = floats(a.dtype) && floats(b.dtype) && floats(draft.graph.node(matmul).dtype);
    let along_k = shape.a.1 == 1 && shape.b.0 == 1 && fit.prologue.is_empty() && shape.k < MAX_BYTES;
    let of_bytes = a.dtype == Dtype::I8 && b.dtype == Dtype::I8 && along_k;
    one && shape.k > 0 && alike && (of_floats || of_bytes) && fit.gather.is_none()
}

/// Whether B is `[k, n]`; one row of bytes is `[n, k]` too.
fn is_by_rows(shape: &MatmulShape, right: Dtype) -> bool {
    shape.b.1 == 1 && right != Dtype::I8
}

/// Elements from one row of B to the next, or from one column to the next.
fn next(shape: &MatmulShape, right: Dtype) -> usize {
    if is_by_rows(shape, right) { shape.b.0 } else { shape.b.1 }
}

/// Enough blocks for all multiprocessors, of strips as wide and parts of K as long as that allows.
fn config(product: &Matmul<Body>, shape: &MatmulShape, target: &CudaTarget) -> SkinnyConfig {
    let &MatmulShape { m, n, k, .. } = shape;
    let rows = m.next_power_of_two();
    let wide = 16 / product.right.bytes();
    let vector = gcd(gcd(n, k), 4);
    // Two rows of 16 bytes each take more registers than three blocks leave: NVRTC 13 spills 8 bytes.
    let resident = if rows == 1 { 3 } else { 2 };
    let (weights, strip, left, blocks) = if is_by_rows(shape, product.right) {
        let splits = if target.arch.has_clusters() { [1, 2, 4, 8].as_slice() } else { &[1] };
        let fits = |&split: &usize| split == 1 || k / split >= PART;
        let all = [8, 4, 2]
            .into_iter()
            .flat_map(|across| splits.iter().copied().filter(fits).map(move |split| (across, split)));
        let blocks = |&(across, split): &(usize, usize)| n.div_ceil(across * wide) * split;
        let enough = all.clone().find(|shape| blocks(shape) >= target.processors);
        let (across, split) = enough.or_else(|| all.max_by_key(blocks)).unwrap_or((8, 1));
        let deep = if rows == 8 { 2 } else { 4 };
        // A whole number of vectors, whatever the type.
        let part = k.div_ceil(split).next_multiple_of(8);
        let left = part.next_multiple_of(THREADS / across * deep);
        (Weights::ByRows { across, deep, split, part }, across * wide, left, blocks(&(across, split)))
    } else {
        let step = 32 * wide;
        let steps = k.div_ceil(step);
        let strip = |slices: usize| WARPS / slices * NEAR;
        // Of bytes there are few steps: rather some warps have none than some multiprocessors no block.
        let most = if product.right == Dtype::I8 { 2 * steps - 1 } else { steps };
        let mut possible = [1, 2, 4, 8].into_iter().filter(|&slices| slices <= most);
        let enough = possible.clone().find(|&slices| n.div_ceil(strip(slices)) >= target.processors);
        let slices = enough.or(possible.next_back()).unwrap_or(1);
        let strips = n.div_ceil(strip(slices));
        // Every block walks over as many strips as any other, but for the last ones.
        let turns = strips.div_ceil((target.processors * resident).max(1));
        (Weights::ByColumns { slices }, strip(slices), steps.max(slices) * step, strips.div_ceil(turns))
    };
    let is_of_bytes = product.left == Dtype::I8;
    SkinnyConfig { rows, strip, left, resident, blocks, vector, is_of_bytes, weights }
}

impl SkinnyConfig {
    /// Floats before those that the blocks of a cluster give each other: A, or the sums of the warps, which take its place.
    fn parts_at(&self) -> usize {
        let sums = if let Weights::ByRows { .. } = self.weights { WARPS * self.rows * self.strip } else { 0 };
        (self.rows * self.left).max(sums)
    }

    /// Bytes of shared memory.
    fn shared(&self) -> usize {
        let parts = match self.weights {
            Weights::ByRows { split, .. } if split > 1 => {
                (self.rows * self.strip / self.vector).div_ceil(split) * self.vector * split
            }
            Weights::ByRows { .. } | Weights::ByColumns { .. } => 0,
        };
        match self.is_of_bytes {
            true => self.rows * self.left,
            false => 4 * (self.parts_at() + parts),
        }
    }
}

impl SkinnyKernel {
    /// That of a group, if it is a matmul of few rows.
    pub fn of(group: &Draft, target: &CudaTarget) -> Option<SkinnyKernel> {
        let fit = fit(group, target.arch)?;
        Some(SkinnyKernel::new(sides::lower_few(group, fit), target))
    }

    fn new(lowered: LoweredMatmul, target: &CudaTarget) -> SkinnyKernel {
        let LoweredMatmul { product, launch } = lowered;
        let config = config(&product, &launch.shape, target);
        SkinnyKernel { product, launch, config }
    }

    /// What is compiled and launched.
    pub fn kernel(&self, target: &CudaTarget) -> Kernel {
        let text = self.constants()
            + &PRELUDE
            + &self.types_and_sides()
            + include_str!("few_rows.cuh")
            + include_str!("skinny.cuh")
            + match self.config.weights {
                Weights::ByRows { .. } => include_str!("by_rows.cu"),
                Weights::ByColumns { .. } => include_str!("by_columns.cu"),
            };
        let SkinnyConfig { rows, strip, resident, is_of_bytes, .. } = self.config;
        let by = if is_of_bytes { "dp4a" } else { "fma" };
        let tiling = Tiling { entry: "skinny", by, tile: [rows, strip], stages: None, walked: None, resident };
        let launch = Launch::of_grids(self.product.arguments(&self.launch), self.grids(target))
            .with_variant(format!("every weight once, strips of {strip} columns"), String::new())
            .with_tiling(tiling);
        Kernel::new(Source::Cuda(CudaSource::new("skinny", text)), launch)
    }

    fn grids(&self, target: &CudaTarget) -> Grids {
        let (shape, config) = (&self.launch.shape, &self.config);
        let operand = |role| sides::address(&self.product, &self.launch, role);
        let mut words = self.sides().words(shape.m);
        let bytes = |elements: usize, dtype: Dtype| Word::Number((elements * dtype.bytes()) as u64);
        let (left, right) = (self.product.left, self.product.right);
        words.extend([operand(Role::Left), bytes(shape.a.0, left), bytes(shape.a.1, left)]);
        words.extend([operand(Role::Right(0)), bytes(next(shape, right), right), Word::Number(shape.m as u64)]);
        words.push(sides::given(&self.product, &self.launch, Role::Right(0)));
        words.extend(self.sides().shared_words(config.strip));
        let cluster = if let Weights::ByRows { split, .. } = config.weights { split as u32 } else { 1 };
        let grid = Grid {
            entry: "skinny",
            blocks: [config.blocks as u32, 1, 1],
            threads: THREADS as u32,
            cluster,
            shared: config.shared() as u32,
            waits: target.arch.has_dependent_grids(),
            walks: false,
            words,
        };
        Grids { list: vec![grid], ..Grids::default() }
    }

    fn constants(&self) -> String {
        let (config, product, shape) = (&self.config, &self.product, &self.launch.shape);
        let offset = |role: Role| {
            let position = product.roles().iter().position(|&known| known == role);
            position.map_or(0, |position| self.launch.args[position].offset)
        };
        // Bytes that every access is a multiple of, a power of two up to 16.
        let access = |dtype: Dtype, elements: [usize; 3]| {
            elements.iter().fold(16, |all, &count| gcd(all, count * dtype.bytes()))
        };
        let along = if is_by_rows(shape, product.right) { shape.n } else { shape.k };
        let right = access(product.right, [next(shape, product.right), along, offset(Role::Right(0))]);
        let left = match shape.a.1 {
            1 => access(product.left, [shape.a.0, shape.k, offset(Role::Left)]),
            _ => product.left.bytes(),
        };
        let mut text = format!("// {}\n#define WAITS\n", self.describe());
        let mut number = |name: &str, value: usize| text += &format!("constexpr int {name} = {value};\n");
        number("THREADS", THREADS);
        number("V", config.vector);
        number("M", config.rows);
        number("N", shape.n);
        number("K", shape.k);
        number("ACCESS", right);
        number("LEFT_ACCESS", left);
        number("LEFT", config.left);
        number("RESIDENT", config.resident);
        number("SHARED", self.sides().shared_words(config.strip).len() / 3);
        match config.weights {
            Weights::ByRows { across, deep, split, part } => {
                number("ACROSS", across);
                number("DEEP", deep);
                number("SPLIT", split);
                number("PART", part);
                number("PARTS_AT", config.parts_at());
            }
            Weights::ByColumns { slices } => {
                number("NEAR", NEAR);
                number("SLICES", slices);
            }
        }
        text += &format!("constexpr bool BY_ROWS = {};\n", is_by_rows(shape, product.right));
        text += &format!("constexpr bool HEAD = {};\n\n", product.prologue.is_some());
        text
    }

    fn describe(&self) -> String {
        let MatmulShape { m, n, k, .. } = &self.launch.shape;
        let how = match self.config.weights {
            Weights::ByRows { split: 1, .. } => "weights by rows".to_string(),
            Weights::ByRows { split, .. } => format!("weights by rows, K over {split} blocks of a cluster"),
            Weights::ByColumns { slices: 1 } => "weights by columns".to_string(),
            Weights::ByColumns { slices } => format!("weights by columns, K over {slices} warps"),
        };
        format!("product of {m} rows, {n} columns, inner size {k}: {how}, {} blocks", self.config.blocks)
    }

    /// The types of the operands, and the functions of prologue and epilogue.
    fn types_and_sides(&self) -> String {
        let (left, right) = (type_name(self.product.left), type_name(self.product.right));
        let sides = self.sides().text(self.config.rows, THREADS);
        format!("\ntypedef {left} Left;\ntypedef {right} Right;\n\n{sides}")
    }

    fn sides(&self) -> Sides<'_> {
        Sides::of(&self.product, &self.launch, self.config.vector)
    }
}

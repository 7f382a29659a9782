//! Matmuls of 16-bit operands on Hopper whose operands tensor maps cannot take: those are copied once, into lines that start at multiples
//! of 16 bytes, and the kernel of `hopper.rs` reads the copies.
//!
//! - Traffic: that kernel's, and every operand that is copied once more, read and written.
//! - It pays where the matmul is long: 8192 x 50257 numbers are copied in less than half of a millisecond, and the matrix units of a
//!   warpgroup are twice as fast as those of a warp.

use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::matmul_shape::{MatmulShape, Matrix};
use deuteron_codegen::tile::tensor_map::Mapped;
use deuteron_graph::Dtype;
use deuteron_plan::{Draft, Work, primitive_work};

use super::hopper::{HopperKernel, HopperTile, is_fit_for_map, widens};
use super::mma;
use super::sides;
use crate::fit::{self, MatmulFit};
use crate::kernel::LoweredMatmul;

/// What copies, before the kernel that multiplies.
const COPY: [&str; 2] = [include_str!("shifted.cuh"), include_str!("realign.cu")];
/// Warps of a block that copies, as in `realign.cu`.
const WARPS: usize = 8;
/// Bytes that a warp copies, as in `realign.cu`.
const CHUNK_BYTES: usize = 128 * 16;
/// Bytes of both operands.
const SIZE: usize = 2;
/// Sizes, at most, as in `hopper.rs`.
const MAX_SIZE: usize = 1 << 30;
/// Bytes of copies, at most: what a kernel of its own may take of a GPU's memory.
const MAX_BYTES: usize = 2 << 30;
/// Copies start at multiples of this.
const ALIGNMENT: usize = 256;
/// Bytes that a multiprocessor reads and writes in a microsecond while it copies.
const COPY_RATE: f64 = 26e3;

/// Matmuls on the matrix units of Hopper, of operands that are copied first.
pub struct RealignedFamily;

impl Family<CudaTarget> for RealignedFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let fit = fit(&group, target)?;
        if widens(&group, fit.matmuls) {
            return None;
        }
        let others = mma::offered_microseconds(&group, &fit, target);
        let kernel = RealignedKernel::of(&group, target)?;
        let ours = kernel.microseconds(target);
        if others < ours {
            return None;
        }
        let work = move || Work { microseconds: Some(ours), ..primitive_work(&group) };
        offered(work, move || kernel.kernel(target))
    }
}

/// A matmul for Hopper with copies of its operands.
#[derive(Debug, Clone, PartialEq)]
pub struct RealignedKernel {
    lowered: LoweredMatmul,
    copies: [Option<LineCopy>; 2],
    inner: HopperKernel,
}

/// An operand that is copied: lines that follow each other. Sizes are in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LineCopy {
    /// lines of a matrix, and elements of a line
    sizes: [usize; 2],
    /// from a line to the next
    line: usize,
    /// matrices that are copied, and from one to the next
    batch: (usize, usize),
    /// where the copy starts in the workspace, in bytes
    start: usize,
}

impl LineCopy {
    fn pitch(&self) -> usize {
        self.sizes[1].next_multiple_of(16 / SIZE)
    }

    fn bytes(&self) -> usize {
        self.batch.0 * self.sizes[0] * self.pitch() * SIZE
    }
}

/// The matmul of a draft, if Hopper's kernel takes it but for how its operands lie.
fn fit<'a>(draft: &Draft<'a>, target: &CudaTarget) -> Option<MatmulFit<'a>> {
    let fit = fit::fit(draft)?;
    let &[matmul] = fit.matmuls else { return None };
    let (shape, [a, b]) = (&fit.shape, &fit.operands);
    let dtype = draft.graph.node(matmul).dtype;
    let narrow =
        matches!(a.dtype, Dtype::F16 | Dtype::Bf16) && b.dtype == a.dtype && [a.dtype, Dtype::F32].contains(&dtype);
    let plain = fit.gather.is_none() && fit.prologue.is_empty();
    let sized = [shape.m, shape.n, shape.k, shape.batches()].iter().all(|size| (1..MAX_SIZE).contains(size))
        && shape.m * shape.batches() < MAX_SIZE
        && shape.n >= 16
        && shape.batch.len() <= 1;
    let contiguous = |(row, column): (usize, usize)| row == 1 || column == 1;
    let known = contiguous(shape.a) && contiguous(shape.b);
    let mapped = [is_mapped(&fit, 0), is_mapped(&fit, 1)];
    (target.arch.has_wgmma() && narrow && plain && sized && known && mapped != [true, true]).then_some(fit)
}

/// Whether an operand has a tensor map as it lies.
fn is_mapped(fit: &MatmulFit, operand: usize) -> bool {
    let strides = if operand == 0 { fit.shape.a } else { fit.shape.b };
    let batch = fit.shape.batch.first().map(|axis| axis[operand + 1]);
    is_fit_for_map(strides, &fit.operands[operand], batch)
}

/// How an operand is copied.
fn copy(shape: &MatmulShape, operand: usize, start: usize) -> LineCopy {
    let ((row, column), rows, columns) =
        if operand == 0 { (shape.a, shape.m, shape.k) } else { (shape.b, shape.k, shape.n) };
    let (sizes, line) = if column == 1 { ([rows, columns], row) } else { ([columns, rows], column) };
    let batch = match shape.batch.first() {
        Some(axis) if axis[operand + 1] != 0 => (axis[0], axis[operand + 1]),
        Some(_) | None => (1, 0),
    };
    LineCopy { sizes, line, batch, start }
}

impl RealignedKernel {
    /// That of a group, if it is a matmul that this kernel takes.
    pub fn of(group: &Draft, target: &CudaTarget) -> Option<RealignedKernel> {
        let fit = fit(group, target)?;
        let mapped = [is_mapped(&fit, 0), is_mapped(&fit, 1)];
        let lowered = sides::lower(group, fit);
        let (mut copies, mut inner, mut bytes) = ([None; 2], lowered.launch.clone(), 0);
        for operand in 0..2 {
            if mapped[operand] {
                continue;
            }
            let own = copy(&lowered.launch.shape, operand, bytes);
            bytes += own.bytes().next_multiple_of(ALIGNMENT);
            let strides = if operand == 0 { &mut inner.shape.a } else { &mut inner.shape.b };
            *strides = if strides.1 == 1 { (own.pitch(), 1) } else { (1, own.pitch()) };
            if let Some(axis) = inner.shape.batch.first_mut().filter(|_| own.batch.1 != 0) {
                axis[operand + 1] = own.sizes[0] * own.pitch();
            }
            inner.args[operand].offset = 0;
            copies[operand] = Some(own);
        }
        let inner = HopperKernel::new(LoweredMatmul { product: lowered.product.clone(), launch: inner }, target)?;
        (bytes <= MAX_BYTES).then_some(RealignedKernel { lowered, copies, inner })
    }

    /// How the matmul is cut.
    pub fn tile(&self) -> HopperTile {
        self.inner.tile
    }

    /// All ways to cut the matmul that are predicted to take at most so many times the time of the fastest, that one first.
    pub fn tiles(&self, target: &CudaTarget, times: f64) -> Vec<HopperTile> {
        self.inner.tiles(target, times)
    }

    /// The same, cut in another way.
    pub fn with_tile(self, tile: HopperTile) -> RealignedKernel {
        RealignedKernel { inner: self.inner.with_tile(tile), ..self }
    }

    /// Time of the copies and of the matmul, roughly.
    fn microseconds(&self, target: &CudaTarget) -> f64 {
        let copies = self.copies.iter().flatten();
        let copied: f64 =
            copies.map(|copy| 2.0 + 2.0 * copy.bytes() as f64 / (COPY_RATE * target.processors as f64)).sum();
        copied + self.inner.microseconds(target)
    }

    /// What is compiled and launched.
    pub fn kernel(&self, target: &CudaTarget) -> Kernel {
        let Kernel { source, launch } = self.inner.kernel(target);
        let LoweredMatmul { product, launch: own } = &self.lowered;
        let text = match source {
            Source::Cuda(source) => source.text,
            Source::Cpu(_) | Source::Library(_) => String::new(),
        };
        let mut list: Vec<Grid> = Vec::new();
        for (operand, copy) in self.copies.iter().enumerate() {
            list.extend(copy.map(|copy| self.grid(operand, &copy, target)));
        }
        let multiply = launch.grids().map_or(&[][..], |grids| &grids.list);
        list.extend(multiply.iter().cloned().map(|grid| self.on_copies(grid)));
        let workspace = self.copies.iter().flatten().map(|copy| copy.start + copy.bytes()).max().unwrap_or(0);
        let grids = Grids { list, workspace, ..Grids::default() };
        let launch = Launch::of_grids(product.arguments(own), grids);
        let launch = launch.with_variant(format!("copied, {}", self.inner.describe()), String::new());
        let launch = launch.with_tiling(self.inner.tiling("matmul_hopper"));
        Kernel::new(Source::Cuda(CudaSource::new("matmul", [&text, COPY[0], COPY[1]].join("\n"))), launch)
    }

    /// The grid that multiplies, with maps of the copies.
    fn on_copies(&self, mut grid: Grid) -> Grid {
        for word in &mut grid.words {
            let copy = |operand: usize| self.copies.get(operand).copied().flatten();
            match word {
                Word::Map(map) => {
                    let Mapped::Argument(operand) = map.of else { continue };
                    if let Some(copy) = copy(operand) {
                        (map.of, map.offset) = (Mapped::Workspace, copy.start);
                    }
                }
                // A copy is made by the grid before.
                Word::Unwritten { position, .. } if copy(*position).is_some() => *word = Word::Number(0),
                _ => {}
            }
        }
        grid
    }

    /// The grid that copies an operand.
    fn grid(&self, operand: usize, copy: &LineCopy, target: &CudaTarget) -> Grid {
        let LoweredMatmul { launch, .. } = &self.lowered;
        let (start, matrix) = (launch.args[operand].start(), if operand == 0 { Matrix::A } else { Matrix::B });
        let at = |offset: usize| Word::Argument { position: operand, offset };
        let [lines, elements] = copy.sizes;
        let (pitch, chunks) = (copy.pitch() * SIZE, (elements * SIZE).div_ceil(CHUNK_BYTES));
        let tasks = copy.batch.0 * lines * chunks;
        let numbers = [copy.line * SIZE, copy.batch.1 * SIZE, lines, elements * SIZE, pitch, chunks, tasks];
        let mut words = vec![at(start), at(start + launch.shape.reach(matrix) * SIZE), Word::Workspace(copy.start)];
        words.extend(numbers.map(|number| Word::Number(number as u64)));
        let grid = Grid::new("realign", tasks.div_ceil(WARPS), (32 * WARPS) as u32, words);
        Grid { waits: target.arch.has_dependent_grids(), ..grid }
    }
}

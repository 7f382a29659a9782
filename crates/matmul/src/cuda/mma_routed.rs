//! Rows that are routed to experts, by the matrix units of a warp: what `routed.rs` has no kernel for. f32 everywhere, other types and bytes
//! beside Hopper, and operands that do not start at multiples of 16 bytes.
//!
//! | grid                | blocks                    | does                                                                         |
//! |---------------------|---------------------------|------------------------------------------------------------------------------|
//! | `route`             | one                       | sorts rows by expert, in their order, and cuts each expert's rows into tiles |
//! | `matmul_mma_routed` | as many as may be needed  | a tile of one expert each; rows are read and written where they lie          |
//!
//! - Traffic: that of `mma.rs`; no row and no matrix is copied. The workspace has one number for each row and four for each tile.
//! - Types, sums and strides are those of `mma.rs`. An index that picks no expert is a fault.

use deuteron_codegen::argument::{ArgBinding, strided_reach};
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::matmul_shape::{MatmulShape, Matrix};
use deuteron_graph::Dtype;
use deuteron_plan::Draft;

use super::mma::{self, MmaKernel, MmaTile, Operand};
use super::mma_time::Problem;
use super::route::{self, LEFT, Routing, TABLE};
use super::sides;
use crate::fit::{self, MatmulFit};
use crate::kernel::{LoweredMatmul, MAX_BYTES};
use crate::routed::LeftRows;

/// The grid that multiplies, in the text.
const ENTRY: &str = "matmul_mma_routed";
/// What stands behind what makes a tile.
const KERNEL: [&str; 2] = [route::TEXT, include_str!("mma/routed.cu")];
/// Rows of the smallest tile: there are most of it.
const SMALLEST: usize = 64;

/// Rows routed to experts on the matrix units of a warp.
pub struct MmaRoutedFamily;

impl Family<CudaTarget> for MmaRoutedFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let fit = fit(&group, target)?;
        let (shape, dtype) = (fit.shape.clone(), fit.operands[0].dtype);
        let microseconds = target.arch.has_wgmma().then(|| microseconds(&fit, target));
        offered(
            move || route::work(&shape, dtype, microseconds),
            move || MmaRoutedKernel::new(sides::lower(&group, fit), target).kernel(target),
        )
    }
}

/// A routed matmul for the matrix units of a warp, compiled for its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct MmaRoutedKernel {
    matmul: MmaKernel,
}

/// The routed matmul of a draft, if this kernel takes it.
fn fit<'a>(draft: &Draft<'a>, target: &CudaTarget) -> Option<MatmulFit<'a>> {
    let fit = fit::fit(draft).filter(|fit| fit.gather.is_some())?;
    let (shape, [a, table]) = (&fit.shape, &fit.operands);
    let known = mma::has_instructions(a.dtype, draft.graph.node(fit.matmuls[0]).dtype, target);
    let longest = if a.dtype == Dtype::I8 { MAX_BYTES } else { mma::MAX_SIZE };
    let sized = shape.k < longest && Routing::new(shape, table, SMALLEST).fits(shape, target);
    (known && sized).then_some(fit)
}

/// Time of a launch on an H200, roughly.
fn microseconds(fit: &MatmulFit, target: &CudaTarget) -> f64 {
    let (shape, [left, table]) = (&fit.shape, &fit.operands);
    let routing = Routing::new(shape, table, SMALLEST);
    let padded = padded(shape, &routing);
    let problem = Problem::new(&padded, left.dtype, operands(shape, &fit.operands, target), target);
    routing.microseconds(shape, left.dtype, problem.microseconds(mma::fastest(&problem)), target.processors)
}

/// The matmul of all rows and of those that fill the last tile of an expert.
fn padded(shape: &MatmulShape, routing: &Routing) -> MatmulShape {
    MatmulShape { m: routing.usual_row_tiles() * SMALLEST, ..shape.clone() }
}

/// The operands of a routed matmul. Of an axis of one, the stride means nothing.
fn operands(shape: &MatmulShape, args: &[ArgBinding], target: &CudaTarget) -> [Operand; 2] {
    let asynchronous = target.arch.is_ampere();
    let strides =
        |arg: &ArgBinding| -> Vec<usize> { arg.leading.iter().filter(|axis| axis.0 > 1).map(|axis| axis.1).collect() };
    let [a, b] = [&args[LEFT], &args[TABLE]];
    // Lines of A lie anywhere.
    let left = Operand::new((0, 1), a, strides(a).into_iter(), asynchronous);
    [left, Operand::new((shape.b.1, shape.b.0), b, strides(b).into_iter(), asynchronous)]
}

impl MmaRoutedKernel {
    /// That of a group, if it is a routed matmul that this kernel takes.
    pub fn of(group: &Draft, target: &CudaTarget) -> Option<MmaRoutedKernel> {
        let fit = fit(group, target)?;
        Some(MmaRoutedKernel::new(sides::lower(group, fit), target))
    }

    fn new(lowered: LoweredMatmul, target: &CudaTarget) -> MmaRoutedKernel {
        let LoweredMatmul { product: matmul, launch } = lowered;
        let operands = operands(&launch.shape, &launch.args, target);
        let routing = Routing::new(&launch.shape, &launch.args[TABLE], SMALLEST);
        let padded = padded(&launch.shape, &routing);
        let tile = mma::fastest(&Problem::new(&padded, matmul.left, operands, target));
        MmaRoutedKernel { matmul: MmaKernel { matmul, launch, tile, operands } }
    }

    /// All ways to cut it, fastest first if every expert had as many rows.
    pub fn cuts(&self, target: &CudaTarget) -> Vec<MmaTile> {
        self.matmul.tiles(target, f64::INFINITY)
    }

    /// The same, cut in another way.
    pub fn with_tile(self, tile: MmaTile) -> MmaRoutedKernel {
        MmaRoutedKernel { matmul: self.matmul.with_tile(tile) }
    }

    /// What is compiled and launched.
    pub fn kernel(&self, target: &CudaTarget) -> Kernel {
        let (routing, MmaKernel { matmul, launch, .. }) = (self.routing(), &self.matmul);
        let text = routing.constants() + &self.matmul.text(&KERNEL, target);
        let grids = Grids {
            list: vec![routing.grid(&launch.args, target), self.tiles(target)],
            workspace: routing.workspace(),
            checks_indices: true,
            ..Grids::default()
        };
        let variant = format!("{}, {} experts", self.matmul.describe(target), routing.experts);
        let launched = Launch::of_grids(matmul.arguments(launch), grids);
        let launched = launched.with_lookups(vec![routing.lookup(&launch.args)]).with_variant(variant, String::new());
        let launched = launched.with_tiling(self.matmul.tiling(ENTRY, target));
        Kernel::new(Source::Cuda(CudaSource::new("routed", text)), launched)
    }

    fn routing(&self) -> Routing {
        Routing::new(&self.matmul.launch.shape, &self.matmul.launch.args[TABLE], self.matmul.tile.rows)
    }

    fn tiles(&self, target: &CudaTarget) -> Grid {
        let (launch, routing) = (&self.matmul.launch, self.routing());
        let (shape, [left, table]) = (&launch.shape, [LEFT, TABLE].map(|position| &launch.args[position]));
        let reach = |arg: &ArgBinding, run: usize| match run {
            0 => 0,
            run => strided_reach(arg.leading.iter().copied(), run),
        };
        let mut words = self.matmul.words([reach(left, shape.k), reach(table, shape.reach(Matrix::B))]);
        let column_tiles = shape.n.div_ceil(self.matmul.tile.columns);
        let (bytes, LeftRows { choices, stride, own }) = (left.dtype.bytes(), LeftRows::of(left));
        let matrix = table.leading.first().map_or(0, |&(_, stride)| stride);
        words.extend(mma::axis_words([0, column_tiles], shape, bytes));
        let numbers = [stride * bytes, own * bytes, choices, matrix * bytes];
        words.extend(numbers.map(|number| Word::Number(number as u64)));
        words.extend(routing.lists());
        self.matmul.grid(ENTRY, routing.row_tiles() * column_tiles, words, target)
    }
}

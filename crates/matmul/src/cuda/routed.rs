//! Rows of bytes or 16-bit floats that are routed to experts, on Hopper: each row times the matrix that an index picks for it, with any
//! elementwise epilogue; of bytes with any that needs whole rows, as quantising them again does.
//!
//! | grid            | blocks             | does                                                                          |
//! |-----------------|--------------------|-------------------------------------------------------------------------------|
//! | `route`         | one                | sorts rows by expert, in their order, and cuts each expert's rows into tiles  |
//! | `matmul_routed` | one each processor | walks over tiles of one expert each; rows are gathered, results scattered     |
//!
//! - Traffic: the rows of A once for each column of tiles, mostly from the L2; of an expert's matrix each column once for 128 of its rows.
//!   Nothing is copied: the workspace has one number for each row and four for each tile.
//! - A row that has several choices is gathered for each, from where it lies.
//! - Sums are rounded to the storage type before the epilogue; those of bytes are exact. Same bits on every run, however rows are spread.
//! - An index that picks no expert is a fault.
//! - Limits: inner sizes and strides of whole 16 bytes.

use deuteron_codegen::body::Body;
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Tiling, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::tile::tensor_map::{Mapped, TensorMap};
use deuteron_graph::{Dtype, NodeId, Op, ReduceOp};
use deuteron_plan::Draft;

use super::hopper::{self, HopperKernel, HopperTile, ROWS, THREADS};
use super::route::{self, LEFT, Routing, TABLE};
use super::sides;
use crate::fit::{self, MatmulFit};
use crate::kernel::{LoweredMatmul, MAX_BYTES, Matmul, MatmulLaunch};
use crate::routed::LeftRows;

/// What stands after the parts that it shares with matmuls of bytes.
const KERNEL: [&str; 2] = [route::TEXT, include_str!("hopper/routed.cu")];

/// Rows routed to experts on the matrix units of Hopper.
pub struct RoutedFamily;

impl Family<CudaTarget> for RoutedFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let fit = fit(&group, target)?;
        let (shape, dtype) = (fit.shape.clone(), fit.operands[0].dtype);
        let kernel = RoutedKernel::new(sides::lower(&group, fit), target)?;
        let routing = kernel.routing;
        let multiplied = kernel.matmul.routed_us(routing.usual_row_tiles(), target);
        let microseconds = routing.microseconds(&shape, dtype, multiplied, target.processors);
        offered(move || route::work(&shape, dtype, Some(microseconds)), move || kernel.kernel(target))
    }
}

/// A routed matmul, compiled for its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutedKernel {
    /// the matmul of all rows, and how it is cut
    matmul: HopperKernel,
    /// how rows find their experts
    routing: Routing,
}

/// The routed matmul of a draft, if this kernel takes it.
fn fit<'a>(draft: &Draft<'a>, target: &CudaTarget) -> Option<MatmulFit<'a>> {
    // Whole rows only of exact sums: others are rounded first, where an epilogue has no whole rows.
    let of_bytes = |fit: &MatmulFit| fit.operands[0].dtype == Dtype::I8;
    let fit = fit::fit_with_rows(draft).filter(of_bytes).or_else(|| fit::fit(draft));
    let fit = fit.filter(|fit| fit.gather.is_some())?;
    let (shape, [a, table]) = (&fit.shape, &fit.operands);
    // Where in a row a number is, blocks do not tell each other.
    let places = |id: &NodeId| draft.graph.node(*id).op == Op::RowReduce(ReduceOp::ArgMax);
    let multiplied = match a.dtype {
        Dtype::I8 => shape.k < MAX_BYTES,
        // Smaller matrices leave most of a stage and of a tile empty: those are for `mma_routed.rs`.
        Dtype::F16 | Dtype::Bf16 => shape.k >= 64 && shape.n >= 64,
        Dtype::F32 | Dtype::F8e4m3 | Dtype::I32 | Dtype::Bool => false,
    };
    let sized = (1..hopper::MAX_SIZE).contains(&shape.k)
        && shape.n >= 16
        && Routing::new(shape, table, ROWS).fits(shape, target);
    // Of an axis of one, the stride means nothing.
    let strides = a.leading.iter().chain(&table.leading).filter(|axis| axis.0 > 1).map(|axis| axis.1);
    let lies = [shape.k, a.offset, table.offset].into_iter().chain(strides);
    let lies = lies.map(|elements| elements * a.dtype.bytes()).all(|bytes| bytes.is_multiple_of(16));
    (target.arch.has_wgmma() && multiplied && sized && lies && !fit.epilogue.iter().any(places)).then_some(fit)
}

impl RoutedKernel {
    /// That of a group, if it is a routed matmul that this kernel takes.
    pub fn of(group: &Draft, target: &CudaTarget) -> Option<RoutedKernel> {
        let fit = fit(group, target)?;
        RoutedKernel::new(sides::lower(group, fit), target)
    }

    fn new(lowered: LoweredMatmul, target: &CudaTarget) -> Option<RoutedKernel> {
        let routing = Routing::new(&lowered.launch.shape, &lowered.launch.args[TABLE], ROWS);
        Some(RoutedKernel { matmul: HopperKernel::routed(lowered, routing.usual_row_tiles(), target)?, routing })
    }

    /// All ways to cut it, fastest first if every expert had as many rows.
    pub fn cuts(&self, target: &CudaTarget) -> Vec<HopperTile> {
        self.matmul.tiles(target, f64::INFINITY)
    }

    /// The same, cut in another way.
    pub fn with_tile(self, tile: HopperTile) -> RoutedKernel {
        RoutedKernel { matmul: self.matmul.with_tile(tile), ..self }
    }

    fn product(&self) -> &Matmul<Body> {
        &self.matmul.matmul
    }

    fn launch(&self) -> &MatmulLaunch {
        &self.matmul.launch
    }

    /// What is compiled and launched.
    pub fn kernel(&self, target: &CudaTarget) -> Kernel {
        let text = self.routing.constants() + &self.matmul.text_of_routed(&KERNEL);
        let launch = Launch::of_grids(self.product().arguments(self.launch()), self.grids(target));
        let variant = format!("{}, {} experts", self.matmul.describe(), self.routing.experts);
        let lookup = self.routing.lookup(&self.launch().args);
        let tiling = Tiling { walked: Some(self.most_tiles()), ..self.matmul.tiling("matmul_routed") };
        let launch = launch.with_lookups(vec![lookup]).with_variant(variant, String::new()).with_tiling(tiling);
        Kernel::new(Source::Cuda(CudaSource::new("routed", text)), launch)
    }

    fn grids(&self, target: &CudaTarget) -> Grids {
        Grids {
            list: vec![self.routing.grid(&self.launch().args, target), self.tiles(target)],
            workspace: self.routing.workspace(),
            persistent: self.matmul.meeting_memory(),
            checks_indices: true,
        }
    }

    /// Tiles, at most: how many there are depends on the indices.
    fn most_tiles(&self) -> usize {
        self.routing.row_tiles() * self.launch().shape.n.div_ceil(self.matmul.tile.columns)
    }

    fn tiles(&self, target: &CudaTarget) -> Grid {
        let shape = &self.launch().shape;
        let column_tiles = shape.n.div_ceil(self.matmul.tile.columns);
        let mut words = vec![Word::Map(self.table_map()), Word::Map(self.table_map())];
        words.extend(self.matmul.epilogue().iter().flat_map(|epilogue| epilogue.words(shape.m)));
        let steps = hopper::steps(shape, self.product().left);
        let numbers = [shape.m, steps, 0, column_tiles, 0, 0, 0, 0];
        words.extend(numbers.map(|number| Word::Number(number as u64)));
        words.extend(self.matmul.meeting_words().into_iter().flatten());
        hopper::pad_to_maps(&mut words);
        let LeftRows { choices, stride, own } = LeftRows::of(&self.launch().args[LEFT]);
        let bytes = self.product().left.bytes();
        let numbers = [stride * bytes, own * bytes, choices, shape.k * bytes].map(|number| Word::Number(number as u64));
        words.push(Word::Argument { position: LEFT, offset: self.launch().args[LEFT].start() });
        words.extend(numbers);
        words.extend(self.routing.lists());
        hopper::pad_to_maps(&mut words);
        Grid {
            entry: "matmul_routed",
            blocks: [self.most_tiles().min(target.processors) as u32, 1, 1],
            threads: THREADS,
            cluster: 1,
            shared: self.matmul.shared() as u32,
            waits: target.arch.has_dependent_grids(),
            walks: false,
            words,
        }
    }

    /// All matrices, by pairs of bytes.
    fn table_map(&self) -> TensorMap {
        let (shape, table) = (&self.launch().shape, &self.launch().args[TABLE]);
        let bytes = table.dtype.bytes();
        // The stride of a single matrix means nothing, but has to be one that a map takes.
        let stride = table.leading.first().filter(|axis| axis.0 > 1).map_or(16, |&(_, stride)| stride * bytes);
        TensorMap {
            of: Mapped::Argument(TABLE),
            offset: table.start(),
            rank: 3,
            sizes: [(shape.k * bytes / 2) as u64, shape.n as u64, self.routing.experts as u64, 1, 1],
            strides: [(shape.b.1 * bytes) as u64, stride as u64, 16, 16],
            tile: [64, self.matmul.tile.columns as u32, 1, 1, 1],
        }
    }
}

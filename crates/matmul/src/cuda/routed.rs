//! Rows of bytes that are routed to experts, on Hopper: each row times the matrix that an index picks for it, with any elementwise epilogue.
//!
//! | grid            | blocks             | does                                                                          |
//! |-----------------|--------------------|-------------------------------------------------------------------------------|
//! | `route`         | one                | sorts rows by expert, in their order, and cuts each expert's rows into tiles  |
//! | `matmul_routed` | one each processor | walks over tiles of one expert each; rows are gathered, results scattered     |
//!
//! - Traffic: the rows of A once for each column of tiles, mostly from the L2; of an expert's matrix each column once for 128 of its rows.
//!   Nothing is copied: the workspace has one number for each row and four for each tile.
//! - An index that picks no expert is a fault. Work that needs whole rows after it, as quantising them again does, is another kernel.
//! - Limits: inner sizes and strides of whole 16 bytes.

use deuteron_codegen::argument::Lookup;
use deuteron_codegen::body::Body;
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Tiling, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_codegen::tile::tensor_map::{Mapped, TensorMap};
use deuteron_graph::Dtype;
use deuteron_plan::{Draft, Work};

use super::hopper::{self, HopperKernel, HopperTile, ROWS, THREADS};
use super::sides;
use crate::fit::{self, MatmulFit};
use crate::kernel::{LoweredMatmul, MAX_BYTES, Matmul, MatmulLaunch};

/// What stands after the parts that all matmuls of bytes share.
const KERNEL: [&str; 2] = [include_str!("hopper/route.cu"), include_str!("hopper/routed.cu")];
/// Threads and warps of the block that sorts, as in `route.cu`.
const ROUTE_THREADS: u32 = 1024;
const ROUTE_WARPS: usize = 32;
/// Experts, at most: a thread has the rows of one.
const MAX_EXPERTS: usize = 1024;
/// Rows, columns and tiles, at most: they are counted by 32 bits.
const MAX_SIZE: usize = 1 << 24;
const MAX_TILES: usize = 1 << 30;
/// Positions among the arguments of a routed matmul.
const LEFT: usize = 0;
const TABLE: usize = 1;
const INDICES: usize = 2;

/// Rows routed to experts on the matrix units of Hopper.
pub struct RoutedFamily;

impl Family<CudaTarget> for RoutedFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let fit = fit(&group, target)?;
        let shape = fit.shape.clone();
        offered(move || work(&shape), move || RoutedKernel::new(sides::lower(&group, fit), target).kernel(target))
    }
}

/// A routed matmul, compiled for its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutedKernel {
    /// the matmul of all rows, and how it is cut
    matmul: HopperKernel,
    /// matrices of the table
    experts: usize,
}

/// The routed matmul of a draft, if this kernel takes it.
fn fit<'a>(draft: &Draft<'a>, target: &CudaTarget) -> Option<MatmulFit<'a>> {
    let fit = fit::fit(draft).filter(|fit| fit.gather.is_some())?;
    let (shape, [a, table]) = (&fit.shape, &fit.operands);
    let of_bytes = a.dtype == Dtype::I8 && table.dtype == Dtype::I8 && shape.k < MAX_BYTES;
    let &[(experts, stride), ..] = table.leading.as_slice() else { return None };
    let sized = [shape.m, shape.n, shape.k, experts].iter().all(|size| (1..MAX_SIZE).contains(size))
        && experts <= MAX_EXPERTS
        && shape.n >= 16
        && row_tiles(shape.m, experts) * shape.n.div_ceil(64) < MAX_TILES;
    let places = [shape.k, shape.a.0, a.offset, stride, table.offset];
    let lies = places.iter().all(|place| place.is_multiple_of(16));
    (target.arch.has_wgmma() && of_bytes && sized && lies).then_some(fit)
}

/// One matmul of all rows.
fn work(shape: &MatmulShape) -> Work {
    Work {
        matrix_flops: 2.0 * (shape.m * shape.n) as f64 * shape.k as f64,
        matrix_bits: 8,
        matrix_rows: shape.m,
        products: 1.0,
        ..Work::default()
    }
}

/// Tiles along the rows, at most: each expert may have one that is not full.
fn row_tiles(rows: usize, experts: usize) -> usize {
    rows / ROWS + rows.min(experts)
}

impl RoutedKernel {
    /// That of a group, if it is a routed matmul that this kernel takes.
    pub fn of(group: &Draft, target: &CudaTarget) -> Option<RoutedKernel> {
        let fit = fit(group, target)?;
        Some(RoutedKernel::new(sides::lower(group, fit), target))
    }

    fn new(lowered: LoweredMatmul, target: &CudaTarget) -> RoutedKernel {
        let LoweredMatmul { product, launch } = lowered;
        let experts = launch.args[TABLE].leading.first().map_or(0, |&(experts, _)| experts);
        // As if every expert's last tile were half full, or each had one.
        let used = launch.shape.m.min(experts);
        let row_tiles = (launch.shape.m.div_ceil(ROWS) + used / 2).max(used);
        let tile = hopper::fastest_routed(row_tiles, &launch.shape, target.processors);
        RoutedKernel { matmul: HopperKernel { matmul: product, launch, tile }, experts }
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
        let bits = self.experts.next_power_of_two().ilog2();
        let constants = format!("constexpr int EXPERTS = {};\nconstexpr int BITS = {bits};\n", self.experts);
        let text = constants + &self.matmul.text_of_bytes(&KERNEL);
        let indices = &self.launch().args[INDICES];
        let lookup = Lookup {
            argument: TABLE,
            indices: INDICES,
            offset: indices.offset,
            axes: vec![(self.launch().shape.m, 1)],
            table_rows: self.experts,
        };
        let launch = Launch::of_grids(self.product().arguments(self.launch()), self.grids(target));
        let variant = format!("{}, {} experts", self.matmul.describe(), self.experts);
        let tiling = Tiling { walked: Some(self.most_tiles()), ..self.matmul.tiling("matmul_routed") };
        let launch = launch.with_lookups(vec![lookup]).with_variant(variant, String::new()).with_tiling(tiling);
        Kernel::new(Source::Cuda(CudaSource::new("routed", text)), launch)
    }

    /// Bytes of the workspace before the list of tiles: a number for each row.
    fn list_at(&self) -> usize {
        (4 * self.launch().shape.m).next_multiple_of(16)
    }

    fn grids(&self, target: &CudaTarget) -> Grids {
        let rows = self.launch().shape.m;
        let workspace = self.list_at() + 16 * (1 + row_tiles(rows, self.experts));
        Grids {
            list: vec![self.route(target), self.tiles(target)],
            workspace,
            checks_indices: true,
            ..Grids::default()
        }
    }

    fn argument(&self, position: usize) -> Word {
        Word::Argument { position, offset: self.launch().args[position].start() }
    }

    fn route(&self, target: &CudaTarget) -> Grid {
        let lists = [Word::Workspace(0), Word::Workspace(self.list_at()), Word::Fault];
        let numbers = [self.launch().shape.m, TABLE].map(|number| Word::Number(number as u64));
        Grid {
            entry: "route",
            blocks: [1; 3],
            threads: ROUTE_THREADS,
            cluster: 1,
            shared: (4 * ROUTE_WARPS * self.experts) as u32,
            waits: target.arch.has_dependent_grids(),
            words: [self.argument(INDICES)].into_iter().chain(lists).chain(numbers).collect(),
        }
    }

    /// Tiles, at most: how many there are depends on the indices.
    fn most_tiles(&self) -> usize {
        let shape = &self.launch().shape;
        row_tiles(shape.m, self.experts) * shape.n.div_ceil(self.matmul.tile.columns)
    }

    fn tiles(&self, target: &CudaTarget) -> Grid {
        let shape = &self.launch().shape;
        let column_tiles = shape.n.div_ceil(self.matmul.tile.columns);
        let mut words = vec![Word::Map(self.table_map()), Word::Map(self.table_map())];
        words.extend(self.matmul.epilogue().iter().flat_map(|epilogue| epilogue.words(shape.m)));
        let steps = hopper::steps(shape, self.product().left);
        let numbers = [shape.m, steps, 0, column_tiles, 0, 0, 0];
        words.extend(numbers.map(|number| Word::Number(number as u64)));
        hopper::pad_to_maps(&mut words);
        let numbers = [shape.a.0, shape.k].map(|number| Word::Number(number as u64));
        words.push(self.argument(LEFT));
        words.extend(numbers);
        words.extend([Word::Workspace(0), Word::Workspace(self.list_at())]);
        hopper::pad_to_maps(&mut words);
        Grid {
            entry: "matmul_routed",
            blocks: [self.most_tiles().min(target.processors) as u32, 1, 1],
            threads: THREADS,
            cluster: 1,
            shared: self.matmul.shared() as u32,
            waits: target.arch.has_dependent_grids(),
            words,
        }
    }

    /// All matrices, by pairs of bytes.
    fn table_map(&self) -> TensorMap {
        let (shape, table) = (&self.launch().shape, &self.launch().args[TABLE]);
        let stride = table.leading.first().map_or(16, |&(_, stride)| stride);
        TensorMap {
            of: Mapped::Argument(TABLE),
            offset: table.start(),
            rank: 3,
            sizes: [shape.k as u64 / 2, shape.n as u64, self.experts as u64, 1, 1],
            strides: [shape.b.1 as u64, stride as u64, 16, 16],
            tile: [64, self.matmul.tile.columns as u32, 1, 1, 1],
        }
    }
}

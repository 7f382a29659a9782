//! Matmuls of 16-bit operands on Hopper, with any elementwise epilogue: what `hopper/*.cu` take, how it is cut, and its launch.
//!
//! | tiles                        | a block                                   | K                                  |
//! |------------------------------|-------------------------------------------|------------------------------------|
//! | more than blocks run at once | walks over tiles, two warpgroups in turn  | one block                          |
//! | fewer                        | has one tile, which two warpgroups share  | shared by the blocks of a cluster  |
//!
//! - Operands come by tensor maps: their rows start at multiples of 16 bytes, and one axis is contiguous.
//! - Traffic: a tile reads its rows of A and its columns of B once, mostly from the L2; the epilogue reads and writes each element once.
//! - Sums are rounded to the storage type before the epilogue, as they would be if they were stored.

use std::fmt;

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::body::Body;
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Word};
use deuteron_codegen::cuda::row::sides::Side;
use deuteron_codegen::cuda::row::{PRELUDE, PRELUDE_PARTS, gcd};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::library::LibraryEpilogue;
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_codegen::tile::tensor_map::{Mapped, TensorMap};
use deuteron_codegen::tile::{self, Part};
use deuteron_graph::{Dtype, NodeId};
use deuteron_plan::{Draft, primitive_work};

use super::sides;
use crate::fit::{self, MatmulFit};
use crate::kernel::{LoweredMatmul, Matmul, MatmulLaunch};
use crate::library;

/// Sums that begin with zeros.
pub(super) const ZEROS: &str = include_str!("hopper/zeros.cu");

/// The kernel: what comes from memory, what is multiplied, what sums begin with and what follows them (`around`), and their order.
pub(super) fn text(around: &[&str], tile: &HopperTile) -> String {
    let walk = if tile.turns { include_str!("hopper/turns.cu") } else { include_str!("hopper/one_tile.cu") };
    let before = [include_str!("hopper/operands.cu"), include_str!("hopper/sums.cu")];
    [&before[..], around, &[walk, include_str!("hopper/kernel.cu")]].concat().concat()
}
/// Rows of a tile, as in `operands.cu`.
pub(super) const ROWS: usize = 128;
/// Elements of K in a stage, as in `operands.cu`.
const DEPTH: usize = 64;
/// Threads of a block, as in `operands.cu`.
const THREADS: u32 = 384;
/// Bytes of 64 rows or columns of a stage.
const HALF_BYTES: usize = 64 * DEPTH * 2;
/// Bytes of shared memory of a block, at most, as Hopper has them.
const SHARED: usize = 227 << 10;
/// Stages, at most: more do not help.
const STAGES: usize = 8;
/// Sizes, at most: they are counted by 32 bits.
pub(super) const MAX_SIZE: usize = 1 << 30;
/// A stride of a tensor map is below, in elements of two bytes.
const MAX_STRIDE: usize = 1 << 39;

/// Widths of a tile that there are instructions for in `tile/wgmma.cuh`.
pub const WIDTHS: [usize; 8] = [64, 96, 128, 144, 160, 192, 224, 256];

/// Matmuls on the matrix units of Hopper.
pub struct HopperFamily;

impl Family<CudaTarget> for HopperFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let fit = fit(&group, target)?;
        if widens(&group, fit.matmuls) {
            return None;
        }
        // What the library does too, it may do faster.
        let shape = &fit.shape;
        let ours = fastest(shape, target.processors).microseconds(shape, target.processors);
        let theirs = library::fit(&group).map(|library| library_microseconds(shape, library.epilogue));
        if theirs.is_some_and(|theirs| theirs < ours) {
            return None;
        }
        offered(
            move || primitive_work(&group),
            move || HopperKernel::new(sides::lower(&group, fit), target).kernel(target),
        )
    }
}

/// A matmul for Hopper, compiled for its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct HopperKernel {
    /// the matmul; it always has an epilogue
    pub matmul: Matmul<Body>,
    /// sizes and arguments
    pub launch: MatmulLaunch,
    /// how it is cut
    pub tile: HopperTile,
}

/// How a matmul for Hopper is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HopperTile {
    /// columns of a tile, one of [`WIDTHS`]
    pub columns: usize,
    /// whether warpgroups have whole tiles, in turn, and blocks walk over tiles
    pub turns: bool,
    /// blocks of a cluster that share K; 1 where warpgroups take turns
    pub split: usize,
}

impl HopperTile {
    /// Whether the sums of a warpgroup fit its registers, and those of a cluster its shared memory.
    fn is_possible(&self) -> bool {
        let &HopperTile { columns, turns, split } = self;
        let share = columns / split;
        let wide = if turns { columns <= 192 && split == 1 } else { true };
        wide && columns.is_multiple_of(split) && (split == 1 || share.is_multiple_of(8))
    }
}

impl fmt::Display for HopperTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HopperTile { columns, turns, split } = self;
        write!(f, "tiles of {ROWS} x {columns}, ")?;
        match (turns, split) {
            (true, _) => f.write_str("two warpgroups in turn"),
            (false, 1) => f.write_str("one per block"),
            (false, split) => write!(f, "one per block, K over {split} blocks of a cluster"),
        }
    }
}

/// Whether a matrix with these strides has a tensor map.
pub(super) fn is_fit_for_map((row, column): (usize, usize), arg: &ArgBinding, batch: Option<usize>) -> bool {
    let stride = |stride: usize| stride.is_multiple_of(8) && (1..MAX_STRIDE).contains(&stride);
    let contiguous = (column == 1 && stride(row)) || (row == 1 && stride(column));
    contiguous && arg.offset.is_multiple_of(8) && batch.is_none_or(|batch| batch == 0 || stride(batch))
}

/// Whether a value that another kernel reads is stored wider than the matmul would be: work that ends inside of a call, in f32, costs more
/// bytes than it saves.
fn widens(draft: &Draft, matmuls: &[NodeId]) -> bool {
    let bytes = |id: NodeId| draft.graph.node(id).dtype.bytes();
    let inner = |id: &&NodeId| draft.graph.outputs().iter().all(|output| output.node != **id);
    draft.outputs.iter().filter(inner).any(|&id| matmuls.iter().any(|&matmul| bytes(id) > bytes(matmul)))
}

/// The matmul of a draft, if this kernel takes it.
fn fit<'a>(draft: &Draft<'a>, target: &CudaTarget) -> Option<MatmulFit<'a>> {
    let fit = fit::fit(draft)?;
    let &[matmul] = fit.matmuls else { return None };
    let (shape, [a, b]) = (&fit.shape, &fit.operands);
    let dtype = draft.graph.node(matmul).dtype;
    let narrow = matches!(dtype, Dtype::F16 | Dtype::Bf16) && a.dtype == dtype && b.dtype == dtype;
    let plain = fit.gather.is_none() && fit.prologue.is_empty();
    let sized = [shape.m, shape.n, shape.k, shape.batches()].iter().all(|size| (1..MAX_SIZE).contains(size))
        && shape.m * shape.batches() < MAX_SIZE
        && shape.n >= 16;
    let batch = |operand: usize| shape.batch.first().map(|axis| axis[operand]);
    let mapped = shape.batch.len() <= 1 && is_fit_for_map(shape.a, a, batch(1)) && is_fit_for_map(shape.b, b, batch(2));
    (target.arch.has_wgmma() && narrow && plain && sized && mapped).then_some(fit)
}

impl HopperKernel {
    /// That of a group, if it is a matmul that this kernel takes.
    pub fn of(group: &Draft, target: &CudaTarget) -> Option<HopperKernel> {
        let fit = fit(group, target)?;
        Some(HopperKernel::new(sides::lower(group, fit), target))
    }

    fn new(lowered: LoweredMatmul, target: &CudaTarget) -> HopperKernel {
        let LoweredMatmul { product: matmul, launch } = lowered;
        let tile = fastest(&launch.shape, target.processors);
        HopperKernel { matmul, launch, tile }
    }

    /// All ways to cut it that are predicted to take at most so many times the time of the fastest, that one first.
    pub fn tiles(&self, target: &CudaTarget, times: f64) -> Vec<HopperTile> {
        let time = |tile: &HopperTile| tile.microseconds(&self.launch.shape, target.processors);
        let mut tiles: Vec<HopperTile> = tiles(&self.launch.shape).collect();
        tiles.sort_by(|a, b| time(a).total_cmp(&time(b)));
        let most = tiles.first().map_or(0.0, |best| times * time(best));
        tiles.retain(|tile| time(tile) <= most);
        tiles
    }

    /// The same, cut in another way.
    pub fn with_tile(self, tile: HopperTile) -> HopperKernel {
        HopperKernel { tile, ..self }
    }

    /// What is compiled and launched.
    pub fn kernel(&self, target: &CudaTarget) -> Kernel {
        let own = [Part::NamedBarrier, Part::Tma, Part::Registers, Part::Wgmma, Part::Matrix];
        let own = tile::text_beside(&own, &PRELUDE_PARTS);
        let epilogue = self.epilogue().map_or(String::new(), |epilogue| epilogue.epilogue());
        let around = [ZEROS, include_str!("hopper/elementwise.cu")];
        let kernel = text(&around, &self.tile) + include_str!("hopper/entry.cu");
        let text = [&self.constants(), PRELUDE.as_str(), &own, &epilogue, &kernel].join("\n");
        let launch = Launch::of_grids(self.matmul.arguments(&self.launch), self.grids(target));
        let launch = launch.with_variant(self.describe(), String::new());
        Kernel::new(Source::Cuda(CudaSource::new("matmul", text)), launch)
    }

    fn epilogue(&self) -> Option<Side<'_>> {
        let epilogue = sides::epilogue(&self.matmul, &self.launch, self.vector())?;
        Some(Side { rounded: Some(self.matmul.result), ..epilogue })
    }

    /// Columns that the epilogue takes at once.
    fn vector(&self) -> usize {
        gcd(self.launch.shape.n, 8)
    }

    fn has_columns_of_a(&self) -> bool {
        self.launch.shape.a.1 != 1
    }

    fn has_rows_of_b(&self) -> bool {
        self.launch.shape.b.1 == 1
    }

    fn stage_bytes(&self) -> usize {
        let columns = self.tile.columns;
        let b = if self.has_rows_of_b() { columns.div_ceil(64) * HALF_BYTES } else { columns * DEPTH * 2 };
        (2 * HALF_BYTES + b).next_multiple_of(1024)
    }

    fn staged_bytes(&self) -> usize {
        if self.tile.split == 1 { 2 * self.tile.columns.div_ceil(64) * 8192 } else { 0 }
    }

    /// As many as there is room for.
    fn stages(&self) -> usize {
        let room = SHARED - 1024 - self.staged_bytes();
        (room / (self.stage_bytes() + 16)).min(STAGES)
    }

    fn shared(&self) -> usize {
        self.stages() * (self.stage_bytes() + 16) + self.staged_bytes() + 1024
    }

    pub(super) fn describe(&self) -> String {
        format!("{}, {} stages", self.tile, self.stages())
    }

    /// What stands before the text of the kernel.
    pub(super) fn constants(&self) -> String {
        let HopperTile { columns, turns, split } = self.tile;
        let vector = self.vector();
        let kind = if self.matmul.left == Dtype::F16 { 1 } else { 2 };
        format!(
            "// matmul: {}\n#define WAITS\nconstexpr int V = {vector};\nconstexpr int N = {};\nconstexpr int KIND = {kind};\n\
             constexpr int COLUMNS = {columns};\nconstexpr int STAGES = {};\nconstexpr bool TURNS = {turns};\nconstexpr int SPLIT = {split};\n\
             constexpr bool A_COLUMNS = {};\nconstexpr bool B_ROWS = {};\n",
            self.describe(),
            self.launch.shape.n,
            self.stages(),
            self.has_columns_of_a(),
            self.has_rows_of_b(),
        )
    }

    fn grids(&self, target: &CudaTarget) -> Grids {
        let shape = &self.launch.shape;
        let epilogue = self.epilogue();
        let tail = epilogue.iter().flat_map(|epilogue| epilogue.words(shape.m * shape.batches()));
        let grid = self.grid("matmul_hopper", [self.map_of_a(), self.map_of_b()], tail, target);
        Grids { list: vec![grid], ..Grids::default() }
    }

    /// A grid of it over operands with these maps; `tail` is what stands in the parameter for what follows.
    pub(super) fn grid(
        &self,
        entry: &'static str,
        maps: [TensorMap; 2],
        tail: impl IntoIterator<Item = Word>,
        target: &CudaTarget,
    ) -> Grid {
        let shape = &self.launch.shape;
        let (row_tiles, column_tiles) = (shape.m.div_ceil(ROWS), shape.n.div_ceil(self.tile.columns));
        let tiles = row_tiles * column_tiles * shape.batches();
        let blocks = if self.tile.turns { tiles.min(target.processors) } else { tiles * self.tile.split };
        let mut words: Vec<Word> = maps.map(Word::Map).into_iter().chain(tail).collect();
        let numbers =
            [shape.m, shape.k.div_ceil(DEPTH), row_tiles, column_tiles, tiles, self.has_batch(1), self.has_batch(2)];
        words.extend(numbers.map(|number| Word::Number(number as u64)));
        // A multiple of a map's alignment.
        let count: usize = words.iter().map(Word::count).sum();
        words.extend((count..count.next_multiple_of(16)).map(|_| Word::Number(0)));
        Grid {
            entry,
            blocks: [blocks as u32, 1, 1],
            threads: THREADS,
            cluster: self.tile.split as u32,
            shared: self.shared() as u32,
            waits: target.arch.has_dependent_grids(),
            words,
        }
    }

    /// 1 where an operand has a matrix for each of the batch.
    fn has_batch(&self, operand: usize) -> usize {
        self.launch.shape.batch.first().map_or(0, |axis| usize::from(axis[operand] != 0))
    }

    fn map_of_a(&self) -> TensorMap {
        let shape = &self.launch.shape;
        match self.has_columns_of_a() {
            true => self.map(0, 1, [shape.m, shape.k], shape.a.1, 64),
            false => self.map(0, 1, [shape.k, shape.m], shape.a.0, ROWS),
        }
    }

    fn map_of_b(&self) -> TensorMap {
        let shape = &self.launch.shape;
        match self.has_rows_of_b() {
            true => self.map(1, 2, [shape.n, shape.k], shape.b.0, 64),
            false => self.map(1, 2, [shape.k, shape.n], shape.b.1, self.tile.columns),
        }
    }

    /// Of an argument, innermost axis first; `operand` is its place in the batch's strides, `lines` those of a tile.
    fn map(
        &self,
        position: usize,
        operand: usize,
        [inner, outer]: [usize; 2],
        stride: usize,
        lines: usize,
    ) -> TensorMap {
        let (count, step) = match self.launch.shape.batch.first() {
            Some(axis) if axis[operand] != 0 => (axis[0], axis[operand]),
            Some(_) | None => (1, 8),
        };
        TensorMap {
            of: Mapped::Argument(position),
            offset: self.launch.args[position].start(),
            rank: 3,
            sizes: [inner as u64, outer as u64, count as u64, 1, 1],
            strides: [2 * stride as u64, 2 * step as u64, 16, 16],
            tile: [64, lines as u32, 1, 1, 1],
        }
    }
}

/// All ways to cut a matmul.
fn tiles(shape: &MatmulShape) -> impl Iterator<Item = HopperTile> {
    let steps = shape.k.div_ceil(DEPTH);
    let all = WIDTHS.into_iter().flat_map(|columns| {
        let tile = |turns, split| HopperTile { columns, turns, split };
        [tile(true, 1), tile(false, 1), tile(false, 2), tile(false, 4), tile(false, 8)]
    });
    all.filter(move |tile| tile.is_possible() && tile.split <= steps)
}

/// The widest of those whose blocks walk over tiles that are predicted to be done within 5 % of the first: they read less shared memory
/// per product. At 32768 x 50257 x 768 those of 192 columns take 3.5 ms and those of 160 3.9 ms, on an H200.
pub(super) fn fastest_walk(shape: &MatmulShape, processors: usize) -> HopperTile {
    let time = |tile: &HopperTile| tile.microseconds(shape, processors);
    let walks = || tiles(shape).filter(|tile| tile.turns);
    let first = walks().map(|tile| time(&tile)).fold(f64::INFINITY, f64::min);
    let widest = walks().filter(|tile| time(tile) <= 1.05 * first).max_by_key(|tile| tile.columns);
    widest.unwrap_or(HopperTile { columns: 128, turns: true, split: 1 })
}

/// The one that is predicted to be done first.
fn fastest(shape: &MatmulShape, processors: usize) -> HopperTile {
    let time = |tile: &HopperTile| tile.microseconds(shape, processors);
    let best = tiles(shape).min_by(|a, b| time(a).total_cmp(&time(b)));
    best.unwrap_or(HopperTile { columns: 128, turns: true, split: 1 })
}

/// Time of the vendor's library, roughly: what it takes at any size, and its rate in TFLOP/s. Fitted by hand on an H200, to 1024 to 32768
/// rows of GPT-2's matmuls; `h200-matmul.csv` has those of 8192 rows.
/// GELU costs it more than us, a residual less.
fn library_microseconds(shape: &MatmulShape, epilogue: LibraryEpilogue) -> f64 {
    let flops = 2.0 * (shape.m * shape.n * shape.batches()) as f64 * shape.k as f64;
    let rate = if shape.k < 2048 { 600.0 } else { 660.0 };
    let residual = if epilogue.has_residual() { 1.5 } else { 0.0 };
    2.0 - residual + flops / (rate * 1e6)
}

impl HopperTile {
    /// Time of a launch, roughly, fitted as that of the library is.
    pub fn microseconds(&self, shape: &MatmulShape, processors: usize) -> f64 {
        let &HopperTile { columns, turns, split } = self;
        let tiles = shape.m.div_ceil(ROWS) * shape.n.div_ceil(columns) * shape.batches();
        let steps = shape.k.div_ceil(DEPTH).div_ceil(split) as f64;
        // A stage takes as long as its multiplications, or as it takes to come: 79 KB per microsecond and multiprocessor.
        let products = columns as f64 * 0.003;
        let loads = ((ROWS + columns) * DEPTH * 2) as f64 / 79e3;
        let waves = (tiles * split).div_ceil(processors) as f64;
        let finish = columns as f64 * if turns { 0.006 } else { 0.004 } / split as f64;
        let exchange = if split == 1 { 0.0 } else { 2.0 };
        let (start, stages) = (2.2, steps * products.max(loads));
        match turns {
            true => start + waves * stages + finish,
            false => start + waves * (stages + finish + exchange) + (waves - 1.0) * 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(m: usize, k: usize, n: usize) -> MatmulShape {
        MatmulShape { m, n, k, batch: Vec::new(), a: (k, 1), b: (n, 1), c: (n, 1) }
    }

    #[test]
    fn many_tiles_are_walked_over_and_few_are_not() {
        let many = fastest(&shape(8192, 768, 3072), 132);
        assert_eq!(many, HopperTile { columns: 192, turns: true, split: 1 });
        // One tile for each of 128 blocks.
        let few = fastest(&shape(1024, 768, 3072), 132);
        assert_eq!((few.columns, few.split), (192, 1));
        // K is shared where there are fewer tiles than multiprocessors.
        assert!(fastest(&shape(64, 8192, 256), 132).split > 1);
    }

    #[test]
    fn the_library_keeps_what_it_does_faster() {
        let ours_with = |m, k, n, epilogue| {
            let shape = shape(m, k, n);
            fastest(&shape, 132).microseconds(&shape, 132) < library_microseconds(&shape, epilogue)
        };
        let ours = |m, k, n| ours_with(m, k, n, LibraryEpilogue::None);
        assert!(!ours_with(8192, 768, 768, LibraryEpilogue::BiasResidual));
        assert!(ours(8192, 768, 2304) && ours(8192, 768, 768) && ours(32768, 3072, 768) && ours(8192, 768, 50304));
        assert!(!ours(1024, 768, 768) && !ours(2048, 3072, 768) && !ours(768, 8192, 2304) && !ours(9, 768, 768));
    }

    #[test]
    fn every_cut_has_room_in_shared_memory() {
        let shape = shape(300, 1024, 200);
        for tile in tiles(&shape) {
            for b in [(200, 1), (1, 1024)] {
                let launch = MatmulLaunch {
                    args: Vec::new(),
                    shape: MatmulShape { b, ..shape.clone() },
                    prologue_axes: Vec::new(),
                    axes: Vec::new(),
                };
                let matmul = Matmul {
                    left: Dtype::Bf16,
                    right: Dtype::Bf16,
                    result: Dtype::Bf16,
                    rights: 1,
                    routed: false,
                    prologue: None,
                    epilogue: None,
                };
                let kernel = HopperKernel { matmul, launch, tile };
                assert!(kernel.shared() <= SHARED && kernel.stages() >= 3, "{tile}: {} stages", kernel.stages());
            }
        }
    }

    #[test]
    fn maps_need_starts_and_strides_of_16_bytes() {
        let graph: deuteron_graph::Graph = "x = input bf16[1] ; out x".parse().unwrap();
        let arg = |offset| ArgBinding::whole(&graph, graph.inputs()[0], offset, false);
        assert!(is_fit_for_map((768, 1), &arg(0), None) && is_fit_for_map((1, 768), &arg(8), Some(0)));
        assert!(!is_fit_for_map((50257, 1), &arg(0), None));
        assert!(!is_fit_for_map((768, 1), &arg(3), None));
        assert!(!is_fit_for_map((768, 1), &arg(0), Some(100)));
        assert!(!is_fit_for_map((768, 2), &arg(0), None));
    }
}

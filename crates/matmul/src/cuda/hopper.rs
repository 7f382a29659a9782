//! Matmuls of 16-bit operands, of bytes and of f32 on Hopper, with row work on the sums: what `hopper/*.cu` take, how it is cut, and its launch.
//!
//! | tiles                        | a block                                   | K                                  |
//! |------------------------------|-------------------------------------------|------------------------------------|
//! | more than blocks run at once | walks over tiles, two warpgroups in turn  | one block                          |
//! | fewer                        | has one tile, which two warpgroups share  | shared by the blocks of a cluster  |
//! | of bytes and of f32          | persistent: tiles alternate or are shared | one block                          |
//!
//! - Operands come by tensor maps: their rows start at multiples of 16 bytes, and one axis is contiguous. Those of f32 may have any layout: a grid before
//!   splits them into numbers of TF32 (`tf32.rs`).
//! - Traffic: a tile reads its rows of A and its columns of B once, mostly from the L2; the epilogue reads and writes each element once.
//! - Sums are rounded to the storage type before the epilogue, as they would be if they were stored; those of bytes are exact. Where the
//!   matmul is of f32, they are sums of f32: the matrix units, which round towards zero, add no more than a stage.
//! - What needs whole rows works on sums in registers; a cluster of blocks has a row together. Blocks of a matmul of bytes meet in memory, so that
//!   a row may have more columns than a cluster.
//! - Sums over rows are stored by each warp, and added up in one order by a second grid.
//! - Row work may make the left operand: warps beside those that multiply do it, and store rows in the workspace.
//! - Both operands of bytes have rows along K: there are no instructions for others.

mod ending;
mod made;
mod maps;
#[cfg(test)]
mod tests;
mod tf32;
mod tile;
mod time;

pub(super) use self::maps::{is_fit_for_map, pad_to_maps};
pub use self::tile::{HopperTile, Sharing, WIDTHS};
pub(super) use self::tile::{Types, fastest_walk, walk_us};
pub(crate) use self::time::library_in_plan_us;

use std::fmt::Write as _;

use deuteron_codegen::body::{Body, Expr};
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Tiling, Word};
use deuteron_codegen::cuda::row::sides::Side;
use deuteron_codegen::cuda::row::{PRELUDE, PRELUDE_PARTS, gcd};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::library::LibraryEpilogue;
use deuteron_codegen::matmul_shape::{MatmulShape, lower_matmul_shape};
use deuteron_codegen::rows::{ArgUpdate, in_place};
use deuteron_codegen::tile::tensor_map::{Mapped, TensorMap};
use deuteron_codegen::tile::{Part, text_beside};
use deuteron_graph::{Dtype, NodeId, Op, ReduceOp};
use deuteron_plan::{Draft, Work, primitive_work};

use self::ending::{CLUSTER, MappedRows, PAIR, column_sums, draws, reduces, reductions, stores};
use self::made::{MadeRows, first_rows};
use self::tf32::Split;
use self::tile::{TURNS, tiles};
use self::time::{FETCHED, Following, GATHERED, made_beside, made_us, rows_us, tf32_us, tile_us, warps_us};
use super::{mma, sides};
use crate::fit::{self, MatmulFit};
use crate::kernel::{LoweredMatmul, MAX_BYTES, Matmul, MatmulLaunch, PROLOGUE_ROWS};
use crate::library;

/// What follows sums that each warp finishes alone; numbers of rows, and blocks that tell each other of them in memory.
const WARPS: &str = include_str!("hopper/warps.cu");
const NUMBERS: &str = include_str!("hopper/numbers.cu");
const MEETING: &str = include_str!("hopper/meeting.cu");

/// Sums that begin with zeros.
pub(super) const ZEROS: &str = include_str!("hopper/zeros.cu");

/// The kernel: what comes from memory, what is multiplied, what sums begin with and what follows them (`around`), and their order, in blocks
/// that walk over tiles or have one each.
pub(super) fn text(around: &[&str], walks: bool) -> String {
    let walk = if walks { include_str!("hopper/walk.cu") } else { include_str!("hopper/one_tile.cu") };
    let before = [include_str!("hopper/operands.cu"), include_str!("hopper/sums.cu")];
    [&before[..], around, &[walk, include_str!("hopper/kernel.cu")]].concat().join("\n")
}

/// Rows of a tile of bytes, and of most others.
pub(super) const ROWS: usize = 128;
/// Elements of two bytes of K in a stage, as in `operands.cu`.
const DEPTH: usize = 64;
/// Threads of a block, as in `operands.cu`.
pub(super) const THREADS: u32 = 384;
/// Bytes of 64 rows or columns of a stage.
const HALF_BYTES: usize = 64 * DEPTH * 2;
/// Bytes of shared memory of a block, at most, as Hopper has them.
const SHARED: usize = 227 << 10;
/// Bytes of the L2 cache, as an H200 has them.
const L2_BYTES: usize = 50 << 20;
/// Rows of tiles that are neighbours, at least, as in `made.rs`.
const BAND: usize = 8;
/// Stages, at most: more do not help.
const STAGES: usize = 8;
/// Bytes of four barriers, of the places that operands of an epilogue in registers have where warpgroups take turns.
const HELD_BARRIERS: usize = 32;
/// Bytes of shared memory that sums pass through where each warp finishes its own, as in `warps.cu`.
const SUMS_BYTES: usize = 8 * (16 * 64 * 4 + 128);
/// Bytes of counts of launches and of warps, as in `meeting.cu`, and what blocks that meet in memory may take of it.
const COUNTS_BYTES: usize = 128;
const MEETING_MEMORY: usize = 48 << 20;
/// Registers of a thread that fetches and of one that multiplies. A block begins with 168 for each of its three warpgroups, and has no more.
const REGISTERS: [usize; 2] = [24, 240];
/// The same where rows of the left operand are made beside the thread that fetches.
const MAKING_REGISTERS: [usize; 2] = [56, 224];

/// Sizes, at most: they are counted by 32 bits.
pub(super) const MAX_SIZE: usize = 1 << 30;

/// Share of the time of a matmul and a norm apart that both in one launch take at most: predictions are not better than that.
const MARGIN: f64 = 0.95;

/// Matmuls on the matrix units of Hopper.
pub struct HopperFamily;

impl Family<CudaTarget> for HopperFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let fit = fit(&group, target)?;
        if widens(&group, fit.matmuls) {
            return None;
        }
        // What others do too, they may do faster.
        let others = others_us(&group, &fit, target);
        let kernel = HopperKernel::new(sides::lower(&group, fit), target)?;
        let ours = kernel.microseconds(target);
        if others < ours {
            return None;
        }
        let drawback = kernel.drawback(target);
        let updates = kernel.matmul.updates(&kernel.launch, request.in_place);
        let kernel = HopperKernel { updates, ..kernel };
        let microseconds = Some(ours);
        offered(move || Work { microseconds, drawback, ..primitive_work(&group) }, move || kernel.kernel(target))
    }
}

/// Time of a group by what comes behind this family: for 16-bit operands the library, for f32 the units of a warp too, for bytes nothing.
fn others_us(group: &Draft, fit: &MatmulFit, target: &CudaTarget) -> f64 {
    match fit.operands[0].dtype {
        Dtype::F32 => mma::offered_microseconds(group, fit, target),
        Dtype::I8 => f64::INFINITY,
        _ => library::fit(group).map_or(f64::INFINITY, |library| library_in_plan_us(&fit.shape, library.epilogue)),
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
    /// results in place of operands: a thread reads what it stores over before
    pub updates: Vec<ArgUpdate>,
}

/// Whether operands of these types, for a matmul of that one, are what the instructions take as they lie, or once they are split.
fn has_instructions([a, b]: [Dtype; 2], matmul: Dtype, shape: &MatmulShape) -> bool {
    match matmul {
        Dtype::F16 | Dtype::Bf16 => a == matmul && b == matmul,
        Dtype::F32 if a == Dtype::I8 => {
            // Maps are of pairs of bytes.
            let along_k = shape.a.1 == 1 && shape.b.0 == 1 && shape.k.is_multiple_of(2);
            b == a && along_k && shape.k < MAX_BYTES
        }
        Dtype::F32 if a == Dtype::F32 => b == a && tf32::can_split(shape),
        Dtype::F32 => a == b && matches!(a, Dtype::F16 | Dtype::Bf16),
        Dtype::I8 | Dtype::F8e4m3 | Dtype::I32 | Dtype::Bool => false,
    }
}

/// Whether a value that another kernel reads is stored wider than the matmul would be: work that ends inside of a call, in f32, costs more
/// bytes than it saves.
pub(super) fn widens(draft: &Draft, matmuls: &[NodeId]) -> bool {
    let bytes = |id: NodeId| draft.graph.node(id).dtype.bytes();
    // A sum over rows is small, whatever its type.
    let inner = |id: &&NodeId| {
        draft.graph.node(**id).op != Op::ColumnSum && draft.graph.outputs().iter().all(|output| output.node != **id)
    };
    draft.outputs.iter().filter(inner).any(|&id| matmuls.iter().any(|&matmul| bytes(id) > bytes(matmul)))
}

/// The matmul of a draft, if this kernel takes it.
fn fit<'a>(draft: &Draft<'a>, target: &CudaTarget) -> Option<MatmulFit<'a>> {
    let fit = fit::fit_with_rows(draft)?;
    let matmul = *fit.matmuls.first()?;
    let (shape, [a, b]) = (&fit.shape, &fit.operands);
    let dtype = draft.graph.node(matmul).dtype;
    let multiplied = has_instructions([a.dtype, b.dtype], dtype, shape);
    // Where in a row a number is, blocks do not tell each other.
    let places = |id: &NodeId| draft.graph.node(*id).op == Op::RowReduce(ReduceOp::ArgMax);
    let plain = fit.gather.is_none() && !fit.epilogue.iter().any(places);
    let made = !fit.prologue.is_empty();
    // Of few rows, every weight is read once by other kernels. Float sums are finished by warps, one matmul at a time.
    let float_sums = dtype == Dtype::F32;
    let alike = fit.matmuls.len() == 1 || (!float_sums && shape.m > PROLOGUE_ROWS);
    let alike = alike && (!made || !float_sums);
    let sized = [shape.m, shape.n, shape.k, shape.batches()].iter().all(|size| (1..MAX_SIZE).contains(size))
        && shape.m * shape.batches() < MAX_SIZE
        && (shape.n >= 16 || a.dtype == Dtype::F32);
    let batch = |operand: usize| shape.batch.first().map(|axis| axis[operand]);
    let rights = (1..fit.matmuls.len()).all(|right| is_right_fit_for_map(draft, &fit, right));
    let lie = (made || is_fit_for_map(shape.a, a, batch(1))) && is_fit_for_map(shape.b, b, batch(2)) && rights;
    let mapped = shape.batch.len() <= 1 && (lie || a.dtype == Dtype::F32);
    (target.arch.has_wgmma() && multiplied && plain && alike && sized && mapped).then_some(fit)
}

/// Whether a right operand after the first, which lies as the first does, has a tensor map.
fn is_right_fit_for_map(draft: &Draft, fit: &MatmulFit, right: usize) -> bool {
    let (shape, [_, b]) = lower_matmul_shape(draft.graph, draft.placement, fit.matmuls[right]);
    is_fit_for_map(shape.b, &b, shape.batch.first().map(|axis| axis[2]))
}

impl HopperKernel {
    /// That of a group, if it is a matmul that this kernel takes.
    pub fn of(group: &Draft, target: &CudaTarget) -> Option<HopperKernel> {
        let fit = fit(group, target)?;
        HopperKernel::new(sides::lower(group, fit), target)
    }

    /// The same of a matmul that was lowered, in the way that is predicted to be done first.
    pub(super) fn new(lowered: LoweredMatmul, target: &CudaTarget) -> Option<HopperKernel> {
        let LoweredMatmul { product: matmul, launch } = lowered;
        let mut kernel = HopperKernel { matmul, launch, tile: TURNS, updates: Vec::new() };
        kernel.tile = *kernel.tiles(target, 1.0).first()?;
        Some(kernel)
    }

    /// That of rows that are routed, of which there are usually so many tiles, cut as it is predicted to be done first; none if it cannot be cut.
    pub(super) fn routed(lowered: LoweredMatmul, row_tiles: usize, target: &CudaTarget) -> Option<HopperKernel> {
        let LoweredMatmul { product: matmul, launch } = lowered;
        let kernel = HopperKernel { matmul, launch, tile: TURNS, updates: Vec::new() };
        let us = |tile: &HopperTile| kernel.clone().with_tile(*tile).routed_us(row_tiles, target);
        let tile = kernel.possible(target).into_iter().min_by(|a, b| us(a).total_cmp(&us(b)))?;
        Some(kernel.with_tile(tile))
    }

    /// Time of a launch of so many tiles of routed rows, roughly. They are gathered more slowly than whole tiles are fetched.
    pub(super) fn routed_us(&self, row_tiles: usize, target: &CudaTarget) -> f64 {
        let shape = MatmulShape { m: row_tiles * ROWS, ..self.launch.shape.clone() };
        warps_us(&self.tile, &shape, self.types(), target.processors, GATHERED)
    }

    /// All ways to cut it that are predicted to take at most so many times the time of the fastest, that one first.
    pub fn tiles(&self, target: &CudaTarget, times: f64) -> Vec<HopperTile> {
        let time = |tile: &HopperTile| self.clone().with_tile(*tile).microseconds(target);
        let mut tiles = self.possible(target);
        tiles.sort_by(|a, b| time(a).total_cmp(&time(b)));
        let most = tiles.first().map_or(0.0, |best| times * time(best));
        tiles.retain(|tile| time(tile) <= most);
        tiles
    }

    /// All ways to cut it that there is room for.
    fn possible(&self, target: &CudaTarget) -> Vec<HopperTile> {
        let whole_rows = self.needs_whole_rows();
        let drawn = self.matmul.epilogue.as_ref().is_some_and(|epilogue| draws(&epilogue.body));
        let sums = self.column_sums() > 0;
        // By pairs of columns, rows of a left operand would be made slowly.
        let even = self.launch.shape.n.is_multiple_of(PAIR) && !drawn && self.matmul.prologue.is_none();
        let fits = |tile: &HopperTile| {
            let kernel = self.clone().with_tile(*tile);
            let by_rows = match (tile.by_rows, kernel.is_by_warps()) {
                (false, _) => true,
                (true, false) => even && kernel.has_places() && !kernel.mapped().put().is_empty(),
                (true, true) => {
                    // Words have a place for each row of one matrix.
                    let meets = self.launch.shape.batches() == 1
                        && kernel.parts() <= target.processors
                        && kernel.meeting_memory() <= MEETING_MEMORY;
                    // Floats of two rows of 128 that wait take all registers, unless they are narrow.
                    let waits = tile.sharing != Sharing::Turns || tile.columns <= 64 || kernel.rounds();
                    even && whole_rows && tile.sharers == 1 && meets && waits
                }
            };
            let reduced = !whole_rows || (tile.by_rows && kernel.cluster() <= CLUSTER);
            let summed = !sums || (!tile.by_rows && tile.split == 1 && self.can_sum_columns());
            let made = self.matmul.prologue.is_none()
                || (kernel.cluster() == 1 && tile.runs_at_once(kernel.tile_count(), target.processors));
            by_rows
                && reduced
                && summed
                && made
                && kernel.can_share()
                && kernel.has_all_rights()
                && kernel.stages() >= 3
        };
        let walked = |tile: &HopperTile| !self.matmul.routed || tile.can_be_routed();
        tiles(&self.launch.shape, self.types()).filter(walked).filter(fits).collect()
    }

    /// Time of a launch, roughly.
    pub fn microseconds(&self, target: &CudaTarget) -> f64 {
        let shape = &self.whole_shape();
        match self.is_by_warps() {
            true if self.matmul.left == Dtype::F32 => tf32_us(&self.tile, shape, target.processors),
            true => warps_us(&self.tile, shape, self.types(), target.processors, FETCHED),
            false => {
                let multiplied = self.multiplied_us(target);
                match self.matmul.prologue {
                    Some(_) => multiplied + made_us(shape, self.rows_made_first(0, target), target.processors),
                    None => multiplied,
                }
            }
        }
    }

    /// Time of a launch but for rows of its left operand, roughly.
    fn multiplied_us(&self, target: &CudaTarget) -> f64 {
        tile_us(&self.tile, &self.whole_shape(), self.following(), self.cluster(), target.processors)
    }

    /// Rows of the left operand that are made before anything is multiplied: all that are needed then, and those that are too many to be
    /// made beside the multiplications. Tiles begin at multiples of so many rows.
    fn rows_made_first(&self, needed: usize, target: &CudaTarget) -> usize {
        let shape = &self.launch.shape;
        let beside = made_beside(shape, self.multiplied_us(target), target.processors);
        needed.max(shape.m.saturating_sub(beside).next_multiple_of(self.tile.rows)).min(shape.m)
    }

    /// Why several kernels are to be preferred, if they are predicted to end earlier.
    fn drawback(&self, target: &CudaTarget) -> Option<&'static str> {
        let ours = self.microseconds(target);
        let (rights, shape) = (self.matmul.rights as f64, &self.launch.shape);
        if rights > 1.0 {
            // What works on several results reads all but one of them again.
            let results = self.matmul.epilogue.as_ref().map_or(0, |epilogue| stores(&epilogue.body)) as f64;
            let apart = rights * library_in_plan_us(shape, LibraryEpilogue::None)
                + (rights - results).max(0.0) * rows_us(shape);
            if apart < ours {
                return Some("the matmuls one after another end earlier");
            }
        }
        if self.matmul.prologue.is_some() {
            let apart = self.best_us(target, self.following()) + rows_us(&self.made_shape());
            return (MARGIN * apart < ours).then_some("the row work alone, before the matmul, ends earlier");
        }
        let apart = self.apart_us(target)?;
        (MARGIN * apart < ours).then_some("the norm alone, after the matmul, ends earlier")
    }

    /// Time of the matmul with what follows element by element, and of a row kernel after it; none where no whole rows are needed.
    fn apart_us(&self, target: &CudaTarget) -> Option<f64> {
        let following = self.following();
        let best = self.best_us(target, following.elementwise());
        following.whole_rows.then(|| best + rows_us(&self.launch.shape))
    }

    /// Time of the matmul alone with what follows, if each row is finished by one block.
    fn best_us(&self, target: &CudaTarget, following: Following) -> f64 {
        let (shape, types) = (&self.whole_shape(), self.types());
        let time = |tile: HopperTile| match self.is_by_warps() {
            true => warps_us(&tile, shape, types, target.processors, FETCHED),
            false => tile_us(&tile, shape, following, 1, target.processors),
        };
        let alone = |tile: &HopperTile| !self.is_by_warps() || !tile.by_rows;
        tiles(shape, types).filter(alone).map(time).fold(f64::INFINITY, f64::min)
    }

    /// The left operand as the result of a kernel, as far as time goes.
    fn made_shape(&self) -> MatmulShape {
        let shape = &self.launch.shape;
        MatmulShape { n: shape.k, ..shape.clone() }
    }

    /// The matmuls of all right operands as one, as far as time goes.
    fn whole_shape(&self) -> MatmulShape {
        let shape = &self.launch.shape;
        MatmulShape { n: shape.n * self.matmul.rights, ..shape.clone() }
    }

    /// Whether a tile has as many columns of each right operand, in pieces that come by tensor maps.
    fn has_all_rights(&self) -> bool {
        let HopperTile { columns, sharing, split, by_rows, .. } = self.tile;
        let piece = if self.has_rows_of_b() { 64 } else { 8 };
        let apart = sharing != Sharing::Columns && split == 1 && !by_rows;
        self.matmul.rights == 1 || (apart && columns.is_multiple_of(self.matmul.rights * piece))
    }

    /// Whether blocks have neighbours to share columns of B with, and shares that start where the swizzle does, if they do.
    fn can_share(&self) -> bool {
        let (sharers, columns) = (self.tile.sharers, self.result_columns());
        let shares = self.has_rows_of_b() || columns.is_multiple_of(8 * sharers);
        let plain = self.matmul.prologue.is_none() && !self.matmul.routed && self.column_sums() == 0;
        sharers == 1 || (plain && self.cluster() == 1 && shares && self.launch.shape.m > self.tile.rows)
    }

    /// Tiles along rows and along columns; where blocks share columns of B, there may be tiles without rows.
    fn tile_counts(&self) -> [usize; 2] {
        let shape = &self.launch.shape;
        let rows = shape.m.div_ceil(self.tile.rows).next_multiple_of(self.tile.sharers);
        [rows, self.column_tiles()]
    }

    fn tile_count(&self) -> usize {
        self.tile_counts().iter().product::<usize>() * self.launch.shape.batches()
    }

    /// Columns of the result that a tile has.
    fn result_columns(&self) -> usize {
        self.tile.columns / self.matmul.rights
    }

    fn following(&self) -> Following {
        let Some(epilogue) = &self.matmul.epilogue else { return Following::default() };
        Following::new(&epilogue.body, self.mapped().carried().len(), reduces(&epilogue.body))
    }

    /// The same, cut in another way.
    pub fn with_tile(self, tile: HopperTile) -> HopperKernel {
        HopperKernel { tile, ..self }
    }

    /// What is compiled and launched.
    pub fn kernel(&self, target: &CudaTarget) -> Kernel {
        let split = Split::new(self).map_or("", |_| tf32::SPLIT);
        let text = self.text_of(&[&text(&self.around(), self.is_persistent()), include_str!("hopper/entry.cu"), split]);
        let arguments = in_place(self.matmul.arguments(&self.launch), &self.updates);
        let launch = Launch::of_grids(arguments, self.grids(target));
        let launch = launch.with_variant(self.describe(), String::new()).with_tiling(self.tiling("matmul_hopper"));
        Kernel::new(Source::Cuda(CudaSource::new("matmul", text)), launch)
    }

    /// What stands around the multiplications: what sums begin with, what follows them, and what makes rows.
    fn around(&self) -> Vec<&'static str> {
        let ending: &[&str] = match (self.types().has_float_sums(), self.tile.by_rows) {
            (true, true) => &[NUMBERS, MEETING, include_str!("hopper/meeting_tile.cu")],
            (true, false) => &[WARPS, include_str!("hopper/float_tile.cu")],
            (false, true) => &[NUMBERS, include_str!("hopper/rows.cu")],
            (false, false) => &[include_str!("hopper/elementwise.cu")],
        };
        let made = self.matmul.prologue.as_ref().map(|_| include_str!("hopper/made.cu"));
        let again = Split::new(self).map(|_| tf32::AGAIN);
        [ZEROS].into_iter().chain(again).chain(ending.iter().copied()).chain(made).collect()
    }

    /// The text where warps finish the sums of rows that are routed, with `order` behind what follows them.
    pub(super) fn text_of_routed(&self, order: &[&str]) -> String {
        let before = [include_str!("hopper/operands.cu"), include_str!("hopper/sums.cu")];
        let ending: &[&str] = match self.meets() {
            true => &[NUMBERS, MEETING, include_str!("hopper/routed_meeting.cu")],
            false => &[WARPS, include_str!("hopper/routed_warps.cu")],
        };
        self.text_of(&[&before[..], ending, order].concat())
    }

    /// The text, with the kernel behind what it stands on.
    fn text_of(&self, kernel: &[&str]) -> String {
        let parts = [Part::NamedBarrier, Part::Tma, Part::Registers, Part::Wgmma, Part::Matrix, Part::AsyncCopy];
        let made = MadeRows::new(self);
        let signals = (made.is_some() || self.meets()).then_some(Part::Signals);
        let own = text_beside(&parts.into_iter().chain(signals).collect::<Vec<_>>(), &PRELUDE_PARTS);
        let made = made.map_or(String::new(), |made| made.text(self.vector()));
        [&self.constants(), PRELUDE.as_str(), &own, &made, &self.epilogue_text(), &kernel.join("\n")].join("\n")
    }

    pub(super) fn epilogue(&self) -> Option<Side<'_>> {
        let epilogue = sides::epilogue(&self.matmul, &self.launch, self.vector())?;
        Some(Side { rounded: Some(self.matmul.result), ..epilogue })
    }

    fn epilogue_text(&self) -> String {
        let Some(epilogue) = self.epilogue() else { return String::new() };
        match self.tile.by_rows {
            true => epilogue.tile_rows(self.tile.part_columns(), self.parts(), self.mapped().arguments()),
            false => epilogue.epilogue(),
        }
    }

    /// Columns that prologue and epilogue take at once.
    fn vector(&self) -> usize {
        let made = if self.matmul.prologue.is_some() { self.launch.shape.k } else { 8 };
        if self.tile.by_rows { PAIR } else { gcd(gcd(self.launch.shape.n, 8), made) }
    }

    /// Sums over rows that what follows makes.
    fn column_sums(&self) -> usize {
        self.matmul.epilogue.as_ref().map_or(0, |epilogue| column_sums(&epilogue.body))
    }

    /// Whether warps can store sums over their rows: the workspace has no other use, and each of them has pieces of 64 columns.
    fn can_sum_columns(&self) -> bool {
        self.matmul.rights == 1 && self.matmul.prologue.is_none() && !self.is_by_warps()
    }

    /// Sums over rows that are stored of each column: one a warp that has all columns of a piece, as in `elementwise.cu`.
    fn summed_parts(&self) -> usize {
        let (shape, across) = (&self.launch.shape, 64 / self.vector());
        128 / across.max(32) * shape.m.div_ceil(64) * shape.batches()
    }

    /// Rows of tiles that are neighbours: while their columns of B are in the L2, all of them read these. Where B is larger than the L2, the
    /// bands are as high as their rows of A stay there, since each band reads all of B from memory.
    fn band(&self) -> usize {
        let (shape, bytes) = (self.whole_shape(), self.passes() * self.matmul.left.bytes());
        let row_bytes = self.tile.rows * shape.k * bytes;
        let plain = self.matmul.prologue.is_none() && !self.matmul.routed;
        if self.meets() {
            // Tiles of the same rows follow each other.
            return 1;
        }
        let band = match plain && shape.n * shape.k * bytes > L2_BYTES / 2 {
            true => (L2_BYTES / 3 / row_bytes.max(1)).clamp(BAND, self.tile_counts()[0].max(BAND)),
            false => BAND,
        };
        band.next_multiple_of(self.tile.sharers)
    }

    /// Pieces of 64 columns of a tile.
    fn pieces(&self) -> usize {
        self.tile.columns.div_ceil(64)
    }

    /// Blocks of a cluster that have rows together.
    fn cluster(&self) -> usize {
        if self.needs_whole_rows() && !self.is_by_warps() { self.column_tiles() } else { 1 }
    }

    /// Whether blocks that have rows together meet in memory.
    pub(super) fn meets(&self) -> bool {
        self.tile.by_rows && self.is_by_warps()
    }

    /// Whether what follows needs whole rows.
    pub(super) fn needs_whole_rows(&self) -> bool {
        self.matmul.epilogue.as_ref().is_some_and(|epilogue| reduces(&epilogue.body))
    }

    /// Whether what follows rounds values to 16 bits.
    fn rounds(&self) -> bool {
        let narrow = |expr: &Expr| matches!(expr, Expr::Rounded(Dtype::F16 | Dtype::Bf16, _));
        self.matmul.epilogue.as_ref().is_some_and(|epilogue| epilogue.body.exprs.iter().any(narrow))
    }

    /// Tiles along the columns.
    fn column_tiles(&self) -> usize {
        self.launch.shape.n.div_ceil(self.result_columns())
    }

    /// Warpgroups that have rows together, of all blocks.
    fn parts(&self) -> usize {
        let blocks = if self.needs_whole_rows() { self.column_tiles() } else { 1 };
        blocks * (self.tile.columns / self.tile.part_columns())
    }

    /// Bytes of what blocks tell each other of rows in memory: counts, then a word of each number.
    pub(super) fn meeting_memory(&self) -> usize {
        let reductions = self.matmul.epilogue.as_ref().map_or(0, |epilogue| reductions(&epilogue.body));
        if self.meets() { COUNTS_BYTES + 8 * reductions * self.parts() * self.launch.shape.m } else { 0 }
    }

    /// Where these counts are, and the words.
    pub(super) fn meeting_words(&self) -> Option<[Word; 2]> {
        self.meets().then_some([Word::Persistent(0), Word::Persistent(COUNTS_BYTES)])
    }

    /// Arguments of the epilogue that have tensor maps. By rows they pass through the ring of stages, and otherwise operands are
    /// prefetched.
    fn mapped(&self) -> MappedRows {
        if self.is_by_warps() {
            return MappedRows::default();
        }
        let shape = &self.launch.shape;
        let room = match (self.tile.by_rows, self.tile.sharing) {
            (true, Sharing::Turns) => 1,
            (true, _) => self.stages() * self.pieces_of_stage() / self.pieces(),
            (false, _) => usize::MAX,
        };
        let mapped = |side: Side| MappedRows::new(&side, [shape.batches(), shape.m], self.tile.rows, room);
        let mapped = self.epilogue().map_or(MappedRows::default(), mapped);
        if self.tile.by_rows { mapped } else { mapped.operands() }
    }

    /// Pieces of 64 columns of an argument that a stage has room for.
    fn pieces_of_stage(&self) -> usize {
        self.stage_bytes() / (self.tile.rows * 128)
    }

    /// Whether the ring has places for arguments of the epilogue, if that is where they come to.
    fn has_places(&self) -> bool {
        let pieces = self.pieces() * self.mapped().carried().len().max(1);
        self.tile.sharing == Sharing::Turns || pieces.div_ceil(self.pieces_of_stage()) <= self.stages()
    }

    /// Floats that parts of a row exchange, in bytes.
    fn meeting_bytes(&self) -> usize {
        let slots = self.matmul.epilogue.as_ref().map_or(0, |epilogue| reductions(&epilogue.body));
        match self.parts() {
            _ if self.meets() => 0,
            1 => 0,
            // And barriers of eight bytes for each: one, or of both warpgroups two.
            parts if self.is_persistent() => 2 * slots * (parts * self.tile.rows * 4 + 16),
            parts => slots * (parts * self.tile.rows * 4 + 8),
        }
    }

    fn types(&self) -> Types {
        let Matmul { left, result, .. } = self.matmul;
        if left == Dtype::I8 { Types::of(left) } else { Types { operands: left, sums: result } }
    }

    /// Whether each warp finishes its own sums: those that are handed over as f32, and of rows that are routed.
    fn is_by_warps(&self) -> bool {
        self.types().has_float_sums() || self.matmul.routed
    }

    /// Stages that have the same K.
    fn passes(&self) -> usize {
        if self.matmul.left == Dtype::F32 { tf32::PASSES } else { 1 }
    }

    fn has_columns_of_a(&self) -> bool {
        self.launch.shape.a.1 != 1 && self.matmul.left != Dtype::F32
    }

    fn has_rows_of_b(&self) -> bool {
        self.launch.shape.b.1 == 1 && self.matmul.left != Dtype::F32
    }

    fn stage_bytes(&self) -> usize {
        let columns = self.tile.columns;
        let b = if self.has_rows_of_b() { columns.div_ceil(64) * HALF_BYTES } else { columns * DEPTH * 2 };
        (self.tile.rows / 64 * HALF_BYTES + b).next_multiple_of(1024)
    }

    fn staged_bytes(&self) -> usize {
        match (self.tile.split, self.tile.by_rows) {
            _ if self.meets() => 0,
            _ if self.is_by_warps() => SUMS_BYTES,
            (1, false) => 2 * self.pieces() * 8192,
            // One operand of a tile of each warpgroup, or its result.
            _ if self.tile.by_rows && self.is_persistent() => 2 * self.pieces() * self.tile.rows * 128,
            _ => 0,
        }
    }

    /// Bytes beside the ring and its barriers.
    fn beside_stages(&self) -> usize {
        let held = if self.tile.by_rows && self.is_persistent() && !self.meets() { HELD_BARRIERS } else { 0 };
        self.staged_bytes() + held + self.meeting_bytes() + 1024
    }

    /// As many as there is room for.
    fn stages(&self) -> usize {
        let room = SHARED.saturating_sub(self.beside_stages());
        (room / (self.stage_bytes() + 16)).min(STAGES)
    }

    pub(super) fn shared(&self) -> usize {
        self.stages() * (self.stage_bytes() + 16) + self.beside_stages()
    }

    pub(super) fn describe(&self) -> String {
        let HopperTile { rows, columns, sharing, .. } = self.tile;
        match self.is_by_warps() && sharing == Sharing::Rows {
            true => format!("tiles of {rows} x {columns}, two warpgroups share each, {} stages", self.stages()),
            false => format!("{}, {} stages", self.tile, self.stages()),
        }
    }

    /// How the grid of an entry cuts it.
    pub(super) fn tiling(&self, entry: &'static str) -> Tiling {
        let HopperTile { rows, columns, .. } = self.tile;
        let walked = self.is_persistent().then(|| self.tile_count());
        Tiling { entry, by: "wgmma", tile: [rows, columns], stages: Some(self.stages()), walked, resident: 1 }
    }

    /// Whether blocks walk over tiles.
    pub(super) fn is_persistent(&self) -> bool {
        self.tile.sharing == Sharing::Turns || self.types().has_float_sums()
    }

    /// What stands before the text of the kernel.
    pub(super) fn constants(&self) -> String {
        let HopperTile { rows, columns, sharing, split, .. } = self.tile;
        let (part, mapped) = (self.tile.part_columns(), self.mapped());
        let kind = match self.matmul.left {
            Dtype::F32 => 0,
            Dtype::F16 => 1,
            Dtype::I8 => 3,
            _ => 2,
        };
        let [fetching, multiplying] = if self.matmul.prologue.is_some() { MAKING_REGISTERS } else { REGISTERS };
        let numbers = [
            ("V", self.vector()),
            ("N", self.launch.shape.n),
            ("KIND", kind),
            ("ROWS", rows),
            ("COLUMNS", part),
            ("SIDES", columns / part),
            ("RIGHTS", self.matmul.rights),
            ("FETCHING_REGISTERS", fetching),
            ("MULTIPLYING_REGISTERS", multiplying),
            ("STAGES", self.stages()),
            ("SPLIT", split),
            ("SHARERS", self.tile.sharers),
            ("CLUSTER", self.cluster()),
            ("PARTS", self.parts()),
            ("BAND", self.band()),
            ("STAGED_BYTES", self.staged_bytes() / 2),
            ("MEETING_BYTES", self.meeting_bytes()),
        ];
        let truths = [
            ("TURNS", sharing == Sharing::Turns),
            ("ADDS_STAGES", self.types().adds_stages()),
            ("A_COLUMNS", self.has_columns_of_a()),
            ("B_ROWS", self.has_rows_of_b()),
        ];
        let mut text = format!("// matmul: {}\n#define WAITS\n", self.describe());
        let _ = writeln!(text, "#define MAPS {}\n#define CARRIED {}", mapped.maps.len(), mapped.carried().len());
        let shared = self.epilogue().map_or(0, |epilogue| epilogue.shared_rows().count());
        let _ = writeln!(text, "#define COLUMN_SUMS {}\n#define SHARED_ROWS {shared}", self.column_sums());
        match (self.meets(), self.tile.by_rows) {
            (true, _) => text += "#define MEETS_IN_MEMORY\n",
            (false, true) => text += "#define BY_ROWS\n",
            (false, false) => {}
        }
        if self.matmul.prologue.is_some() {
            text += "#define MAKES\n";
        }
        if self.matmul.left == Dtype::F32 {
            text += "#define TF32\n";
        }
        for (name, number) in numbers {
            let _ = writeln!(text, "constexpr int {name} = {number};");
        }
        for (name, truth) in truths {
            let _ = writeln!(text, "constexpr bool {name} = {truth};");
        }
        text
    }

    fn grids(&self, target: &CudaTarget) -> Grids {
        let shape = &self.launch.shape;
        let epilogue = self.epilogue();
        let split = Split::new(self);
        let given = split.iter().flat_map(Split::words);
        let tail = given.chain(epilogue.iter().flat_map(|epilogue| epilogue.words(shape.m * shape.batches())));
        let rights = (0..self.matmul.rights).map(|right| self.map_of_b(right));
        let maps = [self.map_of_a()].into_iter().chain(rights).chain(self.mapped().maps);
        let grid = self.grid("matmul_hopper", maps, tail, target);
        let [made, persistent] = MadeRows::new(self).map_or([0; 2], |made| made.memory(self.tile.rows));
        let (finish, summed) = epilogue.and_then(|epilogue| epilogue.finish(self.summed_parts())).unzip();
        let list = split.iter().map(|split| split.grid(target)).chain([grid]).chain(finish).collect();
        // No kernel has two of these.
        let persistent = persistent + self.meeting_memory();
        let workspace = made + summed.unwrap_or(0) + split.map_or(0, |split| split.workspace());
        Grids { list, workspace, persistent, ..Grids::default() }
    }

    /// A grid of it over operands with these maps; `tail` is what stands in the parameter for what follows.
    pub(super) fn grid(
        &self,
        entry: &'static str,
        maps: impl IntoIterator<Item = TensorMap>,
        tail: impl IntoIterator<Item = Word>,
        target: &CudaTarget,
    ) -> Grid {
        let shape = &self.launch.shape;
        let ([row_tiles, column_tiles], tiles) = (self.tile_counts(), self.tile_count());
        let cluster = self.tile.split * self.cluster() * self.tile.sharers;
        let at_once = target.processors / cluster * cluster;
        let blocks = if self.is_persistent() { tiles.min(at_once) } else { tiles * self.tile.split };
        let maps: Vec<TensorMap> = maps.into_iter().collect();
        let b_given = match maps[1..=self.matmul.rights].iter().map(|map| map.of).collect::<Vec<_>>()[..] {
            [Mapped::Argument(position)] => Word::Unwritten { position, offset: 0 },
            _ => Word::Number(0),
        };
        let mut words: Vec<Word> = maps.into_iter().map(Word::Map).chain(tail).collect();
        let steps = steps(shape, self.matmul.left);
        let numbers = [shape.m, steps, row_tiles, column_tiles, tiles, self.has_batch(1), self.has_batch(2)];
        words.extend(numbers.map(|number| Word::Number(number as u64)));
        words.push(b_given);
        words.extend(self.meeting_words().into_iter().flatten());
        if let Some(made) = MadeRows::new(self) {
            let needed = first_rows(row_tiles, column_tiles, blocks) * self.tile.rows;
            words.extend(made.words(self.vector(), self.rows_made_first(needed, target)));
        }
        pad_to_maps(&mut words);
        Grid {
            entry,
            blocks: [blocks as u32, 1, 1],
            threads: THREADS,
            cluster: cluster as u32,
            shared: self.shared() as u32,
            waits: target.arch.has_dependent_grids(),
            walks: self.is_persistent(),
            words,
        }
    }
}

/// Stages along K; of f32 two have the same.
pub(super) fn steps(shape: &MatmulShape, operands: Dtype) -> usize {
    let passes = if operands == Dtype::F32 { tf32::PASSES } else { 1 };
    passes * shape.k.div_ceil(2 * DEPTH / operands.bytes())
}

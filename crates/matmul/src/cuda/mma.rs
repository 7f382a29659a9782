//! Matmuls by the matrix units of a warp, from Turing on, with any elementwise epilogue: what `mma/*.cu` take, how it is cut, and its
//! launch.
//!
//! | operands | instructions                      | sums                                     | from    |
//! |----------|-----------------------------------|------------------------------------------|---------|
//! | f16      | m16n8k16 (Turing: m16n8k8, twice) | f32                                      | Turing  |
//! | bf16     | m16n8k16                          | f32                                      | Ampere  |
//! | 16 bits  | the same, for a matmul of f32     | f32, added outside of the matrix units   | Ampere  |
//! | f32      | m16n8k8 of TF32, three passes     | f32, added outside of the matrix units   | Ampere  |
//! | f32      | fused multiply-adds               | f32                                      | Ampere  |
//! | i8       | m16n8k32                          | exact integers, handed over as f32       | Ampere  |
//!
//! - Any strides, any start of an operand, any number of batch axes, any size from 1 on; K may be 0. [`Load`] says how an operand comes.
//! - Three passes of TF32 are off by up to 2^-20 of each product, with either sign, which is within the bound of f32 for sums of
//!   [`PASSES_FROM`] and more; shorter ones are fused multiply-adds. Sums that come out infinite or as no number are done again so.
//! - Traffic: a tile reads its rows of A and its columns of B once, mostly from the L2; the epilogue reads and writes each element once.

use std::fmt;

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::body::Body;
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Tiling, Word};
use deuteron_codegen::cuda::row::sides::Side;
use deuteron_codegen::cuda::row::{PRELUDE, PRELUDE_PARTS, gcd};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::matmul_shape::{MatmulShape, Matrix};
use deuteron_codegen::tile::{self, Part};
use deuteron_graph::{Dtype, MAX_RANK};
use deuteron_plan::{Draft, Work, primitive_work};

use super::hopper::{Types, widens};
use super::mma_time::{self, Problem};
use super::sides;
use crate::fit::{self, MatmulFit};
use crate::kernel::{LoweredMatmul, Matmul, MatmulLaunch};
use crate::library;

/// What comes from memory, what is multiplied, and what follows the sums.
const TILE: [&str; 4] = [
    include_str!("shifted.cuh"),
    include_str!("mma/operands.cu"),
    include_str!("mma/sums.cu"),
    include_str!("mma/kernel.cu"),
];
/// Its name in the text.
const ENTRY: &str = "matmul_mma";
/// Threads of a block, as in `operands.cu`.
const THREADS: u32 = 128;
/// Bytes of K in a stage, as in `operands.cu`.
pub(super) const LINE_BYTES: usize = 64;
/// Batch axes, as in `operands.cu`: a matrix takes two axes of a tensor.
const AXES: usize = MAX_RANK - 2;
/// Blocks of a multiprocessor that the kernel is compiled for.
const BLOCKS: usize = 2;
/// Shared memory that the system takes of each block.
const RESERVED: usize = 1024;
/// Bytes of shared memory for each row that is routed, as in `routed.cu`: where it lies, and its number.
const LISTED_BYTES: usize = 12;
/// Stages, at most: more do not help.
const STAGES: usize = 4;
/// Sizes, at most: they are counted by 32 bits.
pub(super) const MAX_SIZE: usize = 1 << 30;
/// Length of a sum of f32 from which on three passes of TF32 are within the bound.
pub const PASSES_FROM: usize = 64;

/// Matmuls on the matrix units of a warp.
pub struct MmaFamily;

impl Family<CudaTarget> for MmaFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let fit = fit(&group, target)?;
        if widens(&group, fit.matmuls) {
            return None;
        }
        let problem = problem(&fit, target);
        let ours = problem.microseconds(fastest(&problem));
        if library_microseconds(&group, &fit, &problem) < ours {
            return None;
        }
        // Measured on Hopper alone.
        let microseconds = target.arch.has_wgmma().then_some(ours);
        offered(
            move || Work { microseconds, ..primitive_work(&group) },
            move || MmaKernel::new(sides::lower(&group, fit), target).kernel(target),
        )
    }
}

/// Time of a group by the library, and by a kernel of its own for what follows where the library has no such epilogue. It has no matmuls of
/// `f32` whose operands are of 16 bits.
pub(super) fn library_microseconds(group: &Draft, fit: &MatmulFit, problem: &Problem) -> f64 {
    let types = Types { operands: fit.operands[0].dtype, sums: group.graph.node(fit.matmuls[0]).dtype };
    if types.adds_stages() && types.operands != types.sums {
        return f64::INFINITY;
    }
    let follows = if library::fit(group).is_some() { 0.0 } else { problem.row_kernel_microseconds() };
    problem.library_microseconds() + follows
}

/// The shorter of that and the time of a group by this family.
pub(super) fn offered_microseconds(group: &Draft, fit: &MatmulFit, target: &CudaTarget) -> f64 {
    let problem = problem(fit, target);
    library_microseconds(group, fit, &problem).min(problem.microseconds(fastest(&problem)))
}

/// A matmul for the matrix units of a warp, compiled for its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct MmaKernel {
    /// the matmul; it always has an epilogue
    pub matmul: Matmul<Body>,
    /// sizes and arguments
    pub launch: MatmulLaunch,
    /// how it is cut
    pub tile: MmaTile,
    /// how each operand comes
    pub operands: [Operand; 2],
}

/// How a matmul is cut: what a block of four warps makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmaTile {
    /// rows of a tile
    pub rows: usize,
    /// columns of a tile
    pub columns: usize,
}

impl MmaTile {
    /// All of them.
    pub const ALL: [MmaTile; 5] = [
        MmaTile { rows: 128, columns: 128 },
        MmaTile { rows: 128, columns: 96 },
        MmaTile { rows: 128, columns: 64 },
        MmaTile { rows: 64, columns: 128 },
        MmaTile { rows: 64, columns: 64 },
    ];

    /// Those whose sums leave room in the registers for operands: f32 takes two words for each number, what does not come by
    /// asynchronous copies is held on its way, and bytes that are gathered one by one take most.
    fn of(dtype: Dtype, operands: &[Operand; 2]) -> &'static [MmaTile] {
        let held = operands.iter().filter(|operand| operand.load != Load::Copied).count();
        match (dtype, held) {
            (Dtype::F32, 0) => &MmaTile::ALL[2..],
            (Dtype::F32, _) | (Dtype::I8, 2) => &MmaTile::ALL[4..],
            (_, 2) => &MmaTile::ALL[2..],
            _ => &MmaTile::ALL,
        }
    }
}

impl fmt::Display for MmaTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tiles of {} x {}, four warps", self.rows, self.columns)
    }
}

/// How an operand comes to shared memory, by pieces of 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// asynchronous copies of aligned pieces
    Copied,
    /// aligned pieces, through registers: where there are no such copies
    Aligned,
    /// two aligned pieces each, of which one is cut out: lines start anywhere
    Shifted,
    /// element by element: no axis is contiguous
    Gathered,
}

/// An operand as a kernel takes it: lines of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operand {
    /// whether there is a line for each of K; otherwise for each row of A or column of B
    pub across: bool,
    /// how it comes
    pub load: Load,
    /// elements from a line to the next, and from an element of a line to the next
    strides: [usize; 2],
}

impl Operand {
    /// Of an operand that lies with these strides along its own axis and along K.
    pub(super) fn new(
        (own, along_k): (usize, usize),
        arg: &ArgBinding,
        batch: impl Iterator<Item = usize>,
        asynchronous: bool,
    ) -> Operand {
        let across = own == 1 && along_k != 1;
        let strides = if across { [along_k, own] } else { [own, along_k] };
        let whole = |elements: usize| (elements * arg.dtype.bytes()).is_multiple_of(16);
        let aligned = whole(strides[0]) && whole(arg.offset) && batch.into_iter().all(whole);
        let load = match (strides[1], aligned) {
            (1, true) if asynchronous => Load::Copied,
            (1, true) => Load::Aligned,
            (1, false) => Load::Shifted,
            _ => Load::Gathered,
        };
        Operand { across, load, strides }
    }

    /// Bytes of a stage with so many rows or columns, as in `operands.cu`.
    fn stage_bytes(&self, count: usize, size: usize) -> usize {
        let apart = if size == 4 { 32 } else { 16 };
        if self.across { LINE_BYTES / size * (count * size + apart) } else { count * LINE_BYTES }
    }
}

/// The operands of a matmul.
fn operands(shape: &MatmulShape, [a, b]: [&ArgBinding; 2], target: &CudaTarget) -> [Operand; 2] {
    let batch = |operand: usize| shape.batch.iter().map(move |axis| axis[operand]);
    let asynchronous = target.arch.is_ampere();
    [Operand::new(shape.a, a, batch(1), asynchronous), Operand::new((shape.b.1, shape.b.0), b, batch(2), asynchronous)]
}

/// Whether operands of a type are multiplied to sums of another.
pub(super) fn has_instructions(operands: Dtype, sums: Dtype, target: &CudaTarget) -> bool {
    match (operands, sums) {
        (Dtype::F16, Dtype::F16) => true,
        (Dtype::Bf16, Dtype::Bf16) | (Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::I8, Dtype::F32) => {
            target.arch.is_ampere()
        }
        _ => false,
    }
}

/// The matmul of a draft, if this kernel takes it.
fn fit<'a>(draft: &Draft<'a>, target: &CudaTarget) -> Option<MatmulFit<'a>> {
    let fit = fit::fit(draft)?;
    let &[matmul] = fit.matmuls else { return None };
    let (shape, [a, b]) = (&fit.shape, &fit.operands);
    let known = has_instructions(a.dtype, draft.graph.node(matmul).dtype, target);
    let plain = a.dtype == b.dtype && fit.gather.is_none() && fit.prologue.is_empty();
    let sized = [shape.m, shape.n, shape.batches()].iter().all(|size| (1..MAX_SIZE).contains(size))
        && shape.k < MAX_SIZE
        && shape.m * shape.batches() < MAX_SIZE;
    let smallest = MmaTile { rows: 64, columns: 64 };
    (known && plain && sized && mma_time::tiles(shape, smallest) < MAX_SIZE).then_some(fit)
}

/// Words of a parameter for so many tiles along rows and columns, and for the axes of a batch of elements of so many bytes.
pub(super) fn axis_words(tiles: [usize; 2], shape: &MatmulShape, bytes: usize) -> Vec<Word> {
    // Axes of one matrix stand before the others.
    let missing = AXES.saturating_sub(shape.batch.len());
    let axes = shape.batch.iter().map(|axis| [axis[0], axis[1] * bytes, axis[2] * bytes]);
    let axes = std::iter::repeat_n([1, 0, 0], missing).chain(axes).flatten();
    tiles.into_iter().chain(axes).map(|number| Word::Number(number as u64)).collect()
}

pub(crate) use super::mma_time::library_f32_us;

pub(super) fn problem<'a>(fit: &'a MatmulFit, target: &CudaTarget) -> Problem<'a> {
    let [a, b] = &fit.operands;
    Problem::new(&fit.shape, a.dtype, operands(&fit.shape, [a, b], target), target)
}

/// The one that is predicted to be done first.
pub(super) fn fastest(problem: &Problem) -> MmaTile {
    let time = |tile: &MmaTile| problem.microseconds(*tile);
    let tiles = MmaTile::of(problem.dtype, &problem.operands).iter().copied();
    tiles.min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(MmaTile { rows: 64, columns: 64 })
}

impl MmaKernel {
    /// That of a group, if it is a matmul that this kernel takes.
    pub fn of(group: &Draft, target: &CudaTarget) -> Option<MmaKernel> {
        let fit = fit(group, target)?;
        Some(MmaKernel::new(sides::lower(group, fit), target))
    }

    fn new(lowered: LoweredMatmul, target: &CudaTarget) -> MmaKernel {
        let LoweredMatmul { product: matmul, launch } = lowered;
        let operands = operands(&launch.shape, [&launch.args[0], &launch.args[1]], target);
        let tile = fastest(&Problem::new(&launch.shape, matmul.left, operands, target));
        MmaKernel { matmul, launch, tile, operands }
    }

    /// All ways to cut it that are predicted to take at most so many times the time of the fastest, that one first.
    pub fn tiles(&self, target: &CudaTarget, times: f64) -> Vec<MmaTile> {
        let problem = Problem::new(&self.launch.shape, self.matmul.left, self.operands, target);
        let time = |tile: &MmaTile| problem.microseconds(*tile);
        let mut tiles = MmaTile::of(self.matmul.left, &self.operands).to_vec();
        tiles.sort_by(|a, b| time(a).total_cmp(&time(b)));
        let most = times * time(&tiles[0]);
        tiles.retain(|tile| time(tile) <= most);
        tiles
    }

    /// The same, cut in another way.
    pub fn with_tile(self, tile: MmaTile) -> MmaKernel {
        MmaKernel { tile, ..self }
    }

    /// The text, with the kernel behind what makes a tile.
    pub(super) fn text(&self, kernel: &[&str], target: &CudaTarget) -> String {
        let own = tile::text_beside(&[Part::AsyncCopy, Part::Matrix, Part::Warp], &PRELUDE_PARTS);
        let epilogue = self.epilogue().map_or(String::new(), |epilogue| epilogue.epilogue());
        let kernel = [&TILE, kernel].concat().concat();
        [&self.constants(target), PRELUDE.as_str(), &own, &epilogue, &kernel].join("\n")
    }

    /// What is compiled and launched.
    pub fn kernel(&self, target: &CudaTarget) -> Kernel {
        let text = self.text(&[include_str!("mma/entry.cu")], target);
        let launch = Launch::of_grids(self.matmul.arguments(&self.launch), self.grids(target));
        let launch = launch.with_variant(self.describe(target), String::new()).with_tiling(self.tiling(ENTRY, target));
        Kernel::new(Source::Cuda(CudaSource::new("matmul", text)), launch)
    }

    /// How the grid of an entry cuts it.
    pub(super) fn tiling(&self, entry: &'static str, target: &CudaTarget) -> Tiling {
        let (by, tile) = (if self.is_fma() { "fma" } else { "mma.sync" }, [self.tile.rows, self.tile.columns]);
        Tiling { entry, by, tile, stages: Some(self.stages(target)), walked: None, resident: BLOCKS }
    }

    fn epilogue(&self) -> Option<Side<'_>> {
        let epilogue = sides::epilogue(&self.matmul, &self.launch, self.vector())?;
        Some(Side { rounded: Some(self.matmul.result), ..epilogue })
    }

    /// Columns that the epilogue takes at once: 16 bytes of the matmul, if they divide its columns.
    fn vector(&self) -> usize {
        gcd(self.launch.shape.n, 16 / self.matmul.result.bytes())
    }

    fn stage_bytes(&self) -> usize {
        let (size, [a, b]) = (self.matmul.left.bytes(), self.operands);
        a.stage_bytes(self.tile.rows, size) + b.stage_bytes(self.tile.columns, size)
    }

    /// As many as there is room for where several blocks share a multiprocessor.
    fn stages(&self, target: &CudaTarget) -> usize {
        let lines = if self.matmul.routed { LISTED_BYTES * self.tile.rows } else { 0 };
        let room = (target.arch.block_shared() + RESERVED) / BLOCKS - RESERVED - lines;
        (room / self.stage_bytes()).clamp(3, STAGES)
    }

    pub(super) fn describe(&self, target: &CudaTarget) -> String {
        format!("{}, {} stages", self.tile, self.stages(target))
    }

    fn is_fma(&self) -> bool {
        self.matmul.left == Dtype::F32 && self.launch.shape.k < PASSES_FROM
    }

    fn constants(&self, target: &CudaTarget) -> String {
        let (MmaTile { rows, columns }, [a, b]) = (self.tile, self.operands);
        let kind = match self.matmul.left {
            Dtype::F16 => 1,
            Dtype::Bf16 => 2,
            Dtype::I8 => 3,
            _ => 0,
        };
        format!(
            "// matmul: {}\n#define WAITS\nconstexpr int V = {};\nconstexpr int N = {};\nconstexpr int KIND = {kind};\n\
             constexpr int ROWS = {rows};\nconstexpr int COLUMNS = {columns};\nconstexpr int STAGES = {};\nconstexpr bool FMA = {};\nconstexpr bool ADDS_STAGES = {};\n\
             constexpr bool ROUTED = {};\nconstexpr bool A_COLUMNS = {};\nconstexpr int A_LOAD = {};\nconstexpr bool B_ROWS = {};\nconstexpr int B_LOAD = {};\n",
            self.describe(target),
            self.vector(),
            self.launch.shape.n,
            self.stages(target),
            self.is_fma(),
            Types { operands: self.matmul.left, sums: self.matmul.result }.adds_stages(),
            self.matmul.routed,
            a.across,
            a.load as u8,
            b.across,
            b.load as u8,
        )
    }

    fn grids(&self, target: &CudaTarget) -> Grids {
        let shape = &self.launch.shape;
        let (row_tiles, column_tiles) = (shape.m.div_ceil(self.tile.rows), shape.n.div_ceil(self.tile.columns));
        let reach = [Matrix::A, Matrix::B].map(|matrix| shape.reach(matrix));
        let mut words = self.words(reach);
        words.extend(axis_words([row_tiles, column_tiles], shape, self.matmul.left.bytes()));
        let grid = self.grid(ENTRY, mma_time::tiles(shape, self.tile), words, target);
        Grids { list: vec![grid], ..Grids::default() }
    }

    /// A grid of so many blocks.
    pub(super) fn grid(&self, entry: &'static str, blocks: usize, words: Vec<Word>, target: &CudaTarget) -> Grid {
        Grid {
            entry,
            blocks: [blocks as u32, 1, 1],
            threads: THREADS,
            cluster: 1,
            shared: (self.stages(target) * self.stage_bytes()) as u32,
            waits: target.arch.has_dependent_grids(),
            walks: false,
            words,
        }
    }

    /// What a parameter begins with, of operands that reach so far: what follows, both operands, rows and K.
    pub(super) fn words(&self, reach: [usize; 2]) -> Vec<Word> {
        let shape = &self.launch.shape;
        let mut words: Vec<Word> =
            self.epilogue().iter().flat_map(|epilogue| epilogue.words(shape.m * shape.batches())).collect();
        for (position, reach) in reach.into_iter().enumerate() {
            words.extend(self.matrix_words(position, reach));
        }
        words.extend([shape.m, shape.k].map(|number| Word::Number(number as u64)));
        words
    }

    /// Of an operand: its first element, its end, and its strides in bytes.
    fn matrix_words(&self, position: usize, reach: usize) -> [Word; 4] {
        let (start, size) = (self.launch.args[position].start(), self.matmul.left.bytes());
        let at = |offset: usize| Word::Argument { position, offset };
        let [line, element] = self.operands[position].strides.map(|stride| Word::Number((stride * size) as u64));
        [at(start), at(start + reach * size), line, element]
    }
}

#[cfg(test)]
mod tests {
    use deuteron_codegen::cuda::arch::Arch;

    use super::*;

    fn arg(dtype: Dtype, offset: usize) -> ArgBinding {
        let graph: deuteron_graph::Graph = format!("x = input {dtype}[1] ; out x").parse().unwrap();
        ArgBinding::whole(&graph, graph.inputs()[0], offset, false)
    }

    fn load(strides: (usize, usize), dtype: Dtype, offset: usize, batch: &[usize]) -> (bool, Load) {
        let operand = Operand::new(strides, &arg(dtype, offset), batch.iter().copied(), true);
        (operand.across, operand.load)
    }

    #[test]
    fn operands_come_as_they_lie() {
        assert_eq!(load((768, 1), Dtype::Bf16, 0, &[]), (false, Load::Copied));
        assert_eq!(load((1, 768), Dtype::Bf16, 8, &[0, 8192]), (true, Load::Copied));
        assert_eq!(load((50257, 1), Dtype::Bf16, 0, &[]), (false, Load::Shifted));
        assert_eq!(load((1, 768), Dtype::Bf16, 3, &[]), (true, Load::Shifted));
        assert_eq!(load((768, 1), Dtype::Bf16, 0, &[100]), (false, Load::Shifted));
        assert_eq!(load((4, 1), Dtype::F32, 4, &[]), (false, Load::Copied));
        assert_eq!(load((8, 1), Dtype::I8, 0, &[]), (false, Load::Shifted));
        assert_eq!(load((768, 3), Dtype::Bf16, 0, &[]), (false, Load::Gathered));
        let turing = Operand::new((768, 1), &arg(Dtype::F16, 0), std::iter::empty(), false);
        assert_eq!(turing.load, Load::Aligned);
    }

    /// Whether a matmul without an epilogue is ours, of rows of A and B as they are.
    fn is_ours(arch: Arch, dtype: Dtype, [m, k, n]: [usize; 3]) -> bool {
        let shape = MatmulShape { m, n, k, batch: Vec::new(), a: (k, 1), b: (n, 1), c: (n, 1) };
        let target = CudaTarget::new(arch, 132);
        let (a, b) = (arg(dtype, 0), arg(dtype, 0));
        let problem = Problem::new(&shape, dtype, operands(&shape, [&a, &b], &target), &target);
        problem.microseconds(fastest(&problem)) < problem.library_microseconds()
    }

    #[test]
    fn the_library_keeps_what_it_does_faster() {
        for arch in [Arch::Sm80, Arch::Sm89, Arch::Sm90a] {
            assert!(!is_ours(arch, Dtype::Bf16, [4096, 4096, 4096]), "{arch}");
            assert!(is_ours(arch, Dtype::Bf16, [8192, 50257, 768]), "{arch}");
        }
        assert!(
            is_ours(Arch::Sm90a, Dtype::F32, [4096, 4096, 4096]) && is_ours(Arch::Sm90a, Dtype::F32, [8192, 768, 2304])
        );
        assert!(!is_ours(Arch::Sm90a, Dtype::F32, [1024, 1024, 1024]));
        // Rows of B, which the library takes slowly.
        assert!(is_ours(Arch::Sm90a, Dtype::I8, [4096, 4096, 4096]));
        // TF32 is no faster than f32 there.
        assert!(!is_ours(Arch::Sm89, Dtype::F32, [4096, 4096, 4096]));
        // Short sums are fused multiply-adds.
        assert!(!is_ours(Arch::Sm90a, Dtype::F32, [4096, 40, 4096]));
    }

    #[test]
    fn every_cut_has_room_in_shared_memory() {
        for arch in Arch::ALL {
            let target = CudaTarget::new(arch, 132);
            for (dtype, across) in [(Dtype::F16, false), (Dtype::F16, true), (Dtype::F32, true), (Dtype::I8, true)] {
                let shape =
                    MatmulShape { m: 300, n: 200, k: 64, batch: Vec::new(), a: (64, 1), b: (200, 1), c: (200, 1) };
                let launch = MatmulLaunch { args: Vec::new(), shape, prologue_axes: Vec::new(), axes: Vec::new() };
                let operand = Operand { across, load: Load::Copied, strides: [200, 1] };
                for tile in MmaTile::ALL {
                    let matmul = Matmul {
                        left: dtype,
                        right: dtype,
                        result: dtype,
                        rights: 1,
                        routed: false,
                        prologue: None,
                        epilogue: None,
                    };
                    let kernel = MmaKernel { matmul, launch: launch.clone(), tile, operands: [operand; 2] };
                    let shared = kernel.stages(&target) * kernel.stage_bytes();
                    assert!(shared <= arch.block_shared(), "{arch}, {dtype}, {tile}: {shared} bytes");
                }
            }
        }
    }
}

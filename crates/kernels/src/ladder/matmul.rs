//! The rungs of a matmul: f16 or bf16, matrices whose rows are contiguous and follow each other, any sizes from 1 on, nothing around it.
//!
//! Four rungs are written for teaching, with their own parameter; the top three are the shipped kernels.

use deuteron_codegen::cuda::arch::Arch;
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Kernel, Launch, Source};
use deuteron_codegen::library::{LibraryEpilogue, LibraryMatmul};
use deuteron_codegen::tile::{self, Part};
use deuteron_graph::Dtype;
use deuteron_matmul::cuda::hopper::{HopperKernel, HopperTile, Sharing};
use deuteron_matmul::cuda::mma::MmaKernel;
use deuteron_matmul::cuda::realigned::RealignedKernel;
use deuteron_matmul::library;
use deuteron_plan::Draft;

/// Blocks of a grid, at most.
const MAX_BLOCKS: usize = (1 << 31) - 1;

/// Threads per block of the teaching rungs.
const THREADS: u32 = 256;

/// A teaching kernel with one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// as its file
    pub name: &'static str,
    text: &'static str,
    /// rows and columns of a block's tile
    tile: [usize; 2],
}

pub(super) const NAIVE: Written =
    Written { name: "l1_naive", text: include_str!("matmul/l1_naive.cu"), tile: [1, THREADS as usize] };

pub(super) const TILED: Written =
    Written { name: "l2_tiled", text: include_str!("matmul/l2_tiled.cu"), tile: [64, 64] };

pub(super) const VECTORISED: Written =
    Written { name: "l3_vectorised", text: include_str!("matmul/l3_vectorised.cu"), tile: [128, 128] };

pub(super) const TENSOR_CORES: Written =
    Written { name: "l4_tensor_cores", text: include_str!("matmul/l4_tensor_cores.cu"), tile: [128, 128] };

/// A kernel of a matmul as a rung.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// f32 arithmetic, a teaching kernel
    Plain(Written),
    /// on the tensor cores by `mma.sync`, a teaching kernel
    Matrix(Written),
    /// the shipped `mma/*.cu`
    Mma,
    /// the shipped `hopper/*.cu`, whose blocks have one tile each
    OneTile,
    /// the same, whose blocks are persistent
    Turns,
}

impl Step {
    /// Whether a GPU has its instructions.
    pub fn is_for(self, arch: Arch) -> bool {
        match self {
            Step::Plain(_) => true,
            Step::Matrix(_) | Step::Mma => arch.is_ampere(),
            Step::OneTile | Step::Turns => arch.has_wgmma(),
        }
    }

    /// Its kernel for a group that is a matmul, if it takes it.
    pub fn kernel(self, group: &Draft, target: &CudaTarget) -> Option<Kernel> {
        let matmul = library::lower(group, &library::fit(group)?)?;
        if !is_written_for(&matmul) {
            return None;
        }
        match self {
            Step::Plain(written) | Step::Matrix(written) => written.kernel(&matmul),
            Step::Mma => Some(MmaKernel::of(group, target)?.kernel(target)),
            Step::OneTile => on_warpgroups(group, target, |tile| tile.sharing == Sharing::Rows && is_plain(tile)),
            Step::Turns => on_warpgroups(group, target, |tile| tile.sharing == Sharing::Turns && is_plain(tile)),
        }
    }

    /// The file of a teaching rung.
    pub fn texts(&self) -> &[&'static str] {
        match self {
            Step::Plain(written) | Step::Matrix(written) => std::slice::from_ref(&written.text),
            Step::Mma | Step::OneTile | Step::Turns => &[],
        }
    }
}

/// Whether each block works alone, and what follows passes through shared memory.
fn is_plain(tile: &HopperTile) -> bool {
    tile.split == 1 && tile.sharers == 1 && !tile.by_rows
}

/// The warpgroup kernel with the shortest predicted time among the allowed tilings. Operands that tensor maps do not support are
/// copied before.
fn on_warpgroups(group: &Draft, target: &CudaTarget, is_wanted: impl Fn(&HopperTile) -> bool) -> Option<Kernel> {
    let first = |tiles: Vec<HopperTile>| tiles.into_iter().find(&is_wanted);
    if let Some(kernel) = HopperKernel::of(group, target) {
        let tile = first(kernel.tiles(target, f64::INFINITY))?;
        return Some(kernel.with_tile(tile).kernel(target));
    }
    let kernel = RealignedKernel::of(group, target)?;
    let tile = first(kernel.tiles(target, f64::INFINITY))?;
    Some(kernel.with_tile(tile).kernel(target))
}

/// Whether this is the matmul that the rungs compute.
fn is_written_for(matmul: &LibraryMatmul) -> bool {
    let LibraryMatmul { call, shape, .. } = matmul;
    let narrow = matches!(call.dtype, Dtype::F16 | Dtype::Bf16);
    let contiguous = shape.batch.is_empty() && shape.a == (shape.k, 1) && shape.b == (shape.n, 1);
    narrow && call.epilogue == LibraryEpilogue::None && contiguous
}

impl Written {
    fn kernel(&self, matmul: &LibraryMatmul) -> Option<Kernel> {
        let shape = &matmul.shape;
        let blocks = shape.m.div_ceil(self.tile[0]).checked_mul(shape.n.div_ceil(self.tile[1]))?;
        if blocks > MAX_BLOCKS {
            return None;
        }
        let start = |position: usize| matmul.args.get(position).map_or(0, |arg| arg.start());
        let mut words: Vec<Word> =
            (0..3).map(|position| Word::Argument { position, offset: start(position) }).collect();
        words.extend([shape.m, shape.n, shape.k].map(|size| Word::Number(size as u64)));
        let list = if blocks == 0 { Vec::new() } else { vec![Grid::new("matmul", blocks, THREADS, words)] };
        let launch = Launch::of_grids(library::arguments(matmul), Grids { list, ..Grids::default() });
        let source = CudaSource::new(self.name, self.text(matmul));
        let [rows, columns] = self.tile;
        let launch = launch.with_variant(format!("tiles of {rows} x {columns}"), String::new());
        Some(Kernel::new(Source::Cuda(source), launch))
    }

    fn text(&self, matmul: &LibraryMatmul) -> String {
        let (shape, kind) = (&matmul.shape, if matmul.call.dtype == Dtype::F16 { 1 } else { 2 });
        let aligned =
            |operand: usize, row: usize| row.is_multiple_of(8) && matmul.args[operand].offset.is_multiple_of(8);
        let constants = format!(
            "constexpr int KIND = {kind};\nconstexpr bool A_ALIGNED = {};\nconstexpr bool B_ALIGNED = {};\n\
             constexpr bool EVEN = {};\n",
            aligned(0, shape.k),
            aligned(1, shape.n),
            shape.n.is_multiple_of(2),
        );
        let parts = tile::text(&[Part::Conversions, Part::Matrix]);
        [&constants, &parts, include_str!("matmul/parameters.cuh"), self.text].join("\n")
    }
}

//! Time of a matmul on the matrix units of a warp from its sizes, and of what else could compute it.
//!
//! Fitted by hand on an H200. On others the rates are those that their makers state, times what matmuls reach of them: none was at hand.

use deuteron_codegen::cuda::arch::Arch;
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_graph::Dtype;

use super::mma::{BLOCKS, LINE_BYTES, Load, MmaTile, Operand, PASSES_FROM};

/// What a multiprocessor does in a microsecond.
struct Rates {
    /// operations of 16-bit operands, in millions, by our kernel
    ours: f64,
    /// the same by the library
    library: f64,
    /// operations of f32 by the library, in millions
    library_f32: f64,
    /// bytes of memory
    memory: f64,
}

fn rates(arch: Arch) -> Rates {
    let rates = |ours, library, library_f32, memory| Rates { ours, library, library_f32, memory };
    match arch {
        Arch::Sm75 => rates(0.8, 1.0, 0.2, 8e3),
        Arch::Sm80 => rates(2.2, 2.5, 0.17, 14e3),
        Arch::Sm86 => rates(0.75, 0.85, 0.35, 11e3),
        Arch::Sm89 => rates(1.1, 1.25, 0.5, 8e3),
        Arch::Sm90a => rates(3.2, 4.6, 0.38, 31e3),
        Arch::Sm100 => rates(3.2, 9.0, 0.45, 50e3),
        Arch::Sm120 => rates(1.1, 1.2, 0.5, 10e3),
    }
}

/// A launch by any kernel, in microseconds.
const START: f64 = 2.5;

/// A matmul whose time is asked for.
pub(super) struct Problem<'a> {
    shape: &'a MatmulShape,
    pub(super) dtype: Dtype,
    pub(super) operands: [Operand; 2],
    rates: Rates,
    processors: usize,
}

/// Tiles of all matrices of a batch.
pub(super) fn tiles(shape: &MatmulShape, tile: MmaTile) -> usize {
    shape.m.div_ceil(tile.rows) * shape.n.div_ceil(tile.columns) * shape.batches()
}

impl<'a> Problem<'a> {
    /// On a GPU.
    pub(super) fn new(
        shape: &'a MatmulShape,
        dtype: Dtype,
        operands: [Operand; 2],
        target: &CudaTarget,
    ) -> Problem<'a> {
        Problem { shape, dtype, operands, rates: rates(target.arch), processors: target.processors }
    }

    fn flops(&self) -> f64 {
        2.0 * (self.shape.m * self.shape.n * self.shape.batches()) as f64 * self.shape.k as f64
    }

    /// Of a launch, cut in some way.
    pub(super) fn microseconds(&self, tile: MmaTile) -> f64 {
        // One pass of TF32 is as fast as two of 16 bits, one of bytes as fast as half a one.
        let share = match self.dtype {
            Dtype::F32 if self.shape.k < PASSES_FROM => 1.0 / 18.0,
            Dtype::F32 => 1.0 / 6.0,
            Dtype::I8 => 2.0,
            _ => 1.0,
        };
        // Small tiles load more for each multiplication.
        let loaded = 1.0 / tile.rows as f64 + 1.0 / tile.columns as f64;
        let detour = |operand: &Operand| match operand.load {
            Load::Copied => 0.0,
            Load::Aligned => 0.05,
            Load::Shifted => 0.1,
            Load::Gathered => 0.6,
        };
        let detours: f64 = self.operands.iter().map(detour).sum();
        let slower = (0.6 + 0.4 * loaded * 64.0) * (1.0 + detours);
        let depth = LINE_BYTES / self.dtype.bytes();
        let stage = (2 * tile.rows * tile.columns * depth) as f64 / (self.rates.ours * share * 1e6) * slower;
        let steps = self.shape.k.div_ceil(depth) as f64 + 4.0;
        // A block alone on its multiprocessor runs faster than beside another, but not twice as fast.
        let tiles = tiles(self.shape, tile);
        let waves = tiles.div_ceil(self.processors * BLOCKS) as f64;
        let together = if tiles <= self.processors { 1.5 } else { BLOCKS as f64 };
        let finish = (tile.rows * tile.columns * 4) as f64 / self.rates.memory;
        START + waves * together * (steps * stage + finish)
    }

    /// Of the library, which is slow where rows or columns do not start at multiples of 16 bytes.
    pub(super) fn library_microseconds(&self) -> f64 {
        let whole = (self.shape.n * self.dtype.bytes()).is_multiple_of(16);
        let aligned = whole && self.operands.iter().all(|operand| matches!(operand.load, Load::Copied | Load::Aligned));
        let rate = match (self.dtype, aligned) {
            (Dtype::F32, _) => self.rates.library_f32,
            (Dtype::I8, true) => 2.0 * self.rates.library,
            // By our plain kernel.
            (Dtype::I8, false) => self.rates.library_f32 / 4.0,
            (_, true) => self.rates.library,
            // 6.6 ms for 8192 x 768 x 50257 on an H200.
            (_, false) => self.rates.library / 6.0,
        };
        START + self.flops() / (rate * 1e6 * self.processors as f64)
    }

    /// Of what follows the matmul as a kernel of its own, which reads its result and writes as much.
    pub(super) fn row_kernel_microseconds(&self) -> f64 {
        let result = if self.dtype == Dtype::I8 { 4 } else { self.dtype.bytes() };
        let bytes = (2 * self.shape.m * self.shape.n * self.shape.batches() * result) as f64;
        START + bytes / (self.rates.memory * self.processors as f64)
    }
}

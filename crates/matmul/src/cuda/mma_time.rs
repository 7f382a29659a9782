//! Time of a matmul on the matrix units of a warp from its sizes, and of what else could compute it.
//!
//! Fitted by hand on an H200. On others the rates are those that their makers state, times what matmuls reach of them: none was at hand.

use deuteron_codegen::cuda::arch::Arch;
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_graph::Dtype;

use super::mma::{LINE_BYTES, Load, MmaTile, Operand, PASSES_FROM};

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
        Arch::Sm90a => rates(2.9, 4.6, 0.38, 31e3),
        Arch::Sm100 => rates(2.9, 9.0, 0.45, 50e3),
        Arch::Sm120 => rates(1.1, 1.2, 0.5, 10e3),
    }
}

/// A launch by any kernel, in microseconds.
const START: f64 = 2.5;

/// Tiles that the library may take for f32.
const LIBRARY_TILES: [[usize; 2]; 4] = [[256, 128], [128, 128], [128, 64], [64, 64]];

/// Time of a matmul of f32 by the library.
pub(crate) fn library_f32_us(shape: &MatmulShape, target: &CudaTarget) -> f64 {
    library_f32_at(rates(target.arch).library_f32, shape, target.processors)
}

/// The same at a rate: the time of its best tile, by whole waves. On an H200 300x2048x2048 takes 116 us, 1000x777x1333 62 and 4096^3 2926.
fn library_f32_at(rate: f64, shape: &MatmulShape, processors: usize) -> f64 {
    let tile = |[rows, columns]: [usize; 2]| {
        let tiles = shape.m.div_ceil(rows) * shape.n.div_ceil(columns) * shape.batches();
        tiles.div_ceil(processors) as f64 * (2 * rows * columns) as f64 * shape.k as f64
    };
    START + LIBRARY_TILES.into_iter().map(tile).fold(f64::INFINITY, f64::min) / (rate * 1e6)
}

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

    fn result_bytes(&self) -> usize {
        if self.dtype == Dtype::I8 { 4 } else { self.dtype.bytes() }
    }

    /// Of a launch, cut in some way.
    pub(super) fn microseconds(&self, tile: MmaTile) -> f64 {
        // One pass of TF32 takes as long as two of 16 bits, less what both load; one of bytes half as long.
        let share = match self.dtype {
            Dtype::F32 if self.shape.k < PASSES_FROM => 1.0 / 18.0,
            Dtype::F32 => 1.0 / 4.5,
            Dtype::I8 => 2.0,
            _ => 1.0,
        };
        // Small tiles load more for each multiplication, and lines of 96 columns are not shared evenly by threads.
        let loaded = 64.0 / tile.rows as f64 + 64.0 / tile.columns as f64;
        let uneven = if tile.columns == 96 { 1.15 } else { 1.0 };
        let depth = LINE_BYTES / self.dtype.bytes();
        let products = (2 * tile.rows * tile.columns * depth) as f64 / share * (0.4 + 0.6 * loaded) * uneven;
        // What passes through registers, for each line of 64 bytes, as operations that could be done meanwhile.
        let detour = |operand: &Operand, lines: usize| match operand.load {
            Load::Copied => 0.0,
            Load::Aligned => 1.5e3 * lines as f64,
            Load::Shifted => 5.8e3 * lines as f64,
            Load::Gathered => 30e3 * lines as f64,
        };
        let [a, b] = &self.operands;
        let stage = (products + detour(a, tile.rows) + detour(b, tile.columns)) / (self.rates.ours * 1e6);
        let steps = self.shape.k.div_ceil(depth) as f64 + 4.0;
        let finish = (tile.rows * tile.columns * self.result_bytes()) as f64 / self.rates.memory;
        // Few blocks on a multiprocessor leave it waiting for memory and barriers.
        let tiles = tiles(self.shape, tile);
        let few = 1.0 - tiles as f64 / (4 * self.processors) as f64;
        let waiting = 1.0 + 0.8 * few.max(0.0);
        START + tiles.div_ceil(self.processors) as f64 * waiting * (steps * stage + finish)
    }

    /// Of the library, which is slow where rows or columns do not start at multiples of 16 bytes, and for bytes that do not lie along K.
    pub(super) fn library_microseconds(&self) -> f64 {
        let whole = (self.shape.n * self.result_bytes()).is_multiple_of(16);
        let aligned = whole && self.operands.iter().all(|operand| matches!(operand.load, Load::Copied | Load::Aligned));
        let along_k = self.operands.iter().all(|operand| !operand.across);
        let rate = match (self.dtype, aligned) {
            (Dtype::F32, _) => return library_f32_at(self.rates.library_f32, self.shape, self.processors),
            (Dtype::I8, true) if along_k => 1.4 * self.rates.library,
            (_, true) if self.dtype != Dtype::I8 => self.rates.library,
            // 4.3 to 5.0 ms for matmuls of 8192, 768 and 50257 on an H200, 1.1 ms for 4096 x 4096 x 4096 bytes.
            _ => self.rates.library / 5.0,
        };
        START + self.flops() / (rate * 1e6 * self.processors as f64)
    }

    /// Of what follows the matmul as a kernel of its own, which reads its result and writes as much.
    pub(super) fn row_kernel_microseconds(&self) -> f64 {
        let bytes = (2 * self.shape.m * self.shape.n * self.shape.batches() * self.result_bytes()) as f64;
        START + bytes / (self.rates.memory * self.processors as f64)
    }
}

//! Operands of f32, which a grid splits into numbers of TF32 before they are multiplied (`split.cu`, `tf32.cu`).
//!
//! - Each matrix becomes two in the workspace, nearest numbers and rests, whose lines lie along K whatever lay there: the instructions take no
//!   others. Batches that an operand is the same for have one of it.
//! - Three products of four are summed, `A B`, `A rest` and `rest B`. A stage of the ring has a matrix of A and another of B, and two stages
//!   the same K: so four matrices are loaded for three products, and 32 of K are added outside of the matrix units at a time.
//! - Traffic: operands are read once, and twice as much is written and read by the matmul.
//! - Errors: both numbers together are off by 2^-23 at most, rests times rests are below 2^-22 of a product, with either sign. Numbers below 2^-114
//!   are off by up to 2^-137, whatever their size.

use deuteron_codegen::cuda::grid::{Grid, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_codegen::tile::tensor_map::{Mapped, TensorMap};
use deuteron_graph::Dtype;

use super::HopperKernel;
use crate::cuda::mma::PASSES_FROM;
use crate::kernel::MatmulLaunch;

/// What splits, and what does sums again that are infinite or NaN.
pub(super) const SPLIT: &str = include_str!("split.cu");
pub(super) const AGAIN: &str = include_str!("tf32.cu");

/// Stages that have the same K, as in `operands.cu`.
pub(super) const PASSES: usize = 2;
/// Threads of a block that splits. Where lines lie along K, a block takes `NUMBERS` numbers; elsewhere a square of `SIDE` lines and columns. As in
/// `split.cu`.
const THREADS: u32 = 256;
const NUMBERS: usize = 4 * 4 * 256;
const SIDE: usize = 64;
/// Floats that a line in the workspace is a multiple of: 128 bytes.
const LINE: usize = 32;
/// Matrices start at multiples of this, in bytes.
const ALIGNMENT: usize = 256;
/// Bytes in the workspace, at most: what a kernel of its own may take of a GPU's memory.
const MAX_BYTES: usize = 2 << 30;
/// Bytes that a multiprocessor reads and writes in a microsecond while it splits.
const SPLIT_RATE: f64 = 28e3;

/// An operand as it lies, in elements, and where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Operand {
    /// rows of A or columns of B
    lines: usize,
    /// along K
    inner: usize,
    /// from a line to the next, and along K
    strides: [usize; 2],
    /// matrices, and from one to the next
    batch: [usize; 2],
}

impl Operand {
    fn new(shape: &MatmulShape, operand: usize) -> Operand {
        let (lines, strides) = match operand {
            0 => (shape.m, [shape.a.0, shape.a.1]),
            _ => (shape.n, [shape.b.1, shape.b.0]),
        };
        let batch = match shape.batch.first() {
            Some(axis) if axis[operand + 1] != 0 => [axis[0], axis[operand + 1]],
            Some(_) | None => [1, 0],
        };
        Operand { lines, inner: shape.k, strides, batch }
    }

    fn pitch(&self) -> usize {
        self.inner.next_multiple_of(LINE)
    }

    /// Of its matrices in the workspace.
    fn bytes(&self) -> usize {
        let floats = [PASSES, self.batch[0], self.lines, self.pitch()].into_iter().fold(1, usize::saturating_mul);
        floats.saturating_mul(4).next_multiple_of(ALIGNMENT)
    }

    /// Blocks that split it.
    fn blocks(&self) -> usize {
        match self.strides[1] {
            1 => (self.batch[0] * self.lines * self.inner.div_ceil(4) * 4).div_ceil(NUMBERS),
            _ => self.batch[0] * self.lines.div_ceil(SIDE) * self.inner.div_ceil(SIDE),
        }
    }
}

/// Whether a matmul of f32 is long enough for products of TF32, and its matrices are not too large.
pub(super) fn can_split(shape: &MatmulShape) -> bool {
    let bytes = Operand::new(shape, 0).bytes().saturating_add(Operand::new(shape, 1).bytes());
    shape.k >= PASSES_FROM && bytes <= MAX_BYTES
}

/// Time of the grid that splits both operands, roughly.
pub(super) fn split_us(shape: &MatmulShape, processors: usize) -> f64 {
    // Each number is read once, and written as two.
    let bytes = [0, 1].map(|operand| Operand::new(shape, operand).bytes() as f64 * 1.5);
    2.0 + (bytes[0] + bytes[1]) / (SPLIT_RATE * processors as f64)
}

/// Both operands of a matmul.
pub(super) struct Split<'a> {
    launch: &'a MatmulLaunch,
    operands: [Operand; 2],
}

impl Split<'_> {
    /// Of a matmul, if its operands are f32.
    pub fn new(kernel: &HopperKernel) -> Option<Split<'_>> {
        let launch = &kernel.launch;
        let operands = [0, 1].map(|operand| Operand::new(&launch.shape, operand));
        (kernel.matmul.left == Dtype::F32).then_some(Split { launch, operands })
    }

    /// Where an operand's matrices start in the workspace.
    fn start(&self, operand: usize) -> usize {
        if operand == 0 { 0 } else { self.operands[0].bytes() }
    }

    /// Bytes of the workspace.
    pub fn workspace(&self) -> usize {
        self.operands.iter().map(Operand::bytes).sum()
    }

    /// The map of an operand's matrices, in tiles of so many lines.
    pub fn map(&self, operand: usize, tile_lines: usize) -> TensorMap {
        let own = &self.operands[operand];
        TensorMap {
            of: Mapped::Workspace,
            offset: self.start(operand),
            rank: 3,
            // By elements of two bytes.
            sizes: [2 * own.inner as u64, own.lines as u64, (PASSES * own.batch[0]) as u64, 1, 1],
            strides: [4 * own.pitch() as u64, (4 * own.lines * own.pitch()) as u64, 16, 16],
            tile: [64, tile_lines as u32, 1, 1, 1],
        }
    }

    /// Both operands as they lie, and K, for sums that are done again.
    pub fn words(&self) -> Vec<Word> {
        let given = |position: usize| {
            let Operand { strides: [line, along], batch, .. } = self.operands[position];
            let steps = [line, along, batch[1]].map(|stride| Word::Number(4 * stride as u64));
            std::iter::once(self.first(position)).chain(steps)
        };
        let inner = Word::Number(self.operands[0].inner as u64);
        [0, 1].into_iter().flat_map(given).chain([inner]).collect()
    }

    fn first(&self, position: usize) -> Word {
        Word::Argument { position, offset: self.launch.args[position].start() }
    }

    /// The grid that splits them.
    pub fn grid(&self, target: &CudaTarget) -> Grid {
        let words = |position: usize| {
            let own = &self.operands[position];
            let Operand { lines, inner, strides: [line, along], batch: [count, matrix] } = *own;
            let numbers = [4 * line, 4 * along, 4 * matrix, lines, inner, own.pitch(), count, own.blocks()];
            let places = [self.first(position), Word::Workspace(self.start(position))];
            places.into_iter().chain(numbers.map(|number| Word::Number(number as u64)))
        };
        let blocks = self.operands.iter().map(Operand::blocks).sum();
        let grid = Grid::new("split_tf32", blocks, THREADS, [0, 1].into_iter().flat_map(words).collect());
        Grid { waits: target.arch.has_dependent_grids(), ..grid }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape([m, k, n]: [usize; 3], a: (usize, usize), b: (usize, usize), batch: Vec<[usize; 4]>) -> MatmulShape {
        MatmulShape { m, n, k, batch, a, b, c: (n, 1) }
    }

    #[test]
    fn lines_lie_along_k_whatever_lay_there() {
        // Rows of A along K, and rows of B across it, in a batch of three that A is the same for.
        let shape = shape([5, 70, 9], (70, 1), (9, 1), vec![[3, 0, 630, 45]]);
        let [a, b] = [0, 1].map(|operand| Operand::new(&shape, operand));
        assert_eq!(a, Operand { lines: 5, inner: 70, strides: [70, 1], batch: [1, 0] });
        assert_eq!(b, Operand { lines: 9, inner: 70, strides: [1, 9], batch: [3, 630] });
        // Two matrices of lines of 96 floats.
        assert_eq!([a.bytes(), b.bytes()], [2 * 5 * 96 * 4, (2 * 3 * 9 * 96 * 4_usize).next_multiple_of(256)]);
        // 4096 numbers a block, and 64 x 64 of each matrix.
        assert_eq!([a.blocks(), b.blocks()], [1, 3 * 2]);
        let long = Operand { lines: 1000, ..a };
        assert_eq!(long.blocks(), (1000 * 72_usize).div_ceil(4096));
    }

    #[test]
    fn short_sums_and_large_matrices_are_not_split() {
        let square = |size: usize, k: usize| shape([size, k, size], (k, 1), (size, 1), Vec::new());
        assert!(can_split(&square(4096, 4096)) && can_split(&square(3, 64)));
        assert!(!can_split(&square(4096, 63)));
        // Two of 8192 x 16384 are 1 GiB each.
        assert!(can_split(&square(8192, 16384)) && !can_split(&square(8192, 16385)));
    }
}

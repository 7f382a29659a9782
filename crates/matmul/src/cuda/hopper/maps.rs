//! Tensor maps of the operands of a matmul for Hopper.

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::cuda::grid::Word;
use deuteron_codegen::tile::tensor_map::{Mapped, TensorMap};

use super::HopperKernel;
use super::made::MadeRows;
use super::tf32::Split;
use crate::kernel::Role;

/// A stride of a tensor map is below, in elements of two bytes.
const MAX_STRIDE: usize = 1 << 39;

/// Whether a matrix with these strides has a tensor map.
pub(in crate::cuda) fn is_fit_for_map((row, column): (usize, usize), arg: &ArgBinding, batch: Option<usize>) -> bool {
    let sixteen_bytes = 16 / arg.dtype.bytes();
    let stride = |stride: usize| stride.is_multiple_of(sixteen_bytes) && (1..MAX_STRIDE).contains(&stride);
    let contiguous = (column == 1 && stride(row)) || (row == 1 && stride(column));
    contiguous && arg.offset.is_multiple_of(sixteen_bytes) && batch.is_none_or(|batch| batch == 0 || stride(batch))
}

impl HopperKernel {
    /// 1 where an operand has a matrix for each of the batch.
    pub(super) fn has_batch(&self, operand: usize) -> usize {
        self.launch.shape.batch.first().map_or(0, |axis| usize::from(axis[operand] != 0))
    }

    pub(super) fn map_of_a(&self) -> TensorMap {
        if let Some(made) = MadeRows::new(self) {
            return made.map(self.tile.rows);
        }
        if let Some(split) = Split::new(self) {
            return split.map(0, self.tile.rows);
        }
        let shape = &self.launch.shape;
        match self.has_columns_of_a() {
            true => self.map(0, 1, [shape.m, shape.k], shape.a.1, 64),
            false => self.map(0, 1, [shape.k, shape.m], shape.a.0, self.tile.rows),
        }
    }

    /// Of a right operand.
    pub(super) fn map_of_b(&self, right: usize) -> TensorMap {
        let shape = &self.launch.shape;
        let columns = self.tile.part_columns() / self.matmul.rights;
        if let Some(split) = Split::new(self) {
            return split.map(1, columns / self.tile.sharers);
        }
        let position = self.matmul.roles().iter().position(|&role| role == Role::Right(right)).unwrap_or(1 + right);
        match self.has_rows_of_b() {
            true => self.map(position, 2, [shape.n, shape.k], shape.b.0, 64 / self.tile.sharers),
            false => self.map(position, 2, [shape.k, shape.n], shape.b.1, columns / self.tile.sharers),
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
        let bytes = self.matmul.left.bytes();
        let (count, step) = match self.launch.shape.batch.first() {
            Some(axis) if axis[operand] != 0 => (axis[0], axis[operand]),
            Some(_) | None => (1, 16),
        };
        TensorMap {
            of: Mapped::Argument(position),
            offset: self.launch.args[position].start(),
            rank: 3,
            sizes: [(inner * bytes / 2) as u64, outer as u64, count as u64, 1, 1],
            strides: [(bytes * stride) as u64, (bytes * step) as u64, 16, 16],
            tile: [64, lines as u32, 1, 1, 1],
        }
    }
}

/// Fills a parameter up to a multiple of a map's alignment.
pub(in crate::cuda) fn pad_to_maps(words: &mut Vec<Word>) {
    let count: usize = words.iter().map(Word::count).sum();
    words.extend((count..count.next_multiple_of(16)).map(|_| Word::Number(0)));
}

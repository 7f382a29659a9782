//! Rows of the left operand that a matmul's launch makes: row work that warps do beside those that multiply (`made.cu`).

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::body::Body;
use deuteron_codegen::cuda::grid::Word;
use deuteron_codegen::cuda::row::sides::Side;
use deuteron_codegen::linear::earlier_sums;
use deuteron_codegen::tile::tensor_map::{Mapped, TensorMap};

use super::{BAND, HopperKernel, HopperTile, Sharing};
use crate::kernel::{Prologue, Role};

/// Bytes from one count of rows to the next, as in `made.cu`.
const COUNT_BYTES: usize = 32;

/// The left operand in the workspace, and the work that makes it.
pub(super) struct MadeRows<'a> {
    body: Body,
    /// which of the body's arguments is the operand
    made: usize,
    /// how each argument of the body lies, and its position in the launch; none of the operand
    args: Vec<(Option<usize>, ArgBinding)>,
    axes: &'a [(usize, usize)],
    rows: usize,
    /// elements from one row to the next
    pitch: usize,
}

impl MadeRows<'_> {
    /// Of a matmul, if its left operand is made.
    pub fn new(kernel: &HopperKernel) -> Option<MadeRows<'_>> {
        let (Prologue { body, made }, launch) = (kernel.matmul.prologue.as_ref()?, &kernel.launch);
        let (rows, pitch) = (launch.shape.m, pitch(launch.shape.k));
        let roles = kernel.matmul.roles();
        let mut body = earlier_sums(body).body;
        body.args[*made].dtype = kernel.matmul.left;
        let place = |arg: usize| -> Option<(Option<usize>, ArgBinding)> {
            match roles.iter().position(|&role| role == Role::Prologue(arg)) {
                Some(position) => Some((Some(position), launch.args[position].clone())),
                None => {
                    let internal = launch.args.first()?.internal(kernel.matmul.left);
                    Some((None, ArgBinding { written: true, leading: vec![(rows, pitch)], ..internal }))
                }
            }
        };
        let args = (0..body.args.len()).map(place).collect::<Option<Vec<_>>>()?;
        Some(MadeRows { body, made: *made, args, axes: &launch.prologue_axes, rows, pitch })
    }

    fn side(&self, vector: usize) -> Side<'_> {
        // The operand has a position behind all others.
        let args = self.args.iter().map(|(position, binding)| Some((position.unwrap_or(usize::MAX), binding)));
        Side { body: &self.body, args: args.collect(), handed: &[], axes: self.axes, vector, rounded: None }
    }

    /// The text of the work, by vectors of so many columns.
    pub fn text(&self, vector: usize) -> String {
        debug_assert!(self.body.args[self.made].written, "the operand is stored");
        self.side(vector).rows_of_warps()
    }

    /// The words of the work, of the counts, and how many rows come first.
    pub fn words(&self, vector: usize, first_rows: usize) -> Vec<Word> {
        let address = |position: usize, start: usize| match position {
            usize::MAX => Word::Workspace(0),
            _ => Word::Argument { position, offset: start },
        };
        let mut words = self.side(vector).words_at(self.rows, address);
        words.extend([Word::Persistent(0), Word::Number(first_rows as u64)]);
        words
    }

    /// The operand, in tiles of so many rows.
    pub fn map(&self, tile_rows: usize) -> TensorMap {
        TensorMap {
            of: Mapped::Workspace,
            offset: 0,
            rank: 3,
            sizes: [self.body.cols as u64, self.rows as u64, 1, 1, 1],
            strides: [2 * self.pitch as u64, 16, 16, 16],
            tile: [64, tile_rows as u32, 1, 1, 1],
        }
    }

    /// Bytes of the operand, and of the counts.
    pub fn memory(&self, tile_rows: usize) -> [usize; 2] {
        [2 * self.rows * self.pitch, (1 + self.rows.div_ceil(tile_rows)) * COUNT_BYTES]
    }
}

/// Elements from one row of a made operand to the next: multiples of 16 bytes, as a tensor map wants them.
fn pitch(k: usize) -> usize {
    k.next_multiple_of(8)
}

/// Rows that the first tiles of so many blocks need, where these are walked over as in `operands.cu`.
pub(super) fn first_rows(row_tiles: usize, column_tiles: usize, blocks: usize) -> usize {
    let bands = blocks.div_ceil(BAND * column_tiles);
    let rest = blocks - (bands - 1) * BAND * column_tiles;
    let high = (row_tiles - (bands - 1) * BAND).min(BAND);
    (bands - 1) * BAND + rest.min(high)
}

impl HopperTile {
    /// Whether blocks that are cut so run all at once, as those do that wait for rows of each other.
    pub(super) fn runs_at_once(&self, tiles: usize, processors: usize) -> bool {
        self.split == 1 && (self.sharing == Sharing::Turns || tiles <= processors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_tiles_need_the_rows_of_their_bands() {
        // 8192 x 2304 in tiles of 128 x 192: the first 96 tiles are of eight rows of tiles, then come eight more.
        assert_eq!(first_rows(64, 12, 132), 16);
        assert_eq!(first_rows(64, 12, 98), 10);
        assert_eq!(first_rows(64, 12, 96), 8);
        assert_eq!(first_rows(3, 12, 36), 3);
        assert_eq!(first_rows(9, 1, 9), 9);
        assert_eq!(first_rows(1, 1, 1), 1);
    }
}

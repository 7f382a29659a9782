//! The data of a run: addresses, leading axes, and the iteration over rows.

use crate::cpu::program::TileProgram;

/// Maximum leading axes of an argument.
pub const MAX_LEADING: usize = 7;

/// One leading axis of an argument.
#[derive(Clone, Copy, Debug)]
pub struct Dim {
    /// Indices along it.
    pub size: usize,
    /// Elements from one index to the next; 0 repeats.
    pub stride: usize,
}

/// The memory behind one argument of a program.
#[derive(Clone, Copy, Debug)]
pub struct BoundArg {
    /// Its first element. Any alignment.
    pub base: *mut u8,
    /// Leading axes, outermost first; the first `rank` count. Their sizes multiply to the launch's rows.
    pub dims: [Dim; MAX_LEADING],
    /// Leading axes used. 0: the same row for every row.
    pub rank: usize,
    /// `GatheredRow` only: rows of the table, whose row stride is `dims[0].stride`.
    pub table_rows: usize,
    /// For written arguments, whether to use streaming stores, which pays if the output is larger than the cache and not read soon.
    pub streaming: bool,
}

// SAFETY: an address is only a number until `run` or `finish` uses it, and their callers answer for that.
unsafe impl Send for BoundArg {}
// SAFETY: as above.
unsafe impl Sync for BoundArg {}

/// A row coordinate: `(row / divide) % modulo`. Machine code reads it as two numbers of 64 bits.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Axis {
    /// Rows in one step of the axis.
    pub divide: usize,
    /// Size of the axis.
    pub modulo: usize,
}

/// A program and its data.
pub struct Launch<'a> {
    /// What to run.
    pub program: &'a TileProgram,
    /// One for each of `program.args`.
    pub args: &'a [BoundArg],
    /// One for each of `program.axes`.
    pub axes: &'a [Axis],
    /// Columns to work on, where they are not all: of a program without reductions.
    pub window: Option<(usize, usize)>,
}

/// An index is out of range of its table. Rows before it are finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("row {row}, argument {arg}: expected an index in 0..{table_rows}, got {index}")]
pub struct Fault {
    /// The gathered argument.
    pub arg: usize,
    /// The row of the launch.
    pub row: usize,
    /// What the index argument holds there.
    pub index: i64,
    /// Rows of the table.
    pub table_rows: usize,
}

/// The offset of one argument's row, carried from row to row without a division.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    index: [usize; MAX_LEADING],
    offset: usize,
}

impl Cursor {
    /// Goes to `row`.
    pub fn seek(&mut self, arg: &BoundArg, row: usize) {
        *self = Cursor::default();
        let mut rest = row;
        for (axis, dim) in arg.dims[..arg.rank].iter().enumerate().rev() {
            let size = dim.size.max(1); // a gathered table may have no rows; its cursor is not used
            self.index[axis] = rest % size;
            self.offset += self.index[axis] * dim.stride;
            rest /= size;
        }
    }

    /// Goes to the next row; after the last one comes the first.
    pub fn advance(&mut self, arg: &BoundArg) {
        for (axis, dim) in arg.dims[..arg.rank].iter().enumerate().rev() {
            self.index[axis] += 1;
            self.offset += dim.stride;
            if self.index[axis] < dim.size {
                return;
            }
            self.offset -= dim.size.max(1) * dim.stride;
            self.index[axis] = 0;
        }
    }

    /// Elements from the argument's base to its current row.
    pub fn offset(&self) -> usize {
        self.offset
    }
}

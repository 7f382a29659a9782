//! Finished accumulators: scales, the caller's `finish`, and a plain store.

use deuteron_codegen::cpu::simd::format::{BrainFloat, Format, HalfFloat, SignedByte, Word};
use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};
use deuteron_codegen::cpu::simd::{Isa, Task};
use deuteron_graph::Dtype;

use super::{Job, SumBlock};

/// Where sums lie.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    pub base: *mut f32,
    /// Floats to the sums with the second B.
    pub second: usize,
    /// Floats from one row to the next.
    pub stride: usize,
    /// They are `i32`.
    pub whole: bool,
}

/// Scales the accumulators of rows and columns of the part, given as (first, number), and passes them on.
///
/// # Safety
/// The sums of these rows and columns, with every B, can be read and written, and nobody else does.
pub(super) unsafe fn finish_block<S: Simd>(
    simd: S,
    job: &Job,
    sums: Sums,
    (row, rows): (usize, usize),
    (column, columns): (usize, usize),
    finish: &mut dyn FnMut(SumBlock<'_>),
) {
    let (row, column) = (job.part.row + row, job.part.column + column);
    let length = (rows - 1) * sums.stride + columns;
    // SAFETY: the caller's promise; the sums with the second B lie behind those with the first.
    let [first, second] = unsafe {
        let second = if job.spec.rights == 2 { length } else { 0 };
        let start = if job.spec.rights == 2 { sums.base.add(sums.second) } else { sums.base.add(length) };
        [std::slice::from_raw_parts_mut(sums.base, length), std::slice::from_raw_parts_mut(start, second)]
    };
    for (which, block) in [&mut *first, &mut *second].into_iter().enumerate().take(job.spec.rights) {
        let by_column = job.scales.columns[which].map(|scales| &scales[column..column + columns]);
        if !sums.whole && by_column.is_none() && job.scales.rows.is_none() {
            continue;
        }
        for (at, line) in block.chunks_mut(sums.stride).enumerate() {
            let by_row = job.scales.rows.map_or(1.0, |scales| scales[row + at]);
            simd.enter(Scale { line: &mut line[..columns], whole: sums.whole, by_row, by_column });
        }
    }
    finish(SumBlock { row, rows, column, columns, stride: sums.stride, sums: first, second });
}

struct Scale<'a> {
    line: &'a mut [f32],
    whole: bool,
    by_row: f32,
    by_column: Option<&'a [f32]>,
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let by_row = simd.splat(self.by_row);
        let one = simd.splat(1.0);
        let scaled = |sums: S::Float, by_column: S::Float| {
            let sums = if self.whole { simd.to_float(simd.bits(sums)) } else { sums };
            simd.mul(simd.mul(sums, by_row), by_column)
        };
        let (count, base) = (self.line.len(), self.line.as_mut_ptr());
        let mut at = 0;
        // SAFETY: `at` and the lanes behind it are inside of the line, and of the scales, which are as long.
        unsafe {
            while at + S::WIDTH <= count {
                let by_column = self.by_column.map_or(one, |scales| simd.load(scales.as_ptr().add(at)));
                simd.store(base.add(at), scaled(simd.load(base.add(at)), by_column));
                at += S::WIDTH;
            }
            if at < count {
                let left = count - at;
                let by_column = self.by_column.map_or(one, |scales| simd.load_partial(scales.as_ptr().add(at), left));
                let lanes = scaled(simd.load_partial(base.add(at), left), by_column);
                simd.store_partial(base.add(at), lanes, left);
            }
        }
    }
}

/// The plain finish: sums are rounded to a dtype and stored.
#[derive(Clone, Copy, Debug)]
pub struct Store {
    /// The result's row 0, column 0. Any alignment.
    pub base: *mut u8,
    /// f32, f16, bf16 or i8.
    pub dtype: Dtype,
    /// Elements from one row to the next, and from one column to the next.
    pub strides: (usize, usize),
}

// SAFETY: an address is only a number until `Store::block` uses it, and its callers answer for that.
unsafe impl Send for Store {}
// SAFETY: as above.
unsafe impl Sync for Store {}

impl Store {
    /// Stores the sums with the first B.
    ///
    /// # Safety
    /// The elements of the block's rows and columns can be written, and nobody else reads or writes them.
    pub unsafe fn block(&self, isa: Isa, block: &SumBlock<'_>) {
        isa.dispatch(StoreBlock { to: self, block });
    }
}

struct StoreBlock<'a> {
    to: &'a Store,
    block: &'a SumBlock<'a>,
}

impl Task for StoreBlock<'_> {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        let StoreBlock { to, block } = self;
        match to.dtype {
            Dtype::F16 => simd.enter(StoreRows { _format: HalfFloat, to, block }),
            Dtype::Bf16 => simd.enter(StoreRows { _format: BrainFloat, to, block }),
            Dtype::I8 => simd.enter(StoreRows { _format: SignedByte, to, block }),
            _ => simd.enter(StoreRows { _format: Word, to, block }),
        }
    }
}

struct StoreRows<'a, T> {
    _format: T,
    to: &'a Store,
    block: &'a SumBlock<'a>,
}

impl<T: Format> Kernel for StoreRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let StoreRows { to, block, .. } = self;
        let (row_bytes, column_bytes) = (to.strides.0 * T::BYTES, to.strides.1 * T::BYTES);
        for (at, line) in block.sums.chunks(block.stride).enumerate() {
            let (line, count) = (line.as_ptr(), block.columns);
            let start = (block.row + at) * row_bytes + block.column * column_bytes;
            // SAFETY: the caller of `Store::block` lets us write the block's rows and columns; the line has `count` sums.
            unsafe {
                let to = to.base.add(start);
                let mut at = 0;
                if column_bytes == T::BYTES {
                    // A store waits for its line: two rows ahead it has come.
                    let ahead = to.wrapping_add(2 * row_bytes);
                    for line in (0..count * T::BYTES).step_by(64) {
                        simd.prefetch_to_write(ahead.wrapping_add(line));
                    }
                    while at + S::WIDTH <= count {
                        T::write(simd, to.add(at * T::BYTES), simd.load(line.add(at)), false);
                        at += S::WIDTH;
                    }
                    if at < count {
                        let lanes = simd.load_partial(line.add(at), count - at);
                        T::write_partial(simd, to.add(at * T::BYTES), lanes, count - at);
                    }
                } else {
                    while at < count {
                        T::write_partial(simd, to.add(at * column_bytes), simd.load_partial(line.add(at), 1), 1);
                        at += 1;
                    }
                }
            }
        }
    }
}

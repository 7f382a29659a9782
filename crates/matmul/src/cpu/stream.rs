//! Matmuls of 1 to 8 rows: every element of B is read once, in place, at memory bandwidth.
//!
//! - B by rows (`[k, n]`): eight rows at a time go over a run of columns whose sums stay in the L1. One chain of
//!   multiply-adds an element, as in `floats.rs`.
//! - B by columns (`[n, k]`): lanes run along `k`, and are added up at the end of a column in a fixed order.

use deuteron_codegen::cpu::simd::format::{BrainFloat, Format, HalfFloat, SignedByte, Word};
use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};
use deuteron_graph::Dtype;

use super::pack::{LeftBlock, left};
use super::store::{Sums, finish_block};
use super::{Job, LINE, Spec, SumBlock, Values};

/// Sums that stay in the L1, of all rows with every B: 16 KiB.
const SUMS: usize = 4096;
/// Rows of B at a time.
const DEEP: usize = 8;

/// Columns of a run.
fn run_columns(spec: &Spec, rows: usize) -> usize {
    SUMS / padded(rows) / spec.rights
}

/// Floats of scratch: A, then the sums.
pub(super) fn scratch(spec: &Spec, rows: usize) -> usize {
    padded(rows) * row_stride(spec.k) + SUMS
}

/// Rows that are computed: 1, 2, 4 or 8. The others cost no traffic, and save the kernels of 3, 5, 6 and 7 rows; what they
/// hold does not matter.
fn padded(rows: usize) -> usize {
    rows.next_power_of_two()
}

fn row_stride(k: usize) -> usize {
    k.next_multiple_of(16)
}

/// # Safety
/// The promise of [`super::PartKernel::run`]; `memory` has the floats that [`scratch`] asks for, the part is not empty.
pub(super) unsafe fn run<S: Simd>(
    simd: S,
    job: &Job,
    mut values: Values,
    memory: *mut f32,
    finish: &mut dyn FnMut(SumBlock<'_>),
) {
    let Job { spec, part, .. } = job;
    let stride = row_stride(spec.k);
    let run = run_columns(spec, part.rows);
    let wanted = LeftBlock { row: part.row, rows: part.rows, inner: 0, count: spec.k, stride };
    // SAFETY: the scratch starts with room for these rows.
    unsafe { left(simd, job, &mut values, wanted, memory) };
    let sums = Sums {
        // SAFETY: the scratch goes on with the sums.
        base: unsafe { memory.add(padded(part.rows) * stride) },
        second: padded(part.rows) * run,
        stride: run,
        whole: false,
    };
    for column in (0..part.columns).step_by(run) {
        let columns = run.min(part.columns - column);
        for (which, matrix) in job.rights[..spec.rights].iter().enumerate() {
            let offset = (part.column + column) * matrix.strides.1;
            let pass = Pass {
                left: memory,
                left_stride: stride,
                right: matrix.base.wrapping_add(offset * spec.right.bytes()),
                right_strides: matrix.strides,
                // SAFETY: the sums with the second B lie behind those with the first.
                sums: unsafe { sums.base.add(which * sums.second) },
                sums_stride: run,
                rows: padded(part.rows),
                columns,
                k: spec.k,
            };
            match spec.right {
                Dtype::F16 => simd.enter(Typed { _format: HalfFloat, pass }),
                Dtype::Bf16 => simd.enter(Typed { _format: BrainFloat, pass }),
                Dtype::I8 => simd.enter(Typed { _format: SignedByte, pass }),
                _ => simd.enter(Typed { _format: Word, pass }),
            }
        }
        // SAFETY: the sums of these rows and columns were written.
        unsafe { finish_block(simd, job, sums, (0, part.rows), (column, columns), finish) };
    }
}

/// All rows against a run of columns.
#[derive(Clone, Copy)]
struct Pass {
    left: *const f32,
    left_stride: usize,
    right: *const u8,
    right_strides: (usize, usize),
    sums: *mut f32,
    sums_stride: usize,
    rows: usize,
    columns: usize,
    k: usize,
}

struct Typed<T> {
    _format: T,
    pass: Pass,
}

impl<T: Format> Kernel for Typed<T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let pass = self.pass;
        // SAFETY: `run` made the pass for at most eight rows, and one stride of B is 1.
        unsafe {
            if pass.right_strides.1 == 1 {
                match pass.rows {
                    1 => pass.by_rows::<S, T, 1>(simd),
                    2 => pass.by_rows::<S, T, 2>(simd),
                    4 => pass.by_rows::<S, T, 4>(simd),
                    _ => pass.by_rows::<S, T, 8>(simd),
                }
            } else {
                match pass.rows {
                    1 => pass.by_columns::<S, T, 1>(simd),
                    2 => pass.by_columns::<S, T, 2>(simd),
                    4 => pass.by_columns::<S, T, 4>(simd),
                    _ => pass.by_columns::<S, T, 8>(simd),
                }
            }
        }
    }
}

impl Pass {
    /// # Safety
    /// `R` is the number of rows; A, B and the sums are as large as the pass says, and B's columns are contiguous.
    #[inline(always)]
    unsafe fn by_rows<S: Simd, T: Format, const R: usize>(self, simd: S) {
        let deep = self.k / DEEP * DEEP;
        // SAFETY: inner indices stay below `k`.
        unsafe {
            for row in 0..R {
                std::slice::from_raw_parts_mut(self.sums.add(row * self.sums_stride), self.columns).fill(0.0);
            }
            for inner in (0..deep).step_by(DEEP) {
                self.add_rows::<S, T, R, DEEP>(simd, inner);
            }
            for inner in deep..self.k {
                self.add_rows::<S, T, R, 1>(simd, inner);
            }
        }
    }

    /// Adds the products with rows `inner .. inner + D` of B.
    ///
    /// # Safety
    /// As [`Pass::by_rows`], and `inner + D <= k`.
    #[inline(always)]
    unsafe fn add_rows<S: Simd, T: Format, const R: usize, const D: usize>(&self, simd: S, inner: usize) {
        let row_bytes = self.right_strides.0 * T::BYTES;
        let right = self.right.wrapping_add(inner * row_bytes);
        let mut at = 0;
        // SAFETY: rows below R, columns below `columns` and the inner indices are there.
        unsafe {
            let left = self.left.add(inner);
            while at + S::WIDTH <= self.columns {
                let mut lanes = [simd.splat(0.0); D];
                for deep in 0..D {
                    let from = right.add(deep * row_bytes + at * T::BYTES);
                    lanes[deep] = T::read(simd, from);
                    if (at * T::BYTES).is_multiple_of(LINE) {
                        simd.prefetch(from.wrapping_add(D * row_bytes));
                    }
                }
                for row in 0..R {
                    let to = self.sums.add(row * self.sums_stride + at);
                    let mut sum = simd.load(to);
                    for deep in 0..D {
                        let value = simd.splat(*left.add(row * self.left_stride + deep));
                        sum = simd.mul_add(value, lanes[deep], sum);
                    }
                    simd.store(to, sum);
                }
                at += S::WIDTH;
            }
            let count = self.columns - at;
            if count > 0 {
                for row in 0..R {
                    let to = self.sums.add(row * self.sums_stride + at);
                    let mut sum = simd.load_partial(to, count);
                    for deep in 0..D {
                        let lanes = T::read_partial(simd, right.add(deep * row_bytes + at * T::BYTES), count);
                        sum = simd.mul_add(simd.splat(*left.add(row * self.left_stride + deep)), lanes, sum);
                    }
                    simd.store_partial(to, sum, count);
                }
            }
        }
    }

    /// # Safety
    /// `R` is the number of rows; A, B and the sums are as large as the pass says, and B's rows are contiguous.
    #[inline(always)]
    unsafe fn by_columns<S: Simd, T: Format, const R: usize>(self, simd: S) {
        // As many columns as the registers hold sums for: they share the loads of A.
        let together = if 4 * R + 5 <= S::REGISTERS { 4 } else { 2 };
        let whole = self.columns / together * together;
        // SAFETY: columns stay below `columns`.
        unsafe {
            for column in (0..whole).step_by(together) {
                if 4 * R + 5 <= S::REGISTERS {
                    self.dots::<S, T, R, 4>(simd, column);
                } else {
                    self.dots::<S, T, R, 2>(simd, column);
                }
            }
            for column in whole..self.columns {
                self.dots::<S, T, R, 1>(simd, column);
            }
        }
    }

    /// The sums of columns `column .. column + N`.
    ///
    /// # Safety
    /// As [`Pass::by_columns`], and `column + N <= columns`.
    #[inline(always)]
    unsafe fn dots<S: Simd, T: Format, const R: usize, const N: usize>(&self, simd: S, column: usize) {
        let column_bytes = self.right_strides.1 * T::BYTES;
        let right = self.right.wrapping_add(column * column_bytes);
        let mut dots = [[simd.splat(0.0); N]; R];
        let mut inner = 0;
        // SAFETY: rows below R, columns below N and inner indices below `k` are there; `sums` has a place for each.
        unsafe {
            while inner + S::WIDTH <= self.k {
                let mut lanes = [simd.splat(0.0); N];
                for next in 0..N {
                    let from = right.add(next * column_bytes + inner * T::BYTES);
                    lanes[next] = T::read(simd, from);
                    if (inner * T::BYTES).is_multiple_of(LINE) {
                        simd.prefetch(from.wrapping_add(4 * column_bytes));
                    }
                }
                for row in 0..R {
                    let values = simd.load(self.left.add(row * self.left_stride + inner));
                    for next in 0..N {
                        dots[row][next] = simd.mul_add(values, lanes[next], dots[row][next]);
                    }
                }
                inner += S::WIDTH;
            }
            let count = self.k - inner;
            if count > 0 {
                for next in 0..N {
                    let from = right.add(next * column_bytes + inner * T::BYTES);
                    let lanes = T::read_partial(simd, from, count);
                    for row in 0..R {
                        let values = simd.load_partial(self.left.add(row * self.left_stride + inner), count);
                        dots[row][next] = simd.mul_add(values, lanes, dots[row][next]);
                    }
                }
            }
            for row in 0..R {
                let mut four = [simd.splat(0.0); 4];
                four[..N].copy_from_slice(&dots[row]);
                let sums = add_lanes(simd, four);
                let to = self.sums.add(row * self.sums_stride + column);
                std::ptr::copy_nonoverlapping(sums.as_ptr(), to, N);
            }
        }
    }
}

/// The sum of each vector's lanes, in an order that does not depend on the other vectors.
#[inline(always)]
fn add_lanes<S: Simd>(simd: S, vectors: [S::Float; 4]) -> [f32; 4] {
    let mut groups = [[0.0f32; 4]; 16];
    let base: *mut f32 = groups.as_mut_ptr().cast();
    // SAFETY: `groups` holds four vectors of at most 16 lanes.
    unsafe {
        simd.store_interleaved(base, vectors);
        let quarter = |at: usize| simd.load(base.add(at * S::WIDTH));
        let sum = simd.add(simd.add(quarter(0), quarter(1)), simd.add(quarter(2), quarter(3)));
        simd.store(base, sum);
    }
    let mut sums = groups[0];
    for group in &groups[1..S::WIDTH / 4] {
        for (sum, x) in sums.iter_mut().zip(group) {
            *sum += x;
        }
    }
    sums
}

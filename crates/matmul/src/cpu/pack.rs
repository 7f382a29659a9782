//! Packing of operands for the kernels: widened, contiguous, transposed if necessary.

use deuteron_codegen::cpu::simd::format::{BrainFloat, Format, HalfFloat, SignedByte, Word};
use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};
use deuteron_graph::Dtype;

use super::{Job, Values, Wanted};

/// A block of elements in place.
#[derive(Clone, Copy)]
pub(super) struct Source {
    pub base: *const u8,
    pub dtype: Dtype,
    /// Elements from one row to the next, and from one column to the next.
    pub strides: (usize, usize),
    pub rows: usize,
    pub columns: usize,
}

/// Rows of A as `f32`: element `(r, i)` at `r * stride + i`.
///
/// # Safety
/// The job's promise for A; `rows` rows of `stride >= count` floats at `to` can be written.
pub(super) unsafe fn left<S: Simd>(simd: S, job: &Job, values: &mut Values, wanted: LeftBlock, to: *mut f32) {
    let LeftBlock { row, rows, inner, count, stride } = wanted;
    if count == 0 {
        return;
    }
    match values {
        Values::Lie(matrix) => {
            let offset = row * matrix.strides.0 + inner * matrix.strides.1;
            let base = matrix.base.wrapping_add(offset * job.spec.left.bytes());
            let source = Source { base, dtype: job.spec.left, strides: matrix.strides, rows, columns: count };
            // SAFETY: the block is inside of A and of the room at `to`.
            unsafe { widen(simd, source, to, stride) };
        }
        Values::Fill(fill) => {
            // SAFETY: the caller lets us write the rows, of which all but the last have `stride` floats.
            let room = unsafe { std::slice::from_raw_parts_mut(to, (rows - 1) * stride + count) };
            fill(Wanted { row, rows, inner, count, stride, to: room });
            for row in 0..rows {
                let line = &mut room[row * stride..row * stride + count];
                match job.spec.left {
                    Dtype::F16 => simd.enter(Round { _format: HalfFloat, line }),
                    Dtype::Bf16 => simd.enter(Round { _format: BrainFloat, line }),
                    Dtype::I8 => simd.enter(Round { _format: SignedByte, line }),
                    _ => {}
                }
            }
        }
    }
}

/// A block of A.
#[derive(Clone, Copy)]
pub(super) struct LeftBlock {
    pub row: usize,
    pub rows: usize,
    pub inner: usize,
    pub count: usize,
    pub stride: usize,
}

/// Elements as `f32`: `(r, c)` at `r * stride + c`.
///
/// # Safety
/// The source's elements can be read, and `rows` rows of `columns` floats written at `to`.
pub(super) unsafe fn widen<S: Simd>(simd: S, source: Source, to: *mut f32, stride: usize) {
    match source.dtype {
        Dtype::F16 => simd.enter(Widen { _format: HalfFloat, source, to, stride }),
        Dtype::Bf16 => simd.enter(Widen { _format: BrainFloat, source, to, stride }),
        Dtype::I8 => simd.enter(Widen { _format: SignedByte, source, to, stride }),
        _ => simd.enter(Widen { _format: Word, source, to, stride }),
    }
}

/// Elements as panels of `width` columns of `f32`: `(r, c)` at `c / width * panel + r * width + c % width`. The columns that
/// the last panel misses are 0.
///
/// # Safety
/// The source's elements can be read, and its panels written. `width` is a multiple of `WIDTH`.
pub(super) unsafe fn panels<S: Simd>(simd: S, source: Source, to: *mut f32, width: usize, panel: usize) {
    match source.dtype {
        Dtype::F16 => simd.enter(Panels { _format: HalfFloat, source, to, width, panel }),
        Dtype::Bf16 => simd.enter(Panels { _format: BrainFloat, source, to, width, panel }),
        Dtype::I8 => simd.enter(Panels { _format: SignedByte, source, to, width, panel }),
        _ => simd.enter(Panels { _format: Word, source, to, width, panel }),
    }
}

/// Words of 32 bits the other way: `(r, c)` at `c * stride + r`. The source's columns are contiguous.
///
/// # Safety
/// `rows` rows of `columns` words, `row_bytes` apart, can be read, and `columns` rows of `rows` floats written at `to`.
#[inline(always)]
pub(super) unsafe fn transpose_words<S: Simd>(
    simd: S,
    from: (*const u8, usize),
    (rows, columns): (usize, usize),
    to: *mut f32,
    stride: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { transpose::<S, Word>(simd, from, (rows, columns), to, stride) }
}

struct Round<'a, T> {
    _format: T,
    line: &'a mut [f32],
}

impl<T: Format> Kernel for Round<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut narrow = [0u8; 64];
        for chunk in self.line.chunks_mut(S::WIDTH) {
            let mut lanes = [0.0; 16];
            lanes[..chunk.len()].copy_from_slice(chunk);
            // SAFETY: both arrays hold a vector of at most 16 lanes of at most 4 bytes.
            unsafe {
                T::write(simd, narrow.as_mut_ptr(), simd.load(lanes.as_ptr()), false);
                simd.store(lanes.as_mut_ptr(), T::read(simd, narrow.as_ptr()));
            }
            chunk.copy_from_slice(&lanes[..chunk.len()]);
        }
    }
}

struct Widen<T> {
    _format: T,
    source: Source,
    to: *mut f32,
    stride: usize,
}

impl<T: Format> Kernel for Widen<T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Source { base, strides, rows, columns, .. } = self.source;
        // SAFETY: `widen`'s caller lets us read and write these rows and columns.
        unsafe {
            if strides.1 == 1 || columns == 1 {
                for row in 0..rows {
                    let from = base.add(row * strides.0 * T::BYTES);
                    let to = self.to.add(row * self.stride);
                    let mut at = 0;
                    while at + S::WIDTH <= columns {
                        simd.store(to.add(at), T::read(simd, from.add(at * T::BYTES)));
                        at += S::WIDTH;
                    }
                    if at < columns {
                        let lanes = T::read_partial(simd, from.add(at * T::BYTES), columns - at);
                        simd.store_partial(to.add(at), lanes, columns - at);
                    }
                }
            } else if strides.0 == 1 {
                let from = (base, strides.1 * T::BYTES);
                transpose::<S, T>(simd, from, (columns, rows), self.to, self.stride);
            } else {
                scattered::<S, T>(simd, self.source, self.to, self.stride);
            }
        }
    }
}

struct Panels<T> {
    _format: T,
    source: Source,
    to: *mut f32,
    width: usize,
    panel: usize,
}

impl<T: Format> Kernel for Panels<T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Panels { source, to, width, panel, .. } = self;
        let Source { base, strides, rows, columns, .. } = source;
        let full = columns / width;
        // SAFETY: `panels`' caller lets us read these rows and columns, and write `columns / width` panels, rounded up.
        unsafe {
            if strides.1 == 1 {
                for row in 0..rows {
                    let from = base.add(row * strides.0 * T::BYTES);
                    let mut line = to.add(row * width);
                    // The next rows are too far away for the hardware to foresee them.
                    let ahead = from.wrapping_add(4 * strides.0 * T::BYTES);
                    for at in (0..full * width).step_by(width) {
                        for lane in (0..width).step_by(S::WIDTH) {
                            let offset = (at + lane) * T::BYTES;
                            simd.prefetch(ahead.wrapping_add(offset));
                            simd.store(line.add(lane), T::read(simd, from.add(offset)));
                        }
                        line = line.wrapping_add(panel);
                    }
                    let mut left = columns - full * width;
                    if left > 0 {
                        for lane in (0..width).step_by(S::WIDTH) {
                            let at = from.wrapping_add((full * width + lane) * T::BYTES);
                            let lanes = match left {
                                0 => simd.splat(0.0),
                                count if count < S::WIDTH => T::read_partial(simd, at, count),
                                _ => T::read(simd, at),
                            };
                            simd.store(line.add(lane), lanes);
                            left = left.saturating_sub(S::WIDTH);
                        }
                    }
                }
                return;
            }
            for first in (0..columns).step_by(width) {
                let part = Source {
                    base: base.wrapping_add(first * strides.1 * T::BYTES),
                    columns: width.min(columns - first),
                    ..source
                };
                let to = to.add(first / width * panel);
                if part.columns < width {
                    std::slice::from_raw_parts_mut(to, rows * width).fill(0.0);
                }
                if strides.0 == 1 {
                    let from = (part.base, strides.1 * T::BYTES);
                    transpose::<S, T>(simd, from, (part.columns, rows), to, width);
                } else {
                    scattered::<S, T>(simd, part, to, width);
                }
            }
        }
    }
}

/// `(r, c)` to `c * stride + r`, where `from` is an address and the bytes from row to row.
///
/// # Safety
/// `rows` rows of `columns` contiguous elements can be read, and `columns` rows of `rows` floats written.
#[inline(always)]
unsafe fn transpose<S: Simd, T: Format>(
    simd: S,
    (from, row_bytes): (*const u8, usize),
    (rows, columns): (usize, usize),
    to: *mut f32,
    stride: usize,
) {
    let mut groups = [[0.0f32; 4]; 16];
    let (whole_rows, whole_columns) = (rows / 4 * 4, columns / S::WIDTH * S::WIDTH);
    // SAFETY: rows and columns stay below their numbers; `groups` holds four vectors.
    unsafe {
        for column in (0..whole_columns).step_by(S::WIDTH) {
            for row in (0..whole_rows).step_by(4) {
                let at = from.add(row * row_bytes + column * T::BYTES);
                let lanes = [
                    T::read(simd, at),
                    T::read(simd, at.add(row_bytes)),
                    T::read(simd, at.add(2 * row_bytes)),
                    T::read(simd, at.add(3 * row_bytes)),
                ];
                simd.store_interleaved(groups.as_mut_ptr().cast(), lanes);
                for (lane, group) in groups[..S::WIDTH].iter().enumerate() {
                    to.add((column + lane) * stride + row).cast::<[f32; 4]>().write_unaligned(*group);
                }
            }
        }
        for row in 0..rows {
            let first = if row < whole_rows { whole_columns } else { 0 };
            for column in first..columns {
                let lanes = T::read_partial(simd, from.add(row * row_bytes + column * T::BYTES), 1);
                simd.store_partial(to.add(column * stride + row), lanes, 1);
            }
        }
    }
}

/// `(r, c)` to `r * stride + c`, element by element.
///
/// # Safety
/// As [`widen`].
#[inline(always)]
unsafe fn scattered<S: Simd, T: Format>(simd: S, source: Source, to: *mut f32, stride: usize) {
    for row in 0..source.rows {
        for column in 0..source.columns {
            let offset = row * source.strides.0 + column * source.strides.1;
            // SAFETY: row and column are inside of the source; one element is read and written.
            unsafe {
                let lanes = T::read_partial(simd, source.base.add(offset * T::BYTES), 1);
                simd.store_partial(to.add(row * stride + column), lanes, 1);
            }
        }
    }
}

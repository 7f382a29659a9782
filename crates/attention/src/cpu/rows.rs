//! Rows of tiles: widened from storage, narrowed into it, transposed.

use std::marker::PhantomData;

use deuteron_codegen::cpu::simd::format::{BrainFloat, Format, HalfFloat, Word};
use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};
use deuteron_graph::Dtype;

/// Rows of stored elements.
#[derive(Clone, Copy)]
pub(super) struct Stored {
    pub dtype: Dtype,
    pub address: *mut u8,
    /// Elements from one row to the next.
    pub stride: usize,
    pub rows: usize,
    pub width: usize,
}

/// Rows of `f32`.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub address: *const f32,
    pub stride: usize,
}

impl Stored {
    /// A row, whose elements are of the format.
    ///
    /// # Safety
    /// There is such a row.
    #[inline(always)]
    pub unsafe fn row<F: Format>(&self, row: usize) -> *const u8 {
        // SAFETY: the caller's promise.
        unsafe { self.address.add(row * self.stride * F::BYTES) }
    }

    /// Prefetches a row, which need not exist.
    #[inline(always)]
    pub fn fetch<S: Simd, F: Format>(&self, simd: S, row: usize) {
        let row = self.address.wrapping_add(row * self.stride * F::BYTES);
        for line in (0..self.width * F::BYTES).step_by(64) {
            simd.prefetch(row.wrapping_add(line));
        }
    }

    /// Prefetches rows to be written later. They may be far apart, where hardware prefetchers do not help.
    pub fn claim<S: Simd>(&self, simd: S) {
        let bytes = self.dtype.bytes();
        for row in 0..self.rows {
            let first = self.address.wrapping_add(row * self.stride * bytes);
            let before = first.addr() % 64;
            for line in (0..before + self.width * bytes).step_by(64) {
                simd.prefetch_to_write(first.wrapping_sub(before).wrapping_add(line));
            }
        }
    }

    /// The rows in `f32`: where they are, or widened into `to` with rows of `padded` elements.
    ///
    /// # Safety
    /// As for [`Stored::widen`].
    pub unsafe fn in_place_or<S: Simd>(self, simd: S, to: *mut f32, padded: usize) -> Rows {
        if self.dtype == Dtype::F32 && self.stride < 4 * padded {
            return Rows { address: self.address.cast(), stride: self.stride };
        }
        // SAFETY: the caller's promise.
        unsafe { self.widen(simd, to, padded, self.rows) };
        Rows { address: to, stride: padded }
    }

    /// Widens into rows of `padded` elements; zeros follow, up to `padded` and up to `padded_rows`.
    ///
    /// # Safety
    /// The rows can be read and `padded_rows * padded` elements at `to` written.
    pub unsafe fn widen<S: Simd>(self, simd: S, to: *mut f32, padded: usize, padded_rows: usize) {
        let stored = self;
        match self.dtype {
            Dtype::F16 => simd.enter(Widen { stored, to, padded, padded_rows, format: PhantomData::<HalfFloat> }),
            Dtype::Bf16 => simd.enter(Widen { stored, to, padded, padded_rows, format: PhantomData::<BrainFloat> }),
            _ => simd.enter(Widen { stored, to, padded, padded_rows, format: PhantomData::<Word> }),
        }
    }

    /// Stores `factor` times the first `width` elements of `f32` rows.
    ///
    /// # Safety
    /// The rows can be written and `from` read.
    pub unsafe fn narrow<S: Simd>(self, simd: S, from: *const f32, from_stride: usize, factor: f32) {
        let stored = self;
        match self.dtype {
            Dtype::F16 => simd.enter(Narrow { stored, from, from_stride, factor, format: PhantomData::<HalfFloat> }),
            Dtype::Bf16 => simd.enter(Narrow { stored, from, from_stride, factor, format: PhantomData::<BrainFloat> }),
            _ => simd.enter(Narrow { stored, from, from_stride, factor, format: PhantomData::<Word> }),
        }
    }
}

struct Widen<F> {
    stored: Stored,
    to: *mut f32,
    padded: usize,
    padded_rows: usize,
    format: PhantomData<F>,
}

impl<F: Format> Kernel for Widen<F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Widen { stored, to, padded, padded_rows, format: _ } = self;
        for row in 0..padded_rows {
            let width = if row < stored.rows { stored.width } else { 0 };
            let from = stored.address.wrapping_add(row * stored.stride * F::BYTES);
            for at in (0..padded).step_by(S::WIDTH) {
                let left = width.saturating_sub(at);
                // SAFETY: `left` elements of the row are left to read; `to` holds whole vectors.
                unsafe {
                    let lanes = match left {
                        0 => simd.splat(0.0),
                        _ if left < S::WIDTH => F::read_partial(simd, from.add(at * F::BYTES), left),
                        _ => F::read(simd, from.add(at * F::BYTES)),
                    };
                    simd.store(to.add(row * padded + at), lanes);
                }
            }
        }
    }
}

struct Narrow<F> {
    stored: Stored,
    from: *const f32,
    from_stride: usize,
    factor: f32,
    format: PhantomData<F>,
}

impl<F: Format> Kernel for Narrow<F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Narrow { stored, from, from_stride, factor, format: _ } = self;
        let factor = simd.splat(factor);
        for row in 0..stored.rows {
            let to = stored.address.wrapping_add(row * stored.stride * F::BYTES);
            let mut at = 0;
            while at < stored.width {
                let left = stored.width - at;
                // SAFETY: rows of `from` hold whole vectors; `left` elements of the row are left to write.
                unsafe {
                    let lanes = simd.mul(factor, simd.load(from.add(row * from_stride + at)));
                    let to = to.add(at * F::BYTES);
                    if left < S::WIDTH {
                        F::write_partial(simd, to, lanes, left);
                    } else {
                        F::write(simd, to, lanes, false);
                    }
                }
                at += S::WIDTH;
            }
        }
    }
}

/// `to[c][r] = from[r][c]`; rows and columns are multiples of 16.
pub(super) struct Turn {
    pub from: *const f32,
    pub from_stride: usize,
    pub to: *mut f32,
    pub to_stride: usize,
    pub rows: usize,
    pub columns: usize,
}

impl Turn {
    /// # Safety
    /// `from` can be read and `to` written; they do not overlap.
    pub unsafe fn run<S: Simd>(self, simd: S) {
        simd.enter(self);
    }
}

impl Kernel for Turn {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut transposed = [0.0f32; 256];
        let transposed = transposed.as_mut_ptr();
        for row in (0..self.rows).step_by(16) {
            for column in (0..self.columns).step_by(S::WIDTH) {
                // SAFETY: rows and columns are within both tiles; `transposed` holds 16 vectors.
                unsafe {
                    let mut rows = [simd.splat(0.0); 16];
                    for (r, lanes) in rows.iter_mut().enumerate() {
                        *lanes = simd.load(self.from.add((row + r) * self.from_stride + column));
                    }
                    turn_sixteen(simd, rows, transposed);
                    for c in 0..S::WIDTH {
                        let to = self.to.add((column + c) * self.to_stride + row);
                        for at in (0..16).step_by(S::WIDTH) {
                            simd.store(to.add(at), simd.load(transposed.add(16 * c + at)));
                        }
                    }
                }
            }
        }
    }
}

/// `to[16 c + r]` = lane `c` of row `r`. Interleaving rows `g, g + 4, g + 8, g + 12` for each `g < 4`, and then the four
/// results, does it.
///
/// # Safety
/// 16 vectors can be written at `to`.
#[inline(always)]
pub(super) unsafe fn turn_sixteen<S: Simd>(simd: S, rows: [S::Float; 16], to: *mut f32) {
    let mut half = [0.0f32; 256];
    let half = half.as_mut_ptr();
    let quarter = 4 * S::WIDTH;
    // SAFETY: `half` holds the 16 vectors as well.
    unsafe {
        for g in 0..4 {
            simd.store_interleaved(half.add(g * quarter), [rows[g], rows[g + 4], rows[g + 8], rows[g + 12]]);
        }
        for v in 0..4 {
            let parts = [0, 1, 2, 3].map(|g| simd.load(half.add(g * quarter + v * S::WIDTH)));
            simd.store_interleaved(to.add(v * quarter), parts);
        }
    }
}

/// `to[r]` = the sum of the lanes of row `r` of 16, which are asked for by fours. Interleaved, as in [`turn_sixteen`], four rows are
/// four vectors with every row in every fourth lane: these are added before the four results are interleaved.
///
/// # Safety
/// 16 elements can be written at `to`.
#[inline(always)]
pub(super) unsafe fn sum_sixteen<S: Simd>(simd: S, four: impl Fn([usize; 4]) -> [S::Float; 4], to: *mut f32) {
    let mut lanes = [0.0f32; 64];
    let lanes = lanes.as_mut_ptr();
    let mut parts = [simd.splat(0.0); 4];
    // SAFETY: `lanes` holds four of the widest vectors.
    unsafe {
        for (g, part) in parts.iter_mut().enumerate() {
            simd.store_interleaved(lanes, four([g, g + 4, g + 8, g + 12]));
            let [a, b, c, d] = [0, 1, 2, 3].map(|v| simd.load(lanes.add(v * S::WIDTH)));
            *part = simd.add(simd.add(a, b), simd.add(c, d));
        }
        simd.store_interleaved(lanes, parts);
        for row in (0..16).step_by(S::WIDTH) {
            let mut sum = simd.load(lanes.add(row));
            for part in 1..S::WIDTH / 4 {
                sum = simd.add(sum, simd.load(lanes.add(16 * part + row)));
            }
            simd.store(to.add(row), sum);
        }
    }
}

/// Whether all of `width` columns of rows are finite.
pub(super) struct Finite {
    pub rows: Rows,
    pub count: usize,
    pub width: usize,
}

impl Finite {
    /// # Safety
    /// The rows can be read.
    pub unsafe fn check<S: Simd>(self, simd: S) -> bool {
        simd.enter(self)
    }
}

impl Kernel for Finite {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> bool {
        let zero = simd.splat(0.0);
        let mut sum = zero;
        for row in 0..self.count {
            let from = self.rows.address.wrapping_add(row * self.rows.stride);
            let mut at = 0;
            while at < self.width {
                let left = self.width - at;
                // SAFETY: `left` elements of the row are left.
                let lanes = unsafe {
                    if left < S::WIDTH { simd.load_partial(from.add(at), left) } else { simd.load(from.add(at)) }
                };
                sum = simd.mul_add(lanes, zero, sum);
                at += S::WIDTH;
            }
        }
        let mut lanes = [0.0f32; 16];
        // SAFETY: `lanes` holds the widest vector.
        unsafe { simd.store(lanes.as_mut_ptr(), sum) };
        lanes.iter().all(|lane| !lane.is_nan())
    }
}

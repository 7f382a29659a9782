//! The product of `f32` tiles: every large sum of the `f32` kernels.

use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};

/// The initial value of a product's accumulators.
#[derive(Clone, Copy)]
pub(super) enum Start {
    Zero,
    /// The present value.
    Sum,
    /// The present value, times one factor per column.
    Scaled(*const f32),
}

/// `c[r][l] = start + sum over i of a[r][i] * b[i][l]`, in the order of `i`.
///
/// Elements of `a` are read one at a time and lie anywhere; rows of `b` and `c` are vectors.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub c: *mut f32,
    pub c_row: usize,
    pub a: *const f32,
    /// Elements from one row of `a` to the next, and from one `i` to the next.
    pub a_row: usize,
    pub a_inner: usize,
    pub b: *const f32,
    pub b_row: usize,
    pub rows: usize,
    pub inner: usize,
    /// A multiple of 16.
    pub lanes: usize,
    pub start: Start,
}

impl Product {
    /// # Safety
    /// `c` can be written and `b` read for `lanes` elements per row, and `a` at every row and `i`.
    pub unsafe fn run<S: Simd>(self, simd: S) {
        simd.enter(self);
    }

    /// All rows of `V` vectors of columns, from column `lane` on.
    #[inline(always)]
    unsafe fn columns<S: Simd, const V: usize, const R: usize>(self, simd: S, lane: usize) {
        let mut row = 0;
        while row + R <= self.rows {
            // SAFETY: rows and columns are within the tiles.
            unsafe { self.block::<S, V, R>(simd, row, lane) };
            row += R;
        }
        while row < self.rows {
            // SAFETY: as above.
            unsafe { self.block::<S, V, 1>(simd, row, lane) };
            row += 1;
        }
    }

    /// `R` rows of `V` vectors, their sums in registers.
    #[inline(always)]
    unsafe fn block<S: Simd, const V: usize, const R: usize>(self, simd: S, row: usize, lane: usize) {
        // SAFETY: the callers stay within `rows`, `inner` and `lanes`, for which `run` has its caller's word.
        unsafe {
            let c = self.c.add(row * self.c_row + lane);
            let mut sums = [[simd.splat(0.0); V]; R];
            let at = |r: usize, v: usize| c.add(r * self.c_row + v * S::WIDTH);
            if !matches!(self.start, Start::Zero) {
                for (r, row) in sums.iter_mut().enumerate() {
                    for (v, sum) in row.iter_mut().enumerate() {
                        *sum = simd.load(at(r, v));
                        if let Start::Scaled(factors) = self.start {
                            *sum = simd.mul(*sum, simd.load(factors.add(lane + v * S::WIDTH)));
                        }
                    }
                }
            }
            let mut a = self.a.add(row * self.a_row);
            let mut b = self.b.add(lane);
            for _ in 0..self.inner {
                let mut vectors = [simd.splat(0.0); V];
                for (v, vector) in vectors.iter_mut().enumerate() {
                    *vector = simd.load(b.add(v * S::WIDTH));
                }
                for (r, row) in sums.iter_mut().enumerate() {
                    let factor = simd.splat(a.add(r * self.a_row).read_unaligned());
                    for (sum, vector) in row.iter_mut().zip(vectors) {
                        *sum = simd.mul_add(factor, vector, *sum);
                    }
                }
                a = a.wrapping_add(self.a_inner);
                b = b.wrapping_add(self.b_row);
            }
            for (r, row) in sums.into_iter().enumerate() {
                for (v, sum) in row.into_iter().enumerate() {
                    simd.store(at(r, v), sum);
                }
            }
        }
    }
}

impl Kernel for Product {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut lane = 0;
        while lane < self.lanes {
            let vectors = (self.lanes - lane) / S::WIDTH;
            // SAFETY: these many vectors are left, and `lanes` is a multiple of every width.
            unsafe {
                // 16 sums and 5 operands want the 32 registers of the widest set.
                if vectors >= 4 && S::WIDTH == 16 {
                    self.columns::<S, 4, 4>(simd, lane);
                    lane += 4 * S::WIDTH;
                } else if vectors >= 2 {
                    self.columns::<S, 2, 4>(simd, lane);
                    lane += 2 * S::WIDTH;
                } else {
                    self.columns::<S, 1, 8>(simd, lane);
                    lane += S::WIDTH;
                }
            }
        }
    }
}

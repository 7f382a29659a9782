//! The loop under every instruction: full vectors, four at a time, then single ones, then a partial one.

use super::lanes::{Kernel, Simd};

/// What a loop does with the vector at column `i`.
pub(super) trait Body {
    /// # Safety
    /// Columns `i .. i + WIDTH` are in the range that the body was made for.
    unsafe fn full<S: Simd>(&self, simd: S, i: usize);
    /// # Safety
    /// Columns `i .. i + count` are in the range that the body was made for, and `count < WIDTH`.
    unsafe fn partial<S: Simd>(&self, simd: S, i: usize, count: usize);
}

/// Runs `body` over columns `0 .. length`, in order.
///
/// # Safety
/// The body was made for columns `0 .. length`.
pub(super) unsafe fn sweep<S: Simd, B: Body>(simd: S, length: usize, body: B) {
    simd.enter(Sweep { length, body });
}

struct Sweep<B> {
    length: usize,
    body: B,
}

impl<B: Body> Kernel for Sweep<B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (length, width) = (self.length, S::WIDTH);
        let mut i = 0;
        // SAFETY: `sweep`'s caller made the body for `0 .. length`; each loop checks that its vectors end by `length`.
        unsafe {
            while i + 4 * width <= length {
                self.body.full(simd, i);
                self.body.full(simd, i + width);
                self.body.full(simd, i + 2 * width);
                self.body.full(simd, i + 3 * width);
                i += 4 * width;
            }
            while i + width <= length {
                self.body.full(simd, i);
                i += width;
            }
            if i < length {
                self.body.partial(simd, i, length - i);
            }
        }
    }
}

/// Lanes that a loop reads: consecutive ones, or the same block of [`BLOCK`](super::scratch::BLOCK) equal lanes
/// again and again.
#[derive(Clone, Copy)]
pub(super) struct Input {
    pub base: *const f32,
    /// 1, or 0 for a block of equal lanes.
    pub step: usize,
}

impl Input {
    /// # Safety
    /// Lanes `i .. i + WIDTH` of the input can be read.
    #[inline(always)]
    pub unsafe fn load<S: Simd>(self, simd: S, i: usize) -> S::Float {
        // SAFETY: for step 1 this is the caller's promise; a block of equal lanes holds a full vector.
        unsafe { simd.load(self.base.add(i * self.step)) }
    }

    /// # Safety
    /// Lanes `i .. i + count` of the input can be read.
    #[inline(always)]
    pub unsafe fn load_partial<S: Simd>(self, simd: S, i: usize, count: usize) -> S::Float {
        // SAFETY: for step 1 this is the caller's promise; a block of equal lanes holds a full vector.
        unsafe { simd.load_partial(self.base.add(i * self.step), count) }
    }
}

/// Lanes that a loop writes.
#[derive(Clone, Copy)]
pub(super) struct Output {
    pub base: *mut f32,
    /// Columns before this one are written past the caches; a multiple of 16 (one cache line), and 0 unless `base`
    /// is a multiple of 64 bytes.
    pub stream_until: usize,
}

impl Output {
    /// # Safety
    /// Lanes `i .. i + WIDTH` of the output can be written, and `i` is a multiple of `WIDTH`.
    #[inline(always)]
    pub unsafe fn store<S: Simd>(self, simd: S, i: usize, lanes: S::Float) {
        // SAFETY: the caller's promise. Streaming: `base` is a multiple of 64 bytes and `i` of `WIDTH`.
        unsafe {
            if i < self.stream_until {
                simd.stream(self.base.add(i), lanes)
            } else {
                simd.store(self.base.add(i), lanes)
            }
        }
    }

    /// # Safety
    /// Lanes `i .. i + count` of the output can be written.
    #[inline(always)]
    pub unsafe fn store_partial<S: Simd>(self, simd: S, i: usize, lanes: S::Float, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { simd.store_partial(self.base.add(i), lanes, count) }
    }
}

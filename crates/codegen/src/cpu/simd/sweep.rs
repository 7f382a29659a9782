//! The loop under every instruction: full vectors, four at a time, then single ones, then a partial one.

use super::lanes::{Kernel, Simd};

/// What a loop does with the vector at column `i`.
pub(super) trait Body {
    /// Columns before this one are written with streaming stores.
    fn streamed(&self) -> usize;
    /// # Safety
    /// Columns `i .. i + WIDTH` are in the range that the body was made for, and before `streamed` if `STREAM`.
    unsafe fn full<S: Simd, const STREAM: bool>(&self, simd: S, i: usize);
    /// # Safety
    /// Columns `i .. i + count` are in the range that the body was made for, and `count < WIDTH`.
    unsafe fn partial<S: Simd>(&self, simd: S, i: usize, count: usize);
    /// Goes to the next row, where it was made for several.
    fn next_row(&mut self);
}

/// Runs `body` over columns `0 .. length`, in order.
///
/// # Safety
/// The body was made for columns `0 .. length`.
pub(super) unsafe fn sweep<S: Simd, B: Body>(simd: S, length: usize, body: B) {
    simd.enter(Sweep { rows: 1, length, body });
}

/// The same for several rows, one after the other: short rows would take less time than the way here.
///
/// # Safety
/// The body was made for columns `0 .. length` of this many rows.
pub(super) unsafe fn sweep_rows<S: Simd, B: Body>(simd: S, rows: usize, length: usize, body: B) {
    simd.enter(Sweep { rows, length, body });
}

struct Sweep<B> {
    rows: usize,
    length: usize,
    body: B,
}

impl<B: Body> Kernel for Sweep<B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let streamed = self.body.streamed().min(self.length);
        for row in 0..self.rows {
            if row > 0 {
                self.body.next_row();
            }
            // SAFETY: `sweep`'s caller made the body for `0 .. length`; the loops stay within the limits they are given.
            unsafe {
                let i = full_vectors::<S, B, true>(simd, &self.body, 0, streamed);
                let i = full_vectors::<S, B, false>(simd, &self.body, i, self.length);
                if i < self.length {
                    self.body.partial(simd, i, self.length - i);
                }
            }
        }
    }
}

/// Runs full vectors from `i` on while they end by `limit`; returns where they end. How a vector is stored is decided
/// outside of the loop, whose short instructions would feel a test.
///
/// # Safety
/// The body was made for columns `i .. limit`.
#[inline(always)]
unsafe fn full_vectors<S: Simd, B: Body, const STREAM: bool>(simd: S, body: &B, mut i: usize, limit: usize) -> usize {
    let width = S::WIDTH;
    // SAFETY: each loop checks that its vectors end by `limit`.
    unsafe {
        while i + 4 * width <= limit {
            body.full::<S, STREAM>(simd, i);
            body.full::<S, STREAM>(simd, i + width);
            body.full::<S, STREAM>(simd, i + 2 * width);
            body.full::<S, STREAM>(simd, i + 3 * width);
            i += 4 * width;
        }
        while i + width <= limit {
            body.full::<S, STREAM>(simd, i);
            i += width;
        }
    }
    i
}

/// Lanes that a loop reads: consecutive ones, or the same block of [`BLOCK`](super::scratch::BLOCK) equal lanes
/// again and again.
#[derive(Clone, Copy)]
pub(super) struct Input {
    base: *const f32,
    /// What column numbers are masked with: all ones, or 0 for a block of equal lanes.
    mask: usize,
    /// Lanes from one row to the next, where several rows are worked on.
    row: isize,
}

impl Input {
    /// Consecutive lanes.
    #[inline(always)]
    pub fn lanes(base: *const f32) -> Input {
        Input { base, mask: usize::MAX, row: 0 }
    }

    /// A block of equal lanes.
    #[inline(always)]
    pub fn block(base: *const f32) -> Input {
        Input { base, mask: 0, row: 0 }
    }

    /// The same input of several rows, `row` lanes apart.
    #[inline(always)]
    pub fn rows_apart(self, row: isize) -> Input {
        Input { row, ..self }
    }

    #[inline(always)]
    pub fn next_row(&mut self) {
        self.base = self.base.wrapping_offset(self.row);
    }

    /// Lanes from one row to the next.
    pub fn row(self) -> isize {
        self.row
    }

    /// The first lane.
    #[inline(always)]
    pub fn base(self) -> *const f32 {
        self.base
    }

    /// The same input from column `first` on.
    ///
    /// # Safety
    /// The input has that column.
    pub unsafe fn from(self, first: usize) -> Input {
        // SAFETY: the caller's promise; a block stays where it is.
        Input { base: unsafe { self.base.add(first & self.mask) }, ..self }
    }

    /// # Safety
    /// Lanes `i .. i + WIDTH` of the input can be read.
    #[inline(always)]
    pub unsafe fn load<S: Simd>(self, simd: S, i: usize) -> S::Float {
        // SAFETY: for consecutive lanes this is the caller's promise; a block of equal lanes holds a full vector.
        unsafe { simd.load(self.base.add(i & self.mask)) }
    }

    /// # Safety
    /// Lanes `i .. i + count` of the input can be read.
    #[inline(always)]
    pub unsafe fn load_partial<S: Simd>(self, simd: S, i: usize, count: usize) -> S::Float {
        // SAFETY: for consecutive lanes this is the caller's promise; a block of equal lanes holds a full vector.
        unsafe { simd.load_partial(self.base.add(i & self.mask), count) }
    }
}

/// Lanes that a loop writes.
#[derive(Clone, Copy)]
pub(super) struct Output {
    pub base: *mut f32,
    /// Columns before this one are written past the caches; a multiple of 16 (one cache line), and 0 unless `base`
    /// is a multiple of 64 bytes.
    pub stream_until: usize,
    /// Lanes from one row to the next, where several rows are worked on.
    pub row: isize,
}

impl Output {
    /// Through the caches.
    #[inline(always)]
    pub fn lanes(base: *mut f32) -> Output {
        Output { base, stream_until: 0, row: 0 }
    }

    #[inline(always)]
    pub fn next_row(&mut self) {
        self.base = self.base.wrapping_offset(self.row);
    }

    /// # Safety
    /// Lanes `i .. i + WIDTH` of the output can be written, `i` is a multiple of `WIDTH`, and if `STREAM` they end by
    /// `stream_until`.
    #[inline(always)]
    pub unsafe fn store<S: Simd, const STREAM: bool>(self, simd: S, i: usize, lanes: S::Float) {
        // SAFETY: the caller's promise. Streaming: `base` is a multiple of 64 bytes and `i` of `WIDTH`.
        unsafe { if STREAM { simd.stream(self.base.add(i), lanes) } else { simd.store(self.base.add(i), lanes) } }
    }

    /// # Safety
    /// Lanes `i .. i + count` of the output can be written.
    #[inline(always)]
    pub unsafe fn store_partial<S: Simd>(self, simd: S, i: usize, lanes: S::Float, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { simd.store_partial(self.base.add(i), lanes, count) }
    }
}

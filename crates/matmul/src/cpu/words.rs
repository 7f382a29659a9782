//! B as words of 32 bits, each a group of two bf16 or four bytes along `k`, in the panels that `tiles.rs` describes.

use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};

use super::Matrix;
use super::pack::transpose_words;
use super::tiles::{RIGHT_PANEL, SIDE, STEP, STEP_PANEL};

/// A block of B and where its panels go.
#[derive(Clone, Copy)]
pub(super) struct Words {
    /// From the block's first element on.
    pub from: Matrix,
    /// Inner indices.
    pub depth: usize,
    pub columns: usize,
    /// Bytes of an element: 1 or 2.
    pub element: usize,
    pub steps: usize,
    pub to: *mut u8,
}

/// Packs a block of B.
///
/// # Safety
/// The block's elements can be read, and its panels of `steps` steps, which hold `depth`, written.
pub(super) unsafe fn pack_right<S: Simd>(simd: S, words: Words) {
    simd.enter(words);
}

/// Columns of a tile.
const WIDE: usize = SIDE / 2;
/// Words of a tile's row, and rows of a tile.
const ROWS: usize = STEP / 4;

impl Kernel for Words {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let group = 4 / self.element;
        // SAFETY: `pack_right`'s caller lets us read the block and write the panels.
        unsafe {
            self.clear();
            let whole = self.depth / group;
            if self.from.strides.1 == 1 {
                for word in 0..whole {
                    self.interleave(simd, word);
                }
            } else if self.from.strides.0 == 1 {
                self.transpose(simd, whole);
            } else {
                (0..whole).for_each(|word| self.gather(word, 0, group));
            }
            if whole * group < self.depth {
                self.gather(whole, 0, self.depth - whole * group);
            }
        }
    }
}

impl Words {
    /// Zeros for what is missing: the last step if it is not full, the last panel if it is not.
    ///
    /// # Safety
    /// As [`pack_right`].
    #[inline(always)]
    unsafe fn clear(&self) {
        let panels = self.columns.div_ceil(SIDE);
        for panel in 0..panels {
            let first = match (self.columns < (panel + 1) * SIDE, self.depth * self.element < self.steps * STEP) {
                (true, _) => 0,
                (false, true) => self.steps - 1,
                (false, false) => continue,
            };
            // SAFETY: these steps are inside of the panel.
            unsafe {
                let from = self.to.add(panel * RIGHT_PANEL + first * STEP_PANEL);
                from.write_bytes(0, (self.steps - first) * STEP_PANEL);
            }
        }
    }

    /// Where a word of a column goes.
    #[inline(always)]
    fn place(&self, word: usize, column: usize) -> *mut u8 {
        let (panel, half) = (column / SIDE, column % SIDE / WIDE);
        let tile = panel * RIGHT_PANEL + word / ROWS * STEP_PANEL + half * (STEP_PANEL / 2);
        self.to.wrapping_add(tile + word % ROWS * STEP + column % WIDE * 4)
    }

    /// Rows of contiguous columns side by side.
    ///
    /// # Safety
    /// As [`pack_right`]; the word is whole.
    #[inline(always)]
    unsafe fn interleave<S: Simd>(&self, simd: S, word: usize) {
        let row_bytes = self.from.strides.0 * self.element;
        let group = 4 / self.element;
        let whole = self.columns / S::WIDTH * S::WIDTH;
        // SAFETY: rows of the word and columns below `columns` are there; a vector of columns is inside of a tile.
        unsafe {
            let from = self.from.base.add(word * group * row_bytes);
            for column in (0..whole).step_by(S::WIDTH) {
                let at = from.add(column * self.element);
                for row in 0..group {
                    simd.prefetch(at.wrapping_add((2 * group + row) * row_bytes));
                }
                let words = if group == 2 {
                    let low = simd.zero_extend(simd.load_half(at.cast()));
                    let high = simd.zero_extend(simd.load_half(at.add(row_bytes).cast()));
                    simd.or(low, simd.shift_left::<16>(high))
                } else {
                    let mask = simd.splat_int(0xff);
                    let byte = |row: usize| simd.sign_extend(simd.load_byte(at.add(row * row_bytes)));
                    let low = simd.or(simd.and(byte(0), mask), simd.shift_left::<8>(simd.and(byte(1), mask)));
                    let high = simd.or(simd.shift_left::<16>(simd.and(byte(2), mask)), simd.shift_left::<24>(byte(3)));
                    simd.or(low, high)
                };
                simd.store(self.place(word, column).cast(), simd.reinterpret(words));
            }
            if whole < self.columns {
                self.gather(word, whole, group);
            }
        }
    }

    /// Columns of contiguous words, tile by tile.
    ///
    /// # Safety
    /// As [`pack_right`]; `whole` words are whole.
    #[inline(always)]
    unsafe fn transpose<S: Simd>(&self, simd: S, whole: usize) {
        let column_bytes = self.from.strides.1 * self.element;
        for column in (0..self.columns).step_by(WIDE) {
            let columns = WIDE.min(self.columns - column);
            for word in (0..whole).step_by(ROWS) {
                let words = ROWS.min(whole - word);
                // SAFETY: words and columns are inside of the block, and a tile has room for them.
                unsafe {
                    let from = self.from.base.add(column * column_bytes + word * 4);
                    let to = self.place(word, column).cast();
                    transpose_words(simd, (from, column_bytes), (columns, words), to, WIDE);
                }
            }
        }
    }

    /// The first `count` elements of a word, from a column on, one by one.
    ///
    /// # Safety
    /// As [`pack_right`]; the elements are there.
    #[inline(always)]
    unsafe fn gather(&self, word: usize, first: usize, count: usize) {
        let group = 4 / self.element;
        for column in first..self.columns {
            for at in 0..count {
                let offset = (word * group + at) * self.from.strides.0 + column * self.from.strides.1;
                // SAFETY: the element is inside of the block, its place inside of the word.
                unsafe {
                    let from = self.from.base.add(offset * self.element);
                    std::ptr::copy_nonoverlapping(from, self.place(word, column).add(at * self.element), self.element);
                }
            }
        }
    }
}

//! Products of bf16 tiles: scores and their slopes, and values by probabilities.
//!
//! Rows are read in place where whole tiles of them lie there. Values are transposed, two keys to a word.
//! Blocks of 32 by 32 are summed in four tiles; what they hold beyond the last key, query or column is not used.

use deuteron_codegen::cpu::simd::amx::{Amx, TileShape, Tiles};
use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};
use deuteron_graph::Dtype;

use super::super::Attention;
use super::TILE;
use super::rows::{Stored, Turn};
use super::scratch::Places;

/// Rows, columns and inner elements of a block.
const BLOCK: usize = 32;

/// The tiles of this thread, if the kernel uses them.
pub(super) struct Engine {
    tiles: Option<Tiles>,
    lanes: usize,
    /// The width, up to whole blocks.
    inner: usize,
}

impl Engine {
    /// For this many lanes. Without tiles if the caller or the storage type has none.
    pub fn new<S: Simd>(attention: &Attention, amx: Option<Amx>, lanes: usize) -> Engine {
        let narrow = attention.dtype == Dtype::Bf16 && attention.kv == Dtype::Bf16;
        let amx = if narrow && S::WIDTH == 16 { amx } else { None };
        let inner = attention.width.next_multiple_of(BLOCK);
        Engine { tiles: amx.map(|amx| amx.configure(&[TileShape::FULL; 8])), lanes, inner }
    }

    /// Packs a transposed tile of bf16 numbers for [`Engine::scores`], if there are tiles.
    ///
    /// # Safety
    /// `from` holds `padded` rows, an even number, and `to` half a row for each column of whole blocks.
    pub unsafe fn pack<S: Simd>(&self, simd: S, from: *const f32, padded: usize, to: *mut u32) {
        if self.tiles.is_some() {
            simd.enter(PairRows { from, to, width: padded, inner: self.inner, lanes: self.lanes });
        }
    }

    /// `rows` times a packed tile, into `to`; `false` if there are no tiles. `copy` has room for the rows.
    ///
    /// # Safety
    /// The rows can be read; the tile was packed by [`Engine::pack`]; `to` is a tile.
    pub unsafe fn scores<S: Simd>(
        &self,
        simd: S,
        rows: Stored,
        packed: *const u32,
        to: *mut f32,
        copy: *mut u32,
    ) -> bool {
        let Some(tiles) = &self.tiles else { return false };
        let count = rows.rows.next_multiple_of(BLOCK);
        let (address, stride) = if rows.width == self.inner && rows.rows == count {
            (rows.address.cast_const(), 2 * rows.stride)
        } else {
            let copy = copy.cast::<u16>();
            simd.enter(CopyRows { from: rows, to: copy, inner: self.inner, rows: count });
            (copy.cast_const().cast(), 2 * self.inner)
        };
        for row in (0..count).step_by(BLOCK) {
            for lane in (0..self.lanes).step_by(BLOCK) {
                // SAFETY: whole blocks of rows can be read; the packed tile and `to` hold whole blocks.
                unsafe {
                    let block = TileBlock {
                        c: to.add(row * TILE + lane),
                        a: address.add(row * stride),
                        a_stride: stride,
                        b: packed.add(lane),
                        inner: self.inner,
                    };
                    block.run(tiles, false);
                }
            }
        }
        true
    }

    /// Where probabilities go as pairs, if there are tiles.
    pub fn pairs(&self, places: Places) -> Option<*mut u32> {
        self.tiles.as_ref().map(|_| places.weight_pairs)
    }

    /// Adds the product of probabilities and values to the scaled sums; `false` if there are no tiles.
    ///
    /// # Safety
    /// The values can be read; the probabilities are written as pairs.
    pub unsafe fn values<S: Simd>(&self, simd: S, values: Stored, places: Places) -> bool {
        let Some(tiles) = &self.tiles else { return false };
        let keys = values.rows.next_multiple_of(BLOCK);
        // SAFETY: a tile of values fits, transposed and not; sums hold whole blocks.
        unsafe {
            simd.enter(PairKeys { from: values, to: places.values, inner: self.inner, pairs: keys / 2 });
            let turn = Turn {
                from: places.values,
                from_stride: self.inner,
                to: places.value_pairs.cast(),
                to_stride: TILE / 2,
                rows: keys / 2,
                columns: self.inner,
            };
            turn.run(simd);
            simd.enter(Scale { sums: places.sums, factor: places.factor, rows: values.width, lanes: self.lanes });
            for row in (0..self.inner).step_by(BLOCK) {
                for lane in (0..self.lanes).step_by(BLOCK) {
                    let block = TileBlock {
                        c: places.sums.add(row * TILE + lane),
                        a: places.value_pairs.add(row * TILE / 2).cast_const().cast(),
                        a_stride: 2 * TILE,
                        b: places.weight_pairs.add(lane),
                        inner: keys,
                    };
                    block.run(tiles, true);
                }
            }
        }
        true
    }
}

/// 32 rows by 32 lanes; rows of `b` and `c` hold [`TILE`] words.
struct TileBlock {
    c: *mut f32,
    a: *const u8,
    a_stride: usize,
    b: *const u32,
    inner: usize,
}

impl TileBlock {
    /// # Safety
    /// `a` and `b` can be read and `c` written for whole blocks.
    unsafe fn run(self, tiles: &Tiles, add: bool) {
        const WORDS: usize = 4 * TILE;
        let c = self.c.cast::<u8>();
        let [right, below] = [c.wrapping_add(64), c.wrapping_add(16 * WORDS)];
        let corner = below.wrapping_add(64);
        // SAFETY: all eight tiles are whole, and all blocks are there.
        unsafe {
            if add {
                tiles.load::<0>(c, WORDS);
                tiles.load::<1>(right, WORDS);
                tiles.load::<2>(below, WORDS);
                tiles.load::<3>(corner, WORDS);
            } else {
                tiles.zero::<0>();
                tiles.zero::<1>();
                tiles.zero::<2>();
                tiles.zero::<3>();
            }
            for at in (0..self.inner).step_by(BLOCK) {
                let b = self.b.add(at / 2 * TILE).cast::<u8>();
                tiles.load::<4>(self.a.add(2 * at), self.a_stride);
                tiles.load::<6>(b, WORDS);
                tiles.dot_bf16::<0, 4, 6>();
                tiles.load::<7>(b.add(64), WORDS);
                tiles.dot_bf16::<1, 4, 7>();
                tiles.load::<5>(self.a.add(16 * self.a_stride + 2 * at), self.a_stride);
                tiles.dot_bf16::<2, 5, 6>();
                tiles.dot_bf16::<3, 5, 7>();
            }
            tiles.store::<0>(c, WORDS);
            tiles.store::<1>(right, WORDS);
            tiles.store::<2>(below, WORDS);
            tiles.store::<3>(corner, WORDS);
        }
    }
}

/// Rows of `f32` that are bf16 numbers, two to a word: `to[r] = (from[2 r], from[2 r + 1])`; zeros from `width` on.
struct PairRows {
    from: *const f32,
    to: *mut u32,
    width: usize,
    inner: usize,
    lanes: usize,
}

impl Kernel for PairRows {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for row in (0..self.inner).step_by(2) {
            for lane in (0..self.lanes).step_by(S::WIDTH) {
                // SAFETY: `width` is even, so that both rows or none are there; tiles hold whole vectors.
                unsafe {
                    let mut pair = simd.splat_int(0);
                    if row < self.width {
                        let low = simd.bits(simd.load(self.from.add(row * TILE + lane)));
                        let high = simd.bits(simd.load(self.from.add((row + 1) * TILE + lane)));
                        pair = simd.or(simd.shift_right::<16>(low), simd.and(high, simd.splat_int(-0x1_0000)));
                    }
                    simd.store(self.to.add(row / 2 * TILE + lane).cast(), simd.reinterpret(pair));
                }
            }
        }
    }
}

/// Rows with zeros up to whole blocks.
struct CopyRows {
    from: Stored,
    to: *mut u16,
    inner: usize,
    rows: usize,
}

impl Kernel for CopyRows {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for row in 0..self.rows {
            for at in (0..self.inner).step_by(S::WIDTH) {
                // SAFETY: `halves` reads what is there, and `to` holds whole blocks.
                unsafe {
                    let half = simd.truncate(halves(simd, self.from, row, at));
                    simd.store_half(self.to.add(row * self.inner + at), half);
                }
            }
        }
    }
}

/// Two rows of values to a row of words, zeros up to whole blocks: the earlier key in the lower half.
struct PairKeys {
    from: Stored,
    to: *mut f32,
    inner: usize,
    pairs: usize,
}

impl Kernel for PairKeys {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let whole = self.from.width == self.inner;
        for pair in 0..self.pairs {
            if whole && 2 * pair + 1 < self.from.rows {
                for at in (0..self.inner).step_by(S::WIDTH) {
                    let low = self.from.address.wrapping_add(2 * (2 * pair * self.from.stride + at));
                    let high = low.wrapping_add(2 * self.from.stride);
                    // SAFETY: both rows are there in full.
                    unsafe {
                        let low = simd.zero_extend(simd.load_half(low.cast()));
                        let high = simd.shift_left::<16>(simd.zero_extend(simd.load_half(high.cast())));
                        simd.store(self.to.add(pair * self.inner + at), simd.reinterpret(simd.or(low, high)));
                    }
                }
                continue;
            }
            for at in (0..self.inner).step_by(S::WIDTH) {
                // SAFETY: as for `CopyRows`.
                unsafe {
                    let low = halves(simd, self.from, 2 * pair, at);
                    let high = simd.shift_left::<16>(halves(simd, self.from, 2 * pair + 1, at));
                    simd.store(self.to.add(pair * self.inner + at), simd.reinterpret(simd.or(low, high)));
                }
            }
        }
    }
}

/// A vector of 16-bit elements of a row, zeros beyond its width and beyond the last row.
///
/// # Safety
/// The rows can be read.
#[inline(always)]
unsafe fn halves<S: Simd>(simd: S, from: Stored, row: usize, at: usize) -> S::Int {
    let left = if row < from.rows { from.width.saturating_sub(at) } else { 0 };
    let address = from.address.wrapping_add(2 * (row * from.stride + at));
    let mut elements = [0u16; 16];
    // SAFETY: `left` elements are there, of which at most a vector is read.
    unsafe {
        if left >= S::WIDTH {
            return simd.zero_extend(simd.load_half(address.cast()));
        }
        std::ptr::copy_nonoverlapping(address, elements.as_mut_ptr().cast(), 2 * left);
        simd.zero_extend(simd.load_half(elements.as_ptr()))
    }
}

/// Multiplies sums by the factor of their lane.
struct Scale {
    sums: *mut f32,
    factor: *const f32,
    rows: usize,
    lanes: usize,
}

impl Kernel for Scale {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for lane in (0..self.lanes).step_by(S::WIDTH) {
            // SAFETY: tiles hold whole vectors.
            unsafe {
                // Maxima seldom move after the first tile.
                if std::slice::from_raw_parts(self.factor.add(lane), S::WIDTH).iter().all(|&factor| factor == 1.0) {
                    continue;
                }
                let factor = simd.load(self.factor.add(lane));
                for row in 0..self.rows {
                    let at = self.sums.add(row * TILE + lane);
                    simd.store(at, simd.mul(factor, simd.load(at)));
                }
            }
        }
    }
}

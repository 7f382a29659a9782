//! Philox4x32-10, the counter-based generator of dropout (Salmon et al., SC'11).
//!
//! Element `e` takes word `e % 4` of the block whose counter is `(low32(e / 4), high32(e / 4), 0, 0)` and whose key is
//! `(seed, offset)`. It is kept if its word is at least the threshold. Blocks are computed a vector at a time.

use super::lanes::{Arithmetic, Kernel, Simd};

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Elements that [`keep`] may write beyond the ones asked for: it writes whole blocks of whole vectors.
pub const SLACK: usize = 4 * 16 + 3;

/// Which elements are kept.
#[derive(Clone, Copy)]
pub struct Keep {
    /// (seed, offset)
    pub key: [u32; 2],
    /// words below it are dropped
    pub threshold: u32,
}

/// Writes 1 or 0 for `length` elements from `first` on; the first of them is at index `first % 4` of `to`.
///
/// # Safety
/// `length + SLACK` elements at `to` can be written.
pub unsafe fn keep<S: Simd>(simd: S, keep: Keep, first: u64, length: usize, to: *mut f32) {
    simd.enter(Blocks { keep, block: first / 4, elements: (first % 4) as usize + length, to });
}

struct Blocks {
    keep: Keep,
    block: u64,
    elements: usize,
    to: *mut f32,
}

impl Kernel for Blocks {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let threshold = simd.splat_int(self.keep.threshold as i32);
        let key = self.keep.key.map(|word| simd.splat_int(word as i32));
        let mut done = 0;
        while done < self.elements {
            let words = block_words(simd, key, counters(simd, self.block + done as u64 / 4));
            let mut kept = [simd.splat(0.0); 4];
            for k in 0..4 {
                let below = simd.less_unsigned(words[k], threshold);
                kept[k] = simd.select(below, simd.splat(0.0), simd.splat(1.0));
            }
            // SAFETY: `done < elements <= length + 3`, so that at most `4 * WIDTH <= 64` elements are written from
            // there: within `length + SLACK`.
            unsafe { simd.store_interleaved(self.to.add(done), kept) }
            done += 4 * S::WIDTH;
        }
    }
}

/// The two counter words of `WIDTH` blocks from `block` on.
#[inline(always)]
fn counters<S: Simd>(simd: S, block: u64) -> [S::Int; 2] {
    let (low, high) = (block as u32, (block >> 32) as u32);
    let lows = simd.add_int(simd.splat_int(low as i32), simd.count_up());
    // Lanes after which the low word has wrapped: all of them, none, or those from `wraps` on.
    let wraps = (u64::from(u32::MAX - low) + 1).min(S::WIDTH as u64) as usize;
    let highs =
        simd.select_int(simd.first(wraps), simd.splat_int(high as i32), simd.splat_int(high.wrapping_add(1) as i32));
    [lows, highs]
}

/// The four words of each block: counters `counter`, then zeros.
///
/// Products of 32-bit lanes are those of even lanes, so even and odd blocks go through the rounds apart. What odd lanes hold meanwhile does
/// not count: a product is its own low half.
#[inline(always)]
pub(in crate::cpu) fn block_words<S: Arithmetic>(simd: S, key: [S::Int; 2], counter: [S::Int; 2]) -> [S::Int; 4] {
    let zero = simd.splat_int(0);
    let mut even = [counter[0], counter[1], zero, zero];
    let mut odd = [simd.odd_to_even(counter[0]), simd.odd_to_even(counter[1]), zero, zero];
    let mut key = key;
    for _ in 0..ROUNDS {
        even = round(simd, even, key);
        odd = round(simd, odd, key);
        key = [0, 1].map(|word| simd.add_int(key[word], simd.splat_int(WEYL[word] as i32)));
    }
    [0, 1, 2, 3].map(|word| simd.alternate(even[word], odd[word]))
}

/// A round of the blocks in even lanes.
#[inline(always)]
fn round<S: Arithmetic>(simd: S, words: [S::Int; 4], key: [S::Int; 2]) -> [S::Int; 4] {
    let a = simd.mul_even(words[0], simd.splat_int(MULTIPLIERS[0] as i32));
    let b = simd.mul_even(words[2], simd.splat_int(MULTIPLIERS[1] as i32));
    let first = simd.xor(simd.xor(simd.odd_to_even(b), words[1]), key[0]);
    let third = simd.xor(simd.xor(simd.odd_to_even(a), words[3]), key[1]);
    [first, b, third, a]
}

/// The words of one block, a number at a time: what tests of this crate and of attention compare with.
pub fn block_words_of_one(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let (mut words, mut key) = (counter, key);
    for _ in 0..ROUNDS {
        let a = u64::from(words[0]) * u64::from(MULTIPLIERS[0]);
        let b = u64::from(words[2]) * u64::from(MULTIPLIERS[1]);
        words = [(b >> 32) as u32 ^ words[1] ^ key[0], b as u32, (a >> 32) as u32 ^ words[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    words
}

//! The online softmax of a tile: keys are rows, a query is a lane.

use std::f32::consts::{LN_2, LOG2_E};

use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};
use deuteron_codegen::cpu::simd::math::{exp, exp2, log};

use super::TILE;
use super::decode::across;

/// By how much, as a power of 2, scores may exceed the maximum before it is updated: `2^8` is harmless in `f32`, and earlier sums
/// seldom have to be scaled.
const SLACK: f32 = 8.0;

/// Which keys of a tile a query does not see: row `k` is hidden from lanes below `k - first`.
#[derive(Clone, Copy)]
pub(super) struct Diagonal {
    /// Keys of the tile that its first query sees, less one; below 0 if it sees none.
    pub first: isize,
}

impl Diagonal {
    /// Of `WIDTH` lanes from `lane` on, how many do not see key `row`.
    #[inline(always)]
    pub fn hidden<S: Simd>(self, row: usize, lane: usize) -> usize {
        (row as isize - self.first - lane as isize).clamp(0, S::WIDTH as isize) as usize
    }
}

/// `-2^30`. A maximum below it is rounded to multiples of 128, and what is cut off may overflow as a power of 2.
const DEEPEST: f32 = -1_073_741_824.0;

/// Maxima below it, as masks make them, are kept beside the sum of a row: their logsumexp would have few digits left for the sum, beside -1e9 none.
pub(super) const FAR: f32 = -8192.0;

/// What the gradient takes of a row, by which its probabilities are those of forward: its logsumexp, or a maximum that is below [`FAR`], in forward's own
/// units; and 1 over its sum. Infinity and 0 where the row has seen nothing.
pub(super) fn statistics(maximum: f32, sum: f32, logsumexp: f32) -> [f32; 2] {
    match sum == 0.0 {
        true => [f32::INFINITY, 0.0],
        false => [if maximum < FAR { maximum } else { logsumexp }, 1.0 / sum],
    }
}

/// The smallest finite mask that is added as it is: what is smaller, such as the smallest `f32`, would overflow to `-inf` in powers of 2, and a
/// row whose keys are all masked by it would be empty instead of even.
const LOWEST: f32 = f32::MIN / 2.0;

/// A mask whose finite values are at least [`LOWEST`].
#[inline(always)]
pub(super) fn floored<S: Simd>(simd: S, mask: S::Float) -> S::Float {
    let never = simd.splat(f32::NEG_INFINITY);
    simd.select(simd.equal(mask, never), never, simd.greater(simd.splat(LOWEST), mask))
}

/// Masks scores: `s = scale * s + mask`, and `-inf` where hidden.
pub(super) struct Shift {
    pub scores: *mut f32,
    pub keys: usize,
    pub lanes: usize,
    pub scale: f32,
    /// A tile like the scores, to add.
    pub mask: Option<*const f32>,
    pub diagonal: Option<Diagonal>,
}

impl Shift {
    /// # Safety
    /// The tiles hold `keys` rows of `lanes`, a multiple of 16.
    pub unsafe fn run<S: Simd>(self, simd: S) {
        simd.enter(self);
    }
}

impl Kernel for Shift {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (scale, never) = (simd.splat(self.scale), simd.splat(f32::NEG_INFINITY));
        for row in 0..self.keys {
            for lane in (0..self.lanes).step_by(S::WIDTH) {
                let at = row * TILE + lane;
                // SAFETY: within the tiles.
                unsafe {
                    let mut s = simd.mul(scale, simd.load(self.scores.add(at)));
                    if let Some(mask) = self.mask {
                        s = simd.add(s, floored(simd, simd.load(mask.add(at))));
                    }
                    if let Some(diagonal) = self.diagonal {
                        s = simd.select(simd.first(diagonal.hidden::<S>(row, lane)), never, s);
                    }
                    simd.store(self.scores.add(at), s);
                }
            }
        }
    }
}

/// Converts scores to `exp(scale * s - maximum)` and updates the maximum and the sum of every lane.
///
/// In powers of 2: the maximum is that of `scale * s / ln 2`. It may be too small by up to [`SLACK`].
pub(super) struct Softmax {
    pub scores: *mut f32,
    pub keys: usize,
    pub lanes: usize,
    pub scale: f32,
    pub maximum: *mut f32,
    pub sum: *mut f32,
    /// Receives the factor of earlier sums.
    pub factor: *mut f32,
    /// A tile that multiplies the results, after they are summed.
    pub kept: Option<*const f32>,
    /// Gets the results as pairs of bf16 instead: element `2 q + k % 2` of row `k / 2`, up to a multiple of 32 keys.
    pub pairs: Option<*mut u32>,
}

impl Softmax {
    /// # Safety
    /// The tiles hold `keys` rows of `lanes`, a multiple of 16; `pairs` half the rows, rounded up to 16.
    pub unsafe fn run<S: Simd>(self, simd: S) {
        simd.enter(self);
    }
}

impl Kernel for Softmax {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let scale = simd.splat(self.scale * LOG2_E);
        for lane in (0..self.lanes).step_by(S::WIDTH) {
            // SAFETY: within the tiles.
            unsafe {
                let column = self.scores.add(lane);
                let before = simd.load(self.maximum.add(lane));
                let mut maxima = [simd.splat(f32::NEG_INFINITY); 4];
                let fours = self.keys / 4 * 4;
                for row in (0..fours).step_by(4) {
                    for (k, most) in maxima.iter_mut().enumerate() {
                        let s = simd.mul(scale, simd.load(column.add((row + k) * TILE)));
                        *most = simd.greater(*most, s);
                    }
                }
                for row in fours..self.keys {
                    let s = simd.mul(scale, simd.load(column.add(row * TILE)));
                    maxima[0] = simd.greater(maxima[0], s);
                }
                let pair = [simd.greater(maxima[0], maxima[1]), simd.greater(maxima[2], maxima[3])];
                let most = simd.greater(pair[0], pair[1]);
                let grows = simd.less(simd.add(before, simd.splat(SLACK)), most);
                let maximum = simd.select(grows, most, before);
                // A lane that has seen only -inf: any finite shift gives the zeros it needs.
                let unseen = simd.equal(maximum, simd.splat(f32::NEG_INFINITY));
                let shift = simd.select(unseen, simd.splat(0.0), maximum);
                // Exactly 1 where the maximum stays, so that no error piles up over the tiles.
                let factor = exp(simd, simd.mul(simd.sub(before, shift), simd.splat(LN_2)));
                let less = simd.neg(shift);
                let is_deep = across(simd, shift, f32::min) < DEEPEST;
                let power = Power { scale, shift, less, is_deep };
                let mut sums = [simd.splat(0.0); 2];
                if let Some(pairs) = self.pairs {
                    let zero = simd.splat(0.0);
                    for row in (0..self.keys.next_multiple_of(32)).step_by(2) {
                        let mut two = [zero; 2];
                        for k in 0..2 {
                            if row + k < self.keys {
                                let at = (row + k) * TILE;
                                let p = power.of(simd, simd.load(column.add(at)));
                                sums[k] = simd.add(sums[k], p);
                                two[k] = self.keep(simd, p, at + lane);
                            }
                        }
                        let to = pairs.add(row / 2 * TILE + lane).cast::<f32>();
                        simd.store(to, simd.reinterpret(pair_of(simd, two)));
                    }
                } else {
                    for row in 0..self.keys {
                        let at = row * TILE;
                        let p = power.of(simd, simd.load(column.add(at)));
                        sums[0] = simd.add(sums[0], p);
                        simd.store(column.add(at), self.keep(simd, p, at + lane));
                    }
                }
                let sum = simd.mul_add(simd.load(self.sum.add(lane)), factor, simd.add(sums[0], sums[1]));
                simd.store(self.maximum.add(lane), maximum);
                simd.store(self.sum.add(lane), sum);
                simd.store(self.factor.add(lane), factor);
            }
        }
    }
}

/// `2^(scale * s - shift)`.
#[derive(Clone, Copy)]
pub(super) struct Power<S: Simd> {
    scale: S::Float,
    shift: S::Float,
    /// `-shift`
    less: S::Float,
    /// Whether the shift of any lane is below [`DEEPEST`].
    is_deep: bool,
}

impl<S: Simd> Power<S> {
    /// Of one shift for all lanes.
    #[inline(always)]
    pub fn new(simd: S, scale: f32, shift: f32) -> Power<S> {
        let [scale, to, less] = [scale, shift, -shift].map(|x| simd.splat(x));
        Power { scale, shift: to, less, is_deep: shift < DEEPEST }
    }

    #[inline(always)]
    pub fn of(&self, simd: S, s: S::Float) -> S::Float {
        let fused = exp2(simd, simd.mul_add(s, self.scale, self.less));
        if !self.is_deep {
            return fused;
        }
        // The product is rounded as that of the maximum was: 1 where the score is the maximum.
        let rounded = exp2(simd, simd.add(simd.mul(s, self.scale), self.less));
        simd.select(simd.less(self.shift, simd.splat(DEEPEST)), rounded, fused)
    }
}

impl Softmax {
    /// # Safety
    /// `at` is within the tile.
    #[inline(always)]
    unsafe fn keep<S: Simd>(&self, simd: S, p: S::Float, at: usize) -> S::Float {
        match self.kept {
            // SAFETY: the caller's promise.
            Some(kept) => simd.mul(p, unsafe { simd.load(kept.add(at)) }),
            None => p,
        }
    }
}

/// Two vectors as pairs of bf16, the first in the lower halves: to the nearest, ties away from 0. NaN may come out as
/// another number: the sum that the results are divided by holds it as well.
#[inline(always)]
fn pair_of<S: Simd>(simd: S, [low, high]: [S::Float; 2]) -> S::Int {
    let [low, high] = [low, high].map(|x| simd.add_int(simd.bits(x), simd.splat_int(0x8000)));
    simd.or(simd.shift_right::<16>(low), simd.and(high, simd.splat_int(-0x1_0000)))
}

/// Finishes the softmax of a tile: `o / sum`, and the [`statistics`] of its rows.
pub(super) struct Divide {
    /// `[width][TILE]`, a query per lane.
    pub sums: *mut f32,
    pub width: usize,
    pub lanes: usize,
    /// Gets 1 over the sum.
    pub maximum: *mut f32,
    /// Gets the logsumexp, or a maximum that is far below 0.
    pub sum: *mut f32,
}

impl Divide {
    /// # Safety
    /// The tiles hold their rows of `lanes`, a multiple of 16.
    pub unsafe fn run<S: Simd>(self, simd: S) {
        simd.enter(self);
    }
}

impl Kernel for Divide {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for lane in (0..self.lanes).step_by(S::WIDTH) {
            // SAFETY: within the tiles.
            unsafe {
                let (sum, zero) = (simd.load(self.sum.add(lane)), simd.splat(0.0));
                let unseen = simd.equal(sum, zero);
                let inverse = simd.div(simd.splat(1.0), sum);
                for row in 0..self.width {
                    let at = self.sums.add(row * TILE + lane);
                    simd.store(at, simd.select(unseen, zero, simd.mul(inverse, simd.load(at))));
                }
                let maximum = simd.load(self.maximum.add(lane));
                let logsumexp = simd.mul_add(maximum, simd.splat(LN_2), log(simd, sum));
                let first = simd.select(simd.less(maximum, simd.splat(FAR)), maximum, logsumexp);
                simd.store(self.sum.add(lane), simd.select(unseen, simd.splat(f32::INFINITY), first));
                simd.store(self.maximum.add(lane), simd.select(unseen, zero, inverse));
            }
        }
    }
}

//! Products of signed bytes without byte instructions, on the layout of `tiles.rs`.
//!
//! Bytes are multiplied as `f32`. The sum of two steps is at most 2^21: exact, and what [`Simd::to_int`] takes. Those are added
//! up as `i32`.

use deuteron_codegen::cpu::simd::format::SignedByte;
use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};

use super::tiles::{Machine, PanelPair, SIDE, STEP, STEP_PANEL};

/// Rows of sums in registers.
const ROWS: usize = 4;

/// Steps whose sums are exact.
const EXACT_STEPS: usize = 2;
/// Groups of four bytes in a step.
const GROUPS: usize = STEP / 4;

/// The vectors at hand.
#[derive(Clone, Copy)]
pub(super) struct PlainBytes<S>(pub S);

impl<S: Simd> Machine for PlainBytes<S> {
    type Element = SignedByte;
    const WHOLE: bool = true;
    const FLIP: u8 = 0;
    type Session = S;

    fn begin(self) -> S {
        self.0
    }

    unsafe fn prepare(self, _: *mut u8, _: usize) {}

    unsafe fn multiply(simd: &S, pair: PanelPair, sums: *mut f32, stride: usize, first: bool) {
        simd.enter(Multiply { pair, sums, stride, first });
    }
}

struct Multiply {
    pair: PanelPair,
    sums: *mut f32,
    stride: usize,
    first: bool,
}

impl Kernel for Multiply {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for row in (0..self.pair.rows).step_by(ROWS) {
            for column in (0..SIDE).step_by(S::WIDTH) {
                // SAFETY: panels have 32 rows and columns, of which these are some.
                unsafe { self.block(simd, row, column) };
            }
        }
    }
}

impl Multiply {
    /// Four rows against a vector of columns.
    ///
    /// # Safety
    /// The promise of [`Machine::multiply`]; row and column are below 32.
    #[inline(always)]
    unsafe fn block<S: Simd>(&self, simd: S, row: usize, column: usize) {
        let PanelPair { left, right, steps, .. } = self.pair;
        let mut whole = [simd.splat_int(0); ROWS];
        // SAFETY: all addresses are inside of what the caller promises.
        unsafe {
            let left = left.add(row * STEP);
            let right = right.add(column / 16 * (STEP_PANEL / 2) + 4 * (column % 16));
            for first in (0..steps).step_by(EXACT_STEPS) {
                let mut tile = [simd.splat(0.0); ROWS];
                let groups = EXACT_STEPS.min(steps - first) * GROUPS;
                for group in 0..groups {
                    let (step, group) = (first + group / GROUPS, group % GROUPS);
                    let four = simd.bits(simd.load(right.add(step * STEP_PANEL + group * STEP).cast()));
                    let lanes = [
                        simd.shift_right_signed::<24>(simd.shift_left::<24>(four)),
                        simd.shift_right_signed::<24>(simd.shift_left::<16>(four)),
                        simd.shift_right_signed::<24>(simd.shift_left::<8>(four)),
                        simd.shift_right_signed::<24>(four),
                    ];
                    for (byte, lanes) in lanes.into_iter().enumerate() {
                        let lanes = simd.to_float(lanes);
                        for (next, sum) in tile.iter_mut().enumerate() {
                            let a = *left.add(step * STEP_PANEL + next * STEP + 4 * group + byte) as i8;
                            *sum = simd.mul_add(simd.splat(f32::from(a)), lanes, *sum);
                        }
                    }
                }
                for (whole, sum) in whole.iter_mut().zip(tile) {
                    *whole = simd.add_int(*whole, simd.to_int(sum));
                }
            }
            for (next, mut whole) in whole.into_iter().enumerate() {
                let to = self.sums.add((row + next) * self.stride + column);
                if !self.first {
                    whole = simd.add_int(whole, simd.bits(simd.load(to)));
                }
                simd.store(to, simd.reinterpret(whole));
            }
        }
    }
}

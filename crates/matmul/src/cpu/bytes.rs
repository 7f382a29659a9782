//! Products of signed bytes with AVX-512 VNNI, whose instruction multiplies unsigned bytes with signed ones.
//!
//! A is packed with its sign bits flipped, which adds 128: `sum (a + 128) b = sum a b + 128 sum b`. The second term is
//! noted behind each panel of B and taken off the sums. Both wrap around, so their difference is exact.

use std::arch::x86_64::*;

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::simd::format::SignedByte;

use super::tiles::{Machine, NOTES, PanelPair, RIGHT_PANEL, STEP, STEP_PANEL};

/// Proof that this CPU has AVX-512 with VNNI. Only `detect` makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Vnni(());

impl Vnni {
    /// `isa`: what the caller wants to be used.
    pub fn detect(isa: Isa) -> Option<Vnni> {
        (isa.is_avx512() && is_x86_feature_detected!("avx512vnni")).then_some(Vnni(()))
    }
}

/// Rows of sums in registers: 16 of them with two vectors of columns.
const ROWS: usize = 8;

impl Machine for Vnni {
    type Element = SignedByte;
    const WHOLE: bool = true;
    const FLIP: u8 = 0x80;
    type Session = Vnni;

    fn begin(self) -> Vnni {
        self
    }

    unsafe fn prepare(self, right: *mut u8, steps: usize) {
        // SAFETY: `self` proves the features; the caller's promise for the panel.
        unsafe { note_columns(right, steps) }
    }

    unsafe fn multiply(_: &Vnni, pair: PanelPair, sums: *mut f32, stride: usize, first: bool) {
        for row in (0..pair.rows).step_by(ROWS) {
            // SAFETY: the session proves the features; the caller's promise for panels and sums.
            unsafe {
                let left = pair.left.add(row * STEP);
                multiply_rows(PanelPair { left, ..pair }, sums.add(row * stride).cast(), stride, first);
            }
        }
    }
}

/// Notes `128 sum b` of each column.
///
/// # Safety
/// The features are there; `right` is a panel of this many steps with room for its notes.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn note_columns(right: *mut u8, steps: usize) {
    let factor = _mm512_set1_epi8(i8::MIN); // 128 as an unsigned byte
    let mut sums = [_mm512_setzero_si512(); 2];
    // SAFETY: groups of the panel's steps are read; the notes have room for 32 numbers.
    unsafe {
        for step in 0..steps {
            for (half, sum) in sums.iter_mut().enumerate() {
                let tile = right.add(step * STEP_PANEL + half * (STEP_PANEL / 2));
                for group in 0..STEP / 4 {
                    *sum = _mm512_dpbusd_epi32(*sum, factor, _mm512_loadu_si512(tile.add(group * STEP).cast()));
                }
            }
        }
        let notes = right.add(RIGHT_PANEL - NOTES);
        _mm512_storeu_si512(notes.cast(), sums[0]);
        _mm512_storeu_si512(notes.add(STEP).cast(), sums[1]);
    }
}

/// Eight rows against a panel of B.
///
/// # Safety
/// The features are there; `left` is a row of a panel that has seven more, `sums` has eight rows of 32.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn multiply_rows(pair: PanelPair, sums: *mut i32, stride: usize, first: bool) {
    let PanelPair { left, right, steps, notes, .. } = pair;
    // SAFETY: all addresses are inside of what the caller promises.
    unsafe {
        let zero = _mm512_setzero_si512();
        let notes = notes
            .map_or([zero; 2], |notes| [_mm512_loadu_si512(notes.cast()), _mm512_loadu_si512(notes.add(STEP).cast())]);
        let mut tile = [[zero; 2]; ROWS];
        for row in 0..ROWS {
            for half in 0..2 {
                if !first {
                    tile[row][half] = _mm512_loadu_si512(sums.add(row * stride + 16 * half).cast());
                }
                tile[row][half] = _mm512_sub_epi32(tile[row][half], notes[half]);
            }
        }
        for step in 0..steps {
            let (left, right) = (left.add(step * STEP_PANEL), right.add(step * STEP_PANEL));
            for group in 0..STEP / 4 {
                let low = _mm512_loadu_si512(right.add(group * STEP).cast());
                let high = _mm512_loadu_si512(right.add(STEP_PANEL / 2 + group * STEP).cast());
                for row in 0..ROWS {
                    let four = left.add(row * STEP + 4 * group).cast::<i32>().read_unaligned();
                    let four = _mm512_set1_epi32(four);
                    tile[row][0] = _mm512_dpbusd_epi32(tile[row][0], four, low);
                    tile[row][1] = _mm512_dpbusd_epi32(tile[row][1], four, high);
                }
            }
        }
        for row in 0..ROWS {
            for half in 0..2 {
                _mm512_storeu_si512(sums.add(row * stride + 16 * half).cast(), tile[row][half]);
            }
        }
    }
}

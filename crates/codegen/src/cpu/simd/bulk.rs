//! Whole slices: copies, and conversions between `f32` and 16-bit floats.

use deuteron_graph::Dtype;

use super::lanes::Simd;
use super::map::Loop;
use super::store::{Elements, store};
use super::sweep::{Input, Output};
use super::{Isa, Task};

/// Copies `from` to `to`, with streaming stores if `streaming`: the reference for bandwidth.
///
/// # Panics
/// If the lengths differ.
pub fn copy(isa: Isa, to: &mut [f32], from: &[f32], streaming: bool) {
    assert_eq!(to.len(), from.len(), "elements of the two sides of a copy");
    let to = Elements { base: to.as_mut_ptr().cast(), dtype: Dtype::F32, streaming };
    isa.dispatch(Narrow { from, to });
}

/// Converts the elements of `from`, whose type is `F16` or `Bf16`.
///
/// # Panics
/// If the lengths differ, or for another dtype.
pub fn widen(isa: Isa, dtype: Dtype, from: &[u8], to: &mut [f32]) {
    assert!(matches!(dtype, Dtype::F16 | Dtype::Bf16), "expected f16 or bf16, got {dtype}");
    assert_eq!(from.len(), to.len() * dtype.bytes(), "bytes of {} elements of {dtype}", to.len());
    isa.dispatch(Widen { dtype, from, to });
}

/// Converts `from` to elements of `F16` or `Bf16`: nearest even, NaN stays NaN.
///
/// # Panics
/// If the lengths differ, or for another dtype.
pub fn narrow(isa: Isa, dtype: Dtype, from: &[f32], to: &mut [u8]) {
    assert!(matches!(dtype, Dtype::F16 | Dtype::Bf16), "expected f16 or bf16, got {dtype}");
    assert_eq!(to.len(), from.len() * dtype.bytes(), "bytes of {} elements of {dtype}", from.len());
    isa.dispatch(Narrow { from, to: Elements { base: to.as_mut_ptr(), dtype, streaming: false } });
}

/// `to` is borrowed mutably by the callers, for `from.len()` elements.
struct Narrow<'a> {
    from: &'a [f32],
    to: Elements,
}

impl Task for Narrow<'_> {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        let from = Input::lanes(self.from.as_ptr());
        // SAFETY: both slices were checked to have this length, and borrows do not overlap.
        unsafe { store(simd, self.from.len(), from, self.to) }
        if self.to.streaming {
            simd.fence();
        }
    }
}

struct Widen<'a> {
    dtype: Dtype,
    from: &'a [u8],
    to: &'a mut [f32],
}

impl Task for Widen<'_> {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        let output = Output::lanes(self.to.as_mut_ptr());
        // SAFETY: both slices were checked to have this length, and borrows do not overlap.
        unsafe { Loop::one_row(simd, self.to.len(), output).load(self.dtype, self.from.as_ptr(), 0) }
    }
}

//! Adds up the column sums of a launch's chunks.

use std::ops::Range;

use super::lanes::Simd;
use super::launch::Launch;
use super::store::{Elements, store};
use super::sweep::Input;
use super::{Isa, Task};
use crate::cpu::program::LANES;

/// Adds up the partial sums of `chunks` chunks, in one fixed order (pairwise), and stores them in the `Columns`
/// arguments.
///
/// # Safety
/// Every `Columns` argument that a partial names can be written, on its width, and no other thread touches it.
pub unsafe fn finish(isa: Isa, launch: &Launch<'_>, partials: &[f32], chunks: usize) {
    let total: usize = launch.program.partials.iter().map(|partial| partial.width).sum();
    assert_eq!(partials.len(), chunks * total, "partial sums of {chunks} chunks");
    isa.dispatch(Finish { launch, partials, chunks, total })
}

struct Finish<'a> {
    launch: &'a Launch<'a>,
    partials: &'a [f32],
    chunks: usize,
    total: usize,
}

impl Task for Finish<'_> {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        let mut before = 0;
        for partial in &self.launch.program.partials {
            let arg = usize::from(partial.arg);
            let dtype = self.launch.program.args[arg].dtype;
            for first in (0..partial.width).step_by(LANES) {
                let length = LANES.min(partial.width - first);
                let sums = self.pairwise(0..self.chunks, before + first, length);
                let from = Input::lanes(sums.as_ptr());
                // SAFETY: `finish`'s caller lets us write the argument on the partial's width.
                unsafe {
                    let base = self.launch.args[arg].base.add(first * dtype.bytes());
                    store(simd, length, from, Elements { base, dtype, streaming: false });
                }
            }
            before += partial.width;
        }
    }
}

impl Finish<'_> {
    /// Elements `at .. at + length` of the chunks' sums, halves first: errors grow with the logarithm of the chunks.
    fn pairwise(&self, chunks: Range<usize>, at: usize, length: usize) -> [f32; LANES] {
        let mut sums = [0.0; LANES];
        match chunks.len() {
            0 => {}
            1 => sums[..length].copy_from_slice(&self.partials[chunks.start * self.total + at..][..length]),
            _ => {
                let middle = chunks.start + chunks.len().div_ceil(2);
                sums = self.pairwise(chunks.start..middle, at, length);
                let rest = self.pairwise(middle..chunks.end, at, length);
                sums.iter_mut().zip(rest).for_each(|(sum, more)| *sum += more);
            }
        }
        sums
    }
}

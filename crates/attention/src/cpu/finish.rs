//! Adds the gradients of queries over the ranges of keys.

use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};
use deuteron_codegen::cpu::simd::{Isa, Task};
use deuteron_codegen::cpu::task::Floats;

use super::backward::Backward;
use super::forward::stored;
use super::scratch::Places;

/// Runs one of `finish_tasks`, after all of [`backward`](super::backward()): gradients of a tile of queries.
///
/// # Safety
/// As for [`backward`](super::backward()), whose tasks are all done.
///
/// # Panics
/// As [`forward`](super::forward()).
pub unsafe fn finish(isa: Isa, backward: &Backward, task: usize, scratch: &mut Floats) {
    assert_eq!(backward.attention.refusal(), None, "sizes of attention");
    let places = backward.attention.places(scratch);
    isa.dispatch(Finish { backward, task, places });
}

struct Finish<'a> {
    backward: &'a Backward<'a>,
    task: usize,
    places: Places,
}

impl Task for Finish<'_> {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        let attention = self.backward.attention;
        let (batch, head, query, rows) = attention.row_task(self.task);
        let padded = attention.padded();
        let row = (batch * attention.heads + head) * attention.queries + query;
        let next = attention.batch * attention.heads * attention.queries * padded;
        // SAFETY: the partials hold every row of every range; a tile of rows fits its place.
        unsafe {
            let from = self.backward.partials.0.add(row * padded).cast_const();
            let count = attention.backward_splits();
            let mut sums = from;
            if count > 1 {
                let ranges = AddRanges { from, next, count, elements: rows * padded, to: self.places.rows };
                simd.enter(ranges);
                sums = self.places.rows;
            }
            let gradient = stored(attention, &self.backward.query_gradient, (batch, head, query), rows);
            gradient.narrow(simd, sums, padded, attention.scale);
        }
    }
}

/// Adds ranges in order.
struct AddRanges {
    from: *const f32,
    next: usize,
    count: usize,
    elements: usize,
    to: *mut f32,
}

impl Kernel for AddRanges {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for at in (0..self.elements).step_by(S::WIDTH) {
            // SAFETY: rows hold whole vectors.
            unsafe {
                let mut sum = simd.load(self.from.add(at));
                for range in 1..self.count {
                    sum = simd.add(sum, simd.load(self.from.add(range * self.next + at)));
                }
                simd.store(self.to.add(at), sum);
            }
        }
    }
}

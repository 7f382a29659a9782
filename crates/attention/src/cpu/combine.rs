//! Joins the results of ranges of keys.

use std::f32::consts::LN_2;

use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};
use deuteron_codegen::cpu::simd::math::{exp, exp2};
use deuteron_codegen::cpu::simd::{Isa, Task};
use deuteron_codegen::cpu::task::Floats;

use super::Output;
use super::decode::{across, divide};
use super::forward::{Forward, end_rows};
use super::scratch::Places;
use super::softmax::statistics;

/// Runs one of `combine_tasks`, after all of [`forward`](super::forward()): finishes the rows of a tile of queries.
///
/// # Safety
/// As for [`forward`](super::forward()), whose tasks are all done.
///
/// # Panics
/// As [`forward`](super::forward()).
pub unsafe fn combine(isa: Isa, forward: &Forward, output: &mut Output, task: usize, scratch: &mut Floats) {
    let attention = forward.attention;
    assert_eq!(attention.refusal(), None, "sizes of attention");
    let places = attention.places(scratch);
    isa.dispatch(Job { forward, output, task, places });
}

struct Job<'a, 'b> {
    forward: &'a Forward<'a>,
    output: &'a mut Output<'b>,
    task: usize,
    places: Places,
}

impl Task for Job<'_, '_> {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        let Job { forward, output, task, places } = self;
        let attention = forward.attention;
        let (batch, head, query, rows) = attention.row_task(task);
        let first = (batch * attention.heads + head) * attention.queries + query;
        let (padded, width) = (attention.padded(), attention.width);
        let stride = width + 2;
        let next = attention.batch * attention.heads * attention.queries * stride;
        // SAFETY: the partials hold every row of every range, by the word of the caller; a tile of rows fits its place.
        unsafe {
            for row in 0..rows {
                let from = forward.partials.0.add((first + row) * stride).cast_const();
                let to = std::slice::from_raw_parts_mut(places.rows.add(row * padded), padded);
                // Tiles take maxima as powers of 2.
                let powers = !attention.decodes();
                let ranges = Ranges { from, next, count: attention.splits(), powers };
                let (maximum, sum) = simd.enter(Join { ranges, to: &mut *to, width });
                divide(to, sum);
                if let Some(to) = forward.statistics {
                    let logsumexp = if powers { maximum * LN_2 } else { maximum } + sum.ln();
                    let [first_of_row, inverse] = statistics(maximum, sum, logsumexp);
                    to.0.add(first + row).write(first_of_row);
                    to.0.add(attention.rows() + first + row).write(inverse);
                }
            }
            end_rows(simd, attention, output, (batch, head, query), places.rows, rows);
        }
    }
}

/// A maximum, a sum and `width` sums of values for each range.
#[derive(Clone, Copy)]
struct Ranges {
    from: *const f32,
    next: usize,
    count: usize,
    /// Whether maxima are powers of 2, not of e.
    powers: bool,
}

/// Returns the maximum and the sum of all ranges, and writes the sums of values to `to`.
struct Join<'a> {
    ranges: Ranges,
    to: &'a mut [f32],
    width: usize,
}

impl Kernel for Join<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> (f32, f32) {
        let Join { ranges, to, width } = self;
        to.fill(0.0);
        // SAFETY: every range holds `width + 2` numbers.
        unsafe {
            let range = |i: usize| ranges.from.add(i * ranges.next);
            let maximum = (0..ranges.count).fold(f32::NEG_INFINITY, |most, i| most.max(*range(i)));
            let shift = if maximum == f32::NEG_INFINITY { 0.0 } else { maximum };
            let mut sum = 0.0;
            for i in 0..ranges.count {
                let less = simd.splat(*range(i) - shift);
                let power = if ranges.powers { exp2(simd, less) } else { exp(simd, less) };
                let factor = across(simd, power, |first, _| first);
                sum += factor * *range(i).add(1);
                let from = std::slice::from_raw_parts(range(i).add(2), width);
                to.iter_mut().zip(from).for_each(|(to, &x)| *to += factor * x);
            }
            (maximum, sum)
        }
    }
}

//! Three loops, one multiplication and one addition at a time. The inner loop reads a row of A and a column of B:
//! neighbours of the column are a whole row apart, so a cache line is fetched for each.

use std::ops::Range;

use super::{Element, Matrices};

/// # Safety
/// The operands can be read and these rows of the result written, which nobody else touches.
pub(super) unsafe fn rows<E: Element>(p: &Matrices, rows: Range<usize>) {
    for i in rows {
        for j in 0..p.n {
            let mut sum = 0.0f32;
            for l in 0..p.k {
                // SAFETY: these are elements of A and B.
                sum += unsafe { p.a::<E>(i, l) * p.b::<E>(l, j) };
            }
            // SAFETY: this is an element of the rows.
            unsafe { p.store(i, j, sum) };
        }
    }
}

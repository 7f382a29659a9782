//! Equal terms of a sum have equal errors.
//!
//! A kernel rounds equal numbers alike. Where a sum has terms that were computed from the same numbers, as the rows of a softmax over one
//! column are, their errors do not cancel: of `c` such terms they add up to `c` times one, not to `sqrt(c)`. Terms are taken to be such
//! where value and deviation are equal to the last bit in `f64`.

use deuteron_graph::{Shape, memory};
use rayon::prelude::*;

use crate::strided::Strided;

/// Terms that are looked at together: enough for all cores, and what is found among them is little memory.
const TERMS: usize = 1 << 15;

/// The terms of each sum, as they lie in a tensor in row-major order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lanes {
    /// Terms of one sum.
    pub length: usize,
    /// Elements from one of them to the next.
    pub stride: usize,
}

impl Lanes {
    /// Along one axis.
    pub fn along(shape: &Shape, axis: usize) -> Lanes {
        Lanes { length: shape[axis], stride: shape[axis + 1..].iter().product() }
    }

    /// Positions of the terms of a sum.
    fn terms(self, lane: usize) -> impl Iterator<Item = usize> {
        let first = lane / self.stride * self.length * self.stride + lane % self.stride;
        (0..self.length).map(move |term| first + term * self.stride)
    }
}

/// Squares of deviations, each times the number of terms that share its error: their sum is the variance of the sum. Where terms are
/// multiplied before they are added, it is the most that the variance can be.
pub(super) fn variances(values: &Strided, deviations: &Strided, lanes: Lanes) -> Strided<'static> {
    let shape = &values.shape;
    let deviations = deviations.broadcast(shape).to_array().values;
    let mut variances: Vec<f64> = memory::collected(deviations.iter().map(|x| x * x));
    let elements = lanes.length * lanes.stride;
    if lanes.length > 1 && elements > 0 {
        let values = values.to_array().values;
        let key = |at: usize| (values[at].to_bits(), deviations[at].to_bits(), at);
        let of_lane = |lane: usize| {
            let mut terms: Vec<(u64, u64, usize)> = memory::room(lanes.length);
            terms.extend(lanes.terms(lane).filter(|&at| deviations[at] > 0.0).map(key));
            terms.sort_unstable();
            let alike = || terms.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)).filter(|alike| alike.len() > 1);
            let mut repeated = memory::room(alike().map(<[_]>::len).sum());
            repeated.extend(alike().flat_map(|alike| alike.iter().map(|term| (term.2, alike.len()))));
            repeated
        };
        let count = variances.len() / lanes.length;
        let together = (TERMS / lanes.length).max(1);
        for first in (0..count).step_by(together) {
            let some = first..count.min(first + together);
            let repeated: Vec<Vec<(usize, usize)>> = some.into_par_iter().map(of_lane).collect();
            repeated.into_iter().flatten().for_each(|(at, times)| variances[at] *= times as f64);
        }
    }
    Strided::owned(shape.clone(), variances)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::Array;

    #[test]
    fn equal_terms_of_a_sum_share_their_error() {
        let values = Array::new([2, 3], vec![1.0, 1.0, 2.0, 1.0, 3.0, 2.0]);
        let off = Array::new([2, 3], vec![0.5, 0.5, 0.5, 0.25, 0.0, 0.5]);
        let of =
            |lanes: Lanes| variances(&Strided::borrowed(&values), &Strided::borrowed(&off), lanes).to_array().values;
        let rows = Lanes::along(&values.shape, 1);
        assert_eq!(of(rows), [0.5, 0.5, 0.25, 0.0625, 0.0, 0.25], "only within a row, and only where both are equal");
        let columns = Lanes::along(&values.shape, 0);
        assert_eq!(of(columns), [0.25, 0.25, 0.5, 0.0625, 0.0, 0.5]);
        // Three equal terms are off by three times one: the root of 3 times 3 variances.
        let same = Array::filled([3], 7.0);
        let all = variances(
            &Strided::borrowed(&same),
            &Strided::borrowed(&Array::filled([3], 0.5)),
            Lanes { length: 3, stride: 1 },
        );
        assert_eq!(all.to_array().values.iter().sum::<f64>(), (3.0f64 * 0.5).powi(2));
    }
}

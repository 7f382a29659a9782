//! Equal terms of a sum have equal errors.
//!
//! A kernel rounds equal numbers alike. Where a sum has terms that are the same number in every kernel, as the rows of attention over one
//! key are, their errors do not cancel: of `c` such terms they add up to `c` times one, not to `sqrt(c)`. Terms are taken to be such
//! where their values are equal to the last bit in `f64`.
//!
//! Equal values may have different deviations, because the analysis does not know what cancelled on the way to them. The error that two of
//! them have in common is then no larger than the smaller of the two: their covariance is the smaller variance, and what is
//! above it is each term's own. A zero that is left of a difference says nothing of what it is the difference of, so zeros must be
//! equal in deviation too.

use deuteron_graph::{Shape, memory};
use rayon::prelude::*;

use crate::strided::{CHUNK, Strided};

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

/// Squares of deviations, each with its covariances with the other terms of its sum: added up, they are the variance of the sum. Where
/// terms are multiplied before they are added, that is the most that the variance can be.
pub(super) fn variances(values: &Strided, deviations: &Strided, lanes: Lanes) -> Strided<'static> {
    let shape = &values.shape;
    let deviations = deviations.broadcast(shape).to_array().values;
    let mut variances: Vec<f64> = memory::collected(deviations.iter().map(|x| x * x));
    let elements = lanes.length * lanes.stride;
    if lanes.length > 1 && elements > 0 {
        let values = values.to_array().values;
        // Deviations are positive, and their bits in the order of their size.
        let key = |at: usize| (values[at].to_bits(), deviations[at].to_bits(), at);
        let of_lane = |lane: usize| {
            let mut terms: Vec<(u64, u64, usize)> = memory::room(lanes.length);
            terms.extend(lanes.terms(lane).filter(|&at| deviations[at] > 0.0).map(key));
            terms.sort_unstable();
            let alike = || {
                let groups = terms.chunk_by(|a, b| a.0 == b.0 && (f64::from_bits(a.0) != 0.0 || a.1 == b.1));
                groups.filter(|alike| alike.len() > 1)
            };
            let mut repeated = memory::room(alike().map(<[_]>::len).sum());
            alike().for_each(|alike| with_covariances(alike, &mut repeated));
            repeated
        };
        let count = variances.len() / lanes.length;
        let together = (TERMS / lanes.length).max(1);
        for first in (0..count).step_by(together) {
            let some = first..count.min(first + together);
            let repeated: Vec<Vec<(usize, f64)>> = match variances.len() <= CHUNK {
                true => some.map(of_lane).collect(),
                false => some.into_par_iter().map(of_lane).collect(),
            };
            repeated.into_iter().flatten().for_each(|(at, variance)| variances[at] = variance);
        }
    }
    Strided::owned(shape.clone(), variances)
}

/// Adds the place of each of some equal terms, from the least deviation to the largest, and its variance with all its covariances.
fn with_covariances(alike: &[(u64, u64, usize)], into: &mut Vec<(usize, f64)>) {
    let mut smaller = 0.0;
    for (number, &(_, deviation, at)) in alike.iter().enumerate() {
        let variance = f64::from_bits(deviation).powi(2);
        let covariances = smaller + (alike.len() - number) as f64 * variance;
        smaller += variance;
        into.push((at, covariances));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::Array;

    fn of(values: &Array, deviations: &Array, lanes: Lanes) -> Vec<f64> {
        variances(&Strided::borrowed(values), &Strided::borrowed(deviations), lanes).to_array().values
    }

    #[test]
    fn equal_terms_of_a_sum_share_their_error() {
        let values = Array::new([2, 3], vec![1.0, 1.0, 2.0, 1.0, 3.0, 2.0]);
        let off = Array::new([2, 3], vec![0.5, 0.5, 0.5, 0.5, 0.0, 0.5]);
        let rows = Lanes::along(&values.shape, 1);
        assert_eq!(of(&values, &off, rows), [0.5, 0.5, 0.25, 0.25, 0.0, 0.25], "only within a row");
        let columns = Lanes::along(&values.shape, 0);
        assert_eq!(of(&values, &off, columns), [0.5, 0.25, 0.5, 0.5, 0.0, 0.5]);
        // Three equal terms are off by three times one: the root of 3 times 3 variances.
        let same = of(&Array::filled([3], 7.0), &Array::filled([3], 0.5), Lanes { length: 3, stride: 1 });
        assert_eq!(same.iter().sum::<f64>(), (3.0f64 * 0.5).powi(2));
    }

    #[test]
    fn equal_terms_of_different_deviations_share_the_smaller_one() {
        let lanes = Lanes { length: 3, stride: 1 };
        let off = Array::new([3], vec![2.0, 1.0, 4.0]);
        // Errors e, e + f and e + f + g of variances 1, 4 - 1 and 16 - 4: three times e, twice f, once g.
        let sum: f64 = of(&Array::filled([3], 7.0), &off, lanes).iter().sum();
        assert_eq!(sum, 9.0 * 1.0 + 4.0 * 3.0 + 12.0);
        assert_eq!(of(&Array::filled([3], 0.0), &off, lanes), [4.0, 1.0, 16.0], "zeros of different deviations");
        let same = Array::new([3], vec![2.0, 1.0, 2.0]);
        assert_eq!(of(&Array::filled([3], 0.0), &same, lanes), [8.0, 1.0, 8.0], "zeros of equal deviations");
    }
}

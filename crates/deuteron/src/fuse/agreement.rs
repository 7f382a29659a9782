//! Comparison with results of another program.

use deuteron_graph::{Dtype, Graph};
use deuteron_onnx::TensorData;
use deuteron_plan::Strategy;
use deuteron_reference::{Array, Bounded};
use serde::Serialize;

use crate::engine::Engine;
use crate::error::Error;
use crate::session::Session;
use crate::tensor::Tensor;
use crate::verify::Expected;

/// The relative tolerance for another program's results: that of ONNX's own tests.
const RELATIVE: f64 = 1e-3;

/// Roundings of the storage type, relative to the largest value, that results without a bound may differ by.
const ROUNDINGS: f64 = 8.0;

/// The difference that is the largest share of its tolerance.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// the output that has it
    pub output: String,
    /// ours minus theirs; infinite where one is not finite, or the shapes differ
    pub difference: f64,
    /// the tolerance
    pub allowed: f64,
}

/// The difference between the results of the fused plan and given ones.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Agreement {
    /// outputs that were compared
    pub outputs: usize,
    /// the worst of them
    pub worst: Difference,
    /// elements that were compared
    pub elements: u64,
    /// elements without a bound, compared by the size of their output's values alone
    pub without_bound: u64,
    /// elements whose bound is larger than every value of their output: any value of that size was accepted there
    pub loose: u64,
}

impl Agreement {
    /// Whether every element is within what is allowed.
    pub fn holds(&self) -> bool {
        self.worst.difference <= self.worst.allowed
    }
}

/// Runs the fused plan and compares each output with what is given for it. Allowed is, per element, the bound of our own
/// rounding twice, as the other program rounds too, but no more than twice the largest value of the output; and a thousandth of the value. An
/// element without a bound may differ by as large a share of the largest value. Integers and truth values must be equal, but for undecided
/// branches.
pub fn agreement(engine: &Engine, graph: &Graph, inputs: &[Tensor], given: &[TensorData]) -> Result<Agreement, Error> {
    let mut session = Session::new(engine, graph, Strategy::Fused)?;
    let uploaded: Vec<Tensor> = inputs.iter().map(|tensor| tensor.to_device(engine)).collect::<Result<_, _>>()?;
    session.run(&uploaded.iter().collect::<Vec<_>>())?;
    let arrays: Vec<Array> = inputs.iter().map(Tensor::to_array).collect::<Result<_, _>>()?;
    let expected = Expected::new(graph, &arrays)?;
    let mut worst = Difference { output: String::new(), difference: 0.0, allowed: 0.0 };
    let (mut elements, mut without_bound, mut loose) = (0, 0, 0);
    for (index, (output, theirs)) in graph.outputs().iter().zip(given).enumerate() {
        let ours = session.output(index)?.to_array()?;
        let reference = &expected.outputs()[index];
        let mut note = |difference: f64, allowed: f64| {
            // As a share of what is allowed; where nothing is, any difference is the worst.
            let share = |difference: f64, allowed: f64| if difference == 0.0 { 0.0 } else { difference / allowed };
            if worst.output.is_empty() || share(difference, allowed) > share(worst.difference, worst.allowed) {
                worst = Difference { output: output.name.clone(), difference, allowed };
            }
        };
        if ours.shape != theirs.shape {
            note(f64::INFINITY, 0.0);
            continue;
        }
        let allowed = Allowed::of(reference, &ours, theirs.dtype);
        let comparison = reference.compare(&ours);
        elements += comparison.shares.elements();
        without_bound += comparison.shares.unbounded;
        loose += comparison.loose;
        for ((&own, other), &bound) in ours.values.iter().zip(theirs.values()).zip(&reference.bounds) {
            let same = own == other || (own.is_nan() && other.is_nan());
            let difference = match (own - other).abs() {
                _ if same => 0.0,
                difference if difference.is_finite() => difference,
                _ => f64::INFINITY,
            };
            note(difference, allowed.by(other, bound));
        }
    }
    Ok(Agreement { outputs: given.len(), worst, elements, without_bound, loose })
}

/// How far another program's results may lie from ours.
struct Allowed {
    is_float: bool,
    /// at most; without a limit for integers, whose bounds are of undecided branches alone
    most: f64,
    /// of an element without a bound
    unbounded: f64,
}

impl Allowed {
    fn of(reference: &Bounded, ours: &Array, theirs: Dtype) -> Allowed {
        let is_float = theirs.is_float() || theirs == Dtype::F8e4m3;
        // Ours too: values that are 0 in `f64` are rounding errors in both results.
        let finite = ours.values.iter().map(|x| x.abs()).filter(|x| x.is_finite());
        let largest = finite.fold(reference.largest(), f64::max);
        let coarser = reference.dtype.epsilon().max(theirs.epsilon());
        let (share, most) = if is_float { (RELATIVE.max(ROUNDINGS * coarser), 2.0 * largest) } else { (0.0, f64::MAX) };
        Allowed { is_float, most, unbounded: share * largest }
    }

    /// Beside a value of the other program.
    fn by(&self, other: f64, bound: f64) -> f64 {
        let relative = if self.is_float && other.is_finite() { RELATIVE * other.abs().max(1e-4) } else { 0.0 };
        let own = if bound.is_finite() { (2.0 * bound).min(self.most) } else { self.unbounded };
        own.max(relative)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of an output whose largest value is 3.
    fn allowed(dtype: Dtype, other: f64, bound: f64) -> f64 {
        let exact = Array::from_fn([4], |index| index as f64);
        let reference = Bounded { dtype, exact: exact.clone(), bounds: vec![bound; 4] };
        Allowed::of(&reference, &exact, dtype).by(other, bound)
    }

    #[test]
    fn nothing_is_allowed_without_limit() {
        for dtype in Dtype::FLOATS {
            for other in [0.0, 2.0, -3.0, f64::NAN, f64::INFINITY] {
                for bound in [0.0, 1e-6, 1e30, f64::INFINITY] {
                    assert!(allowed(dtype, other, bound) <= 6.0, "{dtype} {other} {bound}");
                }
            }
        }
    }

    #[test]
    fn an_element_without_a_bound_is_compared_by_the_size_of_the_values() {
        assert_eq!(allowed(Dtype::F32, 0.0, f64::INFINITY), 3.0 * RELATIVE);
        assert_eq!(allowed(Dtype::Bf16, 0.0, f64::INFINITY), 3.0 * ROUNDINGS * Dtype::Bf16.epsilon());
        assert_eq!(allowed(Dtype::I32, 2.0, f64::INFINITY), 0.0);
    }

    #[test]
    fn bounds_count_twice_and_a_thousandth_is_always_allowed() {
        assert_eq!(allowed(Dtype::F32, 0.0, 0.5), 1.0);
        assert_eq!(allowed(Dtype::F32, 2.0, 0.0), 2.0 * RELATIVE);
        assert_eq!(allowed(Dtype::Bool, 0.0, 1.0), 2.0);
    }
}

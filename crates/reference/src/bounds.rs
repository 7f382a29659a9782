//! How far a kernel may lie from the reference, computed from the dtype and the length of the reductions.
//!
//! For a float tensor, in the max norm:
//!
//! `bound = factor * max|rounded - exact| + 2 ulp(max|exact|) + eps(f32) sqrt(reduction) max|exact|`
//!
//! where `exact` is the interpretation without rounding and `rounded` the one that stores every node in its dtype. The
//! slack of an element (a decision that may fall either way) widens the bound there. `i8` and `f8e4m3` may differ by
//! one step and the slack; `i32` and `bool` by the slack alone.

use deuteron_graph::{Dtype, Graph, Op, ReduceOp};

use crate::array::Array;
use crate::round::{round_to, ulp};

/// What a bound is computed from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Allowance {
    /// Dtype in which the tensor is stored.
    pub dtype: Dtype,
    /// Terms of the longest sum in the graph: [`longest_reduction`].
    pub reduction: usize,
    /// Multiple of the error that the same computation makes in the storage type: [`Allowance::FORWARD`] or
    /// [`Allowance::BACKWARD`].
    pub factor: f64,
}

impl Allowance {
    /// The factor of a forward pass.
    pub const FORWARD: f64 = 2.0;
    /// The factor of a gradient.
    pub const BACKWARD: f64 = 3.0;
}

/// A tensor held against the reference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// Largest difference; infinite where one side is not finite and the other differs.
    pub max_error: f64,
    /// The bound of the tensor, without slack.
    pub bound: f64,
    /// Largest ratio of an element's error to its bound. The tensor is right iff this is at most 1.
    pub ratio: f64,
    /// Where that ratio is.
    pub worst_index: usize,
}

impl Comparison {
    /// Whether every element is within its bound.
    pub fn holds(&self) -> bool {
        self.ratio <= 1.0
    }
}

/// Holds `got` against the reference. All arrays are of one shape.
pub fn compare(
    exact: &Array,
    rounded: &Array,
    slack: Option<&[f64]>,
    got: &Array,
    allowance: &Allowance,
) -> Comparison {
    assert_eq!(exact.shape, got.shape, "a result of the shape of the reference");
    let bound = tensor_bound(exact, rounded, allowance);
    let mut comparison = Comparison { max_error: 0.0, bound, ratio: 0.0, worst_index: 0 };
    for (index, (&exact, &got)) in exact.values.iter().zip(&got.values).enumerate() {
        let slack = slack.map_or(0.0, |slack| slack[index]);
        let limit = element_bound(bound, exact, allowance.dtype) + stored_slack(slack, allowance.dtype);
        // Infinite slack: a decision upstream may have changed anything here.
        if limit == f64::INFINITY {
            continue;
        }
        let error = element_error(exact, got, limit, allowance.dtype);
        // No error is right even under no bound.
        let ratio = if error == 0.0 { 0.0 } else { error / limit };
        comparison.max_error = comparison.max_error.max(error);
        if ratio > comparison.ratio {
            (comparison.ratio, comparison.worst_index) = (ratio, index);
        }
    }
    comparison
}

/// Terms of the longest sum in a graph, at least 1.
pub fn longest_reduction(graph: &Graph) -> usize {
    let terms = graph.nodes().iter().map(|node| {
        let operand = |position: usize| &graph.node(node.inputs[position]).shape;
        match &node.op {
            Op::RowReduce(ReduceOp::Sum | ReduceOp::Mean) => operand(0).cols(),
            Op::ColumnSum => operand(0).rows(),
            Op::Matmul { transpose_a, .. } => {
                let shape = operand(0);
                shape[shape.rank() - if *transpose_a { 2 } else { 1 }]
            }
            Op::ScatterAdd { .. } => operand(0).elements(),
            Op::RowReduce(ReduceOp::Max | ReduceOp::AbsMax | ReduceOp::ArgMax) => 1,
            Op::Input { .. } | Op::Const { .. } | Op::Iota { .. } | Op::Random { .. } => 1,
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) => 1,
            Op::Gather | Op::Append { .. } | Op::View(_) | Op::Concat { .. } | Op::StopGradient | Op::Opaque(_) => 1,
        }
    });
    terms.max().unwrap_or(1).max(1)
}

fn tensor_bound(exact: &Array, rounded: &Array, allowance: &Allowance) -> f64 {
    let scale = exact.max_abs();
    match allowance.dtype {
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {
            let differences = exact.values.iter().zip(&rounded.values).map(|(exact, rounded)| (rounded - exact).abs());
            let storage_error = differences.filter(|error| error.is_finite()).fold(0.0, f64::max);
            let accumulation = Dtype::F32.epsilon() * (allowance.reduction as f64).sqrt() * scale;
            allowance.factor * storage_error + 2.0 * ulp(allowance.dtype, scale) + accumulation
        }
        Dtype::I8 | Dtype::F8e4m3 => ulp(allowance.dtype, scale),
        Dtype::I32 | Dtype::Bool => 0.0,
    }
}

/// The bound of one element: that of the tensor, but a step of `f8e4m3` depends on the magnitude.
fn element_bound(bound: f64, exact: f64, dtype: Dtype) -> f64 {
    if dtype == Dtype::F8e4m3 { ulp(dtype, exact) } else { bound }
}

/// The other branch is rounded too: slack may be off by two units of itself.
fn stored_slack(slack: f64, dtype: Dtype) -> f64 {
    if dtype.is_float() { slack * (1.0 + 2.0 * dtype.epsilon()) } else { slack }
}

/// The distance, or infinity where one side is not finite and the other differs.
fn element_error(exact: f64, got: f64, limit: f64, dtype: Dtype) -> f64 {
    let agrees = |holds: bool| if holds { 0.0 } else { f64::INFINITY };
    if exact.is_nan() || exact.is_infinite() {
        // What the dtype stores for it: f8e4m3 has no infinity.
        let stored = round_to(dtype, exact);
        return agrees(got == stored || (got.is_nan() && stored.is_nan()));
    }
    if got.is_nan() {
        return f64::INFINITY;
    }
    if got.is_infinite() {
        // Right only if a value within the bound overflows the dtype to the same infinity.
        return agrees(round_to(dtype, exact + limit.copysign(got)) == got);
    }
    (got - exact).abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    const F16: Allowance = Allowance { dtype: Dtype::F16, reduction: 129, factor: Allowance::FORWARD };

    fn rows() -> Array {
        Array::normal([7, 129], 5)
    }

    fn ratio(got: &Array) -> f64 {
        let exact = rows();
        compare(&exact, &exact.clone().rounded(Dtype::F16), None, got, &F16).ratio
    }

    #[test]
    fn the_reference_rounded_to_the_dtype_passes() {
        let comparison = compare(&rows(), &rows().rounded(Dtype::F16), None, &rows().rounded(Dtype::F16), &F16);
        assert!(comparison.holds() && comparison.max_error > 0.0, "{comparison:?}");
        let zeros = Array::filled([3], 0.0);
        assert_eq!(compare(&zeros, &zeros, None, &zeros, &F16).ratio, 0.0);
    }

    #[test]
    fn one_wrong_element_fails_and_is_named() {
        let mut got = rows().rounded(Dtype::F16);
        got.values[200] += 0.05;
        let exact = rows();
        let comparison = compare(&exact, &exact.clone().rounded(Dtype::F16), None, &got, &F16);
        assert!(!comparison.holds());
        assert_eq!(comparison.worst_index, 200);
    }

    #[test]
    fn swapped_rows_fail() {
        let mut got = rows().rounded(Dtype::F16);
        (0..129).for_each(|column| got.values.swap(column, 129 + column));
        assert!(ratio(&got) > 1.0);
    }

    #[test]
    fn a_coarser_rounding_than_the_dtype_fails() {
        // bf16 in place of f16 loses three bits: 8 times the error, under a bound of about 6.
        assert!(ratio(&rows().rounded(Dtype::Bf16)) > 1.0);
        // An f32 result that went through f16 on the way.
        let exact = rows();
        let f32 = Allowance { dtype: Dtype::F32, ..F16 };
        let got = exact.clone().rounded(Dtype::F16);
        assert!(!compare(&exact, &exact.clone().rounded(Dtype::F32), None, &got, &f32).holds());
    }

    #[test]
    fn slack_opens_the_bound_at_its_element_only() {
        let exact = rows();
        let mut got = exact.clone();
        got.values[3] += 1.0;
        let mut slack = vec![0.0; exact.values.len()];
        slack[3] = 1.0;
        assert!(compare(&exact, &exact, Some(&slack), &got, &F16).holds());
        slack.swap(3, 4);
        assert!(!compare(&exact, &exact, Some(&slack), &got, &F16).holds());
    }

    #[test]
    fn values_that_are_not_finite_must_agree() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let holds = |exact: f64, got: f64| {
            let exact = Array::new([2], vec![exact, 1.0]);
            let rounded = exact.clone().rounded(Dtype::F16);
            compare(&exact, &rounded, None, &Array::new([2], vec![got, 1.0]), &F16).holds()
        };
        assert!(holds(nan, nan) && holds(inf, inf) && holds(-inf, -inf));
        assert!(!holds(nan, 1.0) && !holds(1.0, nan) && !holds(inf, -inf) && !holds(1.0, inf) && !holds(inf, 1.0));
        assert!(holds(70000.0, inf), "an overflow of f16");
        assert!(!holds(70000.0, -inf) && !holds(30000.0, inf));
    }

    #[test]
    fn bytes_may_differ_by_one_step() {
        let exact = Array::new([3], vec![5.0, -128.0, 0.0]);
        let bytes = Allowance { dtype: Dtype::I8, ..F16 };
        let near = Array::new([3], vec![6.0, -127.0, 0.0]);
        assert!(compare(&exact, &exact, None, &near, &bytes).holds());
        let far = Array::new([3], vec![7.0, -128.0, 0.0]);
        assert!(!compare(&exact, &exact, None, &far, &bytes).holds());
        // Steps of f8e4m3 are 32 near 448 and 1/8 near 1.
        let eighths = Allowance { dtype: Dtype::F8e4m3, ..F16 };
        let exact = Array::new([2], vec![448.0, 1.0]);
        assert!(compare(&exact, &exact, None, &Array::new([2], vec![416.0, 1.125]), &eighths).holds());
        assert!(!compare(&exact, &exact, None, &Array::new([2], vec![448.0, 1.25]), &eighths).holds());
        let indices = Allowance { dtype: Dtype::I32, ..F16 };
        assert!(!compare(&exact, &exact, None, &Array::new([2], vec![448.0, 2.0]), &indices).holds());
    }

    #[test]
    fn the_longest_sum_is_found() {
        let product = "x = input f32[4,100,8] ; w = weight f32[8,9] ; y = matmul x w ; out y";
        assert_eq!(longest_reduction(&product.parse().unwrap()), 8);
        assert_eq!(longest_reduction(&format!("{product} ; s = column_sum y ; out s").parse().unwrap()), 400);
    }
}

//! Error bounds: the largest allowed distance of each element of a result from the reference.
//!
//! `bound = max(z k deviation, 2 |rounded - exact|) + slack`
//!
//! - `z` is 5, and more in a tensor of more than 1024 elements: the largest of many errors is larger (`deviations`).
//! - `deviation` is the result of a running error analysis of the graph for the element: every rounding to a storage type, every
//!   function and every sum in `f32`, carried through all that follows (`spread.rs`).
//! - `rounded` is one run that stores every value in its dtype. It has the errors that are not random, such as a
//!   constant that is rounded the same way everywhere. Where its errors are larger than the analysis expects, because
//!   errors that were taken for independent are not, `k` is by how much (root mean square over the tensor); else 1.
//! - `slack` is the reach of decisions: comparisons, roundings to integers (`slack.rs`). It is all there is for `i8`,
//!   `f8e4m3`, `i32` and `bool`.
//!
//! Values that are exact in every kernel have bound 0.

use deuteron_graph::{Dtype, Graph, memory};

use crate::array::Array;
use crate::error::ReferenceError;
use crate::noise::DEVIATIONS;
use crate::primitives::{Interpretation, Rounding, interpret};
use crate::round::round_to;

/// Elements of a tensor whose errors are allowed the same multiple of their deviation.
const FEW: usize = 1024;

/// Multiple of its own error that a run in the storage types may be off.
const RUNS: f64 = 2.0;

/// The exact values of an output, and how far a kernel may lie from each.
#[derive(Debug, Clone, PartialEq)]
pub struct Bounded {
    /// Dtype in which the output is stored.
    pub dtype: Dtype,
    /// Its values in `f64`.
    pub exact: Array,
    /// One bound per element; infinite where a decision may change anything.
    pub bounds: Vec<f64>,
}

/// A tensor compared with the reference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// Largest error as a share of its element's bound. The tensor is right iff this is at most 1.
    pub ratio: f64,
    /// The element where that share is.
    pub worst_index: usize,
    /// Its error; infinite where one side is not finite and the other differs.
    pub error: f64,
    /// Its bound.
    pub bound: f64,
    /// All elements, by their error.
    pub shares: Shares,
    /// Elements whose bound is finite but larger than every value of the tensor: the comparison says little of them.
    pub loose: u64,
}

/// Counts of elements by their error as a share of their bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Shares {
    /// Elements that are exact.
    pub exact: u64,
    /// Other elements up to each of [`Shares::LIMITS`] and above the one before it.
    pub within: [u64; Shares::LIMITS.len()],
    /// Elements outside of their bound.
    pub wrong: u64,
    /// Elements without a known bound: nothing was checked there.
    pub unbounded: u64,
}

impl Shares {
    /// Upper ends of the shares that are counted.
    pub const LIMITS: [f64; 6] = [0.0625, 0.125, 0.25, 0.5, 0.75, 1.0];

    /// All elements.
    pub fn elements(&self) -> u64 {
        self.exact + self.within.iter().sum::<u64>() + self.wrong + self.unbounded
    }

    /// One more element.
    pub fn count(&mut self, ratio: Option<f64>) {
        let place = |ratio: f64| Shares::LIMITS.iter().position(|&limit| ratio <= limit);
        match ratio {
            None => self.unbounded += 1,
            Some(0.0) => self.exact += 1,
            Some(ratio) => match place(ratio) {
                Some(place) => self.within[place] += 1,
                None => self.wrong += 1,
            },
        }
    }

    /// The elements of another tensor as well.
    pub fn add(&mut self, other: &Shares) {
        self.exact += other.exact;
        self.within.iter_mut().zip(&other.within).for_each(|(sum, count)| *sum += count);
        self.wrong += other.wrong;
        self.unbounded += other.unbounded;
    }
}

impl Comparison {
    /// Whether every element is within its bound.
    pub fn holds(&self) -> bool {
        self.ratio <= 1.0
    }

    /// Whether any element has a bound. Without one nothing was checked; of an empty tensor there is nothing to check.
    pub fn is_checked(&self) -> bool {
        let elements = self.shares.elements();
        elements == 0 || self.shares.unbounded < elements
    }
}

/// Runs a graph in `f64` and analyses its errors: one [`Bounded`] per output.
pub fn bounded(graph: &Graph, inputs: &[Array]) -> Result<Vec<Bounded>, ReferenceError> {
    let exact = interpret(graph, inputs, Rounding::Analysed)?;
    let rounded = interpret(graph, inputs, Rounding::Storage)?.outputs;
    bounded_by(graph, exact, rounded)
}

/// The same from both runs of the graph: analysed, and in the storage types.
pub(crate) fn bounded_by(
    graph: &Graph,
    exact: Interpretation,
    rounded: Vec<Array>,
) -> Result<Vec<Bounded>, ReferenceError> {
    let Interpretation { outputs, slack, spread } = exact;
    let dtypes = graph.outputs().iter().map(|output| graph.node(output.node).dtype);
    let parts = dtypes.zip(outputs).zip(rounded).zip(slack.into_iter().zip(spread));
    let of_output = |(((dtype, exact), rounded), (slack, spread)): (((Dtype, Array), Array), _)| {
        let errors = Errors { slack, spread };
        let bounds = errors.bounds(dtype, &exact, &rounded);
        Bounded { dtype, exact, bounds }
    };
    Ok(memory::caught(|| parts.map(of_output).collect())?)
}

impl Bounded {
    /// Compares a result of the same shape with the reference.
    pub fn compare(&self, got: &Array) -> Comparison {
        assert_eq!(self.exact.shape, got.shape, "a result of the shape of the reference");
        let mut comparison = Comparison {
            ratio: 0.0,
            worst_index: 0,
            error: 0.0,
            bound: 0.0,
            shares: Shares::default(),
            loose: self.loose(),
        };
        let mut first = true;
        for (index, ratio) in self.ratios(got).enumerate() {
            comparison.shares.count(ratio);
            // The first one that has a bound stands for the others until one is worse.
            if let Some(ratio) = ratio.filter(|&ratio| first || ratio > comparison.ratio) {
                (comparison.ratio, comparison.worst_index, first) = (ratio, index, false);
            }
        }
        let at = comparison.worst_index;
        if let Some(&exact) = self.exact.values.get(at) {
            comparison.bound = self.bounds[at];
            comparison.error = element_error(exact, got.values[at], comparison.bound, self.dtype);
        }
        comparison
    }

    /// The largest magnitude of the finite values.
    pub fn largest(&self) -> f64 {
        self.exact.values.iter().filter(|x| x.is_finite()).fold(0.0, |largest, x| x.abs().max(largest))
    }

    /// Elements whose bound is finite but larger than every value.
    fn loose(&self) -> u64 {
        let largest = self.largest();
        self.bounds.iter().filter(|&&bound| bound.is_finite() && bound > largest).count() as u64
    }

    /// The error of each element as a share of its bound; `None` where there is no bound.
    pub fn ratios<'a>(&'a self, got: &'a Array) -> impl Iterator<Item = Option<f64>> + 'a {
        let expected = self.exact.values.iter().zip(&self.bounds);
        expected.zip(&got.values).map(|((&exact, &limit), &got)| {
            if limit == f64::INFINITY {
                return None;
            }
            let error = element_error(exact, got, limit, self.dtype);
            // No error is right even under no bound.
            Some(if error == 0.0 { 0.0 } else { error / limit })
        })
    }
}

/// What the exact run tells of the errors of an output.
struct Errors {
    slack: Option<Vec<f64>>,
    spread: Option<Vec<f64>>,
}

impl Errors {
    fn bounds(&self, dtype: Dtype, exact: &Array, rounded: &Array) -> Vec<f64> {
        let slack = |index: usize| self.slack.as_ref().map_or(0.0, |slack| stored_slack(slack[index], dtype));
        let Some(spread) = self.spread.as_ref().filter(|_| dtype.is_float()) else {
            return memory::collected((0..exact.values.len()).map(slack));
        };
        let off = |(exact, rounded): (&f64, &f64)| (rounded - exact).abs();
        let run: Vec<f64> = memory::collected(exact.values.iter().zip(&rounded.values).map(off));
        let related = (0..run.len())
            .filter(|&index| {
                spread[index] > 0.0 && spread[index].is_finite() && run[index].is_finite() && slack(index) == 0.0
            })
            .map(|index| (run[index] / spread[index]).powi(2));
        let (count, squares) = related.fold((0, 0.0), |(count, sum), square| (count + 1, sum + square));
        let excess = (squares / count.max(1) as f64).sqrt().max(1.0);
        let of_element = |index: usize| {
            let of_run = if run[index].is_finite() { RUNS * run[index] } else { 0.0 };
            (deviations(run.len()) * excess * spread[index]).max(of_run) + slack(index)
        };
        memory::collected((0..exact.values.len()).map(of_element))
    }
}

/// Deviations that an error in a tensor of this many elements may be off: an error of a normal distribution that is larger is as unlikely in a
/// large tensor as in one of [`FEW`].
fn deviations(elements: usize) -> f64 {
    let times = elements.max(FEW) as f64 / FEW as f64;
    (DEVIATIONS * DEVIATIONS + 2.0 * times.ln()).sqrt()
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

    /// Rows of `f32`, stored in a dtype.
    fn rows(dtype: Dtype) -> Bounded {
        let text = format!("x = input f32[7,129] ; y = cast x {dtype} ; out y");
        bounded(&text.parse().unwrap(), &[Array::normal([7, 129], 5).rounded(Dtype::F32)]).unwrap().remove(0)
    }

    fn one(dtype: Dtype, exact: &[f64], bounds: &[f64]) -> Bounded {
        Bounded { dtype, exact: Array::new([exact.len()], exact.to_vec()), bounds: bounds.to_vec() }
    }

    /// Of a normal distribution, one of a thousand errors is beyond five deviations as rarely as one of a million beyond 6.2.
    #[test]
    fn many_errors_are_allowed_more_deviations() {
        assert_eq!((deviations(1), deviations(FEW)), (DEVIATIONS, DEVIATIONS));
        assert!((deviations(FEW << 10) - 6.234).abs() < 0.001);
    }

    #[test]
    fn the_reference_rounded_to_the_dtype_passes() {
        let expected = rows(Dtype::F16);
        let comparison = expected.compare(&expected.exact.clone().rounded(Dtype::F16));
        assert!(comparison.holds() && comparison.error > 0.0, "{comparison:?}");
        let zeros = one(Dtype::F16, &[0.0; 3], &[0.0; 3]);
        assert_eq!(zeros.compare(&zeros.exact).ratio, 0.0);
    }

    #[test]
    fn one_wrong_element_fails_and_is_named() {
        let expected = rows(Dtype::F16);
        let mut got = expected.exact.clone().rounded(Dtype::F16);
        got.values[200] += 0.05;
        let comparison = expected.compare(&got);
        assert!(!comparison.holds());
        assert_eq!(comparison.worst_index, 200);
    }

    #[test]
    fn swapped_rows_fail() {
        let expected = rows(Dtype::F16);
        let mut got = expected.exact.clone().rounded(Dtype::F16);
        (0..129).for_each(|column| got.values.swap(column, 129 + column));
        assert!(!expected.compare(&got).holds());
    }

    #[test]
    fn a_coarser_rounding_than_the_dtype_fails() {
        // bf16 in place of f16 loses three bits: 8 times the error.
        let expected = rows(Dtype::F16);
        assert!(!expected.compare(&expected.exact.clone().rounded(Dtype::Bf16)).holds());
        // An f32 result that went through f16 on the way.
        let exact = rows(Dtype::F32);
        assert!(!exact.compare(&exact.exact.clone().rounded(Dtype::F16)).holds());
    }

    #[test]
    fn small_elements_are_held_against_their_own_scale() {
        let graph: Graph = "x = input f32[3] ; e = exp x ; y = mul e e ; out y".parse().unwrap();
        let expected = bounded(&graph, &[Array::new([3], vec![10.0, 0.0, -10.0])]).unwrap().remove(0);
        let mut got = expected.exact.clone();
        got.values[2] *= 1.001;
        assert_eq!(expected.compare(&got).worst_index, 2);
        assert!(!expected.compare(&got).holds(), "an error of 1e-12 beside a value of 5e8");
    }

    #[test]
    fn what_cancels_is_off_by_what_it_cancelled_from() {
        // (x + 1) - 1 is off by the spacing at 1, however small x is.
        let graph: Graph = "x = input f32[2] ; s = add x 1 ; y = sub s 1 ; out y".parse().unwrap();
        let expected = bounded(&graph, &[Array::new([2], vec![1e-10, 3e-9]).rounded(Dtype::F32)]).unwrap().remove(0);
        assert!(expected.compare(&Array::filled([2], 0.0)).holds());
        assert!(!expected.compare(&Array::filled([2], 2.0 * Dtype::F32.epsilon())).holds());
    }

    #[test]
    fn a_small_sigmoid_is_off_by_a_factor_if_its_argument_is_off() {
        // Beside 2^25 the spacing is 2: -45.5 comes back as -46, or as -44 if a kernel drops bits.
        let text = "x = input f32[1] ; a = input f32[1] ; s = add x a ; t = sub s a ; y = OP t ; out y";
        let inputs = [-45.5, (1u64 << 25) as f64].map(|x| Array::filled([1], x));
        for op in ["sigmoid", "exp"] {
            let expected = bounded(&text.replace("OP", op).parse().unwrap(), &inputs).unwrap().remove(0);
            let got = |argument: f64| expected.compare(&Array::filled([1], argument.exp())).holds();
            assert!(got(-46.0) && got(-44.0) && !got(-41.0), "{op}: {:?}", expected.bounds);
        }
    }

    #[test]
    fn a_run_in_the_storage_types_may_be_off_twice_as_much() {
        // One element of a hundred is off by a hundred deviations: the root mean square is ten.
        let (exact, mut rounded) = (Array::filled([100], 1.0), Array::filled([100], 1.0));
        rounded.values[7] += 0.5;
        let errors = Errors { slack: None, spread: Some(vec![1.0 / 200.0; 100]) };
        let bounds = errors.bounds(Dtype::F32, &exact, &rounded);
        assert_eq!((bounds[7], bounds[8]), (1.0, DEVIATIONS * 10.0 / 200.0));
    }

    #[test]
    fn the_branch_that_was_not_taken_is_rounded_too() {
        // The exponential of a half is stored as 1688 spacings, which `r` is. Then `g` is added to 1, and rounded up to 34 spacings.
        let text = "x = input f16[1] ; r = input f16[1] ; g = input f16[1] ; k = input f16[1]
            e = exp x ; c = eq e r ; z = const 0 f16 ; s = select c g z ; y = add k s ; out y";
        let spacing = Dtype::F16.epsilon();
        let inputs = [0.5, 1688.0 * spacing, 33.6 * spacing, 1.0].map(|x| Array::filled([1], x).rounded(Dtype::F16));
        let expected = bounded(&text.parse().unwrap(), &inputs).unwrap().remove(0);
        let got = |spacings: f64| Array::filled([1], 1.0 + spacings * spacing);
        assert!(expected.compare(&got(0.0)).holds() && expected.compare(&got(34.0)).holds());
        assert!(!expected.compare(&got(36.0)).holds());
    }

    #[test]
    fn a_value_that_every_kernel_has_exactly_must_be_exact() {
        let graph: Graph = "x = input f32[2] ; y = relu x ; out y".parse().unwrap();
        let expected = bounded(&graph, &[Array::new([2], vec![1.0, -1.0])]).unwrap().remove(0);
        assert_eq!(expected.bounds, [0.0, 0.0]);
        let off = Array::new([2], vec![1.0 + Dtype::F32.epsilon(), 0.0]);
        assert!(!expected.compare(&off).holds());
    }

    #[test]
    fn elements_without_a_bound_are_counted() {
        let expected = one(Dtype::F32, &[1.0, 2.0], &[f64::INFINITY, 0.5]);
        let comparison = expected.compare(&Array::new([2], vec![100.0, 2.25]));
        assert_eq!((comparison.ratio, comparison.worst_index), (0.5, 1));
        assert_eq!(comparison.shares, Shares { within: [0, 0, 0, 1, 0, 0], unbounded: 1, ..Shares::default() });
    }

    #[test]
    fn values_that_are_not_finite_must_agree() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let holds = |exact: f64, got: f64| {
            one(Dtype::F16, &[exact, 1.0], &[16.0, 16.0]).compare(&Array::new([2], vec![got, 1.0])).holds()
        };
        assert!(holds(nan, nan) && holds(inf, inf) && holds(-inf, -inf));
        assert!(!holds(nan, 1.0) && !holds(1.0, nan) && !holds(inf, -inf) && !holds(1.0, inf) && !holds(inf, 1.0));
        assert!(holds(70000.0, inf), "an overflow of f16");
        assert!(!holds(70000.0, -inf) && !holds(30000.0, inf));
    }

    #[test]
    fn bytes_may_differ_by_one_step_where_their_rounding_is_undecided() {
        for (dtype, step) in [(Dtype::I8, 1.0), (Dtype::F8e4m3, 1.0)] {
            // Eight and a half is a tie of both; it is computed, so it may fall either way. Nine is none.
            let text = format!("x = input f32[2] ; e = log x ; s = exp e ; y = cast s {dtype} ; out y");
            let input = Array::new([2], vec![8.5, 9.0]);
            let expected = bounded(&text.parse().unwrap(), &[input]).unwrap().remove(0);
            assert_eq!(expected.bounds, [step, 0.0]);
            let here = &expected.exact.values;
            assert!(expected.compare(&Array::new([2], vec![17.0 - here[0], 9.0])).holds());
            assert!(!expected.compare(&Array::new([2], vec![here[0], 10.0])).holds());
            assert!(!expected.compare(&Array::new([2], vec![here[0] + 2.0, 9.0])).holds());
        }
    }
}

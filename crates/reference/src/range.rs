//! Values that lie in a range whatever was rounded before them: a probability between 0 and 1, an element of a normalised row within `sqrt(n)`.
//!
//! The error analysis follows each step by its slopes, and finds no bound for the probabilities of a row whose scores are off by much: a row
//! whose keys are all masked by -1e9, whose scores are rounded to multiples of 64. No kernel leaves the range, so no error is larger than the
//! range is wide. Ranges are found by the shape of the formula, so they hold in composites, gradients and imported graphs alike.
//!
//! The exponentials of a row and their sum are not cut off, though they have ranges: the analysis takes the largest of the row as exact
//! (`spread.rs`), so their spread holds its error, which a logarithm of the sum carries on. It cancels in a probability.

use deuteron_graph::{BinaryOp, CompareOp, Graph, Node, NodeId, Op, ReduceOp, UnaryOp};

use crate::noise::DEVIATIONS;
use crate::round::round_to;
use crate::store::Store;
use crate::strided::{Strided, map, map_pair};
use crate::value::{Spread, norm};

/// The smallest and the largest value of a result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Range {
    pub low: f64,
    pub high: f64,
}

/// Rows that lie in a range have a common norm as well: of two rows of probabilities the distance is at most `sqrt(2)`, of two normalised rows
/// `2 sqrt(n)`. This multiple of the largest error of each element, added up in squares, is no less than the error of any weighted sum of the row.
const OF_ROWS: f64 = 2.0;

/// A maximum of no value and what stands in for it; a sum or a scale of zeros and what stands in for it.
const EMPTY_MAXIMUM: (f64, f64) = (f64::NEG_INFINITY, 0.0);
const EMPTY_SUM: (f64, f64) = (0.0, 1.0);

/// Sums of exponentials that start at 1 may be rounded down by this much.
const ROUNDED: f64 = 1.0 / 1024.0;

impl Range {
    fn new(low: f64, high: f64) -> Option<Range> {
        Some(Range { low, high })
    }

    /// How far another value of the range may lie from `y`.
    #[inline(always)]
    fn reach(self, y: f64) -> f64 {
        (y - self.low).max(self.high - y)
    }

    /// The slack of a result in this range.
    pub fn slack(self, slack: Strided<'static>, result: &Strided) -> Strided<'static> {
        // Half the range is within the reach of any of its values.
        let half = (self.high - self.low) / 2.0;
        if !slack.any(|slack| slack > half) {
            return slack;
        }
        map(
            &result.shape,
            [&slack, result],
            Store::PLAIN,
            |[slack, y]| {
                if y.is_finite() { slack.min(self.reach(y)) } else { slack }
            },
        )
    }

    /// The spread of a result in this range. Where it is cut off the errors of a row are no longer in common.
    pub fn spread(self, spread: Spread, result: &Strided) -> Spread {
        // Below this no norm of both parts exceeds what is allowed of any value of the range.
        let least = OF_ROWS * (self.high - self.low) / 2.0 / DEVIATIONS / std::f64::consts::SQRT_2;
        let exceeds = |part: &Option<Strided<'static>>| part.as_ref().is_some_and(|part| part.any(|x| x > least));
        if !exceeds(&spread.own) && !exceeds(&spread.shared) {
            return spread;
        }
        let (own, shared) = (spread.own(&result.shape), spread.shared(&result.shape));
        let parts = |[own, shared, y]: [f64; 3]| {
            let most = OF_ROWS * self.reach(y) / DEVIATIONS;
            if y.is_finite() && norm(own, shared) > most { [most, 0.0] } else { [own, shared] }
        };
        let [own, shared] = map_pair(&result.shape, [&own, &shared, result], parts);
        let shared = spread.shared.is_some().then_some(shared);
        Spread { own: Some(own), shared, ..spread }.settled()
    }
}

/// The range of a node's result, if its formula has one.
pub(crate) fn range_of(graph: &Graph, node: &Node) -> Option<Range> {
    match &node.op {
        Op::Unary(UnaryOp::Sigmoid) => Range::new(0.0, 1.0),
        Op::Unary(UnaryOp::Tanh | UnaryOp::Erf) => Range::new(-1.0, 1.0),
        Op::Unary(UnaryOp::Rsqrt) => {
            let least = least_argument(graph, node);
            (least > 0.0).then_some(Range { low: 0.0, high: least.sqrt().recip() })
        }
        Op::Binary(BinaryOp::Mul) => {
            let [a, b] = [node.inputs[0], node.inputs[1]];
            product(graph, a, b).or_else(|| product(graph, b, a))
        }
        Op::Binary(BinaryOp::Div) => (sum_of_exponentials(graph, node.inputs[1]) == Some(node.inputs[0]))
            .then_some(Range { low: 0.0, high: 1.0 }),
        _ => None,
    }
}

/// The range of `x` times a factor that depends on the row of `x`.
fn product(graph: &Graph, x: NodeId, factor: NodeId) -> Option<Range> {
    let factor = graph.node(factor);
    match factor.op {
        Op::Unary(UnaryOp::Reciprocal) if sum_of_exponentials(graph, factor.inputs[0]) == Some(x) => {
            Range::new(0.0, 1.0)
        }
        Op::Unary(UnaryOp::Reciprocal) => {
            let scale = graph.node(statistic(graph, factor.inputs[0], EMPTY_SUM));
            if scale.op != Op::Binary(BinaryOp::Mul) {
                return None;
            }
            let largest = graph.node(scale.inputs[0]);
            let step = constant(graph, scale.inputs[1]).filter(|&step| step > 0.0)?;
            let is_largest = largest.op == Op::RowReduce(ReduceOp::AbsMax) && largest.inputs[0] == x;
            is_largest.then_some(Range { low: -step.recip(), high: step.recip() })
        }
        Op::Unary(UnaryOp::Rsqrt) if mean_square(graph, factor.inputs[0])?.0 == x => {
            let most = (graph.node(x).shape.cols() as f64).sqrt();
            Range::new(-most, most)
        }
        _ => None,
    }
}

/// The least magnitude of what a reciprocal or a reciprocal root is taken of, in every kernel; 0 if nothing is known.
pub(crate) fn least_argument(graph: &Graph, node: &Node) -> f64 {
    match node.op {
        Op::Unary(UnaryOp::Reciprocal | UnaryOp::Rsqrt) => least(graph, node.inputs[0]),
        _ => 0.0,
    }
}

/// No kernel has a smaller value here, but for zero in an empty row; 0 if nothing is known.
pub(crate) fn least(graph: &Graph, id: NodeId) -> f64 {
    if let Some((_, added)) = mean_square(graph, id) {
        return added * (1.0 - ROUNDED);
    }
    // The exponential of the largest of a row is 1, and so is the sum of an empty row when it is divided by.
    if sum_of_exponentials(graph, id).is_some() { 1.0 - ROUNDED } else { 0.0 }
}

/// A statistic of rows, for which a constant stands in where a row is empty: `select(x == empty, constant, x)`. `of_empty` is both numbers.
fn statistic(graph: &Graph, id: NodeId, of_empty: (f64, f64)) -> NodeId {
    let node = graph.node(id);
    match node.op {
        Op::StopGradient => statistic(graph, node.inputs[0], of_empty),
        Op::Select => {
            let [condition, stand_in, x] = [node.inputs[0], node.inputs[1], node.inputs[2]];
            let is_empty = graph.node(condition);
            let compared = is_empty.op == Op::Compare(CompareOp::Eq) && is_empty.inputs[0] == x;
            let stands_in = || Some(of_empty) == constant(graph, is_empty.inputs[1]).zip(constant(graph, stand_in));
            if compared && stands_in() { x } else { id }
        }
        _ => id,
    }
}

/// Whether this is `x - max(x)` of each row.
fn is_shifted(graph: &Graph, id: NodeId) -> bool {
    let node = graph.node(id);
    if node.op != Op::Binary(BinaryOp::Sub) {
        return false;
    }
    let largest = graph.node(statistic(graph, node.inputs[1], EMPTY_MAXIMUM));
    largest.op == Op::RowReduce(ReduceOp::Max) && largest.inputs[0] == node.inputs[0]
}

/// The exponentials of `x - max(x)` that a node is the row sum of.
fn sum_of_exponentials(graph: &Graph, id: NodeId) -> Option<NodeId> {
    let sum = graph.node(statistic(graph, id, EMPTY_SUM));
    let terms = (sum.op == Op::RowReduce(ReduceOp::Sum)).then(|| sum.inputs[0])?;
    let exponential = graph.node(terms);
    let is_shifted = exponential.op == Op::Unary(UnaryOp::Exp) && is_shifted(graph, exponential.inputs[0]);
    is_shifted.then_some(terms)
}

/// The `x` and the constant of `mean(x x) + constant`.
fn mean_square(graph: &Graph, id: NodeId) -> Option<(NodeId, f64)> {
    let node = graph.node(id);
    if node.op != Op::Binary(BinaryOp::Add) {
        return None;
    }
    let mean = graph.node(node.inputs[0]);
    // As the type holds it: 1e-8 is 0 in f16.
    let added =
        constant(graph, node.inputs[1]).map(|added| round_to(node.dtype, added)).filter(|&added| added > 0.0)?;
    let square = (mean.op == Op::RowReduce(ReduceOp::Mean)).then(|| graph.node(mean.inputs[0]))?;
    let is_square = square.op == Op::Binary(BinaryOp::Mul) && square.inputs[0] == square.inputs[1];
    is_square.then(|| (square.inputs[0], added))
}

fn constant(graph: &Graph, id: NodeId) -> Option<f64> {
    match graph.node(id).op {
        Op::Const { value, .. } => Some(value),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use deuteron_graph::Dtype;

    use super::*;
    use crate::{Array, Bounded, bounded};

    const KEYS: usize = 16;

    /// Attention of 4 queries whose mask is `hidden` at keys: all of query 0, none of query 1, all but one of the others.
    fn attention(hidden: f64) -> Bounded {
        let text = "q = input f32[1,4,8] ; k = input f32[1,16,8] ; v = input f32[1,16,8] ; m = input f32[1,4,16]
            y = attention q k v m mask=additive scale=0.35 ; out y";
        let mask = Array::from_fn([1, 4, KEYS], |at| match (at / KEYS, at % KEYS) {
            (0, _) => hidden,
            (1, _) => 0.0,
            (query, key) => {
                if key == query {
                    0.0
                } else {
                    hidden
                }
            }
        });
        let normal = |keys: usize, seed| Array::normal([1, keys, 8], seed).rounded(Dtype::F32);
        bounded(&text.parse().unwrap(), &[normal(4, 1), normal(KEYS, 2), normal(KEYS, 3), mask]).unwrap().remove(0)
    }

    fn ranges(text: &str) -> Vec<Range> {
        let graph: Graph = text.parse().unwrap();
        graph.nodes().iter().filter_map(|node| range_of(&graph, node)).collect()
    }

    /// Scores of masked keys are off by much: they are rounded to multiples of 64 beside -1e9 and of 2e31 beside the smallest `f32`.
    #[test]
    fn a_mask_leaves_a_bound_everywhere() {
        for hidden in [-1e4, -1e9, -1e30, f64::from(f32::MIN)] {
            let expected = attention(hidden);
            let visible = &expected.bounds[8..];
            assert!(visible.iter().all(|&bound| bound < 1e-5), "{hidden}: {visible:?}");
            assert!(
                expected.bounds[..8].iter().all(|bound| bound.is_finite()),
                "{hidden}: {:?}",
                &expected.bounds[..8]
            );
        }
    }

    /// A kernel may give the mean of the values, any one of them, or zeros to a row whose keys are all masked, and nothing outside of the values.
    #[test]
    fn a_row_whose_keys_are_all_masked_may_weight_them_in_any_way() {
        for hidden in [-1e9, f64::from(f32::MIN)] {
            let expected = attention(hidden);
            let values = Array::normal([1, KEYS, 8], 3).rounded(Dtype::F32).values;
            let with_row = |row: &dyn Fn(usize) -> f64| {
                let mut got = expected.exact.clone();
                (0..8).for_each(|column| got.values[column] = row(column));
                expected.compare(&got).holds()
            };
            let mean = |column: usize| (0..KEYS).map(|key| values[key * 8 + column]).sum::<f64>() / KEYS as f64;
            assert!(with_row(&mean) && with_row(&|_| 0.0), "{hidden}");
            assert!((0..KEYS).all(|key| with_row(&|column| values[key * 8 + column])), "{hidden}");
            assert!(!with_row(&|_| 100.0), "{hidden}");
        }
    }

    /// A row of equal values that are off by more than the epsilon: the reciprocal deviation may be anything from the error's up.
    #[test]
    fn a_norm_of_a_row_without_variance_has_a_bound() {
        let norms = ["s = add x r ; y = layer_norm s w b", "t = add x r ; s = sub t x ; y = rms_norm s w"];
        for norm in norms {
            let text = format!(
                "x = input f32[2,64] ; r = input f32[2,64] ; w = input f32[64] ; b = input f32[64] ; {norm} ; out y"
            );
            let [x, r] = [1e6 / 3.0, 1e-3].map(|x| Array::filled([2, 64], x).rounded(Dtype::F32));
            let (w, b) = (Array::filled([64], 1.0), Array::filled([64], 0.0));
            let expected = bounded(&text.parse().unwrap(), &[x, r, w, b]).unwrap().remove(0);
            assert!(expected.bounds.iter().all(|&bound| bound < 4.0 * 8.0), "{norm}: {:?}", &expected.bounds[..4]);
        }
    }

    /// The sum of one exponential is 1 and its logarithm 0, but the largest of the row is off.
    #[test]
    fn a_logarithm_of_exponentials_is_off_by_the_largest() {
        let text = "x = input f16[33,7] ; t = input i32[33] ; s = row_sum x ; l, y = cross_entropy s t ; out y";
        let x = Array::normal([33, 7], 3).rounded(Dtype::F16);
        let expected = bounded(&text.parse().unwrap(), &[x, Array::filled([33], 0.0)]).unwrap().remove(0);
        assert!(expected.bounds.iter().all(|&bound| bound > 0.0), "{:?}", &expected.bounds[..8]);
    }

    #[test]
    fn ranges_are_found_by_the_formula() {
        let range = |low: f64, high: f64| Range { low, high };
        let unit = range(0.0, 1.0);
        assert_eq!(ranges("x = input f32[3,5] ; y = softmax x ; out y"), [unit]);
        let divided = |text: &str| {
            ranges(&format!("x = input f32[3,5] ; z = input f32[3,5] ; {text} ; t = row_sum e ; y = div e t ; out y"))
        };
        assert_eq!(divided("m = row_max x ; s = sub x m ; e = exp s"), [unit]);
        assert_eq!(divided("e = exp x"), []);
        assert_eq!(divided("m = row_max z ; s = sub x m ; e = exp s"), []);
        let normed = "x = input f32[3,64] ; w = input f32[64] ; y = rms_norm x w eps=0.25 ; out y";
        assert_eq!(ranges(normed), [range(0.0, (0.25f64 * (1.0 - ROUNDED)).sqrt().recip()), range(-8.0, 8.0)]);
        let bytes = ranges("x = input f32[3,64] ; q scale = quantize_int8 x ; out q scale");
        assert!(bytes.len() == 1 && (bytes[0].high - 127.0).abs() < 1e-9, "{bytes:?}");
        assert_eq!(ranges("x = input f32[3] ; a = tanh x ; b = sigmoid x ; out a b"), [range(-1.0, 1.0), unit]);
    }
}

//! The spread of results of many elements: sums, matmuls, the largest of a row.

use deuteron_graph::{Dtype, Node, Op, ReduceOp, memory};
use rayon::prelude::*;

use super::{known, moved, repeated_axes, source};
use crate::matmul::matmul as product;
use crate::noise::{DEVIATIONS, accumulation, rounding, row_steps};
use crate::reduce::{column_sum as sum_of_columns, row_reduce, scatter_add as scattered};
use crate::store::Store;
use crate::strided::{Strided, map, map1};
use crate::value::{Axes, Spread, Value, norm};

mod equals;

use equals::{Lanes, variances};

/// Whole numbers up to this magnitude are exact in `f32`, and so are their sums.
const MOST_WHOLE: f64 = (1u64 << 24) as f64;

/// Statistics of a sum's terms: summed squares, summed magnitudes, and whether any is not whole.
struct Terms {
    squares: Strided<'static>,
    magnitudes: Strided<'static>,
    whole: bool,
}

impl Terms {
    fn of(x: &Strided, sum: impl Fn(&Strided) -> Strided<'static>) -> Terms {
        let squares = sum(&map1(x, Store::PLAIN, |x| x * x));
        let magnitudes = sum(&map1(x, Store::PLAIN, f64::abs));
        Terms { squares, magnitudes, whole: !x.any(|x| x.fract() != 0.0) }
    }
}

/// A sum of `x` over some axes, each partial sum of which goes through `steps` additions; `scale` times it is stored.
struct Summed<'a> {
    index: usize,
    node: &'a Node,
    x: &'a Value<'a>,
    /// The terms of each sum, as they lie in `x`.
    lanes: Lanes,
    terms: Terms,
    result: &'a Strided<'a>,
    steps: usize,
    scale: f64,
    /// Whether an axis that is summed is one that errors are in common along.
    common: bool,
    /// Axes of the result that they still are in common along.
    along: Axes,
}

impl Summed<'_> {
    fn spread(self, sum: impl Fn(&Strided) -> Strided<'static>) -> Spread {
        let Summed { node, terms, result, scale, .. } = &self;
        let x = &self.x.spread;
        let in_squares =
            |part: &Option<Strided<'static>>| part.as_ref().map(|part| sum(&variances(&self.x.main, part, self.lanes)));
        let zero = || Strided::scalar(0.0).broadcast(&node.shape);
        let carried = in_squares(&x.own).unwrap_or_else(zero);
        let shared = match self.common {
            true => x.shared.as_ref().map(&sum),
            false => in_squares(&x.shared).map(|squares| map1(&squares, Store::PLAIN, f64::sqrt)),
        };
        let shared = shared.unwrap_or_else(zero);
        let (exact, step) = (x.is_exact(), accumulation(self.steps, false));
        // What has no axis left to be in common along is one element's own.
        let keeps = !self.along.is_empty();
        let whole = terms.whole && exact;
        let inputs = [&carried, &shared, &terms.squares, &terms.magnitudes, result];
        let own = map(&node.shape, inputs, Store::PLAIN, |[carried, shared, squares, magnitude, y]| {
            let exact_sum = whole && magnitude <= MOST_WHOLE;
            let sum = y / scale;
            let accumulated = if exact_sum { 0.0 } else { step * squares.max(sum * sum) };
            let shared = if keeps { 0.0 } else { shared };
            let before = (carried + accumulated + shared * shared).sqrt() * scale;
            // An exact sum divided by a count need not be whole any more.
            known(norm(before, rounding(node.dtype, y, before)), y)
        });
        let shared = keeps.then(|| map(&node.shape, [&shared, result], Store::PLAIN, |[x, y]| known(x * scale, y)));
        Spread { own: Some(own), shared, along: self.along, sources: source(self.index) }.settled()
    }
}

pub(super) fn row_sum(index: usize, node: &Node, x: &Value, result: &Strided) -> Spread {
    let sum = |x: &Strided| row_reduce(ReduceOp::Sum, x, Store::PLAIN);
    let (cols, last) = (x.main.shape.cols(), x.main.shape.rank().saturating_sub(1));
    let mean = node.op == Op::RowReduce(ReduceOp::Mean);
    let along = Axes::where_(node.shape.rank(), |axis| axis != last && x.spread.along.has(axis));
    let summed = Summed {
        index,
        node,
        x,
        lanes: Lanes { length: cols, stride: 1 },
        terms: Terms::of(&x.main, sum),
        result,
        steps: row_steps(cols),
        scale: if mean { 1.0 / cols.max(1) as f64 } else { 1.0 },
        common: x.spread.along.has(last),
        along: along.with(repeated_axes(result)),
    };
    summed.spread(sum)
}

pub(super) fn column_sum(index: usize, node: &Node, x: &Value, result: &Strided) -> Spread {
    let sum = |x: &Strided| sum_of_columns(x, Store::PLAIN);
    let last = x.main.shape.rank() - 1;
    let summed = Summed {
        index,
        node,
        x,
        lanes: Lanes { length: x.main.shape.rows(), stride: x.main.shape.cols() },
        terms: Terms::of(&x.main, sum),
        result,
        steps: x.main.shape.rows(),
        scale: 1.0,
        common: (0..last).any(|axis| x.spread.along.has(axis)),
        along: if x.spread.along.has(last) { Axes::all(1) } else { Axes::NONE },
    };
    summed.spread(sum)
}

pub(super) fn scatter_add(index: usize, node: &Node, operands: &[&Value], result: &Strided) -> Spread {
    let (indices, x) = (operands[0], operands[1]);
    // Indices that lie outside were refused when the sum itself was taken.
    let sum = |x: &Strided| {
        let sums = scattered(&node.shape, &indices.main, x, Store::PLAIN);
        sums.unwrap_or_else(|_| Strided::scalar(0.0).broadcast(&node.shape))
    };
    let last = x.main.shape.rank() - 1;
    let summed = Summed {
        index,
        node,
        x,
        lanes: Lanes { length: x.main.shape.rows(), stride: x.main.shape.cols() },
        terms: Terms::of(&x.main, sum),
        result,
        steps: indices.main.shape.elements(),
        scale: 1.0,
        common: (0..last).any(|axis| x.spread.along.has(axis)),
        along: if x.spread.along.has(last) { Axes(1 << 1) } else { Axes::NONE },
    };
    summed.spread(sum)
}

/// `C = A B`: variances are `A² vB + vA B²`, errors in common along the inner axis `|A| sB + sA |B|`.
pub(super) fn matmul(index: usize, node: &Node, operands: &[&Value], result: &Strided, transpose: [bool; 2]) -> Spread {
    let (a, b) = (operands[0], operands[1]);
    let shape = &node.shape;
    let multiply = |a: &Strided, b: &Strided| product(shape, a, b, transpose[0], transpose[1], Store::PLAIN);
    let square = |x: &Strided| map1(x, Store::PLAIN, |x| x * x);
    let inner_axis = [
        a.main.shape.rank() - if transpose[0] { 2 } else { 1 },
        b.main.shape.rank() - if transpose[1] { 1 } else { 2 },
    ];
    let inner = a.main.shape[inner_axis[0]];
    let common = [a.spread.along.has(inner_axis[0]), b.spread.along.has(inner_axis[1])];
    // Sums of bytes are exact until they are stored.
    let bytes = operands.iter().all(|operand| operand.spread.is_exact() && !operand.main.any(|x| x.fract() != 0.0));
    let narrow = operands.iter().any(|operand| operand.dtype != Dtype::F32);
    let step = accumulation(inner, narrow);
    // What is not in common along the inner axis adds in squares, with the sum's own error.
    let variance = |position: usize| -> Option<Strided<'static>> {
        let x = operands[position];
        let part = match common[position] {
            true => x.spread.own.clone(),
            false => (!x.spread.is_exact()).then(|| x.spread.total(&x.main.shape)),
        };
        part.map(|part| variances(&x.main, &part, Lanes::along(&x.main.shape, inner_axis[position])))
    };
    let b_square = square(&b.main);
    let b_terms = match variance(1) {
        Some(variance) => map(&b.main.shape, [&variance, &b_square], Store::PLAIN, |[v, b]| v + step * b),
        None => map1(&b_square, Store::PLAIN, |b| step * b),
    };
    let mut total = multiply(&square(&a.main), &b_terms);
    if let Some(variance) = variance(0) {
        total = map(shape, [&total, &multiply(&variance, &b_square)], Store::PLAIN, |[x, y]| x + y);
    }
    let magnitude = |x: &Value| map1(&x.main, Store::PLAIN, f64::abs);
    let mut shared: Option<Strided<'static>> = None;
    let mut add = |term: Strided<'static>| {
        shared = Some(match &shared {
            Some(sum) => map(shape, [sum, &term], Store::PLAIN, |[x, y]| x + y),
            None => term,
        });
    };
    if let (true, Some(part)) = (common[0], &a.spread.shared) {
        add(multiply(part, &magnitude(b)));
    }
    if let (true, Some(part)) = (common[1], &b.spread.shared) {
        add(multiply(&magnitude(a), part));
    }
    let along = remaining(node, operands, transpose, common);
    let keeps = shared.is_some() && !along.is_empty();
    let zero = Strided::scalar(0.0).broadcast(shape);
    let whole = if bytes { Some(multiply(&magnitude(a), &magnitude(b))) } else { None };
    let inputs = [&total, shared.as_ref().unwrap_or(&zero), whole.as_ref().unwrap_or(&zero), result];
    let own = map(shape, inputs, Store::PLAIN, |[total, shared, magnitude, y]| {
        let exact_sum = bytes && magnitude <= MOST_WHOLE;
        let shared = if keeps { 0.0 } else { shared };
        let before = if exact_sum { 0.0 } else { (total + step * y * y + shared * shared).sqrt() };
        known(norm(before, rounding(node.dtype, y, before)), y)
    });
    let shared = shared.filter(|_| keeps).map(|part| map(shape, [&part, result], Store::PLAIN, |[x, y]| known(x, y)));
    let along = if keeps { along } else { Axes::NONE };
    Spread { own: Some(own), shared, along, sources: source(index) }.settled()
}

/// Axes of a product along which errors that were in common along the inner axis still are.
fn remaining(node: &Node, operands: &[&Value], transpose: [bool; 2], common: [bool; 2]) -> Axes {
    let rank = node.shape.rank();
    let of_operand = |position: usize| {
        let operand = operands[position];
        let (own_rank, along) = (operand.main.shape.rank(), operand.spread.along);
        // The outer axis of the operand: rows of A, columns of B.
        let outer = own_rank - if (position == 0) == transpose[position] { 1 } else { 2 };
        let target = if position == 0 { rank - 2 } else { rank - 1 };
        Axes::where_(rank, |axis| {
            let leading = axis + 2 < rank && axis + own_rank >= rank && along.has(axis + own_rank - rank);
            leading || (axis == target && along.has(outer))
        })
    };
    let axes = [0, 1].map(|position| if common[position] { of_operand(position) } else { Axes::NONE });
    axes[0].with(axes[1])
}

/// The largest of a row is off as much as the worst element that could be it.
pub(super) fn largest(node: &Node, x: &Value) -> Spread {
    if x.spread.is_exact() {
        return Spread::default();
    }
    let absolute = node.op == Op::RowReduce(ReduceOp::AbsMax);
    let total = x.spread.total(&x.main.shape).broadcast(&x.main.shape);
    let cols = x.main.shape.cols();
    let of_row = |row: usize| {
        let (values, offs) = (x.main.row(row), total.row(row));
        let value = |i: usize| if absolute { values.at(i).abs() } else { values.at(i) };
        let least = |i: usize| value(i) - moved(DEVIATIONS, offs.at(i));
        let floor = (0..cols).map(least).fold(f64::NEG_INFINITY, f64::max);
        let rivals = (0..cols).filter(|&i| value(i) + moved(DEVIATIONS, offs.at(i)) >= floor);
        rivals.map(|i| offs.at(i)).fold(0.0, f64::max)
    };
    let mut off = memory::room(x.main.shape.rows());
    off.par_extend((0..x.main.shape.rows()).into_par_iter().map(of_row));
    let last = x.main.shape.rank().saturating_sub(1);
    let shape = x.main.shape.with_cols(1);
    let along = Axes::where_(shape.rank(), |axis| axis != last && x.spread.along.has(axis));
    let off = Strided::owned(shape, off);
    let parts = if along.is_empty() { (Some(off), None) } else { (None, Some(off)) };
    Spread { own: parts.0, shared: parts.1, along, sources: x.spread.sources.clone() }.settled()
}

//! Running error analysis: the deviation of every element of every value, to first order, from those of its operands.
//!
//! An operation multiplies the errors of its operands by its slopes and adds an error of its own: a rounding, a function's,
//! that of a sum (`noise.rs`). Errors of unrelated operands add in squares; those of operands with a common source, which
//! may be the same error twice, add as they are. Slopes are the largest within reach of the error, so that a quotient by
//! nearly nothing is known to be unknown.

mod sums;

use std::collections::BTreeSet;
use std::sync::Arc;

use deuteron_graph::{BinaryOp, Callee, Dtype, Graph, Node, Op, ReduceOp, Shape, UnaryOp, View};

use crate::noise::{DEVIATIONS, function, quotient, rounding};
use crate::range::{least_argument, range_of};
use crate::reduce::{append, gather};
use crate::store::Store;
use crate::strided::{Strided, concat, map, map_pair};
use crate::value::{Axes, Spread, Value, norm, or_zero};

/// The spread of the result of a node, which is the one at `index` or has some of its rows.
pub(crate) fn spread_of(graph: &Graph, index: usize, node: &Node, operands: &[&Value], result: &Strided) -> Spread {
    let spread = followed(graph, index, node, operands, result);
    match range_of(graph, node) {
        Some(range) if !spread.is_exact() => range.spread(spread, result),
        _ => spread,
    }
}

/// The same by the slopes of the operation alone.
fn followed(graph: &Graph, index: usize, node: &Node, operands: &[&Value], result: &Strided) -> Spread {
    let first = || operands[0].spread.clone();
    let in_composite = graph.calls()[node.call.index()].callee != Callee::Primitive;
    match &node.op {
        // An input is rounded by the interpreter's caller; see `of_input`.
        Op::Input { .. } | Op::Iota { .. } | Op::Random { .. } | Op::Opaque(_) => Spread::default(),
        // Results are discrete: a decision that may fall the other way is slack.
        Op::Compare(_) | Op::Unary(UnaryOp::Round) | Op::RowReduce(ReduceOp::ArgMax) => Spread::default(),
        Op::Cast(Dtype::I8 | Dtype::F8e4m3 | Dtype::I32 | Dtype::Bool) => Spread::default(),
        Op::Const { .. } => from_steps(index, node, operands, result, |_, y| rounding(node.dtype, y, 0.0)),
        // Integers beyond 2^24 are rounded.
        Op::Cast(Dtype::F32) if operands[0].dtype == Dtype::I32 => {
            from_steps(index, node, operands, result, |_, y| rounding(node.dtype, y, 0.0))
        }
        // A widening changes nothing.
        Op::Cast(_) if node.dtype == Dtype::F32 && operands[0].spread.is_exact() => Spread::default(),
        Op::Cast(Dtype::F32) => first(),
        Op::Cast(_) => unary(index, node, operands[0], result, |_, _, _| 1.0, |_, _| 0.0),
        Op::Unary(UnaryOp::Neg | UnaryOp::Abs) | Op::StopGradient => first(),
        Op::Unary(op) => {
            let least = least_argument(graph, node);
            let slope = |x: f64, y: f64, off: f64| slope(*op, x, y, DEVIATIONS * off, least);
            unary(index, node, operands[0], result, slope, |x, y| function(*op, in_composite, x, y))
        }
        Op::Binary(_) if node.dtype == Dtype::I32 => Spread::default(),
        Op::Binary(op) => binary(index, node, *op, operands, result),
        Op::Select => select(node, operands),
        Op::View(change) => through_view(change, operands[0], &node.shape),
        Op::Concat { axis } => through_concat(node, *axis, operands),
        // The largest of a row is what composites shift exponents by: whatever is taken cancels out.
        Op::RowReduce(ReduceOp::Max) if in_composite => Spread::default(),
        Op::RowReduce(ReduceOp::Max | ReduceOp::AbsMax) => sums::largest(node, operands[0]),
        Op::RowReduce(ReduceOp::Sum | ReduceOp::Mean) => sums::row_sum(index, node, operands[0], result),
        Op::ColumnSum => sums::column_sum(index, node, operands[0], result),
        Op::ScatterAdd { .. } => sums::scatter_add(index, node, operands, result),
        Op::Matmul { transpose_a, transpose_b } => {
            sums::matmul(index, node, operands, result, [*transpose_a, *transpose_b])
        }
        Op::Gather => through_gather(node, operands),
        Op::Append { batch } => through_append(*batch, operands, &node.shape),
    }
}

/// The spread of an input: zero if it is what its dtype stores.
pub(crate) fn of_input(index: usize, dtype: Dtype, value: &Strided) -> Spread {
    if !value.any(|x| rounding(dtype, x, 0.0) != 0.0) {
        return Spread::default();
    }
    let own = map(&value.shape, [value], Store::PLAIN, |[x]| known(rounding(dtype, x, 0.0), x));
    Spread { own: Some(own), sources: source(index), ..Spread::default() }.settled()
}

fn source(index: usize) -> Arc<BTreeSet<usize>> {
    Arc::new(BTreeSet::from([index]))
}

/// Sources of all operands, and of this node.
fn sources(index: usize, operands: &[&Spread]) -> Arc<BTreeSet<usize>> {
    let all = operands.iter().flat_map(|operand| operand.sources.iter().copied());
    Arc::new(all.chain([index]).collect())
}

/// Axes along which a result is computed once and repeated: so is its error.
fn repeated_axes(result: &Strided) -> Axes {
    Axes::where_(result.shape.rank(), |axis| result.shape[axis] > 1 && result.strides[axis] == 0)
}

/// Nothing is off where a result is not finite; nothing is known where the arithmetic of errors has no answer.
#[inline(always)]
fn known(off: f64, y: f64) -> f64 {
    if !y.is_finite() {
        0.0
    } else if off.is_nan() {
        f64::INFINITY
    } else {
        off
    }
}

/// An infinite slope at an exact value moves nothing.
#[inline(always)]
fn moved(slope: f64, off: f64) -> f64 {
    if off == 0.0 { 0.0 } else { slope * off }
}

/// A value that only this node's own error reaches.
fn from_steps(
    index: usize,
    node: &Node,
    operands: &[&Value],
    result: &Strided,
    step: impl Fn(f64, f64) -> f64 + Sync,
) -> Spread {
    let x = operands.first().map_or(result, |operand| &operand.main);
    let fresh = map(&node.shape, [x, result], Store::PLAIN, |[x, y]| known(step(x, y), y));
    placed(index, fresh, result)
}

/// A fresh error, in common along axes that the result repeats over.
fn placed(index: usize, fresh: Strided<'static>, result: &Strided) -> Spread {
    let along = repeated_axes(result);
    let parts = if along.is_empty() { (Some(fresh), None) } else { (None, Some(fresh)) };
    Spread { own: parts.0, shared: parts.1, along, sources: source(index) }.settled()
}

fn unary(
    index: usize,
    node: &Node,
    x: &Value,
    result: &Strided,
    slope: impl Fn(f64, f64, f64) -> f64 + Sync,
    step: impl Fn(f64, f64) -> f64 + Sync,
) -> Spread {
    let dtype = node.dtype;
    let spread = &x.spread;
    if spread.is_exact() {
        return from_steps(index, node, &[x], result, |x, y| norm(rounding(dtype, y, 0.0), step(x, y)));
    }
    let again = repeated_axes(result);
    let fresh = |x: f64, y: f64, off: f64| norm(rounding(dtype, y, off), step(x, y));
    let (own, shared) = (spread.own(&node.shape), spread.shared(&node.shape));
    let inputs = [&x.main, result, &own, &shared];
    let parts = |[x, y, own, shared]: [f64; 4]| {
        let off = norm(own, shared);
        let slope = slope(x, y, off);
        let fresh = fresh(x, y, moved(slope, off));
        let part = |part: f64, fresh: f64| known(norm(moved(slope, part), fresh), y);
        if again.is_empty() { [part(own, fresh), part(shared, 0.0)] } else { [part(own, 0.0), part(shared, fresh)] }
    };
    let has_shared = spread.shared.is_some() || !again.is_empty();
    let (own_part, shared_part) = mapped(&node.shape, inputs, has_shared, parts);
    let sources = sources(index, &[spread]);
    Spread { own: Some(own_part), shared: shared_part, along: spread.along.with(again), sources }.settled()
}

/// The parts of a spread; without a shared part that is zero everywhere.
fn mapped<const N: usize>(
    shape: &Shape,
    inputs: [&Strided; N],
    has_shared: bool,
    parts: impl Fn([f64; N]) -> [f64; 2] + Sync,
) -> (Strided<'static>, Option<Strided<'static>>) {
    if !has_shared {
        return (map(shape, inputs, Store::PLAIN, |x| parts(x)[0]), None);
    }
    let [own, shared] = map_pair(shape, inputs, parts);
    (own, Some(shared))
}

/// The largest slope of a function within `reach` of `x`, where its value is `y`, among arguments of magnitude `least` or more.
#[inline(always)]
fn slope(op: UnaryOp, x: f64, y: f64, reach: f64, least: f64) -> f64 {
    let near = (x.abs() - reach).max(least);
    // Where the error is small, the slope at `x` is as good and costs no function. Slopes of exponentials change by a factor with
    // the error itself, however large `x` is.
    let (small, tiny) = (reach < x.abs() / 1024.0, reach < 1.0 / 1024.0);
    match op {
        UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Round => 1.0,
        UnaryOp::Exp if tiny => y,
        // To the value at the end of its reach: beside it the value here is nothing, and it may be 0 where the other factor overflows.
        UnaryOp::Exp if reach > 64.0 => (x + reach).exp() / reach,
        UnaryOp::Exp => y * reach.exp_m1() / reach,
        UnaryOp::Log | UnaryOp::Reciprocal if near <= 0.0 => f64::INFINITY,
        UnaryOp::Log => 1.0 / near,
        UnaryOp::Reciprocal => y.abs() / near,
        UnaryOp::Sqrt => 1.0 / (y + near.max(0.0).sqrt()).max(reach.sqrt()),
        UnaryOp::Rsqrt if near <= 0.0 => f64::INFINITY,
        UnaryOp::Rsqrt if small => 0.5 * y / x,
        UnaryOp::Rsqrt => {
            let (root, least) = (x.sqrt(), near.sqrt());
            1.0 / (root * least * (root + least))
        }
        UnaryOp::Tanh if tiny => 1.0 - y * y,
        UnaryOp::Tanh => 4.0 * bell(2.0 * near),
        UnaryOp::Erf => std::f64::consts::FRAC_2_SQRT_PI * (-near.max(0.0).powi(2)).exp(),
        UnaryOp::Sigmoid if tiny => y * (1.0 - y),
        UnaryOp::Sigmoid => bell(near),
    }
}

/// The slope of a sigmoid at `x`, at 0 where `x` is negative. `s (1 - s)` is 0 from 37 on, where the sigmoid rounds to 1 in `f64`; the slope
/// at -46 is 1e-20, as the sigmoid is.
#[inline(always)]
fn bell(x: f64) -> f64 {
    let power = (-x.max(0.0)).exp();
    power / (1.0 + power).powi(2)
}

/// The largest slopes of an operation in its two operands, within reach of their errors.
#[inline(always)]
fn slopes(op: BinaryOp, [a, a_off]: [f64; 2], [b, b_off]: [f64; 2]) -> [f64; 2] {
    match op {
        BinaryOp::Add | BinaryOp::Sub => [1.0, 1.0],
        BinaryOp::Mul => [b.abs() + DEVIATIONS / 2.0 * b_off, a.abs() + DEVIATIONS / 2.0 * a_off],
        BinaryOp::Div => {
            let near = b.abs() - DEVIATIONS * b_off;
            let steepest = if near > 0.0 { 1.0 / near } else { f64::INFINITY };
            [steepest, (a / b).abs() * steepest]
        }
        BinaryOp::Max | BinaryOp::Min => {
            // Either, where they are too close to tell.
            let distance = (a - b).abs();
            let first_wins = (a > b) == (op == BinaryOp::Max);
            let close = distance <= DEVIATIONS * (a_off + b_off) || distance.is_nan();
            [(close || first_wins) as u8 as f64, (close || !first_wins) as u8 as f64]
        }
    }
}

fn binary(index: usize, node: &Node, op: BinaryOp, operands: &[&Value], result: &Strided) -> Spread {
    let shape = &node.shape;
    let [a, b] = [0, 1].map(|i| operands[i].spread.repeated(&operands[i].main.shape, shape));
    let picks = matches!(op, BinaryOp::Max | BinaryOp::Min);
    let own_step = |y: f64, off: f64| match op {
        // One of the operands, as it is.
        BinaryOp::Max | BinaryOp::Min => 0.0,
        BinaryOp::Div => norm(rounding(node.dtype, y, off), quotient(y)),
        BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul => rounding(node.dtype, y, off),
    };
    if a.is_exact() && b.is_exact() {
        return from_steps(index, node, &[], result, |_, y| own_step(y, 0.0));
    }
    let related = node.inputs[0] == node.inputs[1] || !a.sources.is_disjoint(&b.sources);
    let join = |a: f64, b: f64| match (picks, related) {
        (true, _) => a.max(b),
        (false, true) => a + b,
        (false, false) => norm(a, b),
    };
    let again = repeated_axes(result);
    // One of two parts that is not there is zero: their sum is the other one.
    let both = |spread: &Spread| spread.own.is_some() && spread.shared.is_some();
    let (a_both, b_both) = (both(&a), both(&b));
    let total = |both: bool, own: f64, shared: f64| if both { norm(own, shared) } else { own + shared };
    let parts = |[a, a_own, a_shared, b, b_own, b_shared, y]: [f64; 7]| {
        let (a_off, b_off) = (total(a_both, a_own, a_shared), total(b_both, b_own, b_shared));
        let [a_slope, b_slope] = slopes(op, [a, a_off], [b, b_off]);
        let joined = |a: f64, b: f64| join(moved(a_slope, a), moved(b_slope, b));
        let fresh = own_step(y, joined(a_off, b_off));
        let (own_fresh, shared_fresh) = if again.is_empty() { (fresh, 0.0) } else { (0.0, fresh) };
        let (own, shared) = (joined(a_own, b_own), joined(a_shared, b_shared));
        [known(norm(own, own_fresh), y), known(norm(shared, shared_fresh), y)]
    };
    let (a_own, a_shared, b_own, b_shared) = (a.own(shape), a.shared(shape), b.own(shape), b.shared(shape));
    let inputs = [&operands[0].main, &a_own, &a_shared, &operands[1].main, &b_own, &b_shared, result];
    let has_shared = a.shared.is_some() || b.shared.is_some() || !again.is_empty();
    let (own, shared) = mapped(shape, inputs, has_shared, parts);
    let along = a.along.with(b.along).with(again);
    Spread { own: Some(own), shared, along, sources: sources(index, &[&a, &b]) }.settled()
}

fn select(node: &Node, operands: &[&Value]) -> Spread {
    let shape = &node.shape;
    let [a, b] = [1, 2].map(|i| operands[i].spread.repeated(&operands[i].main.shape, shape));
    if a.is_exact() && b.is_exact() {
        return Spread::default();
    }
    let condition = &operands[0].main;
    let pick = |a: &Strided, b: &Strided| {
        map(shape, [condition, a, b], Store::PLAIN, |[condition, a, b]| if condition != 0.0 { a } else { b })
    };
    let own = pick(&a.own(shape), &b.own(shape));
    let shared = (a.shared.is_some() || b.shared.is_some()).then(|| pick(&a.shared(shape), &b.shared(shape)));
    let sources = Arc::new(a.sources.union(&b.sources).copied().collect());
    Spread { own: Some(own), shared, along: a.along.with(b.along), sources }.settled()
}

pub(crate) fn through_view(change: &View, x: &Value, shape: &Shape) -> Spread {
    let spread = &x.spread;
    let along = match change {
        View::Broadcast(_) => {
            let repeated = spread.repeated(&x.main.shape, shape);
            let wide = |part: &Option<Strided<'static>>| part.as_ref().map(|part| part.broadcast(shape));
            return Spread { own: wide(&repeated.own), shared: wide(&repeated.shared), ..repeated };
        }
        View::Slice { .. } => spread.along,
        View::Transpose(permutation) => Axes::where_(shape.rank(), |axis| spread.along.has(permutation[axis])),
        View::Reshape(_) => reshaped(spread.along, &x.main.shape, shape),
    };
    // Packed, so that what is cut away is seen to be gone.
    let viewed = |part: &Option<Strided<'static>>| part.as_ref().map(|part| part.view(change).packed());
    let viewed = Spread { own: viewed(&spread.own), shared: viewed(&spread.shared), along, ..spread.clone() };
    if matches!(change, View::Slice { .. }) { viewed.settled() } else { viewed }
}

/// Axes after a reshape: old and new axes are matched in groups of equal size, and each group is taken as a whole.
fn reshaped(along: Axes, from: &Shape, to: &Shape) -> Axes {
    let (mut old, mut new, mut found) = (0, 0, Axes::NONE);
    while old < from.rank() || new < to.rank() {
        let (first_old, first_new) = (old, new);
        let (mut old_size, mut new_size) = (1, 1);
        loop {
            if old < from.rank() && (old_size <= new_size || new == to.rank()) {
                old_size *= from[old];
                old += 1;
            } else if new < to.rank() {
                new_size *= to[new];
                new += 1;
            }
            let done = old == from.rank() && new == to.rank();
            if done || (old_size == new_size && old > first_old && new > first_new) {
                break;
            }
        }
        if (first_old..old).any(|axis| along.has(axis)) {
            found = found.with(Axes::where_(to.rank(), |axis| (first_new..new).contains(&axis)));
        }
    }
    found
}

fn through_concat(node: &Node, axis: usize, operands: &[&Value]) -> Spread {
    if operands.iter().all(|operand| operand.spread.is_exact()) {
        return Spread::default();
    }
    let joined = |part: &dyn Fn(&Value) -> Strided<'static>| {
        let parts: Vec<Strided> = operands.iter().map(|operand| part(operand)).collect();
        concat(&node.shape, axis, &parts.iter().collect::<Vec<_>>())
    };
    let along = operands.iter().fold(Axes::NONE, |axes, operand| axes.with(operand.spread.along));
    let sources = Arc::new(operands.iter().flat_map(|operand| operand.spread.sources.iter().copied()).collect());
    let own = joined(&|operand| operand.spread.own(&operand.main.shape));
    let shared = joined(&|operand| operand.spread.shared(&operand.main.shape));
    Spread { own: Some(own), shared: Some(shared), along, sources }.settled()
}

fn through_gather(node: &Node, operands: &[&Value]) -> Spread {
    let spread = &operands[0].spread;
    let taken = |part: &Option<Strided<'static>>| {
        part.as_ref().and_then(|part| gather(&node.shape, part, &operands[1].main).ok())
    };
    let last = node.shape.rank() - 1;
    let along = Axes::where_(node.shape.rank(), |axis| spread.along.has(if axis == last { 1 } else { 0 }));
    Spread { own: taken(&spread.own), shared: taken(&spread.shared), along, sources: spread.sources.clone() }.settled()
}

fn through_append(batch: usize, operands: &[&Value], shape: &Shape) -> Spread {
    let [cache, rows] = [&operands[0].spread, &operands[1].spread];
    if cache.is_exact() && rows.is_exact() {
        return Spread::default();
    }
    let placed = |cache: &Option<Strided<'static>>, rows: &Option<Strided<'static>>| {
        let rows = or_zero(rows, &operands[1].main.shape);
        append(&or_zero(cache, shape), &rows, &operands[2].main, batch).ok()
    };
    let sources = Arc::new(cache.sources.union(&rows.sources).copied().collect());
    let (own, shared) = (placed(&cache.own, &rows.own), placed(&cache.shared, &rows.shared));
    Spread { own, shared, along: cache.along.with(rows.along), sources }.settled()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exponential_far_below_zero_is_zero_however_far_its_argument_is_off() {
        let slope = |x: f64, y: f64, reach: f64| slope(UnaryOp::Exp, x, y, reach, 0.0);
        assert_eq!(slope(-3.4e38, 0.0, 1e31), 0.0);
        assert_eq!(slope(-800.0, 0.0, 700.0), (-100f64).exp() / 700.0);
        assert_eq!(slope(-10.0, (-10f64).exp(), 1e-9), (-10f64).exp());
        assert_eq!(slope(0.0, 1.0, 1e4), f64::INFINITY);
    }

    #[test]
    fn a_slope_is_the_largest_within_reach() {
        for (op, x, reach) in [
            (UnaryOp::Exp, -46.0, 3.0),
            (UnaryOp::Sigmoid, -46.0, 3.0),
            (UnaryOp::Sigmoid, 46.0, 3.0),
            (UnaryOp::Sigmoid, -80.0, 0.07),
            (UnaryOp::Sigmoid, -2.0, 3.0),
            (UnaryOp::Sigmoid, 0.3, 1e-4),
            (UnaryOp::Tanh, -25.0, 0.02),
            (UnaryOp::Tanh, 25.0, 3.0),
            (UnaryOp::Tanh, 0.5, 0.25),
            (UnaryOp::Erf, -2.5, 1.0),
        ] {
            let steepest = slope(op, x, op.apply(x), reach, 0.0);
            let exact = |x: f64| match op {
                UnaryOp::Exp => x.exp(),
                UnaryOp::Sigmoid => (x / 2.0).cosh().powi(-2) / 4.0,
                UnaryOp::Tanh => x.cosh().powi(-2),
                _ => std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp(),
            };
            let steps = (-1000..=1000).map(|step| exact(x + reach * f64::from(step) / 1000.0));
            let largest = steps.fold(0.0, f64::max);
            // That of an exponential is the secant to the end of its reach.
            let expected = if op == UnaryOp::Exp { ((x + reach).exp() - x.exp()) / reach } else { largest };
            assert!(
                (steepest / expected - 1.0).abs() < 2e-3,
                "{op:?} at {x} within {reach}: {steepest:e}, {expected:e}"
            );
        }
    }
}

//! Slack: the allowed error of an element because of an undecided branch.
//!
//! A comparison of two computed values that are equal within rounding errors is a near tie: a kernel may take the
//! other branch of the following select and still be right. So is a rounding to integers near a half. Slack originates
//! there and is carried through every later primitive; it is `None` (zero everywhere) in almost every tensor.

use deuteron_graph::{BinaryOp, CompareOp, Dtype, Graph, Node, Op, ReduceOp, UnaryOp, View, memory};
use rayon::prelude::*;

use crate::matmul::matmul;
use crate::noise::DEVIATIONS;
use crate::range::{least, least_argument, range_of};
use crate::reduce::{append, column_sum, gather, row_reduce, scatter_add};
use crate::round::{round_to, ulp};
use crate::scalar;
use crate::store::Store;
use crate::strided::{Strided, concat, map};
use crate::value::Value;

type Slack = Option<Strided<'static>>;

/// A near tie; an equality that holds unless its row has a near tie.
const NEAR: f64 = 1.0;
const EQUAL: f64 = 0.5;

/// The slack of a node's result, which is `result` unless a decision falls the other way.
pub(crate) fn slack_of(graph: &Graph, node: &Node, operands: &[&Value], result: &Strided) -> Slack {
    let born = match &node.op {
        Op::Compare(CompareOp::Eq) if never_zero(graph, node, operands) => None,
        Op::Compare(_) if node.inputs[0] != node.inputs[1] => near_ties(node, operands[0], operands[1]),
        Op::Unary(UnaryOp::Round) => jumps(operands[0], f64::round_ties_even),
        Op::Cast(dtype @ (Dtype::I8 | Dtype::I32 | Dtype::F8e4m3)) => jumps(operands[0], |x| round_to(*dtype, x)),
        Op::RowReduce(ReduceOp::ArgMax) => rival_columns(operands[0]),
        _ => {
            if operands.iter().all(|operand| operand.slack.is_none()) {
                return None;
            }
            let carried = carried(graph, node, operands);
            let stored = carried.map(|slack| if rounds(node) { stored(node, &slack, result) } else { slack });
            match range_of(graph, node) {
                Some(range) => stored.map(|slack| range.slack(slack, result)),
                None => stored,
            }
        }
    };
    born.filter(|slack| slack.any(|x| x > 0.0))
}

/// Whether a comparison asks of a value that is well above 0, whatever was rounded, whether it is 0.
fn never_zero(graph: &Graph, node: &Node, operands: &[&Value]) -> bool {
    let is_zero = matches!(graph.node(node.inputs[1]).op, Op::Const { value: 0.0, .. });
    is_zero && least(graph, node.inputs[0]) > 0.0 && !operands[0].main.any(|x| x == 0.0 || x.is_nan())
}

/// Whether an operation stores a number that it computed.
fn rounds(node: &Node) -> bool {
    match &node.op {
        Op::Unary(op) => !matches!(op, UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Round),
        Op::Binary(op) => node.dtype.is_float() && !matches!(op, BinaryOp::Max | BinaryOp::Min),
        Op::RowReduce(op) => matches!(op, ReduceOp::Sum | ReduceOp::Mean),
        Op::Cast(to) => matches!(to, Dtype::F16 | Dtype::Bf16),
        Op::ColumnSum | Op::Matmul { .. } | Op::ScatterAdd { .. } => true,
        _ => false,
    }
}

/// What the other branch comes to is rounded as well, however exact the result is here: by a spacing where it lies.
fn stored(node: &Node, slack: &Strided, result: &Strided) -> Strided<'static> {
    map(&node.shape, [slack, result], Store::PLAIN, |[slack, y]| {
        let reached = y.abs() + slack;
        if slack > 0.0 && reached.is_finite() { slack + ulp(node.dtype, reached) } else { slack }
    })
}

/// Slack of the operands, seen through an operation without decisions of its own.
fn carried(graph: &Graph, node: &Node, operands: &[&Value]) -> Slack {
    match &node.op {
        Op::Input { .. } | Op::Const { .. } | Op::Iota { .. } | Op::Random { .. } | Op::Compare(_) => None,
        // Refused before anything is carried.
        Op::Opaque(_) => None,
        Op::Unary(op) => Some(through_unary(*op, operands[0], least_argument(graph, node))),
        Op::Binary(op) => Some(through_binary(node, *op, operands)),
        Op::Select => Some(through_select(node, operands)),
        Op::Cast(_) | Op::StopGradient => operands[0].slack.clone(),
        Op::View(change @ View::Slice { .. }) => {
            // Packed, so that what is cut away is seen to be gone.
            operands[0].slack.as_ref().map(|slack| slack.view(change).packed())
        }
        Op::View(change) => operands[0].slack.as_ref().map(|slack| slack.view(change)),
        Op::Concat { axis } => {
            let parts: Vec<Strided> = operands.iter().map(|operand| slack_or_zero(operand)).collect();
            Some(concat(&node.shape, *axis, &parts.iter().collect::<Vec<_>>()))
        }
        Op::RowReduce(op) => {
            let op = if *op == ReduceOp::AbsMax { ReduceOp::Max } else { *op };
            operands[0].slack.as_ref().map(|slack| row_reduce(op, slack, Store::PLAIN))
        }
        Op::ColumnSum => operands[0].slack.as_ref().map(|slack| column_sum(slack, Store::PLAIN)),
        Op::Matmul { transpose_a, transpose_b } => Some(through_matmul(node, operands, *transpose_a, *transpose_b)),
        Op::Gather => match &operands[1].slack {
            Some(_) => Some(unknown(node)),
            None => operands[0].slack.as_ref().and_then(|slack| gather(&node.shape, slack, &operands[1].main).ok()),
        },
        Op::Append { batch } => match &operands[2].slack {
            Some(_) => Some(unknown(node)),
            None if operands[0].slack.is_none() && operands[1].slack.is_none() => None,
            None => {
                let (cache, rows) = (slack_or_zero(operands[0]), slack_or_zero(operands[1]));
                append(&cache, &rows, &operands[2].main, *batch).ok()
            }
        },
        Op::ScatterAdd { .. } => match &operands[0].slack {
            Some(_) => Some(unknown(node)),
            None => {
                let slack = operands[1].slack.as_ref();
                slack.and_then(|slack| scatter_add(&node.shape, &operands[0].main, slack, Store::PLAIN).ok())
            }
        },
    }
}

/// Everything may have changed: rows were picked by an index that is itself a near tie.
fn unknown(node: &Node) -> Strided<'static> {
    Strided::scalar(f64::INFINITY).broadcast(&node.shape)
}

fn slack_or_zero(value: &Value) -> Strided<'static> {
    value.slack.clone().unwrap_or_else(|| Strided::scalar(0.0).broadcast(&value.main.shape))
}

/// How far apart two results are. Equal infinities and two NaN are no change; one NaN is any change.
fn change(from: f64, to: f64) -> f64 {
    if from == to || (from.is_nan() && to.is_nan()) {
        return 0.0;
    }
    let distance = (from - to).abs();
    if distance.is_nan() { f64::INFINITY } else { distance }
}

/// Arguments are not below `least`, if that is above 0.
fn through_unary(op: UnaryOp, x: &Value, least: f64) -> Strided<'static> {
    let crosses_pole = op == UnaryOp::Reciprocal && least == 0.0;
    map(&x.main.shape, [&x.main, &slack_or_zero(x)], Store::PLAIN, |[x, slack]| {
        if slack == 0.0 {
            return 0.0;
        }
        if crosses_pole && slack >= x.abs() {
            return f64::INFINITY;
        }
        let here = op.apply(x);
        let below = if least > 0.0 { (x - slack).max(least.min(x)) } else { x - slack };
        change(here, op.apply(x + slack)).max(change(here, op.apply(below)))
    })
}

/// The largest change at a corner: every binary primitive is monotonic in each operand, away from a pole. What the other branch comes to
/// is multiplied by a factor that is off itself.
fn through_binary(node: &Node, op: BinaryOp, operands: &[&Value]) -> Strided<'static> {
    let (a_slack, b_slack) = (slack_or_zero(operands[0]), slack_or_zero(operands[1]));
    let [a_off, b_off] = [0, 1].map(|operand: usize| operands[operand].spread.total(&operands[operand].main.shape));
    let inputs = [&operands[0].main, &a_slack, &a_off, &operands[1].main, &b_slack, &b_off];
    let is_integer = node.dtype == Dtype::I32;
    map(&node.shape, inputs, Store::PLAIN, |[a, a_slack, a_off, b, b_slack, b_off]| {
        if a_slack == 0.0 && b_slack == 0.0 {
            return 0.0;
        }
        let (a_reach, b_reach) = (DEVIATIONS * a_off, DEVIATIONS * b_off);
        let nearest = b.abs() - b_slack - b_reach;
        if op == BinaryOp::Div && nearest <= 0.0 {
            return f64::INFINITY;
        }
        let here = scalar::binary(op, a, b);
        let corners = [(1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0)];
        let at_corner = |(i, j)| {
            let there = scalar::binary(op, a + i * a_slack, b + j * b_slack);
            // An integer that wraps may become any other.
            let wraps = is_integer && !(f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&there);
            if wraps { f64::INFINITY } else { change(here, there) }
        };
        let largest = corners.into_iter().map(at_corner).fold(0.0, f64::max);
        // Nothing times anything is nothing, even where nothing is known of the other.
        let both = |slack: f64, reach: f64| if slack == 0.0 || reach == 0.0 { 0.0 } else { slack * reach };
        let crossed = both(a_slack, b_reach) + both(b_slack, a_reach);
        largest
            + match op {
                BinaryOp::Mul => crossed,
                BinaryOp::Div => crossed / (b.abs() * nearest),
                BinaryOp::Add | BinaryOp::Sub | BinaryOp::Max | BinaryOp::Min => 0.0,
            }
    })
}

fn through_select(node: &Node, operands: &[&Value]) -> Strided<'static> {
    let slacks = [slack_or_zero(operands[0]), slack_or_zero(operands[1]), slack_or_zero(operands[2])];
    let offs = [1, 2].map(|branch: usize| operands[branch].spread.total(&operands[branch].main.shape));
    let [condition, a, b] = [0, 1, 2].map(|operand: usize| &operands[operand].main);
    let inputs = [condition, a, b, &slacks[0], &slacks[1], &slacks[2], &offs[0], &offs[1]];
    map(&node.shape, inputs, Store::PLAIN, |[condition, a, b, unsure, a_slack, b_slack, a_off, b_off]| {
        if unsure > 0.0 {
            // The other branch is rounded as well, which later operations cannot see from here.
            change(a, b) + a_slack.max(b_slack) + DEVIATIONS * a_off.max(b_off)
        } else if condition != 0.0 {
            a_slack
        } else {
            b_slack
        }
    })
}

/// `|A| sB + sA |B| + sA sB`, magnitudes with what they may be off.
fn through_matmul(node: &Node, operands: &[&Value], transpose_a: bool, transpose_b: bool) -> Strided<'static> {
    let product = |a: &Strided, b: &Strided| matmul(&node.shape, a, b, transpose_a, transpose_b, Store::PLAIN);
    let magnitude = |value: &Value| {
        let off = value.spread.total(&value.main.shape);
        map(&value.main.shape, [&value.main, &off], Store::PLAIN, |[x, off]| x.abs() + DEVIATIONS * off)
    };
    let (a, b) = (operands[0], operands[1]);
    let mut total = Strided::scalar(0.0).broadcast(&node.shape);
    let mut add = |term: Strided| {
        // 0 times an infinite slack is NaN: nothing is known there.
        total =
            map(&node.shape, [&total, &term], Store::PLAIN, |[x, y]| if y.is_nan() { f64::INFINITY } else { x + y });
    };
    if let Some(slack) = &b.slack {
        add(product(&magnitude(a), slack));
    }
    if let Some(slack) = &a.slack {
        add(product(slack, &magnitude(b)));
        if let Some(other) = &b.slack {
            add(product(slack, other));
        }
    }
    total
}

/// Where the comparison could fall the other way. Computed values of one reach that are bitwise equal are so by
/// structure (a maximum and the element it came from: no arithmetic lies between them), unless their row holds another
/// near tie. Where arithmetic lies between, they are equal by chance.
fn near_ties(node: &Node, a: &Value, b: &Value) -> Slack {
    let sure = |value: &Value| value.spread.is_exact() && value.slack.is_none();
    if sure(a) && sure(b) {
        return None;
    }
    let (a_off, b_off) = (a.spread.total(&a.main.shape), b.spread.total(&b.main.shape));
    let (a_slack, b_slack) = (slack_or_zero(a), slack_or_zero(b));
    let inputs = [&a.main, &a_off, &a_slack, &b.main, &b_off, &b_slack];
    let marks = map(&node.shape, inputs, Store::PLAIN, |[a, a_off, a_slack, b, b_off, b_slack]| {
        let slack = a_slack + b_slack;
        if a == b {
            return match slack > 0.0 {
                true => NEAR,
                false if a_off == 0.0 && b_off == 0.0 => 0.0,
                false => {
                    if same(a_off, b_off) {
                        EQUAL
                    } else {
                        NEAR
                    }
                }
            };
        }
        let distance = (a - b).abs();
        // Infinities of two signs are apart, whatever they are off.
        (distance.is_finite() && distance <= slack + DEVIATIONS * (a_off + b_off)) as u8 as f64
    });
    if !marks.any(|mark| mark == NEAR) {
        return None;
    }
    let mut marks = marks.into_array();
    marks.values.par_chunks_mut(node.shape.cols().max(1)).for_each(|row| {
        let unsettled = row.contains(&NEAR);
        row.iter_mut().for_each(|mark| *mark = (*mark == NEAR || (*mark == EQUAL && unsettled)) as u8 as f64);
    });
    Some(Strided::owned(marks.shape, marks.values))
}

/// Whether two deviations are of one value: they differ by how they were added up.
fn same(a: f64, b: f64) -> bool {
    (a - b).abs() <= 4.0 * f64::EPSILON * a.max(b)
}

/// The change of a step function within slack and reach of its argument.
fn jumps(x: &Value, step: impl Fn(f64) -> f64 + Sync) -> Slack {
    if x.spread.is_exact() && x.slack.is_none() {
        return None;
    }
    let (off, slack) = (x.spread.total(&x.main.shape), slack_or_zero(x));
    Some(map(&x.main.shape, [&x.main, &off, &slack], Store::PLAIN, |[x, off, slack]| {
        let (here, span) = (step(x), slack + DEVIATIONS * off);
        change(here, step(x + span)).max(change(here, step(x - span)))
    }))
}

/// The distance to the farthest column that could hold the largest value as well.
fn rival_columns(x: &Value) -> Slack {
    if x.spread.is_exact() && x.slack.is_none() {
        return None;
    }
    let off = x.spread.total(&x.main.shape).broadcast(&x.main.shape);
    let slack = slack_or_zero(x);
    let count = x.main.shape.rows();
    let cols = x.main.shape.cols();
    let farthest = |row: usize| {
        let (values, off, slack) = (x.main.row(row), off.row(row), slack.row(row));
        let best = crate::reduce::arg_max((0..cols).map(|i| values.at(i)));
        let error = |i: usize| slack.at(i) + DEVIATIONS * off.at(i);
        let rivals = (0..cols).filter(|&i| values.at(best) - values.at(i) <= error(best) + error(i));
        rivals.map(|i| i.abs_diff(best)).max().unwrap_or(0) as f64
    };
    let mut distances = memory::room(count);
    distances.par_extend((0..count).into_par_iter().map(farthest));
    Some(Strided::owned(x.main.shape.with_cols(1), distances))
}

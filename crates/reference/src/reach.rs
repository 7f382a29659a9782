//! How far rounding may have moved a value: an estimate to first order.
//!
//! Each node carries a relative error: half an epsilon of its dtype a step, functions good to two units of `f32`, `f32`
//! accumulation growing with the square root of the terms. Steps are independent, so their squares add; of two operands
//! the worse one counts. Against what magnitude the error is relative is decided where it is used: an element's own, or
//! the root mean square of its row, whichever is larger, because a row's neighbours are what cancelled in it. Zero means
//! the value is exact in every kernel: inputs, integers, and what moves them without arithmetic.

use deuteron_graph::{BinaryOp, Dtype, Node, Op, ReduceOp, UnaryOp};
use rayon::prelude::*;

use crate::reduce::by_row;
use crate::round::round_to;
use crate::store::Store;
use crate::strided::{CHUNK, Strided, map, map1};
use crate::value::{Reach, Value};

/// The reach at a node whose value is `result`.
pub(crate) fn reach_of(node: &Node, operands: &[&Value], result: &Strided) -> Reach {
    let joined = || operands.iter().fold(Reach::EXACT, |reach, operand| reach.join(operand.reach));
    let first = || operands[0].reach;
    match &node.op {
        Op::Input { .. } | Op::Iota { .. } | Op::Random { .. } | Op::Opaque(_) => Reach::EXACT,
        // Results are discrete: a decision that may fall the other way is slack, not reach.
        Op::Compare(_) | Op::Unary(UnaryOp::Round) | Op::RowReduce(ReduceOp::ArgMax) => Reach::EXACT,
        Op::Cast(Dtype::I8 | Dtype::F8e4m3) => Reach::EXACT,
        Op::Const { .. } | Op::Cast(_) => unless_representable(first_or_exact(operands), node.dtype, result),
        Op::Unary(UnaryOp::Neg | UnaryOp::Abs) | Op::RowReduce(ReduceOp::Max | ReduceOp::AbsMax) => first(),
        Op::View(_) | Op::StopGradient | Op::Gather => first(),
        Op::Binary(BinaryOp::Max | BinaryOp::Min) | Op::Concat { .. } => joined(),
        Op::Select => operands[1].reach.join(operands[2].reach),
        Op::Unary(UnaryOp::Exp) => {
            let steepness = if first().is_exact() { 1.0 } else { steepness(&operands[0].main, result) };
            Reach { relative: first().relative * steepness, ..first() }.called(node.dtype)
        }
        Op::Unary(_) => first().called(node.dtype),
        Op::Binary(BinaryOp::Add | BinaryOp::Sub) => unless_representable(joined(), node.dtype, result),
        Op::Binary(BinaryOp::Mul) => unless_representable(joined(), node.dtype, result),
        Op::Binary(BinaryOp::Div) => joined().called(node.dtype),
        Op::RowReduce(ReduceOp::Sum | ReduceOp::Mean) => first().summed(operands[0].main.shape.cols(), node.dtype),
        Op::ColumnSum => first().summed(operands[0].main.shape.rows(), node.dtype),
        Op::Matmul { transpose_a, .. } => {
            let shape = &operands[0].main.shape;
            let inner = shape[shape.rank() - if *transpose_a { 2 } else { 1 }];
            joined().summed(inner, node.dtype)
        }
        Op::Append { .. } => operands[0].reach.join(operands[1].reach),
        Op::ScatterAdd { .. } => operands[1].reach.summed(operands[0].main.shape.elements(), node.dtype),
    }
}

fn first_or_exact(operands: &[&Value]) -> Reach {
    operands.first().map_or(Reach::EXACT, |operand| operand.reach)
}

/// A step from exact operands is exact if all its results can be stored: positions, counts, masks as numbers.
fn unless_representable(operands: Reach, dtype: Dtype, result: &Strided) -> Reach {
    let representable = |x: &f64| x.is_nan() || round_to(dtype, *x) == *x;
    let exact = operands.is_exact() && result.buffer().par_chunks(CHUNK).all(|chunk| chunk.iter().all(representable));
    if exact { Reach::EXACT } else { operands.rounded(dtype) }
}

/// How many times the relative error of an exponential is that of its argument, against the largest result: an error
/// `e` of the argument moves `e^x` by `e e^x`, and `e` is relative to the element or the scale of its row.
fn steepness(x: &Strided, exponential: &Strided) -> f64 {
    let scale = if x.shape.rank() == 0 { map1(x, Store::PLAIN, f64::abs) } else { row_scale(x) };
    let moved = map(&x.shape, [x, &scale, exponential], Store::PLAIN, |[x, scale, exponential]| {
        if x.is_finite() { x.abs().max(scale) * exponential } else { 0.0 }
    });
    (max_abs(&moved) / max_abs(exponential).max(f64::MIN_POSITIVE)).max(1.0)
}

fn max_abs(x: &Strided) -> f64 {
    let of_chunk = |chunk: &[f64]| chunk.iter().map(|x| x.abs()).filter(|x| x.is_finite()).fold(0.0, f64::max);
    x.buffer().par_chunks(CHUNK).map(of_chunk).reduce(|| 0.0, f64::max)
}

/// The root mean square of the finite values of each row.
pub(crate) fn row_scale(x: &Strided) -> Strided<'static> {
    by_row(x, Store::PLAIN, |row, cols| {
        let finite = || (0..cols).map(|i| row.at(i)).filter(|x| x.is_finite());
        let count = finite().count().max(1) as f64;
        (finite().map(|x| x * x).sum::<f64>() / count).sqrt()
    })
}

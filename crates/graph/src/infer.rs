//! The shape and dtype rule of every primitive. A refusal states what was expected.

use crate::dtype::Dtype;
use crate::node::Node;
use crate::op::{BinaryOp, Op, ReduceOp, View};
use crate::shape::Shape;

type Rule = Result<(Shape, Dtype), String>;

/// This many products of int8 values, each at most 2^14, may overflow `i32`.
const MOST_BYTES: usize = 1 << 17;

/// Shape and dtype of `op` applied to `operands`.
pub(crate) fn infer(op: &Op, operands: &[&Node]) -> Rule {
    match op {
        Op::Input { dtype, shape, .. } => {
            arity(operands, 0)?;
            Ok((shape.clone(), *dtype))
        }
        Op::Const { value, dtype } => {
            arity(operands, 0)?;
            ensure(!value.is_nan(), "a value that is not NaN")?;
            let whole = value.fract() == 0.0 && (i32::MIN as f64..=i32::MAX as f64).contains(value);
            ensure(
                dtype.is_float() || (*dtype == Dtype::I32 && whole),
                "a float dtype, or a whole number that i32 holds",
            )?;
            Ok((Shape::scalar(), *dtype))
        }
        Op::Iota { axis, shape } => {
            arity(operands, 0)?;
            ensure(*axis < shape.rank(), "an axis within the shape")?;
            ensure(shape[*axis] <= i32::MAX as usize, "an axis that i32 can count")?;
            Ok((shape.clone(), Dtype::I32))
        }
        Op::Random { drop, shape, .. } => {
            arity(operands, 1)?;
            ensure((0.0..1.0).contains(drop), &format!("a drop probability in [0, 1), not {drop}"))?;
            ensure(operands[0].dtype == Dtype::I32 && operands[0].shape.elements() == 1, "one i32 seed")?;
            Ok((shape.clone(), Dtype::Bool))
        }
        Op::Unary(_) => {
            arity(operands, 1)?;
            ensure(operands[0].dtype.is_float(), "a float operand")?;
            Ok((operands[0].shape.clone(), operands[0].dtype))
        }
        Op::Binary(op) => {
            arity(operands, 2)?;
            ensure(operands[0].dtype == operands[1].dtype, "operands of one dtype (cast one of them)")?;
            let is_integer = operands[0].dtype == Dtype::I32;
            ensure(!is_integer || *op != BinaryOp::Div, "float operands")?;
            ensure(is_integer || operands[0].dtype.is_float(), "float or i32 operands")?;
            Ok((broadcast(operands)?, operands[0].dtype))
        }
        Op::Compare(_) => {
            arity(operands, 2)?;
            ensure(operands[0].dtype == operands[1].dtype, "operands of one dtype (cast one of them)")?;
            ensure(operands[0].dtype.is_float() || operands[0].dtype == Dtype::I32, "float or i32 operands")?;
            Ok((broadcast(operands)?, Dtype::Bool))
        }
        Op::Select => {
            arity(operands, 3)?;
            ensure(operands[0].dtype == Dtype::Bool, "a bool condition")?;
            ensure(operands[1].dtype == operands[2].dtype, "two values of one dtype (cast one of them)")?;
            ensure(operands[1].dtype.is_float() || operands[1].dtype == Dtype::I32, "float or i32 values")?;
            Ok((broadcast(operands)?, operands[1].dtype))
        }
        Op::Cast(dtype) => {
            arity(operands, 1)?;
            Ok((operands[0].shape.clone(), cast(operands[0].dtype, *dtype)?))
        }
        Op::RowReduce(reduce) => {
            arity(operands, 1)?;
            ensure(operands[0].shape.rank() >= 1, "at least one axis")?;
            ensure(operands[0].dtype.is_float(), "a float operand")?;
            let dtype = match reduce {
                ReduceOp::Sum | ReduceOp::Mean | ReduceOp::Max | ReduceOp::AbsMax => operands[0].dtype,
                ReduceOp::ArgMax => Dtype::I32,
            };
            let needs_one = match reduce {
                ReduceOp::Sum => false,
                ReduceOp::Mean | ReduceOp::Max | ReduceOp::AbsMax | ReduceOp::ArgMax => true,
            };
            ensure(!needs_one || operands[0].shape.cols() > 0, "a last axis that is not empty")?;
            Ok((operands[0].shape.with_cols(1), dtype))
        }
        Op::ColumnSum => {
            arity(operands, 1)?;
            ensure(operands[0].shape.rank() >= 1, "at least one axis")?;
            ensure(operands[0].dtype.is_float(), "a float operand")?;
            Ok((Shape::from([operands[0].shape.cols()]), operands[0].dtype))
        }
        Op::Matmul { transpose_a, transpose_b } => matmul(operands, *transpose_a, *transpose_b),
        Op::Gather => {
            arity(operands, 2)?;
            let values = operands[0].dtype.is_float() || matches!(operands[0].dtype, Dtype::I8 | Dtype::I32);
            ensure(operands[0].shape.rank() == 2 && values, "a float, i32 or i8 table [n, c]")?;
            ensure(operands[1].dtype == Dtype::I32, "i32 indices")?;
            let mut dims = operands[1].shape.to_vec();
            dims.push(operands[0].shape.cols());
            Ok((Shape::new(dims), operands[0].dtype))
        }
        Op::ScatterAdd { rows } => {
            arity(operands, 2)?;
            ensure(operands[0].dtype == Dtype::I32, "i32 indices")?;
            ensure(operands[1].dtype.is_float() && operands[1].shape.rank() >= 1, "float rows")?;
            ensure(operands[1].shape.leading() == &operands[0].shape[..], "a row for each index")?;
            Ok((Shape::from([*rows, operands[1].shape.cols()]), operands[1].dtype))
        }
        Op::Append { batch } => append(operands, *batch),
        Op::View(view) => {
            arity(operands, 1)?;
            Ok((view_shape(view, &operands[0].shape)?, operands[0].dtype))
        }
        Op::Concat { axis } => concat(operands, *axis),
        Op::Opaque(opaque) => Ok((opaque.shape.clone(), opaque.dtype)),
        Op::StopGradient => {
            arity(operands, 1)?;
            Ok((operands[0].shape.clone(), operands[0].dtype))
        }
    }
}

fn ensure(holds: bool, expected: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(expected.to_string()) }
}

fn arity(operands: &[&Node], expected: usize) -> Result<(), String> {
    let plural = if expected == 1 { "" } else { "s" };
    ensure(operands.len() == expected, &format!("{expected} operand{plural}"))
}

fn broadcast(operands: &[&Node]) -> Result<Shape, String> {
    operands.iter().try_fold(Shape::scalar(), |shape, operand| {
        shape.broadcast(&operand.shape).ok_or_else(|| "shapes that broadcast (equal sizes, or 1)".to_string())
    })
}

fn cast(from: Dtype, to: Dtype) -> Result<Dtype, String> {
    let fits = match (from, to) {
        (a, b) if a == b => true,
        (Dtype::F32 | Dtype::F16 | Dtype::Bf16, Dtype::Bool) => false,
        (Dtype::F32 | Dtype::F16 | Dtype::Bf16, _) => true,
        (Dtype::I8 | Dtype::I32 | Dtype::Bool, Dtype::F32 | Dtype::F16 | Dtype::Bf16) => true,
        _ => false,
    };
    ensure(fits, &format!("a cast between floats, to i8, i32 or f8e4m3, or from i8, i32 or bool, not {from} to {to}"))?;
    Ok(to)
}

fn matmul(operands: &[&Node], transpose_a: bool, transpose_b: bool) -> Rule {
    arity(operands, 2)?;
    let (a, b) = (&operands[0].shape, &operands[1].shape);
    let dtype = match (operands[0].dtype, operands[1].dtype) {
        (Dtype::I8, Dtype::I8) => Dtype::F32,
        (a, b) if a == b && a.is_float() => a,
        _ => return Err("float operands of one dtype, or i8 operands".to_string()),
    };
    ensure(a.rank() >= 2 && b.rank() >= 2, "matrices (rank 2 or more)")?;
    let batch = &a[..a.rank() - 2];
    ensure(b.rank() == 2 || b[..b.rank() - 2] == *batch, "equal leading axes, or a second operand of rank 2")?;
    let (a0, a1) = (a[a.rank() - 2], a[a.rank() - 1]);
    let (b0, b1) = (b[b.rank() - 2], b[b.rank() - 1]);
    let (m, k) = if transpose_a { (a1, a0) } else { (a0, a1) };
    let (k_b, n) = if transpose_b { (b1, b0) } else { (b0, b1) };
    ensure(k == k_b, &format!("equal inner sizes, not {k} and {k_b}"))?;
    let exact = operands[0].dtype != Dtype::I8 || k < MOST_BYTES;
    ensure(exact, &format!("an inner size below {MOST_BYTES}, whose sums of bytes i32 holds"))?;
    let mut dims = batch.to_vec();
    dims.extend([m, n]);
    Ok((Shape::new(dims), dtype))
}

fn append(operands: &[&Node], batch: usize) -> Rule {
    arity(operands, 3)?;
    let (cache, rows, positions) = (operands[0], operands[1], operands[2]);
    let rank = cache.shape.rank();
    ensure(batch < rank.saturating_sub(2), "a cache [.., capacity, c] whose leading axes hold the batch")?;
    let axis = rank - 2;
    let fits = rows.dtype == cache.dtype
        && rows.shape.rank() == rank
        && (0..rank).all(|i| i == axis || rows.shape[i] == cache.shape[i]);
    ensure(fits, &format!("rows of the cache's dtype that differ from it only in axis {axis}"))?;
    ensure(rows.shape[axis] <= cache.shape[axis], &format!("at most {} rows per sequence", cache.shape[axis]))?;
    let counted = cache.shape[axis] <= i32::MAX as usize;
    ensure(counted, "a capacity that i32 can count")?;
    let given = positions.dtype == Dtype::I32 && positions.shape == Shape::from([cache.shape[batch]]);
    ensure(given, "an i32 position for each sequence")?;
    Ok((cache.shape.clone(), cache.dtype))
}

fn view_shape(view: &View, from: &Shape) -> Result<Shape, String> {
    match view {
        View::Reshape(shape) => {
            ensure(
                shape.checked_elements() == Some(from.elements()),
                &format!("a shape of {} elements, not {shape}", from.elements()),
            )?;
            Ok(shape.clone())
        }
        View::Transpose(permutation) => {
            let mut seen = vec![false; from.rank()];
            let valid = permutation.len() == from.rank()
                && permutation.iter().all(|&axis| axis < from.rank() && !std::mem::replace(&mut seen[axis], true));
            ensure(valid, &format!("a permutation of {} axes", from.rank()))?;
            Ok(Shape::new(permutation.iter().map(|&axis| from[axis]).collect::<Vec<_>>()))
        }
        View::Slice { axis, start, length } => {
            ensure(*axis < from.rank(), &format!("an axis below {}", from.rank()))?;
            let fits = start.checked_add(*length).is_some_and(|end| end <= from[*axis]);
            ensure(fits, &format!("a slice within the axis of size {}", from[*axis]))?;
            let mut dims = from.to_vec();
            dims[*axis] = *length;
            Ok(Shape::new(dims))
        }
        View::Broadcast(shape) => {
            ensure(from.broadcasts_to(shape), &format!("an operand that repeats into {shape}"))?;
            Ok(shape.clone())
        }
    }
}

fn concat(operands: &[&Node], axis: usize) -> Rule {
    let first = operands.first().ok_or_else(|| "at least one operand".to_string())?;
    ensure(axis < first.shape.rank(), &format!("an axis below {}", first.shape.rank()))?;
    let mut dims = first.shape.to_vec();
    for operand in &operands[1..] {
        let same = operand.shape.rank() == dims.len()
            && operand.dtype == first.dtype
            && (0..dims.len()).all(|i| i == axis || operand.shape[i] == dims[i]);
        ensure(same, &format!("operands that differ only in axis {axis}"))?;
        dims[axis] = dims[axis].checked_add(operand.shape[axis]).ok_or("an axis that can be counted")?;
    }
    Ok((Shape::new(dims), first.dtype))
}

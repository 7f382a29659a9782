//! Constant folding, within limits: shape arithmetic, masks, tables of positions.

use deuteron_graph::{Activation, BinaryOp, Composite, Shape, UnaryOp, memory};

use crate::constant::{Constant, Positions};
use crate::element::Element;
use crate::ir::{Function, Kind, Logic, Reduction};
use crate::limits::{FOLD_BYTES, FOLD_VALUE_ELEMENTS, FOLD_WORK};

/// Folds, and keeps account.
#[derive(Debug)]
pub(crate) struct Folder {
    bytes_left: usize,
    work_left: usize,
}

impl Default for Folder {
    fn default() -> Self {
        Folder { bytes_left: FOLD_BYTES, work_left: FOLD_WORK }
    }
}

impl Folder {
    /// With less to spend: for tests of hostile files.
    pub fn with_work(work: usize) -> Self {
        Folder { work_left: work.min(FOLD_WORK), ..Folder::default() }
    }

    /// Takes from the account; false if it is spent.
    pub fn spend(&mut self, elements: usize, bytes: usize) -> bool {
        if elements > FOLD_VALUE_ELEMENTS || elements > self.work_left || bytes > self.bytes_left {
            return false;
        }
        self.work_left -= elements;
        self.bytes_left -= bytes;
        true
    }

    /// The values of an operation, or `None` where it is not for constants or the account is spent.
    pub fn fold(
        &mut self,
        kind: &Kind,
        x: &[&Constant],
        from: Element,
        to: Element,
        shape: &Shape,
    ) -> Option<Constant> {
        let is_bool = to == Element::Bool;
        let is_relu = matches!(kind, Kind::Composite(Composite::Activation(Activation::Relu)));
        let elementwise = kind.is_elementwise() || is_relu || matches!(kind, Kind::Logic(_) | Kind::Broadcast(_));
        // An elementwise operation walks what it stores; all others walk their operands and the result in full.
        let result = if elementwise { Constant::elementwise_size(shape, x) } else { shape.elements() };
        let operands = match kind {
            _ if elementwise => 0,
            Kind::Matmul { .. } => shape.elements().saturating_mul(x[0].shape.cols()),
            Kind::Reduce { .. } | Kind::Softmax => x.iter().map(|x| x.shape.elements()).fold(0, usize::saturating_add),
            _ => 0,
        };
        let width = if is_bool { 1 } else { 8 };
        if !self.spend(result.saturating_add(operands), result.saturating_mul(width)) {
            return None;
        }
        let map = |f: &dyn Fn(&[f64]) -> f64| Some(Constant::elementwise(shape, x, is_bool, |x| to.round(f(x))));
        match kind {
            // No constant in a model is an error function.
            Kind::Unary(UnaryOp::Erf) => None,
            Kind::Unary(op) => map(&|x| op.apply(x[0])),
            Kind::Binary(op) => map(&|x| binary(*op, x[0], x[1], from)),
            Kind::Power(exponent) => map(&|x| x[0].powf(*exponent)),
            Kind::Function(op) => map(&|x| function(*op, x)),
            Kind::Compare(op) => map(&|x| f64::from(op.holds(x[0], x[1]))),
            Kind::Logic(op) => map(&|x| f64::from(logic(*op, x))),
            Kind::Select => map(&|x| if x[0] != 0.0 { x[1] } else { x[2] }),
            Kind::Cast(_) => map(&|x| x[0]),
            Kind::Reduce { op, axes, .. } => reduce(*op, x[0], axes, shape, to),
            Kind::Softmax => None,
            Kind::Gather => gather(x[0], x[1], shape),
            Kind::Reshape(_) => Some(x[0].reshape(shape)),
            Kind::Transpose(permutation) => Some(x[0].transpose(shape, permutation)),
            Kind::Slice { axis, start, .. } => {
                let strides = x[0].strides();
                let first = start * strides[*axis];
                Some(x[0].pick(shape, Positions::new(shape.to_vec(), strides).map(|position| position + first)))
            }
            Kind::Broadcast(_) => Some(x[0].broadcast(shape)),
            Kind::Concat { axis } => Some(concat(x, *axis, shape, is_bool)),
            Kind::Matmul { transpose_a: false, transpose_b: false } => matmul(x[0], x[1], shape, to),
            // Numbers of steps are kept from being negative by it.
            Kind::Composite(Composite::Activation(Activation::Relu)) => map(&|x| if x[0] < 0.0 { 0.0 } else { x[0] }),
            Kind::Matmul { .. } | Kind::Composite(_) | Kind::Opaque(_) | Kind::Part(_) => None,
            Kind::Input(_) | Kind::Weight(_) | Kind::Constant => None,
        }
    }
}

fn function(op: Function, x: &[f64]) -> f64 {
    let second = x.get(1).copied().unwrap_or(f64::NAN);
    match op {
        Function::Sin => x[0].sin(),
        Function::Cos => x[0].cos(),
        Function::Tan => x[0].tan(),
        Function::Asin => x[0].asin(),
        Function::Acos => x[0].acos(),
        Function::Atan => x[0].atan(),
        Function::Sinh => x[0].sinh(),
        Function::Cosh => x[0].cosh(),
        Function::Asinh => x[0].asinh(),
        Function::Acosh => x[0].acosh(),
        Function::Atanh => x[0].atanh(),
        Function::Floor => x[0].floor(),
        Function::Ceil => x[0].ceil(),
        Function::Sign if x[0] == 0.0 => 0.0,
        Function::Sign => x[0].signum(),
        // The result has the divisor's sign; by zero, it is anything.
        Function::Mod if second == 0.0 => 0.0,
        Function::Mod => x[0] - second * (x[0] / second).floor(),
        Function::Remainder if second == 0.0 => 0.0,
        Function::Remainder => x[0] % second,
        Function::Pow => x[0].powf(second),
    }
}

fn binary(op: BinaryOp, a: f64, b: f64, element: Element) -> f64 {
    match op {
        BinaryOp::Add => a + b,
        BinaryOp::Sub => a - b,
        BinaryOp::Mul => a * b,
        // Integers are divided towards zero; by zero, the result is anything.
        BinaryOp::Div if !element.is_float() && b == 0.0 => 0.0,
        BinaryOp::Div if !element.is_float() => (a / b).trunc(),
        BinaryOp::Div => a / b,
        BinaryOp::Max => a.max(b),
        BinaryOp::Min => a.min(b),
    }
}

fn logic(op: Logic, x: &[f64]) -> bool {
    match op {
        Logic::Not => x[0] == 0.0,
        Logic::And => x.iter().all(|&x| x != 0.0),
        Logic::Or => x.iter().any(|&x| x != 0.0),
        Logic::Xor => x.iter().filter(|&&x| x != 0.0).count() % 2 == 1,
    }
}

fn reduce(op: Reduction, x: &Constant, axes: &[usize], shape: &Shape, to: Element) -> Option<Constant> {
    let start = match op {
        Reduction::Sum | Reduction::Mean => 0.0,
        Reduction::Max => f64::NEG_INFINITY,
        Reduction::Min => f64::INFINITY,
        Reduction::ArgMax => return None,
    };
    let mut values = memory::collected(std::iter::repeat_n(start, shape.elements()));
    // Strides of the result along the operand's axes: none along those that are reduced.
    let kept: Vec<usize> =
        (0..x.shape.rank()).map(|axis| if axes.contains(&axis) { 1 } else { x.shape[axis] }).collect();
    let strides = Shape::new(kept.clone()).strides();
    let strides = (0..kept.len()).map(|axis| if axes.contains(&axis) { 0 } else { strides[axis] }).collect();
    for (position, value) in Positions::new(x.shape.to_vec(), strides).zip(x.values()) {
        let slot = &mut values[position];
        *slot = match op {
            Reduction::Sum | Reduction::Mean => *slot + value,
            Reduction::Max | Reduction::ArgMax => slot.max(value),
            Reduction::Min => slot.min(value),
        };
    }
    if op == Reduction::Mean {
        let count = axes.iter().map(|&axis| x.shape[axis]).product::<usize>() as f64;
        values.iter_mut().for_each(|value| *value = to.round(*value / count));
    }
    Some(Constant::dense(shape.clone(), values, to == Element::Bool))
}

/// Products of tables: positions by rotary frequencies.
fn matmul(a: &Constant, b: &Constant, shape: &Shape, to: Element) -> Option<Constant> {
    let (rank, inner) = (shape.rank(), a.shape.cols());
    let widened = |x: &Constant| {
        let dims: Vec<usize> = shape[..rank - 2].iter().chain(&x.shape[x.shape.rank() - 2..]).copied().collect();
        x.broadcast(&Shape::new(dims))
    };
    let (a, b) = (widened(a), widened(b));
    let (of_a, of_b) = (a.strides(), b.strides());
    let without_cols = |strides: &[usize]| [&strides[..rank - 1], &[0]].concat();
    let without_rows = |strides: &[usize]| [&strides[..rank - 2], &[0], &strides[rank - 1..]].concat();
    let rows = Positions::new(shape.to_vec(), without_cols(&of_a));
    let cols = Positions::new(shape.to_vec(), without_rows(&of_b));
    let values = rows.zip(cols).map(|(row, col)| {
        to.round((0..inner).map(|k| a.get(row + k * of_a[rank - 1]) * b.get(col + k * of_b[rank - 2])).sum())
    });
    Some(Constant::dense(shape.clone(), memory::collected(values), false))
}

fn gather(table: &Constant, indices: &Constant, shape: &Shape) -> Option<Constant> {
    let strides = table.strides();
    let (rows, cols) = (table.shape[0], table.shape[1]);
    if indices.distinct().any(|index| index < 0.0 || index >= rows as f64) {
        return None;
    }
    let starts = indices.values().map(|index| index as usize * strides[0]);
    let positions = starts.flat_map(|start| (0..cols).map(move |col| (start, col)));
    Some(table.pick(shape, positions.map(|(start, col)| start + col * strides[1])))
}

fn concat(parts: &[&Constant], axis: usize, shape: &Shape, is_bool: bool) -> Constant {
    let blocks: usize = shape[..axis].iter().product();
    let all: Vec<Vec<f64>> = parts.iter().map(|part| memory::collected(part.values())).collect();
    let mut values = memory::room(shape.elements());
    for block in 0..blocks {
        for (part, part_values) in parts.iter().zip(&all) {
            let length: usize = part.shape[axis..].iter().product();
            values.extend_from_slice(&part_values[block * length..][..length]);
        }
    }
    Constant::dense(shape.clone(), values, is_bool)
}

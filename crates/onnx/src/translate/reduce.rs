//! Reductions over any axes, and what is made of them.

use deuteron_graph::{BinaryOp, CompareOp, UnaryOp};

use super::call::{Results, axes_of, axis_of};
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Id, Kind, Reduction};

/// Factors of a product that are multiplied one by one.
const MOST_FACTORS: usize = 64;

impl<'a> Translator<'a, '_> {
    pub(super) fn reduction(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "ReduceMean" => self.reduce(call, Reduction::Mean),
            "ReduceSum" => self.reduce(call, Reduction::Sum),
            "ReduceMax" => self.reduce(call, Reduction::Max),
            "ReduceMin" => self.reduce(call, Reduction::Min),
            "ReduceProd" => Ok(vec![self.product(call)?]),
            "ArgMax" => Ok(vec![self.arg_max(call, false)?]),
            "ArgMin" => Ok(vec![self.arg_max(call, true)?]),
            "Hardmax" => Ok(vec![self.hardmax(call)?]),
            "CumSum" => Ok(vec![self.running_sum(call)?]),
            "CumProd" => Ok(vec![self.running_product(call)?]),
            "LpNormalization" => Ok(vec![self.unit_norm(call)?]),
            "MeanVarianceNormalization" => Ok(vec![self.standardised(call)?]),
            _ => self.reduced_function(call),
        }
    }

    /// Axes of a reduction: an attribute at first, an operand since opset 13 or 18.
    fn reduced_axes(&mut self, call: &Call, x: Id) -> Result<Vec<usize>, Problem> {
        let rank = self.ir.shape(x).rank();
        let axes = match (call.ints("axes"), call.optional(1)) {
            (Some(axes), _) => axes.to_vec(),
            (None, Some(axes)) => self.integers(axes, "axes")?,
            (None, None) => Vec::new(),
        };
        let none = call.int("noop_with_empty_axes", 0) != 0;
        if axes.is_empty() {
            return Ok(if none { Vec::new() } else { (0..rank).collect() });
        }
        Ok(axes_of(&axes, rank)?)
    }

    fn reduce(&mut self, call: &Call, op: Reduction) -> Results {
        let x = call.input(0)?;
        let (axes, keep) = (self.reduced_axes(call, x)?, call.int("keepdims", 1) != 0);
        let is_empty = axes.iter().any(|&axis| self.ir.shape(x)[axis] == 0);
        let neutral = match op {
            Reduction::Max => f64::NEG_INFINITY,
            Reduction::Min => f64::INFINITY,
            _ => f64::NAN,
        };
        if is_empty && op != Reduction::Sum {
            if neutral.is_nan() || !self.ir.element(x).is_float() {
                return Err(Problem::Opaque("it reduces an empty axis".to_string()));
            }
            let (shape, element) = self.ir.infer(&Kind::Reduce { op, axes, keep }, &[x])?;
            return Ok(vec![self.ir.known(Constant::filled(shape, neutral), element)]);
        }
        // The largest truth value is whether any is true, the least whether all are.
        if self.ir.element(x) == Element::Bool && matches!(op, Reduction::Max | Reduction::Min) {
            let number = self.ir.cast(x, Element::F32)?;
            let reduced = self.ir.reduce(op, number, axes, keep)?;
            return Ok(vec![self.ir.cast(reduced, Element::Bool)?]);
        }
        Ok(vec![self.ir.reduce(op, x, axes, keep)?])
    }

    /// A function of each element, a sum, and a function of the sum.
    fn reduced_function(&mut self, call: &Call) -> Results {
        let x = call.input(0)?;
        let (axes, keep) = (self.reduced_axes(call, x)?, call.int("keepdims", 1) != 0);
        if call.node.op == "ReduceLogSumExp" {
            return Ok(vec![self.log_sum_exp(x, axes, keep)?]);
        }
        let each = match call.node.op {
            "ReduceL1" => self.ir.unary(UnaryOp::Abs, x)?,
            "ReduceL2" | "ReduceSumSquare" => self.ir.binary(BinaryOp::Mul, x, x)?,
            _ => x,
        };
        let sum = self.ir.reduce(Reduction::Sum, each, axes, keep)?;
        Ok(vec![match call.node.op {
            "ReduceL2" => self.ir.unary(UnaryOp::Sqrt, sum)?,
            "ReduceLogSum" => self.ir.unary(UnaryOp::Log, sum)?,
            _ => sum,
        }])
    }

    /// `max + log(sum(exp(x - max)))`. Where all is `-inf`, the maximum is taken as 0.
    fn log_sum_exp(&mut self, x: Id, axes: Vec<usize>, keep: bool) -> Result<Id, Problem> {
        if axes.iter().any(|&axis| self.ir.shape(x)[axis] == 0) {
            let sum = self.ir.reduce(Reduction::Sum, x, axes, keep)?;
            return Ok(self.ir.unary(UnaryOp::Log, sum)?);
        }
        let largest = self.ir.reduce(Reduction::Max, x, axes.clone(), true)?;
        let size = self.ir.unary(UnaryOp::Abs, largest)?;
        let is_infinite = self.ir.compare_number(CompareOp::Eq, size, f64::INFINITY)?;
        let zero = self.ir.number(0.0, x);
        let largest = self.ir.select(is_infinite, zero, largest)?;
        let shifted = self.ir.binary(BinaryOp::Sub, x, largest)?;
        let exponential = self.ir.unary(UnaryOp::Exp, shifted)?;
        let sum = self.ir.reduce(Reduction::Sum, exponential, axes.clone(), true)?;
        let log = self.ir.unary(UnaryOp::Log, sum)?;
        let result = self.ir.binary(BinaryOp::Add, log, largest)?;
        let (shape, _) = self.ir.infer(&Kind::Reduce { op: Reduction::Sum, axes, keep }, &[x])?;
        Ok(self.ir.reshape(result, shape.to_vec())?)
    }

    /// A product of few factors, one by one.
    fn product(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let (axes, keep) = (self.reduced_axes(call, x)?, call.int("keepdims", 1) != 0);
        let from = self.ir.shape(x).clone();
        let count: usize = axes.iter().map(|&axis| from[axis]).product();
        if count > MOST_FACTORS {
            return Err(Problem::Opaque(format!("a product of {count} factors is not a primitive")));
        }
        let (shape, element) = self.ir.infer(&Kind::Reduce { op: Reduction::Sum, axes: axes.clone(), keep }, &[x])?;
        if count == 0 {
            return Ok(self.ir.known(Constant::filled(shape, 1.0), element));
        }
        let kept: Vec<usize> = (0..from.rank()).filter(|axis| !axes.contains(axis)).collect();
        let order: Vec<usize> = kept.iter().chain(&axes).copied().collect();
        let ordered = self.ir.push(Kind::Transpose(order), &[x])?;
        let dims: Vec<usize> = kept.iter().map(|&axis| from[axis]).chain([count]).collect();
        let axis = dims.len() - 1;
        let rows = self.ir.reshape(ordered, dims)?;
        let factors = (0..count)
            .map(|start| self.ir.push(Kind::Slice { axis, start, length: 1 }, &[rows]))
            .collect::<Result<Vec<_>, _>>()?;
        let product =
            factors[1..].iter().try_fold(factors[0], |product, &next| self.ir.binary(BinaryOp::Mul, product, next))?;
        Ok(self.ir.reshape(product, shape.to_vec())?)
    }

    /// The place of the largest value: of several, the first, or the last where that is asked for.
    fn arg_max(&mut self, call: &Call, is_least: bool) -> Result<Id, Problem> {
        let mut x = call.input(0)?;
        let shape = self.ir.shape(x).clone();
        let axis = axis_of(call.int("axis", 0), shape.rank())?;
        let keep = call.int("keepdims", 1) != 0;
        if is_least {
            x = self.ir.unary(UnaryOp::Neg, x)?;
        }
        if call.int("select_last_index", 0) != 0 {
            // The largest count among the places of the largest value.
            let largest = self.ir.reduce(Reduction::Max, x, vec![axis], true)?;
            let is_largest = self.ir.compare(CompareOp::Ge, x, largest)?;
            let count = self.counting(shape[axis], Element::F32)?;
            let count = self.ir.along(count, axis, shape.rank())?;
            let none = self.ir.known_scalar(-1.0, Element::F32);
            x = self.ir.select(is_largest, count, none)?;
        }
        Ok(self.ir.reduce(Reduction::ArgMax, x, vec![axis], keep)?)
    }

    /// 1 at the first largest value along an axis, 0 elsewhere. Up to opset 12 all axes from there on are one.
    fn hardmax(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let shape = self.ir.shape(x).clone();
        let (x, axis) = if call.opset < 13 {
            let axis = axis_of(call.int("axis", 1), shape.rank())?;
            let dims = vec![shape[..axis].iter().product(), shape[axis..].iter().product()];
            (self.ir.reshape(x, dims)?, 1)
        } else {
            (x, axis_of(call.int("axis", -1), shape.rank())?)
        };
        let rank = self.ir.shape(x).rank();
        let place = self.ir.reduce(Reduction::ArgMax, x, vec![axis], true)?;
        let count = self.counting(self.ir.shape(x)[axis], Element::I64)?;
        let count = self.ir.along(count, axis, rank)?;
        let is_there = self.ir.compare(CompareOp::Eq, count, place)?;
        let (one, zero) = (self.ir.number(1.0, x), self.ir.number(0.0, x));
        let result = self.ir.select(is_there, one, zero)?;
        Ok(self.ir.reshape(result, shape.to_vec())?)
    }

    /// 0, 1, 2, ...
    pub(super) fn counting(&mut self, count: usize, element: Element) -> Result<Id, Problem> {
        self.reserve(count)?;
        let values = (0..count).map(|index| index as f64).collect();
        Ok(self.ir.known(Constant::dense([count].into(), values, false), element))
    }

    /// Running sums: folded where all is known, a product with a triangle of ones where not.
    fn running_sum(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let axis = self.integers(call.input(1)?, "axis")?;
        let (exclusive, reverse) = (call.int("exclusive", 0) != 0, call.int("reverse", 0) != 0);
        let (shape, element) = (self.ir.shape(x).clone(), self.ir.element(x));
        let &[axis] = &axis[..] else {
            return Err(Problem::Refused(format!("one axis expected, got {}", axis.len())));
        };
        let axis = axis_of(axis, shape.rank())?;
        let size = shape[axis];
        let Some(constant) = self.ir.node(x).constant.clone() else {
            if !element.is_float() {
                return self.running_integers(x, axis, exclusive, reverse);
            }
            self.reserve(size.saturating_mul(size))?;
            let counts = |to: usize, from: usize| match (reverse, exclusive) {
                (false, false) => from <= to,
                (false, true) => from < to,
                (true, false) => from >= to,
                (true, true) => from > to,
            };
            let matrix = (0..size).flat_map(|to| (0..size).map(move |from| f64::from(counts(to, from)))).collect();
            return Ok(self.ir.linear_map(x, axis, size, matrix)?);
        };
        self.reserve(shape.elements())?;
        let values: Vec<f64> = constant.values().collect();
        let stride = shape.strides()[axis];
        let mut sums = vec![0.0; values.len()];
        for start in (0..values.len()).filter(|position| (position / stride.max(1)).is_multiple_of(size.max(1))) {
            let mut sum = 0.0;
            for step in 0..size {
                let position = start + stride * if reverse { size - 1 - step } else { step };
                sums[position] = if exclusive { sum } else { sum + values[position] };
                sum += values[position];
            }
        }
        Ok(self.ir.known(Constant::dense(shape, sums, false), element))
    }

    /// Running sums of integers: each number is added to the one so many places on, for all powers of two.
    fn running_integers(&mut self, x: Id, axis: usize, exclusive: bool, reverse: bool) -> Result<Id, Problem> {
        let size = self.ir.shape(x)[axis];
        let mut sums = x;
        if exclusive && size > 0 {
            sums = self.shifted(sums, axis, 1, reverse)?;
        }
        let mut step = 1;
        while step < size {
            let moved = self.shifted(sums, axis, step, reverse)?;
            sums = self.ir.binary(BinaryOp::Add, sums, moved)?;
            step *= 2;
        }
        Ok(sums)
    }

    /// Elements moved along an axis, towards its begin or its end, with zeros behind them.
    fn shifted(&mut self, x: Id, axis: usize, step: usize, to_begin: bool) -> Result<Id, Problem> {
        let (shape, element) = (self.ir.shape(x).clone(), self.ir.element(x));
        let mut dims = shape.to_vec();
        dims[axis] = step;
        let zeros = self.ir.known(Constant::filled(dims.into(), 0.0), element);
        let start = if to_begin { step } else { 0 };
        let kept = self.ir.push(Kind::Slice { axis, start, length: shape[axis] - step }, &[x])?;
        let parts = if to_begin { [kept, zeros] } else { [zeros, kept] };
        Ok(self.ir.push(Kind::Concat { axis }, &parts)?)
    }

    /// Running products of few factors, one after the other.
    fn running_product(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let axis = self.integers(call.input(1)?, "axis")?;
        let (exclusive, reverse) = (call.int("exclusive", 0) != 0, call.int("reverse", 0) != 0);
        let &[axis] = &axis[..] else {
            return Err(Problem::Refused(format!("one axis expected, got {}", axis.len())));
        };
        let axis = axis_of(axis, self.ir.shape(x).rank())?;
        let size = self.ir.shape(x)[axis];
        if size > MOST_FACTORS {
            return Err(Problem::Opaque(format!("a product of {size} factors is not a primitive")));
        }
        if size == 0 {
            return Ok(x);
        }
        let mut product = self.ir.number(1.0, x);
        let mut products = vec![product; size];
        for step in 0..size {
            let start = if reverse { size - 1 - step } else { step };
            let factor = self.ir.push(Kind::Slice { axis, start, length: 1 }, &[x])?;
            let before = product;
            product = self.ir.binary(BinaryOp::Mul, product, factor)?;
            products[start] = match exclusive {
                true => self.ir.broadcast(before, &self.ir.shape(factor).clone())?,
                false => product,
            };
        }
        Ok(self.ir.push(Kind::Concat { axis }, &products)?)
    }

    fn unit_norm(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let axis = axis_of(call.int("axis", -1), self.ir.shape(x).rank())?;
        let each = match call.int("p", 2) {
            1 => self.ir.unary(UnaryOp::Abs, x)?,
            2 => self.ir.binary(BinaryOp::Mul, x, x)?,
            p => return Err(Problem::Refused(format!("p of 1 or 2 expected, got {p}"))),
        };
        let mut norm = self.ir.reduce(Reduction::Sum, each, vec![axis], true)?;
        if call.int("p", 2) == 2 {
            norm = self.ir.unary(UnaryOp::Sqrt, norm)?;
        }
        // A row of zeros stays one.
        let is_zero = self.ir.compare_number(CompareOp::Eq, norm, 0.0)?;
        let one = self.ir.number(1.0, x);
        let divisor = self.ir.select(is_zero, one, norm)?;
        Ok(self.ir.binary(BinaryOp::Div, x, divisor)?)
    }

    /// `(x - mean) / (deviation + 1e-9)` over some axes.
    fn standardised(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let rank = self.ir.shape(x).rank();
        let axes = axes_of(call.ints("axes").unwrap_or(&[0, 2, 3]), rank)?;
        let mean = self.ir.reduce(Reduction::Mean, x, axes.clone(), true)?;
        let centred = self.ir.binary(BinaryOp::Sub, x, mean)?;
        let square = self.ir.binary(BinaryOp::Mul, centred, centred)?;
        let variance = self.ir.reduce(Reduction::Mean, square, axes, true)?;
        let deviation = self.ir.unary(UnaryOp::Sqrt, variance)?;
        let divisor = self.ir.offset(deviation, 1e-9)?;
        Ok(self.ir.binary(BinaryOp::Div, centred, divisor)?)
    }
}

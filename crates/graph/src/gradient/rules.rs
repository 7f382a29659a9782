//! The gradient of each primitive.

use super::{Contribution, Reverse, Value};
use crate::error::GraphError;
use crate::node::NodeId;
use crate::op::{BinaryOp, CompareOp, Op, ReduceOp, UnaryOp, View};
use crate::shape::Shape;

impl Reverse {
    pub(super) fn backward(&mut self, id: NodeId, gradient: NodeId) -> Result<(), GraphError> {
        let node = self.graph.node(id).clone();
        let x = node.inputs.first().copied();
        match &node.op {
            Op::Input { .. } | Op::Const { .. } | Op::Iota { .. } | Op::Random { .. } => Ok(()),
            Op::Compare(_) | Op::StopGradient => Ok(()),
            Op::Opaque(_) => {
                let why = "it flows through an opaque operation, whose gradient nobody knows";
                Err(GraphError::NoGradient { operand: self.graph.operand(id), why })
            }
            Op::Append { .. } => {
                let why = "it flows through a cache, which generation writes and training does not";
                Err(GraphError::NoGradient { operand: self.graph.operand(id), why })
            }
            Op::Unary(op) => self.unary_backward(*op, id, node.inputs[0], gradient),
            Op::Binary(op) => self.binary_backward(*op, &node.inputs, gradient),
            Op::Select => self.select_backward(&node.inputs, gradient),
            Op::Cast(_) => self.send(x, |reverse, x| {
                let dtype = reverse.graph.node(x).dtype;
                reverse.graph.push(Op::Cast(dtype), &[gradient])
            }),
            Op::RowReduce(op) => self.reduce_backward(*op, id, node.inputs[0], gradient),
            Op::ColumnSum => self.send(x, |reverse, x| reverse.spread(gradient, x)),
            Op::Matmul { transpose_a, transpose_b } => {
                self.matmul_backward(&node.inputs, *transpose_a, *transpose_b, gradient)
            }
            Op::Gather => {
                let (table, indices) = (node.inputs[0], node.inputs[1]);
                self.send(Some(table), |reverse, table| {
                    let rows = reverse.graph.node(table).shape[0];
                    reverse.graph.push(Op::ScatterAdd { rows }, &[indices, gradient])
                })
            }
            Op::ScatterAdd { .. } => {
                let (indices, updates) = (node.inputs[0], node.inputs[1]);
                self.send(Some(updates), |reverse, _| reverse.graph.push(Op::Gather, &[gradient, indices]))
            }
            Op::View(view) => self.view_backward(view, node.inputs[0], gradient),
            Op::Concat { axis } => self.concat_backward(*axis, &node.inputs, gradient),
        }
    }

    fn unary_backward(&mut self, op: UnaryOp, y: NodeId, x: NodeId, g: NodeId) -> Result<(), GraphError> {
        self.send(Some(x), |reverse, x| match op {
            UnaryOp::Neg => reverse.unary(UnaryOp::Neg, g),
            UnaryOp::Abs => {
                let x = reverse.value(x)?;
                reverse.signed(x, g)
            }
            UnaryOp::Exp => {
                let y = reverse.value(y)?;
                reverse.binary(BinaryOp::Mul, g, y)
            }
            UnaryOp::Log => {
                let x = reverse.value(x)?;
                reverse.binary(BinaryOp::Div, g, x)
            }
            UnaryOp::Sqrt => {
                let y = reverse.value(y)?;
                let half = reverse.times(g, 0.5)?;
                reverse.binary(BinaryOp::Div, half, y)
            }
            UnaryOp::Rsqrt => {
                let y = reverse.value(y)?;
                let square = reverse.binary(BinaryOp::Mul, y, y)?;
                let cube = reverse.binary(BinaryOp::Mul, square, y)?;
                let scaled = reverse.times(cube, -0.5)?;
                reverse.binary(BinaryOp::Mul, g, scaled)
            }
            UnaryOp::Reciprocal => {
                let y = reverse.value(y)?;
                let square = reverse.binary(BinaryOp::Mul, y, y)?;
                let negative = reverse.unary(UnaryOp::Neg, square)?;
                reverse.binary(BinaryOp::Mul, g, negative)
            }
            UnaryOp::Tanh => {
                let y = reverse.value(y)?;
                let square = reverse.binary(BinaryOp::Mul, y, y)?;
                let slope = reverse.one_minus(square)?;
                reverse.binary(BinaryOp::Mul, g, slope)
            }
            UnaryOp::Erf => {
                let x = reverse.value(x)?;
                let square = reverse.binary(BinaryOp::Mul, x, x)?;
                let negative = reverse.unary(UnaryOp::Neg, square)?;
                let bell = reverse.unary(UnaryOp::Exp, negative)?;
                let slope = reverse.times(bell, std::f64::consts::FRAC_2_SQRT_PI)?;
                reverse.binary(BinaryOp::Mul, g, slope)
            }
            UnaryOp::Sigmoid => {
                let y = reverse.value(y)?;
                let rest = reverse.one_minus(y)?;
                let slope = reverse.binary(BinaryOp::Mul, y, rest)?;
                reverse.binary(BinaryOp::Mul, g, slope)
            }
            UnaryOp::Round => {
                let (shape, dtype) = (reverse.graph.node(x).shape.clone(), reverse.graph.node(x).dtype);
                reverse.zeros(&shape, dtype)
            }
        })
    }

    fn binary_backward(&mut self, op: BinaryOp, inputs: &[NodeId], g: NodeId) -> Result<(), GraphError> {
        let (a, b) = (inputs[0], inputs[1]);
        self.send_reduced(a, |reverse| match op {
            BinaryOp::Add | BinaryOp::Sub => Ok(g),
            BinaryOp::Mul => {
                let b = reverse.value(b)?;
                reverse.binary(BinaryOp::Mul, g, b)
            }
            BinaryOp::Div => {
                let b = reverse.value(b)?;
                reverse.binary(BinaryOp::Div, g, b)
            }
            BinaryOp::Max => reverse.where_compared(CompareOp::Gt, a, b, g, true),
            BinaryOp::Min => reverse.where_compared(CompareOp::Lt, a, b, g, true),
        })?;
        self.send_reduced(b, |reverse| match op {
            BinaryOp::Add => Ok(g),
            BinaryOp::Sub => reverse.unary(UnaryOp::Neg, g),
            BinaryOp::Mul => {
                let a = reverse.value(a)?;
                reverse.binary(BinaryOp::Mul, g, a)
            }
            BinaryOp::Div => {
                let (a, b) = (reverse.value(a)?, reverse.value(b)?);
                let square = reverse.binary(BinaryOp::Mul, b, b)?;
                let ratio = reverse.binary(BinaryOp::Div, a, square)?;
                let negative = reverse.unary(UnaryOp::Neg, ratio)?;
                reverse.binary(BinaryOp::Mul, g, negative)
            }
            BinaryOp::Max => reverse.where_compared(CompareOp::Gt, a, b, g, false),
            BinaryOp::Min => reverse.where_compared(CompareOp::Lt, a, b, g, false),
        })
    }

    /// The gradient where `a op b` (or, with `holds` false, where not), else 0. At a tie all goes to `b`: for
    /// `relu = max(x, 0)` the slope at 0 is 0, as elsewhere.
    fn where_compared(&mut self, op: CompareOp, a: NodeId, b: NodeId, g: NodeId, holds: bool) -> Value {
        let (a, b) = (self.value(a)?, self.value(b)?);
        let condition = self.graph.push(Op::Compare(op), &[a, b])?;
        let zero = self.zero_like(g)?;
        let operands = if holds { [condition, g, zero] } else { [condition, zero, g] };
        self.graph.push(Op::Select, &operands)
    }

    fn select_backward(&mut self, inputs: &[NodeId], g: NodeId) -> Result<(), GraphError> {
        let (condition, a, b) = (inputs[0], inputs[1], inputs[2]);
        for (operand, holds) in [(a, true), (b, false)] {
            self.send_reduced(operand, |reverse| {
                let condition = reverse.value(condition)?;
                let zero = reverse.zero_like(g)?;
                let operands = if holds { [condition, g, zero] } else { [condition, zero, g] };
                reverse.graph.push(Op::Select, &operands)
            })?;
        }
        Ok(())
    }

    fn reduce_backward(&mut self, op: ReduceOp, y: NodeId, x: NodeId, g: NodeId) -> Result<(), GraphError> {
        self.send(Some(x), |reverse, x| match op {
            ReduceOp::Sum => reverse.spread(g, x),
            ReduceOp::Mean => {
                let cols = reverse.graph.node(x).shape.cols();
                let share = reverse.times(g, 1.0 / cols as f64)?;
                reverse.spread(share, x)
            }
            ReduceOp::Max => {
                let value = reverse.value(x)?;
                reverse.share_among_largest(value, y, g)
            }
            ReduceOp::AbsMax => {
                let value = reverse.value(x)?;
                let magnitude = reverse.unary(UnaryOp::Abs, value)?;
                let share = reverse.share_among_largest(magnitude, y, g)?;
                reverse.signed(value, share)
            }
            ReduceOp::ArgMax => {
                let (shape, dtype) = (reverse.graph.node(x).shape.clone(), reverse.graph.node(x).dtype);
                reverse.zeros(&shape, dtype)
            }
        })
    }

    /// Where several columns tie for the largest, each gets an equal share.
    fn share_among_largest(&mut self, x: NodeId, largest: NodeId, g: NodeId) -> Value {
        let largest = self.value(largest)?;
        let is_largest = self.graph.push(Op::Compare(CompareOp::Eq), &[x, largest])?;
        let one = self.constant_like(1.0, g)?;
        let zero = self.zero_like(g)?;
        let ones = self.graph.push(Op::Select, &[is_largest, one, zero])?;
        let count = self.graph.push(Op::RowReduce(ReduceOp::Sum), &[ones])?;
        let share = self.binary(BinaryOp::Div, g, count)?;
        self.graph.push(Op::Select, &[is_largest, share, zero])
    }

    fn matmul_backward(
        &mut self,
        inputs: &[NodeId],
        transpose_a: bool,
        transpose_b: bool,
        g: NodeId,
    ) -> Result<(), GraphError> {
        let (a, b) = (inputs[0], inputs[1]);
        self.send(Some(a), |reverse, _| match transpose_a {
            false => reverse.matmul(g, b, false, !transpose_b),
            true if reverse.rank(b) == reverse.rank(g) => reverse.matmul(b, g, transpose_b, true),
            true => {
                let product = reverse.matmul(g, b, false, !transpose_b)?;
                reverse.swap_last(product)
            }
        })?;
        self.send(Some(b), |reverse, b| {
            if reverse.rank(b) == reverse.rank(g) {
                return match transpose_b {
                    false => reverse.matmul(a, g, !transpose_a, false),
                    true => reverse.matmul(g, a, true, transpose_a),
                };
            }
            // One matrix served every batch: its gradient sums over them, which is a product over all rows.
            let a = if transpose_a { reverse.swap_last(a)? } else { a };
            let (a, g) = (reverse.as_matrix(a)?, reverse.as_matrix(g)?);
            match transpose_b {
                false => reverse.matmul(a, g, true, false),
                true => reverse.matmul(g, a, true, false),
            }
        })
    }

    fn view_backward(&mut self, view: &View, x: NodeId, g: NodeId) -> Result<(), GraphError> {
        match view {
            View::Slice { axis, start, .. } => {
                if self.active[x.index()] {
                    let slice = Contribution::Slice { axis: *axis, start: *start, gradient: g };
                    self.contributions[x.index()].push(slice);
                }
                Ok(())
            }
            View::Reshape(_) => self.send(Some(x), |reverse, x| reverse.reshape_like(g, x)),
            View::Transpose(permutation) => {
                let mut inverse = vec![0; permutation.len()];
                permutation.iter().enumerate().for_each(|(position, &axis)| inverse[axis] = position);
                self.send(Some(x), |reverse, _| reverse.graph.push(Op::View(View::Transpose(inverse)), &[g]))
            }
            View::Broadcast(_) => self.send_reduced(x, |_| Ok(g)),
        }
    }

    fn concat_backward(&mut self, axis: usize, inputs: &[NodeId], g: NodeId) -> Result<(), GraphError> {
        let mut start = 0;
        for &input in inputs {
            let length = self.graph.node(input).shape[axis];
            self.send(Some(input), |reverse, _| {
                reverse.graph.push(Op::View(View::Slice { axis, start, length }), &[g])
            })?;
            start += length;
        }
        Ok(())
    }

    /// `g` where `x > 0`, `-g` where `x < 0`, else 0.
    fn signed(&mut self, x: NodeId, g: NodeId) -> Value {
        let zero = self.zero_like(g)?;
        let negative = self.unary(UnaryOp::Neg, g)?;
        let below = self.graph.push(Op::Compare(CompareOp::Lt), &[x, zero])?;
        let above = self.graph.push(Op::Compare(CompareOp::Gt), &[x, zero])?;
        let minus = self.graph.push(Op::Select, &[below, negative, zero])?;
        self.graph.push(Op::Select, &[above, g, minus])
    }

    fn as_matrix(&mut self, x: NodeId) -> Value {
        let shape = &self.graph.node(x).shape;
        let matrix = Shape::from([shape.rows(), shape.cols()]);
        if *shape == matrix { Ok(x) } else { self.graph.push(Op::View(View::Reshape(matrix)), &[x]) }
    }

    fn swap_last(&mut self, x: NodeId) -> Value {
        let rank = self.rank(x);
        let mut order: Vec<usize> = (0..rank).collect();
        order.swap(rank - 2, rank - 1);
        self.graph.push(Op::View(View::Transpose(order)), &[x])
    }

    fn rank(&self, x: NodeId) -> usize {
        self.graph.node(x).shape.rank()
    }

    fn matmul(&mut self, a: NodeId, b: NodeId, transpose_a: bool, transpose_b: bool) -> Value {
        let (a, b) = (self.value(a)?, self.value(b)?);
        self.graph.push(Op::Matmul { transpose_a, transpose_b }, &[a, b])
    }

    fn times(&mut self, x: NodeId, factor: f64) -> Value {
        let factor = self.constant_like(factor, x)?;
        self.binary(BinaryOp::Mul, x, factor)
    }

    fn one_minus(&mut self, x: NodeId) -> Value {
        let one = self.constant_like(1.0, x)?;
        self.binary(BinaryOp::Sub, one, x)
    }

    fn zero_like(&mut self, x: NodeId) -> Value {
        self.constant_like(0.0, x)
    }
}

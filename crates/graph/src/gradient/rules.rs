//! The gradient of each primitive.

use super::{Contribution, Reverse, Value};
use crate::dtype::Dtype;
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
                Ok(match reverse.widened_from(gradient, dtype) {
                    Some(narrow) => narrow,
                    None => reverse.graph.cast(gradient, dtype)?,
                })
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
                    reverse.graph.scatter_add(indices, gradient, rows)
                })
            }
            Op::ScatterAdd { .. } => {
                let (indices, updates) = (node.inputs[0], node.inputs[1]);
                self.send(Some(updates), |reverse, _| reverse.graph.gather(gradient, indices))
            }
            Op::View(view) => self.view_backward(view, node.inputs[0], gradient),
            Op::Concat { axis } => self.concat_backward(*axis, &node.inputs, gradient),
        }
    }

    /// The value of this type that a gradient was widened from, if it was: rounding the gradient to that type gives the same value again, and another
    /// node for it would be stored once more.
    fn widened_from(&self, gradient: NodeId, dtype: Dtype) -> Option<NodeId> {
        let node = self.graph.node(gradient);
        let source = *node.inputs.first()?;
        let widens = node.op == Op::Cast(Dtype::F32) && matches!(dtype, Dtype::F16 | Dtype::Bf16);
        (widens && self.graph.node(source).dtype == dtype).then_some(source)
    }

    fn unary_backward(&mut self, op: UnaryOp, y: NodeId, x: NodeId, g: NodeId) -> Result<(), GraphError> {
        self.send(Some(x), |reverse, x| {
            let slope = match op {
                UnaryOp::Neg => return reverse.graph.unary(UnaryOp::Neg, g),
                UnaryOp::Abs => {
                    let x = reverse.value(x)?;
                    return reverse.signed(x, g);
                }
                UnaryOp::Log => {
                    let x = reverse.value(x)?;
                    return reverse.graph.binary(BinaryOp::Div, g, x);
                }
                UnaryOp::Sqrt => {
                    let y = reverse.value(y)?;
                    let half = reverse.graph.scale(g, 0.5)?;
                    return reverse.graph.binary(BinaryOp::Div, half, y);
                }
                UnaryOp::Round => return reverse.zeros_like(x),
                UnaryOp::Exp => reverse.value(y)?,
                UnaryOp::Rsqrt => {
                    let y = reverse.value(y)?;
                    let square = reverse.graph.mul(y, y)?;
                    let cube = reverse.graph.mul(square, y)?;
                    reverse.graph.scale(cube, -0.5)?
                }
                UnaryOp::Reciprocal => {
                    let y = reverse.value(y)?;
                    let square = reverse.graph.mul(y, y)?;
                    reverse.graph.unary(UnaryOp::Neg, square)?
                }
                UnaryOp::Tanh => {
                    let y = reverse.value(y)?;
                    let square = reverse.graph.mul(y, y)?;
                    reverse.one_minus(square)?
                }
                UnaryOp::Erf => {
                    let x = reverse.value(x)?;
                    let square = reverse.graph.mul(x, x)?;
                    let negative = reverse.graph.unary(UnaryOp::Neg, square)?;
                    let bell = reverse.graph.unary(UnaryOp::Exp, negative)?;
                    reverse.graph.scale(bell, std::f64::consts::FRAC_2_SQRT_PI)?
                }
                UnaryOp::Sigmoid => {
                    let y = reverse.value(y)?;
                    let rest = reverse.one_minus(y)?;
                    reverse.graph.mul(y, rest)?
                }
            };
            reverse.graph.mul(g, slope)
        })
    }

    fn binary_backward(&mut self, op: BinaryOp, inputs: &[NodeId], g: NodeId) -> Result<(), GraphError> {
        let (a, b) = (inputs[0], inputs[1]);
        self.send_reduced(a, |reverse| match op {
            BinaryOp::Add | BinaryOp::Sub => Ok(g),
            BinaryOp::Mul => {
                let b = reverse.value(b)?;
                reverse.graph.mul(g, b)
            }
            BinaryOp::Div => {
                let b = reverse.value(b)?;
                reverse.graph.binary(BinaryOp::Div, g, b)
            }
            BinaryOp::Max => reverse.where_compared(CompareOp::Gt, a, b, g, true),
            BinaryOp::Min => reverse.where_compared(CompareOp::Lt, a, b, g, true),
        })?;
        self.send_reduced(b, |reverse| match op {
            BinaryOp::Add => Ok(g),
            BinaryOp::Sub => reverse.graph.unary(UnaryOp::Neg, g),
            BinaryOp::Mul => {
                let a = reverse.value(a)?;
                reverse.graph.mul(g, a)
            }
            BinaryOp::Div => {
                let (a, b) = (reverse.value(a)?, reverse.value(b)?);
                let square = reverse.graph.mul(b, b)?;
                let ratio = reverse.graph.binary(BinaryOp::Div, a, square)?;
                let negative = reverse.graph.unary(UnaryOp::Neg, ratio)?;
                reverse.graph.mul(g, negative)
            }
            BinaryOp::Max => reverse.where_compared(CompareOp::Gt, a, b, g, false),
            BinaryOp::Min => reverse.where_compared(CompareOp::Lt, a, b, g, false),
        })
    }

    /// The gradient where `a op b` (or, with `holds` false, where not), else 0. At a tie all goes to `b`: for
    /// `relu = max(x, 0)` the slope at 0 is 0, as elsewhere.
    fn where_compared(&mut self, op: CompareOp, a: NodeId, b: NodeId, g: NodeId, holds: bool) -> Value {
        let (a, b) = (self.value(a)?, self.value(b)?);
        let condition = self.graph.compare(op, a, b)?;
        self.where_is(condition, holds, g)
    }

    /// The gradient where a condition holds, or where it does not, else 0.
    fn where_is(&mut self, condition: NodeId, holds: bool, g: NodeId) -> Value {
        let zero = self.zero_like(g)?;
        let (a, b) = if holds { (g, zero) } else { (zero, g) };
        self.graph.select(condition, a, b)
    }

    fn select_backward(&mut self, inputs: &[NodeId], g: NodeId) -> Result<(), GraphError> {
        let (condition, a, b) = (inputs[0], inputs[1], inputs[2]);
        for (operand, holds) in [(a, true), (b, false)] {
            self.send_reduced(operand, |reverse| {
                let condition = reverse.value(condition)?;
                reverse.where_is(condition, holds, g)
            })?;
        }
        Ok(())
    }

    fn reduce_backward(&mut self, op: ReduceOp, y: NodeId, x: NodeId, g: NodeId) -> Result<(), GraphError> {
        self.send(Some(x), |reverse, x| match op {
            ReduceOp::Sum => reverse.spread(g, x),
            ReduceOp::Mean => {
                let cols = reverse.graph.node(x).shape.cols();
                let share = reverse.graph.scale(g, 1.0 / cols as f64)?;
                reverse.spread(share, x)
            }
            ReduceOp::Max => {
                let value = reverse.value(x)?;
                reverse.share_among_largest(value, y, g)
            }
            ReduceOp::AbsMax => {
                let value = reverse.value(x)?;
                let magnitude = reverse.graph.unary(UnaryOp::Abs, value)?;
                let share = reverse.share_among_largest(magnitude, y, g)?;
                reverse.signed(value, share)
            }
            ReduceOp::ArgMax => reverse.zeros_like(x),
        })
    }

    /// If several columns tie for the largest, each gets an equal share.
    fn share_among_largest(&mut self, x: NodeId, largest: NodeId, g: NodeId) -> Value {
        let largest = self.value(largest)?;
        let is_largest = self.graph.compare(CompareOp::Eq, x, largest)?;
        let one = self.constant_like(1.0, g)?;
        let zero = self.zero_like(g)?;
        let ones = self.graph.select(is_largest, one, zero)?;
        let count = self.graph.reduce(ReduceOp::Sum, ones)?;
        let share = self.graph.binary(BinaryOp::Div, g, count)?;
        self.graph.select(is_largest, share, zero)
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
                self.send(Some(x), |reverse, _| reverse.graph.transpose(g, &inverse))
            }
            View::Broadcast(_) => self.send_reduced(x, |_| Ok(g)),
        }
    }

    fn concat_backward(&mut self, axis: usize, inputs: &[NodeId], g: NodeId) -> Result<(), GraphError> {
        let mut start = 0;
        for &input in inputs {
            let length = self.graph.node(input).shape[axis];
            self.send(Some(input), |reverse, _| reverse.graph.slice(g, axis, start, length))?;
            start += length;
        }
        Ok(())
    }

    /// `g` where `x > 0`, `-g` where `x < 0`, else 0.
    fn signed(&mut self, x: NodeId, g: NodeId) -> Value {
        let zero = self.zero_like(g)?;
        let negative = self.graph.unary(UnaryOp::Neg, g)?;
        let below = self.graph.compare(CompareOp::Lt, x, zero)?;
        let above = self.graph.compare(CompareOp::Gt, x, zero)?;
        let minus = self.graph.select(below, negative, zero)?;
        self.graph.select(above, g, minus)
    }

    fn as_matrix(&mut self, x: NodeId) -> Value {
        let shape = &self.graph.node(x).shape;
        let matrix = Shape::from([shape.rows(), shape.cols()]);
        if *shape == matrix { Ok(x) } else { self.graph.reshape(x, matrix) }
    }

    fn swap_last(&mut self, x: NodeId) -> Value {
        let rank = self.rank(x);
        let mut order: Vec<usize> = (0..rank).collect();
        order.swap(rank - 2, rank - 1);
        self.graph.transpose(x, &order)
    }

    fn rank(&self, x: NodeId) -> usize {
        self.graph.node(x).shape.rank()
    }

    fn matmul(&mut self, a: NodeId, b: NodeId, transpose_a: bool, transpose_b: bool) -> Value {
        let (a, b) = (self.value(a)?, self.value(b)?);
        self.graph.matmul_transposed(a, b, transpose_a, transpose_b)
    }

    fn one_minus(&mut self, x: NodeId) -> Value {
        let one = self.constant_like(1.0, x)?;
        self.graph.sub(one, x)
    }

    fn zero_like(&mut self, x: NodeId) -> Value {
        self.constant_like(0.0, x)
    }
}

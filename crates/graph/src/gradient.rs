//! Reverse-mode differentiation, graph to graph.
//!
//! Calls are walked from last to first. The gradient of a call is one block, `grad(name)`, so that planner and reports
//! keep speaking in composites. A block does not reach into the forward composite for large intermediates: it computes
//! them again from the composite's operands and its row statistics. So what passes from forward to backward is what
//! textbook code saves: operands, results and one or two numbers a row; random masks are replayed, never stored.

use std::collections::HashMap;

use crate::block::Block;
use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::graph::{Callee, Graph};
use crate::node::NodeId;
use crate::op::{BinaryOp, CompareOp, Op, ReduceOp, UnaryOp, View};
use crate::shape::Shape;

type Value = Result<NodeId, GraphError>;

/// A graph together with its gradients.
#[derive(Debug, Clone, PartialEq)]
pub struct Differentiated {
    /// The forward graph, continued. Its outputs are the forward ones, then `d_<input>` for each gradient.
    pub graph: Graph,
    /// The new inputs: for each float output that depends on `wrt`, the gradient that comes in.
    pub seeds: Vec<NodeId>,
    /// Each input asked for, with its gradient.
    pub gradients: Vec<(NodeId, NodeId)>,
    /// Where the backward part begins: nodes before it are the forward graph's, with the same handles.
    pub first_backward: usize,
}

/// Extends `graph` by the gradients of its outputs, contracted with incoming gradients, with respect to `wrt`.
pub fn differentiate(graph: &Graph, wrt: &[NodeId]) -> Result<Differentiated, GraphError> {
    for &node in wrt {
        graph.check_node("differentiate", node)?;
        if !graph.node(node).dtype.is_float() {
            return Err(GraphError::NoGradient { operand: graph.operand(node), why: "its dtype is not a float" });
        }
    }
    if let Some(product) = product_of_bytes(graph, wrt) {
        let why = "it is a product of bytes, through which no gradient flows";
        return Err(GraphError::NoGradient { operand: graph.operand(product), why });
    }
    let mut reverse = Reverse::new(graph, wrt);
    let seeds = reverse.seed_outputs()?;
    for call in (0..graph.calls().len()).rev() {
        reverse.differentiate_call(call)?;
    }
    let gradients = reverse.finish(wrt)?;
    Ok(Differentiated { graph: reverse.graph, seeds, gradients, first_backward: graph.nodes().len() })
}

/// A product of bytes that depends on one of `wrt`.
fn product_of_bytes(graph: &Graph, wrt: &[NodeId]) -> Option<NodeId> {
    let mut depends = vec![false; graph.nodes().len()];
    for id in graph.ids() {
        let node = graph.node(id);
        let stops = matches!(node.op, Op::StopGradient);
        depends[id.index()] = wrt.contains(&id) || (!stops && node.inputs.iter().any(|input| depends[input.index()]));
    }
    graph.ids().find(|&id| {
        let node = graph.node(id);
        let bytes = matches!(node.op, Op::Matmul { .. }) && graph.node(node.inputs[0]).dtype == Dtype::I8;
        bytes && depends[id.index()]
    })
}

/// A gradient that arrives at a node: for all of it, or for a range of one axis.
#[derive(Debug, Clone, Copy)]
enum Contribution {
    Whole(NodeId),
    Slice { axis: usize, start: usize, gradient: NodeId },
}

struct Reverse {
    graph: Graph,
    /// For each forward node: does a gradient have to pass through it?
    active: Vec<bool>,
    contributions: Vec<Vec<Contribution>>,
    /// Nodes that another part of their call reads, or that are results of their call.
    exposed: Vec<bool>,
    /// Forward nodes computed again in the block at hand.
    recomputed: HashMap<NodeId, NodeId>,
    totals: HashMap<NodeId, NodeId>,
}

impl Reverse {
    fn new(graph: &Graph, wrt: &[NodeId]) -> Self {
        let count = graph.nodes().len();
        let mut active = vec![false; count];
        for id in graph.ids() {
            let node = graph.node(id);
            let from_operand = node.inputs.iter().any(|input| active[input.index()]);
            let passes = node.dtype.is_float() && !matches!(node.op, Op::StopGradient | Op::Random { .. });
            active[id.index()] = wrt.contains(&id) || (passes && from_operand);
        }
        let mut exposed = vec![false; count];
        for call in graph.calls() {
            call.outputs.iter().for_each(|output| exposed[output.index()] = true);
            if call.callee == Callee::Primitive {
                exposed[call.start] = true;
            }
        }
        for id in graph.ids() {
            for &input in &graph.node(id).inputs {
                let (reader, read) = (graph.node(id), graph.node(input));
                exposed[input.index()] |= reader.call != read.call || reader.part != read.part;
            }
        }
        Reverse {
            graph: graph.clone(),
            active,
            contributions: vec![Vec::new(); count],
            exposed,
            recomputed: HashMap::new(),
            totals: HashMap::new(),
        }
    }

    fn seed_outputs(&mut self) -> Result<Vec<NodeId>, GraphError> {
        let mut seeds = Vec::new();
        for output in self.graph.outputs().to_vec() {
            if !self.active[output.node.index()] {
                continue;
            }
            let node = self.graph.node(output.node);
            let (dtype, shape) = (node.dtype, node.shape.clone());
            let mut name = format!("d_{}", output.name);
            while self.graph.find(&name).is_some() {
                name.push('_');
            }
            let seed = self.graph.input(&name, dtype, shape)?;
            self.contributions[output.node.index()].push(Contribution::Whole(seed));
            seeds.push(seed);
        }
        Ok(seeds)
    }

    fn differentiate_call(&mut self, index: usize) -> Result<(), GraphError> {
        let call = self.graph.calls()[index].clone();
        let is_input = matches!(self.graph.nodes()[call.start].op, Op::Input { .. });
        let block = match is_input {
            true => Block::GradientSum,
            false => Block::Gradient(Box::new(self.graph.origin(self.graph.nodes()[call.start].call))),
        };
        let last_part = self.graph.nodes()[call.start..call.end].iter().map(|node| node.part).max().unwrap_or(0);
        self.recomputed.clear();
        self.graph.open_block();
        for position in (call.start..call.end).rev() {
            if !self.active[position] || self.contributions[position].is_empty() {
                continue;
            }
            let id = NodeId(position as u32);
            let part = self.graph.nodes()[position].part;
            self.graph.set_part(last_part - part);
            let gradient = self.total(id)?;
            self.backward(id, gradient)?;
        }
        self.graph.close_block(block);
        Ok(())
    }

    fn finish(&mut self, wrt: &[NodeId]) -> Result<Vec<(NodeId, NodeId)>, GraphError> {
        let mut gradients = Vec::new();
        for &input in wrt {
            let gradient = match self.totals.get(&input) {
                Some(&gradient) => gradient,
                None => {
                    let node = self.graph.node(input);
                    let (shape, dtype) = (node.shape.clone(), node.dtype);
                    self.zeros(&shape, dtype)?
                }
            };
            let mut name = format!("d_{}", self.graph.label(input).replace('%', "node"));
            while self.graph.outputs().iter().any(|output| output.name == name) {
                name.push('_');
            }
            self.graph.output(&name, gradient)?;
            gradients.push((input, gradient));
        }
        Ok(gradients)
    }

    /// The sum of everything that arrived at a node.
    fn total(&mut self, id: NodeId) -> Value {
        let contributions = std::mem::take(&mut self.contributions[id.index()]);
        let mut whole: Vec<NodeId> = Vec::new();
        let mut slices: Vec<(usize, usize, NodeId)> = Vec::new();
        for contribution in contributions {
            match contribution {
                Contribution::Whole(gradient) => whole.push(gradient),
                Contribution::Slice { axis, start, gradient } => slices.push((axis, start, gradient)),
            }
        }
        slices.sort_by_key(|&(axis, start, _)| (axis, start));
        while !slices.is_empty() {
            whole.push(self.lay_slices(id, &mut slices)?);
        }
        let mut total = whole[0];
        for &gradient in &whole[1..] {
            total = self.binary(BinaryOp::Add, total, gradient)?;
        }
        self.totals.insert(id, total);
        Ok(total)
    }

    /// Takes slices of one axis that do not overlap and lays them end to end, zeros in the gaps: the three gradients
    /// of a QKV split become one concatenation.
    fn lay_slices(&mut self, id: NodeId, slices: &mut Vec<(usize, usize, NodeId)>) -> Value {
        let node = self.graph.node(id);
        let (shape, dtype) = (node.shape.clone(), node.dtype);
        let axis = slices[0].0;
        let (mut parts, mut end, mut rest) = (Vec::new(), 0, Vec::new());
        for (slice_axis, start, gradient) in slices.drain(..) {
            if slice_axis != axis || start < end {
                rest.push((slice_axis, start, gradient));
                continue;
            }
            if start > end {
                parts.push(self.gap(&shape, dtype, axis, start - end)?);
            }
            end = start + self.graph.node(gradient).shape[axis];
            parts.push(gradient);
        }
        *slices = rest;
        if end < shape[axis] {
            parts.push(self.gap(&shape, dtype, axis, shape[axis] - end)?);
        }
        if parts.len() == 1 { Ok(parts[0]) } else { self.graph.push(Op::Concat { axis }, &parts) }
    }

    fn gap(&mut self, shape: &Shape, dtype: Dtype, axis: usize, length: usize) -> Value {
        let mut dims = shape.to_vec();
        dims[axis] = length;
        self.zeros(&Shape::new(dims), dtype)
    }

    fn backward(&mut self, id: NodeId, gradient: NodeId) -> Result<(), GraphError> {
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

    /// Computes a contribution for `x` if a gradient has to pass through it.
    fn send(&mut self, x: Option<NodeId>, compute: impl FnOnce(&mut Self, NodeId) -> Value) -> Result<(), GraphError> {
        let Some(x) = x.filter(|x| self.active[x.index()]) else { return Ok(()) };
        let gradient = compute(self, x)?;
        self.contributions[x.index()].push(Contribution::Whole(gradient));
        Ok(())
    }

    /// As `send`, for an operand that may have been repeated: the gradient is summed back to its shape.
    fn send_reduced(&mut self, x: NodeId, compute: impl FnOnce(&mut Self) -> Value) -> Result<(), GraphError> {
        self.send(Some(x), |reverse, x| {
            let gradient = compute(reverse)?;
            reverse.sum_to(gradient, x)
        })
    }

    /// The sum over the axes along which `x` repeats in `g`.
    fn sum_to(&mut self, g: NodeId, x: NodeId) -> Value {
        let (from, to) = (self.graph.node(g).shape.clone(), self.graph.node(x).shape.clone());
        if from == to {
            return Ok(g);
        }
        let missing = from.rank() - to.rank();
        let repeats = |axis: usize| from[axis] != 1 && (axis < missing || to[axis - missing] == 1);
        let mut g = g;
        let mut dims = from.to_vec();
        let last = from.rank() - 1;
        if repeats(last) {
            g = self.graph.push(Op::RowReduce(ReduceOp::Sum), &[g])?;
            dims[last] = 1;
        }
        let summed: Vec<usize> = (0..last).filter(|&axis| repeats(axis)).collect();
        if !summed.is_empty() {
            let kept: Vec<usize> = (0..=last).filter(|axis| !summed.contains(axis)).collect();
            let order: Vec<usize> = summed.iter().chain(&kept).copied().collect();
            if !order.iter().enumerate().all(|(position, &axis)| position == axis) {
                g = self.graph.push(Op::View(View::Transpose(order)), &[g])?;
            }
            let rows: usize = summed.iter().map(|&axis| dims[axis]).product();
            let cols: usize = kept.iter().map(|&axis| dims[axis]).product();
            g = self.graph.push(Op::View(View::Reshape(Shape::from([rows, cols]))), &[g])?;
            g = self.graph.push(Op::ColumnSum, &[g])?;
        }
        self.reshape_like(g, x)
    }

    /// A forward value inside the block at hand: the node itself if it is stored anyway or is small, else computed again.
    fn value(&mut self, id: NodeId) -> Value {
        let mut again: Vec<NodeId> = Vec::new();
        let mut stack = vec![id];
        while let Some(next) = stack.pop() {
            if self.is_computed_again(next) && !self.recomputed.contains_key(&next) {
                again.push(next);
                stack.extend(&self.graph.node(next).inputs);
            }
        }
        // Operands have lower numbers than their readers.
        again.sort();
        again.dedup();
        for node in again {
            let (op, inputs) = (self.graph.node(node).op.clone(), self.graph.node(node).inputs.clone());
            let inputs: Vec<NodeId> = inputs.iter().map(|input| *self.recomputed.get(input).unwrap_or(input)).collect();
            let copy = self.graph.push(op, &inputs)?;
            self.recomputed.insert(node, copy);
        }
        Ok(*self.recomputed.get(&id).unwrap_or(&id))
    }

    fn is_computed_again(&self, id: NodeId) -> bool {
        // What a pass made is a gradient, not a forward value.
        if id.index() >= self.exposed.len() || self.exposed[id.index()] || self.graph.node(id).shape.cols() == 1 {
            return false;
        }
        match self.graph.node(id).op {
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) | Op::View(_) => true,
            Op::StopGradient => true,
            Op::Input { .. } | Op::Const { .. } | Op::Iota { .. } | Op::Random { .. } => false,
            Op::RowReduce(_) | Op::ColumnSum | Op::Matmul { .. } | Op::Concat { .. } => false,
            Op::Gather | Op::ScatterAdd { .. } | Op::Append { .. } | Op::Opaque(_) => false,
        }
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

    fn spread(&mut self, g: NodeId, x: NodeId) -> Value {
        let shape = self.graph.node(x).shape.clone();
        if self.graph.node(g).shape == shape {
            return Ok(g);
        }
        self.graph.push(Op::View(View::Broadcast(shape)), &[g])
    }

    fn reshape_like(&mut self, g: NodeId, x: NodeId) -> Value {
        let shape = self.graph.node(x).shape.clone();
        if self.graph.node(g).shape == shape {
            return Ok(g);
        }
        self.graph.push(Op::View(View::Reshape(shape)), &[g])
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

    fn unary(&mut self, op: UnaryOp, x: NodeId) -> Value {
        self.graph.push(Op::Unary(op), &[x])
    }

    fn binary(&mut self, op: BinaryOp, a: NodeId, b: NodeId) -> Value {
        self.graph.push(Op::Binary(op), &[a, b])
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

    fn constant_like(&mut self, value: f64, x: NodeId) -> Value {
        let dtype = self.graph.node(x).dtype;
        self.graph.push(Op::Const { value, dtype }, &[])
    }

    fn zeros(&mut self, shape: &Shape, dtype: Dtype) -> Value {
        let zero = self.graph.push(Op::Const { value: 0.0, dtype }, &[])?;
        self.graph.push(Op::View(View::Broadcast(shape.clone())), &[zero])
    }
}

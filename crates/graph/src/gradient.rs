//! Reverse-mode differentiation, graph to graph.
//!
//! Calls are walked from last to first. The gradient of a call is one block, `grad(name)`, so that planner and reports
//! still work with composites. A block does not read large intermediates of the forward composite: it recomputes
//! them from the composite's operands and its row statistics. So the values stored between forward and backward are those that
//! textbook code saves: operands, results and one or two numbers per row; random masks are recomputed, never stored.

use std::collections::HashMap;

mod loss;
mod rules;

use crate::block::Block;
use crate::composite::Composite;
use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::graph::{Callee, Graph};
use crate::node::NodeId;
use crate::op::{Op, ReduceOp};
use crate::shape::Shape;

type Value = Result<NodeId, GraphError>;

/// A graph together with its gradients.
#[derive(Debug, Clone, PartialEq)]
pub struct Differentiated {
    /// The forward graph, continued. Its outputs are the forward ones, then `d_<input>` for each gradient.
    pub graph: Graph,
    /// The new inputs: the incoming gradient of each float output that depends on `wrt`.
    pub seeds: Vec<NodeId>,
    /// Each requested input, with its gradient.
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

/// An int8 matmul that depends on one of `wrt`.
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

/// A gradient contribution to a node: for all of it, or for a range of one axis.
#[derive(Debug, Clone, Copy)]
enum Contribution {
    Whole(NodeId),
    Slice { axis: usize, start: usize, gradient: NodeId },
}

struct Reverse {
    graph: Graph,
    /// For each forward node, whether a gradient passes through it.
    active: Vec<bool>,
    contributions: Vec<Vec<Contribution>>,
    /// Nodes that another part of their call reads, or that are results of their call.
    exposed: Vec<bool>,
    /// Forward nodes recomputed in the current block.
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
        if let Callee::Composite(Composite::LinearCrossEntropy { smoothing, ignored }) = call.callee {
            return self.linear_cross_entropy(&call, smoothing, ignored);
        }
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
                None => self.zeros_like(input)?,
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

    /// The sum of all contributions to a node.
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
            total = self.graph.add(total, gradient)?;
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
        if parts.len() == 1 { Ok(parts[0]) } else { self.graph.concat(&parts, axis) }
    }

    fn gap(&mut self, shape: &Shape, dtype: Dtype, axis: usize, length: usize) -> Value {
        let mut dims = shape.to_vec();
        dims[axis] = length;
        self.zeros(&Shape::new(dims), dtype)
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
            g = self.graph.reduce(ReduceOp::Sum, g)?;
            dims[last] = 1;
        }
        let summed: Vec<usize> = (0..last).filter(|&axis| repeats(axis)).collect();
        if !summed.is_empty() {
            let kept: Vec<usize> = (0..=last).filter(|axis| !summed.contains(axis)).collect();
            let order: Vec<usize> = summed.iter().chain(&kept).copied().collect();
            if !order.iter().enumerate().all(|(position, &axis)| position == axis) {
                g = self.graph.transpose(g, &order)?;
            }
            let rows: usize = summed.iter().map(|&axis| dims[axis]).product();
            let cols: usize = kept.iter().map(|&axis| dims[axis]).product();
            g = self.graph.reshape(g, Shape::from([rows, cols]))?;
            g = self.graph.column_sum(g)?;
        }
        self.reshape_like(g, x)
    }

    /// A forward value in the current block: the node itself if it is stored anyway or is small, otherwise recomputed.
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

    fn spread(&mut self, g: NodeId, x: NodeId) -> Value {
        let shape = self.graph.node(x).shape.clone();
        if self.graph.node(g).shape == shape {
            return Ok(g);
        }
        self.graph.broadcast(g, shape)
    }

    fn reshape_like(&mut self, g: NodeId, x: NodeId) -> Value {
        let shape = self.graph.node(x).shape.clone();
        if self.graph.node(g).shape == shape {
            return Ok(g);
        }
        self.graph.reshape(g, shape)
    }

    fn constant_like(&mut self, value: f64, x: NodeId) -> Value {
        let dtype = self.graph.node(x).dtype;
        self.graph.constant(value, dtype)
    }

    fn zeros_like(&mut self, x: NodeId) -> Value {
        let node = self.graph.node(x);
        let (shape, dtype) = (node.shape.clone(), node.dtype);
        self.zeros(&shape, dtype)
    }

    fn zeros(&mut self, shape: &Shape, dtype: Dtype) -> Value {
        let zero = self.graph.constant(0.0, dtype)?;
        self.graph.broadcast(zero, shape.clone())
    }
}

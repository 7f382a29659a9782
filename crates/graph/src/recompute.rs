//! Recomputation of values instead of storing them, graph to graph.
//!
//! A forward value that backward reads is stored from its computation until its last reader has run. [`recompute`]
//! returns an equivalent graph in which backward reads a copy instead, computed where backward first needs it. Which values
//! to copy is not decided here. A copy is the same primitive on the same operands, so it has the same bits; a
//! random mask is its seed and its offset, so a copy of it is the same mask.

use crate::block::Block;
use crate::composite::Composite;
use crate::error::GraphError;
use crate::graph::{Call, Callee, Graph};
use crate::node::NodeId;
use crate::op::Op;

/// A graph whose backward part recomputes some forward values.
#[derive(Debug, Clone, PartialEq)]
pub struct Recomputed {
    /// The graph. Its forward part is the old one, node for node; so the first backward node has the same number.
    pub graph: Graph,
    /// Each forward value that has a copy, with the copy, both in the new graph, in the order of the copies.
    pub copies: Vec<(NodeId, NodeId)>,
}

/// The graph in which every reader from node `first_backward` on reads copies of the nodes `again`.
///
/// Copies read kept values and each other. They are made once, just before the first call that needs them, in blocks
/// named after the forward calls: `recompute(gelu)`. Nodes of `again` that no backward node needs have no copy. Inputs,
/// outputs and names stay as they are.
pub fn recompute(graph: &Graph, first_backward: usize, again: &[NodeId]) -> Result<Recomputed, GraphError> {
    let is_copied = check(graph, first_backward, again)?;
    let mut rewrite = Rewrite {
        from: graph,
        into: Graph::new(graph.name()),
        moved: Vec::with_capacity(graph.nodes().len()),
        copy_of: vec![None; first_backward],
        copies: Vec::new(),
        is_copied,
    };
    for index in 0..graph.calls().len() {
        if graph.calls()[index].start >= first_backward {
            rewrite.copy_operands(index)?;
        }
        rewrite.call(index)?;
    }
    for output in graph.outputs() {
        rewrite.into.output(&output.name, rewrite.moved[output.node.index()])?;
    }
    Ok(Recomputed { graph: rewrite.into, copies: rewrite.copies })
}

/// Where the backward part of a graph begins that [`crate::differentiate`] made, found by its blocks, so in a graph
/// read from text too. The inputs just before the first gradient belong to it: they are the incoming
/// gradients. So do the values that are computed again for it. `None` if no block is a gradient.
pub fn first_backward(graph: &Graph) -> Option<usize> {
    let is_backward = |callee: &Callee| callee.is_gradient() || callee.is_recomputed();
    let mut first = graph.calls().iter().position(|call| is_backward(&call.callee))?;
    while first > 0 && matches!(graph.nodes()[graph.calls()[first - 1].start].op, Op::Input { .. }) {
        first -= 1;
    }
    Some(graph.calls()[first].start)
}

/// The interior of attention that its gradient reads: a backward kernel recomputes scores from
/// queries and keys instead of reading a matrix of them.
pub fn attention_interior(graph: &Graph, first: usize) -> Vec<NodeId> {
    let mut read = vec![false; first];
    for node in &graph.nodes()[first..] {
        node.inputs.iter().filter(|input| input.index() < first).for_each(|input| read[input.index()] = true);
    }
    let mut interior = Vec::new();
    for call in graph.calls().iter().filter(|call| call.start < first) {
        if !matches!(call.callee, Callee::Composite(Composite::Attention { .. })) {
            continue;
        }
        let mut wanted = vec![false; call.end - call.start];
        for index in (call.start..call.end).rev() {
            let Some(id) = graph.id(index) else { continue };
            let is_result = call.outputs.contains(&id);
            let at = index - call.start;
            wanted[at] |= read[index] && !is_result;
            if wanted[at] {
                let inside = graph.node(id).inputs.iter().filter(|input| input.index() >= call.start);
                inside.for_each(|input| wanted[input.index() - call.start] = true);
                if !matches!(graph.node(id).op, Op::Input { .. }) {
                    interior.push(id);
                }
            }
        }
    }
    interior
}

/// Whether a node is in a block that [`recompute`] made. A kernel that computes it must not contain forward nodes, where the
/// copy would be the stored value under another name.
pub fn is_recomputed(graph: &Graph, node: NodeId) -> bool {
    graph.calls()[graph.node(node).call.index()].callee.is_recomputed()
}

/// For each forward node, whether it is copied.
fn check(graph: &Graph, first_backward: usize, again: &[NodeId]) -> Result<Vec<bool>, GraphError> {
    let refuse = |attribute: &'static str, expected: String, got: String| {
        Err(GraphError::Attribute { op: "recompute".to_string(), attribute, expected, got })
    };
    let is_start = |call: &Call| call.start == first_backward;
    if first_backward != graph.nodes().len() && !graph.calls().iter().any(is_start) {
        return refuse("first_backward", "the first node of a call".to_string(), format!("%{first_backward}"));
    }
    let mut is_copied = vec![false; first_backward];
    for &id in again {
        graph.check_node("recompute", id)?;
        if id.index() >= first_backward || matches!(graph.node(id).op, Op::Input { .. }) {
            let expected = format!("values computed before %{first_backward}");
            return refuse("again", expected, format!("%{}", id.index()));
        }
        is_copied[id.index()] = true;
    }
    Ok(is_copied)
}

struct Rewrite<'a> {
    from: &'a Graph,
    into: Graph,
    /// For each node that was passed, the same node in the new graph.
    moved: Vec<NodeId>,
    /// For each forward node, its copy.
    copy_of: Vec<Option<NodeId>>,
    copies: Vec<(NodeId, NodeId)>,
    is_copied: Vec<bool>,
}

impl Rewrite<'_> {
    /// Adds the copies that a backward call is the first to need.
    fn copy_operands(&mut self, index: usize) -> Result<(), GraphError> {
        let from = self.from;
        let call = &from.calls()[index];
        let mut missing: Vec<NodeId> = Vec::new();
        let mut stack: Vec<NodeId> = call.inputs.clone();
        from.nodes()[call.start..call.end].iter().for_each(|node| stack.extend(&node.inputs));
        while let Some(id) = stack.pop() {
            let is_missing = |id: NodeId| self.is_copied[id.index()] && self.copy_of[id.index()].is_none();
            if id.index() < self.is_copied.len() && is_missing(id) {
                // Its place is taken at once, so that no value is listed twice; the copy itself follows.
                self.copy_of[id.index()] = Some(id);
                missing.push(id);
                stack.extend(&from.node(id).inputs);
            }
        }
        // Operands have lower numbers than their readers, and the nodes of a call follow each other.
        missing.sort_unstable();
        for block in missing.chunk_by(|a, b| from.node(*a).call == from.node(*b).call) {
            self.into.open_block();
            for &id in block {
                let node = from.node(id);
                self.into.set_part(node.part);
                let inputs: Vec<NodeId> = node.inputs.iter().map(|&input| self.backward_operand(input)).collect();
                let copy = self.into.push(node.op.clone(), &inputs)?;
                self.copy_of[id.index()] = Some(copy);
                self.copies.push((self.moved[id.index()], copy));
            }
            self.into.close_block(Block::Recompute(Box::new(from.origin(from.node(block[0]).call))));
        }
        Ok(())
    }

    fn backward_operand(&self, id: NodeId) -> NodeId {
        self.copy_of.get(id.index()).copied().flatten().unwrap_or_else(|| self.moved[id.index()])
    }

    fn operand(&self, reader: usize, id: NodeId) -> NodeId {
        if reader >= self.is_copied.len() { self.backward_operand(id) } else { self.moved[id.index()] }
    }

    fn call(&mut self, index: usize) -> Result<(), GraphError> {
        let from = self.from;
        let call = &from.calls()[index];
        let is_block = call.callee != Callee::Primitive;
        if is_block {
            self.into.open_block();
        }
        for node in &from.nodes()[call.start..call.end] {
            self.into.set_part(node.part);
            let inputs: Vec<NodeId> = node.inputs.iter().map(|&input| self.operand(call.start, input)).collect();
            let moved = self.into.push(node.op.clone(), &inputs)?;
            self.moved.push(moved);
        }
        if is_block {
            let inputs = call.inputs.iter().map(|&input| self.operand(call.start, input)).collect();
            let outputs = call.outputs.iter().map(|output| self.moved[output.index()]).collect();
            self.into.close_call(call.callee.clone(), inputs, outputs);
        }
        for position in call.start..call.end {
            if let Some(name) = from.given_name(NodeId(position as u32)) {
                self.into.set_node_name(self.moved[position], name)?;
            }
        }
        Ok(())
    }
}

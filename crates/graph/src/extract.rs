//! A part of a graph as a graph of its own: the backward half of a training step, or the smallest graph that fails.

use std::collections::HashMap;

use crate::error::GraphError;
use crate::graph::{Callee, Graph, Output};
use crate::node::NodeId;
use crate::op::{InputKind, Op};

/// The nodes that `outputs` need. Nodes of `boundary` become inputs of the new graph, whatever they were before.
pub fn extract(graph: &Graph, outputs: &[Output], boundary: &[NodeId]) -> Result<Graph, GraphError> {
    let mut needed = vec![false; graph.nodes().len()];
    for output in outputs {
        graph.check_node("extract", output.node)?;
        needed[output.node.index()] = true;
    }
    for id in graph.ids().rev() {
        if needed[id.index()] && !boundary.contains(&id) {
            graph.node(id).inputs.iter().for_each(|input| needed[input.index()] = true);
        }
    }
    let mut copy = Copying { from: graph, into: Graph::new(graph.name()), moved: HashMap::new() };
    copy.boundary(boundary, &needed)?;
    for index in 0..graph.calls().len() {
        copy.call(index, &needed)?;
    }
    for output in outputs {
        copy.into.output(&output.name, copy.moved[&output.node])?;
    }
    Ok(copy.into)
}

struct Copying<'a> {
    from: &'a Graph,
    into: Graph,
    moved: HashMap<NodeId, NodeId>,
}

impl Copying<'_> {
    fn boundary(&mut self, boundary: &[NodeId], needed: &[bool]) -> Result<(), GraphError> {
        for &id in boundary.iter().filter(|id| needed[id.index()]) {
            let node = self.from.node(id);
            let kind = match node.op {
                Op::Input { kind, .. } => kind,
                _ => InputKind::Data,
            };
            let name = self.from.given_name(id).map_or_else(|| format!("node{}", id.index()), str::to_string);
            let copied = self.into.input_of(kind, &name, node.dtype, node.shape.clone())?;
            self.moved.insert(id, copied);
        }
        Ok(())
    }

    fn call(&mut self, index: usize, needed: &[bool]) -> Result<(), GraphError> {
        let call = &self.from.calls()[index];
        let ids: Vec<NodeId> = (call.start..call.end).map(|position| NodeId(position as u32)).collect();
        let take: Vec<NodeId> =
            ids.iter().copied().filter(|id| needed[id.index()] && !self.moved.contains_key(id)).collect();
        if take.is_empty() {
            return Ok(());
        }
        let whole = take.len() == ids.len();
        let single = call.callee == Callee::Primitive;
        if !single {
            self.into.open_block();
        }
        for &id in &take {
            let node = self.from.node(id);
            self.into.set_part(node.part);
            let inputs: Vec<NodeId> = node.inputs.iter().map(|input| self.moved[input]).collect();
            let copied = self.into.push(node.op.clone(), &inputs)?;
            self.moved.insert(id, copied);
        }
        if !single {
            let moved = |ids: &[NodeId]| ids.iter().map(|id| self.moved[id]).collect();
            match (&call.callee, whole) {
                (Callee::Composite(_), true) => {
                    let (inputs, outputs) = (moved(&call.inputs), moved(&call.outputs));
                    self.into.close_call(call.callee.clone(), inputs, outputs);
                }
                _ => self.into.close_block(self.from.origin(self.from.node(take[0]).call)),
            }
        }
        for &id in &take {
            if let Some(name) = self.from.given_name(id) {
                self.into.set_node_name(self.moved[&id], name)?;
            }
        }
        Ok(())
    }
}

//! The graph: primitives in the order they were built, and the calls that grouped them.
//!
//! Every node belongs to exactly one *call*, as the user wrote it. A call is one primitive, or a composite
//! (`layer_norm`), whose nodes are its expansion, or a block that a pass made (`grad(layer_norm)`). Calls are contiguous
//! runs of nodes. Planner and reports refer to calls; kernels consist of nodes.

use std::borrow::Cow;
use std::collections::HashMap;

use crate::block::Block;
use crate::composite::{Composite, CompositeKind};
use crate::dtype::Dtype;
use crate::error::{GraphError, Operand};
use crate::infer::infer;
use crate::node::{CallId, Node, NodeId};
use crate::op::{Op, View};
use crate::shape::MAX_RANK;

/// The origin of a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Callee {
    /// One primitive.
    Primitive,
    /// A composite, expanded.
    Composite(Composite),
    /// Grouped nodes.
    Block(Block),
}

impl Callee {
    /// The composite whose gradient this is.
    pub fn gradient_of(&self) -> Option<CompositeKind> {
        let Callee::Block(Block::Gradient(of)) = self else { return None };
        of.composite()
    }

    /// The composite that this recomputes values of.
    pub fn recomputes(&self) -> Option<CompositeKind> {
        let Callee::Block(Block::Recompute(of)) = self else { return None };
        of.composite()
    }

    /// Whether [`crate::differentiate`] made it.
    pub fn is_gradient(&self) -> bool {
        matches!(self, Callee::Block(Block::Gradient(_) | Block::GradientSum))
    }

    /// Whether [`crate::recompute`] made it.
    pub fn is_recomputed(&self) -> bool {
        matches!(self, Callee::Block(Block::Recompute(_)))
    }
}

/// One call of the builder.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// What was called.
    pub callee: Callee,
    /// Operands of a composite; empty otherwise.
    pub inputs: Vec<NodeId>,
    /// Results of a composite; empty otherwise.
    pub outputs: Vec<NodeId>,
    /// First node.
    pub start: usize,
    /// One past the last node.
    pub end: usize,
}

/// An output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Its name.
    pub name: String,
    /// The node.
    pub node: NodeId,
}

/// A computation: append-only, in static single assignment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Graph {
    name: String,
    nodes: Vec<Node>,
    calls: Vec<Call>,
    names: HashMap<NodeId, String>,
    named: HashMap<String, NodeId>,
    inputs: Vec<NodeId>,
    outputs: Vec<Output>,
    open: Option<Open>,
}

/// A call under construction.
#[derive(Debug, Clone, PartialEq)]
struct Open {
    start: usize,
    part: u8,
}

impl Graph {
    /// An empty graph. Characters that the text form could not read back become `_`.
    pub fn new(name: &str) -> Self {
        Graph { name: readable(name), ..Graph::default() }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Gives it another name.
    pub fn set_name(&mut self, name: &str) {
        self.name = readable(name);
    }

    /// All nodes, operands before users.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// All calls, in order.
    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// One node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// Handles of all nodes, in order.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// The handle at a position, if there is one.
    pub fn id(&self, index: usize) -> Option<NodeId> {
        (index < self.nodes.len()).then_some(NodeId(index as u32))
    }

    /// The inputs, in the order they were declared: the order in which a session takes them.
    pub fn inputs(&self) -> &[NodeId] {
        &self.inputs
    }

    /// The outputs, in the order they were declared.
    pub fn outputs(&self) -> &[Output] {
        &self.outputs
    }

    /// The name a user gave a node.
    pub fn given_name(&self, id: NodeId) -> Option<&str> {
        self.names.get(&id).map(String::as_str)
    }

    /// The node of a name.
    pub fn find(&self, name: &str) -> Option<NodeId> {
        self.named.get(name).copied()
    }

    /// The user's name of a node, or `%n`.
    pub fn label(&self, id: NodeId) -> String {
        self.given_name(id).map_or_else(|| format!("%{}", id.0), str::to_string)
    }

    /// The name of a call for reports: `layer_norm`, `add`, `grad(gelu)`.
    pub fn call_name(&self, id: CallId) -> Cow<'_, str> {
        let call = &self.calls[id.index()];
        match &call.callee {
            Callee::Primitive => match &self.nodes[call.start].op {
                Op::Opaque(opaque) => Cow::Borrowed(&opaque.name),
                op => Cow::Borrowed(op.name()),
            },
            Callee::Composite(composite) => Cow::Borrowed(composite.name()),
            Callee::Block(block) => Cow::Owned(block.to_string()),
        }
    }

    /// A call as a block: its remaining part, or the origin of a gradient or a recomputation.
    pub(crate) fn origin(&self, id: CallId) -> Block {
        match &self.calls[id.index()].callee {
            Callee::Primitive => Block::named(&self.call_name(id)),
            Callee::Composite(composite) => Block::Composite(composite.kind()),
            Callee::Block(block) => block.clone(),
        }
    }

    /// For each node, the nodes that read it.
    pub fn users(&self) -> Vec<Vec<NodeId>> {
        let mut users = vec![Vec::new(); self.nodes.len()];
        for id in self.ids() {
            for input in &self.node(id).inputs {
                if users[input.index()].last() != Some(&id) {
                    users[input.index()].push(id);
                }
            }
        }
        users
    }

    /// Gives a node a name, which must be new.
    pub fn set_node_name(&mut self, id: NodeId, name: &str) -> Result<(), GraphError> {
        self.check_node("name", id)?;
        if !is_name(name) {
            return Err(GraphError::BadName(name.to_string()));
        }
        if self.find(name).is_some_and(|other| other != id) {
            return Err(GraphError::DuplicateName(name.to_string()));
        }
        if let Some(before) = self.names.insert(id, name.to_string()) {
            self.named.remove(&before);
        }
        self.named.insert(name.to_string(), id);
        Ok(())
    }

    /// Declares an output under a new name. An input that is also an output passes through a reshape to its own shape, so
    /// that every output is written by some kernel.
    pub fn output(&mut self, name: &str, node: NodeId) -> Result<(), GraphError> {
        self.check_node("out", node)?;
        if !is_name(name) {
            return Err(GraphError::BadName(name.to_string()));
        }
        if self.outputs.iter().any(|output| output.name == name) {
            return Err(GraphError::DuplicateName(name.to_string()));
        }
        let node = match &self.node(node).op {
            Op::Input { shape, .. } => self.push(Op::View(View::Reshape(shape.clone())), &[node])?,
            _ => node,
        };
        self.outputs.push(Output { name: name.to_string(), node });
        Ok(())
    }

    /// Keeps only the outputs that a function selects, by position.
    pub fn retain_outputs(&mut self, keep: impl Fn(usize) -> bool) {
        let mut position = 0..;
        self.outputs.retain(|_| position.next().is_some_and(&keep));
    }

    /// Appends a primitive as a call of its own, or, inside an open call, to that call.
    pub(crate) fn push(&mut self, op: Op, inputs: &[NodeId]) -> Result<NodeId, GraphError> {
        for &input in inputs {
            self.check_node(op.name(), input)?;
        }
        let operands: Vec<&Node> = inputs.iter().map(|&id| self.node(id)).collect();
        let (shape, dtype) = infer(&op, &operands).map_err(|expected| GraphError::Operands {
            op: op.name().to_string(),
            expected,
            operands: inputs.iter().map(|&id| self.operand(id)).collect(),
        })?;
        if shape.rank() > MAX_RANK || shape.checked_elements().is_none() {
            return Err(GraphError::TooLarge { op: op.name().to_string(), shape });
        }
        let id = NodeId(self.nodes.len() as u32);
        let part = self.open.as_ref().map_or(0, |open| open.part);
        let is_input = matches!(op, Op::Input { .. });
        self.nodes.push(Node {
            op,
            inputs: inputs.to_vec(),
            shape,
            dtype,
            call: CallId(self.calls.len() as u32),
            part,
        });
        if is_input {
            self.inputs.push(id);
        }
        if self.open.is_none() {
            self.calls.push(Call {
                callee: Callee::Primitive,
                inputs: Vec::new(),
                outputs: Vec::new(),
                start: id.index(),
                end: id.index() + 1,
            });
        }
        Ok(id)
    }

    /// Builds a composite: the nodes that `expand` pushes become one call. An error removes them.
    pub(crate) fn composite_call(
        &mut self,
        composite: Composite,
        inputs: &[NodeId],
        expand: impl FnOnce(&mut Graph) -> Result<Vec<NodeId>, GraphError>,
    ) -> Result<Vec<NodeId>, GraphError> {
        let outputs = self.open_for(expand)?;
        self.close_call(Callee::Composite(composite), inputs.to_vec(), outputs.clone());
        Ok(outputs)
    }

    /// Builds a block: the nodes that `build` pushes become one call. An error removes them.
    pub(crate) fn block(
        &mut self,
        block: Block,
        build: impl FnOnce(&mut Graph) -> Result<Vec<NodeId>, GraphError>,
    ) -> Result<Vec<NodeId>, GraphError> {
        let results = self.open_for(build)?;
        self.close_block(block);
        Ok(results)
    }

    /// Opens a call for the nodes that `build` pushes. An error closes it and removes them.
    fn open_for<T>(&mut self, build: impl FnOnce(&mut Graph) -> Result<T, GraphError>) -> Result<T, GraphError> {
        let start = self.nodes.len();
        self.open_block();
        build(self).inspect_err(|_| {
            self.open = None;
            self.nodes.truncate(start);
        })
    }

    /// Opens a block: nodes pushed until [`Graph::close_block`] are one call.
    pub(crate) fn open_block(&mut self) {
        self.open = Some(Open { start: self.nodes.len(), part: 0 });
    }

    /// Closes the block. An empty block leaves no call.
    pub(crate) fn close_block(&mut self, block: Block) {
        self.close_call(Callee::Block(block), Vec::new(), Vec::new());
    }

    /// Closes the open call. An empty one leaves no call.
    pub(crate) fn close_call(&mut self, callee: Callee, inputs: Vec<NodeId>, outputs: Vec<NodeId>) {
        let Some(open) = self.open.take() else { return };
        if open.start < self.nodes.len() {
            self.calls.push(Call { callee, inputs, outputs, start: open.start, end: self.nodes.len() });
        }
    }

    /// The part that nodes pushed from now on belong to, within the open call.
    pub(crate) fn set_part(&mut self, part: u8) {
        if let Some(open) = &mut self.open {
            open.part = part;
        }
    }

    /// A node as an error message shows it.
    pub fn operand(&self, id: NodeId) -> Operand {
        let node = self.node(id);
        Operand { name: self.label(id), dtype: node.dtype, shape: node.shape.clone() }
    }

    pub(crate) fn check_node(&self, op: &str, id: NodeId) -> Result<(), GraphError> {
        if id.index() < self.nodes.len() {
            return Ok(());
        }
        Err(GraphError::UnknownNode { op: op.to_string(), node: id.index(), nodes: self.nodes.len() })
    }
}

/// A name that the text form can read back; an empty one stays empty.
pub(crate) fn readable(name: &str) -> String {
    let clean: String = name.chars().map(|c| if is_name_char(c) { c } else { '_' }).collect();
    if clean.is_empty() || is_name(&clean) { clean } else { format!("_{clean}") }
}

/// Whether the text form can read `name` back: letters, digits and `_ . - / ( )`, and not one of its own words.
pub fn is_name(name: &str) -> bool {
    // Words that mean something else where a value may stand.
    let reserved = matches!(name, "transpose_a" | "transpose_b" | "transposed" | "elementwise" | "inf")
        || name.parse::<Dtype>().is_ok();
    if reserved {
        return false;
    }
    let mut chars = name.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_') && chars.all(is_name_char)
}

pub(crate) fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '/' | '(' | ')')
}

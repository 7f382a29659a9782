//! Nodes of a graph and their handles.

use crate::dtype::Dtype;
use crate::op::Op;
use crate::shape::Shape;

/// Handle of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(crate) u32);

/// Handle of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub(crate) u32);

impl NodeId {
    /// Position in [`Graph::nodes`](crate::Graph::nodes).
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl CallId {
    /// Position in [`Graph::calls`](crate::Graph::calls).
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One primitive with its operands.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// What it computes.
    pub op: Op,
    /// Its operands, all built before it.
    pub inputs: Vec<NodeId>,
    /// Shape of the result.
    pub shape: Shape,
    /// Dtype of the result.
    pub dtype: Dtype,
    /// The call it came from.
    pub call: CallId,
    /// The part of the call: composites are split only between parts (attention: scores, mask, softmax, product).
    pub part: u8,
}

impl Node {
    /// Bytes of the result if stored.
    pub fn bytes(&self) -> usize {
        self.shape.elements() * self.dtype.bytes()
    }
}

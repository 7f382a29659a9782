//! Rows and columns: the space a kernel runs over, and the sizes of matmuls.

use std::fmt;

use deuteron_graph::{Graph, NodeId, Op, Shape};

/// The rows and columns per row kernel runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Space {
    /// product of the leading axes
    pub rows: usize,
    /// the last axis
    pub cols: usize,
}

impl Space {
    fn of(shape: &Shape) -> Space {
        Space { rows: shape.rows(), cols: shape.cols() }
    }

    /// The space that holds both: equal rows, and columns that are equal or 1.
    pub fn join(self, other: Space) -> Option<Space> {
        let cols = match (self.cols, other.cols) {
            (a, b) if a == b => a,
            (1, b) => b,
            (a, 1) => a,
            _ => return None,
        };
        (self.rows == other.rows).then_some(Space { rows: self.rows, cols })
    }
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.rows, self.cols)
    }
}

/// The space of a node inside a row kernel: that of its operand for reductions, its own otherwise.
pub fn node_space(graph: &Graph, id: NodeId) -> Space {
    Space::of(space_shape(graph, id))
}

/// The shape behind [`node_space`].
pub(crate) fn space_shape(graph: &Graph, id: NodeId) -> &Shape {
    let node = graph.node(id);
    match node.op {
        Op::RowReduce(_) | Op::ColumnSum => &graph.node(node.inputs[0]).shape,
        _ => &node.shape,
    }
}

/// The column sum, made by the same kernel, that a node converts as it is stored: sums are of `f32`, gradients of the
/// weight's type.
pub fn finished_sum(graph: &Graph, nodes: &[NodeId], id: NodeId) -> Option<NodeId> {
    let node = graph.node(id);
    let sum = *node.inputs.first().filter(|_| matches!(node.op, Op::Cast(_)) && node.dtype.is_float())?;
    (matches!(graph.node(sum).op, Op::ColumnSum) && nodes.binary_search(&sum).is_ok()).then_some(sum)
}

/// (m, n, k, batch) of a matmul.
pub fn matmul_size(graph: &Graph, id: NodeId, transpose_a: bool) -> (usize, usize, usize, usize) {
    let node = graph.node(id);
    let a = &graph.node(node.inputs[0]).shape;
    let k = if transpose_a { a[a.rank() - 2] } else { a.cols() };
    let rank = node.shape.rank();
    let (n, m) = (node.shape.cols(), node.shape[rank - 2]);
    let batch: usize = node.shape[..rank - 2].iter().product();
    // A weight that serves every batch makes one tall matmul.
    if graph.node(node.inputs[1]).shape.rank() == 2 && !transpose_a { (m * batch, n, k, 1) } else { (m, n, k, batch) }
}

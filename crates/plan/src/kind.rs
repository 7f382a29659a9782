//! Kinds of kernels.

use deuteron_graph::{Graph, NodeId, Op, named};

use crate::layout::Placement;

named! {
    /// The kind of kernel a group is.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum GroupKind {
        /// Elementwise work, row reductions and column sums over one space.
        Row = "row",
        /// Matmuls of one left operand, with prologue and epilogue.
        Matmul = "matmul",
        /// Attention by online softmax, or its gradient.
        Attention = "attention",
        /// Rows added into a table.
        ScatterAdd = "scatter_add",
        /// Rows written into a cache.
        Append = "append",
        /// A view or a concatenation written out.
        Copy = "copy",
        /// Known only by its cost.
        Opaque = "opaque",
    }
}

/// The kind of kernel a node needs when it stands alone.
pub(crate) fn kernel_kind(graph: &Graph, placement: &Placement, id: NodeId) -> GroupKind {
    let node = graph.node(id);
    match &node.op {
        Op::Matmul { .. } => GroupKind::Matmul,
        Op::ScatterAdd { .. } => GroupKind::ScatterAdd,
        Op::Append { .. } => GroupKind::Append,
        Op::Concat { .. } => GroupKind::Copy,
        Op::Opaque(opaque) if !opaque.elementwise => GroupKind::Opaque,
        // A view with a buffer of its own copies what it sees; a pattern with a buffer is written by a row kernel.
        Op::View(_) | Op::StopGradient if placement.get(node.inputs[0]).is_some() => GroupKind::Copy,
        _ => GroupKind::Row,
    }
}

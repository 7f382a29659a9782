//! Kinds of kernels.

use std::fmt;

use deuteron_graph::{Graph, NodeId, Op};

use crate::layout::Placement;

/// The kind of kernel a group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// Elementwise work, row reductions and column sums over one space.
    Row,
    /// Matmuls of one left operand, with prologue and epilogue.
    Matmul,
    /// Attention by online softmax, or its gradient.
    Attention,
    /// Rows added into a table.
    ScatterAdd,
    /// Rows written into a cache.
    Append,
    /// A view or a concatenation written out.
    Copy,
    /// Known only by its cost.
    Opaque,
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GroupKind::Row => "row",
            GroupKind::Matmul => "matmul",
            GroupKind::Attention => "attention",
            GroupKind::ScatterAdd => "scatter_add",
            GroupKind::Append => "append",
            GroupKind::Copy => "copy",
            GroupKind::Opaque => "opaque",
        })
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

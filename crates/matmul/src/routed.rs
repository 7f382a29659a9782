//! Matmuls of a row each with a matrix that an index picks for it: experts.
//!
//! What is picked is never written down: rows of one expert are multiplied with its matrix together. Bytes alone are taken, because
//! their sums are exact, whatever rows come together.

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_graph::{Dtype, NodeId, Op};
use deuteron_plan::{Draft, Placed, Side};

use super::fit::{MatmulFit, is_elementwise, is_in_order};

/// Rows times picked matrices, if the kernel does this: rows and matrices of bytes that lie in order, and after them elementwise
/// work, and rows of tables that the same indices pick.
pub(super) fn fit<'a>(draft: &Draft, matmul: &'a NodeId, picked: NodeId, epilogue: &'a Side) -> Option<MatmulFit<'a>> {
    let matmuls = std::slice::from_ref(matmul);
    fits(draft, matmuls, picked, &epilogue.nodes).then(|| {
        let (shape, operands) = shape(draft, *matmul, picked);
        MatmulFit { matmuls, gather: Some(picked), prologue: &[], epilogue: &epilogue.nodes, shape, operands }
    })
}

fn fits(draft: &Draft, matmuls: &[NodeId], picked: NodeId, epilogue: &[NodeId]) -> bool {
    let &[matmul] = matmuls else { return false };
    let graph = draft.graph;
    let (node, gather) = (graph.node(matmul), graph.node(picked));
    let place = |value: NodeId| draft.placement.get(value);
    let (Some(a), Some(b)) = (place(node.inputs[0]), place(node.inputs[1])) else { return false };
    let (Some(table), Some(indices)) = (place(gather.inputs[0]), place(gather.inputs[1])) else { return false };
    let bytes = [node.inputs[0], node.inputs[1]].iter().all(|&id| graph.node(id).dtype == Dtype::I8);
    let by_columns = node.op == (Op::Matmul { transpose_a: false, transpose_b: true }) && node.shape.rank() == 3;
    let in_order = |placed: &Placed| placed.layout.is_contiguous();
    let rows_lie = a.layout.shape.cols() <= 1 || a.layout.strides.last() == Some(&1);
    let lie = rows_lie && in_order(b) && in_order(indices) && b.layout.shape.elements() == gather.shape.elements();
    let stored = |id: NodeId| draft.outputs.contains(&id);
    let leaves = stored(picked) || (!epilogue.is_empty() && stored(matmul));
    // An index that one table has, the other has too: it is looked at once.
    let picks = |id: NodeId| {
        let other = graph.node(id);
        let same = matches!(other.op, Op::Gather) && place(other.inputs[1]) == Some(indices);
        same && graph.node(other.inputs[0]).shape[0] == table.layout.shape[0]
    };
    let follows = |&id: &NodeId| (is_elementwise(&graph.node(id).op) || picks(id)) && is_in_order(draft, matmuls, id);
    bytes && by_columns && lie && !leaves && epilogue.iter().all(follows)
}

/// All rows as one matmul, its left operand, and the table of matrices: its leading axis is that of the matrices.
fn shape(draft: &Draft, matmul: NodeId, picked: NodeId) -> (MatmulShape, [ArgBinding; 2]) {
    let node = draft.graph.node(matmul);
    let a = operand(draft, node.inputs[0]);
    let table = operand(draft, draft.graph.node(picked).inputs[0]);
    let (rows, n, k) = (node.shape[0], node.shape[2], a.layout.shape.cols());
    let experts = table.layout.shape[0];
    let shape = MatmulShape { m: rows, n, k, batch: vec![], a: (a.layout.strides[0], 1), b: (1, k), c: (n, 1) };
    let table =
        ArgBinding { leading: vec![(experts, table.layout.strides[0])], table_rows: experts, ..binding(draft, table) };
    (shape, [binding(draft, a), table])
}

/// The indices, in order.
pub(super) fn indices(draft: &Draft, picked: NodeId) -> ArgBinding {
    binding(draft, operand(draft, draft.graph.node(picked).inputs[1]))
}

fn operand<'a>(draft: &Draft<'a>, value: NodeId) -> &'a Placed {
    draft.placement.get(value).expect("operands that fit are placed")
}

fn binding(draft: &Draft, placed: &Placed) -> ArgBinding {
    ArgBinding::whole(draft.graph, placed.base, placed.layout.offset, false)
}

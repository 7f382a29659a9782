//! Matmuls of each row with a matrix that an index selects: experts.
//!
//! Selected matrices are never stored: the rows of one expert are multiplied with its matrix together. Sums of bytes are exact. Sums of floats
//! have an order that depends only on the number of rows of an expert and on the kernel, and so are the same on every run.

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_graph::{Dtype, NodeId, Op};
use deuteron_plan::{Draft, Placed, Side};

use super::fit::{Follows, MatmulFit, is_in_order};

/// How the rows of the left operand lie: that of row `r` of the result is `r / choices * stride + r % choices * own` elements on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeftRows {
    /// rows of the result that follow each other and are choices of one row
    pub choices: usize,
    /// elements from one row's choices to those of the next
    pub stride: usize,
    /// elements from one choice to the next; 0 where all read the same
    pub own: usize,
}

impl LeftRows {
    /// Of the left operand of a routed matmul: its leading axes are rows and choices.
    pub fn of(left: &ArgBinding) -> LeftRows {
        match left.leading.as_slice() {
            &[(_, stride), (choices, own)] => LeftRows { choices: choices.max(1), stride, own },
            &[(_, stride), ..] => LeftRows { choices: 1, stride, own: 0 },
            [] => LeftRows { choices: 1, stride: 0, own: 0 },
        }
    }

    /// Elements before a row.
    pub fn at(&self, row: usize) -> usize {
        row / self.choices * self.stride + row % self.choices * self.own
    }
}

/// Rows times picked matrices, if the kernel does this: rows and matrices of one type that lie in order, and after them what may follow, and
/// rows of tables that the same indices pick.
pub(super) fn fit<'a>(
    draft: &Draft,
    matmul: &'a NodeId,
    picked: NodeId,
    epilogue: &'a Side,
    follows: Follows,
) -> Option<MatmulFit<'a>> {
    let matmuls = std::slice::from_ref(matmul);
    fits(draft, matmuls, picked, &epilogue.nodes, follows).then(|| {
        let (shape, operands) = shape(draft, *matmul, picked);
        MatmulFit { matmuls, gather: Some(picked), prologue: &[], epilogue: &epilogue.nodes, shape, operands }
    })
}

fn fits(draft: &Draft, matmuls: &[NodeId], picked: NodeId, epilogue: &[NodeId], follows: Follows) -> bool {
    let &[matmul] = matmuls else { return false };
    let graph = draft.graph;
    let (node, gather) = (graph.node(matmul), graph.node(picked));
    let place = |value: NodeId| draft.placement.get(value);
    let (Some(a), Some(b)) = (place(node.inputs[0]), place(node.inputs[1])) else { return false };
    let (Some(table), Some(indices)) = (place(gather.inputs[0]), place(gather.inputs[1])) else { return false };
    let by_columns =
        node.op == (Op::Matmul { transpose_a: false, transpose_b: true }) && matches!(node.shape.rank(), 3 | 4);
    let in_order = |placed: &Placed| placed.layout.is_contiguous();
    let rows_lie = |placed: &Placed| placed.layout.shape.cols() <= 1 || placed.layout.strides.last() == Some(&1);
    let lie = rows_lie(a) && rows_lie(table) && in_order(b) && in_order(indices);
    let whole = b.layout.shape.elements() == gather.shape.elements();
    let stored = |id: NodeId| draft.outputs.contains(&id);
    let leaves = stored(picked) || (!epilogue.is_empty() && stored(matmul));
    // An index that one table has, the other has too: it is looked at once.
    let picks = |id: NodeId| {
        let other = graph.node(id);
        let same = matches!(other.op, Op::Gather) && place(other.inputs[1]) == Some(indices);
        same && graph.node(other.inputs[0]).shape[0] == table.layout.shape[0]
    };
    let follows = |&id: &NodeId| match picks(id) {
        true => is_in_order(draft, matmuls, id),
        false => graph.node(id).op != Op::ColumnSum && follows(draft, matmuls, epilogue, id),
    };
    let dtypes = [node.inputs[0], node.inputs[1], matmul].map(|id| graph.node(id).dtype);
    has_kernels(dtypes) && by_columns && lie && whole && !leaves && epilogue.iter().all(follows)
}

/// Whether there are kernels for these operands and result: bytes, or floats of one type.
fn has_kernels([a, b, result]: [Dtype; 3]) -> bool {
    match a {
        Dtype::I8 => b == Dtype::I8,
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => b == a && result == a,
        Dtype::F8e4m3 | Dtype::I32 | Dtype::Bool => false,
    }
}

/// All rows as one matmul, its left operand, and the table of matrices. Leading axes of the operand are rows and choices, that of the
/// table is of the matrices.
fn shape(draft: &Draft, matmul: NodeId, picked: NodeId) -> (MatmulShape, [ArgBinding; 2]) {
    let node = draft.graph.node(matmul);
    let a = operand(draft, node.inputs[0]);
    let table = operand(draft, draft.graph.node(picked).inputs[0]);
    let axes = node.shape.rank() - 2;
    let (n, k) = (node.shape.cols(), a.layout.shape.cols());
    let leading = (0..axes).map(|axis| (node.shape[axis], a.layout.strides[axis])).collect();
    let experts = table.layout.shape[0];
    let m = node.shape[..axes].iter().product();
    let shape = MatmulShape { m, n, k, batch: vec![], a: (a.layout.strides[0], 1), b: (1, k), c: (n, 1) };
    let left = ArgBinding { leading, ..binding(draft, a) };
    let table =
        ArgBinding { leading: vec![(experts, table.layout.strides[0])], table_rows: experts, ..binding(draft, table) };
    (shape, [left, table])
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

//! Whether our kernels support a chain of matmuls, and its lowering.

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::body::{Access, Body};
use deuteron_codegen::lower::{LoweredRows, lower_rows};
use deuteron_codegen::matmul_shape::{MatmulShape, lower_matmul_shape};
use deuteron_graph::{Dtype, NodeId, Op, Shape};
use deuteron_plan::{Chain, Draft, Link, Space, finished_sum, node_space};

use super::kernel::{Epilogue, LoweredMatmul, MAX_RIGHTS, Matmul, MatmulLaunch, PROLOGUE_ROWS, Prologue};
use super::routed;

/// A matmul, or several with one left operand, with prologue and epilogue, as input of our kernels.
#[derive(Debug, Clone, PartialEq)]
pub struct MatmulFit<'a> {
    /// one matmul, two or three
    pub matmuls: &'a [NodeId],
    /// what picks the right operand of each row
    pub gather: Option<NodeId>,
    /// what makes the left operand, in order
    pub prologue: &'a [NodeId],
    /// the epilogue, in order
    pub epilogue: &'a [NodeId],
    /// the matmul, or each of several
    pub shape: MatmulShape,
    /// left and right operand of the first; of a routed matmul, the rows and the table
    pub operands: [ArgBinding; 2],
}

/// The matmuls of a draft, if they are one to three of one operand, with row work that makes the operand of few rows and elementwise
/// work on the sums.
pub fn fit<'a>(draft: &Draft<'a>) -> Option<MatmulFit<'a>> {
    fit_few(draft, PROLOGUE_ROWS)
}

/// The same with row work over at most this many rows.
pub fn fit_few<'a>(draft: &Draft<'a>, rows: usize) -> Option<MatmulFit<'a>> {
    fit_with(draft, rows, is_elementwise_epilogue)
}

/// The same with any row work on the sums, and before matmuls of any number of rows.
pub fn fit_with_rows<'a>(draft: &Draft<'a>) -> Option<MatmulFit<'a>> {
    fit_with(draft, usize::MAX, is_row_epilogue)
}

/// Whether a node may follow matmuls.
pub(super) type Follows = fn(&Draft, &[NodeId], &[NodeId], NodeId) -> bool;

/// With a prologue over at most this many rows, and what may follow.
fn fit_with<'a>(draft: &Draft<'a>, rows: usize, follows: Follows) -> Option<MatmulFit<'a>> {
    let Chain { prologue, links, epilogue } = draft.structure.chain()?;
    let fit = match links.as_slice() {
        [Link::Routed { node, gather }] => return routed::fit(draft, node, *gather, epilogue, follows),
        [Link::Matmul { nodes }] => {
            let (shape, operands) = lower_matmul_shape(draft.graph, draft.placement, *nodes.first()?);
            let (prologue, epilogue) = (prologue.nodes.as_slice(), epilogue.nodes.as_slice());
            MatmulFit { matmuls: nodes, gather: None, prologue, epilogue, shape, operands }
        }
        _ => return None,
    };
    let stored = |id: &NodeId| draft.outputs.contains(id);
    if !fit.epilogue.is_empty() && fit.matmuls.iter().any(stored) {
        return None;
    }
    let fits = can_be_together(draft, &fit, &epilogue.crossing)
        && (fit.prologue.is_empty() || can_be_prologue(draft, &fit, rows))
        && fit.epilogue.iter().all(|&id| follows(draft, fit.matmuls, fit.epilogue, id));
    fits.then_some(fit)
}

/// One matmul, or several of one left operand whose right operands lie alike, and which are all read on or all stored.
fn can_be_together(draft: &Draft, fit: &MatmulFit, read: &[NodeId]) -> bool {
    let (&[first, ref others @ ..], [a, b]) = (fit.matmuls, &fit.operands) else { return false };
    let dtype = |id: NodeId| draft.graph.node(id).dtype;
    let alike = |&other: &NodeId| {
        let (shape, [left, right]) = lower_matmul_shape(draft.graph, draft.placement, other);
        *a == left && b.dtype == right.dtype && fit.shape == shape && dtype(first) == dtype(other)
    };
    let followed = fit.epilogue.is_empty() || read == fit.matmuls;
    others.is_empty() || (others.len() < MAX_RIGHTS && others.iter().all(alike) && followed)
}

/// Row work over at most this many rows that is read as it would lie.
fn can_be_prologue(draft: &Draft, fit: &MatmulFit, rows: usize) -> bool {
    let graph = draft.graph;
    let node = graph.node(fit.matmuls[0]);
    let (&MatmulShape { m, k, .. }, [_, b]) = (&fit.shape, &fit.operands);
    let Some(placed) = draft.placement.get(node.inputs[0]) else { return false };
    let made = graph.node(placed.base);
    let in_place = fit.prologue.contains(&placed.base)
        && !matches!(node.op, Op::Matmul { transpose_a: true, .. })
        && placed.layout.is_contiguous()
        && placed.layout.shape.elements() == made.shape.elements()
        && Space { rows: made.shape.rows(), cols: made.shape.cols() } == Space { rows: m, cols: k };
    let weights = fit.shape.batch.is_empty()
        && (fit.shape.b.0 == 1 || fit.shape.b.1 == 1)
        && !fit.prologue.contains(&b.base)
        && [made.dtype, b.dtype].iter().all(|dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16));
    let of_rows = |&id: &NodeId| {
        let space = node_space(graph, id);
        let known = is_elementwise(&graph.node(id).op) || matches!(graph.node(id).op, Op::RowReduce(_));
        known && space.rows == m && (space.cols == k || space.cols == 1)
    };
    // One column would be one number per row, worked on by other instructions than a row.
    (1..=rows).contains(&m) && k > 1 && in_place && weights && fit.prologue.iter().all(of_rows)
}

/// Elementwise work on the sums, which it reads in order.
fn is_elementwise_epilogue(draft: &Draft, matmuls: &[NodeId], _: &[NodeId], id: NodeId) -> bool {
    is_elementwise(&draft.graph.node(id).op) && is_in_order(draft, matmuls, id)
}

/// Row work on the sums, which it reads in order, and sums over rows.
fn is_row_epilogue(draft: &Draft, matmuls: &[NodeId], epilogue: &[NodeId], id: NodeId) -> bool {
    let shape: &Shape = &draft.graph.node(matmuls[0]).shape;
    let node = draft.graph.node(id);
    let number = node_space(draft.graph, id).cols == 1 && node.shape.elements() == shape.rows();
    let reduces = matches!(node.op, Op::RowReduce(_)) && reads_in_order(draft, matmuls, id);
    let whole = node_space(draft.graph, id) == Space { rows: shape.rows(), cols: shape.cols() };
    let sums = node.op == Op::ColumnSum && whole && reads_in_order(draft, matmuls, id);
    let stores_sum = finished_sum(draft.graph, epilogue, id).is_some();
    let follows =
        reduces || sums || stores_sum || (is_elementwise(&node.op) && (number || is_in_order(draft, matmuls, id)));
    shape.cols() > 1 && follows
}

/// Whether a node has an element for each sum, and reads the sums in order.
pub(super) fn is_in_order(draft: &Draft, matmuls: &[NodeId], id: NodeId) -> bool {
    let shape: &Shape = &draft.graph.node(matmuls[0]).shape;
    let node = draft.graph.node(id);
    let same = node.shape.elements() == shape.elements() && node.shape.cols() == shape.cols();
    same && reads_in_order(draft, matmuls, id)
}

/// Whether the sums that a node reads are read in order.
fn reads_in_order(draft: &Draft, matmuls: &[NodeId], id: NodeId) -> bool {
    let shape: &Shape = &draft.graph.node(matmuls[0]).shape;
    draft.graph.node(id).inputs.iter().all(|&input| match draft.placement.get(input) {
        Some(placed) if matmuls.contains(&placed.base) => {
            placed.layout.is_contiguous() && placed.layout.shape.cols() == shape.cols()
        }
        Some(_) | None => true,
    })
}

pub(super) fn is_elementwise(op: &Op) -> bool {
    matches!(op, Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) | Op::Random { .. })
}

/// Lowers matmuls with prologue and epilogue.
pub fn lower_matmul(draft: &Draft, fit: MatmulFit) -> LoweredMatmul {
    let graph = draft.graph;
    let MatmulFit { matmuls, gather, prologue, epilogue, shape, operands: [a, b] } = fit;
    let mut kernel = Matmul {
        left: a.dtype,
        right: b.dtype,
        result: graph.node(matmuls[0]).dtype,
        rights: matmuls.len(),
        routed: gather.is_some(),
        prologue: None,
        epilogue: None,
    };
    let (mut args, mut prologue_axes, mut axes) = (Vec::new(), Vec::new(), Vec::new());
    if prologue.is_empty() {
        args.push(a);
    } else {
        let rows = lower_side(&Draft { nodes: prologue, outputs: &[a.base], ..*draft }, &[a.base]);
        prologue_axes = rows.axes;
        kernel.prologue = Some(Prologue { made: rows.handed[0], body: rows.body });
        args.extend(rows.others);
    }
    args.push(b);
    args.extend(gather.map(|gather| routed::indices(draft, gather)));
    args.extend(matmuls[1..].iter().map(|&id| lower_matmul_shape(graph, draft.placement, id).1[1].clone()));
    if epilogue.is_empty() {
        args.extend(matmuls.iter().map(|&id| ArgBinding::whole(graph, id, 0, true)));
    } else {
        let rows = lower_side(&Draft { nodes: epilogue, ..*draft }, matmuls);
        axes = rows.axes;
        kernel.epilogue = Some(Epilogue { body: rows.body, sums: rows.handed });
        args.extend(rows.others);
    }
    LoweredMatmul { product: kernel, launch: MatmulLaunch { args, shape, prologue_axes, axes } }
}

/// A prologue or an epilogue.
struct Side {
    body: Body,
    /// Arguments that are passed as `f32`, in the order of their nodes.
    handed: Vec<usize>,
    /// All the others.
    others: Vec<ArgBinding>,
    axes: Vec<(usize, usize)>,
}

fn lower_side(draft: &Draft, handed: &[NodeId]) -> Side {
    let LoweredRows { body, launch } = lower_rows(draft, handed);
    let position = |&id: &NodeId| launch.args.iter().position(|arg| arg.base == id).expect("it is read or written");
    let handed: Vec<usize> = handed.iter().map(position).collect();
    debug_assert!(handed.iter().all(|&arg| matches!(body.args[arg].access, Access::Row | Access::PerRow)));
    let others = launch.args.iter().enumerate().filter(|(arg, _)| !handed.contains(arg));
    let others = others.map(|(_, arg)| arg.clone()).collect();
    Side { handed, others, axes: launch.axes, body }
}

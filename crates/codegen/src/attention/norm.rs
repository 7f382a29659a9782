//! A residual and a norm after attention or its projection, where that is all: `s = residual + (x + bias)`, `y = norm(s)`.
//!
//! A kernel that computes rows in parts can do this by hand, as it knows which numbers of a row the parts have to tell each other. Other
//! row work stays a body.

use deuteron_graph::{BinaryOp, Callee, Composite, Dtype, NodeId, Op};
use deuteron_plan::Draft;

use crate::argument::ArgBinding;

/// A residual and a norm. Arguments are positions in the launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AddNorm {
    /// which norm
    pub norm: NormKind,
    /// added to the variance
    pub eps: f64,
    /// storage type of the norm's weights
    pub weights: Dtype,
    /// added to every row first, one row for all; none where there is no projection or it has no bias
    pub added: Option<usize>,
    /// what the rows are added to
    pub residual: usize,
    /// factors of the norm
    pub weight: usize,
    /// what the norm adds
    pub bias: Option<usize>,
    /// the sum, where it is stored
    pub sum: Option<usize>,
    /// the normed rows
    pub result: usize,
}

/// Norms of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// about the mean, by the standard deviation
    Layer,
    /// by the root of the mean square
    RootMeanSquare,
}

/// Sees row work on a value as a residual and a norm, or `None` where it is more, less or of another type than the value. Arguments
/// are found among `args`, from position `from` on.
pub(crate) fn recognise(
    draft: &Draft,
    nodes: &[NodeId],
    value: NodeId,
    args: &[ArgBinding],
    from: usize,
) -> Option<AddNorm> {
    let (graph, placement) = (draft.graph, draft.placement);
    let call_of = |id: NodeId| graph.calls().get(graph.node(id).call.index());
    let is_norm = |id: &&NodeId| {
        let callee = call_of(**id).map(|call| &call.callee);
        matches!(callee, Some(Callee::Composite(Composite::LayerNorm { .. } | Composite::RmsNorm { .. })))
    };
    let call = call_of(*nodes.iter().find(is_norm)?)?;
    let (norm, eps) = match call.callee {
        Callee::Composite(Composite::LayerNorm { eps }) => (NormKind::Layer, eps),
        Callee::Composite(Composite::RmsNorm { eps }) => (NormKind::RootMeanSquare, eps),
        _ => return None,
    };
    let (&normed, &y) = (call.inputs.first()?, call.outputs.first()?);
    let sum = placement.base(normed)?;
    let node = graph.node(sum);
    let &[a, b] = node.inputs.as_slice() else { return None };
    let dtype = graph.node(value).dtype;
    if !matches!(node.op, Op::Binary(BinaryOp::Add)) || !nodes.contains(&sum) || node.dtype != dtype {
        return None;
    }

    // What is added to the residual: the value, or the projection that the value is the product of.
    let projection = call_of(value).filter(|call| matches!(call.callee, Callee::Composite(Composite::Linear { .. })));
    let projected = projection.and_then(|call| call.outputs.first().copied());
    let is_x = |id: NodeId| {
        let base = placement.base(id);
        base == Some(value) || base.is_some() && base == projected.and_then(|output| placement.base(output))
    };
    let residual = match (is_x(a), is_x(b)) {
        (true, false) => b,
        (false, true) => a,
        _ => return None,
    };
    let within = |id: NodeId, start: usize, end: usize| (start..end).contains(&id.index());
    let known = |&id: &NodeId| {
        let of_projection = projection.is_some_and(|call| within(id, call.start, call.end));
        id == sum || within(id, call.start, call.end) || of_projection
    };
    let stored = |&id: &NodeId| id == sum || Some(id) == placement.base(y);
    if !nodes.iter().all(known) || !draft.outputs.iter().all(stored) {
        return None;
    }

    // An argument of whole rows: one element for a whole row lies otherwise.
    let space = &graph.node(sum).shape;
    let read = |value: NodeId| {
        let placed = placement.get(value)?;
        let access = placed.layout.row_access(space).filter(|access| access.column_stride == 1)?;
        let is_it = |arg: &ArgBinding| !arg.written && arg.base == placed.base && arg.offset == access.offset;
        args.iter().skip(from).position(is_it).map(|position| from + position)
    };
    let written = |base: NodeId| {
        args.iter().skip(from).position(|arg| arg.written && arg.base == base).map(|position| from + position)
    };
    let of_one_row = |position: &usize| args[*position].leading.iter().all(|&(size, stride)| size <= 1 || stride == 0);
    let weight = read(*call.inputs.get(1)?).filter(of_one_row)?;
    let bias = match norm {
        NormKind::Layer => Some(read(*call.inputs.get(2)?).filter(of_one_row)?),
        NormKind::RootMeanSquare => None,
    };
    let added = match projection.and_then(|call| call.inputs.get(2)) {
        Some(&bias) => Some(read(bias).filter(of_one_row)?),
        None => None,
    };
    let residual = read(residual)?;
    let (result, stored_sum) = (written(placement.base(y)?)?, written(sum));
    let weights = args[weight].dtype;
    let alike = bias.is_none_or(|bias| args[bias].dtype == weights);
    let of_type = [Some(residual), Some(result), stored_sum, added].into_iter().flatten();
    (alike && of_type.into_iter().all(|position| args[position].dtype == dtype)).then_some(AddNorm {
        norm,
        eps,
        weights,
        added,
        residual,
        weight,
        bias,
        sum: stored_sum,
        result,
    })
}

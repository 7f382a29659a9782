//! A residual and a norm after attention or its projection, without other work: `s = residual + (x + bias)`, `y = norm(s)`.
//!
//! A kernel that computes rows in parts implements this by hand, because it knows which statistics the parts must exchange. Other
//! row work stays a body.

use deuteron_codegen::argument::ArgBinding;
use deuteron_graph::{Callee, Composite, Dtype, Graph, NodeId};
use deuteron_plan::{Draft, Step, epilogue_steps};

/// A residual and a norm. Arguments are positions in the launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AddNorm {
    /// which norm
    pub norm: NormKind,
    /// added to the variance
    pub eps: f64,
    /// storage type of the norm's weights
    pub weights: Dtype,
    /// the bias, added to every row first; none without a projection or a bias
    pub added: Option<usize>,
    /// the residual
    pub residual: usize,
    /// factors of the norm
    pub weight: usize,
    /// shift of the norm
    pub bias: Option<usize>,
    /// the sum, if it is stored
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

impl AddNorm {
    /// The epilogue of a draft as a residual and a norm, or `None` if it is anything else or has another dtype than the value it
    /// follows. Arguments are found among `args`, from position `from` on.
    pub(crate) fn fit(draft: &Draft, args: &[ArgBinding], from: usize) -> Option<AddNorm> {
        let (graph, placement) = (draft.graph, draft.placement);
        let &[value] = draft.structure.chain()?.epilogue.crossing.as_slice() else { return None };
        let dtype = graph.node(value).dtype;
        let steps = epilogue_steps(draft);
        let (added, steps) = without_bias(graph, value, &steps);
        let &[Step::Add { value: residual, result: sum }, Step::Norm { call, result: y }] = steps else { return None };
        let stored = |id: &NodeId| *id == sum || *id == y;
        if graph.node(sum).dtype != dtype || !draft.outputs.iter().all(stored) {
            return None;
        }
        let (norm, eps) = match call.callee {
            Callee::Composite(Composite::LayerNorm { eps }) => (NormKind::Layer, eps),
            Callee::Composite(Composite::RmsNorm { eps }) => (NormKind::RootMeanSquare, eps),
            _ => return None,
        };

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
        let of_one_row =
            |position: &usize| args[*position].leading.iter().all(|&(size, stride)| size <= 1 || stride == 0);
        let weight = read(*call.inputs.get(1)?).filter(of_one_row)?;
        let bias = match norm {
            NormKind::Layer => Some(read(*call.inputs.get(2)?).filter(of_one_row)?),
            NormKind::RootMeanSquare => None,
        };
        let added = match added {
            Some(bias) => Some(read(bias).filter(of_one_row)?),
            None => None,
        };
        let residual = read(residual)?;
        let (result, stored_sum) = (written(y)?, written(sum));
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
}

/// The bias that a linear layer adds to its matmul, and the steps after that layer.
fn without_bias<'s, 'a>(graph: &Graph, matmul: NodeId, steps: &'s [Step<'a>]) -> (Option<NodeId>, &'s [Step<'a>]) {
    let call = graph.node(matmul).call;
    let is_layer = matches!(graph.calls()[call.index()].callee, Callee::Composite(Composite::Linear { .. }));
    let inside = |id: NodeId| is_layer && graph.node(id).call == call;
    let (added, steps) = match *steps {
        [Step::Add { value, result }, ref rest @ ..] if inside(result) => (Some(value), rest),
        ref all => (None, all),
    };
    match *steps {
        [Step::Round { result, .. }, ref rest @ ..] if inside(result) => (added, rest),
        ref all => (added, all),
    }
}

//! The structure of a group: found once, by the rules, and read by catalogue, cost model, code generation and reports.

use deuteron_graph::{Call, Callee, Composite, Graph, Mask, NodeId, Op, ScoreWork, View};

use crate::kind::GroupKind;
use crate::layout::{Layout, Placement};

/// The structure of a group.
#[derive(Debug, Clone, PartialEq)]
pub enum Structure {
    /// elementwise work, row reductions, column sums
    Row,
    /// matmuls or attention, and the row work around them
    Chain(Chain),
    /// rows added into a table
    ScatterAdd,
    /// rows written into a cache
    Append,
    /// a view or a concatenation written out
    Copy,
    /// known only by its cost
    Opaque,
}

/// `prologue -> links -> epilogue`. Each link reads the result of the one before it.
#[derive(Debug, Clone, PartialEq)]
pub struct Chain {
    /// row work that computes the left operand of the first link
    pub prologue: Side,
    /// one link, or attention and its projection
    pub links: Vec<Link>,
    /// row work on the result of the last link
    pub epilogue: Side,
}

/// Row work before or after the links of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Side {
    /// operands before users
    pub nodes: Vec<NodeId>,
    /// whether it needs whole rows
    pub reach: Reach,
    /// the values that cross the boundary: from a prologue to the links, or from the links to an epilogue
    pub crossing: Vec<NodeId>,
}

/// Whether a prologue or an epilogue is elementwise or needs whole rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reach {
    /// there is none
    None,
    /// elementwise work
    Pointwise,
    /// work that needs whole rows
    Rows,
}

/// A core operation of a chain.
#[derive(Debug, Clone, PartialEq)]
pub enum Link {
    /// one or several matmuls of one left operand
    Matmul {
        /// in order
        nodes: Vec<NodeId>,
    },
    /// rows, each multiplied by the matrix that an index selects
    Routed {
        /// the matmul
        node: NodeId,
        /// the gather that picks the matrices
        gather: NodeId,
    },
    /// attention by online softmax
    Attention(AttentionLink),
    /// probabilities of attention, stored
    AttentionScores(AttentionLink),
    /// the gradient of attention; its operands are unknown unless it was made by differentiating a call
    AttentionGradient(Option<AttentionGradientLink>),
    /// losses of rows of logits that are not stored
    CrossEntropy(CrossEntropyLink),
    /// gradients of such losses
    CrossEntropyGradient(CrossEntropyGradientLink),
}

/// The operation of attention and its operands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionRequest {
    /// kind of mask
    pub mask: Mask,
    /// factor of the scores
    pub scale: f64,
    /// share of dropped probabilities
    pub p: f64,
    /// second word of the key of dropout's generator
    pub offset: u32,
    /// queries, keys and values; keys again in place of values where only probabilities are needed
    pub operands: [NodeId; 3],
    /// work on the scores
    pub work: ScoreWork,
    /// what is added to the scores: an additive mask or the work's bias
    pub added: Option<NodeId>,
    /// the position of each sequence's first query
    pub positions: Option<NodeId>,
    /// of each head, by the distance of a key
    pub slopes: Option<NodeId>,
    /// of each key
    pub documents: Option<NodeId>,
    /// first word of the key of dropout's generator
    pub seed: Option<NodeId>,
}

/// Attention in a chain.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionLink {
    /// what it computes
    pub request: AttentionRequest,
    /// the result of the call
    pub output: NodeId,
    /// copies of the output, in the element order of their readers
    pub copies: Vec<NodeId>,
}

/// The gradient of attention in a chain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionGradientLink {
    /// the attention
    pub request: AttentionRequest,
    /// the gradient of its result
    pub result_gradient: NodeId,
    /// gradients of queries, keys and values
    pub gradients: [StoredGradient; 3],
    /// heads of queries whose gradients of keys and values are summed; 1 where every head has its own
    pub group: usize,
}

/// A gradient that a kernel makes, and where it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredGradient {
    /// the gradient, or its sums over heads that share keys
    pub value: NodeId,
    /// its copy, in the element order of readers, if there is one
    pub copy: Option<NodeId>,
    /// the concatenation that holds it, and which operand of that it is
    pub joined: Option<(NodeId, usize)>,
}

/// The losses of a call of `linear_cross_entropy`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyLink {
    /// label smoothing: the share of the target's weight that is spread evenly over all classes
    pub smoothing: f64,
    /// the target value whose rows have no loss
    pub ignored: Option<i32>,
    /// rows, weight and targets
    pub operands: [NodeId; 3],
    /// per row
    pub loss: NodeId,
    /// per row
    pub logsumexp: NodeId,
}

/// The gradients of a call of `linear_cross_entropy_gradient`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyGradientLink {
    /// as of the losses
    pub smoothing: f64,
    /// rows, weight and targets
    pub operands: [NodeId; 3],
    /// per row
    pub logsumexp: NodeId,
    /// per row
    pub d_logsumexp: NodeId,
    /// per row
    pub d_loss: NodeId,
    /// of rows and weight
    pub gradients: [NodeId; 2],
}

impl StoredGradient {
    /// The node that owns the buffer.
    pub fn buffer(&self) -> NodeId {
        self.joined.map(|(node, _)| node).or(self.copy).unwrap_or(self.value)
    }

    /// The elements of the value in the order in which they are stored, and where each of these lies in the buffer: two layouts of one
    /// shape. `None` where strides cannot express the latter.
    pub fn layouts(&self, graph: &Graph, placement: &Placement) -> Option<(Layout, Layout)> {
        let whole = |id: NodeId| Layout::contiguous(&graph.node(id).shape);
        let order = match (self.copy, self.joined) {
            (Some(copy), _) => copied(graph, placement, copy)?.1,
            (None, Some((node, operand))) => placement.get(graph.node(node).inputs[operand])?.layout.clone(),
            (None, None) => whole(self.value),
        };
        let Some((node, operand)) = self.joined else {
            let place = Layout::contiguous(&order.shape);
            return Some((order, place));
        };
        let Op::Concat { axis } = graph.node(node).op else { return None };
        let inputs = &graph.node(node).inputs;
        let before: usize = inputs[..operand].iter().map(|&input| graph.node(input).shape[axis]).sum();
        let length = graph.node(inputs[operand]).shape[axis];
        let part = whole(node).view(&View::Slice { axis, start: before, length })?;
        let place = part.view(&View::Reshape(order.shape.clone()))?;
        Some((order, place))
    }
}

/// What a copy holds: the value that it is of, and how its elements lie in that in their order.
pub(crate) fn copied(graph: &Graph, placement: &Placement, copy: NodeId) -> Option<(NodeId, Layout)> {
    let node = graph.node(copy);
    let Op::View(view) = &node.op else { return None };
    let placed = placement.get(*node.inputs.first()?)?;
    // A shape that strides cannot express has the order of its operand.
    let layout = placed.layout.view(view).or_else(|| matches!(view, View::Reshape(_)).then(|| placed.layout.clone()));
    Some((placed.base, layout?))
}

impl Structure {
    /// The structure of every gradient of attention, before its operands are known.
    pub fn attention_gradient() -> Structure {
        Structure::Chain(Chain::of(Link::AttentionGradient(None)))
    }

    /// The chain, if it is one.
    pub fn chain(&self) -> Option<&Chain> {
        match self {
            Structure::Chain(chain) => Some(chain),
            Structure::Row | Structure::ScatterAdd | Structure::Append | Structure::Copy | Structure::Opaque => None,
        }
    }

    /// Whether it is one matmul without prologue and epilogue.
    pub fn is_plain_matmul(&self) -> bool {
        let one = |chain: &Chain| matches!(chain.links.as_slice(), [Link::Matmul { nodes }] if nodes.len() == 1);
        self.chain().is_some_and(|chain| chain.is_plain() && one(chain))
    }

    /// Whether it is attention without projection and epilogue.
    pub fn is_plain_attention(&self) -> bool {
        let one = |chain: &Chain| matches!(chain.links.as_slice(), [Link::Attention(_)]);
        self.chain().is_some_and(|chain| chain.is_plain() && one(chain))
    }

    /// Whether it is matmuls that share a left operand, with or without prologue and epilogue.
    pub fn is_matmul(&self) -> bool {
        self.chain().is_some_and(|chain| matches!(chain.links.as_slice(), [Link::Matmul { .. }]))
    }

    /// Whether it is the gradient of attention.
    pub fn is_attention_gradient(&self) -> bool {
        self.chain().is_some_and(|chain| matches!(chain.links.as_slice(), [Link::AttentionGradient(_)]))
    }

    /// The kind of kernel.
    pub fn kind(&self) -> GroupKind {
        match self {
            Structure::Row => GroupKind::Row,
            Structure::Chain(chain) => chain.kind(),
            Structure::ScatterAdd => GroupKind::ScatterAdd,
            Structure::Append => GroupKind::Append,
            Structure::Copy => GroupKind::Copy,
            Structure::Opaque => GroupKind::Opaque,
        }
    }

    /// As text.
    pub fn name(&self) -> &'static str {
        match self {
            Structure::Chain(chain) => chain.name(),
            Structure::Row | Structure::ScatterAdd | Structure::Append | Structure::Copy | Structure::Opaque => {
                self.kind().name()
            }
        }
    }
}

impl Chain {
    /// A link alone.
    pub fn of(link: Link) -> Chain {
        Chain { prologue: Side::NONE, links: vec![link], epilogue: Side::NONE }
    }

    /// Whether there is neither prologue nor epilogue.
    pub fn is_plain(&self) -> bool {
        self.prologue.reach == Reach::None && self.epilogue.reach == Reach::None
    }

    fn kind(&self) -> GroupKind {
        let multiplies = |link: &Link| match link {
            Link::Matmul { .. } | Link::Routed { .. } | Link::CrossEntropy(_) | Link::CrossEntropyGradient(_) => true,
            Link::Attention(_) | Link::AttentionScores(_) | Link::AttentionGradient(_) => false,
        };
        if self.links.iter().all(multiplies) { GroupKind::Matmul } else { GroupKind::Attention }
    }

    fn name(&self) -> &'static str {
        match (self.links.as_slice(), self.prologue.reach, self.epilogue.reach) {
            ([Link::Matmul { nodes }], _, Reach::None) if nodes.len() > 1 => "products of one operand",
            ([Link::Matmul { nodes }], ..) if nodes.len() > 1 => "products of one operand with epilogue",
            ([Link::Matmul { .. }], Reach::None, Reach::None) => "matmul",
            ([Link::Matmul { .. }], Reach::None, Reach::Pointwise) => "matmul with epilogue",
            ([Link::Matmul { .. }], Reach::None, Reach::Rows) => "matmul, then norm",
            ([Link::Matmul { .. }], Reach::Pointwise, _) => "matmul with prologue",
            ([Link::Matmul { .. }], Reach::Rows, _) => "norm, then matmul of few rows",
            ([Link::Routed { .. }], _, Reach::None) => "routed matmul",
            ([Link::Routed { .. }], ..) => "routed matmul with epilogue",
            ([Link::Attention(_)], _, Reach::None) => "attention",
            ([Link::Attention(_)], _, Reach::Pointwise) => "attention with residual",
            ([Link::Attention(_)], _, Reach::Rows) => "attention with residual and norm",
            ([Link::Attention(_), ..], ..) => "attention block",
            ([Link::AttentionScores(_), ..], ..) => "attention scores",
            ([Link::AttentionGradient(_), ..], ..) => "attention backward",
            ([Link::CrossEntropy(_), ..], ..) => "cross entropy without logits",
            ([Link::CrossEntropyGradient(_), ..], ..) => "cross entropy backward",
            ([] | [Link::Matmul { .. } | Link::Routed { .. }, ..], ..) => "chain of matmuls",
        }
    }
}

impl Side {
    /// No work.
    pub const NONE: Side = Side { nodes: Vec::new(), reach: Reach::None, crossing: Vec::new() };
}

impl AttentionRequest {
    /// The parameters of a call of attention or of its scores; `None` for any other call.
    pub fn of(call: &Call) -> Option<AttentionRequest> {
        let mut rest = call.inputs.iter().copied();
        let (mask, scale, p, offset, work, wants_values) = match call.callee {
            Callee::Composite(Composite::Attention { mask, scale, p, offset, work }) => {
                (mask, scale, p, offset, work, true)
            }
            Callee::Composite(Composite::AttentionScores { mask, scale }) => {
                (mask, scale, 0.0, 0, ScoreWork::NONE, false)
            }
            Callee::Composite(_) | Callee::Primitive | Callee::Block(_) => return None,
        };
        let (q, k) = (rest.next()?, rest.next()?);
        let v = if wants_values { rest.next()? } else { k };
        let mut next = |is_there: bool| if is_there { rest.next().map(Some) } else { Some(None) };
        let added = next(mask == Mask::Additive)?;
        let positions = next(mask == Mask::Cached)?;
        let slopes = next(work.slopes)?;
        let added = next(work.bias)?.or(added);
        let documents = next(work.documents)?;
        let seed = next(p > 0.0)?;
        let operands = [q, k, v];
        Some(AttentionRequest { mask, scale, p, offset, operands, work, added, positions, slopes, documents, seed })
    }
}

impl Link {
    /// The losses of a call, or their gradients; `None` for a call of another kind.
    pub(crate) fn of_loss(call: &Call) -> Option<Link> {
        let Callee::Composite(composite) = call.callee else { return None };
        match (composite, call.inputs.as_slice(), call.outputs.as_slice()) {
            (Composite::LinearCrossEntropy { smoothing, ignored }, &[x, weight, targets], &[loss, logsumexp]) => {
                let operands = [x, weight, targets];
                Some(Link::CrossEntropy(CrossEntropyLink { smoothing, ignored, operands, loss, logsumexp }))
            }
            (
                Composite::LinearCrossEntropyGradient { smoothing },
                &[x, weight, targets, logsumexp, d_logsumexp, d_loss],
                &[d_x, d_weight],
            ) => Some(Link::CrossEntropyGradient(CrossEntropyGradientLink {
                smoothing,
                operands: [x, weight, targets],
                logsumexp,
                d_logsumexp,
                d_loss,
                gradients: [d_x, d_weight],
            })),
            _ => None,
        }
    }
}

impl AttentionLink {
    /// Attention of a call, and the copies of its output; `None` for a call of another kind.
    pub fn of(call: &Call, copies: Vec<NodeId>) -> Option<AttentionLink> {
        let &[output] = call.outputs.as_slice() else { return None };
        Some(AttentionLink { request: AttentionRequest::of(call)?, output, copies })
    }

    /// The value that the next link, the epilogue or another kernel reads: the output, or its copy; `None` if there are several.
    pub fn result(&self) -> Option<NodeId> {
        match self.copies.as_slice() {
            [] => Some(self.output),
            &[copy] => Some(copy),
            _ => None,
        }
    }
}

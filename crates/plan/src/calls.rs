//! How the planner classifies a call: attention, its gradient, its probabilities, a loss.

use deuteron_graph::{Call, Callee, Composite, CompositeKind, Graph, NodeId};

/// Whether a call is attention, or its gradient.
pub(crate) fn is_attention(call: &Call) -> bool {
    is_attention_gradient(call) || matches!(call.callee, Callee::Composite(Composite::Attention { .. }))
}

/// Whether a call is the gradient of attention.
pub(crate) fn is_attention_gradient(call: &Call) -> bool {
    call.callee.gradient_of() == Some(CompositeKind::Attention)
}

/// Whether a call computes probabilities of attention that are stored.
pub(crate) fn stores_scores(call: &Call) -> bool {
    matches!(call.callee, Callee::Composite(Composite::AttentionScores { .. }))
}

/// Whether a call computes losses without storing logits, or their gradients.
pub(crate) fn is_loss(call: &Call) -> bool {
    let kinds = [CompositeKind::LinearCrossEntropy, CompositeKind::LinearCrossEntropyGradient];
    matches!(&call.callee, Callee::Composite(composite) if kinds.contains(&composite.kind()))
}

/// Whether a kernel may cover a call that pairwise merging would not find.
pub(crate) fn is_taken_whole(call: &Call) -> bool {
    is_attention(call) || stores_scores(call) || is_loss(call)
}

/// Whether a node is part of scores that are recomputed for a gradient.
pub(crate) fn is_recomputed_attention(graph: &Graph, id: NodeId) -> bool {
    graph.calls()[graph.node(id).call.index()].callee.recomputes() == Some(CompositeKind::Attention)
}

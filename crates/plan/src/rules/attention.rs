//! Chains of attention: its call, the order its result is written in, its projection and row work; its probabilities; its
//! gradient.

use deuteron_graph::{Call, NodeId, Op};

use crate::calls::{is_attention, is_attention_gradient, is_recomputed_attention, stores_scores};
use crate::chain::{AttentionLink, Chain, Link, Reach, Side};
use crate::kind::{GroupKind, kernel_kind};
use crate::reason::Reason;
use crate::rules::gradient::{Ending, gradient_link};
use crate::rules::rows::Rules;
use crate::space::Space;

/// The operations after attention in its group.
struct Following {
    /// copies of its output
    copies: Vec<NodeId>,
    /// the matmul of its result and a weight
    projection: Option<NodeId>,
    /// row work
    rows: Vec<NodeId>,
}

impl<'a> Rules<'a> {
    /// The attention call (or its gradient) that one of the matmuls is part of.
    pub(super) fn attention_call(&self, matmuls: &[NodeId]) -> Option<&'a Call> {
        let calls = matmuls.iter().map(|&id| &self.graph.calls()[self.graph.node(id).call.index()]);
        calls.into_iter().find(|call| is_attention(call))
    }

    /// The link if the nodes are exactly those of one call that stores its probabilities. Parts of such a
    /// call are a matmul and row work like any other.
    pub(super) fn whole_scores_call(&self, nodes: &[NodeId]) -> Option<AttentionLink> {
        let call = &self.graph.calls()[self.graph.node(nodes[0]).call.index()];
        let made = (call.start..call.end).filter_map(|index| self.graph.id(index));
        let is_whole = stores_scores(call)
            && made.filter(|&id| self.placement.needs_kernel(self.graph, id)).eq(nodes.iter().copied());
        if is_whole { AttentionLink::of(call, Vec::new()) } else { None }
    }

    /// Attention needs its whole call; after it there may be a transpose of its output, a projection, and row work.
    pub(super) fn attention_chain(
        &self,
        nodes: &[NodeId],
        matmuls: &[NodeId],
        call: &Call,
        leaves: &dyn Fn(NodeId) -> bool,
    ) -> Result<Chain, Reason> {
        let in_call = |id: NodeId| (call.start..call.end).contains(&id.index());
        let is_missing = |id: NodeId| self.placement.needs_kernel(self.graph, id) && nodes.binary_search(&id).is_err();
        let inside = matmuls.iter().filter(|&&id| in_call(id)).count();
        if (call.start..call.end).filter_map(|index| self.graph.id(index)).any(is_missing) {
            return match nodes.iter().copied().find(|&id| !in_call(id)) {
                None if inside < 2 => self.half_of_attention(nodes, leaves),
                // A neighbour of one part: attention is fused with its neighbours as a whole, or not at all.
                outside if matmuls.len() < 2 => {
                    let producer = kernel_kind(self.graph, self.placement, outside.unwrap_or(nodes[0]));
                    Err(Reason::OtherKernel { producer, consumer: GroupKind::Attention })
                }
                _ => Err(Reason::SeveralProducts { products: matmuls.len() }),
            };
        }
        let rest: Vec<NodeId> = nodes.iter().copied().filter(|&id| !in_call(id)).collect();
        if is_attention_gradient(call) {
            return self.attention_gradient(nodes, &rest, leaves);
        }
        if matmuls.len() - inside > 1 {
            return Err(Reason::SeveralProducts { products: matmuls.len() });
        }
        self.followed_attention(nodes, &rest, call, leaves)
    }

    /// Parts of an attention call that form a kernel: a matmul with the work before or after it.
    fn half_of_attention(&self, nodes: &[NodeId], leaves: &dyn Fn(NodeId) -> bool) -> Result<Chain, Reason> {
        let is_matmul = |id: &NodeId| matches!(self.graph.node(*id).op, Op::Matmul { .. });
        let (matmuls, rows): (Vec<NodeId>, Vec<NodeId>) = nodes.iter().partition(|id| is_matmul(id));
        let (before, after) = self.sides(&rows, &matmuls)?;
        self.check_unread(&before, leaves)?;
        let prologue = self.prologue(before, &matmuls, leaves)?;
        let epilogue = self.epilogue(after, &matmuls, leaves)?;
        self.chain_around(prologue, matmuls, epilogue)
    }

    /// A whole gradient call, preceded by the scores that are recomputed for it and followed by what becomes of its gradients: a copy in
    /// another order or shape, sums over heads that share keys, a concatenation.
    fn attention_gradient(
        &self,
        nodes: &[NodeId],
        rest: &[NodeId],
        leaves: &dyn Fn(NodeId) -> bool,
    ) -> Result<Chain, Reason> {
        let outputs: Vec<NodeId> = nodes.iter().copied().filter(|&id| leaves(id)).collect();
        let (after, core): (Vec<NodeId>, Vec<NodeId>) =
            nodes.iter().partition(|id| rest.contains(id) && !is_recomputed_attention(self.graph, **id));
        let endings: Vec<Ending> =
            outputs.iter().flat_map(|&id| Ending::all_of(self.graph, self.placement, &core, id)).collect();
        let explained = |id: &NodeId| endings.iter().any(|ending| ending.nodes.contains(id));
        let link = gradient_link(self.graph, self.placement, &core, &endings);
        // What follows is part of the kernel, or there is a kernel of the gradient and one of what follows.
        if let Some(&other) = after.iter().find(|id| link.is_none() || !explained(id)) {
            let consumer = kernel_kind(self.graph, self.placement, other);
            return Err(Reason::OtherKernel { producer: GroupKind::Attention, consumer });
        }
        Ok(Chain::of(Link::AttentionGradient(link)))
    }

    /// A whole attention call and the operations after it.
    fn followed_attention(
        &self,
        nodes: &[NodeId],
        rest: &[NodeId],
        call: &Call,
        leaves: &dyn Fn(NodeId) -> bool,
    ) -> Result<Chain, Reason> {
        let Some(&output) = call.outputs.first() else {
            return Err(Reason::SeveralProducts { products: 2 });
        };
        let Following { copies, projection, rows } = self.following(nodes, rest, output)?;
        let reach = self.check_following_rows(nodes, &rows, output, projection, leaves)?;
        let Some(link) = AttentionLink::of(call, copies) else {
            return Err(Reason::SeveralProducts { products: 2 });
        };
        let crossing = match reach {
            Reach::None => Vec::new(),
            Reach::Pointwise | Reach::Rows => projection.or(link.result()).into_iter().collect(),
        };
        let mut links = vec![Link::Attention(link)];
        links.extend(projection.map(|matmul| Link::Matmul { nodes: vec![matmul] }));
        Ok(Chain { prologue: Side::NONE, links, epilogue: Side { nodes: rows, reach, crossing } })
    }

    /// Classifies the nodes after attention.
    fn following(&self, nodes: &[NodeId], rest: &[NodeId], output: NodeId) -> Result<Following, Reason> {
        let mut following = Following { copies: Vec::new(), projection: None, rows: Vec::new() };
        for &id in rest {
            match kernel_kind(self.graph, self.placement, id) {
                GroupKind::Copy => {
                    // The output written in the order its reader wants.
                    let inputs = &self.graph.node(id).inputs;
                    if inputs.len() != 1 || self.placement.base(inputs[0]) != Some(output) {
                        return Err(Reason::OtherKernel { producer: GroupKind::Attention, consumer: GroupKind::Copy });
                    }
                    following.copies.push(id);
                }
                GroupKind::Matmul => {
                    if !self.is_projection(nodes, id, output) {
                        return Err(Reason::SeveralProducts { products: 3 });
                    }
                    following.projection = Some(id);
                }
                GroupKind::Row => following.rows.push(id),
                consumer @ (GroupKind::ScatterAdd | GroupKind::Append | GroupKind::Opaque | GroupKind::Attention) => {
                    return Err(Reason::OtherKernel { producer: GroupKind::Attention, consumer });
                }
            }
        }
        Ok(following)
    }

    /// Whether a matmul multiplies a weight by rows made of heads of the output side by side, some or all of them.
    fn is_projection(&self, nodes: &[NodeId], matmul: NodeId, output: NodeId) -> bool {
        let (node, shape) = (self.graph.node(matmul), &self.graph.node(output).shape);
        let is_inside = |input: usize| {
            self.placement.base(node.inputs[input]).is_some_and(|base| nodes.binary_search(&base).is_ok())
        };
        let joined = self.graph.node(node.inputs[0]).shape.cols();
        is_inside(0)
            && joined.is_multiple_of(shape.cols())
            && node.shape.rows() * joined == shape.elements()
            && !is_inside(1)
    }

    /// Row work on the token rows of attention or its projection: heads side by side, some or all of them.
    fn check_following_rows(
        &self,
        nodes: &[NodeId],
        rows: &[NodeId],
        output: NodeId,
        projection: Option<NodeId>,
        leaves: &dyn Fn(NodeId) -> bool,
    ) -> Result<Reach, Reason> {
        if rows.is_empty() {
            return Ok(Reach::None);
        }
        let space = self.check_rows(rows, leaves)?;
        if let Some(&sum) = rows.iter().find(|&&id| matches!(self.graph.node(id).op, Op::ColumnSum)) {
            return Err(Reason::NeedsAllRows { value: sum });
        }
        // Heads side by side are the columns of a row of tokens.
        let shape = &self.graph.node(output).shape;
        let heads = if shape.rank() >= 3 { shape[shape.rank() - 3] } else { 1 };
        let (tokens, width) = (shape.rows() / heads.max(1), shape.cols() * heads);
        let joins = space.cols.is_multiple_of(shape.cols()) && space.rows * space.cols == shape.elements();
        let projected = projection.map(|matmul| self.graph.node(matmul).shape.rows());
        let in_rows = projected.map_or(space.rows == tokens || joins, |rows| space.rows == rows);
        if !in_rows {
            let producer = Space { rows: projected.unwrap_or(tokens), cols: width };
            return Err(Reason::DifferentSpace { producer, consumer: space });
        }
        // What stands before attention is no part of its kernel.
        let core: Vec<NodeId> = nodes.iter().copied().filter(|id| !rows.contains(id)).collect();
        if let Some(&value) = self.feeding(rows, &core).first() {
            return Err(Reason::ReadElsewhere { value });
        }
        Ok(if rows.iter().any(|&id| self.is_reduction(id)) { Reach::Rows } else { Reach::Pointwise })
    }
}

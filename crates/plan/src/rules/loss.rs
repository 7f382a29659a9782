//! Losses of logits that are not stored, and their gradients: whole calls.

use deuteron_graph::NodeId;

use crate::calls::is_loss;
use crate::chain::Link;
use crate::rules::rows::Rules;

impl Rules<'_> {
    /// The link if the nodes are the first result of a loss call with everything computed for it, or a call of its gradient with one of its
    /// results. Other results of the call are unused. Parts of such a call are matmuls and row work like any other.
    pub(super) fn whole_loss_call(&self, nodes: &[NodeId]) -> Option<Link> {
        let call = &self.graph.calls()[self.graph.node(nodes[0]).call.index()];
        if !is_loss(call) {
            return None;
        }
        let link = Link::of_loss(call)?;
        let has_result = match link {
            Link::CrossEntropyGradient(_) => call.outputs.iter().any(|output| nodes.contains(output)),
            _ => nodes.contains(call.outputs.first()?),
        };
        if !has_result {
            return None;
        }
        let is_inside = |id: NodeId| (call.start..call.end).contains(&id.index());
        let mut is_whole = nodes.iter().all(|&id| is_inside(id));
        for &id in nodes {
            self.placement.for_reads(self.graph, id, &mut |value| {
                let made = self.placement.base(value).filter(|&base| is_inside(base));
                is_whole &= made.is_none_or(|base| nodes.binary_search(&base).is_ok());
            });
        }
        is_whole.then_some(link)
    }
}

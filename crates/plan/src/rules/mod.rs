//! Which groups are legal, their structure, and why the others are not. Legality is a function of a set of nodes;
//! whether a third group is in between is decided by the search, which sees the whole graph.

mod attention;
mod gradient;
mod loss;
mod matmul;
mod rows;

pub(crate) use gradient::after_gradient;
pub(crate) use rows::Rules;

use deuteron_graph::{NodeId, is_recomputed};

use crate::chain::{Chain, Link, Structure};
use crate::kind::{GroupKind, kernel_kind};
use crate::machine::Quantity;
use crate::reason::Reason;

impl Rules<'_> {
    /// The structure of a kernel that computes `nodes` (in order), or why there is none. `leaves` says whether a value is read
    /// outside of the group or is an output.
    pub fn structure(&self, nodes: &[NodeId], leaves: &dyn Fn(NodeId) -> bool) -> Result<Structure, Reason> {
        if let Some(first) = self.first_backward {
            let again = nodes.iter().find(|&&id| is_recomputed(self.graph, id));
            if let (Some(&value), true) = (again, nodes[0].index() < first) {
                return Err(Reason::Recomputed { value });
            }
        }
        let (needed, available) = (nodes.len(), self.machine.count(Quantity::KernelNodes));
        let kinds: Vec<GroupKind> = nodes.iter().map(|&id| kernel_kind(self.graph, self.placement, id)).collect();
        if kinds.contains(&GroupKind::Matmul) {
            return self.chain(nodes, &kinds, leaves).map(Structure::Chain);
        }
        if needed > available {
            return Err(Reason::TooManyNodes { needed, available });
        }
        if !kinds.iter().all(|&kind| kind == kinds[0]) || (nodes.len() > 1 && !self.may_be_several(nodes, kinds[0])) {
            let other = kinds.iter().find(|&&kind| kind != kinds[0]).copied().unwrap_or(kinds[0]);
            return Err(Reason::OtherKernel { producer: kinds[0], consumer: other });
        }
        match kinds[0] {
            GroupKind::Row => self.check_rows(nodes, leaves).map(|_| Structure::Row),
            GroupKind::Copy => Ok(Structure::Copy),
            GroupKind::ScatterAdd => Ok(Structure::ScatterAdd),
            GroupKind::Append => Ok(Structure::Append),
            GroupKind::Opaque | GroupKind::Matmul | GroupKind::Attention => Ok(Structure::Opaque),
        }
    }

    /// Results of one opaque call are one kernel; kinds other than row kernels are not fused.
    fn may_be_several(&self, nodes: &[NodeId], kind: GroupKind) -> bool {
        match kind {
            GroupKind::Row => true,
            GroupKind::Opaque => nodes.iter().all(|&id| self.graph.node(id).call == self.graph.node(nodes[0]).call),
            GroupKind::Copy | GroupKind::ScatterAdd | GroupKind::Append => false,
            GroupKind::Matmul | GroupKind::Attention => false,
        }
    }

    /// The chain of a group that holds matmuls.
    fn chain(&self, nodes: &[NodeId], kinds: &[GroupKind], leaves: &dyn Fn(NodeId) -> bool) -> Result<Chain, Reason> {
        let (mut matmuls, mut rows) = (Vec::new(), Vec::new());
        for (&id, &kind) in nodes.iter().zip(kinds) {
            if kind == GroupKind::Matmul { matmuls.push(id) } else { rows.push(id) }
        }
        if rows.is_empty() && matmuls.len() == 1 {
            return Ok(Chain::of(Link::Matmul { nodes: matmuls }));
        }
        if let Some(link) = self.whole_loss_call(nodes) {
            return Ok(Chain::of(link));
        }
        if let Some(call) = self.attention_call(&matmuls) {
            return self.attention_chain(nodes, &matmuls, call, leaves);
        }
        if let Some(link) = self.whole_scores_call(nodes) {
            return Ok(Chain::of(Link::AttentionScores(link)));
        }
        let other = kinds.iter().copied().find(|kind| !matches!(kind, GroupKind::Matmul | GroupKind::Row));
        if let Some(consumer) = other {
            return Err(Reason::OtherKernel { producer: GroupKind::Matmul, consumer });
        }
        self.matmul_chain(matmuls, &rows, leaves)
    }
}

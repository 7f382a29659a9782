//! Store or recompute: which values forward stores for backward, decided by bytes.
//!
//! Backward reads values that forward computed. Each is *kept* (stored), or made *again* (recomputed) in backward from kept ones. A minimum
//! cut between values that cannot be recomputed and values that backward reads gives the choice with the fewest bytes; among equals, the
//! one that recomputes the fewest values. Only compulsory bytes are counted, where `|v|` is the size of the buffer of
//! `v`: views are followed to the buffer they look into, which counts once. Constants, index patterns and random masks
//! are recomputed by every reader and cost nothing. Matmuls, sums over rows, scatters and opaque operations are never
//! repeated, and inputs need not be. If no matmul is between a value and a row op of backward, forward and backward
//! can be one kernel, and nothing is stored: a loss and its gradient.
//!
//! **[`Saving::Traffic`]** counts bytes written only for backward, and bytes that backward reads:
//!
//! ```text
//! kept:   |v| unless forward stores v anyway  +  |v| for each row kernel of backward that reads it, if only for a copy
//! again:  nothing; what it is made from is read by the kernel that makes it, and was counted there
//! ```
//!
//! This assumes that the copy is in registers of its reader, so only values with such copies are candidates:
//! - No matmul, scatter or concatenation of backward reads it. Those read operands from memory, so the copy would be
//!   written, and keeping is never worse: at most `|v|` is written, and nothing is read to make it.
//! - Everything that reads it, copies included, can be one kernel: it is in one wave, with no matmul in between. Otherwise
//!   a residual stream whose summands are narrower than their sum would be recomputed from its beginning in each
//!   layer.
//! - It is not a row reduction: one number per row does not justify a pass over the row, a cost that bytes do not show.
//!
//! **[`Saving::Memory`]** counts bytes alive between the two parts:
//!
//! ```text
//! kept:   |v| unless it is handed out, and so stays alive anyway
//! again:  nothing; what it is made from stays alive, and was counted there
//! ```
//!
//! and among equals bytes written only for backward: `|v|` of kept values that forward would not store otherwise.
//! Whether forward stores `v` for its own readers does not matter: keeping extends its lifetime to its last reader in
//! backward. A copy is made before its first reader and lives until the last, so its readers must not be spread over backward:
//! a value with a row op as a reader beyond a matmul (a residual stream) is not a candidate. So a chain of
//! copies never crosses a matmul, and the copies alive together are those between two matmuls.

mod account;
mod boundary;
mod candidates;

use deuteron_graph::{Graph, NodeId};

use crate::units::Bytes;
pub use account::Passed;
use account::account;
use boundary::Boundary;
use candidates::Candidates;
pub use candidates::Saving;

/// A choice of values to keep and values to recompute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recompute {
    /// forward values that backward recomputes, and the views of them that it needs: the argument of
    /// [`deuteron_graph::recompute`]
    pub again: Vec<NodeId>,
    /// buffers that stay alive, with their sizes, without inputs and outputs
    pub kept: Vec<(NodeId, Bytes)>,
    /// with everything kept
    pub before: Passed,
    /// with this choice
    pub after: Passed,
}

/// Chooses the values. Nodes from `first_backward` on are backward; `stored_forward` says which values forward would write to
/// memory without backward ([`stored_when_fused`] if there is no plan).
pub fn store_or_recompute(
    graph: &Graph,
    first_backward: usize,
    stored_forward: &dyn Fn(NodeId) -> bool,
    saving: Saving,
) -> Recompute {
    let boundary = Boundary::new(graph, first_backward.min(graph.nodes().len()), stored_forward);
    let candidates = Candidates::new(&boundary, saving);
    let is_again = candidates.cut();
    let nothing = vec![false; boundary.first_backward];
    let (before, _) = account(&boundary, &nothing);
    let (after, kept) = account(&boundary, &is_again);
    Recompute { again: with_views(&boundary, &is_again), kept, before, after }
}

/// For each forward node, whether forward would write it to memory with all row ops fused as far as possible: matmuls
/// and their operands, outputs, and operands of row ops beyond a matmul.
pub fn stored_when_fused(graph: &Graph, first_backward: usize) -> Vec<bool> {
    let first_backward = first_backward.min(graph.nodes().len());
    let boundary = Boundary::new(graph, first_backward, &|_| false);
    let forward: Vec<NodeId> = boundary.forward().collect();
    let waves = boundary.waves(&forward, |id| boundary.ends_wave(id));
    let mut stored = boundary.stored.clone();
    for id in forward.into_iter().filter(|&id| !boundary.is_view(id)) {
        stored[id.index()] |= boundary.ends_wave(id);
        for (root, whole) in boundary.operands(id) {
            let computed = !boundary.is_input(root) && !boundary.is_free(root);
            stored[root.index()] |= computed && (whole.is_some() || waves[root.index()] < waves[id.index()]);
        }
    }
    stored
}

/// The recomputed values, with the views of them that backward or a copy reads.
fn with_views(boundary: &Boundary, is_again: &[bool]) -> Vec<NodeId> {
    let graph = boundary.graph;
    let mut listed = vec![false; boundary.first_backward];
    for id in graph.ids().rev() {
        if id.index() >= boundary.first_backward || listed[id.index()] {
            for &input in graph.node(id).inputs.iter().filter(|input| input.index() < boundary.first_backward) {
                listed[input.index()] |= is_again[boundary.root(input).index()];
            }
        }
    }
    boundary.forward().filter(|id| listed[id.index()]).collect()
}

#[cfg(test)]
mod tests;

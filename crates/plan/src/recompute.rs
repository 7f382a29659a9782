//! Store or recompute: what passes from forward to backward, decided by bytes.
//!
//! Backward reads values that forward made. Each is *kept*, or made *again* in backward from others that are. A minimum
//! cut between what cannot be made again and what backward reads gives the choice of fewest bytes; among equals, the
//! one that makes the fewest values again. Compulsory bytes are all that is counted, `|v|` being those of the buffer of
//! `v`: views are followed to the buffer they look into, which counts once. Constants, index patterns and random masks
//! are made by every reader and cost nothing. Products, sums over rows, scatters and opaque operations are never
//! repeated; inputs need not be. Where a row op of backward waits for no product after the value, forward and backward
//! can be one kernel, and nothing passes: a loss and its gradient.
//!
//! **[`Saving::Traffic`]** counts what is written for backward alone and what backward reads:
//!
//! ```text
//! kept:   |v| unless forward stores v anyway  +  |v| for each row kernel of backward that reads it, if only for a copy
//! again:  nothing; what it is made from is read by the kernel that makes it, and was counted there
//! ```
//!
//! This holds if the copy lives in the registers of its reader, so only values that make such copies are candidates:
//! - No product, scatter or concatenation of backward reads it. Those take operands from memory, so the copy would be
//!   written, and keeping is never worse: at most `|v|` is written, and nothing is read to make it.
//! - Everything that reads it, copies included, can be one kernel: it is in one wave, with no product in between. Else
//!   a residual stream whose summands are narrower than their sum would be added up again from its beginning in each
//!   layer.
//! - It is no row reduction: a number per row is not worth a pass over the row, which no count of bytes shows.
//!
//! **[`Saving::Memory`]** counts what stays alive between the two parts:
//!
//! ```text
//! kept:   |v| unless it is handed out, and so stays alive anyway
//! again:  nothing; what it is made from stays alive, and was counted there
//! ```
//!
//! and among equals what is written for backward alone: `|v|` of what is kept and forward would not store.
//! That forward stores `v` for a reader of its own does not matter: keeping prolongs its life to its last reader in
//! backward. A copy is made before its first reader and lives until the last, so it must not be read all over backward:
//! a value with a row op for a reader on the far side of a product (a residual stream) is no candidate. So a chain of
//! copies never crosses a product, and the copies alive together are those between two products.

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

/// A choice of what is kept and what is made again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recompute {
    /// forward values that backward makes again, and the views of them that it needs: what
    /// [`deuteron_graph::recompute`] takes
    pub again: Vec<NodeId>,
    /// buffers that stay alive, with their sizes; inputs and outputs do so anyway
    pub kept: Vec<(NodeId, Bytes)>,
    /// with everything kept
    pub before: Passed,
    /// with this choice
    pub after: Passed,
}

/// Chooses. Nodes from `first_backward` on are backward; `stored_forward` says which values forward would write to
/// memory were there no backward ([`stored_when_fused`] where no plan is at hand).
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

/// For each forward node: would forward write it to memory if every row op shared a kernel with all it can? Products
/// and their operands, outputs, and what a row op on the far side of a product reads.
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

/// The values made again, with the views of them that backward or a copy reads.
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

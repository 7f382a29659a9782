//! The cost of a choice.

use deuteron_graph::NodeId;

use super::boundary::{Boundary, Reads, WholeRead};
use crate::units::Bytes;

/// Bytes between forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Passed {
    /// alive between the two: computed values that backward reads and that are not handed out
    pub memory: Bytes,
    /// written for backward alone, and read by backward of inputs and forward values; copies that are not made in the
    /// kernel of their only reader are written and read too
    pub traffic: Bytes,
}

/// The bytes if these values are recomputed, and the kept buffers.
pub(super) fn account(boundary: &Boundary, is_again: &[bool]) -> (Passed, Vec<(NodeId, Bytes)>) {
    let nearby = nearby(boundary);
    let mut reads = boundary.reads.clone();
    let mut passed = Passed::default();
    let mut kept = Vec::new();
    for id in boundary.forward().rev().filter(|&id| !boundary.is_view(id) && !boundary.is_free(id)) {
        let Reads { mut rows, whole } = std::mem::take(&mut reads[id.index()]);
        rows.sort_unstable();
        rows.dedup();
        let Some(first) = rows.iter().copied().chain(whole.iter().map(|read| read.wave)).min() else { continue };
        // A product can wait for the kernel that has what the copy is made from.
        let first = if rows.is_empty() { nearby[id.index()].map_or(first, |wave| wave.max(first)) } else { first };
        let bytes = boundary.bytes(id);
        let read = bytes * rows.len() as u64 + whole.iter().map(|read| read.bytes).sum::<u64>();
        if !is_again[id.index()] {
            let is_written = !boundary.is_input(id) && !boundary.stored[id.index()];
            passed.traffic += Bytes(read + if is_written { bytes } else { 0 });
            if !boundary.is_input(id) && !boundary.is_output[id.index()] {
                passed.memory += Bytes(bytes);
                kept.push((id, Bytes(bytes)));
            }
            continue;
        }
        // The first of several row kernels has the copy in registers, and writes it for the others.
        let in_registers = boundary.is_row_op(id) && rows.first() == Some(&first);
        if !in_registers || rows.len() + whole.len() > 1 {
            passed.traffic += Bytes(bytes + read - if in_registers { bytes } else { 0 });
        }
        for (root, taken) in boundary.operands(id) {
            match taken {
                Some(bytes) => reads[root.index()].whole.push(WholeRead { wave: first, bytes }),
                None => reads[root.index()].rows.push(first),
            }
        }
    }
    kept.reverse();
    (passed, kept)
}

/// For each forward value, the first row kernel of backward that reads it; if none does, one of what it is made from.
fn nearby(boundary: &Boundary) -> Vec<Option<u32>> {
    let mut nearby: Vec<Option<u32>> = vec![None; boundary.first_backward];
    for id in boundary.forward() {
        let operands = boundary.operands(id).filter_map(|(root, _)| nearby[root.index()]).min();
        nearby[id.index()] = boundary.reads[id.index()].rows.first().copied().or(operands);
    }
    nearby
}

//! Lifetimes of intermediate buffers, and their places in one arena.

use deuteron_graph::{Graph, NodeId};

use crate::group::Group;

/// Buffers start at multiples of this: what a GPU's allocations start at, and more than a cache line or the widest vector.
const ALIGNMENT: usize = 256;

/// A buffer's place in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// whose value it holds
    pub node: NodeId,
    /// first byte
    pub offset: usize,
    /// length
    pub bytes: usize,
    /// first group that needs it: the one that writes it
    pub first: usize,
    /// last group that needs it
    pub last: usize,
}

/// One allocation for all intermediates of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Arena {
    /// total length
    pub bytes: usize,
    /// one a stored node that is no output
    pub slots: Vec<Slot>,
}

impl Arena {
    /// The slot of a node.
    pub fn slot(&self, node: NodeId) -> Option<&Slot> {
        self.slots.iter().find(|slot| slot.node == node)
    }
}

/// Places the largest buffers first, each at the lowest offset that is free for its whole life.
pub(crate) fn arena(graph: &Graph, groups: &[Group]) -> Arena {
    let mut slots: Vec<Slot> = Vec::new();
    for (index, group) in groups.iter().enumerate() {
        for &node in &group.outputs {
            if !graph.outputs().iter().any(|output| output.node == node) {
                let bytes = graph.node(node).bytes().next_multiple_of(ALIGNMENT);
                slots.push(Slot { node, offset: 0, bytes, first: index, last: index });
            }
        }
        for &node in &group.inputs {
            if let Some(slot) = slots.iter_mut().find(|slot| slot.node == node) {
                slot.last = index;
            }
        }
    }
    let mut order: Vec<usize> = (0..slots.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(slots[index].bytes), slots[index].first));
    let mut placed: Vec<Slot> = Vec::new();
    for index in order {
        let mut slot = slots[index];
        let mut taken: Vec<(usize, usize)> = placed
            .iter()
            .filter(|other| other.first <= slot.last && slot.first <= other.last)
            .map(|other| (other.offset, other.offset + other.bytes))
            .collect();
        taken.sort_unstable();
        for (start, end) in taken {
            if slot.offset + slot.bytes <= start {
                break;
            }
            slot.offset = slot.offset.max(end);
        }
        slots[index] = slot;
        placed.push(slot);
    }
    let bytes = slots.iter().map(|slot| slot.offset + slot.bytes).max().unwrap_or(0);
    Arena { bytes, slots }
}

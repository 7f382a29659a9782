//! Lifetimes of intermediate buffers, and their offsets in one arena.

use deuteron_graph::{Graph, NodeId};

use crate::group::Group;

/// Alignment of buffers: that of GPU allocations, which is more than a cache line or the widest vector.
const ALIGNMENT: usize = 256;

/// A buffer's slot in the arena.
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
    /// one per stored node that is not an output
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
    let mut slots = lives(graph, groups);
    let mut order: Vec<usize> = (0..slots.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(slots[index].bytes), slots[index].first));
    // Placed buffers by stretches of time, so that only those are looked at that live at about the same time.
    let stretch = groups.len().isqrt().max(1);
    let mut placed: Vec<Vec<usize>> = vec![Vec::new(); groups.len() / stretch + 1];
    for index in order {
        let mut slot = slots[index];
        let stretches = slot.first / stretch..=slot.last / stretch;
        let mut taken: Vec<(usize, usize)> = Vec::new();
        for at in stretches.clone() {
            // Each once: in the first stretch that both live in.
            let others = placed[at].iter().map(|&other| &slots[other]);
            let others = others.filter(|other| at == slot.first.max(other.first) / stretch);
            let alive = others.filter(|other| other.first <= slot.last && slot.first <= other.last);
            taken.extend(alive.map(|other| (other.offset, other.offset + other.bytes)));
        }
        taken.sort_unstable();
        for (start, end) in taken {
            if slot.offset + slot.bytes <= start {
                break;
            }
            slot.offset = slot.offset.max(end);
        }
        slots[index] = slot;
        placed[stretches].iter_mut().for_each(|stretch| stretch.push(index));
    }
    let bytes = slots.iter().map(|slot| slot.offset + slot.bytes).max().unwrap_or(0);
    Arena { bytes, slots }
}

/// A slot for each buffer that is not an output, from the group that writes it to the last one that reads it; not placed yet.
fn lives(graph: &Graph, groups: &[Group]) -> Vec<Slot> {
    let mut slots: Vec<Slot> = Vec::new();
    let mut slot_of: Vec<Option<usize>> = vec![None; graph.nodes().len()];
    let mut is_output = vec![false; graph.nodes().len()];
    graph.outputs().iter().for_each(|output| is_output[output.node.index()] = true);
    for (index, group) in groups.iter().enumerate() {
        for &node in group.outputs.iter().filter(|node| !is_output[node.index()]) {
            let bytes = graph.node(node).bytes().next_multiple_of(ALIGNMENT);
            slot_of[node.index()].get_or_insert(slots.len());
            slots.push(Slot { node, offset: 0, bytes, first: index, last: index });
        }
        for &node in &group.inputs {
            if let Some(slot) = slot_of[node.index()] {
                slots[slot].last = index;
            }
        }
    }
    slots
}

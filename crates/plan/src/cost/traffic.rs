//! Bytes that a group must move: each input read once, each output written once.

use deuteron_graph::{Graph, NodeId};

use crate::cost::units::Bytes;
use crate::layout::Placement;

/// Compulsory bytes of one kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// read from outside the group
    pub read: Bytes,
    /// written for others
    pub written: Bytes,
}

impl Traffic {
    /// Both together.
    pub fn total(self) -> Bytes {
        self.read + self.written
    }
}

/// The traffic of a kernel that makes `nodes` and stores `outputs`.
pub fn traffic(graph: &Graph, placement: &Placement, nodes: &[NodeId], outputs: &[NodeId]) -> Traffic {
    let mut seen: Vec<(NodeId, usize)> = Vec::new();
    let mut read = Bytes(0);
    for &id in nodes {
        for value in placement.reads(graph, id) {
            let Some(placed) = placement.get(value) else { continue };
            // Two slices of one tensor are two reads; the same slice twice is one.
            let key = (placed.base, placed.layout.offset);
            if nodes.contains(&placed.base) || seen.contains(&key) {
                continue;
            }
            seen.push(key);
            read += bytes_read(graph, id, value, placement);
        }
    }
    let written = outputs.iter().map(|&id| Bytes(graph.node(id).bytes() as u64)).sum();
    Traffic { read, written }
}

/// Distinct elements under the value's strides; of a gathered table only the rows that are picked.
fn bytes_read(graph: &Graph, reader: NodeId, value: NodeId, placement: &Placement) -> Bytes {
    let node = graph.node(value);
    let element = node.dtype.bytes() as u64;
    let picks = matches!(graph.node(reader).op, deuteron_graph::Op::Gather) && graph.node(reader).inputs[0] == value;
    if picks {
        return Bytes(graph.node(reader).shape.elements().min(node.shape.elements()) as u64 * element);
    }
    let distinct = placement.get(value).map_or(0, |placed| {
        let axes = placed.layout.shape.iter().zip(&placed.layout.strides);
        axes.map(|(&size, &stride)| if stride == 0 { size.min(1) } else { size }).product::<usize>()
    });
    Bytes(distinct as u64 * element)
}

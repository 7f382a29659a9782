//! Bytes that a group must move: each input read once, each output written once.

use deuteron_graph::{Graph, NodeId, Op};

use crate::draft::Draft;
use crate::layout::Placement;
use crate::units::Bytes;

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

/// One tensor, or slice of one, that a kernel reads from memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadValue {
    /// the node that owns the buffer
    pub base: NodeId,
    /// unique bytes
    pub bytes: Bytes,
    /// rows of the value
    pub rows: usize,
    /// columns of the value
    pub cols: usize,
}

/// The external reads of a draft, each slice once.
pub fn reads(draft: &Draft) -> Vec<ReadValue> {
    let (graph, placement) = (draft.graph, draft.placement);
    let mut seen: Vec<(NodeId, usize)> = Vec::new();
    let mut all = Vec::new();
    for &id in draft.nodes {
        placement.for_reads(graph, id, &mut |value| {
            let Some(placed) = placement.get(value) else { return };
            // A cache is kept in place: what an append moves is its rows.
            if matches!(graph.node(id).op, Op::Append { .. }) && graph.node(id).inputs[0] == value {
                return;
            }
            // Two slices of one tensor are two reads; the same slice twice is one.
            let key = (placed.base, placed.layout.offset);
            if draft.nodes.binary_search(&placed.base).is_ok() || seen.contains(&key) {
                return;
            }
            seen.push(key);
            let shape = &graph.node(value).shape;
            let bytes = bytes_read(graph, id, value, placement);
            all.push(ReadValue { base: placed.base, bytes, rows: shape.rows(), cols: shape.cols() });
        });
    }
    all
}

/// The traffic of a kernel. For an opaque operation its stated bytes count; bytes beyond its
/// results count as reads.
pub fn traffic(draft: &Draft) -> Traffic {
    traffic_of(draft, &reads(draft))
}

/// The same for its reads.
pub(crate) fn traffic_of(draft: &Draft, reads: &[ReadValue]) -> Traffic {
    let read: Bytes = reads.iter().map(|value| value.bytes).sum();
    let bytes = |&id: &NodeId| Bytes(draft.graph.node(written(draft.graph, id)).bytes() as u64);
    let written: Bytes = draft.outputs.iter().map(bytes).sum();
    let described = draft.nodes.iter().map(|&id| match &draft.graph.node(id).op {
        Op::Opaque(opaque) => opaque.bytes.unwrap_or(0),
        _ => 0,
    });
    match described.sum::<u64>() {
        0 => Traffic { read, written },
        bytes => Traffic { read: Bytes(bytes) - written, written },
    }
}

/// Bytes written for a result: all of it, or the new rows of a cache.
pub(crate) fn written(graph: &Graph, id: NodeId) -> NodeId {
    let node = graph.node(id);
    if let Op::Append { .. } = node.op { node.inputs[1] } else { id }
}

/// Distinct elements under the value's strides; for a gathered table only the selected rows.
fn bytes_read(graph: &Graph, reader: NodeId, value: NodeId, placement: &Placement) -> Bytes {
    let node = graph.node(value);
    // What a widening cast reads is narrow.
    let element = placement.base(value).map_or(node.dtype, |base| graph.node(base).dtype).bytes() as u64;
    let picks = matches!(graph.node(reader).op, Op::Gather) && graph.node(reader).inputs[0] == value;
    if picks {
        return Bytes(graph.node(reader).shape.elements().min(node.shape.elements()) as u64 * element);
    }
    let distinct = placement.get(value).map_or(0, |placed| {
        let axes = placed.layout.shape.iter().zip(&placed.layout.strides);
        axes.map(|(&size, &stride)| if stride == 0 { size.min(1) } else { size }).product::<usize>()
    });
    Bytes(distinct as u64 * element)
}

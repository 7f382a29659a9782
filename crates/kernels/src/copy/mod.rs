//! Views and concatenations written to memory: copies of strided blocks.
//!
//! - Arguments: the sources, then the destination.
//! - Traffic: reads and writes each element once.
//! - Limits: elements of 1, 2 or 4 bytes.

#[allow(unsafe_code)]
pub mod cpu;
pub mod cuda;

use deuteron_codegen::argument::{ArgBinding, Argument, strided_reach};
use deuteron_graph::{Graph, NodeId, Op};
use deuteron_plan::{Draft, Layout, Structure};

/// One strided block moved from a source argument into the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// position of the source argument
    pub source: usize,
    /// sizes of the block
    pub dims: Vec<usize>,
    /// strides in the source
    pub from: Vec<usize>,
    /// first element in the source
    pub from_offset: usize,
    /// strides in the destination
    pub to: Vec<usize>,
    /// first element in the destination
    pub to_offset: usize,
}

/// A copy: its blocks and their layouts.
#[derive(Debug, Clone, PartialEq)]
pub struct Copy {
    /// bytes of an element
    pub element: usize,
    /// the sources, then the destination
    pub args: Vec<ArgBinding>,
    /// what is moved
    pub pieces: Vec<Piece>,
}

impl Copy {
    /// The copy that a group is, if it is one.
    pub(crate) fn lower(group: &Draft) -> Option<Copy> {
        let (Structure::Copy, &[id]) = (group.structure, group.nodes) else { return None };
        let (graph, placement) = (group.graph, group.placement);
        let node = graph.node(id);
        let own = Layout::contiguous(&node.shape);
        let concatenated = if let Op::Concat { axis } = node.op { Some(axis) } else { None };
        let (mut args, mut pieces, mut start) = (Vec::new(), Vec::new(), 0);
        for &input in &node.inputs {
            let placed = placement.get(input)?;
            // A view may exist only as a copy because strides cannot express it: then the order of elements is its
            // operand's, and the destination is contiguous.
            let seen = match &node.op {
                Op::View(view) => placed.layout.view(view).unwrap_or_else(|| placed.layout.clone()),
                _ => placed.layout.clone(),
            };
            let (to, to_offset) = match concatenated {
                Some(axis) => (own.strides.clone(), start * own.strides[axis]),
                None => (seen.shape.strides(), 0),
            };
            start += concatenated.map_or(0, |axis| seen.shape[axis]);
            pieces.push(Piece {
                source: args.len(),
                dims: seen.shape.to_vec(),
                from: seen.strides.clone(),
                from_offset: seen.offset,
                to,
                to_offset,
            });
            args.push(ArgBinding::whole(graph, placed.base, 0, false));
        }
        args.push(ArgBinding::whole(graph, id, 0, true));
        Some(Copy { element: node.dtype.bytes(), args, pieces })
    }

    /// The copy of a whole contiguous value into the buffer of another node of the same type.
    pub(crate) fn whole(graph: &Graph, from: NodeId, to: NodeId) -> Copy {
        let dims = vec![graph.node(from).shape.elements()];
        let (from_offset, to_offset, strides) = (0, 0, vec![1]);
        let piece = Piece { source: 0, dims, from: strides.clone(), from_offset, to: strides, to_offset };
        let args = vec![ArgBinding::whole(graph, from, 0, false), ArgBinding::whole(graph, to, 0, true)];
        Copy { element: graph.node(from).dtype.bytes(), args, pieces: vec![piece] }
    }

    /// Its arguments, as a device needs them.
    pub fn arguments(&self) -> Vec<Argument> {
        let last = self.args.len() - 1;
        let reach = |dims: &[usize], strides: &[usize], offset: usize| {
            let reach = strided_reach(dims.iter().copied().zip(strides.iter().copied()), 1);
            if reach == 0 { 0 } else { reach.saturating_add(offset) }
        };
        let elements = |position: usize| {
            let pieces = self.pieces.iter().filter(|piece| position == last || piece.source == position);
            let reaches = pieces.map(|piece| match position == last {
                true => reach(&piece.dims, &piece.to, piece.to_offset),
                false => reach(&piece.dims, &piece.from, piece.from_offset),
            });
            reaches.max().unwrap_or(0)
        };
        let args = self.args.iter().enumerate();
        args.map(|(position, arg)| Argument::new(arg, elements(position)).of_elements()).collect()
    }
}

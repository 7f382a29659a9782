//! Row kernels: one space, values read at their own position, within the limits of a kernel.

use deuteron_graph::{Graph, NodeId, Op};

use crate::layout::{Placement, pattern_source};
use crate::machine::{Machine, Quantity};
use crate::reason::Reason;
use crate::space::{Space, finished_sum, node_space, space_shape};

/// The input of legality checks.
#[derive(Clone, Copy)]
pub(crate) struct Rules<'a> {
    pub graph: &'a Graph,
    pub placement: &'a Placement,
    pub machine: &'a Machine,
    /// The first node of the backward part, if there is one.
    pub first_backward: Option<usize>,
}

/// A value that is produced and consumed in the group.
pub(super) struct Edge {
    pub producer: NodeId,
    pub value: NodeId,
    pub consumer: NodeId,
}

impl Rules<'_> {
    /// One space, values read at their own position, no value needed before it is complete, and all within the limits.
    pub(super) fn check_rows(&self, nodes: &[NodeId], leaves: &dyn Fn(NodeId) -> bool) -> Result<Space, Reason> {
        // A sum is converted as it is stored by one node, and what is stored can be read by another kernel alone.
        let first = |sum: NodeId| nodes.iter().find(|&&id| finished_sum(self.graph, nodes, id) == Some(sum));
        let finishes =
            |id: NodeId| finished_sum(self.graph, nodes, id).is_some_and(|sum| !leaves(sum) && first(sum) == Some(&id));
        let mut edges = self.edges(nodes);
        edges.retain(|edge| !finishes(edge.consumer));
        for edge in &edges {
            let summed = matches!(self.graph.node(edge.producer).op, Op::ColumnSum) || finishes(edge.producer);
            let looked_up = matches!(self.graph.node(edge.consumer).op, Op::Gather);
            if summed || looked_up {
                return Err(Reason::NeedsAllRows { value: edge.producer });
            }
        }
        let mut space = node_space(self.graph, nodes[0]);
        for &id in nodes.iter().filter(|&&id| !finishes(id)) {
            let own = node_space(self.graph, id);
            space = space.join(own).ok_or(Reason::DifferentSpace { producer: space, consumer: own })?;
        }
        for edge in &edges {
            self.check_edge(edge, space)?;
        }
        self.check_patterns(nodes, space)?;
        self.check_resources(nodes, leaves, space)?;
        Ok(space)
    }

    /// Values made and read within the group.
    fn edges(&self, nodes: &[NodeId]) -> Vec<Edge> {
        let mut edges = Vec::new();
        for &consumer in nodes {
            self.placement.for_reads(self.graph, consumer, &mut |value| {
                let Some(producer) = self.placement.base(value) else { return };
                if nodes.binary_search(&producer).is_ok() {
                    edges.push(Edge { producer, value, consumer });
                }
            });
        }
        edges
    }

    /// Within a kernel, a value is read at its own row and column, or is one number per row.
    pub(super) fn check_edge(&self, edge: &Edge, space: Space) -> Result<(), Reason> {
        let moves = || Reason::ViewMovesData { view: edge.value };
        let reader = space_shape(self.graph, edge.consumer);
        let placed = self.placement.get(edge.value).ok_or_else(moves)?;
        if !placed.layout.shape.broadcasts_to(reader) {
            return Err(moves());
        }
        let access = placed.layout.row_access(reader).ok_or_else(moves)?;
        let produced = &self.graph.node(edge.producer).shape;
        let in_place = if produced.cols() == 1 {
            produced.rows() == space.rows && access.is_per_row_identity(space.rows)
        } else {
            produced.rows() == space.rows && reader.cols() == space.cols && access.is_identity(space.rows, space.cols)
        };
        if in_place { Ok(()) } else { Err(moves()) }
    }

    /// A random mask is counted in its own shape, and a gathered row is as long as its table's: their readers keep those
    /// columns.
    fn check_patterns(&self, nodes: &[NodeId], space: Space) -> Result<(), Reason> {
        let differs = |cols: usize| {
            let consumer = Space { rows: space.rows, cols };
            if cols == space.cols { Ok(()) } else { Err(Reason::DifferentSpace { producer: space, consumer }) }
        };
        for &id in nodes {
            let node = self.graph.node(id);
            if matches!(node.op, Op::Gather | Op::Random { .. }) {
                differs(node.shape.cols())?;
            }
            for &input in &node.inputs {
                if self.placement.get(input).is_some() {
                    continue;
                }
                let pattern = self.graph.node(pattern_source(self.graph, input));
                if matches!(pattern.op, Op::Random { .. }) {
                    differs(pattern.shape.cols())?;
                }
            }
        }
        Ok(())
    }

    /// The number of tensors that the kernel reads and writes, and the bytes of row temporaries.
    fn check_resources(&self, nodes: &[NodeId], leaves: &dyn Fn(NodeId) -> bool, space: Space) -> Result<(), Reason> {
        let mut bases: Vec<NodeId> = Vec::new();
        let mut full_rows = 0;
        for &id in nodes {
            self.placement.for_reads(self.graph, id, &mut |value| {
                let Some(base) = self.placement.base(value) else { return };
                if nodes.binary_search(&base).is_err() && !bases.contains(&base) {
                    bases.push(base);
                    full_rows += (self.graph.node(base).shape.cols() == space.cols) as usize;
                }
            });
        }
        let outputs = nodes.iter().filter(|&&id| leaves(id)).count();
        let (needed, available) = (bases.len() + outputs, self.machine.count(Quantity::KernelArguments));
        // One node is always a kernel, however many operands it has.
        if needed > available && nodes.len() > 1 {
            return Err(Reason::TooManyArguments { needed, available });
        }
        let (needed, available) =
            (full_rows * space.cols * 4, self.machine.kilobytes(Quantity::RowScratchKb).0 as usize);
        if needed > available && nodes.len() > 1 && nodes.iter().any(|&id| self.is_reduction(id)) {
            return Err(Reason::RowTooLong { needed, available });
        }
        Ok(())
    }

    pub(super) fn is_reduction(&self, id: NodeId) -> bool {
        matches!(self.graph.node(id).op, Op::RowReduce(_))
    }
}

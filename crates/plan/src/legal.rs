//! Which groups are allowed, and why the others are not.

use std::fmt;

use deuteron_graph::{Graph, NodeId, Op, Shape};

use crate::layout::{Placement, pattern_source};
use crate::machine::Machine;
use crate::plan::GroupKind;

/// The rows and columns a row kernel runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Space {
    /// product of the leading axes
    pub rows: usize,
    /// the last axis
    pub cols: usize,
}

impl Space {
    fn of(shape: &Shape) -> Space {
        Space { rows: shape.rows(), cols: shape.cols() }
    }

    /// The space that holds both: equal rows, and columns that are equal or 1.
    pub fn join(self, other: Space) -> Option<Space> {
        let cols = match (self.cols, other.cols) {
            (a, b) if a == b => a,
            (1, b) => b,
            (a, 1) => a,
            _ => return None,
        };
        (self.rows == other.rows).then_some(Space { rows: self.rows, cols })
    }
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.rows, self.cols)
    }
}

/// Why two groups stay apart. Codes are stable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// A third group needs the first and is needed by the second.
    WouldFormCycle {
        /// a node on the way
        through: NodeId,
    },
    /// Rows or columns differ.
    DifferentSpace {
        /// of the producer
        producer: Space,
        /// of the consumer
        consumer: Space,
    },
    /// The consumer needs a value that is complete only after the last row.
    NeedsAllRows {
        /// the value
        value: NodeId,
    },
    /// One of them is a kernel of another kind, which takes no neighbours yet.
    OtherKernel {
        /// of the producer
        producer: GroupKind,
        /// of the consumer
        consumer: GroupKind,
    },
    /// A view between them moves elements across rows or columns.
    ViewMovesData {
        /// the view
        view: NodeId,
    },
    /// Together they would read and write too many tensors.
    TooManyArguments {
        /// how many
        needed: usize,
        /// the limit
        available: usize,
    },
    /// A row of temporaries would not stay in the cache.
    RowTooLong {
        /// bytes of one row
        needed: usize,
        /// the limit
        available: usize,
    },
    /// The strategy keeps calls apart.
    Strategy,
    /// Together they would be a kernel of too many primitives.
    TooManyNodes {
        /// how many
        needed: usize,
        /// the limit
        available: usize,
    },
}

impl Reason {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Reason::WouldFormCycle { .. } => "E-PLAN-001",
            Reason::DifferentSpace { .. } => "E-PLAN-002",
            Reason::NeedsAllRows { .. } => "E-PLAN-003",
            Reason::OtherKernel { .. } => "E-PLAN-004",
            Reason::ViewMovesData { .. } => "E-PLAN-005",
            Reason::TooManyArguments { .. } => "E-PLAN-006",
            Reason::RowTooLong { .. } => "E-PLAN-007",
            Reason::Strategy => "E-PLAN-008",
            Reason::TooManyNodes { .. } => "E-PLAN-009",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::WouldFormCycle { through } => {
                write!(f, "another kernel stands between them, through %{}", through.index())
            }
            Reason::DifferentSpace { producer, consumer } => {
                write!(f, "rows and columns differ: {producer} and {consumer}")
            }
            Reason::NeedsAllRows { value } => {
                write!(f, "%{} is complete only after the last row", value.index())
            }
            Reason::OtherKernel { producer, consumer } => {
                write!(f, "a {producer} kernel and a {consumer} kernel do not share a skeleton")
            }
            Reason::ViewMovesData { view } => {
                write!(f, "%{} moves elements to other rows or columns", view.index())
            }
            Reason::TooManyArguments { needed, available } => {
                write!(f, "together they touch {needed} tensors, {available} are allowed")
            }
            Reason::RowTooLong { needed, available } => {
                write!(f, "a row of temporaries takes {needed} bytes, {available} stay in the cache")
            }
            Reason::Strategy => f.write_str("this strategy keeps calls apart"),
            Reason::TooManyNodes { needed, available } => {
                write!(f, "together they hold {needed} primitives, {available} are allowed")
            }
        }
    }
}

/// The space of a node inside a row kernel: that of its operand for reductions, its own otherwise.
pub fn node_space(graph: &Graph, id: NodeId) -> Space {
    Space::of(&space_shape(graph, id))
}

/// The shape behind [`node_space`].
pub(crate) fn space_shape(graph: &Graph, id: NodeId) -> Shape {
    let node = graph.node(id);
    match node.op {
        Op::RowReduce(_) | Op::ColumnSum => graph.node(node.inputs[0]).shape.clone(),
        _ => node.shape.clone(),
    }
}

/// The kind of kernel a node needs when it stands alone.
pub(crate) fn kernel_kind(graph: &Graph, placement: &Placement, id: NodeId) -> GroupKind {
    let node = graph.node(id);
    match node.op {
        Op::Matmul { .. } => GroupKind::Matmul,
        Op::ScatterAdd { .. } => GroupKind::ScatterAdd,
        Op::Concat { .. } => GroupKind::Copy,
        // A view with a buffer of its own copies what it sees; a pattern with a buffer is written by a row kernel.
        Op::View(_) | Op::StopGradient if placement.get(node.inputs[0]).is_some() => GroupKind::Copy,
        _ => GroupKind::Row,
    }
}

/// What legality needs to know of two sets of nodes.
pub(crate) struct Pair<'a> {
    pub graph: &'a Graph,
    pub placement: &'a Placement,
    pub machine: &'a Machine,
    pub first: &'a [NodeId],
    pub second: &'a [NodeId],
}

impl Pair<'_> {
    /// Everything but convexity, which needs the whole graph: may these nodes share a row kernel?
    pub fn check(&self) -> Result<Space, Reason> {
        let kind = |nodes: &[NodeId]| kernel_kind(self.graph, self.placement, nodes[0]);
        let (producer, consumer) = (kind(self.first), kind(self.second));
        let (needed, available) = (self.first.len() + self.second.len(), self.machine.kernel_nodes);
        if needed > available {
            return Err(Reason::TooManyNodes { needed, available });
        }
        if producer != GroupKind::Row || consumer != GroupKind::Row {
            return Err(Reason::OtherKernel { producer, consumer });
        }
        let (a, b) = (self.space(self.first), self.space(self.second));
        let needs_all = self.edges(self.first, self.second).chain(self.edges(self.second, self.first));
        for edge in needs_all {
            self.check_needs_all_rows(&edge)?;
        }
        let space = a.join(b).ok_or(Reason::DifferentSpace { producer: a, consumer: b })?;
        for edge in self.edges(self.first, self.second).chain(self.edges(self.second, self.first)) {
            self.check_edge(&edge, space)?;
        }
        self.check_patterns(space, a, b)?;
        Ok(space)
    }

    fn space(&self, nodes: &[NodeId]) -> Space {
        let first = node_space(self.graph, nodes[0]);
        nodes.iter().fold(first, |space, &id| space.join(node_space(self.graph, id)).unwrap_or(space))
    }

    fn edges<'s>(&'s self, from: &'s [NodeId], to: &'s [NodeId]) -> impl Iterator<Item = Edge> + 's {
        to.iter().flat_map(move |&consumer| {
            self.placement.reads(self.graph, consumer).into_iter().filter_map(move |value| {
                let producer = self.placement.base(value)?;
                from.contains(&producer).then_some(Edge { producer, value, consumer })
            })
        })
    }

    fn check_needs_all_rows(&self, edge: &Edge) -> Result<(), Reason> {
        let summed = matches!(self.graph.node(edge.producer).op, Op::ColumnSum);
        let looked_up = matches!(self.graph.node(edge.consumer).op, Op::Gather);
        if summed || looked_up { Err(Reason::NeedsAllRows { value: edge.producer }) } else { Ok(()) }
    }

    /// Inside one kernel a value is read at its own row and column, or is one number a row.
    fn check_edge(&self, edge: &Edge, space: Space) -> Result<(), Reason> {
        let moves = Reason::ViewMovesData { view: edge.value };
        let reader = space_shape(self.graph, edge.consumer);
        let placed = self.placement.get(edge.value).ok_or(moves.clone())?;
        if !placed.layout.shape.broadcasts_to(&reader) {
            return Err(moves);
        }
        let access = placed.layout.row_access(&reader).ok_or(moves.clone())?;
        let produced = &self.graph.node(edge.producer).shape;
        let in_place = if produced.cols() == 1 {
            produced.rows() == space.rows && access.is_per_row_identity(space.rows)
        } else {
            produced.rows() == space.rows && reader.cols() == space.cols && access.is_identity(space.rows, space.cols)
        };
        if in_place { Ok(()) } else { Err(moves) }
    }

    /// A random mask is counted in its own shape, and a gathered row is as long as its table's: their readers keep those
    /// columns.
    fn check_patterns(&self, space: Space, a: Space, b: Space) -> Result<(), Reason> {
        for &id in self.first.iter().chain(self.second) {
            let node = self.graph.node(id);
            if matches!(node.op, Op::Gather | Op::Random { .. }) && node.shape.cols() != space.cols {
                return Err(Reason::DifferentSpace { producer: a, consumer: b });
            }
            for &input in &self.graph.node(id).inputs {
                if self.placement.get(input).is_some() {
                    continue;
                }
                let pattern = self.graph.node(pattern_source(self.graph, input));
                if matches!(pattern.op, Op::Random { .. }) && pattern.shape.cols() != space.cols {
                    return Err(Reason::DifferentSpace { producer: a, consumer: b });
                }
            }
        }
        Ok(())
    }

    /// How many tensors the two would read and write together, at least; and a row of temporaries for each stored value.
    pub fn check_resources(&self, outputs: usize, space: Space) -> Result<(), Reason> {
        let mut bases: Vec<NodeId> = Vec::new();
        let mut full_rows = 0;
        for &id in self.first.iter().chain(self.second) {
            for value in self.placement.reads(self.graph, id) {
                let Some(base) = self.placement.base(value) else { continue };
                if !self.first.contains(&base) && !self.second.contains(&base) && !bases.contains(&base) {
                    bases.push(base);
                    full_rows += (self.graph.node(base).shape.cols() == space.cols) as usize;
                }
            }
        }
        let (needed, available) = (bases.len() + outputs, self.machine.kernel_arguments);
        if needed > available {
            return Err(Reason::TooManyArguments { needed, available });
        }
        let (needed, available) = (full_rows * space.cols * 4, self.machine.row_scratch);
        if needed > available && self.second.iter().chain(self.first).any(|&id| self.is_reduction(id)) {
            return Err(Reason::RowTooLong { needed, available });
        }
        Ok(())
    }

    fn is_reduction(&self, id: NodeId) -> bool {
        matches!(self.graph.node(id).op, Op::RowReduce(_))
    }
}

/// A value that one set of nodes makes and the other reads.
struct Edge {
    producer: NodeId,
    value: NodeId,
    consumer: NodeId,
}

//! A proposed kernel: the planner asks a catalogue about it, and code generation takes it as input.

use deuteron_graph::{Graph, NodeId};

use crate::chain::Structure;
use crate::layout::Placement;

/// A kernel that the planner considers.
#[derive(Debug, Clone, Copy)]
pub struct Draft<'a> {
    /// the graph
    pub graph: &'a Graph,
    /// the placement of its values
    pub placement: &'a Placement,
    /// what the kernel makes, operands before users
    pub nodes: &'a [NodeId],
    /// what it stores
    pub outputs: &'a [NodeId],
    /// its structure, as found by the rules
    pub structure: &'a Structure,
}

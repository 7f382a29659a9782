//! A kernel before it is one: what the planner asks a catalogue about, and what code generation takes.

use deuteron_graph::{Graph, NodeId};

use crate::chain::Structure;
use crate::layout::Placement;

/// A kernel that the planner considers.
#[derive(Debug, Clone, Copy)]
pub struct Draft<'a> {
    /// the graph
    pub graph: &'a Graph,
    /// where its values lie
    pub placement: &'a Placement,
    /// what the kernel makes, operands before users
    pub nodes: &'a [NodeId],
    /// what it stores
    pub outputs: &'a [NodeId],
    /// what the rules found it to be made of
    pub structure: &'a Structure,
}

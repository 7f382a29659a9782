//! Groups: the kernels of a plan.

use deuteron_graph::{Graph, NodeId};

use crate::chain::Structure;
use crate::cost::Cost;
use crate::draft::Draft;
use crate::kind::GroupKind;
use crate::layout::Placement;
use crate::traffic::Traffic;

/// One kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// Its name in reports: `layer_norm + gelu`.
    pub name: String,
    /// Its kind.
    pub kind: GroupKind,
    /// Its structure.
    pub structure: Structure,
    /// The nodes it computes, operands before users.
    pub nodes: Vec<NodeId>,
    /// The nodes it reads from buffers, each base once.
    pub inputs: Vec<NodeId>,
    /// The nodes it writes to buffers.
    pub outputs: Vec<NodeId>,
    /// Its traffic.
    pub traffic: Traffic,
    /// Its cost, every term.
    pub cost: Cost,
}

impl Group {
    /// The group as input of code generation.
    pub fn draft<'a>(&'a self, graph: &'a Graph, placement: &'a Placement) -> Draft<'a> {
        Draft { graph, placement, nodes: &self.nodes, outputs: &self.outputs, structure: &self.structure }
    }
}

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
    /// What it is for a person: `layer_norm + gelu`.
    pub name: String,
    /// Its kind.
    pub kind: GroupKind,
    /// What it is made of.
    pub structure: Structure,
    /// What it makes, operands before users.
    pub nodes: Vec<NodeId>,
    /// The nodes it reads from buffers, each base once.
    pub inputs: Vec<NodeId>,
    /// The nodes it writes to buffers.
    pub outputs: Vec<NodeId>,
    /// What it moves.
    pub traffic: Traffic,
    /// What it takes, every term.
    pub cost: Cost,
}

impl Group {
    /// The group as code generation takes it.
    pub fn draft<'a>(&'a self, graph: &'a Graph, placement: &'a Placement) -> Draft<'a> {
        Draft { graph, placement, nodes: &self.nodes, outputs: &self.outputs, structure: &self.structure }
    }
}

//! Where the values of a graph are stored.

use deuteron_device::Place;
use deuteron_graph::{Graph, NodeId, Op};
use deuteron_plan::Plan;

use crate::error::Error;

/// Which value of a graph is stored where.
pub(crate) struct Storage {
    /// handed in, and no states
    pub(super) inputs: Vec<NodeId>,
    /// states, and what the append of each makes of it
    pub(super) states: Vec<[NodeId; 2]>,
    /// handed out, each once, and no states
    pub(super) outputs: Vec<NodeId>,
}

impl Storage {
    pub(crate) fn new(graph: &Graph, states: &[NodeId]) -> Result<Storage, Error> {
        let results = states.iter().enumerate().map(|(index, &state)| {
            let twice = states[..index].contains(&state);
            let result = appended(graph, state).filter(|_| !twice);
            let known = graph.inputs().contains(&state);
            let name = if known { graph.label(state) } else { format!("%{}", state.index()) };
            result.map(|result| [state, result]).ok_or(Error::NoState(name))
        });
        let states = results.collect::<Result<Vec<[NodeId; 2]>, Error>>()?;
        let mut outputs: Vec<NodeId> = Vec::new();
        for output in graph.outputs() {
            if !outputs.contains(&output.node) && !states.iter().any(|[_, result]| *result == output.node) {
                outputs.push(output.node);
            }
        }
        let inputs = graph.inputs().iter().copied();
        let inputs = inputs.filter(|input| !states.iter().any(|[state, _]| state == input)).collect();
        Ok(Storage { inputs, states, outputs })
    }

    /// Results that are written into the memory of a state.
    pub(super) fn updated(&self) -> Vec<NodeId> {
        self.states.iter().map(|&[_, result]| result).collect()
    }

    pub(super) fn place(&self, plan: &Plan, base: NodeId) -> Place {
        let of = |nodes: &[NodeId]| nodes.iter().position(|&node| node == base);
        if let Some(position) = of(&self.inputs) {
            return Place::Input(position);
        }
        if let Some(position) = self.states.iter().position(|pair| pair.contains(&base)) {
            return Place::State(position);
        }
        if let Some(position) = of(&self.outputs) {
            return Place::Output(position);
        }
        // The planner gives every stored value that is no output a slot; a value without one is an error the device
        // reports.
        let slot = plan.arena.slot(base);
        slot.map_or(Place::Arena { offset: 0, bytes: 0 }, |slot| Place::Arena {
            offset: slot.offset,
            bytes: slot.bytes,
        })
    }
}

/// What the one append that reads an input makes of it, if nothing else reads it and the result is handed out.
fn appended(graph: &Graph, state: NodeId) -> Option<NodeId> {
    let handed_out = |id: NodeId| graph.outputs().iter().any(|output| output.node == id);
    let mut readers = graph.ids().filter(|&id| graph.node(id).inputs.contains(&state));
    let reader = readers.next().filter(|_| graph.inputs().contains(&state) && !handed_out(state))?;
    let node = graph.node(reader);
    let alone = readers.next().is_none() && node.inputs[0] == state && !node.inputs[1..].contains(&state);
    (matches!(node.op, Op::Append { .. }) && alone && handed_out(reader)).then_some(reader)
}

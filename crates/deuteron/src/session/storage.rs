//! Where the values of a graph are stored.

use std::collections::{HashMap, HashSet};

use deuteron_codegen::{InPlace, Kernel};
use deuteron_device::Place;
use deuteron_graph::{Graph, NodeId, Op};
use deuteron_plan::{Group, Plan};

use super::options::{SessionOptions, Update};
use crate::error::{Error, UpdateProblem};

/// Alignment of a new value: a cache line.
const ALIGNMENT: usize = 64;

/// The storage of every value of a graph.
pub(crate) struct Storage {
    /// inputs that are not states
    pub(super) inputs: Vec<NodeId>,
    /// states
    pub(super) states: Vec<State>,
    /// results that are not states, each once
    pub(super) outputs: Vec<NodeId>,
}

/// What a group reads and writes.
pub(super) struct Accesses {
    read: HashSet<NodeId>,
    written: Vec<NodeId>,
    /// whether its results are outputs or states; memory of the arena may serve one group after another
    is_kept: bool,
}

impl Accesses {
    /// Whether both groups may run at the same time: neither reads what the other one writes.
    pub fn are_apart(&self, other: &Accesses) -> bool {
        let unread = |one: &Accesses, by: &Accesses| !one.written.iter().any(|node| by.read.contains(node));
        self.is_kept && other.is_kept && unread(self, other) && unread(other, self)
    }
}

/// A state.
#[derive(Clone, Copy)]
pub(super) struct State {
    /// the input
    pub node: NodeId,
    /// its new value
    result: NodeId,
    /// where the new value is stored until the end of the run, if not in the state itself
    room: Option<Room>,
}

/// A range of the arena.
#[derive(Clone, Copy)]
struct Room {
    offset: usize,
    bytes: usize,
}

impl Storage {
    pub(crate) fn new(graph: &Graph, options: &SessionOptions) -> Result<Storage, Error> {
        let mut states: Vec<State> = Vec::new();
        for &node in &options.states {
            let twice = states.iter().any(|state| state.node == node);
            let result = appended(graph, node).filter(|_| !twice).ok_or_else(|| Error::NoState(name(graph, node)))?;
            states.push(State { node, result, room: None });
        }
        for &Update { state: node, result } in &options.updates {
            if let Some(problem) = problem(graph, &states, node, result) {
                return Err(Error::Update { state: name(graph, node), result: name(graph, result), problem });
            }
            states.push(State { node, result, room: None });
        }
        let mut outputs: Vec<NodeId> = Vec::new();
        for output in graph.outputs() {
            if !outputs.contains(&output.node) && !states.iter().any(|state| state.result == output.node) {
                outputs.push(output.node);
            }
        }
        let inputs = graph.inputs().iter().copied();
        let inputs = inputs.filter(|&input| !states.iter().any(|state| state.node == input)).collect();
        Ok(Storage { inputs, states, outputs })
    }

    /// States that nothing reads after the group that makes their new value.
    pub(super) fn last_reads(&self, plan: &Plan) -> Vec<InPlace> {
        let last = self.states.iter().filter(|state| {
            let writer = plan.groups.iter().position(|group| group.outputs.contains(&state.result));
            let later = writer.map_or(&[][..], |writer| &plan.groups[writer + 1..]);
            !later.iter().any(|group| group.inputs.contains(&state.node))
        });
        last.map(|state| InPlace { operand: state.node, result: state.result }).collect()
    }

    /// What each group of a plan reads and writes.
    pub(super) fn accesses(&self, plan: &Plan) -> Vec<Accesses> {
        let states: HashMap<NodeId, NodeId> = self.states.iter().map(|state| (state.result, state.node)).collect();
        let of = |group: &Group| Accesses {
            read: group.inputs.iter().copied().collect(),
            // A new value may be written into its state.
            written: group
                .outputs
                .iter()
                .flat_map(|result| [Some(*result), states.get(result).copied()])
                .flatten()
                .collect(),
            is_kept: group.outputs.iter().all(|result| states.contains_key(result) || self.outputs.contains(result)),
        };
        plan.groups.iter().map(of).collect()
    }

    /// Decides where each new value is written, by the kernels of the groups: into its state if nothing reads that later and the
    /// kernel that writes it can, else into room of its own behind the plan's arena.
    pub(super) fn settle(&mut self, graph: &Graph, plan: &Plan, kernels: &[Kernel]) {
        let last = self.last_reads(plan);
        for at in 0..self.states.len() {
            let State { node: operand, result, .. } = self.states[at];
            let writable = kernels.iter().all(|kernel| can_write(kernel, operand, result));
            if !writable || !last.contains(&InPlace { operand, result }) {
                let offset = self.arena(plan).next_multiple_of(ALIGNMENT);
                self.states[at].room = Some(Room { offset, bytes: graph.node(result).bytes() });
            }
        }
    }

    /// New values that are copied at the end of a run: each with its state.
    pub(super) fn copied(&self) -> impl Iterator<Item = [NodeId; 2]> {
        self.states.iter().filter(|state| state.room.is_some()).map(|state| [state.result, state.node])
    }

    /// Bytes of the arena: the plan's, and room for new values behind it.
    pub(super) fn arena(&self, plan: &Plan) -> usize {
        let ends = self.states.iter().filter_map(|state| state.room).map(|room| room.offset + room.bytes);
        ends.fold(plan.arena.bytes, usize::max)
    }

    pub(super) fn place(&self, plan: &Plan, base: NodeId) -> Place {
        let of = |nodes: &[NodeId]| nodes.iter().position(|&node| node == base);
        if let Some(position) = of(&self.inputs) {
            return Place::Input(position);
        }
        if let Some(position) = self.states.iter().position(|state| state.node == base || state.result == base) {
            let State { node, room, .. } = self.states[position];
            return match room {
                Some(Room { offset, bytes }) if node != base => Place::Arena { offset, bytes },
                _ => Place::State(position),
            };
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

/// Whether a kernel can have a state's new value in the state: it does not write it, or reads nothing of the state, or writes in
/// place of what it reads.
fn can_write(kernel: &Kernel, state: NodeId, result: NodeId) -> bool {
    let arguments = kernel.launch.arguments();
    let written = arguments.iter().find(|argument| argument.written && argument.base == result);
    written.is_none_or(|written| {
        let mut read = (0..arguments.len()).filter(|&position| arguments[position].base == state);
        read.all(|position| written.in_place_of == Some(position))
    })
}

/// Why an input cannot be a state with this new value, given the other states.
fn problem(graph: &Graph, states: &[State], state: NodeId, result: NodeId) -> Option<UpdateProblem> {
    if !graph.inputs().contains(&state) {
        return Some(UpdateProblem::NoInput);
    }
    if states.iter().any(|other| other.node == state) {
        return Some(UpdateProblem::StateTwice);
    }
    if graph.inputs().contains(&result) {
        return Some(UpdateProblem::NotComputed);
    }
    if !graph.outputs().iter().any(|output| output.node == result) {
        return Some(UpdateProblem::NoOutput);
    }
    if states.iter().any(|other| other.result == result) {
        return Some(UpdateProblem::ResultTwice);
    }
    let [expected, got] = [state, result].map(|id| format!("{}{}", graph.node(id).dtype, graph.node(id).shape));
    (expected != got).then_some(UpdateProblem::Type { expected, got })
}

/// The name of a node, if it belongs to the graph.
fn name(graph: &Graph, id: NodeId) -> String {
    if graph.ids().any(|known| known == id) { graph.label(id) } else { format!("%{}", id.index()) }
}

/// The result of the only append that reads an input, if nothing else reads the input and the result is an output.
fn appended(graph: &Graph, state: NodeId) -> Option<NodeId> {
    let handed_out = |id: NodeId| graph.outputs().iter().any(|output| output.node == id);
    let mut readers = graph.ids().filter(|&id| graph.node(id).inputs.contains(&state));
    let reader = readers.next().filter(|_| graph.inputs().contains(&state) && !handed_out(state))?;
    let node = graph.node(reader);
    let alone = readers.next().is_none() && node.inputs[0] == state && !node.inputs[1..].contains(&state);
    (matches!(node.op, Op::Append { .. }) && alone && handed_out(reader)).then_some(reader)
}

#[cfg(test)]
mod tests {
    use deuteron_graph::Dtype;

    use super::*;

    #[test]
    fn groups_that_share_what_is_written_are_not_apart() {
        let mut graph = Graph::new("nodes");
        let mut node = |name: &str| graph.input(name, Dtype::F32, [4]).unwrap();
        let [weight, gradient, other, updated, more] = ["w", "g", "o", "u", "m"].map(&mut node);
        let group = |read: &[NodeId], written: &[NodeId], is_kept| Accesses {
            read: read.iter().copied().collect(),
            written: written.to_vec(),
            is_kept,
        };
        // An update in place writes the state as well as the result.
        let update = group(&[weight, gradient], &[weight, updated], true);
        let apart = |group: &Accesses| (update.are_apart(group), group.are_apart(&update));
        assert_eq!(apart(&group(&[other, gradient], &[other, more], true)), (true, true));
        assert_eq!(apart(&group(&[weight], &[more], true)), (false, false), "reads the state");
        assert_eq!(apart(&group(&[updated], &[more], true)), (false, false), "reads the result");
        assert_eq!(apart(&group(&[other], &[gradient], true)), (false, false), "writes an operand");
        assert_eq!(apart(&group(&[other], &[more], false)), (false, false), "its result is in the arena");
    }
}

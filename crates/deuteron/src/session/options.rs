//! How a session is made.

use deuteron_codegen::Kernel;
use deuteron_graph::{Graph, NodeId};
use deuteron_plan::{Layout, Pin, Strategy};

use crate::error::Error;

/// How a graph is planned, and the kinds of its inputs. A [`Strategy`] converts into options.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    pub(super) strategy: Strategy,
    pub(super) layouts: Vec<Layout>,
    pub(super) states: Vec<NodeId>,
    pub(super) updates: Vec<Update>,
    pub(super) pins: Vec<Pin>,
    pub(super) kernels: Vec<Kernel>,
    pub(super) joined: bool,
}

/// A state and its new value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Update {
    pub state: NodeId,
    pub result: NodeId,
}

impl Default for SessionOptions {
    /// The cheapest plan, contiguous inputs, no states, no pins.
    fn default() -> SessionOptions {
        let (layouts, states, updates, pins, kernels) = Default::default();
        SessionOptions { strategy: Strategy::Fused, layouts, states, updates, pins, kernels, joined: false }
    }
}

impl From<Strategy> for SessionOptions {
    fn from(strategy: Strategy) -> SessionOptions {
        SessionOptions { strategy, ..SessionOptions::default() }
    }
}

impl SessionOptions {
    /// How much is merged.
    pub fn strategy(self, strategy: Strategy) -> SessionOptions {
        SessionOptions { strategy, ..self }
    }

    /// The layout of each input, in the order of [`Graph::inputs`]; none of them means that all are contiguous. Those of states are
    /// contiguous.
    pub fn layouts(self, layouts: impl Into<Vec<Layout>>) -> SessionOptions {
        SessionOptions { layouts: layouts.into(), ..self }
    }

    /// Inputs that are states: memory of the caller that [`super::Session::run_with`] writes to and that keeps what was written. These
    /// are caches: each is read by one append alone, whose result is an output; the append then writes the new rows and nothing
    /// else, and whoever reads its result reads the state. For states of any other kind see [`SessionOptions::update`].
    pub fn states(self, states: impl Into<Vec<NodeId>>) -> SessionOptions {
        SessionOptions { states: states.into(), ..self }
    }

    /// One more input that is a state, and its new value: an output of the same dtype and shape that the graph computes, such as
    /// weights after a step of an optimiser. [`super::Session::run_with`] takes these states behind those of
    /// [`SessionOptions::states`], in the order in which they were declared.
    ///
    /// All of the graph reads the state as it was before the run. The new value is written straight into the state where no later
    /// kernel reads the old one, and the kernel that makes it either does not read it or is elementwise work that reads each element
    /// before it writes it. Else it is written to memory of the session, and copied into the state at the end of the run. After a run
    /// that fails these states may hold anything.
    pub fn update(mut self, state: NodeId, result: NodeId) -> SessionOptions {
        self.updates.push(Update { state, result });
        self
    }

    /// Fusions to force or forbid in a fused plan. An error names the one that cannot be satisfied, and why.
    pub fn pins(self, pins: impl Into<Vec<Pin>>) -> SessionOptions {
        SessionOptions { pins: pins.into(), ..self }
    }

    /// Kernels in place of those that would be generated for the first groups of the plan, such as other variants of them.
    pub fn kernels(self, kernels: impl Into<Vec<Kernel>>) -> SessionOptions {
        SessionOptions { kernels: kernels.into(), ..self }
    }

    /// Launches groups together on a GPU: neighbours that do the same elementwise work on tensors of different sizes and do not depend on each
    /// other, such as the updates of all weights. The session then has fewer kernels than its plan has groups.
    pub fn joined(self) -> SessionOptions {
        SessionOptions { joined: true, ..self }
    }

    /// The layout of each input of a graph that can be run with these options.
    pub(super) fn check(&self, graph: &Graph) -> Result<Vec<Layout>, Error> {
        if !self.pins.is_empty() && self.strategy != Strategy::Fused {
            return Err(Error::Pins(self.strategy));
        }
        if self.layouts.is_empty() {
            return Ok(graph.inputs().iter().map(|&input| Layout::contiguous(&graph.node(input).shape)).collect());
        }
        let is_state = |id: &NodeId| self.states.contains(id) || self.updates.iter().any(|update| update.state == *id);
        let mut lying = graph.inputs().iter().zip(&self.layouts);
        match lying.find(|(input, layout)| is_state(input) && !layout.is_contiguous()) {
            Some((&state, _)) => Err(Error::StateLayout(graph.label(state))),
            None => Ok(self.layouts.clone()),
        }
    }
}

//! An epilogue as named steps, derived from the calls of its nodes when a kernel family needs it.

use deuteron_graph::{BinaryOp, Call, Callee, Composite, Dtype, Graph, NodeId, Op};

use crate::chain::Side;
use crate::draft::Draft;
use crate::layout::Placement;

/// One step of an epilogue: from the value before it to `result`, element by element in order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Step<'a> {
    /// the value is converted: rounded at the end of a call, or widened
    Round {
        /// to this type
        to: Dtype,
        /// its result
        result: NodeId,
    },
    /// another value is added
    Add {
        /// the other value
        value: NodeId,
        /// the sum
        result: NodeId,
    },
    /// an activation of one operand
    Activation {
        /// which one
        function: Composite,
        /// its result
        result: NodeId,
    },
    /// a norm of whole rows
    Norm {
        /// its call, which has weights and statistics
        call: &'a Call,
        /// the normed rows
        result: NodeId,
    },
    /// anything else; later steps are not read
    Other,
}

/// The steps of a draft's epilogue; none if it has none. An epilogue of several values starts with [`Step::Other`].
pub fn epilogue_steps<'a>(draft: &Draft<'a>) -> Vec<Step<'a>> {
    match draft.structure.chain().map(|chain| &chain.epilogue) {
        Some(Side { nodes, crossing, .. }) if !nodes.is_empty() => match crossing.as_slice() {
            &[value] => Reader { graph: draft.graph, placement: draft.placement, at: value, rest: nodes }.read(),
            _ => vec![Step::Other],
        },
        Some(_) | None => Vec::new(),
    }
}

/// The nodes of an epilogue, taken in order.
struct Reader<'a, 'd> {
    graph: &'a Graph,
    placement: &'d Placement,
    /// the last value that was made
    at: NodeId,
    rest: &'d [NodeId],
}

impl<'a> Reader<'a, '_> {
    fn read(mut self) -> Vec<Step<'a>> {
        let mut steps = Vec::new();
        while let Some(&id) = self.rest.first() {
            let step = self.step(id);
            steps.push(step);
            let (result, taken) = match step {
                Step::Round { result, .. } | Step::Add { result, .. } => (result, 1),
                Step::Activation { result, .. } | Step::Norm { result, .. } => {
                    let call = self.graph.node(id).call;
                    let inside = self.rest.iter().take_while(|&&other| self.graph.node(other).call == call);
                    (result, inside.count())
                }
                Step::Other => return steps,
            };
            (self.at, self.rest) = (result, &self.rest[taken..]);
        }
        steps
    }

    /// The step that begins with a node.
    fn step(&self, id: NodeId) -> Step<'a> {
        let node = self.graph.node(id);
        let call = &self.graph.calls()[node.call.index()];
        match (&call.callee, &node.op) {
            (Callee::Composite(function), _) if is_activation(function) => match self.called(call) {
                Some(result) => Step::Activation { function: *function, result },
                None => Step::Other,
            },
            (Callee::Composite(Composite::LayerNorm { .. } | Composite::RmsNorm { .. }), _) => {
                match self.called(call) {
                    Some(result) => Step::Norm { call, result },
                    None => Step::Other,
                }
            }
            (_, &Op::Cast(to)) if to != Dtype::I32 && self.is_at(node.inputs[0]) => Step::Round { to, result: id },
            (_, Op::Binary(BinaryOp::Add)) => match (self.is_at(node.inputs[0]), self.is_at(node.inputs[1])) {
                (true, false) => Step::Add { value: node.inputs[1], result: id },
                (false, true) => Step::Add { value: node.inputs[0], result: id },
                (true, true) | (false, false) => Step::Other,
            },
            _ => Step::Other,
        }
    }

    /// The first result of a call of the last value, if it is made here.
    fn called(&self, call: &Call) -> Option<NodeId> {
        let result = self.placement.base(*call.outputs.first()?)?;
        (self.is_at(*call.inputs.first()?) && self.rest.contains(&result)).then_some(result)
    }

    /// Whether a value is the last one that was made, element by element in order.
    fn is_at(&self, value: NodeId) -> bool {
        self.placement.get(value).is_some_and(|placed| {
            placed.base == self.at
                && placed.layout.is_contiguous()
                && placed.layout.shape.elements() == self.graph.node(self.at).shape.elements()
        })
    }
}

fn is_activation(composite: &Composite) -> bool {
    matches!(composite, Composite::Activation(_))
}

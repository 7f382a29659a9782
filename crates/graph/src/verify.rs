//! Invariants of a well-formed graph.

use crate::error::GraphError;
use crate::graph::{Callee, Graph};
use crate::infer::infer;
use crate::op::Op;

impl Graph {
    /// Checks every invariant: operands come before users, types are what the rules give, calls cover the nodes in
    /// contiguous runs, inputs and outputs exist. Passes call it between stages in debug builds.
    pub fn verify(&self) -> Result<(), GraphError> {
        let malformed = |node: usize, problem: String| Err(GraphError::Malformed { node, problem });
        let mut is_input = vec![false; self.nodes().len()];
        self.inputs().iter().for_each(|id| is_input[id.index()] = true);
        for id in self.ids() {
            let node = self.node(id);
            if let Some(late) = node.inputs.iter().find(|&&input| input >= id) {
                return malformed(id.index(), format!("operand %{} is not built before it", late.index()));
            }
            let operands: Vec<_> = node.inputs.iter().map(|&input| self.node(input)).collect();
            match infer(&node.op, &operands) {
                Ok((shape, dtype)) if shape == node.shape && dtype == node.dtype => {}
                Ok((shape, dtype)) => {
                    let stated = format!("{}{}", node.dtype, node.shape);
                    return malformed(id.index(), format!("expected {dtype}{shape}, stated {stated}"));
                }
                Err(expected) => return malformed(id.index(), format!("{}: expected {expected}", node.op)),
            }
            if matches!(node.op, Op::Input { .. }) != is_input[id.index()] {
                return malformed(id.index(), "the list of inputs does not match the input nodes".into());
            }
        }
        self.verify_calls()?;
        for output in self.outputs() {
            self.check_node("out", output.node)?;
        }
        Ok(())
    }

    fn verify_calls(&self) -> Result<(), GraphError> {
        let malformed = |node: usize, problem: &str| Err(GraphError::Malformed { node, problem: problem.into() });
        let mut next = 0;
        for (index, call) in self.calls().iter().enumerate() {
            if call.start != next || call.end <= call.start || call.end > self.nodes().len() {
                return malformed(next, "calls do not cover the nodes in contiguous runs");
            }
            if self.nodes()[call.start..call.end].iter().any(|node| node.call.index() != index) {
                return malformed(call.start, "a node names another call than the one it is in");
            }
            if call.callee == Callee::Primitive && call.end != call.start + 1 {
                return malformed(call.start, "a primitive call has more than one node");
            }
            next = call.end;
        }
        if next == self.nodes().len() { Ok(()) } else { malformed(next, "nodes without a call") }
    }
}

//! The gradient of the only composite that is differentiated as a whole: node by node, all of its logits would have to exist first.

use super::{Contribution, Reverse, Value};
use crate::block::Block;
use crate::composite::Composite;
use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::graph::Call;
use crate::node::NodeId;
use crate::op::CompareOp;

impl Reverse {
    pub(super) fn linear_cross_entropy(
        &mut self,
        call: &Call,
        smoothing: f64,
        ignored: Option<i32>,
    ) -> Result<(), GraphError> {
        let (&[x, weight, targets], &[loss, logsumexp]) = (call.inputs.as_slice(), call.outputs.as_slice()) else {
            return Ok(());
        };
        let arrived = |reverse: &Reverse, id: NodeId| !reverse.contributions[id.index()].is_empty();
        if !arrived(self, loss) && !arrived(self, logsumexp) {
            return Ok(());
        }
        let origin = self.graph.origin(self.graph.nodes()[call.start].call);
        self.graph.open_block();
        let d_loss = if arrived(self, loss) { self.total(loss)? } else { self.zeros_like(loss)? };
        let d_loss = ignored.map_or(Ok(d_loss), |ignored| self.without(d_loss, targets, ignored))?;
        let d_logsumexp = if arrived(self, logsumexp) {
            let own = self.total(logsumexp)?;
            self.graph.add(own, d_loss)?
        } else {
            d_loss
        };
        self.graph.close_block(Block::Gradient(Box::new(origin)));
        let operands = [x, weight, targets, logsumexp, d_logsumexp, d_loss];
        let gradients = self.graph.call(Composite::LinearCrossEntropyGradient { smoothing }, &operands)?;
        for (operand, gradient) in [x, weight].into_iter().zip(gradients) {
            if self.active[operand.index()] {
                self.contributions[operand.index()].push(Contribution::Whole(gradient));
            }
        }
        Ok(())
    }

    /// A number per row, 0 where the target is ignored.
    fn without(&mut self, x: NodeId, targets: NodeId, ignored: i32) -> Value {
        let target = self.reshape_like(targets, x)?;
        let ignored = self.graph.constant(f64::from(ignored), Dtype::I32)?;
        let is_ignored = self.graph.compare(CompareOp::Eq, target, ignored)?;
        let zero = self.graph.constant(0.0, Dtype::F32)?;
        self.graph.select(is_ignored, zero, x)
    }
}

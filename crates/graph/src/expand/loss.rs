//! The loss of a language model from the rows before its last matmul, and its gradient. Logits exist only for some rows at a time.

use super::{Expansion, Value};
use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::node::NodeId;
use crate::op::{CompareOp, ReduceOp, UnaryOp};

/// Approximate number of logits that exist at once: 64 MB of `f32`.
const LOGITS: usize = 16 << 20;

/// Minimum rows per chunk: smaller matmuls would not fill the machine.
const FEWEST: usize = 256;

/// Maximum number of chunks: each adds nodes to the graph.
const CHUNKS: usize = 1024;

/// Rows whose logits are made together.
#[derive(Clone, Copy)]
struct Chunk {
    start: usize,
    length: usize,
}

impl Expansion<'_> {
    pub(super) fn linear_cross_entropy(
        &mut self,
        inputs: &[NodeId],
        smoothing: f64,
        ignored: Option<i32>,
    ) -> Result<Vec<NodeId>, GraphError> {
        let (mut losses, mut sums) = (Vec::new(), Vec::new());
        for chunk in self.chunks(inputs) {
            let (_, logits) = self.logits(inputs, chunk)?;
            let target = self.targets(inputs[2], chunk)?;
            let logsumexp = self.logsumexp(logits)?;
            let picked = self.picked(logits, target)?;
            let mut loss = if smoothing == 0.0 {
                self.graph.sub(logsumexp, picked)?
            } else {
                let mean = self.graph.reduce(ReduceOp::Mean, logits)?;
                let (kept, even) = (self.graph.scale(picked, 1.0 - smoothing)?, self.graph.scale(mean, smoothing)?);
                let smoothed = self.graph.add(kept, even)?;
                self.graph.sub(logsumexp, smoothed)?
            };
            if let Some(ignored) = ignored {
                let ignored = self.graph.constant(f64::from(ignored), Dtype::I32)?;
                let is_ignored = self.graph.compare(CompareOp::Eq, target, ignored)?;
                let zero = self.constant(0.0)?;
                loss = self.graph.select(is_ignored, zero, loss)?;
            }
            losses.push(loss);
            sums.push(logsumexp);
        }
        Ok(vec![self.rows_of(&losses)?, self.rows_of(&sums)?])
    }

    /// Processes chunk after chunk, so that each chunk's logits are freed before the next ones are computed.
    pub(super) fn linear_cross_entropy_gradient(
        &mut self,
        inputs: &[NodeId],
        smoothing: f64,
    ) -> Result<Vec<NodeId>, GraphError> {
        let dtype = self.graph.node(inputs[0]).dtype;
        let (mut d_x, mut d_weight) = (Vec::new(), Vec::new());
        for chunk in self.chunks(inputs) {
            let (x, logits) = self.logits(inputs, chunk)?;
            let slopes = self.slopes(inputs, logits, chunk, smoothing)?;
            let slopes = self.cast(slopes, dtype)?;
            d_x.push(self.graph.matmul(slopes, inputs[1])?);
            let part = self.graph.matmul_transposed(slopes, x, true, false)?;
            d_weight.push(self.cast(part, Dtype::F32)?);
        }
        let first = d_weight[0];
        let total = d_weight[1..].iter().try_fold(first, |sum, &part| self.graph.add(sum, part))?;
        Ok(vec![self.rows_of(&d_x)?, self.cast(total, dtype)?])
    }

    /// Gradients of the logits of some rows.
    fn slopes(&mut self, inputs: &[NodeId], logits: NodeId, chunk: Chunk, smoothing: f64) -> Value {
        let Chunk { start, length } = chunk;
        let classes = self.graph.node(logits).shape.cols();
        let logsumexp = self.graph.slice(inputs[3], 0, start, length)?;
        let scale = self.graph.slice(inputs[4], 0, start, length)?;
        let d_loss = self.graph.slice(inputs[5], 0, start, length)?;
        let target = self.targets(inputs[2], chunk)?;
        let shifted = self.graph.sub(logits, logsumexp)?;
        let probability = self.graph.unary(UnaryOp::Exp, shifted)?;
        let mut slopes = self.graph.mul(probability, scale)?;
        if smoothing != 0.0 {
            let even = self.graph.scale(d_loss, smoothing / classes as f64)?;
            slopes = self.graph.sub(slopes, even)?;
        }
        let kept = if smoothing == 0.0 { d_loss } else { self.graph.scale(d_loss, 1.0 - smoothing)? };
        let is_target = self.is_target(logits, target)?;
        let less = self.graph.sub(slopes, kept)?;
        self.graph.select(is_target, less, slopes)
    }

    /// Chunks of rows of `x` multiplied by the classes of the weight. Each chunk has one row less than the one before: equal chunks would share a
    /// kernel, which would need all logits at once.
    fn chunks(&self, inputs: &[NodeId]) -> Vec<Chunk> {
        let (rows, classes) = (self.graph.node(inputs[0]).shape.rows(), self.graph.node(inputs[1]).shape.rows());
        let most = (LOGITS / classes).max(FEWEST).max(rows.div_ceil(CHUNKS));
        let (mut start, mut all) = (0, Vec::new());
        while start < rows {
            let length = (most - all.len() % (most / 2)).min(rows - start);
            all.push(Chunk { start, length });
            start += length;
        }
        all
    }

    /// The rows of a chunk, and their logits as f32.
    fn logits(&mut self, inputs: &[NodeId], chunk: Chunk) -> Result<(NodeId, NodeId), GraphError> {
        let x = self.graph.slice(inputs[0], 0, chunk.start, chunk.length)?;
        let logits = self.graph.matmul_transposed(x, inputs[1], false, true)?;
        Ok((x, self.cast(logits, Dtype::F32)?))
    }

    fn targets(&mut self, targets: NodeId, chunk: Chunk) -> Value {
        let targets = self.graph.slice(targets, 0, chunk.start, chunk.length)?;
        self.graph.reshape(targets, [chunk.length, 1])
    }

    /// One or more tensors, row after row.
    fn rows_of(&mut self, parts: &[NodeId]) -> Value {
        if let [part] = parts { Ok(*part) } else { self.graph.concat(parts, 0) }
    }
}

//! The expansion of each composite into primitives: its only definition, from which cost, lowering and gradients derive.
//!
//! Inputs are widened to `f32` first and results narrowed last, so statistics and intermediates are `f32` whatever the
//! storage type.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

mod experts;
mod loss;
mod scores;

use crate::activation::Activation;
use crate::composite::{Composite, Mask, ScoreWork};
use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::expand::scores::ScorePlace;
use crate::graph::Graph;
use crate::node::NodeId;
use crate::op::{BinaryOp, CompareOp, ReduceOp, UnaryOp};
use crate::shape::Shape;

/// Pushes the primitives of one composite.
pub(crate) struct Expansion<'a> {
    pub graph: &'a mut Graph,
}

type Value = Result<NodeId, GraphError>;

impl Expansion<'_> {
    pub fn expand(&mut self, composite: Composite, inputs: &[NodeId]) -> Result<Vec<NodeId>, GraphError> {
        match composite {
            Composite::LayerNorm { eps } => self.layer_norm(inputs, eps),
            Composite::RmsNorm { eps } => self.rms_norm(inputs, eps),
            Composite::Softmax => self.on_f32(inputs[0], |e, x| e.softmax(x)),
            Composite::CausalMask => self.on_f32(inputs[0], |e, x| e.causal_mask(x)),
            Composite::Activation(activation) => self.on_f32(inputs[0], |e, x| e.activation(activation, x)),
            Composite::Swiglu => self.gated(inputs, Activation::Silu),
            Composite::Geglu { kind } => self.gated(inputs, kind.into()),
            Composite::Dropout { p, offset } => {
                let seed = inputs[1];
                self.on_f32(inputs[0], |e, x| e.dropout(x, seed, p, offset))
            }
            Composite::Linear { transposed } => self.linear(inputs, transposed),
            Composite::AttentionScores { mask, scale } => {
                let probabilities = self.scores(inputs, mask, scale, &ScoreWork::NONE, &inputs[2..])?;
                let dtype = self.graph.node(inputs[0]).dtype;
                Ok(vec![self.cast(probabilities, dtype)?])
            }
            Composite::Attention { mask, scale, p, offset, work } => {
                self.attention(inputs, mask, scale, &work, (p, offset))
            }
            Composite::QuantizeInt8 => self.quantize(inputs[0], 127.0, Dtype::I8),
            Composite::QuantizeFp8 => self.quantize(inputs[0], 448.0, Dtype::F8e4m3),
            Composite::Dequantize { dtype } => {
                let q = self.cast(inputs[0], Dtype::F32)?;
                let x = self.graph.mul(q, inputs[1])?;
                Ok(vec![self.cast(x, dtype)?])
            }
            Composite::QuantizedLinear { dtype } => self.quantized_linear(inputs, dtype),
            Composite::ExpertLinear { dtype } => self.expert_linear(inputs, dtype),
            Composite::RoutedLinear => self.routed_linear(inputs),
            Composite::WeightedSum => self.weighted_sum(inputs),
            Composite::CrossEntropy => self.cross_entropy(inputs),
            Composite::LinearCrossEntropy { smoothing, ignored } => {
                self.linear_cross_entropy(inputs, smoothing, ignored)
            }
            Composite::LinearCrossEntropyGradient { smoothing } => {
                self.linear_cross_entropy_gradient(inputs, smoothing)
            }
        }
    }

    fn layer_norm(&mut self, inputs: &[NodeId], eps: f64) -> Result<Vec<NodeId>, GraphError> {
        let dtype = self.graph.node(inputs[0]).dtype;
        let x = self.cast(inputs[0], Dtype::F32)?;
        let mean = self.graph.reduce(ReduceOp::Mean, x)?;
        let centred = self.graph.sub(x, mean)?;
        let square = self.graph.mul(centred, centred)?;
        let variance = self.graph.reduce(ReduceOp::Mean, square)?;
        let rstd = self.rstd(variance, eps)?;
        let normed = self.graph.mul(centred, rstd)?;
        let w = self.cast(inputs[1], Dtype::F32)?;
        let b = self.cast(inputs[2], Dtype::F32)?;
        let scaled = self.graph.mul(normed, w)?;
        let y = self.graph.add(scaled, b)?;
        Ok(vec![self.cast(y, dtype)?, mean, rstd])
    }

    fn rms_norm(&mut self, inputs: &[NodeId], eps: f64) -> Result<Vec<NodeId>, GraphError> {
        let dtype = self.graph.node(inputs[0]).dtype;
        let x = self.cast(inputs[0], Dtype::F32)?;
        let square = self.graph.mul(x, x)?;
        let mean_square = self.graph.reduce(ReduceOp::Mean, square)?;
        let rstd = self.rstd(mean_square, eps)?;
        let normed = self.graph.mul(x, rstd)?;
        let w = self.cast(inputs[1], Dtype::F32)?;
        let y = self.graph.mul(normed, w)?;
        Ok(vec![self.cast(y, dtype)?, rstd])
    }

    fn rstd(&mut self, variance: NodeId, eps: f64) -> Value {
        let eps = self.constant(eps)?;
        let shifted = self.graph.add(variance, eps)?;
        self.graph.unary(UnaryOp::Rsqrt, shifted)
    }

    /// The maximum is a constant for the gradient, because it cancels. If a row is all `-inf`, the maximum is taken as 0 and
    /// the sum as 1, so that the row becomes zeros instead of NaN.
    fn softmax(&mut self, x: NodeId) -> Value {
        let (exponentials, sum) = self.exponentials(x)?;
        let zero = self.constant(0.0)?;
        let one = self.constant(1.0)?;
        let empty = self.graph.compare(CompareOp::Eq, sum, zero)?;
        let divisor = self.graph.select(empty, one, sum)?;
        let inverse = self.graph.unary(UnaryOp::Reciprocal, divisor)?;
        self.graph.mul(exponentials, inverse)
    }

    fn exponentials(&mut self, x: NodeId) -> Result<(NodeId, NodeId), GraphError> {
        let shift = self.finite_max(x)?;
        let shifted = self.graph.sub(x, shift)?;
        let exponentials = self.graph.unary(UnaryOp::Exp, shifted)?;
        let sum = self.graph.reduce(ReduceOp::Sum, exponentials)?;
        Ok((exponentials, sum))
    }

    fn finite_max(&mut self, x: NodeId) -> Value {
        let max = self.graph.reduce(ReduceOp::Max, x)?;
        let lowest = self.constant(f64::NEG_INFINITY)?;
        let zero = self.constant(0.0)?;
        let empty = self.graph.compare(CompareOp::Eq, max, lowest)?;
        let shift = self.graph.select(empty, zero, max)?;
        self.graph.stop_gradient(shift)
    }

    fn causal_mask(&mut self, x: NodeId) -> Value {
        let shape = self.graph.node(x).shape.clone();
        let (m, n) = (shape[shape.rank() - 2], shape[shape.rank() - 1]);
        let column = self.graph.iota(shape.clone(), shape.rank() - 1)?;
        let row = self.graph.iota(shape.clone(), shape.rank() - 2)?;
        let visible = if n == m {
            self.graph.compare(CompareOp::Le, column, row)?
        } else {
            // Positions are counted from the end: float arithmetic on them is exact below 2^24, which the axis check keeps.
            let column = self.cast(column, Dtype::F32)?;
            let row = self.cast(row, Dtype::F32)?;
            let shift = self.constant(n as f64 - m as f64)?;
            let limit = self.graph.add(row, shift)?;
            self.graph.compare(CompareOp::Le, column, limit)?
        };
        let lowest = self.constant(f64::NEG_INFINITY)?;
        self.graph.select(visible, x, lowest)
    }

    /// Positions are exact as `f32` below 2^24.
    fn cached_mask(&mut self, x: NodeId, positions: NodeId) -> Value {
        let shape = self.graph.node(x).shape.clone();
        let (rank, mut dims) = (shape.rank(), vec![1; shape.rank()]);
        dims[0] = shape[0];
        let first = self.graph.reshape(positions, Shape::new(dims))?;
        let first = self.cast(first, Dtype::F32)?;
        let column = self.graph.iota(shape.clone(), rank - 1)?;
        let column = self.cast(column, Dtype::F32)?;
        let row = self.graph.iota(shape, rank - 2)?;
        let row = self.cast(row, Dtype::F32)?;
        let limit = self.graph.add(row, first)?;
        let visible = self.graph.compare(CompareOp::Le, column, limit)?;
        let lowest = self.constant(f64::NEG_INFINITY)?;
        self.graph.select(visible, x, lowest)
    }

    fn dropout(&mut self, x: NodeId, seed: NodeId, p: f64, offset: u32) -> Value {
        let shape = self.graph.node(x).shape.clone();
        let kept = self.graph.random(seed, shape, p, offset)?;
        let factor = self.constant(1.0 / (1.0 - p))?;
        let zero = self.constant(0.0)?;
        let scaled = self.graph.mul(x, factor)?;
        self.graph.select(kept, scaled, zero)
    }

    fn linear(&mut self, inputs: &[NodeId], transposed: bool) -> Result<Vec<NodeId>, GraphError> {
        let product = self.graph.matmul_transposed(inputs[0], inputs[1], false, transposed)?;
        let Some(&bias) = inputs.get(2) else { return Ok(vec![product]) };
        self.graph.set_part(1);
        let dtype = self.graph.node(product).dtype;
        let wide = self.cast(product, Dtype::F32)?;
        let bias = self.cast(bias, Dtype::F32)?;
        let y = self.graph.add(wide, bias)?;
        Ok(vec![self.cast(y, dtype)?])
    }

    /// Parts: 0 scores, 1 scale, work and mask, 2 softmax. `operands` are those of mask and work.
    fn scores(&mut self, inputs: &[NodeId], kind: Mask, scale: f64, work: &ScoreWork, operands: &[NodeId]) -> Value {
        let (q, k) = (inputs[0], inputs[1]);
        let (mask, operands) = match kind {
            Mask::Additive | Mask::Cached => (operands.first().copied(), &operands[1..]),
            Mask::Full | Mask::Causal => (None, operands),
        };
        let k = self.cast(k, self.graph.node(q).dtype)?;
        let product = self.graph.matmul_transposed(q, k, false, true)?;
        self.graph.set_part(1);
        let wide = self.cast(product, Dtype::F32)?;
        let scale = self.constant(scale)?;
        let scaled = self.graph.mul(wide, scale)?;
        let (bias, place) = match kind {
            Mask::Additive => (mask, ScorePlace { positions: None, causal: false }),
            Mask::Full => (None, ScorePlace { positions: None, causal: false }),
            Mask::Causal => (None, ScorePlace { positions: None, causal: true }),
            Mask::Cached => (None, ScorePlace { positions: mask, causal: true }),
        };
        let worked = self.score_work(scaled, work, bias, operands, &place)?;
        let masked = match (kind, mask) {
            (Mask::Causal, _) => self.causal_mask(worked)?,
            (Mask::Cached, Some(positions)) => self.cached_mask(worked, positions)?,
            (Mask::Full | Mask::Additive | Mask::Cached, _) => worked,
        };
        self.graph.set_part(2);
        self.softmax(masked)
    }

    /// Parts: those of the scores, 3 dropout, 4 product with the values.
    fn attention(
        &mut self,
        inputs: &[NodeId],
        mask: Mask,
        scale: f64,
        work: &ScoreWork,
        (p, offset): (f64, u32),
    ) -> Result<Vec<NodeId>, GraphError> {
        let (operands, seed) = inputs[3..].split_at(inputs.len() - 3 - (p > 0.0) as usize);
        let mut probabilities = self.scores(inputs, mask, scale, work, operands)?;
        if let Some(&seed) = seed.first() {
            self.graph.set_part(3);
            probabilities = self.dropout(probabilities, seed, p, offset)?;
        }
        let dtype = self.graph.node(inputs[0]).dtype;
        let probabilities = self.cast(probabilities, dtype)?;
        self.graph.set_part(4);
        let values = self.cast(inputs[2], dtype)?;
        Ok(vec![self.graph.matmul(probabilities, values)?])
    }

    fn quantize(&mut self, x: NodeId, largest: f64, to: Dtype) -> Result<Vec<NodeId>, GraphError> {
        let x = self.cast(x, Dtype::F32)?;
        let absmax = self.graph.reduce(ReduceOp::AbsMax, x)?;
        let step = self.constant(1.0 / largest)?;
        let scale = self.graph.mul(absmax, step)?;
        let zero = self.constant(0.0)?;
        let one = self.constant(1.0)?;
        // A row of zeros keeps the scale 0 and divides by 1: its bytes are zeros.
        let empty = self.graph.compare(CompareOp::Eq, scale, zero)?;
        let divisor = self.graph.select(empty, one, scale)?;
        let inverse = self.graph.unary(UnaryOp::Reciprocal, divisor)?;
        let scaled = self.graph.mul(x, inverse)?;
        Ok(vec![self.cast(scaled, to)?, scale])
    }

    /// Parts: 0 the product, 1 scales, bias and cast.
    fn quantized_linear(&mut self, inputs: &[NodeId], dtype: Dtype) -> Result<Vec<NodeId>, GraphError> {
        let sums = self.graph.matmul_transposed(inputs[0], inputs[2], false, true)?;
        self.graph.set_part(1);
        let scaled = self.graph.mul(sums, inputs[1])?;
        let mut y = self.graph.mul(scaled, inputs[3])?;
        if let Some(&bias) = inputs.get(4) {
            let bias = self.cast(bias, Dtype::F32)?;
            y = self.graph.add(y, bias)?;
        }
        Ok(vec![self.cast(y, dtype)?])
    }

    fn cross_entropy(&mut self, inputs: &[NodeId]) -> Result<Vec<NodeId>, GraphError> {
        let logits = self.cast(inputs[0], Dtype::F32)?;
        let shape = self.graph.node(logits).shape.clone();
        let logsumexp = self.logsumexp(logits)?;
        let target = self.graph.reshape(inputs[1], shape.with_cols(1))?;
        let picked = self.picked(logits, target)?;
        let loss = self.graph.sub(logsumexp, picked)?;
        // Scaled before the sum, so that the sum over rows is the last step and one kernel holds it all.
        let inverse_rows = self.constant(1.0 / shape.rows() as f64)?;
        let share = self.graph.mul(loss, inverse_rows)?;
        let total = self.graph.column_sum(share)?;
        let mean = self.graph.reshape(total, Shape::scalar())?;
        Ok(vec![mean, logsumexp])
    }

    /// Of each row.
    fn logsumexp(&mut self, logits: NodeId) -> Value {
        let shift = self.finite_max(logits)?;
        let shifted = self.graph.sub(logits, shift)?;
        let exponentials = self.graph.unary(UnaryOp::Exp, shifted)?;
        let sum = self.graph.reduce(ReduceOp::Sum, exponentials)?;
        let log = self.graph.unary(UnaryOp::Log, sum)?;
        self.graph.add(log, shift)
    }

    /// Of each row the logit of its target `[.., 1]`.
    fn picked(&mut self, logits: NodeId, target: NodeId) -> Value {
        let is_target = self.is_target(logits, target)?;
        let zero = self.constant(0.0)?;
        let picked = self.graph.select(is_target, logits, zero)?;
        self.graph.reduce(ReduceOp::Sum, picked)
    }

    /// The position of the logit of a row's target.
    fn is_target(&mut self, logits: NodeId, target: NodeId) -> Value {
        let shape = self.graph.node(logits).shape.clone();
        let axis = shape.rank() - 1;
        let column = self.graph.iota(shape, axis)?;
        self.graph.compare(CompareOp::Eq, column, target)
    }

    fn on_f32(&mut self, x: NodeId, body: impl FnOnce(&mut Self, NodeId) -> Value) -> Result<Vec<NodeId>, GraphError> {
        let dtype = self.graph.node(x).dtype;
        let wide = self.cast(x, Dtype::F32)?;
        let y = body(self, wide)?;
        Ok(vec![self.cast(y, dtype)?])
    }

    fn activation(&mut self, activation: Activation, x: NodeId) -> Value {
        match activation {
            // x/2 (1 + tanh u) is x sigmoid(2u): one exponential, and no cancellation where x is far below 0.
            Activation::GeluTanh => {
                let square = self.graph.mul(x, x)?;
                let cubic = self.constant(0.044715)?;
                let one = self.constant(1.0)?;
                let scaled = self.graph.mul(square, cubic)?;
                let factor = self.graph.add(scaled, one)?;
                let slope = self.constant(2.0 * (2.0 / PI).sqrt())?;
                let steep = self.graph.mul(x, slope)?;
                let argument = self.graph.mul(steep, factor)?;
                let gate = self.graph.unary(UnaryOp::Sigmoid, argument)?;
                self.graph.mul(x, gate)
            }
            Activation::GeluErf => {
                let inverse_root = self.constant(FRAC_1_SQRT_2)?;
                let scaled = self.graph.mul(x, inverse_root)?;
                let erf = self.graph.unary(UnaryOp::Erf, scaled)?;
                let one = self.constant(1.0)?;
                let half = self.constant(0.5)?;
                let sum = self.graph.add(erf, one)?;
                let halved = self.graph.mul(x, half)?;
                self.graph.mul(halved, sum)
            }
            Activation::Silu => {
                let gate = self.graph.unary(UnaryOp::Sigmoid, x)?;
                self.graph.mul(x, gate)
            }
            Activation::Relu => {
                let zero = self.constant(0.0)?;
                self.graph.binary(BinaryOp::Max, x, zero)
            }
        }
    }

    fn gated(&mut self, inputs: &[NodeId], activation: Activation) -> Result<Vec<NodeId>, GraphError> {
        let gate = inputs[1];
        self.on_f32(inputs[0], |e, x| {
            let y = e.activation(activation, x)?;
            let gate = e.cast(gate, Dtype::F32)?;
            e.graph.mul(y, gate)
        })
    }

    /// Adds no node if the dtype is already right.
    fn cast(&mut self, x: NodeId, dtype: Dtype) -> Value {
        if self.graph.node(x).dtype == dtype { Ok(x) } else { self.graph.cast(x, dtype) }
    }

    fn constant(&mut self, value: f64) -> Value {
        self.graph.constant(value, Dtype::F32)
    }
}

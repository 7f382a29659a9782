//! The expansion of each composite into primitives: its only definition, from which cost, lowering and gradients derive.
//!
//! Inputs are widened to `f32` first and results narrowed last, so statistics and intermediates are `f32` whatever the
//! storage type.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::activation::Activation;
use crate::composite::{Composite, Mask};
use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::graph::Graph;
use crate::node::NodeId;
use crate::op::{BinaryOp, CompareOp, Op, ReduceOp, UnaryOp, View};
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
                let probabilities = self.scores(inputs[0], inputs[1], inputs.get(2).copied(), mask, scale)?;
                let dtype = self.graph.node(inputs[0]).dtype;
                Ok(vec![self.cast(probabilities, dtype)?])
            }
            Composite::Attention { mask, scale, p, offset } => self.attention(inputs, mask, scale, p, offset),
            Composite::QuantizeInt8 => self.quantize(inputs[0], 127.0, Dtype::I8),
            Composite::QuantizeFp8 => self.quantize(inputs[0], 448.0, Dtype::F8e4m3),
            Composite::Dequantize { dtype } => {
                let q = self.cast(inputs[0], Dtype::F32)?;
                let x = self.mul(q, inputs[1])?;
                Ok(vec![self.cast(x, dtype)?])
            }
            Composite::QuantizedLinear { dtype } => self.quantized_linear(inputs, dtype),
            Composite::ExpertLinear { dtype } => self.expert_linear(inputs, dtype),
            Composite::CrossEntropy => self.cross_entropy(inputs),
        }
    }

    fn layer_norm(&mut self, inputs: &[NodeId], eps: f64) -> Result<Vec<NodeId>, GraphError> {
        let dtype = self.graph.node(inputs[0]).dtype;
        let x = self.cast(inputs[0], Dtype::F32)?;
        let mean = self.reduce(ReduceOp::Mean, x)?;
        let centred = self.sub(x, mean)?;
        let square = self.mul(centred, centred)?;
        let variance = self.reduce(ReduceOp::Mean, square)?;
        let rstd = self.rstd(variance, eps)?;
        let normed = self.mul(centred, rstd)?;
        let w = self.cast(inputs[1], Dtype::F32)?;
        let b = self.cast(inputs[2], Dtype::F32)?;
        let scaled = self.mul(normed, w)?;
        let y = self.add(scaled, b)?;
        Ok(vec![self.cast(y, dtype)?, mean, rstd])
    }

    fn rms_norm(&mut self, inputs: &[NodeId], eps: f64) -> Result<Vec<NodeId>, GraphError> {
        let dtype = self.graph.node(inputs[0]).dtype;
        let x = self.cast(inputs[0], Dtype::F32)?;
        let square = self.mul(x, x)?;
        let mean_square = self.reduce(ReduceOp::Mean, square)?;
        let rstd = self.rstd(mean_square, eps)?;
        let normed = self.mul(x, rstd)?;
        let w = self.cast(inputs[1], Dtype::F32)?;
        let y = self.mul(normed, w)?;
        Ok(vec![self.cast(y, dtype)?, rstd])
    }

    fn rstd(&mut self, variance: NodeId, eps: f64) -> Value {
        let eps = self.constant(eps)?;
        let shifted = self.add(variance, eps)?;
        self.unary(UnaryOp::Rsqrt, shifted)
    }

    /// The maximum is a constant to the gradient: it cancels. Where a row is all `-inf`, the maximum is taken as 0 and
    /// the sum as 1, so that the row becomes zeros instead of NaN.
    fn softmax(&mut self, x: NodeId) -> Value {
        let (exponentials, sum) = self.exponentials(x)?;
        let zero = self.constant(0.0)?;
        let one = self.constant(1.0)?;
        let empty = self.compare(CompareOp::Eq, sum, zero)?;
        let divisor = self.select(empty, one, sum)?;
        let inverse = self.unary(UnaryOp::Reciprocal, divisor)?;
        self.mul(exponentials, inverse)
    }

    fn exponentials(&mut self, x: NodeId) -> Result<(NodeId, NodeId), GraphError> {
        let shift = self.finite_max(x)?;
        let shifted = self.sub(x, shift)?;
        let exponentials = self.unary(UnaryOp::Exp, shifted)?;
        let sum = self.reduce(ReduceOp::Sum, exponentials)?;
        Ok((exponentials, sum))
    }

    fn finite_max(&mut self, x: NodeId) -> Value {
        let max = self.reduce(ReduceOp::Max, x)?;
        let lowest = self.constant(f64::NEG_INFINITY)?;
        let zero = self.constant(0.0)?;
        let empty = self.compare(CompareOp::Eq, max, lowest)?;
        let shift = self.select(empty, zero, max)?;
        self.graph.push(Op::StopGradient, &[shift])
    }

    fn causal_mask(&mut self, x: NodeId) -> Value {
        let shape = self.graph.node(x).shape.clone();
        let (m, n) = (shape[shape.rank() - 2], shape[shape.rank() - 1]);
        let column = self.graph.push(Op::Iota { axis: shape.rank() - 1, shape: shape.clone() }, &[])?;
        let row = self.graph.push(Op::Iota { axis: shape.rank() - 2, shape: shape.clone() }, &[])?;
        let visible = if n == m {
            self.compare(CompareOp::Le, column, row)?
        } else {
            // Positions are counted from the end: float arithmetic on them is exact below 2^24, which the axis check keeps.
            let column = self.cast(column, Dtype::F32)?;
            let row = self.cast(row, Dtype::F32)?;
            let shift = self.constant(n as f64 - m as f64)?;
            let limit = self.add(row, shift)?;
            self.compare(CompareOp::Le, column, limit)?
        };
        let lowest = self.constant(f64::NEG_INFINITY)?;
        self.select(visible, x, lowest)
    }

    /// Positions are exact as `f32` below 2^24.
    fn cached_mask(&mut self, x: NodeId, positions: NodeId) -> Value {
        let shape = self.graph.node(x).shape.clone();
        let (rank, mut dims) = (shape.rank(), vec![1; shape.rank()]);
        dims[0] = shape[0];
        let first = self.graph.push(Op::View(View::Reshape(Shape::new(dims))), &[positions])?;
        let first = self.cast(first, Dtype::F32)?;
        let column = self.graph.push(Op::Iota { axis: rank - 1, shape: shape.clone() }, &[])?;
        let column = self.cast(column, Dtype::F32)?;
        let row = self.graph.push(Op::Iota { axis: rank - 2, shape }, &[])?;
        let row = self.cast(row, Dtype::F32)?;
        let limit = self.add(row, first)?;
        let visible = self.compare(CompareOp::Le, column, limit)?;
        let lowest = self.constant(f64::NEG_INFINITY)?;
        self.select(visible, x, lowest)
    }

    fn dropout(&mut self, x: NodeId, seed: NodeId, p: f64, offset: u32) -> Value {
        let shape = self.graph.node(x).shape.clone();
        let kept = self.graph.push(Op::Random { drop: p, offset, shape }, &[seed])?;
        let factor = self.constant(1.0 / (1.0 - p))?;
        let zero = self.constant(0.0)?;
        let scaled = self.mul(x, factor)?;
        self.select(kept, scaled, zero)
    }

    fn linear(&mut self, inputs: &[NodeId], transposed: bool) -> Result<Vec<NodeId>, GraphError> {
        let product = self.graph.push(Op::Matmul { transpose_a: false, transpose_b: transposed }, &inputs[..2])?;
        let Some(&bias) = inputs.get(2) else { return Ok(vec![product]) };
        self.graph.set_part(1);
        let dtype = self.graph.node(product).dtype;
        let wide = self.cast(product, Dtype::F32)?;
        let bias = self.cast(bias, Dtype::F32)?;
        let y = self.add(wide, bias)?;
        Ok(vec![self.cast(y, dtype)?])
    }

    /// Parts: 0 scores, 1 scale and mask, 2 softmax.
    fn scores(&mut self, q: NodeId, k: NodeId, mask: Option<NodeId>, kind: Mask, scale: f64) -> Value {
        let k = self.cast(k, self.graph.node(q).dtype)?;
        let product = self.graph.push(Op::Matmul { transpose_a: false, transpose_b: true }, &[q, k])?;
        self.graph.set_part(1);
        let wide = self.cast(product, Dtype::F32)?;
        let scale = self.constant(scale)?;
        let scaled = self.mul(wide, scale)?;
        let masked = match (kind, mask) {
            (Mask::Causal, _) => self.causal_mask(scaled)?,
            (Mask::Additive, Some(mask)) => {
                let mask = self.cast(mask, Dtype::F32)?;
                self.add(scaled, mask)?
            }
            (Mask::Cached, Some(positions)) => self.cached_mask(scaled, positions)?,
            (Mask::Full | Mask::Additive | Mask::Cached, _) => scaled,
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
        p: f64,
        offset: u32,
    ) -> Result<Vec<NodeId>, GraphError> {
        let (mask_operand, rest) = match mask {
            Mask::Additive | Mask::Cached => (Some(inputs[3]), &inputs[4..]),
            Mask::Full | Mask::Causal => (None, &inputs[3..]),
        };
        let mut probabilities = self.scores(inputs[0], inputs[1], mask_operand, mask, scale)?;
        if let Some(&seed) = rest.first() {
            self.graph.set_part(3);
            probabilities = self.dropout(probabilities, seed, p, offset)?;
        }
        let dtype = self.graph.node(inputs[0]).dtype;
        let probabilities = self.cast(probabilities, dtype)?;
        self.graph.set_part(4);
        let values = self.cast(inputs[2], dtype)?;
        let product = Op::Matmul { transpose_a: false, transpose_b: false };
        Ok(vec![self.graph.push(product, &[probabilities, values])?])
    }

    fn quantize(&mut self, x: NodeId, largest: f64, to: Dtype) -> Result<Vec<NodeId>, GraphError> {
        let x = self.cast(x, Dtype::F32)?;
        let absmax = self.reduce(ReduceOp::AbsMax, x)?;
        let step = self.constant(1.0 / largest)?;
        let scale = self.mul(absmax, step)?;
        let zero = self.constant(0.0)?;
        let one = self.constant(1.0)?;
        // A row of zeros keeps the scale 0 and divides by 1: its bytes are zeros.
        let empty = self.compare(CompareOp::Eq, scale, zero)?;
        let divisor = self.select(empty, one, scale)?;
        let inverse = self.unary(UnaryOp::Reciprocal, divisor)?;
        let scaled = self.mul(x, inverse)?;
        Ok(vec![self.cast(scaled, to)?, scale])
    }

    /// Parts: 0 the product, 1 scales, bias and cast.
    fn quantized_linear(&mut self, inputs: &[NodeId], dtype: Dtype) -> Result<Vec<NodeId>, GraphError> {
        let product = Op::Matmul { transpose_a: false, transpose_b: true };
        let sums = self.graph.push(product, &[inputs[0], inputs[2]])?;
        self.graph.set_part(1);
        let scaled = self.mul(sums, inputs[1])?;
        let mut y = self.mul(scaled, inputs[3])?;
        if let Some(&bias) = inputs.get(4) {
            let bias = self.cast(bias, Dtype::F32)?;
            y = self.add(y, bias)?;
        }
        Ok(vec![self.cast(y, dtype)?])
    }

    /// Parts: 0 the products, each row with the weight that is picked for it, 1 scales, bias and cast.
    fn expert_linear(&mut self, inputs: &[NodeId], dtype: Dtype) -> Result<Vec<NodeId>, GraphError> {
        let weights = self.graph.node(inputs[3]).shape.clone();
        let (rows, inner) = (self.graph.node(inputs[0]).shape[0], weights[2]);
        let table = self.reshape(inputs[3], [weights[0], weights[1] * inner])?;
        let picked = self.graph.push(Op::Gather, &[table, inputs[2]])?;
        let picked = self.reshape(picked, [rows, weights[1], inner])?;
        let x = self.reshape(inputs[0], [rows, 1, inner])?;
        let sums = self.graph.push(Op::Matmul { transpose_a: false, transpose_b: true }, &[x, picked])?;
        let sums = self.reshape(sums, [rows, weights[1]])?;
        self.graph.set_part(1);
        let scaled = self.mul(sums, inputs[1])?;
        let scales = self.graph.push(Op::Gather, &[inputs[4], inputs[2]])?;
        let mut y = self.mul(scaled, scales)?;
        if let Some(&biases) = inputs.get(5) {
            let bias = self.graph.push(Op::Gather, &[biases, inputs[2]])?;
            let bias = self.cast(bias, Dtype::F32)?;
            y = self.add(y, bias)?;
        }
        Ok(vec![self.cast(y, dtype)?])
    }

    fn cross_entropy(&mut self, inputs: &[NodeId]) -> Result<Vec<NodeId>, GraphError> {
        let logits = self.cast(inputs[0], Dtype::F32)?;
        let shape = self.graph.node(logits).shape.clone();
        let shift = self.finite_max(logits)?;
        let shifted = self.sub(logits, shift)?;
        let exponentials = self.unary(UnaryOp::Exp, shifted)?;
        let sum = self.reduce(ReduceOp::Sum, exponentials)?;
        let log = self.unary(UnaryOp::Log, sum)?;
        let logsumexp = self.add(log, shift)?;
        let target = self.graph.push(Op::View(View::Reshape(shape.with_cols(1))), &[inputs[1]])?;
        let column = self.graph.push(Op::Iota { axis: shape.rank() - 1, shape: shape.clone() }, &[])?;
        let is_target = self.compare(CompareOp::Eq, column, target)?;
        let zero = self.constant(0.0)?;
        let picked = self.select(is_target, logits, zero)?;
        let picked = self.reduce(ReduceOp::Sum, picked)?;
        let loss = self.sub(logsumexp, picked)?;
        // Scaled before the sum, so that the sum over rows is the last step and one kernel holds it all.
        let inverse_rows = self.constant(1.0 / shape.rows() as f64)?;
        let share = self.mul(loss, inverse_rows)?;
        let total = self.graph.push(Op::ColumnSum, &[share])?;
        let mean = self.graph.push(Op::View(View::Reshape(Shape::scalar())), &[total])?;
        Ok(vec![mean, logsumexp])
    }

    fn reshape(&mut self, x: NodeId, shape: impl Into<Shape>) -> Value {
        self.graph.push(Op::View(View::Reshape(shape.into())), &[x])
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
                let square = self.mul(x, x)?;
                let cubic = self.constant(0.044715)?;
                let one = self.constant(1.0)?;
                let scaled = self.mul(square, cubic)?;
                let factor = self.add(scaled, one)?;
                let slope = self.constant(2.0 * (2.0 / PI).sqrt())?;
                let steep = self.mul(x, slope)?;
                let argument = self.mul(steep, factor)?;
                let gate = self.unary(UnaryOp::Sigmoid, argument)?;
                self.mul(x, gate)
            }
            Activation::GeluErf => {
                let inverse_root = self.constant(FRAC_1_SQRT_2)?;
                let scaled = self.mul(x, inverse_root)?;
                let erf = self.unary(UnaryOp::Erf, scaled)?;
                let one = self.constant(1.0)?;
                let half = self.constant(0.5)?;
                let sum = self.add(erf, one)?;
                let halved = self.mul(x, half)?;
                self.mul(halved, sum)
            }
            Activation::Silu => {
                let gate = self.unary(UnaryOp::Sigmoid, x)?;
                self.mul(x, gate)
            }
            Activation::Relu => {
                let zero = self.constant(0.0)?;
                self.binary(BinaryOp::Max, x, zero)
            }
        }
    }

    fn gated(&mut self, inputs: &[NodeId], activation: Activation) -> Result<Vec<NodeId>, GraphError> {
        let gate = inputs[1];
        self.on_f32(inputs[0], |e, x| {
            let y = e.activation(activation, x)?;
            let gate = e.cast(gate, Dtype::F32)?;
            e.mul(y, gate)
        })
    }

    /// No node where the dtype is right already.
    fn cast(&mut self, x: NodeId, dtype: Dtype) -> Value {
        if self.graph.node(x).dtype == dtype { Ok(x) } else { self.graph.push(Op::Cast(dtype), &[x]) }
    }

    fn constant(&mut self, value: f64) -> Value {
        self.graph.push(Op::Const { value, dtype: Dtype::F32 }, &[])
    }

    fn unary(&mut self, op: UnaryOp, x: NodeId) -> Value {
        self.graph.push(Op::Unary(op), &[x])
    }

    fn binary(&mut self, op: BinaryOp, a: NodeId, b: NodeId) -> Value {
        self.graph.push(Op::Binary(op), &[a, b])
    }

    fn add(&mut self, a: NodeId, b: NodeId) -> Value {
        self.binary(BinaryOp::Add, a, b)
    }

    fn sub(&mut self, a: NodeId, b: NodeId) -> Value {
        self.binary(BinaryOp::Sub, a, b)
    }

    fn mul(&mut self, a: NodeId, b: NodeId) -> Value {
        self.binary(BinaryOp::Mul, a, b)
    }

    fn compare(&mut self, op: CompareOp, a: NodeId, b: NodeId) -> Value {
        self.graph.push(Op::Compare(op), &[a, b])
    }

    fn select(&mut self, condition: NodeId, a: NodeId, b: NodeId) -> Value {
        self.graph.push(Op::Select, &[condition, a, b])
    }

    fn reduce(&mut self, op: ReduceOp, x: NodeId) -> Value {
        self.graph.push(Op::RowReduce(op), &[x])
    }
}

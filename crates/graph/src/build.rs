//! The builder: one method per primitive and one per composite. Each is one call; each refuses bad operands with a typed error.

use crate::activation::{Activation, Gelu};
use crate::block::Block;
use crate::composite::{Composite, Mask, ScoreWork};
use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::graph::{Graph, is_name, readable};
use crate::node::NodeId;
use crate::op::{BinaryOp, CompareOp, InputKind, Op, Opaque, ReduceOp, UnaryOp, View};
use crate::shape::Shape;

type Value = Result<NodeId, GraphError>;

/// Results of a layer norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerNormResult {
    /// the normed tensor
    pub y: NodeId,
    /// mean of each row, `f32`
    pub mean: NodeId,
    /// reciprocal standard deviation of each row, `f32`
    pub rstd: NodeId,
}

/// Results of an RMS norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RmsNormResult {
    /// the normed tensor
    pub y: NodeId,
    /// reciprocal root mean square of each row, `f32`
    pub rstd: NodeId,
}

/// Results of a row quantisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantized {
    /// the bytes
    pub q: NodeId,
    /// the scale, one per row, `f32`
    pub scale: NodeId,
}

/// Results of a cross entropy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CrossEntropyResult {
    /// mean over rows, a scalar; for a linear layer, one per row
    pub loss: NodeId,
    /// log of the sum of exponentials of each row, `f32`
    pub logsumexp: NodeId,
}

/// What is done to the scores of attention; by default nothing. See [`ScoreWork`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ScoreOptions {
    /// `cap tanh(s / cap)`
    pub soft_cap: Option<f64>,
    /// hides keys this many positions or more from the query's own
    pub window: Option<usize>,
    /// the operand of an additive mask
    pub mask: Option<NodeId>,
    /// the operand of a cached mask
    pub positions: Option<NodeId>,
    /// adds `slope (key - position)`: `f32[heads, 1, 1]`
    pub slopes: Option<NodeId>,
    /// added to the scores, which it broadcasts to
    pub bias: Option<NodeId>,
    /// hides keys of other documents: `i32[keys]` or `i32[batch, keys]`
    pub documents: Option<NodeId>,
}

/// The cost of an opaque operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpaqueCost {
    /// Total bytes moved, if not operands and results once each.
    pub bytes: Option<u64>,
    /// Floating point operations.
    pub flops: u64,
    /// Whether each element depends only on the same element of the operands.
    pub elementwise: bool,
}

impl Graph {
    /// An input tensor of each run.
    pub fn input(&mut self, name: &str, dtype: Dtype, shape: impl Into<Shape>) -> Value {
        self.input_of(InputKind::Data, name, dtype, shape)
    }

    /// A parameter of the model.
    pub fn weight(&mut self, name: &str, dtype: Dtype, shape: impl Into<Shape>) -> Value {
        self.input_of(InputKind::Weight, name, dtype, shape)
    }

    /// An input of either kind.
    pub fn input_of(&mut self, kind: InputKind, name: &str, dtype: Dtype, shape: impl Into<Shape>) -> Value {
        let shape = shape.into();
        if !is_name(name) {
            return Err(GraphError::BadName(name.to_string()));
        }
        if self.find(name).is_some() {
            return Err(GraphError::DuplicateName(name.to_string()));
        }
        let id = self.push(Op::Input { kind, dtype, shape }, &[])?;
        self.set_node_name(id, name)?;
        Ok(id)
    }

    /// A scalar constant.
    pub fn constant(&mut self, value: f64, dtype: Dtype) -> Value {
        self.push(Op::Const { value, dtype }, &[])
    }

    /// `i32` indices along an axis.
    pub fn iota(&mut self, shape: impl Into<Shape>, axis: usize) -> Value {
        self.push(Op::Iota { axis, shape: shape.into() }, &[])
    }

    /// True where an element is kept; see [`Op::Random`].
    pub fn random(&mut self, seed: NodeId, shape: impl Into<Shape>, drop: f64, offset: u32) -> Value {
        self.push(Op::Random { drop, offset, shape: shape.into() }, &[seed])
    }

    /// A function of one value.
    pub fn unary(&mut self, op: UnaryOp, x: NodeId) -> Value {
        self.push(Op::Unary(op), &[x])
    }

    /// A function of two values.
    pub fn binary(&mut self, op: BinaryOp, a: NodeId, b: NodeId) -> Value {
        self.push(Op::Binary(op), &[a, b])
    }

    /// `a + b`
    pub fn add(&mut self, a: NodeId, b: NodeId) -> Value {
        self.binary(BinaryOp::Add, a, b)
    }

    /// `a - b`
    pub fn sub(&mut self, a: NodeId, b: NodeId) -> Value {
        self.binary(BinaryOp::Sub, a, b)
    }

    /// `a * b`
    pub fn mul(&mut self, a: NodeId, b: NodeId) -> Value {
        self.binary(BinaryOp::Mul, a, b)
    }

    /// `x * factor`
    pub fn scale(&mut self, x: NodeId, factor: f64) -> Value {
        self.check_node("scale", x)?;
        let factor = self.constant(factor, self.node(x).dtype)?;
        self.mul(x, factor)
    }

    /// A comparison.
    pub fn compare(&mut self, op: CompareOp, a: NodeId, b: NodeId) -> Value {
        self.push(Op::Compare(op), &[a, b])
    }

    /// `condition ? a : b`
    pub fn select(&mut self, condition: NodeId, a: NodeId, b: NodeId) -> Value {
        self.push(Op::Select, &[condition, a, b])
    }

    /// To another dtype.
    pub fn cast(&mut self, x: NodeId, dtype: Dtype) -> Value {
        self.push(Op::Cast(dtype), &[x])
    }

    /// A reduction over the last axis, which stays with size 1.
    pub fn reduce(&mut self, op: ReduceOp, x: NodeId) -> Value {
        self.push(Op::RowReduce(op), &[x])
    }

    /// Sum over all axes but the last.
    pub fn column_sum(&mut self, x: NodeId) -> Value {
        self.push(Op::ColumnSum, &[x])
    }

    /// Matrix product; see [`Op::Matmul`].
    pub fn matmul(&mut self, a: NodeId, b: NodeId) -> Value {
        self.push(Op::Matmul { transpose_a: false, transpose_b: false }, &[a, b])
    }

    /// Matrix product of operands that may be stored transposed.
    pub fn matmul_transposed(&mut self, a: NodeId, b: NodeId, transpose_a: bool, transpose_b: bool) -> Value {
        self.push(Op::Matmul { transpose_a, transpose_b }, &[a, b])
    }

    /// Rows of a table: an embedding.
    pub fn gather(&mut self, table: NodeId, indices: NodeId) -> Value {
        self.push(Op::Gather, &[table, indices])
    }

    /// Rows summed into a table of `rows` rows.
    pub fn scatter_add(&mut self, indices: NodeId, updates: NodeId, rows: usize) -> Value {
        self.push(Op::ScatterAdd { rows }, &[indices, updates])
    }

    /// A cache with rows written from each sequence's position on; see [`Op::Append`].
    pub fn append(&mut self, cache: NodeId, rows: NodeId, positions: NodeId, batch: usize) -> Value {
        self.push(Op::Append { batch }, &[cache, rows, positions])
    }

    /// The same elements in another shape.
    pub fn reshape(&mut self, x: NodeId, shape: impl Into<Shape>) -> Value {
        self.push(Op::View(View::Reshape(shape.into())), &[x])
    }

    /// Axes in another order.
    pub fn transpose(&mut self, x: NodeId, permutation: &[usize]) -> Value {
        self.push(Op::View(View::Transpose(permutation.to_vec())), &[x])
    }

    /// A range of one axis.
    pub fn slice(&mut self, x: NodeId, axis: usize, start: usize, length: usize) -> Value {
        self.push(Op::View(View::Slice { axis, start, length }), &[x])
    }

    /// Repeats axes of size 1.
    pub fn broadcast(&mut self, x: NodeId, shape: impl Into<Shape>) -> Value {
        self.push(Op::View(View::Broadcast(shape.into())), &[x])
    }

    /// Tensors end to end along an axis.
    pub fn concat(&mut self, parts: &[NodeId], axis: usize) -> Value {
        self.push(Op::Concat { axis }, parts)
    }

    /// The identity, through which no gradient flows.
    pub fn stop_gradient(&mut self, x: NodeId) -> Value {
        self.push(Op::StopGradient, &[x])
    }

    /// An operation modelled only by its cost: it is analysed with the rest of the graph and never run. `results` give the
    /// dtype and shape of each result, `cost` their total cost. Characters that the text form could not
    /// read back become `_` in the name.
    pub fn opaque(
        &mut self,
        name: &str,
        inputs: &[NodeId],
        results: &[(Dtype, Shape)],
        cost: OpaqueCost,
    ) -> Result<Vec<NodeId>, GraphError> {
        let name = match readable(name) {
            clean if clean.is_empty() => "opaque".to_string(),
            clean => clean,
        };
        let op = |index: usize| {
            let (dtype, shape) = results[index].clone();
            // The first result carries the cost of the whole.
            let (bytes, flops) = if index == 0 { (cost.bytes, cost.flops) } else { (Some(0), 0) };
            Op::Opaque(Opaque { name: name.clone(), dtype, shape, bytes, flops, elementwise: cost.elementwise })
        };
        match results.len() {
            0 => {
                let (attribute, expected) = ("results", "at least 1".to_string());
                Err(GraphError::Attribute { op: name, attribute, expected, got: "0".to_string() })
            }
            1 => Ok(vec![self.push(op(0), inputs)?]),
            count => {
                let block = Block::named(&name);
                self.block(block, |graph| (0..count).map(|index| graph.push(op(index), inputs)).collect())
            }
        }
    }

    /// `(x - mean) rstd w + b` over the last axis.
    pub fn layer_norm(&mut self, x: NodeId, w: NodeId, b: NodeId, eps: f64) -> Result<LayerNormResult, GraphError> {
        let out = self.call(Composite::LayerNorm { eps }, &[x, w, b])?;
        Ok(LayerNormResult { y: out[0], mean: out[1], rstd: out[2] })
    }

    /// `x rstd w` over the last axis.
    pub fn rms_norm(&mut self, x: NodeId, w: NodeId, eps: f64) -> Result<RmsNormResult, GraphError> {
        let out = self.call(Composite::RmsNorm { eps }, &[x, w])?;
        Ok(RmsNormResult { y: out[0], rstd: out[1] })
    }

    /// Softmax over the last axis.
    pub fn softmax(&mut self, x: NodeId) -> Value {
        self.call_one(Composite::Softmax, &[x])
    }

    /// `-inf` beyond the causal border of the last two axes.
    pub fn causal_mask(&mut self, x: NodeId) -> Value {
        self.call_one(Composite::CausalMask, &[x])
    }

    /// An activation.
    pub fn activation(&mut self, x: NodeId, activation: Activation) -> Value {
        self.call_one(Composite::Activation(activation), &[x])
    }

    /// GELU.
    pub fn gelu(&mut self, x: NodeId, kind: Gelu) -> Value {
        self.activation(x, kind.into())
    }

    /// `x sigmoid(x)`
    pub fn silu(&mut self, x: NodeId) -> Value {
        self.activation(x, Activation::Silu)
    }

    /// `max(x, 0)`
    pub fn relu(&mut self, x: NodeId) -> Value {
        self.activation(x, Activation::Relu)
    }

    /// `silu(x) gate`
    pub fn swiglu(&mut self, x: NodeId, gate: NodeId) -> Value {
        self.call_one(Composite::Swiglu, &[x, gate])
    }

    /// `gelu(x) gate`
    pub fn geglu(&mut self, x: NodeId, gate: NodeId, kind: Gelu) -> Value {
        self.call_one(Composite::Geglu { kind }, &[x, gate])
    }

    /// Drops elements with probability `p` and scales the others by `1 / (1 - p)`.
    pub fn dropout(&mut self, x: NodeId, seed: NodeId, p: f64, offset: u32) -> Value {
        self.call_one(Composite::Dropout { p, offset }, &[x, seed])
    }

    /// `x w + b`, `w: [in, out]`.
    pub fn linear(&mut self, x: NodeId, w: NodeId, b: Option<NodeId>) -> Value {
        let inputs: Vec<NodeId> = [x, w].into_iter().chain(b).collect();
        self.call_one(Composite::Linear { transposed: false }, &inputs)
    }

    /// `softmax(scale q k^T + mask)`, materialised.
    pub fn attention_scores(&mut self, q: NodeId, k: NodeId, mask: Option<NodeId>, kind: Mask, scale: f64) -> Value {
        let inputs: Vec<NodeId> = [q, k].into_iter().chain(mask).collect();
        self.call_one(Composite::AttentionScores { mask: kind, scale }, &inputs)
    }

    /// `softmax(scale q k^T + mask) v` over `[batch, heads, sequence, features]`.
    pub fn attention(&mut self, q: NodeId, k: NodeId, v: NodeId, mask: Mask, scale: f64) -> Value {
        self.worked_attention([q, k, v], mask, scale, ScoreOptions::default())
    }

    /// The same with work on the scores before the softmax: a soft cap, slopes, a bias, a window, documents.
    pub fn worked_attention(&mut self, operands: [NodeId; 3], mask: Mask, scale: f64, scores: ScoreOptions) -> Value {
        let ScoreOptions { soft_cap, window, mask: added, positions, slopes, bias, documents } = scores;
        let work = ScoreWork {
            soft_cap,
            window,
            slopes: slopes.is_some(),
            bias: bias.is_some(),
            documents: documents.is_some(),
        };
        let composite = Composite::Attention { mask, scale, p: 0.0, offset: 0, work };
        let rest = [added, positions, slopes, bias, documents].into_iter().flatten();
        let inputs: Vec<NodeId> = operands.into_iter().chain(rest).collect();
        self.call_one(composite, &inputs)
    }

    /// The same over a cache `k, v: [batch, heads, capacity, features]`: query `i` of sequence `b` sees key `j` iff
    /// `j <= positions[b] + i`.
    pub fn cached_attention(&mut self, [q, k, v]: [NodeId; 3], positions: NodeId, scale: f64) -> Value {
        let options = ScoreOptions { positions: Some(positions), ..ScoreOptions::default() };
        self.worked_attention([q, k, v], Mask::Cached, scale, options)
    }

    /// Rows as `i8` with a scale per row.
    pub fn quantize_int8(&mut self, x: NodeId) -> Result<Quantized, GraphError> {
        let out = self.call(Composite::QuantizeInt8, &[x])?;
        Ok(Quantized { q: out[0], scale: out[1] })
    }

    /// `q scale`
    pub fn dequantize(&mut self, q: NodeId, scale: NodeId, dtype: Dtype) -> Value {
        self.call_one(Composite::Dequantize { dtype }, &[q, scale])
    }

    /// `(x w^T) xs ws + bias` from bytes: `x` by rows, `w: [out, in]` by output columns.
    pub fn quantized_linear(&mut self, x: Quantized, w: Quantized, bias: Option<NodeId>, dtype: Dtype) -> Value {
        let inputs: Vec<NodeId> = [x.q, x.scale, w.q, w.scale].into_iter().chain(bias).collect();
        self.call_one(Composite::QuantizedLinear { dtype }, &inputs)
    }

    /// The same with weights `w: [experts, out, in]`, where row `i` of `x: [rows, in]` uses expert `experts[i]`; scales and bias are
    /// `[experts, out]`. A row that goes to several experts is given once for each.
    pub fn expert_linear(
        &mut self,
        x: Quantized,
        experts: NodeId,
        w: Quantized,
        bias: Option<NodeId>,
        dtype: Dtype,
    ) -> Value {
        let inputs: Vec<NodeId> = [x.q, x.scale, experts, w.q, w.scale].into_iter().chain(bias).collect();
        self.call_one(Composite::ExpertLinear { dtype }, &inputs)
    }

    /// `x w[expert]^T + bias[expert]` of floats with weights `w: [n, out, in]`: row `i` of `x: [rows, in]` goes to `experts[i]`, or to each of
    /// `experts[i, ..]`; `x: [rows, choices, in]` has a row for each of these.
    pub fn routed_linear(&mut self, x: NodeId, experts: NodeId, w: NodeId, bias: Option<NodeId>) -> Value {
        let inputs: Vec<NodeId> = [x, experts, w].into_iter().chain(bias).collect();
        self.call_one(Composite::RoutedLinear, &inputs)
    }

    /// `x: [.., choices, columns]` summed over choices, each times its one of `weights: [.., choices]`, in their order.
    pub fn weighted_sum(&mut self, x: NodeId, weights: NodeId) -> Value {
        self.call_one(Composite::WeightedSum, &[x, weights])
    }

    /// Mean cross entropy of logits `[.., classes]` and targets `[..]`.
    pub fn cross_entropy(&mut self, logits: NodeId, targets: NodeId) -> Result<CrossEntropyResult, GraphError> {
        let out = self.call(Composite::CrossEntropy, &[logits, targets])?;
        Ok(CrossEntropyResult { loss: out[0], logsumexp: out[1] })
    }

    /// Cross entropy of each row of `x w^T`, computed for a chunk of rows at a time, so that all logits are never stored: `x [rows, in]`, `w [classes, in]`, `targets [rows]`.
    /// Both results are `f32[rows, 1]`; a row whose target is `ignored` has the loss 0.
    pub fn linear_cross_entropy(
        &mut self,
        operands: [NodeId; 3],
        smoothing: f64,
        ignored: Option<i32>,
    ) -> Result<CrossEntropyResult, GraphError> {
        let out = self.call(Composite::LinearCrossEntropy { smoothing, ignored }, &operands)?;
        Ok(CrossEntropyResult { loss: out[0], logsumexp: out[1] })
    }

    fn call_one(&mut self, composite: Composite, inputs: &[NodeId]) -> Value {
        Ok(self.call(composite, inputs)?[0])
    }
}

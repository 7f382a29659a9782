//! Composites: the operations people name, each defined once, by its expansion into primitives.
//!
//! Inputs are widened to `f32` first and results narrowed last, so statistics and intermediates are `f32` whatever the
//! storage type. Cost, lowering and gradients all derive from what is written here.

use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::graph::{Graph, NodeId};
use crate::op::{BinaryOp, CompareOp, Op, ReduceOp, UnaryOp, View};
use crate::shape::Shape;

/// The two forms of GELU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gelu {
    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, GPT-2's.
    Tanh,
    /// `x/2 (1 + erf(x / sqrt 2))`
    Erf,
}

/// What a softmax or attention leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mask {
    /// Nothing.
    Full,
    /// Columns beyond the row's position, counted from the end: query `i` of `m` sees key `j` of `n` iff `j <= i + n - m`.
    Causal,
    /// An operand that is added to the scores.
    Additive,
    /// Keys after the query's own place, an operand `i32[batch]` giving each sequence's first place: query `i` of sequence
    /// `b` sees key `j` iff `j <= positions[b] + i`.
    Cached,
}

impl Mask {
    /// Operands that it takes.
    fn operands(self) -> usize {
        matches!(self, Mask::Additive | Mask::Cached) as usize
    }
}

/// A composite and its attributes, named in each variant's text. Operands are in the call.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Composite {
    /// `(x - mean) rstd w + b`. Operands: x, w, b. Results: y, mean, rstd.
    LayerNorm { eps: f64 },
    /// `x rstd w`. Operands: x, w. Results: y, rstd.
    RmsNorm { eps: f64 },
    /// `e^(x - max) / sum`; a row of `-inf` gives zeros. Operand: x.
    Softmax,
    /// `-inf` beyond the causal border. Operand: scores.
    CausalMask,
    /// Operand: x.
    Gelu { kind: Gelu },
    /// `x sigmoid(x)`. Operand: x.
    Silu,
    /// `max(x, 0)`. Operand: x.
    Relu,
    /// `silu(x) g`. Operands: x, g.
    Swiglu,
    /// `gelu(x) g`. Operands: x, g.
    Geglu { kind: Gelu },
    /// `x / (1 - p)` where kept, else 0. Operands: x, seed.
    Dropout { p: f64, offset: u32 },
    /// `x w + b`. Operands: x, w `[in, out]` (`[out, in]` if transposed), optionally b.
    Linear { transposed: bool },
    /// `softmax(scale q k^T + mask)`. Operands: q, k `[.., s, d]`, the mask if additive, positions if cached.
    AttentionScores { mask: Mask, scale: f64 },
    /// `dropout(softmax(scale q k^T + mask)) v`. Operands: q, k, v, the mask if additive or
    /// positions if cached, the seed if `p > 0`.
    Attention { mask: Mask, scale: f64, p: f64, offset: u32 },
    /// Rows as `i8` with a scale a row: `scale = absmax / 127`. A row of zeros has zeros and the scale 0; the scale of a row
    /// with a NaN or an infinity is NaN or infinite, so that what it scales is NaN. Operand: x. Results: q, scale.
    QuantizeInt8,
    /// Rows as `f8e4m3` with a scale a row: `scale = absmax / 448`. Operand: x. Results: q, scale.
    QuantizeFp8,
    /// `q scale`. Operands: q (`i8`), scale.
    Dequantize { dtype: Dtype },
    /// `(x w^T) xs ws + b` from bytes with a scale a row of x and of w; the sums of bytes are exact. Operands: x (`i8`), xs
    /// `[.., 1]`, w (`i8[out, in]`), ws `[out]`, optionally b.
    QuantizedLinear { dtype: Dtype },
    /// The same with a weight for each row, one of several: row `i` goes to expert `experts[i]`. Operands: x (`i8[rows, in]`),
    /// xs `[rows, 1]`, experts (`i32[rows]`), w (`i8[n, out, in]`), ws `[n, out]`, optionally b `[n, out]`.
    ExpertLinear { dtype: Dtype },
    /// Mean over rows of `log sum e^x - x[target]`. Operands: logits, targets. Results: loss, logsumexp.
    CrossEntropy,
}

impl Composite {
    /// The word of the text form and of the reports.
    pub fn name(&self) -> &'static str {
        match self {
            Composite::LayerNorm { .. } => "layer_norm",
            Composite::RmsNorm { .. } => "rms_norm",
            Composite::Softmax => "softmax",
            Composite::CausalMask => "causal_mask",
            Composite::Gelu { .. } => "gelu",
            Composite::Silu => "silu",
            Composite::Relu => "relu",
            Composite::Swiglu => "swiglu",
            Composite::Geglu { .. } => "geglu",
            Composite::Dropout { .. } => "dropout",
            Composite::Linear { .. } => "linear",
            Composite::AttentionScores { .. } => "attention_scores",
            Composite::Attention { .. } => "attention",
            Composite::QuantizeInt8 => "quantize_int8",
            Composite::QuantizeFp8 => "quantize_fp8",
            Composite::Dequantize { .. } => "dequantize",
            Composite::QuantizedLinear { .. } => "quantized_linear",
            Composite::ExpertLinear { .. } => "expert_linear",
            Composite::CrossEntropy => "cross_entropy",
        }
    }

    /// How many operands it takes: least and most.
    pub fn arity(&self) -> (usize, usize) {
        match self {
            Composite::LayerNorm { .. } => (3, 3),
            Composite::RmsNorm { .. } => (2, 2),
            Composite::Softmax | Composite::CausalMask | Composite::Silu | Composite::Relu => (1, 1),
            Composite::Gelu { .. } | Composite::QuantizeInt8 | Composite::QuantizeFp8 => (1, 1),
            Composite::Swiglu | Composite::Geglu { .. } | Composite::Dropout { .. } => (2, 2),
            Composite::Dequantize { .. } | Composite::CrossEntropy => (2, 2),
            Composite::Linear { .. } => (2, 3),
            Composite::QuantizedLinear { .. } => (4, 5),
            Composite::ExpertLinear { .. } => (5, 6),
            Composite::AttentionScores { mask, .. } => {
                let n = 2 + mask.operands();
                (n, n)
            }
            Composite::Attention { mask, p, .. } => {
                let n = 3 + mask.operands() + (*p > 0.0) as usize;
                (n, n)
            }
        }
    }
}

impl Graph {
    /// Calls a composite: checks operands and attributes, appends the expansion, returns the results.
    pub fn call(&mut self, composite: Composite, inputs: &[NodeId]) -> Result<Vec<NodeId>, GraphError> {
        for &input in inputs {
            self.check_node(composite.name(), input)?;
        }
        let (least, most) = composite.arity();
        if inputs.len() < least || inputs.len() > most {
            let count = if least == most { format!("{least} operands") } else { format!("{least} or {most} operands") };
            return Err(self.refuse(&composite, inputs, &count));
        }
        check_attributes(&composite)?;
        self.check_operands(&composite, inputs)?;
        self.composite_call(composite, inputs, |graph| Expansion { graph }.expand(composite, inputs))
    }

    fn refuse(&self, composite: &Composite, inputs: &[NodeId], expected: &str) -> GraphError {
        GraphError::Operands {
            op: composite.name().to_string(),
            expected: expected.to_string(),
            operands: inputs.iter().map(|&id| self.operand(id)).collect(),
        }
    }

    /// What the expansion's primitives would refuse too, but in the words of the composite.
    fn check_operands(&self, composite: &Composite, inputs: &[NodeId]) -> Result<(), GraphError> {
        let shape = |i: usize| &self.node(inputs[i]).shape;
        let dtype = |i: usize| self.node(inputs[i]).dtype;
        let ensure = |holds: bool, expected: &str| {
            if holds { Ok(()) } else { Err(self.refuse(composite, inputs, expected)) }
        };
        let float_first = !matches!(
            composite,
            Composite::Dequantize { .. } | Composite::QuantizedLinear { .. } | Composite::ExpertLinear { .. }
        );
        ensure(!float_first || dtype(0).is_float(), "a float operand (f32, f16 or bf16)")?;
        match composite {
            Composite::LayerNorm { .. } | Composite::RmsNorm { .. } => {
                ensure(shape(0).rank() >= 1 && shape(0).cols() > 0, "a tensor with a last axis that is not empty")?;
                for i in 1..inputs.len() {
                    ensure(*shape(i) == Shape::from([shape(0).cols()]), "weights of the size of the last axis")?;
                    ensure(dtype(i).is_float(), "float weights")?;
                }
                Ok(())
            }
            Composite::Softmax | Composite::QuantizeInt8 | Composite::QuantizeFp8 => {
                ensure(shape(0).rank() >= 1 && shape(0).cols() > 0, "a tensor with a last axis that is not empty")
            }
            Composite::CausalMask => ensure(shape(0).rank() >= 2, "scores of rank 2 or more"),
            Composite::Gelu { .. } | Composite::Silu | Composite::Relu => Ok(()),
            Composite::Swiglu | Composite::Geglu { .. } => {
                ensure(shape(0) == shape(1) && dtype(0) == dtype(1), "two tensors of one shape and dtype")
            }
            Composite::Dropout { .. } => {
                ensure(dtype(1) == Dtype::I32 && shape(1).elements() == 1, "a tensor and one i32 seed")
            }
            Composite::Linear { transposed } => {
                ensure(shape(0).rank() >= 1 && shape(1).rank() == 2, "x [.., in] and a weight of rank 2")?;
                let (rows, out) = if *transposed { (shape(1)[1], shape(1)[0]) } else { (shape(1)[0], shape(1)[1]) };
                ensure(shape(0).cols() == rows, "a weight whose inner size is the last axis of x")?;
                ensure(shape(0).rank() >= 2, "x of rank 2 or more")?;
                ensure(inputs.len() < 3 || *shape(2) == Shape::from([out]), "a bias of the weight's outer size")?;
                ensure((1..inputs.len()).all(|i| dtype(i) == dtype(0)), "operands of one dtype")
            }
            Composite::AttentionScores { .. } | Composite::Attention { .. } => {
                let (q, k) = (shape(0), shape(1));
                ensure(q.rank() >= 2 && k.rank() == q.rank(), "q and k of one rank, at least 2")?;
                ensure(
                    q[..q.rank() - 2] == k[..k.rank() - 2] && q.cols() == k.cols(),
                    "q [.., m, d] and k [.., n, d]",
                )?;
                ensure(k[k.rank() - 2] > 0 && q.cols() > 0, "at least one key and one feature")?;
                match composite {
                    Composite::Attention { .. } => {
                        let narrow = dtype(0) == Dtype::F32 && dtype(1).is_float();
                        let fits = dtype(2) == dtype(1) && (dtype(1) == dtype(0) || narrow);
                        ensure(fits, "operands of one dtype, or f32 queries over 16-bit keys and values")?;
                    }
                    _ => ensure(dtype(1) == dtype(0), "operands of one dtype")?,
                }
                let positions = match composite {
                    Composite::AttentionScores { mask: Mask::Cached, .. } => 2,
                    Composite::Attention { mask: Mask::Cached, .. } => 3,
                    _ => return Ok(()),
                };
                let given = q.rank() >= 3 && dtype(positions) == Dtype::I32 && shape(positions)[..] == q[..1];
                ensure(given, "q [batch, .., m, d] and an i32 position for each sequence")
            }
            Composite::Dequantize { dtype: to } => {
                ensure(dtype(0) == Dtype::I8 && dtype(1) == Dtype::F32 && to.is_float(), "i8 rows and f32 scales")
            }
            Composite::QuantizedLinear { dtype: to } => {
                let bytes = dtype(0) == Dtype::I8 && dtype(2) == Dtype::I8;
                ensure(bytes && dtype(1) == Dtype::F32 && dtype(3) == Dtype::F32, "i8 rows, each with f32 scales")?;
                ensure(shape(0).rank() >= 2 && shape(2).rank() == 2, "x [.., rows, in] and a weight [out, in]")?;
                ensure(shape(0).cols() == shape(2)[1], "a weight whose inner size is the last axis of x")?;
                ensure(*shape(1) == shape(0).with_cols(1), "a scale for each row of x, [.., rows, 1]")?;
                let columns = Shape::from([shape(2)[0]]);
                ensure(
                    (3..inputs.len()).all(|i| *shape(i) == columns),
                    "scales and a bias of the weight's outer size",
                )?;
                ensure(inputs.len() < 5 || dtype(4).is_float(), "a float bias")?;
                ensure(to.is_float(), "a float result")
            }
            Composite::ExpertLinear { dtype: to } => {
                let bytes = dtype(0) == Dtype::I8 && dtype(3) == Dtype::I8;
                ensure(bytes && dtype(1) == Dtype::F32 && dtype(4) == Dtype::F32, "i8 rows, each with f32 scales")?;
                ensure(shape(0).rank() == 2 && shape(3).rank() == 3, "x [rows, in] and weights [experts, out, in]")?;
                ensure(shape(0).cols() == shape(3).cols(), "weights whose inner size is the last axis of x")?;
                ensure(*shape(1) == shape(0).with_cols(1), "a scale for each row of x, [rows, 1]")?;
                let picked = dtype(2) == Dtype::I32 && shape(2)[..] == shape(0)[..1];
                ensure(picked, "an i32 expert for each row of x")?;
                let columns = &shape(3)[..2];
                let whole = (4..inputs.len()).all(|i| shape(i)[..] == *columns);
                ensure(whole, "scales and biases [experts, out] of the weights")?;
                ensure(inputs.len() < 6 || dtype(5).is_float(), "a float bias")?;
                ensure(to.is_float(), "a float result")
            }
            Composite::CrossEntropy => {
                ensure(shape(0).rank() >= 1 && shape(0).elements() > 0, "logits that are not empty")?;
                ensure(dtype(1) == Dtype::I32 && shape(1)[..] == *shape(0).leading(), "an i32 target for each row")
            }
        }
    }
}

fn check_attributes(composite: &Composite) -> Result<(), GraphError> {
    let bad = |attribute, expected: &str, got: f64| {
        let (op, expected) = (composite.name().to_string(), expected.to_string());
        Err(GraphError::Attribute { op, attribute, expected, got: got.to_string() })
    };
    match *composite {
        Composite::LayerNorm { eps } | Composite::RmsNorm { eps } if !(eps.is_finite() && eps >= 0.0) => {
            return bad("eps", "finite and not negative", eps);
        }
        Composite::Dropout { p, .. } if !(0.0..1.0).contains(&p) => return bad("p", "in [0, 1)", p),
        Composite::Attention { p, .. } if !(0.0..1.0).contains(&p) => return bad("p", "in [0, 1)", p),
        Composite::AttentionScores { scale, .. } | Composite::Attention { scale, .. } if !scale.is_finite() => {
            return bad("scale", "finite", scale);
        }
        _ => {}
    }
    Ok(())
}

/// Pushes the primitives of one composite.
struct Expansion<'a> {
    graph: &'a mut Graph,
}

type Value = Result<NodeId, GraphError>;

impl Expansion<'_> {
    fn expand(&mut self, composite: Composite, inputs: &[NodeId]) -> Result<Vec<NodeId>, GraphError> {
        match composite {
            Composite::LayerNorm { eps } => self.layer_norm(inputs, eps),
            Composite::RmsNorm { eps } => self.rms_norm(inputs, eps),
            Composite::Softmax => self.on_f32(inputs[0], |e, x| e.softmax(x)),
            Composite::CausalMask => self.on_f32(inputs[0], |e, x| e.causal_mask(x)),
            Composite::Gelu { kind } => self.on_f32(inputs[0], |e, x| e.gelu(x, kind)),
            Composite::Silu => self.on_f32(inputs[0], |e, x| e.silu(x)),
            Composite::Relu => self.on_f32(inputs[0], |e, x| e.relu(x)),
            Composite::Swiglu => self.gated(inputs, |e, x| e.silu(x)),
            Composite::Geglu { kind } => self.gated(inputs, |e, x| e.gelu(x, kind)),
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

    fn gelu(&mut self, x: NodeId, kind: Gelu) -> Value {
        match kind {
            // x/2 (1 + tanh u) is x sigmoid(2u): one exponential, and no cancellation where x is far below 0.
            Gelu::Tanh => {
                let square = self.mul(x, x)?;
                let cubic = self.constant(0.044715)?;
                let one = self.constant(1.0)?;
                let scaled = self.mul(square, cubic)?;
                let factor = self.add(scaled, one)?;
                let slope = self.constant(2.0 * (2.0 / std::f64::consts::PI).sqrt())?;
                let steep = self.mul(x, slope)?;
                let argument = self.mul(steep, factor)?;
                let gate = self.unary(UnaryOp::Sigmoid, argument)?;
                self.mul(x, gate)
            }
            Gelu::Erf => {
                let inverse_root = self.constant(std::f64::consts::FRAC_1_SQRT_2)?;
                let scaled = self.mul(x, inverse_root)?;
                let erf = self.unary(UnaryOp::Erf, scaled)?;
                let one = self.constant(1.0)?;
                let half = self.constant(0.5)?;
                let sum = self.add(erf, one)?;
                let halved = self.mul(x, half)?;
                self.mul(halved, sum)
            }
        }
    }

    fn silu(&mut self, x: NodeId) -> Value {
        let gate = self.unary(UnaryOp::Sigmoid, x)?;
        self.mul(x, gate)
    }

    fn relu(&mut self, x: NodeId) -> Value {
        let zero = self.constant(0.0)?;
        self.binary(BinaryOp::Max, x, zero)
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

    fn gated(
        &mut self,
        inputs: &[NodeId],
        activation: impl FnOnce(&mut Self, NodeId) -> Value,
    ) -> Result<Vec<NodeId>, GraphError> {
        let gate = inputs[1];
        self.on_f32(inputs[0], |e, x| {
            let y = activation(e, x)?;
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

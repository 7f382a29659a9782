//! Ready-made fused operations over tensors, forward and backward.
//!
//! Each takes the [`Engine`] that runs it. The first call with some shapes plans and compiles; the next ones only run.
//! Operands may have any strides in their leading axes.
//!
//! ```
//! use deuteron::{Activation, Dtype, Engine, Tensor, ops};
//! # fn main() -> Result<(), deuteron::Error> {
//! let engine = Engine::cpu();
//! let x = Tensor::from_f32(Dtype::F32, [2, 2], &[0.0, 1.0, 2.0, 3.0])?;
//! let y = ops::add_act(&engine, &x, &x, Activation::Relu)?;
//! assert_eq!(y.to_f32()?, [0.0, 2.0, 4.0, 6.0]);
//! # Ok(())
//! # }
//! ```

mod products;

pub use products::{
    AttentionOptions, Experts, Heads, Linear, LossOptions, LossOutput, QuantizedExperts, attention, attention_add_norm,
    attention_block, ffn, linear_act, linear_cross_entropy, moe, moe_int8, moe_int8_dequantized, norm_linear, qkv,
};

use deuteron_graph::{Activation, Gelu, Mask};

use crate::catalog::{self, Entry, FusedOp, Norm, OperandType};
use crate::engine::Engine;
use crate::error::Error;
use crate::tensor::Tensor;

/// A gradient and the operand it belongs to.
#[derive(Debug, Clone)]
pub struct Gradient {
    /// `x`, `w`, ...
    pub operand: String,
    /// of the operand's shape
    pub value: Tensor,
}

/// Results of a norm with its statistics.
#[derive(Debug, Clone)]
pub struct LayerNormOutput {
    /// the normed tensor
    pub y: Tensor,
    /// mean of each row
    pub mean: Tensor,
    /// reciprocal deviation of each row
    pub rstd: Tensor,
}

/// Results of an RMS norm with its statistic.
#[derive(Debug, Clone)]
pub struct RmsNormOutput {
    /// the normed tensor
    pub y: Tensor,
    /// reciprocal root mean square of each row
    pub rstd: Tensor,
}

/// A normed tensor and the sum it was made from.
#[derive(Debug, Clone)]
pub struct NormedSum {
    /// the normed tensor
    pub y: Tensor,
    /// the residual stream
    pub s: Tensor,
}

/// Quantised rows.
#[derive(Debug, Clone)]
pub struct QuantizedRows {
    /// the bytes
    pub q: Tensor,
    /// the scale, one per row
    pub scale: Tensor,
    /// the residual stream, if one was added
    pub s: Option<Tensor>,
}

/// Weights of a norm.
#[derive(Debug, Clone, Copy)]
pub struct NormWeights<'a> {
    /// the scale
    pub w: &'a Tensor,
    /// the shift: a layer norm has one, an RMS norm has none
    pub b: Option<&'a Tensor>,
    /// added to the variance
    pub eps: f64,
}

impl<'a> NormWeights<'a> {
    /// An op with this norm.
    fn op(&self, entry: &'static Entry) -> FusedOp {
        let norm = if self.b.is_some() { Norm::Layer } else { Norm::Rms };
        entry.with(|a| (a.norm, a.eps) = (norm, self.eps))
    }

    fn after(&self, first: &[&'a Tensor]) -> Vec<&'a Tensor> {
        first.iter().copied().chain([self.w]).chain(self.b).collect()
    }
}

/// Dropout: its probability and its seed, an `i32` scalar tensor.
#[derive(Debug, Clone, Copy)]
pub struct Dropout<'a> {
    /// probability that an element is dropped
    pub p: f64,
    /// the seed
    pub seed: &'a Tensor,
}

/// Runs any op of the catalogue. Results are those of its forward graph, in order.
pub fn forward(engine: &Engine, op: &FusedOp, operands: &[&Tensor]) -> Result<Vec<Tensor>, Error> {
    engine.call(format!("{op:?}"), operands, || op.graph(&types(operands)))
}

/// Runs the backward of any op of the catalogue. `saved` are the statistics a norm returned, by name, and what
/// [`attention_add_norm`] and [`attention_block`] returned as `s`; `gradients` are the incoming gradients of the op's outputs, by name
/// (`y`, `s`).
///
/// ```
/// # use deuteron::{Dtype, Engine, FusedOp, Tensor, ops};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[-1.0, 2.0])?;
/// let d_y = Tensor::filled(Dtype::F32, [1, 2], 3.0)?;
/// let op: FusedOp = "act act=relu".parse()?;
/// let gradients = ops::backward(&engine, &op, &[&x], &[], &[("y", &d_y)])?;
/// assert_eq!(gradients[0].operand, "x");
/// assert_eq!(gradients[0].value.to_f32()?, [0.0, 3.0]);
/// # Ok(())
/// # }
/// ```
pub fn backward(
    engine: &Engine,
    op: &FusedOp,
    operands: &[&Tensor],
    saved: &[(&str, &Tensor)],
    gradients: &[(&str, &Tensor)],
) -> Result<Vec<Gradient>, Error> {
    let names = op.operands();
    let operand_types = types(operands);
    let graph = op.backward_graph(&operand_types)?;
    let mut inputs = Vec::new();
    for &id in graph.inputs() {
        let wanted = graph.label(id);
        let operand =
            names.iter().position(|name| *name == wanted).and_then(|position| operands.get(position).copied());
        let by_name = |list: &[(&str, &Tensor)], name: &str| {
            list.iter().find(|(given, _)| *given == name).map(|(_, tensor)| (*tensor).clone())
        };
        let incoming = wanted.strip_prefix("d_").and_then(|name| by_name(gradients, name));
        let found = operand.cloned().or_else(|| by_name(saved, &wanted)).or(incoming);
        inputs.push(found.ok_or_else(|| Error::Operands {
            op: op.name(),
            expected: format!("a tensor for `{wanted}` (operands: {}; gradients of its outputs)", names.join(", ")),
            got: "none".into(),
        })?);
    }
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    let outputs: Vec<String> = graph.outputs().iter().map(|output| output.name.clone()).collect();
    let results = engine.call(format!("backward {op:?}"), &inputs, || Ok(graph))?;
    let named = outputs.into_iter().zip(results);
    Ok(named.map(|(name, value)| Gradient { operand: name.trim_start_matches("d_").to_string(), value }).collect())
}

fn types(operands: &[&Tensor]) -> Vec<OperandType> {
    operands.iter().map(|tensor| (tensor.dtype(), tensor.shape().clone())).collect()
}

fn one(engine: &Engine, op: FusedOp, operands: &[&Tensor]) -> Result<Tensor, Error> {
    Ok(forward(engine, &op, operands)?.swap_remove(0))
}

fn normed_sum(engine: &Engine, op: FusedOp, operands: &[&Tensor]) -> Result<NormedSum, Error> {
    let mut results = forward(engine, &op, operands)?;
    let s = results.swap_remove(1);
    Ok(NormedSum { y: results.swap_remove(0), s })
}

/// `act(x)`
///
/// ```
/// # use deuteron::{Activation, Dtype, Engine, Tensor, ops};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[-1.0, 2.0])?;
/// let y = ops::act(&engine, &x, Activation::Relu)?;
/// assert_eq!(y.to_f32()?, [0.0, 2.0]);
/// # Ok(())
/// # }
/// ```
pub fn act(engine: &Engine, x: &Tensor, act: Activation) -> Result<Tensor, Error> {
    one(engine, catalog::ACT.with(|a| a.act = Some(act)), &[x])
}

/// `act(x * w + b)`, elementwise; operands repeat where their size is 1.
///
/// ```
/// # use deuteron::{Activation, Dtype, Engine, Tensor, ops};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [2, 2], &[1.0, 2.0, 3.0, -4.0])?;
/// let w = Tensor::from_f32(Dtype::F32, [1, 2], &[2.0, 3.0])?;
/// let b = Tensor::filled(Dtype::F32, [1, 1], 0.5)?;
/// let y = ops::mul_add_act(&engine, &x, &w, &b, Activation::Relu)?;
/// assert_eq!(y.to_f32()?, [2.5, 6.5, 6.5, 0.0]);
/// # Ok(())
/// # }
/// ```
pub fn mul_add_act(engine: &Engine, x: &Tensor, w: &Tensor, b: &Tensor, act: Activation) -> Result<Tensor, Error> {
    one(engine, catalog::MUL_ADD_ACT.with(|a| a.act = Some(act)), &[x, w, b])
}

/// `act(x + r)`
///
/// ```
/// # use deuteron::{Activation, Dtype, Engine, Tensor, ops};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[1.0, -2.0])?;
/// let y = ops::add_act(&engine, &x, &x, Activation::Relu)?;
/// assert_eq!(y.to_f32()?, [2.0, 0.0]);
/// # Ok(())
/// # }
/// ```
pub fn add_act(engine: &Engine, x: &Tensor, r: &Tensor, act: Activation) -> Result<Tensor, Error> {
    one(engine, catalog::ADD_ACT.with(|a| a.act = Some(act)), &[x, r])
}

/// `act(x + b)`, `b` per column.
///
/// ```
/// # use deuteron::{Activation, Dtype, Engine, Tensor, ops};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [2, 2], &[1.0, 2.0, 3.0, 4.0])?;
/// let b = Tensor::from_f32(Dtype::F32, [2], &[0.5, -3.0])?;
/// let y = ops::bias_act(&engine, &x, &b, Activation::Relu)?;
/// assert_eq!(y.to_f32()?, [1.5, 0.0, 3.5, 1.0]);
/// # Ok(())
/// # }
/// ```
pub fn bias_act(engine: &Engine, x: &Tensor, b: &Tensor, act: Activation) -> Result<Tensor, Error> {
    one(engine, catalog::BIAS_ACT.with(|a| a.act = Some(act)), &[x, b])
}

/// `dropout(act(x))`
///
/// ```
/// # use deuteron::{Activation, Dtype, Engine, Tensor, ops::{self, Dropout}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::filled(Dtype::F32, [1, 8], 3.0)?;
/// let dropout = Dropout { p: 0.5, seed: &Tensor::from_i32([], &[7])? };
/// let y = ops::act_dropout(&engine, &x, Activation::Relu, dropout)?;
/// assert!(y.to_f32()?.iter().all(|&y| y == 0.0 || y == 6.0)); // what is kept is divided by 1 - p
/// # Ok(())
/// # }
/// ```
pub fn act_dropout(engine: &Engine, x: &Tensor, act: Activation, dropout: Dropout) -> Result<Tensor, Error> {
    one(engine, catalog::ACT_DROPOUT.with(|a| (a.act, a.p) = (Some(act), dropout.p)), &[x, dropout.seed])
}

/// `dropout(act(x)) + r`
///
/// ```
/// # use deuteron::{Activation, Dtype, Engine, Tensor, ops::{self, Dropout}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::filled(Dtype::F32, [1, 8], 3.0)?;
/// let r = Tensor::filled(Dtype::F32, [1, 8], 1.0)?;
/// let dropout = Dropout { p: 0.5, seed: &Tensor::from_i32([], &[7])? };
/// let y = ops::act_dropout_add(&engine, &x, &r, Activation::Relu, dropout)?;
/// assert!(y.to_f32()?.iter().all(|&y| y == 1.0 || y == 7.0));
/// # Ok(())
/// # }
/// ```
pub fn act_dropout_add(
    engine: &Engine,
    x: &Tensor,
    r: &Tensor,
    act: Activation,
    dropout: Dropout,
) -> Result<Tensor, Error> {
    one(engine, catalog::ACT_DROPOUT_ADD.with(|a| (a.act, a.p) = (Some(act), dropout.p)), &[x, r, dropout.seed])
}

/// `dropout(x + b) + r`
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops::{self, Dropout}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::filled(Dtype::F32, [1, 8], 3.0)?;
/// let b = Tensor::filled(Dtype::F32, [8], -1.0)?;
/// let dropout = Dropout { p: 0.5, seed: &Tensor::from_i32([], &[7])? };
/// let y = ops::bias_dropout_add(&engine, &x, &b, &x, dropout)?;
/// assert!(y.to_f32()?.iter().all(|&y| y == 3.0 || y == 7.0));
/// # Ok(())
/// # }
/// ```
pub fn bias_dropout_add(
    engine: &Engine,
    x: &Tensor,
    b: &Tensor,
    r: &Tensor,
    dropout: Dropout,
) -> Result<Tensor, Error> {
    one(engine, catalog::BIAS_DROPOUT_ADD.with(|a| a.p = dropout.p), &[x, b, r, dropout.seed])
}

/// `silu(x) * g`
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[0.0, 40.0])?;
/// let g = Tensor::from_f32(Dtype::F32, [1, 2], &[5.0, 0.5])?;
/// let y = ops::swiglu(&engine, &x, &g)?;
/// assert_eq!(y.to_f32()?, [0.0, 20.0]);
/// # Ok(())
/// # }
/// ```
pub fn swiglu(engine: &Engine, x: &Tensor, g: &Tensor) -> Result<Tensor, Error> {
    one(engine, catalog::SWIGLU.usual(), &[x, g])
}

/// `silu(x) * g`, `x` and `g` the halves of one `[.., 2h]` tensor.
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let xg = Tensor::from_f32(Dtype::F32, [1, 4], &[0.0, 40.0, 5.0, 0.5])?;
/// let y = ops::swiglu_packed(&engine, &xg)?;
/// assert_eq!(y.to_f32()?, [0.0, 20.0]);
/// # Ok(())
/// # }
/// ```
pub fn swiglu_packed(engine: &Engine, xg: &Tensor) -> Result<Tensor, Error> {
    one(engine, catalog::SWIGLU.with(|a| a.packed = true), &[xg])
}

/// `gelu(x) * g`
///
/// ```
/// # use deuteron::{Dtype, Engine, Gelu, Tensor, ops};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[0.0, 40.0])?;
/// let g = Tensor::from_f32(Dtype::F32, [1, 2], &[5.0, 0.5])?;
/// let y = ops::geglu(&engine, &x, &g, Gelu::Tanh)?;
/// assert_eq!(y.to_f32()?, [0.0, 20.0]);
/// # Ok(())
/// # }
/// ```
pub fn geglu(engine: &Engine, x: &Tensor, g: &Tensor, kind: Gelu) -> Result<Tensor, Error> {
    one(engine, catalog::GEGLU.with(|a| a.gelu = kind), &[x, g])
}

/// `gelu(x) * g`, `x` and `g` the halves of one `[.., 2h]` tensor.
///
/// ```
/// # use deuteron::{Dtype, Engine, Gelu, Tensor, ops};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let xg = Tensor::from_f32(Dtype::F32, [1, 4], &[0.0, 40.0, 5.0, 0.5])?;
/// let y = ops::geglu_packed(&engine, &xg, Gelu::Tanh)?;
/// assert_eq!(y.to_f32()?, [0.0, 20.0]);
/// # Ok(())
/// # }
/// ```
pub fn geglu_packed(engine: &Engine, xg: &Tensor, kind: Gelu) -> Result<Tensor, Error> {
    one(engine, catalog::GEGLU.with(|a| (a.gelu, a.packed) = (kind, true)), &[xg])
}

/// Layer norm over the last axis, with its statistics.
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[0.0, 4.0])?;
/// let (w, b) = (Tensor::filled(Dtype::F32, [2], 1.0)?, Tensor::filled(Dtype::F32, [2], 0.5)?);
/// let normed = ops::layer_norm(&engine, &x, &w, &b, 0.0)?;
/// assert_eq!(normed.y.to_f32()?, [-0.5, 1.5]);
/// assert_eq!((normed.mean.to_f32()?[0], normed.rstd.to_f32()?[0]), (2.0, 0.5));
/// # Ok(())
/// # }
/// ```
pub fn layer_norm(engine: &Engine, x: &Tensor, w: &Tensor, b: &Tensor, eps: f64) -> Result<LayerNormOutput, Error> {
    let mut results = forward(engine, &catalog::LAYER_NORM.with(|a| a.eps = eps), &[x, w, b])?;
    let (rstd, mean) = (results.swap_remove(2), results.swap_remove(1));
    Ok(LayerNormOutput { y: results.swap_remove(0), mean, rstd })
}

/// RMS norm over the last axis, with its statistic.
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[4.0, -4.0])?;
/// let w = Tensor::filled(Dtype::F32, [2], 1.0)?;
/// let normed = ops::rms_norm(&engine, &x, &w, 0.0)?;
/// assert_eq!(normed.y.to_f32()?, [1.0, -1.0]);
/// assert_eq!(normed.rstd.to_f32()?, [0.25]);
/// # Ok(())
/// # }
/// ```
pub fn rms_norm(engine: &Engine, x: &Tensor, w: &Tensor, eps: f64) -> Result<RmsNormOutput, Error> {
    let mut results = forward(engine, &catalog::RMS_NORM.with(|a| a.eps = eps), &[x, w])?;
    let rstd = results.swap_remove(1);
    Ok(RmsNormOutput { y: results.swap_remove(0), rstd })
}

/// `act(norm(x))`
///
/// ```
/// # use deuteron::{Activation, Dtype, Engine, Tensor, ops::{self, NormWeights}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[0.0, 4.0])?;
/// let (w, b) = (Tensor::filled(Dtype::F32, [2], 1.0)?, Tensor::filled(Dtype::F32, [2], 0.5)?);
/// let weights = NormWeights { w: &w, b: Some(&b), eps: 0.0 };
/// let y = ops::norm_act(&engine, &x, weights, Activation::Relu)?;
/// assert_eq!(y.to_f32()?, [0.0, 1.5]);
/// # Ok(())
/// # }
/// ```
pub fn norm_act(engine: &Engine, x: &Tensor, weights: NormWeights, act: Activation) -> Result<Tensor, Error> {
    let op = weights.op(catalog::NORM_ACT).with(|a| a.act = Some(act));
    one(engine, op, &weights.after(&[x]))
}

/// `act(norm(x) + bias)`
///
/// ```
/// # use deuteron::{Activation, Dtype, Engine, Tensor, ops::{self, NormWeights}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[4.0, -4.0])?;
/// let w = Tensor::filled(Dtype::F32, [2], 1.0)?;
/// let weights = NormWeights { w: &w, b: None, eps: 0.0 }; // without a shift it is an RMS norm
/// let y = ops::norm_bias_act(&engine, &x, &w, weights, Activation::Relu)?;
/// assert_eq!(y.to_f32()?, [2.0, 0.0]);
/// # Ok(())
/// # }
/// ```
pub fn norm_bias_act(
    engine: &Engine,
    x: &Tensor,
    bias: &Tensor,
    weights: NormWeights,
    act: Activation,
) -> Result<Tensor, Error> {
    let op = weights.op(catalog::NORM_BIAS_ACT).with(|a| a.act = Some(act));
    one(engine, op, &weights.after(&[x, bias]))
}

/// `s = x + r`, `y = norm(s)`
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops::{self, NormWeights}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[0.0, 2.0])?;
/// let (w, b) = (Tensor::filled(Dtype::F32, [2], 1.0)?, Tensor::filled(Dtype::F32, [2], 0.0)?);
/// let weights = NormWeights { w: &w, b: Some(&b), eps: 0.0 };
/// let sum = ops::add_norm(&engine, &x, &x, weights)?;
/// assert_eq!(sum.s.to_f32()?, [0.0, 4.0]);
/// assert_eq!(sum.y.to_f32()?, [-1.0, 1.0]);
/// # Ok(())
/// # }
/// ```
pub fn add_norm(engine: &Engine, x: &Tensor, r: &Tensor, weights: NormWeights) -> Result<NormedSum, Error> {
    let op = weights.op(catalog::ADD_NORM);
    normed_sum(engine, op, &weights.after(&[x, r]))
}

/// `s = r + dropout(x + bias)`, `y = norm(s)`
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops::{self, Dropout, NormWeights}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[0.0, 2.0])?;
/// let (ones, zeros) = (Tensor::filled(Dtype::F32, [2], 1.0)?, Tensor::filled(Dtype::F32, [2], 0.0)?);
/// let dropout = Dropout { p: 0.0, seed: &Tensor::from_i32([], &[7])? };
/// let weights = NormWeights { w: &ones, b: Some(&zeros), eps: 0.0 };
/// let sum = ops::dropout_add_norm(&engine, &x, &zeros, &x, dropout, weights)?;
/// assert_eq!(sum.s.to_f32()?, [0.0, 4.0]);
/// assert_eq!(sum.y.to_f32()?, [-1.0, 1.0]);
/// # Ok(())
/// # }
/// ```
pub fn dropout_add_norm(
    engine: &Engine,
    x: &Tensor,
    bias: &Tensor,
    r: &Tensor,
    dropout: Dropout,
    weights: NormWeights,
) -> Result<NormedSum, Error> {
    let op = weights.op(catalog::DROPOUT_ADD_NORM).with(|a| a.p = dropout.p);
    normed_sum(engine, op, &weights.after(&[x, bias, r, dropout.seed]))
}

/// `int8` rows of `norm(x)`, or of `norm(x + r)`, with a scale per row.
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops::{self, NormWeights}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[4.0, -4.0])?;
/// let w = Tensor::filled(Dtype::F32, [2], 127.0)?;
/// let weights = NormWeights { w: &w, b: None, eps: 0.0 };
/// let rows = ops::norm_quantize(&engine, &x, None, weights)?;
/// assert_eq!(rows.q.to_f32()?, [127.0, -127.0]);
/// assert_eq!(rows.scale.to_f32()?, [1.0]);
/// # Ok(())
/// # }
/// ```
pub fn norm_quantize(
    engine: &Engine,
    x: &Tensor,
    r: Option<&Tensor>,
    weights: NormWeights,
) -> Result<QuantizedRows, Error> {
    let op = weights.op(catalog::NORM_QUANTIZE).with(|a| a.residual = r.is_some());
    let first: Vec<&Tensor> = [x].into_iter().chain(r).collect();
    let mut results = forward(engine, &op, &weights.after(&first))?.into_iter();
    match (results.next(), results.next()) {
        (Some(q), Some(scale)) => Ok(QuantizedRows { q, scale, s: results.next() }),
        _ => Err(Error::OutputIndex { outputs: 2, index: 2 }),
    }
}

/// Options of a softmax: scale first, then mask, softmax, dropout.
#[derive(Debug, Clone, Copy)]
pub struct SoftmaxOptions<'a> {
    /// factor of the scores
    pub scale: Option<f64>,
    /// `Additive` takes `mask_tensor`
    pub mask: Mask,
    /// added to the scores
    pub mask_tensor: Option<&'a Tensor>,
    /// of the result
    pub dropout: Option<Dropout<'a>>,
}

impl Default for SoftmaxOptions<'_> {
    fn default() -> Self {
        SoftmaxOptions { scale: None, mask: Mask::Full, mask_tensor: None, dropout: None }
    }
}

/// `dropout(softmax(scale * x + mask))`, any subset in one kernel.
///
/// ```
/// # use deuteron::{Dtype, Engine, Mask, Tensor, ops::{self, SoftmaxOptions}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [2, 2], &[1.0, 1.0, 0.0, 0.0])?;
/// let options = SoftmaxOptions { mask: Mask::Causal, ..SoftmaxOptions::default() };
/// let y = ops::softmax(&engine, &x, options)?;
/// assert_eq!(y.to_f32()?, [1.0, 0.0, 0.5, 0.5]);
/// # Ok(())
/// # }
/// ```
pub fn softmax(engine: &Engine, x: &Tensor, options: SoftmaxOptions) -> Result<Tensor, Error> {
    let p = options.dropout.map_or(0.0, |dropout| dropout.p);
    let op = catalog::SOFTMAX.with(|a| (a.scale, a.mask, a.p) = (options.scale, options.mask, p));
    let seed = options.dropout.filter(|dropout| dropout.p > 0.0).map(|dropout| dropout.seed);
    let operands: Vec<&Tensor> = [x].into_iter().chain(options.mask_tensor).chain(seed).collect();
    one(engine, op, &operands)
}

/// `softmax(scale * q k^T + mask)`, materialised.
///
/// ```
/// # use deuteron::{Dtype, Engine, Mask, Tensor, ops};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let q = Tensor::filled(Dtype::F32, [1, 1, 2, 4], 1.0)?; // [batch, heads, sequence, features]
/// let p = ops::attention_scores(&engine, &q, &q, Mask::Causal, None, 0.5)?;
/// assert_eq!(p.to_f32()?, [1.0, 0.0, 0.5, 0.5]);
/// # Ok(())
/// # }
/// ```
pub fn attention_scores(
    engine: &Engine,
    q: &Tensor,
    k: &Tensor,
    mask: Mask,
    mask_tensor: Option<&Tensor>,
    scale: f64,
) -> Result<Tensor, Error> {
    let operands: Vec<&Tensor> = [q, k].into_iter().chain(mask_tensor).collect();
    one(engine, catalog::ATTENTION_SCORES.with(|a| (a.mask, a.scale) = (mask, Some(scale))), &operands)
}

/// `s = wte[tokens] + wpe[position]`, `y = norm(s)`; `tokens: [.., sequence]`.
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops::{self, NormWeights}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let tokens = Tensor::from_i32([1, 2], &[1, 0])?;
/// let wte = Tensor::from_f32(Dtype::F32, [2, 2], &[0.0, 4.0, 2.0, 0.0])?;
/// let wpe = Tensor::filled(Dtype::F32, [2, 2], 1.0)?;
/// let (w, b) = (Tensor::filled(Dtype::F32, [2], 1.0)?, Tensor::filled(Dtype::F32, [2], 0.0)?);
/// let weights = NormWeights { w: &w, b: Some(&b), eps: 0.0 };
/// let sum = ops::embed_norm(&engine, &tokens, &wte, &wpe, weights)?;
/// assert_eq!(sum.s.to_f32()?, [3.0, 1.0, 1.0, 5.0]);
/// assert_eq!(sum.y.to_f32()?, [1.0, -1.0, -1.0, 1.0]);
/// # Ok(())
/// # }
/// ```
pub fn embed_norm(
    engine: &Engine,
    tokens: &Tensor,
    wte: &Tensor,
    wpe: &Tensor,
    weights: NormWeights,
) -> Result<NormedSum, Error> {
    let op = weights.op(catalog::EMBED_NORM);
    normed_sum(engine, op, &weights.after(&[tokens, wte, wpe]))
}

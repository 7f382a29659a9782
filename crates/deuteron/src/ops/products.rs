//! Ready-made ops around matmuls: linear layers, heads, attention, a language model's loss.

use deuteron_graph::{Activation, Mask, View};

use super::{Dropout, NormWeights, NormedSum, QuantizedRows, forward, normed_sum, one};
use crate::catalog::{self, Reduction};
use crate::engine::Engine;
use crate::error::Error;
use crate::tensor::Tensor;

/// Weights of a linear layer: `x weight + bias`.
#[derive(Debug, Clone, Copy)]
pub struct Linear<'a> {
    /// `[in, out]`
    pub weight: &'a Tensor,
    /// `[out]`
    pub bias: &'a Tensor,
}

/// Heads of queries, keys and values: `[batch, heads, sequence, features]`, views of one tensor.
#[derive(Debug, Clone)]
pub struct Heads {
    /// the queries
    pub q: Tensor,
    /// the keys
    pub k: Tensor,
    /// the values
    pub v: Tensor,
}

/// Options of attention.
#[derive(Debug, Clone, Copy)]
pub struct AttentionOptions<'a> {
    /// `Additive` takes `mask_tensor`
    pub mask: Mask,
    /// added to the scores
    pub mask_tensor: Option<&'a Tensor>,
    /// of the probabilities
    pub dropout: Option<Dropout<'a>>,
}

impl Default for AttentionOptions<'_> {
    fn default() -> Self {
        AttentionOptions { mask: Mask::Causal, mask_tensor: None, dropout: None }
    }
}

/// Options of a loss.
#[derive(Debug, Clone, Copy)]
pub struct LossOptions {
    /// the reduction of the losses over rows
    pub reduction: Reduction,
    /// label smoothing: the share of a target's weight that is spread evenly over all classes
    pub smoothing: f64,
    /// the target value whose rows have no loss
    pub ignored: Option<i32>,
}

impl Default for LossOptions {
    fn default() -> Self {
        LossOptions { reduction: Reduction::Mean, smoothing: 0.0, ignored: None }
    }
}

/// A loss, and the values that its gradient reads.
#[derive(Debug, Clone)]
pub struct LossOutput {
    /// one number, or one per row
    pub loss: Tensor,
    /// of each row's logits, `[rows, 1]`
    pub logsumexp: Tensor,
}

/// `act(x weight + bias)`, or that plus a residual.
///
/// ```
/// # use deuteron::{Activation, Dtype, Engine, Tensor, ops::{self, Linear}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[1.0, 2.0])?;
/// let weight = Tensor::from_f32(Dtype::F32, [2, 2], &[1.0, 0.0, 0.0, -1.0])?; // [in, out]
/// let bias = Tensor::filled(Dtype::F32, [2], 1.0)?;
/// let y = ops::linear_act(&engine, &x, Linear { weight: &weight, bias: &bias }, Activation::Relu, None)?;
/// assert_eq!(y.to_f32()?, [2.0, 0.0]);
/// # Ok(())
/// # }
/// ```
pub fn linear_act(
    engine: &Engine,
    x: &Tensor,
    linear: Linear,
    act: Activation,
    residual: Option<&Tensor>,
) -> Result<Tensor, Error> {
    let operands: Vec<&Tensor> = [x, linear.weight, linear.bias].into_iter().chain(residual).collect();
    one(engine, catalog::LINEAR_ACT.with(|a| (a.act, a.residual) = (Some(act), residual.is_some())), &operands)
}

/// `norm(x) weight + bias`
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops::{self, Linear, NormWeights}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[0.0, 4.0])?;
/// let (w, b) = (Tensor::filled(Dtype::F32, [2], 1.0)?, Tensor::filled(Dtype::F32, [2], 0.0)?);
/// let weight = Tensor::from_f32(Dtype::F32, [2, 1], &[1.0, 3.0])?;
/// let bias = Tensor::filled(Dtype::F32, [1], 0.5)?;
/// let weights = NormWeights { w: &w, b: Some(&b), eps: 0.0 };
/// let y = ops::norm_linear(&engine, &x, weights, Linear { weight: &weight, bias: &bias })?;
/// assert_eq!(y.to_f32()?, [2.5]);
/// # Ok(())
/// # }
/// ```
pub fn norm_linear(engine: &Engine, x: &Tensor, weights: NormWeights, linear: Linear) -> Result<Tensor, Error> {
    let op = weights.op(catalog::NORM_LINEAR);
    one(engine, op, &weights.after(&[x, linear.weight, linear.bias]))
}

/// Queries, keys and values of `x [batch, sequence, in]` in one pass. The weight's columns are `heads` heads of queries, then
/// `key_heads` of keys and as many of values; all heads have as many features.
///
/// ```
/// # use deuteron::{Dtype, Engine, Shape, Tensor, ops::{self, Linear}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::filled(Dtype::F32, [1, 3, 2], 1.0)?; // [batch, sequence, in]
/// let weight = Tensor::filled(Dtype::F32, [2, 12], 0.5)?; // one head of four features each
/// let bias = Tensor::filled(Dtype::F32, [12], 0.0)?;
/// let heads = ops::qkv(&engine, &x, Linear { weight: &weight, bias: &bias }, 1, 1)?;
/// assert_eq!(heads.q.shape(), &Shape::from([1, 1, 3, 4])); // [batch, heads, sequence, features]
/// # Ok(())
/// # }
/// ```
pub fn qkv(engine: &Engine, x: &Tensor, linear: Linear, heads: usize, key_heads: usize) -> Result<Heads, Error> {
    let columns = linear.weight.shape().cols();
    let all = heads + 2 * key_heads;
    if x.shape().rank() != 3 || heads == 0 || key_heads == 0 || !columns.is_multiple_of(all) {
        return Err(Error::Operands {
            op: "qkv",
            expected: format!("x [batch, sequence, in] and a weight whose columns are {all} heads"),
            got: format!("x {}, weight {}", x.shape(), linear.weight.shape()),
        });
    }
    let (batch, sequence, features) = (x.shape()[0], x.shape()[1], columns / all);
    let joint = one(engine, catalog::QKV.usual(), &[x, linear.weight, linear.bias])?;
    let joint = joint.view(&View::Reshape([batch, sequence, all, features].into()))?;
    let part = |start: usize, length: usize| {
        let part = joint.view(&View::Slice { axis: 2, start, length })?;
        part.view(&View::Transpose(vec![0, 2, 1, 3]))
    };
    Ok(Heads { q: part(0, heads)?, k: part(heads, key_heads)?, v: part(heads + key_heads, key_heads)? })
}

/// `x + act(norm(x) first) second`, or `x + act(norm(x) first)` without a second layer.
///
/// ```
/// # use deuteron::{Activation, Dtype, Engine, Tensor, ops::{self, Linear, NormWeights}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[0.0, 4.0])?;
/// let (w, b) = (Tensor::filled(Dtype::F32, [2], 1.0)?, Tensor::filled(Dtype::F32, [2], 0.0)?);
/// let (up, up_bias) = (Tensor::filled(Dtype::F32, [2, 8], 1.0)?, Tensor::filled(Dtype::F32, [8], 1.0)?);
/// let (down, down_bias) = (Tensor::filled(Dtype::F32, [8, 2], 0.5)?, Tensor::filled(Dtype::F32, [2], 0.0)?);
/// let weights = NormWeights { w: &w, b: Some(&b), eps: 0.0 };
/// let first = Linear { weight: &up, bias: &up_bias };
/// let second = Linear { weight: &down, bias: &down_bias };
/// let y = ops::ffn(&engine, &x, weights, first, Activation::Relu, Some(second))?;
/// assert_eq!(y.to_f32()?, [4.0, 8.0]);
/// # Ok(())
/// # }
/// ```
pub fn ffn(
    engine: &Engine,
    x: &Tensor,
    weights: NormWeights,
    first: Linear,
    act: Activation,
    second: Option<Linear>,
) -> Result<Tensor, Error> {
    let op = weights.op(catalog::FFN).with(|a| (a.act, a.single) = (Some(act), second.is_none()));
    let mut operands = vec![x, first.weight, first.bias];
    operands.extend(second.iter().flat_map(|second| [second.weight, second.bias]));
    one(engine, op, &weights.after(&operands))
}

/// `dropout(softmax(q k^T / sqrt(features) + mask)) v` over `[batch, heads, sequence, features]`. Keys and values may have
/// fewer heads, each shared by a group of heads of queries.
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops::{self, AttentionOptions}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let q = Tensor::filled(Dtype::F32, [1, 1, 2, 2], 1.0)?; // [batch, heads, sequence, features]
/// let v = Tensor::from_f32(Dtype::F32, [1, 1, 2, 2], &[0.0, 2.0, 4.0, 6.0])?;
/// let y = ops::attention(&engine, &q, &q, &v, AttentionOptions::default())?; // causal
/// assert_eq!(y.to_f32()?, [0.0, 2.0, 2.0, 4.0]);
/// # Ok(())
/// # }
/// ```
pub fn attention(
    engine: &Engine,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: AttentionOptions,
) -> Result<Tensor, Error> {
    let heads = |tensor: &Tensor| if tensor.shape().rank() == 4 { tensor.shape()[1] } else { 1 };
    let p = options.dropout.map_or(0.0, |dropout| dropout.p);
    let seed = options.dropout.filter(|dropout| dropout.p > 0.0).map(|dropout| dropout.seed);
    let group = heads(q).checked_div(heads(k)).unwrap_or(1).max(1);
    let op = catalog::ATTENTION.with(|a| (a.mask, a.p, a.group) = (options.mask, p, group));
    let operands: Vec<&Tensor> = [q, k, v].into_iter().chain(options.mask_tensor).chain(seed).collect();
    one(engine, op, &operands)
}

/// `s = r + attention(q, k, v)`, `y = norm(s)`; `r [batch, sequence, heads * features]`.
///
/// ```
/// # use deuteron::{Dtype, Engine, Mask, Tensor, ops::{self, NormWeights}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let q = Tensor::filled(Dtype::F32, [1, 1, 2, 2], 1.0)?; // [batch, heads, sequence, features]
/// let v = Tensor::from_f32(Dtype::F32, [1, 1, 2, 2], &[0.0, 2.0, 4.0, 6.0])?;
/// let r = Tensor::filled(Dtype::F32, [1, 2, 2], 1.0)?; // [batch, sequence, heads * features]
/// let (w, b) = (Tensor::filled(Dtype::F32, [2], 1.0)?, Tensor::filled(Dtype::F32, [2], 0.0)?);
/// let weights = NormWeights { w: &w, b: Some(&b), eps: 0.0 };
/// let sum = ops::attention_add_norm(&engine, [&q, &q, &v], &r, Mask::Causal, weights)?;
/// assert_eq!(sum.s.to_f32()?, [1.0, 3.0, 3.0, 5.0]);
/// assert_eq!(sum.y.to_f32()?, [-1.0, 1.0, -1.0, 1.0]);
/// # Ok(())
/// # }
/// ```
pub fn attention_add_norm(
    engine: &Engine,
    [q, k, v]: [&Tensor; 3],
    r: &Tensor,
    mask: Mask,
    weights: NormWeights,
) -> Result<NormedSum, Error> {
    let op = weights.op(catalog::ATTENTION_ADD_NORM).with(|a| a.mask = mask);
    normed_sum(engine, op, &weights.after(&[q, k, v, r]))
}

/// `s = r + attention(q, k, v) weight + bias`, `y = norm(s)`: GPT-2's order.
///
/// ```
/// # use deuteron::{Dtype, Engine, Mask, Tensor, ops::{self, Linear, NormWeights}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let q = Tensor::filled(Dtype::F32, [1, 1, 2, 2], 1.0)?; // [batch, heads, sequence, features]
/// let v = Tensor::from_f32(Dtype::F32, [1, 1, 2, 2], &[0.0, 2.0, 4.0, 6.0])?;
/// let weight = Tensor::from_f32(Dtype::F32, [2, 2], &[2.0, 0.0, 0.0, 2.0])?;
/// let (ones, zeros) = (Tensor::filled(Dtype::F32, [2], 1.0)?, Tensor::filled(Dtype::F32, [2], 0.0)?);
/// let r = Tensor::filled(Dtype::F32, [1, 2, 2], 1.0)?; // [batch, sequence, out]
/// let projection = Linear { weight: &weight, bias: &zeros };
/// let weights = NormWeights { w: &ones, b: Some(&zeros), eps: 0.0 };
/// let sum = ops::attention_block(&engine, [&q, &q, &v], projection, &r, Mask::Causal, weights)?;
/// assert_eq!(sum.s.to_f32()?, [1.0, 5.0, 5.0, 9.0]);
/// assert_eq!(sum.y.to_f32()?, [-1.0, 1.0, -1.0, 1.0]);
/// # Ok(())
/// # }
/// ```
pub fn attention_block(
    engine: &Engine,
    [q, k, v]: [&Tensor; 3],
    projection: Linear,
    r: &Tensor,
    mask: Mask,
    weights: NormWeights,
) -> Result<NormedSum, Error> {
    let op = weights.op(catalog::ATTENTION_BLOCK).with(|a| a.mask = mask);
    normed_sum(engine, op, &weights.after(&[q, k, v, projection.weight, projection.bias, r]))
}

/// Weights of routed experts.
#[derive(Debug, Clone, Copy)]
pub struct Experts<'a> {
    /// `[experts, out, in]`
    pub weight: &'a Tensor,
    /// `[experts, out]`
    pub bias: &'a Tensor,
}

/// `act(x weight[expert]^T + bias[expert])` of rows `x [rows, in]` that are routed to experts: `chosen` is an `i32[rows]`, or `[rows, choices]` where
/// each row goes to several. Gives `[rows, out]` or `[rows, choices, out]`; `x [rows, choices, in]` has a row for each choice.
/// With `weights [rows, choices]`, the results of a row's choices are weighted and added, in their order, to `[rows, out]`.
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops::{self, Experts}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [2, 1], &[1.0, 2.0])?;
/// let chosen = Tensor::from_i32([2], &[1, 0])?; // an expert per row
/// let weight = Tensor::from_f32(Dtype::F32, [2, 1, 1], &[10.0, 100.0])?; // [experts, out, in]
/// let bias = Tensor::filled(Dtype::F32, [2, 1], 0.5)?;
/// let y = ops::moe(&engine, &x, &chosen, Experts { weight: &weight, bias: &bias }, None, None)?;
/// assert_eq!(y.to_f32()?, [100.5, 20.5]);
/// # Ok(())
/// # }
/// ```
pub fn moe(
    engine: &Engine,
    x: &Tensor,
    chosen: &Tensor,
    experts: Experts,
    act: Option<Activation>,
    weights: Option<&Tensor>,
) -> Result<Tensor, Error> {
    let operands: Vec<&Tensor> = [x, chosen, experts.weight, experts.bias].into_iter().chain(weights).collect();
    one(engine, catalog::MOE.with(|a| (a.act, a.weighted) = (act, weights.is_some())), &operands)
}

/// Weights of routed experts: bytes, a scale and a bias for each column of each expert.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedExperts<'a> {
    /// `i8[experts, out, in]`
    pub weight: &'a Tensor,
    /// `f32[experts, out]`
    pub scale: &'a Tensor,
    /// `[experts, out]`, of the type that sums are rounded to
    pub bias: &'a Tensor,
}

/// `act(x weight[expert]^T + bias[expert])` as rows of bytes: `x` is `i8[rows, in]` with a scale per row, `chosen` an `i32[rows]`. A row
/// that goes to several experts is given once for each. `x.s` is not read.
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops::{self, QuantizedExperts, QuantizedRows}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let q = Tensor::from_bytes(Dtype::I8, [1, 2], &[100, 100])?;
/// let x = QuantizedRows { q, scale: Tensor::filled(Dtype::F32, [1, 1], 0.01)?, s: None };
/// let chosen = Tensor::from_i32([1], &[0])?;
/// let weight = Tensor::from_bytes(Dtype::I8, [1, 2, 2], &[127, 0, 0, 127])?; // [experts, out, in]
/// let (scale, bias) = (Tensor::filled(Dtype::F32, [1, 2], 1.0)?, Tensor::filled(Dtype::F32, [1, 2], 0.0)?);
/// let experts = QuantizedExperts { weight: &weight, scale: &scale, bias: &bias };
/// let rows = ops::moe_int8(&engine, &x, &chosen, experts, None)?;
/// assert_eq!(rows.q.to_f32()?, [127.0, 127.0]);
/// assert_eq!(rows.scale.to_f32()?, [1.0]);
/// # Ok(())
/// # }
/// ```
pub fn moe_int8(
    engine: &Engine,
    x: &QuantizedRows,
    chosen: &Tensor,
    experts: QuantizedExperts,
    act: Option<Activation>,
) -> Result<QuantizedRows, Error> {
    let mut results = forward(engine, &catalog::MOE_INT8.with(|a| a.act = act), &experts.of(x, chosen))?;
    let scale = results.swap_remove(1);
    Ok(QuantizedRows { q: results.swap_remove(0), scale, s: None })
}

/// The same as floats of the bias' type.
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops::{self, QuantizedExperts, QuantizedRows}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let q = Tensor::from_bytes(Dtype::I8, [1, 2], &[100, 100])?;
/// let x = QuantizedRows { q, scale: Tensor::filled(Dtype::F32, [1, 1], 0.5)?, s: None };
/// let chosen = Tensor::from_i32([1], &[0])?;
/// let weight = Tensor::from_bytes(Dtype::I8, [1, 2, 2], &[1, 0, 0, 2])?; // [experts, out, in]
/// let (scale, bias) = (Tensor::filled(Dtype::F32, [1, 2], 1.0)?, Tensor::filled(Dtype::F32, [1, 2], 0.0)?);
/// let experts = QuantizedExperts { weight: &weight, scale: &scale, bias: &bias };
/// let y = ops::moe_int8_dequantized(&engine, &x, &chosen, experts, None)?;
/// assert_eq!(y.to_f32()?, [50.0, 100.0]);
/// # Ok(())
/// # }
/// ```
pub fn moe_int8_dequantized(
    engine: &Engine,
    x: &QuantizedRows,
    chosen: &Tensor,
    experts: QuantizedExperts,
    act: Option<Activation>,
) -> Result<Tensor, Error> {
    one(engine, catalog::MOE_INT8.with(|a| (a.act, a.requantize) = (act, false)), &experts.of(x, chosen))
}

impl<'a> QuantizedExperts<'a> {
    fn of(self, x: &'a QuantizedRows, chosen: &'a Tensor) -> [&'a Tensor; 6] {
        [&x.q, &x.scale, chosen, self.weight, self.scale, self.bias]
    }
}

/// Cross entropy of `x weight^T` and a target per row, without storing all logits: `x [rows, in]`, `weight [classes, in]`,
/// `targets i32[rows]`.
///
/// ```
/// # use deuteron::{Dtype, Engine, Tensor, ops::{self, LossOptions}};
/// # fn main() -> Result<(), deuteron::Error> {
/// # let engine = Engine::cpu();
/// let x = Tensor::from_f32(Dtype::F32, [1, 2], &[1.0, 0.0])?;
/// let weight = Tensor::filled(Dtype::F32, [4, 2], 0.0)?; // [classes, in]: all classes are equally likely
/// let targets = Tensor::from_i32([1], &[2])?;
/// let loss = ops::linear_cross_entropy(&engine, &x, &weight, &targets, LossOptions::default())?.loss;
/// assert!((loss.to_f32()?[0] - 4.0f32.ln()).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
pub fn linear_cross_entropy(
    engine: &Engine,
    x: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    options: LossOptions,
) -> Result<LossOutput, Error> {
    check_targets(targets, weight, options.ignored)?;
    let LossOptions { reduction, smoothing, ignored } = options;
    let op =
        catalog::LINEAR_CROSS_ENTROPY.with(|a| (a.reduction, a.smoothing, a.ignored) = (reduction, smoothing, ignored));
    let mut results = forward(engine, &op, &[x, weight, targets])?;
    let logsumexp = results.swap_remove(1);
    Ok(LossOutput { loss: results.swap_remove(0), logsumexp })
}

/// Targets on the host that are neither classes nor ignored are refused before anything runs. Targets on a device are checked by the kernel.
fn check_targets(targets: &Tensor, weight: &Tensor, ignored: Option<i32>) -> Result<(), Error> {
    if !targets.is_on_host() || weight.shape().rank() != 2 {
        return Ok(());
    }
    let classes = weight.shape()[0];
    let is_wrong = |&target: &f64| {
        !(0.0..classes as f64).contains(&target) && ignored.is_none_or(|ignored| target != f64::from(ignored))
    };
    match targets.to_array()?.values.into_iter().find(is_wrong) {
        None => Ok(()),
        Some(target) => Err(Error::Operands {
            op: "linear_cross_entropy",
            expected: format!("targets of at least 0 and below {classes}, the classes of the weight"),
            got: target.to_string(),
        }),
    }
}

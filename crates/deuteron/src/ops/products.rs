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
pub fn norm_linear(engine: &Engine, x: &Tensor, weights: NormWeights, linear: Linear) -> Result<Tensor, Error> {
    let op = weights.op(catalog::NORM_LINEAR);
    one(engine, op, &weights.after(&[x, linear.weight, linear.bias]))
}

/// Queries, keys and values of `x [batch, sequence, in]` in one pass. The weight's columns are `heads` heads of queries, then
/// `key_heads` of keys and as many of values; all heads have as many features.
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

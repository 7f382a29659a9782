//! Ops around matmuls: heads, attention, and the loss of a language model without its logits.

use deuteron_graph::{BinaryOp, CompareOp, Composite, Dtype, Graph, GraphError, Mask, NodeId, ScoreWork, Shape};

use super::{Attributes, Reduction};

/// Options of [`attend`].
#[derive(Clone, Copy)]
pub(super) struct Attend {
    pub mask: Mask,
    /// factor of the scores; none for `1 / sqrt(features)`
    pub scale: Option<f64>,
    pub p: f64,
    pub work: ScoreWork,
    /// heads of queries that share a head of keys
    pub group: usize,
}

/// Attention over `[batch, heads, sequence, features]`. Operands: q, k, v, the mask if additive, those of the work on scores, the
/// seed if `p > 0`.
pub(super) fn attend(g: &mut Graph, v: &[NodeId], options: Attend) -> Result<NodeId, GraphError> {
    let Attend { mask, scale, p, work, group } = options;
    let shape = g.node(v[0]).shape.clone();
    let scale = scale.unwrap_or_else(|| 1.0 / (shape.cols().max(1) as f64).sqrt());
    let composite = Composite::Attention { mask, scale, p, offset: 0, work };
    if group <= 1 || shape.rank() != 4 {
        return Ok(g.call(composite, v)?[0]);
    }
    let mut operands = v.to_vec();
    let keys = g.node(v[1]).shape.clone();
    if keys.rank() != 4 || keys[1] * group != shape[1] {
        return Err(GraphError::Attribute {
            op: "attention".into(),
            attribute: "group",
            expected: format!("the heads of q {shape} over those of k {keys}"),
            got: group.to_string(),
        });
    }
    operands[0] = g.reshape(v[0], [shape[0], keys[1], group, shape[2], shape[3]])?;
    for operand in &mut operands[1..3] {
        let shape = g.node(*operand).shape.clone();
        let apart = g.reshape(*operand, [shape[0], shape[1], 1, shape[2], shape[3]])?;
        *operand = g.broadcast(apart, [shape[0], shape[1], group, shape[2], shape[3]])?;
    }
    // Of the operands that follow, these have an axis of heads.
    let of_heads = usize::from(mask == Mask::Additive) + usize::from(work.slopes) + usize::from(work.bias);
    for operand in operands.iter_mut().skip(3).take(of_heads) {
        *operand = grouped_mask(g, *operand, keys[1], group)?;
    }
    let attended = g.call(composite, &operands)?[0];
    let width = g.node(v[2]).shape.cols();
    g.reshape(attended, shape.with_cols(width))
}

/// A mask over heads, `[.., heads, m, n]`, as one over groups of them: `[.., heads / group, group, m, n]`.
fn grouped_mask(g: &mut Graph, mask: NodeId, key_heads: usize, group: usize) -> Result<NodeId, GraphError> {
    let shape = g.node(mask).shape.clone();
    let Some(axis) = shape.rank().checked_sub(3) else { return Ok(mask) };
    let mut apart = shape.dims().to_vec();
    // One for all heads stays one for all; others are refused by the reshape.
    let split = if shape[axis] == 1 { [1, 1] } else { [key_heads, group] };
    apart.splice(axis..=axis, split);
    g.reshape(mask, apart)
}

/// Cross entropy of `x weight^T`, and the logsumexp of each row `[rows, 1]`.
pub(super) fn linear_cross_entropy(
    g: &mut Graph,
    operands: [NodeId; 3],
    attributes: &Attributes,
) -> Result<(NodeId, NodeId), GraphError> {
    let &Attributes { smoothing, ignored, reduction, .. } = attributes;
    let result = g.linear_cross_entropy(operands, smoothing, ignored)?;
    let rows = g.node(operands[0]).shape.rows();
    let loss = match (reduction, ignored) {
        (Reduction::None, _) => g.reshape(result.loss, [rows])?,
        (Reduction::Sum, _) => sum_of(g, result.loss)?,
        // Scaled before the sum, which is then the last step.
        (Reduction::Mean, None) => {
            let share = g.scale(result.loss, 1.0 / rows as f64)?;
            sum_of(g, share)?
        }
        (Reduction::Mean, Some(ignored)) => {
            let ignored = g.constant(f64::from(ignored), Dtype::I32)?;
            let targets = g.reshape(operands[2], [rows, 1])?;
            let counts = g.compare(CompareOp::Ne, targets, ignored)?;
            let (one, zero) = (g.constant(1.0, Dtype::F32)?, g.constant(0.0, Dtype::F32)?);
            let counted = g.select(counts, one, zero)?;
            let (total, count) = (sum_of(g, result.loss)?, sum_of(g, counted)?);
            g.binary(BinaryOp::Div, total, count)?
        }
    };
    Ok((loss, result.logsumexp))
}

/// The sum of a number per row.
fn sum_of(g: &mut Graph, x: NodeId) -> Result<NodeId, GraphError> {
    let sum = g.column_sum(x)?;
    g.reshape(sum, Shape::scalar())
}

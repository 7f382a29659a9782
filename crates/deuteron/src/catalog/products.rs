//! Ops around products: heads, attention, and the loss of a language model without its logits.

use deuteron_graph::{BinaryOp, CompareOp, Composite, Dtype, Graph, GraphError, Mask, NodeId, Shape, UnaryOp};

/// Logits that exist at once in [`linear_cross_entropy`] and its gradient, about: 64 MB of `f32`.
const LOGITS: usize = 16 << 20;

/// The fewest rows whose logits are made at once: products of fewer waste the machine.
const FEWEST: usize = 256;

/// What [`attend`] does besides.
#[derive(Clone, Copy)]
pub(super) struct Attend {
    pub mask: Mask,
    /// of the scores; none for one over the root of the features
    pub scale: Option<f64>,
    pub p: f64,
    /// heads of queries that share a head of keys
    pub group: usize,
}

/// Attention over `[batch, heads, sequence, features]`. Operands: q, k, v, the mask if additive, the seed if `p > 0`.
pub(super) fn attend(g: &mut Graph, v: &[NodeId], options: Attend) -> Result<NodeId, GraphError> {
    let Attend { mask, scale, p, group } = options;
    let shape = g.node(v[0]).shape.clone();
    let scale = scale.unwrap_or_else(|| 1.0 / (shape.cols().max(1) as f64).sqrt());
    let composite = Composite::Attention { mask, scale, p, offset: 0 };
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
    if mask == Mask::Additive {
        operands[3] = grouped_mask(g, operands[3], keys[1], group)?;
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

/// Rows of `x`, a few at a time, by the classes of the weight: where they start and how many there are. Each time one row less
/// than before: chunks of one size would share a kernel, for which all their logits wait.
fn chunks(g: &Graph, x: NodeId, weight: NodeId) -> Vec<(usize, usize)> {
    let (rows, classes) = (g.node(x).shape.rows(), g.node(weight).shape.rows());
    let most = (LOGITS / classes.max(1)).max(FEWEST);
    let (mut start, mut all) = (0, Vec::new());
    while start < rows {
        let length = (most - all.len() % (most / 2)).min(rows - start);
        all.push((start, length));
        start += length;
    }
    all
}

/// The logits of a few rows, `x [rows, hidden]` and `weight [classes, hidden]`, and the rows.
fn some_logits(
    g: &mut Graph,
    x: NodeId,
    weight: NodeId,
    (start, length): (usize, usize),
) -> Result<(NodeId, NodeId), GraphError> {
    let x = g.slice(x, 0, start, length)?;
    Ok((g.matmul_transposed(x, weight, false, true)?, x))
}

/// Mean cross entropy of `x weight^T`, and the logsumexp of each row `[rows, 1]`. Logits exist for a few rows at a time.
pub(super) fn linear_cross_entropy(
    g: &mut Graph,
    [x, weight, targets]: [NodeId; 3],
) -> Result<(NodeId, NodeId), GraphError> {
    let rows = some_rows(g, x)?;
    let (mut shares, mut sums) = (Vec::new(), Vec::new());
    for (start, length) in chunks(g, x, weight) {
        let (logits, _) = some_logits(g, x, weight, (start, length))?;
        let targets = g.slice(targets, 0, start, length)?;
        let result = g.cross_entropy(logits, targets)?;
        shares.push(g.scale(result.loss, length as f64 / rows as f64)?);
        sums.push(result.logsumexp);
    }
    Ok((total(g, &shares)?, side_by_side(g, &sums)?))
}

/// The rows of a tensor, of which there must be some.
fn some_rows(g: &Graph, x: NodeId) -> Result<usize, GraphError> {
    match g.node(x).shape.rows() {
        0 => Err(GraphError::Attribute {
            op: "linear_cross_entropy".into(),
            attribute: "rows",
            expected: "at least 1: the mean of no losses is no number".into(),
            got: "0".into(),
        }),
        rows => Ok(rows),
    }
}

/// The sum of one or more values.
fn total(g: &mut Graph, parts: &[NodeId]) -> Result<NodeId, GraphError> {
    parts[1..].iter().try_fold(parts[0], |sum, &part| g.add(sum, part))
}

/// One or more tensors, row after row.
fn side_by_side(g: &mut Graph, parts: &[NodeId]) -> Result<NodeId, GraphError> {
    if let [part] = parts { Ok(*part) } else { g.concat(parts, 0) }
}

/// The backward of [`linear_cross_entropy`] over its operands: takes `logsumexp` and `d_loss`, gives `d_x` and `d_weight`.
pub(super) fn linear_cross_entropy_backward(g: &mut Graph, v: &[NodeId]) -> Result<(), GraphError> {
    let rows = g.node(v[0]).shape.rows();
    let logsumexp = g.input("logsumexp", Dtype::F32, [rows, 1])?;
    let d_loss = g.input("d_loss", Dtype::F32, Shape::scalar())?;
    let [d_x, d_weight] = linear_cross_entropy_gradient(g, [v[0], v[1], v[2]], logsumexp, d_loss)?;
    g.output("d_x", d_x)?;
    g.output("d_weight", d_weight)
}

/// Its gradients with respect to `x` and `weight`, few rows at a time from the start to the end, so that each chunk's logits
/// are forgotten before the next ones are made. Differentiating the whole would make all of them first.
fn linear_cross_entropy_gradient(
    g: &mut Graph,
    [x, weight, targets]: [NodeId; 3],
    logsumexp: NodeId,
    d_loss: NodeId,
) -> Result<[NodeId; 2], GraphError> {
    let dtype = g.node(x).dtype;
    let factor = 1.0 / some_rows(g, x)? as f64;
    let factor = g.scale(d_loss, factor)?;
    let (mut d_x, mut d_weight) = (Vec::new(), Vec::new());
    for (start, length) in chunks(g, x, weight) {
        let (logits, x) = some_logits(g, x, weight, (start, length))?;
        let shape = g.node(logits).shape.clone();
        let logits = cast(g, logits, Dtype::F32)?;
        let logsumexp = g.slice(logsumexp, 0, start, length)?;
        let shifted = g.sub(logits, logsumexp)?;
        let probability = g.unary(UnaryOp::Exp, shifted)?;
        let targets = g.slice(targets, 0, start, length)?;
        let targets = g.reshape(targets, [length, 1])?;
        let column = g.iota(shape, 1)?;
        let hit = g.compare(CompareOp::Eq, column, targets)?;
        let one = g.constant(1.0, Dtype::F32)?;
        let less = g.binary(BinaryOp::Sub, probability, one)?;
        let slope = g.select(hit, less, probability)?;
        let slope = g.mul(slope, factor)?;
        let slope = cast(g, slope, dtype)?;
        d_x.push(g.matmul(slope, weight)?);
        let part = g.matmul_transposed(slope, x, true, false)?;
        d_weight.push(cast(g, part, Dtype::F32)?);
    }
    let d_weight = total(g, &d_weight)?;
    Ok([side_by_side(g, &d_x)?, cast(g, d_weight, dtype)?])
}

fn cast(g: &mut Graph, x: NodeId, dtype: Dtype) -> Result<NodeId, GraphError> {
    if g.node(x).dtype == dtype { Ok(x) } else { g.cast(x, dtype) }
}

//! What each op computes, written out.

use deuteron_graph::{Composite, Graph, GraphError, Mask, NodeId, Quantized};

use super::products::{attend, linear_cross_entropy, merged_heads};
use super::{Built, FusedOp, Norm};

impl FusedOp {
    /// The op over operands that are there. Weights that are `turned` are `[out, in]`.
    pub(super) fn build(&self, g: &mut Graph, v: &[NodeId], turned: &[NodeId]) -> Result<Built, GraphError> {
        let y = |node| Ok(Built { outputs: vec![("y", node)], ..Built::default() });
        match *self {
            FusedOp::Act { act } => y(g.activation(v[0], act)?),
            FusedOp::MulAddAct { act } => {
                let product = g.mul(v[0], v[1])?;
                let sum = g.add(product, v[2])?;
                y(g.activation(sum, act)?)
            }
            FusedOp::AddAct { act } | FusedOp::BiasAct { act } => {
                let sum = g.add(v[0], v[1])?;
                y(g.activation(sum, act)?)
            }
            FusedOp::ActDropout { act, p } => {
                let activated = g.activation(v[0], act)?;
                y(dropped(g, activated, v[1], p)?)
            }
            FusedOp::ActDropoutAdd { act, p } => {
                let activated = g.activation(v[0], act)?;
                let dropped = dropped(g, activated, v[2], p)?;
                y(g.add(dropped, v[1])?)
            }
            FusedOp::BiasDropoutAdd { p } => {
                let sum = g.add(v[0], v[1])?;
                let dropped = dropped(g, sum, v[3], p)?;
                y(g.add(dropped, v[2])?)
            }
            FusedOp::Swiglu { packed } => {
                let (x, gate) = gate_operands(g, v, packed)?;
                y(g.swiglu(x, gate)?)
            }
            FusedOp::Geglu { kind, packed } => {
                let (x, gate) = gate_operands(g, v, packed)?;
                y(g.geglu(x, gate, kind)?)
            }
            FusedOp::LayerNorm { eps } => {
                let normed = g.layer_norm(v[0], v[1], v[2], eps)?;
                let saved = vec![("mean", normed.mean), ("rstd", normed.rstd)];
                Ok(Built { outputs: vec![("y", normed.y)], saved, ..Built::default() })
            }
            FusedOp::RmsNorm { eps } => {
                let normed = g.rms_norm(v[0], v[1], eps)?;
                Ok(Built { outputs: vec![("y", normed.y)], saved: vec![("rstd", normed.rstd)], ..Built::default() })
            }
            FusedOp::NormAct { norm, eps, act } => {
                let normed = apply_norm(g, norm, v[0], &v[1..], eps)?;
                y(g.activation(normed, act)?)
            }
            FusedOp::NormBiasAct { norm, eps, act } => {
                let normed = apply_norm(g, norm, v[0], &v[2..], eps)?;
                let sum = g.add(normed, v[1])?;
                y(g.activation(sum, act)?)
            }
            FusedOp::AddNorm { norm, eps } => {
                let s = g.add(v[0], v[1])?;
                let y = apply_norm(g, norm, s, &v[2..], eps)?;
                Ok(Built { outputs: vec![("y", y), ("s", s)], ..Built::default() })
            }
            FusedOp::DropoutAddNorm { norm, eps, p } => {
                let sum = g.add(v[0], v[1])?;
                let dropped = dropped(g, sum, v[3], p)?;
                let s = g.add(v[2], dropped)?;
                let y = apply_norm(g, norm, s, &v[4..], eps)?;
                Ok(Built { outputs: vec![("y", y), ("s", s)], ..Built::default() })
            }
            FusedOp::NormQuantize { norm, eps, residual } => {
                let (x, weights) = if residual { (g.add(v[0], v[1])?, &v[2..]) } else { (v[0], &v[1..]) };
                let normed = apply_norm(g, norm, x, weights, eps)?;
                let quantized = g.quantize_int8(normed)?;
                let mut outputs = vec![("q", quantized.q), ("scale", quantized.scale)];
                outputs.extend(residual.then_some(("s", x)));
                Ok(Built { outputs, ..Built::default() })
            }
            FusedOp::Softmax { scale, mask, p } => y(build_softmax(g, v, scale, mask, p)?),
            FusedOp::AttentionScores { mask, scale } => {
                y(g.attention_scores(v[0], v[1], v.get(2).copied(), mask, scale)?)
            }
            FusedOp::EmbedNorm { norm, eps } => {
                let positions = g.node(v[0]).shape.cols();
                let token = g.gather(v[1], v[0])?;
                let position = g.slice(v[2], 0, 0, positions)?;
                let s = g.add(token, position)?;
                let y = apply_norm(g, norm, s, &v[3..], eps)?;
                Ok(Built { outputs: vec![("y", y), ("s", s)], ..Built::default() })
            }
            FusedOp::LinearAct { act, residual } => {
                let product = linear(g, turned, v[0], v[1], v[2])?;
                let activated = g.activation(product, act)?;
                y(if residual { g.add(activated, v[3])? } else { activated })
            }
            FusedOp::NormLinear { norm, eps } => {
                let normed = apply_norm(g, norm, v[0], &v[3..], eps)?;
                y(linear(g, turned, normed, v[1], v[2])?)
            }
            FusedOp::Qkv => y(linear(g, turned, v[0], v[1], v[2])?),
            FusedOp::Ffn { norm, eps, act, single: true } => {
                let normed = apply_norm(g, norm, v[0], &v[3..], eps)?;
                let wide = linear(g, turned, normed, v[1], v[2])?;
                let activated = g.activation(wide, act)?;
                y(g.add(v[0], activated)?)
            }
            FusedOp::Ffn { norm, eps, act, single: false } => {
                let normed = apply_norm(g, norm, v[0], &v[5..], eps)?;
                let wide = linear(g, turned, normed, v[1], v[2])?;
                let activated = g.activation(wide, act)?;
                let narrow = linear(g, turned, activated, v[3], v[4])?;
                y(g.add(v[0], narrow)?)
            }
            FusedOp::Attention { mask, p, group } => y(attend(g, v, mask, p, group)?),
            FusedOp::LinearCrossEntropy => {
                let (loss, logsumexp) = linear_cross_entropy(g, [v[0], v[1], v[2]])?;
                Ok(Built { outputs: vec![("loss", loss)], saved: vec![("logsumexp", logsumexp)], ..Built::default() })
            }
            FusedOp::MoeInt8 { act, requantize } => {
                let x = Quantized { q: v[0], scale: v[1] };
                let dtype = g.node(v[5]).dtype;
                let mut product = g.expert_linear(x, v[2], Quantized { q: v[3], scale: v[4] }, Some(v[5]), dtype)?;
                if let Some(act) = act {
                    product = g.activation(product, act)?;
                }
                if !requantize {
                    return y(product);
                }
                let rows = g.quantize_int8(product)?;
                Ok(Built { outputs: vec![("q", rows.q), ("scale", rows.scale)], ..Built::default() })
            }
            FusedOp::AttentionAddNorm { mask, norm, eps } => {
                let merged = merged_heads(g, v, mask)?;
                let s = g.add(v[3], merged)?;
                let y = apply_norm(g, norm, s, &v[4..], eps)?;
                Ok(Built { outputs: vec![("y", y), ("s", s)], taken: vec![s], ..Built::default() })
            }
            FusedOp::AttentionBlock { mask, norm, eps } => {
                let merged = merged_heads(g, v, mask)?;
                let projected = linear(g, turned, merged, v[3], v[4])?;
                let s = g.add(v[5], projected)?;
                let y = apply_norm(g, norm, s, &v[6..], eps)?;
                Ok(Built { outputs: vec![("y", y), ("s", s)], taken: vec![s], ..Built::default() })
            }
        }
    }
}

/// `x w + b`
fn linear(g: &mut Graph, turned: &[NodeId], x: NodeId, w: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
    Ok(g.call(Composite::Linear { transposed: turned.contains(&w) }, &[x, w, b])?[0])
}

/// Dropout, and nothing where nothing is dropped: evaluation costs no random numbers.
fn dropped(g: &mut Graph, x: NodeId, seed: NodeId, p: f64) -> Result<NodeId, GraphError> {
    if p == 0.0 { Ok(x) } else { g.dropout(x, seed, p, 0) }
}

fn gate_operands(g: &mut Graph, v: &[NodeId], packed: bool) -> Result<(NodeId, NodeId), GraphError> {
    if !packed {
        return Ok((v[0], v[1]));
    }
    let shape = g.node(v[0]).shape.clone();
    let (axis, half) = (shape.rank().saturating_sub(1), shape.cols() / 2);
    if !shape.cols().is_multiple_of(2) {
        return Err(GraphError::Attribute {
            op: "a packed gate".into(),
            attribute: "columns",
            expected: "an even number: x, then its gate".into(),
            got: shape.cols().to_string(),
        });
    }
    Ok((g.slice(v[0], axis, 0, half)?, g.slice(v[0], axis, half, half)?))
}

fn apply_norm(g: &mut Graph, norm: Norm, x: NodeId, weights: &[NodeId], eps: f64) -> Result<NodeId, GraphError> {
    match norm {
        Norm::Layer => Ok(g.layer_norm(x, weights[0], weights[1], eps)?.y),
        Norm::Rms => Ok(g.rms_norm(x, weights[0], eps)?.y),
    }
}

fn build_softmax(g: &mut Graph, v: &[NodeId], scale: Option<f64>, mask: Mask, p: f64) -> Result<NodeId, GraphError> {
    let mut x = v[0];
    if let Some(scale) = scale {
        x = g.scale(x, scale)?;
    }
    match mask {
        Mask::Full => {}
        Mask::Causal => x = g.causal_mask(x)?,
        Mask::Cached => {
            let (expected, got) = ("full, causal or additive".to_string(), "cached".to_string());
            return Err(GraphError::Attribute { op: "softmax".to_string(), attribute: "mask", expected, got });
        }
        Mask::Additive => x = g.add(x, v[1])?,
    }
    let mut y = g.softmax(x)?;
    if p > 0.0 {
        y = g.dropout(y, v[v.len() - 1], p, 0)?;
    }
    Ok(y)
}

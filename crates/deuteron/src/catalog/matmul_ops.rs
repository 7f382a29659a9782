//! Ops around matmuls: linear layers, attention, a language model's loss, experts.

use deuteron_graph::Quantized;

use super::Attributes;
use super::entry::{Backward, Built, Entry, MATMUL, Operand, USUAL, data, entries, linear_weight, weight, y};
use super::products::{attend, linear_cross_entropy, linear_cross_entropy_backward};
use super::row_ops::{B, SEED, W, X, drops, is_additive};
use super::sizes::{self, keys, merged, queries, square, vector, wide, wide_vector, widening};
use super::words::{ACT, DROPOUT, EPSILON, GROUP, MASK, NORM, OPTIONAL_ACT, REQUANTIZE, RESIDUAL, SINGLE};

const WIDENING: Operand = linear_weight("weight", widening);
const WIDE_BIAS: Operand = weight("bias", wide_vector);
const Q: Operand = data("q", queries);
const K: Operand = data("k", keys);
const V: Operand = data("v", keys);
const R: Operand = data("r", merged);

entries! {
    MATMUL_OPS:
    LINEAR_ACT = Entry {
        name: "linear_act",
        formula: "act(x W + b), or that + r",
        attributes: &[ACT, RESIDUAL],
        operands: &[X, WIDENING, WIDE_BIAS, data("r", wide).when(|a| a.residual)],
        build: |s| {
            let sum = s.linear(s.v[0], 1)?;
            let activated = s.act(sum)?;
            y(if s.a.residual { s.g.add(activated, s.v[3])? } else { activated })
        },
        ..MATMUL
    };
    NORM_LINEAR = Entry {
        name: "norm_linear",
        formula: "norm(x) W + b",
        attributes: &[NORM, EPSILON],
        operands: &[X, WIDENING, WIDE_BIAS, W, B],
        build: |s| {
            let normed = s.norm(s.v[0], 3)?;
            y(s.linear(normed, 1)?)
        },
        ..MATMUL
    };
    QKV = Entry {
        name: "qkv",
        formula: "x [Wq Wk Wv] + b in one pass; q, k and v are views of it",
        operands: &[X, linear_weight("weight", sizes::joint), weight("bias", sizes::joint_vector)],
        build: |s| y(s.linear(s.v[0], 1)?),
        ..MATMUL
    };
    FFN = Entry {
        name: "ffn",
        formula: "x + act(norm(x) W1 + b1) W2 + b2, or x + act(norm(x) W + b)",
        attributes: &[NORM, EPSILON, ACT, SINGLE],
        operands: &[
            X,
            linear_weight("weight", square).when(|a| a.single),
            weight("bias", vector).when(|a| a.single),
            linear_weight("weight1", widening).when(|a| !a.single),
            weight("bias1", wide_vector).when(|a| !a.single),
            linear_weight("weight2", sizes::narrowing).when(|a| !a.single),
            weight("bias2", vector).when(|a| !a.single),
            W,
            B,
        ],
        build: |s| {
            let normed = s.norm(s.v[0], if s.a.single { 3 } else { 5 })?;
            let sum = s.linear(normed, 1)?;
            let activated = s.act(sum)?;
            let last = if s.a.single { activated } else { s.linear(activated, 3)? };
            y(s.g.add(s.v[0], last)?)
        },
        ..MATMUL
    };
    ATTENTION = Entry {
        name: "attention",
        formula: "dropout(softmax(q k^T / sqrt(d) + mask)) v; heads may share keys",
        attributes: &[MASK, DROPOUT, GROUP],
        usual: Attributes { p: 0.0, ..USUAL },
        operands: &[Q, K, V, data("mask", sizes::attention_mask).when(is_additive), SEED.when(drops)],
        build: |s| y(attend(s.g, s.v, s.a.mask, s.a.p, s.a.group)?),
        attends: true,
        ..MATMUL
    };
    ATTENTION_ADD_NORM = Entry {
        name: "attention_add_norm",
        formula: "s = r + attention(q, k, v); y = norm(s); returns both",
        attributes: &[MASK, NORM, EPSILON],
        operands: &[Q, K, V, R, W, B],
        outputs: |_| &["y", "s"],
        build: |s| {
            let merged = s.merged_heads()?;
            let sum = s.g.add(s.v[3], merged)?;
            Ok(Built { taken: vec![sum], ..s.normed_sum(sum, 4)? })
        },
        attends: true,
        ..MATMUL
    };
    ATTENTION_BLOCK = Entry {
        name: "attention_block",
        formula: "s = r + attention(q, k, v) W + b; y = norm(s); returns both",
        attributes: &[MASK, NORM, EPSILON],
        operands: &[Q, K, V, linear_weight("weight", square), weight("bias", vector), R, W, B],
        outputs: |_| &["y", "s"],
        build: |s| {
            let merged = s.merged_heads()?;
            let projected = s.linear(merged, 3)?;
            let sum = s.g.add(s.v[5], projected)?;
            Ok(Built { taken: vec![sum], ..s.normed_sum(sum, 6)? })
        },
        attends: true,
        ..MATMUL
    };
    LINEAR_CROSS_ENTROPY = Entry {
        name: "linear_cross_entropy",
        formula: "mean cross entropy of x W^T, logits of few rows at a time",
        operands: &[X, weight("weight", sizes::class_table), data("targets", sizes::indices)],
        outputs: |_| &["loss"],
        build: |s| {
            let (loss, logsumexp) = linear_cross_entropy(s.g, [s.v[0], s.v[1], s.v[2]])?;
            Ok(Built { outputs: vec![("loss", loss)], saved: vec![("logsumexp", logsumexp)], ..Built::default() })
        },
        backward: Backward::Written(linear_cross_entropy_backward),
        ..MATMUL
    };
    MOE_INT8 = Entry {
        name: "moe_int8",
        formula: "act(x W[expert] + b) of int8 rows routed to int8 experts; int8 rows, or floats",
        attributes: &[OPTIONAL_ACT, REQUANTIZE],
        operands: &[
            data("x", sizes::byte_rows),
            data("x_scale", sizes::row_scales),
            data("experts", sizes::indices),
            weight("weight", sizes::expert_bytes),
            weight("weight_scale", sizes::expert_scales),
            weight("bias", sizes::expert_vectors),
        ],
        outputs: |a| if a.requantize { &["q", "scale"] } else { &["y"] },
        build: |s| {
            let (x, w) = (Quantized { q: s.v[0], scale: s.v[1] }, Quantized { q: s.v[3], scale: s.v[4] });
            let dtype = s.g.node(s.v[5]).dtype;
            let sum = s.g.expert_linear(x, s.v[2], w, Some(s.v[5]), dtype)?;
            let activated = s.act(sum)?;
            if !s.a.requantize {
                return y(activated);
            }
            let rows = s.g.quantize_int8(activated)?;
            Ok(Built { outputs: vec![("q", rows.q), ("scale", rows.scale)], ..Built::default() })
        },
        backward: Backward::None,
        ..MATMUL
    };
}

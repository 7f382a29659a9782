//! Ops around matmuls: linear layers, attention, a language model's loss, experts.

use deuteron_graph::{Dtype, Quantized, Shape};

use super::Attributes;
use super::entry::{Backward, Built, Entry, Operand, USUAL, data, entries, linear_weight, matmul, weight, y};
use super::products::{Attend, attend, linear_cross_entropy};
use super::row_ops::{BIAS, SEED, SHIFT, W, X, drops, is_additive};
use super::sizes::{chosen, indices, keys, square, wide_vector, widening};
use super::words::{
    ACT, DOCUMENTS, DROPOUT, EPSILON, GROUP, IGNORED, MASK, NORM, OPTIONAL_ACT, OPTIONAL_SCALE, REDUCTION, REQUANTIZE,
    RESIDUAL, SCORE_BIAS, SINGLE, SLOPES, SMOOTHING, SOFT_CAP, WEIGHTED, WINDOW,
};

const WIDENING: Operand = linear_weight("weight", widening);
const WIDE_BIAS: Operand = weight("bias", wide_vector);
const SQUARE: Operand = linear_weight("weight", square);
const Q: Operand = data("q", |s, _| s.of(s.attention()));
const K: Operand = data("k", keys);
const V: Operand = data("v", keys);
/// A residual of the shape of heads side by side.
const R: Operand = data("r", |s, _| {
    let [batch, _, sequence, _] = s.attention();
    s.of([batch, sequence, s.cols])
});
const ATTENTION_MASK: Operand = data("mask", |s, _| {
    let [_, _, sequence, _] = s.attention();
    s.of([sequence, sequence])
});

entries! {
    MATMUL_OPS:
    LINEAR_ACT = matmul(
        "linear_act", "act(x W + b), or that + r", &[ACT, RESIDUAL],
        &[X, WIDENING, WIDE_BIAS, data("r", |s, _| s.of([s.rows, 4 * s.cols])).when(|a| a.residual)],
        |s| {
            let sum = s.linear(s.v[0], 1)?;
            let activated = s.act(sum)?;
            y(if s.a.residual { s.g.add(activated, s.v[3])? } else { activated })
        },
    );
    NORM_LINEAR = matmul(
        "norm_linear", "norm(x) W + b", &[NORM, EPSILON], &[X, WIDENING, WIDE_BIAS, W, SHIFT],
        |s| {
            let normed = s.norm(s.v[0], 3)?;
            y(s.linear(normed, 1)?)
        },
    );
    QKV = matmul(
        "qkv", "x [Wq Wk Wv] + b in one pass; q, k and v are views of it", &[],
        &[
            X,
            linear_weight("weight", |s, _| s.of([s.cols, 3 * s.cols])),
            weight("bias", |s, _| s.of([3 * s.cols])),
        ],
        |s| y(s.linear(s.v[0], 1)?),
    );
    FFN = matmul(
        "ffn", "x + act(norm(x) W1 + b1) W2 + b2, or x + act(norm(x) W + b)", &[NORM, EPSILON, ACT, SINGLE],
        &[
            X,
            SQUARE.when(|a| a.single),
            BIAS.when(|a| a.single),
            linear_weight("weight1", widening).when(|a| !a.single),
            weight("bias1", wide_vector).when(|a| !a.single),
            linear_weight("weight2", |s, _| s.of([4 * s.cols, s.cols])).when(|a| !a.single),
            weight("bias2", |s, _| s.of([s.cols])).when(|a| !a.single),
            W,
            SHIFT,
        ],
        |s| {
            let normed = s.norm(s.v[0], if s.a.single { 3 } else { 5 })?;
            let sum = s.linear(normed, 1)?;
            let activated = s.act(sum)?;
            let last = if s.a.single { activated } else { s.linear(activated, 3)? };
            y(s.g.add(s.v[0], last)?)
        },
    );
    ATTENTION = Entry { attends: true, usual: Attributes { p: 0.0, ..USUAL }, ..matmul(
        "attention", "dropout(softmax(scale * q k^T + mask)) v; heads may share keys",
        &[OPTIONAL_SCALE, MASK, DROPOUT, GROUP, SOFT_CAP, WINDOW, SLOPES, SCORE_BIAS, DOCUMENTS],
        &[
            Q,
            K,
            V,
            ATTENTION_MASK.when(is_additive),
            weight("slopes", |s, _| (Dtype::F32, Shape::from([s.attention()[1], 1, 1]))).when(|a| a.scores.slopes),
            Operand { name: "bias", ..ATTENTION_MASK }.when(|a| a.scores.bias),
            data("documents", |s, _| (Dtype::I32, Shape::from([s.attention()[2]]))).when(|a| a.scores.documents),
            SEED.when(drops),
        ],
        |s| {
            let &Attributes { mask, scale, p, scores: work, group, .. } = &s.a;
            y(attend(s.g, s.v, Attend { mask, scale, p, work, group })?)
        },
    ) };
    ATTENTION_ADD_NORM = Entry { attends: true, ..matmul(
        "attention_add_norm", "s = r + attention(q, k, v); y = norm(s); returns both", &[MASK, NORM, EPSILON],
        &[Q, K, V, R, W, SHIFT],
        |s| {
            let merged = s.merged_heads()?;
            let sum = s.g.add(s.v[3], merged)?;
            Ok(Built { taken: vec![sum], ..s.normed_sum(sum, 4)? })
        },
    ) }.returns(|_| &["y", "s"]);
    ATTENTION_BLOCK = Entry { attends: true, ..matmul(
        "attention_block", "s = r + attention(q, k, v) W + b; y = norm(s); returns both", &[MASK, NORM, EPSILON],
        &[Q, K, V, SQUARE, BIAS, R, W, SHIFT],
        |s| {
            let merged = s.merged_heads()?;
            let projected = s.linear(merged, 3)?;
            let sum = s.g.add(s.v[5], projected)?;
            Ok(Built { taken: vec![sum], ..s.normed_sum(sum, 6)? })
        },
    ) }.returns(|_| &["y", "s"]);
    LINEAR_CROSS_ENTROPY = matmul(
        "linear_cross_entropy", "cross entropy of x W^T, without storing all logits", &[REDUCTION, SMOOTHING, IGNORED],
        &[X, weight("weight", |s, _| s.of([s.classes, s.cols])), data("targets", indices)],
        |s| {
            let (loss, logsumexp) = linear_cross_entropy(s.g, [s.v[0], s.v[1], s.v[2]], &s.a)?;
            Ok(Built { outputs: vec![("loss", loss)], saved: vec![("logsumexp", logsumexp)], ..Built::default() })
        },
    ).returns(|_| &["loss"]);
    MOE = Entry { backward: Backward::None, ..matmul(
        "moe", "act(x W[expert] + b) of routed rows; with several experts per row, their weighted sum",
        &[OPTIONAL_ACT, WEIGHTED],
        &[
            X,
            data("experts", chosen),
            weight("weight", |s, _| {
                let [experts, columns] = s.expert_columns();
                s.of([experts, columns, s.cols])
            }),
            weight("bias", |s, _| s.of(s.expert_columns())),
            data("expert_weights", |s, _| (Dtype::F32, Shape::from([s.rows, s.experts.choices]))).when(|a| a.weighted),
        ],
        |s| {
            let sum = s.g.routed_linear(s.v[0], s.v[1], s.v[2], Some(s.v[3]))?;
            let activated = s.act(sum)?;
            y(if s.a.weighted { s.g.weighted_sum(activated, s.v[4])? } else { activated })
        },
    ) };
    MOE_INT8 = Entry { backward: Backward::None, ..matmul(
        "moe_int8", "act(x W[expert] + b) of routed int8 rows, with int8 experts; returns int8 rows or floats",
        &[OPTIONAL_ACT, REQUANTIZE],
        &[
            data("x", |s, _| (Dtype::I8, Shape::from([s.rows, s.cols]))),
            data("x_scale", |s, _| (Dtype::F32, Shape::from([s.rows, 1]))),
            data("experts", indices),
            weight("weight", |s, _| {
                let [experts, columns] = s.expert_columns();
                (Dtype::I8, Shape::from([experts, columns, s.cols]))
            }),
            weight("weight_scale", |s, _| (Dtype::F32, Shape::from(s.expert_columns()))),
            weight("bias", |s, _| s.of(s.expert_columns())),
        ],
        |s| {
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
    ) }.returns(|a| if a.requantize { &["q", "scale"] } else { &["y"] });
}

//! Ops of rows, whose time is dominated by memory.

use deuteron_graph::{Dtype, Mask, Shape};

use super::entry::{Backward, Built, Entry, Operand, USUAL, data, entries, rows, weight, y};
use super::sizes::{full, scored_heads, scores, seed, square, vector};
use super::words::{ACT as ACTIVATION, DROPOUT, EPSILON, GELU, MASK, NORM, OPTIONAL_SCALE, PACKED, RESIDUAL, SCALE};
use super::{Attributes, Norm};

pub(super) const X: Operand = data("x", full);
pub(super) const SEED: Operand = data("seed", seed);
pub(super) const BIAS: Operand = weight("bias", vector);
/// Weights of a norm; a layer norm has a shift.
pub(super) const W: Operand = weight("w", vector);
pub(super) const SHIFT: Operand = B.when(|a| a.norm == Norm::Layer);
const B: Operand = weight("b", vector);
const R: Operand = data("r", full);
const FULL_W: Operand = weight("w", full);
const FULL_B: Operand = weight("b", full);
const GATED: &[Operand] = &[
    data("xg", |s, _| s.of([s.rows, 2 * s.cols])).when(|a| a.packed),
    X.when(|a| !a.packed),
    data("g", full).when(|a| !a.packed),
];

entries! {
    ROW_OPS:
    ACT = rows("act", "act(x); act = gelu, gelu_erf, silu, relu", &[ACTIVATION], &[X], |s| y(s.act(s.v[0])?));
    MUL_ADD_ACT = rows("mul_add_act", "act(x * w + b), elementwise", &[ACTIVATION], &[X, FULL_W, FULL_B], |s| {
        let product = s.g.mul(s.v[0], s.v[1])?;
        let sum = s.g.add(product, s.v[2])?;
        y(s.act(sum)?)
    });
    ADD_ACT = rows("add_act", "act(x + r)", &[ACTIVATION], &[X, R], |s| {
        let sum = s.g.add(s.v[0], s.v[1])?;
        y(s.act(sum)?)
    });
    BIAS_ACT = rows("bias_act", "act(x + b), b per column", &[ACTIVATION], &[X, B], |s| {
        let sum = s.g.add(s.v[0], s.v[1])?;
        y(s.act(sum)?)
    });
    ACT_DROPOUT = rows("act_dropout", "dropout(act(x), p, seed)", &[ACTIVATION, DROPOUT], &[X, SEED], |s| {
        let activated = s.act(s.v[0])?;
        y(s.dropped(activated, s.v[1])?)
    });
    ACT_DROPOUT_ADD = rows(
        "act_dropout_add", "dropout(act(x), p, seed) + r", &[ACTIVATION, DROPOUT], &[X, R, SEED],
        |s| {
            let activated = s.act(s.v[0])?;
            let dropped = s.dropped(activated, s.v[2])?;
            y(s.g.add(dropped, s.v[1])?)
        },
    );
    BIAS_DROPOUT_ADD = rows("bias_dropout_add", "dropout(x + b, p, seed) + r", &[DROPOUT], &[X, B, R, SEED], |s| {
        let sum = s.g.add(s.v[0], s.v[1])?;
        let dropped = s.dropped(sum, s.v[3])?;
        y(s.g.add(dropped, s.v[2])?)
    });
    SWIGLU = rows("swiglu", "silu(x) * g; operands apart or one [.., 2h] tensor", &[PACKED], GATED, |s| {
        let (x, gate) = s.gated()?;
        y(s.g.swiglu(x, gate)?)
    });
    GEGLU = rows("geglu", "gelu(x) * g; operands apart or one [.., 2h] tensor", &[GELU, PACKED], GATED, |s| {
        let (x, gate) = s.gated()?;
        y(s.g.geglu(x, gate, s.a.gelu)?)
    });
    LAYER_NORM = rows(
        "layer_norm", "(x - mean) * rstd * w + b; returns mean and rstd too", &[EPSILON], &[X, W, SHIFT],
        |s| {
            let normed = s.g.layer_norm(s.v[0], s.v[1], s.v[2], s.a.eps)?;
            Ok(Built { saved: vec![("mean", normed.mean), ("rstd", normed.rstd)], ..y(normed.y)? })
        },
    );
    RMS_NORM = rows("rms_norm", "x * rstd * w; returns rstd too", &[EPSILON], &[X, W], |s| {
        let normed = s.g.rms_norm(s.v[0], s.v[1], s.a.eps)?;
        Ok(Built { saved: vec![("rstd", normed.rstd)], ..y(normed.y)? })
    });
    NORM_ACT = rows(
        "norm_act", "act(norm(x)); norm = layer, rms", &[NORM, EPSILON, ACTIVATION], &[X, W, SHIFT],
        |s| {
            let normed = s.norm(s.v[0], 1)?;
            y(s.act(normed)?)
        },
    );
    NORM_BIAS_ACT = rows(
        "norm_bias_act", "act(norm(x) + bias)", &[NORM, EPSILON, ACTIVATION], &[X, BIAS, W, SHIFT],
        |s| {
            let normed = s.norm(s.v[0], 2)?;
            let sum = s.g.add(normed, s.v[1])?;
            y(s.act(sum)?)
        },
    );
    ADD_NORM = rows("add_norm", "s = x + r; y = norm(s); returns both", &[NORM, EPSILON], &[X, R, W, SHIFT], |s| {
        let sum = s.g.add(s.v[0], s.v[1])?;
        s.normed_sum(sum, 2)
    }).returns(|_| &["y", "s"]);
    DROPOUT_ADD_NORM = rows(
        "dropout_add_norm", "s = r + dropout(x + bias, p, seed); y = norm(s); returns both",
        &[NORM, EPSILON, DROPOUT], &[X, BIAS, R, SEED, W, SHIFT],
        |s| {
            let sum = s.g.add(s.v[0], s.v[1])?;
            let dropped = s.dropped(sum, s.v[3])?;
            let sum = s.g.add(s.v[2], dropped)?;
            s.normed_sum(sum, 4)
        },
    ).returns(|_| &["y", "s"]);
    NORM_QUANTIZE = Entry { backward: Backward::None, ..rows(
        "norm_quantize", "int8 rows of norm(x) (or norm(x + r)) with one scale per row",
        &[NORM, EPSILON, RESIDUAL], &[X, data("r", full).when(|a| a.residual), W, SHIFT],
        |s| {
            let (x, first) = if s.a.residual { (s.g.add(s.v[0], s.v[1])?, 2) } else { (s.v[0], 1) };
            let normed = s.norm(x, first)?;
            let quantized = s.g.quantize_int8(normed)?;
            let mut outputs = vec![("q", quantized.q), ("scale", quantized.scale)];
            outputs.extend(s.a.residual.then_some(("s", x)));
            Ok(Built { outputs, ..Built::default() })
        },
    ) }.returns(|a| if a.residual { &["q", "scale", "s"] } else { &["q", "scale"] });
    SOFTMAX = Entry { usual: Attributes { mask: Mask::Full, p: 0.0, ..USUAL }, ..rows(
        "softmax", "dropout(softmax(scale * x + mask)); any subset", &[OPTIONAL_SCALE, MASK, DROPOUT],
        &[data("x", scores), data("mask", full).when(is_additive), SEED.when(drops)],
        |s| y(s.softmax()?),
    ) };
    ATTENTION_SCORES = Entry { is_square: true, usual: Attributes { scale: Some(0.125), ..USUAL }, ..rows(
        "attention_scores", "softmax(scale * q k^T + mask), materialised", &[MASK, SCALE],
        &[data("q", scored_heads), data("k", scored_heads), data("mask", square).when(is_additive)],
        |s| y(s.g.attention_scores(s.v[0], s.v[1], s.v.get(2).copied(), s.a.mask, s.a.scale.unwrap_or(1.0))?),
    ) };
    EMBED_NORM = rows(
        "embed_norm", "norm(wte[tokens] + wpe[position]); returns the sum too", &[NORM, EPSILON],
        &[
            data("tokens", |s, _| (Dtype::I32, Shape::from([1, s.rows]))),
            weight("wte", |s, _| s.of([s.tokens, s.cols])),
            weight("wpe", |s, _| s.of([s.positions, s.cols])),
            W,
            SHIFT,
        ],
        |s| {
            let positions = s.g.node(s.v[0]).shape.cols();
            let token = s.g.gather(s.v[1], s.v[0])?;
            let position = s.g.slice(s.v[2], 0, 0, positions)?;
            let sum = s.g.add(token, position)?;
            s.normed_sum(sum, 3)
        },
    ).returns(|_| &["y", "s"]);
}

pub(super) fn is_additive(a: &Attributes) -> bool {
    a.mask == Mask::Additive
}

pub(super) fn drops(a: &Attributes) -> bool {
    a.p > 0.0
}

//! Ops of rows, whose cost is that of memory.

use deuteron_graph::Mask;

use super::entry::{Backward, Built, Entry, Operand, ROWS, USUAL, data, entries, weight, y};
use super::sizes::{self, full, halves, scored_heads, scores, seed, square, vector};
use super::words::{ACT as ACTIVATION, DROPOUT, EPSILON, GELU, MASK, NORM, OPTIONAL_SCALE, PACKED, RESIDUAL, SCALE};
use super::{Attributes, Norm};

pub(super) const X: Operand = data("x", full);
pub(super) const SEED: Operand = data("seed", seed);
pub(super) const W: Operand = weight("w", vector);
/// The shift of a norm, which a layer norm has.
pub(super) const B: Operand = weight("b", vector).when(|a| a.norm == Norm::Layer);
const R: Operand = data("r", full);
const BIAS: Operand = weight("bias", vector);

entries! {
    ROW_OPS:
    ACT = Entry {
        name: "act",
        formula: "act(x); act = gelu, gelu_erf, silu, relu",
        attributes: &[ACTIVATION],
        operands: &[X],
        build: |s| y(s.act(s.v[0])?),
        ..ROWS
    };
    MUL_ADD_ACT = Entry {
        name: "mul_add_act",
        formula: "act(x * w + b), elementwise",
        attributes: &[ACTIVATION],
        operands: &[X, weight("w", full), weight("b", full)],
        build: |s| {
            let product = s.g.mul(s.v[0], s.v[1])?;
            let sum = s.g.add(product, s.v[2])?;
            y(s.act(sum)?)
        },
        ..ROWS
    };
    ADD_ACT = Entry {
        name: "add_act",
        formula: "act(x + r)",
        attributes: &[ACTIVATION],
        operands: &[X, R],
        build: |s| {
            let sum = s.g.add(s.v[0], s.v[1])?;
            y(s.act(sum)?)
        },
        ..ROWS
    };
    BIAS_ACT = Entry {
        name: "bias_act",
        formula: "act(x + b), b per column",
        attributes: &[ACTIVATION],
        operands: &[X, weight("b", vector)],
        build: |s| {
            let sum = s.g.add(s.v[0], s.v[1])?;
            y(s.act(sum)?)
        },
        ..ROWS
    };
    ACT_DROPOUT = Entry {
        name: "act_dropout",
        formula: "dropout(act(x), p, seed)",
        attributes: &[ACTIVATION, DROPOUT],
        operands: &[X, SEED],
        build: |s| {
            let activated = s.act(s.v[0])?;
            y(s.dropped(activated, s.v[1])?)
        },
        ..ROWS
    };
    ACT_DROPOUT_ADD = Entry {
        name: "act_dropout_add",
        formula: "dropout(act(x), p, seed) + r",
        attributes: &[ACTIVATION, DROPOUT],
        operands: &[X, R, SEED],
        build: |s| {
            let activated = s.act(s.v[0])?;
            let dropped = s.dropped(activated, s.v[2])?;
            y(s.g.add(dropped, s.v[1])?)
        },
        ..ROWS
    };
    BIAS_DROPOUT_ADD = Entry {
        name: "bias_dropout_add",
        formula: "dropout(x + b, p, seed) + r",
        attributes: &[DROPOUT],
        operands: &[X, weight("b", vector), R, SEED],
        build: |s| {
            let sum = s.g.add(s.v[0], s.v[1])?;
            let dropped = s.dropped(sum, s.v[3])?;
            y(s.g.add(dropped, s.v[2])?)
        },
        ..ROWS
    };
    SWIGLU = Entry {
        name: "swiglu",
        formula: "silu(x) * g; operands apart or one [.., 2h] tensor",
        attributes: &[PACKED],
        operands: GATED,
        build: |s| {
            let (x, gate) = s.gated()?;
            y(s.g.swiglu(x, gate)?)
        },
        ..ROWS
    };
    GEGLU = Entry {
        name: "geglu",
        formula: "gelu(x) * g; operands apart or one [.., 2h] tensor",
        attributes: &[GELU, PACKED],
        operands: GATED,
        build: |s| {
            let (x, gate) = s.gated()?;
            y(s.g.geglu(x, gate, s.a.gelu)?)
        },
        ..ROWS
    };
    LAYER_NORM = Entry {
        name: "layer_norm",
        formula: "(x - mean) * rstd * w + b; returns mean and rstd too",
        attributes: &[EPSILON],
        operands: &[X, W, B],
        build: |s| {
            let normed = s.g.layer_norm(s.v[0], s.v[1], s.v[2], s.a.eps)?;
            Ok(Built { saved: vec![("mean", normed.mean), ("rstd", normed.rstd)], ..y(normed.y)? })
        },
        ..ROWS
    };
    RMS_NORM = Entry {
        name: "rms_norm",
        formula: "x * rstd * w; returns rstd too",
        attributes: &[EPSILON],
        operands: &[X, W],
        build: |s| {
            let normed = s.g.rms_norm(s.v[0], s.v[1], s.a.eps)?;
            Ok(Built { saved: vec![("rstd", normed.rstd)], ..y(normed.y)? })
        },
        ..ROWS
    };
    NORM_ACT = Entry {
        name: "norm_act",
        formula: "act(norm(x)); norm = layer_norm, rms_norm",
        attributes: &[NORM, EPSILON, ACTIVATION],
        operands: &[X, W, B],
        build: |s| {
            let normed = s.norm(s.v[0], 1)?;
            y(s.act(normed)?)
        },
        ..ROWS
    };
    NORM_BIAS_ACT = Entry {
        name: "norm_bias_act",
        formula: "act(norm(x) + bias)",
        attributes: &[NORM, EPSILON, ACTIVATION],
        operands: &[X, BIAS, W, B],
        build: |s| {
            let normed = s.norm(s.v[0], 2)?;
            let sum = s.g.add(normed, s.v[1])?;
            y(s.act(sum)?)
        },
        ..ROWS
    };
    ADD_NORM = Entry {
        name: "add_norm",
        formula: "s = x + r; y = norm(s); returns both",
        attributes: &[NORM, EPSILON],
        operands: &[X, R, W, B],
        outputs: |_| &["y", "s"],
        build: |s| {
            let sum = s.g.add(s.v[0], s.v[1])?;
            s.normed_sum(sum, 2)
        },
        ..ROWS
    };
    DROPOUT_ADD_NORM = Entry {
        name: "dropout_add_norm",
        formula: "s = r + dropout(x + bias, p, seed); y = norm(s); returns both",
        attributes: &[NORM, EPSILON, DROPOUT],
        operands: &[X, BIAS, R, SEED, W, B],
        outputs: |_| &["y", "s"],
        build: |s| {
            let sum = s.g.add(s.v[0], s.v[1])?;
            let dropped = s.dropped(sum, s.v[3])?;
            let sum = s.g.add(s.v[2], dropped)?;
            s.normed_sum(sum, 4)
        },
        ..ROWS
    };
    NORM_QUANTIZE = Entry {
        name: "norm_quantize",
        formula: "int8 rows of norm(x) (or norm(x + r)) with a scale a row",
        attributes: &[NORM, EPSILON, RESIDUAL],
        operands: &[X, data("r", full).when(|a| a.residual), W, B],
        outputs: |a| if a.residual { &["q", "scale", "s"] } else { &["q", "scale"] },
        build: |s| {
            let (x, first) = if s.a.residual { (s.g.add(s.v[0], s.v[1])?, 2) } else { (s.v[0], 1) };
            let normed = s.norm(x, first)?;
            let quantized = s.g.quantize_int8(normed)?;
            let mut outputs = vec![("q", quantized.q), ("scale", quantized.scale)];
            outputs.extend(s.a.residual.then_some(("s", x)));
            Ok(Built { outputs, ..Built::default() })
        },
        backward: Backward::None,
        ..ROWS
    };
    SOFTMAX = Entry {
        name: "softmax",
        formula: "dropout(softmax(scale * x + mask)); any subset",
        attributes: &[OPTIONAL_SCALE, MASK, DROPOUT],
        usual: Attributes { mask: Mask::Full, p: 0.0, ..USUAL },
        operands: &[data("x", scores), data("mask", full).when(is_additive), SEED.when(drops)],
        build: |s| y(s.softmax()?),
        ..ROWS
    };
    ATTENTION_SCORES = Entry {
        name: "attention_scores",
        formula: "softmax(scale * q k^T + mask), materialised",
        attributes: &[MASK, SCALE],
        usual: Attributes { scale: Some(0.125), ..USUAL },
        operands: &[data("q", scored_heads), data("k", scored_heads), data("mask", square).when(is_additive)],
        build: |s| {
            let scale = s.a.scale.unwrap_or(1.0);
            y(s.g.attention_scores(s.v[0], s.v[1], s.v.get(2).copied(), s.a.mask, scale)?)
        },
        is_square: true,
        ..ROWS
    };
    EMBED_NORM = Entry {
        name: "embed_norm",
        formula: "norm(wte[tokens] + wpe[position]); returns the sum too",
        attributes: &[NORM, EPSILON],
        operands: &[
            data("tokens", sizes::tokens),
            weight("wte", sizes::token_table),
            weight("wpe", sizes::position_table),
            W,
            B,
        ],
        outputs: |_| &["y", "s"],
        build: |s| {
            let positions = s.g.node(s.v[0]).shape.cols();
            let token = s.g.gather(s.v[1], s.v[0])?;
            let position = s.g.slice(s.v[2], 0, 0, positions)?;
            let sum = s.g.add(token, position)?;
            s.normed_sum(sum, 3)
        },
        ..ROWS
    };
}

const GATED: &[Operand] =
    &[data("xg", halves).when(|a| a.packed), data("x", full).when(|a| !a.packed), data("g", full).when(|a| !a.packed)];

pub(super) fn is_additive(a: &Attributes) -> bool {
    a.mask == Mask::Additive
}

pub(super) fn drops(a: &Attributes) -> bool {
    a.p > 0.0
}

//! The composites, computed directly from their formulas in plain loops over rows.
//!
//! Nothing here uses an expansion: this is the independent check that finds a wrong one.

use deuteron_graph::{Activation, Composite, Dtype, Mask, ScoreWork, Shape};

use crate::array::Array;
use crate::philox::kept;
use crate::round::round_to;

/// The results of a composite for these operands, in the order of its call. Panics on operands that a graph refuses.
pub fn formula(composite: &Composite, inputs: &[Array]) -> Vec<Array> {
    let x = &inputs[0];
    match *composite {
        Composite::LayerNorm { eps } => layer_norm(x, &inputs[1], &inputs[2], eps),
        Composite::RmsNorm { eps } => rms_norm(x, &inputs[1], eps),
        Composite::Softmax => vec![by_row(x, softmax)],
        Composite::CausalMask => vec![causal_mask(x)],
        Composite::Activation(function) => vec![by_element(x, |x| activation(function, x))],
        Composite::Swiglu => vec![gated(x, &inputs[1], Activation::Silu)],
        Composite::Geglu { kind } => vec![gated(x, &inputs[1], kind.into())],
        Composite::Dropout { p, offset } => vec![dropout(x, &inputs[1], p, offset)],
        Composite::Linear { transposed } => vec![linear(x, &inputs[1], inputs.get(2), transposed)],
        Composite::AttentionScores { mask, scale } => {
            vec![probabilities(&inputs[..2], inputs.get(2), mask, scale, &Scoring::NONE)]
        }
        Composite::Attention { mask, scale, p, offset, work } => {
            vec![attention(inputs, mask, scale, &work, (p, offset))]
        }
        Composite::QuantizeInt8 => quantize(x, 127.0, Dtype::I8),
        Composite::QuantizeFp8 => quantize(x, 448.0, Dtype::F8e4m3),
        Composite::Dequantize { .. } => vec![dequantize(x, &inputs[1])],
        Composite::QuantizedLinear { .. } => vec![quantized_linear(inputs)],
        Composite::ExpertLinear { .. } => vec![expert_linear(inputs)],
        Composite::RoutedLinear => vec![routed_linear(inputs)],
        Composite::WeightedSum => vec![weighted_sum(x, &inputs[1])],
        Composite::CrossEntropy => cross_entropy(x, &inputs[1]),
        Composite::LinearCrossEntropy { smoothing, ignored } => linear_cross_entropy(inputs, smoothing, ignored),
        Composite::LinearCrossEntropyGradient { smoothing } => linear_cross_entropy_gradient(inputs, smoothing),
    }
}

fn by_element(x: &Array, f: impl Fn(f64) -> f64) -> Array {
    Array { shape: x.shape.clone(), values: x.values.iter().map(|&x| f(x)).collect() }
}

fn by_row(x: &Array, f: impl Fn(&[f64]) -> Vec<f64>) -> Array {
    Array { shape: x.shape.clone(), values: (0..x.rows()).flat_map(|row| f(x.row(row))).collect() }
}

/// One value a row.
fn column(x: &Array, f: impl Fn(&[f64]) -> f64) -> Array {
    Array { shape: x.shape.with_cols(1), values: (0..x.rows()).map(|row| f(x.row(row))).collect() }
}

fn mean(row: &[f64]) -> f64 {
    row.iter().sum::<f64>() / row.len() as f64
}

/// The mean of the squared distances to the mean.
fn variance(row: &[f64]) -> f64 {
    let mean = mean(row);
    row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64
}

fn layer_norm(x: &Array, weight: &Array, bias: &Array, eps: f64) -> Vec<Array> {
    let deviation = |row: &[f64]| (variance(row) + eps).sqrt();
    let y = by_row(x, |row| {
        let normed = row.iter().map(|x| (x - mean(row)) / deviation(row));
        normed.zip(&weight.values).zip(&bias.values).map(|((x, w), b)| x * w + b).collect()
    });
    vec![y, column(x, mean), column(x, |row| 1.0 / deviation(row))]
}

fn rms_norm(x: &Array, weight: &Array, eps: f64) -> Vec<Array> {
    let root = |row: &[f64]| (row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64 + eps).sqrt();
    let y = by_row(x, |row| row.iter().zip(&weight.values).map(|(x, w)| x / root(row) * w).collect());
    vec![y, column(x, |row| 1.0 / root(row))]
}

/// `e^x` over its sum. A row of `-inf` is fully masked: zeros.
fn softmax(row: &[f64]) -> Vec<f64> {
    if row.iter().all(|&x| x == f64::NEG_INFINITY) {
        return vec![0.0; row.len()];
    }
    let normaliser = log_sum_exp(row);
    row.iter().map(|x| (x - normaliser).exp()).collect()
}

fn log_sum_exp(row: &[f64]) -> f64 {
    let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY && !row.iter().any(|x| x.is_nan()) {
        return f64::NEG_INFINITY;
    }
    largest + row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln()
}

/// Query `i` of `m` sees key `j` of `n` iff `j <= i + n - m`.
fn causal_mask(x: &Array) -> Array {
    let (rows, cols) = (x.shape[x.shape.rank() - 2], x.cols());
    Array::from_fn(x.shape.clone(), |index| {
        let (row, col) = (index / cols % rows, index % cols);
        if col + rows <= row + cols { x.values[index] } else { f64::NEG_INFINITY }
    })
}

fn activation(function: Activation, x: f64) -> f64 {
    match function {
        Activation::GeluTanh => {
            let argument = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            x / 2.0 * (1.0 + argument.tanh())
        }
        Activation::GeluErf => x / 2.0 * (1.0 + libm::erf(x / 2f64.sqrt())),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Relu => {
            if x < 0.0 {
                0.0
            } else {
                x
            }
        }
    }
}

fn gated(x: &Array, gate: &Array, function: Activation) -> Array {
    Array::from_fn(x.shape.clone(), |index| activation(function, x.values[index]) * gate.values[index])
}

fn dropout(x: &Array, seed: &Array, p: f64, offset: u32) -> Array {
    let seed = seed.values[0] as i64 as u32;
    Array::from_fn(x.shape.clone(), |index| {
        let is_kept = kept(index as u64, seed, offset, p) == 1.0;
        if is_kept { x.values[index] / (1.0 - p) } else { 0.0 }
    })
}

fn linear(x: &Array, weight: &Array, bias: Option<&Array>, transposed: bool) -> Array {
    let outputs = weight.shape[if transposed { 0 } else { 1 }];
    let entry = |k: usize, col: usize| if transposed { weight.at(&[col, k]) } else { weight.at(&[k, col]) };
    let shape = x.shape.with_cols(outputs);
    Array::from_fn(shape, |index| {
        let (row, col) = (index / outputs, index % outputs);
        let product: f64 = x.row(row).iter().enumerate().map(|(k, x)| x * entry(k, col)).sum();
        product + bias.map_or(0.0, |bias| bias.values[col])
    })
}

/// Work on scores, with its operands.
struct Scoring<'a> {
    work: ScoreWork,
    slopes: Option<&'a Array>,
    bias: Option<&'a Array>,
    documents: Option<&'a Array>,
}

impl Scoring<'_> {
    const NONE: Scoring<'static> = Scoring { work: ScoreWork::NONE, slopes: None, bias: None, documents: None };

    /// A scaled score, at a row-major index of the scores, of a key that is so far from the query's own position.
    fn worked(&self, score: f64, shape: &Shape, index: usize, distance: f64) -> f64 {
        let capped = self.work.soft_cap.map_or(score, |cap| cap * (score / cap).tanh());
        let at = |x: Option<&Array>| x.map_or(0.0, |x| broadcast_at(x, shape, index));
        capped + at(self.slopes) * distance + at(self.bias)
    }

    /// Whether the query of a row of scores sees no key that is so far from its own position.
    fn hides(&self, [row, rows, key, keys, own]: [usize; 5], distance: f64) -> bool {
        let far = self.work.window.is_some_and(|window| distance.abs() >= window as f64);
        let other = self.documents.is_some_and(|documents| {
            let sequences = documents.values.len() / keys;
            let first = row * sequences / rows * keys;
            documents.values[first + own] != documents.values[first + key]
        });
        far || other
    }
}

fn probabilities(operands: &[Array], additive: Option<&Array>, mask: Mask, scale: f64, scoring: &Scoring) -> Array {
    let (q, k) = (&operands[0], &operands[1]);
    let rank = q.shape.rank();
    let (queries, keys) = (q.shape[rank - 2], k.shape[rank - 2]);
    let shape = q.shape.with_cols(keys);
    let mut values = Vec::with_capacity(shape.elements());
    for row in 0..q.rows() {
        let (batch, query) = (row / queries, row % queries);
        // Positions, one a sequence: rows of one are neighbours.
        let first = match (mask, additive) {
            (Mask::Cached, Some(positions)) => positions.values[row * positions.values.len() / q.rows()],
            _ => keys as f64 - queries as f64,
        };
        let score = |key: usize| {
            let dot: f64 = q.row(row).iter().zip(k.row(batch * keys + key)).map(|(q, k)| q * k).sum();
            let distance = key as f64 - (first + query as f64);
            let index = row * keys + key;
            let worked = scoring.worked(scale * dot, &shape, index, distance);
            let own = (keys + query).saturating_sub(queries);
            match mask {
                Mask::Causal | Mask::Cached if distance > 0.0 => f64::NEG_INFINITY,
                _ if scoring.hides([row, q.rows(), key, keys, own], distance) => f64::NEG_INFINITY,
                Mask::Full | Mask::Causal | Mask::Cached => worked,
                Mask::Additive => worked + additive.map_or(0.0, |mask| broadcast_at(mask, &shape, index)),
            }
        };
        values.extend(softmax(&(0..keys).map(score).collect::<Vec<_>>()));
    }
    Array { shape, values }
}

/// The element of `x`, repeated to `shape`, at a row-major index of `shape`.
fn broadcast_at(x: &Array, shape: &Shape, index: usize) -> f64 {
    let strides = shape.strides();
    let missing = shape.rank() - x.shape.rank();
    let own: Vec<usize> = (0..x.shape.rank())
        .map(|axis| match x.shape[axis] {
            1 => 0,
            _ => index / strides[axis + missing] % shape[axis + missing],
        })
        .collect();
    x.at(&own)
}

fn attention(inputs: &[Array], mask: Mask, scale: f64, work: &ScoreWork, (p, offset): (f64, u32)) -> Array {
    let (q, k, v) = (&inputs[0], &inputs[1], &inputs[2]);
    let mut rest = inputs[3..].iter();
    let mut next = |is_there: bool| if is_there { rest.next() } else { None };
    let additive = next(matches!(mask, Mask::Additive | Mask::Cached));
    let (slopes, bias, documents) = (next(work.slopes), next(work.bias), next(work.documents));
    let scoring = Scoring { work: *work, slopes, bias, documents };
    let mut weights = probabilities(&inputs[..2], additive, mask, scale, &scoring);
    if p > 0.0 {
        weights = dropout(&weights, &inputs[inputs.len() - 1], p, offset);
    }
    let rank = q.shape.rank();
    let (queries, keys, features) = (q.shape[rank - 2], k.shape[rank - 2], v.cols());
    Array::from_fn(q.shape.with_cols(features), |index| {
        let (row, feature) = (index / features, index % features);
        let batch = row / queries;
        weights.row(row).iter().enumerate().map(|(key, weight)| weight * v.row(batch * keys + key)[feature]).sum()
    })
}

/// `q = x / scale` rounded, `scale = absmax / largest`; a row of zeros keeps scale 0 and bytes 0.
fn quantize(x: &Array, largest: f64, to: Dtype) -> Vec<Array> {
    let scale = |row: &[f64]| {
        let poisoned = row.iter().any(|x| x.is_nan());
        let absmax = row.iter().fold(0.0, |absmax: f64, x| absmax.max(x.abs()));
        if poisoned { f64::NAN } else { absmax / largest }
    };
    let q = by_row(x, |row| {
        let scale = scale(row);
        row.iter().map(|&x| if scale == 0.0 { 0.0 } else { round_to(to, x / scale) }).collect()
    });
    vec![q, column(x, scale)]
}

fn dequantize(q: &Array, scale: &Array) -> Array {
    let shape = q.shape.broadcast(&scale.shape).unwrap_or_else(|| q.shape.clone());
    Array::from_fn(shape.clone(), |index| broadcast_at(q, &shape, index) * broadcast_at(scale, &shape, index))
}

fn quantized_linear(inputs: &[Array]) -> Array {
    let (x, w) = (&inputs[0], &inputs[2]);
    let columns = w.rows();
    Array::from_fn(x.shape.with_cols(columns), |index| {
        let (row, column) = (index / columns, index % columns);
        let sum: f64 = x.row(row).iter().zip(w.row(column)).map(|(x, w)| x * w).sum();
        let scale = inputs[1].values[row] * inputs[3].values[column];
        sum * scale + inputs.get(4).map_or(0.0, |bias| bias.values[column])
    })
}

fn expert_linear(inputs: &[Array]) -> Array {
    let (x, weights) = (&inputs[0], &inputs[3]);
    let columns = weights.shape[1];
    Array::from_fn([x.rows(), columns], |index| {
        let (row, column) = (index / columns, index % columns);
        let place = inputs[2].values[row] as usize * columns + column;
        let sum: f64 = x.row(row).iter().zip(weights.row(place)).map(|(x, w)| x * w).sum();
        let scale = inputs[1].values[row] * inputs[4].values[place];
        sum * scale + inputs.get(5).map_or(0.0, |bias| bias.values[place])
    })
}

fn routed_linear(inputs: &[Array]) -> Array {
    let (x, picked, weights) = (&inputs[0], &inputs[1], &inputs[2]);
    let columns = weights.shape[1];
    // Choices that share a row.
    let shared = picked.values.len().checked_div(x.rows()).unwrap_or(1);
    Array::from_fn([&picked.shape[..], &[columns]].concat(), |index| {
        let (row, column) = (index / columns, index % columns);
        let place = picked.values[row] as usize * columns + column;
        let sum: f64 = x.row(row / shared).iter().zip(weights.row(place)).map(|(x, w)| x * w).sum();
        sum + inputs.get(3).map_or(0.0, |bias| bias.values[place])
    })
}

fn weighted_sum(x: &Array, weights: &Array) -> Array {
    let (choices, columns) = (weights.cols(), x.cols());
    let rows = &weights.shape[..weights.shape.rank() - 1];
    Array::from_fn([rows, &[columns]].concat(), |index| {
        let (row, column) = (index / columns, index % columns);
        let part = |choice: usize| {
            let place = row * choices + choice;
            weights.values[place] * x.values[place * columns + column]
        };
        (0..choices).map(part).sum()
    })
}

/// Mean over rows of `log sum e^x - x[target]`, and the logarithms.
fn cross_entropy(logits: &Array, targets: &Array) -> Vec<Array> {
    let normalisers = column(logits, log_sum_exp);
    let losses = (0..logits.rows()).map(|row| normalisers.values[row] - logits.row(row)[targets.values[row] as usize]);
    let loss = losses.sum::<f64>() / logits.rows() as f64;
    vec![Array::scalar(loss), normalisers]
}

/// Of each row `log sum e^z - (1 - smoothing) z[target] - smoothing mean(z)`, and the logarithms, with `z = x w^T`.
fn linear_cross_entropy(inputs: &[Array], smoothing: f64, ignored: Option<i32>) -> Vec<Array> {
    let logits = linear(&inputs[0], &inputs[1], None, true);
    let normalisers = column(&logits, log_sum_exp);
    let loss = |row: usize| {
        let target = inputs[2].values[row];
        if ignored.is_some_and(|ignored| target == f64::from(ignored)) {
            return 0.0;
        }
        let smoothed = if smoothing == 0.0 { 0.0 } else { smoothing * mean(logits.row(row)) };
        normalisers.values[row] - (1.0 - smoothing) * logits.row(row)[target as usize] - smoothed
    };
    let losses = Array { shape: normalisers.shape.clone(), values: (0..logits.rows()).map(loss).collect() };
    vec![losses, normalisers]
}

/// `d_z = d_logsumexp e^(z - logsumexp) - d_loss ((1 - smoothing) [target] + smoothing / classes)`, then `d_z w` and `d_z^T x`.
fn linear_cross_entropy_gradient(inputs: &[Array], smoothing: f64) -> Vec<Array> {
    let [x, w, targets, normalisers, d_logsumexp, d_loss] = inputs else { unreachable!("six operands") };
    let (logits, classes) = (linear(x, w, None, true), w.rows());
    let slope = |row: usize, class: usize| {
        let probability = (logits.row(row)[class] - normalisers.values[row]).exp();
        let kept = if targets.values[row] == class as f64 { 1.0 - smoothing } else { 0.0 };
        d_logsumexp.values[row] * probability - d_loss.values[row] * (kept + smoothing / classes as f64)
    };
    let slopes = Array::from_fn(logits.shape.clone(), |index| slope(index / classes, index % classes));
    let cols = x.cols();
    let d_x = |index: usize| {
        let (row, column) = (index / cols, index % cols);
        (0..classes).map(|class| slopes.row(row)[class] * w.row(class)[column]).sum()
    };
    let d_w = |index: usize| {
        let (class, column) = (index / cols, index % cols);
        (0..x.rows()).map(|row| slopes.row(row)[class] * x.row(row)[column]).sum()
    };
    vec![Array::from_fn(x.shape.clone(), d_x), Array::from_fn(w.shape.clone(), d_w)]
}

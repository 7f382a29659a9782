//! Every composite: its expansion, interpreted, against its formula.

use deuteron_graph::{Activation, Composite, Dtype, Gelu, Graph, Mask, ScoreWork, Shape};
use deuteron_reference::{Array, Interpretation, Rounding, formula, interpret};

const SIZES: [usize; 6] = [1, 2, 7, 64, 127, 129];

/// A composite on operands of these dtypes, all results as outputs.
fn expand(composite: Composite, inputs: &[(Dtype, Array)], rounding: Rounding) -> Interpretation {
    let mut graph = Graph::new(composite.name());
    let operands: Vec<_> = inputs
        .iter()
        .enumerate()
        .map(|(i, (dtype, array))| graph.input(&format!("x{i}"), *dtype, array.shape.clone()).unwrap())
        .collect();
    let results = graph.call(composite, &operands).unwrap();
    for (i, &result) in results.iter().enumerate() {
        graph.output(&format!("y{i}"), result).unwrap();
    }
    let arrays: Vec<Array> = inputs.iter().map(|(_, array)| array.clone()).collect();
    interpret(&graph, &arrays, rounding).unwrap()
}

/// Both sides are f64. A formula has fewer than 16 steps an element beside its sums, and each step, and each of
/// `length` terms of a sum, may be off by an epsilon of the largest magnitude that takes part.
fn check(composite: Composite, inputs: &[(Dtype, Array)], length: usize) {
    let got = expand(composite, inputs, Rounding::Exact);
    let arrays: Vec<Array> = inputs.iter().map(|(_, array)| array.clone()).collect();
    let expected = formula(&composite, &arrays);
    assert_eq!(got.outputs.len(), expected.len(), "{composite:?}");
    let scale = arrays.iter().chain(&expected).map(Array::max_abs).fold(1.0, f64::max);
    let bound = 16.0 * length as f64 * f64::EPSILON * scale;
    for (got, expected) in got.outputs.iter().zip(&expected) {
        assert_eq!(got.shape, expected.shape, "{composite:?}");
        for (index, (got, expected)) in got.values.iter().zip(&expected.values).enumerate() {
            let agrees = got == expected || (got.is_nan() && expected.is_nan()) || (got - expected).abs() <= bound;
            assert!(agrees, "{composite:?} on {:?} at {index}: {got} against {expected}", arrays[0].shape);
        }
    }
}

fn float(array: Array) -> (Dtype, Array) {
    (Dtype::F32, array)
}

fn integer(array: Array) -> (Dtype, Array) {
    (Dtype::I32, array)
}

/// Shapes of several ranks whose last axis is `cols`.
fn shapes(cols: usize) -> Vec<Shape> {
    vec![Shape::from([cols]), Shape::from([3, cols]), Shape::from([2, 5, cols]), Shape::from([2, 1, 3, cols])]
}

/// Values with the cases that break careless formulas: large, tiny, equal, zero.
fn values(shape: &Shape, seed: u64) -> Array {
    let mut array = Array::normal(shape.clone(), seed);
    let cols = array.cols();
    for (index, value) in array.values.iter_mut().enumerate() {
        match index / cols % 4 {
            1 => *value *= 30.0,
            2 => *value = *value * 1e-3 + 100.0,
            _ => {}
        }
    }
    array
}

#[test]
fn elementwise_composites() {
    let unary = Activation::ALL.map(Composite::Activation);
    let gated = [Composite::Swiglu, Composite::Geglu { kind: Gelu::Tanh }, Composite::Geglu { kind: Gelu::Erf }];
    for shape in SIZES.into_iter().flat_map(shapes) {
        for composite in unary {
            check(composite, &[float(values(&shape, 1))], 1);
        }
        for composite in gated {
            // The product of the two largest values sets the scale of the error.
            check(composite, &[float(values(&shape, 2)), float(values(&shape, 3))], 128);
        }
    }
}

#[test]
fn elementwise_composites_at_the_edges() {
    let edges = vec![0.0, -0.0, 1e4, -1e4, 1e-300, f64::INFINITY, f64::NAN, 700.0, -700.0];
    let x = || float(Array::new([9], edges.clone()));
    for activation in [Activation::GeluTanh, Activation::Silu, Activation::Relu] {
        check(Composite::Activation(activation), &[x()], 1);
    }
    check(Composite::Swiglu, &[x(), float(Array::filled([9], 2.0))], 1);
}

#[test]
fn norms() {
    for shape in SIZES.into_iter().flat_map(shapes) {
        let cols = shape.cols();
        let x = values(&shape, 4);
        let (w, b) = (Array::normal([cols], 5), Array::normal([cols], 6));
        for eps in [1e-5f64, 1e-3] {
            // What cancels in `x - mean` is scaled up again by `rstd`, which is at most `1 / sqrt(eps)`.
            let length = (cols as f64 / eps.sqrt()).ceil() as usize;
            check(Composite::LayerNorm { eps }, &[float(x.clone()), float(w.clone()), float(b.clone())], length);
            check(Composite::RmsNorm { eps }, &[float(x.clone()), float(w.clone())], length);
        }
    }
}

#[test]
fn nan_spoils_only_its_row() {
    let mut x = Array::normal([3, 7], 7);
    x.values[8] = f64::NAN;
    let ones = || float(Array::filled([7], 1.0));
    check(Composite::LayerNorm { eps: 1e-5 }, &[float(x.clone()), ones(), ones()], 100);
    check(Composite::RmsNorm { eps: 1e-5 }, &[float(x.clone()), ones()], 100);
    check(Composite::Softmax, &[float(x.clone())], 100);
    let got = expand(Composite::Softmax, &[float(x)], Rounding::Exact).outputs.remove(0);
    assert!(got.row(1).iter().all(|x| x.is_nan()) && got.row(0).iter().all(|x| x.is_finite()));
}

#[test]
fn softmax_rows() {
    for shape in SIZES.into_iter().flat_map(shapes) {
        let mut x = values(&shape, 8);
        let cols = x.cols();
        // The last row is fully masked; the first has one masked column and one far above the others.
        let last = x.values.len() - cols;
        x.values[0] = f64::NEG_INFINITY;
        x.values[cols - 1] = 1e5;
        x.values[last..].fill(f64::NEG_INFINITY);
        check(Composite::Softmax, &[float(x.clone())], cols);
        let got = expand(Composite::Softmax, &[float(x)], Rounding::Analysed);
        assert!(got.outputs[0].row(got.outputs[0].rows() - 1).iter().all(|&x| x == 0.0));
        // A tensor of few elements carries the reach of rounding as well.
        if got.outputs[0].values.len() >= 32 {
            assert_eq!(got.slack, [None], "the guards of a softmax are no near ties");
        }
    }
}

#[test]
fn causal_masks() {
    for (rows, cols) in [(1, 1), (7, 7), (3, 127), (129, 64), (5, 2)] {
        check(Composite::CausalMask, &[float(Array::normal([2, rows, cols], 9))], 1);
        let got = expand(Composite::CausalMask, &[float(Array::normal([rows, cols], 9))], Rounding::Analysed);
        assert_eq!(got.slack, [None], "positions are exact");
    }
}

#[test]
fn dropouts() {
    for shape in SIZES.into_iter().flat_map(shapes) {
        for (p, offset, seed) in [(0.0, 0, 1.0), (0.1, 3, 12345.0), (0.5, 7, -2.0)] {
            let inputs = [float(values(&shape, 10)), integer(Array::scalar(seed))];
            check(Composite::Dropout { p, offset }, &inputs, 1);
        }
    }
}

#[test]
fn linear_layers() {
    for (inner, outputs) in [(1, 1), (7, 129), (127, 2), (129, 64)] {
        for leading in [vec![3], vec![2, 5]] {
            let x = float(Array::normal([leading, vec![inner]].concat(), 11));
            let b = float(Array::normal([outputs], 13));
            for transposed in [false, true] {
                let w = float(Array::normal(if transposed { [outputs, inner] } else { [inner, outputs] }, 12));
                check(Composite::Linear { transposed }, &[x.clone(), w.clone()], inner);
                check(Composite::Linear { transposed }, &[x.clone(), w, b.clone()], inner);
            }
        }
    }
}

#[test]
fn quantized_linear_layers() {
    let bytes = |shape: Vec<usize>, seed: usize| {
        (Dtype::I8, Array::from_fn(shape, |index| ((index * 37 + seed * 11) % 256) as f64 - 128.0))
    };
    for (inner, outputs) in [(1, 1), (7, 129), (127, 2), (1500, 3)] {
        for leading in [vec![3], vec![2, 5]] {
            let x = bytes([leading.clone(), vec![inner]].concat(), 1);
            let x_scale = float(Array::uniform([leading, vec![1]].concat(), 2, 0.0, 1.0));
            let w = bytes(vec![outputs, inner], 3);
            let w_scale = float(Array::uniform([outputs], 4, 0.0, 1.0));
            let b = float(Array::normal([outputs], 5));
            for dtype in Dtype::FLOATS {
                let composite = Composite::QuantizedLinear { dtype };
                let operands = [x.clone(), x_scale.clone(), w.clone(), w_scale.clone(), b.clone()];
                check(composite, &operands[..4], 1);
                check(composite, &operands, 1);
            }
        }
    }
}

/// One expert per row or several, of rows that choices share or have to themselves; most experts without rows; NaN in one row.
#[test]
fn routed_linear_layers() {
    let sizes: [[usize; 5]; 5] = [[1; 5], [5, 2, 7, 129, 3], [9, 3, 127, 2, 8], [3, 1, 1500, 3, 4], [0, 2, 5, 3, 2]];
    for [rows, choices, inner, outputs, experts] in sizes {
        let mut x = Array::normal([rows, inner], 1);
        if rows > 1 {
            x.values[inner] = f64::NAN;
        }
        let own = float(Array::normal([rows, choices, inner], 2));
        let pick = |index: usize| ((index * 5 + 2) % experts.div_ceil(2)) as f64;
        let (one, several) = (Array::from_fn([rows], pick), Array::from_fn([rows, choices], pick));
        let w = float(Array::normal([experts, outputs, inner], 3));
        let b = float(Array::normal([experts, outputs], 4));
        for (x, picked) in [(float(x.clone()), one), (float(x), several.clone()), (own, several)] {
            let operands = [x, integer(picked), w.clone(), b.clone()];
            check(Composite::RoutedLinear, &operands[..3], inner);
            check(Composite::RoutedLinear, &operands, inner);
        }
    }
}

#[test]
fn weighted_sums() {
    for (rows, choices, columns) in [(1, 1, 1), (5, 2, 129), (3, 3, 7), (2, 8, 64), (0, 2, 5)] {
        let x = float(Array::normal([rows, choices, columns], 1));
        let weights = float(Array::uniform([rows, choices], 2, 0.0, 1.0));
        check(Composite::WeightedSum, &[x, weights], choices);
    }
}

#[test]
fn expert_linear_layers() {
    let bytes = |shape: Vec<usize>, seed: usize| {
        (Dtype::I8, Array::from_fn(shape, |index| ((index * 37 + seed * 11) % 256) as f64 - 128.0))
    };
    for (rows, inner, outputs, experts) in [(1, 1, 1, 1), (5, 7, 129, 3), (9, 127, 2, 8), (3, 1500, 3, 4)] {
        let x = bytes(vec![rows, inner], 1);
        let x_scale = float(Array::uniform([rows, 1], 2, 0.0, 1.0));
        let picked = integer(Array::from_fn([rows], |row| ((row * 5 + 2) % experts) as f64));
        let w = bytes(vec![experts, outputs, inner], 3);
        let w_scale = float(Array::uniform([experts, outputs], 4, 0.0, 1.0));
        let b = float(Array::normal([experts, outputs], 5));
        for dtype in Dtype::FLOATS {
            let operands = [x.clone(), x_scale.clone(), picked.clone(), w.clone(), w_scale.clone(), b.clone()];
            check(Composite::ExpertLinear { dtype }, &operands[..5], 1);
            check(Composite::ExpertLinear { dtype }, &operands, 1);
        }
    }
}

#[test]
fn attentions() {
    for (queries, keys, features) in [(1, 1, 1), (7, 7, 3), (5, 129, 8), (64, 2, 7)] {
        let operand = |length, seed| float(Array::normal([2, 3, length, features], seed));
        let (q, k, v) = (operand(queries, 1), operand(keys, 2), operand(keys, 3));
        let seed = integer(Array::scalar(5.0));
        for mask in [Mask::Full, Mask::Causal, Mask::Additive, Mask::Cached] {
            let mut additive = Array::normal([queries, keys], 4);
            // The first query sees nothing.
            additive.values[..keys].fill(f64::NEG_INFINITY);
            // The last query of the first sequence sees as many keys as there are queries before it.
            let positions = integer(Array::new([2], vec![0.0, keys as f64 - 2.0]));
            let extra: Vec<_> = match mask {
                Mask::Full | Mask::Causal => Vec::new(),
                Mask::Additive => vec![float(additive)],
                Mask::Cached => vec![positions],
            };
            let with = |parts: &[&(Dtype, Array)]| parts.iter().copied().chain(&extra).cloned().collect::<Vec<_>>();
            let scale = 0.3;
            let length = features + keys;
            check(Composite::AttentionScores { mask, scale }, &with(&[&q, &k]), length);
            check(
                Composite::Attention { mask, scale, p: 0.0, offset: 0, work: ScoreWork::NONE },
                &with(&[&q, &k, &v]),
                length,
            );
            let mut dropped = with(&[&q, &k, &v]);
            dropped.push(seed.clone());
            check(Composite::Attention { mask, scale, p: 0.25, offset: 2, work: ScoreWork::NONE }, &dropped, length);
        }
    }
}

#[test]
fn attentions_with_work_on_scores() {
    for (queries, keys, features) in [(1, 1, 1), (1, 40, 4), (7, 7, 3), (5, 129, 8), (64, 65, 7), (66, 9, 4)] {
        let operand = |length, seed| float(Array::normal([2, 3, length, features], seed));
        let (q, k, v) = (operand(queries, 1), operand(keys, 2), operand(keys, 3));
        let slopes = float(Array::new([3, 1, 1], vec![0.5, 0.25, -0.125]));
        let mut bias = Array::normal([2, 1, queries, keys], 4);
        // The first query sees nothing.
        bias.values[..keys].fill(f64::NEG_INFINITY);
        let documents = [
            integer(Array::from_fn([keys], |key| (key * 3 / keys) as f64)),
            // Documents need not lie together.
            integer(Array::from_fn([2, keys], |key| ((key * 7) % 3) as f64)),
        ];
        let positions = integer(Array::new([2], vec![0.0, keys as f64 - 1.0]));
        let additive = float(Array::normal([queries, keys], 5));
        let mut cases = 0;
        for mask in [Mask::Full, Mask::Causal, Mask::Additive, Mask::Cached] {
            for bits in 0..32u32 {
                let on = |bit: u32| bits >> bit & 1 == 1;
                let work = ScoreWork {
                    soft_cap: on(0).then_some(0.7),
                    slopes: on(1),
                    bias: on(2),
                    window: on(3).then_some([1, 3, 64][bits as usize % 3]),
                    documents: on(4),
                };
                let own = (work.bias && mask == Mask::Additive) || (work.documents && mask == Mask::Cached);
                if own || (work.documents && queries > keys) {
                    continue;
                }
                let mut operands = vec![q.clone(), k.clone(), v.clone()];
                operands.extend((mask == Mask::Additive).then(|| additive.clone()));
                operands.extend((mask == Mask::Cached).then(|| positions.clone()));
                operands.extend(work.slopes.then(|| slopes.clone()));
                operands.extend(work.bias.then(|| float(bias.clone())));
                operands.extend(work.documents.then(|| documents[bits as usize / 4 % 2].clone()));
                let composite = Composite::Attention { mask, scale: 0.3, p: 0.0, offset: 0, work };
                check(composite, &operands, features + keys);
                cases += 1;
            }
        }
        assert!(cases > 32, "{cases} cases of {queries} queries and {keys} keys");
    }
}

#[test]
fn quantised_rows() {
    for shape in SIZES.into_iter().flat_map(shapes) {
        let mut x = values(&shape, 14);
        let cols = x.cols();
        let last = x.values.len() - cols;
        x.values[last..].fill(0.0);
        for composite in [Composite::QuantizeInt8, Composite::QuantizeFp8] {
            check_quantised(composite, x.clone());
        }
    }
    let mut poisoned = Array::normal([2, 5], 15);
    poisoned.values[7] = f64::NAN;
    check_quantised(Composite::QuantizeInt8, poisoned);
}

/// Bytes are compared with the expansion's own slack: `x * (1 / scale)` and `x / scale` may part at a half.
fn check_quantised(composite: Composite, x: Array) {
    let got = expand(composite, &[float(x.clone())], Rounding::Analysed);
    let expected = formula(&composite, &[x]);
    let none = vec![0.0; got.outputs[0].values.len()];
    let slack = got.slack[0].as_ref().unwrap_or(&none);
    for (index, (got, expected)) in got.outputs[0].values.iter().zip(&expected[0].values).enumerate() {
        let agrees = (got.is_nan() && expected.is_nan()) || (got - expected).abs() <= slack[index];
        assert!(agrees, "{composite:?} at {index}: {got} against {expected}");
    }
    for (got, expected) in got.outputs[1].values.iter().zip(&expected[1].values) {
        let agrees = (got.is_nan() && expected.is_nan()) || (got - expected).abs() <= f64::EPSILON * expected.abs();
        assert!(agrees, "{composite:?}: scale {got} against {expected}");
    }
}

#[test]
fn dequantised_rows() {
    for shape in SIZES.into_iter().flat_map(shapes) {
        let q = Array::from_fn(shape.clone(), |index| (index * 37 % 256) as f64 - 128.0);
        let scale = Array::uniform(shape.with_cols(1), 16, 0.0, 1.0);
        check(Composite::Dequantize { dtype: Dtype::F32 }, &[(Dtype::I8, q), float(scale)], 1);
    }
}

#[test]
fn cross_entropies() {
    for shape in SIZES.into_iter().flat_map(shapes) {
        let targets = Array::indices(shape.leading(), 17, shape.cols());
        let length = shape.elements();
        check(Composite::CrossEntropy, &[float(values(&shape, 18)), integer(targets)], length);
    }
}

/// Some rows and the rows beyond one chunk of them; a target that is ignored, and one class.
#[test]
fn losses_without_logits() {
    for (rows, classes, smoothing, ignored) in [
        (1, 1, 0.0, None),
        (7, 33, 0.0, Some(3)),
        (5, 129, 0.25, Some(-100)),
        (3, 2, 1.0, None),
        (300, 70_001, 0.1, None),
    ] {
        let (x, w) = (Array::normal([rows, 3], 20), Array::normal([classes, 3], 21));
        let mut targets = Array::indices([rows], 22, classes);
        if let (Some(ignored), true) = (ignored, rows > 2) {
            targets.values[2] = f64::from(ignored);
        }
        let loss = Composite::LinearCrossEntropy { smoothing, ignored };
        check(loss, &[float(x.clone()), float(w.clone()), integer(targets.clone())], classes);
        let per_row = |seed| float(Array::uniform([rows, 1], seed, -1.0, 1.0));
        let inputs = [float(x), float(w), integer(targets), per_row(23), per_row(24), per_row(25)];
        check(Composite::LinearCrossEntropyGradient { smoothing }, &inputs, classes.max(rows));
    }
}

#[test]
fn narrow_inputs_do_not_change_the_mathematics() {
    let x = Array::normal([5, 129], 19).rounded(Dtype::Bf16);
    check(Composite::Softmax, &[(Dtype::Bf16, x.clone())], 129);
    check(Composite::Activation(Activation::GeluTanh), &[(Dtype::F16, x)], 1);
}

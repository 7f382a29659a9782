//! Masks of large finite numbers, such as the smallest `f32`: a row whose keys are all masked weighs those of its largest score, each the same, as
//! scores in f32 do in torch. A row of `-inf` alone is zeros, and so are its gradients.

use deuteron_graph::Dtype;

use super::case::{Machine, Run, Tensor, dropout, each, plain};
use super::formula::{epsilon, kept};
use super::{Case, Layout, Numbers, machines};
use crate::{Attention, ScoreRules};

/// What hides the keys of a sequence: beside the first scores have few digits, beside the second they are rounded to multiples of 8; the last
/// two, the smallest `bf16` and `f32`, overflow as powers of 2.
const HIDDEN: [f32; 6] = [-1e5, -1e8, -1e9, -1e30, -3.389_531_4e38, f32::MIN];
/// Kinds of rows of a mask, which take turns.
const KINDS: usize = 8;
const WIDTH: usize = 16;
/// So small that scores do not reach half of what those beside -1e8 / 4 are rounded to.
const SCALE: f32 = 0.02;

/// What is added to the score of a key.
fn added(hidden: f32, query: usize, [key, keys]: [usize; 2], usual: f32) -> f32 {
    let never = f32::NEG_INFINITY;
    let hides = |hides: bool| if hides { hidden } else { usual };
    match query % KINDS {
        0 => hidden,
        1 => never,
        2 => usual,
        // Padding on the left, and on the right.
        3 => hides(key < keys / 2 + 2),
        4 => hides(key >= keys / 3),
        5 => [hidden, never][key % 2],
        6 => hides(key + 1 < keys),
        _ => [hidden, hidden / 4.0][key % 2],
    }
}

/// A sequence for each number that hides; all heads have one mask.
fn case(attention: Attention, mask: Dtype, numbers: &mut Numbers) -> Case {
    let Attention { queries, keys, .. } = attention;
    let mut case = Case::new(attention, keys, Layout::HeadsFirst, None, numbers);
    let bytes = vec![0; attention.batch * queries * keys * mask.bytes()];
    let mut tensor = Tensor { bytes, dtype: mask, place: [0, queries * keys, 0, keys] };
    each([attention.batch, 1, queries, keys], |[b, _, i, j]| {
        tensor.set([b, 0, i, j], added(HIDDEN[b % HIDDEN.len()], i, [j, keys], 3.0 * numbers.unit()));
    });
    case.mask = Some(tensor);
    case
}

fn sizes(dtype: Dtype, [queries, keys]: [usize; 2]) -> Attention {
    Attention { batch: HIDDEN.len(), scale: SCALE, ..plain(dtype, [2, 1], [queries, keys, WIDTH]) }
}

/// An element in f64, the sum of the sizes of its terms, and how far it is off where scores are.
type Element = [f64; 3];

fn join(to: &mut Element, weight: f64, [size, off]: [f64; 2], x: f64) {
    *to = [to[0] + weight * x, to[1] + size * x.abs(), to[2] + off * size * x.abs()];
}

/// The result, and gradients of queries, keys and values.
fn expected(case: &Case) -> [Vec<Element>; 4] {
    let Attention { batch, heads, kv_heads, queries, keys, .. } = case.attention;
    let (rows, key_rows) = (batch * heads * queries, batch * kv_heads * keys);
    let mut all = [rows, rows, key_rows, key_rows].map(|rows| vec![[0.0; 3]; rows * WIDTH]);
    each([batch, heads, queries, 1], |[b, h, i, _]| {
        let (kv, row) = (h / (heads / kv_heads), (b * heads + h) * queries + i);
        // And the sum of the sizes of its terms.
        let dot = |a: &Tensor, b: &Tensor, [of_a, of_b]: [[usize; 3]; 2]| -> [f64; 2] {
            let at = |[x, y, z]: [usize; 3], d: usize| [x, y, z, d];
            let terms = (0..WIDTH).map(|d| a.get(at(of_a, d)) * b.get(at(of_b, d)));
            terms.fold([0.0; 2], |[sum, size], x| [sum + x, size + x.abs()])
        };
        let near = |j: usize| case.attention.scores.window.is_none_or(|w| (j + queries).abs_diff(i + keys) < w);
        // In f32, as torch adds the mask.
        let score = |j: usize| {
            let product = dot(&case.q, &case.k, [[b, h, i], [b, kv, j]])[0] * f64::from(SCALE);
            let masked = f64::from(product as f32 + case.mask.as_ref().unwrap().get([b, 0, i, j]) as f32);
            if near(j) { masked } else { f64::NEG_INFINITY }
        };
        let scores: Vec<f64> = (0..keys).map(score).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if most == f64::NEG_INFINITY {
            return;
        }
        let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
        let p: Vec<f64> = scores.iter().map(|s| (s - most).exp() / sum).collect();
        let kept: Vec<f64> = (0..keys).map(|j| kept(&case.attention, row, j)).collect();
        let slope = |j: usize| dot(&case.output_gradient, &case.v, [[b, h, i], [b, kv, j]]).map(|x| kept[j] * x);
        let slopes: Vec<[f64; 2]> = (0..keys).map(slope).collect();
        let delta = [0, 1].map(|n| p.iter().zip(&slopes).map(|(p, slope)| p * slope[n]).sum::<f64>());
        // A score as a power of 2 is rounded once more, unless that is more than all the digits it had.
        let place = 4.0 * f64::from(f32::EPSILON) * most.abs();
        let off = if place < 1.0 { place } else { 0.0 };
        for j in 0..keys {
            let scale = f64::from(SCALE);
            let (weight, size) = (p[j] * (slopes[j][0] - delta[0]) * scale, p[j] * (slopes[j][1] + delta[1]) * scale);
            for d in 0..WIDTH {
                let (at, key) = (row * WIDTH + d, ((b * kv_heads + kv) * keys + j) * WIDTH + d);
                let used = p[j] * kept[j];
                join(&mut all[0][at], used, [used, off], case.v.get([b, kv, j, d]));
                join(&mut all[1][at], weight, [size, off], case.k.get([b, kv, j, d]));
                join(&mut all[2][key], weight, [size, off], case.q.get([b, h, i, d]));
                join(&mut all[3][key], used, [used, off], case.output_gradient.get([b, h, i, d]));
            }
        }
    });
    all
}

fn check(mut case: Case, what: &str) {
    let Attention { dtype, batch, heads, kv_heads, queries, keys, .. } = case.attention;
    let expected = expected(&case);
    for machine in machines(dtype) {
        let run = case.run(machine, true);
        let [dq, dk, dv] = &run.gradients;
        let tensors = [(&run.o, heads, queries), (dq, heads, queries), (dk, kv_heads, keys), (dv, kv_heads, keys)];
        for (n, (tensor, heads, positions)) in tensors.into_iter().enumerate() {
            let bounds = bounds(&case.attention, machine, n);
            let mut want = expected[n].iter();
            each([batch, heads, positions, WIDTH], |index| {
                let (got, &[value, size, off]) = (tensor.get(index), want.next().unwrap());
                let bound = bounds[0] * size + off + bounds[1] * value.abs() + 1e-30;
                let name = ["o", "dq", "dk", "dv"][n];
                assert!(
                    (got - value).abs() <= bound,
                    "{name} {index:?}: {got} for {value} within {bound:e}, {what} {machine:?}"
                );
            });
        }
    }
}

/// Of terms and of what is stored. Backward reads the result as it is stored here.
fn bounds(attention: &Attention, machine: Machine, n: usize) -> [f64; 2] {
    let Attention { dtype, heads, queries, keys, .. } = *attention;
    let single = 8.0 * f64::from(f32::EPSILON) * (8.0 + (keys.max(queries * heads) as f64).sqrt());
    let store = if dtype == Dtype::F32 { 0.0 } else { epsilon(dtype) };
    let rounded = if machine.amx.is_some() { epsilon(Dtype::Bf16) } else { 0.0 };
    let least = if dtype == Dtype::F16 { f64::powi(2.0, -22) } else { 0.0 };
    [single + rounded + least + if n == 0 { 0.0 } else { 2.0 * store }, store + f64::from(f32::EPSILON)]
}

#[test]
fn every_storage() {
    let mut numbers = Numbers(31);
    for (dtype, mask) in [
        (Dtype::F32, Dtype::F32),
        (Dtype::F32, Dtype::Bf16),
        (Dtype::F16, Dtype::F32),
        (Dtype::Bf16, Dtype::F32),
        (Dtype::Bf16, Dtype::Bf16),
    ] {
        for lengths in [[19, 150], [70, 33]] {
            check(case(sizes(dtype, lengths), mask, &mut numbers), &format!("{dtype} {mask} {lengths:?}"));
        }
    }
}

/// A few queries, which are decoded. Eight sequences of three are eight kinds of rows for each number.
#[test]
fn few_queries() {
    let mut numbers = Numbers(32);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for queries in [1, 4] {
            check(case(sizes(dtype, [queries, 150]), Dtype::F32, &mut numbers), &format!("{dtype} {queries}"));
        }
    }
}

/// Ranges of keys are joined, forward and backward.
#[test]
fn ranges_of_keys() {
    let mut numbers = Numbers(33);
    for queries in [3, 19] {
        let attention = sizes(Dtype::F32, [queries, 700]);
        assert!(attention.splits() > 1 && attention.backward_splits() > 1);
        check(case(attention, Dtype::F32, &mut numbers), &format!("ranges {queries}"));
    }
}

#[test]
fn work_on_scores_and_dropout() {
    let mut numbers = Numbers(34);
    for (window, queries) in [(Some(1000), 19), (Some(40), 70), (Some(40), 3), (None, 19)] {
        let scores = ScoreRules { window, bias: window.map(|_| Dtype::F32), ..ScoreRules::NONE };
        let dropout = if window.is_none() { dropout() } else { None };
        let attention = Attention { scores, dropout, ..sizes(Dtype::F32, [queries, 150]) };
        check(case(attention, Dtype::F32, &mut numbers), &format!("window {window:?} {queries}"));
    }
}

/// Where scores are rounded to other numbers than zeros, they may be off, but a query's weights sum to 1 all the same: gradients of the values sum to
/// that of the result.
#[test]
fn weights_of_masked_rows_sum_to_one() {
    let mut numbers = Numbers(35);
    for hidden in [-1e4, -1e6, -1e7, -3e7, -1e8, -5e8, -7e8, -1e9, -3e9, -1e12f32] {
        for (queries, keys) in [(70, 150), (3, 150), (19, 600)] {
            let attention = Attention { scale: 4.0, ..sizes(Dtype::F32, [queries, keys]) };
            let mut case = case(attention, Dtype::F32, &mut numbers);
            let mask = case.mask.as_mut().unwrap();
            each([attention.batch, 1, queries, keys], |index| mask.set(index, hidden));
            for machine in machines(Dtype::F32) {
                let run = case.run(machine, true);
                each([attention.batch, 1, 1, WIDTH], |index| check_sum(&case, &run, index, hidden));
            }
        }
    }
}

fn check_sum(case: &Case, run: &Run, [b, _, _, d]: [usize; 4], hidden: f32) {
    let Attention { heads, queries, keys, .. } = case.attention;
    let incoming = (0..heads * queries).map(|row| case.output_gradient.get([b, row / queries, row % queries, d]));
    let (sum, size) = incoming.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
    let got: f64 = (0..keys).map(|j| run.gradients[2].get([b, 0, j, d])).sum();
    // A logsumexp that is not far below 0 is rounded.
    let rounded = if hidden > -8e3 { f64::from(hidden.abs()) } else { 8e3 };
    let bound = f64::from(f32::EPSILON) * (rounded + 64.0) * size;
    assert!((got - sum).abs() <= bound, "{hidden}: {got} for {sum} within {bound:e}, sequence {b}, column {d}");
}

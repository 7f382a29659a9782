//! The formula in `f64`, with bounds of the error that `f32` sums and rounded storage may make.

use deuteron_codegen::cpu::simd::philox::block_words_of_one;
use deuteron_graph::Dtype;

use super::case::{Case, Machine, Run, Tensor, each};
use crate::Attention;

/// A value and the sum of the sizes of its terms.
#[derive(Clone, Copy, Default, Debug)]
pub struct Sum {
    pub value: f64,
    pub size: f64,
}

impl Sum {
    fn add(&mut self, term: f64) {
        self.value += term;
        self.size += term.abs();
    }
}

pub struct Formula {
    attention: Attention,
    pub o: Vec<Sum>,
    pub logsumexp: Vec<f64>,
    /// Of queries, keys and values.
    pub gradients: [Vec<Sum>; 3],
    /// The largest score, by the sizes of its terms.
    largest: f64,
}

/// 1 / (1 - p) where kept, else 0.
pub fn kept(attention: &Attention, row: usize, key: usize) -> f64 {
    let Some(dropout) = attention.dropout else { return 1.0 };
    let index = (row * attention.keys + key) as u64;
    let counter = [(index / 4) as u32, ((index / 4) >> 32) as u32, 0, 0];
    let word = block_words_of_one([dropout.seed, dropout.offset], counter)[(index % 4) as usize];
    if f64::from(word) >= (dropout.probability * 4_294_967_296.0).floor() {
        1.0 / (1.0 - dropout.probability)
    } else {
        0.0
    }
}

impl Formula {
    pub fn new(case: &Case) -> Formula {
        let attention = case.attention;
        let Attention { batch, heads, kv_heads, queries, keys, width, .. } = attention;
        let (rows, key_rows) = (batch * heads * queries, batch * kv_heads * keys);
        let mut formula = Formula {
            attention,
            o: vec![Sum::default(); rows * width],
            logsumexp: vec![0.0; rows],
            gradients: [rows, key_rows, key_rows].map(|rows| vec![Sum::default(); rows * width]),
            largest: 0.0,
        };
        each([batch, heads, queries, 1], |[b, h, i, _]| formula.row(case, [b, h, i]));
        formula
    }

    fn row(&mut self, case: &Case, [b, h, i]: [usize; 3]) {
        let Attention { heads, kv_heads, queries, keys, width, scale, causal, .. } = self.attention;
        let row = (b * heads + h) * queries + i;
        let kv = h / (heads / kv_heads);
        let seen = if causal { (i + 1 + case.used).saturating_sub(queries).min(case.used) } else { case.used };
        let scale = f64::from(scale);
        let rules = self.attention.scores;
        let (mut scores, mut bends) = (vec![Sum::default(); seen], vec![1.0; seen]);
        for (j, score) in scores.iter_mut().enumerate() {
            (0..width).for_each(|d| score.add(scale * case.q.get([b, h, i, d]) * case.k.get([b, kv, j, d])));
            let position = (i + case.used) as f64 - queries as f64;
            let distance = j as f64 - position;
            if let Some(cap) = rules.soft_cap {
                let bent = (score.value / f64::from(cap)).tanh();
                score.value = f64::from(cap) * bent;
                bends[j] = 1.0 - bent * bent;
            }
            if rules.slopes {
                score.add(f64::from(case.slopes[h]) * distance);
            }
            if let Some(mask) = &case.mask {
                let mask = mask.get([b, h, i, j]);
                score.value += mask;
                score.size += if mask.is_finite() { mask.abs() } else { 0.0 };
            }
            let document = |key: usize| case.documents[b * keys + key];
            let far = rules.window.is_some_and(|window| distance.abs() >= window as f64);
            if far || (rules.documents && document(j) != document(position as usize)) {
                score.value = f64::NEG_INFINITY;
            }
            self.largest = self.largest.max(score.size);
        }
        let maximum = scores.iter().fold(f64::NEG_INFINITY, |most, score| most.max(score.value));
        let unseen = maximum == f64::NEG_INFINITY;
        let shift = if unseen { 0.0 } else { maximum };
        let sum: f64 = scores.iter().map(|score| (score.value - shift).exp()).sum();
        self.logsumexp[row] = maximum + sum.ln();
        if unseen && !sum.is_nan() {
            return;
        }
        let p: Vec<f64> = scores.iter().map(|score| (score.value - shift).exp() / sum).collect();
        let kept: Vec<f64> = (0..seen).map(|j| kept(&self.attention, row, j)).collect();
        let mut row_sum = Sum::default();
        for d in 0..width {
            let o = &mut self.o[row * width + d];
            (0..seen).for_each(|j| o.add(p[j] * kept[j] * case.v.get([b, kv, j, d])));
            let slope = case.output_gradient.get([b, h, i, d]);
            row_sum.value += slope * o.value;
            row_sum.size += slope.abs() * o.size;
        }
        for j in 0..seen {
            let key_row = ((b * kv_heads + kv) * keys + j) * width;
            let mut slope = Sum::default();
            (0..width).for_each(|d| slope.add(case.output_gradient.get([b, h, i, d]) * case.v.get([b, kv, j, d])));
            let scale = scale * bends[j];
            let value = scale * p[j] * (kept[j] * slope.value - row_sum.value);
            let size = scale * p[j] * (kept[j] * slope.size + row_sum.size);
            for d in 0..width {
                let (q, k) = (case.q.get([b, h, i, d]), case.k.get([b, kv, j, d]));
                let [dq, dk, dv] = &mut self.gradients;
                let (dq, dk) = (&mut dq[row * width + d], &mut dk[key_row + d]);
                dq.value += value * k;
                dq.size += size * k.abs();
                dk.value += value * q;
                dk.size += size * q.abs();
                dv[key_row + d].add(p[j] * kept[j] * case.output_gradient.get([b, h, i, d]));
            }
        }
    }

    /// Compares all of a run; gradients if it has any.
    pub fn check(&self, run: &Run, machine: Machine, with_gradients: bool, what: &str) {
        let Attention { dtype, batch, heads, kv_heads, queries, keys, width, .. } = self.attention;
        // A probability is off by what its score is off, relatively, and a sum by the root of its terms; a few of each.
        let terms = (width as f64).sqrt() * self.largest + self.largest + ((keys + queries * heads) as f64).sqrt();
        let single = 4.0 * f64::from(f32::EPSILON) * (terms + 4.0);
        let store = epsilon(dtype);
        let rounded = if machine.amx.is_some() { epsilon(Dtype::Bf16) } else { 0.0 };
        let name = format!("{what}, {} {:?}, {:?}", machine.isa.name(), machine.amx, self.attention);
        compare(&run.o, [batch, heads, queries, width], &self.o, [single + rounded, store], &format!("o of {name}"));
        for (at, (&got, &want)) in run.statistics.iter().zip(&self.logsumexp).enumerate() {
            let want = if want == f64::NEG_INFINITY { f64::INFINITY } else { want };
            let bound = single * (1.0 + want.abs());
            assert!(agree(f64::from(got), want, bound), "logsumexp {at}: {got} for {want} of {name}");
        }
        if with_gradients {
            let sizes = [(heads, queries), (kv_heads, keys), (kv_heads, keys)];
            for (n, (heads, positions)) in sizes.into_iter().enumerate() {
                // What backward reads of the output is rounded.
                let bounds = [4.0 * single + 2.0 * store + rounded, store];
                let (got, want) = (&run.gradients[n], &self.gradients[n]);
                compare(got, [batch, heads, positions, width], want, bounds, &format!("gradient {n} of {name}"));
            }
        }
    }
}

/// The distance of 1 to the next number.
pub fn epsilon(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => f64::powi(2.0, -10),
        Dtype::Bf16 => f64::powi(2.0, -7),
        _ => f64::from(f32::EPSILON),
    }
}

fn agree(got: f64, want: f64, bound: f64) -> bool {
    (got.is_nan() && want.is_nan()) || got == want || (got - want).abs() <= bound
}

fn compare(got: &Tensor, sizes: [usize; 4], want: &[Sum], [terms, store]: [f64; 2], what: &str) {
    let mut at = 0;
    // The least distance of numbers in storage.
    let least = if got.dtype == Dtype::F16 { f64::powi(2.0, -24) } else { f64::from(f32::MIN_POSITIVE) };
    each(sizes, |index| {
        let (got, want) = (got.get(index), want[at]);
        let bound = terms * want.size + store * want.value.abs() + least;
        assert!(agree(got, want.value, bound), "{index:?}: {got} for {} within {bound:e}, {what}", want.value);
        at += 1;
    });
}

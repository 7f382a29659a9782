//! Few queries: lanes run along the width, and keys and values are read once for all queries that share them.

use std::marker::PhantomData;

use deuteron_codegen::cpu::simd::format::{BrainFloat, Format, HalfFloat, Word};
use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};
use deuteron_codegen::cpu::simd::math::exp;
use deuteron_graph::Dtype;

use super::forward::{Forward, end_rows, stored, stored_keys};
use super::rows::{Stored, sum_sixteen};
use super::score::{RowsAre, ScoreTile, Scoring};
use super::scratch::Places;
use super::sizes::Task as Work;
use super::softmax::statistics;
use super::weights::{self, Part};
use super::{Output, TILE};

/// All queries of the heads that share a key head, against a range of keys.
///
/// # Safety
/// As for [`forward`](super::forward()), and `places` are of these sizes.
pub(super) unsafe fn decode<S: Simd>(simd: S, forward: &Forward, output: &mut Output, work: Work, places: Places) {
    let Forward { attention, inputs, .. } = *forward;
    let (padded, group) = (attention.padded(), attention.group());
    let Work { batch, head: kv_head, rows: queries, .. } = work;
    // SAFETY: the places hold a row for each query of the group and a tile of keys; the tensors hold the positions.
    unsafe {
        for g in 0..group {
            let rows = stored(attention, &inputs.q, (batch, kv_head * group + g, 0), queries);
            rows.widen(simd, places.each_query.add(g * queries * padded), padded, queries);
        }
        std::slice::from_raw_parts_mut(places.each, group * queries).fill(f32::NEG_INFINITY);
        std::slice::from_raw_parts_mut(places.each_sum, group * queries).fill(0.0);
        std::slice::from_raw_parts_mut(places.each_row, group * queries * padded).fill(0.0);

        let used = inputs.used.by(attention, batch);
        let (first, end) = attention.keys_of(&work, used);
        for key in (first..end).step_by(TILE) {
            let keys = TILE.min(end - key);
            let k = stored_keys(attention, &inputs.k, (batch, kv_head, key), keys);
            let v = stored_keys(attention, &inputs.v, (batch, kv_head, key), keys);
            for row in 0..group * queries {
                let (head, query) = (kv_head * group + row / queries, row % queries);
                let (from, to) = attention.seen(query, used);
                let seen = to.saturating_sub(key).min(keys);
                if seen == 0 || from >= key + seen {
                    continue;
                }
                let part = Part { batch, head, query, rows: 1, key, keys: seen };
                let scoring = Scoring::new(attention, inputs, part, used, places);
                if scoring.is_some_and(|scoring| scoring.parts_documents(part)) {
                    continue;
                }
                if let Some(mask) = &inputs.mask {
                    weights::mask(simd, mask, part, places.weights, 1);
                }
                if let Some(dropout) = attention.dropout {
                    weights::kept(simd, attention, dropout, part, places.random, (places.transposed, 1));
                }
                let query = Query {
                    query: places.each_query.add(row * padded),
                    keys: k,
                    values: v,
                    count: seen,
                    ahead: TILE.min(end - key - keys),
                    scale: attention.scale,
                    scoring,
                    mask: inputs.mask.map(|_| places.weights.cast_const()),
                    kept: attention.dropout.map(|_| places.transposed.cast_const()),
                    scores: places.scores,
                    maximum: places.each.add(row),
                    sum: places.each_sum.add(row),
                    sums: places.each_row.add(row * padded),
                };
                match attention.kv {
                    Dtype::F16 => simd.enter(In { query, format: PhantomData::<HalfFloat> }),
                    Dtype::Bf16 => simd.enter(In { query, format: PhantomData::<BrainFloat> }),
                    _ => simd.enter(In { query, format: PhantomData::<Word> }),
                }
            }
        }
        end_queries(simd, forward, output, work, places);
    }
}

/// Finishes the rows, or leaves them for `combine`.
///
/// # Safety
/// As for [`decode`].
unsafe fn end_queries<S: Simd>(simd: S, forward: &Forward, output: &mut Output, work: Work, places: Places) {
    let attention = forward.attention;
    let (padded, group, queries) = (attention.padded(), attention.group(), attention.queries);
    let split = attention.splits() > 1;
    // SAFETY: as for `decode`; the rows of this task in the partials and the statistics are its own.
    unsafe {
        let first = (work.batch * attention.heads + work.head * group) * queries;
        for row in 0..group * queries {
            let (maximum, sum) = (*places.each.add(row), *places.each_sum.add(row));
            let sums = std::slice::from_raw_parts_mut(places.each_row.add(row * padded), padded);
            if split {
                let all = attention.batch * attention.heads * queries;
                let to = forward.partials.0.add((work.split * all + first + row) * (attention.width + 2));
                to.write(maximum);
                to.add(1).write(sum);
                std::ptr::copy_nonoverlapping(sums.as_ptr(), to.add(2), attention.width);
                continue;
            }
            divide(sums, sum);
            if let Some(to) = forward.statistics {
                let [first_of_row, inverse] = statistics(maximum, sum, maximum + sum.ln());
                to.0.add(first + row).write(first_of_row);
                to.0.add(attention.rows() + first + row).write(inverse);
            }
        }
        if !split {
            for g in 0..group {
                let from = places.each_row.add(g * queries * padded);
                end_rows(simd, attention, output, (work.batch, work.head * group + g, 0), from, queries);
            }
        }
    }
}

/// A finished row; zeros if it sees no key.
pub(super) fn divide(sums: &mut [f32], sum: f32) {
    let inverse = 1.0 / sum;
    sums.iter_mut().for_each(|x| *x = if sum == 0.0 { 0.0 } else { *x * inverse });
}

/// One query against a tile of keys that it sees.
struct Query {
    query: *const f32,
    keys: Stored,
    values: Stored,
    count: usize,
    /// Keys of the next tile.
    ahead: usize,
    scale: f32,
    /// Work on the scores; the mask is added within it.
    scoring: Option<Scoring>,
    mask: Option<*const f32>,
    kept: Option<*const f32>,
    scores: *mut f32,
    maximum: *mut f32,
    sum: *mut f32,
    sums: *mut f32,
}

/// With the format of keys and values.
struct In<F> {
    query: Query,
    format: PhantomData<F>,
}

impl<F: Format> Kernel for In<F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let query = self.query;
        let width = query.values.width;
        // SAFETY: keys, values and weights hold `count` rows or elements, the other places a tile or a row of lanes.
        unsafe {
            for key in (0..query.count).step_by(16) {
                query.dots::<S, F>(simd, key);
            }
            if let Some(scoring) = query.scoring {
                query.work_on(simd, scoring);
            }
            let factor = query.softmax(simd);
            let mut at = 0;
            while at + 4 * S::WIDTH <= width {
                query.add_values::<S, F, 4>(simd, at, factor);
                at += 4 * S::WIDTH;
            }
            while at < width {
                query.add_values::<S, F, 1>(simd, at, factor);
                at += S::WIDTH;
            }
        }
    }
}

impl Query {
    /// Scores of 16 keys from `key` on, scaled and masked; `-inf` beyond the last.
    #[inline(always)]
    unsafe fn dots<S: Simd, F: Format>(&self, simd: S, key: usize) {
        let mut totals = [0.0f32; 16];
        // SAFETY: `totals` holds 16 numbers, and scores a tile.
        unsafe {
            sum_sixteen(simd, |rows| self.products::<S, F>(simd, rows.map(|row| key + row)), totals.as_mut_ptr());
            for lane in (0..16).step_by(S::WIDTH) {
                let mut score = simd.mul(simd.splat(self.scale), simd.load(totals.as_ptr().add(lane)));
                if let (Some(mask), None) = (self.mask, self.scoring) {
                    score = simd.add(score, simd.load(mask.add(key + lane)));
                }
                let seen = self.count.saturating_sub(key + lane).min(S::WIDTH);
                let score = simd.select(simd.first(seen), score, simd.splat(f32::NEG_INFINITY));
                simd.store(self.scores.add(key + lane), score);
            }
        }
    }

    /// Changes scaled scores as the work on them says. The query sees no key after these, so causality hides none of them.
    #[inline(always)]
    unsafe fn work_on<S: Simd>(&self, simd: S, scoring: Scoring) {
        let tile = ScoreTile {
            scoring,
            scores: self.scores,
            rows_are: RowsAre::Queries,
            floors: false,
            rows: 1,
            lanes: self.count.next_multiple_of(16),
            count: self.count,
            scale: 1.0,
            added: self.mask,
            causal: false,
        };
        Kernel::run(tile, simd);
    }

    /// Products with four keys, one below the other; prefetches their values.
    #[inline(always)]
    unsafe fn products<S: Simd, F: Format>(&self, simd: S, keys: [usize; 4]) -> [S::Float; 4] {
        let width = self.keys.width;
        let mut sums = [simd.splat(0.0); 4];
        for key in keys {
            self.values.fetch::<S, F>(simd, key);
        }
        // SAFETY: rows beyond the last are read as the last one, columns beyond `width` not at all.
        unsafe {
            let rows = keys.map(|key| self.keys.row::<F>(key.min(self.count - 1)));
            let mut at = 0;
            while at + 4 * S::WIDTH <= width {
                self.add_products::<S, F, 4>(simd, rows, at, &mut sums);
                at += 4 * S::WIDTH;
            }
            while at < width {
                self.add_products::<S, F, 1>(simd, rows, at, &mut sums);
                at += S::WIDTH;
            }
        }
        sums
    }

    /// Those of `V` vectors from column `at` on.
    #[inline(always)]
    unsafe fn add_products<S: Simd, F: Format, const V: usize>(
        &self,
        simd: S,
        rows: [*const u8; 4],
        at: usize,
        sums: &mut [S::Float; 4],
    ) {
        // SAFETY: as for `products`.
        unsafe {
            let query = load::<S, Word, V>(simd, self.query.add(at).cast(), S::WIDTH);
            for (sum, row) in sums.iter_mut().zip(rows) {
                let keys = load::<S, F, V>(simd, row.add(at * F::BYTES), self.keys.width - at);
                for (k, q) in keys.into_iter().zip(query) {
                    *sum = simd.mul_add(k, q, *sum);
                }
            }
        }
    }

    /// Converts scores to probabilities; returns the factor of earlier sums.
    #[inline(always)]
    unsafe fn softmax<S: Simd>(&self, simd: S) -> f32 {
        // SAFETY: scores and weights hold a tile of lanes; the statistics are one number each.
        unsafe {
            let lanes = self.count.next_multiple_of(16);
            let before = *self.maximum;
            let mut most = simd.splat(before);
            for at in (0..lanes).step_by(S::WIDTH) {
                most = simd.greater(most, simd.load(self.scores.add(at)));
            }
            let maximum = across(simd, most, f32::max);
            let shift = if maximum == f32::NEG_INFINITY { 0.0 } else { maximum };
            let mut sums = simd.splat(0.0);
            for at in (0..lanes).step_by(S::WIDTH) {
                let mut p = exp(simd, simd.sub(simd.load(self.scores.add(at)), simd.splat(shift)));
                sums = simd.add(sums, p);
                if let Some(kept) = self.kept {
                    p = simd.mul(p, simd.load(kept.add(at)));
                }
                simd.store(self.scores.add(at), p);
            }
            let factor = across(simd, exp(simd, simd.splat(before - shift)), |first, _| first);
            *self.maximum = maximum;
            *self.sum = *self.sum * factor + across(simd, sums, |a, b| a + b);
            factor
        }
    }

    /// `V` vectors of the values from column `at` on; even and odd keys have sums of their own.
    #[inline(always)]
    unsafe fn add_values<S: Simd, F: Format, const V: usize>(&self, simd: S, at: usize, factor: f32) {
        // SAFETY: columns beyond `width` are not read, and rows of sums hold whole vectors.
        unsafe {
            let at_vector = |v: usize| self.sums.add(at + v * S::WIDTH);
            let (mut even, mut odd) = ([simd.splat(0.0); V], [simd.splat(0.0); V]);
            for (v, sum) in even.iter_mut().enumerate() {
                *sum = simd.mul(simd.splat(factor), simd.load(at_vector(v)));
            }
            for key in (0..self.count / 2 * 2).step_by(2) {
                // Keys of the next tile are wanted after these.
                if at == 0 && key < self.ahead {
                    self.keys.fetch::<S, F>(simd, key + TILE);
                    self.keys.fetch::<S, F>(simd, key + 1 + TILE);
                }
                self.add_value::<S, F, V>(simd, key, at, &mut even);
                self.add_value::<S, F, V>(simd, key + 1, at, &mut odd);
            }
            if self.count % 2 == 1 {
                self.add_value::<S, F, V>(simd, self.count - 1, at, &mut even);
            }
            for (v, (even, odd)) in even.into_iter().zip(odd).enumerate() {
                simd.store(at_vector(v), simd.add(even, odd));
            }
        }
    }

    #[inline(always)]
    unsafe fn add_value<S: Simd, F: Format, const V: usize>(
        &self,
        simd: S,
        key: usize,
        at: usize,
        sums: &mut [S::Float; V],
    ) {
        // SAFETY: as for `add_values`.
        unsafe {
            let p = simd.splat(*self.scores.add(key));
            let from = self.values.row::<F>(key).add(at * F::BYTES);
            let values = load::<S, F, V>(simd, from, self.values.width - at);
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum = simd.mul_add(p, value, *sum);
            }
        }
    }
}

/// `V` vectors, or one of which `left` elements can be read.
#[inline(always)]
unsafe fn load<S: Simd, F: Format, const V: usize>(simd: S, from: *const u8, left: usize) -> [S::Float; V] {
    let mut vectors = [simd.splat(0.0); V];
    // SAFETY: the caller's promise.
    unsafe {
        if V == 1 && left < S::WIDTH {
            return [F::read_partial(simd, from, left); V];
        }
        for (v, vector) in vectors.iter_mut().enumerate() {
            *vector = F::read(simd, from.add(v * S::WIDTH * F::BYTES));
        }
    }
    vectors
}

/// The lanes joined, neighbours last.
#[inline(always)]
pub(super) fn across<S: Simd>(simd: S, lanes: S::Float, join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut numbers = [0.0f32; 16];
    // SAFETY: `numbers` holds the widest vector.
    unsafe { simd.store(numbers.as_mut_ptr(), lanes) };
    let mut half = S::WIDTH / 2;
    while half > 0 {
        for lane in 0..half {
            numbers[lane] = join(numbers[lane], numbers[lane + half]);
        }
        half /= 2;
    }
    numbers[0]
}

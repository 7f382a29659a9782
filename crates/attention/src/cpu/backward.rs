//! Backward, which recomputes the probabilities: a range of keys against all queries that see it.
//!
//! `p = exp(s - logsumexp)`, or that of forward again where the maximum is far below 0, `ds = p * (kept * (do v^T) - rowsum(do * o))`,
//! `dv = (kept * p)^T do`, `dk = scale * ds^T q`, `dq = scale * ds k`.
//!
//! A key is a lane. `dk` and `dv` are summed in scratch, over the heads of a group in order. `dq` of a range of keys is
//! summed in separate memory, and [`finish`](super::finish()) adds the ranges in order.

use std::f32::consts::LOG2_E;

use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};
use deuteron_codegen::cpu::simd::math::exp;
use deuteron_codegen::cpu::simd::{Isa, Task};
use deuteron_codegen::cpu::task::Floats;
use deuteron_graph::Dtype;

use super::super::Attention;
use super::amx::Engine;
use super::forward::stored;
use super::product::{Product, Start};
use super::rows::{Stored, Turn};
use super::score::{RowsAre, ScoreTile, Scoring};
use super::scratch::Places;
use super::softmax::{FAR, Power, floored};
use super::weights::{self, Part};
use super::{Heads, Inputs, Shared, TILE};

/// A backward run: the data shared by all its tasks.
#[derive(Clone, Copy)]
pub struct Backward<'a> {
    /// The forward computation.
    pub attention: &'a Attention,
    /// The operands of forward.
    pub inputs: &'a Inputs,
    /// A result of forward.
    pub output: Heads,
    /// How it is stored: `F32` where it was not rounded, which matters where slopes nearly cancel.
    pub output_dtype: Dtype,
    /// A result of forward.
    pub statistics: Shared,
    /// The gradient of the output.
    pub output_gradient: Heads,
    /// Gradients to write; those of keys and values are 0 from `used` on.
    pub query_gradient: Heads,
    /// As above.
    pub key_gradient: Heads,
    /// As above.
    pub value_gradient: Heads,
    /// Of `gradient_elements`.
    pub partials: Shared,
    /// Matrix tiles, for bf16: the caller's [`Amx::detect`].
    pub amx: Option<Amx>,
}

/// Runs one of `backward_tasks`: gradients of keys and values, and a part of those of queries.
///
/// # Safety
/// All tensors hold what [`Attention`] says at their strides, nothing else writes to them meanwhile, and tensors that are
/// written do not overlap those that are read.
///
/// # Panics
/// As [`forward`](super::forward()).
pub unsafe fn backward(isa: Isa, backward: &Backward, task: usize, scratch: &mut Floats) {
    let Backward { attention, inputs, .. } = *backward;
    assert_eq!(attention.refusal(), None, "sizes of attention");
    assert_eq!(attention.kv, attention.dtype, "storage of a gradient");
    inputs.used.check(attention);
    let places = attention.places(scratch);
    isa.dispatch(Ranges { backward, task, places });
}

struct Ranges<'a> {
    backward: &'a Backward<'a>,
    task: usize,
    places: Places,
}

impl Task for Ranges<'_> {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        let Backward { attention, inputs, .. } = *self.backward;
        let splits = attention.backward_splits();
        let (unit, split) = (self.task / splits, self.task % splits);
        let (batch, kv_head) = (unit / attention.kv_heads, unit % attention.kv_heads);
        let range = attention.backward_range();
        let (group, rows) = (attention.group(), attention.queries);
        let row = (batch * attention.heads + kv_head * group) * rows;
        let all = attention.batch * attention.heads * rows;
        let end = ((split + 1) * range).min(attention.keys);
        // SAFETY: the tensors hold what the task reads and writes, by the word of the caller of `backward`; the places
        // are those of its scratch, and the rows of this range in the partials are its own.
        unsafe {
            let gradient = self.backward.partials.0.add((split * all + row) * attention.padded());
            std::slice::from_raw_parts_mut(gradient, group * rows * attention.padded()).fill(0.0);
            for g in 0..group {
                let head = kv_head * group + g;
                row_sums(simd, self.backward, batch, head, self.places.each.add(g * rows), self.places);
            }
            for key in (split * range..end).step_by(TILE) {
                let keys = TILE.min(end - key);
                let seen = inputs.used.by(attention, batch).saturating_sub(key).min(keys);
                let tile = KeyTile { batch, kv_head, key, keys, seen, gradient };
                key_tile(simd, self.backward, tile, self.places);
            }
        }
    }
}

/// `rowsum(do * o)` of all queries of a head.
///
/// # Safety
/// As for [`backward()`]; `to` holds a number for each query.
unsafe fn row_sums<S: Simd>(simd: S, job: &Backward, batch: usize, head: usize, to: *mut f32, places: Places) {
    let attention = job.attention;
    let padded = attention.padded();
    for query in (0..attention.queries).step_by(TILE) {
        let rows = TILE.min(attention.queries - query);
        // SAFETY: a tile of rows fits; the tensors hold the positions.
        unsafe {
            let at = (batch, head, query);
            let address = job.output.at(job.output_dtype, batch, head, query);
            let (stride, width) = (job.output.position, attention.width);
            let output = Stored { dtype: job.output_dtype, address, stride, rows, width };
            output.widen(simd, places.rows, padded, rows);
            stored(attention, &job.output_gradient, at, rows).widen(simd, places.values, padded, rows);
            simd.enter(RowSums { a: places.rows, b: places.values, rows, padded, to: to.add(query) });
        }
    }
}

struct RowSums {
    a: *const f32,
    b: *const f32,
    rows: usize,
    padded: usize,
    to: *mut f32,
}

impl Kernel for RowSums {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for row in 0..self.rows {
            let mut sum = simd.splat(0.0);
            for at in (0..self.padded).step_by(S::WIDTH) {
                let at = row * self.padded + at;
                // SAFETY: rows hold whole vectors.
                sum = unsafe { simd.mul_add(simd.load(self.a.add(at)), simd.load(self.b.add(at)), sum) };
            }
            let total = super::decode::across(simd, sum, |a, b| a + b);
            // SAFETY: one number for each row.
            unsafe { self.to.add(row).write(total) };
        }
    }
}

/// Keys of a tile, of which the first `seen` are in use; `gradient` is that of the first query of the group.
#[derive(Clone, Copy)]
struct KeyTile {
    batch: usize,
    kv_head: usize,
    key: usize,
    keys: usize,
    seen: usize,
    gradient: *mut f32,
}

/// # Safety
/// As for [`backward()`]; `places` are of these sizes.
unsafe fn key_tile<S: Simd>(simd: S, job: &Backward, tile: KeyTile, places: Places) {
    let Backward { attention, inputs, .. } = *job;
    let KeyTile { batch, kv_head, key, keys, seen, gradient } = tile;
    let (padded, lanes, group) = (attention.padded(), seen.next_multiple_of(16), attention.group());
    // SAFETY: tiles of keys and queries fit every place; the tensors hold the positions.
    unsafe {
        let engine = Engine::new::<S>(attention, job.amx, lanes);
        for (heads, rows, transposed, packed) in [
            (&inputs.v, places.values, places.value_lanes, places.value_pairs),
            (&inputs.k, places.keys, places.lanes, places.query_pairs),
        ] {
            stored(attention, heads, (batch, kv_head, key), seen).widen(simd, rows, padded, lanes);
            let turn =
                Turn { from: rows, from_stride: padded, to: transposed, to_stride: TILE, rows: lanes, columns: padded };
            turn.run(simd);
            engine.pack(simd, transposed, padded, packed);
        }
        for sums in [places.sums, places.value_sums] {
            std::slice::from_raw_parts_mut(sums, TILE * padded).fill(0.0);
        }
        for g in 0..group {
            for query in (0..attention.queries).step_by(TILE) {
                let rows = TILE.min(attention.queries - query);
                let (first, end) = attention.seen_by(query, rows, inputs.used.by(attention, batch));
                if seen > 0 && first < key + seen && key < end {
                    let part = Part { batch, head: kv_head * group + g, query, rows, key, keys: seen };
                    query_tile(simd, job, part, gradient, &engine, places);
                }
            }
        }
        let gradients =
            [(places.sums, &job.key_gradient, attention.scale), (places.value_sums, &job.value_gradient, 1.0)];
        for (sums, heads, factor) in gradients {
            let columns = keys.next_multiple_of(16);
            Turn { from: sums, from_stride: TILE, to: places.rows, to_stride: padded, rows: padded, columns }.run(simd);
            stored(attention, heads, (batch, kv_head, key), keys).narrow(simd, places.rows, padded, factor);
        }
    }
}

/// # Safety
/// As for [`key_tile`].
unsafe fn query_tile<S: Simd>(
    simd: S,
    job: &Backward,
    part: Part,
    gradient: *mut f32,
    engine: &Engine,
    places: Places,
) {
    let Backward { attention, inputs, .. } = *job;
    let (padded, lanes, width) = (attention.padded(), part.keys.next_multiple_of(16), attention.width);
    let at = (part.batch, part.head, part.query);
    let row = part.head % attention.group() * attention.queries + part.query;
    // SAFETY: as for `key_tile`.
    unsafe {
        let used = inputs.used.by(attention, part.batch);
        let scoring = Scoring::new(attention, inputs, part, used, places);
        if scoring.is_some_and(|scoring| scoring.parts_documents(part)) {
            return;
        }
        let q = stored(attention, &inputs.q, at, part.rows);
        let slope = stored(attention, &job.output_gradient, at, part.rows);
        let q_rows = q.in_place_or(simd, places.rows, padded);
        let slope_rows = slope.in_place_or(simd, places.values, padded);
        for (c, rows, stored, b, packed) in [
            (places.scores, q_rows, q, places.lanes, places.query_pairs),
            (places.slopes, slope_rows, slope, places.value_lanes, places.value_pairs),
        ] {
            if engine.scores(simd, stored, packed, c, places.key_pairs) {
                continue;
            }
            let product = Product {
                c,
                c_row: TILE,
                a: rows.address,
                a_row: rows.stride,
                a_inner: 1,
                b,
                b_row: TILE,
                rows: part.rows,
                inner: width,
                lanes,
                start: Start::Zero,
            };
            product.run(simd);
        }
        if let Some(mask) = &inputs.mask {
            weights::mask(simd, mask, part, places.weights, part.rows);
        }
        if let Some(dropout) = attention.dropout {
            weights::kept(simd, attention, dropout, part, places.random, (places.transposed, part.rows));
        }
        let first = (part.batch * attention.heads + part.head) * attention.queries + part.query;
        simd.enter(Slopes {
            attention,
            part,
            used,
            scoring,
            scores: places.scores,
            slopes: places.slopes,
            mask: inputs.mask.map(|_| places.weights.cast_const()),
            kept: attention.dropout.map(|_| places.transposed.cast_const()),
            statistics: [0, attention.rows()].map(|start| job.statistics.0.add(start + first).cast_const()),
            row_sums: places.each.add(row),
        });
        // dv and dk, a key per lane.
        for (c, rows, b) in [(places.value_sums, slope_rows, places.scores), (places.sums, q_rows, places.slopes)] {
            let product = Product {
                c,
                c_row: TILE,
                a: rows.address,
                a_row: 1,
                a_inner: rows.stride,
                b,
                b_row: TILE,
                rows: width,
                inner: part.rows,
                lanes,
                start: Start::Sum,
            };
            product.run(simd);
        }
        let product = Product {
            c: gradient.add(row * padded),
            c_row: padded,
            a: places.slopes,
            a_row: TILE,
            a_inner: 1,
            b: places.keys,
            b_row: padded,
            rows: part.rows,
            inner: part.keys,
            lanes: padded,
            start: Start::Sum,
        };
        product.run(simd);
    }
}

/// Turns scores into (kept) probabilities, and slopes of probabilities into slopes of scores: queries are rows.
struct Slopes<'a> {
    attention: &'a Attention,
    part: Part,
    used: usize,
    scoring: Option<Scoring>,
    scores: *mut f32,
    slopes: *mut f32,
    mask: Option<*const f32>,
    kept: Option<*const f32>,
    /// Both of them, from the first row on.
    statistics: [*const f32; 2],
    row_sums: *const f32,
}

impl Slopes<'_> {
    /// The tile whose scores are worked on one vector at a time. Keys after the query are left out here.
    #[inline(always)]
    fn tile(&self, scoring: Scoring, added: Option<*const f32>) -> ScoreTile {
        let Part { rows, keys, .. } = self.part;
        let (scores, scale, rows_are, causal) = (self.scores, self.attention.scale, RowsAre::Queries, false);
        let floors = !self.attention.decodes();
        ScoreTile { scoring, scores, rows_are, floors, rows, lanes: keys, count: keys, scale, added, causal }
    }

    /// Probabilities of a row whose maximum is far below 0, and derivatives of its scores: scores and powers are rounded as forward rounds them, since
    /// they are off by more than they differ. Where forward took sums in another order, a score may even be rounded to the next number; no probability
    /// is above 1 for that.
    ///
    /// # Safety
    /// Row and lanes are within the tiles.
    #[inline(always)]
    unsafe fn far<S: Simd>(&self, simd: S, row: usize, lane: usize, [maximum, inverse]: [f32; 2]) -> [S::Float; 2] {
        let (at, is_power, one) = (row * TILE + lane, !self.attention.decodes(), simd.splat(1.0));
        // SAFETY: the caller's promise.
        let (s, derivative, scale) = unsafe {
            let s = simd.load(self.scores.add(at));
            let scaled = simd.mul(s, simd.splat(self.attention.scale));
            match (self.scoring, self.mask) {
                (Some(scoring), added) => {
                    let [s, derivative] = scoring.at(simd, &self.tile(scoring, added), row, lane, s);
                    (s, derivative, 1.0)
                }
                (None, Some(mask)) => {
                    let mask = simd.load(mask.add(at));
                    (simd.add(scaled, if is_power { floored(simd, mask) } else { mask }), one, 1.0)
                }
                (None, None) if is_power => (s, one, self.attention.scale),
                (None, None) => (scaled, one, 1.0),
            }
        };
        let power = match is_power {
            true => Power::new(simd, scale * LOG2_E, maximum).of(simd, s),
            false => exp(simd, simd.sub(s, simd.splat(maximum))),
        };
        let p = simd.mul(power, simd.splat(inverse));
        [simd.select(simd.less(one, p), one, p), derivative]
    }
}

impl Kernel for Slopes<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Part { query, rows, key, keys, .. } = self.part;
        let (scale, zero) = (simd.splat(self.attention.scale), simd.splat(0.0));
        for row in 0..rows {
            let seen = self.attention.seen(query + row, self.used).1.saturating_sub(key).min(keys);
            // SAFETY: within the tiles; the statistics hold a number for each row.
            unsafe {
                let [logsumexp, inverse] = self.statistics.map(|from| *from.add(row));
                let (less, row_sum) = (simd.splat(-logsumexp), simd.splat(*self.row_sums.add(row)));
                for lane in (0..keys.next_multiple_of(16)).step_by(S::WIDTH) {
                    let at = row * TILE + lane;
                    let left = simd.first(seen.saturating_sub(lane).min(S::WIDTH));
                    let s = simd.load(self.scores.add(at));
                    let (p, derivative) = if logsumexp < FAR {
                        let [p, derivative] = self.far(simd, row, lane, [logsumexp, inverse]);
                        (p, Some(derivative))
                    } else {
                        let (shifted, derivative) = match (self.scoring, self.mask) {
                            (Some(scoring), added) => {
                                let [s, derivative] = scoring.at(simd, &self.tile(scoring, added), row, lane, s);
                                (simd.add(s, less), Some(derivative))
                            }
                            (None, Some(mask)) => {
                                (simd.add(simd.mul_add(s, scale, simd.load(mask.add(at))), less), None)
                            }
                            (None, None) => (simd.mul_add(s, scale, less), None),
                        };
                        (exp(simd, shifted), derivative)
                    };
                    let p = simd.select(left, p, zero);
                    let mut slope = simd.load(self.slopes.add(at));
                    let mut used = p;
                    if let Some(kept) = self.kept {
                        let kept = simd.load(kept.add(at));
                        slope = simd.mul(slope, kept);
                        used = simd.mul(p, kept);
                    }
                    let mut slope = simd.mul(p, simd.sub(slope, row_sum));
                    if let Some(derivative) = derivative {
                        slope = simd.mul(slope, derivative);
                    }
                    let slope = simd.select(left, slope, zero);
                    simd.store(self.scores.add(at), used);
                    simd.store(self.slopes.add(at), slope);
                }
            }
        }
    }
}

//! Forward: a tile of queries against the keys it sees.

use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};
use deuteron_codegen::cpu::simd::{Isa, Task};
use deuteron_codegen::cpu::task::Floats;

use super::super::Attention;
use super::amx::Engine;
use super::decode::decode;
use super::product::{Product, Start};
use super::rows::{Finite, Rows, Stored, Turn};
use super::score::{RowsAre, ScoreTile, Scoring};
use super::scratch::Places;
use super::sizes::Task as Work;
use super::softmax::{Diagonal, Divide, Shift, Softmax};
use super::weights::{self, Part};
use super::{Finished, Heads, Inputs, Output, Shared, TILE};

/// A forward run: the data shared by all its tasks.
#[derive(Clone, Copy)]
pub struct Forward<'a> {
    /// What is computed.
    pub attention: &'a Attention,
    /// What is read.
    pub inputs: &'a Inputs,
    /// `[2, batch, heads, queries]`, if requested: what [`Backward`](super::Backward) takes of each row. First its logsumexp, infinite where it has seen
    /// nothing, or in its place a maximum that is far below 0, then 1 over its sum.
    pub statistics: Option<Shared>,
    /// Of `partial_elements`; not touched if that is 0.
    pub partials: Shared,
    /// Matrix tiles, for bf16: the caller's [`Amx::detect`].
    pub amx: Option<Amx>,
}

/// Runs one of `forward_tasks`. With one range of keys it finishes the rows; otherwise [`combine`](super::combine()) does.
///
/// # Safety
/// All tensors hold what [`Attention`] says (keys and masks up to `used`) at their strides, nothing else writes to them
/// meanwhile, and tensors that are written do not overlap those that are read.
///
/// # Panics
/// If the sizes are refused ([`Attention::refusal`]), `used` is above `keys`, or `scratch` was made for smaller sizes.
pub unsafe fn forward(isa: Isa, forward: &Forward, output: &mut Output, task: usize, scratch: &mut Floats) {
    let Forward { attention, inputs, .. } = *forward;
    assert_eq!(attention.refusal(), None, "sizes of attention");
    inputs.used.check(attention);
    let places = attention.places(scratch);
    isa.dispatch(Job { forward, output, work: attention.task(task), places });
}

struct Job<'a, 'b> {
    forward: &'a Forward<'a>,
    output: &'a mut Output<'b>,
    work: Work,
    places: Places,
}

impl Task for Job<'_, '_> {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        let Job { forward, output, work, places } = self;
        // SAFETY: the tensors hold what the task reads and writes, by the word of the caller of `forward`; the places
        // are those of its scratch.
        unsafe {
            if forward.attention.decodes() {
                decode(simd, forward, output, work, places);
            } else {
                tile(simd, forward, output, work, places);
            }
        }
    }
}

/// # Safety
/// As for [`forward`], and `places` are of these sizes.
unsafe fn tile<S: Simd>(simd: S, forward: &Forward, output: &mut Output, work: Work, places: Places) {
    let Forward { attention, inputs, .. } = *forward;
    let (padded, lanes) = (attention.padded(), work.rows.next_multiple_of(16));
    // SAFETY: a tile of queries and of keys fits every place; the tensors hold the positions of the task.
    unsafe {
        if let Output::Store(heads) = output {
            stored(attention, heads, (work.batch, work.head, work.query), work.rows).claim(simd);
        }
        let queries = stored(attention, &inputs.q, (work.batch, work.head, work.query), work.rows);
        queries.widen(simd, places.rows, padded, lanes);
        let from = places.rows;
        let turn = Turn { from, from_stride: padded, to: places.lanes, to_stride: TILE, rows: lanes, columns: padded };
        turn.run(simd);
        std::slice::from_raw_parts_mut(places.maximum, TILE).fill(f32::NEG_INFINITY);
        std::slice::from_raw_parts_mut(places.sum, TILE).fill(0.0);
        std::slice::from_raw_parts_mut(places.sums, TILE * padded).fill(0.0);
        let engine = Engine::new::<S>(attention, forward.amx, lanes);
        engine.pack(simd, places.lanes, padded, places.query_pairs);

        let (first, end) = attention.keys_of(&work, inputs.used.by(attention, work.batch));
        for key in (first..end).step_by(TILE) {
            let keys = TILE.min(end - key);
            let Work { batch, head, query, rows, .. } = work;
            let part = Part { batch, head, query, rows, key, keys };
            key_tile(simd, forward, part, places, &engine);
        }
        drop(engine);
        end_tile(simd, forward, output, work, places);
    }
}

/// Scores, softmax and values of one tile of keys.
///
/// # Safety
/// As for [`tile`].
unsafe fn key_tile<S: Simd>(simd: S, forward: &Forward, part: Part, places: Places, engine: &Engine) {
    let Forward { attention, inputs, .. } = *forward;
    let (padded, lanes, width) = (attention.padded(), part.rows.next_multiple_of(16), attention.width);
    let kv_head = part.head / attention.group();
    // SAFETY: as for `tile`.
    let (used, scoring) = unsafe {
        let used = inputs.used.by(attention, part.batch);
        let scoring = Scoring::new(attention, inputs, part, used, places);
        if scoring.is_some_and(|scoring| scoring.parts_documents(part)) {
            return;
        }
        (used, scoring)
    };
    let Places { scores, weights, transposed, maximum, sum, factor, .. } = places;
    // SAFETY: as for `tile`.
    unsafe {
        let keys = stored_keys(attention, &inputs.k, (part.batch, kv_head, part.key), part.keys);
        let values = stored_keys(attention, &inputs.v, (part.batch, kv_head, part.key), part.keys);
        if !engine.scores(simd, keys, places.query_pairs, scores, places.key_pairs) {
            let rows = keys.in_place_or(simd, places.keys, padded);
            let product = Product {
                c: scores,
                c_row: TILE,
                a: rows.address,
                a_row: rows.stride,
                a_inner: 1,
                b: places.lanes,
                b_row: TILE,
                rows: part.keys,
                inner: width,
                lanes,
                start: Start::Zero,
            };
            product.run(simd);
        }

        let first = attention.position(part.query, used) - part.key as isize;
        let diagonal = (attention.causal && first < part.keys as isize - 1).then_some(Diagonal { first });
        let mut scale = attention.scale;
        let changes = scoring.filter(|_| attention.changes(part, used));
        if inputs.mask.is_some() || diagonal.is_some() || changes.is_some() {
            if let Some(mask) = &inputs.mask {
                weights::mask(simd, mask, part, weights, lanes);
                turn_weights(simd, places, lanes);
            }
            let mask = inputs.mask.map(|_| transposed.cast_const());
            match changes {
                Some(scoring) => {
                    let (rows_are, rows, causal) = (RowsAre::Keys, part.keys, attention.causal);
                    let (floors, count, added) = (true, lanes, mask);
                    let tile =
                        ScoreTile { scoring, scores, rows_are, floors, rows, lanes, count, scale, added, causal };
                    tile.run(simd);
                }
                None => Shift { scores, keys: part.keys, lanes, scale, mask, diagonal }.run(simd),
            }
            scale = 1.0;
        }
        if let Some(dropout) = attention.dropout {
            weights::kept(simd, attention, dropout, part, places.random, (weights, lanes));
            turn_weights(simd, places, lanes);
        }
        let kept = attention.dropout.map(|_| transposed.cast_const());

        // A hidden value is not seen, even where 0 times it is not 0.
        let hidden = diagonal.and_then(|diagonal| {
            let rows = values.in_place_or(simd, places.values, padded);
            let finite = Finite { rows, count: part.keys, width }.check(simd);
            (!finite).then_some((diagonal, rows))
        });
        let pairs = if hidden.is_none() { engine.pairs(places) } else { None };
        Softmax { scores, keys: part.keys, lanes, scale, maximum, sum, factor, kept, pairs }.run(simd);
        if let Some((diagonal, rows)) = hidden {
            simd.enter(Visible { scores, rows, sums: places.sums, factor, keys: part.keys, width, lanes, diagonal });
        } else if !engine.values(simd, values, places) {
            let rows = values.in_place_or(simd, places.values, padded);
            let product = Product {
                c: places.sums,
                c_row: TILE,
                a: rows.address,
                a_row: 1,
                a_inner: rows.stride,
                b: scores,
                b_row: TILE,
                rows: width,
                inner: part.keys,
                lanes,
                start: Start::Scaled(factor),
            };
            product.run(simd);
        }
    }
}

/// Turns the weights: keys become rows.
///
/// # Safety
/// The weights are written for `lanes` rows.
unsafe fn turn_weights<S: Simd>(simd: S, places: Places, lanes: usize) {
    let (from, to) = (places.weights, places.transposed);
    // SAFETY: both are tiles.
    unsafe { Turn { from, from_stride: TILE, to, to_stride: TILE, rows: lanes, columns: TILE }.run(simd) }
}

/// Finishes the rows of a tile, or leaves them for `combine`.
///
/// # Safety
/// As for [`tile`].
unsafe fn end_tile<S: Simd>(simd: S, forward: &Forward, output: &mut Output, work: Work, places: Places) {
    let attention = forward.attention;
    let (padded, lanes) = (attention.padded(), work.rows.next_multiple_of(16));
    let split = attention.splits() > 1;
    // SAFETY: as for `tile`; the rows of this task in the partials are its own.
    unsafe {
        if !split {
            let Places { sums, maximum, sum, .. } = places;
            Divide { sums, width: attention.width, lanes, maximum, sum }.run(simd);
        }
        let (from, to) = (places.sums, places.rows);
        Turn { from, from_stride: TILE, to, to_stride: padded, rows: padded, columns: lanes }.run(simd);
        let row = (work.batch * attention.heads + work.head) * attention.queries + work.query;
        if split {
            let stride = attention.width + 2;
            let all = attention.batch * attention.heads * attention.queries;
            for r in 0..work.rows {
                let to = forward.partials.0.add((work.split * all + row + r) * stride);
                to.write(*places.maximum.add(r));
                to.add(1).write(*places.sum.add(r));
                std::ptr::copy_nonoverlapping(places.rows.add(r * padded), to.add(2), attention.width);
            }
            return;
        }
        if let Some(statistics) = forward.statistics {
            std::ptr::copy_nonoverlapping(places.sum, statistics.0.add(row), work.rows);
            std::ptr::copy_nonoverlapping(places.maximum, statistics.0.add(attention.rows() + row), work.rows);
        }
        end_rows(simd, attention, output, (work.batch, work.head, work.query), places.rows, work.rows);
    }
}

/// Stores finished rows of `padded` elements, or passes them on.
///
/// # Safety
/// The output holds the rows, and `from` holds them.
pub(super) unsafe fn end_rows<S: Simd>(
    simd: S,
    attention: &Attention,
    output: &mut Output,
    (batch, head, query): (usize, usize, usize),
    from: *const f32,
    rows: usize,
) {
    let stride = attention.padded();
    match output {
        // SAFETY: the caller's promise.
        Output::Store(heads) => unsafe {
            stored(attention, heads, (batch, head, query), rows).narrow(simd, from, stride, 1.0);
        },
        Output::Hand(next) => {
            // SAFETY: the caller's promise.
            let values = unsafe { std::slice::from_raw_parts(from, rows * stride) };
            next(Finished { batch, head, query, values, stride });
        }
    }
}

/// The rows of keys or values from (batch, head, position) on.
///
/// # Safety
/// The tensor holds them.
pub(super) unsafe fn stored_keys(
    attention: &Attention,
    heads: &Heads,
    (batch, head, position): (usize, usize, usize),
    rows: usize,
) -> Stored {
    // SAFETY: the caller's promise.
    let address = unsafe { heads.at(attention.kv, batch, head, position) };
    Stored { dtype: attention.kv, address, stride: heads.position, rows, width: attention.width }
}

/// The rows of any other tensor from (batch, head, position) on.
///
/// # Safety
/// The tensor holds them.
pub(super) unsafe fn stored(
    attention: &Attention,
    heads: &Heads,
    (batch, head, position): (usize, usize, usize),
    rows: usize,
) -> Stored {
    // SAFETY: the caller's promise.
    let address = unsafe { heads.at(attention.dtype, batch, head, position) };
    Stored { dtype: attention.dtype, address, stride: heads.position, rows, width: attention.width }
}

/// `sums = factor * sums + p v`, each lane over the keys that it sees.
struct Visible {
    scores: *const f32,
    rows: Rows,
    sums: *mut f32,
    factor: *const f32,
    keys: usize,
    width: usize,
    lanes: usize,
    diagonal: Diagonal,
}

impl Kernel for Visible {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for at in 0..self.width {
            for lane in (0..self.lanes).step_by(S::WIDTH) {
                // SAFETY: within the tiles.
                unsafe {
                    let to = self.sums.add(at * TILE + lane);
                    let mut sum = simd.mul(simd.load(self.factor.add(lane)), simd.load(to));
                    for row in 0..self.keys {
                        let v = simd.splat(self.rows.address.add(row * self.rows.stride + at).read_unaligned());
                        let added = simd.mul_add(v, simd.load(self.scores.add(row * TILE + lane)), sum);
                        sum = simd.select(simd.first(self.diagonal.hidden::<S>(row, lane)), sum, added);
                    }
                    simd.store(to, sum);
                }
            }
        }
    }
}

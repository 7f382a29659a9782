//! Work on a tile of scores: queries or keys are its rows, the others its lanes.

use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};
use deuteron_codegen::cpu::simd::math::tanh;

use super::super::{Attention, ScoreRules};
use super::scratch::Places;
use super::softmax::floored;
use super::weights::Part;
use super::{Inputs, TILE};

/// The work on the scores of a part, whatever its rows are.
#[derive(Clone, Copy)]
pub(super) struct Scoring {
    rules: ScoreRules,
    /// The distance of the first key from the first query.
    distance: f32,
    slope: f32,
    /// Documents of queries, then of keys, [`TILE`] of each.
    documents: *const i32,
}

impl Attention {
    /// Whether the work changes scores of a part, rather than hide none of them.
    pub(super) fn changes(&self, part: Part, used: usize) -> bool {
        let ScoreRules { soft_cap, slopes, bias: _, window: _, documents } = self.scores;
        soft_cap.is_some()
            || slopes
            || documents
            || !self.window_holds((part.query, part.rows), (part.key, part.keys), used)
    }
}

/// What a tile's rows are; lanes are the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowsAre {
    /// Forward.
    Keys,
    /// Backward, and where a few queries are decoded.
    Queries,
}

impl Scoring {
    /// That of a part of this many keys in use, or `None` where there is none. Copies the part's documents.
    ///
    /// # Safety
    /// The operands hold the part, and `places` are of these sizes.
    pub unsafe fn new(
        attention: &Attention,
        inputs: &Inputs,
        part: Part,
        used: usize,
        places: Places,
    ) -> Option<Scoring> {
        let rules = attention.scores;
        if !rules.is_some() {
            return None;
        }
        let first = attention.position(part.query, used);
        let batch = part.batch;
        // SAFETY: the caller's promise; there is a document for each key, and as many keys as queries at least.
        unsafe {
            let slope = inputs.slopes.map_or(0.0, |slopes| {
                let at = slopes.address.cast::<f32>().add(batch * slopes.batch + part.head * slopes.head);
                at.read_unaligned()
            });
            if let Some(documents) = inputs.documents {
                let row = documents.address.cast::<i32>().add(batch * documents.batch + part.head * documents.head);
                let (queries, keys) = (places.documents, places.documents.add(TILE));
                std::ptr::copy_nonoverlapping(
                    row.add(first.max(0) as usize).cast::<u8>(),
                    queries.cast::<u8>(),
                    part.rows * size_of::<i32>(),
                );
                std::ptr::copy_nonoverlapping(
                    row.add(part.key).cast::<u8>(),
                    keys.cast::<u8>(),
                    part.keys * size_of::<i32>(),
                );
            }
            let distance = (part.key as isize - first) as f32;
            Some(Scoring { rules, distance, slope, documents: places.documents })
        }
    }

    /// Whether no query of the part shares a document with any of its keys.
    ///
    /// # Safety
    /// As for [`Scoring::new`], of the same part.
    pub unsafe fn parts_documents(&self, part: Part) -> bool {
        if !self.rules.documents {
            return false;
        }
        // SAFETY: both were copied.
        let [queries, keys] = unsafe {
            [(self.documents, part.rows), (self.documents.add(TILE), part.keys)]
                .map(|(from, count)| std::slice::from_raw_parts(from, count))
        };
        let ends = |documents: &[i32]| {
            documents.iter().fold((i32::MAX, i32::MIN), |(low, high), &d| (low.min(d), high.max(d)))
        };
        let (own, others) = (ends(queries), ends(keys));
        own.1 < others.0 || others.1 < own.0
    }

    /// A scaled score as the softmax takes it, and its derivative, 0 where it is hidden. `added` is the bias or mask.
    #[inline(always)]
    fn worked<S: Simd>(
        &self,
        simd: S,
        s: S::Float,
        distance: S::Float,
        added: Option<S::Float>,
        own: Option<S::Mask>,
        causal: bool,
    ) -> [S::Float; 2] {
        let (zero, one, never) = (simd.splat(0.0), simd.splat(1.0), simd.splat(f32::NEG_INFINITY));
        let (mut s, mut derivative) = (s, one);
        if let Some(cap) = self.rules.soft_cap {
            let bent = tanh(simd, simd.mul(s, simd.splat(1.0 / cap)));
            s = simd.mul(bent, simd.splat(cap));
            derivative = simd.neg_mul_add(bent, bent, one);
        }
        if self.rules.slopes {
            s = simd.add(s, simd.mul(distance, simd.splat(self.slope)));
        }
        if let Some(added) = added {
            s = simd.add(s, added);
        }
        if let Some(window) = self.rules.window {
            let window = simd.splat(window as f32);
            let near = simd.less(simd.neg(distance), window);
            s = simd.select(near, s, never);
            derivative = simd.select(near, derivative, zero);
            if !causal {
                let near = simd.less(distance, window);
                s = simd.select(near, s, never);
                derivative = simd.select(near, derivative, zero);
            }
        }
        if let Some(own) = own {
            s = simd.select(own, s, never);
            derivative = simd.select(own, derivative, zero);
        }
        if causal {
            let before = simd.less_or_equal(distance, zero);
            s = simd.select(before, s, never);
            derivative = simd.select(before, derivative, zero);
        }
        [s, derivative]
    }

    /// The score of a row and of the lanes from `lane` on, and its derivative.
    ///
    /// # Safety
    /// `added` is a tile like the scores, if there is one, and row and lanes are within it.
    #[inline(always)]
    pub unsafe fn at<S: Simd>(&self, simd: S, tile: &ScoreTile, row: usize, lane: usize, s: S::Float) -> [S::Float; 2] {
        let lanes = simd.to_float(simd.add_int(simd.count_up(), simd.splat_int(lane as i32)));
        let (of_rows, of_lanes, distance) = match tile.rows_are {
            RowsAre::Keys => (TILE, 0, simd.sub(simd.splat(self.distance + row as f32), lanes)),
            RowsAre::Queries => (0, TILE, simd.add(simd.splat(self.distance - row as f32), lanes)),
        };
        // SAFETY: within the tiles; documents have room for two tiles.
        unsafe {
            let own = self.rules.documents.then(|| {
                let of_row = simd.splat_int(*self.documents.add(of_rows + row));
                let of_lanes = simd.bits(simd.load(self.documents.add(of_lanes + lane).cast()));
                simd.equal_int(of_row, of_lanes)
            });
            let added = tile.added.map(|added| {
                let added = simd.load(added.add(row * TILE + lane));
                if tile.floors { floored(simd, added) } else { added }
            });
            self.worked(simd, simd.mul(s, simd.splat(tile.scale)), distance, added, own, tile.causal)
        }
    }
}

/// Replaces scores by what the softmax takes.
pub(super) struct ScoreTile {
    pub scoring: Scoring,
    pub scores: *mut f32,
    pub rows_are: RowsAre,
    /// Whether the scores are taken as powers of 2, for which a finite mask may be too small.
    pub floors: bool,
    pub rows: usize,
    /// Up to a multiple of 16.
    pub lanes: usize,
    /// Lanes that count: the others are `-inf`.
    pub count: usize,
    pub scale: f32,
    /// A tile like the scores, to add.
    pub added: Option<*const f32>,
    pub causal: bool,
}

impl ScoreTile {
    /// # Safety
    /// The tiles hold their rows of `lanes`, and the documents of the part are copied.
    pub unsafe fn run<S: Simd>(self, simd: S) {
        simd.enter(self);
    }
}

impl Kernel for ScoreTile {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for row in 0..self.rows {
            for lane in (0..self.lanes).step_by(S::WIDTH) {
                // SAFETY: within the tiles.
                unsafe {
                    let at = self.scores.add(row * TILE + lane);
                    let [s, _] = self.scoring.at(simd, &self, row, lane, simd.load(at));
                    let counts = simd.first(self.count.saturating_sub(lane).min(S::WIDTH));
                    simd.store(at, simd.select(counts, s, simd.splat(f32::NEG_INFINITY)));
                }
            }
        }
    }
}

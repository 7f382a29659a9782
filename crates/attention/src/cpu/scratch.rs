//! The memory of one thread.

use deuteron_codegen::cpu::simd::lines::LINE;
use deuteron_codegen::cpu::simd::philox::SLACK;
use deuteron_codegen::cpu::task::Floats;

use super::super::Attention;
use super::TILE;

/// Offsets of the tiles. Every tile starts on a cache line; rows hold [`TILE`] or `padded` elements.
#[derive(Clone, Copy)]
pub(super) struct Places {
    /// `[padded][TILE]`: what the lanes of the tile share, transposed: queries forward; keys, and then values, backward.
    pub lanes: *mut f32,
    pub value_lanes: *mut f32,
    /// `[padded][TILE]`: sums: `o` forward, `dk` and `dv` backward.
    pub sums: *mut f32,
    pub value_sums: *mut f32,
    /// `[TILE][TILE]`
    pub scores: *mut f32,
    pub slopes: *mut f32,
    pub weights: *mut f32,
    pub transposed: *mut f32,
    /// `[TILE][padded]`: rows in `f32`.
    pub rows: *mut f32,
    pub keys: *mut f32,
    pub values: *mut f32,
    /// `[TILE]`
    pub maximum: *mut f32,
    pub sum: *mut f32,
    pub factor: *mut f32,
    /// Documents of a tile of queries, then of keys.
    pub documents: *mut i32,
    /// Words of the random generator.
    pub random: *mut f32,
    /// A number for each query of each head of a group.
    pub each: *mut f32,
    pub each_sum: *mut f32,
    /// A row of `padded` for each query of each head of a group, when decoding.
    pub each_row: *mut f32,
    pub each_query: *mut f32,
    /// Pairs of bf16 for tiles of AMX: queries, keys, values, probabilities.
    pub query_pairs: *mut u32,
    pub key_pairs: *mut u32,
    pub value_pairs: *mut u32,
    pub weight_pairs: *mut u32,
}

impl Attention {
    /// Floats of one thread that runs tasks, in both directions. Running allocates nothing.
    pub fn scratch_elements(&self) -> usize {
        places(self, std::ptr::null_mut()).1
    }

    /// The places of a thread.
    ///
    /// # Panics
    /// If it has less memory.
    pub(super) fn places(&self, scratch: &mut Floats) -> Places {
        let (places, elements) = places(self, scratch.pointer());
        let there = scratch.count();
        assert!(elements <= there, "scratch of {there} elements for {elements}");
        places
    }
}

/// The places from `base` on, and the elements they take.
fn places(attention: &Attention, base: *mut f32) -> (Places, usize) {
    let mut next = 0usize;
    let mut take = |elements: usize| {
        let at = base.wrapping_add(next);
        next += elements.next_multiple_of(LINE);
        at
    };
    let padded = attention.padded();
    let (wide, square) = (padded.next_multiple_of(32) * TILE, TILE * TILE);
    let queries = attention.group() * attention.queries;
    let decoded = if attention.decodes() { queries * padded } else { 0 };
    let pairs = wide / 2;
    let places = Places {
        lanes: take(wide),
        value_lanes: take(wide),
        sums: take(wide),
        value_sums: take(wide),
        scores: take(square),
        slopes: take(square),
        weights: take(square),
        transposed: take(square),
        rows: take(wide),
        keys: take(wide),
        values: take(wide),
        maximum: take(TILE),
        sum: take(TILE),
        factor: take(TILE),
        documents: take(2 * TILE).cast(),
        random: take(TILE + SLACK),
        each: take(queries),
        each_sum: take(queries),
        each_row: take(decoded),
        each_query: take(decoded),
        query_pairs: take(pairs).cast(),
        key_pairs: take(pairs).cast(),
        value_pairs: take(pairs).cast(),
        weight_pairs: take(square / 2).cast(),
    };
    (places, next)
}

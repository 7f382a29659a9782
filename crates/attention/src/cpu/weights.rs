//! Additive masks and dropout as tiles: queries are rows, keys are columns.

use deuteron_codegen::cpu::simd::lanes::Simd;
use deuteron_codegen::cpu::simd::philox::{self, Keep};
use deuteron_graph::keep_threshold;

use super::super::{Attention, Dropout};
use super::rows::Stored;
use super::{Mask, TILE};

/// A part of the scores.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub batch: usize,
    pub head: usize,
    pub query: usize,
    pub rows: usize,
    pub key: usize,
    pub keys: usize,
}

/// Writes the mask of a part to `to`, rows of [`TILE`]; zeros beyond.
///
/// # Safety
/// The mask holds the part, and `to` can be written for `padded_rows` rows.
pub(super) unsafe fn mask<S: Simd>(simd: S, mask: &Mask, part: Part, to: *mut f32, padded_rows: usize) {
    // SAFETY: the mask holds the part.
    unsafe {
        let row = mask.elements.at(mask.dtype, part.batch, part.head, part.query);
        let address = row.add(part.key * mask.dtype.bytes());
        let stored =
            Stored { dtype: mask.dtype, address, stride: mask.elements.position, rows: part.rows, width: part.keys };
        stored.widen(simd, to, TILE, padded_rows);
    }
}

/// Writes the dropout factors of a part to `to`, rows of [`TILE`]; zeros beyond.
///
/// # Safety
/// `to` can be written for `padded_rows` rows, and `random` for `TILE + SLACK` elements.
pub(super) unsafe fn kept<S: Simd>(
    simd: S,
    attention: &Attention,
    dropout: Dropout,
    part: Part,
    random: *mut f32,
    (to, padded_rows): (*mut f32, usize),
) {
    let keep = Keep { key: [dropout.seed, dropout.offset], threshold: keep_threshold(dropout.probability) };
    let factor = if dropout.probability < 1.0 { (1.0 / (1.0 - dropout.probability)) as f32 } else { 0.0 };
    for row in 0..padded_rows {
        // SAFETY: `random` holds a row and the slack, of which the first 3 elements may be skipped.
        let (kept, to) = unsafe {
            let to = std::slice::from_raw_parts_mut(to.add(row * TILE), TILE);
            if row >= part.rows {
                to.fill(0.0);
                continue;
            }
            let head = (part.batch * attention.heads + part.head) as u64;
            let query = head * attention.queries as u64 + (part.query + row) as u64;
            let first = query * attention.keys as u64 + part.key as u64;
            philox::keep(simd, keep, first, part.keys, random);
            (std::slice::from_raw_parts(random.add((first % 4) as usize), part.keys), to)
        };
        for (to, kept) in to.iter_mut().zip(kept.iter().copied().chain(std::iter::repeat(0.0))) {
            *to = kept * factor;
        }
    }
}

//! Attention without a scores matrix, forward and backward.
//!
//! `o = dropout(softmax(scale * q k^T + mask)) v`, a tile of queries against a tile of keys at a time, the softmax online.
//!
//! - Shapes: `q, o, do, dq: [batch, heads, queries, width]`, `k, v, dk, dv: [batch, kv_heads, keys, width]`; head `h` reads
//!   key head `h / (heads / kv_heads)`. Any strides, `width` contiguous.
//! - Of `keys` the first `used` are in use, a number given at run time; the others are not read. Causal: query `i` sees
//!   keys `j <= i + used - queries`. In a cache each sequence has a number of its own: `used = position + queries`, where
//!   `position` is that of its first query.
//! - An additive mask is read at `[batch, head, query, key]`, keys contiguous; a stride of 0 repeats.
//! - Work on scores (`score.rs`): a soft cap, slopes by distance, a bias, a window, documents. Tiles of keys that a window or documents hide from all
//!   queries of a tile are skipped.
//! - Dropout: Philox under key `(seed, offset)`, element index `((batch * heads + head) * queries + query) * keys + key`.
//!   The sum of the softmax is over all probabilities, kept or not.
//! - Keys and values may be stored in another type than the rest, as in a cache; backward takes one type.
//! - Numbers: products and sums in `f32`, in an order that depends only on sizes and instruction set. With AMX a bf16 kernel, and
//!   on a GPU's matrix units (there ties to even) a bf16 or f16 one, rounds the probabilities (before the division by their sum, after dropout) to its storage, ties away from 0, for their
//!   product with `v`; nothing else is rounded before the result. Backward never rounds them, but on a GPU's
//!   matrix units, where also the slopes of scores are rounded for the products with `q` and `k`.
//! - A row that sees no key, or only scores of `-inf`, gives zeros; its gradients are 0. Beside a mask of about -1e9 scores are rounded to multiples of 64,
//!   and beside the smallest `f32` they are lost: keys of equal scores weigh the same there, forward and backward.
//!   A key that causality or `used` hides is not seen: NaN there does not reach the row. One that an additive `-inf`, a window or
//!   documents hide has probability 0, and 0 times NaN is NaN, unless its whole tile is skipped. A score of NaN or `+inf` makes its row NaN.
//! - On CUDA the probabilities alone can be the result, `o: [batch, heads, queries, keys]`: there a row with a score of NaN or `+inf` is
//!   NaN whole, and hidden keys of other rows are zeros.
//! - Traffic: a task reads its queries once and all keys and values that it sees once; backward reads `q, o, do` once a
//!   range of keys.
//! - Limits: `width` in 1..=256.
//!
//! `unsafe` is only in `cpu` and its tests.
#![deny(unsafe_code)]

pub mod backward;
pub mod block;
pub mod chain;
#[allow(unsafe_code)]
pub mod cpu;
pub mod cuda;
pub mod fit;
pub mod kernel;
pub mod norm;
pub mod rows;
pub mod score;

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

use deuteron_graph::Dtype;

pub use backward::BackwardOperand;
pub use block::AttentionBlock;
pub use kernel::{AttentionKernel, AttentionMask, AttentionOperand, AttentionResult, AttentionShape, HeadStrides};
pub use rows::AttentionRows;
pub use score::ScoreRules;

/// The largest width.
pub const MAX_WIDTH: usize = 256;

/// The computation: with the length in use, everything that determines the bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Storage of `q`, `o` and gradients: `F32`, `F16` or `Bf16`.
    pub dtype: Dtype,
    /// Storage of `k` and `v`: of these, too.
    pub kv: Dtype,
    /// Sequences.
    pub batch: usize,
    /// Query heads: a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Queries of a sequence.
    pub queries: usize,
    /// Keys of a sequence: the capacity, if fewer are used.
    pub keys: usize,
    /// Elements of a head.
    pub width: usize,
    /// Factor of `q k^T`.
    pub scale: f32,
    /// Whether a query sees only keys up to its own position.
    pub causal: bool,
    /// Work on the scores.
    pub scores: ScoreRules,
    /// Dropout of the probabilities.
    pub dropout: Option<Dropout>,
}

/// Which probabilities are dropped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Share of dropped elements, in `[0, 1]`; the others are divided by `1 - probability`.
    pub probability: f64,
    /// First word of the key.
    pub seed: u32,
    /// Second word of the key.
    pub offset: u32,
}

impl Attention {
    /// Heads that share a key head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Why kernels do not support it, if so.
    pub fn refusal(&self) -> Option<&'static str> {
        let stored = |dtype: Dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16);
        let dropped = self.dropout.is_none_or(|dropout| (0.0..=1.0).contains(&dropout.probability));
        match () {
            () if !stored(self.dtype) || !stored(self.kv) => Some("expected f32, f16 or bf16"),
            () if self.width == 0 || self.width > MAX_WIDTH => Some("expected a head of 1 to 256 elements"),
            () if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) => {
                Some("expected heads to be a multiple of key heads")
            }
            () if !dropped => Some("expected a dropout probability in [0, 1]"),
            () => None,
        }
    }
}

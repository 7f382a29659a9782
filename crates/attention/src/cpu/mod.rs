//! Attention on the CPU.
//!
//! The caller owns the threads: it runs every task `0..forward_tasks()` in any order on any thread, each thread with its
//! own memory ([`Attention::scratch_elements`]); if keys are split, then every task `0..combine_tasks()`. Backward likewise: [`backward()`], then
//! [`finish()`]. Nothing allocates while running.
//!
//! - `forward.rs`: a tile of queries against tiles of keys, a query per lane: neither keys nor values are packed, and the
//!   statistics of the softmax need no sum across lanes.
//! - `decode.rs`: few queries; lanes along the width, keys and values are streamed once for all heads that share them.
//! - `backward.rs`: a range of keys against all queries, a key per lane; gradients of queries are kept for each range and
//!   added in order.
//! - `driver/` distributes tasks to threads, `family.rs` makes kernels from groups.
//! - `score.rs` is the work on a tile of scores.
//! - `product.rs` is the product of `f32` tiles, `amx.rs` that of bf16 tiles.

mod amx;
mod backward;
mod combine;
mod decode;
mod driver;
pub mod family;
mod finish;
mod forward;
mod product;
mod rows;
mod score;
mod scratch;
mod sizes;
mod softmax;
mod weights;
mod work;

pub use backward::{Backward, backward};
pub use combine::combine;
pub use finish::finish;
pub use forward::{Forward, forward};
pub use sizes::Ended;

use deuteron_graph::Dtype;

use super::Attention;

/// Queries or keys of a tile.
pub(crate) const TILE: usize = 64;

/// A tensor of heads: its first element and the elements from one index to the next.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// The first element. Any alignment.
    pub address: *mut u8,
    /// From one sequence to the next.
    pub batch: usize,
    /// From one head to the next.
    pub head: usize,
    /// From one position to the next.
    pub position: usize,
}

// SAFETY: an address is only a number until a kernel uses it, and the kernel's caller answers for that.
unsafe impl Send for Heads {}
// SAFETY: as above.
unsafe impl Sync for Heads {}

impl Heads {
    /// The first element of a position.
    ///
    /// # Safety
    /// The tensor has that position.
    unsafe fn at(&self, dtype: Dtype, batch: usize, head: usize, position: usize) -> *mut u8 {
        let elements = batch * self.batch + head * self.head + position * self.position;
        // SAFETY: the caller names a position within the tensor.
        unsafe { self.address.add(elements * dtype.bytes()) }
    }
}

/// An additive mask.
#[derive(Debug, Clone, Copy)]
pub struct Mask {
    /// `F32`, `F16` or `Bf16`.
    pub dtype: Dtype,
    /// The mask's element of key 0; `position` is the stride of queries.
    pub elements: Heads,
}

/// The operands of both directions.
#[derive(Debug, Clone, Copy)]
pub struct Inputs {
    /// `[batch, heads, queries, width]`
    pub q: Heads,
    /// `[batch, kv_heads, keys, width]`
    pub k: Heads,
    /// `[batch, kv_heads, keys, width]`
    pub v: Heads,
    /// Added to the scores.
    pub mask: Option<Mask>,
    /// `f32[batch, heads]`, if the scores have slopes.
    pub slopes: Option<Heads>,
    /// `i32[batch, heads, keys]`, if there are documents.
    pub documents: Option<Heads>,
    /// Keys in use: at most `keys`.
    pub used: Used,
}

/// Number of keys in use per sequence.
#[derive(Debug, Clone, Copy)]
pub enum Used {
    /// This many of each sequence.
    Of(usize),
    /// Those up to the last query, where these are the positions of each sequence's first query: `[batch]`, any alignment.
    To(*const i32),
}

// SAFETY: as for `Heads`.
unsafe impl Send for Used {}
// SAFETY: as for `Heads`.
unsafe impl Sync for Used {}

impl Used {
    /// # Panics
    /// If it is more than there are.
    fn check(self, attention: &Attention) {
        if let Used::Of(used) = self {
            assert!(used <= attention.keys, "{used} keys used of {}", attention.keys);
        }
    }

    /// Keys in use of a sequence. Positions may be any number: no query sees keys beyond the last.
    ///
    /// # Safety
    /// There is a position for each sequence.
    unsafe fn by(self, attention: &Attention, batch: usize) -> usize {
        match self {
            Used::Of(keys) => keys,
            Used::To(positions) => {
                // SAFETY: the caller's promise.
                let first = unsafe { positions.add(batch).read_unaligned() };
                (first as isize + attention.queries as isize).max(0) as usize
            }
        }
    }
}

/// Finished rows of `o`, in `f32`, for further work of the caller.
pub struct Finished<'a> {
    /// The sequence.
    pub batch: usize,
    /// The head.
    pub head: usize,
    /// The first query.
    pub query: usize,
    /// Rows of `stride` elements, of which the first `width` count.
    pub values: &'a [f32],
    /// Elements from one row to the next.
    pub stride: usize,
}

/// The destination of the result.
pub enum Output<'a> {
    /// Stored, rounded to the storage type.
    Store(Heads),
    /// Passed to the caller as it is computed.
    Hand(&'a mut dyn FnMut(Finished<'_>)),
}

/// Shared `f32` memory, of which each task writes its own part.
#[derive(Debug, Clone, Copy)]
pub struct Shared(pub *mut f32);

// SAFETY: as for `Heads`.
unsafe impl Send for Shared {}
// SAFETY: as for `Heads`.
unsafe impl Sync for Shared {}

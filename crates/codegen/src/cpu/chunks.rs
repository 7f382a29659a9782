//! How a row kernel's work is divided into chunks, and when its results are too large for the caches: rules that the device follows and the planner's
//! costs assume. They depend only on sizes, never on the number of threads.

use crate::cpu::program::TileProgram;

/// Bytes touched by a kernel above which its results count as too large for the caches: interpreted kernels and those on many threads use streaming
/// stores ([`LargeResults`](super::machine::LargeResults)). Below, the next kernel finds them in the cache.
/// Measured 2026-11-15 on a 2-core Xeon (2 MiB L2 a core) with `deuteron doctor`: copies of 256 KiB run at 25 GB/s with
/// ordinary stores and at 21 with streaming ones, of 32 MiB at 19 and 28.
pub const STREAM_FROM: usize = 8 << 20;

/// Approximate elements per chunk: small enough to balance, large enough to hide the distribution of tasks.
const CHUNK: usize = 32 << 10;

/// Maximum chunks of a kernel with column sums: each has its own partial sum.
const PARTIAL_CHUNKS: usize = 64;

/// Minimum bytes for which a second thread pays.
pub const PARALLEL_FROM: usize = 64 << 10;

/// Columns of one task of a scatter.
pub const SCATTER_COLUMNS: usize = 64;

/// The pieces of one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunks {
    /// Rows, or elements of a flat kernel.
    pub length: usize,
    /// Of them, those of one chunk; the last chunk may have fewer.
    pub chunk: usize,
    /// How many chunks.
    pub chunks: usize,
}

/// Divides a launch of `program` over `rows` and `cols`.
pub fn chunks(program: &TileProgram, rows: usize, cols: usize) -> Chunks {
    let length = if program.flat { rows * cols } else { rows };
    let width = if program.flat { 1 } else { cols.max(1) };
    let chunk = match program.partials.is_empty() {
        false => length.div_ceil(PARTIAL_CHUNKS).max(CHUNK.div_ceil(width)).max(1),
        true => CHUNK.div_ceil(width).max(1),
    };
    // A flat chunk is a multiple of the lanes, so that chunks start where vectors do.
    let chunk = if program.flat { chunk.next_multiple_of(1024) } else { chunk };
    Chunks { length, chunk, chunks: length.div_ceil(chunk) }
}

//! Row kernels on the CPU: the tile program, how a body becomes one, and the SIMD that runs it.

mod attention_work;
mod chunks;
pub mod emit;
mod listing;
pub mod program;
#[allow(unsafe_code)]
pub mod simd;
mod work;

pub use chunks::{Chunks, SCATTER_COLUMNS, STREAM_FROM, chunks};
pub use work::CpuCatalog;

//! Row kernels on the CPU: the tile program, its generation from a body, and the SIMD code that runs it; and the interface of every CPU
//! kernel to a device: a task for its threads.

pub mod bind;
mod chunks;
pub mod count;
pub mod emit;
#[allow(unsafe_code)]
pub mod family;
pub mod in_place;
mod listing;
#[allow(unsafe_code)]
pub mod machine;
pub mod program;
#[allow(unsafe_code)]
pub mod simd;
#[allow(unsafe_code)]
pub mod task;

pub use chunks::{Chunks, PARALLEL_FROM, SCATTER_COLUMNS, STREAM_FROM, chunks};

//! CUDA: what is compiled is text, what is launched is a list of grids.

pub mod arch;
pub mod grid;
pub mod row;
pub mod row_config;
pub mod target;
pub mod tuning;

pub use arch::Arch;
pub use grid::{CudaSource, Grid, Grids, Tiling, Word};
pub use row_config::{Policy, RowConfig};
pub use target::CudaTarget;
pub use tuning::{BadTuning, Tuning};

pub use crate::tile::tensor_map::{MAP_WORDS, Mapped, TensorMap};

/// A kernel, `hold`, that keeps a stream busy for as many nanoseconds as its only word says.
pub const HOLD: &str = include_str!("hold.cu");

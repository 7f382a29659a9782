//! CUDA: what is compiled is text, what is launched is a list of grids.

pub mod arch;
pub mod grid;
pub mod row;
pub mod row_config;
pub mod target;
pub mod tensor_map;
pub mod tuning;

pub use arch::Arch;
pub use grid::{CudaSource, Grid, Grids, Word};
pub use row_config::{Policy, RowConfig};
pub use target::CudaTarget;
pub use tensor_map::{MAP_WORDS, Mapped, TensorMap};
pub use tuning::{BadTuning, Tuning};

/// A kernel, `hold`, that keeps a stream busy for as many nanoseconds as its only word says.
pub const HOLD: &str = include_str!("hold.cu");

/// How grids start before the one before them has ended.
pub(crate) const DEPENDENT: &str = include_str!("dependent.cuh");

/// How blocks of a cluster send each other numbers.
pub(crate) const CLUSTER: &str = include_str!("cluster.cuh");

/// Random words, as every kernel with dropout makes them.
pub(crate) const PHILOX: &str = include_str!("philox.cuh");

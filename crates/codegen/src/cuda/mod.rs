//! CUDA: sources are text, launches are lists of grids.

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

/// A CUDA text in which every part of the device-side library is replaced by one comment with its name.
pub fn without_library(text: &str) -> String {
    let parts = crate::tile::Part::ALL.map(|part| (part.name(), part.text()));
    let mut short = text.to_string();
    for (name, part) in parts.into_iter().chain(row::PRELUDE_FILES) {
        let (part, lines) = (part.trim(), part.trim().lines().count());
        short = short.replace(part, &format!("// ... {name}.cuh of the device-side library, {lines} lines"));
    }
    short
}

/// A kernel, `hold`, that keeps a stream busy for as many nanoseconds as its only word says.
pub const HOLD: &str = include_str!("hold.cu");

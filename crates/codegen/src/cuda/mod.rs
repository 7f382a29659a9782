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
    library().fold(text.to_string(), |text, (part, comment)| text.replace(part, &comment))
}

/// The text that [`without_library`] made shorter.
pub fn with_library(text: &str) -> String {
    library().fold(text.to_string(), |text, (part, comment)| text.replace(&comment, part))
}

/// The parts of the device-side library, and the comment that stands for each.
fn library() -> impl Iterator<Item = (&'static str, String)> {
    let parts = crate::tile::Part::ALL.map(|part| (part.name(), part.text()));
    parts.into_iter().chain(row::PRELUDE_FILES).map(|(name, part)| {
        let (part, lines) = (part.trim(), part.trim().lines().count());
        (part, format!("// ... {name}.cuh of the device-side library, {lines} lines"))
    })
}

/// A kernel, `hold`, that keeps a stream busy for as many nanoseconds as its only word says.
pub const HOLD: &str = include_str!("hold.cu");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_its_library_back() {
        let text = format!("#define WAITS\n{}\nkernel\n", *row::PRELUDE);
        let short = without_library(&text);
        assert!(short.lines().count() * 4 < text.lines().count() && short.contains("// ... lanes.cuh of"), "{short}");
        assert_eq!(with_library(&short), text);
    }
}

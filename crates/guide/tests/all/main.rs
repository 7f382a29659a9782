//! The programs of `examples/` that are in Rust, and the pages of ops in the guide.

mod examples;
mod ops;

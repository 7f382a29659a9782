//! The programs of `examples/` that are in Rust.

mod examples;

//! Case lists, fixtures, fuzz bodies and a browser for the tests of all crates.
#![forbid(unsafe_code)]

pub mod cases;
pub mod chromium;
pub mod drill;
pub mod effort;
pub mod fixtures;
pub mod fuzz;
pub mod hardware;
pub mod onnx_nodes;
pub mod readers;
mod scratch;

pub use scratch::Scratch;

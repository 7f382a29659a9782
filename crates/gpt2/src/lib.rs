//! GPT-2: its sizes, and the graph of a block and of the whole model.
#![forbid(unsafe_code)]

mod config;
mod model;

pub use config::{Config, UnknownModel};
pub use model::{Options, block, model};

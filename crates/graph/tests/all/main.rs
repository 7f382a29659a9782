//! Graphs from outside.

mod recompute;
mod text;

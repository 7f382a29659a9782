//! The reference from outside.

mod composites;
mod gradients;
mod interpreter;
mod random_graphs;

//! What runs on a GPU: whole graphs, products of few rows and of bytes, attention and what follows it as one launch.
//!
//! Each test needs a GPU and says so where there is none.

mod bytes;
mod cross_entropy;
mod experts;
mod graphs;
mod hopper;
mod mma;
mod one_launch;
mod products;

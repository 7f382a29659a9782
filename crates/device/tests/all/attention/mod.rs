//! Attention on CUDA, its probabilities and its gradient: every kernel through the real compiler, and with a GPU against f64.
//!
//! What is not there is said, and its tests pass.

mod backward;
mod case;
mod forward;
mod scores;
mod shared;

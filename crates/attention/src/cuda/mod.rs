//! Attention on CUDA: forward in [`forward`], its gradient in [`backward`], stored probabilities in [`scores`], row work in the same launch
//! in [`rows`], also with a projection before it in [`block`].

pub mod backward;
pub mod block;
pub mod forward;
pub mod hopper;
pub mod hopper_norm;
pub mod rows;
pub mod scores;
pub(crate) mod text;
pub mod tiles;
mod time;
mod words;

#[cfg(test)]
mod tests;

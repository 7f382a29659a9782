//! Plans from outside.

mod agreement;
mod chains;
mod layers;
mod plans;
mod recompute;
mod score;

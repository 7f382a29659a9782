//! Plans from outside.

mod chains;
mod layers;
mod plans;
mod recompute;
mod score;

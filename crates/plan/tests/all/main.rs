//! Plans from outside.

mod chains;
mod plans;
mod recompute;
mod score;

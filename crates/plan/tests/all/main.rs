//! Plans from outside.

mod plans;
mod recompute;
mod score;

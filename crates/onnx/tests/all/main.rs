//! The importer from outside.

mod control;
mod integers;
mod models;
mod narrow;
mod nodes;
mod operators;
mod patterns;
mod refusals;
mod sampling;
mod support;
mod weights;

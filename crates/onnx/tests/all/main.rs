//! The importer from outside.

mod models;
mod nodes;
mod patterns;
mod refusals;
mod support;
mod weights;

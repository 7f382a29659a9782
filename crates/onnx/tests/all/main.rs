//! The importer from outside.

mod models;
mod patterns;
mod refusals;
mod support;
mod weights;

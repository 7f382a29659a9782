//! The command from outside.

mod analyze;
mod command;
mod generate;
mod support;
mod tuning;

//! The command from outside.

mod analyze;
mod command;
#[cfg(unix)]
mod download;
mod emulate;
// They need signals, users and limits of Unix.
#[cfg(target_os = "linux")]
mod folders;
mod generate;
mod onnx;
mod profile;
#[cfg(target_os = "linux")]
mod signals;
mod story;
mod support;
mod train;
// It needs `/dev/full`.
#[cfg(target_os = "linux")]
mod trouble;
mod tuning;
mod words;

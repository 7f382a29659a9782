//! The command from outside.

mod analyze;
mod command;
#[cfg(unix)]
mod download;
mod generate;
mod onnx;
mod support;
// It needs `/dev/full`.
#[cfg(target_os = "linux")]
mod trouble;
mod tuning;

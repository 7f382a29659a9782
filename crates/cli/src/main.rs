//! The `deuteron` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(deuteron_cli::run(std::env::args_os()))
}

//! The `deuteron` command. It converts arguments into calls of the library, and results into text.
//!
//! A library, so that the Python package contains the same command ([`run`]) with the same messages.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[macro_use]
mod output;

pub mod analyze;
mod arrays;
mod bench;
mod bench_crossover;
mod bench_matmul;
mod bench_model;
mod check;
mod completions;
pub mod device;
pub mod doctor;
mod emulate;
mod explain;
mod fuse;
mod generate;
mod guide;
mod input;
pub mod kernel;
mod ladder;
mod machine_file;
mod model;
mod onnx_file;
mod ops;
mod perplexity;
mod profile;
mod show;
mod stored_file;
mod train;
pub mod tuning_file;

use std::ffi::OsString;

use clap::{CommandFactory, Parser, Subcommand};

/// Kernel fusion for transformers: find what to fuse, generate the fused kernels, verify them, measure the gain.
#[derive(Parser)]
#[command(name = "deuteron", version, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 success, 1 a verification or an expectation failed, 2 wrong usage or input, or output that could not be written."
)]
struct Command {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Report what to fuse on a machine, why, and the predicted gain; runs no kernels
    Analyze(analyze::Arguments),
    /// Explain a code of the planner, such as E-PLAN-004, or the text form of graphs
    Explain(explain::Arguments),
    /// Plan a graph, run it unfused and fused, verify both against f64, and measure them
    Fuse(fuse::Arguments),
    /// Measure the kernels of a graph before and after fusing: time, memory traffic, cache hits, occupancy, registers, units
    Profile(profile::Arguments),
    /// Generate text with a GPT-2: a small one that is part of this command, or one from a folder or from the local Hugging Face cache
    Generate(generate::Arguments),
    /// Measure how well a GPT-2 predicts a text
    Perplexity(perplexity::Arguments),
    /// Train a GPT-2 on text or tokens, from scratch or from a checkpoint; Ctrl-C saves a checkpoint, --resume continues from it
    Train(Box<train::Arguments>),
    /// Time the fused ops of the catalogue, or a model's prompt and decoding step, against unfused kernels
    Bench(bench::Arguments),
    /// List the catalogue of fused ops
    Ops(ops::Arguments),
    /// Print the generated kernels of an op or a graph, or run GPU kernels on the emulator
    Kernel(kernel::Arguments),
    /// List the kernels of an op from naive to shipped, or print one
    Ladder(ladder::Arguments),
    /// Run random graphs under every plan against the f64 reference
    Check(check::Arguments),
    /// List the exercises of the guide, or check an answer
    Guide(guide::Arguments),
    /// Show devices, instruction sets and copy bandwidth
    Doctor(doctor::Arguments),
    /// Print the completion script for a shell
    Completions(completions::Shells),
    /// Print the manual page of this command or of a subcommand
    Man(completions::Pages),
}

/// The outcome of a command that did not end in an error.
pub enum Outcome {
    /// all is well
    Good,
    /// a verification or an expectation failed
    Failed,
}

impl Outcome {
    /// Good if all is well.
    fn of(good: bool) -> Outcome {
        if good { Outcome::Good } else { Outcome::Failed }
    }
}

/// Runs the command with its arguments, the first of which is its name, and returns its exit code.
pub fn run(words: impl IntoIterator<Item = OsString>) -> u8 {
    let command = match Command::try_parse_from(words) {
        Ok(command) => command,
        Err(error) => {
            // Help and versions are such errors too; they are what was asked for.
            let (printed, code) = (error.print(), error.exit_code() as u8);
            if !error.use_stderr() {
                output::keep(printed);
            }
            return ended(code);
        }
    };
    let outcome = match command.what {
        What::Analyze(arguments) => analyze::run(&arguments),
        What::Explain(arguments) => explain::run(&arguments),
        What::Fuse(arguments) => fuse::run(&arguments),
        What::Profile(arguments) => profile::run(&arguments),
        What::Generate(arguments) => generate::run(&arguments),
        What::Perplexity(arguments) => perplexity::run(&arguments),
        What::Train(arguments) => train::run(&arguments),
        What::Bench(arguments) => bench::run(&arguments),
        What::Ops(arguments) => ops::run(&arguments),
        What::Kernel(arguments) => kernel::run(&arguments),
        What::Ladder(arguments) => ladder::run(&arguments),
        What::Check(arguments) => check::run(&arguments),
        What::Guide(arguments) => guide::run(&arguments),
        What::Doctor(arguments) => doctor::run(&arguments),
        What::Completions(arguments) => completions::complete(&arguments, Command::command()),
        What::Man(arguments) => completions::manual(&arguments, Command::command()),
    };
    ended(match outcome {
        Ok(Outcome::Good) => 0,
        Ok(Outcome::Failed) => 1,
        Err(error) => {
            errln!("error: {}", without_numbers(&format!("{error:#}")));
            2
        }
    })
}

/// A message without the system's numbers of its errors: `(os error 2)` says nothing that the words before it do not.
fn without_numbers(message: &str) -> String {
    let mut parts = message.split(" (os error ");
    let first = parts.next().unwrap_or_default().to_string();
    parts.fold(first, |text, part| {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        match part[digits..].strip_prefix(')') {
            Some(rest) if digits > 0 => text + rest,
            _ => text + " (os error " + part,
        }
    })
}

/// The exit code of a command: `code`, unless some output could not be written.
fn ended(code: u8) -> u8 {
    match (output::finish(), code) {
        (Ok(()), code) => code,
        (Err(error), code) => {
            errln!("error: cannot write to standard output; some output is lost: {error}");
            if code == 0 { 2 } else { code }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_no_numbers_of_system_errors() {
        let plain = "a.txt: No such file or directory";
        assert_eq!(without_numbers("a.txt: No such file or directory (os error 2)"), plain);
        assert_eq!(without_numbers("`b` (os error 13): denied (os error 13); twice"), "`b`: denied; twice");
        assert_eq!(without_numbers("the file ` (os error x)`"), "the file ` (os error x)`");
        assert_eq!(without_numbers("nothing"), "nothing");
    }
}

//! Chores of the repository: `cargo xtask test`, `cargo xtask bench --machine NAME`, `cargo xtask fuzz`,
//! `cargo xtask benchmarks`, `cargo xtask guide`, `cargo xtask box`, `cargo xtask bundle`, `cargo xtask wheels`, `cargo xtask mutate`, `cargo xtask drill`, `cargo xtask sbom`.
#![forbid(unsafe_code)]

mod bench;
mod benchmarks;
mod bundle;
mod drill;
mod fetch;
mod files;
mod guide;
mod hardware;
mod log;
mod model_box;
mod mutate;
mod phases;
mod python;
mod reproduce;
mod sanitize;
mod sbom;
mod test;
mod wheels;

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

const USAGE: &str = "usage:
  cargo xtask test                   format, lints, docs and all tests: what CI runs
  cargo xtask bench --machine NAME   measure the bars and append them to bench/results/NAME.csv
  cargo xtask bench --machine NAME --ladders
                                     measure the ladders of row work, attention and matmul and append them to bench/results/NAME-ladder.csv and NAME-matmul-ladder.csv
  cargo xtask benchmarks [--check]   write the tables and pictures of documents from the rows in bench/results; with --check fail if they differ
  cargo xtask guide [--pages]        build the guide as HTML into target/guide/html and run its commands; with --pages do not run them
  cargo xtask guide --bless [PAGE ..]  write the numbers that the commands of these pages print now into them; of all pages by default
  cargo xtask box [--short] [WORD]...
                                     train the model that comes with the command, into crates/gpt2/box; words go to `deuteron train`;
                                     with --short a small model for a few steps, into target/box
  cargo xtask bundle                 binaries and scripts for a machine with a GPU, into bundle/
  cargo xtask wheels                 wheels for manylinux on x86-64 and aarch64, into target/wheels/release
  cargo xtask fuzz [--inputs N | --seconds S] [--seed N] [--csv FILE] [--target NAME]
                                     mutated files into every reader: text_graph, onnx, machine, analysis, expectations;
                                     graphs and machines of other numbers into plan, kernel, analyze, on_machine
  cargo xtask mutate [--csv FILE] [WORD]...
                                     small mistakes in a copy of the tree, each against the test that must find it;
                                     those whose list, file or test has one of the words; FILE gets a row for each
  cargo xtask drill [PART]...        faults that take long to try, with a row each in bench/results/drills.csv: alloc, kill, folders,
                                     signals, address, thread, miri, loom, reproduce
  cargo xtask sbom                   what a release is built from, as CycloneDX, into target/deuteron.cdx.json";

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["test"] => test::run(),
        ["bench", "--machine", name] => bench::run(name),
        ["bench", "--machine", name, "--ladders"] => bench::ladders(name),
        ["benchmarks", words @ ..] => benchmarks::run(words),
        ["bundle"] => bundle::run(),
        ["wheels"] => wheels::run(),
        ["guide", words @ ..] => guide::run(words),
        ["box", words @ ..] => model_box::run(words),
        ["sbom"] => sbom::run(),
        ["mutate", words @ ..] => mutate::run(words),
        ["drill", words @ ..] => drill::run(words),
        ["fuzz", rest @ ..] => test::ended(test::fuzz(rest)?),
        _ => bail!("{USAGE}"),
    }
}

fn root() -> Result<PathBuf> {
    Ok(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize()?)
}

/// The cargo that runs this.
fn program() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".into())
}

/// Runs a command that must succeed.
fn succeed(command: &mut Command, what: &str) -> Result<()> {
    let status = command.status().with_context(|| format!("{what} could not be started"))?;
    ensure!(status.success(), "{what} failed");
    Ok(())
}

/// What a command prints, without the ends of lines around it.
fn printed(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{:?} could not be started", command.get_program()))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// For every command that builds: CI builds nothing twice, so it keeps nothing for a second time. Nor does the first build of a clone: keeping 2 GB
/// takes it 5 % longer. Later builds follow what is there, so that nothing is compiled anew for another choice.
fn building(command: &mut Command) -> &mut Command {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if !is_set("CARGO_INCREMENTAL") && (is_set("CI") || !keeps_parts()) {
        command.env("CARGO_INCREMENTAL", "0");
    }
    command
}

/// Whether earlier builds kept parts of the crates; cargo itself, which builds this program, keeps those of this program.
fn keeps_parts() -> bool {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let folder = root().map_or(target.clone(), |root| root.join(target)).join("debug").join("incremental");
    let is_of_a_crate =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("deuteron_"));
    files::entries(&folder).is_ok_and(|kept| kept.iter().any(is_of_a_crate))
}

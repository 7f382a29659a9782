//! Chores of the repository: `cargo xtask test`, `cargo xtask bench --machine NAME`, `cargo xtask fuzz`,
//! `cargo xtask bundle`.
#![forbid(unsafe_code)]

mod bench;
mod bundle;
mod hardware;
mod python;

use std::path::PathBuf;
use std::process::{Child, Command};

use anyhow::{Context, Result, bail};

const USAGE: &str = "usage:
  cargo xtask test                   format, lints, docs and all tests: what CI runs
  cargo xtask bench --machine NAME   measure the bars and append them to bench/results/NAME.csv
  cargo xtask bundle                 binaries and scripts for a machine with a GPU, into bundle/
  cargo xtask fuzz [--inputs N | --seconds S] [--target NAME]
                                     mutated files into every reader: text_graph, onnx, machine, analysis, expectations";

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["test"] => test(),
        ["bench", "--machine", name] => bench::run(name),
        ["bundle"] => bundle::run(),
        ["fuzz", rest @ ..] => ended(fuzz(rest)?),
        _ => bail!("{USAGE}"),
    }
}

/// Cheap checks first; the tests last, so that cargo's own summary ends the output. What keeps one core busy, or none, runs beside
/// what comes next.
fn test() -> Result<()> {
    let root = root()?;
    let nvrtc = std::thread::spawn({
        let root = root.clone();
        move || hardware::nvrtc(&root)
    });
    cargo(&["fmt", "--all", "--check"], &[])?;
    cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"], &[])?;
    cargo(&["doc", "--workspace", "--no-deps", "--quiet"], &[("RUSTDOCFLAGS", "-D warnings")])?;
    check_other_target()?;
    // Here, where numbers that overflow are told, and nothing is compiled once more for it.
    let fuzzing = fuzz(&["--seconds", "5"])?;
    let python = python::install(&root);
    // Whatever became of the other, nothing is left running.
    ended(fuzzing)?;
    let python = python?;
    let mut building = Command::new(program()).args(["test", "--workspace", "--no-run", "--quiet"]).spawn()?;
    let tested = python.map_or(Ok(()), |python| python::test(&root, &python));
    let built = building.wait()?;
    tested?;
    if !built.success() {
        bail!("cargo test --no-run failed");
    }
    let nvrtc = nvrtc.join().ok().flatten();
    let needs = hardware::needs(&root)?;
    let skipped = |count: usize, there: bool| if there { 0 } else { count };
    println!("tests that need NVRTC: {}, {} skipped", needs.nvrtc, skipped(needs.nvrtc, nvrtc.is_some()));
    println!("tests that need a GPU: {}, {} skipped", needs.gpu, skipped(needs.gpu, hardware::has_gpu()));
    let folder = nvrtc.map(|folder| folder.to_string_lossy().into_owned());
    let environment: Vec<(&str, &str)> = folder.iter().map(|path| ("DEUTERON_NVRTC_ENV", path.as_str())).collect();
    cargo(&["test", "--workspace"], &environment)
}

/// Starts mutated files into every reader. The program is built with the features of the whole workspace, so that what it shares with
/// tests is compiled once.
fn fuzz(words: &[&str]) -> Result<Child> {
    let built = bundle::executables(&root()?, &["build", "--package", "deuteron-testkit", "--bin", "deuteron-fuzz"])?;
    let (_, program) = built.into_iter().next().context("cargo built no deuteron-fuzz")?;
    println!("deuteron-fuzz {}", words.join(" "));
    Command::new(program).args(words).spawn().context("deuteron-fuzz could not be started")
}

fn ended(mut fuzzing: Child) -> Result<()> {
    if !fuzzing.wait()?.success() {
        bail!("deuteron-fuzz failed");
    }
    Ok(())
}

fn root() -> Result<PathBuf> {
    Ok(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize()?)
}

/// aarch64 must at least compile. Where its standard library is not installed, say so and go on.
fn check_other_target() -> Result<()> {
    const TARGET: &str = "aarch64-unknown-linux-gnu";
    let listed = Command::new("rustup").args(["target", "list", "--installed"]).output();
    let installed = listed.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(TARGET));
    if !installed {
        println!("{TARGET} is not installed here: not checked");
        return Ok(());
    }
    cargo(&["check", "--workspace", "--quiet", "--target", TARGET], &[])
}

/// The cargo that runs this.
fn program() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".into())
}

fn cargo(arguments: &[&str], environment: &[(&str, &str)]) -> Result<()> {
    println!("cargo {}", arguments.join(" "));
    let mut command = Command::new(program());
    command.args(arguments).envs(environment.iter().copied());
    let status = command.status().context("cargo could not be started")?;
    if !status.success() {
        bail!("cargo {} failed", arguments.join(" "));
    }
    Ok(())
}
